"""Answers that do not come from sinkformer: closed forms, definitions written out, and other libraries."""

import math

import numpy as np
import ot
import torch
from torch import Tensor

from sinkformer import Measure, Solution

# A cost that is as good as infinite at every epsilon used with POT, whose own values turn NaN at infinity.
FORBIDDEN = 1e5


def tensor(*values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_weights(*shape: int, generator: torch.Generator, floor: float = 0.1) -> Tensor:
    w = torch.rand(*shape, generator=generator, dtype=torch.float64) + floor
    return w / w.sum(-1, keepdim=True)


def random_measure(*shape: int, d: int = 2, generator: torch.Generator) -> Measure:
    points = torch.rand(*shape, d, generator=generator, dtype=torch.float64)
    return Measure(points, random_weights(*shape, generator=generator))


def plan(solution: Solution, cost: Tensor, a: Tensor, b: Tensor, epsilon: float | Tensor) -> Tensor:
    """The formula of the documentation, P = a b exp((f + g - C) / epsilon), written out."""
    epsilon = torch.as_tensor(epsilon, dtype=torch.float64)[..., None, None]
    product = a[..., :, None] * b[..., None, :]
    void = ~torch.isfinite(cost)
    exponent = (solution.f[..., :, None] + solution.g[..., None, :] - cost.masked_fill(void, 0.0)) / epsilon
    # Between two paddings nothing bounds the exponent.
    return product * exponent.clamp_max(600.0).exp().masked_fill(void, 0.0)


def relative_entropy(p: Tensor, q: Tensor) -> Tensor:
    """Generalised KL(p | q) = sum p log(p / q) - p + q over all entries."""
    return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q) - p + q).sum()


def primal_value(p: Tensor, cost: Tensor, a: Tensor, b: Tensor, epsilon: float, rho_a=math.inf, rho_b=math.inf):
    """<C, P> + epsilon KL(P | a x b) + rho_a KL(P1 | a) + rho_b KL(P'1 | b), with hard marginals where rho is infinite."""
    value = torch.where(p > 0, p * cost, 0.0).sum() + epsilon * relative_entropy(p, torch.outer(a, b))
    for rho, have, want in ((rho_a, p.sum(1), a), (rho_b, p.sum(0), b)):
        if math.isfinite(rho):
            value = value + rho * relative_entropy(have, want)
    return value


def two_by_two(a: Tensor, b: Tensor, cost: Tensor, epsilon: float) -> Tensor:
    """The 2 x 2 plan in closed form.

    With x = P_00 the cross ratio x (1 - a_0 - b_0 + x) / ((a_0 - x) (b_0 - x)) must equal
    k = exp(-(C_00 + C_11 - C_01 - C_10) / epsilon): a quadratic equation with one root in the feasible interval. Entries
    are exact to the rounding of one.
    """
    exponent = -float(cost[0, 0] + cost[1, 1] - cost[0, 1] - cost[1, 0]) / epsilon
    if exponent > 0:  # exchange the columns, so that k is at most one
        return two_by_two(a, b.flip(-1), cost.flip(-1), epsilon).flip(-1)
    p, q, k = float(a[0]), float(b[0]), math.exp(exponent)
    if k == 1:
        return torch.outer(a, b)
    half = 1 + (k - 1) * (p + q)
    root = math.sqrt(half**2 + 4 * k * (1 - k) * p * q)
    x = 2 * k * p * q / (half + root) if half > 0 else (root - half) / (2 * (1 - k))
    return tensor([x, p - x], [q - x, 1 - p - q + x]).clamp_min(0.0)


def gaussian_covariance(variance_a: float, variance_b: float, epsilon: float) -> float:
    """Covariance of the entropic plan of two Gaussians on the line for the cost (x - y)^2.

    The exponent of the joint density has the coefficient c / (variance_a variance_b - c^2) at x y, and it must be
    2 / epsilon.
    """
    return math.sqrt(variance_a * variance_b + epsilon**2 / 16) - epsilon / 4


def quantile_cost(x: Tensor, a: Tensor, y: Tensor, b: Tensor) -> float:
    """Squared Wasserstein distance on the line: the integral of the squared difference of the quantile functions."""
    x, i = x.sort()
    y, j = y.sort()
    left, right = a[i].cumsum(0), b[j].cumsum(0)
    cuts = torch.cat([tensor(0.0), torch.cat([left, right]).sort().values])
    middles = (cuts[1:] + cuts[:-1]) / 2
    u = torch.searchsorted(left, middles).clamp_max(len(x) - 1)
    v = torch.searchsorted(right, middles).clamp_max(len(y) - 1)
    return float(((x[u] - y[v]) ** 2 * cuts.diff()).sum())


def pot_plan(a: Tensor, b: Tensor, cost: Tensor, epsilon: float) -> Tensor:
    found = ot.sinkhorn(
        a.numpy(), b.numpy(), cost.numpy(), epsilon, method="sinkhorn_log", stopThr=1e-13, numItermax=100_000
    )
    return torch.from_numpy(found)


def pot_unbalanced_plan(a: Tensor, b: Tensor, cost: Tensor, epsilon: float, rho: tuple[float, float]) -> Tensor:
    found = ot.unbalanced.sinkhorn_unbalanced(
        a.numpy(), b.numpy(), cost.numpy(), epsilon, rho, reg_type="kl", stopThr=1e-15, numItermax=100_000
    )
    return torch.from_numpy(np.asarray(found))
