"""Mutual argmax of the similarity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sinkformer.text.methods.linking import linked, mutual, similarities
from sinkformer.text.methods.protocol import EncodedPair, Found


@dataclass(frozen=True)
class Argmax:
    """Links the words that are each other's nearest: few and safe links, at most one for a word.

    The baseline of Jalili Sabet, Dufter, Yvon, Schuetze 2020 ("SimAlign", section 2), with the cost as the distance.
    ``coupling`` is that of the links: a link carries the whole mass of its words. Confidence is 1 - cost, at least 0.
    """

    name = "argmax"
    null = True
    layers = ()
    most_cells = None

    @property
    def settings(self) -> dict[str, Any]:
        """No options."""
        return {}

    def solve(self, pairs: list[EncodedPair]) -> list[Found]:
        """One result for each pair."""
        return [linked(pair, mutual(similarities(pair))) for pair in pairs]
