"""Needles in a haystack: facts hidden in a long text, and a question at its end.

As in arXiv 2505.17083, section 5 and Table 2: three sentences "The special magic <city> number is
<7 digits>." are hidden at random depths, and an answer counts if city and number are both right.
The paper does not print its question. Here it names one of the cities, and the text ends in "The
special magic": the model has to choose its city among those that followed the same words before,
and then to recall the number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from score_mods._checks import integer

_NAMES = (
    "Amsterdam Athens Baghdad Bangkok Berlin Boston Brussels Cairo Chicago Dallas Delhi Dublin "
    "Geneva Hamburg Helsinki Houston Istanbul Jakarta Jerusalem Lagos Lisbon London Madrid Miami "
    "Milan Montreal Moscow Munich Nairobi Oslo Paris Prague Rome Seattle Seoul Singapore Sofia "
    "Sydney Tokyo Toronto Vienna Warsaw"
)
_CITIES = _NAMES.split()
_OPENING = " The special magic"
_REST = " {city} number is {number}"
_QUESTION = "\nQuestion: What is the special magic {city} number?\nAnswer:"


@dataclass(frozen=True)
class NeedleSample:
    """A text with needles, the question for one of them and its answer.

    Attributes:
        ids: token ids `[length]`, int64.
        answer: where the answer's tokens are in `ids`: those of the city, of " number is " and of
            the number, which end the text.
    """

    ids: Tensor
    answer: slice


def needle_sample(
    encode: Callable[[str], list[int]],
    haystack: Tensor,
    length: int,
    *,
    generator: torch.Generator,
    needles: int = 3,
) -> NeedleSample:
    """Hide needles in a text and ask for one of them.

    Cities, numbers, depths and the needle that is asked for are drawn uniformly. The haystack's
    first token, where it may have a BOS token, stays first.

    Args:
        encode: from a string to token ids, without special tokens.
        haystack: token ids `[N]` of the text, of which as many are taken as there is room for.
        length: tokens of the sample, question and answer among them.
        generator: source of the draws, on the CPU.
        needles: how many there are, 1 to 42.

    Returns:
        The sample.

    Raises:
        TypeError: if `length` or `needles` is no int.
        ValueError: if `length` has no room for needles and question, `haystack` is not of one axis
            or too short, or there are not as many cities as `needles`.

    Reference: arXiv 2505.17083, section 5.
    """
    integer("length", length)
    if integer("needles", needles) > len(_CITIES):
        raise ValueError(f"needles must be at most {len(_CITIES)}, got {needles}")
    cities = torch.randperm(len(_CITIES), generator=generator)[:needles].tolist()
    numbers = torch.randint(10**6, 10**7, (needles,), generator=generator).tolist()
    facts = [_REST.format(city=_CITIES[c], number=n) for c, n in zip(cities, numbers, strict=True)]
    asked = int(torch.randint(needles, (), generator=generator))
    hidden = [torch.tensor(encode(f"{_OPENING}{fact}.")) for fact in facts]
    question = encode(_QUESTION.format(city=_CITIES[cities[asked]]) + _OPENING)
    answer = encode(facts[asked])
    end = torch.tensor(question + answer)
    room = length - len(end) - sum(len(x) for x in hidden)
    if room < 1:
        raise ValueError(f"length must be at least {length - room + 1}, got {length}")
    if haystack.ndim != 1 or len(haystack) < room:
        raise ValueError(
            f"haystack must have shape (N,) with N >= {room}, got {tuple(haystack.shape)}"
        )
    depths = torch.randint(1, room + 1, (needles,), generator=generator).sort().values
    hay = haystack[:room].cpu().long().tensor_split(depths)
    pieces = [x for pair in zip(hay, hidden, strict=False) for x in pair]
    return NeedleSample(torch.cat([*pieces, hay[-1], end]), slice(length - len(answer), length))


def needle_accuracy(predicted: Tensor, sample: NeedleSample) -> bool:
    """Tell whether city and number are both right.

    Args:
        predicted: the likeliest token ids `[A]` at the places of the answer's tokens, each given
            the right ones before it. All of them are right exactly if greedy decoding gives the
            answer.
        sample: what was asked.

    Raises:
        ValueError: if `predicted` has not one token for each of the answer's.
    """
    wanted = sample.ids[sample.answer]
    if predicted.shape != wanted.shape:
        raise ValueError(
            f"predicted must have shape {tuple(wanted.shape)}, got {tuple(predicted.shape)}"
        )
    return torch.equal(predicted.cpu(), wanted)
