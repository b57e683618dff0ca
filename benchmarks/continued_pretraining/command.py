"""Swap a pretrained model's attention, and train it on for a little.

    python -m benchmarks continued_pretraining --mods rope,scale_invariant:tau=10,rotary=p_rope
    python -m benchmarks continued_pretraining table reports/continued_pretraining

The first makes a row for each setting, as Table 4 of arXiv 2505.17083 has them, and writes it to
OUT; a row that was stopped goes on where it was, and `--steps 0` only validates. The second prints
the table of the rows in a folder, and draws them. Scale-invariant attention is told each head's mu
and sigma, measured on training text before training, unless its options say otherwise. LogN is
`ssmax`, whose rate the query projections learn; `logn` leaves rows within the model's own length
as they are, and would train as plain attention does. So do `ntk` and `yarn`, which change longer
contexts alone: named together with `rope`, the three are trained once.
"""

from __future__ import annotations

import argparse
import math

import torch

from benchmarks import tokens
from benchmarks.continued_pretraining.row import run_rows
from benchmarks.continued_pretraining.tables import report
from benchmarks.extension import settings
from benchmarks.machine import device_of
from benchmarks.options import in_one_line, lengths_of, prints_table
from benchmarks.tokens import Tokenizer, token_file
from score_mods._checks import integer

MODS = (
    "rope,p_rope,p_rope*0,ntk,yarn,ssmax,ssmax:rotary=p_rope,ssmax:rotary=ntk,alibi,"
    "scale_invariant:rotary=p_rope/rope,tau=10,sigma=1,mu=off,sinks=0,"
    "scale_invariant:rotary=p_rope/rope,tau=10,scale_invariant:rotary=p_rope,tau=3000"
)


def main(arguments: list[str]) -> None:
    """Run the command line; exit with status 1 and one line for bad input."""
    if prints_table("continued_pretraining", arguments, report):
        return
    parser = _parser()
    options = parser.parse_args(arguments)
    with in_one_line(parser):
        device_of(options.device)
        options.lengths = lengths_of(options.lengths)
        for name in ("steps", "data_seed"):
            integer(name, getattr(options, name), 0)
        for name in ("sequences", "micro", "length", "held_out"):
            integer(name, getattr(options, name))
        if not 0 < options.rate < math.inf:
            raise ValueError(f"rate must be positive and finite, got {options.rate}")
        if options.trained is not None:
            integer("trained", options.trained, 256)  # which calibration needs
        chosen = settings.parse(" ".join(options.mods))
        if any(setting.recent for setting in chosen):
            raise ValueError("mods: recent is no way to attend")
        tokenizer = Tokenizer(options.tokenizer or options.model)
        span = options.lengths[-1]
        data = token_file(
            options.data,
            tokenizer,
            options.cache,
            span=span,
            held_out=options.held_out,
            most=options.most,
        )
        for file in run_rows(options, chosen, data):
            print(file)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks continued_pretraining",
        description=f"{__doc__}\n{settings.__doc__}\n{tokens.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="smollm2", help="a folder, .gguf file or Hugging Face id")
    add("--gguf", metavar="FILE", help="GGUF file in that folder or repository")
    add("--tokenizer", help="smollm2 or a folder with tokenizer.json; default: the model's")
    add("--trained", type=int, help="tokens that the model was trained on; default: its config's")
    add("--mods", nargs="+", default=[MODS], metavar="NAME,...", help=f"default: {MODS}")
    add("--data", default="installed", metavar="SOURCE")
    add(
        "--most",
        type=int,
        metavar="N",
        help="tokens of the source to stop soon after; default: all",
    )
    add("--data-seed", type=int, default=0, help="of the order of the data")
    add("--cache", default="reports/tokens", metavar="DIR", help="where token files are kept")
    add("--out", default="reports/continued_pretraining", metavar="DIR")
    add("--steps", type=int, default=300)
    add("--rate", type=float, default=1e-4, help="learning rate of AdamW")
    add("--sequences", type=int, default=8, help="in a step")
    add("--micro", type=int, default=8, help="sequences in one forward pass")
    add("--length", type=int, default=4096, help="of a training sequence, in tokens")
    add("--lengths", default="4096,16384,65536", metavar="N,M,...", help="of validation")
    add("--held-out", type=int, default=8, help="validation documents")
    add("--seconds", type=float, default=math.inf, help="of training, to be gone on with later")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser
