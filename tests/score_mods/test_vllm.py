import pytest
import torch

import score_mods as sm
from score_mods.vllm import for_vllm


def test_called_as_vllm_calls_it():
    """A page table that is out of order, and a batch of two sequences in one row of queries."""
    score = torch.randn(1, 4, 6, 8)
    pages = torch.tensor([3, 0, 2, 1])  # logical page of each physical page, of two keys
    first, start = torch.tensor([0, 0, 0, 3, 3, 3]), torch.tensor([4, 4, 4, 0, 0, 0])
    user_score_mod = for_vllm(sm.compose(sm.ssmax(0.4), sm.alibi(4)))

    def final_score_mod(score, b, h, q_idx, physical_kv_idx):
        logical_q_idx = q_idx - first[q_idx] + start[q_idx]
        logical_kv_idx = pages[physical_kv_idx // 2] * 2 + physical_kv_idx % 2
        return user_score_mod(score, b, h, logical_q_idx, logical_kv_idx, physical_q=q_idx)

    h = torch.arange(4)[:, None, None]
    got = final_score_mod(score, torch.tensor(0), h, torch.arange(6)[:, None], torch.arange(8))
    q_at = torch.tensor([4, 5, 6, 0, 1, 2])[:, None].double()
    kv_at = torch.tensor([6, 7, 0, 1, 4, 5, 2, 3])
    slope = 2.0 ** (-2 * (h + 1).double())
    expected = 0.4 * (q_at + 1).log() * score - slope * (q_at - kv_at).abs()
    assert (got - expected).abs().max() < 1e-6


def test_is_a_score_mod_for_flex_attention_too():
    q, k, v = torch.randn(3, 1, 4, 9, 16)
    got = sm.attention(q, k, v, for_vllm(sm.alibi(4)), sm.causal, impl="dense")
    assert torch.equal(got, sm.dense_attention(q, k, v, sm.alibi(4), sm.causal))
    assert for_vllm(sm.alibi(4)).num_heads == 4


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match=r"score_mod must be a score_mod .* got a mask_mod"):
        for_vllm(sm.causal)
