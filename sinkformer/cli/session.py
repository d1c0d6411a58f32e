"""What every verb shares: messages on stderr, exit codes, checks of files before the work starts."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import typer

from sinkformer.errors import SinkformerError, SinkformerWarning

FAILED, USAGE, NOT_CONVERGED = 1, 2, 3


def say(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr)


@contextmanager
def session(*, quiet: bool, debug: bool) -> Iterator[None]:
    """Turn errors into one sentence and exit code 1, warnings into lines on stderr, each kind shown once."""
    shown: set[type] = set()

    def show(message, category, filename, lineno, file=None, line=None):  # the signature of warnings.showwarning
        if not issubclass(category, SinkformerWarning) or quiet or category in shown:
            return
        shown.add(category)
        say(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("always", SinkformerWarning)
        warnings.showwarning = show
        try:
            yield
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader has gone, as in `... | head`. Python would complain once more when it closes stdout.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILED) from None
        except (SinkformerError, OSError) as error:
            if debug:
                raise
            say(f"error: {_sentence(error)}")
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(FAILED) from None


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, SinkformerError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def usage(message: str) -> typer.BadParameter:
    """The exception for a wrong combination of arguments (exit code 2)."""
    return typer.BadParameter(message)


def open_input(path: str) -> BinaryIO:
    """File for reading bytes; ``-`` is stdin."""
    return sys.stdin.buffer if path == "-" else Path(path).open("rb")


def check_writable(path: Path | None) -> None:
    """Raise OSError now if ``path`` cannot be written later: better before the work than after it."""
    if path is None:
        return
    if path.is_dir():
        raise IsADirectoryError(21, "is a folder; name a file to write", str(path))
    parent = path.parent
    if not parent.is_dir():
        raise FileNotFoundError(2, f"cannot be written: the folder {parent} does not exist", str(path))
    if not os.access(path if path.exists() else parent, os.W_OK):
        raise PermissionError(13, "cannot be written: permission denied", str(path))
