"""Sweeps over blocks of rows, and the quality of the potentials they find.

One pass over the rows is one sweep. A block of exponents, centred by its row maxima, gives the exact update of f for its
rows and, scaled by it, its share of the column sums, from which g is updated at the end. The column error seen on the way
is the whole L1 error of the pair (f, g), because the rows are exact: the stopping test is free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sinkformer._numerics import penalty, potential_dtype, safe_divide, safe_log
from sinkformer._typing import PerProblem, Potential, Weights
from sinkformer.absorbed import exchanged, log_mass
from sinkformer.certificates import penalised_gap, rounded_gap
from sinkformer.differentiation import conjugate
from sinkformer.relaxation import Relaxation
from sinkformer.streamed.kernels import ANNEALING, LONGEST_STAY, ON_THE_WAY, Scores, beyond, check
from sinkformer.streamed.pairs import LARGEST_COST, PairCosts, Pairs
from sinkformer.streamed.ranks import Ranks

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
# Epsilon starts at this share of the range of the cost.
_ANNEALED_FROM = 0.3


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

    Raises:
        BackendError: the costs name an engine that cannot solve these problems.
    """
    check(costs, taus)
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
    scores = None if costs.engine == "torch" else Scores.of(costs, k, a, b)
    seen = _scan(pairs, a, b) if scores is None else _scan_of(scores)
    if seen is None:
        return torch.zeros_like(a), torch.zeros_like(b), 0
    temperature, (f, g) = epsilon, (seen.f, seen.g) if init is None else init
    if init is None and min(taus) > 0:  # one side alone is solved by one update
        temperature = max(epsilon, _ANNEALED_FROM * seen.spread)
    if init is None and taus != (1.0, 1.0):  # the start is a gauge of couplings only
        g = torch.zeros_like(g)

    coarse, goal, patience = scores is not None or work != pairs.wide, tolerance, _PATIENCE
    if scores is not None and tolerance < 0:  # all iterations are those of the kernels
        patience = max_iterations
    elif coarse:  # below the noise, sweeps in float32 would follow the rounding of the costs
        goal = max(_SHARE * tolerance, _FLOAT32_NOISE * seen.largest / epsilon)
    pace, plain, best, idle, stayed, spent, made = _Pace(a, pairs.ranks), False, math.inf, 0, 0, 0, 0
    if scores is not None and costs.engine == "stored":
        f, g, made, pace.relaxation = scores.descend(f, g, epsilon, temperature, goal, max_iterations - 1)
        temperature, coarse, plain = epsilon, False, True
    for spent in range(made + 1, max_iterations + 1):
        if spent == max_iterations:
            temperature, plain, coarse = epsilon, True, False
        if not coarse:
            scores, goal = None, tolerance
            pairs = pairs if pairs.dtype == pairs.wide else costs.problem(k, a, b, pairs.wide)
        t = 0.0 if plain or temperature > epsilon else pace.t
        if scores is None:
            sweep = _sweep(pairs, f, g, a, b, seen.alone, temperature, taus[0], t)
        else:
            sweep = _Sweep(*scores.sweep(f, g, temperature, taus[0], t))
        f = sweep.f
        error, mean = _noticed(sweep, a, b, g, temperature, taus[1], pairs.ranks)
        if temperature == epsilon:
            best, idle = (error, 0) if error < best else (best, idle + 1)
            reached = t == 0 and error <= goal
            if (reached and not coarse) or spent == max_iterations:
                break
            if taus == (1.0, 1.0):
                pace.see(error, sweep.increment - mean, t)
            # Only a pair whose rows are exact is returned. One that is relaxed is better than its error says.
            plain = reached or error <= _NEARLY * goal
            coarse = coarse and not reached and idle < patience
        shift = _translation(f, g, a, b, temperature, taus, pairs.ranks)
        g = _update(sweep.log_columns, g, b, seen.alone, temperature, taus[1], t) - shift
        stayed += 1
        if error <= ON_THE_WAY or stayed == LONGEST_STAY:
            temperature, stayed = max(epsilon, ANNEALING * temperature), 0
    void = (b == 0).nonzero().flatten()
    if len(void):
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


