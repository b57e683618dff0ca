"""Operators that are no softmax, against float64 loops and the reference of power attention."""

import math

import numpy as np
import pytest
import torch

import score_mods as sm
from power import reference

H, D, D_V = 2, 4, 3


def qkv(T, T_q=None, H_kv=H, B=1, dtype=torch.float64):
    q = torch.randn(B, H, T_q or T, D, dtype=dtype)
    return q, torch.randn(B, H_kv, T, D, dtype=dtype), torch.randn(B, H_kv, T, D_V, dtype=dtype)


def gates(T, H=H, B=1):
    return -0.3 * torch.rand(B, H, T, dtype=torch.float64)


def elu_features(x):
    return np.where(x > 0, 1 + x, np.exp(x))


def sums(weight, v, causal=True):
    """Sum of w_j v_j and of w_j, over the keys up to the query's or over all."""
    weight = np.tril(weight) if causal else weight
    return weight @ v.numpy(), weight.sum(-1, keepdims=True)


def test_every_operator_of_the_catalogue_is_tested_here():
    names = {m.name for m in sm.catalogue if m.kind == "operator"}
    assert names == {
        "power",
        "linear",
        "log_linear",
        "norm_attention",
        "focused_attention",
        "inline_attention",
    }


@pytest.mark.parametrize("deg", [2, 4, 6])
@pytest.mark.parametrize("gated", [False, True])
def test_power_equals_the_reference_of_power_attention(deg, gated):
    """Gated, with a group of heads for a key, and rows whose weights are all zero."""
    q, k, v = qkv(29, H_kv=1, B=2)
    q[0, 1, 7] = 0
    log_g = gates(29, 1, 2) if gated else None
    out = sm.attention(q, k, v, sm.power(deg, log_g), sm.causal, enable_gqa=True, impl="dense")
    expected, _ = reference.quadratic(q, k, v, log_g, deg=deg)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    assert (out[0, 1, 7] == 0).all()
    # The twin: gates shifted by a token, or another degree, are far outside that.
    wrong = sm.power(deg, log_g.roll(1, -1)) if gated else sm.power(deg + 2)
    other = sm.attention(q, k, v, wrong, sm.causal, enable_gqa=True, impl="dense")
    assert (other - expected).abs().max() > 1e-3


def test_power_decodes_and_packs():
    T, ids = 23, torch.tensor([0] * 9 + [1] * 14)
    q, k, v = qkv(T)
    log_g = gates(T)
    mod, mask = sm.power(2, log_g), sm.and_masks(sm.causal, sm.document(ids))
    full = sm.dense_attention(q, k, v, mod, sm.causal)
    last = sm.dense_attention(
        q[:, :, -2:], k, v, sm.with_offset(mod, T - 2), sm.with_offset(sm.causal, T - 2)
    )
    torch.testing.assert_close(last, full[:, :, -2:], rtol=0, atol=1e-12)
    packed = sm.dense_attention(q, k, v, mod, mask)
    apart = [
        reference.quadratic(*(x[:, :, part] for x in (q, k, v, log_g)), deg=2)[0]
        for part in (slice(0, 9), slice(9, T))
    ]
    torch.testing.assert_close(packed, torch.cat(apart, 2), rtol=0, atol=1e-10)


def test_gradients_of_power():
    q, k, v = (x.requires_grad_() for x in qkv(6))
    log_g = gates(6).requires_grad_()
    run = lambda q, k, v, log_g: sm.dense_attention(q, k, v, sm.power(4, log_g), sm.causal)  # noqa: E731
    assert torch.autograd.gradcheck(run, (q, k, v, log_g))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("deg", [2, 10])
def test_gradients_are_finite_where_scores_vanish(dtype, deg):
    """Scores of zero, tiny ones next to the floor, rows of such and a row of zeros alone."""
    q, k, v = qkv(7, dtype=dtype)
    k[:, :, :2] *= 1e-39  # whose inverse float32 does not hold
    k[:, :, 6] = 0
    k[:, :, 2] *= 1e-29
    k[:, :, 3] *= 1e-31
    q[:, :, 4] = 0
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = sm.dense_attention(q, k, v, sm.power(deg), sm.causal)
    assert out.isfinite().all()
    for grad in torch.autograd.grad(out.square().sum(), (q, k, v)):
        assert grad.isfinite().all()


@pytest.mark.compiled
def test_compiled_power():
    q, k, v = (torch.randn(1, H, 129, 32) for _ in range(3))
    mod = sm.power(2, gates(129))
    exact = sm.dense_attention(q.double(), k.double(), v.double(), mod, sm.causal)
    assert (sm.attention(q, k, v, mod, sm.causal) - exact).abs().max() < 1e-5


