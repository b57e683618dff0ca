import json
import math
import os

import numpy as np
import pytest
import torch

from analysis import judge, judge_all, law_edges, law_mass, measure, measure_gaussian
from analysis.invariance import _decade, _judge_entropy
from analysis.verdict import Finding, Verdict
from score_mods import alibi, logn, scale_invariant, scale_invariant_affine, sliding_window

LENGTH = 65_536
SEEDS = range(int(os.environ.get("VERDICT_SEEDS", "2")))  # 20 were right; 1.5 s each on 2 cores


def affine(q_idx, kv_idx, dtype):
    return scale_invariant_affine((q_idx - kv_idx).abs().to(dtype), 10.0)


def kerple(score, b, h, q_idx, kv_idx):
    return score - torch.log1p((q_idx - kv_idx).abs().to(score.dtype) / 10)


def bias_alone(score, b, h, q_idx, kv_idx):
    return score + affine(q_idx, kv_idx, score.dtype)[1]


def multiplier_alone(score, b, h, q_idx, kv_idx):
    return score * affine(q_idx, kv_idx, score.dtype)[0]


KNOWN = {
    "none": (None, "rises", "fails"),
    "logn": (logn(), "rises", "fails"),
    "scale_invariant": (scale_invariant(10.0), "holds", "holds"),
    "scale_invariant, tau 1000": (scale_invariant(1000.0), "holds", "holds"),
    "kerple": (kerple, "holds", "fails"),
    "m_t alone": (bias_alone, "falls", "fails"),
    "a_t alone": (multiplier_alone, "rises", "fails"),
    "alibi": (alibi(1), "falls", "fails"),
}
TAU = {"scale_invariant, tau 1000": 1000.0}


def gaussian(seed, rows=256, length=LENGTH, mods=None, **options):
    mods = {name: mod for name, (mod, *_) in KNOWN.items()} if mods is None else mods
    edges = torch.cat([law_edges(tau, 2.0, length - 1) for tau in (10.0, 1000.0)]).unique()
    return measure_gaussian(mods, length, rows=rows, seed=seed, edges=edges, **options)


@pytest.fixture(scope="module")
def measured():
    return gaussian(0)


@pytest.mark.parametrize("seed", SEEDS)
def test_known_answers(seed, measured):
    verdicts = judge_all(measured if seed == 0 else gaussian(seed), tau=TAU).verdicts
    got = {v.mechanism: (v.total.verdict, v.negentropy.verdict) for v in verdicts}
    assert got == {name: (total, negentropy) for name, (_, total, negentropy) in KNOWN.items()}
    sparsity = {v.mechanism: v.weak_sparsity.verdict for v in verdicts}
    assert {name: sparsity[name] for name in ("none", "kerple", "m_t alone")} == dict.fromkeys(
        ("none", "kerple", "m_t alone"), "fails"
    )
    assert sparsity["scale_invariant"] == "consistent"


def test_numbers_of_a_verdict(measured):
    """Slope, entropy and rho once more, in numpy."""
    verdict = judge(measured, "scale_invariant")
    edges = law_edges(10.0, 2.0, LENGTH - 1)
    assert verdict.edges == edges.tolist()
    ranges = measured.mechanisms["scale_invariant"].ranges(edges)
    log_z, entropy = ranges.log_z[0].mean(0).numpy(), ranges.entropy[0].mean(0).numpy()
    ends = np.log(edges.numpy() + 10.0)
    x = (ends[1:] + ends[:-1]) / 2
    mass = law_mass(edges, 10.0).numpy()
    assert verdict.total.value == pytest.approx(np.polyfit(x, log_z - np.log(mass), 1)[0])
    assert verdict.weak_sparsity.value == pytest.approx(np.polyfit(x[-4:], entropy[-4:], 1)[0])
    assert verdict.first_decade == pytest.approx(np.polyfit(x[:4], entropy[:4], 1)[0])
    assert verdict.rho == pytest.approx([1.0] * 12, abs=0.3)
    assert verdict.negentropy.value == pytest.approx(
        max(max(r, 1 / r) for r in np.array(verdict.rho) / np.mean(verdict.rho))
    )
    assert abs(verdict.law_slope) < 0.03
    for finding in (verdict.total, verdict.negentropy, verdict.weak_sparsity):
        assert finding.low <= finding.value <= finding.high


def test_interval_is_that_of_the_mean(measured):
    verdict = judge(measured, "none", resamples=2000)
    edges = law_edges(10.0, 2.0, LENGTH - 1)
    y = measured.mechanisms["none"].ranges(edges).log_z[0].numpy()
    ends = np.log(edges.numpy() + 10.0)
    slopes = np.polyfit((ends[1:] + ends[:-1]) / 2, y.T, 1)[0]
    half = 1.96 * slopes.std() / 16
    assert verdict.total.high - verdict.total.low == pytest.approx(2 * half, rel=0.1)


