"""Problems whose n x m pairs do not fit into memory: costs evaluated a block of rows at a time, nothing of size n x m kept.

One pass over the rows is one sweep. A block of exponents, centred by its row maxima, gives the exact update of f for its
rows and, scaled by it, its share of the column sums, from which g is updated at the end. The column error seen on the way
is the whole L1 error of the pair (f, g), because the rows are exact: the stopping test is free. Memory is O((n + m) d).

Blocks are evaluated in the dtype of the iteration, potentials and sums over blocks in the dtype of potentials. The last
sweep of every problem is made in the latter throughout, and its error is the one compared with the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkformer._numerics import penalty, potential_dtype, safe_divide, safe_log
from sinkformer._typing import CostMatrix, Features, PerProblem, Potential, Weights
from sinkformer.certificates import penalised_gap, rounded_gap
from sinkformer.costs import Cost, Matrix, NegativeDot, SqEuclidean
from sinkformer.differentiation import LinearSolve, conjugate
from sinkformer.errors import BackendError
from sinkformer.relaxation import Relaxation

# Entries of a block in float32, half as many in float64. On a CPU it should stay in the cache between the passes over
# it, but hold enough rows to be worth the reading of all target points; elsewhere it should fill the device.
_CACHED_ENTRIES, _CACHED_ROWS, _MOST_ENTRIES = 2**19, 128, 2**24
# Costs beyond are errors of their computation, not costs.
_LARGEST_COST = 1e29
# Potential of an atom that may be paired with no other, in a penalised problem.
_ALONE = 1e20
# Larger than any log(1 + E / D) but that of a forbidden pair.
_PLENTY = 1e30
# Column sums below are made of denormal numbers.
_FAINT = 1e-30
# Relative rounding of a cost in float32, and the sweeps without progress after which float32 is given up.
_FLOAT32_NOISE, _PATIENCE = 2.0**-23, 50


# Share of the tolerance an iteration in float32 has to reach: room for its own rounding.
_SHARE = 0.5
# A relaxed pair this many tolerances away is tried with a plain update.
_NEARLY = 1.5
_CHECK_EVERY = 10
# Epsilon starts at this share of the range of the cost. It shrinks by the factor once the error is small, or after so many
# sweeps: without the wait a 2 x 2 problem takes cost / epsilon sweeps.
_ANNEALED_FROM, _ANNEALING, _ON_THE_WAY, _LONGEST_STAY = 0.3, 0.5, 0.1, 20
# Most steps of conjugate gradients, and the relative residual below which blocks in float32 are no use.
_MOST_CG_STEPS, _FLOAT32_RTOL = 1000, 1e-5


@dataclass(frozen=True, eq=False)
class PairCosts:
    """Costs of all pairs of a flat batch of B problems, evaluated when asked for.

    Attributes:
        cost: a ``Cost`` of points, or a ``Matrix`` of shape ``(B, n, m)``.
        x: source features ``(B, n, r)``; of a matrix problem, anything of ``n`` rows.
        y: target features ``(B, m, r)``.
        mask: added to the cost, ``(B, n, m)``; ``+inf`` forbids a pair. None for none.
    """

    cost: Cost
    x: Features
    y: Features
    mask: CostMatrix | None = None

    def problem(self, k: int, a: Weights, b: Weights, dtype: torch.dtype) -> _Pairs:
        """Problem k, with its weights ``(n,)`` and ``(m,)``, in blocks of ``dtype``, outside the graph."""
        cost, x, y = self.cost, self.x[k].detach(), self.y[k].detach()
        mask = None if self.mask is None else self.mask[k].detach()
        void = ((a == 0).detach(), (b == 0).detach())
        if not bool(void[0].any() | void[1].any()):
            void = None
        if isinstance(cost, Matrix):
            return _Pairs(Matrix(cost.values[k].detach()), x, y, mask, void, dtype)
        if type(cost) is SqEuclidean:
            # -<(2 x, -1, -|x|^2), (y, |y|^2, 1)>, so that translation and squares are taken once and not for every block.
            x, y = x.to(potential_dtype(x.device)), y.to(potential_dtype(y.device))
            centre = y.median(-2, keepdim=True).values
            x, y = x - centre, y - centre
            one, other = torch.ones_like(x[:, :1]), torch.ones_like(y[:, :1])
            x = torch.cat([2 * x, -one, -x.square().sum(-1, keepdim=True)], -1)
            y = torch.cat([y, y.square().sum(-1, keepdim=True), other], -1)
            cost = NegativeDot()
        return _Pairs(cost, x.to(dtype), y.to(dtype), mask, void, dtype)


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Costs of one problem in blocks of ``dtype``; ``void`` marks the atoms of weight zero, None if there are none."""

    cost: Cost
    x: Tensor
    y: Tensor
    mask: Tensor | None
    void: tuple[Tensor, Tensor] | None
    dtype: torch.dtype

    @property
    def wide(self) -> torch.dtype:
        """Dtype of potentials and of sums over blocks."""
        return potential_dtype(self.y.device)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows.

        Whoever loops over them keeps no new tensor of a block, but writes into one made before: what outlives a block
        breaks up the memory it leaves, the next one does not fit, and the heap grows to the size of the matrix.
        """
        n, m, entries = len(self.x), max(1, len(self.y)), _MOST_ENTRIES
        if self.y.device.type == "cpu":
            entries = min(entries, max(_CACHED_ENTRIES, _CACHED_ROWS * m))
        step = max(1, entries * 4 // (m * self.dtype.itemsize))
        for start in range(0, n, step):
            yield start, min(n, start + step)

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows of the cost with the mask added; not to be written into."""
        with torch.autocast(self.y.device.type, enabled=False):
            rows = _rows(self.cost, self.x, self.y, start, stop).to(self.dtype)
        if self.mask is not None:
            rows = rows + self.mask[start:stop].to(self.dtype)
        if self.void is not None:
            # What padding costs is never used with weight, but 0 times NaN would spread.
            padded = self.void[0][start:stop].unsqueeze(-1) | self.void[1]
            rows = rows.masked_fill(padded & ~((rows.abs() <= _LARGEST_COST) | (rows == torch.inf)), 0.0)
        return rows

    def exponents(self, start: int, stop: int, h: Tensor, epsilon: float) -> Tensor:
        """h_j - C_ij / epsilon for a block of rows, ``h`` in ``dtype``; may be written into."""
        if type(self.cost) is NegativeDot and self.mask is None and self.void is None:
            with torch.autocast(self.y.device.type, enabled=False):
                return torch.addmm(h, self.x[start:stop], self.y.mT, alpha=1 / epsilon)
        return torch.add(h, self.rows(start, stop), alpha=-1 / epsilon)

    def density(self, start: int, stop: int, f: Tensor, g: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """``(log k, k)`` with k = exp((f + g - C) / epsilon), bounded if f or g is an update of the other."""
        log_k = self.exponents(start, stop, (g / epsilon).to(self.dtype), epsilon)
        log_k.add_((f[start:stop] / epsilon).to(self.dtype).unsqueeze(-1))
        density = log_k.exp()
        if self.void is not None:  # nothing bounds the exponent between two paddings
            density.masked_fill_(self.void[0][start:stop].unsqueeze(-1) & self.void[1], 0.0)
        return log_k, density


def _rows(cost: Cost, x: Tensor, y: Tensor, start: int, stop: int) -> Tensor:
    # The default is a slice; taken here, its derivative has the size of the slice.
    return cost(x[start:stop], y) if type(cost).rows is Cost.rows else cost.rows(x, y, start, stop)


# The iteration -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def solve(
    costs: PairCosts,
    a: Weights,
    b: Weights,
    epsilon: PerProblem,
    taus: tuple[float, float],
    *,
    work: torch.dtype,
    tolerance: float,
    max_iterations: int,
    init: tuple[Potential, Potential] | None = None,
) -> tuple[Potential, Potential, Tensor]:
    """Potentials of every problem of a flat batch, one after the other.

    Args:
        costs: of B problems.
        a: weights ``(B, n)``, in the dtype of potentials, of sum one; zero is padding.
        b: weights ``(B, m)``.
        epsilon: ``(B,)``.
        taus: ``(tau_a, tau_b)``.
        work: dtype of the blocks; float32 goes on in the wide dtype where its rounding is too coarse for the tolerance.
        tolerance: L1 marginal error to reach, in the wide dtype; negative to spend all iterations.
        max_iterations: most sweeps, each one pass over the rows.
        init: potentials to start from; otherwise epsilon shrinks from the range of the cost.

    Returns:
        ``(f, g, iterations)``: ``(B, n)``, ``(B, m)``, and int64 ``(B,)``. f is the exact update of g in the wide dtype,
        with the dtype of ``epsilon``. Zero for a problem with a NaN, -inf or a number beyond 1e29 among the costs of its
        pairs, which ``quality`` reports.
    """
    found = []
    for k in range(len(epsilon)):
        start = None if init is None else (init[0][k], init[1][k])
        found.append(_solve(costs, k, a[k], b[k], float(epsilon[k]), taus, work, tolerance, max_iterations, start))
    if not found:
        return a.clone(), b.clone(), torch.zeros(0, dtype=torch.int64, device=a.device)
    f, g, iterations = zip(*found, strict=True)
    return torch.stack(f), torch.stack(g), torch.tensor(iterations, device=a.device)


