"""Figures of what mechanisms do to scores and attention, by distance and by context length."""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from analysis.plots._drawing import (
    Values,
    centre,
    labels,
    lines,
    mark,
    panels,
    points,
    signed_log,
)
from analysis.verdict import Verdicts


def multiplier(ax: Any, t: ArrayLike, a_t: Values) -> Any:
    """Draw the factor a_t that each mechanism puts on the score, against distance `t`."""
    return _by_distance(ax, t, a_t, "multiplier $a_t$")


def bias(ax: Any, t: ArrayLike, m_t: Values) -> Any:
    """Draw the bias m_t that each mechanism adds to the score, against distance `t`."""
    return _by_distance(ax, t, m_t, "bias $m_t$")


def total_attention(
    ax: Any, t: ArrayLike, measured: Values, theory: Values | None = None, *, first: int = 0
) -> Any:
    """Draw log total attention range by range, of all mechanisms or of one to a panel.

    Args:
        ax: Axes to draw on.
        t: Where the ranges start `[K]`.
        measured: Mechanism to log Z `[K]`, or `[3, K]` with the ends of its interval.
        theory: Mechanism to log E[Z] `[K]`.
        first: Place of the first mechanism among all, for its colour.

    Returns:
        `ax`; its scale is linear in ±20 and logarithmic outside.
    """
    points(ax, t, measured, first)
    lines(ax, t, theory or {}, measured, first)
    signed_log(ax, "y", 20)
    return labels(ax, "distance $t$ (tokens)", "log total attention", xscale="log")


def verdicts(path: Any, judged: Verdicts) -> None:
    """Draw log total attention range by range, with its verdict, a panel for each mechanism.

    Args:
        path: File to write, as for `figure`.
        judged: From `analysis.judge_all`; one panel for each mechanism and head.
    """
    with panels(
        path,
        len(judged.verdicts),
        theory="log E[Z] by the law\nof the measured logits",
        measured="mean of log Z over\nrows, measured",
    ) as axes:
        for place, (ax, v) in enumerate(zip(axes, judged.verdicts, strict=True)):
            edges = np.asarray(v.edges, dtype=float)
            middle = np.sqrt(edges[:-1] * (edges[1:] - 1))
            measured, law = {v.mechanism: v.log_z}, {v.mechanism: v.law_log_z}
            total_attention(ax, middle, measured, law, first=place)
            ax.set_title(f"{v.mechanism}\n{v.total.verdict}")


def entropy(
    ax: Any, t: ArrayLike, measured: Values, theory: Values | None = None, *, root: bool = False
) -> Any:
    """Draw entropy against log t, or against its square root.

    Args:
        ax: Axes to draw on.
        t: Starts of the ranges `[K]`, above 1.
        measured: Mechanism to entropy in nats `[K]`, or `[3, K]` with the ends of its interval.
        theory: Mechanism to expected entropy, likewise; the interval is drawn as a band.
        root: Whether the axis is sqrt(log t).

    Returns:
        `ax`.
    """
    x = np.log(np.asarray(t, dtype=float))
    x = np.sqrt(x) if root else x
    points(ax, x, measured)
    lines(ax, x, theory or {}, measured)
    return labels(ax, r"$\sqrt{\ln\,t}$" if root else r"$\ln\,t$", "entropy (nats)")


def by_length(
    ax: Any, lengths: ArrayLike, measured: Values, ylabel: str, theory: Values | None = None
) -> Any:
    """Draw a number against context length; where there is no theory, lines join the points.

    Args:
        ax: Axes to draw on.
        lengths: Context lengths in tokens `[K]`.
        measured: Mechanism to the number `[K]`, or `[3, K]` with the ends of its interval.
        ylabel: What it is.
        theory: Mechanism to what is expected `[K]`.

    Returns:
        `ax`.
    """
    points(ax, lengths, measured)
    joined = {name: centre(y) for name, y in measured.items()}
    lines(ax, lengths, joined if theory is None else theory, measured)
    labels(ax, "context length (tokens)", ylabel, "log")
    ax.set_xticks(lengths, [f"{n:,}" for n in np.asarray(lengths).tolist()])
    return ax


