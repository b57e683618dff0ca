"""FlexAttention functions of scale-invariant attention and its rivals.

A score_mod is `(score, b, h, q_idx, kv_idx) -> score`, a mask_mod `(b, h, q_idx, kv_idx) -> bool`;
a factory has the plain name of the mechanism and returns the function. `catalogue` lists the
mechanisms.
"""

from score_mods._captured import to_device
from score_mods.attention import attention
from score_mods.bias_tables import (
    distance_table,
    sandwich,
    t5_bias,
    t5_buckets,
)
from score_mods.biases import (
    alibi,
    alibi_slopes,
    kerple_log,
    kerple_power,
    nape,
)
from score_mods.catalogue import Mechanism, catalogue
from score_mods.combine import compose, exempt_keys, with_offset, with_positions
from score_mods.dense import dense_attention
from score_mods.fire import (
    fire,
)
from score_mods.forgetting_gate import (
    forgetting_gate,
)
from score_mods.kernel_options import for_flash, kernel_options
from score_mods.layers import (
    command_a_layers,
    gemma2_layers,
    gemma3_layers,
    llama4_layers,
    local_global,
)
from score_mods.masks import (
    and_masks,
    causal,
    create_block_mask,
    document,
    or_masks,
    prefix_lm,
    sliding_window,
)
from score_mods.masks_grid import clear, natten
from score_mods.masks_sparse import (
    chunked,
    lambda_mask,
    longformer,
    longnet,
    streaming_llm_mask,
)
from score_mods.merge import merge
from score_mods.operators import (
    focused_attention,
    focused_features,
    inline_attention,
    linear,
    log_linear,
    norm_attention,
    power,
    weighted_sum,
)
from score_mods.query_scales import asentmax_queries, scale_queries
from score_mods.rotary import Rotary, half_truncated_rope, p_rope, rope
from score_mods.rotary_scaled import (
    dynamic_ntk_rope,
    llama3_rope,
    longrope,
    ntk_rope,
    position_interpolation,
    resonance_rope,
    yarn_rope,
)
from score_mods.scale_invariant import (
    scale_invariant,
    scale_invariant_affine,
    scale_invariant_grid,
)
from score_mods.sinks import attention_sink, softmax_off_by_one
from score_mods.softcap import (
    softcap,
)
from score_mods.temperatures import (
    asentmax_scale,
    infoscale,
    llama4_temperature,
    log_power_temperature,
    logn,
    ministral_temperature,
    power_law_temperature,
    ssmax,
    yarn_temperature,
)
from score_mods.transforms import QueryKeyTransform, coca, cosscale, pose_positions
from score_mods.two_branch import (
    TwoBranch,
    leaky_rerope,
    lm_infinite,
    rerope,
    self_extend,
    self_extend_group,
    streaming_llm,
)

__all__ = [
    "Mechanism",
    "QueryKeyTransform",
    "Rotary",
    "TwoBranch",
    "alibi",
    "alibi_slopes",
    "and_masks",
    "asentmax_queries",
    "asentmax_scale",
    "attention",
    "attention_sink",
    "catalogue",
    "causal",
    "chunked",
    "clear",
    "coca",
    "command_a_layers",
    "compose",
    "cosscale",
    "create_block_mask",
    "dense_attention",
    "distance_table",
    "document",
    "dynamic_ntk_rope",
    "exempt_keys",
    "fire",
    "focused_attention",
    "focused_features",
    "for_flash",
    "forgetting_gate",
    "gemma2_layers",
    "gemma3_layers",
    "half_truncated_rope",
    "infoscale",
    "inline_attention",
    "kernel_options",
    "kerple_log",
    "kerple_power",
    "lambda_mask",
    "leaky_rerope",
    "linear",
    "llama3_rope",
    "llama4_layers",
    "llama4_temperature",
    "lm_infinite",
    "local_global",
    "log_linear",
    "log_power_temperature",
    "logn",
    "longformer",
    "longnet",
    "longrope",
    "merge",
    "ministral_temperature",
    "nape",
    "natten",
    "norm_attention",
    "ntk_rope",
    "or_masks",
    "p_rope",
    "pose_positions",
    "position_interpolation",
    "power",
    "power_law_temperature",
    "prefix_lm",
    "rerope",
    "resonance_rope",
    "rope",
    "sandwich",
    "scale_invariant",
    "scale_invariant_affine",
    "scale_invariant_grid",
    "scale_queries",
    "self_extend",
    "self_extend_group",
    "sliding_window",
    "softcap",
    "softmax_off_by_one",
    "ssmax",
    "streaming_llm",
    "streaming_llm_mask",
    "t5_bias",
    "t5_buckets",
    "to_device",
    "weighted_sum",
    "with_offset",
    "with_positions",
    "yarn_rope",
    "yarn_temperature",
]
