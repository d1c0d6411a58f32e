from itertools import pairwise

import numpy as np
import pytest
import torch

from sinkformer import plots
from sinkformer.errors import ConfigError, ShapeError
from sinkformer.interpolation import compare, construct

matplotlib = pytest.importorskip("matplotlib")
pytest.importorskip("flint")
matplotlib.use("Agg")

LENGTHS, TARGETS = (5, 6, 4), (2, 3, 1)


@pytest.fixture(autouse=True)
def _close():
    yield
    from matplotlib import pyplot as plt

    plt.close("all")


def data(d, scale=1.0):
    generator = torch.Generator().manual_seed(d)
    X, Y = ([torch.randn(n, d, generator=generator, dtype=torch.float64) for n in side] for side in (LENGTHS, TARGETS))
    return X, [scale * y for y in Y]


@pytest.fixture(scope="module")
def built():
    return construct(*data(2), method="paper")


@pytest.fixture(scope="module")
def line():
    return construct(*data(1), method="direct")


def panels(ax):
    return [axes for axes in ax.figure.axes if axes.axison]


def drawn(axes, marker=None):
    """Positions of every artist that is not only there for the legend."""
    lines = [line for line in axes.lines if len(line.get_xdata()) and marker in (None, line.get_marker())]
    return [np.column_stack(line.get_data()) for line in lines]


def distinct(points):
    return len(np.unique(points.round(9), axis=0))


# Paths -------------------------------------------------------------------------------------------------------------------


def test_paths_pass_through_the_trace(built):
    stages = [built.trace(x) for x in data(2)[0]]
    ax = plots.token_paths(stages, plots.new_axes((5, 5)))
    paths = [line for line in ax.lines if line.get_linestyle() == "-" and len(line.get_xdata())]
    assert len(paths) == sum(LENGTHS)
    used = [stage for stage in stages[1] if stage.phase != "identity"]
    assert len(used) < len(stages[1])
    second = paths[LENGTHS[0] + 2]
    expected = np.stack([stage.points[2].numpy() for stage in used])
    np.testing.assert_array_equal(np.column_stack(second.get_data()), expected)
    assert second.get_color() == "C1"


def test_phases_and_sequences_are_named(built):
    ax = plots.token_paths([built.trace(x) for x in data(2)[0]], plots.new_axes((5, 5)))
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names[:4] == ["sequence 0", "sequence 1", "sequence 2", "input"]
    assert names[4:] == [
        "after separation",
        "after leaders and collapse",
        "after projection",
        "after interpolation",
    ]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("coordinate 1", "coordinate 2")


def test_matplotlib_manners(built, monkeypatch):
    from matplotlib import pyplot as plt

    monkeypatch.setattr(plt, "show", lambda *a, **k: pytest.fail("show was called"))
    stages = [built.trace(data(2)[0][0])]
    _, mine = plt.subplots()
    assert plots.token_paths(stages, mine) is mine
    _, current = plt.subplots()
    assert plots.token_paths(stages) is current
    assert plots.parameter_counts(comparisons()) is current


def test_more_than_two_coordinates_are_said(line):
    space = construct(*data(3), method="direct")
    ax = plots.token_paths([space.trace(data(3)[0][0])], plots.new_axes((5, 5)))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("coordinate 1 of 3", "coordinate 2 of 3")
    # One coordinate: every sequence has a line of its own.
    ax = plots.token_paths([line.trace(x) for x in data(1)[0]], plots.new_axes((5, 5)))
    assert ax.get_ylabel() == "sequence"
    assert {float(y) for points in drawn(ax) for y in points[:, 1]} == {0.0, 1.0, 2.0}


def test_scales_follow_the_phases(built):
    far = construct(*data(2, scale=1e6), method="paper")
    scales = [
        plots.token_paths([network.trace(data(2)[0][0])], plots.new_axes((5, 5))).get_xscale()
        for network in (built, far)
    ]
    assert scales == ["linear", "symlog"]


def test_paths_that_do_not_belong_together(built, line):
    with pytest.raises(ShapeError, match="expected the stages of 1 to 10 sequences, none of them empty, received 0"):
        plots.token_paths([], plots.new_axes((5, 5)))
    stages = built.trace(data(2)[0][0])
    with pytest.raises(ShapeError, match="received 11 sequences"):
        plots.token_paths([stages] * 11, plots.new_axes((5, 5)))
    with pytest.raises(ShapeError, match="received leader and interpolation as stage 2 of sequences 0 and 1"):
        plots.token_paths([stages, line.trace(data(1)[0][0])], plots.new_axes((5, 5)))


# Phases ------------------------------------------------------------------------------------------------------------------


def test_the_phases_of_the_paper(built):
    input_, separated, led, collapsed, projected, last = panels(plots.phases(built))
    titles = [axes.get_title() for axes in (input_, separated, led, collapsed, projected, last)]
    assert titles == [
        "input",
        "after separation",
        "after leaders",
        "after collapse",
        "after projection",
        "after interpolation",
    ]
    X, Y = data(2)
    for axes, points in ((input_, X), (last, Y)):
        for found, expected in zip(drawn(axes)[:3], points, strict=True):
            assert {tuple(p) for p in found.round(9)} == {tuple(p) for p in expected.numpy().round(9)}
    # Intervals of their own, on one line.
    ends = sorted((points[:, 0].min(), points[:, 0].max()) for points in drawn(separated, "|"))
    assert len(ends) == 3
    assert all(a[1] < b[0] for a, b in pairwise(ends))
    # The leaders leave the line; then every sequence has as many places as targets.
    for j, (led_points, points) in enumerate(zip(drawn(led), drawn(collapsed), strict=True)):
        assert distinct(led_points) == LENGTHS[j]
        assert int((led_points[:, 1] != 0).sum()) == TARGETS[j]
        assert distinct(points) == TARGETS[j]
    assert [distinct(points) for points in drawn(projected, "|")] == list(TARGETS)
    for circles, expected in zip(drawn(last)[3:], Y, strict=True):
        np.testing.assert_array_equal(circles, expected.numpy())


