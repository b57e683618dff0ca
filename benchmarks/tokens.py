"""Long real documents as one file of tokens, built once and mapped into memory.

A source is

    installed     what is on this machine: each top-level package of Python's library and of all
                  site-packages, and each folder of headers, scripts and documentation of the
                  system, is one document, its text files joined in order of path, each under a
                  line that names it; a file that occurs twice counts once;
    a folder      each file or folder in it is one document, likewise;
    a .jsonl file each line's "text", lines joined to documents of some 400,000 characters;
    a .bin file   a shard of FineWeb as modded-nanogpt has it, already in GPT-2's tokens: a header
                  of 256 int32 and then uint16; cut into documents of 131,072 tokens. Name a
                  folder with GPT-2's tokenizer for what is still to be encoded.

The split is by document. Validation documents are the first, in the order of a hash of their
names, that have more than `span` tokens and at most one in fifty of all, and of each name one; the
others are trained on, whatever their length, one after the other, but for those that have the name
of a validation document in another place.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from tqdm import tqdm

from benchmarks.documents import documents
from benchmarks.rows import digest, write_json
from score_mods._checks import integer

_SHARD = 131_072  # tokens of a document cut from a shard
_MAGIC = 20240520  # first number of a shard, before its version and how many tokens it has
_BATCH = 256  # texts that are encoded at a time


class Tokenizer:
    """Text to token ids: UTF-8 bytes, or a tokenizer of Hugging Face.

    Attributes:
        name: what tells it apart.
        vocabulary: number of ids.
    """

    def __init__(self, name: str) -> None:
        """Load it.

        Args:
            name: "bytes", "smollm2", or a folder with `tokenizer.json`.

        Raises:
            ValueError: if there is none.
            ImportError: if it needs a package that is missing.
        """
        self.name, self._encoder = name, None
        if name == "bytes":
            self.vocabulary = 256
            return
        if name == "smollm2":
            from analysis.huggingface import load_tokenizer

            self._encoder = load_tokenizer(name).backend_tokenizer
        else:
            path = Path(name, "tokenizer.json")
            if not path.is_file():
                raise ValueError(
                    f"tokenizer must be bytes, smollm2 or a folder with tokenizer.json, got {name}"
                )
            from tokenizers import Tokenizer as Encoder

            try:
                self._encoder = Encoder.from_file(str(path))
            except Exception as error:  # the package raises nothing narrower
                raise ValueError(f"tokenizer: {path} is none: {error}") from None
            self.name = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        self.vocabulary = self._encoder.get_vocab_size()

    def __call__(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""
        if self._encoder is None:
            return [list(text.encode()) for text in texts]
        return [x.ids for x in self._encoder.encode_batch_fast(texts, add_special_tokens=False)]

    def encode(self, text: str) -> list[int]:
        """Token ids of one text."""
        return self([text])[0]


@dataclass(frozen=True)
class TokenFile:
    """Documents in tokens.

    Attributes:
        tokens: all of them `[N]`, uint16 or uint32.
        documents: name, first and last token (excluded) and UTF-8 bytes of each.
        held_out: indices of the validation documents.
        vocabulary: number of token ids.
        recipe: what it was built from, and the SHA-256 of the tokens, the same wherever they lie.
    """

    tokens: np.ndarray
    documents: list[tuple[str, int, int, int]]
    held_out: list[int]
    vocabulary: int
    recipe: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        """Recipe and sizes, for a row's JSON."""
        sizes = [stop - start for _, start, stop, _ in self.documents]
        return {
            **self.recipe,
            "vocabulary": self.vocabulary,
            "documents": len(sizes),
            "bytes": sum(size for *_, size in self.documents),
            "training_tokens": sum(stop - start - 1 for start, stop in self._runs()),
            "validation": {self.documents[i][0]: sizes[i] for i in self.held_out},
        }

    def batches(self, sequences: int, length: int, seed: int) -> Callable[[int], Tensor]:
        """Training batches by step, the same for every model.

        The training tokens are cut into sequences, which are gone through in a new random order
        in each epoch.

        Args:
            sequences: in a batch.
            length: of a sequence; it comes with one token more, the last target.
            seed: of the order.

        Returns:
            A function from a step, from 0, to token ids `[sequences, length + 1]`.

        Raises:
            ValueError: if there is not one batch.
        """
        starts = self._starts(length)
        if len(starts) < sequences:
            raise ValueError(
                f"data has {len(starts)} training sequences of {length} tokens, fewer than a "
                f"batch of {sequences}"
            )
        per_epoch = len(starts) // sequences

        def batch(step: int) -> Tensor:
            epoch, place = divmod(step, per_epoch)
            order = np.random.default_rng([seed, epoch]).permutation(len(starts))
            chosen = starts[order[place * sequences : (place + 1) * sequences]]
            rows = [self.tokens[at : at + length + 1].astype(np.int64) for at in chosen]
            return torch.from_numpy(np.stack(rows))

        return batch

    def epochs(self, sequences: int, length: int, steps: int) -> float:
        """How often `steps` batches go through the training tokens."""
        return steps * sequences / len(self._starts(length))

    def validation(self, length: int, span: int) -> Tensor:
        """The first `span` tokens of each validation document, cut into sequences.

        Args:
            length: of a sequence, a divisor of `span`.
            span: tokens of a document that are read.

        Returns:
            `[V span / length, length + 1]`, each with the token after its last.

        Raises:
            ValueError: if `length` does not divide `span`.
        """
        if span % length:
            raise ValueError(f"lengths must divide the longest, {span}, got {length}")
        starts = [
            self.documents[i][1] + at for i in self.held_out for at in range(0, span, length)
        ]
        rows = [self.tokens[at : at + length + 1].astype(np.int64) for at in starts]
        return torch.from_numpy(np.stack(rows))

    def _starts(self, length: int) -> np.ndarray:
        """Where each training sequence starts."""
        return np.concatenate(
            [np.arange(start, stop - length, length) for start, stop in self._runs()]
        )

    def _runs(self) -> list[tuple[int, int]]:
        """First and last token (excluded) of training documents that follow each other."""
        runs: list[tuple[int, int]] = []
        kept = {_package(self.documents[i][0]) for i in self.held_out}
        for name, start, stop, _ in self.documents:
            if _package(name) not in kept:
                joined = bool(runs) and runs[-1][1] == start
                runs.append((runs.pop()[0] if joined else start, stop))
        return runs


