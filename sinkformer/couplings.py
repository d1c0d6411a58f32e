"""Couplings of two measures: how they are made, and the three kinds there are.

A ``Coupling`` is a lazy matrix (see ``plans``). All n x m numbers at once are made by the solver, unless it streams, and by
``to_dense()``, ``as_measure()``, ``density()`` and the losses.

``EntropicCoupling`` holds potentials and features, P = a b exp((f + g - C) / epsilon); ``DenseCoupling`` a given matrix;
``RoundedCoupling`` another coupling moved to exact marginals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor
from typing_extensions import Unpack

from sinkformer import ops
from sinkformer._numerics import (
    FLOAT_DTYPES,
    pairing,
    potential_dtype,
    safe_divide,
    safe_log,
)
from sinkformer._typing import CostMatrix, Features, PerProblem, PlanMatrix, Points
from sinkformer.certificates import rounded_gap
from sinkformer.costs import Cost, Euclidean, Matrix, SqEuclidean, as_cost
from sinkformer.errors import ConfigError, DTypeError, NonFiniteError, ShapeError, WeightError
from sinkformer.measures import Measure, check_compatible
from sinkformer.plans import Plan
from sinkformer.solutions import Solution, Status
from sinkformer.solvers import (
    SinkhornOptions,
    as_measure,
    check_epsilon,
    check_mask,
    check_weights_have_costs,
    sinkhorn_and_costs,
)

# Atoms up to which a diameter is taken over all pairs; beyond, twice the radius bounds it.
_MOST_PAIRED = 2000

FeatureMap: TypeAlias = Callable[[Measure, Points], Features]


@dataclass(frozen=True)
class Certificate:
    """A-posteriori bound on the distance between a rounded plan and the exact solution of its entropic problem.

    Attributes:
        duality_gap: primal cost of the rounded plan minus the dual value, ``(*batch)``, with a margin for rounding.
        diameter: H = min(diam(source), diam(target)), Euclidean, over atoms of positive weight.
        w1_bound: W1(rounded, exact) <= H sqrt(gap / (2 epsilon)), for the additive Euclidean ground metric.
        tv_bound: the same for the total variation distance, sqrt(gap / (2 epsilon)), at most 1.
    """

    duality_gap: PerProblem
    diameter: PerProblem
    w1_bound: PerProblem
    tv_bound: PerProblem


class Coupling(Plan):
    """A joint distribution of ``source`` and ``target``, shape ``(*batch, n, m)``; build one with ``solve`` or ``from_dense``.

    Entries are non-negative. The marginals are those of the two measures, up to ``solution.marginal_error`` if a solver
    made it; ``rounded()`` makes them exact.
    """

    # Construction -----------------------------------------------------------------------------------------------------

    @staticmethod
    def solve(
        mu: Measure | Tensor,
        nu: Measure | Tensor,
        *,
        cost: Cost | Tensor = SqEuclidean(),  # noqa: B008 - stateless
        epsilon: float | PerProblem,
        features: tuple[Features, Features] | None = None,
        maps: tuple[FeatureMap, FeatureMap] | None = None,
        **options: Unpack[SinkhornOptions],
    ) -> EntropicCoupling:
        """Entropic coupling of two measures: ``sinkhorn`` plus the object.

        Args:
            mu: source measure, or its weights if the cost is a matrix.
            nu: target measure, or its weights.
            cost: cost of the features, or a matrix ``(*batch, n, m)``.
            epsilon: strength of the entropy, > 0, in the units of the cost; a number or ``(*batch)``.
            features: what the cost is evaluated on, ``(*batch, n, r)`` and ``(*batch, m, r)``; the points by default.
            maps: functions ``(measure, points) -> features`` of source and target, for evaluation off the atoms, such as two
                encoders; the points themselves if ``features`` is None.
            **options: as for :func:`sinkformer.sinkhorn`, whose errors are also raised here.
        """
        cost = as_cost(cost)
        if features is None:
            check_weights_have_costs(mu, nu, cost)
        mu, nu = as_measure(mu), as_measure(nu)
        check_compatible(mu, nu)
        # Through the measures, which clear the features of padding.
        here, there = (mu, nu) if features is None else (mu.pushforward(features[0]), nu.pushforward(features[1]))
        solution, costs = sinkhorn_and_costs(here, there, cost=cost, epsilon=epsilon, **options)
        mask = options.get("mask")
        if mask is not None:
            mask = check_mask(mask, (*mu.batch_shape, mu.n, nu.n), mu.device)
        if maps is None and features is None:
            maps = _points_themselves, _points_themselves
        return EntropicCoupling(
            mu, nu, here.points, there.points, cost, mask, check_epsilon(epsilon, mu), solution, maps, costs
        )

    @staticmethod
    def from_dense(mu: Measure, nu: Measure, plan: PlanMatrix) -> DenseCoupling:
        """Coupling from a matrix of masses, ``(*batch, n, m)``; its marginals are its own, see ``DenseCoupling``."""
        return DenseCoupling(mu, nu, plan)

    @torch.no_grad()
    def rounded(self) -> RoundedCoupling:
        """The coupling with exact marginals next to this one (Altschuler, Weed, Rigollet 2017), at most twice the L1 error away.

        Exact to rounding of the dtype. Not differentiable: take gradients of the unrounded plan. A forbidden pair may
        receive what the marginals of a plan that did not converge are short of.
        """
        base = self.detach()
        return RoundedCoupling(base, *base._rounding())

    def _rounding(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Factors of the plan moved to exact marginals, see ``ops.rounding``."""

        def rows(v: Tensor) -> Tensor:
            return torch.cat(self._over_blocks(lambda p, *_: ops.apply(p, v)), -1)

        def columns(u: Tensor) -> Tensor:
            parts = self._over_blocks(lambda p, start, stop: ops.apply(p.mT, u[..., start:stop]))
            return torch.stack(parts).sum(0)

        return ops.rounding(rows, columns, *self._weights())


