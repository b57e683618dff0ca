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

_CONDITIONS = {"total": "shares", "negentropy": "negentropy"}
_FLOOR = -10  # least logarithm of a share that is drawn


def report(folder: Path) -> str:
    """Draw the rows of a folder into it, and return their table in Markdown, the best first.

    Raises:
        ValueError: if it has none, or rows of different data, sizes or steps.
    """
    found = rows_of(folder, "validation", "flops_per_token")
    rows = dict(sorted(found.items(), key=lambda item: item[1]["validation"]["loss"]))
    own = ("method", "seed", "horizons")
    settings = [
        {key: x for key, x in row["settings"].items() if key not in own} for row in rows.values()
    ]
    if any(other != settings[0] for other in settings):
        raise ValueError(f"rows of {folder} must have the same data, sizes and steps")
    table = (
        f"Context of {settings[0]['length']:,} tokens; nats a token over the whole of held-out "
        f"contexts and over their last 1,024.\n\n{_table(rows)}"
    )
    files = [_draw_losses(rows, folder)]
    gated = {key: row for key, row in rows.items() if "gates" in row}
    if gated:
        table += (
            "\n\nSlope of the logarithm of an octave's total attention (its share of a row's) and "
            "of its negentropy (sum p log p, p a key's share) in that of the distance, from 8 "
            "tokens on: 0 where the condition holds. Before and after training, in the mean over "
            f"heads and layers, and by the gates alone, on Gaussian scores.\n\n{_slopes(gated)}"
        )
        files.append(_draw_gates(gated, folder))
    figures = "\n".join(f"![]({name})" for name in files)
    (folder / "table.md").write_text(f"{table}\n\n{figures}\n", encoding="utf-8")
    return table


def _table(rows: dict[str, Row]) -> str:
    """What each row costs and learns."""
    header = ["", "parameters", "FLOPs a token", "training FLOPs", "tokens a second"]
    header += ["loss", "loss at the end"]
    lines = []
    for name, row in rows.items():
        speed = row["tokens_per_second"]
        lines.append(
            [
                f"`{name}`",
                f"{row['parameters']:,}",
                f"{row['flops_per_token']:.3g}",
                f"{row['tokens'] * row['flops_per_token']:.3g}",
                f"{speed:,.0f}" if speed else "",
                f"{row['validation']['loss']:.3f}",
                f"{row['validation']['last']:.3f}",
            ]
        )
    return markdown_table(header, lines)


def _slopes(gated: dict[str, Row]) -> str:
    """How far total attention and negentropy are from level, before and after training."""
    header = [""]
    for condition in _CONDITIONS:
        for when in ("before", "after"):
            header += [f"{condition} {when}", "by gates"]
    lines = []
    for name, row in gated.items():
        slopes = [
            row["gates"][when][kind]["slopes"][key]
            for key in _CONDITIONS.values()
            for when in ("before", "after")
            for kind in ("measured", "alone")
        ]
        lines.append([f"`{name}`", *("" if x is None else f"{x:+.2f}" for x in slopes)])
    return markdown_table(header, lines)


def _draw_losses(rows: dict[str, Row], folder: Path) -> str:
    """Loss by position in the context, and loss by what training has cost so far."""
    name = "in_context.png"
    edges = next(iter(rows.values()))["validation"]["edges"]
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    by_position = {key: row["validation"]["by_position"] for key, row in rows.items()}
    costs = {key: _costs(row) for key, row in rows.items() if row["training"]["log"]}
    low = min((cost[0][0] for cost in costs.values()), default=0)
    high = max((cost[0][-1] for cost in costs.values()), default=0)
    with figure(folder / name, 2, height=3.4) as axes:
        curves(axes[0, 0], middles, by_position, "position (tokens)", scales=("log", "linear"))
        axes[0, 0].set_ylabel("loss on held-out contexts (nats a token)")
        if low < high:
            grid = np.linspace(low, high, 256)
            ends = {"left": np.nan, "right": np.nan}
            losses = {key: np.interp(grid, *cost, **ends) for key, cost in costs.items()}
            curves(axes[0, 1], grid, losses, "training FLOPs")
            axes[0, 1].set_ylabel("training loss (nats a token)")
        else:
            axes[0, 1].set_axis_off()
        for ax in axes.flat:
            if ax.get_legend() is not None:
                ax.get_legend().remove()
        legend(axes[0, 0], rows, columns=3)
    return name


def _costs(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """FLOPs spent and loss, both in the mean over a tenth of the steps, after the first tenth."""
    settings = row["settings"]
    per_step = settings["sequences"] * settings["length"] * row["flops_per_token"]
    tenth = len(row["training"]["log"]) // 10
    steps, losses = np.array(row["training"]["log"][tenth:]).T
    over = np.full(max(1, tenth), 1 / max(1, tenth))
    return np.convolve((steps + 1) * per_step, over, "valid"), np.convolve(losses, over, "valid")


def _draw_gates(gated: dict[str, Row], folder: Path) -> str:
    """Both conditions by octave before and after training, and what the gates alone give."""
    name = "gates.png"
    seen = {"shares": "log share of attention", "negentropy": r"negentropy $\Sigma\,p\,\log\,p$"}
    whens = ("before", "after")
    with figure(folder / name, len(gated), 2, height=2.6, sharex=True, sharey="row") as axes:
        for panels, (key, label) in zip(axes, seen.items(), strict=True):
            for ax, (title, row) in zip(panels, gated.items(), strict=True):
                found = row["gates"]
                measured, alone = (
                    {when: _mean(found[when][kind][key], key) for when in whens}
                    for kind in ("measured", "alone")
                )
                total_attention(ax, found["before"]["edges"][:-1], measured, alone)
                ax.set(yscale="linear", ylabel=label)
                if key == "shares":
                    ax.set_title(title)
                    ax.set_ylim(bottom=max(ax.get_ylim()[0], _FLOOR))
        for ax in axes.flat:
            ax.label_outer()
        legend(axes[0, 0], whens, columns=4, theory="gates alone", measured="measured")
    return name


def _mean(values: list[list[list[float]]], key: str) -> np.ndarray:
    """Over layers and heads, `[K]`; of shares its logarithm, that of 0 being -inf."""
    mean = np.mean(values, axis=(0, 1))
    with np.errstate(divide="ignore"):
        return np.log(mean) if key == "shares" else mean
