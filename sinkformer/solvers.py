"""The entropic transport problem: its arguments, its solution, the quality of the solution.

    minimise  <C, P> + epsilon KL(P | a (x) b) + rho_a KL(P 1 | a) + rho_b KL(P^T 1 | b)

over non-negative P, with KL(p | q) = sum p log(p/q) - p + q. A penalty is given as tau = rho / (rho + epsilon):
tau = 1 is the hard constraint (a coupling), tau = 0 no constraint at all. The solution is

    P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon),     f = -tau_a epsilon LSE_j((g_j - C_ij) / epsilon + log b_j),

and the same for g (Cuturi 2013; Chizat, Peyre, Schmitzer, Vialard 2018 for the penalties; arXiv 2603.25860 for the
layer). The weights stand outside the exponential, so potentials are functions on the space: defined at atoms of weight
zero, and unchanged when an atom is split. Gauge for couplings: <a, f> = <b, g>.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from sinkformer import ops, semidual, streamed
from sinkformer._numerics import marginal_tolerance, penalty, potential_dtype, safe_divide, working_dtype
from sinkformer._typing import CostMatrix, PerProblem, Potential
from sinkformer.certificates import gap_bound, penalised_gap
from sinkformer.costs import Cost, Matrix, SqEuclidean, as_cost
from sinkformer.differentiation import LinearSolve, conjugate, dual_value, implicit
from sinkformer.errors import (
    ConfigError,
    DeviceError,
    DTypeError,
    NonFiniteError,
    ShapeError,
)
from sinkformer.feasibility import infeasible
from sinkformer.measures import Measure, check_compatible
from sinkformer.ops import dispatch
from sinkformer.solutions import OnFailure, Solution, Status, report
from sinkformer.sweeps import LARGEST_COST, Loop

Gradient = Literal["implicit", "unrolled"]

# Tolerances below are beyond the sums of float32, whose problems the compiled kernels then solve in float64.
_LEAST_IN_FLOAT32 = 2e-5
# Compiled sweeps before Newton's method: at most so many, for small problems this times (min(n, m) - 1)^2, and never the
# steps that Newton's method may need.
_MOST_BEFORE_NEWTON, _PATIENCE, _NEWTON_STEPS = 4000, 16, 60
# Sweeps after which a problem with forbidden pairs is asked whether it has a solution: the easy ones are done by then.
_MASKED_BUDGET = 50


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
    gradient_tolerance: float | None
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
    gradient_tolerance: float | None = None,
    on_failure: OnFailure = "warn",
) -> Solution:
    """Solve one entropic transport problem, or a batch of them, with the engine that suits it (``sinkformer.explain``).

    Every problem of a batch has its own stopping test and does not depend on its neighbours. Sums are taken in float32
    or float64 for float32 and half inputs, in float64 for float64. A problem with mu = nu and a symmetric cost is recognised and
    solved by averaged updates, so that f = g exactly (not with ``gradient="unrolled"``).

    Args:
        mu: source, ``(*batch, n)`` atoms; or its weights alone, ``(*batch, n)``, if the cost is a matrix.
        nu: target, ``(*batch, m)`` atoms, or its weights alone; dtype, device and batch shape of ``mu``.
        cost: a ``Cost``, or a cost matrix of shape ``(*batch, n, m)``. Any sign, up to 1e29; ``+inf`` forbids a pair.
        epsilon: strength of the entropy, > 0, in the units of the cost; a number or shape ``(*batch)``.
        mask: added to the cost, broadcast to ``(*batch, n, m)``; ``+inf`` forbids a pair. See ``costs.forbid``.
        tau_a: rho_a / (rho_a + epsilon) in [0, 1] for the source marginal; 1 is the hard constraint.
        tau_b: the same for the target marginal.
        tolerance: marginal error (L1, both marginals) to reach; default 1e-4 in float32, 1e-9 in float64. 0 runs all
            iterations, and ending there is no failure.
        max_iterations: most sweeps and Newton steps spent on a problem.
        init: potentials ``(f, g)`` to start from, for example those of a solution nearby; switches annealing off.
        annealing: of the engine "reference": epsilon starts at the range of the cost and shrinks by this factor at every
            sweep; None starts at epsilon itself. Without effect on the solution; off with ``gradient="unrolled"``.
        gradient: ``"implicit"`` differentiates the solution (memory independent of the iterations), ``"unrolled"`` the
            iterations themselves, for which the graph keeps all of them, and for which an atom of weight zero is padding.
        gradient_tolerance: relative error asked of implicit derivatives of plan and potentials: the residual of their
            linear solve, and ten times the most that ``tolerance`` may be. By default that residual is ``tolerance``.
        on_failure: what a problem without convergence does: one warning naming the worst problem, an error, or nothing.

    Returns:
        The ``Solution``.

    Raises:
        ConfigError: an option outside its range.
        DTypeError, DeviceError, ShapeError: arguments that do not fit together.
        InfeasibleError: no coupling avoids the forbidden pairs, unless ``on_failure="ignore"``.
        NonFiniteError: the cost of a pair of atoms of positive weight is NaN, -inf or beyond 1e29, unless
            ``on_failure="ignore"``.
        ConvergenceError: not converged, with ``on_failure="raise"``.
    """
    return sinkhorn_and_costs(
        mu,
        nu,
        cost=cost,
        epsilon=epsilon,
        mask=mask,
        tau_a=tau_a,
        tau_b=tau_b,
        tolerance=tolerance,
        max_iterations=max_iterations,
        init=init,
        annealing=annealing,
        gradient=gradient,
        gradient_tolerance=gradient_tolerance,
        on_failure=on_failure,
    )[0]


def sinkhorn_and_costs(
    mu: Measure | Tensor,
    nu: Measure | Tensor,
    *,
    cost: Cost | Tensor,
    epsilon: float | PerProblem,
    mask: CostMatrix | None = None,
    tau_a: float = 1.0,
    tau_b: float = 1.0,
    tolerance: float | None = None,
    max_iterations: int = 2000,
    init: tuple[Potential, Potential] | None = None,
    annealing: float | None = 0.7,
    gradient: Gradient = "implicit",
    gradient_tolerance: float | None = None,
    on_failure: OnFailure = "warn",
) -> tuple[Solution, CostMatrix | None]:
    """What :func:`sinkhorn` returns, and the matrix of costs ``(*batch, n, m)`` where the graph keeps it anyway."""
    cost = as_cost(cost)
    check_weights_have_costs(mu, nu, cost)
    mu, nu = as_measure(mu), as_measure(nu)
    check_compatible(mu, nu)
    _check_options(tau_a, tau_b, tolerance, max_iterations, annealing, gradient, gradient_tolerance, on_failure)
    scale, wide = check_epsilon(epsilon, mu), potential_dtype(mu.device)
    if tolerance is None:
        tolerance = marginal_tolerance(working_dtype(mu.dtype))
    if gradient_tolerance is not None:
        tolerance = min(tolerance, gradient_tolerance / 10)

    batch, taus, unrolled = mu.batch_shape, (float(tau_a), float(tau_b)), gradient == "unrolled"
    engine = dispatch.choose(
        mu.device,
        taus,
        mu.n * nu.n,
        unrolled=unrolled,
        from_points=mask is None and not isinstance(cost, Matrix),
    )
    a, b, epsilons = mu.weights.reshape(-1, mu.n), nu.weights.reshape(-1, nu.n), scale.reshape(-1)
    options = {
        "tolerance": tolerance,
        "max_iterations": max_iterations,
        "init": None if init is None else _check_init(init, mu, nu, wide),
        "engine": engine,
        "rtol": tolerance if gradient_tolerance is None else gradient_tolerance,
    }
    with torch.autocast(mu.device.type, enabled=False):
        if engine.backend == "streamed":
            matrix = None
            solution = _streamed(_pair_costs(mu, nu, cost, mask), a, b, epsilons, taus, **options)
        else:
            matrix = cost_matrix(mu, nu, cost, mask)
            solution = _Problem(matrix.reshape(-1, mu.n, nu.n), a, b, epsilons, taus).solve(
                **options, annealing=None if init is not None or unrolled else annealing, unrolled=unrolled
            )
    solution = solution.map(lambda t: t.reshape((*batch, *t.shape[1:])))
    report(solution, on_failure)
    kept = matrix if matrix is not None and matrix.requires_grad and not isinstance(cost, Matrix) else None
    return solution, kept


def as_measure(mu: Measure | Tensor) -> Measure:
    """A measure as it is; bare weights ``(*batch, n)`` become one whose points carry no information."""
    return Measure._without_points(mu) if isinstance(mu, Tensor) else mu


def check_weights_have_costs(mu: Measure | Tensor, nu: Measure | Tensor, cost: Cost) -> None:
    """Raise if bare weights come without a cost matrix: there are no points to evaluate a cost on."""
    if (isinstance(mu, Tensor) or isinstance(nu, Tensor)) and not isinstance(cost, Matrix):
        raise ShapeError(
            f"expected measures, or weights together with a cost matrix, received weights and the cost {cost!r}; "
            f"pass cost=<tensor of shape (*batch, n, m)>, or measures with points"
        )


def cost_matrix(mu: Measure, nu: Measure, cost: Cost, mask: CostMatrix | None) -> CostMatrix:
    """Cost of every pair with the mask added, ``(*batch, n, m)``: in the dtype of potentials, a float32 matrix as it is.

    Coordinates of any precision are read as exact numbers: evaluated more coarsely, C and its transpose would differ by
    rounding, which epsilon divides.
    """
    shape, wide = (*mu.batch_shape, mu.n, nu.n), potential_dtype(mu.device)
    cost.check_shape(shape)
    with torch.autocast(mu.device.type, enabled=False):
        matrix = cost(mu.points.to(wide), nu.points.to(wide))
        matrix = matrix if matrix.dtype == torch.float32 else matrix.to(wide)
    if matrix.device != mu.device:
        raise DeviceError(f"expected the cost on {mu.device} as the measures, received it on {matrix.device}")
    return matrix if mask is None else matrix.to(wide) + check_mask(mask, shape, mu.device).to(wide)


def _pair_costs(mu: Measure, nu: Measure, cost: Cost, mask: CostMatrix | None) -> streamed.PairCosts:
    """The same for a flat batch, evaluated in blocks when asked for."""
    shape = (*mu.batch_shape, mu.n, nu.n)
    cost.check_shape(shape)
    if isinstance(cost, Matrix):
        cost = Matrix(cost.values.reshape(-1, mu.n, nu.n))
    if mask is not None:
        mask = check_mask(mask, shape, mu.device).reshape(-1, mu.n, nu.n)
    x, y = mu.points.reshape(-1, mu.n, mu.d), nu.points.reshape(-1, nu.n, nu.d)
    return streamed.PairCosts(cost, x, y, mask)


def check_mask(mask: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Raise unless ``mask`` is an additive mask for problems of this shape; returns it expanded."""
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        received = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise DTypeError(
            f"expected an additive floating-point mask (+inf forbids a pair), received {received}; "
            f"convert a boolean tensor of forbidden pairs with costs.forbid(pairs)"
        )
    if mask.device != device:
        raise DeviceError(f"expected the mask on {device} as the measures, received it on {mask.device}; use mask.to()")
    if mask.dim() > len(shape) or any(
        have not in (1, want) for have, want in zip(mask.shape[::-1], shape[::-1], strict=False)
    ):
        raise ShapeError(f"expected a mask that broadcasts to {shape}, received {tuple(mask.shape)}")
    return mask.expand(shape)


