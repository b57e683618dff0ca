"""`python -m analysis report`: what each mechanism does, written down with figures.

On Gaussian logits (`report_gaussian`) measurement stands beside exact theory; on a model
(`report_model`) the same is measured on its own queries and keys. This module holds what both
share: the settings and their checks, the mechanisms by name, and a folder that appears whole or
not at all.
"""

import json
import math
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis.conditions import ScoreMod
from score_mods import alibi, logn, scale_invariant, ssmax

SCHEMA = "scale-invariant-attention/report/1"
LAST = 100  # tokens whose share of attention is followed


@dataclass(frozen=True)
class Baseline:
    """A mechanism to compare with: how it is made for a number of heads, and what it does."""

    make: Callable[[int], ScoreMod | None]
    what: str


BASELINES = {
    "none": Baseline(lambda heads: None, "plain softmax"),
    "logn": Baseline(
        lambda heads: logn(s=0.4), "multiplies the scores of a row of n keys by 0.4 ln n"
    ),
    "ssmax": Baseline(
        lambda heads: ssmax(0.43), "multiplies the scores of a row of n keys by 0.43 ln n"
    ),
    "alibi": Baseline(alibi, "subtracts t times the head's slope, t/256 if there is one head"),
}
NAMES = (*BASELINES, "scale_invariant")


@dataclass(frozen=True)
class Settings:
    """What a report is made of.

    Attributes:
        model: "gaussian", "smollm2", a folder, a `.gguf` file or a Hugging Face id.
        gguf: Name of a GGUF file in that folder or repository.
        text: File with the text a model reads; by default the standard library's source.
        mods: Names of mechanisms, among `NAMES`.
        lengths: Context lengths in tokens, at least 512; if empty, 1,024 to 65,536 (8,192 for a
            model).
        tau: Scales of scale-invariant attention in tokens; if empty, 10 and 1000 (3000 for
            a model); 10 alone where 1000 does not fit into the length.
        rows: Rows of attention (queries) that are measured, at least 32; if 0, 256 (128).
        seed: Seed of the draws.
        out: Folder to write.
    """

    model: str = "gaussian"
    gguf: str | None = None
    text: str | None = None
    mods: tuple[str, ...] = ("none", "logn", "alibi", "scale_invariant")
    lengths: tuple[int, ...] = ()
    tau: tuple[float, ...] = ()
    rows: int = 0
    seed: int = 0
    out: str = "reports"

    @property
    def gaussian(self) -> bool:
        """Whether the logits are drawn rather than a model's."""
        return self.model == "gaussian"


@dataclass(frozen=True)
class Findings:
    """What one kind of report has to say.

    Attributes:
        title: First line of `report.md`.
        text: Its body, Markdown.
        table: The verdicts, as they are printed.
        data: The numbers of `report.json`.
    """

    title: str
    text: str
    table: str
    data: dict[str, Any] = field(repr=False)


def report(settings: Settings) -> str:
    """Measure, and write `report.md`, `report.json` and the figures.

    Args:
        settings: What to measure and where to write.

    Returns:
        The verdict table.

    Raises:
        ImportError: An optional package is missing.
        OSError: A file cannot be read or written.
        TypeError: A setting has the wrong type.
        ValueError: A setting is out of its range, or the model cannot be measured.
    """
    settings = _checked(settings)
    missing = [name for name in ("matplotlib", "tqdm") if find_spec(name) is None]
    if missing:
        needed = " and ".join(missing)
        raise ImportError(
            f"a report needs {needed}: pip install 'scale-invariant-attention[plot]'"
        )
    with whole_folder(settings.out) as folder:
        if settings.gaussian:
            from analysis.report_gaussian import survey_gaussian

            with one_thread():
                findings = survey_gaussian(settings, folder)
        else:
            from analysis.report_model import survey_model

            findings = survey_model(settings, folder)
        record = findings.data | {
            "schema": SCHEMA, "settings": asdict(settings), "versions": _versions()
        }  # fmt: skip
        text = json.dumps(_plain(record), indent=1, allow_nan=False)
        (folder / "report.json").write_text(text + "\n", encoding="utf-8")
        used = ", ".join(f"{name} {number}" for name, number in _versions().items())
        body = f"# {findings.title}\n\n{findings.text.strip()}\n\n{used}; seed {settings.seed}.\n"
        (folder / "report.md").write_text(body, encoding="utf-8")
    return findings.table


