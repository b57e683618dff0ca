"""Power attention's gates and the two conditions: what a spread of horizons over heads gives.

Where (q·k)^p has one mean at all distances, a head whose gate is g = 1 - 1/n everywhere gives the
distance t the expected weight g^t, and the share (1 - g) g^t of its attention: a single scale, its
horizon n. No single head can satisfy either condition. With horizons spread geometrically from a
to b, the mean over heads of these shares is

    ∫ (1/n) e^(-t/n) dn/n / ln(b/a)  =  (e^(-t/b) - e^(-t/a)) / (t ln(b/a)),

that is 1/(t ln(b/a)) for a << t << b: every range [t, tΔ) there gets ln Δ / ln(b/a) of the layer's
attention, whatever t. So the heads together satisfy the first condition, between a and b, from
the start; `PowerAttention` spreads its gates so. The second condition does not follow: the mean
over heads of p ln p, p = (1/n) e^(-t/n) the share at t for scores of one size, is

    ∫ (1/n) e^(-t/n) (-ln n - t/n) dn/n / ln(b/a)  =  -(ln t + γ + 1) / (t ln(b/a)),

γ Euler's constant, again for a << t << b: the negentropy of [t, tΔ) grows with ln t.
"""

import torch
from torch import Tensor

from analysis.ranges import checked_edges
from score_mods._checks import integer


def gated_shares(
    horizons: Tensor, edges: Tensor | list[int], *, length: int | None = None
) -> Tensor:
    """Share of a head's attention in each range of distances, from its constant gate.

    Of the range [t0, t1), (g^t0 - g^t1) / (1 - g^T) with g = 1 - 1/horizon: exact for the ratio
    of expected weights where (q·k)^p has the same mean at all distances.

    Args:
        horizons: Tokens after which a head forgets, each above 1, `[H]`; those that
            `PowerAttention` starts with are `a (b/a)^((h + 1/2) / H)`.
        edges: Of the ranges, rising distances in tokens, `[K + 1]`; 0 is the own key.
        length: Keys T that the row has; None for no end.

    Returns:
        Float64, `[H, K]`; their mean over heads is the layer's.

    Raises:
        TypeError: `edges` or `length` are not integers, or `horizons` no numbers.
        ValueError: A horizon is not above 1 or not finite, `edges` do not rise from 0 or more, or
            lie past `length`.

    >>> gated_shares(torch.tensor([2.0, 1000.0]), [0, 1, 10]).round(decimals=3)
    tensor([[0.5000, 0.4990],
            [0.0010, 0.0090]], dtype=torch.float64)
    """
    edges = checked_edges(edges)
    try:
        horizons = torch.as_tensor(horizons, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"horizons must be numbers, got {horizons!r}") from error
    if horizons.ndim != 1 or not bool(((horizons > 1) & horizons.isfinite()).all()):
        raise ValueError(
            f"horizons must be finite numbers above 1, one a head, got {horizons.tolist()}"
        )
    if length is not None and edges[-1] > integer("length", length):
        raise ValueError(f"edges must end at length = {length} at most, got {int(edges[-1])}")
    log_gate = torch.log1p(-1 / horizons)[:, None]
    left = torch.expm1(log_gate * edges)  # -(1 - g^t)
    whole = 1.0 if length is None else -torch.expm1(log_gate * length)
    return -left.diff(dim=-1) / whole
