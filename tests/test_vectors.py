"""The generated vector loops do what their plain definitions say."""

import numpy as np
import pytest

numba = pytest.importorskip("numba", reason="the extra [fast] is not installed")

from sinkformer.ops.cpu import vectors  # noqa: E402

TYPES = [(np.float32, np.float32), (np.float32, np.float64), (np.float64, np.float64)]


def matrix(n, m, own, sums, seed=0):
    """Rows padded with zeros to whole vectors, and a vector of the same length."""
    generator, width = np.random.default_rng(seed), -m % vectors.LANES + m
    K, v = np.zeros((n, width), own), np.zeros(width, sums)
    K[:, :m], v[:m] = generator.normal(size=(n, m)), generator.normal(size=m)
    return K, v


@numba.njit
def compiled_products(K, i, v):
    return vectors.products(K, i, v), vectors.product(K, i, v)


@numba.njit
def compiled_sums(K, i, u0, u1, u2, u3, c, d):
    vectors.add_rows(K, i, u0, u1, u2, u3, c)
    vectors.add_row(K, i, u0, d)


@numba.njit
def compiled_extremes(x):
    return vectors.extremes(x)


@pytest.mark.parametrize(("own", "sums"), TYPES)
@pytest.mark.parametrize("m", [1, 7, 8, 9, 40, 100])
def test_products_and_sums_of_rows(own, sums, m):
    K, v = matrix(9, m, own, sums)
    tolerance = 1e-5 if sums == np.float32 else 1e-13
    for i in (0, 3, 5):
        four, one = compiled_products(K, i, v)
        np.testing.assert_allclose(four, vectors.products(K, i, v), rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(one, four[0], rtol=tolerance, atol=tolerance)
        scales = np.linspace(-1, 2, 4).astype(sums)
        c, d, expected_c, expected_d = v.copy(), v.copy(), v.copy(), v.copy()
        compiled_sums(K, i, *scales, c, d)
        vectors.add_rows(K, i, *scales, expected_c)
        vectors.add_row(K, i, scales[0], expected_d)
        np.testing.assert_allclose(c, expected_c, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(d, expected_d, rtol=tolerance, atol=tolerance)
        assert c.dtype == d.dtype == sums, "sums have the type of what they are added to"


def test_sums_of_narrow_rows_are_wide():
    K, v = np.full((4, 8), 1 + 2**-20, np.float32), np.full(8, 2.0**-40)
    v[0] = 1
    exact = (1 + 2**-20) * (1 + 7 * 2.0**-40)
    assert compiled_products(K, 0, v)[1] == pytest.approx(exact, rel=1e-15)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [8, 9, 15, 16, 17, 1000])
def test_extremes(dtype, n):
    x = np.random.default_rng(n).normal(size=n).astype(dtype)
    for k in (0, 7, n // 2, n - 1):  # wherever they stand, in the overlap of the last vector too
        for value in (9.0, -9.0):
            y = x.copy()
            y[k] = value
            assert compiled_extremes(y) == (y.min(), y.max(), 0) == vectors.extremes(y)
        for value in (np.nan, np.inf, -np.inf):
            y = x.copy()
            y[k] = value
            low, high, sound = compiled_extremes(y)
            assert np.isnan(sound)
            if not np.isnan(value):
                assert (low, high) == (y.min(), y.max())


def test_nan_and_infinity_are_not_lost_in_sums():
    K, v = matrix(4, 20, np.float32, np.float32)
    K[1, 13], K[2, 3] = np.nan, np.inf
    v[:20] = 1
    four, _ = compiled_products(K, 0, v)
    assert np.isnan(four[1])
    assert np.isinf(four[2])
    assert np.isfinite([four[0], four[3]]).all()


def test_other_kinds_of_arrays_are_refused_when_compiled():
    K, v = matrix(8, 8, np.float64, np.float64)
    with pytest.raises(numba.TypingError):
        compiled_products(K.T, 0, v)
    with pytest.raises(numba.TypingError):
        compiled_products(K, 0, v.astype(np.float32))
