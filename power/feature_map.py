"""The symmetric-power feature map, and the state that it leads to.

`(q . k)^p` is a sum over all multi-indices `(i_1, ..., i_p)` of products of entries of `q`
and `k`, and entries that differ only in the order of their indices are equal. Keeping one order
of each, weighed by the square root of the number of orders, gives a map `phi` with
`phi(q) . phi(k) = (q . k)^p` and far fewer than `K^p` entries. All linear-time forms rest on
it.

Kernels want entries in tiles, so the order is kept only between tiles of `t` neighbouring
channels: the tile multi-index `(i_1 // t, ..., i_p // t)` is non-decreasing, all `t^p` entries
of a tile are kept, and all have the one weight `sqrt(p! / prod_a n_a!)`, with `n_a` the number
of indices in tile `a`. Entries lie in lexicographic order of `(i_1, ..., i_p)`. For `p = 2`:
for each `i`, all `j` from the first channel of `i`'s tile to `K - 1`, with weight 1 while
`j` is in that tile and `sqrt(2)` beyond.

Reference: Gelada et al., "Scaling Context Requires Rethinking Attention"
(arXiv 2507.04239), Lemmas 4.1 and 4.2 and section 4.1.1.
"""

import itertools
import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# The widest tile by degree. Other degrees have tiles of one channel: the plain symmetric power.
_TILE = {2: 16, 4: 4}


class PowerState(NamedTuple):
    """What power attention remembers of past tokens: two discounted sums over their features.

    `s = sum_j exp(G_T - G_j) phi(k_j) v_j^T` and `z = sum_j exp(G_T - G_j) phi(k_j)`, where
    `G` is the running sum of the log-gates. The scale is not part of it. Row `f` of both
    belongs to the product of the key channels `monomials(K, deg)[0][:, f]`.

    Attributes:
        s: Features times values, `[B, H_kv, D, V]`, fp32, or float64 where the inputs are.
        z: Features, `[B, H_kv, D]`, of the same dtype.
    """

    s: Tensor
    z: Tensor


def check_degree(deg: int) -> None:
    """Raise unless `deg` is a positive even int."""
    if not isinstance(deg, int) or isinstance(deg, bool):
        raise TypeError(f"deg must be an int, got {type(deg).__name__}")
    if deg < 2 or deg % 2:
        raise ValueError(
            "deg must be positive and even (weights are divided by their sum, in which odd powers "
            f"could cancel), got {deg}"
        )


def check_size(name: str, size: int, least: int = 1) -> None:
    """Raise unless `size` is an int of `least` or more."""
    if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {type(size).__name__}")
    if size < least:
        raise ValueError(f"{name} must be {least} or more, got {size}")


def tile_size(head_dim: int, deg: int) -> int:
    """Return the channels in a tile: the widest of the degree that divides `head_dim`."""
    tile = _TILE.get(deg, 1)
    while head_dim % tile:
        tile //= 2
    return tile


def state_size(head_dim: int, deg: int = 2) -> int:
    """Return the dimension `D = C(K/t + p - 1, p) t^p` of the feature map.

    Args:
        head_dim: Channels `K` of a query or key, 1 or more.
        deg: The even power `p`.

    Returns:
        `D`.

    Raises:
        TypeError: If `head_dim` or `deg` is not an int.
        ValueError: If `head_dim` is not positive, or `deg` not positive and even.

    >>> [state_size(head_dim) for head_dim in (32, 64, 128)]
    [768, 2560, 9216]
    """
    check_degree(deg)
    check_size("head_dim", head_dim)
    tile = tile_size(head_dim, deg)
    size = tile**deg
    for m in range(deg):  # math.comb, which symbolic sizes do not have
        size = size * (head_dim // tile + m) // (m + 1)
    return size


def monomials(head_dim: int, deg: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Return which channels each entry of the feature map multiplies, and its weight.

    `phi(x)[f] = weight[f] * prod_m x[index[m, f]]`

    Args:
        head_dim: Channels `K` of a query or key, 1 or more.
        deg: The even power `p`.

    Returns:
        `index [deg, D]` (int64) and `weight [D]` (float64).

    Raises:
        TypeError: If `head_dim` or `deg` is not an int.
        ValueError: If `head_dim` is not positive, or `deg` not positive and even.
    """
    index, weight = _monomials(head_dim, deg)
    return index.copy(), weight.copy()


@lru_cache(maxsize=16)
def _monomials(head_dim: int, deg: int) -> tuple[np.ndarray, np.ndarray]:
    size = state_size(head_dim, deg)
    tile = tile_size(head_dim, deg)
    index = np.arange(head_dim)[None]
    for _ in range(deg - 1):
        first = index[-1] // tile * tile
        runs = head_dim - first
        step = np.arange(runs.sum()) - np.repeat(np.cumsum(runs) - runs, runs)
        index = np.concatenate([index.repeat(runs, axis=1), [np.repeat(first, runs) + step]])
    run = np.ones(size)
    repeats = np.ones(size)  # prod_a n_a!, multiplied up as 1 * 2 * ... along each run of a tile
    for before, after in itertools.pairwise(index // tile):
        run = np.where(before == after, run + 1, 1)
        repeats *= run
    return index, np.sqrt(math.factorial(deg) / repeats)


def symmetric_power(x: Tensor, deg: int = 2) -> Tensor:
    """Map vectors to their symmetric power, where the `p`-th power of a product is a product.

    `symmetric_power(q, p) @ symmetric_power(k, p) = (q @ k)^p`. In floating point the left side
    cancels where `q` and `k` are nearly orthogonal.

    Args:
        x: Vectors `[..., K]` of a floating dtype.
        deg: The even power `p`.

    Returns:
        `[..., D]` in the dtype of `x`, with `D = state_size(K, deg)`, in the order of
        `PowerState`.

    Raises:
        TypeError: If `x` is not a floating tensor.
        ValueError: If `x` has no channels, or `deg` is not positive and even.

    Reference: arXiv 2507.04239, Lemma 4.2 and section 4.1.1.

    >>> x = torch.tensor([1.0, 2.0])
    >>> symmetric_power(x) @ symmetric_power(x)
    tensor(25.)
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a tensor of a floating dtype, got {kind}")
    if x.dim() == 0:
        raise ValueError("x must have the shape [..., K], got []")
    index, weight = monomials(x.shape[-1], deg)
    first, *rest = torch.from_numpy(index).to(x.device)
    out = x[..., first] * torch.from_numpy(weight).to(x)
    for channels in rest:
        out = out * x[..., channels]
    return out
