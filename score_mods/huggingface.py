"""Score_mods and position schemes in models of Hugging Face's transformers.

`register` gives transformers an attention function and a mask function of one name, by its own
`AttentionInterface` and `AttentionMaskInterface`, so no model code is touched. The mask function
is where transformers says which positions a cache holds; it keeps them on the BlockMask that it
returns, and the attention function of every layer reads them there. The score_mod and the mask
thus see positions, not slots: of decoded tokens, behind left padding, in static and sliding caches
and in packed documents alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from score_mods._captured import Mod, arguments_of, check_mask_mod, kept, named, to_device, within
from score_mods.attention import attention, check_impl
from score_mods.combine import compose, with_offset, with_positions
from score_mods.late_rotary import (
    PROBE,
    Late,
    embeddings_of,
    late_form,
    paired,
    pairings,
    set_frequencies,
)
from score_mods.masks import and_masks, built_block_mask, causal, create_block_mask
from score_mods.rotary import Rotary
from score_mods.sinks import attention_sink
from score_mods.softcap import softcap as softcap_mod
from score_mods.two_branch import TwoBranch

_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
_registered: set[str] = set()
_guards: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Positions:
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


def register(
    name: str,
    score_mod: Mod | Callable[[int], Mod | None] | None,
    *,
    mask_mod: Mod | None = None,
    impl: str = "flex",
    backend: str = "auto",
) -> None:
    """Makes `attn_implementation=name` attention with a score_mod, in any causal model.

    The model's own mask, scale, grouped heads, softcap (before the score_mod) and sinks are kept.
    Positions are those of the tokens: of padding nothing is counted, and packed documents start
    again at 0, without a cache (`use_cache=False`): transformers looks for them there alone. A
    compiled model has to hand on `position_ids` to its layers for that. Under autocast, queries,
    keys and values are cast to its dtype.

    Args:
        name: for `from_pretrained(..., attn_implementation=name)` and
            `model.set_attn_implementation(name)`.
        score_mod: a score_mod for all layers; None for plain attention; or a function from a
            layer's index to either, for models with local and global layers.
        mask_mod: a mask_mod besides the model's own, such as `sliding_window(1024)`; it has
            indices in the sequence, of padding too.
        impl: "flex" or "dense", as in `attention`; "dense" to train on a CPU, and there for models
            with sinks.
        backend: of FlexAttention, as in `attention`.

    Raises:
        TypeError: if `name` is no string, `score_mod` none of the three or `mask_mod` no mask_mod.
        ValueError: if `name` is one of transformers' own or contains "flash", by which it knows
            some of them, or `impl` or `backend` is unknown.
        ImportError: if transformers is missing.

    The model raises a ValueError that says so in one line if its attention is not causal, has
    dropout or a position bias, or if it is called with a mask of four axes. Call it once before
    you compile it.
    """
    transformers = _transformers()
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {type(name).__name__}")
    if name not in _registered and name in ("eager", *transformers.AttentionInterface()):
        raise ValueError(f"name must not be one of transformers' own, got {name!r}")
    if "flash" in name:
        raise ValueError(f"name must not contain 'flash', transformers' mark, got {name!r}")
    check_impl(impl, backend)
    if mask_mod is not None:
        check_mask_mod(mask_mod)
    by_layer = _is_by_layer(score_mod)
    if not by_layer:
        _checked(score_mod)
    mods: dict[tuple[int | None, float | None], Mod | None] = {}
    captured: dict[tuple[int | None, float | None], list[Tensor]] = {}
    # What is captured is moved once for each device, which a compiled model could not do, and
    # what is learned anew in every call.
    moved: dict[tuple[int | None, float | None, torch.device], Mod] = {}

    def mod_of(layer: int | None, cap: float | None, device: torch.device) -> Mod | None:
        compiling = torch.compiler.is_compiling()
        if (layer, cap, device) in moved and (
            compiling or not any(x.requires_grad for x in captured[layer, cap])
        ):
            return moved[layer, cap, device]
        if (layer, cap) in mods:
            mod: Any = mods[layer, cap]
        else:
            mod = _checked(score_mod(layer)) if by_layer else score_mod  # type: ignore[arg-type, misc]
            if cap is not None:
                mod = softcap_mod(cap) if mod is None else compose(softcap_mod(cap), mod)
        if not compiling:
            mods[layer, cap] = mod
            captured[layer, cap] = [x for x in within(mod) if isinstance(x, Tensor)]
            if mod is not None:
                mod = moved[layer, cap, device] = to_device(mod, device)
        elif mod is not None and device.type != "cpu":
            raise ValueError(f"call the model once on {device} before you compile it")
        return mod

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if dropout:
            raise ValueError(
                f"attention dropout must be 0, got {dropout}: call model.eval(), or set it to 0 "
                "in the model's config"
            )
        if position_bias is not None:
            raise ValueError(f"attn_implementation {name!r} takes no position bias of the model")
        query, key, value = _autocast(query, key, value)
        at = _positions(attention_mask, query, key, position_ids)
        mod = mod_of(module.layer_idx if by_layer else None, softcap, query.device)  # type: ignore[arg-type]
        if mod is not None:
            mod = at.at(mod)
        options: dict[str, Any] = {
            "scale": scaling,
            "enable_gqa": True,
            "return_lse": s_aux is not None,
            "impl": impl,
        }
        late = getattr(module, "late_rotary", None)
        if isinstance(late, TwoBranch):
            if backend == "flash":
                raise ValueError('backend="flash" has no two-branch attention; use "auto"')
            further = attention_mask.mask_mod
            if at.plain and query.shape[2] == key.shape[2]:
                further = None  # causal is the default, whose masks have their blocks kept
            else:
                q_at, kv_at = _tables(at, query, key)
                options |= {"q_positions": q_at, "kv_positions": kv_at}
            out: Any = late(query, key, value, mod, further, **options)
        else:
            if late is not None:
                q_at, kv_at = _tables(at, query, key)
                length = int(at.q_offset) + query.shape[2]
                rotary = late(length if at.q_table is None else int(q_at.max()) + 1)
                query, key = rotary(query, q_at), rotary(key, kv_at)
            mask = causal if at.plain else attention_mask
            out = attention(query, key, value, mod, mask, backend=backend, **options)
        if s_aux is not None:
            out, _ = attention_sink(s_aux)(*out)
        return out.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register(name, attend)
    transformers.AttentionMaskInterface.register(name, partial(_mask, mask_mod))
    _registered.add(name)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in autocast's dtype, in which models leave values but not what they rotate."""
    kind = tensors[0].device.type
    if tensors[0].dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) for x in tensors)


