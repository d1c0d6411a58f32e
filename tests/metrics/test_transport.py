"""W1: closed forms, POT on the full product problem, the certificate, the laws, what is refused."""

import math

import numpy as np
import ot
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from torch import Tensor

import sinkformer as sf
from sinkformer.couplings import Coupling
from sinkformer.errors import (
    ConfigError,
    DeviceError,
    DTypeError,
    NonFiniteError,
    ShapeError,
    WeightError,
)
from sinkformer.metrics import flows, transport, w1
from sinkformer.metrics.grounds import axis_of_points, point
from sinkformer.metrics.problems import difference
from sinkformer.testing import random_measure

DOUBLE = torch.float64


def measure(points, weights) -> sf.Measure:
    x = torch.as_tensor(np.asarray(points, dtype=float))
    return sf.Measure.normalized(x[:, None] if x.dim() == 1 else x, torch.as_tensor(np.asarray(weights, dtype=float)))


def joint(x, y, plan) -> Coupling:
    """The coupling with these masses, of total one; its measures are its marginals."""
    p = torch.as_tensor(np.asarray(plan, dtype=float))
    p = p / p.sum()
    return Coupling.from_dense(measure(x, p.sum(1)), measure(y, p.sum(0)), p)


def random_joint(rng: np.random.Generator, n: int, m: int, d=(2, 2)) -> Coupling:
    return joint(rng.normal(size=(n, d[0])), rng.normal(size=(m, d[1])), rng.exponential(size=(n, m)))


def on_the_same(rng: np.random.Generator, pi: Coupling) -> Coupling:
    return joint(pi.source.points, pi.target.points, rng.exponential(size=tuple(pi.shape)))


