import gc
import weakref
from functools import partial

import pytest
import torch

import score_mods as sm

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402
from transformers.masking_utils import create_masks_for_generate, eager_mask  # noqa: E402

from score_mods.huggingface import patch_rotary, register  # noqa: E402

TAU, WINDOW, CAP = 4.0, 6, 5.0
SIZES = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(**changes):
    return made(transformers.LlamaConfig(**SIZES | changes))


def made(config):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).double().eval()


def mistral():
    return made(transformers.MistralConfig(**SIZES, sliding_window=WINDOW))


def gemma2():
    return made(
        transformers.Gemma2Config(
            **SIZES,
            sliding_window=WINDOW,
            attn_logit_softcapping=CAP,
            query_pre_attn_scalar=7,
            layer_types=["sliding_attention", "full_attention"],
        )
    )


def gpt_oss():
    model = made(
        transformers.GptOssConfig(
            **SIZES,
            sliding_window=WINDOW,
            num_local_experts=2,
            num_experts_per_tok=1,
            layer_types=["sliding_attention", "full_attention"],
            experts_implementation="eager",
        )
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()
    return model


def persimmon():
    """Its layers are not told `position_ids`."""
    sizes = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")}
    return made(transformers.PersimmonConfig(**sizes))


MODELS = {"llama": llama, "mistral": mistral, "gemma2": gemma2, "gpt_oss": gpt_oss}

# Each mechanism twice: as a score_mod, and as a formula of the score s, the distance t, the number
# n of keys of a causal row and the head h.
LAWS = {
    "scale_invariant": (
        sm.scale_invariant(TAU),
        lambda s, t, n, h: s * (1 + 2 * (t / TAU + 1).log()).sqrt() - 2 * (t / TAU + 1).log(),
    ),
    "alibi": (sm.alibi(4), lambda s, t, n, h: s - t * 2.0 ** (-2 * (h + 1))),
    "logn": (sm.logn(), lambda s, t, n, h: s * n.log()),
    "identity": (None, lambda s, t, n, h: s),
}


def oracle(law):
    """An attention function of transformers' own kind, under its own eager mask."""

    def attend(module, query, key, value, attention_mask, scaling, softcap=None, s_aux=None, **_):
        groups = query.shape[1] // key.shape[1]
        score = query @ key.repeat_interleave(groups, 1).mT * scaling
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        i = torch.arange(query.shape[2], dtype=score.dtype)[:, None]
        j = torch.arange(key.shape[2], dtype=score.dtype)
        h = torch.arange(query.shape[1], dtype=score.dtype)[:, None, None]
        score = law(score, (i - j).abs(), i + 1, h) + attention_mask
        if s_aux is not None:
            sink = s_aux.view(1, -1, 1, 1).expand(*score.shape[:3], 1)
            score = torch.cat([score, sink], -1)
        weight = score.softmax(-1)[..., : key.shape[2]]
        return (weight @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None

    return attend


@pytest.fixture(autouse=True)
def _registered():
    for name, (mod, law) in LAWS.items():
        register(name, mod, impl="dense")
        AttentionInterface.register(f"oracle_{name}", oracle(law))
        AttentionMaskInterface.register(f"oracle_{name}", eager_mask)


@torch.no_grad()
def logits(model, name, tokens, **options):
    model.set_attn_implementation(name)
    return model(tokens, **options).logits


def sample(rows, length):
    return torch.randint(3, 50, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("kind", MODELS)
def test_full_pass_equals_the_formula(kind, name):
    model, tokens = MODELS[kind](), sample(2, 20)
    expected = logits(model, f"oracle_{name}", tokens)
    assert (logits(model, name, tokens) - expected).abs().max() < 1e-6
    other = "alibi" if name == "identity" else "identity"
    assert (logits(model, other, tokens) - expected).abs().max() > 1e-2
    if name == "identity":  # the model's own eager form takes its softmax in float32
        assert (logits(model, "eager", tokens) - expected).abs().max() < 1e-4


def choose(layer, tau=TAU):
    return None if layer == 0 else sm.scale_invariant(tau)


class Chosen:
    def __call__(self, layer):
        return choose(layer)

    def of(self, layer, *, tau=TAU):
        return choose(layer, tau)


@pytest.mark.parametrize(
    "chosen",
    [lambda i: choose(i), choose, partial(choose, tau=TAU), Chosen(), Chosen().of],
    ids=["function", "default", "partial", "object", "method"],
)
def test_chosen_by_layer(chosen):
    register("by_layer", chosen, impl="dense")
    model, tokens = llama(), sample(1, 20)
    got = logits(model, "by_layer", tokens)

    def expected(module, *arguments, **options):
        law = LAWS["scale_invariant"][1] if module.layer_idx else lambda s, t, n, h: s
        return oracle(law)(module, *arguments, **options)

    AttentionInterface.register("oracle_by_layer", expected)
    AttentionMaskInterface.register("oracle_by_layer", eager_mask)
    assert (got - logits(model, "oracle_by_layer", tokens)).abs().max() < 1e-6


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_a_further_mask():
    """A window equals that of a model which has one itself, here with all keys in the cache."""
    tokens = sample(2, 20)
    expected = logits(mistral(), "scale_invariant", tokens)
    register(
        "window", LAWS["scale_invariant"][0], mask_mod=sm.sliding_window(WINDOW), impl="dense"
    )
    model = llama()
    model.load_state_dict(mistral().state_dict())
    assert (logits(model, "window", tokens) - expected).abs().max() < 1e-9
    cache = transformers.DynamicCache(config=model.config)
    parts = [logits(model, "window", part, past_key_values=cache) for part in tokens.split(4, 1)]
    assert (torch.cat(parts, 1) - expected).abs().max() < 1e-9


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("blocks", [[3] + [1] * 12 + [5], [9] + [1] * 11])
def test_cached_decoding_equals_the_full_pass(kind, name, static, blocks):
    model, tokens = MODELS[kind](), sample(2, 20)
    expected = logits(model, f"oracle_{name}", tokens)
    cache = transformers.DynamicCache(config=model.config)
    if static:
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    parts = [logits(model, name, part, past_key_values=cache) for part in tokens.split(blocks, 1)]
    assert (torch.cat(parts, 1) - expected).abs().max() < 1e-6


def absolute():
    """A score_mod that reads both positions: LogN for the query, first keys exempted."""
    return sm.exempt_keys(sm.logn(), 2)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_left_padded_batch_equals_single_sequences(kind, cache):
    register("absolute", absolute(), impl="dense")
    model, rows = MODELS[kind](), [sample(1, 4)[0], sample(1, 11)[0]]
    tokens, mask = torch.zeros(2, 11, dtype=torch.long), torch.zeros(2, 11, dtype=torch.long)
    for b, row in enumerate(rows):
        tokens[b, 11 - len(row) :], mask[b, 11 - len(row) :] = row, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    got = logits(model, "absolute", tokens, attention_mask=mask, position_ids=positions)
    options = {"max_new_tokens": 7, "do_sample": False, "cache_implementation": cache}
    together = model.generate(tokens, attention_mask=mask, **options)
    for b, row in enumerate(rows):
        alone = logits(model, "absolute", row[None])[0]
        assert (got[b, 11 - len(row) :] - alone).abs().max() < 1e-6
        single = model.generate(row[None], **options)[0, len(row) :]
        assert torch.equal(together[b, 11:][: len(single)], single)


def test_packed_documents_equal_single_sequences():
    register("absolute", absolute(), impl="dense")
    for model in (llama(), mistral(), persimmon()):
        tokens = sample(2, 20)
        positions = torch.cat([torch.arange(13), torch.arange(7)])[None]
        got = logits(model, "absolute", tokens, position_ids=positions, use_cache=False)
        for at in (slice(0, 13), slice(13, 20)):
            alone = logits(model, "absolute", tokens[:, at])
            assert (got[:, at] - alone).abs().max() < 1e-6


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 3}])
def test_generate(options):
    """Greedy search equals argmax by the formula without a cache; beams equal those of eager."""
    model, tokens = llama(), sample(2, 5)
    if "num_beams" in options:
        model.set_attn_implementation("oracle_scale_invariant")
        expected = model.generate(
            tokens, max_new_tokens=8, do_sample=False, use_cache=False, **options
        )
    else:
        expected = tokens
        for _ in range(8):
            step = logits(model, "oracle_scale_invariant", expected)[:, -1].argmax(-1)
            expected = torch.cat([expected, step[:, None]], 1)
        assert not (expected[:, 5:] == 2).any()  # no row ends early
    model.set_attn_implementation("scale_invariant")
    got = model.generate(tokens, max_new_tokens=8, do_sample=False, **options)
    assert torch.equal(got, expected)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_flex_equals_the_formula():
    register("flex", sm.scale_invariant(TAU))
    model, tokens = mistral(), sample(2, 20)
    expected = logits(model, "oracle_scale_invariant", tokens)
    model = model.float()
    cache = transformers.DynamicCache(config=model.config)
    got = [logits(model, "flex", tokens[:, :18], past_key_values=cache)]
    got += [logits(model, "flex", tokens[:, [t]], past_key_values=cache) for t in (18, 19)]
    assert (torch.cat(got, 1) - expected).abs().max() < 1e-3
    assert (logits(model, "identity", tokens) - expected).abs().max() > 1e-1


