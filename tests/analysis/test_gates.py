"""Shares of gated power attention: against sums, against attention itself, and the condition."""

import math
from itertools import pairwise

import pytest
import torch

import score_mods as sm
from analysis import gated_shares, measure
from power import PowerAttention


def starting_horizons(layer):
    return 1 / (1 - layer.gate.bias.detach().double().sigmoid())


def test_is_the_sum_of_the_weights():
    edges = [0, 1, 10, 100, 700]
    for horizon in (1.5, 30.0, 1e6):
        weight = (1 - 1 / horizon) ** torch.arange(1000, dtype=torch.float64)
        want = torch.stack([weight[a:b].sum() for a, b in pairwise(edges)])
        got = gated_shares(torch.tensor([horizon], dtype=torch.float64), edges, length=1000)[0]
        torch.testing.assert_close(got, want / weight.sum(), atol=1e-12, rtol=1e-9)


def test_is_what_power_attention_does():
    """Rows of the operator itself, on independent normal queries and keys."""
    torch.manual_seed(0)
    heads, length, rows = 4, 2048, 256
    layer = PowerAttention(64, heads, horizons=(16, 1024))
    q, k = torch.randn(1, heads, rows, 32), torch.randn(1, heads, length, 32)
    log_g = torch.nn.functional.logsigmoid(layer.gate.bias.detach())[None, :, None]
    mod = sm.power(2, log_g.expand(1, heads, length).contiguous())
    edges = [0, 8, 64, 512]
    measured = measure(q, k, {"power": mod}, edges=edges).mechanisms["power"]
    shares = (measured.ranges(edges).log_z - measured.log_total[..., None]).exp().mean(1)
    want = gated_shares(starting_horizons(layer), edges, length=length)
    torch.testing.assert_close(shares.double(), want, atol=0.03, rtol=0.0)
    with pytest.raises(AssertionError):  # another spread is told apart
        torch.testing.assert_close(shares.double(), want.flip(0), atol=0.03, rtol=0.0)


def test_the_starting_spread_gives_every_scale_the_same():
    """Between the horizons' bounds each decade gets ln 10 / ln(b/a); one horizon does not."""
    edges = [10**i for i in range(2, 6)]
    layer = PowerAttention(64, 64, head_dim=16, horizons=(2, 1e7))
    decades = gated_shares(starting_horizons(layer), edges).mean(0)
    expected = math.log(10) / math.log(1e7 / 2)
    torch.testing.assert_close(decades, torch.full_like(decades, expected), atol=0.0, rtol=0.03)
    one = gated_shares(torch.tensor([1000.0]), edges)[0]
    assert one.max() > 10 * one.min()


def test_the_starting_spreads_negentropy_grows_with_the_distance():
    """The sum over a range of -(ln t + gamma + 1) / (t ln(b/a)), from its integral."""
    layer = PowerAttention(64, 64, head_dim=16, horizons=(2, 1e7))
    shares = gated_shares(starting_horizons(layer), torch.arange(30_001))
    by_distance = torch.special.xlogy(shares, shares).mean(0)
    for t in (100, 1000, 10_000):
        got = by_distance[t : 3 * t].sum().item()
        logs = math.log(t) + math.log(3) / 2 + 0.5772 + 1
        assert got == pytest.approx(-logs * math.log(3) / math.log(1e7 / 2), rel=0.03)


@pytest.mark.parametrize(
    ("horizons", "edges", "options", "error", "words"),
    [
        ([1.0], [0, 1], {}, ValueError, "horizons must be finite numbers above 1"),
        ([[2.0]], [0, 1], {}, ValueError, "horizons must be finite numbers above 1"),
        ([float("nan")], [0, 1], {}, ValueError, "horizons must be finite numbers above 1"),
        ([float("inf")], [0, 1], {}, ValueError, r"got \[inf\]"),
        ([2.0], [0, 9], {"length": 9.0}, TypeError, "length must be an int"),
        ([2.0], [0.0, 1.0], {}, TypeError, "edges must be integers"),
        ([2.0], [0, 9], {"length": 8}, ValueError, "edges must end at length = 8"),
    ],
)
def test_refuses(horizons, edges, options, error, words):
    with pytest.raises(error, match=words):
        gated_shares(torch.tensor(horizons), torch.tensor(edges), **options)
