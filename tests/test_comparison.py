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
    assert theorem_blocks(N=1, K=1, kind="hardmax") == 5
    assert theorem_blocks(N=3, K=7, kind="hardmax") == 21
    assert theorem_blocks(N=3, K=7, kind="softmax") == 23
    assert block_parameters(2) == 28
    assert block_parameters(2, dense=True) == 1 + 4 * 5 + 1 + 2 * 4
    assert theorem_parameters(d=2, N=3, K=7, kind="hardmax") == 588
    assert [direct_blocks(separations=s, K=k) for s, k in ((0, 1), (1, 1), (1, 7), (4, 8))] == [2, 2, 5, 8]
    assert resnet_parameters(N=3, d=2, n=5) == 3 * (20 + 2)
    assert resnet_parameters(N=3, d=2, n=5, w=4) == 3 * (80 + 5)
    assert lower_bound(d=3, K=7) == 21


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("d", [1, 2, 5])
def test_the_modules_have_as_many_parameters(d, dense):
    model = TokenTransformer.random(d, 3, 4, "hardmax", dense=dense, generator=torch.Generator().manual_seed(0))
    assert sum(t.numel() for t in model.parameters()) == 3 * block_parameters(d, dense=dense)


@given(sizes, sizes, sizes)
def test_orders(d, N, m):
    """At most 50 d K + 40 K for the theorem, and never below the lower bound."""
    K = N * m
    hard, soft = (theorem_parameters(d=d, N=N, K=K, kind=kind) for kind in ("hardmax", "softmax"))
    assert lower_bound(d=d, K=K) <= hard <= 50 * d * K + 40 * K
    assert soft - hard == (10 * d + 8) * (N - 1)
    worst = direct_blocks(separations=math.ceil(N / 4), K=K)
    assert 4 * worst <= theorem_blocks(N=N, K=K, kind="hardmax") + 3


@given(sizes, sizes, st.integers(1, 10**6), st.integers(1, 5))
def test_break_even_is_the_first_length(N, d, parameters, w):
    n = break_even(parameters, N=N, d=d, w=w)
    assert resnet_parameters(N=N, d=d, n=n, w=w) > parameters
    assert n == 1 or resnet_parameters(N=N, d=d, n=n - 1, w=w) <= parameters


def test_break_even_of_the_direct_construction_is_two_and_a_half():
    """n / m tends to 5 / 2 for many targets in many dimensions."""
    row = compare(N=1000, n=10**5, m=10**4, d=10**4, separations=1).rows[2]
    assert math.isclose(row.ratio, 2.5, rel_tol=1e-2)


def test_compare():
    found = compare(N=10, n=100, m=1, d=16, separations=1)
    assert [(row.blocks, row.parameters, row.length) for row in found.rows] == [
        (41, 6888, 22),
        (50, 8400, 27),
        (6, 1008, 4),
        (10, 32020, None),
    ]
    assert found.rows[0].ratio == Fraction(22)
    parameters = theorem_parameters(d=16, N=10, K=40, kind="hardmax")
    assert compare(N=10, n=100, m=4, d=16).rows[0].ratio == Fraction(break_even(parameters, N=10, d=16), 4)
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
    sizes = {"n": 5, "m": 1, "d": 2}
    assert compare(N=10, **sizes) == compare(N=10, **sizes, separations=3)
    assert compare(N=1, **sizes).rows[2].blocks == compare(N=1, **sizes, separations=1).rows[2].blocks == 2


def test_numbers_of_any_size():
    assert theorem_parameters(d=10**30, N=1, K=10**30, kind="hardmax") == (10**31 + 8) * (2 * 10**30 + 3)


BAD = {
    "N": (lambda: theorem_blocks(N=0, K=1, kind="hardmax"), "expected N as a whole number >= 1, received 0"),
    "float": (lambda: theorem_blocks(N=1, K=2.0, kind="hardmax"), r"expected K as a whole number >= 1, received 2\.0"),
    "bool": (lambda: block_parameters(True), "expected d as a whole number >= 1, received True"),
    "K": (lambda: theorem_blocks(N=3, K=2, kind="hardmax"), "expected K >= N, .* received K=2 and N=3"),
    "kind": (lambda: theorem_blocks(N=3, K=3, kind="max"), "expected kind 'hardmax' or 'softmax', received 'max'"),
    "separations": (
        lambda: direct_blocks(separations=-1, K=3),
        "expected separations as a whole number >= 0, received -1",
    ),
    "width": (lambda: resnet_parameters(N=1, d=2, n=3, w=0), "expected w as a whole number >= 1"),
    "m": (lambda: compare(N=2, n=3, m=4, d=2), "expected m <= n, .* received m=4 and n=3"),
    "too many": (
        lambda: compare(N=3, n=3, m=1, d=2, separations=3),
        "expected separations <= 1 for N=3 sequences, received 3",
    ),
    "no number": (lambda: compare(N=3, n=3, m=1, d=2, separations="1"), "expected separations as a whole number >= 0"),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
