"""Exact transport: POT's network simplex, on all pairs of places or on those that matter, and its certificate.

Nothing is taken on trust. The flow that comes back is repaired to be feasible, which makes its cost an upper bound; the
dual that comes back is replaced by its transform, which makes its value a lower bound. So a solver that stopped early
gives an honest bracket.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import ot
from scipy import sparse
from scipy.optimize import linprog

from sinkformer.metrics.problems import Difference, Problem

# Pivots after which POT gives up; a problem of 30 000 places takes a few million.
_MOST_PIVOTS = 100_000_000
# Rounds of adding the pairs that the dual left out.
_MOST_ROUNDS = 30
# Most pairs a place that one round adds.
_MOST_ARCS = 40
# Relative width at which nothing but rounding is left.
_CLOSED = 1e-11
# The tightest that HiGHS takes.
_HIGHS = {f"{side}_feasibility_tolerance": 1e-10 for side in ("primal", "dual")}
# Weight of the best dual so far in the one that chooses the next pairs.
_STEADY = 0.5


@dataclass(frozen=True)
class Bounds:
    """Two bounds of the transport cost of a ``Problem`` (mass one), and the dual that proves the lower one.

    Attributes:
        lower: value of the dual.
        upper: cost of a feasible flow.
        psi: the dual on the grid of the demand, ``+inf`` where there is none.
    """

    lower: float
    upper: float
    psi: np.ndarray

    @property
    def gap(self) -> float:
        """Relative width."""
        return (self.upper - self.lower) / self.upper if self.upper > 0 else 0.0


def dual_value(problem: Problem, phi: np.ndarray, psi: np.ndarray) -> float:
    """<phi, supply> - <psi, demand>, a lower bound of the cost wherever phi - psi <= d."""
    arrivals = problem.demand > 0
    return float((phi * problem.supply).sum() - (psi[arrivals] * problem.demand[arrivals]).sum())


def repair_cost(problem: Problem, short: np.ndarray, open_: np.ndarray) -> float:
    """Cost of the product plan of what is still to leave, ``(n, m)``, and still to arrive, ``(n', m')``, of one total."""
    total = float(open_.sum())
    if total <= 0:
        return 0.0
    x = short.sum(1) @ problem.ground.dx @ open_.sum(1)
    y = short.sum(0) @ problem.ground.dy @ open_.sum(0)
    return float(x + y) / total  # the additive product bounds the Euclidean one


def dense(problem: Problem) -> Bounds:
    """Network simplex on all pairs."""
    starts, stops = np.nonzero(problem.supply), np.nonzero(problem.demand)
    costs = problem.ground.costs((starts[0][:, None], starts[1][:, None]), (stops[0][None], stops[1][None]))
    plan, dual = _simplex(problem.supply[starts], problem.demand[stops], costs)
    i, j = np.nonzero(plan)
    return _certified(problem, (i, j, plan[i, j]), costs[i, j], dual)


def plan_cost(a: np.ndarray, b: np.ndarray, costs: np.ndarray) -> float:
    """Cost of an optimal plan for a matrix of distances, an upper bound whatever the solver did."""
    plan, _ = _simplex(a, b, costs)
    i, j = np.nonzero(plan)
    mass, short, _ = _repaired(a, b, i, j, plan[i, j])
    return float(mass @ costs[i, j]) + float(short.sum()) * float(costs.max())


def pruned(problem: Problem, start: Bounds, slack: float, tol: float) -> tuple[Bounds, int, int]:
    """Network simplex on the pairs of small slack, extended until the dual leaves no pair out.

    Args:
        problem: what to transport.
        start: bounds known so far, with the dual to choose the first pairs by.
        slack: pairs of at most this slack are taken.
        tol: relative width of the bracket to stop at; 0 for the exact value.

    Returns:
        ``(bounds, pairs, rounds)``: pairs used in the last round, and how many rounds there were.
    """
    starts, stops = problem.supply > 0, problem.demand > 0
    a, b = problem.supply[starts], problem.demand[stops]
    at, to = np.nonzero(starts), np.nonzero(stops)
    keys, best, most = _corner(a, b), start, _MOST_ARCS * max(len(a), len(b))
    choosers, rounds = [start.psi], 0
    while rounds < _MOST_ROUNDS:
        count = len(keys)
        for psi in choosers:
            i, j, slacks = problem.ground.near(psi, starts, stops, slack)
            if len(slacks) > most:
                chosen = np.argpartition(slacks, most)[:most]
                i, j = i[chosen], j[chosen]
            keys = np.union1d(keys, i.astype(np.int64) * len(b) + j)
            if len(keys) > count:
                break
        if rounds and len(keys) == count:
            break
        rounds += 1
        i, j = np.divmod(keys, len(b))
        costs = problem.ground.costs((at[0][i], at[1][i]), (to[0][j], to[1][j]))
        flow, dual = _simplex(a, b, sparse.coo_array((costs, (i, j)), shape=(len(a), len(b))))
        (i, j), mass = flow.coords, flow.data
        travelled = problem.ground.costs((at[0][i], at[1][i]), (to[0][j], to[1][j]))
        bounds = _certified(problem, (i, j, mass), travelled, dual)
        # The dual of a restricted problem swings far from one round to the next; half way from the best one is steadier,
        # but only its own says that no pair is left out.
        steady = np.where(stops, _STEADY * best.psi + (1 - _STEADY) * bounds.psi, np.inf)
        best = _better(best, bounds)
        if best.gap > max(tol, _CLOSED):
            value = dual_value(problem, problem.ground.transform(steady)[1], steady)
            best = _better(best, Bounds(value, best.upper, steady))
        if best.gap <= max(tol, _CLOSED):
            break
        choosers = [steady, bounds.psi]
    return best, len(keys), rounds


def on_lines(found: Difference, problem: Problem) -> Bounds | None:
    """Flow between neighbours on the grid of two lines, by the interior-point method of HiGHS; None where that fails.

    On a line, every way passes through the neighbours, so that about 4 n m arcs carry what (n m)^2 pairs would.
    """
    shape = found.values.shape
    places = np.arange(found.values.size).reshape(shape)
    tails, heads, lengths = [], [], []
    for axis, line in enumerate((found.x.line, found.y.line)):
        assert line is not None
        order = line.argsort()
        ways = np.take(places, order, axis)
        gaps = np.broadcast_to(np.diff(line[order])[(..., None) if axis == 0 else None], np.diff(ways, axis=axis).shape)
        near, far = (np.take(ways, range(*ends), axis).ravel() for ends in ((0, len(line) - 1), (1, len(line))))
        tails += [near, far]
        heads += [far, near]
        lengths += [gaps.ravel(), gaps.ravel()]
    tail, head, length = (np.concatenate(part) for part in (tails, heads, lengths))
    arcs = np.arange(len(length))
    ones = np.ones(len(length))
    incidence = sparse.csc_array(
        (np.r_[ones, -ones], (np.r_[tail, head], np.r_[arcs, arcs])), shape=(places.size, arcs.size)
    )
    supply = found.values.ravel() / problem.moved
    result = linprog(length, A_eq=incidence, b_eq=supply, method="highs-ipm", options=_HIGHS)
    if result.x is None:
        return None
    flow = np.maximum(result.x, 0.0)
    # What the flow leaves undone travels the diameter.
    undone = float(np.abs(supply - incidence @ flow).sum()) / 2
    upper = float(flow @ length) + undone * (found.x.diameter + found.y.diameter)
    psi = found.at_demand(result.eqlin.marginals.reshape(shape))
    return Bounds(dual_value(problem, problem.ground.transform(psi)[1], psi), upper, psi)


def _better(one: Bounds, other: Bounds) -> Bounds:
    psi = one.psi if one.lower >= other.lower else other.psi
    return Bounds(max(one.lower, other.lower), min(one.upper, other.upper), psi)


def _corner(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Pairs of the north-west corner plan, which make every list of pairs feasible; as keys i len(b) + j."""
    left, right = a.cumsum(), b.cumsum()
    cuts = np.concatenate([[0.0], np.union1d(left, right)])
    middles = (cuts[1:] + cuts[:-1]) / 2
    i, j = (np.searchsorted(sums, middles).clip(max=len(sums) - 1) for sums in (left, right))
    return np.unique(i.astype(np.int64) * len(b) + j)


