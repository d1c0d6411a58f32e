"""Problems whose costs are inner products, by the GPU kernels: sweeps of scores that are made where they are summed.

A cost is split into what concerns a row, a column, and an inner product of centred features,

    C_ij = alpha_i + beta_j - <q_i, k_j>,

so that the products, all that is computed in float32, are as small as they can be: a translation of the points, the norms of
a squared distance and the potentials stay in vectors in the dtype of potentials. ``Scores`` sweeps with ``ops.scores``, or
descends with the kernel stored (``ops.triton.stored``); ``Density`` has the products that derivatives are made of.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sinkformer._numerics import potential_dtype, safe_log
from sinkformer._typing import Features, Potential, Weights
from sinkformer.costs import NegativeDot, SqEuclidean
from sinkformer.errors import BackendError
from sinkformer.ops import scores as of_scores
from sinkformer.ops import triton
from sinkformer.relaxation import Relaxation
from sinkformer.streamed.pairs import LARGEST_COST, PairCosts

# Rows and columns that the range of the costs is estimated from; annealing needs no more.
_SAMPLE = 256, 4096
# Sweeps with a stored kernel between two looks: the relaxation is first chosen after four.
_FIRST_LOOK, _EVERY = 4, 10
# A stored kernel is left once the error has shrunk by this factor, where its rounding (2^-9 of a change of the factors)
# begins to be seen, or after so many sweeps, ten times the cost of another. Without progress in so many kernels float32 is
# at its end.
_GAIN, _MOST_SWEEPS, _PATIENCE = 2.0**-6, 200, 3
# Factors, and sums of a new kernel, beyond e to this power are out of range.
_REACH = 40.0
# On the way to a small epsilon it shrinks by the factor once the error is small, or after so many sweeps: without the wait
# a 2 x 2 problem takes cost / epsilon sweeps.
ANNEALING, ON_THE_WAY, LONGEST_STAY = 0.5, 0.1, 20
# Share of the goal that a stored kernel has to reach: room for what its factors add.
_SHARE = 0.5
_LOG2_E = math.log2(math.e)


def check(costs: PairCosts, taus: tuple[float, float]) -> None:
    """Raise BackendError if the engine that the costs name cannot solve their problems; it says why."""
    reason = refusal(costs, taus)
    if reason is not None:
        raise BackendError(f"the engine {costs.engine!r} was asked for and cannot solve this problem: {reason}")


def refusal(costs: PairCosts, taus: tuple[float, float]) -> str | None:
    """Why the engine that the costs name cannot solve their problems; None if it can."""
    if costs.engine == "torch":
        return None
    if type(costs.cost) not in (NegativeDot, SqEuclidean) or costs.mask is not None:
        return (
            f"the kernels make scores from inner products: expected NegativeDot or SqEuclidean without a mask, received "
            f"{costs.cost!r}{'' if costs.mask is None else ' with a mask'}"
        )
    if not costs.ranks.alone:
        return "the kernels solve problems of one process"
    if costs.engine == "stored" and taus != (1.0, 1.0):
        return f"a stored kernel is swept for couplings (tau_a = tau_b = 1), received taus {taus}"
    return triton.unavailable(costs.x.device)


def beyond(step: Tensor, t: float) -> Tensor:
    """Log h(exp(step)), what is added to a plain update, with the h of :func:`relaxation.relaxed`."""
    x = step.clamp(-50.0, 50.0).exp()
    return (((1 + t) * x + 1 - t) / ((1 - t) * x + 1 + t)).log()


@dataclass(frozen=True, eq=False)
class Scores:
    """One problem of n x m atoms and features of dimension r; all tensors in the dtype of potentials.

    Attributes:
        q: ``(n, r)``, centred.
        k: ``(m, r)``, centred.
        alpha: ``(n,)``.
        beta: ``(m,)``.
        centres: of the source and of the target, which were subtracted, ``(r,)`` each.
        factor: of the inner product of the points in minus the cost.
        a: weights ``(n,)``.
        b: weights ``(m,)``.
        spread: largest minus smallest cost of a sample of the pairs of positive weight.
        largest: bound on the absolute values of their scores.
    """

    q: Features
    k: Features
    alpha: Potential
    beta: Potential
    centres: tuple[Tensor, Tensor]
    factor: float
    a: Weights
    b: Weights
    spread: float
    largest: float

    @classmethod
    def of(cls, costs: PairCosts, place: int, a: Weights, b: Weights) -> Scores | None:
        """A problem of a batch, outside the graph; None if there may be a cost beyond 1e29, or none at all, among its pairs."""
        wide = potential_dtype(a.device)
        x, y = (_sound(h[place].detach().to(wide), w) for h, w in ((costs.x, a), (costs.y, b)))
        centres = _mean(x, a), _mean(y, b)
        q, k = x - centres[0], y - centres[1]
        if type(costs.cost) is SqEuclidean:
            # |x - y|^2 = |x - y0|^2 + |y - y0|^2 - 2 <x0 - y0, y - y0> - 2 <x - x0, y - y0>.
            alpha = (x - centres[1]).square().sum(-1)
            beta = k.square().sum(-1) - 2 * (k @ (centres[0] - centres[1]))
            factor = 2.0
        else:
            alpha, beta, factor = -(q @ centres[1]), -(y @ centres[0]), 1.0
        q = factor * q
        live = a > 0, b > 0
        reach = [float(h[w].norm(dim=-1).amax()) for h, w in zip((q, k), live, strict=True)]
        ends = [float(h[w].abs().amax()) for h, w in zip((alpha, beta), live, strict=True)]
        largest = reach[0] * reach[1]
        if not sum(ends) + largest <= LARGEST_COST:  # NaN fails
            return None
        rows, columns = (_sample(w, most) for w, most in zip(live, _SAMPLE, strict=True))
        found = alpha[rows].unsqueeze(-1) + beta[columns] - q[rows] @ k[columns].mT
        low, high = torch.aminmax(found)
        return cls(q, k, alpha, beta, centres, factor, a.detach(), b.detach(), float(high - low), largest)

    def exponents(self, f: Potential, g: Potential, epsilon: float) -> tuple[Potential, Potential]:
        """What is added to <q, k> / epsilon in the logarithm of the density k = exp((f + g - C) / epsilon).

        Their common constant is where it makes both small, as float32 needs it.
        """
        left, right = (f - self.alpha) / epsilon, (g - self.beta) / epsilon
        constant = (self.b * right).sum()
        return left + constant, right - constant

    def narrow(self, scale: float) -> tuple[Features, Features]:
        """Features in float32 whose inner products are the scores times a scale.

        Not the scale in float32: its rounding would change all scores alike, that of features averages out.
        """
        return (self.q * scale).to(torch.float32), self.k.to(torch.float32)

    def derivative(self, masses: Tensor, moments: Tensor, *, of_target: bool) -> Features:
        """Derivative of sum_ij W_ij C_ij in the points of one side.

        Args:
            masses: sums of W over the other side, ``(n, 1)``.
            moments: sums of W times the features of the other side, ``(n, r)``: of ``k``, or of ``q`` for the target.
            of_target: whether those are the points of the target.

        Returns:
            ``(n, r)``.
        """
        here, there = self.centres[::-1] if of_target else self.centres
        if of_target:
            moments = moments / self.factor
        if self.factor == 1.0:
            return -(moments + masses * there)
        points = self.k if of_target else self.q / self.factor
        return self.factor * (masses * (points + (here - there)) - moments)

    def sweep(
        self, f: Potential, g: Potential, epsilon: float, tau: float, t: float
    ) -> tuple[Potential, Potential, Tensor, Potential]:
        """Update f, going the fraction t beyond, and sum the columns of what results.

        Exponents and sums are rounded to float32, whose error is that of the scores.

        Returns:
            The fields of ``iteration._Sweep``.
        """
        q, k = (h.unsqueeze(0) for h in self.narrow(1 / epsilon))
        h = (g - self.beta) / epsilon
        star = -tau * (_log_sum_exp(q, k, h + safe_log(self.b)) - self.alpha / epsilon)
        step = star - f / epsilon
        new = star + beyond(step, t) if t else star
        error = (self.a * torch.expm1(new - star).abs()).sum() if tau == 1 else torch.zeros_like(star[0])
        log_columns = h + _log_sum_exp(k, q, new - self.alpha / epsilon + safe_log(self.a))
        return epsilon * new, step, error, log_columns

    def descend(
        self,
        f: Potential,
        g: Potential,
        epsilon: float,
        temperature: float,
        goal: float,
        limit: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> tuple[Potential, Potential, int, Relaxation]:
        """Sweep with the kernel stored until the true error is at most the goal.

        The kernel of the potentials is built, its factors are swept, and their logarithms go to the potentials. The sums of
        a new kernel are those of the true one: they show the true error, and correct the rounded kernel. What its rounding
        adds to a round is a small part of what the round gains, and the next one corrects it.

        Args:
            f: potential ``(n,)`` to start from.
            g: potential ``(m,)``.
            epsilon: to solve for.
            temperature: to begin with, at least epsilon; falls as in the iteration over blocks.
            goal: L1 violation of both marginals; negative to spend all sweeps.
            limit: most sweeps.
            dtype: of the kernel, bfloat16 or float32.

        Returns:
            ``(f, g, spent, memory)``: potentials, sweeps made, and what is known for more of them.
        """
        stored: Any = importlib.import_module("sinkformer.ops.triton.stored")
        kernel = stored.Kernel(self.a.to(torch.float32), self.b.to(torch.float32), dtype)
        memory, best, idle, spent = Relaxation.start(1), math.inf, 0, 0
        gain = _GAIN if dtype == torch.bfloat16 else 0.0
        while spent < limit:
            error, sane = self._absorb(kernel, f, g, temperature)
            if not sane:  # sums beyond float32, but not their logarithms
                f, _, _, log_columns = self.sweep(f, g, temperature, 1.0, 0.0)
                g = torch.where(self.b > 0, g - temperature * log_columns, g)
                spent += 1
                continue
            if temperature > epsilon:
                spent += _warm(kernel, min(LONGEST_STAY, limit - spent))
            else:
                best, idle = (error, 0) if error < best else (best, idle + 1)
                if error <= goal or (goal >= 0 and idle == _PATIENCE):
                    break
                room = min(_MOST_SWEEPS, limit - spent)
                spent += _run(kernel, memory, max(_SHARE * goal, gain * error), room)
            f = f + temperature * kernel.u.to(f.dtype).log()
            g = g + temperature * kernel.v.to(g.dtype).log()
            temperature = max(epsilon, ANNEALING * temperature)
        return f, g, spent, memory

    def _absorb(self, kernel: Any, f: Potential, g: Potential, epsilon: float) -> tuple[float, bool]:
        """Build the kernel of two potentials: its true error, and whether its sums are in the range of float32."""
        left, right = self.exponents(f, g, epsilon)
        right = right + safe_log(self.b)
        rows, columns = kernel.build(*self.narrow(_LOG2_E / epsilon), _LOG2_E * left, _LOG2_E * right)
        a, b = self.a, self.b
        error = (a * (rows - 1)).abs().sum() + (columns - b).abs().sum()
        ratio = torch.cat((rows[a > 0], (columns / b)[b > 0])).log().abs().amax()
        found, ratio = torch.stack((error, ratio)).tolist()
        return found, ratio <= _REACH  # NaN fails


def _warm(kernel: Any, most: int) -> int:
    """Plain sweeps of a temperature on the way; how many."""
    made = 0
    while made < most:
        made += _several(kernel, min(_FIRST_LOOK, most - made), 0.0)
        if kernel.look().error <= ON_THE_WAY:
            break
    return made


def _run(kernel: Any, memory: Relaxation, goal: float, most: int) -> int:
    """Sweeps of one kernel, relaxed, until it has reached a goal or its factors are out of range; how many."""
    made, ends = 0, math.exp(_REACH)
    while made < most:
        planned = _EVERY if made else _FIRST_LOOK
        now = _several(kernel, min(planned, most - made), float(memory.t[0]))
        made += now
        seen = kernel.look()
        if now == planned:
            memory.update(np.array([seen.error]), now, np.array([seen.quotient]))
        if not seen.error > goal or not (1 / ends < seen.smallest and seen.largest < ends):
            break
    return made


def _several(kernel: Any, count: int, t: float) -> int:
    for _ in range(count):
        kernel.sweep(t)
    return count


class _Side(NamedTuple):
    """Atoms of one measure: features ``(1, n, r)`` in float32, exponents ``(n,)``, and which have weight."""

    features: Features
    exponents: Potential
    live: Tensor


@dataclass(frozen=True, eq=False)
class Density:
    """Products with the density k = exp((f + g - C) / epsilon) of solved potentials, by ``ops.scores``.

    Atoms of weight zero have their potentials too, but nothing bounds the density between two of them: such pairs count as
    zero. What rounding to float32 takes from the exponents is given back as factors; in ``entropies`` for the rows only.
    """

    to: _Side
    of: _Side

    @classmethod
    def of_potentials(cls, scores: Scores, f: Potential, g: Potential, epsilon: float) -> Density:
        """Of the sources, in products with numbers at the targets."""
        features, exponents = scores.narrow(1 / epsilon), scores.exponents(f, g, epsilon)
        to, of = (
            _Side(h.unsqueeze(0), exponent, weights > 0)
            for h, exponent, weights in zip(features, exponents, (scores.a, scores.b), strict=True)
        )
        return cls(to, of)

    @property
    def mT(self) -> Density:
        """The transposed matrix."""
        return Density(self.of, self.to)

    def times(self, values: Tensor) -> Tensor:
        """``(m,)`` to ``(n,)``, or ``(m, e)`` to ``(n, e)``."""
        if values.dim() == 1:
            return self.times(values.unsqueeze(-1)).squeeze(-1)
        found = _transport(self.to, None, self.of, self.of.live, values)
        void = ~self.of.live
        if bool((values[void] != 0).any()):
            found = found + _transport(self.to, self.to.live, self.of, void, values)
        return found

    def entropies(self, values: Tensor) -> Tensor:
        """Sums over j of k_ij log k_ij v_j, ``(m,)`` to ``(n,)``."""
        found = torch.zeros_like(self.to.exponents)
        for part, sign in ((values.clamp_min(0.0), 1), (-values.clamp_max(0.0), -1)):
            for used, asked in ((self.of.live, None), (~self.of.live, self.to.live)):
                some = torch.where(used, part, 0.0)
                if bool((some > 0).any()):
                    found = found + sign * self._entropies(some, used, asked)
        return found

    def _entropies(self, values: Tensor, used: Tensor, asked: Tensor | None) -> Tensor:
        """Of non-negative values at some atoms, for the atoms asked for: log k is a row, a score and a column."""
        (left, rest), (right, _) = (
            _in_two(self.to.exponents, asked),
            _in_two(self.of.exponents + safe_log(values), used),
        )
        scores = of_scores.moment(self.to.features, self.of.features, left, right)[0].to(rest.dtype) * rest.exp()
        sides = self.to, asked, self.of, used
        rows, columns = _transport(*sides, torch.stack((values, values * self.of.exponents), -1)).mT
        return self.to.exponents * rows + scores + columns


def _transport(to: _Side, asked: Tensor | None, of: _Side, used: Tensor, values: Tensor) -> Tensor:
    """Density times values at the atoms used, zero at those not asked for."""
    (left, rest), (right, other) = _in_two(to.exponents, asked), _in_two(of.exponents, used)
    narrow = torch.where(used.unsqueeze(-1), values * other.exp().unsqueeze(-1), 0.0).to(torch.float32)
    found = of_scores.transport(to.features, of.features, left, right, narrow.unsqueeze(0))[0]
    return found.to(rest.dtype) * rest.exp().unsqueeze(-1)


def _in_two(exponents: Tensor, used: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Exponents in float32 as a batch of one, ``-inf`` where not used, and what rounding took."""
    narrow = exponents.to(torch.float32)
    rest = torch.where(narrow.isfinite(), exponents - narrow.to(exponents.dtype), 0.0)
    return (narrow if used is None else narrow.masked_fill(~used, -torch.inf)).unsqueeze(0), rest


def _log_sum_exp(q: Features, k: Features, h: Potential) -> Potential:
    # A constant is nothing to be rounded with.
    constant = h.masked_fill(h.isinf(), torch.nan).nanmean()
    return of_scores.log_sum_exp(q, k, (h - constant).to(torch.float32).unsqueeze(0))[0].to(h.dtype) + constant


def _sound(points: Features, weights: Weights) -> Features:
    """Points of which padding that could spread is moved to the origin."""
    spoiled = (weights == 0) & ~(points.square().sum(-1) <= LARGEST_COST)
    return points.masked_fill(spoiled.unsqueeze(-1), 0.0)


def _mean(points: Features, weights: Weights) -> Tensor:
    return (weights.detach() @ points) / weights.detach().sum()


def _sample(live: Tensor, most: int) -> Tensor:
    """About so many of the atoms of positive weight, evenly."""
    index = live.nonzero().flatten()
    return index[:: max(1, -(-len(index) // most))]
