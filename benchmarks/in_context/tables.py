"""The rows of a folder as a table and figures."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from analysis.plots import curves, figure, legend, total_attention
from analysis.report import markdown_table
from benchmarks.rows import rows_of

Row = dict[str, Any]


def report(folder: Path) -> str:
    """Draw the rows of a folder into it, and return their table in Markdown.

    Raises:
        ValueError: if it has none, or rows of different data, sizes or steps.
    """
    rows = rows_of(folder, "validation", "flops_per_token")
    own = ("method", "seed", "horizons")
    settings = [
        {key: x for key, x in row["settings"].items() if key not in own} for row in rows.values()
    ]
    if any(other != settings[0] for other in settings):
        raise ValueError(f"rows of {folder} must have the same data, sizes and steps")
    header = ["", "parameters", "FLOPs a token", "tokens a second", "loss", "loss at the end"]
    lines = []
    for name, row in rows.items():
        speed = row["tokens_per_second"]
        lines.append(
            [
                f"`{name}`",
                f"{row['parameters']:,}",
                f"{row['flops_per_token']:.3g}",
                f"{speed:,.0f}" if speed else "",
                f"{row['validation']['loss']:.3f}",
                f"{row['validation']['last']:.3f}",
            ]
        )
    table = (
        f"Context of {settings[0]['length']:,} tokens; nats a token over the whole of held-out "
        "contexts and over their last 1,024.\n\n" + markdown_table(header, lines)
    )
    files = [_draw_losses(rows, folder), *_draw_gates(rows, folder)]
    figures = "\n".join(f"![]({name})" for name in files)
    (folder / "table.md").write_text(f"{table}\n\n{figures}\n", encoding="utf-8")
    return table


def _draw_losses(rows: dict[str, Row], folder: Path) -> str:
    """Loss by position in the context, and loss by what training has cost so far."""
    name = "in_context.png"
    edges = next(iter(rows.values()))["validation"]["edges"]
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    by_position = {key: row["validation"]["by_position"] for key, row in rows.items()}
    costs = {key: _costs(row) for key, row in rows.items()}
    low = max(cost[0][0] for cost in costs.values())
    high = min(cost[0][-1] for cost in costs.values())
    with figure(folder / name, 2, height=3.4) as axes:
        curves(axes[0, 0], middles, by_position, "position (tokens)", scales=("log", "linear"))
        axes[0, 0].set_ylabel("loss (nats)")
        if low < high:
            grid = np.geomspace(low, high, 64)
            losses = {key: np.interp(grid, *cost) for key, cost in costs.items()}
            curves(axes[0, 1], grid, losses, "training FLOPs", scales=("log", "linear"))
            axes[0, 1].set_ylabel("training loss (nats)")
        else:
            axes[0, 1].set_axis_off()
    return name


def _costs(row: Row) -> tuple[list[float], list[float]]:
    """FLOPs spent and loss at each logged step."""
    settings = row["settings"]
    per_step = settings["sequences"] * settings["length"] * row["flops_per_token"]
    steps, losses = zip(*row["training"]["log"], strict=True)
    return [(step + 1) * per_step for step in steps], list(losses)


def _draw_gates(rows: dict[str, Row], folder: Path) -> list[str]:
    """Attention by octave before and after training: lines are what the gates alone give."""
    gated = {key: row for key, row in rows.items() if "gates" in row}
    if not gated:
        return []
    name = "gates.png"
    with figure(folder / name, len(gated), height=3, sharey=True) as axes:
        for ax, (key, row) in zip(axes[0], gated.items(), strict=True):
            found = row["gates"]
            measured = {
                when: np.log(np.mean(found[when]["shares"], axis=(0, 1)))
                for when in ("before", "after")
            }
            starts = found["before"]["edges"][:-1]
            total_attention(ax, starts, measured, {"before": np.log(found["theory"])})
            ax.set(title=key, yscale="linear", ylabel="log share of attention")
        names = ("before", "after")
        legend(axes[0, 0], names, columns=4, theory="gates alone", measured="measured")
    return [name]
