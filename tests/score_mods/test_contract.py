"""What every mechanism must do, against a construction from its paper that shares no code with it.

`CASES` has an entry for every score_mod of the catalogue: the mod, and a function of (score, head,
query, key) for one pair. Masks and rotary schemes have theirs in test_masks.py and test_rotary.py.
A mechanism without a case fails.
"""

import math

import numpy as np
import pytest
import torch

import score_mods as sm

H, D = 6, 32
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
    "alibi": [
        (sm.alibi(H), lambda s, h, q, k: s - alibi_slope_by_rule(h, H) * abs(q - k)),
        (sm.alibi(8), lambda s, h, q, k: s - 2.0 ** -(h + 1) * abs(q - k)),
    ],
    "logn": [
        (sm.logn(), lambda s, h, q, k: s * math.log(q + 1)),
        (sm.logn(s=0.4), lambda s, h, q, k: 0.4 * s * math.log(q + 1)),
        (sm.logn(50), lambda s, h, q, k: s * (math.log(q + 1, 50) if q + 1 > 50 else 1)),
    ],
    "ssmax": [
        (sm.ssmax(0.43), lambda s, h, q, k: s * 0.43 * math.log(q + 1)),
        (
            sm.ssmax(torch.tensor(TAUS), b=2.0),
            lambda s, h, q, k: s * (TAUS[h] * math.log(q + 1) + 2.0),
        ),
    ],
}
FLAT = [
    pytest.param(*case, id=f"{name}-{i}")
    for name, cases in CASES.items()
    for i, case in enumerate(cases)
]
FIRST = [pytest.param(*cases[0], id=name) for name, cases in CASES.items()]


def by_pairs(pair, score):
    """`pair` applied to every entry of a (B, H, T_q, T) array."""
    out = np.empty_like(score)
    for (b, h, q, k), s in np.ndenumerate(score):
        out[b, h, q, k] = pair(s, h, q, k)
    return out


def softmax_attention(score, v, visible):
    score = np.where(visible, score, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True) @ v


def qkv(T, dtype=torch.float64, heads=H, size=D):
    return [torch.randn(1, heads, T, size).to(dtype) for _ in range(3)]


def test_every_score_mod_of_the_catalogue_has_a_case():
    assert {m.kind for m in sm.catalogue} == {"score_mod", "mask_mod", "q,k transform"}
    assert set(CASES) == {m.name for m in sm.catalogue if m.kind == "score_mod"}


@pytest.mark.parametrize(("mod", "pair"), FLAT)
def test_equals_its_paper(mod, pair):
    T = 61
    heads = mod.num_heads or H
    q, k, v = qkv(T, heads=heads)
    s = (q @ k.mT / D**0.5).numpy()
    expected = softmax_attention(by_pairs(pair, s), v.numpy(), np.tri(T, dtype=bool))
    out = sm.dense_attention(q, k, v, mod, sm.causal)
    np.testing.assert_allclose(out.numpy(), expected, atol=1e-10)


@pytest.mark.parametrize(("mod", "pair"), FLAT)
def test_a_wrong_constant_would_be_seen(mod, pair):
    """The twin: a bias off by 1e-6 per token of distance is more than the tolerance above."""
    T = 61
    q, k, v = qkv(T, heads=mod.num_heads or H)
    broken = sm.compose(mod, lambda s, b, h, i, j: s - 1e-6 * (i - j))
    difference = sm.dense_attention(q, k, v, mod, sm.causal) - sm.dense_attention(
        q, k, v, broken, sm.causal
    )
    assert difference.abs().max() > 1e-7


@pytest.mark.parametrize(("mod", "pair"), FLAT)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_are_finite_and_wide_on_both_sides(mod, pair, dtype):
    T = 257
    index = torch.arange(T)
    heads = torch.arange(mod.num_heads or H)[:, None, None]
    score = torch.randn(len(heads), T, T).to(dtype)
    out = mod(score, torch.tensor(0), heads, index[:, None], index)
    assert out.dtype == torch.promote_types(dtype, torch.float32)
    assert out.isfinite().all()
    exact = mod(score.double(), torch.tensor(0), heads, index[:, None], index)
    # Positions, distances and captured numbers are never rounded to half precision: only fp32's
    # own rounding is left.
    assert ((out - exact).abs() / exact.abs().clamp(min=1)).max() < 1e-5


@pytest.mark.parametrize(
    ("mod", "pair"), [c for c in FLAT if not c.id.startswith("scale_invariant_grid")]
)
def test_far_positions(mod, pair):
    """Distances to 2^20 and past it, with the int32 indices of a GPU."""
    far = torch.tensor([0, 1, 46341, 2**20 - 1, 2**20, 2**22 + 1], dtype=torch.int32)
    heads = torch.arange(mod.num_heads or H)[:, None, None]
    score = torch.full((len(heads), len(far), len(far)), 0.7)
    out = mod(score, torch.tensor(0), heads, far[:, None], far).double()
    assert out.isfinite().all()
    for h in range(len(heads)):
        for i, q in enumerate(far.tolist()):
            for j, k in enumerate(far.tolist()):
                expected = pair(score[0, 0, 0].item(), h, q, k)
                assert out[h, i, j] == pytest.approx(expected, rel=2e-6, abs=2e-5)


@pytest.mark.parametrize(("mod", "pair"), FIRST)
def test_decoding_with_an_offset_equals_the_full_pass(mod, pair):
    T = 29
    q, k, v = qkv(T)
    full = sm.dense_attention(q, k, v, mod, sm.causal)
    for step in (1, 3):
        for start in range(0, T - step + 1, step):
            end = start + step
            offset = start if step == 1 else torch.tensor(start)
            out = sm.dense_attention(
                q[:, :, start:end],
                k[:, :, :end],
                v[:, :, :end],
                sm.with_offset(mod, offset),
                sm.with_offset(sm.causal, offset),
            )
            torch.testing.assert_close(out, full[:, :, start:end], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("mod", "pair"), FIRST)
