"""Rows of a random Llama that reads bytes, what they hold, and the table made of them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("matplotlib", reason="the plot extra is not installed")

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from benchmarks import continued_pretraining as benchmark  # noqa: E402
from benchmarks.continued_pretraining import command as commands  # noqa: E402
from benchmarks.continued_pretraining import row as rows  # noqa: E402
from benchmarks.continued_pretraining import tables  # noqa: E402
from benchmarks.extension.settings import SCORES, Trained, parse  # noqa: E402

ROOT = Path(__file__).parents[2]
TRAINED = 256


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=TRAINED,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model with its tokenizer, and documents."""
    made = tmp_path_factory.mktemp("continued")
    llama().save_pretrained(made / "model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoder = Tokenizer(models.BPE({x: i for i, x in enumerate(alphabet)}, []))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=encoder)
    fast.save_pretrained(made / "model")
    (made / "data").mkdir()
    for i in range(60):
        text = "".join(f"line {j} of {i}: {'abcdefg'[j % 7] * (i % 5 + 1)}\n" for j in range(50))
        (made / "data" / f"document{i}.txt").write_text(text)
    return made


@pytest.fixture
def command(folder, tmp_path):
    """Run the benchmark at toy size; returns the rows by label."""

    def run(mods, **changed):
        options = {
            "model": folder / "model",
            "data": folder / "data",
            "cache": tmp_path / "tokens",
            "out": tmp_path / "out",
            "steps": 4,
            "rate": 1e-2,
            "sequences": 2,
            "micro": 1,
            "length": 64,
            "lengths": "64,256,512",
            "held-out": 2,
            "device": "cpu",
            **changed,
        }
        arguments = [x for name, value in options.items() for x in (f"--{name}", str(value))]
        benchmark.main(["--mods", mods, *arguments])
        made = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")]
        return {row["settings"]["label"]: row for row in made}

    return run


def test_the_settings_are_table_4s_and_the_measured_law():
    """Table 4 of arXiv 2505.17083 has ten; RoPE beside p-RoPE and a measured law are new."""
    found = parse(commands.MODS)
    assert len(found) == 14
    assert [x.label for x in found[:3]] == ["rope", "p_rope", "p_rope*0"]
    logn = [x.rotary for x in found if x.score == "ssmax"]
    assert logn == ["rope", "p_rope", "ntk"]
    law = [x for x in found if x.score == "scale_invariant"]
    assert [(x.rotary, x.tau, x.sigma, x.mu, x.sinks) for x in law] == [
        ("p_rope", 10.0, 1.0, False, 0),
        ("rope", 10.0, 1.0, False, 0),
        ("p_rope", 10.0, "head", True, 1),
        ("rope", 10.0, "head", True, 1),
        ("p_rope", 3000.0, "head", True, 1),
    ]


def test_rows_hold_what_they_say_and_make_a_table(command, tmp_path, capsys):
    made = command("rope,alibi,scale_invariant:rotary=p_rope,tau=10")
    assert len(made) == 3
    trained = made["rope"]
    for row in made.values():
        assert row["tokens"] == 4 * 2 * 64
        assert list(row["before"]) == list(row["after"]) == ["64", "256", "512"]
        assert row["after"]["64"]["loss"] < row["before"]["64"]["loss"]
    made = command("rope", steps=0)
    capsys.readouterr()
    benchmark.main(["table", str(tmp_path / "out")])
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("| `")]
    assert len(lines) == 4
    zero = next(line for line in lines if line.startswith("| `rope` | 0 |"))
    assert [x.strip() for x in zero.split("|")[6:-1]] == ["", "", "", "+0.000"]
    for row in list(made.values()):
        if row["settings"]["steps"]:
            cost = row["after"]["64"]["loss"] - trained["after"]["64"]["loss"]
            start = f"| `{row['settings']['label']}` | 4 |"
            line = next(line for line in lines if line.startswith(start))
            assert line.endswith(f" {cost:+.3f} |")
    for name in ("table.md", "loss_by_length.png"):
        assert (tmp_path / "out" / name).stat().st_size > 200


