"""Kernel options for FlexAttention, and which of its backends takes what.

FlexAttention chooses tiles by head size and type alone, for a score_mod that costs nothing. One
with a logarithm in it needs more registers than the default tile at head size 64 leaves, and runs
out of them into memory: smaller tiles are up to five times as fast.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from score_mods._captured import Mod, within
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

# Parts of score_mods that the FLASH backend was tried with.
_TAKEN_BY_FLASH = {"alibi", "scale_invariant"}
# Queries below which a GPU would wait for the host, which takes 0.7 ms for a call.
_LEAST_FOR_FLASH = 4096


def kernel_options(
    head_dim: int,
    dtype: torch.dtype,
    *,
    score_mod: bool = True,
    contiguous: bool = False,
    device: torch.device | str = "cuda",
) -> dict[str, Any]:
    """The `kernel_options` of `flex_attention` that suit a Hopper GPU, as `attention` uses them.

    They hold for the Triton backend, 128 queries or more, and blocks of the BlockMask of 128
    positions or a multiple.

    Args:
        head_dim: head size D (of queries and keys).
        dtype: dtype of the queries.
        score_mod: whether there is one.
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

    >>> import torch
    >>> kernel_options(64, torch.float32, contiguous=True)
    {'BLOCKS_ARE_CONTIGUOUS': True}
    """
    if isinstance(head_dim, bool) or not isinstance(head_dim, int):
        raise TypeError(f"head_dim must be an int, got {type(head_dim).__name__}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {type(dtype).__name__}")
    options: dict[str, Any] = {"BLOCKS_ARE_CONTIGUOUS": True} if contiguous else {}
    tiles = _WITH_SCORE_MOD if score_mod else _PLAIN
    fitting = [size for size in tiles if head_dim <= size]
    if not fitting or dtype not in (torch.bfloat16, torch.float16) or not _is_hopper(device):
        return options
    forward, backward = tiles[fitting[0]]
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


def flash_obstacle(q: Tensor, k: Tensor, score_mod: Mod | None) -> str | None:
    """Why FlexAttention's FLASH backend cannot take these tensors and this score_mod, or None."""
    if not flash_is_installed():
        return "flash-attn-4 cannot be imported (flash_attn.cute)"
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 and float16 on a GPU, got {q.dtype} on {q.device}"
    if score_mod is not None and q.shape[1] != k.shape[1]:
        return "flash-attn-4 4.0.0b36 gives wrong results for a score_mod with grouped queries"
    parts = list(within(score_mod))
    if any(isinstance(part, Tensor) and part.requires_grad for part in parts):
        return "it gives no gradient to what a score_mod captures"
    untried = [name for name in getattr(score_mod, "parts", ()) if name not in _TAKEN_BY_FLASH]
    if untried:
        return f"it was tried with {', '.join(sorted(_TAKEN_BY_FLASH))} alone, not {untried[0]}"
    if any(getattr(part, "needs_triton", False) for part in parts):
        return "it takes the fast form of scale_invariant alone, which this one has not"
    return None


def _is_plain_scale_invariant(score_mod: Mod) -> bool:
    """Whether it is `scale_invariant` itself, at no other positions and with nothing beside."""
    mods = [part for part in within(score_mod) if callable(part)]
    return len(mods) == 1 and getattr(score_mod, "parts", ()) == ("scale_invariant",)


def prefers_flash(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Mod | None, mask_mod: Mod | BlockMask | None
) -> bool:
    """Whether the FLASH backend was measured to be faster here (benchmarks/RESULTS.md)."""
    return (
        not torch.compiler.is_compiling()
        and flash_obstacle(q, k, score_mod) is None
        and _is_hopper(q.device)
        and q.shape[2] >= _LEAST_FOR_FLASH
        and q.shape[3] == v.shape[3]
        and q.shape[3] in (64, 128)
        and (mask_mod is None or mask_mod is causal)
        and (score_mod is None or _is_plain_scale_invariant(score_mod))
        and not torch.are_deterministic_algorithms_enabled()
    )
