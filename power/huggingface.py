"""Power attention in the place of the attention of a Hugging Face causal model.

The model keeps its projections, its norms of queries and keys and its rotary embedding, and its
caches keep their class: where such a cache had the keys and values of a replaced layer, it has the
layer's `DecodeState`, whose size is fixed. Which tokens are padding, and where one packed document
ends and the next begins, reaches a layer as the number of each token's sequence, 0 for padding;
transformers asks a mask function of this module for it, by its `AttentionMaskInterface`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from power.attention import Impl, power_attention
from power.cache import PowerCacheLayer
from power.modules import PowerAttention

_NAME = "power_attention"
_PROBE = "power_attention_probe"
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("q_norm", "k_norm")


def replace_attention(
    model: Any,
    *,
    layers: Sequence[int] | None = None,
    deg: int = 2,
    gated: bool = True,
    horizons: tuple[float, float] = (16, 16384),
    norm: bool = False,
    impl: Impl = "auto",
) -> None:
    """Put power attention into a causal language model of transformers, in place.

    The layers are then `PowerSelfAttention`: they train, take padding, and documents packed by
    `position_ids` (without a cache, as transformers does), and `generate()` decodes with them at a
    cost that does not grow. A compiled model takes neither padding nor packed documents. Gates and
    norms are new parameters, so a pretrained model has to be trained on; before loading a state
    dict that was saved afterwards, make the model from its config and replace its attention.

    Args:
        model: A model such as Llama, Mistral without a window, or Qwen3.
        layers: Indices of the layers to replace; None for all. Where some stay, the model's
            `attn_implementation` must be "sdpa" or "eager".
        deg: The even power.
        gated: Whether there are gates, as in `PowerAttention`.
        horizons: Their bounds in tokens.
        norm: Whether an RMS norm follows each head's output.
        impl: "auto", "triton" or "reference", as in `power_attention`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the model holds no weights, `layers` names none of its own, or a layer does
            what power attention would leave out: a sliding window, a mask of its own, a softcap,
            sinks, dropout, attention both ways, or changes of queries and keys besides norms and
            the rotary embedding.
        ImportError: If transformers is missing.

    Reference: Gelada et al., "Scaling Context Requires Rethinking Attention" (arXiv
    2507.04239).
    """
    transformers = _transformers()
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(f"model must be a model of transformers, got {type(model).__name__}")
    if model.device.type == "meta":
        raise ValueError("model must hold its weights, got one on the meta device")
    if layers is not None and not (
        isinstance(layers, (list, tuple, range)) and all(type(layer) is int for layer in layers)
    ):
        raise TypeError(f"layers must be a list of ints or None, got {layers!r}")
    transformers.AttentionInterface.register(_NAME, _not_replaced)
    transformers.AttentionInterface.register(_PROBE, _probe)
    transformers.AttentionMaskInterface.register(_NAME, _sequences_of)
    transformers.cache_utils.CacheLayerMixin.register(PowerCacheLayer)
    found = {
        module.layer_idx: (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "layer_idx")
        and all(hasattr(module, projection) for projection in _PROJECTIONS)
        and not isinstance(module, PowerSelfAttention)
    }
    if not found:
        raise ValueError(
            f"model must have attention layers with {', '.join(_PROJECTIONS)}, "
            f"got {type(model).__name__}, which has none to replace"
        )
    chosen = list(found) if layers is None else list(dict.fromkeys(layers))
    if not chosen or not found.keys() >= set(chosen):
        raise ValueError(f"layers must be among {sorted(found)}, got {chosen}")
    seen = _observe(model, [found[layer][1] for layer in chosen])
    options = {"deg": deg, "gated": gated, "horizons": horizons, "norm": norm, "impl": impl}
    made = {layer: _made(found[layer][1], seen.get(layer), options) for layer in chosen}
    for layer, replacement in made.items():
        parent, _, child = found[layer][0].rpartition(".")
        setattr(model.get_submodule(parent), child, replacement)
    if len(chosen) == len(found):
        model.set_attn_implementation(_NAME)


class PowerSelfAttention(PowerAttention):
    """A model's attention layer by power attention, with the model's own projections.

    `replace_attention` makes it. It has what `PowerAttention` has, and where that takes positions,
    the cosines and sines of the model's rotary embedding, stacked.

    Args:
        attention: The layer whose `q_proj`, `k_proj`, `v_proj`, `o_proj`, and `q_norm` and
            `k_norm` where it has them, are taken over.
        heads: Numbers of query heads and of key heads.
        widths: Channels of the input, of a query and of a value.
        options: As in `PowerAttention`.

    Raises:
        TypeError: As in `PowerAttention`.
        ValueError: As in `PowerAttention`.
    """

    def __init__(
        self,
        attention: nn.Module,
        heads: tuple[int, int],
        widths: tuple[int, int, int],
        **options: Any,
    ) -> None:
        super().__init__(
            widths[0],
            heads[0],
            num_kv_heads=heads[1],
            head_dim=widths[1],
            value_dim=widths[2],
            **options,
        )
        for name in (*_PROJECTIONS, *(name for name in _NORMS if hasattr(attention, name))):
            setattr(self, name, getattr(attention, name))
        self.layer_idx: int = attention.layer_idx  # type: ignore[assignment]
        self.config: Any = attention.config
        self.turn = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        self.rotary = self._rotate

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend, as the model calls its attention layers.

        Args:
            hidden_states: Inputs `[B, T, dim]`.
            position_embeddings: Cosines and sines of the model's rotary embedding.
            attention_mask: What the model's mask function made.
            cache: A cache of transformers, or None.
            past_key_values: The same, by its name before transformers 5.24.
            kwargs: What else the model hands on; not used.

        Returns:
            `[B, T, dim]`, and None for the weights, which are never formed.

        Raises:
            ValueError: If the mask is not causal, the cache was filled by another attention, or
                gradients are asked for while decoding.
        """
        held = _layer_of(past_key_values if cache is None else cache, self.layer_idx)
        tokens = hidden_states.shape[1]
        sequences = self._sequences(attention_mask, held.length if held else 0, tokens)
        projected = self._project(hidden_states, torch.stack(position_embeddings))
        options: dict[str, Any] = {"deg": self.deg, "impl": self.impl}
        if held is not None:
            out = held.attend(*projected, sequences, **options)
        elif sequences is not None:
            out = _packed(*projected, sequences, **options)
        else:
            out = power_attention(*projected, **options)
        return self._merge(out), None

    def _rotate(self, q: Tensor, k: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = (
            getattr(self, name)(x) if hasattr(self, name) else x
            for name, x in zip(_NORMS, (q, k), strict=True)
        )
        return self.turn(q, k, *cos_sin)

    def _sequences(self, mask: Tensor | None, past: int, tokens: int) -> Tensor | None:
        """The number of each token's sequence `[B, T]`, from 1, 0 for padding; None for one."""
        name = self.config._attn_implementation
        if name not in (_NAME, _PROBE, "sdpa", "eager"):
            raise ValueError(
                'attn_implementation must be "sdpa" or "eager" beside power attention in some '
                f"layers, got {name!r}"
            )
        if mask is None or (name == _NAME and mask.ndim == 2):
            return mask
        visible = mask if mask.dtype == torch.bool else mask == 0
        visible = visible[:, 0, :, past : past + tokens]
        joined = nn.functional.pad(visible.diagonal(-1, 1, 2), (1, 0))
        sequences = _numbered(visible.diagonal(0, 1, 2), joined)
        causal = (sequences[:, :, None] == sequences[:, None]).tril()
        if not torch.equal(visible, causal & (sequences > 0)[:, None]):
            raise ValueError(
                "attention_mask must have shape (B, T), or be causal with padding at the ends, "
                f"got another of shape {tuple(mask.shape)}"
            )
        return sequences


def _layer_of(cache: Any, layer: int) -> PowerCacheLayer | None:
    """The cache's layer for power attention, put there if it is not yet."""
    if cache is None:
        return None
    while len(cache.layers) <= layer:  # a DynamicCache without a config grows as it is used
        cache.layers.append(cache.layer_class_to_replicate())
    held = cache.layers[layer]
    if not isinstance(held, PowerCacheLayer):
        if held.get_seq_length():
            raise ValueError(f"cache must be new, got one with keys and values in layer {layer}")
        held = cache.layers[layer] = PowerCacheLayer()
    return held


def _packed(
    q: Tensor, k: Tensor, v: Tensor, log_g: Tensor | None, sequences: Tensor, **options: Any
) -> Tensor:
    """Power attention within each sequence `[B, H, T, V]`, 0 for padding."""
    real = sequences > 0
    rows = torch.arange(len(real), device=q.device)[:, None] * (sequences.max() + 1)
    counts = torch.unique_consecutive((rows + sequences)[real], return_counts=True)[1]
    cu_seqlens = nn.functional.pad(counts, (1, 1)).cumsum(0)  # the last one is empty
    gates = None if log_g is None else log_g.mT[real].mT[None]
    q_flat, k_flat, v_flat = (x.transpose(1, 2)[real].transpose(0, 1)[None] for x in (q, k, v))
    flat = power_attention(q_flat, k_flat, v_flat, gates, cu_seqlens=cu_seqlens, **options)
    out = flat.new_zeros(*real.shape, q.shape[1], v.shape[3])
    out[real] = flat[0].transpose(0, 1)
    return out.transpose(1, 2)


def _numbered(real: Tensor, joined: Tensor) -> Tensor:
    """Number the sequences of a row, given which tokens are real and go on from the last one."""
    return (1 + (~joined).cumsum(1)) * real


def _sequences_of(
    *,
    batch_size: int,
    q_length: int,
    mask_function: Callable[..., Tensor],
    q_offset: int | Tensor = 0,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask function that transformers calls: the number of each token's sequence, or None."""
    from transformers.masking_utils import causal_mask_function

    if attention_mask is None and mask_function is causal_mask_function:
        return None
    seen = q_length + q_offset if isinstance(q_offset, int) else q_length
    if attention_mask is not None and attention_mask.shape[1] < seen:
        raise ValueError(
            f"attention_mask must have shape (B, {seen}), for all tokens so far, "
            f"got {tuple(attention_mask.shape)}"
        )
    at = torch.arange(q_length, device=device) + q_offset
    row = torch.arange(batch_size, device=device)[:, None]
    joined = mask_function(row, 0, at, (at - 1).clamp(min=0)).expand(batch_size, -1)
    real = torch.ones_like(joined) if attention_mask is None else attention_mask.bool()[:, at]
    plain = real.all() & joined.all()
    if torch.compiler.is_compiling():  # what is no value in a graph cannot choose the way
        torch._assert_async(plain, "a compiled model takes neither padding nor packed documents")
        return None
    if plain:
        return None
    return _numbered(real, joined)


def _not_replaced(module: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"attn_implementation must be another for layers without power attention, got {_NAME!r}"
    )


def _probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of a model that is observed: keeps what it was given."""
    kwargs["attention_mask"] = attention_mask  # None, unless a layer makes one of its own
    out = value.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(1, 2).contiguous()
    module.probed = query, key, value, out, kwargs  # type: ignore[assignment]
    return out, None


def _observe(model: Any, attentions: list[nn.Module]) -> dict[int, tuple[Any, ...]]:
    """What each layer gets, makes of it and returns, by its index, for a few tokens."""
    seen: dict[int, tuple[Any, ...]] = {}

    def keep(module: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if hasattr(module, "probed"):
            inputs = args[0] if args else kwargs["hidden_states"]
            seen[module.layer_idx] = (
                inputs,
                kwargs.get("position_embeddings"),
                result,
                module.probed,
            )
            del module.probed

    hooks = [module.register_forward_hook(keep, with_kwargs=True) for module in attentions]
    try:
        with torch.no_grad(), _implementation(model, _PROBE):
            model.base_model(input_ids=torch.arange(3, device=model.device)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _made(
    attention: Any, seen: tuple[Any, ...] | None, options: dict[str, Any]
) -> PowerSelfAttention:
    """The replacement of a layer, held to what the layer itself makes of its input."""
    where = f"layer {attention.layer_idx} ({type(attention).__name__})"
    if seen is None:
        raise ValueError(f"{where} calls no attention function of transformers' interface")
    inputs, cos_sin, result, (query, key, value, out, kwargs) = seen
    obstacles = [
        name
        for name in ("sliding_window", "softcap", "s_aux", "position_bias", "attention_mask")
        if kwargs.get(name) is not None
    ]
    if getattr(attention, "attention_dropout", 0):
        obstacles.append("attention_dropout")
    if not getattr(attention, "is_causal", True):
        obstacles.append("attention both ways")
    if obstacles:
        raise ValueError(f"{where} has {', '.join(obstacles)}, which power attention has not")
    if cos_sin is None or not hasattr(
        sys.modules[type(attention).__module__], "apply_rotary_pos_emb"
    ):
        raise ValueError(f"{where} has no rotary embedding that comes as position_embeddings")
    made = PowerSelfAttention(
        attention,
        (query.shape[1], key.shape[1]),
        (inputs.shape[-1], query.shape[3], value.shape[3]),
        device=query.device,
        dtype=query.dtype,
        **options,
    )
    with torch.no_grad():
        try:
            remade = *made._project(inputs, torch.stack(cos_sin))[:3], made.o_proj(out.flatten(2))
            same = all(
                torch.allclose(got, want, rtol=1e-2, atol=1e-3)
                for got, want in zip(remade, (query, key, value, result[0]), strict=True)
            )
        except RuntimeError:  # shapes that do not fit, as of a rotary of some channels
            same = False
    if not same:
        raise ValueError(
            f"{where} does more than project, normalise each head and rotate, which power "
            "attention would leave out"
        )
    return made


@contextmanager
def _implementation(model: Any, name: str) -> Iterator[None]:
    """Attend with the implementation `name` inside the context, with the model's own after."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "replace_attention needs transformers: pip install 'scale-invariant-attention[hf]'"
        ) from error
    return transformers
