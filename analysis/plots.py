"""Figures of the two conditions and of a model's logits: every function takes `ax` and returns it.

Values are arrays or tensors; several mechanisms come as a mapping from name to values, and a
mechanism's colour and marker follow from its place in that mapping, so pass the same order
everywhere. Lines are theory (or a guide to the eye where said so), points are measurement, bars
their 95 % intervals.

Colours are Okabe and Ito's, told apart with any colour vision. A `figure` is 8 inches wide with
type of 8.5 to 9 points, legible at the 800 pixels of a README and at the width of a page.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Values = Mapping[str, ArrayLike]

COLOURS = ("#000000", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#0072B2", "#56B4E9", "#F0E442")
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<")
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)))

_STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8.5,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
}


@contextmanager
def figure(
    path: Any, columns: int = 1, rows: int = 1, *, height: float = 2.8, **options: Any
) -> Iterator[np.ndarray]:
    """Yield the axes of a new figure and save it at the end.

    Args:
        path: File to write, a PNG or any other format of matplotlib.
        columns: Panels in a row.
        rows: Rows of panels.
        height: Height of a row in inches; the width is 8.
        **options: For `matplotlib.figure.Figure.subplots`, as `sharey=True`.

    Yields:
        Array of axes `[rows, columns]`.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        drawing = Figure(figsize=(8, height * rows), layout="constrained")
        yield drawing.subplots(rows, columns, squeeze=False, **options)
        drawing.savefig(path, dpi=200)


