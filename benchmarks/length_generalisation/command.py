"""Train a small decoder at one length, and see what it makes of longer contexts.

    python -m benchmarks length_generalisation --method scale_invariant --seed 0
    python -m benchmarks length_generalisation table reports/length_generalisation

The first makes a row, or several, of Tables 1 and 2 of arXiv 2505.17083, and writes
OUT/METHOD-SEED.json; a row that was stopped goes on where it was, and one that is there is not
made again. The second prints the table of the rows in a folder, and draws them. By default a row
is 101 million tokens and 1.4e16 FLOPs.
"""

from __future__ import annotations

import argparse

from benchmarks import tokens
from benchmarks.length_generalisation.methods import METHODS
from benchmarks.length_generalisation.row import SHORTEST, run_row
from benchmarks.length_generalisation.tables import report
from benchmarks.options import (
    add_training_options,
    check_counts,
    in_one_line,
    lengths_of,
    prints_table,
    read_data,
)
from score_mods._checks import integer


def main(arguments: list[str]) -> None:
    """Run the command line; exit with status 1 and one line for bad input."""
    if prints_table("length_generalisation", arguments, report):
        return
    parser = _parser()
    options = parser.parse_args(arguments)
    with in_one_line(parser):
        options.lengths = lengths_of(options.lengths)
        check_counts(options, "needle_sequences", "needles")
        integer("needle_steps", options.needle_steps, at_least=0)
        for length in (options.length, *options.lengths):
            integer("length", length, at_least=SHORTEST)
        data, tokenizer = read_data(options, options.lengths[-1])
        for method in options.method:
            print(run_row(options, method, data, tokenizer))


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
    add_training_options(
        parser, out="reports/length_generalisation", steps=768, sequences=32, length=4096
    )
    add("--lengths", default="4096,16384,65536", metavar="N,M,...", help="of validation")
    add("--needle-steps", type=int, default=300, help="of fine-tuning; 0 for no needles")
    add("--needle-sequences", type=int, default=16, help="in a step of it")
    add("--needles", type=int, default=64, help="questions at each length")
    return parser
