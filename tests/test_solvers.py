import math
import warnings

import geomloss
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import (
    FORBIDDEN,
    gaussian_covariance,
    plan,
    pot_plan,
    pot_unbalanced_plan,
    primal_value,
    quantile_cost,
    random_measure,
    random_weights,
    relative_entropy,
    tensor,
    two_by_two,
)
from strategies import Problem, numbers, problems

from sinkformer import Coupling, Measure, Status, sinkhorn, use_backend
from sinkformer.costs import Euclidean, NegativeDot, SqEuclidean, forbid
from sinkformer.errors import (
    ConfigError,
    ConvergenceError,
    ConvergenceWarning,
    DeviceError,
    DTypeError,
    InfeasibleError,
    NonFiniteError,
    ShapeError,
    WeightError,
)

INF, NAN = float("inf"), float("nan")
# Converged so far that two solutions of one problem differ by less than the tolerance of any comparison.
SHARP = {"tolerance": 1e-13, "max_iterations": 20_000, "on_failure": "ignore"}


def solve(problem: Problem, **options) -> torch.Tensor:
    a, b, cost, epsilon = problem
    return plan(sinkhorn(a, b, cost=cost, epsilon=epsilon, **{**SHARP, **options}), cost, a, b, epsilon)


def close(found: torch.Tensor, wanted: torch.Tensor, atol: float = 1e-11) -> bool:
    return torch.allclose(found, wanted, rtol=0, atol=atol)


# Closed forms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5])
def test_one_atom_on_a_side_gives_the_product_exactly(n, generator):
    a, b = tensor(1.0), random_weights(n, generator=generator)
    cost = torch.randn(1, n, generator=generator, dtype=torch.float64)
    for p, q, c in ((a, b, cost), (b, a, cost.mT)):
        solution = sinkhorn(p, q, cost=c, epsilon=0.1)
        assert close(plan(solution, c, p, q, 0.1), torch.outer(p, q), 1e-15)
        assert solution.iterations == 1
        assert solution.marginal_error < 1e-14
        assert close(solution.value, (torch.outer(p, q) * c).sum(), 1e-14)


@pytest.mark.parametrize("level", [0.0, -3.0, 1e6])
@pytest.mark.parametrize("epsilon", [1e-3, 1.0, 1e3])
def test_a_constant_cost_gives_the_product_in_one_iteration(level, epsilon, generator):
    a, b = random_weights(4, generator=generator), random_weights(3, generator=generator)
    cost = torch.full((4, 3), level, dtype=torch.float64)
    solution = sinkhorn(a, b, cost=cost, epsilon=epsilon)
    assert solution.iterations == 1
    assert close(plan(solution, cost, a, b, epsilon), torch.outer(a, b), 1e-13 * max(1, level / epsilon))
    assert torch.allclose(solution.value, tensor(level))


@pytest.mark.parametrize("epsilon", [0.03, 0.1, 1.0, 100.0])
@pytest.mark.parametrize("p", [0.5, 0.2, 0.95])
def test_two_by_two_by_hand(epsilon, p):
    a, b, cost = tensor(p, 1 - p), tensor(0.3, 0.7), tensor([0.1, 1.0], [0.8, -0.2])
    expected = two_by_two(a, b, cost, epsilon)
    solution = sinkhorn(a, b, cost=cost, epsilon=epsilon, **SHARP)
    assert close(plan(solution, cost, a, b, epsilon), expected)
    assert close(solution.value, primal_value(expected, cost, a, b, epsilon))


def test_the_quadratic_of_two_by_two_solves_the_problem():
    a, b, cost = tensor(0.5, 0.5), tensor(0.3, 0.7), tensor([0.0, 1.0], [1.0, 0.0])
    p = two_by_two(a, b, cost, 0.2)
    assert close(p.sum(1), a)
    assert close(p.sum(0), b)
    assert p[0, 0] * p[1, 1] / (p[0, 1] * p[1, 0]) == pytest.approx(math.exp(2 / 0.2))


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]])
def test_small_epsilon_finds_the_permutation(order):
    cost = torch.ones(4, 4, dtype=torch.float64)
    cost[range(4), order] = 0
    expected = torch.zeros(4, 4, dtype=torch.float64)
    expected[range(4), order] = 0.25
    uniform = torch.full((4,), 0.25, dtype=torch.float64)
    assert close(solve(Problem(uniform, uniform, cost, 0.02)), expected, 1e-15)


def test_the_coupling_of_distinct_points_with_themselves_tends_to_the_identity():
    mu = Measure.uniform(tensor([0.0], [1.0], [3.0]))
    pi = Coupling.solve(mu, mu, cost=SqEuclidean(), epsilon=0.02)
    assert close(pi.to_dense(), torch.eye(3).double() / 3, 1e-12)


def test_ties_are_split_not_broken():
    a = tensor(0.5, 0.5)
    found = solve(Problem(a, a, torch.zeros(2, 2, dtype=torch.float64), 1e-6))
    assert close(found, torch.full((2, 2), 0.25, dtype=torch.float64), 1e-12)


