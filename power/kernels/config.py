"""What the kernels take, and the static tables by which they are launched."""

from typing import Any

import torch
from torch import Tensor

from power.kernels.layout import count_slots, kernel_state_size

# Tiles, warps and pipeline stages by dtype and max(K, V). 128 registers a thread let two programs
# of eight warps share a multiprocessor: one computes while the other waits.
_PAIR = {"num_warps": 8, "num_stages": 2, "maxnreg": 128}
_WIDE = {"num_warps": 8, "num_stages": 2}
_SMALL: dict[str, dict[str, int]] = {
    "update": {"BT": 128, "num_warps": 8, "num_stages": 3},
    "out": {"BM": 128, "BN": 64, "STAGES": 3, **_PAIR},
    "dq": {"BM": 128, "BN": 64, "BI": 4, "STAGES": 3, **_PAIR},
    "dk": {"BM": 128, "BN": 32, "BI": 4, "STAGES": 4, **_PAIR},
    "dv": {"BM": 128, "BN": 64, "STAGES": 3, **_PAIR},
}
_LARGE: dict[str, dict[str, int]] = {
    "update": {"BT": 64, "num_warps": 4, "num_stages": 3},
    "out": {"BM": 128, "BN": 64, "STAGES": 2, **_WIDE},
    "dq": {"BM": 128, "BN": 32, "BI": 1, "STAGES": 2, **_WIDE},
    "dk": {"BM": 128, "BN": 32, "BI": 1, "STAGES": 2, **_WIDE},
    "dv": {"BM": 128, "BN": 64, "STAGES": 2, **_WIDE},
}
_FP32: dict[str, dict[str, int]] = {
    "update": {"BT": 32, "num_warps": 8, "num_stages": 2},
    "out": {"BM": 32, "BN": 32, "STAGES": 1, "num_warps": 8, "num_stages": 1},
    "dq": {"BM": 32, "BN": 32, "BI": 1, "STAGES": 1, "num_warps": 8, "num_stages": 1},
    "dk": {"BM": 32, "BN": 32, "BI": 1, "STAGES": 1, "num_warps": 8, "num_stages": 1},
    "dv": {"BM": 32, "BN": 32, "STAGES": 1, "num_warps": 8, "num_stages": 1},
}
# Degree 4, by the bytes of a number: rows of what goes through states, and tokens of a step.
QUARTIC_ROWS = {2: 64, 4: 32}

# Up to here the attention form is quicker, by head size; beyond, chunks of this many tokens are.
# The first of two is where there is a backward pass, the second where there is none; both lie
# between lengths that were timed (benchmarks/RESULTS.md), and those of 16 are those of 32.
_ATTENTION_UP_TO = {
    16: (1280, 2048),
    32: (1280, 2048),
    64: (4096, 5504),
    128: (12_288, 13_824),
}
_CHUNK = {16: 512, 32: 512, 64: 1024, 128: 2048}
HEAD_SIZES = tuple(_CHUNK)


def kernel_config(kernel: str, K: int, V: int, dtype: torch.dtype) -> dict[str, int]:
    """Return tile sizes, warps and stages of a kernel."""
    if dtype == torch.float32:
        return _FP32[kernel]
    return (_SMALL if max(K, V) <= 64 else _LARGE)[kernel]


def precision(dtype: torch.dtype) -> str:
    """Return how products of fp32 are taken: as PyTorch takes its own, IEEE for "highest"."""
    exact = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"


def state_unit(dtype: torch.dtype) -> float:
    """Return what states are multiplied by: in fp16, sums over long sequences would pass 65504."""
    return 2.0**-10 if dtype == torch.float16 else 1.0


def score_scale(scale: float, deg: int, dtype: torch.dtype) -> float:
    """Return the scale that kernels use: it cancels in the division, and serves the range."""
    return scale if deg > 4 or dtype == torch.float16 else 1.0


def unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    deg: int,
    chunk_size: int | None,
    with_state: bool = False,
) -> str | None:
    """Say why the kernels cannot take these arguments and what can, or None. No data is read.

    Args:
        q: Queries `[B, H, T, K]`.
        k: Keys `[B, H_kv, T, K]`.
        v: Values `[B, H_kv, T, V]`.
        log_g: Log-gates or None.
        deg: The even power.
        chunk_size: Tokens of a chunk; None for the attention form or for the kernels' choice.
        with_state: Whether a state is given or asked for.
    """
    K, V = q.shape[-1], v.shape[-1]
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f'the kernels take bf16, fp16 and fp32, got {q.dtype}; use impl="reference"'
    if K not in HEAD_SIZES or V not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        return f'the kernels take head sizes {sizes}, got K = {K}, V = {V}; use impl="reference"'
    passed = with_state or (chunk_size is not None and chunk_size < q.shape[2])
    if passed and deg != 2 and (deg != 4 or K > 32):
        way = "" if with_state else "chunk_size=None (the attention form), or "
        return (
            "the kernels pass states between chunks in degree 2, and in degree 4 at head sizes 16 "
            f'and 32, got deg = {deg} and K = {K}; use {way}impl="reference"'
        )
    return None


def choose_chunk_size(T: int, K: int, V: int, deg: int, backward: bool) -> int | None:
    """Return the quicker chunk size for `T` tokens, or None for the attention form."""
    size = max(K, V)
    up_to = _ATTENTION_UP_TO[size][0 if backward else 1]
    return None if deg != 2 or up_to >= T else _CHUNK[size]


def stateful(T: int, chunk_size: int | None, with_initial: bool) -> bool:
    """Return whether any query reads a state."""
    return with_initial or (chunk_size is not None and chunk_size < T)


def saved_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    with_initial: bool,
    cu_seqlens: Tensor | None,
    deg: int,
    chunk_size: int | None,
    return_state: bool,
) -> list[tuple[tuple[Any, ...], torch.dtype]]:
    """Return shape and dtype of what `forward` saves: denominators, gate sums, chunk states."""
    B, H, T, K = q.shape
    saved: list[tuple[tuple[Any, ...], torch.dtype]] = [((B, H, T), torch.float32)]
    if log_g is not None:
        saved.append((tuple(k.shape[:3]), torch.float32))
    if stateful(T, chunk_size, with_initial):
        packed = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
        slots = count_slots(B, T, chunk_size, packed, with_initial or return_state)
        saved.append(((slots, k.shape[1], kernel_state_size(K, v.shape[-1], deg)), q.dtype))
    return saved
