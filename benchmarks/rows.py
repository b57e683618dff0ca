"""Rows of the benchmarks that take minutes a row: a JSON file each, whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHECKPOINT = "checkpoint.pt"  # of a row that is being made, in its folder


def digest(value: Any) -> str:
    """Twelve hexadecimal digits that tell JSON values apart."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def row_of(folder: Path, settings: Mapping[str, Any]) -> Path | None:
    """The row FOLDER.json if it was made before, else None.

    Raises:
        ValueError: if it was made with other settings, or is damaged.
    """
    path = folder.with_name(f"{folder.name}.json")
    if not path.is_file():
        return None
    check_same(path, read_row(path)["settings"], settings)
    return path


def rows_of(folder: Path, *parts: str) -> dict[str, dict[str, Any]]:
    """The rows in a folder, by the names of their files.

    Args:
        folder: where they are.
        parts: what a row has besides its settings.

    Raises:
        ValueError: if it has none, or a file that is no such row.
    """
    rows = {path.stem: read_row(path, *parts) for path in sorted(folder.glob("*.json"))}
    if not rows:
        raise ValueError(f"folder must hold rows, METHOD-SEED.json, got {folder}")
    return rows


def read_row(path: Path, *parts: str) -> dict[str, Any]:
    """The row in a file, with its settings and the parts that are named.

    Raises:
        ValueError: if it is none.
    """
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no row: {error}; remove it") from None
    for part in ("settings", *parts):
        if not isinstance(row, dict) or part not in row:
            raise ValueError(f"{path} is no row of this benchmark: it has no {part}; remove it")
    return row


def finish(folder: Path, row: Mapping[str, Any]) -> Path:
    """Write a row to FOLDER.json, and remove the checkpoints in the folder; returns the file."""
    path = folder.with_name(f"{folder.name}.json")
    write_json(path, row)
    for checkpoint in folder.rglob(CHECKPOINT):
        checkpoint.unlink()
    return path


def check_same(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise a ValueError unless what a file was made with is what is wanted."""
    wanted = json.loads(json.dumps(dict(wanted)))
    differing = [name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name)]
    if differing:
        raise ValueError(
            f"{path} is of another run, which differs in {', '.join(differing)}; "
            "remove it, or name another folder"
        )
