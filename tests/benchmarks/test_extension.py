"""The benchmark of training-free extension, on a random Llama that reads bytes."""

import inspect
import json
import math
from importlib.metadata import version

import pytest
import torch
import torch.nn.functional as F

import score_mods as sm

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("matplotlib", reason="the plot extra is not installed")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors  # noqa: E402

from analysis.calibration import Calibration, _grouped, calibrate, extend  # noqa: E402
from analysis.huggingface import LayerQK  # noqa: E402
from benchmarks.extension import command, explain, scores  # noqa: E402
from benchmarks.extension.rows import Calibrations, Rows  # noqa: E402
from benchmarks.extension.settings import (  # noqa: E402
    ATTENTION,
    SCORES,
    Setting,
    Trained,
    parse,
)
from benchmarks.extension.texts import Text, read  # noqa: E402

L0 = 256  # tokens that the model counts as trained on
TRAINED = Trained(16, 10000.0, L0, 2)


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=L0,
        initializer_range=0.3,
        bos_token_id=256,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).eval()


def tokenizer(bos=False):
    """One token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({x: i for i, x in enumerate([*alphabet, "<s>"])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if bos:
        begun = {"single": "<s> $A", "special_tokens": [("<s>", len(alphabet))]}
        made.post_processor = processors.TemplateProcessing(**begun)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")


def ids(length, seed=1):
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model and two texts."""
    made = tmp_path_factory.mktemp("extension")
    llama().save_pretrained(made / "model")
    tokenizer().save_pretrained(made / "model")
    words = "".join(f"{n} is followed by {n + 1}. " for n in range(700))
    (made / "count.txt").write_text(words)
    (made / "squares.txt").write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(900)))
    return made


# Settings


@pytest.mark.parametrize(
    "written",
    [
        "rope",
        "recent",
        "ntk*1.5",
        "yarn:factor=4",
        "logn:rotary=ntk",
        "scale_invariant",
        "scale_invariant:rotary=self_extend*0.25,factor=8,tau=300,sigma=model,mu=off,part=bias",
        "scale_invariant:sigma=1,sinks=0",
    ],
)
def test_labels_are_read_back(written):
    (setting,) = parse(written)
    assert setting.label == written


def test_settings_are_composed():
    found = parse("rope,ntk*1 ,scale_invariant:tau=10/30,mu=off/on,rotary=rope logn_ntk,rope")
    assert [setting.label for setting in found] == [
        "rope",
        "ntk",
        "scale_invariant:rotary=rope,tau=10,mu=off",
        "scale_invariant:rotary=rope,tau=10",
        "scale_invariant:rotary=rope,tau=30,mu=off",
        "scale_invariant:rotary=rope,tau=30",
        "logn:rotary=ntk",
    ]


def test_the_defaults_are_those_of_extend():
    (setting,) = parse("scale_invariant")
    for name in ("tau", "sigma", "mu", "part", "sinks"):
        assert getattr(setting, name) == inspect.signature(extend).parameters[name].default
    i = torch.arange(4 * L0)
    here, there = setting.positions(4 * L0, TRAINED), _grouped(llama(), 4, None)
    assert here.window == there.window
    assert torch.equal(here.far_query(i) - here.far_key(i), there.far_query(i) - there.far_key(i))


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("", "expected some of recent, rope, ntk,.* got ''"),
        ("none", "expected some of .* got 'none'"),
        ("tau=3", "expected a name before 'tau=3'"),
        ("ntk:tau=3", "option 'tau' of ntk: expected rotary, factor"),
        ("recent:factor=2", "option 'factor' of recent: expected none"),
        ("scale_invariant:tau=3,tau=4", "option 'tau' of scale_invariant: twice"),
        ("scale_invariant:tau=-3", "tau of scale_invariant must be a number of tokens, got '-3'"),
        ("scale_invariant:tau=x", "tau of scale_invariant must be a number of tokens, got 'x'"),
        ("scale_invariant:mu=no", "mu of scale_invariant must be on or off, got 'no'"),
        ("scale_invariant:part=", "part of scale_invariant must be both, multiplier or bias"),
        ("scale_invariant:sinks=-1", "sinks of scale_invariant must be a whole number"),
        ("yarn:factor=0.5", "factor of yarn must be length or a number, got '0.5'"),
        ("rope*2", "it takes no number"),
        ("p_rope*2", r"p must be a number in \[0, 1\], got 2.0"),
        ("rerope*1.5", "the window must be within the trained length"),
        ("self_extend*1", "window must be below train_length 8192"),
    ],
)
def test_what_is_wrong_with_a_setting_is_named(written, message):
    with pytest.raises(ValueError, match=message):
        parse(written)


