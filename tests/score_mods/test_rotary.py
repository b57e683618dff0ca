import cmath
import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import score_mods as sm

D, BASE, TRAINED = 64, 10000.0, 4096


FACTORS = [1.0 + i / 3 for i in range(32)]
SHORT = [1.0 + i / 50 for i in range(32)]


def from_transformers(kind, length=None, trained=TRAINED, **options):
    config = LlamaConfig(head_dim=D, max_position_embeddings=trained)
    config.rope_parameters = {
        "rope_type": kind,
        "rope_theta": BASE,
        "original_max_position_embeddings": trained,
        **options,
    }
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    return frequencies.tolist(), factor


def exponents():
    return [2 * i / D for i in range(D // 2)]


# Every scheme of the catalogue, with its frequencies and factor by the transformers library or
# written out.
CASES = {
    "rope": [(sm.rope(D), ([BASE**-x for x in exponents()], 1.0))],
    "p_rope": [
        (
            sm.p_rope(D, 0.7),
            ([BASE**-x if i < 22 else 0.0 for i, x in enumerate(exponents())], 1.0),
        ),
        (sm.p_rope(D, 0.0), ([0.0] * 32, 1.0)),
        (sm.p_rope(D, 1.0), ([BASE**-x for x in exponents()], 1.0)),
    ],
    "half_truncated_rope": [
        (
            sm.half_truncated_rope(D),
            ([1024 ** (-i / 15) if i < 16 else 0.0 for i in range(32)], 1.0),
        ),
    ],
    "position_interpolation": [
        (sm.position_interpolation(D, 4.0), from_transformers("linear", factor=4.0))
    ],
    "ntk_rope": [
        (sm.ntk_rope(D, 4.0), ([(BASE * 4 ** (64 / 62)) ** -x for x in exponents()], 1.0)),
        (sm.ntk_rope(D, 1), ([BASE**-x for x in exponents()], 1.0)),
    ],
    "dynamic_ntk_rope": [
        (sm.dynamic_ntk_rope(D, n, TRAINED, 2.0), from_transformers("dynamic", n, factor=2.0))
        for n in (100, 4096, 5000, 65536)
    ],
    "yarn_rope": [
        (sm.yarn_rope(D, 4.0, TRAINED), from_transformers("yarn", factor=4.0)),
        (  # a ramp that ends beyond the last pair
            sm.yarn_rope(D, 4.0, 10_000_000),
            from_transformers("yarn", trained=10_000_000, factor=4.0),
        ),
        (
            sm.yarn_rope(D, 32.0, TRAINED, truncate=False),
            from_transformers("yarn", factor=32.0, truncate=False),
        ),
        (
            sm.yarn_rope(D, 8.0, TRAINED, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5),
            from_transformers(
                "yarn", factor=8.0, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5
            ),
        ),
    ],
    "llama3_rope": [
        (
            sm.llama3_rope(D, 8.0, TRAINED, base=BASE),
            from_transformers("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
        (
            sm.llama3_rope(D, 32.0, TRAINED, base=BASE, low_turns=2.0, high_turns=3.0),
            from_transformers("llama3", factor=32.0, low_freq_factor=2.0, high_freq_factor=3.0),
        ),
    ],
    "longrope": [
        (
            sm.longrope(D, FACTORS, 16.0, TRAINED, base=BASE),
            from_transformers(
                "longrope", 65536, factor=16.0, long_factor=FACTORS, short_factor=[1.0] * 32
            ),
        ),
        *(
            (
                sm.longrope(D, FACTORS, 16.0, TRAINED, base=BASE, short_factors=SHORT, length=n),
                from_transformers(
                    "longrope", n, factor=16.0, long_factor=FACTORS, short_factor=SHORT
                ),
            )
            for n in (100, 4096, 4097)
        ),
        (
            sm.longrope(D, [1.0] * 32, 16.0, TRAINED, base=BASE, attention_factor=1.25),
            ([BASE**-x for x in exponents()], 1.25),
        ),
    ],
    "resonance_rope": [
        (
            sm.resonance_rope(sm.rope(D)),
            ([math.tau / round(math.tau * BASE**x) for x in exponents()], 1.0),
        ),
        (
            sm.resonance_rope(sm.Rotary(torch.tensor([3.0, 0.0]).double(), 1.5)),
            ([math.tau / 2, 0.0], 1.5),
        ),
    ],
}
TRANSFORMS = {"cosscale", "coca"}  # see test_transforms.py


def test_every_scheme_of_the_catalogue_has_a_case():
    named = {m.name for m in sm.catalogue if m.kind == "q,k transform"}
    assert set(CASES) | TRANSFORMS == named


@pytest.mark.parametrize(
    ("rotary", "expected"),
    [
        pytest.param(*case, id=f"{name}-{i}")
        for name, cases in CASES.items()
        for i, case in enumerate(cases)
    ],
)
def test_frequencies(rotary, expected):
    frequencies, factor = expected
    assert rotary.frequencies.dtype == torch.float64
    assert rotary.frequencies.tolist() == pytest.approx(frequencies, rel=2e-6, abs=1e-12)
    assert rotary.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotates_complex_numbers(interleaved):
    """Each pair is a complex number that is multiplied by exp(i position frequency)."""
    rotary = sm.Rotary(torch.tensor([1.0, 0.1, 0.0], dtype=torch.float64), 1.25, interleaved)
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 4], [70000, 5, 9, 2, 1]])
    out = rotary(x, positions)
    for b in range(2):
        for t in range(5):
            for i, w in enumerate((1.0, 0.1, 0.0)):
                first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + 3)
                z = complex(x[b, 1, t, first], x[b, 1, t, second])
                z *= 1.25 * cmath.exp(1j * positions[b, t].item() * w)
                assert out[b, 1, t, first].item() == pytest.approx(z.real)
                assert out[b, 1, t, second].item() == pytest.approx(z.imag)
    assert torch.equal(out[..., 6:], x[..., 6:])


