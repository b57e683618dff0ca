"""Decoding: power attention token by token, at a cost that does not grow with the tokens before.

While a state holds few tokens, the expanded form cancels (see `power.reference`). So the latest
tokens stay keys and values, in an open chunk, and are folded into the state when that is full. All
sizes are fixed and all counts are tensors: a step can be compiled or captured in a CUDA graph.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from power.attention import Impl, check_state, check_tensor, choose_impl, power_attention, prepare
from power.feature_map import PowerState, check_size, state_size, symmetric_power
from power.operator import bounded, check_values
from power.reference import fold, grouped, state_dtype

CHUNK_SIZE = 64
_LEAST_CHUNK = 8  # tokens; a state that holds fewer is inexact


class DecodeState(NamedTuple):
    """What decoding remembers: the state of all folded tokens, and the open chunk after them.

    Attributes:
        s: Features times values of the folded tokens, as in `PowerState`, `[B, H_kv, D, V]`.
        z: Features of the folded tokens, `[B, H_kv, D]`.
        k: Keys of the open chunk, `[B, H_kv, C, K]`, of which the first `filled` are filled.
        v: Values of the open chunk, `[B, H_kv, C, V]`.
        log_g: Log-gates of the open chunk, `[B, H_kv, C]`, in the dtype of `s`.
        filled: Tokens in the open chunk of each sequence, from 0 to `C - 1`, int32 `[B]`.
        length: Tokens seen in all, int64 `[B]`: the position of the next one.
    """

    s: Tensor
    z: Tensor
    k: Tensor
    v: Tensor
    log_g: Tensor
    filled: Tensor
    length: Tensor

    @classmethod
    @torch.no_grad()
    def start(
        cls,
        k: Tensor,
        v: Tensor,
        log_g: Tensor | None = None,
        past: PowerState | None = None,
        *,
        past_length: int = 0,
        deg: int = 2,
        chunk_size: int = CHUNK_SIZE,
    ) -> "DecodeState":
        """Return the state after the tokens in `past` and, after them, those of an open chunk.

        Args:
            k: Keys `[B, H_kv, n, K]` of the latest `n < chunk_size` tokens, `n = 0` allowed.
            v: Their values `[B, H_kv, n, V]`.
            log_g: Their log-gates `[B, H_kv, n]`; None for no gates.
            past: The state of all tokens before, as `power_attention` returns it; None for none.
                While it holds fewer than about eight tokens, it is inexact.
            past_length: Tokens in `past`; decoding only counts on from there.
            deg: The even power.
            chunk_size: Tokens `C` of the open chunk, 8 or more.

        Returns:
            The state, which shares no memory with the arguments.

        Raises:
            TypeError: If an argument has the wrong type or dtype.
            ValueError: If shapes or sizes do not fit.
        """
        check_tensor("k", k, ("B", "H_kv", "n", "K"))
        if not k.is_floating_point():
            raise TypeError(f"k must have a floating dtype, got {k.dtype}")
        k, _, v, _ = prepare(k, k, v, log_g, deg, None)
        if not torch.compiler.is_compiling():
            check_values(k, log_g, None)
        batch, kv_heads, tokens, head_dim = k.shape
        check_size("chunk_size", chunk_size, _LEAST_CHUNK)
        check_size("past_length", past_length, 0)
        if tokens >= chunk_size:
            raise ValueError(
                f"k must hold fewer than chunk_size = {chunk_size} tokens, got {tokens}: pass "
                "the state of those before as past, or call power_attention_prefill"
            )
        dtype = state_dtype(k.dtype)
        shape = batch, kv_heads, state_size(head_dim, deg)
        if past is None:
            past = PowerState(
                k.new_zeros(*shape, v.shape[-1], dtype=dtype), k.new_zeros(shape, dtype=dtype)
            )
        check_state("past", past, batch, k, v, deg)
        buffers = (
            k.new_zeros(batch, kv_heads, chunk_size, head_dim),
            k.new_zeros(batch, kv_heads, chunk_size, v.shape[-1]),
            k.new_zeros(batch, kv_heads, chunk_size, dtype=dtype),
        )
        for buffer, x in zip(buffers, (k, v, bounded(log_g, k.dtype)), strict=True):
            if x is not None:
                buffer[:, :, :tokens] = x
        filled = torch.full((batch,), tokens, dtype=torch.int32, device=k.device)
        return cls(past[0].clone(), past[1].clone(), *buffers, filled, filled.long() + past_length)


def power_attention_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None = None,
    *,
    deg: int = 2,
    scale: float | None = None,
    chunk_size: int = CHUNK_SIZE,
    impl: Impl = "auto",
) -> tuple[Tensor, DecodeState]:
    """Power attention over a prompt, and the state to decode from.

    Whole chunks are folded into the state and what is left over stays open, so that decoding is
    exact after a prompt of any length.

    Args:
        q: Queries `[B, H, T, K]`; this and what follows as in `power_attention`.
        k: Keys `[B, H_kv, T, K]`.
        v: Values `[B, H_kv, T, V]`.
        log_g: Log-gates `[B, H_kv, T]`, or None.
        deg: The even power.
        scale: Factor on the scores; None for `1/sqrt(K)`.
        chunk_size: Tokens of the open chunk, 8 or more.
        impl: "auto", "triton" or "reference".

    Returns:
        The output `[B, H, T, V]` and the state after the prompt.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If shapes, devices or values do not fit, or the kernels do not take them.
        ImportError: If the kernels are to be used and Triton is not installed.
    """
    q, k, v, scale = prepare(q, k, v, log_g, deg, scale)
    check_size("chunk_size", chunk_size, _LEAST_CHUNK)
    length = q.shape[2]
    folded = length - length % chunk_size
    gates = None if log_g is None else log_g[:, :, folded:]
    queries, keys, values = (x[:, :, folded:] for x in (q, k, v))
    past, outs = None, []
    if folded:
        out, past = power_attention(
            q[:, :, :folded],
            k[:, :, :folded],
            v[:, :, :folded],
            None if log_g is None else log_g[:, :, :folded],
            deg=deg,
            scale=scale,
            return_state=True,
            impl=impl,
        )
        outs.append(out)
    outs.append(
        power_attention(
            *(queries, keys, values, gates), deg=deg, scale=scale, initial_state=past, impl=impl
        )
    )
    state = DecodeState.start(
        *(keys, values, gates, past), past_length=folded, deg=deg, chunk_size=chunk_size
    )
    return torch.cat(outs, 2), state


def power_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: DecodeState,
    *,
    deg: int = 2,
    scale: float | None = None,
    inplace: bool = False,
    impl: Impl = "auto",
) -> tuple[Tensor, DecodeState]:
    """Power attention of the next token, or the next few, equal to `power_attention` over all.

    Not differentiable. For a whole prompt, `power_attention_prefill` is quicker.

    Args:
        q: Queries `[B, H, n, K]` of the next `n` tokens.
        k: Keys `[B, H_kv, n, K]`.
        v: Values `[B, H_kv, n, V]`.
        log_g: Log-gates `[B, H_kv, n]`, finite and <= 0; None for no gates.
        state: What decoding remembers. It begins with `DecodeState.start` or
            `power_attention_prefill`.
        deg: The even power that the state was made with.
        scale: Factor on the scores; None for `1/sqrt(K)`.
        inplace: Whether the tensors of `state` are updated themselves, not copies of them.
        impl: "auto", "triton" or "reference", as in `power_attention`.

    Returns:
        The output `[B, H, n, V]` and the state after these tokens.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If shapes, devices or values do not fit, or an input requires a gradient.
        ImportError: If the kernels are to be used and Triton is not installed.

    >>> q, k, v = torch.randn(3, 1, 2, 1, 16)
    >>> state = DecodeState.start(k[:, :, :0], v[:, :, :0])
    >>> out, state = power_attention_step(q, k, v, None, state)
    >>> state.length
    tensor([1])
    """
    q, k, v, scale = prepare(q, k, v, log_g, deg, scale)
    inputs = (q, k, v) if log_g is None else (q, k, v, log_g)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise ValueError(
            "q, k, v and log_g must not require gradients, which a step does not have: call it "
            "under torch.no_grad(), or power_attention over all tokens"
        )
    check_decode_state(state)
    batch, kv_heads, _, head_dim = k.shape
    heads, chunk, value_dim = (batch, kv_heads), state.k.shape[2], v.shape[-1]
    dtype, size = state_dtype(q.dtype), state_size(head_dim, deg)
    for name, shape, kind in (
        ("s", (*heads, size, value_dim), dtype),
        ("z", (*heads, size), dtype),
        ("k", (*heads, chunk, head_dim), q.dtype),
        ("v", (*heads, chunk, value_dim), q.dtype),
        ("log_g", (*heads, chunk), dtype),
        ("filled", (batch,), torch.int32),
        ("length", (batch,), torch.int64),
    ):
        x = getattr(state, name)
        check_tensor(f"state.{name}", x, shape, (kind,), q.device)
        if not x.is_contiguous():
            raise ValueError(f"state.{name} must be contiguous, got strides {list(x.stride())}")
    impl = choose_impl(impl, q)
    if impl == "triton":
        from power import kernels

        reason = kernels.unsupported(q, k, v, log_g, deg, None)
        if reason:
            raise ValueError(reason)
    if not inplace:
        state = DecodeState(*(x.clone() for x in state))
    out = _step(q, k, v, log_g, *state, deg, scale, impl)
    return out, state


@torch.library.custom_op(
    "power::step", mutates_args=("s", "z", "open_k", "open_v", "open_log_g", "filled", "length")
)
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    s: Tensor,
    z: Tensor,
    open_k: Tensor,
    open_v: Tensor,
    open_log_g: Tensor,
    filled: Tensor,
    length: Tensor,
    deg: int,
    scale: float,
    impl: str,
) -> Tensor:
    """Return the output of the next tokens; the tensors of `DecodeState` are updated."""
    check_values(q, log_g, None)
    log_g = bounded(log_g, q.dtype)
    length += q.shape[2]
    if not q.numel():
        return q.new_empty(*q.shape[:3], v.shape[-1])
    with torch.autocast(q.device.type, enabled=False):
        if impl == "triton":
            from power import kernels

            return kernels.step(
                q, k, v, log_g, s, z, open_k, open_v, open_log_g, filled, deg, scale
            )
        outs = []
        for t in range(q.shape[2]):
            sequence, slot = torch.arange(q.shape[0], device=q.device), filled.long()
            open_k[sequence, :, slot] = k[:, :, t]
            open_v[sequence, :, slot] = v[:, :, t]
            open_log_g[sequence, :, slot] = 0 if log_g is None else log_g[:, :, t].to(s.dtype)
            filled += 1
            outs.append(_attend(q[:, :, t], s, z, open_k, open_v, open_log_g, filled, deg, scale))
            full = filled == open_k.shape[2]
            if full.any():
                before = PowerState(s[full], z[full])
                s[full], z[full] = fold(open_k[full], open_v[full], open_log_g[full], before, deg)
                filled[full] = 0
        return torch.stack(outs, 2)


@_step.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[-1])


def _attend(
    q: Tensor,
    s: Tensor,
    z: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor,
    filled: Tensor,
    deg: int,
    scale: float,
) -> Tensor:
    """Return the output `[B, H, V]` of the last token in each open chunk."""
    dtype = s.dtype
    rows = grouped(q[:, :, None], k)[:, :, :, 0].to(dtype)  # [B, H_kv, R, K]
    empty = torch.arange(k.shape[2], device=k.device) >= filled[:, None, None]  # [B, 1, C]
    running = log_g.double().masked_fill(empty, 0).cumsum(-1)
    decay = (running[..., -1:] - running).masked_fill(empty, -torch.inf).exp().to(dtype)
    weights = (scale * rows @ k.to(dtype).mT) ** deg * decay[:, :, None]
    discount = running[..., -1].exp().to(dtype)[:, :, None, None]
    phi = scale**deg * discount * symmetric_power(rows, deg)
    numerator = weights @ v.to(dtype) + phi @ s
    denominator = weights.sum(-1) + (phi @ z[..., None])[..., 0]
    out = numerator / denominator.masked_fill(denominator == 0, 1)[..., None]
    return out.flatten(1, 2).to(q.dtype)


def check_decode_state(state: DecodeState) -> None:
    """Raise unless `state` is a `DecodeState`; its tensors are not looked at."""
    if not isinstance(state, DecodeState):
        raise TypeError(f"state must be a DecodeState, got {type(state).__name__}")
