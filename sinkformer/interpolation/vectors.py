"""Exact vectors: linear combinations of unit vectors and of the tokens of the data.

A network of the construction moves a token from a source to a target by way of two coordinates. Written as combinations
of ``e_0, e_1`` and of whole tokens of the data, its vectors have a few terms in any dimension, and the arithmetic on them is
exact: equal combinations are equal vectors. Where two combinations differ, their coordinates decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from sinkformer.interpolation.datasets import SequencePairs, Tokens
from sinkformer.interpolation.rationals import fraction, rational

if TYPE_CHECKING:
    from sinkformer.interpolation.rationals import Rational


class Row(NamedTuple):
    """A token of the data."""

    side: str
    sequence: int
    token: int


Vector = Mapping["int | Row", "Rational"]
"""Coefficients of unit vectors, by the number of the coordinate, and of tokens of the data. No coefficient is zero."""

Functional = Mapping[int, "Rational"]
"""Coefficients of the coordinates. None is zero."""


def combination(terms: Iterable[tuple[Rational, Vector]]) -> Vector:
    """Sum of multiples of vectors."""
    total: dict[int | Row, Rational] = {}
    for factor, vector in terms:
        if factor != 0:
            for basis, coefficient in vector.items():
                total[basis] = total[basis] + factor * coefficient if basis in total else factor * coefficient
    return {basis: coefficient for basis, coefficient in total.items() if coefficient != 0}


def vector(*coordinates: Rational) -> Vector:
    """The vector with these first coordinates, and zeros after them."""
    return {i: value for i, value in enumerate(coordinates) if value != 0}


class Space:
    """R^d with the tokens of a data set: evaluates functionals on vectors, and vectors in coordinates."""

    def __init__(self, pairs: SequencePairs):
        self.pairs = pairs
        self._values: tuple[Functional, dict[tuple[str, int], list[Rational]]] | None = None
        self._coordinates: dict[tuple[Row, int], Rational] = {}

    def tokens(self, row: Row) -> Tokens:
        """The sequence a row stands in."""
        return (self.pairs.X if row.side == "X" else self.pairs.Y)[row.sequence]

    def value(self, functional: Functional, x: Vector) -> Rational:
        """``<functional, x>``."""
        total = rational(0)
        for basis, coefficient in x.items():
            part = functional.get(basis) if isinstance(basis, int) else self._row_value(functional, basis)
            if part is not None:
                total += coefficient * part
        return total

    def coordinates(self, x: Vector) -> Vector:
        """The same vector as a combination of unit vectors only."""
        terms: list[tuple[Rational, Vector]] = []
        for basis, coefficient in x.items():
            unit: Vector = {basis: rational(1)} if isinstance(basis, int) else self._unit_terms(basis)
            terms.append((coefficient, unit))
        return combination(terms)

    def dense(self, x: Vector) -> tuple[Fraction, ...]:
        """All d coordinates, as fractions."""
        found = self.coordinates(x)
        zero = Fraction(0)
        return tuple(fraction(found[i]) if i in found else zero for i in range(self.pairs.d))

    def _unit_terms(self, row: Row) -> Vector:
        values = map(rational, self.tokens(row).row(row.token))
        return {i: value for i, value in enumerate(values) if value != 0}

    def _row_value(self, functional: Functional, row: Row) -> Rational:
        if len(functional) <= 2:
            total = rational(0)
            for i, weight in functional.items():
                total += weight * self._coordinate(row, i)
            return total
        if self._values is None or self._values[0] is not functional:
            self._values = (functional, {})
        known, place = self._values[1], (row.side, row.sequence)
        if place not in known:
            scale, weights = integers(functional, self.pairs.d)
            known[place] = [scale * value for value in self.tokens(row).dot(weights)]
        return known[place][row.token]

    def _coordinate(self, row: Row, i: int) -> Rational:
        if (row, i) not in self._coordinates:
            self._coordinates[row, i] = self.tokens(row).coordinate(row.token, i)
        return self._coordinates[row, i]


def integers(functional: Functional, d: int) -> tuple[Rational, list[int]]:
    """A factor and integer weights, with functional = factor * weights."""
    below = math.lcm(*(int(value.q) for value in functional.values()))
    weights = [0] * d
    for i, value in functional.items():
        weights[i] = int(value.p) * (below // int(value.q))
    return rational(1, below), weights
