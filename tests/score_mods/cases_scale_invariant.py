"""Cases of scale-invariant attention: see test_contract.py."""

import math

import torch

import score_mods as sm

TAUS = [2.0, 5.0, 10.0, 50.0, 300.0, 1000.0]


def si_pair(
    tau=10.0, alpha=None, beta=None, sigma=1.0, mu=0.0, d=1, distance=lambda q, k: abs(q - k)
):
    """Equation 15 solved for one pair, with sigma and mu around it."""

    def pair(s, h, q, k):
        tau_h = tau[h] if isinstance(tau, list) else tau
        sigma_h = sigma[h] if isinstance(sigma, list) else sigma
        alpha_h = math.exp(sigma_h**2 / 2) if alpha is None else alpha
        beta_h = sigma_h**2 * alpha_h if beta is None else beta
        target = alpha_h / (distance(q, k) / tau_h + 1) ** d  # E[exp L_t]
        # E[L exp L] / E[exp L] = m + A^2 and log E[exp L] = m + A^2 / 2.
        a_squared = 2 * (beta_h / alpha_h - math.log(target))
        m = beta_h / alpha_h - a_squared
        return math.sqrt(a_squared) * (s - mu) / sigma_h + mu + m

    return pair


def grid_distance(width):
    return lambda q, k: math.dist(divmod(q, width), divmod(k, width))


CASES = {
    "scale_invariant": [
        (sm.scale_invariant(), si_pair()),
        (sm.scale_invariant(300.0), si_pair(300.0)),
        (sm.scale_invariant(7.0, alpha=2.0, beta=3.0), si_pair(7.0, 2.0, 3.0)),
        (sm.scale_invariant(alpha=0.3), si_pair(alpha=0.3)),
        (sm.scale_invariant(sigma=2.7, mu=-6.0), si_pair(sigma=2.7, mu=-6.0)),
        (sm.scale_invariant(ndim=3), si_pair(d=3)),
        (
            sm.scale_invariant(torch.tensor(TAUS), sigma=torch.tensor([1.0, 2, 3, 4, 5, 6])),
            si_pair(TAUS, sigma=[1.0, 2, 3, 4, 5, 6]),
        ),
    ],
    "scale_invariant_grid": [
        (sm.scale_invariant_grid((20, 13)), si_pair(d=2, distance=grid_distance(13))),
        (
            sm.scale_invariant_grid((300,), 4.0, sigma=0.5, mu=1.0),
            si_pair(4.0, sigma=0.5, mu=1.0),
        ),
    ],
}
BOUNDED = {"scale_invariant_grid"}
LEARNABLE = {
    "scale_invariant": lambda p: sm.scale_invariant(
        p[0] + 3, sigma=p[1] + 2, mu=p[2], alpha=p[3] + 1
    ),
    "scale_invariant_grid": lambda p: sm.scale_invariant_grid(
        (3, 4), p[0] + 3, sigma=p[1] + 2, mu=p[2]
    ),
}
NEEDED = {"scale_invariant_grid": {"shape": (2, 2)}}
BAD = [
    (lambda: sm.scale_invariant(0), ValueError, "tau must be a positive number"),
    (lambda: sm.scale_invariant(float("nan")), ValueError, "tau"),
    (lambda: sm.scale_invariant("10"), TypeError, "tau must be a positive number, got str"),
    (lambda: sm.scale_invariant(True), TypeError, "tau"),
    (lambda: sm.scale_invariant(torch.tensor([1.0, -1.0])), ValueError, "tau"),
    (lambda: sm.scale_invariant(torch.ones(2, 2)), ValueError, r"tau must have shape \(H,\)"),
    (lambda: sm.scale_invariant(torch.tensor([1, 2])), TypeError, "tau"),
    (lambda: sm.scale_invariant(torch.ones((), requires_grad=True)), ValueError, "0-d tensor"),
    (lambda: sm.scale_invariant(sigma=-1), ValueError, "sigma"),
    (lambda: sm.scale_invariant(alpha=0.0), ValueError, "alpha"),
    (
        lambda: sm.scale_invariant(alpha=2.0, beta=2 * math.log(2)),
        ValueError,
        "beta must be above",
    ),
    (lambda: sm.scale_invariant(alpha=5.0, beta=1.0), ValueError, "beta must be above"),
    (lambda: sm.scale_invariant(ndim=0), ValueError, "ndim"),
    (lambda: sm.scale_invariant(ndim=1.5), TypeError, "ndim"),
    (
        lambda: sm.scale_invariant(torch.ones(2), sigma=torch.ones(3)),
        (ValueError, RuntimeError),
        "heads",
    ),
    (lambda: sm.scale_invariant_affine(3.0), TypeError, "t must be a tensor"),
    (lambda: sm.scale_invariant_grid([3, 4]), TypeError, "shape must be a tuple"),
    (lambda: sm.scale_invariant_grid(()), ValueError, "shape"),
    (lambda: sm.scale_invariant_grid((3, 0)), ValueError, "shape"),
]
