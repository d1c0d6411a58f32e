"""The pairs that an approximation is built for: which measures they share, and the plans to approximate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sinkformer._typing import PerProblem, PlanMatrix
from sinkformer.couplings import Coupling, diameter
from sinkformer.errors import ConfigError, DeviceError, DTypeError, NonFiniteError, ShapeError, WeightError
from sinkformer.measures import Measure

# L1 error of the marginals of a target that is put down to its solver, and of two plans that are called one.
_MARGINAL = 1e-8
# Weights of two measures on the same points that are called one measure.
SAME_WEIGHTS = 1e-9


@dataclass(frozen=True, eq=False)
class Pairs:
    """B pairs out of I sources and J targets, all in canonical form: distinct atoms of positive weight, in order.

    Attributes:
        sources: the distinct source measures, ``(I, N)``, padded.
        targets: the distinct target measures, ``(J, M)``, padded.
        source_index, target_index: which of them each pair has, int64 ``(B)``.
        given: the targets' plans, ``(B, N, M)``.
        plans: the same moved to exact marginals.
    """

    sources: Measure
    targets: Measure
    source_index: Tensor
    target_index: Tensor
    given: PlanMatrix
    plans: PlanMatrix

    @property
    def mu(self) -> Measure:
        """Source of every pair, ``(B, N)``."""
        return self.sources[self.source_index]

    @property
    def nu(self) -> Measure:
        """Target of every pair, ``(B, M)``."""
        return self.targets[self.target_index]

    def coupling(self, plan: PlanMatrix) -> Coupling:
        """A plan ``(B, N, M)`` as a coupling of the pairs."""
        return Coupling.from_dense(self.mu, self.nu, plan)

    @property
    def product(self) -> PlanMatrix:
        """The product mu (x) nu, ``(B, N, M)``."""
        return self.mu.weights.unsqueeze(-1) * self.nu.weights.unsqueeze(-2)

    @property
    def fibre(self) -> PerProblem:
        """H = min(diam X, diam Y) over the atoms of every pair, ``(B)``."""
        return torch.minimum(*self.diameters)

    @property
    def diameters(self) -> tuple[PerProblem, PerProblem]:
        """Diameters of X and of Y over the atoms of every pair, ``(B)`` each."""
        return diameter(self.sources)[self.source_index], diameter(self.targets)[self.target_index]

    @classmethod
    def of(cls, couplings: Sequence[Coupling]) -> Pairs:
        """Pairs of single couplings, in float64.

        Raises:
            DTypeError: not float64, or no couplings.
            ShapeError: none, or points of several dimensions.
            WeightError: a plan with other marginals than its measures have.
            ConfigError: two plans for one pair of measures.
        """
        if not couplings:
            raise ShapeError("expected at least one pair, received none")
        sources, targets = Register(), Register()
        index, plans = [], []
        for k, pi in enumerate(couplings):
            plan = _checked(pi, k)
            rows, columns = canonical(pi.source), canonical(pi.target)
            index.append((sources.add(rows.measure), targets.add(columns.measure)))
            plans.append(rows.gathered(columns.gathered(plan.mT).mT))
        mu, nu = Measure.stack(sources.measures), Measure.stack(targets.measures)
        stacked = torch.zeros(len(plans), mu.n, nu.n, dtype=torch.float64)
        for k, plan in enumerate(plans):
            stacked[k, : plan.shape[0], : plan.shape[1]] = plan
        i, j = torch.tensor(index).T
        pairs = cls(mu, nu, i, j, stacked, stacked)
        pairs._check_function(index)
        return replace(pairs, plans=pairs.coupling(stacked).rounded().to_dense())

    def _check_function(self, index: list[tuple[int, int]]) -> None:
        first: dict[tuple[int, int], int] = {}
        for k, pair in enumerate(index):
            other = first.setdefault(pair, k)
            apart = float((self.plans[k] - self.plans[other]).abs().sum())
            if apart > 2 * _MARGINAL:
                raise ConfigError(
                    f"expected one plan for every pair of measures, received two for pairs {other} and {k}, whose measures "
                    f"are equal: their L1 distance is {apart:.3g}"
                )


@dataclass(frozen=True, eq=False)
class Canonical:
    """The canonical form of a measure, and which of its atoms each given atom is.

    Attributes:
        measure: distinct atoms of positive weight, in lexicographic order.
        live: which of the given atoms have weight, bool ``(n)``.
        index: the canonical atom of each of those, int64.
    """

    measure: Measure
    live: Tensor
    index: Tensor

    def gathered(self, rows: Tensor) -> Tensor:
        """Rows ``(n, m)`` of the given atoms summed over equal ones, ``(measure.n, m)``."""
        return rows.new_zeros(self.measure.n, rows.shape[-1]).index_add(0, self.index, rows[self.live])


def canonical(mu: Measure) -> Canonical:
    """The canonical form of one measure; the same for every order, padding and splitting of its atoms."""
    live = mu.weights > 0
    # Zero has one sign.
    points, index = torch.unique(mu.points[live] + 0.0, dim=0, return_inverse=True)
    weights = mu.weights.new_zeros(len(points)).index_add(0, index, mu.weights[live])
    return Canonical(Measure(points, weights / weights.sum()), live, index)


class Register:
    """Distinct measures in canonical form, numbered in the order of their appearance."""

    def __init__(self, measures: Sequence[Measure] = ()):
        """Add some measures, all distinct."""
        self.measures: list[Measure] = []
        self._places: dict[tuple[torch.Size, bytes], list[int]] = {}
        for mu in measures:
            self.add(mu)

    def find(self, mu: Measure) -> int | None:
        """Number of a measure, or None."""
        for k in self._places.get(_key(mu), []):
            if float((self.measures[k].weights - mu.weights).abs().sum()) <= SAME_WEIGHTS:
                return k
        return None

    def add(self, mu: Measure) -> int:
        """Number of a measure, a new one if it is new."""
        found = self.find(mu)
        if found is not None:
            return found
        self._places.setdefault(_key(mu), []).append(len(self.measures))
        self.measures.append(mu)
        return len(self.measures) - 1


def _key(mu: Measure) -> tuple[torch.Size, bytes]:
    return mu.points.shape, mu.points.numpy().tobytes()


def _checked(pi: Any, k: int) -> PlanMatrix:
    """The plan of one coupling, of the right marginals."""
    if not isinstance(pi, Coupling):
        raise DTypeError(f"expected couplings, received {type(pi).__name__} at position {k}")
    if pi.device.type != "cpu":
        raise DeviceError(f"expected couplings on the CPU, received {pi.device} at position {k}; move the measures")
    if pi.dtype != torch.float64:
        raise DTypeError(f"expected float64 couplings, received {pi.dtype} at position {k}; convert the measures")
    plan = pi.to_dense().detach()
    if not bool(torch.isfinite(plan).all()):
        raise NonFiniteError(f"expected finite plans, received a NaN or an infinity in pair {k}")
    error = float((plan.sum(-1) - pi.source.weights).abs().sum() + (plan.sum(-2) - pi.target.weights).abs().sum())
    if error > _MARGINAL:
        raise WeightError(
            f"expected plans with the marginals of their measures, received an L1 error of {error:.3g} in pair {k}; "
            f"solve more accurately, or round with .rounded()"
        )
    return plan