def test_sample_means_would_have_been_wrong(measured):
    """Why N~ is not averaged over rows: under the law it is constant, its sample mean is not."""
    edges = law_edges(10.0, 2.0, LENGTH - 1)
    ranges = measured.mechanisms["scale_invariant"].ranges(edges)
    sample = ranges.negentropy[0].mean(0) / (math.exp(0.5) * law_mass(edges, 10.0))
    assert sample.min() < 0.2
    assert sample.max() > 2
    assert judge(measured, "scale_invariant").negentropy.verdict == "holds"


def test_assumed_deviation_must_be_right():
    mods = {
        "assumed": scale_invariant(10.0),
        "measured": scale_invariant(10.0, sigma=1.5, mu=-0.5),
    }
    wide = measure_gaussian(mods, 8192, mu=-0.5, sigma=1.5)
    assumed, right = judge_all(wide).verdicts
    assert (assumed.total.verdict, assumed.negentropy.verdict) == ("rises", "fails")
    assert (right.total.verdict, right.negentropy.verdict) == ("holds", "holds")
    assert right.rho == pytest.approx([right.rho[-1]] * len(right.rho), rel=0.5)


def test_queries_of_a_text_are_judged_where_all_reach():
    """Unit deviation within each row, heads with tau of their own, rows at their own positions."""
    generator = torch.Generator().manual_seed(0)
    q = torch.nn.functional.normalize(torch.randn(1, 2, 128, 64, generator=generator), dim=-1)
    k = torch.randn(1, 1, 8192, 64, generator=generator)
    positions = torch.linspace(4096, 8191, 128).long()
    mods = {"scale_invariant": scale_invariant(torch.tensor([10.0, 40.0])), "none": None}
    edges = torch.cat([law_edges(tau, 2.0, 4096) for tau in (10.0, 40.0)]).unique()
    result = measure(q, k, mods, q_positions=positions, scale=1.0, edges=edges)
    verdicts = judge_all(result)
    assert [(v.mechanism, v.head) for v in verdicts.verdicts] == [
        (name, head) for name in mods for head in (0, 1)
    ]
    assert [v.total.verdict for v in verdicts.verdicts] == ["holds", "rises", "rises", "rises"]
    assert judge(result, "scale_invariant", head=1, tau=40.0).total.verdict == "holds"
    assert {v.edges[-1] for v in verdicts.verdicts} == {2550}
    assert {v.block for v in verdicts.verdicts} == {11}
    assert "none, head 1" in str(verdicts)
    assert [v.head for v in judge_all(result, heads=[1]).verdicts] == [1, 1]


