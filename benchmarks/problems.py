"""The problems that all solvers are given, and what their answers are measured with: float64, and no solver's own word.

C = -<q, k> for unit-norm clouds around 8 shared centres in R^64, random positive weights, epsilon = ratio x (max C - min C)
of every problem. A batch is padded with atoms of weight zero; a single problem is a batch of one without padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

DIMENSION, CENTRES, NOISE = 64, 8, 0.7


@dataclass(frozen=True, eq=False)
class Problems:
    """B problems, padded to common sizes. Tensors share one dtype, the one the solvers compute in.

    Attributes:
        q, k: features ``(B, n, d)`` and ``(B, m, d)``; zero at padding.
        a, b: weights ``(B, n)`` and ``(B, m)``; rows sum to one, zero at padding, which stands last.
        sizes: ``(n, m)`` of every problem without its padding.
        cost: ``(B, n, m)``, in the dtype of ``q``. This rounded matrix is the problem, also in float64.
        epsilon: ``(B,)`` float64.
        ratio: epsilon over the range of the cost.
    """

    q: Tensor
    k: Tensor
    a: Tensor
    b: Tensor
    sizes: tuple[tuple[int, int], ...]
    cost: Tensor
    epsilon: Tensor
    ratio: float

    @property
    def dtype(self) -> torch.dtype:
        return self.a.dtype

    def __len__(self) -> int:
        return len(self.sizes)

    def live(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """``(cost, a, b, epsilon)`` of one problem without padding, float64, the weights summing to one exactly."""
        n, m = self.sizes[index]
        a, b = (w[index, :size].double().numpy() for w, size in ((self.a, n), (self.b, m)))
        return self.cost[index, :n, :m].double().numpy(), a / a.sum(), b / b.sum(), float(self.epsilon[index])

    @cached_property
    def scaled(self) -> Tensor:
        """The cost moved and scaled to [0, 1], ``(B, n, m)``: same plans at epsilon = ratio, for solvers with one epsilon."""
        costs = torch.zeros_like(self.cost)
        for i, (n, m) in enumerate(self.sizes):
            live = self.cost[i, :n, :m].double()
            costs[i, :n, :m] = (live - live.min()) * (self.ratio / float(self.epsilon[i]))
        return costs

    @cached_property
    def references(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Converged potentials ``(f, g)`` of every problem without its padding, over epsilon, float64."""
        return [solve_exactly(*self.live(i)) for i in range(len(self))]

    @cached_property
    def pairing_weights(self) -> Tensor:
        """W of the objective <plan, W> of the gradient suite, ``(B, n, m)``."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.cost.shape, generator=generator, dtype=torch.float64).to(self.dtype)


def make(sizes: list[tuple[int, int]], ratio: float, dtype: torch.dtype, seed: int = 0) -> Problems:
    """Problems of the given sizes."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CENTRES, DIMENSION, generator=generator, dtype=torch.float64)
    centres = centres / centres.norm(dim=-1, keepdim=True)

    def cloud(size: int) -> Tensor:
        around = centres[torch.randint(CENTRES, (size,), generator=generator)]
        noise = torch.randn(size, DIMENSION, generator=generator, dtype=torch.float64) / DIMENSION**0.5
        x = around + NOISE * noise
        return x / x.norm(dim=-1, keepdim=True)

    def weights(size: int) -> Tensor:
        w = torch.rand(size, generator=generator, dtype=torch.float64) + 0.1
        return w / w.sum()

    n, m = max(size[0] for size in sizes), max(size[1] for size in sizes)
    q, k = (torch.zeros(len(sizes), size, DIMENSION, dtype=torch.float64) for size in (n, m))
    a, b = torch.zeros(len(sizes), n, dtype=torch.float64), torch.zeros(len(sizes), m, dtype=torch.float64)
    for i, (rows, columns) in enumerate(sizes):
        q[i, :rows], k[i, :columns] = cloud(rows), cloud(columns)
        a[i, :rows], b[i, :columns] = weights(rows), weights(columns)
    q, k = q.to(dtype), k.to(dtype)
    cost = -(q @ k.mT)
    ranges = [float(cost[i, :r, :c].max().double() - cost[i, :r, :c].min().double()) for i, (r, c) in enumerate(sizes)]
    epsilon = ratio * torch.tensor(ranges, dtype=torch.float64)
    return Problems(q, k, a.to(dtype), b.to(dtype), tuple(sizes), cost, epsilon, ratio)


def ragged(count: int, ratio: float, dtype: torch.dtype, low: int = 8, high: int = 64, seed: int = 0) -> Problems:
    """``count`` problems with n and m uniform between ``low`` and ``high``."""
    sizes = torch.randint(low, high + 1, (count, 2), generator=torch.Generator().manual_seed(seed)).tolist()
    return make([(n, m) for n, m in sizes], ratio, dtype, seed)


def single(n: int, ratio: float, dtype: torch.dtype, seed: int = 0) -> Problems:
    """One problem with n = m."""
    return make([(n, n)], ratio, dtype, seed)


# The measure -------------------------------------------------------------------------------------------------------------


def marginal_error(plan: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """sum_i |P1 - a|_i + sum_j |P^T 1 - b|_j; infinite for a plan that is not finite."""
    if not np.isfinite(plan).all():
        return float("inf")
    return float(np.abs(plan.sum(1) - a).sum() + np.abs(plan.sum(0) - b).sum())


def gibbs(cost: np.ndarray, epsilon: float, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The plan of log-scalings, exp(u + v - C / epsilon)."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.exp(u[:, None] + v[None, :] - cost / epsilon)


@dataclass(frozen=True, eq=False)
class Answer:
    """What a solver returned for a batch.

    Attributes:
        u, v: log-scalings, P = exp(u_i + v_j - C_ij / epsilon), per problem, of its size or longer.
        plans: the plans themselves, per problem, of its sizes or larger. Either these or the scalings may be missing.
        iterations: of the problem that took most, or None if the solver does not tell.
    """

    u: list | Tensor | np.ndarray | None = None
    v: list | Tensor | np.ndarray | None = None
    plans: list | Tensor | np.ndarray | None = None
    iterations: int | None = None


def measured_error(problems: Problems, answer: Answer) -> float:
    """The worst L1 marginal error of an answer over its batch, in float64, on the cost as it was given.

    Of scalings: the error of the plan they define, which has the form of a solution by construction. Of plans: the error
    of their own sums, plus their L1 distance from the one matrix of that form that has these sums; an arbitrary coupling, such as
    the product of the marginals or a rounded plan, does not pass for a solution. The larger of the two counts.
    """
    if answer.plans is None and (answer.u is None or answer.v is None):
        raise ValueError("expected scalings or plans, received neither")
    worst = 0.0
    for i, (n, m) in enumerate(problems.sizes):
        cost, a, b, epsilon = problems.live(i)
        if answer.u is not None and answer.v is not None:
            u, v = _numbers(answer.u[i])[:n], _numbers(answer.v[i])[:m]
            worst = max(worst, marginal_error(gibbs(cost, epsilon, u, v), a, b))
        if answer.plans is not None:
            plan = _numbers(answer.plans[i])[:n, :m]
            error = marginal_error(plan, a, b)
            # A plan far from the marginals is refused already; near them the distance from the form decides.
            if answer.u is None and error < 0.1:
                error += _distance_from_form(plan, cost, epsilon, problems.references[i])
            worst = max(worst, error)
    return worst


def _numbers(x) -> np.ndarray:
    return x.detach().double().numpy() if isinstance(x, Tensor) else np.asarray(x, dtype=np.float64)


def _distance_from_form(plan: np.ndarray, cost: np.ndarray, epsilon: float, start) -> float:
    rows, columns = plan.sum(1), plan.sum(0)
    if (plan < 0).any() or (rows <= 0).any() or (columns <= 0).any():
        return float("inf")
    total = plan.sum()
    u, v = solve_exactly(cost, rows / total, columns / total, epsilon, start=start)
    return float(np.abs(plan - total * gibbs(cost, epsilon, u, v)).sum())


# The reference -----------------------------------------------------------------------------------------------------------


def solve_exactly(
    cost: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    epsilon: float,
    *,
    tolerance: float = 1e-12,
    start: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Log-scalings of one problem, to an L1 error of ``tolerance``: annealed sweeps, then Newton on the concave dual.

    Dense and slow, and independent of every solver that is compared.

    Raises:
        ArithmeticError: the tolerance was not reached.
    """
    scores, log_a, log_b = -cost / epsilon, np.log(a), np.log(b)
    u, v = start if start is not None else _annealed(scores, log_a, log_b)

    def dual(u: np.ndarray, v: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(over="ignore"):
            plan = np.exp(u[:, None] + v[None, :] + scores)
        return float(a @ u + b @ v - plan.sum()), plan

    value, plan = dual(u, v)
    for _ in range(100):
        error = marginal_error(plan, a, b)
        if error <= tolerance:
            return u, v
        du, dv = _newton_step(plan, a, b)
        slope = float((a - plan.sum(1)) @ du + (b - plan.sum(0)) @ dv)
        step = 1.0
        while step > 1e-10:
            new_value, new_plan = dual(u + step * du, v + step * dv)
            # Close to the solution the dual is flat to rounding, and the error itself is the better judge.
            if new_value >= value + 1e-4 * step * slope or marginal_error(new_plan, a, b) < 0.5 * error:
                break
            step /= 2
        u, v, value, plan = u + step * du, v + step * dv, new_value, new_plan
        u = u + log_a - np.log(plan.sum(1))
        value, plan = dual(u, v)
    # The rounding of exponents as large as 1 / ratio is the floor.
    if error <= 1e3 * tolerance:
        return u, v
    raise ArithmeticError(f"the reference stopped at an error of {error:.1e}")


def _annealed(scores: np.ndarray, log_a: np.ndarray, log_b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    v, span = np.zeros(scores.shape[1]), max(float(np.ptp(scores)), 1.0)
    temperatures = [2.0**k for k in range(int(np.ceil(np.log2(span))), -1, -1)]
    for temperature in temperatures:
        s = scores / temperature
        w = v / temperature
        for _ in range(10):
            u = log_a - _logsumexp(s + w[None, :], 1)
            w = log_b - _logsumexp(s + u[:, None], 0)
        v = w * temperature
    u = log_a - _logsumexp(scores + v[None, :], 1)
    return u, v


def _logsumexp(x: np.ndarray, axis: int) -> np.ndarray:
    top = x.max(axis, keepdims=True)
    return np.log(np.exp(x - top).sum(axis)) + top.squeeze(axis)


def _newton_step(plan: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Solve [diag(P1), P; P^T, diag(P^T 1)] (x, y) = (a - P1, b - P^T 1), by the Schur complement of the rows."""
    return solve_marginal_system(plan, a - plan.sum(1), b - plan.sum(0))


def solve_marginal_system(plan: np.ndarray, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Solve [diag(P1), P; P^T, diag(P^T 1)] (x, y) = (left, right) in the gauge where the last y is zero, densely."""
    rows, columns = plan.sum(1), plan.sum(0)
    scaled = plan / rows[:, None]
    schur = np.diag(columns) - plan.T @ scaled
    target = right - scaled.T @ left
    # Jacobi scaling: columns may differ by many orders of magnitude.
    d = 1 / np.sqrt(np.maximum(columns, 1e-300))
    inner = (d[:, None] * schur * d[None, :])[:-1, :-1]
    y = np.zeros(len(columns))
    if len(columns) > 1:
        inner[np.diag_indices_from(inner)] += 1e-15
        y[:-1] = d[:-1] * np.linalg.solve(inner, d[:-1] * target[:-1])
    return (left - plan @ y) / rows, y


def plan_gradient(problems: Problems, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Derivative of <plan, W> in q and k of one problem at its converged solution, ``(n, d)`` and ``(m, d)``.

    With (x, y) the solution of [diag(a), P; P^T, diag(b)] (x, y) = ((P * W) 1, (P * W)^T 1), the derivative in the cost is
    -A / epsilon for A = P * (W - x - y); epsilon is held fixed.
    """
    n, m = problems.sizes[index]
    cost, _, _, epsilon = problems.live(index)
    plan = gibbs(cost, epsilon, *problems.references[index])
    w = _numbers(problems.pairing_weights[index])[:n, :m]
    x, y = solve_marginal_system(plan, (plan * w).sum(1), (plan * w).sum(0))
    a = plan * (w - x[:, None] - y[None, :])
    q, k = _numbers(problems.q[index])[:n], _numbers(problems.k[index])[:m]
    return a @ k / epsilon, a.T @ q / epsilon


def gradient_error(problems: Problems, grad_q: Tensor | np.ndarray, grad_k: Tensor | np.ndarray) -> float:
    """Relative error |(dq, dk) - reference| / |reference| (Frobenius) of the worst problem; infinite if not finite."""
    worst = 0.0
    for i, (n, m) in enumerate(problems.sizes):
        have = [_numbers(grad_q[i])[:n], _numbers(grad_k[i])[:m]]
        want = plan_gradient(problems, i)
        if not all(np.isfinite(x).all() for x in have):
            return float("inf")
        distance = sum(float(((x - y) ** 2).sum()) for x, y in zip(have, want, strict=True))
        worst = max(worst, (distance / sum(float((y**2).sum()) for y in want)) ** 0.5)
    return worst


def plain_sweeps(problems: Problems, target: float, most: int = 100_000) -> int:
    """Sweeps of plain Sinkhorn from zero potentials until the worst problem has an L1 error of at most ``target``, in float64.

    Exact below 50, from there on the next multiple of 10.
    """
    worst = 0
    for i in range(len(problems)):
        kernel, a, b, right = _scaled_kernel(problems, i)
        for sweep in range(1, most + 1):
            left = a / (kernel @ right)
            right = b / (left @ kernel)
            # The columns are exact now.
            if (sweep < 50 or sweep % 10 == 0) and np.abs(left * (kernel @ right) - a).sum() <= target:
                break
        worst = max(worst, sweep)
    return worst


def loosest_l2_threshold(problems: Problems, target: float, period: int, most: int = 100_000) -> float:
    """The largest L2 error of the column marginal, looked at every ``period`` sweeps, that stops no problem above ``target``.

    Sweeps update columns first, then rows: the order of POT's loops, whose ``stopThr`` this is.
    """
    threshold = 1.0
    for i in range(len(problems)):
        kernel, b, a, right = _scaled_kernel(problems, i, transposed=True)
        for sweep in range(most):
            left = b / (kernel @ right)
            right = a / (left @ kernel)
            if sweep % period == 0:
                violation = left * (kernel @ right) - b
                if np.abs(violation).sum() <= target:
                    break
                # Must not stop here yet.
                threshold = min(threshold, float(np.linalg.norm(violation)))
    return 0.9999 * threshold


def _scaled_kernel(problems: Problems, index: int, transposed: bool = False) -> tuple[np.ndarray, ...]:
    """``(K, a, b, v)``: a float64 kernel without underflow, the weights of its rows and columns, scalings for zero potentials."""
    cost, a, b, epsilon = problems.live(index)
    if problems.ratio >= 0.005:
        kernel, left, right = np.exp((cost.min() - cost) / epsilon), np.ones(len(a)), np.ones(len(b))
    else:
        # Scalings relative to the converged plan follow the same iteration, from further away before they overflow.
        u, v = problems.references[index]
        kernel, left, right = gibbs(cost, epsilon, u, v), np.exp(-u), np.exp(-v)
    return (np.ascontiguousarray(kernel.T), b, a, left) if transposed else (kernel, a, b, right)
