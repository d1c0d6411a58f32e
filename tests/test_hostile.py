"""What hostile users found: one test for each kind of fault."""

import copy
import pickle

import pytest
import torch

import sinkformer as sf
from sinkformer import losses, ops, semidual
from sinkformer.costs import forbid
from sinkformer.errors import ShapeError, WeightError

DOUBLE = torch.float64


def hard_problem(seed, n=12, m=10):
    """Weights over six orders of magnitude, epsilon a few ten-thousandths of the range."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (10 ** (-6 * torch.rand(k, generator=generator, dtype=DOUBLE)) for k in (n, m))
    return a / a.sum(), b / b.sum(), torch.rand(n, m, generator=generator, dtype=DOUBLE)


@pytest.mark.parametrize("seed", range(6))
def test_newton_does_not_undo_the_sweeps(seed, monkeypatch):
    a, b, cost = hard_problem(seed)
    options = {"cost": cost, "epsilon": 3e-4, "on_failure": "ignore"}
    error = float(sf.sinkhorn(a, b, max_iterations=400, **options).marginal_error)
    monkeypatch.setattr(semidual, "MOST_ATOMS", 0)
    sweeps_alone = float(sf.sinkhorn(a, b, max_iterations=400, **options).marginal_error)
    assert error <= max(1.01 * sweeps_alone, 1e-9)


@pytest.mark.parametrize("epsilon", [1e-3, 1e-5, 1e-7])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_a_two_by_two_problem_is_solved_in_either_precision(epsilon, dtype):
    a, b, cost = (torch.tensor(x, dtype=dtype) for x in ([0.5, 0.5], [0.3, 0.7], [[0.0, 1.0], [1.0, 0.0]]))
    pi = sf.Coupling.solve(a, b, cost=cost, epsilon=epsilon, tolerance=1e-4)
    expected = torch.tensor([[0.3, 0.2], [0.0, 0.5]], dtype=dtype)
    torch.testing.assert_close(pi.to_dense(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("epsilon", [1e-3, 1e-20, 1e-100])
@pytest.mark.parametrize("limit", [1, 60, 100])
def test_max_iterations_is_a_limit(epsilon, limit):
    a, b, cost = hard_problem(1, 5, 6)
    solution = sf.sinkhorn(a, b, cost=cost, epsilon=epsilon, max_iterations=limit, on_failure="ignore")
    assert int(solution.iterations) <= limit


def test_a_measure_of_another_precision_can_be_coupled():
    mu = sf.Measure.uniform(torch.randn(5, 2)).to(DOUBLE)
    assert bool(sf.Coupling.solve(mu, mu, epsilon=1.0).solution.converged)
    assert mu.pushforward(lambda x: 2 * x).n == 5


def test_a_lost_problem_leaves_the_gradients_of_the_others():
    a = torch.full((2, 3), 1 / 3, dtype=DOUBLE, requires_grad=True)
    cost = torch.rand(2, 3, 3, dtype=DOUBLE)
    cost[1, 0, 0] = torch.nan
    cost.requires_grad_()
    plan = sf.Coupling.solve(a, a.detach(), cost=cost, epsilon=0.5, on_failure="ignore").to_dense()
    assert bool(plan[1].isnan().all())
    for gradient in torch.autograd.grad(plan[0].square().sum(), (a, cost)):
        assert bool(torch.isfinite(gradient).all())
        assert bool((gradient[1] == 0).all())


def test_features_of_padding_may_be_anything():
    mu = sf.Measure(torch.zeros(3, 2, dtype=DOUBLE), torch.tensor([0.5, 0.5, 0.0], dtype=DOUBLE))
    features = torch.rand(3, 4, dtype=DOUBLE)
    features[2] = torch.nan
    pi = sf.Coupling.solve(mu, mu, cost=sf.NegativeDot(), features=(features, features), epsilon=0.3)
    assert bool(torch.isfinite(pi.to_dense()).all())
    assert float(pi.marginal_error()) < 1e-8


def test_infeasible_problems_are_found_early():
    pairs = torch.zeros(100, 100, dtype=torch.bool)
    pairs[:2, 1:] = True  # two rows share one column
    a = torch.full((100,), 0.01, dtype=DOUBLE)
    solution = sf.sinkhorn(
        a, a, cost=torch.rand(100, 100, dtype=DOUBLE), mask=forbid(pairs), epsilon=0.1, on_failure="ignore"
    )
    assert solution.status is sf.Status.INFEASIBLE
    assert int(solution.iterations) < 100


def test_a_certificate_of_many_atoms_takes_no_square(generator, monkeypatch):
    mu = sf.Measure.uniform(torch.rand(20_000, 2, generator=generator))
    nu = sf.Measure.uniform(torch.tensor([[0.0, 0.0], [9.0, 9.0]]))
    pi, shapes, blocks = sf.Coupling.solve(mu, nu, epsilon=0.1), [], ops.row_blocks
    monkeypatch.setattr(ops, "row_blocks", lambda shape: shapes.append(tuple(shape)) or blocks(shape))
    certificate = pi.certificate()
    assert (2, 2) in shapes  # the few atoms are paired, the many are not
    assert (20_000, 20_000) not in shapes
    few = sf.Coupling.solve(sf.Measure.uniform(mu.points[:2000]), nu, epsilon=0.1).certificate()
    assert float(few.diameter) <= float(certificate.diameter) <= 2 * 2**0.5


def test_the_certificate_covers_the_rounding_of_a_cancelled_gap():
    a = torch.full((4,), 0.25, dtype=DOUBLE)
    cost = torch.rand(4, 4, dtype=DOUBLE) + 1e10 * (torch.randn(4, 1, dtype=DOUBLE) + torch.randn(4, dtype=DOUBLE))
    pi = sf.Coupling.solve(a, a, cost=cost, epsilon=0.5, on_failure="ignore")
    assert float(pi.certificate().tv_bound) > 1e-4


def test_couplings_survive_pickle_and_copy():
    mu = sf.Measure.uniform(torch.rand(4, 2))
    pi = sf.Coupling.solve(mu, mu, epsilon=1.0)
    for one in (pi, pi.detach(), pi.rounded(), pi.mT):
        for again in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
            torch.testing.assert_close(again.to_dense(), one.to_dense())


def test_large_weights_are_normalised():
    for dtype, size in ((torch.float16, 3e4), (torch.float32, 3e38), (DOUBLE, 1e308)):
        mu = sf.Measure.normalized(torch.zeros(4, 1, dtype=dtype), torch.full((4,), size, dtype=dtype))
        torch.testing.assert_close(mu.weights, torch.full((4,), 0.25, dtype=dtype))


def test_packed_weights_must_fit():
    with pytest.raises(ShapeError, match=r"one weight for each of the 4 atoms, received weights of shape \(6,\)"):
        sf.Measure.from_packed(torch.zeros(4, 1), torch.tensor([0, 2, 4]), torch.full((6,), 0.5))


def test_entropic_w1_wants_one_mass():
    mu = sf.Measure.uniform(torch.rand(3, 2, dtype=DOUBLE))
    pi = sf.Coupling.solve(mu, mu, epsilon=1.0)
    with pytest.raises(WeightError, match="two plans of one positive mass"):
        losses.entropic_w1(pi, torch.ones(3, 3, dtype=DOUBLE), eta=0.1)


def test_a_large_epsilon_has_a_value():
    mu, nu = sf.Measure.uniform(torch.rand(3, 2)), sf.Measure.uniform(torch.rand(4, 2))
    solution = sf.sinkhorn(mu, nu, epsilon=1e6)
    assert float(solution.value) == pytest.approx(float(sf.SqEuclidean()(mu.points, nu.points).mean()), rel=1e-4)


def test_one_side_alone_takes_one_update():
    mu, nu = sf.Measure.uniform(torch.rand(3, 2)), sf.Measure.uniform(torch.rand(4, 2))
    assert int(sf.sinkhorn(mu, nu, epsilon=0.01, tau_b=0.0).iterations) == 1


def test_warnings_point_at_the_caller():
    a, b, cost = hard_problem(0)
    for call in (sf.sinkhorn, sf.Coupling.solve):
        with pytest.warns(sf.errors.ConvergenceWarning) as caught:
            call(a, b, cost=cost, epsilon=1e-3, max_iterations=2)
        assert caught[0].filename == __file__
