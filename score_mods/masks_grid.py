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
    tokens come first, then the image row by row. (The paper may also add pooled tokens, which are
    more keys.)

    Args:
        shape: height and width of the canvas, in tokens.
        radius: radius of the circle in tokens, at least 1; the paper has 8, 16 and 32.
        text_length: number of text tokens, at least 0.

    Returns:
        A mask_mod for `text_length + height * width` positions.

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

    def clear_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        q_y, q_x = _coordinates(q_idx - start, extents)
        kv_y, kv_x = _coordinates(kv_idx - start, extents)
        near = (q_y - kv_y) ** 2 + (q_x - kv_x) ** 2 < square
        return near | (q_idx < start) | (kv_idx < start)

    def bounds(
        b: Tensor, h: Tensor, q_lo: Tensor, q_hi: Tensor, kv_lo: Tensor, kv_hi: Tensor
    ) -> tuple[Tensor, Tensor]:
        q_top, q_bottom, kv_top, kv_bottom = (
            (x - start).clamp(min=0) // extents[1] for x in (q_lo, q_hi, kv_lo, kv_hi)
        )
        near = (q_top - kv_bottom < reach) & (kv_top - q_bottom < reach)
        return near | (q_lo < text) | (kv_lo < text), (q_hi < text) | (kv_hi < text)

    clear_mask.block_bounds = bounds  # type: ignore[attr-defined]
    return described(clear_mask, f"clear({shape}, {radius})")


def natten(shape: tuple[int, ...], kernel: tuple[int, ...]) -> Mod:
    """NATTEN: lets a token see the box of `kernel` tokens around it, moved inward at the borders.

    On each axis of L tokens and a kernel of K, with l = floor(K/2) tokens before the centre and
    r = K - 1 - l after it, the centre is c = clamp(q, l, L - 1 - r), and c - l <= k <= c + r:
    every token sees K keys. attention-gym's `generate_natten` takes one axis for the other where
    canvas or kernel is not square, and lets an even kernel see K + 1.

    Args:
        shape: tokens along each axis, the last one running fastest; one, two, three axes or more.
        kernel: keys along each axis, at most as many as tokens.

    Returns:
        A mask_mod for `prod(shape)` positions.

    Raises:
        TypeError: if an argument is no tuple of ints.
        ValueError: if a number is out of its range, or there are not as many of both.

    Reference: Hassani et al., "Neighborhood Attention Transformer", arXiv 2204.07143, and the
    NATTEN library's rule for even kernels.
    """
    if len(sizes("shape", shape)) != len(sizes("kernel", kernel)):
        raise ValueError(f"kernel must have one number for each axis of {shape}, got {kernel}")
    if any(size > extent for size, extent in zip(kernel, shape, strict=True)):
        raise ValueError(f"kernel must be at most {shape}, got {kernel}")
    extents = [torch.tensor(extent) for extent in shape]
    # Tokens before and after the centre, and its own range.
    boxes = [
        tuple(torch.tensor(x) for x in (size // 2, (size - 1) // 2, extent - 1 - (size - 1) // 2))
        for size, extent in zip(kernel, shape, strict=True)
    ]
    row = math.prod(shape[1:])

    def natten_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        visible = q_idx * 0 == kv_idx * 0
        q_at, kv_at = _coordinates(q_idx, extents), _coordinates(kv_idx, extents)
        for q, k, (before, after, last) in zip(q_at, kv_at, boxes, strict=True):
            centre = torch.minimum(torch.maximum(q, before), last)
            visible = visible & (centre - before <= k) & (k <= centre + after)
        return visible

    def bounds(
        b: Tensor, h: Tensor, q_lo: Tensor, q_hi: Tensor, kv_lo: Tensor, kv_hi: Tensor
    ) -> tuple[Tensor, Tensor]:
        before, after, last = boxes[0]
        top, bottom = (torch.minimum(torch.maximum(x // row, before), last) for x in (q_lo, q_hi))
        some = (kv_hi // row >= top - before) & (kv_lo // row <= bottom + after)
        return some, torch.zeros_like(some)

    natten_mask.block_bounds = bounds  # type: ignore[attr-defined]
    return described(natten_mask, f"natten({shape}, {kernel})")