def _solve(
    costs: PairCosts,
    k: int,
    a: Tensor,
    b: Tensor,
    epsilon: float,
    taus: tuple[float, float],
    work: torch.dtype,
    tolerance: float,
    max_iterations: int,
    init: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, int]:
    """One problem."""
    pairs = costs.problem(k, a, b, work)
    seen = _scan(pairs, a, b)
    if seen is None:
        return torch.zeros_like(a), torch.zeros_like(b), 0
    temperature, (f, g) = epsilon, (seen.f, seen.g) if init is None else init
    if init is None and min(taus) > 0:  # one side alone is solved by one update
        temperature = max(epsilon, _ANNEALED_FROM * seen.spread)
    if init is None and taus != (1.0, 1.0):  # the start is a gauge of couplings only
        g = torch.zeros_like(g)

    coarse, goal = work != pairs.wide, tolerance
    if coarse:  # below the noise, sweeps in float32 would follow the rounding of the costs
        goal = max(_SHARE * tolerance, _FLOAT32_NOISE * seen.largest / epsilon)
    pace, plain, best, idle, stayed, spent = _Pace(a), False, math.inf, 0, 0, 0
    for spent in range(1, max_iterations + 1):
        if spent == max_iterations:
            temperature, plain, coarse = epsilon, True, False
        if not coarse and pairs.dtype != pairs.wide:
            pairs, goal = costs.problem(k, a, b, pairs.wide), tolerance
        t = 0.0 if plain or temperature > epsilon else pace.t
        sweep = _sweep(pairs, f, g, a, b, seen.alone, temperature, taus[0], t)
        f = sweep.f
        error = float(sweep.row_error + _column_error(sweep.log_columns, g, b, temperature, taus[1]))
        if temperature == epsilon:
            best, idle = (error, 0) if error < best else (best, idle + 1)
            reached = t == 0 and error <= goal
            if (reached and not coarse) or spent == max_iterations:
                break
            if taus == (1.0, 1.0):
                pace.see(error, sweep.increment, t)
            # Only a pair whose rows are exact is returned. One that is relaxed is better than its error says.
            plain = reached or error <= _NEARLY * goal
            coarse = coarse and not reached and idle < _PATIENCE
        g = _update(sweep.log_columns, g, b, seen.alone, temperature, taus[1], t)
        stayed += 1
        if error <= _ON_THE_WAY or stayed == _LONGEST_STAY:
            temperature, stayed = max(epsilon, _ANNEALING * temperature), 0
    if pairs.void is not None:
        void = pairs.void[1].nonzero().flatten()
        log_columns = _log_columns(pairs, f / epsilon + safe_log(a), epsilon, void)
        probes = torch.where(
            log_columns == -torch.inf, 0.0 if taus[1] == 1 else _ALONE, -taus[1] * epsilon * log_columns
        )
        g = g.index_copy(0, void, probes)
    return f, g, spent


