"""Kernel options for FlexAttention, and which of its backends takes what.

FlexAttention chooses tiles by head size and type alone, for a score_mod that costs nothing. One
with a logarithm in it needs more registers than the default tile at head size 64 leaves, and runs
out of them into memory: smaller tiles are up to eight times as fast.
"""

from __future__ import annotations

import importlib.util
import types
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from score_mods._captured import F, Mod, check_score_mod, rebuilt, within
from score_mods._checks import integer
from score_mods.masks import causal

# Fastest of about ten tiles on an H200 (torch 2.11), forward and backward apart; see
# benchmarks/RESULTS.md. For each head size: (BLOCK_M, BLOCK_N, num_warps, num_stages) and
# (BLOCK_M1, BLOCK_N1, BLOCK_M2, BLOCK_N2, num_warps, num_stages).
_FORWARD = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
_BACKWARD = ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_warps", "num_stages")
_PLAIN = {
    64: ((64, 64, 4, 3), (64, 64, 64, 64, 4, 3)),
    128: ((128, 64, 8, 3), (64, 128, 128, 64, 8, 3)),
}
_WITH_SCORE_MOD = {
    64: ((64, 32, 4, 3), (32, 64, 64, 32, 4, 3)),
    128: ((128, 32, 4, 3), (64, 128, 128, 64, 8, 3)),
}
# Where the backward pass also adds to what the score_mod captures, which takes shared memory: at
# head size 128 a third stage would need 2 KiB more than there is.
_LEARNS = {128: (64, 128, 128, 64, 8, 2)}

# What the FLASH backend was tried with: parts of score_mods, and head sizes.
_TAKEN_BY_FLASH = {"alibi", "scale_invariant"}
_SIZES_OF_FLASH = (64, 128)
# Queries below which a GPU would wait for the host, which takes 0.7 ms for a call.
_LEAST_FOR_FLASH = 4096


def kernel_options(
    head_dim: int,
    dtype: torch.dtype,
    *,
    score_mod: bool = True,
    learns: bool = False,
    contiguous: bool = False,
    device: torch.device | str = "cuda",
) -> dict[str, Any]:
    """The `kernel_options` of `flex_attention` that suit a Hopper GPU, as `attention` uses them.

    They hold for the Triton backend, 128 queries or more, and blocks of the BlockMask of 128
    positions or a multiple.

    Args:
        head_dim: head size D (of queries and keys), at least 1.
        dtype: dtype of the queries.
        score_mod: whether there is one.
        learns: whether it captures a tensor that requires a gradient.
        contiguous: whether in each row of the BlockMask, and in each column, the partial blocks
            follow one another and so do the full ones, as those of `causal` do. It lets the
            compiler share distances between the rows of a tile (`score_mods.fast`). Wrong results
            if it is not so.
        device: where the queries are.

    Returns:
        A dict; without tile sizes where none were measured: GPUs that are not of compute
        capability 9.0, float32, head sizes above 128.

    Raises:
        TypeError: if `head_dim` is no int or `dtype` no dtype.
        ValueError: if `head_dim` is below 1.

    >>> import torch
    >>> kernel_options(64, torch.float32, contiguous=True)
    {'BLOCKS_ARE_CONTIGUOUS': True}
    """
    integer("head_dim", head_dim)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {type(dtype).__name__}")
    options: dict[str, Any] = {"BLOCKS_ARE_CONTIGUOUS": True} if contiguous else {}
    tiles = _WITH_SCORE_MOD if score_mod else _PLAIN
    fitting = [size for size in tiles if head_dim <= size]
    if not fitting or dtype not in (torch.bfloat16, torch.float16) or not _is_hopper(device):
        return options
    forward, backward = tiles[fitting[0]]
    if score_mod and learns:
        backward = _LEARNS.get(fitting[0], backward)
    options |= {f"fwd_{name}": value for name, value in zip(_FORWARD, forward, strict=True)}
    options |= {f"bwd_{name}": value for name, value in zip(_BACKWARD, backward, strict=True)}
    return options


