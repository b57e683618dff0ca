"""How well a model reads a long text: its loss by position, and the needles that it finds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.extension.texts import Text
from benchmarks.needle import needle_accuracy, needle_sample

_ROWS = 2048  # tokens whose logits over the vocabulary exist at a time


def edges(length: int) -> list[int]:
    """Positions between which loss is averaged: 0, then two an octave from 64 on to `length`."""
    inner = (round(2 ** (half / 2)) for half in range(12, 2 * length.bit_length()))
    return [0, *(edge for edge in inner if edge < length), length]


@torch.no_grad()
def hidden_states(model: Any, ids: Tensor) -> Tensor:
    """What the model's head gets, `[..., T, C]`, for token ids `[..., T]`."""
    rows = ids.reshape(-1, ids.shape[-1]).to(model.device)
    found = model.base_model(input_ids=rows, use_cache=False).last_hidden_state
    return found.view(*ids.shape, -1)


@torch.no_grad()
def token_losses(model: Any, ids: Tensor) -> Tensor:
    """Cross-entropy in nats of each token but the first, given those before it.

    Args:
        model: a Hugging Face causal language model whose logits are its head's output.
        ids: token ids `[..., T]`.

    Returns:
        Float32 `[..., T - 1]`, on the CPU.
    """
    hidden = hidden_states(model, ids)[..., :-1, :].flatten(0, -2)
    targets, head = ids[..., 1:].to(hidden.device), model.get_output_embeddings()
    pieces = zip(hidden.split(_ROWS), targets.flatten().split(_ROWS), strict=True)
    losses = [F.cross_entropy(head(x).float(), y, reduction="none") for x, y in pieces]
    return torch.cat(losses).view(targets.shape).cpu()


def loss_scores(model: Any, text: Text, length: int, reads: int, last: int) -> dict[str, Any]:
    """The loss on the first `length` tokens of each of a text's starts.

    Args:
        model: as in `token_losses`.
        text: what is read.
        length: tokens of the context.
        reads: tokens at its end that are read.
        last: tokens at its end whose loss is given by itself.

    Returns:
        `loss` and `last`, nats a token by start; `edges` and `by_position`, the mean over starts
        of those between these positions, None where nothing is read; `seconds` of the fastest
        start.
    """
    table = torch.full((len(text.starts), length - 1), math.nan, dtype=torch.float64)
    seconds = []
    for row, ids in zip(table, text.starts[:, :length], strict=True):
        begun = time.perf_counter()
        row[length - reads :] = token_losses(model, ids[length - reads :])
        seconds.append(time.perf_counter() - begun)
    bounds = edges(length)
    # The loss at place i is that of the token at position i + 1.
    cuts = [max(edge - 1, 0) for edge in bounds]
    parts = [table[:, low:high].nanmean().item() for low, high in pairwise(cuts)]
    return {
        "loss": table.nanmean(1).tolist(),
        "last": table[:, -last:].nanmean(1).tolist(),
        "edges": bounds,
        "by_position": [None if math.isnan(part) else part for part in parts],
        "seconds": min(seconds),
    }


@torch.no_grad()
def needle_scores(
    model: Any,
    encode: Callable[[str], list[int]],
    text: Text,
    length: int,
    reads: int,
    count: int,
) -> dict[str, Any]:
    """How many needles a model finds, and the loss of the right answers.

    Args:
        model: as in `token_losses`.
        encode: from a string to token ids, without special tokens.
        text: the haystack; its starts take turns.
        length: tokens of the context, needles and question among them.
        reads: tokens at its end that are read.
        count: number of samples, the same for all settings.

    Returns:
        `needles`, whether each was found, and `answer`, nats a token of the right answers.
    """
    found, losses = [], []
    head = model.get_output_embeddings()
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        haystack = text.starts[seed % len(text.starts)]
        sample = needle_sample(encode, haystack, length, generator=generator)
        answer = len(sample.ids[sample.answer])  # which ends the text
        states = hidden_states(model, sample.ids[length - reads :])
        logits = head(states[-answer - 1 : -1]).float().cpu()
        found.append(needle_accuracy(logits.argmax(-1), sample))
        losses.append(F.cross_entropy(logits, sample.ids[sample.answer]).item())
    return {"needles": found, "answer": losses}
