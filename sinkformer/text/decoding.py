"""From a coupling to links, and the distance of two texts.

Both start from the *matching*: the cheapest set of one-to-one links when each link costs c_ij and each word
left alone costs the null price. It is the limit of the coupling with null atoms for epsilon -> 0. A text with
itself has the diagonal as its matching, repeated words included: the diagonal costs nothing, and ties are
broken by position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import ot
from scipy.optimize import linear_sum_assignment

# Prefers equal positions among matchings of equal cost. Far below any difference that means something, far
# above the rounding of the assignment.
_TIE_BREAK = 1e-6


@dataclass(frozen=True)
class Matching:
    """The cheapest one-to-one links.

    Attributes:
        links: pairs (i, j), in order of i.
        distance: the cost of the links and of the words left alone, summed over words.
        normalized_distance: the same divided by its largest possible value, in [0, 1].
    """

    links: list[tuple[int, int]]
    distance: float
    normalized_distance: float


def match(cost: np.ndarray, shift: np.ndarray, null_price: float) -> Matching:
    """Cheapest matching in which a word may stay alone for ``null_price``.

    Args:
        cost: ``(n, m)``, non-negative, finite.
        shift: squared difference of relative positions, ``(n, m)``, for ties.
        null_price: price of a word without a link.
    """
    n, m = cost.shape
    links: list[tuple[int, int]] = []
    if n and m:
        gain = np.minimum(cost - 2 * null_price, 0.0)
        rows, columns = linear_sum_assignment(np.where(gain < 0, gain + _TIE_BREAK * shift, 0.0))
        links = [(int(i), int(j)) for i, j in zip(rows, columns, strict=True) if gain[i, j] < 0]
    alone = n + m - 2 * len(links)
    distance = float(sum(cost[i, j] for i, j in links)) + null_price * alone
    worst = null_price * (n + m)
    return Matching(links, distance, distance / worst if worst else 0.0)


def assign(cost: np.ndarray, shift: np.ndarray) -> list[tuple[int, int]]:
    """Cheapest matching of the shorter text into the longer one: pairs (i, j), in order of i.

    Args:
        cost: ``(n, m)``.
        shift: squared difference of relative positions, ``(n, m)``, for ties.
    """
    rows, columns = linear_sum_assignment(cost + _TIE_BREAK * shift)
    return [(int(i), int(j)) for i, j in zip(rows, columns, strict=True)]


def match_balanced(cost: np.ndarray, shift: np.ndarray, farthest: float) -> Matching:
    """Cheapest matching of the shorter text into the longer one, and the exact transport cost of uniform weights.

    The transport cost is multiplied by (n + m)/2, so that it is the cost of the matching where n = m.

    Args:
        cost: ``(n, m)`` with n, m >= 1.
        shift: squared difference of relative positions, ``(n, m)``, for ties.
        farthest: the largest possible cost.
    """
    n, m = cost.shape
    links = assign(cost, shift)
    if n == m:
        distance = float(sum(cost[i, j] for i, j in links))
    else:
        plan = np.asarray(ot.emd(np.full(n, 1 / n), np.full(m, 1 / m), cost))
        distance = float((plan * cost).sum()) * (n + m) / 2
    return Matching(links, distance, min(2 * distance / ((n + m) * farthest), 1.0))


def decode(
    matching: list[tuple[int, int]],
    confidence: np.ndarray,
    source: list[str],
    target: list[str],
    threshold: float,
    free: np.ndarray,
) -> list[tuple[int, int]]:
    """Links of a coupling, in order.

    A pair of the matching is a link if the coupling gives it, counting all copies of the same word as one, at
    least ``threshold``: copies share their mass, and only the matching knows which copy is which. Any other
    pair is a link if its own confidence reaches the threshold and neither of its words is matched with an
    equal word.

    Args:
        matching: pairs (i, j) of a one-to-one matching.
        confidence: ``(n, m)``, fraction of a word's mass.
        source: n spellings, equal for words that count as the same.
        target: m spellings.
        threshold: in (0, 1].
        free: ``(n, m)``, pairs that cost nothing. Matched, they are links whatever the threshold, so that a text
            with itself has the diagonal for all settings.
    """
    n, m = confidence.shape
    if not n or not m:
        return []
    source_ids = {word: k for k, word in enumerate(dict.fromkeys(source))}
    target_ids = {word: k for k, word in enumerate(dict.fromkeys(target))}
    row_of = np.array([source_ids[word] for word in source])
    column_of = np.array([target_ids[word] for word in target])
    by_target = np.zeros((n, len(target_ids)))
    np.add.at(by_target.T, column_of, confidence.T)
    by_source = np.zeros((len(source_ids), m))
    np.add.at(by_source, row_of, confidence)

    links, settled_rows, settled_columns = set(), np.zeros(n, bool), np.zeros(m, bool)
    for i, j in matching:
        if free[i, j] or max(by_target[i, column_of[j]], by_source[row_of[i], j]) >= threshold:
            links.add((i, j))
        if source[i] == target[j]:
            settled_rows[i] = settled_columns[j] = True
    others = (confidence >= threshold) & ~settled_rows[:, None] & ~settled_columns
    links.update((int(i), int(j)) for i, j in zip(*np.nonzero(others), strict=True))
    return sorted(links)
