"""Train a small decoder at one length, and see what it makes of longer contexts.

    python -m benchmarks length_generalisation --method scale_invariant --seed 0
    python -m benchmarks length_generalisation table reports/length_generalisation

The first makes a row, or several, of Tables 1 and 2 of arXiv 2505.17083, and writes
OUT/METHOD-SEED.json; a row that was stopped goes on where it was. The second prints the table of
the rows in a folder, and draws them. By default a row is 105 million tokens and 3e16 FLOPs.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from benchmarks import tokens
from benchmarks.length_generalisation.methods import METHODS
from benchmarks.length_generalisation.row import run_row
from benchmarks.length_generalisation.tables import report
from benchmarks.tokens import Tokenizer, token_file
from benchmarks.training import Interrupted


def main(arguments: list[str]) -> None:
    """Run the command line; exit with status 1 and one line for bad input."""
    parser = _parser()
    if arguments[:1] == ["table"]:
        options = _table_parser().parse_args(arguments[1:])
        try:
            print(report(Path(options.folder)))
        except (OSError, ValueError) as error:
            parser.exit(1, f"error: {error}\n")
        return
    options = parser.parse_args(arguments)
    try:
        _check(options)
        tokenizer = Tokenizer(options.tokenizer)
        data = token_file(
            options.data,
            tokenizer,
            options.cache,
            span=options.lengths[-1],
            held_out=options.held_out,
        )
        for method in options.method:
            print(run_row(options, method, data, tokenizer))
    except (ImportError, OSError, TypeError, ValueError, FloatingPointError, Interrupted) as error:
        parser.exit(1, f"error: {error}\n")


def _check(options: argparse.Namespace) -> None:
    """Turn the lengths into numbers; raise ValueError for what does not fit together."""
    try:
        options.lengths = sorted({int(length) for length in options.lengths.split(",")})
    except ValueError:
        raise ValueError(f"lengths must be numbers, got {options.lengths}") from None
    names = ("sequences", "length", "micro", "needle_sequences", "needles", "held_out")
    for name in names:
        if getattr(options, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(options, name)}")
    for length in options.lengths:
        if length < 1 or options.lengths[-1] % length:
            raise ValueError(
                f"lengths must be positive divisors of the longest, got {options.lengths}"
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks length_generalisation",
        description=f"{__doc__}\n{tokens.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--method",
        nargs="+",
        choices=METHODS,
        required=True,
        metavar="NAME",
        help=", ".join(METHODS),
    )
    add("--seed", type=int, default=0, help="of the first weights")
    add("--data-seed", type=int, default=0, help="of the order of the data")
    add("--data", default="installed", metavar="SOURCE")
    add("--tokenizer", default="smollm2", help="bytes, smollm2 or a folder with tokenizer.json")
    add("--cache", default="reports/tokens", metavar="DIR", help="where token files are kept")
    add("--out", default="reports/length_generalisation", metavar="DIR")
    add("--steps", type=int, default=800)
    add("--sequences", type=int, default=32, help="in a step")
    add("--micro", type=int, default=32, help="sequences in one forward pass")
    add("--length", type=int, default=4096, help="of a training sequence, in tokens")
    add("--lengths", default="4096,16384,65536", metavar="N,M,...", help="of validation")
    add("--held-out", type=int, default=16, help="validation documents")
    add("--width", type=int, default=384)
    add("--layers", type=int, default=8)
    add("--head-dim", type=int, default=64)
    add("--needle-steps", type=int, default=150, help="of fine-tuning; 0 for no needles")
    add("--needle-sequences", type=int, default=16, help="in a step of it")
    add("--needles", type=int, default=64, help="questions at each length")
    add(
        "--seconds",
        type=float,
        default=math.inf,
        help="after which to stop training, to go on later",
    )
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def _table_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks length_generalisation table")
    parser.add_argument("folder", help="where the rows are")
    return parser
