"""What attention does under each setting, layer by layer and head by head.

The two conditions are judged on the queries and keys of the model as it runs in the setting, in
ranges of scale 10 tokens, and the total attention of each decade of distances is measured beside
them. The first key, the attention sink of most models, is counted by itself: it lies wherever the
text begins and would otherwise stand for the farthest decade.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from analysis import judge, law_edges, measure
from analysis.huggingface import LayerQK, capture
from analysis.plots import by_layer, figure, heatmap
from analysis.report import markdown_table
from benchmarks.extension.rows import Row, Rows
from benchmarks.extension.run import Run
from benchmarks.extension.settings import ATTENTION, Setting
from benchmarks.machine import machine
from score_mods import to_device
from score_mods._captured import Mod
from score_mods.two_branch import TwoBranch

_QUERIES = 64  # spread over the second half of the context
_WORST = 5  # heads that are named


def explain(run: Run) -> str:
    """Measure the first start of the run's first text in each setting, at each length.

    One JSON file for each is written to `explained` in the run's folder, and the figures
    `mass.png` (share of attention by decade and layer) and `slopes.png` (slope of log total
    attention, by layer).

    Returns:
        A Markdown table.

    Raises:
        ValueError: if a setting has two branches, whose logits are of two kinds, or is `recent`.
    """
    for setting in run.settings:
        if setting.recent:
            raise ValueError(f"explain: {setting.label} does not read the whole context")
        if isinstance(setting.positions(run.lengths[-1], run.trained), TwoBranch):
            raise ValueError(f"explain: {setting.label} rotates near and far keys differently")
    kept, text, used = Rows(run.out / "explained"), run.texts[0], machine(run.model.device)
    rows: dict[str, list[Row]] = {setting.label: [] for setting in run.settings}
    with tqdm(total=len(run.settings) * len(run.lengths), unit="setting") as bar:
        for setting in run.settings:
            for length in run.lengths:
                bar.set_postfix_str(f"{setting.label}, {length:,} tokens")
                identity = run.identity(setting, length, text)
                row = kept.find(identity)
                if row is None:
                    found = _measured(run, setting, text.starts[:1, :length])
                    row = kept.save(identity, {**found, "machine": used})
                rows[setting.label].append(row)
                bar.update()
    _draw(run, rows)
    return _table(run, rows)


def _measured(run: Run, setting: Setting, ids: Tensor) -> Row:
    """The conditions and the mass by decade, of each layer and head.

    `edges` are those of the decades, with the trained length among them. By layer and head:
    `first` is the share of attention of the first key and `share` that of each decade without it;
    `slope` and `total` are the slope of log total attention and its verdict, `negentropy` is the
    other condition's; `sigma` and `mu` are the base logits' deviation and mean.
    """
    length = ids.shape[1]
    score_mod = run.apply(setting, length)
    at = torch.linspace(length // 2, length - 1, _QUERIES).long().unique()
    decades = [10**n for n in range(len(str(length - 1)))]
    edges = sorted({0, *decades, min(run.trained.length, length), length})
    layers: list[dict[str, Any]] = []

    def visit(layer: LayerQK) -> None:
        layers.append(_of_layer(layer, score_mod(layer.layer), at, edges))

    capture(run.model, ids, at, visit, attention=ATTENTION)
    return {"edges": edges} | {name: [layer[name] for layer in layers] for name in layers[0]}


def _of_layer(layer: LayerQK, mod: Mod | None, at: Tensor, edges: list[int]) -> dict[str, Any]:
    q, k = layer.q, layer.k
    at = at.to(q.device)
    every = torch.cat([law_edges(10.0, 2.0, k.shape[2] - 1), torch.tensor(edges)]).unique()
    found = measure(q, k, {"": mod}, q_positions=at, scale=layer.scale, edges=every)
    rows = found.mechanisms[""]
    share = (rows.ranges(edges).log_z - rows.log_total[..., None]).exp()

    key = k[:, :, :1].repeat_interleave(q.shape[1] // k.shape[1], 1)
    score = (q.float() @ key.float().mT)[0, ..., 0] * layer.scale
    if mod is not None:
        zero, heads = torch.zeros_like(at), torch.arange(len(score), device=at.device)
        score = to_device(mod, at.device)(score, zero[0], heads[:, None], at, zero)
    first = (score - rows.log_total).exp()
    decade = torch.bucketize(at, torch.tensor(edges, device=at.device), right=True) - 1
    share[:, torch.arange(len(at)), decade] -= first

    verdicts = [judge(found, "", head=head, resamples=100) for head in range(len(score))]
    return {
        "first": first.mean(1).tolist(),
        "share": share.mean(1).tolist(),
        "slope": [verdict.total.value for verdict in verdicts],
        "total": [verdict.total.verdict for verdict in verdicts],
        "negentropy": [verdict.negentropy.verdict for verdict in verdicts],
        "sigma": found.base.sigma.tolist(),
        "mu": found.base.mu.tolist(),
    }


def _table(run: Run, rows: dict[str, list[Row]]) -> str:
    lines = []
    for label, found in rows.items():
        for length, row in zip(run.lengths, found, strict=True):
            total = [verdict for heads in row["total"] for verdict in heads]
            negentropy = [verdict for heads in row["negentropy"] for verdict in heads]
            beyond = _mass(row, run.trained.length, row["edges"][-1])
            moved = _moved(found[0], row)
            worst = moved.flatten().topk(min(_WORST, moved.numel()))
            named = [divmod(place, moved.shape[1]) for place in worst.indices.tolist()]
            lines.append(
                [
                    f"`{label}`",
                    f"{length:,}",
                    *(f"{total.count(word)}" for word in ("holds", "rises", "falls")),
                    f"{negentropy.count('holds')}",
                    f"{torch.tensor(row['slope']).median():.2f}",
                    f"{torch.tensor(row['first']).mean():.3f}",
                    f"{beyond.mean():.3f}",
                    f"{moved.mean():.3f}",
                    ", ".join(f"{layer}.{head}" for layer, head in named) if moved.any() else "",
                ]
            )
    header = ["", "tokens", "total attention holds", "rises", "falls", "negentropy holds", "slope"]
    header += ["first key", "beyond", "moved", "most moved heads"]
    return (
        f"Heads by verdict, of {len(total)}; median slope of log total attention; share of the "
        f"first key, and of other keys {run.trained.length:,} and more tokens away; share of "
        f"attention that lies in other decades than at {run.lengths[0]:,} tokens, its mean over "
        "heads and the heads (layer.head) in which it is largest.\n\n"
        + markdown_table(header, lines)
    )


def _mass(row: Row, low: int, high: int) -> Tensor:
    """Share of attention at distances from `low` to below `high`, without the first key."""
    inside = [low <= start and stop <= high for start, stop in pairwise(row["edges"])]
    return torch.tensor(row["share"])[..., torch.tensor(inside)].sum(-1)


def _moved(before: Row, after: Row) -> Tensor:
    """Distance in total variation between two rows' shares, in ranges that both have `[L, H]`."""
    reach = before["edges"][-1] // 2  # of every query
    edges = [edge for edge in before["edges"] if edge in after["edges"] and edge <= reach]
    shares = []
    for row in (before, after):
        near = [_mass(row, low, high) for low, high in pairwise(edges)]
        shares.append(torch.stack([torch.tensor(row["first"]), *near], -1))
    difference = shares[1] - shares[0]
    return (difference.abs().sum(-1) + difference.sum(-1).abs()) / 2


def _draw(run: Run, rows: dict[str, list[Row]]) -> None:
    panels = [
        (line, column, f"{label}\n{length:,} tokens".replace(":", ":\n"), row)
        for line, (label, found) in enumerate(rows.items())
        for column, (length, row) in enumerate(zip(run.lengths, found, strict=True))
    ]
    wide = len(run.lengths), len(rows)
    with figure(run.out / "mass.png", *wide, height=2.4) as axes:
        for line, column, title, row in panels:
            first = torch.tensor(row["first"]).mean(1, keepdim=True)
            share = torch.cat([first, torch.tensor(row["share"]).mean(1)], 1)
            ax = heatmap(axes[line, column], share, "share")
            names = ["first key", "own key", *(f"from {edge:,}" for edge in row["edges"][1:-1])]
            ax.set_yticks(range(len(names)), names)
            ax.images[0].set_clim(0, 1)
            ax.set(title=title, ylabel="distance")
    with figure(run.out / "slopes.png", *wide, height=2.4, sharey=True) as axes:
        for line, column, title, row in panels:
            by_layer(axes[line, column], row["slope"], "slope").set_title(title)
