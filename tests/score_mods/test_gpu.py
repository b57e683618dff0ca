"""Compiled attention on a CUDA device against dense float64: values and every gradient."""

import math

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import score_mods as sm
from score_mods import fast
from score_mods.kernel_options import flash_is_installed
from score_mods.scale_invariant import _boundary, _law

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HALF = [torch.bfloat16, torch.float16]
DEFAULTS = {"tau": 10.0, "alpha": None, "beta": None, "sigma": 1.0, "mu": 0.0, "ndim": 1}
TAUS = [2.0, 10.0, 50.0, 300.0]
LAWS = [
    {},
    {"tau": 300.0, "sigma": 2.0, "mu": -1.5},
    {"tau": 7.0, "alpha": 2.0, "beta": 3.0, "ndim": 2},
    {"tau": torch.tensor(TAUS), "sigma": torch.tensor([0.5, 1.0, 2.0, 4.0])},
]


def inputs(T, dtype, T_q=None, H=4, H_kv=None, D=64, B=1):
    """Queries, keys, values and the gradient of the output, drawn in `dtype`."""
    heads, length = H_kv or H, T_q or T
    shapes = [(B, H, length, D), (B, heads, T, D), (B, heads, T, D), (B, H, length, D)]
    return [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]


def with_gradients(function, q, k, v, grad, *more):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, *more)]
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def plain(q, k, v, score_mod, mask_mod):
    """The formula in the inputs' own precision, whose error bounds what a fast path may have."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    index = (
        torch.tensor(0, device="cuda"),
        torch.arange(q.shape[1], device="cuda")[:, None, None],
        torch.arange(q.shape[2], device="cuda")[:, None],
        torch.arange(k.shape[2], device="cuda"),
    )
    score = (q @ k.mT * q.shape[-1] ** -0.5).float()
    score = sm.to_device(score_mod, "cuda")(score, *index)
    visible = sm.to_device(mask_mod, "cuda")(*index)
    return torch.where(visible, score, -math.inf).softmax(-1).to(v.dtype) @ v


def error(got, want):
    difference = got.double() - want
    return difference.abs().max().item(), difference.square().mean().sqrt().item()


def assert_within_budget(score_mod, mask_mod, q, k, v, grad, backend="triton"):
    """At most twice the error of the plain formula: maximum and RMS, output and gradients."""
    how = {"enable_gqa": q.shape[1] != k.shape[1], "backend": backend}
    got = with_gradients(lambda *x: sm.attention(*x, score_mod, mask_mod, **how), q, k, v, grad)
    low = with_gradients(lambda *x: plain(*x, score_mod, mask_mod), q, k, v, grad)
    exact = with_gradients(
        lambda *x: sm.dense_attention(*x, score_mod, mask_mod),
        *(x.double() for x in (q, k, v)),
        grad,
    )
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), got, low, exact, strict=True):
        for kind, mine, allowed in zip(("max", "rms"), error(a, c), error(b, c), strict=True):
            assert mine <= 2 * allowed + 1e-5, (name, kind, mine, allowed)


@pytest.mark.parametrize("options", LAWS, ids=range(len(LAWS)))
def test_the_instructions_at_every_distance(options):
    """The compiled fast form, alone, against the law in float64, within its error bound."""
    parameters = _law(**DEFAULTS | options)
    a0_squared, m0 = _boundary(parameters)
    law = (*parameters[:3], a0_squared, m0)
    ndim = options.get("ndim", 1)
    constants = [None if x is None else x.cuda() for x in fast.fast_constants(ndim, *law)]
    bound = fast.error_bound(ndim, law[0], a0_squared)

    @torch.compile
    def change(score, t, h):
        return fast.fast_mod(constants, score, h, t.float())

    assert fast.has_fast_form(ndim, *law)
    t = torch.arange(2**20 + 1, device="cuda", dtype=torch.int32)
    for h in range(law[0].numel()):
        head = {n: x[h].item() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        a_t, m_t = sm.scale_invariant_affine(t.double(), **head)
        for score in (0.0, -20.0):
            exact = a_t * score + m_t
            got = change(torch.full_like(t, score, dtype=torch.float32), t, torch.full_like(t, h))
            size = a_t * abs(score - head.get("mu", 0)) + 2 * m_t.abs() + 2 * a0_squared.max()
            assert ((got - exact).abs() <= 2 * bound * size).all()
            # The twin: one token more is outside the bound where the law bends most.
            assert ((got[1:11] - exact[:10]).abs() > 2 * bound * size[:10]).all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("D", [64, 128])
def test_values_and_gradients_at_every_length(dtype, D):
    for T in (1, 7, 63, 129, 257, 1000, 1024):
        assert_within_budget(sm.scale_invariant(), sm.causal, *inputs(T, dtype, D=D))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("D", [64, 128])
def test_values_and_gradients_at_16k(dtype, D):
    assert_within_budget(sm.scale_invariant(), sm.causal, *inputs(16384, dtype, H=1, D=D))


@pytest.mark.parametrize("options", LAWS[1:], ids=range(1, len(LAWS)))
def test_values_and_gradients_of_other_laws(options):
    assert_within_budget(sm.scale_invariant(**options), sm.causal, *inputs(300, torch.bfloat16))


needs_flash = pytest.mark.skipif(not flash_is_installed(), reason="needs flash-attn-4")


@needs_flash
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("D", [64, 128])
def test_the_flash_backend(dtype, D):
    mod = sm.scale_invariant()
    for T in (128, 129, 300, 1000, 1024, 4096):
        assert_within_budget(mod, sm.causal, *inputs(T, dtype, D=D), backend="flash")


@needs_flash
@pytest.mark.parametrize("options", LAWS[1:], ids=range(1, len(LAWS)))
def test_the_flash_backend_with_other_laws(options):
    mod = sm.scale_invariant(**options)
    assert_within_budget(mod, sm.causal, *inputs(512, torch.bfloat16), backend="flash")


@needs_flash
@pytest.mark.parametrize(
    ("mod", "H_kv"), [(None, 2), (sm.alibi(4), 4), (sm.with_offset(sm.scale_invariant(), 7), 4)]
)
def test_the_flash_backend_with_other_mods_and_grouped_queries(mod, H_kv):
    same = mod or (lambda score, b, h, q_idx, kv_idx: score)
    given = inputs(512, torch.bfloat16, H_kv=H_kv)
    how = {"enable_gqa": H_kv != 4, "backend": "flash"}
    got = with_gradients(lambda *x: sm.attention(*x, mod, sm.causal, **how), *given)
    low = with_gradients(lambda *x: plain(*x, same, sm.causal), *given)
    exact = with_gradients(
        lambda *x: sm.dense_attention(*x, mod, sm.causal),
        *(x.double() for x in given[:3]),
        given[3],
    )
    for a, b, c in zip(got, low, exact, strict=True):
        assert error(a, c)[1] <= 2 * error(b, c)[1] + 1e-5


@needs_flash
def test_flash_without_a_mask():
    given = inputs(512, torch.bfloat16)

    def every_key(b, h, q_idx, kv_idx):
        return kv_idx >= 0

    out = sm.attention(*given[:3], sm.scale_invariant(), backend="flash")
    exact = sm.dense_attention(*(x.double() for x in given[:3]), sm.scale_invariant())
    low = plain(*given[:3], sm.scale_invariant(), every_key)
    assert error(out, exact)[1] <= 2 * error(low, exact)[1]


@needs_flash
def test_flash_is_compiled_for_every_law():
    q, k, v, _ = inputs(256, torch.bfloat16)
    for tau in (10.0, 20.0, 40.0):
        out = sm.attention(q, k, v, sm.scale_invariant(tau), sm.causal, backend="flash")
        other = sm.attention(q, k, v, sm.scale_invariant(tau), sm.causal, backend="triton")
        assert (out - other).abs().max() < 2e-2


@pytest.mark.parametrize(
    "mask",
    [
        sm.sliding_window(200),
        sm.prefix_lm(150),
        sm.and_masks(sm.causal, sm.document(torch.arange(600) // 170)),
        sm.or_masks(sm.causal, sm.sliding_window(600)),
    ],
    ids=["window", "prefix", "documents", "either"],
)
def test_values_and_gradients_under_other_masks(mask):
    assert_within_budget(sm.scale_invariant(), mask, *inputs(600, torch.bfloat16))


def test_both_sides_of_the_diagonal():
    def every_key(b, h, q_idx, kv_idx):
        return kv_idx >= 0

    q, k, v, grad = inputs(300, torch.bfloat16)
    assert_within_budget(sm.scale_invariant(), every_key, q, k, v, grad)
    masked = sm.attention(q, k, v, sm.scale_invariant(), every_key)
    # No mask at all is the same, by other blocks.
    assert (sm.attention(q, k, v, sm.scale_invariant()) - masked).abs().max() < 2e-2


@pytest.mark.parametrize("shape", [(20, 30), (7, 8, 9)], ids=str)
def test_values_and_gradients_on_a_grid(shape):
    def every_key(b, h, q_idx, kv_idx):
        return kv_idx >= 0

    given = inputs(math.prod(shape), torch.bfloat16)
    assert_within_budget(sm.scale_invariant_grid(shape, 3.0), every_key, *given)


def test_grouped_queries():
    assert_within_budget(
        sm.scale_invariant(torch.tensor(TAUS)), sm.causal, *inputs(300, torch.bfloat16, H_kv=2)
    )


@pytest.mark.parametrize(
    "mod", [sm.alibi(4), sm.logn(), sm.ssmax(0.43), sm.compose(sm.logn(50), sm.alibi(4))]
)
def test_other_mods(mod):
    assert_within_budget(mod, sm.causal, *inputs(300, torch.bfloat16))


def test_the_budget_would_see_a_distance_off_by_one():
    q, k, v, _ = inputs(300, torch.bfloat16)
    wrong = sm.with_offset(sm.scale_invariant(), 1)
    exact = sm.dense_attention(q.double(), k.double(), v.double(), sm.scale_invariant(), sm.causal)
    off = error(sm.attention(q, k, v, wrong, sm.causal), exact)
    assert off[1] > 2 * error(plain(q, k, v, sm.scale_invariant(), sm.causal), exact)[1]


@pytest.mark.parametrize("dtype", HALF)
def test_gradients_of_learnable_parameters(dtype):
    q, k, v, grad = inputs(300, dtype)
    tau = torch.tensor(TAUS, device="cuda")
    sigma = torch.tensor([0.5, 1.0, 2.0, 4.0], device="cuda")

    def by(attend):
        def function(q, k, v, tau, sigma):
            return attend(q, k, v, sm.scale_invariant(tau, sigma=sigma), sm.causal)

        return function

    got = with_gradients(by(sm.attention), q, k, v, grad, tau, sigma)
    low = with_gradients(by(plain), q, k, v, grad, tau, sigma)
    double = (x.double() for x in (q, k, v, grad, tau, sigma))
    exact = with_gradients(by(sm.dense_attention), *double)
    for name, a, b, c in zip(
        ("out", "dq", "dk", "dv", "dtau", "dsigma"), got, low, exact, strict=True
    ):
        # dtau and dsigma are sums over all pairs; four of them give no sound RMS of their own.
        slack = 5e-3 * c.abs().max().item() if name.startswith(("dt", "ds")) else 1e-7
        assert error(a, c)[1] <= 2 * error(b, c)[1] + slack, name


def test_log_sum_exp():
    q, k, v, _ = inputs(300, torch.bfloat16)
    _, lse = sm.attention(q, k, v, sm.scale_invariant(), sm.causal, return_lse=True)
    _, exact = sm.dense_attention(
        q.double(), k.double(), v.double(), sm.scale_invariant(), sm.causal, return_lse=True
    )
    assert (lse - exact).abs().max() < 1e-3


@pytest.mark.parametrize("H_kv", [4, 2])
def test_decoding_with_an_offset(H_kv):
    T = 1000
    q, k, v, _ = inputs(T, torch.bfloat16, H_kv=H_kv)
    mod = sm.compose(sm.scale_invariant(), sm.alibi(4))
    exact = sm.dense_attention(q.double(), k.double(), v.double(), mod, sm.causal)
    last = sm.attention(
        q[:, :, -1:],
        k,
        v,
        sm.with_offset(mod, T - 1),
        sm.with_offset(sm.causal, T - 1),
        enable_gqa=True,
    )
    wrong = sm.attention(q[:, :, -1:], k, v, mod, enable_gqa=True)
    assert error(last, exact[:, :, -1:])[1] < 5e-3
    assert error(wrong, exact[:, :, -1:])[1] > 5e-2


def code_of(mod, dtype):
    q, k, v, _ = inputs(256, dtype)
    _, code = run_and_get_code(sm.attention, q, k, v, mod, sm.causal)
    return "".join(code)


def test_half_precision_gets_the_fast_form_and_nothing_else_does():
    torch.set_float32_matmul_precision("highest")
    learnable = torch.tensor(TAUS, device="cuda", requires_grad=True)
    for dtype in HALF:
        assert "lg2.approx" in code_of(sm.scale_invariant(), dtype)
        assert "lg2.approx" in code_of(sm.scale_invariant_grid((16, 16)), dtype)
        assert "lg2.approx" in code_of(sm.logn(), dtype)
        assert "lg2.approx" not in code_of(sm.scale_invariant(sigma=0.1), dtype)
        assert "lg2.approx" not in code_of(sm.scale_invariant(learnable), dtype)
    assert "lg2.approx" not in code_of(sm.scale_invariant(), torch.float32)


def test_new_numbers_need_no_new_graph():
    torch._dynamo.utils.counters.clear()
    q, k, v, _ = inputs(256, torch.bfloat16)
    for tau, sigma in ((10.0, 1.0), (3.0, 2.0), (99.0, 0.7)):
        mod = sm.scale_invariant(tau, sigma=sigma)
        out = sm.attention(q, k, v, mod, sm.causal)
        exact = sm.dense_attention(q.double(), k.double(), v.double(), mod, sm.causal)
        assert error(out, exact)[1] < 5e-3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_joins_a_compiled_model():
    q, k, v, grad = inputs(256, torch.bfloat16)
    mod = sm.to_device(sm.scale_invariant(), "cuda")

    def model(q, k, v):
        return sm.attention(q, k, v, mod, sm.causal) * 2

    got = with_gradients(torch.compile(model, fullgraph=True), q, k, v, grad)
    want = with_gradients(model, q, k, v, grad)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() < 2e-2