@dataclass(frozen=True, eq=False)
class _Scan:
    """What one look at all costs tells.

    Attributes:
        f, g: the largest potentials with f + g <= C of which every row and every column has a tight pair: no exponent
            of the start is positive, and no row or column vanishes.
        alone: columns ``(m,)`` of which every pair is forbidden.
        spread: largest minus smallest cost of a pair that counts.
        largest: largest of their absolute values.
    """

    f: Tensor
    g: Tensor
    alone: Tensor
    spread: float
    largest: float


def _scan(pairs: _Pairs, a: Tensor, b: Tensor) -> _Scan | None:
    """A look at all costs; None if there is one among them that is no cost."""
    smallest, largest = torch.inf, -torch.inf
    f, g = torch.zeros_like(a), torch.full_like(b, torch.inf)
    for start, stop in pairs.blocks():
        rows = pairs.rows(start, stop)
        if pairs.void is not None:
            rows = rows.masked_fill(pairs.void[1], torch.inf)
        low = rows.amin(-1)
        high = torch.where(rows == torch.inf, -torch.inf, rows).amax(-1)
        f[start:stop] = tight = torch.where(low == torch.inf, 0.0, low)
        if pairs.void is not None:
            here = pairs.void[0][start:stop]
            rows, low, high = (
                rows.masked_fill(here.unsqueeze(-1), torch.inf),
                low.masked_fill(here, torch.inf),
                high.masked_fill(here, -torch.inf),
            )
        # Comparisons that NaN fails.
        if not bool((low.min() >= -_LARGEST_COST) & (high.max() <= _LARGEST_COST)):
            return None
        smallest, largest = min(smallest, float(low.min())), max(largest, float(high.max()))
        torch.minimum(g, (rows - tight.unsqueeze(-1)).amin(0).to(pairs.wide), out=g)
    spread = largest - smallest if largest >= smallest else 0.0
    alone = g == torch.inf
    size = max(abs(smallest), abs(largest)) if largest >= smallest else 0.0
    return _Scan(f, g.masked_fill(alone, 0.0), alone, spread, size)


@dataclass(frozen=True, eq=False)
class _Sweep:
    """One pass over the rows.

    Attributes:
        f: updated potential ``(n,)``.
        increment: its plain update minus the old one, in units of epsilon.
        row_error: L1 violation of the rows by the new f, zero after a plain update.
        log_columns: log sum_i a_i exp((f_i + g_j - C_ij) / epsilon), ``(m,)``: zero where the column is exact.
    """

    f: Tensor
    increment: Tensor
    row_error: Tensor
    log_columns: Tensor


