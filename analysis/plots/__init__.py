"""Figures of the two conditions and of a model's logits.

Every function takes `ax` and returns it, but for `verdicts`, which writes a whole figure.

Values are arrays or tensors; several mechanisms come as a mapping from name to values, and a
mechanism's colour and marker follow from its place in that mapping, so pass the same order
everywhere. Lines are theory (or a guide to the eye where said so), points are measurement, bars
their 95 % intervals.

Colours are Okabe and Ito's, told apart with any colour vision. A `figure` is 8 inches wide with
type of 8.5 to 9 points, legible at the 800 pixels of a README and at the width of a page. In a
notebook, `matplotlib.rcParams.update(STYLE)` gives figures made with pyplot the same look.
"""

from analysis.plots._drawing import (
    COLOURS,
    DASHES,
    MARKERS,
    STYLE,
    Values,
    figure,
    legend,
    panels,
)
from analysis.plots.mechanisms import (
    against,
    bias,
    by_length,
    curves,
    entropy,
    last_share,
    multiplier,
    tile,
    total_attention,
    verdicts,
)
from analysis.plots.models import by_layer, heatmap, qq, slopes, spread

__all__ = [
    "COLOURS",
    "DASHES",
    "MARKERS",
    "STYLE",
    "Values",
    "against",
    "bias",
    "by_layer",
    "by_length",
    "curves",
    "entropy",
    "figure",
    "heatmap",
    "last_share",
    "legend",
    "multiplier",
    "panels",
    "qq",
    "slopes",
    "spread",
    "tile",
    "total_attention",
    "verdicts",
]
