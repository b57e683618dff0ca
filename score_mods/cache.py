"""A key-value cache in tensors that are allocated once, for decoding without recompilation.

The token at position p lies in slot p, or in slot p modulo the capacity where old tokens make
place for new ones. Which position a slot holds is in a table, -1 for none: the mask and score_mods
read positions there, so rows of a batch may differ in length, and nothing depends on which slots
are in use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from score_mods._captured import Mod, check_mask_mod, kept
from score_mods._checks import boolean, integer, positions_of_shape
from score_mods.combine import with_positions
from score_mods.masks import and_masks


class KVCache:
    """Keys and values of the tokens so far, of one layer, for inference.

    Attributes:
        lengths: position of the next token in each row, `(B,)`.
        sliding: whether the newest `capacity` tokens are kept when there are more.
    """

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        sliding: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate an empty cache.

        Args:
            batch_size: B, at least 1.
            num_kv_heads: H_kv, at least 1.
            capacity: tokens to hold in each row, at least 1.
            head_dim: D, at least 1.
            value_dim: D_v, D if not given.
            sliding: evict the oldest token when a row is full, rather than refuse. Every query
                then sees the `capacity` keys up to itself at most, in whatever blocks tokens come:
                `sliding_window(capacity)`.
            dtype: of keys and values.
            device: where the cache is.

        Raises:
            TypeError: if a size is no int, `sliding` no bool or `dtype` no floating dtype.
            ValueError: if a size is below 1.
        """
        sizes = [
            integer(name, size)
            for name, size in (
                ("batch_size", batch_size),
                ("num_kv_heads", num_kv_heads),
                ("capacity", capacity),
                ("head_dim", head_dim),
                ("value_dim", head_dim if value_dim is None else value_dim),
            )
        ]
        B, H_kv, slots, D, D_v = sizes
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"dtype must be a floating dtype, got {dtype!r}")
        boolean("sliding", sliding)
        # One slot before those that are shown: padding is written there.
        self._keys = torch.zeros(B, H_kv, slots + 1, D, dtype=dtype, device=device)
        self._values = torch.zeros(B, H_kv, slots + 1, D_v, dtype=dtype, device=device)
        self._positions = torch.full((B, slots + 1), -1, device=device)
        self.lengths = torch.zeros(B, dtype=torch.int64, device=device)
        self.capacity, self.sliding = slots, sliding

    @property
    def keys(self) -> Tensor:
        """The keys, `(B, H_kv, capacity, D)`."""
        return self._keys[:, :, 1:]

    @property
    def values(self) -> Tensor:
        """The values, `(B, H_kv, capacity, D_v)`."""
        return self._values[:, :, 1:]

    @property
    def positions(self) -> Tensor:
        """Position of the token in each slot, -1 for none, `(B, capacity)`."""
        return self._positions[:, 1:]

    def reset(self) -> None:
        """Forget all tokens."""
        self._positions.fill_(-1)
        self.lengths.zero_()

    def next_positions(self, count: int) -> Tensor:
        """Positions of the next `count` tokens of each row, `(B, count)`."""
        if not torch.compiler.is_compiling():
            integer("count", count, at_least=0)
        return kept(self.lengths[:, None] + torch.arange(count, device=self.lengths.device))

    def update(
        self, k: Tensor, v: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Store tokens and return all that their queries may attend to.

        Args:
            k: keys of n more tokens, `(B, H_kv, n, D)`.
            v: their values, `(B, H_kv, n, D_v)`.
            positions: `(n,)` or `(B, n)`, ascending in each row from where the row ends; a
                negative one marks padding, on either side, which is not stored.
                `next_positions(n)` if not given.

        Returns:
            Keys, values and their positions `(B, T)`, -1 where there is none; `mask` takes them.
            T is `capacity`, or capacity + n for a block in a sliding cache.

        Raises:
            TypeError: if `k` or `v` is no tensor, or `positions` no integer tensor.
            ValueError: if shapes, dtypes or devices do not fit, gradients are asked for, or
                (checked outside compiled functions) positions do not ascend or a row would be
                longer than `capacity`.
        """
        self._check(k, v)
        B, _, n, _ = k.shape
        if positions is None:
            positions = self.next_positions(n)
        else:
            positions = positions_of_shape(positions, (n,), (B, n)).expand(B, n)
            self._check_order(positions)
        stored, last = positions >= 0, positions.amax(1, keepdim=True)
        if not torch.compiler.is_compiling() and not self.sliding and last.max() >= self.capacity:
            raise ValueError(
                f"positions must be below the capacity of {self.capacity}, got {last.max()}; "
                "allocate a larger cache, or one with sliding=True"
            )
        before = None
        if self.sliding:
            if n > 1:  # the first queries of a block still see what its last tokens evict
                before = self.keys.clone(), self.values.clone(), self.positions.clone()
            stored = stored & (positions > last - self.capacity)
        slots = torch.where(stored, positions % self.capacity if self.sliding else positions, -1)
        slots = slots + 1  # a row that is too long is out of bounds, also in a compiled function
        row = torch.arange(B, device=k.device)[:, None]
        self._keys[row, :, slots] = k.transpose(1, 2)
        self._values[row, :, slots] = v.transpose(1, 2)
        self._positions[row, slots] = positions
        self.lengths.copy_(torch.maximum(self.lengths, last[:, 0] + 1))
        if before is None:
            return self.keys, self.values, kept(self.positions)
        return (
            torch.cat([before[0], k], 2),
            torch.cat([before[1], v], 2),
            kept(torch.cat([before[2], positions], 1)),
        )

    def mask(self, mask_mod: Mod | None, q_positions: Tensor, kv_positions: Tensor) -> Mod:
        """The mask_mod over what `update` returned.

        Args:
            mask_mod: what it is at true positions; None if every query sees every key.
            q_positions: positions of the queries, `(T_q,)` or `(B, T_q)`.
            kv_positions: as returned by `update`.

        Returns:
            A mask_mod that hides unfilled slots, and those that a sliding cache has evicted.

        Raises:
            TypeError: if `mask_mod` is no mask_mod, or positions no int32 or int64 tensor.
            ValueError: if positions have not one or two axes.
        """
        if mask_mod is not None:
            check_mask_mod(mask_mod)
        parts = [_filled] if mask_mod is None else [_filled, mask_mod]
        if self.sliding:
            parts.append(_nearer_than(self.capacity, self.lengths.device))
        return with_positions(and_masks(*parts), q_positions, kv_positions)

    def _check_order(self, positions: Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        before = torch.cat([self.lengths[:, None] - 1, positions[:, :-1]], 1).cummax(1).values
        if ((positions >= 0) & (positions <= before)).any():
            raise ValueError(
                "positions must ascend in each row from where it ends, at "
                f"{self.lengths.tolist()}, got {positions.tolist()}"
            )

    def _check(self, k: Tensor, v: Tensor) -> None:
        for name, new, held in (("k", k, self.keys), ("v", v, self.values)):
            B, H, _, D = held.shape
            if not isinstance(new, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(new).__name__}")
            if new.ndim != 4 or (*new.shape[:2], new.shape[3]) != (B, H, D) or not new.shape[2]:
                raise ValueError(
                    f"{name} must have shape ({B}, {H}, n, {D}) to fit the cache, "
                    f"got {tuple(new.shape)}"
                )
            if new.dtype != held.dtype or new.device != held.device:
                raise ValueError(
                    f"{name} must have the cache's dtype and device, {held.dtype} on "
                    f"{held.device}, got {new.dtype} on {new.device}"
                )
            if new.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{name} requires grad, and a KVCache is for inference: use torch.no_grad()"
                )


def _filled(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx >= 0


def _nearer_than(distance: int, device: torch.device) -> Mod:
    limit = torch.full((), distance, device=device)

    def nearer_mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx - kv_idx < limit

    return nearer_mask
