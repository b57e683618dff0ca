r"""Scale-invariant attention: an affine change of the logits by distance (arXiv 2505.17083).

The law. Let the base logit of a key at distance t be S = mu + sigma * L̄ with L̄ ~ N(0, 1), and
give the softmax L_t = A_t * L̄ + m_t. Attention is scale-invariant if the expected total attention
E[Z] and the expected unnormalised negentropy E[N~] of the keys in [t, t*Delta) tend to constants
(Definitions 3.1 and 3.2), for which it suffices that (Lemmas 1 and 2, equation 15)

    E[exp L_t]     = alpha / x,    x = t/tau + 1,
    E[L_t exp L_t] = beta / x.

For a Gaussian, E[exp L] = exp(m + A²/2) and E[L exp L] = (m + A²) exp(m + A²/2). The quotient of
the two lines gives m_t + A_t² = beta/alpha, the logarithm of the first m_t + A_t²/2 = log alpha -
log x; subtracting (equation 16),

    A_t² = 2 (log x - log alpha + beta/alpha),
    m_t = beta/alpha - A_t² = 2 log alpha - beta/alpha - 2 log x.

At t = 0 this is A_0² = 2 (beta/alpha - log alpha), which is positive if and only if beta > alpha
log alpha. Asking that the score at t = 0 be left as it is, A_0 = sigma and m_0 = 0, gives alpha =
exp(sigma²/2) and beta = sigma² alpha, hence

    A_t² = sigma² + 2 log x,    m_t = -2 log x

(alpha = beta = e^0.5 for sigma = 1, the paper's choice). In terms of the score that FlexAttention
hands over, the change is (A_t/sigma) (s - mu) + mu + m_t, again nothing at t = 0. The constants
matter: a row's softmax would cancel a shift common to all its keys, but sinks, exempted keys, lse
and merges see it.

More dimensions. On a d-dimensional grid the number of keys at distance between t and t + dt is S_d
t^(d-1) dt, where S_d is the area of the unit sphere (2, 2 pi, 4 pi for d = 1, 2, 3 with keys on
every side; 1 for causal d = 1). The same conditions then need

    E[exp L_t] = alpha / x^d,    E[L_t exp L_t] = beta / x^d,

and since only log x changes to d log x,

    A_t² = 2 (d log x - log alpha + beta/alpha),    m_t = beta/alpha - A_t²,

or A_t² = sigma² + 2 d log x and m_t = -2 d log x with the default alpha and beta. The limits
follow from integrating S_d t^(d-1) (tau/t)^d from t to t*Delta:

    E[Z] -> alpha S_d tau^d ln Delta,    E[N~] -> beta S_d tau^d ln Delta,

which for d = 1 are the paper's alpha tau ln Delta (causal) and twice that (bidirectional).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias, cast

import torch
from torch import Tensor

from score_mods._captured import Mod, at_head, described, holds, parameter
from score_mods._checks import integer, sizes
from score_mods.fast import (
    Constants,
    fast_constants,
    fast_mod,
    grid_axes,
    grid_distance,
    has_fast_form,
    wants_instructions,
)

# tau, sigma, mu, and alpha and beta or None for those that follow sigma: (), or (H,).
Law: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def _law(
    tau: float | Tensor,
    alpha: float | Tensor | None,
    beta: float | Tensor | None,
    sigma: float | Tensor,
    mu: float | Tensor,
    ndim: int,
) -> Law:
    """The parameters to capture, checked."""
    integer("ndim", ndim)
    law = (
        parameter("tau", tau, positive=True),
        parameter("sigma", sigma, positive=True),
        parameter("mu", mu),
        None if alpha is None else parameter("alpha", alpha, positive=True),
        None if beta is None else parameter("beta", beta),
    )
    given = alpha is not None or beta is not None
    if given and not holds(_boundary(law)[0] > 0):
        raise ValueError(
            "beta must be above alpha * log(alpha), so that a_t is above 0 at distance 0, got "
            f"alpha={'exp(sigma²/2)' if alpha is None else alpha}, "
            f"beta={'sigma² alpha' if beta is None else beta}, sigma={sigma}"
        )
    return law


def _boundary(law: Law) -> tuple[Tensor, Tensor]:
    """A_0² and m_0."""
    _, sigma, _, alpha, beta = law
    log_alpha = sigma.square() / 2 if alpha is None else alpha.log()
    ratio = sigma.square() if beta is None else beta * torch.exp(-log_alpha)
    return 2 * (ratio - log_alpha), 2 * log_alpha - ratio


def _affine(ndim: int, t: Tensor, law: Law) -> tuple[Tensor, Tensor]:
    """a_t and m_t at distances t."""
    tau, sigma, mu, _, _ = law
    a0_squared, m0 = _boundary(law)
    growth = 2 * ndim * torch.log1p(t / tau)
    a_t = torch.sqrt(a0_squared + growth) / sigma
    return a_t, m0 - growth + mu * (1 - a_t)


def _fast(ndim: int, law: Law) -> Constants | None:
    """What the fast form captures, or None where the exact form has to do."""
    if any(x is not None and x.requires_grad for x in law):
        return None
    constants = (*law[:3], *_boundary(law))
    return fast_constants(ndim, *constants) if has_fast_form(ndim, *constants) else None


def _each(law: Law, change: Callable[[Tensor], Tensor]) -> Law:
    return cast(Law, tuple(None if x is None else change(x) for x in law))


def scale_invariant_affine(
    t: Tensor,
    tau: float | Tensor = 10.0,
    *,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    sigma: float | Tensor = 1.0,
    mu: float | Tensor = 0.0,
    ndim: int = 1,
) -> tuple[Tensor, Tensor]:
    """The multiplier and the bias that scale-invariant attention gives a score at distance `t`.

    The score s becomes `a_t * s + m_t`; with x = t/tau + 1 and the default alpha and beta

        a_t = sqrt(1 + 2 ndim ln(x) / sigma²),    m_t = -2 ndim ln(x) + mu (1 - a_t).

    Args:
        t: distances in tokens, any shape; of a negative one the absolute value.
        tau: scale below which nothing changes much, in tokens, positive. It, `sigma` and the rest
            are numbers, or tensors of shape `(H,)` that broadcast with the last axis of `t`.
        alpha: E[exp L_t] at t = 0, positive; exp(sigma²/2) if not given.
        beta: E[L_t exp L_t] at t = 0; sigma² alpha if not given. Must be above alpha log alpha.
        sigma: standard deviation of the base logits, positive.
        mu: mean of the base logits.
        ndim: dimension d of the grid that the tokens lie on.

    Returns:
        `(a_t, m_t)` in the dtype of `t` (float32 if that is an integer dtype), computed in
        `promote_types(t.dtype, float32)`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `tau`, `sigma` or `alpha` is not positive or `beta <= alpha ln alpha`.

    Reference: arXiv 2505.17083, equation 16; sigma, mu and ndim are derived in this module's
    docstring.

    >>> a_t, m_t = scale_invariant_affine(torch.tensor([0.0, 10.0, 1000.0]))
    >>> [round(x, 4) for x in a_t.tolist()], [round(x, 4) for x in m_t.tolist()]
    ([1.0, 1.5448, 3.1985], [0.0, -1.3863, -9.2302])
    """
    if not isinstance(t, Tensor):
        raise TypeError(f"t must be a tensor, got {type(t).__name__}")
    law = _law(tau, alpha, beta, sigma, mu, ndim)
    dtype = torch.promote_types(t.dtype, torch.float32)
    law = _each(law, lambda x: x.to(t.device, dtype))
    a_t, m_t = _affine(ndim, t.abs().to(dtype), law)
    result = t.dtype if t.is_floating_point() else dtype
    return a_t.to(result), m_t.to(result)


def scale_invariant(
    tau: float | Tensor = 10.0,
    *,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    sigma: float | Tensor = 1.0,
    mu: float | Tensor = 0.0,
    ndim: int = 1,
) -> Mod:
    """Multiplies the score by a_t and adds m_t, so that attention is the same at every scale.

    With t = |q_idx - kv_idx|, x = t/tau + 1 and the default alpha and beta

        s' = a_t s + m_t,
        a_t = sqrt(1 + 2 ndim ln(x) / sigma²),
        m_t = -2 ndim ln(x) + mu (1 - a_t).

    The score at t = 0 is unchanged. Exact if the base logits at every distance have mean `mu` and
    standard deviation `sigma`: normalise queries and keys (QK-norm), or measure them. Works with
    causal, prefix and bidirectional masks. On an NVIDIA GPU, bfloat16 and float16 scores get the
    fast form of `score_mods.fast` if nothing is learnable and the mod is made outside a compiled
    function; all others the formula as it stands.

    Args:
        tau: scale below which nothing changes much, in tokens, positive. A number, or a tensor of
            shape `(H,)` (or `(1,)` for all heads), learnable if it requires grad; its positivity
            is then the caller's business. Make the mod anew when you change a tensor that does
            not require grad: the fast form has its constants from it.
        alpha: E[exp L_t] at t = 0, positive; exp(sigma²/2) if not given.
        beta: E[L_t exp L_t] at t = 0; sigma² alpha if not given. Must be above alpha log alpha.
        sigma: standard deviation of the base logits, positive; number or tensor as `tau`.
        mu: mean of the base logits; number or tensor as `tau`.
        ndim: dimension d of the grid that the tokens lie on (see `scale_invariant_grid` for
            distances on a grid).

    Returns:
        A score_mod; it computes in and returns `promote_types(score.dtype, float32)`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `tau`, `sigma` or `alpha` is not positive, `beta <= alpha ln alpha`, or
            shapes do not fit.

    Reference: Anson, Wang & Aitchison, "Scale-invariant attention", arXiv 2505.17083, equation 16.
    """
    law = _law(tau, alpha, beta, sigma, mu, ndim)
    fast = _fast(ndim, law)

    def scale_invariant_mod(
        score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        if fast is not None and wants_instructions(score):
            return fast_mod(fast, score, h, (q_idx - kv_idx).float().abs())
        dtype = torch.promote_types(score.dtype, torch.float32)
        t = (q_idx - kv_idx).abs().to(dtype)
        a_t, m_t = _affine(ndim, t, _each(law, lambda x: at_head(x, h, dtype)))
        return a_t * score + m_t

    scale_invariant_mod.needs_triton = fast is None  # type: ignore[attr-defined]
    return described(scale_invariant_mod, "scale_invariant", *(x for x in law if x is not None))


def scale_invariant_grid(
    shape: tuple[int, ...],
    tau: float | Tensor = 10.0,
    *,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    sigma: float | Tensor = 1.0,
    mu: float | Tensor = 0.0,
) -> Mod:
    """Scale-invariant attention for tokens on a grid, such as the patches of an image or a video.

    As `scale_invariant` with `ndim = len(shape)` and t the Euclidean distance between the two
    tokens' coordinates, tokens being numbered row by row (the last axis fastest).

    Args:
        shape: the grid's extent along each axis, e.g. `(height, width)`.
        tau, alpha, beta, sigma, mu: as in `scale_invariant`; `tau` in grid steps.

    Returns:
        A score_mod for sequences of `prod(shape)` tokens.

    Raises:
        TypeError: if `shape` is no tuple of ints, or another argument has the wrong type.
        ValueError: if an extent is below 1, or as in `scale_invariant`.

    Reference: derived in this module's docstring from arXiv 2505.17083, equation 15.
    """
    ndim = len(sizes("shape", shape))
    law = _law(tau, alpha, beta, sigma, mu, ndim)
    extents = [torch.tensor(extent) for extent in shape]
    strides = [torch.tensor(math.prod(shape[axis + 1 :])) for axis in range(ndim)]
    axes = grid_axes(shape)
    fast = _fast(ndim, law) if math.prod(shape) <= 2**22 else None

    def scale_invariant_grid_mod(
        score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        if fast is not None and wants_instructions(score):
            return fast_mod(fast, score, h, grid_distance(axes, q_idx, kv_idx))
        dtype = torch.promote_types(score.dtype, torch.float32)
        squares = []
        for extent, stride in zip(extents, strides, strict=True):
            difference = (q_idx // stride) % extent - (kv_idx // stride) % extent
            squares.append(difference.to(dtype).square())
        t = torch.sqrt(sum(squares[1:], squares[0]))
        a_t, m_t = _affine(ndim, t, _each(law, lambda x: at_head(x, h, dtype)))
        return a_t * score + m_t

    scale_invariant_grid_mod.made_for = (math.inf, math.prod(shape), math.prod(shape))  # type: ignore[attr-defined]
    return described(
        scale_invariant_grid_mod, "scale_invariant_grid", *(x for x in law if x is not None)
    )
