"""What is compared: the ten rows of Table 1 of arXiv 2505.17083, and this library's additions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import score_mods as sm
from benchmarks.decoder import Decoder, Size
from benchmarks.mixers import (
    LogNAttention,
    Positions,
    ScaleInvariantAttention,
    SoftmaxAttention,
)
from score_mods.rotary import Rotary

# From head size, trained length and context length to the positions.
Scheme = Callable[[int, int, int], Rotary | None]


def _rope(head_dim: int, trained: int, length: int) -> Rotary:
    return sm.rope(head_dim)


def _p_rope(head_dim: int, trained: int, length: int) -> Rotary:
    return sm.half_truncated_rope(head_dim)


def _nope(head_dim: int, trained: int, length: int) -> None:
    return None


def _ntk(head_dim: int, trained: int, length: int) -> Rotary:
    return sm.ntk_rope(head_dim, max(1.0, length / trained))


def _yarn(head_dim: int, trained: int, length: int) -> Rotary:
    if length <= trained:
        return sm.rope(head_dim)
    return sm.yarn_rope(head_dim, length / trained, trained)


@dataclass(frozen=True)
class Method:
    """How a row attends.

    Attributes:
        scheme: its positions; those of NTK and YaRN are stretched in contexts longer than the
            trained length L.
        attention: "softmax"; "logn", scores times s_h ln n with a learned s_h; "alibi";
            "scale_invariant".
        law: of scale-invariant attention, whose tau is 10: "assumed", sigma = 1 and mu = 0;
            "measured", each head's sigma and mu, taken after a tenth of the steps from one
            training sequence; "learned", assumed, with a tau for each head that is trained.
        sinks: keys at the start that scale-invariant attention leaves alone.
    """

    scheme: Scheme
    attention: str = "softmax"
    law: str = "assumed"
    sinks: int = 0


METHODS = {
    "rope": Method(_rope),
    "p_rope": Method(_p_rope),
    "nope": Method(_nope),
    "rope_ntk": Method(_ntk),
    "yarn": Method(_yarn),
    "logn_rope": Method(_rope, "logn"),
    "logn_p_rope": Method(_p_rope, "logn"),
    "logn_ntk": Method(_ntk, "logn"),
    "alibi": Method(_nope, "alibi"),
    "scale_invariant": Method(_p_rope, "scale_invariant"),
    "scale_invariant_measured": Method(_p_rope, "scale_invariant", law="measured"),
    "scale_invariant_tau": Method(_p_rope, "scale_invariant", law="learned"),
    "scale_invariant_sink": Method(_p_rope, "scale_invariant", sinks=1),
}
TAU = 10.0


def build(name: str, size: Size, trained: int) -> Decoder:
    """Make a method's decoder, untrained.

    Args:
        name: one of `METHODS`.
        size: how large it is.
        trained: length that it will be trained at.
    """
    method = METHODS[name]
    rotary = method.scheme(size.head_dim, trained, trained)

    def mixer(layer: int) -> SoftmaxAttention:
        if method.attention == "logn":
            return LogNAttention(size.width, size.head_dim, rotary, trained=trained)
        if method.attention == "scale_invariant":
            return ScaleInvariantAttention(
                size.width,
                size.head_dim,
                rotary,
                tau=TAU,
                learned=method.law == "learned",
                sinks=method.sinks,
            )
        mod = sm.alibi(size.heads) if method.attention == "alibi" else None
        return SoftmaxAttention(size.width, size.head_dim, rotary, mod)

    positions = Positions(lambda length: method.scheme(size.head_dim, trained, length))
    return Decoder(size, mixer, positions)