def _is_hopper(device: torch.device | str) -> bool:
    return (
        torch.device(device).type == "cuda"
        and torch.cuda.is_available()
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


# As torch.compiler.assume_constant_result does, which would import the whole compiler here.
_is_hopper._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=1)
def flash_is_installed() -> bool:
    """Whether flash-attn-4, which is FlexAttention's FLASH backend, can be imported."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        return False


def _obstacle_of_score_mod(score_mod: Mod) -> str | None:
    """Why the FLASH backend cannot take this score_mod, or None."""
    parts = list(within(score_mod))
    tensors = [part for part in parts if isinstance(part, Tensor)]
    functions = [part for part in parts if isinstance(part, types.FunctionType)]
    if any(x.requires_grad for x in tensors):
        return "it gives no gradient to what a score_mod captures"
    # Also those of a mechanism that a function of the user's calls.
    names = [name for part in functions for name in getattr(part, "parts", ())]
    tried = _TAKEN_BY_FLASH.union(x.__name__ for x in functions if not hasattr(x, "parts"))
    untried = [name for name in names if name not in tried]
    if untried:
        return f"it was tried with {', '.join(sorted(_TAKEN_BY_FLASH))} alone, not {untried[0]}"
    if any(getattr(part, "needs_triton", False) for part in functions):
        return (
            "it takes the fast form of scale_invariant alone, which this one has not: that needs "
            "an NVIDIA GPU, and with the other arguments' defaults a sigma of 0.36 or more"
        )
    if any(x.ndim and not x.is_floating_point() for x in tensors):
        return "it was tried without tables of positions or other integers"
    return None


def for_flash(mod: F) -> F:
    """The same score_mod with every number that it captures written into its kernel.

    FlexAttention's FLASH backend takes no captured 0-d tensor. `attention(..., backend="flash")`
    does this by itself; call it when you hand a mod to `flex_attention` with
    `kernel_options={"BACKEND": "FLASH"}`, and before you compile a model. Other numbers are
    then another kernel; compile with `torch._dynamo.config.specialize_float`. A tensor that is
    updated in place later, as an offset of `with_offset` may be, is not looked at again.

    Args:
        mod: a score_mod that the backend was tried with, for bfloat16 and float16 scores: `alibi`,
            or `scale_invariant` in its fast form. Or one of yours that can do with a number where
            it captured a 0-d tensor.

    Returns:
        `mod` itself if it captures no number, else a copy of the function.

    Raises:
        TypeError: if `mod` is no score_mod.
        ValueError: if the backend cannot take it.
    """
    if torch.compiler.is_compiling():
        return mod
    check_score_mod(mod, "mod")
    obstacle = _obstacle_of_score_mod(mod)
    if obstacle is not None:
        raise ValueError(f"mod must be a score_mod for the FLASH backend: {obstacle}")
    return cast(F, rebuilt(mod, lambda value: value if value.ndim else value.item()))


def flash_obstacle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Mod | None,
    mask_mod: Mod | BlockMask | None,
    return_lse: bool = False,
) -> str | None:
    """Why FlexAttention's FLASH backend cannot do this call of `attention`, or None."""
    if torch.compiler.is_compiling():
        return (
            "in a model that is being compiled, call flex_attention with for_flash(score_mod) and "
            'kernel_options={"BACKEND": "FLASH"} yourself'
        )
    if not flash_is_installed():
        return "flash-attn-4 cannot be imported (flash_attn.cute)"
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16 on a GPU, got {q.dtype} on {q.device}"
    if q.shape[3] not in _SIZES_OF_FLASH or q.shape[3] != v.shape[3]:
        return (
            f"it was tried with head sizes of {' and '.join(map(str, _SIZES_OF_FLASH))}, the same "
            f"for q and v, got {q.shape[3]} and {v.shape[3]}"
        )
    if return_lse:
        return "it was tried without return_lse"
    if torch.are_deterministic_algorithms_enabled():
        return "its backward adds up in no fixed order, and deterministic algorithms are asked for"
    if isinstance(mask_mod, BlockMask) and mask_mod.BLOCK_SIZE != (128, 128):
        return f"it was tried with blocks of 128, got a BlockMask of {mask_mod.BLOCK_SIZE}"
    mask = mask_mod.mask_mod if isinstance(mask_mod, BlockMask) else mask_mod
    if any(isinstance(part, Tensor) for part in within(mask)):
        return "it was tried with no mask that captures tensors"
    if score_mod is not None and q.shape[1] != k.shape[1]:
        return "flash-attn-4 4.0.0b36 gives wrong results for a score_mod with grouped queries"
    return None if score_mod is None else _obstacle_of_score_mod(score_mod)


def _is_plain_scale_invariant(score_mod: Mod) -> bool:
    """Whether it is `scale_invariant` itself, at no other positions and with nothing beside."""
    mods = [part for part in within(score_mod) if callable(part)]
    return len(mods) == 1 and getattr(score_mod, "parts", ()) == ("scale_invariant",)


def prefers_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Mod | None,
    mask_mod: Mod | BlockMask | None,
    return_lse: bool = False,
) -> bool:
    """Whether the FLASH backend was measured to be faster here (benchmarks/RESULTS.md)."""
    if flash_obstacle(q, k, v, score_mod, mask_mod, return_lse) is not None:
        return False
    if not _is_hopper(q.device) or q.shape[2] < _LEAST_FOR_FLASH:
        return False
    if mask_mod is not None and mask_mod is not causal:
        return False
    if score_mod is None:
        return True
    # At head size 64 the forward pass alone is slower.
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return _is_plain_scale_invariant(score_mod) and (trains or q.shape[3] == 128)
