"""The verdict: is an attention mechanism scale-invariant on these rows?

Under the law, exp of a logit is dominated by rare rows: over a few hundred of them the sample
means of Z and N~ miss their expectations and their intervals miss it too. So nothing here
averages an exponential. Ranges have the edges tau (delta^k - 1), where the law's mass M_k, the sum
of 1/(t/tau + 1), is tau ln(delta) for every k, and x_k = log(t + tau) grows by ln(delta) from one
to the next. Three questions are asked:

Total attention. The slope against x of the mean over rows of log(Z_k / M_k). It holds if its 95 %
interval lies inside ±0.15, rises or falls if it lies outside, and cannot be told otherwise. Beside
it stands the slope of log(E[Z_k] / M_k) from the law of the measured logits.

Negentropy. rho_k = E[N~_k] / (beta M_k), from the law: exact moments of the mechanism with the
mean and deviation of the base logits as measured at each distance. Scale invariance makes rho_k
constant (1 if the law has this beta). It may be negative, so no logarithm is taken: the spread is
the largest factor between a rho_k and their mean, infinite if their signs differ; its interval
takes in the 95 % interval of every range. It holds if that lies below 2, fails if it lies above.

Weak sparsity. The slope against x of the mean entropy within ranges, over the last decade. Below
0.5 and below that of the first decade it is consistent with o(log t), above 0.9 it fails.

Intervals come from a bootstrap over blocks of rows, since neighbouring queries of a text are
alike.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import index
from typing import Any

import torch
from torch import Tensor

from analysis.conditions import expected, predict
from analysis.measure import Measurement
from analysis.ranges import checked_edges, law_edges, law_mass, merge
from analysis.verdict import FLAT, SLOPE, SPREAD, STEEP, Finding, Verdict, Verdicts
from score_mods._checks import integer, number

_LEAST_KEYS = 8  # in a range
_SAMPLED = 16  # distances in a range, for intervals
_FLOOR = -1e6  # stands for log 0


def judge(
    measurement: Measurement,
    mechanism: str,
    *,
    head: int = 0,
    tau: float = 10.0,
    delta: float = 2.0,
    beta: float | None = None,
    edges: Tensor | Sequence[int] | None = None,
    block: int | None = None,
    resamples: int = 400,
    seed: int = 0,
) -> Verdict:
    """Judge one mechanism on one head of a measurement.

    Args:
        measurement: From `measure` or `measure_gaussian`.
        mechanism: Name of the mechanism in it.
        head: The head.
        tau: Scale of the ranges in tokens: the mechanism's own if it has one.
        delta: Ratio of the ranges, above 1.
        beta: Constant of the negentropy's law, above 0; e^0.5 if None.
        edges: Edges of the ranges, among those measured; by default those of
            `law_edges(tau, delta, ...)` that every row reaches before its key 0, from the first
            range of at least 8 keys on.
        block: Consecutive rows resampled together. By default 1 if all rows have the same query
            position (independent draws), else about the square root of their number.
        resamples: Bootstrap resamples, at least 40.
        seed: Seed of the bootstrap.

    Returns:
        A `Verdict`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range, `edges` were not measured or pass a row's
            first key, or the rows make fewer than four blocks.
    """
    _check_measurement(measurement)
    if not isinstance(mechanism, str):
        raise TypeError(f"mechanism must be a string, got {type(mechanism).__name__}")
    if mechanism not in measurement.mechanisms:
        known = ", ".join(measurement.mechanisms)
        raise ValueError(f"mechanism must be one of {known}, got {mechanism!r}")
    rows = measurement.mechanisms[mechanism]
    if integer("head", head, at_least=0) >= len(rows.log_z):
        raise ValueError(f"head must lie in 0..{len(rows.log_z) - 1}, got {head}")
    integer("resamples", resamples, at_least=40)
    integer("seed", seed, at_least=0)
    if block is not None:
        integer("block", block)
    beta = math.exp(0.5) if beta is None else beta
    for name, value in (("tau", tau), ("beta", beta), ("delta", delta)):
        number(name, value, positive=True)
    reach = int(measurement.q_positions.min())
    if edges is None:
        edges = law_edges(tau, delta, reach)
        edges = edges[int((edges.diff() >= _LEAST_KEYS).int().argmax()) :]
    edges = checked_edges(edges).cpu()
    if len(edges) < 3 or edges[-1] > reach:
        raise ValueError(
            f"edges must make at least two ranges that end by the first query, at {reach}, "
            f"got {edges.tolist()}"
        )
    weights, block = _resampled(measurement.q_positions.cpu(), block, resamples, seed)

    ranges = rows.ranges(edges)
    log_z, entropy = ranges.log_z[head].cpu(), ranges.entropy[head].cpu()
    mass = law_mass(edges, tau)
    ends = (edges.double() + tau).log()
    x = (ends[1:] + ends[:-1]) / 2

    slopes = _slope(log_z.clamp_min(_FLOOR) - mass.log(), x)
    total = _mean_finding(slopes, weights, _judge_slope)

    q_idx = int(measurement.q_positions.median())
    mu, sigma = measurement.base.law(head)
    law = expected(rows.score_mod, edges, q_idx=q_idx, head=head, mu=mu, sigma=sigma)
    drawn = _resampled_law(measurement, mechanism, head, edges, q_idx, weights)
    negentropy = _spread_finding(
        _ratios(law.log_total, law.mean_logit, mass), _ratios(*drawn, mass)
    )

    last, first = _decade(x, last=True), _decade(x, last=False)
    slopes = _slope(entropy[:, last], x[last])
    first_decade = float(_slope(entropy[:, first], x[first]).mean())
    falling = float(slopes.mean()) < first_decade
    weak = _mean_finding(slopes, weights, partial(_judge_entropy, falling=falling))

    return Verdict(
        mechanism=mechanism,
        head=head,
        tau=tau,
        delta=delta,
        beta=beta,
        rows=len(log_z),
        block=block,
        total=total,
        negentropy=negentropy,
        weak_sparsity=weak,
        first_decade=first_decade,
        law_slope=float(_slope(law.log_total.clamp_min(_FLOOR) - mass.log(), x)),
        edges=edges.tolist(),
        log_z=log_z.mean(0).tolist(),
        law_log_z=law.log_total.tolist(),
        rho=(law.negentropy / (beta * mass)).tolist(),
        entropy=entropy.mean(0).tolist(),
    )


def judge_all(
    measurement: Measurement,
    *,
    tau: float | Mapping[str, float] = 10.0,
    heads: Sequence[int] | None = None,
    **options: Any,
) -> Verdicts:
    """Judge every mechanism of a measurement, on every head.

    Args:
        measurement: From `measure` or `measure_gaussian`.
        tau: Scale of the ranges; a mapping gives it by mechanism, 10 for those not in it.
        heads: The heads to judge; all if None.
        **options: As for `judge`.

    Returns:
        A `Verdicts`, mechanism by mechanism.

    Raises:
        TypeError: As `judge`, or `heads` are no integers.
        ValueError: As `judge`, or `tau` names a mechanism that was not measured.
    """
    _check_measurement(measurement)
    scales = tau if isinstance(tau, Mapping) else dict.fromkeys(measurement.mechanisms, tau)
    unknown = [name for name in scales if name not in measurement.mechanisms]
    if unknown:
        known = ", ".join(measurement.mechanisms)
        raise ValueError(f"tau must be given for some of {known}, got {unknown[0]!r}")
    try:  # an array's integers, too
        heads = [*map(index, range(len(measurement.base.mu)) if heads is None else heads)]
    except TypeError as error:
        raise TypeError(f"heads must be a sequence of ints or None, got {heads!r}") from error
    return Verdicts(
        tuple(
            judge(measurement, name, head=head, tau=scales.get(name, 10.0), **options)
            for name in measurement.mechanisms
            for head in heads
        )
    )


def _check_measurement(measurement: Any) -> None:
    if not isinstance(measurement, Measurement):
        raise TypeError(f"measurement must be a Measurement, got {type(measurement).__name__}")


def _judge_slope(low: float, high: float) -> str:
    if low >= -SLOPE and high <= SLOPE:
        return "holds"
    if low > SLOPE:
        return "rises"
    return "falls" if high < -SLOPE else "cannot be told"


def _judge_spread(low: float, high: float) -> str:
    if high <= SPREAD:
        return "holds"
    return "fails" if low > SPREAD else "cannot be told"


def _judge_entropy(low: float, high: float, *, falling: bool) -> str:
    if low > STEEP:
        return "fails"
    return "consistent" if high < FLAT and falling else "cannot be told"


def _interval(resampled: Tensor) -> tuple[Tensor, Tensor]:
    """Ends of the 95 % percentile interval over the resamples `[S, ...]`."""
    ordered = resampled.sort(0).values
    tail = int(0.025 * len(ordered))
    return ordered[tail], ordered[-1 - tail]


def _mean_finding(
    values: Tensor, weights: Tensor, judged: Callable[[float, float], str]
) -> Finding:
    """The mean over rows of `values` `[N]`."""
    low, high = map(float, _interval(weights @ values / weights.sum(1)))
    return Finding(judged(low, high), float(values.mean()), low, high)


def _spread_finding(ratios: Tensor, resampled: Tensor) -> Finding:
    """The largest factor between a ratio `[K]` and 1; its interval takes every range's in."""
    ends = _interval(resampled)
    low = _factor(*ends, least=True).amax()
    high = _factor(*ends, least=False).amax()
    value = _factor(ratios, ratios, least=True).amax()
    return Finding(_judge_spread(float(low), float(high)), float(value), float(low), float(high))


