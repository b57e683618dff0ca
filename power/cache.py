"""The state of power attention as a layer of a transformers cache."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from power.decode import DecodeState, power_attention_prefill, power_attention_step


class PowerCacheLayer:
    """A layer of a transformers cache that holds the state of power attention.

    `PowerSelfAttention` puts it in the place of the cache's own layer. Its size does not depend on
    the tokens seen, which therefore cannot be taken back.

    Attributes:
        state: The state after the tokens seen, or None before the first.
        length: How many tokens were seen, padding among them.
    """

    is_compileable = is_croppable = is_sliding = supports_early_init = False

    def __init__(self) -> None:
        self.state: DecodeState | None = None
        self.length = 0

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_g: Tensor | None,
        sequences: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """Attend from the next tokens and remember them.

        Args:
            q: Queries `[B, H, n, K]`.
            k: Keys `[B, H_kv, n, K]`.
            v: Values `[B, H_kv, n, V]`.
            log_g: Log-gates `[B, H_kv, n]`, or None.
            sequences: 0 for padding, which is not remembered, `[B, n]`; None if there is none.
            options: `deg` and `impl`, as in `power_attention`.

        Returns:
            `[B, H, n, V]`; 0 for padding.

        Raises:
            ValueError: If gradients are asked for after the first call.
        """
        self.length += q.shape[2]
        real = None if sequences is None else sequences > 0
        if self.state is not None:
            if real is not None:  # a key of zeros has no weight, and a gate of 1 forgets nothing
                k = k.masked_fill(~real[:, None, :, None], 0)
                log_g = None if log_g is None else log_g.masked_fill(~real[:, None], 0)
            out, self.state = power_attention_step(
                q, k, v, log_g, self.state, inplace=True, **options
            )
            return out
        if real is None:
            out, self.state = power_attention_prefill(q, k, v, log_g, **options)
            return out
        # A state that holds few tokens is inexact: rows keep chunks of their own real tokens.
        outs, states = [], []
        for b, kept in enumerate(real):
            row_q, row_k, row_v = (x[b : b + 1, :, kept] for x in (q, k, v))
            gates = None if log_g is None else log_g[b : b + 1, :, kept]
            out, state = power_attention_prefill(row_q, row_k, row_v, gates, **options)
            outs.append(out[0].transpose(0, 1))
            states.append(state)
        self.state = DecodeState(*map(torch.cat, zip(*states, strict=True)))
        padded = outs[0].new_zeros(*real.shape, q.shape[1], v.shape[3])
        padded[real] = torch.cat(outs)
        return padded.transpose(1, 2)

    def get_seq_length(self) -> int:
        """How many tokens were seen."""
        return self.length

    def get_max_length(self) -> int:
        """How many tokens the layer can take; -1 for any number."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys the next queries have, and the first one's position."""
        return self.length + query_length, 0

    def reset(self) -> None:
        """Forget all tokens."""
        self.state, self.length = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i continue what row `beam_idx[i]` was."""
        self._change(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`."""
        self._change(lambda x: x[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self._change(lambda x: x.repeat_interleave(repeats, 0))

    def crop(self, tokens: int) -> NoReturn:
        """Raise a ValueError: tokens cannot be taken out of a state."""
        raise ValueError(
            "tokens cannot be taken back out of the state of power attention, as assisted "
            "decoding would"
        )

    def offload(self) -> None:
        """Do nothing: the state is small, and stays where it is."""

    prefetch = offload

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self.state = DecodeState(*map(change, self.state))
