"""Power attention beside softmax attention and ``retention``, on one GPU.

Prints the tables of ``RESULTS.md``: time and memory of a training step, error against float64, and
decoding. ``retention`` takes part where it is installed; it tunes some 300 configurations first.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from benchmarks.machine import machine
from power import power_attention
from power.decode import DecodeState, power_attention_step
from power.reference import quadratic

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

HEADS, HEAD_DIM, TOKENS = 12, 64, 65_536
LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)


def sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def retention(chunk_size: int | None, q: Tensor, k: Tensor, v: Tensor, log_g: Tensor) -> Tensor:
    """Call ``retention``, whose layout is ``[B, T, H, D]``: inputs are made so, and not copied."""
    from retention import power_retention

    q, k, v, log_g = (x.transpose(1, 2) for x in (q, k, v, log_g))
    out = power_retention(q, k, v, log_g, deg=2, scale=HEAD_DIM**-0.5, chunk_size=chunk_size)
    return out.transpose(1, 2)


def rows(rival: bool) -> dict[str, Attention]:
    """What is timed; `rival` says whether `retention` is."""
    found: dict[str, Attention] = {
        "SDPA flash": partial(sdpa, SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    }
    if rival:
        found["retention, attention form"] = partial(retention, None)
        found["retention, chunk 1024"] = partial(retention, 1024)
    found["power, attention form"] = partial(power_attention, chunk_size=TOKENS)
    found["power, chunk 1024"] = partial(power_attention, chunk_size=1024)
    found["power"] = power_attention
    return found


def inputs(
    batch: int,
    heads: int,
    length: int,
    name: str = "power",
    seed: int = 0,
    head_dim: int = HEAD_DIM,
) -> list[Tensor]:
    """Return q, k, v and log-gates near -0.001 that require gradients, and an output gradient."""
    torch.manual_seed(seed)
    swap = name.startswith("retention")

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        x = torch.randn(shape, device="cuda").to(dtype)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if swap else x

    qkv = [make(batch, heads, length, head_dim) for _ in range(3)]
    log_g = F.logsigmoid(make(batch, heads, length, dtype=torch.float32) + 6.9)
    return [*(x.requires_grad_() for x in (*qkv, log_g)), make(batch, heads, length, head_dim)]


def measure(attention: Attention, args: list[Tensor], grad: Tensor) -> tuple[float, float, float]:
    """Return milliseconds of forward and of forward and backward, and the latter's peak MiB."""

    def step() -> None:
        for x in args:
            x.grad = None
        attention(*args).backward(grad)

    def forward() -> None:
        with torch.no_grad():
            attention(*args)

    step()
    torch.cuda.synchronize()
    for x in args:
        x.grad = None
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() / 2**20
    time = partial(do_bench, return_mode="median")
    return time(forward), time(step), peak


