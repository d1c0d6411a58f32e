"""Hausdorff distance: closed forms, SciPy, the axioms of a metric, the laws of measures, derivatives."""

import importlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import random_measure, tensor
from scipy.spatial.distance import directed_hausdorff as reference
from strategies import measures

import sinkformer as sf
from sinkformer.errors import DeviceError, DTypeError, NonFiniteError, ShapeError
from sinkformer.metrics import directed_hausdorff, hausdorff

functions = pytest.mark.parametrize("function", [hausdorff, directed_hausdorff])


def points(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def live(mu: sf.Measure) -> np.ndarray:
    return mu.points[mu.weights > 0].numpy()


def close(a, b) -> bool:
    return bool(torch.allclose(a, b, rtol=1e-14, atol=1e-15))


# Values -----------------------------------------------------------------------------------------------------------------


def test_closed_forms():
    x, y = tensor([0.0], [1.0]), tensor([0.0], [3.0])
    assert directed_hausdorff(x, y) == 1
    assert directed_hausdorff(y, x) == 2
    assert hausdorff(x, y) == 2
    assert hausdorff(tensor([0.0, 0.0]), tensor([3.0, 4.0])) == 5


def test_a_subset_is_at_directed_distance_zero():
    x = points(6, 3)
    assert directed_hausdorff(x[:4], x) == 0
    assert close(directed_hausdorff(x, x[:4]), torch.cdist(x[4:], x[:4]).amin(-1).amax())
    assert hausdorff(x, x.flip(0)) == 0


@given(measures(6), measures(6))
def test_scipy(mu, nu):
    there, back = reference(live(mu), live(nu))[0], reference(live(nu), live(mu))[0]
    assert math.isclose(float(directed_hausdorff(mu, nu)), there, rel_tol=1e-14)
    assert math.isclose(float(hausdorff(mu, nu)), max(there, back), rel_tol=1e-14)


@pytest.mark.parametrize("d", [1, 2, 17])
def test_scipy_in_many_dimensions_and_batches(d):
    x, y = points(2, 3, 40, d), points(2, 3, 25, d, seed=1)
    expected = [
        [reference(*pair)[0] for pair in zip(*row, strict=True)] for row in zip(x.numpy(), y.numpy(), strict=True)
    ]
    torch.testing.assert_close(
        directed_hausdorff(x, y), torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0
    )


@functions
def test_blocks_do_not_show(function, monkeypatch):
    mu, nu = random_measure(2, 9, generator=torch.Generator().manual_seed(0)), points(2, 7, 2)
    whole = function(mu, nu)
    monkeypatch.setattr(importlib.import_module("sinkformer.metrics.sets"), "_BLOCK", 30)
    assert torch.equal(function(mu, nu), whole)


@functions
@pytest.mark.parametrize("exponent", [-1000, -500, 500, 1020])
def test_scaling_by_a_power_of_two_is_exact(function, exponent):
    x, y = points(5, 3), points(4, 3, seed=1)
    power = 2.0**exponent
    assert function(power * x, power * y) == power * function(x, y)


def test_far_from_the_origin():
    """One unit in the last place at 1e6 is seen."""
    x = tensor([1e6, 1.0], [0.0, 0.0])
    step = math.ulp(1e6)
    assert hausdorff(x, x + tensor([step, 0.0], [0.0, 0.0])) == step


def test_a_distance_beyond_the_range_is_infinite():
    x = torch.full((1, 2), 1.5e308, dtype=torch.float64)
    assert hausdorff(x, -x) == math.inf
    assert hausdorff(x, x) == 0


@functions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_follows_the_points(function, dtype):
    x, y = points(5, 3).to(dtype), points(4, 3, seed=1).to(dtype)
    found = function(x, y)
    assert found.dtype == dtype
    assert found == function(x.double(), y.double()).to(dtype)


@functions
def test_empty_batch(function):
    assert function(torch.empty(0, 3, 2), torch.empty(0, 4, 2)).shape == (0,)


# Laws -------------------------------------------------------------------------------------------------------------------


@given(measures(), measures(), measures())
def test_a_metric_on_sets(mu, nu, xi):
    assert hausdorff(mu, nu) == hausdorff(nu, mu)
    assert hausdorff(mu, mu) == 0
    assert (hausdorff(mu, nu) == 0) == ({*map(tuple, live(mu))} == {*map(tuple, live(nu))})
    for function in (hausdorff, directed_hausdorff):
        assert function(mu, xi) <= function(mu, nu) + function(nu, xi) + 1e-14


@functions
@given(mu=measures(smallest=1), nu=measures(smallest=1), data=st.data())
def test_order_padding_and_splitting_change_nothing(function, mu, nu, data):
    value = function(mu, nu)
    order = torch.tensor(data.draw(st.permutations(range(mu.n))))
    assert function(sf.Measure(mu.points[order], mu.weights[order]), nu) == value
    assert function(mu.split(data.draw(st.integers(0, mu.n - 1)), 0.25), nu) == value
    huge = torch.full((2, 2), 1e70, dtype=torch.float64)
    padded = [sf.Measure(torch.cat([m.points, huge]), torch.cat([m.weights, m.weights.new_zeros(2)])) for m in (mu, nu)]
    assert function(*padded) == value


@functions
def test_padding_hides_no_small_distance(function):
    tiny, far = 1e-100, [1e70, 0.0]
    x = sf.Measure(tensor([tiny, 0.0], far), tensor(1.0, 0.0))
    y = sf.Measure(tensor([3 * tiny, 0.0], far), tensor(1.0, 0.0))
    assert close(function(x, y) / tiny, tensor(2.0).squeeze())


@functions
def test_batch_equals_loop(function, generator):
    mus = [random_measure(n, generator=generator) for n in (3, 1, 6)]
    nus = [random_measure(n, generator=generator) for n in (2, 5, 4)]
    together = function(sf.Measure.stack(mus), sf.Measure.stack(nus))
    assert torch.equal(together, torch.stack([function(*pair) for pair in zip(mus, nus, strict=True)]))


@functions
def test_points_are_a_measure_of_equal_weights(function):
    x, y = points(3, 4, 2), points(3, 5, 2, seed=1)
    assert torch.equal(function(x, y), function(sf.Measure.uniform(x), y))


@given(measures(), measures(), st.integers(0, 7))
def test_rigid_motions(mu, nu, k):
    angle = k * math.pi / 4
    turn = tensor([math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)])
    moved = [m.pushforward(lambda x: x @ turn.T + 3.0) for m in (mu, nu)]
    torch.testing.assert_close(hausdorff(*moved), hausdorff(mu, nu), rtol=0, atol=1e-14)


