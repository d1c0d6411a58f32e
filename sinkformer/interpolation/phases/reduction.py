"""Reduction: one functional tells all tokens apart, and carries them to one line."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sinkformer.errors import DatasetError
from sinkformer.interpolation.datasets import Key, SequencePairs
from sinkformer.interpolation.ledger import Entry, entry
from sinkformer.interpolation.rationals import floor_log2, floor_to, power_of_two, rational
from sinkformer.interpolation.vectors import Functional

if TYPE_CHECKING:
    from sinkformer.interpolation.rationals import Rational

_CANDIDATES = 1000
_FEWEST = 8
_ENTRIES = 20_000_000  # of the table of all candidates on all tokens
_FINALISTS = 64
_ROUNDS = 40


@dataclass(frozen=True, eq=False)
class Line:
    """All tokens on one line.

    Attributes:
        functional: U, with ``t = <U, x> + offset``.
        offset: of the line.
        tokens: ``t`` of every token, for every sequence in the order of its tokens.
        unit: length of the line's unit: all ``t`` lie within 17/16 units.
    """

    functional: Functional
    offset: Rational
    tokens: list[list[Rational]]
    unit: Rational


def reduce_to_line(
    pairs: SequencePairs, bottom: Rational, unit: Rational, start: Rational, seed: int
) -> tuple[Line, Entry]:
    """A functional ``<a, .>`` with integer entries that is injective on all tokens, scaled to a box.

    Every t lies in ``bottom + unit * [start, start + 17/16)``, and they fill at least half a unit; equal tokens of different
    sequences stay equal.

    Args:
        pairs: the data.
        bottom: of the box.
        unit: its length.
        start: where it starts, in units, a multiple of 1/16.
        seed: of the candidates.

    Raises:
        DatasetError: no functional was found that tells the tokens apart; this has not been seen.
    """
    for weights in _functionals(pairs, seed):
        values = [tokens.dot(weights) for tokens in pairs.X]
        gap = _smallest_gap(pairs, values)
        if gap is not None:
            break
    else:
        raise DatasetError(
            f"expected a functional that tells all tokens apart, received none in {_ROUNDS} rounds of candidates with ever "
            "larger integer entries; give another seed"
        )
    lowest, highest = min(map(min, values)), max(map(max, values))
    scale = power_of_two(-1 - floor_log2(highest - lowest)) if highest > lowest else rational(1)
    shift = start - floor_to(scale * lowest, rational(1, 16))  # the lowest t within 1/16 above the start
    factor, offset = unit * scale, unit * shift + bottom
    line = Line(
        {i: factor * weight for i, weight in enumerate(weights) if weight},
        offset,
        [[factor * value + offset for value in sequence] for sequence in values],
        unit,
    )
    found = entry(
        "reduction",
        0,
        "<a, x> differs for different tokens",
        {"max |a|": max(map(abs, weights)), "s": scale, "offset": shift, "smallest gap": unit * scale * gap},
        "0 < smallest t",
        (rational(0), min(map(min, line.tokens))),
    )
    return line, found


def _functionals(pairs: SequencePairs, seed: int) -> Iterator[list[int]]:
    """Integer functionals, the most promising first; with larger entries from round to round."""
    generator = np.random.default_rng(seed)
    floats = _normalized(pairs)
    starts = np.cumsum([0, *map(len, pairs.X)])
    if pairs.d == 1:
        yield [1]
    count = min(_CANDIDATES, max(_FEWEST, _ENTRIES // pairs.M))
    candidates = np.zeros((count, pairs.d), dtype=object)
    for _ in range(_ROUNDS):  # one more digit to the base 8 in every round
        candidates = 8 * candidates + generator.integers(-3, 4, candidates.shape)
        for k in _ranked(candidates.astype(np.float64), floats, starts, pairs):
            yield candidates[k].tolist()


def _normalized(pairs: SequencePairs) -> np.ndarray:
    """All tokens, with coordinates of at most one, as floats: only good for guessing."""
    floats = np.concatenate([tokens.floats for tokens in pairs.X])
    finite = np.where(np.isfinite(floats), floats, np.sign(floats) * np.finfo(np.float64).max)
    largest = np.abs(finite).max()
    return finite / largest if largest > 0 else finite


def _ranked(candidates: np.ndarray, floats: np.ndarray, starts: np.ndarray, pairs: SequencePairs) -> list[int]:
    """Candidates in the order of the gap they will leave after the separation, as far as floats can tell."""
    values = floats @ candidates.T
    values -= values.min(0)
    values /= np.maximum(values.max(0), np.finfo(np.float64).tiny)
    ratios = _separations(values, starts)
    order = np.argsort(-ratios, kind="stable")[:_FINALISTS]
    scores = [ratios[k] * _cut_gap(values[:, k], starts, pairs) for k in order]
    return [int(order[k]) for k in np.argsort(-np.array(scores), kind="stable")]


def _separations(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """How strongly the tokens of a sequence may keep apart while the means separate the sequences, for every column."""
    first = starts[:-1]
    means = np.add.reduceat(values, first, 0) / np.diff(starts)[:, None]
    order = np.argsort(means, 0)
    means = np.take_along_axis(means, order, 0)
    top = np.take_along_axis(np.maximum.reduceat(values, first, 0), order, 0)
    low = np.take_along_axis(np.minimum.reduceat(values, first, 0), order, 0)
    overlap = np.maximum(top[:-1] - low[1:], np.finfo(np.float64).tiny)
    with np.errstate(over="ignore"):
        return np.minimum(1.0, np.diff(means, axis=0) / overlap).min(0, initial=1.0)


def _cut_gap(t: np.ndarray, starts: np.ndarray, pairs: SequencePairs) -> float:
    """The narrowest gap within a sequence at which it is cut into its groups."""
    narrowest = 1.0
    for j, target in enumerate(pairs.Y):
        if len(target) > 1:
            gaps = np.diff(np.sort(t[starts[j] : starts[j + 1]]))
            narrowest = min(narrowest, float(np.sort(gaps)[len(gaps) - len(target) + 1]))
    return narrowest


def _smallest_gap(pairs: SequencePairs, values: list[list[Rational]]) -> Rational | None:
    """Smallest distance between the values of different tokens; None where two share a value."""
    seen: dict[Rational, Key] = {}
    for tokens, sequence in zip(pairs.X, values, strict=True):
        for key, value in zip(tokens.keys, sequence, strict=True):
            if seen.setdefault(value, key) != key:
                return None
    order = sorted(seen)
    return min((b - a for a, b in itertools.pairwise(order)), default=rational(1))
