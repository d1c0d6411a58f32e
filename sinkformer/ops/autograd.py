"""Derivative rules of operations, one each, where composing them from elementary ones would store every intermediate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sinkformer.ops import reference


class _Plan(torch.autograd.Function):
    """P = a b exp((f + g - C) / epsilon) with dP = P (df + dg - dC) / epsilon - P log(P / (a b)) depsilon / epsilon.

    P alone is stored. The backward pass is made of differentiable operations on it, so that it may be differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, cost: Tensor, f: Tensor, g: Tensor, epsilon: Tensor, a: Tensor, b: Tensor):
        plan = f.unsqueeze(-1) + g.unsqueeze(-2)
        plan -= cost
        plan /= epsilon[..., None, None]
        plan.clamp_(max=reference.LARGEST_EXPONENT).exp_()
        plan *= a.unsqueeze(-1)
        plan *= b.unsqueeze(-2)
        ctx.save_for_backward(plan, cost, f, g, epsilon)
        return plan

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        plan, cost, f, g, epsilon = ctx.saved_tensors
        on_cost, on_f, on_g, on_epsilon = ctx.needs_input_grad[:4]
        weighted = grads[0] * plan
        # In place where the result is not differentiated again.
        weighted = (torch.Tensor.div if torch.is_grad_enabled() else torch.Tensor.div_)(
            weighted, epsilon[..., None, None]
        )
        grad_epsilon = None
        if on_epsilon:
            used = plan > 0
            exponents = torch.where(used, f.unsqueeze(-1) + g.unsqueeze(-2) - torch.where(used, cost, 0.0), 0.0)
            grad_epsilon = -(weighted * exponents).sum((-1, -2)) / epsilon
        return (
            -weighted if on_cost else None,
            weighted.sum(-1) if on_f else None,
            weighted.sum(-2) if on_g else None,
            grad_epsilon,
            None,
            None,
        )


def plan(cost: Tensor, f: Tensor, g: Tensor, a: Tensor, b: Tensor, epsilon: Tensor) -> Tensor:
    """P = a b exp((f + g - C) / epsilon), in the dtype of the potentials."""
    if a.requires_grad or b.requires_grad:
        return reference.plan(cost, f, g, a, b, epsilon)
    made = _Plan.apply(cost, f, g, epsilon, a, b)
    assert isinstance(made, Tensor)
    return made
