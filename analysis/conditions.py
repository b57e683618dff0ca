"""The two conditions of scale-invariant attention, predicted exactly.

A mechanism that is affine in the score turns a base logit s at distance t into L = a_t s + m_t.
With s ~ N(mu_t, sigma_t²), L is Gaussian with mean l = m_t + a_t mu_t and variance
v = (a_t sigma_t)², and its exponential A~ = exp(L) has the moments

    E[A~] = exp(l + v/2),        E[A~ log A~] = (l + v) exp(l + v/2).

Total attention Z and negentropy N~ in a range of distances are sums of A~ and of A~ log A~, so
their expectations are sums of these, whatever the dependence between keys. The tails that carry
them are out of a sample's reach (v grows like twice the log of the number of keys), which is why
nothing here is a sample mean. The entropy H = log Z - N~/Z is no such sum: `expected_entropy`
simulates it. log E[Z] - E[N~]/E[Z] is not its expectation.

All of it is done with logarithms, in float64: with a deviation of 9, E[Z] itself overflows.

Reference: Anson, Wang & Aitchison, "Scale-invariant attention", arXiv 2505.17083, section 3.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from analysis.ranges import checked_edges, chunks, merge
from score_mods import to_device
from score_mods._captured import arguments_of, named
from score_mods._checks import integer, integers, number

ScoreMod = Callable[..., Tensor]
Moment = float | Tensor | Callable[[Tensor], Tensor]

_NODES_CHUNK = 1 << 10  # distances at a time in quadrature
_MOST_NODES = 370  # of more, the outermost weight underflows float64
_PROBES = (-7.0, 1.0, 11.0)  # in deviations; their sum is not 0, or an odd function would pass


@dataclass(frozen=True)
class Prediction:
    """What a score_mod does to Gaussian logits, distance by distance (float64, shape `[n]`).

    Attributes:
        t: Distances.
        a_t: Multiplier of the score; NaN where the mod is not affine in the score.
        m_t: Bias; NaN where the mod is not affine, -inf where it masks the key.
        affine: Whether the mod is affine in the score at every one of these distances.
        log_weight: log E[A~_t].
        mean_logit: E[A~_t log A~_t] / E[A~_t].
    """

    t: Tensor
    a_t: Tensor
    m_t: Tensor
    affine: bool
    log_weight: Tensor
    mean_logit: Tensor


@dataclass(frozen=True)
class Expected:
    """Expected total attention and negentropy, range by range (float64, shape `[K]`).

    Attributes:
        edges: The K+1 edges; range k is the distances `edges[k] <= t < edges[k+1]`.
        log_total: log E[Z].
        mean_logit: E[N~] / E[Z], which does not overflow.
        affine: Whether the mod is affine in the score at every distance (exact moments), rather
            than integrated by Gauss-Hermite quadrature somewhere.
    """

    edges: Tensor
    log_total: Tensor
    mean_logit: Tensor
    affine: bool

    @property
    def total(self) -> Tensor:
        """E[Z]."""
        return self.log_total.exp()

    @property
    def negentropy(self) -> Tensor:
        """E[N~]."""
        return self.total * self.mean_logit


@dataclass(frozen=True)
class Estimate:
    """Sample means with their standard errors (float64, shape `[K]`)."""

    mean: Tensor
    standard_error: Tensor


def predict(
    score_mod: ScoreMod | None,
    t: Tensor,
    *,
    q_idx: int | None = None,
    head: int = 0,
    mu: Moment = 0.0,
    sigma: Moment = 1.0,
    nodes: int = 128,
) -> Prediction:
    """Recover a_t and m_t from a score_mod, and the moments it gives Gaussian logits.

    The mod is evaluated at three scores a distance, `mu + sigma * (-7, 1, 11)`: two give a_t and
    m_t, the third says whether the mod is affine at all. Where it is, the moments are exact; where
    it is not, they are integrated by Gauss-Hermite quadrature, which 96 nodes bring to 1e-9 for
    slopes `a_t * sigma` up to 11 (a mod with a kink converges slowly: compare two `nodes`).

    Args:
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`; None is plain softmax.
        t: Distances `q_idx - kv_idx`, 1-D, integer, at least 0. The mod runs on its device.
        q_idx: Position of the query, for mods that look at it; by default the largest of `t`, the
            row that just sees that far.
        head: The `h` the mod is given, one of those it has parameters for.
        mu: Mean of the base logits: a number, one per distance, or a function of `t`.
        sigma: Their standard deviation, likewise; above 0.
        nodes: Quadrature nodes where the mod is not affine, 1 to 370: the outermost weight of
            more underflows.

    Returns:
        A `Prediction`.

    Raises:
        TypeError: `t` is not an integer tensor, `score_mod` no plain score_mod, or a number has
            the wrong type.
        ValueError: `t` is not 1-D, empty, negative or past `q_idx`; `mu` or `sigma` is not finite,
            or `sigma` not positive; `head` or `nodes` is out of its range.
    """
    if integers("t", t).ndim != 1 or not len(t):
        raise ValueError(f"t must be 1-D and not empty, got shape {tuple(t.shape)}")
    q_idx = int(t.max()) if q_idx is None else integer("q_idx", q_idx, at_least=0)
    if t.min() < 0 or t.max() > q_idx:
        raise ValueError(f"t must lie in 0..q_idx={q_idx}, got {int(t.min())}..{int(t.max())}")
    if integer("nodes", nodes) > _MOST_NODES:
        raise ValueError(f"nodes must lie in 1..{_MOST_NODES}, got {nodes}")
    mean, deviation = _at(mu, t, "mu"), _at(sigma, t, "sigma")
    if not bool((deviation > 0).all()):
        raise ValueError(f"sigma must be above 0, got {deviation.min().item()}")

    probes = [mean + z * deviation for z in _PROBES]
    low, middle, high = _apply(score_mod, torch.stack(probes), t, q_idx, head)
    a_t = (high - low) / (probes[2] - probes[0])
    m_t = middle - a_t * probes[1]
    bend = (middle - low - a_t * (probes[1] - probes[0])).abs()
    size = torch.stack([low, middle, high]).abs().amax(0)
    affine = bend <= 1e-9 * size
    masked = (low == -torch.inf) & (middle == -torch.inf) & (high == -torch.inf)
    a_t = torch.where(affine, a_t, torch.nan).masked_fill(masked, 0.0)
    m_t = torch.where(affine, m_t, torch.nan).masked_fill(masked, -torch.inf)

    variance = (a_t * deviation).square()
    centre = m_t + a_t * mean
    log_weight = centre + variance / 2
    mean_logit = torch.where(masked, 0.0, centre + variance)
    rest = ~(affine | masked)
    if rest.any():
        log_weight[rest], mean_logit[rest] = _quadrature(
            score_mod, t[rest], q_idx, head, mean[rest], deviation[rest], nodes
        )
    return Prediction(t, a_t, m_t, not bool(rest.any()), log_weight, mean_logit)


def expected(
    score_mod: ScoreMod | None,
    edges: Tensor | Sequence[int],
    *,
    q_idx: int | None = None,
    head: int = 0,
    mu: Moment = 0.0,
    sigma: Moment = 1.0,
    nodes: int = 128,
) -> Expected:
    """Sum the exact moments over ranges of distances: E[Z] and E[N~] in `[edges[k], edges[k+1])`.

    Distances are taken 32,768 at a time, so memory does not grow with the range.

    Args:
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`; None is plain softmax.
        edges: K+1 increasing integers, at least 0. The mod runs on their device.
        q_idx: Position of the query; by default `edges[-1] - 1`, the row whose furthest key is at
            the end of the last range.
        head: The `h` the mod is given.
        mu: Mean of the base logits: a number or a function of the distances.
        sigma: Their standard deviation, likewise; above 0.
        nodes: Quadrature nodes where the mod is not affine, as in `predict`.

    Returns:
        An `Expected`.

    Raises:
        TypeError: `edges` are not integers, `mu` or `sigma` is a tensor, `score_mod` is no plain
            score_mod, or a number has the wrong type.
        ValueError: `edges` do not increase, are negative or reach past `q_idx + 1`; `head` or
            `nodes` is out of its range.

    >>> from score_mods import scale_invariant
    >>> [round(z, 3) for z in expected(scale_invariant(10.0), [10, 100, 1000]).total.tolist()]
    [28.447, 36.623]
    """
    for name, moment in (("mu", mu), ("sigma", sigma)):
        if isinstance(moment, Tensor) and moment.ndim:
            raise TypeError(
                f"{name} must be a number or a function of the distances, "
                f"got a tensor of shape {tuple(moment.shape)}"
            )
    edges = checked_edges(edges)
    q_idx = int(edges[-1]) - 1 if q_idx is None else q_idx
    log_totals, mean_logits, affine = [], [], True
    for pieces in map(chunks, edges[:-1].tolist(), edges[1:].tolist()):
        parts = []
        for start, stop in pieces:
            t = torch.arange(start, stop, device=edges.device)
            part = predict(score_mod, t, q_idx=q_idx, head=head, mu=mu, sigma=sigma, nodes=nodes)
            affine = affine and part.affine
            parts.append(merge(part.log_weight, part.mean_logit))
        log_weight, mean_logit = (torch.stack(column) for column in zip(*parts, strict=True))
        log_total, mean_logit = merge(log_weight, mean_logit)
        log_totals.append(log_total)
        mean_logits.append(mean_logit)
    return Expected(edges, torch.stack(log_totals), torch.stack(mean_logits), affine)


def expected_entropy(
    score_mod: ScoreMod | None,
    edges: Tensor | Sequence[int],
    *,
    rows: int = 256,
    seed: int = 0,
    q_idx: int | None = None,
    head: int = 0,
    mu: Moment = 0.0,
    sigma: Moment = 1.0,
) -> Estimate:
    """Estimate E[H], the expected entropy within each range, from rows of Gaussian logits.

    Args:
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`; None is plain softmax.
        edges: K+1 increasing integers, at least 0. The mod runs on their device.
        rows: Rows to draw, at least 2.
        seed: Seed of the draws.
        q_idx: Position of the query; by default `edges[-1] - 1`.
        head: The `h` the mod is given.
        mu: Mean of the base logits: a number or a function of the distances.
        sigma: Their standard deviation, likewise.

    Returns:
        Mean entropy in nats and its standard error over rows, an `Estimate`.

    Raises:
        TypeError: `edges` are not integers, `score_mod` is no plain score_mod, or a number has the
            wrong type.
        ValueError: `rows` is below 2, `seed` below 0, `edges` do not increase or reach past
            `q_idx + 1`, `mu` or `sigma` is not finite, or `head` is out of its range.
    """
    integer("rows", rows, at_least=2)  # for a standard error
    integer("seed", seed, at_least=0)
    edges = checked_edges(edges)
    q_idx = int(edges[-1]) - 1 if q_idx is None else integer("q_idx", q_idx, at_least=0)
    if edges[-1] > q_idx + 1:
        raise ValueError(f"edges must not pass q_idx + 1 = {q_idx + 1}, got {int(edges[-1])}")
    generator = torch.Generator(edges.device).manual_seed(seed)
    entropies = []
    for pieces in map(chunks, edges[:-1].tolist(), edges[1:].tolist()):
        parts = []
        for start, stop in pieces:
            t = torch.arange(start, stop, device=edges.device)
            draws = torch.randn(rows, len(t), generator=generator, device=edges.device)
            scores = _at(mu, t, "mu") + _at(sigma, t, "sigma") * draws
            logits = _apply(score_mod, scores, t, q_idx, head)
            parts.append(merge(logits, logits.masked_fill(logits == -torch.inf, 0.0)))
        log_z, mean_logit = (torch.stack(column, -1) for column in zip(*parts, strict=True))
        log_z, mean_logit = merge(log_z, mean_logit)
        entropies.append((log_z - mean_logit).masked_fill(log_z == -torch.inf, 0.0))
    entropy = torch.stack(entropies, -1)
    return Estimate(entropy.mean(0), entropy.std(0) / math.sqrt(rows))


def limits(
    delta: float,
    tau: float = 10.0,
    *,
    alpha: float | None = None,
    beta: float | None = None,
    sigma: float = 1.0,
    mu: float = 0.0,
    ndim: int = 1,
    neighbours: float = 1.0,
) -> tuple[float, float]:
    """Limits of E[Z] and E[N~] over `[t, t*delta)` as t grows, under scale-invariant attention.

        E[Z] -> alpha S tau^d ln(delta),        E[N~] -> beta S tau^d ln(delta)

    with S neighbours per unit shell at distance 1. A mean `mu` of the base logits, which the mod
    leaves in place, multiplies both by e^mu and puts beta + mu alpha in the place of beta.

    Args:
        delta: Ratio of the ends of the range, above 1.
        tau: Scale in tokens, above 0.
        alpha: As in `score_mods.scale_invariant`: e^(sigma²/2) if None.
        beta: sigma² alpha if None.
        sigma: Standard deviation of the base logits, above 0.
        mu: Their mean.
        ndim: Dimension d of the grid.
        neighbours: S: 1 for causal attention, 2 for bidirectional, 2 pi on a plane.

    Returns:
        `(E[Z], E[N~])`.

    Raises:
        TypeError: An argument is no number, or `ndim` no int.
        ValueError: `delta` is not above 1, `tau`, `sigma`, `alpha` or `neighbours` not positive,
            or a number not finite.

    Reference: arXiv 2505.17083, equations 53 and 57.

    >>> [round(limit, 3) for limit in limits(10.0, tau=10.0)]
    [37.963, 37.963]
    """
    if number("delta", delta) <= 1:
        raise ValueError(f"delta must be above 1, got {delta}")
    for name, value in (("tau", tau), ("sigma", sigma), ("neighbours", neighbours)):
        number(name, value, positive=True)
    number("mu", mu), integer("ndim", ndim)
    alpha = math.exp(sigma**2 / 2) if alpha is None else number("alpha", alpha, positive=True)
    beta = sigma**2 * alpha if beta is None else number("beta", beta)
    shell = math.exp(mu) * neighbours * tau**ndim * math.log(delta)
    return alpha * shell, (beta + mu * alpha) * shell


def placed(score_mod: ScoreMod, device: torch.device, name: str = "score_mod") -> ScoreMod:
    """The mod with what it captures on `device`.

    Raises:
        TypeError: It is no plain function of five arguments.
    """
    if arguments_of(score_mod) != 5:
        raise TypeError(
            f"{name} must be a plain function (score, b, h, q_idx, kv_idx) -> score, or None for "
            f"plain softmax, got {named(score_mod)}"
        )
    return to_device(score_mod, device)


def _at(moment: Moment, t: Tensor, name: str) -> Tensor:
    """The moment at each distance, float64."""
    value = moment(t) if callable(moment) else moment
    if not isinstance(value, Tensor):
        number(name, value)
    value = torch.as_tensor(value, dtype=torch.float64, device=t.device)
    if value.ndim > 1 or (value.ndim == 1 and len(value) != len(t)):
        raise ValueError(f"{name} must have shape {tuple(t.shape)}, got {tuple(value.shape)}")
    if not bool(value.isfinite().all()):
        raise ValueError(f"{name} must be finite, got {value[~value.isfinite()][0].item()}")
    return value.expand(t.shape)


def _apply(score_mod: ScoreMod | None, scores: Tensor, t: Tensor, q_idx: int, head: int) -> Tensor:
    """The mod's logits for `scores` `[m, n]` at distances `t` `[n]`, float64."""
    integer("head", head, at_least=0)
    if score_mod is None:
        return scores
    score_mod = placed(score_mod, t.device)
    heads = getattr(score_mod, "num_heads", None) or math.inf
    if head >= heads:
        raise ValueError(f"head must be in 0..{heads - 1}, which score_mod has, got {head}")
    index = [torch.tensor(i, device=t.device) for i in (0, head, q_idx)]
    with torch.no_grad():
        return score_mod(scores, *index, q_idx - t).double().expand(scores.shape)


def _quadrature(
    score_mod: ScoreMod | None,
    t: Tensor,
    q_idx: int,
    head: int,
    mean: Tensor,
    deviation: Tensor,
    nodes: int,
) -> tuple[Tensor, Tensor]:
    """Log E[A~] and E[A~ log A~]/E[A~] by Gauss-Hermite quadrature."""
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    points = torch.as_tensor(x, device=t.device)[:, None]
    log_w = torch.as_tensor(np.log(w / math.sqrt(2 * math.pi)), device=t.device)[:, None]
    log_weights, mean_logits = [], []
    for start in range(0, len(t), _NODES_CHUNK):
        part = slice(start, start + _NODES_CHUNK)
        scores = mean[part] + points * deviation[part]
        logits = _apply(score_mod, scores, t[part], q_idx, head)
        finite = logits.masked_fill(logits == -torch.inf, 0.0)
        log_weight, mean_logit = merge((log_w + logits).T, finite.T)
        log_weights.append(log_weight)
        mean_logits.append(mean_logit)
    return torch.cat(log_weights), torch.cat(mean_logits)
