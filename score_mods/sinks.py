"""Attention sinks: what a row may give to no key at all.

A sink is one more key, with a logit of its own and a value of zero: it adds exp(sink) to the
softmax's denominator. Attention without it is `out` with the denominator exp(lse), so attention
with it is `out` times exp(lse) / (exp(lse) + exp(sink)), exactly, and can be had after the fact
from (out, lse) in float32. To leave the scores of keys that serve as sinks alone, see
`exempt_keys`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from score_mods._captured import described, parameter
from score_mods.merge import check_partial

PostOp: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def attention_sink(sink: float | Tensor) -> PostOp:
    """Adds a logit to every row's softmax that carries no value.

    out' = sigmoid(lse - sink_h) out, lse' = log(exp(lse) + exp(sink_h)). A row that sees no key
    stays zero. Use it on `attention(..., return_lse=True)`; on a CPU with `impl="dense"`, since
    compiled FlexAttention gives no lse there.

    Args:
        sink: the logit, in the units of the scaled scores: a number, or a tensor of shape `(H,)`
            (or `(1,)` for all heads), learnable if it requires grad.

    Returns:
        A post-op `(out, lse) -> (out, lse)` for `out` of shape `(B, H, T, D_v)` and `lse` of
        shape `(B, H, T)`, float32 or float64; it keeps their dtypes and raises a ValueError where
        they do not fit.

    Raises:
        TypeError: if `sink` has the wrong type.
        ValueError: if its shape does not fit.

    Reference: gpt-oss (OpenAI, 2025), whose public code appends the logit to the scores and drops
    its column after the softmax: checked against that code.

    >>> out, lse = torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3)
    >>> attention_sink(0.0)(out, lse)[0][0, 0, 0].tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    logit = parameter("sink", sink)

    def attention_sink_op(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        check_partial("", out, lse)
        if logit.numel() not in (1, out.shape[1]):
            raise ValueError(f"sink is for {logit.numel()} heads, out has {out.shape[1]}")
        column = logit.to(lse.device, lse.dtype).reshape(-1, 1)
        kept = torch.sigmoid(lse - column)[..., None]
        return (kept * out).to(out.dtype), torch.logaddexp(lse, column)

    return described(attention_sink_op, "attention_sink", logit)


def softmax_off_by_one() -> PostOp:
    """Adds 1 to every row's softmax denominator, so that a row may attend to nothing.

    out' = sum_j exp(s_j) v_j / (1 + sum_j exp(s_j)): `attention_sink(0.0)`.

    Returns:
        A post-op, as `attention_sink`.

    Reference: Miller, "Attention Is Off By One" (evanmiller.org, 2023).
    """
    return described(attention_sink(0.0), "softmax_off_by_one")
