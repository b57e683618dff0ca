"""The gallery: every mechanism has a card, what it shows is right, and the page is whole."""

import math
import re

import numpy as np
import pytest
import torch
from matplotlib.image import imread

import score_mods as sm
from analysis.__main__ import main
from analysis.gallery_cards import LENGTH, PLAIN, TILE, card

ENTRIES = {m.name: m for m in sm.catalogue}


def tile(name):
    return card(ENTRIES[name]).tile.numpy()


@pytest.mark.parametrize("name", list(ENTRIES))
def test_every_mechanism_has_a_card(name):
    shown = card(ENTRIES[name])
    assert shown.tile.shape == (TILE, TILE)
    assert shown.tile.isfinite().any(1).all()
    assert 1 <= len(shown.panels) <= 2
    for panel in shown.panels:
        for values in panel.curves.values():
            assert values.shape == panel.x.shape
            assert values.isfinite().any()
    assert (shown.law is None) == (
        name in ("cosscale", "coca", "norm_attention", "focused_attention", "inline_attention")
    )


def test_tiles_differ_by_what_the_mechanism_does():
    plain, index = tile("causal"), np.arange(TILE)
    distance = index[:, None] - index
    np.testing.assert_array_equal(np.isnan(plain), distance < 0)
    np.testing.assert_allclose(tile("alibi"), plain - distance / 4, atol=1e-6)
    np.testing.assert_array_equal(
        np.isnan(tile("sliding_window")), (distance < 0) | (distance >= 16)
    )
    np.testing.assert_allclose(np.diagonal(tile("rope")), np.diagonal(plain), atol=1e-12)
    near = distance < 16
    np.testing.assert_allclose(tile("rerope")[near], tile("rope")[near], atol=1e-10)
    assert np.abs(tile("rerope") - tile("rope"))[~near].max() > 0.1
    weights = np.exp(plain)
    weights /= 1 + np.nansum(weights, 1, keepdims=True)
    np.testing.assert_allclose(np.exp(tile("softmax_off_by_one")), weights, atol=1e-12)
    np.testing.assert_allclose(tile("power"), 2 * np.log(np.abs(plain)), atol=1e-10)


def test_panels_are_the_law():
    multiplier, bias = card(ENTRIES["scale_invariant"]).panels
    a_t, m_t = sm.scale_invariant_affine(multiplier.x.double())
    torch.testing.assert_close(multiplier.curves[""], a_t, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bias.curves[""], m_t, rtol=1e-5, atol=1e-5)
    alike, wavelengths = card(ENTRIES["rope"]).panels
    turns = 10000.0 ** -(torch.arange(16.0, dtype=torch.float64) / 16)
    torch.testing.assert_close(wavelengths.curves[""], 2 * math.pi / turns)
    torch.testing.assert_close(
        alike.curves[""], (alike.x[:, None] * turns).cos().mean(1), rtol=0, atol=1e-9
    )
    response, weight = card(ENTRIES["softcap"]).panels
    torch.testing.assert_close(
        response.curves["t = 1"], 2 * (response.x / 2).tanh(), rtol=0, atol=1e-6
    )
    assert len(response.curves) == 1
    assert weight.curves[""].std() < 1e-12
    share, lse = card(ENTRIES["attention_sink"]).panels
    total = share.x.double() * math.exp(0.5)
    torch.testing.assert_close(share.curves[""], total / (total + math.e))
    torch.testing.assert_close(lse.curves[""], (total + math.e).log())
    _, seen = card(ENTRIES["streaming_llm"]).panels
    expected = (seen.x < 16) | (seen.x >= LENGTH - 4)
    assert torch.equal(seen.curves[""], expected.double())


def test_laws_of_rotations_keep_their_factor():
    assert card(ENTRIES["rope"]).law is PLAIN
    assert card(ENTRIES["rerope"]).law is PLAIN
    zero, score = torch.tensor(0), torch.tensor([1.5], dtype=torch.float64)
    sharpened = card(ENTRIES["yarn_rope"]).law(score, zero, zero, zero, zero)
    assert sharpened.item() == pytest.approx(1.5 * (0.1 * math.log(4) + 1) ** 2)


def test_the_page_is_whole(tmp_path, capsys):
    names = ["scale_invariant", "rope", "sliding_window", "rerope", "inline_attention", "alibi"]
    assert main(["gallery", "--only", ", ".join(names), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "gallery.md").read_text()
    table = capsys.readouterr().out
    for name in names:
        assert f"## {name}\n" in page
        assert f"`{ENTRIES[name].example}`" in page
        assert imread(tmp_path / "out" / f"{name}.png").shape[1] == 1600
    assert sorted(re.findall(r"!\[.*\]\((.*)\.png\)", page)) == sorted(names)
    verdicts = {
        line.split("](#")[1].split(")")[0]: line.split(" | ")[2]
        for line in table.splitlines()
        if "](#" in line
    }
    assert verdicts == {
        "scale_invariant": "holds",
        "rope": "rises",
        "sliding_window": "falls",
        "rerope": "rises",
        "inline_attention": "-",
        "alibi": "falls",
    }
    # ln E[Z] of plain softmax in a decade: the number of its keys times e^0.5.
    row = next(line for line in table.splitlines() if "[rope]" in line)
    totals = [math.log(9 * 10**n) + 0.5 for n in range(4)]
    assert row.split(" | ")[5:9] == [f"{x:.1f}" for x in totals[:3]] + [f"{totals[3]:.1f} |"]


def test_unknown_names_are_refused(tmp_path, capsys):
    assert main(["gallery", "--only", "alibi,nonsense", "--out", str(tmp_path / "out")]) == 2
    assert "only: expected names of score_mods.catalogue, got nonsense" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
