"""The numbers a page carries: confidences, and the threshold up to which each pair is a link."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sinkformer.text.tokens import surface

if TYPE_CHECKING:
    from sinkformer.text.alignments import Alignment

# Pairs of less confidence are not in the page, and the slider ends here.
FLOOR = 0.05
_DIGITS = 3


@dataclass(frozen=True)
class Levels:
    """What a page knows of an alignment besides its words.

    Attributes:
        threshold: where the slider stands at first; the links are then those of the alignment.
        floor: where the slider ends.
        pairs: ``(i, j, confidence, level)``, sorted: a link while the threshold is at most ``level``.
        alone: for each word of both texts the share of its mass without a partner.
    """

    threshold: float
    floor: float
    pairs: list[tuple[int, int, float, float]]
    alone: tuple[list[float], list[float]]

    def to_json(self) -> str:
        """Numbers only, in the fewest characters; no text of the user's is among them."""
        fields = {
            "threshold": self.threshold,
            # Most pairs have their own confidence as level.
            "pairs": [[i, j, c] if c == level else [i, j, c, level] for i, j, c, level in self.pairs],
            "alone": self.alone,
        }
        return json.dumps(fields, separators=(",", ":"), allow_nan=False)


def levels(alignment: Alignment) -> Levels:
    """The numbers of one alignment.

    A link stays a link until the threshold exceeds its confidence, and any other pair becomes one once the threshold falls to
    its confidence. For confidences that are shares of mass, copies of two equal words count together as in
    ``decoding.decode``, and a word that is linked with an equal word has no other link. At the threshold of the alignment, or
    zero if its method has none, these are its links exactly.
    """
    n, m = alignment.plan.shape
    full = alignment.with_nulls().cpu().numpy().clip(0.0, 1.0)
    confidence = alignment.confidences.cpu().numpy()
    threshold = float(alignment.settings.get("threshold", 0.0))
    floor = min(FLOOR, threshold)
    spelled = [[surface(w).casefold() for w in side.words] for side in (alignment.source, alignment.target)]
    # Copies of a word share its mass, and what is learned tells them apart.
    shared = alignment.settings["method"] != "trained"
    equal = {(i, j) for i, j in alignment.links if shared and spelled[0][i] == spelled[1][j]}
    rows, columns = {i for i, _ in equal}, {j for _, j in equal}
    links = dict(zip(alignment.links, alignment.confidence, strict=True))
    shares = _copies(confidence, spelled[0], spelled[1], equal)
    pairs = []
    for (i, j), confidence_of_link in links.items():
        own = round(confidence_of_link, _DIGITS)
        pairs.append((i, j, own, max(threshold, round(shares.get((i, j), own), _DIGITS))))
    for i, j in zip(*np.nonzero((confidence >= floor) & (confidence < threshold)), strict=True):
        if (i, j) not in links and i not in rows and j not in columns:
            own = round(float(confidence[i, j]), _DIGITS)
            # Rounding must not make it a link.
            pairs.append((int(i), int(j), own, min(own, threshold - 10**-_DIGITS)))
    pairs.sort()
    alone = [[round(float(x), _DIGITS) for x in side] for side in (full[:n, m], full[n, :m])]
    return Levels(threshold, floor, pairs, (alone[0], alone[1]))


def _copies(
    confidence: np.ndarray, source: list[str], target: list[str], equal: set[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    """Share of the mass of the linked pairs of equal words, all copies of the word counted; at most 1."""
    here, there = _places(source), _places(target)
    out = {}
    for i, j in equal:
        rows, columns = here[source[i]], there[target[j]]
        if len(rows) > 1 or len(columns) > 1:
            out[i, j] = min(float(max(confidence[i, columns].sum(), confidence[rows, j].sum())), 1.0)
    return out


def _places(words: list[str]) -> dict[str, list[int]]:
    out = defaultdict(list)
    for k, word in enumerate(words):
        out[word].append(k)
    return out
