"""Self-attention as a module: projections, QK-norm, rotary, a score_mod, a cache, a sink.

Which implementation: `impl="flex"` compiles FlexAttention and is the one for a GPU, by itself or
inside a compiled model. On a CPU, FlexAttention does not train, gives no lse, which a sink needs,
and joins no compiled model (Inductor of torch 2.13 takes no operation behind it): there, and for
`torch.export`, use `impl="dense"`. Nothing is chosen for you; what cannot work says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._device import DeviceContext

from score_mods._captured import (
    Mod,
    arguments_of,
    check_mask_mod,
    check_values,
    described,
    named,
    to_device,
    within,
)
from score_mods._checks import boolean, floating, integer, number, positions_of_shape
from score_mods.attention import attention, check_impl
from score_mods.cache import KVCache
from score_mods.combine import with_positions
from score_mods.masks import causal
from score_mods.rotary import Rotary
from score_mods.sinks import attention_sink

_POSITIVE = ("tau", "sigma", "alpha")
# Modules whose factories take from a learned tensor the value of a head and nothing else.
_BY_HEAD = {f"score_mods.{name}" for name in ("biases", "scale_invariant", "temperatures")}
_COPIES = 1024


class Learnable(nn.Module):
    """A score_mod whose parameters are learned: calling it makes the score_mod of their values.

    `Learnable(scale_invariant, tau=torch.full((H,), 10.0))` has the parameter `log_tau`: what must
    stay positive (tau, sigma and alpha) is held by its logarithm, which also suits its range. All
    other tensors are parameters under their own names.
    """

    def __init__(self, factory: Callable[..., Mod], **arguments: Any) -> None:
        """Hold the parameters.

        Args:
            factory: a function of this library, such as `scale_invariant`, `ssmax` or `t5_bias`,
                or one of yours that composes several.
            arguments: its arguments by name. Floating tensors become parameters, copied, one value
                for each head; everything else is passed on as it is.

        Raises:
            TypeError: if `factory` is not callable.
            ValueError: if no argument is a floating tensor, or tau, sigma or alpha not positive
                and finite.
        """
        super().__init__()
        if not callable(factory):
            raise TypeError(f"factory must be callable, got {type(factory).__name__}")
        self.factory, self.arguments = factory, {}
        for name, value in arguments.items():
            if not isinstance(value, Tensor) or not value.is_floating_point():
                self.arguments[name] = value
            elif name not in _POSITIVE:
                self.register_parameter(name, nn.Parameter(value.detach().clone()))
            else:
                fits = (value > 0) & value.isfinite()
                check_values(name, "positive and finite", value, fits)
                self.register_parameter(f"log_{name}", nn.Parameter(value.detach().log()))
        if not self._parameters:
            raise ValueError("arguments must have a floating tensor to learn, got none")

    def forward(self, spread: bool = False) -> Mod:
        """The score_mod with the parameters' present values.

        Args:
            spread: whether each value is to lie at 1,024 places, one for a pair of tokens and the
                next for the next. FlexAttention's backward on a GPU adds every pair's gradient to
                what a score_mod captures, and additions to one place wait for each other. Without
                effect unless all parameters have one value a head and the factory is one of
                scale invariance, temperatures or biases.
        """
        learned = {
            name.removeprefix("log_"): p.exp() if name.startswith("log_") else p
            for name, p in self._parameters.items()
            if p is not None
        }
        spread &= getattr(self.factory, "__module__", "") in _BY_HEAD
        spread &= all(p.ndim == 1 for p in learned.values())
        heads = max(len(p) for p in learned.values()) if spread else 0
        if spread:
            learned = {
                name: p.expand(heads)[:, None].expand(heads, _COPIES).flatten()
                for name, p in learned.items()
            }
        # The factory makes tensors of numbers, which must be on the parameters' device. This is
        # `with device:` in the form that torch.compile takes.
        with DeviceContext(next(iter(learned.values())).device):
            mod = self.factory(**self.arguments, **learned)
        return _at_places(mod, heads) if spread else mod


def _at_places(mod: Mod, heads: int) -> Mod:
    """A score_mod of `heads` times 1,024 values, for each pair of tokens at one of a head's."""

    def spread_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        # The pairs of 16 by 64 neighbours have places of their own.
        place = (64 * q_idx + kv_idx) & (_COPIES - 1)
        return mod(score, b, place if heads == 1 else h * _COPIES + place, q_idx, kv_idx)

    described(spread_mod, getattr(mod, "__name__", "score_mod"), mod)
    spread_mod.num_heads = None if heads == 1 else heads  # type: ignore[attr-defined]
    return spread_mod


