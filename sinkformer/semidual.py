"""Newton's method on the semi-dual, for the problems that plain sweeps leave unsolved.

A sweep multiplies the error by the squared second singular value of the normalised plan, which is close to one when the
plan is nearly decoupled: small epsilon, or two texts whose words have one partner each. Newton's method does not mind.
With f(g) the exact update of f, it maximises

    D(g) = <a, f(g)> + <b, g>,     gradient b - q,     Hessian -(diag(q) - P^T diag(1/a) P) / epsilon,

concave, q the column sums of the plan, the kernel of the Hessian the constants.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sinkformer import ops
from sinkformer._numerics import safe_divide, safe_log

# Beyond this many target atoms the Hessian takes more memory (128 MiB here) and time than the sweeps it saves.
MOST_ATOMS = 4000
_STEPS = 25
# Path of decreasing epsilon: each one this fraction of the last, solved to this L1 violation.
_SHRINK, _ON_THE_WAY = 0.5, 1e-2
_HALVINGS = 12
# Directions without ascent before a problem is given up: the curvature is lost in rounding.
_MOST_FAILURES = 3


def maximise(
    cost: Tensor, a: Tensor, b: Tensor, epsilon: Tensor, g: Tensor, tolerance: float, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Improve the potentials g of a flat batch of balanced problems.

    Args:
        cost: ``(B, n, m)``, float64, finite (a forbidden pair has a huge cost).
        a: weights ``(B, n)``; zero is padding.
        b: weights ``(B, m)``; zero is padding.
        epsilon: ``(B,)``.
        g: start, ``(B, m)``; not worse at the end than at the start, in the value of the dual.
        tolerance: L1 violation of the target marginal to stop at.
        most: most steps to take.

    Returns:
        ``(g, steps, solved, value)``: the potentials, the Newton steps taken by each problem, int64 ``(B,)``, whether it
        reached the tolerance, and D(g).
    """
    log_b, padding = safe_log(b), (b == 0).to(b)
    steps = torch.zeros(len(g), dtype=torch.int64, device=g.device)
    solved, failures = torch.zeros(len(g), dtype=torch.bool, device=g.device), torch.zeros_like(steps)

    def evaluate(g: Tensor) -> tuple[Tensor, Tensor]:
        f = ops.softmin(cost, g, log_b, epsilon)
        f = torch.where(a > 0, f, 0.0)
        return f, (a * f).sum(-1) + (b * g).sum(-1)

    f, value = evaluate(g)
    for _ in range(min(_STEPS, most)):
        plan = ops.plan(cost, f, g, a, b, epsilon)
        q = plan.sum(-2)
        gradient = b - q
        solved = gradient.abs().sum(-1) <= tolerance
        active = ~solved & (failures < _MOST_FAILURES)
        if not bool(active.any()):
            break
        scaled = plan * safe_divide(torch.ones_like(a), a).sqrt().unsqueeze(-1)
        hessian = torch.diag_embed(q + padding + 1e-14) - scaled.mT @ scaled
        hessian = hessian + b.unsqueeze(-1) * b.unsqueeze(-2)  # lifts the kernel; the gradient is orthogonal to it
        factor, failed = torch.linalg.cholesky_ex(hessian)
        # Without a factorisation: a step of the plain iteration, g + epsilon log(b / q).
        newton = torch.cholesky_solve(gradient.unsqueeze(-1), factor).squeeze(-1)
        plain = torch.log(torch.where((b > 0) & (q > 0), b / torch.where(q > 0, q, 1.0), 1.0))
        usable = ((failed == 0) & torch.isfinite(newton).all(-1)).unsqueeze(-1)
        step = epsilon.unsqueeze(-1) * torch.where(usable, newton, plain)
        slope = (gradient * step).sum(-1)

        length, short = torch.ones_like(value), active
        slack = 1e-14 * ((a * f).abs().sum(-1) + (b * g).abs().sum(-1))
        g_new, f_new, value_new = g, f, value
        for _ in range(_HALVINGS):
            g_new = g + length.unsqueeze(-1) * step
            f_new, value_new = evaluate(g_new)
            short = active & ~(value_new >= value + 1e-4 * length * slope - slack)
            if not bool(short.any()):
                break
            length = torch.where(short, length / 2, length)
        failures = failures + short
        if bool(short.any()):
            # No ascent along that direction, however short: a plain sweep always ascends.
            g_new = torch.where(short.unsqueeze(-1), g + epsilon.unsqueeze(-1) * plain, g_new)
            f_new, value_new = evaluate(g_new)
        g = torch.where(active.unsqueeze(-1), g_new, g)
        f = torch.where(active.unsqueeze(-1), f_new, f)
        value = torch.where(active, value_new, value)
        steps = steps + active
    return g, steps, solved, value


def follow_path(
    cost: Tensor, a: Tensor, b: Tensor, epsilon: Tensor, start: Tensor, tolerance: float, most: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same from afar: solve at ``start``, ``(B,)``, the range of the cost, and follow the solution down to epsilon.

    For small epsilon D is nearly piecewise linear, and a Newton step from a flat piece leads nowhere; along the path the
    curvature never vanishes.
    """
    g, total = torch.zeros_like(b), torch.zeros(len(b), dtype=torch.int64, device=b.device)
    temperature = torch.maximum(start, epsilon)
    # Below its rounding, the cost itself is unknown: the path ends there, and the last step goes the rest of the way.
    last = torch.maximum(epsilon, torch.finfo(cost.dtype).eps * start)
    while bool((temperature > last).any()) and most > 0:
        g, steps, _, _ = maximise(cost, a, b, temperature, g, _ON_THE_WAY, most)
        total, most = total + steps, most - int(steps.max())
        temperature = torch.maximum(last, _SHRINK * temperature)
    g, steps, solved, value = maximise(cost, a, b, epsilon, g, tolerance, most)
    return g, total + steps, solved, value
