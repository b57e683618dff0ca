"""What every score_mod must do, against a construction from its paper that shares no code with it.

The files cases_*.py beside this one hold, by the names of the catalogue,

- `CASES`: for each score_mod a list of (mod, pair), where pair is a function of (score, head,
  query, key) for one pair; the first mod of a list is for 6 heads or any number of them;
- `BOUNDED`: names whose positions are bounded by a shape or a table;
- `LEARNABLE`: functions of a list of four parameters that are learned;
- `NEEDED`: arguments that the factory needs besides a learned one;
- `BAD`: (call, error, message).

Masks and rotary schemes have their cases in test_masks.py and test_rotary.py. A mechanism without
a case fails.
"""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import score_mods as sm

H, D = 6, 32


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FILES = [load(path) for path in sorted(Path(__file__).parent.glob("cases_*.py"))]


def gathered(name):
    """The dicts of that name of all files, in one."""
    return {key: value for file in FILES for key, value in getattr(file, name, {}).items()}


CASES, LEARNABLE, NEEDED = gathered("CASES"), gathered("LEARNABLE"), gathered("NEEDED")
BOUNDED = {name for file in FILES for name in getattr(file, "BOUNDED", ())}
BAD = [case for file in FILES for case in getattr(file, "BAD", ())]
ENTRIES = {m.name: m for m in sm.catalogue}
FLAT = [
    pytest.param(*case, id=f"{name}-{i}")
    for name, cases in CASES.items()
    for i, case in enumerate(cases)
]
FIRST = [pytest.param(name, cases[0][0], id=name) for name, cases in CASES.items()]


def by_pairs(pair, score):
    """`pair` applied to every entry of a (B, H, T_q, T) array."""
    out = np.empty_like(score)
    for (b, h, q, k), s in np.ndenumerate(score):
        out[b, h, q, k] = pair(s, h, q, k)
    return out


def softmax_attention(score, v, visible):
    score = np.where(visible, score, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True) @ v


def qkv(T, dtype=torch.float64, heads=H, size=D):
    return [torch.randn(1, heads, T, size).to(dtype) for _ in range(3)]


def test_every_score_mod_of_the_catalogue_has_a_case():
    assert set(CASES) == {m.name for m in sm.catalogue if m.kind == "score_mod"}


@pytest.mark.parametrize("name", list(ENTRIES))
def test_examples_of_the_catalogue_are_made_by_their_factories(name):
    made = eval(ENTRIES[name].example, {**vars(sm), "torch": torch, "T": 64})
    assert callable(made) or isinstance(made, (tuple, torch.Tensor))
    assert ENTRIES[name].example.startswith(name)


@pytest.mark.parametrize(("mod", "pair"), FLAT)
@pytest.mark.parametrize("T", [1, 7, 63])
def test_equals_its_paper(mod, pair, T):
    heads = mod.num_heads or H
    q, k, v = qkv(T, heads=heads)
    s = (q @ k.mT / D**0.5).numpy()
    expected = softmax_attention(by_pairs(pair, s), v.numpy(), np.tri(T, dtype=bool))
    out = sm.dense_attention(q, k, v, mod, sm.causal)
    np.testing.assert_allclose(out.numpy(), expected, atol=1e-10)


@pytest.mark.parametrize(("mod", "pair"), FLAT)
def test_a_wrong_constant_would_be_seen(mod, pair):
    """The twin: a bias off by 1e-6 per token of distance is more than the tolerance above."""
    T = 61
    q, k, v = qkv(T, heads=mod.num_heads or H)
    broken = sm.compose(mod, lambda s, b, h, i, j: s - 1e-6 * (i - j))
    difference = sm.dense_attention(q, k, v, mod, sm.causal) - sm.dense_attention(
        q, k, v, broken, sm.causal
    )
    assert difference.abs().max() > 1e-7


