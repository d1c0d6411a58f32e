"""``construct`` on all data that the theorem admits: proved, of the promised size, and confirmed by the dense evaluator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from sinkformer.errors import ConfigError, DatasetError, ShapeError
from sinkformer.interpolation.construction import Interpolant, construct
from sinkformer.interpolation.datasets import SequencePairs
from tests.interpolation_oracle import interpolates, points

LINES = ("direct", "two-pass", "knots")
Sequences = list[Any]
HALF = Fraction(1, 2)


class Data(NamedTuple):
    X: Sequences
    Y: Sequences


# -- data


def random_generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(N: int, n: int, m: int, d: int, seed: int = 0, source: float = 1.0, target: float = 1.0) -> Data:
    draw = random_generator(seed).normal
    return Data([source * draw(size=(n, d)) for _ in range(N)], [target * draw(size=(m, d)) for _ in range(N)])


def ragged(N: int, n: int, d: int, seed: int) -> Data:
    """Lengths between one and n, and between one and the length."""
    draw = random_generator(seed)
    lengths = draw.integers(1, n + 1, N)
    return Data(
        [draw.normal(size=(k, d)) for k in lengths], [draw.normal(size=(draw.integers(1, k + 1), d)) for k in lengths]
    )


def grid(N: int, n: int, m: int, d: int, side: int, seed: int) -> Data:
    """Subsets of a small grid of integers: tokens and targets recur across sequences."""
    draw = random_generator(seed)
    everything = np.stack(np.meshgrid(*[np.arange(side)] * d), -1).reshape(-1, d)

    def subsets(size: int) -> Sequences:
        return [everything[draw.permutation(len(everything))[:size]].tolist() for _ in range(N)]

    while True:
        X = subsets(n)
        if len({frozenset(map(tuple, x)) for x in X}) == N:
            return Data(X, subsets(m))


def far_away(N: int, n: int, m: int, d: int, seed: int, source: float, target: float) -> Data:
    """Clouds of size one far from the origin, on either side."""
    X, Y = normal(N, n, m, d, seed)
    return Data([x + source for x in X], [y + target for y in Y])


def chain(N: int, d: int, seed: int) -> Data:
    """X_0 in X_1 in X_2 ..."""
    draw = random_generator(seed)
    tokens = draw.normal(size=(N, d))
    return Data([tokens[: j + 1] for j in range(N)], [draw.normal(size=(draw.integers(1, j + 2), d)) for j in range(N)])


def leave_one_out(N: int, m: int, d: int, seed: int) -> Data:
    draw = random_generator(seed)
    tokens = draw.integers(-4, 5, size=(N, d)) + np.arange(N)[:, None] * 9.0
    return Data([np.delete(tokens, j, 0) for j in range(N)], [draw.normal(size=(m, d)) for _ in range(N)])


def equal_means(N: int, m: int, d: int, seed: int) -> Data:
    """Pairs {-a, a}: all means are zero."""
    draw = random_generator(seed)
    targets = draw.permutation(N * m).reshape(N, m, 1) - 2.0 + np.zeros(d)
    return Data([np.array([[-1.0 - j] * d, [1.0 + j] * d]) for j in range(N)], list(targets))


def exchanged(N: int, m: int, d: int, seed: int) -> Data:
    """{0, 3} at many places; in sequence j it is {1, 2} at place j: no step separates more than one sequence from the rest."""
    draw = random_generator(seed)
    X = []
    for j in range(N):
        line = [100 * place + t for place in range(1, N) for t in ((1, 2) if place == j else (0, 3))]
        X.append([[t] * d for t in line])
    return Data(X, [draw.normal(size=(m, d)) for _ in range(N)])


def three_and_two(places: int, d: int, seed: int) -> Data:
    """{0, 3} against {1, 2}, again and again, at places far apart, in one dimension of d."""
    draw = random_generator(seed)
    X = []
    for place in range(places):
        for a, b in ((0, 3), (1, 2)):
            X.append([[100 * place + a] + [0] * (d - 1), [100 * place + b] + [0] * (d - 1)])
    return Data(X, [draw.normal(size=(1 + j % 2, d)) for j in range(len(X))])


def same_targets(N: int, n: int, m: int, d: int, seed: int) -> Data:
    X, Y = normal(N, n, m, d, seed)
    return Data(X, [Y[0]] * N)


def its_own_target(N: int, n: int, d: int, seed: int) -> Data:
    X, _ = normal(N, n, 1, d, seed)
    return Data(X, X)


def zero_targets(N: int, n: int, d: int, seed: int) -> Data:
    X, _ = normal(N, n, 1, d, seed)
    return Data(X, [np.zeros((1, d))] * N)


def mixed_scales(N: int, n: int, m: int, d: int, seed: int) -> Data:
    """Coordinates of size 1e-9 next to others of size 1e9."""
    draw = random_generator(seed)

    def sequences(size: int) -> Sequences:
        return [draw.normal(size=(size, d)) * 10.0 ** draw.choice([-9, 0, 9], size=(size, d)) for _ in range(N)]

    return Data(sequences(n), sequences(m))


def subnormal(N: int, n: int, m: int, d: int, seed: int) -> Data:
    draw = random_generator(seed)
    least = 5e-324
    X = [draw.permutation(4 * n)[:n, None] * least + draw.integers(0, 9, (n, d)) * 64 * n * least for _ in range(N)]
    return Data(X, [draw.permutation(3 * m)[:m, None] * least + np.zeros((m, d)) for _ in range(N)])


def whole_range(N: int, n: int, m: int, d: int, seed: int) -> Data:
    """Exponents from the smallest to the largest of float64, within one token."""
    draw = random_generator(seed)

    def sequences(size: int) -> Sequences:
        return [np.ldexp(draw.uniform(0.5, 1, (size, d)), draw.integers(-1073, 1024, (size, d))) for _ in range(N)]

    return Data(sequences(n), sequences(m))


def thirds(N: int, n: int, m: int, d: int, seed: int) -> Data:
    draw = random_generator(seed)

    def sequences(size: int, shift: int) -> Sequences:
        numerators = draw.integers(-20, 21, (N, size, d - 1)).tolist() if d > 1 else [[[]] * size] * N
        return [
            [[Fraction(3 * k + shift, 7), *(Fraction(v, 3) for v in row)] for k, row in enumerate(rows)]
            for shift, rows in enumerate(numerators, shift)
        ]

    return Data(sequences(n, 0), sequences(m, 5))


def zeros_of_both_signs(d: int) -> Data:
    rest = [0.0] * (d - 1)
    return Data(
        [[[-0.0, *rest], [1.0, *rest]], [[0.0, *rest]], [[-1.0, *rest], [0.0, *rest], [1.0, *rest]]],
        [[[0.0, *rest]], [[-0.0, *rest]], [[-0.0, *rest], [-1.0, *rest]]],
    )


def beyond_floats(d: int) -> Data:
    huge, tiny = 10**400, Fraction(1, 10**400)
    rest = [0] * (d - 1)
    return Data(
        [[[huge, *rest], [huge + 1, *rest]], [[huge, *rest], [tiny, *rest]], [[2**53 + 1, *rest]]],
        [[[tiny, *rest], [-huge, *rest]], [[0, *rest]], [["1/3", *rest]]],
    )


CASES: dict[str, Callable[[], Data]] = {}


def add(make: Callable[..., Data], *arguments: Any, **options: Any) -> None:
    named = [str(a) for a in arguments] + [f"{k}={v}" for k, v in options.items()]
    CASES["-".join([make.__name__, *named])] = lambda: make(*arguments, **options)


for seed in range(3):
    for N, n, m, d in [
        (1, 1, 1, 1),
        (1, 1, 1, 3),
        (1, 5, 1, 2),
        (1, 4, 4, 2),
        (1, 6, 3, 1),
        (2, 1, 1, 2),
        (2, 2, 2, 2),
    ]:
        add(normal, N, n, m, d, seed)
    for N, n, m, d in [
        (3, 4, 2, 1),
        (3, 4, 2, 2),
        (4, 3, 3, 5),
        (5, 7, 1, 3),
        (6, 1, 1, 1),
        (3, 5, 4, 16),
        (2, 9, 2, 64),
    ]:
        add(normal, N, n, m, d, seed)
    for N, n, d in [(3, 4, 1), (4, 5, 2), (6, 3, 3), (5, 8, 7)]:
        add(ragged, N, n, d, seed)
    for N, n, m, d, side in [
        (3, 2, 1, 1, 4),
        (5, 3, 2, 1, 5),
        (4, 3, 3, 2, 2),
        (8, 2, 1, 2, 3),
        (5, 4, 2, 3, 2),
        (6, 1, 1, 2, 3),
    ]:
        add(grid, N, n, m, d, side, seed)
    for N, d in [(2, 1), (4, 2), (6, 3)]:
        add(chain, N, d, seed)
    for N, m, d in [(3, 1, 1), (4, 2, 2), (6, 3, 3)]:
        add(leave_one_out, N, m, d, seed)
    for N, m, d in [(2, 1, 1), (4, 2, 2), (5, 1, 2)]:
        add(equal_means, N, m, d, seed)
        add(exchanged, N, m, d, seed)
    for place, d in [(1, 1), (2, 2), (3, 2)]:
        add(three_and_two, place, d, seed)
    for d in (1, 3):
        add(same_targets, 4, 3, 2, d, seed)
        add(its_own_target, 3, 3, d, seed)
        add(zero_targets, 4, 3, d, seed)
        add(mixed_scales, 3, 3, 2, d, seed)
        add(subnormal, 3, 3, 2, d, seed)
        add(whole_range, 3, 3, 2, d, seed)
        add(thirds, 3, 3, 2, d, seed)
        for source, target in [(1e6, -1e6), (-1e6, 1e6)]:
            add(far_away, 3, 3, 2, d, seed, source=source, target=target)
        for source, target in [(1e150, 1e150), (1e-150, 1e-150), (1e150, 1e-150), (1e-150, 1e150)]:
            add(normal, 3, 3, 2, d, seed, source=source, target=target)
for d in (1, 2, 3):
    add(zeros_of_both_signs, d)
    add(beyond_floats, d)
add(normal, 3, 4, 2, 768, 0)
add(normal, 10, 20, 2, 16, 0)
add(leave_one_out, 12, 2, 2, 0)


# -- what holds of every network


def separations(built: Interpolant) -> int:
    (found,) = [entry for entry in built.ledger if entry.phase == "separation"]
    return int(found.constants["S"])


def expect(built: Interpolant, length: int | None = None) -> None:
    pairs = built.pairs
    verdict = built.certificate.check()
    assert verdict.status == "proved", verdict
    assert built.width <= 4
    assert built.parameters == (10 * pairs.d + 8) * built.L
    by_maxima = any(block.p for block in built.blocks)
    assert separations(built) <= (max(1, pairs.N - 1) if by_maxima else -(-pairs.N // 4))
    assert built.ledger.holds, str(built.ledger)
    assert built.ledger.blocks == built.L
    assert length is None or built.L == length


NUMBERED = {name: index for index, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_the_direct_methods_interpolate_with_the_promised_number_of_blocks(name):
    pairs = SequencePairs(*CASES[name]())
    K, half = pairs.K, math.ceil(pairs.K / 2)
    for k, method in enumerate(LINES):
        attention = ("hardmax", "softmax")[(NUMBERED[name] + k) % 2]
        built = construct(pairs, attention=attention, method=method)
        S = max(1, separations(built))
        expect(built, {"direct": S + half, "two-pass": S + K + half}.get(method))
        assert built.tau_star is None
        if method == "knots":
            (packed,) = [entry for entry in built.ledger if entry.phase == "knots"]
            knots = int(packed.constants["knots"])
            assert S + math.ceil(knots / 4) <= built.L <= S + math.ceil(knots / 3)
            if pairs.m == 1 or all(len(x) == len(y) for x, y in zip(pairs.X, pairs.Y, strict=True)):
                assert built.L == S + math.ceil(K / 4)


@pytest.mark.parametrize("name", CASES)
def test_the_construction_of_the_paper_has_the_size_of_the_theorem(name):
    pairs = SequencePairs(*CASES[name]())
    K, N = pairs.K, pairs.N
    if pairs.d == 1:
        with pytest.raises(ConfigError, match="d >= 2"):
            construct(pairs, method="paper")
        return
    for statistic in ("mean", "max"):
        expect(construct(pairs, method="paper", statistic=statistic), 2 * K + 2 * N + 1)
    soft = construct(pairs, attention="softmax", method="paper")
    expect(soft, 2 * K + 3 * N)
    star = soft.tau_star
    if star is None:
        expect(construct(pairs, attention="softmax", method="paper", tau=1e6), 2 * K + 3 * N)
        return
    assert 0.999 * star < soft.tau <= star
    tau = (star / 1000, 3 * star, Fraction(100))[NUMBERED[name] % 3]
    built = construct(pairs, attention="softmax", method="paper", tau=tau)
    expect(built, 2 * K + 3 * N)
    assert built.tau == tau <= (built.tau_star or 0)


def test_there_are_two_hundred_data_sets():
    assert len(CASES) >= 200


# -- the dense evaluator agrees

SMALL: dict[str, Callable[[], Data]] = {
    "one token": lambda: normal(1, 1, 1, 2),
    "one sequence": lambda: normal(1, 4, 2, 2, 1),
    "all targets": lambda: normal(2, 3, 3, 2, 2),
    "one target each": lambda: normal(4, 3, 1, 2, 3),
    "ragged": lambda: ragged(4, 3, 2, 5),
    "three dimensions": lambda: normal(2, 4, 2, 3, 4),
    "grid": lambda: grid(4, 3, 2, 2, 2, 0),
    "chain": lambda: chain(3, 2, 0),
    "leave one out": lambda: leave_one_out(3, 2, 2, 0),
    "equal means": lambda: equal_means(4, 2, 2, 0),
    "exchanged": lambda: exchanged(4, 2, 2, 0),
    "same targets": lambda: same_targets(3, 2, 2, 2, 0),
    "its own target": lambda: its_own_target(3, 2, 2, 0),
    "zero": lambda: zero_targets(3, 2, 2, 0),
    "huge": lambda: normal(2, 3, 2, 2, 0, source=1e150, target=1e-150),
    "mixed": lambda: mixed_scales(2, 3, 2, 2, 0),
    "subnormal": lambda: subnormal(2, 3, 2, 2, 0),
    "thirds": lambda: thirds(3, 3, 2, 2, 0),
    "signs of zero": lambda: zeros_of_both_signs(2),
    "beyond floats": lambda: beyond_floats(2),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_dense_evaluator_finds_the_same_sets(name):
    X, Y = SMALL[name]()
    for method in LINES:
        assert interpolates(construct(X, Y, method=method).exact_blocks, X, Y)
        assert interpolates(construct(X, Y, attention="softmax", method=method, tau=7.5).exact_blocks, X, Y)
    for statistic in ("mean", "max"):
        assert interpolates(construct(X, Y, method="paper", statistic=statistic).exact_blocks, X, Y)
    built = construct(X, Y, attention="softmax", method="paper")
    assert interpolates(built.exact_blocks, X, Y)
    if built.tau_star is not None:
        for tau in (built.tau_star / 1000, 5 * built.tau_star):
            assert interpolates(construct(X, Y, attention="softmax", method="paper", tau=tau).exact_blocks, X, Y)


@pytest.mark.parametrize("name", SMALL)
def test_tau_star_is_not_vacuous(name):
    """A thousand times above it, the softmax no longer reaches the targets, and below it always does."""
    X, Y = SMALL[name]()
    built = construct(X, Y, attention="softmax", method="paper")
    if built.tau_star is None:
        assert all(len(x) == 1 for x in X)
        return
    for factor in (1, 7, 1000):
        warm = replace(built, tau=factor * built.tau_star)
        truth = interpolates(warm.exact_blocks, X, Y)
        assert truth if factor == 1 else not truth or factor < 1000
        assert bool(warm.certificate.check()) == truth


# -- laws


def test_data_in_general_position_need_one_separation():
    for N in (2, 5, 20):
        for method in ("paper", *LINES):
            assert separations(construct(*normal(N, 5, 2, 3, N), method=method)) == 1


@pytest.mark.parametrize("N", [2, 4, 5, 7, 8, 9, 13])
def test_the_worst_case_takes_a_separation_for_every_four_sequences(N):
    built = construct(*exchanged(N, 1, 2, 0), method="direct")
    (found,) = [entry for entry in built.ledger if entry.phase == "separation"]
    assert found.constants["kinks"] == N - 1  # the proof says that no fewer will do
    assert separations(built) == -(-N // 4)
    assert built.certificate.check()


def test_the_order_of_tokens_and_of_sequences_does_not_matter():
    X, Y = normal(4, 5, 2, 3, 8)
    draw = random_generator(1)
    order = draw.permutation(4)
    shuffled = Data([draw.permutation(X[j]) for j in order], [draw.permutation(Y[j]) for j in order])
    for method in ("paper", *LINES):
        built, other = construct(X, Y, method=method), construct(*shuffled, method=method)
        expect(other, built.L)
        assert interpolates(built.exact_blocks, *shuffled)


@pytest.mark.parametrize("k", [-900, -1, 40])
def test_sources_scaled_by_a_power_of_two_change_the_first_functional_only(k):
    X, Y = normal(3, 4, 2, 2, 6)
    for method in ("paper", *LINES):
        built, scaled = construct(X, Y, method=method), construct([np.ldexp(x, k) for x in X], Y, method=method)
        one, other = built.exact_blocks, scaled.exact_blocks
        assert replace(other[0], U=one[0].U) == one[0]
        assert [[Fraction(2) ** k * u for u in row] for row in other[0].U] == [list(row) for row in one[0].U]
        assert list(one)[1:] == list(other)[1:]


def test_the_seed_decides():
    X, Y = normal(3, 4, 2, 5, 6)
    for method in ("paper", *LINES):
        built = construct(X, Y, method=method, seed=3)
        assert list(built.exact_blocks) == list(construct(X, Y, method=method, seed=3).exact_blocks)
        other = construct(X, Y, method=method, seed=4)
        assert list(built.exact_blocks) != list(other.exact_blocks)
        expect(other, built.L)


def test_the_smallest_network_for_exact_work():
    pairs = SequencePairs(*normal(3, 4, 2, 2, 0))
    least = min(construct(pairs, method=method).L for method in ("direct", "knots"))
    built = construct(pairs, request="for_exact")
    expect(built, least)


def test_pairs_and_sequences_give_the_same_network():
    X, Y = normal(2, 3, 2, 2, 0)
    one = construct(X, Y, method="knots")
    other = construct(SequencePairs(X, Y), method="knots")
    assert list(one.exact_blocks) == list(other.exact_blocks)
    assert points(X[0]) == [one.pairs.X[0].row(i) for i in range(3)]


# -- options that cannot be


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "soft"}, "attention.*hardmax.*softmax.*'soft'"),
        ({"attention": None}, "attention.*None"),
        ({"method": "papers"}, "method.*'direct'.*'papers'"),
        ({"method": 3}, "method.*3"),
        ({"request": "float"}, "request.*'for_float'.*'float'"),
        ({"statistic": "median", "method": "paper"}, "statistic.*'mean'.*'median'"),
        ({"statistic": "max", "method": "direct"}, "maximum.*paper.*'direct'"),
        ({"statistic": "max", "method": "paper", "attention": "softmax"}, "maximum.*hardmax.*'softmax'"),
        ({"tau": 1.5}, "hardmax.*tau="),
        ({"tau": 0.0, "attention": "softmax"}, "positive.*0.0"),
        ({"tau": -1, "attention": "softmax"}, "positive.*-1"),
        ({"tau": math.nan, "attention": "softmax"}, "finite.*nan"),
        ({"tau": math.inf, "attention": "softmax"}, "finite.*inf"),
        ({"tau": "1/2", "attention": "softmax"}, "tau"),
        ({"tau": [1], "attention": "softmax"}, "tau"),
        ({"tau": 1j, "attention": "softmax"}, "tau"),
        ({"tau": True, "attention": "softmax"}, "tau"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": "a"}, "seed"),
        ({"seed": None}, "seed"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        construct(*normal(2, 3, 2, 2), **options)


def test_missing_and_surplus_targets_are_refused():
    X, Y = normal(2, 3, 2, 2)
    with pytest.raises(ConfigError, match="Y, received None"):
        construct(X)
    with pytest.raises(ConfigError, match="SequencePairs alone"):
        construct(SequencePairs(X, Y), Y)


def test_the_paper_needs_a_plane():
    with pytest.raises(ConfigError, match=r"d >= 2.*method='direct'"):
        construct(*normal(2, 3, 2, 1), method="paper")


def test_bad_data_are_refused_before_anything_is_built():
    with pytest.raises(ShapeError):
        construct([], [])
    with pytest.raises(DatasetError):
        construct([[[1, 2]], [[1, 2]]], [[[1, 2]], [[3, 4]]])


@pytest.mark.parametrize("tau", [1e-320, 5e-324, 1e308, Fraction(1, 10**400), 10**400, Fraction(1, 3), 1])
def test_any_positive_temperature_is_served(tau):
    X, Y = normal(2, 3, 2, 2)
    for method in ("auto", "paper", *LINES):
        built = construct(X, Y, attention="softmax", method=method, tau=tau)
        expect(built)
        assert built.tau == Fraction(tau)


@pytest.mark.parametrize("tau", [Decimal("0.5"), np.float32(0.5), np.float64(0.5), torch.tensor(0.5), Fraction(1, 2)])
def test_temperatures_of_all_kinds(tau):
    assert construct(*normal(1, 3, 2, 2), attention="softmax", method="direct", tau=tau).tau == HALF


# -- larger ones


@pytest.mark.slow
@pytest.mark.parametrize("method", ["paper", *LINES])
@pytest.mark.parametrize(
    "make",
    [
        lambda: normal(20, 200, 3, 768),
        lambda: normal(60, 30, 10, 8),
        lambda: chain(80, 3, 0),
        lambda: leave_one_out(40, 2, 2, 0),
        lambda: exchanged(20, 1, 2, 0),
        lambda: three_and_two(40, 2, 0),
        lambda: equal_means(200, 1, 2, 0),
        lambda: normal(1, 2000, 1, 2),
        lambda: normal(1, 300, 300, 2),
        lambda: normal(1000, 1, 1, 2),
    ],
    ids=[
        "wide",
        "many targets",
        "chain",
        "leave one out",
        "exchanged",
        "places",
        "equal means",
        "long",
        "all",
        "short",
    ],
)
def test_large_data(make, method):
    pairs = SequencePairs(*make())
    for attention in ("hardmax", "softmax"):
        expect(construct(pairs, attention=attention, method=method))
