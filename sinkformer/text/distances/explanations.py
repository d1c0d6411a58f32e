"""The distance of two texts, word by word."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sinkformer.errors import ConfigError
from sinkformer.text import decoding, documents
from sinkformer.text.aligners import Aligner, TextLike
from sinkformer.text.distances.baselines import packaged_baseline
from sinkformer.text.tokens import Words


@dataclass(frozen=True)
class Contribution:
    """What one matched pair, or one word left alone, adds to a distance.

    Attributes:
        source: index of the source word; None for a target word left alone.
        target: index of the target word; None for a source word left alone.
        cost: its part of the distance, >= 0, in units of the cost.
    """

    source: int | None
    target: int | None
    cost: float


@dataclass(frozen=True)
class Explanation:
    """Why two texts are as far apart as they are.

    Attributes:
        source: words of the first text.
        target: words of the second text.
        distance: cost of the cheapest matching, with the null price for every word left alone, summed over words; equals
            that of ``Alignment``.
        normalized_distance: divided by its largest possible value, in [0, 1].
        contributions: dearest first; their costs sum to ``distance``. Every word is in exactly one of them.
        settings: of the aligner.
    """

    source: Words
    target: Words
    distance: float
    normalized_distance: float
    contributions: tuple[Contribution, ...]
    settings: dict[str, Any]

    @property
    def objection(self) -> str | None:
        """Why there is no ``similarity``; None if there is."""
        return packaged_baseline().objection(self.settings, len(self.source), len(self.target))

    @property
    def similarity(self) -> float | None:
        """1 for identical texts, about 0 for unrelated ones (see ``Baseline``); None if no baseline fits the settings."""
        if self.objection is not None:
            return None
        n, m = len(self.source), len(self.target)
        return packaged_baseline().similarity(self.normalized_distance, n, m, self.settings)

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON: contributions as ``[source, target, cost]`` with null for a word left alone."""
        similarity, objection = self.similarity, self.objection
        return {
            "source": list(self.source.words),
            "target": list(self.target.words),
            "distance": round(self.distance, 6),
            "normalized_distance": round(self.normalized_distance, 6),
            "similarity": None if similarity is None else round(similarity, 6),
            **({} if objection is None else {"no_similarity": objection}),
            "contributions": [[c.source, c.target, round(c.cost, 6)] for c in self.contributions],
            "settings": self.settings,
        }


def explain(aligner: Aligner, a: TextLike, b: TextLike) -> Explanation:
    """The distance of two texts and what it consists of.

    Args:
        aligner: says model, layer, centre, null price and distortion. Its method, epsilon and threshold do not matter.
        a: source: a text, its tokens, or ``Words`` (such as ``alignment.source``).
        b: target, of the same kind.

    Raises:
        ConfigError: a method without null atoms, whose distance is that of a coupling, not of a matching.
        DTypeError, TextError: see ``Aligner.__call__``.
    """
    require_null(aligner)
    source, target = aligner._words(a, b)
    # Equal texts are encoded once, so that their distance is exactly zero.
    texts = list(dict.fromkeys((source.words, target.words)))
    vectors = dict(zip(texts, unit_vectors(aligner, texts), strict=True))
    x, y = vectors[source.words], vectors[target.words]
    cost = documents.word_costs(source.words, target.words, x, y, aligner.distortion).numpy()
    shift = documents.squared_shift(*cost.shape, device="cpu").numpy()
    found = decoding.match(cost, shift, aligner.null_price)
    matched = [Contribution(i, j, float(cost[i, j])) for i, j in found.links]
    rows, columns = {i for i, _ in found.links}, {j for _, j in found.links}
    alone = [Contribution(i, None, aligner.null_price) for i in range(len(source)) if i not in rows]
    alone += [Contribution(None, j, aligner.null_price) for j in range(len(target)) if j not in columns]
    return Explanation(
        source, target, found.distance, found.normalized_distance, dearest_first([*matched, *alone]), aligner.settings
    )


def dearest_first(contributions: Iterable[Contribution]) -> tuple[Contribution, ...]:
    """Sorted by cost; equals in the order of the source, then of the target, words of the target alone last."""

    def key(c: Contribution) -> tuple[float, float, float]:
        return -c.cost, math.inf if c.source is None else c.source, math.inf if c.target is None else c.target

    return tuple(sorted(contributions, key=key))


def require_null(aligner: Aligner) -> None:
    """Raise ConfigError for an aligner whose distance is not that of a matching."""
    if not aligner.method.null:
        raise ConfigError(
            f"expected an aligner whose words may stay alone, received method {aligner.method.name!r}; build it with "
            "method='partial': the distance is the same for every method with null atoms"
        )


def unit_vectors(aligner: Aligner, texts: Sequence[tuple[str, ...]]) -> list[Tensor]:
    """Centred unit vectors of the words of each text, ``(n, d)`` float64, on the CPU."""
    return [documents.unit_vectors(x.cpu(), aligner.centre) for x in aligner._vectors(texts)]
