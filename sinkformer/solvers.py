"""The entropic transport problem and its log-domain Sinkhorn iteration.

    minimise  <C, P> + epsilon KL(P | a (x) b) + rho_a KL(P 1 | a) + rho_b KL(P^T 1 | b)

over non-negative P, with KL(p | q) = sum p log(p/q) - p + q. A penalty is given as tau = rho / (rho + epsilon):
tau = 1 is the hard constraint (a coupling), tau = 0 no constraint at all. The solution is

    P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon),     f = -tau_a epsilon LSE_j((g_j - C_ij) / epsilon + log b_j),

and the same for g (Cuturi 2013; Chizat, Peyre, Schmitzer, Vialard 2018 for the penalties; arXiv 2603.25860 for the
layer). The weights stand outside the exponential, so potentials are functions on the space: defined at atoms of weight
zero, and unchanged when an atom is split. Gauge for couplings: <a, f> = <b, g>.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow
from torch import Tensor

from sinkformer import ops
from sinkformer._numerics import marginal_tolerance, potential_dtype, relative_entropy, safe_log, working_dtype
from sinkformer._typing import CostMatrix, PerProblem, Potential
from sinkformer.costs import Cost, SqEuclidean, as_cost
from sinkformer.differentiation import dual_value, implicit, penalty
from sinkformer.errors import (
    ConfigError,
    DeviceError,
    DTypeError,
    NonFiniteError,
    ShapeError,
)
from sinkformer.measures import Measure, check_compatible
from sinkformer.solutions import OnFailure, Solution, Status, report

Gradient = Literal["implicit", "unrolled"]

# Problems that are done leave the batch after these many sweeps, then after twice as many, and so on.
_FIRST_STAGE = 8
# A potential that forbids its row altogether; finite, so that no infinity is subtracted from another.
_BLOCKED = 1e30


class SinkhornOptions(TypedDict, total=False):
    """Keyword arguments of :func:`sinkhorn` that do not describe the measures."""

    mask: CostMatrix | None
    tau_a: float
    tau_b: float
    tolerance: float | None
    max_iterations: int
    init: tuple[Potential, Potential] | None
    annealing: float | None
    gradient: Gradient
    on_failure: OnFailure


def sinkhorn(
    mu: Measure | Tensor,
    nu: Measure | Tensor,
    *,
    cost: Cost | Tensor = SqEuclidean(),  # noqa: B008 - stateless
    epsilon: float | PerProblem,
    mask: CostMatrix | None = None,
    tau_a: float = 1.0,
    tau_b: float = 1.0,
    tolerance: float | None = None,
    max_iterations: int = 2000,
    init: tuple[Potential, Potential] | None = None,
    annealing: float | None = 0.7,
    gradient: Gradient = "implicit",
    on_failure: OnFailure = "warn",
) -> Solution:
    """Solve one entropic transport problem, or a batch of them, in the log domain.

    Every problem of a batch has its own stopping test and does not depend on its neighbours. Sums are taken in float32
    for float32 and half inputs, in float64 for float64. A problem with mu = nu and a symmetric cost is recognised and
    solved by averaged updates, so that f = g exactly.

    Args:
        mu: source, ``(*batch, n)`` atoms; or its weights alone, ``(*batch, n)``, if the cost is a matrix.
        nu: target, ``(*batch, m)`` atoms, or its weights alone; dtype, device and batch shape of ``mu``.
        cost: a ``Cost``, or a cost matrix of shape ``(*batch, n, m)``. Any real values; ``+inf`` forbids a pair.
        epsilon: strength of the entropy, > 0, in the units of the cost; a number or shape ``(*batch)``.
        mask: added to the cost, broadcast to ``(*batch, n, m)``; ``+inf`` forbids a pair. See ``costs.forbid``.
        tau_a: rho_a / (rho_a + epsilon) in [0, 1] for the source marginal; 1 is the hard constraint.
        tau_b: the same for the target marginal.
        tolerance: marginal error (L1, both marginals) to reach; default 1e-4 in float32, 1e-9 in float64. 0 runs all iterations.
        max_iterations: most sweeps spent on a problem.
        init: potentials ``(f, g)`` to start from, for example those of a solution nearby; switches annealing off.
        annealing: epsilon starts at the range of the cost and shrinks by this factor at every sweep; None starts at
            epsilon itself. Without effect on the solution; always off with ``gradient="unrolled"``.
        gradient: ``"implicit"`` differentiates the solution (memory independent of the iterations), ``"unrolled"`` the
            iterations themselves, for which the graph keeps all of them.
        on_failure: what a problem without convergence does: one warning naming the worst problem, an error, or nothing.

    Returns:
        The ``Solution``.

    Raises:
        ConfigError: an option outside its range.
        DTypeError, DeviceError, ShapeError: arguments that do not fit together.
        InfeasibleError: no coupling avoids the forbidden pairs, unless ``on_failure="ignore"``.
        NonFiniteError: a given cost matrix or mask holds NaN or -inf between atoms of positive weight, unless
            ``on_failure="ignore"``.
        ConvergenceError: not converged, with ``on_failure="raise"``.
    """
    mu, nu = as_measure(mu), as_measure(nu)
    check_compatible(mu, nu)
    cost = as_cost(cost)
    _check_options(tau_a, tau_b, tolerance, max_iterations, annealing, gradient, on_failure)
    matrix, scale = cost_matrix(mu, nu, cost, mask), check_epsilon(epsilon, mu)
    wide = potential_dtype(mu.device)
    if tolerance is None:
        tolerance = marginal_tolerance(working_dtype(mu.dtype))

    batch, taus = mu.batch_shape, (float(tau_a), float(tau_b))
    problem = _Problem(
        matrix.reshape(-1, mu.n, nu.n),
        mu.weights.reshape(-1, mu.n),
        nu.weights.reshape(-1, nu.n),
        scale.reshape(-1),
        taus,
    )
    with torch.autocast(mu.device.type, enabled=False):
        solution = problem.solve(
            tolerance=tolerance,
            max_iterations=max_iterations,
            init=None if init is None else _check_init(init, mu, nu, wide),
            annealing=None if init is not None or gradient == "unrolled" else annealing,
            unrolled=gradient == "unrolled",
        )
    solution = solution.map(lambda t: t.reshape((*batch, *t.shape[1:])))
    report(solution, on_failure)
    return solution


def as_measure(mu: Measure | Tensor) -> Measure:
    """A measure as it is; bare weights ``(*batch, n)`` become one whose points carry no information."""
    return (
        mu if isinstance(mu, Measure) or not isinstance(mu, Tensor) else Measure(torch.zeros_like(mu).unsqueeze(-1), mu)
    )


def cost_matrix(mu: Measure, nu: Measure, cost: Cost, mask: CostMatrix | None) -> CostMatrix:
    """Cost of every pair with the mask added, ``(*batch, n, m)``, in the dtype of potentials.

    Coordinates of any precision are read as exact numbers: evaluated more coarsely, C and its transpose would differ by
    rounding, which epsilon divides.
    """
    shape, wide = (*mu.batch_shape, mu.n, nu.n), potential_dtype(mu.device)
    cost.check_shape(shape)
    with torch.autocast(mu.device.type, enabled=False):
        matrix = cost(mu.points.to(wide), nu.points.to(wide)).to(wide)
    if matrix.device != mu.device:
        raise DeviceError(f"expected the cost on {mu.device} as the measures, received it on {matrix.device}")
    return matrix if mask is None else matrix + check_mask(mask, shape).to(wide)


def check_mask(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Raise unless ``mask`` is an additive mask for problems of this shape; returns it expanded."""
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        received = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise DTypeError(
            f"expected an additive floating-point mask (+inf forbids a pair), received {received}; "
            f"convert a boolean tensor of forbidden pairs with costs.forbid(pairs)"
        )
    if mask.dim() > len(shape) or any(
        have not in (1, want) for have, want in zip(mask.shape[::-1], shape[::-1], strict=False)
    ):
        raise ShapeError(f"expected a mask that broadcasts to {shape}, received {tuple(mask.shape)}")
    return mask.expand(shape)


