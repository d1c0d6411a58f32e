import subprocess
import sys
import textwrap

import pytest
import torch
from oracles import primal_value, random_weights, tensor, two_by_two
from torch.autograd import grad, gradcheck

from sinkformer import Measure, ops, sinkhorn, streamed
from sinkformer.certificates import gap_bound, penalised_gap, rounded_gap
from sinkformer.costs import Cost, Euclidean, Matrix, NegativeDot, SqEuclidean
from sinkformer.differentiation import LinearSolve
from sinkformer.differentiation import implicit as dense_implicit
from sinkformer.errors import BackendError, GradientWarning
from sinkformer.streamed import PairCosts

INF, NAN = float("inf"), float("nan")
BALANCED = (1.0, 1.0)
TAUS = [BALANCED, (0.8, 0.6), (1.0, 0.5), (0.7, 1.0), (1.0, 0.0), (0.0, 0.0)]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Five rows at a time."""
    monkeypatch.setattr(streamed.pairs, "_CACHED_ENTRIES", 1)
    monkeypatch.setattr(streamed.pairs, "_CACHED_ROWS", 5)


class Absolute(Cost):
    """A cost of a user, which brings its own rows."""

    def __call__(self, x, y):
        return (x.unsqueeze(-2) - y.unsqueeze(-3)).abs().sum(-1)

    def rows(self, x, y, start, stop):
        return self(x, y)[..., start:stop, :]


class Scaled(Cost):
    """A cost with a parameter."""

    def __init__(self):
        self.scale = torch.ones((), requires_grad=True)

    def __call__(self, x, y):
        return self.scale * SqEuclidean()(x, y)


class Case:
    """Two problems of 13 x 9 atoms: features, weights, a cost and a mask, with zero weights or forbidden pairs on demand."""

    def __init__(self, cost="dot", dtype=torch.float64, zeros=False, masked=False, ratio=0.1, n=13, m=9, batch=2):
        generator = torch.Generator().manual_seed(n + m)

        def normal(*shape):
            return torch.randn(batch, *shape, generator=generator, dtype=torch.float64).to(dtype)

        self.x, self.y = normal(n, 3), normal(m, 3)
        costs = {"dot": NegativeDot(), "squared": SqEuclidean(), "euclidean": Euclidean(), "user": Absolute()}
        self.cost = Matrix(normal(n, m)) if cost == "matrix" else costs[cost]
        self.a = random_weights(batch, n, generator=generator)
        self.b = random_weights(batch, m, generator=generator)
        if zeros:
            self.a[0, 2] = self.a[1, -3:] = self.b[0, 0] = self.b[1, -2] = 0
        self.a, self.b = (w / w.sum(-1, keepdim=True) for w in (self.a, self.b))
        self.mask = None
        if masked:
            self.mask = torch.zeros(batch, n, m, dtype=dtype)
            self.mask[:, 0, 1] = self.mask[0, 4, 4] = self.mask[1, 5, :4] = INF
        dense = self.dense()
        self.epsilon = ratio * (dense.nan_to_num(posinf=0.0).amax((-1, -2)) - dense.amin((-1, -2)))

    @property
    def costs(self):
        return PairCosts(self.cost, self.x, self.y, self.mask)

    def dense(self):
        dense = self.cost(self.x.double(), self.y.double()).double()
        return dense if self.mask is None else dense + self.mask.double()

    def solve(self, taus=BALANCED, tolerance=1e-10, max_iterations=3000, init=None, work=None):
        work = work or self.x.dtype
        return streamed.solve(
            self.costs,
            self.a,
            self.b,
            self.epsilon,
            taus,
            work=work,
            tolerance=tolerance,
            max_iterations=max_iterations,
            init=init,
        )

    def quality(self, f, g, taus=BALANCED):
        return streamed.quality(self.costs, f, g, self.a, self.b, self.epsilon, taus)

    def plan(self, f, g):
        return ops.plan(self.dense(), f, g, self.a, self.b, self.epsilon)

    def reference(self, taus=BALANCED, tolerance=1e-12):
        return sinkhorn(
            Measure(self.x.double(), self.a),
            Measure(self.y.double(), self.b),
            cost=Matrix(self.cost.values.double()) if isinstance(self.cost, Matrix) else self.cost,
            mask=self.mask,
            epsilon=self.epsilon,
            tau_a=taus[0],
            tau_b=taus[1],
            tolerance=tolerance,
            max_iterations=5000,
        )


def centred(f, g, a, b, taus):
    if taus != BALANCED:
        return f, g
    shift = ((a * f).sum(-1) - (b * g).sum(-1)).unsqueeze(-1) / 2
    return f - shift, g + shift


def assert_same_solution(case, taus, f, g, tolerance):
    want = case.reference(taus)
    error, gap, value = case.quality(f, g, taus)
    assert float(error.max()) <= tolerance
    # A hard constraint beside a penalised one is violated, to the advantage of the primal value.
    assert bool((gap > (-1e-13 if taus == BALANCED else -10 * tolerance)).all())
    torch.testing.assert_close(value, want.value, rtol=0, atol=tolerance)
    for have, potential in zip(centred(f, g, case.a, case.b, taus), (want.f, want.g), strict=True):
        torch.testing.assert_close(have, potential, rtol=0, atol=200 * tolerance)


each_cost = pytest.mark.parametrize("cost", ["dot", "squared", "euclidean", "matrix", "user"])
each_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
each_tau = pytest.mark.parametrize("taus", TAUS)
each_input = pytest.mark.parametrize(("zeros", "masked"), [(False, False), (True, True)])


# Solutions -----------------------------------------------------------------------------------------------------------


@each_cost
@each_dtype
@each_input
def test_couplings_are_those_of_the_dense_solver(cost, dtype, zeros, masked):
    case = Case(cost, dtype, zeros, masked)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    f, g, iterations = case.solve(tolerance=tolerance)
    assert_same_solution(case, BALANCED, f, g, tolerance)
    assert iterations.dtype == torch.int64
    assert iterations.shape == (2,)


@each_tau
@each_dtype
@each_input
def test_penalised_problems_are_those_of_the_dense_solver(taus, dtype, zeros, masked):
    case = Case("squared", dtype, zeros, masked)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    f, g, _ = case.solve(taus, tolerance=tolerance)
    assert_same_solution(case, taus, f, g, tolerance)


@pytest.mark.parametrize("ratio", [1.0, 0.03, 0.003])
@each_dtype
def test_any_epsilon(ratio, dtype):
    case = Case("squared", dtype, ratio=ratio)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    f, g, _ = case.solve(tolerance=tolerance)
    error, gap, value = case.quality(f, g)
    assert float(error.max()) <= tolerance
    torch.testing.assert_close(value, case.reference().value, rtol=0, atol=float(2 * gap.max()) + 1e-12)


def test_float32_blocks_reach_more_than_float32():
    """Where the rounding of float32 is too coarse, the iteration goes on in float64."""
    case = Case("matrix", torch.float32, ratio=0.01)
    f, g, _ = case.solve(tolerance=1e-9)
    assert float(case.quality(f, g)[0].max()) <= 1e-9


@each_dtype
def test_a_shift_of_the_cost_changes_nothing(dtype):
    case = Case("matrix", dtype)
    f, g, _ = case.solve(tolerance=1e-6)
    case.cost = Matrix(case.cost.values.double() + 1e4)
    shifted = case.solve(tolerance=1e-6)
    assert float(case.quality(*shifted[:2])[0].max()) <= 1e-6
    for have, want in zip(centred(*shifted[:2], case.a, case.b, BALANCED), (f, g), strict=True):
        residue = have - want
        assert float((residue - residue.mean(-1, keepdim=True)).abs().max()) < 1e-4


@pytest.mark.parametrize("epsilon", [1.0, 1e-1, 1e-2, 1e-3, 1e-4])
def test_two_by_two_at_any_epsilon(epsilon):
    matrix = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    a, b = tensor(0.5, 0.5).view(1, 2), tensor(0.3, 0.7).view(1, 2)
    costs = PairCosts(Matrix(matrix.unsqueeze(0)), torch.zeros(1, 2, 1), torch.zeros(1, 2, 1))
    scale = tensor(epsilon).view(1)
    f, g, iterations = streamed.solve(
        costs, a, b, scale, BALANCED, work=torch.float64, tolerance=1e-9, max_iterations=500
    )
    assert float(streamed.quality(costs, f, g, a, b, scale, BALANCED)[0]) <= 1e-9
    assert int(iterations) < 80
    p = ops.plan(matrix, f[0], g[0], a[0], b[0], tensor(epsilon)[0])
    torch.testing.assert_close(p, two_by_two(a[0], b[0], matrix, epsilon), rtol=0, atol=1e-9)


def test_a_start_close_by_is_used():
    case = Case()
    f, g, cold = case.solve()
    again = case.solve(init=(f, g))
    assert int(again[2].max()) <= 2 < int(cold.min())


@each_dtype
def test_all_iterations_are_spent_on_a_negative_tolerance(dtype):
    assert case_iterations(Case(dtype=dtype), -1.0, 23) == [23, 23]
    assert case_iterations(Case(dtype=dtype), -1.0, 1) == [1, 1]


def case_iterations(case, tolerance, most):
    return case.solve(tolerance=tolerance, max_iterations=most)[2].tolist()


@each_dtype
def test_what_did_not_converge_says_so(dtype):
    case = Case("squared", dtype, ratio=0.003)
    f, g, iterations = case.solve(max_iterations=7)
    assert iterations.tolist() == [7, 7]
    error, gap, _ = case.quality(f, g)
    p = case.plan(f, g)
    torch.testing.assert_close(error, (p.sum(-1) - case.a).abs().sum(-1) + (p.sum(-2) - case.b).abs().sum(-1))
    assert float((p.sum(-1) - case.a).abs().sum()) < 1e-12  # rows are exact all the same
    assert bool((error > 1e-3).all())
    assert bool((gap > 0).all())


def test_weights_from_huge_to_tiny(generator):
    case = Case("squared", torch.float32, n=11, m=12, ratio=0.02)
    case.a = torch.exp(6 * torch.randn(2, 11, generator=generator, dtype=torch.float64))
    case.b = torch.exp(12 * torch.randn(2, 12, generator=generator, dtype=torch.float64))
    case.a, case.b = case.a / case.a.sum(-1, keepdim=True), case.b / case.b.sum(-1, keepdim=True)
    f, g, _ = case.solve(tolerance=1e-5)
    error, gap, value = case.quality(f, g)
    assert bool(torch.isfinite(torch.cat([f.flatten(), g.flatten(), gap, value])).all())
    assert float(error.max()) <= 1e-5


def test_columns_that_underflow(monkeypatch):
    """A start from which whole columns vanish in the precision of the blocks."""
    case = Case("matrix", torch.float32, ratio=0.05)
    asked = []
    exact = streamed.iteration._log_columns
    monkeypatch.setattr(streamed.iteration, "_log_columns", lambda *x: asked.append(1) or exact(*x))
    init = torch.zeros_like(case.a), torch.zeros_like(case.b)
    init[1][:, 3] = -100.0
    f, g, _ = case.solve(tolerance=1e-6, init=init)
    far = case.a.clone(), case.b.clone()
    far[1][:] = torch.linspace(0, 40, 9, dtype=torch.float64)
    assert float(case.quality(f, g)[0].max()) <= 1e-6
    f, g, _ = case.solve(tolerance=1e-6, init=far)
    assert float(case.quality(f, g)[0].max()) <= 1e-6
    assert asked


# What is no cost -----------------------------------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("wrong", [NAN, -INF, 1e30, -1e30])
def test_what_is_no_cost_is_reported_for_its_problem_alone(dtype, wrong):
    case = Case("matrix", dtype)
    values = case.cost.values.clone()
    values[1, 4, 3] = wrong
    want = Case("matrix", dtype).solve(tolerance=1e-4)
    case.cost = Matrix(values)
    f, g, _ = case.solve(tolerance=1e-4)
    torch.testing.assert_close(f[0], want[0][0])
    assert not f[1].any()
    for number in case.quality(f, g):
        assert torch.isfinite(number).tolist() == [True, False]
        assert bool(number[1].isnan())


@each_dtype
@pytest.mark.parametrize("wrong", [NAN, -INF, 1e30])
def test_padding_may_cost_anything(dtype, wrong):
    clean, spoiled = Case("matrix", dtype, zeros=True), Case("matrix", dtype, zeros=True)
    values = clean.cost.values.clone()
    values[0, 2] = values[1, :, -2] = wrong
    spoiled.cost = Matrix(values)
    f, g, _ = spoiled.solve(tolerance=1e-4)
    want_f, want_g, _ = clean.solve(tolerance=1e-4)
    torch.testing.assert_close(f * (clean.a > 0), want_f * (clean.a > 0))
    torch.testing.assert_close(g * (clean.b > 0), want_g * (clean.b > 0))
    for have, want in zip(spoiled.quality(f, g), clean.quality(want_f, want_g), strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("taus", [BALANCED, (0.8, 0.6)])
@pytest.mark.parametrize("side", [0, 1])
def test_an_atom_without_partners(taus, side):
    case = Case("euclidean", masked=True)
    (case.mask[1, 5] if side == 0 else case.mask[1, :, 5])[:] = INF
    f, g, _ = case.solve(taus, max_iterations=40)
    error, _, value = case.quality(f, g, taus)
    assert bool(torch.isfinite(torch.cat([f.flatten(), g.flatten(), error, value])).all())
    lost = (case.a[1, 5], case.b[1, 5])[side]
    assert float(error[0]) < 1e-2
    if taus == BALANCED:
        assert float(error[1]) >= float(lost)
    else:
        torch.testing.assert_close(value, case.reference(taus).value)


# Quality and certificates --------------------------------------------------------------------------------------------


@each_input
@pytest.mark.parametrize("sweeps", [2, 12, 200])
@pytest.mark.parametrize("ratio", [1.0, 0.1, 0.01])
def test_the_gap_is_primal_minus_dual(zeros, masked, sweeps, ratio):
    case = Case("squared", zeros=zeros, masked=masked, ratio=ratio)
    f, g, _ = case.solve(max_iterations=sweeps)
    _, gap, value = case.quality(f, g)
    p, dense = case.plan(f, g), case.dense()
    r, c, left, right = ops.rounding(lambda v: ops.apply(p, v), lambda u: ops.apply(p.mT, u), case.a, case.b)
    q = p * r.unsqueeze(-1) * c.unsqueeze(-2) + left.unsqueeze(-1) * right.unsqueeze(-2)
    for k in range(2):
        want = primal_value(q[k], dense[k], case.a[k], case.b[k], float(case.epsilon[k])) - value[k]
        torch.testing.assert_close(gap[k], want, rtol=1e-6, atol=1e-13)


@pytest.mark.parametrize("taus", TAUS[1:])
def test_the_gap_of_penalised_plans_is_primal_minus_dual(taus):
    case = Case("squared", zeros=True, masked=True)
    f, g, _ = case.solve(taus, max_iterations=3)
    _, gap, value = case.quality(f, g, taus)
    p, dense = case.plan(f, g), case.dense()
    for k in range(2):
        epsilon = float(case.epsilon[k])
        rho = [INF if tau == 1 else epsilon * tau / (1 - tau) for tau in taus]
        want = primal_value(p[k], dense[k], case.a[k], case.b[k], epsilon, *rho) - value[k]
        torch.testing.assert_close(gap[k], want, rtol=1e-9, atol=1e-13)
        one = slice(k, k + 1)
        marginals = p[one].sum(-1), p[one].sum(-2)
        again = penalised_gap(case.a[one], case.b[one], case.epsilon[one], (f[one], g[one]), marginals, taus)
        torch.testing.assert_close(again[0], gap[k], rtol=1e-9, atol=1e-13)


# At most how many times the gap the bound is: without the tangent, with it.
LOOSE = {1.0: (None, 1.1), 0.1: (None, 6.0), 0.01: (20.0, 20.0)}


@pytest.mark.parametrize("ratio", list(LOOSE))
@pytest.mark.parametrize("target", [1e-3, 1e-6])
def test_gap_bound(ratio, target):
    case = Case("dot", ratio=ratio, n=30, m=20, zeros=True)
    f, g, _ = case.solve(tolerance=target)
    p, a, b, epsilon = case.plan(f, g), case.a, case.b, case.epsilon
    factors = ops.rounding(lambda v: ops.apply(p, v), lambda u: ops.apply(p.mT, u), a, b)
    r, c, left, right = factors
    density = ops.density(case.dense(), f, g, a, b, epsilon)
    excess = (a.unsqueeze(-1) * b.unsqueeze(-2) * (density - 1)).sum((-1, -2))
    slack = (right.unsqueeze(-2) * (case.dense() - f.unsqueeze(-1) - g.unsqueeze(-2))).sum(-1)
    bend = torch.where(right > 0, right.square() / (b * c), 0.0).unsqueeze(-2)
    curvature = torch.where(bend > 0, bend / density, 0.0).sum(-1)
    kept, moved = p * r.unsqueeze(-1) * c.unsqueeze(-2), left.unsqueeze(-1) * right.unsqueeze(-2)
    added = torch.where(moved > 0, (kept + moved) * torch.log1p(moved / torch.where(moved > 0, kept, 1.0)), 0.0).sum(-1)
    gap = rounded_gap(a, b, epsilon, factors, excess, added)
    torch.testing.assert_close(gap, case.quality(f, g)[1], rtol=1e-6, atol=1e-15)
    for bound, factor in zip(
        (
            gap_bound(a, b, epsilon, factors, excess, slack),
            gap_bound(a, b, epsilon, factors, excess, slack, curvature),
        ),
        LOOSE[ratio],
        strict=True,
    ):
        assert bool((bound >= gap - 1e-15).all())
        assert factor is None or bool((bound <= factor * gap + 1e-15).all())


def test_gap_bound_of_an_exact_plan_is_zero():
    case = Case(ratio=1.0)
    f, g, _ = case.solve(tolerance=1e-15, max_iterations=300)
    _, gap, _ = case.quality(f, g)
    assert float(gap.abs().max()) < 1e-14


# Derivatives ---------------------------------------------------------------------------------------------------------


def derivatives(case, taus, dtype, attach):
    """Gradients of a weighted value and of <plan, W>, in everything that a problem is made of."""
    generator = torch.Generator().manual_seed(1)
    f, g, _ = case.solve(taus, tolerance=1e-13, work=torch.float64)
    _, _, value = case.quality(f, g, taus)
    leaves = [case.a, case.b, case.epsilon]
    leaves += [case.cost.values] if isinstance(case.cost, Matrix) else [case.x, case.y]
    leaves += [] if case.mask is None else [case.mask]
    for leaf in leaves:
        leaf.requires_grad_()
    f, g, value = attach(case, f, g, value, taus, dtype)
    weights = torch.randn(case.dense().shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        dense, a, b, epsilon = case.dense(), case.a.clone(), case.b.clone(), case.epsilon.clone()
    plan = ops.plan(dense, f, g, a, b, epsilon)
    probes = torch.randn(1, dense.shape[-1], generator=generator, dtype=torch.float64)
    if taus == BALANCED:  # their common constant has no derivative
        plan, g = plan, g - g.detach().mean(-1, keepdim=True)
        probes = probes - probes.mean()
    outputs = (value * torch.tensor([1.0, -2.0])).sum(), (plan * weights).sum() + (g * probes).sum()
    found = [grad(output, leaves, retain_graph=True, allow_unused=True) for output in outputs]
    return [torch.zeros_like(x) if h is None else h for row in found for h, x in zip(row, 2 * leaves, strict=False)]


def attach_streamed(case, f, g, value, taus, dtype):
    return streamed.implicit(case.costs, case.a, case.b, case.epsilon, f, g, value, taus, work=dtype)


def attach_densely(case, f, g, value, taus, dtype):
    return dense_implicit(case.dense(), case.a, case.b, case.epsilon, f, g, value, taus)


def assert_same_derivatives(first, second, taus, dtype):
    have = derivatives(first, taus, dtype, attach_streamed)
    want = derivatives(second, taus, dtype, attach_densely)
    for h, w in zip(have, want, strict=True):
        assert h.dtype == w.dtype
        size = float(w.abs().max())
        torch.testing.assert_close(h, w, rtol=0, atol=(1e-10 if dtype == torch.float64 else 1e-5) * max(size, 1e-3))


@each_cost
@each_dtype
@each_input
def test_derivatives_of_couplings_are_the_dense_ones(cost, dtype, zeros, masked):
    assert_same_derivatives(*(Case(cost, dtype, zeros, masked) for _ in range(2)), BALANCED, dtype)


@each_tau
@each_dtype
def test_derivatives_of_penalised_problems_are_the_dense_ones(taus, dtype):
    assert_same_derivatives(*(Case("squared", dtype, True, True) for _ in range(2)), taus, dtype)


@pytest.mark.parametrize("output", ["value", "plan"])
@pytest.mark.parametrize("cost", ["dot", "euclidean"])
def test_gradcheck(output, cost):
    case = Case(cost, n=5, m=4, batch=1, ratio=0.3)
    weights = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4)

    def function(x, y, left, right, epsilon):
        case.x, case.y, case.epsilon = x, y, epsilon
        case.a, case.b = torch.softmax(left, -1), torch.softmax(right, -1)
        with torch.no_grad():
            f, g, _ = case.solve(tolerance=1e-15, max_iterations=150)
            value = case.quality(f, g)[2]
        f, g, value = attach_streamed(case, f, g, value, BALANCED, torch.float64)
        return value if output == "value" else (case.plan(f, g) * weights).sum()

    leaves = (case.x, case.y, case.a.log(), case.b.log(), case.epsilon)
    assert gradcheck(function, [leaf.requires_grad_() for leaf in leaves], atol=1e-7, rtol=1e-5, fast_mode=True)


def test_half_features_have_half_gradients():
    case = Case()
    case.x, case.y = case.x.bfloat16().requires_grad_(), case.y.bfloat16().requires_grad_()
    with torch.no_grad():
        f, g, _ = case.solve(work=torch.float32, tolerance=1e-4)
        value = case.quality(f, g)[2]
    f, g, value = attach_streamed(case, f, g, value, BALANCED, torch.float32)
    (value.sum() + f.square().sum() + g.square().sum()).backward()
    assert case.x.grad.dtype == case.y.grad.dtype == torch.bfloat16
    assert bool(torch.isfinite(case.x.grad).all())


@pytest.mark.parametrize("output", [0, 1, 2])
def test_a_second_derivative_raises(output):
    case = Case()
    with torch.no_grad():
        f, g, _ = case.solve()
        value = case.quality(f, g)[2]
    case.x.requires_grad_()
    solved = attach_streamed(case, f, g, value, BALANCED, torch.float64)
    (first,) = grad(solved[output].square().sum(), case.x, create_graph=True)
    with pytest.raises(BackendError, match="first derivatives only"):
        grad(first.square().sum(), case.x)
    # The upstream gradient a constant: nothing but the cost depends on x.
    solved = attach_streamed(case, f, g, value, BALANCED, torch.float64)
    (first,) = grad(solved[output].sum(), case.x, create_graph=True)
    with pytest.raises(BackendError, match="first derivatives only"):
        (first.sum() + case.x.square().sum()).backward()


def test_a_cost_with_parameters_is_refused():
    case = Case()
    with torch.no_grad():
        f, g, _ = case.solve()
        value = case.quality(f, g)[2]
    case.cost = Scaled()
    with pytest.raises(BackendError, match="parameters that require a gradient"):
        attach_streamed(case, f, g, value, BALANCED, torch.float64)
    with torch.no_grad():
        attach_streamed(case, f, g, value, BALANCED, torch.float64)


def test_a_lost_problem_has_derivative_zero_and_spoils_no_other():
    case = Case("matrix")
    case.cost.values[1, 2, 3] = NAN
    f, g, _ = case.solve()
    value = case.quality(f, g)[2]
    case.cost.values.requires_grad_()
    f, g, value = attach_streamed(case, f, g, value, BALANCED, torch.float64)
    (on_cost,) = grad(f.sum() + 2 * value.nan_to_num().sum(), case.cost.values)
    assert bool(torch.isfinite(on_cost).all())
    assert not on_cost[1].any()
    assert on_cost[0].any()


@pytest.mark.parametrize(("ratio", "taus"), [(0.3, BALANCED), (0.05, BALANCED), (0.1, (0.8, 0.6))])
def test_the_conditioning_is_the_smallest_eigenvalue(ratio, taus):
    case = Case("squared", ratio=ratio)
    f, g, _ = case.solve(taus, tolerance=1e-12)
    value = case.quality(f, g, taus)[2]
    case.x.requires_grad_()
    conditioning = torch.full((2,), NAN, dtype=torch.float64)
    how = LinearSolve(conditioning=conditioning)
    given = case.costs, case.a, case.b, case.epsilon, f, g, value, taus
    attached = streamed.implicit(*given, how, work=torch.float64)
    assert bool(conditioning.isnan().all())  # not before the backward pass
    attached[1].square().sum().backward()
    p = case.plan(f, g)
    matrix = torch.diag_embed(p.sum(-2)) - taus[0] * taus[1] * p.mT @ (p / p.sum(-1, keepdim=True))
    scale = p.sum(-2).rsqrt()
    eigenvalues = torch.linalg.eigvalsh(scale.unsqueeze(-1) * matrix * scale.unsqueeze(-2))
    torch.testing.assert_close(conditioning, eigenvalues[:, 1 if taus == BALANCED else 0], rtol=1e-3, atol=0)


def test_an_unfinished_linear_solve_warns(monkeypatch):
    monkeypatch.setattr(streamed.derivatives, "_MOST_CG_STEPS", 1)
    case = Case("squared", ratio=0.02)
    f, g, _ = case.solve()
    value = case.quality(f, g)[2]
    case.x.requires_grad_()
    f, g, _ = attach_streamed(case, f, g, value, BALANCED, torch.float64)
    with pytest.warns(GradientWarning, match="relative residual"):
        grad(case.plan(f, g).square().sum(), case.x)


# Sizes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 7), (7, 1)])
def test_one_atom(n, m):
    case = Case("squared", n=n, m=m)
    case.epsilon = tensor(0.1, 0.2)
    f, g, _ = case.solve()
    error, _, value = case.quality(f, g)
    assert float(error.max()) < 1e-12
    torch.testing.assert_close(value, (case.plan(f, g) * case.dense()).sum((-1, -2)))
    case.x.requires_grad_()
    f, g, value = attach_streamed(case, f, g, value, BALANCED, torch.float64)
    assert float(grad(case.plan(f, g).square().sum(), case.x)[0].abs().max()) < 1e-12


def test_no_problem_at_all():
    empty = PairCosts(SqEuclidean(), torch.zeros(0, 3, 2), torch.zeros(0, 4, 2))
    a, b, epsilon = (torch.zeros(0, *shape, dtype=torch.float64) for shape in ((3,), (4,), ()))
    f, g, iterations = streamed.solve(
        empty, a, b, epsilon, BALANCED, work=torch.float32, tolerance=1e-4, max_iterations=10
    )
    assert (f.shape, g.shape, iterations.shape) == ((0, 3), (0, 4), (0,))
    error, gap, value = streamed.quality(empty, f, g, a, b, epsilon, BALANCED)
    assert error.shape == gap.shape == value.shape == (0,)
    a.requires_grad_()
    f, g, value = streamed.implicit(empty, a, b, epsilon, f, g, value, BALANCED, work=torch.float32)
    assert grad(f.sum() + value.sum(), a)[0].shape == (0, 3)


def test_inputs_are_not_written_to():
    case = Case("matrix", zeros=True, masked=True)
    before = [t.clone() for t in (case.cost.values, case.mask, case.x, case.a, case.b)]
    f, g, _ = case.solve()
    given = f.clone(), g.clone()
    case.quality(f, g)
    for have, want in zip((case.cost.values, case.mask, case.x, case.a, case.b, f, g), (*before, *given), strict=True):
        assert torch.equal(have, want)


@pytest.mark.slow
def test_memory_is_that_of_the_features():
    """20 000 x 20 000 in float32 is 1.5 GiB; solving, measuring and differentiating takes less than a quarter of it."""
    script = """
        import resource
        import torch
        from sinkformer import streamed
        from sinkformer.costs import SqEuclidean

        torch.set_num_threads(1)
        n = 20_000
        x, y = (torch.rand(1, n, 8) for _ in range(2))
        w = torch.full((1, n), 1 / n, dtype=torch.float64)
        epsilon, taus = torch.ones(1, dtype=torch.float64), (1.0, 1.0)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        x.requires_grad_()
        costs = streamed.PairCosts(SqEuclidean(), x, y)
        with torch.no_grad():
            f, g, _ = streamed.solve(costs, w, w, epsilon, taus, work=torch.float32, tolerance=1e-3, max_iterations=4)
            error, gap, value = streamed.quality(costs, f, g, w, w, epsilon, taus)
        f, g, value = streamed.implicit(costs, w, w, epsilon, f, g, value, taus, work=torch.float32)
        (value + f.square().sum()).backward()
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, float(error))
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    mebibytes, error = map(float, run.stdout.split())
    assert mebibytes < 380
    assert error < 1e-3
