"""Bounds of a transport on a grid by separable Sinkhorn: exp(-d / eta) is a product of two small matrices.

A half step is two matrix products, O(n m (n + m)) for supplies on n x m places, whatever the number of pairs of places.
The upper bound takes two legs: W1 is the least, over distributions xi between the two, of the transport of every column
along the first axis to xi and of every row of xi along the second. The entropic plan says which xi; the legs themselves
are small exact problems, and do not blur.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from sinkformer.metrics.flows import Bounds, dual_value, plan_cost, repair_cost
from sinkformer.metrics.grounds import Ground, Places
from sinkformer.metrics.problems import Problem

# First entropy, relative to the diameter, and the ratio of one to the next.
_FIRST, _RATIO = 0.1, 0.5
# The exponents of the scalings stay within this, so that every product of the kernel with them is a number.
_LARGEST_EXPONENT = 550.0
# Sweeps between two looks at the error, most sweeps at one entropy, error (L1, of mass one) to go on at.
_SWEEPS, _MOST_SWEEPS, _ENOUGH = 10, 100, 0.005
# Entropies in the mean distance travelled, at the end; and at least where a loose bracket is asked for.
_ENTROPIES, _FEWER = 200, 60
_TINY = 1e-300
# Kernel entries below this are too near the denormal numbers to carry mass: their products with a distance lose digits.
_LEAST_KERNEL = 1e-290


@dataclass(frozen=True)
class Stage:
    """Scalings at one entropy: the plan is u K v, with K = exp(-dX / eta) (x) exp(-dY / eta).

    Attributes:
        problem: what is transported.
        eta: the entropy.
        u: ``(n, m)``.
        v: ``(n', m')``.
        sweeps: sweeps so far, all entropies together.
        last: whether a smaller entropy would leave the range of float64.
    """

    problem: Problem
    eta: float
    u: np.ndarray
    v: np.ndarray
    sweeps: int
    last: bool

    @property
    def psi(self) -> np.ndarray:
        """Dual of the demand, ``+inf`` where there is none."""
        return -_log_ratio(self.v, self.problem.demand, self.eta)

    def lower(self) -> tuple[float, np.ndarray]:
        """The better of the duals that the two scalings give: its value, and psi."""
        problem, ground = self.problem, self.problem.ground
        psi = self.psi
        value = dual_value(problem, ground.transform(psi)[1], psi)
        back = Ground(ground.dx.T, ground.dy.T)
        negative = back.transform(-_log_ratio(self.u, problem.supply, self.eta))[1]
        other = np.where(problem.demand > 0, -negative, np.inf)
        other_value = dual_value(problem, ground.transform(other)[1], other)
        return (value, psi) if value >= other_value else (other_value, other)

    def rounded(self) -> tuple[float, np.ndarray]:
        """Cost of the plan moved to its marginals, and the distribution between the two legs, ``(n', m)``."""
        problem, dx, dy = self.problem, self.problem.ground.dx, self.problem.ground.dy
        kx, ky = (np.where(k < _LEAST_KERNEL, 0.0, k) for k in (np.exp(-dx / self.eta), np.exp(-dy / self.eta)))
        u = self.u * _at_most_one(problem.supply, self.u * (kx @ self.v @ ky.T))
        v = self.v * _at_most_one(problem.demand, self.v * (kx.T @ u @ ky))
        middle = v @ ky.T
        short = np.maximum(problem.supply - u * (kx @ middle), 0.0)
        between = kx.T @ u
        open_ = np.maximum(problem.demand - v * (between @ ky), 0.0)
        cost = float((u * ((kx * dx) @ middle + kx @ (v @ (ky * dy).T))).sum())
        cost += repair_cost(problem, short, open_)
        xi = between * middle
        if open_.sum() > 0:
            xi = xi + np.outer(open_.sum(1), short.sum(0)) / open_.sum()
        return cost, xi


def anneal(problem: Problem) -> Iterator[Stage]:
    """Sinkhorn at smaller and smaller entropies."""
    ground, supply, demand = problem.ground, problem.supply, problem.demand
    eta = _FIRST * ground.diameter
    g = np.zeros_like(demand)
    sweeps, last = 0, False
    while not last:
        kx, ky = np.exp(-ground.dx / eta), np.exp(-ground.dy / eta)
        v = demand * np.exp(g / eta)
        u = supply
        for sweep in range(1, _MOST_SWEEPS + 1):
            sums = np.maximum(kx @ v @ ky.T, _TINY)
            if sweep % _SWEEPS == 1 and sweep > 1 and float(np.abs(u * sums - supply).sum()) < _ENOUGH:
                break
            u = supply / sums
            v = demand / np.maximum(kx.T @ u @ ky, _TINY)
            sweeps += 1
        f, g = _log_ratio(u, supply, eta), _log_ratio(v, demand, eta)
        ends = [float(end) for part in (f[supply > 0], g[demand > 0]) for end in (part.min(), part.max())]
        # f - t, g + t is the same dual; t puts both in the middle of the range of the exponential.
        shift = (ends[0] + ends[1] - ends[2] - ends[3]) / 4
        reach = max(abs(end - shift) for end in ends[:2]), max(abs(end + shift) for end in ends[2:])
        last = max(reach) > _LARGEST_EXPONENT * _RATIO * eta
        yield Stage(problem, eta, u, v, sweeps, last)
        g = np.where(demand > 0, g + shift, 0.0)
        eta *= _RATIO


def narrowed(problem: Problem, tol: float, alone: bool) -> tuple[Bounds, Stage]:
    """Sinkhorn at smaller and smaller entropies, until the bracket is ``tol`` wide (relative) or the entropy small enough.

    For the Euclidean product these are bounds from the additive one, which is between it and sqrt(2) times it.

    Args:
        problem: what to transport.
        tol: relative width to stop at; 0 for no stop.
        alone: whether nothing follows that improves on these bounds, so that the best upper one is worth its time.
    """
    ground = problem.ground
    additive = replace(problem, ground=Ground(ground.dx, ground.dy)) if ground.euclidean else problem
    most = _ENTROPIES if alone or tol == 0 else min(_ENTROPIES, max(_FEWER, 0.2 / tol))
    for stage in anneal(additive):
        upper, xi = stage.rounded()
        done = stage.last or stage.eta <= upper / most
        # The width is about eta, relative to the mean distance travelled.
        if not done and stage.eta > 4 * tol * upper:
            continue
        lower, psi = stage.lower()
        # Exact legs take most of the time, and close a third of the gap or so.
        if (alone and done) or upper - lower <= 2 * tol * upper:
            upper = min(upper, two_legs(additive, xi))
        if ground.euclidean:
            psi = psi / np.sqrt(2)
            lower = dual_value(problem, ground.transform(psi)[1], psi)
        if done or upper - lower <= tol * upper:
            return Bounds(lower, upper, psi), stage
    raise AssertionError("the last stage returns")


def two_legs(problem: Problem, xi: np.ndarray) -> float:
    """Cost of moving the supply along the first axis to ``xi``, ``(n', m)``, and from there along the second.

    The columns of ``xi`` have the sums of the supply's, its rows those of the demand's.
    """
    dx, dy = problem.ground.dx, problem.ground.dy
    same_x, same_y = np.nonzero(dx == 0), np.nonzero(dy == 0)
    cost = sum(_leg(problem.supply[:, j], xi[:, j], dx, same_x) for j in range(dy.shape[0]))
    return cost + sum(_leg(xi[i], problem.demand[i], dy, same_y) for i in range(dx.shape[1]))


def _leg(supply: np.ndarray, demand: np.ndarray, distances: np.ndarray, same: Places) -> float:
    """Exact transport on one axis, after what stays where it is; a difference of the totals travels the diameter."""
    supply, demand = supply.copy(), demand.copy()
    common = np.minimum(supply[same[0]], demand[same[1]])
    supply[same[0]] -= common
    demand[same[1]] -= common
    i, j = np.flatnonzero(supply > 0), np.flatnonzero(demand > 0)
    masses = float(supply.sum()), float(demand.sum())
    stray = abs(masses[0] - masses[1]) * float(distances.max())
    moved = min(masses)
    if moved <= 1e-17 or len(i) == 0 or len(j) == 0:
        return stray + moved * float(distances.max())
    between = distances[np.ix_(i, j)]
    if len(i) == 1 or len(j) == 1:
        return stray + moved * float(supply[i] / masses[0] @ between @ (demand[j] / masses[1]))
    return stray + moved * plan_cost(supply[i] / masses[0], demand[j] / masses[1], between)


def _log_ratio(scaling: np.ndarray, mass: np.ndarray, eta: float) -> np.ndarray:
    """The dual of a scaling, eta log(scaling / mass); ``-inf`` where there is no mass."""
    there = mass > 0
    ratio = np.divide(np.maximum(scaling, _TINY), mass, out=np.ones_like(mass), where=there)
    return np.where(there, eta * np.log(ratio), -np.inf)


def _at_most_one(wanted: np.ndarray, have: np.ndarray) -> np.ndarray:
    return np.minimum(1.0, np.divide(wanted, have, out=np.ones_like(have), where=have > 0))
