"""Cases of additive biases: see test_contract.py."""

import math

import score_mods as sm

H = 6


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
}
BAD = [
    (lambda: sm.alibi(0), ValueError, "num_heads must be at least 1"),
    (lambda: sm.alibi(2.0), TypeError, "num_heads"),
]
