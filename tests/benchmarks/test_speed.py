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


def test_a_wrong_output_is_not_timed():
    args = [torch.randn(1, 2, 64, 16) for _ in range(3)]
    log_g = -torch.rand(1, 2, 64)

    def plain(q, k, v, log_g):
        return power.power_attention(q, k, v, log_g, deg=4)

    power.check(plain, [*args, log_g], 4)
    with pytest.raises(AssertionError, match=r"degree 2, .* relative error"):
        power.check(plain, [*args, log_g], 2)
