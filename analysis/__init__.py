"""The two conditions of scale-invariant attention, predicted and measured.

`expected` and `predict` give the theory of any score_mod, `measure` and `measure_gaussian` the
same quantities on rows of logits, and `judge` the verdict. `python -m analysis report` writes all
of it down with figures.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "expected": "conditions",
    "expected_entropy": "conditions",
    "law_edges": "ranges",
    "law_mass": "ranges",
    "limits": "conditions",
    "predict": "conditions",
    "measure": "measure",
    "measure_gaussian": "measure",
    "judge": "invariance",
    "judge_all": "invariance",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'analysis' has no attribute {name!r}")
    return getattr(import_module(f"analysis.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