def test_settings_that_attend_alike_in_training_are_trained_once(command, monkeypatch, tmp_path):
    trained = []
    real = rows.train

    def counted(*args, **kwargs):
        trained.append(kwargs["label"])
        return real(*args, **kwargs)

    monkeypatch.setattr(rows, "train", counted)
    together = command("rope,alibi,ntk,ssmax,yarn,ssmax:rotary=ntk")
    assert trained == ["rope", "alibi", "ssmax"]
    assert together["yarn"]["alike"] == ["rope", "ntk", "yarn"]
    assert together["yarn"]["training"] == together["rope"]["training"]
    command("ntk", out=tmp_path / "apart")
    assert trained[3:] == ["ntk"]
    apart = json.loads(next((tmp_path / "apart").glob("*.json")).read_text())
    for when in ("before", "after"):
        assert together["ntk"][when] == apart[when]
        assert together["ntk"][when]["64"] == together["rope"][when]["64"]
        assert together["ntk"][when]["512"] != together["rope"][when]["512"]
    command("yarn,ntk,rope")
    assert len(trained) == 4


def test_the_source_can_be_read_in_part(command):
    row = command("rope", steps=0, most=45_000, lengths="64,256")["rope"]
    data = row["settings"]["data"]
    assert data["most"] == 45_000
    assert data["documents"] < 60


def test_rows_have_names_that_every_file_system_takes(command, tmp_path):
    command("p_rope*0,ssmax:rotary=ntk*2", steps=0, lengths="64")
    names = [path.name for path in (tmp_path / "out").glob("*.json")]
    assert len(names) == 2
    assert not any(set(name) & set('\\/:*?"<>|') for name in names)


def test_temperatures_of_the_defaults_act_at_the_trained_length():
    """What acts beyond the model's own length alone would be trained as plain attention."""
    trained = Trained(64, 10_000.0, 8192, 9)
    zero, last = torch.tensor(0), torch.tensor(4095)
    for setting in parse(commands.MODS):
        mod = SCORES[setting.score](trained)
        if mod is not None:
            assert mod(torch.tensor(1.0), zero, zero, last, zero) != 1, setting.label


def test_costs_are_over_plain_rows_of_as_many_steps():
    def row(steps, loss):
        made = {"settings": {"steps": steps}, "before": {"64": {"loss": loss}}}
        return made | ({"after": {"64": {"loss": loss - 1}}} if steps else {})

    plain = [row(4, 5.0), row(8, 4.5)]
    assert tables._cost(row(8, 4.75), plain, "64") == "+0.250"
    assert tables._cost(row(0, 4.75), plain[:1], "64") == "-0.250"
    assert tables._cost(row(8, 4.75), plain[:1], "64") == ""


def test_the_figure_has_the_trained_row_of_each_setting(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(tables, "by_length", lambda ax, n, values, label: drawn.append(values))
    loss = {"64": {"loss": 2.0}}
    for steps in (0, 4, 8):
        row = {"settings": {"label": "rope", "steps": steps, "lengths": [64]}, "before": loss}
        row |= {"after": {"64": {"loss": 1 / steps}}} if steps else {}
        (tmp_path / f"{steps}.json").write_text(json.dumps(row))
    tables.report(tmp_path)
    assert drawn[1] == {"rope, 8 steps": [1 / 8], "rope, 4 steps": [1 / 4]}
    (tmp_path / "8.json").unlink()
    tables.report(tmp_path)
    assert drawn[3] == {"rope": [1 / 4]}


def test_rows_come_the_best_first_and_the_figure_keeps_rope(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(tables, "by_length", lambda ax, n, values, label: drawn.append(values))
    for i, label in enumerate(["rope", *(f"mod{i}" for i in range(1, 12))]):
        row = {"settings": {"label": label, "steps": 1, "lengths": [64, 128]}}
        for when in ("before", "after"):
            row[when] = {"64": {"loss": i}, "128": {"loss": 20.0 - i}}
        (tmp_path / f"{label}.json").write_text(json.dumps(row))
    lines = [line for line in tables.report(tmp_path).splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in lines] == [
        *(f"mod{i}" for i in range(11, 0, -1)),
        "rope",
    ]
    assert list(drawn[1]) == [*(f"mod{i}" for i in range(11, 4, -1)), "rope"]


def test_before_is_the_models_own_loss(command, folder, tmp_path):
    """Of the untouched model, by its own forward pass over the held-out contexts."""
    row = command("rope", steps=0, micro=8)["rope"]  # two contexts of 256 in one pass
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "model").eval()
    data = commands.token_file(
        str(folder / "data"),
        commands.Tokenizer(str(folder / "model")),
        tmp_path / "tokens",
        span=512,
        held_out=2,
    )
    ids = data.validation(256, 512)
    with torch.no_grad():
        losses = F.cross_entropy(
            model(ids[:, :-1]).logits.transpose(1, 2), ids[:, 1:], reduction="none"
        )
    assert row["before"]["256"]["loss"] == pytest.approx(losses.mean().item(), rel=1e-5)


def test_the_loss_of_a_batch_is_the_models_and_so_are_its_gradients():
    model, ids = llama(), torch.randint(256, (3, 40))
    want = model(ids[:, :-1], labels=None).logits
    want = F.cross_entropy(want.flatten(0, 1), ids[:, 1:].flatten())
    expected = torch.autograd.grad(want, list(model.parameters()))
    for micro in (1, 2, 3):
        model.zero_grad()
        loss = rows.loss_of_batch(model, ids, micro)
        loss.backward()
        torch.testing.assert_close(loss, want)
        for parameter, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, grad, atol=1e-6, rtol=1e-4)