def check_epsilon(epsilon: float | Tensor, mu: Measure) -> Tensor:
    """Epsilon as a positive, finite tensor of the batch shape, in the dtype of potentials."""
    scale = torch.as_tensor(epsilon, device=mu.device)
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise ConfigError(f"expected epsilon positive and finite, received {epsilon}")
    if scale.dim() and scale.shape != mu.batch_shape:
        raise ShapeError(
            f"expected epsilon as a number or of shape {tuple(mu.batch_shape)}, received {tuple(scale.shape)}"
        )
    return scale.to(potential_dtype(mu.device)).expand(mu.batch_shape)


def _check_options(tau_a, tau_b, tolerance, max_iterations, annealing, gradient, on_failure) -> None:
    for name, tau in (("tau_a", tau_a), ("tau_b", tau_b)):
        if not 0 <= tau <= 1:
            raise ConfigError(f"expected {name} = rho / (rho + epsilon) between 0 and 1, received {tau}")
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise ConfigError(f"expected a tolerance >= 0 (L1 marginal error), received {tolerance}")
    if max_iterations != int(max_iterations) or max_iterations < 1:
        raise ConfigError(f"expected max_iterations >= 1, received {max_iterations}")
    if annealing is not None and not 0 < annealing < 1:
        raise ConfigError(f"expected an annealing factor between 0 and 1, or None, received {annealing}")
    if gradient not in ("implicit", "unrolled"):
        raise ConfigError(f"expected gradient 'implicit' or 'unrolled', received {gradient!r}")
    if on_failure not in ("warn", "raise", "ignore"):
        raise ConfigError(f"expected on_failure 'warn', 'raise' or 'ignore', received {on_failure!r}")


