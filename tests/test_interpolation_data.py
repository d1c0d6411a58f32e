"""``SequencePairs``: what it accepts it takes exactly, what it refuses it names."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sinkformer.errors import DatasetError, DTypeError, NonFiniteError, ShapeError, SinkformerError
from sinkformer.interpolation.datasets import SequencePairs, Tokens
from sinkformer.interpolation.rationals import fraction

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TARGET = [[[0.0, 0.0]]]


def only(sequence: Any) -> Tokens:
    """One sequence, read."""
    return SequencePairs([sequence], [np.zeros((1, 2)).tolist()]).X[0]


def rows(tokens: Tokens) -> list[tuple[Fraction, ...]]:
    return [tokens.row(i) for i in range(len(tokens))]


# -- refused


A, B, C = [1.0, 2.0], [3.0, 4.0], [5.0, 6.0]

REFUSED: dict[str, tuple[Any, Any, type[SinkformerError], str]] = {
    "no pairs": ([], [], ShapeError, "at least one pair"),
    "more sources": ([[A], [B]], [[A]], ShapeError, "2 sources and 1 targets"),
    "more targets": ([[A]], [[A], [B]], ShapeError, "1 sources and 2 targets"),
    "empty source": ([[A], []], [[A], [A]], ShapeError, "X[1]"),
    "empty target": ([[A], [B]], [[A], []], ShapeError, "Y[1]"),
    "no coordinates": ([[A], [[]]], [[A], [A]], ShapeError, "X[1]"),
    "empty array": ([np.zeros((0, 2))], [[A]], ShapeError, "X[0]"),
    "ragged tokens": ([[A], [B, [1.0]]], [[A], [A]], ShapeError, "X[1][1]"),
    "ragged sources": ([[A], [[1.0, 2.0, 3.0]]], [[A], [A]], ShapeError, "X[1]"),
    "ragged targets": ([[A], [B]], [[A], [[1.0]]], ShapeError, "Y[1]"),
    "a vector": ([torch.tensor(A)], [[A]], ShapeError, "X[0]"),
    "a batch": ([torch.zeros(1, 1, 2)], [[A]], ShapeError, "X[0]"),
    "a number": ([[A], 3.0], [[A], [A]], ShapeError, "X[1]"),
    "a text": ([[A], "ab"], [[A], [A]], ShapeError, "X[1]"),
    "a token that is a text": ([["12"]], [[A]], ShapeError, "X[0][0]"),
    "a token that is a number": ([[A], [B, 7]], [[A], [A]], ShapeError, "X[1][1]"),
    "a token without dimension": ([[torch.tensor(1.0)]], [[A]], ShapeError, "X[0]"),
    "no sequences at all": (5, [[A]], ShapeError, "X"),
    "no targets at all": ([[A]], None, ShapeError, "Y"),
    "a single tensor without dimension": (torch.tensor(1.0), [[A]], ShapeError, "X"),
    "nan in a list": ([[A], [B, [1.0, math.nan]]], [[A], [A]], NonFiniteError, "nan in X[1][1]"),
    "nan in a mixed list": ([[A], [[1, math.nan]]], [[A], [A]], NonFiniteError, "nan in X[1][0]"),
    "inf in a target": ([[A], [B]], [[A], [[-math.inf, 1.0]]], NonFiniteError, "-inf in Y[1][0]"),
    "nan in a tensor": ([torch.tensor([A, [math.nan, 0.0]])], [[A]], NonFiniteError, "nan in X[0][1], coordinate 0"),
    "inf in half": ([torch.tensor([A, [0.0, math.inf]]).half()], [[A]], NonFiniteError, "inf in X[0][1], coordinate 1"),
    "inf decimal": ([[[Decimal("inf"), 1]]], [[A]], NonFiniteError, "X[0][0]"),
    "nan decimal": ([[[Decimal("nan"), 1]]], [[A]], NonFiniteError, "X[0][0]"),
    "signalling nan": ([[[Decimal("snan"), 1]]], [[A]], NonFiniteError, "X[0][0]"),
    "a word": ([[["one", 1]]], [[A]], DTypeError, "X[0][0]"),
    "a zero denominator": ([[["1/0", 1]]], [[A]], DTypeError, "X[0][0]"),
    "none": ([[[None, 1.0]]], [[A]], DTypeError, "X[0][0]"),
    "complex": ([[[1j, 1.0]]], [[A]], DTypeError, "X[0][0]"),
    "a complex tensor": ([torch.ones(1, 2, dtype=torch.complex64)], [[A]], DTypeError, "X[0]"),
    "a complex array": ([np.ones((1, 2), complex)], [[A]], DTypeError, "X[0]"),
    "a truth value": ([[[True, False]]], [[A]], DTypeError, "X[0]"),
    "a tensor of truth values": ([torch.tensor([[True, False]])], [[A]], DTypeError, "X[0]"),
    "an array of dates": ([np.array([["2020-01-01"] * 2], "datetime64[D]")], [[A]], DTypeError, "X[0]"),
    "a tensor for a number": ([[[torch.tensor([1.0, 2.0]), 1.0]]], [[A]], DTypeError, "X[0][0]"),
    "an array for a number": ([[[np.array([1.0, 2.0]), 1.0]]], [[A]], DTypeError, "X[0][0]"),
    "more than a double": ([np.ones((1, 2), np.longdouble)], [[A]], DTypeError, "X[0]"),
    "a repeated token": ([[A], [B, C, B]], [[A], [A]], DatasetError, "X[1], received the same token at 0 and 2"),
    "a repeated target": ([[A, B], [B, C]], [[A], [A, A]], DatasetError, "Y[1], received the same token at 0 and 1"),
    "a repeated zero": ([[[0.0, 1.0], [-0.0, 1.0]]], [[A]], DatasetError, "X[0], received the same token at 0 and 1"),
    "a repeated third": (
        [[["1/3", 1], ["2/6", "1.0"]]],
        [[A]],
        DatasetError,
        "X[0], received the same token at 0 and 1",
    ),
    "too many targets": ([[A], [B]], [[A], [A, B]], DatasetError, "2 tokens in Y[1] and 1 in X[1]"),
    "equal sources": ([[A, B], [C], [B, A]], [[A], [B], [C]], DatasetError, "X[0] and X[2]"),
    "equal pairs": ([[A, B], [B, A]], [[A], [A]], DatasetError, "X[0] and X[1]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    X, Y, error, message = REFUSED[name]
    with pytest.raises(error, match=re.escape(message)):
        SequencePairs(X, Y)


def test_two_equal_pairs_get_another_remedy_than_two_targets_of_one_source():
    with pytest.raises(DatasetError, match="drop one of the two pairs"):
        SequencePairs([[A, B], [B, A]], [[A, B], [B, A]])
    with pytest.raises(DatasetError, match="no function"):
        SequencePairs([[A, B], [B, A]], [[A], [B]])


@pytest.mark.parametrize("layout", ["sparse", "meta"])
def test_tensors_without_plain_storage_are_refused(layout):
    tensor = torch.eye(2).to_sparse() if layout == "sparse" else torch.ones(2, 2, device="meta")
    with pytest.raises(DTypeError, match=r"X\[0\]"):
        only(tensor)


def test_a_mask_is_not_ignored():
    masked = np.ma.masked_array([[1.0, 2.0], [3.0, 4.0]], [[False, False], [True, True]])
    with pytest.raises(SinkformerError, match="X"):
        only(masked)


# -- accepted


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64],
)
def test_tensors(dtype):
    given = torch.tensor([[0.3, 2.0], [3.0, 100.0]]).to(dtype)
    assert rows(only(given)) == [tuple(Fraction(v) for v in row) for row in given.tolist()]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int8, np.uint16, np.int64, np.uint64])
def test_arrays(dtype):
    given = np.array([[0.3, 2.0], [3.0, 100.0]]).astype(dtype)
    assert rows(only(given)) == [tuple(Fraction(v) for v in row) for row in given.tolist()]


def test_gradients_and_views_do_not_disturb():
    given = torch.arange(8.0).reshape(2, 4)[:, ::2].requires_grad_()
    assert rows(only(given)) == [(0, 2), (4, 6)]
    assert rows(only(np.arange(8)[::-1].reshape(2, 4)[:, 1:3])) == [(6, 5), (2, 1)]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_the_data_are_copied(make):
    array = make([[1.0, 2.0]])
    tokens = only(array)
    array[0, 0] = 7
    assert rows(tokens) == [(1, 2)]


THIRD = Fraction(1, 3)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([[1, 2]], [(1, 2)]),
        ([(1.5, 2), (0.1, 3)], [(Fraction(3, 2), 2), (Fraction(0.1), 3)]),
        ([[THIRD, 1.0]], [(THIRD, 1)]),
        ([["1/3", "0.1"]], [(THIRD, Fraction(1, 10))]),
        ([["-2e-3", " 7 "]], [(Fraction(-1, 500), 7)]),
        ([[Decimal("0.1"), Decimal("1E+2")]], [(Fraction(1, 10), 100)]),
        ([[10**400, -(10**400)]], [(10**400, -(10**400))]),
        ([[Fraction(1, 10**400), Fraction(-1, 10**400)]], [(Fraction(1, 10**400), Fraction(-1, 10**400))]),
        ([[2**53 + 1, -(2**63)]], [(2**53 + 1, -(2**63))]),
        ([[5e-324, 1.7976931348623157e308]], [(Fraction(1, 2**1074), Fraction(2**1024 - 2**971))]),
        ([torch.tensor([1.0, 2.0]), np.array([3, 4])], [(1, 2), (3, 4)]),
        ([[torch.tensor(1.5), np.float32(0.5)]], [(Fraction(3, 2), Fraction(1, 2))]),
        (np.array([[THIRD, 1]], dtype=object), [(THIRD, 1)]),
        (torch.tensor([[2**62 + 1, 1]]), [(2**62 + 1, 1)]),
        (np.array([[2**64 - 1, 1]], np.uint64), [(2**64 - 1, 1)]),
        (iter([[1, 2], [3, 4]]), [(1, 2), (3, 4)]),
        (((x, x + 1) for x in (1, 3)), [(1, 2), (3, 4)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numbers_are_taken_exactly(given, expected):
    tokens = only(given)
    assert rows(tokens) == expected
    for i, row in enumerate(expected):
        assert [fraction(tokens.coordinate(i, c)) for c in range(2)] == list(row)
    assert tokens.dim == 2
    assert len(tokens) == len(expected)


def test_whole_tensors_and_generators_of_sequences():
    batch = torch.arange(12.0).reshape(3, 2, 2)
    pairs = SequencePairs(batch, (y[:1] for y in batch))
    assert (pairs.N, pairs.n, pairs.m, pairs.d, pairs.K, pairs.M) == (3, 2, 1, 2, 3, 6)
    assert len(pairs) == 3
    assert "N=3" in repr(pairs)
    assert rows(pairs.X[2]) == [(8, 9), (10, 11)]


def test_what_the_theorem_does_not_forbid():
    """Tokens, targets and whole target sets may recur; sources may contain one another; one token is enough."""
    SequencePairs([[A], [A, B], [A, B, C], [C]], [[A], [A], [B, A], [A]])


@pytest.mark.parametrize(
    ("largest", "scale"),
    [(0, 1), (1, 2), (0.75, 1), (0.5, 1), (-8, 16), ("1/3", "1/2"), (1e-200, None), (5e-324, None), (10**400, None)],
)
def test_the_scale_is_the_smallest_power_of_two_above_all_targets(largest, scale):
    found = fraction(SequencePairs([[A, B]], [[[0, largest], [0, "0"]] if largest else [[0, 0]]]).scale)
    size = abs(Fraction(largest))
    assert found > size
    assert size == 0 or found / 2 <= size
    assert found.numerator & (found.numerator - 1) == 0
    assert found.denominator & (found.denominator - 1) == 0
    assert scale is None or found == Fraction(scale)


# -- functionals


@given(
    st.integers(1, 5).flatmap(
        lambda d: st.tuples(
            st.lists(st.lists(FLOATS, min_size=d, max_size=d), min_size=1, max_size=4, unique_by=tuple),
            st.lists(st.integers(-(10**12), 10**12), min_size=d, max_size=d),
        )
    )
)
def test_functionals_are_exact(case):
    x, weights = case
    tokens = SequencePairs([x], [x[:1]]).X[0]
    expected = [sum((w * Fraction(v) for w, v in zip(weights, row, strict=True)), Fraction(0)) for row in x]
    assert [fraction(value) for value in tokens.dot(weights)] == expected


@pytest.mark.parametrize("d", [1, 2, 5])
def test_functionals_are_exact_over_the_whole_range_of_exponents(d):
    draw = np.random.default_rng(d)
    x = np.ldexp(draw.uniform(0.5, 1, (60, d)) * draw.choice([-1, 1], (60, d)), draw.integers(-1080, 1025, (60, d)))
    x[0], x[1], x[2] = 5e-324, np.finfo(float).max, 0.0
    x[3, 0], x[3, -1] = np.finfo(float).max, -5e-324
    weights = draw.integers(-9, 10, d).tolist()
    tokens = SequencePairs([x], [[[0.0] * d]]).X[0]
    expected = [sum((w * Fraction(v) for w, v in zip(weights, row, strict=True)), Fraction(0)) for row in x.tolist()]
    assert [fraction(value) for value in tokens.dot(weights)] == expected


@given(st.lists(st.tuples(st.fractions(max_denominator=9), st.fractions(max_denominator=9)), min_size=1, unique=True))
def test_functionals_of_fractions_are_exact(x):
    tokens = SequencePairs([x], [[x[0]]]).X[0]
    assert [fraction(v) for v in tokens.dot([3, -7])] == [3 * a - 7 * b for a, b in x]
    assert fraction(tokens.largest) == max(abs(v) for row in x for v in row)
    assert fraction(tokens.largest_first) == max(row[0] for row in x)


# -- keys

NUMBERS = st.one_of(
    st.sampled_from([0.0, -0.0, 0, "0", "-0.0", Decimal("-0"), 1, 1.0, "1", Decimal("1.00"), Fraction(1)]),
    st.sampled_from([0.1, "0.1", Decimal("0.1"), Fraction(1, 10), Fraction(0.1), THIRD, "1/3", 1 / 3]),
    st.sampled_from(
        [
            2**53,
            2**53 + 1,
            float(2**53),
            10**400,
            Fraction(1, 10**400),
            Fraction(-1, 10**400),
            5e-324,
        ]
    ),
)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=6))
def test_keys_are_equal_where_tokens_are(tokens):
    keys = [SequencePairs([[token]], TARGET).X[0].keys[0] for token in tokens]
    values = [tuple(map(Fraction, token)) for token in tokens]
    for key, value in zip(keys, values, strict=True):
        for other, second in zip(keys, values, strict=True):
            assert (key == other) == (value == second)
            assert (hash(key) == hash(other)) >= (value == second)


def test_keys_do_not_depend_on_the_company():
    """Fractions beside a float do not change the key of the float."""
    alone = only([[0.5, 1.0]]).keys[0]
    assert alone == only([["1/3", 0], ["1/2", 1]]).keys[1] == only(torch.tensor([[0.5, 1.0]])).keys[0]


def test_equal_sources_are_found_across_kinds():
    third = [[THIRD, 1], [0.5, 2]]
    with pytest.raises(DatasetError, match=r"X\[0\] and X\[1\]"):
        SequencePairs([third, [["0.5", Decimal(2)], ["2/6", 1.0]]], [[A], [A]])
    SequencePairs([third, [[1 / 3, 1], [0.5, 2]]], [[A], [A]])


@pytest.mark.parametrize("text", ["1e5000000", "1E+99999999999", "-2.5e-10001", "1e1_0000_0"])
def test_exponents_that_would_fill_the_memory_are_refused(text):
    with pytest.raises(DTypeError, match="exponent up to 10000"):
        SequencePairs([[[text]]], [[[1]]])
    with pytest.raises(DTypeError, match="exponent up to 10000"):
        SequencePairs([[[Decimal("1e10001")]]], [[[1]]])
    assert SequencePairs([[["1e10000"]]], [[[1]]]).X[0].row(0) == (10**10000,)
