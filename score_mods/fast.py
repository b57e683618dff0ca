r"""Scale-invariant attention in few instructions, for half-precision scores on a GPU.

Since m_t = beta/alpha - A_t² (see `scale_invariant.py`), one value for each pair gives the whole
change. With a_t = A_t/sigma,

    s' = a_t (s - mu - sigma² a_t) + mu + beta/alpha,    a_t = sqrt(c + k log2(t + tau)),
    k = 2 ndim ln(2) / sigma²,    c = A_0²/sigma² - k log2(tau).

A GPU has an instruction for log2 and one for the root, but `torch.log2` and `torch.sqrt` compile
to the correctly rounded functions, some twenty instructions each. The two operators here equal
`torch.log2` and `torch.sqrt` everywhere but in FlexAttention's kernels for an NVIDIA GPU (Triton's
and those of its FLASH backend), where they are `lg2.approx` and `sqrt.approx`. What they are
applied to depends on positions alone, so they need no gradient.

The positions are subtracted as integers. A thread of a Triton kernel holds rows r and r + 8 of a
tile and columns c, c + 8, c + 16, ..., hence most distances twice; where the blocks of keys follow
one another (`kernel_options` says so to FlexAttention) the compiler sees that they are equal, and
computes a_t little more than half as often. It cannot see it in a difference of floats.

The error. Let u = 2^-24. `lg2.approx` is off by at most 4 u max(1, |log2 y|) (absolute error 2^-22
for y between 1/2 and 2, 2 ulp elsewhere: CUDA's programming guide), `sqrt.approx` by at most 2 u
of its value (PTX ISA). With l the largest of 1 and |log2 y| over the y = t + tau in question:

    y: tau and the sum are rounded, 2 u y, and on a grid t itself (a sum and a root), 3 u t,
        which moves log2 y by less than 5 u / ln 2 < 8 u;
    k log2 y: k (8 u + 4 u l) from log2 y, u k l from rounding k;
    c: rounded, u |c| <= u (A_0²/sigma² + k l);
    product and sum: u k l + u a_t².

Divided by 2 a_t², with a_t² >= A_0²/sigma² and k sigma² = 2 ndim ln 2, and with the root's own
error, the relative error of a_t is at most

    u (3 + ndim ln(2) (8 + 7 l) / A_0²)

to first order in u: 6.3e-6 up to t = 2^20 for the default arguments, and growing as log t.
"""

from __future__ import annotations

import functools
import math
from typing import Any, TypeAlias

import torch
from torch import Tensor

from score_mods._captured import at_head

# tau, k, c, sigma², mu (None if it is the number 0), mu + beta/alpha: float32, () or (H,).
Constants: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]

# What is asked of a_t for float16 scores; for bfloat16 four times as much would do.
_TOLERANCE = 5e-5


@torch.library.custom_op("score_mods::approx_log2", mutates_args=())
def _approx_log2(x: Tensor) -> Tensor:
    return torch.log2(x)


@torch.library.custom_op("score_mods::approx_sqrt", mutates_args=())
def _approx_sqrt(x: Tensor) -> Tensor:
    return torch.sqrt(x)


# The instruction, and what the FLASH backend's language compiles to it.
_INSTRUCTIONS = {
    _approx_log2: ("lg2.approx.ftz.f32", "cute.math.log2({x}, fastmath=True)"),
    _approx_sqrt: ("sqrt.approx.ftz.f32", "cute.math.sqrt({x}, fastmath=True)"),
}

for _operator in _INSTRUCTIONS:
    _operator.register_fake(torch.empty_like)
    _operator.register_vmap(lambda info, dims, x, operator=_operator: (operator(x), dims[0]))


@functools.cache
def _register_instructions() -> None:
    """Tell Inductor which instructions to use. Not on import, since importing Inductor is slow."""
    from torch._inductor.codegen.cutedsl.cutedsl_kernel import ModificationWrapperCuteDSL
    from torch._inductor.codegen.cutedsl.cutedsl_op_overrides import CuteDSLOpOverrides
    from torch._inductor.lowering import make_pointwise, register_lowering
    from torch._inductor.virtualized import V, ops

    def emit(instruction: str, cute: str, x: Any) -> Any:
        if isinstance(V.get_ops_handler(), ModificationWrapperCuteDSL):
            return CuteDSLOpOverrides._apply_unary_op(x, cute)
        return ops.inline_asm_elementwise(x, asm=f"{instruction} $0, $1;")

    for operator, (instruction, cute) in _INSTRUCTIONS.items():
        pointwise = make_pointwise(functools.partial(emit, instruction, cute))
        register_lowering(operator._opoverload)(pointwise)


