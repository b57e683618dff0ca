"""Rotary schemes in the place of a model's own, applied by its embedding or late, by attention."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from score_mods.rotary import Rotary, rope
from score_mods.two_branch import TwoBranch

Late: TypeAlias = TwoBranch | Callable[[int], Rotary]

PROBE = "score_mods_probe"


def late_form(rotary: Any) -> tuple[Late | None, Rotary]:
    """A scheme as attention applies it, None if a model can itself, and its (near) rotation.

    Raises:
        TypeError: if `rotary` is no scheme.
    """
    if isinstance(rotary, TwoBranch):
        return rotary, rotary.rotary
    if isinstance(rotary, Rotary):
        return None if rotary.start is None else partial(_whatever_length, rotary), rotary
    made = rotary(1) if callable(rotary) else None
    if not isinstance(made, Rotary):
        raise TypeError(
            "rotary must be a Rotary, a TwoBranch or a function from a length to a Rotary, "
            f"got {type(rotary).__name__}"
        )
    return rotary, made


def _whatever_length(rotary: Rotary, length: int) -> Rotary:
    return rotary


def paired(late: Late, interleaved: bool, device: torch.device) -> Late:
    """The scheme with channels paired (2i, 2i + 1), or (i, i + R/2), and frequencies on a device.

    It is to be shared by the layers of a model: the blocks of its masks are kept for each scheme.
    """

    def placed(rotary: Rotary) -> Rotary:
        rotary = replace(rotary, interleaved=interleaved)
        return rotary if device.type == "mps" else rotary.to(device)  # which has no float64

    if isinstance(late, TwoBranch):
        return replace(late, rotary=placed(late.rotary))
    return lambda length: placed(late(length))


def embeddings_of(model: nn.Module, rotary: Rotary) -> list[Any]:
    """A model's rotary embeddings.

    Raises:
        ValueError: if it has none, or they are for another number of channels than `rotary`.
    """
    embeddings: list[Any] = [
        m for m in model.modules() if isinstance(getattr(m, "inv_freq", None), Tensor)
    ]
    if not embeddings:
        raise ValueError(f"model has no rotary embedding with inv_freq: {type(model).__name__}")
    for embedding in embeddings:
        if embedding.inv_freq.shape != rotary.frequencies.shape:
            raise ValueError(
                f"rotary must be for {2 * embedding.inv_freq.numel()} channels, "
                f"got {2 * rotary.frequencies.numel()}"
            )
    return embeddings


def set_frequencies(embeddings: list[Any], frequencies: Tensor, factor: float = 1.0) -> None:
    """Give rotary embeddings other frequencies, and a factor on cos and sin."""
    for embedding in embeddings:
        embedding.rope_type = "default"  # frequencies that do not change by themselves
        embedding.inv_freq = frequencies.to(embedding.inv_freq.device, torch.float32)
        embedding.attention_scaling = factor


def pairings(
    model: Any, embeddings: list[Any], register: Callable[..., None]
) -> MutableMapping[nn.Module, bool | None]:
    """How each attention layer of a model pairs the channels that it rotates.

    The model is run on the same tokens at position 0 and at others, with attention that depends on
    values alone, so that queries and keys differ by the rotation.

    Args:
        model: a transformers model.
        embeddings: its rotary embeddings.
        register: registers an attention function of transformers' interface.

    Returns:
        By layer, whether it pairs (2i, 2i + 1) rather than (i, i + R/2); None if it rotates none.

    Raises:
        ValueError: if a layer does something else, or none rotates.
    """
    rotary = rope(2 * embeddings[0].inv_freq.numel())
    positions = torch.tensor([[0, 0, 0], [1, 10, 100]], device=model.device)
    found: WeakKeyDictionary[nn.Module, bool | None] = WeakKeyDictionary()

    def probe(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        for interleaved in (False, True, None):
            turn = _unturned if interleaved is None else replace(rotary, interleaved=interleaved)
            if all(_near(turn(x[:1], positions[1]), x[1:]) for x in (query, key)):
                found[module] = interleaved
                break
        else:
            raise ValueError(
                "model must rotate the leading channels of each head and no others, and "
                f"{type(module).__name__} does otherwise"
            )
        out = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return out.transpose(1, 2).contiguous(), None

    register(PROBE, probe)
    name = model.config._attn_implementation
    own = [(e, e.rope_type, e.inv_freq, e.attention_scaling) for e in embeddings]
    training = [module for module in model.modules() if module.training]
    model.eval().set_attn_implementation(PROBE)
    set_frequencies(embeddings, rotary.frequencies)
    try:
        tokens = torch.arange(1, 4, device=model.device).expand(2, 3)
        with torch.no_grad():
            model.base_model(input_ids=tokens, position_ids=positions, use_cache=False)
    finally:
        model.set_attn_implementation(name)
        for embedding, rope_type, frequencies, factor in own:
            embedding.rope_type = rope_type
            embedding.inv_freq, embedding.attention_scaling = frequencies, factor
        for module in training:
            module.training = True
    if all(interleaved is None for interleaved in found.values()):
        raise ValueError(
            "model must rotate in layers that call an attention function of transformers' "
            f"interface, got {type(model).__name__}"
        )
    return found


def _unturned(x: Tensor, positions: Tensor) -> Tensor:
    return x


def _near(x: Tensor, y: Tensor) -> bool:
    return bool((x - y).norm() <= 0.02 * y.norm())
