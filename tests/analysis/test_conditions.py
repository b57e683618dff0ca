import math
from functools import partial

import numpy as np
import pytest
import torch

from analysis.conditions import expected, expected_entropy, limits, predict
from analysis.ranges import law_edges, law_mass
from score_mods import alibi, causal, compose, exempt_keys, logn, scale_invariant

X, W = np.polynomial.hermite_e.hermegauss(100)
W = W / math.sqrt(2 * math.pi)


def si_affine(t, tau=10.0, a0_squared=1.0, m0=0.0):
    growth = 2 * np.log1p(t / tau)
    return np.sqrt(a0_squared + growth), m0 - growth


def softcap(score, b, h, q_idx, kv_idx):
    return 5 * torch.tanh(score / 5)


def quadrature(a, m, mu=0.0, sigma=1.0):
    """E[A~] and E[A~ log A~] at every distance, by Gauss-Hermite in numpy."""
    logits = a[:, None] * (mu + sigma * X) + m[:, None]
    weights = np.exp(logits) * W
    return weights.sum(1), (weights * logits).sum(1)


def kerple(score, b, h, q_idx, kv_idx):
    return score - torch.log1p((q_idx - kv_idx).abs().to(score.dtype) / 10)


def with_sigma(t, sigma, mu):
    a, m = si_affine(t, 30.0, sigma**2)
    return a / sigma, m + mu - mu * a / sigma


AFFINE = {
    "none": (None, lambda t: (np.ones_like(t), np.zeros_like(t))),
    "scale_invariant": (scale_invariant(10.0), si_affine),
    "tau 1000": (scale_invariant(1000.0), partial(si_affine, tau=1000.0)),
    "alpha, beta": (
        scale_invariant(7.0, alpha=1.2, beta=0.9),
        partial(
            si_affine,
            tau=7.0,
            a0_squared=2 * (0.9 / 1.2 - math.log(1.2)),
            m0=2 * math.log(1.2) - 0.9 / 1.2,
        ),
    ),
    "sigma, mu": (scale_invariant(30.0, sigma=1.7, mu=-2.4), lambda t: with_sigma(t, 1.7, -2.4)),
    "logn": (logn(), lambda t: (np.full_like(t, math.log(5000)), np.zeros_like(t))),
    "alibi": (alibi(8), lambda t: (np.ones_like(t), -t / 16)),
    "kerple": (kerple, lambda t: (np.ones_like(t), -np.log1p(t / 10))),
}


@pytest.mark.parametrize("name", AFFINE)
def test_exact_moments_agree_with_quadrature(name):
    mod, affine = AFFINE[name]
    mu, sigma = (-2.4, 1.7) if name == "sigma, mu" else (0.3, 0.8)
    edges = [1, 10, 100, 3000]
    law = expected(mod, edges, q_idx=4999, head=3, mu=mu, sigma=sigma)
    assert law.affine
    z, n = quadrature(*affine(np.arange(3000.0)), mu, sigma)
    for k in range(3):
        part = slice(edges[k], edges[k + 1])
        assert law.total[k].item() == pytest.approx(z[part].sum(), rel=1e-9)
        size = np.abs(n[part]).sum()
        assert law.negentropy[k].item() == pytest.approx(n[part].sum(), rel=1e-9, abs=1e-9 * size)


def test_expected_total_of_the_paper():
    law = expected(scale_invariant(10.0), [10**k for k in range(1, 7)])
    known = [28.447, 36.623, 37.823, 37.949, 37.962]
    assert law.total.tolist() == pytest.approx(known, abs=5e-4)
    assert law.negentropy.tolist() == pytest.approx(law.total.tolist(), rel=1e-12)


@pytest.mark.parametrize("name", AFFINE)
def test_predict_recovers_multiplier_and_bias(name):
    mod, affine = AFFINE[name]
    t = torch.tensor([0, 1, 2, 100, 4096, 4999])
    law = predict(mod, t, head=3, mu=0.7, sigma=2.0)
    a, m = affine(t.double().numpy())
    assert law.affine
    assert law.a_t.numpy() == pytest.approx(a, rel=1e-12)
    assert law.m_t.numpy() == pytest.approx(m, rel=1e-12, abs=1e-12)


def test_predict_goes_to_any_distance():
    law = predict(scale_invariant(10.0), torch.tensor([2**20, 2**40]))
    assert law.a_t.numpy() == pytest.approx(si_affine(np.array([2.0**20, 2.0**40]))[0], rel=1e-12)


