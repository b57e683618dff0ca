"""One row: train a mixer at a long context, and take its loss by position and its speed."""

from __future__ import annotations

import time
from argparse import Namespace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import score_mods as sm
from analysis import gated_shares, measure
from benchmarks.decoder import Decoder, Size
from benchmarks.length_generalisation.row import validate
from benchmarks.machine import machine
from benchmarks.mixers import Positions, SoftmaxAttention
from benchmarks.options import identity
from benchmarks.recurrent_mixers import LinearAttention, PowerMixer, equal_window, mixing_flops
from benchmarks.rows import finish, row_of
from benchmarks.tokens import TokenFile
from benchmarks.training import train_decoder

METHODS = {
    "softmax": "softmax attention over the whole context",
    "window": "softmax attention over as many keys as power attention's state has numbers for",
    "linear": "gated linear attention",
    "power": "gated power attention of degree 2",
}
_ROWS = 64  # queries whose attention is measured


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
    if method in gated:
        mixer = partial(gated[method], size.width, size.head_dim, rotary, horizons=horizons)
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
    model = build(method, size, horizons)
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
        theory = gated_shares(starting_horizons(size.heads, horizons), before["edges"])
        after = gates(model, held_out[:1])
        row["gates"] = {"theory": theory.mean(0).tolist(), "before": before, "after": after}
    row["machine"] = machine(options.device)
    row["seconds"] = time.perf_counter() - began + training["earlier_seconds"]
    return finish(folder, row)


def starting_horizons(heads: int, bounds: tuple[float, float]) -> Tensor:
    """Horizons of the heads before training, as `PowerAttention` spreads them, float64 `[H]`."""
    low, high = bounds
    place = (torch.arange(heads, dtype=torch.float64) + 0.5) / heads
    return low * (high / low) ** place


@torch.no_grad()
def gates(model: Decoder, ids: Tensor) -> dict[str, Any]:
    """What power attention does to distances, on rows of the second half of one context.

    Args:
        model: a decoder of `PowerMixer`.
        ids: token ids `[1, T + 1]`.

    Returns:
        `edges` of the octaves up to T/2; by layer and head `shares`, the mean share of a row's
        attention in each, and `negentropy`, the mean of sum p log p over its keys, p their share
        of the row's attention; `slope`, of the logarithm of the share, in the mean over heads and
        layers, in ln t from 8 tokens on.
    """
    length = ids.shape[1] - 1
    device = model.head.weight.device
    at = torch.linspace(length // 2, length - 1, min(_ROWS, length // 2)).long().unique()
    edges = [2**octave for octave in range((length // 2).bit_length())]
    found: dict[str, Any] = {"edges": edges, "shares": [], "negentropy": []}
    for q, k, _, log_g in model.heads(ids[:, :-1].to(device)):
        mods = {"power": sm.power(2, log_g)}
        rows = measure(q[:, :, at.to(device)], k, mods, q_positions=at, edges=edges).mechanisms[
            "power"
        ]
        ranges = rows.ranges(edges)
        total = rows.log_total[..., None]
        share = (ranges.log_z - total).exp()
        found["shares"].append(share.mean(1).tolist())
        found["negentropy"].append((share * (ranges.mean_logit - total)).mean(1).tolist())
    mean = torch.tensor(found["shares"], dtype=torch.float64).mean((0, 1))
    found["slope"] = _slope(edges, mean)
    return found


def _slope(edges: list[int], shares: Tensor) -> float | None:
    """Least-squares slope of ln share in ln t, over octaves from 8 tokens on; None below two."""
    t = torch.tensor([(a * b) ** 0.5 for a, b in pairwise(edges)], dtype=torch.float64)
    chosen = (t > 8) & (shares > 0)
    if chosen.sum() < 2:
        return None
    x, y = t[chosen].log(), shares[chosen].log()
    x = x - x.mean()
    return ((x * y).sum() / x.square().sum()).item()