def _simplex(a: np.ndarray, b: np.ndarray, costs):
    """Flow and dual of the demand, from POT; what it warns of shows in the certificate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flow, log = ot.emd(a, b, costs, numItermax=_MOST_PIVOTS, log=True, center_dual=False, check_marginals=False)
    return flow, log["v"]


def _certified(
    problem: Problem, flow: tuple[np.ndarray, np.ndarray, np.ndarray], costs: np.ndarray, dual: np.ndarray
) -> Bounds:
    """Bounds from a flow ``(i, j, mass)`` between ranks of places and a dual of the demand, feasible or not."""
    starts, stops = problem.supply > 0, problem.demand > 0
    a, b = problem.supply[starts], problem.demand[stops]
    i, j, mass = flow
    mass, late, vacant = _repaired(a, b, i, j, mass)
    short, open_ = np.zeros_like(problem.supply), np.zeros_like(problem.demand)
    short[starts], open_[stops] = late, vacant
    upper = float(mass @ costs) + repair_cost(problem, short, open_)
    psi = np.full(problem.demand.shape, np.inf)
    psi[stops] = -dual
    lower = dual_value(problem, problem.ground.transform(psi)[1], psi)
    return Bounds(lower, upper, psi)


def _repaired(
    a: np.ndarray, b: np.ndarray, i: np.ndarray, j: np.ndarray, mass: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The flow cut down to its marginals, and what is then still to leave and to arrive (Altschuler, Weed, Rigollet 2017)."""
    mass = mass * _at_most(a, np.bincount(i, mass, len(a)))[i]
    mass = mass * _at_most(b, np.bincount(j, mass, len(b)))[j]
    return mass, np.maximum(a - np.bincount(i, mass, len(a)), 0.0), np.maximum(b - np.bincount(j, mass, len(b)), 0.0)


def _at_most(wanted: np.ndarray, have: np.ndarray) -> np.ndarray:
    """Factors that bring ``have`` down to ``wanted`` where it is more."""
    return np.minimum(1.0, np.divide(wanted, have, out=np.ones_like(have), where=have > 0))
