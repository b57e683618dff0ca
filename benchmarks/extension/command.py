"""Losses and needles of a trained model in contexts longer than it was trained on.

Every setting of --mods reads the first tokens of --starts places in each text, at each length. A
row is one setting, length and text, written to OUT/rows when it is measured; rows that are there
are not measured again, so a run that was stopped goes on. Scale-invariant attention is told each
head's mu and sigma, measured at the trained length under the setting's own positions (of two
branches, under those of near keys), on tokens of the first text that come after those that are
scored: choose on that text, and the others are the test.
"""

from __future__ import annotations

import argparse

import torch
from tqdm import tqdm

from benchmarks.extension import settings, texts
from benchmarks.extension.explain import explain
from benchmarks.extension.rows import Row, Rows
from benchmarks.extension.run import Run, prepare
from benchmarks.extension.scores import loss_scores, needle_scores
from benchmarks.extension.tables import Grid, draw, table
from benchmarks.machine import machine

MODS = (
    "rope,recent,ntk,dynamic_ntk,yarn,p_rope,logn,logn_ntk,ssmax,infoscale,self_extend,rerope,"
    "lm_infinite,streaming_llm,scale_invariant:mu=on/off"
)


def main(arguments: list[str]) -> None:
    """Run the command line; exit with status 1 and one line for bad input."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        run = prepare(options)
        print(explain(run) if options.explain else _report(run))
    except (ImportError, OSError, TypeError, ValueError) as error:
        parser.exit(1, f"error: {error}\n")


def measure(run: Run) -> list[Row]:
    """Measure the rows that are not there yet.

    Returns:
        All rows of the run, by length, setting and text.
    """
    kept, last, needles = Rows(run.out / "rows"), run.shared["last"], run.shared["needles"]
    wanted = [
        (length, setting, text, run.identity(setting, length, text))
        for length in run.lengths
        for setting in run.settings
        for text in run.texts
    ]
    found = [kept.find(identity) for *_, identity in wanted]
    todo = [place for place, row in enumerate(found) if row is None]
    used, applied = machine(run.model.device), None
    with tqdm(total=len(todo), unit="row") as bar:
        for place in todo:
            length, setting, text, identity = wanted[place]
            bar.set_postfix_str(f"{setting.label}, {text.kind}, {length:,} tokens")
            if applied != (length, setting):
                run.apply(setting, length)
                applied = length, setting
            reads = setting.reads(length, run.trained)
            row = loss_scores(run.model, text, length, reads, last)
            if needles:
                row |= needle_scores(run.model, run.encode, text, length, reads, needles)
            found[place] = kept.save(identity, {**row, "machine": used})
            bar.update()
    return [row for row in found if row is not None]


def _report(run: Run) -> str:
    """Measure, write `table.md` and the figures, and return the table."""
    grid = Grid(measure(run))
    written = table(grid)
    figures = "\n".join(f"![]({name})" for name in draw(grid, run.out))
    (run.out / "table.md").write_text(f"{written}\n\n{figures}\n", encoding="utf-8")
    return written


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks extension",
        description=f"{__doc__}\n{settings.__doc__}\n{texts.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="smollm2", help="a folder, .gguf file or Hugging Face id")
    add("--gguf", metavar="FILE", help="GGUF file in that folder or repository")
    add("--text", metavar="SOURCE", nargs="+", default=list(texts.KINDS))
    add("--lengths", default="4096,8192,16384,32768,65536", metavar="N,M,...")
    add("--mods", nargs="+", default=[MODS], metavar="NAME,...", help=f"default: {MODS}")
    add("--out", default="reports/extension", metavar="DIR")
    add("--starts", type=int, default=3, help="places in each text where reading starts")
    add("--span", type=int, default=131072, help="tokens from one of them to the next")
    add("--last", type=int, default=2048, help="tokens at the end whose loss is given by itself")
    add("--needles", type=int, default=16, help="samples in a row; 0 for none")
    add("--trained", type=int, help="tokens that the model was trained on; default: its config's")
    add("--explain", action="store_true", help="measure attention by layer instead of rows")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 on a GPU")
    add("--impl", choices=("flex", "dense"), help="of attention; default: flex on a GPU")
    return parser