@pytest.mark.parametrize("resonance", [False, True])
def test_the_first_tokens_keep_their_frequencies(resonance):
    """LongRoPE's n tokens at the start, one complex number at a time."""
    rotary = sm.longrope(4, [2.0, 5.0], 8.0, 100, base=100.0, start_tokens=3)
    waves = [[math.tau * 2, math.tau * 10 * 5], [math.tau, math.tau * 10]]
    if resonance:
        rotary, waves = sm.resonance_rope(rotary), [[round(w) for w in x] for x in waves]
    x = torch.randn(1, 1, 6, 4, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 3, 4, 90])
    sharpened = math.sqrt(1 + math.log(8) / math.log(100))
    out = rotary(x, positions)
    for t, position in enumerate(positions.tolist()):
        for i, wave in enumerate(waves[position < 3]):
            z = complex(x[0, 0, t, i], x[0, 0, t, i + 2])
            z *= sharpened * cmath.exp(1j * position * math.tau / wave)
            assert out[0, 0, t, i].item() == pytest.approx(z.real)
            assert out[0, 0, t, i + 2].item() == pytest.approx(z.imag)


@pytest.mark.parametrize(
    "rotary", [sm.rope(D), sm.half_truncated_rope(D), sm.yarn_rope(D, 4.0, TRAINED)]
)
def test_scores_depend_on_distance_alone(rotary):
    q, k = torch.randn(2, 1, 2, 9, D, dtype=torch.float64)
    near = rotary(q) @ rotary(k).mT
    far = rotary(q, torch.arange(9) + 100_000) @ rotary(k, torch.arange(9) + 100_000).mT
    torch.testing.assert_close(near, far, rtol=0, atol=1e-8)


