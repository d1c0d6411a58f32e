"""Separation (phase 1): after it, every sequence has an interval of the line to itself."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal

from sinkformer.interpolation.blocks import Block, feed_forward
from sinkformer.interpolation.ledger import Entry, entry
from sinkformer.interpolation.phases.reduction import Line
from sinkformer.interpolation.rationals import floor_power, floor_to, rational
from sinkformer.interpolation.vectors import Functional, vector

if TYPE_CHECKING:
    from sinkformer.interpolation.rationals import Rational

Statistic = Literal["mean", "max"]
_TRIES = 64


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


Hull = tuple["Rational", "Rational"]


def separate(line: Line, statistic: Statistic, pool: bool) -> tuple[list[Block], list[list[Rational]], Entry]:
    """Blocks that give every sequence an interval of its own, at most ``max(1, N - 1)``.

    The sequences fall into classes whose hulls are apart. In a round every sequence shrinks towards its statistic, its mean or
    its maximum, by so much that classes of different statistics come apart. If the statistic splits no class, a feed-forward
    step in the same block first moves tokens in such a way that it does.

    Args:
        line: the tokens on the line.
        statistic: ``"mean"``, by attention with A = 0, the same for hardmax and for softmax at every temperature; or
            ``"max"``, by ``A = e_0 e_0^T`` (hardmax only).
        pool: collapse every sequence to its statistic in the last block; right where all targets are single tokens.

    Returns:
        ``(blocks, tokens, entry)``: the first block carries the reduction to the line.
    """
    rounds: list[Round] = []
    tokens = line.tokens
    classes = [list(range(len(tokens)))]
    tightest: tuple[Rational, Rational] | None = None
    statistic_of = _mean if statistic == "mean" else max
    while any(len(members) > 1 for members in classes):
        move = Move()
        values = [statistic_of(t) for t in tokens]
        if not _splits(classes, values):
            stuck = next(members for members in classes if len(members) > 1)
            move = (_bend if statistic == "mean" else _hat)(tokens, stuck, line.unit)
            tokens = [[move(t) for t in sequence] for sequence in tokens]
            values = [statistic_of(t) for t in tokens]
        classes = _refined(classes, values)
        done = all(len(members) == 1 for members in classes)
        gaps = _overlaps(classes, tokens, values)
        rho = rational(0) if pool and done else _shrinkage(gaps)
        sides = [(rho * over, (1 - rho) * gap) for gap, over in gaps] or [
            (rational(0), min((b - a for a, b in _consecutive(classes, values)), default=rational(1)))
        ]
        worst = max(sides, key=lambda pair: pair[0] / pair[1])
        tightest = worst if tightest is None or worst[0] / worst[1] > tightest[0] / tightest[1] else tightest
        tokens = [
            [rho * t + (1 - rho) * value for t in sequence] for sequence, value in zip(tokens, values, strict=True)
        ]
        rounds.append(Round(move, rho))
    if not rounds and pool:
        rounds.append(Round(Move(), rational(0)))
        tokens = [[statistic_of(t)] * len(t) for t in tokens]
    found = entry(
        "separation",
        max(1, len(rounds)),
        "no two sources are the same set",
        {
            "S": len(rounds),
            "moves": sum(bool(r.move.neurons) for r in rounds),
            "smallest rho": min((r.rho for r in rounds), default=1),
        },
        "rho (top_a - bottom_b) < (1 - rho)(phi_b - phi_a)",
        tightest,
    )
    return _blocks(line, rounds, statistic), tokens, found


def _shrinkage(gaps: list[tuple[Rational, Rational]]) -> Rational:
    """Rho with ``rho / (1 - rho)`` at most 7/8 of what just parts the classes, of four significant bits, and at most 1/4."""
    ratio = rational(7, 8) * min((gap / over for gap, over in gaps), default=rational(1))
    rho = min(ratio / (1 + ratio), rational(1, 4))
    return floor_to(rho, floor_power(rho) / 8)


def _blocks(line: Line, rounds: list[Round], statistic: Statistic) -> list[Block]:
    """The first block is the reduction, too: its functional is the one that tells tokens apart."""
    first = rounds[0] if rounds else Round(Move(), rational(1))
    blocks = []
    for k, step in enumerate([first, *rounds[1:]]):
        neurons = [(-kink, vector(slope)) for kink, slope in step.move.neurons]
        if k == 0:
            shifted = [(bias + line.offset, column) for bias, column in neurons]
            block = feed_forward("reduction", 0, line.functional, [(line.offset, vector(rational(1))), *shifted])
        else:
            block = feed_forward("separation", 1, {0: rational(1)} if neurons else {}, neurons)
        if rounds:
            axis: Functional = {0: rational(1)} if statistic == "max" else {}
            block = block.attending(step.rho, 1 - step.rho, rational(0), axis, axis)
        blocks.append(block)
    return blocks


def _mean(values: Sequence[Rational]) -> Rational:
    return sum(values[1:], values[0]) / len(values)


def _splits(classes: list[list[int]], values: list[Rational]) -> bool:
    return any(len({values[j] for j in members}) > 1 for members in classes)


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
        if tops[k] >= lows[k + 1]:
            # Where they only touch, any rho < 1 parts them; half the distance of the statistics stands for the overlap.
            found.append((b - a, max(tops[k] - lows[k + 1], (b - a) / 2)))
    return found


def _bend(tokens: list[list[Rational]], stuck: list[int], unit: Rational) -> Move:
    """``t -> t - relu(t - c) / 2``, increasing, with a kink that gives the stuck sequences different means.

    The means of relu(t - c) are piecewise linear in c, with kinks at tokens only. Were they equal for two sequences at every
    token, they would be equal everywhere, and with them the uniform measures on the two sets.
    """
    del unit
    members = [sorted(tokens[j]) for j in stuck]
    sums = [list(accumulate(reversed(t))) for t in members]  # of the largest k + 1 tokens

    def means(kink: Rational) -> list[Rational]:
        found = []
        for t, total in zip(members, sums, strict=True):
            above = len(t) - bisect_right(t, kink)
            found.append((total[above - 1] - above * kink) / len(t) if above else rational(0))
        return found

    return Move(((_best(sorted({t for sequence in members for t in sequence}), means), rational(-1, 2)),))


def _best(candidates: list[Rational], means: Callable[[Rational], list[Rational]]) -> Rational:
    """The candidate with the most different means, then the widest smallest difference; among a spread of them first."""
    step = max(1, len(candidates) // _TRIES)
    for chosen in (candidates[::step], candidates):
        scored = [(_score(means(kink)), kink) for kink in chosen]
        (count, _), kink = max(scored, key=lambda pair: pair[0])
        if count > 1:
            return kink
    raise AssertionError("two sources are the same set, which SequencePairs excludes")


def _score(values: list[Rational]) -> tuple[int, Rational]:
    distinct = sorted(set(values))
    return len(distinct), min((b - a for a, b in pairwise(distinct)), default=rational(0))


def _hat(tokens: list[list[Rational]], stuck: list[int], unit: Rational) -> Move:
    """A triangular hat that lifts one token, which some of the stuck sequences have and others lack, above all others."""
    in_all = set.intersection(*(set(tokens[j]) for j in stuck))
    lifted = max(t for j in stuck for t in tokens[j] if t not in in_all)
    everything = sorted({t for sequence in tokens for t in sequence})
    neighbours = [abs(t - lifted) for t in everything if t != lifted]
    reach = floor_power(min([*neighbours, unit]) / 2)
    slope = (everything[-1] + unit / 4 - lifted) / reach
    return Move(((lifted - reach, slope), (lifted, -2 * slope), (lifted + reach, slope)))
