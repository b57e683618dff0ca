# mypy: disable-error-code="no-untyped-def"
"""One decoded token: the state is read once, and written once where the open chunk is full.

Rows of the state are products of channels by a table, so any even degree is taken.
"""

import triton
import triton.language as tl

from power.kernels.forward import power


@triton.jit
def products(p_x, p_index, rows, mask, D: tl.constexpr, DEG: tl.constexpr):
    """Return the products of the channels that `rows` of the index table name, in fp32."""
    out = tl.load(p_x + tl.load(p_index + rows, mask=mask, other=0)).to(tl.float32)
    for m in tl.static_range(1, DEG):
        out *= tl.load(p_x + tl.load(p_index + m * D + rows, mask=mask, other=0)).to(tl.float32)
    return out


@triton.jit
def step_state_kernel(
    p_q, p_k, p_v, p_log_g, p_s, p_z, p_open_k, p_open_v, p_open_g, p_filled, p_index, p_weight,
    p_part, t, n, H,
    GROUP: tl.constexpr, DEG: tl.constexpr, D: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write phi(q) s and phi(q) z over BD rows; fold the open chunk in if token t fills it."""
    SPLITS: tl.constexpr = (D + BD - 1) // BD
    split, bh = tl.program_id(0) % SPLITS, (tl.program_id(0) // SPLITS).to(tl.int64)
    rows = split * BD + tl.arange(0, BD)
    m = rows < D
    o_v = tl.arange(0, V)
    p_s += (bh * D + rows[:, None]) * V + o_v[None, :]
    p_z += bh * D + rows
    b_s = tl.load(p_s, mask=m[:, None], other=0.0)  # [BD, V]
    b_z = tl.load(p_z, mask=m, other=0.0)
    b_w = tl.load(p_weight + rows, mask=m, other=0.0)
    for r in tl.static_range(GROUP):
        head = bh * GROUP + r
        b_phi = b_w * products(p_q + (head * n + t) * K, p_index, rows, m, D, DEG)
        p_out = p_part + (head * SPLITS + split) * (V + 1)
        tl.store(p_out + o_v, tl.sum(b_phi[:, None] * b_s, 0))
        tl.store(p_out + V, tl.sum(b_phi * b_z, 0))

    filled = tl.load(p_filled + bh // H)
    if filled == C - 1:
        o_c = tl.arange(0, BC)
        total = 0.0
        if p_log_g is not None:
            total += tl.load(p_log_g + bh * n + t).to(tl.float32)
        for c0 in range(0, C, BC):
            c = c0 + o_c
            total += tl.sum(
                tl.load(p_open_g + bh * C + c, mask=c < C - 1, other=0.0).to(tl.float32), 0
            )
        b_s *= tl.exp(total)
        b_z *= tl.exp(total)
        done = 0.0
        for c0 in range(0, C, BC):
            c = c0 + o_c
            b_g = tl.load(p_open_g + bh * C + c, mask=c < C - 1, other=0.0).to(tl.float32)
            b_f = tl.where(c < C - 1, tl.exp(total - done - tl.cumsum(b_g, 0)), 0.0)
            done += tl.sum(b_g, 0)
            b_f = tl.where(c == C - 1, 1.0, b_f)
            last, mc = c == C - 1, c < C - 1
            b_x = tl.zeros([BD, BC], tl.float32) + b_w[:, None] * b_f[None, :]
            for d in tl.static_range(DEG):
                i = tl.load(p_index + d * D + rows, mask=m, other=0)[:, None]
                b_k = tl.load(
                    p_open_k + (bh * C + c[None, :]) * K + i, mask=mc[None, :], other=0.0
                )
                b_new = tl.load(p_k + (bh * n + t) * K + i)
                b_x *= tl.where(last[None, :], b_new, b_k).to(tl.float32)
            b_v = tl.load(
                p_open_v + (bh * C + c[:, None]) * V + o_v[None, :], mask=mc[:, None], other=0.0
            )
            b_new = tl.load(p_v + (bh * n + t) * V + o_v)[None, :]
            b_v = tl.where(last[:, None], b_new, b_v).to(tl.float32)
            b_s = tl.dot(b_x, b_v, b_s, input_precision=PRECISION)
            b_z += tl.sum(b_x, 1)
        tl.store(p_s, b_s, mask=m[:, None])
        tl.store(p_z, b_z, mask=m)


@triton.jit
def step_out_kernel(
    p_q, p_k, p_v, p_log_g, p_open_k, p_open_v, p_open_g, p_filled, p_part, p_out, scale, t, n, H,
    SPLITS,
    GROUP: tl.constexpr, DEG: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Write the output of token t of a query head, and put the token into the open chunk."""
    head = tl.program_id(0).to(tl.int64)
    bh = head // GROUP
    filled = tl.load(p_filled + bh // H)
    o_k = tl.arange(0, K)
    o_v = tl.arange(0, V)
    c = tl.arange(0, BC)
    m = c < filled
    b_q = tl.load(p_q + (head * n + t) * K + o_k).to(tl.float32) * scale
    b_k = tl.load(p_k + (bh * n + t) * K + o_k)
    b_v = tl.load(p_v + (bh * n + t) * V + o_v)
    b_ks = tl.load(p_open_k + (bh * C + c[:, None]) * K + o_k[None, :], mask=m[:, None], other=0.0)
    b_vs = tl.load(p_open_v + (bh * C + c[:, None]) * V + o_v[None, :], mask=m[:, None], other=0.0)
    b_g = tl.load(p_open_g + bh * C + c, mask=m, other=0.0).to(tl.float32)
    g = 0.0
    if p_log_g is not None:
        g += tl.load(p_log_g + bh * n + t).to(tl.float32)
    total = tl.sum(b_g, 0) + g
    b_w = power(tl.sum(b_ks.to(tl.float32) * b_q[None, :], 1), DEG) * tl.exp(
        total - tl.cumsum(b_g, 0)
    )
    b_w = tl.where(m, b_w, 0.0)
    w = power(tl.sum(b_k.to(tl.float32) * b_q, 0), DEG)
    den = tl.sum(b_w, 0) + w
    num = tl.sum(b_w[:, None] * b_vs.to(tl.float32), 0) + w * b_v.to(tl.float32)
    past_den = 0.0
    past_num = tl.zeros([V], tl.float32)
    for s0 in range(0, SPLITS, BS):
        o_s = s0 + tl.arange(0, BS)
        p = p_part + (head * SPLITS + o_s) * (V + 1)
        past_num += tl.sum(
            tl.load(p[:, None] + o_v[None, :], mask=(o_s < SPLITS)[:, None], other=0.0), 0
        )
        past_den += tl.sum(tl.load(p + V, mask=o_s < SPLITS, other=0.0), 0)
    past_scale = tl.exp(total) * power(scale, DEG)
    den += past_scale * past_den
    num += past_scale * past_num
    num = tl.where(den > 0, num / tl.where(den > 0, den, 1.0), 0.0)
    tl.store(p_out + (head * n + t) * V + o_v, num.to(p_out.dtype.element_ty))
    if head % GROUP == 0:
        slot = bh * C + filled
        tl.store(p_open_k + slot * K + o_k, b_k)
        tl.store(p_open_v + slot * V + o_v, b_v)
        tl.store(p_open_g + slot, g)
