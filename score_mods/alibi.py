"""ALiBi: a bias that falls linearly with distance (Press, Smith & Lewis, arXiv 2108.12409)."""

from __future__ import annotations

import torch
from torch import Tensor

from score_mods._captured import Mod, described
from score_mods._checks import integer


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
    slopes = alibi_slopes(num_heads)

    def alibi_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        dtype = torch.promote_types(score.dtype, torch.float32)
        return score - slopes[h].to(dtype) * (q_idx - kv_idx).to(dtype).abs()

    return described(alibi_mod, "alibi", slopes)
