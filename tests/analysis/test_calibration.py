"""What `calibrate` measures, and that `extend` puts it to use."""

import copy
import dataclasses
import json

import pytest
import torch

import score_mods as sm

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

from analysis import huggingface  # noqa: E402
from analysis.calibration import Calibration, calibrate, extend  # noqa: E402
from score_mods.huggingface import patch_rotary, register  # noqa: E402

T, ROWS = 300, 16


def llama(**changes):
    torch.manual_seed(0)
    config = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config | changes)).eval()


def texts(count):
    return [*torch.randint(0, 97, (count, 1, T), generator=torch.Generator().manual_seed(1))]


def test_moments_equal_those_of_the_logits():
    """Of two texts: rows' means and deviations, without distance 0 and key 0, in float64."""
    model, given = llama(), texts(2)
    found = calibrate(model, given, rows=ROWS)
    at = torch.linspace(T // 2, T - 1, ROWS).long()
    means, deviations, near = [], [], []
    for text in given:
        layers = []
        huggingface.capture(model, text, at, layers.append)
        for layer in layers:
            k = layer.k.double().repeat_interleave(2, 1)
            logits = (layer.q.double() @ k.mT * layer.scale)[0]
            rows = [logits[:, r, 1:position] for r, position in enumerate(at.tolist())]
            means.append(torch.stack([row.mean(-1) for row in rows]).mean(0))
            spread = torch.stack([row.var(-1, correction=0) for row in rows])
            deviations.append(spread.mean(0))
            near.append(torch.cat([row[:, -9:] for row in rows], 1))  # distances 1 to 9
    mu, sigma = torch.tensor(found.mu), torch.tensor(found.sigma)
    for i in range(2):
        assert (mu[i] - (means[i] + means[2 + i]) / 2).abs().max() < 1e-4
        variance = (deviations[i] + deviations[2 + i]) / 2
        assert (sigma[i].square() - variance).abs().max() < 1e-3 * variance.max()
        assert found.cells[:2] == [1, 10]
        assert found.cells[-1] <= T // 2 < 2 * found.cells[-1]
        mean, deviation = torch.tensor(found.mean)[i, :, 0], torch.tensor(found.deviation)[i, :, 0]
        assert (mean - (near[i].mean(-1) + near[2 + i].mean(-1)) / 2).abs().max() < 1e-4
        variance = (near[i].var(-1, correction=0) + near[2 + i].var(-1, correction=0)) / 2
        assert (deviation.square() - variance).abs().max() < 1e-3 * variance.max()
    known = {"holds", "rises", "falls", "cannot be told"}
    assert {v for rows in (*found.before, *found.after) for v in rows} <= known
    assert [len(rows) for rows in found.after] == [4, 4]


def test_saved_with_the_model(tmp_path):
    model = llama()
    found = calibrate(model, texts(1), tau=7.0, rows=ROWS)
    model.save_pretrained(tmp_path)
    found.save(tmp_path)
    assert Calibration.load(tmp_path) == found
    with pytest.raises(ValueError, match=r"folder must hold scale_invariance\.json"):
        Calibration.load(tmp_path / "elsewhere")
    flat = dataclasses.replace(found, mu=found.mu[0], sigma=found.sigma[0])
    words = dataclasses.replace(found, mu="0.1")
    for broken in ("{", "[]", '{"tau": 10.0}', *(json.dumps(vars(x)) for x in (flat, words))):
        (tmp_path / "scale_invariance.json").write_text(broken)
        with pytest.raises(ValueError, match=r"scale_invariance\.json must be as save wrote it"):
            Calibration.load(tmp_path)


@torch.no_grad()
def test_extend_does_all_three():
    model, tokens = llama(), texts(1)[0][:, :200]
    law = {"tau": 30.0, "sinks": 2, "train_length": 65}
    found = extend(model, 3.9, texts(1), **law, name="extended", impl="dense")
    got = model(tokens).logits
    # By hand: the measurement, grouped positions with a window of half the trained length, the
    # score_mod of each layer. 254 tokens: 222 of them share 33 distances, 7 each.
    other = llama()
    rope = sm.rope(16, other.config.rope_parameters["rope_theta"])
    patch_rotary(other, rope)
    measured = calibrate(other, texts(1), tau=30.0)
    assert measured == found
    patch_rotary(other, sm.self_extend(rope, 32, 7))

    def score_mod(layer):
        def mod(score, b, h, q_idx, kv_idx):
            mu = torch.tensor(measured.mu)[layer][h]
            sigma = torch.tensor(measured.sigma)[layer][h]
            growth = 2 * torch.log((q_idx - kv_idx).abs() / 30.0 + 1)
            a_t = (1 + growth / sigma**2).sqrt()
            return torch.where(kv_idx < 2, score, a_t * (score - mu) + mu - growth)

        return mod

    register("by_hand", score_mod, impl="dense")
    other.set_attn_implementation("by_hand")
    assert (got - other(tokens).logits).abs().max() < 1e-4
    plain = llama()(tokens).logits
    assert (got - plain).abs().max() > 1e-2

    again = llama()
    extend(again, 3.9, **law, calibration=found, name="extended_again", impl="dense")
    assert torch.equal(again(tokens).logits, got)
    steps = model.generate(tokens[:, :100], max_new_tokens=5, do_sample=False, pad_token_id=0)
    full = model(steps, use_cache=False).logits[0, 99:-1].argmax(-1)
    assert torch.equal(steps[0, 100:], full)


LAWS = {
    "head": {},
    "model": {"sigma": "model"},
    "number": {"sigma": 1.5, "mu": False},
    "no mean": {"mu": False, "sinks": 0},
    "multiplier": {"part": "multiplier"},
    "bias": {"part": "bias", "sinks": 2},
}


@pytest.mark.parametrize("name", LAWS)
def test_score_mods_follow_their_law(name):
    law, tau = LAWS[name], 20.0
    mu, sigma = torch.tensor([[0.3, -0.2], [0.1, 0.4]]), torch.tensor([[0.5, 1.5], [2.0, 1.0]])
    found = Calibration(tau, mu.tolist(), sigma.tolist(), [], [], [], [], [])
    h, q_idx, kv_idx = torch.arange(2)[:, None, None], torch.arange(90)[:, None], torch.arange(90)
    score = torch.randn(2, 90, 90, dtype=torch.float64)
    got = found.score_mod(1, **law)(score, torch.tensor(0), h, q_idx, kv_idx)

    m = mu[1].double()[:, None, None] if law.get("mu", True) else 0.0
    s = sigma[1].double()[:, None, None]
    if law.get("sigma") == "model":
        s = ((0.25 + 2.25 + 4 + 1) / 4) ** 0.5
    elif "sigma" in law:
        s = law["sigma"]
    growth = 2 * ((q_idx - kv_idx).abs().double() / tau + 1).log()
    a_t = (1 + growth / s**2) ** 0.5 if law.get("part") != "bias" else 1.0
    expected = a_t * (score - m) + m - (0 if law.get("part") == "multiplier" else growth)
    expected = torch.where(kv_idx < law.get("sinks", 1), score, expected)
    assert (got - expected).abs().max() < 1e-6


@torch.no_grad()
@pytest.mark.parametrize(
    ("given", "rotary"),
    [
        ({"rotary": sm.ntk_rope(16, 6.0)}, sm.ntk_rope(16, 6.0)),
        ({}, sm.self_extend(sm.rope(16), 256, 7)),
        ({"rotary": sm.yarn_rope(16, 4.0, 512)}, sm.yarn_rope(16, 4.0, 512)),
        ({"rotary": sm.self_extend(sm.rope(16), 40, 4)}, sm.self_extend(sm.rope(16), 40, 4)),
    ],
    ids=["ntk", "default", "yarn", "self_extend"],
)
def test_extend_takes_other_positions(given, rotary):
    model, tokens = llama(), texts(1)[0]
    extend(model, 4, texts(1), tau=30.0, name="elsewhere", impl="dense", **given)
    other = llama()
    patch_rotary(other, getattr(rotary, "rotary", rotary))
    measured = calibrate(other, texts(1), tau=30.0, verdicts=False)
    patch_rotary(other, rotary)
    register("elsewhere_by_hand", lambda i: measured.score_mod(i), impl="dense")
    other.set_attn_implementation("elsewhere_by_hand")
    assert torch.equal(model(tokens).logits, other(tokens).logits)


@torch.no_grad()
def test_extend_takes_rotation_of_some_channels():
    config = transformers.StableLmConfig(**llama().config.to_diff_dict() | {"eos_token_id": 2})
    config.rope_parameters["partial_rotary_factor"] = 0.5
    torch.manual_seed(0)
    models = [transformers.StableLmForCausalLM(config).eval()]
    models.append(copy.deepcopy(models[0]))
    tokens = texts(1)[0]
    extend(models[0], 4, [tokens], tau=30.0, name="some", impl="dense")
    given = {"tau": 30.0, "rotary": sm.self_extend(sm.rope(8), 256, 7)}
    extend(models[1], 4, [tokens], name="some_by_hand", impl="dense", **given)
    assert torch.equal(*(model(tokens).logits for model in models))


def test_verdicts_may_be_left_out():
    model = llama()
    whole, short = (calibrate(model, texts(1), rows=ROWS, verdicts=v) for v in (True, False))
    assert short == dataclasses.replace(whole, before=[], after=[])


def test_what_is_wrong_is_named():
    model = llama()
    for wrong, message in (
        ({"sigma": "heads"}, 'sigma must be "head", "model" or a number, got \'heads\''),
        ({"part": "all"}, 'part must be "both", "multiplier" or "bias", got \'all\''),
        ({"tau": 0.0}, "tau must be a positive number"),
        ({"train_length": 64, "rotary": sm.rope(16)}, "one of rotary and train_length"),
        ({"train_length": 1}, "train_length must be at least 2"),
    ):
        with pytest.raises(ValueError, match=message):
            extend(model, 2, texts(1), **wrong)
    start = sm.longrope(16, [3.0] * 8, 1.0, 64, start_tokens=10)
    for wrong, error, message in (
        ({"factor": "4"}, TypeError, "factor must be a positive number, got str"),
        ({"factor": True}, TypeError, "factor must be a positive number, got bool"),
        ({"factor": 0.5, "rotary": sm.rope(16)}, ValueError, "factor must be at least 1"),
        ({"texts": ["a text"]}, TypeError, "texts must be int64 or int32 tensors, got str"),
        ({"texts": texts(1)[0]}, TypeError, "texts must be a list of token ids"),
        ({"texts": [texts(1)[0].float()]}, TypeError, "tensors, got torch.float32"),
        ({"texts": [texts(1)[0][:, :99]]}, ValueError, "texts must have one shape"),
        ({"name": "sdpa"}, ValueError, "one of transformers' own"),
        ({"impl": "fast"}, ValueError, "impl must be"),
        ({"mu": "no"}, TypeError, "mu must be a bool, got str"),
        ({"model": "llama"}, TypeError, "model must be a model of transformers, got str"),
        ({"texts": None, "calibration": {}}, TypeError, "must be a Calibration, got dict"),
        ({"rotary": start}, ValueError, "a Rotary of one set of frequencies to be measured"),
        ({"rotary": lambda n: sm.rope(16)}, ValueError, "of one set of frequencies"),
    ):
        with pytest.raises(error, match=message):
            extend(**{"model": model, "factor": 2, "texts": texts(1)} | wrong)
    for before, after in zip(llama().buffers(), model.buffers(), strict=True):
        assert torch.equal(before, after)
    small = Calibration(10.0, [[0.0] * 4], [[1.0] * 4], [], [], [], [], [])
    with pytest.raises(ValueError, match=r"\(layers, heads\) \(2, 4\), got \(1, 4\)"):
        extend(model, 2, calibration=small)
    for layer, error in ((-1, ValueError), (1, ValueError), ("0", TypeError)):
        with pytest.raises(error, match="layer must be"):
            small.score_mod(layer)
    with pytest.raises(TypeError, match="model must be a model of transformers, got Linear"):
        calibrate(torch.nn.Linear(2, 2), texts(1))
    with pytest.raises(ValueError, match=r"tokens must be in \[0, 97\), got 97 to 193"):
        calibrate(model, [texts(1)[0] + 97], verdicts=False)
    with pytest.raises(TypeError, match="rows must be an int, got float"):
        calibrate(model, texts(1), rows=16.5)
    with pytest.raises(ValueError, match="tau must be a positive number"):
        calibrate(model, texts(1), tau=-1.0, verdicts=False)
    with pytest.raises(ValueError, match="texts must have one shape"):
        calibrate(model, [torch.zeros(1, 100, dtype=torch.long)])
    with pytest.raises(TypeError, match="verdicts must be a bool, got str"):
        calibrate(model, texts(1), verdicts="no")
    with pytest.raises(ValueError, match="rows must be at least 16"):
        calibrate(model, texts(1), rows=3)
    with pytest.raises(ValueError, match="one of texts and calibration"):
        extend(model, 2)
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    yarn["original_max_position_embeddings"] = 256
    with pytest.raises(ValueError, match="model must have plain RoPE"):
        extend(llama(rope_parameters=yarn), 2, texts(1))
    config = transformers.Gemma2Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    with pytest.raises(ValueError, match="model caps the logits of layer 0"):
        calibrate(transformers.Gemma2ForCausalLM(config).eval(), texts(1))


def test_a_calibration_holds_plain_data():
    found = calibrate(llama(), texts(1), rows=ROWS)
    assert all(isinstance(x, (float, list)) for x in dataclasses.asdict(found).values())
    assert found.score_mod(0).num_heads == 4
