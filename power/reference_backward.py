"""The gradient of the chunked form, written out in eager PyTorch.

With `n_i` and `d_i` for numerator and denominator of `out_i`, and a bar for gradients,

    n̄_i = out̄_i / d_i,    d̄_i = -n̄_i·out_i,    w̄_ij = n̄_i·v_j + d̄_i.

`w_ij = (scale q_i k_j)^p exp(G_i - G_j)` leads on to `q` and `k`, and to `G` by the row
sums minus the column sums of `w_ij` times its gradient. What the state adds to `n` and `d`
is linear in `s`, `z` and `phi(q)`. A log-gate is part of every `G` of its chunk from its
token on. States before chunks are computed again, and their gradients pass from the last to the
first.
"""

import torch
from torch import Tensor

from power.feature_map import PowerState, monomials, symmetric_power
from power.reference import fold, grouped, state_dtype

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, PowerState | None]


def chunked_backward(
    dout: Tensor,
    dstate: PowerState | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    *,
    deg: int,
    scale: float,
    chunk_size: int | None,
    initial_state: PowerState | None,
) -> Gradients:
    """Return the gradients of `power.reference.chunked`.

    Args:
        dout: Gradient of the output, `[B, H, T, V]`.
        dstate: Gradient of the last state; None where there is none.
        q: Queries. This and what follows is as in `chunked`.
        k: Keys.
        v: Values.
        log_g: Log-gates.
        deg: The even power.
        scale: Factor on the scores.
        chunk_size: Tokens of a chunk.
        initial_state: The state before.

    Returns:
        The gradients of `q`, `k`, `v`, `log_g` and `initial_state`, the last two None
        where these are.
    """
    length = q.shape[2]
    size = chunk_size or max(length, 1)
    chunks, state = [], initial_state
    for start in range(0, length, size):
        q_c, k_c, v_c, dout_c = (x[:, :, start : start + size] for x in (q, k, v, dout))
        log_g_c = None if log_g is None else log_g[:, :, start : start + size]
        chunks.append((dout_c, q_c, k_c, v_c, log_g_c, state))
        if start + size < length:
            state = fold(k_c, v_c, log_g_c, state, deg)
    pieces = []
    for chunk in reversed(chunks):
        *piece, dstate = _chunk_backward(*chunk, dstate, deg, scale)
        pieces.append(piece)
    if not pieces:
        pieces = [[torch.zeros_like(x) for x in (q, k, v, k[..., 0])]]
        if initial_state is not None and dstate is None:
            dstate = PowerState(*map(torch.zeros_like, initial_state))
    dq, dk, dv, dlog_g = (torch.cat(x[::-1], 2) for x in zip(*pieces, strict=True))
    return (
        dq.to(q.dtype),
        dk.to(k.dtype),
        dv.to(v.dtype),
        None if log_g is None else dlog_g.to(log_g.dtype),
        dstate if initial_state is not None else None,
    )


def _chunk_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    state: PowerState | None,
    dstate: PowerState | None,
    deg: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, PowerState | None]:
    """Return the gradients of one chunk: of its tokens, and of the state before it."""
    dtype = state_dtype(q.dtype)
    rows, drows = grouped(q, k).to(dtype), grouped(dout, k).to(dtype)  # [B, H_kv, R, T, .]
    k, v = k.to(dtype), v.to(dtype)
    if log_g is None:
        running = torch.zeros_like(k[..., 0], dtype=torch.float64)
    else:
        running = log_g.double().cumsum(-1)
    causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    decay = (running[..., :, None] - running[..., None, :]).masked_fill(~causal, -torch.inf)
    decay = decay.exp().to(dtype)[:, :, None]
    scores = scale * rows @ k.mT[:, :, None]
    weights = scores**deg * decay
    numerator, denominator = weights @ v[:, :, None], weights.sum(-1, keepdim=True)
    if state is not None:
        s, z = state.s[:, :, None], state.z[:, :, None, :, None]
        factor = scale**deg * running.exp().to(dtype)[:, :, None, :, None]
        phi = factor * symmetric_power(rows, deg)
        numerator, denominator = numerator + phi @ s, denominator + phi @ z
    denominator = denominator.masked_fill(denominator == 0, 1)

    dnumerator = drows / denominator
    ddenominator = -(dnumerator * numerator).sum(-1, keepdim=True) / denominator
    dweights = dnumerator @ v.mT[:, :, None] + ddenominator
    dscores = scale * deg * scores ** (deg - 1) * decay * dweights
    dq = dscores @ k[:, :, None]
    dk = (dscores.mT @ rows).sum(2)
    dv = (weights.mT @ dnumerator).sum(2)
    flow = weights * dweights
    drunning = (flow.sum(-1) - flow.sum(-2)).sum(2)
    dbefore = None
    if state is not None:
        dphi = dnumerator @ s.mT + ddenominator * z.mT
        dq = dq + _symmetric_power_backward(factor * dphi, rows, deg)
        drunning += (phi * dphi).sum((2, -1))
        dbefore = PowerState((phi.mT @ dnumerator).sum(2), (phi * ddenominator).sum((2, 3)))
    if dstate is not None:
        ds, dz = dstate
        later = (running[..., -1:] - running).exp().to(dtype)[..., None]
        phi, dphi = later * symmetric_power(k, deg), v @ ds.mT + dz[:, :, None]
        dk = dk + _symmetric_power_backward(later * dphi, k, deg)
        dv = dv + phi @ ds
        flow = (phi * dphi).sum(-1)
        drunning -= flow
        drunning[..., -1] += flow.sum(-1)
        if state is not None and dbefore is not None:
            total = running[..., -1:].exp().to(dtype)  # [B, H_kv, 1]
            ds, dz = total[..., None] * ds, total * dz
            drunning[..., -1] += (state.s * ds).sum((-1, -2)) + (state.z * dz).sum(-1)
            dbefore = PowerState(dbefore.s + ds, dbefore.z + dz)
    dlog_g = drunning.double().flip(-1).cumsum(-1).flip(-1)
    return dq.flatten(1, 2), dk, dv, dlog_g, dbefore


def _symmetric_power_backward(grad: Tensor, x: Tensor, deg: int) -> Tensor:
    """Return the gradient of `x`, given that of `symmetric_power(x, deg)`."""
    index, weight = monomials(x.shape[-1], deg)
    channels = torch.from_numpy(index).to(x.device)
    grad = grad * torch.from_numpy(weight).to(x)
    dx = torch.zeros_like(x)
    for m in range(deg):
        others = grad
        for n in range(deg):
            if n != m:
                others = others * x[..., channels[n]]
        dx.index_add_(-1, channels[m], others)
    return dx
