"""Triton kernels of power attention: forward, backward and a decoding step.

Forward: sum the gates (`gate_fwd`), discount and transpose the keys (`fold_fwd`), sum the
products of each chunk (`update`), turn the sums into chunk states (`scan_fwd`), then one
kernel for the output (`attention_fwd`): state, chunk, normaliser and division. Backward: the
same for queries and output gradients, with the scan from the end, then a kernel each for dq, dk
and dv, and running sums for the gates. Of the size of the feature map, only chunk states are ever
written.
"""

from power.kernels.config import choose_chunk_size, saved_shapes, unsupported
from power.kernels.launch import backward, forward, step

__all__ = ["backward", "choose_chunk_size", "forward", "saved_shapes", "step", "unsupported"]
