"""Biases that are a formula of the distance: ALiBi, NAPE and KERPLE.

Those that are a table are in `bias_tables.py`, those of a small network in `fire.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from score_mods._captured import Mod, at_head, described, holds, parameter
from score_mods._checks import integer


def _distance_bias(
    name: str, penalty: Callable[[Tensor, Tensor], Tensor], *captured: Tensor
) -> Mod:
    """The score_mod that subtracts `penalty(h, t)`; t is the distance in the computing dtype."""

    def distance_bias_mod(
        score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        t = (q_idx - kv_idx).to(torch.promote_types(score.dtype, torch.float32)).abs()
        return score - penalty(h, t)

    return described(distance_bias_mod, name, *captured)


def _linear_bias(name: str, slopes: Tensor) -> Mod:
    return _distance_bias(name, lambda h, t: at_head(slopes, h, t.dtype) * t, slopes)


def alibi_slopes(num_heads: int) -> Tensor:
    """ALiBi's slope for each head.

    For a power of two, `2^(-8 (h + 1) / H)`; else the slopes of the next lower power of two P,
    followed by every other slope of 2 P, from its first.

    Args:
        num_heads: number of query heads H, at least 1.

    Returns:
        Slopes, `(H,)`, float64.

    Raises:
        TypeError: if `num_heads` is no int.
        ValueError: if it is below 1.

    Reference: arXiv 2108.12409, section 3; the rule for other head counts is that of the authors'
    public code.

    >>> alibi_slopes(6).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    """
    power = 1 << (integer("num_heads", num_heads).bit_length() - 1)

    def geometric(count: int) -> Tensor:
        return torch.exp2(-8 * torch.arange(1, count + 1, dtype=torch.float64) / count)

    return torch.cat([geometric(power), geometric(2 * power)[::2][: num_heads - power]])


def alibi(num_heads: int) -> Mod:
    """Subtracts a slope times the distance from the score.

    s' = s - slope_h |q_idx - kv_idx|, with `alibi_slopes(num_heads)`. attention-gym's
    `generate_alibi_bias` has other slopes where the head count is no power of two, and adds to the
    score of keys after the query.

    Args:
        num_heads: number of query heads H, at least 1.

    Returns:
        A score_mod; it returns `promote_types(score.dtype, float32)`.

    Raises:
        TypeError: if `num_heads` is no int.
        ValueError: if it is below 1.

    Reference: Press, Smith & Lewis, "Train Short, Test Long", arXiv 2108.12409.
    """
    return _linear_bias("alibi", alibi_slopes(num_heads))


def nape(num_heads: int, slopes: str = "linear") -> Mod:
    """Subtracts a slope times the distance in the first half of the heads; the rest has none.

    s' = s - slope_h |q_idx - kv_idx| for h < floor(H/2), where slope_h is 1/(h + 1) ("linear") or
    2^-h ("exp"); s' = s for the other heads. These are not the slopes of `alibi`.

    Args:
        num_heads: number of query heads H, at least 2.
        slopes: "linear" or "exp".

    Returns:
        A score_mod; it returns `promote_types(score.dtype, float32)`.

    Raises:
        TypeError: if `num_heads` is no int.
        ValueError: if it is below 2, or `slopes` is neither.

    Reference: Vasylenko et al., "Long-Context Generalization with Sparse Attention", arXiv
    2506.16640; slopes and their number as in the authors' public code.
    """
    biased = torch.arange(integer("num_heads", num_heads, 2) // 2, dtype=torch.float64)
    if slopes not in ("linear", "exp"):
        raise ValueError(f'slopes must be "linear" or "exp", got {slopes!r}')
    steep = 1 / (biased + 1) if slopes == "linear" else torch.exp2(-biased)
    return _linear_bias("nape", torch.cat([steep, steep.new_zeros(num_heads - len(steep))]))


def kerple_log(r1: float | Tensor, r2: float | Tensor) -> Mod:
    """Subtracts the logarithm of the distance.

    s' = s - r1_h ln(1 + r2_h |q_idx - kv_idx|). The authors draw r1 from [0, 2] and r2 from
    [0, 1], learn them, and keep both at 0.01 or more, which is the caller's to do.

    Args:
        r1: number or tensor of shape `(H,)` or `(1,)`, learnable if it requires grad, positive.
        r2: likewise, per token.

    Returns:
        A score_mod; it returns `promote_types(score.dtype, float32)`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if it is not positive, or its shape does not fit.

    Reference: Chi et al., "KERPLE", arXiv 2205.09921, and the authors' public code.
    """
    height, rate = parameter("r1", r1, positive=True), parameter("r2", r2, positive=True)
    return _distance_bias(
        "kerple_log",
        lambda h, t: at_head(height, h, t.dtype) * torch.log1p(at_head(rate, h, t.dtype) * t),
        height,
        rate,
    )


def kerple_power(r1: float | Tensor, r2: float | Tensor) -> Mod:
    """Subtracts a power of the distance.

    s' = s - r1_h |q_idx - kv_idx|^r2_h. The authors draw r1 from [0, 1] and r2 from [0, 2], learn
    them, and keep r1 at 0.01 or more and r2 in [0.01, 2], which is the caller's to do.

    Args:
        r1: number or tensor of shape `(H,)` or `(1,)`, learnable if it requires grad, positive.
        r2: likewise, at most 2.

    Returns:
        A score_mod; it returns `promote_types(score.dtype, float32)`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if it is not positive, r2 is above 2, or its shape does not fit.

    Reference: Chi et al., "KERPLE", arXiv 2205.09921, and the authors' public code.
    """
    height, power = parameter("r1", r1, positive=True), parameter("r2", r2, positive=True)
    if not (power.requires_grad or holds(power <= 2)):
        raise ValueError(f"r2 must be at most 2, got {r2}")

    def penalty(h: Tensor, t: Tensor) -> Tensor:
        # The derivative by the power has a ln(t), which must not be taken of 0.
        grown = t.clamp(min=1) ** at_head(power, h, t.dtype)
        return at_head(height, h, t.dtype) * torch.where(t > 0, grown, 0)

    return _distance_bias("kerple_power", penalty, height, power)
