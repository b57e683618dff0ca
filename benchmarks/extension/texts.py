"""Texts of several kinds, cut into the token sequences that are read.

A source is NAME=PATH, the PATH of a file or folder (which is then its name, too), or the name of
one of three kinds that are found on the machine:

    code            the modules of Python's standard library, in order of name
    documentation   files .md, .rst and .txt of installed software, without licences
    prose           of its licences and copyright notices, the paragraphs of 40 words and more,
                    nine tenths of whose characters are letters and spaces

Of the latter two a paragraph is taken where it comes first, whatever its spaces, capitals and
punctuation. Of a folder all files that are UTF-8 are read, in order of path.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from analysis.huggingface import standard_library, tokenise

_ROOTS = ("/usr/share/doc", "/usr/share/common-licenses", sysconfig.get_path("purelib"))
_LICENCE = re.compile(r"licen[cs]e|copying|copyright|notice", re.IGNORECASE)


@dataclass(frozen=True)
class Text:
    """A kind of text, as a model reads it.

    Attributes:
        kind: its name.
        starts: token ids `[S, N]` of S sequences that do not overlap, each begun with BOS where
            the model uses one.
        rest: token ids `[R]` of what follows them, which is not scored.
        digest: tells texts apart.
    """

    kind: str
    starts: Tensor
    rest: Tensor
    digest: str


def read(tokenizer: Any, source: str, starts: int, span: int, rest: int = 0) -> Text:
    """Read a source and cut it.

    Args:
        tokenizer: of the model.
        source: see this module's docstring.
        starts: number of sequences.
        span: tokens of each.
        rest: tokens to be left after them.

    Raises:
        ValueError: if there is no such source, or it has too few tokens.
    """
    kind, pieces = _pieces(source)
    begin = tokenise(tokenizer, 1, "a")[0]
    if begin.item() != tokenizer.bos_token_id:
        begin = begin[:0]
    body = span - len(begin)
    try:
        ids = tokenise(tokenizer, len(begin) + starts * body + rest, pieces)[0, len(begin) :]
    except ValueError as error:
        raise ValueError(
            f"text {kind}: {error}, for {starts} starts of {span} and {rest} to calibrate on"
        ) from None
    scored = ids[: starts * body].view(starts, body)
    scored = torch.cat([begin.expand(starts, -1), scored], 1)
    digest = hashlib.sha256(scored.numpy().tobytes()).hexdigest()[:12]
    return Text(kind, scored, ids[starts * body :], digest)


def _pieces(source: str) -> tuple[str, Iterator[str]]:
    """The name of a source and its text, file by file."""
    if source in _FOUND:
        return source, _FOUND[source]()
    name, _, path = source.rpartition("=")
    if not Path(path).exists():
        raise ValueError(
            f"text: expected a file, a folder, NAME=PATH or one of {', '.join(_FOUND)}, "
            f"got {source!r}"
        )
    files = [Path(path)] if Path(path).is_file() else _files([path], lambda file: True)
    return name or Path(path).stem, (text for text in map(_utf8, files) if text)


def _files(roots: list[str] | tuple[str, ...], wanted: Callable[[Path], bool]) -> list[Path]:
    return [
        path
        for root in roots
        for path in sorted(Path(root).rglob("*"))
        if wanted(path) and path.is_file()
    ]


def _utf8(path: Path) -> str:
    """A file's text; nothing if it is no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def _paragraphs(files: list[Path], wanted: Callable[[str], bool]) -> Iterator[str]:
    """Those paragraphs of each file that are wanted and come for the first time."""
    seen: set[str] = set()
    for text in map(_utf8, files):
        kept = []
        for paragraph in re.split(r"\n\s*\n", text):
            letters = re.sub(r"[\W_]+", "", paragraph).lower()
            if letters and letters not in seen and wanted(paragraph):
                seen.add(letters)
                kept.append(f"{paragraph.rstrip()}\n\n")
        yield "".join(kept)


def _running(paragraph: str) -> bool:
    """Whether it is running text."""
    spelled = sum(x.isalpha() or x.isspace() for x in paragraph)
    return len(paragraph.split()) >= 40 and spelled >= 0.9 * len(paragraph)


def _licence(path: Path) -> bool:
    return _LICENCE.match(path.name) is not None or path.parent.name == "common-licenses"


def _documentation() -> Iterator[str]:
    def wanted(path: Path) -> bool:
        return path.suffix in (".md", ".rst", ".txt") and not _licence(path)

    return _paragraphs(_files(_ROOTS, wanted), lambda paragraph: True)


def _prose() -> Iterator[str]:
    return _paragraphs(_files(_ROOTS, _licence), _running)


_FOUND: dict[str, Callable[[], Iterator[str]]] = {
    "code": standard_library,
    "documentation": _documentation,
    "prose": _prose,
}
KINDS = tuple(_FOUND)
