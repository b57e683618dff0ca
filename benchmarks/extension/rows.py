"""Rows of the benchmark, kept as JSON files, and the calibrations that they need."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from analysis.calibration import Calibration, calibrate
from benchmarks.rows import digest, read_row, write_json
from score_mods.huggingface import patch_rotary
from score_mods.rotary import Rotary

Row = dict[str, Any]


class Rows:
    """A folder of rows, one JSON file each, found by the settings that they were measured with.

    A file holds `settings`, what was measured, and `machine`. It appears whole or not at all.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def find(self, settings: Mapping[str, Any]) -> Row | None:
        """The row with exactly these settings, if there is one."""
        path = self._path(settings)
        return read_row(path) if path.is_file() else None

    def save(self, settings: Mapping[str, Any], row: Row) -> Row:
        """Write a row, and return it with its settings."""
        row = {"settings": dict(settings), **row}
        write_json(self._path(settings), row)
        return row

    def all(self) -> list[Row]:
        """All rows, in the order of their files' names."""
        return [read_row(path) for path in sorted(self.folder.glob("*.json"))]

    def _path(self, settings: Mapping[str, Any]) -> Path:
        named = f"{settings['label']}-{settings['text']}-{settings['length']}"
        name = re.sub(r"[^\w.=,-]+", "_", named)[:120]
        return self.folder / f"{name}-{digest(settings)}.json"


class Calibrations:
    """A model's calibrations by its positions, each measured once and kept in a folder.

    Args:
        model: a Hugging Face causal language model.
        texts: token ids `[1, T]` that no row scores.
        folder: where they are kept.
        identity: tells model and texts apart.
    """

    def __init__(
        self, model: Any, texts: list[Tensor], folder: str | Path, identity: Mapping[str, Any]
    ) -> None:
        self.model, self.texts, self.identity = model, texts, identity
        self.folder = Path(folder)

    def __call__(self, rotary: Rotary) -> Calibration:
        """The calibration under these positions; the model is left with them if it is new."""
        scheme = [rotary.frequencies.tolist(), rotary.attention_factor]
        folder = self.folder / digest([dict(self.identity), scheme])
        if not folder.is_dir():
            patch_rotary(self.model, rotary)
            found = calibrate(self.model, self.texts, verdicts=False)
            partial = folder.with_suffix(f".{os.getpid()}")
            partial.mkdir(parents=True)
            found.save(partial)
            try:
                partial.rename(folder)
            except OSError:  # another process measured the same meanwhile
                shutil.rmtree(partial)
        return Calibration.load(folder)
