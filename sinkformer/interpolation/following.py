"""All tokens of a data set, followed through a network exactly. Nothing here is a float.

The arithmetic is rational. A softmax with scores that are not all equal has irrational weights: after it a token is a box, and
after the next projection to a line an affine form ``p + theta q``, with exact p and q and theta in an interval. Every later
step is exact in p and q as long as the interval lies within one affine piece of the step; a flat piece makes q vanish. Plain
interval arithmetic would not do: it would forget that the two sides of a ramp depend on the same theta.

The evaluation is driven by events: the tokens that a block moves are found in a sorted index, and no other is touched.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sinkformer.interpolation.blocks import Block, Kind
from sinkformer.interpolation.datasets import SequencePairs
from sinkformer.interpolation.rationals import enclosure, library, power_of_two, rational
from sinkformer.interpolation.vectors import Functional, Row, Space, Vector, combination

if TYPE_CHECKING:
    from sinkformer.interpolation.rationals import Ball, Rational

Interval = tuple["Rational", "Rational"]


class UndecidedError(Exception):
    """The enclosures are too wide to say where a token goes."""


@dataclass(frozen=True, eq=False)
class Form:
    """A token ``point + theta direction``, with theta in an interval; exact if the direction is empty."""

    point: Vector
    direction: Vector = field(default_factory=dict)
    theta: Interval | None = None

    @property
    def exact(self) -> bool:
        """Whether the token is known exactly."""
        return not self.direction


@dataclass(frozen=True, eq=False)
class Box:
    """A token after a softmax: an interval for each of its coordinates; those that are missing are zero."""

    sides: dict[int | Row, Interval]


Token = Form | Box


class Following:
    """The tokens of all sequences, and where they are.

    Args:
        pairs: the data; its sources are the tokens.
        kind: of the attention.
        tau: temperature of the softmax.
        bits: precision to which a softmax is enclosed; the caller sets that of flint's context.
        sharp: enclose every weight of a softmax; or only bound all weights but the largest, which is as good at low
            temperatures and much faster.
    """

    def __init__(self, pairs: SequencePairs, kind: Kind, tau: Rational, bits: int, sharp: bool = True):
        self.kind, self.tau, self.bits, self.sharp = kind, tau, bits, sharp
        self.space = Space(pairs)
        self.tokens: list[Token] = []
        self.sequences: list[range] = []
        for j, x in enumerate(pairs.X):
            start = len(self.tokens)
            self.tokens += [Form({Row("X", j, i): rational(1)}) for i in range(len(x))]
            self.sequences.append(range(start, len(self.tokens)))
        self.enclosed = False
        self._functional: Functional | None = None
        self._values: list[Interval] = []
        self._index: list[tuple[Rational, int]] = []
        self._widest = rational(0)

    def step(self, block: Block) -> None:
        """One block.

        Raises:
            UndecidedError: an enclosure reaches over a kink, or meets a layer that enclosures cannot pass.
        """
        self._feed_forward(block)
        if block.attends:
            for sequence in self.sequences:
                self._attend(block, sequence)
            self._functional = None

    def place(self, number: int) -> str:
        """A token, in words."""
        j = next(j for j, sequence in enumerate(self.sequences) if number in sequence)
        return f"token {number - self.sequences[j].start} of X[{j}]"

    # -- the feed-forward layer

    def _feed_forward(self, block: Block) -> None:
        active = [piece for piece in block.pieces() if block.eta != 1 or piece[2] or piece[3]]
        if not active:
            return
        if self._functional is None or self._functional != block.functional:
            self._sort(block.functional)
        moved: dict[int, Token] = {}
        for lower, upper, slope, offset in active:
            for number in self._between(lower, upper):
                moved[number] = self._moved(number, block, slope, offset)
        if 8 * len(moved) > len(self.tokens):
            for number, token in moved.items():
                self.tokens[number] = token
            self._functional = None
        else:
            for number, token in moved.items():
                self._replace(number, token)

    def _between(self, lower: Rational | None, upper: Rational | None) -> list[int]:
        """The tokens with ``lower < s <= upper``; at a kink both pieces give the same."""
        index = self._index
        start = 0 if lower is None else bisect_left(index, (lower - self._widest,))
        stop = len(index) if upper is None else bisect_right(index, (upper, len(self.tokens)))
        found = []
        for _, number in index[start:stop]:
            low, high = self._values[number]
            if lower is not None and high <= lower:
                continue
            if (lower is not None and low < lower) or (upper is not None and high > upper and low != upper):
                raise UndecidedError(f"the enclosure of {self.place(number)} reaches over a kink")
            if upper is None or high <= upper:
                found.append(number)
        return found

    def _moved(self, number: int, block: Block, slope: Vector, offset: Vector) -> Token:
        token, one = self.tokens[number], rational(1)
        if isinstance(token, Box):
            if block.eta != 0:
                raise UndecidedError(f"{self.place(number)} is a box before a layer that is no projection")
            return Form(offset, slope, self._values[number]) if slope else Form(offset)
        s = self.space.value(block.functional, token.point)
        point = combination([(block.eta, token.point), (s, slope), (one, offset)])
        if token.exact:
            return Form(point)
        tilt = self.space.value(block.functional, token.direction)
        direction = combination([(block.eta, token.direction), (tilt, slope)])
        return Form(point, direction, token.theta) if direction else Form(point)

    def _sort(self, functional: Functional) -> None:
        self._functional = functional
        self._values = [self._value(token) for token in self.tokens]
        self._widest = max((high - low for low, high in self._values), default=rational(0))
        self._index = sorted((low, number) for number, (low, _) in enumerate(self._values))

    def _replace(self, number: int, token: Token) -> None:
        del self._index[bisect_left(self._index, (self._values[number][0], number))]
        self.tokens[number] = token
        low, high = self._values[number] = self._value(token)
        self._widest = max(self._widest, high - low)
        insort(self._index, (low, number))

    def _value(self, token: Token) -> Interval:
        functional = self._functional
        assert functional is not None
        if isinstance(token, Box):
            return _sum([_times(weight, token.sides[i]) for i, weight in functional.items() if i in token.sides])
        s = self.space.value(functional, token.point)
        if token.theta is None:
            return s, s
        return _sum([(s, s), _times(self.space.value(functional, token.direction), token.theta)])

    # -- the attention layer

    def _attend(self, block: Block, sequence: range) -> None:
        tokens = [self.tokens[number] for number in sequence]
        points = []
        for number, token in zip(sequence, tokens, strict=True):
            if not isinstance(token, Form) or not token.exact:
                raise UndecidedError(f"{self.place(number)} is known by an enclosure only before a second softmax")
            points.append(token.point)
        if block.causal and block.pools:
            after = _prefix_means(block, points)
        elif block.causal:  # to a token, its prefix is the whole sequence
            after = [self._attended(block, points[: i + 1])[-1] for i in range(len(points))]
        else:
            after = self._attended(block, points)
        self.tokens[sequence.start : sequence.stop] = after

    def _attended(self, block: Block, points: list[Vector]) -> list[Token]:
        if block.pools:
            share = rational(1, len(points))
            mean = combination((share, point) for point in points)
            return [Form(combination([(block.rho, x), (block.beta, mean)])) for x in points]
        return self._hardmax(block, points) if self.kind == "hardmax" else self._softmax(block, points)

    def _hardmax(self, block: Block, points: list[Vector]) -> list[Token]:
        score = self._scores(block, points)
        means: dict[tuple, Vector] = {}
        after: list[Token] = []
        for x in points:
            direction = _direction(x)  # the winners depend on it alone
            if direction not in means:
                scores = score(x)
                top = max(scores)
                winners = [y for y, value in zip(points, scores, strict=True) if value == top]
                means[direction] = combination((rational(1, len(winners)), y) for y in winners)
            after.append(Form(combination([(block.rho, x), (block.beta, means[direction])])))
        return after

    def _softmax(self, block: Block, points: list[Vector]) -> list[Token]:
        if len(points) == 1:
            return [Form(combination([(block.rho + block.beta, points[0])]))]
        self.enclosed = True
        flat = [self.space.coordinates(x) for x in points]
        crowd, score = _Crowd(_columns(flat)), self._scores(block, flat)
        leads: dict[tuple, tuple[int, Rational]] = {}
        after: list[Token] = []
        for x in flat:
            direction, size = _direction(x), _size(x)
            if direction not in leads:
                leads[direction] = _lead(score(x), size)
            star, lead = leads[direction]
            share = self._others(lead * size if size else lead, len(flat))
            sides = crowd.weighted(star, self._weights(score(x), star)) if share is None else crowd.within(star, share)
            after.append(Box({i: _mixed(block, x.get(i, rational(0)), side) for i, side in sides.items()}))
        return after

    def _others(self, lead: Rational, count: int) -> Rational | None:
        """A bound of the weights of all but the winner, ``(n - 1) exp(-lead / tau)``; None where they are worth enclosing."""
        arb = library().arb
        others = (-arb(lead / self.tau)).exp() * (count - 1)
        tiny = power_of_two(-2 * self.bits)
        if others < arb(tiny):
            return tiny
        return None if self.sharp else min(enclosure(others)[1], rational(1))

    def _weights(self, scores: list[Rational], star: int) -> list[Ball]:
        arb = library().arb
        return [(-arb((scores[star] - value) / self.tau)).exp() for value in scores]

    def _scores(self, block: Block, points: list[Vector]) -> Callable[[Vector], list[Rational]]:
        """The function of x that gives ``<A x, x_l>`` for all l."""
        keys = [self.space.value(block.p, y) for y in points] if block.p and block.q else []
        columns = _columns([self.space.coordinates(y) for y in points]) if block.alpha != 0 else {}

        def scores(x: Vector) -> list[Rational]:
            query = self.space.value(block.q, x) if keys else rational(0)
            terms = [(query, keys)] if keys else []
            if columns:
                terms += [(block.alpha * value, columns[i]) for i, value in self.space.coordinates(x).items()]
            found = [rational(0)] * len(points)
            for factor, column in terms:
                found = [total + factor * value for total, value in zip(found, column, strict=True)]
            return found

        return scores


def _prefix_means(block: Block, points: list[Vector]) -> list[Token]:
    """``rho x_i + beta (x_1 + ... + x_i) / i``."""
    after: list[Token] = []
    total: Vector = {}
    one = rational(1)
    for i, x in enumerate(points):
        total = combination([(one, total), (one, x)])
        after.append(Form(combination([(block.rho, x), (block.beta / (i + 1), total)])))
    return after


class _Crowd:
    """The points that a softmax averages, by coordinate: ``x_* + sum_l pi_l (x_l - x_*)``, with ``*`` the winner."""

    def __init__(self, columns: dict[int | Row, list[Rational]]):
        self.columns = columns
        self.extents = {i: (min(column), max(column)) for i, column in columns.items()}

    def within(self, star: int, share: Rational) -> dict[int | Row, Interval]:
        """Enclosures if all but the winner weigh ``share`` at most."""
        found: dict[int | Row, Interval] = {}
        for i, (low, high) in self.extents.items():
            centre = self.columns[i][star]
            found[i] = centre + share * (low - centre), centre + share * (high - centre)
        return found

    def weighted(self, star: int, weights: list[Ball]) -> dict[int | Row, Interval]:
        """Enclosures for these weights, up to a factor."""
        arb = library().arb
        whole = sum(weights[1:], weights[0])
        found: dict[int | Row, Interval] = {}
        for i, column in self.columns.items():
            centre, total = column[star], arb(0)
            for weight, value in zip(weights, column, strict=True):
                total = total + weight * arb(value - centre)
            low, high = enclosure(total / whole)
            found[i] = centre + low, centre + high
        return found


def _lead(scores: list[Rational], size: Rational) -> tuple[int, Rational]:
    """The winner, and how far it is ahead, for the query divided by its size."""
    star = max(range(len(scores)), key=scores.__getitem__)
    lead = scores[star] - max(value for k, value in enumerate(scores) if k != star)
    return star, lead / size if size else lead


def _mixed(block: Block, own: Rational, attended: Interval) -> Interval:
    return _sum([(block.rho * own, block.rho * own), _times(block.beta, attended)])


def _columns(points: list[Vector]) -> dict[int | Row, list[Rational]]:
    """The coordinates of all points, by coordinate."""
    zero = rational(0)
    return {i: [x.get(i, zero) for x in points] for i in sorted({i for x in points for i in x})}


def _direction(x: Vector) -> tuple:
    """The same for positive multiples of a vector."""
    if not x:
        return ()
    size = _size(x)
    return tuple((basis, value / size) for basis, value in sorted(x.items(), key=_order))


def _size(x: Vector) -> Rational:
    """The first coefficient, without its sign; zero for the zero vector."""
    return abs(min(x.items(), key=_order)[1]) if x else rational(0)


def _order(item: tuple[int | Row, Rational]) -> tuple:
    return isinstance(item[0], Row), item[0]


def _sum(intervals: Sequence[Interval]) -> Interval:
    low = high = rational(0)
    for a, b in intervals:
        low, high = low + a, high + b
    return low, high


def _times(factor: Rational, interval: Interval) -> Interval:
    low, high = factor * interval[0], factor * interval[1]
    return (low, high) if low <= high else (high, low)