def grid(pi: Coupling) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All pairs of points, one list for each axis, and their masses."""
    n, m = pi.shape
    x, y = pi.source.points.numpy(), pi.target.points.numpy()
    return np.repeat(x, m, 0), np.tile(y, (n, 1)), pi.to_dense().numpy().ravel()


def full(pi: Coupling, rho: Coupling, names=("euclidean", "euclidean"), euclidean: bool = False) -> float:
    """ot.emd2 on the whole product problem."""
    (x, y, p), (x2, y2, q) = grid(pi), grid(rho)
    dx, dy = distances(names[0], x, x2), distances(names[1], y, y2)
    return float(ot.emd2(p, q, np.hypot(dx, dy) if euclidean else dx + dy, numItermax=10**7))


def distances(name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if name == "discrete":
        return cdist(x, y, "chebyshev").clip(max=0.0) + (cdist(x, y) > 0)
    if name == "root":
        return np.sqrt(cdist(x, y))
    return cdist(x, y, name)


# The same metrics, as a user would give them.
METRICS = {
    "euclidean": sf.Euclidean(),
    "cityblock": lambda x, y: torch.cdist(x, y, p=1),
    "chebyshev": lambda x, y: torch.cdist(x, y, p=math.inf),
    "discrete": lambda x, y: (x.unsqueeze(-2) != y.unsqueeze(-3)).any(-1).to(x.dtype),
    "root": lambda x, y: sf.Euclidean()(x, y).sqrt(),
}


def bare(pi: sf.Measure | Coupling, rho, **options) -> float:
    return float(w1(pi, rho, **options).value)


@pytest.fixture(params=["all pairs", "chosen pairs"])
def simplex(request, monkeypatch):
    """Both ways to the exact value, whatever the size."""
    if request.param == "chosen pairs":
        monkeypatch.setattr(transport, "_MOST_DENSE", 0)
        monkeypatch.setattr(transport, "_MOST_DENSE_EUCLIDEAN", 0)
    return request.param


# Closed forms ------------------------------------------------------------------------------------------------------------


def test_diracs():
    a, b = joint([[0.0, 0.0]], [[1.0]], [[1.0]]), joint([[3.0, 4.0]], [[3.0]], [[1.0]])
    assert bare(a, b) == pytest.approx(5 + 2, abs=1e-12)
    assert bare(a, b, ground="euclidean") == pytest.approx(math.hypot(5, 2), abs=1e-12)
    assert bare(a, b, ground=(METRICS["cityblock"], sf.Euclidean())) == pytest.approx(7 + 2, abs=1e-12)
    assert bare(a, b, ground=(METRICS["cityblock"], sf.Euclidean(), "euclidean")) == pytest.approx(
        math.hypot(7, 2), abs=1e-12
    )


@pytest.mark.parametrize("ground", ["additive", "euclidean"])
def test_a_coupling_is_at_no_distance_from_itself(ground):
    pi = random_joint(np.random.default_rng(0), 5, 4)
    found = w1(pi, pi, ground=ground)
    assert float(found.value) == float(found.lower) == 0
    assert float(found.upper) <= 1e-11
    assert bool(found.exact)
    assert "agree" in str(found.method)


@pytest.mark.parametrize("ground", ["additive", "euclidean"])
def test_a_translation_of_one_axis(ground, simplex):
    rng = np.random.default_rng(1)
    pi = random_joint(rng, 6, 5)
    shift = torch.tensor([0.3, -0.4], dtype=DOUBLE)
    moved = joint(pi.source.points + shift, pi.target.points, pi.to_dense())
    assert bare(pi, moved, ground=ground) == pytest.approx(0.5, abs=1e-12)


def test_a_translation_of_both_axes(simplex):
    pi = random_joint(np.random.default_rng(2), 6, 5)
    moved = joint(pi.source.points + 1, pi.target.points - 2, pi.to_dense())
    assert bare(pi, moved) == pytest.approx(3 * math.sqrt(2), abs=1e-12)
    assert bare(pi, moved, ground="euclidean") == pytest.approx(math.sqrt(10), abs=1e-12)


def test_measures_on_a_line():
    mu, nu = measure([0.0, 1.0, 5.0], [1, 2, 1]), measure([0.5, 1.0, 2.0, 5.0], [1, 1, 1, 1])
    found = w1(mu, nu)
    assert "line" in str(found.method)
    assert bool(found.exact)
    expected = ot.wasserstein_1d(*(t.numpy() for t in (mu.points[:, 0], nu.points[:, 0], mu.weights, nu.weights)))
    assert float(found.value) == pytest.approx(float(expected), abs=1e-14)


def test_measures_on_a_line_need_no_matrix():
    """All pairs of places would take 320 GB."""
    n = 100_000
    x = np.random.default_rng(23).permutation(n) / n
    found = w1(measure(x, np.ones(n)), measure(x + 0.25, np.ones(n)))
    assert float(found.value) == pytest.approx(0.25, abs=1e-10)
    assert bool(found.exact)


def test_a_coupling_with_one_atom_on_a_side():
    mu, nu = measure([0.0, 1.0], [1, 3]), measure([2.0, 2.5], [1, 1])
    one = measure([[7.0, 7.0]], [1])
    product = [Coupling.from_dense(m, one, m.weights[:, None]) for m in (mu, nu)]
    assert bare(*product) == pytest.approx(bare(mu, nu), abs=1e-14)
    turned = [Coupling.from_dense(one, m, m.weights[None]) for m in (mu, nu)]
    assert bare(*turned) == pytest.approx(bare(mu, nu), abs=1e-14)


def test_the_discrete_metric_gives_total_variation(simplex):
    rng = np.random.default_rng(3)
    mu, nu = (measure(np.arange(6.0), rng.exponential(size=6)) for _ in range(2))
    expected = float((mu.weights - nu.weights).abs().sum() / 2)
    assert bare(mu, nu, ground=METRICS["discrete"]) == pytest.approx(expected, abs=1e-12)


# POT on the full problem -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("euclidean", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("names", [("euclidean", "euclidean"), ("cityblock", "root"), ("discrete", "chebyshev")])
def test_agrees_with_the_full_problem(names, shared, euclidean, simplex):
    rng = np.random.default_rng(4)
    for n, m in ((9, 12), (1, 8), (14, 14)):
        pi = random_joint(rng, n, m)
        rho = on_the_same(rng, pi) if shared else random_joint(rng, m, n)
        ground = tuple(METRICS[name] for name in names) + (("euclidean",) if euclidean else ())
        found = w1(pi, rho, ground=ground)
        expected = full(pi, rho, names, euclidean)
        assert float(found.value) == pytest.approx(expected, abs=1e-9)
        assert float(found.lower) <= expected + 1e-12
        assert float(found.upper) >= expected - 1e-12
        assert bool(found.exact)


def test_agrees_with_the_full_problem_at_a_size_where_pairs_are_chosen():
    rng = np.random.default_rng(5)
    pi = random_joint(rng, 40, 44)
    rho = on_the_same(rng, pi)
    found = w1(pi, rho)
    assert "chosen" in str(found.method)
    assert bool(found.exact)
    assert float(found.value) == pytest.approx(full(pi, rho), abs=1e-9)


@pytest.mark.parametrize("shared", [False, True])
def test_couplings_on_two_lines(shared):
    rng = np.random.default_rng(20)
    pi = random_joint(rng, 36, 34, d=(1, 1))
    rho = on_the_same(rng, pi) if shared else random_joint(rng, 24, 26, d=(1, 1))
    found = w1(pi, rho)
    assert "lines" in str(found.method)
    assert bool(found.exact)
    assert float(found.value) == pytest.approx(full(pi, rho), abs=1e-9)


def test_measures_in_the_plane(simplex):
    rng = np.random.default_rng(6)
    mu, nu = (measure(rng.normal(size=(n, 3)), rng.exponential(size=n)) for n in (30, 20))
    expected = ot.emd2(mu.weights.numpy(), nu.weights.numpy(), cdist(mu.points, nu.points))
    assert bare(mu, nu) == pytest.approx(float(expected), abs=1e-10)


def test_a_coupling_as_a_measure_has_the_euclidean_distance():
    rng = np.random.default_rng(7)
    pi, rho = random_joint(rng, 6, 5), random_joint(rng, 4, 7)
    assert bare(pi.as_measure(), rho.as_measure()) == pytest.approx(bare(pi, rho, ground="euclidean"), abs=1e-12)


# The bracket -------------------------------------------------------------------------------------------------------------


def random_case(rng: np.random.Generator) -> tuple[Coupling, Coupling, tuple[str, str], bool]:
    """Small integers and zeros: duplicate atoms, atoms and rows without mass, equal and unequal supports."""
    sizes, d = rng.integers(1, 8, 4), rng.integers(1, 3, 2)

    def cloud(n, k):
        return rng.integers(-2, 3, (n, k)).astype(float) if rng.random() < 0.6 else rng.normal(size=(n, k))

    def plan(n, m):
        p = rng.integers(0, 3, (n, m)) * (rng.exponential(size=(n, m)) if rng.random() < 0.5 else 1.0)
        p[rng.integers(n), rng.integers(m)] += 1
        return p

    pi = joint(cloud(sizes[0], d[0]), cloud(sizes[1], d[1]), plan(sizes[0], sizes[1]))
    if rng.random() < 0.5:
        rho = joint(pi.source.points, pi.target.points, plan(sizes[0], sizes[1]))
    else:
        rho = joint(cloud(sizes[2], d[0]), cloud(sizes[3], d[1]), plan(sizes[2], sizes[3]))
    names = rng.choice(list(METRICS), 2)
    return pi, rho, (str(names[0]), str(names[1])), bool(rng.random() < 0.3)


def check_random_cases(monkeypatch, seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    for case in range(count):
        pi, rho, names, euclidean = random_case(rng)
        ground = tuple(METRICS[name] for name in names) + (("euclidean",) if euclidean else ())
        expected = full(pi, rho, names, euclidean)
        for pairs in (1 << 20, 0):
            monkeypatch.setattr(transport, "_MOST_DENSE", pairs)
            monkeypatch.setattr(transport, "_MOST_DENSE_EUCLIDEAN", pairs)
            exact = w1(pi, rho, ground=ground)
            assert bool(exact.exact), (seed, case)
            assert abs(float(exact.value) - expected) <= 1e-9, (seed, case)
            loose = w1(pi, rho, ground=ground, method="bracket", tol=float(rng.choice([0.3, 0.02])))
            for found in (exact, loose):
                # The reference has rounding of its own.
                assert float(found.lower) <= expected + 1e-13, (seed, case)
                assert float(found.upper) >= expected - 1e-13, (seed, case)


def test_the_bracket_contains_the_value_in_random_cases(monkeypatch):
    check_random_cases(monkeypatch, 0, 300)


@pytest.mark.slow
def test_the_bracket_contains_the_value_in_ten_thousand_random_cases(monkeypatch):
    check_random_cases(monkeypatch, 1, 10_000)


@pytest.mark.parametrize("euclidean", [False, True])
def test_the_potential_proves_the_lower_bound(euclidean, simplex):
    rng = np.random.default_rng(8)
    for shared in (False, True):
        pi = random_joint(rng, 7, 6)
        rho = on_the_same(rng, pi) if shared else random_joint(rng, 5, 8)
        found = w1(pi, rho, ground="euclidean" if euclidean else "additive")
        proved = (found.potential[0] * pi.to_dense()).sum() - (found.potential[1] * rho.to_dense()).sum()
        assert 0 <= float(proved - found.lower) < 1e-11
        (x, y, _), (x2, y2, _) = grid(pi), grid(rho)
        x, y = np.concatenate([x, x2]), np.concatenate([y, y2])
        d = np.hypot(cdist(x, x), cdist(y, y)) if euclidean else cdist(x, x) + cdist(y, y)
        phi = torch.cat([part.flatten() for part in found.potential]).numpy()
        assert (np.abs(phi[:, None] - phi) <= d + 1e-12).all()


@pytest.mark.parametrize("tol", [0.1, 0.01, 0.001])
def test_the_bracket_is_as_narrow_as_asked(tol, monkeypatch):
    monkeypatch.setattr(transport, "_MOST_DENSE", 0)
    rng = np.random.default_rng(9)
    pi = random_joint(rng, 12, 14)
    rho = on_the_same(rng, pi)
    found = w1(pi, rho, tol=tol)
    assert float(found.width) <= tol * float(found.upper) + 1e-11
    assert float(found.lower) <= full(pi, rho) <= float(found.upper)


def test_sinkhorn_alone_gives_a_bracket_that_narrows():
    rng = np.random.default_rng(10)
    pi = random_joint(rng, 12, 12)
    rho = on_the_same(rng, pi)
    value = full(pi, rho)
    widths = []
    for tol in (0.5, 0.1, 0.03):
        found = w1(pi, rho, method="bracket", tol=tol)
        assert "Sinkhorn" in str(found.method)
        assert float(found.lower) <= value <= float(found.upper)
        widths.append(float(found.width) / value)
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] <= 0.03


@pytest.mark.parametrize("pivots", [1, 40])
def test_a_simplex_that_stops_early_leaves_an_honest_bracket(pivots, monkeypatch, simplex):
    monkeypatch.setattr(flows, "_MOST_PIVOTS", pivots)
    rng = np.random.default_rng(11)
    pi = random_joint(rng, 8, 8)
    rho = on_the_same(rng, pi)
    found = w1(pi, rho)
    assert not bool(found.exact)
    assert 0 <= float(found.lower) <= full(pi, rho) <= float(found.upper) < math.inf


def test_a_cost_below_what_is_proved_is_given_up():
    """Half the mass goes from 0 to 1; a flow that claims 1/8 is wrong, so the diameter, 4, has to serve."""
    axis = axis_of_points(
        sf.Euclidean(), [np.array([[0.0], [4.0]]), np.array([[1.0], [4.0]])], [np.ones(2, bool)] * 2, "X"
    )
    found = difference(np.full((2, 1), 0.5), np.full((2, 1), 0.5), axis, point(), False, 1.0)
    potential = np.array([[0.0], [-1.0], [0.0]])
    outcome = transport._outcome(found, 0.125, found.margin, potential, "a flow")
    assert outcome.lower == pytest.approx(0.5, abs=1e-11)
    assert outcome.value == 0.5
    assert outcome.upper == pytest.approx(2.0, abs=1e-11)
    assert "0.25 of what is proved" in outcome.method
    right = transport._outcome(found, 0.5, found.margin, potential, "a flow")
    assert (right.upper, right.method) == (0.5 + found.margin, "a flow")


def test_masses_over_many_orders_of_magnitude(simplex):
    rng = np.random.default_rng(12)
    x, y = rng.normal(size=(8, 2)), rng.normal(size=(8, 2))
    pi, rho = (joint(x, y, 10 ** (-12 * rng.random((8, 8)))) for _ in range(2))
    found = w1(pi, rho)
    assert float(found.value) == pytest.approx(full(pi, rho), abs=1e-9)
    assert float(found.width) < 1e-10


# Laws --------------------------------------------------------------------------------------------------------------------


@st.composite
def joints(draw) -> Coupling:
    n, m = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    coordinate = st.integers(-3, 3).map(float)
    x = draw(st.lists(coordinate, min_size=n, max_size=n))
    y = draw(st.lists(coordinate, min_size=2 * m, max_size=2 * m))
    masses = draw(st.lists(st.integers(0, 4), min_size=n * m, max_size=n * m).filter(any))
    return joint(x, np.reshape(y, (m, 2)), np.reshape(masses, (n, m)))


GROUNDS = st.sampled_from(["additive", "euclidean", (METRICS["discrete"], METRICS["root"])])


@given(joints(), joints(), GROUNDS)
def test_symmetry(pi, rho, ground):
    assert bare(pi, rho, ground=ground) == pytest.approx(bare(rho, pi, ground=ground), abs=1e-12)


@given(joints(), joints(), joints(), GROUNDS)
def test_triangle_inequality(pi, rho, tau, ground):
    assert bare(pi, tau, ground=ground) <= bare(pi, rho, ground=ground) + bare(rho, tau, ground=ground) + 1e-12


@given(joints(), joints(), GROUNDS)
def test_transposition(pi, rho, ground):
    turned = ground if isinstance(ground, str) else ground[::-1]
    assert bare(pi.mT, rho.mT, ground=turned) == pytest.approx(bare(pi, rho, ground=ground), abs=1e-12)


@given(joints(), joints())
def test_scaling_of_the_metric(pi, rho):
    def twice(x: Tensor, y: Tensor) -> Tensor:
        return 2 * torch.cdist(x, y)

    assert bare(pi, rho, ground=(twice, twice)) == pytest.approx(2 * bare(pi, rho), abs=1e-12)


@pytest.mark.parametrize("scale", [1e-150, 1e-60, 1e-8, 1.0, 1e100, 1e150])
@pytest.mark.parametrize("d", [1, 2])
@pytest.mark.parametrize("ground", ["additive", "euclidean"])
def test_scaling_of_the_points(scale, d, ground, simplex):
    rng = np.random.default_rng(20)
    x, y, offset = rng.normal(size=(7, d)), rng.normal(size=(6, d)), rng.normal(size=d)
    plans = rng.exponential(size=(2, 7, 6))
    expected = w1(*(joint(x, y, p) for p in plans), ground=ground)
    found = w1(*(joint(scale * (x + offset), scale * y, p) for p in plans), ground=ground)
    assert bool(found.exact)
    assert float(found.value) / scale == pytest.approx(float(expected.value), rel=1e-12)
    assert float(found.lower) / scale == pytest.approx(float(expected.lower), rel=1e-10)
    values = [
        float((part / scale * torch.from_numpy(p / p.sum())).sum())
        for part, p in zip(found.potential, plans, strict=True)
    ]
    proved = values[0] - values[1]
    assert proved == pytest.approx(float(expected.value), rel=1e-10)


@pytest.mark.parametrize("scale", [1e-150, 1e-60, 1e-8, 1e100, 1e150])
def test_scaling_of_a_matrix_of_distances(scale, simplex):
    rng = np.random.default_rng(21)
    mu, nu = (measure(rng.normal(size=(9, 2)), rng.exponential(size=9)) for _ in "ab")
    x = torch.cat([mu.points, nu.points])
    d = sf.Euclidean()(x, x)
    found = w1(mu, nu, ground=scale * d)
    assert bool(found.exact)
    assert float(found.value) / scale == pytest.approx(bare(mu, nu, ground=d), rel=1e-12)


@pytest.mark.parametrize("method", ["geomloss", "sliced"])
@pytest.mark.parametrize("scale", [1e-150, 1e-8, 1e100])
def test_scaling_of_the_estimates(method, scale):
    rng = np.random.default_rng(22)
    x, y, plans = rng.normal(size=(5, 2)), rng.normal(size=(4, 1)), rng.exponential(size=(2, 5, 4))
    expected = bare(*(joint(x, y, p) for p in plans), ground="euclidean", method=method)
    found = bare(*(joint(scale * x, scale * y, p) for p in plans), ground="euclidean", method=method)
    # GeomLoss anneals in steps that start at the diameter, which is no power of two of the other.
    assert found / scale == pytest.approx(expected, rel=1e-6)


def test_a_small_spread_far_from_the_origin_on_another_coordinate():
    """Squares of the offset are 1 and those of the spread 1e-340."""
    a, b = measure([[1.0, 0.0], [1.0, 1e-170]], [1, 1]), measure([[1.0, 0.0], [1.0, 3e-170]], [1, 1])
    assert bare(a, b) / 1e-170 == pytest.approx(1.0, abs=1e-12)


def test_points_whose_distance_is_no_number():
    a, b = measure([-1.5e308, 0.0], [1, 1]), measure([1.5e308, 0.0], [1, 1])
    with pytest.raises(NonFiniteError, match=r"coordinates from -1.5e\+308 to 1.5e\+308; scale"):
        w1(a, b)


@given(joints(), joints())
def test_between_its_bounds(pi, rho):
    found = bare(pi, rho)
    for axis in (0, 1):
        marginal = [
            measure((c.source if axis == 0 else c.target).points, c.to_dense().sum(1 - axis)) for c in (pi, rho)
        ]
        assert found >= bare(*marginal) - 1e-12
    euclidean = bare(pi, rho, ground="euclidean")
    assert euclidean - 1e-12 <= found <= math.sqrt(2) * euclidean + 1e-12


def test_at_most_the_diameter_times_total_variation():
    rng = np.random.default_rng(13)
    pi = random_joint(rng, 6, 7)
    rho = on_the_same(rng, pi)
    tv = float((pi.to_dense() - rho.to_dense()).abs().sum() / 2)
    diameter = float(torch.cdist(pi.source.points, pi.source.points).max())
    diameter += float(torch.cdist(pi.target.points, pi.target.points).max())
    assert bare(pi, rho) <= diameter * tv + 1e-12


def test_permutation_padding_and_splitting(simplex):
    rng = np.random.default_rng(14)
    pi, rho = random_joint(rng, 5, 6), random_joint(rng, 4, 5)
    expected = bare(pi, rho)
    x, y, p = pi.source.points.numpy(), pi.target.points.numpy(), pi.to_dense().numpy()
    rows, columns = rng.permutation(5), rng.permutation(6)
    assert bare(joint(x[rows], y[columns], p[rows][:, columns]), rho) == pytest.approx(expected, abs=1e-12)
    padded = joint(np.vstack([x, [[1e6, 1e6]]]), np.vstack([[[-1e6, 0.0]], y]), np.pad(p, ((0, 1), (1, 0))))
    assert bare(padded, rho) == pytest.approx(expected, abs=1e-12)
    split = joint(np.vstack([x, x[:1]]), y, np.vstack([0.3 * p[:1], p[1:], 0.7 * p[:1]]))
    assert bare(split, rho) == pytest.approx(expected, abs=1e-12)


def test_a_batch_is_its_elements():
    g = torch.Generator().manual_seed(0)
    mu = sf.Measure.stack([random_measure(n, 2, generator=g) for n in (5, 3, 1, 4)])
    nu = sf.Measure.stack([random_measure(m, 1, generator=g) for m in (4, 6, 2, 4)])
    pi, rho = (Coupling.solve(mu, nu, cost=torch.rand(4, 5, 6, generator=g, dtype=DOUBLE), epsilon=0.1) for _ in "ab")
    found = w1(pi, rho, ground="additive")
    assert found.value.shape == (4,)
    assert found.potential[0].shape == (4, 5, 6)
    assert len(found.method) == 4
    assert float(found.value[2]) == pytest.approx(0, abs=1e-12)
    for k in range(4):
        alone = w1(pi[k], rho[k])
        torch.testing.assert_close(alone.value, found.value[k], atol=1e-14, rtol=0)
        torch.testing.assert_close(alone.lower, found.lower[k], atol=1e-14, rtol=0)
        torch.testing.assert_close(alone.potential[0], found.potential[0][k], atol=1e-12, rtol=0)
    twice = w1(pi._map(lambda t: t.reshape(2, 2, *t.shape[1:])), rho._map(lambda t: t.reshape(2, 2, *t.shape[1:])))
    torch.testing.assert_close(twice.value.flatten(), found.value, atol=0, rtol=0)
    assert w1(pi[:0], rho[:0]).value.shape == (0,)


# Grounds -----------------------------------------------------------------------------------------------------------------


def test_a_matrix_of_distances_is_read_at_the_atoms_of_both():
    rng = np.random.default_rng(15)
    pi, rho = random_joint(rng, 4, 5), random_joint(rng, 3, 6)
    x, y = (torch.cat([getattr(c, name).points for c in (pi, rho)]) for name in ("source", "target"))
    given_ = bare(pi, rho, ground=(torch.cdist(x, x), sf.Matrix(torch.cdist(y, y))))
    assert given_ == pytest.approx(bare(pi, rho), abs=1e-12)
    tau = on_the_same(rng, pi)
    x, y = pi.source.points, pi.target.points
    expected = bare(pi, tau)
    assert bare(pi, tau, ground=(torch.cdist(x, x), torch.cdist(y, y))) == pytest.approx(expected, abs=1e-12)
    both = torch.cdist(x, x).repeat(2, 2)  # duplicates at distance zero
    assert bare(pi, tau, ground=(both, torch.cdist(y, y))) == pytest.approx(expected, abs=1e-12)


def test_a_matrix_for_each_pair_of_a_batch():
    rng = np.random.default_rng(16)
    mu, nu = (sf.Measure.stack([measure(np.arange(4.0), rng.exponential(size=4)) for _ in range(2)]) for _ in "ab")
    d = torch.cdist(mu.points, mu.points) * torch.tensor([1.0, 3.0], dtype=DOUBLE)[:, None, None]
    plain = w1(mu, nu).value
    torch.testing.assert_close(w1(mu, nu, ground=d).value, plain * torch.tensor([1.0, 3.0]), atol=1e-12, rtol=0)


@pytest.mark.parametrize("shape", [(5, 8, 8), (1, 8, 8), (2, 1, 8, 8), (8,), (2, 8, 7), (2, 9, 9), (7, 7)])
def test_matrices_that_do_not_fit_the_batch(shape):
    pair = [sf.Measure.stack([measure(np.arange(4.0) + k, np.ones(4)) for _ in range(2)]) for k in (0, 1)]
    with pytest.raises(ShapeError, match=r"expected (a|one) distance matrix on X.*received \("):
        w1(pair[0], pair[1], ground=torch.zeros(shape, dtype=DOUBLE))
    with pytest.raises(ShapeError):
        w1(pair[0][0], pair[1][0], ground=torch.zeros(1, 8, 8, dtype=DOUBLE))


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (sf.SqEuclidean(), r"triangle.*d\(a, c\) = 4 .* 1 \+ 1 for a = \[0.0\], b = \[1.0\], c = \[2.0\]"),
        (sf.NegativeDot(), r"< 0"),
        (lambda x, y: (x - y.mT).clamp_min(0), r"d\(b, a\)"),
        (lambda x, y: torch.ones(len(x), len(y), dtype=x.dtype), r"d\(a, a\) = 1"),
        (torch.tensor([[0.0, 1.0, 4.0], [1.0, 0.0, 1.0], [4.0, 1.0, 0.0]]), r"a = atom 0, b = atom 1, c = atom 2"),
    ],
)
def test_what_is_no_metric_is_refused_with_its_atoms(metric, message):
    mu, nu = measure([0.0, 1.0, 2.0], [1, 1, 1]), measure([0.0, 1.0, 2.0], [1, 2, 1])
    with pytest.raises(ConfigError, match=message):
        w1(mu, nu, ground=metric)


# Couplings that did not converge -----------------------------------------------------------------------------------------


def unconverged(g: torch.Generator) -> Coupling:
    mu, nu = random_measure(6, 2, generator=g), random_measure(5, 2, generator=g)
    return Coupling.solve(mu, nu, epsilon=0.01, max_iterations=1, on_failure="ignore")


def test_what_did_not_converge_is_rounded_first_and_that_is_said():
    g = torch.Generator().manual_seed(1)
    pi = unconverged(g)
    rho = Coupling.from_dense(pi.source, pi.target, pi.source.weights[:, None] * pi.target.weights)
    assert float(pi.marginal_error()) > 1e-3
    found = w1(pi, rho)
    assert "rounded first" in str(found.method)
    assert float(found.value) == pytest.approx(full(pi.rounded(), rho), abs=1e-10)
    raw = w1(pi, rho, rounded=False)
    assert "rounded" not in str(raw.method)
    assert abs(float(raw.value) - float(found.value)) > 1e-6


def test_one_sided_plans_are_taken_as_they_are_unless_asked():
    g = torch.Generator().manual_seed(2)
    mu, nu = random_measure(6, 2, generator=g), random_measure(5, 2, generator=g)
    head = Coupling.solve(mu, nu, epsilon=0.1, tau_b=0.0)
    target = Coupling.solve(mu, nu, epsilon=0.1)
    assert bare(head, target) == pytest.approx(full(head, target.rounded()), abs=1e-10)
    assert bare(head, target, rounded=True) == pytest.approx(full(head.rounded(), target.rounded()), abs=1e-10)


def test_a_coupling_in_single_precision():
    g = torch.Generator().manual_seed(3)
    mu, nu = (random_measure(6, 2, generator=g).to(torch.float32) for _ in "ab")
    pi, rho = (Coupling.solve(mu, nu, cost=cost, epsilon=0.1) for cost in (sf.SqEuclidean(), sf.Euclidean()))
    found = w1(pi, rho)
    wide = [c._map(Tensor.double).rounded() for c in (pi, rho)]
    assert found.value.dtype == DOUBLE
    assert float(found.value) == pytest.approx(full(*wide), abs=1e-6)
    assert bool(found.exact)


# Estimates ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ground", ["additive", "euclidean"])
def test_geomloss_is_an_estimate(ground):
    rng = np.random.default_rng(17)
    pi, rho = random_joint(rng, 5, 4), random_joint(rng, 5, 4)
    found = w1(pi, rho, method="geomloss", ground=ground)
    assert (float(found.lower), float(found.upper)) == (0, math.inf)
    assert not bool(found.exact)
    assert "estimate" in str(found.method)
    assert float(found.value) == pytest.approx(bare(pi, rho, ground=ground), rel=0.05)


@pytest.mark.parametrize("method", ["geomloss", "sliced"])
@pytest.mark.parametrize("points", [[[1.0, 2.0]], [[1.0, 2.0], [1.0, 2.0]]])
def test_the_estimates_of_one_place_are_zero(method, points):
    mu = measure(points, np.ones(len(points)))
    assert bare(mu, mu, method=method) == 0.0


def test_the_sliced_distance_is_a_small_estimate():
    rng = np.random.default_rng(18)
    pi, rho = random_joint(rng, 5, 4), random_joint(rng, 5, 4)
    found = w1(pi, rho, method="sliced", ground="euclidean")
    assert 0 < float(found.value) <= bare(pi, rho, ground="euclidean")
    assert not bool(found.exact)
    with pytest.raises(ConfigError, match="Euclidean axes"):
        w1(pi, rho, method="sliced", ground=(METRICS["discrete"], sf.Euclidean()))


# What is refused, and what is shown --------------------------------------------------------------------------------------


def pair() -> tuple[Coupling, Coupling]:
    rng = np.random.default_rng(19)
    pi = random_joint(rng, 3, 4)
    return pi, on_the_same(rng, pi)


def test_two_kinds():
    pi, _ = pair()
    with pytest.raises(DTypeError, match="as_measure"):
        w1(pi, pi.source)
    with pytest.raises(DTypeError, match="two couplings or two measures, received ndarray"):
        w1(np.ones(3), pi)


def test_spaces_of_two_dimensions():
    pi, _ = pair()
    other = random_joint(np.random.default_rng(0), 3, 4, d=(2, 3))
    with pytest.raises(ShapeError, match="one dimension on Y, received 2 and 3"):
        w1(pi, other)
    batch = pi._map(lambda t: t[None])
    with pytest.raises(ShapeError, match="batch shape"):
        w1(pi, batch)


def test_totals_that_differ():
    pi, _ = pair()
    less = Coupling.from_dense(pi.source, pi.target, 0.9 * pi.to_dense())
    with pytest.raises(WeightError, match=r"received totals 1 and 0\.9; round both with \.rounded"):
        w1(pi, less)
    nothing = Coupling.from_dense(pi.source, pi.target, 0 * pi.to_dense())
    with pytest.raises(WeightError, match="positive total"):
        w1(nothing, nothing)
    almost = Coupling.from_dense(pi.source, pi.target, (1 + 1e-11) * pi.to_dense())
    assert bare(pi, almost) == pytest.approx(0, abs=1e-10)


def test_masses_of_other_totals_scale():
    pi, rho = pair()
    half = [Coupling.from_dense(c.source, c.target, c.to_dense() / 2) for c in (pi, rho)]
    assert bare(*half) == pytest.approx(bare(pi, rho) / 2, abs=1e-12)


def test_a_problem_without_a_solution():
    pi, rho = pair()
    lost = Coupling.solve(
        pi.source, pi.target, cost=torch.full(tuple(pi.shape), 1e308, dtype=DOUBLE), epsilon=1e-300, on_failure="ignore"
    )
    with pytest.raises(NonFiniteError, match=r"solution\.status"):
        w1(lost, rho)
    with pytest.raises(NonFiniteError, match="finite distances on X"):
        w1(pi, rho, ground=(torch.full((3, 3), torch.nan), sf.Euclidean()))


def test_devices():
    pi, _ = pair()
    elsewhere = pi.source.to("meta")
    with pytest.raises(DeviceError, match=r"cpu and meta; use \.to"):
        w1(pi.source, elsewhere)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ground": "manhattan"}, ConfigError, "manhattan"),
        ({"ground": (sf.Euclidean(),)}, ConfigError, "metric of Y"),
        ({"ground": (sf.Euclidean(), sf.Euclidean(), "l3")}, ConfigError, "third entry"),
        ({"ground": (sf.Euclidean(), 3)}, DTypeError, "received int"),
        ({"ground": (torch.zeros(5, 5), sf.Euclidean())}, ShapeError, r"on X of shape \(6, 6\)"),
        ({"ground": (sf.Euclidean(), lambda x, y: x)}, ShapeError, "metric on Y"),
        ({"method": "magic"}, ConfigError, "magic"),
        ({"tol": -1}, ConfigError, "tol"),
        ({"tol": math.nan}, ConfigError, "tol"),
        ({"rounded": "yes"}, ConfigError, "rounded"),
    ],
)
def test_options_out_of_range(options, error, message):
    with pytest.raises(error, match=message):
        w1(*pair(), **options)


def test_a_bar_on_request(capsys):
    pi, rho = pair()
    w1(pi, rho)
    assert capsys.readouterr().err == ""
    w1(pi, rho, progress=True)
    assert "W1" in capsys.readouterr().err


def test_what_a_result_says():
    pi, rho = pair()
    found = w1(pi, rho)
    assert repr(found).startswith(f"W1Result({float(found.value):.6g}, exact: network simplex")
    loose = w1(pi, rho, method="bracket", tol=0.2)
    assert f"bracket [{float(loose.lower):.6g}" in repr(loose)
    batch = w1(pi._map(lambda t: t[None]), rho._map(lambda t: t[None]))
    assert repr(batch).startswith("W1Result(batch=(1,), exact=1/1")
