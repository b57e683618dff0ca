import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import score_mods as sm

H, T, D = 3, 45, 8
SEGMENTS, DILATIONS = (6, 15, 64), (1, 3, 4)


def patterns_apart(q, k, v, causal=True):
    """Each pattern on its own tokens, the outputs weighted by the sums of their exponentials."""
    total, weighted = torch.zeros(1, H, T, 1).double(), torch.zeros(1, H, T, D).double()
    for w, r in zip(SEGMENTS, DILATIONS, strict=True):
        for h in range(H):
            for start in range(0, T, w):
                kept = torch.arange(start + h % r, min(start + w, T), r)
                score = q[:, h, kept] @ k[:, h, kept].mT / D**0.5
                if causal:
                    later = torch.ones_like(score).triu(1).bool()
                    score = score.masked_fill(later, -torch.inf)
                total[:, h, kept] += score.exp().sum(-1, keepdim=True)
                weighted[:, h, kept] += score.exp() @ v[:, h, kept]
    return weighted / total


def qkv():
    return [torch.randn(1, H, T, D, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("causal", [False, True])
def test_one_call_equals_the_patterns_apart(causal):
    q, k, v = qkv()
    mod, mask = sm.longnet(SEGMENTS, DILATIONS)
    mask = sm.and_masks(sm.causal, mask) if causal else mask
    out = sm.dense_attention(q, k, v, mod, mask)
    expected = patterns_apart(q, k, v, causal)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    without = sm.dense_attention(q, k, v, None, mask)
    assert (without - expected).abs().max() > 1e-2  # the multiplicity counts


def test_decoding_and_packed_documents():
    q, k, v = qkv()
    mod, mask = sm.longnet(SEGMENTS, DILATIONS)
    whole = sm.and_masks(sm.causal, mask)
    full = sm.dense_attention(q, k, v, mod, whole)
    for t in (0, 7, 44):
        out = sm.dense_attention(
            q[:, :, [t]],
            k[:, :, : t + 1],
            v[:, :, : t + 1],
            sm.with_offset(mod, t),
            sm.with_offset(whole, t),
        )
        torch.testing.assert_close(out, full[:, :, [t]], rtol=0, atol=1e-12)

    ids = torch.arange(T) // 20
    positions = torch.arange(T) % 20
    packed = sm.dense_attention(
        q,
        k,
        v,
        sm.with_positions(mod, positions),
        sm.and_masks(sm.document(ids), sm.with_positions(whole, positions)),
    )
    for document in range(3):
        part = (ids == document).nonzero().flatten()
        alone = sm.dense_attention(*(x[:, :, part] for x in (q, k, v)), mod, whole)
        torch.testing.assert_close(packed[:, :, part], alone, rtol=0, atol=1e-12)


def test_gradients_are_those_of_the_whole_formula():
    q, k, v = (x.requires_grad_() for x in qkv())
    mod, mask = sm.longnet(SEGMENTS, DILATIONS)
    direction = torch.randn(1, H, T, D, dtype=torch.float64)
    ours = sm.dense_attention(q, k, v, mod, sm.and_masks(sm.causal, mask))
    theirs = patterns_apart(q, k, v)
    for one, other in zip(
        torch.autograd.grad((ours * direction).sum(), (q, k, v)),
        torch.autograd.grad((theirs * direction).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [16, (32, 8)])
def test_no_block_is_missing_and_none_called_full_that_is_not(size):
    _, mask = sm.longnet((32, 128), (1, 4))
    whole = create_mask(mask, 1, H, 160, 160, "cpu")
    blocks = sm.create_block_mask(mask, 1, H, 160, 160, BLOCK_SIZE=size)
    q_size, kv_size = blocks.BLOCK_SIZE
    dense = blocks.to_dense().bool().expand(1, H, -1, -1)
    tiles = whole.unflatten(-1, (-1, kv_size)).unflatten(2, (-1, q_size))
    assert dense[tiles.any(-1).any(3)].all()
    full = blocks.full_kv_num_blocks.sum()
    assert 0 < full <= tiles.all(-1).all(3)[0, 0].sum()
    assert dense.sum() < dense.numel()


def test_values_are_wide_and_finite_in_half_precision():
    mod, _ = sm.longnet(SEGMENTS, DILATIONS)
    index = torch.arange(T)
    score = torch.randn(H, T, T).bfloat16()
    out = mod(score, torch.tensor(0), torch.arange(H)[:, None, None], index[:, None], index)
    assert out.dtype == torch.float32
    assert out.isfinite().all()
