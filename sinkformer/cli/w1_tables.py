"""What ``w1`` shows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from sinkformer.evaluation import Distances, Report


def print_report(report: Report) -> None:
    """A table in a terminal, plain columns elsewhere; then what has to be known."""
    if not sys.stdout.isatty():
        print(report)
        return
    _print_table(report.rows, {"predictor"})
    _print_notes(report.notes)


def print_distances(found: Distances) -> None:
    """The distance of one pair as a number and a sentence, of several as a table."""
    if sys.stdout.isatty() and len(found.pairs) > 1:
        _print_table(found.rows, {"how"})
        _print_notes(found.notes)
        return
    print(found)


@contextmanager
def bar(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A function to be told how much is done, and of how much; it moves a bar on stderr if that is a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("w1", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _print_table(rows: list[tuple[str, ...]], left: set[str]) -> None:
    """The first row is the header; columns named in ``left`` are not numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in rows[0]:
        table.add_column(name, justify="left" if name in left else "right")
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)


def _print_notes(notes: tuple[str, ...]) -> None:
    console = Console(highlight=False)
    for note in notes:
        console.print(Text(note, style="dim"))