def _sweep(
    pairs: _Pairs, f: Tensor, g: Tensor, a: Tensor, b: Tensor, alone: Tensor, epsilon: float, tau: float, t: float
) -> _Sweep:
    """Update f, going the fraction t beyond, and sum the columns of what results."""
    dtype, wide, least = pairs.dtype, pairs.wide, torch.finfo(pairs.dtype).min
    scaled, log_a = g / epsilon, safe_log(a)
    # What rounding takes from the exponents is given back as a factor, common to a column.
    rounded = scaled.to(dtype)
    rest = scaled - rounded.to(wide)
    weights, exponent = (b * rest.exp()).to(dtype), rounded.masked_fill(b == 0, -torch.inf)
    new, step, error, columns = (torch.zeros_like(h) for h in (a, a, a, b))
    shift = torch.full((), 0.5 * least, dtype=wide, device=g.device)
    for start, stop in pairs.blocks():
        block = pairs.exponents(start, stop, exponent, epsilon)
        top = block.amax(-1, keepdim=True).clamp_min_(least)
        mass = torch.mv(block.sub_(top).exp_(), weights).to(wide)
        top, empty = top.squeeze(-1).to(wide), mass == 0
        star = -tau * (top + torch.where(empty, 1.0, mass).log())
        step[start:stop] = star - f[start:stop] / epsilon
        here = star + _beyond(step[start:stop], t) if t else star
        new[start:stop] = here = here.masked_fill(empty, _ALONE / epsilon if 0 < tau < 1 else 0.0)
        if tau == 1:
            error[start:stop] = a[start:stop] * torch.where(empty, 1.0, (here - star).expm1().abs())
        # Rows scaled by exp(log_scale): the plan without b. The largest factor so far stands outside the sum.
        log_scale = torch.where(empty, -torch.inf, log_a[start:stop] + here + top)
        higher = torch.maximum(shift, log_scale.amax())
        scale = (log_scale - higher).exp().to(dtype)
        columns.mul_((shift - higher).exp()).add_(torch.mv(block.mT, scale))
        shift = higher
    log_columns = shift + rest + columns.log()
    faint = ((columns < _FAINT) & (b > 0) & ~alone).nonzero().flatten()
    if len(faint):
        exact = scaled[faint] + _log_columns(pairs, new + log_a, epsilon, faint)
        log_columns = log_columns.index_copy(0, faint, exact)
    return _Sweep(epsilon * new, step, error.sum(), log_columns)


def _beyond(step: Tensor, t: float) -> Tensor:
    """Log h(exp(step)), what is added to a plain update, with the h of :func:`relaxation.relaxed`."""
    x = step.clamp(-50.0, 50.0).exp()
    return (((1 + t) * x + 1 - t) / ((1 - t) * x + 1 + t)).log()


def _log_columns(pairs: _Pairs, log_scale: Tensor, epsilon: float, columns: Tensor) -> Tensor:
    """Log of sum_i exp(log_scale_i - C_ij / epsilon) for an index of columns, wide; ``-inf`` if forbidden."""
    total = torch.full((len(columns),), -torch.inf, dtype=pairs.wide, device=log_scale.device)
    for start, stop in pairs.blocks():
        part = pairs.rows(start, stop)[:, columns].to(pairs.wide)
        total = torch.logaddexp(total, (log_scale[start:stop].unsqueeze(-1) - part / epsilon).logsumexp(0))
    return total


def _column_error(log_columns: Tensor, g: Tensor, b: Tensor, epsilon: float, tau: float) -> Tensor:
    """L1 violation of the target's condition, P^T 1 = b, or b exp(-g / rho) where it is penalised."""
    if tau == 0:
        return torch.zeros((), dtype=g.dtype, device=g.device)
    rho = penalty(tau, torch.tensor(epsilon, dtype=g.dtype, device=g.device))
    wanted = b if rho is None else b * torch.exp(-g / rho)
    return (torch.where(b > 0, b * log_columns.clamp_max(80.0).exp(), 0.0) - wanted).abs().sum()


def _update(log_columns: Tensor, g: Tensor, b: Tensor, alone: Tensor, epsilon: float, tau: float, t: float) -> Tensor:
    """Update of g, as that of f."""
    if tau == 0:
        return torch.zeros_like(g)
    new = tau * (g - epsilon * log_columns)
    if t:
        new = new + epsilon * _beyond(-log_columns, t)
    # Nothing waits for atoms of weight zero.
    return torch.where(b > 0, new.masked_fill(alone, 0.0 if tau == 1 else _ALONE), g)


class _Pace:
    """Over-relaxation of one problem, chosen from its errors every few sweeps."""

    def __init__(self, weights: Tensor):
        self.relaxation, self.weights, self.last = Relaxation.start(1), weights, None
        self.quotient, self.sweeps = 0.0, 0

    @property
    def t(self) -> float:
        """How far beyond the plain update to go."""
        return float(self.relaxation.t[0])

    def see(self, error: float, increment: Tensor, t: float) -> None:
        """Take note of a sweep made with t."""
        a, self.sweeps = self.weights, self.sweeps + 1
        step = None
        if t == 0:  # increments of plain sweeps shrink by lambda; what is common to all is gauge
            step = (increment - (a * increment).sum()).clamp(-50.0, 50.0)
            if self.last is not None:
                self.quotient = float(safe_divide((a * step * self.last).sum(), (a * self.last.square()).sum()))
        self.last = step
        if self.sweeps % _CHECK_EVERY == 0:
            self.relaxation.update(np.array([error]), _CHECK_EVERY, np.array([self.quotient]))


# Quality -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def quality(
    costs: PairCosts,
    f: Potential,
    g: Potential,
    a: Weights,
    b: Weights,
    epsilon: PerProblem,
    taus: tuple[float, float],
) -> tuple[PerProblem, PerProblem, PerProblem]:
    """``(marginal error, duality gap, dual value)`` of potentials, measured in the dtype of potentials, ``(B,)`` each.

    The gap is the bound of :func:`certificates.gap_bound` for couplings. All three are NaN for a problem with a NaN, -inf
    or a number beyond 1e29 among the costs of pairs of positive weight.
    """
    found = [_quality(costs, k, f[k], g[k], a[k], b[k], epsilon[k], taus) for k in range(len(epsilon))]
    if not found:
        return epsilon.clone(), epsilon.clone(), epsilon.clone()
    error, gap, value = (torch.stack(column) for column in zip(*found, strict=True))
    return error, gap, value


