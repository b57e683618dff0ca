# mypy: disable-error-code="no-untyped-def"
"""The gradients of queries, keys and values: a kernel each, over rows, their chunk and the state.

With x_ts = scale q_t . k_s, decay d_ts = 2^(g_t - g_s) and 1 / den_t = rden_t,

    dv_s = sum_t x_ts^DEG d_ts rden_t dout_t
    dx_ts = DEG x_ts^(DEG - 1) d_ts rden_t (dout_t . v_s - delta_t),   delta_t = out_t . dout_t,

and likewise through the state, with products of channels in the place of x^2. There is no atomic
addition, and no accumulator is transposed, which Triton before 3.7.1 gets wrong on Hopper: where
keys are the rows, scores are computed again, the other way round.
"""

import triton
import triton.language as tl

from power.kernels.forward import power
from power.kernels.tiles import SIZES, chunk_bounds, mirrored, tile_blocks


@triton.jit
def derivative(x, DEG: tl.constexpr):
    """Return x ** (DEG - 1) for even DEG."""
    w = x
    for _ in tl.static_range(DEG // 2 - 1):
        w = w * (x * x)
    return w


@triton.jit
def query_block(t0, step, steps, kv_head, T, BN: tl.constexpr, GROUP: tl.constexpr):
    """Return the queries of a step, and where their head begins; a head has `steps` of them."""
    if GROUP == 1:
        head, block = kv_head, step
    else:
        head, block = kv_head * GROUP + step // steps, step % steps
    return t0 + block * BN + tl.arange(0, BN), head.to(tl.int64) * T


@triton.jit(do_not_specialize=SIZES)
def attention_bwd_dq_kernel(
    p_q, p_k, p_v, p_g, p_state, p_dout, p_rden, p_delta, p_dq, p_chunks, T, C, NC, H,
    scale: tl.constexpr, GROUP: tl.constexpr, DEG: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, BI: tl.constexpr,
    STATE: tl.constexpr, INITIAL: tl.constexpr, GATED: tl.constexpr, UNIT: tl.constexpr,
    FULL: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq_t = scale sum_s dx_ts k_s for BM queries; the state gives sum_i q_ti S_i dout_t.

    Weights being normalised, sum_s x_ts dx_ts is zero but for the rounding of out_t in delta_t,
    which is taken out of that here: in the gates' gradients it would add up.
    """
    NB: tl.constexpr = K // 16
    NT: tl.constexpr = NB * (NB + 1) // 2
    SIZE: tl.constexpr = 256 * NT * V + K * K
    blocks = tl.cdiv(C, BM)
    n, h = tl.program_id(0) // blocks, tl.program_id(1)
    b, start, end, past, _, slot = chunk_bounds(p_chunks, n, T, C, NC, FULL, VARLEN)
    t0 = start + tl.program_id(0) % blocks * BM
    if t0 >= end:
        return
    hk = h // GROUP
    kv = (b * (H // GROUP) + hk).to(tl.int64) * T
    row = (b * H + h).to(tl.int64) * T
    t = t0 + tl.arange(0, BM)
    m = t < end
    o_k = tl.arange(0, K)
    o_v = tl.arange(0, V)
    o_n = tl.arange(0, BN)
    p_q += row * K
    p_k += kv * K
    p_v += kv * V
    acc = tl.zeros([BM, K], tl.float32)
    b_q = tl.load(p_q + t[:, None] * K + o_k[None, :], mask=m[:, None], other=0.0)
    b_do = tl.load(p_dout + row * V + t[:, None] * V + o_v[None, :], mask=m[:, None], other=0.0)
    b_delta = tl.load(p_delta + row + t, mask=m, other=0.0)
    b_rden = tl.load(p_rden + row + t, mask=m, other=0.0)
    b_row = tl.zeros([BM], tl.float32)
    g_ref = 0.0
    if GATED:
        p_g += kv
        if t0 > start:
            g_ref = tl.load(p_g + t0 - 1)

    if STATE:  # noqa: SIM102
        if past | INITIAL:
            p_state += (slot * (H // GROUP) + hk).to(tl.int64) * SIZE
            o_iv = tl.arange(0, BI * V)
            p_qi = p_q + t[:, None] * K + tl.arange(0, BI)[None, :]
            for i0 in range(0, K, BI):
                b_qi = tl.load(p_qi + i0, mask=m[:, None], other=0.0)  # [BM, BI]
                b_s = tl.load(
                    p_state + mirrored(i0, o_iv[None, :], o_k[:, None], NB, V)
                )  # [K, BI V]
                b_x = tl.reshape(b_qi[:, :, None] * b_do[:, None, :], [BM, BI * V])
                acc = tl.dot(b_x, tl.trans(b_s), acc, input_precision=PRECISION)
            b_z = tl.load(p_state + 256 * NT * V + o_k[:, None] * K + o_k[None, :])
            acc -= b_delta[:, None] * tl.dot(b_q, b_z, input_precision=PRECISION)
            acc *= tl.exp2(g_ref) * scale / UNIT
            if GATED:
                b_row += scale * tl.sum(acc * b_q, 1)

    for s0 in tl.range(start, t0, BN, num_stages=STAGES):
        s = s0 + o_n
        b_k = tl.load(p_k + s[:, None] * K + o_k[None, :])  # [BN, K]
        b_v = tl.load(p_v + s[None, :] * V + o_v[:, None])  # [V, BN]
        b_x = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale  # [BM, BN]
        b_dx = tl.dot(b_do, b_v, input_precision=PRECISION) - b_delta[:, None]
        b_dx *= derivative(b_x, DEG)
        if GATED:
            b_dx *= tl.exp2(g_ref - tl.load(p_g + s))[None, :]
            b_row += tl.sum(b_x * b_dx, 1)
        acc = tl.dot(b_dx.to(b_k.dtype), b_k, acc, input_precision=PRECISION)
    if GATED:
        b_gt = tl.load(p_g + t, mask=m, other=0.0)
        b_r = tl.exp2(tl.minimum(b_gt - g_ref, 0.0))
        b_row *= b_r
        acc *= b_r[:, None]
    for s0 in range(t0, min(t0 + BM, end), BN):
        s = s0 + o_n
        b_k = tl.load(p_k + s[:, None] * K + o_k[None, :], mask=(s < end)[:, None], other=0.0)
        b_v = tl.load(p_v + s[None, :] * V + o_v[:, None], mask=(s < end)[None, :], other=0.0)
        b_x = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
        b_dx = tl.dot(b_do, b_v, input_precision=PRECISION) - b_delta[:, None]
        b_dx = tl.where(t[:, None] >= s[None, :], b_dx * derivative(b_x, DEG), 0.0)
        if GATED:
            b_gs = tl.load(p_g + s, mask=s < end, other=0.0)
            b_dx *= tl.exp2(tl.minimum(b_gt[:, None] - b_gs[None, :], 0.0))
            b_row += tl.sum(b_x * b_dx, 1)
        acc = tl.dot(b_dx.to(b_k.dtype), b_k, acc, input_precision=PRECISION)

    b_rden *= UNIT
    if GATED:
        tl.store(p_delta + row + t, b_delta + b_row * b_rden, mask=m)
    acc *= (DEG * scale * b_rden)[:, None]
    tl.store(
        p_dq + row * K + t[:, None] * K + o_k[None, :],
        acc.to(p_dq.dtype.element_ty),
        mask=m[:, None],
    )


@triton.jit(do_not_specialize=SIZES)
def attention_bwd_dk_kernel(
    p_q, p_k, p_v, p_g, p_dstate, p_dout, p_w, p_delta, p_dk, p_col, p_chunks, T, C, NC, H,
    scale: tl.constexpr, GROUP: tl.constexpr, DEG: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, BI: tl.constexpr,
    STATE: tl.constexpr, FINAL: tl.constexpr, GATED: tl.constexpr, UNIT: tl.constexpr,
    FULL: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk_s = scale sum_t dx_ts q_t and col_s = sum_t x_ts dx_ts / DEG; H counts key heads."""
    NB: tl.constexpr = K // 16
    NT: tl.constexpr = NB * (NB + 1) // 2
    SIZE: tl.constexpr = 256 * NT * V + K * K
    blocks = tl.cdiv(C, BM)
    n, h = tl.program_id(0) // blocks, tl.program_id(1)
    b, start, end, _, future, slot = chunk_bounds(p_chunks, n, T, C, NC, FULL, VARLEN)
    s0 = start + tl.program_id(0) % blocks * BM
    if s0 >= end:
        return
    s1 = min(s0 + BM, end)
    kv = (b * H + h).to(tl.int64) * T
    s = s0 + tl.arange(0, BM)
    m = s < end
    o_k = tl.arange(0, K)
    o_v = tl.arange(0, V)
    p_k += kv * K + s[:, None] * K
    acc = tl.zeros([BM, K], tl.float32)
    b_col = tl.zeros([BM], tl.float32)
    b_k = tl.load(p_k + o_k[None, :], mask=m[:, None], other=0.0)
    b_v = tl.load(p_v + kv * V + s[:, None] * V + o_v[None, :], mask=m[:, None], other=0.0)
    g_ref = 0.0
    if GATED:
        p_g += kv
        g_ref = tl.load(p_g + s1 - 1)

    if STATE:  # noqa: SIM102
        if future | FINAL:
            p_dstate += ((slot + 1) * H + h).to(tl.int64) * SIZE
            o_iv = tl.arange(0, BI * V)
            p_ki = p_k + tl.arange(0, BI)[None, :]
            for i0 in range(0, K, BI):
                b_ki = tl.load(p_ki + i0, mask=m[:, None], other=0.0)  # [BM, BI]
                b_s = tl.load(
                    p_dstate + mirrored(i0, o_iv[None, :], o_k[:, None], NB, V)
                )  # [K, BI V]
                b_x = tl.reshape(b_ki[:, :, None] * b_v[:, None, :], [BM, BI * V])
                acc = tl.dot(b_x, tl.trans(b_s), acc, input_precision=PRECISION)
            b_z = tl.load(p_dstate + 256 * NT * V + o_k[:, None] * K + o_k[None, :])
            acc = tl.dot(b_k, b_z, acc, input_precision=PRECISION)
            acc *= scale
            if GATED:
                acc *= tl.exp2(tl.load(p_g + end - 1) - g_ref)
                b_col += scale * tl.sum(acc * b_k, 1)

    full = (end - s1) // BN
    for step in tl.range(GROUP * full, num_stages=STAGES):
        t, row = query_block(s1, step, full, b * H + h, T, BN, GROUP)
        b_q = tl.load(p_q + row * K + t[:, None] * K + o_k[None, :])  # [BN, K]
        b_do = tl.load(p_dout + row * V + t[None, :] * V + o_v[:, None])  # [V, BN]
        b_f = tl.exp2(tl.load(p_w + row + t) - g_ref)
        b_delta = tl.load(p_delta + row + t)
        b_x = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * scale  # [BM, BN]
        b_dx = tl.dot(b_v, b_do, input_precision=PRECISION) - b_delta[None, :]
        b_dx *= derivative(b_x, DEG) * b_f[None, :]
        if GATED:
            b_col += tl.sum(b_x * b_dx, 1)
        acc = tl.dot(b_dx.to(b_q.dtype), b_q, acc, input_precision=PRECISION)
    b_gs = tl.zeros([BM], tl.float32)
    if GATED:
        b_gs = tl.load(p_g + s, mask=m, other=0.0)
        b_r = tl.exp2(tl.minimum(g_ref - b_gs, 0.0))
        b_col *= b_r
        acc *= b_r[:, None]
    own = tl.cdiv(s1 - s0, BN)  # the block's own queries, then the last few of the chunk
    part = own + ((end - s1) % BN > 0).to(tl.int32)
    for step in range(GROUP * part):
        i = step % part
        t, row = query_block(
            tl.where(i < own, s0 + i * BN, s1 + full * BN),
            step // part,
            1,
            b * H + h,
            T,
            BN,
            GROUP,
        )
        mt = t < end
        b_q = tl.load(p_q + row * K + t[:, None] * K + o_k[None, :], mask=mt[:, None], other=0.0)
        b_do = tl.load(
            p_dout + row * V + t[None, :] * V + o_v[:, None], mask=mt[None, :], other=0.0
        )
        b_w = tl.load(p_w + row + t, mask=mt, other=float("-inf"))
        b_delta = tl.load(p_delta + row + t, mask=mt, other=0.0)
        b_x = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * scale
        b_dx = tl.dot(b_v, b_do, input_precision=PRECISION) - b_delta[None, :]
        b_dx *= derivative(b_x, DEG) * tl.exp2(b_w[None, :] - b_gs[:, None])
        b_dx = tl.where(t[None, :] >= s[:, None], b_dx, 0.0)
        if GATED:
            b_col += tl.sum(b_x * b_dx, 1)
        acc = tl.dot(b_dx.to(b_q.dtype), b_q, acc, input_precision=PRECISION)

    if GATED:
        tl.store(p_col + kv + s, b_col * UNIT, mask=m)
    acc *= DEG * scale * UNIT
    tl.store(
        p_dk + kv * K + s[:, None] * K + o_k[None, :],
        acc.to(p_dk.dtype.element_ty),
        mask=m[:, None],
    )


@triton.jit(do_not_specialize=SIZES)
def attention_bwd_dv_kernel(
    p_q, p_k, p_g, p_dstate, p_dout, p_w, p_dv, p_chunks, T, C, NC, H,
    scale: tl.constexpr, GROUP: tl.constexpr, DEG: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    STATE: tl.constexpr, FINAL: tl.constexpr, GATED: tl.constexpr, UNIT: tl.constexpr,
    FULL: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dv_s for BM keys; the mirror image of the forward kernel. H counts key heads."""
    NB: tl.constexpr = K // 16
    NT: tl.constexpr = NB * (NB + 1) // 2
    SIZE: tl.constexpr = 256 * NT * V + K * K
    blocks = tl.cdiv(C, BM)
    n, h = tl.program_id(0) // blocks, tl.program_id(1)
    b, start, end, _, future, slot = chunk_bounds(p_chunks, n, T, C, NC, FULL, VARLEN)
    s0 = start + tl.program_id(0) % blocks * BM
    if s0 >= end:
        return
    s1 = min(s0 + BM, end)
    kv = (b * H + h).to(tl.int64) * T
    s = s0 + tl.arange(0, BM)
    m = s < end
    o_k = tl.arange(0, K)
    o_v = tl.program_id(2) * BV + tl.arange(0, BV)
    p_k += kv * K + s[:, None] * K
    acc = tl.zeros([BM, BV], tl.float32)
    b_k = tl.load(p_k + o_k[None, :], mask=m[:, None], other=0.0)
    g_ref = 0.0
    if GATED:
        p_g += kv
        g_ref = tl.load(p_g + s1 - 1)

    if STATE:  # noqa: SIM102
        if future | FINAL:
            o_i = tl.arange(0, 16)
            p_tile = (
                p_dstate
                + ((slot + 1) * H + h).to(tl.int64) * SIZE
                + tl.arange(0, 256)[:, None] * V
                + o_v[None, :]
            )
            for i_tile in range(NT):
                i_a, i_b = tile_blocks(i_tile, NB)
                b_ka = tl.load(
                    p_k + i_a * 16 + o_i[None, :], mask=m[:, None], other=0.0
                )  # [BM, 16]
                b_kb = tl.load(
                    p_k + i_b * 16 + o_i[None, :], mask=m[:, None], other=0.0
                )  # [BM, 16]
                b_ka *= tl.where(i_a == i_b, 1.0, 2.0).to(b_ka.dtype)
                b_s = tl.load(p_tile + i_tile * 256 * V)  # [256, BV]
                b_phi = tl.reshape(b_ka[:, :, None] * b_kb[:, None, :], [BM, 256])
                acc = tl.dot(b_phi, b_s, acc, input_precision=PRECISION)
            acc *= power(scale, DEG)
            if GATED:
                acc *= tl.exp2(tl.load(p_g + end - 1) - g_ref)

    full = (end - s1) // BN
    for step in tl.range(GROUP * full, num_stages=STAGES):
        t, row = query_block(s1, step, full, b * H + h, T, BN, GROUP)
        b_q = tl.load(p_q + row * K + t[None, :] * K + o_k[:, None])  # [K, BN]
        b_do = tl.load(p_dout + row * V + t[:, None] * V + o_v[None, :])  # [BN, BV]
        b_f = tl.exp2(tl.load(p_w + row + t) - g_ref)
        b_w = (
            power(tl.dot(b_k, b_q, input_precision=PRECISION) * scale, DEG) * b_f[None, :]
        )  # [BM, BN]
        acc = tl.dot(b_w.to(b_do.dtype), b_do, acc, input_precision=PRECISION)
    b_gs = tl.zeros([BM], tl.float32)
    if GATED:
        b_gs = tl.load(p_g + s, mask=m, other=0.0)
        acc *= tl.exp2(tl.minimum(g_ref - b_gs, 0.0))[:, None]
    own = tl.cdiv(s1 - s0, BN)
    part = own + ((end - s1) % BN > 0).to(tl.int32)
    for step in range(GROUP * part):
        i = step % part
        t, row = query_block(
            tl.where(i < own, s0 + i * BN, s1 + full * BN),
            step // part,
            1,
            b * H + h,
            T,
            BN,
            GROUP,
        )
        mt = t < end
        b_q = tl.load(p_q + row * K + t[None, :] * K + o_k[:, None], mask=mt[None, :], other=0.0)
        b_do = tl.load(
            p_dout + row * V + t[:, None] * V + o_v[None, :], mask=mt[:, None], other=0.0
        )
        b_w = tl.load(p_w + row + t, mask=mt, other=float("-inf"))
        b_w = tl.exp2(b_w[None, :] - b_gs[:, None])
        b_w *= power(tl.dot(b_k, b_q, input_precision=PRECISION) * scale, DEG)
        b_w = tl.where(t[None, :] >= s[:, None], b_w, 0.0)
        acc = tl.dot(b_w.to(b_do.dtype), b_do, acc, input_precision=PRECISION)

    acc *= UNIT
    tl.store(
        p_dv + kv * V + s[:, None] * V + o_v[None, :],
        acc.to(p_dv.dtype.element_ty),
        mask=m[:, None],
    )
