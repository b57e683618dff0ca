import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask as torch_create_block_mask
from torch.nn.attention.flex_attention import create_mask
from transformers import Cohere2Config, Gemma2Config, Gemma3TextConfig, Llama4TextConfig

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
    "chunked": (sm.chunked(70), lambda q, k: any({q, k} <= {*range(c, c + 70)} for c in CHUNKS)),
    "lambda_mask": (
        sm.lambda_mask(40, 7),
        lambda q, k: k in range(q - 39, q + 1) or (k < 7 and k <= q),
    ),
    "streaming_llm_mask": (
        sm.streaming_llm_mask(129),
        lambda q, k: k in {*range(min(4, q + 1)), *range(q - 128, q + 1)},
    ),
    "longformer": (
        sm.longformer(torch.arange(T) % 130 == 77, 9),
        lambda q, k: k in range(q - 9, q + 10) or q in (77, 207) or k in (77, 207),
    ),
    "clear": (
        sm.clear((16, 17), 4, text_length=28),
        lambda q, k: (
            q < 28 or k < 28 or math.dist(divmod(q - 28, 17), divmod(k - 28, 17)) < 4 - 1e-9
        ),
    ),
    "natten": (sm.natten((25, 12), (4, 7)), lambda q, k: k in box(q, (25, 12), (4, 7))),
}
CHUNKS = range(0, T, 70)


def box(q, shape, kernel, dilation=(1, 1, 1), is_causal=(False,) * 3):
    """The keys of a token: on each axis, among every D-th one, the K-window nearest its centre."""
    axes = []
    for axis, position in enumerate(np.unravel_index(q, shape)):
        same = list(range(position % dilation[axis], shape[axis], dilation[axis]))
        place, size = same.index(position), kernel[axis]
        start = place - size + 1 if is_causal[axis] else place - size // 2
        stop = place + 1 if is_causal[axis] else min(max(start, 0), len(same) - size) + size
        axes.append(same[max(stop - size, 0) : stop])
    return {int(np.ravel_multi_index(place, shape)) for place in itertools.product(*axes)}


COMBINED = {
    "dilated natten": sm.natten((25, 12), (4, 3), (5, 4)),
    "causal natten": sm.natten((25, 12), (4, 3), (3, 1), (True, False)),
    "text and a pooled image": sm.clear((16, 15), 4, text_length=28),  # 32 pooled keys
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


@pytest.mark.parametrize("name", list(CASES))
def test_decoding_with_an_offset_sees_what_the_full_pass_sees(name):
    mask = CASES[name][0]
    whole = create_mask(mask, 1, 1, T, T, "cpu")[0, 0]
    for start, offset in ((0, 0), (128, 128), (299, torch.tensor(299))):
        rows = sm.create_block_mask(sm.with_offset(mask, offset), 1, 1, T - start, T)
        seen = create_mask(rows.mask_mod, 1, 1, T - start, T, "cpu")[0, 0]
        assert torch.equal(seen, whole[start:])
        blocks = rows.to_dense()[0, 0].bool()
        by_block = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert by_block[: T - start, :T][seen].all()


@pytest.mark.parametrize("name", [name for name in CASES if name != "document"])
def test_packed_documents_see_what_they_see_alone(name):
    mask = CASES[name][0]
    positions = torch.cat([torch.arange(n) for n in IDS.bincount().tolist()])
    packed = sm.and_masks(sm.document(IDS), sm.with_positions(mask, positions))
    seen = create_mask(packed, 1, 1, T, T, "cpu")[0, 0]
    alone = create_mask(mask, 1, 1, T, T, "cpu")[0, 0]
    for document in IDS.unique():
        part = (document == IDS).nonzero().flatten()
        assert torch.equal(seen[part][:, part], alone[: len(part), : len(part)])
    assert seen.sum() == sum(alone[:n, :n].sum() for n in IDS.bincount().tolist())


def test_a_window_has_window_keys():
    for window in (1, 2, 128, 129):
        visible = create_mask(sm.sliding_window(window), 1, 1, T, T, "cpu")[0, 0].sum(-1)
        assert visible.max() == window
        assert visible[0] == 1


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [((13,), (6,)), ((12, 6), (5, 3)), ((4, 5, 6), (2, 5, 3)), ((3, 3), (3, 3))],
)
def test_natten_sees_the_whole_kernel_everywhere(shape, kernel):
    size = math.prod(shape)
    visible = create_mask(sm.natten(shape, kernel), 1, 1, size, size, "cpu")[0, 0]
    assert (visible.sum(-1) == math.prod(kernel)).all()
    for q in range(size):
        assert set(visible[q].nonzero().flatten().tolist()) == box(q, shape, kernel)


