"""Row temperatures on the queries, where one that is learned or computed from a token is cheap."""

from __future__ import annotations

import torch
from torch import Tensor

from score_mods._captured import Mod, to_device
from score_mods._checks import floating, number, positions_of_shape
from score_mods.catalogue import stages


def scale_queries(q: Tensor, temperature: Mod, positions: Tensor | None = None) -> Tensor:
    """Multiplies the queries by a row temperature, in place of giving it as a score_mod.

    (f_i q_i)·k_j = f_i (q_i·k_j), so attention without the score_mod is then the same. In half
    precision the product is rounded once more, by at most 2^-9 of a score in bfloat16.

    Args:
        q: queries, `(B, H, T, D)`.
        temperature: a row temperature: `logn`, `ssmax` and the others of their kind, also under
            `compose`, `with_offset` or `with_positions`.
        positions: of the T queries, `(T,)` or `(B, T)`; 0 to T - 1 if not given.

    Returns:
        The scaled queries, in the shape and dtype of q.

    Raises:
        TypeError: if `temperature` is no score_mod of this library, `q` no floating tensor or
            `positions` no integer one.
        ValueError: if it does anything but multiply rows, is for another number of heads, or
            shapes do not fit.

    >>> import score_mods
    >>> q = torch.ones(1, 1, 3, 2)
    >>> scale_queries(q, score_mods.llama4_temperature(1.0, interval=2))[0, 0, :, 0]
    tensor([1.0000, 1.6931, 1.6931])
    """
    names = getattr(temperature, "parts", ())
    if not names:
        raise TypeError(
            "temperature must be a row temperature such as logn(), got "
            f"{getattr(temperature, '__name__', type(temperature).__name__)}"
        )
    if any(stages.get(name) != "temperature" for name in names):
        raise ValueError(
            f"temperature must only multiply rows, got {' then '.join(names)}; "
            "give it to attention as a score_mod"
        )
    positions = _query_positions(q, positions)
    B, H, _, _ = q.shape
    heads = getattr(temperature, "num_heads", None)
    if heads not in (None, H):
        raise ValueError(f"temperature has parameters for {heads} heads, q has {H}")
    factor = to_device(temperature, q.device)(
        torch.ones((), device=q.device, dtype=torch.promote_types(q.dtype, torch.float32)),
        torch.arange(B, device=q.device)[:, None, None],
        torch.arange(H, device=q.device)[:, None],
        positions,
        positions,
    )
    return (q.to(factor.dtype) * factor[..., None]).to(q.dtype)


def asentmax_queries(
    q: Tensor,
    beta: Tensor,
    gamma: Tensor,
    positions: Tensor | None = None,
    *,
    gamma_range: float = 2.0,
    delta: float = 1.0,
) -> Tensor:
    """Multiplies each query by ASEntmax's factor, with beta and gamma computed from its token.

    q' = (delta + softplus(beta) ln(p + 2)^(gamma_range tanh(gamma))) q, p the query's position;
    beta and gamma are linear maps of the token. The authors do this for the heads without a bias
    of `nape` alone: give those heads here, and put them together again with `torch.cat`.

    Args:
        q: queries, `(B, H, T, D)`.
        beta: before the softplus, `(B, H, T)`.
        gamma: before the tanh, `(B, H, T)`.
        positions: of the T queries, `(T,)` or `(B, T)`; 0 to T - 1 if not given.
        gamma_range: bound of the exponent, positive.
        delta: offset; the authors have 1.

    Returns:
        The scaled queries, in the shape and dtype of q.

    Raises:
        TypeError: if `q`, `beta` or `gamma` is no floating tensor, `positions` no integer one, or
            a number has the wrong type.
        ValueError: if shapes do not fit, or `gamma_range` is not positive.

    Reference: as `asentmax_scale`.

    >>> q, token = torch.randn(1, 4, 9, 8), torch.randn(1, 9, 32)
    >>> beta, gamma = torch.nn.Linear(32, 8)(token).mT.chunk(2, 1)
    >>> asentmax_queries(q, beta, gamma).shape
    torch.Size([1, 4, 9, 8])
    """
    positions = _query_positions(q, positions)
    for name, value in (("beta", beta), ("gamma", gamma)):
        if floating(name, value, "B", "H", "T").shape != q.shape[:3]:
            raise ValueError(
                f"{name} must have shape {tuple(q.shape[:3])}, got {tuple(value.shape)}"
            )
    dtype = torch.promote_types(q.dtype, torch.float32)
    exponent = number("gamma_range", gamma_range, positive=True) * gamma.to(dtype).tanh()
    growth = torch.log(positions.to(dtype) + 2) ** exponent
    factor = number("delta", delta) + torch.nn.functional.softplus(beta.to(dtype)) * growth
    return (q.to(dtype) * factor[..., None]).to(q.dtype)


def _query_positions(q: Tensor, positions: Tensor | None) -> Tensor:
    """The positions of queries as `(1, 1, T)` or `(B, 1, T)`, once both are checked."""
    B, _, T, _ = floating("q", q, "B", "H", "T", "D").shape
    if positions is None:
        positions = torch.arange(T, device=q.device)
    return positions_of_shape(positions, (T,), (B, T)).view(-1, 1, T)
