import io
import math
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import logsigmoid, rms_norm
from torch.utils.checkpoint import checkpoint

from power.modules import PowerAttention


def rotary(q, k, positions):
    """Rotary position embedding, for the test."""
    half = q.shape[-1] // 2
    frequency = 100.0 ** (-torch.arange(half, dtype=q.dtype) / half)
    angle = positions[:, None, :, None].to(q.dtype) * frequency
    cos, sin = angle.cos().repeat(1, 1, 1, 2), angle.sin().repeat(1, 1, 1, 2)

    def turn(x):
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return turn(q), turn(k)


@pytest.fixture
def layer():
    torch.manual_seed(0)
    layer = PowerAttention(
        24, 4, num_kv_heads=2, head_dim=8, value_dim=5, rotary=rotary, dtype=torch.float64
    )
    with torch.no_grad():
        layer.gate.weight.normal_()
        layer.gate.bias.sub_(3)
        layer.norm.weight.normal_()
    return layer


@pytest.fixture
def x():
    return torch.randn(2, 50, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_hand(layer, x, dense):
    """The layer's formula from its parameters alone."""

    def heads(weight, count):
        return (x @ weight.T).view(*x.shape[:2], count, -1).transpose(1, 2)

    q, k = heads(layer.q_proj.weight, 4), heads(layer.k_proj.weight, 2)
    q, k = rotary(q, k, torch.arange(x.shape[1])[None])
    log_g = logsigmoid(x @ layer.gate.weight.T + layer.gate.bias).mT
    out = dense(q, k, heads(layer.v_proj.weight, 2), log_g)
    out = rms_norm(out, (5,)) * layer.norm.weight
    return out.transpose(1, 2).reshape(*x.shape[:2], 20) @ layer.o_proj.weight.T


def test_equals_its_formula(layer, x, dense):
    torch.testing.assert_close(layer(x), by_hand(layer, x, dense), atol=1e-11, rtol=1e-11)
    weight = layer.q_proj.weight
    got = torch.autograd.grad(layer(x).sin().sum(), weight)
    want = torch.autograd.grad(by_hand(layer, x, dense).sin().sum(), weight)
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("prompt", [0, 5, 64, 100])
@torch.no_grad()
def test_step_by_step_equals_the_whole(prompt, layer, x):
    x = torch.cat([x, x.flip(1), x], 1)[:, :140]
    first, state = layer.prefill(x[:, :prompt])
    outs = [first]
    for t in range(prompt, 140, 4):
        out, state = layer.step(x[:, t : t + 4], state, inplace=bool(t % 8))
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), layer(x), atol=1e-11, rtol=1e-11)


def test_packed_sequences(layer, x):
    bounds = [0, 13, 13, 50]
    out = layer(x[:1], cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    alone = [layer(x[:1, :13]), layer(x[:1, 13:])]
    torch.testing.assert_close(out, torch.cat(alone, 1), atol=1e-11, rtol=1e-11)


def test_positions_in_packed_sequences_begin_anew(x):
    seen = []

    def spy(q, k, positions):
        seen.append(positions)
        return q, k

    layer = PowerAttention(24, 2, rotary=spy, dtype=torch.float64)
    layer(x[:1], cu_seqlens=torch.tensor([0, 0, 13, 13, 50]))
    assert seen[0].tolist() == [[*range(13), *range(37)]]


def test_compile_of_the_whole_graph(layer, x):
    want = torch.autograd.grad(layer(x).sin().sum(), list(layer.parameters()))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(x).sin().sum(), list(layer.parameters()))
    torch.testing.assert_close(got, want)


