"""The iterated mutual argmax."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sinkformer.errors import ConfigError
from sinkformer.text.methods.checks import checked_number
from sinkformer.text.methods.linking import linked, mutual, similarities
from sinkformer.text.methods.protocol import EncodedPair, Found


@dataclass(frozen=True)
class IterMax:
    """Repeats the mutual argmax among the pairs that are not yet linked on both sides: more links, less safe ones.

    Jalili Sabet, Dufter, Yvon, Schuetze 2020, "SimAlign: High Quality Word Alignments without Parallel Training Data using
    Static and Contextualized Embeddings", section 2.2, and as in the authors' program: in each further round a pair with
    one linked word has its similarity multiplied by ``discount``, a pair with two takes no part; it ends when all words of
    a side are linked, and texts of one or two words have one round. Coupling and confidence are those of ``Argmax``.

    Args:
        rounds: most rounds, >= 1; one is ``Argmax``.
        discount: in [0, 1].

    Raises:
        ConfigError: a value outside its range.
    """

    rounds: int = 2
    discount: float = 0.9

    name = "itermax"
    null = True
    layers = ()
    most_cells = None

    def __post_init__(self):
        """Check the options."""
        if isinstance(self.rounds, bool) or not isinstance(self.rounds, int) or self.rounds < 1:
            raise ConfigError(f"expected rounds as a whole number >= 1, received {self.rounds!r}")
        object.__setattr__(self, "discount", checked_number("discount", self.discount, least=0.0, most=1.0))

    @property
    def settings(self) -> dict[str, Any]:
        """The options."""
        return asdict(self)

    def solve(self, pairs: list[EncodedPair]) -> list[Found]:
        """One result for each pair."""
        return [linked(pair, self._links(similarities(pair))) for pair in pairs]

    def _links(self, similarity: np.ndarray) -> np.ndarray:
        links = mutual(similarity)
        if min(similarity.shape) <= 2:
            return links
        for _ in range(1, self.rounds):
            rows, columns = links.any(1, keepdims=True), links.any(0, keepdims=True)
            if rows.all() or columns.all():
                break
            # Similarities can be negative, by the price of places; a discount lowers those too.
            lower = similarity * np.where(similarity > 0, self.discount, 2 - self.discount)
            rest = np.where(rows & columns, -np.inf, np.where(rows | columns, lower, similarity))
            more = mutual(rest)
            if not more.any():
                break
            links = links | more
        return links