@pytest.mark.parametrize(
    ("shape", "kernel", "dilation", "is_causal"),
    [
        ((14,), (3,), (4,), (False,)),
        ((14,), (3,), (4,), (True,)),
        ((11, 7), (2, 3), (3, 2), (False, False)),
        ((11, 7), (5, 3), (2, 1), (True, False)),
        ((5, 4, 6), (2, 2, 3), (2, 1, 2), (True, False, True)),
        ((6, 6), (3, 3), (2, 2), (False, False)),
    ],
)
def test_natten_with_dilation_and_causal_axes(shape, kernel, dilation, is_causal):
    size = math.prod(shape)
    mask = sm.natten(shape, kernel, dilation, is_causal)
    visible = create_mask(mask, 1, 1, size, size, "cpu")[0, 0]
    for q in range(size):
        keys = box(q, shape, kernel, dilation, is_causal)
        assert set(visible[q].nonzero().flatten().tolist()) == keys
    assert (visible.sum(-1) == math.prod(kernel)).all() == (not any(is_causal))
    # Rows of the first axis bound the blocks: those of one row each are kept if any key is seen.
    row = math.prod(shape[1:])
    blocks = kinds_of_blocks(sm.create_block_mask(mask, 1, 1, size, size, BLOCK_SIZE=row))[0, 0]
    by_row = visible.view(shape[0], row, shape[0], row).any(3).any(1)
    assert (blocks > 0)[by_row].all()
    if dilation[0] == 1:
        assert torch.equal(blocks > 0, by_row)


def test_pooled_tokens_of_clear_are_for_the_image_alone():
    """As the authors' code has it: more keys than queries, and attention over them all."""
    height, width, text = 4, 6, 3
    mask = sm.clear((height, width), 2, text_length=text)
    q_length, kv_length = text + 24, text + 24 + 6
    seen = create_mask(mask, 1, 1, q_length, kv_length, "cpu")[0, 0]
    for q, k in np.ndindex(q_length, kv_length):
        if q < text:
            expected = k < text + 24
        elif k < text or k >= text + 24:
            expected = True
        else:
            expected = math.dist(divmod(q - text, width), divmod(k - text, width)) < 2 - 1e-9
        assert seen[q, k] == expected
    for size in (1, 3, 8):
        blocks = kinds_of_blocks(
            sm.create_block_mask(mask, None, None, q_length, kv_length, BLOCK_SIZE=size)
        )[0, 0]
        for i, j in np.ndindex(*blocks.shape):
            part = seen[i * size : (i + 1) * size, j * size : (j + 1) * size]
            assert blocks[i, j] or not part.any()
            assert blocks[i, j] < 2 or part.all()


