import pytest
import torch
from hypothesis import given
from oracles import random_weights, tensor
from strategies import problems

from sinkformer import ops
from sinkformer.ops.dispatch import Choice
from sinkformer.solutions import Solution

INF = float("inf")


@given(problems())
def test_softmin_by_its_definition(problem):
    _, b, cost, epsilon = problem
    potential = cost.mean(0)
    terms = b * ((potential - cost) / epsilon).exp()
    found = ops.softmin(cost, potential, b.log(), torch.tensor(epsilon, dtype=torch.float64))
    assert torch.allclose(found, -epsilon * terms.sum(-1).log(), atol=1e-13)


def test_softmin_approaches_the_minimum():
    cost = tensor([3.0, 1.0, 2.0], [5.0, 7.0, 6.0])
    found = ops.softmin(
        cost, torch.zeros(3, dtype=torch.float64), torch.full((3,), 1 / 3).double().log(), tensor(1e-6)[0]
    )
    assert torch.allclose(found, tensor(1.0, 5.0), atol=1e-5)


def test_softmin_leaves_out_weightless_and_forbidden_columns():
    cost = tensor([0.0, INF, 2.0], [INF, INF, 1.0])
    found = ops.softmin(cost, tensor(0.0, 0.0, 0.0), tensor(0.5, 0.5, 0.0).log(), tensor(1.0)[0])
    assert torch.allclose(found, tensor(-torch.tensor(0.5).double().log().item(), INF))


@pytest.mark.parametrize("exponent", [800.0, 1e5])
def test_softmin_does_not_overflow(exponent):
    cost = tensor([-exponent, exponent])
    found = ops.softmin(cost, tensor(0.0, 0.0), tensor(0.5, 0.5).log(), tensor(1.0)[0])
    assert torch.allclose(found, tensor(-exponent - torch.tensor(0.5).double().log().item()))


def test_density_by_its_definition_and_at_its_borders():
    cost = tensor([0.0, 1.0, INF], [1.0, 0.0, 2.0], [0.0, 0.0, -1e9])
    f, g = tensor(0.1, 0.2, 0.3), tensor(0.0, -0.2, 0.5)
    a, b, epsilon = tensor(0.5, 0.5, 0.0), tensor(0.5, 0.5, 0.0), tensor(0.5)[0]
    found = ops.density(cost, f, g, a, b, epsilon)
    assert found[0, 2] == 0, "a forbidden pair"
    assert found[2, 2] == 0, "nothing bounds the exponent between two paddings"
    inside = ((f[:, None] + g - cost) / epsilon).exp()
    assert torch.allclose(found[:2, :2], inside[:2, :2])
    assert torch.allclose(found[2, :2], inside[2, :2]), "a probe has a density too"


def test_density_has_a_finite_gradient_at_forbidden_pairs():
    cost = tensor([0.0, INF]).requires_grad_()
    epsilon = tensor(0.5)[0].requires_grad_()
    f, g = tensor(0.0), tensor(0.0, 0.0)
    total = ops.density(cost, f, g, tensor(1.0), tensor(0.5, 0.5), epsilon).sum()
    gradients = torch.autograd.grad(total, (cost, epsilon))
    assert gradients[0].tolist() == [[-2.0, 0.0]]
    assert torch.isfinite(gradients[1])


def test_marginals():
    rows, columns = ops.marginals(tensor([1.0, 2.0], [3.0, 4.0]))
    assert rows.tolist() == [3.0, 7.0]
    assert columns.tolist() == [4.0, 6.0]


def rounded(plan, a, b):
    factors = ops.rounding(lambda v: plan @ v, lambda u: plan.mT @ u, a, b)
    r, c, left, right = factors
    return r[:, None] * plan * c + left[:, None] * right, factors


@pytest.mark.parametrize("noise", [0.0, 1e-9, 0.1, 3.0])
def test_rounding_makes_exact_marginals_and_moves_little(noise, generator):
    a, b = random_weights(4, generator=generator), random_weights(6, generator=generator)
    plan = torch.outer(a, b) * (1 + noise * torch.rand(4, 6, generator=generator, dtype=torch.float64))
    moved, factors = rounded(plan, a, b)
    assert (moved >= 0).all()
    assert torch.allclose(moved.sum(1), a, atol=1e-15)
    assert torch.allclose(moved.sum(0), b, atol=1e-15)
    violation = (plan.sum(1) - a).abs().sum() + (plan.sum(0) - b).abs().sum()
    assert (moved - plan).abs().sum() <= 2 * violation + 1e-14
    assert all(torch.isfinite(t).all() for t in factors)


def test_rounding_of_an_exact_coupling_divides_nothing_by_zero():
    a, b = tensor(0.5, 0.5), tensor(0.25, 0.75)
    moved, (r, c, left, right) = rounded(torch.outer(a, b), a, b)
    assert torch.equal(moved, torch.outer(a, b))
    assert (r.tolist(), c.tolist()) == ([1.0, 1.0], [1.0, 1.0])
    assert (left == 0).all()
    assert (right == 0).all()


