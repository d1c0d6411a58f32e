"""Counts of parameters: the formulas by hand, the modules themselves, and where the lines cross."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sinkformer.errors import ConfigError
from sinkformer.interpolation.comparison import (
    block_parameters,
    break_even,
    compare,
    direct_blocks,
    lower_bound,
    resnet_parameters,
    theorem_blocks,
    theorem_parameters,
)
from sinkformer.interpolation.layers import TokenTransformer

sizes = st.integers(1, 60)


def test_by_hand():
    assert theorem_blocks(1, 1, "hardmax") == 5
    assert theorem_blocks(3, 7, "hardmax") == 21
    assert theorem_blocks(3, 7, "softmax") == 23
    assert block_parameters(2) == 28
    assert block_parameters(2, dense=True) == 1 + 4 * 5 + 1 + 2 * 4
    assert theorem_parameters(2, 3, 7, "hardmax") == 588
    assert [direct_blocks(s, k) for s, k in ((0, 1), (1, 1), (1, 7), (4, 8))] == [2, 2, 5, 8]
    assert resnet_parameters(3, 2, 5) == 3 * (20 + 2)
    assert resnet_parameters(3, 2, 5, 4) == 3 * (80 + 5)
    assert lower_bound(3, 7) == 21


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("d", [1, 2, 5])
def test_the_modules_have_as_many_parameters(d, dense):
    model = TokenTransformer.random(d, 3, 4, "hardmax", dense=dense, generator=torch.Generator().manual_seed(0))
    assert sum(t.numel() for t in model.parameters()) == 3 * block_parameters(d, dense=dense)


@given(sizes, sizes, sizes)
def test_orders(d, N, m):
    """At most 50 d K + 40 K for the theorem, and never below the lower bound."""
    K = N * m
    hard, soft = (theorem_parameters(d, N, K, kind) for kind in ("hardmax", "softmax"))
    assert lower_bound(d, K) <= hard <= 50 * d * K + 40 * K
    assert soft - hard == (10 * d + 8) * (N - 1)
    assert direct_blocks(max(1, N - 1), K) <= theorem_blocks(N, K, "hardmax")


@given(sizes, sizes, st.integers(1, 10**6), st.integers(1, 5))
def test_break_even_is_the_first_length(N, d, parameters, w):
    n = break_even(parameters, N, d, w)
    assert resnet_parameters(N, d, n, w) > parameters
    assert n == 1 or resnet_parameters(N, d, n - 1, w) <= parameters


def test_break_even_of_the_direct_construction_is_two_and_a_half():
    """n / m tends to 5 / 2 for many targets in many dimensions."""
    row = compare(1000, 10**5, 10**4, 10**4, separations=1).rows[2]
    assert math.isclose(row.ratio, 2.5, rel_tol=1e-2)


def test_compare():
    found = compare(10, 100, 1, 16, separations=1)
    assert [(row.blocks, row.parameters, row.length) for row in found.rows] == [
        (41, 6888, 22),
        (50, 8400, 27),
        (6, 1008, 4),
        (10, 32020, None),
    ]
    assert found.rows[0].ratio == Fraction(22)
    assert compare(10, 100, 4, 16).rows[0].ratio == Fraction(
        break_even(theorem_parameters(16, 10, 40, "hardmax"), 10, 16), 4
    )
    assert found.bound == 160
    assert str(found).splitlines() == [
        "N = 10 sequences of n = 100 tokens, m = 1 targets each, in R^16",
        "                  blocks  parameters  ResNet needs more from  n / m",
        "theorem, hardmax      41        6888                  n = 22  22.00",
        "theorem, softmax      50        8400                  n = 27  27.00",
        "direct, S = 1          6        1008                   n = 4   4.00",
        "ResNet, w = 1         10       32020",
        "lower bound d K                  160",
    ]


def test_separations_are_the_worst_case_by_default():
    assert compare(10, 5, 1, 2) == compare(10, 5, 1, 2, separations=3)
    assert compare(1, 5, 1, 2).rows[2].blocks == compare(1, 5, 1, 2, separations=1).rows[2].blocks == 2


def test_numbers_of_any_size():
    assert theorem_parameters(10**30, 1, 10**30, "hardmax") == (10**31 + 8) * (2 * 10**30 + 3)


BAD = {
    "N": (lambda: theorem_blocks(0, 1, "hardmax"), "expected N as a whole number >= 1, received 0"),
    "float": (lambda: theorem_blocks(1, 2.0, "hardmax"), r"expected K as a whole number >= 1, received 2\.0"),
    "bool": (lambda: block_parameters(True), "expected d as a whole number >= 1, received True"),
    "K": (lambda: theorem_blocks(3, 2, "hardmax"), "expected K >= N, .* received K=2 and N=3"),
    "kind": (lambda: theorem_blocks(3, 3, "max"), "expected kind 'hardmax' or 'softmax', received 'max'"),
    "separations": (lambda: direct_blocks(-1, 3), "expected separations as a whole number >= 0, received -1"),
    "width": (lambda: resnet_parameters(1, 2, 3, 0), "expected w as a whole number >= 1"),
    "m": (lambda: compare(2, 3, 4, 2), "expected m <= n, .* received m=4 and n=3"),
    "too many": (lambda: compare(3, 3, 1, 2, separations=3), "expected separations <= 1 for N=3 sequences, received 3"),
    "no number": (lambda: compare(3, 3, 1, 2, separations="1"), "expected separations as a whole number >= 0"),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
