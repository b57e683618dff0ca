"""Doctests as the section of examples that Google's style has for them.

In the sources they stand at the end of a docstring under no heading, which Markdown would take for
quotations.
"""

import re
from typing import Any

from griffe import Extension, Object

_DOCTEST = re.compile(r"^>>> .*\n?(?:^.+\n?)*", re.M)


class Doctests(Extension):
    """Puts the heading above them."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Change an object's docstring, once it is known."""
        if obj.docstring is not None:
            obj.docstring.value = _DOCTEST.sub(_headed, obj.docstring.value)


def _headed(found: re.Match[str]) -> str:
    indented = re.sub(r"^", "    ", found[0].rstrip("\n"), flags=re.M)
    return f"Examples:\n{indented}\n"
