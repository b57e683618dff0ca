"""Whole rows at toy size, what they hold, and the table made of them."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks import length_generalisation as benchmark
from benchmarks import needle, training
from benchmarks.decoder import Decoder, Size
from benchmarks.length_generalisation import row as rows
from benchmarks.length_generalisation import tables
from benchmarks.length_generalisation.methods import METHODS, build
from benchmarks.mixers import Positions, SoftmaxAttention

ROOT = Path(__file__).parents[2]
LENGTHS = (256, 512, 1024)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for i in range(60):
        text = "".join(f"line {j} of {i}: {'abcdefg'[j % 7] * (i % 5 + 1)}\n" for j in range(120))
        (folder / f"document{i}.txt").write_text(text)
    return folder


@pytest.fixture
def command(data, tmp_path):
    """Run the benchmark at toy size; returns the rows by method."""

    def run(*methods, **changed):
        options = {
            "data": data,
            "tokenizer": "bytes",
            "cache": tmp_path / "tokens",
            "out": tmp_path / "out",
            "steps": 10,
            "sequences": 4,
            "micro": 2,
            "length": LENGTHS[0],
            "lengths": ",".join(map(str, LENGTHS)),
            "held_out": 2,
            "width": 32,
            "layers": 2,
            "head_dim": 16,
            "needle_steps": 3,
            "needle_sequences": 2,
            "needles": 3,
            "device": "cpu",
            **changed,
        }
        arguments = [x for name, value in options.items() for x in (f"--{name}", str(value))]
        arguments = [x.replace("_", "-") if x.startswith("--") else x for x in arguments]
        benchmark.main(["--method", *methods, *arguments])
        made = sorted((tmp_path / "out").glob("*.json"))
        return {path.stem.rpartition("-")[0]: json.loads(path.read_text()) for path in made}

    return run


def test_the_methods_are_table_1s_and_four_more():
    """Table 1 of arXiv 2505.17083: ten rows, of which four are by positions alone."""
    names = list(METHODS)
    assert names[:10] == [
        *("rope", "p_rope", "nope", "rope_ntk", "yarn"),
        *("logn_rope", "logn_p_rope", "logn_ntk", "alibi", "scale_invariant"),
    ]
    assert all(name.startswith("scale_invariant_") for name in names[10:])
    trained = {name: METHODS[name].scheme(16, 4096, 4096) for name in METHODS}
    longer = {name: METHODS[name].scheme(16, 4096, 16384) for name in METHODS}
    stretched = {
        name
        for name in METHODS
        if trained[name] and not torch.equal(trained[name].frequencies, longer[name].frequencies)
    }
    assert stretched == {"rope_ntk", "yarn", "logn_ntk"}
    base = 10000 * 4 ** (16 / 14)  # arXiv 2505.17083, section 5
    wanted = base ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    torch.testing.assert_close(longer["rope_ntk"].frequencies, wanted)
    assert {name for name, scheme in trained.items() if scheme is None} == {"nope", "alibi"}


def test_a_row_holds_what_it_says(command):
    made = command("rope", "scale_invariant_measured", "scale_invariant_tau")
    assert set(made) == {"rope", "scale_invariant_measured", "scale_invariant_tau"}
    for row in made.values():
        assert row["tokens"] == 10 * 4 * 256
        assert row["training"]["loss"] < 5.6  # below ln 256, where it starts
        assert list(row["validation"]) == list(row["attention"]) == list(map(str, LENGTHS))
        for length, found in row["validation"].items():
            assert found["edges"][-1] == int(length)
            assert len(found["by_position"]) == len(found["edges"]) - 1
        for found in row["attention"].values():
            sigma = torch.tensor(found["sigma"])
            assert sigma.shape == (2, 2)
            assert (sigma > 0).all()
            assert torch.tensor(found["slope"]).shape == sigma.shape
        assert set(row["needle"]["accuracy"]) == set(map(str, LENGTHS))
    data = [row["settings"]["data"] for row in made.values()]
    assert data[0] == data[1]
    assert "law" not in made["rope"]
    measured, learned = (made[f"scale_invariant_{name}"]["law"] for name in ("measured", "tau"))
    assert measured["tau"] == [[10.0, 10.0]] * 2
    assert (torch.tensor(measured["sigma"]) != 1).any()
    assert learned["sigma"] == [[1.0, 1.0]] * 2
    assert (torch.tensor(learned["tau"]) != 10).any()
    assert data[0]["vocabulary"] == 256


def test_a_question_ends_in_no_more_tokens_than_are_trained_on():
    longest = max(needle._CITIES, key=len)
    answer = needle._REST.format(city=longest, number=10**6)
    assert len(answer.encode()) <= rows._ENDING


def test_the_law_is_measured_on_the_way(command, monkeypatch):
    seen = []
    real = rows._measure_law

    def spy(model, ids):
        real(model, ids)
        seen.append([block.mixer.law.clone() for block in model.blocks])

    monkeypatch.setattr(rows, "_measure_law", spy)
    made = command("scale_invariant_measured", needle_steps=0)
    assert len(seen) == 1
    assert "needle" not in made["scale_invariant_measured"]
    for law in seen[0]:
        assert not torch.equal(law, torch.tensor([[1.0, 1.0], [0.0, 0.0]]))


def test_loss_and_attention_are_those_of_the_model():
    """By position, from the model's own losses; sigma from all pairs of the rows looked at."""
    torch.manual_seed(0)
    size = Size(30, width=32, layers=1, head_dim=16)
    model = Decoder(size, lambda layer: SoftmaxAttention(32, 16), Positions(lambda length: None))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    ids = torch.randint(30, (5, 301))
    found = rows.validate(model, ids)
    losses = model.token_losses(ids[:, :-1], ids[:, 1:]).double()
    assert found["loss"] == pytest.approx(losses.mean().item())
    edges = found["edges"]
    assert found["by_position"][1] == pytest.approx(losses[:, edges[1] : edges[2]].mean().item())

    measured = rows.attention(model, ids[:1])
    q, k, _ = next(iter(model.heads(ids[:1, :-1])))
    at = torch.linspace(150, 299, 64).long().unique()
    scores = (q[0] @ k[0].mT / 4)[0, at].double()
    parts = [row[1:i] for i, row in zip(at.tolist(), scores, strict=True)]  # no first, no own key
    sigma = torch.stack([x.var(correction=0) for x in parts]).mean().sqrt()
    assert measured["sigma"][0][0] == pytest.approx(sigma.item(), rel=1e-3)
    entropies = []
    for i in at.tolist():
        p = (q[0, 0, i] @ k[0, 0, : i + 1].T / 4).double().softmax(-1)
        entropies.append(-(p * p.log()).sum())
    assert measured["entropy"][0][0] == pytest.approx(
        torch.stack(entropies).mean().item(), rel=1e-4
    )


