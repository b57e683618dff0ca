"""One row: train a method, validate it, measure its attention, and let it look for needles."""

from __future__ import annotations

import time
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from analysis import judge, measure
from benchmarks.decoder import IGNORED, Decoder, Size
from benchmarks.extension.scores import edges
from benchmarks.length_generalisation.methods import METHODS, TAU, build
from benchmarks.machine import machine
from benchmarks.mixers import ScaleInvariantAttention
from benchmarks.needle import NeedleSample, needle_accuracy, needle_sample
from benchmarks.options import identity
from benchmarks.rows import finish, row_of
from benchmarks.tokens import TokenFile, Tokenizer
from benchmarks.training import Schedule, optimizers, train, train_decoder

SHORTEST = 8  # tokens of a context whose attention is measured
LAST = 1024  # tokens at the end of a context whose loss is given by itself
_ROWS = 64  # queries of a context whose attention is measured
_NEEDLES = ("needle_steps", "needle_sequences", "needles")
_ENDING = 32  # tokens that end a question, among them the answer, which has fewer bytes
# Seeds of what must not depend on a row's own.
_FINE_TUNING, _HIDING = 1, 2


def run_row(options: Namespace, method: str, data: TokenFile, tokenizer: Tokenizer) -> Path:
    """Make a row and write its JSON.

    Args:
        options: of the command.
        method: one of `METHODS`.
        data: what is trained and validated on.
        tokenizer: of the needles.

    Returns:
        The file.
    """
    began = time.perf_counter()
    folder = Path(options.out) / f"{method}-{options.seed}"
    size = Size(data.vocabulary, options.width, options.layers, options.head_dim)
    lengths: list[int] = options.lengths
    trained: int = options.length
    device = torch.device(options.device)
    settings = {
        **identity(options, data, method),
        "lengths": lengths,
        **{name: getattr(options, name) for name in _NEEDLES},
    }
    made = row_of(folder, settings)
    if made is not None:
        return made
    if options.needle_steps:  # what does not fit raises before anything is trained
        data.batches(options.needle_sequences, trained, _FINE_TUNING)
    for length in {trained, *lengths} if options.needle_steps else ():
        needle_sample(tokenizer.encode, torch.zeros(length), length, generator=torch.Generator())
    torch.manual_seed(options.seed)
    model = build(method, size, trained)
    batches = data.batches(options.sequences, trained, options.data_seed)
    law = METHODS[method].law

    def prepare(step: int) -> None:
        if law == "measured" and step == options.steps // 10:
            _measure_law(model, batches(step)[:1, :-1].to(device))
        if law == "learned":
            model.refresh()

    trained_row = train_decoder(model, data, options, settings, folder, prepare)
    row: dict[str, Any] = {
        "settings": settings,
        **trained_row,
        "flops": trained_row["tokens"] * size.flops_per_token(trained),
        "validation": {n: validate(model, data.validation(n, lengths[-1])) for n in lengths},
        "attention": {n: attention(model, data.validation(n, lengths[-1])[:1]) for n in lengths},
    }
    if METHODS[method].attention == "scale_invariant":
        row["law"] = _law(model)
    if options.needle_steps:
        row["needle"] = _needles(model, data, tokenizer, options, folder, settings)
    row["machine"] = machine(device)
    trainings = [row["training"], *([row["needle"]["training"]] if "needle" in row else [])]
    row["seconds"] = time.perf_counter() - began + sum(x["earlier_seconds"] for x in trainings)
    return finish(folder, row)


@torch.no_grad()
def validate(model: Decoder, ids: Tensor) -> dict[str, Any]:
    """The loss on held-out contexts.

    Args:
        model: a decoder.
        ids: token ids `[N, T + 1]`.

    Returns:
        `loss` and `last`, nats a token over the contexts and over their last 1,024 tokens; `edges`
        and `by_position`, the mean loss of the targets between these places.
    """
    length = ids.shape[1] - 1
    device = model.head.weight.device
    total = torch.zeros(length, dtype=torch.float64)
    for row in ids.split(1):  # one shape, and so one graph, for all that is asked at a length
        row = row.to(device)
        total += model.token_losses(row[:, :-1], row[:, 1:])[0].double().cpu()
    losses = total / len(ids)
    bounds = edges(length)
    return {
        "loss": losses.mean().item(),
        "last": losses[-LAST:].mean().item(),
        "edges": bounds,
        "by_position": [losses[low:high].mean().item() for low, high in pairwise(bounds)],
    }


