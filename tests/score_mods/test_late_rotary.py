"""Schemes for unrotated keys in models that pair channels otherwise, or rotate in some layers."""

import sys

import pytest
import torch

import score_mods as sm

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from score_mods.huggingface import patch_rotary, register  # noqa: E402

LAYERS = 4
SIZES = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EVERY, BUT_THE_LAST = [True] * LAYERS, [True] * (LAYERS - 1) + [False]


def made(kind, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    return transformers.AutoModelForCausalLM.from_config(config).double().eval()


def deepseek():
    return made(
        "DeepseekV3",
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        num_key_value_heads=4,
        first_k_dense_replace=LAYERS,
    )


def rotary_of(model):
    embedding = next(m for m in model.modules() if hasattr(m, "inv_freq"))
    return embedding, sm.Rotary(embedding.inv_freq.double().clone(), embedding.attention_scaling)


def logits(model, name, tokens):
    model.set_attn_implementation(name)
    with torch.no_grad():
        return model(tokens).logits


@pytest.fixture(autouse=True)
def _registered():
    register("plain", None, impl="dense")


@pytest.mark.parametrize(
    ("kind", "changes", "rotates"),
    [
        ("Llama", {}, EVERY),
        ("Phi", {"partial_rotary_factor": 0.5}, EVERY),
        ("Cohere", {}, EVERY),  # pairs (2i, 2i + 1)
        ("Glm", {"head_dim": 16}, EVERY),  # likewise, of half the channels
        ("SmolLM3", {}, BUT_THE_LAST),
        ("Cohere2", {"sliding_window": 64}, BUT_THE_LAST),
    ],
)
def test_the_model_pairs_and_skips_as_before(kind, changes, rotates):
    model, tokens = made(kind, **changes), torch.randint(3, 50, (2, 24))
    before = logits(model, "eager", tokens)
    _, own = rotary_of(model)
    for scheme in (lambda length: own, sm.rerope(own, 24)):
        patch_rotary(model, scheme)
        assert [x.self_attn.late_rotary is not None for x in model.model.layers] == rotates
        got = logits(model, "plain", tokens)
        assert (got - before).abs().max() < 1e-4 * before.abs().max()
    patch_rotary(model, sm.rerope(own, 4))
    assert (logits(model, "plain", tokens) - before).abs().max() > 1e-2 * before.abs().max()


def test_the_layers_of_a_model_share_two_masks_whose_blocks_are_kept(monkeypatch):
    model, tokens = made("Llama"), torch.randint(3, 50, (1, 24))
    _, own = rotary_of(model)
    patch_rotary(model, sm.rerope(own, 4))
    module, seen = sys.modules["score_mods.two_branch"], []

    def attention(*args, **options):
        seen.append(args[4])
        return sm.attention(*args, **options)

    monkeypatch.setattr(module, "attention", attention)
    logits(model, "plain", tokens)
    assert len(seen) == 2 * len(model.model.layers) > 2
    assert len(set(seen)) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (deepseek, "leading channels of each head and no others, and DeepseekV3Attention does"),
        (lambda: made("Falcon"), "layers that call an attention function .* FalconForCausalLM"),
    ],
)
def test_models_that_cannot_be_taken_stay_as_they_were(make, message):
    model, tokens = make(), torch.randint(3, 50, (2, 24))
    before = logits(model, "eager", tokens)
    embedding, own = rotary_of(model)
    name = model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        patch_rotary(model, sm.rerope(own, 4))
    assert model.config._attn_implementation == name
    assert torch.equal(embedding.inv_freq.double(), own.frequencies)
    assert torch.equal(logits(model, "eager", tokens), before)


def test_dropout_is_left_out_of_the_run_and_stays():
    model = made("Phi", embd_pdrop=0.5, resid_pdrop=0.5).train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    patch_rotary(model, sm.rerope(rotary_of(model)[1], 4))
    assert [module.training for module in model.modules()] == modes
