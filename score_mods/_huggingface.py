"""Positions of the tokens that a model of transformers attends to, and its mask as a BlockMask.

The mask function is where transformers says which positions a cache holds. `mask_at_positions`
keeps them on the BlockMask that it returns, where the attention function of every layer finds
them by `positions_at`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from score_mods._captured import Mod, kept, within
from score_mods.combine import with_offset, with_positions
from score_mods.masks import and_masks, built_block_mask, causal, create_block_mask


@dataclass(frozen=True)
class Positions:
    """Positions of a layer's queries and keys.

    Attributes:
        q_offset: position of the first query, an int or a 0-d tensor.
        kv_offset: position of the first key.
        shift: both as 0-d tensors on the model's device.
        q_table, kv_table: positions of queries and keys, `(B, T)`, where there is padding.
        plain: whether the mask is nothing but causal.
        packed: positions in packed documents, `(B, T)`, for models that hand on no `position_ids`.
        seen: the score_mods that were asked for `at` these positions, by their ids.
    """

    q_offset: int | Tensor
    kv_offset: int
    shift: tuple[Tensor, Tensor]
    q_table: Tensor | None
    kv_table: Tensor | None
    plain: bool
    packed: Tensor | None = None
    seen: dict[int, Mod] = field(default_factory=dict, init=False)

    def at(self, score_mod: Mod) -> Mod:
        """The score_mod at these positions, one for all layers of a forward pass."""
        if torch.compiler.is_compiling():
            return self._made(score_mod)
        if id(score_mod) not in self.seen:
            self.seen[id(score_mod)] = self._made(score_mod)
        return self.seen[id(score_mod)]

    def _made(self, score_mod: Mod) -> Mod:
        if self.q_table is not None and self.kv_table is not None:
            return with_positions(score_mod, self.q_table, self.kv_table)
        return score_mod if self.plain else with_offset(score_mod, *self.shift)


def mask_at_positions(
    further: Mod | None,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Mod,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> BlockMask:
    """The mask function that transformers calls, once for each kind of layer.

    `further` is what `register` was given.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if config is not None and not torch.compiler.is_compiling():
        _refuse_own_attention(config.__class__)
    if mask_function is bidirectional_mask_function:
        raise ValueError("model has no causal attention: one of its layers attends both ways")
    if isinstance(q_offset, Tensor):
        # A static cache counts on in place before attention comes.
        q_offset = kept(q_offset.clone())
        q_shift = q_offset.to(device)
    else:
        q_shift = torch.full((), q_offset, device=device)
        if attention_mask is not None and attention_mask.shape[1] < q_length + q_offset:
            raise ValueError(
                f"attention_mask must have shape (B, {q_length + q_offset}), for all tokens so "
                f"far, got {tuple(attention_mask.shape)}"
            )
    shift = q_shift, torch.full((), kv_offset, device=device)
    is_causal = mask_function is causal_mask_function
    mask_mod = causal if is_causal else mask_function
    if further is not None:
        mask_mod = and_masks(mask_mod, further)
    q_table = kv_table = None
    if attention_mask is not None and (
        torch.compiler.is_compiling() or not bool(attention_mask.all())
    ):
        missing = kv_length + kv_offset - attention_mask.shape[1]
        real = kept(nn.functional.pad(attention_mask, (0, max(missing, 0))))
        positions = (real.cumsum(1) - 1).clamp(min=0)
        q_table = kept(positions[:, torch.arange(q_length, device=device) + q_offset])
        kv_table = kept(positions[:, torch.arange(kv_length, device=device) + kv_offset])
        mask_mod = and_masks(mask_mod, _real(real))
    starts_at_zero = isinstance(q_offset, int) and q_offset == 0 and kv_offset == 0
    if not starts_at_zero:
        as_tensors = torch.compiler.is_compiling() or isinstance(q_offset, Tensor)
        mask_mod = with_offset(mask_mod, *(shift if as_tensors else (q_offset, kv_offset)))
    plain = mask_mod is causal
    if plain:
        block_mask = create_block_mask(mask_mod, None, None, q_length, kv_length, device)
    else:  # a mask of this forward pass alone
        block_mask = built_block_mask(
            mask_mod,
            1 if is_causal and further is None and q_table is None else batch_size,
            1,
            q_length,
            kv_length,
            torch.device(device),
            compute_q_blocks=torch.is_grad_enabled(),
        )
    whole = not plain and q_length == kv_length and not torch.compiler.is_compiling()
    packed = _packed(mask_function) if whole else None
    block_mask.positions = Positions(  # type: ignore[attr-defined]
        q_offset, kv_offset, shift, q_table, kv_table, plain, packed
    )
    return block_mask


@lru_cache(maxsize=64)
def _refuse_own_attention(config: Any) -> None:
    """Raise ValueError if models of a config ask for a mask, and then attend by themselves."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM._model_mapping.get(config, None)
    # The first tells by the model's source, which may be missing; the second is a flag.
    if not getattr(model, "_can_set_attn_implementation", bool)() and not getattr(
        model, "_supports_attention_backend", True
    ):
        raise ValueError(
            "model must call an attention function of transformers' interface, "
            f"got {model.__name__}, which attends by itself"
        )


def _packed(mask_function: Mod) -> Tensor | None:
    """Each token's position in its document, where transformers has found packed ones."""
    for part in within(mask_function):
        if getattr(part, "__qualname__", "").startswith("packed_sequence_mask_function."):
            numbers = next(x for x in within(part) if isinstance(x, Tensor))
            index = torch.arange(numbers.shape[1], device=numbers.device).expand_as(numbers)
            first = nn.functional.pad(numbers.diff(dim=1) != 0, (1, 0), value=True)
            return index - torch.where(first, index, 0).cummax(1).values
    return None


def _real(real: Tensor) -> Mod:
    def real_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return real[b, kv_idx]

    return real_mask


def positions_at(
    attention_mask: Any, query: Tensor, key: Tensor, position_ids: Tensor | None
) -> Positions:
    """The positions that `mask_at_positions` left on its mask, or those of packed documents."""
    at = getattr(attention_mask, "positions", None)
    if at is None:
        if isinstance(attention_mask, Tensor):
            raise ValueError(
                f"attention_mask must have shape (B, T), got {tuple(attention_mask.shape)}"
            )
        raise ValueError("model has an attention layer without a causal mask")
    starts_at_zero = isinstance(at.q_offset, int) and at.q_offset == 0
    same = query.shape[2] == key.shape[2]
    if at.plain or at.q_table is not None or not (starts_at_zero and same):
        return at
    # Transformers looks for packed documents in position_ids, and its mask is then not plain.
    given = position_ids is not None and position_ids.ndim == 2
    table = position_ids if given else at.packed
    if table is None:
        return at
    table = table.expand(query.shape[0], -1)
    return replace(at, q_table=table, kv_table=table)


def tables_at(at: Positions, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    if at.q_table is not None and at.kv_table is not None:
        return at.q_table, at.kv_table
    q_idx = torch.arange(query.shape[2], device=query.device)
    kv_idx = torch.arange(key.shape[2], device=query.device)
    return q_idx + at.q_offset, kv_idx + at.kv_offset
