import math

import pytest
import torch

import score_mods as sm

TEMPERATURES = [m for m in sm.catalogue if m.stage == "temperature"]
B, H, T, D = 2, 4, 30, 32


def made(mechanism):
    return eval(mechanism.example, {**vars(sm), "torch": torch})


def qkv(dtype=torch.float64):
    return [torch.randn(B, H, T, D, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("mechanism", TEMPERATURES, ids=lambda m: m.name)
def test_scaled_queries_equal_the_score_mod(mechanism):
    """With positions of each document, and from the middle of a sequence as in decoding."""
    mod = made(mechanism)
    q, k, v = qkv()
    expected = sm.dense_attention(q, k, v, mod, sm.causal)
    out = sm.dense_attention(sm.scale_queries(q, mod), k, v, None, sm.causal)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)

    tail = sm.scale_queries(q[:, :, 21:], mod, torch.arange(21, T))
    assert torch.equal(tail, sm.scale_queries(q, mod)[:, :, 21:])
    assert torch.equal(tail, sm.scale_queries(q[:, :, 21:], sm.with_offset(mod, 21)))

    positions = torch.stack([torch.arange(T) % 11, torch.arange(T) % 7])
    scaled = sm.scale_queries(q, mod, positions)
    expected = sm.dense_attention(q, k, v, sm.with_positions(mod, positions), sm.causal)
    out = sm.dense_attention(scaled, k, v, None, sm.causal)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert torch.equal(scaled, sm.scale_queries(q, sm.with_positions(mod, positions)))


def test_gradients_of_a_learned_factor_reach_it_through_the_queries():
    s = torch.rand(H, dtype=torch.float64, requires_grad=True)
    q, k, v = qkv()
    by_mod, by_queries = (
        torch.autograd.grad(out.square().sum(), s)[0]
        for out in (
            sm.dense_attention(q, k, v, sm.ssmax(s), sm.causal),
            sm.dense_attention(sm.scale_queries(q, sm.ssmax(s)), k, v, None, sm.causal),
        )
    )
    torch.testing.assert_close(by_mod, by_queries)


def test_asentmax_of_each_token_equals_its_paper():
    """One number at a time, with positions of each document."""
    q, beta, gamma = torch.randn(B, H, T, D).double(), *torch.randn(2, B, H, T).double()
    for positions in (None, torch.arange(T) + 5, torch.stack([torch.arange(T) % 7] * B)):
        out = sm.asentmax_queries(q, beta, gamma, positions, gamma_range=1.5, delta=0.7)
        at = torch.arange(T) if positions is None else positions
        for b, h, t in ((0, 0, 0), (1, 2, 9), (0, 3, 29)):
            n = at.expand(B, T)[b, t].item() + 1
            scale = math.log(1 + math.exp(beta[b, h, t]))
            power = 1.5 * math.tanh(gamma[b, h, t])
            factor = 0.7 + scale * math.log(n + 1) ** power
            torch.testing.assert_close(out[b, h, t], factor * q[b, h, t], rtol=0, atol=1e-12)


def test_asentmax_of_equal_tokens_is_its_fixed_form():
    """And its gradients reach what beta and gamma came from."""
    q, k, v = qkv()
    beta, gamma = (torch.randn(1, H, 1).double().requires_grad_() for _ in range(2))
    scaled = sm.asentmax_queries(q, *(x.expand(B, H, T) for x in (beta, gamma)))
    out = sm.dense_attention(scaled, k, v, None, sm.causal)
    fixed = torch.nn.functional.softplus(beta).flatten(), 2 * gamma.tanh().flatten()
    expected = sm.dense_attention(q, k, v, sm.asentmax_scale(*fixed), sm.causal)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    grads = (torch.autograd.grad(x.square().sum(), (beta, gamma)) for x in (out, expected))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want)


def test_low_precision_rounds_once():
    q = torch.randn(1, H, T, D).bfloat16()
    exact = sm.scale_queries(q.double(), sm.ssmax(0.4))
    out = sm.scale_queries(q, sm.ssmax(0.4))
    assert out.dtype == torch.bfloat16
    assert ((out - exact).abs() <= exact.abs() * 2**-8).all()


def test_infoscale_is_1_at_the_trained_length_and_bounded():
    one, q = torch.ones(()), torch.tensor([511, 2047, 32767])
    factor = sm.infoscale(512, 64)(one, None, torch.tensor(0), q, q)
    assert factor.tolist() == pytest.approx([1, 1.094, 1.251], abs=6e-4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda q: sm.scale_queries(q, sm.alibi(H)), ValueError, "only multiply rows, got alibi"),
        (
            lambda q: sm.scale_queries(q, sm.compose(sm.logn(), sm.alibi(H))),
            ValueError,
            "got logn then alibi",
        ),
        (lambda q: sm.scale_queries(q, sm.scale_invariant()), ValueError, "as a score_mod"),
        (lambda q: sm.scale_queries(q, sm.exempt_keys(sm.logn(), 1)), ValueError, "exempt_keys"),
        (
            lambda q: sm.scale_queries(q, sm.compose(sm.logn(), lambda s, b, h, i, j: s + 1)),
            ValueError,
            "logn then <lambda>",
        ),
        (lambda q: sm.scale_queries(q, lambda s, b, h, i, j: s), TypeError, "row temperature"),
        (lambda q: sm.scale_queries(q[0], sm.logn()), ValueError, "q must have shape"),
        (lambda q: sm.scale_queries(q, sm.ssmax(torch.ones(3))), ValueError, "3 heads"),
        (lambda q: sm.scale_queries(q, sm.logn(), torch.arange(3)), ValueError, "positions"),
        (
            lambda q: sm.asentmax_queries(q, q[..., 0], q[:, :1, :, 0]),
            ValueError,
            r"gamma must have shape \(2, 4, 30\), got \(2, 1, 30\)",
        ),
        (lambda q: sm.scale_queries([q], sm.logn()), TypeError, "q must be a floating tensor"),
        (lambda q: sm.scale_queries(q, sm.logn(), 3), TypeError, "positions must be an integer"),
        (lambda q: sm.asentmax_queries(q, 0.5, q[..., 0]), TypeError, "beta must be a floating"),
        (
            lambda q: sm.asentmax_queries(q, q[..., 0], q[..., 0], gamma_range=0),
            ValueError,
            "gamma_range must be a positive number",
        ),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.zeros(B, H, T, D))