def test_alike_neighbours_widen_the_interval():
    """Rows that come in runs of 16 with one mean: only blocks of rows see their true spread."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(16, generator=generator).repeat_interleave(16)
    keys = torch.randn(4096, 1, generator=generator)
    queries = torch.stack([torch.ones(256), mean], -1)[None, None]
    keys = torch.cat([keys, torch.linspace(0, 1, 4096)[:, None]], 1)[None, None]
    result = measure(queries, keys, {"none": None}, scale=1.0)
    alone, blocks = (judge(result, "none", block=block).total for block in (1, 16))
    assert blocks.value == alone.value
    assert blocks.high - blocks.low > 2 * (alone.high - alone.low)


def test_too_few_rows_cannot_be_told():
    verdict = judge(gaussian(0, rows=4, mods={"logn": logn(), "a": KNOWN["a_t alone"][0]}), "a")
    assert verdict.total.verdict == "rises"
    few = measure_gaussian({"si": scale_invariant(10.0, sigma=1.05)}, 2048, rows=6)
    verdict = judge(few, "si")
    assert "cannot be told" in (verdict.total.verdict, verdict.negentropy.verdict)


def test_a_window_falls():
    mask = sliding_window(500)

    def window(score, b, h, q_idx, kv_idx):
        return torch.where(mask(b, h, q_idx, kv_idx), score, -torch.inf)

    def nothing(score, b, h, q_idx, kv_idx):
        return torch.full_like(score, -torch.inf)

    result = measure_gaussian({"window": window, "nothing": nothing}, 8192, rows=32)
    verdict = judge(result, "window")
    assert (verdict.total.verdict, verdict.negentropy.verdict) == ("falls", "fails")
    assert verdict.log_z[-1] == -math.inf
    assert judge(result, "nothing").negentropy.verdict == "fails"


def test_a_mod_that_is_not_affine_is_judged_by_quadrature():
    def softcap(score, b, h, q_idx, kv_idx):
        a_t, m_t = affine(q_idx, kv_idx, score.dtype)
        return 200 * torch.tanh((a_t * score + m_t) / 200)

    verdict = judge(measure_gaussian({"softcap": softcap}, 4096, rows=128), "softcap")
    assert (verdict.total.verdict, verdict.negentropy.verdict) == ("holds", "holds")


def test_verdicts_print_as_a_table(measured):
    lines = str(judge_all(measured, tau=TAU)).splitlines()
    assert len(lines) == 2 + len(KNOWN)
    assert len({len(line) for line in lines}) == 1
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0][:2] == ["mechanism", "total attention"]
    table = {row[0]: (row[1], row[4]) for row in rows[2:]}
    assert table == {name: (total, negentropy) for name, (_, total, negentropy) in KNOWN.items()}
    assert str(judge(measured, "none")).splitlines()[2].startswith("| none ")


def test_verdicts_save_as_json_of_the_stated_schema(measured, tmp_path):
    verdicts = judge_all(measured, tau=TAU)
    verdicts.save(tmp_path / "verdicts.json")
    saved = json.loads((tmp_path / "verdicts.json").read_text())
    assert saved["schema"] == "scale-invariance-verdict/1"
    assert saved["thresholds"] == {"slope": 0.15, "spread": 2.0, "entropy_slope": [0.5, 0.9]}
    assert [v["mechanism"] for v in saved["verdicts"]] == list(KNOWN)
    for item, verdict in zip(saved["verdicts"], verdicts.verdicts, strict=True):
        assert set(item) == set(Verdict.__dataclass_fields__)
        for name in ("total", "negentropy", "weak_sparsity"):
            assert set(item[name]) == set(Finding.__dataclass_fields__)
        assert item["total"]["value"] == verdict.total.value
        assert item["rho"] == verdict.rho
    kerple_spread = saved["verdicts"][4]["negentropy"]
    assert kerple_spread == {"verdict": "fails", "value": None, "low": None, "high": None}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"mechanism": "alibi 2"}, "mechanism must be one of none, logn"),
        ({"head": 1}, "head must lie in 0..0"),
        ({"resamples": 10}, "resamples must be"),
        ({"edges": [1, 10]}, "edges must make at least two ranges"),
        ({"edges": [1, 10, 65536]}, "edges must make at least two ranges"),
        ({"edges": [1, 11, 30]}, "were not"),
        ({"block": 100}, "block must leave"),
        ({"block": 0}, "block must be at least 1"),
        ({"tau": 30_000.0}, "must leave room for two ranges"),
        ({"tau": -1.0}, "tau must be a positive number"),
        ({"tau": 0.0, "edges": [1, 10, 30]}, "tau must be a positive number"),
        ({"beta": 0.0}, "beta must be a positive number"),
        ({"beta": -1.0}, "beta must be a positive number"),
    ],
)
def test_wrong_arguments_are_named(measured, options, names):
    with pytest.raises(ValueError, match=names):
        judge(measured, **{"mechanism": "none", **options})


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"mechanism": ["none"]}, "mechanism must be a string, got list"),
        ({"head": 0.0}, "head must be an int, got float"),
        ({"resamples": 40.5}, "resamples must be an int"),
        ({"seed": None}, "seed must be an int"),
        ({"block": "4"}, "block must be an int"),
        ({"tau": "10"}, "tau must be a positive number, got str"),
        ({"delta": None}, "delta must be a positive number, got NoneType"),
    ],
)
def test_arguments_of_the_wrong_type_are_named(measured, options, names):
    with pytest.raises(TypeError, match=names):
        judge(measured, **{"mechanism": "none", **options})


def test_judge_all_names_what_it_does_not_know(measured):
    with pytest.raises(TypeError, match="measurement must be a Measurement, got NoneType"):
        judge_all(None)
    with pytest.raises(TypeError, match="heads must be a sequence of ints or None, got 0"):
        judge_all(measured, heads=0)
    with pytest.raises(TypeError, match=r"heads must be .*, got \[0.5\]"):
        judge_all(measured, heads=[0.5])
    assert judge_all(measured, heads=torch.tensor([0]).numpy()) == judge_all(measured)
    with pytest.raises(ValueError, match=r"tau must be given for some of none, .* got 'logm'"):
        judge_all(measured, tau={"logm": 20.0})


@pytest.mark.parametrize(
    ("low", "high", "falling", "verdict"),
    [
        (0.1, 0.4, True, "consistent"),
        (0.1, 0.4, False, "cannot be told"),
        (0.1, 0.6, True, "cannot be told"),
        (0.8, 0.95, True, "cannot be told"),
        (0.95, 1.0, True, "fails"),
    ],
)
def test_an_entropy_that_is_flat_must_also_flatten(low, high, falling, verdict):
    assert _judge_entropy(low, high, falling=falling) == verdict


def test_a_decade_has_two_ranges_at_least():
    x = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])
    assert _decade(x, last=True).tolist() == [False, False, True, True, True]
    assert _decade(x, last=False).tolist() == [True, True, True, False, False]
    assert _decade(3 * x, last=True).tolist() == [False, False, False, True, True]
    assert _decade(3 * x, last=False).tolist() == [True, True, False, False, False]
