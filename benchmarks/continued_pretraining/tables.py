"""The rows of a folder as a table and a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from analysis.plots import COLOURS, by_length, figure, legend
from analysis.report import markdown_table
from benchmarks.rows import rows_of

Row = dict[str, Any]


def report(folder: Path) -> str:
    """Draw the rows of a folder into it, and return their table in Markdown, the best first.

    Raises:
        ValueError: if it has none, or rows of different models, data or rates.
    """
    rows = sorted(rows_of(folder, "before").values(), key=_longest)
    shared = [
        {key: x for key, x in row["settings"].items() if key not in ("label", "setting", "steps")}
        for row in rows
    ]
    if any(other != shared[0] for other in shared):
        raise ValueError(f"rows of {folder} must be of the same model, data and rates")
    lengths = [str(length) for length in shared[0]["lengths"]]
    plain = [row for row in rows if row["settings"]["label"] == "rope"]
    header = [
        "",
        "steps",
        *(f"{when} {int(n):,}" for when in ("before", "after") for n in lengths),
    ]
    header.append(f"cost at {int(lengths[0]):,}")
    lines = []
    for row in rows:
        line = [f"`{row['settings']['label']}`", str(row["settings"]["steps"])]
        line += [_loss(row, when, n) for when in ("before", "after") for n in lengths]
        line.append(_cost(row, plain, lengths[0]))
        lines.append(line)
    (folder / "table.md").write_text(
        f"{markdown_table(header, lines)}\n\n![]({_draw(rows, lengths, folder)})\n",
        encoding="utf-8",
    )
    return (
        "Nats a token over held-out contexts; the cost is the last loss over that of `rope`, the "
        "model's own attention, after as many steps.\n\n" + markdown_table(header, lines)
    )


def _longest(row: Row) -> float:
    """The last loss at the longest length."""
    last: float = list(row.get("after", row["before"]).values())[-1]["loss"]
    return last


def _loss(row: Row, when: str, length: str) -> str:
    return f"{row[when][length]['loss']:.3f}" if when in row else ""


def _cost(row: Row, plain: list[Row], length: str) -> str:
    """The last loss over that of the plain rows, after as many steps."""
    when, steps = "after" if "after" in row else "before", row["settings"]["steps"]
    losses = [
        other[when][length]["loss"]
        for other in plain
        if when == "before" or other["settings"]["steps"] == steps
    ]
    return f"{row[when][length]['loss'] - losses[0]:+.3f}" if losses else ""


def _draw(rows: list[Row], lengths: list[str], folder: Path) -> str:
    """Loss against length before and after, of `rope` and of the best at the longest.

    A row without training is drawn where its setting has none with it.
    """
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    name = "loss_by_length.png"
    trained = {row["settings"]["label"] for row in rows if "after" in row}
    shown = [row for row in rows if "after" in row or row["settings"]["label"] not in trained]
    shown.sort(key=lambda row: row["settings"]["label"] != "rope")
    shown = sorted(shown[: len(COLOURS)], key=_longest)
    names = [row["settings"]["label"] for row in shown]
    if len(set(names)) < len(names):
        names = [f"{row['settings']['label']}, {row['settings']['steps']} steps" for row in shown]
    with figure(folder / name, 2, height=3.8, sharey=True) as axes:
        for ax, when in zip(axes[0], ("before", "after"), strict=True):
            values = {
                label: [row[when][n]["loss"] if when in row else float("nan") for n in lengths]
                for label, row in zip(names, shown, strict=True)
            }
            by_length(ax, [int(n) for n in lengths], values, "loss (nats a token)")
            ax.set_title(f"{when} training")
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6, 8)))
            ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            ax.minorticks_off()
            ax.label_outer()
        legend(axes[0, 0], names, columns=2, measured="held-out contexts")
    return name