def error_bound(ndim: int, tau: Tensor, a0_squared: Tensor, distance: int = 2**20) -> float:
    """The largest relative error of `fast_mod`'s a_t up to a distance, by this module's docstring.

    Args:
        ndim: dimension of the grid.
        tau: scale in tokens, `()` or `(H,)`.
        a0_squared: A_0², `()` or `(H,)`.
        distance: the largest distance in tokens.

    Returns:
        The bound, that of the worst head.
    """
    reach = torch.stack([tau.double(), tau + distance]).log2().abs().amax(0).clamp(min=1)
    error = 2.0**-24 * (3 + ndim * math.log(2) * (8 + 7 * reach) / a0_squared)
    return error.max().item()


def has_instructions() -> bool:
    """Whether the operators are instructions here, which takes an NVIDIA GPU and Inductor.

    While a model is being compiled it is too late to tell Inductor, and the answer is no.
    """
    if torch.compiler.is_compiling() or torch.version.hip or not torch.cuda.is_available():
        return False
    _register_instructions()
    return True


def wants_instructions(score: Tensor) -> bool:
    """Whether a score is of half precision and on a GPU."""
    return score.is_cuda and score.dtype in (torch.bfloat16, torch.float16)


def fast_log(x: Tensor) -> Tensor:
    """Natural logarithm of x >= 1 in float32, within 2^-21 max(1, ln x), by one instruction."""
    return math.log(2) * _approx_log2(x.float())


def has_fast_form(
    ndim: int, tau: Tensor, sigma: Tensor, mu: Tensor, a0_squared: Tensor, m0: Tensor
) -> bool:
    """Whether `fast_mod` may stand for the exact form of this law on half-precision scores.

    It needs the instructions, nothing learnable, and an `error_bound` within 5e-5, which with the
    default tau, alpha, beta and ndim means a sigma of at least 0.36.

    Args:
        ndim: dimension of the grid.
        tau, sigma, mu: as in `scale_invariant`, `()` or `(H,)`.
        a0_squared: A_0².
        m0: m_0 = beta/alpha - A_0².
    """
    if any(x.requires_grad for x in (tau, sigma, mu, a0_squared, m0)):
        return False
    return has_instructions() and error_bound(ndim, tau, a0_squared) <= _TOLERANCE


def fast_constants(
    ndim: int, tau: Tensor, sigma: Tensor, mu: Tensor, a0_squared: Tensor, m0: Tensor
) -> Constants:
    """What `fast_mod` captures, from the arguments of `has_fast_form`; computed in float64."""
    tau, sigma, mu, a0_squared, m0 = (x.double() for x in (tau, sigma, mu, a0_squared, m0))
    k = 2 * ndim * math.log(2) / sigma**2
    c = a0_squared / sigma**2 - k * tau.log2()
    at_zero = mu + m0 + a0_squared
    shift = mu.float() if mu.any() else None
    return tau.float(), k.float(), c.float(), (sigma**2).float(), shift, at_zero.float()


def grid_axes(shape: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """What `grid_distance` captures: each axis' extent but the first's, and its inverse."""
    return [(torch.tensor(float(w)), torch.tensor(1.0 / w)) for w in shape[1:]]


def grid_distance(axes: list[tuple[Tensor, Tensor]], q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """The Euclidean distance of two positions on a grid of at most 2^22, in float32.

    There is no integer division. A coordinate is i - w floor(i / w), and floor((i + 1/2) / w) is
    that quotient: its argument is at least 1/(2 w) away from an integer, and the two roundings of
    a product with the inverse of w move it by less for i < 2^22.
    """

    def coordinates(index: Tensor) -> list[Tensor]:
        rest, found = index.float(), []
        for extent, inverse in reversed(axes):
            quotient = torch.floor((rest + 0.5) * inverse)
            found.append(rest - quotient * extent)
            rest = quotient
        return [rest, *reversed(found)]

    pairs = zip(coordinates(q_idx), coordinates(kv_idx), strict=True)
    squares = [(q - k).square() for q, k in pairs]
    return _approx_sqrt(sum(squares[1:], squares[0]))


def fast_mod(constants: Constants, score: Tensor, h: Tensor, t: Tensor) -> Tensor:
    """The scores of scale-invariant attention, in float32, by one log2 and one root for each pair.

    s' = a (s - mu - sigma² a) + mu + beta/alpha with a = sqrt(c + k log2(t + tau)). The relative
    error of a is at most `error_bound`, which the module's docstring derives.

    Args:
        constants: from `fast_constants`.
        score, h: as FlexAttention gives them to a score_mod.
        t: distances, float32.

    Returns:
        The new score, float32.
    """
    tau, k, c, variance, mu, at_zero = constants

    def at(x: Tensor) -> Tensor:
        return at_head(x, h, torch.float32)

    a_t = _approx_sqrt(at(c) + at(k) * _approx_log2(t + at(tau)))
    centred = score if mu is None else score - at(mu)
    return a_t * (centred - at(variance) * a_t) + at(at_zero)
