import numpy as np
import pytest
import torch

import score_mods as sm

T = 23
IDX = torch.arange(T)
HEADS = torch.arange(2)[:, None, None]


def evaluate(mod, score=None):
    score = (
        torch.linspace(-3, 3, 2 * T * T, dtype=torch.float64).view(2, T, T)
        if score is None
        else score
    )
    return mod(score, torch.tensor(0), HEADS, IDX[:, None], IDX)


def test_compose_applies_from_left_to_right():
    temperature, bias = sm.logn(), sm.alibi(2)
    assert torch.equal(
        evaluate(sm.compose(temperature, bias)), evaluate(bias, evaluate(temperature))
    )
    assert not torch.allclose(
        evaluate(sm.compose(temperature, bias)), evaluate(sm.compose(bias, temperature))
    )
    identity = sm.compose()
    assert torch.equal(evaluate(identity), evaluate(lambda s, b, h, q, k: s))
    assert sm.compose(sm.logn(), sm.alibi(2)).__name__ == "logn then alibi"


@pytest.mark.parametrize(
    ("mods", "message"),
    [
        ([sm.logn(), sm.ssmax(0.4)], "two temperatures, logn and ssmax"),
        ([sm.scale_invariant(), sm.logn()], "two temperatures, scale_invariant and logn"),
        (
            [sm.with_offset(sm.logn(), 1), sm.alibi(2), sm.exempt_keys(sm.scale_invariant(), 1)],
            "two temperatures, logn and scale_invariant",
        ),
        ([sm.compose(sm.alibi(2), sm.logn()), sm.infoscale(64, 32)], "logn and infoscale"),
        ([sm.alibi(2), sm.logn(), sm.softcap(5.0)], "softcap after alibi: a cap comes before"),
        ([sm.scale_invariant(), sm.softcap(5.0)], "softcap after scale_invariant"),
    ],
)
def test_compose_refuses_what_is_almost_always_a_mistake(mods, message):
    with pytest.raises(ValueError, match=message):
        sm.compose(*mods)
    allowed = sm.compose(*mods, check_order=False)
    score = torch.randn(2, T, T, dtype=torch.float64)
    expected = score
    for mod in mods:
        expected = evaluate(mod, expected)
    assert torch.equal(evaluate(allowed, score), expected)


def test_the_usual_order_is_allowed():
    sm.compose(sm.logn(), sm.alibi(2))
    sm.compose(sm.alibi(2), lambda s, b, h, q, k: s / 2, sm.logn())
    sm.compose(sm.logn(), sm.softcap(5.0), sm.alibi(2))


def test_offsets_are_added_to_both_positions():
    seen = {}

    def spy(score, b, h, q_idx, kv_idx):
        seen["q"], seen["kv"] = q_idx, kv_idx
        return score

    for q_offset, kv_offset in [
        (5, 0),
        (torch.tensor(7), 2),
        (-1, torch.tensor(3, dtype=torch.int32)),
    ]:
        evaluate(sm.with_offset(spy, q_offset, kv_offset))
        assert torch.equal(seen["q"], IDX[:, None] + int(q_offset))
        assert torch.equal(seen["kv"], IDX + int(kv_offset))
        assert seen["q"].dtype == seen["kv"].dtype == torch.int64


def test_a_tensor_offset_is_read_when_the_mod_runs():
    offset = torch.tensor(0)
    mod = sm.with_offset(sm.alibi(2), offset)
    before = evaluate(mod)
    offset.fill_(4)
    assert torch.equal(evaluate(mod), evaluate(sm.with_offset(sm.alibi(2), 4)))
    assert not torch.equal(evaluate(mod), before)


