"""What the gallery shows of a mechanism: a tile, two curves, and its law on independent logits.

The tile is made of 64 queries and keys that share a direction, so that rotations are seen as well
as temperatures: their scores are 1.5 and some noise. The law is a score_mod. All that it has of a
rotation is its factor, since independent logits are distributed as before.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import score_mods
from analysis.conditions import ScoreMod, predict
from score_mods import Mechanism, Rotary, TwoBranch

TILE = 64
LENGTH = 16384
PLAIN = score_mods.compose()  # the law of all that leaves independent logits as they are
_HEADS, _CHANNELS = 4, 32


@dataclass(frozen=True)
class Panel:
    """Curves over one axis.

    Attributes:
        title: What the values are.
        xlabel: What `x` is.
        x: Where they are known `[n]`.
        curves: Values `[n]` by name; not drawn where they are not finite.
        scales: Scales of the two axes.
        floor: Values below it are not shown.
    """

    title: str
    xlabel: str
    x: Tensor
    curves: dict[str, Tensor]
    scales: tuple[str, str] = ("log", "linear")
    floor: float = -math.inf


@dataclass(frozen=True)
class Card:
    """What there is to see of one mechanism.

    Attributes:
        mechanism: Its entry in the catalogue.
        tile: Values by query and key `[64, 64]`, NaN where the key is not seen.
        values: What they are.
        panels: Two curves, or none.
        law: What it does to independent logits; None where that is no function of the score.
    """

    mechanism: Mechanism
    tile: Tensor
    values: str
    panels: tuple[Panel, ...]
    law: ScoreMod | None


def card(mechanism: Mechanism) -> Card:
    """Make a mechanism by its example, and see what it does."""
    return _BY_KIND[mechanism.kind](mechanism)


def made(mechanism: Mechanism, length: int) -> Any:
    """The mechanism of a catalogue entry's example, for `length` positions."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return eval(mechanism.example, {**vars(score_mods), "torch": torch, "T": length})


def _queries_and_keys() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = 2, 1, _HEADS, TILE, _CHANNELS
    noise = torch.randn(shape, dtype=torch.float64, generator=generator)
    q, k = 0.25 * noise + math.sqrt(1.5 / math.sqrt(_CHANNELS))
    return q, k


def _product(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT)[0, 0] / math.sqrt(_CHANNELS)


