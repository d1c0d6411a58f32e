"""Collapse (phase 3): one attention layer carries every token of a sequence to one of its leaders."""

from __future__ import annotations

from heapq import nlargest
from typing import TYPE_CHECKING

from sinkformer.interpolation.blocks import Block
from sinkformer.interpolation.ledger import Entry, entry
from sinkformer.interpolation.phases.leaders import Places
from sinkformer.interpolation.rationals import enclosure, library, rational

if TYPE_CHECKING:
    from sinkformer.interpolation.rationals import Rational

Plane = tuple["Rational", "Rational"]


def collapse(last: Block, tokens: list[list[Rational]], places: Places) -> tuple[Block, Rational | None, Entry]:
    """The last block of the leaders, with the attention ``rho = 0, V = I, A = I``.

    A token on the line has its largest score with the first leader of its sequence; every leader has it with itself.
    With softmax a token i of a sequence of n ends within ``(n - 1) exp(-mu_i / tau) D`` of its leader along the first axis, for
    its margin mu_i and the extent D of the sequence along that axis; at tau* this is a quarter of the lattice, or less.

    Returns:
        ``(block, star, entry)``: star is a rational lower bound of tau* for ``alpha = 1``; None if every temperature will do.
    """
    star: Rational | None = None
    smallest: Rational | None = None
    for t, leaders, positions in zip(tokens, places.leaders, places.positions, strict=True):
        points = [(value, rational(0)) for value in t]
        for i, position in zip(leaders, positions, strict=True):
            points[i] = position
        margin = _margin(points)
        if margin is None:
            continue
        smallest = margin if smallest is None else min(smallest, margin)
        extent = max(x for x, _ in points) - min(x for x, _ in points)
        ratio = 4 * (len(points) - 1) * extent / places.lattice
        if ratio > 1:
            bound = margin / enclosure(library().arb(ratio).log())[1]
            star = bound if star is None else min(star, bound)
    one, zero = rational(1), rational(0)
    constants = {"alpha": 1, "tau*": "any" if star is None else star}
    found = entry(
        "collapse",
        0,
        "tokens on the line, first leaders beyond it, the others on a circle behind the origin",
        constants,
        "0 < largest score - second largest",
        None if smallest is None else (zero, smallest),
    )
    return last.attending(zero, one, one, {}, {}), star, found


def _margin(points: list[Plane]) -> Rational | None:
    """Smallest margin of a token; None for a single token. On the line the first coordinates alone decide."""
    if len(points) == 1:
        return None
    highest, second = _two_largest([x for x, _ in points])
    found: list[Rational] = []
    for x, y in points:
        if y == 0:
            found.append(x * (highest - second))
        else:
            first, next_best = _two_largest([x * a + y * b for a, b in points])
            found.append(first - next_best)
    return min(found)


def _two_largest(values: list[Rational]) -> tuple[Rational, Rational]:
    first, second = nlargest(2, values)
    return first, second
