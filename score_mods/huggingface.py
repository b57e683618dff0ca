"""Score_mods and position schemes in models of Hugging Face's transformers.

`register` gives transformers an attention function and a mask function of one name, by its own
`AttentionInterface` and `AttentionMaskInterface`, so no model code is touched. The score_mod and
the mask see positions, not slots: of decoded tokens, behind left padding, in static and sliding
caches and in packed documents alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from score_mods._captured import Mod, arguments_of, check_mask_mod, named, to_device, within
from score_mods._huggingface import mask_at_positions, positions_at, tables_at
from score_mods.attention import attention, check_impl
from score_mods.combine import compose
from score_mods.late_rotary import (
    PROBE,
    Late,
    embeddings_of,
    late_form,
    paired,
    pairings,
    set_frequencies,
)
from score_mods.masks import causal
from score_mods.rotary import Rotary
from score_mods.sinks import attention_sink
from score_mods.softcap import softcap as softcap_mod
from score_mods.two_branch import TwoBranch

_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
_registered: set[str] = set()
_guards: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


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
    dropout or a position bias, or is not by transformers' interface (Bloom, MPT), or if it is
    called with a mask of four axes. One that asks for no mask either (RWKV, Mamba) ignores the
    name. Call a model once before you compile it.
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
        at = positions_at(attention_mask, query, key, position_ids)
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
                q_at, kv_at = tables_at(at, query, key)
                options |= {"q_positions": q_at, "kv_positions": kv_at}
            out: Any = late(query, key, value, mod, further, **options)
        else:
            if late is not None:
                q_at, kv_at = tables_at(at, query, key)
                length = int(at.q_offset) + query.shape[2]
                rotary = late(length if at.q_table is None else int(q_at.max()) + 1)
                query, key = rotary(query, q_at), rotary(key, kv_at)
            mask = causal if at.plain else attention_mask
            out = attention(query, key, value, mod, mask, backend=backend, **options)
        if s_aux is not None:
            out, _ = attention_sink(s_aux)(*out)
        return out.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register(name, attend)
    transformers.AttentionMaskInterface.register(name, partial(mask_at_positions, mask_mod))
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
