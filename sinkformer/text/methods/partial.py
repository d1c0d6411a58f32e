"""Entropic transport with null atoms."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sinkformer.text import documents
from sinkformer.text.methods.checks import checked_epsilon, checked_price, checked_threshold
from sinkformer.text.methods.protocol import EncodedPair, Found
from sinkformer.text.methods.solving import completed, found, solve_ragged


@dataclass(frozen=True)
class Partial:
    """The entropic coupling of the two texts, each completed by a null atom that takes what has no partner. The default.

    Confidence is the share of the word's mass that moves along a link.

    Args:
        epsilon: strength of the entropy, in units of the cost, in [1e-6, 1e6]: larger values spread the coupling.
        threshold: least share of a word's mass for a link, in (0, 1], see ``decoding.decode``.
        null_price: what leaving one word alone costs, in (0, 1e6].

    Raises:
        ConfigError: a value outside its range.
    """

    epsilon: float = 0.05
    threshold: float = 0.3
    null_price: float = 0.4

    name = "partial"
    null = True
    layers = ()
    most_cells = None

    def __post_init__(self):
        """Check the options."""
        object.__setattr__(self, "epsilon", checked_epsilon(self.epsilon))
        object.__setattr__(self, "threshold", checked_threshold(self.threshold))
        object.__setattr__(self, "null_price", checked_price("null_price", self.null_price))

    @property
    def settings(self) -> dict[str, Any]:
        """The options."""
        return asdict(self)

    def solve(self, pairs: list[EncodedPair]) -> list[Found]:
        """One result for each pair."""
        sources, targets = zip(*(completed(pair) for pair in pairs), strict=True)
        costs = [documents.null_costs(pair.cost, self.null_price) for pair in pairs]
        couplings = solve_ragged(sources, targets, costs, self.epsilon)
        return [self._found(pair, coupling) for pair, coupling in zip(pairs, couplings, strict=True)]

    def _found(self, pair: EncodedPair, coupling: Any) -> Found:
        n, m = pair.cost.shape
        full = coupling.to_dense()
        return found(
            pair,
            coupling,
            full[:n, :m],
            (full[:n, m], full[n, :m]),
            scale=n + m,
            matching=pair.matching(self.null_price).links,
            threshold=self.threshold,
        )
