"""The operator under what PyTorch may put around it; on a CPU the reference runs in it."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from power import operator
from power.attention import power_attention
from power.decode import power_attention_prefill
from power.feature_map import PowerState


def arguments(draw, gated=True, with_state=False, cu_seqlens=None, chunk_size=16):
    q, k, v, log_g = (x.requires_grad_() for x in draw(batch=1 if cu_seqlens else 2, length=40))
    sequences = len(cu_seqlens) - 1 if cu_seqlens else 2
    generator = torch.Generator().manual_seed(1)
    s, z = (
        torch.rand(sequences, 2, 64, *rest, generator=generator, dtype=torch.float64)
        for rest in ([6], [])
    )
    state = [s.requires_grad_(), z.requires_grad_()] if with_state else []
    bounds = torch.tensor(cu_seqlens) if cu_seqlens else None
    return q, k, v, log_g if gated else None, state, bounds, 2, 0.3, chunk_size


@pytest.mark.parametrize("return_state", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"gated": False, "chunk_size": None},
        {"with_state": True},
        {"with_state": True, "gated": False},
        {"with_state": True, "cu_seqlens": [0, 7, 7, 40]},
    ],
)
def test_opcheck(options, return_state, draw):
    torch.library.opcheck(
        operator.attention, (*arguments(draw, **options), return_state, "reference")
    )


def test_opcheck_of_the_backward_pass(draw):
    q, k, v, *rest = arguments(draw, with_state=True)
    grads = [torch.ones(2, 4, 40, 6, dtype=torch.float64), *(torch.ones_like(x) for x in rest[1])]
    arrays = [x.detach() for x in (q, k, v, rest[0])], [x.detach() for x in rest[1]]
    args = (grads, [], *arrays[0], arrays[1], *rest[2:], True, "reference")
    torch.library.opcheck(operator.attention_backward, args)


def loss(q, k, v, log_g, s, z):
    out, state = power_attention(
        2 * q, k, v, log_g, initial_state=PowerState(s, z), return_state=True, chunk_size=16
    )
    return out.sin().sum() + state.s.mean()


def test_compile_of_the_whole_graph(draw):
    q, k, v, log_g, (s, z), *_ = arguments(draw, with_state=True)
    inputs = (q, k, v, log_g, s, z)
    want = torch.autograd.grad(loss(*inputs), inputs)
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*inputs), inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_compile_once_for_all_lengths(draw):
    torch.compiler.reset()
    compiled = torch.compile(power_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (20, 33, 57):
            inputs = draw(length=length)
            want = power_attention(*inputs, chunk_size=16)
            assert torch.equal(compiled(*inputs, chunk_size=16), want)


@pytest.mark.parametrize("call", [power_attention, power_attention_prefill])
def test_compile_once_for_all_lengths_and_scales(call, draw):
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for length, scale in ((70, 0.3), (129, -0.7)):
        inputs = draw(length=length)
        got, want = compiled(*inputs, scale=scale), call(*inputs, scale=scale)
        torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


def test_errors_under_compile_are_the_same(draw):
    q, k, v, log_g = draw()
    compiled = torch.compile(power_attention, backend="eager")
    with pytest.raises(ValueError, match="log_g must be <= 0"):
        compiled(q, k, v, -log_g)


def test_export_with_a_dynamic_length(draw):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v, log_g):
            return power_attention(q, k, v, log_g, chunk_size=16, return_state=True)

    length = torch.export.Dim("length", min=2, max=100_000)
    program = torch.export.export(Attention(), draw(), dynamic_shapes=({2: length},) * 4)
    assert "power.attention" in str(program.graph)
    inputs = draw(length=77)
    out, state = program.module()(*inputs)
    want, want_state = power_attention(*inputs, chunk_size=16, return_state=True)
    assert torch.equal(out, want)
    assert torch.equal(state.s, want_state.s)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant, draw):
    q, k, v, log_g, (s, z), *_ = arguments(draw, with_state=True)
    inputs = (q, k, v, log_g, s, z)
    want = torch.autograd.grad(loss(*inputs), inputs)
    total = checkpoint(loss, *inputs, use_reentrant=use_reentrant)
    total.backward()
    assert all(torch.equal(x.grad, b) for x, b in zip(inputs, want, strict=True))


def test_autocast_casts_once_and_not_within(draw, dense):
    q, k, v, log_g = (x.requires_grad_() for x in draw(length=60, dtype=torch.float32))
    mixed = (q, k.bfloat16(), v, log_g)
    with torch.autocast("cpu", torch.bfloat16):
        out, state = power_attention(*mixed, chunk_size=16, return_state=True)
        out.sum().backward()
        compiled = torch.compile(power_attention, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*mixed, chunk_size=16), out)
    rounded = [x.detach().bfloat16() for x in (q, k, v)]
    assert out.dtype == torch.bfloat16
    assert state.s.dtype == log_g.grad.dtype == q.grad.dtype == torch.float32
    assert torch.equal(out, power_attention(*rounded, log_g, chunk_size=16))
    error = out.double() - dense(*rounded, log_g)
    assert error.abs().max() < 2**-8 * out.abs().max()  # one rounding, at the end


@pytest.mark.parametrize("no_grad", [torch.no_grad, torch.inference_mode])
def test_without_gradients(no_grad, draw):
    inputs = [x.requires_grad_() for x in draw()]
    want = power_attention(*inputs)
    with no_grad():
        out = power_attention(*inputs)
    assert torch.equal(out, want)
    assert not out.requires_grad


def test_shapes_on_the_meta_device():
    q, k, v = torch.randn(3, 1, 2, 100, 16, device="meta")
    out, state = power_attention(q, k, v, return_state=True)
    assert out.shape == q.shape
    assert state.s.shape == (1, 2, 256, 16)


DDP = """
    import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
    from torch.nn.functional import logsigmoid
    from torch.nn.parallel import DistributedDataParallel
    from power.attention import power_attention

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(8, 24, dtype=torch.float64)
            self.gate = torch.nn.Linear(8, 1, dtype=torch.float64)

        def forward(self, x):
            q, k, v = self.qkv(x)[:, None].chunk(3, -1)
            return power_attention(q, k, v, logsigmoid(self.gate(x)).mT, chunk_size=8)

    def work(rank, port):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=2)
        torch.manual_seed(0)
        layer, x = Layer(), torch.randn(2, 20, 8, dtype=torch.float64)
        layer(x).pow(2).mean().backward()
        whole = [p.grad.clone() for p in layer.parameters()]
        layer.zero_grad()
        replica = DistributedDataParallel(layer)
        replica(x[rank : rank + 1]).pow(2).mean().backward()
        for got, want in zip((p.grad for p in layer.parameters()), whole, strict=True):
            torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)
        dist.destroy_process_group()

    if __name__ == "__main__":
        import socket
        with socket.socket() as s:
            s.bind(("localhost", 0))
            port = s.getsockname()[1]
        other = mp.get_context("fork").Process(target=work, args=(1, port))
        other.start()
        work(0, port)
        other.join()
        sys.exit(other.exitcode)
