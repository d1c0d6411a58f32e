"""From two distributions to the transport problem that is left of them: atoms merged, common mass cancelled.

W1 depends on the difference only. What both have at a place stays there, by the triangle inequality; what is left is a
supply on some rows and columns and a demand on others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sinkformer.errors import WeightError
from sinkformer.metrics.grounds import Axis, Ground

# Rounding of sums over a grid, relative to the mass that was summed.
_ROUNDING = 1e-13


@dataclass(frozen=True)
class Problem:
    """Transport of a supply on one grid to a demand on another, both of mass one.

    Attributes:
        supply: ``(n, m)``.
        demand: ``(n', m')``.
        ground: distances from the one grid to the other.
        moved: the mass that is really moved; W1 = moved x (transport cost).
        margin: what the arithmetic of float64 can be wrong by in W1: rounding of sums, of the cancelling, of the distances.
    """

    supply: np.ndarray
    demand: np.ndarray
    ground: Ground
    moved: float
    margin: float

    @property
    def places(self) -> int:
        """Places with supply or demand."""
        return int(np.count_nonzero(self.supply) + np.count_nonzero(self.demand))

    @property
    def size(self) -> int:
        """Pairs of a place with supply and a place with demand."""
        return int(np.count_nonzero(self.supply)) * int(np.count_nonzero(self.demand))


@dataclass(frozen=True)
class Difference:
    """The difference of two distributions on the grid of their distinct atoms.

    Attributes:
        values: first minus second, ``(N, M)``.
        x, y: the two axes.
        euclidean: which product of the two metrics.
        total: mass of either distribution.
    """

    values: np.ndarray
    x: Axis
    y: Axis
    euclidean: bool
    total: float

    @property
    def margin(self) -> float:
        """Bound of what rounding changes in W1."""
        diameter = self.x.diameter + self.y.diameter
        moved = float(np.abs(self.values).sum()) / 2
        return diameter * (_ROUNDING * self.total + abs(float(self.values.sum()))) + 2 * moved * (
            self.x.defect + self.y.defect
        )

    @property
    def vanishes(self) -> bool:
        """Whether nothing is to be transported, up to rounding."""
        moved = min(float(np.maximum(self.values, 0.0).sum()), float(np.maximum(-self.values, 0.0).sum()))
        return moved <= _ROUNDING * self.total or self.x.diameter + self.y.diameter == 0

    def problem(self) -> Problem:
        """What is to be transported, unless the difference vanishes."""
        supply, demand = np.maximum(self.values, 0.0), np.maximum(-self.values, 0.0)
        moved = float(supply.sum())
        rows, columns = ([np.flatnonzero(part.any(axis)) for part in (supply, demand)] for axis in (1, 0))
        supply, demand = (
            part[np.ix_(row, column)] for part, row, column in zip((supply, demand), rows, columns, strict=True)
        )
        ground = Ground(self.x.distances[np.ix_(*rows)], self.y.distances[np.ix_(*columns)], self.euclidean)
        return Problem(supply / moved, demand / demand.sum(), ground, moved, self.margin)

    def at_demand(self, phi: np.ndarray) -> np.ndarray:
        """A function on all atoms, ``(N, M)``, on the grid of the demand of ``problem()``, ``+inf`` where there is none."""
        negative = self.values < 0
        places = np.ix_(np.flatnonzero(negative.any(1)), np.flatnonzero(negative.any(0)))
        return np.where(negative[places], phi[places], np.inf)

    def potential(self, psi: np.ndarray) -> np.ndarray:
        """The 1-Lipschitz function min over places of demand of d(., place) + psi(place), on all atoms, ``(N, M)``.

        Args:
            psi: on the grid of the demand of ``problem()``, ``+inf`` where there is none.
        """
        negative = self.values < 0
        rows, columns = np.flatnonzero(negative.any(1)), np.flatnonzero(negative.any(0))
        ground = Ground(self.x.distances[:, rows], self.y.distances[:, columns], self.euclidean)
        phi = ground.transform(psi)[1]
        return phi - (phi.max() + phi.min()) / 2


def common_total(first: np.ndarray, second: np.ndarray, tolerance: float) -> float:
    """Total mass of two distributions, the mean of two that differ by rounding.

    Raises:
        WeightError: the totals differ by more than ``tolerance``, relative, or are not positive.
    """
    totals = float(first.sum()), float(second.sum())
    if min(totals) <= 0 or abs(totals[0] - totals[1]) > tolerance * max(totals):
        raise WeightError(
            f"expected two distributions of one positive total mass, received totals {totals[0]:.9g} and {totals[1]:.9g}; "
            f"round both with .rounded(), or normalise them"
        )
    return (totals[0] + totals[1]) / 2


def difference(first: np.ndarray, second: np.ndarray, x: Axis, y: Axis, euclidean: bool, total: float) -> Difference:
    """The difference of two distributions given on their own atoms, ``(n, m)`` and ``(n', m')``, both scaled to ``total``."""
    shape = x.size, y.size
    grids = []
    for masses, rows, columns in zip((first, second), (x.first, x.second), (y.first, y.second), strict=True):
        i, j = np.flatnonzero(rows >= 0), np.flatnonzero(columns >= 0)
        places = rows[i, None] * shape[1] + columns[None, j]
        grid = np.bincount(places.ravel(), masses[np.ix_(i, j)].ravel(), shape[0] * shape[1])
        grids.append(grid.reshape(shape) * (total / float(masses.sum())))
    return Difference(grids[0] - grids[1], x, y, euclidean, total)
