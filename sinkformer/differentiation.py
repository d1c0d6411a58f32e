"""Derivatives of the solution of an entropic transport problem.

*Potentials and plan*: implicit function theorem at the solution, one matrix-free linear solve, no memory of the
iterations. *Value*: envelope theorem, no solve at all. Both may be differentiated again and again.

At the solution f = -tau_a epsilon LSE_j((g_j - C_ij)/epsilon + log b_j), and the same for g. Every formula below is a
derivative of these two equations; the softmax weights in them are R = P / P1 and S = P / P^T 1, the conditionals of the
plan with *its own* marginals, so that the operator keeps its exact kernel when the iteration stopped early.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sinkformer import ops
from sinkformer._numerics import penalty, safe_divide
from sinkformer.errors import GradientWarning

# Residuals of the linear solve are asked no smaller; those much larger than asked, and than this, are warned of.
_SMALLEST_RTOL, _WARN_RTOL = 1e-13, 1e-6


@dataclass(frozen=True)
class LinearSolve:
    """How the linear systems behind a derivative are solved.

    Attributes:
        rtol: relative residual asked for.
        kernels: the module that solved the problem, whose ``pull_back`` may be used; None for plain torch.
        conditioning: ``(B,)``, filled in with the smallest Ritz value of every solve, the smaller if there are several.
    """

    rtol: float = 0.0
    kernels: Any = None
    conditioning: Tensor | None = None

    def __post_init__(self):
        """Keep the residual above rounding."""
        object.__setattr__(self, "rtol", max(self.rtol, _SMALLEST_RTOL))

    def record(self, residual: Tensor, ritz: Tensor) -> None:
        """Take note of the conditioning; warn if the solve fell short."""
        if self.conditioning is not None:
            self.conditioning.copy_(torch.fmin(self.conditioning, ritz.to(self.conditioning)))
        if residual.numel() and float(residual.max()) > max(10 * self.rtol, _WARN_RTOL):
            warnings.warn(
                f"the linear solve behind the derivative of a plan stopped at a relative residual of "
                f"{float(residual.max()):.1e}: the plan is close to deterministic, its derivative ill-conditioned; "
                f"use a larger epsilon, or differentiate the value instead",
                GradientWarning,
                stacklevel=2,
            )

    def pull_back(
        self,
        cost: Tensor,
        a: Tensor,
        b: Tensor,
        epsilon: Tensor,
        f: Tensor,
        g: Tensor,
        on_f: Tensor,
        on_g: Tensor,
    ) -> Tensor | None:
        """The derivative in the costs by the compiled kernel; None if it is not for it."""
        if self.kernels is None or bool(((a == 0) & (on_f != 0)).any()) or bool(((b == 0) & (on_g != 0)).any()):
            return None
        pull, residual, ritz = self.kernels.pull_back(cost, a, b, epsilon, f, g, on_f, on_g, rtol=self.rtol)
        self.record(residual, ritz)
        return pull


class _AdjointSolve(torch.autograd.Function):
    """The solution (l, u) of ``ops.adjoint_solve``, differentiable any number of times: its adjoint is its transpose."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        columns: Tensor,
        q: Tensor,
        right_f: Tensor,
        right_g: Tensor,
        taus: tuple,
        how: LinearSolve,
        transposed: bool,
    ):
        left, up, residual, ritz = ops.adjoint_solve(
            rows, columns, taus[0], taus[1], q, right_f, right_g, transposed=transposed, rtol=how.rtol
        )
        how.record(residual, ritz)
        ctx.save_for_backward(rows, columns, q, left, up)
        ctx.taus, ctx.how, ctx.transposed = taus, how, transposed
        return left, up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        rows, columns, q, left, up = ctx.saved_tensors
        x, y = _solve(rows, columns, q, grads[0], grads[1], ctx.taus, ctx.how, not ctx.transposed)
        (on_f, on_g), (from_f, from_g) = ((left, up), (x, y)) if ctx.transposed else ((x, y), (left, up))
        grad_rows = -ctx.taus[0] * on_f.unsqueeze(-1) * from_g.unsqueeze(-2)
        grad_columns = -ctx.taus[1] * from_f.unsqueeze(-1) * on_g.unsqueeze(-2)
        return grad_rows, grad_columns, None, x, y, None, None, None


class _Potentials(torch.autograd.Function):
    """The identity on given potentials, with the derivative of the solution map (C, a, b, epsilon) -> (f, g)."""

    @staticmethod
    def forward(
        ctx: Any,
        cost: Tensor,
        a: Tensor,
        b: Tensor,
        epsilon: Tensor,
        f: Tensor,
        g: Tensor,
        taus: tuple,
        how: LinearSolve,
    ):
        f, g = f.clone(), g.clone()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cost, a, b, epsilon, f, g)
        ctx.taus, ctx.how = taus, how
        return f, g

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):
        if all(grad is None for grad in grads):  # the value alone was used, which needs no solve
            return (None,) * 8
        cost, a, b, epsilon, f, g = ctx.saved_tensors
        tau_a, tau_b = ctx.taus
        grads = tuple(torch.zeros_like(h) if grad is None else grad for grad, h in zip(grads, (f, g), strict=True))
        costs_alone = not any(ctx.needs_input_grad[1:4]) and not torch.is_grad_enabled()
        pull = ctx.how.pull_back(cost, a, b, epsilon, f, g, *grads) if costs_alone else None
        if pull is not None:
            return pull, *(None,) * 7
        k = ops.density(cost, f, g, a, b, epsilon)
        per_row, per_column = (k * b.unsqueeze(-2)).sum(-1), (k * a.unsqueeze(-1)).sum(-2)
        k_rows, k_columns = safe_divide(k, per_row.unsqueeze(-1)), safe_divide(k, per_column.unsqueeze(-2))
        rows, columns = k_rows * b.unsqueeze(-2), k_columns * a.unsqueeze(-1)
        left, up = _solve(rows, columns, b * per_column, grads[0], grads[1], ctx.taus, ctx.how)
        left, up = (tau_a * left).unsqueeze(-1), (tau_b * up).unsqueeze(-2)
        pull = left * rows + columns * up
        slack = torch.where(torch.isinf(cost), 0.0, cost)
        grad_f_direct = (left.squeeze(-1) / tau_a * f).sum(-1) if tau_a else 0.0
        grad_g_direct = (up.squeeze(-2) / tau_b * g).sum(-1) if tau_b else 0.0
        across = left * rows * (g.unsqueeze(-2) - slack) + columns * up * (f.unsqueeze(-1) - slack)
        grad_epsilon = (grad_f_direct + grad_g_direct + across.sum((-1, -2))) / epsilon
        scale = epsilon.unsqueeze(-1)
        grad_a = -scale * (k_columns * up).sum(-1)
        grad_b = -scale * (k_rows * left).sum(-2)
        return pull, grad_a, grad_b, grad_epsilon, None, None, None, None


