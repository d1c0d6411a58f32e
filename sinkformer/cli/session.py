"""What every verb shares: messages on stderr, exit codes, checks of files before the work starts."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import typer

from sinkformer.errors import ConfigError, DeviceError, SinkformerError, SinkformerWarning

FAILED, USAGE, NOT_CONVERGED = 1, 2, 3


def say(text: str) -> None:
    """One line on stderr."""
    # Closed, stderr is None, which print would take for stdout.
    if sys.stderr is not None:
        print(text, file=sys.stderr)


@contextmanager
def session(*, quiet: bool, debug: bool, stdout: bool = True) -> Iterator[None]:
    """Turn errors into one sentence and an exit code, warnings into lines on stderr, each kind shown once.

    Args:
        quiet: no warnings.
        debug: let errors through, with their traceback.
        stdout: the results go to standard output; False if they go to a file.
    """
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
            if stdout:
                _prepare_stdout()
            yield
            if stdout:
                sys.stdout.flush()
        except BrokenPipeError:
            # The reader has gone, as in `... | head`. Python would complain once more when it closes stdout.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(FAILED) from None
        except (SinkformerError, OSError) as error:
            if debug:
                raise
            say(f"error: {_sentence(error)}")
            raise typer.Exit(USAGE if isinstance(error, (ConfigError, DeviceError)) else FAILED) from None
        except MemoryError:
            if debug:
                raise
            say("error: out of memory; give shorter texts, or a smaller batch or problem")
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(FAILED) from None


def _prepare_stdout() -> None:
    """Results are UTF-8, whatever the locale; a closed stdout is an error before the work, not after it."""
    if sys.stdout is None:
        raise OSError("standard output is closed; leave it open, or send it to a file")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, SinkformerError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def usage(message: str) -> typer.BadParameter:
    """The exception for a wrong combination of arguments (exit code 2)."""
    return typer.BadParameter(message)


def open_input(path: str) -> BinaryIO:
    """File for reading bytes; ``-`` is stdin."""
    if path != "-":
        return Path(path).open("rb")
    if sys.stdin is None:
        raise OSError("standard input is closed; pipe the text in, or name a file instead of '-'")
    return sys.stdin.buffer


def check_writable(path: Path | None, *, inputs: Sequence[str | Path] = ()) -> None:
    """Raise OSError now if ``path`` cannot be written later: better before the work than after it.

    Args:
        path: the file to write; None is stdout.
        inputs: what is read, ``-`` for stdin. Opening ``path`` would empty it if it is one of these, also by
            another name (hard or symbolic link).
    """
    if path is None:
        return
    if path.is_dir():
        raise IsADirectoryError(21, "is a folder; name a file to write", str(path))
    parent = path.parent
    if not parent.is_dir():
        raise FileNotFoundError(2, f"cannot be written: the folder {parent} does not exist", str(path))
    if not os.access(path if path.exists() else parent, os.W_OK):
        raise PermissionError(13, "cannot be written: permission denied", str(path))
    # Devices such as /dev/null lose nothing by being written.
    if path.is_file() and any(_same_file(path, source) for source in inputs):
        raise FileExistsError(17, "is an input, and writing it would destroy it; name another file to write", str(path))


def same_place(a: Path, b: Path) -> bool:
    """Whether two files to write are one, by any name."""
    return a.resolve() == b.resolve() or (a.exists() and b.exists() and a.samefile(b))


def _same_file(path: Path, source: str | Path) -> bool:
    if str(source) != "-":
        return Path(source).exists() and path.samefile(source)
    try:
        return sys.stdin is not None and os.path.samestat(path.stat(), os.fstat(sys.stdin.fileno()))
    except io.UnsupportedOperation:  # a stdin that stands for no file, as in a notebook
        return False