@torch.no_grad()
def attention(model: Decoder, ids: Tensor) -> dict[str, Any]:
    """The two conditions in the trained model, on rows of the second half of one context.

    Args:
        model: a decoder of softmax attention.
        ids: token ids `[1, T + 1]`.

    Returns:
        By layer and head: `sigma` and `mu` of the base logits; `slope` of log total attention in
        ln t, None below 256 tokens; `last_share`, the attention on the last 100 tokens; `entropy`
        of a row in nats.
    """
    length = ids.shape[1] - 1
    device = model.head.weight.device
    rows = torch.linspace(length // 2, length - 1, min(_ROWS, length // 2)).long().unique()
    found: dict[str, Any] = {
        name: [] for name in ("sigma", "mu", "slope", "last_share", "entropy")
    }
    pairs = model.heads(ids[:, :-1].to(device))
    for block, (q, k, *_) in zip(model.blocks, pairs, strict=True):
        mods = {"own": block.mixer.mechanism()}
        measured = measure(q[:, :, rows.to(device)], k, mods, q_positions=rows)
        own = measured.mechanisms["own"]
        found["sigma"].append(measured.base.sigma.tolist())
        found["mu"].append(measured.base.mu.tolist())
        found["last_share"].append(own.share().mean(1).tolist())
        found["entropy"].append(own.entropy.mean(1).tolist())
        heads = range(q.shape[1])
        slopes = (
            [judge(measured, "own", head=h, tau=TAU, resamples=40).total.value for h in heads]
            if length >= 256
            else None
        )
        found["slope"].append(slopes)
    return found


def _law(model: Decoder) -> dict[str, list[list[float]]]:
    """`tau`, `sigma` and `mu` of scale-invariant attention by layer and head."""
    found: dict[str, list[list[float]]] = {"tau": [], "sigma": [], "mu": []}
    for mixer in (block.mixer for block in model.blocks):
        assert isinstance(mixer, ScaleInvariantAttention)
        found["tau"].append(mixer.scales().tolist())
        for name, values in zip(("sigma", "mu"), mixer.law, strict=True):
            found[name].append(values.tolist())
    return found


@torch.no_grad()
def _measure_law(model: Decoder, ids: Tensor) -> None:
    """Tell each head of scale-invariant attention the sigma and mu of its logits.

    A sigma below 0.4 is taken for 0.4, so that `scale_invariant` keeps its fast form on a GPU.
    """
    length = ids.shape[1]
    rows = torch.linspace(length // 2, length - 1, min(_ROWS, length // 2)).long().unique()
    for block, (q, k, *_) in zip(model.blocks, list(model.heads(ids)), strict=True):
        assert isinstance(block.mixer, ScaleInvariantAttention)
        base = measure(q[:, :, rows.to(q.device)], k, {}, q_positions=rows).base
        sigma = base.sigma.clamp(min=0.4)
        block.mixer.set_law(sigma.to(q.device), base.mu.to(q.device))


def _needles(
    model: Decoder,
    data: TokenFile,
    tokenizer: Tokenizer,
    options: Namespace,
    folder: Path,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Fine-tune on questions at the trained length, then ask at every length."""
    device = torch.device(options.device)
    hay = data.batches(options.needle_sequences, options.length, _FINE_TUNING)

    def sample(haystack: Tensor, length: int, *seeds: int) -> NeedleSample:
        seed = int(np.random.SeedSequence(seeds).generate_state(1)[0])
        generator = torch.Generator().manual_seed(seed)
        return needle_sample(tokenizer.encode, haystack, length + 1, generator=generator)

    def loss(step: int) -> Tensor:
        samples = [
            sample(row, options.length, _FINE_TUNING, step, i) for i, row in enumerate(hay(step))
        ]
        ids = torch.stack([x.ids for x in samples])
        targets = torch.full_like(ids, IGNORED)
        for x, row in zip(samples, targets, strict=True):
            row[x.answer] = x.ids[x.answer]
        return model.loss(ids[:, :-1].to(device), targets[:, -_ENDING:].to(device))

    def prepare(step: int) -> None:
        if METHODS[settings["method"]].law == "learned":
            model.refresh()

    rates = {"muon": 0.004, "embedding_rate": 0.06, "rest": 0.0004}  # a fifth of training's
    steps = options.needle_steps
    tuned = train(
        model,
        optimizers(model, embedding=model.embedding, **rates),
        Schedule(steps, warmup=steps // 3, cooldown=1 / 3),
        loss,
        folder=folder / "needle",
        identity=settings,
        before_step=prepare,
        seconds=options.seconds,
        label=f"{settings['method']}, needles",
    )
    model.refresh()
    found = {}
    for length in options.lengths:
        hays = data.validation(options.lengths[-1], options.lengths[-1])
        right = []
        for i in range(options.needles):
            asked = sample(hays[i % len(hays)], length, _HIDING, i)
            at = slice(asked.answer.start - 1, asked.answer.stop - 1)
            likeliest = model.likeliest(asked.ids[None, :-1].to(device), at)[0]
            right.append(needle_accuracy(likeliest, asked))
        found[length] = sum(right) / len(right)
    return {"training": tuned, "accuracy": found, "samples": options.needles}
