"""The ledger of a construction: what every phase assumed, chose, and had to satisfy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from sinkformer.interpolation.rationals import fraction, spelled

if TYPE_CHECKING:
    from sinkformer.interpolation.rationals import Rational


@dataclass(frozen=True)
class Entry:
    """One phase.

    Attributes:
        phase: its name.
        blocks: how many blocks it adds.
        hypotheses: what was checked, in words.
        constants: the numbers it chose.
        inequality: what must hold, in words: smaller < larger.
        smaller: the left side where it is tightest, or None where there is nothing to satisfy.
        larger: the right side there.
    """

    phase: str
    blocks: int
    hypotheses: str
    constants: Mapping[str, Fraction | int | str]
    inequality: str = ""
    smaller: Fraction | None = None
    larger: Fraction | None = None

    @property
    def holds(self) -> bool:
        """Whether the inequality holds, exactly."""
        return self.smaller is None or self.larger is None or self.smaller < self.larger

    @property
    def margin(self) -> float:
        """``larger - smaller``, in units of the larger size of the two; infinite where there is nothing to satisfy."""
        if self.smaller is None or self.larger is None:
            return float("inf")
        size = max(abs(self.larger), abs(self.smaller))
        return float((self.larger - self.smaller) / size) if size else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Numbers and texts, for JSON; fractions as ``"p/q"``."""
        return {
            "phase": self.phase,
            "blocks": self.blocks,
            "hypotheses": self.hypotheses,
            "constants": {
                name: value if isinstance(value, int | str) else spelled(value)
                for name, value in self.constants.items()
            },
            "inequality": self.inequality,
            "smaller": None if self.smaller is None else spelled(self.smaller),
            "larger": None if self.larger is None else spelled(self.larger),
            "holds": self.holds,
        }


@dataclass(frozen=True)
class Ledger:
    """The entries of a construction, in the order of its phases."""

    entries: tuple[Entry, ...]

    def __iter__(self) -> Iterator[Entry]:
        """The entries."""
        return iter(self.entries)

    def __len__(self) -> int:
        """Number of entries."""
        return len(self.entries)

    @property
    def blocks(self) -> int:
        """Number of blocks, over all phases."""
        return sum(entry.blocks for entry in self.entries)

    @property
    def holds(self) -> bool:
        """Whether every inequality holds."""
        return all(entry.holds for entry in self.entries)

    def __str__(self) -> str:
        """A table."""
        rows = [("phase", "blocks", "margin", "constants", "must hold")]
        rows += [
            (entry.phase, str(entry.blocks), _margin(entry), _constants(entry.constants), entry.inequality)
            for entry in self.entries
        ]
        rows.append(("total", str(self.blocks), "", "", ""))
        widths = [max(len(row[k]) for row in rows) for k in range(4)]
        lines = [
            f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:<{widths[3]}}  {row[4]}".rstrip()
            for row in rows
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Lists and dictionaries, for JSON."""
        return {"blocks": self.blocks, "holds": self.holds, "entries": [entry.to_dict() for entry in self.entries]}


def entry(
    phase: str,
    blocks: int,
    hypotheses: str,
    constants: Mapping[str, Rational | int | str],
    inequality: str = "",
    sides: tuple[Rational, Rational] | None = None,
) -> Entry:
    """An entry, of numbers as the phases have them."""
    plain = {name: value if isinstance(value, int | str) else fraction(value) for name, value in constants.items()}
    smaller, larger = (None, None) if sides is None else map(fraction, sides)
    return Entry(phase, blocks, hypotheses, plain, inequality, smaller, larger)


def _margin(found: Entry) -> str:
    return "" if found.smaller is None else f"{found.margin:.3f}"


def _constants(constants: Mapping[str, Fraction | int | str]) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in constants.items())


def _short(value: Fraction | int | str) -> str:
    if isinstance(value, int | str):
        return str(value)
    small = max(abs(value.numerator), value.denominator) < 10**9
    return str(value) if small and len(str(value)) <= 9 else f"{_float(value):.4g}"


def _float(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
