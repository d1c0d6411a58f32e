"""Entropic transport that pays for mass it does not carry."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sinkformer.text.methods.checks import checked_epsilon, checked_price, checked_threshold
from sinkformer.text.methods.protocol import EncodedPair, Found
from sinkformer.text.methods.solving import completed, found, solve_ragged


@dataclass(frozen=True)
class Unbalanced:
    """Entropic transport with marginals that are wished for, not required: KL penalties of strength ``reach``.

    Minimises <C, P> + epsilon KL(P | a (x) b) + reach KL(P 1 | a) + reach KL(P^T 1 | b), every word of weight 1/(n + m)
    (Chizat, Peyre, Schmitzer, Vialard 2018; for words: Arase, Bao, Yokoi 2023). A word may carry less than its weight,
    which is then said to be with the null atom, or more, if several words are near. The atoms of ``coupling`` are the words
    and a null atom on each side, which no word is coupled with: it keeps the weights of words equal on both sides.
    Confidence is the share of the word's mass that moves along a link, at most 1.

    Args:
        epsilon: strength of the entropy, in units of the cost, in [1e-6, 1e6].
        threshold: least share of a word's mass for a link, in (0, 1], see ``decoding.decode``.
        reach: price of a unit of mass that is not carried, in (0, 1e6]; words farther apart than twice that are not matched.

    Raises:
        ConfigError: a value outside its range.
    """

    epsilon: float = 0.05
    threshold: float = 0.3
    reach: float = 0.6

    name = "unbalanced"
    null = True
    layers = ()
    most_cells = None

    def __post_init__(self):
        """Check the options."""
        object.__setattr__(self, "epsilon", checked_epsilon(self.epsilon))
        object.__setattr__(self, "threshold", checked_threshold(self.threshold))
        object.__setattr__(self, "reach", checked_price("reach", self.reach))

    @property
    def settings(self) -> dict[str, Any]:
        """The options."""
        return asdict(self)

    def solve(self, pairs: list[EncodedPair]) -> list[Found]:
        """One result for each pair."""
        sources, targets = zip(*(completed(pair) for pair in pairs), strict=True)
        couplings = solve_ragged(
            sources,
            targets,
            [_apart(pair.cost) for pair in pairs],
            self.epsilon,
            tau=self.reach / (self.reach + self.epsilon),
        )
        return [self._found(pair, coupling) for pair, coupling in zip(pairs, couplings, strict=True)]

    def _found(self, pair: EncodedPair, coupling: Any) -> Found:
        n, m = pair.cost.shape
        plan, weight = coupling.to_dense()[:n, :m], 1 / (n + m)
        return found(
            pair,
            coupling,
            plan,
            ((weight - plan.sum(1)).clamp(min=0.0), (weight - plan.sum(0)).clamp(min=0.0)),
            scale=n + m,
            # In the limit of no entropy a word alone costs ``reach``.
            matching=pair.matching(self.reach).links,
            threshold=self.threshold,
        )


def _apart(cost: Tensor) -> Tensor:
    """Costs ``(n + 1, m + 1)`` that keep words and null atoms apart."""
    n, m = cost.shape
    full = cost.new_full((n + 1, m + 1), torch.inf)
    full[:n, :m] = cost
    full[n, m] = 0.0
    return full