def test_a_cache_can_be_rotated_late():
    rotary, k = sm.rope(D), torch.randn(1, 2, 9, D)
    one_by_one = torch.cat([rotary(k[:, :, [t]], torch.tensor([t])) for t in range(9)], 2)
    torch.testing.assert_close(one_by_one, rotary(k))


@pytest.mark.parametrize("positions", [torch.arange(9), torch.randint(50, (3, 9))])
def test_angles_can_be_computed_once_for_all_layers(positions):
    rotary, x = sm.half_truncated_rope(D), torch.randn(3, 2, 9, D)
    angles = rotary.cos_sin(positions)
    assert torch.equal(rotary.turn(x, *angles), rotary(x, positions))
    with pytest.raises(ValueError, match=f"D >= {D}"):
        rotary.turn(x[..., :4], *angles)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_rounds_once(dtype):
    """Far angles are right to the dtype's rounding, as they are not if formed in fp32."""
    x = torch.randn(1, 1, 4, D).to(dtype)
    positions = torch.tensor([65535, 65536, 131071, 1_000_003])
    exact = sm.rope(D)(x.double(), positions)
    out = sm.rope(D)(x, positions)
    assert out.dtype == dtype
    assert ((out - exact).abs() <= exact.abs().clamp(min=1) * torch.finfo(dtype).eps * 2).all()


def test_resonance_brings_no_new_angles():
    """Two positions a whole number of every short wavelength apart have the same angles."""
    rotary = sm.resonance_rope(sm.rope(D))
    waves = [round(math.tau / w) for w in rotary.frequencies.tolist()[:3]]
    turns = math.lcm(*waves)
    cos, sin = rotary.cos_sin(torch.tensor([5, 5 + turns]), torch.float64)
    torch.testing.assert_close(cos[0, :3], cos[1, :3], rtol=0, atol=1e-9)
    torch.testing.assert_close(sin[0, :3], sin[1, :3], rtol=0, atol=1e-9)
    assert not torch.allclose(cos[0, 3:], cos[1, 3:])