def test_positions_come_from_tables_of_each_batch_row():
    q_positions = torch.tensor([[4, 9], [0, 1]])
    kv_positions = torch.tensor([[0, 9, 2], [5, 1, 0]])
    mod = sm.with_positions(sm.alibi(1), q_positions, kv_positions)
    b = torch.arange(2)[:, None, None]
    out = mod(torch.zeros(2, 2, 3), b, torch.tensor(0), torch.arange(2)[:, None], torch.arange(3))
    slope = sm.alibi_slopes(1).item()
    expected = -slope * (q_positions[:, :, None] - kv_positions[:, None]).abs()
    torch.testing.assert_close(out, expected.float())

    mask = sm.with_positions(sm.causal, q_positions, kv_positions)
    visible = mask(b, torch.tensor(0), torch.arange(2)[:, None], torch.arange(3))
    assert torch.equal(visible, kv_positions[:, None] <= q_positions[:, :, None])


def test_exempt_keys_keep_their_scores():
    mod = sm.scale_invariant()
    for n in (0, 1, 4, T):
        score = torch.randn(2, T, T, dtype=torch.float64)
        out = evaluate(sm.exempt_keys(mod, n), score)
        assert torch.equal(out[..., :n], score[..., :n])
        assert torch.equal(out[..., n:], evaluate(mod, score)[..., n:])
    low = evaluate(sm.exempt_keys(mod, 1), torch.randn(2, T, T, dtype=torch.bfloat16))
    assert low.dtype == torch.float32


def test_exempt_keys_are_absolute_under_an_offset():
    mod = sm.with_offset(sm.exempt_keys(sm.alibi(2), 3), 0, 2)
    score = torch.randn(2, T, T)
    out = evaluate(mod, score)
    assert torch.equal(out[..., :1], score[..., :1])
    assert not torch.equal(out[..., 1], score[..., 1])


