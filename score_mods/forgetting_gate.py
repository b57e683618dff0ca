"""The Forgetting Transformer's gate: a bias that adds up between key and query."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from score_mods._captured import Mod, check_values, described
from score_mods._checks import floating


def forgetting_gate(log_g: Tensor) -> Mod:
    """Adds the logarithms of the forget gates between the key and the query.

    s' = s + c_(q_idx) - c_(kv_idx), c = cumsum(log_g): a key is forgotten by the product of the
    gates after it, up to the query's. The sums are formed in float64 and subtracted there, since
    their difference is what counts. The gates belong to the tokens: packed documents need nothing
    more, and decoding needs the gates of all the tokens so far (and `with_offset`).

    Args:
        log_g: logarithms of the gates, finite and at most 0, `(B, H, T)` with one for each query
            head; B and H may be 1 for all. The paper has log sigmoid of a linear map of the token.
            Learnable. Values are checked on a CPU only, where that needs no wait.

    Returns:
        A score_mod; it returns `promote_types(score.dtype, float32)`.

    Raises:
        TypeError: if `log_g` is no floating tensor.
        ValueError: if it has not three axes, or a wrong value.

    Reference: Lin et al., "Forgetting Transformer: Softmax Attention with a Forget Gate", arXiv
    2503.02130.
    """
    floating("log_g", log_g, "B", "H", "T")
    if log_g.device.type == "cpu":
        fits = (log_g <= 0) & log_g.isfinite()
        check_values("log_g", "<= 0 and finite (a gate of at most 1)", log_g, fits)
    at_query = log_g.double().cumsum(-1)
    # A second tensor, because FlexAttention compiles one gather from each that requires grad.
    at_key = at_query.clone()
    one_batch, one_head = log_g.shape[0] == 1, log_g.shape[1] == 1

    def forgetting_gate_mod(
        score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        b, h = b * 0 if one_batch else b, h * 0 if one_head else h
        decay = at_query[b, h, q_idx] - at_key[b, h, kv_idx]
        return score + decay.to(torch.promote_types(score.dtype, torch.float32))

    batch, _, length = log_g.shape
    forgetting_gate_mod.made_for = (math.inf if one_batch else batch, length, length)  # type: ignore[attr-defined]
    return described(forgetting_gate_mod, "forgetting_gate", at_query)