@pytest.mark.parametrize(("mod", "pair"), FLAT)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_values_are_finite_and_wide_on_both_sides(mod, pair, dtype):
    T = 257
    index = torch.arange(T)
    heads = torch.arange(mod.num_heads or H)[:, None, None]
    score = torch.randn(len(heads), T, T).to(dtype)
    out = mod(score, torch.tensor(0), heads, index[:, None], index)
    assert out.dtype == torch.promote_types(dtype, torch.float32)
    assert out.isfinite().all()
    exact = mod(score.double(), torch.tensor(0), heads, index[:, None], index)
    # Positions, distances and captured numbers are never rounded to half precision: only fp32's
    # own rounding is left.
    assert ((out - exact).abs() / exact.abs().clamp(min=1)).max() < 1e-5


@pytest.mark.parametrize(
    ("mod", "pair"), [case for case in FLAT if case.id.rsplit("-", 1)[0] not in BOUNDED]
)
def test_far_positions(mod, pair):
    """Distances to 2^20 and past it, with the int32 indices of a GPU."""
    far = torch.tensor([0, 1, 46341, 2**20 - 1, 2**20, 2**22 + 1], dtype=torch.int32)
    heads = torch.arange(mod.num_heads or H)[:, None, None]
    score = torch.full((len(heads), len(far), len(far)), 0.7)
    out = mod(score, torch.tensor(0), heads, far[:, None], far).double()
    assert out.isfinite().all()
    for h in range(len(heads)):
        for i, q in enumerate(far.tolist()):
            for j, k in enumerate(far.tolist()):
                expected = pair(score[0, 0, 0].item(), h, q, k)
                assert out[h, i, j] == pytest.approx(expected, rel=2e-6, abs=2e-5)


@pytest.mark.parametrize(("name", "mod"), FIRST)
def test_decoding_with_an_offset_equals_the_full_pass(name, mod):
    T = 29
    q, k, v = qkv(T)
    full = sm.dense_attention(q, k, v, mod, sm.causal)
    for step in (1, 3):
        for start in range(0, T - step + 1, step):
            end = start + step
            offset = start if step == 1 else torch.tensor(start)
            out = sm.dense_attention(
                q[:, :, start:end],
                k[:, :, :end],
                v[:, :, :end],
                sm.with_offset(mod, offset),
                sm.with_offset(sm.causal, offset),
            )
            torch.testing.assert_close(out, full[:, :, start:end], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "mod"), [case for case in FIRST if ENTRIES[case.id].positions != "token"]
)
def test_packed_documents_equal_separate_ones(name, mod):
    lengths = [5, 1, 17, 9]
    parts = [qkv(n) for n in lengths]
    q, k, v = (torch.cat(x, 2) for x in zip(*parts, strict=True))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    mask = sm.and_masks(sm.causal, sm.document(ids))
    packed = sm.dense_attention(q, k, v, sm.with_positions(mod, positions), mask)
    apart = [sm.dense_attention(*part, mod, sm.causal) for part in parts]
    torch.testing.assert_close(packed, torch.cat(apart, 2), rtol=0, atol=1e-12)

    relative = ENTRIES[name].positions == "relative"
    if name != "scale_invariant_grid":  # distances on a grid are not those of its flat index
        without = sm.dense_attention(q, k, v, mod, mask)
        assert torch.allclose(without, packed, atol=1e-12) == relative


@pytest.mark.parametrize("name", list(LEARNABLE))
@pytest.mark.parametrize("shape", [(2,), (1,)])
def test_gradients_of_captured_parameters(name, shape):
    q, k, v = (x.requires_grad_() for x in qkv(7, heads=2, size=3))
    parameters = [torch.rand(shape, dtype=torch.float64, requires_grad=True) for _ in range(4)]

    def run(q, k, v, *parameters):
        mod = LEARNABLE[name](parameters)
        return sm.dense_attention(q, k, v, mod, sm.causal)

    used = set(
        torch.autograd.grad(run(q, k, v, *parameters).sum(), parameters, allow_unused=True)
    ) - {None}
    assert torch.autograd.gradcheck(run, (q, k, v, *parameters))
    assert used
    assert all(grad.isfinite().all() and grad.abs().max() > 0 for grad in used)


