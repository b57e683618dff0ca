"""Tables and figures of the rows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from analysis.plots import COLOURS, by_length, curves, figure, legend
from analysis.report import markdown_table
from benchmarks.extension.rows import Row


class Grid:
    """Rows by kind of text, label of the setting and length.

    Args:
        rows: of one model; the order of settings and kinds is that of their first rows.
    """

    def __init__(self, rows: list[Row]) -> None:
        settings = [row["settings"] for row in rows]
        self.kinds, self.labels, self.lengths = (
            list(dict.fromkeys(x[key] for x in settings)) for key in ("text", "label", "length")
        )
        self.lengths.sort()
        self.last = settings[0]["last"]
        self.needles = settings[0]["needles"]
        self._rows = {
            (x["text"], x["label"], x["length"]): row
            for x, row in zip(settings, rows, strict=True)
        }

    def at(self, kind: str, label: str, length: int) -> Row | None:
        """The row, if it was measured."""
        return self._rows.get((kind, label, length))


def table(grid: Grid) -> str:
    """Markdown: how near the goal is, then loss and needles by length for each kind of text."""
    parts = [_goal(grid)]
    for kind in grid.kinds:
        parts += [
            f"### {kind}\n\nNats a token over the whole context (`recent`: over what it reads) / "
            f"over its last {grid.last:,} tokens.",
            _by_length(grid, kind, lambda row: f"{fmean(row['loss']):.3f} / {_last(row):.3f}"),
        ]
        if grid.needles:
            parts += ["Needles found.", _by_length(grid, kind, _found)]
    return "\n\n".join(parts)


def draw(grid: Grid, folder: Path) -> list[str]:
    """Draw loss by position in the longest contexts, and needles by length, if there are any.

    Drawn are, in as many colours as there are, the settings with the least loss at the end of
    those contexts, which they read whole, and the positions from 1/128 of the length on.

    Returns:
        The names of the files.
    """
    longest = grid.lengths[-1]
    ends = {
        label: fmean(_last(row) for row in rows)
        for label in grid.labels
        if (rows := [row for kind in grid.kinds if (row := grid.at(kind, label, longest))])
        and None not in rows[0]["by_position"]
    }
    best = sorted(ends, key=lambda label: ends[label])[: len(COLOURS)]
    shown = [label for label in ends if label in best]
    files = ["loss_by_position.png"]
    with figure(folder / files[0], 1, len(grid.kinds), height=3.2) as axes:
        for ax, kind in zip(axes[:, 0], grid.kinds, strict=True):
            there = {label: row for label in shown if (row := grid.at(kind, label, longest))}
            if there:
                edges = next(iter(there.values()))["edges"]
                first = sum(edge * 128 < longest for edge in edges)
                middles = [(low + high) / 2 for low, high in pairwise(edges[first:])]
                losses = {label: row["by_position"][first:] for label, row in there.items()}
                curves(ax, middles, losses, "position (tokens)", scales=("log", "linear"))
            ax.set(title=kind, ylabel="loss (nats)")
    if grid.needles:
        files.append("needles.png")
        with figure(folder / files[1], len(grid.kinds), height=3.2, sharey=True) as axes:
            for ax, kind in zip(axes[0], grid.kinds, strict=True):
                found = {label: _shares(grid, kind, label) for label in shown}
                by_length(ax, grid.lengths, found, "share of needles found")
                ax.set(title=kind, ylim=(-0.03, 1.03))
            legend(axes[0, 0], shown, columns=2, measured=f"of {grid.needles} samples")
    return files


def _last(row: Row) -> float:
    return fmean(row["last"])


def _found(row: Row) -> str:
    needles = row.get("needles", ())
    return f"{sum(needles)} of {len(needles)}" if needles else ""


def _shares(grid: Grid, kind: str, label: str) -> list[float]:
    rows = [grid.at(kind, label, length) or {} for length in grid.lengths]
    return [fmean(row["needles"]) if "needles" in row else float("nan") for row in rows]


def _by_length(grid: Grid, kind: str, cell: Callable[[Any], str]) -> str:
    lines = []
    for label in grid.labels:
        found = [grid.at(kind, label, length) for length in grid.lengths]
        lines.append([f"`{label}`", *(cell(row) if row else "" for row in found)])
    return markdown_table(["", *(f"{length:,}" for length in grid.lengths)], lines)


def _goal(grid: Grid) -> str:
    """What a setting costs in the shortest contexts and gains or loses in the longest."""
    short, long = grid.lengths[0], grid.lengths[-1]
    lines = []
    for label in grid.labels:
        line = [f"`{label}`"]
        for kind in grid.kinds:
            for name, plain, length in (("loss", "rope", short), ("last", "recent", long)):
                pair = grid.at(kind, label, length), grid.at(kind, plain, length)
                line.append(_difference(*pair, name))
        lines.append(line)
    header = ["", *(f"{kind}: {name}" for kind in grid.kinds for name in ("cost", "rise"))]
    return (
        f"Cost is the loss over {short:,} tokens less that of `rope`; rise is the loss over the "
        f"last {grid.last:,} of {long:,} tokens less that of `recent`. Nats a token, the mean of "
        "the differences between the same starts and its standard error.\n\n"
        + markdown_table(header, lines)
    )


def _difference(row: Row | None, plain: Row | None, name: str) -> str:
    if row is None or plain is None:
        return ""
    each = [a - b for a, b in zip(row[name], plain[name], strict=True)]
    error = f" ± {stdev(each) / len(each) ** 0.5:.3f}" if len(each) > 1 else ""
    return f"{fmean(each):+.3f}{error}"
