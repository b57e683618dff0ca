"""The trainer of the quality benchmarks: Muon and AdamW, checkpoints, a log, a progress bar.

The learning rates are constant and fall linearly to 0 in the last part of the steps, as in
arXiv 2505.17083, section 5. A checkpoint appears whole or not at all; a run that was stopped goes
on from it, if it is the same run, and ends as it would have without the stop.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from pickle import UnpicklingError
from statistics import median
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.decoder import Decoder
from benchmarks.rows import CHECKPOINT, check_same
from benchmarks.tokens import TokenFile
from score_mods._checks import integer, number

_LOGGED = 10  # steps between lines of the log


@dataclass(frozen=True)
class Schedule:
    """How long to train, and the share of the learning rates at each step.

    Attributes:
        steps: number of steps.
        warmup: steps over which the rates rise linearly from 0.
        cooldown: share of the steps over which they fall linearly to 0.
    """

    steps: int
    warmup: int = 0
    cooldown: float = 0.3

    def __post_init__(self) -> None:
        integer("steps", self.steps, at_least=0)
        integer("warmup", self.warmup, at_least=0)
        if not 0 <= number("cooldown", self.cooldown) <= 1:
            raise ValueError(f"cooldown must be in [0, 1], got {self.cooldown}")

    def __call__(self, step: int) -> float:
        """Share of the rates at a step, counted from 0."""
        rising = (step + 1) / (self.warmup + 1)
        falling = (self.steps - step) / max(1, self.cooldown * self.steps)
        return min(1.0, rising, falling)


def optimizers(
    model: nn.Module,
    *,
    embedding: nn.Module,
    muon: float = 0.02,
    embedding_rate: float = 0.3,
    rest: float = 0.002,
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for the embedding, the head and what is left.

    Args:
        model: a `Decoder`, whose blocks are `model.blocks`.
        embedding: its embedding.
        muon: learning rate of the matrices; momentum 0.95.
        embedding_rate: of the embedding; betas 0.9 and 0.95 as for the rest.
        rest: of the others.

    Returns:
        The optimizers, without weight decay.

    Reference: the numbers are those of arXiv 2505.17083, section 5.
    """
    blocks = model.get_submodule("blocks")
    matrices = [x for x in blocks.parameters() if x.ndim == 2]
    table = list(embedding.parameters())
    placed = {id(x) for x in (*matrices, *table)}
    others = [x for x in model.parameters() if id(x) not in placed]
    groups = [{"params": table, "lr": embedding_rate}, {"params": others, "lr": rest}]
    fused = next(model.parameters()).is_cuda
    return [
        torch.optim.Muon(matrices, lr=muon, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=fused),
    ]


class Interrupted(Exception):
    """Training stopped before its end, at a checkpoint from which it goes on."""


def train(
    model: nn.Module,
    found: list[torch.optim.Optimizer],
    schedule: Schedule,
    loss: Callable[[int], Tensor],
    *,
    folder: str | Path,
    identity: Mapping[str, Any],
    before_step: Callable[[int], None] = lambda step: None,
    save_every: float = 60.0,
    seconds: float = math.inf,
    label: str = "",
) -> dict[str, Any]:
    """Train a model, or go on training it.

    Args:
        model: the model, in place.
        found: its optimizers.
        schedule: steps and rates.
        loss: from a step to the loss, after whose `backward()` the gradients are those of the
            step; it may have called `backward()` for parts of the batch before.
        folder: where `checkpoint.pt` and `log.csv` are kept.
        identity: what tells this run from others; JSON.
        before_step: called before each step.
        save_every: seconds between checkpoints.
        seconds: after which to stop at a checkpoint.
        label: beside the progress bar.

    Returns:
        `loss`, the mean over the last tenth of the logged steps; `log`, step and loss of each;
        `seconds` of training, `earlier_seconds` of them in processes that were stopped, and
        `step_seconds` of a step, the median between logged steps, None where one was logged.

    Raises:
        ValueError: if the folder has a checkpoint of another run or a damaged one, or another
            process trains in it.
        FloatingPointError: if the loss is not finite.
        Interrupted: if `seconds` have passed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    identity = json.loads(json.dumps(dict(identity)))
    with _alone(folder):
        state = _resume(folder / CHECKPOINT, identity, model, found)
        rates = [[group["initial_lr"] for group in optimizer.param_groups] for optimizer in found]
        log: list[dict[str, float]] = state["log"]
        began = saved = time.perf_counter()
        before: float = state["seconds"]

        def save(step: int) -> None:
            passed = before + time.perf_counter() - began
            _save(folder / CHECKPOINT, identity, model, found, step, log, passed)

        bar = tqdm(
            range(state["step"], schedule.steps), initial=state["step"], total=schedule.steps
        )
        bar.set_description(label)
        for step in bar:
            if time.perf_counter() - began > seconds:
                save(step)
                raise Interrupted(
                    f"stopped at step {step} of {schedule.steps}; run again to go on"
                )
            for optimizer, base in zip(found, rates, strict=True):
                for group, rate in zip(optimizer.param_groups, base, strict=True):
                    group["lr"] = rate * schedule(step)
            before_step(step)
            value = loss(step)
            value.backward()
            for optimizer in found:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            logged = step % _LOGGED == 0 or step == schedule.steps - 1
            due = time.perf_counter() - saved > save_every
            if logged or due:
                shown = value.item()
                if not math.isfinite(shown):
                    raise FloatingPointError(f"the loss is {shown} at step {step}")
            if logged:
                passed = before + time.perf_counter() - began
                log.append({"step": step, "loss": shown, "seconds": passed})
                _write_log(folder / "log.csv", log)
                bar.set_postfix(loss=f"{shown:.3f}")
            if due:
                save(step + 1)
                saved = time.perf_counter()
        save(schedule.steps)
    last = [row["loss"] for row in log[-max(1, len(log) // 10) :]]
    return {
        "loss": sum(last) / len(last) if last else None,
        "log": [[row["step"], row["loss"]] for row in log],
        "seconds": log[-1]["seconds"] if log else 0.0,
        "earlier_seconds": before,
        "step_seconds": _step_seconds(log),
    }


def _step_seconds(log: list[dict[str, float]]) -> float | None:
    """Seconds of a step: the median, which compiling, saving and resuming hardly move."""
    found = [(b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in pairwise(log)]
    return median(found) if found else None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep a second process from training in a folder, whose checkpoint it would write, too."""
    lock = FileLock(folder / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"another process trains in {folder}") from None
    try:
        yield
    finally:
        lock.release()


