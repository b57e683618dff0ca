"""Longer contexts without training: scale-invariant attention that is told a model's own logits.

`scale_invariant` is exact where the base logits have the mean mu and the deviation sigma that it
is told. A trained model has its own in every head: `calibrate` measures them, `extend` applies
them together with positions that stay within the trained length and with the first keys, which
serve as attention sinks, left alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from analysis.huggingface import LayerQK, capture, check_model
from analysis.invariance import judge
from analysis.measure import measure
from score_mods import (
    compose,
    exempt_keys,
    kerple_log,
    rope,
    scale_invariant,
    self_extend,
    self_extend_group,
)
from score_mods._captured import Mod, at_head, described, parameter
from score_mods._checks import boolean, integer, kind_of, number
from score_mods.huggingface import patch_rotary, register
from score_mods.late_rotary import late_form
from score_mods.rotary import Rotary
from score_mods.two_branch import TwoBranch

_FILE = "scale_invariance.json"


@dataclass(frozen=True)
class Calibration:
    """The base logits of a model by layer and head, and verdicts on its attention.

    Attributes:
        tau: Scale of the mechanism in tokens.
        mu: Mean of the base logits `[L][H]`.
        sigma: Their standard deviation within a row `[L][H]`.
        cells: The C+1 edges of cells of distances, up to half the texts' length.
        mean: Mean by distance `[L][H][C]`.
        deviation: Standard deviation by distance `[L][H][C]`.
        before: Verdict on total attention under plain softmax, "holds", "rises", "falls" or
            "cannot be told" `[L][H]`; empty if none was asked for.
        after: The same under `scale_invariant` with tau, mu and sigma.
    """

    tau: float
    mu: list[list[float]]
    sigma: list[list[float]]
    cells: list[int]
    mean: list[list[list[float]]]
    deviation: list[list[list[float]]]
    before: list[list[str]]
    after: list[list[str]]

    def score_mod(
        self,
        layer: int,
        *,
        tau: float | None = None,
        sinks: int = 1,
        sigma: str | float = "head",
        mu: bool = True,
        part: str = "both",
    ) -> Mod:
        """`scale_invariant` for a layer, which leaves the first keys alone.

        Args:
            layer: Index of the layer.
            tau: Scale in tokens; that of the calibration if None.
            sinks: How many keys are left alone.
            sigma: Deviation that is assumed: "head" for each head's own, "model" for the root
                mean square of all, or a number.
            mu: Whether each head's mean is taken into account; 0 is assumed if not.
            part: "both", or its "multiplier" or "bias" alone: a_t (s - mu) + mu, or
                s - 2 ln(t/tau + 1), which depends on neither sigma nor mu.

        Raises:
            TypeError: A number has the wrong type.
            ValueError: `sigma` or `part` is none of these, or a number is out of its range.
        """
        if integer("layer", layer, at_least=0) >= len(self.mu):
            raise ValueError(f"layer must be below {len(self.mu)}, got {layer}")
        tau = self.tau if tau is None else tau
        _check_law(tau, sinks, sigma, mu, part)
        if part == "bias":
            return exempt_keys(kerple_log(2.0, 1 / tau), sinks)
        mean = torch.tensor(self.mu[layer]) if mu else 0.0
        deviation: float | Tensor
        if isinstance(sigma, str):
            every = torch.tensor(self.sigma)
            deviation = every[layer] if sigma == "head" else every.square().mean().sqrt()
        else:
            deviation = sigma
        mod = scale_invariant(tau, mu=mean, sigma=deviation)
        if part == "multiplier":
            mod = compose(mod, _without_bias(tau))
        return exempt_keys(mod, sinks)

    def save(self, folder: str | Path) -> None:
        """Write `scale_invariance.json` into a folder, such as that of the saved model."""
        Path(folder, _FILE).write_text(json.dumps(asdict(self), allow_nan=False))

    @classmethod
    def load(cls, folder: str | Path) -> Calibration:
        """Read what `save` wrote.

        Raises:
            ValueError: The folder holds no calibration, or a broken one.
        """
        path = Path(folder, _FILE)
        if not path.is_file():
            raise ValueError(f"folder must hold {_FILE}, got {folder}")
        try:
            found = cls(**json.loads(path.read_text()))
            if torch.tensor([found.mu, found.sigma]).ndim != 3:
                raise ValueError("mu and sigma are not by layer and head")
            return found
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} must be as save wrote it, got another: {error}") from error


def _check_law(tau: float, sinks: int, sigma: str | float, mu: bool, part: str) -> None:
    number("tau", tau, positive=True)
    integer("sinks", sinks, at_least=0)
    if sigma not in ("head", "model"):
        if isinstance(sigma, str):
            raise ValueError(f'sigma must be "head", "model" or a number, got {sigma!r}')
        number("sigma", sigma, positive=True)
    boolean("mu", mu)
    if part not in ("both", "multiplier", "bias"):
        raise ValueError(f'part must be "both", "multiplier" or "bias", got {part!r}')


def _without_bias(tau: float) -> Mod:
    """The score_mod that takes the bias -2 ln(t/tau + 1) back."""
    scale = parameter("tau", tau, positive=True)

    def without_bias_mod(
        score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        dtype = torch.promote_types(score.dtype, torch.float32)
        t = (q_idx - kv_idx).abs().to(dtype)
        return score + 2 * torch.log1p(t / at_head(scale, h, dtype))

    return described(without_bias_mod, "without_bias", scale)


def calibrate(
    model: Any,
    texts: Sequence[Tensor],
    *,
    tau: float = 10.0,
    rows: int = 64,
    verdicts: bool = True,
) -> Calibration:
    """Measure the base logits of every head on some texts, and judge attention before and after.

    Statistics are over `rows` queries in the second half of each text, without distance 0 and
    without key 0. The verdicts are on the first text, on ranges of scale 10.

    Args:
        model: A Hugging Face causal language model, with the rotary embedding it will have.
        texts: Token ids `[1, T]` of each text, all of one length, 256 or more: see `tokenise`.
        tau: Scale of the mechanism that is judged, in tokens.
        rows: Queries per text, 16 or more.
        verdicts: Whether attention is judged, which takes most of the time.

    Returns:
        A `Calibration`; mu is pooled over texts by the mean, sigma by the root mean square.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of its range, the model's attention is not causal or not
            in every layer, or a layer caps its logits, so that a score_mod gets others.
    """
    length = _check_texts(texts)
    number("tau", tau, positive=True)
    integer("rows", rows, at_least=16)
    boolean("verdicts", verdicts)
    late = torch.linspace(length // 2, length - 1, rows).long().unique()
    found: list[dict[int, dict[str, Tensor]]] = []

    def look(layer: LayerQK) -> None:
        if layer.softcap is not None:
            raise ValueError(f"model caps the logits of layer {layer.layer}, got {layer.softcap}")
        base = measure(layer.q, layer.k, {}, q_positions=late, scale=layer.scale).base
        mean, deviation = base.by_distance()
        whole = base.cells[1:] <= length // 2  # which every row reaches
        found[-1][layer.layer] = {
            "mu": base.mu,
            "sigma": base.sigma,
            "mean": mean[:, whole],
            "deviation": deviation[:, whole],
            "cells": base.cells[: int(whole.sum()) + 1],
        }

    for text in texts:
        found.append({})
        capture(model, text, late, look)
    layers = sorted(found[0])
    if layers != list(range(len(layers))):
        raise ValueError(f"model must have attention in every layer, got it in {layers}")

    def pooled(name: str, power: int) -> list[Any]:
        return [
            (sum(f[i][name].double() ** power for f in found) / len(found)) ** (1 / power)
            for i in layers
        ]

    mu, sigma = pooled("mu", 1), pooled("sigma", 2)
    judgements: dict[str, list[list[str]]] = {"before": [], "after": []}

    def verdict(layer: LayerQK) -> None:
        after = scale_invariant(tau, mu=mu[layer.layer], sigma=sigma[layer.layer])
        mods = {"before": None, "after": after}
        measured = measure(layer.q, layer.k, mods, q_positions=late, scale=layer.scale)
        for name, judged in judgements.items():
            heads = range(layer.q.shape[1])
            judged.append([judge(measured, name, head=h).total.verdict for h in heads])

    if verdicts:
        capture(model, texts[0], late, verdict)
    return Calibration(
        tau,
        [x.tolist() for x in mu],
        [x.tolist() for x in sigma],
        found[0][layers[0]]["cells"].tolist(),
        [x.tolist() for x in pooled("mean", 1)],
        [x.tolist() for x in pooled("deviation", 2)],
        **judgements,
    )


def _check_texts(texts: Sequence[Tensor]) -> int:
    """The length of the texts, checked."""
    if not isinstance(texts, (list, tuple)):
        raise TypeError(f"texts must be a list of token ids [1, T], got {type(texts).__name__}")
    for text in texts:
        if not isinstance(text, Tensor) or text.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"texts must be int64 or int32 tensors, got {kind_of(text)}")
    lengths = sorted({tuple(text.shape) for text in texts})
    if len(lengths) != 1 or len(lengths[0]) != 2 or lengths[0][0] != 1 or lengths[0][1] < 256:
        raise ValueError(f"texts must have one shape [1, T] with T >= 256, got {lengths}")
    return lengths[0][1]


def extend(
    model: Any,
    factor: float,
    texts: Sequence[Tensor] | None = None,
    *,
    tau: float = 10_000.0,
    sinks: int = 1,
    sigma: str | float = "head",
    mu: bool = True,
    part: str = "both",
    rotary: Rotary | TwoBranch | None = None,
    train_length: int | None = None,
    calibration: Calibration | None = None,
    name: str = "scale_invariant",
    **options: Any,
) -> Calibration:
    """Let a trained model read `factor` times its length: grouped positions, calibrated attention.

    Keys farther away than half the trained length are rotated by the positions of groups of tokens
    (`self_extend`), so that no distance exceeds that length; the model's logits are measured, and
    its attention becomes `scale_invariant` with each head's mu and sigma and with the first keys
    left alone. In place, without training.

    The defaults were chosen on source code: no loss at 4,096 tokens, and little at 65,536, for
    SmolLM2-135M, which was trained on 8,192 (benchmarks/RESULTS.md). Two branches cost a few times
    the time of attention, and keys are cached unrotated; `rotary=ntk_rope(...)` costs neither, and
    loses more.

    Args:
        model: A Hugging Face causal language model with plain RoPE.
        factor: Wanted length over trained length, 1 or more.
        texts: As for `calibrate`, of the trained length if possible; not needed with a
            `calibration`.
        tau: Scale in tokens, at which the change begins.
        sinks, sigma, mu, part: As in `Calibration.score_mod`.
        rotary: Other positions: a scheme such as `ntk_rope` or `yarn_rope`, or two such as
            `rerope`, of which the one for near keys is measured.
        train_length: Tokens that the model was trained on; its config's `max_position_embeddings`
            if None.
        calibration: From an earlier call or from a file, measured with the same positions.
        name: Of the attention implementation, as in `register`; one for each extended model.
        **options: As for `register`.

    Returns:
        The `Calibration`; save it with the model.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Neither or both of `texts` and `calibration` are given, both `rotary` and
            `train_length` are, the calibration is of a model with other layers or heads, `rotary`
            has frequencies that change and there are `texts`, or as `calibrate`,
            `Calibration.score_mod`, `patch_rotary` and `register`. A model of which `calibrate`
            says so has been given its new positions by then.

    Reference: arXiv 2505.17083; the grouped positions are arXiv 2401.01325.
    """
    if (texts is None) == (calibration is None):
        raise ValueError("one of texts and calibration must be given")
    if rotary is not None and train_length is not None:
        raise ValueError("one of rotary and train_length must be given at most")
    check_model(model)
    _check_law(tau, sinks, sigma, mu, part)
    if texts is not None:
        _check_texts(texts)
    if number("factor", factor, positive=True) < 1:
        raise ValueError(f"factor must be at least 1, got {factor}")
    if rotary is None:
        rotary = _grouped(model, factor, train_length)
    elif texts is not None and not isinstance(rotary, TwoBranch) and late_form(rotary)[0]:
        raise ValueError(
            "rotary must be a TwoBranch or a Rotary of one set of frequencies to be measured on "
            "texts; give a calibration instead"
        )
    if calibration is not None:
        if not isinstance(calibration, Calibration):
            raise TypeError(f"calibration must be a Calibration, got {type(calibration).__name__}")
        sizes = model.config.num_hidden_layers, model.config.num_attention_heads
        measured = len(calibration.mu), len(calibration.mu[0])
        if measured != sizes:
            raise ValueError(f"calibration must have (layers, heads) {sizes}, got {measured}")

    def score_mod(layer: int) -> Mod:
        return found.score_mod(layer, tau=tau, sinks=sinks, sigma=sigma, mu=mu, part=part)

    register(name, score_mod, **options)
    patch_rotary(model, rotary)
    found: Any = calibration
    if texts is not None:
        patch_rotary(model, rotary.rotary if isinstance(rotary, TwoBranch) else rotary)
        found = calibrate(model, texts, tau=tau)
        patch_rotary(model, rotary)
    model.set_attn_implementation(name)
    return found


def _grouped(model: Any, factor: float, train_length: int | None) -> TwoBranch:
    """Self-Extend with a window of half the trained length."""
    rotary = rope(*plain_rope(model))
    if train_length is None:
        train_length = model.config.max_position_embeddings
    window = integer("train_length", train_length, at_least=2) // 2
    group = self_extend_group(window, train_length, math.ceil(factor * train_length))
    return self_extend(rotary, window, group)


def plain_rope(model: Any) -> tuple[int, float]:
    """Channels of a head that a model rotates, and the base of its rotary embedding.

    Args:
        model: A Hugging Face causal language model, patched or not.

    Raises:
        TypeError: `model` is no model.
        ValueError: The model was not trained with plain RoPE.
    """
    check_model(model)
    parameters = getattr(model.config, "rope_parameters", None)
    if not isinstance(parameters, Mapping) or parameters.get("rope_type") != "default":
        raise ValueError(f"model must have plain RoPE, got rope_parameters={parameters}")
    heads = model.config.num_attention_heads
    head_dim = getattr(model.config, "head_dim", None) or model.config.hidden_size // heads
    channels = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    return channels, float(parameters["rope_theta"])
