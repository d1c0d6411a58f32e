"""Separation (phase 1): after it, every sequence has an interval of the line to itself."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal

from sinkformer.errors import SinkformerError
from sinkformer.interpolation.blocks import Block, feed_forward
from sinkformer.interpolation.ledger import Entry, entry
from sinkformer.interpolation.phases.reduction import Line
from sinkformer.interpolation.rationals import floor_power, floor_to, rational
from sinkformer.interpolation.vectors import Functional, vector

if TYPE_CHECKING:
    from sinkformer.interpolation.rationals import Rational

Statistic = Literal["mean", "max"]
_TRIES = 64
_DRAWS = 8
_WIDTH = 4
_BITS = 20  # of a weight; two means are equal by chance once in as many draws


@dataclass(frozen=True, eq=False)
class Move:
    """A feed-forward step on the line: ``t -> t + sum_k w_k relu(t - c_k)``, for neurons ``(c_k, w_k)``."""

    neurons: tuple[tuple[Rational, Rational], ...] = ()

    def __call__(self, t: Rational) -> Rational:
        """Where t goes."""
        moved = t
        for kink, slope in self.neurons:
            if t > kink:
                moved += slope * (t - kink)
        return moved


@dataclass(frozen=True, eq=False)
class Round:
    """One block: a move, then ``t -> rho t + (1 - rho) phi``, phi the statistic of the sequence."""

    move: Move
    rho: Rational


@dataclass(frozen=True, eq=False)
class _Separated:
    """The rounds, the tokens after them, and the two sides of the inequality where it is tightest."""

    rounds: list[Round]
    tokens: list[list[Rational]]
    tightest: tuple[Rational, Rational] | None


def separate(line: Line, statistic: Statistic, pool: bool) -> tuple[list[Block], list[list[Rational]], Entry]:
    """Blocks that give every sequence an interval of its own.

    Every sequence shrinks towards its statistic, its mean or its maximum, by so much that sequences of different statistics
    come apart; where statistics are equal, feed-forward steps first move the tokens. Means take one layer of attention and up to
    ``max(1, ceil(N / 4))`` blocks, maxima ``max(1, N - 1)`` at most, as in the paper.

    Args:
        line: the tokens on the line.
        statistic: ``"mean"``, by attention with A = 0, the same for hardmax and for softmax at every temperature; or
            ``"max"``, by ``A = e_0 e_0^T`` (hardmax only).
        pool: collapse every sequence to its statistic in the last block; right where all targets are single tokens.

    Returns:
        ``(blocks, tokens, entry)``: the first block carries the reduction to the line.
    """
    found = _by_means(line.tokens, pool) if statistic == "mean" else _by_maxima(line.tokens, line.unit)
    rounds = found.rounds
    return (
        blocks_of(line, rounds, statistic),
        found.tokens,
        entry(
            "separation",
            len(rounds),
            "no two sources are the same set",
            {
                "S": len(rounds) if len(line.tokens) > 1 else 0,
                "kinks": sum(len(step.move.neurons) for step in rounds),
                "smallest rho": min(step.rho for step in rounds),
            },
            "rho (top_a - bottom_b) < (1 - rho)(phi_b - phi_a)",
            found.tightest,
        ),
    )


def blocks_of(line: Line, rounds: list[Round], statistic: Statistic = "mean") -> list[Block]:
    """The rounds as blocks; the first is the reduction to the line, too, and is there also where there is no round."""
    first, *others = rounds or [Round(Move(), rational(1))]
    return [_reducing(line, first, statistic), *(_block(step, statistic) for step in others)]


# -- means: all kinks first, then one layer of attention


def _by_means(tokens: list[list[Rational]], pool: bool) -> _Separated:
    """Kinks until all means differ, four in a block, and one layer of attention in the last block.

    The means of ``relu(t - c)`` are piecewise linear in c, with kinks at tokens only. Were they equal for two sequences at every
    token, they would be equal everywhere, and with them the uniform measures on the two sets. So N - 1 kinks tell N sequences
    apart, and so does the mean of ``t + sum_k w_k relu(t - c_k)``, for all w outside a few hyperplanes.
    """
    packs = _packs(kinks(tokens, [(_mean(t),) for t in tokens]))
    bits = _BITS
    while True:
        moves, moved = max((_drawn(tokens, packs, seed, bits) for seed in range(_DRAWS if packs[0] else 1)), key=_ratio)
        values = [_mean(t) for t in moved]
        if len(set(values)) == len(values):
            break
        bits *= 2  # the weights lie on one of the hyperplanes, by chance
    classes = [[j] for j in sorted(range(len(values)), key=values.__getitem__)]
    rho = rational(0) if pool else _shrinkage(_overlaps(classes, moved, values)) if classes[1:] else rational(1)
    still = [Round(move, rational(1)) for move in moves[:-1]]
    sides = _sides(classes, moved, values, rho)
    return _Separated(
        [*still, Round(moves[-1], rho)], _shrunk(moved, values, rho), max(sides, key=_quotient, default=None)
    )


def kinks(tokens: Sequence[Sequence[Rational]], known: Sequence[tuple[Rational, ...]]) -> list[Rational]:
    """Kinks, greedily: each splits as many classes as it can of sequences of which the same is known.

    Args:
        tokens: of every sequence, on the line; no two the same set.
        known: of every sequence its mean, and anything else. Each kink c adds the mean of ``relu(t - c)``.
    """
    members = [sorted(t) for t in tokens]
    sums = [list(accumulate(reversed(t))) for t in members]  # of the largest k + 1 tokens

    def value(j: int, kink: Rational) -> Rational:
        above = len(members[j]) - bisect_right(members[j], kink)
        return (sums[j][above - 1] - above * kink) / len(members[j]) if above else rational(0)

    keys = list(known)
    found: list[Rational] = []
    while True:
        counts = Counter(keys)
        stuck = [j for j, key in enumerate(keys) if counts[key] > 1]
        if not stuck:
            return found
        places = sorted({t for j in stuck for t in members[j]})
        for chosen in (places[:: max(1, len(places) // _TRIES)], places):
            best = max(chosen, key=lambda kink: len({(keys[j], value(j, kink)) for j in stuck}))
            split = {j: (*keys[j], value(j, best)) for j in stuck}
            if len(set(split.values())) > len({keys[j] for j in stuck}):
                break
        else:
            raise SinkformerError("no kink tells two sequences apart, which is a defect of sinkformer")
        found.append(best)
        keys = [split.get(j, key) for j, key in enumerate(keys)]


def _packs(kinks: list[Rational]) -> list[list[Rational]]:
    """From the right, so that a later kink has not moved; one neuron of the first block is the identity."""
    waiting = sorted(kinks, reverse=True)
    return [waiting[: _WIDTH - 1], *(waiting[k : k + _WIDTH] for k in range(_WIDTH - 1, len(waiting), _WIDTH))]


def _drawn(
    tokens: list[list[Rational]], packs: list[list[Rational]], seed: int, bits: int
) -> tuple[list[Move], list[list[Rational]]]:
    """Increasing moves with random weights, and where the tokens are after them."""
    generator = random.Random(seed)

    def weight() -> Rational:
        return rational(generator.choice((-1, 1)) * generator.randrange(1, 1 << bits), _WIDTH << bits)

    moves = [Move(tuple((kink, weight()) for kink in pack)) for pack in packs]
    for move in moves:
        tokens = [[move(t) for t in sequence] for sequence in tokens] if move.neurons else tokens
    return moves, tokens


def _ratio(drawn: tuple[list[Move], list[list[Rational]]]) -> Rational:
    """How little the sequences must shrink to come apart; zero if two have one mean."""
    tokens = drawn[1]
    values = [_mean(t) for t in tokens]
    classes = [[j] for j in sorted(range(len(values)), key=values.__getitem__)]
    return min((gap / over for gap, over in _overlaps(classes, tokens, values)), default=rational(1))


# -- maxima: round after round


def _by_maxima(tokens: list[list[Rational]], unit: Rational) -> _Separated:
    """Rounds in which classes of sequences, whose hulls are apart, are split by their maxima, until all are single sequences."""
    rounds: list[Round] = []
    classes = [list(range(len(tokens)))]
    sides: list[tuple[Rational, Rational]] = []
    while any(len(members) > 1 for members in classes):
        move = Move()
        values = [max(t) for t in tokens]
        if not any(len({values[j] for j in members}) > 1 for members in classes):
            move = _hat(tokens, next(members for members in classes if len(members) > 1), unit)
            tokens = [[move(t) for t in sequence] for sequence in tokens]
            values = [max(t) for t in tokens]
        classes = _refined(classes, values)
        rho = _shrinkage(_overlaps(classes, tokens, values))
        sides += _sides(classes, tokens, values, rho)
        tokens = _shrunk(tokens, values, rho)
        rounds.append(Round(move, rho))
    return _Separated(rounds or [Round(Move(), rational(1))], tokens, max(sides, key=_quotient, default=None))


def _hat(tokens: list[list[Rational]], stuck: list[int], unit: Rational) -> Move:
    """A triangular hat that lifts one token, which some of the stuck sequences have and others lack, above all others."""
    in_all = set.intersection(*(set(tokens[j]) for j in stuck))
    lifted = max(t for j in stuck for t in tokens[j] if t not in in_all)
    everything = sorted({t for sequence in tokens for t in sequence})
    neighbours = [abs(t - lifted) for t in everything if t != lifted]
    reach = floor_power(min([*neighbours, unit]) / 2)
    slope = (everything[-1] + unit / 4 - lifted) / reach
    return Move(((lifted - reach, slope), (lifted, -2 * slope), (lifted + reach, slope)))


# -- both


def _shrunk(tokens: list[list[Rational]], values: list[Rational], rho: Rational) -> list[list[Rational]]:
    return [[rho * t + (1 - rho) * value for t in sequence] for sequence, value in zip(tokens, values, strict=True)]


def _shrinkage(gaps: list[tuple[Rational, Rational]]) -> Rational:
    """Rho with ``rho / (1 - rho)`` at most 7/8 of what just parts the classes, of four significant bits, and at most 1/4."""
    ratio = rational(7, 8) * min((gap / over for gap, over in gaps), default=rational(1))
    rho = min(ratio / (1 + ratio), rational(1, 4))
    return floor_to(rho, floor_power(rho) / 8)


def _reducing(line: Line, step: Round, statistic: Statistic) -> Block:
    """The first block is the reduction, too: its functional is the one that tells tokens apart."""
    neurons = [(line.offset - kink, vector(slope)) for kink, slope in step.move.neurons]
    block = feed_forward("reduction", 0, line.functional, [(line.offset, vector(rational(1))), *neurons])
    return _attending(block, step, statistic)


def _block(step: Round, statistic: Statistic) -> Block:
    neurons = [(-kink, vector(slope)) for kink, slope in step.move.neurons]
    block = feed_forward("separation", 1, {0: rational(1)} if neurons else {}, neurons)
    return _attending(block, step, statistic)


def _attending(block: Block, step: Round, statistic: Statistic) -> Block:
    if step.rho == 1:
        return block
    axis: Functional = {0: rational(1)} if statistic == "max" else {}
    return block.attending(step.rho, 1 - step.rho, rational(0), axis, axis)


def _mean(values: Sequence[Rational]) -> Rational:
    return sum(values[1:], values[0]) / len(values)


def _refined(classes: list[list[int]], values: list[Rational]) -> list[list[int]]:
    """Classes of equal statistic within the old classes, in the order of the statistic."""
    parts: list[list[int]] = []
    for members in classes:
        by_value: dict[Rational, list[int]] = {}
        for j in members:
            by_value.setdefault(values[j], []).append(j)
        parts += by_value.values()
    return sorted(parts, key=lambda members: values[members[0]])


def _consecutive(classes: list[list[int]], values: list[Rational]) -> list[tuple[Rational, Rational]]:
    order = [values[members[0]] for members in classes]
    return list(pairwise(order))


def _overlaps(
    classes: list[list[int]], tokens: list[list[Rational]], values: list[Rational]
) -> list[tuple[Rational, Rational]]:
    """``(phi_b - phi_a, top_a - bottom_b)`` for consecutive classes that overlap."""
    found: list[tuple[Rational, Rational]] = []
    tops = [max(max(tokens[j]) for j in members) for members in classes]
    lows = [min(min(tokens[j]) for j in members) for members in classes]
    for k, (a, b) in enumerate(_consecutive(classes, values)):
        if tops[k] > lows[k + 1]:  # where they only touch, any rho < 1 parts them
            found.append((b - a, tops[k] - lows[k + 1]))
    return found


def _sides(
    classes: list[list[int]], tokens: list[list[Rational]], values: list[Rational], rho: Rational
) -> list[tuple[Rational, Rational]]:
    """Both sides of the inequality, for all consecutive classes."""
    overlaps = [(rho * over, (1 - rho) * gap) for gap, over in _overlaps(classes, tokens, values)]
    return overlaps or [(rational(0), b - a) for a, b in _consecutive(classes, values)]


def _quotient(sides: tuple[Rational, Rational]) -> Rational:
    return sides[0] / sides[1]
