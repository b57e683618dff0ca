"""Every score_mod beside plain causal FlexAttention, on one GPU, in one run.

Prints the tables of ``RESULTS.md``: forward and backward of a training step at 4096 tokens, over
lengths, with grouped queries; two-branch attention in its two forms, from unrotated queries and
keys; decoding with a long cache; and the seconds that compiling takes.
Each case is first checked against dense float64 where that fits. Kernels are compiled by many
processes at once, and timed one at a time.
"""

import argparse
import math
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from tqdm import tqdm

import score_mods as sm
from benchmarks.machine import machine
from score_mods.kernel_options import flash_is_installed
from score_mods.modules import Learnable

HEADS = 16
BASELINE = "plain"
ACCURACY = 1e-2  # relative RMS error against float64; bf16 has some 3e-3


@dataclass(frozen=True)
class Case:
    """One kernel to compile and time; `decode` has one query and no backward."""

    name: str
    D: int
    T: int
    B: int
    kv_heads: int = HEADS
    decode: bool = False


def as_written(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Scale-invariant attention as its paper writes it."""
    log_x = torch.log1p((q_idx - kv_idx).abs().float() / 10)
    return torch.sqrt(1 + 2 * log_x) * score - 2 * log_x


def score_mods() -> dict[str, tuple[Callable[..., Tensor] | None, str]]:
    """Name to score_mod, and its kernel options: "own" of FlexAttention, "ours" or "FLASH"."""
    learned = Learnable(sm.scale_invariant, tau=torch.full((HEADS,), 10.0)).to("cuda")
    log_g = torch.full((4, HEADS, 4096), -0.01, device="cuda", requires_grad=True)
    units = [(32,), (32,), (HEADS, 32), (HEADS,)]
    network = [torch.full(shape, 0.1, device="cuda") for shape in units]
    flash = {
        "plain, FLASH": (None, "FLASH"),
        "scale_invariant, FLASH": (sm.scale_invariant(), "FLASH"),
        "alibi, FLASH": (sm.alibi(HEADS), "FLASH"),
    }
    return {
        BASELINE: (None, "own"),
        "plain, our options": (None, "ours"),
        "scale_invariant": (sm.scale_invariant(), "ours"),
        "as written": (as_written, "own"),
        "as written, our options": (as_written, "ours"),
        **(flash if flash_is_installed() else {}),
        "scale_invariant, learnable tau": (learned(spread=True), "ours"),
        "scale_invariant_grid": (sm.scale_invariant_grid((64, 64)), "ours"),
        "alibi": (sm.alibi(HEADS), "ours"),
        "logn": (sm.logn(), "ours"),
        "ssmax": (sm.ssmax(0.43), "ours"),
        "forgetting_gate, learnable": (sm.forgetting_gate(log_g), "ours"),
        "fire, 32 units": (sm.fire(*network), "ours"),
        "softcap": (sm.softcap(30.0), "ours"),
        "softcap, approx": (sm.softcap(30.0, approx=True), "ours"),
    }


WINDOW = 1024
SCHEMES = {
    "rerope": partial(sm.rerope, window=WINDOW),
    "leaky_rerope": partial(sm.leaky_rerope, window=WINDOW, factor=16.0),
    "self_extend": partial(sm.self_extend, window=WINDOW, group=8),
    "lm_infinite": partial(sm.lm_infinite, window=WINDOW),
    "streaming_llm": partial(sm.streaming_llm, window=WINDOW),
}
TWO_BRANCH = {
    f"{name}, {form}": (scheme, form)
    for name, scheme in SCHEMES.items()
    for form in ("merge", "single")
}
SDPA = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}


def over_lengths() -> list[str]:
    """The score_mods that are timed at other lengths too, and with grouped queries."""
    names = (BASELINE, "scale_invariant", "plain, FLASH", "scale_invariant, FLASH")
    return [name for name in names if name in score_mods()]


def cases() -> list[Case]:
    """All of them, dearest to compile first."""
    found = []
    for D in (64, 128):
        found += [Case(name, D, 4096, 4) for name in (*TWO_BRANCH, *score_mods(), *SDPA)]
        found += [Case(name, D, 16_384, 1) for name in TWO_BRANCH]
        for T, B in ((1024, 16), (16_384, 1), (65_536, 1)):
            found += [Case(name, D, T, B) for name in (*over_lengths(), *SDPA)]
        # flash-attn-4 gives wrong results for a score_mod with grouped queries.
        grouped = [name for name in over_lengths() if name != "scale_invariant, FLASH"]
        found += [Case(name, D, 4096, 4, kv_heads=4) for name in grouped]
        for name in (BASELINE, "scale_invariant", "as written"):
            found.append(Case(name, D, 65_536, 8, decode=True))
    return sorted(found, key=lambda case: case.name in SDPA)


def function_of(case: Case, compiled: Callable[..., Any]) -> Callable[..., Tensor]:
    """Attention of (q, k, v), all that does not belong to a step made beforehand."""
    grouped = case.kv_heads != HEADS
    if case.name in TWO_BRANCH:
        scheme, form = TWO_BRANCH[case.name]
        return partial(scheme(sm.rope(case.D)), form=form)
    if case.name in SDPA:

        def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(SDPA[case.name]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

        return sdpa
    mod, kind = score_mods()[case.name]
    if mod is not None:
        mod = sm.for_flash(mod) if kind == "FLASH" else mod
        mod = sm.to_device(sm.with_offset(mod, case.T - 1) if case.decode else mod, "cuda")
    if case.decode:
        return partial(compiled, score_mod=mod)
    ours = sm.kernel_options(
        case.D,
        torch.bfloat16,
        score_mod=bool(mod),
        learns=getattr(mod, "learns", False),
        contiguous=True,
    )
    return partial(
        compiled,
        score_mod=mod,
        block_mask=sm.create_block_mask(sm.causal, None, None, case.T, case.T, "cuda"),
        enable_gqa=grouped,
        kernel_options={"own": None, "ours": ours, "FLASH": {"BACKEND": "FLASH"}}[kind],
    )


def inputs(case: Case) -> list[Tensor]:
    """Queries, keys and values that require gradients unless decoding, and an output gradient."""
    torch.manual_seed(0)
    shapes = [(case.B, heads, case.T, case.D) for heads in (HEADS, case.kv_heads, case.kv_heads)]
    if case.decode:
        shapes[0] = (case.B, HEADS, 1, case.D)
    qkv = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    return [*(x.requires_grad_(not case.decode) for x in qkv), torch.randn_like(qkv[0])]


def step(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Any:
    out = function(q, k, v)
    return (out, *torch.autograd.grad(out, (q, k, v), grad)) if q.requires_grad else (out,)


def of_first_heads(case: Case) -> Callable[..., Tensor] | None:
    """The score_mod of a case in a form that may be called for fewer heads than it is made for."""
    mod = score_mods().get(case.name, (None,))[0]
    if mod is None:
        return None
    if case.decode:
        mod = sm.with_offset(mod, case.T - 1)
    return lambda score, b, h, q_idx, kv_idx: mod(score, b, h, q_idx, kv_idx)


def check(case: Case, results: tuple[Tensor, ...], *given: Tensor) -> None:
    """Hold the first group of heads to dense float64, where its T² scores fit."""
    if case.T > 4096 and not case.decode:
        return
    group = HEADS // case.kv_heads
    first = [x[:1, : (group if x.shape[1] == HEADS else 1)].detach().double() for x in given]
    first[:3] = [x.requires_grad_(not case.decode) for x in first[:3]]
    if case.name in TWO_BRANCH:
        dense = partial(TWO_BRANCH[case.name][0](sm.rope(case.D)), impl="dense")
    else:
        mask = None if case.decode else sm.causal
        dense = partial(sm.dense_attention, score_mod=of_first_heads(case), mask_mod=mask)
    for got, want in zip(results, step(dense, *first), strict=True):
        got = got[:1, : want.shape[1]].double()
        error = ((got - want).norm() / want.norm()).item()
        if not error < ACCURACY:
            raise ValueError(f"{case}: relative error {error:.1e} against float64")


def median(function: Callable[[], Any]) -> float:
    """Milliseconds on the GPU, with the level-2 cache emptied and the launches made ahead."""

    def ahead() -> None:
        torch.cuda._sleep(3_000_000)  # cycles, while which the host gets ahead of the GPU
        start.record()
        function()
        end.record()

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cache = torch.empty(2**28, dtype=torch.int8, device="cuda")
    times: list[float] = []
    while len(times) < 10 or (sum(times) < 120 and len(times) < 100):
        cache.zero_()
        ahead()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def measure(case: Case, function: Callable[..., Tensor]) -> tuple[float, float, float]:
    """Milliseconds forward and backward, and the peak of a step above its inputs in MiB."""
    q, k, v, grad = inputs(case)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(function, q, k, v, grad)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    forward = median(lambda: function(q, k, v))
    if case.decode:
        return forward, math.nan, peak
    out = function(q, k, v)
    backward = median(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    return forward, backward, peak


def compiled_flex_attention() -> Callable[..., Any]:
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # else a graph's backward runs only once
    torch._dynamo.config.specialize_float = True
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


def worker(mine: list[Case], compiled_all: Any, turn: Any, results: Any) -> None:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        compiled = compiled_flex_attention()
        functions = {}
        for case in mine:
            try:
                functions[case], given = function_of(case, compiled), inputs(case)
                check(case, step(functions[case], *given), *given)
            except Exception as error:
                functions[case] = failed = repr(error)[:300]
                print(f"{case}: {failed}", flush=True)
            given = None
        torch.cuda.empty_cache()
        compiled_all.wait(timeout=1200)
        for case, function in functions.items():
            with turn:
                results.put(
                    (case, function if isinstance(function, str) else measure(case, function))
                )
                torch.cuda.empty_cache()


def run(todo: list[Case], processes: int) -> dict[Case, Any]:
    """The measurement of every case, or what went wrong."""
    context = multiprocessing.get_context("spawn")
    compiled_all, turn = context.Barrier(processes), context.Lock()
    results = context.Queue()
    workers = [
        context.Process(target=worker, args=(todo[i::processes], compiled_all, turn, results))
        for i in range(processes)
    ]
    for process in workers:
        process.start()
    found = {}
    for _ in tqdm(todo, unit="case"):
        case, result = results.get(timeout=1200)
        found[case] = result
        tqdm.write(f"{case}: {result}", file=sys.stderr)
    for process in workers:
        process.join()
    return found


def compile_seconds(name: str, D: int, seconds: Any) -> None:
    """Seconds to compile forward and backward, with nothing cached and Inductor warmed up."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        compiled = compiled_flex_attention()
        for case in (Case(BASELINE, 32, 256, 1), Case(name, D, 4096, 4)):
            given, function = inputs(case), function_of(case, compiled)
            start = time.perf_counter()
            step(function, *given)
            torch.cuda.synchronize()
            elapsed = time.perf_counter() - start
        seconds.put((name, D, elapsed))


def compile_times() -> dict[tuple[str, int], float]:
    context = multiprocessing.get_context("spawn")
    seconds = context.Queue()
    arguments = [(name, D, seconds) for name in (BASELINE, "scale_invariant") for D in (64, 128)]
    processes = [context.Process(target=compile_seconds, args=args) for args in arguments]
    for process in processes:
        process.start()
    found = [seconds.get(timeout=600) for _ in arguments]
    return {(name, D): elapsed for name, D, elapsed in found}


def row(case: Case, found: dict[Case, Any], label: str) -> str:
    base = found.get(Case(BASELINE, case.D, case.T, case.B, case.kv_heads, case.decode), "")
    mine = found[case]
    if isinstance(mine, str) or isinstance(base, str):
        return f"| {label} | failed |"
    times = [mine[0]] if case.decode else [mine[0], mine[1], mine[0] + mine[1]]
    to = [base[0]] if case.decode else [base[0], base[1], base[0] + base[1]]
    cells = [f"{t:.3f} ({t / b:.2f})" for t, b in zip(times, to, strict=True)]
    return f"| {label} | {' | '.join(cells)} | {mine[2]:.0f} |"


def table(title: str, head: str, rows: list[str]) -> str:
    columns = head.count("|") + 1
    rule = "|".join([" --- "] + [" ---: "] * (columns - 1))
    return "\n".join([f"\n{title}\n", f"| {head} |", f"|{rule}|", *rows])


def tables(found: dict[Case, Any], compiling: dict[tuple[str, int], float]) -> str:
    head = "forward | backward | both | peak MiB"
    parts = []
    for D in (64, 128):
        of = [case for case in found if case.D == D]
        two = sorted((c for c in of if c.name in TWO_BRANCH), key=lambda c: (c.T, c.name))
        square = [case for case in of if not case.decode and case.kv_heads == HEADS]
        order = [*score_mods(), *SDPA]
        rank = {name: i for i, name in enumerate(order)}
        at_4k = [c for c in square if c.T == 4096 and c.name in rank]
        at_4k.sort(key=lambda c: rank[c.name])
        by_length = sorted(
            (c for c in square if c.name in (*over_lengths(), *SDPA)),
            key=lambda c: (c.T, rank[c.name]),
        )
        by_rank = sorted((c for c in of if c.name in rank), key=lambda c: rank[c.name])
        grouped = [c for c in by_rank if c.kv_heads != HEADS]
        decoding = [c for c in by_rank if c.decode]
        parts += [
            table(
                f"Head size {D}, B 4, H 16, T 4096: ms (ratio to plain)",
                f"mechanism | {head}",
                [row(c, found, c.name) for c in at_4k],
            ),
            table(
                f"Head size {D}, H 16, B 16, 4, 1, 1 by length",
                f"T, mechanism | {head}",
                [row(c, found, f"{c.T}, {c.name}") for c in by_length],
            ),
            table(
                f"Head size {D}, H 16, two branches with a window of {WINDOW}, B 4, 1 by length",
                f"T, mechanism | {head}",
                [row(c, found, f"{c.T}, {c.name}") for c in two],
            ),
            table(
                f"Head size {D}, B 4, T 4096, 16 query heads for 4 of keys",
                f"mechanism | {head}",
                [row(c, found, c.name) for c in grouped],
            ),
            table(
                f"Head size {D}, B 8, H 16, one query, cache of 65536",
                "mechanism | forward | peak MiB",
                [row(c, found, c.name) for c in decoding],
            ),
        ]
    if not compiling:
        return "\n".join(parts)
    rows = [
        f"| {D} | {compiling[BASELINE, D]:.1f} | {compiling['scale_invariant', D]:.1f} |"
        for D in (64, 128)
    ]
    parts.append(table("Seconds to compile", "head size | plain | scale_invariant", rows))
    return "\n".join(parts)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks score_mods", description=__doc__)
    parser.add_argument(
        "--only", metavar="REGEX", default="", help="time these mechanisms and plain alone"
    )
    parser.add_argument("--processes", type=int, default=min(15, os.cpu_count() or 1))
    options = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error(f"--processes must be at least 1, got {options.processes}")
    try:
        only = re.compile(options.only)
    except re.error as error:
        parser.error(f"--only must be a regular expression, got {options.only!r}: {error}")
    if not torch.cuda.is_available():
        parser.exit(1, "this benchmark needs a CUDA device\n")
    print(f"{', '.join(f'{name} {value}' for name, value in machine('cuda').items())}; bf16.")
    compiling = {} if options.only else compile_times()
    chosen = [case for case in cases() if case.name == BASELINE or only.search(case.name)]
    found = run(chosen, options.processes)
    print(tables(found, compiling))