def _indices(length: int = TILE) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Batch row 0 and head 0, and all queries and keys."""
    zero, index = torch.tensor(0), torch.arange(length)
    return zero, zero, index[:, None], index


def _causal(values: Tensor) -> Tensor:
    return values.masked_fill(~score_mods.causal(*_indices()), torch.nan)


def _distances() -> Tensor:
    return torch.logspace(0, math.log10(LENGTH - 1), 120).round().long().unique()


def _of_score_mod(mechanism: Mechanism) -> Card:
    law = made(mechanism, LENGTH)
    tile = _causal(made(mechanism, TILE)(_product(*_queries_and_keys()), *_indices()))
    return Card(mechanism, tile, "score", _changes(law), law)


def _changes(law: ScoreMod) -> tuple[Panel, ...]:
    """Multiplier and bias by distance, or what becomes of a score where there are none."""
    t = _distances()
    theory = predict(law, t, q_idx=LENGTH - 1)
    if theory.affine:
        bias = replace(_by_distance("bias", t, theory.m_t), floor=-30.0)
        return _by_distance("multiplier", t, theory.a_t), bias
    scores = torch.linspace(-4, 4, 161, dtype=torch.float64)
    zero, last = torch.tensor(0), torch.tensor(LENGTH - 1)
    curves = {f"t = {t:,}": law(scores, zero, zero, last, last - t) for t in (1, LENGTH - 1)}
    if torch.equal(*curves.values()):
        curves.popitem()
    response = Panel("what becomes of a score", "score", scores, curves, ("linear",) * 2, -8.0)
    return response, _by_distance("ln E[weight]", t, theory.log_weight)


def _by_distance(title: str, t: Tensor, values: Tensor) -> Panel:
    return Panel(title, "distance $t$ (tokens)", t, {"": values})


def _by_index(title: str, xlabel: str, values: Tensor, yscale: str = "linear") -> Panel:
    return Panel(title, xlabel, torch.arange(len(values)), {"": values}, ("linear", yscale))


def _of_mask_mod(mechanism: Mechanism) -> Card:
    return _masked_card(mechanism, made(mechanism, TILE), made(mechanism, LENGTH))


def _of_layers(mechanism: Mechanism) -> Card:
    masks = made(mechanism, TILE)
    counts = torch.tensor([_seen(masks(layer))[-1].sum() for layer in range(12)])
    shown = _masked_card(mechanism, masks(0), made(mechanism, LENGTH)(0))
    by_layer = _by_index("keys seen by the last query", "layer", counts)
    return replace(shown, values="score, layer 0", panels=(by_layer, shown.panels[1]))


def _of_pair(mechanism: Mechanism) -> Card:
    (score_mod, mask), (law, large) = made(mechanism, TILE), made(mechanism, LENGTH)
    changed = score_mod(_product(*_queries_and_keys()), *_indices())
    return replace(
        _masked_card(mechanism, mask, large, law),
        tile=changed.masked_fill(~_seen(mask), torch.nan),
    )


def _seen(mask_mod: Callable[..., Tensor]) -> Tensor:
    return mask_mod(*_indices()).expand(TILE, TILE)


def _masked_card(
    mechanism: Mechanism,
    mask: Callable[..., Tensor],
    large: Callable[..., Tensor],
    score_mod: ScoreMod | None = None,
) -> Card:
    """The card of a mask, for `TILE` positions and for `LENGTH`, and of what goes with it."""
    seen, law = _seen(mask), _masked(large, score_mod)
    tile = _product(*_queries_and_keys()).masked_fill(~seen, torch.nan)
    counts = _by_index(f"keys seen, of {TILE}", "query", seen.sum(1))
    return Card(mechanism, tile, "score", (counts, _visible(law)), law)


def _masked(mask_mod: Callable[..., Tensor], score_mod: ScoreMod | None = None) -> ScoreMod:
    change = PLAIN if score_mod is None else score_mod

    def law(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = mask_mod(b, h, q_idx, kv_idx)
        return torch.where(seen, change(score, b, h, q_idx, kv_idx), -torch.inf)

    return law


def _visible(law: ScoreMod) -> Panel:
    t = _distances()
    seen = predict(law, t, q_idx=LENGTH - 1).m_t.isfinite()
    return _by_distance("seen by the last query", t, seen.double())


def _of_transform(mechanism: Mechanism) -> Card:
    rotary = made(mechanism, LENGTH)
    if not isinstance(rotary, Rotary):
        q, k = _queries_and_keys()
        if mechanism.name == "coca":  # whose keys are a gate for each pair of channels
            k = k[..., : _CHANNELS // 2]
        tile = _causal(_product(rotary.queries(q), rotary.keys(k)))
        return Card(mechanism, tile, "score", (_last_row("scores", tile),), None)
    tile = _causal(_product(*map(rotary, _queries_and_keys())))
    t = _distances()
    at = torch.tensor([LENGTH - 1])
    same = torch.ones(1, 1, 1, _CHANNELS, dtype=torch.float64)
    aligned = rotary(same, at) @ rotary(same.expand(1, 1, len(t), -1), at - t).mT / _CHANNELS
    wavelengths = 2 * math.pi / rotary.frequencies
    pairs = _by_index("wavelength (tokens)", "pair of channels", wavelengths, "log")
    factor = torch.tensor(rotary.attention_factor**2, dtype=torch.float64)

    def sharpened(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return factor * score

    law = PLAIN if factor == 1 else sharpened
    alike = _by_distance("score, key = query", t, aligned.flatten())
    return Card(mechanism, tile, "score", (alike, pairs), law)


def _of_positions(mechanism: Mechanism) -> Card:
    positions, rotary = made(mechanism, TILE), score_mods.rope(_CHANNELS)
    tile = _causal(_product(*(rotary(x, positions) for x in _queries_and_keys())))
    panel = _by_index("position", "token", positions)
    return Card(mechanism, tile, "score by rope", (panel,), PLAIN)


def _of_two_branch(mechanism: Mechanism) -> Card:
    branches: TwoBranch = made(mechanism, LENGTH)
    q, k = _queries_and_keys()
    identity = torch.eye(TILE, dtype=q.dtype).expand(1, _HEADS, TILE, TILE)
    weights, lse = branches(q, k, identity, return_lse=True, impl="dense")
    tile = (weights.log() + lse[..., None])[0, 0]
    tile[tile.isneginf()] = torch.nan

    t = _distances()
    at = torch.tensor([LENGTH - 1])
    query = torch.ones(1, 1, 1, _CHANNELS, dtype=torch.float64)
    keys = query.expand(1, 1, len(t), -1)
    near = branches.rotary(query, at) @ branches.rotary(keys, at - t).mT
    far = (
        branches.rotary(query, branches.far_query(at))
        @ branches.rotary(keys, branches.far_key(at - t)).mT
    )
    aligned = torch.where(t < branches.window, near, far).flatten() / _CHANNELS

    window, sinks = branches.window, branches.sinks
    law = PLAIN
    if sinks is not None:
        law = _masked(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx < window) | (kv_idx < sinks))
    visible = _visible(law)
    aligned[visible.curves[""] == 0] = torch.nan
    panels = _by_distance("score, key = query", t, aligned), visible
    return Card(mechanism, tile, "score", panels, law)


def _of_post_op(mechanism: Mechanism) -> Card:
    post_op = made(mechanism, LENGTH)

    def applied(lse: Tensor) -> tuple[Tensor, Tensor]:
        """What the keys keep of 1, and the lse, of head 0."""
        ones = torch.ones(1, _HEADS, len(lse), 1, dtype=torch.float64)
        kept, after = post_op(ones, lse.expand(1, _HEADS, -1))
        return kept[0, 0, :, 0], after[0, 0]

    scores = _causal(_product(*_queries_and_keys()))
    lse = scores.nan_to_num(-torch.inf).logsumexp(-1)
    tile = scores - applied(lse)[1][:, None]
    n = _distances()
    kept, after = applied(n.double().log() + 0.5)  # ln E[Z] of n independent N(0, 1) logits
    panels = (
        Panel("share that keys get", "keys of the row", n, {"": kept}),
        Panel("lse", "keys of the row", n, {"": after}),
    )
    return Card(mechanism, tile, "ln weight", panels, PLAIN)


def _of_operator(mechanism: Mechanism) -> Card:
    operator = made(mechanism, TILE)
    if operator.__code__.co_varnames[0] == "score":
        return _of_score_mod(mechanism)
    q, k = _queries_and_keys()
    identity = torch.eye(TILE, dtype=q.dtype).expand(1, _HEADS, TILE, TILE)
    tile = operator(q, k, identity, impl="dense")[0, 0]
    tile[tile == 0] = torch.nan
    sums = _by_index("sum of the weights", "query", tile.nansum(1))
    return Card(mechanism, tile, "weight", (_last_row("weights", tile), sums), None)


def _last_row(values: str, tile: Tensor) -> Panel:
    return _by_index(f"{values} of the last query", "key", tile[-1])


_BY_KIND: dict[str, Callable[[Mechanism], Card]] = {
    "score_mod": _of_score_mod,
    "mask_mod": _of_mask_mod,
    "mask_mod by layer": _of_layers,
    "score_mod + mask_mod": _of_pair,
    "q,k transform": _of_transform,
    "position ids": _of_positions,
    "post-op": _of_post_op,
    "two-branch": _of_two_branch,
    "operator": _of_operator,
}
