"""Where lines go: stdout, a file, or a file that another run can go on with, wherever this one ended.

Beside a file of the last kind, FILE, lies FILE.resume until all is done. Its first line says what FILE is made from:
settings, layout, and a hash of every input. Each further line notes what was unusual about a line of FILE, so that the
warnings and the exit code of the last run are those of one uninterrupted run. A note leaves the process before its line.

Results are made a window at a time, and the last digits of a result depend on what else is in its window. So a run goes on
at the start of a window, and what is beyond in FILE is cut off and made again, byte for byte.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from sinkformer.cli.lines import Line
from sinkformer.errors import ConfigError, FormatError


@dataclass
class Output:
    """Where lines go.

    Attributes:
        file: stands behind the lines that are done.
        done: lines that are done, whole windows.
        notes: what was noted about them.
        side: FILE.resume, if another run can go on.
    """

    file: TextIO
    done: int = 0
    notes: tuple[tuple[str, ...], ...] = ()
    side: Path | None = None

    def write(self, line: Line) -> None:
        """Write a line, after noting what is unusual about it."""
        if self.side is not None and line.kinds:
            with self.side.open("ab", buffering=0) as file:
                file.write(json.dumps([line.number, *line.kinds]).encode() + b"\n")
        self.file.write(line.text + "\n")


@contextmanager
def fresh(path: Path | None) -> Iterator[Output]:
    """The file, as UTF-8, emptied; or stdout."""
    if path is None:
        yield Output(sys.stdout)
        return
    with path.open("w", encoding="utf-8", newline="\n") as file:
        yield Output(file)


@contextmanager
def continued(path: Path, made_from: dict[str, Any], window: int) -> Iterator[Output]:
    """Open ``path`` for the lines that are missing; FILE.resume is removed when the block ends without an error.

    Args:
        path: the output.
        made_from: everything its lines depend on, JSON-able, by name.
        window: lines made together.

    Raises:
        ConfigError: the lines that are there were made from something else: names the difference.
        FormatError: there is a file, and nothing says what from; or FILE.resume is none.
    """
    side, notes, done = resume_file(path), {}, 0
    if side.exists():
        before, notes = _read(side)
        _check(path, before, made_from)
        done = _cut(path, window)
        notes = {number: kinds for number, kinds in notes.items() if number <= done}
    elif path.exists() and path.stat().st_size:
        raise FormatError(
            f"{path} exists and {side} does not, so that it is finished, or not from a run with --resume; remove it to "
            "start from the first line"
        )
    else:
        # Before the side file: lines that somebody else wrote must never lie beside one.
        path.open("wb").close()
    _replace(side, [made_from, *([number, *kinds] for number, kinds in sorted(notes.items()))])
    with path.open("a", encoding="utf-8", newline="\n") as file:
        yield Output(file, done, tuple(notes.values()), side)
        file.flush()
        os.fsync(file.fileno())
    side.unlink()


def resume_file(path: Path) -> Path:
    """Where the state of a run lies."""
    return path.with_name(path.name + ".resume")


def _read(side: Path) -> tuple[dict[str, Any], dict[int, tuple[str, ...]]]:
    """What the lines are made from, and the notes by line; a torn last note is about a line that was never written."""
    raw = side.read_bytes().split(b"\n")[:-1]
    try:
        made_from, *notes = (json.loads(line) for line in raw)
        return dict(made_from), {int(number): tuple(kinds) for number, *kinds in notes}
    except (ValueError, TypeError) as error:
        raise FormatError(f"{side} is not what a run with --resume leaves; remove it and the output") from error


def _replace(side: Path, records: list[Any]) -> None:
    """Write the side file as a whole, or not at all."""
    part = side.with_name(side.name + ".part")
    part.write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in records))
    part.replace(side)


def _check(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    now = json.loads(json.dumps(now))
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if names:
        changes = ", ".join(f"{name} {before.get(name)!r}, now {now.get(name)!r}" for name in names)
        raise ConfigError(
            f"expected what {path} was begun with, received a difference: {changes}; run it as before, or remove the file "
            f"and {resume_file(path)} to start again"
        )


def _cut(path: Path, window: int) -> int:
    """Cut the file after its last whole window; returns the number of lines that are left."""
    done = position = kept = 0
    if not path.exists():
        return 0
    with path.open("rb") as file:
        for k, raw in enumerate(file, 1):
            position += len(raw)
            if raw.endswith(b"\n") and k % window == 0:
                done, kept = k, position
    os.truncate(path, kept)
    return done
