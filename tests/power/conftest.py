"""What the tests of power attention share: inputs, and an oracle that owes the library nothing."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def _draw(
    batch=2, heads=4, kv_heads=2, length=40, head_dim=8, value_dim=6, dtype=torch.float64, seed=0
):
    """Random ``q, k, v, log_g``, the first three drawn in ``dtype``; gates keep 0.6 to 0.99."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = normal(batch, heads, length, head_dim).to(dtype)
    k = normal(batch, kv_heads, length, head_dim).to(dtype)
    v = normal(batch, kv_heads, length, value_dim).to(dtype)
    log_g = logsigmoid(normal(batch, kv_heads, length) + 2)
    return q, k, v, log_g.to(torch.promote_types(dtype, torch.float32))


def _dense(q, k, v, log_g=None, deg=2, scale=None, bug=None) -> Tensor:
    """``sum_j (scale q_i k_j)^p exp(G_i - G_j) v_j / sum_j ...`` in float64, maybe with a bug."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    weights = torch.einsum("bhik,bhjk->bhij", scale * q, k) ** deg
    if log_g is not None:
        gate = log_g.double().repeat_interleave(group, 1)
        total = gate.cumsum(-1) - (gate if bug == "shifted gate" else 0)
        later = total.roll(-1, -1) if bug == "gate of the next token" else total
        weights = weights * (total[..., :, None] - later[..., None, :]).exp()
    weights = weights.tril(-1 if bug == "dropped diagonal" else 0)
    return torch.einsum("bhij,bhjv->bhiv", weights, v) / weights.sum(-1, keepdim=True)


@pytest.fixture
def draw():
    """Return the function that draws inputs."""
    return _draw


@pytest.fixture
def dense():
    """Return the oracle."""
    return _dense
