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
}
LEARNABLE = {
    "logn": lambda p: sm.logn(5, s=p[0] + 1),
    "ssmax": lambda p: sm.ssmax(p[0] + 1, p[1]),
}
NEEDED = {"ssmax": {"s": 1.0}}
BAD = [
    (lambda: sm.logn(1), ValueError, "train_length"),
    (lambda: sm.logn(torch.tensor([3.0, 4.0])), ValueError, "train_length"),
    (lambda: sm.ssmax(None), TypeError, "s must be"),
]
