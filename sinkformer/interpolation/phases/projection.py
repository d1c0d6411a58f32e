"""Projection: the leaders come back to the line, above all targets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sinkformer.interpolation.blocks import Block, feed_forward
from sinkformer.interpolation.datasets import SequencePairs
from sinkformer.interpolation.ledger import Entry, entry
from sinkformer.interpolation.phases.leaders import Places
from sinkformer.interpolation.rationals import rational
from sinkformer.interpolation.vectors import Row, vector

if TYPE_CHECKING:
    from sinkformer.interpolation.rationals import Rational


@dataclass(frozen=True, eq=False)
class Stop:
    """A point of the line and the target of what stands there."""

    t: Rational
    target: Row


def ceiling(pairs: SequencePairs) -> Rational:
    """The lowest multiple of a quarter of the scale that is above all first coordinates of targets, and not negative.

    What stands on the line stands above it, and what has arrived below. Nearness spares digits: a target is reached from there.
    """
    highest, step = max(y.largest_first for y in pairs.Y), pairs.scale / 4
    return max(step * ((highest / step).floor() + 1), rational(0))


def project(pairs: SequencePairs, places: Places) -> tuple[Block, list[Stop], Rational, Entry]:
    """One block: ``x -> c (x_0 + offset) e_0``, all of it above ``ceiling + scale / 8``.

    Returns:
        ``(block, stops, gap, entry)``: no two stops are nearer than the gap, a power of two.
    """
    scale, top = pairs.scale, ceiling(pairs)
    factor = scale / (4 * places.base)
    offset = top / factor + places.base
    block = feed_forward("projection", 0, {0: rational(1)}, [(offset, vector(factor))])
    stops = [
        Stop(factor * (x + offset), Row("Y", j, k))
        for j, positions in enumerate(places.positions)
        for k, (x, _) in enumerate(positions)
    ]
    gap = factor * places.lattice
    lowest = min(stop.t for stop in stops)
    order = sorted(stop.t for stop in stops)
    narrowest = min((b - a for a, b in itertools.pairwise(order)), default=gap)
    found = entry(
        "projection",
        1,
        f"neighbours at least G apart: {'yes' if narrowest >= gap else 'no'}",
        {"factor": factor, "offset": offset, "G": gap},
        "ceiling of the targets < lowest stop - 3 G / 4",
        (top, lowest - 3 * gap / 4),
    )
    return block, stops, gap, found
