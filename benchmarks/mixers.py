"""Softmax attention in the forms that the length-generalisation benchmark trains.

A mixer is a module of `Decoder`: it takes x `[B, T, width]` and what `Decoder.shared` gives for
this length, and returns the shape of x; its last projection is called `o_proj`. What the layers of
softmax attention share is made by `Positions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import score_mods as sm
from score_mods._captured import Mod
from score_mods.rotary import Rotary

Angles = tuple[Tensor, Tensor]

_SAMPLED = 16  # rows of each sequence from which the gradient of tau is estimated


class Positions:
    """What the layers share at a length: the rotary angles and the blocks of the mask."""

    def __init__(self, rotary: Callable[[int], Rotary | None], mask_mod: Mod = sm.causal) -> None:
        """Hold the schemes.

        Args:
            rotary: from a length to the rotary scheme at that length, or None for no positions.
            mask_mod: which keys a query sees.
        """
        self.rotary, self.mask_mod = rotary, mask_mod
        self._at = lru_cache(maxsize=8)(self._build)

    def __call__(
        self, length: int, device: torch.device
    ) -> tuple[Angles | None, BlockMask | None]:
        """Angles `(cos, sin)` or None, and a BlockMask, or None on a CPU: attention is dense."""
        return self._at(length, device)

    def _build(self, length: int, device: torch.device) -> tuple[Angles | None, BlockMask | None]:
        rotary = self.rotary(length)
        positions = torch.arange(length, device=device)
        angles = None if rotary is None else rotary.cos_sin(positions)
        if device.type == "cpu":
            return angles, None
        return angles, sm.create_block_mask(self.mask_mod, None, None, length, length, device)


class SoftmaxAttention(nn.Module):
    """Attention with QK-norm, a rotary scheme and a score_mod.

    out = o_proj(softmax(mask(score_mod(q kᵀ / sqrt(D)))) v), queries and keys of root mean square
    1 over the channels of a head. With a BlockMask it is FlexAttention, which joins a compiled
    block; without one it is the dense form.
    """

    def __init__(
        self,
        width: int,
        head_dim: int,
        rotary: Rotary | None = None,
        score_mod: Mod | None = None,
        mask_mod: Mod = sm.causal,
    ) -> None:
        """Build the layer.

        Args:
            width: channels of the model, a multiple of `head_dim`.
            head_dim: channels D of a head.
            rotary: the scheme that turns the heads, by angles from `Positions`; None for none.
            score_mod: a score_mod that learns nothing, or None.
            mask_mod: which keys a query sees; that of `Positions`.
        """
        super().__init__()
        self.head_dim, self.num_heads = head_dim, width // head_dim
        self.rotary, self.score_mod, self.mask_mod = rotary, score_mod, mask_mod
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def refresh(self) -> None:
        """Bring the score_mod up to date with parameters, buffers and device."""
        if self.score_mod is not None:
            self.score_mod = sm.to_device(self.score_mod, self.q_proj.weight.device)

    def mechanism(self) -> Mod | None:
        """What the layer does to the base logits, as a score_mod."""
        return self.score_mod

    def heads(
        self, x: Tensor, angles: Angles | None, blocks: BlockMask | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[B, H, T, D]` whose products are the base logits."""
        q, k, v = (
            projection(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (F.rms_norm(y, (self.head_dim,)).to(v.dtype) for y in (q, k))
        if self.rotary is not None and angles is not None:
            q, k = self.rotary.turn(q, *angles), self.rotary.turn(k, *angles)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask | None) -> Tensor:
        """Attention of the heads, `[B, H, T, D]`."""
        if blocks is None:
            return sm.dense_attention(q, k, v, self.score_mod, self.mask_mod)
        options = sm.kernel_options(
            self.head_dim,
            q.dtype,
            score_mod=self.score_mod is not None,
            contiguous=self.mask_mod is sm.causal,
            device=q.device,
        )
        return flex_attention(
            q, k, v, score_mod=self.score_mod, block_mask=blocks, kernel_options=options
        )

    def forward(self, x: Tensor, angles: Angles | None, blocks: BlockMask | None) -> Tensor:
        """Attend over whole sequences, `[B, T, width]`."""
        q, k, v = self.heads(x, angles, blocks)
        with torch.autocast(x.device.type, enabled=False):  # the dense form stays in float32
            out = self.attend(q, k, v, blocks)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class LogNAttention(SoftmaxAttention):
    """LogN with a learned rate: the scores of a row of n keys are multiplied by s_h ln n.

    The factor is on the queries, where learning it is cheap. s starts at 1/(ln L - 1), with which
    the factor is 1 in the mean over the rows of a sequence of the trained length L.

    Reference: Nakanishi, arXiv 2501.19399, without its offset; "LogN" of arXiv 2505.17083.
    """

    def __init__(
        self, width: int, head_dim: int, rotary: Rotary | None = None, *, trained: int
    ) -> None:
        """Build the layer; `trained` is the trained length L, the rest as in the base class."""
        super().__init__(width, head_dim, rotary)
        self.rate = nn.Parameter(torch.full((self.num_heads,), 1 / (math.log(trained) - 1)))

    def mechanism(self) -> Mod:
        """What the layer does to the base logits, as a score_mod."""
        return sm.ssmax(self.rate.detach())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask | None) -> Tensor:
        """Attention of the heads, `[B, H, T, D]`."""
        return super().attend(sm.scale_queries(q, sm.ssmax(self.rate)), k, v, blocks)