def test_learnable_parameters_are_those_of_the_catalogue():
    """Every parameter listed as learnable takes a tensor of shape (H,) that requires grad."""
    for name in CASES:
        for parameter in ENTRIES[name].learnable:
            value = torch.full((2,), 1.3, requires_grad=True)
            mod = getattr(sm, name)(**{**NEEDED.get(name, {}), parameter: value})
            out = sm.dense_attention(*qkv(4, torch.float32, 2), mod, sm.causal)
            (grad,) = torch.autograd.grad(out.square().sum(), value)
            assert grad.isfinite().all()


def test_the_law_of_the_paper():
    """Values of the paper's default law, and its two moments by quadrature for other constants."""
    t = torch.tensor([0.0, 1, 10, 100, 1000, 65536], dtype=torch.float64)
    a_t, m_t = sm.scale_invariant_affine(t)
    assert a_t.tolist() == pytest.approx([1, 1.0912, 1.5448, 2.4074, 3.1985, 4.3100], abs=1e-4)
    assert m_t.tolist() == pytest.approx(
        [0, -0.1906, -1.3863, -4.7958, -9.2302, -17.5758], abs=1e-4
    )

    nodes, weights = np.polynomial.hermite_e.hermegauss(128)
    for alpha, beta, sigma, mu, d in [
        (2.0, 3.0, 1.0, 0.0, 1),
        (1.5, 4.0, 2.0, -1.0, 2),
        (0.2, 0.1, 0.7, 3.0, 3),
    ]:
        a_t, m_t = sm.scale_invariant_affine(
            t, 10.0, alpha=alpha, beta=beta, sigma=sigma, mu=mu, ndim=d
        )
        for a, m, distance in zip(a_t.tolist(), m_t.tolist(), t.tolist(), strict=True):
            # The law speaks of logits of mean mu and deviation sigma, shifted back by mu.
            logits = a * (mu + sigma * nodes) + m - mu
            density = np.exp(logits) * weights / math.sqrt(2 * math.pi)
            target = (distance / 10 + 1) ** -d
            assert density.sum() == pytest.approx(alpha * target, rel=1e-9)
            assert (density * logits).sum() == pytest.approx(beta * target, rel=1e-6, abs=1e-12)


def test_defaults_leave_the_score_at_distance_zero():
    for sigma, mu in [(1.0, 0.0), (3.0, -7.0)]:
        a_0, m_0 = sm.scale_invariant_affine(torch.zeros(1), sigma=sigma, mu=mu)
        assert a_0.item() == pytest.approx(1)
        assert m_0.item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("make", "error", "message"), BAD)
def test_bad_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("name", ["tau", "sigma", "mu", "alpha", "beta"])
def test_parameters_stay_live(name):
    """A mod is used again after a step of its parameter: two backward passes, new values."""
    value = torch.full((2,), 1.3, dtype=torch.float64, requires_grad=True)
    mod = sm.scale_invariant(**{name: value})
    q, k, v = qkv(6, heads=2)
    for _ in range(2):
        sm.dense_attention(q, k, v, mod, sm.causal).square().sum().backward()
        with torch.no_grad():
            value.mul_(1.2)
    fresh = sm.scale_invariant(**{name: value.detach().clone()})
    expected = sm.dense_attention(q, k, v, fresh, sm.causal)
    torch.testing.assert_close(sm.dense_attention(q, k, v, mod, sm.causal), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_affine_keeps_the_dtype_of_the_distance(dtype):
    a_t, m_t = sm.scale_invariant_affine(torch.tensor([0.0, 7.0, -7.0], dtype=dtype))
    assert a_t.dtype == m_t.dtype == dtype
    assert a_t[1] == a_t[2]
    assert sm.scale_invariant_affine(torch.tensor([7]))[0].dtype == torch.float32