def test_rounding_fills_an_empty_plan_and_keeps_weightless_atoms_empty():
    a, b = tensor(0.5, 0.5, 0.0), tensor(0.25, 0.75)
    moved, _ = rounded(torch.zeros(3, 2, dtype=torch.float64), a, b)
    assert torch.allclose(moved, torch.outer(a, b))


@pytest.mark.parametrize(
    "shape", [(1, 1), (5, 3), (2, 7, 3), (0, 4, 4), (3000, 9000), (2, 3, 2**13, 2**11), (1, 2**26)]
)
def test_row_blocks_cover_every_row_once_in_bounded_size(shape):
    blocks = list(ops.row_blocks(shape))
    assert [k for start, stop in blocks for k in (start, stop)][1:-1:2] == [start for start, _ in blocks[1:]]
    assert (blocks[0][0], blocks[-1][1]) == (0, shape[-2])
    width = max(1, torch.Size(shape[:-2]).numel()) * shape[-1]
    assert all(stop - start == 1 or (stop - start) * width <= 2**24 for start, stop in blocks)


def system(rows, columns, tau_a, tau_b, transposed):
    """The matrix of the linear system, in the order (l, u)."""
    n, m = rows.shape
    upper, lower = (tau_b * columns, tau_a * rows.mT) if transposed else (tau_a * rows, tau_b * columns.mT)
    return torch.cat([torch.cat([torch.eye(n).double(), upper], 1), torch.cat([lower, torch.eye(m).double()], 1)])


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("taus", [(1.0, 1.0), (0.8, 0.6), (1.0, 0.0), (0.0, 0.0)])
@pytest.mark.parametrize("dead", [(), (1,), (0, 3)])
def test_adjoint_solve_against_a_dense_solve(transposed, taus, dead, generator):
    plan = torch.rand(3, 5, generator=generator, dtype=torch.float64) + 0.1
    b = torch.ones(5, dtype=torch.float64)
    b[list(dead)] = 0
    rows = plan * b / (plan * b).sum(1, keepdim=True)
    columns = plan / plan.sum(0)
    q = b * plan.sum(0)
    x, y = torch.randn(3, generator=generator).double(), torch.randn(5, generator=generator).double()
    matrix = system(rows, columns, *taus, transposed)
    if taus == (1.0, 1.0):  # singular but consistent: take a right-hand side from the range
        x, y = (matrix @ torch.cat([x, y])).split([3, 5])
    left, up, residual, ritz = ops.adjoint_solve(rows, columns, *taus, q, x, y, transposed=transposed, rtol=1e-13)
    assert residual <= 1e-12
    assert 0 < ritz <= 1 + 1e-12
    assert torch.allclose(matrix @ torch.cat([left, up]), torch.cat([x, y]), atol=1e-11)


def test_adjoint_solve_of_a_batch_is_the_solve_of_each(generator):
    plans = torch.rand(4, 3, 5, generator=generator, dtype=torch.float64) ** 4
    rows, columns, q = plans / plans.sum(-1, keepdim=True), plans / plans.sum(-2, keepdim=True), plans.sum(-2)
    x, y = torch.randn(4, 3, generator=generator).double(), torch.randn(4, 5, generator=generator).double()
    options = {"transposed": True, "rtol": 1e-13}
    together = ops.adjoint_solve(rows, columns, 0.9, 0.7, q, x, y, **options)
    for k in range(4):
        alone = ops.adjoint_solve(rows[k], columns[k], 0.9, 0.7, q[k], x[k], y[k], **options)
        assert torch.allclose(together[0][k], alone[0], atol=1e-12)
        assert torch.allclose(together[1][k], alone[1], atol=1e-12)
    assert together[2].shape == (4,)


def test_nothing_to_solve(generator):
    rows, q = torch.zeros(0, 3, 4, dtype=torch.float64), torch.zeros(0, 4, dtype=torch.float64)
    left, up, residual, ritz = ops.adjoint_solve(rows, rows, 1.0, 1.0, q, q[:, :3], q, transposed=True, rtol=1e-13)
    assert (left.shape, up.shape, residual.shape, ritz.shape) == ((0, 3), (0, 4), (0,), (0,))


def test_a_solution_has_a_readable_name():
    def solution(*batch):
        zeros = torch.zeros(batch, dtype=torch.float64)
        codes = torch.zeros(batch, dtype=torch.int8)
        f = torch.zeros((*batch, 2), dtype=torch.float64)
        engine = Choice("reference", "none was needed")
        return Solution(f, f, zeros, zeros, zeros, zeros.long() + 3, codes, 1e-9, (1.0, 1.0), zeros, engine)

    assert repr(solution()) == "Solution(CONVERGED, iterations=3, marginal_error=0.00e+00)"
    assert repr(solution(2)) == "Solution(batch=(2,), converged=2 of 2, worst marginal_error=0.00e+00)"
    assert repr(solution(0)) == "Solution(batch=(0,), empty)"
