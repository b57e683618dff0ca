"""The sequence of launches of the forward pass, the backward pass and a decoding step."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from power.kernels.backward import (
    attention_bwd_dk_kernel,
    attention_bwd_dq_kernel,
    attention_bwd_dv_kernel,
)
from power.kernels.config import kernel_config, precision, score_scale, state_unit, stateful
from power.kernels.forward import attention_fwd_kernel
from power.kernels.layout import (
    Layout,
    antisymmetric,
    chunk_layout,
    count_slots,
    from_kernel,
    kernel_state_size,
    row_tables,
    state_maps,
    to_kernel,
)
from power.kernels.states import (
    fold_bwd_kernel,
    fold_fwd_kernel,
    gate_bwd_kernel,
    gate_fwd_kernel,
    scan_bwd_kernel,
    scan_fwd_kernel,
    update_kernel,
)
from power.kernels.step import step_out_kernel, step_state_kernel

_SCAN = 1024  # numbers of a state that one program carries through the chunks


@dataclass
class _Call:
    """What all launches of one call share."""

    lay: Layout
    heads: int
    kv_heads: int
    size: int
    unit: float
    scale: float
    gated: bool
    initial: bool
    stateful: bool
    cut: tuple[int, ...]
    folded: tuple[int, ...]
    flags: dict[str, bool]
    sizes: dict[str, Any]
    slots: int

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_g: Tensor | None,
        s0: Tensor | None,
        cu_seqlens: Tensor | None,
        deg: int,
        scale: float,
        chunk_size: int | None,
        final: bool,
    ) -> "_Call":
        H, T, K = q.shape[1:]
        HK, V = k.shape[1], v.shape[3]
        full = s0 is not None or final
        lay = chunk_layout(q, cu_seqlens, chunk_size, full)
        flags = {"GATED": log_g is not None, "VARLEN": lay.table is not None}
        packed = None if cu_seqlens is None else lay.sequences
        unit, scale = state_unit(q.dtype), score_scale(scale, deg, q.dtype)
        sizes = {"GROUP": H // HK, "DEG": deg, "K": K, "V": V, "scale": scale, "UNIT": unit}
        return cls(
            lay=lay,
            heads=H,
            kv_heads=HK,
            size=kernel_state_size(K, V),
            unit=unit,
            scale=scale,
            gated=log_g is not None,
            initial=s0 is not None,
            stateful=stateful(T, chunk_size, s0 is not None),
            cut=(T, lay.chunk, lay.per_row),
            folded=(T, lay.chunk, lay.padded, lay.per_row),
            flags=flags,
            sizes={**sizes, "PRECISION": precision(q.dtype), "FULL": full, **flags},
            slots=count_slots(q.shape[0], T, chunk_size, packed, full),
        )

    def rows(self, kernel: str, q: Tensor) -> tuple[int, dict[str, int]]:
        """Return a kernel's programs along the tokens, and its configuration."""
        config = kernel_config(kernel, self.sizes["K"], self.sizes["V"], q.dtype)
        return self.lay.total * triton.cdiv(self.lay.chunk, config["BM"]), config

    def sum_chunks(
        self, x: Tensor, xt: Tensor, xft: Tensor, y: Tensor, delta: Tensor | None, every: bool
    ) -> Tensor:
        """Return the chunks' sums; ``delta`` is given in the backward pass."""
        K, V = self.sizes["K"], self.sizes["V"]
        BV, blocks = min(V, 64), K // 16
        group = 1 if delta is None else self.sizes["GROUP"]
        state = x.new_empty(self.slots, self.kv_heads, self.size)
        grid = (V // BV * blocks * (blocks + 1) // 2 + 1, self.lay.total, self.kv_heads)
        update_kernel[grid](
            x, xt, xft, y, delta, state, self.lay.table, *self.folded, self.kv_heads,
            GROUP=group, K=K, V=V, BV=BV, UNIT=self.unit if delta is None else 1.0,
            BACKWARD=delta is not None, ALL=every, FULL=self.sizes["FULL"],
            VARLEN=self.flags["VARLEN"], PRECISION=self.sizes["PRECISION"],
            **kernel_config("update", K, V, x.dtype),
        )  # fmt: skip
        return state


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    s0: Tensor | None,
    z0: Tensor | None,
    cu_seqlens: Tensor | None,
    deg: int,
    scale: float,
    chunk_size: int | None,
    return_state: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, list[Tensor]]:
    """Return the output, the last state where asked for, and what ``backward`` needs."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    c = _Call.of(q, k, v, log_g, s0, cu_seqlens, deg, scale, chunk_size, return_state)
    lay, HK, K, V = c.lay, c.kv_heads, q.shape[-1], v.shape[-1]
    out, rden = q.new_empty(*q.shape[:3], V), q.new_empty(q.shape[:3], dtype=torch.float32)
    g = state = start = last = None
    with torch.cuda.device_of(q):
        if log_g is not None:
            log_g = log_g.contiguous()
            g = torch.empty_like(log_g, dtype=torch.float32)
            gate_fwd_kernel[(lay.total, HK)](
                log_g, g, lay.table, *c.cut, HK, BT=1024, VARLEN=c.flags["VARLEN"]
            )
        if c.stateful or return_state:
            if s0 is not None and z0 is not None:
                start = to_kernel(s0, z0, K, c.unit)
            if return_state:
                last = q.new_empty(lay.sequences, HK, c.size, dtype=torch.float32)
            kt = q.new_empty(lay.total, HK, K, lay.padded)
            kft = torch.empty_like(kt) if c.gated else kt
            fold_fwd_kernel[(lay.total * (lay.padded // 64), HK)](
                k, g, kt, kft, lay.table, *c.folded, HK, K=K, BT=64, ALL=return_state, **c.flags
            )
            state = c.sum_chunks(k, kt, kft, v, None, return_state)
            del kt, kft
            scan_fwd_kernel[(triton.cdiv(c.size, _SCAN), lay.sequences * HK)](
                state, g, start, last, lay.table, lay.first, *c.cut, HK, c.size,
                BLOCK=_SCAN, INITIAL=c.initial, FINAL=return_state, **c.flags,
            )  # fmt: skip
        blocks, config = c.rows("out", q)
        BV = min(V, 64)
        attention_fwd_kernel[(blocks, c.heads, V // BV)](
            q, k, v, g, state, out, rden, lay.table, *c.cut, c.heads,
            BV=BV, STATE=c.stateful, INITIAL=c.initial, **c.sizes, **config,
        )  # fmt: skip
    saved = [rden]
    if g is not None:
        saved.append(g)
    if c.stateful and state is not None:
        saved.append(state)
    if last is None:
        return out, None, None, saved
    s, z = from_kernel(last, K, V, c.unit)
    if s0 is not None and z0 is not None:
        decay = _decay(log_g, cu_seqlens, s)
        s_rest, z_rest = antisymmetric(s0, z0, K)
        s, z = s + decay[..., None] * s_rest, z + decay * z_rest
    return out, s, z, saved


def backward(
    dout: Tensor,
    ds_T: Tensor | None,
    dz_T: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_g: Tensor | None,
    s0: Tensor | None,
    z0: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    saved: list[Tensor],
    deg: int,
    scale: float,
    chunk_size: int | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, log_g, s0 and z0; None for those that do not exist."""
    q, k, v, dout, out = (x.contiguous() for x in (q, k, v, dout, out))
    final = ds_T is not None
    c = _Call.of(q, k, v, log_g, s0, cu_seqlens, deg, scale, chunk_size, final)
    lay, H, HK, K, V = c.lay, c.heads, c.kv_heads, q.shape[-1], v.shape[-1]
    rden, *rest = saved
    g = rest.pop(0) if c.gated else None
    state = rest.pop(0) if c.stateful else None
    delta, w = torch.empty_like(rden), torch.empty_like(rden)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    col = dlog_g = ds0 = dstate = flow = end = qt = qft = None
    parts = triton.cdiv(c.size, _SCAN)
    # Kernels leave scale^deg out of the gradients of states.
    unit = 1 / (c.unit * c.scale**deg)
    with torch.cuda.device_of(q):
        if c.stateful:
            qt = q.new_empty(lay.total, H, K, lay.padded)
            qft = torch.empty_like(qt)
        fold_bwd_kernel[(lay.total * (lay.padded // 64), H)](
            q, out, dout, rden, g, delta, w, qt, qft, lay.table, *c.folded, H,
            GROUP=H // HK, K=K, V=V, BT=64, STATE=c.stateful, ALL=c.initial, **c.flags,
        )  # fmt: skip
        blocks, config = c.rows("dq", q)
        attention_bwd_dq_kernel[(blocks, H)](
            q, k, v, g, state, dout, rden, delta, dq, lay.table, *c.cut, H,
            STATE=c.stateful, INITIAL=c.initial, **c.sizes, **config,
        )  # fmt: skip
        if qt is not None and qft is not None:
            dstate = c.sum_chunks(q, qt, qft, dout, delta, c.initial)
            if c.gated:
                flow = q.new_empty(lay.total, HK, parts, dtype=torch.float32)
            del qt, qft
        elif final:
            dstate = q.new_empty(c.slots, HK, c.size)
        if dstate is not None:
            if ds_T is not None and dz_T is not None:
                end = to_kernel(ds_T, dz_T, K, unit)
            if c.initial:
                ds0 = q.new_empty(lay.sequences, HK, c.size, dtype=torch.float32)
            squares = state_maps(K, q.device).weight.square().repeat_interleave(V)
            weight = F.pad(squares, (0, K * K), value=1.0) * c.scale**deg
            scan_bwd_kernel[(parts, lay.sequences * HK)](
                dstate, state, g, weight, end, ds0, flow, lay.table, lay.first, *c.cut, HK, c.size,
                BLOCK=_SCAN, INITIAL=c.initial, FINAL=final, **c.flags,
            )  # fmt: skip
        col = None if g is None else torch.empty_like(g)
        blocks, config = c.rows("dk", q)
        attention_bwd_dk_kernel[(blocks, HK)](
            q, k, v, g, dstate, dout, w, delta, dk, col, lay.table, *c.cut, HK,
            STATE=dstate is not None, FINAL=final, **c.sizes, **config,
        )  # fmt: skip
        blocks, config = c.rows("dv", q)
        BV = min(V, 64)
        attention_bwd_dv_kernel[(blocks, HK, V // BV)](
            q, k, g, dstate, dout, w, dv, lay.table, *c.cut, HK,
            BV=BV, STATE=dstate is not None, FINAL=final, **c.sizes, **config,
        )  # fmt: skip
        if g is not None:
            dlog_g = torch.empty_like(g)
            gate_bwd_kernel[(lay.total, HK)](
                col, flow, dlog_g, lay.table, *c.cut, HK,
                PARTS=0 if flow is None else parts, BP=triton.next_power_of_2(parts), BT=1024,
                INITIAL=c.initial, VARLEN=c.flags["VARLEN"],
            )  # fmt: skip
    if ds0 is None:
        return dq, dk, dv, dlog_g, None, None
    s, z = from_kernel(ds0, K, V, unit)
    if ds_T is not None and dz_T is not None and s0 is not None and z0 is not None:
        decay = _decay(log_g, cu_seqlens, s)
        s_rest, z_rest = antisymmetric(ds_T, dz_T, K)
        s, z = s + decay[..., None] * s_rest, z + decay * z_rest
        if dlog_g is not None:
            s_both, z_both = (
                x * y for x, y in zip((s_rest, z_rest), antisymmetric(s0, z0, K), strict=True)
            )
            through = decay * (s_both.sum(-1) + z_both).sum(-1, keepdim=True)  # [N, H_kv, 1]
            if cu_seqlens is not None:
                t = torch.arange(q.shape[2], device=q.device, dtype=cu_seqlens.dtype)
                seq = torch.searchsorted(cu_seqlens[1:], t, right=True)
                through = through[seq].permute(2, 1, 0)
            dlog_g += through
    return dq, dk, dv, dlog_g, s, z


def _decay(log_g: Tensor | None, cu_seqlens: Tensor | None, like: Tensor) -> Tensor:
    """Return what is left of each initial state at the end: ``[N, H_kv, 1]``."""
    if log_g is None:
        return like.new_ones(1)
    if cu_seqlens is None:
        return log_g.sum(-1, keepdim=True).exp()
    total = F.pad(log_g[0].double().cumsum(-1), (1, 0))[:, cu_seqlens.long()]
    return total.diff().mT.exp().float()[..., None]


def step(
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
    deg: int,
    scale: float,
) -> Tensor:
    """Return the output of the next tokens ``[B, H, n, V]``; parts of the state are updated."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    log_g = None if log_g is None else log_g.contiguous()
    (B, H, n, K), HK, V, C = q.shape, k.shape[1], v.shape[-1], open_k.shape[2]
    index, weight = row_tables(K, deg, q.device)
    D, BD = weight.numel(), 8192 // V
    splits = triton.cdiv(D, BD)
    out, part = q.new_empty(B, H, n, V), q.new_empty(B, H, splits, V + 1, dtype=torch.float32)
    sizes = {"GROUP": H // HK, "DEG": deg, "K": K, "V": V, "C": C}
    exact = "ieee" if q.dtype == torch.float32 else "tf32x3"
    latest = (open_k, open_v, open_log_g, filled)
    with torch.cuda.device_of(q):
        for t in range(n):
            step_state_kernel[(splits, B * HK)](
                q, k, v, log_g, s, z, *latest, index, weight, part, t, n, HK,
                D=D, BD=BD, BC=16, PRECISION=exact, **sizes,
            )  # fmt: skip
            step_out_kernel[(B * H,)](
                q, k, v, log_g, *latest, part, out, scale, t, n, HK, splits,
                BC=triton.next_power_of_2(C), BS=16, **sizes,
            )  # fmt: skip
            filled += 1
            filled.remainder_(C)
    return out
