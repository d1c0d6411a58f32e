"""Leader selection (phase 2): every target gets a token of its source, which leaves the line for a place of its own."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

from sinkformer.interpolation.blocks import Block, feed_forward
from sinkformer.interpolation.datasets import SequencePairs
from sinkformer.interpolation.ledger import Entry, entry
from sinkformer.interpolation.rationals import floor_log2, floor_power, floor_to, power_of_two, rational
from sinkformer.interpolation.vectors import Vector, combination, vector

if TYPE_CHECKING:
    from sinkformer.interpolation.rationals import Rational


@dataclass(frozen=True, eq=False)
class Places:
    """Where the leaders stand after phase 2.

    Attributes:
        leaders: for every sequence the numbers of its leaders, in the order of the targets.
        positions: their positions in the plane of the first two coordinates.
        base: the smallest power of two above all t; the first leader of sequence j stands at ``base (2 + j u) (1, 2)``.
        lattice: smallest distance of two first coordinates of leaders.
    """

    leaders: list[list[int]]
    positions: list[list[tuple[Rational, Rational]]]
    base: Rational
    lattice: Rational


def select_leaders(pairs: SequencePairs, tokens: list[list[Rational]]) -> tuple[list[Block], Places, Entry]:
    """K blocks, each of which moves one leader; all other tokens stay.

    The first leader of a sequence goes far out, where it will attract the tokens of its sequence; the others to a circle on
    the other side of the origin, where they will attract nobody. Leaders are the tokens that stand most alone. They are moved
    in decreasing order, so that a placed one is on the inactive side of every later neuron.
    """
    bottom, top = min(map(min, tokens)), max(map(max, tokens))
    isolation = _isolation(tokens, bottom)
    leaders = [
        sorted(range(len(t)), key=lambda i, t=t: isolation[t[i]], reverse=True)[: len(y)]
        for t, y in zip(tokens, pairs.Y, strict=True)
    ]
    places = _places(pairs, leaders, bottom, top)
    order = sorted(
        ((tokens[j][i], places.positions[j][k]) for j, chosen in enumerate(leaders) for k, i in enumerate(chosen)),
        key=lambda leader: leader[0],
        reverse=True,
    )
    blocks = [_snap(t, position, isolation[t]) for t, position in order]
    narrowest = min(isolation[t] for t, _ in order)
    found = entry(
        "leaders",
        len(blocks),
        "tokens lie apart on the line",
        {"base": places.base, "lattice": places.lattice, "narrowest gap": narrowest},
        "reach of a hat < distance to the next token",
        (max(4 * _step(isolation[t]) / isolation[t] for t, _ in order), rational(1)),
    )
    return blocks, places, found


def _isolation(tokens: list[list[Rational]], bottom: Rational) -> dict[Rational, Rational]:
    """Distance of every token to its nearest neighbour, and no more than to zero."""
    everything = sorted(t for sequence in tokens for t in sequence)
    found = dict.fromkeys(everything, bottom)
    for a, b in itertools.pairwise(everything):
        found[a] = min(found[a], b - a)
        found[b] = min(found[b], b - a)
    return found


def _places(pairs: SequencePairs, leaders: list[list[int]], bottom: Rational, top: Rational) -> Places:
    base = 2 * floor_power(top)
    radius = power_of_two(floor_log2(bottom) - 1)
    bits = max(pairs.K - pairs.N, pairs.N).bit_length()
    unit, grain = power_of_two(-bits), power_of_two(-2 * bits - 6)
    positions: list[list[tuple[Rational, Rational]]] = []
    for j in range(pairs.N):
        x = base * (2 + j * unit)
        positions.append([(x, 2 * x)])
    i = 0
    for k in range(1, pairs.m):  # one sequence's leaders are spread over the circle
        for j, chosen in enumerate(leaders):
            if k < len(chosen):
                i += 1
                height = (1 - (i * unit) ** 2) / grain**2
                below = rational(isqrt(int(height.floor()))) * grain
                positions[j].append((-radius * i * unit, -radius * below))
    return Places(leaders, positions, base, radius * unit)


def _step(isolation: Rational) -> Rational:
    return floor_power(isolation / 8)


def _snap(t: Rational, position: tuple[Rational, Rational], isolation: Rational) -> Block:
    """A hat with a flat top: what is within a step of t goes to the position exactly, the neighbours stay."""
    h = _step(isolation)
    second = floor_to(t, h) - h
    third = second + 3 * h
    one, minus = rational(1), rational(-1)
    goal, axis = vector(*position), vector(one)

    def towards(c: Rational) -> Vector:
        return combination([(1 / (2 * h), goal), (-c / (2 * h), axis)])

    up, down = towards(second), towards(third)
    return feed_forward(
        "leader",
        1,
        {0: one, 1: minus},
        [
            (2 * h - second, up),
            (-second, combination([(minus, axis), (minus, up)])),
            (-third, combination([(one, axis), (minus, down)])),
            (-third - 2 * h, down),
        ],
    )