def test_micro_batches_are_one_batch():
    model = build("rope", Size(30, width=32, layers=1, head_dim=16), 64)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    ids = torch.randint(30, (5, 65))
    gradients = []
    for micro in (1, 2, 5):
        model.zero_grad()
        loss = training.accumulated(
            ids.split(micro),
            lambda part: model.loss(part[:, :-1], part[:, 1:]) * (len(part) / len(ids)),
        )
        loss.backward()
        gradients.append([loss.detach(), *(x.grad.clone() for x in model.parameters())])
    for other in gradients[:2]:
        torch.testing.assert_close(other, gradients[2], atol=1e-5, rtol=1e-4)


def test_a_killed_row_goes_on(command, monkeypatch, tmp_path):
    whole = command("scale_invariant_tau")["scale_invariant_tau"]
    (tmp_path / "out").rename(tmp_path / "whole")
    monkeypatch.setattr(rows, "validate", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command("scale_invariant_tau")
    monkeypatch.undo()
    monkeypatch.setattr(rows.time, "perf_counter", lambda: 0.0)
    again = command("scale_invariant_tau")["scale_invariant_tau"]
    assert again["seconds"] == again["training"]["earlier_seconds"] > 0
    assert again["validation"] == whole["validation"]
    assert again["needle"]["accuracy"] == whole["needle"]["accuracy"]


def test_a_row_is_made_once_and_leaves_no_checkpoint(command, monkeypatch, tmp_path, capsys):
    once = command("rope")
    assert not list((tmp_path / "out").rglob("*.pt"))
    assert (tmp_path / "out" / "rope-0" / "log.csv").is_file()
    monkeypatch.setattr(rows, "train_decoder", lambda *args: 1 / 0)
    assert command("rope") == once
    for changed in ({"steps": 11}, {"needles": 4}):
        with pytest.raises(SystemExit):
            command("rope", **changed)
        assert f"differs in {next(iter(changed))}; remove it" in capsys.readouterr().err


def test_the_table_has_all_methods_and_leaves_out_what_was_not_run(command, tmp_path, capsys):
    command("rope", "alibi")
    command("rope", seed=1)
    capsys.readouterr()
    benchmark.main(["table", str(tmp_path / "out")])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `")]
    cells = {
        line.split("|")[1].strip(" `"): [x.strip() for x in line.split("|")[2:-1]]
        for line in lines
    }
    assert list(cells) == list(METHODS)
    assert cells["nope"] == [""] * 10
    assert cells["rope"][0] == "2"
    assert "±" in cells["rope"][1]
    row = json.loads((tmp_path / "out" / "alibi-0.json").read_text())
    assert cells["alibi"][3] == f"{row['validation']['512']['loss']:.3f}"
    figures = [
        f"{name}.png" for name in ("loss_by_length", "loss_by_attention", "needles_by_length")
    ]
    for name in ("table.md", *figures):
        assert (tmp_path / "out" / name).stat().st_size > 200


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"lengths": "128,x"}, "lengths must be numbers"),
        ({"lengths": "100,256"}, "lengths must be positive divisors of the longest"),
        ({"data": "/nowhere"}, "data must be installed"),
        ({"tokenizer": "/nowhere"}, "tokenizer must be bytes"),
        ({"width": 33}, "width must be a multiple of head_dim"),
        ({"micro": 0}, "micro must be at least 1"),
        ({"data_seed": -1}, "data_seed must be at least 0"),
        ({"held_out": 70}, "data must have 70 documents"),
        ({"seconds": 0}, "run again to go on"),
        ({"length": 64, "lengths": "64"}, "length must be at least"),
        ({"needle_steps": -1}, "needle_steps must be at least 0"),
        ({"needle_sequences": 9999}, "fewer than a batch of 9999"),
        ({"length": 4, "needle_steps": 0}, "length must be at least 8"),
        ({"lengths": "4,256", "needle_steps": 0}, "length must be at least 8"),
        ({"device": "cuda:99"}, "device must be cpu on this machine"),
        ({"device": "tpu"}, "device must be cpu or cuda"),
    ],
)
def test_refuses_in_one_line(command, capsys, monkeypatch, changed, words):
    if "seconds" not in changed:
        monkeypatch.setattr(rows, "train_decoder", lambda *args: 1 / 0)
    with pytest.raises(SystemExit) as stopped:
        command("rope", **changed)
    assert stopped.value.code == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert words in error


def test_the_results_are_those_of_the_rows_that_are_kept(tmp_path):
    kept = ROOT / "benchmarks" / "results" / "length_generalisation"
    for path in kept.glob("*.json"):
        shutil.copy(path, tmp_path)
    table = tables.report(tmp_path)
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text().splitlines()
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(METHODS)
    assert set(lines) <= set(results)


@pytest.mark.parametrize("content", ["", '{"a"', "[]", '{"settings": {}}', '{"a": 1}'])
def test_what_is_no_row_is_named(command, tmp_path, capsys, content):
    path = tmp_path / "out" / "rope-0.json"
    path.parent.mkdir()
    path.write_text(content)
    for run in (lambda: command("rope"), lambda: benchmark.main(["table", str(path.parent)])):
        with pytest.raises(SystemExit) as stopped:
            run()
        assert stopped.value.code == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"error: {path} is ")
        assert "remove it" in error


def test_an_empty_folder_has_no_table(tmp_path, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["table", str(tmp_path)])
    assert "folder must hold rows" in capsys.readouterr().err
