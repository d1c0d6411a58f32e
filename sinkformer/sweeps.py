"""The log-domain iteration: updates of g and of f in turn, every problem of a batch stopping by itself.

Problems that sweeps leave unsolved are handed to Newton's method (``semidual``), and come back for the stopping test.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from sinkformer import ops, semidual
from sinkformer._numerics import penalty, safe_log
from sinkformer.feasibility import infeasible

# Problems that are done leave the batch after these many sweeps, then after twice as many, and so on.
_FIRST_STAGE = 8
# Sweeps before Newton's method is tried, and after each try.
_NEWTON_AFTER = 50
# Numbers in the Hessians held at a time: 128 MiB.
_NEWTON_ENTRIES = 2**24
# Finite stand-ins for infinity, so that none is subtracted from another: the cost of a forbidden pair, and the potential
# of an atom that may be paired with no other. The first must win against the second.
_FORBIDDEN, _ALONE = 1e30, 1e20
LARGEST_COST = 1e29


@dataclass
class State:
    """Where a flat batch of B problems stands: all tensors have leading axis B, potentials the wide dtype."""

    f: Tensor
    g: Tensor
    temperature: Tensor
    iterations: Tensor
    done: Tensor


def _at(x: Any, index: Tensor) -> Any:
    """The same dataclass with every tensor indexed along the batch."""
    picked = {field.name: getattr(x, field.name) for field in fields(x)}
    return replace(x, **{name: t[index] for name, t in picked.items() if isinstance(t, Tensor)})


@dataclass
class Loop:
    """A flat batch of problems, prepared for the iteration.

    Costs enter centred, by a row and a column offset, so that what is divided by epsilon is as small as it can be; the
    offsets are added back to the potentials in float64. ``wide_`` tensors have the dtype of potentials, the others the
    dtype of the iteration.
    """

    taus: tuple[float, float]
    annealing: float | None
    unrolled: bool
    epsilon: Tensor
    wide_cost: Tensor
    wide_a: Tensor
    wide_b: Tensor
    row_offset: Tensor
    column_offset: Tensor
    symmetric: Tensor
    cost: Tensor
    log_a: Tensor
    log_b: Tensor

    @classmethod
    def prepare(
        cls,
        cost: Tensor,
        a: Tensor,
        b: Tensor,
        epsilon: Tensor,
        taus: tuple[float, float],
        work: torch.dtype,
        annealing: float | None,
        unrolled: bool,
    ) -> Loop:
        """Centre the costs; everything in the dtype of potentials, the iteration in ``work``."""
        allowed = cost.detach() < torch.inf
        row_offset = _smallest(cost.detach(), allowed & (b > 0).unsqueeze(-2))
        reduced = cost.detach() - row_offset.unsqueeze(-1)
        column_offset = _smallest(reduced.mT, (allowed & (a > 0).unsqueeze(-1)).mT)
        # Iterations that are differentiated are the model itself: they do not change with a symmetry of the input.
        symmetric = _symmetric(cost.detach(), a.detach(), b.detach(), taus) & (not unrolled)
        if bool(symmetric.any()):
            # One offset for both sides keeps the symmetry; the mean takes out the rounding of a matrix product.
            same, shared = symmetric.unsqueeze(-1), row_offset / 2
            cost = torch.where(same.unsqueeze(-1), (cost + cost.mT) / 2, cost)
            row_offset, column_offset = torch.where(same, shared, row_offset), torch.where(same, shared, column_offset)
        if taus != (1.0, 1.0):  # offsets are a gauge of couplings only
            row_offset, column_offset = 0 * row_offset, 0 * column_offset
        # A finite stand-in for +inf: its weight in a sum is zero all the same, and its derivative zero instead of NaN.
        centred = cost - row_offset.unsqueeze(-1) - column_offset.unsqueeze(-2)
        centred = centred.masked_fill(~allowed, _FORBIDDEN)
        return cls(
            taus=taus,
            annealing=annealing,
            unrolled=unrolled,
            epsilon=epsilon,
            wide_cost=centred,
            wide_a=a,
            wide_b=b,
            row_offset=row_offset,
            column_offset=column_offset,
            symmetric=symmetric,
            cost=centred.to(work),
            log_a=safe_log(a).to(work),
            log_b=safe_log(b).to(work),
        )

    def run(
        self, tolerance: float, max_iterations: int, init: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``(f, g, iterations)``: potentials of the given costs, f an exact update of g unless symmetric."""
        state = self._start(init)
        if self.unrolled:
            return self._finish(self._sweep(state, max_iterations, max_iterations, tolerance))
        alive, spent, length = torch.arange(len(self.epsilon), device=self.cost.device), 1, _FIRST_STAGE
        asked = False
        while len(alive) and spent < max_iterations:
            if spent > _NEWTON_AFTER and not asked:
                # Not worth asking before the easy ones have left.
                state.done[alive[_at(self, alive)._hopeless()]] = asked = True
                alive = (~state.done).nonzero().flatten()
                continue
            part, problems = _at(state, alive), _at(self, alive)
            if spent > _NEWTON_AFTER:
                part = problems._newton(part, tolerance, max_iterations)
            part = problems._sweep(part, length, max_iterations, tolerance)
            state = State(*(getattr(state, x.name).index_copy(0, alive, getattr(part, x.name)) for x in fields(State)))
            spent, length = spent + length, 2 * length
            alive = (~state.done).nonzero().flatten()
        return self._finish(state)

    def _start(self, init: tuple[Tensor, Tensor] | None) -> State:
        # Unrolled, the start is g = 0 itself: an offset is a function of the cost, and would have to be differentiated.
        if init is None and not self.unrolled:
            g = torch.zeros_like(self.column_offset)
        else:
            g = (torch.zeros_like(self.column_offset) if init is None else init[1]) - self.column_offset
        temperature = self.epsilon
        if self.annealing is not None and min(self.taus) > 0:  # one side alone is solved by one update
            temperature = torch.maximum(temperature, _range(self.wide_cost, self.wide_a, self.wide_b))
        f = self._update_f(g, temperature)
        ones = torch.ones(len(g), dtype=torch.int64, device=g.device)
        return State(f, g, temperature, ones, torch.zeros_like(ones, dtype=torch.bool))

    def _sweep(self, state: State, sweeps: int, max_iterations: int, tolerance: float) -> State:
        """Up to ``sweeps`` further sweeps; a problem that is done keeps its potentials."""
        f, g, temperature, iterations, done = state.f, state.g, state.temperature, state.iterations, state.done
        costs = self.cost.mT
        for _ in range(sweeps):
            proposal = self._half(costs, f, self.log_a, temperature, self.taus[1])
            error = self._violation(g, proposal, temperature)
            done = done | ((error <= tolerance) & (temperature == self.epsilon))
            frozen = done | (iterations >= max_iterations)
            if bool(frozen.all()):
                break
            if self.annealing is not None:
                temperature = torch.maximum(self.epsilon, temperature * self.annealing)
            g_next = torch.where(self.symmetric.unsqueeze(-1), (g + proposal) / 2, proposal)
            f_next = self._update_f(g_next, temperature)
            f, g = torch.where(frozen.unsqueeze(-1), f, f_next), torch.where(frozen.unsqueeze(-1), g, g_next)
            iterations = torch.where(frozen, iterations, iterations + 1)
        return State(f, g, temperature, iterations, done | (iterations >= max_iterations))

    def _hopeless(self) -> Tensor:
        """Couplings that do not exist: nothing is gained by iterating."""
        if self.taus != (1.0, 1.0):
            return torch.zeros_like(self.symmetric)
        cost = self.wide_cost.masked_fill(self.wide_cost >= _FORBIDDEN, torch.inf)
        return infeasible(cost, self.wide_a, self.wide_b)

    def _newton(self, state: State, tolerance: float, max_iterations: int) -> State:
        """Newton steps at the final epsilon, for couplings of moderate size; kept if they raise the dual."""
        if self.taus != (1.0, 1.0) or self.cost.shape[-1] > semidual.MOST_ATOMS:
            return state
        size = max(1, _NEWTON_ENTRIES // max(1, self.cost[0].numel(), self.cost.shape[-1] ** 2))
        parts = [
            self._newton_of(slice(k, k + size), state, tolerance, max_iterations)
            for k in range(0, len(self.epsilon), size)
        ]
        g, steps, solved = (torch.cat(column) for column in zip(*parts, strict=True))
        if bool(self.symmetric.any()):
            # At the solution f - g is a constant; half of it each way makes the pair symmetric again.
            f = ops.softmin(self.wide_cost, g, safe_log(self.wide_b), self.epsilon)
            g = torch.where(self.symmetric.unsqueeze(-1), (f + g) / 2, g)
        # What is solved is done: in the precision of the sweeps its error could not even be seen.
        return State(
            f=self._update_f(g, self.epsilon),
            g=g,
            temperature=self.epsilon,
            iterations=state.iterations + steps,
            done=state.done | solved,
        )

    def _newton_of(
        self, here: slice, state: State, tolerance: float, max_iterations: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        cost, a, b, epsilon = self.wide_cost[here], self.wide_a[here], self.wide_b[here], self.epsilon[here]
        most = max_iterations - int(state.iterations[here].max())
        g, steps, solved, value = semidual.maximise(cost, a, b, epsilon, state.g[here], tolerance / 4, most)
        far = (~solved).nonzero().flatten()
        if len(far):
            problem, spread = (cost[far], a[far], b[far], epsilon[far]), _range(cost[far], a[far], b[far])
            most = max(0, most - int(steps.max()))
            afresh, more, reached, height = semidual.follow_path(
                *problem, start=spread, tolerance=tolerance / 4, most=most
            )
            better = reached | (height > value[far])
            g = g.index_copy(0, far, torch.where(better.unsqueeze(-1), afresh, g[far]))
            steps, solved = steps.index_add(0, far, more), solved.index_copy(0, far, reached & better)
        return g, steps, solved

    def _update_f(self, g: Tensor, temperature: Tensor) -> Tensor:
        """The exact update of f, or f = g where the problem is symmetric."""
        f = self._half(self.cost, g, self.log_b, temperature, self.taus[0])
        return torch.where(self.symmetric.unsqueeze(-1), g, f) if bool(self.symmetric.any()) else f

    @staticmethod
    def _half(cost: Tensor, potential: Tensor, log_weights: Tensor, temperature: Tensor, tau: float) -> Tensor:
        if tau == 0:
            return torch.zeros(cost.shape[:-1], dtype=temperature.dtype, device=cost.device)
        update = tau * ops.softmin(cost, potential.to(cost.dtype), log_weights, temperature.to(cost.dtype))
        update = update.to(temperature.dtype)
        # A row without any allowed pair: no mass in a penalised problem, no information otherwise.
        return update.masked_fill(update > tau * _FORBIDDEN / 2, _ALONE if tau < 1 else 0.0)

    def _violation(self, g: Tensor, proposal: Tensor, temperature: Tensor) -> Tensor:
        """L1 violation of the target's condition by the current pair (f, g), from the update it would make.

        The source's condition holds exactly after an update of f; a symmetric pair violates both alike.
        """
        tau = self.taus[1]
        if tau == 0:
            return torch.zeros_like(temperature)
        scale = temperature.detach().unsqueeze(-1)
        g, proposal, b = g.detach(), proposal.detach(), self.wide_b.detach()
        rho = penalty(tau, scale)
        wanted = b if rho is None else b * torch.exp(-g / rho)
        log_ratio = ((g - proposal) / (tau * scale)).masked_fill(b == 0, 0.0)
        error = (wanted * torch.expm1(log_ratio.clamp_max(80.0)).abs()).sum(-1)
        return torch.where(self.symmetric, 2 * error, error)

    def _finish(self, state: State) -> tuple[Tensor, Tensor, Tensor]:
        # One more update of f, in float64: the source marginal is exact to rounding. It moves nothing but the rounding of
        # the loop, unless the iteration ended during annealing. A symmetric pair stays symmetric.
        g = state.g
        polished = self._half(self.wide_cost, g, safe_log(self.wide_b), self.epsilon, self.taus[0])
        if bool((self.wide_b == 0).any()):
            # Nothing waits for the target's atoms of weight zero; theirs is the update of what the iteration ended with.
            probes = self._half(self.wide_cost.mT, polished, safe_log(self.wide_a), self.epsilon, self.taus[1])
            g = torch.where(self.wide_b == 0, probes, g)
        f = torch.where(self.symmetric.unsqueeze(-1), g, polished) if bool(self.symmetric.any()) else polished
        return f + self.row_offset, g + self.column_offset, state.iterations


def _range(cost: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Largest minus smallest cost of a pair that counts, ``(B,)``; zero if none does."""
    live = (a > 0).unsqueeze(-1) & (b > 0).unsqueeze(-2) & (cost < _FORBIDDEN)
    largest = cost.detach().masked_fill(~live, -torch.inf).amax((-1, -2))
    smallest = cost.detach().masked_fill(~live, torch.inf).amin((-1, -2))
    return (largest - smallest).masked_fill(~live.flatten(1).any(-1), 0.0)


def _smallest(cost: Tensor, allowed: Tensor) -> Tensor:
    """Smallest allowed entry of each row; zero for a row without any."""
    least = cost.masked_fill(~allowed, torch.inf).amin(-1)
    return least.masked_fill(torch.isinf(least), 0.0)


def _symmetric(cost: Tensor, a: Tensor, b: Tensor, taus: tuple[float, float]) -> Tensor:
    """Which problems are unchanged by exchanging source and target, up to the rounding of their costs."""
    if cost.shape[-1] != cost.shape[-2] or taus[0] != taus[1]:
        return torch.zeros(len(cost), dtype=torch.bool, device=cost.device)
    size = torch.where(torch.isfinite(cost), cost, 0.0).abs().amax((-1, -2)).view(-1, 1, 1)
    close = (cost - cost.mT).abs() <= 64 * torch.finfo(cost.dtype).eps * size
    return (a == b).all(-1) & (close | (cost == cost.mT)).flatten(1).all(-1)
