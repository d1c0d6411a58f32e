"""Newton's method on the semi-dual along a path of decreasing epsilon, for problems that plain sweeps leave unsolved.

A sweep multiplies the error by the squared second singular value of the normalised plan, which is close to one when the
plan is nearly decoupled: small epsilon, or two texts whose words have one partner each. Newton's method does not mind.
With f(g) the exact update of f, it maximises

    D(g) = <a, f(g)> + <b, g>,     gradient b - q,     Hessian -L / epsilon,     L = diag(q) - P^T diag(1/a) P,

concave, q the column sums of the plan; L is the Laplacian of a graph between the target's atoms, its kernel the
constants. For small epsilon D is nearly piecewise linear, and a Newton step from a flat piece leads nowhere; so the
solution is followed from an epsilon as large as the range of the cost, called the temperature on the way. Its tangent
solves a system with the same matrix: with s = log(P / (a (x) b)),

    L dg/dtemperature = sum_i P_ij (s_ij - sum_j P_ij s_ij / a_i).

In the end g is linear in the temperature up to terms exponentially small, and the tangent leads all the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from sinkformer import ops
from sinkformer._numerics import safe_divide, safe_log

# Beyond this many atoms on the smaller side the Hessian takes more memory (128 MiB here) and time than it saves.
MOST_ATOMS = 4000
# Numbers in the costs, and in the Hessians, held at a time: 128 MiB.
_ENTRIES = 2**24
# Problems whose smaller sides lie within a factor of two share a batch, as do all up to this size.
_SMALLEST_GROUP = 16
# What a Newton solve usually takes, in steps; and the most sweeps worth trying before it.
_USUAL_STEPS, _MOST_SWEEPS = 16, 1500
# Costs and updates from here on are those of forbidden pairs.
_LARGEST = 1e29
# The logarithm of a weight of zero, finite so that differences of it are; what quotients and logarithms are kept above.
_LOG_ZERO, _TINY = -1e300, 1e-300
# Added to the diagonal of L, in units of q: below that, connections between parts of the plan are rounding.
_RIDGE = 1e-13

# The size of a Newton step is its oscillation in units of the temperature: along it the curvature changes by at most the
# exponential of that. Up to _NEAR the tangent is believed; beyond _LOST the last jump was too far, and is taken back.
_NEAR, _LOST = 2.0, 6.0
# A column whose mass is wrong by more than exp(_FAR) wants a plain sweep: the tangent of an exponential says nothing.
_FAR = 2.0
# The L1 violation, and the mismatch |log(q / b)| of any column, that a jump may leave.
_LANDING_ERROR, _LANDING_MISMATCH = 0.1, 1.0
# The path starts at this fraction of the range of the cost.
_START = 0.1
# A jump is measured by the decrease of log temperature: growth after one that succeeded; shorter ones are not tried.
_GROWTH, _SHORTEST = 2.0, 0.1
# Below this fraction of range / (n m), a gap to be expected between vertices, g is close to linear, and jumps are as long
# as the point they start from is exact: a smaller Newton step than the first number tries the whole way, and a jump that
# multiplies it beyond the second waits for another Newton step.
_GAP, _SHARP, _BLURRED = 0.1, 0.03, 0.02
# Steps without this reduction, of the error or of the Newton step, after which a problem is given up.
_PROGRESS, _PATIENCE = 0.7, 6
# The same where Newton's method is tried from the given start; the most steps there, and the longest.
_HASTE, _DIRECT_STEPS, _REACH = 2, 12, 100.0
# Solved a little better than asked, so that rounding does not spoil it when it is measured in another order.
_MARGIN = 0.99
_GIVEN_UP = 10**6
# Most trials on a line. Where this fraction of the slope is left after a step, the line is flat or exponential, and a
# step twice as long is tried.
_TRIALS, _STEEP = 20, 0.01

_Self = TypeVar("_Self", bound="_Batch")


@dataclass
class _Batch:
    """Tensors with one leading axis, the problems of a batch. An index is increasing, without repetitions."""

    def pick(self: _Self, index: Tensor | slice) -> _Self:
        """The problems of an index: copies, unless it is the whole batch."""
        if isinstance(index, Tensor) and len(index) == len(getattr(self, fields(self)[0].name)):
            return replace(self)
        return replace(self, **{x.name: getattr(self, x.name)[index] for x in fields(self)})

    def put(self: _Self, index: Tensor, other: _Self) -> None:
        """Replace the problems of an index."""
        for x in fields(self):
            old, new = getattr(self, x.name), getattr(other, x.name)
            setattr(self, x.name, new if len(index) == len(old) else old.index_copy(0, index, new))


@dataclass
class _Problem(_Batch):
    """cost ``(B, n, m)``, weights ``(B, n)`` and ``(B, m)``, epsilon ``(B,)``."""

    cost: Tensor
    a: Tensor
    b: Tensor
    epsilon: Tensor

    def spread(self) -> Tensor:
        """Largest minus smallest cost of a pair that counts, ``(B,)``."""
        counts = (self.a > 0).unsqueeze(-1) & (self.b > 0).unsqueeze(-2) & (self.cost < _LARGEST)
        largest = self.cost.masked_fill(~counts, -torch.inf).amax((-1, -2))
        smallest = self.cost.masked_fill(~counts, torch.inf).amin((-1, -2))
        return (largest - smallest).clamp_min(0.0)


@dataclass
class _Point(_Batch):
    """What is known at potentials g: f is their exact update, so that the rows of the plan sum to a."""

    g: Tensor
    f: Tensor
    temperature: Tensor
    plan: Tensor
    logits: Tensor  # (g - C) / temperature + log b, less a number for each row
    q: Tensor
    value: Tensor
    size: Tensor  # of the terms whose sum the value is

    def error(self, problem: _Problem) -> Tensor:
        """L1 violation of the target marginal, ``(B,)``."""
        return (self.q - problem.b).abs().sum(-1)

    def mismatch(self, problem: _Problem) -> Tensor:
        """Largest |log(q / b)| of a column, ``(B,)``."""
        ratio = safe_divide(self.q, problem.b).clamp_min(_TINY).log().abs()
        return ratio.masked_fill(problem.b == 0, 0.0).amax(-1)

    def connected(self, problem: _Problem) -> Tensor:
        """Whether each column could be corrected by itself without a step that is ``_LOST``, ``(B,)``."""
        shares = self.plan * safe_divide(torch.ones_like(problem.a), problem.a).unsqueeze(-1)
        degree = (self.plan * (1 - shares)).sum(-2) + _RIDGE * self.q
        return ((self.q - problem.b).abs() <= _LOST * degree).all(-1)

    def beats(self, other: _Point, problem: _Problem) -> Tensor:
        """Whether the dual value is higher; where the difference is rounding, whether the error is smaller."""
        gain, rounding = self.value - other.value, 16 * torch.finfo(self.value.dtype).eps * (self.size + other.size)
        return (gain > rounding) | ((gain >= -rounding) & (self.error(problem) < other.error(problem)))


@dataclass
class _Path(_Batch):
    """The last point of the path that was trusted, and the jump from there."""

    g: Tensor
    temperature: Tensor
    tangent: Tensor
    step: Tensor  # the Newton step that led to g
    stride: Tensor  # decrease of log temperature to try
    gap: Tensor
    bold: Tensor  # whether the jump was long enough to be taken back


@dataclass
class _Race(_Batch):
    """Where each problem belongs, its steps so far, and its best since the last jump."""

    index: Tensor
    steps: Tensor
    most: Tensor
    error: Tensor
    step: Tensor
    idle: Tensor


def sweeps_first(n: int, m: int) -> int:
    """Plain sweeps that take as long as Newton's method does, for one problem with n and m atoms.

    A usual solve takes 16 steps, and a step about as long as min(n, m) - 1 sweeps.
    """
    return min(_MOST_SWEEPS, _USUAL_STEPS * max(1, min(n, m) - 1))


def rescue(
    cost: Tensor, a: Tensor, b: Tensor, epsilon: Tensor, g: Tensor, tolerance: float, most: int | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve a flat batch of balanced problems, however small epsilon is.

    Newton's method is tried from g; problems that resist are followed from a large epsilon down to theirs.

    Args:
        cost: ``(B, n, m)``, float64, finite (a forbidden pair costs 1e30).
        a: weights ``(B, n)``; zero is padding.
        b: weights ``(B, m)``; zero is padding.
        epsilon: ``(B,)``.
        g: start, ``(B, m)``.
        tolerance: L1 violation of the target marginal to stop at, f being updated exactly.
        most: most steps to spend on a problem, a number or ``(B,)``.

    Returns:
        ``(g, steps, solved)``: finite potentials; the steps of each problem, int64 ``(B,)``, a step being one linear
        system or one plain sweep; whether the violation, measured at the g returned, is within the tolerance. Of a
        problem unsolved, the best dual value met is returned, not below that of the start but for rounding. Potentials
        of atoms of weight zero, and of problems with more than ``MOST_ATOMS`` atoms on both sides, are those of the start.
    """
    found, solved = g.clone(), torch.zeros_like(epsilon, dtype=torch.bool)
    steps = torch.zeros(len(g), dtype=torch.int64, device=g.device)
    most = torch.as_tensor(most, device=g.device).expand(len(g))
    if not g.numel() or min(cost.shape[1:]) > MOST_ATOMS:
        return found, steps, solved
    for group in _groups(a, b):
        given = _Problem(cost[group], a[group], b[group], epsilon[group])
        problem, start, unpack = _packed(given, g[group])
        reached, steps[group] = _solve(problem, start, _MARGIN * tolerance, most[group])
        reached = unpack(reached)
        before, after = _evaluate(given, g[group], given.epsilon), _evaluate(given, reached, given.epsilon)
        good = after.error(given) <= tolerance
        better = (good | after.beats(before, given)) & torch.isfinite(reached).all(-1)
        found[group] = torch.where(better.unsqueeze(-1), reached, g[group])
        solved[group] = good & better
    return found, steps, solved