def test_the_phases_of_the_direct_constructions(line):
    titles = ["input", "after separation", "after interpolation"]
    ax = plots.phases(line, sequences=2)
    assert [axes.get_title() for axes in panels(ax)] == titles
    assert len(drawn(panels(ax)[0])) == 2
    two_pass = plots.phases(construct(*data(3), method="two-pass"))
    assert [axes.get_title() for axes in panels(two_pass)] == [*titles[:2], "after lattice", titles[2]]


def test_files(built, tmp_path):
    from matplotlib import pyplot as plt

    for name in ("a.png", "a.svg"):
        plots.save(plots.phases(built), tmp_path / name)
        assert (tmp_path / name).stat().st_size > 10_000
    assert plt.get_fignums() == []


@pytest.mark.parametrize("sequences", [0, 11, True, 2.0])
def test_a_colour_for_each_sequence(built, sequences, tmp_path):
    with pytest.raises(ConfigError, match="expected sequences as a whole number from 1 to 10"):
        plots.phases(built, sequences=sequences)
    with pytest.raises(ConfigError, match="expected sequences as a whole number from 1 to 10"):
        plots.animation(built, tmp_path / "a.gif", sequences=sequences)


# Animation ---------------------------------------------------------------------------------------------------------------


def test_an_animation(line, tmp_path, monkeypatch):
    from PIL import Image

    from sinkformer.plots import animations

    monkeypatch.setattr(animations, "_MOST_FRAMES", 45)
    plots.animation(line, tmp_path / "a.gif")
    with Image.open(tmp_path / "a.gif") as film:
        assert 10 < film.n_frames <= 45
        first = np.asarray(film.convert("RGB"))
        film.seek(film.n_frames - 1)
        last = np.asarray(film.convert("RGB"))
    assert first.shape == last.shape
    assert (first != last).any()
    with pytest.raises(ConfigError, match=r"expected an animation ending in .gif, received '.*a.png'"):
        plots.animation(line, tmp_path / "a.png")


@pytest.mark.parametrize("blocks", [0, 1, 30, 1000])
def test_frames_go_through_all_phases_in_view(blocks):
    from sinkformer.plots.animations import _frames
    from sinkformer.plots.paths import Paths

    rng = np.random.default_rng(blocks)
    kinds = ["separation", "leaders", "collapse", "projection", "lattice", "interpolation"]
    names = ["input", *[kinds[6 * k // blocks] for k in range(blocks)]]
    scales = np.arange(len(names)) % 7  # every stage has a size of its own
    paths = Paths(names, [rng.standard_normal((len(names), 4, 2)) * 10.0 ** scales[:, None, None]], 2)
    frames = list(_frames(paths, [np.full((1, 2), 9.0)]))
    assert 2 <= len(frames) <= 120
    places = [frame.place for frame in frames]
    assert places == sorted(places)
    assert (places[0], places[-1]) == (0.0, len(names) - 1)
    assert list(dict.fromkeys(frame.name for frame in frames)) == list(dict.fromkeys(names))
    for before, frame in pairwise(frames):
        if before.place != frame.place:
            now = paths.at(frame.place)[0]
            assert (now >= frame.limits[:, 0]).all()
            assert (now <= frame.limits[:, 1]).all()
    assert frames[-1].final


# Counts ------------------------------------------------------------------------------------------------------------------


def comparisons(lengths=(2, 5, 8, 11, 20, 40, 80, 320)):
    return [compare(N=10, n=n, m=2, d=16, separations=1) for n in lengths]


def dots(ax):
    return [
        (float(line.get_xdata()[0]), int(line.get_ydata()[0])) for line in ax.lines if line.get_linestyle() == "None"
    ]


def test_counts_are_those_of_the_comparison():
    ax = plots.parameter_counts(comparisons()[::-1], plots.new_axes((5, 5)))
    rows = comparisons()[0].rows[:-1]
    resnet, *others = [line for line in ax.lines if line.get_linestyle() != "None"]
    assert list(resnet.get_xdata()) == [one.n / 2 for one in comparisons()]
    assert list(resnet.get_ydata()) == [one.rows[-1].parameters for one in comparisons()]
    for line, row in zip(others, rows, strict=True):
        assert list(line.get_ydata()) == [row.parameters] * 2
        assert str(line.get_label()).endswith(f"fewer from n = {float(row.ratio):.3g} m")
    assert dots(ax) == [(float(row.ratio), row.parameters) for row in rows]
    # The ResNet has more from the dot on, and no more before.
    for ratio, parameters in zip(resnet.get_xdata(), resnet.get_ydata(), strict=True):
        assert [row.parameters < parameters for row in rows] == [even <= ratio for even, _ in dots(ax)]
    assert ax.get_xscale() == ax.get_yscale() == "log"


def test_dots_beyond_the_lengths_are_left_out():
    ax = plots.parameter_counts(comparisons((2, 10)), plots.new_axes((5, 5)))
    assert len(dots(ax)) == 1
    assert len(ax.get_legend().get_texts()) == 4


@pytest.mark.parametrize(
    "found",
    [[], comparisons((3,)), comparisons((3, 3)), [*comparisons((3, 4)), compare(N=10, n=5, m=3, d=16, separations=1)]],
)
def test_comparisons_that_do_not_belong_together(found):
    with pytest.raises(ShapeError, match="expected comparisons for at least two lengths n, with the same N, m, d"):
        plots.parameter_counts(found, plots.new_axes((5, 5)))
