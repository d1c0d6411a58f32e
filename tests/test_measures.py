import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import random_measure, tensor
from strategies import measures, numbers
from torch.utils.data import DataLoader

from sinkformer import Measure
from sinkformer.errors import DeviceError, DTypeError, NonFiniteError, ShapeError, WeightError
from sinkformer.measures import check_compatible

NAN, INF = float("nan"), float("inf")


def mean(mu: Measure) -> torch.Tensor:
    return (mu.weights.unsqueeze(-1) * mu.points).sum(-2)


def integral(mu: Measure) -> torch.Tensor:
    """An integral that sees the whole measure: of cos(<x, 1>) + |x|^2."""
    x = mu.points
    return (mu.weights * (x.sum(-1).cos() + x.square().sum(-1))).sum(-1)


def equal(mu: Measure, nu: Measure) -> bool:
    return torch.equal(mu.points, nu.points) and torch.equal(mu.weights, nu.weights)


# Construction -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (1,), (0,)])
def test_description(batch, dtype):
    mu = Measure.uniform(torch.zeros(*batch, 4, 2, dtype=dtype))
    assert (mu.n, mu.d, mu.batch_shape, mu.dtype) == (4, 2, torch.Size(batch), dtype)
    assert mu.device == torch.device("cpu")
    assert torch.equal(mu.weights, torch.full((*batch, 4), 0.25, dtype=dtype))
    assert repr(mu) == f"Measure({f'batch={batch}, ' if batch else ''}n=4, d=2, {dtype}, cpu)"
    assert not mu.requires_grad


def test_the_arguments_are_kept_as_they_are():
    points, weights = torch.rand(3, 2), torch.tensor([0.25, 0.25, 0.5])
    mu = Measure(points, weights)
    assert torch.equal(mu.points, points)
    assert mu.weights is weights
    with pytest.raises(AttributeError):
        mu.points = points  # type: ignore[misc]


@pytest.mark.parametrize("n", [1, 2, 7, 999, 100_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_any_number_of_atoms_pass_the_check_in_their_dtype(n, dtype):
    Measure.uniform(torch.zeros(n, 1, dtype=dtype))
    Measure.normalized(torch.zeros(n, 1, dtype=dtype), torch.rand(n, dtype=dtype) + 0.1)


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e38])
def test_coordinates_of_padding_that_could_overflow_are_cleared(junk):
    points = torch.tensor([[1.0, 2.0], [junk, 3.0]], requires_grad=True)
    mu = Measure(points, torch.tensor([1.0, 0.0]))
    assert torch.equal(mu.points, torch.tensor([[1.0, 2.0], [0.0, 3.0]]))
    integral(mu).backward()
    assert torch.isfinite(points.grad).all()
    assert (points.grad[1] == 0).all()


def test_a_probe_keeps_its_coordinates():
    mu = Measure(torch.tensor([[1.0], [-4e3]]), torch.tensor([1.0, 0.0]))
    assert mu.points[1].item() == -4e3


X, W = torch.zeros(2, 3), torch.tensor([0.5, 0.5])

