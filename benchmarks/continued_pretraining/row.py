"""Rows: swap a model's attention, validate it, train it on, and validate it again."""

from __future__ import annotations

import hashlib
import re
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from analysis.calibration import plain_rope
from analysis.huggingface import load
from benchmarks.extension.rows import Calibrations
from benchmarks.extension.run import refuse_caps
from benchmarks.extension.scores import token_losses
from benchmarks.extension.settings import Setting, Trained
from benchmarks.machine import machine
from benchmarks.rows import CHECKPOINT, digest, finish, row_of
from benchmarks.tokens import TokenFile
from benchmarks.training import Schedule, accumulated, train
from score_mods.rotary import Rotary
from score_mods.two_branch import TwoBranch

Place = tuple[Path, dict[str, Any]]  # a row's folder, and its settings

LAST = 1024  # tokens at the end of a context whose loss is given by itself
_AT_ONCE = 2048  # tokens whose logits exist at once
_CALIBRATION_TEXTS = 2


def run_rows(options: Namespace, chosen: list[Setting], data: TokenFile) -> Iterator[Path]:
    """Make a row for each setting and write its JSON.

    Settings that attend alike in training, as RoPE, NTK and YaRN do within the model's own length,
    are trained once; the `seconds` of each are those of all.

    Args:
        options: of the command.
        chosen: how the model attends.
        data: in the model's tokens.

    Yields:
        The files.

    Raises:
        ValueError: if the positions of one cannot be had, before any is trained.
    """
    described = data.describe()
    places = {setting: _place(options, setting, described) for setting in chosen}
    left = []
    for setting, place in places.items():
        made = row_of(*place)
        if made is None:
            left.append(setting)
        else:
            yield made
    while left:
        model, _ = load(options.model, options.gguf)
        refuse_caps(model)
        model.to(options.device)
        length = options.trained or model.config.max_position_embeddings
        trained = Trained(*plain_rope(model), length, model.config.num_attention_heads)
        for setting in left:
            _positions(setting, options.length, trained)
        alike = [x for x in left if _alike(x, left[0], options.length, trained)]
        alike.sort(key=lambda x: not (places[x][0] / CHECKPOINT).is_file())
        yield from _run(options, {x: places[x] for x in alike}, data, model, trained)
        left = [setting for setting in left if setting not in alike]


def _place(options: Namespace, setting: Setting, data: dict[str, Any]) -> Place:
    """The folder of a setting's row, and what tells the row from others."""
    settings = {
        "label": setting.label,
        "setting": asdict(setting),
        **{name: getattr(options, name) for name in ("model", "gguf", "trained", "steps", "rate")},
        **{name: getattr(options, name) for name in ("sequences", "length", "data_seed")},
        "lengths": options.lengths,
        "data": data,
    }
    name = re.sub(r"[^\w.=-]+", "_", setting.label)[:80]
    return Path(options.out) / f"{name}-{digest(settings)}", settings


def _alike(one: Setting, other: Setting, length: int, trained: Trained) -> bool:
    """Whether two settings are the same in contexts of `length`."""
    if one.ratio(length, trained) != other.ratio(length, trained):
        return False
    if replace(one, rotary=other.rotary, factor=other.factor) != other:
        return False
    a, b = (_positions(setting, length, trained) for setting in (one, other))
    if not isinstance(a, Rotary) or not isinstance(b, Rotary) or a.start or b.start:
        return one == other
    return a.attention_factor == b.attention_factor and torch.equal(a.frequencies, b.frequencies)


def _positions(setting: Setting, length: int, trained: Trained) -> Rotary | TwoBranch:
    """The positions of a setting, whose label an error names."""
    try:
        return setting.positions(length, trained)
    except ValueError as error:
        raise ValueError(f"mods: {setting.label}: {error}") from None


