import math

import numpy as np
import pytest
import torch

import score_mods as sm

B, H, T, D = 2, 4, 17, 8


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def collinear_scores(q, t, frequencies, positions, interleaved=False):
    """The paper's: for each pair a key q * gate, rotated, times the rotated query."""
    z = torch.view_as_complex(
        (q.unflatten(-1, (-1, 2)) if interleaved else q.unflatten(-1, (2, -1)).mT).contiguous()
    )
    turn = np.exp(1j * np.outer(positions, frequencies))
    score = np.empty((*q.shape[:3], t.shape[2]))
    for b, h, i, j in np.ndindex(*score.shape):
        query = z[b, h, i].numpy()
        key = query * t[b, h, j].clamp(min=0).numpy()
        score[b, h, i, j] = (query * turn[i] * (key * turn[j]).conj()).real.sum()
    return torch.from_numpy(score / D**0.5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_coca_equals_one_key_for_each_pair(interleaved):
    rotary = sm.Rotary(sm.rope(D).frequencies, interleaved=interleaved)
    q, t, v = normal(B, H, T, D), normal(B, H, T, D // 2), normal(B, H, T, D)
    transform = sm.coca(rotary)
    score = collinear_scores(q, t, rotary.frequencies.numpy(), np.arange(T), interleaved)
    expected = score.masked_fill(~torch.ones(T, T).tril().bool(), -math.inf).softmax(-1) @ v
    keys = transform.keys(t)
    out = sm.dense_attention(transform.queries(q), keys, v, None, sm.causal)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    for step in range(T):
        last = sm.dense_attention(
            transform.queries(q[:, :, [step]], torch.tensor([step])),
            keys[:, :, : step + 1],
            v[:, :, : step + 1],
        )
        torch.testing.assert_close(last, expected[:, :, [step]], rtol=0, atol=1e-10)


def test_coca_depends_on_distance_alone_and_has_gradients():
    q, t = normal(1, 1, 3, D), normal(1, 1, 3, D // 2)
    transform = sm.coca(sm.rope(D))
    near = transform.queries(q) @ transform.keys(t).mT
    there = torch.arange(3) + 1000
    torch.testing.assert_close(transform.queries(q, there) @ transform.keys(t, there).mT, near)
    assert torch.autograd.gradcheck(transform.queries, (q.requires_grad_(),))
    assert torch.autograd.gradcheck(transform.keys, (t.requires_grad_(),))


@pytest.mark.parametrize("c", [3.0, torch.tensor([0.5, 1.0, 2.0, 30.0], dtype=torch.float64)])
def test_cosscale_equals_the_cosine(c):
    q, k, v = (normal(B, H, T, D) for _ in range(3))
    transform = sm.cosscale(c)
    cosine = torch.nn.functional.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1)
    expected = (cosine * torch.as_tensor(c).expand(H)[:, None, None]).softmax(-1) @ v
    out = sm.dense_attention(transform.queries(q), transform.keys(k), v)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)


def test_cosscale_takes_grouped_keys_and_zero_vectors():
    q, k = normal(1, 4, 5, D), normal(1, 2, 5, D)
    q[0, 0, 0] = 0
    transform = sm.cosscale(torch.ones(4, dtype=torch.float64))
    out = sm.dense_attention(transform.queries(q), transform.keys(k), k)
    assert out.isfinite().all()
    torch.testing.assert_close(out[0, 0, 0], k[0, 0].mean(0))
    assert transform.keys(k.bfloat16()).dtype == torch.bfloat16
    assert transform.queries(q.bfloat16()).dtype == torch.bfloat16


def test_gradients_of_cosscale():
    q, k, v = (normal(1, 2, 4, 3).requires_grad_() for _ in range(3))
    c = torch.tensor([1.5, 3.0], dtype=torch.float64, requires_grad=True)

    def run(q, k, v, c):
        transform = sm.cosscale(c)
        return sm.dense_attention(transform.queries(q), transform.keys(k), v, None, sm.causal)

    assert torch.autograd.gradcheck(run, (q, k, v, c))


def test_pose_positions_skip_once():
    generator = torch.Generator().manual_seed(3)
    cuts, ends = set(), []
    for _ in range(300):
        positions = sm.pose_positions(9, 40, generator)
        steps = positions.diff()
        assert positions[0] == 0
        assert (steps >= 1).all()
        assert (steps > 1).sum() <= 1
        cuts |= {int(steps.argmax()) + 1} if steps.max() > 1 else set()
        ends.append(int(positions[-1]))
    assert cuts == {1, 2, 3, 4, 5}
    assert (min(ends), max(ends)) == (8, 39)
    assert torch.equal(sm.pose_positions(5, 5), torch.arange(5))


def test_skipped_positions_go_through_rotary_and_score_mods():
    positions = sm.pose_positions(T, 400, torch.Generator().manual_seed(1))
    q, k, v = (normal(1, H, T, D) for _ in range(3))
    rotary, mod = sm.rope(D), sm.with_positions(sm.scale_invariant(), positions)
    out = sm.dense_attention(rotary(q, positions), rotary(k, positions), v, mod, sm.causal)
    # The same tokens at their places in a sequence that is as long as the positions say.
    long_q, long_k, long_v = (torch.zeros(1, H, 400, D).double() for _ in range(3))
    for long, x in ((long_q, q), (long_k, k), (long_v, v)):
        long[:, :, positions] = x
    there = torch.zeros(400, dtype=torch.bool).index_fill(0, positions, True)
    mask = sm.and_masks(sm.causal, lambda b, h, q_idx, kv_idx: there[kv_idx])
    full = sm.dense_attention(rotary(long_q), rotary(long_k), long_v, sm.scale_invariant(), mask)
    torch.testing.assert_close(out, full[:, :, positions], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sm.cosscale("c"), TypeError, "c must be a number"),
        (lambda: sm.cosscale(1.0, 0.0), ValueError, "eps"),
        (lambda: sm.cosscale().keys(None), TypeError, "k must be a floating tensor"),
        (
            lambda: sm.cosscale(torch.ones(3)).queries(torch.ones(1, 2, 3, 4)),
            ValueError,
            "c is for 3 heads, q has 2",
        ),
        (lambda: sm.coca(sm.rope(8)).queries([]), TypeError, "q must be a floating tensor"),
        (lambda: sm.coca(sm.rope(8)).keys(1), TypeError, "t must be a floating tensor, got int"),
        (lambda: sm.coca(8), TypeError, "rotary must be a Rotary, got int"),
        (lambda: sm.coca(sm.rope(8)).queries(torch.zeros(1, 1, 2, 4)), ValueError, "q must have"),
        (lambda: sm.coca(sm.rope(8)).keys(torch.zeros(1, 1, 2, 8)), ValueError, "t must have"),
        (lambda: sm.pose_positions(1, 8), ValueError, "length must be at least 2"),
        (lambda: sm.pose_positions(8, 7), ValueError, "target_length must be at least 8"),
        (lambda: sm.pose_positions(2, 8, 0), TypeError, "generator must be a .* got int"),
        (lambda: sm.cosscale(10**400), ValueError, "c must be a number, finite, got 1000"),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
