"""FIRE: a bias that a small network gives for the distance, measured against the row's length.

As long as a row is shorter than the threshold L, the bias depends on the distance alone, and can
be given as `distance_table`, with one gather for each pair. Beyond it every row has its own curve,
and the network is evaluated for every pair: 32 units are some 100 instructions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from score_mods._captured import Mod, at_head, described, parameter, scalar
from score_mods._checks import floating, number


def fire(
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    c: float | Tensor = 0.1,
    threshold: float | Tensor = 512.0,
    eps: float = 1e-6,
) -> Mod:
    """Adds a two-layer network's value for the logarithmic distance over that of the row's length.

    s' = s + b2_h + sum_w w2_hw relu(w1_w x + b1_w),
    x = psi(|q_idx - kv_idx|) / (psi(max(q_idx, |threshold|)) + eps),   psi(t) = ln(1 + |c t|).

    The sum is written out, exactly. Each unit is a captured tensor of its own, for FlexAttention
    compiles no second gather from a tensor that requires grad; training by captured tensors costs
    an atomic addition for each of them and each pair.

    Args:
        w1: weights of the hidden units, `(W,)`; the paper's W is 32. These four and c and the
            threshold are learnable if they require grad.
        b1: their offsets, `(W,)`.
        w2: weights of the heads, `(H, W)`.
        b2: their offsets, `(H,)`.
        c: rate of the logarithm per token, number or tensor of shape `(1,)`.
        threshold: L in tokens, number or tensor of shape `(1,)`.
        eps: added to the denominator, positive.

    Returns:
        A score_mod; it returns `promote_types(score.dtype, float32)`. It uses absolute positions.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if shapes do not fit, or `eps` is not positive.

    Reference: Li et al., "Functional Interpolation for Relative Positions Improves Long Context
    Transformers", arXiv 2310.04418; formula and defaults as in public implementations.
    """
    floating("w1", w1, "W"), floating("b1", b1, "W")
    floating("w2", w2, "H", "W"), floating("b2", b2, "H")
    if b1.shape != w1.shape or w2.shape != (*b2.shape, *w1.shape):
        raise ValueError(
            "w1, b1, w2 and b2 must have shapes (W,), (W,), (H, W) and (H,), got "
            f"{[tuple(value.shape) for value in (w1, b1, w2, b2)]}"
        )
    units = [
        (w1[i : i + 1].clone(), b1[i : i + 1].clone(), w2[:, i].clone()) for i in range(len(w1))
    ]
    rate, length = parameter("c", c), parameter("threshold", threshold)
    small = scalar(number("eps", eps, positive=True))

    def fire_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        dtype = torch.promote_types(score.dtype, torch.float32)
        rate_h = at_head(rate, h, dtype)
        row = torch.maximum(q_idx.to(dtype), at_head(length, h, dtype).abs())
        t = (q_idx - kv_idx).to(dtype)
        whole = torch.log1p((rate_h * row).abs()) + small.to(dtype)
        x = torch.log1p((rate_h * t).abs()) / whole
        bias = at_head(b2, h, dtype)
        for weight, offset, head in units:
            unit = at_head(weight, h, dtype) * x + at_head(offset, h, dtype)
            bias = bias + at_head(head, h, dtype) * torch.relu(unit)
        return score + bias

    captured = [tensor for unit in units for tensor in unit]
    return described(fire_mod, "fire", b2, rate, length, *captured)
