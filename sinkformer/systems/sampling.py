"""Random pairs of measures, through the caller's generator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from sinkformer.errors import ConfigError
from sinkformer.measures import Measure
from sinkformer.systems.base import check_dims, check_positive, check_share

WeightLaw = Literal["uniform", "lognormal", "dirichlet", "mixed"]

# Centres of clusters stay within this share of the domain; the atoms around them are clamped to all of it.
_CENTRES = 0.75
# The law of rare clouds: spread log-uniform over this range, in units of half_width, log-normal weights this uneven.
_RARE_SPREAD, _RARE_SIGMA = (0.003, 3.0), 2.5


@dataclass(frozen=True)
class PairSampler:
    """Law of random pairs of independent clouds in the cubes [-half_width, half_width]^d.

    A cloud has n atoms, n uniform on ``sizes``, around k centres, k uniform on ``clusters``. Centres are uniform on three
    quarters of the cube, atoms choose theirs at random and lie around it, normally distributed with a standard deviation
    that is log-uniform on ``spread``, then clamped to the cube, so that some lie on its boundary. All float64.

    Attributes:
        dims: coordinates of source and target points.
        sizes: smallest and largest number of atoms.
        weights: ``"uniform"``; ``"lognormal"``, exp of a standard normal; ``"dirichlet"``, uniform on the simplex; or
            ``"mixed"``, each of these for a third of the clouds.
        clusters: smallest and largest number of centres.
        spread: standard deviations around a centre, in units of ``half_width``.
        rare: share of the clouds, 0 to 1, that have a heavier-tailed law instead: ``spread`` (0.003, 3), so that clouds are
            nearly one point or lie mostly on the boundary, and log-normal weights of parameter 2.5. The worst pairs of a
            model tend to be such.
        half_width: of the domain.

    Raises:
        ConfigError: a value outside its range.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> mu, nu = PairSampler(dims=(2, 2)).pairs(5, generator=generator)
        >>> mu.points.shape
        torch.Size([5, 16, 2])
    """

    dims: tuple[int, int] = (2, 2)
    sizes: tuple[int, int] = (2, 16)
    weights: WeightLaw = "mixed"
    clusters: tuple[int, int] = (1, 3)
    spread: tuple[float, float] = (0.1, 0.6)
    rare: float = 0.0
    half_width: float = 1.0

    def __post_init__(self):
        """Check the values."""
        check_dims(self.dims)
        _check_range("sizes", self.sizes, int)
        _check_range("clusters", self.clusters, int)
        _check_range("spread", self.spread, (int, float))
        if not isinstance(self.weights, str) or self.weights not in get_args(WeightLaw):
            raise ConfigError(f"expected weights of {', '.join(get_args(WeightLaw))}, received {self.weights!r}")
        check_positive(half_width=self.half_width)
        check_share(rare=self.rare)

    def pairs(self, count: int, *, generator: torch.Generator) -> tuple[Measure, Measure]:
        """``count`` independent pairs: two batches ``(count, N)``, padded to N = ``sizes[1]``.

        Raises:
            ConfigError: a negative count, or no generator of the CPU.
        """
        _check_draw(generator, count=count)
        return self._clouds((count,), self.dims[0], generator), self._clouds((count,), self.dims[1], generator)

    def block(self, groups: int, sources: int, targets: int, *, generator: torch.Generator) -> tuple[Measure, Measure]:
        """Batches ``(groups, sources, N)`` and ``(groups, targets, N)``, to be paired by ``every_pair`` within a group.

        groups * sources * targets pairs from groups * (sources + targets) measures: dear encoders are called for the few.

        Raises:
            ConfigError: a negative count, or no generator of the CPU.
        """
        _check_draw(generator, groups=groups, sources=sources, targets=targets)
        return (
            self._clouds((groups, sources), self.dims[0], generator),
            self._clouds((groups, targets), self.dims[1], generator),
        )

    def _clouds(self, batch: tuple[int, ...], d: int, generator: torch.Generator) -> Measure:
        """Independent clouds, ``(*batch, N)`` atoms in d coordinates."""

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*batch, *shape, generator=generator, dtype=torch.float64)

        def whole(low: int, high: int, *shape: int) -> Tensor:
            return torch.randint(low, high + 1, (*batch, *shape), generator=generator)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*batch, *shape, generator=generator, dtype=torch.float64)

        n, k = self.sizes[1], self.clusters[1]
        rare = uniform(1) < self.rare
        position = uniform(1)
        spread = torch.where(rare, _log_scale(position, *_RARE_SPREAD), _log_scale(position, *self.spread))
        centres = _CENTRES * (2 * uniform(k, d) - 1)
        chosen = (uniform(n) * whole(*self.clusters, 1)).long().unsqueeze(-1).expand(*batch, n, d)
        points = centres.gather(-2, chosen) + spread.unsqueeze(-1) * normal(n, d)
        points = self.half_width * points.clamp(-1.0, 1.0)

        exponents, simplex = normal(n), -uniform(n).clamp_min(1e-300).log()
        laws = {"uniform": torch.ones_like(simplex), "lognormal": exponents.exp(), "dirichlet": simplex}
        if self.weights == "mixed":
            law = whole(0, 2, 1)
            weights = torch.where(
                law == 0, laws["uniform"], torch.where(law == 1, laws["lognormal"], laws["dirichlet"])
            )
        else:
            weights = laws[self.weights]
        weights = torch.where(rare, (_RARE_SIGMA * exponents).exp(), weights)
        weights = weights * (torch.arange(n) < whole(*self.sizes, 1))
        return Measure(points, weights / weights.sum(-1, keepdim=True))


def _check_range(name: str, ends: tuple[float, float], kind: type | tuple[type, ...]) -> None:
    if not isinstance(ends, (tuple, list)) or len(ends) != 2:
        raise ConfigError(f"expected {name} as two numbers (low, high), received {ends!r}")
    low, high = ends
    for end in ends:
        check_positive(**{name: end})
    if not all(isinstance(end, kind) for end in ends) or low > high:
        raise ConfigError(f"expected {name} as {'whole ' * (kind is int)}numbers low <= high, received {ends!r}")


def _log_scale(position: Tensor, low: float, high: float) -> Tensor:
    """Log-uniform numbers between two ends, from uniform ones."""
    return low * (high / low) ** position


def _check_draw(generator: torch.Generator, **counts: int) -> None:
    if not isinstance(generator, torch.Generator) or generator.device.type != "cpu":
        raise ConfigError(
            f"expected a torch.Generator of the CPU, received {generator!r}; use torch.Generator().manual_seed(0)"
        )
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ConfigError(f"expected {name} as a whole number >= 0, received {count!r}")
