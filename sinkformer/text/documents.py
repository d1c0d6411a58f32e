"""Texts as measures: which atoms, which weights, and what it costs to move one onto the other.

Every word is an atom of the same weight. To let words stay unmatched, each side gets a null atom that can
take all the words of the other side: with n source and m target words, a word weighs 1/(n + m), the source
null m/(n + m), the target null n/(n + m). A text without words is the null atom alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sinkformer.errors import ShapeError
from sinkformer.measures import Measure
from sinkformer.text.tokens import surface

# Largest value of 1 - cos. A word without a vector is this far from every word but its own spelling.
FARTHEST = 2.0


def unit_vectors(vectors: Tensor, centre: Tensor | None) -> Tensor:
    """Centred vectors of length one in float64, shape ``(n, d)``; rows of zeros (unknown words) stay zero."""
    x = vectors.double()
    known = (x != 0).any(-1, keepdim=True)
    if centre is not None and len(x):
        if centre.shape != x.shape[1:]:
            raise ShapeError(
                f"expected a centre of {x.shape[1]} coordinates, as the word vectors, received {len(centre)}"
            )
        x = x - centre.to(x)
    # Scaled first: squares of very large or very small entries leave the range of float64, and the direction with them.
    x = torch.where(known, x, 0.0)
    largest = x.abs().amax(-1, keepdim=True) if x.shape[-1] else x
    return torch.nn.functional.normalize(x / torch.where(largest > 0, largest, 1.0), dim=-1)


def with_null(vectors: Tensor, others: int) -> Measure:
    """Measure of a text of n words facing ``others`` words: n + 1 atoms, the last one the null atom."""
    n = len(vectors)
    if not n:  # the null atom carries everything, whatever it faces
        return Measure.uniform(vectors.new_zeros(1, max(vectors.shape[-1], 1)))
    return Measure.uniform(vectors).with_null(others / (n + others))


def word_costs(source: tuple[str, ...], target: tuple[str, ...], x: Tensor, y: Tensor, distortion: float) -> Tensor:
    """Cost of every word pair, ``(n, m)`` float64: 1 - cos(x_i, y_j) + distortion (t_i - s_j)^2.

    1 - cos is taken as half the squared distance of the unit vectors, from differences, so that equal vectors
    cost exactly zero. t_i = (i + 1/2)/n and s_j = (j + 1/2)/m are relative positions.

    Args:
        source: the n source words.
        target: the m target words.
        x: unit vectors ``(n, d)``; zero rows are words without a vector.
        y: unit vectors ``(m, d)``.
        distortion: price of a change of place.
    """
    n, m = len(x), len(y)
    if not n or not m:
        return x.new_zeros(n, m)
    cost = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square() / 2
    differ = unlike(source, target, x, y)
    if differ is not None:
        cost = torch.where(unknown(x, y), torch.where(differ, FARTHEST, 0.0), cost)
    if distortion:
        cost = cost + distortion * squared_shift(n, m, x.device)
    return cost


def unlike(source: tuple[str, ...], target: tuple[str, ...], x: Tensor, y: Tensor) -> Tensor | None:
    """Pairs that nothing links, bool ``(n, m)``: a word without a vector, and a word of another spelling.

    None if all words have vectors.
    """
    alone = unknown(x, y)
    if not bool(alone.any()):
        return None
    spelling = {word: k for k, word in enumerate(dict.fromkeys(map(surface, source + target)))}
    left = torch.tensor([spelling[surface(word)] for word in source], device=x.device)
    right = torch.tensor([spelling[surface(word)] for word in target], device=x.device)
    return alone & (left.unsqueeze(-1) != right)


def unknown(x: Tensor, y: Tensor) -> Tensor:
    """Pairs of which a word has no vector, bool ``(n, m)``."""
    return (x == 0).all(-1).unsqueeze(-1) | (y == 0).all(-1)


def squared_shift(n: int, m: int, device: torch.device | str) -> Tensor:
    """(t_i - s_j)^2 for relative positions, ``(n, m)`` float64; exactly zero on the diagonal if n = m."""
    t = (torch.arange(n, dtype=torch.float64, device=device) + 0.5) / n
    s = (torch.arange(m, dtype=torch.float64, device=device) + 0.5) / m
    return (t.unsqueeze(-1) - s).square()


def null_costs(cost: Tensor, null_price: float) -> Tensor:
    """Costs with the null atoms, ``(n + 1, m + 1)``: ``null_price`` for a word left alone, nothing for null to null."""
    n, m = cost.shape
    full = cost.new_full((n + 1, m + 1), null_price)
    full[:n, :m] = cost
    full[n, m] = 0.0
    return full
