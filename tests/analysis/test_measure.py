import json
import math
import subprocess
import sys
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest
import torch

from analysis.base_logits import normal_quantiles
from analysis.measure import measure, measure_gaussian
from score_mods import alibi, causal, logn, scale_invariant

MODS = {
    "none": None,
    "scale_invariant": scale_invariant(torch.tensor([1.0, 10.0, 100.0, 1e4])),
    "alibi": alibi(4),
    "logn": logn(),
}


def logits_of(name, s, i, h, t):
    """The mechanisms once more, in numpy, for one row: scores `s` at distances `t`."""
    if name == "scale_invariant":
        growth = 2 * np.log1p(t / [1.0, 10.0, 100.0, 1e4][h])
        return np.sqrt(1 + growth) * s - growth
    if name == "alibi":
        return s - t * 4.0 ** -(h + 1)
    return s * math.log(i + 1) if name == "logn" else s


def random_qk(batch, heads, heads_kv, rows, length, dim, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, heads, rows, dim, generator=generator, dtype=torch.float64)
    k = torch.randn(batch, heads_kv, length, dim, generator=generator, dtype=torch.float64)
    return q.to(dtype), k.to(dtype)


POSITIONS = torch.tensor([2599, 3, 17, 1300, 1299, 2000, 64, 900])
EDGES = [1, 7, 100, 150, 1025, 2600]


@pytest.fixture(scope="module")
def measured():
    q, k = random_qk(2, 4, 2, 8, 2600, 16)
    return q, k, measure(q, k, MODS, q_positions=POSITIONS, edges=EDGES)


