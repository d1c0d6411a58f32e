"""The verifier is sound: what it proves is true, by an evaluator that shares no code with it; what it refutes is false."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkformer.interpolation.blocks import Block, ExactBlocks, Kind, feed_forward, identity
from sinkformer.interpolation.construction import Interpolant, construct
from sinkformer.interpolation.datasets import SequencePairs
from sinkformer.interpolation.following import Box, Following
from sinkformer.interpolation.rationals import enclosure, fraction, library, rational
from sinkformer.interpolation.vectors import Row, Space
from sinkformer.interpolation.verification import Certificate, Verdict
from tests.interpolation_oracle import interpolates, points, transform

NETWORKS = [
    ("hardmax", "paper", "mean"),
    ("hardmax", "paper", "max"),
    ("softmax", "paper", "mean"),
    ("hardmax", "direct", "mean"),
    ("softmax", "two-pass", "mean"),
    ("hardmax", "knots", "mean"),
]


def data(seed: int = 0, N: int = 2, n: int = 3, m: int = 2, d: int = 2) -> tuple[list[Any], list[Any]]:
    draw = np.random.default_rng(seed).integers
    X = [[[int(v) + 8 * i, *map(int, draw(-4, 5, d - 1))] for i, v in enumerate(draw(-3, 4, n))] for _ in range(N)]
    Y = [[[i - 1, *map(int, draw(-2, 3, d - 1))] for i in range(m)] for _ in range(N)]
    return X, Y


def built_on(X: Any, Y: Any, kind: Kind, method: Any, statistic: Any) -> Interpolant:
    return construct(X, Y, attention=kind, method=method, statistic=statistic)


def agree(built: Interpolant, X: Any, Y: Any) -> bool:
    """Compares the two, and returns the truth."""
    truth = interpolates(built.exact_blocks, X, Y)
    verdict = built.certificate.check()
    if built.kind == "hardmax" or all(block.pools for block in built.blocks):
        assert verdict.status == ("proved" if truth else "refuted"), verdict
        assert verdict.precision is None
    else:
        assert verdict.status in (("proved", "undecided") if truth else ("refuted", "undecided")), verdict
    assert bool(verdict) == (verdict.status == "proved")
    return truth


# -- one number is wrong


def changed(value: Any, how: str) -> Any:
    if how == "slightly":
        return value + (abs(value) + 1) / rational(2**60)
    return {"doubled": 2 * value, "negative": -value, "zero": rational(0), "larger": value + rational(1, 3)}[how]


def with_one(terms: Mapping[Any, Any], basis: Any, how: str) -> dict[Any, Any]:
    found = {**terms, basis: changed(terms.get(basis, rational(0)), how)}
    return {key: value for key, value in found.items() if value != 0}


def mutations(block: Block, how: str) -> Iterator[tuple[str, Block]]:
    """The block with one of its numbers changed, for every number it has, and for some that are zero."""
    for name in ("eta", "rho", "beta", "alpha"):
        yield name, replace(block, **{name: changed(getattr(block, name), how)})
    for basis in {*block.functional, 1}:
        yield f"U[{basis}]", replace(block, functional=with_one(block.functional, basis, how))
    for k in range(block.width):
        biases, columns = list(block.biases), list(block.columns)
        biases[k] = changed(biases[k], how)
        yield f"b[{k}]", replace(block, biases=tuple(biases))
        for basis in {*block.columns[k], 0, 1}:
            columns[k] = with_one(block.columns[k], basis, how)
            yield f"W[{k}][{basis}]", replace(block, columns=tuple(columns))
    if block.attends:
        for basis in (0, 1):
            either = {basis: rational(1)}
            yield f"p[{basis}]", replace(block, p=with_one(block.p, basis, how), q=block.q or either)
            yield f"q[{basis}]", replace(block, q=with_one(block.q, basis, how), p=block.p or either)


@pytest.mark.parametrize("how", ["slightly", "doubled", "negative", "zero", "larger"])
@pytest.mark.parametrize("network", NETWORKS, ids="-".join)
def test_no_network_with_one_wrong_number_is_proved(network, how):
    X, Y = data()
    built = built_on(X, Y, *network)
    draw = np.random.default_rng(len(how))
    wrong = 0
    everything = [(k, name, block) for k, old in enumerate(built.blocks) for name, block in mutations(old, how)]
    for index in draw.permutation(len(everything))[:25]:
        k, _, block = everything[index]
        mutant = replace(built, blocks=(*built.blocks[:k], block, *built.blocks[k + 1 :]))
        wrong += not agree(mutant, X, Y)
    assert wrong  # most mutations do harm


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("how", ["slightly", "doubled", "negative", "zero", "larger"])
@pytest.mark.parametrize("network", NETWORKS, ids="-".join)
def test_no_network_with_any_wrong_number_is_proved(network, how, seed):
    X, Y = data(seed, N=2 + seed % 2)
    built = built_on(X, Y, *network)
    for k, old in enumerate(built.blocks):
        for _, block in mutations(old, how):
            agree(replace(built, blocks=(*built.blocks[:k], block, *built.blocks[k + 1 :])), X, Y)


@pytest.mark.parametrize("network", NETWORKS, ids="-".join)
def test_no_network_with_a_block_lost_doubled_or_exchanged_is_proved(network):
    X, Y = data(1)
    built = built_on(X, Y, *network)
    blocks, wrong = built.blocks, 0
    for k in range(len(blocks)):
        variants = [blocks[:k] + blocks[k + 1 :], blocks[: k + 1] + blocks[k:]]
        if k:
            variants.append((*blocks[: k - 1], blocks[k], blocks[k - 1], *blocks[k + 1 :]))
        for variant in filter(None, variants):
            wrong += not agree(replace(built, blocks=tuple(variant)), X, Y)
    assert wrong >= 3


@pytest.mark.parametrize("network", NETWORKS, ids="-".join)
def test_identity_blocks_change_nothing(network):
    X, Y = data(2)
    built = built_on(X, Y, *network)
    for k in (0, 1, built.L):
        assert agree(replace(built, blocks=(*built.blocks[:k], identity(), *built.blocks[k:])), X, Y)


# -- the data are not those of the network


def written_out(built: Interpolant) -> tuple[Block, ...]:
    """The blocks with their columns in coordinates, so that they do not follow the data."""
    coordinates = built.space.coordinates
    return tuple(replace(b, columns=tuple(map(coordinates, b.columns))) for b in built.blocks)


@pytest.mark.parametrize("network", NETWORKS, ids="-".join)
def test_a_network_is_proved_for_its_own_targets_only(network):
    X, Y = data(3)
    built = built_on(X, Y, *network)
    blocks = written_out(built)
    assert agree(replace(built, blocks=blocks), X, Y)
    for j, k, i in [(0, 0, 0), (0, 1, 1), (1, 1, 0)]:
        other = [[list(map(Fraction, y)) for y in sequence] for sequence in Y]
        other[j][k][i] += Fraction(1, 2**60)
        assert not agree(replace(built, pairs=SequencePairs(X, other), blocks=blocks), X, other)
    for other in ([Y[0][:1], Y[1]], [Y[1], Y[0]], [[*Y[0], [5, 5]], Y[1]]):
        assert not agree(replace(built, pairs=SequencePairs(X, other), blocks=blocks), X, other)


@pytest.mark.parametrize("network", NETWORKS, ids="-".join)
def test_a_network_is_proved_for_its_own_sources(network):
    X, Y = data(4)
    built = built_on(X, Y, *network)
    blocks = written_out(built)
    wrong = 0
    for j, k, shift in [(0, 0, 1), (0, 2, -3), (1, 1, Fraction(1, 2**60)), (1, 2, 100)]:
        other = [[list(map(Fraction, x)) for x in sequence] for sequence in X]
        other[j][k][0] += shift
        wrong += not agree(replace(built, pairs=SequencePairs(other, Y), blocks=blocks), other, Y)
    assert wrong
    assert not agree(replace(built, pairs=SequencePairs(X[::-1], Y), blocks=blocks), X[::-1], Y)


@pytest.mark.parametrize("tau", [Fraction(1, 10**6), Fraction(1, 100), 1, 10, 10**6])
def test_a_temperature_that_is_too_high_is_not_proved(tau):
    X, Y = data(5)
    built = construct(X, Y, attention="softmax", method="paper")
    assert built.tau_star is not None
    truth = agree(replace(built, tau=Fraction(tau)), X, Y)
    assert truth or tau > built.tau_star
    assert not truth or tau < 1000 * built.tau_star


def test_leaders_need_scores():
    """Without scores every token goes to the mean of its leaders; with negative ones it depends on the data."""
    X, Y = data(6)
    for kind in ("hardmax", "softmax"):
        built = construct(X, Y, attention=kind, method="paper")
        for alpha in (0, -1):
            blocks = tuple(replace(b, alpha=rational(alpha)) if b.alpha != 0 else b for b in built.blocks)
            assert not agree(replace(built, blocks=blocks), X, Y) or alpha


# -- networks that nobody constructed

SMALL_RATIONALS = st.builds(Fraction, st.integers(-3, 3), st.sampled_from([1, 2, 3]))


@st.composite
def random_blocks(draw, d: int, pooling: bool = False) -> Block:
    def vector() -> dict[int, Any]:
        values = [draw(SMALL_RATIONALS) for _ in range(d)]
        return {i: rational(value) for i, value in enumerate(values) if value}

    neurons = [(rational(draw(SMALL_RATIONALS)), vector()) for _ in range(draw(st.integers(0, 3)))]
    block = feed_forward("random", rational(draw(SMALL_RATIONALS)), vector(), neurons)
    rho, beta, alpha = (rational(draw(SMALL_RATIONALS)) for _ in range(3))
    if pooling:
        return block.attending(rho, beta, rational(0), {}, {})
    return block.attending(rho, beta, alpha, vector(), vector())


@st.composite
def random_sources(draw, d: int) -> list[list[tuple[int, ...]]]:
    token = st.tuples(*[st.integers(-2, 2)] * d)
    sequence = st.lists(token, min_size=1, max_size=4, unique=True)
    return draw(st.lists(sequence, min_size=1, max_size=3, unique_by=frozenset))


def as_network(blocks: list[Block], X: Any, Y: Any, kind: Kind, tau: Fraction = Fraction(1)) -> Interpolant:
    pairs = SequencePairs(X, Y)
    return replace(construct(X, Y, method="direct"), pairs=pairs, blocks=tuple(blocks), kind=kind, tau=tau)


def images(blocks: list[Block], X: Any, kind: Kind, tau: Fraction = Fraction(1)) -> list[list[Any]]:
    """Where the tokens end, without repetition; ``X`` serves as targets while there are none."""
    exact = list(ExactBlocks(blocks, Space(SequencePairs(X, X)), kind, rational(tau)))
    return [list(dict.fromkeys(transform(exact, points(x)))) for x in X]


@settings(max_examples=40)
@given(st.data())
def test_hardmax_networks_at_random(data):
    d = data.draw(st.integers(1, 2))
    X = data.draw(random_sources(d))
    blocks = data.draw(st.lists(random_blocks(d), min_size=1, max_size=4))
    Y = images(blocks, X, "hardmax")
    assert agree(as_network(blocks, X, Y, "hardmax"), X, Y)
    j = data.draw(st.integers(0, len(X) - 1))
    Y[j][0] = (Y[j][0][0] + Fraction(1, 2**60), *Y[j][0][1:])
    assert not agree(as_network(blocks, X, Y, "hardmax"), X, Y)


@settings(max_examples=40)
@given(st.data())
def test_networks_that_only_pool_are_exact_with_softmax(data):
    d = data.draw(st.integers(1, 2))
    X = data.draw(random_sources(d))
    blocks = data.draw(st.lists(random_blocks(d, pooling=True), min_size=1, max_size=4))
    Y = images(blocks, X, "softmax", Fraction(3))
    assert agree(as_network(blocks, X, Y, "softmax", Fraction(3)), X, Y)


@settings(max_examples=40)
@given(st.data())
def test_softmax_networks_at_random_are_never_proved_falsely(data):
    """Targets are the images to 60 digits: true only where the softmax is constant or forgotten."""
    d = data.draw(st.integers(1, 2))
    X = data.draw(random_sources(d))
    blocks = data.draw(st.lists(random_blocks(d), min_size=1, max_size=3))
    tau = data.draw(st.sampled_from([Fraction(1, 50), Fraction(1), Fraction(20)]))
    Y = images(blocks, X, "softmax", tau)
    built = as_network(blocks, X, Y, "softmax", tau)
    truth = interpolates(built.exact_blocks, X, Y)
    status = built.certificate.check().status
    assert status in (("proved", "undecided") if truth else ("refuted", "undecided"))


# -- verdicts


def verdict_of(blocks: list[Block], X: Any, Y: Any, kind: Kind = "hardmax", tau: float | Fraction = 1.0) -> Verdict:
    return Certificate(SequencePairs(X, Y), blocks, kind, rational(tau)).check()


def test_reasons_name_the_token():
    X, Y = [[[0, 0], [1, 0]], [[2, 2]]], [[[0, 0], [1, 0]], [[2, 2]]]
    assert verdict_of([], X, Y).status == "proved"
    assert "2 sequences" in verdict_of([], X, Y).reason
    assert "3 tokens" in verdict_of([], X, Y).reason
    off = verdict_of([], X, [Y[0], [[2, 3]]])
    assert (off.status, off.precision) == ("refuted", None)
    assert "token 0 of X[1]" in off.reason
    assert "Y[1]" in off.reason
    pooled = identity().attending(rational(0), rational(1), rational(0), {}, {})
    missing = verdict_of([pooled], X, [[["1/2", 0], [0, 0]], [[2, 2]]])
    assert missing.status == "refuted"
    assert "Y[0][1]" in missing.reason
    assert str(missing).startswith("refuted (rational arithmetic): ")
    assert not missing


def soft(rho: float = 0, beta: float = 1) -> Block:
    return identity().attending(rational(rho), rational(beta), rational(1), {}, {})


def test_a_softmax_is_refuted_where_its_enclosure_excludes_the_targets():
    X = [[[0, 0], [1, 0]]]
    verdict = verdict_of([soft()], X, X, "softmax")
    assert verdict.status == "refuted"
    assert verdict.precision == 128
    assert "enclosures of 128 bits" in str(verdict)


def test_what_no_enclosure_can_decide_stays_undecided():
    """Equal scores from equal lengths: the softmax is the mean, but a box of it does not say so; then a second softmax."""
    X = [[[1, 0], [0, 1]]]
    verdict = verdict_of([soft(), soft()], X, X, "softmax")
    assert verdict.status == "undecided"
    assert verdict.precision == 8192
    assert "block 1" in verdict.reason
    assert "token 0 of X[0]" in verdict.reason


def test_more_bits_decide_what_fewer_do_not():
    """Token 0 ends at 2 - exp(-k) or so, token 1 at 2 - exp(-2 k), on both sides of the kink 2 - 3^-k."""
    X = [[[1], [2]]]
    precisions = []
    for k in (10, 300, 1200):
        ramp = feed_forward("ramp", 0, {0: rational(1)}, [(rational(Fraction(1, 3**k)) - 2, {0: rational(1)})])
        level = feed_forward("level", 0, {}, [])
        verdict = verdict_of([soft(), ramp, level], X, [[[0]]], "softmax", Fraction(1, k))
        assert verdict.status == "proved", (k, verdict)
        precisions.append(verdict.precision)
    assert precisions == sorted(precisions)
    assert precisions[0] < precisions[-1]


def test_single_tokens_pass_any_softmax_exactly():
    X, Y = [[[3, 4]]], [[[9, 12]]]
    for _ in range(2):
        verdict = verdict_of([soft(1, 2), identity()], X, Y, "softmax", 0.01)
        assert (verdict.status, verdict.precision) == ("proved", None)


# -- the facts about attention that the proof rests on (rho = 0, V = I)

PLANE = [[2, 1], [1, 3], [-1, 1], [-2, 1], [0, 0], [0, 5], [3, -3]]


def attending(alpha: int, p: dict[int, int], q: dict[int, int]) -> Block:
    def exact(v: dict[int, int]) -> dict[int, Any]:
        return {i: rational(x) for i, x in v.items()}

    return identity().attending(rational(0), rational(1), rational(alpha), exact(p), exact(q))


def ends(block: Block, X: list[list[int]], kind: Kind = "hardmax") -> set[tuple[Fraction, ...]]:
    """Where the oracle says that the tokens end, after the verifier agreed."""
    found = images([block], [X], kind)[0]
    assert verdict_of([block], [X], [found], kind).status == "proved"
    return set(found)


def test_rank_one_scores_send_tokens_to_extremes_and_to_the_mean():
    """A = v v^T: to the maximiser of <v, x> where that is positive, to the minimiser where negative, to the mean where zero."""
    block = attending(0, {0: 1}, {0: 1})
    mean = (Fraction(3, 7), Fraction(8, 7))
    assert ends(block, PLANE) == {(3, -3), (-2, 1), mean}
    assert ends(block, [[1, 0], [2, 5], [2, 7]]) == {(2, 6)}  # a tie: the mean of the maximisers


def test_identity_scores_in_a_box_send_all_tokens_to_its_corner():
    box = [[1, 1], [3, 2], [2, 3], [5, 5], [4, 1]]
    assert ends(attending(1, {}, {}), box) == {(5, 5)}


def test_identity_scores_on_a_sphere_move_nothing():
    sphere = [[3, 4], [5, 0], [-4, 3], [0, -5], [-3, -4]]
    assert ends(attending(1, {}, {}), sphere) == {tuple(map(Fraction, x)) for x in sphere}


@pytest.mark.parametrize("kind", ["hardmax", "softmax"])
def test_no_scores_pool_all_tokens(kind):
    assert ends(attending(0, {}, {}), PLANE, kind) == {(Fraction(3, 7), Fraction(8, 7))}
    assert ends(attending(0, {0: 1}, {}), PLANE, kind) == {(Fraction(3, 7), Fraction(8, 7))}


def test_p_belongs_to_the_key_and_q_to_the_query():
    """<A x, y> = <q, x> <p, y>, A = p q^T: tokens with positive second coordinate go to the largest first one."""
    block = attending(0, {0: 1}, {1: 1})
    assert ends(block, [[1, 1], [2, 1], [0, 2]]) == {(2, 1)}
    assert ends(block, [[1, -1], [2, -1], [0, -2]]) == {(0, -2)}


def test_certificates_speak_of_the_rows_of_their_own_data():
    """A target written as a row follows the data; written in coordinates it does not."""
    X, Y = [[[1]]], [[[5]]]
    to_row = feed_forward("row", 0, {0: rational(1)}, [(rational(0), {Row("Y", 0, 0): rational(1)})])
    assert verdict_of([to_row], X, Y).status == "proved"
    assert verdict_of([to_row], X, [[[6]]]).status == "proved"
    to_five = feed_forward("five", 0, {0: rational(1)}, [(rational(0), {0: rational(5)})])
    assert verdict_of([to_five], X, Y).status == "proved"
    assert verdict_of([to_five], X, [[[6]]]).status == "refuted"


# -- enclosures


@pytest.mark.parametrize("sharp", [False, True])
@given(st.data())
def test_enclosures_of_a_softmax_contain_it(sharp, data):
    """Also at multiples of one vector, whose leads are found from one another, and with negative factors."""
    base = data.draw(random_sources(2))[0]
    X = [list(dict.fromkeys(base + [tuple(3 * v for v in x) for x in base] + [(0, 1)]))]
    block = data.draw(random_blocks(2)).attending(
        *(rational(data.draw(SMALL_RATIONALS)) for _ in range(3)), {0: rational(1)}, {1: rational(-2)}
    )
    block = replace(block, eta=rational(1), functional={}, biases=(), columns=())
    tau = data.draw(st.sampled_from([Fraction(1, 3), Fraction(1), Fraction(5), Fraction(40)]))
    pairs = SequencePairs(X, X)
    (exact,) = ExactBlocks([block], Space(pairs), "softmax", rational(tau))
    with library().ctx.workprec(128):
        run = Following(pairs, "softmax", rational(tau), 128, sharp)
        run.step(block)
    if not block.attends:
        return
    slack = Fraction(1, 10**50)  # of the evaluator's digits
    for token, truth in zip(run.tokens, transform([exact], points(X[0])), strict=True):
        assert isinstance(token, Box)
        for i, value in enumerate(truth):
            low, high = map(fraction, token.sides.get(i, (rational(0), rational(0))))
            assert low - slack <= value <= high + slack
            assert not sharp or high - low < Fraction(1, 10**30)


@pytest.mark.parametrize("sharp", [False, True])
@pytest.mark.parametrize("X", [[[1], [2]], [[4], ["1/4"]], [["-1/4"], [-4], ["1/8"]], [["1/4"], [4]]], ids=str)
def test_enclosures_of_a_few_tokens_on_a_line(X, sharp):
    pairs = SequencePairs([X], [X])
    (exact,) = ExactBlocks([soft()], Space(pairs), "softmax", rational(1))
    with library().ctx.workprec(128):
        run = Following(pairs, "softmax", rational(1), 128, sharp)
        run.step(soft())
    for token, (truth,) in zip(run.tokens, transform([exact], points(X)), strict=True):
        assert isinstance(token, Box)
        low, high = map(fraction, token.sides[0])
        assert low - Fraction(1, 10**50) <= truth <= high + Fraction(1, 10**50)


def test_enclosures_next_to_zero_stay_small_and_true():
    """exp(-10**12), written out, would fill the memory."""
    arb = library().arb
    for sign in (1, -1):
        low, high = enclosure(sign * (-(arb(10) ** 12)).exp())
        assert low <= 0 <= high
        assert low < high
        assert -(Fraction(1, 2) ** 100_000) <= fraction(low)
        assert fraction(high) <= Fraction(1, 2) ** 100_000
    assert enclosure(arb(0)) == (0, 0)
    assert enclosure(arb(3)) == (3, 3)