# Derivatives ------------------------------------------------------------------------------------------------------------


@functions
def test_gradient_by_differences(function):
    x, y = (points(2, 4, 3, seed=seed).requires_grad_() for seed in (0, 1))
    assert torch.autograd.gradcheck(function, (x, y))
    assert torch.autograd.gradgradcheck(function, (x, y))


def test_the_gradient_is_that_of_one_pair():
    x, y = tensor([0.0, 0.0], [4.0, 3.0]).requires_grad_(), tensor([0.0, 0.0]).requires_grad_()
    hausdorff(x, y).backward()
    torch.testing.assert_close(x.grad, tensor([0.0, 0.0], [0.8, 0.6]))
    torch.testing.assert_close(y.grad, tensor([-0.8, -0.6]))


@functions
def test_the_gradient_at_zero_is_zero(function):
    x = points(3, 2).requires_grad_()
    function(x, x.detach()).backward()
    assert bool((x.grad == 0).all())


# Errors -----------------------------------------------------------------------------------------------------------------

X = torch.zeros(2, 3)
BAD = {
    "list": ([[0.0]], X, DTypeError, "expected points as a torch tensor, received list"),
    "integers": (X.long(), X, DTypeError, "expected floating-point points"),
    "dtypes": (X, X.double(), DTypeError, r"one dtype, received torch\.float32 and torch\.float64"),
    "devices": (X, X.to("meta"), DeviceError, "one device, received cpu and meta"),
    "dimensions": (X, torch.zeros(2, 2), ShapeError, "one dimension, received d=3 and d=2"),
    "batches": (X, torch.zeros(4, 2, 3), ShapeError, r"one batch shape, received \(\) and \(4,\)"),
    "no point": (X, torch.zeros(0, 3), ShapeError, r"at least one atom .* received .*\(0, 3\)"),
    "no coordinate": (torch.zeros(2, 0), torch.zeros(2, 0), ShapeError, "at least one atom and one coordinate"),
    "one axis": (torch.zeros(3), X, ShapeError, r"expected points of shape \(\*batch, n, d\)"),
    "NaN": (X, X + math.nan, NonFiniteError, "expected finite points"),
    "infinity": (X + math.inf, X, NonFiniteError, "expected finite points"),
}


@functions
@pytest.mark.parametrize(("x", "y", "error", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(function, x, y, error, message):
    with pytest.raises(error, match=message):
        function(x, y)