@pytest.mark.parametrize(
    "config",
    [
        transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=2),
        transformers.MptConfig(vocab_size=50, d_model=32, n_layers=1, n_heads=2),
    ],
    ids=["Bloom", "MPT"],
)
def test_models_that_attend_by_themselves_say_so(config):
    load = transformers.AutoModelForCausalLM.from_config
    with pytest.raises(ValueError, match="ForCausalLM, which attends by itself"):
        load(config, attn_implementation="identity")(sample(1, 5))


def test_trains_on_a_cpu_by_the_dense_form():
    model, tokens = llama(), sample(2, 12)

    def gradients(name):
        model.set_attn_implementation(name)
        loss = model(tokens, labels=tokens).loss
        return torch.autograd.grad(loss, list(model.parameters()))

    expected = gradients("oracle_scale_invariant")
    for got, want in zip(gradients("scale_invariant"), expected, strict=True):
        assert (got - want).abs().max() < 1e-6 * (1 + want.abs().max())
    register("flex", sm.scale_invariant(TAU))
    model.float().set_attn_implementation("flex")
    with pytest.raises(ValueError, match='no backward on a CPU; use impl="dense"'):
        model(tokens)


@pytest.mark.parametrize("late", [False, True], ids=["by the model", "by attention"])
def test_autocast_is_as_near_as_the_plain_form(late):
    """Logits and gradients, wherever rotation is done; it leaves float32 beside bfloat16."""
    model, tokens = llama(), sample(2, 40)

    def found(name):
        model.set_attn_implementation(name)
        with torch.autocast("cpu", torch.bfloat16, enabled=not name.endswith("_exact")):
            output = model(tokens, labels=tokens)
        gradient = torch.autograd.grad(output.loss, model.model.embed_tokens.weight)[0]
        return output.logits.detach().double(), gradient.double()

    AttentionInterface.register("oracle_exact", oracle(LAWS["scale_invariant"][1]))
    AttentionMaskInterface.register("oracle_exact", eager_mask)
    exact = found("oracle_exact")
    model.float()
    plain = found("oracle_scale_invariant")
    if late:
        patch_rotary(model, lambda length: sm.rope(16))
    for got, low, want in zip(found("scale_invariant"), plain, exact, strict=True):
        assert 0 < (got - want).square().mean() < 4 * (low - want).square().mean()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_compiled_model_is_one_graph():
    model, tokens = llama(), sample(2, 12)
    expected = logits(model, "scale_invariant", tokens)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert (compiled(tokens, use_cache=False).logits - expected).abs().max() < 1e-9


