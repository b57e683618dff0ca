"""A score_mod as vLLM's FlexAttention backend calls it."""

from __future__ import annotations

from torch import Tensor

from score_mods._captured import Mod, check_score_mod, described


def for_vllm(score_mod: Mod) -> Mod:
    """Lets a score_mod be called with vLLM's further keyword.

    s' = score_mod(s). vLLM keeps keys in pages; it hands positions in the sequence as `q_idx` and
    `kv_idx`, which is what the score_mods here count by, and the index of the query in its batch
    as the keyword `physical_q`. FlexAttention counts arguments without a default, so the result
    is a score_mod for it as well.

    Args:
        score_mod: a score_mod.

    Returns:
        A score_mod for the attribute `score_mod` of vLLM's `FlexAttentionMetadata`.

    Raises:
        TypeError: if `score_mod` is none.
    """
    check_score_mod(score_mod)

    def vllm_mod(
        score: Tensor,
        b: Tensor,
        h: Tensor,
        q_idx: Tensor,
        kv_idx: Tensor,
        physical_q: Tensor | None = None,
    ) -> Tensor:
        return score_mod(score, b, h, q_idx, kv_idx)

    return described(vllm_mod, getattr(score_mod, "__name__", "score_mod"), score_mod)