def _quality(
    costs: PairCosts, k: int, f: Tensor, g: Tensor, a: Tensor, b: Tensor, epsilon: Tensor, taus: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """One problem: a pass for the marginals, and for a coupling a second one for its rounding."""
    pairs = costs.problem(k, a, b, potential_dtype(a.device))
    total_a, total_b, sound = a.sum(), b.sum(), True
    by_row, by_column, reduced = torch.zeros_like(a), torch.zeros_like(b), torch.zeros_like(b)
    for start, stop in pairs.blocks():
        here = a[start:stop]
        log_k, density = pairs.density(start, stop, f, g, float(epsilon))
        sound = sound and _sound(log_k, float(epsilon))
        # As k - 1: for a large epsilon, which multiplies it, the difference of two masses would be rounding.
        excess = density.sub_(1.0)
        by_row[start:stop] = torch.mv(excess, b)
        by_column += torch.mv(excess.mT, here)
        r = _shrink(by_row[start:stop] + total_b)
        reduced += torch.mv(excess.mT, here * r) + (here * r).sum()
    if not sound:
        lost = torch.full_like(epsilon, torch.nan)
        return lost, lost, lost
    p, q, excess = a * (by_row + total_b), b * (by_column + total_a), (a * by_row).sum()
    error, value = torch.zeros_like(epsilon), -epsilon * excess
    for have, want, potential, tau in ((p, a, f, taus[0]), (q, b, g, taus[1])):
        rho = penalty(tau, epsilon)
        value = value + (want * conjugate(potential, rho)).sum()
        if tau > 0:
            error = error + (have - (want if rho is None else want * torch.exp(-potential / rho))).abs().sum()
    if taus != (1.0, 1.0):
        return error, penalised_gap(a, b, epsilon, (f, g), (p, q), taus), value

    r, c = _shrink(by_row + total_b), _shrink(reduced)
    # c is one over the larger of ``reduced`` and one. What is left of a row but for rounding is nothing.
    right = b * (1 - reduced).clamp_min(0.0)
    right = safe_divide(right, right.sum())
    least, tiny = 64 * torch.finfo(b.dtype).eps, torch.finfo(b.dtype).tiny
    on_target = safe_log(right) - (b * c).clamp_min(tiny).log()
    left, added = torch.zeros_like(a), torch.zeros_like(a)
    for start, stop in pairs.blocks():
        log_k, density = pairs.density(start, stop, f, g, float(epsilon))
        here, kept = a[start:stop], a[start:stop] * r[start:stop]
        share = 1 - r[start:stop] * torch.mv(density, b * c)
        left[start:stop] = here = here * torch.where(share > least, share, 0.0)
        # log(E / D), -inf without E, where a forbidden pair does no harm.
        log_k.masked_fill_((here == 0).unsqueeze(-1) | (right == 0), torch.inf)
        gain = (safe_log(here) - kept.clamp_min(tiny).log()).unsqueeze(-1) - log_k
        gain = torch.nn.functional.softplus(gain.add_(on_target), threshold=40.0)
        added[start:stop] = here * torch.mv(gain, right)
        # Not zero times infinity.
        added[start:stop] += kept * torch.mv(density.mul_(gain.clamp_(max=_PLENTY)), b * c)
    return error, rounded_gap(a, b, epsilon, (r, c, left, right), excess, added), value


def _sound(log_k: Tensor, epsilon: float) -> bool:
    """Whether every cost behind these exponents is one: potentials are far smaller than what is no cost."""
    limit = 1.01 * _LARGEST_COST / epsilon
    low, high = float(log_k.amin()), float(log_k.amax())
    if low == -math.inf:
        low = float(log_k.masked_fill(log_k == -torch.inf, 0.0).amin())
    return -limit <= low and high <= limit  # NaN fails


def _shrink(mass: Tensor) -> Tensor:
    """Factor that takes a marginal, relative to what it should be, down to one; one where there is nothing to take."""
    return 1 / mass.clamp_min(1.0)


# Derivatives ---------------------------------------------------------------------------------------------------------


def implicit(
    costs: PairCosts,
    a: Weights,
    b: Weights,
    epsilon: PerProblem,
    f: Potential,
    g: Potential,
    value: PerProblem,
    taus: tuple[float, float],
    how: LinearSolve = LinearSolve(),  # noqa: B008 - frozen
    *,
    work: torch.dtype,
) -> tuple[Potential, Potential, PerProblem]:
    """Attach first derivatives to solved potentials and their dual value, as ``differentiation.implicit`` does densely.

    Functions of the features (or the entries of a ``Matrix``, and the mask), of a, b and epsilon. The value needs one
    pass; potentials need one for every step of conjugate gradients, and two more.

    Args:
        costs: of B problems.
        a: weights ``(B, n)``; this and all that follows in the dtype of potentials.
        b: weights ``(B, m)``.
        epsilon: ``(B,)``.
        f: potential ``(B, n)``, outside the graph, as ``solve`` returns it.
        g: potential ``(B, m)``.
        value: ``(B,)`` as ``quality`` returns it. A problem whose value is NaN has derivative zero.
        taus: ``(tau_a, tau_b)``.
        how: residual asked of the linear solve, at least 1e-5 for blocks in float32, and what is recorded of it.
        work: dtype of the blocks; vectors stay in the dtype of potentials.

    Raises:
        BackendError: the cost has parameters that require a gradient; in the backward pass, a second derivative.
    """
    _refuse_parameters(costs, work)
    values = costs.cost.values if isinstance(costs.cost, Matrix) else None
    given = (costs.x, costs.y, values, costs.mask, a, b, epsilon)
    attached = _Potentials.apply(*given, f, g, value, costs.cost, taus, work, how)
    assert isinstance(attached, tuple)
    f, g = attached
    value = _Value.apply(*given, f.detach(), g.detach(), value, costs.cost, taus, work)
    assert isinstance(value, Tensor)
    return f, g, value


def _refuse_parameters(costs: PairCosts, work: torch.dtype) -> None:
    if isinstance(costs.cost, Matrix) or not torch.is_grad_enabled() or not len(costs.x):
        return
    x, y = (h[0, :1].detach().to(work) for h in (costs.x, costs.y))
    if costs.cost(x, y).requires_grad:
        raise BackendError(
            f"expected a cost without parameters that require a gradient, received {costs.cost!r}: the streamed engine "
            f"differentiates in the features; use another engine, or put the parameters into the features"
        )


class _Pull:
    """Sums up the derivative of sum_ij W_ij C_ij in what makes the costs of one problem, W given a block at a time."""

    def __init__(self, costs: PairCosts, k: int, work: torch.dtype, needed: tuple[bool, ...]):
        self.cost, self.work, self.needed = costs.cost, work, needed[:4]
        self.x, self.y = (h[k].detach().to(work) for h in (costs.x, costs.y))
        wide = potential_dtype(self.x.device)
        shapes = (self.x.shape, self.y.shape, *2 * ((len(self.x), len(self.y)),))
        self.grads = [
            torch.zeros(shape, dtype=dtype, device=self.x.device) if asked else None
            for shape, dtype, asked in zip(shapes, (wide, wide, work, work), self.needed, strict=True)
        ]

    def add(self, start: int, stop: int, weights: Tensor) -> None:
        """A block of rows of W."""
        for grad in self.grads[2:]:
            if grad is not None:
                grad[start:stop] = weights
        if isinstance(self.cost, Matrix) or not any(self.needed[:2]):
            return
        sliced = type(self.cost).rows is Cost.rows
        x = (self.x[start:stop] if sliced else self.x).detach().requires_grad_(self.needed[0])
        y = self.y.detach().requires_grad_(self.needed[1])
        with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
            rows = self.cost(x, y) if sliced else self.cost.rows(x, y, start, stop)
            if not rows.requires_grad:
                return
            leaves = [h for h in (x, y) if h.requires_grad]
            found = iter(torch.autograd.grad(rows, leaves, weights.to(rows.dtype), allow_unused=True))
        places = (slice(start, stop) if sliced else slice(None)), slice(None)
        for grad, place, asked in zip(self.grads[:2], places, self.needed[:2], strict=True):
            part = next(found) if asked else None
            if grad is not None and part is not None:
                grad[place] += part


def _gradients(ctx: Any, one: Callable[..., tuple[Tensor, Tensor, Tensor]], *upstream: Tensor) -> tuple[Any, ...]:
    """Gradients of the seven inputs behind ``ctx``, problem by problem, from ``one`` of them."""
    *inputs, f, g, value = ctx.saved_tensors
    x, y, values, mask, a, b, epsilon = inputs
    costs = PairCosts(ctx.cost if values is None else Matrix(values), x, y, mask)
    parts = []
    with torch.no_grad():
        for k in range(len(value)):
            pull = _Pull(costs, k, ctx.work, ctx.needs_input_grad)
            here = a[k], b[k], epsilon[k]
            others = [torch.zeros_like(h) for h in here]
            if not bool(value[k].isnan()):
                pairs = costs.problem(k, a[k], b[k], ctx.work)
                others = one(ctx, k, pairs, pull, *here, f[k], g[k], *(h[k] for h in upstream))
            parts.append([*pull.grads, *others])
        found = [
            torch.stack([part[place] for part in parts]).to(given.dtype) if parts else torch.zeros_like(given)
            for place, given in enumerate(inputs)
            if ctx.needs_input_grad[place]
        ]
    # Marked if they may be differentiated again: a constant would pass for a derivative of zero.
    if torch.is_grad_enabled():
        found = _FirstOrder.apply(len(found), *found, *inputs, *upstream)
        assert isinstance(found, tuple)
    rest = iter(found)
    return tuple(next(rest) if needed else None for needed in ctx.needs_input_grad)


def _remember(ctx: Any, inputs: tuple, f: Tensor, g: Tensor, value: Tensor, cost: Cost, taus: tuple, work: torch.dtype):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, f, g, value)
    ctx.cost, ctx.taus, ctx.work = None if isinstance(cost, Matrix) else cost, taus, work


