"""`python -m analysis gallery`: every mechanism of `score_mods.catalogue` on one page.

What each does to a tile of scores and to a score at a distance (`gallery_cards`), and what is
expected of it on independent Gaussian logits: total attention by decade of distance, and the
verdicts of `analysis.invariance`.
"""

from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from analysis import plots
from analysis.conditions import ScoreMod, expected
from analysis.gallery_cards import LENGTH, TILE, Card, card
from analysis.invariance import judge_all
from analysis.measure import measure_gaussian
from analysis.report import markdown_table, whole_folder
from analysis.verdict import SLOPE, Verdict
from score_mods import catalogue

DECADES = (1, 10, 100, 1000, 10000)
ROWS = 128

Judged = dict[str, tuple[Verdict, Tensor]]  # verdict and ln E[Z] by decade, by mechanism


def gallery(out: str, only: tuple[str, ...] = ()) -> str:
    """Draw every mechanism of the catalogue; write `gallery.md` and its figures.

    Args:
        out: Folder to write.
        only: Names of the mechanisms to draw; all if empty.

    Returns:
        The table of verdicts.

    Raises:
        ImportError: matplotlib is missing.
        OSError: The folder cannot be written.
        ValueError: A name is not in the catalogue.
    """
    if find_spec("matplotlib") is None:
        raise ImportError(
            "the gallery needs matplotlib: pip install 'scale-invariant-attention[plot]'"
        )
    unknown = set(only) - {m.name for m in catalogue}
    if unknown:
        raise ValueError(
            f"only: expected names of score_mods.catalogue, got {', '.join(sorted(unknown))}"
        )
    with whole_folder(out) as folder:
        cards = [card(m) for m in catalogue if not only or m.name in only]
        # Many share a law, and are judged once: by the name of the first of them.
        first: dict[ScoreMod | None, str] = {}
        for c in cards:
            first.setdefault(c.law, c.mechanism.name)
        laws = {name: _first_head(law) for law, name in first.items() if law is not None}
        totals = {n: expected(law, DECADES, q_idx=LENGTH - 1).log_total for n, law in laws.items()}
        verdicts = judge_all(measure_gaussian(laws, LENGTH, rows=ROWS)).verdicts if laws else ()
        by_first = {v.mechanism: v for v in verdicts}
        judged = {
            c.mechanism.name: (by_first[first[c.law]], totals[first[c.law]])
            for c in cards
            if c.law is not None
        }
        table = _table(cards, judged)
        for c in cards:
            _draw(folder / f"{c.mechanism.name}.png", c, judged)
        (folder / "gallery.md").write_text(_page(cards, table), encoding="utf-8")
    return table


def _first_head(mod: ScoreMod) -> ScoreMod:
    """The mod with what it has for head 0, whichever head it is given."""

    def law(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mod(score, b, h * 0, q_idx, kv_idx)

    return law


def _draw(path: Path, c: Card, judged: Judged) -> None:
    name = c.mechanism.name
    with plots.figure(path, 4, height=2.1) as axes:
        first, *middle, last = axes[0]
        plots.tile(first, c.tile).set_title(c.values)
        for ax, panel in zip(middle, c.panels, strict=False):
            plots.curves(
                ax, panel.x, panel.curves, panel.xlabel, scales=panel.scales, floor=panel.floor
            ).set_title(panel.title)
        for ax in middle[len(c.panels) :]:
            ax.set_axis_off()
        if name not in judged:
            last.set_axis_off()
            return
        verdict, total = judged[name]
        both = {name: total, "plain softmax": expected(None, DECADES).log_total}
        plots.curves(last, DECADES[:-1], both, "decade from", scales=("log", "linear"), floor=-9.0)
        last.get_legend().remove()
        last.set_title(f"total attention {verdict.total.verdict}")


def _table(cards: list[Card], judged: Judged) -> str:
    decades = [f"{a:,} to {b:,}" for a, b in pairwise(DECADES)]
    header = ["mechanism", "exact as", "total attention", "negentropy", "weak sparsity", *decades]
    rows = []
    for c in cards:
        name = c.mechanism.name
        cells = ["-"] * (len(header) - 2)
        if name in judged:
            v, total = judged[name]
            cells = [v.total.verdict, v.negentropy.verdict, v.weak_sparsity.verdict]
            cells += [
                f"{round(x, 1) + 0.0:.1f}" if x > -torch.inf else "none" for x in total.tolist()
            ]
        rows.append([f"[{name}](#{name})", c.mechanism.kind, *cells])
    return markdown_table(header, rows)


def _page(cards: list[Card], table: str) -> str:
    parts = [
        f"""# Gallery

Every mechanism of `score_mods.catalogue`, made by the call under its name (with T positions; head
0 and layer 0 are shown). From left to right:

1. what it makes of the same {TILE} queries and keys, which share a direction, so that their plain
   scores are 1.5 and some noise; grey where the key is not seen;
2. the factor on a score by distance, for the last of {LENGTH:,} queries, and
3. what is added to it. In their place: for masks, how many keys a query sees, and which; for
   rotations, the score of a key that is like the query, and the wavelengths; where the change is
   not affine in the score, what becomes of a score, and the mean weight; for sinks, the share of
   the attention that keys get, and lse;
4. ln E[Z], the expected total attention by decade of distance, on independent N(0, 1) logits:
   black for the mechanism, dashed for plain softmax. Total attention *holds* where its slope
   against ln t lies within ±{SLOPE}.

Rotating independent queries and keys leaves their scores distributed as they were, so that in the
fourth panel rotations are plain softmax, but for a factor. What is no function of the score has no
such panel.

The verdicts are those of `analysis.judge`, on {ROWS} rows of {LENGTH:,} keys; the numbers are ln
E[Z] in decades of distance.

{table}
"""
    ]
    for c in cards:
        m = c.mechanism
        parts.append(
            f"## {m.name}\n\n{m.kind}: {m.formula} ({m.source})\n\n`{m.example}`\n\n"
            f"![{m.name}]({m.name}.png)\n"
        )
    return "\n".join(parts)
