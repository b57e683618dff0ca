"""Figures: what is drawn is what was given, and it can be read."""

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from analysis import judge_all, measure_gaussian, plots
from score_mods import scale_invariant

T = np.array([10, 100, 1000, 10000])
TWO = {"none": np.array([1.0, 2.0, 3.0, 4.0]), "other": np.array([4.0, 4.0, 4.0, 4.0])}


@pytest.fixture
def ax():
    return Figure().subplots()


def drawn(ax):
    return [tuple(map(np.asarray, line.get_data())) for line in ax.get_lines()]


@pytest.mark.parametrize("draw", [plots.multiplier, plots.bias])
def test_profiles_draw_each_mechanism_over_log_distance(ax, draw):
    assert draw(ax, T, TWO) is ax
    assert ax.get_xscale() == "log"
    for (x, y), expected in zip(drawn(ax), TWO.values(), strict=True):
        assert x.tolist() == T.tolist()
        assert y.tolist() == expected.tolist()


def test_total_attention_has_points_bars_and_theory_of_one_colour(ax):
    measured = {"none": np.array([[1.0, 2, 3, 4], [0, 1, 2, 3], [3.0, 4, 5, 6]])}
    assert plots.total_attention(ax, T, measured, {"none": TWO["none"] + 1}, first=2) is ax
    *bars, points, line = ax.get_lines()
    assert points.get_ydata().tolist() == [1, 2, 3, 4]
    assert [bar.get_ydata().tolist() for bar in bars] == [[0, 3], [1, 4], [2, 5], [3, 6]]
    assert [bar.get_xdata().tolist() for bar in bars] == [[t, t] for t in T]
    assert line.get_ydata().tolist() == [2, 3, 4, 5]
    assert line.get_color() == points.get_color() == plots.COLOURS[2]


def test_entropy_is_drawn_against_the_log_or_its_root_with_theory_and_its_band(ax):
    theory = {"none": np.stack([np.log(T) + shift for shift in (1, 0, 2)])}
    assert plots.entropy(ax, T, {"none": TWO["none"]}, theory) is ax
    (x, y), (_, line) = drawn(ax)
    np.testing.assert_allclose(x, np.log(T))
    assert y.tolist() == TWO["none"].tolist()
    np.testing.assert_allclose(line, np.log(T) + 1)
    band = ax.collections[-1].get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose((band.min(), band.max()), (np.log(10), np.log(10000) + 2))
    other = Figure().subplots()
    plots.entropy(other, T, TWO, root=True)
    np.testing.assert_allclose(drawn(other)[0][0] ** 2, x)
    assert other.get_xlabel() != ax.get_xlabel()


def test_a_path_ends_in_its_marker_and_far_numbers_get_a_logarithmic_scale(ax):
    far = {"none": TWO["none"], "other": -10 * TWO["none"]}
    assert plots.against(ax, far, TWO, "slope", "loss", linear=5) is ax
    for (x, y), name in zip(drawn(ax)[::2], TWO, strict=True):
        assert x.tolist() == far[name].tolist()
        assert y.tolist() == TWO[name].tolist()
    assert [line.get_markevery() for line in ax.get_lines()[::2]] == [[-1], [-1]]
    assert ax.get_legend_handles_labels()[1] == list(TWO)
    assert (ax.get_xscale(), ax.get_xlabel(), ax.get_ylabel()) == ("symlog", "slope", "loss")
    other = Figure().subplots()
    plots.against(other, TWO, TWO, "slope", "loss", linear=5)
    assert other.get_xscale() == "linear"


def test_small_shares_get_a_logarithmic_scale(ax):
    assert plots.last_share(ax, T, {"none": np.array([0.5, 0.1, 0.01, 0.001])}) is ax
    assert ax.get_yscale() == "log"
    assert [label.get_text() for label in ax.get_xticklabels()] == ["10", "100", "1,000", "10,000"]
    other = Figure().subplots()
    plots.last_share(other, T, {"none": np.array([0.5, 0.4, 0.3, 0.2])})
    assert other.get_yscale() == "linear"


def test_heatmap_has_layers_across_and_heads_up(ax):
    values = np.arange(6).reshape(3, 2)
    assert plots.heatmap(ax, values, "sigma") is ax
    image = ax.get_images()[0]
    assert image.get_array().tolist() == values.T.tolist()
    assert image.origin == "lower"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("layer", "head")


def test_qq_draws_a_line_for_each_layer_beside_the_diagonal(ax):
    x = np.linspace(-2, 2, 5)
    assert plots.qq(ax, x, np.stack([x, 2 * x])) is ax
    lines = drawn(ax)[1:]
    assert [y.tolist() for _, y in lines] == [x.tolist(), (2 * x).tolist()]
    shades = {tuple(line.get_color()) for line in ax.get_lines()[1:]}
    assert len(shades) == 2


def test_spread_shows_the_median_and_eighty_percent(ax):
    values = np.arange(11)[:, None] + np.zeros(4)
    assert plots.spread(ax, T, values, "mean") is ax
    assert drawn(ax)[0][1].tolist() == [5, 5, 5, 5]
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (1, 9)


