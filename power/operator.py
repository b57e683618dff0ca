"""Power attention as an operator of PyTorch, so that what it is used under need not look inside.

`power::attention` and `power::attention_backward` know the shapes of their results, and the
second is registered as the gradient of the first. `torch.compile`, `torch.export`, activation
checkpointing, autocast and DDP thus treat them like a matrix product. The reference goes through
the same operators as the kernels, so what holds on a CPU holds on a GPU.

`power_attention` checks and completes the arguments; only the values of CPU tensors, which a
compiler does not see, are checked here.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from power.feature_map import PowerState, state_size
from power.reference import chunked, packed, state_dtype
from power.reference_backward import chunked_backward


@torch.library.custom_op("power::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: list[Tensor],
    cu_seqlens: Tensor | None,
    deg: int,
    scale: float,
    chunk_size: int | None,
    return_state: bool,
    impl: str,
) -> list[Tensor]:
    """Return the output, `s` and `z` where asked for, and what the backward pass needs.

    `state` holds `s` and `z` or nothing, `chunk_size=None` is the attention form, `impl`
    is "triton" or "reference". The results share no memory with the arguments.
    """
    check_values(q, log_g, cu_seqlens)
    log_g = bounded(log_g, q.dtype)
    with torch.autocast(q.device.type, enabled=False):
        if impl == "reference" or not q.numel():
            form = partial(chunked, deg=deg, scale=scale, chunk_size=chunk_size)
            if cu_seqlens is not None:
                form = partial(packed, form, cu_seqlens=cu_seqlens)
            before = PowerState(*state) if state else None
            out, last = form(q, k, v, log_g, initial_state=before, return_state=return_state)
            results = [x.clone() for x in (out, *(last or ()))]
            if impl == "triton":
                results += _saved(q, k, v, log_g, state, cu_seqlens, deg, chunk_size, return_state)
            return results
        from power import kernels

        before_s, before_z = state or (None, None)
        out, s, z, saved = kernels.forward(
            q,
            k,
            v,
            log_g,
            before_s,
            before_z,
            cu_seqlens,
            deg,
            scale,
            chunk_size,
            return_state,
        )
        return [x for x in (out, s, z, *saved) if x is not None]


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: list[Tensor],
    cu_seqlens: Tensor | None,
    deg: int,
    scale: float,
    chunk_size: int | None,
    return_state: bool,
    impl: str,
) -> list[Tensor]:
    results = [q.new_empty(*q.shape[:3], v.shape[-1])]
    if return_state:
        sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        shape = sequences, k.shape[1], state_size(k.shape[-1], deg)
        dtype = state_dtype(q.dtype)
        results += [q.new_empty(*shape, v.shape[-1], dtype=dtype), q.new_empty(shape, dtype=dtype)]
    if impl == "triton":
        results += _saved(q, k, v, log_g, state, cu_seqlens, deg, chunk_size, return_state)
    return results


@torch.library.custom_op("power::attention_backward", mutates_args=())
def attention_backward(
    grads: list[Tensor],
    results: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: list[Tensor],
    cu_seqlens: Tensor | None,
    deg: int,
    scale: float,
    chunk_size: int | None,
    return_state: bool,
    impl: str,
) -> list[Tensor]:
    """Return the gradients of `q`, `k`, `v` and those of `log_g`, `s`, `z` that exist.

    `grads` are those of the output, `s` and `z`; `results` the output and what the forward
    pass saved, and empty for the reference, which computes it again.
    """
    log_g = bounded(log_g, q.dtype)
    with torch.autocast(q.device.type, enabled=False):
        if impl == "reference" or not q.numel():
            return _reference_backward(
                grads, q, k, v, log_g, state, cu_seqlens, deg, scale, chunk_size
            )
        from power import kernels

        s, z = state or (None, None)
        dout, *dstate = grads
        ds, dz = dstate or (None, None)
        out, *saved = results
        gradients = kernels.backward(
            dout, ds, dz, q, k, v, log_g, s, z, cu_seqlens, out, saved, deg, scale, chunk_size
        )
        return [x for x in gradients if x is not None]


@attention_backward.register_fake
def _(
    grads: list[Tensor],
    results: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: list[Tensor],
    *flags: Any,
) -> list[Tensor]:
    gates = [] if log_g is None else [log_g]
    return [x.new_empty(x.shape) for x in (q, k, v, *gates, *state)]


def _setup_context(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    q, k, v, log_g, state, cu_seqlens, *ctx.flags = inputs
    *_, return_state, impl = ctx.flags
    out, *rest = output
    results = [out, *rest[2 * return_state :]] if impl == "triton" else []
    ctx.like = [(x.shape, x.dtype) for x in output[: 1 + 2 * return_state]]
    ctx.with_state = bool(state)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, log_g, cu_seqlens, *state, *results)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple:
    q, k, v, log_g, cu_seqlens, *rest = ctx.saved_tensors
    state, results = (rest[:2], rest[2:]) if ctx.with_state else ([], rest)
    wanted = [
        q.new_zeros((), dtype=dtype).expand(shape) if grad is None else grad
        for grad, (shape, dtype) in zip(grads, ctx.like, strict=False)
    ]
    dq, dk, dv, *rest = attention_backward(
        wanted, results, q, k, v, log_g, state, cu_seqlens, *ctx.flags
    )
    dlog_g = None if log_g is None else rest.pop(0)
    return dq, dk, dv, dlog_g, rest, *[None] * (1 + len(ctx.flags))


attention.register_autograd(_backward, setup_context=_setup_context)


def check_values(q: Tensor, log_g: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Raise where the values of CPU tensors are wrong; on a GPU that would cost a wait."""
    if log_g is not None and log_g.device.type == "cpu":
        wrong = log_g[~((log_g <= 0) & log_g.isfinite())]
        if wrong.numel():
            raise ValueError(
                f"log_g must be <= 0 and finite (a gate of at most 1), got {wrong[0].item():.4g}; "
                "logsigmoid makes log-gates of any number, and cu_seqlens starts sequences anew"
            )
    if cu_seqlens is not None and cu_seqlens.device.type == "cpu":
        bounds = cu_seqlens.tolist()
        rising = all(start <= stop for start, stop in pairwise(bounds))
        if bounds[0] != 0 or bounds[-1] != q.shape[2] or not rising:
            raise ValueError(
                f"cu_seqlens must rise from 0 to T = {q.shape[2]}, got {bounds[:8]}"
                + ("..." if len(bounds) > 8 else "")
            )


