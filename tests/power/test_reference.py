import itertools
from functools import partial

import pytest
import torch

from power import reference
from power.feature_map import PowerState, monomials
from power.reference import chunked, packed, quadratic, recurrent

FORMS = [quadratic, recurrent, partial(chunked, chunk_size=16)]
EXACT_FROM = 8  # tokens in the state from which the forms agree to 1e-12


def names(value):
    return getattr(getattr(value, "func", value), "__name__", None)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [{}, {"kv_heads": 1}, {"kv_heads": 4, "value_dim": 11}])
@pytest.mark.parametrize(("deg", "head_dim"), [(2, 8), (2, 32), (4, 5), (6, 3)])
@pytest.mark.parametrize("form", FORMS, ids=names)
def test_forms_equal_the_oracle(form, deg, head_dim, shape, gated, draw, dense):
    q, k, v, log_g = draw(head_dim=head_dim, **shape)
    log_g = log_g if gated else None
    out, state = form(q, k, v, log_g, deg=deg)
    start = EXACT_FROM if form is recurrent else 0
    want = dense(q, k, v, log_g, deg)
    torch.testing.assert_close(out[:, :, start:], want[:, :, start:], atol=1e-12, rtol=1e-12)
    assert state is None


@pytest.mark.parametrize("bug", ["dropped diagonal", "shifted gate", "gate of the next token"])
def test_the_oracle_tells_a_bug(bug, draw, dense):
    inputs = draw()
    right, wrong = dense(*inputs)[:, :, 8:], dense(*inputs, bug=bug)[:, :, 8:]
    if (
        bug == "shifted gate"
    ):  # an exclusive sum shifts weights by exp(log_g_j - log_g_i): not constant in j
        assert (right - wrong).abs().max() > 1e-3
    torch.testing.assert_close(quadratic(*inputs)[0][:, :, 8:], right, atol=1e-12, rtol=1e-12)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(quadratic(*inputs)[0][:, :, 8:], wrong, atol=1e-3, rtol=1e-3)


def test_a_wrong_tile_weight_is_seen(draw, dense, monkeypatch):
    inputs = draw(head_dim=32)

    def unweighted(x, deg):
        (first, second), _ = monomials(x.shape[-1], deg)
        return x[..., first] * x[..., second]

    monkeypatch.setattr(reference, "symmetric_power", unweighted)
    out, _ = chunked(*inputs, chunk_size=16)
    assert (out - dense(*inputs)).abs().max() > 1e-3


@pytest.mark.parametrize("chunk_size", [1, 7, 16, 40, 64])
def test_any_chunk_size(chunk_size, draw, dense):
    q, k, v, log_g = draw()
    out, _ = chunked(q, k, v, log_g, chunk_size=chunk_size)
    want = dense(q, k, v, log_g)
    start = 0 if chunk_size >= EXACT_FROM else EXACT_FROM
    torch.testing.assert_close(out[:, :, start:], want[:, :, start:], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 17])
def test_short_sequences(length, draw, dense):
    inputs = draw(length=length)
    for form in (quadratic, partial(chunked, chunk_size=16)):
        torch.testing.assert_close(form(*inputs)[0], dense(*inputs), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("form", FORMS, ids=names)
@pytest.mark.parametrize("sizes", [{"batch": 0}, {"length": 0}])
def test_nothing_to_attend_to(form, sizes, draw):
    q, k, v, log_g = draw(**sizes)
    out, state = form(q, k, v, log_g, return_state=True)
    assert out.shape == (*q.shape[:3], v.shape[-1])
    assert state.s.shape == (*k.shape[:2], 64, v.shape[-1])
    assert not state.s.any()
    assert not state.z.any()


@pytest.mark.parametrize("cut", [8, 23])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=names)
def test_a_state_carried_over_a_split(form, gated, cut, draw, dense):
    q, k, v, log_g = draw()
    log_g = log_g if gated else None

    def part(*bounds):
        span = slice(*bounds)
        return q[:, :, span], k[:, :, span], v[:, :, span], log_g[:, :, span] if gated else None

    _, state = form(*part(None, cut), return_state=True)
    out, last = form(*part(cut, None), initial_state=state, return_state=True)
    want = dense(q, k, v, log_g)[:, :, cut:]
    torch.testing.assert_close(out, want, atol=1e-12, rtol=1e-12)
    whole = quadratic(q, k, v, log_g, return_state=True)[1]
    for got, expected in zip(last, whole, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-11, rtol=1e-12)


