"""Plain torch, dense, any dtype, any device: the truth that every faster kernel is compared with.

Shapes: cost ``(*batch, n, m)``, potentials and weights ``(*batch, n)`` and ``(*batch, m)``, epsilon ``(*batch)``.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from sinkformer._numerics import safe_divide

# exp of this is finite in float64 with room to multiply by weights.
LARGEST_EXPONENT = 600.0
# Entries of a block of rows: 128 MiB in float64.
_BLOCK_ENTRIES = 2**24


def softmin(cost: Tensor, potential: Tensor, log_weights: Tensor, epsilon: Tensor) -> Tensor:
    """Soft c-transform -epsilon log sum_j w_j exp((h_j - C_ij) / epsilon), one number for each row; ``+inf`` if no j is left.

    A column of weight zero (log-weight ``-inf``) or of infinite cost takes no part.
    """
    scale = epsilon.unsqueeze(-1)
    exponents = (potential.unsqueeze(-2) - cost) / scale.unsqueeze(-1) + log_weights.unsqueeze(-2)
    return -scale * torch.logsumexp(exponents, -1)


def forbids(cost: Tensor) -> bool:
    """Whether any pair has infinite cost: one pass, and no mask, which takes as long as several sums."""
    return bool(cost.numel()) and not bool(cost.detach().amax() < torch.inf)


def density(cost: Tensor, f: Tensor, g: Tensor, a: Tensor, b: Tensor, epsilon: Tensor) -> Tensor:
    """exp((f + g - C) / epsilon), the density of the plan with respect to a (x) b, in the dtype of the potentials.

    Zero at pairs of infinite cost, and where both weights are zero: between two paddings nothing bounds the exponent.
    """
    live = torch.maximum((a > 0).to(f.dtype).unsqueeze(-1), (b > 0).to(f.dtype).unsqueeze(-2))
    if forbids(cost):
        # Infinities are taken out before the quotient, whose derivative they would turn into NaN.
        forbidden = cost == torch.inf
        cost, live = cost.masked_fill(forbidden, 0.0), live.masked_fill(forbidden, 0.0)
    exponents = (f.unsqueeze(-1) + g.unsqueeze(-2) - cost) / epsilon.unsqueeze(-1).unsqueeze(-1)
    return exponents.clamp_max_(LARGEST_EXPONENT).exp() * live


def density_of_atoms(cost: Tensor, f: Tensor, g: Tensor, epsilon: Tensor) -> Tensor:
    """``density`` without derivatives, in one matrix, for what multiplies by both weights: any number between paddings."""
    # In the order of ``density``: where epsilon is tiny, the rounding of the exponents is all that is left of the error.
    exponents = (f.unsqueeze(-1) + g.unsqueeze(-2)).sub_(cost).mul_((1 / epsilon).unsqueeze(-1).unsqueeze(-1))
    return exponents.clamp_max_(LARGEST_EXPONENT).exp_()


def plan(cost: Tensor, f: Tensor, g: Tensor, a: Tensor, b: Tensor, epsilon: Tensor) -> Tensor:
    """P = a b exp((f + g - C) / epsilon), in the dtype of the potentials."""
    return a.unsqueeze(-1) * b.unsqueeze(-2) * density(cost, f, g, a, b, epsilon)


def apply(matrix: Tensor, v: Tensor) -> Tensor:
    """Matrix times vector, problem by problem: ``(*batch, n, m)`` and ``(*batch, m)`` give ``(*batch, n)``."""
    # A row times a matrix is what a BLAS does fastest.
    return (v.unsqueeze(-2) @ matrix.mT).squeeze(-2)


def marginals(plan: Tensor) -> tuple[Tensor, Tensor]:
    """Row sums and column sums."""
    return plan.sum(-1), plan.sum(-2)


def rounding(
    rows: Callable[[Tensor], Tensor], columns: Callable[[Tensor], Tensor], a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Factors of the plan moved to exact marginals (Altschuler, Weed, Rigollet 2017, algorithm 2).

    Args:
        rows: v -> P v, weights on the target to a function on the source.
        columns: u -> P^T u.
        a: wanted row sums, ``(*batch, n)``.
        b: wanted column sums, ``(*batch, m)``, of the same total.

    Returns:
        ``(r, c, left, right)``: diag(r) P diag(c) + left right^T has marginals a and b to rounding, and lies at most twice
        the L1 violation of P away from it.
    """
    r = safe_divide(a, rows(torch.ones_like(b))).clamp_max(1.0)
    c = safe_divide(b, columns(r)).clamp_max(1.0)
    left, right = (a - r * rows(c)).clamp_min(0.0), (b - c * columns(r)).clamp_min(0.0)
    return r, c, left, safe_divide(right, right.sum(-1, keepdim=True))