BAD_ARGUMENTS = {
    "list": (([[0.0]], torch.ones(1)), DTypeError, r"expected points as a torch tensor, received list"),
    "numpy": ((np.zeros((2, 3)), W), DTypeError, r"received ndarray; use Measure\.from_numpy"),
    "numpy weights": ((X, np.ones(2) / 2), DTypeError, r"expected weights as a torch tensor, received ndarray"),
    "integer points": ((X.long(), W), DTypeError, r"expected floating-point points, received torch\.int64; convert"),
    "integer weights": ((X, torch.tensor([1, 0])), DTypeError, r"expected floating-point weights, received torch\.int64"),
    "complex": ((X.to(torch.complex64), W), DTypeError, r"floating-point points, received torch\.complex64"),
    "two dtypes": ((X, W.double()), DTypeError, r"one dtype, received torch\.float32 and torch\.float64"),
    "two devices": ((X, W.to("meta")), DeviceError, r"one device, received cpu and meta"),
    "one axis": ((torch.zeros(2), W), ShapeError, r"shape \(\*batch, n, d\), received \(2,\); .* x\.unsqueeze\(-1\)"),
    "no atom": ((torch.zeros(0, 3), torch.zeros(0)), ShapeError, r"at least one atom .* received .*\(0, 3\)"),
    "no coordinate": ((torch.zeros(2, 0), W), ShapeError, r"one coordinate, received points of shape \(2, 0\)"),
    "lengths": ((X, torch.ones(3) / 3), ShapeError, r"weights of shape \(2,\) for points .* received \(3,\)"),
    "batch": ((torch.zeros(4, 2, 3), W), ShapeError, r"weights of shape \(4, 2\) .* received \(2,\)"),
    "negative": ((X, torch.tensor([1.5, -0.5])), WeightError, r"non-negative weights, received -0\.5 at index \[1\]"),
    "sum": ((X, torch.tensor([1.0, 1.0])), WeightError, r"summing to 1, received a sum of 2 .*; use Measure\.normalized"),
    "sum in a batch": (
        (torch.zeros(2, 2, 3), torch.tensor([[0.5, 0.5], [0.5, 0.4]])), WeightError, r"a sum of 0\.9\d* at batch element \[1\]",
    ),
    "zero": ((X, torch.zeros(2)), WeightError, r"summing to 1, received a sum of 0 "),
    "NaN weight": ((X, torch.tensor([NAN, 1.0])), NonFiniteError, r"finite weights, .* at index \[0\]"),
    "infinite weight": ((X, torch.tensor([INF, 1.0])), NonFiniteError, r"finite weights, .* at index \[0\]"),
    "NaN point": ((X + tensor([0.0], [NAN]).float(), W), NonFiniteError, r"finite points, .* index \[1\], .*weight zero"),
    "infinite point": (
        (torch.full((1, 2, 3), -INF), W[None]), NonFiniteError, r"finite points, .* atom at index \[0, 0\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message) as caught:
        Measure(*arguments)
    assert isinstance(caught.value, (ValueError, TypeError))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_tolerance_of_the_sum_follows_the_dtype(dtype):
    off = 1 + 1e-7
    weights = torch.tensor([0.5, off - 0.5], dtype=dtype)
    if dtype == torch.float32:
        Measure(torch.zeros(2, 1, dtype=dtype), weights)
    else:
        with pytest.raises(WeightError, match=r"received a sum of 1\.0000001 "):
            Measure(torch.zeros(2, 1, dtype=dtype), weights)


def test_uniform_checks_its_points():
    with pytest.raises(DTypeError, match="expected floating-point points"):
        Measure.uniform(torch.zeros(3, 2, dtype=torch.int32))
    with pytest.raises(ShapeError, match="an empty cloud is no probability measure"):
        Measure.uniform(torch.zeros(0, 2))


def test_normalized_divides_and_differentiates():
    weights = tensor(1.0, 3.0).requires_grad_()
    mu = Measure.normalized(torch.zeros(2, 1, dtype=torch.float64), weights)
    assert torch.equal(mu.weights, tensor(0.25, 0.75))
    (gradient,) = torch.autograd.grad(mu.weights[0], weights)
    assert torch.allclose(gradient, tensor(3 / 16, -1 / 16))


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ([[0.5, 0.5], [0.0, 0.0]], WeightError, r"a positive sum, received a sum of zero at batch element \[1\]"),
        ([[0.5, 0.5], [2.0, -1.0]], WeightError, r"non-negative weights, received -1 at index \[1, 1\]"),
        ([[0.5, 0.5], [2.0, NAN]], NonFiniteError, r"finite weights, .* at index \[1, 1\]"),
    ],
)
def test_normalized_rejects(weights, error, message):
    with pytest.raises(error, match=message):
        Measure.normalized(torch.zeros(2, 2, 1), torch.tensor(weights))


# Ragged batches ---------------------------------------------------------------------------------------------------------