class FlexSelfAttention(nn.Module):
    """Self-attention with a score_mod and a mask_mod, for training and for decoding with a cache.

    out = o_proj(softmax(mask(score_mod(q kᵀ / sqrt(D)))) v), with q and k projected, normalised to
    root mean square 1 over the channels of a head (QK-norm without a weight, which keeps the base
    logits' standard deviation near 1, as `scale_invariant` assumes) and rotated.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        score_mod: Mod | Learnable | None = None,
        mask_mod: Mod | None = causal,
        rotary: Rotary | None = None,
        qk_norm: bool = True,
        sink: float | None = None,
        impl: str = "flex",
    ) -> None:
        """Build the layer.

        Args:
            dim: channels of the model; each head has dim/num_heads of them.
            num_heads: number of query heads H, divides `dim`.
            num_kv_heads: number of key and value heads, divides `num_heads`; `num_heads` if not
                given.
            score_mod: a score_mod, a `Learnable`, or None.
            mask_mod: a mask_mod, or None.
            rotary: a rotary scheme for heads of dim/num_heads channels, or None.
            qk_norm: whether queries and keys are normalised.
            sink: initial logit of a learned attention sink for each head, or None.
            impl: "flex" or "dense", as in `attention`.

        Raises:
            TypeError: if an argument has the wrong type.
            ValueError: if sizes do not divide, `rotary` is for more channels than a head has, or
                `score_mod` captures a tensor that requires grad, which would not be a parameter
                of the module.
        """
        super().__init__()
        heads = integer("num_heads", num_heads)
        kv_heads = heads if num_kv_heads is None else integer("num_kv_heads", num_kv_heads)
        if integer("dim", dim) % heads:
            raise ValueError(f"dim must be a multiple of num_heads, got {dim} and {heads}")
        if heads % kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {heads} and {kv_heads}"
            )
        if not isinstance(score_mod, Learnable) and score_mod is not None:
            if arguments_of(score_mod) != 5:
                raise TypeError(
                    "score_mod must be a score_mod (score, b, h, q_idx, kv_idx) or a Learnable, "
                    f"got {named(score_mod)}"
                )
            if any(isinstance(x, Tensor) and x.requires_grad for x in within(score_mod)):
                raise ValueError(
                    "score_mod captures a tensor that requires grad and would be no parameter of "
                    "this module; use Learnable(factory, name=tensor)"
                )
        if mask_mod is not None:
            check_mask_mod(mask_mod)
        if rotary is not None and not isinstance(rotary, Rotary):
            raise TypeError(f"rotary must be a Rotary, got {type(rotary).__name__}")
        if rotary is not None and 2 * len(rotary.frequencies) > dim // heads:
            raise ValueError(
                f"rotary must be for the {dim // heads} channels of a head at most, "
                f"got {2 * len(rotary.frequencies)}"
            )
        boolean("qk_norm", qk_norm)
        check_impl(impl)
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.score_mod, self.mask_mod, self.rotary = score_mod, mask_mod, rotary
        self.qk_norm, self.impl = qk_norm, impl
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.sink = (
            None if sink is None else nn.Parameter(torch.full((heads,), number("sink", sink)))
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FlexSelfAttention:
        """Move what mods and rotary hold along with the parameters: a compiled model cannot."""
        super()._apply(fn, recurse)
        device = self.q_proj.weight.device
        if device.type != "meta":
            if self.score_mod is not None and not isinstance(self.score_mod, Learnable):
                self.score_mod = to_device(self.score_mod, device)
            if self.mask_mod is not None:
                self.mask_mod = to_device(self.mask_mod, device)
            if self.rotary is not None and device.type != "mps":
                self.rotary = self.rotary.to(device)
        return self

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        mask_mod: Mod | BlockMask | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: `(B, T, dim)`.
            positions: positions of the tokens, integers, `(T,)` or `(B, T)`, for the rotary and
                the score_mod: of packed documents, say. Without a cache 0 to T - 1 if not given,
                and the mask_mod has indices in x all the same. With a cache they go on from the
                tokens in it if not given, the mask_mod has positions, and a negative position
                marks padding. For the rotary and the score_mod a negative one is 0.
            cache: keys and values of the tokens before; the new ones are added to it.
            mask_mod: a mask_mod or BlockMask for this call instead of the module's: of packed
                documents, or shared by all layers. With a cache, a mask_mod.

        Returns:
            `(B, T, dim)`.

        Raises:
            TypeError: if an argument has the wrong type.
            ValueError: if shapes do not fit, or `impl="flex"` cannot do what is asked; the message
                names the way that works.
        """
        floating("x", x)
        if x.ndim != 3 or x.shape[2] != self.q_proj.in_features:
            raise ValueError(
                f"x must have shape (B, T, {self.q_proj.in_features}), got {tuple(x.shape)}"
            )
        if self.impl == "flex" and x.device.type == "cpu" and torch.compiler.is_compiling():
            raise ValueError('FlexAttention joins no compiled model on a CPU; use impl="dense"')
        B, T, _ = x.shape
        if positions is not None:
            positions = positions_of_shape(positions, (T,), (B, T))
        mask = self.mask_mod if mask_mod is None else mask_mod
        if mask is not None and not isinstance(mask, BlockMask):
            check_mask_mod(mask)
        if cache is not None:
            if not isinstance(cache, KVCache):
                raise TypeError(f"cache must be a KVCache or None, got {type(cache).__name__}")
            if len(cache.lengths) != B:
                raise ValueError(f"cache must be for a batch of {B}, got {len(cache.lengths)}")
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(B, T, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).view(B, T, self.num_kv_heads, self.head_dim).transpose(1, 2)
        if self.qk_norm:
            q, k = (F.rms_norm(y, (self.head_dim,)).to(v.dtype) for y in (q, k))
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        here = positions
        if cache is not None and positions is None:
            here = cache.next_positions(T)
        at = None if here is None else here.clamp(min=0)
        if self.rotary is not None:
            q, k = self.rotary(q, at), self.rotary(k, at)

        kv_at = at
        if cache is not None and here is not None:
            if isinstance(mask, BlockMask):
                raise ValueError("mask_mod must be a mask_mod with a cache, got a BlockMask")
            k, v, kv_positions = cache.update(k, v, positions)
            mask = cache.mask(mask, here, kv_positions)
            kv_at = kv_positions.clamp(min=0)
        # The dense form's products are float32, also under autocast.
        with torch.autocast(x.device.type, enabled=False):
            score_mod: Mod | None = self.score_mod
            if isinstance(self.score_mod, Learnable):
                trains = torch.is_grad_enabled() and self.impl == "flex" and x.is_cuda
                score_mod = self.score_mod(spread=trains)
            if score_mod is not None and at is not None:
                score_mod = with_positions(score_mod, at, kv_at)
            out: Any = attention(
                q,
                k,
                v,
                score_mod,
                mask,
                enable_gqa=True,
                return_lse=self.sink is not None,
                impl=self.impl,
            )
            if self.sink is not None:
                out, _ = attention_sink(self.sink)(*out)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, -1))
