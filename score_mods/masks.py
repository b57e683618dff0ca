"""Masks, and the BlockMask of any mask without a T×T tensor.

A mask_mod of this library knows its blocks in closed form: its attribute `block_bounds(b, h, q_lo,
q_hi, kv_lo, kv_hi)` returns two bool tensors that say, for a block of queries q_lo..q_hi and keys
kv_lo..kv_hi (inclusive), whether some pair may be visible and whether every pair is. `and_masks`
and `or_masks` of such masks are combined from their parts. "May": a block that is taken in
although it is empty costs time and changes nothing, since the kernel still applies the mask_mod to
it; a block said to be full is not checked again. Any other mask is evaluated a row of blocks at a
time.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import lru_cache

import torch
from attn_gym.masks import causal_mask as causal
from attn_gym.masks import generate_prefix_lm_mask
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, and_masks, or_masks

from score_mods._captured import (
    Mod,
    check_mask_mod,
    check_sizes,
    described,
    kept,
    operands,
    to_device,
)
from score_mods._checks import integer, integers

__all__ = [
    "and_masks",
    "causal",
    "create_block_mask",
    "document",
    "or_masks",
    "prefix_lm",
    "sliding_window",
]

Bounds = Callable[..., tuple[Tensor, Tensor]]


def _causal_bounds(
    b: Tensor, h: Tensor, q_lo: Tensor, q_hi: Tensor, kv_lo: Tensor, kv_hi: Tensor
) -> tuple[Tensor, Tensor]:
    return q_hi >= kv_lo, q_lo >= kv_hi


causal.block_bounds = _causal_bounds


def sliding_window(window: int) -> Mod:
    """Lets a query see the last `window` keys, itself included.

    0 <= q_idx - kv_idx < window. attention-gym's `generate_sliding_window(window)` lets it see
    window + 1.

    Args:
        window: number of keys, at least 1.

    Returns:
        A mask_mod.

    Raises:
        TypeError: if `window` is no int.
        ValueError: if it is below 1.
    """
    size = torch.tensor(integer("window", window))

    def sliding_window_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < size)

    def bounds(
        b: Tensor, h: Tensor, q_lo: Tensor, q_hi: Tensor, kv_lo: Tensor, kv_hi: Tensor
    ) -> tuple[Tensor, Tensor]:
        some = (q_hi >= kv_lo) & (q_lo - kv_hi < window)
        return some, (q_lo >= kv_hi) & (q_hi - kv_lo < window)

    sliding_window_mask.block_bounds = bounds  # type: ignore[attr-defined]
    return described(sliding_window_mask, f"sliding_window({window})")


def prefix_lm(prefix_length: int) -> Mod:
    """Lets every query see the first `prefix_length` keys, and the keys up to itself.

    kv_idx < prefix_length or kv_idx <= q_idx: attention-gym's `generate_prefix_lm_mask`, with its
    blocks in closed form.

    Args:
        prefix_length: number of keys, at least 1.

    Returns:
        A mask_mod.

    Raises:
        TypeError: if `prefix_length` is no int.
        ValueError: if it is below 1.
    """
    prefix_lm_mask = generate_prefix_lm_mask(integer("prefix_length", prefix_length))

    def bounds(
        b: Tensor, h: Tensor, q_lo: Tensor, q_hi: Tensor, kv_lo: Tensor, kv_hi: Tensor
    ) -> tuple[Tensor, Tensor]:
        some = (kv_lo < prefix_length) | (q_hi >= kv_lo)
        # Full if every key is in the prefix or not after the block's first query.
        return some, kv_hi <= torch.clamp(q_lo, min=prefix_length - 1)

    prefix_lm_mask.block_bounds = bounds
    return described(prefix_lm_mask, f"prefix_lm({prefix_length})")


def document(document_ids: Tensor) -> Mod:
    """Lets a query see the keys of its own document: packed sequences.

    document_ids[q_idx] == document_ids[kv_idx]. Add causality with `and_masks(causal,
    document(ids))`. Score_mods that depend on distance alone need nothing else; those that use
    absolute positions need `with_positions`.

    Args:
        document_ids: one integer for each position, never falling along the sequence, `(T,)` or
            `(B, T)`.

    Returns:
        A mask_mod for self-attention over `T` positions.

    Raises:
        TypeError: if `document_ids` is no integer tensor.
        ValueError: if it has not one or two axes, or falls somewhere.
    """
    if integers("document_ids", document_ids).ndim not in (1, 2) or 0 in document_ids.shape:
        raise ValueError(
            "document_ids must have shape (T,) or (B, T), with no empty axis, "
            f"got {(*document_ids.shape,)}"
        )
    if not torch.compiler.is_compiling():
        # Not by their differences, which overflow in a small dtype.
        falls = document_ids[..., 1:] < document_ids[..., :-1]
        if bool(falls.any()):
            before, after = document_ids[..., :-1][falls][0], document_ids[..., 1:][falls][0]
            raise ValueError(
                f"document_ids must never fall along the sequence, got {after} after {before}"
            )
    ids = document_ids.contiguous()

    def document_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if ids.ndim == 1:
            return ids[q_idx] == ids[kv_idx]
        return ids[b, q_idx] == ids[b, kv_idx]

    def bounds(
        b: Tensor, h: Tensor, q_lo: Tensor, q_hi: Tensor, kv_lo: Tensor, kv_hi: Tensor
    ) -> tuple[Tensor, Tensor]:
        last = ids.shape[-1] - 1
        q_first, q_last, kv_first, kv_last = (
            ids[index.clamp(0, last)] if ids.ndim == 1 else ids[b, index.clamp(0, last)]
            for index in (q_lo, q_hi, kv_lo, kv_hi)
        )
        some = (q_first <= kv_last) & (kv_first <= q_last)
        return some, (q_first == kv_last) & (kv_first == q_last)

    document_mask.block_bounds = bounds  # type: ignore[attr-defined]
    length = ids.shape[-1]
    document_mask.made_for = (len(ids) if ids.ndim == 2 else math.inf, length, length)  # type: ignore[attr-defined]
    return described(document_mask, "document")


def bounds_of(mask_mod: Mod) -> Bounds | None:
    """`block_bounds` of a mask, or of an `and_masks` or `or_masks` of such masks, or None."""
    own = getattr(mask_mod, "block_bounds", None)
    if own is not None:
        return own
    parts = [bounds_of(part) for part in operands(mask_mod)]
    if not parts or None in parts:
        return None
    join = torch.logical_and if mask_mod.__qualname__.startswith("and_") else torch.logical_or

    def joined(*block: Tensor) -> tuple[Tensor, Tensor]:
        some, every = parts[0](*block)  # type: ignore[misc]
        for part in parts[1:]:
            part_some, part_every = part(*block)  # type: ignore[misc]
            some, every = join(some, part_some), join(every, part_every)
        return some, every

    return joined


def _blocks_by_evaluation(
    mask_mod: Mod,
    b: Tensor,
    h: Tensor,
    q_len: int,
    kv_len: int,
    block_size: tuple[int, int],
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Some and every pair visible, by evaluating `mask_mod` for one row of blocks at a time."""
    q_block, kv_block = block_size
    kv_idx = torch.arange(kv_len, device=device)

    def by_block(counts: Tensor) -> Tensor:
        padded = nn.functional.pad(counts, (0, -kv_len % kv_block))
        return padded.unflatten(-1, (-1, kv_block)).sum(-1)

    width = by_block(torch.ones_like(kv_idx))
    rows = []
    for start in range(0, q_len, q_block):
        q_idx = torch.arange(start, min(start + q_block, q_len), device=device)
        visible = mask_mod(b, h, q_idx[:, None], kv_idx)
        visible = visible.expand(torch.broadcast_shapes(visible.shape, (1, 1, len(q_idx), kv_len)))
        count = by_block(visible.sum(-2))
        rows.append((count > 0, count == width * len(q_idx)))
    return torch.stack([some for some, _ in rows], -2), torch.stack(
        [every for _, every in rows], -2
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of blocks, how many are set, and the indices with the set ones first.

    Of a batch both are `kept`: for a head axis of 1 Inductor would choose any stride, and
    FlexAttention's kernels step through the batch by it.
    """
    counts = blocks.sum(-1, dtype=torch.int32)
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    order = order.to(torch.int32)
    return (counts, order) if len(blocks) == 1 else (kept(counts), kept(order))


def built_block_mask(
    mask_mod: Mod,
    B: int,
    H: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    block_size: tuple[int, int] = (128, 128),
    compute_q_blocks: bool = True,
) -> BlockMask:
    """What `create_block_mask` returns, neither checked nor kept.

    `compute_q_blocks` says whether there will be a backward pass, which goes by columns.
    """
    mask_mod = to_device(mask_mod, device)
    b = torch.arange(B, device=device)[:, None, None, None]
    h = torch.arange(H, device=device)[:, None, None]
    bounds = bounds_of(mask_mod)
    if bounds is None:
        some, every = _blocks_by_evaluation(mask_mod, b, h, q_len, kv_len, block_size, device)
    else:
        q_lo = torch.arange(0, q_len, block_size[0], device=device)[:, None]
        kv_lo = torch.arange(0, kv_len, block_size[1], device=device)
        q_hi = (q_lo + block_size[0] - 1).clamp(max=q_len - 1)
        kv_hi = (kv_lo + block_size[1] - 1).clamp(max=kv_len - 1)
        some, every = to_device(bounds, device)(b, h, q_lo, q_hi, kv_lo, kv_hi)
    # A mask that ignores b or h has broadcast against them, and its blocks have one entry there.
    shape = torch.broadcast_shapes(
        some.shape, every.shape, (1, 1, -(-q_len // block_size[0]), -(-kv_len // block_size[1]))
    )
    some, every = some.expand(shape), every.expand(shape)
    return BlockMask.from_kv_blocks(
        *_ordered(some & ~every),
        *_ordered(every),
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod,
        seq_lengths=(q_len, kv_len),
        compute_q_blocks=compute_q_blocks,
    )


_kept_block_mask = lru_cache(maxsize=16)(built_block_mask)


def create_block_mask(
    mask_mod: Mod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str = "cpu",
    BLOCK_SIZE: int | tuple[int, int] = 128,
) -> BlockMask:
    """The BlockMask of a mask_mod, without a T×T tensor, cached.

    Takes what `torch.nn.attention.flex_attention.create_block_mask` takes. The masks of this
    library, their combinations by `and_masks` and `or_masks`, and `with_offset` of them are
    computed from the blocks' corners; other masks one row of blocks at a time, `BLOCK_SIZE *
    KV_LEN` values in memory. The blocks of the last 16 (mask, sizes, device) are kept: a mask
    whose captured tensors change in place must not be used again, save for the offset of
    `with_offset`.

    Args:
        mask_mod: a mask_mod; it must accept tensors of indices that broadcast, as every pointwise
            function does.
        B: batch size, if the mask depends on b, else None.
        H: number of query heads, if it depends on h, else None.
        Q_LEN: number of queries, at least 1.
        KV_LEN: number of keys, at least 1.
        device: where the BlockMask is to be used.
        BLOCK_SIZE: tokens in a block, or (queries, keys).

    Returns:
        A BlockMask.

    Raises:
        TypeError: if `mask_mod` is no mask_mod, or a size no int.
        ValueError: if a size is below 1, or the mask was made for fewer positions.
    """
    check_mask_mod(mask_mod)
    block_size = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    if not isinstance(block_size, tuple) or len(block_size) != 2:
        raise TypeError(f"BLOCK_SIZE must be an int or (queries, keys), got {BLOCK_SIZE!r}")
    B, H = (1 if n is None else n for n in (B, H))
    if not torch.compiler.is_compiling():
        sizes = {"B": B, "H": H, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN}
        for name, size in [*sizes.items(), *(("BLOCK_SIZE", size) for size in block_size)]:
            integer(name, size)
        check_sizes("mask_mod", mask_mod, B, Q_LEN, KV_LEN)
    device = torch.empty(0, device=device).device
    if torch.compiler.is_compiling():
        return built_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device, block_size)
    cached = _kept_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device, block_size)
    block_mask = copy.copy(cached)
    block_mask.mask_mod = to_device(mask_mod, device)
    return block_mask


def mask_of(block_mask: BlockMask) -> Mod:
    """The mask_mod of what FlexAttention's kernels see: full blocks, and the mask in partial ones.

    A BlockMask that was made of blocks may have a mask_mod that knows nothing of them.
    """
    inside = block_mask.mask_mod
    q_block, kv_block = block_mask.BLOCK_SIZE
    partial = _block_table(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = torch.zeros_like(partial)
    counts, indices = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    if counts is not None and indices is not None:
        full = _block_table(counts, indices)

    def blocks_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        batch, head = (x * (n > 1) for x, n in zip((b, h), partial.shape, strict=False))
        block = batch, head, q_idx // q_block, kv_idx // kv_block
        return full[block] | (partial[block] & inside(b, h, q_idx, kv_idx))

    return blocks_mask


def _block_table(counts: Tensor, indices: Tensor) -> Tensor:
    """Whether each block is among the first `counts` of its row's `indices`, bool."""
    return BlockMask.from_kv_blocks(counts, indices, compute_q_blocks=False).to_dense().bool()
