"""Files of pairs, output and progress of ``align``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sinkformer.cli.session import open_input
from sinkformer.errors import FormatError
from sinkformer.text.formats import count_lines, read_pairs, read_two_files


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
