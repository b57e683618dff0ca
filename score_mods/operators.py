"""Other operators than softmax attention, by attention with the logarithm of their weights.

Softmax attention with the score s' = ln w is (sum_j w_j v_j) / (sum_j w_j), and its lse is the
logarithm of that denominator. So a score_mod that takes the logarithm turns FlexAttention into
power attention (`power`) and linear attention (`linear`), for contexts short enough for T² time,
and as an oracle of kernels that use the linear state. Operators without a denominator multiply it
back (`weighted_sum`); those whose weights may be negative are the difference of two such sums, of
the positive and of the negative weights.

A weight of zero has the score -inf. So does a score of at most 1e-30, which keeps the derivative
of the logarithm finite; a row of such scores alone gives zero, with zero gradients.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from score_mods._captured import Mod, check_values, described
from score_mods._checks import boolean, floating, integer, number, positions_of_shape
from score_mods.attention import attention
from score_mods.combine import compose
from score_mods.dense import check
from score_mods.forgetting_gate import forgetting_gate
from score_mods.masks import causal

_FLOOR = 1e-30


def _log_power(name: str, deg: int, *, magnitude: bool) -> Mod:
    """Score to deg ln s, or to deg ln |s| for the magnitude; -inf below the floor."""
    degree = torch.tensor(deg)

    def log_power_mod(
        score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        dtype = torch.promote_types(score.dtype, torch.float32)
        size = score.to(dtype).abs() if magnitude else score.to(dtype)
        counts = size > _FLOOR
        return torch.where(
            counts, degree.to(dtype) * torch.where(counts, size, 1).log(), -torch.inf
        )

    return described(log_power_mod, name)


def _gated(mod: Mod, log_g: Tensor | None) -> Mod:
    if log_g is None:
        return mod
    gated = compose(mod, forgetting_gate(log_g))
    gated.__name__ = mod.__name__
    return gated


def power(deg: int = 2, log_g: Tensor | None = None) -> Mod:
    """Weighs a key by an even power of its score, and by the gates since: power attention.

    s' = deg ln |s| + c_(q_idx) - c_(kv_idx), c = cumsum(log_g), so that the output is
    (sum_j w_j v_j) / (sum_j w_j) with w_j = s_j^deg exp(c_i - c_j).

    Args:
        deg: the power, even, at least 2.
        log_g: logarithms of the gates, as in `forgetting_gate`, or None.

    Returns:
        A score_mod; it returns `promote_types(score.dtype, float32)`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `deg` is odd or below 2, or `log_g` has not three axes.

    Reference: Gelada et al., "Scaling Context Requires Rethinking Attention",
    arXiv 2507.04239.
    """
    if integer("deg", deg, at_least=2) % 2:
        raise ValueError(f"deg must be even, got {deg}")
    return _gated(_log_power("power", deg, magnitude=True), log_g)


def linear() -> Mod:
    """Weighs a key by its score itself, none where that is negative: linear attention.

    s' = ln s, -inf for s <= 0. Give it queries and keys that went through a feature map, and
    `scale=1.0` (a scale cancels in the output, but not in lse).

    Returns:
        A score_mod; it returns `promote_types(score.dtype, float32)`.

    Reference: Katharopoulos et al., "Transformers are RNNs", arXiv 2006.16236, equation 4.

    >>> q, k, v = (1 + torch.nn.functional.elu(torch.randn(1, 2, 5, 4)) for _ in range(3))
    >>> out = attention(q, k, v, linear(), impl="dense")
    >>> weights = q @ k.mT
    >>> torch.allclose(out, weights / weights.sum(-1, keepdim=True) @ v, atol=1e-5)
    True
    """
    return _log_power("linear", 1, magnitude=False)


def weighted_sum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Mod,
    mask_mod: Mod | None = None,
    *,
    signed: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    impl: str = "flex",
) -> Tensor:
    """Attention without its denominator: sum_j exp(s'_j) v_j.

    Args:
        q: queries, `(B, H, T_q, D)`.
        k: keys, `(B, H_kv, T, D)`.
        v: values, `(B, H_kv, T, D_v)`.
        score_mod: the logarithm of the weights: `linear()`, also with biases added to it.
        mask_mod: a mask_mod or None, as in `attention`.
        signed: whether to subtract what the same score_mod makes of -s. With `linear()` the
            weights then are the scores, of either sign. Both sums are rounded to the dtype of v
            before: give float32 where they nearly cancel.
        scale: factor of the scores, 1/sqrt(D) if not given.
        enable_gqa: allow H to be a multiple of H_kv.
        impl: "flex" or "dense", as in `attention`; on a CPU only "dense" gives lse, which this
            needs.

    Returns:
        `(B, H, T_q, D_v)` in the dtype of q; zero for a row that sees no key. The sum of a row's
        weights must not overflow float32.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if shapes do not fit, or `attention` cannot do what is asked.
    """

    def total(queries: Tensor) -> Tensor:
        out, lse = attention(
            queries,
            k,
            v,
            score_mod,
            mask_mod,
            scale=scale,
            enable_gqa=enable_gqa,
            return_lse=True,
            impl=impl,
        )
        return lse.exp()[..., None] * out

    result = total(q) - total(-q) if boolean("signed", signed) else total(q)
    return result.to(q.dtype)


def log_linear(
    level_scales: Tensor, log_g: Tensor | None = None, positions: Tensor | None = None
) -> Mod:
    """Weighs a key by its score, its level and the gates since: log-linear attention.

    s' = ln s + ln level_scales[b, h, q_idx, l] + c_(q_idx) - c_(kv_idx), c = cumsum(log_g), where
    l is the level of the key in the query's Fenwick tree: 0 for the query's own token, else the
    place of the highest bit in which their positions differ, counted from 1. Use it causally, and
    with `weighted_sum(..., signed=True)`: the operator has no denominator, and weights of either
    sign.

    Args:
        level_scales: positive, `(B, H, T, L)`, for positions below 2^(L-1); B may be 1 for all.
            Learnable. Values are checked on a CPU only.
        log_g: logarithms of the gates, as in `forgetting_gate`, or None.
        positions: of the tokens, integers, `(T,)`, starting again in every packed document; 0 to
            T - 1 if not given.

    Returns:
        A score_mod for T positions; it returns `promote_types(score.dtype, float32)`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `level_scales` has not four axes or too few levels, `log_g` not three axes,
            or one a wrong value.

    Reference: Guo et al., "Log-Linear Attention", arXiv 2506.04761; the levels are checked against
    the naive form in github.com/fla-org/flash-linear-attention.
    """
    floating("level_scales", level_scales, "B", "H", "T", "L")
    batches, _, T, levels = level_scales.shape
    if positions is None:
        positions = torch.arange(T, device=level_scales.device)
    at = positions_of_shape(positions, (T,))
    if level_scales.device.type == "cpu":
        fits = (level_scales > 0) & level_scales.isfinite()
        check_values("level_scales", "positive and finite", level_scales, fits)
    if not torch.compiler.is_compiling() and at.max() >= 2 ** (levels - 1):
        raise ValueError(
            "level_scales must have L with positions below 2^(L-1), "
            f"got L = {levels} for a position of {at.max()}"
        )

    def levels_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        dtype = torch.promote_types(score.dtype, torch.float32)
        difference = at[q_idx] ^ at[kv_idx]
        level = difference * 0
        for bit in range(levels - 1):
            level = level + (difference >> bit > 0).to(level.dtype)
        row = b if batches > 1 else b * 0
        return score + level_scales[row, h, q_idx, level].to(dtype).log()

    levels_mod.made_for = (batches if batches > 1 else math.inf, T, T)  # type: ignore[attr-defined]
    described(levels_mod, "levels").num_heads = level_scales.shape[1]  # type: ignore[attr-defined]
    return _gated(described(compose(linear(), levels_mod), "log_linear", levels_mod), log_g)


def norm_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_mod: Mod | None = causal,
    *,
    eps: float = 1e-6,
    enable_gqa: bool = False,
    impl: str = "flex",
) -> Tensor:
    """TransNormer's NormAttention: linear attention with a norm in place of its denominator.

    out_i = RMSNorm(sum_j (f(q_i)·f(k_j)) v_j), f(x) = 1 + elu(x), the norm being taken over the
    channels of all heads together.

    Args:
        q: queries, `(B, H, T_q, D)`.
        k: keys, `(B, H_kv, T, D)`.
        v: values, `(B, H_kv, T, D_v)`.
        mask_mod: a mask_mod, or None for every query to see every key.
        eps: added to the mean square, positive.
        enable_gqa: allow H to be a multiple of H_kv.
        impl: "flex" or "dense", as in `weighted_sum`.

    Returns:
        `(B, H, T_q, D_v)`; a learned gain is left to the caller.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `eps` is not positive, or as `weighted_sum`.

    Reference: Qin et al., "The Devil in Linear Transformer", arXiv 2210.10340, and the authors'
    public code, where f is one of several options and a layer norm may take the RMSNorm's place.
    """
    number("eps", eps, positive=True)
    check(q, k, v, None, mask_mod, None, enable_gqa)
    out = weighted_sum(
        1 + torch.nn.functional.elu(q),
        1 + torch.nn.functional.elu(k),
        v,
        linear(),
        mask_mod,
        scale=1.0,
        enable_gqa=enable_gqa,
        impl=impl,
    )
    wide = out.to(torch.promote_types(out.dtype, torch.float32))
    mean_square = wide.square().mean((1, 3), keepdim=True)
    return (wide * torch.rsqrt(mean_square + eps)).to(out.dtype)


def focused_features(x: Tensor, deg: float = 3.0) -> Tensor:
    """FLatten's feature map: turns a vector towards its largest channels and keeps its length.

    f(x) = (|y| / |y^deg|) y^deg with y = relu(x) + 1e-6.

    Args:
        x: queries or keys, `(..., D)`.
        deg: the focusing factor, positive.

    Returns:
        The features, non-negative, in the shape and dtype of x.

    Raises:
        TypeError: if `x` is no floating tensor or `deg` no number.
        ValueError: if `x` is empty or `deg` not positive.

    Reference: Han et al., "FLatten Transformer", arXiv 2308.00442, equation 5, and its public
    code, which takes the lengths over the channels of all heads together.
    """
    number("deg", deg, positive=True)
    floating("x", x)
    y = torch.relu(x.to(torch.promote_types(x.dtype, torch.float32))) + 1e-6
    # The largest channel cancels; without it the powers of small vectors underflow.
    powers = (y / y.amax(-1, keepdim=True)) ** deg
    lengths = y.norm(dim=-1, keepdim=True) / powers.norm(dim=-1, keepdim=True)
    return (lengths * powers).to(x.dtype)


def focused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask_mod: Mod | None = None,
    *,
    deg: float = 3.0,
    enable_gqa: bool = False,
    impl: str = "flex",
) -> Tensor:
    """FLatten's focused attention: linear attention with `focused_features`.

    out_i = sum_j (f(q_i)·f(k_j)) v_j / sum_j f(q_i)·f(k_j). The depthwise convolution of the
    values that FLatten adds is left to the caller.

    Args:
        q: queries, `(B, H, T_q, D)`.
        k: keys, `(B, H_kv, T, D)`.
        v: values, `(B, H_kv, T, D_v)`.
        mask_mod: a mask_mod, or None for every query to see every key, as in the paper.
        deg: the focusing factor, positive.
        enable_gqa: allow H to be a multiple of H_kv.
        impl: "flex" or "dense", as in `attention`.

    Returns:
        `(B, H, T_q, D_v)`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `deg` is not positive, or as `attention`.

    Reference: as `focused_features`.
    """
    check(q, k, v, None, mask_mod, None, enable_gqa)
    return attention(
        focused_features(q, deg),
        focused_features(k, deg),
        v,
        linear(),
        mask_mod,
        scale=1.0,
        enable_gqa=enable_gqa,
        impl=impl,
    )  # type: ignore[return-value]


def inline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    impl: str = "flex",
) -> Tensor:
    """InLine attention: linear attention whose weights are made to sum to 1 by a shift.

    out_i = sum_j w_ij v_j, w_ij = (s_ij - mean_j s_ij + 1) / T with s_ij = scale q_i·k_j: weights
    of either sign, over all the T keys. The paper counts the factor 1/T of the scores to the
    feature map; the public code has it. The convolution of the values that InLine adds is left to
    the caller.

    Args:
        q: queries, `(B, H, T_q, D)`.
        k: keys, `(B, H_kv, T, D)`.
        v: values, `(B, H_kv, T, D_v)`.
        scale: factor of the scores, 1/sqrt(D) if not given.
        enable_gqa: allow H to be a multiple of H_kv.
        impl: "flex" or "dense", as in `weighted_sum`.

    Returns:
        `(B, H, T_q, D_v)`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: as `weighted_sum`.

    Reference: Han et al., "Bridging the Divide: Reconsidering Softmax and Linear Attention",
    arXiv 2412.06590, and github.com/LeapLabTHU/InLine, checked.
    """
    check(q, k, v, None, None, scale, enable_gqa)
    # s_ij - mean_j s_ij is the score of keys without their mean.
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    centred = k - k.mean(2, keepdim=True)
    change = weighted_sum(
        q,
        centred,
        v,
        linear(),
        signed=True,
        scale=factor / k.shape[2],
        enable_gqa=enable_gqa,
        impl=impl,
    )
    mean = v.mean(2, keepdim=True).repeat_interleave(q.shape[1] // v.shape[1], 1)
    return mean.to(q.dtype) + change