def _package(name: str) -> str:
    """A document's name without the place that it was found in: `pip` of `dist-packages/pip`."""
    return name.rpartition("/")[2]


def token_file(
    source: str,
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    span: int = 65_536,
    held_out: int = 16,
    most: int | None = None,
) -> TokenFile:
    """Build the token file of a source, or find it if it was built and no file has changed since.

    What is installed is read once, whatever is installed later.

    Args:
        source: see this module's docstring.
        tokenizer: what encodes it.
        folder: where token files are kept.
        span: tokens that a validation document has at least, besides one more.
        held_out: number of validation documents.
        most: tokens to stop at, or None to take all.

    Raises:
        ValueError: if there is no such source, or it has not enough long documents.
    """
    for name, value in (("span", span), ("held_out", held_out), ("most", most)):
        if value is not None:
            integer(name, value)
    path = Path(source)
    lines_or_shard = path.is_file() and path.suffix in (".jsonl", ".bin")
    if source != "installed" and not path.is_dir() and not lines_or_shard:
        raise ValueError(
            f"data must be installed, a folder, a .jsonl or a .bin file, got {source}"
        )
    recipe: dict[str, Any] = {"source": source, "tokenizer": tokenizer.name, "most": most}
    if source != "installed":
        recipe["source"] = path.resolve().name
    place = [] if source == "installed" else [str(path.resolve()), _changed(path)]
    kept = Path(folder, digest([recipe, place]))
    kept.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(kept.with_suffix(".lock")):  # rows that are made side by side build it once
        if not (kept / "index.json").is_file():
            partial = kept.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            _write(source, tokenizer, partial, most)
            partial.rename(kept)
    index = json.loads((kept / "index.json").read_text(encoding="utf-8"))
    recipe["sha256"] = index["sha256"]
    tokens = np.memmap(kept / "tokens.bin", dtype=index["dtype"], mode="r")
    documents = [(name, start, stop, size) for name, start, stop, size in index["documents"]]
    return TokenFile(
        tokens, documents, _held_out(documents, span, held_out), index["vocabulary"], recipe
    )