def test_predict_gives_the_mod_its_head_and_query():
    mod = scale_invariant(torch.tensor([1.0, 100.0], dtype=torch.float64))
    t = torch.tensor([50])
    for head, tau in enumerate((1.0, 100.0)):
        assert predict(mod, t, head=head).a_t.item() == pytest.approx(
            math.sqrt(1 + 2 * math.log1p(50 / tau)), rel=1e-12
        )
    assert predict(logn(), t, q_idx=999).a_t.item() == pytest.approx(math.log(1000), rel=1e-12)
    sink = predict(exempt_keys(scale_invariant(10.0), 1), torch.tensor([99, 100]), q_idx=100)
    assert sink.m_t[1] == 0
    assert sink.m_t[0] < 0


@pytest.mark.parametrize(
    "mod",
    [
        softcap,
        compose(scale_invariant(10.0), softcap),
        lambda s, b, h, q, k: s.clamp(max=8.0),
        lambda s, b, h, q, k: s + 1e-3 * s.square(),
        lambda s, b, h, q, k: s + 1e-3 * s**3,
    ],
)
def test_predict_says_when_a_mod_is_not_affine(mod):
    law = predict(mod, torch.arange(20))
    assert not law.affine
    assert law.a_t.isnan().all()
    assert not expected(mod, [1, 10]).affine


def test_quadrature_of_a_mod_that_is_not_affine():
    """exp L = e^(11 s) + e^s has exact moments; E[L exp L] from a fine trapezoid."""

    def mod(score, b, h, q_idx, kv_idx):
        return torch.logaddexp(11 * score, score)

    exact = 0.5 * 11**2 + math.log1p(math.exp(0.5 - 0.5 * 11**2))
    law = predict(mod, torch.tensor([5]), nodes=96)
    assert not law.affine
    assert math.expm1(law.log_weight.item() - exact) == pytest.approx(0, abs=1e-9)

    s = np.arange(-30, 45, 0.01)
    logits = np.logaddexp(11 * s, s)
    weights = np.exp(logits - s**2 / 2 - exact) * 0.01 / math.sqrt(2 * math.pi)
    assert law.mean_logit.item() == pytest.approx((weights * logits).sum(), rel=1e-9)

    few = predict(mod, torch.tensor([5]), nodes=48)
    assert abs(math.expm1(few.log_weight.item() - exact)) > 1e-4


def test_a_mod_affine_at_some_distances_only():
    def mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx - kv_idx < 4, score, 5 * torch.tanh(score / 5))

    law, flat, capped = (predict(m, torch.arange(8)) for m in (mod, None, softcap))
    assert not law.affine
    assert torch.equal(law.log_weight, torch.cat([flat.log_weight[:4], capped.log_weight[4:]]))
    assert torch.equal(law.mean_logit, torch.cat([flat.mean_logit[:4], capped.mean_logit[4:]]))


def test_masked_distances_weigh_nothing():
    def window(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx - kv_idx < 16, score, -torch.inf)

    law = expected(window, [1, 10, 20, 40])
    assert law.affine
    assert law.total.tolist() == pytest.approx([9 * math.exp(0.5), 6 * math.exp(0.5), 0])
    assert law.negentropy[2] == 0


def test_moments_may_change_with_distance():
    law = expected(None, [1, 3], mu=lambda t: -t.double(), sigma=lambda t: t.double())
    assert law.total.item() == pytest.approx(math.exp(-0.5) + 1, rel=1e-12)
    tensors = predict(None, torch.arange(1, 3), mu=torch.tensor([-1.0, -2.0]), sigma=1.0)
    assert tensors.log_weight.tolist() == [-0.5, -1.5]


def test_nothing_overflows():
    law = expected(scale_invariant(10.0), [1, 1000], sigma=9.0)
    a, m = si_affine(np.arange(1.0, 1000.0))
    top = m + (9 * a) ** 2 / 2
    assert top.max() > 400
    assert law.log_total.item() == pytest.approx(np.logaddexp.reduce(top), rel=1e-12)


