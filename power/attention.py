"""The public call: power attention over whole sequences, by the kernels or the reference."""

import os
from typing import Literal, overload

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from power import operator
from power.feature_map import PowerState, check_degree, check_size, state_size
from power.reference import state_dtype

Impl = Literal["auto", "triton", "reference"]

# The reference takes the attention form up to this many tokens, and while there are fewer tokens
# than entries in the feature map; beyond, chunks of this size.
_REFERENCE_CHUNK = 1024


@overload
def power_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None = None,
    *,
    deg: int = 2,
    scale: float | None = None,
    chunk_size: int | None = None,
    initial_state: PowerState | None = None,
    return_state: Literal[False] = False,
    cu_seqlens: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor: ...


@overload
def power_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None = None,
    *,
    deg: int = 2,
    scale: float | None = None,
    chunk_size: int | None = None,
    initial_state: PowerState | None = None,
    return_state: Literal[True],
    cu_seqlens: Tensor | None = None,
    impl: Impl = "auto",
) -> tuple[Tensor, PowerState]: ...


def power_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None = None,
    *,
    deg: int = 2,
    scale: float | None = None,
    chunk_size: int | None = None,
    initial_state: PowerState | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor | tuple[Tensor, PowerState]:
    """Causal attention whose weights are even powers of the scores, in time linear in `T`.

        out_i = sum_{j <= i} w_ij v_j / sum_{j <= i} w_ij,
        w_ij = (scale q_i·k_j)^p exp(G_i - G_j),
        G_i = sum_{m <= i} log_g_m

    Differentiable in `q`, `k`, `v`, `log_g` and the initial state: once, and by `backward` or
    `torch.autograd.grad` (no second derivatives, no forward mode, no `torch.func`). A query of
    zeros, whose weights vanish, gives zero. Under autocast, `q`, `k` and `v` are cast to its
    dtype.

    Args:
        q: Queries `[B, H, T, K]`.
        k: Keys `[B, H_kv, T, K]`, with `H` a multiple of `H_kv`: query head `h` reads head
            `h // (H / H_kv)`.
        v: Values `[B, H_kv, T, V]`; `V` may differ from `K`.
        log_g: Logarithms `[B, H_kv, T]` of the gates, finite and <= 0, in fp32, or float64 where
            `q` is. A token's gate discounts all tokens before it. None: no gates. Values are
            checked on a CPU only, where that is free. At -104 and below (-746 in float64) a gate
            is closed: no token before it counts after it.
        deg: The even power `p`.
        scale: Factor on the scores, not 0; None for `1/sqrt(K)`. It cancels in the division, and
            only moves the range of the numbers.
        chunk_size: Tokens of a chunk; between chunks the state is passed on. One that holds all
            tokens gives the attention form, quadratic in `T`. None chooses by `T`, and by whether
            there will be a backward pass; name a size to export a graph whose `T` is dynamic.
        initial_state: What earlier tokens left: one state for each sequence. While it holds fewer
            than about eight tokens it is inexact (see `power.reference`).
        return_state: Whether the state after the last token is returned too.
        cu_seqlens: Where each of `N` sequences packed into a batch of one starts, and the end:
            `[N + 1]`, int32 or int64, rising from 0 to `T` (checked on a CPU only). A sequence
            may be empty. States then have `N` for their batch.
        impl: "triton" for the kernels, "reference" for eager PyTorch. "auto" is the reference on a
            CPU and the kernels on a GPU, whatever they do not take being an error.

    Returns:
        `[B, H, T, V]` in the dtype of `q`; with `return_state` also the `PowerState`.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If shapes, devices or values do not fit, or the kernels do not take them.
        ImportError: If the kernels are to be used and Triton is not installed.

    Reference: Gelada et al., "Scaling Context Requires Rethinking Attention" (arXiv
    2507.04239), equation 7; the gate as in section 2.

    >>> q, k, v = torch.randn(3, 1, 2, 100, 16)
    >>> power_attention(q, k, v).shape
    torch.Size([1, 2, 100, 16])
    """
    q, k, v, scale = prepare(q, k, v, log_g, deg, scale)
    batch, _, length, head_dim = q.shape
    sequences = batch
    if cu_seqlens is not None:
        sequences = count_sequences(cu_seqlens, q)
    if initial_state is not None:
        check_state("initial_state", initial_state, sequences, k, v, deg)
    if chunk_size is not None:
        check_size("chunk_size", chunk_size)
    impl = choose_impl(impl, q)
    if impl == "triton":
        from power import kernels

        with_state = initial_state is not None or return_state
        reason = kernels.unsupported(q, k, v, log_g, deg, chunk_size, with_state)
        if reason:
            raise ValueError(reason)
        if chunk_size is None:
            given = (q, k, v, log_g, *(initial_state or ()))
            trains = torch.is_grad_enabled() and any(
                x is not None and x.requires_grad for x in given
            )
            chunk_size = kernels.choose_chunk_size(length, head_dim, v.shape[3], deg, trains)
    elif chunk_size is None and length > max(_REFERENCE_CHUNK, state_size(head_dim, deg)):
        chunk_size = _REFERENCE_CHUNK
    before = [] if initial_state is None else [x.contiguous() for x in initial_state]
    out, *rest = operator.attention(
        q, k, v, log_g, before, cu_seqlens, deg, scale, chunk_size, return_state, impl
    )
    return (out, PowerState(*rest[:2])) if return_state else out


