"""What is compared: a mechanism for the scores and a scheme of positions, each with its options.

A setting is written NAME or NAME:OPTION=VALUE,..., and settings are separated by commas:

    rope,ntk*2,logn_ntk,scale_invariant:tau=1000/3000,sigma=head,rotary=ntk*1.5,part=bias

An option with several values, separated by slashes, stands for as many settings. NAME is a
mechanism (`logn`, `ssmax`, `infoscale`, `alibi`, `scale_invariant`; `logn_ntk` is
logn:rotary=ntk) or, where scores are left as they are, a scheme of positions (`rope` is the model
as it comes).
`recent` is the model as it comes, reading the end of the context alone, as many tokens as it was
trained on: what every extension has to beat. Options:

    rotary=SCHEME     positions; by default self_extend*0.5 for scale_invariant, none (p_rope*0)
                      for alibi, rope for the others
    factor=NUMBER     wanted length over trained length; by default that of each context
    tau, sigma, mu=on/off, part, sinks
                      of scale_invariant, as in `analysis.calibration.extend`, with its defaults

A scheme is SCHEME or SCHEME*NUMBER:

    ntk*1 yarn*1          stretched by NUMBER times the factor, where the factor is above 1
    dynamic_ntk*2         NUMBER is its own factor, as in transformers
    p_rope*0.5            NUMBER is the share of the frequencies that is kept
    self_extend*0.125 rerope*0.125
                          NUMBER is the window over the trained length
    lm_infinite*1 streaming_llm*1
                          likewise, with 10 and, within the window, 4 first keys

SSMax without training has s = 1/ln(L0), which changes nothing at the trained length L0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, NamedTuple

import score_mods as sm
from analysis.calibration import Calibration, extend
from score_mods._captured import Mod
from score_mods.huggingface import patch_rotary, register
from score_mods.rotary import Rotary
from score_mods.two_branch import TwoBranch

ATTENTION = "extension_benchmark"  # the name under which a setting's attention is registered
_STREAMING_SINKS = 4


class Trained(NamedTuple):
    """What a model was trained with: channels of a head, base of RoPE, tokens, query heads."""

    head_dim: int
    base: float
    length: int
    heads: int


@dataclass(frozen=True)
class Setting:
    """One way to have a trained model read more than it was trained on.

    Attributes:
        score: Mechanism for the scores, a key of `SCORES`.
        rotary: Scheme of positions, as it is written.
        factor: Wanted length over trained length; None for that of the context at hand.
        tau, sigma, mu, part, sinks: As in `extend`.
        recent: Whether the model reads no more of the context's end than it was trained on.
    """

    score: str = "none"
    rotary: str = "rope"
    factor: float | None = None
    tau: float = 10_000.0
    sigma: str | float = "head"
    mu: bool = True
    part: str = "both"
    sinks: int = 1
    recent: bool = False

    @property
    def label(self) -> str:
        """How the setting is written, with those options that are not the default."""
        name = self.rotary if self.score == "none" else self.score
        name = "recent" if self.recent else name
        plain = _named(name)
        options = [
            f"{field.name}={_spelled(value)}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != getattr(plain, field.name)
        ]
        return f"{name}:{','.join(options)}" if options else name

    def ratio(self, length: int, trained: Trained) -> float:
        """Wanted length over trained length, at least 1, for a context of `length` tokens."""
        return max(1.0, length / trained.length) if self.factor is None else self.factor

    def reads(self, length: int, trained: Trained) -> int:
        """How many tokens at the end of a context of `length` the model reads."""
        return min(length, trained.length) if self.recent else length

    def positions(self, length: int, trained: Trained) -> Rotary | TwoBranch:
        """The scheme of positions for a context of `length` tokens."""
        name, number = _scheme(self.rotary)
        return POSITIONS[name][1](trained, self.ratio(length, trained), number)

    def apply(
        self,
        model: Any,
        length: int,
        trained: Trained,
        calibration: Callable[[Rotary], Calibration],
        *,
        impl: str,
    ) -> Callable[[int], Mod | None]:
        """Make a model attend so, in place, until the next setting is applied.

        Args:
            model: A Hugging Face causal language model.
            length: Tokens of the context.
            trained: What the model was trained with.
            calibration: Measures the model under positions, for scale-invariant attention.
            impl: As in `score_mods.attention`.

        Returns:
            The score_mod of a layer, by its index.
        """
        rotary = self.positions(length, trained)
        if self.score != "scale_invariant":
            mod = SCORES[self.score](trained)
            patch_rotary(model, rotary)
            register(ATTENTION, mod, impl=impl)
            model.set_attn_implementation(ATTENTION)
            return lambda layer: mod
        found = calibration(rotary.rotary if isinstance(rotary, TwoBranch) else rotary)
        law = {name: getattr(self, name) for name in ("tau", "sigma", "mu", "part", "sinks")}
        extend(
            model,
            self.ratio(length, trained),
            rotary=rotary,
            calibration=found,
            name=ATTENTION,
            impl=impl,
            **law,
        )
        return lambda layer: found.score_mod(layer, **law)


SCORES: dict[str, Callable[[Trained], Mod | None]] = {
    "none": lambda trained: None,
    "logn": lambda trained: sm.logn(trained.length),
    "ssmax": lambda trained: sm.ssmax(1 / math.log(trained.length)),
    "infoscale": lambda trained: sm.infoscale(trained.length, trained.head_dim),
    "alibi": lambda trained: sm.alibi(trained.heads),
    "scale_invariant": lambda trained: None,  # made of a calibration, by layer
}


def _rope(trained: Trained) -> Rotary:
    return sm.rope(trained.head_dim, trained.base)


def _stretch(ratio: float, number: float) -> float:
    return max(1.0, ratio * number) if ratio > 1 else 1.0


def _window(trained: Trained, number: float) -> int:
    if number > 1:
        raise ValueError(f"the window must be within the trained length, got {number} of it")
    return int(number * trained.length)


def _self_extend(trained: Trained, ratio: float, number: float) -> TwoBranch:
    window = _window(trained, number)
    group = sm.self_extend_group(window, trained.length, math.ceil(ratio * trained.length))
    return sm.self_extend(_rope(trained), window, group)


# By name: the number where none is written (None: it takes none), and the scheme for what a model
# was trained with, the ratio of lengths and the number.
POSITIONS: dict[str, tuple[float | None, Callable[..., Rotary | TwoBranch]]] = {
    "rope": (None, lambda t, ratio, n: _rope(t)),
    "ntk": (1.0, lambda t, ratio, n: sm.ntk_rope(t.head_dim, _stretch(ratio, n), t.base)),
    "dynamic_ntk": (
        2.0,
        lambda t, ratio, n: sm.dynamic_ntk_rope(
            t.head_dim, ratio * t.length, t.length, factor=n, base=t.base
        ),
    ),
    "yarn": (
        1.0,
        lambda t, ratio, n: sm.yarn_rope(t.head_dim, _stretch(ratio, n), t.length, base=t.base),
    ),
    "p_rope": (0.5, lambda t, ratio, n: sm.p_rope(t.head_dim, n, t.base)),
    "self_extend": (0.125, _self_extend),
    "rerope": (0.125, lambda t, ratio, n: sm.rerope(_rope(t), _window(t, n))),
    "lm_infinite": (1.0, lambda t, ratio, n: sm.lm_infinite(_rope(t), _window(t, n))),
    "streaming_llm": (
        1.0,
        lambda t, ratio, n: sm.streaming_llm(
            _rope(t), _window(t, n) - _STREAMING_SINKS, _STREAMING_SINKS
        ),
    ),
}
NAMES = ("recent", *POSITIONS, *(name for name in SCORES if name != "none"), "logn_ntk")


def parse(text: str) -> list[Setting]:
    """The settings that a string names, each once, in order.

    Raises:
        ValueError: A name, an option or a value is unknown, or a setting has no such option.
    """
    written: list[str] = []
    for item in re.split(r"[,\s]+", text.strip(", \n")):
        if "=" in item and ":" not in item:
            if not written:
                raise ValueError(f"mods: expected a name before {item!r}")
            written[-1] += ("," if ":" in written[-1] else ":") + item
        else:
            written.append(item)
    return list(dict.fromkeys(setting for item in written for setting in _settings(item)))


def _settings(written: str) -> list[Setting]:
    name, _, written_options = written.partition(":")
    plain = _named(name)
    axes: dict[str, list[Any]] = {}
    for option in filter(None, written_options.split(",")):
        key, _, values = option.partition("=")
        known: tuple[str, ...] = () if plain.recent else ("rotary", "factor")
        known = tuple(_OPTIONS) if plain.score == "scale_invariant" else known
        if key not in known or key in axes:
            wrong = "twice" if key in axes else f"expected {', '.join(known) or 'none'}"
            raise ValueError(f"mods: option {key!r} of {name}: {wrong}")
        axes[key] = [_value(name, key, value) for value in values.split("/")]
    chosen = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
    return [replace(plain, **options) for options in chosen]


def _named(name: str) -> Setting:
    """The setting that a name without options stands for."""
    if name == "recent":
        return Setting(recent=True)
    if name == "logn_ntk":
        return Setting("logn", "ntk")
    if name in SCORES and name != "none":
        own = {"scale_invariant": "self_extend*0.5", "alibi": "p_rope*0"}
        return Setting(name, own.get(name, "rope"))
    if name.partition("*")[0] not in POSITIONS:
        raise ValueError(f"mods: expected some of {', '.join(NAMES)}, got {name!r}")
    return Setting(rotary=_value(name, "rotary", name))


def _value(name: str, key: str, value: str) -> Any:
    expected, kind = _OPTIONS[key]
    try:
        return kind(value)
    except (KeyError, ValueError) as error:
        what = "" if isinstance(error, KeyError) else f" ({error})"
        raise ValueError(
            f"mods: {key} of {name} must be {expected}, got {value!r}{what}"
        ) from None


def _scheme(written: str) -> tuple[str, float | None]:
    """The name of a scheme of positions and its number."""
    name, star, number = written.partition("*")
    default = POSITIONS[name][0]
    if star and default is None:
        raise ValueError("it takes no number")
    return name, float(number) if star else default


def _rotary(written: str) -> str:
    name, number = _scheme(written)
    POSITIONS[name][1](Trained(64, 10000.0, 8192, 1), 8.0, number)  # raises if it is out of range
    default = POSITIONS[name][0]
    return name if number == default else f"{name}*{number:g}"


def _factor(value: str) -> float | None:
    number = None if value == "length" else float(value)
    if number is not None and not 1 <= number < math.inf:
        raise ValueError("it is below 1 or not finite")
    return number


def _positive(value: str) -> float:
    if not 0 < (number := float(value)) < math.inf:
        raise ValueError("it is not positive and finite")
    return number


def _count(value: str) -> int:
    if (number := int(value)) < 0:
        raise ValueError("it is negative")
    return number


# By name: what is expected, and what reads it.
_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "rotary": (f"one of {', '.join(POSITIONS)}, or with *NUMBER", _rotary),
    "factor": ("length or a number", _factor),
    "tau": ("a number of tokens", _positive),
    "sigma": (
        "head, model or a number",
        lambda value: value if value in ("head", "model") else _positive(value),
    ),
    "mu": ("on or off", lambda value: {"on": True, "off": False}[value]),
    "part": (
        "both, multiplier or bias",
        lambda value: {part: part for part in ("both", "multiplier", "bias")}[value],
    ),
    "sinks": ("a whole number", _count),
}


def _spelled(value: Any) -> str:
    """A value as `parse` reads it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "length"
    return f"{value:g}" if isinstance(value, float) else str(value)
