import math
import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

import score_mods as sm

SIX = torch.tensor([2.0, 5.0, 10.0, 50.0, 300.0, 1000.0])


def qkv(T, T_kv=None, H=6, H_kv=None, D=32, D_v=None, dtype=torch.float32, B=1):
    q = torch.randn(B, H, T, D).to(dtype)
    k = torch.randn(B, H_kv or H, T_kv or T, D).to(dtype)
    return q, k, torch.randn(B, H_kv or H, T_kv or T, D_v or D).to(dtype)


def exact(q, k, v, *mods, **options):
    return sm.dense_attention(q.double(), k.double(), v.double(), *mods, **options)


def plain(q, k, v, score_mod, mask_mod):
    """The formula in the inputs' own precision, whose error bounds what a fast path may have."""
    index = (
        torch.arange(q.shape[1])[:, None, None],
        torch.arange(q.shape[2])[:, None],
        torch.arange(k.shape[2]),
    )
    score = (q @ k.mT * q.shape[-1] ** -0.5).float()
    score = score_mod(score, torch.tensor(0), *index)
    score = score.masked_fill(~mask_mod(torch.tensor(0), *index), -math.inf)
    return score.softmax(-1).to(v.dtype) @ v


def rms(x):
    return x.square().mean().sqrt()


