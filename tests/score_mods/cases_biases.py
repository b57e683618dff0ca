"""Cases of additive biases: see test_contract.py."""

import functools
import math

import torch
from transformers.models.t5.modeling_t5 import T5Attention

import score_mods as sm

H, N = 6, 300
R1 = [0.1, 0.5, 1.0, 1.5, 2.0, 3.0]
R2 = [0.01, 0.3, 0.5, 1.0, 1.5, 2.0]
generator = torch.Generator().manual_seed(1)


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


TABLE, BUCKETS, LOG_G = normal(H, 2 * N - 1), normal(H, 32), -normal(1, H, N).abs() / 10
W1, B1, W2, B2 = normal(32), normal(32), normal(H, 32), normal(H)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def t5_pair(bidirectional, buckets, distance):
    @functools.cache
    def bucket(t):
        return T5Attention._relative_position_bucket(
            torch.tensor(-t), bidirectional, buckets, distance
        ).item()

    return lambda s, h, q, k: s + BUCKETS[h].tolist()[bucket(q - k)]


def fire_pair(c, threshold):
    def psi(x):
        return math.log(abs(c * x) + 1)

    def pair(s, h, q, k):
        x = psi(q - k) / (psi(max(q, threshold)) + 1e-6)
        hidden = (W1 * x + B1).clamp(min=0)
        return s + (W2[h] @ hidden + B2[h]).item()

    return pair