def _groups(a: Tensor, b: Tensor) -> Iterator[Tensor]:
    """Indices of problems of similar size, few enough for the memory; those to be transposed come last."""
    rows, columns = (a > 0).sum(-1), (b > 0).sum(-1)
    larger, smaller = torch.maximum(rows, columns), torch.minimum(rows, columns)
    level = (smaller.clamp_min(_SMALLEST_GROUP) - 0.5).log2().floor()
    for k in level.unique():
        group = (level == k).nonzero().flatten()
        group = group[(rows < columns)[group].to(torch.int8).argsort(stable=True)]
        entries = int(larger[group].max()) * int(smaller[group].max())
        yield from group.split(max(1, _ENTRIES // max(1, entries)))


def _packed(given: _Problem, g: Tensor) -> tuple[_Problem, Tensor, Callable[[Tensor], Tensor]]:
    """The problems of a group without their padding, the smaller side as the target; their start; the way back to g."""
    straight = int(((given.a > 0).sum(-1) >= (given.b > 0).sum(-1)).sum())
    parts = [(slice(0, straight), False), (slice(straight, len(g)), True)]
    parts = [(part, turned) for part, turned in parts if len(g[part])]
    problems, starts, live = [], [], []
    for part, turned in parts:
        problem, start = given.pick(part), g[part]
        if turned:
            start = ops.softmin(problem.cost, start, safe_log(problem.b), problem.epsilon)
            problem = _Problem(problem.cost.mT, problem.b, problem.a, problem.epsilon)
        i, j = _live(problem.a), _live(problem.b)
        cost = problem.cost.gather(1, i.unsqueeze(-1).expand(-1, -1, problem.b.shape[-1]))
        cost = cost.gather(2, j.unsqueeze(-2).expand(-1, i.shape[-1], -1))
        problems.append(_Problem(cost, problem.a.gather(1, i), problem.b.gather(1, j), problem.epsilon))
        starts.append(start.gather(1, j))
        live.append(j)
    n, m = (max(problem.cost.shape[k] for problem in problems) for k in (1, 2))
    packed = _Problem(
        torch.cat([pad(x.cost, (0, m - x.cost.shape[2], 0, n - x.cost.shape[1])) for x in problems]),
        torch.cat([pad(x.a, (0, n - x.a.shape[1])) for x in problems]),
        torch.cat([pad(x.b, (0, m - x.b.shape[1])) for x in problems]),
        torch.cat([x.epsilon for x in problems]),
    )

    def unpack(h: Tensor) -> Tensor:
        found = g.clone()
        for (part, turned), j in zip(parts, live, strict=True):
            problem, reached = given.pick(part), h[part, : j.shape[-1]]
            if turned:
                f = torch.zeros_like(problem.a).scatter(1, j, reached)
                full = ops.softmin(problem.cost.mT, f, safe_log(problem.a), problem.epsilon)
            else:
                full = g[part].scatter(1, j, reached)
            found[part] = torch.where((problem.b > 0) & (full.abs() < _LARGEST), full, g[part])
        return found

    return packed, torch.cat([pad(x, (0, m - x.shape[1])) for x in starts]), unpack


def _live(weights: Tensor) -> Tensor:
    """Indices of the atoms of positive weight, ``(B, most of them)``; a row with fewer is filled up with others."""
    width = max(1, int((weights > 0).sum(-1).max()))
    return (weights == 0).to(torch.int8).argsort(dim=-1, stable=True)[:, :width]


def _solve(problem: _Problem, g: Tensor, tolerance: float, most: Tensor) -> tuple[Tensor, Tensor]:
    """``(g, steps)``: from the start as it is; where that does not get there, along the path, and the better of both."""
    direct = most.clamp_max(_DIRECT_STEPS)
    g, steps, solved = _follow(problem, g, problem.epsilon, tolerance, direct, patience=_HASTE, reach=_REACH)
    left = (~solved).nonzero().flatten()
    if len(left):
        rest, stuck = problem.pick(left), g[left]
        cold, budget = torch.zeros_like(stuck), most[left] - steps[left]
        high = torch.maximum(_START * rest.spread(), rest.epsilon)
        afresh, more, reached = _follow(rest, cold, high, tolerance, budget, patience=_PATIENCE, reach=torch.inf)
        here, there = _evaluate(rest, stuck, rest.epsilon), _evaluate(rest, afresh, rest.epsilon)
        better = reached | there.beats(here, rest)
        g = g.index_copy(0, left, torch.where(better.unsqueeze(-1), afresh, stuck))
        steps = steps.index_add(0, left, more)
    return g, steps


def _follow(
    problem: _Problem,
    g: Tensor,
    temperature: Tensor,
    tolerance: float,
    most: Tensor,
    *,
    patience: int,
    reach: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Newton's method from g at ``temperature``, lowered to epsilon by jumps along the tangent of the solution.

    Near the solution of a temperature one factor serves both the last Newton step there and the tangent, and a jump is
    tried: as far as it leaves a small violation, which costs no factorisation to find out.

    Returns:
        ``(g, steps, solved)``; the g of a problem unsolved may be that of a larger epsilon.
    """
    size, infinite = len(g), torch.full_like(temperature, torch.inf)
    no, zero = torch.zeros_like(temperature, dtype=torch.bool), torch.zeros(size, dtype=torch.int64, device=g.device)
    found, steps, solved = g.clone(), zero.clone(), no.clone()
    pairs = (problem.a > 0).sum(-1) * (problem.b > 0).sum(-1)
    path = _Path(
        g, temperature, torch.zeros_like(g), infinite, infinite, _GAP * problem.spread() / pairs.clamp_min(1), no
    )
    race = _Race(torch.arange(size, device=g.device), zero, most, infinite, infinite, zero)
    point = _evaluate(problem, g, temperature)
    while True:
        error = point.error(problem)
        race.idle = torch.where(error < _PROGRESS * race.error, 0, race.idle + 1)
        race.error = torch.minimum(race.error, error)
        reached = (point.temperature <= problem.epsilon) & (error <= tolerance)
        done = reached | (race.idle > patience) | (race.steps >= race.most) | ~torch.isfinite(error)
        if bool(done.any()):
            out, stay = done.nonzero().flatten(), (~done).nonzero().flatten()
            home = race.index[out]
            found[home], steps[home], solved[home] = point.g[out], race.steps[out], reached[out]
            if not len(stay):
                return found, steps, solved
            problem, point, path, race = problem.pick(stay), point.pick(stay), path.pick(stay), race.pick(stay)
        race.steps = race.steps + 1
        far = point.mismatch(problem) > _FAR
        away, near = far.nonzero().flatten(), (~far).nonzero().flatten()
        if len(away):
            point.put(away, _sweep(problem.pick(away), point.pick(away)))
        if len(near):
            here, way, lap = point.pick(near), path.pick(near), race.pick(near)
            _step(problem.pick(near), here, way, lap, tolerance, reach)
            point.put(near, here)
            path.put(near, way)
            race.put(near, lap)


def _evaluate(problem: _Problem, g: Tensor, temperature: Tensor) -> _Point:
    log_b = torch.where(problem.b > 0, problem.b.clamp_min(_TINY).log(), _LOG_ZERO)
    logits = ((g.unsqueeze(-2) - problem.cost) / temperature.view(-1, 1, 1)).add_(log_b.unsqueeze(-2))
    largest = logits.amax(-1, keepdim=True).clamp_min(_LOG_ZERO)
    plan = logits.sub_(largest).exp()
    total = plan.sum(-1).clamp_min(_TINY)
    f = -temperature.unsqueeze(-1) * (largest.squeeze(-1) + total.log())
    plan = plan.mul_((problem.a / total).unsqueeze(-1))
    left, right = problem.a * f, problem.b * g
    return _Point(
        g=g,
        f=f,
        temperature=temperature,
        plan=plan,
        logits=logits,
        q=plan.sum(-2),
        value=left.sum(-1) + right.sum(-1),
        size=left.abs().sum(-1) + right.abs().sum(-1),
    )


def _sweep(problem: _Problem, point: _Point) -> _Point:
    """The exact update of g, then that of f."""
    g = ops.softmin(problem.cost.mT, point.f, safe_log(problem.a), point.temperature)
    g = torch.where((problem.b > 0) & (g.abs() < _LARGEST), g, point.g)
    return _evaluate(problem, g, point.temperature)


def _directions(problem: _Problem, point: _Point) -> tuple[Tensor, Tensor, Tensor]:
    """``(newton, tangent, usable)``: the Newton step in units of the temperature, dg/dtemperature, both ``(B, m)``."""
    a, b, plan, q = problem.a, problem.b, point.plan, point.q
    one_over_a = safe_divide(torch.ones_like(a), a)
    matrix = plan.mT @ (plan * one_over_a.unsqueeze(-1))
    # The diagonal is the sum of the other entries instead of a difference from q, which would be rounding where parts of
    # the plan are nearly decoupled.
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    diagonal.zero_()
    degree = matrix.sum(-1) + _RIDGE * q
    empty = ~(degree > 0)
    matrix.neg_()
    diagonal.copy_(torch.where(empty, 1.0, degree))
    # The kernel is taken out by holding one potential fixed.
    batch, fixed = torch.arange(len(b), device=b.device), b.argmax(-1)
    matrix[batch, fixed] = 0.0
    matrix[batch, :, fixed] = 0.0
    matrix[batch, fixed, fixed] = 1.0
    factor, failed = torch.linalg.cholesky_ex(matrix)

    log_b = torch.where(b > 0, b.clamp_min(_TINY).log(), 0.0)
    weighted = plan * point.logits
    mean = (weighted.sum(-1) - ops.apply(plan, log_b)) * one_over_a
    drift = weighted.sum(-2) - log_b * q - ops.apply(plan.mT, mean)
    right = torch.stack((b - q, drift), -1).masked_fill(empty.unsqueeze(-1), 0.0)
    right[batch, fixed] = 0.0
    solution = torch.cholesky_solve(right, factor)
    usable = (failed == 0) & torch.isfinite(solution).flatten(1).all(-1)
    # Without a factorisation: a plain update, g + temperature log(b / q).
    plain = log_b - q.clamp_min(_TINY).log()
    newton = torch.where(usable.unsqueeze(-1), solution[..., 0], plain).masked_fill(b == 0, 0.0)
    tangent = torch.where(usable.unsqueeze(-1), solution[..., 1], 0.0).masked_fill(b == 0, 0.0)
    return newton, tangent, usable


def _step(problem: _Problem, point: _Point, path: _Path, race: _Race, tolerance: float, reach: float) -> None:
    """One factorisation: a jump to a lower temperature, or a Newton step at this one. Everything is updated in place."""
    newton, tangent, usable = _directions(problem, point)
    live = problem.b > 0
    step = newton.masked_fill(~live, -torch.inf).amax(-1) - newton.masked_fill(~live, torch.inf).amin(-1)
    race.idle = torch.where(step < _PROGRESS * race.step, 0, race.idle)
    race.step = torch.minimum(race.step, step)

    onwards = (point.temperature > problem.epsilon) & (step <= _NEAR) & usable
    back = path.bold & ~onwards & (step > _LOST)
    # A step below the rounding of g is the last.
    rounding = torch.finfo(step.dtype).eps * point.g.abs().amax(-1)
    last = ~onwards & (step * point.temperature <= 2 * rounding)
    race.idle = race.idle.masked_fill(last | (step > reach), _GIVEN_UP)

    keep = onwards.unsqueeze(-1)
    path.g = torch.where(keep, point.g + point.temperature.unsqueeze(-1) * newton, path.g)
    path.tangent = torch.where(keep, tangent, path.tangent)
    path.temperature = torch.where(onwards, point.temperature, path.temperature)
    path.step = torch.where(onwards, step, path.step)
    sharp = ((step <= _SHARP) & (point.temperature < path.gap)) | (point.error(problem) <= tolerance)
    stride = torch.where(sharp, torch.inf, _GROWTH * path.stride)
    path.stride = torch.where(onwards, stride, torch.where(back, path.stride / 2, path.stride))

    landed = torch.zeros_like(usable)
    jumping = (onwards | back).nonzero().flatten()
    if len(jumping):
        landed = _jump(problem, point, path, jumping, back, tolerance)
        race.error, race.step = race.error.masked_fill(landed, torch.inf), race.step.masked_fill(landed, torch.inf)
        race.idle = race.idle.masked_fill(landed, 0)
    staying = (~landed).nonzero().flatten()
    if len(staying):
        _climb(problem, point, newton, step, staying)


def _jump(problem: _Problem, point: _Point, path: _Path, trying: Tensor, back: Tensor, tolerance: float) -> Tensor:
    """Lower the temperature of some problems as far as the tangent leads; for which of all problems it did, ``(B,)``."""
    landed = torch.zeros_like(back)
    way = (path.temperature / problem.epsilon).log()
    stride, bold = torch.minimum(path.stride, way), path.bold.index_fill(0, trying, False)
    blurred = ~back & (path.temperature < path.gap)
    while len(trying):
        part, base, length = problem.pick(trying), path.pick(trying), stride[trying]
        whole = length >= way[trying]
        temperature = torch.where(whole, part.epsilon, base.temperature * (-length).exp())
        g = base.g + (temperature - base.temperature).unsqueeze(-1) * base.tangent
        there = _evaluate(part, g, temperature)
        error = there.error(part)
        good = (error <= _LANDING_ERROR) & (there.mismatch(part) <= _LANDING_MISMATCH) & there.connected(part)
        good |= whole & (error <= tolerance)
        # The error of the starting point grows along the jump: where that cut it short, a Newton step pays more.
        waits = good & ~whole & blurred[trying] & (base.step * torch.expm1(length) > _BLURRED)
        down = (good & ~waits).nonzero().flatten()
        point.put(trying[down], there.pick(down))
        landed[trying[down]] = True
        bold[trying[down]] = length[down] > 2 * _SHORTEST
        stride[trying[waits]] /= _GROWTH
        stride[trying[~good]] /= 2
        trying = trying[~good]
        trying = trying[stride[trying] >= _SHORTEST]
    path.stride, path.bold = stride.clamp_min(_SHORTEST), bold
    return landed


def _climb(problem: _Problem, point: _Point, newton: Tensor, step: Tensor, trying: Tensor) -> None:
    """Ascend along the Newton direction, for some of the problems."""
    problem, newton, step = problem.pick(trying), newton[trying], step[trying]
    g, temperature, value = point.g[trying], point.temperature[trying], point.value[trying]
    slope, slack = ((problem.b - point.q[trying]) * newton).sum(-1), 1e-14 * point.size[trying]
    # A full step; if that is too far, one that the change of curvature allows (Bach 2010), then halves of it.
    damped = (torch.log1p(step) / step.clamp_min(_TINY)).clamp_max(0.5)
    length, beyond = torch.ones_like(step), torch.zeros_like(step, dtype=torch.bool)
    left = torch.arange(len(trying), device=trying.device)
    for trial in range(_TRIALS):
        part, move = problem.pick(left), (length * temperature)[left]
        there = _evaluate(part, g[left] + move.unsqueeze(-1) * newton[left], temperature[left])
        ahead = ((part.b - there.q) * newton[left]).sum(-1)
        # Where the value is blind for rounding, its derivative along the line is not.
        risen = there.value >= value[left] + 1e-4 * move * slope[left] - slack[left]
        good = risen & (ahead >= torch.where(beyond[left], 0.0, -0.9) * slope[left].abs())
        taken = good.nonzero().flatten()
        point.put(trying[left[taken]], there.pick(taken))
        further, shorter = left[good & (ahead > _STEEP * slope[left])], left[~good & ~beyond[left]]
        length[further] *= 2
        beyond[further] = True
        length[shorter] = length[shorter] / 2 if trial else damped[shorter]
        left = torch.cat((further, shorter)).sort().values
        if not len(left):
            return
    left = left[~beyond[left]]
    if len(left):
        # No ascent along that direction, however short: the curvature is lost in rounding. A plain sweep always ascends.
        point.put(trying[left], _sweep(problem.pick(left), point.pick(trying[left])))
