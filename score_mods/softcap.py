"""The softcap of Gemma 2 and Grok-1."""

from __future__ import annotations

import torch
from attn_gym.mods import generate_tanh_softcap
from torch import Tensor

from score_mods._captured import Mod, described, scalar
from score_mods._checks import boolean, number


def softcap(cap: float, *, approx: bool = False) -> Mod:
    """Bends the score so that it stays between -cap and cap.

    s' = cap tanh(s / cap). The tanh is that of attention-gym's `generate_tanh_softcap`, which
    takes the cap into the compiled code; here it can have any value without compiling anew. It
    comes before biases (see `compose`).

    Args:
        cap: largest size of a score, positive; Gemma 2 has 50 in its attention.
        approx: whether to take the GPU's one instruction for tanh, with a relative error of 2^-11.

    Returns:
        A score_mod; it returns `promote_types(score.dtype, float32)`.

    Raises:
        TypeError: if `cap` is no number, or `approx` no bool.
        ValueError: if it is not positive.

    Reference: Gemma Team, "Gemma 2", arXiv 2408.00118, section 2.
    """
    bound = scalar(number("cap", cap, positive=True))
    boolean("approx", approx)
    bend = generate_tanh_softcap(1, approx=approx)

    def softcap_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        size = bound.to(torch.promote_types(score.dtype, torch.float32))
        return size * bend(score.to(size.dtype) / size, b, h, q_idx, kv_idx)

    return described(softcap_mod, "softcap", bound)