def against(
    ax: Any, x: Values, y: Values, xlabel: str, ylabel: str, *, linear: float = math.inf
) -> Any:
    """Draw one number against another, a path for each mechanism that ends in its marker.

    Args:
        ax: Axes to draw on.
        x: Mechanism to the first number `[K]`, at rising context lengths, say.
        y: Mechanism to the second, likewise.
        xlabel: What `x` is.
        ylabel: What `y` is.
        linear: Size up to which `x` is drawn to a linear scale; beyond, to a logarithmic one.

    Returns:
        `ax`, to be given a legend.
    """
    for row, name in enumerate(x):
        colour, marker, _ = mark(row)
        look = {"markeredgecolor": "white", "markeredgewidth": 0.5, "label": name}
        path = np.asarray(x[name], dtype=float), np.asarray(y[name], dtype=float)
        ax.plot(*path, color=colour, marker=marker, markevery=[-1], **look)
        ax.plot(*path, color=colour, marker=".", markersize=3, linestyle="none")
    if any(np.nanmax(np.abs(values)) > linear for values in x.values()):
        signed_log(ax, "x", linear)
    return labels(ax, xlabel, ylabel)


def last_share(ax: Any, lengths: ArrayLike, measured: Values, theory: Values | None = None) -> Any:
    """Draw the share of attention on the last 100 tokens against context length.

    Args:
        ax: Axes to draw on.
        lengths: Context lengths in tokens `[K]`.
        measured: Mechanism to share `[K]`, or `[3, K]` with the ends of its interval.
        theory: Mechanism to expected share `[K]`.

    Returns:
        `ax`; its scale is logarithmic where shares below 0.05 occur.
    """
    by_length(ax, lengths, measured, "attention on the last 100 tokens", theory)
    if min(centre(y).min() for y in measured.values()) < 0.05:
        ax.set_yscale("log")
    else:
        ax.set_ylim(0, 1)
    return ax


def curves(
    ax: Any,
    x: ArrayLike,
    values: Values,
    xlabel: str,
    *,
    scales: tuple[str, str] = ("linear", "linear"),
    floor: float = -math.inf,
) -> Any:
    """Draw curves over one axis, named in the panel if they are several.

    Args:
        ax: Axes to draw on.
        x: Where they are known `[n]`.
        values: Name to values `[n]`; what is not finite is not drawn.
        xlabel: What `x` is.
        scales: Scales of the two axes.
        floor: Where the vertical axis ends if values lie below.

    Returns:
        `ax`.
    """
    finite = []
    for row, (name, y) in enumerate(values.items()):
        y = np.asarray(y, dtype=float)
        colour, _, dash = mark(row)
        known = np.where(np.isfinite(y), y, np.nan)
        ax.plot(x, known, color=colour, linestyle=dash, label=name)
        finite.append(y[np.isfinite(y)])
    if len(values) > 1:
        ax.legend(loc="best")
    ax.set_yscale(scales[1])
    extent = np.concatenate(finite)
    shown = extent[extent >= floor]
    if scales[1] == "linear" and len(shown):
        low, high = shown.min(), shown.max()
        margin = 0.05 * (high - low) if high - low > 1e-9 * max(abs(high), 1) else 1.0
        ax.set_ylim(low - margin if len(shown) == len(extent) else floor, high + margin)
    return labels(ax, xlabel, "", scales[0])


def tile(ax: Any, values: ArrayLike) -> Any:
    """Draw a number for each query and key, grey where the key is not seen.

    Args:
        ax: Axes to draw on.
        values: The numbers `[queries, keys]`, NaN or -inf where the key is not seen.

    Returns:
        `ax`.
    """
    shown = np.asarray(values, dtype=float)
    image = ax.imshow(np.where(np.isfinite(shown), shown, np.nan), cmap="cividis")
    ax.set_facecolor("#E3E3E3")
    ax.grid(False)
    ax.set_xticks([0, shown.shape[1] - 1])
    ax.set_yticks([0, shown.shape[0] - 1])
    ax.figure.colorbar(image, ax=ax, pad=0.02, shrink=0.8)
    return labels(ax, "key", "query")


def _by_distance(ax: Any, t: ArrayLike, values: Values, ylabel: str) -> Any:
    for row, y in enumerate(values.values()):
        colour, _, dash = mark(row)
        ax.plot(t, y, color=colour, linestyle=dash)
    return labels(ax, "distance $t$ (tokens)", ylabel, "log")
