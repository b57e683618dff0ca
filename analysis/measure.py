"""Total attention, entropy and base logits, measured on rows of attention.

A row is one query with all its keys. `measure` takes rows of real queries and keys,
`measure_gaussian` draws the logits. Both walk the distances in blocks and keep, for every row and
every cell of distances (the finest division asked for), log Z and N~/Z. Everything else follows:

    H = log Z - N~/Z,        N~ = exp(log Z) N~/Z,

and ranges, whole rows and the share of the last tokens are cells put together, so that no
exponential overflows and nothing of the size of T×T, or even of all rows' logits, is ever held.
The base logits, before any mechanism, are kept as power sums of the same cells: `base_logits`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor

from analysis.base_logits import BaseLogits, BaseSums
from analysis.conditions import ScoreMod, placed
from analysis.ranges import checked_edges, law_edges, merge
from score_mods._checks import integer

_ROWS = 16  # rows in a block
_ELEMENTS = 1 << 19  # logits in a block


@dataclass(frozen=True)
class Ranges:
    """What rows of attention do in ranges of distances (float64, shape `[H, N, K]`).

    Attributes:
        edges: The K+1 edges; range k is the distances `edges[k] <= t < edges[k+1]`.
        log_z: log of the total attention Z; -inf where a row has no key in the range.
        mean_logit: N~/Z, the mean logit under the attention within the range.
    """

    edges: Tensor
    log_z: Tensor
    mean_logit: Tensor

    @property
    def entropy(self) -> Tensor:
        """Entropy of the attention within the range, in nats; 0 where it has no key."""
        return (self.log_z - self.mean_logit).masked_fill(self.log_z == -torch.inf, 0.0)

    @property
    def negentropy(self) -> Tensor:
        """N~, the sum of A~ log A~."""
        return self.log_z.exp() * self.mean_logit


@dataclass(frozen=True)
class Rows:
    """What one mechanism does in every measured row, cell by cell.

    Attributes:
        score_mod: The mechanism; None is plain softmax.
        cells: The C+1 edges of the cells, from 0 to T.
        log_z: log Z of each cell `[H, N, C]`, float64.
        mean_logit: N~/Z of each cell, likewise.
    """

    score_mod: ScoreMod | None
    cells: Tensor
    log_z: Tensor
    mean_logit: Tensor

    def ranges(self, edges: Tensor | Sequence[int]) -> Ranges:
        """Put the cells together to ranges with these edges, each an edge of a cell.

        Raises:
            ValueError: One of `edges` is not an edge of a cell.
        """
        edges = checked_edges(edges).to(self.cells.device)
        at = torch.searchsorted(self.cells, edges).clamp_max(len(self.cells) - 1)
        if not torch.equal(self.cells[at], edges):
            missing = edges[self.cells[at] != edges].tolist()
            raise ValueError(f"edges must be edges that were measured; {missing} were not")
        parts = [
            merge(self.log_z[..., low:high], self.mean_logit[..., low:high])
            for low, high in zip(at[:-1].tolist(), at[1:].tolist(), strict=True)
        ]
        log_z, mean_logit = (torch.stack(column, -1) for column in zip(*parts, strict=True))
        return Ranges(edges, log_z, mean_logit)

    @property
    def log_total(self) -> Tensor:
        """Log Z of the whole row, own key included `[H, N]`."""
        return self.log_z.logsumexp(-1)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the whole row in nats `[H, N]`."""
        log_z, mean_logit = merge(self.log_z, self.mean_logit)
        return log_z - mean_logit

    @property
    def effective_keys(self) -> Tensor:
        """Effective number of keys of the whole row, exp(entropy) `[H, N]`."""
        return self.entropy.exp()

    def share(self, last: int = 100) -> Tensor:
        """Share of the row's attention on its `last` nearest keys, own key included `[H, N]`.

        Raises:
            ValueError: `last` is not at least 1, or not what was measured.
        """
        integer("last", last)
        near = self.ranges([0, min(last, int(self.cells[-1]))])
        return (near.log_z[..., 0] - self.log_total).exp()


