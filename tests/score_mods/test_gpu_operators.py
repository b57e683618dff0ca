"""Two branches, sinks and other operators on a CUDA device: values and gradients, by float64."""

import pytest
import torch

import score_mods as sm

ROTARY = sm.rope(64)
T = 257


def gates(x):
    return -0.1 * torch.rand(1, 4, T, generator=torch.Generator().manual_seed(1)).to(x.device)


def level_scales(x):
    return 0.7 ** torch.arange(10.0, device=x.device).expand(1, 4, T, 10)


def sink(q, k, v, impl):
    out, lse = sm.attention(q, k, v, None, sm.causal, return_lse=True, impl=impl)
    return sm.attention_sink(torch.tensor([0.0, 1.0, 2.0, 3.0]))(out, lse)[0]


CASES = {
    "merge": lambda q, k, v, impl: sm.rerope(ROTARY, 100)(q, k, v, impl=impl),
    "single": lambda q, k, v, impl: sm.rerope(ROTARY, 100)(q, k, v, form="single", impl=impl),
    "few far keys": lambda q, k, v, impl: sm.streaming_llm(ROTARY, 100)(q, k, v, impl=impl),
    "sink": sink,
    "power": lambda q, k, v, impl: sm.attention(
        q, k, v, sm.power(2, gates(q)), sm.causal, impl=impl
    ),
    "log_linear": lambda q, k, v, impl: sm.weighted_sum(
        q, k, v, sm.log_linear(level_scales(q), gates(q)), sm.causal, signed=True, impl=impl
    ),
    "norm_attention": lambda q, k, v, impl: sm.norm_attention(q, k, v, impl=impl),
    "focused_attention": lambda q, k, v, impl: sm.focused_attention(q, k, v, impl=impl),
    "inline_attention": lambda q, k, v, impl: sm.inline_attention(q, k, v, impl=impl),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", list(CASES))
def test_compiled_agrees_with_float64(name):
    leaves = [torch.randn(1, 4, T, 64, device="cuda", requires_grad=True) for _ in range(3)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    grad = torch.randn(1, 4, T, 64, device="cuda")
    results = []
    for inputs, impl in ((leaves, "flex"), (exact, "dense")):
        out = CASES[name](*inputs, impl)
        results.append([out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))])
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() < 1e-4 * want.norm()