class _FirstOrder(torch.autograd.Function):
    """The identity on first derivatives, a function of what they depend on, which cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None):
        return tuple(t.clone() for t in tensors[:count] if t is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        raise BackendError(
            "expected first derivatives only, received a request for second ones: the streamed engine has none; use an "
            "engine that holds the cost matrix, or gradient='unrolled'"
        )


class _Value(torch.autograd.Function):
    """The dual value, with the envelope derivative: P, f, g and KL(P | a (x) b); none through the potentials."""

    @staticmethod
    def forward(ctx: Any, x, y, values, mask, a, b, epsilon, f, g, value, cost, taus, work):
        _remember(ctx, (x, y, values, mask, a, b, epsilon), f, g, value, cost, taus, work)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):
        if grads[0] is None:
            return (None,) * 13
        return _gradients(ctx, _envelope, grads[0])


def _envelope(
    ctx: Any,
    place: int,
    pairs: _Pairs,
    pull: _Pull,
    a: Tensor,
    b: Tensor,
    epsilon: Tensor,
    f: Tensor,
    g: Tensor,
    upstream: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivative of the value of one problem in a, b and epsilon; that in the costs goes to ``pull``."""
    by_row, by_column, information = torch.zeros_like(a), torch.zeros_like(b), torch.zeros_like(epsilon)
    narrow_b = b.to(pairs.dtype)
    for start, stop in pairs.blocks():
        log_k, density = pairs.density(start, stop, f, g, float(epsilon))
        here = a[start:stop].to(pairs.dtype)
        if any(pull.needed):
            pull.add(start, stop, density * (upstream.to(pairs.dtype) * here).unsqueeze(-1) * narrow_b)
        # Where k vanishes so does k log k.
        log_k = log_k.masked_fill_(density == 0, 0.0)
        information += torch.dot(here, torch.mv(log_k.mul_(density), narrow_b)).to(pairs.wide)
        excess = density.sub_(1.0)
        by_row[start:stop] = torch.mv(excess, narrow_b)
        by_column += torch.mv(excess.mT, here)
    rho_a, rho_b = (penalty(tau, epsilon) for tau in ctx.taus)
    on_a = conjugate(f, rho_a) - epsilon * by_row
    on_b = conjugate(g, rho_b) - epsilon * by_column
    on_epsilon = information - (a * by_row).sum()
    # At fixed tau the penalties move with epsilon: rho = epsilon tau / (1 - tau).
    for weights, potential, rho in ((a, f, rho_a), (b, g, rho_b)):
        if rho is not None:
            ratio = safe_divide(potential, rho)
            on_epsilon = (
                on_epsilon + (weights * (-torch.expm1(-ratio) - ratio * torch.exp(-ratio))).sum() * rho / epsilon
            )
    return upstream * on_a, upstream * on_b, upstream * on_epsilon


