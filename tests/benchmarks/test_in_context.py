"""Whole rows at toy size, what they say of the gates, and the table made of them."""

import json
import shutil
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch

import score_mods as sm
from analysis import gated_shares
from benchmarks import in_context as benchmark
from benchmarks.decoder import Size
from benchmarks.in_context import row as rows
from benchmarks.in_context import tables
from benchmarks.recurrent_mixers import equal_window

ROOT = Path(__file__).parents[2]
LENGTH = 128


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for i in range(60):
        text = "".join(f"line {j} of {i}: {'abcdefg'[j % 7] * (i % 5 + 1)}\n" for j in range(20))
        (folder / f"document{i}.txt").write_text(text)
    return folder


@pytest.fixture
def command(data, tmp_path):
    """Run the benchmark at toy size; returns the rows by name of their file."""

    def run(*methods, horizons=(4, 64), **changed):
        options = {
            "data": data,
            "tokenizer": "bytes",
            "cache": tmp_path / "tokens",
            "out": tmp_path / "out",
            "steps": 12,
            "sequences": 2,
            "length": LENGTH,
            "held-out": 2,
            "width": 32,
            "layers": 1,
            "head-dim": 16,
            "device": "cpu",
            **changed,
        }
        arguments = [x for name, value in options.items() for x in (f"--{name}", str(value))]
        spread = ["--horizons", *map(str, horizons)]
        benchmark.main(["--method", *methods, *spread, *arguments])
        return {
            path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")
        }

    return run


def test_rows_hold_what_they_say_and_make_a_table(command, tmp_path, capsys):
    made = command("softmax", "scale_invariant", "window", "linear", "power")
    made = command("power", horizons=(16, 16))
    names = {"softmax-0", "scale_invariant-0", "window-0", "linear-4-64-0", "power-4-64-0"}
    assert set(made) == {*names, "power-16-16-0"}
    for name, row in made.items():
        assert row["tokens"] == 12 * 2 * LENGTH
        assert [step for step, _ in row["training"]["log"]] == [0, 10, 11]
        assert row["tokens_per_second"] > 0
        assert row["validation"]["edges"][-1] == LENGTH
        assert ("gates" in row) == name.startswith("power")
    capsys.readouterr()
    benchmark.main(["table", str(tmp_path / "out")])
    lines = capsys.readouterr().out.splitlines()
    for name, row in made.items():
        line, *slopes = (line for line in lines if line.startswith(f"| `{name}` |"))
        assert f"{row['validation']['loss']:.3f}" in line
        assert f"| {row['tokens'] * row['flops_per_token']:.3g} |" in line
        assert row["parameters"] == parameters(name, row)
        assert len(slopes) == name.startswith("power")
        for slope in slopes:
            wanted = [
                row["gates"][when][kind]["slopes"][what]
                for what in ("shares", "negentropy")
                for when in ("before", "after")
                for kind in ("measured", "alone")
            ]
            assert slope.split("|")[2:-1] == [f" {x:+.2f} " for x in wanted]
    for name in ("table.md", "in_context.png", "gates.png"):
        assert (tmp_path / "out" / name).stat().st_size > 200


def parameters(name, row):
    """All that is learned: gates of 2 heads, with their biases, besides the decoder's weights."""
    gates = 2 * (32 + 1) if name.startswith(("linear", "power")) else 0
    return Size(**row["settings"]["size"]).parameters + gates


def test_rows_without_training_make_a_table(command, tmp_path, capsys):
    made = command("softmax", "power", steps=0)
    assert all(row["tokens_per_second"] is None for row in made.values())
    capsys.readouterr()
    benchmark.main(["table", str(tmp_path / "out")])
    assert "| `softmax-0` |" in capsys.readouterr().out


