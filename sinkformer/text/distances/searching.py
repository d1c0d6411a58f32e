"""The documents nearest to a query."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from sinkformer.errors import ConfigError, DTypeError, TextError
from sinkformer.text import decoding, documents
from sinkformer.text.aligners import Aligner, TextLike
from sinkformer.text.distances.explanations import Contribution, dearest_first, require_null, unit_vectors
from sinkformer.text.distances.passages import blocks, passages
from sinkformer.text.tokens import Words, split_words

_SHORTEST_PASSAGE = 32
# Blocks encoded together, and cells of their costs: both bound the memory.
_BLOCKS = 64
_CELLS = 2_000_000
# Distances are ranked to these digits, so that the order of equals does not hang on the last bits of the model's arithmetic.
_DIGITS = 6


@dataclass(frozen=True)
class Hit:
    """The passage of a document that is nearest to the query.

    Attributes:
        name: of the document.
        line: where the passage starts, from one.
        text: the passage, as it was written.
        words: the words of the passage.
        distance: cost of saying the query with words of the passage: that of the matched words, and twice the null price for
            each word of the query without a partner. Words of the passage that the query lacks cost nothing.
        normalized_distance: divided by its largest possible value, in [0, 1]; 0 if every word of the query is there.
        contributions: dearest first, one for each word of the query; they sum to ``distance``.
    """

    name: str
    line: int
    text: str
    words: tuple[str, ...]
    distance: float
    normalized_distance: float
    contributions: tuple[Contribution, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON: contributions as ``[query word, passage word, cost]``, null for a word without a partner."""
        return {
            "name": self.name,
            "line": self.line,
            "distance": round(self.distance, 6),
            "normalized_distance": round(self.normalized_distance, 6),
            "passage": list(self.words),
            "contributions": [[c.source, c.target, round(c.cost, 6)] for c in self.contributions],
        }


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        query: words of the query.
        hits: nearest first, at most one for each document.
        documents: how many there were.
        passages: how many there were.
        matched: passages whose words were matched; for all others a lower bound of their distance was enough.
        settings: of the aligner.
    """

    query: Words
    hits: list[Hit]
    documents: int
    passages: int
    matched: int
    settings: dict[str, Any]


def search(
    aligner: Aligner,
    query: TextLike,
    documents: Iterable[tuple[str, str | Iterable[str]]],
    *,
    top: int = 10,
    size: int | None = None,
) -> SearchResult:
    """The documents whose best passage is nearest to a query.

    Each document is read once, encoded once in blocks, and compared in passages of whole sentences. Matching a query of n
    words with a passage of m takes time of the order of (n + m)^3; it is done only where a lower bound leaves it open
    whether the passage is among the nearest: each word of the query alone with its cheapest partner, or without one, whichever is
    cheaper (the relaxed word mover's distance of Kusner, Sun, Kolkin, Weinberger 2015, with a null atom). The result is that of
    matching everything. Memory depends on the longest block and on ``top``, not on the documents.

    Args:
        aligner: says model, layer, centre and null price. Places do not count: its distortion is not used.
        query: a text, or its tokens.
        documents: pairs of a name and a text, or the lines of a text; read lazily, each once, in turn.
        top: how many documents to return.
        size: least number of words of a passage; default: those of the query, at least 32.

    Raises:
        ConfigError: ``top`` or ``size`` below one; a method without null atoms.
        DTypeError: ``documents`` is one text, or its items are no pairs.
        TextError: a query without words.
    """
    require_null(aligner)
    if isinstance(documents, (str, bytes)):
        raise DTypeError(f"expected pairs (name, text), received one {type(documents).__name__}")
    words = aligner._words(query, query)[0]
    if not len(words):
        raise TextError(f"expected a query with at least one word, received {words.text[:40]!r}")
    size = max(_SHORTEST_PASSAGE, len(words)) if size is None else size
    for name, value in (("top", top), ("size", size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"expected {name} as a whole number >= 1, received {value!r}")
    ranking = _Ranking(words, unit_vectors(aligner, [words.words])[0], aligner.null_price, size, top)
    for chunk in _chunks(_blocks(aligner, documents, size, ranking), _CELLS // len(words)):
        ranking.add(chunk, unit_vectors(aligner, [block.words.words for block in chunk]))
    return SearchResult(words, ranking.hits(), ranking.documents, ranking.passages, ranking.matched, aligner.settings)


@dataclass(frozen=True)
class _Block:
    document: int
    name: str
    line: int
    words: Words


@dataclass(frozen=True)
class _Candidate:
    """A passage with its lower bound. ``cost`` is that of the query's words against the passage's."""

    bound: float
    block: _Block
    start: int
    cost: np.ndarray


@dataclass
class _Ranking:
    """The best passage of each of the ``top`` nearest documents so far."""

    query: Words
    vectors: Tensor
    null_price: float
    size: int
    top: int
    documents: int = 0
    passages: int = 0
    matched: int = 0
    best: dict[int, tuple[tuple[float, int, int], Hit]] = field(default_factory=dict)

    def add(self, chunk: list[_Block], vectors: list[Tensor]) -> None:
        """Rank the passages of these blocks, those with the lowest bounds first."""
        found = [c for block, y in zip(chunk, vectors, strict=True) for c in self._candidates(block, y)]
        self.passages += len(found)
        for candidate in sorted(found, key=lambda c: c.bound):
            if candidate.bound <= self._limit(candidate.block.document):
                self._match(candidate)

    def hits(self) -> list[Hit]:
        """Nearest first; equals in the order of the documents."""
        order = sorted(self.best.items(), key=lambda item: (item[1][0][0], item[0]))
        return [hit for _, (_, hit) in order]

    def _candidates(self, block: _Block, y: Tensor) -> Iterator[_Candidate]:
        cost = documents.word_costs(self.query.words, block.words.words, self.vectors, y, 0.0).numpy()
        capped = np.minimum(cost, 2 * self.null_price)
        for start, end in passages(block.words, self.size):
            yield _Candidate(float(capped[:, start:end].min(1).sum()), block, start, cost[:, start:end])

    def _limit(self, document: int) -> float:
        """What a passage has to stay below to be ranked, with room for the rounding."""
        own = self.best[document][0][0] if document in self.best else math.inf
        worst = max(key[0] for key, _ in self.best.values()) if len(self.best) >= self.top else math.inf
        return min(own, worst) + 10**-_DIGITS

    def _match(self, candidate: _Candidate) -> None:
        self.matched += 1
        n, m = candidate.cost.shape
        shift = documents.squared_shift(n, m, device="cpu").numpy()
        links = dict(decoding.match(candidate.cost, shift, self.null_price).links)
        contributions = [
            Contribution(i, links[i], float(candidate.cost[i, links[i]]))
            if i in links
            else Contribution(i, None, 2 * self.null_price)
            for i in range(n)
        ]
        distance = math.fsum(c.cost for c in contributions)
        block, words = candidate.block, candidate.block.words
        key = round(distance, _DIGITS), block.line, candidate.start
        if block.document in self.best and self.best[block.document][0] <= key:
            return
        begin, end = words.spans[candidate.start][0], words.spans[candidate.start + m - 1][1]
        self.best[block.document] = (
            key,
            Hit(
                name=block.name,
                line=block.line + words.text.count("\n", 0, begin),
                text=words.text[begin:end],
                words=words.words[candidate.start : candidate.start + m],
                distance=distance,
                normalized_distance=distance / (2 * self.null_price * n),
                contributions=dearest_first(contributions),
            ),
        )
        if len(self.best) > self.top:
            del self.best[max(self.best, key=lambda d: (self.best[d][0][0], d))]


def _blocks(
    aligner: Aligner, items: Iterable[tuple[str, str | Iterable[str]]], size: int, ranking: _Ranking
) -> Iterator[_Block]:
    """Blocks with at least one word, of one document after the other."""
    for k, item in enumerate(items):
        if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], str):
            raise DTypeError(f"expected pairs (name, text), received {type(item).__name__} at position {k}")
        name, text = item
        ranking.documents += 1
        for line, part in blocks(text.splitlines(keepends=True) if isinstance(text, str) else text, size):
            words = split_words(part, aligner.tokenizer)
            if len(words):
                yield _Block(k, name, line, words)


def _chunks(found: Iterable[_Block], most: int) -> Iterator[list[_Block]]:
    """Lists of at most 64 blocks and, unless it is a single one, ``most`` words."""
    chunk: list[_Block] = []
    count = 0
    for block in found:
        if chunk and (len(chunk) == _BLOCKS or count + len(block.words) > most):
            yield chunk
            chunk, count = [], 0
        chunk.append(block)
        count += len(block.words)
    if chunk:
        yield chunk
