"""The benchmarks of speed, as far as a machine without a GPU can say."""

import pytest
import torch

pytest.importorskip("triton", reason="the speed benchmarks time with Triton")

from benchmarks import power, score_mods


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("benchmark", [power, score_mods])
def test_says_that_it_needs_a_gpu(benchmark, capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark.main([])
    assert stopped.value.code == 1
    assert capsys.readouterr().err == "this benchmark needs a CUDA device\n"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--processes", "0"], "--processes must be at least 1, got 0"),
        (["--only", "("], "--only must be a regular expression, got '('"),
    ],
)
def test_wrong_arguments_are_named(arguments, why, capsys):
    with pytest.raises(SystemExit):
        score_mods.main(arguments)
    assert why in capsys.readouterr().err


def test_a_mechanism_is_timed_beside_plain(monkeypatch, capsys):
    """A ratio needs the plain time at the same shape, whatever is asked for."""

    def run(cases, processes):
        return {case: (2.0 if case.name == "plain" else 3.0, 4.0, 0.0) for case in cases}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(score_mods, "machine", lambda device: {})
    monkeypatch.setattr(score_mods, "score_mods", lambda: dict.fromkeys(["plain", "alibi"]))
    monkeypatch.setattr(score_mods, "run", run)
    score_mods.main(["--only", "^alibi$"])
    out = capsys.readouterr().out
    assert "| alibi | 3.000 (1.50) | 4.000 (1.00) | 7.000 (1.17) | 0 |" in out
    assert "failed" not in out
    assert "rerope" not in out


def test_a_wrong_output_is_not_timed():
    args = [torch.randn(1, 2, 64, 16) for _ in range(3)]
    log_g = -torch.rand(1, 2, 64)

    def plain(q, k, v, log_g):
        return power.power_attention(q, k, v, log_g, deg=4)

    power.check(plain, [*args, log_g], 4)
    with pytest.raises(AssertionError, match=r"degree 2, .* relative error"):
        power.check(plain, [*args, log_g], 2)