OF_TWENTY = {
    "forgetting_gate": sm.forgetting_gate(-torch.rand(1, 2, 20)),
    "scale_invariant_grid": sm.scale_invariant_grid((4, 5)),
    "document": sm.document(torch.arange(20) // 9),
    "natten": sm.natten((4, 5), (3, 3)),
    "clear": sm.clear((4, 4), 2, text_length=4),
    "longformer": sm.longformer(torch.arange(20) == 3, 2),
}


@pytest.mark.parametrize("name", OF_TWENTY)
def test_no_mod_is_asked_for_positions_that_it_was_not_made_for(name):
    mod = OF_TWENTY[name]
    scores = name in ("forgetting_gate", "scale_invariant_grid")
    combined = sm.compose(sm.softcap(5.0), mod) if scores else sm.and_masks(sm.causal, mod)

    def attend(queries, mod):
        q, k = torch.randn(1, 2, queries, 4), torch.randn(1, 2, 20, 4)
        return sm.attention(q, k, k, *([mod] if scores else [None, mod]), impl="dense")

    for mod in (OF_TWENTY[name], combined):
        attend(20, mod)
        attend(2, sm.with_offset(mod, 18))
        attend(1, sm.with_positions(mod, torch.tensor([19]), torch.arange(20)))
        for queries, beyond in ((21, mod), (3, sm.with_offset(mod, 18))):
            with pytest.raises(ValueError, match="must reach to a batch of 1"):
                attend(queries, beyond)
        with pytest.raises(ValueError, match="q_offset must be at least 0 for a mod of 20"):
            sm.with_offset(mod, -1)
        with pytest.raises(ValueError, match="q_positions must be below 20 for a mod"):
            sm.with_positions(mod, torch.tensor([[3], [20]]))
        if scores:
            with pytest.raises(ValueError, match="kv_positions must be at least 0 for a"):
                sm.with_positions(mod, torch.tensor([3]), torch.tensor([-1, 3]))


def test_heads_follow_a_mod_through_every_combination():
    mod = sm.scale_invariant(torch.full((4,), 10.0))
    for combined in (
        mod,
        sm.compose(sm.yarn_temperature(2.0), mod, check_order=False),
        sm.with_offset(mod, 3),
        sm.with_positions(mod, IDX),
        sm.exempt_keys(mod, 1),
    ):
        assert combined.num_heads == 4
    with pytest.raises(ValueError, match=r"\[2, 4\]"):
        sm.compose(sm.alibi(2), mod)


def test_to_device_copies_only_what_must_move():
    offset = torch.tensor(3)
    mod = sm.compose(sm.scale_invariant(), sm.with_offset(sm.alibi(2), offset))
    assert sm.to_device(mod, "cpu") is mod
    moved = sm.to_device(mod, "meta")
    assert moved is not mod
    out = moved(
        torch.zeros(2, 3, 3, device="meta"),
        *(torch.zeros(1, dtype=torch.long, device="meta") for _ in range(4)),
    )
    assert out.device.type == "meta"
    assert moved.num_heads == 2


def test_to_device_keeps_a_copy_until_the_tensor_changes():
    def captured(mod):
        return [
            c.cell_contents for c in mod.__closure__ if isinstance(c.cell_contents, torch.Tensor)
        ]

    offset = torch.tensor(3)
    mod = sm.with_offset(sm.causal, offset, 1)
    first, again = captured(sm.to_device(mod, "meta")), captured(sm.to_device(mod, "meta"))
    assert [x is y for x, y in zip(first, again, strict=True)] == [True, True]
    offset.add_(1)
    later = captured(sm.to_device(mod, "meta"))
    assert sorted(x is y for x, y in zip(first, later, strict=True)) == [False, True]


def test_to_device_keeps_gradients():
    tau = torch.tensor([3.0, 4.0], requires_grad=True)
    moved = sm.to_device(sm.scale_invariant(tau), "meta")
    index = torch.zeros(1, dtype=torch.long, device="meta")
    out = moved(torch.zeros(1, device="meta"), index, index, index, index + 5)
    assert out.requires_grad
    assert out.grad_fn is not None


class Own:
    def mask(self, b, h, q_idx, kv_idx):
        return q_idx >= kv_idx


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: sm.compose(sm.causal), TypeError, "argument 0 of compose must be a score_mod"),
        (lambda: sm.compose(lambda s: s), TypeError, "argument 0 must be a score_mod"),
        (lambda: sm.compose(3), TypeError, "got int"),
        (lambda: sm.compose(check_order="no"), TypeError, "check_order must be a bool"),
        (lambda: sm.with_offset(sm.causal, 1.5), TypeError, "q_offset must be an int"),
        (lambda: sm.with_offset(sm.causal, 1, torch.tensor(1.0)), TypeError, "kv_offset"),
        (lambda: sm.with_offset(sm.causal, torch.tensor(True)), TypeError, "got torch.bool"),
        (lambda: sm.with_offset(sm.causal, torch.tensor([1])), ValueError, "q_offset"),
        (lambda: sm.with_offset(lambda a: a, 1), TypeError, "function of 1 arguments"),
        (lambda: sm.with_offset([].append, 1), TypeError, "got builtin_function_or_method"),
        (lambda: sm.with_offset(Own().mask, 1), TypeError, "got method"),
        (lambda: sm.with_positions(sm.causal, [1]), TypeError, "q_positions"),
        (lambda: sm.with_positions(sm.causal, np.arange(3)), TypeError, "got ndarray"),
        (lambda: sm.with_positions(sm.causal, IDX, IDX.float()), TypeError, "kv_positions"),
        (lambda: sm.with_positions(sm.causal, IDX.view(1, 1, -1)), ValueError, "q_positions"),
        (lambda: sm.exempt_keys(sm.causal, 1), TypeError, "got a mask_mod"),
        (lambda: sm.exempt_keys(sm.alibi(2), -1), ValueError, "n must be at least 0"),
        (lambda: sm.exempt_keys(sm.alibi(2), 1.0), TypeError, "n must be an int"),
    ],
)
def test_bad_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
