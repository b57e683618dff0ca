"""Merging, sinks and two-branch attention against loops over single pairs."""

import cmath
import math
import warnings

import numpy as np
import pytest
import torch

import score_mods as sm

H, D, D_V, W = 2, 8, 5, 6
ROTARY = sm.rope(D, base=100.0)

# By the names of the catalogue: the mechanism, the distance at which a pair is rotated, and
# whether it is seen (for keys up to the query).
CASES = {
    "rerope": (
        sm.rerope(ROTARY, W),
        lambda i, j: min(i - j, W),
        lambda i, j: True,
    ),
    "leaky_rerope": (
        sm.leaky_rerope(ROTARY, W, 2.5),
        lambda i, j: i - j if i - j < W else W + (i - j - W) / 2.5,
        lambda i, j: True,
    ),
    "self_extend": (
        sm.self_extend(ROTARY, W, 4),
        lambda i, j: i - j if i - j < W else i // 4 - j // 4 + W - W // 4,
        lambda i, j: True,
    ),
    "lm_infinite": (
        sm.lm_infinite(ROTARY, W, 3),
        lambda i, j: min(i - j, W),
        lambda i, j: i - j < W or j < 3,
    ),
    "streaming_llm": (
        sm.streaming_llm(ROTARY, W, 3),
        # The cache of query i as a list of tokens, and distances inside it.
        lambda i, j: len(cache(i)) - 1 - cache(i).index(j) if j in cache(i) else 0,
        lambda i, j: j in cache(i),
    ),
}
BOTH = pytest.mark.parametrize("form", ["merge", "single"])
EVERY = pytest.mark.parametrize("name", list(CASES))


def cache(i, sinks=3):
    """What StreamingLLM's cache holds at token i: evicted one by one beyond sinks + window."""
    tokens = []
    for token in range(i + 1):
        tokens.append(token)
        if len(tokens) > sinks + W:
            del tokens[sinks]
    return tokens


def qkv(T, T_q=None, H_kv=H, B=1, dtype=torch.float64):
    q = torch.randn(B, H, T_q or T, D, dtype=dtype)
    return q, torch.randn(B, H_kv, T, D, dtype=dtype), torch.randn(B, H_kv, T, D_V, dtype=dtype)


