"""Factors of a cost, as tables: Q(mu, x) and K(nu, y) for finitely many measures at their atoms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sinkformer._typing import Features, Points
from sinkformer.approximation.pairs import Register, canonical
from sinkformer.costs import NegativeDot
from sinkformer.couplings import Coupling, EntropicCoupling
from sinkformer.errors import ConfigError, DTypeError, ShapeError
from sinkformer.measures import Measure, check_compatible
from sinkformer.solutions import OnFailure

# L1 marginal error of couplings, and most sweeps.
TOLERANCE, MOST_ITERATIONS = 1e-12, 20_000


@dataclass(frozen=True, eq=False)
class Table:
    """A map (mu, x) -> R^r on a finite domain: the measures it was made for, at their atoms.

    A measure is recognised by its atoms and weights, whatever their order, their padding, and equal atoms that are written as
    one or as several. Nothing is differentiable in points or weights.

    Attributes:
        measures: the domain, distinct, ``(I, N)``, in canonical form.
        values: the values at the atoms, ``(I, N, r)``.
    """

    measures: Measure
    values: Features

    def __call__(self, mu: Measure, at: Points | None = None) -> Features:
        """Look up.

        Args:
            mu: measures of the domain, ``(*batch, n)``, float64.
            at: atoms of each, ``(*batch, k, d)``; those of ``mu`` as they are given by default, with zeros for padding.

        Returns:
            ``(*batch, n, r)`` or ``(*batch, k, r)``.

        Raises:
            DTypeError: not float64.
            ShapeError: points of another dimension or batch shape.
            ConfigError: a measure outside the domain, or a point that is no atom.
        """
        if mu.dtype != torch.float64:
            raise DTypeError(f"expected float64 measures, received {mu.dtype}; convert with .to(torch.float64)")
        points = mu.points if at is None else at
        if mu.d != self.measures.d or points.shape[-1] != mu.d or points.shape[:-2] != mu.batch_shape:
            raise ShapeError(
                f"expected points of shape {(*mu.batch_shape, 'k', self.measures.d)}, received {tuple(points.shape)}"
            )
        count = mu.batch_shape.numel()
        flat = mu.detach().map(lambda t: t.reshape(count, *t.shape[len(mu.batch_shape) :]))
        rows = points.detach().reshape(count, *points.shape[-2:])
        found = self.values.new_zeros(*rows.shape[:-1], self.values.shape[-1])
        for k, one in enumerate(flat):
            found[k] = self._looked_up(one, rows[k], padded=at is None)
        return found.reshape(*points.shape[:-1], found.shape[-1])

    @cached_property
    def _register(self) -> Register:
        return Register(self.measures.unstack())

    def _looked_up(self, mu: Measure, points: Tensor, padded: bool) -> Tensor:
        known = canonical(mu).measure
        place = self._register.find(known)
        if place is None:
            raise ConfigError(
                f"expected one of the {len(self.measures)} measures that the table was made for, received another, of "
                f"{known.n} atoms; factors are defined for these only, encoders for all (encoders=True)"
            )
        same = (points.unsqueeze(-2) == self._register.measures[place].points).all(-1)
        atom = same.any(-1)
        outside = ~atom & (mu.weights > 0) if padded else ~atom
        if bool(outside.any()):
            raise ConfigError(
                f"expected atoms of the measure, received the point {points[outside][0].tolist()}; a table has values at "
                f"atoms only, encoders at all points (encoders=True)"
            )
        values = self.values[place][same.to(torch.int8).argmax(-1)]
        return values.masked_fill(~atom.unsqueeze(-1), 0.0)


@dataclass(frozen=True, eq=False)
class Factors:
    """A Sinkhorn Transformer with tables in the place of encoders: c = -<Q(mu, x), K(nu, y)>.

    Attributes:
        source: Q.
        target: K, of the same rank.
        epsilon: entropy of the couplings.
    """

    source: Table
    target: Table
    epsilon: float

    @property
    def rank(self) -> int:
        """Size r of the features."""
        return self.source.values.shape[-1]

    def __call__(self, mu: Measure, nu: Measure, *, on_failure: OnFailure = "warn") -> EntropicCoupling:
        """Couple a source and a target of the tables, fitted together or not.

        Args:
            mu: sources of the domain, ``(*batch, n)``.
            nu: targets of the domain, ``(*batch, m)``.
            on_failure: see :func:`sinkformer.sinkhorn`.

        Raises:
            DTypeError, DeviceError, ShapeError: measures that do not fit together.
            ConfigError: a measure outside the domain.
        """
        check_compatible(mu, nu)
        return Coupling.solve(
            mu,
            nu,
            cost=NegativeDot(),
            epsilon=self.epsilon,
            features=(self.source(mu), self.target(nu)),
            maps=(self.source, self.target),
            tolerance=TOLERANCE,
            max_iterations=MOST_ITERATIONS,
            on_failure=on_failure,
        )
