"""Biases read from a table: any table by distance, T5's buckets, and Sandwich.

A mod reads its table once for each pair: FlexAttention compiles no second gather from a tensor
that requires grad.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from score_mods._captured import Mod, described
from score_mods._checks import boolean, floating, integer


def _table_bias(name: str, table: Tensor, column: Callable[[Tensor], Tensor]) -> Mod:
    """The score_mod that adds `table[h, column(q_idx - kv_idx)]`."""
    shared = table.shape[0] == 1

    def table_bias_mod(
        score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        bias = table[h * 0 if shared else h, column(q_idx - kv_idx)]
        return score + bias.to(torch.promote_types(score.dtype, torch.float32))

    return described(table_bias_mod, name, table)


def distance_table(table: Tensor) -> Mod:
    """Adds a bias that a table gives for each head and distance.

    s' = s + table[h, N - 1 + clamp(q_idx - kv_idx, 1 - N, N - 1)]: the middle column is for the
    query's own position, those after it are for keys before the query. Distances beyond the table
    take its first or last column. Any bias of head and distance alone can be given so: that of a
    small network, a learned curve, a window of relative positions.

    Args:
        table: `(H, 2 N - 1)`, or `(1, 2 N - 1)` for all heads, learnable if it requires grad.

    Returns:
        A score_mod; it returns `promote_types(score.dtype, float32)`.

    Raises:
        TypeError: if `table` is no floating tensor.
        ValueError: if it has not two axes, or an even number of columns.

    >>> mod = distance_table(torch.tensor([[10.0, 0.0, 20.0, 30.0, 40.0]]))
    >>> q_idx = torch.tensor([5, 5, 5, 5])
    >>> mod(torch.zeros(4), 0, torch.zeros(4, dtype=int), q_idx, torch.tensor([5, 4, 0, 6]))
    tensor([20., 30., 40.,  0.])
    """
    table = floating("table", table, "H", "2 N - 1").contiguous()
    middle = table.shape[1] // 2
    if table.shape[1] % 2 == 0:
        raise ValueError(f"table must have an odd number of columns, got {table.shape[1]}")
    return _table_bias("distance_table", table, lambda t: t.clamp(-middle, middle) + middle)


def t5_buckets(num_buckets: int, max_distance: int, bidirectional: bool = False) -> Tensor:
    """T5's bucket of each distance q_idx - kv_idx from -max_distance to max_distance.

    Half of the buckets are for single distances, the other half grow logarithmically up to
    `max_distance`, from where there is one. A causal model has them for keys up to the query, and
    gives later keys the bucket of distance 0; a bidirectional one has half of them for each side.

    Args:
        num_buckets: number of buckets B, at least 2; at least 4 and even if bidirectional.
        max_distance: distance D of the last bucket, above the number of single distances.
        bidirectional: whether the model looks both ways, as an encoder does.

    Returns:
        Buckets, `(2 D + 1,)`, int64.

    Raises:
        TypeError: if a number is no int, or `bidirectional` no bool.
        ValueError: if it is out of its range.
    """
    boolean("bidirectional", bidirectional)
    integer("num_buckets", num_buckets, 4 if bidirectional else 2)
    if bidirectional and num_buckets % 2:
        raise ValueError(f"num_buckets must be even if bidirectional, got {num_buckets}")
    a_side = num_buckets // 2 if bidirectional else num_buckets
    single = a_side // 2
    integer("max_distance", max_distance, single + 1)
    distance = torch.arange(-max_distance, max_distance + 1)
    away = distance.abs() if bidirectional else distance.clamp(min=0)
    ratio = (away.clamp(min=single).double() / single).log() / math.log(max_distance / single)
    # A distance that lies on a bucket's edge belongs to that bucket: no rounding below it.
    grown = single + torch.floor(ratio * (a_side - single) + 1e-9).long()
    bucket = torch.where(away < single, away, grown.clamp(max=a_side - 1))
    return bucket + a_side * (distance < 0) if bidirectional else bucket


def t5_bias(table: Tensor, max_distance: int = 128, *, bidirectional: bool = False) -> Mod:
    """Adds T5's learned bias of the bucket that the distance falls in.

    s' = s + table[h, bucket(q_idx - kv_idx)] with `t5_buckets`. T5 does not divide its scores by
    sqrt(D): give `attention` the argument `scale=1`. Its layers share one table.

    Args:
        table: `(H, B)`, or `(1, B)` for all heads, learnable if it requires grad; the transpose of
            the transformers library's `relative_attention_bias.weight`. T5 has B = 32.
        max_distance: distance D from which there is one bucket, in tokens.
        bidirectional: True for an encoder.

    Returns:
        A score_mod; it returns `promote_types(score.dtype, float32)`.

    Raises:
        TypeError: if `table` is no floating tensor, `max_distance` no int, or `bidirectional` no
            bool.
        ValueError: if `table` has not two axes, or a number is out of its range.

    Reference: Raffel et al., arXiv 1910.10683, section 2.1; scale and buckets as in the
    transformers library's T5, which rounds the edges of the buckets in float32.
    """
    table = floating("table", table, "H", "num_buckets").contiguous()
    buckets = t5_buckets(table.shape[1], max_distance, bidirectional)
    return _table_bias(
        "t5_bias", table, lambda t: buckets[t.clamp(-max_distance, max_distance) + max_distance]
    )


def sandwich(num_heads: int, max_length: int, d_bar: int = 128) -> Mod:
    """Adds the product of sinusoidal position embeddings, which falls roughly as a logarithm.

    s' = s + H / (8 (h + 1)) sum_{i < d_bar/2} cos((q_idx - kv_idx) / 10000^(2i/d_bar)). This is
    attention-gym's `generate_sandwich_bias`, whose table is in float32 (the sum is off by 0.01
    within 65,536 tokens) and is read out of its range by longer distances; here it is in float64,
    and distances beyond `max_length - 1` take its last value.

    Args:
        num_heads: number of query heads H, at least 1.
        max_length: tokens in the longest sequence, at least 1; the table has H * max_length
            entries.
        d_bar: size of the embeddings, at least 2.

    Returns:
        A score_mod; it returns `promote_types(score.dtype, float32)`.

    Raises:
        TypeError: if an argument is no int.
        ValueError: if it is out of its range.

    Reference: Chi et al., "Dissecting Transformer Length Extrapolation via the Lens of Receptive
    Field Analysis", arXiv 2212.10356.
    """
    integer("num_heads", num_heads)
    last = integer("max_length", max_length) - 1
    pairs = integer("d_bar", d_bar, 2) // 2
    curve = torch.zeros(max_length, dtype=torch.float64)
    distance = torch.arange(max_length, dtype=torch.float64)
    for i in range(pairs):
        curve += torch.cos(distance / 10000 ** (2 * i / d_bar))
    ratio = num_heads / (8 * torch.arange(1, num_heads + 1, dtype=torch.float64))
    return _table_bias("sandwich", ratio[:, None] * curve, lambda t: t.abs().clamp(max=last))
