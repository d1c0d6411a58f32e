"""What ``distance`` and ``search`` show."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sinkformer.text.distances import Contribution, Explanation, SearchResult
from sinkformer.text.pages import visible, width

_ALONE = "(alone)"
_EXCERPT = 100


def print_explanation(found: Explanation, rows: int) -> None:
    """Distance, similarity, and the contributions."""
    print(f"distance {found.distance:.4f}  normalized {found.normalized_distance:.3f} (0 = identical)")
    if found.similarity is None:
        print(f"no rescaled similarity: {found.objection}")
    else:
        print(f"similarity {found.similarity:.3f} (1 = identical, 0 = unrelated)")
    _print_contributions(found.contributions, found.distance, found.source.words, found.target.words, rows)


def print_hits(found: SearchResult, rows: int) -> None:
    """A line for each file, then why the first one is there."""
    if not found.hits:
        print("(no file has words)")
        return
    for hit in found.hits:
        print(f"{hit.normalized_distance:.3f}  {visible(hit.name)}:{hit.line}  {_excerpt(hit.text)}")
    first = found.hits[0]
    print(
        f"\n{visible(first.name)}:{first.line}  distance {first.distance:.4f}  (0 = every word of the query is there)"
    )
    _print_contributions(first.contributions, first.distance, found.query.words, first.words, rows)


def _excerpt(text: str) -> str:
    line = " ".join(visible(word) for word in text.split())
    return line if len(line) <= _EXCERPT else line[: _EXCERPT - 1] + "…"


def _print_contributions(
    contributions: Sequence[Contribution], total: float, source: Sequence[str], target: Sequence[str], rows: int
) -> None:
    """A table in a terminal, plain columns elsewhere; dearest first."""
    if not contributions:
        return
    shown = contributions[: rows or None]
    cells = [
        (
            f"{c.cost:.4f}",
            f"{100 * c.cost / total if total else 0.0:.1f} %",
            _ALONE if c.source is None else f"{visible(source[c.source])} ({c.source})",
            _ALONE if c.target is None else f"{visible(target[c.target])} ({c.target})",
        )
        for c in shown
    ]
    print()
    _print_rows([("cost", "share", "source", "target"), *cells])
    rest = contributions[len(shown) :]
    if rest:
        cost = sum(c.cost for c in rest)
        print(f"and {len(rest)} more, {cost:.4f} together; --rows 0 shows all")


def _print_rows(rows: list[tuple[str, ...]]) -> None:
    if sys.stdout.isatty():
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for k, name in enumerate(rows[0]):
            table.add_column(name, justify="right" if k < 2 else "left")
        for row in rows[1:]:
            # Text, not str: brackets in a word are letters here, not markup.
            table.add_row(*(Text(cell, style="dim italic" if cell == _ALONE else "") for cell in row))
        Console(highlight=False).print(table)
        return
    widths = [max(map(width, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            " " * (w - width(x)) + x if k < 2 else x + " " * (w - width(x))
            for k, (x, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