def dense_row(q, k, b, h, r):
    """Base logits of one row by distance, 0 first."""
    i = int(POSITIONS[r])
    return (k[b, h // 2, : i + 1] @ q[b, h, r]).flip(0).numpy() / 4, i


@pytest.mark.parametrize("name", MODS)
def test_rows_agree_with_dense_attention(measured, name):
    q, k, result = measured
    rows = result.mechanisms[name]
    ranges = rows.ranges(EDGES)
    assert result.q_positions.tolist() == POSITIONS.tolist() * 2
    for b in range(2):
        for h in range(4):
            for r in range(8):
                s, i = dense_row(q, k, b, h, r)
                n = b * 8 + r
                logits = logits_of(name, s, i, h, np.arange(i + 1.0))
                p = np.exp(logits - np.logaddexp.reduce(logits))
                entropy = -(p * np.log(np.maximum(p, 1e-300))).sum()
                assert rows.log_total[h, n].item() == pytest.approx(np.logaddexp.reduce(logits))
                assert rows.entropy[h, n].item() == pytest.approx(entropy, abs=1e-12)
                assert rows.effective_keys[h, n].item() == pytest.approx(math.exp(entropy))
                assert rows.share()[h, n].item() == pytest.approx(p[:100].sum())
                for c, (start, stop) in enumerate(pairwise(EDGES)):
                    part = logits[start:stop]
                    if not len(part):
                        assert ranges.log_z[h, n, c] == -torch.inf
                        assert ranges.entropy[h, n, c] == 0
                        continue
                    log_z = np.logaddexp.reduce(part)
                    share = np.exp(part - log_z)
                    assert ranges.log_z[h, n, c].item() == pytest.approx(log_z, rel=1e-10)
                    assert ranges.entropy[h, n, c].item() == pytest.approx(
                        log_z - (share * part).sum(), abs=1e-10 * (1 + abs(log_z))
                    )
                    assert ranges.negentropy[h, n, c].item() == pytest.approx(
                        (np.exp(part) * part).sum(), rel=1e-10, abs=1e-300
                    )


def test_base_logits_agree_with_dense_scores(measured):
    q, k, result = measured
    base = result.base
    bounds = base.cells.tolist()
    assert set(EDGES) | {10, 100, 1000} <= set(bounds)
    for h in range(4):
        rows = [dense_row(q, k, b, h, r)[0][1:-1] for b in range(2) for r in range(8)]
        assert base.mu[h].item() == pytest.approx(np.mean([s.mean() for s in rows]))
        assert base.sigma[h].item() == pytest.approx(math.sqrt(np.mean([s.var() for s in rows])))
        z = np.concatenate([(s - s.mean()) / s.std() for s in rows])
        assert base.skewness[h].item() == pytest.approx((z**3).mean(), abs=1e-9)
        assert base.excess_kurtosis[h].item() == pytest.approx((z**4).mean() - 3, abs=1e-9)
        assert base.sample[h].numpy() == pytest.approx(np.sort(z), abs=1e-9)
        normal = [NormalDist().inv_cdf((j + 0.625) / (len(z) + 0.25)) for j in range(len(z))]
        assert base.qq_correlation[h].item() == pytest.approx(
            np.corrcoef(np.sort(z), normal)[0, 1], abs=1e-9
        )
        mean, deviation = base.by_distance()
        for c, (start, stop) in enumerate(pairwise(bounds)):
            cell = np.concatenate([s[start - 1 : stop - 1] for s in rows])
            assert mean[h, c].item() == pytest.approx(cell.mean(), abs=1e-10)
            assert deviation[h, c].item() == pytest.approx(cell.std(), abs=1e-10)


def test_by_distance_counts_rows_by_their_weights(measured):
    base = measured[2].base
    weights = torch.zeros(2, 16, dtype=torch.float64)
    weights[0, 0], weights[1, [0, 5]] = 3, 1
    mean, deviation = base.by_distance(weights)
    assert mean.shape == deviation.shape == (4, 2, len(base.cells) - 1)
    q, k, _ = measured
    one, other = dense_row(q, k, 0, 2, 0)[0], dense_row(q, k, 0, 2, 5)[0]
    assert mean[2, 0, 0].item() == pytest.approx(one[1:7].mean())
    both = np.concatenate([one[1:7], other[1:7]])
    assert deviation[2, 1, 0].item() == pytest.approx(both.std())


def test_law_is_a_step_function(measured):
    base = measured[2].base
    mu, sigma = base.law(2)
    mean, deviation = base.by_distance()
    t = torch.tensor([0, 1, 6, 7, 2599])
    assert mu(t).tolist() == mean[2, [0, 0, 0, 1, -1]].tolist()
    assert sigma(t).tolist() == deviation[2, [0, 0, 0, 1, -1]].tolist()


def test_low_precision_is_measured_in_float32():
    q, k = random_qk(1, 4, 2, 64, 1500, 32, torch.bfloat16)
    low = measure(q, k, MODS)
    exact = measure(q.double(), k.double(), MODS)
    for name in MODS:
        x, y = low.mechanisms[name], exact.mechanisms[name]
        assert torch.allclose(x.log_z, y.log_z, rtol=1e-5, atol=2e-5)
        assert torch.allclose(x.entropy, y.entropy, rtol=1e-5, atol=2e-5)
    assert torch.allclose(low.base.excess_kurtosis, exact.base.excess_kurtosis, atol=1e-4)
    assert low.q_positions.tolist() == list(range(1436, 1500))


@pytest.mark.parametrize(
    ("draw", "skewness", "kurtosis"), [("laplace", 0, 3), ("exponential", 2, 6), ("normal", 0, 0)]
)
def test_departures_from_a_gaussian_show(draw, skewness, kurtosis):
    """With D = 1 and q = 1 the logits are the keys themselves."""
    keys = getattr(np.random.default_rng(0), draw)(size=(1, 1, 200_000, 1))
    base = measure(torch.ones(1, 1, 4, 1), torch.tensor(keys), {}, scale=1.0).base
    assert base.skewness.item() == pytest.approx(skewness, abs=0.1)
    assert base.excess_kurtosis.item() == pytest.approx(kurtosis, abs=0.35)
    assert (base.qq_correlation.item() > 0.9995) == (draw == "normal")


def test_key_zero_and_the_query_itself_are_left_out_of_the_base():
    keys = torch.randn(1, 1, 500, 1, generator=torch.Generator().manual_seed(0))
    plain = measure(torch.ones(1, 1, 4, 1), keys, {}, q_positions=torch.tensor([499] * 4))
    keys[0, 0, [0, 499]] = 1e3
    spiked = measure(torch.ones(1, 1, 4, 1), keys, {}, q_positions=torch.tensor([499] * 4))
    assert torch.allclose(plain.base.sigma, spiked.base.sigma, rtol=1e-6)
    assert torch.allclose(plain.base.mu, spiked.base.mu, atol=1e-6)
    assert plain.base.sample.shape == (1, 4 * 498)


def test_mask_in_a_score_mod():
    def window(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx - kv_idx < 8, score, -torch.inf)

    q, k = random_qk(1, 1, 1, 4, 300, 8)
    rows = measure(q, k, {"window": window}).mechanisms["window"]
    ranges = rows.ranges([0, 10, 100])
    assert (ranges.log_z[..., 1] == -torch.inf).all()
    assert (ranges.entropy[..., 1] == 0).all()
    assert (ranges.negentropy[..., 1] == 0).all()
    scores = (q[0, 0] @ k[0, 0].T / math.sqrt(8))[3, 292:]
    assert rows.log_total[0, 3].item() == pytest.approx(scores.logsumexp(0).item())


def test_score_mod_sees_the_sequence():
    def second_sequence_only(score, b, h, q_idx, kv_idx):
        return score * torch.tensor([0.0, 1.0])[b]

    q, k = random_qk(2, 1, 1, 5, 50, 8)
    rows = measure(q, k, {"mod": second_sequence_only, "none": None}).mechanisms
    flat = torch.arange(46.0, 51).log().double()
    assert torch.allclose(rows["mod"].log_total[0, :5], flat)
    assert torch.equal(rows["mod"].log_total[0, 5:], rows["none"].log_total[0, 5:])


def test_gaussian_logits_are_seeded_and_have_the_law_asked_for():
    def mu(t):
        return -0.5 * torch.log1p(t.float())

    def sigma(t):
        return 1 + t / 5000

    first = measure_gaussian(MODS, 5000, rows=64, heads=4, mu=mu, sigma=sigma, seed=3)
    again = measure_gaussian(MODS, 5000, rows=64, heads=4, mu=mu, sigma=sigma, seed=3)
    other = measure_gaussian(MODS, 5000, rows=64, heads=4, mu=mu, sigma=sigma, seed=4)
    log_z = [m.mechanisms["alibi"].log_z for m in (first, again, other)]
    assert torch.equal(log_z[0], log_z[1])
    assert not torch.equal(log_z[0], log_z[2])
    mean, deviation = first.base.by_distance()
    for c, (start, stop) in enumerate(pairwise(first.base.cells.tolist())):
        t = torch.arange(start, stop)
        spread = math.sqrt(sigma(t).square().mean() + mu(t).var(correction=0))
        error = 5 * spread / math.sqrt(64 * len(t))
        assert (mean[:, c] - mu(t).mean()).abs().max() < error
        assert (deviation[:, c] - spread).abs().max() < error
    assert first.q_positions.tolist() == [4999] * 64


def test_gaussian_rows_match_the_expected_total():
    """Plain softmax is far from freezing, so here a sample mean of Z may be compared."""
    ranges = (
        measure_gaussian({"none": None}, 4096, seed=1).mechanisms["none"].ranges([1, 10, 4096])
    )
    mean = ranges.log_z.exp().mean((0, 1))
    assert mean.tolist() == pytest.approx([9 * math.exp(0.5), 4086 * math.exp(0.5)], rel=0.05)


def test_shortest_rows():
    q, k = random_qk(1, 1, 1, 1, 4, 2)
    result = measure(q, k, {"none": None}, edges=[1, 3])
    assert torch.isfinite(result.mechanisms["none"].log_total).all()
    assert torch.isfinite(result.base.sigma).all()
    assert result.mechanisms["none"].share().item() == pytest.approx(1)


def test_progress_bar_is_shown_on_request(capsys):
    pytest.importorskip("tqdm", reason="the bar is tqdm's")
    measure_gaussian({}, 300, rows=4, progress=True)
    assert "measure" in capsys.readouterr().err
    measure_gaussian({}, 300, rows=4)
    assert not capsys.readouterr().err


def test_quantiles_of_a_gaussian():
    normal = [NormalDist().inv_cdf((i + 0.625) / 9.25) for i in range(9)]
    assert normal_quantiles(9).tolist() == pytest.approx(normal, abs=1e-12)


FULL_SIZE = """
import json, re, time, torch
from analysis import measure
from score_mods import logn, scale_invariant
torch.set_num_threads(1)
q, k = torch.randn(1, 4, 256, 64), torch.randn(1, 4, 131072, 64)
start = time.process_time()
mods = {"none": None, "scale_invariant": scale_invariant(), "logn": logn()}
rows = measure(q, k, mods).mechanisms["scale_invariant"]
seconds = time.process_time() - start
# Not ru_maxrss, in which a child starts with the peak of the process that made it.
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
print(json.dumps([seconds, peak, rows.log_total.isfinite().all().item()]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_full_size_takes_little_time_and_memory():
    """131,072 keys, 256 rows, 4 heads of 64, three mechanisms: processor time of one thread."""
    output = subprocess.run(
        [sys.executable, "-c", FULL_SIZE], capture_output=True, text=True, check=True
    ).stdout
    seconds, peak, finite = json.loads(output)
    assert finite
    assert seconds < 30
    assert peak < 1e9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_measures_where_q_lives():
    q, k = random_qk(1, 4, 2, 8, 2600, 16)
    gpu = measure(q.cuda(), k.cuda(), MODS, q_positions=POSITIONS)
    cpu = measure(q, k, MODS, q_positions=POSITIONS)
    for name in MODS:
        log_z = gpu.mechanisms[name].log_z
        assert log_z.is_cuda
        assert torch.allclose(log_z.cpu(), cpu.mechanisms[name].log_z)


Q, K = random_qk(1, 4, 2, 4, 100, 8)


@pytest.mark.parametrize(
    ("call", "error", "names"),
    [
        (lambda: measure(Q.long(), K, {}), TypeError, "q must be a floating"),
        (lambda: measure(Q, [K], {}), TypeError, "k must be a floating"),
        (lambda: measure(Q[0], K, {}), ValueError, "q must be"),
        (lambda: measure(Q[:, :3], K, {}), ValueError, "k must be"),
        (lambda: measure(Q, K[..., :4], {}), ValueError, "k must be"),
        (lambda: measure(Q, K, {}, q_positions=torch.arange(3)), ValueError, "q_positions must"),
        (lambda: measure(Q, K, {}, q_positions=torch.arange(4)), ValueError, "q_positions must"),
        (lambda: measure(Q, K, {}, q_positions=torch.arange(97, 101)), ValueError, "q_positions"),
        (lambda: measure(Q, K, {}, edges=[1, 101]), ValueError, "edges must not pass"),
        (lambda: measure(Q, K, {}, edges=[3, 1]), ValueError, "edges must be"),
        (lambda: measure(Q, K, {"a": lambda s, b, h, i, j: s / 0}), ValueError, "score_mods"),
        (lambda: measure(Q, K, {"a": "none"}), TypeError, r"score_mods\['a'\] must be a plain"),
        (lambda: measure(Q * torch.nan, K, {"none": None}), ValueError, "score_mods"),
        (lambda: measure(Q, K, {"a": alibi(12)}), ValueError, r"\['a'\] must be for 4 heads.* 12"),
        (lambda: measure(Q, K, {"a": alibi(2)}), ValueError, r"\['a'\] must be for 4 heads.* 2"),
        (lambda: measure_gaussian({"a": alibi(2)}, 64), ValueError, "must be for 1 heads"),
        (lambda: measure(Q, K, {"a": causal}), TypeError, "got a mask_mod"),
        (lambda: measure(Q, K, [None]), TypeError, "score_mods must be a mapping"),
        (lambda: measure(Q, K, {}, q_positions=torch.arange(95.5, 99)), TypeError, "q_positions"),
        (lambda: measure(Q, K, {}, last=-1), ValueError, "last must be at least 1"),
        (lambda: measure_gaussian({}, 64, last=0), ValueError, "last must be at least 1"),
        (lambda: measure_gaussian({}, 64.5), TypeError, "length must be an int, got float"),
        (lambda: measure_gaussian({}, 3), ValueError, "length must be"),
        (lambda: measure_gaussian({}, 300, rows=0), ValueError, "rows must be"),
        (lambda: measure_gaussian({}, 300, sigma=0.0), ValueError, "sigma must be"),
    ],
)
def test_wrong_arguments_are_named(call, error, names):
    with pytest.raises(error, match=names):
        call()


def test_the_shortest_rows():
    """Four keys: the last query's row, by hand."""
    q, k = random_qk(1, 1, 1, 1, 4, 8)
    found = measure(q, k, {"none": None}).mechanisms["none"]
    s = (q[0, 0] @ k[0, 0].T)[0].double() / 8**0.5
    assert found.log_total.item() == pytest.approx(s.logsumexp(0).item(), abs=1e-6)
    drawn = measure_gaussian({"none": None}, 4, rows=3, last=2)
    assert drawn.mechanisms["none"].share(2).shape == (1, 3)


def test_ranges_must_have_been_measured(measured):
    with pytest.raises(ValueError, match="last must be at least 1"):
        measured[2].mechanisms["none"].share(-1)
    with pytest.raises(ValueError, match=r"\[8\] were not"):
        measured[2].mechanisms["none"].ranges([1, 8])