def _factor(low: Tensor, high: Tensor, *, least: bool) -> Tensor:
    """Least or largest factor, at least 1, between 1 and a ratio that lies in `[low, high]`."""
    ends = (low, 1 / high) if least else (high, 1 / low)
    factor = torch.maximum(*ends).clamp_min(1.0)
    return torch.where((high if least else low) > 0, factor, torch.inf)


def _resampled(
    q_positions: Tensor, block: int | None, resamples: int, seed: int
) -> tuple[Tensor, int]:
    """How often each resample counts each row `[S, N]`, float64, and the rows in a block."""
    rows = len(q_positions)
    if block is None:
        block = 1 if bool((q_positions == q_positions[0]).all()) else math.isqrt(rows)
    blocks = math.ceil(rows / block)
    if blocks < 4:
        raise ValueError(f"block must leave at least four blocks of {rows} rows, got {block}")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(blocks, (resamples, blocks), generator=generator)
    counts = torch.zeros(resamples, blocks, dtype=torch.float64)
    counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    return counts.repeat_interleave(block, 1)[:, :rows], block


def _slope(y: Tensor, x: Tensor) -> Tensor:
    """Least-squares slope of `y` `[..., K]` against `x` `[K]`."""
    centred = x - x.mean()
    return y @ centred / centred.square().sum()


