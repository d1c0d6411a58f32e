"""A flat batch of problems: solved by one engine, measured, differentiable.

The arguments are checked; see ``solvers`` for the problem itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from sinkformer import ops, semidual, streamed
from sinkformer._numerics import marginal_tolerance, penalty, safe_divide
from sinkformer.certificates import gap_bound, penalised_gap
from sinkformer.costs import Matrix
from sinkformer.differentiation import LinearSolve, conjugate, dual_value, implicit
from sinkformer.feasibility import infeasible
from sinkformer.ops import dispatch
from sinkformer.ops.dispatch import Choice
from sinkformer.solutions import Solution, Status
from sinkformer.streamed.ranks import ALONE, Ranks
from sinkformer.sweeps import LARGEST_COST, Loop

# Epsilon over the potentials, beyond which a value in float32 would lack more than four digits.
_LARGE = 1e3
# Compiled sweeps before Newton's method: at most so many, for small problems this times (min(n, m) - 1)^2, and never the
# steps that Newton's method may need.
_MOST_BEFORE_NEWTON, _PATIENCE, _NEWTON_STEPS = 4000, 16, 60
# Sweeps after which a problem with forbidden pairs is asked whether it has a solution: the easy ones are done by then.
_MASKED_BUDGET = 50


class _Outcome(NamedTuple):
    """How a flat batch ended, outside the graph, in the dtype of potentials; ``codes`` are int8. As ``ops.cpu.Solved``."""

    f: Tensor
    g: Tensor
    error: Tensor
    gap: Tensor
    value: Tensor
    iterations: Tensor
    codes: Tensor

    def at(self, index: Tensor) -> _Outcome:
        """The problems at ``index``."""
        return _Outcome(*(t[index] for t in self))

    def put(self, index: Tensor, part: _Outcome) -> _Outcome:
        """With the problems at ``index`` replaced."""
        return _Outcome(*(whole.index_copy(0, index, new) for whole, new in zip(self, part, strict=True)))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Flat:
    """What every flat batch has.

    Attributes:
        a: weights ``(B, n)``, as they were given.
        b: weights ``(B, m)``.
        epsilon: ``(B,)``, in the dtype of potentials.
        taus: hardness of the marginals.
        tolerance: marginal error to reach; 0 runs all iterations.
        max_iterations: most iterations of a problem.
        work: dtype of the sweeps.
    """

    a: Tensor
    b: Tensor
    epsilon: Tensor
    taus: tuple[float, float]
    tolerance: float
    max_iterations: int
    work: torch.dtype

    @property
    def _ranks(self) -> Ranks:
        """Whose rows the source is made of."""
        return ALONE

    @property
    def _hard(self) -> bool:
        return self.taus == (1.0, 1.0)

    def _normalised(self) -> Self:
        """Weights of sum one in float64: two totals that differ by the rounding of the inputs let the dual drift."""
        a, b, ranks = self.a.to(self.epsilon.dtype), self.b.to(self.epsilon.dtype), self._ranks
        total = ranks.spread(ranks.collect(a.sum(-1, keepdim=True)))
        return replace(self, a=a / total, b=b / b.sum(-1, keepdim=True))

    def _in_gauge(self, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """The pair with <a, f> = <b, g>."""
        ranks = self._ranks
        shift = (ranks.collect((self.a * f).sum(-1)) - (self.b * g).sum(-1)).unsqueeze(-1) / 2
        return f - ranks.spread(shift), g + shift

    def _enough(self, error: Tensor) -> Tensor:
        """Whether an error is as small as asked for; if all iterations are asked for, as small as by default."""
        return error <= (self.tolerance or marginal_tolerance(self.work))

    def _codes(self, error: Tensor) -> Tensor:
        codes = torch.where(self._enough(error), int(Status.CONVERGED), int(Status.MAX_ITERATIONS))
        return codes.to(torch.int8)

    def _solution(self, outcome: _Outcome, how: LinearSolve, engine: Choice) -> Solution:
        """The outcome, differentiable or not, in its gauge; NaN where there is no solution."""
        f, g, error, gap, value, iterations, codes = outcome
        if self._hard and (f.requires_grad or g.requires_grad):
            # They are in their gauge; now their derivatives are.
            in_gauge = self._in_gauge(f, g)
            f, g = (h.detach() + (moved - moved.detach()) for h, moved in zip((f, g), in_gauge, strict=True))
        lost = codes == int(Status.NONFINITE)
        if bool(lost.any()):
            f, g = (h.masked_fill(lost.unsqueeze(-1), torch.nan) for h in (f, g))
            value, error, gap = (t.masked_fill(lost, torch.nan) for t in (value, error, gap))
        # A lower bound beyond float32 is a lower bound all the same.
        value = value.clamp_min(torch.finfo(self.work).min).to(self.work)
        assert how.conditioning is not None
        return Solution(f, g, value, error, gap, iterations, codes, self.tolerance, self.taus, how.conditioning, engine)


@dataclass(frozen=True, kw_only=True, eq=False)
class Streamed(_Flat):
    """A flat batch whose matrices are never made."""

    costs: streamed.PairCosts

    @property
    def _ranks(self) -> Ranks:
        return self.costs.ranks

    def solve(self, init: tuple[Tensor, Tensor] | None, engine: Choice, rtol: float) -> Solution:
        """Potentials, their quality and their derivatives; ``rtol`` is asked of the linear solves of the derivatives."""
        problem, costs, taus = self._normalised(), self.costs, self.taus
        arguments = (problem.a, problem.b, problem.epsilon)
        a, b = problem.a.detach(), problem.b.detach()
        f, g, iterations = streamed.solve(
            costs,
            *arguments,
            taus,
            work=self.work,
            tolerance=self.tolerance or -1.0,
            max_iterations=self.max_iterations,
            init=init,
        )
        if self._hard:
            f, g = replace(problem, a=a, b=b)._in_gauge(f, g)
        error, gap, value = streamed.quality(costs, f, g, *arguments, taus)
        codes = self._codes(error).masked_fill(error.isnan(), int(Status.NONFINITE))
        # Only a matrix or a mask, which are stored as they came, forbids pairs.
        if self._hard and (costs.mask is not None or isinstance(costs.cost, Matrix)):
            for k in (codes == int(Status.MAX_ITERATIONS)).nonzero().flatten():
                if bool(infeasible(costs.matrix(k), a[k : k + 1], b[k : k + 1])):
                    codes[k] = int(Status.INFEASIBLE)
        how = LinearSolve(rtol, conditioning=torch.full_like(error, torch.nan))
        f, g, value = streamed.implicit(costs, *arguments, f, g, value, taus, how, work=self.work)
        return problem._solution(_Outcome(f, g, error, gap, value, iterations, codes), how, engine)


@dataclass(frozen=True, kw_only=True, eq=False)
class Stored(_Flat):
    """A flat batch with its matrices of costs, ``(B, n, m)``."""

    cost: Tensor

    def solve(
        self,
        init: tuple[Tensor, Tensor] | None,
        engine: Choice,
        rtol: float,
        *,
        annealing: float | None = None,
        unrolled: bool = False,
    ) -> Solution:
        """Potentials, their quality and their derivatives; ``rtol`` is asked of the linear solves of the derivatives."""
        inputs = (self.cost, self.a, self.b, self.epsilon)
        problem, graph = self, torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        kernels = dispatch.kernels(engine.backend)
        if kernels is not None:
            with torch.no_grad():
                outcome = self._compiled(kernels, init)
            if graph:
                problem, _ = self._normalised()._cleaned()
        else:
            problem, nonfinite = self._wide()._normalised()._cleaned()
            name = "reference" if engine.backend == "reference" else "absorbed"
            with torch.set_grad_enabled(unrolled and torch.is_grad_enabled()):
                outcome = problem._swept(init, annealing=annealing, unrolled=unrolled, engine=name)
            outcome = outcome._replace(codes=outcome.codes.masked_fill(nonfinite, int(Status.NONFINITE)))

        how = LinearSolve(rtol, kernels, torch.full_like(outcome.error, torch.nan))
        arguments = (problem.cost, problem.a, problem.b, self.epsilon, outcome.f, outcome.g)
        if unrolled:
            outcome = outcome._replace(value=dual_value(*arguments, self.taus))
        elif graph:
            f, g, value = implicit(*arguments, outcome.value, self.taus, how)
            outcome = outcome._replace(f=f, g=g, value=value)
        return problem._solution(outcome, how, engine)

    def _at(self, index: Tensor) -> Stored:
        return replace(self, cost=self.cost[index], a=self.a[index], b=self.b[index], epsilon=self.epsilon[index])

    def _wide(self) -> Stored:
        return replace(self, cost=self.cost.to(self.epsilon.dtype))

    def _cleaned(self) -> tuple[Stored, Tensor]:
        """Costs without what no solver can use, and which problems are lost for it, bool ``(B,)``.

        Between paddings, or in a problem that is lost, such a cost must not spread.
        """
        cost = self.cost
        if not cost.numel() or bool(torch.stack(torch.aminmax(cost.detach())).abs().amax() <= LARGEST_COST):
            return self, torch.zeros(len(cost), dtype=torch.bool, device=cost.device)
        live = (self.a > 0).unsqueeze(-1) & (self.b > 0).unsqueeze(-2)
        unusable = ~((cost.abs() <= LARGEST_COST) | (cost == torch.inf))
        nonfinite = (live & unusable).flatten(1).any(-1)
        return replace(self, cost=cost.masked_fill(unusable | nonfinite.view(-1, 1, 1), 0.0)), nonfinite

    def _compiled(self, kernels: Any, init: tuple[Tensor, Tensor] | None) -> _Outcome:
        """The kernels, and others for what they leave unsolved."""
        start = None if init is None else init[1]
        if self.tolerance == 0:
            outcome = self._in_kernel(kernels, start, None)
            enough = self._enough(outcome.error)
            return outcome._replace(codes=outcome.codes.masked_fill(enough, int(Status.CONVERGED)))
        outcome = self._in_kernel(kernels, start, min(_MASKED_BUDGET, self.max_iterations))
        if not outcome.codes.count_nonzero().item():
            return outcome
        return self._normalised()._finished(kernels, outcome, start)

    def _in_kernel(self, kernels: Any, start: Tensor | None, masked_budget: int | None) -> _Outcome:
        wide, most = self.epsilon.dtype, self.max_iterations
        narrow = self.cost.dtype == self.work == torch.float32 and not 0 < self.tolerance < dispatch.LEAST_IN_FLOAT32
        # Newton's method needs some tens of steps whatever the size, a sweep costs the kernels next to nothing.
        handed_over = self.tolerance > 0 and min(self.cost.shape[1:]) <= semidual.MOST_ATOMS
        if handed_over:
            most = min(most - _NEWTON_STEPS if most > 2 * _NEWTON_STEPS else most, _MOST_BEFORE_NEWTON)
        solved = kernels.solve(
            self.cost if narrow else self.cost.to(wide),
            self.a.to(wide),
            self.b.to(wide),
            self.epsilon,
            tolerance=self.tolerance or -1.0,  # zero asks for all iterations, even past an error that happens to vanish
            budget=most,
            patience=_PATIENCE if handed_over else None,
            masked_budget=masked_budget,
            start=start,
        )
        outcome = _Outcome(*solved)
        if narrow:
            # The value is what remains of epsilon times sums of one, of which float32 has seven digits.
            size = torch.maximum(outcome.f.abs().amax(-1), outcome.g.abs().amax(-1))
            doubtful = (self.epsilon > _LARGE * size).nonzero().flatten()
            if len(doubtful):
                part = self._at(doubtful)._wide()
                again = part._in_kernel(kernels, None if start is None else start[doubtful], masked_budget)
                outcome = outcome.put(doubtful, again)
        return outcome

    def _finished(self, kernels: Any, outcome: _Outcome, start: Tensor | None) -> _Outcome:
        """What the kernels left: problems without a solution, and absorbed sweeps with Newton's method for the others."""
        left = (outcome.codes == int(Status.MAX_ITERATIONS)).nonzero().flatten()
        # Couplings that do not exist: nothing is gained by iterating.
        hopeless = infeasible(self.cost[left], self.a[left], self.b[left])
        outcome.codes[left[hopeless]] = int(Status.INFEASIBLE)
        lost = left[hopeless & outcome.error[left].isinf()]
        if len(lost):  # a row or a column without mass left the kernel with nothing to measure
            problem, _ = self._at(lost)._wide()._cleaned()
            error, gap, value = problem._quality(outcome.f[lost], outcome.g[lost])
            outcome = outcome.put(lost, outcome.at(lost)._replace(error=error, gap=gap, value=value))
        left = left[~hopeless]
        if self.max_iterations > _MASKED_BUDGET:
            stopped = left[(self.cost[left] == torch.inf).flatten(1).any(-1)]
            if len(stopped):
                resumed = self._at(stopped)._in_kernel(kernels, None if start is None else start[stopped], None)
                outcome = outcome.put(stopped, resumed)
            left = left[outcome.codes[left] == int(Status.MAX_ITERATIONS)]
        if not len(left):
            return outcome
        before = outcome.at(left)
        rest, _ = self._at(left)._wide()._cleaned()
        again = rest._swept((before.f, before.g), spent=before.iterations)
        # Whichever is closer to a solution; iterations were spent on both, and only the second was asked why it failed.
        better = again.error < before.error
        merged = [
            torch.where(better.view(-1, *[1] * (new.dim() - 1)), new, old)
            for old, new in zip(before, again, strict=True)
        ]
        return outcome.put(left, _Outcome(*merged)._replace(iterations=again.iterations, codes=again.codes))

    def _swept(
        self,
        init: tuple[Tensor, Tensor] | None,
        *,
        annealing: float | None = None,
        unrolled: bool = False,
        engine: Literal["absorbed", "reference"] = "absorbed",
        spent: Tensor | None = None,
    ) -> _Outcome:
        """Sweeps in torch; the graph goes through them if grad mode is on. Measured in float64."""
        loop = Loop.prepare(self.cost, self.a, self.b, self.epsilon, self.taus, self.work, annealing, unrolled, engine)
        # Room for the rounding of the loop, whose error is measured in float64 below.
        share = 0.5 if self.work == torch.float32 else 0.99
        goal = share * self.tolerance if self.tolerance else -1.0
        f, g, iterations = loop.run(goal, self.max_iterations, init, spent)
        if self._hard:
            f, g = self._in_gauge(f, g)
        with torch.no_grad():
            error, gap, value = self._quality(f, g)
            codes = self._codes(error)
            if self._hard:
                suspects = codes.nonzero().flatten()
                problem = self._at(suspects)
                hopeless = suspects[infeasible(problem.cost, problem.a, problem.b)]
                codes = codes.index_fill(0, hopeless, int(Status.INFEASIBLE))
        return _Outcome(f, g, error, gap, value, iterations, codes)

    def _quality(self, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``(marginal error, duality gap, dual value)`` of potentials, measured on the plan in float64."""
        cost, a, b, epsilon, taus = self.cost, self.a, self.b, self.epsilon, self.taus
        k = ops.density_of_atoms(cost, f, g, epsilon)

        def rows(v: Tensor) -> Tensor:
            return a * ops.apply(k, b * v)

        def columns(u: Tensor) -> Tensor:
            return b * ops.apply(k.mT, a * u)

        # Summed as k - 1: for a large epsilon that multiplies it, the difference of two masses would be rounding.
        excess = (a * ops.apply(k - 1, b)).sum(-1)
        p, q = marginals = rows(torch.ones_like(b)), columns(torch.ones_like(a))
        value, error = -epsilon * excess, torch.zeros_like(epsilon)
        for have, want, potential, tau in ((p, a, f, taus[0]), (q, b, g, taus[1])):
            rho = penalty(tau, epsilon)
            value = value + (want * conjugate(potential, rho)).sum(-1)
            if rho is None:
                error = error + (have - want).abs().sum(-1)
            elif tau > 0:
                error = error + (have - want * torch.exp(-potential / rho.unsqueeze(-1))).abs().sum(-1)
        if not self._hard:
            return error, penalised_gap(a, b, epsilon, (f, g), marginals, taus), value
        _, c, _, right = factors = ops.rounding(rows, columns, a, b)
        forbidden = cost == torch.inf if ops.forbids(cost) else None
        # A forbidden pair costs nothing where nothing is added to it, and an infinity of nothing is no number.
        finite = cost if forbidden is None else cost.masked_fill(forbidden, 0.0)
        slack = ops.apply(finite, right) - f * right.sum(-1, keepdim=True) - (right * g).sum(-1, keepdim=True)
        if forbidden is not None:
            slack = slack.masked_fill((forbidden & (right > 0).unsqueeze(-2)).any(-1), torch.inf)
        curvature = ops.apply(k.reciprocal_(), safe_divide(right.square(), b * c))
        return error, gap_bound(a, b, epsilon, factors, excess, slack, curvature), value
