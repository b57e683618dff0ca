"""A layer of power attention, to stand where a Transformer has its attention."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from power.attention import (
    Impl,
    check_impl,
    check_tensor,
    count_sequences,
    power_attention,
)
from power.decode import (
    DecodeState,
    check_decode_state,
    power_attention_prefill,
    power_attention_step,
)
from power.feature_map import check_degree, check_size
from power.reference import state_dtype

Rotary = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class PowerAttention(nn.Module):
    """Causal power attention with its projections, gates and output norm.

    `out = W_o norm(power_attention(rotary(W_q x, W_k x), W_v x, logsigmoid(W_g x + b_g)))`

    A gate `g` forgets a token after about `1 / (1 - g)` more. The gates start independent of
    the input (`W_g = 0`), with the horizons of the key heads spread geometrically between two
    bounds `a` and `b`: head `h` has `a (b/a)^((h + 1/2) / H_kv)`, by
    `b_g = log(horizon - 1)`.

    Args:
        dim: Channels of the input and output.
        num_heads: Query heads `H`.
        num_kv_heads: Key and value heads `H_kv`, a divisor of `H`; None for `H`.
        head_dim: Channels `K` of a query or key; None for `dim / H`.
        value_dim: Channels `V` of a value; None for `K`.
        deg: The even power.
        gated: Whether there are gates.
        horizons: The bounds `a` and `b`, in tokens, above 1.
        rotary: A function of queries `[B, H, T, K]`, keys `[B, H_kv, T, K]` and positions
            (int64, `[B, T]` or `[1, T]`, from 0 in each sequence) that returns queries and
            keys, in their dtype. None for no positions.
        norm: Whether an RMS norm over `V`, shared by the heads, follows the attention.
        chunk_size: Tokens of a chunk in `forward`; None chooses.
        impl: "auto", "triton" or "reference", as in `power_attention`.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        TypeError: If a size or `deg` is not an int, `gated` or `norm` not a bool, the horizons are
            not numbers, or `rotary` is not a function.
        ValueError: If sizes, the degree or the horizons do not fit, or `impl` is unknown.

    Reference: Gelada et al., "Scaling Context Requires Rethinking Attention" (arXiv
    2507.04239). The spread of the gates is this library's choice.

    >>> layer = PowerAttention(64, num_heads=4)
    >>> layer(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        deg: int = 2,
        gated: bool = True,
        horizons: tuple[float, float] = (16, 16384),
        rotary: Rotary | None = None,
        norm: bool = True,
        chunk_size: int | None = None,
        impl: Impl = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_degree(deg)
        check_impl(impl)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = dim, num_heads, kv_heads, *(x for x in (head_dim, value_dim) if x is not None)
        if not all(type(size) is int for size in sizes):
            raise TypeError(
                "dim, num_heads, num_kv_heads, head_dim and value_dim must be ints, got "
                f"{', '.join(map(repr, sizes))}"
            )
        if min(sizes) < 1 or num_heads % kv_heads:
            raise ValueError(
                "dim, num_heads, num_kv_heads, head_dim and value_dim must be positive, and "
                f"num_heads a multiple of num_kv_heads, got {', '.join(map(str, sizes))}"
            )
        if head_dim is None and dim % num_heads:
            raise ValueError(
                f"dim must be a multiple of num_heads where head_dim is None, got {dim} and "
                f"{num_heads}"
            )
        if chunk_size is not None:
            check_size("chunk_size", chunk_size)
        for name, flag in (("gated", gated), ("norm", norm)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name} must be a bool, got {type(flag).__name__}")
        if rotary is not None and not callable(rotary):
            raise TypeError(f"rotary must be a function or None, got {type(rotary).__name__}")
        if not isinstance(horizons, (tuple, list)) or not all(
            isinstance(horizon, (int, float)) for horizon in horizons
        ):
            raise TypeError(f"horizons must be two numbers, got {horizons!r}")
        if len(horizons) != 2 or not 1 < horizons[0] <= horizons[1] < torch.inf:
            raise ValueError(
                f"horizons must be two finite numbers above 1 that do not fall, got {horizons}"
            )
        self.head_dim = dim // num_heads if head_dim is None else head_dim
        self.value_dim = self.head_dim if value_dim is None else value_dim
        self.dim, self.num_heads, self.num_kv_heads = dim, num_heads, kv_heads
        self.deg, self.horizons, self.rotary = deg, horizons, rotary
        self.chunk_size, self.impl = chunk_size, impl

        def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias, device=device, dtype=dtype)

        self.q_proj = linear(dim, num_heads * self.head_dim)
        self.k_proj = linear(dim, kv_heads * self.head_dim)
        self.v_proj = linear(dim, kv_heads * self.value_dim)
        self.gate = linear(dim, kv_heads, bias=True) if gated else None
        self.norm = nn.RMSNorm(self.value_dim, device=device, dtype=dtype) if norm else None
        self.o_proj = linear(num_heads * self.value_dim, dim)
        self.reset_gate()

    @torch.no_grad()
    def reset_gate(self) -> None:
        """Start the gates anew: independent of the input, their horizons spread over the heads."""
        if self.gate is None:
            return
        low, high = self.horizons
        head = torch.arange(self.num_kv_heads, dtype=torch.float64)
        horizon = low * (high / low) ** ((head + 0.5) / self.num_kv_heads)
        self.gate.weight.zero_()
        self.gate.bias.copy_((horizon - 1).log())

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        """Attend over whole sequences.

        Args:
            x: Inputs `[B, T, dim]`.
            cu_seqlens: Bounds of sequences packed into a batch of one, as in `power_attention`.

        Returns:
            `[B, T, dim]`.

        Raises:
            TypeError: If `x` or `cu_seqlens` has the wrong type or dtype.
            ValueError: If their shapes or bounds do not fit.
        """
        self._check(x)
        positions = torch.arange(x.shape[1], device=x.device)
        if cu_seqlens is not None:
            count_sequences(cu_seqlens, x)
            bounds = cu_seqlens.long()
            starts = bounds[torch.searchsorted(bounds[1:], positions, right=True)]
            positions = positions - starts
        out = power_attention(
            *self._project(x, positions[None]),
            deg=self.deg,
            chunk_size=self.chunk_size,
            cu_seqlens=cu_seqlens,
            impl=self.impl,
        )
        return self._merge(out)

    def prefill(self, x: Tensor) -> tuple[Tensor, DecodeState]:
        """Attend over a prompt, and return the state to decode from.

        Args:
            x: Inputs `[B, T, dim]`; `T = 0` gives the state to start from.

        Returns:
            `[B, T, dim]`, and the state.

        Raises:
            TypeError: If `x` is not a floating tensor.
            ValueError: If `x` has another shape.
        """
        self._check(x)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        out, state = power_attention_prefill(
            *self._project(x, positions), deg=self.deg, impl=self.impl
        )
        return self._merge(out), state

    def step(
        self, x: Tensor, state: DecodeState, *, inplace: bool = False
    ) -> tuple[Tensor, DecodeState]:
        """Attend from the next token, or the next few. Not differentiable.

        Args:
            x: Inputs `[B, n, dim]`.
            state: What `prefill` or the step before returned.
            inplace: Whether the tensors of `state` are updated themselves.

        Returns:
            `[B, n, dim]`, and the state after these tokens.

        Raises:
            TypeError: If `x` is not a floating tensor or `state` not a `DecodeState`.
            ValueError: If `x` has another shape, or gradients are enabled.
        """
        self._check(x)
        check_decode_state(state)
        positions = state.length[:, None] + torch.arange(x.shape[1], device=x.device)
        out, state = power_attention_step(
            *self._project(x, positions), state, deg=self.deg, inplace=inplace, impl=self.impl
        )
        return self._merge(out), state

    def extra_repr(self) -> str:
        """Return what the submodules do not show."""
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, deg={self.deg}"

    def _check(self, x: Tensor) -> None:
        check_tensor("x", x, ("B", "T", self.dim))
        if not x.is_floating_point():
            raise TypeError(f"x must have a floating dtype, got {x.dtype}")

    def _project(
        self, x: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.value_dim)).transpose(1, 2)
        if self.rotary is not None:
            q, k = self.rotary(q, k, positions)
        log_g = None
        if self.gate is not None:
            log_g = logsigmoid(self.gate(x).to(state_dtype(x.dtype))).mT
        return q, k, v, log_g

    def _merge(self, out: Tensor) -> Tensor:
        if self.norm is not None:
            out = self.norm(out.to(self.norm.weight.dtype))
        return self.o_proj(out.transpose(1, 2).flatten(2))