def _decade(x: Tensor, *, last: bool) -> Tensor:
    """Which ranges lie in the last, or first, decade: at least two."""
    nearest = (x[-1] - x if last else x - x[0]) <= math.log(10) + 1e-9
    nearest[-2:] |= last
    nearest[:2] |= not last
    return nearest


def _ratios(log_total: Tensor, mean_logit: Tensor, mass: Tensor) -> Tensor:
    """Each rho_k over its mean over the ranges, `[..., K]`; 0 where rho is 0 throughout."""
    log_rho = log_total - mass.log()
    top = log_rho.amax(-1, keepdim=True)
    rho = (log_rho - top.masked_fill(top == -torch.inf, 0.0)).exp() * mean_logit
    return (rho / rho.mean(-1, keepdim=True)).nan_to_num(nan=0.0)


def _resampled_law(
    measurement: Measurement,
    mechanism: str,
    head: int,
    edges: Tensor,
    q_idx: int,
    weights: Tensor,
) -> tuple[Tensor, Tensor]:
    """Log E[Z] and E[N~]/E[Z] by the law of each resample's base logits `[S, K]`.

    A range of more than 16 distances is represented by 16, evenly spaced.
    """
    base = measurement.base
    mean, deviation = (m[head].cpu() for m in base.by_distance(weights.to(base.count)))
    points, log_counts = [], []
    for start, stop in pairwise(edges.tolist()):
        n = min(stop - start, _SAMPLED)
        points.append(start + ((torch.arange(n) + 0.5) * ((stop - start) / n)).long())
        log_counts.append(torch.full((n,), math.log((stop - start) / n), dtype=torch.float64))
    t = torch.cat(points)
    cell = torch.searchsorted(base.cells.cpu(), t, right=True) - 1
    law = predict(
        measurement.mechanisms[mechanism].score_mod,
        t.repeat(len(weights)),
        q_idx=q_idx,
        head=head,
        mu=mean[:, cell].flatten(),
        sigma=deviation[:, cell].flatten(),
    )
    shape = (len(weights), len(t))
    sizes = [len(p) for p in points]
    log_weight = (law.log_weight.reshape(shape) + torch.cat(log_counts)).split(sizes, 1)
    parts = map(merge, log_weight, law.mean_logit.reshape(shape).split(sizes, 1))
    log_total, mean_logit = (torch.stack(column, 1) for column in zip(*parts, strict=True))
    return log_total, mean_logit
