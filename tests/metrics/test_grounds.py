"""Axes and products of metrics against the definitions written out."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

import sinkformer as sf
from sinkformer.metrics.grounds import Ground, axis_of_matrix, axis_of_points, min_plus


def product(euclidean: bool, seed: int = 0) -> tuple[Ground, np.ndarray, np.ndarray]:
    """A ground from 4 x 5 to 6 x 3 places, all distances, and a psi with holes."""
    rng = np.random.default_rng(seed)
    dx, dy = (cdist(rng.normal(size=(n, 2)), rng.normal(size=(m, 2))) for n, m in ((4, 6), (5, 3)))
    x, y = dx[:, None, :, None], dy[None, :, None, :]
    psi = np.where(rng.random((6, 3)) < 0.7, rng.normal(size=(6, 3)), np.inf)
    psi[0, 0] = 0.0
    return Ground(dx, dy, euclidean), np.hypot(x, y) if euclidean else x + y, psi


def test_min_plus():
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(7, 5)), rng.normal(size=(5, 6))
    np.testing.assert_array_equal(min_plus(a, b), (a[:, :, None] + b).min(1))


@pytest.mark.parametrize("euclidean", [False, True])
def test_the_transform_is_the_least_of_all_pairs(euclidean):
    ground, d, psi = product(euclidean)
    np.testing.assert_allclose(ground.transform(psi)[1], (d + psi).min((2, 3)), atol=1e-15)


@pytest.mark.parametrize("euclidean", [False, True])
def test_costs_are_the_distances(euclidean):
    ground, d, _ = product(euclidean)
    i, j, k, l = (x.ravel() for x in np.indices(d.shape))  # noqa: E741
    np.testing.assert_array_equal(ground.costs((i, j), (k, l)), d.ravel())
    assert ground.diameter >= d.max()


@pytest.mark.parametrize("slack", [0.0, 0.3, 1.0, 10.0])
def test_near_pairs_are_those_of_small_slack(slack):
    ground, d, psi = product(False)
    starts = np.random.default_rng(2).random((4, 5)) < 0.6
    stops = np.isfinite(psi)
    slacks = (d + psi - ground.transform(psi)[1][:, :, None, None])[starts][:, stops]
    slack += 1e-12
    i, j, found = ground.near(psi, starts, stops, slack)
    expected = np.argwhere(slacks <= slack)
    assert sorted(zip(i.tolist(), j.tolist(), strict=True)) == sorted(map(tuple, expected.tolist()))
    np.testing.assert_allclose(found, slacks[i, j], atol=1e-12)


def test_near_pairs_of_the_euclidean_product_contain_the_nearest():
    ground, d, psi = product(True)
    starts, stops = np.ones((4, 5), bool), np.isfinite(psi)
    i, j, _ = ground.near(psi, starts, stops, 0.0)
    nearest = (d + psi)[starts][:, stops].argmin(1)
    assert set(enumerate(nearest.tolist())) <= set(zip(i.tolist(), j.tolist(), strict=True))


def test_atoms_of_two_clouds_are_merged_and_dead_ones_dropped():
    a, b = np.array([[0.0], [1.0], [0.0], [9.0]]), np.array([[1.0], [-0.0], [2.0]])
    live = [np.array([True, True, True, False]), np.array([True, True, True])]
    axis = axis_of_points(sf.Euclidean(), [a, b], live, "X")
    assert axis.first.tolist() == [0, 1, 0, -1]
    assert axis.second.tolist() == [1, 0, 2]
    np.testing.assert_array_equal(axis.distances, cdist([[0], [1], [2]], [[0], [1], [2]]))
    assert axis.line is not None
    assert axis.line.tolist() == [0, 1, 2]


def test_a_matrix_with_zeros_between_atoms_merges_them():
    d = np.array([[0.0, 0.0, 2.0], [0.0, 0.0, 2.0], [2.0, 2.0, 0.0]])
    axis = axis_of_matrix(d, torch.float64, False, [np.array([True, True]), np.array([True])], "Y")
    assert axis.first.tolist() == [0, 0]
    assert axis.second.tolist() == [1]
    assert axis.distances.tolist() == [[0, 2], [2, 0]]


def test_triangles_that_fail_by_rounding_are_mended():
    d = np.array([[0.0, 1.0, 2.0 + 1e-9], [1.0, 0.0, 1.0], [2.0 + 1e-9, 1.0, 0.0]])
    live = [np.ones(3, bool), np.zeros(0, bool)]
    axis = axis_of_matrix(d, torch.float64, True, live, "X")
    assert axis.distances[0, 2] == 2.0


def test_distances_from_inner_products_are_accepted():
    x = torch.rand(40, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    live = [np.ones(40, bool), np.zeros(0, bool)]
    clouds = [x.numpy(), np.zeros((0, 2))]
    axis = axis_of_points(torch.cdist, clouds, live, "X")
    exact = axis_of_points(sf.Euclidean(), clouds, live, "X")
    np.testing.assert_allclose(axis.distances, exact.distances, atol=1e-7)
    assert (np.diag(axis.distances) == 0).all()
