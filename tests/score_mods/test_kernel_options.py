"""Which kernel options `attention` gives to FlexAttention, and what they rest on."""

import importlib
from types import SimpleNamespace

import pytest
import torch

import score_mods as sm
from score_mods._captured import within

module = importlib.import_module("score_mods.kernel_options")
caller = importlib.import_module("score_mods.attention")
HALF = [torch.bfloat16, torch.float16]


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(module, "_is_hopper", lambda device: True)


def queries(T=256, D=64, dtype=torch.bfloat16, H=2, requires_grad=True):
    """What the choice looks at of queries on a GPU."""
    return SimpleNamespace(
        device=torch.device("cuda"), shape=(1, H, T, D), dtype=dtype, requires_grad=requires_grad
    )


def options(q, score_mod=None, mask_mod=sm.causal, backend="auto", k=None, v=None, lse=False):
    return caller._kernel_options(q, k or q, v or q, score_mod, mask_mod, backend, lse)


@pytest.fixture
def flash(monkeypatch):
    """FLASH is there, and scale_invariant has its fast form."""
    monkeypatch.setattr(module, "flash_is_installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


FLASH = {"BACKEND": "FLASH"}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("score_mod", [False, True])
def test_tiles_fit_blocks_of_128(dtype, score_mod):
    for head_dim in (16, 64, 65, 128):
        chosen = sm.kernel_options(head_dim, dtype, score_mod=score_mod)
        tiles = {name: size for name, size in chosen.items() if "BLOCK" in name}
        assert len(tiles) == 6
        assert all(128 % size == 0 for size in tiles.values())
        # FlexAttention needs these two to be multiples of one another.
        assert tiles["bwd_BLOCK_N1"] % tiles["bwd_BLOCK_M1"] == 0
        assert tiles["bwd_BLOCK_M2"] % tiles["bwd_BLOCK_N2"] == 0


@pytest.mark.usefixtures("hopper")
def test_a_score_mod_gets_its_own_tiles():
    with_mod = options(queries(), sm.scale_invariant())
    assert with_mod == sm.kernel_options(64, torch.bfloat16, contiguous=True)
    assert with_mod != options(queries())


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("compiling", [False, True])
def test_what_is_learned_leaves_room_for_its_gradient(compiling, monkeypatch):
    """At head size 128, where a third stage would be 2 KiB too large."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    tau = torch.full((2,), 10.0)
    shifts = [torch.tensor(i) for i in (3, 0)]
    for head_dim, stages in ((64, 3), (128, 2)):
        for learns in (False, True):
            mod = sm.with_offset(sm.scale_invariant(tau.clone().requires_grad_(learns)), *shifts)
            found = options(queries(D=head_dim), mod)["bwd_num_stages"]
            assert found == (stages if learns else 3)
            with torch.no_grad():
                assert options(queries(D=head_dim), mod)["bwd_num_stages"] == 3


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(129, torch.bfloat16), (256, torch.float16), (64, torch.float32)]
)
def test_no_tiles_where_none_were_measured(head_dim, dtype):
    assert sm.kernel_options(head_dim, dtype) == {}
    assert sm.kernel_options(head_dim, dtype, contiguous=True) == {"BLOCKS_ARE_CONTIGUOUS": True}


def test_no_tiles_on_other_devices():
    assert sm.kernel_options(64, torch.bfloat16, device="cpu") == {}


@pytest.mark.usefixtures("hopper")
def test_short_queries_keep_the_decoding_kernel():
    assert options(queries(T=127), sm.scale_invariant()) is None
    assert options(queries(T=128), sm.scale_invariant()) is not None


@pytest.mark.usefixtures("hopper")
def test_only_masks_known_to_be_contiguous_are_said_to_be():
    for mask in (sm.causal, None):
        assert options(queries(), mask_mod=mask)["BLOCKS_ARE_CONTIGUOUS"] is True
    block_mask = sm.create_block_mask(sm.causal, None, None, 256, 256)
    for mask in (sm.sliding_window(9), sm.and_masks(sm.causal, sm.prefix_lm(9)), block_mask):
        assert "BLOCKS_ARE_CONTIGUOUS" not in options(queries(), mask_mod=mask)


@pytest.mark.usefixtures("hopper")
def test_a_block_mask_of_other_blocks_keeps_the_defaults():
    block_mask = sm.create_block_mask(sm.causal, None, None, 256, 256, BLOCK_SIZE=64)
    assert options(queries(), mask_mod=block_mask) is None


def rows_follow_one_another(counts, indices):
    for count, row in zip(counts.flatten().tolist(), indices.flatten(0, 2), strict=True):
        if (row[1:count] - row[: max(count - 1, 0)] != 1).any():
            return False
    return True


def is_contiguous(mask_mod, q_len, kv_len):
    m = sm.create_block_mask(mask_mod, None, None, q_len, kv_len)
    return all(
        rows_follow_one_another(*pair)
        for pair in (
            (m.kv_num_blocks, m.kv_indices),
            (m.full_kv_num_blocks, m.full_kv_indices),
            (m.q_num_blocks, m.q_indices),
            (m.full_q_num_blocks, m.full_q_indices),
        )
    )


@pytest.mark.parametrize("q_len", [1, 128, 129, 1000, 1024])
@pytest.mark.parametrize("kv_len", [7, 128, 700, 1000, 1024])
def test_causal_blocks_are_contiguous(q_len, kv_len):
    assert is_contiguous(sm.causal, q_len, kv_len)


def test_blocks_that_are_not_would_be_seen():
    assert not is_contiguous(sm.sliding_window(300), 1024, 1024)


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="head_dim must be an int, got float"):
        sm.kernel_options(64.0, torch.bfloat16)
    with pytest.raises(ValueError, match="head_dim must be at least 1, got 0"):
        sm.kernel_options(0, torch.bfloat16)
    with pytest.raises(TypeError, match=r"dtype must be a torch.dtype, got str"):
        sm.kernel_options(64, "bfloat16")
    q = torch.randn(1, 1, 8, 16)
    with pytest.raises(ValueError, match="or \"flash\", got 'cute'"):
        sm.attention(q, q, q, backend="cute")
    with pytest.raises(ValueError, match='must be "auto" with impl="dense", got \'flash\''):
        sm.attention(q, q, q, impl="dense", backend="flash")


def refusal(mod=None, q=None, mask_mod=sm.causal, **more):
    with pytest.raises(ValueError, match=r'^backend="flash" cannot be used: ') as refused:
        options(q or queries(), mod, mask_mod, backend="flash", **more)
    return str(refused.value)


def doubled(score, b, h, q_idx, kv_idx):
    return 2 * score


def calling(mod):
    """A function of the user's that calls another score_mod."""

    def mine(score, b, h, q_idx, kv_idx):
        return mod(score, b, h, q_idx, kv_idx) + 1

    return mine


def at_places(mod):
    return sm.with_positions(mod, torch.arange(256))


def test_flash_says_that_it_is_not_there():
    assert refusal().endswith(
        'flash-attn-4 cannot be imported (flash_attn.cute); use backend="triton"'
    )


@pytest.mark.usefixtures("flash")
def test_flash_says_what_it_takes():
    for mod in (None, sm.alibi(2), sm.scale_invariant(), sm.with_offset(sm.scale_invariant(), 3)):
        assert options(queries(), mod, backend="flash") == FLASH
    for mod in (doubled, sm.with_offset(doubled, 3), sm.compose(doubled, sm.alibi(2))):
        assert options(queries(), mod, backend="flash") == FLASH
    for mask in (None, sm.prefix_lm(9), sm.create_block_mask(sm.causal, None, None, 256, 256)):
        assert options(queries(), mask_mod=mask, backend="flash") == FLASH
    assert options(queries(), k=queries(H=1), backend="flash") == FLASH


@pytest.mark.usefixtures("flash")
def test_flash_says_why_not(monkeypatch):
    float32 = queries(dtype=torch.float32)
    assert "bfloat16 and float16 on a GPU, got torch.float32 on cuda" in refusal(q=float32)
    assert "head sizes of 64 and 128, the same for q and v, got 96 and 96" in refusal(
        q=queries(D=96)
    )
    assert "got 64 and 128" in refusal(v=queries(D=128))
    assert "without return_lse" in refusal(lse=True)
    grouped = refusal(sm.alibi(2), k=queries(H=1))
    assert "wrong results for a score_mod with grouped queries" in grouped
    for mask in (sm.sliding_window(9), sm.and_masks(sm.causal, sm.document(torch.arange(256)))):
        assert "no mask that captures tensors" in refusal(mask_mod=mask)
        block_mask = sm.create_block_mask(mask, None, None, 256, 256)
        assert "no mask that captures tensors" in refusal(mask_mod=block_mask)
    small = sm.create_block_mask(sm.causal, None, None, 256, 256, BLOCK_SIZE=64)
    assert "blocks of 128, got a BlockMask of (64, 64)" in refusal(mask_mod=small)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "deterministic algorithms" in refusal()


LEARNABLE = torch.tensor([1.0, 2.0], requires_grad=True)
NOT_FOR_FLASH = {
    "learnable": (lambda: sm.scale_invariant(LEARNABLE), "gives no gradient to what"),
    "exact form": (
        lambda: sm.scale_invariant(sigma=0.1),
        "the fast form of scale_invariant alone",
    ),
    "positions": (lambda: at_places(sm.alibi(2)), "without tables of positions"),
    "exempt": (lambda: sm.exempt_keys(sm.alibi(2), 1), "not exempt_keys"),
    "composed": (lambda: sm.compose(sm.logn(), sm.alibi(2)), "not logn"),
}
for _mechanism in sm.catalogue:
    if _mechanism.stage and _mechanism.name not in ("alibi", "scale_invariant"):
        NOT_FOR_FLASH[_mechanism.name] = (
            lambda text=_mechanism.example: eval(text, {**vars(sm), "torch": torch, "T": 64}),
            f"tried with alibi, scale_invariant alone, not {_mechanism.name}",
        )


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("name", NOT_FOR_FLASH)
def test_every_other_score_mod_is_refused_however_it_is_wrapped(name):
    make, why = NOT_FOR_FLASH[name]
    mod = make()
    for wrapped in (mod, sm.with_offset(mod, 3), sm.compose(mod), calling(mod)):
        assert why in refusal(wrapped)
        with pytest.raises(ValueError, match=f"mod must be a score_mod for the FLASH .*{why}"):
            sm.for_flash(wrapped)


def test_flash_in_a_compiled_model_is_refused():
    def model(x):
        return sm.attention(x, x, x, doubled, backend="flash")

    x = torch.randn(1, 1, 8, 16)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="being compiled, call flex_attention"):
        torch.compile(model, fullgraph=True, backend="eager")(x)


