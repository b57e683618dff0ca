"""Longer contexts without training: what each way to extend a trained model loses and finds.

`command` measures rows, of one setting, length and kind of text each, and `explain` the attention
behind them.
"""

from benchmarks.extension.command import main

__all__ = ["main"]