@pytest.mark.compiled
def test_compiled_agrees_with_float64_for_more_than_eight_mods():
    """Ten mods, two masks and odd lengths in one process, without the unfused fall-back."""
    mods = [
        sm.scale_invariant(),
        sm.scale_invariant(SIX, sigma=SIX.sqrt(), mu=-1.0),
        sm.scale_invariant_grid((20, 13)),
        sm.alibi(6),
        sm.logn(),
        sm.logn(50),
        sm.ssmax(0.43, 0.1),
        sm.compose(sm.logn(50), sm.alibi(6)),
        sm.exempt_keys(sm.scale_invariant(3.0), 2),
        sm.with_offset(sm.scale_invariant(), 40),
    ]
    masks = [sm.causal, sm.and_masks(sm.causal, sm.document(torch.arange(257) // 100))]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch warns so when it stops compiling
        for i, mod in enumerate(mods):
            T = (257, 129, 63, 7, 1)[i % 5]
            mask = masks[i % 2] if T == 257 else sm.causal
            q, k, v = qkv(T)
            out = sm.attention(q, k, v, mod, mask)
            reference = exact(q, k, v, mod, mask)
            assert out.dtype == torch.float32
            assert (out - reference).abs().max() < 1e-5, mod.__name__


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_low_precision_within_twice_the_plain_formula(dtype):
    q, k, v = qkv(129, dtype=dtype)
    mod = sm.scale_invariant(SIX)
    reference = exact(q, k, v, mod, sm.causal)
    error = sm.attention(q, k, v, mod, sm.causal) - reference
    allowed = plain(q, k, v, mod, sm.causal) - reference
    assert error.abs().max() <= 2 * allowed.abs().max()
    assert rms(error) <= 2 * rms(allowed)
    # The twin: a mod whose distances are off by one is outside the budget.
    wrong = exact(q, k, v, sm.with_offset(mod, 1), sm.causal) - reference
    assert rms(wrong) > 2 * rms(allowed)


@pytest.mark.compiled
def test_few_graphs_for_many_taus_and_lengths():
    torch._dynamo.utils.counters.clear()
    for tau in (3.0, 10.0, 100.0):
        for T in (256, 257, 300, 1000):
            q, k, v = qkv(T, H=2)
            mod = sm.scale_invariant(tau)
            out = sm.attention(q, k, v, mod, sm.causal)
        assert (out - exact(q, k, v, mod, sm.causal)).abs().max() < 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


@pytest.mark.compiled
def test_decoding_does_not_recompile_and_equals_the_full_pass():
    T = 40
    q, k, v = (x[:, :, :T] for x in qkv(T + 1, H=6, H_kv=2))
    mod = sm.compose(sm.logn(10), sm.alibi(6))
    full = exact(q, k, v, mod, sm.causal)
    graphs = []
    for t in range(T - 8, T):
        out = sm.attention(
            q[:, :, [t]],
            k[:, :, : t + 1],
            v[:, :, : t + 1],
            sm.with_offset(mod, t),
            sm.with_offset(sm.causal, t),
            enable_gqa=True,
        )
        assert (out - full[:, :, [t]]).abs().max() < 1e-5
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[2]


@pytest.mark.compiled
def test_joins_a_compiled_model():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tau = torch.nn.Parameter(SIX[:2].clone())

        def forward(self, q, k, v, block_mask):
            return sm.attention(q, k, v, sm.scale_invariant(self.tau), block_mask) + 1

    layer = Layer()
    q, k, v = qkv(65, H=2)
    block_mask = sm.create_block_mask(sm.causal, None, None, 65, 65)
    # Inductor for the CPU takes no operation behind FlexAttention; that the model is one graph
    # needs none.
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = exact(q, k, v, sm.scale_invariant(layer.tau), sm.causal) + 1
        assert (compiled(q, k, v, block_mask) - expected).abs().max() < 1e-5
        assert (compiled(q, k, v, sm.causal) - expected).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_dense_agrees_with_eager_flex_attention():
    """In float64, with a head per group, other value sizes, empty rows and lse."""
    q, k, v = qkv(50, 37, H=6, H_kv=2, D_v=7, dtype=torch.float64, B=2)
    mask = sm.and_masks(sm.causal, lambda b, h, q_idx, kv_idx: (kv_idx > 3) | (b == 1))
    mod = sm.scale_invariant(SIX.double())
    out, lse = sm.dense_attention(q, k, v, mod, mask, scale=0.3, return_lse=True)
    block_mask = sm.create_block_mask(mask, 2, None, 50, 37)
    expected, aux = flex_attention(
        q, k, v, mod, block_mask, scale=0.3, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, aux.lse, rtol=0, atol=1e-12)
    assert (out[0, :, :4] == 0).all()
    assert lse[0, :, :4].isneginf().all()


def test_dense_gradients_are_right_with_empty_rows():
    q, k, v = (x.requires_grad_() for x in qkv(5, H=2, D=3, dtype=torch.float64))
    mask = lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (q_idx > 1)  # noqa: E731

    def run(q, k, v):
        return sm.attention(q, k, v, sm.alibi(2), mask, impl="dense")

    assert torch.autograd.gradcheck(run, (q, k, v))
    _, lse = sm.attention(q, k, v, None, mask, impl="dense", return_lse=True)
    lse[lse.isfinite()].sum().backward()
    assert q.grad.isfinite().all()


def test_dense_keeps_its_precision_under_autocast():
    """And so do two branches, which are merged by lse."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    far = sm.self_extend(sm.rope(16), 8, 4)
    want = sm.dense_attention(q, k, v, sm.scale_invariant(), sm.causal, return_lse=True)
    merged = far(q, k, v, impl="dense")
    with torch.autocast("cpu", torch.bfloat16):
        got = sm.dense_attention(q, k, v, sm.scale_invariant(), sm.causal, return_lse=True)
        assert torch.equal(far(q, k, v, impl="dense"), merged)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == torch.float32
        assert torch.equal(x, y)


@pytest.mark.parametrize("inner", [None, sm.causal])
def test_dense_sees_the_blocks_of_a_block_mask(inner):
    counts = torch.tensor([[[2, 1, 0]], [[1, 1, 3]]], dtype=torch.int32)
    order = torch.tensor([[[2, 0, 1], [1, 0, 0], [0, 1, 2]]], dtype=torch.int32).expand(2, 1, 3, 3)
    full = torch.tensor([[[0, 1, 1]]], dtype=torch.int32).expand(2, 1, 3), order.flip(-1)
    blocks = BlockMask.from_kv_blocks(
        counts, order, *full, BLOCK_SIZE=128, mask_mod=inner, seq_lengths=(300, 300)
    )
    q, k, v = qkv(300, B=2)
    seen = [[[0, 2], [1], []], [[2], [1], [0, 1, 2]]], [[], [0], [2]]
    mask = torch.zeros(2, 3, 3, 128, 128, dtype=torch.bool)
    for b in range(2):
        for row in range(3):
            mask[b, row, seen[0][b][row]] = True
    within = mask.permute(0, 1, 3, 2, 4).reshape(2, 1, 384, 384)[..., :300, :300]
    if inner is not None:
        within = within.tril()
    for row, columns in enumerate(seen[1]):
        for column in columns:
            area = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            within[:, :, area[0], area[1]] = True
    scores = (q.double() @ k.double().mT * q.shape[-1] ** -0.5).masked_fill(~within, -math.inf)
    expected = (scores.softmax(-1).nan_to_num() @ v.double()).float()
    got = sm.attention(q, k, v, None, blocks, impl="dense")
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_nothing_given_is_plain_attention():
    q, k, v = qkv(33, 20, dtype=torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(sm.attention(q, k, v, impl="dense"), expected)


def bad(name, error, message, **changes):
    return pytest.param(changes, error, message, id=name)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        bad("no tensor", TypeError, "q must be a tensor", q=[1.0]),
        bad(
            "three axes", ValueError, r"k must have shape \(B, H, T, D\)", k=torch.zeros(2, 8, 16)
        ),
        bad(
            "integers",
            TypeError,
            "v must be floating",
            v=torch.zeros(1, 2, 8, 16, dtype=torch.int),
        ),
        bad("dtypes", ValueError, "k must have q's dtype", k=torch.zeros(1, 2, 8, 16).bfloat16()),
        bad(
            "devices",
            ValueError,
            "v must have q's dtype and device",
            v=torch.zeros(1, 2, 8, 16, device="meta"),
        ),
        bad("batch", ValueError, "k must have shape", k=torch.zeros(3, 2, 8, 16)),
        bad("head size", ValueError, "k must have shape", k=torch.zeros(1, 2, 8, 32)),
        bad("value length", ValueError, "v must have shape", v=torch.zeros(1, 2, 9, 16)),
        bad("empty", ValueError, "no empty axis", q=torch.zeros(1, 2, 0, 16)),
        bad(
            "groups",
            ValueError,
            "enable_gqa=True",
            k=torch.zeros(1, 1, 8, 16),
            v=torch.zeros(1, 1, 8, 16),
        ),
        bad(
            "odd groups",
            ValueError,
            "multiple of k's",
            k=torch.zeros(1, 3, 8, 16),
            v=torch.zeros(1, 3, 8, 16),
            enable_gqa=True,
        ),
        bad("mask for mod", TypeError, "score_mod must be a score_mod", score_mod=sm.causal),
        bad("mod for mask", TypeError, "mask_mod must be a mask_mod", mask_mod=sm.alibi(2)),
        bad("arity", TypeError, "score_mod must be a score_mod", score_mod=lambda s, q: s),
        bad("object", TypeError, "got Linear", score_mod=torch.nn.Linear(1, 1)),
        bad("heads", ValueError, "parameters for 4 heads, q has 2", score_mod=sm.alibi(4)),
        bad(
            "lengths",
            ValueError,
            r"lengths \(8, 8\)",
            mask_mod=sm.create_block_mask(sm.causal, 1, 1, 9, 8),
        ),
        bad(
            "batch of blocks",
            ValueError,
            "for a batch of 1 and 2 heads",
            mask_mod=sm.create_block_mask(sm.document(torch.zeros(3, 8).int()), 3, 1, 8, 8),
        ),
        bad("grouped", TypeError, "enable_gqa must be a bool, got str", enable_gqa="no"),
        bad("lse's type", TypeError, "return_lse must be a bool, got int", return_lse=1),
        bad("scale", ValueError, "scale must be a number", scale=float("nan")),
        bad("scale's type", TypeError, "scale must be a number", scale=torch.tensor(0.3)),
        bad("documents", ValueError, "8 queries", mask_mod=sm.document(torch.zeros(7).int())),
        bad(
            "documents of a batch",
            ValueError,
            "a batch of 2",
            mask_mod=sm.and_masks(sm.causal, sm.document(torch.zeros(1, 8).int())),
            **{name: torch.zeros(2, 2, 8, 16) for name in "qkv"},
        ),
        bad(
            "positions",
            ValueError,
            "8 keys",
            score_mod=sm.exempt_keys(
                sm.compose(sm.with_positions(sm.alibi(2), torch.arange(8), torch.arange(5))), 1
            ),
        ),
        bad("grid", ValueError, "made for", score_mod=sm.scale_invariant_grid((2, 2))),
        bad(
            "learnable",
            ValueError,
            'no backward on a CPU; use impl="dense"',
            score_mod=sm.compose(sm.scale_invariant(torch.ones(2, requires_grad=True))),
        ),
        bad("impl", ValueError, "impl must be", impl="fast"),
        bad("lse", ValueError, 'no lse on a CPU; use impl="dense"', return_lse=True),
        bad(
            "grad",
            ValueError,
            'no backward on a CPU; use impl="dense"',
            q=torch.zeros(1, 2, 8, 16, requires_grad=True),
        ),
        bad(
            "float64",
            ValueError,
            'float64; use impl="dense"',
            **{name: torch.zeros(1, 2, 8, 16, dtype=torch.float64) for name in "qkv"},
        ),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    arguments = {name: torch.zeros(1, 2, 8, 16) for name in "qkv"} | changes
    with pytest.raises(error, match=message):
        sm.attention(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": torch.zeros(2, 2, 8, 16)}, ValueError, "k must have shape"),
        ({"score_mod": sm.alibi(3)}, ValueError, "parameters for 3 heads"),
        ({"mask_mod": sm.document(torch.zeros(7).int())}, ValueError, "8 queries"),
        ({"score_mod": sm.causal}, TypeError, "score_mod must be a score_mod"),
        ({"scale": "1"}, TypeError, "scale"),
        ({"return_lse": "no"}, TypeError, "return_lse must be a bool, got str"),
        (
            dict.fromkeys("qkv", torch.zeros(1, 2, 8, 16).to(torch.float8_e4m3fn)),
            TypeError,
            "16 bits or more",
        ),
    ],
)
def test_the_dense_form_names_bad_arguments_too(changes, error, message):
    arguments = {name: torch.zeros(1, 2, 8, 16) for name in "qkv"} | changes
    with pytest.raises(error, match=message):
        sm.dense_attention(**arguments)
