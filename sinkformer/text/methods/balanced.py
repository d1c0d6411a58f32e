"""Entropic transport in which every word has to go somewhere."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sinkformer.measures import Measure
from sinkformer.text import decoding
from sinkformer.text.methods.checks import checked_epsilon, checked_threshold
from sinkformer.text.methods.protocol import EncodedPair, Found
from sinkformer.text.methods.solving import found, solve_ragged


@dataclass(frozen=True)
class Balanced:
    """The entropic coupling of the words alone, with uniform weights 1/n and 1/m: no word may stay alone.

    Right where both texts say the same thing. A word without a counterpart goes to words it does not belong to. Confidence
    is the larger of the shares of the two words' masses.

    Args:
        epsilon: strength of the entropy, in units of the cost, in [1e-6, 1e6].
        threshold: least share of a word's mass for a link, in (0, 1], see ``decoding.decode``.

    Raises:
        ConfigError: a value outside its range.
    """

    epsilon: float = 0.05
    threshold: float = 0.3

    name = "balanced"
    null = False
    layers = ()
    most_cells = None

    def __post_init__(self):
        """Check the options."""
        object.__setattr__(self, "epsilon", checked_epsilon(self.epsilon))
        object.__setattr__(self, "threshold", checked_threshold(self.threshold))

    @property
    def settings(self) -> dict[str, Any]:
        """The options."""
        return asdict(self)

    def solve(self, pairs: list[EncodedPair]) -> list[Found]:
        """One result for each pair."""
        sources, targets = ([Measure.uniform(pair.vectors[side]) for pair in pairs] for side in (0, 1))
        couplings = solve_ragged(sources, targets, [pair.cost for pair in pairs], self.epsilon)
        return [self._found(pair, coupling) for pair, coupling in zip(pairs, couplings, strict=True)]

    def _found(self, pair: EncodedPair, coupling: Any) -> Found:
        n, m = pair.cost.shape
        plan = coupling.to_dense()
        return found(
            pair,
            coupling,
            plan,
            (plan.new_zeros(n), plan.new_zeros(m)),
            scale=max(n, m),
            matching=decoding.assign(pair.costs, pair.shift),
            threshold=self.threshold,
        )
