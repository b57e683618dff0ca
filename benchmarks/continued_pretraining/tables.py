"""The rows of a folder as a table and a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from analysis.plots import COLOURS, by_length, figure, legend
from analysis.report import markdown_table
from benchmarks.rows import rows_of

Row = dict[str, Any]


def report(folder: Path) -> str:
    """Draw the rows of a folder into it, and return their table in Markdown.

    Raises:
        ValueError: if it has none, or rows of different models, data or steps.
    """
    rows = list(rows_of(folder, "before").values())
    shared = [
        {key: x for key, x in row["settings"].items() if key not in ("label", "setting", "steps")}
        for row in rows
    ]
    if any(other != shared[0] for other in shared):
        raise ValueError(f"rows of {folder} must be of the same model, data and rates")
    lengths = [str(length) for length in shared[0]["lengths"]]
    plain = next((row for row in rows if row["settings"]["label"] == "rope"), None)
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
        "Nats a token over held-out contexts; the cost is the last loss over that of the "
        "untouched model.\n\n" + markdown_table(header, lines)
    )


def _loss(row: Row, when: str, length: str) -> str:
    return f"{row[when][length]['loss']:.3f}" if when in row else ""


def _cost(row: Row, plain: Row | None, length: str) -> str:
    if plain is None:
        return ""
    last = row["after"] if "after" in row else row["before"]
    return f"{last[length]['loss'] - plain['before'][length]['loss']:+.3f}"


def _draw(rows: list[Row], lengths: list[str], folder: Path) -> str:
    """Loss against length before and after, of the rows with the least at the longest."""
    name, longest = "loss_by_length.png", lengths[-1]
    shown = sorted(rows, key=lambda row: row.get("after", row["before"])[longest]["loss"])
    shown = shown[: len(COLOURS)]
    with figure(folder / name, 2, height=3.4, sharey=True) as axes:
        for ax, when in zip(axes[0], ("before", "after"), strict=True):
            values = {
                row["settings"]["label"]: [
                    row[when][n]["loss"] if when in row else float("nan") for n in lengths
                ]
                for row in shown
            }
            by_length(ax, [int(n) for n in lengths], values, "loss (nats a token)")
            ax.set_title(f"{when} training")
        legend(axes[0, 0], values, columns=2, measured="held-out contexts")
    return name
