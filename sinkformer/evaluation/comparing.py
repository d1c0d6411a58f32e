"""A predictor, made ready for a measurement; and one batch of its couplings against their targets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sinkformer._numerics import mass_tolerance
from sinkformer._typing import PerProblem, PlanMatrix
from sinkformer.couplings import Coupling, EntropicCoupling
from sinkformer.errors import DTypeError, NonFiniteError, ShapeError, WeightError
from sinkformer.measures import Measure
from sinkformer.metrics import W1Result, w1
from sinkformer.models import SinkhornTransformer

Predictor: TypeAlias = Callable[[Measure, Measure], Coupling]
# Told how much is done, and of how much.
Progress: TypeAlias = Callable[[int, int], None]

# The coupling of a model is meant as the theorem means it: the solution, not what a few sweeps leave.
_TOLERANCE, _MOST_ITERATIONS = 1e-9, 20_000
# Points of a prediction may be off by this many units of rounding.
_ROUNDINGS = 8
# Atoms up to which W1 is exact unless a tolerance is given, and the relative width of the bracket above.
_MOST_EXACT, _WIDTH = 64, 0.01


@dataclass(frozen=True, eq=False)
class Compared:
    """A batch of predictions and targets.

    Attributes:
        distance: W1 between them.
        prediction: as it was compared, ``(B, n, m)``, float64.
        target: rounded to the exact marginals.
        column_error: L1 distance of the column sums of the raw prediction from the weights of the target measure, ``(B,)``.
        converged: bool ``(B,)``; None if no solver said so.
    """

    distance: W1Result
    prediction: Coupling
    target: Coupling
    column_error: PerProblem
    converged: Tensor | None


def prepared(predictor: Predictor) -> Predictor:
    """The predictor, if it is a module as a copy on the CPU in float64 without gradients of its parameters.

    The solver of a ``SinkhornTransformer`` then goes on to a marginal error of 1e-9.
    """
    check_predictor(predictor)
    if not isinstance(predictor, nn.Module):
        return predictor
    module = copy.deepcopy(predictor).to("cpu", torch.float64).eval().requires_grad_(False)
    if not isinstance(module, SinkhornTransformer):
        return module
    if module.config.head == "sinkhorn":
        most = max(module.config.max_iterations, _MOST_ITERATIONS)
        module.config = replace(module.config, tolerance=_TOLERANCE, max_iterations=most)
    return partial(module, on_failure="ignore")


def check_predictor(predictor: Any) -> None:
    """Raise DTypeError unless it can be called."""
    if not callable(predictor):
        raise DTypeError(f"expected a model or a function (mu, nu) -> Coupling, received {type(predictor).__name__}")


def name_of(predictor: Any) -> str:
    """What a predictor calls itself, or the name of its type."""
    if isinstance(predictor, SinkhornTransformer):
        return f"{type(predictor).__name__}, {predictor.config.head}"
    name = getattr(predictor, "name", None) or getattr(predictor, "__name__", None)
    return name if isinstance(name, str) else type(predictor).__name__


def singles(couplings: Coupling | Iterable[Coupling]) -> list[Coupling]:
    """Single couplings, of a coupling or a batch of them, or of several of these.

    Raises:
        DTypeError: anything else.
    """
    given = [couplings] if isinstance(couplings, Coupling) else couplings
    if isinstance(given, (str, Measure)) or not isinstance(given, Iterable):
        raise DTypeError(f"expected a coupling or several, received {type(given).__name__}")
    found: list[Coupling] = []
    for pi in given:
        if not isinstance(pi, Coupling):
            raise DTypeError(f"expected couplings, received one {type(pi).__name__}; build it with Coupling.from_dense")
        found += [single for single in pi._flat()] if pi.batch_shape else [pi]
    return found


def width(tol: float | None, atoms: int) -> float | None:
    """Relative width of brackets: as given, or else exact for few atoms and 1 % for many."""
    return tol if tol is not None or atoms <= _MOST_EXACT else _WIDTH


def compare(
    prediction: Coupling, target: Coupling, mu: Measure, nu: Measure, *, rounded: bool, tol: float | None
) -> Compared:
    """W1 between predictions and targets of one batch ``(B,)`` of pairs; carries no gradient.

    Args:
        prediction: what a predictor made of ``mu`` and ``nu``.
        target: what the system made of them.
        mu: source measures, float64.
        nu: target measures.
        rounded: round the predictions to the exact marginals. Otherwise they are compared as they are, divided by their total
            mass, which must be one up to the rounding of their dtype.
        tol: see ``w1``.

    Raises:
        DTypeError, ShapeError, WeightError: no coupling of the two measures: another shape, other weights or points, another
            total mass; if it is not to be rounded, mass on atoms of weight zero.
        NonFiniteError: a NaN in a prediction.
    """
    plan = _checked(prediction, mu, nu, rounded)
    column_error = (plan.sum(-2) - nu.weights).abs().sum(-1)
    if not rounded:
        plan = plan / plan.sum((-1, -2), keepdim=True)
    dense, right = Coupling.from_dense(mu, nu, plan), target.detach().rounded()
    left = dense.rounded() if rounded else dense
    solved = isinstance(prediction, EntropicCoupling)
    converged = prediction.solution.converged if solved and prediction.solution.taus == (1.0, 1.0) else None
    return Compared(w1(left, right, tol=tol, rounded=False), left, right, column_error, converged)


def _checked(prediction: Coupling, mu: Measure, nu: Measure, rounded: bool) -> PlanMatrix:
    """The plan in float64, of total mass one; unless it is to be rounded, without mass where a measure has none."""
    if not isinstance(prediction, Coupling):
        raise DTypeError(f"expected a predictor that returns a Coupling, received {type(prediction).__name__}")
    wanted = (*mu.batch_shape, mu.n, nu.n)
    if tuple(prediction.shape) != wanted:
        raise ShapeError(f"expected a prediction of shape {wanted}, received {tuple(prediction.shape)}")
    tolerance = mass_tolerance(prediction.dtype)
    for name, own, given in (("source", prediction.source, mu), ("target", prediction.target, nu)):
        if not bool(((own.weights - given.weights).abs() <= tolerance).all()):
            raise WeightError(f"expected a coupling of the measures that were given, received another {name}")
        if not _same_points(own, given):
            raise WeightError(
                f"expected a coupling of the measures that were given, received other points of the {name}; keep points and "
                f"their order, as in Coupling.from_dense(mu, nu, plan)"
            )
    plan = prediction.detach().to_dense().double()
    bad = ~torch.isfinite(plan).flatten(1).all(-1)
    if bool(bad.any()):
        k = int(bad.nonzero()[0])
        raise NonFiniteError(f"expected finite couplings, received a NaN or an infinity for pair {k} of the batch")
    off = (plan.sum((-1, -2)) - 1).abs()
    solved = isinstance(prediction, EntropicCoupling) and not bool(prediction.solution.converged.all())
    if not solved and bool((off > tolerance).any()):
        raise WeightError(
            f"expected couplings of total mass 1, received a mass that is off by {off.max().item():.3g}; divide by the mass, "
            f"or return pi.rounded()"
        )
    live = (mu.weights > 0).unsqueeze(-1) & (nu.weights > 0).unsqueeze(-2)
    stray = plan.masked_fill(live, 0.0).sum((-1, -2)).max()
    if not rounded and bool(stray > tolerance):
        raise WeightError(
            f"expected no mass on atoms of weight zero, received {stray.item():.3g}; leave them out, or compare rounded"
        )
    return plan


def _same_points(own: Measure, given: Measure) -> bool:
    """Whether atoms of positive weight have the same places, up to the rounding of the dtype of ``own``."""
    if own.points.shape != given.points.shape:
        return False
    live = (given.weights > 0).unsqueeze(-1)
    size = given.points.detach().abs().masked_fill(~live, 0.0).amax((-1, -2), keepdim=True)
    apart = (own.points.detach() - given.points.detach()).abs().masked_fill(~live, 0.0)
    return bool((apart <= _ROUNDINGS * torch.finfo(own.dtype).eps * size).all())
