"""One row: train a mixer at a long context, and take its loss by position and its speed."""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import score_mods as sm
from analysis import measure
from analysis.measure import Rows
from benchmarks.decoder import Decoder, Size
from benchmarks.length_generalisation.row import validate
from benchmarks.machine import machine
from benchmarks.mixers import Positions, ScaleInvariantAttention, SoftmaxAttention
from benchmarks.options import identity
from benchmarks.recurrent_mixers import LinearAttention, PowerMixer, equal_window, mixing_flops
from benchmarks.rows import finish, row_of
from benchmarks.tokens import TokenFile
from benchmarks.training import train_decoder

METHODS = {
    "softmax": "softmax attention over the whole context",
    "scale_invariant": "the same, scale-invariant with tau 10",
    "window": "softmax attention over as many keys as power attention's state has numbers for",
    "linear": "gated linear attention",
    "power": "gated power attention of degree 2",
}
_ROWS = 64  # queries whose attention is measured
_Z_LOG_Z = 2 - np.euler_gamma - math.log(2)  # E[z log z] of the square z of a N(0, 1) score


def build(method: str, size: Size, horizons: tuple[float, float]) -> Decoder:
    """Make a decoder with p-RoPE, untrained.

    Args:
        method: one of `METHODS`.
        size: how large it is.
        horizons: bounds of the gates' horizons in tokens, for "linear" and "power".
    """
    rotary, mask = sm.half_truncated_rope(size.head_dim), sm.causal
    if method == "window":
        mask = sm.and_masks(sm.causal, sm.sliding_window(equal_window(size.head_dim)))
    gated = {"linear": LinearAttention, "power": PowerMixer}
    mixer: Callable[[], nn.Module]
    if method in gated:
        mixer = partial(gated[method], size.width, size.head_dim, rotary, horizons=horizons)
    elif method == "scale_invariant":
        mixer = partial(ScaleInvariantAttention, size.width, size.head_dim, rotary)
    else:
        mixer = partial(SoftmaxAttention, size.width, size.head_dim, rotary, mask_mod=mask)

    def made(layer: int) -> nn.Module:
        return mixer()

    return Decoder(size, made, Positions(lambda length: rotary, mask))


def run_row(options: Namespace, method: str, data: TokenFile) -> Path:
    """Make a row and write its JSON; returns the file."""
    began = time.perf_counter()
    horizons = (options.horizons[0], options.horizons[1])
    spread = f"-{horizons[0]:g}-{horizons[1]:g}" if method in ("linear", "power") else ""
    folder = Path(options.out) / f"{method}{spread}-{options.seed}"
    settings = {**identity(options, data, method), "horizons": list(horizons) if spread else None}
    made = row_of(folder, settings)
    if made is not None:
        return made
    size = Size(data.vocabulary, options.width, options.layers, options.head_dim)
    torch.manual_seed(options.seed)
    model = build(method, size, horizons).to(options.device)
    held_out = data.validation(options.length, options.length)
    before = gates(model, held_out[:1]) if method == "power" else None
    row = {"settings": settings, **train_decoder(model, data, options, settings, folder)}
    training = row["training"]
    per_step = options.sequences * options.length
    mixing = size.layers * size.heads * mixing_flops(method, size.head_dim, options.length)
    row["flops_per_token"] = 6 * size.weights + 3 * mixing
    step = training["step_seconds"]
    row["tokens_per_second"] = None if step is None else per_step / step
    row["validation"] = validate(model, held_out)
    if before is not None:
        row["gates"] = {"before": before, "after": gates(model, held_out[:1])}
    row["machine"] = machine(options.device)
    row["seconds"] = time.perf_counter() - began + training["earlier_seconds"]
    return finish(folder, row)


@torch.no_grad()
def gates(model: Decoder, ids: Tensor) -> dict[str, Any]:
    """What power attention does to distances, on rows of the second half of one context.

    Args:
        model: a decoder of `PowerMixer`.
        ids: token ids `[1, T + 1]`.

    Returns:
        `edges` of the octaves up to T/2; `measured`, and `alone`, what the gates by themselves
        would give to Gaussian scores that are alike at all distances. Each of the two has, by
        layer and head, `shares`, the mean share of a row's attention in each octave, and
        `negentropy`, the mean of sum p log p over its keys, p their share of the row's attention;
        and `slopes` of the logarithm of both, in the mean over heads and layers, in ln t from 8
        tokens on: 0 where it is the same in every octave.
    """
    length = ids.shape[1] - 1
    device = model.head.weight.device
    at = torch.linspace(length // 2, length - 1, min(_ROWS, length // 2)).long().unique()
    edges = [2**octave for octave in range((length // 2).bit_length())]
    found: dict[str, Any] = {
        kind: {"shares": [], "negentropy": []} for kind in ("measured", "alone")
    }
    for q, k, _, log_g in model.heads(ids[:, :-1].to(device)):
        mods = {"power": sm.power(2, log_g)}
        measured = measure(q[:, :, at.to(device)], k, mods, q_positions=at, edges=edges)
        rows = measured.mechanisms["power"]
        for kind, values in (
            ("measured", _of_rows(rows, edges)),
            ("alone", _alone(log_g, at, edges)),
        ):
            for name, value in zip(("shares", "negentropy"), values, strict=True):
                found[kind][name].append(value.mean(1).tolist())
    for kind, values in found.items():
        means = {
            name: torch.tensor(value, dtype=torch.float64).mean((0, 1))
            for name, value in values.items()
        }
        found[kind]["slopes"] = {name: _slope(edges, mean) for name, mean in means.items()}
    found["edges"] = edges
    return found


def _of_rows(rows: Rows, edges: list[int]) -> tuple[Tensor, Tensor]:
    """Share and negentropy of each range in each measured row, `[H, R, K]`."""
    ranges, total = rows.ranges(edges), rows.log_total[..., None]
    share = (ranges.log_z - total).exp()
    return share, torch.where(share > 0, share * (ranges.mean_logit - total), 0.0)


def _alone(log_g: Tensor, at: Tensor, edges: list[int]) -> tuple[Tensor, Tensor]:
    """The same, float64, of weights z exp(G_i - G_j), z the square of a Gaussian score.

    With w = exp(G_i - G_j) / sum_j exp(G_i - G_j), E[z] = 1 and many keys, p = z w has the
    expectations E[p] = w and E[p log p] = w (log w + E[z log z]).
    """
    summed = log_g[0].double().cpu().cumsum(-1)
    distance = at[:, None] - torch.arange(summed.shape[-1])
    decay = (summed[:, at, None] - summed[:, None]).masked_fill(distance < 0, -torch.inf)
    share = decay.softmax(-1)
    negentropy = torch.special.xlogy(share, share) + _Z_LOG_Z * share
    seen = [(low <= distance) & (distance < high) for low, high in pairwise(edges)]
    shares, negentropies = ([(x * mask).sum(-1) for mask in seen] for x in (share, negentropy))
    return torch.stack(shares, -1), torch.stack(negentropies, -1)


def _slope(edges: list[int], values: Tensor) -> float | None:
    """Least-squares slope of ln |value| in ln t, over octaves from 8 tokens on; None below two."""
    t = torch.tensor([(a * b) ** 0.5 for a, b in pairwise(edges)], dtype=torch.float64)
    chosen = (t > 8) & (values != 0)
    if chosen.sum() < 2:
        return None
    x, y = t[chosen].log(), values[chosen].abs().log()
    x = x - x.mean()
    return ((x * y).sum() / x.square().sum()).item()
