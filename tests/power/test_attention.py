import subprocess
import sys
from itertools import pairwise
from textwrap import dedent

import pytest
import torch
from torch.utils._pytree import tree_map

from power.attention import power_attention
from power.feature_map import PowerState


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 8, 17, 100])
@pytest.mark.parametrize("shape", [{}, {"kv_heads": 1, "value_dim": 9}, {"kv_heads": 4}])
def test_equals_the_oracle(shape, chunk_size, gated, draw, dense):
    q, k, v, log_g = draw(**shape)
    log_g = log_g if gated else None
    out = power_attention(q, k, v, log_g, chunk_size=chunk_size)
    torch.testing.assert_close(out, dense(q, k, v, log_g), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("length", [1, 7, 63, 129, 257])
def test_any_length(length, draw, dense):
    inputs = draw(1, 2, 1, length)
    out = power_attention(*inputs, deg=4, scale=-0.7, chunk_size=64)
    want = dense(*inputs, deg=4, scale=-0.7)
    torch.testing.assert_close(out, want, atol=1e-11, rtol=1e-11)


def test_the_choice_of_form(draw, dense, monkeypatch):
    """The attention form up to 1,024 tokens, or as many as the state has rows; chunks beyond."""
    from power import attention

    seen = []
    operator = attention.operator.attention

    def spy(*args):
        seen.append(args[8])
        return operator(*args)

    monkeypatch.setattr(attention.operator, "attention", spy)
    for length, head_dim in ((1024, 8), (1025, 8), (1025, 48), (1600, 48)):
        inputs = draw(1, 1, 1, length, head_dim, 2)
        out = power_attention(*inputs)
        torch.testing.assert_close(out, dense(*inputs), atol=1e-11, rtol=1e-11)
    assert seen == [None, 1024, None, 1024]


def test_strides_do_not_matter(draw):
    q, k, v, log_g = draw()
    want = power_attention(q, k, v, log_g)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, log_g)]
    assert torch.equal(power_attention(*turned), want)
    one_key = k[:, :, :1].expand(-1, -1, 40, -1)
    assert torch.equal(power_attention(q, one_key, v), power_attention(q, one_key.clone(), v))


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"length": 0}])
def test_nothing_to_attend_to(sizes, draw):
    inputs = [x.requires_grad_() for x in draw(**sizes)]
    before = PowerState(torch.randn(inputs[1].shape[0], 2, 64, 6, dtype=torch.float64), None)
    before = PowerState(before.s.requires_grad_(), before.s.detach()[..., 0].clone())
    out, state = power_attention(*inputs, initial_state=before, return_state=True)
    assert out.shape == (*inputs[0].shape[:3], 6)
    assert torch.equal(state.s, before.s)
    grads = torch.autograd.grad(out.sum() + 2 * state.s.sum(), [*inputs, before.s])
    assert all(grad.shape == x.shape for grad, x in zip(grads, [*inputs, before.s], strict=True))
    assert (grads[-1] == 2).all()


def test_states_carried_over_splits_equal_the_whole(draw, dense):
    inputs = draw(length=60)
    state, outs = None, []
    for start, stop in ((0, 9), (9, 33), (33, 34), (34, 60)):
        out, state = power_attention(
            *(x[:, :, start:stop] for x in inputs), initial_state=state, return_state=True
        )
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), dense(*inputs), atol=1e-12, rtol=1e-12)
    whole = power_attention(*inputs, return_state=True)[1]
    for got, want in zip(state, whole, strict=True):
        torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_packed_sequences(index_dtype, draw, dense):
    bounds = [0, 0, 12, 13, 13, 40, 40]
    inputs = [x.requires_grad_() for x in draw(batch=1)]
    cu_seqlens = torch.tensor(bounds, dtype=index_dtype)
    out, state = power_attention(*inputs, cu_seqlens=cu_seqlens, chunk_size=8, return_state=True)
    parts = [[x[:, :, a:b] for x in inputs] for a, b in pairwise(bounds)]
    want = torch.cat([dense(*part) for part in parts], 2)
    torch.testing.assert_close(out, want, atol=1e-11, rtol=1e-11)
    assert state.s.shape == (6, 2, 64, 6)
    assert not state.s[[0, 3, 5]].any()
    weight = torch.randn_like(out)
    got = torch.autograd.grad((out * weight).sum(), inputs)
    expected = torch.autograd.grad((want * weight).sum(), inputs)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("deg", [2, 4])
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_gradients_of_every_input(chunk_size, deg, draw):
    inputs = [x.requires_grad_() for x in draw(1, 2, 1, 13, 3, 2)]
    earlier = draw(1, 2, 1, 12, 3, 2, seed=1)
    before = power_attention(*earlier, deg=deg, return_state=True)[1]
    s, z = (x.detach().requires_grad_() for x in before)

    def call(q, k, v, log_g, s, z):
        out, state = power_attention(
            *(q, k, v, log_g),
            deg=deg,
            chunk_size=chunk_size,
            initial_state=PowerState(s, z),
            return_state=True,
        )
        return out, *state

    assert torch.autograd.gradcheck(call, (*inputs, s, z))


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_gradients_of_one_result_alone(wanted, draw):
    """Where only the output or only a state is used, the others have no gradient to give."""
    q, k, v, log_g = (x.requires_grad_() for x in draw(1, 2, 1, 9, 3, 2))

    def call(q, k, v, log_g):
        out, state = power_attention(q, k, v, log_g, return_state=True)
        return (out, *state)[wanted]

    assert torch.autograd.gradcheck(call, (q, k, v, log_g))