@dataclass(frozen=True)
class Measurement:
    """Rows of attention under several mechanisms, and the base logits they share.

    N = B·R rows: R query positions of each of B sequences, sequence by sequence.

    Attributes:
        length: Number of keys T.
        q_positions: Position of each row's query `[N]`.
        base: The logits before any mechanism.
        mechanisms: `Rows` by name.
    """

    length: int
    q_positions: Tensor
    base: BaseLogits
    mechanisms: dict[str, Rows]


def measure(
    q: Tensor,
    k: Tensor,
    score_mods: Mapping[str, ScoreMod | None],
    *,
    q_positions: Tensor | None = None,
    scale: float | None = None,
    edges: Tensor | Sequence[int] | None = None,
    last: int = 100,
    progress: bool = False,
) -> Measurement:
    """Measure mechanisms on chosen rows of causal attention, in blocks, on the device of `q`.

    Memory is that of `q`, `k` and some tens of MiB; the logits are computed in float32, or in
    float64 for float64 inputs.

    Args:
        q: Queries `[B, H, R, D]`, already rotated, of the rows to look at.
        k: Keys `[B, H_kv, T, D]`, already rotated; H a multiple of H_kv.
        score_mods: Mechanisms by name, for any number of heads or for H; None is plain softmax.
        q_positions: Positions of the queries among the keys `[R]`, integers, each in 3..T-1; by
            default the last R.
        scale: What q·k is multiplied by; 1/sqrt(D) if None.
        edges: Distances where a range may begin or end; by default `law_edges(10, 2, T - 1)`, or
            none below 31 keys. 0, 1, the powers of ten, `last` and T are always among the cells.
        last: How near the keys are whose share `Rows.share` will be asked for, at least 1.
        progress: Whether to show a progress bar (if tqdm is installed).

    Returns:
        A `Measurement`.

    Raises:
        TypeError: `q` or `k` is not a floating-point tensor, `q_positions` or `edges` are not
            integers, `score_mods` is no mapping, or a mechanism no plain score_mod.
        ValueError: Shapes, devices, positions or edges do not fit, a mechanism is for another
            number of heads, or it gives NaN.
    """
    for name, x in (("q", q), ("k", k)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} must be a floating-point tensor, got {got}")
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, H, T, D], got shape {tuple(x.shape)}")
    (batch, heads, rows, dim), (_, heads_kv, length, _) = q.shape, k.shape
    if k.shape[0] != batch or k.shape[3] != dim or heads % heads_kv or k.device != q.device:
        raise ValueError(
            "k must be [B, H_kv, T, D] with q's B, D and device and H a multiple of H_kv, got "
            f"q {tuple(q.shape)} on {q.device}, k {tuple(k.shape)} on {k.device}"
        )
    if q_positions is None:
        q_positions = torch.arange(length - rows, length)
    q_positions = torch.as_tensor(q_positions, device=q.device)
    if q_positions.is_floating_point() or q_positions.dtype == torch.bool:
        raise TypeError(f"q_positions must be integers, got {q_positions.dtype}")
    q_positions = q_positions.long()
    if q_positions.shape != (rows,):
        raise ValueError(f"q_positions must have shape ({rows},), got {tuple(q_positions.shape)}")
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = dim**-0.5 if scale is None else scale

    def block(b: int, chosen: Tensor, low: int, high: int) -> Tensor:
        queries = q[b, :, chosen].to(dtype) * scale
        starts = (q_positions[chosen] - (high - 1)).tolist()
        first = max(0, min(starts))
        keys = k[b, :, first : max(starts) + high - low].to(dtype)
        grouped = queries.reshape(heads_kv, -1, dim) @ keys.transpose(-1, -2)
        scores = grouped.reshape(heads, len(chosen), -1)
        aligned = scores.new_zeros(heads, len(chosen), high - low)
        for r, start in enumerate(starts):
            skip = min(max(0, -start), high - low)
            offset = start + skip - first
            aligned[:, r, skip:] = scores[:, r, offset : offset + high - low - skip]
        return aligned

    cells = _cells(edges, last, length).to(q.device)
    return _scan(block, batch, heads, q_positions, length, cells, score_mods, progress)


