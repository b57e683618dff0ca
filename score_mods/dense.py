"""The dense form of attention with score_mods and masks: any dtype, differentiable, the oracle."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from score_mods._captured import Mod, check_mask_mod, check_score_mod, check_sizes, to_device
from score_mods._checks import boolean, number


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Mod | None,
    mask_mod: Mod | BlockMask | None,
    scale: float | None,
    enable_gqa: bool,
) -> None:
    """Raise TypeError or ValueError unless the arguments of attention fit each other."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if not x.is_floating_point():
            raise TypeError(f"{name} must be floating, got {x.dtype}")
        if x.ndim != 4:
            raise ValueError(f"{name} must have shape (B, H, T, D), got {tuple(x.shape)}")
        if 0 in x.shape:
            raise ValueError(f"{name} must have no empty axis, got {tuple(x.shape)}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} must have q's dtype and device, {q.dtype} on {q.device}, "
                f"got {x.dtype} on {x.device}"
            )
    boolean("enable_gqa", enable_gqa)
    B, H, T_q, D = q.shape
    if k.shape[0] != B or k.shape[3] != D:
        raise ValueError(f"k must have shape ({B}, H_kv, T, {D}) to fit q, got {tuple(k.shape)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v must have shape ({B}, {k.shape[1]}, {k.shape[2]}, D_v) to fit k, "
            f"got {tuple(v.shape)}"
        )
    if k.shape[1] != H and not enable_gqa:
        raise ValueError(f"k must have q's {H} heads unless enable_gqa=True, got {k.shape[1]}")
    if H % k.shape[1]:
        raise ValueError(f"q's heads must be a multiple of k's, got {H} and {k.shape[1]}")
    if score_mod is not None:
        check_score_mod(score_mod)
        heads = getattr(score_mod, "num_heads", None)
        if heads not in (None, H):
            raise ValueError(f"score_mod has parameters for {heads} heads, q has {H}")
    if isinstance(mask_mod, BlockMask):
        if mask_mod.seq_lengths != (T_q, k.shape[2]):
            raise ValueError(
                f"mask_mod must be for the lengths {(T_q, k.shape[2])}, "
                f"got a BlockMask for {mask_mod.seq_lengths}"
            )
        blocks = mask_mod.kv_num_blocks.shape[:2]
        if blocks[0] not in (1, B) or blocks[1] not in (1, H):
            raise ValueError(
                f"mask_mod must be for a batch of {B} and {H} heads, or for 1 that all share, "
                f"got a BlockMask for {tuple(blocks)}"
            )
    elif mask_mod is not None:
        check_mask_mod(mask_mod)
    if torch.compiler.is_compiling():  # closures and symbolic numbers are not to be looked into
        return
    for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if mod is not None and not isinstance(mod, BlockMask):
            check_sizes(name, mod, B, T_q, k.shape[2])
    if scale is not None:
        number("scale", scale)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention by the T×T matrix of scores, as FlexAttention defines it.

    out = softmax(mask(score_mod(scale q kᵀ))) v, computed in `promote_types(q.dtype, float32)`,
    float64 if that is what q is, under autocast too. Gradients reach q, k, v and whatever the
    score_mod captures. Memory and time grow as T².

    Args:
        q: queries, `(B, H, T_q, D)`.
        k: keys, `(B, H_kv, T, D)`; H_kv divides H.
        v: values, `(B, H_kv, T, D_v)`.
        score_mod: a score_mod; it is called once, with index tensors that broadcast to `(B, H,
            T_q, T)`.
        mask_mod: a mask_mod, called likewise.
        scale: factor of the scores, 1/sqrt(D) if not given.
        return_lse: whether to return the rows' log-sum-exp too.

    Returns:
        `(B, H, T_q, D_v)` in the dtype of q; with `return_lse`, also the natural log of each row's
        sum, `(B, H, T_q)`, in the dtype of the computation. A row that sees no key gives 0 and
        -inf.

    Raises:
        TypeError: if an argument has the wrong type, or a mod the wrong number of arguments.
        ValueError: if shapes, dtypes, devices or lengths do not fit.
    """
    check(q, k, v, score_mod, mask_mod, scale, enable_gqa=True)
    boolean("return_lse", return_lse)
    if q.dtype.itemsize < 2:
        raise TypeError(f"q must have a floating dtype of 16 bits or more, got {q.dtype}")
    with torch.autocast(q.device.type, enabled=False):
        out, lse = _attend(q, k, v, score_mod, mask_mod, scale)
    return (out, lse) if return_lse else out


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Mod | None,
    mask_mod: Mod | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    B, H, T_q, D = q.shape
    groups, T = H // k.shape[1], k.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    # Not by repeat_interleave, with which torch 2.11 exports no graph of any length.
    shared = torch.arange(H, device=q.device) // groups
    keys, values = (x.to(dtype).index_select(1, shared) for x in (k, v))
    score = (q.to(dtype) @ keys.mT) * (D**-0.5 if scale is None else scale)

    index = (
        torch.arange(B, device=q.device)[:, None, None, None],
        torch.arange(H, device=q.device)[:, None, None],
        torch.arange(T_q, device=q.device)[:, None],
        torch.arange(T, device=q.device),
    )
    if score_mod is not None:
        score = to_device(score_mod, q.device)(score, *index).to(dtype)
    if mask_mod is not None:
        score = torch.where(to_device(mask_mod, q.device)(*index), score, -torch.inf)

    # Shift by the row's maximum, or by 0 where there is none, so that nothing is ever inf - inf.
    top = score.detach().amax(-1, keepdim=True)
    top = torch.where(top.isneginf(), 0, top)
    weight = torch.exp(score - top)
    total = weight.sum(-1, keepdim=True)
    empty = total == 0
    safe = torch.where(empty, 1, total)
    out = ((weight / safe) @ values).to(q.dtype)
    return out, torch.where(empty, -torch.inf, top + safe.log()).squeeze(-1)
