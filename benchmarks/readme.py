"""`python -m benchmarks readme`: the README's tables, taken from RESULTS.md.

A table stands between the markers `<!-- NAME -->` and `<!-- end -->`. What it shows is chosen
here; every number is a cell of RESULTS.md.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
README, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "RESULTS.md"
SHAPES = ("B 16 x T 4096", "B 4 x T 16384", "B 1 x T 65536")  # 65,536 tokens in all

Table = list[list[str]]  # the header and the rows


def main(arguments: Sequence[str]) -> None:
    """Write the tables into the README."""
    argparse.ArgumentParser(prog="python -m benchmarks readme", description=__doc__).parse_args(
        arguments
    )
    README.write_text(filled(README.read_text(), RESULTS.read_text()))
    print(f"{', '.join(TABLES)}: README.md")


def filled(readme: str, results: str) -> str:
    """The README with its tables made anew.

    Raises:
        ValueError: It lacks a marker, or RESULTS.md a table or a cell.
    """
    for name, made in TABLES.items():
        table = made(results)
        readme, count = re.subn(
            rf"(<!-- {name} -->\n\n).*?(\n\n<!-- end -->)",
            lambda found, table=table: found[1] + table + found[2],
            readme,
            flags=re.S,
        )
        if count != 1:
            raise ValueError(f"README.md must have the marker <!-- {name} --> once, got {count}")
    return readme


def _score_mods(results: str) -> str:
    """What scale-invariant attention costs over plain FlexAttention, as RESULTS.md sums it up."""
    return _markdown(_table(results, "score_mods", "What it comes to"))


def _power(results: str) -> str:
    """Milliseconds of a training step of power attention and of what it is compared with."""
    (_, *shapes), *rows = _table(results, "power")
    steps = {name: dict(zip(shapes, map(_both, cells), strict=True)) for name, *cells in rows}
    shown = {
        "`power_attention`": steps["power (its own choice)"],
        "`retention` 1.0.7, its better form": {
            shape: min(
                steps[f"retention, {form}"][shape] for form in ("attention form", "chunk 1024")
            )
            for shape in SHAPES
        },
        "softmax attention, SDPA cuDNN": steps["SDPA cuDNN"],
    }
    header = ["ms, forward + backward", *SHAPES]
    cells = [[name, *(f"{ms[shape]:.2f}" for shape in SHAPES)] for name, ms in shown.items()]
    return _markdown([header, *cells])


def _quality(results: str) -> str:
    """The experiments and their tables."""
    rows = [[f"`{name} {option}`", asked] for name, (option, asked) in EXPERIMENTS.items()]
    overview = _markdown([["`python -m benchmarks ...`", "what it asks"], *rows], rule="---")
    tables = (f"`{name}`:\n\n{_markdown(_table(results, name))}" for name in EXPERIMENTS)
    return "\n\n".join([overview, *tables])


# The option that names what a row is of, and what is asked.
EXPERIMENTS = {
    "length_generalisation": (
        "--method NAME",
        "small decoders trained at 4k by each method of the paper's Table 1: loss and needles at "
        "4k, 16k, 64k",
    ),
    "extension": (
        "--mods NAME,...",
        "a trained model's loss and needles in contexts longer than its own, without training",
    ),
    "continued_pretraining": (
        "--mods NAME,...",
        "a pretrained model whose attention is swapped, before and after some hundred steps "
        "(Table 4)",
    ),
    "in_context": (
        "--method NAME",
        "power, linear, windowed, softmax and scale-invariant attention at 16k: loss by position "
        "and by FLOPs, and what gates learn",
    ),
}
TABLES: dict[str, Callable[[str], str]] = {
    "score_mods": _score_mods,
    "power": _power,
    "quality": _quality,
}


def _table(results: str, section: str, heading: str = "") -> Table:
    """The first table of a section (`## section`) of RESULTS.md, or of a part of it."""
    part = results.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    if heading:
        part = part.partition(f"\n### {heading}\n")[2]
    found = re.search(r"^(\|.*)\n\|[-:| ]+\n((?:\|.*\n)+)", part, re.M)
    if found is None:
        raise ValueError(f"RESULTS.md must have a table in {section} {heading}".rstrip())
    lines = [found[1], *found[2].splitlines()]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _markdown(table: Table, rule: str = "---:") -> str:
    header, *rows = table
    rules = ["---", *[rule] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rules, *rows))


def _both(cell: str) -> float:
    """The second number of "forward / forward + backward; MiB"."""
    found = re.fullmatch(r"[\d.]+ / ([\d.]+); \d+", cell)
    return float(found[1]) if found else float("nan")
