"""Interpolation (phase 4): what stands on the line goes to its targets, from the top down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sinkformer.interpolation.blocks import Block, feed_forward
from sinkformer.interpolation.ledger import Entry, entry
from sinkformer.interpolation.phases.projection import Stop
from sinkformer.interpolation.rationals import rational
from sinkformer.interpolation.vectors import Vector, combination, vector

if TYPE_CHECKING:
    from sinkformer.interpolation.rationals import Rational


@dataclass(frozen=True, eq=False)
class Ramp:
    """A step of the line: what is below ``foot`` stays, what is above ``head`` goes to ``goal``, all of it."""

    foot: Rational
    head: Rational
    goal: Vector


def ramps_at(stops: Sequence[Stop], gap: Rational) -> list[Ramp]:
    """One ramp for each stop, in decreasing order, flat for a quarter of the gap on both sides of the stop."""
    ordered = sorted(stops, key=lambda stop: stop.t, reverse=True)
    return [Ramp(stop.t - 3 * gap / 4, stop.t - gap / 4, {stop.target: rational(1)}) for stop in ordered]


def interpolate(
    ramps: Sequence[Ramp], per_block: int, limit: Rational, phase: str = "interpolation"
) -> tuple[list[Block], Entry]:
    """Blocks that send everything to the goals of the ramps, two neurons a ramp.

    What has arrived stands below all feet, and no later block touches it.

    Args:
        ramps: in decreasing order, none of which overlap.
        per_block: one ramp in a block, or two.
        limit: above the first coordinates of all goals.
        phase: name of the blocks.
    """
    blocks = [_block(ramps[k : k + per_block], phase) for k in range(0, len(ramps), per_block)]
    narrowest = min(ramp.head - ramp.foot for ramp in ramps)
    lowest = min(ramp.foot for ramp in ramps)
    return blocks, entry(
        phase,
        len(blocks),
        "ramps in decreasing order",
        {"ramps": len(ramps), "per block": per_block, "narrowest": narrowest},
        "first coordinates of all goals < lowest foot",
        (limit, lowest),
    )


def _block(ramps: Sequence[Ramp], phase: str) -> Block:
    """Of two ramps, the lower one rises to its goal, the upper one from that goal to its own."""
    one, axis = rational(1), vector(rational(1))
    neurons: list[tuple[Rational, Vector]] = []
    before: Vector | None = None
    for ramp in reversed(ramps):
        width = ramp.head - ramp.foot
        if before is None:  # from the line itself, t e_0, to the goal
            rise = combination([(1 / width, ramp.goal), (-ramp.head / width, axis)])
            level = combination([(-one, axis), (-one, rise)])
        else:
            rise = combination([(1 / width, ramp.goal), (-1 / width, before)])
            level = combination([(-one, rise)])
        neurons += [(-ramp.foot, rise), (-ramp.head, level)]
        before = ramp.goal
    return feed_forward(phase, 1, {0: one}, neurons)
