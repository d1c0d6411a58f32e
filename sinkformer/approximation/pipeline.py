"""``build``: the steps of the proof one after the other, each with its bound and its measurement."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

import torch
from torch import Tensor

from sinkformer._numerics import safe_divide, safe_log
from sinkformer._typing import PerProblem, PlanMatrix
from sinkformer.approximation.encoding import encoded
from sinkformer.approximation.factors import MOST_ITERATIONS, TOLERANCE, Factors, Table
from sinkformer.approximation.ledger import Ledger, Step
from sinkformer.approximation.pairs import Pairs
from sinkformer.approximation.separation import Separation, full_rank, separated
from sinkformer.approximation.smoothing import CELL, Cells, Interpolation, divergence_of, pinsker
from sinkformer.costs import Matrix
from sinkformer.couplings import Coupling
from sinkformer.errors import ConfigError, ConvergenceError, ConvergenceWarning, DTypeError
from sinkformer.measures import Measure
from sinkformer.metrics import w1
from sinkformer.models import SinkhornTransformer
from sinkformer.solutions import OnFailure
from sinkformer.systems import PairSampler, System
from sinkformer.training import Recipe

Targets: TypeAlias = System | Coupling | Sequence[Coupling]

# Share of the tolerance that every step may use.
_SHARE = 0.25
# Values of delta that are tried, and how many times a mesh is divided by four.
_DELTAS = [10.0**-k for k in range(4, 31, 2)]
_REFINEMENTS = 8
# A density that stands for none in the logits that fits of factors start from.
_NOTHING = 1e-300
# Rounding of plans and distances, in units of the diameter of the product.
_ROUNDING = 1e-12
# Rounds of the algorithm of Diliberto and Straus.
_ROUNDS = 200


@dataclass(frozen=True, eq=False)
class Approximation:
    """A Sinkhorn Transformer next to a coupling system, and the account of its error.

    Attributes:
        ledger: the steps, bounds and measurements.
        factors: Q and K as tables: defined for the measures that were given, at their atoms.
        model: Q and K as encoders, defined for all measures; None if there was no step to encoders.
    """

    ledger: Ledger
    factors: Factors
    model: SinkhornTransformer | None = None

    @property
    def reached(self) -> bool:
        """Whether the measured sup W1 over the given pairs is within the tolerance."""
        return self.ledger.reached

    def __call__(self, mu: Measure, nu: Measure) -> Coupling:
        """Couple two measures, or two batches, by the model if there is one, else by the factors."""
        return self.factors(mu, nu) if self.model is None else self.model(mu, nu)

    def __repr__(self) -> str:
        """The verdict."""
        kind = "factors" if self.model is None else "model"
        return (
            f"Approximation({kind}, rank={self.factors.rank}, W1 <= {self.ledger.measured:.3g}, reached={self.reached})"
        )


def build(
    targets: Targets,
    tolerance: float,
    *,
    epsilon: float = 1.0,
    rank: int | None = None,
    mesh: float | None = None,
    delta: float | None = None,
    interpolation: Interpolation = "geometric",
    sampler: PairSampler | None = None,
    count: int = 16,
    generator: torch.Generator | None = None,
    iterations: int = 1000,
    encoders: bool = False,
    width: int = 48,
    steps: int = 1000,
    recipe: Recipe | None = None,
    on_failure: OnFailure = "warn",
) -> Approximation:
    """Build a Sinkhorn Transformer next to given couplings, step by step as the theorem is proved.

    Smoothing at a mesh, a density bounded from below by delta, a cost of rank r shared by all pairs, and, if asked for,
    encoders. Every step has a bound, which holds for each pair, and is measured in W1 for |x - x'| + |y - y'|. What ``mesh``,
    ``delta`` and ``rank`` leave open is chosen so that each step takes a quarter of the tolerance at most: mesh and delta by
    their bounds, the rank as the first of 1, 2, 4, ... with which the measured total is within the tolerance.

    Args:
        targets: couplings to approximate, float64: a batch, or a sequence of batches of any shapes and sizes; or a system, of
            which ``count`` random pairs are drawn. Measures that are equal are one measure, and have one factor.
        tolerance: of the sup over the pairs of W1, > 0.
        epsilon: entropy, > 0, in the units of the cost. Only cost / epsilon matters: this scales the features, and no
            coupling depends on it.
        rank: r, the size of the features; chosen if None.
        mesh: h_X = h_Y, diameter of the supports of the partitions of unity, in the units of the points; chosen if None.
        delta: lower bound of the density, > 0; chosen if None.
        interpolation: of the density between the nodes: ``"geometric"``, or ``"arithmetic"``, as the theorem is proved.
        sampler: law of the pairs of a system; by default ``PairSampler`` of its dimensions.
        count: pairs of a system.
        generator: random numbers for pairs of a system.
        iterations: most iterations of each fit of factors.
        encoders: train a ``SinkhornTransformer`` of this rank on the pairs.
        width: of its tokens.
        steps: of its training.
        recipe: of its training, see ``sinkformer.training``.
        on_failure: what to do if the tolerance is not reached: ``"warn"``, ``"raise"`` or ``"ignore"``.

    Returns:
        The ``Approximation``; ``reached`` says whether it is one, ``ledger`` in which step it fails.

    Raises:
        ConfigError: an argument outside its range, or two couplings for one pair of measures.
        DTypeError: targets that are no couplings, or not float64; a sampler that is none.
        ShapeError: no pairs.
        WeightError: plans with other marginals than their measures.
        ConvergenceError: the tolerance was not reached, and ``on_failure="raise"``.

    Example:
        >>> from sinkformer.systems import named
        >>> system, sampler = named("eot")
        >>> found = build(system, 1e-3, sampler=sampler, count=4, generator=torch.Generator().manual_seed(0))
        >>> found.reached
        True
    """
    _check_positive(tolerance=tolerance, epsilon=epsilon, mesh=mesh, delta=delta)
    _check_counts(rank=rank, count=count, iterations=iterations, width=width, steps=steps)
    _check_choice("interpolation", interpolation, get_args(Interpolation))
    _check_choice("on_failure", on_failure, ("warn", "raise", "ignore"))
    _check_types(sampler, encoders, recipe)
    pairs = Pairs.of(_couplings(targets, sampler, count, generator))
    share = _SHARE * tolerance
    cells, delta = _chosen(pairs, mesh, delta, interpolation, share)
    smooth = _smoothing(cells)
    dense, plans, logits = _regularisation(cells, delta, interpolation)
    starts = (logits, safe_log(safe_divide(pairs.given, pairs.product).clamp_min(_NOTHING)))
    ladder = _ladder(full_rank(pairs)) if rank is None else [rank]
    for r in ladder:
        found = separated(pairs, plans, starts, r, share, iterations)
        low, reached = _separation(pairs, plans, logits, found)
        distances = _measured(pairs, reached, pairs.plans)
        if float(distances.max()) <= tolerance:
            break
    root = math.sqrt(epsilon)
    left, right = root * found.left, root * found.right
    factors = Factors(Table(pairs.sources, left), Table(pairs.targets, right), float(epsilon))
    ledger, model = Ledger((smooth, dense, low), distances, tolerance), None
    if encoders:
        model = encoded(pairs, factors.rank, float(epsilon), width, steps, recipe or Recipe())
        last, distances = _encoding(pairs, reached, found.logits(pairs), model, steps)
        ledger = Ledger((*ledger.steps, last), distances, tolerance)
    result = Approximation(ledger, factors, model)
    _report(ledger, on_failure)
    return result


# Steps -------------------------------------------------------------------------------------------------------------------


def _smoothing(cells: Cells) -> Step:
    pairs, mesh = cells.pairs, cells.mesh
    return Step(
        "smoothing",
        "F(mu, nu) couples mu and nu; supports of diameter h_X, h_Y: W1 <= h_X + h_Y",
        {"h_X": mesh, "h_Y": mesh, "cells": cells.count},
        2 * mesh + _margin(pairs),
        _measured(pairs, cells.smoothed(), pairs.plans),
    )


def _regularisation(cells: Cells, delta: float, interpolation: Interpolation) -> tuple[Step, PlanMatrix, Tensor]:
    """The step to a continuous cost, and its plan and its logits."""
    pairs, logits = cells.pairs, cells.logits(delta, interpolation)
    plans, slack = _solved(pairs, logits)
    divergence = cells.divergence(delta, interpolation)
    parameters = {"delta": float(delta), "KL": float(divergence.max()), "solver": float(slack.max())}
    formula = "KL <= log Z + <pi_h, log pi_h / R>"
    if interpolation == "arithmetic":
        formula = "KL <= delta + sum m log(1 + delta / (a b)), whatever the measures delta + 0.81 cells sqrt(delta)"
        parameters["KL, any measures"] = delta + CELL * cells.count * math.sqrt(delta)
    step = Step(
        f"{interpolation} density",
        f"one pair of marginals; {formula}, W1 <= H min(1, sqrt(KL / 2)) by Pinsker within fibres; and the solver's certificate",
        parameters,
        pinsker(divergence, pairs.fibre) + slack + _margin(pairs),
        _measured(pairs, plans, cells.smoothed()),
    )
    return step, plans, logits


def _separation(pairs: Pairs, plans: PlanMatrix, logits: Tensor, found: Separation) -> tuple[Step, PlanMatrix]:
    """The step to rank r, and its plan."""
    rank = found.left.shape[-1]
    parameters = {"rank": rank, "iterations": found.iterations}
    return _cost_step("separation", parameters, pairs, plans, logits, found.logits(pairs))


def _encoding(
    pairs: Pairs, plans: PlanMatrix, logits: Tensor, model: SinkhornTransformer, steps: int
) -> tuple[Step, PerProblem]:
    with torch.no_grad():
        q, k = model.source_encoder(pairs.mu), model.target_encoder(pairs.nu)
    parameters = {"steps": steps, "weights": sum(p.numel() for p in model.parameters())}
    step, reached = _cost_step("encoders", parameters, pairs, plans, logits, q @ k.mT / model.epsilon)
    return step, _measured(pairs, reached, pairs.plans)


def _cost_step(
    name: str, parameters: dict[str, Any], pairs: Pairs, plans: PlanMatrix, logits: Tensor, other: Tensor
) -> tuple[Step, PlanMatrix]:
    """From the plans of one cost to those of another: the bound by the costs, or by the relative entropy of the plans."""
    reached, slack = _solved(pairs, other)
    _, own = _solved(pairs, logits)
    apart = _gauge_distance(pairs, logits - other)
    divergence = divergence_of(plans, reached)
    fibre = pairs.fibre
    by_costs = fibre * (apart / 2).clamp_max(1.0) + slack + own
    step = Step(
        name,
        "one pair of marginals; W1 <= H |c - c'|_g / (2 epsilon), and W1 <= H min(1, sqrt(KL / 2)): the smaller",
        parameters | {"|c - c'|_g / epsilon": float(apart.max()), "KL": float(divergence.max())},
        torch.minimum(by_costs, pinsker(divergence, fibre)) + _margin(pairs),
        _measured(pairs, reached, plans),
    )
    return step, reached


def _solved(pairs: Pairs, logits: Tensor) -> tuple[PlanMatrix, PerProblem]:
    """The plan of a cost, of exact marginals, and how far it can be from the exact solution in W1."""
    pi = Coupling.solve(
        pairs.mu,
        pairs.nu,
        cost=Matrix(-logits),
        epsilon=1.0,
        tolerance=TOLERANCE,
        max_iterations=MOST_ITERATIONS,
        on_failure="ignore",
    )
    return pi.rounded().to_dense(), pi.certificate().w1_bound


def _margin(pairs: Pairs) -> PerProblem:
    """What the rounding of two plans, and the margin of their measured distance, may add to it, ``(B)``."""
    return _ROUNDING * sum(pairs.diameters, torch.zeros(()))


def _measured(pairs: Pairs, plan: PlanMatrix, other: PlanMatrix) -> PerProblem:
    """Upper ends of W1 between two plans of every pair, ``(B)``."""
    return w1(pairs.coupling(plan), pairs.coupling(other), rounded=False).upper


def _gauge_distance(pairs: Pairs, difference: Tensor) -> PerProblem:
    """|.|_g = inf over a, b of the largest |d - a - b| over live atoms, ``(B)``: midranges in turn (Diliberto, Straus 1951)."""
    live = (pairs.mu.weights > 0).unsqueeze(-1) & (pairs.nu.weights > 0).unsqueeze(-2)
    for _ in range(_ROUNDS):
        for axis in (-1, -2):
            high = torch.where(live, difference, -torch.inf).amax(axis, keepdim=True)
            low = torch.where(live, difference, torch.inf).amin(axis, keepdim=True)
            middle = torch.where(torch.isfinite(high), (high + low) / 2, 0.0)
            difference = torch.where(live, difference - middle, 0.0)
    return difference.abs().amax((-1, -2))


# Choices -----------------------------------------------------------------------------------------------------------------


def _chosen(
    pairs: Pairs, mesh: float | None, delta: float | None, interpolation: Interpolation, share: float
) -> tuple[Cells, float]:
    """Mesh and delta, the largest whose bounds are within the share; the smallest if none is."""
    meshes = [share / 2 * 4.0**-k for k in range(_REFINEMENTS)] if mesh is None else [mesh]
    deltas = _DELTAS if delta is None else [delta]
    for h in meshes:
        cells = Cells.of(pairs, h)
        for value in deltas:
            if float(pinsker(cells.divergence(value, interpolation), pairs.fibre).max()) <= share:
                return cells, value
    return cells, deltas[-1]  # pyright: ignore[reportPossiblyUnbound]


def _ladder(full: int) -> list[int]:
    """1, 2, 4, ... and the rank at which every cost separates."""
    return [2**k for k in range(full.bit_length()) if 2**k < full] + [full]


# Arguments ---------------------------------------------------------------------------------------------------------------


def _couplings(
    targets: Targets, sampler: PairSampler | None, count: int, generator: torch.Generator | None
) -> list[Coupling]:
    """Single couplings, one after the other."""
    if isinstance(targets, System):
        if generator is None:
            raise ConfigError(
                "expected a generator to draw the pairs of a system with, received None; "
                "use generator=torch.Generator().manual_seed(0)"
            )
        sampler = PairSampler(dims=targets.dims) if sampler is None else sampler
        targets = targets(*sampler.pairs(count, generator=generator))
    elif sampler is not None or generator is not None:
        raise ConfigError("expected a sampler and a generator with a system only, received couplings with them")
    if isinstance(targets, Coupling):
        targets = [targets]
    if not isinstance(targets, Sequence) or not all(isinstance(pi, Coupling) for pi in targets):
        raise DTypeError(f"expected a system, a coupling or a sequence of couplings, received {type(targets).__name__}")
    return [one for pi in targets for one in (pi.detach()._flat() if pi.batch_shape else [pi.detach()])]


def _check_positive(**values: Any) -> None:
    for name, value in values.items():
        if value is None and name in ("mesh", "delta"):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ConfigError(f"expected {name} positive and finite, received {value!r}")


def _check_counts(**values: Any) -> None:
    for name, value in values.items():
        if value is None and name == "rank":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"expected {name} as a whole number >= 1, received {value!r}")


def _check_types(sampler: Any, encoders: Any, recipe: Any) -> None:
    if not (sampler is None or isinstance(sampler, PairSampler)):
        raise DTypeError(f"expected sampler as a PairSampler or None, received {type(sampler).__name__}")
    if not isinstance(encoders, bool):
        raise ConfigError(f"expected encoders as True or False, received {encoders!r}; their number is not an option")
    if not (recipe is None or isinstance(recipe, Recipe)):
        raise ConfigError(f"expected recipe as a Recipe or None, received {recipe!r}")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"expected {name} {' or '.join(map(repr, choices))}, received {value!r}")


def _report(ledger: Ledger, on_failure: OnFailure) -> None:
    if ledger.reached or on_failure == "ignore":
        return
    worst = max(ledger.steps, key=lambda step: step.measured)
    message = (
        f"sup W1 is {ledger.measured:.3g} over {len(ledger.distances)} pairs, above the tolerance {ledger.tolerance:g}; most of "
        f"it in the step '{worst.name}': {worst.measured:.3g}"
    )
    if on_failure == "raise":
        raise ConvergenceError(message)
    warnings.warn(message, ConvergenceWarning, stacklevel=3)