def _check_init(init: Any, mu: Measure, nu: Measure, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    f, g = init
    if f.shape != mu.weights.shape or g.shape != nu.weights.shape:
        raise ShapeError(
            f"expected init potentials of shapes {tuple(mu.weights.shape)} and {tuple(nu.weights.shape)}, "
            f"received {tuple(f.shape)} and {tuple(g.shape)}"
        )
    if not bool(torch.isfinite(f).all() and torch.isfinite(g).all()):
        raise NonFiniteError("expected finite init potentials, received a NaN or infinity; start cold with init=None")
    return f.detach().to(dtype).reshape(-1, mu.n), g.detach().to(dtype).reshape(-1, nu.n)


@dataclass
class _Problem:
    """A flat batch: cost ``(B, n, m)``, weights ``(B, n)`` and ``(B, m)``, epsilon ``(B,)`` in the potentials' dtype."""

    cost: Tensor
    a: Tensor
    b: Tensor
    epsilon: Tensor
    taus: tuple[float, float]

    def solve(
        self,
        *,
        tolerance: float,
        max_iterations: int,
        init: tuple[Tensor, Tensor] | None,
        annealing: float | None,
        unrolled: bool,
    ) -> Solution:
        wide, work = self.epsilon.dtype, working_dtype(self.a.dtype)
        given_a, given_b = self.a.to(wide), self.b.to(wide)
        # The two totals differ by the rounding of the inputs, and the dual drifts by that difference at every sweep.
        a, b = given_a / given_a.sum(-1, keepdim=True), given_b / given_b.sum(-1, keepdim=True)
        cost = self.cost
        live = (a > 0).unsqueeze(-1) & (b > 0).unsqueeze(-2)
        nonfinite = (live & (torch.isnan(cost) | (cost == -torch.inf))).flatten(1).any(-1)
        # Between paddings, or in a problem that is lost, a cost that is not finite must not spread.
        spoiled = torch.isnan(cost) | (cost == -torch.inf) | nonfinite.view(-1, 1, 1)
        cost = cost.masked_fill(spoiled, 0.0)

        with torch.set_grad_enabled(unrolled and torch.is_grad_enabled()):
            loop = _Sweeps(cost, a, b, self.epsilon, self.taus, work, annealing)
            half = 0.5 if work == torch.float32 else 1.0  # room for the rounding of the loop, measured in float64 below
            f, g, iterations = loop.run(tolerance * half, max_iterations, init)

        with torch.no_grad():
            detached = [t.detach() for t in (cost, a, b, self.epsilon, f, g)]
            error, gap = _quality(*detached, self.taus)
            codes = torch.where(error <= tolerance, int(Status.CONVERGED), int(Status.MAX_ITERATIONS))
            if tolerance == 0:
                codes = torch.where(error <= marginal_tolerance(work), int(Status.CONVERGED), codes)
            codes = self._find_infeasible(codes, *detached[:3])
            codes = codes.masked_fill(nonfinite, int(Status.NONFINITE)).to(torch.int8)
            error = error.masked_fill(nonfinite, torch.nan)
            gap = gap.masked_fill(nonfinite, torch.nan)

        if unrolled:
            value = dual_value(cost, a, b, self.epsilon, f, g, self.taus)
        else:
            f, g, value = implicit(cost, a, b, self.epsilon, f.detach(), g.detach(), self.taus)
        if self.taus == (1.0, 1.0):
            shift = ((a * f).sum(-1) - (b * g).sum(-1)).unsqueeze(-1) / 2
            f, g = f - shift, g + shift
        lost = nonfinite.unsqueeze(-1)
        value = value.masked_fill(nonfinite, torch.nan).to(working_dtype(self.a.dtype))
        return Solution(
            f.masked_fill(lost, torch.nan),
            g.masked_fill(lost, torch.nan),
            value,
            error,
            gap,
            iterations,
            codes,
            tolerance,
            self.taus,
        )

    def _find_infeasible(self, codes: Tensor, cost: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Mark the problems, among those not converged, whose marginals cannot be met on the allowed pairs.

        Such marginals exist exactly if a maximal flow through the allowed pairs carries all the mass (Hall, Strassen).
        """
        if self.taus != (1.0, 1.0):
            return codes
        codes = codes.clone()
        live = (a > 0).unsqueeze(-1) & (b > 0).unsqueeze(-2)
        suspects = (codes != int(Status.CONVERGED)) & (live & torch.isinf(cost)).flatten(1).any(-1)
        for k in suspects.nonzero().flatten().tolist():
            if not _feasible((live[k] & ~torch.isinf(cost[k])).cpu().numpy(), a[k].cpu().numpy(), b[k].cpu().numpy()):
                codes[k] = int(Status.INFEASIBLE)
        return codes
        codes = codes.clone()
        forbidden = torch.isinf(cost) & (a > 0).unsqueeze(-1) & (b > 0).unsqueeze(-2)
        suspects = (codes != int(Status.CONVERGED)) & forbidden.flatten(1).any(-1)
        for k in suspects.nonzero().flatten().tolist():
            rows, columns = a[k] > 0, b[k] > 0
            p, q = a[k][rows].double(), b[k][columns].double()
            indicator = forbidden[k][rows][:, columns].double()
            if bool((indicator.min(-1).values > 0).any() or (indicator.min(-2).values > 0).any()):
                codes[k] = int(Status.INFEASIBLE)
                continue
            stuck = float(ot.emd2((p / p.sum()).cpu().numpy(), (q / q.sum()).cpu().numpy(), indicator.cpu().numpy()))
            if stuck > 1e-9:
                codes[k] = int(Status.INFEASIBLE)
        return codes


class _Sweeps:
    """The iteration: updates of g and of f in turn, every problem stopping by itself.

    Costs enter centred, by a row and a column offset, so that what is divided by epsilon is as small as it can be; the
    offsets are added back to the potentials in float64.
    """

    def __init__(
        self,
        cost: Tensor,
        a: Tensor,
        b: Tensor,
        epsilon: Tensor,
        taus: tuple[float, float],
        work: torch.dtype,
        annealing: float | None,
    ):
        self.taus, self.work, self.annealing = taus, work, annealing
        self.a, self.b, self.epsilon = a, b, epsilon
        self.log_a, self.log_b = safe_log(a), safe_log(b)
        allowed = cost.detach() < torch.inf
        self.row_offset = _smallest(cost.detach(), allowed & (b > 0).unsqueeze(-2))
        reduced = cost.detach() - self.row_offset.unsqueeze(-1)
        self.column_offset = _smallest(reduced.mT, (allowed & (a > 0).unsqueeze(-1)).mT)
        if taus != (1.0, 1.0):  # offsets are a gauge of couplings only
            self.row_offset, self.column_offset = (
                torch.zeros_like(self.row_offset),
                torch.zeros_like(self.column_offset),
            )
        self.symmetric = _symmetric(cost.detach(), a.detach(), b.detach(), taus)
        if bool(self.symmetric.any()):
            same, shared = (
                self.symmetric.unsqueeze(-1),
                self.row_offset / 2,
            )  # one offset for both sides keeps the symmetry
            self.row_offset = torch.where(same, shared, self.row_offset)
            self.column_offset = torch.where(same, shared, self.column_offset)
        # A finite stand-in for +inf: its weight in a sum is zero all the same, and its derivative zero instead of NaN.
        self.wide_cost = cost.masked_fill(~allowed, _BLOCKED)
        centred = cost - self.row_offset.unsqueeze(-1) - self.column_offset.unsqueeze(-2)
        self.cost = centred.masked_fill(~allowed, _BLOCKED).to(work)
        live = allowed & (a > 0).unsqueeze(-1) & (b > 0).unsqueeze(-2)
        inside = self.cost.detach().masked_fill(~live, 0.0)
        self.range = (inside.amax((-1, -2)) - inside.amin((-1, -2))).to(epsilon.dtype)

    def run(
        self, tolerance: float, max_iterations: int, init: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``(f, g, iterations)``, potentials wide and uncentred, f an exact update of g unless symmetric."""
        batch = len(self.epsilon)
        start = self.epsilon if self.annealing is None else torch.maximum(self.epsilon, self.range)
        state = {
            "temperature": start,
            "g": self._start(init).to(self.work),
            "f": torch.zeros(batch, self.cost.shape[-2], dtype=self.work, device=self.cost.device),
            "iterations": torch.zeros(batch, dtype=torch.int64, device=self.cost.device),
            "done": torch.zeros(batch, dtype=torch.bool, device=self.cost.device),
        }
        data = {
            "cost": self.cost,
            "log_a": self.log_a.to(self.work),
            "log_b": self.log_b.to(self.work),
            "b": self.b.to(self.work),
            "epsilon": self.epsilon,
            "symmetric": self.symmetric,
        }
        state = self._first_half(data, state)
        if torch.is_grad_enabled():
            state = self._stage(data, state, max_iterations, max_iterations, tolerance)
        else:
            # Problems that are done leave the batch between stages.
            alive, spent, length = torch.arange(batch, device=self.cost.device), 1, _FIRST_STAGE
            while len(alive) and spent < max_iterations:
                part = {name: t[alive] for name, t in state.items()}
                part = self._stage(
                    {name: t[alive] for name, t in data.items()}, part, length, max_iterations, tolerance
                )
                state = {name: t.index_copy(0, alive, part[name]) for name, t in state.items()}
                spent, length = spent + length, 2 * length
                alive = (~state["done"]).nonzero().flatten()
        return self._finish(state)

    def _start(self, init: tuple[Tensor, Tensor] | None) -> Tensor:
        if init is None:
            return torch.zeros_like(self.column_offset)
        return init[1] - self.column_offset

    def _first_half(self, data: dict, state: dict) -> dict:
        temperature = state["temperature"].to(self.work)
        f = self._half(data["cost"], state["g"], data["log_b"], temperature, self.taus[0])
        same = data["symmetric"].unsqueeze(-1)
        if bool(data["symmetric"].any()):
            f = torch.where(same, state["g"], f)
        return {**state, "f": f, "iterations": state["iterations"] + 1}

    def _stage(self, data: dict, state: dict, sweeps: int, max_iterations: int, tolerance: float) -> dict:
        """Up to ``sweeps`` further sweeps; a problem that is done keeps its potentials."""
        tau_a, tau_b = self.taus
        f, g, done, iterations = state["f"], state["g"], state["done"], state["iterations"]
        temperature, target = state["temperature"], data["epsilon"]
        same = data["symmetric"].unsqueeze(-1)
        any_same = bool(data["symmetric"].any())
        costs_t = data["cost"].mT
        for _ in range(sweeps):
            current = temperature.to(self.work)
            proposal = self._half(costs_t, f, data["log_a"], current, tau_b)
            error = self._violation(g, proposal, data["b"], current)
            if any_same:
                error = torch.where(data["symmetric"], 2 * error, error)
            done = done | ((error <= tolerance) & (temperature == target))
            # The next sweep may be one too many for the count.
            exhausted = iterations >= max_iterations
            frozen = (done | exhausted).unsqueeze(-1)
            if bool(frozen.all()):
                break
            if self.annealing is not None:
                temperature = torch.maximum(target, temperature * self.annealing)
            lower = temperature.to(self.work)
            g_next = torch.where(same, (g + proposal) / 2, proposal) if any_same else proposal
            f_next = self._half(data["cost"], g_next, data["log_b"], lower, tau_a)
            if any_same:
                f_next = torch.where(same, g_next, f_next)
            f, g = torch.where(frozen, f, f_next), torch.where(frozen, g, g_next)
            iterations = torch.where(frozen.squeeze(-1), iterations, iterations + 1)
        done = done | (iterations >= max_iterations)
        return {"f": f, "g": g, "done": done, "iterations": iterations, "temperature": temperature}

    def _half(self, cost: Tensor, potential: Tensor, log_weights: Tensor, temperature: Tensor, tau: float) -> Tensor:
        if tau == 0:
            return torch.zeros_like(cost[..., 0])
        update = tau * ops.softmin(cost, potential, log_weights, temperature)
        # A row without any allowed pair: no mass in a penalised problem, no information otherwise.
        return update.masked_fill(update > tau * _BLOCKED / 2, _BLOCKED if tau < 1 else 0.0)

    def _violation(self, g: Tensor, proposal: Tensor, b: Tensor, temperature: Tensor) -> Tensor:
        """L1 violation of the target's condition by the current pair (f, g), from the update it would make."""
        tau = self.taus[1]
        if tau == 0:
            return torch.zeros_like(temperature)
        g, proposal, scale = g.detach(), proposal.detach(), temperature.detach().unsqueeze(-1)
        rho = penalty(tau, scale)
        wanted = b.detach() if rho is None else b.detach() * torch.exp(-g / rho)
        log_ratio = ((g - proposal) / (tau * scale)).masked_fill(b == 0, 0.0)
        return (wanted * torch.expm1(log_ratio.clamp_max(80.0)).abs()).sum(-1)

    def _finish(self, state: dict) -> tuple[Tensor, Tensor, Tensor]:
        wide = self.epsilon.dtype
        f, g = state["f"].to(wide) + self.row_offset, state["g"].to(wide) + self.column_offset
        # One more update of f, in float64: the source marginal is exact to rounding. It moves nothing but the rounding of
        # the loop, unless the iteration ended during annealing. A symmetric pair stays symmetric.
        polished = self._half(self.wide_cost, g, self.log_b, self.epsilon, self.taus[0])
        f = torch.where(self.symmetric.unsqueeze(-1), f, polished)
        return f, g, state["iterations"]


def _feasible(allowed: np.ndarray, a: np.ndarray, b: np.ndarray) -> bool:
    """Whether some plan on the allowed pairs has marginals a and b, to the accuracy of integer capacities."""
    n, m = allowed.shape
    unit = 2**30  # capacities are 32-bit; every one is rounded by half a unit at most
    rows, columns = allowed.nonzero()
    tails = np.concatenate([np.zeros(n, int), 1 + rows, 1 + n + np.arange(m)])
    heads = np.concatenate([1 + np.arange(n), 1 + n + columns, np.full(m, n + m + 1)])
    capacities = np.concatenate([a * unit, np.full(len(rows), unit), b * unit]).round().astype(np.int32)
    graph = csr_array((capacities, (tails, heads)), shape=(n + m + 2, n + m + 2))
    return unit - maximum_flow(graph, 0, n + m + 1).flow_value <= n + m


def _smallest(cost: Tensor, allowed: Tensor) -> Tensor:
    """Smallest allowed entry of each row; zero for a row without any."""
    least = cost.masked_fill(~allowed, torch.inf).amin(-1)
    return least.masked_fill(torch.isinf(least), 0.0)


def _symmetric(cost: Tensor, a: Tensor, b: Tensor, taus: tuple[float, float]) -> Tensor:
    """Which problems are unchanged by exchanging source and target."""
    if cost.shape[-1] != cost.shape[-2] or taus[0] != taus[1]:
        return torch.zeros(len(cost), dtype=torch.bool, device=cost.device)
    return (a == b).all(-1) & (cost == cost.mT).flatten(1).all(-1)


def _quality(
    cost: Tensor, a: Tensor, b: Tensor, epsilon: Tensor, f: Tensor, g: Tensor, taus: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """``(marginal error, duality gap)`` of potentials, measured on the plan in float64."""
    plan = a.unsqueeze(-1) * b.unsqueeze(-2) * ops.density(cost, f, g, a, b, epsilon)
    p, q = ops.marginals(plan)
    rho_a, rho_b = (penalty(tau, epsilon) for tau in taus)
    error = torch.zeros_like(epsilon)
    for have, want, potential, rho in ((p, a, f, rho_a), (q, b, g, rho_b)):
        if rho is None:
            error = error + (have - want).abs().sum(-1)
        elif bool((rho > 0).all()):
            error = error + (have - want * torch.exp(-potential / rho.unsqueeze(-1))).abs().sum(-1)
    balanced = taus == (1.0, 1.0)
    feasible = _rounded(plan, a, b) if balanced else plan
    primal = primal_value(feasible, cost, a, b, epsilon, taus)
    return error, primal - dual_value(cost, a, b, epsilon, f, g, taus)


def primal_value(
    plan: Tensor, cost: Tensor, a: Tensor, b: Tensor, epsilon: Tensor, taus: tuple[float, float]
) -> Tensor:
    """<C, P> + epsilon KL(P | a (x) b) + the penalties, per problem; ``+inf`` for mass on a forbidden pair."""
    used = torch.where(plan > 0, plan * torch.where(plan > 0, cost, 0.0), 0.0).sum((-1, -2))
    value = used + epsilon * relative_entropy(plan, a.unsqueeze(-1) * b.unsqueeze(-2), (-1, -2))
    for have, want, tau in zip(ops.marginals(plan), (a, b), taus, strict=True):
        rho = penalty(tau, epsilon)
        if rho is not None:
            value = value + rho * relative_entropy(have, want, (-1,))
    return value


def _rounded(plan: Tensor, a: Tensor, b: Tensor) -> Tensor:
    def apply(matrix: Tensor, v: Tensor) -> Tensor:
        return (matrix @ v.unsqueeze(-1)).squeeze(-1)

    r, c, left, right = ops.rounding(lambda v: apply(plan, v), lambda u: apply(plan.mT, u), a, b)
    return plan * r.unsqueeze(-1) * c.unsqueeze(-2) + left.unsqueeze(-1) * right.unsqueeze(-2)
