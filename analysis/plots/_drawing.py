"""What all figures share: style and panels, colours and markers, points, lines, legends."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Values = Mapping[str, ArrayLike]

COLOURS = ("#000000", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#0072B2", "#56B4E9", "#F0E442")
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<")
DASHES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)))

STYLE = {
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

    with rc_context(STYLE):
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
        colour, marker, dash = mark(row)
        look = {"marker": marker, "linestyle": "-"} if measured else {"linestyle": dash}
        keys.append(Line2D([], [], color=colour, label=name, **look))
    if theory:
        keys.append(Line2D([], [], color="#666666", label=theory))
    if measured:
        keys.append(Line2D([], [], color="#666666", marker="o", linestyle="none", label=measured))
    return keys


def points(ax: Any, x: ArrayLike, values: Values, first: int = 0) -> None:
    for place, y in enumerate(values.values()):
        colour, marker, _ = mark(first + place)
        y = np.asarray(y, dtype=float)
        if y.ndim == 2:
            ax.plot([x, x], y[1:], color=colour, linewidth=0.9)
        ax.plot(
            x,
            centre(y),
            color=colour,
            marker=marker,
            markersize=max(6.5 - 0.6 * place, 3.5),  # so that one behind another is still seen
            markeredgecolor="white",
            markeredgewidth=0.5,
            linestyle="none",
        )


def lines(ax: Any, x: ArrayLike, values: Values, names: Values, first: int = 0) -> None:
    for row, name in enumerate(names, first):
        if name in values:
            y, colour = np.asarray(values[name], dtype=float), mark(row)[0]
            ax.plot(x, centre(y), color=colour, zorder=1.5)
            if y.ndim == 2:
                ax.fill_between(x, *y[1:], color=colour, alpha=0.25, linewidth=0, zorder=1.4)


def signed_log(ax: Any, which: str, linear: float) -> None:
    """Make an axis linear in ±`linear` and logarithmic outside, with ticks in both."""
    from matplotlib.ticker import FixedLocator

    getattr(ax, f"set_{which}scale")("symlog", linthresh=linear, linscale=1)
    axis = getattr(ax, f"{which}axis")
    ticks = linear * np.array([0, 0.5, 1, 3, 10, 30, 100])
    axis.set_major_locator(FixedLocator([*-ticks[:0:-1], *ticks]))
    axis.set_minor_locator(FixedLocator([]))
    axis.set_major_formatter("{x:g}")


def centre(y: ArrayLike) -> np.ndarray:
    """The estimate itself, where it comes with the ends of its interval."""
    y = np.asarray(y, dtype=float)
    return y[0] if y.ndim == 2 else y


def mark(row: int) -> tuple[str, str, Any]:
    return COLOURS[row % len(COLOURS)], MARKERS[row % len(MARKERS)], DASHES[row % len(DASHES)]


def labels(ax: Any, xlabel: str, ylabel: str, xscale: str = "linear") -> Any:
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    if xscale == "log":
        ax.set_xscale("log")
        ax.minorticks_off()
    return ax
