"""Cases of row temperatures: see test_contract.py."""

import math

import torch

import score_mods as sm

S = [0.2, 0.5, 1.0, 1.5, 2.0, 4.0]

CASES = {
    "logn": [
        (sm.logn(), lambda s, h, q, k: s * math.log(q + 1)),
        (sm.logn(s=0.4), lambda s, h, q, k: 0.4 * s * math.log(q + 1)),
        (sm.logn(50), lambda s, h, q, k: s * (math.log(q + 1, 50) if q + 1 > 50 else 1)),
    ],
    "ssmax": [
        (sm.ssmax(0.43), lambda s, h, q, k: s * 0.43 * math.log(q + 1)),
        (
            sm.ssmax(torch.tensor(S, dtype=torch.float64), b=2.0),
            lambda s, h, q, k: s * (S[h] * math.log(q + 1) + 2.0),
        ),
    ],
    "infoscale": [
        (
            sm.infoscale(512, 64),
            lambda s, h, q, k: s * ((1 - (q + 1) ** (-1 / 32)) / (1 - 512 ** (-1 / 32))) ** 0.5,
        ),
    ],
    "llama4_temperature": [
        (
            sm.llama4_temperature(0.3, 7),
            lambda s, h, q, k: s * (1 + 0.3 * math.log(1 + (q + 1) // 7)),
        ),
        (
            sm.llama4_temperature(),
            lambda s, h, q, k: s * (1 + 0.1 * math.log(1 + (q + 1) // 8192)),
        ),
    ],
    "ministral_temperature": [
        (
            sm.ministral_temperature(torch.tensor(S, dtype=torch.float64), 7),
            lambda s, h, q, k: s * (1 + S[h] * math.log(1 + q // 7)),
        ),
        (
            sm.ministral_temperature(),
            lambda s, h, q, k: s * (1 + 0.1 * math.log(1 + q // 16384)),
        ),
    ],
    "asentmax_scale": [
        (
            sm.asentmax_scale(0.7, -1.3, 0.4),
            lambda s, h, q, k: s * (0.4 + 0.7 * math.log(q + 2) ** -1.3),
        ),
        (
            sm.asentmax_scale(0.3, torch.tensor(S, dtype=torch.float64)),
            lambda s, h, q, k: s * (1 + 0.3 * math.log(q + 2) ** S[h]),
        ),
    ],
    "power_law_temperature": [
        (sm.power_law_temperature(2 / 63), lambda s, h, q, k: s * (q + 1) ** (2 / 63)),
        (sm.power_law_temperature(0.25, 0.3), lambda s, h, q, k: s * 0.3 * (q + 1) ** 0.25),
    ],
    "log_power_temperature": [
        (sm.log_power_temperature(), lambda s, h, q, k: s * math.log(q + 1)),
        (sm.log_power_temperature(0.5, 2.0), lambda s, h, q, k: 2 * s * math.log(q + 1) ** 0.5),
    ],
    "yarn_temperature": [
        (sm.yarn_temperature(32), lambda s, h, q, k: s * (math.log(32) / 10 + 1) ** 2),
    ],
}
LEARNABLE = {
    "logn": lambda p: sm.logn(5, s=p[0] + 1),
    "ssmax": lambda p: sm.ssmax(p[0] + 1, p[1]),
    "llama4_temperature": lambda p: sm.llama4_temperature(p[0], 2),
    "ministral_temperature": lambda p: sm.ministral_temperature(p[0], 2),
    "asentmax_scale": lambda p: sm.asentmax_scale(p[0], p[1], p[2]),
    "power_law_temperature": lambda p: sm.power_law_temperature(0.5, p[0]),
    "log_power_temperature": lambda p: sm.log_power_temperature(2.0, p[0]),
}
NEEDED = {
    "ssmax": {"s": 1.0},
    "asentmax_scale": {"beta": 1.0},
    "power_law_temperature": {"exponent": 0.5},
}
BAD = [
    (lambda: sm.logn(1), ValueError, "train_length"),
    (lambda: sm.logn(torch.tensor([3.0, 4.0])), ValueError, "train_length"),
    (lambda: sm.ssmax(None), TypeError, "s must be"),
    (lambda: sm.infoscale(1, 64), ValueError, "train_length must be a number above 1"),
    (lambda: sm.infoscale(512, 64.0), TypeError, "head_dim"),
    (lambda: sm.llama4_temperature("0.1"), TypeError, "scale"),
    (lambda: sm.llama4_temperature(0.1, 0), ValueError, "interval"),
    (lambda: sm.ministral_temperature(train_length=0.5), TypeError, "train_length"),
    (lambda: sm.asentmax_scale(1.0, gamma=torch.ones(2, 2)), ValueError, "gamma"),
    (lambda: sm.power_law_temperature(0), ValueError, "exponent"),
    (lambda: sm.log_power_temperature(-1.0), ValueError, "exponent"),
    (lambda: sm.yarn_temperature(0.5), ValueError, "factor must be at least 1"),
]
