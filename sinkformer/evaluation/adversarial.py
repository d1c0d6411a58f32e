"""Pairs that are searched for: mu and nu are moved so that W1 between prediction and target grows."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sinkformer._typing import PerProblem
from sinkformer.couplings import Coupling
from sinkformer.errors import ConfigError, ConvergenceError, DTypeError, GradientWarning
from sinkformer.evaluation.comparing import Compared, Predictor, Progress, compare, name_of, prepared, width
from sinkformer.evaluation.sampled import LOWER_BOUND, Pair, check_whole
from sinkformer.measures import Measure
from sinkformer.systems import System

# Steps of the ascent in log-weights, in units of those in points.
_WEIGHTS = 3.0
# Random search: first and smallest step, and how it grows after a gain and shrinks after none.
_FIRST, _LEAST, _GROWTH, _DECAY = 0.1, 1e-4, 1.5, 0.85


@dataclass(frozen=True, eq=False, repr=False)
class Attack:
    """What a search for bad pairs has found.

    Attributes:
        predictor, system: their names.
        method: ``"gradient"``, or ``"random search"`` where prediction or target carries no gradient.
        steps: that were made.
        start: W1 of the pairs at the start, ``(B,)``; upper ends of brackets, as everywhere here.
        upper: the largest W1 found from each of them, ``(B,)``, no smaller than ``start``.
        lower: the lower ends of the same brackets.
        converged: bool ``(B,)``: whether the predictor's solver did, on the pairs that were found; None if no solver is known.
        worst: the worst pair.
        stopped: why the search ended before its time, or None.
    """

    predictor: str
    system: str
    method: Literal["gradient", "random search"]
    steps: int
    start: PerProblem
    upper: PerProblem
    lower: PerProblem
    converged: Tensor | None
    worst: Pair
    stopped: str | None

    @property
    def sup(self) -> float:
        """Largest W1 found."""
        return float(self.upper.max())

    @property
    def notes(self) -> tuple[str, ...]:
        """What has to be known to read the numbers."""
        how = {
            "gradient": "searched for by the gradient of W1 in points and weights",
            "random search": "searched for at random, since prediction or target carries no gradient",
        }
        notes = [f"{how[self.method]}, {self.steps} steps from {len(self.start)} pairs", LOWER_BOUND]
        if self.converged is not None and not bool(self.converged.all()):
            notes.append(f"{int((~self.converged).sum())} of the pairs that were found did not converge")
        return tuple(notes if self.stopped is None else [*notes, f"the search ended early: {self.stopped}"])

    def __repr__(self) -> str:
        """The two suprema and the notes."""
        return (
            f"Attack({self.predictor} on {self.system}: W1 {float(self.start.max()):.3g} at the start, {self.sup:.3g} found; "
            f"{'; '.join(self.notes)})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain numbers and lists."""
        return {
            "predictor": self.predictor,
            "system": self.system,
            "method": self.method,
            "steps": self.steps,
            "start": self.start.tolist(),
            "lower": self.lower.tolist(),
            "upper": self.upper.tolist(),
            "converged": None if self.converged is None else self.converged.tolist(),
            "sup": self.sup,
            "stopped": self.stopped,
            "notes": list(self.notes),
            "worst": self.worst.to_dict(),
        }


