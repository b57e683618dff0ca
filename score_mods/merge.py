"""Attention over two sets of keys, put together from their outputs and log-sum-exps."""

from __future__ import annotations

import torch
from torch import Tensor

from score_mods._checks import floating


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

        out = (exp(lse_a) out_a + exp(lse_b) out_b) / (exp(lse_a) + exp(lse_b)),
        lse = log(exp(lse_a) + exp(lse_b)),

    in float32 or better, differentiable in all four. A row that is empty (0 and -inf) on one side
    is the other's; one that is empty on both stays so, where attention-gym's `merge_attention`
    gives NaN.

    Args:
        out_a: output over the first set, `(B, H, T, D_v)`.
        lse_a: its natural log-sum-exp, `(B, H, T)`, float32 or float64.
        out_b: output over the second set, as `out_a`.
        lse_b: its log-sum-exp.

    Returns:
        `(out, lse)` over both, in the dtypes of `out_a` and `lse_a`.

    Raises:
        TypeError: if an argument is no floating tensor.
        ValueError: if shapes or devices do not fit, or an lse is in half precision.
    """
    check_partial("a", out_a, lse_a)
    check_partial("b", out_b, lse_b)
    if out_a.shape != out_b.shape:
        raise ValueError(f"out_b must have out_a's shape {(*out_a.shape,)}, got {(*out_b.shape,)}")
    if out_a.device != out_b.device:
        raise ValueError(f"out_b must be on {out_a.device} as out_a is, got {out_b.device}")
    top = torch.maximum(lse_a, lse_b).detach()
    top = torch.where(top.isneginf(), 0, top)
    weight_a, weight_b = (lse_a - top).exp(), (lse_b - top).exp()
    total = weight_a + weight_b
    empty = total == 0
    safe = torch.where(empty, 1, total)
    out = (weight_a / safe)[..., None] * out_a + (weight_b / safe)[..., None] * out_b
    lse = torch.where(empty, -torch.inf, top + safe.log())
    return out.to(out_a.dtype), lse.to(lse_a.dtype)


def check_partial(name: str, out: Tensor, lse: Tensor) -> None:
    """Raise TypeError or ValueError if these are no output of attention and its log-sum-exp."""
    suffix = name and f"_{name}"
    floating(f"out{suffix}", out), floating(f"lse{suffix}", lse)
    if out.ndim != 4 or lse.shape != out.shape[:-1]:
        raise ValueError(
            f"out{suffix} and lse{suffix} must have shapes (B, H, T, D_v) and (B, H, T), "
            f"got {(*out.shape,)} and {(*lse.shape,)}"
        )
    if lse.device != out.device:
        raise ValueError(
            f"lse{suffix} must be on {out.device} as out{suffix} is, got {lse.device}"
        )
    if lse.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"lse{suffix} must be float32 or float64, got {lse.dtype}")
