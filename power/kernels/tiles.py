# mypy: disable-error-code="no-untyped-def"
"""Addressing shared by the kernels: chunks of tokens, and tiles of the degree-2 feature map.

Tokens are cut into chunks of `C`. Without `cu_seqlens` chunk `n` is chunk `n % NC` of
batch row `n // NC`; with it, a table of `(start, end, has_past, has_future, slot)` says
where chunk `n` lies.

Channels are cut into blocks of 16. A tile of the state is a pair of blocks `a <= b`: 256 rows,
row `16 i + j` holding the products of channel `i` of block `a` and channel `j` of block
`b`. The kernels keep the bare products; the factor 2 of tiles with `a < b`, which stand for
their mirror images too, is applied where a state is read. Behind the tiles of a state lies its
`z`, as the `[K, K]` matrix of all products.
"""

import triton
import triton.language as tl

# Sizes that kernels are not compiled again for.
SIZES = ("T", "C", "NC", "H")


@triton.jit
def chunk_bounds(p_chunks, n, T, C, NC, FULL: tl.constexpr, VARLEN: tl.constexpr):
    """Return row, start, end of chunk `n`, whether tokens lie before and after it, and its slot.

    That is the place of the state before the chunk; the state after it follows. `FULL` keeps the
    states before and after a whole sequence too.
    """
    if VARLEN:
        b = 0
        start = tl.load(p_chunks + 5 * n)
        end = tl.load(p_chunks + 5 * n + 1)
        past = tl.load(p_chunks + 5 * n + 2) > 0
        future = tl.load(p_chunks + 5 * n + 3) > 0
        slot = tl.load(p_chunks + 5 * n + 4)
    else:
        b = n // NC
        start = n % NC * C
        end = min(start + C, T)
        past = start > 0
        future = end < T
        slot = n + b if FULL else n - b - 1
    return b, start, end, past, future, slot


@triton.jit
def sequence_chunks(p_chunks, p_first, seq, NC, FULL: tl.constexpr, VARLEN: tl.constexpr):
    """Return the first chunk of a sequence, the one after its last, and the slot of the first."""
    if VARLEN:
        first, last = tl.load(p_first + seq), tl.load(p_first + seq + 1)
        slot = first + seq if FULL else tl.load(p_chunks + 5 * first + 4)
    else:
        first, last = seq * NC, seq * NC + NC
        slot = first + seq if FULL else first - seq - 1
    return first, last, slot


@triton.jit
def tile_blocks(tile, NB: tl.constexpr):
    """Return the blocks `a <= b` of a tile; tiles are numbered by `a`, then `b`."""
    a = tile * 0
    for i in tl.static_range(1, NB):
        a += tl.where(tile >= i * NB - i * (i - 1) // 2, 1, 0)
    b = tile - (a * NB - a * (a - 1) // 2) + a
    return a, b


@triton.jit
def mirrored(i0, o_iv, o_j, NB: tl.constexpr, V: tl.constexpr):
    """Return where rows of channels `(i0 + o_iv // V, o_j)` lie, mirrored where they must be.

    `i0` is a number, and all of `i0 + o_iv // V` lie in its block. What does not depend on it
    is kept apart, to be taken out of the loop over `i0`.
    """
    a, i = i0 // 16, i0 % 16
    b, j = o_j // 16, o_j % 16
    above = (256 * b + 16 * (o_iv // V) + j) * V + o_iv % V
    below = (256 * (b * NB - b * (b + 1) // 2) + 16 * j + o_iv // V) * V + o_iv % V
    above += (256 * (a * NB - a * (a + 1) // 2) + 16 * i) * V
    below += (256 * a + i) * V
    return tl.where(a <= b, above, below)