@contextmanager
def panels(path: Any, count: int, *, theory: str, measured: str) -> Iterator[list[Any]]:
    """Yield axes for `count` panels against distance and save them, with one legend for all.

    If the panels do not fill their rows, the legend stands at the end of the first, else above.

    Args:
        path: File to write.
        count: Number of panels, up to four in a row.
        theory: What the lines are.
        measured: What the points are.

    Yields:
        List of axes.
    """
    rows = -(-count // 4)
    columns = -(-count // rows)
    with figure(path, columns, rows, height=2, sharex=True, sharey=True) as axes:
        full = columns - (rows * columns - count)  # panels in the first row
        used = [*axes[0, :full], *axes[1:].flat]
        yield used
        for ax in used:
            ax.label_outer()
        if full == columns:
            legend(axes[0, 0], (), columns=2, theory=theory, measured=measured)
        else:
            keys = _keys((), theory, measured)
            axes[0, full].legend(handles=keys, loc="center left", borderpad=0)
            for ax in axes[0, full:]:
                ax.set_axis_off()


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
    _points(ax, t, measured, first)
    _lines(ax, t, theory or {}, measured, first)
    _signed_log(ax, "y", 20)
    return _labels(ax, "distance $t$ (tokens)", "log total attention", xscale="log")


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
    _points(ax, x, measured)
    _lines(ax, x, theory or {}, measured)
    return _labels(ax, r"$\sqrt{\ln\,t}$" if root else r"$\ln\,t$", "entropy (nats)")


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
    _points(ax, lengths, measured)
    joined = {name: _centre(y) for name, y in measured.items()}
    _lines(ax, lengths, joined if theory is None else theory, measured)
    _labels(ax, "context length (tokens)", ylabel, "log")
    ax.set_xticks(lengths, [f"{n:,}" for n in np.asarray(lengths).tolist()])
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
        colour, _, dash = _mark(row)
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
    return _labels(ax, xlabel, "", scales[0])


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
    return _labels(ax, "key", "query")


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
    if min(_centre(y).min() for y in measured.values()) < 0.05:
        ax.set_yscale("log")
    else:
        ax.set_ylim(0, 1)
    return ax


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
    return _labels(ax, "normal quantile", "quantile of the logits (deviations)")


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
    return _labels(ax, "layer", "head")


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
    return _labels(ax, "distance $t$ (tokens)", ylabel, "log")


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
    return _labels(ax, "layer", ylabel)


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
        colour = _mark(row)[0]
        x = np.sort(np.asarray(slope, dtype=float))
        offset = np.random.default_rng(0).permutation(np.linspace(-0.26, 0.26, len(x)))
        ax.plot(x, row + offset, ".", color=colour, markersize=3, alpha=0.6)
        for width, colour in ((3.6, "white"), (1.8, "black")):
            ax.plot([np.median(x)] * 2, [row - 0.4, row + 0.4], color=colour, linewidth=width)
    _signed_log(ax, "x", 1)
    ax.set_yticks(range(len(values)), list(values))
    ax.set_ylim(len(values) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    return _labels(ax, r"slope of log total attention in $\ln\,t$", "")


def legend(ax: Any, names: Any, *, columns: int, theory: str = "", measured: str = "") -> Any:
    """Name the mechanisms above the figure of `ax`.

    Args:
        ax: Any axes of the figure.
        names: The mechanisms, in the order of the mappings that were drawn.
        columns: Entries in a row.
        theory: What the lines are, where there are points too.
        measured: What the points are.

    Returns:
        `ax`.
    """
    keys = _keys(names, theory, measured)
    ax.figure.legend(handles=keys, loc="outside upper center", ncols=columns)
    return ax


def _keys(names: Any, theory: str, measured: str) -> list[Any]:
    from matplotlib.lines import Line2D

    keys = []
    for row, name in enumerate(names):
        colour, marker, dash = _mark(row)
        look = {"marker": marker, "linestyle": "-"} if measured else {"linestyle": dash}
        keys.append(Line2D([], [], color=colour, label=name, **look))
    if theory:
        keys.append(Line2D([], [], color="#666666", label=theory))
    if measured:
        keys.append(Line2D([], [], color="#666666", marker="o", linestyle="none", label=measured))
    return keys


def _by_distance(ax: Any, t: ArrayLike, values: Values, ylabel: str) -> Any:
    for row, y in enumerate(values.values()):
        colour, _, dash = _mark(row)
        ax.plot(t, y, color=colour, linestyle=dash)
    return _labels(ax, "distance $t$ (tokens)", ylabel, "log")


def _points(ax: Any, x: ArrayLike, values: Values, first: int = 0) -> None:
    for place, y in enumerate(values.values()):
        colour, marker, _ = _mark(first + place)
        y = np.asarray(y, dtype=float)
        if y.ndim == 2:
            ax.plot([x, x], y[1:], color=colour, linewidth=0.9)
        ax.plot(
            x,
            _centre(y),
            color=colour,
            marker=marker,
            markersize=max(6.5 - 0.6 * place, 3.5),  # so that one behind another is still seen
            markeredgecolor="white",
            markeredgewidth=0.5,
            linestyle="none",
        )


def _lines(ax: Any, x: ArrayLike, values: Values, names: Values, first: int = 0) -> None:
    for row, name in enumerate(names, first):
        if name in values:
            y, colour = np.asarray(values[name], dtype=float), _mark(row)[0]
            ax.plot(x, _centre(y), color=colour, zorder=1.5)
            if y.ndim == 2:
                ax.fill_between(x, *y[1:], color=colour, alpha=0.25, linewidth=0, zorder=1.4)


def _signed_log(ax: Any, which: str, linear: float) -> None:
    """Make an axis linear in ±`linear` and logarithmic outside, with ticks in both."""
    from matplotlib.ticker import FixedLocator

    getattr(ax, f"set_{which}scale")("symlog", linthresh=linear, linscale=1)
    axis = getattr(ax, f"{which}axis")
    ticks = linear * np.array([0, 0.5, 1, 3, 10, 30, 100])
    axis.set_major_locator(FixedLocator([*-ticks[:0:-1], *ticks]))
    axis.set_minor_locator(FixedLocator([]))
    axis.set_major_formatter("{x:g}")


def _centre(y: ArrayLike) -> np.ndarray:
    """The estimate itself, where it comes with the ends of its interval."""
    y = np.asarray(y, dtype=float)
    return y[0] if y.ndim == 2 else y


def _mark(row: int) -> tuple[str, str, Any]:
    return COLOURS[row % len(COLOURS)], MARKERS[row % len(MARKERS)], DASHES[row % len(DASHES)]


def _labels(ax: Any, xlabel: str, ylabel: str, xscale: str = "linear") -> Any:
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    if xscale == "log":
        ax.set_xscale("log")
        ax.minorticks_off()
    return ax