def test_a_stopped_row_counts_the_seconds_before(command, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(rows, "validate", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            command("power")
    monkeypatch.setattr(rows.time, "perf_counter", lambda: 0.0)
    row = command("power")["power-4-64-0"]
    assert row["seconds"] == row["training"]["earlier_seconds"] > 0
    assert row["tokens_per_second"] > 0


def test_costs_and_losses_are_means_over_a_tenth_after_the_first():
    log = [[10 * i, 100.0 if i < 2 else float(i)] for i in range(20)]
    settings = {"sequences": 2, "length": 5}
    row = {"settings": settings, "flops_per_token": 3, "training": {"log": log}}
    flops, losses = tables._costs(row)
    assert losses.tolist() == pytest.approx([i + 0.5 for i in range(2, 19)])
    assert flops.tolist() == pytest.approx([30 * (10 * i + 6) for i in range(2, 19)])


def test_horizons_that_are_no_whole_numbers_keep_rows_apart(command):
    command("power", horizons=(1.5, 64), steps=1)
    made = command("power", horizons=(1.5, 32), steps=1)
    assert set(made) == {"power-1.5-64-0", "power-1.5-32-0"}


def test_flops_are_weights_and_mixing(command):
    """6 a weight; and forward and twice backward, 2 products of D with each visible key."""
    made = command("softmax")["softmax-0"]
    weights = 12 * 32**2 + 256 * 32
    mixing = 2 * 3 * 2 * 2 * 16 * sum(range(1, LENGTH + 1)) / LENGTH  # 2 heads
    assert made["flops_per_token"] == pytest.approx(6 * weights + mixing)


def test_scale_invariance_is_that_of_the_score_mod():
    size = Size(50, width=32, layers=1, head_dim=16)
    layer = rows.build("scale_invariant", size, (4, 64)).blocks[0].mixer
    q, k, v = torch.randn(3, 1, 2, 100, 16)
    want = sm.dense_attention(q, k, v, sm.scale_invariant(10.0), sm.causal)
    torch.testing.assert_close(layer.attend(q, k, v, None), want)


def test_the_window_sees_as_many_keys_as_the_state_has_numbers():
    model = rows.build("window", Size(50, width=32, layers=1, head_dim=16), (4, 64))
    mask = model.blocks[0].mixer.mask_mod
    width = equal_window(16)
    seen = mask(torch.tensor(0), torch.tensor(0), torch.tensor(5 * width), torch.arange(6 * width))
    assert seen.nonzero()[:, 0].tolist() == list(range(4 * width + 1, 5 * width + 1))


def test_gates_are_measured_as_attention_by_hand():
    torch.manual_seed(0)
    model = rows.build("power", Size(50, width=32, layers=2, head_dim=16), (4, 64))
    for block in model.blocks:
        torch.nn.init.normal_(block.mixer.gate.weight, std=0.2)
    ids = torch.randint(50, (1, 201))
    found = rows.gates(model, ids)
    assert found["edges"] == [1, 2, 4, 8, 16, 32, 64]
    q, k, _, log_g = next(iter(model.heads(ids[:, :-1])))
    at = torch.linspace(100, 199, 64).long().unique()
    summed = log_g[0, 1].double().cumsum(0)
    shares, negentropies = [], []
    for i in at.tolist():
        weight = (q[0, 1, i] @ k[0, 1, : i + 1].T / 4).double() ** 2
        weight = weight * (summed[i] - summed[: i + 1]).exp()
        p = (weight / weight.sum()).flip(0)  # by distance
        shares.append(p[8:16].sum())
        negentropies.append(torch.special.xlogy(p[8:16], p[8:16]).sum())
    found, share = found["measured"], torch.stack(shares).mean().item()
    assert found["shares"][0][1][3] == pytest.approx(share, rel=1e-4)
    negentropy = torch.stack(negentropies).mean().item()
    assert found["negentropy"][0][1][3] == pytest.approx(negentropy, rel=1e-4)


def test_gates_alone_are_their_theory_and_what_gaussian_scores_get():
    torch.manual_seed(0)
    log_g = torch.log1p(-1 / torch.tensor([8.0, 300.0]))[None, :, None].expand(1, 2, 2048)
    edges, at = [1, 2, 8, 64, 512], torch.arange(1024, 2048)
    share, negentropy = rows._alone(log_g, at, edges)
    for row in (0, 1000):
        theory = gated_shares(torch.tensor([8.0, 300.0]), edges, length=int(at[row]) + 1)
        torch.testing.assert_close(share[:, row], theory, rtol=1e-5, atol=1e-9)
    t = at[:, None] - torch.arange(2048)
    weights = torch.randn(1024, 2048).double().square() * (t * log_g[0, 1, 0].double()).exp()
    p = weights.masked_fill(t < 0, 0)
    p = p / p.sum(-1, keepdim=True)
    for k, (low, high) in enumerate(pairwise(edges)):
        own = torch.special.xlogy(p, p) * ((low <= t) & (t < high))
        assert negentropy[1, :, k].mean().item() == pytest.approx(own.sum(-1).mean().item(), 0.02)


def test_a_spread_of_horizons_starts_level_and_one_horizon_does_not():
    """The slope over octaves: 0 for 1/t, where the gates alone decide."""
    torch.manual_seed(0)
    size, slopes = Size(50, width=128, layers=1, head_dim=16), {}
    ids = torch.randint(50, (1, 1025))
    for horizons in ((2.0, 2048.0), (256.0, 256.0)):
        found = rows.gates(rows.build("power", size, horizons), ids)
        for kind, name in product(("measured", "alone"), ("shares", "negentropy")):
            slopes[horizons, kind, name] = found[kind]["slopes"][name]
    for kind in ("measured", "alone"):
        assert abs(slopes[(2.0, 2048.0), kind, "shares"]) < 0.15
        assert slopes[(256.0, 256.0), kind, "shares"] > 0.5
        assert slopes[(2.0, 2048.0), kind, "negentropy"] > 0.15  # it grows with ln t
    layer = rows.build("power", size, (2.0, 2048.0)).blocks[0].mixer
    started = 1 / (1 - layer.gate.bias.double().sigmoid())
    wanted = 2 * 1024 ** ((torch.arange(8).double() + 0.5) / 8)
    torch.testing.assert_close(started.detach(), wanted, rtol=1e-4, atol=0)


def test_the_slope_is_that_of_a_power_law():
    edges = [1, 2, 4, 8, 16, 32]
    assert rows._slope(edges, torch.tensor(edges[:-1]).double() ** -0.7) == pytest.approx(-0.7)
    assert rows._slope(edges, -(torch.tensor(edges[:-1]).double() ** 0.3)) == pytest.approx(0.3)
    assert rows._slope([1, 2, 4], torch.ones(2)) is None


@pytest.mark.parametrize(("folder", "shown"), [("in_context", 6), ("in_context/untrained", 2)])
def test_the_results_are_those_of_the_rows_that_are_kept(tmp_path, folder, shown):
    """Of untrained rows RESULTS.md shows the slopes, which come last."""
    for path in (ROOT / "benchmarks" / "results" / folder).glob("*.json"):
        shutil.copy(path, tmp_path)
    lines = [x for x in tables.report(tmp_path).splitlines() if x.startswith("| `")]
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text().splitlines()
    assert len(lines) >= shown
    assert set(lines[-shown:]) <= set(results)


def test_mechanisms_are_causal():
    size = Size(50, width=32, layers=2, head_dim=16)
    for method in rows.METHODS:
        model = rows.build(method, size, (4, 64))
        for weight in model.parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=0.2)
        ids = torch.randint(50, (1, 300))
        changed = ids.clone()
        changed[0, 200:] = (changed[0, 200:] + 1) % 50
        one, two = model.hidden(ids), model.hidden(changed)
        torch.testing.assert_close(one[:, :200], two[:, :200], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(one[:, 200:], two[:, 200:])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"horizons": (1, 64)}, "horizons must be two finite numbers above 1"),
        ({"sequences": 0}, "sequences must be at least 1"),
        ({"length": 7}, "length must be at least 8"),
        ({"data": "/nowhere"}, "data must be installed"),
    ],
)
def test_refuses_in_one_line(command, capsys, changed, words):
    with pytest.raises(SystemExit) as stopped:
        command("power", **changed)
    assert stopped.value.code == 1
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_attention_is_that_of_the_score_mod():
    """The mixer beside the score_mod by which its attention is measured."""
    model = rows.build("power", Size(50, width=32, layers=1, head_dim=16), (4, 64))
    ids = torch.randint(50, (1, 150))
    q, k, v, log_g = next(iter(model.heads(ids)))
    layer = model.blocks[0].mixer
    torch.nn.init.normal_(layer.o_proj.weight, std=0.2)
    want = sm.dense_attention(q, k, v, sm.power(2, log_g), sm.causal)
    x = model.norm(model.norm(model.embedding(ids)))
    got = layer(x, *model.shared(150, torch.device("cpu")))
    torch.testing.assert_close(
        got, layer.o_proj(want.transpose(1, 2).flatten(2)), atol=1e-4, rtol=1e-3
    )
