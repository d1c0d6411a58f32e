"""Scores of word links against gold links, and of couplings with null atoms against the gold coupling.

A system predicts links A. Gold has sure links S and possible ones; P is all of gold, S included. The numbers are fractions
in [0, 1]:

    precision     |A & P| / |A|                      recall        |A & S| / |S|
    AER           1 - (|A & S| + |A & P|) / (|A| + |S|)            (Och and Ney 2003, section 5)
    f1            2 |A & P| / (|A| + |P|)            f1_sure       2 |A & S| / (|A| + |S|)

Where a denominator is zero: precision without predicted links is 1 if gold has none either, else 0; recall without gold links
is 1 if no predicted link is wrong, else 0; an F1 of nothing against nothing is 1, its AER 0.

*Nulls.* A word without a link counts as linked to null. Total scores take the links of words and the links to null, of both
sides, as one set, with all of P as gold (Arase, Bao and Yokoi 2023).

*Micro and macro.* Micro scores pool the links of all pairs. Macro scores are the means over pairs of precision and recall, and
the harmonic mean of these two means as F1; a pair without links counts with the values above.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any

import numpy as np
import ot
import torch
from torch import Tensor

from sinkformer.couplings import Coupling
from sinkformer.errors import ConfigError, ConvergenceError, DTypeError, NonFiniteError, ShapeError, WeightError

Link = tuple[int, int]
Links = Iterable[Link]
Sizes = tuple[int, int]

DEGREES = ("1", "2", "3", "4+")
_LENGTHS = (10, 20, 30, 40)
_NULL_SHARES = (0.0, 0.1, 0.25, 0.5)


@dataclass(frozen=True)
class NullCounts:
    """Words of both sides without a link.

    Attributes:
        words: all words.
        gold: words without a gold link, sure or possible.
        predicted: words without a predicted link.
        hits: words without either.
    """

    words: int
    gold: int
    predicted: int
    hits: int


@dataclass(frozen=True)
class LinkCounts:
    """What the scores of one pair, or of many together, are made of. Its properties are the (micro) scores.

    Attributes:
        predicted: |A|.
        sure: |S|.
        gold: |P|, sure and possible links.
        sure_hits: |A & S|.
        gold_hits: |A & P|.
        degree_hits: |A & P| by block degree 1, 2, 3, 4 and more. The degree of a gold link is the larger of the numbers
            of gold links, sure or possible, that its source word and its target word have.
        degree_gold: |P| by block degree.
        nulls: the same for words without a link; None if the numbers of words are unknown.
    """

    predicted: int
    sure: int
    gold: int
    sure_hits: int
    gold_hits: int
    degree_hits: tuple[int, ...]
    degree_gold: tuple[int, ...]
    nulls: NullCounts | None = None

    @property
    def precision(self) -> float:
        """|A & P| / |A|."""
        return _share(self.gold_hits, self.predicted, self.gold)

    @property
    def recall(self) -> float:
        """|A & S| / |S|: of sure links, as it goes with AER."""
        return _share(self.sure_hits, self.sure, self.predicted - self.gold_hits)

    @property
    def recall_gold(self) -> float:
        """|A & P| / |P|: of sure and possible links, as it goes with ``f1``."""
        return _share(self.gold_hits, self.gold, self.predicted)

    @property
    def aer(self) -> float:
        """Alignment error rate, 1 - (|A & S| + |A & P|) / (|A| + |S|)."""
        size = self.predicted + self.sure
        return 1 - (self.sure_hits + self.gold_hits) / size if size else 0.0

    @property
    def f1(self) -> float:
        """F1 with sure and possible links as gold."""
        return _dice(self.gold_hits, self.predicted, self.gold)

    @property
    def f1_sure(self) -> float:
        """F1 with sure links alone as gold; a predicted link that is only possible is wrong here."""
        return _dice(self.sure_hits, self.predicted, self.sure)

    @property
    def degree_recall(self) -> tuple[float | None, ...]:
        """Recall of sure and possible links by block degree 1, 2, 3, 4 and more; None where gold has no such link."""
        return tuple(h / g if g else None for h, g in zip(self.degree_hits, self.degree_gold, strict=True))

    @property
    def total_precision(self) -> float | None:
        """Precision of links and nulls together; None if the numbers of words are unknown."""
        total = self._with_nulls
        return None if total is None else _share(*total)

    @property
    def total_recall(self) -> float | None:
        """Recall of links and nulls together; None if the numbers of words are unknown."""
        total = self._with_nulls
        return None if total is None else _share(total[0], total[2], total[1])

    @property
    def total_f1(self) -> float | None:
        """F1 of links and nulls together; None if the numbers of words are unknown."""
        total = self._with_nulls
        return None if total is None else _dice(*total)

    @property
    def _with_nulls(self) -> tuple[int, int, int] | None:
        """Right ones, predicted ones, gold ones."""
        if self.nulls is None:
            return None
        nulls = self.nulls
        return self.gold_hits + nulls.hits, self.predicted + nulls.predicted, self.gold + nulls.gold


@dataclass(frozen=True, repr=False)
class AlignmentScores:
    """Scores of a corpus. ``str()`` is one line, in percent.

    Attributes:
        counts: of each pair.
        sizes: numbers of source and target words of each pair; None if unknown.
    """

    counts: tuple[LinkCounts, ...]
    sizes: tuple[Sizes, ...] | None = None

    @cached_property
    def micro(self) -> LinkCounts:
        """The counts of all pairs together; its properties are the micro scores."""
        return _summed(self.counts)

    @cached_property
    def macro_precision(self) -> float:
        """Mean over pairs of |A & P| / |A|."""
        return _mean([c.precision for c in self.counts])

    @cached_property
    def macro_recall(self) -> float:
        """Mean over pairs of |A & P| / |P|."""
        return _mean([c.recall_gold for c in self.counts])

    @property
    def macro_f1(self) -> float:
        """Harmonic mean of ``macro_precision`` and ``macro_recall``."""
        return _harmonic(self.macro_precision, self.macro_recall)

    @cached_property
    def total_f1(self) -> float | None:
        """Macro F1 of links and nulls together; None if the numbers of words are unknown. ``micro.total_f1`` pools instead."""
        precisions, recalls = [c.total_precision for c in self.counts], [c.total_recall for c in self.counts]
        if None in precisions:
            return None
        return _harmonic(_mean(precisions), _mean(recalls))

    def __repr__(self) -> str:
        """The line, in place of the counts of every pair."""
        return f"AlignmentScores({self})"

    def __str__(self) -> str:
        """All scores on one line, in percent."""
        micro = self.micro
        found = {"AER": micro.aer, "P": micro.precision, "R(S)": micro.recall, "R(S+P)": micro.recall_gold}
        found |= {"F1(S+P)": micro.f1, "F1(S)": micro.f1_sure, "macro F1": self.macro_f1}
        if self.total_f1 is not None:
            found["total F1"] = self.total_f1
        return "  ".join([*(f"{name} {100 * value:.1f}" for name, value in found.items()), f"pairs {len(self.counts)}"])

    def to_dict(self) -> dict[str, Any]:
        """Scores as fractions and the counts behind them, JSON-able."""
        micro = self.micro
        names = ("aer", "precision", "recall", "recall_gold", "f1", "f1_sure")
        out: dict[str, Any] = {"pairs": len(self.counts), **{name: getattr(micro, name) for name in names}}
        out.update(macro_precision=self.macro_precision, macro_recall=self.macro_recall, macro_f1=self.macro_f1)
        out.update(total_f1=self.total_f1, micro_total_f1=micro.total_f1)
        sizes = ("predicted", "sure", "gold", "sure_hits", "gold_hits")
        out["links"] = {name: getattr(micro, name) for name in sizes}
        out["nulls"] = None if micro.nulls is None else dict(vars(micro.nulls))
        out["degree_recall"] = dict(zip(DEGREES, micro.degree_recall, strict=True))
        return out

    def by_length(self) -> dict[str, AlignmentScores]:
        """Scores by the number of words of the longer side: 0-10, 11-20, 21-30, 31-40, 41+; classes without pairs are left out.

        Raises:
            ConfigError: the numbers of words are unknown.
        """
        edges = (-1, *_LENGTHS)
        names = [f"{low + 1}-{high}" for low, high in zip(edges, _LENGTHS, strict=False)] + [f"{_LENGTHS[-1] + 1}+"]
        return self._grouped(names, lambda k, sizes: sum(max(sizes) > edge for edge in _LENGTHS))

    def by_nulls(self) -> dict[str, AlignmentScores]:
        """Scores by the share of words without a gold link; classes without pairs are left out.

        A pair without words has no such word.

        Raises:
            ConfigError: the numbers of words are unknown.
        """
        names = [
            "none",
            *(f"up to {100 * share:.0f}%" for share in _NULL_SHARES[1:]),
            f"over {100 * _NULL_SHARES[-1]:.0f}%",
        ]

        def place(k: int, sizes: Sizes) -> int:
            nulls = self.counts[k].nulls
            assert nulls is not None
            return sum(nulls.gold > share * nulls.words for share in _NULL_SHARES)

        return self._grouped(names, place)

    def _grouped(self, names: Sequence[str], place: Callable[[int, Sizes], int]) -> dict[str, AlignmentScores]:
        if self.sizes is None:
            raise ConfigError("expected the numbers of words of every pair, received none; score with sizes=...")
        members: list[list[int]] = [[] for _ in names]
        for k, sizes in enumerate(self.sizes):
            members[place(k, sizes)].append(k)
        return {
            name: AlignmentScores(tuple(self.counts[k] for k in group), tuple(self.sizes[k] for k in group))
            for name, group in zip(names, members, strict=True)
            if group
        }

    def bootstrap(
        self, samples: int = 1000, *, generator: torch.Generator, level: float = 0.95
    ) -> dict[str, tuple[float, float]]:
        """Percentile intervals of the micro scores ``"aer"`` and ``"f1"`` over pairs drawn again with replacement.

        Says how far the scores depend on which pairs were drawn, not on the training of the system.

        Args:
            samples: number of corpora drawn, each with as many pairs as this one.
            generator: source of the draws, on the CPU.
            level: share of the samples inside the interval, in (0, 1).

        Raises:
            ConfigError: ``samples`` below 1 or ``level`` outside (0, 1).
        """
        if samples < 1 or not 0 < level < 1:
            raise ConfigError(f"expected samples >= 1 and level in (0, 1), received {samples} and {level}")
        n = len(self.counts)
        table = torch.tensor([(c.predicted, c.sure, c.gold, c.sure_hits, c.gold_hits) for c in self.counts])
        scores = np.empty((samples, 2))
        for k in range(samples):
            drawn = table[torch.randint(n, (n,), generator=generator)].sum(0).tolist()
            counts = LinkCounts(*drawn, degree_hits=(), degree_gold=())
            scores[k] = counts.aer, counts.f1
        low, high = np.quantile(scores, [(1 - level) / 2, (1 + level) / 2], axis=0)
        return {name: (float(a), float(b)) for name, a, b in zip(("aer", "f1"), low, high, strict=True)}


def count_links(predicted: Links, sure: Links, possible: Links = (), *, sizes: Sizes | None = None) -> LinkCounts:
    """Compare the links of one pair.

    Args:
        predicted: links (i, j) of the system, word indices from zero. Repeated links count once, here and below.
        sure: sure gold links.
        possible: possible gold links, with or without the sure ones: gold is the union.
        sizes: numbers of source and target words, for the counts of words without a link.

    Raises:
        DTypeError: a link that is no pair of whole numbers.
        ShapeError: a link outside ``sizes``, or with a negative index.

    Example:
        >>> found = count_links([(0, 0), (1, 2)], sure=[(0, 0), (1, 1)], possible=[(1, 2)])
        >>> found.precision, found.recall, found.aer
        (1.0, 0.5, 0.25)
    """
    a, s = _links(predicted), _links(sure)
    p = s | _links(possible)
    for name, links in (("predicted", a), ("gold", p)):
        _check_range(name, links, sizes)
    rows, columns = Counter(i for i, _ in p), Counter(j for _, j in p)
    degree_hits, degree_gold = [0] * len(DEGREES), [0] * len(DEGREES)
    for i, j in p:
        place = min(max(rows[i], columns[j]), len(DEGREES)) - 1
        degree_gold[place] += 1
        degree_hits[place] += (i, j) in a
    return LinkCounts(
        predicted=len(a),
        sure=len(s),
        gold=len(p),
        sure_hits=len(a & s),
        gold_hits=len(a & p),
        degree_hits=tuple(degree_hits),
        degree_gold=tuple(degree_gold),
        nulls=None if sizes is None else _count_nulls(a, p, sizes),
    )


def score_alignments(
    predicted: Sequence[Links],
    sure: Sequence[Links],
    possible: Sequence[Links] | None = None,
    *,
    sizes: Sequence[Sizes] | None = None,
) -> AlignmentScores:
    """Score the links of a corpus, pair by pair in the same order. The arguments are those of :func:`count_links`.

    Args:
        predicted: links of the system, for each pair.
        sure: sure gold links, for each pair.
        possible: possible gold links, for each pair; None: there are none.
        sizes: numbers of source and target words, for each pair; without, total scores and breakdowns are unknown.

    Raises:
        DTypeError: a link that is no pair of whole numbers.
        ShapeError: different numbers of pairs, no pair, or a link outside its pair (named).
    """
    n = len(predicted)
    lengths = {"predicted": n, "sure": len(sure)}
    lengths |= {} if possible is None else {"possible": len(possible)}
    lengths |= {} if sizes is None else {"sizes": len(sizes)}
    if len(set(lengths.values())) > 1 or not n:
        received = ", ".join(f"{count} of {name}" for name, count in lengths.items())
        raise ShapeError(f"expected one item for each pair and at least one pair, received {received}")
    counts = []
    for k in range(n):
        try:
            size = None if sizes is None else sizes[k]
            counts.append(count_links(predicted[k], sure[k], () if possible is None else possible[k], sizes=size))
        except ShapeError as error:
            raise ShapeError(f"pair {k}: {error}") from None
    return AlignmentScores(tuple(counts), None if sizes is None else tuple((int(a), int(b)) for a, b in sizes))


def target_coupling(links: Links, n: int, m: int, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """The coupling that links stand for, ``(n + 1, m + 1)``, last row and column null.

    Every word has mass 1. A link carries 1/max(degree of its source word, degree of its target word); what is left of
    the mass of a word goes to null. The corner, null to null, is zero.

    Args:
        links: links (i, j), word indices from zero.
        n: number of source words.
        m: number of target words.
        dtype: floating-point dtype of the result.

    Raises:
        DTypeError: a link that is no pair of whole numbers.
        ShapeError: a link outside the pair.
    """
    found = _links(links)
    _check_range("gold", found, (n, m))
    out = torch.zeros(n + 1, m + 1, dtype=dtype)
    if found:
        i, j = torch.tensor(sorted(found)).unbind(-1)
        rows, columns = torch.bincount(i, minlength=n), torch.bincount(j, minlength=m)
        out[i, j] = 1 / torch.maximum(rows[i], columns[j]).to(dtype)
    # Rounding of the sums must not leave a negative rest.
    out[:n, m] = (1 - out[:n, :m].sum(1)).clamp_min(0)
    out[n, :m] = (1 - out[:n, :m].sum(0)).clamp_min(0)
    return out


def coupling_tv(predicted: Coupling | Tensor, target: Coupling | Tensor) -> float:
    """Total variation between two couplings with null atoms, in [0, 1]: W1 for the cost 1 of any difference.

    The corner, null to null, says nothing about words and is left out; both are divided by the mass of the rest.

    Args:
        predicted: a coupling of one pair whose last atoms are null, such as ``Alignment.coupling``, or a matrix
            ``(n + 1, m + 1)`` of masses such as ``Alignment.with_nulls()``.
        target: another one on the same words, such as that of :func:`target_coupling`.

    Raises:
        ShapeError: no matrices of one shape.
        NonFiniteError: NaN or infinity.
        WeightError: a negative mass; or one of the two has mass and the other has none.
    """
    p, t = _word_masses(predicted, target)
    return float((p - t).abs().sum() / 2)


def coupling_w1(
    predicted: Coupling | Tensor, target: Coupling | Tensor, source_ground: Tensor, target_ground: Tensor
) -> float:
    """W1 between two couplings with null atoms for d((x, y), (x', y')) = d_X(x, x') + d_Y(y, y'), exact.

    With 0/1 metrics this is between :func:`coupling_tv` and twice that. Memory grows with the product of the numbers of
    cells that carry mass.

    Args:
        predicted: see :func:`coupling_tv`, also for what is done with the corner.
        target: another one on the same words.
        source_ground: distances of source words, ``(n + 1, n + 1)``, null last.
        target_ground: distances of target words, ``(m + 1, m + 1)``.

    Returns:
        The distance, in the units of the ground metrics.

    Raises:
        ShapeError, NonFiniteError, WeightError: as :func:`coupling_tv`; also for the grounds.
        ConvergenceError: the exact solver gave up.
    """
    p, t = _word_masses(predicted, target)
    grounds = [_matrix(x, name) for x, name in ((source_ground, "source_ground"), (target_ground, "target_ground"))]
    for ground, side in zip(grounds, p.shape, strict=True):
        if ground.shape != (side, side):
            raise ShapeError(
                f"expected ground distances {(side, side)} for a coupling {tuple(p.shape)}, "
                f"received {tuple(ground.shape)}; the null atom has its row and column too"
            )
    (i, j), (k, l) = (x.nonzero().unbind(-1) for x in (p, t))  # noqa: E741
    if not len(i):
        return 0.0
    costs = grounds[0][i][:, k] + grounds[1][j][:, l]
    value, log = ot.emd2(p[i, j].numpy(), t[k, l].numpy(), costs.numpy(), numItermax=10_000_000, log=True)
    if log.get("warning"):
        raise ConvergenceError(f"the exact solver stopped: {log['warning']}")
    return max(float(value), 0.0)


def _links(links: Links) -> set[Link]:
    found = set()
    for link in links:
        try:
            i, j = link
            found.add((index(i), index(j)))
        except (TypeError, ValueError):
            raise DTypeError(f"expected links (i, j) of whole numbers, received {link!r}") from None
    return found


def _check_range(name: str, links: Iterable[Link], sizes: Sizes | None) -> None:
    for i, j in links:
        if i < 0 or j < 0 or (sizes is not None and (i >= sizes[0] or j >= sizes[1])):
            where = "" if sizes is None else f" in the pair of {sizes[0]} and {sizes[1]} words"
            raise ShapeError(f"expected {name} links of word indices from zero{where}, received {i}-{j}")


def _count_nulls(predicted: set[Link], gold: set[Link], sizes: Sizes) -> NullCounts:
    found = [0, 0, 0]
    for side, n in enumerate(sizes):
        words = set(range(n))
        a, p = (words - {link[side] for link in links} for links in (predicted, gold))
        found = [x + len(y) for x, y in zip(found, (p, a, a & p), strict=True)]
    return NullCounts(sum(sizes), *found)


def _summed(counts: Sequence[LinkCounts]) -> LinkCounts:
    def total(name: str) -> int:
        return sum(getattr(c, name) for c in counts)

    def columns(name: str) -> tuple[int, ...]:
        return tuple(map(sum, zip(*(getattr(c, name) for c in counts), strict=True)))

    nulls = [c.nulls for c in counts if c.nulls is not None]
    known = len(nulls) == len(counts)
    return LinkCounts(
        **{name: total(name) for name in ("predicted", "sure", "gold", "sure_hits", "gold_hits")},
        degree_hits=columns("degree_hits"),
        degree_gold=columns("degree_gold"),
        nulls=NullCounts(**{x: sum(getattr(c, x) for c in nulls) for x in vars(nulls[0])}) if known else None,
    )


def _share(hits: int, size: int, others: int) -> float:
    """hits/size; of nothing 1 if there are no others that it missed, or has wrong."""
    return hits / size if size else float(others == 0)


def _dice(hits: int, a: int, b: int) -> float:
    return 2 * hits / (a + b) if a + b else 1.0


def _mean(values: Sequence[Any]) -> float:
    return sum(values) / len(values)


def _harmonic(p: float, r: float) -> float:
    return 2 * p * r / (p + r) if p + r else 0.0


def _matrix(x: Coupling | Tensor, name: str) -> Tensor:
    """In float64 on the CPU, checked."""
    dense = (x.to_dense() if isinstance(x, Coupling) else torch.as_tensor(x)).detach().cpu().double()
    if dense.dim() != 2:
        raise ShapeError(f"expected {name} as one matrix, received shape {tuple(dense.shape)}")
    if not bool(torch.isfinite(dense).all()):
        raise NonFiniteError(f"expected {name} finite, received NaN or infinity")
    if bool((dense < 0).any()):
        raise WeightError(f"expected {name} without negative entries, received {float(dense.min()):g}")
    return dense


def _word_masses(predicted: Coupling | Tensor, target: Coupling | Tensor) -> tuple[Tensor, Tensor]:
    """Both without their corner, with total mass 1; zeros if neither has any."""
    p, t = (_matrix(x, name).clone() for x, name in ((predicted, "predicted"), (target, "target")))
    if p.shape != t.shape or not p.numel():
        raise ShapeError(
            f"expected two couplings (n + 1, m + 1) of one shape, received {tuple(p.shape)} and {tuple(t.shape)}; "
            "the null atoms are the last row and column"
        )
    p[-1, -1] = t[-1, -1] = 0
    masses = float(p.sum()), float(t.sum())
    if all(masses):
        return p / masses[0], t / masses[1]
    if any(masses):
        raise WeightError(f"expected mass on words or their null links, received {masses[0]:g} and {masses[1]:g}")
    return p, t
