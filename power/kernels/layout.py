"""How tensors are cut into chunks, and how the public state maps to the kernels' own."""

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from power.feature_map import monomials, state_size


class Layout(NamedTuple):
    """Where the chunks lie.

    Attributes:
        chunk: Tokens of a chunk, `C`.
        padded: `C` rounded up: the row length of transposed keys and queries.
        total: Chunks in all; of packed sequences, an upper bound.
        per_row: Chunks of one batch row.
        sequences: Sequences, each of which has a state.
        table: `[total, 5]` int32, a row a chunk: start, end, whether tokens of its sequence lie
            before it, and after it, and its slot. None where nothing is packed.
        first: `[sequences + 1]` int32: the first chunk of each packed sequence, or None.
    """

    chunk: int
    padded: int
    total: int
    per_row: int
    sequences: int
    table: Tensor | None
    first: Tensor | None


def count_chunks(B: int, T: int, chunk_size: int | None, sequences: int | None) -> int:
    """Return the chunks of `B` rows, or, at most, of `sequences` packed into one row."""
    chunk = T if chunk_size is None or chunk_size > T else chunk_size
    return B * ((T + chunk - 1) // chunk) if sequences is None else T // chunk + sequences


def count_slots(B: int, T: int, chunk_size: int | None, sequences: int | None, full: bool) -> int:
    """Return the chunk states to keep: those between chunks, with `full` also both ends."""
    count = count_chunks(B, T, chunk_size, sequences)
    ends = B if sequences is None else sequences
    return count + ends if full else count - ends


def chunk_layout(
    q: Tensor, cu_seqlens: Tensor | None, chunk_size: int | None, full: bool
) -> Layout:
    """Cut `q [B, H, T, K]` into chunks, without a synchronisation; None makes a single one.

    A chunk's slot is where the state before it is kept; the state after it follows. With `full`
    those before and after a whole sequence are kept too.
    """
    B, T = q.shape[0], q.shape[2]
    chunk = T if chunk_size is None else min(chunk_size, T)
    padded = -(-chunk // 128) * 128
    if cu_seqlens is None:
        count = count_chunks(B, T, chunk, None)
        return Layout(chunk, padded, count, count // B, B, None, None)
    sequences = cu_seqlens.numel() - 1
    count = count_chunks(B, T, chunk, sequences)
    bounds = cu_seqlens.to(torch.int64)
    first = F.pad(((bounds.diff() + chunk - 1) // chunk).cumsum(0), (1, 0))
    n = torch.arange(count, device=q.device)
    seq = torch.searchsorted(first[1:], n, right=True).clamp(max=sequences - 1)
    stop = bounds[seq + 1]
    # Chunks beyond the last are empty.
    start = torch.minimum(bounds[seq] + (n - first[seq]) * chunk, stop)
    end = torch.minimum(start + chunk, stop)
    begun = (bounds.diff() > 0).cumsum(0)  # sequences of one token and more, each included
    slot = n + seq if full else n - begun[seq]
    past = (n > first[seq]) & (start < end)
    table = torch.stack([start, end, past, end < stop, slot], 1).to(torch.int32)
    return Layout(chunk, padded, count, count, sequences, table, first.to(torch.int32))


def kernel_state_size(K: int, V: int, deg: int) -> int:
    """Return the numbers in a kernel state: tiles of 256 rows of `V`, then its `z`.

    That is `[K, K]` in degree 2, and a number a row in degree 4.
    """
    if deg == 4:
        return state_size(K, 4) * (V + 1)
    blocks = K // 16
    return blocks * (blocks + 1) // 2 * 256 * V + K * K


@lru_cache(maxsize=32)
def row_tables(K: int, deg: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the channels that each row of a public state multiplies, and its weight."""
    index, weight = monomials(K, deg)
    return (
        torch.from_numpy(index).to(device, torch.int32),
        torch.from_numpy(weight).to(device, torch.float32),
    )


class StateMaps(NamedTuple):
    """How kernel rows map to public ones, for degree 2.

    Attributes:
        row: The public row of each kernel row.
        weight: Its weight, 1 or sqrt(2).
        mirror: The kernel row of the same channels in the other order, where that is in its tile.
        pair: The entry of the flat `[K, K]` matrix that each public row of z is read from.
        pair_weight: The weight of the public row.
        z_row: The public row of each entry of the matrix.
    """

    row: Tensor
    weight: Tensor
    mirror: Tensor
    pair: Tensor
    pair_weight: Tensor
    z_row: Tensor


@lru_cache(maxsize=32)
def state_maps(K: int, device: torch.device) -> StateMaps:
    """Return the maps between the public and the kernels' state."""
    (i, j), weight = (torch.from_numpy(x) for x in monomials(K, 2))
    pair, rows = i * K + j, torch.arange(len(i))
    z_row = torch.zeros(K * K, dtype=torch.int64)
    z_row[j * K + i] = rows
    z_row[pair] = rows
    a, b = i // 16, j // 16
    order = (((a * K + b) * 16 + i % 16) * 16 + j % 16).argsort()
    same = (a == b)[order].view(-1, 16, 16)
    mirror = torch.where(same, rows.view(-1, 16, 16).mT, rows.view(-1, 16, 16)).flatten()
    maps = (order, weight[order].float(), mirror, pair, weight.float(), z_row)
    return StateMaps(*(x.to(device) for x in maps))


def to_kernel(s: Tensor, z: Tensor, K: int, unit: float) -> Tensor:
    """Lay a public state, or its gradient, out for the kernels: `[N, H, size]` in fp32.

    What is antisymmetric within a tile is left out, as it meets no query and no key.
    """
    maps = state_maps(K, s.device)
    s = s[..., maps.row, :].float() / maps.weight[:, None]
    s = (s + s[..., maps.mirror, :]) / 2
    z = (z.float() / maps.pair_weight)[..., maps.z_row].unflatten(-1, (K, K))
    z = (z + z.mT) / 2
    return torch.cat([s.flatten(-2), z.flatten(-2)], -1).mul_(unit)


def from_kernel(state: Tensor, K: int, V: int, unit: float) -> tuple[Tensor, Tensor]:
    """Undo `to_kernel`."""
    maps = state_maps(K, state.device)
    tiles = state[..., : -K * K].unflatten(-1, (-1, V)) * (maps.weight[:, None] / unit)
    s = torch.empty_like(tiles)
    s[..., maps.row, :] = tiles
    return s, state[..., -K * K :][..., maps.pair] * (maps.pair_weight / unit)


def antisymmetric(s: Tensor, z: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """Return what `to_kernel` leaves out of a public state."""
    s_kept, z_kept = from_kernel(to_kernel(s, z, K, 1.0), K, s.shape[-1], 1.0)
    return s - s_kept, z - z_kept


class QuarticMaps(NamedTuple):
    """How kernel rows map to public ones, for degree 4.

    Attributes:
        row: The public row of each kernel row.
        weight: Its weight.
        tiles: The four blocks of each tile, int32.
        orders: The orders in which they stand for the same products: the squared weight.
    """

    row: Tensor
    weight: Tensor
    tiles: Tensor
    orders: Tensor


@lru_cache(maxsize=8)
def quartic_maps(K: int, device: torch.device) -> QuarticMaps:
    """Return the maps between the public and the kernels' state, and the tiles."""
    index, weight = (torch.from_numpy(x) for x in monomials(K, 4))
    places = torch.tensor([(K // 4) ** m for m in (3, 2, 1, 0)] + [64, 16, 4, 1])
    digits = torch.cat([index // 4 * 256, index % 4])
    row = (digits * places[:, None]).sum(0).argsort()
    first = row[::256]
    maps = (
        row,
        weight[row].float(),
        (index[:, first] // 4).T.contiguous().int(),
        weight[first].square().float(),
    )
    return QuarticMaps(*(x.to(device) for x in maps))


def to_quartic(s: Tensor, z: Tensor, K: int, unit: float) -> Tensor:
    """Lay a public state of degree 4, or its gradient, out for the kernels."""
    maps = quartic_maps(K, s.device)
    s = s[..., maps.row, :].float() * (unit / maps.weight)[:, None]
    z = z[..., maps.row].float() * (unit / maps.weight)
    return torch.cat([s.flatten(-2), z], -1)


def from_quartic(state: Tensor, K: int, V: int, unit: float) -> tuple[Tensor, Tensor]:
    """Undo `to_quartic`."""
    maps = quartic_maps(K, state.device)
    D = len(maps.row)
    s, z = state.new_empty(*state.shape[:-1], D, V), state.new_empty(*state.shape[:-1], D)
    s[..., maps.row, :] = state[..., : D * V].unflatten(-1, (D, V)) * (maps.weight / unit)[:, None]
    z[..., maps.row] = state[..., D * V :] * (maps.weight / unit)
    return s, z


def multiplicities(K: int, V: int, deg: int, device: torch.device) -> Tensor:
    """Return how often the number at each place of a kernel state counts in a product."""
    if deg == 4:
        orders = quartic_maps(K, device).weight.square()
        return torch.cat([orders.repeat_interleave(V), orders])
    squares = state_maps(K, device).weight.square().repeat_interleave(V)
    return F.pad(squares, (0, K * K), value=1.0)


def total_decay(log_g: Tensor | None, cu_seqlens: Tensor | None, like: Tensor) -> Tensor:
    """Return what is left of each initial state at the end: `[N, H_kv, 1]`."""
    if log_g is None:
        return like.new_ones(1)
    if cu_seqlens is None:
        return log_g.sum(-1, keepdim=True).exp()
    total = F.pad(log_g[0].double().cumsum(-1), (1, 0))[:, cu_seqlens.long()]
    return total.diff().mT.exp().float()[..., None]