def test_linear_takes_positive_scores_alone():
    q, k, v = qkv(17)
    scores = (q @ k.mT).numpy()
    total, mass = sums(np.maximum(scores, 0), v)
    expected = np.divide(total, mass, out=np.zeros_like(total), where=mass > 0)
    out = sm.dense_attention(q, k, v, sm.linear(), sm.causal)
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("signed", [False, True])
def test_weighted_sum(signed):
    q, k, v = qkv(17, H_kv=1)
    scores = (q @ k.mT).numpy() / D**0.5
    expected, _ = sums(scores if signed else np.maximum(scores, 0), v)
    out = sm.weighted_sum(
        q, k, v, sm.linear(), sm.causal, signed=signed, enable_gqa=True, impl="dense"
    )
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=1e-10)
    run = lambda *x: sm.weighted_sum(*x, sm.linear(), sm.causal, signed=signed, impl="dense")  # noqa: E731
    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in qkv(5)])


def fenwick_level(i, j):
    """The bucket of key j by the walk of a Fenwick tree: take away the lowest set bit."""
    if i == j:
        return 0
    end = i
    while end > 0:
        low = end & -end
        if end - low <= j < end:
            return low.bit_length()
        end -= low
    raise AssertionError


@pytest.mark.parametrize("T", [1, 7, 16, 23])
def test_log_linear_equals_the_walk_of_a_fenwick_tree(T):
    levels = 1 + math.ceil(math.log2(T))
    q, k, v = qkv(T, B=2)
    scales = torch.rand(2, H, T, levels, dtype=torch.float64)
    log_g = gates(T, B=2)
    total = log_g.cumsum(-1).numpy()
    weight = (q @ k.mT).numpy() / D**0.5
    for b, h, i, j in np.ndindex(2, H, T, T):
        if j <= i:
            weight[b, h, i, j] *= scales[b, h, i, fenwick_level(i, j)] * math.exp(
                total[b, h, i] - total[b, h, j]
            )
    expected, _ = sums(weight, v)
    mod = sm.log_linear(scales, log_g)
    out = sm.weighted_sum(q, k, v, mod, sm.causal, signed=True, impl="dense")
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=1e-10)
    last = sm.weighted_sum(
        q[:, :, -1:],
        k,
        v,
        sm.with_offset(mod, T - 1),
        sm.with_offset(sm.causal, T - 1),
        signed=True,
        impl="dense",
    )
    torch.testing.assert_close(last, out[:, :, -1:], rtol=0, atol=1e-12)


def test_log_linear_packs():
    T, parts = 23, (slice(0, 9), slice(9, 23))
    q, k, v = qkv(T)
    scales, log_g = torch.rand(1, H, T, 6, dtype=torch.float64), gates(T)
    positions = torch.cat([torch.arange(9), torch.arange(14)])
    mask = sm.and_masks(sm.causal, sm.document(torch.tensor([0] * 9 + [1] * 14)))
    mod = sm.log_linear(scales, log_g, positions)
    packed = sm.weighted_sum(q, k, v, mod, mask, signed=True, impl="dense")
    apart = [
        sm.weighted_sum(
            *(x[:, :, part] for x in (q, k, v)),
            sm.log_linear(scales[:, :, part], log_g[..., part]),
            sm.causal,
            signed=True,
            impl="dense",
        )
        for part in parts
    ]
    torch.testing.assert_close(packed, torch.cat(apart, 2), rtol=0, atol=1e-12)


def test_gradients_of_log_linear():
    q, k, v = (x.requires_grad_() for x in qkv(6))
    scales = (0.1 + torch.rand(1, H, 6, 4, dtype=torch.float64)).requires_grad_()
    log_g = gates(6).requires_grad_()

    def run(q, k, v, scales, log_g):
        mod = sm.log_linear(scales, log_g)
        return sm.weighted_sum(q, k, v, mod, sm.causal, signed=True, impl="dense")

    assert torch.autograd.gradcheck(run, (q, k, v, scales, log_g))


@pytest.mark.parametrize("causal", [True, False])
def test_norm_attention(causal):
    q, k, v = qkv(13, H_kv=1, B=2)
    weight = elu_features(q.numpy()) @ np.swapaxes(elu_features(k.numpy()), -1, -2)
    total, _ = sums(weight, v, causal)
    heads = total.transpose(0, 2, 1, 3).reshape(2, 13, H * D_V)
    heads /= np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-6)
    expected = heads.reshape(2, 13, H, D_V).transpose(0, 2, 1, 3)
    mask = sm.causal if causal else None
    out = sm.norm_attention(q, k, v, mask, enable_gqa=True, impl="dense")
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=1e-10)
    run = lambda *x: sm.norm_attention(*x, impl="dense")  # noqa: E731
    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in qkv(5)])