def train_decoder(
    model: Decoder,
    data: TokenFile,
    options: argparse.Namespace,
    settings: Mapping[str, Any],
    folder: Path,
    before_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Any]:
    """Train a decoder on the device of the options, compiled on a GPU.

    Args:
        model: untrained; moved and trained in place.
        data: what it is trained on.
        options: of the command, with those of `add_training_options`.
        settings: what tells this row from others.
        folder: as in `train`.
        before_step: as in `train`.

    Returns:
        `parameters`, `tokens` and `epochs` of training, and `training`, as from `train`.
    """
    device = torch.device(options.device)
    model.to(device).refresh()
    if device.type == "cuda":
        model.compile_parts()
    batches = data.batches(options.sequences, options.length, options.data_seed)

    def loss(step: int) -> Tensor:
        ids = batches(step).to(device)
        return accumulated(
            ids.split(options.micro),
            lambda part: model.loss(part[:, :-1], part[:, 1:]) * (len(part) / len(ids)),
        )

    training = train(
        model,
        optimizers(model, embedding=model.embedding),
        Schedule(options.steps),
        loss,
        folder=folder,
        identity=settings,
        before_step=before_step,
        seconds=options.seconds,
        label=folder.name,
    )
    model.refresh()
    return {
        "parameters": sum(x.numel() for x in model.parameters()),
        "tokens": options.steps * options.sequences * options.length,
        "epochs": data.epochs(options.sequences, options.length, options.steps),
        "training": training,
    }


def accumulated(parts: Sequence[Tensor], loss: Callable[[Tensor], Tensor]) -> Tensor:
    """The sum of the parts' losses, for all of which but the last `backward()` is called here.

    Args:
        parts: of a batch.
        loss: from a part to its share of the batch's loss.

    Returns:
        The sum, with the graph of the last part.
    """
    total = torch.zeros((), device=parts[0].device)
    for part in parts[:-1]:
        value = loss(part)
        value.backward()
        total += value.detach()
    return total + loss(parts[-1])


def _resume(
    path: Path,
    identity: Mapping[str, Any],
    model: nn.Module,
    found: list[torch.optim.Optimizer],
) -> dict[str, Any]:
    """Load a checkpoint, if there is one, into model, optimizers and generators."""
    for optimizer in found:
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
    if not path.is_file():
        return {"step": 0, "log": [], "seconds": 0.0}
    device = next(model.parameters()).device
    with _named(path):
        state = torch.load(path, map_location=device, weights_only=True)
        kept_identity = state["identity"]
    check_same(path, kept_identity, identity)
    with _named(path):
        model.load_state_dict(state["model"])
        for optimizer, kept in zip(found, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
    torch.set_rng_state(state["rng"].cpu())
    if state["cuda_rng"] is not None:
        torch.cuda.set_rng_state(state["cuda_rng"].cpu())
    return state


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Say in one line which checkpoint cannot be gone on from."""
    try:
        yield
    except (
        EOFError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        UnpicklingError,
        ValueError,
    ) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{path} cannot be gone on from: {reason}; remove it") from error


def _save(
    path: Path,
    identity: Mapping[str, Any],
    model: nn.Module,
    found: list[torch.optim.Optimizer],
    step: int,
    log: list[dict[str, float]],
    seconds: float,
) -> None:
    """Write a checkpoint, whole or not at all."""
    cuda = next(model.parameters()).is_cuda
    partial = path.with_suffix(".partial")
    torch.save(
        {
            "identity": identity,
            "step": step,
            "log": log,
            "seconds": seconds,
            "model": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in found],
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if cuda else None,
        },
        partial,
    )
    os.replace(partial, path)


def _write_log(path: Path, log: list[dict[str, float]]) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", "loss", "seconds"])
        writer.writeheader()
        writer.writerows(log)
    os.replace(partial, path)
