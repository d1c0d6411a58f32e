"""Differentiable objectives on couplings.

All return one number for each problem, shape ``(*batch)``: reduce them yourself.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from sinkformer._numerics import pairing, potential_dtype, relative_entropy, safe_log
from sinkformer._typing import PerProblem, PlanMatrix
from sinkformer.costs import Cost, Euclidean
from sinkformer.couplings import Coupling, DenseCoupling, EntropicCoupling
from sinkformer.errors import ConfigError, ConvergenceWarning, DTypeError, NonFiniteError, ShapeError, WeightError

# Masses of two plans that differ by more are not one mass up to the marginal error of a solver.
_MASS_MISMATCH = 1e-2


def fenchel_young(pi: EntropicCoupling, target: Coupling | PlanMatrix) -> PerProblem:
    """KL from the predicted coupling to a target, without a derivative through the solver.

    L = [<c, T> + epsilon KL(T | a (x) b) - OT_epsilon(c)] / epsilon, convex in c, with gradient (T - P) / epsilon by the
    envelope theorem. Equal to KL(T | P), so non-negative and zero only at P = T, if T has the marginals of the measures
    (of the source, for the softmax head). For other marginals it is the Fenchel-Young loss still: the gradient vanishes
    exactly where P = T, the value may be negative.

    Args:
        pi: a coupling from ``SinkhornTransformer`` or ``Coupling.solve`` with the implicit gradient.
        target: T, a coupling or a matrix ``(*batch, n, m)`` of masses; no gradient flows into it.

    Returns:
        ``(*batch)``, in nats.

    Raises:
        ConfigError: penalised marginals (0 < tau < 1), for which the loss has no such form.
        ShapeError, DTypeError: a target that does not fit; NonFiniteError: NaN in it.
    """
    pi = _entropic(pi)
    if any(tau not in (0.0, 1.0) for tau in pi.solution.taus):
        raise ConfigError(f"expected taus 0 or 1, received {pi.solution.taus}; use losses.kl for penalised marginals")
    t = _target(pi, target)
    cost = pi.cost_rows(0, pi.shape[-2])
    a, b = pi._weights()
    linear = pairing(t, cost)
    entropy = relative_entropy(t, a.unsqueeze(-1) * b.unsqueeze(-2), (-1, -2))
    loss = (linear + pi.epsilon * entropy - pi._wide(pi.value)) / pi.epsilon
    return loss.to(pi.dtype)


def kl(pi: Coupling, target: Coupling | PlanMatrix) -> PerProblem:
    """Generalised KL(T | P) = sum T log(T / P) - T + P, in nats; ``+inf`` where T has mass and P none.

    Differentiates the plan itself, so through the implicit (or unrolled) derivative; ``fenchel_young`` needs neither.
    """
    t = _target(pi, target)
    if isinstance(pi, EntropicCoupling):
        # From the exponent, so that entries below the smallest float still pull.
        a, b = pi._weights()
        f, g, cost = pi.solution.f, pi.solution.g, pi.cost_rows(0, pi.shape[-2])
        here = t > 0
        exponent = (f.unsqueeze(-1) + g.unsqueeze(-2) - torch.where(here, cost, 0.0)) / pi.epsilon[..., None, None]
        log_plan = exponent + safe_log(a).unsqueeze(-1) + safe_log(b).unsqueeze(-2)
        log_target = torch.where(here, t, 1.0).log()
        forbidden = here & torch.isinf(cost)
        terms = torch.where(here, t * (log_target - torch.where(here, log_plan, 0.0)), 0.0)
        loss = terms.masked_fill(forbidden, torch.inf).sum((-1, -2)) - t.sum((-1, -2)) + pi._marginals()[0].sum(-1)
    else:
        loss = relative_entropy(t, pi._wide(pi.to_dense()), (-1, -2))
    return loss.to(pi.dtype)


def total_variation(pi: Coupling, target: Coupling | PlanMatrix) -> PerProblem:
    """Half the L1 distance of two plans, ``(*batch)``, between 0 and 1 for equal masses; subgradient zero where they agree."""
    t = _target(pi, target)
    difference = torch.cat(pi._over_blocks(lambda p, s, e: (p - t[..., s:e, :]).abs().sum(-1)), -1)
    return (difference.sum(-1) / 2).to(pi.dtype)


def entropic_w1(
    pi: Coupling,
    target: Coupling | PlanMatrix,
    *,
    eta: float,
    ground: tuple[Cost, Cost] = (Euclidean(), Euclidean()),
    debiased: bool = True,
    max_iterations: int = 1000,
    tolerance: float = 1e-3,
) -> PerProblem:
    """Entropic W1 between two couplings of the same measures, a training loss and no measurement.

    Ground metric d((x, y), (x', y')) = d_X(x, x') + d_Y(y, y'). The kernel exp(-d / eta) is a product, so a half step
    costs n m (n + m) instead of (n m)^2. Differentiable in ``pi`` by the envelope theorem, not in the points.

    Args:
        pi: the prediction.
        target: the other coupling, on the same atoms, or a matrix ``(*batch, n, m)``; no gradient flows into it. Both must
            have the same total mass, up to the marginal error; the two are normalised by it.
        eta: entropy, > 0, in the units of the ground metric; the smaller, the closer to W1 and the slower.
        ground: metrics on the source and on the target points.
        debiased: subtract half the self-distances (Sinkhorn divergence), so that the loss vanishes at ``target``.
        max_iterations: most sweeps.
        tolerance: L1 marginal error of the transport between the couplings; a warning says if it is not reached.

    Returns:
        ``(*batch)``, in the units of the ground metric.

    Raises:
        ConfigError: ``eta`` not positive, or a ground cost that is no metric.
        WeightError: the masses of the two plans differ by more than 1e-2.
    """
    if not 0 < eta < float("inf"):
        raise ConfigError(f"expected eta positive and finite, received {eta}")
    if not all(cost.is_metric for cost in ground):
        raise ConfigError(f"expected two metrics as ground costs, received {ground}; use Euclidean()")
    wide = potential_dtype(pi.device)
    with torch.no_grad(), torch.autocast(pi.device.type, enabled=False):
        x, y = pi.source.points.detach().to(wide), pi.target.points.detach().to(wide)
        d_x, d_y = ground[0](x, x), ground[1](y, y)
    p, t = torch.cat(pi._over_blocks(lambda block, *_: block), -2), _target(pi, target)
    masses = p.detach().sum((-1, -2)), t.sum((-1, -2))
    if bool(((masses[0] - masses[1]).abs() > _MASS_MISMATCH).any()) or bool((masses[1] <= 0).any()):
        raise WeightError(
            f"expected two plans of one positive mass, received masses that differ by up to "
            f"{float((masses[0] - masses[1]).abs().max()):.3g}; normalise them, or round them with .rounded()"
        )
    p, t = p / p.sum((-1, -2), keepdim=True), t / t.sum((-1, -2), keepdim=True)
    between = _grid_transport(p, t, d_x, d_y, eta, max_iterations, tolerance)
    if not debiased:
        return between.to(pi.dtype)
    self_p = _grid_transport(p, p, d_x, d_y, eta, max_iterations, tolerance)
    self_t = _grid_transport(t, t, d_x, d_y, eta, max_iterations, tolerance)
    return (between - (self_p + self_t) / 2).to(pi.dtype)


def _grid_transport(
    p: Tensor, q: Tensor, d_x: Tensor, d_y: Tensor, eta: float, max_iterations: int, tolerance: float
) -> Tensor:
    """Entropic transport value between two distributions on the grid; derivative in both by the envelope theorem."""

    def softmin(potential: Tensor, log_weights: Tensor) -> Tensor:
        # Over j' for every (i', j), then over i': LSE of a sum that separates.
        inner = potential / eta + log_weights
        along_y = torch.logsumexp(inner.unsqueeze(-2) - (d_y / eta).unsqueeze(-3), -1)
        along_x = torch.logsumexp(along_y.unsqueeze(-3) - (d_x / eta).unsqueeze(-1), -2)
        return -eta * along_x

    with torch.no_grad():
        log_p, log_q = safe_log(p), safe_log(q)
        symmetric = p is q
        f = g = torch.zeros_like(p)
        error = torch.full(p.shape[:-2], torch.inf, dtype=p.dtype, device=p.device)
        for _ in range(max_iterations):
            proposal = softmin(f, log_p)
            error = (q * torch.expm1(((g - proposal) / eta).clamp(-80, 80)).abs()).sum((-1, -2))
            g = (g + proposal) / 2 if symmetric else proposal
            f = g if symmetric else softmin(g, log_q)
            if not error.numel() or float(error.max()) <= tolerance:
                break
        if error.numel() and not float(error.max()) <= tolerance:
            warnings.warn(
                f"entropic_w1 stopped at a marginal error of {float(error.max()):.1e} > {tolerance:.1e} after "
                f"{max_iterations} iterations; raise eta or max_iterations",
                ConvergenceWarning,
                stacklevel=3,
            )
    return (p * f).sum((-1, -2)) + (q * g).sum((-1, -2))


def _entropic(pi: Coupling) -> EntropicCoupling:
    if not isinstance(pi, EntropicCoupling):
        raise DTypeError(f"expected a coupling made by a solver, received {type(pi).__name__}; use losses.kl")
    return pi


def _target(pi: Coupling, target: Coupling | Tensor) -> Tensor:
    """The target plan as a detached matrix in the dtype of potentials."""
    if isinstance(target, Tensor):
        target = DenseCoupling(pi.source, pi.target, target.detach())
    if not isinstance(target, Coupling):
        raise DTypeError(f"expected a coupling or a matrix as target, received {type(target).__name__}")
    if target.shape != pi.shape:
        raise ShapeError(f"expected a target of shape {tuple(pi.shape)}, received {tuple(target.shape)}")
    t = pi._wide(target.detach().to_dense())
    if not bool(torch.isfinite(t).all()):
        raise NonFiniteError("expected a finite target plan; look at the status of the solution it came from")
    return t
