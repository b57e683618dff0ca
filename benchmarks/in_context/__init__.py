"""How well mixers with a state of fixed size learn in a long context, beside softmax attention."""

from benchmarks.in_context.command import main

__all__ = ["main"]
