"""The dense form of attention with score_mods and masks: any dtype, differentiable, the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from score_mods._captured import Mod, to_device


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
    float64 if that is what q is. Gradients reach q, k, v and whatever the score_mod captures.
    Memory and time grow as T².

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
    """
    B, H, T_q, D = q.shape
    groups, T = H // k.shape[1], k.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys = k.to(dtype).repeat_interleave(groups, 1)
    values = v.to(dtype).repeat_interleave(groups, 1)
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
    top = (
        score.detach().amax(-1, keepdim=True) if T else score.new_full((B, H, T_q, 1), -torch.inf)
    )
    top = torch.where(top.isneginf(), 0, top)
    weight = torch.exp(score - top)
    total = weight.sum(-1, keepdim=True)
    empty = total == 0
    safe = torch.where(empty, 1, total)
    out = ((weight / safe) @ values).to(q.dtype)
    if not return_lse:
        return out
    return out, torch.where(empty, -torch.inf, top + safe.log()).squeeze(-1)