def test_the_results_are_those_of_the_rows_that_are_kept(tmp_path):
    kept = ROOT / "benchmarks" / "results" / "continued_pretraining"
    for path in kept.glob("*.json"):
        shutil.copy(path, tmp_path)
    lines = [x for x in tables.report(tmp_path).splitlines() if x.startswith("|")]
    assert len(lines) == 2 + 10
    assert set(lines) <= set((ROOT / "benchmarks" / "RESULTS.md").read_text().splitlines())


def kill_after(validations, monkeypatch, run):
    real, calls = rows.validate, []

    def killed(*args):
        calls.append(args)
        return real(*args) if len(calls) <= validations else 1 / 0

    with monkeypatch.context() as patch:
        patch.setattr(rows, "validate", killed)
        with pytest.raises(ZeroDivisionError):
            run()


def test_a_killed_row_goes_on(command, monkeypatch, tmp_path):
    mods = "scale_invariant:rotary=ntk,tau=30"
    (whole,) = command(mods, steps=6).values()
    (tmp_path / "out").rename(tmp_path / "whole")
    kill_after(3, monkeypatch, lambda: command(mods, steps=6))
    monkeypatch.setattr(rows.time, "perf_counter", lambda: 0.0)
    (again,) = command(mods, steps=6).values()
    assert again["seconds"] == again["training"]["earlier_seconds"] > 0
    assert again["after"] == whole["after"]
    assert again["before"] == whole["before"]


def test_a_group_goes_on_in_any_order_and_wherever_it_was_killed(command, monkeypatch, tmp_path):
    whole = command("rope,ntk,yarn")
    (tmp_path / "out").rename(tmp_path / "whole")
    kill_after(9, monkeypatch, lambda: command("rope,ntk,yarn"))
    monkeypatch.setattr(rows, "loss_of_batch", lambda *args: 1 / 0)  # all steps are done

    def finish_one(*args):
        monkeypatch.setattr(rows, "finish", lambda *args: 1 / 0)
        return finish(*args)

    finish = rows.finish
    monkeypatch.setattr(rows, "finish", finish_one)
    with pytest.raises(ZeroDivisionError):
        command("yarn,ntk,rope")
    monkeypatch.setattr(rows, "finish", finish)
    again = command("ntk,yarn,rope")
    assert {name: row["after"] for name, row in again.items()} == {
        name: row["after"] for name, row in whole.items()
    }


def test_refuses_a_model_that_caps_its_logits(command, folder, monkeypatch, capsys):
    capped = llama()
    capped.config.final_logit_softcapping = 30.0
    monkeypatch.setattr(rows, "load", lambda *args: (capped, None))
    with pytest.raises(SystemExit):
        command("rope")
    assert "model caps its logits (final_logit_softcapping)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mods", "changed", "words"),
    [
        ("recent", {}, "mods: recent is no way to attend"),
        ("nothing", {}, "mods: expected some of"),
        ("rope,self_extend*0.001", {}, "mods: self_extend*0.001: "),
        ("rope", {"lengths": "64,100"}, "lengths must be positive divisors"),
        ("rope", {"rate": -1}, "rate must be positive"),
        ("rope", {"steps": -1}, "steps"),
        ("rope", {"trained": 0}, "trained must be at least 256"),
        ("rope", {"most": 0}, "most must be at least 1, got 0"),
        ("rope", {"model": "/nowhere"}, "tokenizer must be"),
        ("rope", {"seconds": 0}, "run again to go on"),
    ],
)
def test_refuses_in_one_line(command, capsys, mods, changed, words):
    with pytest.raises(SystemExit) as stopped:
        command(mods, **changed)
    assert stopped.value.code == 1
    assert words in capsys.readouterr().err.splitlines()[-1]
