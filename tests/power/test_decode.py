import pytest
import torch

from power.attention import power_attention
from power.decode import DecodeState, _step, power_attention_prefill, power_attention_step
from power.feature_map import PowerState


def span(inputs, start, stop):
    return [None if x is None else x[:, :, start:stop] for x in inputs]


def start(k, v, **options):
    return DecodeState.start(k[:, :, :0], v[:, :, :0], **options)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [{}, {"kv_heads": 1, "value_dim": 11}])
@pytest.mark.parametrize("deg", [2, 4])
@pytest.mark.parametrize("inplace", [False, True])
def test_token_by_token_equals_the_oracle(inplace, deg, shape, gated, draw, dense):
    q, k, v, log_g = draw(**shape)
    inputs = q, k, v, log_g if gated else None
    state, outs = start(k, v, deg=deg, chunk_size=16), []
    for t in range(40):
        out, state = power_attention_step(*span(inputs, t, t + 1), state, deg=deg, inplace=inplace)
        outs.append(out)
    want = dense(*inputs, deg)
    torch.testing.assert_close(torch.cat(outs, 2), want, atol=1e-12, rtol=1e-12)
    assert state.filled.tolist() == [8, 8]
    assert state.length.tolist() == [40, 40]


@pytest.mark.parametrize("bug", ["dropped diagonal", "shifted gate", "gate of the next token"])
def test_a_bug_would_be_seen(bug, draw, dense):
    inputs = draw()
    out, _ = power_attention_step(*inputs, start(*inputs[1:3], chunk_size=16))
    assert (out - dense(*inputs)).abs().max() < 1e-12
    assert (out - dense(*inputs, bug=bug))[:, :, 8:].abs().max() > 1e-2


@pytest.mark.parametrize("prompt", [0, 1, 15, 16, 37])
def test_after_a_prompt(prompt, draw, dense):
    inputs = draw()
    first, state = power_attention_prefill(*span(inputs, 0, prompt), chunk_size=16)
    second, state = power_attention_step(*span(inputs, prompt, 40), state)
    out = torch.cat([first, second], 2)
    torch.testing.assert_close(out, dense(*inputs), atol=1e-12, rtol=1e-12)
    assert state.length.tolist() == [40, 40]


def test_from_the_state_of_power_attention(draw, dense):
    inputs = draw()
    _, past = power_attention(*span(inputs, 0, 20), return_state=True)
    state = start(*inputs[1:3], past=past, past_length=20, chunk_size=8)
    out, state = power_attention_step(*span(inputs, 20, 40), state)
    torch.testing.assert_close(out, dense(*inputs)[:, :, 20:], atol=1e-12, rtol=1e-12)
    assert state.length.tolist() == [40, 40]


def test_folding_gives_the_state_of_power_attention(draw):
    inputs = draw(length=48)
    _, state = power_attention_step(*inputs, start(*inputs[1:3], chunk_size=16))
    want = power_attention(*inputs, return_state=True)[1]
    torch.testing.assert_close(PowerState(*state[:2]), want, atol=1e-11, rtol=1e-12)
    assert not state.filled.any()


def test_sequences_of_different_lengths(draw, dense):
    """Two prompts of 13 and 30 tokens: their chunks are filled at different steps."""
    inputs = draw()
    states = [
        power_attention_prefill(*(x[n : n + 1] for x in span(inputs, 0, cut)), chunk_size=16)[1]
        for n, cut in enumerate((13, 30))
    ]
    state = DecodeState(*map(torch.cat, zip(*states, strict=True)))
    want = dense(*inputs)
    for step in range(10):
        at = torch.tensor([13, 30]) + step
        token = [x[torch.arange(2), :, at][:, :, None] for x in inputs]
        out, state = power_attention_step(*token, state, inplace=True)
        expected = want[torch.arange(2), :, at][:, :, None]
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    assert state.filled.tolist() == [7, 8]
    assert state.length.tolist() == [23, 40]


def test_a_closed_gate_forgets_and_later_gates_count(draw, dense):
    inputs = draw(dtype=torch.float32)
    spans = ((3, 13), (13, 25), (25, 40))
    want = torch.cat([dense(*span(inputs, *bounds)) for bounds in spans], 2)[:, :, 4:]
    inputs[3][:, :, [3, 13, 25]] = -1e30
    state = DecodeState.start(*span(inputs[1:], 0, 7), chunk_size=16)
    out, _ = power_attention_step(*span(inputs, 7, 40), state)
    torch.testing.assert_close(out.double(), want, atol=1e-3, rtol=1e-3)


