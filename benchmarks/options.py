"""Options that the benchmarks which train a decoder have in common."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.decoder import Size
from benchmarks.machine import device_of
from benchmarks.tokens import TokenFile, Tokenizer, token_file
from benchmarks.training import Interrupted
from score_mods._checks import integer

_COUNTS = ("sequences", "micro", "length", "held_out")


def add_training_options(
    parser: argparse.ArgumentParser, *, out: str, steps: int, sequences: int, length: int
) -> None:
    """Add them.

    Args:
        parser: of the command.
        out: default of `--out`.
        steps: default of `--steps`.
        sequences: default of `--sequences`.
        length: default of `--length`.
    """
    add = parser.add_argument
    add("--seed", type=int, default=0, help="of the first weights")
    add("--data-seed", type=int, default=0, help="of the order of the data")
    add("--data", default="installed", metavar="SOURCE")
    add("--tokenizer", default="smollm2", help="bytes, smollm2 or a folder with tokenizer.json")
    add("--cache", default="reports/tokens", metavar="DIR", help="where token files are kept")
    add("--out", default=out, metavar="DIR")
    add("--steps", type=int, default=steps)
    add("--sequences", type=int, default=sequences, help="in a step")
    add("--micro", type=int, default=sequences, help="sequences in one forward pass")
    add("--length", type=int, default=length, help="of a training sequence, in tokens")
    add("--held-out", type=int, default=16, help="validation documents")
    add("--width", type=int, default=256)
    add("--layers", type=int, default=6)
    add("--head-dim", type=int, default=64)
    add("--seconds", type=float, default=math.inf, help="of training, to be gone on with later")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def check_counts(options: argparse.Namespace, *names: str) -> None:
    """Raise a ValueError for a count below 1, here or in common, or a wrong seed or device."""
    device_of(options.device)
    integer("data_seed", options.data_seed, at_least=0)
    for name in (*_COUNTS, *names):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(options, name)}")


def lengths_of(written: str) -> list[int]:
    """The lengths that are written N,M,..., rising.

    Raises:
        ValueError: if they are no numbers, or one is not a divisor of the longest.
    """
    try:
        lengths = sorted({int(length) for length in written.split(",")})
    except ValueError:
        raise ValueError(f"lengths must be numbers, got {written}") from None
    if lengths[0] < 1 or any(lengths[-1] % length for length in lengths):
        raise ValueError(f"lengths must be positive divisors of the longest, got {lengths}")
    return lengths


def read_data(options: argparse.Namespace, span: int) -> tuple[TokenFile, Tokenizer]:
    """The data and its tokenizer, with validation documents of more than `span` tokens."""
    tokenizer = Tokenizer(options.tokenizer)
    cache = Path(options.cache)
    data = token_file(options.data, tokenizer, cache, span=span, held_out=options.held_out)
    return data, tokenizer


def identity(options: argparse.Namespace, data: TokenFile, method: str) -> dict[str, Any]:
    """What tells a row from others: its method, seeds, sizes and data."""
    size = Size(data.vocabulary, options.width, options.layers, options.head_dim)
    names = ("seed", "data_seed", "steps", "sequences", "length")
    chosen = {name: getattr(options, name) for name in names}
    return {"method": method, **chosen, "size": asdict(size), "data": data.describe()}


def prints_table(name: str, arguments: Sequence[str], report: Callable[[Path], str]) -> bool:
    """Print the table of a folder's rows, if that is what the arguments of a benchmark ask for.

    Args:
        name: of the benchmark.
        arguments: of the command line; `table FOLDER` asks for the table.
        report: from the folder to its table.

    Returns:
        Whether they did.
    """
    if arguments[:1] != ["table"]:
        return False
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name} table")
    parser.add_argument("folder", help="where the rows are")
    folder = Path(parser.parse_args(arguments[1:]).folder)
    with in_one_line(parser):
        print(report(folder))
    return True


@contextmanager
def in_one_line(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Exit with status 1 and one line for what the user can mend."""
    try:
        yield
    except (ImportError, OSError, TypeError, ValueError, FloatingPointError, Interrupted) as error:
        parser.exit(1, f"error: {error}\n")
