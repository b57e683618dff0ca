"""The sequence of launches of the forward pass, the backward pass and a decoding step.

What grows with the data is on a grid's first axis: the others end at 65,535 programs.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from power.kernels.backward import (
    attention_bwd_dk_kernel,
    attention_bwd_dq_kernel,
    attention_bwd_dv_kernel,
)
from power.kernels.config import (
    QUARTIC_ROWS,
    kernel_config,
    precision,
    score_scale,
    state_unit,
    stateful,
)
from power.kernels.forward import attention_fwd_kernel
from power.kernels.layout import (
    Layout,
    antisymmetric,
    chunk_layout,
    count_slots,
    from_kernel,
    from_quartic,
    kernel_state_size,
    multiplicities,
    quartic_maps,
    row_tables,
    to_kernel,
    to_quartic,
    total_decay,
)
from power.kernels.quartic import (
    quartic_bwd_dkv_kernel,
    quartic_bwd_dq_kernel,
    quartic_fwd_kernel,
    quartic_update_kernel,
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
            size=kernel_state_size(K, V, deg),
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

    def to_state(self, s: Tensor, z: Tensor, unit: float) -> Tensor:
        """Lay a public state out for the kernels."""
        convert = to_quartic if self.sizes["DEG"] == 4 else to_kernel
        return convert(s, z, self.sizes["K"], unit)

    def from_state(self, state: Tensor, unit: float) -> tuple[Tensor, Tensor]:
        """Undo `to_state`."""
        convert = from_quartic if self.sizes["DEG"] == 4 else from_kernel
        return convert(state, self.sizes["K"], self.sizes["V"], unit)

    def quartic(self, q: Tensor) -> tuple[int, tuple[Tensor, Tensor], dict[str, Any]]:
        """Return blocks of rows, tables and sizes of the kernels of degree 4."""
        maps, rows = quartic_maps(self.sizes["K"], q.device), QUARTIC_ROWS[q.dtype.itemsize]
        sizes = {name: x for name, x in self.sizes.items() if name != "DEG"}
        sizes = {**sizes, "NT": len(maps.orders), "BM": rows, "num_warps": 8, "num_stages": 2}
        return self.lay.total * triton.cdiv(self.lay.chunk, rows), maps[2:], sizes

    def sum_chunks(
        self, x: Tensor, xt: Tensor, xft: Tensor, y: Tensor, delta: Tensor | None, every: bool
    ) -> Tensor:
        """Return the chunks' sums; `delta` is given in the backward pass."""
        K, V = self.sizes["K"], self.sizes["V"]
        BV, blocks = min(V, 64), K // 16
        group = 1 if delta is None else self.sizes["GROUP"]
        state = x.new_empty(self.slots, self.kv_heads, self.size)
        if self.sizes["DEG"] == 4:
            tiles = quartic_maps(K, x.device).tiles
            quartic_update_kernel[(V // BV * len(tiles) * self.lay.total, self.kv_heads)](
                xt, xft, y, delta, state, tiles, self.lay.table, *self.folded, self.kv_heads,
                GROUP=group, K=K, V=V, BV=BV, BT=QUARTIC_ROWS[x.dtype.itemsize], NT=len(tiles),
                UNIT=self.unit if delta is None else 1.0, BACKWARD=delta is not None, ALL=every,
                FULL=self.sizes["FULL"], VARLEN=self.flags["VARLEN"],
                PRECISION=self.sizes["PRECISION"], num_warps=8, num_stages=2,
            )  # fmt: skip
            return state
        programs = V // BV * blocks * (blocks + 1) // 2 + 1
        update_kernel[(programs * self.lay.total, self.kv_heads)](
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
    """Return the output, the last state where asked for, and what `backward` needs."""
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
                start = c.to_state(s0, z0, c.unit)
            if return_state:
                last = q.new_empty(lay.sequences, HK, c.size, dtype=torch.float32)
            kt = q.new_empty(lay.total, HK, K, lay.padded)
            kft = torch.empty_like(kt) if c.gated else kt
            fold_fwd_kernel[(lay.total * (lay.padded // 64), HK)](
                k, g, kt, kft, lay.table, *c.folded, HK, K=K, BT=64, ALL=return_state, **c.flags
            )
            state = c.sum_chunks(k, kt, kft, v, None, return_state)
            del kt, kft
            scan_fwd_kernel[(triton.cdiv(c.size, _SCAN) * lay.sequences * HK,)](
                state, g, start, last, lay.table, lay.first, *c.cut, HK, c.size,
                BLOCK=_SCAN, INITIAL=c.initial, FINAL=return_state, **c.flags,
            )  # fmt: skip
        blocks, config = c.rows("out", q)
        BV = min(V, 64)
        apart = deg == 4 and c.stateful
        y = torch.empty_like(out, dtype=torch.float32) if apart else out
        yden = torch.empty_like(rden) if apart else rden
        attention_fwd_kernel[(blocks, c.heads, V // BV)](
            q, k, v, g, state, y, yden, lay.table, *c.cut, c.heads,
            BV=BV, STATE=c.stateful and not apart, INITIAL=c.initial, **c.sizes, **config,
        )  # fmt: skip
        if apart:
            blocks, tables, sizes = c.quartic(q)
            quartic_fwd_kernel[(blocks, c.heads, V // BV)](
                q, g, state, y, yden, out, rden, *tables, lay.table, *c.cut, c.heads,
                BV=BV, INITIAL=c.initial, **sizes,
            )  # fmt: skip
    saved = [rden]
    if g is not None:
        saved.append(g)
    if c.stateful and state is not None:
        saved.append(state)
    if last is None:
        return out, None, None, saved
    s, z = c.from_state(last, c.unit)
    if s0 is not None and z0 is not None and deg == 2:
        decay = total_decay(log_g, cu_seqlens, s)
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
        apart = deg == 4 and (c.stateful or final)
        yq, yk, yv = (
            torch.empty_like(x, dtype=torch.float32) if apart else x for x in (dq, dk, dv)
        )
        fixed = delta.clone() if apart else delta
        blocks, config = c.rows("dq", q)
        attention_bwd_dq_kernel[(blocks, H)](
            q, k, v, g, state, dout, rden, fixed, yq, lay.table, *c.cut, H,
            STATE=c.stateful and not apart, INITIAL=c.initial, **c.sizes, **config,
        )  # fmt: skip
        if apart and c.stateful:
            blocks, tables, sizes = c.quartic(q)
            quartic_bwd_dq_kernel[(blocks, H)](
                q, g, state, dout, rden, delta, fixed, yq, dq, *tables, lay.table, *c.cut, H,
                INITIAL=c.initial, **sizes,
            )  # fmt: skip
        elif apart:
            dq.copy_(yq)
        delta = fixed
        if qt is not None and qft is not None:
            dstate = c.sum_chunks(q, qt, qft, dout, delta, c.initial)
            if c.gated:
                flow = q.new_empty(lay.total, HK, parts, dtype=torch.float32)
            del qt, qft
        elif final:
            dstate = q.new_empty(c.slots, HK, c.size)
        if dstate is not None:
            if ds_T is not None and dz_T is not None:
                end = c.to_state(ds_T, dz_T, unit)
            if c.initial:
                ds0 = q.new_empty(lay.sequences, HK, c.size, dtype=torch.float32)
            weight = multiplicities(K, V, deg, q.device) * c.scale**deg
            scan_bwd_kernel[(parts * lay.sequences * HK,)](
                dstate, state, g, weight, end, ds0, flow, lay.table, lay.first, *c.cut, HK, c.size,
                BLOCK=_SCAN, INITIAL=c.initial, FINAL=final, **c.flags,
            )  # fmt: skip
        col = None if g is None else torch.empty_like(g)
        blocks, config = c.rows("dk", q)
        attention_bwd_dk_kernel[(blocks, HK)](
            q, k, v, g, dstate, dout, w, delta, yk, col, lay.table, *c.cut, HK,
            STATE=dstate is not None and not apart, FINAL=final, **c.sizes, **config,
        )  # fmt: skip
        blocks, config = c.rows("dv", q)
        BV = min(V, 64)
        attention_bwd_dv_kernel[(blocks, HK, V // BV)](
            q, k, g, dstate, dout, w, yv, lay.table, *c.cut, HK,
            BV=BV, STATE=dstate is not None and not apart, FINAL=final, **c.sizes, **config,
        )  # fmt: skip
        if apart:
            blocks, tables, sizes = c.quartic(q)
            quartic_bwd_dkv_kernel[(blocks, HK)](
                k, v, g, dstate, yk, yv, dk, dv, col, *tables, lay.table, *c.cut, HK,
                FINAL=final, **sizes,
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
    s, z = c.from_state(ds0, unit)
    if ds_T is not None and dz_T is not None and s0 is not None and z0 is not None and deg == 2:
        decay = total_decay(log_g, cu_seqlens, s)
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
    """Return the output of the next tokens `[B, H, n, V]`; parts of the state are updated."""
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
            step_state_kernel[(splits * B * HK,)](
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
