"""Many mechanisms in two compiled kernels: a score_mod of several is one kernel."""

import pytest
import torch

import score_mods as sm

H, T, D = 4, 130, 16
HEADS = torch.tensor([0.1, 0.3, 0.5, 0.9])


def dilated_gates_and_powers():
    longnet, mask = sm.longnet((16, 64, 256), (1, 2, 4))
    mod = sm.compose(
        sm.llama4_temperature(HEADS, 16),
        sm.softcap(3.0),
        longnet,
        sm.kerple_power(HEADS, 0.7),
        sm.forgetting_gate(-0.1 * torch.rand(1, H, T)),
    )
    return mod, sm.and_masks(sm.causal, mask)


def tables_and_a_network_in_boxes():
    layers = (torch.randn(*shape) for shape in ((8,), (8,), (H, 8), (H,)))
    mod = sm.compose(
        sm.asentmax_scale(HEADS, -0.5),
        sm.fire(*layers, threshold=30.0),
        sm.t5_bias(torch.randn(H, 32), bidirectional=True),
        sm.distance_table(torch.randn(1, 99)),
        sm.sandwich(H, T),
    )
    return mod, sm.natten((10, 13), (4, 5))


@pytest.mark.compiled
@pytest.mark.parametrize("make", [dilated_gates_and_powers, tables_and_a_network_in_boxes])
def test_compiled_agrees_with_float64(make):
    mod, mask = make()
    q, k, v = (torch.randn(1, H, T, D) for _ in range(3))
    out = sm.attention(q, k, v, mod, mask)
    exact = sm.dense_attention(q.double(), k.double(), v.double(), mod, mask)
    assert (out - exact).abs().max() < 1e-5
