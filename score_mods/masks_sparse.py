"""Sparse masks for long sequences: chunks, Λ, StreamingLLM, Longformer and LongNet."""

from __future__ import annotations

import math

import torch
from attn_gym.masks import generate_global_sliding_window
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, or_masks

from score_mods._captured import Mod, described
from score_mods._checks import integer, kind_of, sizes
from score_mods.masks import causal, sliding_window


def chunked(chunk: int) -> Mod:
    """Lets a query see the keys of its own chunk of `chunk` tokens, later ones too.

    floor(q_idx / chunk) == floor(kv_idx / chunk). Add causality with `and_masks(causal,
    chunked(chunk))`, as Llama 4 has it on its layers with rotary positions.

    Args:
        chunk: tokens in a chunk, at least 1; 8192 in Llama 4.

    Returns:
        A mask_mod.

    Raises:
        TypeError: if `chunk` is no int.
        ValueError: if it is below 1.
    """
    size = torch.tensor(integer("chunk", chunk))

    def chunked_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx // size == kv_idx // size

    def bounds(
        b: Tensor, h: Tensor, q_lo: Tensor, q_hi: Tensor, kv_lo: Tensor, kv_hi: Tensor
    ) -> tuple[Tensor, Tensor]:
        q_first, q_last, kv_first, kv_last = (x // size for x in (q_lo, q_hi, kv_lo, kv_hi))
        some = (q_first <= kv_last) & (kv_first <= q_last)
        return some, (q_first == kv_last) & (kv_first == q_last)

    chunked_mask.block_bounds = bounds  # type: ignore[attr-defined]
    return described(chunked_mask, f"chunked({chunk})")


def first_keys(count: int) -> Mod:
    """The mask of the first `count` keys."""
    limit = torch.tensor(count)

    def first_keys_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < limit

    def bounds(
        b: Tensor, h: Tensor, q_lo: Tensor, q_hi: Tensor, kv_lo: Tensor, kv_hi: Tensor
    ) -> tuple[Tensor, Tensor]:
        return kv_lo < count, kv_hi < count

    first_keys_mask.block_bounds = bounds  # type: ignore[attr-defined]
    return described(first_keys_mask, f"first_keys({count})")


def lambda_mask(window: int, sinks: int = 10) -> Mod:
    """LM-Infinite's Λ: lets a query see the last `window` keys and the first `sinks`.

    0 <= q_idx - kv_idx < window, or kv_idx < sinks and kv_idx <= q_idx. This is the mask alone;
    `lm_infinite` also holds the distance of the first keys at the window.

    Args:
        window: number of keys, the query's own among them, at least 1; the trained length.
        sinks: number of keys at the start, at least 1; the authors take 10 to 100.

    Returns:
        A mask_mod.

    Raises:
        TypeError: if an argument is no int.
        ValueError: if it is below 1.

    Reference: Han et al., "LM-Infinite", arXiv 2308.16137.
    """
    first = and_masks(causal, first_keys(integer("sinks", sinks)))
    return described(or_masks(sliding_window(window), first), f"lambda_mask({window}, {sinks})")


def streaming_llm_mask(window: int = 2000, sinks: int = 4) -> Mod:
    """StreamingLLM's mask: what is left in its cache, which is `lambda_mask` with its numbers.

    This is the mask alone; `streaming_llm` also gives positions inside the cache.

    Args:
        window: number of recent keys, the query's own among them, at least 1.
        sinks: number of keys at the start, at least 1.

    Returns:
        A mask_mod.

    Raises:
        TypeError: if an argument is no int.
        ValueError: if it is below 1.

    Reference: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv
    2309.17453.
    """
    mask = lambda_mask(window, sinks)
    return described(mask, f"streaming_llm_mask({window}, {sinks})")


def longformer(is_global: Tensor, each_side: int = 256) -> Mod:
    """Longformer: a window on both sides, and tokens that see all and are seen by all.

    |q_idx - kv_idx| <= each_side, or is_global[q_idx], or is_global[kv_idx]: attention-gym's
    `generate_global_sliding_window`, with its blocks in closed form. Add causality with
    `and_masks(causal, ...)`. The published model gives its global rows projections of their own,
    which takes a second call; this is the mask with one projection.

    Args:
        is_global: whether a token is global, bool, `(T,)`.
        each_side: keys seen on each side of the query, at least 0; the published model's
            `attention_window` of 512 is 256 on each side.

    Returns:
        A mask_mod for self-attention over `T` positions.

    Raises:
        TypeError: if `is_global` is no bool tensor, or `each_side` no int.
        ValueError: if `is_global` has not one axis, or `each_side` is below 0.

    Reference: Beltagy et al., "Longformer", arXiv 2004.05150.
    """
    if not isinstance(is_global, Tensor) or is_global.dtype != torch.bool:
        raise TypeError(f"is_global must be a bool tensor, got {kind_of(is_global)}")
    if is_global.ndim != 1:
        raise ValueError(f"is_global must have shape (T,), got {tuple(is_global.shape)}")
    reach = integer("each_side", each_side, at_least=0)
    mask = generate_global_sliding_window(reach, is_global)
    before = torch.nn.functional.pad(is_global.cumsum(0), (1, 0))

    def bounds(
        b: Tensor, h: Tensor, q_lo: Tensor, q_hi: Tensor, kv_lo: Tensor, kv_hi: Tensor
    ) -> tuple[Tensor, Tensor]:
        some = (q_lo - kv_hi <= reach) & (kv_lo - q_hi <= reach)
        every = (q_hi - kv_lo <= reach) & (kv_hi - q_lo <= reach)
        for lo, hi in ((q_lo, q_hi), (kv_lo, kv_hi)):
            count = before[hi + 1] - before[lo]
            some, every = some | (count > 0), every | (count == hi + 1 - lo)
        return some, every

    mask.block_bounds = bounds
    mask.made_for = (math.inf, len(is_global), len(is_global))
    return described(mask, f"longformer({each_side})")


def longnet(segments: tuple[int, ...], dilations: tuple[int, ...]) -> tuple[Mod, Mod]:
    """LongNet's dilated attention, all its patterns in one call.

    In pattern k, a token is in a segment of w_k tokens, of which head h keeps every r_k-th, from
    the (h mod r_k)-th on; they see one another. LongNet computes each pattern apart and weighs the
    outputs by the sums of their exponentials, which is attention where a key that m patterns show
    counts m times:

        s' = s + ln m,   visible where m > 0,
        m = #{k: floor(q_idx / w_k) = floor(kv_idx / w_k),
                 q_idx mod w_k = kv_idx mod w_k = h (mod r_k)}.

    Add causality with `and_masks(causal, mask)`. The gradient is that of the whole formula;
    torchscale's code treats the weights of the patterns as constants, and gives head h the offset
    floor(h / ceil(H / r_k)). A query that no pattern shows any key has output 0, so one dilation
    should be 1.

    Args:
        segments: lengths w_k of the segments, at least 1; the paper's grow geometrically.
        dilations: steps r_k, as many as segments, at least 1.

    Returns:
        `(score_mod, mask_mod)`, to be used together. They use absolute positions.

    Raises:
        TypeError: if an argument is no tuple of ints.
        ValueError: if a number is below 1, or there are not as many of both.

    Reference: Ding et al., "LongNet", arXiv 2307.02486, section 2.2; torchscale, checked.
    """
    if len(sizes("segments", segments)) != len(sizes("dilations", dilations)):
        raise ValueError(
            f"segments and dilations must be as many, got {len(segments)} and {len(dilations)}"
        )
    patterns = [
        (torch.tensor(w), torch.tensor(r)) for w, r in zip(segments, dilations, strict=True)
    ]

    def multiplicity(h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        count = (q_idx - kv_idx) * 0
        for w, r in patterns:
            kept = (q_idx % w % r == h % r) & (kv_idx % w % r == h % r)
            count = count + (kept & (q_idx // w == kv_idx // w))
        return count

    def longnet_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        count = multiplicity(h, q_idx, kv_idx).clamp(min=1)
        return score + count.to(torch.promote_types(score.dtype, torch.float32)).log()

    def longnet_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return multiplicity(h, q_idx, kv_idx) > 0

    def bounds(
        b: Tensor, h: Tensor, q_lo: Tensor, q_hi: Tensor, kv_lo: Tensor, kv_hi: Tensor
    ) -> tuple[Tensor, Tensor]:
        some = every = torch.zeros_like(q_lo * kv_lo, dtype=torch.bool)
        for w, r in patterns:
            q_first, q_last, kv_first, kv_last = (x // w for x in (q_lo, q_hi, kv_lo, kv_hi))
            some = some | ((q_first <= kv_last) & (kv_first <= q_last))
            one = (q_first == kv_last) & (kv_first == q_last) & (r == 1)
            every = every | one
        return some, every

    longnet_mask.block_bounds = bounds  # type: ignore[attr-defined]
    return described(longnet_mod, "longnet"), described(longnet_mask, "longnet")