@pytest.mark.parametrize("epsilon", [0.02, 0.1])
def test_on_the_line_the_cost_is_that_of_the_quantiles(epsilon, generator):
    x, y = (torch.rand(n, 1, generator=generator, dtype=torch.float64) for n in (6, 8))
    mu = Measure(x, random_weights(6, generator=generator))
    nu = Measure(y, random_weights(8, generator=generator))
    exact = quantile_cost(x[:, 0], mu.weights, y[:, 0], nu.weights)
    pi = Coupling.solve(mu, nu, epsilon=epsilon, tolerance=1e-12, max_iterations=50_000)
    # The optimal plan has an entropy KL(P | a x b) of at most log of the number of atoms over the smallest weight.
    slack = epsilon * math.log(1 / float(mu.weights.min()))
    assert exact - 1e-10 <= float(pi.transport_cost()) <= exact + slack
    assert exact - 1e-10 <= float(pi.value) <= exact + slack


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_gaussians_on_the_line(epsilon):
    # The trapezoidal rule is spectrally accurate for Gaussians.
    grid = torch.linspace(-9, 9, 91, dtype=torch.float64)
    variances = 1.0, 0.49
    a, b = (torch.softmax(-(grid**2) / (2 * v), -1) for v in variances)
    mu, nu = Measure(grid.unsqueeze(-1), a), Measure(grid.unsqueeze(-1) + 1.5, b)
    pi = Coupling.solve(mu, nu, epsilon=epsilon, tolerance=1e-12)
    covariance = (pi.to_dense() * torch.outer(grid, grid)).sum()
    c = gaussian_covariance(*variances, epsilon)
    assert covariance == pytest.approx(c, abs=1e-8)
    mutual_information = -0.5 * math.log(1 - c**2 / (variances[0] * variances[1]))
    value = 1.5**2 + sum(variances) - 2 * c + epsilon * mutual_information
    assert float(pi.value) == pytest.approx(value, abs=1e-8)


@pytest.mark.parametrize("epsilon", [1e3, 1e6])
def test_large_epsilon_tends_to_the_product_quadratically(epsilon, generator):
    a, b = random_weights(4, generator=generator), random_weights(5, generator=generator)
    cost = torch.rand(4, 5, generator=generator, dtype=torch.float64)
    assert relative_entropy(solve(Problem(a, b, cost, epsilon)), torch.outer(a, b)) <= 1 / epsilon**2 + 1e-15


def test_without_any_constraint_the_plan_is_the_kernel(generator):
    a, b = random_weights(3, generator=generator), random_weights(4, generator=generator)
    cost = torch.rand(3, 4, generator=generator, dtype=torch.float64)
    solution = sinkhorn(a, b, cost=cost, epsilon=0.5, tau_a=0, tau_b=0)
    assert (solution.f == 0).all()
    assert (solution.g == 0).all()
    assert solution.converged
    expected = torch.outer(a, b) * (-cost / 0.5).exp()
    assert close(plan(solution, cost, a, b, 0.5), expected)
    assert close(solution.value, primal_value(expected, cost, a, b, 0.5, 0.0, 0.0))


def test_one_constraint_alone_is_a_softmax(generator):
    a, b = random_weights(3, generator=generator), random_weights(4, generator=generator)
    scores = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    found = solve(Problem(a, b, -scores, 0.5), tau_b=0.0)
    assert close(found, a[:, None] * torch.softmax(scores / 0.5 + b.log(), -1))


# Other solvers ----------------------------------------------------------------------------------------------------------


