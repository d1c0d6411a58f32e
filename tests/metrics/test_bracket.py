"""Bounds of a transport, whatever the entropy and however bad the flow or the dual they are made of."""

from itertools import islice

import numpy as np
import ot
import pytest
from scipy.spatial.distance import cdist

from sinkformer.metrics import bracket, flows
from sinkformer.metrics.flows import Bounds
from sinkformer.metrics.grounds import Ground
from sinkformer.metrics.problems import Problem


def problem(seed: int, euclidean: bool = False) -> tuple[Problem, float]:
    """Supply on 6 x 5 places, demand on 4 x 7, some empty; and the cost of the transport by POT."""
    rng = np.random.default_rng(seed)
    dx, dy = (cdist(rng.normal(size=(n, 2)), rng.normal(size=(m, 2))) for n, m in ((6, 4), (5, 7)))
    supply, demand = (rng.exponential(size=s) * (rng.random(s) < 0.7) for s in ((6, 5), (4, 7)))
    supply[0, 0] = demand[0, 0] = 1.0
    supply, demand = supply / supply.sum(), demand / demand.sum()
    x, y = dx[:, None, :, None], dy[None, :, None, :]
    d = np.hypot(x, y) if euclidean else x + y
    value = ot.emd2(supply.ravel(), demand.ravel(), np.ascontiguousarray(d.reshape(30, 28)))
    return Problem(supply, demand, Ground(dx, dy, euclidean), 1.0, 0.0), float(value)


@pytest.mark.parametrize("seed", range(4))
def test_every_stage_bounds_the_cost(seed):
    given, value = problem(seed)
    widths = []
    for stage in islice(bracket.anneal(given), 8):
        upper, xi = stage.rounded()
        lower, psi = stage.lower()
        legs = bracket.two_legs(given, xi)
        assert lower <= value + 1e-14
        assert value - 1e-14 <= legs <= upper + 1e-14
        assert flows.dual_value(given, given.ground.transform(psi)[1], psi) == pytest.approx(lower, abs=1e-15)
        np.testing.assert_allclose(xi.sum(0), given.supply.sum(0), atol=1e-14)
        np.testing.assert_allclose(xi.sum(1), given.demand.sum(1), atol=1e-14)
        widths.append((upper - lower) / value)
    assert widths[-1] < 0.05 < widths[0]


def test_two_legs_of_the_best_distribution_between_are_the_cost():
    given, value = problem(5)
    i, j = np.nonzero(given.supply)
    k, l = np.nonzero(given.demand)  # noqa: E741
    costs = given.ground.costs((i[:, None], j[:, None]), (k[None], l[None]))
    plan = ot.emd(given.supply[i, j], given.demand[k, l], costs)
    xi = np.zeros((4, 5))
    np.add.at(xi, (np.broadcast_to(k, plan.shape), np.broadcast_to(j[:, None], plan.shape)), plan)
    assert bracket.two_legs(given, xi) == pytest.approx(value, abs=1e-14)


def test_the_scalings_stay_in_range():
    """Places far apart in entropies: the annealing ends before the exponential does."""
    rng = np.random.default_rng(6)
    x, y = np.concatenate([rng.normal(size=(3, 1)), 100 + rng.normal(size=(3, 1))]), rng.normal(size=(2, 1))
    supply, demand = rng.random((6, 2)), rng.random((6, 2))
    given = Problem(supply / supply.sum(), demand / demand.sum(), Ground(cdist(x, x + 0.1), cdist(y, y)), 1.0, 0.0)
    with np.errstate(all="raise", under="ignore"):
        stages = list(islice(bracket.anneal(given), 60))
    assert stages[-1].last
    assert all(np.isfinite(stage.u).all() and np.isfinite(stage.v).all() for stage in stages)
    lower, upper = stages[-1].lower()[0], stages[-1].rounded()[0]
    assert 0 < lower <= upper
    assert upper - lower < 0.05 * upper


@pytest.mark.parametrize("entropies", [600.0, 660.0, 680.0, 700.0, 710.0, 720.0, 735.0, 740.0, 742.5, 744.0])
@pytest.mark.parametrize("distance", [0.13, 0.4, 1.3])
def test_mass_on_a_denormal_entry_of_the_kernel_is_repaired(entropies, distance):
    """One pair of places: any plan costs the distance, also where kernel x distance would lose its digits."""
    one, scaling = np.ones((1, 1)), np.full((1, 1), np.exp(entropies / 2))
    ground = Ground(np.full((1, 1), distance), np.zeros((1, 1)))
    for given in (ground, Ground(ground.dy, ground.dx)):
        stage = bracket.Stage(Problem(one, one, given, 1.0, 0.0), distance / entropies, scaling, scaling, 0, True)
        assert stage.rounded()[0] == pytest.approx(distance, rel=1e-12)


@pytest.mark.parametrize("euclidean", [False, True])
def test_any_dual_and_any_flow_are_bounds(euclidean):
    given, value = problem(7, euclidean)
    rng = np.random.default_rng(8)
    for _ in range(20):
        count = np.count_nonzero(given.supply), np.count_nonzero(given.demand)
        i, j = rng.integers(count[0], size=9), rng.integers(count[1], size=9)
        starts, stops = np.nonzero(given.supply), np.nonzero(given.demand)
        costs = given.ground.costs((starts[0][i], starts[1][i]), (stops[0][j], stops[1][j]))
        found = flows._certified(given, (i, j, rng.exponential(size=9)), costs, rng.normal(size=count[1]))
        assert found.lower <= value + 1e-14 <= found.upper + 2e-14


@pytest.mark.parametrize("euclidean", [False, True])
def test_pairs_are_added_until_the_bracket_closes(euclidean):
    """From a dual that knows nothing."""
    given, value = problem(9, euclidean)
    psi = np.where(given.demand > 0, 0.0, np.inf)
    found, _, rounds = flows.pruned(given, Bounds(-1.0, 100.0, psi), 1e-3, 0.0)
    assert found.upper == pytest.approx(value, abs=1e-13)
    assert found.lower == pytest.approx(value, abs=1e-11)
    assert rounds > 0
    whole = flows.dense(given)
    assert whole.upper == pytest.approx(value, abs=1e-13)
    assert whole.lower == pytest.approx(value, abs=1e-11)


def test_a_tolerance_stops_the_rounds():
    given, value = problem(10)
    psi = np.where(given.demand > 0, 0.0, np.inf)
    exact = flows.pruned(given, Bounds(-1.0, 100.0, psi), 1e-3, 0.0)
    loose = flows.pruned(given, Bounds(-1.0, 100.0, psi), 1e-3, 0.5)
    assert loose[2] <= exact[2]
    assert loose[0].gap <= 0.5
    assert loose[0].lower <= value <= loose[0].upper