def _scan(pairs: Pairs, a: Tensor, b: Tensor) -> _Scan | None:
    """A look at all costs; None if there is one among them that is no cost."""
    smallest, largest, sound = torch.inf, -torch.inf, True
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
        if not bool((low.min() >= -LARGEST_COST) & (high.max() <= LARGEST_COST)):
            sound = False
            break
        smallest, largest = min(smallest, float(low.min())), max(largest, float(high.max()))
        torch.minimum(g, (rows - tight.unsqueeze(-1)).amin(0).to(pairs.wide), out=g)
    # Without a NaN, of which no minimum is sure.
    bounds = g.new_tensor([smallest, -largest, 1.0] if sound else [torch.inf, torch.inf, 0.0])
    g, bounds = pairs.ranks.least(g if sound else torch.zeros_like(g), bounds)
    smallest, largest, sound = bounds.tolist()
    largest = -largest
    if not sound:
        return None
    spread = largest - smallest if largest >= smallest else 0.0
    alone = g == torch.inf
    size = max(abs(smallest), abs(largest)) if largest >= smallest else 0.0
    return _Scan(f, g.masked_fill(alone, 0.0), alone, spread, size)


def _scan_of(scores: Scores) -> _Scan:
    """The same without a look: sweeps of scores start from anything."""
    f, g = torch.zeros_like(scores.a), torch.zeros_like(scores.b)
    return _Scan(f, g, g != 0, scores.spread, scores.largest)


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
    pairs: Pairs, f: Tensor, g: Tensor, a: Tensor, b: Tensor, alone: Tensor, epsilon: float, tau: float, t: float
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
        here = star + beyond(step[start:stop], t) if t else star
        new[start:stop] = here = here.masked_fill(empty, _ALONE / epsilon if 0 < tau < 1 else 0.0)
        if tau == 1:
            error[start:stop] = a[start:stop] * torch.where(empty, 1.0, (here - star).expm1().abs())
        # Rows scaled by exp(log_scale): the plan without b. The largest factor so far stands outside the sum.
        log_scale = torch.where(empty, -torch.inf, log_a[start:stop] + here + top)
        higher = torch.maximum(shift, log_scale.amax())
        scale = (log_scale - higher).exp().to(dtype)
        columns.mul_((shift - higher).exp()).add_(torch.mv(block.mT, scale))
        shift = higher
    if not pairs.ranks.alone:  # one factor, and one sum, for the rows of all
        higher = -pairs.ranks.least(-shift)[0]
        (columns,) = pairs.ranks.sum(columns.to(wide) * (shift - higher).exp())
        shift = higher
    log_columns = shift + rest + columns.log()
    faint = ((columns < _FAINT) & (b > 0) & ~alone).nonzero().flatten()
    if len(faint):
        exact = scaled[faint] + _log_columns(pairs, new + log_a, epsilon, faint)
        log_columns = log_columns.index_copy(0, faint, exact)
    return _Sweep(epsilon * new, step, error.sum(), log_columns)


def _log_columns(pairs: Pairs, log_scale: Tensor, epsilon: float, columns: Tensor) -> Tensor:
    """Log of sum_i exp(log_scale_i - C_ij / epsilon) for an index of columns, wide; ``-inf`` if forbidden."""
    total = torch.full((len(columns),), -torch.inf, dtype=pairs.wide, device=log_scale.device)
    for start, stop in pairs.blocks():
        part = pairs.rows(start, stop)[:, columns].to(pairs.wide)
        total = torch.logaddexp(total, (log_scale[start:stop].unsqueeze(-1) - part / epsilon).logsumexp(0))
    return pairs.ranks.log_sum_exp(total)


def _noticed(
    sweep: _Sweep, a: Tensor, b: Tensor, g: Tensor, epsilon: float, tau: float, ranks: Ranks
) -> tuple[float, Tensor]:
    """L1 violation of both sides by the new f and the old g, and the mean of the increment of f."""
    by_column = _column_error(sweep.log_columns, g, b, epsilon, tau)
    error, mean = ranks.total(sweep.row_error + (by_column if ranks.first else 0.0), (a * sweep.increment).sum())
    return float(error), mean


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
        new = new + epsilon * beyond(-log_columns, t)
    # Nothing waits for atoms of weight zero.
    return torch.where(b > 0, new.masked_fill(alone, 0.0 if tau == 1 else _ALONE), g)


def _translation(
    f: Tensor, g: Tensor, a: Tensor, b: Tensor, epsilon: float, taus: tuple[float, float], ranks: Ranks
) -> Tensor:
    """What the update of g falls by if f and g first exchange the constant of :func:`absorbed.translation`."""
    if taus == (1.0, 1.0) or min(taus) == 0:
        return g.new_zeros(())
    scale = torch.full((1,), epsilon, dtype=g.dtype, device=g.device)
    masses = ranks.log_sum_exp(log_mass(f, a, scale, taus[0])), log_mass(g, b, scale, taus[1])
    # Where no atom has a partner there is no mass to balance.
    shift = exchanged(masses, scale, taus).squeeze().nan_to_num(0.0, 0.0, 0.0)
    return taus[0] * taus[1] * shift