def test_by_layer_shows_every_head_and_the_means(ax):
    values = np.array([[0.0, 1.0], [0.5, 0.7]])
    assert plots.by_layer(ax, values, "share") is ax
    dots, means = drawn(ax)
    assert dots[0].tolist() == [0, 0, 1, 1]
    assert dots[1].tolist() == [0, 1, 0.5, 0.7]
    np.testing.assert_allclose(means[1], [0.5, 0.6])


def test_slopes_show_every_head_and_the_median(ax):
    assert plots.slopes(ax, {"none": [0.1, -0.3, 5.0], "other": [1.0, 1.0, 2.0]}) is ax
    lines = drawn(ax)
    assert sorted(lines[0][0]) == [-0.3, 0.1, 5.0]
    assert lines[1][0].tolist() == [0.1, 0.1]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["none", "other"]


def test_every_value_and_a_tick_beside_it_is_within_the_axes(ax):
    far = np.array([0.0, 30.0, -19.0, -50.0])
    measured = np.stack([far, far - 650, far + 1])
    plots.total_attention(ax, T, {"none": measured}, {"none": far + 5})
    low, high = ax.get_ylim()
    assert low < -700
    assert high > 35
    assert ax.get_xlim()[0] > 3
    assert {-600, -200, -20, -10, 0, 10, 20} <= set(ax.get_yticks())
    other = Figure().subplots()
    plots.slopes(other, {"none": [-40.0, 0.1, 3.0]})
    assert {-0.5, 0.5} < set(other.get_xticks())


def test_colours_can_be_told_apart_without_red_and_green():
    """Under simulated deuteranopia (Viénot, Brettel & Mollon 1999), in linear light."""
    simulate = np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]])
    seen = [simulate @ np.array(to_rgb(colour)) ** 2.2 for colour in plots.COLOURS]
    gaps = [np.abs(a - b).max() for i, a in enumerate(seen) for b in seen[:i]]
    assert min(gaps) > 0.05
    assert len(set(plots.MARKERS)) == len(plots.MARKERS) >= len(plots.COLOURS)


def test_a_figure_is_readable_at_800_pixels(tmp_path):
    path = tmp_path / "figure.png"
    with plots.figure(path, 2) as axes:
        plots.total_attention(axes[0, 0], T, TWO, TWO)
        plots.heatmap(axes[0, 1], np.arange(6).reshape(3, 2), "sigma")
        plots.legend(axes[0, 0], TWO, columns=2, theory="theory", measured="measured")
        drawing = axes[0, 0].figure
    assert imread(path).shape[1] == 1600
    assert drawing.get_figwidth() == 8  # so that 800 pixels are 100 to the inch
    sizes = [text.get_fontsize() for text in drawing.findobj(Text) if text.get_text()]
    assert min(sizes) >= 8


def test_panels_share_their_scale_and_label_the_outer_ones(tmp_path):
    path = tmp_path / "panels.png"
    bars = np.stack([TWO["none"], TWO["none"] - 1, TWO["none"] + 1])
    with plots.panels(path, 5, theory="theory", measured="measured") as axes:
        for place, ax in enumerate(axes):
            plots.total_attention(ax, T, {"none": bars}, first=place)
    assert path.stat().st_size > 0
    assert len({ax.get_ylim() for ax in axes}) == 1
    assert [bool(ax.get_xlabel()) for ax in axes] == [False, False, True, True, True]
    assert [bool(ax.get_ylabel()) for ax in axes] == [True, False, True, False, False]
    (spare,) = set(axes[0].figure.axes) - set(axes)
    assert [text.get_text() for text in spare.get_legend().get_texts()] == ["theory", "measured"]


@pytest.mark.parametrize("count", range(1, 13))
def test_panels_have_at_most_the_legends_hole(tmp_path, count):
    with plots.panels(tmp_path / "panels.png", count, theory="a", measured="b") as axes:
        for ax in axes:
            plots.total_attention(ax, T, TWO)
    assert len(axes) == count
    assert len(axes[0].figure.axes) - count <= (2 if count == 10 else 1)
    assert bool(axes[0].figure.legends) == (len(axes[0].figure.axes) == count)


def test_verdicts_have_a_panel_each_with_what_was_measured_and_its_law(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: saved.append(figure))
    mods = {"none": None, "scale_invariant": scale_invariant()}
    judged = judge_all(measure_gaussian(mods, 2048, rows=32))
    plots.verdicts(tmp_path / "verdicts.png", judged)
    panels = [ax for ax in saved[0].axes if ax.get_title()]
    assert [ax.get_title() for ax in panels] == ["none\nrises", "scale_invariant\nholds"]
    for ax, verdict in zip(panels, judged.verdicts, strict=True):
        measured, law = (y for _, y in drawn(ax))
        np.testing.assert_allclose(measured, verdict.log_z)
        np.testing.assert_allclose(law, verdict.law_log_z)


def test_drawing_leaves_matplotlib_as_it_was(tmp_path):
    before = dict(matplotlib.rcParams)
    with plots.figure(tmp_path / "figure.png") as axes:
        plots.multiplier(axes[0, 0], T, TWO)
    assert dict(matplotlib.rcParams) == before
