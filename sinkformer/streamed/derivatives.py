"""First derivatives of streamed solutions: passes over blocks of rows, and conjugate gradients made of such passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sinkformer._numerics import penalty, potential_dtype, safe_divide
from sinkformer._typing import PerProblem, Potential, Weights
from sinkformer.costs import Cost, Matrix
from sinkformer.differentiation import LinearSolve, conjugate
from sinkformer.errors import BackendError
from sinkformer.streamed.kernels import Density, Scores, check
from sinkformer.streamed.pairs import Engine, PairCosts, Pairs
from sinkformer.streamed.ranks import Ranks

# Place of epsilon among the inputs.
_EPSILON = 6
# Most steps of conjugate gradients, and the relative residual below which blocks in float32 are no use.
_MOST_CG_STEPS, _FLOAT32_RTOL = 1000, 1e-5


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

    Over several ranks the derivatives in x and a belong to the rows of this one, those in y, b and epsilon are summed over
    the rows of all: every rank has the whole of them. All ranks must differentiate the same functions of value and g.

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
        BackendError: the cost has parameters that require a gradient, or the costs name an engine that cannot solve these
            problems; in the backward pass, a second derivative.
        DistributedError: in the backward pass, of ranks whose losses depend on value or g in different ways.
    """
    check(costs, taus)
    _refuse_parameters(costs, work)
    values = costs.cost.values if isinstance(costs.cost, Matrix) else None
    given = (costs.x, costs.y, values, costs.mask, a, b, epsilon)
    attached = _Potentials.apply(*given, f, g, value, costs.cost, taus, work, costs.ranks, costs.engine, how)
    assert isinstance(attached, tuple)
    f, g = attached
    value = _Value.apply(*given, f.detach(), g.detach(), value, costs.cost, taus, work, costs.ranks, costs.engine)
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
    """Sums up the derivative of sum_ij W_ij C_ij in what makes the costs of one problem.

    W is given a block at a time, or in products with its density if the problem has ``scores`` for the kernels.
    """

    def __init__(self, costs: PairCosts, k: int, a: Tensor, b: Tensor, work: torch.dtype, needed: tuple[bool, ...]):
        by_kernels = costs.engine != "torch" and work == torch.float32
        self.scores = Scores.of(costs, k, a, b) if by_kernels else None
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

    def add_products(self, density: Density, lefts: Tensor, rights: Tensor) -> None:
        """W = k o (lefts rights^T), ``(n, c)`` and ``(m, c)``, of which nothing of size n x m is made."""
        scores = self.scores
        assert scores is not None
        sides = (density, lefts, rights, scores.k, False), (density.mT, rights, lefts, scores.q, True)
        for grad, (to, outer, inner, features, of_target) in zip(self.grads[:2], sides, strict=True):
            if grad is not None:
                features = torch.cat((torch.ones_like(features[:, :1]), features), -1)
                weighted = inner.unsqueeze(-1) * features.unsqueeze(1)
                products = to.times(weighted.flatten(1)).unflatten(1, weighted.shape[1:])
                products = (outer.unsqueeze(-1) * products).sum(1)
                grad += scores.derivative(products[:, :1], products[:, 1:], of_target=of_target)


def _gradients(ctx: Any, one: Callable[..., tuple[Tensor, Tensor, Tensor]], *upstream: Tensor) -> tuple[Any, ...]:
    """Gradients of the seven inputs behind ``ctx``, problem by problem, from ``one`` of them."""
    *inputs, f, g, value = ctx.saved_tensors
    x, y, values, mask, a, b, epsilon = inputs
    costs = PairCosts(ctx.cost if values is None else Matrix(values), x, y, mask, ctx.ranks, ctx.engine)
    parts = []
    with torch.no_grad():
        for k in range(len(value)):
            pull = _Pull(costs, k, a[k], b[k], ctx.work, ctx.needs_input_grad)
            here = a[k], b[k], epsilon[k]
            others = [torch.zeros_like(h) for h in here]
            if not bool(value[k].isnan()):
                pairs = costs.problem(k, a[k], b[k], ctx.work)
                others = one(ctx, k, pairs, pull, *here, f[k], g[k], *(h[k] for h in upstream))
            if pull.grads[1] is not None:
                (pull.grads[1],) = ctx.ranks.sum(pull.grads[1])
            parts.append([*pull.grads, *others])
        found = [
            torch.stack([part[place] for part in parts]).to(given.dtype) if parts else torch.zeros_like(given)
            for place, given in enumerate(inputs)
            if ctx.needs_input_grad[place]
        ]
    # Marked if they may be differentiated again: a constant would pass for a derivative of zero.
    if torch.is_grad_enabled():
        found = _FirstOrder.apply(ctx.ranks, len(found), *found, *inputs, *upstream)
        assert isinstance(found, tuple)
    rest = iter(found)
    return tuple(next(rest) if needed else None for needed in ctx.needs_input_grad)


