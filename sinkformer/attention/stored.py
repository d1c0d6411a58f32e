"""Sweeps of small problems on the CPU: scores stored, one exponential of each pair, the rest matrix-vector products.

After one sweep in the log domain, with f_1 and c_1 its log-sums of rows and columns, the kernel E_ij = exp(S_ij + f_1i -
c_1j) has columns of mean one, and later sweeps multiply it with vectors. A step of the derivative is a product with E too,
and what all steps leave at the scores is E o (L R^T), with one column of L and R for every half step: nothing of size n x m is
kept for a sweep. Where sums come near the ends of the dtype's range there is no result, and the log domain is for them.
Second derivatives are those of the sweeps in the log domain, made again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Pairs of all problems together up to which scores are stored: 256 MiB in float32, a few times.
MOST_STORED = 2**26
# Sums may be this small and factors as large as its reciprocal: then what underflow took from the kernel, times a factor, is
# less than the rounding of a sum.
_LEAST = {torch.float32: 1e-14, torch.float64: 1e-100}


def storable(device: torch.device, pairs: int) -> bool:
    """Whether to store the scores of so many pairs. A compiled graph cannot look at the sums."""
    return device.type == "cpu" and pairs <= MOST_STORED and not torch.compiler.is_compiling()


def transformed() -> bool:
    """Whether a transform of ``torch.func`` is at work, under which values cannot be looked at."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


def sweeps(
    scores: Tensor, log_a: Tensor, base: Tensor, start: Tensor, tau: float, iterations: int
) -> tuple[Tensor, Tensor] | None:
    """Potentials after a fixed number of sweeps, with the exact derivative of those.

    From h = ``start``, ``iterations`` times: f_i = -log sum_j exp(S_ij + h_j), h_j = base_j - tau log sum_i a_i exp(S_ij + f_i);
    and f once more.

    Args:
        scores: ``(B, n, m)``, ``-inf`` for forbidden pairs; no row and no column of positive weight has only those.
        log_a: log-weights of the rows, ``(B, n)``.
        base: log-weights of the columns, ``(B, m)``, ``-inf`` for padding; (1 - tau) times their bias added.
        start: h to begin with, ``(B, m)``; ``-inf`` for padding.
        tau: hardness of the columns.
        iterations: at least 1.

    Returns:
        ``(f, h)``, ``(B, n)`` and ``(B, m)``; None if the range of the dtype does not suffice.
    """
    if transformed():
        return _in_logarithms(scores, log_a, base, start, tau, iterations)
    outcome = _Sweeps.apply(scores, log_a, base, start, tau, iterations)
    assert isinstance(outcome, tuple)
    f, h, within = outcome
    return (f, h) if bool(within) else None


def _in_logarithms(
    scores: Tensor, log_a: Tensor, base: Tensor, h: Tensor, tau: float, iterations: int
) -> tuple[Tensor, Tensor]:
    """The same sweeps, every one with its exponentials: derivatives of any order, and transforms of ``torch.func``."""
    for _ in range(iterations):
        f = -torch.logsumexp(scores + h.unsqueeze(-2), -1)
        h = base - tau * torch.logsumexp(scores + (f + log_a).unsqueeze(-1), -2)
    return -torch.logsumexp(scores + h.unsqueeze(-2), -1), h


class _Sweeps(torch.autograd.Function):
    """Vectors are columns ``(B, n, 1)`` and rows ``(B, 1, m)``."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, log_a: Tensor, base: Tensor, start: Tensor, tau: float, iterations: int):
        given = scores, log_a, base, start
        a, base, h = log_a.exp().unsqueeze(-1), base.unsqueeze(-2), start.unsqueeze(-2)
        f = first_f = -torch.logsumexp(scores + h, -1, keepdim=True)
        c = first_c = torch.logsumexp(scores + (f + log_a.unsqueeze(-1)), -2, keepdim=True)
        kernel = (scores + f).sub_(c).exp_()
        # In every sweep: exp(f - f_1), exp(h + c_1), exp(c_1 - c).
        u, v, w = [torch.ones_like(f)], [(first_c + h).exp()], []
        sums = []
        for k in range(iterations):
            if k:
                sums.append((a * u[-1]).mT @ kernel)
                c = first_c + sums[-1].log()
            w.append((first_c - c).exp())
            h = base - tau * c
            v.append((first_c + h).exp())
            sums.append((kernel @ v[-1].mT).mT)
            f = first_f - sums[-1].log().mT
            u.append((f - first_f).exp())
        limit = _LEAST[scores.dtype]
        within = (torch.cat(sums, -1) > limit).all()
        within &= (torch.cat([*v, *(t.mT for t in u)], -1) < 1 / limit).all()
        ctx.tau = tau
        ctx.save_for_backward(*given, kernel, a, *u, *v, *w)
        ctx.mark_non_differentiable(within)
        return f.squeeze(-1), h.squeeze(-2), within

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):  # type: ignore[override]
        scores, log_a, base, start, kernel, a, *factors = ctx.saved_tensors
        iterations = len(factors) // 3
        if torch.is_grad_enabled():  # it is going to be differentiated
            given = scores, log_a, base, start
            asked = [t for t, needed in zip(given, ctx.needs_input_grad, strict=False) if needed]
            again = _in_logarithms(scores, log_a, base, start, ctx.tau, iterations)
            found = iter(torch.autograd.grad(again, asked, grads[:2], create_graph=True, allow_unused=True))
            return (*(next(found) if needed else None for needed in ctx.needs_input_grad[:4]), None, None)
        u, v, w = factors[: iterations + 1], factors[iterations + 1 : 2 * iterations + 2], factors[2 * iterations + 2 :]
        grad_f, grad_h = grads[0].unsqueeze(-1), grads[1].unsqueeze(-2)
        grad_a, grad_base = torch.zeros_like(a), torch.zeros_like(grad_h)
        left, right = [], []
        for k in range(iterations, -1, -1):
            # f_i = -log sum_j exp(S_ij + h_j)
            left.append(-grad_f * u[k])
            right.append(v[k])
            grad_h = grad_h + (left[-1].mT @ kernel) * v[k]
            if k == 0:
                break
            # h_j = base_j - tau c_j, c_j = log sum_i a_i exp(S_ij + f_i), with f of the sweep before
            grad_base = grad_base + grad_h
            left.append(a * u[k - 1])
            right.append(-ctx.tau * grad_h * w[k - 1])
            grad_f = left[-1] * (kernel @ right[-1].mT)
            grad_a = grad_a + grad_f
            grad_h = torch.zeros_like(grad_h)
        grad_scores = kernel * (torch.cat(left, -1) @ torch.cat(right, -2))
        return grad_scores, grad_a.squeeze(-1), grad_base.squeeze(-2), grad_h.squeeze(-2), None, None
