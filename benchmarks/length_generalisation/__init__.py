"""Length generalisation: decoders trained at one length, and what they make of longer contexts.

`methods` names what is compared, `row` trains and measures one, `tables` puts rows together.
"""

from benchmarks.length_generalisation.command import main

__all__ = ["main"]
