"""Mixtures of two systems with a weight that depends on the pair of measures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sinkformer._typing import Features, PerProblem, PlanMatrix, Points
from sinkformer.costs import SqEuclidean
from sinkformer.couplings import Coupling
from sinkformer.errors import ConfigError, DTypeError, ShapeError
from sinkformer.measures import Measure
from sinkformer.systems.base import System, bound, check_modulus_arguments, check_positive, fibre, mean, radii
from sinkformer.systems.entropic import EntropicTransport

Weight = Callable[[Measure, Measure], PerProblem]


@dataclass(frozen=True)
class Mixture(System):
    """t F + (1 - t) G with a continuous t(mu, nu) in [0, 1].

    Modulus: max(omega_F, omega_G)(delta) + |t - t'| min(diam X, diam Y). The first term moves the parts at one t (W1 is convex);
    then a mass |t - t'| changes its part, between two couplings of the same measures, which it can do within the fibres of
    X, or of Y.

    Args:
        first: F.
        second: G, of the same dimensions.
        weight: t, from two measures to ``(*batch)`` numbers in [0, 1]; must obey the laws of functions of measures.
        lipschitz: |t - t'| <= lipschitz (W1(mu, mu') + W1(nu, nu')) on the domain [-1, 1]^d, > 0; taken on trust.

    Raises:
        ConfigError: two systems of other dimensions, or ``lipschitz`` not positive and finite.
        DTypeError: parts that are no systems, or a weight that is no function.
    """

    first: System
    second: System
    weight: Weight
    lipschitz: float

    name = "mixture"

    def __post_init__(self):
        """Check that the two fit together."""
        for part in (self.first, self.second):
            if not isinstance(part, System):
                raise DTypeError(f"expected two systems to mix, received {type(part).__name__}")
        if not callable(self.weight):
            raise DTypeError(
                f"expected the weight of a mixture as a function of two measures, received {self.weight!r}"
            )
        if tuple(self.first.dims) != tuple(self.second.dims):
            raise ConfigError(f"expected two systems of equal dims, received {self.first.dims} and {self.second.dims}")
        check_positive(lipschitz=self.lipschitz)

    @property
    def dims(self) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those of both systems."""
        return self.first.dims

    @property
    def continuous(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether both systems are."""
        return self.first.continuous and self.second.continuous

    def couple(self, mu: Measure, nu: Measure) -> Coupling:
        """The matrix t P + (1 - t) Q."""
        return mixed(self.first.couple(mu, nu), self.second.couple(mu, nu), _checked(self.weight(mu, nu), mu))

    def _draft(self, mu: Measure, nu: Measure, tolerance: float) -> PlanMatrix:
        """The same of drafts of P and Q."""
        first, second = (part._draft(mu, nu, tolerance) for part in (self.first, self.second))
        return _mean(first, second, _checked(self.weight(mu, nu), mu))

    def modulus(self, delta: float, *, half_width: float = 1.0) -> float:
        """The larger of those of F and G, plus lipschitz delta min(diam X, diam Y)."""
        check_modulus_arguments(delta, half_width)
        if half_width > 1:
            raise ConfigError(f"expected half_width <= 1, where lipschitz was stated, received {half_width}")
        return _mixture_modulus((self.first, self.second), self.lipschitz, self.dims, delta, half_width)


@dataclass(frozen=True)
class ContextSwitch(System):
    """Moves along the diagonal or against it, and decides by both measures together.

    t F + (1 - t) G, where F and G are entropic transport for |x - y|^2 and for |x + y|^2, and
    t = sigmoid(sharpness <E mu, E nu>). Its log-density contains the potentials of two transport problems nonlinearly, and
    the plan has two modes where t is near 1/2.

    Modulus: that of a mixture with |t - t'| <= (sharpness / 4) h sqrt(d) Delta: a sigmoid is 1/4-Lipschitz, and means on the
    domain have norms of at most h sqrt(d).

    Args:
        epsilon: entropy of both parts, > 0, in units of the squared distance.
        sharpness: of the decision, > 0; ``HardSwitch`` is its limit.
        dims: coordinates of source and target points, equal.

    Raises:
        ConfigError: an argument outside its range.
    """

    epsilon: float = 0.1
    sharpness: float = 10.0
    dims: tuple[int, int] = (2, 2)

    name = "switch"

    def __post_init__(self):
        """Check the arguments."""
        check_positive(sharpness=self.sharpness)
        diagonals(self.epsilon, self.dims)

    def weight(self, mu: Measure, nu: Measure) -> PerProblem:
        """t, the share of the transport along the diagonal, ``(*batch)``."""
        return torch.sigmoid(self.sharpness * agreement(mu, nu))

    def couple(self, mu: Measure, nu: Measure) -> Coupling:
        """The matrix t P + (1 - t) Q."""
        along, against = diagonals(self.epsilon, self.dims)
        return mixed(along.couple(mu, nu), against.couple(mu, nu), self.weight(mu, nu))

    def _draft(self, mu: Measure, nu: Measure, tolerance: float) -> PlanMatrix:
        """The same of drafts of P and Q."""
        along, against = diagonals(self.epsilon, self.dims)
        return _mean(along._draft(mu, nu, tolerance), against._draft(mu, nu, tolerance), self.weight(mu, nu))

    def modulus(self, delta: float, *, half_width: float = 1.0) -> float:
        """That of the two parts, plus sharpness h^2 d delta / 2."""
        check_modulus_arguments(delta, half_width)
        lipschitz = self.sharpness / 4 * radii(self.dims, half_width)[0]
        return _mixture_modulus(diagonals(self.epsilon, self.dims), lipschitz, self.dims, delta, half_width)


@dataclass(frozen=True)
class _Reflected(EntropicTransport):
    """Transport for c(x, -y)."""

    def target_features(self, nu: Measure, at: Points) -> Features:
        return -at


def diagonals(epsilon: float, dims: tuple[int, int]) -> tuple[System, System]:
    """Entropic transport for |x - y|^2 and for |x + y|^2."""
    return EntropicTransport(SqEuclidean(), epsilon, dims), _Reflected(SqEuclidean(), epsilon, dims)


def agreement(mu: Measure, nu: Measure) -> PerProblem:
    """<E mu, E nu>, ``(*batch)``."""
    return (mean(mu) * mean(nu)).sum(-1)


def mixed(one: Coupling, other: Coupling, t: PerProblem) -> Coupling:
    """The matrix t P + (1 - t) Q for two couplings of the same measures."""
    return Coupling.from_dense(one.source, one.target, _mean(one.to_dense(), other.to_dense(), t))


def _mean(one: PlanMatrix, other: PlanMatrix, t: PerProblem) -> PlanMatrix:
    share = t.unsqueeze(-1).unsqueeze(-1)
    return share * one + (1 - share) * other


def _mixture_modulus(
    parts: tuple[System, System], lipschitz: float, dims: tuple[int, int], delta: float, half_width: float
) -> float:
    """Modulus of a mixture whose weight is ``lipschitz``; infinite if that of a part is."""
    worst = max(system.modulus(delta, half_width=half_width) for system in parts)
    if worst == math.inf:
        return worst
    # Below delta is a modulus that was cut off at the diameter.
    excess = max(worst - delta, 0.0) + lipschitz * delta * fibre(dims, half_width)
    return bound(delta, excess, dims, half_width)


def _checked(t: PerProblem, mu: Measure) -> PerProblem:
    if not isinstance(t, Tensor) or t.dtype != mu.dtype:
        received = t.dtype if isinstance(t, Tensor) else type(t).__name__
        raise DTypeError(f"expected the weight of a mixture as a tensor of dtype {mu.dtype}, received {received}")
    if t.shape != mu.batch_shape:
        raise ShapeError(
            f"expected the weight of a mixture of shape {tuple(mu.batch_shape)}, received {tuple(t.shape)}"
        )
    outside = ~((t >= 0) & (t <= 1))
    if bool(outside.any()):
        raise ConfigError(f"expected the weight of a mixture between 0 and 1, received {t[outside][0].item():.6g}")
    return t