def _solve(
    rows: Tensor,
    columns: Tensor,
    q: Tensor,
    right_f: Tensor,
    right_g: Tensor,
    taus: tuple,
    how: LinearSolve,
    transposed: bool = True,
) -> tuple[Tensor, Tensor]:
    solved = _AdjointSolve.apply(rows, columns, q, right_f, right_g, taus, how, transposed)
    assert isinstance(solved, tuple)
    return solved


class _Value(torch.autograd.Function):
    """The dual value, with the envelope derivative: P, f, g and KL(P | a (x) b); none through the potentials."""

    @staticmethod
    def forward(
        ctx: Any, cost: Tensor, a: Tensor, b: Tensor, epsilon: Tensor, f: Tensor, g: Tensor, value: Tensor, taus: tuple
    ):
        ctx.save_for_backward(cost, a, b, epsilon, f, g)
        ctx.taus = taus
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        cost, a, b, epsilon, f, g = ctx.saved_tensors
        (upstream,) = grads
        rho_a, rho_b = (penalty(tau, epsilon) for tau in ctx.taus)
        k = ops.density(cost, f, g, a, b, epsilon)
        plan = a.unsqueeze(-1) * b.unsqueeze(-2) * k
        scale = epsilon.unsqueeze(-1)
        grad_a = conjugate(f, rho_a) - scale * ((k - 1) * b.unsqueeze(-2)).sum(-1)
        grad_b = conjugate(g, rho_b) - scale * ((k - 1) * a.unsqueeze(-1)).sum(-2)
        exponent = torch.where(k > 0, f.unsqueeze(-1) + g.unsqueeze(-2) - torch.where(k > 0, cost, 0.0), 0.0)
        total = a.sum(-1) * b.sum(-1)
        grad_epsilon = (plan * exponent).sum((-1, -2)) / epsilon - plan.sum((-1, -2)) + total
        # At fixed tau the penalties move with epsilon: rho = epsilon tau / (1 - tau).
        for weights, potential, rho in ((a, f, rho_a), (b, g, rho_b)):
            if rho is not None:
                ratio = safe_divide(potential, rho.unsqueeze(-1))
                per_rho = -torch.expm1(-ratio) - ratio * torch.exp(-ratio)
                grad_epsilon = grad_epsilon + (weights * per_rho).sum(-1) * rho / epsilon
        matrix = upstream.unsqueeze(-1)
        return (
            matrix.unsqueeze(-1) * plan,
            matrix * grad_a,
            matrix * grad_b,
            upstream * grad_epsilon,
            None,
            None,
            None,
            None,
        )


def conjugate(potential: Tensor, rho: Tensor | None) -> Tensor:
    """-rho (exp(-h / rho) - 1), the concave conjugate of the penalty; h itself for the hard constraint."""
    if rho is None:
        return potential
    return -rho.unsqueeze(-1) * torch.expm1(safe_divide(-potential, rho.unsqueeze(-1)))


def dual_value(cost: Tensor, a: Tensor, b: Tensor, epsilon: Tensor, f: Tensor, g: Tensor, taus: tuple) -> Tensor:
    """<a, f> + <b, g> - epsilon <exp((f + g - C)/epsilon) - 1, a (x) b>, with f and g conjugated where tau < 1."""
    rho_a, rho_b = (penalty(tau, epsilon) for tau in taus)
    k = ops.density(cost, f, g, a, b, epsilon)
    # Summed as k - 1: for a large epsilon that multiplies it, the difference of two masses would be rounding.
    excess = (a.unsqueeze(-1) * b.unsqueeze(-2) * (k - 1)).sum((-1, -2))
    linear = (a * conjugate(f, rho_a)).sum(-1) + (b * conjugate(g, rho_b)).sum(-1)
    return linear - epsilon * excess


def implicit(
    cost: Tensor,
    a: Tensor,
    b: Tensor,
    epsilon: Tensor,
    f: Tensor,
    g: Tensor,
    value: Tensor,
    taus: tuple[float, float],
    how: LinearSolve = LinearSolve(),
) -> tuple[Tensor, Tensor, Tensor]:
    """Attach derivatives to solved potentials and their dual value: ``(f, g, value)`` as functions of the problem.

    All tensors in the dtype of the potentials. The derivative in the weights is defined up to a constant: a and b only
    move with equal total mass.
    """
    attached = _Potentials.apply(cost, a, b, epsilon, f, g, taus, how)
    assert isinstance(attached, tuple)
    f, g = attached
    value = _Value.apply(cost, a, b, epsilon, f, g, value, taus)
    assert isinstance(value, Tensor)
    return f, g, value