@pytest.mark.usefixtures("hopper")
def test_flash_is_chosen_where_it_was_measured_to_be_faster(monkeypatch):
    def is_flash(q=None, score_mod=None, mask_mod=sm.causal, **more):
        return options(q or long(), score_mod, mask_mod, **more) == FLASH

    def long(**shape):
        return queries(T=4096, **shape)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    mod = sm.scale_invariant()
    assert not is_flash(score_mod=mod)
    monkeypatch.setattr(module, "flash_is_installed", lambda: True)
    assert is_flash()
    assert is_flash(score_mod=mod)
    assert is_flash(long(D=128), mask_mod=None)
    assert is_flash(long(requires_grad=False))
    assert is_flash(long(D=128, requires_grad=False), mod)
    assert not is_flash(long(requires_grad=False), mod)  # the forward pass alone is slower
    assert is_flash(long(requires_grad=False), mod, v=long())
    with torch.no_grad():
        assert not is_flash(score_mod=mod)
    assert not is_flash(lse=True)
    assert not is_flash(queries(T=4095))
    assert not is_flash(long(D=32))
    assert not is_flash(long(dtype=torch.float32))
    assert not is_flash(mask_mod=sm.sliding_window(128))
    assert not is_flash(score_mod=sm.alibi(2))
    assert not is_flash(score_mod=sm.exempt_keys(mod, 1))
    assert not is_flash(score_mod=sm.with_positions(mod, torch.arange(4096), torch.arange(4096)))
    assert not is_flash(score_mod=sm.compose(sm.alibi(2), mod, check_order=False))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not is_flash()


