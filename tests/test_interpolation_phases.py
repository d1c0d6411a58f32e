"""The phases of the construction, each against the sentence of the proof that it stands for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkformer.interpolation.blocks import Block, ExactBlocks, feed_forward
from sinkformer.interpolation.construction import construct
from sinkformer.interpolation.datasets import SequencePairs
from sinkformer.interpolation.phases.collapse import collapse
from sinkformer.interpolation.phases.groups import cut, knots, lattice, ramps_below
from sinkformer.interpolation.phases.leaders import select_leaders
from sinkformer.interpolation.phases.projection import Stop, ceiling, project
from sinkformer.interpolation.phases.separation import separate
from sinkformer.interpolation.phases.targets import interpolate, ramps_at
from sinkformer.interpolation.rationals import (
    enclosure,
    floor_log2,
    floor_power,
    floor_to,
    fraction,
    library,
    power_of_two,
    rational,
)
from sinkformer.interpolation.vectors import Row, Space, combination, integers
from tests.interpolation_oracle import Point, inner, scores, transform
from tests.interpolation_oracle import feed_forward as evaluate

HALF = Fraction(1, 2)
FRACTIONS = st.builds(Fraction, st.integers(-12, 12), st.integers(1, 5))


def pairs_of(X: Sequence[Any], Y: Sequence[Any] | None = None) -> SequencePairs:
    return SequencePairs(X, Y or [x[:1] for x in X])


def random_pairs(N: int = 3, n: int = 5, m: int = 3, d: int = 3, seed: int = 0) -> SequencePairs:
    draw = np.random.default_rng(seed).normal
    return SequencePairs([draw(size=(n, d)) for _ in range(N)], [draw(size=(m, d)) for _ in range(N)])


def dense(blocks: Sequence[Block], pairs: SequencePairs) -> list[Any]:
    return list(ExactBlocks(blocks, Space(pairs), "hardmax", rational(1)))


def line_point(t: Any, d: int) -> Point:
    return (Fraction(t), *[Fraction(0)] * (d - 1))


def rows(tokens: Any) -> list[Point]:
    return [tokens.row(i) for i in range(len(tokens))]


def plain(values: Sequence[Sequence[Any]]) -> list[list[Fraction]]:
    return [list(map(fraction, sequence)) for sequence in values]


# -- rationals and vectors


@given(st.builds(Fraction, st.integers(1, 10**9), st.integers(1, 10**9)), st.integers(-900, 900))
def test_powers_of_two_are_found_exactly(value, shift):
    value *= Fraction(2) ** shift
    k = floor_log2(rational(value))
    assert Fraction(2) ** k <= value < Fraction(2) ** (k + 1)
    assert fraction(floor_power(rational(value))) == Fraction(2) ** k == fraction(power_of_two(k))


@pytest.mark.parametrize("k", [-1100, -1, 0, 1, 64, 1100])
def test_a_power_of_two_is_its_own_floor(k):
    assert floor_log2(power_of_two(k)) == k
    assert floor_log2(power_of_two(k) * rational(2**70 - 1, 2**70)) == k - 1


@given(FRACTIONS, st.builds(Fraction, st.integers(1, 9), st.integers(1, 9)))
def test_floors_to_a_unit(value, unit):
    found = fraction(floor_to(rational(value), rational(unit)))
    assert found <= value < found + unit
    assert (found / unit).denominator == 1


@given(FRACTIONS, st.integers(-60, 3))
def test_enclosures_contain(value, exponent):
    ball = (library().arb(rational(value)) * rational(2) ** exponent).exp()
    low, high = map(fraction, enclosure(ball))
    with mpmath.workdps(60):
        truth = mpmath.exp(mpmath.mpf(value.numerator) / value.denominator * mpmath.mpf(2) ** exponent)
        assert mpmath.mpf(low.numerator) / low.denominator <= truth <= mpmath.mpf(high.numerator) / high.denominator
    assert high - low <= abs(high) * Fraction(1, 2**40)


def test_vectors_with_rows_of_the_data_are_their_coordinates():
    pairs = SequencePairs([[["1/3", 2, 0], [0, 0, 5]]], [[[7, "-1/7", 1]]])
    space, one = Space(pairs), rational(1)
    x = combination(
        [(rational(3), {Row("X", 0, 0): one}), (rational(-1), {Row("Y", 0, 0): one, 2: one}), (one, {0: one})]
    )
    expected = tuple(
        3 * a - b + c for a, b, c in zip((Fraction(1, 3), 2, 0), (7, Fraction(-1, 7), 2), (1, 0, 0), strict=True)
    )
    assert space.dense(x) == expected
    for functional in ({0: 2, 1: 3}, {0: 1, 1: -1, 2: 5}, {2: 1}, {}):
        exact = {i: rational(v, 7) for i, v in functional.items()}
        value = sum(Fraction(v, 7) * expected[i] for i, v in functional.items())
        assert fraction(space.value(exact, x)) == value
        assert fraction(space.value(dict(exact), space.coordinates(x))) == value
    assert combination([(one, x), (-one, x)]) == {}


def test_functionals_have_integer_weights():
    factor, weights = integers({0: rational(1, 6), 2: rational(-3, 4)}, 4)
    assert [fraction(factor) * w for w in weights] == [Fraction(1, 6), 0, Fraction(-3, 4), 0]
    assert all(isinstance(w, int) for w in weights)


# -- a layer is its pieces


@st.composite
def layers(draw) -> Block:
    def vector() -> dict[int, Any]:
        return {i: rational(v) for i, v in enumerate(draw(st.tuples(FRACTIONS, FRACTIONS))) if v}

    biases = draw(st.lists(st.integers(-4, 4), max_size=4))
    return feed_forward("layer", rational(draw(FRACTIONS)), vector(), [(rational(b), vector()) for b in biases])


@given(layers(), st.lists(st.tuples(FRACTIONS, FRACTIONS), min_size=1, max_size=5))
def test_pieces_are_the_layer(block, at):
    pairs = pairs_of([[[0, 0]]])
    space, (exact,) = Space(pairs), dense([block], pairs)
    functional = space.dense(block.functional)
    pieces = block.pieces()
    assert pieces[0][0] is None
    assert pieces[-1][1] is None
    for left, right in itertools.pairwise(pieces):
        assert left[1] == right[0]
        assert left[1] is not None
    kinks = [fraction(piece[0]) for piece in pieces[1:]]
    assert kinks == sorted({-fraction(b) for b in block.biases})
    size = inner(functional, functional)
    onto = [tuple(kink / size * u for u in functional) for kink in kinks] if size else []
    for x in (*at, *onto):
        s, value = inner(functional, x), evaluate(exact, x)
        for low, high, slope, offset in pieces:
            if (low is None or fraction(low) <= s) and (high is None or s <= fraction(high)):
                on_piece = zip(x, space.dense(slope), space.dense(offset), strict=True)
                assert tuple(fraction(block.eta) * a + b * s + c for a, b, c in on_piece) == value


# -- reduction


@pytest.mark.parametrize("d", [1, 2, 7])
@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_the_reduction_tells_all_tokens_apart_on_a_line_of_the_first_axis(d, scale):
    draw = np.random.default_rng(d)
    shared = scale * draw.normal(size=(6, d))
    X = [shared[:3], shared[2:], shared[1:5]]
    for method in ("paper", "direct", "two-pass", "knots") if d > 1 else ("direct", "two-pass", "knots"):
        built = construct(X, [x[:2] for x in X], method=method)
        first = built.exact_blocks[0]
        assert first.eta == 0
        values: dict[Point, Fraction] = {}
        for token in map(lambda row: tuple(map(Fraction, row)), shared.tolist()):
            pre = inner(first.U[0], token) + first.b[0]
            assert pre > 0  # the relu is the identity on the line
            values[token] = pre
            assert evaluate(first, token)[1:] == (0,) * (d - 1)
        assert len(set(values.values())) == 6
        assert len({evaluate(first, token) for token in values}) == 6
        spread = max(values.values()) - min(values.values())
        scale = fraction(built.pairs.scale)
        unit = {"paper": 1, "direct": scale, "two-pass": 4 * scale, "knots": scale}[method]
        assert unit / 2 <= spread <= unit * Fraction(17, 16)
        assert built.ledger.entries[0].phase == "reduction"


# -- separation


class StraightLine:
    """Tokens on a line, as the reduction leaves them."""

    def __init__(self, tokens: Sequence[Sequence[Any]]):
        self.tokens = [[rational(Fraction(t)) for t in sequence] for sequence in tokens]
        self.functional, self.offset, self.unit = {0: rational(1)}, rational(0), rational(1)


def unit_interval(sequences: Sequence[Sequence[int]]) -> list[list[Fraction]]:
    """Integers brought into [1/2, 1]."""
    top = max(map(max, sequences)) or 1
    low = min(map(min, sequences))
    return [[HALF + Fraction(t - low, 2 * max(1, top - low)) for t in sequence] for sequence in sequences]


SEPARATED = {
    "one": [[0, 1, 5]],
    "apart": [[0, 1], [3, 4], [7]],
    "overlapping": [[0, 5], [2, 4], [1]],
    "shared": [[0, 1], [1, 2], [0, 2], [0, 1, 2]],
    "equal means": [[0, 3], [1, 2]],
    "equal means, two places": [[0, 3], [1, 2], [10, 13], [11, 12]],
    "equal means and one kink each": [[0, 3, 10, 13], [1, 2, 10, 13], [0, 3, 11, 12]],
    "nested": [[3], [2, 4], [1, 3, 5], [0, 2, 4, 6]],
    "equal maxima": [[9], [1, 9], [1, 2, 9], [2, 9]],
    "touching": [[0, 2], [1, 2], [2]],
}


@pytest.mark.parametrize("statistic", ["mean", "max"])
@pytest.mark.parametrize("name", SEPARATED)
def test_every_sequence_gets_an_interval_of_its_own(name, statistic):
    start = unit_interval(SEPARATED[name])
    N = len(start)
    blocks, tokens, found = separate(StraightLine(start), statistic, pool=False)
    after = plain(tokens)
    hulls = sorted((min(t), max(t)) for t in after)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(hulls))
    assert [len(set(t)) for t in after] == list(map(len, start))
    assert min(low for low, _ in hulls) > 0
    assert len(blocks) == max(1, found.constants["S"])
    assert int(found.constants["S"]) <= (-(-N // 4) if statistic == "mean" else max(0, N - 1))
    assert found.holds
    pairs = pairs_of([[[t] for t in sequence] for sequence in start])
    for exact, sequence in ((dense(blocks, pairs), j) for j in range(N)):
        assert [x[0] for x in transform(exact, [(t,) for t in start[sequence]])] == after[sequence]
    for before, moved in zip(start, after, strict=True):
        order = sorted(range(len(before)), key=before.__getitem__)
        if statistic == "mean":
            assert order == sorted(range(len(moved)), key=moved.__getitem__)


@pytest.mark.parametrize(("name", "rounds"), [("one", 0), ("apart", 1), ("equal means", 1)])
def test_the_number_of_separations(name, rounds):
    assert separate(StraightLine(unit_interval(SEPARATED[name])), "mean", pool=False)[2].constants["S"] == rounds


@given(st.lists(st.frozensets(st.integers(0, 7), min_size=1, max_size=5), min_size=1, max_size=6, unique=True))
def test_separation_of_any_sets(sets):
    for statistic in ("mean", "max"):
        blocks, tokens, found = separate(StraightLine(unit_interval(list(map(sorted, sets)))), statistic, pool=False)
        hulls = sorted((min(t), max(t)) for t in plain(tokens))
        assert all(a[1] < b[0] for a, b in itertools.pairwise(hulls))
        assert len(blocks) <= (-(-len(sets) // 4) if statistic == "mean" else max(1, len(sets) - 1))
        assert found.holds


@pytest.mark.parametrize("name", SEPARATED)
def test_pooling_leaves_one_point_for_each_sequence(name):
    blocks, tokens, _ = separate(StraightLine(unit_interval(SEPARATED[name])), "mean", pool=True)
    ends = [set(t) for t in plain(tokens)]
    assert all(len(t) == 1 for t in ends)
    assert len(set.union(*ends)) == len(ends)
    assert (blocks[-1].rho, blocks[-1].beta) == (0, 1)


# -- leaders


def separated(pairs: SequencePairs) -> list[list[Any]]:
    """Tokens on [1/2, 3/2], sequence by sequence, at uneven distances."""
    t, found = Fraction(1, 2), []
    for j, x in enumerate(pairs.X):
        row = []
        for i in range(len(x)):
            row.append(rational(t))
            t += Fraction(1 + (3 * i + 5 * j) % 4, 4 * pairs.M)
        found.append(row[::-1] if j % 2 else row)
    return found


LEADING = [(1, 1, 1), (1, 4, 4), (3, 4, 1), (3, 4, 3), (4, 5, 5)]


@pytest.mark.parametrize(("N", "n", "m"), LEADING)
def test_every_hat_moves_its_leader_and_nothing_else(N, n, m):
    pairs = random_pairs(N, n, m, 3)
    tokens = separated(pairs)
    blocks, places, found = select_leaders(pairs, tokens)
    assert len(blocks) == pairs.K
    assert found.holds
    everything = {t: line_point(t, 3) for t in itertools.chain(*plain(tokens))}
    goals = {
        fraction(tokens[j][i]): (*map(fraction, place), Fraction(0))
        for j in range(N)
        for i, place in zip(places.leaders[j], places.positions[j], strict=True)
    }
    for block in dense(blocks, pairs):
        assert len(block.b) == 4
        c1, c2, c3, c4 = sorted(-bias for bias in block.b)
        (t,) = [t for t in goals if c2 < t < c3]
        before = dict(everything)
        everything = {key: evaluate(block, x) for key, x in before.items()}
        assert everything.pop(t) == goals[t]
        del before[t]
        assert everything == before  # exactly
        everything[t] = goals[t]
        for s in (c2, (c2 + c3) / 2, c3, c2 + (c3 - c2) / 7):
            assert evaluate(block, line_point(s, 3)) == goals[t]
        for s in (c1, c4, c1 - 1, c4 + 1, -c1):
            assert evaluate(block, line_point(s, 3)) == line_point(s, 3)
        assert min(t - c2, c3 - t) >= (c3 - c2) / 3  # a step away from both ends of the plateau
        for other, x in everything.items():
            if other > t and other in goals:  # moved before: on the inactive side
                assert all(inner(row, x) + bias <= 0 for row, bias in zip(block.U, block.b, strict=True))
    assert {key: everything[key] for key in goals} == goals


@pytest.mark.parametrize(("N", "n", "m"), LEADING)
def test_the_places_of_the_leaders(N, n, m):
    pairs = random_pairs(N, n, m, 2)
    tokens = separated(pairs)
    _, places, _ = select_leaders(pairs, tokens)
    bottom, top = min(map(min, plain(tokens))), max(map(max, plain(tokens)))
    base, unit = fraction(places.base), fraction(places.lattice)
    assert top < base <= 2 * top
    positions = [[tuple(map(fraction, p)) for p in row] for row in places.positions]
    firsts = sorted(x for row in positions for x, _ in row)
    assert all(b - a >= unit for a, b in itertools.pairwise(firsts))
    assert [len(set(chosen)) for chosen in places.leaders] == [m] * N
    lengths = set()
    for (x, y), *others in positions:
        assert y == 2 * x
        assert 2 * base <= x < 3 * base
        for a, b in others:
            assert a < 0
            assert b < 0
            lengths.add(a * a + b * b)
    if lengths:
        radius = max(lengths)
        assert radius <= (bottom / 2) ** 2
        assert min(lengths) > radius * (1 - unit**2)


# -- collapse


@pytest.mark.parametrize(("N", "n", "m"), LEADING)
def test_scores_lead_every_token_to_the_first_leader_and_keep_the_leaders(N, n, m):
    pairs = random_pairs(N, n, m, 2)
    tokens = separated(pairs)
    leading, places, _ = select_leaders(pairs, tokens)
    last, star_found, found = collapse(leading[-1], tokens, places)
    assert (last.rho, last.beta, last.alpha, last.p, last.q) == (0, 1, 1, {}, {})
    assert found.holds
    (exact,) = dense([last], pairs)
    margins, star = [], mpmath.inf
    for j in range(N):
        points = [line_point(fraction(t), 2) for t in tokens[j]]
        for i, place in zip(places.leaders[j], places.positions[j], strict=True):
            points[i] = tuple(map(fraction, place))
        least = None
        for i, x in enumerate(points):
            winner = i if i in places.leaders[j] else places.leaders[j][0]
            values = scores(exact, x, points)
            rest = [value for k, value in enumerate(values) if k != winner]
            assert all(value < values[winner] for value in rest)
            if rest:
                least = min(filter(None, (least, values[winner] - max(rest))))
        if least is not None:
            margins.append(least)
            extent = max(x for x, _ in points) - min(x for x, _ in points)
            ratio = (n - 1) * extent * 4 / fraction(places.lattice)
            with mpmath.workdps(50):
                star = min(
                    star,
                    mpmath.mpf(least.numerator)
                    / least.denominator
                    / mpmath.log(mpmath.mpf(ratio.numerator) / ratio.denominator),
                )
    assert found.larger is None or found.larger == min(margins)
    if star_found is None:
        assert n == 1
    else:
        given_star = fraction(star_found)
        with mpmath.workdps(50):
            quotient = mpmath.mpf(given_star.numerator) / given_star.denominator / star
            assert 1 - mpmath.mpf(2) ** -40 < quotient <= 1


def test_tau_star_grows_with_the_scores():
    pairs = random_pairs(2, 4, 2, 2)
    built = construct(pairs, attention="softmax", method="paper")
    assert built.tau_star is not None
    hotter = construct(pairs, attention="softmax", method="paper", tau=5 * built.tau_star)
    (alpha,) = {block.alpha for block in hotter.exact_blocks} - {0}
    assert alpha == 8  # the power of two above 5
    assert hotter.tau_star == 8 * built.tau_star
    (row,) = [entry for entry in hotter.ledger if entry.phase == "collapse"]
    assert (row.constants["alpha"], row.constants["tau*"]) == (8, hotter.tau_star)
    assert construct(pairs, attention="softmax", method="paper", tau=built.tau_star).tau_star == built.tau_star


# -- projection and targets


@pytest.mark.parametrize("highest", [-1000.0, -0.3, 0.0, 0.3, 7.0])
@pytest.mark.parametrize(("N", "n", "m"), LEADING)
def test_the_projection_puts_all_leaders_above_all_targets(N, n, m, highest):
    draw = np.random.default_rng(0).uniform
    pairs = SequencePairs(
        [draw(size=(n, 2)) for _ in range(N)],
        [highest - draw(size=(m, 2)) for _ in range(N)],
    )
    _, places, _ = select_leaders(pairs, separated(pairs))
    block, stops, gap, found = project(pairs, places)
    assert found.holds
    assert block.eta == 0
    (exact,) = dense([block], pairs)
    values = []
    by_target = {stop.target: fraction(stop.t) for stop in stops}
    for j, row in enumerate(places.positions):
        for k, place in enumerate(row):
            t, rest = evaluate(exact, tuple(map(fraction, place)))
            assert rest == 0
            assert by_target[Row("Y", j, k)] == t
            values.append(t)
    top = max(y[0] for target in pairs.Y for y in rows(target))
    assert top < min(values) - Fraction(3, 4) * fraction(gap)
    values.sort()
    assert all(b - a >= fraction(gap) for a, b in itertools.pairwise(values))
    assert fraction(gap).numerator & (fraction(gap).numerator - 1) == 0


def in_one_go(blocks: Sequence[Any], x: Point) -> Point:
    for block in blocks:
        x = evaluate(block, x)
    return x


@pytest.mark.parametrize("per_block", [1, 2])
@pytest.mark.parametrize("K", [1, 2, 3, 6])
def test_ramps_are_flat_above_their_head_and_absent_below_their_foot(K, per_block):
    pairs = SequencePairs([np.arange(3.0 * K).reshape(K, 3)], [np.random.default_rng(K).normal(size=(K, 3))])
    top, gap = fraction(ceiling(pairs)), Fraction(1, 4)
    stops = [Stop(rational(top + gap * (1 + k)), Row("Y", 0, k)) for k in range(K)]
    ramps = ramps_at(stops, rational(gap))
    blocks, found = interpolate(ramps, per_block, rational(top))
    assert len(blocks) == -(-K // per_block)
    assert found.holds
    exact = dense(blocks, pairs)
    assert all(len(block.b) <= 2 * per_block for block in exact)
    for stop in stops:
        for shift in (-1, Fraction(-1, 2), 0, Fraction(1, 3), 1):  # within a quarter of the gap
            x = line_point(fraction(stop.t) + shift * gap / 4, 3)
            assert in_one_go(exact, x) == pairs.Y[0].row(stop.target.token)
    for t in (top + gap / 4, top, -5):
        assert in_one_go(exact, line_point(t, 3)) == line_point(t, 3)
    for y in rows(pairs.Y[0]):
        assert in_one_go(exact, y) == y
    foot, head, goal = fraction(ramps[-1].foot), fraction(ramps[-1].head), pairs.Y[0].row(stops[0].target.token)
    half = in_one_go(exact, line_point((foot + head) / 2, 3))
    assert half == tuple((a + b) / 2 for a, b in zip(line_point(foot, 3), goal, strict=True))


# -- groups


@pytest.mark.parametrize(("N", "n", "m"), LEADING)
def test_groups_are_cut_at_the_widest_gaps_and_go_to_their_targets(N, n, m):
    pairs = random_pairs(N, n, m, 2)
    raised = ceiling(pairs) + rational(1)
    tokens = [[t + raised for t in sequence] for sequence in separated(pairs)]
    groups, found = cut(pairs, tokens, raised)
    assert len(groups) == pairs.K
    assert found.holds
    assert {group.target for group in groups} == {Row("Y", j, k) for j in range(N) for k in range(m)}
    ordered = [(fraction(g.below), fraction(g.bottom), fraction(g.top)) for g in reversed(groups)]
    assert ordered[0][0] == fraction(raised)
    for low, high in itertools.pairwise(ordered):
        assert low[0] < low[1] <= low[2] == high[0]
    for j, sequence in enumerate(plain(tokens)):
        mine = [g for g in groups if g.target.sequence == j]
        inside = [sorted(t for t in sequence if fraction(g.bottom) <= t <= fraction(g.top)) for g in mine]
        assert sorted(itertools.chain(*inside)) == sorted(sequence)
        gaps = sorted(b - a for a, b in itertools.pairwise(sorted(sequence)))
        within = [b - a for group in inside for a, b in itertools.pairwise(group)]
        assert sorted(within) == gaps[: len(gaps) - (m - 1)]

    goals = [{group.target: rational(1)} for group in groups]
    for blocks in (interpolate(ramps_below(groups, goals), 2, raised)[0], knots(groups, raised)[0]):
        exact = dense(blocks, pairs)
        for group in groups:
            y = pairs.Y[group.target.sequence].row(group.target.token)
            for weight in (Fraction(0), Fraction(1, 3), Fraction(1)):
                t = fraction(group.bottom) + weight * (fraction(group.top) - fraction(group.bottom))
                assert in_one_go(exact, line_point(t, 2)) == y
        for y in itertools.chain(*map(rows, pairs.Y)):
            assert in_one_go(exact, y) == y


@pytest.mark.parametrize("K", [1, 2, 3, 4, 7, 8, 9])
def test_the_lattice_is_even_and_lies_between_targets_and_tokens(K):
    pairs = random_pairs(1, K, K, 2, K)
    raised = ceiling(pairs) + 20 * pairs.scale
    groups, _ = cut(pairs, [[t + raised for t in separated(pairs)[0]]], raised)
    top = ceiling(pairs)
    stops, gap = lattice(groups, top, pairs.scale)
    values = [fraction(stop.t) for stop in stops]
    assert [stop.target for stop in stops] == [group.target for group in groups]
    assert all(a - b == fraction(gap) for a, b in itertools.pairwise(values))
    assert fraction(top) < values[-1] - Fraction(3, 4) * fraction(gap)
    assert values[0] < fraction(raised)


def test_knots_are_packed_from_the_top():
    for n, m, blocks in ((4, 4, 1), (5, 5, 2), (9, 9, 3)):  # singletons: four in a block
        pairs = random_pairs(1, n, m, 2)
        raised = ceiling(pairs) + rational(1)
        groups, _ = cut(pairs, [[t + raised for t in separated(pairs)[0]]], raised)
        made, found = knots(groups, ceiling(pairs))
        assert (len(made), found.constants["knots"]) == (blocks, m)
        assert all(block.width <= 4 for block in made)


# -- the dense blocks


def test_dense_blocks_are_a_sequence_and_frozen():
    built = construct(random_pairs(2, 3, 2, 3), method="paper")
    exact = built.exact_blocks
    assert len(exact) == built.L
    assert exact[-1] == exact[built.L - 1]
    assert exact[1:4] == [exact[1], exact[2], exact[3]]
    with pytest.raises(IndexError):
        exact[built.L]
    for block in exact:
        width = len(block.b)
        assert [len(block.U), len(block.W), len(block.p), len(block.q)] == [width, 3, 3, 3]
        assert {len(row) for row in block.W} == {width}
        assert {len(row) for row in block.U} <= {3}
        numbers = (block.eta, block.rho, block.beta, block.alpha, *block.b, *itertools.chain(*block.U, *block.W))
        assert all(isinstance(number, Fraction) for number in numbers)
    with pytest.raises(AttributeError):
        exact[0].eta = Fraction(1)


def test_the_ledger_prints_and_serialises():
    built = construct(random_pairs(), method="paper", attention="softmax")
    text = str(built.ledger)
    for entry in built.ledger:
        assert entry.phase in text
    record = built.ledger.to_dict()
    assert record["blocks"] == built.L
    assert record["holds"] is True
    assert len(record["entries"]) == len(built.ledger) == len(list(built.ledger))
    assert [entry.phase for entry in built.ledger][:3] == ["reduction", "separation", "leaders"]
