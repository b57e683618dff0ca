"""The fast form against float64, at every distance to 2^20."""

import warnings

import pytest
import torch

import score_mods as sm
from score_mods import fast
from score_mods.scale_invariant import _boundary, _law

U = 2.0**-24
LAWS = [
    {},
    {"tau": 0.1},
    {"tau": 1e5},
    {"sigma": 0.4},
    {"sigma": 3.0, "mu": -6.0},
    {"ndim": 3},
    {"tau": 7.3, "alpha": 2.0, "beta": 3.0, "ndim": 2},
    {"tau": torch.tensor([2.0, 50.0]), "sigma": torch.tensor([0.7, 2.0])},
]


def law(tau=10.0, alpha=None, beta=None, sigma=1.0, mu=0.0, ndim=1):
    parameters = _law(tau, alpha, beta, sigma, mu, ndim)
    return ndim, *parameters[:3], *_boundary(parameters)


def changed(constants, score, t, h=0):
    return fast.fast_mod(constants, score, torch.tensor(h), t.float())


def relative_error(constants, t, options, h=0):
    """Of the slope in the score, which is a_t, against the law in float64."""
    score = torch.zeros(len(t), requires_grad=True)
    (a_t,) = torch.autograd.grad(changed(constants, score, t, h).sum(), score)
    head = {n: v[h] if isinstance(v, torch.Tensor) else v for n, v in options.items()}
    exact, _ = sm.scale_invariant_affine(t.double(), **head)
    return (a_t.double() / exact - 1).abs().max().item()


@pytest.fixture(params=[-1, 0, 1], ids=["low", "rounded", "high"])
def instructions(request, monkeypatch):
    """The two instructions with the largest error that their documents allow, of either sign."""
    sign = request.param

    def log2(y):
        exact = y.double().log2()
        return (exact + sign * 4 * U * exact.abs().clamp(min=1)).float()

    def root(y):
        return (y.double().sqrt() * (1 + sign * 2 * U)).float()

    monkeypatch.setattr(fast, "_approx_log2", log2)
    monkeypatch.setattr(fast, "_approx_sqrt", root)


@pytest.mark.parametrize("options", LAWS, ids=str)
@pytest.mark.usefixtures("instructions")
def test_error_at_every_distance_is_within_the_bound(options):
    t = torch.arange(2**20 + 1)
    ndim, tau, _, _, a0_squared, _ = given = law(**options)
    bound = fast.error_bound(ndim, tau, a0_squared)
    assert bound < 5e-5
    constants = fast.fast_constants(*given)
    for h in range(tau.numel()):
        assert relative_error(constants, t, options, h) <= bound


def test_the_bound_of_the_default_arguments():
    ndim, tau, _, _, a0_squared, _ = law()
    assert fast.error_bound(ndim, tau, a0_squared) == pytest.approx(6.3e-6, rel=0.01)


def test_error_beyond_grows_as_the_logarithm():
    given = law()
    t = torch.cat([2**20 + torch.arange(4096), 2**24 - torch.arange(4096)])
    bound = fast.error_bound(given[0], given[1], given[4], distance=2**24)
    assert bound < 6.3e-6 * 24 / 20
    assert relative_error(fast.fast_constants(*given), t, {}) <= bound


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_constant_off_by_a_ten_thousandth_would_be_seen(wrong):
    given = law()
    constants = list(fast.fast_constants(*given))
    constants[wrong] = constants[wrong] * (1 + 1e-4)
    assert relative_error(constants, torch.arange(2**20 + 1), {}) > fast.error_bound(
        given[0], given[1], given[4]
    )


@pytest.mark.parametrize("options", LAWS[:-1], ids=str)
def test_the_whole_change_of_the_score(options):
    given = law(**options)
    t = torch.tensor([0, 1, 2, 9, 100, 12345, 2**20])
    a_t, m_t = sm.scale_invariant_affine(t.double(), **options)
    for score in (-30.0, 0.0, 7.5):
        got = changed(fast.fast_constants(*given), torch.tensor(score), t)
        assert got.dtype == torch.float32
        size = a_t * (abs(score) + abs(options.get("mu", 0.0))) + m_t.abs() + given[4]
        assert ((got - (a_t * score + m_t)).abs() <= 1e-5 * size).all()


def test_half_precision_scores_are_not_rounded_again():
    constants = fast.fast_constants(*law())
    t, score = torch.arange(1000), torch.randn(1000).bfloat16()
    assert torch.equal(changed(constants, score, t), changed(constants, score.float(), t))


def test_where_there_is_a_fast_form(monkeypatch):
    assert not fast.has_fast_form(*law()) or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    learnable = torch.tensor([10.0, 20.0], requires_grad=True)
    assert fast.has_fast_form(*law())
    assert fast.has_fast_form(*law(tau=torch.tensor([10.0, 20.0])))
    assert fast.has_fast_form(*law(sigma=0.36))
    assert not fast.has_fast_form(*law(sigma=0.3))
    assert not fast.has_fast_form(*law(tau=learnable))
    assert not fast.has_fast_form(*law(sigma=learnable))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not fast.has_fast_form(*law())


@pytest.mark.parametrize(
    ("operator", "exact"),
    [(fast._approx_log2, torch.log2), (fast._approx_sqrt, torch.sqrt)],
)
def test_the_operators_are_the_functions_off_the_gpu(operator, exact):
    x = torch.rand(3, 4) + 0.5
    assert torch.equal(operator(x), exact(x))
    assert torch.equal(torch.vmap(operator, in_dims=1, out_dims=1)(x), exact(x))


def test_logarithm_of_positions():
    n = torch.arange(1, 2**20 + 1)
    exact = n.double().log()
    error = (fast.fast_log(n) - exact).abs()
    assert (error <= 2.0**-21 * exact.clamp(min=1)).all()


@pytest.mark.parametrize("width", [1, 3, 7, 64, 1000, 4096])
def test_distance_on_a_grid_of_two_axes(width):
    """From one corner and from the middle to every position that fits."""
    index = torch.arange(2**22)
    axes = fast.grid_axes((-(-(2**22) // width), width))
    for origin in (0, 2**21 + 5):
        rows, columns = index // width - origin // width, index % width - origin % width
        exact = (rows**2 + columns**2).double().sqrt()
        got = fast.grid_distance(axes, torch.tensor(origin), index)
        assert ((got - exact).abs() <= 3 * U * exact).all()


def test_distance_on_a_grid_of_three_axes():
    shape = (5, 6, 7)
    place = torch.cartesian_prod(*(torch.arange(extent) for extent in shape)).double()
    index = torch.arange(5 * 6 * 7)
    got = fast.grid_distance(fast.grid_axes(shape), index[:, None], index)
    assert (got - torch.cdist(place, place)).abs().max() < 1e-5


def test_unfused_flex_attention_takes_it():
    q = torch.randn(1, 2, 40, 16)
    constants = fast.fast_constants(*law())

    def mod(score, b, h, q_idx, kv_idx):
        return fast.fast_mod(constants, score, h, (q_idx - kv_idx).float().abs())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is unfused, once for a process
        out = torch.nn.attention.flex_attention.flex_attention(q, q, q, score_mod=mod)
    expected = sm.dense_attention(*(q.double(),) * 3, sm.scale_invariant())
    assert (out - expected).abs().max() < 1e-5