def test_gradients_tell_a_bug(draw, dense):
    inputs = [x.requires_grad_() for x in draw()]
    weight = torch.randn(2, 4, 40, 6, dtype=torch.float64)
    weight[:, :, :8] = 0
    got = torch.autograd.grad((power_attention(*inputs, chunk_size=8) * weight).sum(), inputs)

    def error(bug):
        out = dense(*inputs, bug=bug)[:, :, 8:]
        want = torch.autograd.grad((out * weight[:, :, 8:]).sum(), inputs)
        return max((a - b).abs().max().item() for a, b in zip(got, want, strict=True))

    assert error(None) < 1e-10
    for bug in ("shifted gate", "gate of the next token"):
        assert error(bug) > 1e-2


def test_the_scale_cancels(draw):
    inputs = draw()
    out = power_attention(*inputs, scale=1.0)
    torch.testing.assert_close(power_attention(*inputs, scale=30.0), out, atol=1e-12, rtol=1e-12)
    state, other = (power_attention(*inputs, scale=x, return_state=True)[1] for x in (1, 30))
    assert torch.equal(state.s, other.s)


@pytest.mark.parametrize("closed", [-200.0, -1e9, -1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk_size", [None, 8])
def test_a_closed_gate_forgets_and_later_gates_count(chunk_size, dtype, closed, draw, dense):
    inputs = draw(dtype=dtype)  # the first gate of a sequence discounts nothing
    spans = ((0, 13), (13, 25), (25, 40))
    want = torch.cat([dense(*(x[:, :, a:b] for x in inputs)) for a, b in spans], 2)
    q, k, v, log_g = inputs
    log_g[:, :, [13, 25]] = closed
    log_g.requires_grad_()
    out = power_attention(q, k, v, log_g, chunk_size=chunk_size)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-3
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
    (grad,) = torch.autograd.grad(out.square().sum(), log_g)
    assert grad.isfinite().all()
    assert grad[:, :, [13, 25]].abs().max() < 1e-3


def test_a_query_of_zeros_gives_zero(draw):
    q, k, v, log_g = draw()
    q[:, :, 5] = 0
    inputs = [x.requires_grad_() for x in (q, k, v, log_g)]
    out = power_attention(*inputs, chunk_size=8)
    assert not out[:, :, 5].any()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), inputs))