@dataclass(frozen=True, eq=False, repr=False)
class EntropicCoupling(Coupling):
    """P = a b exp((f + g - C) / epsilon), from potentials; every block of C is recomputed when needed.

    Attributes:
        source, target: the measures.
        source_features, target_features: what the cost is evaluated on, ``(*batch, n, r)`` and ``(*batch, m, r)``.
        cost_function: the ``Cost``.
        mask: additive mask ``(*batch, n, m)``, or None.
        epsilon: ``(*batch)``, float64.
        solution: potentials, status and errors, see ``Solution``.
        maps: functions ``(measure, points) -> features``, or None if they are unknown.
        costs: matrix of costs ``(*batch, n, m)``, mask included, where the graph of ``solution`` keeps it anyway.
    """

    source: Measure
    target: Measure
    source_features: Features
    target_features: Features
    cost_function: Cost
    mask: Tensor | None
    epsilon: Tensor
    solution: Solution
    maps: tuple[FeatureMap, FeatureMap] | None = None
    costs: CostMatrix | None = None

    def __repr__(self) -> str:
        """Shape, epsilon, status and error."""
        values = sorted({f"{x:.4g}" for x in self.epsilon.detach().flatten().tolist()}, key=float) or ["?"]
        epsilon = values[0] if len(values) == 1 else f"{values[0]}..{values[-1]}"
        return f"Coupling(shape={tuple(self.shape)}, epsilon={epsilon}, {self.solution!r})"

    @property
    def value(self) -> PerProblem:
        """Optimal value of the entropic problem, differentiable by the envelope theorem."""
        return self.solution.value

    def cost_rows(self, start: int, stop: int) -> Tensor:
        """Rows of the cost matrix with the mask added, in the dtype of potentials."""
        if self.costs is not None:
            return self._wide(self.costs[..., start:stop, :])
        with torch.autocast(self.device.type, enabled=False):
            x, y = self._wide(self.source_features), self._wide(self.target_features)
            matrix = self._wide(self.cost_function.rows(x, y, start, stop))
        return matrix if self.mask is None else matrix + self._wide(self.mask[..., start:stop, :])

    def _rows(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Costs, f, g, a and b of some rows, without the numbers of problems that have no solution."""
        a, b = self._weights()
        f, g, a = self.solution.f[..., start:stop], self.solution.g, a[..., start:stop]
        cost, lost = self.cost_rows(start, stop), self._lost()
        if lost is None:
            return cost, f, g, a, b
        # NaN enters after the last product: 0 times its derivative would be NaN for the parameters all problems share.
        cost = cost.masked_fill(lost.unsqueeze(-1), 0.0)
        return cost, f.masked_fill(lost, 0.0), g.masked_fill(lost, 0.0), a, b

    def _lost(self) -> Tensor | None:
        """Which problems have no solution, ``(*batch, 1)``; None if all have one."""
        lost = self.solution.codes == Status.NONFINITE
        return lost.unsqueeze(-1) if bool(lost.any()) else None

    def _marked(self, rows: Tensor) -> Tensor:
        """NaN in the problems without a solution, so that no zero passes for a plan."""
        lost = self._lost()
        return rows if lost is None else rows.masked_fill(lost.unsqueeze(-1), torch.nan)

    def _density_rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        cost, f, g, a, b = self._rows(start, stop)
        k, lost = ops.density(cost, f, g, a, b, self.epsilon), self._lost()
        return k if lost is None else k.masked_fill(lost.unsqueeze(-1), 0.0), b

    def _block(self, start: int, stop: int) -> Tensor:
        return self._marked(ops.plan(*self._rows(start, stop), self.epsilon))

    def _conditional_block(self, start: int, stop: int) -> Tensor:
        # Without the factor a_i, so that rows of weight zero have a conditional too.
        k, b = self._density_rows(start, stop)
        rows = b.unsqueeze(-2) * k
        return self._marked(safe_divide(rows, rows.sum(-1, keepdim=True)))

    @property
    def mT(self) -> EntropicCoupling:
        """Source and target exchanged."""
        return EntropicCoupling(
            self.target,
            self.source,
            self.target_features,
            self.source_features,
            self.cost_function.transposed(),
            None if self.mask is None else self.mask.mT,
            self.epsilon,
            self.solution.transposed(),
            None if self.maps is None else (self.maps[1], self.maps[0]),
            None if self.costs is None else self.costs.mT,
        )

    def _map(self, function: Callable[[Tensor], Tensor]) -> EntropicCoupling:
        cost = self.cost_function
        return replace(
            self,
            source=self.source.map(function),
            target=self.target.map(function),
            source_features=function(self.source_features),
            target_features=function(self.target_features),
            cost_function=Matrix(function(cost.values)) if isinstance(cost, Matrix) else cost,
            mask=None if self.mask is None else function(self.mask),
            costs=None if self.costs is None else function(self.costs),
            epsilon=function(self.epsilon),
            solution=self.solution.map(function),
        )

    def unstack(self, sizes: Sequence[tuple[int, int]]) -> list[EntropicCoupling]:
        """The single problems of a ragged batch, without their padding.

        Tensors are copied, so that no problem keeps the batch in memory.

        Args:
            sizes: ``(n, m)`` of each problem: its atoms are the first n and m, the others have weight zero.

        Raises:
            ShapeError: not one batch axis, or another number of sizes.
            WeightError: an atom that would be dropped has weight.
        """
        if self.batch_shape != (len(sizes),):
            raise ShapeError(
                f"expected one batch axis and a size for each of its problems, received batch shape "
                f"{tuple(self.batch_shape)} and {len(sizes)} sizes"
            )
        return [self._problem(k, *size) for k, size in enumerate(sizes)]

    def _problem(self, k: int, n: int, m: int) -> EntropicCoupling:
        a, b = self.source.weights[k], self.target.weights[k]
        if bool(a[n:].any()) or bool(b[m:].any()):
            raise WeightError(
                f"expected weight zero beyond the first {n} and {m} atoms of problem {k}, received atoms with weight there"
            )
        cost, one = self.cost_function, self.solution.map(lambda t: t[k].clone())

        def cut(t: Tensor | None) -> Tensor | None:
            return None if t is None else t[k, :n, :m].clone()

        x, y = self.source_features[k, :n].clone(), self.target_features[k, :m].clone()
        return replace(
            self,
            source=Measure._trusted(self.source.points[k, :n].clone(), a[:n].clone()),
            target=Measure._trusted(self.target.points[k, :m].clone(), b[:m].clone()),
            source_features=x,
            target_features=y,
            cost_function=Matrix(cost.values[k, :n, :m].clone()) if isinstance(cost, Matrix) else cost,
            mask=cut(self.mask),
            costs=cut(self.costs),
            epsilon=self.epsilon[k].clone(),
            solution=replace(one, f=one.f[:n], g=one.g[:m]),
        )

    def detach(self) -> EntropicCoupling:
        """Same coupling outside the autograd graph, evaluation off the atoms included."""
        outside = self._map(Tensor.detach)
        return (
            outside if self.maps is None else replace(outside, maps=(_Detached(self.maps[0]), _Detached(self.maps[1])))
        )

    def density(self, x: Points | None = None, y: Points | None = None) -> Tensor:
        """Density of the coupling with respect to mu (x) nu at any points, atoms or not.

        The potentials extend to the whole space by their own equations (soft c-transform).

        Args:
            x: source points ``(*batch, p, d)``; the source atoms by default.
            y: target points ``(*batch, q, d')``; the target atoms by default.

        Returns:
            ``(*batch, p, q)``.

        Raises:
            ConfigError: points off the atoms where the cost is known at the atoms only: a given matrix, a mask, or
                features without ``maps``.
        """
        if x is None and y is None:
            parts = [self._density_rows(start, stop)[0] for start, stop in ops.row_blocks(tuple(self.shape))]
            return self._marked(torch.cat(parts, -2)).to(self.dtype)
        if self.maps is None or self.mask is not None or isinstance(self.cost_function, Matrix):
            raise ConfigError(
                "expected a cost that is defined off the atoms, received a matrix, a mask or features without maps; "
                "pass maps=(source_map, target_map) to Coupling.solve"
            )
        for name, points in (("x", x), ("y", y)):
            if points is not None and (points.dim() < 2 or points.shape[:-2] != self.batch_shape):
                raise ShapeError(
                    f"expected {name} of shape {(*self.batch_shape, 'k', 'd')}, received {tuple(points.shape)}"
                )
        a, b = self._weights()
        f, g, (tau_a, tau_b) = self.solution.f, self.solution.g, self.solution.taus
        x_features, y_features = self._wide(self.source_features), self._wide(self.target_features)
        with torch.autocast(self.device.type, enabled=False):
            if x is not None:
                x_features = self._wide(self.maps[0](self.source, x))
                f = tau_a * ops.softmin(self.cost_function(x_features, y_features), g, safe_log(b), self.epsilon)
            if y is not None:
                y_features = self._wide(self.maps[1](self.target, y))
                across = self.cost_function(self._wide(self.source_features), y_features).mT
                g = tau_b * ops.softmin(across, self.solution.f, safe_log(a), self.epsilon)
            cost = self.cost_function(x_features, y_features)
        ones = torch.ones_like(f), torch.ones_like(g)
        return ops.density(cost, f, g, *ones, self.epsilon).to(self.dtype)

    def transport_cost(self) -> PerProblem:
        """<P, C> for the coupling's own cost, without the entropy, ``(*batch)``."""

        def part(p: Tensor, start: int, stop: int) -> Tensor:
            return pairing(p, self.cost_rows(start, stop))

        return torch.stack(self._over_blocks(part)).sum(0).to(self.dtype)

    def _rounded_gap(self) -> Tensor:
        """Duality gap of the rounded plan, exactly, in blocks of rows; ``+inf`` where rounding uses a forbidden pair."""
        a, b = self._weights()
        factors = self._rounding()
        r, c, left, right = factors
        log_columns = safe_log(right) - safe_log(b * c)

        def part(start: int, stop: int) -> tuple[Tensor, Tensor]:
            cost, f, g, here, _ = self._rows(start, stop)
            k = ops.density(cost, f, g, here, b, self.epsilon)
            added = left[..., start:stop, None] * right.unsqueeze(-2)
            # log(E / D), whose D may be smaller than any number; E = 0 takes no part.
            log_rows = safe_log(left[..., start:stop]) - safe_log(here * r[..., start:stop])
            exponents = (f.unsqueeze(-1) + g.unsqueeze(-2) - cost) / self.epsilon[..., None, None]
            log_ratio = log_rows.unsqueeze(-1) + log_columns.unsqueeze(-2) - exponents
            whole = added + (here * r[..., start:stop]).unsqueeze(-1) * (b * c).unsqueeze(-2) * k
            logs = torch.nn.functional.softplus(torch.where(added > 0, log_ratio, 0.0), threshold=700)
            excess = here.unsqueeze(-1) * b.unsqueeze(-2) * (k - 1)
            return excess.sum((-1, -2)), torch.where(added > 0, whole * logs, 0.0).sum(-1)

        excess, added = zip(*(part(*rows) for rows in ops.row_blocks(tuple(self.shape))), strict=True)
        return rounded_gap(a, b, self.epsilon, factors, torch.stack(excess).sum(0), torch.cat(added, -1))

    @torch.no_grad()
    def certificate(self) -> Certificate:
        """How far the rounded plan can be from the exact solution, from the duality gap (Pinsker).

        W1(rounded, exact) <= H sqrt(gap / (2 epsilon)) for the metric |x - x'| + |y - y'| on the product space: the two
        plans have the same marginals, so that their difference can be moved along one factor alone.

        Raises:
            ConfigError: an unbalanced problem, whose plans have no common marginals.
        """
        if self.solution.taus != (1.0, 1.0):
            raise ConfigError(f"expected hard marginals (tau_a = tau_b = 1), received taus {self.solution.taus}")
        # Measured here in float64, whatever the precision of the solver was; the margin covers the rounding of the sums.
        a, b = self._weights()
        f, g = self.solution.f, self.solution.g
        terms = (a * f.abs()).sum(-1) + (b * g.abs()).sum(-1)
        terms = terms + torch.where(a > 0, f.abs(), 0.0).amax(-1) + torch.where(b > 0, g.abs(), 0.0).amax(-1)
        gap = self.detach()._rounded_gap().clamp_min(0.0) + 4e-15 * (terms + self.epsilon)
        tv = (gap / (2 * self.epsilon)).sqrt().clamp_max(1.0)
        smaller = torch.minimum(diameter(self.source), diameter(self.target))
        return Certificate(gap, smaller, smaller * tv, tv)


@dataclass(frozen=True, eq=False, repr=False)
class DenseCoupling(Coupling):
    """A given plan. Its marginals need not be those of the measures: ``marginal_error()`` says by how much they differ.

    Raises:
        DTypeError: not floating point, or not the dtype of the measures.
        ShapeError: not ``(*batch, n, m)``.
        WeightError: a negative entry.
        NonFiniteError: a NaN or an infinity.
    """

    source: Measure
    target: Measure
    plan: PlanMatrix

    def __post_init__(self):
        """Check the plan."""
        check_compatible(self.source, self.target)
        if (
            not isinstance(self.plan, Tensor)
            or self.plan.dtype not in FLOAT_DTYPES
            or self.plan.dtype != self.source.dtype
        ):
            received = self.plan.dtype if isinstance(self.plan, Tensor) else type(self.plan).__name__
            raise DTypeError(
                f"expected the plan as a tensor of the dtype of the measures, {self.source.dtype}, received {received}"
            )
        if self.plan.shape != self.shape:
            raise ShapeError(f"expected a plan of shape {tuple(self.shape)}, received {tuple(self.plan.shape)}")
        if not bool(torch.isfinite(self.plan).all()):
            raise NonFiniteError("expected a finite plan, received a NaN or an infinity")
        if bool((self.plan < 0).any()):
            raise WeightError(f"expected non-negative masses, received {self.plan.min().item():.6g}")

    def _block(self, start: int, stop: int) -> Tensor:
        return self._wide(self.plan[..., start:stop, :])

    @property
    def mT(self) -> DenseCoupling:
        """Source and target exchanged."""
        return DenseCoupling(self.target, self.source, self.plan.mT)

    def _map(self, function: Callable[[Tensor], Tensor]) -> DenseCoupling:
        return DenseCoupling(self.source.map(function), self.target.map(function), function(self.plan))


@dataclass(frozen=True, eq=False, repr=False)
class RoundedCoupling(Coupling):
    """diag(r) P diag(c) + left right^T: another coupling moved to exact marginals."""

    base: Plan
    row_factor: Tensor
    column_factor: Tensor
    left: Tensor
    right: Tensor

    @property
    def source(self) -> Measure:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Source of the base."""
        return self.base.source

    @property
    def target(self) -> Measure:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Target of the base."""
        return self.base.target

    def _block(self, start: int, stop: int) -> Tensor:
        scaled = (
            self.base._block(start, stop) * self.row_factor[..., start:stop, None] * self.column_factor.unsqueeze(-2)
        )
        return scaled + self.left[..., start:stop, None] * self.right.unsqueeze(-2)

    @property
    def mT(self) -> RoundedCoupling:
        """Source and target exchanged."""
        return RoundedCoupling(self.base.mT, self.column_factor, self.row_factor, self.right, self.left)

    def _map(self, function: Callable[[Tensor], Tensor]) -> RoundedCoupling:
        tensors = (self.row_factor, self.column_factor, self.left, self.right)
        return RoundedCoupling(self.base._map(function), *(function(t) for t in tensors))


@dataclass(frozen=True)
class _Detached:
    """A feature map outside the autograd graph."""

    feature_map: FeatureMap

    def __call__(self, measure: Measure, points: Points) -> Features:
        return self.feature_map(measure, points).detach()


def _points_themselves(measure: Measure, points: Tensor) -> Tensor:
    return points


def diameter(mu: Measure) -> Tensor:
    """Largest Euclidean distance of two atoms of positive weight, ``(*batch)``, float64; for many atoms a bound of it."""
    x = mu.points.detach().to(potential_dtype(mu.device))
    live = mu.weights > 0
    if mu.n > _MOST_PAIRED:
        distances = Euclidean()(x, (mu.weights.to(x).unsqueeze(-2) @ x)).squeeze(-1)
        return 2 * distances.masked_fill(~live, 0.0).amax(-1)
    largest = torch.zeros(mu.batch_shape, dtype=x.dtype, device=x.device)
    for start, stop in ops.row_blocks((*mu.batch_shape, mu.n, mu.n)):
        distances = Euclidean().rows(x, x, start, stop)
        pairs = live[..., start:stop].unsqueeze(-1) & live.unsqueeze(-2)
        largest = torch.maximum(largest, distances.masked_fill(~pairs, 0.0).amax((-1, -2)))
    return largest
