"""Masks for tokens that lie on a grid, row by row: CLEAR's circles and NATTEN's boxes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from score_mods._captured import Mod, described
from score_mods._checks import integer, sizes


def _coordinates(index: Tensor, extents: list[Tensor]) -> list[Tensor]:
    """The coordinates of a flat index, the first axis' first, which may run past its extent."""
    found: list[Tensor] = []
    for extent in reversed(extents[1:]):
        found.append(index % extent)
        index = index // extent
    return [index, *reversed(found)]


def clear(shape: tuple[int, int], radius: int, text_length: int = 0) -> Mod:
    """CLEAR: lets an image token see those within a circle, and text see and be seen by all.

    dy² + dx² < radius² on the canvas, or q_idx < text_length, or kv_idx < text_length. The text
    tokens come first, then the image row by row. Keys after those are the paper's pooled tokens,
    averages of squares of the image's keys and values: image tokens see them all, and text none.

    Args:
        shape: height and width of the canvas, in tokens.
        radius: radius of the circle in tokens, at least 1; the paper has 8, 16 and 32.
        text_length: number of text tokens, at least 0.

    Returns:
        A mask_mod for `text_length + height * width` positions, and any number of pooled keys.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a number is out of its range, or `shape` has not two axes.

    Reference: Liu et al., "CLEAR: Conv-Like Linearization Revs Pre-Trained Diffusion Transformers
    Up", arXiv 2412.16112, and the authors' public code.
    """
    if len(sizes("shape", shape)) != 2:
        raise ValueError(f"shape must be a height and a width, got {shape}")
    reach, text = integer("radius", radius), integer("text_length", text_length, at_least=0)
    extents = [torch.tensor(extent) for extent in shape]
    start, square = torch.tensor(text), torch.tensor(reach**2)
    end = torch.tensor(text + math.prod(shape))

    def clear_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_y, q_x = _coordinates(q_idx - start, extents)
        kv_y, kv_x = _coordinates(kv_idx - start, extents)
        near = (q_y - kv_y) ** 2 + (q_x - kv_x) ** 2 < square
        by_text = (q_idx < start) & (kv_idx < end)
        by_image = (q_idx >= start) & (near | (kv_idx < start) | (kv_idx >= end))
        return by_text | by_image

    def bounds(
        b: Tensor, h: Tensor, q_lo: Tensor, q_hi: Tensor, kv_lo: Tensor, kv_hi: Tensor
    ) -> tuple[Tensor, Tensor]:
        q_top, q_bottom, kv_top, kv_bottom = (
            (x - start).clamp(min=0) // extents[1] for x in (q_lo, q_hi, kv_lo, kv_hi)
        )
        near = (q_top - kv_bottom < reach) & (kv_top - q_bottom < reach)
        text_sees, image_sees = kv_lo < end, near | (kv_lo < start) | (kv_hi >= end)
        some = ((q_lo < start) & text_sees) | ((q_hi >= start) & image_sees)
        text_sees, image_sees = kv_hi < end, (kv_hi < start) | (kv_lo >= end)
        return some, ((q_lo >= start) | text_sees) & ((q_hi < start) | image_sees)

    clear_mask.block_bounds = bounds  # type: ignore[attr-defined]
    clear_mask.made_for = (math.inf, text + math.prod(shape), math.inf)  # type: ignore[attr-defined]
    return described(clear_mask, f"clear({shape}, {radius})")


