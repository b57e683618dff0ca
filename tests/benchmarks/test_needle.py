import re

import pytest
import torch

from benchmarks.needle import needle_accuracy, needle_sample


def encode(text):
    return list(text.encode())


def decode(ids):
    return bytes(ids.tolist()).decode()


HAYSTACK = torch.tensor(encode("^" + "the quick brown fox " * 200))


def sample(seed=0, length=900, **options):
    generator = torch.Generator().manual_seed(seed)
    return needle_sample(encode, HAYSTACK, length, generator=generator, **options)


@pytest.mark.parametrize("seed", range(8))
def test_a_sample_reads_as_the_paper_says(seed):
    made = sample(seed)
    text = decode(made.ids)
    facts = re.findall(r" The special magic (\w+) number is (\d{7})\.", text)
    asked = re.search(
        r"\nQuestion: What is the special magic (\w+) number\?\nAnswer: The special magic"
        r"( (\w+) number is (\d{7}))$",
        text,
    )
    assert made.ids.dtype == torch.int64
    assert len(made.ids) == 900
    assert len({city for city, _ in facts}) == 3
    assert asked[1] == asked[3]
    assert (asked[3], asked[4]) in facts
    assert decode(made.ids[made.answer]) == asked[2]
    without = re.sub(r" The special magic \w+ number is \d{7}\.", "", text[: asked.start()])
    assert without == decode(HAYSTACK[: len(without)])


def test_draws_follow_the_generator():
    assert torch.equal(sample(1).ids, sample(1).ids)
    assert not torch.equal(sample(1).ids, sample(2).ids)


def test_depths_are_spread_over_the_text_and_every_needle_is_asked_for():
    depths, asked = [], set()
    for seed in range(100):
        text = decode(sample(seed, needles=2).ids)
        depths += [m.start() / len(text) for m in re.finditer(r" The .{,40}\d\.", text)]
        order = re.findall(r"magic (\w+) number", text)
        asked.add(order.index(order[-1]))
    assert min(depths) < 0.05
    assert 0.35 < sum(depths) / len(depths) < 0.55
    assert asked == {0, 1}


def test_accuracy_wants_city_and_number():
    made = sample()
    right = made.ids[made.answer]
    assert needle_accuracy(right, made)
    for place in (1, -1):  # a letter of the city, a digit of the number
        wrong = right.clone()
        wrong[place] += 1
        assert not needle_accuracy(wrong, made)
    with pytest.raises(ValueError, match="predicted must have shape"):
        needle_accuracy(right[1:], made)


def test_errors():
    with pytest.raises(ValueError, match=r"length must be at least \d+, got 100"):
        sample(length=100)
    least = int(re.search(r"at least (\d+)", str(_error(length=100)))[1])
    assert len(sample(length=least).ids) == least
    with pytest.raises(ValueError, match="haystack must have shape"):
        sample(length=9000)
    with pytest.raises(ValueError, match="needles must be at most 42, got 43"):
        sample(needles=43)
    with pytest.raises(TypeError, match="length must be an int"):
        sample(length=9.0)


def _error(**options):
    with pytest.raises(ValueError, match="length") as caught:
        sample(**options)
    return caught.value
