"""Texts and pairs in, results and progress out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sinkformer.cli.lines import BAD, EMPTY, Line
from sinkformer.cli.session import open_input, say
from sinkformer.errors import TextError

_SHOWN = 5


@dataclass
class Report:
    """What went wrong in a file: the first bad lines at once, the numbers at the end."""

    quiet: bool
    counts: Counter[str]

    def note(self, line: Line) -> None:
        """Count what is unusual about a line."""
        if line.reason and not self.quiet and self.counts[BAD] < _SHOWN:
            say(f"warning: {line.reason}")
        self.counts.update(line.kinds)

    def add(self, kinds: Iterable[tuple[str, ...]]) -> None:
        """Count lines that an earlier run has reported."""
        for these in kinds:
            self.counts.update(these)

    def sum_up(self) -> None:
        """Say how many lines there were of each kind."""
        if self.quiet:
            return
        if self.counts[BAD]:
            say(
                f"warning: {self.counts[BAD]} lines could not be used; each has an empty line, or an error, in the output"
            )
        if self.counts[EMPTY]:
            say(f"warning: {self.counts[EMPTY]} pairs have an empty side; their lines are empty")


def read_text(path: str) -> str:
    """A whole file, or stdin for ``-``, as one text."""
    with open_input(path) as file:
        raw = file.read()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise TextError(
            f"{path}, line {line}: not UTF-8 (byte 0x{raw[error.start]:02x}); convert the file to UTF-8"
        ) from None


@contextmanager
def progress(total: int | None, quiet: bool, done: int = 0) -> Iterator[Callable[[], None]]:
    """A function to call after each line; it moves a bar on stderr if that is a terminal, from ``done`` on."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("aligning"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("aligning", total=total, completed=done)
        yield lambda: bar.advance(task)
