"""How far a plan given by potentials is from the optimum: the duality gap.

The primal value of any coupling Q minus the dual value of potentials f, g is epsilon KL(Q | P), where P is their plan,
P_ij = a_i b_j k_ij with k = exp((f + g - C) / epsilon). In this form two large numbers have cancelled in the formula
instead of in the arithmetic. For the rounded plan Q = D + E, D = diag(r) P diag(c) and E = left right^T,

    KL(Q | P) = <a, log r> + <b, log c> + sum_ij (P_ij - a_i b_j) + sum_ij Q_ij log(1 + E_ij / D_ij),

so that only the last sum, which is small, is one over pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sinkformer._numerics import penalty, relative_entropy, safe_divide
from sinkformer._typing import PerProblem, Potential, Weights


def rounded_gap(
    a: Weights,
    b: Weights,
    epsilon: PerProblem,
    factors: tuple[Tensor, Tensor, Tensor, Tensor],
    excess: PerProblem,
    added: Potential,
) -> PerProblem:
    """Duality gap of the rounded plan, exactly.

    Args:
        a: weights of the source, ``(*batch, n)``, float64, of sum one; zero is padding.
        b: weights of the target, ``(*batch, m)``.
        epsilon: ``(*batch)``.
        factors: ``(r, c, left, right)`` of ``ops.rounding`` for the plan P.
        excess: sum_ij (P_ij - a_i b_j), ``(*batch)``; summed as a b (k - 1), so that it is small by itself.
        added: sum_j Q_ij log(1 + E_ij / D_ij), ``(*batch, n)``.

    Returns:
        ``(*batch)``, non-negative up to the rounding of the sums.
    """
    r, c, _, _ = factors
    return epsilon * ((a * _log(r)).sum(-1) + (b * _log(c)).sum(-1) + excess + added.sum(-1))


def gap_bound(
    a: Weights,
    b: Weights,
    epsilon: PerProblem,
    factors: tuple[Tensor, Tensor, Tensor, Tensor],
    excess: PerProblem,
    slack: Potential,
    curvature: Potential | None = None,
) -> PerProblem:
    """Bound on the duality gap of the rounded plan without a logarithm for every pair.

    ``added`` of :func:`rounded_gap` is bounded, row by row, with q_i = left_i / a_i, by the smaller of

        convexity: Q_i is the mixture (1 - q) D_i / (1 - q) + q E_i / q; of first order in E;
        tangent: Q log(1 + E / D) <= E + E^2 / (2 D); of second order, infinite where D vanishes.

    Both are exact at E = 0. The gap is of first order itself where the plan is concentrated, and convexity close; for a
    smooth plan near convergence it is of second order, which convexity alone overestimates by about range / (epsilon q).

    Args:
        a: weights, as all up to ``excess`` for :func:`rounded_gap`.
        b: weights.
        epsilon: ``(*batch)``.
        factors: of the rounding.
        excess: ``(*batch)``.
        slack: sum_j right_j (C_ij - f_i - g_j), ``(*batch, n)``; ``+inf`` where E uses a forbidden pair.
        curvature: sum_j right_j^2 / (b_j c_j k_ij), ``(*batch, n)``; infinite or NaN where it overflows. None leaves the
            tangent out.

    Returns:
        ``(*batch)``, at least the gap up to the rounding of the sums; ``+inf`` where E uses a forbidden pair.
    """
    r, c, left, right = factors
    spread = (right * _log(safe_divide(right, b * c))).sum(-1, keepdim=True)
    from_target = slack / epsilon.unsqueeze(-1) + spread - _log(r)
    added = torch.where(left > 0, left * from_target, 0.0)
    added = added - torch.special.xlog1py(a - left, -safe_divide(left, a).clamp_max(1.0))
    if curvature is not None:
        tangent = left + 0.5 * safe_divide(left.square(), a * r) * curvature
        added = torch.where(tangent < added, tangent, added)  # NaN is not smaller
    return rounded_gap(a, b, epsilon, factors, excess, added)


def penalised_gap(
    a: Weights,
    b: Weights,
    epsilon: PerProblem,
    potentials: tuple[Potential, Potential],
    marginals: tuple[Weights, Weights],
    taus: tuple[float, float],
) -> PerProblem:
    """Duality gap of the plan itself where a marginal is penalised: rho KL(P1 | a exp(-f / rho)), and the same for b.

    A marginal that is a hard constraint all the same contributes <P1 - a, f>, and the gap may be negative by it.

    Args:
        a: weights ``(*batch, n)``, float64.
        b: weights ``(*batch, m)``.
        epsilon: ``(*batch)``.
        potentials: ``(f, g)``.
        marginals: row and column sums of the plan.
        taus: ``(tau_a, tau_b)``.

    Returns:
        ``(*batch)``, exact.
    """
    gap = torch.zeros_like(epsilon)
    for have, want, potential, tau in zip(marginals, (a, b), potentials, taus, strict=True):
        rho = penalty(tau, epsilon)
        if rho is None:
            gap = gap + ((have - want) * potential).sum(-1)
        elif tau > 0:
            optimal = want * torch.exp(-potential / rho.unsqueeze(-1))
            gap = gap + rho * relative_entropy(have, optimal, (-1,))
    return gap


def _log(x: Tensor) -> Tensor:
    """Logarithm, zero at zero: what it multiplies vanishes there."""
    return torch.where(x > 0, x, 1.0).log()
