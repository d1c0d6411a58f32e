"""A slow second opinion on the networks of exact interpolation: dense, entry by entry, in ``fractions.Fraction``.

It reads the matrices of the blocks and the data, and shares no code with the library. Hardmax, and any softmax of equal
scores, is evaluated exactly. Another softmax has irrational weights; they are replaced by fractions that are nearly theirs, and
everything after is exact for these. A network that maps sets to sets by constant pieces does so for all nearby weights,
literally; one that does not gives itself away, the more so as two different roundings are tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

Point = tuple[Fraction, ...]

_DIGITS = 60
_CONTEXT = Context(prec=_DIGITS)
_SMALLEST = Fraction(-3000)  # no weight is taken below exp(-3000): nearly the same, and never zero


def points(sequence: Iterable[Iterable[Any]]) -> list[Point]:
    """The tokens of nested lists or arrays of floats, ints, fractions or text."""
    rows: Any = sequence.tolist() if hasattr(sequence, "tolist") else sequence
    return [tuple(Fraction(entry) for entry in row) for row in rows]


def inner(x: Sequence[Fraction], y: Sequence[Fraction]) -> Fraction:
    return sum((a * b for a, b in zip(x, y, strict=True)), Fraction(0))


def feed_forward(block: Any, x: Point) -> Point:
    hidden = [max(Fraction(0), inner(row, x) + bias) for row, bias in zip(block.U, block.b, strict=True)]
    return tuple(block.eta * value + inner(row, hidden) for value, row in zip(x, block.W, strict=True))


def scores(block: Any, x: Point, sequence: Sequence[Point]) -> list[Fraction]:
    """``<A x, y>`` for all y, with ``A = alpha I + p q^T``."""
    along = inner(block.q, x)
    image = [block.alpha * value + left * along for value, left in zip(x, block.p, strict=True)]
    return [inner(image, y) for y in sequence]


def hardmax(values: Sequence[Fraction]) -> list[Fraction]:
    top = max(values)
    winners = sum(value == top for value in values)
    return [Fraction(int(value == top), winners) for value in values]


def softmax(values: Sequence[Fraction], tau: Fraction, tilt: int) -> list[Fraction]:
    """Weights to 60 digits; the last digits of one of them moved by ``tilt``."""
    top = max(values)
    if all(value == top for value in values):
        return [Fraction(1, len(values))] * len(values)
    raw = [Fraction(1) if value == top else _exponential((value - top) / tau) for value in values]
    first = next(k for k, value in enumerate(values) if value != top)
    raw[first] *= 1 + tilt * Fraction(1, 10**40)
    total = sum(raw)
    return [weight / total for weight in raw]


def _exponential(value: Fraction) -> Fraction:
    value = max(value, _SMALLEST)
    return Fraction(_CONTEXT.exp(_CONTEXT.divide(Decimal(value.numerator), Decimal(value.denominator))))


def attention(block: Any, sequence: Sequence[Point], tilt: int) -> list[Point]:
    found: list[Point] = []
    for x in sequence:
        values = scores(block, x, sequence)
        weights = hardmax(values) if block.kind == "hardmax" else softmax(values, block.tau, tilt)
        mean = [sum((w * y[i] for w, y in zip(weights, sequence, strict=True)), Fraction(0)) for i in range(len(x))]
        found.append(tuple(block.rho * a + block.beta * b for a, b in zip(x, mean, strict=True)))
    return found


def transform(blocks: Iterable[Any], sequence: Sequence[Point], tilt: int = 0) -> list[Point]:
    """Where the tokens of one sequence end."""
    tokens = list(sequence)
    for block in blocks:
        tokens = [feed_forward(block, x) for x in tokens]
        if block.beta != 0 or block.rho != 1:
            tokens = attention(block, tokens, tilt)
    return tokens


def interpolates(blocks: Iterable[Any], X: Iterable[Any], Y: Iterable[Any]) -> bool:
    """Whether every sequence ends at its targets, as sets, literally."""
    written = list(blocks)
    tilts = (0,) if all(block.kind == "hardmax" for block in written) else (0, 1)
    return all(
        set(transform(written, points(x), tilt)) == set(points(y)) for tilt in tilts for x, y in zip(X, Y, strict=True)
    )
