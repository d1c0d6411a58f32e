"""W1 between two couplings, or two measures: a bracket that holds, and the potential that proves its lower end.

Kantorovich and Rubinstein: W1(pi, rho) = max <phi, pi - rho> over phi that are 1-Lipschitz for the ground metric. Every
flow gives an upper bound, every 1-Lipschitz function a lower one; a method is a way of finding good ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from sinkformer._numerics import mass_tolerance
from sinkformer._typing import PerProblem
from sinkformer.costs import Cost, Euclidean, Matrix
from sinkformer.couplings import Coupling, EntropicCoupling
from sinkformer.errors import ConfigError, DeviceError, DTypeError, NonFiniteError, ShapeError
from sinkformer.measures import Measure
from sinkformer.metrics import bracket, estimates, flows
from sinkformer.metrics.flows import Bounds
from sinkformer.metrics.grounds import Axis, AxisMetric, axis_of_matrix, axis_of_points, point, power
from sinkformer.metrics.problems import Difference, Problem, common_total, difference

Method: TypeAlias = Literal["auto", "exact", "bracket", "geomloss", "sliced"]
METHODS = ("auto", "exact", "bracket", "geomloss", "sliced")

# Pairs of places up to which the simplex takes them all; above, it is faster to choose.
_MOST_DENSE = 512**2
_MOST_DENSE_EUCLIDEAN = 6000**2
# Places with supply or demand up to which an exact value is sought when no tolerance is given, and what is sought above.
_MOST_EXACT = 40_000
_LOOSE = 0.01
# Places beyond which the simplex would take hours, whatever is kept of the pairs.
_MOST_PRUNED = 200_000
# Relative width that counts as exact: the accumulated rounding of a network simplex.
_EXACT = 1e-9
# Slack of the pairs that are kept at the start, in entropies.
_SLACK = 8
# Entries of a plan converted at once.
_CHUNK = 1 << 22


@dataclass(frozen=True, eq=False, repr=False)
class W1Result:
    """A certified bracket of W1 for every pair of a batch.

    Attributes:
        lower: no larger than W1, ``(*batch)``, float64 on the CPU.
        upper: no smaller than W1, ``(*batch)``. Both hold in floating point: the margin for rounding, about 1e-13 of the
            diameter, is in them.
        value: the best single number, within the bracket: the cost of the best flow. For an estimate, the estimate.
        exact: whether the bracket is closed up to rounding: wide at most 1e-9 of the value, and the margin, ``(*batch)``.
        potential: the 1-Lipschitz function that proves ``lower``, at the atoms of the first and of the second argument,
            ``(*batch, n, m)`` each, ``(*batch, n)`` for measures; zero at atoms without mass.
            ``lower`` = <potential[0], first> - <potential[1], second> - margin, or zero if that is negative.
        method: how, and why so: one sentence, or a tuple of them, one for each pair in row-major order.
    """

    lower: PerProblem
    upper: PerProblem
    value: PerProblem
    exact: Tensor
    potential: tuple[Tensor, Tensor]
    method: str | tuple[str, ...]

    @property
    def width(self) -> PerProblem:
        """Of the bracket: upper - lower, ``(*batch)``."""
        return self.upper - self.lower

    def __repr__(self) -> str:
        """Value and bracket, or the shape of the batch and the widest bracket."""
        if self.value.dim():
            shape = tuple(self.value.shape)
            widest = float(self.width.max()) if self.width.numel() else 0.0
            return f"W1Result(batch={shape}, exact={int(self.exact.sum())}/{self.exact.numel()}, widest={widest:.3g})"
        kind = "exact" if bool(self.exact) else f"bracket [{float(self.lower):.6g}, {float(self.upper):.6g}]"
        return f"W1Result({float(self.value):.6g}, {kind}: {self.method})"


@dataclass(frozen=True)
class _Outcome:
    """One pair: what goes into a ``W1Result``; the potentials on the atoms of the two arguments."""

    lower: float
    upper: float
    value: float
    margin: float
    potential: tuple[np.ndarray, np.ndarray]
    method: str

    def scaled(self, exponent: int) -> _Outcome:
        """For distances times ``2 ** exponent``."""
        numbers = (self.lower, self.upper, self.value, self.margin)
        lower, upper, value, margin = (float(np.ldexp(number, exponent)) for number in numbers)
        potential = np.ldexp(self.potential[0], exponent), np.ldexp(self.potential[1], exponent)
        return _Outcome(lower, upper, value, margin, potential, self.method)


def w1(
    pi: Coupling | Measure,
    rho: Coupling | Measure,
    *,
    ground: str | AxisMetric | tuple = "additive",
    tol: float | None = None,
    method: Method = "auto",
    rounded: bool | None = None,
    progress: bool = False,
) -> W1Result:
    """Wasserstein distance of order one between two couplings or two measures, certified.

    Computed in float64 on the CPU, one pair after the other, so that results do not depend on the batch.

    Args:
        pi: a coupling, ``(*batch, n, m)``, or a measure, ``(*batch, n)``.
        rho: another one of the same kind and batch shape, on the same spaces; its atoms may be others.
        ground: the metric. ``"additive"`` is d((x, y), (x', y')) = |x - x'| + |y - y'|; ``"euclidean"`` the root of the sum of
            squares. A pair of metrics, one for each axis, is added up; with ``"euclidean"`` as a third entry it is combined
            by the root of the sum of squares. For measures one metric. A metric is a ``Cost``, a function of two point
            clouds as a ``Cost`` is, or a matrix of distances ``(*batch, n + n', n + n')`` between the atoms of the first
            argument followed by those of the second, ``(*batch, n, n)`` where both have the same atoms.
        tol: relative width of the bracket, (upper - lower) / upper, to stop at, >= 0. By default as exact as the size
            allows: exact up to 40 000 places of different mass (couplings of about 200 x 200), 1 % beyond.
        method: ``"auto"``; ``"exact"``, the network simplex whatever the size; ``"bracket"``, entropic bounds only;
            ``"geomloss"`` and ``"sliced"`` are estimates, whose bracket is [0, inf].
        rounded: whether couplings are rounded to the marginals of their measures first. By default those of a balanced
            solver are, since their marginals are exact up to its tolerance only; given plans are what they are.
        progress: show a bar.

    Returns:
        ``W1Result``, one bracket for each pair.

    Raises:
        DTypeError: not two couplings or two measures; a ground or a metric of the wrong type.
        DeviceError: arguments on two devices.
        ShapeError: batch shapes, dimensions or a matrix of distances that do not fit.
        WeightError: total masses that differ by more than rounding, or no mass.
        NonFiniteError: a NaN or an infinity in a plan or in the distances.
        ConfigError: a ground that is no metric, with the offending atoms; an unknown method; a negative ``tol``.

    Example:
        >>> a = Measure.uniform(torch.tensor([[0.0], [1.0]]))
        >>> b = Measure.uniform(torch.tensor([[0.0], [3.0]]))
        >>> float(w1(a, b).value)
        1.0
    """
    _check_arguments(pi, rho, tol, method, rounded)
    metrics, euclidean = _grounds(ground, isinstance(pi, Coupling), method)
    batch = tuple(pi.batch_shape)
    _check_matrices(metrics, batch)
    pairs = zip(_clouds(pi, rounded), _clouds(rho, rounded), strict=True)
    tolerance = max(mass_tolerance(pi.dtype), mass_tolerance(rho.dtype))
    outcomes = []
    bar = tqdm(pairs, total=pi.batch_shape.numel(), desc="W1", unit="pair", disable=not progress)
    for k, (first, second) in enumerate(bar):
        total = common_total(first.masses, second.masses, tolerance)
        axes = _axes(metrics, first, second, np.unravel_index(k, batch) if batch else ())
        # Solvers have absolute tolerances: all of them see distances of size one.
        exponent = power(axes[0].diameter + axes[1].diameter)
        x, y = (axis.scaled(-exponent) for axis in axes)
        found = difference(first.masses, second.masses, x, y, euclidean, total)
        if method in ("geomloss", "sliced"):
            outcome = _estimate(first, second, found, exponent, method)
        else:
            outcome = _bracketed(found, tol, method)
        outcomes.append(_noted(outcome.scaled(exponent), first, second))
    return _collected(outcomes, pi, rho)


# Arguments ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cloud:
    """One distribution: points of the two axes, masses ``(n, m)`` (m = 1 for a measure), and how far rounding moved it."""

    x: np.ndarray
    y: np.ndarray | None
    masses: np.ndarray
    error: float


def _check_arguments(pi: Any, rho: Any, tol: float | None, method: str, rounded: bool | None) -> None:
    kinds = [next((kind for kind in (Coupling, Measure) if isinstance(given, kind)), None) for given in (pi, rho)]
    if None in kinds or kinds[0] is not kinds[1]:
        raise DTypeError(
            f"expected two couplings or two measures, received {type(pi).__name__} and {type(rho).__name__}; "
            f"make a coupling with Coupling.from_dense(mu, nu, plan), a measure of one with .as_measure()"
        )
    if pi.device != rho.device:
        raise DeviceError(f"expected both on one device, received {pi.device} and {rho.device}; use .to()")
    if pi.batch_shape != rho.batch_shape:
        raise ShapeError(f"expected one batch shape, received {tuple(pi.batch_shape)} and {tuple(rho.batch_shape)}")
    if method not in METHODS:
        raise ConfigError(f"expected a method out of {METHODS}, received {method!r}")
    if tol is not None and not (isinstance(tol, float | int) and 0 <= tol < 1):
        raise ConfigError(f"expected tol between 0 and 1, received {tol!r}")
    if rounded not in (None, True, False):
        raise ConfigError(f"expected rounded True, False or None, received {rounded!r}")


def _grounds(ground: Any, couplings: bool, method: str) -> tuple[list[AxisMetric], bool]:
    """A metric for each axis, and whether their product is Euclidean."""
    axes = 2 if couplings else 1
    if isinstance(ground, str):
        if ground not in ("additive", "euclidean"):
            raise ConfigError(f"expected 'additive', 'euclidean' or a metric for each axis, received {ground!r}")
        return [Euclidean()] * axes, ground == "euclidean"
    parts = list(ground) if isinstance(ground, tuple) else [ground]
    product = parts.pop() if couplings and len(parts) == 3 else "additive"
    if len(parts) != axes or product not in ("additive", "euclidean"):
        wanted = (
            "(metric of X, metric of Y), with 'euclidean' as a third entry for their Euclidean product"
            if couplings
            else "one metric"
        )
        raise ConfigError(f"expected ground as {wanted}, received {ground!r}")
    for metric in parts:
        if not isinstance(metric, Tensor | Cost) and not callable(metric):
            raise DTypeError(f"expected a Cost, a function or a matrix of distances, received {type(metric).__name__}")
    if method in ("geomloss", "sliced") and not all(isinstance(metric, Euclidean) for metric in parts):
        raise ConfigError(
            f"expected Euclidean axes for the estimate {method!r}, received {ground!r}; use method='auto'"
        )
    return [metric.values if isinstance(metric, Matrix) else metric for metric in parts], product == "euclidean"


def _check_matrices(metrics: list[AxisMetric], batch: tuple[int, ...]) -> None:
    for metric, name in zip(metrics, "XY", strict=False):
        if isinstance(metric, Tensor) and metric.dim() != 2 and (metric.dim() < 2 or metric.shape[:-2] != batch):
            raise ShapeError(
                f"expected one distance matrix on {name}, or one for each pair of the batch {batch}, "
                f"received {tuple(metric.shape)}; the last two sizes are those of a matrix, the others those of the batch"
            )


def _clouds(given: Coupling | Measure, rounded: bool | None) -> Iterator[_Cloud]:
    """The pairs' distributions one after the other, float64."""
    if isinstance(given, Measure):
        points, weights = (t.detach().cpu().double() for t in (given.points, given.weights))
        for x, w in zip(
            points.reshape(-1, given.n, given.d).numpy(), weights.reshape(-1, given.n).numpy(), strict=True
        ):
            yield _Cloud(x, None, w[:, None], 0.0)
        return
    flat = given.detach()._flat()
    solved = isinstance(flat, EntropicCoupling) and flat.solution.taus == (1.0, 1.0)
    step = max(1, _CHUNK // max(1, flat.shape[-2] * flat.shape[-1]))
    for start in range(0, len(flat), step):
        part = flat[start : start + step]
        error = torch.zeros(len(part))
        if rounded or (rounded is None and solved):
            error, part = part.marginal_error(), part.rounded()
        plans = torch.cat(part._over_blocks(lambda p, *_: p), -2).cpu().double().numpy()
        if not np.isfinite(plans).all():
            raise NonFiniteError(
                "expected finite plans, received a NaN or an infinity: a problem without a solution; look at solution.status"
            )
        x, y = (measure.points.cpu().double().numpy() for measure in (part.source, part.target))
        for k in range(len(part)):
            yield _Cloud(x[k], y[k], plans[k], float(error[k]))


def _axes(metrics: list[AxisMetric], first: _Cloud, second: _Cloud, index: tuple) -> tuple[Axis, Axis]:
    live = [[cloud.masses.any(axis) for cloud in (first, second)] for axis in (1, 0)]
    x = _axis(metrics[0], first.x, second.x, live[0], "X", index)
    if first.y is None or second.y is None:
        return x, point()
    return x, _axis(metrics[1], first.y, second.y, live[1], "Y", index)


def _axis(metric: AxisMetric, a: np.ndarray, b: np.ndarray, live: list[Any], name: str, index: tuple) -> Axis:
    if isinstance(metric, Tensor):
        shared = a.shape == b.shape and np.array_equal(a, b)
        values = metric.detach()
        if values.dim() == len(index) + 2 and index:
            values = values[index]
        return axis_of_matrix(values.cpu().double().numpy(), metric.dtype, shared, live, name)
    if a.shape[-1] != b.shape[-1]:
        raise ShapeError(f"expected points of one dimension on {name}, received {a.shape[-1]} and {b.shape[-1]}")
    return axis_of_points(metric, [a, b], live, name)


# One pair ----------------------------------------------------------------------------------------------------------------


def _bracketed(found: Difference, tol: float | None, method: str) -> _Outcome:
    if found.vanishes:
        stray = (found.x.diameter + found.y.diameter) * float(np.abs(found.values).sum()) / 2
        how = "nothing to transport: the two agree up to rounding"
        return _outcome(found, 0.0, found.margin + stray, np.zeros_like(found.values), how)
    line = None if method == "bracket" else _on_a_line(found)
    if line is not None:
        return _outcome(found, line[0], found.margin, line[1], "distribution functions, since all places lie on a line")
    problem = found.problem()
    bounds, how = (None if method == "bracket" or tol else _on_two_lines(found, problem)) or _solved(
        problem, tol, method
    )
    return _outcome(found, bounds.upper * problem.moved, found.margin, found.potential(bounds.psi), how)


def _outcome(found: Difference, value: float, margin: float, potential: np.ndarray, how: str) -> _Outcome:
    """Bounds widened by the margin; the lower one is the value of the potential, read at the atoms of the arguments.

    A cost below what the potential proves contradicts it, and is given up: everything may travel the diameter.
    """
    proved, upper = float((potential * found.values).sum()), value + margin
    if value + margin < proved - margin:
        diameter = found.x.diameter + found.y.diameter
        upper = diameter * float(np.abs(found.values).sum()) / 2 + margin
        how = f"{how}; its cost is {value / proved:.6g} of what is proved, so the upper bound is all mass over the diameter"
        value = proved
    lower = max(0.0, min(proved, value) - margin)
    at = []
    for rows, columns in ((found.x.first, found.y.first), (found.x.second, found.y.second)):
        alive = (rows >= 0)[:, None] & (columns >= 0)
        at.append(np.where(alive, potential[np.ix_(rows, columns)], 0.0))
    return _Outcome(lower, upper, value, margin, (at[0], at[1]), how)


def _solved(problem: Problem, tol: float | None, method: str) -> tuple[Bounds, str]:
    """Choose: all pairs where they are few, entropic bounds where they are enough, chosen pairs for the rest."""
    places = problem.places
    if method != "bracket" and problem.size <= (_MOST_DENSE_EUCLIDEAN if problem.ground.euclidean else _MOST_DENSE):
        return flows.dense(
            problem
        ), f"network simplex on all {problem.size} pairs of places left after cancelling, since they are few"
    exact = method == "exact" or (method == "auto" and places <= _MOST_EXACT)
    wanted = tol if tol is not None else 0.0 if exact else _LOOSE
    alone = method == "bracket" or (method == "auto" and places > _MOST_PRUNED)
    bounds, stage = bracket.narrowed(problem, wanted, alone)
    how = f"separable Sinkhorn down to eta = {stage.eta / problem.ground.diameter:.3g} of the diameter, {stage.sweeps} sweeps"
    if bounds.gap <= wanted and wanted > 0:
        return bounds, f"{how}: enough for tol = {wanted:g}"
    if alone:
        why = "as asked" if method == "bracket" else f"{places} places are too many for the simplex"
        return bounds, f"{how}: {why}; relative width {bounds.gap:.2g}"
    closed, pairs, rounds = flows.pruned(problem, bounds, _SLACK * stage.eta, wanted)
    return closed, (
        f"network simplex on {pairs} of {problem.size} pairs of places, chosen by separable Sinkhorn and extended by the "
        f"dual, {rounds} rounds"
    )


def _on_two_lines(found: Difference, problem: Problem) -> tuple[Bounds, str] | None:
    """Flow between neighbours, where both axes are lines, distances add up and the pairs of places are many."""
    if found.euclidean or found.x.line is None or found.y.line is None or problem.size <= _MOST_DENSE:
        return None
    bounds = flows.on_lines(found, problem)
    if bounds is None:
        return None
    return bounds, f"flow between neighbours on a grid of {found.values.size} places, since both axes are lines"


def _on_a_line(found: Difference) -> tuple[float, np.ndarray] | None:
    """W1 and its potential from distribution functions, where one axis is a line and the other a point."""
    for axis, other, values in ((found.x, found.y, found.values), (found.y, found.x, found.values.T)):
        if axis.line is not None and other.size == 1:
            order = axis.line.argsort()
            gaps, surplus = np.diff(axis.line[order]), values[order, 0].cumsum()[:-1]
            potential = np.empty(len(order))
            potential[order] = np.concatenate([[0.0], -(np.sign(surplus) * gaps).cumsum()])
            return float(np.abs(surplus) @ gaps), potential.reshape(found.values.shape)
    return None


def _estimate(first: _Cloud, second: _Cloud, found: Difference, exponent: int, method: str) -> _Outcome:
    """``found`` has its distances divided by ``2 ** exponent``; so have the points here, from the first of them."""
    clouds, origin = [], 0.0
    for cloud in (first, second):
        i, j = np.nonzero(cloud.masses)
        points = cloud.x[i] if cloud.y is None else np.concatenate([cloud.x[i], cloud.y[j]], -1)
        origin = origin if clouds else points[0]
        clouds.append((np.ldexp(points - origin, -exponent), cloud.masses[i, j] / cloud.masses.sum()))
    if method == "geomloss":
        value = estimates.sinkhorn_divergence(clouds[0], clouds[1], first.x.shape[-1], found.euclidean)
        how = "estimate, no bracket: GeomLoss, debiased Sinkhorn divergence at blur 0.01 of the diameter"
    else:
        value = estimates.sliced(clouds[0], clouds[1])
        how = "estimate, no bracket: sliced distance, at most the Euclidean W1 and often half of it"
    zeros = np.zeros_like(first.masses), np.zeros_like(second.masses)
    return _Outcome(0.0, np.inf, value * found.total, 0.0, zeros, how)


# Results -----------------------------------------------------------------------------------------------------------------


def _noted(outcome: _Outcome, first: _Cloud, second: _Cloud) -> _Outcome:
    """Say by how much couplings were off their marginals before they were rounded."""
    error = max(first.error, second.error)
    if error <= _EXACT:
        return outcome
    return replace(outcome, method=f"{outcome.method}; rounded first, from marginal errors up to {error:.2g}")


def _collected(outcomes: list[_Outcome], pi: Coupling | Measure, rho: Coupling | Measure) -> W1Result:
    batch = pi.batch_shape
    lower, upper, value = (
        torch.tensor([getattr(outcome, name) for outcome in outcomes], dtype=torch.float64).reshape(batch)
        for name in ("lower", "upper", "value")
    )
    shapes = [given.shape if isinstance(given, Coupling) else given.weights.shape for given in (pi, rho)]
    potential = [
        torch.from_numpy(np.array([outcome.potential[k] for outcome in outcomes], dtype=np.float64)).reshape(shapes[k])
        for k in (0, 1)
    ]
    margin = torch.tensor([outcome.margin for outcome in outcomes], dtype=torch.float64).reshape(batch)
    exact = upper - lower <= _EXACT * value + 2 * margin
    methods = tuple(outcome.method for outcome in outcomes)
    return W1Result(lower, upper, value, exact, (potential[0], potential[1]), methods if batch else methods[0])