def measure_gaussian(
    score_mods: Mapping[str, ScoreMod | None],
    length: int,
    *,
    rows: int = 256,
    heads: int = 1,
    mu: float | Callable[[Tensor], Tensor] = 0.0,
    sigma: float | Callable[[Tensor], Tensor] = 1.0,
    seed: int = 0,
    edges: Tensor | Sequence[int] | None = None,
    last: int = 100,
    progress: bool = False,
    device: torch.device | str = "cpu",
) -> Measurement:
    """Measure mechanisms on independent Gaussian logits, in rows whose query comes last.

    Args:
        score_mods: Mechanisms by name; None is plain softmax. All see the same draws.
        length: Number of keys T, at least 4.
        rows: Rows to draw.
        heads: Heads to draw, each its own logits.
        mu: Mean of the logits, a number or a function of the distances.
        sigma: Standard deviation, likewise; above 0.
        seed: Seed of the draws.
        edges: As in `measure`.
        last: As in `measure`.
        progress: Whether to show a progress bar (if tqdm is installed).
        device: Where to draw and measure.

    Returns:
        A `Measurement`.

    Raises:
        TypeError: A size or `edges` are not integers, `score_mods` is no mapping, or a mechanism
            no plain score_mod.
        ValueError: A number is out of its range, or a mechanism is for another number of heads or
            gives NaN.
    """
    integer("length", length, at_least=4)
    integer("rows", rows), integer("heads", heads)
    if not callable(sigma) and not sigma > 0:
        raise ValueError(f"sigma must be above 0, got {sigma}")
    generator = torch.Generator(device).manual_seed(seed)

    def block(b: int, chosen: Tensor, low: int, high: int) -> Tensor:
        shape = (heads, len(chosen), high - low)
        draws = torch.randn(shape, generator=generator, device=device)
        t = torch.arange(high - 1, low - 1, -1, device=device)
        mean, deviation = (x(t).float() if callable(x) else x for x in (mu, sigma))
        return draws * deviation + mean

    q_positions = torch.full((rows,), length - 1, device=device)
    cells = _cells(edges, last, length).to(device)
    return _scan(block, 1, heads, q_positions, length, cells, score_mods, progress)


def _cells(edges: Tensor | Sequence[int] | None, last: int, length: int) -> Tensor:
    """The edges of the finest division: those asked for, 0, 1, powers of ten, `last` and T."""
    integer("last", last)
    if edges is None:
        asked = law_edges(10.0, 2.0, length - 1) if length > 30 else torch.tensor([0])
    else:
        asked = checked_edges(edges)
    if asked[-1] > length:
        raise ValueError(f"edges must not pass the length {length}, got {int(asked[-1])}")
    decades = [10**n for n in range(math.ceil(math.log10(length)))]
    always = torch.tensor([0, *decades, min(last, length), length])
    return torch.cat([asked.cpu(), always]).unique()


