"""Power and linear attention as mixers: against the dense operators, and counted products."""

import pytest
import torch
from torch.nn import functional as F

import score_mods as sm
from benchmarks.recurrent_mixers import (
    LinearAttention,
    PowerMixer,
    equal_window,
    linear_attention,
    mixing_flops,
)
from power import PowerAttention

ROTARY = sm.half_truncated_rope(16)


def dense(q, k, v, mod, scale=None):
    return sm.dense_attention(q, k, v, mod, sm.causal, scale=scale)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 700])
def test_linear_attention_is_its_definition(length):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, length, 8, dtype=torch.float64, requires_grad=True)
    log_g = F.logsigmoid(torch.randn(2, 3, length, dtype=torch.float64) + 2).requires_grad_()
    mod = sm.compose(sm.linear(), sm.forgetting_gate(log_g))
    want = dense(1 + F.elu(q), 1 + F.elu(k), v, mod, scale=1.0)
    got = linear_attention(q, k, v, log_g)
    torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-9)
    leaves = [q, k, v, log_g]
    grads = (torch.autograd.grad(out.sin().sum(), leaves) for out in (got, want))
    torch.testing.assert_close(*grads, atol=1e-9, rtol=1e-7)


def test_strong_gates_do_not_overflow():
    q, k, v = torch.randn(3, 1, 1, 600, 8)
    assert linear_attention(q, k, v, torch.full((1, 1, 600), -50.0)).isfinite().all()


@pytest.mark.parametrize("mixer", [PowerMixer, LinearAttention])
def test_a_mixer_is_attention_of_its_heads(mixer):
    torch.manual_seed(0)
    layer = mixer(48, 16, ROTARY, horizons=(4, 64)).double()
    x = torch.randn(2, 300, 48, dtype=torch.float64)
    angles = ROTARY.cos_sin(torch.arange(300), torch.float64)
    q, k, v, *_ = layer.heads(x, angles, None)
    log_g = F.logsigmoid(layer.gate(x)).mT
    for y in (q, k):  # QK-norm, which rotating keeps
        torch.testing.assert_close(y.square().mean(-1), torch.ones(2, 3, 300).double())
    if mixer is PowerMixer:
        out = dense(q, k, v, sm.power(2, log_g))
    else:
        mod = sm.compose(sm.linear(), sm.forgetting_gate(log_g.float().double()))
        out = dense(1 + F.elu(q), 1 + F.elu(k), v, mod, scale=1.0)
    want = layer.o_proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, angles, None), want, atol=1e-5, rtol=1e-4)
    horizons = 1 / (1 - layer.gate.bias.sigmoid())
    expected = 4 * (64 / 4) ** ((torch.arange(3).double() + 0.5) / 3)
    torch.testing.assert_close(horizons, expected, atol=1e-3, rtol=1e-4)


@pytest.fixture(scope="module")
def state():
    """The state of one head of 64 channels."""
    return PowerAttention(64, 1).prefill(torch.randn(1, 300, 64))[1]


def test_the_window_holds_what_powers_state_holds(state):
    numbers = state.s.numel() + state.z.numel()
    assert abs(2 * 64 * equal_window(64) - numbers) <= 2 * 64


@pytest.mark.parametrize("method", ["softmax", "scale_invariant", "window", "linear", "power"])
@pytest.mark.parametrize("length", [100, 4096])
def test_flops_are_those_of_the_products(method, length, state):
    """Counted pair by pair, chunk by chunk."""
    D = 64
    if method in ("softmax", "scale_invariant", "window"):
        width = equal_window(D) if method == "window" else length
        pairs = sum(min(i + 1, width) for i in range(length))
        total = 2 * 2 * D * pairs
    else:
        chunk = min(256 if method == "linear" else 1024, length)
        features = D if method == "linear" else state.z.numel()
        pairs = sum(i % chunk + 1 for i in range(length))
        states = 2 * 2 * features * (D + 1) * length if chunk < length else 0
        total = 2 * 2 * D * pairs + states
    assert mixing_flops(method, D, length) == pytest.approx(total / length)


def test_refuses_another_method():
    with pytest.raises(ValueError, match="method must be softmax, scale_invariant, window,"):
        mixing_flops("rwkv", 64, 100)
