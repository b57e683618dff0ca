"""Combining score_mods and mask_mods: in sequence, at other positions, sparing some keys."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

from score_mods._captured import (
    Mod,
    at_head,
    check_score_mod,
    described,
    is_mask_mod,
    made_for,
    scalar,
)
from score_mods._checks import boolean, integer, integers, kind_of
from score_mods.catalogue import stages
from score_mods.masks import bounds_of

AnyMod = TypeVar("AnyMod", bound=Mod)


def compose(*score_mods: Mod, check_order: bool = True) -> Mod:
    """Applies score_mods one after the other, from left to right.

    `s' = mods[-1](... mods[1](mods[0](s)))`. What is done to a score has its order:

    1. scale: 1/sqrt(D), or `scale=1` for `t5_bias`;
    2. rotate: rotary schemes, on queries and keys;
    3. temperature: `logn`, `llama4_temperature` and the like, also on the queries;
    4. cap: `softcap`;
    5. bias or affine change by distance: `alibi`, `scale_invariant`;
    6. mask;
    7. softmax;
    8. sinks, on the output and its lse.

    1 and 2 are linear and may change places. `compose` is for 3 to 5, and refuses what is almost
    always a mistake: two temperatures that grow with length or distance (`scale_invariant` is
    one), which sharpen attention twice; and a softcap after a bias or an affine change, which cuts
    off the far distances that these set apart. Score_mods that are not of this library are not
    checked.

    Args:
        score_mods: score_mods; none gives the identity.
        check_order: False to allow what would be refused.

    Returns:
        A score_mod.

    Raises:
        TypeError: if an argument is no score_mod.
        ValueError: if two of them are for different numbers of heads, are both temperatures, or
            are a softcap after a bias.

    >>> twice = lambda score, b, h, q_idx, kv_idx: 2 * score
    >>> plus_one = lambda score, b, h, q_idx, kv_idx: score + 1
    >>> compose(twice, plus_one)(3, 0, 0, 0, 0), compose(plus_one, twice)(3, 0, 0, 0, 0)
    (7, 8)
    """
    for position, mod in enumerate(score_mods):
        if is_mask_mod(mod, f"argument {position}"):
            raise TypeError(
                f"argument {position} of compose must be a score_mod, got a mask_mod; "
                "combine mask_mods with and_masks or or_masks"
            )
    if boolean("check_order", check_order):
        _check_order([name for mod in score_mods for name in getattr(mod, "parts", ())])

    def composed_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        for mod in score_mods:
            score = mod(score, b, h, q_idx, kv_idx)
        return score

    name = " then ".join(getattr(mod, "__name__", "score_mod") for mod in score_mods)
    return described(composed_mod, name or "identity", *score_mods)


def _check_order(names: list[str]) -> None:
    temperature = bias = None
    for name in names:
        stage = stages.get(name)
        if stage in ("temperature", "affine"):
            if temperature is not None:
                raise ValueError(
                    f"compose got two temperatures, {temperature} and {name}, which sharpen "
                    "attention twice; leave one out, or say check_order=False"
                )
            temperature = name
        if stage == "softcap" and bias is not None:
            raise ValueError(
                f"compose got {name} after {bias}: a cap comes before a bias or an affine change; "
                "change their order, or say check_order=False"
            )
        if stage in ("bias", "affine"):
            bias = name


def _offset(name: str, value: int | Tensor) -> Tensor:
    if isinstance(value, Tensor):
        if integers(name, value).ndim:
            raise ValueError(
                f"{name} must be an int or a 0-d integer tensor, got shape {tuple(value.shape)}"
            )
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name} must be an int or a 0-d integer tensor, got {type(value).__name__}"
        )
    return scalar(value, torch.int64)


def with_offset(mod: AnyMod, q_offset: int | Tensor, kv_offset: int | Tensor = 0) -> AnyMod:
    """Shifts the positions that a score_mod or mask_mod sees: decoding with a cache.

    The mod is called with q_idx + q_offset and kv_idx + kv_offset. The last `T_q` of `T` positions
    against the whole cache are `with_offset(mod, T - T_q)`.

    Args:
        mod: a score_mod or mask_mod.
        q_offset: position of the first query, an int or a 0-d integer tensor. Neither is compiled
            in; a tensor on the queries' device may be updated in place from token to token.
        kv_offset: position of the first key, likewise.

    Returns:
        A mod of the same kind.

    Raises:
        TypeError: if `mod` is neither kind, or an offset has the wrong type.
        ValueError: if an offset is a tensor of more than one number, or below 0 for a mod that
            looks positions up in a table.
    """
    q_shift, kv_shift = _offset("q_offset", q_offset), _offset("kv_offset", kv_offset)
    batch, *reach = made_for(mod)
    for axis, (name, offset) in enumerate((("q_offset", q_offset), ("kv_offset", kv_offset))):
        if reach[axis] == math.inf:
            continue
        if isinstance(offset, Tensor):
            reach[axis] = math.inf  # it may change
        elif offset < 0:
            raise ValueError(
                f"{name} must be at least 0 for a mod of {reach[axis]} positions, got {offset}"
            )
        else:
            reach[axis] -= offset

    if not is_mask_mod(mod):

        def offset_score_mod(
            score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
        ) -> Tensor:
            q_at = q_idx + at_head(q_shift, h, q_idx.dtype)
            return mod(score, b, h, q_at, kv_idx + at_head(kv_shift, h, kv_idx.dtype))

        offset_score_mod.made_for = (batch, *reach)  # type: ignore[attr-defined]
        return described(offset_score_mod, getattr(mod, "__name__", "score_mod"), mod)  # type: ignore[return-value]

    def offset_mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mod(b, h, q_idx + q_shift.to(q_idx.dtype), kv_idx + kv_shift.to(kv_idx.dtype))

    # Blocks are cached, and a tensor can change after that: any block may then hold a visible key
    # (see masks.py).
    if isinstance(q_offset, Tensor) or isinstance(kv_offset, Tensor):
        offset_mask_mod.block_bounds = _any_block  # type: ignore[attr-defined]
    elif (bounds := bounds_of(mod)) is not None:

        def shifted_bounds(b, h, q_lo, q_hi, kv_lo, kv_hi):  # type: ignore[no-untyped-def]
            return bounds(
                b, h, q_lo + q_offset, q_hi + q_offset, kv_lo + kv_offset, kv_hi + kv_offset
            )

        offset_mask_mod.block_bounds = shifted_bounds  # type: ignore[attr-defined]
    offset_mask_mod.made_for = (batch, *reach)  # type: ignore[attr-defined]
    return described(offset_mask_mod, getattr(mod, "__name__", "mask_mod"))  # type: ignore[return-value]


def _any_block(
    b: Tensor, h: Tensor, q_lo: Tensor, q_hi: Tensor, kv_lo: Tensor, kv_hi: Tensor
) -> tuple[Tensor, Tensor]:
    every = torch.zeros_like(q_lo * kv_lo, dtype=torch.bool)
    return ~every, every


def with_positions(mod: AnyMod, q_positions: Tensor, kv_positions: Tensor | None = None) -> AnyMod:
    """Gives a score_mod or mask_mod positions from tables: packed documents, ragged caches.

    The mod is called with q_positions[b, q_idx] and kv_positions[b, kv_idx].

    Args:
        mod: a score_mod or mask_mod.
        q_positions: positions of the queries, integers, `(T_q,)` or `(B, T_q)`.
        kv_positions: positions of the keys, `(T,)` or `(B, T)`; those of the queries if not given.

    Returns:
        A mod of the same kind.

    Raises:
        TypeError: if `mod` is neither kind, or a table is no int32 or int64 tensor.
        ValueError: if a table has not one or two axes, or a position that `mod` was not made for.
    """
    kv_table = q_positions if kv_positions is None else kv_positions
    for name, table in (("q_positions", q_positions), ("kv_positions", kv_table)):
        if not isinstance(table, Tensor) or table.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{name} must be an int32 or int64 tensor, got {kind_of(table)}")
        if table.ndim not in (1, 2):
            raise ValueError(f"{name} must have shape (T,) or (B, T), got {tuple(table.shape)}")

    batch, *known = made_for(mod)
    for name, table, end in zip(
        ("q_positions", "kv_positions"), (q_positions, kv_table), known, strict=True
    ):
        if end < math.inf and table.max() >= end:
            raise ValueError(
                f"{name} must be below {end} for a mod of so many positions, got {table.max()}"
            )
        # A KVCache has -1 where it has no token, which its mask hides.
        if end < math.inf and not is_mask_mod(mod) and table.min() < 0:
            raise ValueError(
                f"{name} must be at least 0 for a score_mod of {end} positions, got {table.min()}"
            )
    rows: list[float] = [x.shape[0] for x in (q_positions, kv_table) if x.ndim == 2]
    if batch < math.inf:
        rows.append(batch)
    batch = min(rows) if rows else math.inf  # min's default does not compile
    reach = (batch, q_positions.shape[-1], kv_table.shape[-1])

    def at(table: Tensor, b: Tensor, index: Tensor) -> Tensor:
        return (table[index] if table.ndim == 1 else table[b, index]).to(index.dtype)

    if is_mask_mod(mod):

        def positioned_mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return mod(b, h, at(q_positions, b, q_idx), at(kv_table, b, kv_idx))

        positioned_mask_mod.made_for = reach  # type: ignore[attr-defined]
        return described(positioned_mask_mod, getattr(mod, "__name__", "mask_mod"))  # type: ignore[return-value]

    def positioned_score_mod(
        score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        return mod(score, b, h, at(q_positions, b, q_idx), at(kv_table, b, kv_idx))

    positioned_score_mod.made_for = reach  # type: ignore[attr-defined]
    return described(positioned_score_mod, getattr(mod, "__name__", "score_mod"), mod)  # type: ignore[return-value]


def exempt_keys(score_mod: Mod, n: int) -> Mod:
    """Leaves the scores of the first n keys as they are: attention sinks.

    s' = s where kv_idx < n, else score_mod(s).

    Args:
        score_mod: the score_mod for the other keys.
        n: how many keys to exempt, at least 0.

    Returns:
        A score_mod.

    Raises:
        TypeError: if `score_mod` is none, or `n` no int.
        ValueError: if `n` is negative.
    """
    check_score_mod(score_mod)
    count = torch.tensor(integer("n", n, at_least=0))

    def exempt_keys_mod(
        score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        changed = score_mod(score, b, h, q_idx, kv_idx)
        return torch.where(kv_idx < count, score.to(changed.dtype), changed)

    described(exempt_keys_mod, getattr(score_mod, "__name__", "score_mod"), score_mod)
    exempt_keys_mod.parts += ("exempt_keys",)  # type: ignore[attr-defined]
    return exempt_keys_mod
