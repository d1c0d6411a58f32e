"""What ``evaluate`` shows besides its line."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sinkformer.metrics import AlignmentScores
from sinkformer.metrics.alignment import DEGREES

Rows = list[tuple[str, ...]]


def print_intervals(intervals: dict[str, tuple[float, float]], samples: int, seed: int) -> None:
    """One line."""
    (aer, f1) = (f"{100 * low:.1f} to {100 * high:.1f}" for low, high in (intervals["aer"], intervals["f1"]))
    print(f"95 % over pairs: AER {aer}, F1(S+P) {f1} ({samples} samples, seed {seed})")


def print_breakdown(scores: AlignmentScores) -> None:
    """Tables by length, by share of words without gold link, and recall by block degree."""
    if scores.sizes is None:
        print("\nno breakdown by length or nulls: neither file holds the words of every pair")
    else:
        _print(_rows("words of the longer side", scores.by_length()))
        _print(_rows("words without gold link", scores.by_nulls()))
    micro, rows = scores.micro, [("block degree", "gold links", "R(S+P)")]
    for name, gold, recall in zip(DEGREES, micro.degree_gold, micro.degree_recall, strict=True):
        rows.append((name, str(gold), "" if recall is None else _percent(recall)))
    _print(rows)


def _rows(title: str, groups: dict[str, AlignmentScores]) -> Rows:
    rows: Rows = [(title, "pairs", "AER", "P", "R(S+P)", "F1(S+P)", "total F1")]
    for name, group in groups.items():
        micro = group.micro
        values = (micro.aer, micro.precision, micro.recall_gold, micro.f1, group.total_f1)
        rows.append((name, str(len(group.counts)), *("" if x is None else _percent(x) for x in values)))
    return rows


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _print(rows: Rows) -> None:
    """A table in a terminal, plain columns elsewhere; the first row is the header."""
    print()
    if not sys.stdout.isatty():
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for first, *rest in rows:
            cells = [first.ljust(widths[0]), *(x.rjust(width) for x, width in zip(rest, widths[1:], strict=True))]
            print("  ".join(cells).rstrip())
        return
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for k, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if k else "left")
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)