def test_focused_attention():
    q, k, v = qkv(13, H_kv=1)

    def features(x):
        out = np.empty_like(x)
        for index in np.ndindex(x.shape[:-1]):
            y = [max(c, 0.0) + 1e-6 for c in x[index]]
            cubes = [c**3 for c in y]
            out[index] = np.array(cubes) * math.hypot(*y) / math.hypot(*cubes)
        return out

    weight = features(q.numpy()) @ np.swapaxes(features(k.numpy()), -1, -2)
    total, mass = sums(weight, v, causal=False)
    out = sm.focused_attention(q, k, v, enable_gqa=True, impl="dense")
    np.testing.assert_allclose(out.numpy(), total / mass, rtol=0, atol=1e-10)
    run = lambda *x: sm.focused_attention(*x, sm.causal, impl="dense")  # noqa: E731
    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in qkv(5)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_focused_features_of_small_and_large_vectors(dtype):
    x = torch.randn(50, 8) * torch.logspace(-8, 8, 50)[:, None]
    out = sm.focused_features(x.to(dtype), 6.0)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double().norm(dim=-1),
        (torch.relu(x.to(dtype).double()) + 1e-6).norm(dim=-1),
        rtol=0.02 if dtype == torch.bfloat16 else 1e-5,
        atol=0,
    )


def test_inline_attention():
    T = 13
    q, k, v = qkv(T, H_kv=1)
    scores = (q @ k.mT).numpy() / D**0.5
    weight = (scores - scores.mean(-1, keepdims=True) + 1) / T
    assert (weight < 0).any()
    np.testing.assert_allclose(weight.sum(-1), 1)
    expected, _ = sums(weight, v, causal=False)
    out = sm.inline_attention(q, k, v, enable_gqa=True, impl="dense")
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=1e-10)
    run = lambda *x: sm.inline_attention(*x, impl="dense")  # noqa: E731
    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in qkv(5)])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: sm.power(3), ValueError, "deg must be even, got 3"),
        (
            lambda: sm.weighted_sum(*qkv(3), sm.linear(), signed="no", impl="dense"),
            TypeError,
            "signed must be a bool, got str",
        ),
        (lambda: sm.power(0), ValueError, "deg must be at least 2"),
        (lambda: sm.power(2.0), TypeError, "deg must be an int"),
        (lambda: sm.power(2, torch.zeros(3)), ValueError, "log_g must have shape"),
        (lambda: sm.log_linear(torch.ones(1, 2, 9, 4)), ValueError, r"L = 4 for a position of 8"),
        (
            lambda: sm.log_linear(torch.ones(1, 2, 9, 5), positions=torch.ones(9)),
            TypeError,
            "positions must be an integer tensor, got torch.float32",
        ),
        (
            lambda: sm.log_linear(torch.ones(1, 2, 9, 5), positions=torch.arange(8)),
            ValueError,
            r"positions must have shape \(9,\), got \(8,\)",
        ),
        (
            lambda: sm.norm_attention(None, *qkv(3)[1:]),
            TypeError,
            "q must be a tensor, got NoneTy",
        ),
        (lambda: sm.focused_attention(*qkv(3)[:2], 1), TypeError, "v must be a tensor, got int"),
        (lambda: sm.inline_attention(*qkv(3), scale="1"), TypeError, "scale must be a number"),
        (lambda: sm.focused_features([1.0]), TypeError, "x must be a floating tensor, got list"),
        (lambda: sm.focused_features(torch.ones(2, 0)), ValueError, "x must have no empty axis"),
        (lambda: sm.log_linear(torch.ones(9, 5)), ValueError, "level_scales must have shape"),
        (lambda: sm.log_linear(torch.zeros(1, 1, 2, 3)), ValueError, "level_scales .* got 0$"),
        (lambda: sm.power(2, torch.ones(1, 1, 3)), ValueError, "log_g must be <= 0"),
        (lambda: sm.log_linear([1.0]), TypeError, "level_scales must be a floating tensor"),
        (
            lambda: sm.dense_attention(*qkv(9), sm.log_linear(torch.ones(1, 2, 8, 4))),
            ValueError,
            "score_mod must reach to a batch of 1, 9 queries",
        ),
        (
            lambda: sm.dense_attention(*qkv(9), sm.power(2, gates(9, 3))),
            ValueError,
            "for 3 heads",
        ),
        (
            lambda: sm.log_linear(torch.ones(1, 2, 9, 5), gates(9, 3)),
            ValueError,
            r"one number of heads, got \[2, 3\]",
        ),
        (lambda: sm.norm_attention(*qkv(3), eps=0), ValueError, "eps must be a positive number"),
        (lambda: sm.norm_attention(*qkv(3, dtype=torch.float32)), ValueError, 'impl="dense"'),
        (lambda: sm.focused_features(torch.ones(3), -1), ValueError, "deg must be a positive"),
        (
            lambda: sm.weighted_sum(*qkv(3), sm.causal, impl="dense"),
            TypeError,
            "score_mod must be a score_mod",
        ),
    ],
)
def test_bad_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
