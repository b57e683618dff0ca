"""The documents of a source that is text, as `benchmarks.tokens` says what they are."""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_PACKAGES = ("site-packages", "dist-packages")
# A folder with many packages in it, where each entry is a document.
_SYSTEM = (
    "/usr/include",
    "/usr/share",
    "/usr/lib/python3/dist-packages",
    "/usr/local",
    "/usr/src",
)
_NAMES = re.compile(
    r".+\.(c|cc|cfg|cmake|cpp|cu|cuh|cxx|go|h|hpp|html|hxx|inc|inl|java|js|json|md|pl|pm|pod|proto|py"
    r"|pyi|pyx|rb|rs|rst|sh|sql|tcl|tex|toml|ts|txt|xml|ya?ml)"
)
_LARGEST = 2**20  # bytes of a file that is still a text and no table
_LINE = 200  # characters of a line, in the mean, of such a file
_JOINED = 400_000  # characters of a document made of lines

Document = tuple[str, Iterator[str]]


def documents(source: str) -> Iterator[Document]:
    """The documents of "installed", of a folder or of a .jsonl file: names and pieces of text.

    Raises:
        ValueError: if a line of the file has no text.
    """
    if source.endswith(".jsonl") and Path(source).is_file():
        yield from _lines(Path(source))
        return
    seen: set[bytes] = set()
    if source == "installed":
        paths = sysconfig.get_paths()
        roots = [paths["stdlib"], paths["purelib"], paths["platlib"], *_SYSTEM]
        roots = [str(Path(root).resolve()) for root in roots]
        roots += [  # what another Python has, or the one that a virtual environment was made of
            str(found)
            for root in roots
            for inside in ("", "lib/python*/")
            for name in _PACKAGES
            for found in sorted(Path(root).glob(inside + name))
        ]
    else:
        roots = [str(Path(source).resolve())]
    for root in dict.fromkeys(roots):
        apart = {Path(other) for other in roots if Path(root) in Path(other).parents}
        for entry in sorted(Path(root).glob("*")):
            if entry not in apart and not entry.is_symlink():
                yield f"{Path(root).name}/{entry.name}", _texts(entry, apart, seen)


def _texts(entry: Path, apart: set[Path], seen: set[bytes]) -> Iterator[str]:
    """The texts of a file or folder, each under a line that names it."""
    for path in [entry] if entry.is_file() else sorted(entry.rglob("*")):
        if not _NAMES.fullmatch(path.name) or apart & set(path.parents) or not path.is_file():
            continue
        try:
            data = path.read_bytes() if path.stat().st_size <= _LARGEST else b""
        except PermissionError:  # the system's own
            continue
        name = hashlib.sha256(data).digest()
        if not data or name in seen or data.count(b"\n") * _LINE < len(data):
            continue
        seen.add(name)
        try:
            yield f"==== {path.relative_to(entry.parent)}\n{data.decode()}\n"
        except UnicodeDecodeError:
            continue


def _lines(path: Path) -> Iterator[Document]:
    """Texts of a .jsonl file, joined."""
    joined: list[str] = []
    size = count = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                text = json.loads(line)["text"]
                text.encode()  # a lone surrogate is no text
            except (AttributeError, KeyError, TypeError, ValueError):
                raise ValueError(f'data: line {number} of {path} has no "text"') from None
            joined.append(f"{text.rstrip()}\n\n")
            size += len(text)
            if size >= _JOINED:
                yield f"{path.name}[{count}]", iter(joined)
                joined, size, count = [], 0, count + 1
    if joined:
        yield f"{path.name}[{count}]", iter(joined)
