import math

import pytest
import torch
from attn_gym.mods import generate_sandwich_bias, generate_tanh_softcap

import score_mods as sm

H, T, D = 4, 40, 16
INDEX = torch.arange(H)[:, None, None], torch.arange(T)[:, None], torch.arange(T)


def evaluate(mod, score=None):
    score = torch.zeros(H, T, T, dtype=torch.float64) if score is None else score
    return mod(score, torch.tensor(0), *INDEX)


def test_forgetting_gates_go_with_their_tokens():
    """A packed batch needs no positions, and each row of a batch has its own gates."""
    q, k, v = torch.randn(3, 2, H, T, D, dtype=torch.float64)
    log_g = -torch.rand(2, H, T, dtype=torch.float64)
    ids = torch.arange(T) // 13
    mask = sm.and_masks(sm.causal, sm.document(ids))
    packed = sm.dense_attention(q, k, v, sm.forgetting_gate(log_g), mask)
    for document in ids.unique():
        part = (ids == document).nonzero().flatten()
        alone = sm.dense_attention(
            *(x[:, :, part] for x in (q, k, v)),
            sm.forgetting_gate(log_g[:, :, part]),
            sm.causal,
        )
        torch.testing.assert_close(packed[:, :, part], alone, rtol=0, atol=1e-12)
    row = sm.dense_attention(q[1:], k[1:], v[1:], sm.forgetting_gate(log_g[1:]), mask)
    torch.testing.assert_close(packed[1:], row, rtol=0, atol=1e-12)


def test_forgetting_gates_are_exact_far_from_the_start():
    """Sums near -20,000 whose difference is what counts: float32 would be off by 0.001."""
    log_g = torch.full((1, 1, 100_000), -0.2)
    mod = sm.forgetting_gate(log_g)
    zero, far = torch.tensor(0), torch.tensor(99_999)
    out = mod(torch.zeros(3), zero, zero, far, far - torch.tensor([0, 1, 50]))
    assert out.dtype == torch.float32
    expected = [0.0, log_g[0, 0, 0].item(), 50 * log_g[0, 0, 0].item()]
    assert out.tolist() == pytest.approx(expected, rel=1e-6)


def test_forgetting_gates_are_shared_where_an_axis_is_1():
    one = sm.forgetting_gate(torch.full((1, 1, T), -0.3, dtype=torch.float64))
    expected = -0.3 * (INDEX[1] - INDEX[2]).double().expand(H, T, T)
    torch.testing.assert_close(evaluate(one), expected)
    assert one.num_heads is None
    assert sm.forgetting_gate(torch.zeros(1, 3, T)).num_heads == 3


def test_sandwich_is_that_of_attention_gym():
    theirs = evaluate(generate_sandwich_bias(H, T))
    torch.testing.assert_close(evaluate(sm.sandwich(H, T)), theirs, rtol=0, atol=2e-5)


def test_softcap_is_that_of_attention_gym_and_keeps_gradients():
    score = 100 * torch.randn(H, T, T, dtype=torch.float64)
    for cap in (30, 50):
        theirs = evaluate(generate_tanh_softcap(cap), score)
        torch.testing.assert_close(evaluate(sm.softcap(cap), score), theirs)
        torch.testing.assert_close(evaluate(sm.softcap(cap, approx=True), score), theirs)
    score = torch.randn(H, T, T, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(evaluate(sm.softcap(2.0, approx=True), score).sum(), score)
    torch.testing.assert_close(grad, 1 - torch.tanh(score / 2) ** 2)


def test_softcap_comes_before_a_bias():
    sm.compose(sm.logn(), sm.softcap(50), sm.alibi(H))
    for bias in (sm.alibi(H), sm.scale_invariant(), sm.distance_table(torch.zeros(1, 3))):
        with pytest.raises(ValueError, match=f"softcap after {bias.__name__}"):
            sm.compose(bias, sm.softcap(50))
        sm.compose(bias, sm.softcap(50), check_order=False)


def test_a_fire_bias_within_its_threshold_is_a_distance_table():
    w1, b1, w2, b2 = (torch.randn(*s, dtype=torch.float64) for s in ((8,), (8,), (H, 8), (H,)))
    psi = torch.log(0.1 * torch.arange(T, dtype=torch.float64) + 1)
    x = psi / (math.log(0.1 * T + 1) + 1e-6)
    curve = torch.relu(x[:, None] * w1 + b1) @ w2.mT + b2
    table = torch.cat([curve.flip(0)[:-1], curve]).mT
    ours = evaluate(sm.fire(w1, b1, w2, b2, threshold=float(T)))
    torch.testing.assert_close(ours, evaluate(sm.distance_table(table)), rtol=0, atol=1e-12)


def test_t5_buckets_are_those_of_its_paper():
    """The 16 single distances, the edges of the logarithmic ones, and both sides of an encoder."""
    causal = sm.t5_buckets(32, 128)
    assert causal[128:].tolist()[:20] == [*range(16), 16, 16, 16, 17]
    assert causal[:129].tolist() == [0] * 129
    assert causal[-1] == 31
    both = sm.t5_buckets(32, 128, bidirectional=True)
    assert both[128:].tolist()[:9] == [*range(8), 8]
    assert torch.equal(both[:128].flip(0), both[129:] + 16)
    assert (causal[128:].diff() >= 0).all()
    # 8, 16 and 32 are edges, which float32 may put into the bucket below.
    assert sm.t5_buckets(8, 64)[64:][[4, 8, 16, 32, 63]].tolist() == [4, 5, 6, 7, 7]
    # 10 and 20 are, which float64 would put there, too.
    assert sm.t5_buckets(10, 160)[160:][[9, 10, 19, 20]].tolist() == [5, 6, 6, 7]