@pytest.mark.parametrize(
    "make",
    [
        sm.scale_invariant,
        lambda: sm.scale_invariant(sigma=torch.tensor([1.0, 2.0])),
        lambda: sm.alibi(2),
        lambda: sm.compose(sm.alibi(2), sm.with_offset(sm.scale_invariant(7.0), 3, 1)),
    ],
    ids=["numbers", "one a head", "table", "composed"],
)
def test_numbers_written_into_the_kernel_are_the_same_numbers(make, monkeypatch):
    def numbers(mod):
        return [x for x in within(mod) if isinstance(x, torch.Tensor) and not x.ndim]

    # The fast form, which on a CPU is computed by the operators it stands for.
    monkeypatch.setattr(
        importlib.import_module("score_mods.fast"), "has_instructions", lambda *_: True
    )
    scale_invariant = importlib.import_module("score_mods.scale_invariant")
    monkeypatch.setattr(scale_invariant, "wants_instructions", lambda *_: True)
    mod = make()
    written = sm.for_flash(mod)
    assert not numbers(written)
    assert (written is mod) == (not numbers(mod))
    q, k, v = torch.randn(3, 1, 2, 9, 16)
    want = sm.dense_attention(q, k, v, mod, sm.causal)
    torch.testing.assert_close(sm.dense_attention(q, k, v, written, sm.causal), want)


def test_only_score_mods_can_be_written_into_a_kernel():
    with pytest.raises(TypeError, match=r"mod must be a score_mod .*, got int"):
        sm.for_flash(3)
    with pytest.raises(TypeError, match=r"mod must be a score_mod .*, got a mask_mod"):
        sm.for_flash(sm.causal)


def test_the_choice_can_be_made_while_a_model_is_being_compiled():
    def model(x):
        return x + len(sm.kernel_options(64, torch.bfloat16, contiguous=True, device=x.device))

    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(())) == 1
