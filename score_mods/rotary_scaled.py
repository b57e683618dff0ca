"""Rotary schemes that take a model to contexts longer than it was trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from score_mods._checks import boolean, integer, number
from score_mods.rotary import Rotary, rope


def _factor(factor: float) -> float:
    if number("factor", factor, positive=True) < 1:
        raise ValueError(f"factor must be at least 1, got {factor}")
    return factor


def position_interpolation(head_dim: int, factor: float, base: float = 10000.0) -> Rotary:
    """Position interpolation: RoPE at positions divided by `factor`, w_i = base^(-2i/d) / factor.

    Args:
        head_dim: channels d of a head, even.
        factor: wanted length over trained length, at least 1.
        base: as in `rope`.

    Returns:
        A `Rotary`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `factor` is below 1, or as in `rope`.

    Reference: Chen et al., arXiv 2306.15595, equation 2.
    """
    return Rotary(rope(head_dim, base).frequencies / _factor(factor))


def ntk_rope(head_dim: int, factor: float, base: float = 10000.0) -> Rotary:
    """NTK-aware RoPE: RoPE with the base raised to base * factor^(d/(d-2)).

    The lowest frequency is divided by `factor` and the highest stays.

    Args:
        head_dim: channels d of a head, even, at least 4.
        factor: wanted length over trained length, at least 1.
        base: base of the trained model.

    Returns:
        A `Rotary`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if `factor` is below 1 or `head_dim` below 4, or as in `rope`.

    Reference: bloc97, "NTK-aware scaled RoPE" (2023); arXiv 2309.00071, section 3.1; the paper's
    RoPE+NTK.
    """
    integer("head_dim", head_dim, 4)
    return rope(
        head_dim,
        number("base", base, positive=True) * _factor(factor) ** (head_dim / (head_dim - 2)),
    )


def dynamic_ntk_rope(
    head_dim: int, length: float, train_length: float, factor: float = 1.0, base: float = 10000.0
) -> Rotary:
    """Dynamic NTK: NTK-aware RoPE whose factor follows the length of the context.

    base' = base (factor length/train_length - (factor - 1))^(d/(d-2)) beyond `train_length`, base
    up to it. The frequencies change with the length: cache keys unrotated and rotate late.

    Args:
        head_dim: channels d of a head, even, at least 4.
        length: tokens in the context now, positive.
        train_length: tokens the model was trained on, positive.
        factor: how much faster than the length the factor grows, at least 1.
        base: base of the trained model.

    Returns:
        A `Rotary` for contexts of `length`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of its range.

    Reference: emozilla, "Dynamically scaled RoPE" (2023), in the form of the transformers library.
    """
    ratio = number("length", length, positive=True) / number(
        "train_length", train_length, positive=True
    )
    return ntk_rope(head_dim, max(1.0, _factor(factor) * ratio - (factor - 1)), base)


def yarn_rope(
    head_dim: int,
    factor: float,
    train_length: float,
    *,
    base: float = 10000.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
    truncate: bool = True,
) -> Rotary:
    """YaRN: interpolates the low frequencies, keeps the high ones, and sharpens the scores.

    w_i' = w_i (1 - r_i) + (w_i / factor) r_i, where the ramp r_i rises linearly from 0 at the
    channel pair that turns beta_fast times within `train_length` to 1 at the one that turns
    beta_slow times; cos and sin are multiplied by 0.1 ln(factor) + 1.

    Args:
        head_dim: channels d of a head, even.
        factor: wanted length over trained length, at least 1.
        train_length: tokens the model was trained on, positive.
        base: base of the trained model, above 1.
        beta_fast: turns above which a frequency is kept.
        beta_slow: turns below which it is divided by `factor`, below beta_fast.
        attention_factor: factor on cos and sin instead of 0.1 ln(factor) + 1.
        truncate: round the ramp's ends outward to whole pairs, as the authors' code does.

    Returns:
        A `Rotary`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of its range.

    Reference: Peng et al., "YaRN", arXiv 2309.00071, sections 3.2 to 3.4, and the authors' public
    code.
    """
    if number("base", base, positive=True) <= 1:
        raise ValueError(f"base must be above 1, got {base}")
    if not number("beta_slow", beta_slow, positive=True) < number(
        "beta_fast", beta_fast, positive=True
    ):
        raise ValueError(f"beta_slow must be below beta_fast, got {beta_slow} and {beta_fast}")
    length = number("train_length", train_length, positive=True)

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(length / (2 * math.pi * times)) / (2 * math.log(base))

    boolean("truncate", truncate)
    frequencies = rope(head_dim, base).frequencies
    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(len(frequencies), dtype=torch.float64) - low) / width).clamp(0, 1)
    scaled = frequencies * (1 - ramp) + frequencies / _factor(factor) * ramp
    sharpening = 0.1 * math.log(factor) + 1 if attention_factor is None else attention_factor
    return Rotary(scaled, number("attention_factor", sharpening, positive=True))


def llama3_rope(
    head_dim: int,
    factor: float = 8.0,
    train_length: float = 8192.0,
    *,
    base: float = 500000.0,
    low_turns: float = 1.0,
    high_turns: float = 4.0,
) -> Rotary:
    """Llama 3.1's scaling: divides the low frequencies, keeps the high ones, blends between.

    w_i' = w_i (1 - r_i)/factor + w_i r_i, where r_i rises linearly from 0 for a pair that turns
    low_turns times or less within `train_length` to 1 for one that turns high_turns times.

    Args:
        head_dim: channels d of a head, even.
        factor: wanted length over trained length, at least 1.
        train_length: tokens the model was trained on, positive.
        base: base of the trained model, positive.
        low_turns: turns up to which a frequency is divided by `factor`.
        high_turns: turns from which it is kept, above low_turns.

    Returns:
        A `Rotary`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of its range.

    Reference: the transformers library's `rope_type="llama3"`, `low_freq_factor` and
    `high_freq_factor`.
    """
    if not number("low_turns", low_turns, positive=True) < number("high_turns", high_turns):
        raise ValueError(f"low_turns must be below high_turns, got {low_turns} and {high_turns}")
    frequencies = rope(head_dim, base).frequencies
    turns = number("train_length", train_length, positive=True) * frequencies / (2 * math.pi)
    kept = ((turns - low_turns) / (high_turns - low_turns)).clamp(0, 1)
    return Rotary(frequencies * (1 - kept) / _factor(factor) + frequencies * kept)


def longrope(
    head_dim: int,
    factors: Sequence[float] | Tensor,
    factor: float,
    train_length: float,
    *,
    base: float = 10000.0,
    attention_factor: float | None = None,
    short_factors: Sequence[float] | Tensor | None = None,
    length: float | None = None,
    start_tokens: int = 0,
) -> Rotary:
    """LongRoPE: divides each frequency by a factor of its own, and sharpens the scores.

    w_i' = w_i / factors_i; cos and sin are multiplied by sqrt(1 + ln(factor) / ln(train_length)).
    The factors are searched for each model, and so may be a number of tokens at the start that
    keep w_i. A second list is for contexts that are no longer than the trained length: as with
    `dynamic_ntk_rope`, the frequencies then change with the length.

    Args:
        head_dim: channels d of a head, even.
        factors: d/2 positive numbers, the highest frequency's first.
        factor: longest length over trained length, at least 1.
        train_length: tokens the model was trained on, above 1.
        base: base of the trained model, positive.
        attention_factor: factor on cos and sin instead.
        short_factors: as `factors`, for contexts of at most `train_length`; needs `length`.
        length: tokens in the context now, positive; needs `short_factors`.
        start_tokens: how many tokens at the start keep their frequencies, at least 0.

    Returns:
        A `Rotary`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of its range, a list has another length, or only one of
            `short_factors` and `length` is given.

    Reference: Ding et al., "LongRoPE", arXiv 2402.13753, section 2.2, in the form of the
    transformers library, which has no start tokens.
    """
    if (short_factors is None) != (length is None):
        raise ValueError("short_factors and length must be given together, got one of them")
    original = rope(head_dim, base)
    divisors = _divisors("factors", factors, original)
    if number("train_length", train_length) <= 1:
        raise ValueError(f"train_length must be above 1, got {train_length}")
    if short_factors is not None and length is not None:
        short = _divisors("short_factors", short_factors, original)
        divisors = short if number("length", length, positive=True) <= train_length else divisors
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(_factor(factor)) / math.log(train_length))
    number("attention_factor", attention_factor, positive=True)
    kept = integer("start_tokens", start_tokens, at_least=0)
    return Rotary(
        original.frequencies / divisors,
        attention_factor,
        start=Rotary(original.frequencies, attention_factor) if kept else None,
        start_tokens=kept,
    )


def _divisors(name: str, factors: Sequence[float] | Tensor, rotary: Rotary) -> Tensor:
    expected = f"{name} must be {len(rotary.frequencies)} positive numbers"
    try:
        divisors = torch.as_tensor(factors, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"{expected}, got {factors!r}") from error
    if (
        divisors.shape != rotary.frequencies.shape
        or not ((divisors > 0) & divisors.isfinite()).all()
    ):
        raise ValueError(f"{expected}, got {divisors.tolist()}")
    return divisors


def resonance_rope(rotary: Rotary) -> Rotary:
    """Resonance RoPE: rounds the wavelength of each frequency to a whole number of tokens.

    w_i' = 2 pi / round(2 pi / w_i), so that a position shares its angles with those that lie
    multiples of the wavelength away, and long contexts bring no new ones in the short waves. It
    goes on any scheme: `resonance_rope(yarn_rope(...))` is Resonance YaRN. Frequencies of 0 stay.

    Args:
        rotary: the scheme to round.

    Returns:
        A `Rotary`.

    Raises:
        TypeError: if `rotary` is none.

    Reference: Wang et al., "Resonance RoPE", arXiv 2403.00071, algorithm 1, and the authors'
    public code, which also reduces positions by the wavelength; that changes no angle.
    """
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary must be a Rotary, got {type(rotary).__name__}")
    wavelength = torch.round(2 * math.pi / rotary.frequencies).clamp(min=1)
    start = None if rotary.start is None else resonance_rope(rotary.start)
    return replace(rotary, frequencies=2 * math.pi / wavelength, start=start)
