"""The two conditions of scale-invariant attention, predicted and measured.

`predict` and `expected` give the theory of any score_mod, `measure` and `measure_gaussian` the
same quantities on rows of logits, `judge` and `judge_all` the verdict. `python -m analysis report`
writes all of it down with figures, and `python -m analysis gallery` draws every mechanism of
`score_mods` on one page.
"""

from analysis.conditions import expected, expected_entropy, limits, predict
from analysis.gates import gated_shares
from analysis.invariance import judge, judge_all
from analysis.measure import measure, measure_gaussian
from analysis.ranges import law_edges, law_mass

__all__ = [
    "expected",
    "expected_entropy",
    "gated_shares",
    "judge",
    "judge_all",
    "law_edges",
    "law_mass",
    "limits",
    "measure",
    "measure_gaussian",
    "predict",
]