def random_problems(seed: int):
    """Eight ragged, weighted problems, every second one with some pairs forbidden; feasible by construction.

    A mask forbids at most one pair in every row and in every column, and a_i + b_j < 1 there, so every set of rows can
    ship its mass (Hall) with room to spare.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for k in range(8):
        n, m = torch.randint(1, 13, (2,), generator=generator).tolist()
        mu, nu = (random_measure(size, d=3, generator=generator) for size in (n, m))
        mask = torch.zeros(n, m, dtype=torch.bool)
        if k % 2:
            size = min(n, m)
            i, j = torch.randperm(n, generator=generator)[:size], torch.randperm(m, generator=generator)[:size]
            mask[i, j] = mu.weights[i] + nu.weights[j] < 0.9
        epsilon = 10 ** (-1.2 + 1.5 * float(torch.rand((), generator=generator)))
        found.append((mu, nu, mask, epsilon))
    return found


@pytest.mark.parametrize("seed", range(25))
def test_two_hundred_problems_agree_with_pot_and_batch_equals_loop(seed):
    parts = random_problems(seed)
    mu, nu = Measure.stack([p[0] for p in parts]), Measure.stack([p[1] for p in parts])
    mask = torch.zeros(8, mu.n, nu.n, dtype=torch.float64)
    for k, (_, _, forbidden, _) in enumerate(parts):
        mask[k, : forbidden.shape[0], : forbidden.shape[1]] = forbid(forbidden, dtype=torch.float64)
    epsilon = torch.tensor([p[3] for p in parts], dtype=torch.float64)
    options = {"tolerance": 1e-12, "max_iterations": 50_000}
    batch = Coupling.solve(mu, nu, epsilon=epsilon, mask=mask, **options).to_dense()
    for k, (left, right, forbidden, eps) in enumerate(parts):
        n, m = forbidden.shape
        cost = SqEuclidean()(left.points, right.points)
        expected = pot_plan(left.weights, right.weights, cost + FORBIDDEN * forbidden, eps)
        assert close(batch[k, :n, :m], expected, 1e-9)
        assert (batch[k, n:] == 0).all()
        assert (batch[k, :, m:] == 0).all()
        assert (batch[k, :n, :m][forbidden] == 0).all()
        alone = Coupling.solve(left, right, epsilon=eps, mask=mask[k, :n, :m], **options).to_dense()
        assert close(batch[k, :n, :m], alone, 1e-12)


@pytest.mark.parametrize("taus", [(0.8, 0.6), (0.5, 1.0), (1.0, 0.3), (0.9, 0.0)])
@pytest.mark.parametrize("epsilon", [0.2, 1.0])
def test_penalties_agree_with_pot_and_attain_the_value(taus, epsilon, generator):
    a, b = random_weights(5, generator=generator), random_weights(4, generator=generator)
    cost = torch.rand(5, 4, generator=generator, dtype=torch.float64)
    rho = tuple(epsilon * tau / (1 - tau) if tau < 1 else INF for tau in taus)
    solution = sinkhorn(a, b, cost=cost, epsilon=epsilon, tau_a=taus[0], tau_b=taus[1], **SHARP)
    found = plan(solution, cost, a, b, epsilon)
    assert close(found, pot_unbalanced_plan(a, b, cost, epsilon, rho), 1e-9)
    assert close(solution.value, primal_value(found, cost, a, b, epsilon, *rho), 1e-10)
    assert abs(solution.duality_gap) < 1e-10


def test_the_value_agrees_with_geomloss(generator):
    # Their cost is |x - y|^2 / 2 and their epsilon blur^2; their annealing ends close to, not at, the solution.
    mu, nu = random_measure(9, generator=generator), random_measure(7, generator=generator)
    blur = 0.4
    loss = geomloss.SamplesLoss("sinkhorn", p=2, blur=blur, scaling=0.99, debias=False, backend="tensorized")
    theirs = loss(mu.weights, mu.points, nu.weights, nu.points)
    ours = sinkhorn(mu, nu, cost=0.5 * SqEuclidean()(mu.points, nu.points), epsilon=blur**2).value
    assert float(ours) == pytest.approx(float(theirs), rel=1e-4)


# Laws -------------------------------------------------------------------------------------------------------------------


@given(problems())
def test_the_solution_is_a_coupling_with_the_primal_value(problem):
    a, b, cost, epsilon = problem
    solution = sinkhorn(a, b, cost=cost, epsilon=epsilon)
    found = plan(solution, cost, a, b, epsilon)
    error = (found.sum(1) - a).abs().sum() + (found.sum(0) - b).abs().sum()
    assert solution.status is Status.CONVERGED
    assert close(solution.marginal_error, error, 1e-14)
    assert error <= solution.tolerance == 1e-9
    assert (found[a == 0] == 0).all()
    assert (found[:, b == 0] == 0).all()
    assert torch.isfinite(solution.f).all()
    assert torch.isfinite(solution.g).all()
    assert close((a * solution.f).sum(), (b * solution.g).sum(), 1e-13)
    assert -1e-14 <= solution.duality_gap <= 1e-7
    assert close(solution.value, primal_value(found, cost, a, b, epsilon), 1e-7)


@given(problems(), st.randoms(use_true_random=False))
def test_permutation(problem, random):
    a, b, cost, epsilon = problem
    i, j = list(range(len(a))), list(range(len(b)))
    random.shuffle(i)
    random.shuffle(j)
    assert close(solve(Problem(a[i], b[j], cost[i][:, j], epsilon)), solve(problem)[i][:, j])


@given(problems())
def test_transposition(problem):
    a, b, cost, epsilon = problem
    assert close(solve(Problem(b, a, cost.mT, epsilon)), solve(problem).mT)


@given(problems(), st.data())
def test_the_gauge_of_the_cost(problem, data):
    a, b, cost, epsilon = problem
    u, v = (torch.tensor(data.draw(st.lists(numbers(-5, 5), min_size=k, max_size=k))).double() for k in cost.shape)
    shifted = cost + u[:, None] + v
    one = sinkhorn(a, b, cost=cost, epsilon=epsilon, **SHARP)
    other = sinkhorn(a, b, cost=shifted, epsilon=epsilon, **SHARP)
    assert close(plan(other, shifted, a, b, epsilon), plan(one, cost, a, b, epsilon))
    assert close(other.value, one.value + (a * u).sum() + (b * v).sum())


@given(problems(), st.sampled_from([1e-3, 0.5, 3.0, 1e4]))
def test_the_scale_of_the_cost(problem, s):
    a, b, cost, epsilon = problem
    one = sinkhorn(a, b, cost=cost, epsilon=epsilon, **SHARP)
    other = sinkhorn(a, b, cost=s * cost, epsilon=s * epsilon, **SHARP)
    assert close(plan(other, s * cost, a, b, s * epsilon), plan(one, cost, a, b, epsilon))
    for mine, theirs in ((other.f, one.f), (other.g, one.g), (other.value, one.value)):
        assert torch.allclose(mine, s * theirs, atol=1e-9 * s)


@given(problems(), st.data())
def test_splitting_an_atom(problem, data):
    a, b, cost, epsilon = problem
    k, share = data.draw(st.integers(0, len(a) - 1)), data.draw(numbers(0, 1))
    split = torch.cat([a, (1 - share) * a[k : k + 1]])
    split[k] *= share
    found = solve(Problem(split, b, torch.cat([cost, cost[k : k + 1]]), epsilon))
    expected = solve(problem)
    expected = torch.cat([expected, (1 - share) * expected[k : k + 1]])
    expected[k] *= share
    assert close(found, expected)


@pytest.mark.parametrize("junk", [0.0, 3.0, 1e150, INF, NAN])
@pytest.mark.parametrize("cost", [SqEuclidean(), NegativeDot(), Euclidean()], ids=repr)
def test_padding_changes_nothing(junk, cost, generator):
    mu, nu = random_measure(4, generator=generator), random_measure(3, generator=generator)
    padded = Measure(
        torch.cat([torch.full((2, 2), junk, dtype=torch.float64), mu.points]), torch.cat([tensor(0.0, 0.0), mu.weights])
    )
    one, other = (Coupling.solve(left, nu, cost=cost, epsilon=0.3, **SHARP) for left in (mu, padded))
    assert close(other.to_dense()[2:], one.to_dense())
    assert (other.to_dense()[:2] == 0).all()
    assert close(other.value, one.value)
    assert torch.isfinite(other.solution.f).all()


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e300])
def test_a_cost_of_padding_is_never_looked_at(junk, generator):
    a, b = tensor(0.5, 0.5, 0.0), tensor(0.0, 0.25, 0.75)
    cost = torch.rand(3, 3, generator=generator, dtype=torch.float64)
    expected = solve(Problem(a, b, cost, 0.3))
    cost[2, 0] = cost[2, 1] = cost[0, 0] = junk
    found = sinkhorn(a, b, cost=cost, epsilon=0.3, **SHARP)
    assert found.converged
    assert close(plan(found, cost, a, b, 0.3)[:2, 1:], expected[:2, 1:])
    assert torch.isfinite(found.value)


@given(problems())
def test_warm_starts_annealing_and_unrolling_do_not_change_the_solution(problem):
    a, b, cost, epsilon = problem
    expected = solve(problem)
    rough = sinkhorn(a, b, cost=cost, epsilon=2 * epsilon, tolerance=1e-3)
    for options in (
        {"init": rough.potentials},
        {"annealing": None},
        {"annealing": 0.3},
        {"gradient": "unrolled"},
    ):
        assert close(solve(problem, **options), expected)


def test_a_warm_start_at_the_solution_needs_one_iteration(generator):
    mu, nu = random_measure(6, generator=generator), random_measure(5, generator=generator)
    cold = sinkhorn(mu, nu, epsilon=0.05, tolerance=1e-11)
    warm = sinkhorn(mu, nu, epsilon=0.05, tolerance=1e-9, init=cold.potentials)
    assert cold.iterations > 5
    assert warm.iterations <= 2
    assert torch.allclose(warm.f, cold.f, atol=1e-9)


def test_the_two_signs_of_the_dot_product_and_the_square_are_one_problem(generator):
    mu, nu = random_measure(6, generator=generator), random_measure(5, generator=generator)
    one = Coupling.solve(mu, nu, cost=SqEuclidean(), epsilon=0.4, **SHARP)
    other = Coupling.solve(mu, nu, cost=NegativeDot(), epsilon=0.2, **SHARP)
    assert close(one.to_dense(), other.to_dense())


@given(problems(), st.data())
def test_stability_in_the_cost(problem, data):
    a, b, cost, epsilon = problem
    entries = data.draw(st.lists(numbers(-1, 1), min_size=cost.numel(), max_size=cost.numel()))
    change = torch.tensor(entries, dtype=torch.float64).reshape(cost.shape)
    moved = (solve(Problem(a, b, cost + change, epsilon)) - solve(problem)).abs().sum()
    assert moved <= (change.max() - change.min()) / 2 / epsilon + 1e-11


@given(problems(), st.data())
def test_divergence_to_any_coupling_is_the_gap_of_the_values(problem, data):
    a, b, cost, epsilon = problem
    other = Problem(a, b, -cost, data.draw(numbers(0.5, 3)))
    p, optimal = solve(other), solve(problem)
    value = sinkhorn(a, b, cost=cost, epsilon=epsilon, **SHARP).value
    assert close(relative_entropy(p, optimal), (primal_value(p, cost, a, b, epsilon) - value) / epsilon, 1e-9)


def test_more_iterations_raise_the_dual_and_close_the_gap(generator):
    mu, nu = random_measure(8, generator=generator), random_measure(8, generator=generator)
    with use_backend("reference"):  # plain sweeps raise the dual, over-relaxed ones need not
        runs = [
            sinkhorn(mu, nu, epsilon=0.01, max_iterations=k, annealing=None, on_failure="ignore")
            for k in (1, 4, 16, 64, 256)
        ]
    values, gaps = [float(s.value) for s in runs], [float(s.duality_gap) for s in runs]
    assert values == sorted(values)
    assert gaps == sorted(gaps, reverse=True)
    assert min(gaps) >= -1e-14
    best = float(sinkhorn(mu, nu, epsilon=0.01, tolerance=1e-12, max_iterations=20_000).value)
    assert all(value <= best + 1e-12 <= value + gap + 2e-12 for value, gap in zip(values, gaps, strict=True))


# Symmetric problems -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.05, 0.2, 1.0])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_symmetric_matrix_has_one_potential_and_a_symmetric_plan(n, epsilon, generator):
    a = random_weights(n, generator=generator)
    cost = torch.rand(n, n, generator=generator, dtype=torch.float64)
    cost = cost + cost.mT
    solution = sinkhorn(a, a, cost=cost, epsilon=epsilon)
    assert solution.converged
    assert torch.equal(solution.f, solution.g)
    found = plan(solution, cost, a, a, epsilon)
    assert torch.equal(found, found.mT)
    # The same problem, its symmetry hidden by the gauge.
    shifted = cost + torch.arange(n).double()
    hidden = sinkhorn(a, a, cost=shifted, epsilon=epsilon)
    assert close(plan(hidden, shifted, a, a, epsilon), found, 1e-8)


@pytest.mark.parametrize("cost", [SqEuclidean(), NegativeDot(), Euclidean()], ids=repr)
@pytest.mark.parametrize("n", [3, 37])
def test_a_measure_against_itself_has_one_potential(n, cost, generator):
    mu = random_measure(n, d=5, generator=generator)
    pi = Coupling.solve(mu, mu, cost=cost, epsilon=0.2)
    assert torch.equal(pi.solution.f, pi.solution.g)
    assert close(pi.to_dense(), pi.to_dense().mT, 1e-14)


def test_symmetric_and_other_problems_share_a_batch(generator):
    a = random_weights(4, generator=generator)
    cost = torch.rand(2, 4, 4, generator=generator, dtype=torch.float64)
    cost[0] = cost[0] + cost[0].mT
    weights = a.expand(2, 4)
    together = sinkhorn(weights, weights, cost=cost, epsilon=0.3, **SHARP)
    for k in range(2):
        assert close(plan(together, cost, weights, weights, 0.3)[k], solve(Problem(a, a, cost[k], 0.3)))
    assert torch.equal(together.f[0], together.g[0])
    assert not torch.equal(together.f[1], together.g[1])


# Status -----------------------------------------------------------------------------------------------------------------

SLOW = Problem(tensor(0.5, 0.5), tensor(0.3, 0.7), tensor([0.0, 1.0], [1.0, 0.0]), 1e-3)


def run(problem: Problem, **options):
    return sinkhorn(problem.a, problem.b, cost=problem.cost, epsilon=problem.epsilon, **options)


def test_too_few_iterations_warn_once():
    message = (
        r"^MAX_ITERATIONS, marginal error 4\.00e-01 after 3 iterations, tolerance 1\.0e-09: the iterations ended.*"
        r"raise max_iterations or epsilon, or loosen tolerance; Coupling\.rounded\(\)"
    )
    with pytest.warns(ConvergenceWarning, match=message) as caught:
        solution = run(SLOW, max_iterations=3, annealing=None)
    assert len(caught) == 1
    assert solution.status is Status.MAX_ITERATIONS
    assert not solution.converged
    assert solution.iterations == 3
    assert solution.duality_gap > 1e-3
    with pytest.raises(ConvergenceError, match=message):
        run(SLOW, max_iterations=3, annealing=None, on_failure="raise")


def test_failures_can_be_ignored():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(SLOW, max_iterations=3, on_failure="ignore").status is Status.MAX_ITERATIONS


def test_the_warning_points_at_the_caller():
    with pytest.warns(ConvergenceWarning) as caught:
        run(SLOW, max_iterations=3, annealing=None)
    assert caught[0].filename == __file__


def test_the_worst_of_a_batch_is_named_and_the_others_are_solved():
    weights = SLOW.a.expand(2, 3, 2), SLOW.b.expand(2, 3, 2)
    epsilon = torch.ones(2, 3, dtype=torch.float64)
    epsilon[0, 1], epsilon[1, 2] = 1e-2, 1e-4
    options = {"cost": SLOW.cost.expand(2, 3, 2, 2), "epsilon": epsilon, "annealing": None, "max_iterations": 20}
    with pytest.warns(
        ConvergenceWarning, match=r"^problem \[1, 2\], the worst of 2 that failed in a batch of 6: MAX_ITERATIONS"
    ):
        solution = sinkhorn(*weights, **options)
    assert solution.worst == (1, 2)
    assert solution.converged.sum() == 4
    assert solution.status[0] == [Status.CONVERGED, Status.MAX_ITERATIONS, Status.CONVERGED]
    assert solution.iterations.max() == 20
    assert solution.iterations[0, 0] < 20, "every problem stops by itself"


INFEASIBLE = {
    "masked row": ((0.5, 0.5), (0.5, 0.5), [[INF, INF], [0, 0]]),
    "masked column": ((0.5, 0.5), (0.5, 0.5), [[0, INF], [0, INF]]),
    "too heavy a pair of rows": ((0.4, 0.4, 0.2), (0.7, 0.15, 0.15), [[0, INF, INF], [0, INF, INF], [0, 0, 0]]),
    "too heavy a row": ((0.9, 0.1), (0.5, 0.5), [[0, INF], [0, 0]]),
}


@pytest.mark.parametrize("case", INFEASIBLE.values(), ids=INFEASIBLE)
@pytest.mark.parametrize("as_mask", [True, False])
def test_infeasible_masks_are_found(case, as_mask):
    a, b, mask = (torch.tensor(t, dtype=torch.float64) for t in case)
    cost = torch.zeros_like(mask)
    options = {"cost": cost, "mask": mask} if as_mask else {"cost": mask}
    message = (
        r"^INFEASIBLE, marginal error .* no coupling avoids the forbidden pairs.*allow more pairs, or .* tau_a < 1"
    )
    for on_failure in ("warn", "raise"):
        with pytest.raises(InfeasibleError, match=message):
            sinkhorn(a, b, epsilon=0.5, max_iterations=100, on_failure=on_failure, **options)
    solution = sinkhorn(a, b, epsilon=0.5, max_iterations=100, on_failure="ignore", **options)
    assert solution.status is Status.INFEASIBLE
    assert torch.isfinite(solution.f).all()
    assert torch.isfinite(solution.value)
    assert solution.marginal_error > 0.1
    found = plan(solution, mask, a, b, 0.5)
    assert (found[torch.isinf(mask)] == 0).all()
    assert not torch.isnan(found).any()
    penalised = sinkhorn(a, b, epsilon=0.5, tau_a=0.5, tau_b=0.5, **options)
    assert penalised.converged, "without hard constraints every mask is feasible"


def test_the_infeasible_problem_of_a_batch_is_named():
    a, b = tensor([0.25, 0.75], [0.9, 0.1]), tensor([0.5, 0.5], [0.5, 0.5])
    mask = tensor([0.0, INF], [0.0, 0.0])
    with pytest.raises(
        InfeasibleError, match=r"^problem \[1\], the worst of 1 that failed in a batch of 2: INFEASIBLE"
    ):
        sinkhorn(a, b, cost=torch.zeros(2, 2, 2, dtype=torch.float64), mask=mask, epsilon=0.5)


def test_a_feasible_mask_whose_support_is_smaller():
    # The only coupling is the diagonal: (1, 0) is allowed, receives nothing, and the potentials diverge.
    a = tensor(0.5, 0.5)
    mask = tensor([0.0, INF], [0.0, 0.0])
    solution = sinkhorn(a, a, cost=torch.zeros_like(mask), mask=mask, epsilon=0.5, on_failure="ignore")
    assert solution.status is not Status.INFEASIBLE
    found = plan(solution, mask, a, a, 0.5)
    assert close(found, torch.eye(2).double() / 2, 1e-3)
    assert torch.isfinite(solution.f).all()
    with use_backend("reference"):
        options = {"cost": torch.zeros_like(mask), "mask": mask, "epsilon": 0.5, "max_iterations": 15}
        plain = sinkhorn(a, a, **options, on_failure="ignore")
    assert plain.status is Status.MAX_ITERATIONS, "plain sweeps converge like one over their number"
    assert close(plan(plain, mask, a, a, 0.5), torch.eye(2).double() / 2, 0.03)


def test_a_tolerance_that_is_met_to_rounding_is_met():
    # The error after k sweeps is 1 / (2 k): exactly 0.01 after 50.
    a = tensor(0.5, 0.5)
    cost = tensor([0.0, INF], [0.0, 0.0])
    assert sinkhorn(a, a, cost=cost, epsilon=0.5, tolerance=1e-2).converged


def test_a_feasible_mask():
    a, b = tensor(0.4, 0.6), tensor(0.5, 0.5)
    mask = tensor([0.0, INF], [0.0, 0.0])
    solution = sinkhorn(a, b, cost=torch.zeros_like(mask), mask=mask, epsilon=0.5, **SHARP)
    assert close(plan(solution, mask, a, b, 0.5), tensor([0.4, 0.0], [0.1, 0.5]))


def test_a_forbidden_row_without_weight_is_no_obstacle(generator):
    a, b = tensor(0.0, 1.0), tensor(0.5, 0.5)
    solution = sinkhorn(a, b, cost=tensor([INF, INF], [0.0, 1.0]), epsilon=0.5)
    assert solution.converged
    assert torch.isfinite(solution.f).all()


@pytest.mark.parametrize("bad", [NAN, -INF])
def test_a_cost_that_is_not_finite(bad):
    cost = tensor([[0.0, 1.0], [1.0, 0.0]], [[0.0, bad], [1.0, 0.0]])
    weights = torch.full((2, 2), 0.5, dtype=torch.float64)
    message = r"^problem \[1\], the worst of 1 .*: NONFINITE, .* cost of a pair .* is NaN, -inf or beyond 1e29; look for overflow"
    with pytest.raises(NonFiniteError, match=message):
        sinkhorn(weights, weights, cost=cost, epsilon=0.5)
    solution = sinkhorn(weights, weights, cost=cost, epsilon=0.5, on_failure="ignore")
    assert solution.status == [Status.CONVERGED, Status.NONFINITE]
    assert torch.isnan(solution.value[1])
    assert torch.isnan(solution.f[1]).all()
    assert torch.isfinite(solution.value[0])
    assert torch.isfinite(solution.f[0]).all()
    assert solution.worst == (1,)


def test_every_status_explains_itself():
    assert all(status.explanation and str(status) == status.name for status in Status)


# Batches ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(0,), (2, 0)])
@pytest.mark.parametrize("gradient", ["implicit", "unrolled"])
def test_an_empty_batch_gives_empty_results(batch, gradient):
    mu, nu = (Measure(torch.zeros(*batch, n, 2), torch.zeros(*batch, n)) for n in (3, 4))
    solution = sinkhorn(mu, nu, epsilon=0.1, gradient=gradient)
    assert (solution.f.shape, solution.g.shape, solution.value.shape) == ((*batch, 3), (*batch, 4), batch)
    assert solution.worst is None
    assert solution.status == ([] if batch == (0,) else [[], []])
    assert Coupling.solve(mu, nu, epsilon=0.1).to_dense().shape == (*batch, 3, 4)


@pytest.mark.parametrize("batch", [(1,), (1, 1), (2, 3)])
def test_any_number_of_batch_axes(batch, generator):
    mu, nu = (random_measure(*batch, n, generator=generator) for n in (3, 4))
    together = sinkhorn(mu, nu, epsilon=0.2)
    assert together.f.shape == (*batch, 3)
    assert together.value.shape == batch
    index = tuple(k - 1 for k in batch)
    alone = sinkhorn(mu[index], nu[index], epsilon=0.2)
    assert close(together.f[index], alone.f, 1e-13)
    assert together.iterations[index] == alone.iterations


def test_results_do_not_depend_on_the_neighbours(generator):
    mu, nu = (random_measure(5, n, generator=generator) for n in (6, 7))
    epsilon = tensor(0.01, 1.0, 0.1, 0.05, 0.5)
    order = [3, 0, 4]
    one = sinkhorn(mu, nu, epsilon=epsilon)
    other = sinkhorn(mu[order], nu[order], epsilon=epsilon[order])
    assert torch.equal(one.iterations[order], other.iterations)
    assert close(one.g[order], other.g, 1e-12)


def test_weights_alone_are_enough_with_a_matrix(generator):
    mu, nu = random_measure(3, generator=generator), random_measure(4, generator=generator)
    cost = SqEuclidean()(mu.points, nu.points)
    assert close(sinkhorn(mu.weights, nu.weights, cost=cost, epsilon=0.1).f, sinkhorn(mu, nu, epsilon=0.1).f)


def test_a_mask_is_broadcast_and_added(generator):
    mu, nu = (random_measure(2, n, generator=generator) for n in (3, 4))
    extra = torch.rand(3, 4, generator=generator, dtype=torch.float64)
    extra[0, 1] = INF
    matrix = SqEuclidean()(mu.points, nu.points)
    one = sinkhorn(mu, nu, mask=extra, epsilon=0.3, **SHARP)
    other = sinkhorn(mu, nu, cost=matrix + extra, epsilon=0.3, **SHARP)
    assert close(one.f, other.f)
    row = sinkhorn(mu, nu, mask=extra[:1], epsilon=0.3, on_failure="ignore")
    assert row.f.shape == (2, 3)


def test_a_solution_can_be_transposed_and_mapped(generator):
    solution = sinkhorn(
        random_measure(2, 3, generator=generator), random_measure(2, 4, generator=generator), epsilon=0.3
    )
    assert torch.equal(solution.transposed().f, solution.g)
    assert torch.equal(solution.map(lambda t: t[1]).value, solution.value[1])
    assert solution.potentials == (solution.f, solution.g)


# Precision --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_reaches_the_default_tolerance(dtype, generator):
    points = [torch.rand(n, 3, generator=generator).to(dtype) for n in (8, 16)]
    mu, nu = (Measure.uniform(x) for x in points)
    solution = sinkhorn(mu, nu, epsilon=0.02)
    assert solution.converged
    assert solution.marginal_error <= solution.tolerance == 1e-4
    assert (solution.f.dtype, solution.value.dtype) == (torch.float64, torch.float32)
    exact = sinkhorn(*(Measure.uniform(x.double()) for x in points), epsilon=0.02)
    assert torch.allclose(solution.value.double(), exact.value, atol=1e-5)


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_float32_does_not_mind_a_large_constant_in_the_cost(shift, generator):
    a, b = random_weights(6, generator=generator).float(), random_weights(5, generator=generator).float()
    # Multiples of 2^-10, so that the shifted cost is exact in float32.
    cost = torch.randint(0, 1024, (6, 5), generator=generator).float() / 1024
    one = sinkhorn(a, b, cost=cost, epsilon=0.05)
    other = sinkhorn(a, b, cost=cost + shift, epsilon=0.05)
    assert other.converged
    plans = [plan(s, c.double(), a.double(), b.double(), 0.05) for s, c in ((one, cost), (other, cost + shift))]
    assert close(plans[1], plans[0], 1e-6)
    assert float(other.value) == pytest.approx(float(one.value) + shift, abs=2e-3)


def test_an_epsilon_is_not_rounded_to_single_precision():
    # The number 0.1 in float32 is 0.1 + 1.5e-9; at float64 accuracy that is another problem.
    a, b, cost = tensor(0.5, 0.5), tensor(0.3, 0.7), tensor([0.0, 1.0], [1.0, 0.0])
    number = sinkhorn(a, b, cost=cost, epsilon=0.1, **SHARP)
    exact = sinkhorn(a, b, cost=cost, epsilon=torch.tensor(0.1, dtype=torch.float64), **SHARP)
    assert torch.equal(number.f, exact.f)


@pytest.mark.parametrize("epsilon", [1e-3, 1e-6, 1e-12, 1e-20, 1e-30, 1e-100])
@pytest.mark.parametrize("taus", [(1.0, 1.0), (0.9, 0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tiny_epsilon_never_gives_nan_nor_silently_a_wrong_plan(epsilon, taus, dtype, generator):
    mu, nu = random_measure(5, generator=generator).to(dtype), random_measure(6, generator=generator).to(dtype)
    options = {"tau_a": taus[0], "tau_b": taus[1], "max_iterations": 50, "on_failure": "ignore"}
    pi = Coupling.solve(mu, nu, epsilon=epsilon, **options)
    solution = pi.solution
    assert not torch.isnan(pi.to_dense()).any()
    for t in (pi.value, solution.f, solution.g, solution.marginal_error):
        assert torch.isfinite(t).all()
    if taus == (1.0, 1.0):
        assert solution.converged or solution.marginal_error > solution.tolerance
        assert close(pi.rounded().to_dense().sum(-1), mu.weights, 1e-6)
        assert solution.duality_gap >= -1e-14


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_any_unit_of_the_cost(scale, generator):
    a, b = random_weights(4, generator=generator), random_weights(3, generator=generator)
    cost = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    assert close(solve(Problem(a, b, scale * cost, scale * 0.3)), solve(Problem(a, b, cost, 0.3)))


def test_tiny_weights(generator):
    a = tensor(1e-30, 1e-8, 1.0)
    mu = Measure.normalized(torch.rand(3, 2, generator=generator, dtype=torch.float64), a)
    nu = random_measure(4, generator=generator)
    pi = Coupling.solve(mu, nu, epsilon=0.05, tolerance=1e-12)
    conditional = pi.to_dense() / mu.weights[:, None]
    assert close(conditional.sum(1), torch.ones(3, dtype=torch.float64), 1e-9)


def test_zero_tolerance_runs_all_iterations(generator):
    mu, nu = random_measure(5, generator=generator), random_measure(6, generator=generator)
    solution = sinkhorn(mu, nu, epsilon=0.2, tolerance=0, max_iterations=8, on_failure="ignore")
    assert solution.iterations == 8
    assert not solution.converged
    # Judged by the default tolerance; a fixed point of the arithmetic ends it early.
    assert sinkhorn(mu, nu, epsilon=0.2, tolerance=0, max_iterations=40).converged


# Bad input --------------------------------------------------------------------------------------------------------------


def single(n: int = 2, dtype=torch.float64) -> Measure:
    return Measure.uniform(torch.zeros(n, 2, dtype=dtype))


BAD = {
    "dtypes": ({"mu": single(dtype=torch.float32)}, DTypeError, r"measures of one dtype, .*float32 .*float64 .*use \.to"),
    "devices": ({"mu": single().to("meta")}, DeviceError, r"measures on one device, received meta and cpu"),
    "batches": ({"mu": Measure.uniform(torch.zeros(3, 2, 2).double())}, ShapeError, r"one batch shape, .*\(3,\) and \(\)"),
    "list": ({"mu": [0.5, 0.5]}, DTypeError, r"expected a Measure, received list at position 0; wrap points"),
    "points as weights": (
        {"mu": torch.zeros(3, 2).double()},
        ShapeError,
        r"weights together with a cost matrix, received weights and the cost SqE",
    ),
    "integer weights": (
        {"mu": torch.tensor([1, 0]), "cost": torch.zeros(2, 2)},
        DTypeError,
        r"floating-point .*, received torch\.int64",
    ),
    "no weights": (
        {"mu": torch.zeros(0).double(), "cost": torch.zeros(0, 2)}, ShapeError, r"\(\*batch, n\), n >= 1, received \(0,\)",
    ),
    "one weight without an axis": (
        {"mu": torch.tensor(1.0).double(), "cost": torch.zeros(1, 2)}, ShapeError, r"\(\*batch, n\), n >= 1, received \(\)",
    ),
    "negative weights": (
        {"mu": tensor(1.5, -0.5), "cost": torch.zeros(2, 2)}, WeightError, r"non-negative weights, received -0\.5",
    ),
    "NaN weights": (
        {"mu": tensor(NAN, 1.0), "cost": torch.zeros(2, 2)}, NonFiniteError, r"finite weights, .* at index \[0\]",
    ),
    "too little weight": (
        {"mu": tensor([0.5, 0.5], [0.5, 0.4]), "nu": tensor([0.5, 0.5], [0.5, 0.5]), "cost": torch.zeros(2, 2, 2)},
        WeightError,
        r"a sum of 0\.9 at batch element \[1\]",
    ),
    "too much weight": (
        {"mu": tensor([0.5, 0.5], [0.5, 0.6]), "nu": tensor([0.5, 0.5], [0.5, 0.5]), "cost": torch.zeros(2, 2, 2)},
        WeightError,
        r"a sum of 1\.1 at batch element \[1\]",
    ),
    "dimensions": ({"mu": Measure.uniform(torch.zeros(2, 3).double())}, ShapeError, r"one dimension, received 3 and 2"),
    "cost": ({"cost": "sqeuclidean"}, DTypeError, r"expected a Cost or a cost matrix, received str; use NegativeDot"),
    "cost shape": ({"cost": torch.zeros(2, 3)}, ShapeError, r"a cost matrix of shape \(2, 2\) .*, received \(2, 3\)"),
    "integer cost": ({"cost": torch.zeros(2, 2).long()}, DTypeError, r"floating-point tensor, received torch\.int64"),
    "cost device": ({"cost": torch.zeros(2, 2, device="meta")}, DeviceError, r"the cost on cpu .*, received it on meta"),
    "epsilon zero": ({"epsilon": 0.0}, ConfigError, r"epsilon positive and finite, received 0\.0"),
    "epsilon negative": ({"epsilon": -1}, ConfigError, r"epsilon positive and finite, received -1"),
    "epsilon NaN": ({"epsilon": NAN}, ConfigError, r"epsilon positive and finite, received nan"),
    "epsilon infinite": ({"epsilon": INF}, ConfigError, r"epsilon positive and finite, received inf"),
    "epsilon subnormal": ({"epsilon": 1e-320}, ConfigError, r"epsilon .* received 1e-320; the least is 2\.23e-308"),
    "epsilon partly NaN": ({"epsilon": torch.tensor([1.0, NAN])}, ConfigError, r"epsilon positive and finite"),
    "epsilon partly infinite": ({"epsilon": torch.tensor([INF, 1.0])}, ConfigError, r"epsilon positive and finite"),
    "epsilon partly zero": ({"epsilon": torch.tensor([1.0, 0.0])}, ConfigError, r"epsilon positive and finite"),
    "epsilon shape": ({"epsilon": torch.ones(3)}, ShapeError, r"epsilon as a number or of shape \(\), received \(3,\)"),
    "epsilon string": ({"epsilon": "0.1"}, (ConfigError, DTypeError), r"epsilon"),
    "boolean mask": ({"mask": torch.zeros(2, 2).bool()}, DTypeError, r"additive .*mask .*torch\.bool; .*costs\.forbid"),
    "mask as list": ({"mask": [[0.0]]}, DTypeError, r"additive floating-point mask .* received list"),
    "mask shape": ({"mask": torch.zeros(3, 2)}, ShapeError, r"a mask that broadcasts to \(2, 2\), received \(3, 2\)"),
    "mask axes": ({"mask": torch.zeros(1, 2, 2)}, ShapeError, r"a mask that broadcasts to \(2, 2\), received \(1, 2, 2\)"),
    "tau_a": ({"tau_a": 1.5}, ConfigError, r"tau_a = rho / \(rho \+ epsilon\) between 0 and 1, received 1\.5"),
    "tau_b": ({"tau_b": -0.1}, ConfigError, r"tau_b = .* between 0 and 1, received -0\.1"),
    "tau NaN": ({"tau_b": NAN}, ConfigError, r"tau_b = .* received nan"),
    "tolerance": ({"tolerance": -1e-3}, ConfigError, r"a tolerance >= 0 \(L1 marginal error\), received -0\.001"),
    "iterations": ({"max_iterations": 0}, ConfigError, r"max_iterations >= 1, received 0"),
    "half iterations": ({"max_iterations": 1.5}, ConfigError, r"max_iterations >= 1, received 1\.5"),
    "annealing": ({"annealing": 1.0}, ConfigError, r"an annealing factor between 0 and 1, or None, received 1\.0"),
    "gradient": ({"gradient": "autodiff"}, ConfigError, r"gradient 'implicit' or 'unrolled', received 'autodiff'"),
    "on_failure": ({"on_failure": "shrug"}, ConfigError, r"on_failure 'warn', 'raise' or 'ignore', received 'shrug'"),
    "unknown option": ({"iterations": 5}, TypeError, r"unexpected keyword argument 'iterations'"),
    "boolean option": ({"max_iterations": True}, ConfigError, r"max_iterations as a number, received True"),
    "no tau": ({"tau_a": None}, ConfigError, r"tau_a as a number, received None"),
    "init shapes": (
        {"init": (torch.zeros(2), torch.zeros(3))}, ShapeError, r"init potentials of shapes \(2,\) and \(2,\), .*\(3,\)",
    ),
    "init NaN": (
        {"init": (torch.zeros(2), torch.tensor([0.0, NAN]))}, NonFiniteError, r"init potentials up to 1e\+29, .* init=None",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(changes, error, message):
    arguments = {"mu": single(), "nu": single(), "epsilon": 0.1, **changes}
    mu, nu = arguments.pop("mu"), arguments.pop("nu")
    with pytest.raises(error, match=message):
        sinkhorn(mu, nu, **arguments)
    with pytest.raises(error, match=message):
        Coupling.solve(mu, nu, **arguments)


def test_masks_with_a_live_minus_infinity_are_refused():
    with pytest.raises(NonFiniteError, match="is NaN, -inf or"):
        sinkhorn(single(), single(), mask=tensor([0.0, -INF], [0.0, 0.0]), epsilon=0.1)


def test_the_product_of_two_nulls():
    mu, nu = (single().with_null(mass) for mass in (0.2, 0.3))
    pi = Coupling.solve(mu, nu, epsilon=0.5)
    assert close(pi.to_dense().sum(-1), mu.weights, 1e-9)