def prepare(
    q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, deg: int, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return queries, keys and values in autocast's dtype, and the scale; raise if they clash."""
    check_degree(deg)
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise TypeError(f"scale must be a number or None, got {type(scale).__name__}")
    if scale is not None and not 2.0 ** (-1000 / deg) < abs(scale) < 2.0 ** (1000 / deg):
        raise ValueError(f"scale and its power must be finite and not 0, got {scale}")
    check_tensor("q", q, ("B", "H", "T", "K"))
    if not q.is_floating_point() or q.dtype.itemsize < 2:
        raise TypeError(f"q must have a floating dtype of 16 bits or more, got {q.dtype}")
    dtype = q.dtype
    kind = q.device.type
    autocast = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
    if autocast and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = (x.to(dtype) if isinstance(x, Tensor) else x for x in (q, k, v))
    batch, heads, length, head_dim = q.shape
    check_tensor("k", k, (batch, "H_kv", length, head_dim), (dtype,), q.device)
    kv_heads = k.shape[1]
    check_tensor("v", v, (batch, kv_heads, length, "V"), (dtype,), q.device)
    if log_g is not None:
        dtypes = (torch.float32, state_dtype(dtype))
        check_tensor("log_g", log_g, (batch, kv_heads, length), dtypes, q.device)
    if 0 in (heads, kv_heads, head_dim, v.shape[3]) or heads % kv_heads:
        raise ValueError(
            "q must have heads and channels, and a multiple of k's heads, got "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    return q, k, v, head_dim**-0.5 if scale is None else float(scale)


def check_tensor(
    name: str,
    x: Tensor,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...] = (),
    device: torch.device | None = None,
) -> None:
    """Raise unless `x` is a tensor of this shape (words are any size), dtype and device.

    It must carry no tangent of forward-mode differentiation, which the operators would drop.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dim() != len(shape) or any(
        not isinstance(want, str) and want != have
        for want, have in zip(shape, x.shape, strict=True)
    ):
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"{name} must have the shape [{wanted}], got {list(x.shape)}")
    if dtypes and x.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dict.fromkeys(dtypes))
        raise TypeError(f"{name} must have the dtype {wanted}, got {x.dtype}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} must be on {device} as q is, got {x.device}")
    if not torch.compiler.is_compiling() and unpack_dual(x).tangent is not None:
        raise ValueError(
            f"{name} must not be differentiated in forward mode, which power attention has not: "
            "use backward or torch.autograd.grad"
        )


def check_state(
    name: str, state: PowerState, sequences: int, k: Tensor, v: Tensor, deg: int
) -> None:
    """Raise unless `state` is one of as many sequences of such keys and values."""
    if not isinstance(state, tuple) or len(state) != 2:
        raise TypeError(f"{name} must be a PowerState or None, got {type(state).__name__}")
    shape, dtype = (sequences, k.shape[1], state_size(k.shape[3], deg)), state_dtype(k.dtype)
    check_tensor(f"{name}.s", state[0], (*shape, v.shape[3]), (dtype,), k.device)
    check_tensor(f"{name}.z", state[1], shape, (dtype,), k.device)


def count_sequences(cu_seqlens: Tensor, x: Tensor) -> int:
    """Return how many sequences are packed into `x`, or raise; no value is read."""
    check_tensor("cu_seqlens", cu_seqlens, ("N + 1",), (torch.int32, torch.int64), x.device)
    bounds = cu_seqlens.shape[0]
    if x.shape[0] != 1 or bounds < 2:
        raise ValueError(
            "cu_seqlens must hold the bounds of sequences packed into a batch of 1, got "
            f"{bounds} bounds and a batch of {x.shape[0]}"
        )
    return bounds - 1


def check_impl(impl: Impl) -> None:
    """Raise ValueError unless `impl` is one."""
    if impl not in ("auto", "triton", "reference"):
        raise ValueError(f"impl must be 'auto', 'triton' or 'reference', got {impl!r}")


def choose_impl(impl: Impl, q: Tensor) -> Impl:
    """Return "triton" or "reference", or raise where that is neither, or Triton cannot run."""
    check_impl(impl)
    if impl == "auto":
        impl = "triton" if q.device.type == "cuda" else "reference"
    if impl == "triton":
        try:
            import power.kernels  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "impl='triton' needs Triton: install scale-invariant-attention[kernels], "
                "or pass impl='reference'"
            ) from error
        if q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                "impl='triton' needs a CUDA device (or TRITON_INTERPRET=1 from the start), got "
                f"q on {q.device}; pass impl='reference'"
            )
        if os.environ.get("TRITON_INTERPRET") == "1" and q.dtype == torch.bfloat16:
            raise ValueError(
                "impl='triton' needs fp16 or fp32 under TRITON_INTERPRET=1, since Triton's "
                f"interpreter multiplies bf16 wrongly, got q of {q.dtype}; pass impl='reference'"
            )
    return impl