def test_what_is_not_supported_says_so():
    tokens = sample(1, 5)
    with pytest.raises(TypeError, match="name must be a string"):
        register(3, None)
    for name in ("sdpa", "eager"):
        with pytest.raises(
            ValueError, match=f"must not be one of transformers' own, got '{name}'"
        ):
            register(name, None)
    with pytest.raises(ValueError, match="impl must be"):
        register("other", None, impl="fast")
    with pytest.raises(ValueError, match="backend must be"):
        register("other", None, backend="fast")
    with pytest.raises(TypeError, match="got a mask_mod"):
        register("other", sm.causal)
    for wrong, got in ((10.0, "float"), (sm.logn, "a function of 0"), (lambda s, q: s, "of 2")):
        with pytest.raises(
            TypeError, match=f"None or a function of the layer's index, got .*{got}"
        ):
            register("other", wrong)
    with pytest.raises(TypeError, match="mask_mod must be a mask_mod"):
        register("other", None, mask_mod=sm.logn())
    register("wrong_by_layer", lambda layer: sm.causal, impl="dense")
    with pytest.raises(TypeError, match="got a mask_mod"):
        logits(llama(), "wrong_by_layer", tokens)
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(B, T\)"):
        logits(llama(), "identity", tokens, attention_mask=torch.ones(1, 1, 5, 5))
    with pytest.raises(ValueError, match=r"\(B, 5\), for all tokens so far, got \(1, 4\)"):
        logits(llama(), "identity", tokens, attention_mask=torch.ones(1, 4))
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    bert = transformers.BertModel(config).eval()
    bert.set_attn_implementation("identity")
    with pytest.raises(ValueError, match="model has no causal attention"):
        bert(tokens)
    model = llama(attention_dropout=0.1).train()
    model.set_attn_implementation("identity")
    with pytest.raises(ValueError, match=r"attention dropout must be 0, got 0\.1"):
        model(tokens)