def check_epsilon(epsilon: float | Tensor, mu: Measure) -> Tensor:
    """Epsilon as a positive, finite tensor of the batch shape, in the dtype of potentials."""
    if isinstance(epsilon, bool) or not isinstance(epsilon, (Real, Tensor)):
        raise DTypeError(f"expected epsilon as a number or a tensor, received {type(epsilon).__name__}")
    # In one step: a Python number would pass through float32.
    scale = torch.as_tensor(
        epsilon if isinstance(epsilon, Tensor) else float(epsilon), dtype=potential_dtype(mu.device), device=mu.device
    )
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise ConfigError(f"expected epsilon positive and finite, received {epsilon}")
    if scale.dim() and scale.shape != mu.batch_shape:
        raise ShapeError(
            f"expected epsilon as a number or of shape {tuple(mu.batch_shape)}, received {tuple(scale.shape)}"
        )
    return scale.expand(mu.batch_shape)


def _check_options(
    tau_a, tau_b, tolerance, max_iterations, annealing, gradient, gradient_tolerance, on_failure
) -> None:
    numbers = {"tau_a": tau_a, "tau_b": tau_b, "max_iterations": max_iterations}
    given = {"tolerance": tolerance, "annealing": annealing, "gradient_tolerance": gradient_tolerance}
    numbers |= {name: x for name, x in given.items() if x is not None}
    for name, x in numbers.items():
        if isinstance(x, bool) or not isinstance(x, Real):
            raise ConfigError(f"expected {name} as a number, received {x!r}")
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
    if gradient_tolerance is not None and not 0 < gradient_tolerance < 1:
        raise ConfigError(f"expected a gradient tolerance between 0 and 1, received {gradient_tolerance}")
    if on_failure not in ("warn", "raise", "ignore"):
        raise ConfigError(f"expected on_failure 'warn', 'raise' or 'ignore', received {on_failure!r}")


