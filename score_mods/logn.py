"""Row temperatures by the logarithm of the number of keys: LogN and SSMax.

Both multiply every score of a row by a number that grows with n, the number of keys that the row
attends to. For a causal row n = q_idx + 1, and that is what these functions take: they depend on
absolute position, so packed documents and a decoded token need `with_positions` or `with_offset`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from score_mods._captured import Mod, at_head, described, parameter
from score_mods.fast import fast_log, has_instructions, wants_instructions


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
    rate = parameter("s", s)
    offset = parameter("b", 0.0 if b is None else b)
    instructions = has_instructions()

    def ssmax_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        dtype = torch.promote_types(score.dtype, torch.float32)
        n = (q_idx + 1).to(dtype)
        log_n = fast_log(n) if instructions and wants_instructions(score) else n.log()
        return (at_head(rate, h, dtype) * log_n + at_head(offset, h, dtype)) * score

    return described(ssmax_mod, "ssmax", rate, offset)


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
    if train_length is None:
        return described(ssmax(s), "logn", parameter("s", s))
    length = parameter("train_length", train_length, positive=True)
    if length.ndim or length <= 1:
        raise ValueError(f"train_length must be a number above 1, got {train_length}")
    factor = parameter("s", s)
    instructions = has_instructions()
    log_length = torch.tensor(math.log(length), dtype=torch.float64)

    def logn_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        dtype = torch.promote_types(score.dtype, torch.float32)
        n = (q_idx + 1).to(dtype)
        log_n = fast_log(n) if instructions and wants_instructions(score) else n.log()
        temperature = (log_n / log_length.to(dtype)).clamp(min=1)
        return at_head(factor, h, dtype) * temperature * score

    return described(logn_mod, "logn", factor)
