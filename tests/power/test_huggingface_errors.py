"""What power attention cannot do in a model of transformers is said, and changes nothing."""

import pytest
import torch

from power.huggingface import replace_attention

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
TOKENS = torch.arange(5)[None]


def made(config):
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def llama(**changes):
    return made(transformers.LlamaConfig(**SIZES | changes))


def powered(model, **options):
    replace_attention(model, **options)
    return model


@torch.no_grad()
def logits(model, tokens, **options):
    return model(tokens, **options).logits


def mistral():
    return made(transformers.MistralConfig(**SIZES, sliding_window=6))


def gemma2():
    return made(transformers.Gemma2Config(**SIZES, layer_types=["full_attention"] * 2))


def smollm3():
    return made(transformers.SmolLM3Config(**SIZES, no_rope_layer_interval=2))


def stablelm():
    return made(transformers.StableLmConfig(**SIZES, partial_rotary_factor=0.5))


def olmo():
    return made(transformers.OlmoConfig(**SIZES, clip_qkv=0.1))


def doge():
    return made(transformers.DogeConfig(**SIZES))


def gpt2():
    return made(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=50))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (mistral, r"layer 0 \(MistralAttention\) has sliding_window, which power attention"),
        (gemma2, r"layer 0 \(Gemma2Attention\) has softcap"),
        (smollm3, r"layer 1 \(SmolLM3Attention\) does more than project"),
        (stablelm, r"layer 0 \(StableLmAttention\) does more than project"),
        (olmo, r"layer 0 \(OlmoAttention\) does more than project"),
        (doge, r"layer 0 \(DogeAttention\) has attention_mask, which power attention"),
        (gpt2, "model must have attention layers with q_proj, .* got GPT2LMHeadModel"),
        (lambda: llama(attention_dropout=0.1), "has attention_dropout"),
        (lambda: powered(llama()), "which has none to replace"),
    ],
)
def test_models_that_cannot_be_taken(model, message):
    model = model()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=message):
        replace_attention(model)
    assert before == {name: type(module) for name, module in model.named_modules()}
    assert logits(model, TOKENS).isfinite().all()


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_what_is_not_supported_says_so():
    with pytest.raises(ValueError, match=r"layers must be among \[0, 1\], got \[2\]"):
        replace_attention(llama(), layers=[2])
    with pytest.raises(ValueError, match=r"layers must be among \[0, 1\], got \[\]"):
        replace_attention(llama(), layers=[])
    with pytest.raises(TypeError, match="layers must be a list of ints or None, got 1"):
        replace_attention(llama(), layers=1)
    with pytest.raises(TypeError, match=r"layers must be a list of ints or None, got \[True\]"):
        replace_attention(llama(), layers=[True])
    with pytest.raises(ValueError, match="impl must be 'auto'"):
        replace_attention(llama(), impl="flex")
    with pytest.raises(TypeError, match="model must be a model of transformers, got Linear"):
        replace_attention(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="model must hold its weights"):
        replace_attention(llama().to("meta"))
    with pytest.raises(ValueError, match="deg must be positive and even"):
        replace_attention(llama(), deg=3)
    model, tokens = powered(llama()), TOKENS
    window = (torch.ones(5, 5).tril() - torch.ones(5, 5).tril(-2)).bool()
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(B, T\), or be causal"):
        logits(model, tokens, attention_mask=window[None, None])
    with pytest.raises(ValueError, match=r"attention_mask must have shape \(B, 5\), for all"):
        logits(model, tokens, attention_mask=torch.ones(1, 4))
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="tokens cannot be taken back out of the state"):
        cache.crop(1)
    with pytest.raises(ValueError, match=r"call it under torch.no_grad\(\)"):
        model(tokens, past_key_values=cache)
    filled = transformers.DynamicCache()
    logits(llama(), tokens, past_key_values=filled)
    with pytest.raises(ValueError, match="cache must be new, got one with keys and values"):
        logits(model, tokens, past_key_values=filled)
    some = powered(llama(), layers=[0])
    some.set_attn_implementation("power_attention")
    with pytest.raises(ValueError, match="for layers without power attention"):
        logits(some, tokens)
    some.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match='must be "sdpa" or "eager" beside power attention'):
        logits(some, tokens)