"""


def test_two_processes_give_the_gradient_of_the_whole_batch(tmp_path):
    script = tmp_path / "ddp.py"
    script.write_text(textwrap.dedent(DDP))
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


KERNELS = """
    import torch
    from torch.nn.functional import logsigmoid
    from power import DecodeState, operator, power_attention, power_attention_step

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 70, 16, requires_grad=True) for heads in (2, 1, 1))
    log_g = logsigmoid(torch.randn(1, 1, 70) + 3).requires_grad_()
    inputs = q, k, v, log_g
    state = [torch.rand(2, 1, 256, *rest, requires_grad=True) for rest in ([16], [])]
    bounds = torch.tensor([0, 66, 70])
    for gate, before, cut, chunk_size, return_state in (
        (None, [], None, None, False),
        (log_g, state, bounds, 64, True),
    ):
        torch.library.opcheck(
            operator.attention,
            (q, k, v, gate, before, cut, 2, 0.3, chunk_size, return_state, "triton"),
        )

    def loss(*inputs):
        out, state = power_attention(*inputs, chunk_size=64, return_state=True, impl="triton")
        return out.sin().sum() + state.s.sin().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*inputs), inputs)
    want = torch.autograd.grad(loss(*inputs), inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    none = [x[:, :, :0] for x in inputs]
    out, last = power_attention(*none, return_state=True, impl="triton")
    torch.autograd.grad(out.sum() + last.s.sum(), inputs)
    assert out.shape == (1, 2, 0, 16) and not last.s.any()

    with torch.no_grad():
        start = DecodeState.start(k[:, :, :0], v[:, :, :0], chunk_size=16)
        tokens = [x[:, :, :20] for x in inputs]
        got = power_attention_step(*tokens, start, impl="triton")
        want = power_attention_step(*tokens, start, impl="reference")
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
"""


@pytest.mark.interpret
def test_kernels_in_the_operator(tmp_path):
    pytest.importorskip("power.kernels", reason="the kernels need Triton", exc_type=ImportError)
    script = tmp_path / "kernels.py"
    script.write_text(textwrap.dedent(KERNELS))
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, env=environment
    )
    assert run.returncode == 0, run.stderr
