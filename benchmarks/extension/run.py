"""What a run of the benchmark has loaded: the model, the texts, and what all its rows share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from analysis.calibration import plain_rope
from analysis.huggingface import load
from benchmarks.extension.rows import Calibrations
from benchmarks.extension.settings import Setting, Trained, parse
from benchmarks.extension.texts import Text, read
from benchmarks.machine import device_of
from benchmarks.rows import digest
from score_mods._captured import Mod
from score_mods._checks import integer

_CALIBRATION_TEXTS = 2  # of the trained length
_LEAST = 256  # tokens of a context


@dataclass(frozen=True)
class Run:
    """A model that reads texts in several settings.

    Attributes:
        model: on its device.
        encode: from a string to token ids, without special tokens.
        trained: what the model was trained with.
        texts: what is read.
        settings: how.
        lengths: tokens of the contexts, rising.
        impl: of attention.
        out: folder of the results.
        shared: what all rows of the run have in common.
        calibrations: of the model.
    """

    model: Any
    encode: Callable[[str], list[int]]
    trained: Trained
    texts: list[Text]
    settings: list[Setting]
    lengths: list[int]
    impl: str
    out: Path
    shared: dict[str, Any]
    calibrations: Calibrations

    def identity(self, setting: Setting, length: int, text: Text) -> dict[str, Any]:
        """All that a row depends on."""
        calibration = {"calibration": digest(self.calibrations.identity)}
        return {
            **self.shared,
            **({} if setting.score != "scale_invariant" else calibration),
            "label": setting.label,
            "setting": asdict(setting),
            "length": length,
            "text": text.kind,
            "digest": text.digest,
        }

    def apply(self, setting: Setting, length: int) -> Callable[[int], Mod | None]:
        """Make the model attend so: see `Setting.apply`."""
        return setting.apply(self.model, length, self.trained, self.calibrations, impl=self.impl)


def prepare(options: argparse.Namespace) -> Run:
    """Check a command line, then load its model and texts.

    Raises:
        ImportError: if a package is missing.
        OSError: if a file cannot be read or written.
        ValueError: if an option is out of its range, or the model has no plain RoPE.
    """
    settings = parse(" ".join(options.mods))
    lengths = _lengths(options.lengths)
    for name, least in (("starts", 1), ("span", lengths[-1]), ("last", 1), ("needles", 0)):
        integer(name, getattr(options, name), least)
    if options.trained is not None:
        integer("trained", options.trained, _LEAST)
    cuda = device_of(options.device).type == "cuda"
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)

    dtype = options.dtype or ("bfloat16" if cuda else "float32")
    model, tokenizer = load(options.model, options.gguf, dtype=getattr(torch, dtype))
    refuse_caps(model)
    model.to(options.device)
    length = options.trained or model.config.max_position_embeddings
    trained = Trained(*plain_rope(model), length, model.config.num_attention_heads)

    measured = any(setting.score == "scale_invariant" for setting in settings)
    rest = _CALIBRATION_TEXTS * length if measured else 0
    texts = [
        read(tokenizer, source, options.starts, options.span, 0 if place else rest)
        for place, source in enumerate(options.text)
    ]
    kinds = [text.kind for text in texts]
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"text: expected different names, got {', '.join(kinds)}")
    of_model = {
        "model": options.model,
        "gguf": options.gguf,
        "dtype": dtype,
        "trained": length,
    }
    of_rows = {name: getattr(options, name) for name in ("starts", "span", "last", "needles")}
    calibration_texts = texts[0].rest.view(-1, 1, length) if measured else ()
    return Run(
        model=model,
        encode=partial(_encode, tokenizer),
        trained=trained,
        texts=texts,
        settings=settings,
        lengths=lengths,
        impl=options.impl or ("flex" if cuda else "dense"),
        out=out,
        shared=of_model | of_rows,
        calibrations=Calibrations(
            model,
            [*calibration_texts],
            out / "calibrations",
            of_model | {"tokens": texts[0].rest.tolist()},
        ),
    )


def refuse_caps(model: Any) -> None:
    """Raise a ValueError for a model that caps its logits, which the losses here leave out."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(model.config, name, None) is not None:
            raise ValueError(f"model caps its logits ({name}), which is not done")


def _lengths(written: str) -> list[int]:
    try:
        lengths = sorted({int(item) for item in re.split(r"[,\s]+", written.strip(", "))})
    except ValueError:
        raise ValueError(f"lengths: expected numbers like 4096,8192, got {written!r}") from None
    if lengths[0] < _LEAST:
        raise ValueError(f"lengths: expected at least {_LEAST} tokens, got {lengths[0]}")
    return lengths


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
