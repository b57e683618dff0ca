import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask
from torch.nn.attention.flex_attention import create_mask

import score_mods as sm

T = 300
IDS = torch.repeat_interleave(torch.arange(5), torch.tensor([7, 1, 150, 2, 140]))
BATCH_IDS = torch.stack([IDS, torch.arange(T) // 100])

# Every mask_mod of the catalogue, with a plain statement of it for one pair.
CASES = {
    "causal": (sm.causal, lambda q, k: k <= q),
    "sliding_window": (sm.sliding_window(70), lambda q, k: k in range(q - 69, q + 1)),
    "prefix_lm": (sm.prefix_lm(130), lambda q, k: k <= q or k < 130),
    "document": (sm.document(IDS), lambda q, k: IDS.tolist()[q] == IDS.tolist()[k]),
}
COMBINED = {
    "causal and document": sm.and_masks(sm.causal, sm.document(IDS)),
    "document of a batch": sm.and_masks(sm.causal, sm.document(BATCH_IDS)),
    "window or prefix": sm.or_masks(sm.sliding_window(33), sm.prefix_lm(5)),
    "shifted": sm.with_offset(sm.sliding_window(100), 37, 5),
    "shifted by a tensor": sm.with_offset(sm.causal, torch.tensor(129)),
    "positions": sm.with_positions(sm.causal, torch.arange(T).flip(0)),
    "a user's own": lambda b, h, q_idx, kv_idx: (q_idx + kv_idx + h) % 3 == b,
}


def test_every_mask_of_the_catalogue_has_a_case():
    assert set(CASES) == {m.name for m in sm.catalogue if m.kind == "mask_mod"}


@pytest.mark.parametrize("name", list(CASES))
def test_equals_its_definition(name):
    mask, pair = CASES[name]
    expected = np.array([[pair(q, k) for k in range(T)] for q in range(T)])
    np.testing.assert_array_equal(create_mask(mask, 1, 1, T, T, "cpu")[0, 0].numpy(), expected)


def test_a_window_has_window_keys():
    for window in (1, 2, 128, 129):
        visible = create_mask(sm.sliding_window(window), 1, 1, T, T, "cpu")[0, 0].sum(-1)
        assert visible.max() == window
        assert visible[0] == 1


def kinds_of_blocks(block_mask):
    """0 for absent, 1 for partial, 2 for full, dense over blocks."""
    B, H, rows, columns = (*block_mask.kv_indices.shape[:3], block_mask.kv_indices.shape[3])
    kinds = torch.zeros(B, H, rows, columns, dtype=torch.int)
    lists = (
        (1, block_mask.kv_num_blocks, block_mask.kv_indices),
        (2, block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
    )
    for kind, counts, indices in lists:
        for b, h, row in np.ndindex(B, H, rows):
            kinds[b, h, row, indices[b, h, row, : counts[b, h, row]].long()] = kind
    return kinds


@pytest.mark.parametrize("name", [*CASES, *COMBINED])
@pytest.mark.parametrize(
    ("T_q", "T_kv", "size"), [(300, 300, 128), (300, 300, (32, 64)), (1, 257, 128), (129, 7, 16)]
)
def test_blocks_agree_with_torch(name, T_q, T_kv, size):
    """No block that torch finds in the whole mask is missing, none is called full that is not."""
    mask = COMBINED[name] if name in COMBINED else CASES[name][0]
    ours = kinds_of_blocks(sm.create_block_mask(mask, 2, 3, T_q, T_kv, BLOCK_SIZE=size)).expand(
        2, 3, -1, -1
    )
    theirs = kinds_of_blocks(
        torch_create_block_mask(mask, 2, 3, T_q, T_kv, "cpu", BLOCK_SIZE=size)
    )
    assert (ours > 0)[theirs > 0].all()
    whole = create_mask(mask, 2, 3, T_q, T_kv, "cpu")
    q_size, kv_size = (size, size) if isinstance(size, int) else size
    for b, h, row, column in (ours == 2).nonzero().tolist():
        block = whole[
            b, h, row * q_size : (row + 1) * q_size, column * kv_size : (column + 1) * kv_size
        ]
        assert block.all()
    if name in CASES and name != "document" and T_q % q_size == 0 and T_kv % kv_size == 0:
        assert torch.equal(
            ours, theirs
        )  # exact, where torch does not call a ragged last block partial


def test_blocks_of_known_masks_are_exact_where_lengths_are_multiples():
    ids = torch.arange(512) // 128
    for mask in (
        sm.causal,
        sm.sliding_window(200),
        sm.prefix_lm(77),
        sm.document(ids),
        sm.with_offset(sm.causal, 64),
    ):
        ours = sm.create_block_mask(mask, None, None, 512, 512)
        theirs = torch_create_block_mask(mask, None, None, 512, 512, "cpu")
        assert torch.equal(kinds_of_blocks(ours), kinds_of_blocks(theirs))


def test_a_wrong_bound_would_be_seen():
    """The twin: a closed form that calls the diagonal full differs from torch's blocks."""

    def bad(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    bad.block_bounds = lambda b, h, q_lo, q_hi, kv_lo, kv_hi: (q_hi >= kv_lo, q_hi >= kv_hi)
    ours = sm.create_block_mask(bad, None, None, 512, 512)
    theirs = torch_create_block_mask(bad, None, None, 512, 512, "cpu")
    assert not torch.equal(kinds_of_blocks(ours), kinds_of_blocks(theirs))


@pytest.mark.parametrize("mask", [sm.causal, sm.and_masks(sm.causal, sm.sliding_window(4096))])
def test_long_sequences_need_no_square_tensor(mask):
    """131,072 tokens: the whole mask would be 16 GiB; the blocks are 1,024 × 1,024."""
    block_mask = sm.create_block_mask(mask, None, None, 131072, 131072)
    assert block_mask.kv_indices.shape == (1, 1, 1024, 1024)
    blocks = block_mask.kv_num_blocks.sum() + block_mask.full_kv_num_blocks.sum()
    assert blocks == (1024 * 1025 // 2 if mask is sm.causal else 33 * 1024 - 32 * 33 // 2)


def test_blocks_are_cached_and_the_mask_is_not():
    offset = torch.tensor(3)
    mask = sm.with_offset(sm.causal, offset)
    first = sm.create_block_mask(mask, None, None, 1, 300)
    offset.add_(100)
    second = sm.create_block_mask(mask, None, None, 1, 300)
    assert first.kv_indices is second.kv_indices
    index = torch.arange(300)
    visible = second.mask_mod(torch.tensor(0), torch.tensor(0), torch.tensor(0), index)
    assert visible.sum() == 104


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: sm.sliding_window(0), ValueError, "window must be at least 1, got 0"),
        (lambda: sm.sliding_window(1.5), TypeError, "window must be an int"),
        (lambda: sm.prefix_lm(-1), ValueError, "prefix_length"),
        (lambda: sm.document([0, 0, 1]), TypeError, "document_ids must be an integer tensor"),
        (lambda: sm.document(torch.tensor([0.0])), TypeError, "document_ids"),
        (lambda: sm.document(torch.tensor([0, 1, 0])), ValueError, "never fall"),
        (lambda: sm.document(torch.zeros(1, 1, 1, dtype=torch.int)), ValueError, "shape"),
        (lambda: sm.create_block_mask(sm.alibi(2), 1, 1, 8, 8), TypeError, "mask_mod"),
        (lambda: sm.create_block_mask(lambda q, k: q, 1, 1, 8, 8), TypeError, "mask_mod"),
        (
            lambda: sm.create_block_mask(sm.causal, 1, 1, 0, 8),
            ValueError,
            "Q_LEN must be at least 1",
        ),
    ],
)
def test_bad_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()
