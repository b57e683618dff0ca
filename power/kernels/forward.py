# mypy: disable-error-code="no-untyped-def"
"""The output kernel: what the state holds, then the chunk, divided by the sum of the weights."""

import triton
import triton.language as tl

from power.kernels.tiles import SIZES, chunk_bounds, tile_blocks


@triton.jit
def power(s, DEG: tl.constexpr):
    """Return s ** DEG for even DEG."""
    s2 = s * s
    w = s2
    for _ in tl.static_range(DEG // 2 - 1):
        w = w * s2
    return w


@triton.jit(do_not_specialize=SIZES)
def attention_fwd_kernel(
    p_q, p_k, p_v, p_g, p_state, p_out, p_rden, p_chunks, T, C, NC, H,
    scale: tl.constexpr, GROUP: tl.constexpr, DEG: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    STATE: tl.constexpr, INITIAL: tl.constexpr, GATED: tl.constexpr, UNIT: tl.constexpr,
    FULL: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out_t = sum_s w_ts v_s / sum_s w_ts, w_ts = (scale q_t . k_s)^DEG 2^(g_t - g_s), BM queries.

    Everything before the block is summed with its gates up to the block's start; the factor from
    there to each query multiplies its row once.
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
    o_v = tl.program_id(2) * BV + tl.arange(0, BV)
    o_n = tl.arange(0, BN)
    p_q += row * K
    p_k += kv * K
    p_v += kv * V + o_v[None, :]
    acc = tl.zeros([BM, BV], tl.float32)
    den = tl.zeros([BM], tl.float32)
    b_q = tl.load(p_q + t[:, None] * K + o_k[None, :], mask=m[:, None], other=0.0)
    g_ref = 0.0
    if GATED:
        p_g += kv
        if t0 > start:
            g_ref = tl.load(p_g + t0 - 1)

    if STATE:  # noqa: SIM102
        if past | INITIAL:
            p_state += (slot * (H // GROUP) + hk).to(tl.int64) * SIZE
            o_i = tl.arange(0, 16)
            o_row = tl.arange(0, 256)
            p_qt = p_q + t[:, None] * K + o_i[None, :]
            p_tile = p_state + o_row[:, None] * V + o_v[None, :]
            for i_tile in range(NT):
                i_a, i_b = tile_blocks(i_tile, NB)
                b_qa = tl.load(p_qt + i_a * 16, mask=m[:, None], other=0.0)  # [BM, 16]
                b_qb = tl.load(p_qt + i_b * 16, mask=m[:, None], other=0.0)  # [BM, 16]
                b_qa *= tl.where(i_a == i_b, 1.0, 2.0).to(b_qa.dtype)
                b_s = tl.load(p_tile + i_tile * 256 * V)  # [256, BV]
                b_phi = tl.reshape(b_qa[:, :, None] * b_qb[:, None, :], [BM, 256])
                acc = tl.dot(b_phi, b_s, acc, input_precision=PRECISION)
            b_z = tl.load(p_state + 256 * NT * V + o_k[:, None] * K + o_k[None, :])
            b_qz = tl.dot(b_q, b_z, input_precision=PRECISION)
            past_scale = tl.exp2(g_ref) * power(scale, DEG) / UNIT
            acc *= past_scale
            den += tl.sum(b_qz * b_q.to(tl.float32), 1) * past_scale

    for s0 in tl.range(start, t0, BN, num_stages=STAGES):
        s = s0 + o_n
        b_k = tl.load(p_k + s[None, :] * K + o_k[:, None])  # [K, BN]
        b_v = tl.load(p_v + s[:, None] * V)  # [BN, BV]
        b_w = power(tl.dot(b_q, b_k, input_precision=PRECISION) * scale, DEG)  # [BM, BN]
        if GATED:
            b_w *= tl.exp2(g_ref - tl.load(p_g + s))[None, :]
        den += tl.sum(b_w, 1)
        acc = tl.dot(b_w.to(b_v.dtype), b_v, acc, input_precision=PRECISION)
    if GATED:
        b_gt = tl.load(p_g + t, mask=m, other=0.0)
        b_r = tl.exp2(tl.minimum(b_gt - g_ref, 0.0))
        acc *= b_r[:, None]
        den *= b_r
    for s0 in range(t0, min(t0 + BM, end), BN):
        s = s0 + o_n
        b_k = tl.load(p_k + s[None, :] * K + o_k[:, None], mask=(s < end)[None, :], other=0.0)
        b_v = tl.load(p_v + s[:, None] * V, mask=(s < end)[:, None], other=0.0)
        b_w = power(tl.dot(b_q, b_k, input_precision=PRECISION) * scale, DEG)
        if GATED:
            b_gs = tl.load(p_g + s, mask=s < end, other=0.0)
            b_w *= tl.exp2(tl.minimum(b_gt[:, None] - b_gs[None, :], 0.0))
        b_w = tl.where(t[:, None] >= s[None, :], b_w, 0.0)
        den += tl.sum(b_w, 1)
        acc = tl.dot(b_w.to(b_v.dtype), b_v, acc, input_precision=PRECISION)

    b_rden = tl.where(den > 0, 1.0 / tl.where(den > 0, den, 1.0), 0.0)
    p_out += row * V + t[:, None] * V + o_v[None, :]
    tl.store(p_out, (acc * b_rden[:, None]).to(p_out.dtype.element_ty), mask=m[:, None])
    if tl.program_id(2) == 0:
        tl.store(p_rden + row + t, b_rden / UNIT, mask=m)
