"""Run one benchmark: ``python -m benchmarks NAME [options]``."""

import sys
from importlib import import_module

NAMES = (
    "continued_pretraining",
    "extension",
    "in_context",
    "length_generalisation",
    "power",
    "readme",
    "score_mods",
)

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        sys.exit(f"usage: python -m benchmarks {{{','.join(NAMES)}}} [options]")
    import_module(f"benchmarks.{sys.argv[1]}").main(sys.argv[2:])
