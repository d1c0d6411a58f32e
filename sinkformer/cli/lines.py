"""What ``align`` writes for one pair, and what has to be said about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sinkformer.cli.options import LineFormat
from sinkformer.text import Alignment, BadLine
from sinkformer.text.formats import format_jsonl

BAD, EMPTY, UNSOLVED = "bad", "empty", "not converged"


class Line(NamedTuple):
    """A line of output.

    Attributes:
        number: from 1.
        text: without its end.
        kinds: what is unusual about it: BAD, EMPTY, UNSOLVED.
        reason: why it is bad, with its number; empty if it is not.
    """

    number: int
    text: str
    kinds: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Layout:
    """How results are written.

    Attributes:
        format: links or JSON.
        ids: put number and tab before links.
        couplings: put the coupling into JSON.
    """

    format: LineFormat
    ids: bool
    couplings: bool = False

    def line(self, number: int, result: Alignment | BadLine) -> Line:
        """The line of a result; one without links if there is no result."""
        bad = isinstance(result, BadLine)
        if self.format is LineFormat.jsonl:
            text = format_jsonl(result, number, coupling=self.couplings)
        else:
            text = f"{number}\t" * self.ids + str(result) * (not bad)
        if isinstance(result, BadLine):
            return Line(number, text, (BAD,), str(result))
        kinds = (EMPTY,) * (not (len(result.source) and len(result.target))) + (UNSOLVED,) * (not result.converged)
        return Line(number, text, kinds, "")