class ScaleInvariantAttention(SoftmaxAttention):
    """Scale-invariant attention with numbers of each head: sigma and mu measured, or tau learned.

    sigma = 1 and mu = 0 until `set_law`. A tau that the score_mod captures would cost
    FlexAttention's backward an atomic addition for every pair, so tau is learned from 16 random
    rows of each sequence: the score_mod has the tau of the last `refresh`, and

        (T / 16) (o_r(tau) - stop(o_r(tau)))

    is added to the output of each sampled row r, where o_r is its attention by the dense form with
    q, k and v held. This is 0, and its gradient is an unbiased estimate of tau's.
    """

    law: Tensor

    def __init__(
        self,
        width: int,
        head_dim: int,
        rotary: Rotary | None = None,
        *,
        tau: float = 10.0,
        learned: bool = False,
        sinks: int = 0,
    ) -> None:
        """Build the layer.

        Args:
            width: as in the base class.
            head_dim: as in the base class.
            rotary: as in the base class.
            tau: scale in tokens, of every head at first.
            learned: whether it is learned.
            sinks: keys at the start that are left alone.
        """
        super().__init__(width, head_dim, rotary)
        scale = torch.full((self.num_heads,), tau)
        self.log_tau = nn.Parameter(scale.log()) if learned else None
        self.register_buffer("law", torch.stack([torch.ones_like(scale), torch.zeros_like(scale)]))
        self.tau, self.sinks = tau, sinks
        self.register_load_state_dict_post_hook(lambda layer, keys: layer.refresh())
        self.refresh()

    def set_law(self, sigma: Tensor, mu: Tensor) -> None:
        """Take on the deviation and the mean of the base logits, each `[H]`."""
        self.law.copy_(torch.stack([sigma, mu]))
        self.refresh()

    def refresh(self) -> None:
        """Make the score_mod anew, of the tau, sigma and mu of now."""
        sigma, mu = self.law.clone()
        tau = self.tau if self.log_tau is None else self.scales()
        self.score_mod = sm.to_device(self._made(tau, sigma=sigma, mu=mu), self.law.device)

    def scales(self) -> Tensor:
        """Tau of each head, `[H]`, without a gradient."""
        if self.log_tau is None:
            return torch.full((self.num_heads,), self.tau)
        return self.log_tau.detach().exp()

    def _made(self, tau: Tensor | float, **law: Tensor) -> Mod:
        mod = sm.scale_invariant(tau, **law)
        return sm.exempt_keys(mod, self.sinks) if self.sinks else mod

    def attend(self, q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask | None) -> Tensor:
        """Attention of the heads, `[B, H, T, D]`."""
        out = super().attend(q, k, v, blocks)
        if self.log_tau is None or not torch.is_grad_enabled():
            return out
        length = q.shape[2]
        rows = torch.randint(length, (_SAMPLED,), device=q.device)
        keys = torch.arange(length, device=q.device)
        dense = sm.dense_attention(
            q[:, :, rows].detach(),
            k.detach(),
            v.detach(),
            sm.with_positions(self._made(self.log_tau.exp()), rows, keys),
            lambda b, h, q_idx, kv_idx: rows[q_idx] >= kv_idx,
        )
        return out.index_add(2, rows, (dense - dense.detach()) * (length / _SAMPLED))
