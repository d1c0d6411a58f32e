"""Groups: the tokens of a sequence, cut into as many neighbourhoods as it has targets. No leaders are needed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from sinkformer.interpolation.blocks import Block, feed_forward
from sinkformer.interpolation.datasets import SequencePairs
from sinkformer.interpolation.ledger import Entry, entry
from sinkformer.interpolation.phases.projection import Stop
from sinkformer.interpolation.phases.targets import Ramp
from sinkformer.interpolation.rationals import floor_power, floor_to, power_of_two, rational
from sinkformer.interpolation.vectors import Row, Vector, combination, vector

if TYPE_CHECKING:
    from sinkformer.interpolation.rationals import Rational

_KNOTS = 4


@dataclass(frozen=True, eq=False)
class Group:
    """Tokens that go to one target.

    Attributes:
        bottom: the lowest.
        top: the highest.
        below: the next lower token of any sequence, or the floor.
        target: where they go.
    """

    bottom: Rational
    top: Rational
    below: Rational
    target: Row


def cut(pairs: SequencePairs, tokens: list[list[Rational]], floor: Rational) -> tuple[list[Group], Entry]:
    """Every sequence cut at its widest gaps; the groups of all sequences, in decreasing order.

    Args:
        pairs: the data.
        tokens: on the line, every sequence in an interval of its own.
        floor: below all tokens.
    """
    runs: list[tuple[Rational, Rational, Row]] = []
    for j, (t, y) in enumerate(zip(tokens, pairs.Y, strict=True)):
        ordered = sorted(t)
        widest = sorted(range(1, len(ordered)), key=lambda i, o=ordered: o[i] - o[i - 1], reverse=True)
        ends = [0, *sorted(widest[: len(y) - 1]), len(ordered)]
        runs += [(ordered[a], ordered[b - 1], Row("Y", j, k)) for k, (a, b) in enumerate(pairwise(ends))]
    runs.sort(key=lambda run: run[0])
    widest_group = max(top - bottom for bottom, top, _ in runs)
    return grouped(runs, floor, "every sequence has an interval of the line to itself", {"widest group": widest_group})


def grouped(
    runs: list[tuple[Rational, Rational, Row]], floor: Rational, hypotheses: str, constants: dict[str, Rational | int]
) -> tuple[list[Group], Entry]:
    """Groups in decreasing order, with their entry.

    Args:
        runs: ``(bottom, top, target)`` in increasing order.
        floor: below all of them.
        hypotheses: of the entry.
        constants: of the entry, besides those of all groups.
    """
    tops = [floor, *(top for _, top, _ in runs)]
    groups = [Group(bottom, top, below, target) for (bottom, top, target), below in zip(runs, tops, strict=False)]
    narrowest = min(group.bottom - group.below for group in groups)
    found = entry(
        "groups",
        0,
        hypotheses,
        {"groups": len(groups), "narrowest gap": narrowest, **constants},
        "0 < narrowest gap",
        (rational(0), narrowest),
    )
    return groups[::-1], found


def ramps_below(groups: list[Group], goals: list[Vector]) -> list[Ramp]:
    """One ramp in the gap below every group, with dyadic ends."""
    found: list[Ramp] = []
    for group, goal in zip(groups, goals, strict=True):
        h = floor_power((group.bottom - group.below) / 4)
        head = floor_to(group.bottom, h) - h
        found.append(Ramp(head - h, head, goal))
    return found


def lattice(groups: list[Group], top: Rational, scale: Rational) -> tuple[list[Stop], Rational]:
    """Evenly spaced stops for the groups, between ``top`` and ``top + scale / 2``, and their distance."""
    gap = scale / 2 * power_of_two(-len(groups).bit_length())
    start = top + scale / 2
    return [Stop(start - (i + 1) * gap, group.target) for i, group in enumerate(groups)], gap


def knots(groups: list[Group], limit: Rational) -> tuple[list[Block], Entry]:
    """Blocks that send the groups to their targets by piecewise linear maps with up to four knots.

    A group of one token is one knot, a wider one two. What is between the groups is of no concern, so that no neuron is spent
    on a flat piece; exact, but a rounding error of a token is stretched by the steepest piece.

    Args:
        groups: in decreasing order.
        limit: the largest first coordinate of a target.
    """
    packs: list[list[Group]] = []
    for group in groups:
        if packs and sum(map(_size, packs[-1])) + _size(group) <= _KNOTS:
            packs[-1].append(group)
        else:
            packs.append([group])
    blocks = [_piecewise(pack) for pack in packs]
    found = entry(
        "knots",
        len(blocks),
        "groups packed from the top, at most four knots in a block",
        {"knots": sum(map(_size, groups)), "blocks": len(blocks)},
        "largest first coordinate of a target < lowest knot",
        (limit, min(group.below for group in groups)),
    )
    return blocks, found


def _size(group: Group) -> int:
    return 1 if group.bottom == group.top else 2


def _piecewise(pack: list[Group]) -> Block:
    """Slopes between the knots; the first one starts in the gap below the pack."""
    one, axis = rational(1), vector(rational(1))
    lowest = pack[-1]
    points: list[tuple[Rational, Vector]] = [(lowest.below, {})]
    for group in reversed(pack):
        for t in dict.fromkeys((group.bottom, group.top)):
            points.append((t, combination([(one, {group.target: one}), (-t, axis)])))
    neurons: list[tuple[Rational, Vector]] = []
    before: Vector = {}
    for (left, start), (right, end) in pairwise(points):
        slope = combination([(1 / (right - left), end), (-1 / (right - left), start)])
        neurons.append((-left, combination([(one, slope), (-one, before)])))
        before = slope
    return feed_forward("knots", 1, {0: one}, neurons)
