"""FlexAttention functions of scale-invariant attention and its rivals.

A score_mod is `(score, b, h, q_idx, kv_idx) -> score`, a mask_mod `(b, h, q_idx, kv_idx) -> bool`;
a factory has the plain name of the mechanism and returns the function. `catalogue` lists the
mechanisms.
"""

from score_mods._captured import to_device
from score_mods.alibi import alibi, alibi_slopes
from score_mods.attention import attention
from score_mods.catalogue import Mechanism, catalogue
from score_mods.combine import compose, exempt_keys, with_offset, with_positions
from score_mods.dense import dense_attention
from score_mods.kernel_options import kernel_options
from score_mods.logn import logn, ssmax
from score_mods.masks import (
    and_masks,
    causal,
    create_block_mask,
    document,
    or_masks,
    prefix_lm,
    sliding_window,
)
from score_mods.rotary import (
    Rotary,
    dynamic_ntk_rope,
    half_truncated_rope,
    ntk_rope,
    p_rope,
    position_interpolation,
    rope,
    yarn_rope,
)
from score_mods.scale_invariant import (
    scale_invariant,
    scale_invariant_affine,
    scale_invariant_grid,
)

__all__ = [
    "Mechanism",
    "Rotary",
    "alibi",
    "alibi_slopes",
    "and_masks",
    "attention",
    "catalogue",
    "causal",
    "compose",
    "create_block_mask",
    "dense_attention",
    "document",
    "dynamic_ntk_rope",
    "exempt_keys",
    "half_truncated_rope",
    "kernel_options",
    "logn",
    "ntk_rope",
    "or_masks",
    "p_rope",
    "position_interpolation",
    "prefix_lm",
    "rope",
    "scale_invariant",
    "scale_invariant_affine",
    "scale_invariant_grid",
    "sliding_window",
    "ssmax",
    "to_device",
    "with_offset",
    "with_positions",
    "yarn_rope",
]
