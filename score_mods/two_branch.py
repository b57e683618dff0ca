"""Two-branch attention: near keys at their rotary positions, far keys at others.

The schemes here stretch a model trained on short contexts by rotating far pairs as if they were
nearer. The rotation then is no function of the query and the key apart, and the score no single
product: keys less than `window` tokens away take one rotation, all others a second one. Both ways
to compute that are exact:

    merge   two calls of attention with disjoint masks, put together by `merge`;
    single  one call with the queries [near, far], of twice the channels, on the keys [near, 0]
            followed by the keys [0, far]: the mask lets a query see the first copy of its near
            keys and the second copy of its far ones.

The far rotation puts a key at f(j) and a query at f(i) + window - f(window), so that the distance
is continuous at the window: f(j) is 0 for ReRoPE, j/factor for Leaky ReRoPE and floor(j/group) for
Self-Extend. LM-Infinite is ReRoPE with only the first keys among the far ones; StreamingLLM leaves
keys where they are and holds queries at the last position of its cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
from torch import Tensor

from score_mods._captured import Mod, check_mask_mod, described, made_for
from score_mods._checks import boolean, integer, number
from score_mods.attention import attention
from score_mods.combine import with_offset, with_positions
from score_mods.dense import check
from score_mods.masks import and_masks, bounds_of, causal, sliding_window
from score_mods.masks_sparse import first_keys
from score_mods.merge import merge
from score_mods.rotary import Rotary

Place = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class TwoBranch:
    """Causal attention whose far keys take another rotation than its near ones.

    Attributes:
        rotary: rotates queries and keys; from `rope` or another rotary scheme.
        window: keys less than this many tokens away are near, the query's own among them.
        far_query: from the positions of queries to those that the far rotation gives them.
        far_key: the same for keys.
        sinks: how many keys at the start of a sequence are seen when far; None for all.
    """

    rotary: Rotary
    window: int
    far_query: Place
    far_key: Place
    sinks: int | None = None
    _masks: tuple[Mod, Mod] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check what every scheme takes, and make its masks."""
        if not isinstance(self.rotary, Rotary):
            raise TypeError(f"rotary must be a Rotary, got {type(self.rotary).__name__}")
        integer("window", self.window)
        # Near and far; kept, because `create_block_mask` caches by the mask.
        masks = sliding_window(self.window), with_offset(causal, -self.window)
        object.__setattr__(self, "_masks", masks)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score_mod: Mod | None = None,
        mask_mod: Mod | None = None,
        *,
        q_positions: Tensor | None = None,
        kv_positions: Tensor | None = None,
        form: str = "merge",
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        impl: str = "flex",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention by either exact form.

        Args:
            q: queries, not rotated, `(B, H, T_q, D)`.
            k: keys, not rotated, `(B, H_kv, T, D)`.
            v: values, `(B, H_kv, T, D_v)`.
            score_mod: a further score_mod, by index as in `attention`.
            mask_mod: a further mask_mod, by index; causality is already seen to.
            q_positions: positions of the queries, `(T_q,)` or `(B, T_q)`: of decoded tokens, or
                starting again in every packed document. 0 to T - 1 if not given.
            kv_positions: positions of the keys, `(T,)` or `(B, T)`; 0 to T - 1 if not given.
            form: "merge" for two calls or "single" for one. Compiled FlexAttention gives no lse on
                a CPU, so "merge" needs impl="dense" there.
            scale: factor of the scores, 1/sqrt(D) if not given.
            enable_gqa: allow H to be a multiple of H_kv.
            return_lse: whether to return the rows' log-sum-exp too.
            impl: "flex" or "dense", as in `attention`.

        Returns:
            What `attention` returns.

        Raises:
            TypeError: if an argument has the wrong type.
            ValueError: if shapes do not fit, or `attention` cannot do what is asked.
        """
        if form not in ("merge", "single"):
            raise ValueError(f'form must be "merge" or "single", got {form!r}')
        if mask_mod is not None:
            check_mask_mod(mask_mod)
        check(q, k, v, score_mod, mask_mod, scale, enable_gqa)
        boolean("return_lse", return_lse)
        if form == "merge" and impl == "flex" and q.device.type == "cpu":
            raise ValueError(
                "compiled FlexAttention gives no lse on a CPU, which merging needs; "
                'use form="single" or impl="dense"'
            )
        T_q, T = q.shape[2], k.shape[2]
        if q_positions is None and T_q != T:
            raise ValueError(
                f"q_positions must be given where T_q is not T, got {T_q} queries and {T} keys"
            )
        near_mask, far_mask = self._masks
        # At the default positions the far keys that can be seen are a slice.
        seen = T
        if q_positions is not None or kv_positions is not None:
            at_q = torch.arange(T_q, device=q.device) if q_positions is None else q_positions
            at_kv = torch.arange(T, device=k.device) if kv_positions is None else kv_positions
            if self.sinks is not None:
                far_mask = and_masks(far_mask, first_keys(self.sinks))
            near_mask = with_positions(near_mask, at_q, at_kv)
            far_mask = with_positions(far_mask, at_q, at_kv)
        else:
            at_q = at_kv = torch.arange(T, device=q.device)
            seen = T if self.sinks is None else min(self.sinks, T)
        if mask_mod is not None:
            near_mask, far_mask = and_masks(near_mask, mask_mod), and_masks(far_mask, mask_mod)

        rotate = self.rotary
        near = rotate(q, at_q), rotate(k, at_kv)
        far = rotate(q, self.far_query(at_q)), rotate(k, self.far_key(at_kv))[:, :, :seen]
        attend = partial(
            attention,
            scale=q.shape[3] ** -0.5 if scale is None else scale,
            enable_gqa=enable_gqa,
            impl=impl,
        )
        if form == "merge":
            merged = merge(
                *attend(*near, v, score_mod, near_mask, return_lse=True),
                *attend(*far, v[:, :, :seen], score_mod, far_mask, return_lse=True),
            )
            return merged if return_lse else merged[0]

        either = _either if torch.compiler.is_compiling() else _either_cached
        queries = torch.cat([near[0], far[0]], -1)
        keys = torch.cat(
            [
                torch.cat([near[1], torch.zeros_like(near[1])], -1),
                torch.cat([torch.zeros_like(far[1]), far[1]], -1),
            ],
            2,
        )
        return attend(
            queries,
            keys,
            torch.cat([v, v[:, :, :seen]], 2),
            None if score_mod is None else _folded_score(score_mod, T),
            either(near_mask, far_mask, T),
            return_lse=return_lse,
        )


def _folded_score(score_mod: Mod, length: int) -> Mod:
    """The score_mod for keys that are followed by a second copy of the first of them."""
    T = torch.tensor(length)

    def folded_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score_mod(score, b, h, q_idx, torch.where(kv_idx < T, kv_idx, kv_idx - T))

    batch, queries, _ = made_for(score_mod)  # `check` has compared the number of keys
    folded_mod.made_for = batch, queries, math.inf  # type: ignore[attr-defined]
    return described(folded_mod, getattr(score_mod, "__name__", "score_mod"), score_mod)


def _either(first: Mod, second: Mod, length: int) -> Mod:
    """One mask for the first `length` keys, and another, counted from there, for the others."""
    T = torch.tensor(length)

    def either_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        # Each mask is evaluated everywhere, so the index must be within its tables.
        in_first = first(b, h, q_idx, torch.minimum(kv_idx, T - 1))
        in_second = second(b, h, q_idx, (kv_idx - T).clamp(min=0))
        return torch.where(kv_idx < T, in_first, in_second)

    first_bounds, second_bounds = bounds_of(first), bounds_of(second)
    if first_bounds is not None and second_bounds is not None:

        def bounds(b, h, q_lo, q_hi, kv_lo, kv_hi):  # type: ignore[no-untyped-def]
            some_1, every_1 = first_bounds(b, h, q_lo, q_hi, kv_lo, kv_hi.clamp(max=length - 1))
            some_2, every_2 = second_bounds(
                b, h, q_lo, q_hi, (kv_lo - length).clamp(min=0), kv_hi - length
            )
            in_1, in_2 = kv_lo < length, kv_hi >= length
            return (in_1 & some_1) | (in_2 & some_2), (~in_1 | every_1) & (~in_2 | every_2)

        either_mask.block_bounds = bounds  # type: ignore[attr-defined]
    return either_mask


_either_cached = lru_cache(maxsize=16)(_either)


def _stretched(rotary: Rotary, window: int, place: Place, sinks: int | None = None) -> TwoBranch:
    """Far keys at f(j), far queries at f(i) + window - f(window), for f = `place`."""

    def far_query(i: Tensor) -> Tensor:
        return place(i) + window - place(torch.full_like(i, window))

    return TwoBranch(rotary, window, far_query, place, sinks)


def rerope(rotary: Rotary, window: int) -> TwoBranch:
    """Rotates pairs `window` and more tokens apart as if they were `window` apart.

    The score is that of RoPE at distance min(t, window). The public code also multiplies queries
    by the clipped logarithm of their position: pass `logn(train_length)` as score_mod.

    Args:
        rotary: rotary scheme of the model.
        window: in tokens, at least 1, below the trained length; 512 in the public code.

    Returns:
        A `TwoBranch`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `window` is below 1.

    Reference: Su, "ReRoPE" (kexue.fm/archives/9708, 2023) and github.com/bojone/rerope, checked.
    """
    return _stretched(rotary, window, torch.zeros_like)


def leaky_rerope(rotary: Rotary, window: int, factor: float) -> TwoBranch:
    """Rotates pairs t >= window tokens apart as if they were window + (t - window)/factor apart.

    Args:
        rotary: rotary scheme of the model.
        window: in tokens, at least 1; 512 in the public code.
        factor: how much slower distance grows beyond the window, at least 1; 16 there.

    Returns:
        A `TwoBranch`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `window` or `factor` is below 1.

    Reference: as `rerope`, checked against its `leaky_rerope_patch.py`.
    """
    if number("factor", factor, positive=True) < 1:
        raise ValueError(f"factor must be at least 1, got {factor}")
    return _stretched(rotary, window, lambda i: i.double() / factor)


def self_extend(rotary: Rotary, window: int, group: int) -> TwoBranch:
    """Rotates pairs `window` and more tokens apart by the positions of groups of tokens.

    Beyond the window a key is at floor(j/group) and a query at floor(i/group) + window -
    floor(window/group). Where `group` does not divide `window`, the public code subtracts
    window/group in its prefill and rounds it down in decoding; here it is always rounded down.

    Args:
        rotary: rotary scheme of the model.
        window: in tokens, at least 1; 1024 in the public code.
        group: tokens in a group, at least 1; 8 there.

    Returns:
        A `TwoBranch`. Groups are counted from position 0, so packed documents need positions.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `window` or `group` is below 1.

    Reference: Jin et al., "LLM Maybe LongLM", arXiv 2401.01325, and github.com/datamllab/LongLM,
    checked.
    """
    integer("group", group)
    return _stretched(rotary, window, lambda i: i // group)


def self_extend_group(window: int, train_length: int, length: int) -> int:
    """The smallest group of `self_extend` that keeps distances within the trained length.

    ceil((length - window) / (train_length - window)): beyond the window, `length - window` tokens
    share the `train_length - window` distances that are left.

    Args:
        window: that of `self_extend`, in tokens, at least 1 and below `train_length`.
        train_length: tokens that the model was trained on.
        length: tokens that it is to read, at least 1.

    Returns:
        Tokens in a group; 1, with which `self_extend` is RoPE, up to the trained length.

    Raises:
        TypeError: if an argument is no int.
        ValueError: if one is out of its range.

    Reference: arXiv 2401.01325, section 3.3, solved for the group.

    >>> self_extend_group(1024, 8192, 65_536)
    9
    """
    integer("length", length)
    if not integer("window", window) < integer("train_length", train_length):
        raise ValueError(f"window must be below train_length {train_length}, got {window}")
    return max(1, -(-(length - window) // (train_length - window)))


def lm_infinite(rotary: Rotary, window: int, sinks: int = 10) -> TwoBranch:
    """Sees the last `window` keys and the first `sinks`, these as if at most `window` apart.

    The Λ-shaped mask with its distance cap: t < window by RoPE; of the other keys those with
    kv_idx < sinks, rotated for distance `window`.

    Args:
        rotary: rotary scheme of the model.
        window: keys in the window, at least 1; the trained length in the paper.
        sinks: keys at the start that stay visible, at least 1; 10 to 100 in the paper.

    Returns:
        A `TwoBranch`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `window` or `sinks` is below 1.

    Reference: Han et al., "LM-Infinite", arXiv 2308.16137, and github.com/Glaciohound/LM-Infinite,
    checked (without its option of the top-k keys in the middle).
    """
    return _stretched(rotary, window, torch.zeros_like, integer("sinks", sinks))


def streaming_llm(rotary: Rotary, window: int, sinks: int = 4) -> TwoBranch:
    """Sees the last `window` keys and the first `sinks`, at their positions inside the cache.

    A cache holds sinks + window keys, and positions are counted in it: once it is full, the query
    is at position sinks + window - 1 and the sinks stay where they are, while distances within the
    window are as ever.

    Args:
        rotary: rotary scheme of the model.
        window: keys in the window, the query's own among them, at least 1; 2000 in the paper's
            experiments, 512 by default in its code.
        sinks: keys at the start that stay in the cache, at least 1.

    Returns:
        A `TwoBranch`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `window` or `sinks` is below 1.

    Reference: Xiao et al., "Efficient Streaming Language Models with Attention Sinks",
    arXiv 2309.17453, and github.com/mit-han-lab/streaming-llm, checked.
    """
    last = integer("sinks", sinks) + integer("window", window) - 1
    return TwoBranch(rotary, window, lambda i: i.clamp(max=last), lambda i: i, sinks)