def _changed(path: Path) -> str:
    """What tells apart the states of a file, or of all in a folder: names, times and sizes."""
    entries = [(str(x), x.lstat()) for x in (path, *sorted(path.rglob("*")))]
    return digest([[name, found.st_mtime_ns, found.st_size] for name, found in entries])


def _held_out(documents: list[tuple[str, int, int, int]], span: int, count: int) -> list[int]:
    """Indices of the validation documents."""
    most = sum(stop - start for _, start, stop, _ in documents) // 50
    packages = {
        _package(name): i
        for i, (name, start, stop, _) in reversed([*enumerate(documents)])
        if span < stop - start <= max(most, span + 1)
    }
    fitting = list(packages.values())
    if len(fitting) < count:
        raise ValueError(
            f"data must have {count} documents of more than {span} tokens, each at most a "
            f"fiftieth of all {50 * most}, got {len(fitting)}"
        )
    fitting.sort(key=lambda i: hashlib.sha256(_package(documents[i][0]).encode()).digest())
    return sorted(fitting[:count])


def _write(source: str, tokenizer: Tokenizer, folder: Path, most: int | None) -> None:
    """Encode a source into `tokens.bin` and `index.json`."""
    dtype = "uint16" if tokenizer.vocabulary <= 2**16 else "uint32"
    documents: list[tuple[str, int, int, int]] = []
    total, content = 0, hashlib.sha256()
    with (folder / "tokens.bin").open("wb") as file, tqdm(unit="token", unit_scale=True) as bar:
        for name, pieces in _encoded(source, tokenizer):
            start, size = total, 0
            for ids, read in pieces:
                array = np.asarray(ids, dtype=dtype)
                file.write(array.tobytes())
                content.update(array.tobytes())
                total, size = total + len(array), size + read
                bar.update(len(array))
                if most is not None and total >= most:
                    break
            if total > start:
                documents.append((name, start, total, size))
            if most is not None and total >= most:
                break
    if not total:
        raise ValueError(f"data must have text, got {source}")
    index = {
        "dtype": dtype,
        "sha256": content.hexdigest(),
        "vocabulary": tokenizer.vocabulary,
        "documents": documents,
    }
    write_json(folder / "index.json", index)


def _encoded(source: str, tokenizer: Tokenizer) -> Iterator[tuple[str, Iterator[tuple[Any, int]]]]:
    """Each document's name, and its token ids and UTF-8 bytes, piece by piece."""
    if source.endswith(".bin") and Path(source).is_file():
        tokens = _shard(Path(source))
        if len(tokens) and tokens.max() >= tokenizer.vocabulary:
            raise ValueError(
                f"data has the token {tokens.max()}, which a tokenizer of {tokenizer.vocabulary} "
                "has not"
            )
        for at in range(0, len(tokens), _SHARD):
            yield f"{Path(source).name}[{at}]", iter([(tokens[at : at + _SHARD], 0)])
        return
    for name, texts in documents(source):
        yield name, _pieces(texts, tokenizer)


def _shard(path: Path) -> np.ndarray:
    """The tokens of a shard."""
    header = np.fromfile(path, dtype=np.int32, count=256)
    if len(header) < 256 or header[:2].tolist() != [_MAGIC, 1]:
        raise ValueError(f"data: {path} does not begin as a shard of modded-nanogpt")
    size = path.stat().st_size
    if size != 1024 + 2 * int(header[2]):
        raise ValueError(f"data: {path} must have {header[2]} tokens, got {size - 1024} bytes")
    return np.fromfile(path, dtype=np.uint16, offset=1024)


def _pieces(texts: Iterator[str], tokenizer: Tokenizer) -> Iterator[tuple[list[int], int]]:
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == _BATCH:
            yield from _encode(batch, tokenizer)
            batch = []
    yield from _encode(batch, tokenizer)


def _encode(batch: list[str], tokenizer: Tokenizer) -> Iterator[tuple[list[int], int]]:
    for text, ids in zip(batch, tokenizer(batch), strict=True):
        yield ids, len(text.encode())