def test_long_ranges_are_cut_without_a_seam():
    """Three million distances, against the harmonic sum by Euler and Maclaurin."""
    law = expected(scale_invariant(10.0), [100_000, 3_100_000])
    a, b = 100_010.0, 3_100_010.0
    harmonic = math.log(b / a) - (1 / b - 1 / a) / 2 - (1 / b**2 - 1 / a**2) / 12
    assert law.total.item() == pytest.approx(10 * math.exp(0.5) * harmonic, rel=1e-12)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"alpha": 1.2, "beta": 0.9}, {"sigma": 1.5, "mu": -0.6}, {"sigma": 0.5, "mu": 2.0}],
)
def test_limits_are_what_the_expectations_tend_to(arguments):
    moments = {key: arguments[key] for key in ("mu", "sigma") if key in arguments}
    law = expected(scale_invariant(10.0, **arguments), [1_000_000, 3_000_000], **moments)
    total, negentropy = limits(3.0, 10.0, **arguments)
    assert law.total.item() == pytest.approx(total, rel=2e-5)
    assert law.negentropy.item() == pytest.approx(negentropy, rel=2e-5)


def test_limits_in_more_dimensions():
    t = np.arange(10**6, 2 * 10**6) + 0.5
    a = np.sqrt(1 + 4 * np.log1p(t / 10))
    z, n = quadrature(a[::100], (1 - a**2)[::100])
    shells = 100 * 2 * math.pi * t[::100]
    total, negentropy = limits(2.0, 10.0, ndim=2, neighbours=2 * math.pi)
    assert (shells * z).sum() == pytest.approx(total, rel=1e-4)
    assert (shells * n).sum() == pytest.approx(negentropy, rel=1e-4)


def test_law_mass_and_edges():
    edges = law_edges(10.0, 2.0, 65535)
    assert edges.tolist() == [1] + [10 * (2**k - 1) for k in range(1, 13)]
    t = np.arange(1, 40950)
    sums = np.add.reduceat(10 / (t + 10), edges[:-1].numpy() - 1)
    assert law_mass(edges, 10.0).numpy() == pytest.approx(sums, rel=1e-12)
    assert law_mass(edges, 10.0)[4:].numpy() == pytest.approx(10 * math.log(2), rel=3e-3)
    assert law_edges(0.1, 2.0, 100, start=0)[0] == 0
    assert law_edges(10.0, 2.0, 1000, start=100).tolist() == [100, 150, 310, 630]


def test_entropy_is_simulated_with_its_error():
    mod, edges = scale_invariant(10.0), [10, 100, 1000]
    estimate = expected_entropy(mod, edges, rows=400, seed=1)
    again = expected_entropy(mod, edges, rows=400, seed=1)
    assert torch.equal(estimate.mean, again.mean)

    rng = np.random.default_rng(0)
    a, m = si_affine(np.arange(1000.0))
    logits = a * rng.standard_normal((400, 1000)) + m
    for k, (start, stop) in enumerate(((10, 100), (100, 1000))):
        p = np.exp(logits[:, start:stop])
        p /= p.sum(1, keepdims=True)
        entropy = -(p * np.log(p)).sum(1)
        error = math.hypot(entropy.std() / 20, estimate.standard_error[k].item())
        assert abs(estimate.mean[k].item() - entropy.mean()) < 4 * error
        assert estimate.standard_error[k].item() == pytest.approx(entropy.std() / 20, rel=0.2)
    law = expected(mod, edges)
    annealed = law.log_total - law.mean_logit
    assert annealed[1] - annealed[0] < 0.3 < estimate.mean[1] - estimate.mean[0]


def test_entropy_of_long_and_of_empty_ranges():
    estimate = expected_entropy(None, [10, 70_000], rows=4, sigma=1e-6)
    assert estimate.mean.item() == pytest.approx(math.log(69_990), rel=1e-6)

    def nothing(score, b, h, q_idx, kv_idx):
        return torch.full_like(score, -torch.inf)

    assert expected_entropy(nothing, [10, 20], rows=4).mean.item() == 0


def test_every_number_of_nodes_that_is_accepted_is_right():
    """The trapezoidal rule is exact for E[exp(s + sin s)], whose integrand is entire."""
    x = np.linspace(-40, 40, 20001)
    weight = np.exp(x + np.sin(x) - x**2 / 2) / math.sqrt(2 * math.pi)
    for nodes in (64, 128, 256, 370):
        law = predict(lambda s, b, h, i, j: s + s.sin(), torch.tensor([5]), nodes=nodes)
        assert law.log_weight.item() == pytest.approx(math.log(weight.sum() * 0.004), abs=1e-9)