class _Potentials(torch.autograd.Function):
    """The identity on given potentials, with the derivative of the solution map."""

    @staticmethod
    def forward(ctx: Any, x, y, values, mask, a, b, epsilon, f, g, value, cost, taus, work, how):
        f, g = f.clone(), g.clone()
        _remember(ctx, (x, y, values, mask, a, b, epsilon), f, g, value, cost, taus, work)
        rtol = how.rtol if work == torch.float64 else max(how.rtol, _FLOAT32_RTOL)
        ctx.how = LinearSolve(rtol, conditioning=how.conditioning)
        return f, g

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):
        if all(grad is None for grad in grads):  # the value alone was used, which needs no solve
            return (None,) * 14
        f, g = ctx.saved_tensors[-3:-1]
        upstream = (torch.zeros_like(h) if d is None else d for d, h in zip(grads, (f, g), strict=True))
        ctx.residual, ctx.ritz = (torch.full(f.shape[:1], x, dtype=f.dtype, device=f.device) for x in (0.0, math.nan))
        found = _gradients(ctx, _solution_map, *upstream)
        ctx.how.record(ctx.residual, ctx.ritz)
        return found


def _solution_map(
    ctx: Any,
    place: int,
    pairs: _Pairs,
    pull: _Pull,
    a: Tensor,
    b: Tensor,
    epsilon: Tensor,
    f: Tensor,
    g: Tensor,
    right_f: Tensor,
    right_g: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivative of <right_f, f> + <right_g, g> in a, b and epsilon; that in the costs goes to ``pull``.

    The linear system is that of ``ops.adjoint_solve``: with k the density, p and q its own marginals,

        l + tau_b S u = right_f,   u + tau_a R^T l = right_g,   R_ij = k_ij b_j / p_i,   S_ij = a_i k_ij / q_j.

    u is what conjugate gradients find on the target side, where the matrix diag(b q) - tau_a tau_b P^T diag(1 / a p) P is
    symmetric; scaled by b q it is I - tau_a tau_b S^T R.
    """
    (tau_a, tau_b), scale = ctx.taus, float(epsilon)
    dead = right_g.masked_fill(b > 0, 0.0)
    theta, singular = tau_a * tau_b, ctx.taus == (1.0, 1.0)

    def over() -> Iterator[tuple[int, int, Tensor, Tensor]]:
        for start, stop in pairs.blocks():
            yield start, stop, *pairs.density(start, stop, f, g, scale)

    def times(block: Tensor, v: Tensor) -> Tensor:
        return torch.mv(block, v.to(block.dtype)).to(pairs.wide)

    # Columns of weight zero couple one way only.
    by_dead = None
    if bool((dead != 0).any()):
        q = torch.zeros_like(b)
        for i, j, _, density in over():
            q += times(density.mT, a[i:j])
        by_dead = safe_divide(dead, q)
    p, q, right, size = (torch.zeros_like(h) for h in (a, b, b, b))
    for i, j, _, density in over():
        here = a[i:j]
        p[i:j] = times(density, b)
        from_f, magnitude = right_f[i:j], right_f[i:j].abs()
        if by_dead is not None:
            from_f = from_f - tau_b * here * times(density, by_dead)
            magnitude = magnitude + tau_b * here * times(density, by_dead.abs())
        over_p = safe_divide(torch.ones_like(here), p[i:j])
        q += times(density.mT, here)
        right += times(density.mT, from_f * over_p)
        size += times(density.mT, magnitude * over_p)
    mass = b * q
    right = (right_g - dead) - tau_a * b * right
    size = (right_g - dead).abs() + tau_a * b * size
    scaling = torch.where(mass > 0, mass, 1.0)
    whole = (size.square() / scaling).sum()

    def balanced(v: Tensor) -> Tensor:
        return v - mass * (v.sum() / mass.sum()) if singular else v

    def matrix(v: Tensor) -> Tensor:
        image = torch.zeros_like(v)
        for i, j, _, density in over():
            image += times(density.mT, a[i:j] * safe_divide(times(density, b * v), p[i:j]))
        return mass * v - theta * b * image

    right = balanced(right)
    x, ctx.ritz[place] = _conjugate_gradients(matrix, balanced, right, scaling, ctx.how.rtol, float(whole))
    if singular:
        x = x - (mass * x).sum() / mass.sum()

    up = mass * x + dead
    per_q = tau_b * safe_divide(up, q)
    left, on_a, on_b, image, on_epsilon = (torch.zeros_like(h) for h in (a, a, b, b, epsilon))
    for i, j, log_k, density in over():
        here, narrow = a[i:j], pairs.dtype
        on_a[i:j] = times(density, per_q)
        left[i:j] = right_f[i:j] - here * on_a[i:j]
        per_p = tau_a * safe_divide(left[i:j], p[i:j])
        on_b += times(density.mT, per_p)
        image += times(density.mT, here * safe_divide(times(density, b * x), p[i:j]))
        if any(pull.needed):
            weights = torch.outer(per_p.to(narrow), b.to(narrow)).addr_(here.to(narrow), per_q.to(narrow))
            pull.add(i, j, weights.mul_(density))
        # Where k vanishes so does k log k.
        information = log_k.masked_fill_(density == 0, 0.0).mul_(density)
        on_epsilon += (per_p * times(information, b)).sum() + (here * times(information, per_q)).sum()
    residual = balanced(right - (mass * x - theta * b * image))
    ctx.residual[place] = safe_divide((residual.square() / scaling).sum(), whole).sqrt()
    on_epsilon = on_epsilon + ((1 - tau_a) * (left * f).sum() + (1 - tau_b) * (up * g).sum()) / epsilon
    return -epsilon * on_a, -epsilon * on_b, on_epsilon


def _conjugate_gradients(
    matrix: Callable[[Tensor], Tensor],
    project: Callable[[Tensor], Tensor],
    right: Tensor,
    scaling: Tensor,
    rtol: float,
    size: float,
) -> tuple[Tensor, float]:
    """Solve a symmetric, non-negative system, preconditioned by a positive diagonal.

    Args:
        matrix: v -> A v.
        project: onto the range of A, against drift by rounding.
        right: right-hand side, in the range.
        scaling: that diagonal.
        rtol: relative residual to stop at.
        size: squared norm that it is relative to; norms are weighted by the inverse of the scaling.

    Returns:
        ``(x, smallest)``: the solution, and the smallest Ritz value of the scaled matrix; NaN without a step.
    """
    x, residual = torch.zeros_like(right), right
    scaled = residual / scaling
    direction, rho = scaled, float((residual * scaled).sum())
    steps, growths = [], []
    for _ in range(min(_MOST_CG_STEPS, 4 * len(right) + 20)):
        if rho <= rtol**2 * size:
            break
        image = project(matrix(direction))
        curvature = float((direction * image).sum())
        if curvature <= 0:
            break
        steps.append(rho / curvature)
        x = x + steps[-1] * direction
        residual = project(residual - steps[-1] * image)
        scaled = residual / scaling
        after = float((residual * scaled).sum())
        growths.append(after / rho)
        direction, rho = scaled + growths[-1] * direction, after
    if not steps:
        return x, math.nan
    # Lanczos' tridiagonal matrix, from the coefficients of conjugate gradients.
    step, growth = (torch.tensor(column, dtype=torch.float64) for column in (steps, growths))
    main = 1 / step
    main[1:] += growth[:-1] / step[:-1]
    off = growth[:-1].sqrt() / step[:-1]
    tridiagonal = torch.diag(main) + torch.diag(off, 1) + torch.diag(off, -1)
    return x, float(torch.linalg.eigvalsh(tridiagonal)[0])