def by_pairs(name, q, k, v, bias=lambda h, i, j: 0.0, scale=D**-0.5):
    """Outputs and lse, one pair at a time, with the rotation as a product of complex numbers."""
    _, distance, seen = CASES[name]
    turns = [100.0 ** (-2 * c / D) for c in range(D // 2)]
    B, _, T, _ = q.shape
    out, lse = np.zeros((B, H, T, D_V)), np.zeros((B, H, T))
    groups = H // k.shape[1]
    for b, h, i in np.ndindex(B, H, T):
        visible = [j for j in range(i + 1) if seen(i, j)]
        scores = []
        for j in visible:
            x, y = q[b, h, i].tolist(), k[b, h // groups, j].tolist()
            score = sum(
                complex(x[c], x[c + D // 2])
                * complex(y[c], -y[c + D // 2])
                * cmath.exp(1j * distance(i, j) * turns[c])
                for c in range(D // 2)
            ).real
            scores.append(scale * score + bias(h, i, j))
        weight = np.exp(scores)
        out[b, h, i] = weight @ v[b, h // groups, visible].numpy() / weight.sum()
        lse[b, h, i] = math.log(weight.sum())
    return out, lse


def test_the_group_is_the_smallest_that_keeps_to_the_trained_length():
    for window, trained, length in ((1, 2, 9), (8, 64, 64), (8, 64, 65), (32, 64, 1000)):
        group = sm.self_extend_group(window, trained, length)
        scheme = sm.self_extend(ROTARY, window, group)
        last, first = torch.tensor(length - 1), torch.tensor(0)
        assert scheme.far_query(last) - scheme.far_key(first) <= trained
        assert group == 1 or (group - 1) * (trained - window) < length - window


def test_every_two_branch_mechanism_of_the_catalogue_has_a_case():
    assert set(CASES) == {m.name for m in sm.catalogue if m.kind == "two-branch"}


@EVERY
@BOTH
def test_equals_its_paper(name, form):
    """With a group of heads for a key, two batch rows, a score_mod and another scale."""
    q, k, v = qkv(23, H_kv=1, B=2)
    out, lse = CASES[name][0](
        q,
        k,
        v,
        sm.alibi(H),
        form=form,
        scale=0.9,
        enable_gqa=True,
        return_lse=True,
        impl="dense",
    )
    slopes = sm.alibi_slopes(H).tolist()
    expected, expected_lse = by_pairs(name, q, k, v, lambda h, i, j: -slopes[h] * (i - j), 0.9)
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=1e-10)
    np.testing.assert_allclose(lse.numpy(), expected_lse, rtol=0, atol=1e-10)
    # The twin: the window's edge a token off is far outside that.
    other = sm.TwoBranch(ROTARY, W + 1, *(getattr(CASES[name][0], x) for x in FIELDS))
    assert np.abs(other(q, k, v, enable_gqa=True, impl="dense").numpy() - expected).max() > 1e-3


FIELDS = ("far_query", "far_key", "sinks")


@EVERY
@BOTH
@pytest.mark.parametrize("T", [1, 3, W, W + 1])
def test_short_sequences(name, form, T):
    q, k, v = qkv(T)
    out = CASES[name][0](q, k, v, form=form, impl="dense")
    np.testing.assert_allclose(out.numpy(), by_pairs(name, q, k, v)[0], rtol=0, atol=1e-10)


@EVERY
@BOTH
def test_decoding_equals_the_full_pass(name, form):
    T = 23
    q, k, v = qkv(T)
    mechanism = CASES[name][0]
    full = mechanism(q, k, v, sm.logn(4), impl="dense")
    for start, end in [(0, 1), (5, 8), (T - 1, T)]:
        out = mechanism(
            q[:, :, start:end],
            k[:, :, :end],
            v[:, :, :end],
            sm.with_offset(sm.logn(4), start),
            q_positions=torch.arange(start, end),
            form=form,
            impl="dense",
        )
        torch.testing.assert_close(out, full[:, :, start:end], rtol=0, atol=1e-12)


@EVERY
@BOTH
def test_packed_documents_equal_separate_ones(name, form):
    lengths = [5, 1, 17, 9]
    parts = [qkv(n) for n in lengths]
    q, k, v = (torch.cat(x, 2) for x in zip(*parts, strict=True))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    mechanism = CASES[name][0]
    out = mechanism(
        q,
        k,
        v,
        mask_mod=sm.document(ids),
        q_positions=positions,
        kv_positions=positions,
        form=form,
        impl="dense",
    )
    apart = [mechanism(*part, impl="dense") for part in parts]
    torch.testing.assert_close(out, torch.cat(apart, 2), rtol=0, atol=1e-12)


@BOTH
def test_a_score_mod_with_a_value_for_each_token(form):
    """It counts keys as they come, also where the single call has them twice."""
    q, k, v = qkv(23)
    log_g = -torch.rand(1, H, 23, dtype=torch.float64)
    out = CASES["rerope"][0](q, k, v, sm.forgetting_gate(log_g), form=form, impl="dense")
    expected, _ = by_pairs("rerope", q, k, v, lambda h, i, j: log_g[0, h, j + 1 : i + 1].sum())
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=1e-10)


@EVERY
@BOTH
def test_gradients_with_an_empty_row(name, form):
    q, k, v = (x[:, :1, :, :4].clone().requires_grad_() for x in qkv(9))
    mechanism = sm.TwoBranch(sm.rope(4), 3, *(getattr(CASES[name][0], field) for field in FIELDS))

    def run(q, k, v):
        mask = lambda b, h, q_idx, kv_idx: q_idx != 4  # noqa: E731
        return mechanism(q, k, v, None, mask, form=form, impl="dense")

    assert (run(q, k, v)[:, :, 4] == 0).all()
    assert torch.autograd.gradcheck(run, (q, k, v))


@pytest.mark.compiled
def test_compiled_single_call():
    """The blocks of the doubled keys are known in closed form, and right."""
    mechanism = sm.lm_infinite(sm.rope(32), 40, 7)
    q, k, v = (torch.randn(1, H, 300, 32) for _ in range(3))
    exact = mechanism(q.double(), k.double(), v.double(), impl="dense")
    assert (mechanism(q, k, v, form="single") - exact).abs().max() < 1e-5


@pytest.mark.compiled
def test_joins_a_compiled_model():
    mechanism = sm.self_extend(sm.rope(32), 20, 4)
    q, k, v = (torch.randn(1, H, 65, 32) for _ in range(3))
    model = torch.compile(
        lambda q, k, v: mechanism(q, k, v, form="single") + 1, fullgraph=True, backend="aot_eager"
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        out = model(q, k, v)
    assert (out - 1 - mechanism(q, k, v, impl="dense")).abs().max() < 1e-5


@BOTH
@pytest.mark.parametrize("name", ["rerope", "streaming_llm"])
def test_blocks_hold_every_visible_key(name, form, monkeypatch):
    """No block that holds a visible key is left out, and full blocks are full."""
    seen = []

    def spy(q, k, v, score_mod, mask_mod, **options):
        seen.append((q.shape[2], k.shape[2], mask_mod))
        return torch.zeros(*q.shape[:3], D_V), torch.zeros(q.shape[:3])

    monkeypatch.setattr("score_mods.two_branch.attention", spy)
    CASES[name][0](*qkv(45), form=form, impl="dense", return_lse=True)
    assert len(seen) == (2 if form == "merge" else 1)
    for T_q, T, mask in seen:
        assert hasattr(mask, "block_bounds")
        blocks = sm.create_block_mask(mask, None, None, T_q, T, BLOCK_SIZE=8)
        q_idx, kv_idx = torch.arange(T_q)[:, None], torch.arange(T)
        visible = mask(torch.tensor(0), torch.tensor(0), q_idx, kv_idx)
        some = torch.zeros(-(-T_q // 8), -(-T // 8), dtype=torch.bool)
        full = torch.ones_like(some)
        for i, j in np.ndindex(T_q, T):
            some[i // 8, j // 8] |= visible[i, j]
            full[i // 8, j // 8] &= visible[i, j]
        listed, every = torch.zeros_like(some), torch.zeros_like(some)
        for row in range(len(some)):
            count, index = blocks.kv_num_blocks[0, 0, row], blocks.kv_indices[0, 0, row]
            listed[row, index[:count].long()] = True
            count, index = blocks.full_kv_num_blocks[0, 0, row], blocks.full_kv_indices[0, 0, row]
            every[row, index[:count].long()] = True
        assert not (some & ~(listed | every)).any()
        assert not (every & ~full).any()


def test_merge_equals_attention_over_the_union():
    q, k, v = qkv(23)
    lower = lambda b, h, q_idx, kv_idx: kv_idx < 9  # noqa: E731
    upper = lambda b, h, q_idx, kv_idx: (kv_idx >= 9) & (kv_idx <= q_idx)  # noqa: E731
    parts = [sm.dense_attention(q, k, v, None, m, return_lse=True) for m in (lower, upper)]
    out, lse = sm.merge(*parts[0], *parts[1])
    expected = sm.dense_attention(q, k, v, None, sm.prefix_lm(9), return_lse=True)
    torch.testing.assert_close(out, expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected[1], rtol=0, atol=1e-12)


def test_merge_of_empty_rows_and_its_gradients():
    out_a, out_b = torch.randn(2, 1, 1, 4, 3, dtype=torch.float64).unbind()
    lse_a, lse_b = torch.randn(2, 1, 1, 4, dtype=torch.float64).unbind()
    lse_a[..., 1], lse_b[..., 2] = -math.inf, -math.inf
    lse_a[..., 3] = lse_b[..., 3] = -math.inf
    out_a[:, :, 1] = out_b[:, :, 2] = out_a[:, :, 3] = out_b[:, :, 3] = 0
    parts = [x.requires_grad_() for x in (out_a, lse_a, out_b, lse_b)]
    out, lse = sm.merge(*parts)
    assert torch.equal(out[:, :, 1], out_b[:, :, 1])
    assert torch.equal(out[:, :, 2], out_a[:, :, 2])
    assert (out[:, :, 3] == 0).all()
    assert lse[..., 1] == lse_b[..., 1]
    assert lse[..., 2] == lse_a[..., 2]
    assert lse[..., 3] == -math.inf
    assert torch.autograd.gradcheck(lambda *x: sm.merge(*x)[0], parts)
    assert torch.autograd.gradcheck(lambda *x: sm.merge(*x)[1][..., :3], parts)
    for grad in torch.autograd.grad(out.sum() + lse[..., :3].sum(), parts):
        assert grad.isfinite().all()


def test_merge_keeps_lse_in_float32_and_far_apart():
    out = torch.ones(1, 1, 2, 4, dtype=torch.bfloat16)
    lse = torch.tensor([[[1e4, -1e4]]])
    merged, total = sm.merge(out, lse, 3 * out, lse - 1)
    assert merged.dtype == torch.bfloat16
    torch.testing.assert_close(total, torch.logaddexp(lse, lse - 1))
    share = 1 / (1 + math.e)
    torch.testing.assert_close(merged, (out * (1 + 2 * share)), atol=0.01, rtol=0)


@pytest.mark.parametrize("per_head", [False, True])
def test_sinks_equal_one_more_key_without_value(per_head):
    q, k, v = qkv(13)
    logits = torch.tensor([0.7, -2.0], dtype=torch.float64) if per_head else 0.7
    mask = sm.and_masks(sm.causal, lambda b, h, q_idx, kv_idx: q_idx != 5)
    out, lse = sm.attention_sink(logits)(
        *sm.attention(q, k, v, None, mask, return_lse=True, impl="dense")
    )
    scores = np.where(np.tri(13, dtype=bool), (q @ k.mT / D**0.5).numpy(), -np.inf)
    scores[:, :, 5] = -np.inf
    column = np.broadcast_to(np.reshape(np.asarray(logits), (-1, 1, 1)), (H, 13, 1))
    weight = np.exp(np.concatenate([scores, column[None]], -1))  # as the public code of gpt-oss
    expected = weight[..., :-1] / weight.sum(-1, keepdims=True) @ v.numpy()
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(lse.numpy(), np.log(weight.sum(-1)), rtol=0, atol=1e-12)
    assert (out[:, :, 5] == 0).all()


def test_softmax_off_by_one_adds_one_to_the_denominator():
    q, k, v = qkv(7)
    out, _ = sm.softmax_off_by_one()(*sm.dense_attention(q, k, v, return_lse=True))
    weight = np.exp((q @ k.mT / D**0.5).numpy())
    expected = weight @ v.numpy() / (1 + weight.sum(-1, keepdims=True))
    np.testing.assert_allclose(out.numpy(), expected, rtol=0, atol=1e-12)


def test_gradients_of_sinks():
    q, k, v = (x[..., :3].clone().requires_grad_() for x in qkv(5))
    sink = torch.randn(H, dtype=torch.float64, requires_grad=True)
    mask = lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (q_idx != 2)  # noqa: E731

    def run(q, k, v, sink):
        parts = sm.dense_attention(q, k, v, None, mask, return_lse=True)
        return sm.attention_sink(sink)(*parts)

    assert torch.autograd.gradcheck(run, (q, k, v, sink))


def test_every_post_op_of_the_catalogue_is_tested_here():
    names = {m.name for m in sm.catalogue if m.kind == "post-op"}
    assert names == {"attention_sink", "softmax_off_by_one"}


OUT, LSE = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: sm.rerope(D, W), TypeError, "rotary must be a Rotary, got int"),
        (lambda: sm.rerope(ROTARY, 0), ValueError, "window must be at least 1"),
        (lambda: sm.leaky_rerope(ROTARY, W, 0.5), ValueError, "factor must be at least 1"),
        (lambda: sm.self_extend_group(8, 8, 64), ValueError, "window must be below train_length"),
        (lambda: sm.self_extend_group(8, 16, 64.0), TypeError, "length must be an int"),
        (lambda: sm.self_extend(ROTARY, W, 2.0), TypeError, "group must be an int"),
        (lambda: sm.lm_infinite(ROTARY, W, None), TypeError, "sinks must be an int"),
        (lambda: sm.streaming_llm(ROTARY, W, 0), ValueError, "sinks must be at least 1"),
        (lambda: sm.streaming_llm(ROTARY, "6"), TypeError, "window must be an int"),
        (lambda: sm.rerope(ROTARY, W)(*qkv(3), form="both"), ValueError, "form must be"),
        (
            lambda: sm.rerope(ROTARY, W)(*qkv(3), impl="dense", return_lse="no"),
            TypeError,
            "return_lse must be a bool, got str",
        ),
        (
            lambda: sm.rerope(ROTARY, W)(None, *qkv(3)[1:], impl="dense"),
            TypeError,
            "q must be a tensor, got NoneType",
        ),
        (
            lambda: sm.rerope(ROTARY, W)(*qkv(3), mask_mod=sm.logn(), impl="dense"),
            TypeError,
            "mask_mod must be a mask_mod .* got a score_mod",
        ),
        (lambda: sm.rerope(ROTARY, W)(*qkv(3)), ValueError, 'form="single" or impl="dense"'),
        (
            lambda: sm.rerope(ROTARY, W)([3], *qkv(3)[1:]),
            TypeError,
            "q must be a tensor, got list",
        ),
        (
            lambda: sm.rerope(ROTARY, W)(*qkv(9, 2), impl="dense"),
            ValueError,
            "q_positions must be given",
        ),
        *(
            (
                lambda form=form: sm.rerope(ROTARY, W)(
                    *qkv(9), sm.forgetting_gate(torch.zeros(1, 1, 8)), form=form, impl="dense"
                ),
                ValueError,
                "score_mod must reach to a batch of 1, 9 queries",
            )
            for form in ("merge", "single")
        ),
        (
            lambda: sm.rerope(ROTARY, W)(
                *qkv(9), mask_mod=sm.document(torch.arange(8)), form="single", impl="dense"
            ),
            ValueError,
            "mask_mod must reach to a batch of 1, 9 queries",
        ),
        (lambda: sm.attention_sink("1"), TypeError, "sink must be a number"),
        (lambda: sm.attention_sink(torch.ones(2, 2)), ValueError, r"shape \(H,\)"),
        (lambda: sm.attention_sink(torch.ones(3))(OUT, LSE), ValueError, "for 3 heads, out has 2"),
        (lambda: sm.attention_sink(0.0)(OUT, LSE[0]), ValueError, "out and lse must have shapes"),
        (
            lambda: sm.attention_sink(0.0)(OUT, LSE.bfloat16()),
            ValueError,
            "lse must be float32 or float64",
        ),
        (lambda: sm.merge(OUT, LSE, None, LSE), TypeError, "out_b must be a floating tensor"),
        (lambda: sm.attention_sink(0.0)(OUT, 1.0), TypeError, "lse must be a floating tensor"),
        (lambda: sm.merge(OUT, LSE, OUT, LSE[..., :1]), ValueError, "out_b and lse_b"),
        (lambda: sm.merge(OUT, LSE, OUT[..., :1], LSE), ValueError, "out_b must have out_a's"),
        (lambda: sm.merge(OUT, LSE.half(), OUT, LSE), ValueError, "lse_a must be float32"),
        (lambda: sm.merge(OUT, LSE.to("meta"), OUT, LSE), ValueError, "lse_a must be on cpu"),
        (
            lambda: sm.merge(OUT, LSE, OUT.to("meta"), LSE.to("meta")),
            ValueError,
            "out_b must be on cpu as out_a is, got meta",
        ),
    ],
)
def test_bad_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