class _Pace:
    """Over-relaxation of one problem, chosen from its errors every few sweeps."""

    def __init__(self, weights: Tensor, ranks: Ranks):
        self.relaxation, self.weights, self.ranks, self.last = Relaxation.start(1), weights, ranks, None
        self.quotient, self.sweeps = 0.0, 0

    @property
    def t(self) -> float:
        """How far beyond the plain update to go."""
        return float(self.relaxation.t[0])

    def see(self, error: float, increment: Tensor, t: float) -> None:
        """Take note of a sweep made with t, which moved f by ``increment`` beside what is common to all atoms."""
        a, self.sweeps = self.weights, self.sweeps + 1
        step = None
        if t == 0:  # increments of plain sweeps shrink by lambda; what is common to all is gauge
            step = increment.clamp(-50.0, 50.0)
            if self.last is not None and self.sweeps % _CHECK_EVERY == 0:
                sums = (a * step * self.last).sum(), (a * self.last.square()).sum()
                self.quotient = float(safe_divide(*self.ranks.total(*sums)))
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
    ranks = pairs.ranks
    (total_a,) = ranks.total(a.sum())
    total_b, sound = b.sum(), True
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
    by_column, reduced, unsound = ranks.sum(by_column, reduced, b.new_full((), not sound))
    if bool(unsound > 0):
        # Either there are costs that are none, or the potentials are out of proportion to epsilon.
        lost = torch.full_like(epsilon, torch.nan if _scan(pairs, a, b) is None else torch.inf)
        return lost, lost, -lost
    p, q, excess = a * (by_row + total_b), b * (by_column + total_a), (a * by_row).sum()
    error, value = torch.zeros_like(epsilon), -epsilon * excess
    r, c = _shrink(by_row + total_b), _shrink(reduced)
    # c is one over the larger of ``reduced`` and one. What is left of a row but for rounding is nothing.
    right = b * (1 - reduced).clamp_min(0.0)
    right = safe_divide(right, right.sum())
    tips = b * c
    if not ranks.first:  # what belongs to the target alone is added once
        b, q = torch.zeros_like(b), torch.zeros_like(q)
    for have, want, potential, tau in ((p, a, f, taus[0]), (q, b, g, taus[1])):
        rho = penalty(tau, epsilon)
        value = value + (want * conjugate(potential, rho)).sum()
        if tau > 0:
            error = error + (have - (want if rho is None else want * torch.exp(-potential / rho))).abs().sum()
    if taus != (1.0, 1.0):
        error, gap, value = ranks.total(error, penalised_gap(a, b, epsilon, (f, g), (p, q), taus), value)
        return error, gap, value

    least, tiny = 64 * torch.finfo(b.dtype).eps, torch.finfo(b.dtype).tiny
    on_target = safe_log(right) - tips.clamp_min(tiny).log()
    left, added = torch.zeros_like(a), torch.zeros_like(a)
    for start, stop in pairs.blocks():
        log_k, density = pairs.density(start, stop, f, g, float(epsilon))
        here, kept = a[start:stop], a[start:stop] * r[start:stop]
        share = 1 - r[start:stop] * torch.mv(density, tips)
        left[start:stop] = here = here * torch.where(share > least, share, 0.0)
        # log(E / D), -inf without E, where a forbidden pair does no harm.
        log_k.masked_fill_((here == 0).unsqueeze(-1) | (right == 0), torch.inf)
        gain = (safe_log(here) - kept.clamp_min(tiny).log()).unsqueeze(-1) - log_k
        gain = torch.nn.functional.softplus(gain.add_(on_target), threshold=40.0)
        added[start:stop] = here * torch.mv(gain, right)
        # Not zero times infinity.
        added[start:stop] += kept * torch.mv(density.mul_(gain.clamp_(max=_PLENTY)), tips)
    error, gap, value = ranks.total(error, rounded_gap(a, b, epsilon, (r, c, left, right), excess, added), value)
    return error, gap, value


def _sound(log_k: Tensor, epsilon: float) -> bool:
    """Whether every cost behind these exponents is one: potentials are far smaller than what is no cost."""
    limit = 1.01 * LARGEST_COST / epsilon
    low, high = float(log_k.amin()), float(log_k.amax())
    if low == -math.inf:
        low = float(log_k.masked_fill(log_k == -torch.inf, 0.0).amin())
    return -limit <= low and high <= limit  # NaN fails


def _shrink(mass: Tensor) -> Tensor:
    """Factor that takes a marginal, relative to what it should be, down to one; one where there is nothing to take."""
    return 1 / mass.clamp_min(1.0)