def sandwich_pair(d_bar):
    """The product of two sinusoidal embeddings, their pairs of sines and cosines summed."""

    @functools.cache
    def embedding(position):
        angles = [position / 10000 ** (2 * i / d_bar) for i in range(d_bar // 2)]
        return [f(angle) for angle in angles for f in (math.sin, math.cos)]

    def pair(s, h, q, k):
        product = sum(x * y for x, y in zip(embedding(q), embedding(k), strict=True))
        return s + product / (8 * (h + 1) / H)

    return pair


def forgetting_pair(s, h, q, k):
    sign, first, last = (1, k, q) if k <= q else (-1, q, k)
    return s + sign * LOG_G[0, h, first + 1 : last + 1].sum().item()


def alibi_slope_by_rule(h, heads):
    """The rule as a recursion: the next lower power of two, then every other of its double."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return start ** (h + 1)
    lower = 2 ** math.floor(math.log2(heads))
    if h < lower:
        return alibi_slope_by_rule(h, lower)
    return alibi_slope_by_rule(2 * (h - lower), 2 * lower)


CASES = {
    "alibi": [
        (sm.alibi(H), lambda s, h, q, k: s - alibi_slope_by_rule(h, H) * abs(q - k)),
        (sm.alibi(8), lambda s, h, q, k: s - 2.0 ** -(h + 1) * abs(q - k)),
    ],
    "nape": [
        (sm.nape(H), lambda s, h, q, k: s - (abs(q - k) / (h + 1) if h < 3 else 0)),
        (sm.nape(5, "exp"), lambda s, h, q, k: s - (abs(q - k) / 2**h if h < 2 else 0)),
    ],
    "kerple_log": [
        (
            sm.kerple_log(tensor(R1), tensor(R2)),
            lambda s, h, q, k: s - R1[h] * math.log(1 + R2[h] * abs(q - k)),
        ),
        (sm.kerple_log(2.0, 0.1), lambda s, h, q, k: s - 2 * math.log(1 + 0.1 * abs(q - k))),
    ],
    "kerple_power": [
        (
            sm.kerple_power(tensor(R1), tensor(R2)),
            lambda s, h, q, k: s - R1[h] * abs(q - k) ** R2[h],
        ),
    ],
    "sandwich": [
        (sm.sandwich(H, N), sandwich_pair(128)),
        (sm.sandwich(H, N, 6), sandwich_pair(6)),
    ],
    "distance_table": [
        (sm.distance_table(TABLE), lambda s, h, q, k: s + TABLE[h].tolist()[N - 1 + q - k]),
        (
            sm.distance_table(TABLE[:1, 250:261]),
            lambda s, h, q, k: s + TABLE[0].tolist()[255 + max(-5, min(5, q - k))],
        ),
    ],
    "t5_bias": [
        (sm.t5_bias(BUCKETS), t5_pair(False, 32, 128)),
        (sm.t5_bias(BUCKETS, bidirectional=True), t5_pair(True, 32, 128)),
        (sm.t5_bias(BUCKETS[:, :20], 50, bidirectional=True), t5_pair(True, 20, 50)),
    ],
    "fire": [
        (sm.fire(W1, B1, W2, B2, c=-2.0, threshold=-20.0), fire_pair(2.0, 20)),
        (sm.fire(W1, B1, W2, B2), fire_pair(0.1, 512)),
    ],
    "forgetting_gate": [(sm.forgetting_gate(LOG_G), forgetting_pair)],
    "softcap": [
        (sm.softcap(1.5), lambda s, h, q, k: 1.5 * math.tanh(s / 1.5)),
        (sm.softcap(50), lambda s, h, q, k: 50 * math.tanh(s / 50)),
    ],
}
BOUNDED = {"sandwich", "distance_table", "t5_bias", "forgetting_gate"}
LEARNABLE = {
    "kerple_log": lambda p: sm.kerple_log(p[0] + 1, p[1] + 1),
    "kerple_power": lambda p: sm.kerple_power(p[0] + 1, p[1] + 0.5),
    "distance_table": lambda p: sm.distance_table(p[0][:, None] * torch.arange(9.0)),
    "t5_bias": lambda p: sm.t5_bias(p[0][:, None] * torch.arange(5.0), 6),
    "fire": lambda p: sm.fire(
        torch.cat([p[0], p[1]])[:2],
        torch.cat([p[1], p[0]])[:2],
        p[2][:, None] * torch.ones(2),
        p[3],
        c=p[0][:1] + 1,
        threshold=p[1][:1] + 2,
    ),
    "forgetting_gate": lambda p: sm.forgetting_gate(-p[0][None, :, None] * torch.ones(7)),
}
NEEDED = {
    "kerple_log": {"r1": 1.0, "r2": 1.0},
    "kerple_power": {"r1": 1.0, "r2": 1.0},
    "fire": {"w1": W1, "b1": B1, "w2": W2[:2], "b2": B2[:2]},
}
BAD = [
    (lambda: sm.alibi(0), ValueError, "num_heads must be at least 1"),
    (lambda: sm.alibi(2.0), TypeError, "num_heads"),
    (lambda: sm.nape(1), ValueError, "num_heads must be at least 2"),
    (lambda: sm.nape(4, "log"), ValueError, 'slopes must be "linear" or "exp"'),
    (lambda: sm.kerple_log(0.0, 1.0), ValueError, "r1 must be a positive number"),
    (lambda: sm.kerple_log(1.0, torch.ones(2, 2)), ValueError, "r2 must have shape"),
    (lambda: sm.kerple_power(1.0, 2.5), ValueError, "r2 must be at most 2"),
    (lambda: sm.kerple_power("1", 1.0), TypeError, "r1"),
    (lambda: sm.sandwich(0, 4), ValueError, "num_heads"),
    (lambda: sm.sandwich(4, 4.0), TypeError, "max_length"),
    (lambda: sm.distance_table([1.0]), TypeError, "table must be a floating tensor, got list"),
    (lambda: sm.distance_table(torch.ones(3)), ValueError, "table must have shape"),
    (lambda: sm.distance_table(torch.ones(2, 4)), ValueError, "odd number of columns"),
    (lambda: sm.t5_bias(torch.ones(2, 32), 16), ValueError, "max_distance must be at least 17"),
    (lambda: sm.t5_bias(torch.ones(2, 5), bidirectional=True), ValueError, "num_buckets"),
    (lambda: sm.fire(W1, B1[:3], W2, B2), ValueError, "w1, b1, w2 and b2 must have shapes"),
    (lambda: sm.fire(W1, B1, W2[0], B2), ValueError, r"w2 must have shape \(H, W\)"),
    (lambda: sm.fire(W1, 3.0, W2, B2), TypeError, "b1 must be a floating tensor"),
    (lambda: sm.fire(W1, B1, W2, B2, eps=0.0), ValueError, "eps"),
    (lambda: sm.fire(W1, B1, W2, B2, eps=torch.ones(3)), TypeError, "eps must be a positive num"),
    (lambda: sm.t5_buckets(32, 128, "no"), TypeError, "bidirectional must be a bool, got str"),
    (lambda: sm.softcap(5.0, approx="no"), TypeError, "approx must be a bool, got str"),
    (lambda: sm.forgetting_gate(torch.ones(2, 3)), ValueError, "log_g must have shape"),
    (lambda: sm.forgetting_gate(torch.ones(1, 1, 3)), ValueError, "log_g must be <= 0 .* got 1$"),
    (lambda: sm.forgetting_gate(torch.zeros(1, 1, 3).log()), ValueError, "log_g .* got -inf$"),
    (lambda: sm.forgetting_gate(torch.ones(1, 2, 3, dtype=int)), TypeError, "log_g"),
    (lambda: sm.softcap(0), ValueError, "cap must be a positive number"),
    (lambda: sm.softcap(torch.ones(3)), TypeError, "cap must be a positive number, got Tensor"),
]