def test_checkpointing(layer, x):
    want = torch.autograd.grad(layer(x).sin().sum(), list(layer.parameters()))
    out = checkpoint(layer, x, use_reentrant=False)
    got = torch.autograd.grad(out.sin().sum(), list(layer.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_state_dict_round_trip(layer, x):
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = PowerAttention(
        24, 4, num_kv_heads=2, head_dim=8, value_dim=5, rotary=rotary, dtype=torch.float64
    )
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(x), layer(x))


def test_autocast_and_half(x):
    layer = PowerAttention(24, 2)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(x.float())
    whole = layer(x.float())
    assert mixed.dtype == torch.bfloat16
    assert 0 < (mixed - whole).pow(2).mean() / whole.pow(2).mean() < 1e-3
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_gates_start_spread(x):
    layer = PowerAttention(24, 4, horizons=(10, 1000), dtype=torch.float64)
    gates = torch.sigmoid(layer.gate(x))
    horizons = [10 * 100 ** ((h + 0.5) / 4) for h in range(4)]
    want = torch.tensor([1 - 1 / horizon for horizon in horizons], dtype=torch.float64)
    torch.testing.assert_close(gates, want.expand(2, 50, 4))
    one = PowerAttention(24, 4, num_kv_heads=1, horizons=(10, 1000), dtype=torch.float64)
    assert one.gate.bias.item() == pytest.approx(math.log(99))


def test_parts_can_be_left_out(x):
    layer = PowerAttention(24, 2, gated=False, norm=False, deg=4, dtype=torch.float64)
    assert {name for name, _ in layer.named_parameters()} == {
        f"{name}_proj.weight" for name in "qkvo"
    }
    assert layer(x).shape == x.shape
    assert "num_heads=2, num_kv_heads=2, deg=4" in repr(layer)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("num_heads a multiple of num_kv_heads, got 24, 4, 3", {"num_kv_heads": 3}),
        ("positive, .* got 24, 0, 0", {"num_heads": 0}),
        ("positive, .* got 24, 4, 4, -1", {"head_dim": -1}),
        ("positive, .* got 24, 4, 4, 0", {"value_dim": 0}),
        ("dim must be a multiple of num_heads .* got 24 and 5", {"num_heads": 5}),
        (r"horizons must be two .* got \(1, 4\)", {"horizons": (1, 4)}),
        (r"horizons must be two .* got \(5,\)", {"horizons": (5,)}),
        (r"horizons must be two .* got \(5, inf\)", {"horizons": (5, math.inf)}),
        ("deg must be positive and even", {"deg": 3}),
        ("impl must be 'auto', 'triton' or 'reference', got 'flex'", {"impl": "flex"}),
    ],
)
def test_errors(message, options):
    with pytest.raises(ValueError, match=message):
        PowerAttention(24, **{"num_heads": 4, **options})


@pytest.mark.parametrize(
    ("message", "options"),
    [
        (r"must be ints, got 24, 4, 4, 8\.0", {"head_dim": 8.0}),
        ("must be ints, got 24, True, True", {"num_heads": True}),
        ("must be ints, got 24, 4, '2'", {"num_kv_heads": "2"}),
        ("horizons must be two numbers, got 5", {"horizons": 5}),
        (r"horizons must be two numbers, got \('16', '64'\)", {"horizons": ("16", "64")}),
        ("deg must be an int, got float", {"deg": 2.0}),
        ("chunk_size must be an int, got float", {"chunk_size": 64.0}),
        ("rotary must be a function or None, got int", {"rotary": 3}),
        ("gated must be a bool, got str", {"gated": "no"}),
        ("norm must be a bool, got int", {"norm": 0}),
    ],
)
def test_errors_of_type(message, options):
    with pytest.raises(TypeError, match=message):
        PowerAttention(24, **{"num_heads": 4, **options})


def test_errors_of_calls(layer, x):
    with pytest.raises(ValueError, match=r"x must have the shape \[B, T, 24\], got \[2, 50, 23\]"):
        layer(x[..., 1:])
    with pytest.raises(ValueError, match=r"call it under torch.no_grad\(\)"):
        layer.step(x[:, :1], layer.prefill(x[:, :0])[1])
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        layer([x])
    with pytest.raises(TypeError, match=r"x must have a floating dtype, got torch\.int64"):
        layer(x.long())
    with pytest.raises(TypeError, match="state must be a DecodeState, got tuple"):
        layer.step(x, (1, 2))
    with pytest.raises(TypeError, match="cu_seqlens must be a tensor, got list"):
        layer(x[:1], cu_seqlens=[0, 50])
    with pytest.raises(ValueError, match="got 0 bounds and a batch of 1"):
        layer(x[:1], cu_seqlens=torch.tensor([], dtype=torch.int32))


def test_import_is_light():
    code = "import sys, power; print({'triton', 'transformers', 'matplotlib'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
