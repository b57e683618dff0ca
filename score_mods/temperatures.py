"""Row temperatures: one factor for all the scores of a row, mostly by the number of its keys.

n is the number of keys that the row attends to, which for a causal row is q_idx + 1, and that is
what these functions take: they depend on absolute position, so packed documents and a decoded
token need `with_positions` or `with_offset`.

A factor of the row may as well multiply the query before its product with the keys, which
`scale_queries` does with any of them. A fixed factor costs little either way. A learned one
belongs on the queries: FlexAttention sums the gradient of what a score_mod captures by atomic
additions, one for each pair of query and key, and in no fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from score_mods._captured import Mod, at_head, described, parameter, scalar
from score_mods._checks import integer, number
from score_mods.fast import fast_log, has_instructions, wants_instructions


def _row_temperature(name: str, factor: Callable[..., Tensor], *captured: Tensor) -> Mod:
    """The score_mod that multiplies the score by `factor(h, n, log)`.

    `n` is the row's number of keys in the dtype of the computation, `log` the logarithm to use.
    """
    instructions = has_instructions()

    def row_temperature_mod(
        score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        n = (q_idx + 1).to(torch.promote_types(score.dtype, torch.float32))
        log = fast_log if instructions and wants_instructions(score) else torch.log
        return factor(h, n, log) * score.to(n.dtype)

    return described(row_temperature_mod, name, *captured)


def _trained_length(train_length: float | Tensor) -> float:
    length = parameter("train_length", train_length)
    if length.ndim or length <= 1:
        raise ValueError(f"train_length must be a number above 1, got {train_length}")
    return length.item()


def ssmax(s: float | Tensor, b: float | Tensor | None = None) -> Mod:
    """Scalable softmax: multiplies the score by s ln(n) + b.

    s' = (s_h ln n + b_h) s with n = q_idx + 1.

    Args:
        s: growth rate, number or tensor of shape `(H,)` (or `(1,)` for all heads), learnable if it
            requires grad. The paper learns one for each head and layer.
        b: offset, as `s`; none by default, as the paper recommends for length generalisation.

    Returns:
        A score_mod; it returns `promote_types(score.dtype, float32)`.

    Raises:
        TypeError: if `s` or `b` has the wrong type.
        ValueError: if its shape does not fit.

    Reference: Nakanishi, "Scalable-Softmax Is Superior for Attention", arXiv 2501.19399.
    """
    rate, offset = parameter("s", s), parameter("b", 0.0 if b is None else b)

    def factor(h: Tensor, n: Tensor, log: Callable[[Tensor], Tensor]) -> Tensor:
        return at_head(rate, h, n.dtype) * log(n) + at_head(offset, h, n.dtype)

    return _row_temperature("ssmax", factor, rate, offset)


def logn(train_length: float | None = None, s: float | Tensor = 1.0) -> Mod:
    """Multiplies the score by the logarithm of the number of keys.

    Without a length, s' = s_h ln(n) s (Chiang & Cholak; SSMax without its offset); with the length
    L0 of training, s' = s_h max(1, ln(n) / ln(L0)) s (Su; Qwen), which changes nothing at lengths
    that were trained on. n = q_idx + 1.

    Args:
        train_length: L0 in tokens, above 1, or None.
        s: factor, number or tensor of shape `(H,)` (or `(1,)` for all heads), learnable if it
            requires grad; the scale-invariant paper's figures take 0.4.

    Returns:
        A score_mod; it returns `promote_types(score.dtype, float32)`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `train_length` is not above 1, or the shape of `s` does not fit.

    Reference: Chiang & Cholak, arXiv 2202.12172; the clipped form is that of Qwen's public model
    code, which applies it only beyond L0 and in inference.
    """
    rate = parameter("s", s)
    # Without a length nothing is clipped: ln(1) = 0 is the least there is.
    least = 0.0 if train_length is None else math.log(_trained_length(train_length))
    floor = scalar(least)
    unit = scalar(least or 1.0)

    def factor(h: Tensor, n: Tensor, log: Callable[[Tensor], Tensor]) -> Tensor:
        log_n = torch.maximum(log(n), floor.to(n.dtype)) / unit.to(n.dtype)
        return at_head(rate, h, n.dtype) * log_n

    return _row_temperature("logn", factor, rate)


def infoscale(train_length: float, head_dim: int) -> Mod:
    """Multiplies the score so that the entropy of attention stays that of the trained length.

    s' = s sqrt(1 - n^(-2/d)) / sqrt(1 - L0^(-2/d)) with n = q_idx + 1. It is below 1 for rows
    shorter than L0, and bounded: at d = 64 and L0 = 512 it is 1.25 for 32,768 keys.

    Args:
        train_length: L0 in tokens, above 1.
        head_dim: channels d of a head, at least 1.

    Returns:
        A score_mod; it returns `promote_types(score.dtype, float32)`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `train_length` is not above 1 or `head_dim` below 1.

    Reference: Li et al., "Information Entropy Invariance", arXiv 2501.08570. The formula is that
    of the authors' code for GAU, where d is the size of the key; their code for DNABERT-2 puts the
    width of the model for d.
    """
    exponent = -2 / integer("head_dim", head_dim)
    power = scalar(exponent)
    trained = -torch.expm1(power * math.log(_trained_length(train_length)))

    def factor(h: Tensor, n: Tensor, log: Callable[[Tensor], Tensor]) -> Tensor:
        share = -torch.expm1(power.to(n.dtype) * log(n)) / trained.to(n.dtype)
        return share.clamp(min=0).sqrt()

    return _row_temperature("infoscale", factor)


def llama4_temperature(scale: float | Tensor = 0.1, interval: int = 8192) -> Mod:
    """Multiplies the score by a factor that rises by a step every `interval` tokens.

    s' = (1 + scale ln(floor((q_idx + 1) / interval) + 1)) s. Llama 4 has it on its layers without
    rotary positions, every fourth (see `llama4_layers`).

    Args:
        scale: height of the steps, number or tensor of shape `(H,)` or `(1,)`, learnable if it
            requires grad.
        interval: tokens between steps, at least 1.

    Returns:
        A score_mod; it returns `promote_types(score.dtype, float32)`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `interval` is below 1, or the shape of `scale` does not fit.

    Reference: the transformers library's Llama 4, `attn_scale` and `floor_scale`.
    """
    return _step_temperature("llama4_temperature", "scale", scale, interval, ahead=0)


def ministral_temperature(beta: float | Tensor = 0.1, train_length: int = 16384) -> Mod:
    """Multiplies the score by a factor that rises by a step at every multiple of the length.

    s' = (1 + beta ln(floor(q_idx / L0) + 1)) s: the steps of `llama4_temperature` come one token
    later.

    Args:
        beta: height of the steps, number or tensor of shape `(H,)` or `(1,)`, learnable if it
            requires grad.
        train_length: L0 in tokens, at least 1.

    Returns:
        A score_mod; it returns `promote_types(score.dtype, float32)`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `train_length` is below 1, or the shape of `beta` does not fit.

    Reference: the transformers library's Ministral 3, `llama_4_scaling_beta`.
    """
    integer("train_length", train_length)
    return _step_temperature("ministral_temperature", "beta", beta, train_length, ahead=1)


def _step_temperature(
    name: str, argument: str, height: float | Tensor, interval: int, ahead: int
) -> Mod:
    step = parameter(argument, height)
    width = scalar(integer("interval", interval))

    def factor(h: Tensor, n: Tensor, log: Callable[[Tensor], Tensor]) -> Tensor:
        steps = torch.floor((n - ahead) / width.to(n.dtype))
        return 1 + at_head(step, h, n.dtype) * log(steps + 1)

    return _row_temperature(name, factor, step)


def asentmax_scale(
    beta: float | Tensor, gamma: float | Tensor = 1.0, delta: float | Tensor = 1.0
) -> Mod:
    """Multiplies the score by ASEntmax's factor, delta + beta (ln n)^gamma.

    s' = (delta_h + beta_h ln(q_idx + 2)^gamma_h) s: the authors count from 2, so that no
    logarithm is 0. This is the scale alone; ASEntmax then takes entmax where attention takes
    softmax. Their default computes beta and gamma from each token: `asentmax_queries`.

    Args:
        beta: number or tensor of shape `(H,)` or `(1,)`, learnable if it requires grad; the
            authors draw it from [0.1, 1].
        gamma: exponent, likewise; the authors draw it from N(0, 0.1).
        delta: offset, likewise.

    Returns:
        A score_mod; it returns `promote_types(score.dtype, float32)`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if its shape does not fit.

    Reference: Vasylenko et al., "Long-Context Generalization with Sparse Attention", arXiv
    2506.16640, and the authors' public code.
    """
    parameters = parameter("beta", beta), parameter("gamma", gamma), parameter("delta", delta)

    def factor(h: Tensor, n: Tensor, log: Callable[[Tensor], Tensor]) -> Tensor:
        beta, gamma, delta = (at_head(value, h, n.dtype) for value in parameters)
        return delta + beta * log(n + 1) ** gamma

    return _row_temperature("asentmax_scale", factor, *parameters)


def power_law_temperature(exponent: float, c: float | Tensor = 1.0) -> Mod:
    """Multiplies the score by a power of the number of keys.

    s' = c_h n^exponent s with n = q_idx + 1. For keys uniform on the sphere of d dimensions and a
    fixed query, attention turns from averaging to picking the nearest key at n^(2/(d-1)), so
    `exponent = 2 / (d - 1)` is critical. The theory leaves the constant c free.

    Args:
        exponent: power of n, positive.
        c: factor, number or tensor of shape `(H,)` or `(1,)`, learnable if it requires grad.

    Returns:
        A score_mod; it returns `promote_types(score.dtype, float32)`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `exponent` is not positive, or the shape of `c` does not fit.

    Reference: Bruno et al., "Scaling Limits of Long-Context Transformers", arXiv 2605.08505
    (checked in its abstract).
    """
    power = scalar(number("exponent", exponent, positive=True))
    constant = parameter("c", c)

    def factor(h: Tensor, n: Tensor, log: Callable[[Tensor], Tensor]) -> Tensor:
        return at_head(constant, h, n.dtype) * torch.exp(power.to(n.dtype) * log(n))

    return _row_temperature("power_law_temperature", factor, constant)


def log_power_temperature(exponent: float = 1.0, c: float | Tensor = 1.0) -> Mod:
    """Multiplies the score by a power of the logarithm of the number of keys.

    s' = c_h (ln n)^exponent s with n = q_idx + 1. The critical exponent depends on how many scores
    of a row lie within each gap of its largest: 1/2 for Gaussian scores, 1 for keys that all have
    the same cosine rho, then with c = 1/(1 - rho), and 2 are among the cases of the theory. With 1
    this is `logn`.

    Args:
        exponent: power of ln n, positive.
        c: factor, number or tensor of shape `(H,)` or `(1,)`, learnable if it requires grad.

    Returns:
        A score_mod; it returns `promote_types(score.dtype, float32)`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `exponent` is not positive, or the shape of `c` does not fit.

    Reference: Hayase & Karakida, "A Unified Framework for Critical Scaling of Inverse Temperature
    in Self-Attention", arXiv 2605.12697; Chen et al., "Critical attention scaling in long-context
    transformers", arXiv 2510.05554 (both checked in their abstracts; 1/(1 - rho) in a summary).
    """
    power = scalar(number("exponent", exponent, positive=True))
    constant = parameter("c", c)

    def factor(h: Tensor, n: Tensor, log: Callable[[Tensor], Tensor]) -> Tensor:
        return at_head(constant, h, n.dtype) * log(n).clamp(min=0) ** power.to(n.dtype)

    return _row_temperature("log_power_temperature", factor, constant)


def yarn_temperature(factor: float) -> Mod:
    """Multiplies the score by YaRN's factor for a context stretched by `factor`.

    s' = (0.1 ln(factor) + 1)² s, the same for every row. `yarn_rope` has it already, on the
    cosines and sines; this is for another rotary scheme.

    Args:
        factor: wanted length over trained length, at least 1.

    Returns:
        A score_mod; it returns `promote_types(score.dtype, float32)`.

    Raises:
        TypeError: if `factor` has the wrong type.
        ValueError: if it is below 1.

    Reference: Peng et al., "YaRN", arXiv 2309.00071, section 3.4.
    """
    if number("factor", factor, positive=True) < 1:
        raise ValueError(f"factor must be at least 1, got {factor}")
    sharpening = scalar((0.1 * math.log(factor) + 1) ** 2)

    def constant(h: Tensor, n: Tensor, log: Callable[[Tensor], Tensor]) -> Tensor:
        return sharpening.to(n.dtype)

    return _row_temperature("yarn_temperature", constant)
