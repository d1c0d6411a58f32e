"""W1 between couplings that are given, pair by pair."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sinkformer.couplings import Coupling
from sinkformer.errors import ShapeError, WeightError
from sinkformer.evaluation.comparing import Progress, singles
from sinkformer.evaluation.sampled import Summary
from sinkformer.measures import Measure
from sinkformer.metrics import w1

# W1 of marginals below this is rounding.
_UNEQUAL = 1e-9


@dataclass(frozen=True)
class Distance:
    """W1 between two couplings, for |x - x'| + |y - y'|.

    Attributes:
        lower, upper: bracket.
        value: the best single number.
        exact: whether the bracket is closed up to rounding.
        method: how it was found.
        marginals: W1 between the source marginals plus W1 between the target marginals. W1 between the couplings is never
            below, and not zero where this is not.
        marginal_error: larger L1 distance of a plan's marginals from the weights it came with, before any rounding.
    """

    lower: float
    upper: float
    value: float
    exact: bool
    method: str
    marginals: float
    marginal_error: float


@dataclass(frozen=True, repr=False)
class Distances:
    """W1 of several pairs of couplings.

    Attributes:
        pairs: in the order of the couplings.
        rounded: whether plans were rounded to the weights they came with.
    """

    pairs: tuple[Distance, ...]
    rounded: bool

    def summary(self) -> Summary:
        """Mean, 95 % quantile, supremum; ``column_error`` is the largest marginal error, of either side."""
        lower, upper, error = (
            torch.tensor([getattr(pair, name) for pair in self.pairs], dtype=torch.float64)
            for name in ("lower", "upper", "marginal_error")
        )
        return Summary.of("all", lower, upper, error, None)

    @property
    def notes(self) -> tuple[str, ...]:
        """The numbers of all pairs, if there are several, and what has to be known to read them."""
        s = self.summary()
        notes = [f"{s.pairs} pairs: mean {s.mean:.6g}, p95 {s.p95:.6g}, sup {s.sup:.6g}"] if s.pairs > 1 else []
        unequal = [pair.marginals for pair in self.pairs if pair.marginals > _UNEQUAL]
        if unequal:
            notes.append(
                f"{len(unequal)} of {len(self.pairs)} pairs have unequal marginals, up to {max(unequal):.3g} apart (W1 of "
                f"sources plus W1 of targets), which their distance contains"
            )
        error = max(pair.marginal_error for pair in self.pairs)
        if error > _UNEQUAL:
            how = "rounded to them" if self.rounded else "compared as they are"
            notes.append(f"plans miss the weights they came with by up to {error:.3g} (L1); they are {how}")
        if not all(pair.exact for pair in self.pairs):
            widest = max(pair.upper - pair.lower for pair in self.pairs)
            notes.append(
                f"not every W1 is exact: brackets are up to {widest:.2g} wide, mean and sup are those of upper ends"
            )
        return tuple(notes)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """A table: a header, and a row for every pair."""
        rows: list[tuple[str, ...]] = [("pair", "W1", "lower", "upper", "marginals", "how")]
        for k, pair in enumerate(self.pairs):
            numbers = (f"{x:.6g}" for x in (pair.value, pair.lower, pair.upper, pair.marginals))
            rows.append((str(k), *numbers, pair.method))
        return rows

    def __str__(self) -> str:
        """Columns separated by tabs, and the notes; for one pair a sentence."""
        if len(self.pairs) == 1:
            (pair,) = self.pairs
            kind = "exact" if pair.exact else f"between {pair.lower:.6g} and {pair.upper:.6g}"
            return "\n".join([f"W1 {pair.value:.10g} ({kind}; {pair.method})", *self.notes])
        return "\n".join(["\t".join(row) for row in self.rows] + list(self.notes))

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain numbers and lists."""
        return {
            "rounded": self.rounded,
            "notes": list(self.notes),
            "all": asdict(self.summary()),
            "pairs": [asdict(pair) for pair in self.pairs],
        }


def distances(
    first: Coupling | Iterable[Coupling],
    second: Coupling | Iterable[Coupling],
    *,
    rounded: bool = False,
    tol: float | None = None,
    progress: Progress | None = None,
) -> Distances:
    """W1 between coupling k of one sequence and coupling k of another.

    Args:
        first: a coupling or a batch of them, or several of these.
        second: as many; their atoms may be others.
        rounded: round every plan to the weights it came with. Otherwise they are compared as they are.
        tol: see ``w1``.
        progress: called after every pair with the number of pairs that are done, and of all.

    Raises:
        ShapeError: sequences of two lengths, empty ones, or points of two dimensions.
        WeightError: two plans of different total mass, or a plan of none.
        DTypeError: no couplings.
    """
    first, second = singles(first), singles(second)
    if len(first) != len(second) or not len(first):
        raise ShapeError(
            f"expected as many couplings on both sides, at least one, received {len(first)} and {len(second)}"
        )
    found = []
    for k, pair in enumerate(zip(first, second, strict=True)):
        if not all(float(pi.mass) > 0 for pi in pair):
            raise WeightError(f"pair {k}: expected plans of positive mass, received one that is zero")
        error = max(float(pi.marginal_error()) for pi in pair)
        pi, rho = (p.rounded() for p in pair) if rounded else pair
        try:
            result = w1(pi, rho, tol=tol, rounded=False)
        except ShapeError as wrong:
            raise ShapeError(f"pair {k}: {wrong}") from None
        lower, upper, value = (float(getattr(result, name)) for name in ("lower", "upper", "value"))
        found.append(Distance(lower, upper, value, bool(result.exact), str(result.method), _between(pi, rho), error))
        if progress is not None:
            progress(k + 1, len(first))
    return Distances(tuple(found), rounded)


def _between(pi: Coupling, rho: Coupling) -> float:
    """W1 of the marginals, source plus target."""
    total = float(pi.mass)
    sides = zip((pi.source, pi.target), (rho.source, rho.target), pi.marginals(), rho.marginals(), strict=True)
    return total * sum(
        float(w1(Measure.normalized(a.points, p), Measure.normalized(b.points, q)).value) for a, b, p, q in sides
    )