def test_layers_follow_the_configurations_of_the_transformers_library():
    configurations = [
        (sm.gemma2_layers(8), Gemma2Config(num_hidden_layers=13)),
        (sm.gemma3_layers(8), Gemma3TextConfig(num_hidden_layers=13)),
        (sm.command_a_layers(8), Cohere2Config(num_hidden_layers=13)),
        (sm.llama4_layers(8), Llama4TextConfig(num_hidden_layers=13)),
    ]
    for masks, configuration in configurations:
        kinds = ["full_attention" if masks(i) is sm.causal else "local" for i in range(13)]
        assert kinds == [
            k.replace("sliding", "local")
            .replace("chunked", "local")
            .replace("local_attention", "local")
            for k in configuration.layer_types
        ]
        assert masks(0) is masks(12 if kinds[12] == "local" else 8)
    local = create_mask(sm.llama4_layers(70)(0), 1, 1, T, T, "cpu")[0, 0]
    chunks = torch.arange(T) // 70
    assert torch.equal(local, (chunks[:, None] == chunks) & torch.ones(T, T).tril().bool())
    local = create_mask(sm.gemma3_layers(70)(4), 1, 1, T, T, "cpu")[0, 0]
    assert local.sum(-1).max() == 70


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
    if name == "text and a pooled image":
        T_q = min(T_q, 28 + 16 * 15)  # pooled tokens are keys alone
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
        sm.chunked(192),
        sm.and_masks(sm.causal, sm.chunked(100)),
        sm.lambda_mask(100, 128),
        sm.longformer(torch.arange(512) // 128 == 1, 60),
    ):
        ours = sm.create_block_mask(mask, None, None, 512, 512)
        theirs = torch_create_block_mask(mask, None, None, 512, 512, "cpu")
        assert torch.equal(kinds_of_blocks(ours), kinds_of_blocks(theirs))


@pytest.mark.parametrize("n", [127, 128, 129, 255, 256, 257])
def test_blocks_are_exact_where_a_number_meets_their_edges(n):
    for mask in (
        sm.sliding_window(n),
        sm.prefix_lm(n),
        sm.chunked(n),
        sm.lambda_mask(100, n),
        sm.longformer(torch.arange(512) == n, n),
        sm.with_offset(sm.causal, n),
    ):
        ours = sm.create_block_mask(mask, None, None, 512, 512)
        theirs = torch_create_block_mask(mask, None, None, 512, 512, "cpu")
        assert torch.equal(kinds_of_blocks(ours), kinds_of_blocks(theirs)), mask.__name__


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


