"""Figures of a model's logits and attention, by layer and head."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from analysis.plots._drawing import COLOURS, Values, labels, mark, signed_log


def qq(ax: Any, theoretical: ArrayLike, observed: ArrayLike) -> Any:
    """Draw quantiles of standardised logits against the normal's, a line for each layer.

    Args:
        ax: Axes to draw on.
        theoretical: Normal quantiles `[n]`.
        observed: Quantiles of the logits in deviations `[layers, n]`.

    Returns:
        `ax`.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    x, y = np.asarray(theoretical), np.asarray(observed)
    ax.axline((0, 0), slope=1, color="black", linewidth=0.8, linestyle=(0, (4, 3)), zorder=3)
    shades = ScalarMappable(Normalize(0, max(len(y) - 1, 1)), "cividis")
    for layer, row in enumerate(y):
        ax.plot(x, row, color=shades.to_rgba(np.asarray(layer)), linewidth=1)
    ax.figure.colorbar(shades, ax=ax, label="layer", pad=0.02)
    return labels(ax, "normal quantile", "quantile of the logits (deviations)")


def heatmap(ax: Any, values: ArrayLike, label: str) -> Any:
    """Draw one number for each layer and head.

    Args:
        ax: Axes to draw on.
        values: The numbers `[layers, heads]`.
        label: What they are, written beside the colour bar.

    Returns:
        `ax`.
    """
    image = ax.imshow(
        np.asarray(values).T, aspect="auto", cmap="cividis", origin="lower", interpolation="none"
    )
    ax.grid(False)
    ax.figure.colorbar(image, ax=ax, label=label, pad=0.02)
    return labels(ax, "layer", "head")


def spread(ax: Any, x: ArrayLike, values: ArrayLike, ylabel: str, *, colour: int = 5) -> Any:
    """Draw the median over heads and the band that holds 80 % of them, against distance.

    Args:
        ax: Axes to draw on.
        x: Distances `[K]`.
        values: A row for each head `[heads, K]`.
        ylabel: What they are.
        colour: Index into `COLOURS`.

    Returns:
        `ax`.
    """
    low, middle, high = np.nanquantile(np.asarray(values), [0.1, 0.5, 0.9], axis=0)
    ax.fill_between(x, low, high, color=COLOURS[colour], alpha=0.2, linewidth=0)
    ax.plot(x, middle, color=COLOURS[colour], marker="o")
    return labels(ax, "distance $t$ (tokens)", ylabel, "log")


def by_layer(ax: Any, values: ArrayLike, ylabel: str) -> Any:
    """Draw a dot for each head above its layer, and the layers' means as a line.

    Args:
        ax: Axes to draw on.
        values: A number for each layer and head `[layers, heads]`.
        ylabel: What it is.

    Returns:
        `ax`.
    """
    y = np.asarray(values)
    layer = np.arange(len(y))
    ax.plot(np.repeat(layer, y.shape[1]), y.ravel(), ".", color=COLOURS[6], markersize=4)
    ax.plot(layer, y.mean(axis=1), color=COLOURS[5], marker="o", label="mean over heads")
    ax.legend(loc="best")
    return labels(ax, "layer", ylabel)


def slopes(ax: Any, values: Values, *, tolerance: float = 0.15) -> Any:
    """Draw, for each mechanism, the slope of every head's log total attention in log t.

    Args:
        ax: Axes to draw on.
        values: Mechanism to slopes, a number for each head `[heads]`. The scale is linear in
            ±1 and logarithmic outside.
        tolerance: Half the width of the band in which total attention counts as scale-invariant.

    Returns:
        `ax`.
    """
    ax.axvspan(-tolerance, tolerance, color=COLOURS[3], alpha=0.2, linewidth=0)
    for row, slope in enumerate(values.values()):
        colour = mark(row)[0]
        x = np.sort(np.asarray(slope, dtype=float))
        offset = np.random.default_rng(0).permutation(np.linspace(-0.26, 0.26, len(x)))
        ax.plot(x, row + offset, ".", color=colour, markersize=3, alpha=0.6)
        for width, colour in ((3.6, "white"), (1.8, "black")):
            ax.plot([np.median(x)] * 2, [row - 0.4, row + 0.4], color=colour, linewidth=width)
    signed_log(ax, "x", 1)
    ax.set_yticks(range(len(values)), list(values))
    ax.set_ylim(len(values) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    return labels(ax, r"slope of log total attention in $\ln\,t$", "")
