"""What a method is given, what it gives back, and what it is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from sinkformer.couplings import DenseCoupling, EntropicCoupling
from sinkformer.text import decoding, documents
from sinkformer.text.tokens import Words, surface


@dataclass(frozen=True, eq=False)
class EncodedPair:
    """Two texts as a method sees them; n source and m target words, n, m >= 1.

    Attributes:
        source: the words of the first text.
        target: the words of the second text.
        cost: ``(n, m)`` float64, finite, >= 0: 1 - cos of the vectors, plus the price of a change of place. Exactly 0 on the
            diagonal of a text with itself.
        vectors: unit vectors ``(n, d)`` and ``(m, d)``, float64; a row of zeros is a word without a vector.
        states: hidden states ``(n, L, d)`` and ``(m, L, d)``, float32, of the layers the method names; None if it names none.
    """

    source: Words
    target: Words
    cost: Tensor
    vectors: tuple[Tensor, Tensor]
    states: tuple[Tensor, Tensor] | None = None

    @cached_property
    def costs(self) -> np.ndarray:
        """``cost`` as an array on the CPU."""
        return self.cost.cpu().numpy()

    @cached_property
    def shift(self) -> np.ndarray:
        """Squared difference of relative positions, ``(n, m)`` float64: what decides between equal costs."""
        return documents.squared_shift(*self.cost.shape, device="cpu").numpy()

    def matching(self, null_price: float) -> decoding.Matching:
        """The cheapest one-to-one links when a word may stay alone for ``null_price``; computed once for each price."""
        if null_price not in self._matchings:
            self._matchings[null_price] = decoding.match(self.costs, self.shift, null_price)
        return self._matchings[null_price]

    @cached_property
    def _matchings(self) -> dict[float, decoding.Matching]:
        return {}

    @cached_property
    def spellings(self) -> tuple[list[str], list[str]]:
        """What counts as the same word when copies share their mass."""
        source, target = ([surface(word).casefold() for word in side.words] for side in (self.source, self.target))
        return source, target


@dataclass(frozen=True, eq=False)
class Found:
    """What a method found for one pair of n and m words.

    Attributes:
        coupling: on the n and m words, or on n + 1 and m + 1 atoms, the null atom last.
        plan: mass between words, ``(n, m)`` float64. Of a method with ``null`` a word has mass 1/(n + m).
        null_source: mass of each source word that goes to the null atom, ``(n,)``; zeros without null atoms.
        null_target: mass of each target word that comes from the null atom, ``(m,)``.
        confidence: ``(n, m)`` float64 in [0, 1], absolute: not rescaled within the pair.
        links: pairs (i, j), sorted. For a text with itself the diagonal.
    """

    coupling: EntropicCoupling | DenseCoupling
    plan: Tensor
    null_source: Tensor
    null_target: Tensor
    confidence: Tensor
    links: list[tuple[int, int]]


@runtime_checkable
class Method(Protocol):
    """Turns encoded pairs into couplings and links."""

    @property
    def name(self) -> str:
        """What ``Aligner(method=...)`` and the settings call it."""
        ...

    @property
    def null(self) -> bool:
        """Whether words may stay alone. If not, the distance is that of a coupling without null atoms."""
        ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Hidden layers whose states it needs; empty: none."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """Everything its results depend on besides the pair, JSON-able."""
        ...

    @property
    def most_cells(self) -> int | None:
        """Largest n m of a pair it has room for; None: what the aligner has room for."""
        ...

    def solve(self, pairs: list[EncodedPair]) -> list[Found]:
        """One ``Found`` for each pair; the pairs are of like sizes and fit in memory together.

        A pair's result does not depend on the others.
        """
        ...
