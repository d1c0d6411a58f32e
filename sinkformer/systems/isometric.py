"""Systems that move no further than their marginals: modulus(delta) = delta, which no system is below."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sinkformer._numerics import safe_divide
from sinkformer._typing import PlanMatrix
from sinkformer.couplings import Coupling
from sinkformer.measures import Measure
from sinkformer.systems.base import System, bound, check_dims, check_modulus_arguments


@dataclass(frozen=True)
class Product(System):
    """F(mu, nu) = mu (x) nu.

    Modulus: delta. If kappa couples mu and mu', and lambda couples nu and nu', then kappa (x) lambda couples the products at
    the sum of the costs.
    """

    dims: tuple[int, int] = (2, 2)

    name = "product"

    def __post_init__(self):
        """Check the dimensions."""
        check_dims(self.dims)

    def couple(self, mu: Measure, nu: Measure) -> Coupling:
        """P_ij = a_i b_j."""
        return Coupling.from_dense(mu, nu, mu.weights.unsqueeze(-1) * nu.weights.unsqueeze(-2))

    def modulus(self, delta: float, *, half_width: float = 1.0) -> float:
        """``delta``, up to the diameter."""
        check_modulus_arguments(delta, half_width)
        return bound(delta, 0.0, self.dims, half_width)


@dataclass(frozen=True)
class Monotone(System):
    """Increasing rearrangement on the line: the law of (F^{-1}(u), G^{-1}(u)), u uniform, with the quantile functions.

    The optimal coupling of every cost h(x - y) with h convex; the north-west corner rule on sorted atoms. Exact: no solver.

    Modulus: delta. The same u gives W1 <= int |F^{-1} - F'^{-1}| + |G^{-1} - G'^{-1}| du, and on the line these integrals
    are W1(mu, mu') and W1(nu, nu').
    """

    name = "monotone"
    dims = (1, 1)

    def couple(self, mu: Measure, nu: Measure) -> Coupling:
        """Overlap of the intervals of u that two atoms own, ``(*batch, n, m)``."""
        return Coupling.from_dense(mu, nu, _monotone_plan(mu, nu))

    def modulus(self, delta: float, *, half_width: float = 1.0) -> float:
        """``delta``, up to the diameter."""
        check_modulus_arguments(delta, half_width)
        return bound(delta, 0.0, self.dims, half_width)


def _monotone_plan(mu: Measure, nu: Measure) -> PlanMatrix:
    (low_x, high_x, share_x), (low_y, high_y, share_y) = _quantile_intervals(mu), _quantile_intervals(nu)
    high = torch.minimum(high_x.unsqueeze(-1), high_y.unsqueeze(-2))
    low = torch.maximum(low_x.unsqueeze(-1), low_y.unsqueeze(-2))
    # Atoms at one place own one interval together, of which each has its share of every overlap.
    return (high - low).clamp_min(0.0) * share_x.unsqueeze(-1) * share_y.unsqueeze(-2)


def _quantile_intervals(mu: Measure) -> tuple[Tensor, Tensor, Tensor]:
    """Ends F(x-) and F(x) of the quantiles at every atom, and the atom's share of the mass there; ``(*batch, n)`` each."""
    x, order = mu.points.squeeze(-1).sort(-1)
    weights = mu.weights / mu.weights.sum(-1, keepdim=True)
    heaped = weights.gather(-1, order).cumsum(-1)
    # The last sum is one, whatever its rounding, so that both sides end at the same level.
    heaped = heaped / heaped[..., -1:]
    places = mu.points.squeeze(-1)
    padded = torch.cat([torch.zeros_like(heaped[..., :1]), heaped], -1)
    x, places = x.detach().contiguous(), places.detach().contiguous()
    low = padded.gather(-1, torch.searchsorted(x, places))
    high = padded.gather(-1, torch.searchsorted(x, places, right=True))
    return low, high, safe_divide(weights, high - low)