@torch.no_grad()
def _scan(
    block: Callable[[int, Tensor, int, int], Tensor],
    batch: int,
    heads: int,
    q_positions: Tensor,
    length: int,
    cells: Tensor,
    score_mods: Mapping[str, ScoreMod | None],
    progress: bool,
) -> Measurement:
    """Walk all rows and distances; `block(b, rows, low, high)` gives the base logits.

    They are `[H, rows, high - low]`, at distances `high - 1` down to `low`, which is the order of
    the keys; what it gives for keys before key 0 is not looked at.
    """
    if q_positions.min() < 3 or q_positions.max() >= length:
        raise ValueError(
            f"q_positions must lie in 3..{length - 1}, "
            f"got {int(q_positions.min())}..{int(q_positions.max())}"
        )
    device, rows = q_positions.device, len(q_positions)
    if not isinstance(score_mods, Mapping):
        got = type(score_mods).__name__
        raise TypeError(f"score_mods must be a mapping from names to mechanisms, got {got}")
    mods = {
        name: mod if mod is None else placed(mod, device, f"score_mods[{name!r}]")
        for name, mod in score_mods.items()
    }
    for name, mod in mods.items():
        if (known := getattr(mod, "num_heads", None)) not in (None, heads):
            raise ValueError(
                f"score_mods[{name!r}] must be for {heads} heads, as the logits are, got {known}"
            )
    sums = {name: _Weights(heads, batch * rows, len(cells) - 1, device) for name in mods}
    base = BaseSums(heads, q_positions.repeat(batch), cells[1:], length)
    head = torch.arange(heads, device=device)[:, None, None]
    bounds = cells.tolist()

    for b, chosen, low, high in _blocks(batch, heads, q_positions, progress):
        scores = block(b, chosen, low, high)
        q_idx = q_positions[chosen][:, None]
        kv_idx = q_idx - torch.arange(high - 1, low - 1, -1, device=device)
        past_start = bool(kv_idx[:, 0].min() < 0)
        row = chosen + b * rows
        slices = [
            (c, slice(high - min(stop, high), high - max(start, low)))
            for c, (start, stop) in enumerate(pairwise(bounds))
            if start < high and stop > low
        ]
        base.add(scores, kv_idx, row, low, high, slices)
        index = (torch.tensor(b, device=device), head, q_idx, kv_idx.clamp_min(0))
        for name, mod in mods.items():
            logits = scores if mod is None else mod(scores, *index)
            if past_start:
                logits = logits.masked_fill(kv_idx < 0, -torch.inf)
            for cell, columns in slices:
                sums[name].add(logits[..., columns], row, cell)

    for name, total in sums.items():
        if total.log_z.isnan().any() or total.mean_logit.isnan().any():
            raise ValueError(f"score_mods[{name!r}] gave NaN or +inf, or q or k hold them")
    mechanisms = {
        name: Rows(score_mods[name], cells, x.log_z, x.mean_logit) for name, x in sums.items()
    }
    return Measurement(length, q_positions.repeat(batch), base.finish(), mechanisms)


def _blocks(
    batch: int, heads: int, q_positions: Tensor, progress: bool
) -> Iterator[tuple[int, Tensor, int, int]]:
    """Sequence, rows and distances of each block: neighbouring rows, so that they share keys."""
    width = max(1024, min(16384, _ELEMENTS // (heads * _ROWS)))
    order = q_positions.argsort(stable=True)
    positions = q_positions[order].tolist()
    groups, start = [], 0
    for stop in range(1, len(positions) + 1):
        far = stop < len(positions) and positions[stop] - positions[start] > width // 2
        if stop == len(positions) or stop - start == _ROWS or far:
            groups.append((order[start:stop], positions[stop - 1] + 1))
            start = stop
    blocks = [
        (b, chosen, low, min(low + width, end))
        for b in range(batch)
        for chosen, end in groups
        for low in range(0, end, width)
    ]
    if progress and find_spec("tqdm") is not None:
        from tqdm import tqdm

        return iter(tqdm(blocks, desc="measure", unit="block", leave=False))
    return iter(blocks)


class _Weights:
    """log Z and N~/Z of every row and cell, as blocks come in."""

    def __init__(self, heads: int, rows: int, cells: int, device: torch.device) -> None:
        shape = (heads, rows, cells)
        self.log_z = torch.full(shape, -torch.inf, dtype=torch.float64, device=device)
        self.mean_logit = torch.zeros(shape, dtype=torch.float64, device=device)

    def add(self, logits: Tensor, row: Tensor, cell: int) -> None:
        """Add logits `[H, rows, n]` of one cell."""
        peak = logits.amax(-1, keepdim=True)
        peak = peak.masked_fill(peak == -torch.inf, 0.0)
        below = (logits - peak).clamp_min_(-1e4)  # exp(-1e4) is 0, and 0 * -1e4 is no NaN
        weight = below.exp()
        total = weight.sum(-1).double()
        mean = torch.linalg.vecdot(weight, below).double() / total + peak[..., 0]
        log_z = torch.stack([self.log_z[:, row, cell], total.log() + peak[..., 0]], -1)
        mean = torch.stack([self.mean_logit[:, row, cell], mean.masked_fill(total == 0, 0.0)], -1)
        self.log_z[:, row, cell], self.mean_logit[:, row, cell] = merge(log_z, mean)