def test_positions():
    def frequencies(written, length):
        (setting,) = parse(written)
        return setting.positions(length, TRAINED).frequencies

    exponent = torch.arange(8, dtype=torch.float64) / 8
    for written, length, base in (
        ("rope", 1024, 1e4),
        ("ntk", 100, 1e4),  # nothing is stretched below the trained length
        ("ntk*2", 100, 1e4),
        ("ntk", 1024, 1e4 * 4 ** (16 / 14)),
        ("ntk*1.5", 1024, 1e4 * 6 ** (16 / 14)),
        ("ntk:factor=8", 100, 1e4 * 8 ** (16 / 14)),
        ("dynamic_ntk", 1024, 1e4 * (2 * 4 - 1) ** (16 / 14)),
        ("logn_ntk", 512, 1e4 * 2 ** (16 / 14)),
    ):
        assert torch.allclose(frequencies(written, length), base**-exponent), written
    assert torch.equal(frequencies("p_rope*0.25", 1024)[2:], torch.zeros(6).double())
    yarn = sm.yarn_rope(16, 8.0, L0)
    assert torch.equal(frequencies("yarn*2", 1024), yarn.frequencies)


@pytest.mark.parametrize("length", [L0, L0 + 1, 1000, 4096])
def test_self_extend_has_no_distance_beyond_the_trained_length(length):
    (setting,) = parse("self_extend")
    scheme = setting.positions(length, TRAINED)
    farthest = scheme.far_query(torch.tensor(length - 1)) - scheme.far_key(torch.tensor(0))
    assert L0 / 2 < farthest <= L0
    assert scheme.window == L0 / 8


def test_windows_and_first_keys_fill_the_trained_length():
    schemes = {
        written: parse(written)[0].positions(1024, TRAINED)
        for written in ("lm_infinite", "streaming_llm", "streaming_llm*0.5", "rerope*0.25")
    }
    kept = {written: (scheme.window, scheme.sinks) for written, scheme in schemes.items()}
    assert kept == {
        "lm_infinite": (L0, 10),
        "streaming_llm": (L0 - 4, 4),
        "streaming_llm*0.5": (L0 / 2 - 4, 4),
        "rerope*0.25": (L0 / 4, None),
    }


