"""The public calls on a CUDA device: what only shows there, beside the kernels' own tests."""

import pytest
import torch

from power import (
    DecodeState,
    PowerAttention,
    power_attention,
    power_attention_prefill,
    power_attention_step,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def error(got, want):
    """Relative root mean square error."""
    got, want = got.double(), want.double()
    return ((got - want).pow(2).mean() / want.pow(2).mean()).sqrt()


@pytest.fixture
def inputs(draw):
    """Inputs on the device, bf16, of more than one chunk and no multiple of a tile."""
    return [x.cuda() for x in draw(2, 4, 2, 1000, 64, 64, torch.bfloat16)]


def test_the_reference_runs_there_too(draw, dense):
    inputs = [x.cuda().requires_grad_() for x in draw(length=40)]
    out = power_attention(*inputs, chunk_size=16, impl="reference")
    want = dense(*inputs)
    torch.testing.assert_close(out, want, atol=1e-12, rtol=1e-12)
    got = torch.autograd.grad(out.sin().sum(), inputs)
    expected = torch.autograd.grad(want.sin().sum(), inputs)
    torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("chunk_size", [None, 256])
def test_auto_is_the_kernels(chunk_size, inputs, dense):
    out = power_attention(*inputs, chunk_size=chunk_size)
    assert torch.equal(out, power_attention(*inputs, chunk_size=chunk_size, impl="triton"))
    assert error(out, dense(*inputs)) < 2.8e-3


def test_results_repeat_to_the_bit(inputs):
    runs = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out, state = power_attention(*leaves, chunk_size=256, return_state=True)
        grads = torch.autograd.grad(out.float().sin().sum() + state.s.sum(), leaves)
        runs.append((out, *state, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_an_ungated_state_over_a_split(inputs, dense):
    q, k, v, _ = inputs
    parts = [[x[:, :, span] for x in (q, k, v)] for span in (slice(0, 300), slice(300, 1000))]
    _, state = power_attention(*parts[0], return_state=True)
    out, last = power_attention(*parts[1], initial_state=state, return_state=True, chunk_size=256)
    # The kernels keep states in bf16: one rounding more than within a call, and two of last.s.
    assert error(out, dense(q, k, v)[:, :, 300:]) < 3.5e-3
    whole = power_attention(q, k, v, return_state=True)[1]
    assert error(last.s, whole.s) < 5e-3


@pytest.mark.parametrize(
    ("head_dim", "dtype", "impl"), [(80, torch.bfloat16, "auto"), (64, torch.float64, "triton")]
)
def test_what_the_kernels_do_not_take_is_an_error(head_dim, dtype, impl, draw):
    inputs = [x.cuda() for x in draw(1, 2, 1, 40, head_dim, head_dim, dtype)]
    with pytest.raises((TypeError, ValueError), match="reference"):
        power_attention(*inputs, impl=impl)


def test_a_compiled_layer_trains_alike():
    torch.manual_seed(0)
    layer = PowerAttention(128, 2, chunk_size=256).cuda()
    x = torch.randn(2, 600, 128, device="cuda")
    results = []
    for call in (layer, torch.compile(layer, fullgraph=True)):
        with torch.autocast("cuda", torch.bfloat16):
            out = call(x)
        results.append((out, *torch.autograd.grad(out.float().sin().sum(), layer.parameters())))
    for eager, compiled in zip(*results, strict=True):
        assert error(compiled, eager) < 2e-2


def test_a_step_in_a_cuda_graph(inputs, dense):
    prompt = 900
    _, state = power_attention_prefill(*(x[:, :, :prompt] for x in inputs))
    token = [x[:, :, :1].clone() for x in inputs]
    warm = DecodeState(*(x.clone() for x in state))
    power_attention_step(*token, warm, inplace=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = power_attention_step(*token, state, inplace=True)
    outs = []
    for t in range(prompt, 1000):
        for buffer, x in zip(token, inputs, strict=True):
            buffer.copy_(x[:, :, t : t + 1])
        graph.replay()
        outs.append(out.clone())
    assert error(torch.cat(outs, 2), dense(*inputs)[:, :, prompt:]) < 2.8e-3
    assert state.length.tolist() == [1000, 1000]
