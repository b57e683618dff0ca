"""Changes of queries and keys that are neither a rotation nor a factor of the row, and PoSE."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from score_mods._captured import parameter
from score_mods._checks import floating, integer, number
from score_mods.rotary import Rotary


class QueryKeyTransform(NamedTuple):
    """One function for the queries and another for the keys.

    Attributes:
        queries: from `(B, H, T_q, D)` to queries for `attention`.
        keys: from `(B, H_kv, T, D)`, or what the mechanism has for keys, to keys for `attention`.
    """

    queries: Callable[..., Tensor]
    keys: Callable[..., Tensor]


def cosscale(c: float | Tensor = 128.0, eps: float = 1e-9) -> QueryKeyTransform:
    """CosScale: makes the score c times the cosine of query and key.

    s = c q·k / (|q| |k|). The queries are multiplied by sqrt(D) besides, which `attention`'s
    default scale takes off again. A large c approximates attention within a window of angles.

    Args:
        c: factor, number or tensor of shape `(H,)` or `(1,)`, learnable if it requires grad; the
            paper has 128.
        eps: least length of a vector, positive.

    Returns:
        `queries(q)` and `keys(k)`, which keep shape and dtype.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `eps` is not positive, or the shape of `c` does not fit.

    Reference: Li et al., "Information Entropy Invariance", arXiv 2501.08570, and the authors'
    public code.

    >>> transform = cosscale(2.0)
    >>> q = k = torch.tensor([[[[3.0, 4.0], [0.0, 1.0]]]])
    >>> transform.queries(q) @ transform.keys(k).mT / 2**0.5
    tensor([[[[2.0000, 1.6000],
              [1.6000, 2.0000]]]])
    """
    factor, least = parameter("c", c), number("eps", eps, positive=True)

    def unit(name: str, x: Tensor) -> Tensor:
        floating(name, x, "B", "H", "T", "D")
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return wide / wide.norm(dim=-1, keepdim=True).clamp(min=least)

    def queries(q: Tensor) -> Tensor:
        direction = unit("q", q)
        if factor.numel() not in (1, q.shape[1]):
            raise ValueError(f"c is for {factor.numel()} heads, q has {q.shape[1]}")
        scale = factor.to(direction) if factor.ndim == 0 else factor.to(direction)[:, None, None]
        return (q.shape[-1] ** 0.5 * scale * direction).to(q.dtype)

    return QueryKeyTransform(queries, lambda k: unit("k", k).to(k.dtype))


def coca(rotary: Rotary) -> QueryKeyTransform:
    """CoCA: keys that are collinear with each query, without one key for each pair.

    CoCA's key for a query q is q times a gate relu(t) of the key's token, one for each pair of
    channels, and both are rotated. With z_c the pair as a complex number, the score is

        s_ij = sum_c |z_ic|² relu(t_jc) cos((i - j) w_c) / sqrt(D),

    which is the product of the vectors ([|z_i|²], [0]) and ([relu(t_j)], [0]) rotated to i and j.
    So the queries that `queries(q, positions)` returns, and the keys that `keys(t, positions)`
    returns, go to `attention` as they are, with a cache and any mask or score_mod.

    Args:
        rotary: the rotary scheme, of as many channels as a head has.

    Returns:
        `queries(q, positions=None)` for q of `(B, H, T_q, D)`, and `keys(t, positions=None)` for
        t of `(B, H_kv, T, D/2)`, before the relu.

    Raises:
        TypeError: if `rotary` is no Rotary.

    Reference: Zhu et al., "CoCA: Fusing Position Embedding with Collinear Constrained Attention",
    arXiv 2309.08646. The authors' public code averages the two halves of a projection to D
    channels for t. Its LLaMA multiplies q with the rotated gate, R_j t, instead of rotating their
    product, and its score is no function of i - j; this is the paper's.
    """
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary must be a Rotary, got {type(rotary).__name__}")
    pairs = len(rotary.frequencies)

    def rotated(real: Tensor, positions: Tensor | None) -> Tensor:
        parts = real, torch.zeros_like(real)
        flat = torch.stack(parts, -1).flatten(-2) if rotary.interleaved else torch.cat(parts, -1)
        return rotary(flat, positions)

    def queries(q: Tensor, positions: Tensor | None = None) -> Tensor:
        if floating("q", q).ndim != 4 or q.shape[-1] != 2 * pairs:
            raise ValueError(f"q must have shape (B, H, T, {2 * pairs}), got {tuple(q.shape)}")
        by_pair = (pairs, 2) if rotary.interleaved else (2, pairs)
        squares = q.unflatten(-1, by_pair).to(torch.promote_types(q.dtype, torch.float32)).square()
        return rotated(squares.sum(-1 if rotary.interleaved else -2), positions).to(q.dtype)

    def keys(t: Tensor, positions: Tensor | None = None) -> Tensor:
        if floating("t", t).ndim != 4 or t.shape[-1] != pairs:
            raise ValueError(f"t must have shape (B, H, T, {pairs}), got {tuple(t.shape)}")
        return rotated(t.relu(), positions)

    return QueryKeyTransform(queries, keys)


def pose_positions(
    length: int, target_length: int, generator: torch.Generator | None = None
) -> Tensor:
    """PoSE: positions of a short training sequence, spread over a long context by one skip.

    The sequence is cut into two chunks at a random place in its first half; the first keeps its
    positions and the second is moved on by a random number of tokens, up to `target_length -
    length`. Give the positions to a `Rotary` and to `with_positions`. The authors also draw the
    second chunk's tokens from further on in the document, which is the data loader's to do.

    Args:
        length: tokens of the sequence, at least 2.
        target_length: length of the context to train for, at least `length`.
        generator: source of randomness on the CPU.

    Returns:
        Increasing positions below `target_length`, `(length,)`, int64.

    Raises:
        TypeError: if a length is no int, or `generator` none.
        ValueError: if a length is out of its range.

    Reference: Zhu et al., "PoSE", arXiv 2309.10400, in the form of the authors' public code.

    >>> pose_positions(6, 100, torch.Generator().manual_seed(0)).diff().gt(1).sum().item()
    1
    """
    integer("length", length, 2)
    skips = integer("target_length", target_length, length) - length
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator or None, got {type(generator).__name__}"
        )

    def draw(low: int, high: int) -> Tensor:
        return torch.randint(low, high + 1, (), generator=generator)

    positions = torch.arange(length)
    first = draw(1, (length + 1) // 2)
    return torch.where(positions < first, positions, positions + draw(0, skips))