@pytest.mark.parametrize(
    ("call", "error", "names"),
    [
        (lambda: predict(None, torch.tensor([1.0])), TypeError, "t must be an integer tensor"),
        (lambda: predict(None, [1]), TypeError, "t must be an integer tensor"),
        (lambda: predict(None, torch.zeros(2, 2, dtype=torch.long)), ValueError, "t must be 1-D"),
        (lambda: predict(None, torch.tensor([-1, 3])), ValueError, "t must lie"),
        (lambda: predict(None, torch.tensor([5]), q_idx=4), ValueError, "t must lie"),
        (lambda: predict(None, torch.tensor([5]), sigma=0.0), ValueError, "sigma must be"),
        (lambda: predict(None, torch.tensor([5]), mu=torch.ones(2)), ValueError, "mu must have"),
        (lambda: predict("none", torch.tensor([5])), TypeError, "score_mod must be a plain"),
        (lambda: predict(causal, torch.tensor([5])), TypeError, "plain .* got a mask_mod"),
        (lambda: expected(lambda s: s, [1, 9]), TypeError, "got a function of 1 arguments"),
        (
            lambda: predict(alibi(4), torch.tensor([5]), head=9),
            ValueError,
            r"head must be in 0..3",
        ),
        (lambda: expected(alibi(4), [1, 9], head=4), ValueError, r"head must be in 0..3"),
        (lambda: expected_entropy(alibi(4), [1, 9], head=-1), ValueError, "head must be at least"),
        (lambda: predict(None, torch.tensor([5]), head=1.5), TypeError, "head must be an int"),
        (lambda: predict(None, torch.tensor([True])), TypeError, "t must be an .* got torch.bool"),
        (lambda: predict(None, torch.tensor([5]), q_idx=5.0), TypeError, "q_idx must be an int"),
        (lambda: predict(None, torch.tensor([5]), mu=math.nan), ValueError, "mu must be a number"),
        (lambda: predict(None, torch.tensor([5]), sigma="1"), TypeError, "sigma must be a number"),
        (
            lambda: predict(None, torch.tensor([5]), sigma=torch.tensor([math.inf])),
            ValueError,
            "sigma must be finite, got inf",
        ),
        (lambda: expected(None, "edges"), TypeError, "edges must be integers, got 'edges'"),
        (lambda: predict(logn(), torch.tensor([5]), head=-1), ValueError, "head must be at least"),
        (
            lambda: predict(None, torch.tensor([5]), nodes=0),
            ValueError,
            "nodes must be at least 1, got 0",
        ),
        (lambda: expected(None, [1, 9], nodes=64.0), TypeError, "nodes must be an int"),
        (lambda: expected(None, [1, 9], nodes=371), ValueError, r"nodes must lie in 1..370"),
        (lambda: expected(None, [1, 1]), ValueError, "edges must be"),
        (lambda: expected(None, [1.0, 2.0]), TypeError, "edges must be integers"),
        (lambda: expected(None, [1, 9], mu=torch.ones(8)), TypeError, "mu must be a number"),
        (lambda: expected_entropy(None, [1, 9], rows=1), ValueError, "rows must be"),
        (lambda: expected_entropy(None, [1, 9], q_idx=5), ValueError, "edges must not pass"),
        (lambda: limits(1.0), ValueError, "delta must be above 1"),
        (lambda: limits(2.0, tau=-1.0), ValueError, "tau must be a positive number"),
        (lambda: limits("2"), TypeError, "delta must be a number, got str"),
        (lambda: limits(2.0, ndim=0), ValueError, "ndim must be at least 1"),
        (lambda: limits(2.0, alpha=-1.0), ValueError, "alpha must be a positive number"),
        (lambda: law_edges(10.0, 2.0, 12), ValueError, "must leave room for two ranges"),
        (lambda: law_edges(10.0, 1.0, 100), ValueError, "delta must be above 1"),
        (lambda: law_edges(math.inf, 2.0, 100), ValueError, "tau must be a number, finite"),
        (lambda: law_edges(10.0, 2.0, None), TypeError, "t_max must be a number, got NoneType"),
        (lambda: law_edges(10.0, 2.0, 100, start=-1), ValueError, "start must be at least 0"),
        (lambda: law_mass([1, 9], -10.0), ValueError, "tau must be a positive number"),
        (lambda: expected_entropy(None, [1, 9], seed=-1), ValueError, "seed must be at least 0"),
    ],
)
def test_wrong_arguments_are_named(call, error, names):
    with pytest.raises(error, match=names):
        call()
