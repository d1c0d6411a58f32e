"""Sweeps with the kernel absorbed: two matrix-vector products each, in plain torch, on any device.

The kernel K = exp((f + g - C) / epsilon) is computed once, from potentials in float64, and the iteration runs on factors
of it: P = diag(u) K diag(v), where u = a exp(df / epsilon) for a change df of f since then, and v likewise. An
exponential costs as much as ten or more multiplications, so K is computed anew only where a factor has changed so much
that entries of K lost to underflow would begin to matter (Schmitzer 2019).

Factors are rows ``(B, 1, n)``: a row times a matrix is what a BLAS does fastest. Between two checks a sweep is about ten
operations on the device and nothing else; a check transfers four numbers of each problem, and all decisions are made by
the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sinkformer._numerics import penalty, safe_log
from sinkformer.relaxation import Relaxation

# Sweeps after which errors are measured: these, then every _EVERY. The relaxation is reconsidered after _FIRST_LOOK, then
# every _EVERY: rates of fewer sweeps are noise.
_FIRST_CHECKS, _FIRST_LOOK, _EVERY = (0, 4, 10), 4, 10
# Kernels are computed anew when, on a logarithmic scale, the values of v spread further than the first number or leave
# the range of the second. A lost entry is below exp(-88) or exp(-709) times the largest in its row; spread this far it
# still is less than the rounding of the sum, and the numbers are still far from overflow.
_SPREAD = {torch.float32: (60.0, 40.0), torch.float64: (500.0, 300.0)}
# Problems that are done are dropped when this fraction of the batch is left: copying the kernels of the others costs too.
_WORTH_DROPPING = 0.75


@dataclass
class Problems:
    """A flat batch of problems that are swept alike.

    Attributes:
        cost: ``(B, n, m)``, dtype of potentials, finite.
        a, b: weights ``(B, n)`` and ``(B, m)``; zero is padding.
        epsilon: ``(B,)``.
        taus: penalties of the two marginals, in (0, 1]; both 1 for couplings.
        symmetric: every cost symmetric, a = b, equal taus: f = g is one potential, which moves to the mean of itself and its
            plain update.
        forbidden: a cost of this or more is a pair that has no mass; None if there are none.
        work: dtype of the sweeps, float32 or float64.
    """

    cost: Tensor
    a: Tensor
    b: Tensor
    epsilon: Tensor
    taus: tuple[float, float]
    symmetric: bool
    forbidden: float | None
    work: torch.dtype


@dataclass
class Swept:
    """Where the problems stand after a stage; leading axis B.

    Attributes:
        f, g: potentials; those of a lost problem are the last ones that made sense.
        sweeps: how many were made of each problem, int64.
        done: g and the exact update of f from it violate the marginals by at most the tolerance, in L1.
        lost: sums left the range of the dtype. The log domain knows no such limit.
        memory: of the relaxation.
    """

    f: Tensor
    g: Tensor
    sweeps: Tensor
    done: Tensor
    lost: Tensor
    memory: Relaxation


def sweep(problems: Problems, f: Tensor, g: Tensor, memory: Relaxation, tolerance: float, limits: Tensor) -> Swept:
    """Sweep until every problem is done, lost, or has made its ``limits`` of sweeps, int64 ``(B,)``.

    Args:
        problems: the batch.
        f: start ``(B, n)``, such that every row and column of exp((f + g - C) / epsilon) has an entry of the order of one
            and none is much larger.
        g: start ``(B, m)``.
        memory: of the relaxation, new or from an earlier stage. Penalised and symmetric problems are not relaxed.
        tolerance: L1 violation of both marginals to stop at.
        limits: most sweeps of each problem.

    Returns:
        ``Swept``.
    """
    with torch.no_grad():
        stage = _Stage(problems, f, g, memory, limits)
        while len(stage.index):
            stage.advance(tolerance)
        return stage.ended()


class _Stage:
    """The problems in the batch, of which those at ``index`` of the arguments remain, and the result of all.

    Problems that have left (not ``waiting``) are dropped now and then. Axes shrink to the last atom that is used.
    """

    def __init__(self, problems: Problems, f: Tensor, g: Tensor, memory: Relaxation, limits: Tensor):
        self.problems, self.work = problems, problems.work
        self.coupled = problems.taus == (1.0, 1.0)
        self.relaxable = self.coupled and not problems.symmetric
        size = len(f)
        self.index, self.waiting = np.arange(size), np.ones(size, bool)
        self.limits = limits.cpu().numpy()
        self.memory, self.memories = memory, memory.at(self.index)
        self.made, self.since, self.next_check = 0, 0, 0
        self.next_limit = int(self.limits.min(initial=np.iinfo(np.int64).max))
        self.sweeps, self.done, self.lost = np.zeros(size, np.int64), np.zeros(size, bool), np.zeros(size, bool)

        self.f, self.g = f, g
        self.a, self.b = _live_weights(problems)
        self.epsilon = problems.epsilon.unsqueeze(-1)
        used = torch.stack((_used(self.a), _used(self.b))).cpu().numpy()
        self.rows_used, self.columns_used = used
        self._prepare_weights()
        self.u, self.v = self.rows, self.columns
        # Of all problems: potentials, and the factors of those that have left, which are absorbed in the end, at once.
        self.all_f, self.all_g = f.clone(), g.clone()
        self.left_u, self.left_v = self.rows.clone(), self.columns.clone()
        self.kernel = self._kernel(f, g, problems.cost, self.a, self.b, self.epsilon)
        self._prepare_penalties()
        self._prepare_relaxation()

    # Kernels and what else is prepared ------------------------------------------------------------------------------

    def _kernel(self, f: Tensor, g: Tensor, cost: Tensor, a: Tensor, b: Tensor, epsilon: Tensor) -> Tensor:
        exponents = f.unsqueeze(-1) - cost
        exponents += g.unsqueeze(-2)
        # Factors of padding are zero: any kernel will do but zero, by which would be divided. It is one.
        exponents *= ((a > 0) / epsilon).unsqueeze(-1)
        # Not down to subnormal numbers, which are slow, nor to zero.
        limits = torch.finfo(self.work)
        exponents = exponents.to(self.work).clamp_(math.log(limits.tiny) + 1, math.log(limits.max) - 8)
        exponents *= (b > 0).to(self.work).unsqueeze(-2)
        return exponents.exp_()

    def _absorb(self, which: np.ndarray) -> None:
        """Move the factors of some problems of the batch into their potentials, and compute their kernels anew."""
        part = torch.from_numpy(which).to(self.f.device)
        epsilon, a, b = self.epsilon[part], self.a[part], self.b[part]
        # With the exact update no row vanishes and none is huge, however far the relaxation had gone.
        u = self._exact_u(torch.bmm(self.v, self.kernel.mT))[part]
        f = _moved(self.f[part], u, a, epsilon)
        g = _moved(self.g[part], self.v[part], b, epsilon)
        n, m, place = f.shape[-1], g.shape[-1], torch.from_numpy(self.index[which]).to(self.f.device)
        cost = self.problems.cost[:, :n, :m].index_select(0, place)
        self.kernel.index_copy_(0, part, self._kernel(f, g, cost, a, b, epsilon))
        self.all_f[:, :n].index_copy_(0, place, f)
        self.all_g[:, :m].index_copy_(0, place, g)
        # Never in place: the first factors are the weights, the first potentials the caller's.
        self.f, self.g = self.f.index_copy(0, part, f), self.g.index_copy(0, part, g)
        self.u = self.u.index_copy(0, part, self.rows[part])
        self.v = self.v.index_copy(0, part, self.columns[part])
        self._prepare_penalties()

    def _prepare_weights(self) -> None:
        self.rows, self.columns = self.a.to(self.work).unsqueeze(-2), self.b.to(self.work).unsqueeze(-2)
        self.padding = (self.columns == 0).to(self.work)
        # Ones at padding, for quotients.
        self.safe_rows, self.safe_columns = self.rows + (self.rows == 0), self.columns + self.padding

    def _prepare_penalties(self) -> None:
        """What a plain update of a penalised problem starts from: log u = (tau - 1) f / epsilon - tau log(K v)."""
        if not self.coupled:
            tau_a, tau_b = self.problems.taus
            self.log_u = ((tau_a - 1) / self.epsilon * self.f).to(self.work).unsqueeze(-2)
            self.log_v = ((tau_b - 1) / self.epsilon * self.g).to(self.work).unsqueeze(-2)

    def _prepare_relaxation(self) -> None:
        self.relaxing = self.relaxable and bool((self.memory.t > 0).any())
        if self.relaxing:
            ratio = (1 - self.memory.t) / (1 + self.memory.t)
            ratio = torch.from_numpy(np.stack((ratio, 1 - ratio**2))).to(self.f.device, self.work)
            short, rest = ratio.unsqueeze(-1).unsqueeze(-1)
            self.of_rows = short * self.safe_rows, rest * self.rows, short
            self.of_columns = short * self.safe_columns, rest * self.columns, short

    # Sweeps ---------------------------------------------------------------------------------------------------------

    def advance(self, tolerance: float) -> None:
        """One sweep, after a check where one is due."""
        sums = torch.bmm(self.v, self.kernel.mT)
        if self.made in (self.next_check, self.next_limit) and self._look(sums, tolerance):
            if not len(self.index):
                return
            sums = torch.bmm(self.v, self.kernel.mT)
        self.made, self.since = self.made + 1, self.since + 1
        if self.problems.symmetric:
            self.u = self.v = torch.mul(self.v, self._plain_u(sums)).sqrt_()
        elif self.relaxing:
            self.u = self._further(self.u, sums, self.rows, *self.of_rows)
            self.v = self._further(self.v, torch.bmm(self.u, self.kernel), self.columns, *self.of_columns)
        else:
            self.u = self._plain_u(sums)
            self.v = self._plain_v(torch.bmm(self.u, self.kernel))

    @staticmethod
    def _further(factor: Tensor, sums: Tensor, weights: Tensor, short: Tensor, rest: Tensor, ratio: Tensor) -> Tensor:
        """``relaxation.relaxed``, in the fewest operations.

        With s = (1 - t) / (1 + t), y = u K v and weights w, h = (w + s y) / (s w + y) = s + (1 - s^2) w / (s w + y);
        ``short`` is s w, ``rest`` (1 - s^2) w, ``ratio`` s.
        """
        step = rest / torch.addcmul(short, factor, sums)
        return step.add_(ratio).mul_(weights).div_(sums)

    def _exact_u(self, sums: Tensor) -> Tensor:
        """The update of u that belongs to v; the one factor of a symmetric problem."""
        return self.v if self.problems.symmetric else self._plain_u(sums)

    def _plain_u(self, sums: Tensor) -> Tensor:
        if self.coupled:
            return self.rows / sums
        return torch.add(self.log_u, sums.log(), alpha=-self.problems.taus[0]).exp_().mul_(self.rows)

    def _plain_v(self, sums: Tensor) -> Tensor:
        if self.coupled:
            return self.columns / sums
        return torch.add(self.log_v, sums.log(), alpha=-self.problems.taus[1]).exp_().mul_(self.columns)

    # Checks ---------------------------------------------------------------------------------------------------------

    def _look(self, sums: Tensor, tolerance: float) -> bool:
        """Measure if it is time, let problems leave, choose the relaxation; whether the kernels or v have changed."""
        done = lost = outside = np.zeros(len(self.index), bool)
        due = self.made == self.next_check
        if due:
            error, quotient, smallest, largest = self._measure(sums)
            spread, reach = (math.exp(x) for x in _SPREAD[self.work])
            lost = ~np.isfinite(error)
            outside = ~lost & ((largest > spread * smallest) | (smallest < 1 / reach) | (largest > reach))
            # Where entries of the kernel may be missing, the error is not known.
            done = ~outside & (error <= tolerance)
            if self.relaxable and (self.made in (0, _FIRST_LOOK) or self.made % _EVERY == 0):
                self.memory.update(error, self.since, quotient)
                self.since = 0
            self.next_check = next((k for k in _FIRST_CHECKS if k > self.made), self.made + _EVERY)
        ends = self.waiting & (done | lost | (self.limits <= self.made))
        if ends.any():
            self._leave(ends, done, lost, sums)
        if not self.waiting.any():
            self.index = self.index[:0]
            return True
        self.next_limit = int(self.limits[self.waiting].min())
        changed = False
        if self.waiting.sum() <= _WORTH_DROPPING * len(self.index):
            outside = outside[self.waiting]
            self._drop()
            changed = True
        outside = (outside & self.waiting).nonzero()[0]
        if len(outside):
            self._absorb(outside)
            changed = True
        if due and not self.coupled and not self.problems.symmetric:
            self._translate()
            changed = True
        if changed or due:
            self._prepare_relaxation()
        return changed

    def _measure(self, sums: Tensor) -> np.ndarray:
        """``(error, quotient, smallest, largest)`` of every problem.

        The error is that of v with the exact update of u, whose rows are exact: the columns show all of it, whatever the
        relaxation did to u. The quotient is the Rayleigh quotient of one plain sweep at the violation of the rows, what
        the sweep makes of it over what it was. The last two are the range of v over its weights.
        """
        plain = self._plain_u(sums)
        if self.problems.symmetric:
            # Rows and columns are violated alike.
            excess = 2 * (self.v - plain) * sums
            wanted = 0.0
        else:
            excess = self.v * torch.bmm(plain, self.kernel)
            wanted = self.columns if self.coupled else self._wanted_columns()
        excess = excess - wanted
        error = excess.abs().sum(-1)
        quotient = error
        if self.relaxable:
            before = (self.u * sums - self.rows).square_().div_(self.safe_rows).sum(-1)
            quotient = excess.square_().div_(self.safe_columns).sum(-1) / before
        smallest, largest = torch.aminmax(torch.addcdiv(self.padding, self.v, self.safe_columns), dim=-1)
        return torch.cat((error, quotient, smallest, largest), -1).T.cpu().double().numpy()

    def _wanted_columns(self) -> Tensor:
        """Column sums of a penalised problem at its solution, b exp(-g / rho_b)."""
        rho = penalty(self.problems.taus[1], self.epsilon)
        if rho is None:
            return self.columns
        g = _moved(self.g, self.v, self.b, self.epsilon)
        return (self.b * torch.exp(-g / rho)).to(self.work).unsqueeze(-2)

    def _translate(self) -> None:
        """Exchange the best constant between v and the exact update of u from it."""
        u = self._exact_u(torch.bmm(self.v, self.kernel.mT))
        f, g = _moved(self.f, u, self.a, self.epsilon), _moved(self.g, self.v, self.b, self.epsilon)
        shift = translation(f, g, self.a, self.b, self.epsilon, self.problems.taus) / self.epsilon
        # Further than this a factor may not go at once; the next check goes on.
        reach = _SPREAD[self.work][1]
        self.v = self.v * torch.exp(-shift.clamp(-reach, reach)).to(self.work).unsqueeze(-2)

    def _leave(self, ends: np.ndarray, done: np.ndarray, lost: np.ndarray, sums: Tensor) -> None:
        members = self.index[ends]
        self.sweeps[members], self.done[members], self.lost[members] = self.made, done[ends], lost[ends]
        self.memories.take(members, self.memory.at(ends))
        self.waiting = self.waiting & ~ends
        part, place = (torch.from_numpy(x).to(self.f.device) for x in (ends.nonzero()[0], members))
        n, m = self.f.shape[-1], self.g.shape[-1]
        self.left_u[:, :, :n].index_copy_(0, place, self._exact_u(sums).index_select(0, part))
        self.left_v[:, :, :m].index_copy_(0, place, self.v.index_select(0, part))

    def _drop(self) -> None:
        """Keep only the problems that have not left, and the atoms that they have."""
        waiting = self.waiting
        self.index, self.limits, self.memory = self.index[waiting], self.limits[waiting], self.memory.at(waiting)
        self.rows_used, self.columns_used = self.rows_used[waiting], self.columns_used[waiting]
        self.waiting = waiting[waiting]
        n, m = int(self.rows_used.max()), int(self.columns_used.max())
        keep = torch.from_numpy(waiting.nonzero()[0]).to(self.f.device)
        self.f, self.a, self.u = (x[..., :n].index_select(0, keep) for x in (self.f, self.a, self.u))
        self.g, self.b, self.v = (x[..., :m].index_select(0, keep) for x in (self.g, self.b, self.v))
        self.kernel, self.epsilon = self.kernel[:, :n, :m].index_select(0, keep), self.epsilon[keep]
        self._prepare_weights()
        self._prepare_penalties()

    def ended(self) -> Swept:
        """The result."""
        device = self.f.device
        sweeps, done, lost = (torch.from_numpy(x).to(device) for x in (self.sweeps, self.done, self.lost))
        a, b = _live_weights(self.problems)
        epsilon, broken = self.problems.epsilon.unsqueeze(-1), lost.unsqueeze(-1)
        f = torch.where(broken, self.all_f, _moved(self.all_f, self.left_u, a, epsilon))
        g = torch.where(broken, self.all_g, _moved(self.all_g, self.left_v, b, epsilon))
        return Swept(f, g, sweeps, done, lost, self.memories)


def translation(f: Tensor, g: Tensor, a: Tensor, b: Tensor, epsilon: Tensor, taus: tuple[float, float]) -> Tensor:
    """The constant by which g falls, and f, its exact update, rises tau_a times, where the dual is largest.

    Sweeps shrink a constant that f and g exchange by tau_a tau_b only, next to nothing when the penalties are strong
    (Sejourne, Vialard, Peyre 2022). It is known in closed form: the plan's mass must be the one both penalties ask for,
    sum a exp(-f / rho_a) = sum b exp(-g / rho_b).

    Args:
        f: potential ``(B, n)``, the exact update of g.
        g: potential ``(B, m)``.
        a: weights ``(B, n)``.
        b: weights ``(B, m)``.
        epsilon: ``(B, 1)``.
        taus: in (0, 1], not both 1.

    Returns:
        ``(B, 1)``.
    """
    masses = log_mass(f, a, epsilon, taus[0]), log_mass(g, b, epsilon, taus[1])
    return exchanged(masses, epsilon, taus)


def log_mass(potential: Tensor, weights: Tensor, epsilon: Tensor, tau: float) -> Tensor:
    """Log sum_i w_i exp(-h_i / rho), the mass that one penalty asks for, ``(B, 1)``."""
    return torch.logsumexp(safe_log(weights) - (1 - tau) / (tau * epsilon) * potential, -1, keepdim=True)


def exchanged(masses: tuple[Tensor, Tensor], epsilon: Tensor, taus: tuple[float, float]) -> Tensor:
    """The constant of :func:`translation` from the logarithms of both masses."""
    return epsilon * (masses[0] - masses[1]) / ((1 - taus[1]) / taus[1] + 1 - taus[0])


def _moved(potential: Tensor, factor: Tensor, weights: Tensor, epsilon: Tensor) -> Tensor:
    """The potential with its factor absorbed; without weight it does not move."""
    ratio = torch.where(weights > 0, factor.squeeze(-2) / weights, 1.0)
    return torch.addcmul(potential, epsilon, ratio.log_())


def _live_weights(problems: Problems) -> tuple[Tensor, Tensor]:
    """Weights without those of atoms that may be paired with no other: such an atom never has mass."""
    a, b = problems.a, problems.b
    if problems.forbidden is None:
        return a, b
    allowed = problems.cost < problems.forbidden
    rows = (allowed & (b > 0).unsqueeze(-2)).any(-1)
    columns = (allowed & (a > 0).unsqueeze(-1)).any(-2)
    return torch.where(rows, a, 0.0), torch.where(columns, b, 0.0)


def _used(weights: Tensor) -> Tensor:
    """Number of atoms up to the last that has weight, at least one, ``(B,)``."""
    places = torch.arange(1, weights.shape[-1] + 1, device=weights.device)
    return torch.where(weights > 0, places, 1).amax(-1)