def _is_by_layer(score_mod: Any) -> bool:
    """Whether it is a callable of one argument, besides those that have defaults."""
    try:
        arguments = inspect.signature(score_mod).parameters.values()
    except (TypeError, ValueError):  # not callable, or callable without a signature
        return False
    needed = [x for x in arguments if x.default is x.empty]
    return len(needed) == 1 and needed[0].kind in _POSITIONAL


def _checked(score_mod: Any) -> Mod | None:
    if score_mod is not None and arguments_of(score_mod) != 5:
        raise TypeError(
            "score_mod must be a score_mod (score, b, h, q_idx, kv_idx), None or a function of "
            f"the layer's index, got {named(score_mod)}"
        )
    return score_mod


def _mask(
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
    **kwargs: Any,
) -> BlockMask:
    """The mask function that transformers calls, once for each kind of layer.

    `further` is what `register` was given.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

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
    block_mask.positions = _Positions(  # type: ignore[attr-defined]
        q_offset, kv_offset, shift, q_table, kv_table, plain, _packed(mask_function)
    )
    return block_mask


def _packed(mask_function: Mod) -> Tensor | None:
    """Each token's position in its document, where transformers has found packed ones."""
    if torch.compiler.is_compiling():
        return None
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


def _positions(
    attention_mask: Any, query: Tensor, key: Tensor, position_ids: Tensor | None
) -> _Positions:
    """The positions that `_mask` left on its mask, or those of packed documents."""
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


def _tables(at: _Positions, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    if at.q_table is not None and at.kv_table is not None:
        return at.q_table, at.kv_table
    q_idx = torch.arange(query.shape[2], device=query.device)
    kv_idx = torch.arange(key.shape[2], device=query.device)
    return q_idx + at.q_offset, kv_idx + at.kv_offset


def patch_rotary(model: Any, rotary: Rotary | Late) -> None:
    """Swaps the position scheme of a loaded model, in place.

    A `Rotary` (p-RoPE, NTK, YaRN) replaces the frequencies and the factor on cos and sin. Schemes
    that need keys unrotated in the cache make the model's own rotary embedding the identity, and
    the attention function of `register` rotates: a `TwoBranch` (Self-Extend, ReRoPE), a function
    from the length of the context to a `Rotary` (dynamic NTK), or a `Rotary` whose first tokens
    have frequencies of their own. The model pairs channels as before, and its layers without
    rotary positions stay without; for these schemes, both are seen in a run of three tokens. The
    change is not saved with the model, and the last one holds.

    Args:
        model: a transformers model whose rotary embedding has one set of frequencies; of a
            multimodal model its language model.
        rotary: the scheme, for as many channels as the model rotates.

    Raises:
        TypeError: if `model` is no module, or `rotary` none of the three.
        ValueError: if the model has no such rotary embedding, or one of another size; if keys are
            to be unrotated and its layers call no attention function of transformers' interface,
            or rotate other than the leading channels of each head.

    A model whose keys are unrotated raises a ValueError if it runs under an `attn_implementation`
    that is none of `register`.

    >>> from score_mods import dynamic_ntk_rope
    >>> def scheme(length):
    ...     return dynamic_ntk_rope(64, length, 8192)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a model of transformers, got {type(model).__name__}")
    late, rotary = late_form(rotary)
    embeddings = embeddings_of(model, rotary)
    turned: MutableMapping[nn.Module, bool | None] = {}
    schemes: dict[bool | None, Late | None] = {None: None}
    if late is None:
        set_frequencies(embeddings, rotary.frequencies, rotary.attention_factor)
    else:
        turned = pairings(model, embeddings, _transformers().AttentionInterface.register)
        schemes |= {
            pairs: paired(late, pairs, embeddings[0].inv_freq.device) for pairs in (False, True)
        }
        set_frequencies(embeddings, torch.zeros_like(rotary.frequencies))
    for embedding in embeddings:
        if embedding in _guards:
            _guards.pop(embedding).remove()
        if late is not None:
            _guards[embedding] = embedding.register_forward_pre_hook(_guard(model))
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.late_rotary = schemes[turned.get(module)]  # type: ignore[assignment]


def _guard(model: Any) -> Callable[..., None]:
    def must_rotate(module: nn.Module, args: Any) -> None:
        name = model.config._attn_implementation
        if name not in _registered and name != PROBE:
            raise ValueError(
                f"attn_implementation must be one of register, which rotates keys, got {name!r}"
            )

    return must_rotate


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "register needs transformers: pip install 'scale-invariant-attention[hf]'"
        ) from error
    return transformers