def speed(lengths: tuple[int, ...], rival: bool) -> None:
    print(
        f"\nForward / forward + backward in ms; peak MiB of the latter. {TOKENS} tokens in all.\n"
    )
    print("| | " + " | ".join(f"B {TOKENS // n} x T {n}" for n in lengths) + " |")
    print("|---" * (len(lengths) + 1) + "|")
    for name, attention in rows(rival).items():
        cells = []
        for length in lengths:
            if name == "power, chunk 1024" and length <= 1024:
                cells.append("—")
                continue
            *args, grad = inputs(TOKENS // length, HEADS, length, name)
            forward, both, peak = measure(attention, args, grad)
            cells.append(f"{forward:.2f} / {both:.2f}; {peak:.0f}")
            torch.cuda.empty_cache()
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def error(rival: bool) -> None:
    """Print relative RMS errors against float64 at B 2, T 1024, 2 heads."""
    names = ("out", "dq", "dk", "dv", "dlog_g")
    print("\nRelative RMS error against float64, B 2, T 1024, 2 heads.\n")
    print("| | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 1) + "|")
    ways: dict[str, Attention] = {}
    if rival:
        ways["retention, attention form"] = partial(retention, None)
        ways["retention, chunk 256"] = partial(retention, 256)
    ways["power, attention form"] = partial(power_attention, chunk_size=1024)
    ways["power, chunk 256"] = partial(power_attention, chunk_size=256)
    for name, attention in ways.items():
        *args, grad = inputs(2, 2, 1024, name)
        exact = [x.detach().double().requires_grad_() for x in args]
        out, want = attention(*args), quadratic(*exact)[0]
        pairs = [(out, want)]
        pairs += zip(
            torch.autograd.grad(out, args, grad),
            torch.autograd.grad(want, exact, grad.double()),
            strict=True,
        )
        cells = [f"{((a - b).norm() / b.norm()).item():.1e}" for a, b in pairs]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def copy_bandwidth() -> float:
    """Return TB/s of a copy from device to device, bytes read and written."""
    source = torch.empty(2**30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    time = do_bench(partial(target.copy_, source), return_mode="median")
    return 2 * source.nbytes / time / 1e9


def decoding(batch: int = 64) -> None:
    """Print the time of a step by the tokens seen before, and the bandwidth that it reaches."""
    copy = copy_bandwidth()
    torch.manual_seed(0)
    q, k, v = torch.randn(3, batch, HEADS, 1, HEAD_DIM, device="cuda").to(torch.bfloat16)
    log_g = torch.full((batch, HEADS, 1), -0.001, device="cuda")
    state = DecodeState.start(k[:, :, :0], v[:, :, :0], log_g[:, :, :0])
    size = state.s.nbytes + state.z.nbytes

    def step() -> None:
        power_attention_step(q, k, v, log_g, state, inplace=True)

    chunk = state.k.shape[2]
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(chunk):
            step()
    print(f"\nDecoding, {batch} sequences, {HEADS} heads: the state is {size / 2**20:.0f} MiB.\n")
    print("| tokens before | ms a token | TB/s | of a copy |\n|---|---|---|---|")
    # A chunk of steps reads the state once each and writes it once.
    moved = size * (chunk + 1) / chunk
    seen = 1
    for tokens in (1024, 65_536):
        while seen < tokens:
            graph.replay()
            seen += chunk
        time = do_bench(graph.replay, return_mode="median") / chunk
        rate = moved / time / 1e9
        print(f"| {tokens} | {time:.3f} | {rate:.2f} | {rate / copy:.0%} |", flush=True)


def other_sizes(tokens: int = 32_768) -> None:
    """Print the attention form beside the chunked form at head size 128 and in degree 4."""
    cases = {"head size 128, degree 2": (128, 2), "16, degree 4": (16, 4), "32, degree 4": (32, 4)}
    lengths = (2048, 8192, 32_768)
    print(
        f"\nOther sizes: forward / forward + backward in ms, {tokens} tokens in all, 12 heads.\n"
    )
    print("| | " + " | ".join(f"T {n}" for n in lengths) + " |")
    print("|---" * (len(lengths) + 1) + "|")
    for case, (head_dim, deg) in cases.items():
        for name, chunk in (("attention form", tokens), ("chunk 512", 512), ("chunk 2048", 2048)):
            cells = []
            for length in lengths:
                attention = partial(power_attention, deg=deg, chunk_size=chunk)
                *args, grad = inputs(tokens // length, HEADS, length, head_dim=head_dim)
                check(attention, args, deg)
                forward, both, _ = measure(attention, args, grad)
                cells.append(f"{forward:.2f} / {both:.2f}")
            print(f"| {case}, {name} | " + " | ".join(cells) + " |", flush=True)


def check(attention: Attention, args: list[Tensor], deg: int) -> None:
    """Raise unless the output of the first head, on 2,048 tokens, is that of float64."""
    few = [x[:1, :1, :2048].detach() for x in args]
    want = quadratic(*(x.double() for x in few), deg=deg)[0]
    error = (attention(*few).double() - want).norm() / want.norm()
    if not error < 0.02:
        raise AssertionError(f"degree {deg}, {list(args[0].shape)}: relative error {error:.1e}")


def first_call() -> None:
    """Print the seconds of the first forward and backward in a process with an empty cache."""
    code = (
        "import time, torch; from benchmarks.power import inputs; from power import "
        "power_attention as f; *a, g = inputs(1, 12, 8192); torch.cuda.synchronize(); "
        "t = time.perf_counter(); f(*a).backward(g); torch.cuda.synchronize(); "
        "print(time.perf_counter() - t)"
    )
    with tempfile.TemporaryDirectory() as cache:
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "TRITON_CACHE_DIR": cache},
        )
    print(f"\nFirst call, nothing compiled before: {float(run.stdout):.1f} s.")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks power", description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument(
        "--retention",
        action=argparse.BooleanOptionalAction,
        default=find_spec("retention") is not None,
        help="whether it takes part; it tunes itself for minutes first",
    )
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.exit(1, "this benchmark needs a CUDA device\n")
    print(
        f"{', '.join(f'{name} {value}' for name, value in machine('cuda').items())}; bf16, "
        f"{HEADS} heads of {HEAD_DIM}, degree 2, gated."
    )
    error(options.retention)
    decoding()
    speed(tuple(options.lengths), options.retention)
    other_sizes()
    first_call()
