# mypy: disable-error-code="no-untyped-def"
"""Chunk states: fold weights into tokens, sum each chunk, scan over the chunks of a sequence."""

import triton
import triton.language as tl

from power.kernels.tiles import (
    SIZES,
    chunk_bounds,
    sequence_chunks,
    tile_blocks,
)

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=SIZES)
def gate_fwd_kernel(
    p_log_g, p_g, p_chunks, T, C, NC, H,
    BT: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Sum log gates from the start of their chunk, for powers of two: g_t = log2(e) sum log_g."""
    n, h = tl.program_id(0), tl.program_id(1)
    b, start, end, _, _, _ = chunk_bounds(p_chunks, n, T, C, NC, False, VARLEN)
    base = (b * H + h).to(tl.int64) * T
    total = 0.0
    for t0 in range(start, end, BT):
        t = t0 + tl.arange(0, BT)
        b_g = tl.load(p_log_g + base + t, mask=t < end, other=0.0).to(tl.float32) * LOG2E
        tl.store(p_g + base + t, total + tl.cumsum(b_g, 0), mask=t < end)
        total += tl.sum(b_g, 0)


@triton.jit(do_not_specialize=SIZES)
def gate_bwd_kernel(
    p_col, p_flow, p_dlog_g, p_chunks, T, C, NC, H,
    PARTS: tl.constexpr, BP: tl.constexpr, BT: tl.constexpr, INITIAL: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """dlog_g_t = what flows into the chunk of t + sum_{s < t} col_s over the chunk.

    A gate scales what passes from the tokens before it to the queries from it on: what flows in,
    plus what the keys before it give (col), less what the queries before it take, which is
    nothing, as their weights are normalised.
    """
    n, h = tl.program_id(0), tl.program_id(1)
    b, start, end, past, _, _ = chunk_bounds(p_chunks, n, T, C, NC, False, VARLEN)
    base = (b * H + h).to(tl.int64) * T
    total = 0.0
    if PARTS > 0:  # noqa: SIM102
        if past | INITIAL:
            o_p = tl.arange(0, BP)
            p_flow += (n * H + h).to(tl.int64) * PARTS
            total += tl.sum(tl.load(p_flow + o_p, mask=o_p < PARTS, other=0.0), 0)
    for t0 in range(start, end, BT):
        t = t0 + tl.arange(0, BT)
        b_col = tl.load(p_col + base + t, mask=t < end, other=0.0)
        tl.store(p_dlog_g + base + t, total + tl.cumsum(b_col, 0) - b_col, mask=t < end)
        total += tl.sum(b_col, 0)


@triton.jit(do_not_specialize=SIZES)
def fold_fwd_kernel(
    p_k, p_g, p_kt, p_kft, p_chunks, T, C, CP, NC, H,
    K: tl.constexpr, BT: tl.constexpr, ALL: tl.constexpr, GATED: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Write a chunk's keys [K, CP], plain and discounted to its end, with zeros behind them."""
    blocks = tl.cdiv(CP, BT)
    n, h = tl.program_id(0) // blocks, tl.program_id(1)
    b, start, end, _, future, _ = chunk_bounds(p_chunks, n, T, C, NC, False, VARLEN)
    if not ALL:  # noqa: SIM102
        if not future:
            return
    o_t = tl.program_id(0) % blocks * BT + tl.arange(0, BT)
    m = start + o_t < end
    o_k = tl.arange(0, K)
    base = (b * H + h).to(tl.int64) * T + start
    b_k = tl.load(p_k + base * K + o_t[:, None] * K + o_k[None, :], mask=m[:, None], other=0.0)
    o_x = (n * H + h).to(tl.int64) * K * CP + o_k[:, None] * CP + o_t[None, :]
    tl.store(p_kt + o_x, tl.trans(b_k), mask=(o_t < CP)[None, :])
    if GATED:
        b_g = tl.load(p_g + base + o_t, mask=m, other=0.0)
        b_f = tl.exp2(tl.minimum(tl.load(p_g + base + (end - start) - 1) - b_g, 0.0))
        tl.store(p_kft + o_x, tl.trans(b_k * b_f[:, None]).to(b_k.dtype), mask=(o_t < CP)[None, :])


@triton.jit(do_not_specialize=SIZES)
def fold_bwd_kernel(
    p_q, p_out, p_dout, p_rden, p_g, p_delta, p_w, p_qt, p_qft, p_chunks, T, C, CP, NC, H,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, STATE: tl.constexpr,
    ALL: tl.constexpr, GATED: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Write delta_t = out_t . dout_t, w_t = log2(rden_t) + g_t, and q_t, plain and times 2^w_t."""
    blocks = tl.cdiv(CP, BT)
    n, h = tl.program_id(0) // blocks, tl.program_id(1)
    b, start, end, past, _, _ = chunk_bounds(p_chunks, n, T, C, NC, False, VARLEN)
    o_t = tl.program_id(0) % blocks * BT + tl.arange(0, BT)
    m = start + o_t < end
    o_v = tl.arange(0, V)
    base = (b * H + h).to(tl.int64) * T + start
    o_y = base * V + o_t[:, None] * V + o_v[None, :]
    b_out = tl.load(p_out + o_y, mask=m[:, None], other=0.0).to(tl.float32)
    b_dout = tl.load(p_dout + o_y, mask=m[:, None], other=0.0).to(tl.float32)
    tl.store(p_delta + base + o_t, tl.sum(b_out * b_dout, 1), mask=m)
    b_rden = tl.load(p_rden + base + o_t, mask=m, other=0.0)
    b_w = tl.log2(b_rden)
    if GATED:
        b_g = tl.load(
            p_g + (b * (H // GROUP) + h // GROUP).to(tl.int64) * T + start + o_t, mask=m, other=0.0
        )
        b_w += b_g
    tl.store(p_w + base + o_t, b_w, mask=m)
    if STATE:  # noqa: SIM102
        if past | ALL:
            o_k = tl.arange(0, K)
            b_q = tl.load(
                p_q + base * K + o_t[:, None] * K + o_k[None, :], mask=m[:, None], other=0.0
            )
            b_f = b_rden
            if GATED:
                b_f *= tl.exp2(b_g)
            o_x = (n * H + h).to(tl.int64) * K * CP + o_k[:, None] * CP + o_t[None, :]
            tl.store(p_qt + o_x, tl.trans(b_q), mask=(o_t < CP)[None, :])
            tl.store(
                p_qft + o_x, tl.trans(b_q * b_f[:, None]).to(b_q.dtype), mask=(o_t < CP)[None, :]
            )


@triton.jit(do_not_specialize=SIZES)
def update_kernel(
    p_x, p_xt, p_xft, p_y, p_delta, p_state, p_chunks, T, C, CP, NC, H,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    UNIT: tl.constexpr, BACKWARD: tl.constexpr, ALL: tl.constexpr, FULL: tl.constexpr,
    VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write sum_t phi(x_t) y_t^T of a chunk, 256 rows a program, and sum_t x_t x_t^T for z.

    One factor of each product is the folded one. Forward, x and y are keys and values; backward,
    queries and output gradients, and the second sum is weighted by -delta too.
    """
    NB: tl.constexpr = K // 16
    NT: tl.constexpr = NB * (NB + 1) // 2
    SIZE: tl.constexpr = 256 * NT * V + K * K
    NP: tl.constexpr = V // BV * NT + 1
    pid, n, h = tl.program_id(0) % NP, tl.program_id(0) // NP, tl.program_id(1)
    b, start, end, past, future, slot = chunk_bounds(p_chunks, n, T, C, NC, FULL, VARLEN)
    if not ALL:
        if BACKWARD:
            if not past:
                return
        else:
            if not future:
                return
    slot += 0 if BACKWARD else 1
    p_state += (slot * H + h).to(tl.int64) * SIZE
    steps = tl.cdiv(end - start, BT)
    first = h * GROUP
    p_xt += (n * H * GROUP + first).to(tl.int64) * K * CP
    p_xft += (n * H * GROUP + first).to(tl.int64) * K * CP
    tokens = (b * H * GROUP + first).to(tl.int64) * T + start
    o_t = tl.arange(0, BT)
    if pid < NP - 1:
        i_a, i_b = tile_blocks(pid % NT, NB)
        o_i = tl.arange(0, 16)
        o_v = pid // NT * BV + tl.arange(0, BV)
        p_xa = p_xt + (i_a * 16 + o_i)[:, None] * CP + o_t[None, :]
        p_xb = p_xft + (i_b * 16 + o_i)[:, None] * CP + o_t[None, :]
        p_yt = p_y + tokens * V + o_t[:, None] * V + o_v[None, :]
        acc = tl.zeros([256, BV], tl.float32)
        for step in range(GROUP * steps):
            t0 = step % steps * BT
            head = step // steps
            b_xa = tl.load(p_xa + head * K * CP + t0)  # [16, BT]
            b_xb = tl.load(p_xb + head * K * CP + t0)  # [16, BT]
            b_y = tl.load(
                p_yt + (head * T + t0) * V, mask=(start + t0 + o_t < end)[:, None], other=0.0
            )
            b_phi = tl.reshape(b_xa[:, None, :] * b_xb[None, :, :], [256, BT])
            acc = tl.dot(b_phi, b_y, acc, input_precision=PRECISION)
        o_s = (pid % NT * 256 + tl.arange(0, 256)[:, None]) * V + o_v[None, :]
        tl.store(p_state + o_s, (acc * UNIT).to(p_state.dtype.element_ty))
    else:
        o_k = tl.arange(0, K)
        p_xk = p_xft + o_k[:, None] * CP + o_t[None, :]
        p_xr = p_x + tokens * K + o_t[:, None] * K + o_k[None, :]
        acc_z = tl.zeros([K, K], tl.float32)
        for step in range(GROUP * steps):
            t0 = step % steps * BT
            head = step // steps
            m = start + t0 + o_t < end
            b_xk = tl.load(p_xk + head * K * CP + t0)  # [K, BT]
            b_x = tl.load(p_xr + (head * T + t0) * K, mask=m[:, None], other=0.0)  # [BT, K]
            if BACKWARD:
                b_d = tl.load(p_delta + tokens + head * T + t0 + o_t, mask=m, other=0.0)
                b_xk = (b_xk * -b_d[None, :]).to(b_x.dtype)
            acc_z = tl.dot(b_xk, b_x, acc_z, input_precision=PRECISION)
        o_z = 256 * NT * V + o_k[:, None] * K + o_k[None, :]
        tl.store(p_state + o_z, (acc_z * UNIT).to(p_state.dtype.element_ty))


@triton.jit(do_not_specialize=SIZES)
def scan_fwd_kernel(
    p_state, p_g, p_s0, p_sT, p_chunks, p_first, T, C, NC, H, SIZE,
    BLOCK: tl.constexpr, GATED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Turn the chunks' sums U into the states after them, in place: S <- 2^g_end S + U."""
    FULL: tl.constexpr = INITIAL or FINAL
    parts = tl.cdiv(SIZE, BLOCK)
    part, row = tl.program_id(0) % parts, tl.program_id(0) // parts
    seq, h = row // H, row % H
    o = part * BLOCK + tl.arange(0, BLOCK)
    m = o < SIZE
    first, last, slot = sequence_chunks(p_chunks, p_first, seq, NC, FULL, VARLEN)
    count = last - first if FINAL else last - first - 1
    p_state += (slot * H + h).to(tl.int64) * SIZE + o
    step = (h * 0 + H).to(tl.int64) * SIZE
    acc = tl.zeros([BLOCK], tl.float32)
    if INITIAL:
        acc = tl.load(p_s0 + (seq * H + h).to(tl.int64) * SIZE + o, mask=m, other=0.0)
        tl.store(p_state, acc.to(p_state.dtype.element_ty), mask=m)
    # Loads run three chunks ahead of the sum.
    b_u0 = tl.load(p_state + step, mask=m & (count > 0), other=0.0)
    b_u1 = tl.load(p_state + 2 * step, mask=m & (count > 1), other=0.0)
    b_u2 = tl.load(p_state + 3 * step, mask=m & (count > 2), other=0.0)
    decay = 1.0
    for i in range(count):
        b_u3 = tl.load(p_state + (i + 4) * step, mask=m & (i + 3 < count), other=0.0)
        if GATED:
            b, _, end, _, _, _ = chunk_bounds(p_chunks, first + i, T, C, NC, FULL, VARLEN)
            decay = tl.exp2(tl.load(p_g + (b * H + h).to(tl.int64) * T + end - 1))
        acc = acc * decay + b_u0.to(tl.float32)
        tl.store(p_state + (i + 1) * step, acc.to(p_state.dtype.element_ty), mask=m)
        b_u0, b_u1, b_u2 = b_u1, b_u2, b_u3
    if FINAL:
        tl.store(p_sT + (seq * H + h).to(tl.int64) * SIZE + o, acc, mask=m)


@triton.jit(do_not_specialize=SIZES)
def scan_bwd_kernel(
    p_dstate, p_state, p_g, p_weight, p_dsT, p_ds0, p_flow, p_chunks, p_first, T, C, NC, H, SIZE,
    BLOCK: tl.constexpr, GATED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Add to the gradient that a chunk gives its state what later chunks give it, in place.

    Also write a block's part of <dS, S> at the start of each chunk: the gradient of a gate there.
    """
    FULL: tl.constexpr = INITIAL or FINAL
    parts = tl.cdiv(SIZE, BLOCK)
    part, row = tl.program_id(0) % parts, tl.program_id(0) // parts
    seq, h = row // H, row % H
    o = part * BLOCK + tl.arange(0, BLOCK)
    m = o < SIZE
    first, last, slot = sequence_chunks(p_chunks, p_first, seq, NC, FULL, VARLEN)
    base = (slot * H + h).to(tl.int64) * SIZE + o
    p_dstate += base
    if p_flow is not None:
        p_state += base
    step = (h * 0 + H).to(tl.int64) * SIZE
    stop = 0 if INITIAL else 1  # the first chunk reads an initial state alone
    i = last - first - 1
    acc = tl.zeros([BLOCK], tl.float32)
    if FINAL:
        acc = tl.load(p_dsT + (seq * H + h).to(tl.int64) * SIZE + o, mask=m, other=0.0)
        tl.store(p_dstate + (i + 1) * step, acc.to(p_dstate.dtype.element_ty), mask=m)
    b_d0 = tl.load(p_dstate + i * step, mask=m & (i >= stop), other=0.0)
    b_d1 = tl.load(p_dstate + (i - 1) * step, mask=m & (i - 1 >= stop), other=0.0)
    b_d2 = tl.load(p_dstate + (i - 2) * step, mask=m & (i - 2 >= stop), other=0.0)
    decay = 1.0
    if p_flow is not None:
        b_w = tl.load(p_weight + o, mask=m, other=0.0)
        b_s0 = tl.load(p_state + i * step, mask=m & (i >= stop), other=0.0)
        b_s1 = tl.load(p_state + (i - 1) * step, mask=m & (i - 1 >= stop), other=0.0)
    for back in range(last - first - stop):
        i = last - first - 1 - back
        b_d3 = tl.load(p_dstate + (i - 3) * step, mask=m & (i - 3 >= stop), other=0.0)
        if p_flow is not None:
            b_s2 = tl.load(p_state + (i - 2) * step, mask=m & (i - 2 >= stop), other=0.0)
        if GATED:
            b, _, end, _, _, _ = chunk_bounds(p_chunks, first + i, T, C, NC, FULL, VARLEN)
            decay = tl.exp2(tl.load(p_g + (b * H + h).to(tl.int64) * T + end - 1))
        acc = acc * decay + b_d0.to(tl.float32)
        tl.store(p_dstate + i * step, acc.to(p_dstate.dtype.element_ty), mask=m)
        b_d0, b_d1, b_d2 = b_d1, b_d2, b_d3
        if p_flow is not None:
            p_part = p_flow + ((first + i) * H + h).to(tl.int64) * parts
            tl.store(p_part + part, tl.sum(acc * b_w * b_s0.to(tl.float32), 0))
            b_s0, b_s1 = b_s1, b_s2
    if INITIAL:
        tl.store(p_ds0 + (seq * H + h).to(tl.int64) * SIZE + o, acc, mask=m)