STATE = PowerState(torch.zeros(2, 2, 64, 6), torch.zeros(2, 2, 64))


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (TypeError, "q must be a tensor, got list", {"q": [1]}),
        (ValueError, r"q must have the shape \[B, H, T, K\], got \[4, 40\]", {"q": (4, 40)}),
        (TypeError, "q must have a floating dtype .* got torch.int64", {"q": torch.int64}),
        (TypeError, "of 16 bits or more, got torch.float8", {"q": torch.float8_e4m3fn}),
        (TypeError, "k must have the dtype torch.float32, got torch.float16", {"k": torch.half}),
        (ValueError, r"k must have the shape \[2, H_kv, 40, 8\]", {"k": (2, 2, 39, 8)}),
        (ValueError, r"v must have the shape \[2, 2, 40, V\]", {"v": (2, 1, 40, 6)}),
        (ValueError, "v must be on cpu as q is, got meta", {"v": "meta"}),
        (ValueError, "a multiple of k's heads", {"q": (2, 3, 40, 8)}),
        (ValueError, r"log_g must have the shape \[2, 2, 40\]", {"log_g": (2, 2, 40, 1)}),
        (TypeError, "log_g must have the dtype torch.float32", {"log_g": torch.bfloat16}),
        (ValueError, "log_g must be <= 0 .* got 1; logsigmoid", {"log_g": torch.ones(2, 2, 40)}),
        (ValueError, "log_g must .* got -inf", {"log_g": torch.full((2, 2, 40), -torch.inf)}),
        (ValueError, "log_g must .* got nan", {"log_g": torch.full((2, 2, 40), torch.nan)}),
        (ValueError, "deg must be positive and even .* got 3", {"deg": 3}),
        (TypeError, "deg must be an int, got float", {"deg": 2.0}),
        (TypeError, "scale must be a number or None, got str", {"scale": "auto"}),
        (ValueError, "scale and its power must be finite and not 0, got 0", {"scale": 0}),
        (ValueError, "scale and its power .* got nan", {"scale": float("nan")}),
        (ValueError, r"scale and its power .* got 1e\+200", {"scale": 1e200}),
        (TypeError, "scale must be a number or None, got bool", {"scale": True}),
        (ValueError, "chunk_size must be 1 or more, got 0", {"chunk_size": 0}),
        (TypeError, "chunk_size must be an int, got float", {"chunk_size": 8.0}),
        (TypeError, "chunk_size must be an int, got bool", {"chunk_size": True}),
        (ValueError, "impl must be 'auto', 'triton' or 'reference', got 1", {"impl": 1}),
        (TypeError, "initial_state must be a PowerState or None", {"initial_state": STATE.z}),
        (ValueError, r"state.s .* \[2, 2, 64, 6\]", {"initial_state": (STATE.z, STATE.z)}),
        (TypeError, "state.z .*float32", {"initial_state": (STATE.s, STATE.z.half())}),
        (ValueError, "batch of 1, got 2 bounds", {"cu_seqlens": torch.tensor([0, 40])}),
        (TypeError, "cu_seqlens must have the dtype", {"cu_seqlens": torch.tensor([0.0, 40.0])}),
    ],
)
def test_errors(error, message, changes, draw):
    arguments = dict(zip(("q", "k", "v", "log_g"), draw(dtype=torch.float32), strict=True))
    for name, value in changes.items():
        if name in arguments and isinstance(value, tuple):
            value = arguments[name].new_zeros(value)
        elif name in arguments and isinstance(value, str | torch.dtype):
            value = arguments[name].to(value)
        arguments[name] = value
    with pytest.raises(error, match=message):
        power_attention(**arguments)


def test_without_triton():
    code = """
        import sys
        sys.modules["triton"] = None  # as if it were not installed
        import torch
        from power import power_attention
        q = torch.ones(1, 1, 4, 32)
        power_attention(q, q, q)
        power_attention(q, q, q, impl="triton")
    """
    run = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True)
    assert run.stderr.endswith(
        "ImportError: impl='triton' needs Triton: install scale-invariant-attention[kernels], "
        "or pass impl='reference'\n"
    )


@pytest.mark.parametrize("name", ["q", "log_g", "initial_state"])
def test_forward_mode_is_refused(name, draw):
    inputs = dict(zip(("q", "k", "v", "log_g"), draw(dtype=torch.float32), strict=True))
    inputs["initial_state"] = STATE
    tangent = tree_map(torch.ones_like, inputs[name])
    with pytest.raises(ValueError, match=f"{name}.* must not be differentiated in forward mode"):
        torch.func.jvp(
            lambda x: power_attention(**{**inputs, name: x}), (inputs[name],), (tangent,)
        )


def test_bf16_in_the_interpreter(draw, monkeypatch):
    pytest.importorskip("power.kernels", reason="the kernels need Triton", exc_type=ImportError)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=r"interpreter multiplies bf16 wrongly.*impl='reference'"):
        power_attention(*draw(dtype=torch.bfloat16), impl="triton")


def test_kernels_on_a_cpu(draw, monkeypatch):
    pytest.importorskip("power.kernels", reason="the kernels need Triton", exc_type=ImportError)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"needs a CUDA .* got q on cpu; pass impl='ref"):
        power_attention(*draw(), impl="triton")


@pytest.mark.parametrize("bounds", [[0, 39], [1, 40], [0, 20, 10, 40]])
def test_wrong_bounds(bounds, draw):
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to T = 40, got"):
        power_attention(*draw(batch=1), cu_seqlens=torch.tensor(bounds))
