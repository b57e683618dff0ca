"""The logits before any mechanism: mean and deviation by distance, and how Gaussian they are."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_QQ_SAMPLE = 1 << 18  # logits a head of the QQ plot


@dataclass(frozen=True)
class BaseLogits:
    """The logits before any mechanism, without distance 0 and without key 0 (float64).

    Attributes:
        cells: The C+1 edges of the cells of distances, from 1 to T.
        mu: Mean over rows of the rows' means `[H]`.
        sigma: Root mean square over rows of the deviation within a row `[H]`.
        skewness: Of the logits standardised by their row's mean and deviation, pooled `[H]`.
        excess_kurtosis: Likewise; 0 for a Gaussian.
        drawn: Up to 2^18 logits per head, evenly spaced in distance, standardised by their row's
            mean and deviation `[H, M]`.
        count: Logits in each row and cell `[N, C]`.
        first, second: Sums of the logits and of their squares in each row and cell, both about
            `pivot` `[H, N, C]`.
        pivot: `[H]`.
    """

    cells: Tensor
    mu: Tensor
    sigma: Tensor
    skewness: Tensor
    excess_kurtosis: Tensor
    drawn: Tensor
    count: Tensor
    first: Tensor
    second: Tensor
    pivot: Tensor

    @cached_property
    def sample(self) -> Tensor:
        """The drawn logits, sorted `[H, M]`."""
        return self.drawn.sort().values

    @property
    def qq_correlation(self) -> Tensor:
        """Correlation of the sorted sample with the quantiles of a Gaussian `[H]`."""
        quantiles = normal_quantiles(self.sample.shape[1]).to(self.sample)
        centred = self.sample - self.sample.mean(-1, keepdim=True)
        return centred @ quantiles / (centred.norm(dim=-1) * quantiles.norm())

    def by_distance(self, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the logits in each cell, pooled over rows.

        Args:
            weights: How often each row is counted `[..., N]`; by default once.

        Returns:
            Two tensors `[H, ..., C]`; NaN in a cell without logits.
        """
        if weights is None:
            weights = torch.ones_like(self.count[:, 0])
        count, first, second = (
            torch.einsum("...n,hnc->h...c", weights, x)
            for x in (self.count[None], self.first, self.second)
        )
        mean = first / count
        deviation = (second / count - mean.square()).clamp_min(0.0).sqrt()
        return mean + self.pivot.reshape(-1, *[1] * (mean.ndim - 1)), deviation

    def law(self, head: int = 0) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """mu_t and sigma_t of a head as functions of the distance, constant in each cell."""
        mean, deviation = self.by_distance()
        return self.step(mean[head]), self.step(deviation[head])

    def step(self, values: Tensor) -> Callable[[Tensor], Tensor]:
        """The function of the distance that has `values` `[C]` in the cells."""

        def at(t: Tensor) -> Tensor:
            cell = torch.searchsorted(self.cells.to(t.device), t, right=True) - 1
            return values.to(t.device)[cell.clamp(0, len(values) - 1)]

        return at


class BaseSums:
    """Power sums of the base logits of every row and cell, as blocks come in."""

    def __init__(self, heads: int, q_positions: Tensor, cells: Tensor, length: int) -> None:
        self.cells = cells
        reach = torch.minimum(cells[1:], q_positions[:, None])  # key 0, at t = q_idx, is left out
        self.count = (reach - cells[:-1]).clamp_min(0).double()
        shape = (heads, *self.count.shape)
        self.powers = torch.zeros(2, *shape, dtype=torch.float64, device=cells.device)
        self.higher = torch.zeros(2, *shape[:2], dtype=torch.float64, device=cells.device)
        self.pivot: Tensor | None = None
        self.stride = max(1, math.ceil(len(q_positions) * length / _QQ_SAMPLE))
        self.drawn: list[tuple[Tensor, Tensor]] = []

    def add(
        self,
        scores: Tensor,
        kv_idx: Tensor,
        row: Tensor,
        low: int,
        high: int,
        slices: list[tuple[int, slice]],
    ) -> None:
        """Add a block of base logits; its columns run from distance `high - 1` down to `low`."""
        if self.pivot is None:
            self.pivot = scores[..., kv_idx.amin(0) > 0].double().mean((1, 2))
        out = kv_idx < 1
        first = scores - self.pivot.to(scores.dtype)[:, None, None]
        if out[:, 0].any():
            first = first.masked_fill(out, 0.0)
        if low == 0:
            first[..., -1] = 0.0
        second = first.square()
        for cell, columns in slices:
            if cell > 0:
                for power, x in enumerate((first, second)):
                    self.powers[power][:, row, cell - 1] += x[..., columns].sum(-1).double()
        self.higher[0][:, row] += torch.linalg.vecdot(second, first).double()
        self.higher[1][:, row] += torch.linalg.vecdot(second, second).double()

        columns = slice((high - 1 - self.stride // 2) % self.stride, None, self.stride)
        drawn = scores[..., columns].masked_fill(out[:, columns], torch.nan)
        if low == 0 and self.stride == 1:
            drawn[..., -1] = torch.nan
        self.drawn.append((row, drawn))

    def finish(self) -> BaseLogits:
        """The statistics."""
        assert self.pivot is not None
        count = self.count.sum(-1)
        first, second = self.powers.sum(-1) / count
        third, fourth = self.higher / count
        variance = second - first.square()
        deviation = variance.sqrt()
        cubed = third - 3 * first * second + 2 * first**3
        fourth = fourth - 4 * first * third + 6 * first.square() * second - 3 * first**4
        share = count / count.sum()
        skewness = (share * cubed / deviation**3).sum(-1)
        kurtosis = (share * fourth / variance.square()).sum(-1)

        centre = first + self.pivot[:, None]
        drawn = [
            ((x - centre[:, row, None]) / deviation[:, row, None]).flatten(1)
            for row, x in self.drawn
        ]
        sample = torch.cat(drawn, 1)
        return BaseLogits(
            cells=self.cells,
            mu=centre.mean(-1),
            sigma=variance.mean(-1).sqrt(),
            skewness=skewness,
            excess_kurtosis=kurtosis - 3,
            drawn=sample[:, ~sample[0].isnan()],
            count=self.count,
            first=self.powers[0],
            second=self.powers[1],
            pivot=self.pivot,
        )


def normal_quantiles(n: int) -> Tensor:
    """The n quantiles of a standard Gaussian that a sorted sample is set against, float64."""
    ranks = torch.arange(1, n + 1, dtype=torch.float64)
    return torch.special.ndtri((ranks - 0.375) / (n + 0.25))