def test_what_was_moved_follows_what_is_learned(monkeypatch):
    """As if the parameter were on another device than the model, so that each use is a copy."""
    monkeypatch.setattr("score_mods._captured._tensor_on", lambda value, device: value.clone())
    tau = torch.full((4,), TAU, requires_grad=True)
    register("learned", sm.scale_invariant(tau), impl="dense")
    model, tokens = llama(), sample(1, 20)
    before = logits(model, "learned", tokens)
    with torch.no_grad():
        tau.mul_(2)
    after = logits(model, "learned", tokens)
    register("doubled", sm.scale_invariant(2 * TAU), impl="dense")
    assert (after - logits(model, "doubled", tokens)).abs().max() < 1e-4
    assert (after - before).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_patch_rotary_equals_the_models_own_scheme(kind):
    changed = {"rope_type": kind, "factor": 4.0, "rope_theta": 10000.0}
    changed["original_max_position_embeddings"] = 64
    own = llama(rope_parameters=changed)
    model, tokens = llama(), sample(1, 100)
    before = logits(model, "identity", tokens)
    schemes = {
        "yarn": sm.yarn_rope(16, 4.0, 64),
        "linear": sm.position_interpolation(16, 4.0),
    }
    patch_rotary(model, schemes[kind])
    got = logits(model, "identity", tokens)
    assert (got - logits(own, "eager", tokens)).abs().max() < 1e-4
    assert (got - before).abs().max() > 1e-2
    patch_rotary(model, sm.rope(16))
    assert (logits(model, "identity", tokens) - before).abs().max() < 1e-4


def test_patch_rotary_late_dynamic_ntk():
    """Beyond the trained length it is transformers' own; cached keys follow the length."""
    parameters = {"rope_type": "dynamic", "factor": 1.0, "rope_theta": 10000.0}
    own = llama(rope_parameters=parameters, max_position_embeddings=16)
    model, tokens = llama(), sample(1, 30)
    patch_rotary(model, lambda length: sm.dynamic_ntk_rope(16, length, 16))
    for T in (10, 30):
        got = logits(model, "scale_invariant", tokens[:, :T])
        own.model.rotary_emb.max_seq_len_cached = 16
        expected = logits(own, "oracle_scale_invariant", tokens[:, :T])
        assert (got - expected).abs().max() < 1e-4
    model.set_attn_implementation("scale_invariant")
    steps = model.generate(tokens[:, :10], max_new_tokens=12, do_sample=False)
    for t in range(10, steps.shape[1]):
        assert logits(model, "scale_invariant", steps[:, :t])[0, -1].argmax() == steps[0, t]


