"""Rotary position embeddings: RoPE, p-RoPE and what applies them.

Rotating the pair (x_i, x_(i + d/2)) of a query at position m and of a key at position n by the
angles m w_i and n w_i makes their product a function of m - n (Su et al., arXiv 2104.09864). The
schemes differ in the frequencies w_i alone, and some in a factor on cos and sin. A factory returns
a `Rotary`, which holds those and applies them to queries or keys at any positions: rotate keys
before they are cached, or cache them as they are and rotate late. NoPE is to use none of these.
The schemes that stretch a trained model to longer contexts are in `rotary_scaled.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from score_mods._checks import boolean, fits, floating, integer, kind_of, number


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotates queries and keys by their positions.

    Attributes:
        frequencies: angular frequencies in radians per token, `(R/2,)` for the R leading channels
            of a head that are rotated, float64; 0 leaves a pair as it is.
        attention_factor: factor on cos and sin; scores get its square.
        interleaved: pair channels (2i, 2i + 1) rather than (i, i + R/2).
        start: the scheme of the first tokens, if they have another, for as many channels.
        start_tokens: how many these are.
    """

    frequencies: Tensor
    attention_factor: float = 1.0
    interleaved: bool = False
    start: Rotary | None = None
    start_tokens: int = 0

    def __post_init__(self) -> None:
        """Check the parts."""
        floating("frequencies", self.frequencies, "R/2")
        number("attention_factor", self.attention_factor)
        boolean("interleaved", self.interleaved)
        integer("start_tokens", self.start_tokens, at_least=0)
        if self.start is not None:
            if not isinstance(self.start, Rotary):
                raise TypeError(f"start must be a Rotary or None, got {type(self.start).__name__}")
            if not fits(self.start.frequencies.shape, self.frequencies.shape):
                raise ValueError(
                    f"start must have {len(self.frequencies)} frequencies, "
                    f"got {len(self.start.frequencies)}"
                )

    def to(self, device: torch.device | str) -> Rotary:
        """The scheme with its frequencies on `device`, where no call then has to copy them to.

        Args:
            device: of the queries and keys, one that has float64.

        Returns:
            A scheme of the same angles.

        Raises:
            ValueError: if the frequencies are on the meta device, and have no values.
        """
        if self.frequencies.is_meta and torch.device(device).type != "meta":
            raise ValueError(
                "frequencies must have values, got a Rotary on the meta device: make it outside "
                'torch.device("meta")'
            )
        start = None if self.start is None else self.start.to(device)
        return replace(self, frequencies=self.frequencies.to(device), start=start)

    def cos_sin(
        self, positions: Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the angles at `positions`, times the attention factor.

        Angles are formed in float64 (float32 on devices that have none): float32 is off by 0.003
        rad at 65,536 tokens.

        Args:
            positions: integer or floating, any shape `(...)`.
            dtype: dtype of the result.

        Returns:
            `(cos, sin)`, each `(..., R/2)`.

        Raises:
            TypeError: if `positions` is no integer or floating tensor.
        """
        _check_positions(positions)
        wide = torch.float32 if positions.device.type == "mps" else torch.float64
        angles = positions.to(wide)[..., None] * self.frequencies.to(positions.device, wide)
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        if self.start is not None:
            first = (positions < self.start_tokens)[..., None]
            start_cos, start_sin = self.start.cos_sin(positions, wide)
            cos, sin = torch.where(first, start_cos, cos), torch.where(first, start_sin, sin)
        return cos.to(dtype), sin.to(dtype)

    def __call__(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rotates queries or keys.

        Args:
            x: `(B, H, T, D)`; channels beyond the rotated ones pass through.
            positions: of the T tokens, `(T,)` or `(B, T)`; 0 to T - 1 if not given.

        Returns:
            The rotated tensor, in the shape and dtype of x; computed in `promote_types(x.dtype,
            float32)`.

        Raises:
            TypeError: if x is no floating tensor, or positions no integer or floating one.
            ValueError: if x has not four axes or too few channels, or positions do not fit.
        """
        if positions is not None:
            _check_positions(positions)
        self._check(x)
        if positions is None:
            positions = torch.arange(x.shape[2], device=x.device)
        if not any(fits(positions.shape, y) for y in (x.shape[2:3], (x.shape[0], x.shape[2]))):
            raise ValueError(
                f"positions must have shape ({x.shape[2]},) or ({x.shape[0]}, {x.shape[2]}), "
                f"got {tuple(positions.shape)}"
            )
        cos, sin = self.cos_sin(positions, torch.promote_types(x.dtype, torch.float32))
        return self.turn(x, cos, sin)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates queries or keys by angles that `cos_sin` gave once for all layers of a model.

        Args:
            x: `(B, H, T, D)`.
            cos, sin: `(T, R/2)` or `(B, T, R/2)`.

        Returns:
            The rotated tensor, in the shape and dtype of x.

        Raises:
            TypeError: if an argument is no floating tensor.
            ValueError: if x has not four axes or too few channels, or cos or sin another shape.
        """
        self._check(x)
        rotated = 2 * self.frequencies.shape[0]
        for name, table in (("cos", cos), ("sin", sin)):
            if not isinstance(table, Tensor) or not table.is_floating_point():
                raise TypeError(f"{name} must be a floating tensor, got {kind_of(table)}")
            rows = x.shape[2], rotated // 2
            if not any(fits(table.shape, y) for y in (rows, (1, *rows), (x.shape[0], *rows))):
                raise ValueError(
                    f"{name} must have shape {rows} or {(x.shape[0], *rows)}, "
                    f"got {tuple(table.shape)}"
                )
        if cos.ndim == 3:
            cos, sin = cos[:, None], sin[:, None]
        part = x[..., :rotated].to(cos.dtype)
        if self.interleaved:
            first, second = part[..., 0::2], part[..., 1::2]
        else:
            first, second = part.chunk(2, dim=-1)
        turned = first * cos - second * sin, second * cos + first * sin
        result = torch.stack(turned, -1).flatten(-2) if self.interleaved else torch.cat(turned, -1)
        return torch.cat([result.to(x.dtype), x[..., rotated:]], -1)

    def _check(self, x: Tensor) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"x must be a floating tensor, got {kind_of(x)}")
        rotated = 2 * self.frequencies.shape[0]
        if x.ndim != 4 or x.shape[-1] < rotated:
            raise ValueError(
                f"x must have shape (B, H, T, D) with D >= {rotated}, got {tuple(x.shape)}"
            )


def _check_positions(positions: Tensor) -> None:
    kind = kind_of(positions)
    if not isinstance(positions, Tensor) or kind == torch.bool or positions.is_complex():
        raise TypeError(f"positions must be an integer or floating tensor, got {kind}")


def _pairs(head_dim: int) -> int:
    if integer("head_dim", head_dim, 2) % 2:
        raise ValueError(f"head_dim must be even, got {head_dim}")
    return head_dim // 2


def rope(head_dim: int, base: float = 10000.0) -> Rotary:
    """RoPE: w_i = base^(-2i/d).

    Args:
        head_dim: channels d of a head, even.
        base: ratio of the highest to the (never reached) lowest frequency, positive.

    Returns:
        A `Rotary`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `head_dim` is odd or `base` not positive.

    Reference: Su et al., "RoFormer", arXiv 2104.09864, section 3.3.

    >>> rope(4).frequencies.tolist()
    [1.0, 0.01]
    """
    exponent = torch.arange(_pairs(head_dim), dtype=torch.float64) / (head_dim // 2)
    return Rotary(number("base", base, positive=True) ** -exponent)


def p_rope(head_dim: int, p: float = 0.5, base: float = 10000.0) -> Rotary:
    """p-RoPE: RoPE without its lowest frequencies, floor(p d/2) of which are kept.

    w_i = base^(-2i/d) for i < floor(p d/2), else 0; p = 0 is NoPE, p = 1 is RoPE.

    Args:
        head_dim: channels d of a head, even.
        p: fraction of the frequencies that is kept, in [0, 1].
        base: as in `rope`.

    Returns:
        A `Rotary`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `p` is outside [0, 1], or as in `rope`.

    Reference: Barbero et al., "Round and Round We Go!", arXiv 2410.06205, section 6.1. For the
    form that the scale-invariant paper most likely used, see `half_truncated_rope`.
    """
    if not 0 <= number("p", p) <= 1:
        raise ValueError(f"p must be a number in [0, 1], got {p}")
    frequencies = rope(head_dim, base).frequencies
    kept = torch.arange(len(frequencies)) < math.floor(p * len(frequencies))
    return Rotary(torch.where(kept, frequencies, 0.0))


def half_truncated_rope(head_dim: int, base: float = 1024.0) -> Rotary:
    """The p-RoPE of modded-nanogpt: d/4 frequencies from 1 down to 1/base, and d/4 zeros.

    w_i = base^(-i / (d/4 - 1)) for i < d/4, else 0. The scale-invariant paper builds on this code
    and names a base of 1024 for its p-RoPE without stating p, so this is most likely what it used.

    Args:
        head_dim: channels d of a head, a multiple of 4, at least 8.
        base: ratio of the highest to the lowest frequency, positive.

    Returns:
        A `Rotary`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `head_dim` is no multiple of 4 or below 8, or `base` is not positive.

    Reference: the public modded-nanogpt training script; arXiv 2505.17083, appendix on
    hyperparameters.
    """
    if _pairs(head_dim) % 2 or head_dim < 8:
        raise ValueError(f"head_dim must be a multiple of 4 and at least 8, got {head_dim}")
    exponent = torch.linspace(0, 1, head_dim // 4, dtype=torch.float64)
    kept = number("base", base, positive=True) ** -exponent
    return Rotary(torch.cat([kept, torch.zeros_like(kept)]))
