"""What users of other solvers ran into, one test for each kind of fault, on every engine; the number is that of the report.

A test of a problem that an engine cannot solve says so with ``without``, and why.
"""

import re
import warnings

import numpy as np
import ot
import pytest
import torch
from oracles import plan, primal_value, random_measure, random_weights, tensor, two_by_two
from torch.autograd import grad, gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from sinkformer import Coupling, Measure, Status, sinkhorn, solvers, use_backend
from sinkformer.costs import NegativeDot, SqEuclidean, forbid
from sinkformer.errors import (
    BackendError,
    ConfigError,
    ConvergenceWarning,
    InfeasibleError,
    NonFiniteError,
    ShapeError,
    WeightError,
)
from sinkformer.ops.dispatch import BACKENDS
from sinkformer.solutions import report

INF = float("inf")
A2, B2 = tensor(0.5, 0.5), tensor(0.3, 0.7)
M2 = tensor([0.0, 1.0], [1.0, 0.0])
OPTIMAL = tensor([0.3, 0.2], [0.0, 0.5])

# The engines for every problem, and that for small ones, which runs in triton's interpreter; those for large ones have costs
# of points only, see test_triton_large.py.
ENGINES = [name for name in BACKENDS if name not in ("triton_stored", "triton_streamed")]
PENALISED = "the compiled kernels solve couplings only"
TOO_LARGE = "the kernels on the chip have room for 128 atoms a side"
TOO_MANY = "thousands of solves, a minute and more in triton's interpreter"
UNROLLED = "only the log-domain sweeps are differentiated themselves"
FIRST_ORDER = "streamed derivatives are first derivatives"


@pytest.fixture(autouse=True, params=ENGINES)
def engine(request, monkeypatch):
    """Solves everything with one engine, and asserts that it did; with None the engine is chosen by the problem."""
    if request.param == "cpu":
        pytest.importorskip("numba", reason="the compiled kernels need numba, extra [fast]")
    if request.param == "triton_small":
        pytest.importorskip("triton", reason="the GPU kernels need triton, extra [gpu]")

    def checked(solution, on_failure):
        assert request.param in (None, solution.engine.backend)
        report(solution, on_failure)

    monkeypatch.setattr(solvers, "report", checked)
    with use_backend(request.param):
        yield request.param


def without(**reasons):
    """On all engines but those named, which cannot solve the problem, with the reason."""
    assert set(reasons) <= set(ENGINES)
    return pytest.mark.parametrize("engine", [name for name in ENGINES if name not in reasons], indirect=True)


def violation(p, a, b):
    return float((p.sum(-1) - a).abs().sum() + (p.sum(-2) - b).abs().sum())


def test_01_a_small_epsilon_neither_overflows_nor_underflows():
    pi = Coupling.solve(A2, B2, cost=M2, epsilon=1e-3)
    assert pi.solution.converged
    assert violation(pi.to_dense(), A2, B2) <= 1e-9
    assert torch.allclose(pi.to_dense(), OPTIMAL, atol=1e-8)


@pytest.mark.parametrize("epsilon", [1e-1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-9])
def test_02_two_by_two_is_solved_to_the_rounding_of_cost_over_epsilon(epsilon, engine):
    pi = Coupling.solve(A2, B2, cost=M2, epsilon=epsilon, on_failure="ignore")
    solution = pi.solution
    assert torch.allclose(pi.to_dense(), two_by_two(A2, B2, M2, epsilon), rtol=0, atol=1e-8 + 1e-15 / epsilon)
    # Streamed blocks are rounded in another order than the dense plan that is measured here.
    rounding = torch.finfo(torch.float64).eps / epsilon if engine == "streamed" else 0.0
    assert float(solution.marginal_error) == pytest.approx(violation(pi.to_dense(), A2, B2), abs=1e-12 + rounding)
    assert solution.converged == (solution.marginal_error <= 1e-9)
    # The streamed engine has no Newton's method, and goes on where rounding alone is above the tolerance.
    most = 50 if engine != "streamed" else 200 if rounding < 1e-9 else 2000
    assert solution.iterations <= most, "not cost over epsilon"
    assert violation(pi.rounded().to_dense(), A2, B2) < 1e-15


