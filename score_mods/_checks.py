"""Checks of plain arguments: messages name the argument, what was expected and what came."""

from __future__ import annotations

import math


def integer(name: str, value: int, at_least: int = 1) -> int:
    """`value`, if it is an int of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")
    return value


def number(name: str, value: float, *, positive: bool = False) -> float:
    """`value`, if it is a finite number, above zero if asked."""
    kind = "a positive number" if positive else "a number"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be {kind}, got {type(value).__name__}")
    if not math.isfinite(value) or (positive and value <= 0):
        raise ValueError(f"{name} must be {kind}, finite, got {value}")
    return float(value)
