"""A pretrained model whose attention is swapped, before and after some training on."""

from benchmarks.continued_pretraining.command import main

__all__ = ["main"]