def test_rotation_has_gradients_and_yarn_scales_the_score():
    x = torch.randn(1, 1, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(sm.yarn_rope(8, 4.0, 64), (x,))
    factor = sm.yarn_rope(8, 4.0, 64).attention_factor
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    out = sm.yarn_rope(8, 4.0, 64)(x)
    assert out.square().sum().item() == pytest.approx(x.square().sum().item() * factor**2)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: sm.rope(7), ValueError, "head_dim must be even"),
        (lambda: sm.rope(0), ValueError, "head_dim"),
        (lambda: sm.rope(8.0), TypeError, "head_dim must be an int"),
        (lambda: sm.rope(8, -1), ValueError, "base must be a positive number"),
        (lambda: sm.p_rope(8, 1.5), ValueError, r"p must be a number in \[0, 1\]"),
        (lambda: sm.half_truncated_rope(6), ValueError, "multiple of 4"),
        (lambda: sm.position_interpolation(8, 0.5), ValueError, "factor must be at least 1"),
        (lambda: sm.ntk_rope(2, 2.0), ValueError, "head_dim must be at least 4"),
        (lambda: sm.dynamic_ntk_rope(8, 0, 64), ValueError, "length"),
        (lambda: sm.yarn_rope(8, 2.0, 64, beta_fast=1, beta_slow=2), ValueError, "beta_slow"),
        (lambda: sm.yarn_rope(8, 2.0, 64, truncate="no"), TypeError, "truncate must be a bool"),
        (lambda: sm.longrope(4, [10**400, 1], 2.0, 64), TypeError, "factors must be 2 positive"),
        (lambda: sm.yarn_rope(8, 2.0, 64, base=1.0), ValueError, "base must be above 1"),
        (lambda: sm.llama3_rope(8, 0.5), ValueError, "factor must be at least 1"),
        (lambda: sm.llama3_rope(8, low_turns=4.0), ValueError, "low_turns must be below"),
        (lambda: sm.longrope(8, [1.0] * 3, 2.0, 64), ValueError, "factors must be 4 positive"),
        (lambda: sm.longrope(8, [1.0, 1, 1, 0], 2.0, 64), ValueError, "factors"),
        (lambda: sm.longrope(8, None, 2.0, 64), TypeError, "factors must be 4 positive numbers"),
        (lambda: sm.longrope(8, [1.0] * 4, 2.0, 1), ValueError, "train_length"),
        (
            lambda: sm.longrope(8, [1.0] * 4, 2.0, 64, short_factors=[1.0] * 4),
            ValueError,
            "short_factors and length must be given together",
        ),
        (
            lambda: sm.longrope(8, [1.0] * 4, 2.0, 64, short_factors=[1.0] * 3, length=9),
            ValueError,
            "short_factors must be 4 positive",
        ),
        (lambda: sm.longrope(8, [1.0] * 4, 2.0, 64, start_tokens=-1), ValueError, "start_tokens"),
        (lambda: sm.resonance_rope(8), TypeError, "rotary must be a Rotary, got int"),
        (lambda: sm.rope(8)(torch.zeros(1, 2, 8)), ValueError, "x must have shape"),
        (lambda: sm.rope(16)(torch.zeros(1, 2, 3, 8)), ValueError, "D >= 16"),
        (lambda: sm.rope(8)(torch.zeros(1, 2, 3, 8).int()), TypeError, "x must be a floating"),
        (lambda: sm.rope(8)(torch.zeros(1, 2, 3, 8), [0, 1, 2]), TypeError, "positions must be a"),
        (lambda: sm.rope(8)(torch.zeros(1, 2, 1, 8), torch.ones(1) > 0), TypeError, "torch.bool"),
        (lambda: sm.rope(8).cos_sin([0, 1]), TypeError, "positions must be an integer or .* list"),
        (
            lambda: sm.rope(8).turn(torch.zeros(1, 2, 3, 8), torch.ones(3, 4), torch.ones(1, 4)),
            ValueError,
            r"sin must have shape \(3, 4\) or \(1, 3, 4\), got \(1, 4\)",
        ),
        (
            lambda: sm.Rotary(torch.ones(2), attention_factor="1"),
            TypeError,
            "attention_factor must be a number, got str",
        ),
        (lambda: sm.Rotary(torch.ones(2), interleaved=1), TypeError, "interleaved must be a bool"),
        (lambda: sm.Rotary(torch.ones(2), start=8), TypeError, "start must be a Rotary or None"),
        (
            lambda: sm.Rotary(torch.ones(2), start=sm.rope(2), start_tokens=1),
            ValueError,
            "start must have 2 frequencies, got 1",
        ),
        (lambda: sm.Rotary(torch.ones(2), start_tokens=-1), ValueError, "start_tokens"),
        (lambda: sm.longrope(4, [1.0, float("inf")], 2.0, 64), ValueError, "factors must be 2"),
        (
            lambda: sm.rope(8).turn(torch.zeros(1, 2, 3, 8), 1.0, 0.0),
            TypeError,
            "cos must be a floating tensor, got float",
        ),
        (
            lambda: sm.rope(8)(torch.zeros(1, 2, 3, 8), torch.arange(4)),
            ValueError,
            "positions must have shape",
        ),
    ],
)
def test_bad_arguments_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_scheme_moves_with_its_first_tokens():
    rotary = sm.longrope(4, [2.0, 5.0], 8.0, 100, base=100.0, start_tokens=3)
    moved = rotary.to("meta")
    assert moved.frequencies.is_meta
    assert moved.start.frequencies.is_meta
    x = torch.randn(1, 2, 7, 4)
    assert torch.equal(rotary.to("cpu")(x), rotary(x))


def test_no_tokens_are_rotated_to_none():
    x = torch.zeros(2, 3, 0, 8)
    assert sm.rope(8)(x).shape == x.shape