def test_packed_documents_equal_separate_ones(mod, pair):
    lengths = [5, 1, 17, 9]
    parts = [qkv(n) for n in lengths]
    q, k, v = (torch.cat(x, 2) for x in zip(*parts, strict=True))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    mask = sm.and_masks(sm.causal, sm.document(ids))
    packed = sm.dense_attention(q, k, v, sm.with_positions(mod, positions), mask)
    apart = [sm.dense_attention(*part, mod, sm.causal) for part in parts]
    torch.testing.assert_close(packed, torch.cat(apart, 2), rtol=0, atol=1e-12)

    relative = next(m for m in sm.catalogue if m.name == mod.__name__).positions == "relative"
    grid = (
        mod.__name__ == "scale_invariant_grid"
    )  # distances on a grid are not those of its flat index
    if not grid:
        without = sm.dense_attention(q, k, v, mod, mask)
        assert torch.allclose(without, packed, atol=1e-12) == relative


LEARNABLE = {
    "scale_invariant": lambda p: sm.scale_invariant(
        p[0] + 3, sigma=p[1] + 2, mu=p[2], alpha=p[3] + 1
    ),
    "scale_invariant_grid": lambda p: sm.scale_invariant_grid(
        (3, 4), p[0] + 3, sigma=p[1] + 2, mu=p[2]
    ),
    "logn": lambda p: sm.logn(5, s=p[0] + 1),
    "ssmax": lambda p: sm.ssmax(p[0] + 1, p[1]),
}


@pytest.mark.parametrize("name", list(LEARNABLE))
@pytest.mark.parametrize("shape", [(2,), (1,)])
def test_gradients_of_captured_parameters(name, shape):
    q, k, v = (x.requires_grad_() for x in qkv(7, heads=2, size=3))
    parameters = [torch.rand(shape, dtype=torch.float64, requires_grad=True) for _ in range(4)]

    def run(q, k, v, *parameters):
        mod = LEARNABLE[name](parameters)
        return sm.dense_attention(q, k, v, mod, sm.causal)

    used = set(
        torch.autograd.grad(run(q, k, v, *parameters).sum(), parameters, allow_unused=True)
    ) - {None}
    assert torch.autograd.gradcheck(run, (q, k, v, *parameters))
    assert used
    assert all(grad.isfinite().all() and grad.abs().max() > 0 for grad in used)


def test_learnable_parameters_are_those_of_the_catalogue():
    """Every parameter listed as learnable takes a tensor of shape (H,) that requires grad."""
    needed = {"ssmax": {"s": 1.0}}
    for mechanism in sm.catalogue:
        for parameter in mechanism.learnable:
            value = torch.full((2,), 1.3, requires_grad=True)
            first = {"scale_invariant_grid": ((2, 2),)}.get(mechanism.name, ())
            mod = getattr(sm, mechanism.name)(
                *first, **{**needed.get(mechanism.name, {}), parameter: value}
            )
            out = sm.dense_attention(*qkv(4, torch.float32, 2), mod, sm.causal)
            (grad,) = torch.autograd.grad(out.square().sum(), value)
            assert grad.isfinite().all()


def test_the_law_of_the_paper():
    """Values of the paper's default law, and its two moments by quadrature for other constants."""
    t = torch.tensor([0.0, 1, 10, 100, 1000, 65536], dtype=torch.float64)
    a_t, m_t = sm.scale_invariant_affine(t)
    assert a_t.tolist() == pytest.approx([1, 1.0912, 1.5448, 2.4074, 3.1985, 4.3100], abs=1e-4)
    assert m_t.tolist() == pytest.approx(
        [0, -0.1906, -1.3863, -4.7958, -9.2302, -17.5758], abs=1e-4
    )

    nodes, weights = np.polynomial.hermite_e.hermegauss(128)
    for alpha, beta, sigma, mu, d in [
        (2.0, 3.0, 1.0, 0.0, 1),
        (1.5, 4.0, 2.0, -1.0, 2),
        (0.2, 0.1, 0.7, 3.0, 3),
    ]:
        a_t, m_t = sm.scale_invariant_affine(
            t, 10.0, alpha=alpha, beta=beta, sigma=sigma, mu=mu, ndim=d
        )
        for a, m, distance in zip(a_t.tolist(), m_t.tolist(), t.tolist(), strict=True):
            # The law speaks of logits of mean mu and deviation sigma, shifted back by mu.
            logits = a * (mu + sigma * nodes) + m - mu
            density = np.exp(logits) * weights / math.sqrt(2 * math.pi)
            target = (distance / 10 + 1) ** -d
            assert density.sum() == pytest.approx(alpha * target, rel=1e-9)
            assert (density * logits).sum() == pytest.approx(beta * target, rel=1e-6, abs=1e-12)


def test_defaults_leave_the_score_at_distance_zero():
    for sigma, mu in [(1.0, 0.0), (3.0, -7.0)]:
        a_0, m_0 = sm.scale_invariant_affine(torch.zeros(1), sigma=sigma, mu=mu)
        assert a_0.item() == pytest.approx(1)
        assert m_0.item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
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
        (lambda: sm.alibi(0), ValueError, "num_heads must be at least 1"),
        (lambda: sm.alibi(2.0), TypeError, "num_heads"),
        (lambda: sm.logn(1), ValueError, "train_length"),
        (lambda: sm.logn(torch.tensor([3.0, 4.0])), ValueError, "train_length"),
        (lambda: sm.ssmax(None), TypeError, "s must be"),
    ],
)
def test_bad_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