def bounded(log_g: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return log-gates, none below the number whose exponential is 0 in sums for this dtype.

    Running sums, and so the tokens after a gate that is closed by -1e9, then keep their precision.
    """
    if log_g is None:
        return None
    return log_g.clamp(min=-746.0 if dtype == torch.float64 else -104.0)


def _reference_backward(
    grads: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: list[Tensor],
    cu_seqlens: Tensor | None,
    deg: int,
    scale: float,
    chunk_size: int | None,
) -> list[Tensor]:
    """Return the gradients by the reference, sequence by sequence where they are packed."""
    dout, *dstate = grads
    bounds = [0, q.shape[2]] if cu_seqlens is None else cu_seqlens.tolist()
    tokens, states = [], []
    for n, (start, stop) in enumerate(pairwise(bounds)):
        one = slice(None) if cu_seqlens is None else slice(n, n + 1)
        dout_n, q_n, k_n, v_n = (x[:, :, start:stop] for x in (dout, q, k, v))
        *dtokens, dbefore = chunked_backward(
            dout_n,
            PowerState(*(x[one] for x in dstate)) if dstate else None,
            q_n,
            k_n,
            v_n,
            None if log_g is None else log_g[:, :, start:stop],
            deg=deg,
            scale=scale,
            chunk_size=chunk_size,
            initial_state=PowerState(*(x[one] for x in state)) if state else None,
        )
        tokens.append([x for x in dtokens if x is not None])
        states.append(dbefore or ())
    return [
        *(torch.cat(x, 2) for x in zip(*tokens, strict=True)),
        *(torch.cat(x) for x in zip(*states, strict=True)),
    ]


def _saved(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: list[Tensor],
    cu_seqlens: Tensor | None,
    deg: int,
    chunk_size: int | None,
    return_state: bool,
) -> list[Tensor]:
    """Return empty tensors like those that the kernels save."""
    from power import kernels

    shapes = kernels.saved_shapes(
        q, k, v, log_g, bool(state), cu_seqlens, deg, chunk_size, return_state
    )
    return [q.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
