"""The kernels against the float64 reference: every feature, every gradient, and seeded bugs.

On a GPU the cases run there, in fp32 and in half precision. Elsewhere one test runs this file
again in Triton's interpreter, in a process of its own: fp32, with bugs planted in the sources.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from power import DecodeState, PowerState, power_attention, power_attention_step, state_size

kernels = pytest.importorskip(
    "power.kernels", reason="the kernels need Triton", exc_type=ImportError
)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
NAMES = ("out", "s", "z", "dq", "dk", "dv", "dlog_g", "ds0", "dz0")

here = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="needs a GPU or the interpreter, in which test_in_the_interpreter runs it",
)
planted = pytest.mark.skipif(not INTERPRETED, reason="bugs are planted in the interpreter only")
on_gpu = pytest.mark.skipif(
    INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device"
)


@pytest.mark.interpret
@pytest.mark.skipif(INTERPRETED, reason="is the process that this test starts")
def test_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore::RuntimeWarning", __file__]
    run = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )
    assert run.returncode == 0, run.stdout


def problem(
    draw,
    batch=1,
    heads=2,
    kv_heads=2,
    length=100,
    head_dim=32,
    value_dim=32,
    *,
    gate=2.0,
    state=False,
    packed=None,
    dtype=torch.float32,
    deg=2,
):
    """Random inputs, initial state and cotangents of the outputs, on the device."""
    q, k, v, log_g = draw(batch, heads, kv_heads, length, head_dim, value_dim, dtype)
    generator = torch.Generator().manual_seed(1)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(dtype)

    if gate is not None:
        # Gates of sigmoid(gate + normal): draw's are around 2.
        log_g = torch.nn.functional.logsigmoid(log_g.exp().logit() + gate - 2)
    inputs = [q, k, v, None if gate is None else log_g]
    sequences = batch if packed is None else len(packed) - 1
    shape = (sequences, kv_heads, state_size(head_dim, deg))
    cotangents = [normal(*q.shape[:3], value_dim, dtype=dtype), None, None]
    if state:
        # Of many tokens, as a state is; the rest is what no query meets.
        _, past = power_attention(
            *(
                normal(sequences, kv_heads, 50, n).double()
                for n in (head_dim, head_dim, value_dim)
            ),
            deg=deg,
            return_state=True,
            impl="reference",
        )
        inputs += [past.s.float() + normal(*shape, value_dim), past.z.float() + normal(*shape)]
        cotangents[1:] = [0.1 * normal(*shape, value_dim), 0.1 * normal(*shape)]
    else:
        inputs += [None, None]
    cut = None if packed is None else torch.tensor(packed, dtype=torch.int32, device=DEVICE)
    return ([x if x is None else x.to(DEVICE) for x in xs] for xs in (inputs, cotangents)), cut


def by_kernels(inputs, cotangents, cut, deg, chunk_size):
    scale = inputs[0].shape[-1] ** -0.5
    with_state = inputs[4] is not None
    out, s, z, saved = kernels.forward(*inputs, cut, deg, scale, chunk_size, with_state)
    dout, ds, dz = cotangents
    grads = kernels.backward(dout, ds, dz, *inputs, cut, out, saved, deg, scale, chunk_size)
    q, k, v, log_g, s0, _ = inputs
    want = kernels.saved_shapes(
        q, k, v, log_g, s0 is not None, cut, deg, chunk_size, s is not None
    )
    assert [(tuple(x.shape), x.dtype) for x in saved] == want
    return dict(zip(NAMES, (out, s, z, *grads), strict=True))


def by_reference(inputs, cotangents, cut, deg):
    """The same in float64, by the attention form."""
    exact = [x if x is None else x.double().requires_grad_() for x in inputs]
    q, k, v, log_g, s0, z0 = exact
    results = power_attention(
        *(q, k, v, log_g),
        deg=deg,
        chunk_size=q.shape[2],
        initial_state=None if s0 is None else PowerState(s0, z0),
        return_state=s0 is not None,
        cu_seqlens=cut,
        impl="reference",
    )
    out, (s, z) = (results, (None, None)) if s0 is None else results
    pairs = [
        (x, dx.double())
        for x, dx in zip((out, s, z), cotangents, strict=True)
        if x is not None and dx is not None
    ]
    leaves = [x for x in exact if x is not None]
    grads = iter(torch.autograd.grad([x for x, _ in pairs], leaves, [dx for _, dx in pairs]))
    return dict(
        zip(NAMES, (out, s, z, *(x if x is None else next(grads) for x in exact)), strict=True)
    )


def errors(got, want):
    """Relative RMS error of each result that there is."""
    assert all((got[name] is None) == (want[name] is None) for name in NAMES)
    return {
        name: ((got[name].double() - want[name]).norm() / want[name].norm()).item()
        for name in NAMES
        if want[name] is not None
    }


CASES = {
    "attention": ({}, 2, None),
    "chunks": ({}, 2, 32),
    "degree 4": ({"head_dim": 16}, 4, None),
    "degree 4, packed with states": (
        {"kv_heads": 1, "head_dim": 16, "value_dim": 16, "length": 36, "state": True}
        | {"packed": [0, 0, 20, 36]},
        4,
        16,
    ),
    "degree 4, a state out of one chunk": (
        {"heads": 1, "kv_heads": 1, "head_dim": 16, "length": 20, "state": True, "gate": None},
        4,
        None,
    ),
    "degree 6, no gates": ({"head_dim": 16, "gate": None}, 6, None),
    "grouped heads, wide values": ({"heads": 4, "head_dim": 16, "length": 70}, 2, 48),
    "one key head, no gates": ({"kv_heads": 1, "value_dim": 16, "gate": None}, 2, 32),
    "strong gates": ({"kv_heads": 1, "head_dim": 16, "gate": -2.0}, 2, 32),
    "states in and out": ({"kv_heads": 1, "value_dim": 16, "length": 97, "state": True}, 2, 48),
    "one chunk with states": ({"length": 63, "state": True, "gate": None}, 2, None),
    "packed": ({"heads": 1, "kv_heads": 1, "packed": [0, 40, 40, 41, 100]}, 2, 32),
    "packed with states": (
        {"heads": 1, "kv_heads": 1, "head_dim": 16, "packed": [0, 0, 70, 100], "state": True},
        2,
        32,
    ),
    "seven tokens": ({"batch": 2, "length": 7}, 2, None),
}


@here
@pytest.mark.parametrize("name", CASES)
def test_everything_against_the_reference(name, draw):
    sizes, deg, chunk_size = CASES[name]
    (inputs, cotangents), cut = problem(draw, **sizes, deg=deg)
    got = by_kernels(inputs, cotangents, cut, deg, chunk_size)
    off = errors(got, by_reference(inputs, cotangents, cut, deg))
    assert max(off.values()) < 1e-5, off


@here
def test_one_token(draw):
    (inputs, cotangents), cut = problem(draw, length=1)
    got = by_kernels(inputs, cotangents, cut, 2, None)
    torch.testing.assert_close(got["out"], inputs[2])
    torch.testing.assert_close(got["dv"], cotangents[0])
    for name in ("dq", "dk", "dlog_g"):
        torch.testing.assert_close(got[name], torch.zeros_like(got[name]), atol=1e-5, rtol=0)


@here
@pytest.mark.parametrize("chunk_size", [None, 32])
def test_queries_of_zeros(chunk_size, draw):
    (inputs, cotangents), cut = problem(draw)
    inputs[0][:, :, 60:] = 0
    got = by_kernels(inputs, cotangents, cut, 2, chunk_size)
    assert (got["out"][:, :, 60:] == 0).all()
    assert (got["dq"][:, :, 60:] == 0).all()
    want = by_reference(inputs, cotangents, cut, 2)
    off = {n: errors(got, want)[n] for n in ("out", "dk", "dv", "dlog_g")}
    assert max(off.values()) < 1e-5, off


@here
@pytest.mark.parametrize("chunk_size", [None, 32])
def test_closed_gates(chunk_size, draw):
    (inputs, cotangents), cut = problem(draw, head_dim=16, state=True, length=70)
    inputs[3][:, :, [12, 40]] = -1e9
    leaves = [x.clone().requires_grad_() for x in inputs]
    out, (s, z) = power_attention(
        *leaves[:4],
        chunk_size=chunk_size,
        initial_state=PowerState(*leaves[4:]),
        return_state=True,
        impl="triton",
    )
    grads = torch.autograd.grad((out, s, z), leaves, cotangents)
    got = dict(zip(NAMES, (out, s, z, *grads), strict=True))
    off = errors(got, by_reference(inputs, cotangents, cut, 2))
    assert max(off.values()) < 1e-4, off


# A line of a source, what to make of it, which results must show it, and in which case.
BUGS = {
    "dropped diagonal": (
        "forward",
        "t[:, None] >= s[None, :]",
        "t[:, None] > s[None, :]",
        ("out",),
    ),
    "wrong tile weight": (
        "forward",
        "tl.where(i_a == i_b, 1.0, 2.0)",
        "tl.where(i_a == i_b, 1.0, 1.0)",
        ("out",),
    ),
    "gate of the row before": (
        "forward",
        "b_gt = tl.load(p_g + t,",
        "b_gt = tl.load(p_g + tl.maximum(t - 1, start),",
        ("out",),
    ),
    "undiscounted keys": ("states", "b_k * b_f[:, None]", "b_k", ("out",)),
    "gate of the next chunk": (
        "states",
        "end - 1))\n        acc = acc * decay + b_u0",
        "tl.minimum(end + 31, T - 1)))\n        acc = acc * decay + b_u0",
        ("out",),
    ),
    "gate of the next chunk, backward": (
        "states",
        "end - 1))\n        acc = acc * decay + b_d0",
        "tl.minimum(end + 31, T - 1)))\n        acc = acc * decay + b_d0",
        ("dk", "dv", "dlog_g"),
    ),
    "gate gradient shifted by a token": (
        "states",
        "total + tl.cumsum(b_col, 0) - b_col",
        "total + tl.cumsum(b_col, 0)",
        ("dlog_g",),
    ),
    "flow without multiplicities": ("states", "acc * b_w *", "acc *", ("dlog_g",)),
    "no gradient of the normaliser": ("backward", "- b_delta[:, None]", "", ("dq",)),
    "dropped diagonal, backward": (
        "backward",
        "t[None, :] >= s[:, None]",
        "t[None, :] > s[:, None]",
        ("dk", "dv"),
    ),
    "tile not mirrored": ("tiles", "tl.where(a <= b, above, below)", "above", ("dq", "dk")),
}


def plant(monkeypatch, directory, file, old, new):
    """Load the kernels with one line changed, and have them launched."""
    source = Path(kernels.__file__).parent
    for name in ("tiles", "forward", "states", "backward", "quartic", "step"):
        text = (source / f"{name}.py").read_text()
        if name == file:
            assert old in text
            text = text.replace(old, new)
        path = directory / f"planted_{name}.py"
        path.write_text(text.replace("power.kernels.", "planted_"))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        for kernel in vars(module):
            if kernel.endswith("_kernel"):
                monkeypatch.setattr(f"power.kernels.launch.{kernel}", getattr(module, kernel))


@here
@planted
@pytest.mark.parametrize("bug", [None, *BUGS])
def test_a_planted_bug_shows(bug, draw, monkeypatch, tmp_path):
    file, old, new, seen = (None, None, None, ()) if bug is None else BUGS[bug]
    plant(monkeypatch, tmp_path, file, old, new)
    (inputs, cotangents), cut = problem(draw, 1, 1, 1, 70, 32, 16)
    got = by_kernels(inputs, cotangents, cut, 2, 32)
    off = errors(got, by_reference(inputs, cotangents, cut, 2))
    assert {name for name in seen if off[name] < 1e-2} == set(), off
    if bug is None:
        assert max(off.values()) < 1e-5, off


@here
@planted
@pytest.mark.parametrize(
    ("old", "new", "seen"),
    [
        ("x_ab * tl.load(p_orders + tile)", "x_ab", ("out",)),
        ("- b_delta[:, None] * b_z[None, :]", "", ("dq",)),
        ("tl.load(p_tile + 3), M, K)", "tl.load(p_tile + 2), M, K)", ("dq", "dk")),
        ("tl.sum(acc_k * b_k, 1) / 4", "tl.sum(acc_k * b_k, 1)", ("dlog_g",)),
    ],
)
def test_a_bug_planted_in_degree_four_shows(old, new, seen, draw, monkeypatch, tmp_path):
    plant(monkeypatch, tmp_path, "quartic", old, new)
    (inputs, cotangents), cut = problem(draw, 1, 1, 1, 32, 16, 16, deg=4)
    got = by_kernels(inputs, cotangents, cut, 4, 16)
    off = errors(got, by_reference(inputs, cotangents, cut, 4))
    assert {name for name in seen if off[name] < 1e-2} == set(), off


def decoded(inputs, deg):
    """Return the outputs of steps of three tokens, the chunk of eight folded several times."""
    q, k, v, log_g, *_ = inputs
    state = DecodeState.start(k[:, :, :0], v[:, :, :0], deg=deg, chunk_size=8)
    outs = []
    for t in range(0, q.shape[2], 3):
        tokens = (None if x is None else x[:, :, t : t + 3] for x in (q, k, v, log_g))
        out, state = power_attention_step(*tokens, state, deg=deg, impl="triton")
        outs.append(out)
    return torch.cat(outs, 2)


@here
@pytest.mark.parametrize(
    ("sizes", "deg"),
    [
        ({"batch": 2, "heads": 4, "value_dim": 16}, 2),
        ({"head_dim": 16, "gate": None}, 4),
    ],
)
def test_steps_are_the_full_pass(sizes, deg, draw):
    (inputs, cotangents), cut = problem(draw, length=29, **sizes)
    want = by_reference(inputs, cotangents, cut, deg)["out"]
    got = decoded(inputs, deg).double()
    assert (got - want).norm() / want.norm() < 1e-5


@here
@planted
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("c == C - 1, 1.0, b_f", "c == C - 1, 0.0, b_f"),
        ("b_s *= tl.exp(total)", "b_s *= 1.0"),
        ("b_phi = b_w *", "b_phi ="),
        ("w = power(", "w = 0.9 * power("),
    ],
)
def test_a_bug_planted_in_the_step_shows(old, new, draw, monkeypatch, tmp_path):
    plant(monkeypatch, tmp_path, "step", old, new)
    (inputs, cotangents), cut = problem(draw, length=29)
    want = by_reference(inputs, cotangents, cut, 2)["out"]
    assert (decoded(inputs, 2).double() - want).norm() / want.norm() > 1e-3


def plain(inputs, cotangents, chunk_size):
    """The formula as it stands, in the inputs' own precision, by autograd."""
    leaves = [x.detach().requires_grad_() for x in inputs[:4]]
    q, k, v, log_g = leaves
    group = q.shape[1] // k.shape[1]
    k, v, total = (x.repeat_interleave(group, 1) for x in (k, v, log_g.cumsum(-1)))
    decay = (total[..., :, None] - total[..., None, :]).clamp(max=0).exp()
    weights = ((q * q.shape[-1] ** -0.5 @ k.mT).square() * decay.to(q.dtype)).tril()
    out = (weights @ v) / weights.sum(-1, keepdim=True)
    grads = torch.autograd.grad(out, leaves, cotangents[0])
    return dict(zip(NAMES, (out, None, None, *grads, None, None), strict=True))


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 64), (32, 32), (64, 64), (128, 128)])
@pytest.mark.parametrize(("chunk_size", "gate"), [(None, 7.0), (128, 7.0), (256, -2.0)])
def test_half_precision_is_as_exact_as_the_plain_formula(
    chunk_size, gate, head_dim, value_dim, dtype, draw
):
    sizes = (2, 4, 2, 1000, head_dim, value_dim)
    (inputs, cotangents), cut = problem(draw, *sizes, gate=gate, dtype=dtype)
    want = by_reference(inputs, cotangents, cut, 2)
    off = errors(by_kernels(inputs, cotangents, cut, 2, chunk_size), want)
    limit = errors(plain(inputs, cotangents, chunk_size), want)
    # What passes between chunks is rounded, and all gates of a chunk take part of it.
    times = {n: 2.5 if n == "dlog_g" and chunk_size else 2 for n in off}
    assert {n: (off[n], limit[n]) for n in off if off[n] > times[n] * limit[n]} == {}


@on_gpu
@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31():
    """The last batch rows of 2.2 billion numbers are those of a call of their own."""
    torch.manual_seed(0)
    shape = (2100, 1, 8192, 128)
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    with torch.no_grad():
        out = power_attention(x, x, x, chunk_size=4096)[-1:]
        want = power_attention(*[x[-1:].clone()] * 3, chunk_size=4096)
    assert torch.equal(out, want)