def test_02_a_solution_that_was_not_reached_says_so():
    with pytest.warns(ConvergenceWarning, match=r"^MAX_ITERATIONS, marginal error 4\.00e-01 after 20 iterations"):
        pi = Coupling.solve(A2, B2, cost=M2, epsilon=1e-6, max_iterations=20, annealing=None)
    assert pi.solution.status is Status.MAX_ITERATIONS
    assert pi.solution.duality_gap > 1e-3, "nor does the gap flatter it"
    assert pi.certificate().tv_bound > 0.5
    assert violation(pi.rounded().to_dense(), A2, B2) < 1e-15


@pytest.mark.parametrize("epsilon", [1e-2, 1e-3])
def test_04_the_value_is_finite_in_float32_with_small_epsilon_and_zero_weights(epsilon, generator):
    mu = Measure.normalized(torch.rand(5, 2, generator=generator), torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0]))
    nu = Measure.normalized(torch.rand(6, 2, generator=generator), torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 1.0]))
    value = sinkhorn(mu, nu, epsilon=epsilon, on_failure="ignore").value
    exact = sinkhorn(
        Measure.normalized(mu.points.double(), mu.weights.double()),
        Measure.normalized(nu.points.double(), nu.weights.double()),
        epsilon=epsilon,
        on_failure="ignore",
    ).value
    assert torch.isfinite(value)
    assert float(value) == pytest.approx(float(exact), abs=1e-5)


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4, 1e-6])
def test_05_products_of_float32_are_not_coarsened(tolerance, generator):
    mu, nu = (Measure.uniform(torch.randn(50, 64, generator=generator)) for _ in range(2))
    assert sinkhorn(mu, nu, epsilon=1.0, tolerance=tolerance, max_iterations=5000).converged


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_06_half_precision_is_read_and_nothing_is_summed_in_it(dtype):
    a, b, cost = A2.to(dtype), torch.tensor([0.25, 0.75], dtype=dtype), M2.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pi = Coupling.solve(a, b, cost=cost, epsilon=0.1)
    assert pi.solution.marginal_error <= 1e-4
    assert pi.solution.f.dtype == torch.float64
    assert pi.to_dense().dtype == dtype
    assert torch.allclose(pi.to_dense().double(), two_by_two(A2, b.double(), M2, 0.1), atol=2e-3)


