"""Power attention: even powers of scores as weights, in time linear in the sequence length.

`power_attention` is the call over whole sequences and `power_attention_step` that of decoding;
`PowerAttention` is a layer of both. `power.reference` has the formula in eager PyTorch, and
`power.kernels`, imported when first needed, the same in Triton.
"""

from power.attention import power_attention
from power.decode import DecodeState, power_attention_prefill, power_attention_step
from power.feature_map import PowerState, monomials, state_size, symmetric_power
from power.modules import PowerAttention

__all__ = [
    "DecodeState",
    "PowerAttention",
    "PowerState",
    "monomials",
    "power_attention",
    "power_attention_prefill",
    "power_attention_step",
    "state_size",
    "symmetric_power",
]