@pytest.mark.parametrize(
    ("name", "at_four_times", "below"),
    [
        ("logn", math.log(4 * L0) / math.log(L0), 1.0),
        ("ssmax", math.log(4 * L0) / math.log(L0), math.log(L0 / 4) / math.log(L0)),
        (
            "infoscale",
            math.sqrt((1 - (4 * L0) ** (-1 / 8)) / (1 - L0 ** (-1 / 8))),
            math.sqrt((1 - (L0 / 4) ** (-1 / 8)) / (1 - L0 ** (-1 / 8))),
        ),
    ],
)
def test_temperatures_are_one_at_the_trained_length(name, at_four_times, below):
    n = torch.tensor([L0 // 4, L0, 4 * L0])
    zero = torch.tensor(0)
    got = SCORES[name](TRAINED)(torch.ones(3, dtype=torch.float64), zero, zero, n - 1, zero)
    assert got.tolist() == pytest.approx([below, 1.0, at_four_times])


def test_alibi_has_the_models_heads_and_no_other_positions():
    (setting,) = parse("alibi")
    at = torch.tensor([0, 5])
    zero = torch.tensor(0)
    got = SCORES["alibi"](TRAINED)(torch.ones(2, dtype=torch.float64), zero, at * 0 + 1, at, zero)
    assert got.tolist() == pytest.approx([1.0, 1 - 5 * 2**-8])  # the second head of two
    assert not setting.positions(4 * L0, TRAINED).frequencies.any()


def rotated_scores(q, k, distance):
    """Scores of unrotated queries and keys as if `distance` `[T, T]` apart, from complex pairs."""
    z_q, z_k = (torch.complex(x[..., :8], x[..., 8:]) for x in (q, k))
    angles = distance[..., None] * 1e4 ** -(torch.arange(8, dtype=torch.float64) / 8)
    turn = torch.polar(torch.ones_like(angles), angles)
    return torch.einsum("bhic,bhjc,ijc->bhij", z_q, z_k.conj(), turn).real / 4


@torch.no_grad()
def test_scale_invariant_attention_under_two_rotations():
    """Against attention written out with the pairwise distances of ReRoPE."""
    model, tokens, window = llama().double(), ids(400)[None], L0 // 8
    texts = [ids(L0, seed)[None] for seed in (2, 3)]
    found = calibrate(model, texts, verdicts=False)
    (setting,) = parse("scale_invariant:rotary=rerope,tau=20,mu=off,sinks=2")
    setting.apply(model, 400, TRAINED, lambda rotary: found, impl="dense")
    got = model(tokens).logits

    t = torch.arange(400)[:, None] - torch.arange(400)
    growth = 2 * (t.abs().double() / 20 + 1).log()

    def attend(module, q, k, v, mask, **kwargs):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        score = rotated_scores(q, k, t.clamp(max=window).double())
        sigma = torch.tensor(found.sigma[module.layer_idx]).double()[:, None, None]
        changed = (1 + growth / sigma**2).sqrt() * score - growth
        changed[..., :2] = score[..., :2]
        weight = changed.masked_fill(t < 0, -torch.inf).softmax(-1)
        return (weight @ v).transpose(1, 2), None

    other = llama().double()
    other.model.rotary_emb.inv_freq = torch.zeros(8)
    transformers.AttentionInterface.register("two_rotations", attend)
    other.set_attn_implementation("two_rotations")
    assert (got - other(tokens).logits).abs().max() < 1e-5


@torch.no_grad()
def test_a_setting_leaves_nothing_to_the_next():
    model, tokens = llama(), ids(300)[None]
    texts = [ids(L0)[None]]
    before = model(tokens).logits
    assert model.config._attn_implementation != ATTENTION
    for written in ("self_extend", "yarn", "logn_ntk", "scale_invariant:tau=5", "lm_infinite*0.5"):
        (setting,) = parse(written)
        calibration = lambda rotary: calibrate(model, texts, verdicts=False)  # noqa: E731
        setting.apply(model, 300, TRAINED, calibration, impl="dense")
        assert (model(tokens).logits - before).abs().max() > 1e-3, written
        Setting().apply(model, 300, TRAINED, calibration, impl="dense")
        assert (model(tokens).logits - before).abs().max() < 1e-4, written


# Texts


def test_texts_are_cut_without_overlap(tmp_path):
    (tmp_path / "b.txt").write_text("klmnopqrst")
    (tmp_path / "a.txt").write_text("abcdefghij")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe")
    found = read(tokenizer(), f"letters={tmp_path}", 3, 5, rest=2)
    assert found.kind == "letters"
    assert ["".join(tokenizer().decode(row)) for row in found.starts] == [
        "abcde",
        "fghij",
        "klmno",
    ]
    assert tokenizer().decode(found.rest) == "pq"
    assert read(tokenizer(), str(tmp_path), 3, 5).digest == found.digest
    assert read(tokenizer(), str(tmp_path / "a.txt"), 1, 5).kind == "a"
    assert read(tokenizer(), str(tmp_path / "a.txt"), 2, 5).digest != found.digest
    with pytest.raises(ValueError, match="text letters: the text has 20 tokens, fewer"):
        read(tokenizer(), f"letters={tmp_path}", 3, 7)
    with pytest.raises(ValueError, match=r"text: expected a file, .* got 'poems'"):
        read(tokenizer(), "poems", 1, 5)


def test_each_start_begins_with_bos(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij")
    made = tokenizer(bos=True)
    found = read(made, str(tmp_path / "a.txt"), 2, 5, rest=1)
    assert found.starts[:, 0].tolist() == [made.bos_token_id] * 2
    assert [made.decode(row[1:]) for row in found.starts] == ["abcd", "efgh"]
    assert made.decode(found.rest) == "i"


def test_found_texts_are_what_they_say(tmp_path, monkeypatch):
    words = "as long as the copyright holder wishes it to be so "
    doc = tmp_path / "doc"
    doc.mkdir()
    (doc / "copyright").write_text(
        f"{words * 5}\n\nShort and sweet\n\n{'1234 ' * 60}\n\n{words * 6}"
    )
    (doc / "LICENSE.txt").write_text(f"{words.upper() * 5}\n\nElsewhere {words * 5}")
    (doc / "guide.md").write_text("# Guide\n\nHow to.\n\n    how, to\n\nThe end.")
    (doc / "image.py").write_text("pass")
    monkeypatch.setattr("benchmarks.extension.texts._ROOTS", (str(tmp_path),))
    made = tokenizer()
    whole = (f"{words.upper() * 5}\n\nElsewhere {words * 5}\n\n{words * 6}").replace(" \n", "\n")
    size = len(whole.rstrip())
    assert made.decode(read(made, "prose", 1, size).starts[0]) == whole.rstrip()
    expected = "# Guide\n\nHow to.\n\nThe end.\n\n"
    assert made.decode(read(made, "documentation", 1, len(expected)).starts[0]) == expected
    with pytest.raises(ValueError, match="text documentation: the text has"):
        read(made, "documentation", 1, len(expected) + 1)
    assert len(read(made, "code", 2, 500).starts) == 2


# Scores


@torch.no_grad()
def test_losses_are_the_models(monkeypatch):
    monkeypatch.setattr(scores, "_ROWS", 64)
    model, starts = llama(), torch.stack([ids(300), ids(300, 2)])
    text = Text("noise", starts, starts[0, :0], "")
    logits = model(starts).logits.double()
    expected = F.cross_entropy(logits[:, :-1].mT, starts[:, 1:], reduction="none")
    assert (scores.token_losses(model, starts[1]) - expected[1]).abs().max() < 1e-4
    found = scores.loss_scores(model, text, 300, 300, 50)
    assert found["loss"] == pytest.approx(expected.mean(1).tolist(), abs=1e-4)
    assert found["last"] == pytest.approx(expected[:, -50:].mean(1).tolist(), abs=1e-4)
    assert found["edges"] == [0, 64, 91, 128, 181, 256, 300]
    assert found["by_position"][0] == pytest.approx(expected[:, :63].mean().item(), abs=1e-4)
    assert found["by_position"][-1] == pytest.approx(expected[:, 255:].mean().item(), abs=1e-4)

    tail = scores.loss_scores(model, text, 300, 100, 50)
    logits = model(starts[:, 200:]).logits.double()
    expected = F.cross_entropy(logits[:, :-1].mT, starts[:, 201:], reduction="none")
    assert tail["loss"] == pytest.approx(expected.mean(1).tolist(), abs=1e-4)
    assert tail["by_position"][:4] == [None] * 4
    assert tail["by_position"][-1] == pytest.approx(expected[:, 55:].mean().item(), abs=1e-4)


def test_a_model_that_copies_finds_the_needles():
    """Its head looks the answer up in the text that its body was given."""

    class Copies(torch.nn.Module):
        device = torch.device("cpu")

        def base_model(self, input_ids, use_cache):
            following = F.pad(input_ids[:, 1:], (0, 1))
            hidden = F.one_hot(following, 256).float() * 9
            return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=hidden)

        def get_output_embeddings(self):
            return torch.nn.Identity() if self.right else lambda x: x.roll(1, -1)

    model, text = Copies(), Text("noise", ids(600)[None] % 128, ids(0), "")
    model.right = True
    encode = lambda text: list(text.encode())  # noqa: E731
    found = scores.needle_scores(model, encode, text, 600, 600, 3)
    assert found["needles"] == [True] * 3
    assert max(found["answer"]) < 0.1
    assert scores.needle_scores(model, encode, text, 600, 300, 3) == found
    model.right = False
    assert scores.needle_scores(model, encode, text, 600, 600, 2)["needles"] == [False] * 2


# Rows


def test_rows_are_found_by_their_settings(tmp_path):
    rows = Rows(tmp_path)
    settings = {"label": "ntk*2", "text": "code", "length": 300, "last": 5}
    assert rows.find(settings) is None
    saved = rows.save(settings, {"loss": [1.0]})
    assert rows.find(dict(reversed(settings.items()))) == saved
    assert saved == {"settings": settings, "loss": [1.0]}
    assert rows.find(settings | {"last": 6}) is None
    with pytest.raises(ValueError, match="JSON compliant"):
        rows.save(settings | {"last": 6}, {"loss": [math.nan]})
    assert rows.find(settings | {"last": 6}) is None
    (path,) = tmp_path.glob("*.json")
    path.write_text(path.read_text()[:20])
    with pytest.raises(ValueError, match=r"is no row: .*; remove it"):
        rows.find(settings)


def test_calibrations_are_measured_once_for_each_scheme(tmp_path, monkeypatch):
    model, measured = llama(), []

    def counted(*arguments, **options):
        measured.append(options)
        return calibrate(*arguments, **options)

    monkeypatch.setattr("benchmarks.extension.rows.calibrate", counted)
    found = Calibrations(model, [ids(L0)[None]], tmp_path, {"model": "llama"})
    first = found(sm.ntk_rope(16, 2.0))
    assert found(sm.ntk_rope(16, 2.0)) == first
    assert len(measured) == 1
    assert found(sm.ntk_rope(16, 4.0)) != first
    other = Calibrations(model, [ids(L0, 5)[None]], tmp_path, {"model": "other"})
    assert other(sm.ntk_rope(16, 2.0)) != first
    assert len(measured) == 3


# The command


MODS = "rope,recent,scale_invariant:tau=50,rerope"


def arguments(folder, out, *more):
    texts = [f"count={folder / 'count.txt'}", str(folder / "squares.txt")]
    given = {
        "--model": folder / "model",
        "--lengths": "300,600",
        "--span": 600,
        "--starts": 2,
        "--last": 100,
        "--needles": 2,
        "--mods": MODS,
        "--out": out,
    }
    options = [str(x) for pair in given.items() for x in pair]
    return [*options, "--text", *texts, "--device", "cpu", *more]


def test_a_run_goes_on_where_it_was_stopped(folder, tmp_path, monkeypatch, capsys):
    loss_scores, calls = command.loss_scores, []

    def stopped(*given):
        if len(calls) == 5:
            raise KeyboardInterrupt
        calls.append(given)
        return loss_scores(*given)

    monkeypatch.setattr(command, "loss_scores", stopped)
    with pytest.raises(KeyboardInterrupt):
        command.main(arguments(folder, tmp_path))
    before = {path: path.read_text() for path in (tmp_path / "rows").iterdir()}
    assert len(before) == 5
    monkeypatch.setattr(command, "loss_scores", loss_scores)
    command.main(arguments(folder, tmp_path))
    printed = capsys.readouterr().out
    rows = list((tmp_path / "rows").glob("*.json"))
    assert len(rows) == 4 * 2 * 2
    assert all(path.read_text() == text for path, text in before.items())

    monkeypatch.setattr(command, "loss_scores", None)
    command.main(arguments(folder, tmp_path))  # nothing is left to measure
    assert capsys.readouterr().out == printed
    assert (tmp_path / "table.md").read_text().startswith(printed.strip())
    for name in ("loss_by_position.png", "needles.png"):
        assert (tmp_path / name).stat().st_size > 1000

    found = {}
    for row in map(json.loads, (path.read_text() for path in rows)):
        settings = row["settings"]
        found[settings["label"], settings["text"], settings["length"]] = row
    rope, recent, rerope = (found[name, "count", 600] for name in ("rope", "recent", "rerope"))
    mean = lambda x: sum(x) / len(x)  # noqa: E731
    cell = f"{mean(rope['loss']):.3f} / {mean(rope['last']):.3f}"
    assert f"| `rope` | {mean(found['rope', 'count', 300]['loss']):.3f}" in printed
    assert cell in printed
    assert recent["by_position"][0] is None
    assert len({mean(row["last"]) for row in (rope, recent, rerope)}) == 3
    rise = mean(rerope["last"]) - mean(recent["last"])
    assert f"{rise:+.3f} ±" in printed
    assert rope["machine"]["torch"] == version("torch")
    assert len(rope["needles"]) == 2


@torch.no_grad()
def test_explained_shares_are_those_of_the_models_attention(folder, tmp_path, capsys):
    mods = ["--mods", "rope,scale_invariant:rotary=rope,tau=50", "--explain"]
    command.main(arguments(folder, tmp_path, *mods))
    assert capsys.readouterr().out.count("| `rope` |") == 2
    for name in ("mass.png", "slopes.png"):
        assert (tmp_path / name).stat().st_size > 1000

    (calibrated,) = (tmp_path / "calibrations").iterdir()
    found = Calibration.load(calibrated)
    tokens = read(tokenizer(), str(folder / "count.txt"), 1, 600).starts
    t = torch.arange(600)[:, None] - torch.arange(600)
    growth = 2 * (t.abs() / 50 + 1).log()
    at = torch.linspace(300, 599, 64).long().unique()
    ranges = [(0, 1), (1, 10), (10, 100), (100, L0), (L0, 600)]
    for label in ("rope", "scale_invariant"):
        expected = []

        def attend(module, q, k, v, mask, label=label, expected=expected, **kwargs):
            k, v = (x.repeat_interleave(2, 1) for x in (k, v))
            score = changed = q @ k.mT / 4
            if label != "rope":
                mu, sigma = (
                    torch.tensor(x[module.layer_idx])[:, None, None]
                    for x in (found.mu, found.sigma)
                )
                changed = (1 + growth / sigma**2).sqrt() * (score - mu) + mu - growth
                changed[..., 0] = score[..., 0]
            weight = changed.masked_fill(t < 0, -torch.inf).softmax(-1)
            later = (torch.arange(600) > 0) * weight[0]
            shares = [((low <= t) & (t < high)) * later for low, high in ranges]
            shares = [weight[0, :, at, 0], *(x[:, at].sum(-1) for x in shares)]
            expected.append(torch.stack(shares, -1).mean(1))
            return (weight @ v).transpose(1, 2), None

        transformers.AttentionInterface.register("shown", attend)
        model = llama()
        model.set_attn_implementation("shown")
        model(tokens)
        (path,) = (tmp_path / "explained").glob(f"{label}*-count-600*")
        row = json.loads(path.read_text())
        assert row["edges"] == [0, 1, 10, 100, L0, 600]
        got = torch.cat([torch.tensor(row["first"])[..., None], torch.tensor(row["share"])], -1)
        assert (got - torch.stack(expected)).abs().max() < 2e-5


def test_a_strong_first_key_is_no_part_of_the_farthest_decade():
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 64, 16), torch.randn(1, 1, 400, 16)
    q[..., 0] += 3
    k[:, :, 0, 0] += 9  # which every query likes
    at, kv_idx = torch.linspace(200, 399, 64).long(), torch.arange(400)
    mod = sm.exempt_keys(sm.scale_invariant(), 1)
    layer = LayerQK(0, q, k, 0.25, None, sm.causal)
    found = explain._of_layer(layer, mod, at, [0, 1, 10, 100, 400])
    score = mod(q @ k.mT / 4, 0, torch.arange(2)[:, None, None], at[:, None], kv_idx)
    weight = score.masked_fill(kv_idx > at[:, None], -torch.inf).softmax(-1)[0]
    assert found["first"] == pytest.approx(weight[..., 0].mean(-1).tolist(), abs=1e-5)
    assert min(found["first"]) > 0.3
    near = ((at[:, None] - kv_idx < 100) * weight).sum(-1).mean(-1)
    far = (1 - near).sub(weight[..., 0].mean(-1))
    assert [share[-1] for share in found["share"]] == pytest.approx(far.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--lengths", "300,x"], "lengths: expected numbers like 4096,8192, got '300,x'"),
        (["--lengths", "100"], "lengths: expected at least 256 tokens, got 100"),
        (["--lengths", "700"], "span must be at least 700, got 600"),
        (["--starts", "0"], "starts must be at least 1, got 0"),
        (["--mods", "sandwich"], "mods: expected some of"),
        (["--span", "60000"], "text count: the text has"),
        (["--model", "/nowhere"], "model: /nowhere is neither a folder nor a .gguf file"),
        (["--device", "tpu"], "device must be cpu or cuda, got tpu"),
        (["--explain"], "explain: recent does not read the whole context"),
        (["--explain", "--mods", "rerope"], "explain: rerope rotates near and far keys"),
    ],
)
def test_bad_input_ends_in_one_line(folder, tmp_path, capsys, more, message):
    with pytest.raises(SystemExit) as ended:
        command.main(arguments(folder, tmp_path, *more))
    assert ended.value.code == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
