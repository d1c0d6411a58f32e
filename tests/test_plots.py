import numpy as np
import pytest
import torch

import sinkformer as sf
from sinkformer import plots
from sinkformer.errors import ConfigError, ShapeError

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def _close():
    yield
    from matplotlib import pyplot as plt

    plt.close("all")


def image(ax):
    return np.asarray(ax.images[0].get_array())


def test_a_coupling_is_drawn_as_its_plan():
    mu = sf.Measure.uniform(torch.randn(3, 2, dtype=torch.float64))
    nu = sf.Measure.uniform(torch.randn(4, 2, dtype=torch.float64))
    pi = sf.Coupling.solve(mu, nu, epsilon=0.5)
    ax = plots.coupling(pi, rows=list("abc"), columns=list("wxyz"))
    np.testing.assert_allclose(image(ax), pi.to_dense().numpy())
    assert [t.get_text() for t in ax.get_yticklabels()] == list("abc")
    assert [t.get_text() for t in ax.get_xticklabels()] == list("wxyz")


def test_matplotlib_manners(monkeypatch):
    from matplotlib import pyplot as plt

    monkeypatch.setattr(plt, "show", lambda *a, **k: pytest.fail("show was called"))
    _, mine = plt.subplots()
    assert plots.coupling(np.eye(2), mine) is mine
    _, current = plt.subplots()
    assert plots.coupling(torch.eye(2, requires_grad=True)) is current


def test_marks_and_limits():
    ax = plots.coupling(np.eye(3), marked=[(0, 0), (1, 2)], limits=(0.0, 2.0), label="share")
    assert [p.get_xy() for p in ax.patches] == [(-0.5, -0.5), (1.5, 0.5)]
    assert ax.images[0].get_clim() == (0.0, 2.0)
    # A plan without mass has a colour scale all the same.
    assert plots.coupling(np.zeros((2, 2)), plots.new_axes((2, 2))).images[0].get_clim() == (0.0, 1.0)


def test_names_are_letters_not_formulas(tmp_path):
    ax = plots.coupling(np.eye(2), plots.new_axes((2, 2)), rows=["$x", "a_b^c"], columns=["$x$", "y" * 40])
    plots.save(ax, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 0
    assert len(ax.get_xticklabels()[1].get_text()) == 24


def test_many_names_are_left_out():
    assert len(plots.coupling(np.eye(200), rows=["x"] * 200).get_yticklabels()) < 50


def test_bad_input():
    with pytest.raises(
        ShapeError, match=r"expected one plan of shape \(n, m\), received \(2, 2, 2\); choose one of a batch"
    ):
        plots.coupling(np.zeros((2, 2, 2)))
    with pytest.raises(ShapeError, match=r"expected 2 names for the rows of a plan of shape \(2, 3\), received 3"):
        plots.coupling(np.zeros((2, 3)), rows=["a", "b", "c"])
    with pytest.raises(ConfigError, match=r"expected a picture file ending in one of .*png.*; received 'a.doc'"):
        plots.check_format("a.doc")


def test_saving_leaves_no_figure_open(tmp_path):
    from matplotlib import pyplot as plt

    plots.save(plots.coupling(np.eye(2), plots.new_axes((2, 2))), tmp_path / "a.svg")
    assert plt.get_fignums() == []