@pytest.mark.parametrize("form", FORMS, ids=names)
def test_packed_sequences_do_not_see_each_other(form, draw, dense):
    q, k, v, log_g = draw(batch=1, length=40)
    bounds = [0, 0, 12, 13, 13, 40, 40]
    out, state = packed(form, q, k, v, log_g, torch.tensor(bounds), return_state=True)
    for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
        parts = [x[:, :, start:stop] for x in (q, k, v, log_g)]
        first = EXACT_FROM if form is recurrent else 0
        torch.testing.assert_close(
            out[:, :, start:stop][:, :, first:],
            dense(*parts)[:, :, first:],
            atol=1e-12,
            rtol=1e-12,
        )
        alone = form(*parts, return_state=True)[1]
        torch.testing.assert_close(state.s[n : n + 1], alone.s)
    resumed, _ = packed(form, q, k, v, log_g, torch.tensor(bounds), initial_state=state)
    third = [x[:, :, 13:40] for x in (q, k, v, log_g)]
    twice = dense(*(torch.cat([x, x], 2) for x in third))[:, :, 27:]
    torch.testing.assert_close(resumed[:, :, 13:40], twice, atol=1e-12, rtol=1e-12)


def test_few_tokens_in_the_state_cancel(draw, dense):
    """Why the first chunk stays out of the state: even the first token is inexact in it."""
    inputs = draw(batch=64, length=2, head_dim=32, dtype=torch.float32)
    want = dense(*inputs)
    through_state = (recurrent(*inputs)[0] - want).abs().max()
    direct = (quadratic(*inputs)[0] - want).abs().max()
    assert direct < 1e-5
    assert through_state > 30 * direct


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", [quadratic, partial(chunked, chunk_size=16)], ids=names)
def test_low_precision_is_rounded_once(form, dtype, draw, dense):
    inputs = draw(length=60, head_dim=16, dtype=dtype)
    out, state = form(*inputs, return_state=True)
    want = dense(*inputs)
    error = (out.double() - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt()
    assert out.dtype == dtype
    assert state.s.dtype == state.z.dtype == torch.float32
    assert error < (1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2)


def test_long_gates_keep_their_differences(draw, dense):
    """The running sum passes 1e5, where neighbouring fp32 numbers are 1/128 apart."""
    q, k, v, log_g = draw(length=64, dtype=torch.float32)
    log_g = log_g - 3000 * (torch.arange(64) == 0) - 100000 * (torch.arange(64) == 1)
    want = dense(q, k, v, log_g)
    for form in (quadratic, partial(chunked, chunk_size=16)):
        torch.testing.assert_close(form(q, k, v, log_g)[0].double(), want, atol=1e-5, rtol=1e-5)


def test_a_query_of_zeros_gives_zero(draw):
    q, k, v, log_g = draw(length=20)
    q[:, :, [0, 3, 19]] = 0
    q.requires_grad_()
    for form in FORMS:
        (grad,) = torch.autograd.grad(form(q, k, v, log_g)[0].sum(), q)
        assert not form(q, k, v, log_g)[0][:, :, [0, 3, 19]].any()
        assert not grad[:, :, [0, 3, 19]].any()
        assert grad.isfinite().all()


@pytest.mark.parametrize("form", [quadratic, partial(chunked, chunk_size=5)], ids=names)
@pytest.mark.parametrize("deg", [2, 4])
def test_gradients(form, deg, draw):
    q, k, v, log_g = (x.requires_grad_() for x in draw(1, 2, 1, 11, 3, 2))
    before = quadratic(*draw(1, 2, 1, 12, 3, 2, seed=1), deg=deg, return_state=True)[1]
    s, z = (x.requires_grad_() for x in before)

    def call(q, k, v, log_g, s, z):
        out, state = form(
            q, k, v, log_g, deg=deg, initial_state=PowerState(s, z), return_state=True
        )
        return out, *state

    assert torch.autograd.gradcheck(call, (q, k, v, log_g, s, z))


@pytest.mark.parametrize("form", FORMS, ids=names)
def test_an_odd_degree(form, draw):
    with pytest.raises(ValueError, match=r"deg must be positive and even .* got 3"):
        form(*draw(), deg=3)