def adversarial(
    predictor: Predictor,
    system: System,
    mu: Measure,
    nu: Measure,
    *,
    steps: int = 50,
    rate: float = 0.02,
    half_width: float = 1.0,
    seed: int = 0,
    tol: float | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> Attack:
    """Move pairs of measures so that W1 between prediction and target grows; report the best that was met.

    Points stay in the cube [-half_width, half_width]^d, weights positive (they are a softmax); atoms of weight zero stay out.
    W1 is measured, exactly up to 64 atoms a side, in every step. Its derivative in the two plans is the Kantorovich potential
    that the measurement comes with (envelope theorem), and from there on autograd goes through model and system; that
    distances change too when points move is left out, so the direction is not quite the gradient. Adam. Where prediction or
    target carries no gradient: a random search with a step size for each pair.

    Args:
        predictor: see ``evaluate``.
        system: the exact targets.
        mu: sources of the pairs to start from, ``(B, n)``, float64, within the domain; such as ``evaluation.starts()[0]``.
        nu: their targets, ``(B, m)``.
        steps: how many, >= 0.
        rate: step of the points in units of ``half_width``, > 0.
        half_width: of the domain.
        seed: of the random search.
        tol: see ``evaluate``.
        name: of the predictor.
        progress: called after every step with the number of steps that are done, and of all.

    Raises:
        ConfigError: an argument outside its range, not one batch axis, or a point outside the domain.
        DTypeError: no system, or no measures of float64.
        ConvergenceError: the system's own solver failed at the start. Later this ends the search.
    """
    check_whole(0, steps=steps, seed=seed)
    for key, value in (("rate", rate), ("half_width", half_width)):
        if not 0 < value < math.inf:
            raise ConfigError(f"expected {key} positive and finite, received {value}")
    _check_starts(system, mu, nu, half_width)
    ready, best = prepared(predictor), _Best()
    climber: _Ascent | _Walk | None = None
    cloud, done, stopped = _Cloud(mu.detach(), nu.detach(), half_width), 0, None
    tol = width(tol, max(mu.n, nu.n))
    with warnings.catch_warnings():
        # A poor direction is no poor result: what is found is measured.
        warnings.simplefilter("ignore", GradientWarning)
        for done in range(steps + 1):
            try:
                pair = cloud.measures()
                prediction, target = ready(*pair), system(*pair)
            except ConvergenceError as error:
                if done == 0:
                    raise
                stopped = str(error)
                break
            compared = compare(prediction, target, *pair, rounded=True, tol=tol)
            gained = best.note(*pair, compared)
            if climber is None:
                smooth = prediction.to_dense().requires_grad and target.to_dense().requires_grad
                climber = _Ascent(cloud, rate) if smooth else _Walk(cloud, seed)
            if done < steps:
                climber.move(prediction, target, compared, gained)
            if progress is not None:
                progress(done, steps)
    assert climber is not None
    title = name_of(predictor) if name is None else name
    found = (best.start, best.upper, best.lower, best.converged, best.worst)
    return Attack(title, system.name, climber.method, done, *found, stopped)


def _check_starts(system: Any, mu: Any, nu: Any, half_width: float) -> None:
    """Raise unless these are a system and pairs within its domain."""
    if not isinstance(system, System):
        raise DTypeError(f"expected a System, received {type(system).__name__}")
    for name, side in (("mu", mu), ("nu", nu)):
        if not isinstance(side, Measure) or side.dtype != torch.float64:
            kind = f"a Measure of {side.dtype}" if isinstance(side, Measure) else type(side).__name__
            raise DTypeError(
                f"expected {name} as a Measure of torch.float64, such as evaluation.starts(), received {kind}"
            )
    shapes = tuple(mu.batch_shape), tuple(nu.batch_shape)
    if len(shapes[0]) != 1 or not len(mu) or shapes[0] != shapes[1]:
        raise ConfigError(
            f"expected a batch (B,) of pairs to start from, received batch shapes {shapes[0]} and {shapes[1]}"
        )
    for name, side in (("mu", mu), ("nu", nu)):
        far = float(side.points.detach().abs()[side.weights > 0].max())
        if far > half_width:
            raise ConfigError(
                f"expected points of {name} within half_width = {half_width:.6g} of zero, received a coordinate of size "
                f"{far:.6g}; give a larger half_width, or move the points"
            )


class _Cloud:
    """Points and log-weights of a batch of pairs, as tensors that can be moved."""

    def __init__(self, mu: Measure, nu: Measure, half_width: float):
        self.half_width = half_width
        self.dead = [side.weights == 0 for side in (mu, nu)]
        self.points = [side.points.clone().requires_grad_() for side in (mu, nu)]
        logs = [side.weights.masked_fill(dead, 1.0).log() for side, dead in zip((mu, nu), self.dead, strict=True)]
        self.logs = [log.requires_grad_() for log in logs]

    def measures(self) -> tuple[Measure, Measure]:
        """The two batches; a softmax makes weights of logarithms."""
        parts = zip(self.points, self.logs, self.dead, strict=True)
        mu, nu = (Measure(x, log.masked_fill(dead, -torch.inf).softmax(-1)) for x, log, dead in parts)
        return mu, nu

    @torch.no_grad()
    def confine(self) -> None:
        """Back into the domain."""
        for x in self.points:
            x.clamp_(-self.half_width, self.half_width)


class _Best:
    """The best bracket of every pair so far, and the worst pair."""

    start: Tensor
    upper: Tensor
    lower: Tensor
    converged: Tensor | None
    worst: Pair

    def note(self, mu: Measure, nu: Measure, compared: Compared) -> Tensor:
        """Take in a comparison; returns which pairs it is the best of, ``(B,)``."""
        lower, upper = compared.distance.lower, compared.distance.upper
        first = not hasattr(self, "start")
        gained = torch.ones_like(upper, dtype=torch.bool) if first else upper > self.upper
        if first:
            self.start, self.upper, self.lower, self.converged = upper, upper, lower, compared.converged
        self.upper, self.lower = torch.where(gained, upper, self.upper), torch.where(gained, lower, self.lower)
        if self.converged is not None and compared.converged is not None:
            self.converged = torch.where(gained, compared.converged, self.converged)
        k = int(upper.argmax())
        if first or float(upper[k]) > self.worst.upper:
            self.worst = Pair.of(mu, nu, compared, k)
        return gained


class _Ascent:
    """Adam, along the derivative of W1 in the two plans."""

    method: Literal["gradient"] = "gradient"

    def __init__(self, cloud: _Cloud, rate: float):
        self.cloud = cloud
        groups = [
            {"params": cloud.points, "lr": rate * cloud.half_width},
            {"params": cloud.logs, "lr": _WEIGHTS * rate},
        ]
        self.optimizer = torch.optim.Adam(groups, maximize=True)

    def move(self, prediction: Coupling, target: Coupling, compared: Compared, gained: Tensor) -> None:
        """One step."""
        phi = compared.distance.potential
        rise = (phi[0] * prediction.to_dense()).sum() - (phi[1] * target.to_dense()).sum()
        self.optimizer.zero_grad()
        rise.backward()
        for t in (*self.cloud.points, *self.cloud.logs):
            t.grad = None if t.grad is None else t.grad.nan_to_num(0.0, 0.0, 0.0)
        self.optimizer.step()
        self.cloud.confine()


class _Walk:
    """Random steps from the best place of every pair, longer after a gain and shorter after none."""

    method: Literal["random search"] = "random search"

    def __init__(self, cloud: _Cloud, seed: int):
        self.cloud = cloud
        self.generator = torch.Generator().manual_seed(seed)
        self.length = cloud.points[0].new_full((len(cloud.points[0]),), _FIRST)
        self.home = [t.detach().clone() for t in (*cloud.points, *cloud.logs)]

    @torch.no_grad()
    def move(self, prediction: Coupling, target: Coupling, compared: Compared, gained: Tensor) -> None:
        """One proposal for every pair."""
        self.length = (self.length * torch.where(gained, _GROWTH, _DECAY)).clamp_min(_LEAST)
        scales = [self.cloud.half_width] * 2 + [_WEIGHTS] * 2
        for t, home, scale in zip((*self.cloud.points, *self.cloud.logs), self.home, scales, strict=True):
            here = (slice(None), *[None] * (t.dim() - 1))
            home.copy_(torch.where(gained[here], t, home))
            noise = torch.randn(t.shape, generator=self.generator, dtype=t.dtype)
            t.copy_(home + scale * self.length[here] * noise)
        self.cloud.confine()
