"""Train a small decoder at a long context by softmax attention, or with a state of fixed size.

    python -m benchmarks in_context --method power --horizons 16 16384
    python -m benchmarks in_context table reports/in_context

The first makes a row, or several, and writes OUT/METHOD-SEED.json; a row that was stopped goes on
where it was. Its tokens a second hold for a GPU that does nothing else. The second prints the
tables of the rows in a folder, and draws them: loss by position and by training FLOPs, and power
attention's total attention and negentropy by distance. Equal horizons start all gates alike;
spread ones start with every octave of distances between them getting the same share of a layer's
attention (`analysis.gates`).
"""

from __future__ import annotations

import argparse

from benchmarks import tokens
from benchmarks.in_context.row import METHODS, run_row
from benchmarks.in_context.tables import report
from benchmarks.options import (
    add_training_options,
    check_counts,
    in_one_line,
    prints_table,
    read_data,
)
from score_mods._checks import integer


def main(arguments: list[str]) -> None:
    """Run the command line; exit with status 1 and one line for bad input."""
    if prints_table("in_context", arguments, report):
        return
    parser = _parser()
    options = parser.parse_args(arguments)
    with in_one_line(parser):
        check_counts(options)
        integer("length", options.length, 8)
        data, _ = read_data(options, options.length)
        for method in options.method:
            print(run_row(options, method, data))


def _parser() -> argparse.ArgumentParser:
    methods = "".join(f"    {name:<16} {what}\n" for name, what in METHODS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks in_context",
        description=f"{__doc__}\nMethods:\n\n{methods}\n{tokens.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--method", nargs="+", choices=METHODS, required=True, metavar="NAME")
    add("--horizons", nargs=2, type=float, default=(16, 16384), metavar=("A", "B"))
    add_training_options(parser, out="reports/in_context", steps=800, sequences=8, length=16384)
    return parser
