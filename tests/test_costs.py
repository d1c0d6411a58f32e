import pytest
import torch
from hypothesis import given
from oracles import tensor
from strategies import measures
from torch.autograd import gradcheck, gradgradcheck

from sinkformer.costs import Cost, Euclidean, Matrix, NegativeDot, SqEuclidean, as_cost, forbid
from sinkformer.errors import DTypeError, ShapeError

POINT_COSTS = {
    NegativeDot(): lambda x, y: -(x * y).sum(-1),
    SqEuclidean(): lambda x, y: (x - y).square().sum(-1),
    Euclidean(): lambda x, y: (x - y).square().sum(-1).sqrt(),
}
INF = float("inf")

each_cost = pytest.mark.parametrize("cost", POINT_COSTS, ids=repr)


@each_cost
@given(mu=measures(), nu=measures())
def test_every_pair_by_its_definition(cost, mu, nu):
    matrix = cost(mu.points, nu.points)
    assert matrix.shape == (mu.n, nu.n)
    assert torch.allclose(matrix, POINT_COSTS[cost](mu.points[:, None], nu.points[None]), atol=1e-13)


@each_cost
def test_batches_blocks_and_transposition(cost, generator):
    x = torch.rand(2, 3, 5, 2, generator=generator, dtype=torch.float64)
    y = torch.rand(2, 3, 4, 2, generator=generator, dtype=torch.float64)
    matrix = cost(x, y)
    assert matrix.shape == (2, 3, 5, 4)
    assert torch.allclose(matrix[1, 2], cost(x[1, 2], y[1, 2]), atol=1e-14)
    assert torch.allclose(cost.rows(x, y, 1, 3), matrix[..., 1:3, :], atol=1e-14)
    assert torch.allclose(cost.transposed()(y, x), matrix.mT, atol=1e-14)
    assert cost(x[:0], y[:0]).shape == (0, 3, 5, 4)


@each_cost
def test_a_cloud_against_itself_is_symmetric_up_to_the_order_of_sums(cost, generator):
    x = torch.rand(37, 5, generator=generator, dtype=torch.float64)
    matrix = cost(x, x)
    assert torch.allclose(matrix, matrix.mT, atol=1e-15)


@each_cost
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_but_never_summed_in(cost, dtype, generator):
    x = torch.rand(3, 64, generator=generator).to(dtype)
    y = torch.rand(4, 64, generator=generator).to(dtype)
    matrix = cost(x, y)
    assert matrix.dtype == torch.float32
    assert torch.allclose(matrix, cost(x.double(), y.double()).float(), rtol=1e-5, atol=1e-5)


@each_cost
def test_dimensions_must_agree(cost):
    with pytest.raises(ShapeError, match="points of one dimension, received 2 and 3; encode them into one space"):
        cost(torch.zeros(4, 2), torch.zeros(4, 3))


@each_cost
def test_gradients(cost, generator):
    x = torch.rand(2, 3, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    y = torch.rand(2, 4, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    assert gradcheck(cost, (x, y), fast_mode=True)
    assert gradgradcheck(cost, (x, y), fast_mode=True)


@pytest.mark.parametrize("cost", [SqEuclidean(), Euclidean()], ids=repr)
def test_coinciding_points_cost_nothing_and_have_a_finite_gradient(cost):
    x = tensor([0.3, 0.1], [2.0, 5.0]).requires_grad_()
    y = x.detach().clone().requires_grad_()
    matrix = cost(x, y)
    assert matrix.diagonal().abs().max() < 1e-14
    first = torch.autograd.grad(matrix.diagonal().sum(), (x, y), create_graph=True)
    assert all((gradient == 0).all() for gradient in first)
    second = torch.autograd.grad(sum(g.sum() for g in first), (x, y))
    assert all(torch.isfinite(gradient).all() for gradient in second)


@pytest.mark.parametrize("shift", [0.0, 1e3, 1e6])
def test_squared_distances_are_accurate_far_from_the_origin(shift, generator):
    x, y = (torch.rand(6, 3, generator=generator, dtype=torch.float64) + shift for _ in range(2))
    exact = (x[:, None] - y).square().sum(-1)
    assert torch.allclose(SqEuclidean()(x, y), exact, atol=1e-14, rtol=0)
    assert (SqEuclidean()(x, x) >= 0).all()


def test_far_padding_does_not_spoil_the_squared_distances_of_the_others(generator):
    x = torch.rand(6, 3, generator=generator)
    y = torch.rand(6, 3, generator=generator)
    y[-2:] = 1e8
    exact = (x[:, None].double() - y[:4].double()).square().sum(-1)
    assert torch.allclose(SqEuclidean()(x, y)[:, :4].double(), exact, atol=1e-5)


def test_only_the_euclidean_cost_is_a_metric():
    assert [cost.is_metric for cost in POINT_COSTS] == [False, False, True]


def test_costs_of_points_are_values():
    assert SqEuclidean() == SqEuclidean()
    assert SqEuclidean() != Euclidean()
    SqEuclidean().check_shape((1, 2, 3))


def test_a_given_matrix(generator):
    values = torch.rand(2, 3, 4, generator=generator)
    cost = Matrix(values)
    points = torch.zeros(2, 3, 1), torch.zeros(2, 4, 1)
    assert cost(*points) is values
    assert torch.equal(cost.rows(*points, 1, 3), values[:, 1:3])
    assert torch.equal(cost.transposed()(*points[::-1]), values.mT)
    assert repr(cost) == "Matrix((2, 3, 4))"
    cost.check_shape((2, 3, 4))
    with pytest.raises(ShapeError, match=r"a cost matrix of shape \(2, 3, 5\) .* received \(2, 3, 4\)"):
        cost.check_shape((2, 3, 5))


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), DTypeError, r"a floating-point tensor, received torch\.int64"),
        ([[0.0]], DTypeError, "the cost matrix as a floating-point tensor, received list"),
        (torch.zeros(3), ShapeError, r"a cost matrix of shape \(\*batch, n, m\), received \(3,\)"),
    ],
)
def test_a_given_matrix_is_checked(values, error, message):
    with pytest.raises(error, match=message):
        Matrix(values)


def test_a_tensor_is_read_as_a_matrix():
    values = torch.zeros(2, 3)
    read = as_cost(values)
    assert isinstance(read, Matrix)
    assert read.values is values
    assert as_cost(SqEuclidean()) == SqEuclidean()


@pytest.mark.parametrize("cost", ["sqeuclidean", SqEuclidean, None, 2.0])
def test_what_is_no_cost(cost):
    with pytest.raises(DTypeError, match=r"expected a Cost or a cost matrix, received .*; use NegativeDot\(\)"):
        as_cost(cost)


def test_forbidden_pairs():
    pairs = torch.tensor([[True, False]])
    assert forbid(pairs).tolist() == [[INF, 0.0]]
    assert forbid(pairs).dtype == torch.get_default_dtype()
    assert forbid(pairs, dtype=torch.float64).dtype == torch.float64
    with pytest.raises(DTypeError, match=r"a boolean tensor of forbidden pairs, received torch\.float32"):
        forbid(torch.zeros(1, 2))


def test_a_cost_of_ones_own():
    class Manhattan(Cost):
        def __call__(self, x, y):
            return (x.unsqueeze(-2) - y.unsqueeze(-3)).abs().sum(-1)

    x, y = tensor([0.0, 0.0], [1.0, 3.0]), tensor([1.0, 1.0])
    assert Manhattan().rows(x, y, 1, 2).tolist() == [[2.0]]
    assert as_cost(Manhattan())(x, y).tolist() == [[2.0], [2.0]]