def test_06_autocast_does_not_touch_the_solver(generator):
    mu = Measure.uniform(torch.rand(5, 64, generator=generator))
    nu = Measure.uniform(torch.rand(6, 64, generator=generator))
    plain = Coupling.solve(mu, nu, cost=NegativeDot(), epsilon=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = Coupling.solve(mu, nu, cost=NegativeDot(), epsilon=0.1)
        assert torch.equal(cast.to_dense(), plain.to_dense())
    assert torch.equal(cast.value, plain.value)


def test_07_every_problem_carries_its_numbers_and_can_be_rounded():
    weights = A2.expand(2, 2), B2.expand(2, 2)
    options = {"cost": M2.expand(2, 2, 2), "epsilon": tensor(1.0, 1e-3), "max_iterations": 20, "on_failure": "ignore"}
    pi = Coupling.solve(*weights, annealing=None, **options)
    solution = pi.solution
    assert solution.converged.tolist() == [True, False]
    assert solution.iterations.tolist()[1] == 20 > solution.iterations.tolist()[0]
    assert solution.marginal_error[1] > 0.1 > 1e-9 >= solution.marginal_error[0]
    assert solution.duality_gap[1] > 1e-3 > 1e-8 >= solution.duality_gap[0]
    assert violation(pi.rounded().to_dense()[1], A2, B2) < 1e-15


@without(triton_small=TOO_LARGE)
def test_08_the_tolerance_is_the_l1_violation_of_both_marginals(generator):
    # Where the tolerance is a Euclidean norm, it shrinks with the number of atoms and stops at once.
    mu, nu = (Measure.uniform(torch.rand(300, 2, generator=generator, dtype=torch.float64)) for _ in range(2))
    pi = Coupling.solve(mu, nu, epsilon=0.05, tolerance=1e-3)
    assert pi.solution.iterations > 1
    assert violation(pi.to_dense(), mu.weights, nu.weights) <= 1e-3


def test_09_reaching_the_iteration_limit_is_flagged_and_warned_of_once(generator):
    mu, nu = (random_measure(4, 6, generator=generator) for _ in range(2))
    with pytest.warns(
        ConvergenceWarning, match=r"problem \[\d\], the worst of 4 that failed in a batch of 4"
    ) as caught:
        solution = sinkhorn(mu, nu, epsilon=1e-3, max_iterations=5)
    assert len(caught) == 1
    assert solution.converged.shape == (4,)
    assert not solution.converged.any()


def test_11_annealing_ends_and_the_iteration_goes_on_to_the_tolerance(generator):
    mu, nu = random_measure(20, generator=generator), random_measure(20, generator=generator)
    errors = [
        float(sinkhorn(mu, nu, epsilon=0.05, max_iterations=k, tolerance=0, on_failure="ignore").marginal_error)
        for k in (10, 20, 80)
    ]
    assert errors[1] < 0.1 * errors[0], "geometrically, not like one over the number of iterations"
    assert errors[2] < 0.1 * errors[1] or errors[2] < 1e-13
    assert sinkhorn(mu, nu, epsilon=0.05).converged


def test_12_a_measure_and_itself(generator):
    mu, nu = random_measure(6, generator=generator), random_measure(6, generator=generator)

    def value(left, right):
        return float(sinkhorn(left, right, epsilon=0.1, tolerance=1e-11, max_iterations=10_000).value)

    assert sinkhorn(mu, mu, epsilon=0.1).converged
    assert value(mu, mu) >= 0
    assert value(mu, nu) - value(mu, mu) / 2 - value(nu, nu) / 2 > 0


def test_13_zero_weights_in_a_batch_give_finite_gradients_in_every_dtype(generator):
    for dtype in (torch.float32, torch.float64):
        x = torch.rand(3, 4, 2, generator=generator, dtype=dtype, requires_grad=True)
        weights = torch.tensor([[0.25] * 4, [0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]], dtype=dtype)
        pi = Coupling.solve(Measure(x, weights), Measure(x.detach(), weights.flip(0)), cost=NegativeDot(), epsilon=0.2)
        (found,) = grad(pi.to_dense().square().sum(), x)
        assert torch.isfinite(found).all()
        assert (found[weights == 0] == 0).all()
        assert found.dtype == dtype


def test_14_source_and_target_can_be_exchanged(generator):
    mu, nu = random_measure(5, generator=generator), random_measure(3, generator=generator)
    for cost in (SqEuclidean(), NegativeDot()):
        one, other = (Coupling.solve(*pair, cost=cost, epsilon=0.1, tolerance=1e-12) for pair in ((mu, nu), (nu, mu)))
        assert torch.allclose(other.to_dense(), one.to_dense().mT, atol=1e-11)
        assert float(one.value) == pytest.approx(float(other.value), abs=1e-11)


def test_15_ragged_batches_equal_the_loop_and_padding_is_exactly_zero(generator):
    sizes = [(1, 7), (7, 1), (4, 4), (1, 1), (7, 7)]
    pairs = [(random_measure(n, generator=generator), random_measure(m, generator=generator)) for n, m in sizes]
    together = Coupling.solve(*Measure.collate(pairs), epsilon=0.1)
    for k, (mu, nu) in enumerate(pairs):
        p = together.to_dense()[k]
        assert torch.allclose(p[: mu.n, : nu.n], Coupling.solve(mu, nu, epsilon=0.1).to_dense(), atol=1e-12)
        assert (p[mu.n :] == 0).all()
        assert (p[:, nu.n :] == 0).all()


def test_16_a_zero_weight_has_a_zero_row_and_a_finite_gradient(generator):
    cost = torch.rand(3, 3, generator=generator, dtype=torch.float64)
    a, b = tensor(0.0, 0.5, 0.5).requires_grad_(), tensor(0.5, 0.5, 0.0).requires_grad_()
    solution = sinkhorn(a, b, cost=cost, epsilon=0.2, tolerance=1e-13)
    p = plan(solution, cost, a, b, 0.2)
    assert (p[0] == 0).all()
    assert (p[:, 2] == 0).all()
    of_a, of_b = grad(solution.value, (a, b), retain_graph=True)
    # The potential there is the soft c-transform, and the derivative of the value, up to a constant.
    transform = -0.2 * torch.logsumexp((solution.g - cost[0])[:2] / 0.2 + b[:2].log(), -1)
    assert torch.allclose(solution.f[0], transform, atol=1e-12)
    assert torch.allclose(of_a - of_a[1], solution.f - solution.f[1], atol=1e-11)
    assert torch.allclose(of_b - of_b[1], solution.g - solution.g[1], atol=1e-11)
    assert all(torch.isfinite(t).all() for t in grad(p.square().sum(), (a, b)))


def test_18_forbidden_pairs_leave_the_value_finite():
    cost = tensor([INF, 1.0], [1.0, 0.0])
    pi = Coupling.solve(A2, B2, cost=cost, epsilon=0.5)
    p = tensor([0.0, 0.5], [0.3, 0.2])
    assert torch.allclose(pi.to_dense(), p, atol=1e-9)
    assert float(pi.transport_cost()) == pytest.approx(0.8, abs=1e-8)
    assert float(pi.value) == pytest.approx(float(primal_value(p, cost, A2, B2, 0.5)), abs=1e-8)
    rows = tensor([[0.0, 0.0], [0.0, 0.0]], [[INF, INF], [0.0, 0.0]])
    with pytest.raises(InfeasibleError, match=r"problem \[1\].*no coupling avoids the forbidden pairs"):
        sinkhorn(A2.expand(2, 2), B2.expand(2, 2), cost=rows, epsilon=0.5)


def test_19_different_masses_are_refused():
    with pytest.raises(WeightError, match=r"summing to 1, received a sum of 2 .*; use Measure\.normalized"):
        sinkhorn(A2, 2 * B2, cost=M2, epsilon=0.5)
    normalized = Measure.normalized(torch.zeros(2, 1, dtype=torch.float64), 2 * B2)
    assert torch.equal(normalized.weights, B2)


@without(triton_small=TOO_LARGE)
def test_19_sums_of_float32_weights_need_not_be_exact(generator):
    mu = Measure.normalized(torch.rand(1000, 1, generator=generator), torch.rand(1000, generator=generator))
    nu = Measure.uniform(torch.rand(777, 1, generator=generator))
    assert sinkhorn(mu, nu, epsilon=0.1).converged
    wide = mu.to(torch.float64)
    with pytest.raises(WeightError, match="summing to 1"):
        Measure(wide.points, wide.weights * (1 + 1e-7))


def test_20_a_causal_mask_with_uniform_marginals_leaves_the_identity_only():
    n = 4
    future = forbid(torch.ones(n, n).triu(1).bool(), dtype=torch.float64)
    uniform = torch.full((n,), 1 / n, dtype=torch.float64)
    zeros = torch.zeros(n, n, dtype=torch.float64)
    pi = Coupling.solve(uniform, uniform, cost=zeros, mask=future, epsilon=1.0, on_failure="ignore")
    assert pi.solution.status is not Status.INFEASIBLE
    assert torch.allclose(pi.to_dense(), torch.eye(n).double() / n, atol=1e-2)
    # Marginals that let mass flow to the past, and the one-sided problem, are ordinary.
    early, late = tensor(0.4, 0.3, 0.2, 0.1), tensor(0.1, 0.2, 0.3, 0.4)
    assert Coupling.solve(late, early, cost=zeros, mask=future, epsilon=1.0).solution.converged
    with pytest.raises(InfeasibleError, match="weigh more than all atoms they may be paired with"):
        sinkhorn(early, late, cost=zeros, mask=future, epsilon=1.0)


@without(cpu=PENALISED, triton_small=PENALISED)
def test_20_one_constraint_alone_makes_causal_attention():
    n = 4
    future = forbid(torch.ones(n, n).triu(1).bool(), dtype=torch.float64)
    uniform, zeros = torch.full((n,), 1 / n, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64)
    one_sided = Coupling.solve(uniform, uniform, cost=zeros, mask=future, epsilon=1.0, tau_b=0.0)
    assert torch.allclose(
        one_sided.conditional().to_dense(), torch.ones(n, n).double().tril() / torch.arange(1, n + 1)[:, None]
    )


@pytest.mark.parametrize("shape", [(1, 5, 5), (1, 1, 5), (1, 5, 1), (1, 1, 1), (2, 1, 1)])
def test_21_a_batch_of_one_and_clouds_of_one_are_ordinary(shape, generator):
    batch, n, m = shape
    mu, nu = random_measure(batch, n, generator=generator), random_measure(batch, m, generator=generator)
    pi = Coupling.solve(mu, nu, epsilon=0.5)
    assert pi.to_dense().shape == shape
    assert pi.value.shape == pi.solution.converged.shape == (batch,)


def test_22_scores_may_be_negative_large_and_not_square(generator):
    mu, nu = random_measure(4, d=8, generator=generator), random_measure(6, d=8, generator=generator)
    scale = 1000.0
    one = Coupling.solve(mu.pushforward(scale * mu.points), nu, cost=NegativeDot(), epsilon=scale * 0.1)
    other = Coupling.solve(mu, nu, cost=NegativeDot(), epsilon=0.1)
    assert torch.allclose(one.to_dense(), other.to_dense(), atol=1e-8)
    # Cost is minus score: the pair of the larger score receives more.
    x = Measure.uniform(tensor([1.0, 0.0], [0.0, 1.0]))
    assert Coupling.solve(x, x, cost=NegativeDot(), epsilon=0.1).argmax().tolist() == [0, 1]


@pytest.mark.parametrize("shift", [-1e4, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_22_a_constant_in_the_cost_is_none_of_the_plan(shift, dtype, generator):
    a, b = random_weights(2, 6, generator=generator), random_weights(2, 5, generator=generator)
    # Whole multiples of what float32 resolves at the shift, so that the two costs differ by the shift exactly.
    cost = (torch.rand(2, 6, 5, generator=generator) * 512).round() / 512
    a, b, cost = (t.to(dtype) for t in (a, b, cost))
    one, other = (Coupling.solve(a, b, cost=c, epsilon=0.05) for c in (cost, cost + shift))
    assert one.solution.converged.all()
    assert other.solution.converged.all()
    close = 1e-4 if dtype == torch.float32 else 1e-8
    assert (one.to_dense() - other.to_dense()).abs().sum((-1, -2)).max() <= 2 * close
    assert torch.allclose(other.value - shift, one.value, rtol=0, atol=2e-3 if dtype == torch.float32 else 1e-8)


@pytest.mark.parametrize("epsilon", [1e4, 1e2, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_22_logits_of_ten_thousand(epsilon, dtype, engine, generator):
    mu, nu = (Measure.uniform(torch.randn(n, 4, generator=generator).to(dtype)) for n in (6, 5))
    scores = mu.points @ nu.points.mT
    scores = 1e4 * scores / scores.abs().max()
    pi = Coupling.solve(mu.weights, nu.weights, cost=-scores, epsilon=epsilon, on_failure="ignore")
    solution = pi.solution
    assert torch.isfinite(pi.to_dense()).all()
    error = violation(pi.to_dense().double(), mu.weights.double(), nu.weights.double())
    assert float(solution.marginal_error) == pytest.approx(error, abs=1e-6 if dtype == torch.float32 else 1e-12)
    # Down to a ten-thousandth of the range; the streamed engine, without Newton's method, may say that it did not.
    assert solution.converged == (solution.marginal_error <= solution.tolerance)
    assert solution.converged or (engine == "streamed" and epsilon == 1.0)


def test_23_scores_enter_linearly():
    # Where the logarithm of a clamped score is taken, all negative scores are the same.
    scores = tensor([-9.0, -0.1], [-0.1, -0.1])
    p = Coupling.solve(A2, B2, cost=-scores, epsilon=1.0).to_dense()
    assert torch.allclose(p, two_by_two(A2, B2, -scores, 1.0), atol=1e-8)
    assert (p - torch.outer(A2, B2)).abs().max() > 0.1


@pytest.mark.parametrize("shape", [(101, 100), (100, 101), (100,), (2, 100, 100)])
def test_24_a_cost_of_another_size_is_named(shape):
    weights = torch.full((100,), 0.01, dtype=torch.float64)
    message = rf"a cost matrix of shape .*, received {re.escape(str(shape))}"
    with pytest.raises(ShapeError, match=message):
        sinkhorn(weights, weights, cost=torch.zeros(shape, dtype=torch.float64), epsilon=0.1)


@without(triton_small=TOO_MANY)
def test_26_the_gradient_of_a_plan_passes_gradcheck(generator):
    a = random_weights(2, 5, generator=generator)
    cost = torch.rand(2, 5, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, 5, 5, generator=generator, dtype=torch.float64)

    def loss(cost):
        pi = Coupling.solve(
            a, a.flip(-1), cost=cost, epsilon=0.3, tolerance=1e-14, max_iterations=200, on_failure="ignore"
        )
        return (pi.to_dense() * upstream).sum()

    assert gradcheck(loss, (cost,), atol=1e-7)


def test_27_29_the_gradient_of_the_value_is_the_plan_once(generator):
    a, b = random_weights(5, generator=generator), random_weights(4, generator=generator)
    cost = torch.rand(5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    options = {"epsilon": 0.1, "tolerance": 1e-13, "max_iterations": 5000}
    pi = Coupling.solve(a, b, cost=cost, **options)
    (found,) = grad(pi.value, cost)
    assert float(found.sum()) == pytest.approx(1, abs=1e-12)
    assert torch.allclose(found, pi.to_dense(), atol=1e-12)
    direction = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    ahead, behind = (sinkhorn(a, b, cost=cost.detach() + s * 1e-5 * direction, **options).value for s in (1, -1))
    assert float((found * direction).sum()) == pytest.approx(float(ahead - behind) / 2e-5, rel=1e-6)


@without(cpu=PENALISED, triton_small=PENALISED)
@pytest.mark.parametrize("taus", [(0.9, 0.9), (0.5, 1.0)])
def test_29_the_gradient_of_an_unbalanced_value_is_its_plan(taus, generator):
    mu, nu = random_measure(5, generator=generator), random_measure(4, generator=generator)
    x = mu.points.requires_grad_()
    options = {"epsilon": 0.2, "tau_a": taus[0], "tau_b": taus[1], "tolerance": 1e-13, "on_failure": "ignore"}
    pi = Coupling.solve(mu, nu, **options)
    (found,) = grad(pi.value, x)
    p = pi.to_dense().detach()
    expected = 2 * (p.sum(1, keepdim=True) * x - p @ nu.points)
    assert torch.allclose(found, expected, atol=1e-10)


@without(streamed=FIRST_ORDER)
def test_28_a_second_derivative_is_right_and_not_zero(generator):
    a, b = random_weights(3, generator=generator), random_weights(4, generator=generator)
    cost = torch.rand(3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    options = {"epsilon": 0.3, "tolerance": 1e-14, "on_failure": "ignore"}
    (first,) = grad(sinkhorn(a, b, cost=cost, **options).value, cost, create_graph=True)
    (second,) = grad((first * direction).sum(), cost)
    ahead, behind = (
        Coupling.solve(a, b, cost=cost.detach() + s * 1e-5 * direction, **options).to_dense() for s in (1, -1)
    )
    assert second.abs().max() > 1e-3
    assert torch.allclose(second, (ahead - behind) / 2e-5, atol=1e-8)


@pytest.mark.parametrize("engine", ["streamed"], indirect=True)
def test_28_or_is_refused():
    cost = M2.clone().requires_grad_()
    for output in ("value", "f"):
        solution = sinkhorn(A2, B2, cost=cost, epsilon=0.3)
        (first,) = grad(getattr(solution, output).square().sum(), cost, create_graph=True)
        with pytest.raises(BackendError, match="first derivatives only"):
            grad(first.square().sum(), cost)


def test_30_memory_does_not_grow_with_the_sweeps(generator):
    mu, nu = random_measure(20, generator=generator), random_measure(15, generator=generator)
    kept = []

    def note(t):
        kept[-1] += t.numel()
        return t

    for sweeps in (3, 300):
        x = mu.points.clone().requires_grad_()
        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            solution = sinkhorn(
                Measure(x, mu.weights), nu, epsilon=0.01, tolerance=0, max_iterations=sweeps, on_failure="ignore"
            )
        assert solution.iterations == sweeps
        assert solution.f.requires_grad
        assert solution.value.requires_grad
    assert 0 < kept[0] == kept[1]


def test_30_the_plan_carries_a_gradient_and_keeps_dtype_and_device(generator):
    x = torch.rand(4, 2, generator=generator, requires_grad=True)
    pi = Coupling.solve(Measure.uniform(x), Measure.uniform(torch.rand(3, 2, generator=generator)), epsilon=0.5)
    for t in (pi.to_dense(), pi.value, pi @ torch.ones(3, 2), pi.transport_cost()):
        assert t.requires_grad
        assert t.dtype == torch.float32
        (found,) = grad(t.sum(), x, retain_graph=True)
        assert found.dtype == torch.float32
        assert torch.isfinite(found).all()


def test_31_any_real_cost_with_or_without_gradient():
    for cost in (M2 - 5, -M2, 0 * M2):
        leaf = cost.clone().requires_grad_()
        pi = Coupling.solve(A2, B2, cost=leaf, epsilon=0.5)
        assert torch.allclose(pi.to_dense(), two_by_two(A2, B2, cost, 0.5), atol=1e-8)
        assert torch.isfinite(grad(pi.transport_cost(), leaf)[0]).all()
        assert torch.equal(leaf, cost), "inputs are not changed in place"


def test_32_the_backward_pass_changes_nothing_in_place_and_takes_zero_weights(generator):
    cost = torch.rand(3, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    a, b = tensor(0.0, 0.4, 0.6), tensor(0.5, 0.5, 0.0)
    solution = sinkhorn(a, b, cost=cost, epsilon=0.3)
    upstream = torch.randn(3, generator=generator, dtype=torch.float64)
    kept = upstream.clone()
    (found,) = grad(solution.f, cost, upstream - (a * upstream).sum() * 0)
    assert torch.equal(upstream, kept)
    assert torch.isfinite(found).all()


def test_34_gradients_stay_bounded_by_one_over_epsilon(generator):
    mu, nu = random_measure(6, generator=generator), random_measure(6, generator=generator)
    for epsilon in (1.0, 0.1, 0.03):
        cost = SqEuclidean()(mu.points, nu.points).requires_grad_()
        pi = Coupling.solve(mu.weights, nu.weights, cost=cost, epsilon=epsilon, max_iterations=50_000)
        (found,) = grad(pi.transport_cost(), cost)
        gap = 1 - torch.linalg.svdvals(pi.to_dense().detach() / torch.outer(mu.weights, nu.weights).sqrt())[1]
        assert found.abs().sum() <= (1 + 4 * cost.max() / (epsilon * gap)).item()


@pytest.mark.parametrize(
    ("engine", "gradient"), [(name, "implicit") for name in ENGINES] + [("reference", "unrolled")], indirect=["engine"]
)
def test_36_every_temporary_lives_where_the_inputs_live(gradient, generator):
    mu, nu = random_measure(2, 3, generator=generator), random_measure(2, 4, generator=generator)
    expected = Coupling.solve(mu, nu, epsilon=0.3)
    x = mu.points.clone().requires_grad_()
    mask = forbid(torch.eye(3, 4, dtype=torch.bool), dtype=torch.float64)
    # A tensor made without a device would land on the meta device, and could not be mixed with the others.
    with torch.device("meta"):
        pi = Coupling.solve(Measure(x, mu.weights), nu, epsilon=0.3)
        masked = Coupling.solve(Measure(x, mu.weights), nu, epsilon=0.3, mask=mask, gradient=gradient)
        (found,) = grad(masked.to_dense().square().sum() + masked.value.sum(), x)
        rounded = pi.rounded().to_dense()
    assert torch.allclose(pi.to_dense(), expected.to_dense())
    assert found.device.type == rounded.device.type == "cpu"


@pytest.mark.parametrize("engine", ["streamed"], indirect=True)
def test_35_nothing_of_the_size_of_the_plan_is_stored(generator):
    n, m = 4000, 3000
    mu, nu = (Measure.uniform(torch.rand(k, 2, generator=generator)) for k in (n, m))

    class Largest(TorchDispatchMode):
        entries = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                self.entries = max(self.entries, t.untyped_storage().nbytes() // 4 if torch.is_tensor(t) else 0)
            return out

    x = mu.points.clone().requires_grad_()
    with Largest() as largest:
        solution = sinkhorn(Measure(x, mu.weights), nu, epsilon=1.0, tolerance=1e-2)
        (solution.value + solution.f.square().sum()).backward()
    assert solution.converged
    assert torch.isfinite(x.grad).all()
    assert largest.entries < n * m / 10


@pytest.mark.parametrize("epsilon", [1e-1, 1e-2])
def test_39_the_cost_without_entropy_lies_in_a_certified_interval(epsilon, generator):
    mu, nu = random_measure(8, generator=generator), random_measure(9, generator=generator)
    cost = SqEuclidean()(mu.points, nu.points)
    exact = float((torch.from_numpy(ot.emd(mu.weights.numpy(), nu.weights.numpy(), cost.numpy())) * cost).sum())
    pi = Coupling.solve(mu, nu, epsilon=epsilon)
    above = float((pi.rounded().to_dense() * cost).sum())
    # No coupling is further from the product than the entropy of a marginal.
    entropy = float(-(mu.weights * mu.weights.log()).sum())
    assert float(pi.value) - epsilon * entropy - 1e-9 <= exact <= above + 1e-9
    assert above - exact <= epsilon * entropy + 1e-9


@without(cpu=PENALISED, triton_small=PENALISED)
@pytest.mark.parametrize("rho", [1.0, 100.0])
def test_38_strong_penalties_do_not_upset_the_unbalanced_problem(rho):
    a, b, epsilon = tensor(0.3, 0.7), tensor(0.7, 0.3), 0.01
    tau = rho / (rho + epsilon)
    solution = sinkhorn(a, b, cost=M2, epsilon=epsilon, tau_a=tau, tau_b=tau, on_failure="ignore")
    p = plan(solution, M2, a, b, epsilon)
    value = float(primal_value(p, M2, a, b, epsilon, rho, rho))
    assert torch.isfinite(p).all()
    assert solution.converged
    assert 0 < solution.value <= value + 1e-12, "the dual value is a lower bound"
    assert float(solution.duality_gap) == pytest.approx(value - float(solution.value), abs=1e-9)
    assert float(solution.value) == pytest.approx(value, abs=1e-8)


@pytest.mark.parametrize("engine", [None], indirect=True)
def test_other_libraries_still_have_the_faults_that_these_reports_describe():
    """Keeps the comparison honest: when a fault is gone, the page that mentions it must change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pot = ot.sinkhorn(A2.numpy(), B2.numpy(), M2.numpy(), 1e-3)
    assert np.abs(pot.sum(0) - B2.numpy()).sum() > 0.3


def test_invalid_numbers_are_refused_and_not_solved():
    with pytest.raises(NonFiniteError, match="NONFINITE"):
        sinkhorn(A2, B2, cost=tensor([float("nan"), 1.0], [1.0, 0.0]), epsilon=0.5)
    with pytest.raises(ConfigError, match="epsilon positive"):
        sinkhorn(A2, B2, cost=M2, epsilon=0)
