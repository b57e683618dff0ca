"""Where the values of captured tensors cannot be looked at: under vmap, and on the meta device."""

import pytest
import torch

import score_mods as sm
from score_mods.modules import FlexSelfAttention, Learnable

H = 2
FACTORIES = {
    "scale_invariant": lambda x: sm.scale_invariant(x, alpha=x, beta=9 * x),
    "kerple_power": lambda x: sm.kerple_power(x, x),
    "ssmax": lambda x: sm.ssmax(x),
    "forgetting_gate": lambda x: sm.forgetting_gate(-x[:, None].expand(1, H, 5)),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_batch_of_parameters_under_vmap(name):
    q, k, v = (torch.randn(1, H, 5, 4, dtype=torch.float64) for _ in range(3))

    def attend(x):
        return sm.dense_attention(q, k, v, FACTORIES[name](x), sm.causal)

    values = 0.5 + torch.rand(3, H, dtype=torch.float64)
    expected = torch.stack([attend(x) for x in values])
    torch.testing.assert_close(torch.func.vmap(attend)(values), expected)


def layer(rotary):
    learned = Learnable(sm.scale_invariant, tau=torch.tensor([3.0, 30.0]))
    return FlexSelfAttention(8, H, rotary=rotary, score_mod=learned, impl="dense")


def test_a_layer_from_the_meta_device_takes_a_state_dict():
    x, rotary = torch.randn(2, 7, 8), sm.rope(4)
    trained = layer(rotary)
    with torch.device("meta"):
        empty = layer(rotary)
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(trained.state_dict())
    assert torch.equal(empty(x), trained(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda: {"score_mod": sm.alibi(H)}, "mod must capture tensors that have values, got one"),
        (lambda: {"rotary": sm.rope(4)}, "frequencies must have values, got a Rotary on the meta"),
    ],
)
def test_what_has_no_values_is_named(options, message):
    with torch.device("meta"):
        empty = FlexSelfAttention(8, H, **options())
    with pytest.raises(ValueError, match=message):
        empty.to_empty(device="cpu")
