# mypy: disable-error-code="no-untyped-def"
"""Degree 4: what the state adds, for kernels that see a chunk alone.

Channels are cut into blocks of 4. A tile of the state is four blocks `a <= b <= c <= d`: 256
rows, the products of one channel of each, bare as in degree 2; the number of orders in which a
tile's blocks stand for the same products is applied where a state is read. `z` lies behind the
tiles, a number a row. There are 35 tiles at head size 16 and 330 at 32, listed in a table.

The attention kernels take the chunks as if nothing lay before them, and leave fp32 results;
the kernels here add what comes from the states, and divide.
"""

import triton
import triton.language as tl

from power.kernels.tiles import SIZES, chunk_bounds


@triton.jit
def block(p_x, p_block, m):
    """Load one block of four channels from rows, in fp32: [M, 4]."""
    columns = tl.load(p_block) * 4 + tl.arange(0, 4)
    return tl.load(p_x + columns[None, :], mask=m[:, None], other=0.0).to(tl.float32)


@triton.jit
def outer(x, y, M: tl.constexpr, N: tl.constexpr):
    """Return all products of a row of `x [M, N]` and of `y [M, N]`: [M, N N]."""
    return tl.reshape(x[:, :, None] * y[:, None, :], [M, N * N])


@triton.jit
def put(dx, block, M: tl.constexpr, K: tl.constexpr):
    """Return [M, K] with `dx [M, 4]` in the channels of one block, and zeros."""
    at = tl.arange(0, K // 4)[None, :, None] == block
    return tl.reshape(tl.where(at, dx[:, None, :], 0.0), [M, K])


@triton.jit
def products_bwd(dphi, p_tile, x_a, x_b, x_c, x_d, M: tl.constexpr, K: tl.constexpr):
    """Return the gradient of M rows from that of a tile's products, `[M, 256]`."""
    x_ab, x_cd = outer(x_a, x_b, M, 4), outer(x_c, x_d, M, 4)
    dphi = tl.reshape(dphi, [M, 16, 16])
    d_ab = tl.reshape(tl.sum(dphi * x_cd[:, None, :], 2), [M, 4, 4])
    d_cd = tl.reshape(tl.sum(dphi * x_ab[:, :, None], 1), [M, 4, 4])
    dx = put(tl.sum(d_ab * x_b[:, None, :], 2), tl.load(p_tile), M, K)
    dx += put(tl.sum(d_ab * x_a[:, :, None], 1), tl.load(p_tile + 1), M, K)
    dx += put(tl.sum(d_cd * x_d[:, None, :], 2), tl.load(p_tile + 2), M, K)
    dx += put(tl.sum(d_cd * x_c[:, :, None], 1), tl.load(p_tile + 3), M, K)
    return dx


@triton.jit(do_not_specialize=SIZES)
def quartic_update_kernel(
    p_xt, p_xft, p_y, p_delta, p_state, p_tiles, p_chunks, T, C, CP, NC, H,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr,
    NT: tl.constexpr, UNIT: tl.constexpr, BACKWARD: tl.constexpr, ALL: tl.constexpr,
    FULL: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write sum_t f_t phi(x_t) y_t^T of one chunk and sum_t f_t phi(x_t), a tile a program.

    Backward, x and y are queries and output gradients, and the second sum is weighted by -delta.
    """
    SIZE: tl.constexpr = 256 * NT * (V + 1)
    NP: tl.constexpr = V // BV * NT
    pid, n, h = tl.program_id(0) % NP, tl.program_id(0) // NP, tl.program_id(1)
    tile = pid % NT
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
    o_v = pid // NT * BV + tl.arange(0, BV)
    o_t = tl.arange(0, BT)
    o_4 = tl.arange(0, 4)
    p_tiles += 4 * tile
    block = (n * H * GROUP + h * GROUP).to(tl.int64) * K * CP + o_4[:, None] * CP + o_t[None, :]
    p_a = p_xft + block + tl.load(p_tiles) * 4 * CP
    p_b = p_xt + block + tl.load(p_tiles + 1) * 4 * CP
    p_c = p_xt + block + tl.load(p_tiles + 2) * 4 * CP
    p_d = p_xt + block + tl.load(p_tiles + 3) * 4 * CP
    tokens = (b * H * GROUP + h * GROUP).to(tl.int64) * T + start
    steps = tl.cdiv(end - start, BT)
    acc = tl.zeros([256, BV], tl.float32)
    acc_z = tl.zeros([256], tl.float32)
    for step in range(GROUP * steps):
        t0, head = step % steps * BT, step // steps
        m = start + t0 + o_t < end
        at = head * K * CP + t0
        x_a, x_b = tl.load(p_a + at).to(tl.float32), tl.load(p_b + at).to(tl.float32)  # [4, BT]
        x_c, x_d = tl.load(p_c + at).to(tl.float32), tl.load(p_d + at).to(tl.float32)
        x_ab = tl.reshape(x_a[:, None, :] * x_b[None, :, :], [16, BT])
        x_cd = tl.reshape(x_c[:, None, :] * x_d[None, :, :], [16, BT])
        phi = tl.reshape(x_ab[:, None, :] * x_cd[None, :, :], [256, BT])
        p_yt = p_y + (tokens + head * T + t0 + o_t)[:, None] * V + o_v[None, :]
        b_y = tl.load(p_yt, mask=m[:, None], other=0.0)  # [BT, BV]
        acc = tl.dot(phi.to(b_y.dtype), b_y, acc, input_precision=PRECISION)
        if BACKWARD:
            phi *= -tl.load(p_delta + tokens + head * T + t0 + o_t, mask=m, other=0.0)[None, :]
        acc_z += tl.sum(phi, 1)
    o_row = tile * 256 + tl.arange(0, 256)
    kind = p_state.dtype.element_ty
    tl.store(p_state + o_row[:, None] * V + o_v[None, :], (acc * UNIT).to(kind))
    if pid < NT:
        tl.store(p_state + 256 * NT * V + o_row, (acc_z * UNIT).to(kind))


@triton.jit(do_not_specialize=SIZES)
def quartic_fwd_kernel(
    p_q, p_g, p_state, p_y, p_yden, p_out, p_rden, p_tiles, p_orders, p_chunks, T, C, NC, H,
    scale: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    BM: tl.constexpr, NT: tl.constexpr, INITIAL: tl.constexpr, GATED: tl.constexpr,
    UNIT: tl.constexpr, FULL: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Join y, the output of the chunk alone, and its 1 / den with what the state holds."""
    SIZE: tl.constexpr = 256 * NT * (V + 1)
    blocks = tl.cdiv(C, BM)
    n, h = tl.program_id(0) // blocks, tl.program_id(1)
    b, start, end, past, _, slot = chunk_bounds(p_chunks, n, T, C, NC, FULL, VARLEN)
    t0 = start + tl.program_id(0) % blocks * BM
    if t0 >= end:
        return
    row = (b * H + h).to(tl.int64) * T
    t = t0 + tl.arange(0, BM)
    m = t < end
    o_v = tl.program_id(2) * BV + tl.arange(0, BV)
    o_y = (row + t)[:, None] * V + o_v[None, :]
    b_y = tl.load(p_y + o_y, mask=m[:, None], other=0.0)
    b_rden = tl.load(p_yden + row + t, mask=m, other=0.0) * UNIT
    den = tl.where(b_rden > 0, 1.0 / tl.where(b_rden > 0, b_rden, 1.0), 0.0)
    if past | INITIAL:
        p_state += (slot * (H // GROUP) + h // GROUP).to(tl.int64) * SIZE
        p_x = p_q + (row + t)[:, None] * K
        o_row = tl.arange(0, 256)
        acc = tl.zeros([BM, BV], tl.float32)
        acc_z = tl.zeros([BM], tl.float32)
        for tile in range(NT):
            p_tile = p_tiles + 4 * tile
            x_ab = outer(block(p_x, p_tile, m), block(p_x, p_tile + 1, m), BM, 4)
            x_cd = outer(block(p_x, p_tile + 2, m), block(p_x, p_tile + 3, m), BM, 4)
            phi = outer(x_ab * tl.load(p_orders + tile), x_cd, BM, 16)
            p_s = p_state + tile * 256 * V + o_row[:, None] * V + o_v[None, :]
            b_s = tl.load(p_s)  # [256, BV]
            b_z = tl.load(p_state + 256 * NT * V + tile * 256 + o_row).to(tl.float32)
            acc = tl.dot(phi.to(b_s.dtype), b_s, acc, input_precision=PRECISION)
            acc_z += tl.sum(phi * b_z[None, :], 1)
        b_f = tl.zeros([BM], tl.float32) + scale * scale * scale * scale / UNIT
        if GATED:
            p_g += (b * (H // GROUP) + h // GROUP).to(tl.int64) * T
            b_f *= tl.exp2(tl.load(p_g + t, mask=m, other=0.0))
        b_y = b_y * den[:, None] + acc * b_f[:, None]
        den += acc_z * b_f
        b_rden = tl.where(den > 0, 1.0 / tl.where(den > 0, den, 1.0), 0.0)
        b_y *= b_rden[:, None]
    tl.store(p_out + o_y, b_y.to(p_out.dtype.element_ty), mask=m[:, None])
    if tl.program_id(2) == 0:
        tl.store(p_rden + row + t, b_rden / UNIT, mask=m)


@triton.jit(do_not_specialize=SIZES)
def quartic_bwd_dq_kernel(
    p_q, p_g, p_state, p_dout, p_rden, p_delta, p_fixed, p_y, p_dq, p_tiles, p_orders, p_chunks,
    T, C, NC, H,
    scale: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BM: tl.constexpr,
    NT: tl.constexpr, INITIAL: tl.constexpr, GATED: tl.constexpr, UNIT: tl.constexpr,
    FULL: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to y, the gradient of queries within the chunk, what comes through the state.

    The sum of x_ts dx_ts / DEG within the chunk is in p_fixed, which is completed likewise.
    """
    SIZE: tl.constexpr = 256 * NT * (V + 1)
    blocks = tl.cdiv(C, BM)
    n, h = tl.program_id(0) // blocks, tl.program_id(1)
    b, start, end, past, _, slot = chunk_bounds(p_chunks, n, T, C, NC, FULL, VARLEN)
    t0 = start + tl.program_id(0) % blocks * BM
    if t0 >= end:
        return
    row = (b * H + h).to(tl.int64) * T
    t = t0 + tl.arange(0, BM)
    m = t < end
    o_k = tl.arange(0, K)
    o_q = (row + t)[:, None] * K + o_k[None, :]
    b_dq = tl.load(p_y + o_q, mask=m[:, None], other=0.0)
    if past | INITIAL:
        p_state += (slot * (H // GROUP) + h // GROUP).to(tl.int64) * SIZE
        o_v = tl.arange(0, V)
        o_row = tl.arange(0, 256)
        p_do = p_dout + (row + t)[:, None] * V + o_v[None, :]
        b_do = tl.load(p_do, mask=m[:, None], other=0.0)  # [BM, V]
        b_delta = tl.load(p_delta + row + t, mask=m, other=0.0)
        p_x = p_q + (row + t)[:, None] * K
        acc = tl.zeros([BM, K], tl.float32)
        for tile in range(NT):
            p_tile = p_tiles + 4 * tile
            x_a, x_b = block(p_x, p_tile, m), block(p_x, p_tile + 1, m)
            x_c, x_d = block(p_x, p_tile + 2, m), block(p_x, p_tile + 3, m)
            p_s = p_state + tile * 256 * V + o_row[None, :] * V + o_v[:, None]
            b_s = tl.load(p_s)  # [V, 256]
            b_z = tl.load(p_state + 256 * NT * V + tile * 256 + o_row).to(tl.float32)
            dphi = tl.dot(b_do, b_s, input_precision=PRECISION) - b_delta[:, None] * b_z[None, :]
            dphi *= tl.load(p_orders + tile)
            acc += products_bwd(dphi, p_tile, x_a, x_b, x_c, x_d, BM, K)
        b_f = tl.load(p_rden + row + t, mask=m, other=0.0) * (scale * scale * scale * scale)
        if GATED:
            p_g += (b * (H // GROUP) + h // GROUP).to(tl.int64) * T
            b_f *= tl.exp2(tl.load(p_g + t, mask=m, other=0.0))
        acc *= b_f[:, None]
        if GATED:
            b_q = tl.load(p_q + o_q, mask=m[:, None], other=0.0).to(tl.float32)
            b_fixed = tl.load(p_fixed + row + t, mask=m, other=0.0) + tl.sum(acc * b_q, 1) / 4
            tl.store(p_fixed + row + t, b_fixed, mask=m)
        b_dq += acc
    tl.store(p_dq + o_q, b_dq.to(p_dq.dtype.element_ty), mask=m[:, None])


@triton.jit(do_not_specialize=SIZES)
def quartic_bwd_dkv_kernel(
    p_k, p_v, p_g, p_dstate, p_yk, p_yv, p_dk, p_dv, p_col, p_tiles, p_orders, p_chunks,
    T, C, NC, H,
    scale: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BM: tl.constexpr,
    NT: tl.constexpr, FINAL: tl.constexpr, GATED: tl.constexpr, UNIT: tl.constexpr,
    FULL: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to yk and yv, the gradients within the chunk, what comes through the state after it."""
    SIZE: tl.constexpr = 256 * NT * (V + 1)
    blocks = tl.cdiv(C, BM)
    n, h = tl.program_id(0) // blocks, tl.program_id(1)
    b, start, end, _, future, slot = chunk_bounds(p_chunks, n, T, C, NC, FULL, VARLEN)
    s0 = start + tl.program_id(0) % blocks * BM
    if s0 >= end:
        return
    row = (b * H + h).to(tl.int64) * T
    s = s0 + tl.arange(0, BM)
    m = s < end
    o_k = (row + s)[:, None] * K + tl.arange(0, K)[None, :]
    o_v = (row + s)[:, None] * V + tl.arange(0, V)[None, :]
    b_dk = tl.load(p_yk + o_k, mask=m[:, None], other=0.0)
    b_dv = tl.load(p_yv + o_v, mask=m[:, None], other=0.0)
    if future | FINAL:
        p_dstate += ((slot + 1) * H + h).to(tl.int64) * SIZE
        o_row = tl.arange(0, 256)
        b_v = tl.load(p_v + o_v, mask=m[:, None], other=0.0)  # [BM, V]
        p_x = p_k + (row + s)[:, None] * K
        acc_k = tl.zeros([BM, K], tl.float32)
        acc_v = tl.zeros([BM, V], tl.float32)
        for tile in range(NT):
            p_tile = p_tiles + 4 * tile
            x_a, x_b = block(p_x, p_tile, m), block(p_x, p_tile + 1, m)
            x_c, x_d = block(p_x, p_tile + 2, m), block(p_x, p_tile + 3, m)
            p_s = p_dstate + tile * 256 * V + o_row[:, None] * V + tl.arange(0, V)[None, :]
            b_s = tl.load(p_s)  # [256, V]
            b_z = tl.load(p_dstate + 256 * NT * V + tile * 256 + o_row).to(tl.float32)
            orders = tl.load(p_orders + tile)
            phi = outer(outer(x_a, x_b, BM, 4) * orders, outer(x_c, x_d, BM, 4), BM, 16)
            acc_v = tl.dot(phi.to(b_s.dtype), b_s, acc_v, input_precision=PRECISION)
            dphi = tl.dot(b_v, tl.trans(b_s), input_precision=PRECISION) + b_z[None, :]
            dphi *= orders
            acc_k += products_bwd(dphi, p_tile, x_a, x_b, x_c, x_d, BM, K)
        b_f = tl.zeros([BM], tl.float32) + scale * scale * scale * scale * UNIT
        if GATED:
            p_g += row
            b_f *= tl.exp2(tl.load(p_g + end - 1) - tl.load(p_g + s, mask=m, other=0.0))
        acc_k *= b_f[:, None]
        if GATED:
            b_k = tl.load(p_k + o_k, mask=m[:, None], other=0.0).to(tl.float32)
            b_col = tl.load(p_col + row + s, mask=m, other=0.0) + tl.sum(acc_k * b_k, 1) / 4
            tl.store(p_col + row + s, b_col, mask=m)
        b_dk += acc_k
        b_dv += acc_v * b_f[:, None]
    tl.store(p_dk + o_k, b_dk.to(p_dk.dtype.element_ty), mask=m[:, None])
    tl.store(p_dv + o_v, b_dv.to(p_dv.dtype.element_ty), mask=m[:, None])
