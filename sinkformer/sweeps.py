"""The iteration: which problems of a batch are swept, how, for how long, and when Newton's method takes over.

A stage of sweeps is the log-domain loop of this room ("reference": any epsilon, any penalty, differentiable), or made of
matrix-vector products ("absorbed"). Problems that sweeps leave unsolved are handed to Newton's method (``semidual``), and
come back for the stopping test. Every problem of a batch stops by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from sinkformer import absorbed, ops, semidual
from sinkformer._numerics import penalty, safe_log
from sinkformer.feasibility import infeasible
from sinkformer.relaxation import Relaxation

Engine = Literal["absorbed", "reference"]

# Log-domain sweeps after which problems that are done leave the batch, then after twice as many, and so on.
_FIRST_STAGE = 8
# Sweeps before problems are tested for a coupling: not worth asking before the easy ones have left.
_PATIENCE = 50
# Finite stand-ins for infinity, so that none is subtracted from another: the cost of a forbidden pair, and the potential
# of an atom that may be paired with no other. The first must win against the second.
_FORBIDDEN, _ALONE = 1e30, 1e20
LARGEST_COST = 1e29
# Smaller epsilon leave the range of float32.
_LEAST_IN_FLOAT32 = 1e-30

_Batched = TypeVar("_Batched", bound=Any)


@dataclass
class State:
    """Where a flat batch of B problems stands: all tensors have leading axis B, potentials the wide dtype.

    ``done`` is a problem that is not worked on any further: solved, hopeless, or out of iterations.
    """

    f: Tensor
    g: Tensor
    temperature: Tensor
    iterations: Tensor
    done: Tensor
    memory: Relaxation

    def put(self, index: Tensor, part: State) -> State:
        """This state with that of the problems at ``index`` replaced."""
        f, g, temperature, iterations, done = (
            getattr(self, name).index_copy(0, index, getattr(part, name))
            for name in ("f", "g", "temperature", "iterations", "done")
        )
        return State(f, g, temperature, iterations, done, self.memory.put(index, part.memory))


def _at(x: _Batched, index: Tensor) -> _Batched:
    """The same dataclass with everything that has a batch axis indexed along it."""
    parts = {field.name: getattr(x, field.name) for field in fields(x)}
    changes = {name: part[index] for name, part in parts.items() if isinstance(part, Tensor)}
    changes |= {name: part.at(index) for name, part in parts.items() if isinstance(part, Relaxation)}
    return replace(x, **changes)


@dataclass
class Loop:
    """A flat batch of problems, prepared for the iteration.

    Costs enter centred, by a row and a column offset, so that what is divided by epsilon is as small as it can be; the
    offsets are added back to the potentials in float64. Centred by the smallest costs, a coupling has a start as good as
    any: with f = g = 0 every row and column of the kernel has an entry 1 and none above. All tensors have the dtype of
    potentials; the sums of the sweeps are taken in ``work``.
    """

    taus: tuple[float, float]
    annealing: float | None
    unrolled: bool
    engine: Engine
    work: torch.dtype
    masked: bool
    epsilon: Tensor
    cost: Tensor
    a: Tensor
    b: Tensor
    row_offset: Tensor
    column_offset: Tensor
    symmetric: Tensor

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
        engine: Engine = "absorbed",
    ) -> Loop:
        """Centre the costs; everything in the dtype of potentials, the sums of the sweeps in ``work``.

        Annealing is for the reference engine: the absorbed kernel starts at epsilon itself. Unrolled iterations and
        problems with one side free (tau = 0) are swept by the reference, whatever ``engine`` says.
        """
        detached = cost.detach()
        masked = ops.forbids(detached)
        row_offset, column_offset = (torch.zeros_like(w, dtype=cost.dtype) for w in (a, b))
        if taus == (1.0, 1.0):  # offsets are a gauge of couplings only
            row_offset = _smallest(detached, column_offset, b, -1)
            column_offset = _smallest(detached, row_offset, a, -2)
        # Iterations that are differentiated are the model itself: they do not change with a symmetry of the input.
        symmetric = _symmetric(detached, a.detach(), b.detach(), taus) & (not unrolled)
        if bool(symmetric.any()):
            # One offset for both sides keeps the symmetry; the mean takes out the rounding of a matrix product.
            same, shared = symmetric.unsqueeze(-1), row_offset / 2
            cost = torch.where(same.unsqueeze(-1), (cost + cost.mT) / 2, cost)
            row_offset, column_offset = torch.where(same, shared, row_offset), torch.where(same, shared, column_offset)
        centred = (cost - row_offset.unsqueeze(-1)).sub_(column_offset.unsqueeze(-2))
        if masked:
            # A finite stand-in for +inf: its weight in a sum is zero all the same, and its derivative zero instead of NaN.
            centred = centred.masked_fill(detached == torch.inf, _FORBIDDEN)
        if bool((epsilon < _LEAST_IN_FLOAT32).any()):
            work = epsilon.dtype
        # A side without any constraint is solved by one update.
        engine = "reference" if unrolled or min(taus) == 0 else engine
        return cls(
            taus=taus,
            annealing=annealing if engine == "reference" else None,
            unrolled=unrolled,
            engine=engine,
            work=work,
            masked=masked,
            epsilon=epsilon,
            cost=centred,
            a=a,
            b=b,
            row_offset=row_offset,
            column_offset=column_offset,
            symmetric=symmetric,
        )

    def run(
        self,
        tolerance: float,
        max_iterations: int,
        init: tuple[Tensor, Tensor] | None,
        spent: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``(f, g, iterations)``: potentials of the given costs, f an exact update of g unless symmetric.

        ``spent`` are iterations, ``(B,)``, that another engine has made to arrive at ``init``.
        """
        state = self._start(init)
        if spent is not None:
            state.iterations = spent
        if self.unrolled:
            state = self._sweep(state, max_iterations, max_iterations, tolerance)
            state.f = self._half(self.cost, state.g, safe_log(self.b), self.epsilon, self.taus[0])
            return self._finish(state)
        state, hopeless = self._iterate(state, tolerance, max_iterations)
        f, error = self._polished(state.g)
        wrong = (error > tolerance) & (state.iterations < max_iterations) & ~hopeless & ~self.symmetric
        if self.work != self.cost.dtype and self.taus == (1.0, 1.0) and bool(wrong.any()):
            # Rounding hid what was left of the error; the wider dtype sees it.
            again = wrong.nonzero().flatten()
            loop, part = replace(_at(self, again), work=self.cost.dtype), _at(state, again)
            part.done = torch.zeros_like(part.done)
            part, _ = loop._iterate(part, tolerance, max_iterations)
            state, f = state.put(again, part), f.index_copy(0, again, loop._polished(part.g)[0])
        state.f = f
        return self._finish(state)

    def _iterate(self, state: State, tolerance: float, max_iterations: int) -> tuple[State, Tensor]:
        """``(state, hopeless)``: all problems done, and which of them have no solution."""
        coupled = self.taus == (1.0, 1.0)
        first = self._sweeps_first()
        sweeps = (first - state.iterations).clamp_min(0)
        hopeless = torch.zeros_like(state.done)
        if self.masked and coupled:
            early = sweeps.clamp_max(_PATIENCE)
            state = self._stage(state, early, tolerance, max_iterations)
            hopeless = self._hopeless(~state.done)
            state.done = state.done | hopeless
            sweeps = sweeps - early
        state = self._stage(state, sweeps, tolerance, max_iterations)
        sweeps = first
        while not bool(state.done.all()):
            if coupled:
                alive = (~state.done).nonzero().flatten()
                rescued = _at(self, alive)._newton(_at(state, alive), tolerance, max_iterations)
                state = state.put(alive, rescued)
                sweeps = 2 * sweeps
            state = self._stage(state, sweeps, tolerance, max_iterations)
        return state, hopeless

    def _start(self, init: tuple[Tensor, Tensor] | None) -> State:
        # Unrolled, the start is g = 0 itself: an offset is a function of the cost, and would have to be differentiated.
        if init is None and not self.unrolled:
            g = torch.zeros_like(self.column_offset)
        else:
            g = (torch.zeros_like(self.column_offset) if init is None else init[1]) - self.column_offset
        temperature = self.epsilon
        if self.annealing is not None and min(self.taus) > 0:  # one side alone is solved by one update
            temperature = torch.maximum(temperature, self._range())
        if init is None and self.engine == "absorbed" and self.taus == (1.0, 1.0):
            f = torch.zeros_like(self.row_offset)
            if bool(self.symmetric.any()):
                f = g = torch.where(self.symmetric.unsqueeze(-1), self._shared_start(), g)
        else:
            f = self._update_f(g, temperature)
        ones = torch.ones(len(g), dtype=torch.int64, device=g.device)
        memory = Relaxation.start(len(g))
        return State(f, g, temperature, ones, torch.zeros_like(ones, dtype=torch.bool), memory)

    def _shared_start(self) -> Tensor:
        """One potential for both sides, for which no row of the kernel vanishes: averaged hard c-transforms."""
        live = (self.b > 0).unsqueeze(-2)
        cost = self.cost.masked_fill(~live, torch.inf)
        h = torch.zeros_like(self.column_offset)
        for _ in range(4):
            h = (h + (cost - h.unsqueeze(-2)).amin(-1)) / 2
        return h.masked_fill(h.abs() > _FORBIDDEN / 100, 0.0)

    def _sweeps_first(self) -> Tensor:
        """Sweeps of each problem before Newton's method is asked; its own size counts, not its padding."""
        if self.taus != (1.0, 1.0):
            return torch.full_like(self.epsilon, torch.iinfo(torch.int64).max // 2, dtype=torch.int64)
        sizes = torch.stack(((self.a > 0).sum(-1), (self.b > 0).sum(-1)), -1).tolist()
        first = [semidual.sweeps_first(n, m) for n, m in sizes]
        return torch.tensor(first, dtype=torch.int64, device=self.cost.device)

    # A stage of sweeps ----------------------------------------------------------------------------------------------

    def _stage(self, state: State, sweeps: Tensor, tolerance: float, max_iterations: int) -> State:
        """Up to ``sweeps`` sweeps, ``(B,)``, of every problem that is not done."""
        limits = torch.minimum(sweeps, max_iterations - state.iterations)
        if self.engine == "reference":
            state = self._reference_stage(state, limits, tolerance)
        else:
            for symmetric in (False, True):
                alive = (~state.done & (limits > 0) & (self.symmetric == symmetric)).nonzero().flatten()
                if len(alive):
                    whole = len(alive) == len(self.epsilon)
                    part = self if whole else _at(self, alive)
                    before = state if whole else _at(state, alive)
                    after = part._absorbed_stage(before, limits[alive], tolerance, symmetric)
                    state = after if whole else state.put(alive, after)
        state.done = state.done | (state.iterations >= max_iterations)
        return state

    def _absorbed_stage(self, state: State, limits: Tensor, tolerance: float, symmetric: bool) -> State:
        problems = absorbed.Problems(
            self.cost,
            self.a,
            self.b,
            self.epsilon,
            self.taus,
            symmetric,
            LARGEST_COST if self.masked else None,
            self.work,
        )
        swept = absorbed.sweep(problems, state.f, state.g, state.memory, tolerance, limits)
        iterations = state.iterations + swept.sweeps
        state = State(swept.f, swept.g, state.temperature, iterations, state.done | swept.done, swept.memory)
        lost = (swept.lost & ~state.done).nonzero().flatten()
        if len(lost):
            rest, loop = (limits - swept.sweeps)[lost], replace(_at(self, lost), work=self.cost.dtype)
            state = state.put(lost, loop._reference_stage(_at(state, lost), rest, tolerance))
        return state

    def _reference_stage(self, state: State, limits: Tensor, tolerance: float) -> State:
        ends, length = state.iterations + limits, _FIRST_STAGE
        while len(alive := (~state.done & (state.iterations < ends)).nonzero().flatten()):
            part = _at(self, alive)._sweep(_at(state, alive), length, ends[alive], tolerance)
            state, length = state.put(alive, part), 2 * length
        return state

    def _sweep(self, state: State, sweeps: int, ends: Tensor | int, tolerance: float) -> State:
        """Up to ``sweeps`` further sweeps in the log domain; a problem that is done keeps its potentials."""
        f, g, temperature, iterations, done = state.f, state.g, state.temperature, state.iterations, state.done
        cost, log_a, log_b = self.cost.to(self.work), safe_log(self.a).to(self.work), safe_log(self.b).to(self.work)
        costs = cost.mT
        # Unrolled, the sweeps are the model.
        translated = self.taus != (1.0, 1.0) and min(self.taus) > 0 and not self.unrolled
        for _ in range(sweeps):
            proposal = self._half(costs, f, log_a, temperature, self.taus[1])
            error = self._violation(g, proposal, temperature)
            done = done | ((error <= tolerance) & (temperature == self.epsilon))
            frozen = done | (iterations >= ends)
            if bool(frozen.all()):
                break
            if self.annealing is not None:
                temperature = torch.maximum(self.epsilon, temperature * self.annealing)
            g_next = torch.where(self.symmetric.unsqueeze(-1), (g + proposal) / 2, proposal)
            f_next = self._half(cost, g_next, log_b, temperature, self.taus[0])
            if translated:
                shift = absorbed.translation(f_next, g_next, self.a, self.b, temperature.unsqueeze(-1), self.taus)
                shift = shift.masked_fill(self.symmetric.unsqueeze(-1), 0.0)
                f_next, g_next = f_next + self.taus[0] * shift, g_next - shift
            if bool(self.symmetric.any()):
                f_next = torch.where(self.symmetric.unsqueeze(-1), g_next, f_next)
            f, g = torch.where(frozen.unsqueeze(-1), f, f_next), torch.where(frozen.unsqueeze(-1), g, g_next)
            iterations = torch.where(frozen, iterations, iterations + 1)
        return State(f, g, temperature, iterations, done, state.memory)

    # Newton ---------------------------------------------------------------------------------------------------------

    def _hopeless(self, asked: Tensor) -> Tensor:
        """Couplings that do not exist: nothing is gained by iterating."""
        suspects = asked.nonzero().flatten()
        cost = self.cost[suspects]
        cost = cost.masked_fill(cost >= _FORBIDDEN, torch.inf)
        found = infeasible(cost, self.a[suspects], self.b[suspects])
        return torch.zeros_like(asked).index_copy(0, suspects, found)

    def _newton(self, state: State, tolerance: float, max_iterations: int) -> State:
        """Newton's method at the final epsilon, for couplings."""
        most = max_iterations - state.iterations
        g, steps, solved = semidual.rescue(self.cost, self.a, self.b, self.epsilon, state.g, tolerance, most)
        if bool(self.symmetric.any()):
            # At the solution f - g is a constant; half of it each way makes the pair symmetric again.
            f = ops.softmin(self.cost, g, safe_log(self.b), self.epsilon)
            g = torch.where(self.symmetric.unsqueeze(-1), (f + g) / 2, g)
        iterations = state.iterations + steps
        # What is solved is done: in the precision of the sweeps its error could not even be seen.
        return State(
            f=self._update_f(g, self.epsilon),
            g=g,
            temperature=self.epsilon,
            iterations=iterations,
            done=state.done | solved | (iterations >= max_iterations),
            memory=Relaxation.start(len(g)),
        )

    def _update_f(self, g: Tensor, temperature: Tensor) -> Tensor:
        """The exact update of f, or f = g where the problem is symmetric."""
        f = self._half(self.cost, g, safe_log(self.b), temperature, self.taus[0])
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
        g, proposal, b = g.detach(), proposal.detach(), self.b.detach()
        rho = penalty(tau, scale)
        wanted = b if rho is None else b * torch.exp(-g / rho)
        log_ratio = ((g - proposal) / (tau * scale)).masked_fill(b == 0, 0.0)
        error = (wanted * torch.expm1(log_ratio.clamp_max(80.0)).abs()).sum(-1)
        return torch.where(self.symmetric, 2 * error, error)

    def _finish(self, state: State) -> tuple[Tensor, Tensor, Tensor]:
        """The potentials of the given costs, f an exact update; a symmetric pair stays symmetric."""
        polished, g = state.f, state.g
        idle = self.b == 0
        if self.masked:
            idle = idle | (self.cost >= _FORBIDDEN).all(-2)
        if bool(idle.any()):
            # Nothing waits for the target's atoms of weight zero or without any pair; theirs is the update of what the
            # iteration ended with.
            problem, column = idle.nonzero(as_tuple=True)
            probes = self._half(
                self.cost.mT[problem, column].unsqueeze(-2),
                polished[problem],
                safe_log(self.a)[problem],
                self.epsilon[problem],
                self.taus[1],
            )
            g = g.index_put((problem, column), probes.squeeze(-1))
        f = torch.where(self.symmetric.unsqueeze(-1), g, polished) if bool(self.symmetric.any()) else polished
        return f + self.row_offset, g + self.column_offset, state.iterations

    def _polished(self, g: Tensor) -> tuple[Tensor, Tensor]:
        """``(f, error)``: the exact update of g in the dtype of potentials, and the L1 violation of a coupling's target.

        The source marginal is then exact to rounding. The matrices are passed over in place, as seldom as can be.
        """
        tau = self.taus[0]
        if tau == 0 or not self.cost.numel():
            return torch.zeros_like(self.row_offset), torch.zeros_like(self.epsilon)
        distance = self.cost - g.masked_fill(self.b == 0, -torch.inf).unsqueeze(-2)
        least = distance.amin(-1, keepdim=True)
        distance -= least
        distance *= (-1 / self.epsilon).view(-1, 1, 1)
        kernel = distance.exp_()
        total = ops.apply(kernel, self.b)
        columns = self.b * ops.apply(kernel.mT, self.a / total)
        update = tau * (least.squeeze(-1) - self.epsilon.unsqueeze(-1) * total.log())
        f = update.masked_fill(update > tau * _FORBIDDEN / 2, _ALONE if tau < 1 else 0.0)
        return f, (columns - self.b).abs().sum(-1)

    def _range(self) -> Tensor:
        """Largest minus smallest cost of a pair that counts, ``(B,)``; zero if none does."""
        cost = self.cost.detach()
        live = (self.a > 0).unsqueeze(-1) & (self.b > 0).unsqueeze(-2) & (cost < _FORBIDDEN)
        largest = cost.masked_fill(~live, -torch.inf).amax((-1, -2))
        smallest = cost.masked_fill(~live, torch.inf).amin((-1, -2))
        return (largest - smallest).masked_fill(~live.flatten(1).any(-1), 0.0)


def _smallest(cost: Tensor, offset: Tensor, weights: Tensor, axis: int) -> Tensor:
    """Smallest cost less an offset along an axis of the matrices, of atoms with weight; zero if no pair is allowed."""
    if not cost.shape[axis]:
        return cost.sum(axis)
    # A difference is several times faster than a mask.
    offset = offset.masked_fill(weights == 0, -torch.inf).unsqueeze(-2 if axis == -1 else -1)
    least = (cost - offset).amin(axis)
    return least.masked_fill(torch.isinf(least), 0.0)


def _symmetric(cost: Tensor, a: Tensor, b: Tensor, taus: tuple[float, float]) -> Tensor:
    """Which problems are unchanged by exchanging source and target, up to the rounding of their costs."""
    found = torch.zeros(len(cost), dtype=torch.bool, device=cost.device)
    if cost.shape[-1] != cost.shape[-2] or taus[0] != taus[1]:
        return found
    suspects = (a == b).all(-1).nonzero().flatten()
    if not len(suspects):
        return found
    cost = cost[suspects]
    size = torch.where(torch.isfinite(cost), cost, 0.0).abs().amax((-1, -2)).view(-1, 1, 1)
    close = (cost - cost.mT).abs() <= 64 * torch.finfo(cost.dtype).eps * size
    return found.index_copy(0, suspects, (close | (cost == cost.mT)).flatten(1).all(-1))