def _remember(
    ctx: Any,
    inputs: tuple,
    f: Tensor,
    g: Tensor,
    value: Tensor,
    cost: Cost,
    taus: tuple,
    work: torch.dtype,
    ranks: Ranks,
    engine: Engine,
):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, f, g, value)
    ctx.cost, ctx.taus, ctx.work = None if isinstance(cost, Matrix) else cost, taus, work
    ctx.ranks, ctx.engine = ranks, engine


class _FirstOrder(torch.autograd.Function):
    """The identity on first derivatives, a function of what they depend on, which cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, count: int, *tensors: Tensor | None):
        ctx.alone = ranks.alone
        return tuple(t.clone() for t in tensors[:count] if t is not None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        remedy = (
            "use an engine that holds the cost matrix, or gradient='unrolled'"
            if ctx.alone
            else "solve in one process, without process_group, on an engine that holds the cost matrix"
        )
        raise BackendError(
            f"expected first derivatives only, received a request for second ones: the streamed engine has none; {remedy}"
        )


class _Value(torch.autograd.Function):
    """The dual value, with the envelope derivative: P, f, g and KL(P | a (x) b); none through the potentials."""

    @staticmethod
    def forward(ctx: Any, x, y, values, mask, a, b, epsilon, f, g, value, cost, taus, work, ranks, engine):
        _remember(ctx, (x, y, values, mask, a, b, epsilon), f, g, value, cost, taus, work, ranks, engine)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):
        if grads[0] is None:
            return (None,) * 15
        ctx.ranks.check_copies(grads[0], "value")
        return _gradients(ctx, _envelope, grads[0])


def _envelope(
    ctx: Any,
    place: int,
    pairs: Pairs,
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
    if pull.scores is not None:
        density = Density.of_potentials(pull.scores, f, g, float(epsilon))
        by_row, by_column = density.times(b) - b.sum(), density.mT.times(a) - a.sum()
        if ctx.needs_input_grad[_EPSILON]:
            information = (a * density.entropies(b)).sum()
        pull.add_products(density, (upstream * a).unsqueeze(-1), b.unsqueeze(-1))
    for start, stop in pairs.blocks() if pull.scores is None else ():
        narrow_b = b.to(pairs.dtype)
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
    by_column, information, at_rows = pairs.ranks.sum(by_column, information, (a * by_row).sum())
    rho_a, rho_b = (penalty(tau, epsilon) for tau in ctx.taus)
    on_a = conjugate(f, rho_a) - epsilon * by_row
    on_b = conjugate(g, rho_b) - epsilon * by_column
    on_epsilon = information - at_rows
    # At fixed tau the penalties move with epsilon: rho = epsilon tau / (1 - tau).
    for weights, potential, rho in ((a, f, rho_a), (b, g, rho_b)):
        if rho is not None:
            ratio = safe_divide(potential, rho)
            total = (weights * (-torch.expm1(-ratio) - ratio * torch.exp(-ratio))).sum()
            if weights is a:
                (total,) = pairs.ranks.sum(total)
            on_epsilon = on_epsilon + total * rho / epsilon
    return upstream * on_a, upstream * on_b, upstream * on_epsilon


class _Potentials(torch.autograd.Function):
    """The identity on given potentials, with the derivative of the solution map."""

    @staticmethod
    def forward(ctx: Any, x, y, values, mask, a, b, epsilon, f, g, value, cost, taus, work, ranks, engine, how):
        f, g = f.clone(), g.clone()
        _remember(ctx, (x, y, values, mask, a, b, epsilon), f, g, value, cost, taus, work, ranks, engine)
        rtol = how.rtol if work == torch.float64 else max(how.rtol, _FLOAT32_RTOL)
        ctx.how = LinearSolve(rtol, conditioning=how.conditioning)
        return f, g

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):
        if all(grad is None for grad in grads):  # the value alone was used, which needs no solve
            return (None,) * 16
        f, g = ctx.saved_tensors[-3:-1]
        upstream = [torch.zeros_like(h) if d is None else d for d, h in zip(grads, (f, g), strict=True)]
        ctx.ranks.check_copies(upstream[1], "g")
        ctx.residual, ctx.ritz = (torch.full(f.shape[:1], x, dtype=f.dtype, device=f.device) for x in (0.0, math.nan))
        found = _gradients(ctx, _solution_map, *upstream)
        ctx.how.record(ctx.residual, ctx.ritz)
        return found


def _solution_map(
    ctx: Any,
    place: int,
    pairs: Pairs,
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

    whole_density = None if pull.scores is None else Density.of_potentials(pull.scores, f, g, scale)

    def over() -> Iterator[tuple[int, int, Any, Any]]:
        """Blocks of rows with log k and k, or all rows at once without a matrix."""
        if whole_density is not None:
            yield 0, len(a), None, whole_density
            return
        for start, stop in pairs.blocks():
            yield start, stop, *pairs.density(start, stop, f, g, scale)

    def times(block: Tensor | Density, v: Tensor) -> Tensor:
        if isinstance(block, Density):
            return block.times(v)
        return torch.mv(block, v.to(block.dtype)).to(pairs.wide)

    # Columns of weight zero couple one way only.
    by_dead = None
    if bool((dead != 0).any()):
        q = torch.zeros_like(b)
        for i, j, _, density in over():
            q += times(density.mT, a[i:j])
        (q,) = pairs.ranks.sum(q)
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
    q, right, size = pairs.ranks.sum(q, right, size)
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
        (image,) = pairs.ranks.sum(image)
        return mass * v - theta * b * image

    right = balanced(right)
    whole = pairs.ranks.leading(whole)
    x, ctx.ritz[place] = _conjugate_gradients(
        matrix, balanced, right, scaling, ctx.how.rtol, float(whole), lambda t: float(pairs.ranks.leading(t))
    )
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
        if whole_density is not None:
            pull.add_products(whole_density, torch.stack((per_p, here), -1), torch.stack((b, per_q), -1))
            if ctx.needs_input_grad[_EPSILON]:
                entropies = whole_density.entropies
                on_epsilon += (per_p * entropies(b)).sum() + (here * entropies(per_q)).sum()
            continue
        if any(pull.needed):
            weights = torch.outer(per_p.to(narrow), b.to(narrow)).addr_(here.to(narrow), per_q.to(narrow))
            pull.add(i, j, weights.mul_(density))
        # Where k vanishes so does k log k.
        information = log_k.masked_fill_(density == 0, 0.0).mul_(density)
        on_epsilon += (per_p * times(information, b)).sum() + (here * times(information, per_q)).sum()
    by_source = on_epsilon + (1 - tau_a) * (left * f).sum() / epsilon
    on_b, image, by_source = pairs.ranks.sum(on_b, image, by_source)
    residual = balanced(right - (mass * x - theta * b * image))
    ctx.residual[place] = safe_divide((residual.square() / scaling).sum(), whole).sqrt()
    return -epsilon * on_a, -epsilon * on_b, by_source + (1 - tau_b) * (up * g).sum() / epsilon


def _conjugate_gradients(
    matrix: Callable[[Tensor], Tensor],
    project: Callable[[Tensor], Tensor],
    right: Tensor,
    scaling: Tensor,
    rtol: float,
    size: float,
    number: Callable[[Tensor], float],
) -> tuple[Tensor, float]:
    """Solve a symmetric, non-negative system, preconditioned by a positive diagonal.

    Args:
        matrix: v -> A v.
        project: onto the range of A, against drift by rounding.
        right: right-hand side, in the range.
        scaling: that diagonal.
        rtol: relative residual to stop at.
        size: squared norm that it is relative to; norms are weighted by the inverse of the scaling.
        number: the value of a scalar, the same on all ranks.

    Returns:
        ``(x, smallest)``: the solution, and the smallest Ritz value of the scaled matrix; NaN without a step.
    """
    x, residual = torch.zeros_like(right), right
    scaled = residual / scaling
    direction, rho = scaled, number((residual * scaled).sum())
    steps, growths = [], []
    for _ in range(min(_MOST_CG_STEPS, 4 * len(right) + 20)):
        if rho <= rtol**2 * size:
            break
        image = project(matrix(direction))
        curvature = number((direction * image).sum())
        if curvature <= 0:
            break
        steps.append(rho / curvature)
        x = x + steps[-1] * direction
        residual = project(residual - steps[-1] * image)
        scaled = residual / scaling
        after = number((residual * scaled).sum())
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
