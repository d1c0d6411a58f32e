"""Systems that are not continuous, labelled so: ``continuous`` is False and the modulus infinite.

Sinkhorn Transformers are continuous in the pair of measures, and a uniform limit of continuous systems is continuous. Near a
jump of height s every continuous system is wrong by s / 2 somewhere: no training, no width and no rank take the supremum of
W1 below that. Their mean error may still be small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import ot
import torch
from torch import Tensor

from sinkformer.costs import Cost, Matrix, SqEuclidean
from sinkformer.couplings import Coupling
from sinkformer.errors import ConfigError, ConvergenceError, NonFiniteError
from sinkformer.measures import Measure
from sinkformer.systems.base import System, check_dims, check_modulus_arguments
from sinkformer.systems.mixtures import agreement, diagonals, mixed

# Steps of the network simplex; some tens per atom are usual.
_MOST_PIVOTS = 10_000_000


@dataclass(frozen=True)
class ExactTransport(System):
    """An optimal plan without entropy, by the network simplex of POT: one problem after the other.

    Not continuous for d >= 2. Take mu on (-1, 0) and (1, 0), nu on (0, -1) and (0, 1), all weights 1/2: every coupling is
    optimal for the squared distance. A small rotation of nu makes one of the two matchings the only optimum, the opposite
    rotation the other, and these are W1 = 2 apart: all mass changes its partner for one at distance 2.

    Equal atoms are merged for the solution and share its rows in proportion. Where the optimum is not unique, the plan is
    one vertex of the optimal face, and depends on the order of the atoms. On the line use ``Monotone``, which is continuous.

    Args:
        cost: a function of two points.
        dims: coordinates of source and target points, 2 at least.

    Raises:
        ConfigError: dimensions below 2, or a given matrix as the cost.
    """

    cost: Cost = SqEuclidean()  # noqa: RUF009 - stateless
    dims: tuple[int, int] = (2, 2)

    name = "exact"
    continuous = False

    def __post_init__(self):
        """Check the arguments."""
        check_dims(self.dims, least=2)
        if not isinstance(self.cost, Cost) or isinstance(self.cost, Matrix):
            raise ConfigError(f"expected a cost that is a function of two points, received {self.cost!r}")

    @torch.no_grad()
    def couple(self, mu: Measure, nu: Measure) -> Coupling:
        """Solve one problem after the other; carries no gradient."""
        flat = (mu.points.reshape(-1, mu.n, mu.d), mu.weights.reshape(-1, mu.n))
        onto = (nu.points.reshape(-1, nu.n, nu.d), nu.weights.reshape(-1, nu.n))
        plans = [self._solve(x, a, y, b) for x, a, y, b in zip(*flat, *onto, strict=True)]
        shape = (*mu.batch_shape, mu.n, nu.n)
        plan = torch.stack(plans) if plans else mu.weights.new_empty(0)
        return Coupling.from_dense(mu, nu, plan.reshape(shape))

    def _solve(self, x: Tensor, a: Tensor, y: Tensor, b: Tensor) -> Tensor:
        places, of_row, row_share, masses = _places(x, a)
        others, of_column, column_share, demands = _places(y, b)
        plan, log = ot.emd(masses, demands, _scaled(self.cost(places, others)), numItermax=_MOST_PIVOTS, log=True)
        if log["warning"] is not None:
            raise ConvergenceError(f"expected an optimal plan, received from the network simplex: {log['warning']}")
        plan = torch.as_tensor(plan).to(x)
        return plan[of_row][:, of_column] * row_share.unsqueeze(-1) * column_share

    def modulus(self, delta: float, *, half_width: float = 1.0) -> float:
        """Infinite."""
        check_modulus_arguments(delta, half_width)
        return math.inf


def _scaled(cost: Tensor) -> np.ndarray:
    """A cost with the same optimal plans, from 0 to 1: the network simplex stops at an absolute tolerance."""
    if not bool(torch.isfinite(cost).all()):
        raise NonFiniteError("expected finite costs, received a NaN or an infinity; scale the points down")
    cost = cost - cost.amin(1, keepdim=True)
    cost = cost - cost.amin(0)
    largest = cost.max()
    return (cost / largest if largest > 0 else cost).cpu().numpy()


@dataclass(frozen=True)
class HardSwitch(System):
    """``ContextSwitch`` with an argmax in the place of the sigmoid: along the diagonal if <E mu, E nu> >= 0, else against it.

    Not continuous where <E mu, E nu> = 0: the two transports are apart there.

    Args:
        epsilon: entropy of both parts, > 0, in units of the squared distance.
        dims: coordinates of source and target points, equal.

    Raises:
        ConfigError: an argument outside its range.
    """

    epsilon: float = 0.1
    dims: tuple[int, int] = (2, 2)

    name = "hard-switch"
    continuous = False

    def __post_init__(self):
        """Check the arguments."""
        diagonals(self.epsilon, self.dims)

    def couple(self, mu: Measure, nu: Measure) -> Coupling:
        """One of the two plans."""
        along, against = diagonals(self.epsilon, self.dims)
        return mixed(along.couple(mu, nu), against.couple(mu, nu), (agreement(mu, nu) >= 0).to(mu.dtype))

    def modulus(self, delta: float, *, half_width: float = 1.0) -> float:
        """Infinite."""
        check_modulus_arguments(delta, half_width)
        return math.inf


def _places(points: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, np.ndarray]:
    """Distinct places of positive mass, the place of every atom, its share of the mass there, and the masses, summing to one."""
    places, index = torch.unique(points, dim=0, return_inverse=True)
    mass = weights.new_zeros(len(places)).index_add(0, index, weights)
    live = mass > 0
    kept = live.cumsum(0) - 1
    share = torch.where(weights > 0, weights / mass[index], 0.0)
    masses = mass[live].cpu().numpy()
    return places[live], kept[index].clamp_min(0), share, masses / masses.sum()