def test_patch_rotary_late_dynamic_ntk_counts_tokens():
    """The length is that of the longest sequence or document, without padding."""
    model, tokens = llama(), sample(1, 30)
    patch_rotary(model, lambda length: sm.dynamic_ntk_rope(16, length, 10))
    alone = logits(model, "scale_invariant", tokens)
    for padding in ((7, 0), (0, 7)):
        padded = torch.nn.functional.pad(tokens, padding)
        got = logits(model, "scale_invariant", padded, attention_mask=(padded > 0).long())
        assert (got[:, padding[0] :][:, :30] - alone).abs().max() < 1e-9
    positions = torch.cat([torch.arange(20), torch.arange(10)])[None]
    got = logits(model, "scale_invariant", tokens, position_ids=positions, use_cache=False)
    longest = logits(model, "scale_invariant", tokens[:, :20])
    assert (got[:, :20] - longest).abs().max() < 1e-9


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("static", [False, True])
def test_patch_rotary_self_extend(static):
    model, tokens = llama(), sample(2, 24)
    before = logits(model, "scale_invariant", tokens)
    patch_rotary(model, sm.self_extend(sm.rope(16), 24, 4))  # all keys are near
    assert (logits(model, "scale_invariant", tokens) - before).abs().max() < 1e-4
    patch_rotary(model, sm.self_extend(sm.rope(16), 6, 4))
    full = logits(model, "scale_invariant", tokens)
    assert (full - before).abs().max() > 1e-2
    cache = transformers.DynamicCache(config=model.config)
    if static:
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    parts = tokens.split([10] + [1] * 9 + [5], 1)
    got = [logits(model, "scale_invariant", part, past_key_values=cache) for part in parts]
    assert (torch.cat(got, 1) - full).abs().max() < 1e-9
    # Padding in front changes nothing: groups are counted from the first real token.
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), tokens], 1)
    mask = (padded > 0).long()
    got = logits(model, "scale_invariant", padded, attention_mask=mask)[:, 3:]
    assert (got - full).abs().max() < 1e-9
    with pytest.raises(
        ValueError, match="must be one of register, which rotates keys, got 'sdpa'"
    ):
        logits(model, "sdpa", tokens)
    patch_rotary(model, sm.rope(16))
    assert (logits(model, "scale_invariant", tokens) - before).abs().max() < 1e-4
    assert logits(model, "sdpa", tokens).isfinite().all()


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_patch_rotary_with_start_tokens():
    model, tokens = llama(), sample(2, 24)
    before = logits(model, "scale_invariant", tokens)
    patch_rotary(model, sm.longrope(16, [3.0] * 8, 1.0, 64, start_tokens=24))
    assert (logits(model, "scale_invariant", tokens) - before).abs().max() < 1e-4
    patch_rotary(model, sm.longrope(16, [3.0] * 8, 1.0, 64, start_tokens=10))
    full = logits(model, "scale_invariant", tokens)
    assert (full - before)[:, :10].abs().max() < 1e-4
    patch_rotary(model, sm.longrope(16, [3.0] * 8, 1.0, 64))
    scaled = logits(model, "scale_invariant", tokens)
    patch_rotary(model, sm.longrope(16, [3.0] * 8, 1.0, 64, start_tokens=10))
    assert min((full - x)[:, 10:].abs().max() for x in (before, scaled)) > 1e-2
    cache = transformers.DynamicCache(config=model.config)
    parts = tokens.split([8] + [1] * 4 + [12], 1)
    got = [logits(model, "scale_invariant", part, past_key_values=cache) for part in parts]
    assert (torch.cat(got, 1) - full).abs().max() < 1e-9


def test_patch_rotary_names_what_is_wrong():
    with pytest.raises(TypeError, match="model must be a model of transformers, got str"):
        patch_rotary("llama", sm.rope(16))
    with pytest.raises(TypeError, match="rotary must be a Rotary, a TwoBranch or"):
        patch_rotary(llama(), 10000.0)
    with pytest.raises(ValueError, match="rotary must be for 16 channels, got 32"):
        patch_rotary(llama(), sm.rope(32))
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(ValueError, match="no rotary embedding with inv_freq: GPT2LMHeadModel"):
        patch_rotary(gpt2, sm.rope(8))


def test_two_branches_do_not_pass_over_the_backend():
    register("by_kernel", None, backend="flash")
    model = llama()
    patch_rotary(model, sm.self_extend(sm.rope(16), 6, 4))
    with pytest.raises(ValueError, match=r"must not contain 'flash'.*got 'by_flash'"):
        register("by_flash", None)
    with pytest.raises(ValueError, match='"flash" has no two-branch attention; use "auto"'):
        logits(model, "by_kernel", sample(1, 9))


def test_patched_models_are_freed():
    model = llama()
    patch_rotary(model, sm.self_extend(sm.rope(16), 6, 4))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_from_pretrained(tmp_path):
    model, tokens = llama(), sample(1, 9)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="scale_invariant"
    )
    with torch.no_grad():
        got = loaded(tokens).logits
    assert torch.equal(got, logits(model, "scale_invariant", tokens))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_decoding_in_a_static_cache_compiles_once():
    """As generate() does it on a GPU: the mask is made outside the compiled model."""
    model, tokens = llama().float(), sample(2, 14)
    expected = logits(model, "scale_invariant", tokens)
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    got = [logits(model, "scale_invariant", tokens[:, :7], past_key_values=cache)]
    register("flex", LAWS["scale_invariant"][0])
    model.set_attn_implementation("flex")
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    for t in range(7, 14):
        # The fourth argument was called past_key_values before transformers 5.24.
        mask = create_masks_for_generate(model.config, torch.empty(2, 1, 0), None, cache, None)
        at = torch.full((2, 1), t)
        out = compiled(tokens[:, [t]], attention_mask=mask, past_key_values=cache, position_ids=at)
        got.append(out.logits)
    assert (torch.cat(got, 1) - expected).abs().max() < 1e-4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