def test_an_offset_keeps_the_closed_form_of_combined_masks():
    """16,384 queries at the end of 131,072 keys, by corners alone: quick, and right in number."""
    mask = sm.with_offset(sm.and_masks(sm.causal, sm.sliding_window(1024)), 131072 - 16384)
    assert hasattr(mask, "block_bounds")
    block_mask = sm.create_block_mask(mask, None, None, 16384, 131072)
    assert (block_mask.kv_num_blocks == 2).all()
    assert (block_mask.full_kv_num_blocks == 7).all()


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
        (lambda: sm.document(torch.tensor([True, False])), TypeError, "got torch.bool"),
        (lambda: sm.document(torch.tensor([0, 1, 0])), ValueError, "never fall .* got 0 after 1"),
        (lambda: sm.document(torch.tensor([1, 0]).byte()), ValueError, "got 0 after 1"),
        (lambda: sm.document(torch.ones(2, 0, dtype=torch.int)), ValueError, r"got \(2, 0\)"),
        (lambda: sm.document(torch.zeros(1, 1, 1, dtype=torch.int)), ValueError, "shape"),
        (lambda: sm.chunked(0), ValueError, "chunk must be at least 1"),
        (lambda: sm.lambda_mask(8, 0), ValueError, "sinks must be at least 1"),
        (lambda: sm.streaming_llm_mask(0), ValueError, "window"),
        (lambda: sm.longformer([True]), TypeError, "is_global must be a bool tensor, got list"),
        (lambda: sm.longformer(torch.ones(1, 2) > 0), ValueError, "is_global must have shape"),
        (lambda: sm.longformer(torch.ones(2) > 0, -1), ValueError, "each_side"),
        (lambda: sm.clear((3, 3, 3), 2), ValueError, "shape must be a height and a width"),
        (lambda: sm.clear((3, 3), 0), ValueError, "radius must be at least 1"),
        (lambda: sm.clear([3, 3], 2), TypeError, "shape must be a tuple"),
        (lambda: sm.natten((3, 4), (3,)), ValueError, "kernel must have one entry for each axis"),
        (lambda: sm.natten((3, 4), (3, 5)), ValueError, "kernel times dilation must be at most"),
        (lambda: sm.natten((3, 4), (3, 3), (1, 2)), ValueError, "kernel times dilation"),
        (lambda: sm.natten((3, 4), (3, 3), (1,)), ValueError, "dilation must have one entry"),
        (lambda: sm.natten((3, 4), (3, 3), 2), TypeError, "dilation must be a tuple of ints"),
        (lambda: sm.natten([3], (3,), (1,)), TypeError, "shape must be a tuple of ints, got list"),
        (lambda: sm.natten((), (), ()), ValueError, "shape must have at least one entry"),
        (lambda: sm.natten(torch.ones(2, 2), (3,)), TypeError, "ints, got Tensor$"),
        (lambda: sm.sliding_window(2**63), ValueError, "window must be an int of 64 bits"),
        (
            lambda: sm.natten((3, 4), (3, 3), is_causal=(1, 0)),
            TypeError,
            r"is_causal must be a tuple of bools, got \(1, 0\)",
        ),
        (lambda: sm.natten((3, 0), (3, 1)), ValueError, "each of shape"),
        (lambda: sm.local_global(sm.causal, 0), ValueError, "period"),
        (lambda: sm.local_global("causal", 2), TypeError, "local must be .* got str"),
        (lambda: sm.local_global(sm.causal, 2, sm.alibi(2)), TypeError, "every must be a mask"),
        (lambda: sm.gemma2_layers(8)(-1), ValueError, "layer must be at least 0"),
        (lambda: sm.longnet((4, 8), (1,)), ValueError, "segments and dilations"),
        (lambda: sm.longnet([4], (1,)), TypeError, "segments must be a tuple"),
        (lambda: sm.longnet((4,), (0,)), ValueError, "each of dilations"),
        (lambda: sm.create_block_mask(sm.alibi(2), 1, 1, 8, 8), TypeError, "mask_mod"),
        (lambda: sm.create_block_mask(lambda q, k: q, 1, 1, 8, 8), TypeError, "mask_mod"),
        (
            lambda: sm.create_block_mask(sm.causal, 1, 1, 8, 8, BLOCK_SIZE=8.0),
            TypeError,
            "BLOCK_SIZE must be an int or",
        ),
        (lambda: sm.to_device(torch.ones(2), "cpu"), TypeError, "mod must be a plain function"),
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


@pytest.mark.parametrize("batch", [1, 2])
def test_blocks_made_in_a_compiled_model_keep_their_strides(batch):
    """FlexAttention's kernels step through a batch by the stride of a head axis of 1.

    Inductor's code for a GPU would choose that stride. What its operator `kept` gives it leaves
    alone, and that is contiguous; for one row the stride is not used.
    """
    ids = torch.arange(300) // torch.tensor([[70], [110]])[:batch]
    operators = []

    def backend(graph, _):
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def made(ids):
        mask = sm.and_masks(sm.causal, sm.document(ids))
        m = sm.create_block_mask(mask, batch, None, 300, 300)
        return m.kv_num_blocks, m.kv_indices, m.full_kv_num_blocks, m.full_kv_indices

    compiled = torch.compile(made, fullgraph=True, backend=backend)
    for got, want in zip(compiled(ids), made(ids), strict=True):
        assert torch.equal(got, want)
        assert got.is_contiguous()
    assert sum("score_mods.kept" in name for name in operators) == (4 if batch > 1 else 0)
    transposed = torch.arange(6).view(2, 3).mT
    assert torch.ops.score_mods.kept(transposed).is_contiguous()


def test_documents_of_a_small_dtype_may_span_it():
    ids = torch.tensor([-100, 100], dtype=torch.int8)
    visible = create_mask(sm.document(ids), 1, 1, 2, 2, device="cpu")
    assert torch.equal(visible[0, 0], torch.eye(2, dtype=torch.bool))
