"""Ranges of distances: their edges, the law's mass in them, and how parts make a whole."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from score_mods._checks import number

_CHUNK = 1 << 15


def checked_edges(edges: Tensor | Sequence[int]) -> Tensor:
    """`edges` as an int64 tensor.

    Raises:
        TypeError: They are not integers.
        ValueError: They are fewer than two, negative, or do not increase.
    """
    try:
        table = torch.as_tensor(edges)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"edges must be integers, got {edges!r}") from error
    if table.is_floating_point() or table.is_complex() or table.dtype == torch.bool:
        raise TypeError(f"edges must be integers, got {table.dtype}")
    if table.ndim != 1 or len(table) < 2 or table[0] < 0 or bool((table.diff() <= 0).any()):
        raise ValueError(
            f"edges must be two or more increasing integers from 0, got {table.tolist()}"
        )
    return table.long()


def law_edges(tau: float, delta: float, t_max: int, *, start: int = 1) -> Tensor:
    """Edges tau (delta^k - 1), between which the law's mass is tau ln(delta) whatever k.

    Sum of 1/(t/tau + 1) over `[tau (delta^k - 1), tau (delta^(k+1) - 1))`, up to the rounding of
    the edges to integers. Distance 0, the query's own key, is left out, as in the paper.

    Args:
        tau: Scale in tokens, above 0.
        delta: Ratio, above 1.
        t_max: No edge lies past it.
        start: Smallest distance, at least 0; `10 * tau` keeps to where t/tau + 1 is nearly t/tau.

    Returns:
        Increasing integers, the first of them `start`.

    Raises:
        TypeError: An argument is no number.
        ValueError: An argument is out of its range, or fewer than two ranges fit.
    """
    number("t_max", t_max)
    for name, value, least in (("tau", tau, 0), ("delta", delta, 1)):
        if number(name, value) <= least:
            raise ValueError(f"{name} must be above {least}, got {value}")
    if number("start", start) < 0:
        raise ValueError(f"start must be at least 0, got {start}")
    edges, k = [int(start)], 1
    while (edge := math.ceil(tau * (delta**k - 1) - 1e-9)) <= t_max:
        if edge > edges[-1]:
            edges.append(edge)
        k += 1
    if len(edges) < 3:
        raise ValueError(
            f"tau={tau}, delta={delta} and start={start} must leave room for two ranges up to "
            f"distance {t_max}"
        )
    return torch.tensor(edges)


def law_mass(edges: Tensor | Sequence[int], tau: float) -> Tensor:
    """Sum 1/(t/tau + 1) over each range, which under the law is E[Z]/alpha and E[N~]/beta.

    Args:
        edges: of the ranges, rising distances in tokens, `[K + 1]`.
        tau: of the law, in tokens, positive.

    Returns:
        Float64, `[K]`; tau ln(delta) but for rounding if the edges are those of `law_edges`.

    Raises:
        TypeError: `edges` are not integers, or `tau` no number.
        ValueError: `edges` do not increase from 0 or more, or `tau` is not positive.
    """
    edges = checked_edges(edges)
    number("tau", tau, positive=True)
    masses = []
    for pieces in map(chunks, edges[:-1].tolist(), edges[1:].tolist()):
        distances = (torch.arange(*piece, dtype=torch.float64) for piece in pieces)
        masses.append(math.fsum(float((tau / (t + tau)).sum()) for t in distances))
    return torch.tensor(masses, dtype=torch.float64)


def merge(log_weight: Tensor, mean_logit: Tensor) -> tuple[Tensor, Tensor]:
    """Put keys or ranges together along the last axis: their log Z and N~/Z as one.

    Args:
        log_weight: log Z of each part `[..., n]`; -inf for an empty one.
        mean_logit: N~/Z of each part `[..., n]`, finite.

    Returns:
        log Z and N~/Z of the whole, `[...]`; -inf and 0 if every part is empty.
    """
    log_total = log_weight.logsumexp(-1)
    share = (log_weight - log_total[..., None]).exp()
    empty = log_total == -torch.inf
    return log_total, (share * mean_logit).sum(-1).masked_fill(empty, 0.0)


def chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut `[start, stop)` into pieces of at most 32,768 distances."""
    for first in range(start, stop, _CHUNK):
        yield first, min(first + _CHUNK, stop)