def test_in_place_or_not(draw):
    inputs = draw()
    state = start(*inputs[1:3], chunk_size=8)
    before = [x.clone() for x in state]
    _, new = power_attention_step(*inputs, state)
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))
    _, same = power_attention_step(*inputs, state, inplace=True)
    assert all(a is b for a, b in zip(same, state, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(state, new, strict=True))


def test_a_state_must_be_contiguous(draw):
    inputs = draw()
    state = start(*inputs[1:3])
    turned = state._replace(z=state.z.mT.contiguous().mT)
    with pytest.raises(ValueError, match=r"state.z must be contiguous, got strides"):
        power_attention_step(*inputs, turned)


def test_an_overwritten_chunk_leaves_nothing_behind(draw):
    """The buffers keep old tokens after a fold; a step must not see them."""
    inputs = draw(length=12)
    _, state = power_attention_step(*inputs, start(*inputs[1:3], chunk_size=8))
    stale = DecodeState(*(x.clone() for x in state))
    for buffer in (stale.k, stale.v, stale.log_g):
        buffer[:, :, 4:] = -1e6
    token = span(inputs, 0, 1)
    assert torch.equal(
        power_attention_step(*token, state)[0], power_attention_step(*token, stale)[0]
    )


def test_no_tokens_and_no_sequences(draw):
    for sizes in ({"length": 0}, {"batch": 0}):
        inputs = draw(**sizes)
        out, state = power_attention_step(*inputs, start(*inputs[1:3]))
        assert out.shape == (*inputs[0].shape[:3], 6)
        assert state.length.tolist() == [0] * inputs[0].shape[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chunk_size", [8, 64])
def test_low_precision(chunk_size, dtype, draw, dense):
    inputs = draw(length=150, head_dim=32, dtype=dtype)
    out, state = power_attention_step(*inputs, start(*inputs[1:3], chunk_size=chunk_size))
    want = dense(*inputs)
    error = (out.double() - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt()
    assert error < (2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2)
    assert state.k.dtype == out.dtype == dtype
    assert state.s.dtype == state.log_g.dtype == torch.float32


@pytest.mark.parametrize("inplace", [False, True])
def test_compile_and_opcheck(inplace, draw, dense):
    inputs = draw()
    state = start(*inputs[1:3], chunk_size=8)
    torch.library.opcheck(_step, (*inputs, *state, 2, 0.3, "reference"))

    def decode(q, k, v, log_g, state):
        return power_attention_step(2 * q, k, v, log_g, state, inplace=inplace)

    torch.compiler.reset()
    decode = torch.compile(decode, fullgraph=True, backend="aot_eager")
    outs = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for t in range(20):
            out, state = decode(*span(inputs, t, t + 1), state)
            outs.append(out)
    want = dense(*inputs)[:, :, :20]
    torch.testing.assert_close(torch.cat(outs, 2), want, atol=1e-12, rtol=1e-12)
    assert state.length.tolist() == [20, 20]


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (TypeError, "state must be a DecodeState, got tuple", {"state": (1, 2)}),
        (ValueError, r"state.s must have the shape \[2, 2, 1280, 6\]", {"deg": 4}),
        (TypeError, "state.s must have the dtype torch.float64", {"dtype": torch.float32}),
        (ValueError, "q, k, v and log_g must not require gradients", {"grad": True}),
        (ValueError, "log_g must be <= 0", {"log_g": torch.ones(2, 2, 40).double()}),
        (ValueError, "impl must be", {"impl": "fast"}),
    ],
)
def test_errors(error, message, changes, draw):
    q, k, v, log_g = draw()
    dtype = changes.pop("dtype", torch.float64)
    state = changes.pop("state", start(k.to(dtype), v.to(dtype)))
    if changes.pop("grad", False):
        q.requires_grad_()
    with pytest.raises(error, match=message):
        power_attention_step(q, k, v, changes.pop("log_g", log_g), state, **changes)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("chunk_size must be 8 or more, got 4", lambda k, v: start(k, v, chunk_size=4)),
        ("past_length must be 0 or more, got -1", lambda k, v: start(k, v, past_length=-1)),
        ("past_length must be an int, got float", lambda k, v: start(k, v, past_length=2.5)),
        (
            "log_g must be <= 0 .* got 1",
            lambda k, v: DecodeState.start(k, v, torch.ones(2, 2, 40).double()),
        ),
        (
            "k must hold fewer than chunk_size = 8 .* got 40",
            lambda k, v: DecodeState.start(k, v, chunk_size=8),
        ),
        (r"past.s must have the shape \[2, 2, 64, 6\]", lambda k, v: start(k, v, past=(v, v))),
        ("chunk_size must be", lambda k, v: power_attention_prefill(k, k, v, chunk_size=0)),
        ("past must be a PowerState or None, got int", lambda k, v: start(k, v, past=1)),
        ("k must have a floating dtype, got torch.int64", lambda k, v: start(k.long(), v)),
    ],
)
def test_errors_at_the_start(message, call, draw):
    _, k, v, _ = draw()
    with pytest.raises((TypeError, ValueError), match=message):
        call(k, v)
