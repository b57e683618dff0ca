"""The trainer: rates, optimizers, and runs that are stopped."""

import csv

import pytest
import torch
from filelock import FileLock

from benchmarks import training
from benchmarks.training import Interrupted, Schedule, optimizers, train


class Small(torch.nn.Module):
    """Enough of a decoder: an embedding, blocks and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 4)
        block = torch.nn.Linear(4, 4, bias=False)
        block.scale = torch.nn.Parameter(torch.ones(4))
        self.blocks = torch.nn.ModuleList([block])
        self.head = torch.nn.Linear(4, 8, bias=False)

    def forward(self, ids):
        return self.head(self.blocks[0](self.embedding(ids)) * self.blocks[0].scale)


def run(folder, steps=30, *, stop=None, identity=None, loss=None, **options):
    """Train a small model; `stop` raises inside that step, as a killed process would."""
    torch.manual_seed(0)
    model = Small()
    found = optimizers(model, embedding=model.embedding, embedding_rate=0.01)
    ids = torch.arange(8)

    def default(step):
        if step == stop:
            raise KeyboardInterrupt
        noise = torch.randint(8, (8,))  # what the generator's state decides
        return torch.nn.functional.cross_entropy(model(ids), (ids + noise % 2) % 8)

    result = train(
        model,
        found,
        Schedule(steps),
        loss or default,
        folder=folder,
        identity=identity or {"run": 1},
        **options,
    )
    return model, result


def logged(folder):
    with (folder / "log.csv").open() as file:
        return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]


def test_rates_rise_stay_and_fall():
    schedule = Schedule(100, warmup=9, cooldown=0.2)
    shares = [schedule(step) for step in range(100)]
    assert shares[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert shares[10:80] == [1.0] * 70
    assert shares[80:] == pytest.approx([1 - i / 20 for i in range(20)])
    assert Schedule(10, cooldown=0)(9) == 1


def test_matrices_of_blocks_have_muon_and_the_rest_adamw():
    model = Small()
    muon, adamw = optimizers(model, embedding=model.embedding)
    assert muon.param_groups[0]["params"] == [model.blocks[0].weight]
    table, rest = adamw.param_groups
    assert table["params"] == [model.embedding.weight]
    assert {id(x) for x in rest["params"]} == {id(model.blocks[0].scale), id(model.head.weight)}
    assert (muon.param_groups[0]["lr"], table["lr"], rest["lr"]) == (0.02, 0.3, 0.002)


def test_learns_and_logs(tmp_path):
    _, result = run(tmp_path, 200)
    steps, losses = zip(*logged(tmp_path), strict=True)
    assert steps == (*range(0, 200, 10), 199)
    assert losses[-1] < 0.7 * losses[0]
    assert result["loss"] == pytest.approx(sum(losses[-2:]) / 2)


def test_a_killed_run_ends_as_if_it_had_not_been(tmp_path):
    whole, _ = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", stop=17, save_every=0)
    model, _ = run(tmp_path / "killed")
    for got, want in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(got, want)
    assert logged(tmp_path / "whole") == logged(tmp_path / "killed")
    # and a third run has nothing left to do
    assert torch.equal(run(tmp_path / "killed")[0].head.weight, whole.head.weight)


def test_the_log_of_a_killed_run_goes_beyond_its_checkpoint(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, stop=17)
    assert not (tmp_path / "checkpoint.pt").exists()
    assert [step for step, _ in logged(tmp_path)] == [0, 10]


def test_stops_in_time_and_goes_on(tmp_path):
    with pytest.raises(Interrupted, match="stopped at step 0 of 30; run again to go on"):
        run(tmp_path, seconds=0)
    model, _ = run(tmp_path)
    assert torch.equal(model.head.weight, run(tmp_path / "other")[0].head.weight)


def test_seconds_are_those_of_all_processes_and_a_step_is_the_median(tmp_path, monkeypatch):
    """By a clock that each step moves on by 1, and the first of a process by 100, as compiling."""
    clock = [0.0]
    monkeypatch.setattr(training.time, "perf_counter", lambda: clock[0])
    weight = torch.ones((), requires_grad=True)

    def loss(step, stop=None):
        if step == stop:
            raise KeyboardInterrupt
        clock[0] += 100 if step in (0, 40) else 1
        return weight * 1.0

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, 60, loss=lambda step: loss(step, 40), save_every=0)
    assert clock == [139.0]
    clock[0] = 1000.0
    _, result = run(tmp_path, 60, loss=loss)
    assert result["earlier_seconds"] == 139
    assert result["seconds"] == 139 + 100 + 19
    assert result["step_seconds"] == 1
    assert run(tmp_path / "one", 1, loss=loss)[1]["step_seconds"] is None


def test_another_run_is_not_gone_on_with(tmp_path):
    run(tmp_path, 3)
    with pytest.raises(ValueError, match="another run, which differs in lr, run; remove it"):
        run(tmp_path, 3, identity={"run": 2, "lr": 1})


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    with (
        FileLock(tmp_path / "lock"),
        pytest.raises(ValueError, match="another process trains in"),
    ):
        run(tmp_path, 3)
    run(tmp_path, 3)


def test_a_checkpoint_is_whole_or_not_there(tmp_path, monkeypatch):
    run(tmp_path, 3)
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def broken(state, path):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, 3)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize("keep", [0, 10, 1000, -100])
def test_a_damaged_checkpoint_is_named(tmp_path, keep):
    run(tmp_path, 3)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"checkpoint\.pt cannot be gone on from: .+; remove it$"):
        run(tmp_path, 3)


def test_a_checkpoint_of_another_model_is_named(tmp_path):
    run(tmp_path, 3)
    path = tmp_path / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    del state["model"]["head.weight"]
    for other in (state, {"step": 3}):
        torch.save(other, path)
        with pytest.raises(ValueError, match=r"cannot be gone on from: .+; remove it$"):
            run(tmp_path, 3)


def test_a_loss_that_is_not_finite_is_an_error(tmp_path):
    weight = torch.ones((), requires_grad=True)
    with pytest.raises(FloatingPointError, match="the loss is nan at step 0"):
        run(tmp_path, 3, loss=lambda step: weight * torch.nan)


def test_a_checkpoint_never_holds_what_is_not_finite(tmp_path):
    """Between two logged steps as well."""
    weight = torch.ones((), requires_grad=True)

    def loss(step):
        return weight * (torch.nan if step == 5 else 1.0)

    with pytest.raises(FloatingPointError, match="the loss is nan at step 5"):
        run(tmp_path, 30, loss=loss, save_every=0)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["step"] == 5


@pytest.mark.parametrize(
    ("options", "words"),
    [({"steps": -1}, "steps"), ({"steps": 1, "cooldown": 1.5}, "cooldown must be in")],
)
def test_refuses(options, words):
    with pytest.raises(ValueError, match=words):
        Schedule(**options)