def natten(
    shape: tuple[int, ...],
    kernel: tuple[int, ...],
    dilation: tuple[int, ...] | None = None,
    is_causal: tuple[bool, ...] | None = None,
) -> Mod:
    """NATTEN: lets a token see the box of `kernel` tokens around it, moved inward at the borders.

    On each axis of L tokens and a kernel of K, with l = floor(K/2) tokens before the centre and
    r = K - 1 - l after it, the centre is c = clamp(q, l, L - 1 - r), and c - l <= k <= c + r:
    every token sees K keys. With a dilation of D this holds within each of the D sets of every
    D-th token, apart. A causal axis has 0 <= q - k < K instead, and fewer keys at its start.
    attention-gym's `generate_natten` takes one axis for the other where canvas or kernel is not
    square, and lets an even kernel see K + 1.

    Args:
        shape: tokens along each axis, the last one running fastest; one, two, three axes or more.
        kernel: keys along each axis; times the dilation at most as many as tokens.
        dilation: steps between the keys of a box along each axis, at least 1; 1 if not given.
        is_causal: whether tokens see none after themselves along each axis; nowhere if not given.

    Returns:
        A mask_mod for `prod(shape)` positions.

    Raises:
        TypeError: if an argument is no tuple of ints, or `is_causal` none of bools.
        ValueError: if a number is out of its range, or there are not as many of each.

    Reference: Hassani et al., "Neighborhood Attention Transformer", arXiv 2204.07143; Hassani &
    Shi, "Dilated Neighborhood Attention Transformer", arXiv 2209.15001; the rules for even kernels
    and causal axes are those of the NATTEN library's FlexAttention form, which also has strides.
    """
    sizes("shape", shape)
    steps = (1,) * len(shape) if dilation is None else dilation
    flags = (False,) * len(shape) if is_causal is None else is_causal
    if not isinstance(flags, tuple) or not all(isinstance(flag, bool) for flag in flags):
        got = flags if isinstance(flags, tuple) else type(flags).__name__
        raise TypeError(f"is_causal must be a tuple of bools, got {got}")
    for name, values in (
        ("kernel", sizes("kernel", kernel)),
        ("dilation", sizes("dilation", steps)),
        ("is_causal", flags),
    ):
        if len(values) != len(shape):
            raise ValueError(f"{name} must have one entry for each axis of {shape}, got {values}")
    if any(k * d > extent for k, d, extent in zip(kernel, steps, shape, strict=True)):
        raise ValueError(f"kernel times dilation must be at most {shape}, got {kernel}, {steps}")
    extents = [torch.tensor(extent) for extent in shape]
    axes = [
        (extent, torch.tensor(size), torch.tensor(step), flag)
        for extent, size, step, flag in zip(extents, kernel, steps, flags, strict=True)
    ]
    row = math.prod(shape[1:])

    def window(
        q: Tensor, extent: Tensor, size: Tensor, step: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """The first and the last key of a token on an axis, counted within its set."""
        place, tokens = q // step, (extent - 1 - q % step) // step + 1
        if causal:
            return place - size + 1, place
        first = torch.minimum((place - size // 2).clamp(min=0), tokens - size)
        return first, first + size - 1

    def natten_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        visible = q_idx * 0 == kv_idx * 0
        q_at, kv_at = _coordinates(q_idx, extents), _coordinates(kv_idx, extents)
        for q, k, axis in zip(q_at, kv_at, axes, strict=True):
            first, last = window(q, *axis)
            place, step = k // axis[2], axis[2]
            visible = visible & (q % step == k % step) & (first <= place) & (place <= last)
        return visible

    def bounds(
        b: Tensor, h: Tensor, q_lo: Tensor, q_hi: Tensor, kv_lo: Tensor, kv_hi: Tensor
    ) -> tuple[Tensor, Tensor]:
        # Rows of the first axis: from the first to the last that a block's rows may see.
        top, bottom, size, step = q_lo // row, q_hi // row, kernel[0], steps[0]
        if flags[0]:
            first, last = top - (size - 1) * step, bottom
        else:
            first = (top - size // 2 * step).clamp(max=shape[0] - size * step)
            last = (bottom + (size - 1) // 2 * step).clamp(min=size * step - 1)
        some = (kv_hi // row >= first) & (kv_lo // row <= last)
        return some, torch.zeros_like(some)

    natten_mask.block_bounds = bounds  # type: ignore[attr-defined]
    natten_mask.made_for = (math.inf, math.prod(shape), math.prod(shape))  # type: ignore[attr-defined]
    return described(natten_mask, f"natten({shape}, {kernel})")