def row_blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Ranges of rows that cut ``(*batch, n, m)`` into blocks of bounded size."""
    *batch, n, m = shape
    width = max(1, m)
    for size in batch:
        width *= max(1, size)
    step = max(1, _BLOCK_ENTRIES // width)
    for start in range(0, n, step):
        yield start, min(n, start + step)


def adjoint_solve(
    rows: Tensor,
    columns: Tensor,
    tau_a: float,
    tau_b: float,
    q: Tensor,
    right_f: Tensor,
    right_g: Tensor,
    *,
    transposed: bool,
    rtol: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solve the linear system of the implicit function theorem, by conjugate gradients, problem by problem.

    With R = ``rows`` (row-stochastic) and S = ``columns`` (column-stochastic), both ``(*batch, n, m)``,

        transposed:      l + tau_b S u = right_f,     u + tau_a R^T l = right_g
        not transposed:  l + tau_a R u = right_f,     u + tau_b S^T l = right_g.

    Eliminating l leaves I - tau_a tau_b S^T R on the target side, self-adjoint and non-negative for the inner product
    weighted by q (the column marginal of the plan), with kernel the constants when tau_a = tau_b = 1. Columns where
    q = 0 couple one way only and are eliminated first.

    Returns:
        ``(l, u, residual, ritz)``: the solution, and of every problem, ``(*batch)``, the relative residual and the smallest
        Ritz value (see ``smallest_ritz``) of the operator.
    """
    theta = tau_a * tau_b
    live = q > 0
    singular = theta == 1.0

    def operator(v: Tensor) -> Tensor:
        return (v - theta * apply(columns.mT, apply(rows, v))).masked_fill(~live, 0.0)

    def inner(u: Tensor, v: Tensor) -> Tensor:
        return (q * u * v).sum(-1, keepdim=True)

    total = q.sum(-1, keepdim=True)

    def project(v: Tensor) -> Tensor:
        if not singular:
            return v
        mean = (q * v).sum(-1, keepdim=True) / total
        return (v - mean).masked_fill(~live, 0.0)

    # The size of what enters, before any cancellation: residuals are relative to it, since where everything cancels
    # (one atom on a side) only rounding is left to solve for.
    dead = right_g.masked_fill(live, 0.0)
    if transposed:
        right = right_g - dead - tau_a * apply(rows.mT, right_f - tau_b * apply(columns, dead))
        size = right_g.abs() + tau_a * apply(rows.mT, right_f.abs() + tau_b * apply(columns, dead.abs()))
        right, size = safe_divide(right, q), safe_divide(size, q)
    else:
        right = right_g - tau_b * apply(columns.mT, right_f)
        size = right_g.abs() + tau_b * apply(columns.mT, right_f.abs())
        right, size = right.masked_fill(~live, 0.0), size.masked_fill(~live, 0.0)

    right = project(right)
    scale = inner(size, size).sqrt()
    x = torch.zeros_like(right)
    residual, direction = right, right
    rho = inner(residual, residual)
    steps, ratios = [], []
    asked, floor = torch.full_like(scale, rtol), 10 * torch.finfo(scale.dtype).eps
    # Conjugate gradients end after m steps in exact arithmetic; rounding asks for some more.
    for _ in range(4 * q.shape[-1] + 20):
        active = rho.sqrt() > asked * scale
        if not bool(active.any()):
            # The error is the residual divided by the smallest eigenvalue, which is seen only now.
            seen = smallest_ritz(steps, ratios, scale.squeeze(-1)).nan_to_num(1.0).clamp_max(1.0).unsqueeze(-1)
            asked = (rtol * seen).clamp_min(floor)
            active = rho.sqrt() > asked * scale
            if not bool(active.any()):
                break
        image = project(operator(direction))
        curvature = inner(direction, image)
        step = torch.where(active & (curvature > 0), safe_divide(rho, curvature), 0.0)
        x = x + step * direction
        residual = residual - step * image
        rho_next = torch.where(active, inner(residual, residual), rho)
        ratio = torch.where(active, safe_divide(rho_next, rho), 0.0)
        direction = torch.where(active, residual + ratio * direction, direction)
        rho = rho_next
        steps.append(step.squeeze(-1))
        ratios.append(ratio.squeeze(-1))
    error = project(right - operator(x))
    relative = safe_divide(inner(error, error).sqrt(), scale).squeeze(-1)
    ritz = smallest_ritz(steps, ratios, relative)

    if transposed:
        u = q * x + dead
        return right_f - tau_b * apply(columns, u), u, relative, ritz
    u = torch.where(live, x, right_g - tau_b * apply(columns.mT, right_f - tau_a * apply(rows, x)))
    return right_f - tau_a * apply(rows, u.masked_fill(~live, 0.0)), u, relative, ritz


def smallest_ritz(steps: list[Tensor], ratios: list[Tensor], like: Tensor) -> Tensor:
    """Smallest eigenvalue of the tridiagonal matrices that conjugate gradients leave behind (Golub and Meurant 2010).

    It estimates the smallest eigenvalue of the operator that the right-hand side has a part in, from above.

    Args:
        steps: alpha of every iteration, ``(*batch)``; zero from the end of a problem on.
        ratios: beta, the same.
        like: a tensor ``(*batch)``.

    Returns:
        ``(*batch)``, NaN where no step was taken.
    """
    if not steps:
        return torch.full_like(like, torch.nan)
    alpha, beta = torch.stack(steps, -1), torch.stack(ratios, -1)
    taken = alpha > 0
    inverse = safe_divide(torch.ones_like(alpha), alpha)
    before = torch.cat([torch.zeros_like(alpha[..., :1]), (beta * inverse)[..., :-1]], -1)
    # Behind the end of a problem: an eigenvalue that is never the smallest, and no connection to it.
    diagonal = torch.where(taken, inverse + before, torch.finfo(alpha.dtype).max ** 0.25)
    off = torch.where(taken[..., 1:], beta[..., :-1].clamp_min(0.0).sqrt() * inverse[..., :-1], 0.0)
    matrix = torch.diag_embed(diagonal) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    smallest = torch.linalg.eigvalsh(matrix)[..., 0]
    return smallest.masked_fill(~taken[..., 0], torch.nan)
