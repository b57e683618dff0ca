"""Mixers whose state has a fixed size, for `Decoder`: power attention and linear attention.

Both have QK-norm and a rotary scheme as softmax attention has, and the same gates, so that they
differ in their weights, and in the numbers that a head's state holds: F (D + 1) for F features, D
channels of a value and the denominator. F is D for linear attention, and `power.state_size` for
power attention of degree 2: D (D + 1)/2 products, some of them twice. A sliding window of W keys
holds 2 W D numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from benchmarks.mixers import Angles, SoftmaxAttention
from power import PowerAttention, power_attention, state_size
from score_mods.rotary import Rotary

_CHUNK = 256  # tokens of a chunk of linear attention


def equal_window(head_dim: int) -> int:
    """Width of the sliding window whose keys and values are as many numbers as power's state."""
    return state_size(head_dim, 2) * (head_dim + 1) // (2 * head_dim)


def mixing_flops(method: str, head_dim: int, length: int) -> float:
    """FLOPs that mixing costs a head and token, forward, in the mean over a sequence.

    Two for each multiply-add, projections and gates left out; the backward pass has twice as many.
    Softmax attention: 2 products of D with each visible key, of which there are (T + 1)/2; the
    window: the same with the keys in it; linear and power attention in chunks of c tokens:
    4 (D + 1) F to write to and read from the state of F features, and 2 products of D with the
    (c + 1)/2 visible keys of the chunk.

    Args:
        method: "softmax", "scale_invariant" (as many, its factor and summand left out), "window",
            "linear" or "power".
        head_dim: channels D of a head.
        length: tokens T of a sequence.

    Raises:
        ValueError: if `method` is none of these.
    """
    keys: float
    features = 0
    if method in ("softmax", "scale_invariant"):
        keys = (length + 1) / 2
    elif method == "window":
        width = min(equal_window(head_dim), length)
        keys = width - width * (width - 1) / (2 * length)
    elif method in ("linear", "power"):
        features = head_dim if method == "linear" else state_size(head_dim, 2)
        chunk = min(_CHUNK if method == "linear" else 1024, length)
        features = 0 if chunk == length else features
        keys = (chunk + 1) / 2
    else:
        raise ValueError(
            f"method must be softmax, scale_invariant, window, linear or power, got {method!r}"
        )
    return 4 * head_dim * keys + 4 * (head_dim + 1) * features


class PowerMixer(PowerAttention):
    """`PowerAttention` of degree 2 as a mixer: with QK-norm, and rotary angles from outside."""

    def __init__(
        self,
        width: int,
        head_dim: int,
        rotary: Rotary | None = None,
        *,
        horizons: tuple[float, float] = (16, 16384),
    ) -> None:
        """Build the layer; its gates start at horizons spread between the bounds."""
        super().__init__(width, width // head_dim, horizons=horizons, norm=False)
        self.scheme = rotary

    def heads(
        self, x: Tensor, angles: Angles | None, blocks: BlockMask | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values `[B, H, T, D]`, and log-gates `[B, H, T]`."""
        q, k, v, log_g = self._project(x, torch.arange(x.shape[1], device=x.device)[None])
        q, k = (F.rms_norm(y, (self.head_dim,)).to(v.dtype) for y in (q, k))
        if self.scheme is not None and angles is not None:
            q, k = self.scheme.turn(q, *angles), self.scheme.turn(k, *angles)
        return q, k, v, log_g

    def forward(  # type: ignore[override]
        self, x: Tensor, angles: Angles | None, blocks: BlockMask | None = None
    ) -> Tensor:
        """Attend over whole sequences, `[B, T, width]`."""
        return self._merge(power_attention(*self.heads(x, angles), impl=self.impl))


class LinearAttention(SoftmaxAttention):
    """Gated linear attention: weights phi(q)·phi(k) exp(G_i - G_j), phi = 1 + elu, and their sum.

    Reference: Katharopoulos et al., arXiv 2006.16236; the gate as in `PowerAttention`.
    """

    def __init__(
        self,
        width: int,
        head_dim: int,
        rotary: Rotary | None = None,
        *,
        horizons: tuple[float, float] = (16, 16384),
    ) -> None:
        """Build the layer; its gates start at horizons spread between the bounds."""
        super().__init__(width, head_dim, rotary)
        self.gate = PowerAttention(width, self.num_heads, horizons=horizons).gate

    def forward(self, x: Tensor, angles: Angles | None, blocks: BlockMask | None = None) -> Tensor:
        """Attend over whole sequences, `[B, T, width]`."""
        q, k, v = self.heads(x, angles, None)
        assert self.gate is not None
        log_g = F.logsigmoid(self.gate(x).float()).mT
        with torch.autocast(x.device.type, enabled=False):
            out = linear_attention(q, k, v, log_g)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def linear_attention(q: Tensor, k: Tensor, v: Tensor, log_g: Tensor) -> Tensor:
    """Causal attention with the weights phi(q_i)·phi(k_j) exp(G_i - G_j), in time linear in T.

    Args:
        q: queries `[B, H, T, D]`.
        k: keys, likewise.
        v: values, likewise.
        log_g: logarithms of the gates `[B, H, T]`; G is their cumulative sum.

    Returns:
        `[B, H, T, D]` in the dtype of v: sum_j w_ij v_j / sum_j w_ij.
    """
    length, dtype = q.shape[2], v.dtype
    chunk = min(_CHUNK, length)
    missing = -length % chunk
    q, k = (1 + F.elu(x.float() if x.dtype != torch.float64 else x) for x in (q, k))
    v = F.pad(v.to(q.dtype), (0, 1), value=1.0)  # the denominator is one more channel
    q, k, v = (F.pad(x, (0, 0, 0, missing)).unflatten(2, (-1, chunk)) for x in (q, k, v))
    gates = F.pad(log_g.to(q.dtype), (0, missing)).unflatten(2, (-1, chunk)).cumsum(-1)

    within = (gates[..., :, None] - gates[..., None, :]).tril().exp().tril()
    out = (q @ k.mT * within) @ v
    ends = gates[..., -1]  # [B, H, N]
    written = (k * (ends[..., None] - gates).exp()[..., None]).mT @ v  # [B, H, N, D, D + 1]
    before = ends.cumsum(-1) - ends  # decay up to the start of a chunk
    # The state at the start of chunk n is the sum of what chunks m < n wrote, decayed since.
    since = (before[..., :, None] - (before + ends)[..., None, :]).tril(-1).exp().tril(-1)
    states = torch.einsum("bhnm,bhmde->bhnde", since, written)
    out = out + (q * gates.exp()[..., None]) @ states
    out = out.flatten(2, 3)[:, :, :length]
    return (out[..., :-1] / out[..., -1:]).to(dtype)