def _run(
    options: Namespace,
    alike: dict[Setting, Place],
    data: TokenFile,
    model: Any,
    trained: Trained,
) -> list[Path]:
    """Make the rows of settings that train alike, by where they go; returns their files."""
    began = time.perf_counter()
    first, (folder, settings) = next(iter(alike.items()))
    folder.mkdir(parents=True, exist_ok=True)
    device = model.device
    batches = data.batches(options.sequences, options.length, options.data_seed)
    calibrations = _calibrations(model, data, trained.length, folder, settings)

    def apply(setting: Setting, context: int) -> None:
        impl = "flex" if device.type == "cuda" else "dense"
        setting.apply(model, context, trained, calibrations, impl=impl)

    def validated(setting: Setting) -> dict[int, dict[str, float]]:
        found = {}
        for context in options.lengths:
            apply(setting, context)
            held_out = data.validation(context, options.lengths[-1])
            found[context] = validate(model, held_out, options.micro * options.length)
        return found

    found: list[dict[str, Any]] = [
        {"settings": mine, "alike": [x.label for x in alike], "before": validated(setting)}
        for setting, (_, mine) in alike.items()
    ]
    earlier = 0.0
    if options.steps:
        apply(first, options.length)
        training = train(
            model.train(),
            [_optimizer(model, options.rate)],
            Schedule(options.steps, warmup=options.steps // 10, cooldown=0.5),
            lambda step: loss_of_batch(model, batches(step).to(device), options.micro),
            folder=folder,
            identity=settings,
            seconds=options.seconds,
            label=first.label,
        )
        earlier = training["earlier_seconds"]
        model.eval()
        tokens = options.steps * options.sequences * options.length
        for setting, row in zip(alike, found, strict=True):
            row |= {"training": training, "tokens": tokens, "after": validated(setting)}
    ends = {"machine": machine(device), "seconds": time.perf_counter() - began + earlier}
    made = [(place, row | ends) for (place, _), row in zip(alike.values(), found, strict=True)]
    return [finish(*row) for row in reversed(made)][::-1]  # the checkpoint is the first's


def _optimizer(model: Any, rate: float) -> torch.optim.Optimizer:
    fused = model.device.type == "cuda"
    return torch.optim.AdamW(model.parameters(), rate, (0.9, 0.95), weight_decay=0.0, fused=fused)


def _calibrations(
    model: Any, data: TokenFile, length: int, folder: Path, settings: dict[str, Any]
) -> Calibrations:
    """Measured on training text before training, once for each scheme of positions."""
    texts = data.batches(_CALIBRATION_TEXTS, length, seed=1)(0)[:, :-1]
    seen = hashlib.sha256(texts.numpy().tobytes()).hexdigest()
    identity = {"model": settings["model"], "gguf": settings["gguf"], "texts": seen}
    return Calibrations(model, list(texts[:, None]), folder / "calibrations", identity)


def loss_of_batch(model: Any, ids: Tensor, micro: int) -> Tensor:
    """The loss of a batch, for all parts of which but the last `backward()` is called here.

    Logits over the vocabulary exist for 2,048 tokens at a time, and are made again in the backward
    pass. On a GPU the model computes in bfloat16 by autocast.

    Args:
        model: a Hugging Face causal language model whose logits are its head's output.
        ids: token ids `[N, T + 1]`.
        micro: sequences in one forward pass.

    Returns:
        The mean loss in nats a token, with the graph of the last part.
    """
    head = model.get_output_embeddings()

    def piece(x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(head(x).float(), targets, reduction="sum")

    def share(part: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            hidden = model.base_model(input_ids=part[:, :-1], use_cache=False).last_hidden_state
            rows = hidden.flatten(0, 1).split(_AT_ONCE)
            targets = part[:, 1:].flatten().split(_AT_ONCE)
            pairs = zip(rows, targets, strict=True)
            losses = [checkpoint(piece, *pair, use_reentrant=False) for pair in pairs]
        return torch.stack(losses).sum() / ids[:, 1:].numel()

    return accumulated(ids.split(micro), share)


def validate(model: Any, ids: Tensor, at_once: int) -> dict[str, float]:
    """The loss on held-out contexts.

    Args:
        model: as in `loss_of_batch`.
        ids: token ids `[N, T + 1]`.
        at_once: tokens in one forward pass, or one context if that has more.

    Returns:
        `loss` and `last`, nats a token over the contexts and over their last 1,024 tokens.
    """
    device = model.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        parts = ids.split(max(1, at_once // (ids.shape[1] - 1)))
        losses = torch.cat([token_losses(model, part) for part in parts]).double()
    return {"loss": losses.mean().item(), "last": losses[:, -LAST:].mean().item()}
