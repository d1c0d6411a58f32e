"""What a coupling system is, and what every one of them checks and states."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from sinkformer._typing import PlanMatrix
from sinkformer.couplings import Coupling
from sinkformer.errors import ConfigError, DTypeError, ShapeError
from sinkformer.measures import Measure, check_compatible


class System(ABC):
    """A rule F that gives every pair of measures a coupling of them; call it as ``system(mu, nu)``.

    Subclasses write ``couple`` and ``modulus``. The domain of all statements is the cube [-h, h]^d, h = ``half_width``, with
    the Euclidean metric; couplings are compared by W1 for |x - x'| + |y - y'|.

    Attributes:
        name: short name, for tables.
        dims: coordinates ``(d, d')`` of the source and of the target points.
        continuous: whether F is weakly continuous in the pair. No Sinkhorn Transformer is uniformly near a system that is
            not: the uniform limit of continuous systems is continuous.
    """

    name: str
    dims: tuple[int, int]
    continuous: bool = True

    def __call__(self, mu: Measure, nu: Measure) -> Coupling:
        """The coupling F(mu, nu), its marginals exact to 1e-9.

        Args:
            mu: source, ``(*batch, n)`` atoms in ``dims[0]`` coordinates, float64. Any points, in the domain or not.
            nu: target, ``(*batch, m)`` atoms in ``dims[1]`` coordinates, float64, of the same batch shape.

        Returns:
            Coupling of shape ``(*batch, n, m)``.

        Raises:
            DTypeError: no measures, or not float64.
            ShapeError: measures of another dimension, or of two batch shapes.
            ConvergenceError: a solver inside did not reach its tolerance.
        """
        self._check(mu, nu)
        return self.couple(mu, nu)

    def draft(self, mu: Measure, nu: Measure, tolerance: float) -> PlanMatrix:
        """About F(mu, nu), as a matrix, for a loss that couples the marginals of the target itself.

        Systems that need a solver let it stop at an L1 marginal error of ``tolerance``, which is much faster than 1e-11.

        Args:
            mu: as for a call.
            nu: as for a call.
            tolerance: L1 marginal error of the plan, > 0.

        Returns:
            ``(*batch, n, m)``, float64.

        Raises:
            DTypeError, ShapeError, ConvergenceError: as for a call.
        """
        self._check(mu, nu)
        return self._draft(mu, nu, tolerance)

    def _check(self, mu: Measure, nu: Measure) -> None:
        check_compatible(mu, nu)
        if mu.dtype != torch.float64:
            raise DTypeError(
                f"expected float64 measures, received {mu.dtype}; targets are exact, convert with .to(torch.float64)"
            )
        if (mu.d, nu.d) != tuple(self.dims):
            raise ShapeError(
                f"expected points of dimensions {tuple(self.dims)} for {self.name}, received ({mu.d}, {nu.d})"
            )

    @abstractmethod
    def couple(self, mu: Measure, nu: Measure) -> Coupling:
        """F(mu, nu) for measures that were checked."""

    def _draft(self, mu: Measure, nu: Measure, tolerance: float) -> PlanMatrix:
        """A draft for measures that were checked; systems without a solver are exact."""
        return self.couple(mu, nu).to_dense()

    @abstractmethod
    def modulus(self, delta: float, *, half_width: float = 1.0) -> float:
        """Modulus of continuity: a bound of W1(F(mu, nu), F(mu', nu')).

        It holds for all measures on the cubes with W1(mu, mu') + W1(nu, nu') <= ``delta``. It is never below ``delta``
        (f(x) + g(y) is 1-Lipschitz on the product if f and g are), nor above the diameter of the product, which is also
        what it is for large ``delta``.

        Args:
            delta: >= 0.
            half_width: h of the domain [-h, h]^d.

        Returns:
            The bound; ``inf`` for a system that is not continuous.

        Raises:
            ConfigError: a negative or non-finite argument.
        """


def every_pair(mu: Measure, nu: Measure) -> tuple[Measure, Measure]:
    """All pairs of a block: sources ``(*batch, s, n)`` and targets ``(*batch, t, m)`` give two batches ``(*batch, s, t)``.

    Views, no copies.

    Raises:
        DTypeError: no measures.
        ShapeError: no axis to pair over, or other leading axes.
    """
    for side in (mu, nu):
        if not isinstance(side, Measure):
            raise DTypeError(f"expected two measures to pair, received {type(side).__name__}")
    if not mu.batch_shape or mu.batch_shape[:-1] != nu.batch_shape[:-1] or len(mu.batch_shape) != len(nu.batch_shape):
        raise ShapeError(
            f"expected batch shapes (*batch, s) and (*batch, t), received {tuple(mu.batch_shape)} and {tuple(nu.batch_shape)}"
        )
    axis, s, t = len(mu.batch_shape), mu.batch_shape[-1], nu.batch_shape[-1]

    def spread(part: Tensor, at: int, size: int) -> Tensor:
        wide = part.unsqueeze(at)
        return wide.expand(*wide.shape[:at], size, *wide.shape[at + 1 :])

    return mu.map(lambda part: spread(part, axis, t)), nu.map(lambda part: spread(part, axis - 1, s))


def mean(mu: Measure) -> Tensor:
    """E mu, ``(*batch, d)``."""
    weights = mu.weights / mu.weights.sum(-1, keepdim=True)
    return (weights.unsqueeze(-2) @ mu.points).squeeze(-2)


def radii(dims: tuple[int, int], half_width: float) -> tuple[float, float]:
    """Largest Euclidean norms on the two cubes, h sqrt(d) and h sqrt(d')."""
    return half_width * math.sqrt(dims[0]), half_width * math.sqrt(dims[1])


def bound(delta: float, excess: float, dims: tuple[int, int], half_width: float) -> float:
    """The modulus ``delta + excess``, no larger than what holds for every system.

    Two couplings of the same measures are H = min(diam X, diam Y) apart at most, since mass need only move within the fibres
    of X, or of Y. Every coupling has its shadow, of the other two measures, at distance delta (see ``entropic``). So
    delta + H bounds every system; and so does the diameter of the product.
    """
    if delta == 0:  # where an infinite constant would make the excess NaN
        return 0.0
    return min(delta + min(excess, fibre(dims, half_width)), 2 * sum(radii(dims, half_width)))


def fibre(dims: tuple[int, int], half_width: float) -> float:
    """The smaller of the diameters of the two cubes."""
    return 2 * min(radii(dims, half_width))


def check_modulus_arguments(delta: float, half_width: float) -> None:
    """Raise unless both may stand in a modulus."""
    if not (_is_number(delta) and 0 <= delta < math.inf):
        raise ConfigError(f"expected a distance delta >= 0, received {delta!r}")
    if not (_is_number(half_width) and 0 < half_width < math.inf):
        raise ConfigError(f"expected a positive half_width of the domain, received {half_width!r}")


def check_dims(dims: tuple[int, int], least: int = 1) -> None:
    """Raise unless ``dims`` are two dimensions."""
    if not isinstance(dims, (tuple, list)) or len(dims) != 2:
        raise ConfigError(f"expected dims as two whole numbers, received {dims!r}")
    for d in dims:
        if isinstance(d, bool) or not isinstance(d, int) or d < least:
            raise ConfigError(f"expected dims as two whole numbers >= {least}, received {dims!r}")


def check_positive(**values: float) -> None:
    """Raise unless every value is a positive, finite number; the keyword is its name in the message."""
    for name, value in values.items():
        if not (_is_number(value) and 0 < value < math.inf):
            raise ConfigError(f"expected {name} positive and finite, received {value!r}")


def check_share(**values: float) -> None:
    """Raise unless every value is a number between 0 and 1."""
    for name, value in values.items():
        if not (_is_number(value) and 0 <= value <= 1):
            raise ConfigError(f"expected {name} as a share between 0 and 1, received {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
