"""Checks of plain arguments: messages name the argument, what was expected and what came."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_MOST = torch.iinfo(torch.int64).max


def kind_of(value: Any) -> Any:
    """What to call a value of the wrong kind in a message: a tensor's dtype, or the type."""
    return value.dtype if isinstance(value, Tensor) else type(value).__name__


def integer(name: str, value: int, at_least: int = 1) -> int:
    """`value`, if it is an int of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")
    if value > _MOST:
        raise ValueError(f"{name} must be an int of 64 bits, got {value}")
    return value


def number(name: str, value: float, *, positive: bool = False) -> float:
    """`value`, if it is a finite number, above zero if asked."""
    kind = "a positive number" if positive else "a number"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be {kind}, got {type(value).__name__}")
    # Not by math.isfinite, which cannot be asked about an int that no float holds.
    if not abs(value) <= sys.float_info.max or (positive and value <= 0):
        raise ValueError(f"{name} must be {kind}, finite, got {value}")
    return float(value)


def boolean(name: str, value: bool) -> bool:
    """`value`, if it is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return value


def sizes(name: str, values: tuple[int, ...]) -> tuple[int, ...]:
    """`values`, if it is a tuple of ints of at least 1, and not empty."""
    if not isinstance(values, tuple):
        raise TypeError(f"{name} must be a tuple of ints, got {type(values).__name__}")
    if not values:
        raise ValueError(f"{name} must have at least one entry, got {values}")
    for value in values:
        integer(f"each of {name}", value)
    return values


def integers(name: str, value: Tensor) -> Tensor:
    """`value`, if it is an integer tensor."""
    if not isinstance(value, Tensor) or value.dtype not in _INTEGERS:
        raise TypeError(f"{name} must be an integer tensor, got {kind_of(value)}")
    return value


def floating(name: str, value: Tensor, *axes: str) -> Tensor:
    """`value`, if it is a floating tensor with these axes (any, if none is named), not empty."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise TypeError(f"{name} must be a floating tensor, got {kind_of(value)}")
    if axes and value.ndim != len(axes):
        shape = ", ".join(axes) + ("," if len(axes) == 1 else "")
        raise ValueError(f"{name} must have shape ({shape}), got {tuple(value.shape)}")
    if 0 in value.shape:
        raise ValueError(f"{name} must have no empty axis, got {tuple(value.shape)}")
    return value


def positions_of_shape(positions: Tensor, *shapes: tuple[int, ...]) -> Tensor:
    """`positions`, if they are an integer tensor of one of these shapes, as int64."""
    integers("positions", positions)
    if not any(fits(positions.shape, shape) for shape in shapes):
        wanted = " or ".join(map(str, shapes))
        raise ValueError(f"positions must have shape {wanted}, got {tuple(positions.shape)}")
    return positions.long()


def fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether the shapes are equal, size by size: torch.compile finds none in a tuple of them."""
    return len(shape) == len(wanted) and all(a == b for a, b in zip(shape, wanted, strict=True))