def mechanisms(
    names: tuple[str, ...],
    tau: tuple[float, ...],
    heads: int,
    *,
    measured: tuple[Tensor, Tensor] | None = None,
) -> dict[str, ScoreMod | None]:
    """Make the named mechanisms, scale-invariant attention once for each tau.

    Args:
        names: Among `NAMES`.
        tau: Scales in tokens.
        heads: Number of query heads.
        measured: sigma and mu of the base logits `[H]`; adds to each scale-invariant mechanism,
            which assumes 1 and 0, one that is given these.

    Returns:
        Mechanisms by the label they have in tables and figures.
    """
    made: dict[str, ScoreMod | None] = {}
    for name in names:
        if name != "scale_invariant":
            made[name] = BASELINES[name].make(heads)
            continue
        for scale in tau:
            label = f"scale_invariant({scale:g})"
            made[label] = scale_invariant(scale)
            if measured is not None:
                sigma, mu = (x.float() for x in measured)
                made[f"{label}, calibrated"] = scale_invariant(scale, sigma=sigma, mu=mu)
    return made


@contextmanager
def one_thread() -> Iterator[None]:
    """Measure in one thread: operations this small cost more in waiting than threads give."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def described(names: tuple[str, ...]) -> str:
    """What the named mechanisms are, as a Markdown list."""
    known = {name: baseline.what for name, baseline in BASELINES.items()} | {
        "scale_invariant": "multiplies by a_t and adds m_t of the law with tau in the brackets"
    }
    return "\n".join(f"- `{name}`: {known[name]}" for name in names)


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; the first column is left-aligned, the others right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))


def _checked(settings: Settings) -> Settings:
    """The settings with their defaults filled in, after every check that needs no model."""
    unknown = [name for name in settings.mods if name not in NAMES]
    if unknown or not settings.mods:
        raise ValueError(f"mods: expected some of {', '.join(NAMES)}, got {unknown}")
    default = (1024, 4096, 16384, 65536) if settings.gaussian else (1024, 2048, 4096, 8192)
    lengths = tuple(sorted(set(settings.lengths or default)))
    if lengths[0] < 512:
        raise ValueError(f"lengths: expected at least 512 tokens, got {lengths[0]}")
    fits = (lengths[-1] - 1) / 3  # the largest tau with two ranges, up to tau and to 3 tau
    tau = settings.tau or ((10.0, 1000.0) if fits >= 1000 else (10.0,))
    if not settings.gaussian:
        tau = settings.tau or (10.0, 3000.0)
    for scale in tau:
        if not 0 < scale < math.inf or (settings.gaussian and scale > fits):
            limit = f" and at most {fits:g} at this length" if settings.gaussian else ""
            raise ValueError(f"tau: expected numbers above 0{limit}, got {scale:g}")
    rows = settings.rows or (256 if settings.gaussian else 128)
    if rows < 32:
        raise ValueError(f"rows: expected at least 32, got {rows}")
    if settings.seed < 0:
        raise ValueError(f"seed: expected at least 0, got {settings.seed}")
    if settings.gaussian and (settings.text or settings.gguf):
        raise ValueError("text and gguf need a model, got --model gaussian")
    mods = settings.mods
    if not settings.gaussian:  # a model is always shown as it is, too
        mods = ("none", *(name for name in mods if name != "none"))
    return replace(settings, mods=mods, lengths=lengths, tau=tau, rows=rows)


@contextmanager
def whole_folder(name: str) -> Iterator[Path]:
    """Yield a temporary folder whose files move into `name` at the end, if no error came.

    Raises:
        OSError: `name` cannot be made or written; before anything is yielded.
        ValueError: `name` is empty.
    """
    if not name.strip():
        raise ValueError(f"out: expected a folder, got {name!r}")
    out = Path(name)
    near = next(place for place in (out, *out.absolute().parents) if place.exists())
    if not near.is_dir():
        raise NotADirectoryError(f"out: {near} is not a folder")
    try:
        temporary = tempfile.TemporaryDirectory(prefix=".report-", dir=near)
    except OSError as error:
        raise OSError(f"out: {out} cannot be written: {error.strerror}") from error
    with temporary as made:
        yield Path(made)
        out.mkdir(parents=True, exist_ok=True)
        for path in sorted(Path(made).iterdir()):
            shutil.move(path, out / path.name)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _plain(value: Any) -> Any:
    """`value` with arrays as lists and numbers that are not finite as None, for JSON."""
    if isinstance(value, Mapping):
        return {str(key): _plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    if isinstance(value, np.ndarray | np.generic | Tensor):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
