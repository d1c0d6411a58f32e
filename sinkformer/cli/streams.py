"""Texts and pairs in, results and progress out."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sinkformer.cli.session import open_input, say
from sinkformer.errors import FormatError, TextError
from sinkformer.text import Alignment, BadLine
from sinkformer.text.formats import count_lines, read_pairs, read_two_files

_SHOWN = 5


@dataclass
class Report:
    """What went wrong in a file: the first bad lines at once, the numbers at the end."""

    quiet: bool
    counts: Counter[str]

    def note(self, result: Alignment | BadLine) -> bool:
        """Count one result; False for a line that gave none."""
        if isinstance(result, BadLine):
            if not self.quiet and self.counts["bad"] < _SHOWN:
                say(f"warning: {result}")
            self.counts["bad"] += 1
            return False
        self.counts["empty"] += not (len(result.source) and len(result.target))
        self.counts["not converged"] += not result.converged
        return True

    def sum_up(self) -> None:
        """Say how many lines there were of each kind."""
        if self.quiet:
            return
        if self.counts["bad"]:
            say(
                f"warning: {self.counts['bad']} lines could not be used; each has an empty line, or an error, in the output"
            )
        if self.counts["empty"]:
            say(f"warning: {self.counts['empty']} pairs have an empty side; their lines are empty")


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
def opened_pairs(
    pairs: str | None, src: Path | None, tgt: Path | None, *, tokenized: bool
) -> Iterator[tuple[Any, int | None]]:
    """Yield the lazy items and, for ordinary files, how many there are. Two files of different length are refused."""
    with ExitStack() as stack:
        if pairs is not None:
            file = stack.enter_context(open_input(pairs))
            total = count_lines(pairs) if Path(pairs).is_file() else None
            yield read_pairs(file, tokenized=tokenized), total
            return
        assert src is not None
        assert tgt is not None
        left, right = (stack.enter_context(open_input(str(path))) for path in (src, tgt))
        total = None
        if src.is_file() and tgt.is_file():
            total, other = count_lines(src), count_lines(tgt)
            if total != other:
                raise FormatError(
                    f"expected two files with the same number of lines, but {src} has {total} and {tgt} has "
                    f"{other}; check that they belong together"
                )
        yield read_two_files(left, right, tokenized=tokenized, names=(str(src), str(tgt))), total


@contextmanager
def output_stream(path: Path | None) -> Iterator[TextIO]:
    """The file, as UTF-8, or stdout."""
    if path is None:
        yield sys.stdout
        return
    with path.open("w", encoding="utf-8", newline="\n") as file:
        yield file


@contextmanager
def progress(total: int | None, quiet: bool) -> Iterator[Callable[[], None]]:
    """A function to call after each line; it moves a bar on stderr if that is a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("aligning"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("aligning", total=total)
        yield lambda: bar.advance(task)
