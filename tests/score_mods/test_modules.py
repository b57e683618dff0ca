import socket
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import score_mods as sm
from score_mods._captured import within
from score_mods.cache import KVCache
from score_mods.modules import FlexSelfAttention, Learnable

ROOT = Path(__file__).parents[2]
DIM, H, H_KV, D = 64, 4, 2, 16
TAU = torch.tensor([3.0, 10.0, 30.0, 100.0])


def make(**changes):
    torch.manual_seed(0)
    options = {
        "score_mod": Learnable(sm.scale_invariant, tau=TAU, sigma=torch.full((H,), 0.8)),
        "rotary": sm.rope(D, 100.0),
        "sink": 0.3,
        "impl": "dense",
    }
    return FlexSelfAttention(DIM, H, H_KV, **options | changes)


def by_hand(layer, x, window=10**9):
    """The layer of `make`, written out in the dtype of x."""
    p = {name: value.to(x.dtype) for name, value in layer.named_parameters()}
    B, T, _ = x.shape
    t = torch.arange(T)

    def heads(name):
        y = (x @ p[f"{name}_proj.weight"].mT).unflatten(-1, (-1, D)).transpose(1, 2)
        return y.repeat_interleave(H // y.shape[1], 1)

    def turned(y):
        y = y / y.square().mean(-1, keepdim=True).add(torch.finfo(torch.float32).eps).sqrt()
        angle = t[:, None] * 100.0 ** -(torch.arange(D // 2, dtype=x.dtype) * 2 / D)
        y = y.to(x.dtype)  # autocast makes it bfloat16, of which there is no complex
        z = torch.complex(y[..., : D // 2], y[..., D // 2 :]) * torch.polar(1 + 0 * angle, angle)
        return torch.cat([z.real, z.imag], -1)

    distance = t[:, None] - t
    tau, sigma = p["score_mod.log_tau"].exp(), p["score_mod.log_sigma"].exp()
    growth = 2 * torch.log(distance.abs() / tau[:, None, None] + 1)
    multiplier = (1 + growth / sigma[:, None, None] ** 2).sqrt()
    score = turned(heads("q")) @ turned(heads("k")).mT / D**0.5 * multiplier - growth
    score = score.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    sink = p["sink"].view(1, H, 1, 1).expand(B, H, T, 1)
    weight = torch.cat([score, sink], -1).softmax(-1)[..., :-1]
    return (weight @ heads("v")).transpose(1, 2).flatten(2) @ p["o_proj.weight"].mT


def gradients(layer, out):
    return dict(
        zip(
            dict(layer.named_parameters()),
            torch.autograd.grad(out.square().sum(), list(layer.parameters())),
            strict=True,
        )
    )


def assert_gradients(got, expected, rtol=1e-5):
    assert got.keys() == expected.keys()
    for name in got:
        size = expected[name].abs().max()
        assert size > 1e-3, name
        assert (got[name] - expected[name]).abs().max() <= rtol * size, name


@pytest.mark.parametrize("T", [1, 7, 63, 129])
def test_equals_the_formula_in_float64(T):
    layer, x = make(), torch.randn(2, T, DIM)
    assert (layer(x) - by_hand(layer, x.double())).abs().max() < 2e-6


def test_every_parameter_gets_its_gradient():
    layer, x = make(), torch.randn(2, 40, DIM)
    assert {"score_mod.log_tau", "score_mod.log_sigma", "sink"} < dict(
        layer.named_parameters()
    ).keys()
    assert_gradients(gradients(layer, layer(x)), gradients(layer, by_hand(layer, x.double())))


def test_several_learned_parts():
    """SSMax's s and a table that is no scale-invariant parameter, by a factory of one's own."""

    def factory(s, table):
        def bias(score, b, h, q_idx, kv_idx):
            return score + table[h, (q_idx - kv_idx).clamp(0, table.shape[1] - 1)]

        return sm.compose(sm.ssmax(s), bias)

    mod = Learnable(factory, s=torch.full((H,), 0.4), table=torch.randn(H, 5))
    layer, x = make(score_mod=mod, sink=None, rotary=None, qk_norm=False), torch.randn(1, 9, DIM)
    got = gradients(layer, layer(x))
    q, k, v = (
        (x @ p.weight.mT).unflatten(-1, (-1, D)).transpose(1, 2)
        for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    t = torch.arange(9)
    distance = t[:, None] - t
    score = (
        q @ k.repeat_interleave(2, 1).mT / D**0.5 * mod.s.view(H, 1, 1) * (t[:, None] + 1).log()
    )
    score = score + mod.table[:, distance.clamp(0, 4)]
    weight = score.masked_fill(distance < 0, -torch.inf).softmax(-1)
    out = layer.o_proj((weight @ v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2))
    assert_gradients(got, gradients(layer, out))


@pytest.mark.parametrize(
    ("factory", "values"),
    [
        (sm.scale_invariant, {"tau": TAU.double(), "sigma": torch.tensor([0.8]).double()}),
        (sm.scale_invariant, {"tau": torch.tensor([7.0]).double()}),
        (sm.ssmax, {"s": torch.linspace(0.2, 0.5, H).double()}),
        (sm.kerple_log, {"r1": TAU.double() / 10, "r2": TAU.double()}),
    ],
)
def test_parameters_spread_over_memory_learn_the_same(factory, values):
    q, k, v = torch.randn(3, 1, H, 40, D, dtype=torch.float64)
    learned = Learnable(factory, **values)
    found = []
    for spread in (False, True):
        mod = learned(spread=spread)
        assert mod.num_heads == (H if max(map(len, values.values())) == H else None)
        out = sm.dense_attention(q, k, v, mod, sm.causal)
        found.append([out, *torch.autograd.grad(out.square().sum(), list(learned.parameters()))])
    torch.testing.assert_close(*found)
    captured = [x for x in within(mod) if isinstance(x, torch.Tensor) and x.ndim]
    assert all(len(x) >= 1024 for x in captured)


@pytest.mark.parametrize(
    ("learned", "size"),
    [
        (Learnable(sm.scale_invariant, tau=TAU), 1024 * H),
        (Learnable(lambda s: sm.ssmax(s.flip(0)), s=TAU), H),
        (Learnable(sm.distance_table, table=torch.randn(H, 9)), 9),
    ],
    ids=["by head", "unknown", "table"],
)
def test_only_what_is_read_by_head_is_spread_over_memory(learned, size):
    captured = [x for x in within(learned(spread=True)) if isinstance(x, torch.Tensor)]
    assert max(max(x.shape) for x in captured if x.ndim) == size


@pytest.mark.compiled
def test_flex_equals_dense():
    x = torch.randn(2, 70, DIM)
    with torch.no_grad():
        for changes in ({}, {"score_mod": sm.scale_invariant(), "mask_mod": sm.sliding_window(9)}):
            layer = make(sink=None, **changes)
            expected = layer(x)
            layer.impl = "flex"
            assert (layer(x) - expected).abs().max() < 1e-6


@pytest.mark.parametrize("sliding", [False, True])
def test_decoding_equals_one_pass(sliding):
    layer, x = make(), torch.randn(2, 30, DIM)
    cache = KVCache(2, H_KV, 8 if sliding else 40, D, sliding=sliding)
    with torch.no_grad():
        out = [layer(part, cache=cache) for part in x.split([11] + [1] * 12 + [7], 1)]
        expected = by_hand(layer, x.double(), window=8 if sliding else 10**9)
    assert (torch.cat(out, 1) - expected).abs().max() < 2e-6


def test_left_padded_batch_equals_single_sequences():
    layer, x = make(), torch.randn(2, 12, DIM)
    positions = torch.stack([torch.arange(12), torch.arange(12) - 5])
    with torch.no_grad():
        cache = KVCache(2, H_KV, 16, D)
        out = torch.cat(
            [layer(x[:, :9], positions[:, :9], cache), layer(x[:, 9:], cache=cache)], 1
        )
        assert (out[0] - by_hand(layer, x[:1].double())[0]).abs().max() < 2e-6
        assert (out[1, 5:] - by_hand(layer, x[1:, 5:].double())[0]).abs().max() < 2e-6


def test_packed_documents_equal_single_sequences():
    # LogN counts from the start, so it is wrong unless it is given positions.
    layer, x = make(score_mod=sm.logn()), torch.randn(1, 20, DIM)
    documents = torch.tensor([0] * 13 + [1] * 7)
    positions = torch.cat([torch.arange(13), torch.arange(7)])
    with torch.no_grad():
        mask = sm.and_masks(sm.causal, sm.document(documents))
        for given in (mask, sm.create_block_mask(mask, None, None, 20, 20)):
            out = layer(x, positions, mask_mod=given)
            for at in (slice(0, 13), slice(13, 20)):
                assert (out[:, at] - layer(x[:, at])).abs().max() < 1e-6


def test_state_dict_round_trip(tmp_path):
    layer, x = make(), torch.randn(1, 9, DIM)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    torch.manual_seed(1)
    other = make(sink=7.0)
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    assert torch.equal(other(x), layer(x))
    assert other.score_mod().num_heads == H


@pytest.mark.compiled
def test_compiles_whole_and_is_not_compiled_again_while_decoding():
    layer, x = make(), torch.randn(2, 30, DIM)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True)
    assert (compiled(x) - by_hand(layer, x.double())).abs().max() < 2e-6
    assert_gradients(gradients(layer, compiled(x)), gradients(layer, by_hand(layer, x.double())))
    cache, out, graphs = KVCache(2, H_KV, 40, D), [], []
    with torch.no_grad():
        for t in range(30):
            out.append(compiled(x[:, [t]], cache=cache))
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert (torch.cat(out, 1) - by_hand(layer, x.double())).abs().max() < 2e-6
    assert len(set(graphs)) == 1


@pytest.mark.compiled
@pytest.mark.parametrize("two", [False, True])
def test_positions_after_lengths_have_varied(two):
    layer, x, t = make(), torch.randn(2, 30, DIM), torch.arange(30)
    positions = torch.stack([t, 2 * t]) if two else 2 * t
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for length in (9, 30):
        compiled(x[:, :length])
    for length in (30, 9):
        at = positions[..., :length]
        out = compiled(x[:, :length], at)
        assert (out - layer(x[:, :length], at)).abs().max() < 1e-6


def test_activation_checkpointing():
    layer, x = make(), torch.randn(2, 20, DIM)
    again = checkpoint(layer, x, use_reentrant=False)
    assert_gradients(gradients(layer, again), gradients(layer, layer(x)), rtol=0)


def test_autocast():
    layer, x = make(), torch.randn(2, 129, DIM)
    exact = by_hand(layer, x.double())
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
        plain = by_hand(layer, x)
    assert out.dtype == torch.bfloat16
    assert (out - exact).square().mean() <= 4 * (plain - exact).square().mean()
    assert all(g.isfinite().all() for g in gradients(layer, out).values())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_export_with_any_length():
    layer = make()
    length = torch.export.Dim("T", min=2, max=4096)
    program = torch.export.export(layer, (torch.randn(2, 20, DIM),), dynamic_shapes=({1: length},))
    x = torch.randn(2, 33, DIM)
    assert (program.module()(x) - by_hand(layer, x.double())).abs().max() < 2e-6


FSDP = """
    import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    import score_mods as sm
    from score_mods.modules import FlexSelfAttention, Learnable

    def work(rank, port):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=2)
        torch.manual_seed(0)
        mod = Learnable(sm.scale_invariant, tau=torch.tensor([3.0, 10.0, 30.0, 100.0]))
        layer = FlexSelfAttention(64, 4, 2, score_mod=mod, sink=0.3, impl="dense")
        x = torch.randn(2, 20, 64)
        layer(x).pow(2).mean().backward()
        whole = {name: p.grad.clone() for name, p in layer.named_parameters()}
        layer.zero_grad()
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        layer(x[rank : rank + 1]).pow(2).mean().backward()
        for name, p in layer.named_parameters():
            assert isinstance(p, DTensor) and p.to_local().numel() * 2 == p.numel()
            error = (p.grad.full_tensor() - whole[name]).abs().max()
            assert error < 1e-5 * whole[name].abs().max(), (name, error)
        dist.destroy_process_group()

    if __name__ == "__main__":
        port = int(sys.argv[1])
        other = mp.get_context("fork").Process(target=work, args=(1, port))
        other.start()
        work(0, port)
        other.join()
        sys.exit(other.exitcode)
"""


def test_fsdp_gives_the_gradient_of_the_whole_batch(tmp_path):
    script = tmp_path / "fsdp.py"
    script.write_text(textwrap.dedent(FSDP))
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = str(s.getsockname()[1])
    result = subprocess.run(
        [sys.executable, script, port],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr


def test_a_module_on_the_meta_device_keeps_what_its_mods_capture():
    x = torch.randn(1, 9, DIM)
    layer = make(score_mod=sm.scale_invariant(TAU))
    state, expected = layer.state_dict(), layer(x)
    layer = layer.to("meta").to_empty(device="cpu")
    layer.load_state_dict(state)
    assert torch.equal(layer(x), expected)


BLOCK_MASK = sm.create_block_mask(sm.causal, None, None, 3, 3)


def bad(name, error, message, **changes):
    return pytest.param(changes, error, message, id=name)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        bad("heads", ValueError, "dim must be a multiple of num_heads", num_heads=5),
        bad("groups", ValueError, "num_heads must be a multiple", num_kv_heads=3),
        bad("mask for mod", TypeError, "score_mod must be a score_mod", score_mod=sm.causal),
        bad("mod for mask", TypeError, "mask_mod must be a mask_mod", mask_mod=sm.alibi(H)),
        bad("neither", TypeError, r"or a Learnable, got a function of 0", score_mod=sm.logn),
        bad("no mask", TypeError, r"mask_mod .*kv_idx\), got BlockMask", mask_mod=BLOCK_MASK),
        bad("rotary", TypeError, "rotary must be a Rotary", rotary=10000.0),
        bad("size", ValueError, "16 channels of a head at most, got 32", rotary=sm.rope(2 * D)),
        bad("norm", TypeError, "qk_norm must be a bool, got str", qk_norm="no"),
        bad("impl", ValueError, "impl must be", impl="fast"),
        bad("sink", TypeError, "sink must be a number", sink="one"),
        bad(
            "no parameter",
            ValueError,
            r"use Learnable\(factory, name=tensor\)",
            score_mod=sm.ssmax(torch.ones(H, requires_grad=True)),
        ),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        FlexSelfAttention(**{"dim": DIM, "num_heads": H} | changes)


def test_bad_learnables_and_inputs_are_named():
    with pytest.raises(TypeError, match="factory must be callable"):
        Learnable(1.0, tau=TAU)
    with pytest.raises(ValueError, match="tau must be positive and finite, got -1"):
        Learnable(sm.scale_invariant, tau=torch.tensor([-1.0]))
    with pytest.raises(ValueError, match="tau must be positive and finite, got nan"):
        Learnable(sm.scale_invariant, tau=torch.tensor([1.0, torch.nan]))
    with pytest.raises(ValueError, match="a floating tensor to learn"):
        Learnable(sm.scale_invariant, tau=10.0)
    with pytest.raises(ValueError, match=r"x must have shape \(B, T, 64\)"):
        make()(torch.zeros(2, 3, 32))
    for x, more, message in (
        (None, {}, "x must be a floating tensor, got NoneType"),
        (torch.zeros(2, 3, DIM), {"positions": 3}, "positions must be an integer tensor, got int"),
        (torch.zeros(2, 3, DIM), {"positions": torch.rand(3)}, "got torch.float32"),
        (torch.zeros(2, 3, DIM), {"cache": {}}, "cache must be a KVCache or None, got dict"),
        *(
            (torch.zeros(2, 3, DIM), {"mask_mod": mask} | more, f"mask_mod must be .* got {got}")
            for mask, got in (("causal", "str"), (sm.alibi(H), "a score_mod"))
            for more in ({}, {"cache": KVCache(2, H_KV, 9, D)})
        ),
    ):
        with pytest.raises(TypeError, match=message):
            make()(x, **more)
    with pytest.raises(ValueError, match="x must have no empty axis"):
        make()(torch.zeros(0, 3, DIM))
    with pytest.raises(ValueError, match="cache must be for a batch of 2, got 1"):
        make()(torch.zeros(2, 3, DIM), cache=KVCache(1, H_KV, 9, D))
    with torch.no_grad(), pytest.raises(ValueError, match="got a BlockMask"):
        make()(torch.zeros(2, 3, DIM), cache=KVCache(2, H_KV, 9, D), mask_mod=BLOCK_MASK)


def test_what_flex_cannot_do_on_a_cpu_names_the_dense_form():
    layer, x = make(impl="flex"), torch.zeros(1, 3, DIM)
    with pytest.raises(ValueError, match='no lse on a CPU; use impl="dense"'):
        layer(x)
    layer = make(impl="flex", sink=None)
    with pytest.raises(ValueError, match='no backward on a CPU; use impl="dense"'):
        layer(x)
    with (
        warnings.catch_warnings(),
        torch.no_grad(),
        pytest.raises(Exception, match='no compiled model on a CPU; use impl="dense"'),
    ):
        torch.compile(layer, fullgraph=True)(x)