def ragged(generator) -> list[Measure]:
    return [random_measure(n, generator=generator) for n in (3, 1, 5)]


def test_stack_pads_with_weight_zero(generator):
    parts = ragged(generator)
    batch = Measure.stack(parts)
    assert batch.weights.shape == (3, 5)
    assert (batch.weights[1, 1:] == 0).all()
    assert (batch.points[1, 1:] == 0).all()
    assert len(batch) == 3
    assert all(equal(mu, nu) for mu, nu in zip(batch.unstack(), parts, strict=True))


def test_stack_of_batches(generator):
    parts = [random_measure(2, n, generator=generator) for n in (3, 4)]
    batch = Measure.stack(parts)
    assert batch.weights.shape == (2, 2, 4)
    assert all(nu.batch_shape == (2,) for nu in batch.unstack())
    assert equal(batch.unstack()[1], parts[1])
    assert equal(batch[0].unstack()[1], parts[0][1])


def test_stack_carries_gradients(generator):
    points = torch.rand(2, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    batch = Measure.stack([Measure.uniform(points), random_measure(4, generator=generator)])
    assert batch.requires_grad
    assert not batch.detach().requires_grad
    batch.points[0].sum().backward()
    assert torch.equal(points.grad, torch.ones(2, 2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("others", "error", "message"),
    [
        ((Measure.uniform(torch.zeros(3, 3)),), ShapeError, r"one dimension, received d=2 and d=3 \(position 1\)"),
        ((Measure.uniform(torch.zeros(3, 2).double()),), DTypeError, r"one dtype, .*float32 and torch\.float64"),
        ((Measure.uniform(torch.zeros(1, 3, 2)),), ShapeError, r"one batch shape, received \(\) and \(1,\)"),
        ((torch.zeros(3, 2),), DTypeError, r"expected a Measure, received Tensor at position 1; wrap"),
        ((Measure.uniform(torch.zeros(3, 2, device="meta")),), DeviceError, r"one device, received cpu and meta"),
    ],
)
def test_stack_rejects_what_does_not_fit(others, error, message):
    with pytest.raises(error, match=message):
        Measure.stack([Measure.uniform(torch.zeros(3, 2)), *others])


def test_stack_of_nothing():
    with pytest.raises(ShapeError, match="expected at least one measure, received none"):
        Measure.stack([])


def test_compatible_measures_may_differ_in_dimension():
    check_compatible(Measure.uniform(torch.zeros(3, 2)), Measure.uniform(torch.zeros(4, 5)))


def test_packed_and_back(generator):
    batch = Measure.stack(ragged(generator))
    points, offsets, weights = batch.to_packed()
    assert offsets.tolist() == [0, 3, 4, 9]
    assert offsets.dtype == torch.int64
    assert equal(Measure.from_packed(points, offsets, weights), batch)


def test_packed_is_uniform_without_weights():
    mu = Measure.from_packed(torch.arange(3.0).unsqueeze(-1), torch.tensor([0, 1, 3]))
    assert torch.equal(mu.weights, torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    assert mu.points[..., 0].tolist() == [[0.0, 0.0], [1.0, 2.0]]


def test_packed_empty_batch():
    points, offsets, weights = Measure(torch.zeros(0, 1, 2), torch.zeros(0, 1)).to_packed()
    assert (points.shape, offsets.tolist(), weights.shape) == ((0, 2), [0], (0,))
    assert Measure.from_packed(points, offsets, weights).batch_shape == (0,)


@pytest.mark.parametrize(
    ("points", "offsets", "message"),
    [
        (torch.zeros(3, 2), torch.tensor([0, 2]), r"from 0 to 3 .* received \[0, 2\]"),
        (torch.zeros(3, 2), torch.tensor([1, 3]), r"received \[1, 3\]"),
        (torch.zeros(3, 2), torch.tensor([0, 2, 2, 3]), r"strictly increasing .* \(no measure is empty\)"),
        (torch.zeros(3, 2), torch.tensor([0.0, 3.0]), r"integer offsets of shape \(B \+ 1,\), received"),
        (torch.zeros(1, 3, 2), torch.tensor([0, 3]), r"points of shape \(total, d\)"),
    ],
)
def test_packed_rejects(points, offsets, message):
    with pytest.raises(ShapeError, match=message):
        Measure.from_packed(points, offsets)


@pytest.mark.parametrize("batch", [(), (2, 2)])
def test_to_packed_needs_one_batch_axis(batch):
    with pytest.raises(ShapeError, match="expected one batch axis"):
        Measure.uniform(torch.zeros(*batch, 2, 1)).to_packed()


# NumPy, DataLoader, moves -----------------------------------------------------------------------------------------------


def test_numpy_and_back():
    points, weights = np.arange(6.0).reshape(3, 2), np.array([0.5, 0.25, 0.25])
    mu = Measure.from_numpy(points, weights)
    assert mu.dtype == torch.float64
    back = mu.numpy()
    assert np.array_equal(back[0], points)
    assert np.array_equal(back[1], weights)
    points[0, 0] = 7.0
    assert mu.points[0, 0] == 0.0, "the arrays are copied"


def test_numpy_options():
    mu = Measure.from_numpy(np.zeros((4, 2), dtype=np.int64), dtype=torch.float32, device="cpu")
    assert (mu.dtype, mu.weights[0].item()) == (torch.float32, 0.25)
    assert Measure.from_numpy(np.zeros((4, 2), dtype=np.float32)).dtype == torch.float32
    with pytest.raises(DTypeError, match=r"expected floating-point points, received torch\.int64"):
        Measure.from_numpy(np.zeros((4, 2), dtype=np.int64))


def test_numpy_detaches():
    points = torch.zeros(2, 1, requires_grad=True)
    assert Measure.uniform(points).numpy()[0].shape == (2, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_collate_in_a_data_loader(workers, generator):
    pairs = [(random_measure(n, generator=generator), random_measure(n + 1, generator=generator)) for n in (1, 4, 2)]
    with warnings.catch_warnings():
        # Python warns of a fork with threads around (those of OpenMP); that is the DataLoader's own affair.
        warnings.simplefilter("ignore", DeprecationWarning)
        batches = list(DataLoader(pairs, batch_size=2, collate_fn=Measure.collate, num_workers=workers))
    assert [(len(mu), mu.n, nu.n) for mu, nu in batches] == [(2, 4, 5), (1, 2, 3)]
    for k, (mu, nu) in enumerate(pairs):
        left, right = batches[k // 2]
        assert equal(left.unstack()[k % 2], mu)
        assert equal(right.unstack()[k % 2], nu)


@pytest.mark.parametrize("rows", [[], [Measure.uniform(torch.zeros(1, 1))], [(1, 2), (1,)]])
def test_collate_rejects(rows):
    with pytest.raises(DTypeError, match=r"a non-empty list of equally long tuples of measures"):
        Measure.collate(rows)


def test_pickle(generator):
    mu = random_measure(3, generator=generator)
    assert equal(pickle.loads(pickle.dumps(mu)), mu)


def test_moves(generator):
    mu = random_measure(3, generator=generator)
    assert mu.to(torch.float32).dtype == torch.float32
    assert mu.to("meta").device.type == "meta"
    assert torch.equal(mu.map(torch.clone).weights, mu.weights)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs a CUDA device")
def test_pin_memory(generator):
    mu = random_measure(3, generator=generator).pin_memory()
    assert mu.points.is_pinned()
    assert mu.weights.is_pinned()


# Indexing ---------------------------------------------------------------------------------------------------------------


def test_indexing_selects_batch_axes(generator):
    mu = random_measure(2, 3, 4, generator=generator)
    assert equal(mu[1], Measure(mu.points[1], mu.weights[1]))
    assert equal(mu[1, 2], mu[1][2])
    assert mu[:, 1:].batch_shape == (2, 2)
    assert mu[..., 0].batch_shape == (2,)
    assert [nu.batch_shape for nu in mu] == [(3,), (3,)]
    assert mu[torch.tensor([True, False])].batch_shape == (1, 3)


def test_a_single_measure_has_no_batch_axis(generator):
    mu = random_measure(4, generator=generator)
    with pytest.raises(DTypeError, match=r"no batch axis to index; index \.points and \.weights"):
        mu[0]
    with pytest.raises(DTypeError, match=r"a single measure has no length; use \.n"):
        len(mu)
    with pytest.raises(DTypeError, match="no length"):
        list(mu)
    with pytest.raises(IndexError, match="too many indices"):
        random_measure(4, 3, generator=generator)[0, 0]


# Operations -------------------------------------------------------------------------------------------------------------


def test_pushforward_moves_points_and_keeps_weights(generator):
    mu = random_measure(2, 3, generator=generator)
    image = mu.pushforward(lambda x: x @ torch.ones(2, 5, dtype=torch.float64))
    assert image.points.shape == (2, 3, 5)
    assert image.weights is mu.weights
    assert torch.allclose(mean(image), mean(mu).sum(-1, keepdim=True).expand(2, 5))
    assert equal(mu.pushforward(mu.points + 1), mu.pushforward(lambda x: x + 1))


def test_pushforward_checks_the_image(generator):
    mu = random_measure(3, generator=generator)
    with pytest.raises(ShapeError, match="expected weights of shape"):
        mu.pushforward(lambda x: x[:2])
    with pytest.raises(NonFiniteError, match="expected finite points"):
        mu.pushforward(lambda x: x / 0.0)


def test_pushforward_ignores_what_a_map_does_to_padding():
    mu = Measure(torch.tensor([[1.0], [0.0]]), torch.tensor([1.0, 0.0]))
    assert mu.pushforward(lambda x: 1 / x).points.tolist() == [[1.0], [0.0]]


def test_merged_by_hand():
    mu = Measure(tensor([1.0], [0.0], [1.0], [5.0]), tensor(0.25, 0.25, 0.5, 0.0))
    merged = mu.merged()
    assert merged.points.tolist() == [[0.0], [1.0]]
    assert merged.weights.tolist() == [0.25, 0.75]


def test_merged_batch_and_gradient():
    weights = tensor([0.5, 0.5, 0.0], [0.2, 0.3, 0.5]).requires_grad_()
    mu = Measure(tensor([[1.0], [1.0], [2.0]], [[3.0], [1.0], [3.0]]), weights)
    merged = mu.merged()
    assert torch.allclose(merged.weights, tensor([1.0, 0.0], [0.3, 0.7]))
    (gradient,) = torch.autograd.grad(merged.weights[1, 1], weights)
    assert gradient.tolist() == [[0.0, 0.0, 0.0], [1.0, 0.0, 1.0]]


def test_merged_empty_batch():
    mu = Measure(torch.zeros(0, 2, 1), torch.zeros(0, 2))
    assert mu.merged().batch_shape == (0,)


@given(measures(), st.data())
def test_split_and_merge_are_the_same_measure(mu, data):
    index = data.draw(st.integers(-mu.n, mu.n - 1))
    split = mu.split(index, data.draw(numbers(0, 1)))
    assert split.n == mu.n + 1
    assert torch.allclose(integral(split), integral(mu), atol=1e-14)
    one, other = split.merged(), mu.merged()
    assert torch.equal(one.points, other.points)
    assert torch.allclose(one.weights, other.weights, atol=1e-15)
    assert len(torch.unique(one.points, dim=0)) == one.n
    assert (one.weights > 0).all()


def test_split_in_a_batch_with_one_fraction_each():
    mu = Measure.uniform(torch.zeros(2, 2, 1))
    split = mu.split(1, torch.tensor([[0.5], [1.0]]))
    assert split.weights.tolist() == [[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]]


def test_split_rejects():
    mu = Measure.uniform(torch.zeros(2, 1))
    with pytest.raises(ShapeError, match="an atom index between -2 and 1, received 2"):
        mu.split(2, 0.5)
    with pytest.raises(WeightError, match=r"a fraction between 0 and 1, received 1\.5"):
        mu.split(0, 1.5)


@given(measures(), measures(d=1))
def test_product_has_the_marginals_as_projections(mu, nu):
    both = mu.product(nu)
    assert both.points.shape == (mu.n * nu.n, 3)
    assert torch.allclose(both.weights.reshape(mu.n, nu.n), torch.outer(mu.weights, nu.weights))
    left, right = both.pushforward(lambda z: z[..., :2]), both.pushforward(lambda z: z[..., 2:])
    assert torch.allclose(integral(left), integral(mu), atol=1e-13)
    assert torch.allclose(integral(right), integral(nu), atol=1e-13)
    assert both.points[-1].tolist() == [*mu.points[-1].tolist(), *nu.points[-1].tolist()]


def test_product_of_batches_and_mismatch(generator):
    both = random_measure(2, 3, generator=generator).product(random_measure(2, 4, generator=generator))
    assert both.points.shape == (2, 12, 4)
    with pytest.raises(ShapeError, match=r"one batch shape, received \(2,\) and \(\)"):
        both.product(random_measure(3, generator=generator))


@pytest.mark.parametrize("mass", [0.0, 0.25, 1.0])
def test_null_atom(mass, generator):
    mu = random_measure(2, 3, generator=generator)
    extended = mu.with_null(mass)
    assert extended.n == 4
    assert (extended.points[:, 3] == 0).all()
    assert torch.equal(extended.weights[:, 3], torch.full((2,), mass, dtype=torch.float64))
    assert torch.allclose(extended.weights[:, :3], (1 - mass) * mu.weights)
    Measure(extended.points, extended.weights)


def test_null_atom_of_one_mass_each_carries_gradients(generator):
    mass = tensor(0.1, 0.6).requires_grad_()
    extended = random_measure(2, 3, generator=generator).with_null(mass)
    assert extended.weights[:, 3].tolist() == [0.1, 0.6]
    (gradient,) = torch.autograd.grad(extended.weights[:, 3].sum(), mass)
    assert gradient.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("mass", [-0.1, 1.1, NAN])
def test_null_atom_rejects(mass):
    with pytest.raises(WeightError, match="expected a null mass between 0 and 1, received"):
        Measure.uniform(torch.zeros(2, 1)).with_null(mass)


def test_empty_batch_passes_through_every_operation():
    mu = Measure(torch.zeros(0, 3, 2), torch.zeros(0, 3))
    assert mu.unstack() == []
    for nu in (
        mu.split(0, 0.5),
        mu.with_null(0.1),
        mu.product(mu),
        mu.pushforward(lambda x: 2 * x),
        mu.to(torch.float64),
    ):
        assert nu.batch_shape == (0,)


# Tracing ----------------------------------------------------------------------------------------------------------------


def centred(mu: Measure) -> Measure:
    return Measure(mu.points - mean(mu).unsqueeze(-2), mu.weights).with_null(0.25)


def halved(mu: Measure) -> Measure:
    return mu.split(0, 0.5).pushforward(lambda x: 2 * x)


@pytest.mark.parametrize(
    "function",
    [centred, halved],
)
def test_compiles_without_a_graph_break(function, generator):
    mu = random_measure(2, 3, generator=generator)
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert equal(compiled(mu), function(mu))


def test_passes_through_vmap(generator):
    mu = random_measure(5, 3, generator=generator)
    mapped = torch.vmap(centred)(mu)
    assert isinstance(mapped, Measure)
    assert torch.allclose(mapped.points, centred(mu).points)
    assert torch.allclose(mapped.weights, centred(mu).weights)
    assert torch.allclose(torch.vmap(integral)(mu), integral(mu))


def test_is_a_pytree(generator):
    mu = random_measure(3, generator=generator)
    doubled = torch.utils._pytree.tree_map(lambda t: 2 * t, {"mu": mu})["mu"]
    assert torch.equal(doubled.points, 2 * mu.points)
