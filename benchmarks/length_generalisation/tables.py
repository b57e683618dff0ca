"""The rows of a folder as a table and figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from analysis.plots import against, by_length, figure
from analysis.report import markdown_table
from benchmarks.length_generalisation.methods import METHODS
from benchmarks.rows import rows_of

Row = dict[str, Any]

# Positions, then temperatures beside scale invariance.
_PANELS = (
    ("rope", "p_rope", "nope", "rope_ntk", "yarn", "alibi", "scale_invariant"),
    tuple(n for n, method in METHODS.items() if method.attention in ("logn", "scale_invariant")),
)


def report(folder: Path) -> str:
    """Draw the rows of a folder into it, and return their table in Markdown.

    Raises:
        ValueError: if it has none, or rows of different data, sizes or steps.
    """
    rows: dict[str, list[Row]] = {}
    settings = set()
    for row in rows_of(folder, "validation", "attention").values():
        own = ("method", "seed")
        settings.add(json.dumps({k: x for k, x in row["settings"].items() if k not in own}))
        rows.setdefault(row["settings"]["method"], []).append(row)
    if len(settings) > 1:
        raise ValueError(f"rows of {folder} must have the same data, sizes and steps")
    lengths = [str(length) for length in json.loads(settings.pop())["lengths"]]
    shown = {name: rows[name] for name in METHODS if name in rows}
    files = [_draw_losses(shown, lengths, folder), _draw_attention(shown, lengths, folder)]
    if all("needle" in row for found in shown.values() for row in found):
        files.append(_draw_needles(shown, lengths, folder))
    table = _table(rows, lengths)
    figures = "\n".join(f"![]({name})" for name in files)
    (folder / "table.md").write_text(f"{table}\n\n{figures}\n", encoding="utf-8")
    return table


def _table(rows: dict[str, list[Row]], lengths: list[str]) -> str:
    """Loss, loss at the end and needles by length; what was not run is empty."""
    header = ["", "seeds"]
    header += [f"{what} {int(n):,}" for what in ("loss", "end", "needles") for n in lengths]
    lines = []
    for name in METHODS:
        found = rows.get(name, [])
        cells = [_spread(found, lambda row, n=n: row["validation"][n]["loss"]) for n in lengths]
        cells += [_spread(found, lambda row, n=n: row["validation"][n]["last"]) for n in lengths]
        cells += [_spread(found, lambda row, n=n: _needles(row, n)) for n in lengths]
        lines.append([f"`{name}`", str(len(found) or ""), *cells])
    return (
        "Nats a token over whole contexts and over their last 1,024 tokens; the share of needles "
        "found. Mean over seeds ± standard error.\n\n" + markdown_table(header, lines)
    )


def _spread(rows: list[Row], value: Callable[[Row], float | None]) -> str:
    values = [x for row in rows if (x := value(row)) is not None]
    if not values:
        return ""
    error = f" ± {stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{error}"


def _needles(row: Row, length: str) -> float | None:
    return row["needle"]["accuracy"][length] if "needle" in row else None


def _mean_loss(rows: list[Row], length: str) -> float:
    return fmean(row["validation"][length]["loss"] for row in rows)


def _draw_losses(rows: dict[str, list[Row]], lengths: list[str], folder: Path) -> str:
    """Loss against length."""
    name = "loss_by_length.png"
    with figure(folder / name, len(_PANELS), height=3.6) as axes:
        _draw_by_length(axes[0], rows, lengths, _mean_loss, "loss (nats a token)")
    return name


def _draw_needles(rows: dict[str, list[Row]], lengths: list[str], folder: Path) -> str:
    """Needles found against length."""
    name = "needles_by_length.png"

    def found(rows: list[Row], length: str) -> float:
        return fmean(row["needle"]["accuracy"][length] for row in rows)

    with figure(folder / name, len(_PANELS), height=3.6, sharey=True) as axes:
        _draw_by_length(axes[0], rows, lengths, found, "share of needles found")
    return name


def _draw_by_length(
    axes: Any,
    rows: dict[str, list[Row]],
    lengths: list[str],
    value: Callable[[list[Row], str], float],
    label: str,
) -> None:
    for ax, members in zip(axes, _PANELS, strict=True):
        missing = [float("nan")] * len(lengths)
        values = {
            member: [value(rows[member], n) for n in lengths] if member in rows else missing
            for member in members
        }
        by_length(ax, [int(n) for n in lengths], values, label)
        for line, member in zip(ax.lines, members, strict=False):
            if member in rows:
                line.set_label(member)
        if set(members) & set(rows):
            _legend(ax)


def _draw_attention(rows: dict[str, list[Row]], lengths: list[str], folder: Path) -> str:
    """What the loss rises by from the shortest length, against what the theory watches."""
    name = "loss_by_attention.png"
    seen = {
        "last_share": "attention on the last 100 tokens",
        "slope": r"slope of log total attention in $\ln\,t$",
    }
    with figure(folder / name, len(seen), len(_PANELS), height=3.8) as axes:
        for panels, members in zip(axes, _PANELS, strict=True):
            found = {member: rows[member] for member in members if member in rows}
            rises = {
                member: [_mean_loss(own, n) - _mean_loss(own, lengths[0]) for n in lengths]
                for member, own in found.items()
            }
            for ax, (key, label) in zip(panels, seen.items(), strict=True):
                values = {
                    member: [_median(own, key, n) for n in lengths]
                    for member, own in found.items()
                }
                against(
                    ax, values, rises, label, f"loss over that at {int(lengths[0]):,}", linear=1
                )
            if found:
                _legend(panels[0])
    return name


def _legend(ax: Any) -> None:
    """Name what is drawn above a panel, where nothing lies behind the names."""
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, fontsize="small")


def _median(rows: list[Row], key: str, length: str) -> float:
    layers = [layer for row in rows for layer in row["attention"][length][key] if layer]
    return median(x for layer in layers for x in layer) if layers else float("nan")
