"""Which layers look at a window and which at everything: schedules from a layer to its mask."""

from __future__ import annotations

from collections.abc import Callable

from score_mods._captured import Mod, check_mask_mod
from score_mods._checks import integer
from score_mods.masks import and_masks, causal, sliding_window
from score_mods.masks_sparse import chunked

Schedule = Callable[[int], Mod]


def local_global(local: Mod, period: int, every: Mod = causal) -> Schedule:
    """Gives every `period`-th layer the mask `every`, and the others `local`.

    Layers are counted from 0, and the last of each `period` looks at everything. All layers of a
    kind share one mask object, and so the blocks that `create_block_mask` keeps.

    Args:
        local: mask_mod of the local layers.
        period: layers in a period, at least 1.
        every: mask_mod of the global layers.

    Returns:
        A function from the number of a layer to its mask_mod.

    Raises:
        TypeError: if a mask is no mask_mod, or `period` or a layer no int.
        ValueError: if `period` is below 1, or a layer below 0.

    >>> masks = local_global(sliding_window(128), 2)  # gpt-oss
    >>> [masks(layer).__name__ for layer in range(4)]
    ['sliding_window(128)', 'causal_mask', 'sliding_window(128)', 'causal_mask']
    """
    integer("period", period)
    for name, mask in (("local", local), ("every", every)):
        check_mask_mod(mask, name)

    def mask_of(layer: int) -> Mod:
        return every if (integer("layer", layer, at_least=0) + 1) % period == 0 else local

    return mask_of


def gemma2_layers(window: int = 4096) -> Schedule:
    """Gemma 2: a window on even layers, everything on odd ones, each under `softcap(50)`.

    Args:
        window: keys in the window, at least 1.

    Returns:
        A function from the number of a layer to its mask_mod.

    Raises:
        TypeError: if `window` is no int.
        ValueError: if it is below 1.

    Reference: Gemma Team, arXiv 2408.00118, section 2; `layer_types` of the transformers library.
    """
    return local_global(sliding_window(window), 2)


def gemma3_layers(window: int = 1024) -> Schedule:
    """Gemma 3: five layers with a window, then one with everything, and so on.

    Args:
        window: keys in the window, at least 1; 1024, or 512 in the model of 1B parameters.

    Returns:
        A function from the number of a layer to its mask_mod.

    Raises:
        TypeError: if `window` is no int.
        ValueError: if it is below 1.

    Reference: Gemma Team, "Gemma 3", arXiv 2503.19786, section 2 (1024 as in summaries of it, 512
    recalled); `layer_types` of the transformers library.
    """
    return local_global(sliding_window(window), 6)


def command_a_layers(window: int = 4096) -> Schedule:
    """Command A: three layers with a window and rotary positions, then one with all and none.

    Args:
        window: keys in the window, at least 1.

    Returns:
        A function from the number of a layer to its mask_mod.

    Raises:
        TypeError: if `window` is no int.
        ValueError: if it is below 1.

    Reference: Yang et al., "RoPE to NoPE and Back Again", arXiv 2501.18795; `layer_types` of the
    transformers library's Cohere 2.
    """
    return local_global(sliding_window(window), 4)


def llama4_layers(chunk: int = 8192) -> Schedule:
    """Llama 4: three layers with causal chunks and rotary positions, then one with all and none.

    The layers without rotary positions have `llama4_temperature`.

    Args:
        chunk: tokens in a chunk, at least 1.

    Returns:
        A function from the number of a layer to its mask_mod.

    Raises:
        TypeError: if `chunk` is no int.
        ValueError: if it is below 1.

    Reference: `layer_types` and `attention_chunk_size` of the transformers library's Llama 4.
    """
    return local_global(and_masks(causal, chunked(chunk)), 4)