def _check_init(init: Any, mu: Measure, nu: Measure, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if not isinstance(init, (tuple, list)) or len(init) != 2 or not all(isinstance(h, Tensor) for h in init):
        raise DTypeError(
            f"expected init as two tensors (f, g), received {type(init).__name__}; see Solution.potentials"
        )
    f, g = init
    if f.shape != mu.weights.shape or g.shape != nu.weights.shape:
        raise ShapeError(
            f"expected init potentials of shapes {tuple(mu.weights.shape)} and {tuple(nu.weights.shape)}, "
            f"received {tuple(f.shape)} and {tuple(g.shape)}"
        )
    if not all(bool((h.abs() <= LARGEST_COST).all()) for h in (f, g)):
        raise NonFiniteError(
            f"expected init potentials up to {LARGEST_COST:.0e}, received a NaN, an infinity or more; "
            f"start cold with init=None"
        )
    return f.detach().to(dtype).reshape(-1, mu.n), g.detach().to(dtype).reshape(-1, nu.n)


def _normalised(weights: Tensor, wide: torch.dtype) -> Tensor:
    """Weights of sum one in float64: two totals that differ by the rounding of the inputs let the dual drift."""
    weights = weights.to(wide)
    return weights / weights.sum(-1, keepdim=True)


def _in_gauge(f: Tensor, g: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The pair with <a, f> = <b, g>."""
    shift = ((a * f).sum(-1) - (b * g).sum(-1)).unsqueeze(-1) / 2
    return f - shift, g + shift


def _streamed(
    costs: streamed.PairCosts,
    a: Tensor,
    b: Tensor,
    epsilon: Tensor,
    taus: tuple[float, float],
    *,
    tolerance: float,
    max_iterations: int,
    init: tuple[Tensor, Tensor] | None,
    engine: dispatch.Choice,
    rtol: float,
) -> Solution:
    """A flat batch whose matrices are never made."""
    work = working_dtype(a.dtype)
    a, b = _normalised(a, epsilon.dtype), _normalised(b, epsilon.dtype)
    problem = (a, b, epsilon)
    f, g, iterations = streamed.solve(
        costs, *problem, taus, work=work, tolerance=tolerance or -1.0, max_iterations=max_iterations, init=init
    )
    if taus == (1.0, 1.0):
        f, g = _in_gauge(f, g, a.detach(), b.detach())
    error, gap, value = streamed.quality(costs, f, g, *problem, taus)
    enough = tolerance if tolerance else marginal_tolerance(work)
    codes = torch.where(error <= enough, int(Status.CONVERGED), int(Status.MAX_ITERATIONS))
    codes = codes.masked_fill(error.isnan(), int(Status.NONFINITE)).to(torch.int8)
    # Only a matrix or a mask, which are stored as they came, forbids pairs.
    if taus == (1.0, 1.0) and (costs.mask is not None or isinstance(costs.cost, Matrix)):
        for k in (codes == int(Status.MAX_ITERATIONS)).nonzero().flatten():
            if bool(infeasible(costs.matrix(k), a[k : k + 1].detach(), b[k : k + 1].detach())):
                codes[k] = int(Status.INFEASIBLE)
    how = LinearSolve(rtol, conditioning=torch.full_like(error, torch.nan))
    f, g, value = streamed.implicit(costs, *problem, f, g, value, taus, how, work=work)
    outcome = _Outcome(f, g, value, error, gap, iterations, codes)
    return _solution(outcome, a, b, tolerance, taus, work, how, engine)


def _solution(
    outcome: _Outcome,
    a: Tensor,
    b: Tensor,
    tolerance: float,
    taus: tuple[float, float],
    work: torch.dtype,
    how: LinearSolve,
    engine: dispatch.Choice,
) -> Solution:
    """The outcome, differentiable or not, in its gauge; NaN where there is no solution."""
    f, g, value, error, gap, iterations, codes = outcome
    if taus == (1.0, 1.0) and (f.requires_grad or g.requires_grad):
        # They are in their gauge; now their derivatives are.
        in_gauge = _in_gauge(f, g, a, b)
        f, g = (h.detach() + (moved - moved.detach()) for h, moved in zip((f, g), in_gauge, strict=True))
    lost = codes == int(Status.NONFINITE)
    if bool(lost.any()):
        f, g = (h.masked_fill(lost.unsqueeze(-1), torch.nan) for h in (f, g))
        value, error, gap = (t.masked_fill(lost, torch.nan) for t in (value, error, gap))
    # A lower bound beyond float32 is a lower bound all the same.
    value = value.clamp_min(torch.finfo(work).min).to(work)
    assert how.conditioning is not None
    return Solution(f, g, value, error, gap, iterations, codes, tolerance, taus, how.conditioning, engine)


class _Outcome(NamedTuple):
    """How a flat batch ended, outside the graph, in the dtype of potentials; ``codes`` are int8."""

    f: Tensor
    g: Tensor
    value: Tensor
    error: Tensor
    gap: Tensor
    iterations: Tensor
    codes: Tensor

    def put(self, index: Tensor, part: _Outcome) -> _Outcome:
        """With the problems at ``index`` replaced."""
        return _Outcome(*(whole.index_copy(0, index, new) for whole, new in zip(self, part, strict=True)))


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
        engine: dispatch.Choice,
        rtol: float,
    ) -> Solution:
        wide, work = self.epsilon.dtype, working_dtype(self.a.dtype)
        a, b = _normalised(self.a, wide), _normalised(self.b, wide)
        cost = self.cost
        graph = torch.is_grad_enabled() and any(t.requires_grad for t in (cost, a, b, self.epsilon))
        options = {"tolerance": tolerance, "max_iterations": max_iterations, "init": init, "work": work}

        if engine.backend == "cpu":
            with torch.no_grad():
                outcome = replace(self, a=a, b=b)._detached()._compiled(**options)
            cost = _cleaned(cost, a, b)[0] if graph else cost
        else:
            cost, nonfinite = _cleaned(cost.to(wide), a, b)
            name = "reference" if engine.backend == "reference" else "absorbed"
            with torch.set_grad_enabled(unrolled and torch.is_grad_enabled()):
                outcome = replace(self, cost=cost, a=a, b=b)._swept(
                    **options, annealing=annealing, unrolled=unrolled, engine=name
                )
            outcome = outcome._replace(codes=outcome.codes.masked_fill(nonfinite, int(Status.NONFINITE)))

        how = LinearSolve(rtol, engine.backend == "cpu", torch.full_like(outcome.error, torch.nan))
        f, g, value = outcome.f, outcome.g, outcome.value
        if unrolled:
            value = dual_value(cost, a, b, self.epsilon, f, g, self.taus)
        elif graph:
            f, g, value = implicit(cost, a, b, self.epsilon, f, g, value, self.taus, how)
        return _solution(outcome._replace(f=f, g=g, value=value), a, b, tolerance, self.taus, work, how, engine)

    def _detached(self) -> _Problem:
        return replace(
            self, cost=self.cost.detach(), a=self.a.detach(), b=self.b.detach(), epsilon=self.epsilon.detach()
        )

    def _at(self, index: Tensor) -> _Problem:
        return replace(self, cost=self.cost[index], a=self.a[index], b=self.b[index], epsilon=self.epsilon[index])

    def _compiled(
        self, *, tolerance: float, max_iterations: int, init: tuple[Tensor, Tensor] | None, work: torch.dtype
    ) -> _Outcome:
        """The kernels, and the absorbed sweeps with Newton's method for what they leave unsolved."""
        narrow = self.cost.dtype == torch.float32 and work == torch.float32 and not 0 < tolerance < _LEAST_IN_FLOAT32
        cost = (self.cost if narrow else self.cost.to(self.epsilon.dtype)).contiguous()
        # Newton's method needs some tens of steps whatever the size, a sweep costs the kernels next to nothing.
        handed_over = tolerance > 0 and min(self.cost.shape[1:]) <= semidual.MOST_ATOMS
        room = max_iterations - _NEWTON_STEPS if max_iterations > 2 * _NEWTON_STEPS else max_iterations

        def run(which: slice | Tensor, masked_budget: int | None) -> _Outcome:
            solved = ops.cpu.solve(
                cost[which],
                self.a[which],
                self.b[which],
                self.epsilon[which],
                tolerance=tolerance or -1.0,  # zero asks for all iterations, even past an error that happens to vanish
                budget=min(room, _MOST_BEFORE_NEWTON) if handed_over else max_iterations,
                patience=_PATIENCE if handed_over else None,
                masked_budget=masked_budget,
                start=None if init is None else init[1][which],
            )
            return _Outcome(solved.f, solved.g, solved.value, solved.error, solved.gap, solved.sweeps, solved.codes)

        outcome = run(slice(None), min(_MASKED_BUDGET, max_iterations) if tolerance else None)
        if tolerance == 0:
            enough = outcome.error <= marginal_tolerance(work)
            return outcome._replace(codes=outcome.codes.masked_fill(enough, int(Status.CONVERGED)))
        left = (outcome.codes == int(Status.MAX_ITERATIONS)).nonzero().flatten()
        if not len(left):
            return outcome
        # Couplings that do not exist: nothing is gained by iterating.
        hopeless = infeasible(self.cost[left], self.a[left], self.b[left])
        outcome.codes[left[hopeless]] = int(Status.INFEASIBLE)
        lost = left[hopeless & outcome.error[left].isinf()]
        if len(lost):  # a row or a column without mass left the kernel with nothing to measure
            problem = self._at(lost)
            problem = replace(problem, cost=_cleaned(problem.cost.to(problem.epsilon.dtype), problem.a, problem.b)[0])
            error, gap, value = problem._quality(outcome.f[lost], outcome.g[lost])
            outcome = outcome.put(
                lost, _Outcome(*(t[lost] for t in outcome))._replace(error=error, gap=gap, value=value)
            )
        left = left[~hopeless]
        stopped = (
            left[(self.cost[left] == torch.inf).flatten(1).any(-1)] if max_iterations > _MASKED_BUDGET else left[:0]
        )
        if len(stopped):
            outcome = outcome.put(stopped, run(stopped, None))
            left = left[outcome.codes[left] == int(Status.MAX_ITERATIONS)]
        if not len(left):
            return outcome
        rest = self._at(left)
        rest = replace(rest, cost=_cleaned(rest.cost.to(rest.epsilon.dtype), rest.a, rest.b)[0])
        again = rest._swept(
            tolerance=tolerance,
            max_iterations=max_iterations,
            init=(outcome.f[left], outcome.g[left]),
            work=work,
            spent=outcome.iterations[left],
        )
        # Whichever is closer to a solution; iterations were spent on both, and only the second was asked why it failed.
        better = again.error < outcome.error[left]
        merged = [
            torch.where(better.view(-1, *[1] * (new.dim() - 1)), new, old[left])
            for old, new in zip(outcome, again, strict=True)
        ]
        return outcome.put(left, _Outcome(*merged)._replace(iterations=again.iterations, codes=again.codes))

    def _swept(
        self,
        *,
        tolerance: float,
        max_iterations: int,
        init: tuple[Tensor, Tensor] | None,
        work: torch.dtype,
        annealing: float | None = None,
        unrolled: bool = False,
        engine: Literal["absorbed", "reference"] = "absorbed",
        spent: Tensor | None = None,
    ) -> _Outcome:
        """Sweeps in torch; the graph goes through them if grad mode is on. Measured in float64."""
        a, b = self.a, self.b
        loop = Loop.prepare(self.cost, a, b, self.epsilon, self.taus, work, annealing, unrolled, engine)
        # Room for the rounding of the loop, whose error is measured in float64 below.
        share = 0.5 if work == torch.float32 else 0.99
        f, g, iterations = loop.run(share * tolerance if tolerance else -1.0, max_iterations, init, spent)
        if self.taus == (1.0, 1.0):
            f, g = _in_gauge(f, g, a, b)
        with torch.no_grad():
            fixed = self._detached()
            error, gap, value = fixed._quality(f.detach(), g.detach())
            codes = torch.where(error <= tolerance, int(Status.CONVERGED), int(Status.MAX_ITERATIONS))
            if tolerance == 0:
                codes = torch.where(error <= marginal_tolerance(work), int(Status.CONVERGED), codes)
            if self.taus == (1.0, 1.0):
                suspects = (codes != int(Status.CONVERGED)).nonzero().flatten()
                hopeless = suspects[infeasible(fixed.cost[suspects], fixed.a[suspects], fixed.b[suspects])]
                codes = codes.index_fill(0, hopeless, int(Status.INFEASIBLE))
        return _Outcome(f, g, value, error, gap, iterations, codes.to(torch.int8))

    def _quality(self, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(marginal error, duality gap, dual value)`` of potentials, measured on the plan in float64."""
        cost, a, b, epsilon, taus = self.cost, self.a, self.b, self.epsilon, self.taus
        k = ops.density(cost, f, g, a, b, epsilon)
        product = a.unsqueeze(-1) * b.unsqueeze(-2)
        plan = product * k
        # Summed as k - 1: for a large epsilon that multiplies it, the difference of two masses would be rounding.
        excess = (plan - product).sum((-1, -2))
        p, q = marginals = ops.marginals(plan)
        value, error = -epsilon * excess, torch.zeros_like(epsilon)
        for have, want, potential, tau in ((p, a, f, taus[0]), (q, b, g, taus[1])):
            rho = penalty(tau, epsilon)
            value = value + (want * conjugate(potential, rho)).sum(-1)
            if rho is None:
                error = error + (have - want).abs().sum(-1)
            elif tau > 0:
                error = error + (have - want * torch.exp(-potential / rho.unsqueeze(-1))).abs().sum(-1)
        if taus != (1.0, 1.0):
            return error, penalised_gap(a, b, epsilon, (f, g), marginals, taus), value
        _, c, _, right = factors = ops.rounding(lambda v: ops.apply(plan, v), lambda u: ops.apply(plan.mT, u), a, b)
        # A forbidden pair costs nothing where nothing is added to it, and an infinity of nothing is no number.
        forbidden = cost == torch.inf
        slack = ops.apply(cost.masked_fill(forbidden, 0.0), right) - f * right.sum(-1, keepdim=True)
        slack = slack - (right * g).sum(-1, keepdim=True)
        slack = slack.masked_fill((forbidden & (right > 0).unsqueeze(-2)).any(-1), torch.inf)
        curvature = ops.apply(1 / k, safe_divide(right.square(), b * c))
        return error, gap_bound(a, b, epsilon, factors, excess, slack, curvature), value


def _cleaned(cost: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The costs without what no solver can use, and which problems are lost for it, bool ``(B,)``.

    Between paddings, or in a problem that is lost, such a cost must not spread.
    """
    if bool(cost.abs().amax() <= LARGEST_COST) if cost.numel() else True:
        return cost, torch.zeros(len(cost), dtype=torch.bool, device=cost.device)
    live = (a > 0).unsqueeze(-1) & (b > 0).unsqueeze(-2)
    unusable = ~((cost.abs() <= LARGEST_COST) | (cost == torch.inf))
    nonfinite = (live & unusable).flatten(1).any(-1)
    return cost.masked_fill(unusable | nonfinite.view(-1, 1, 1), 0.0), nonfinite
