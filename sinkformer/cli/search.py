"""``sinkformer search``: the files of a folder that are nearest to a text."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from sinkformer.cli import options as o
from sinkformer.cli.distance import Rows, measuring_aligner
from sinkformer.cli.distance_tables import print_hits
from sinkformer.cli.session import say, session
from sinkformer.cli.streams import read_text
from sinkformer.text.distances import search as nearest

# Characters of a line read at once.
_PIECE = 1 << 16


def search(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="Text to search for.", show_default=False)],
    folder: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Folders, searched recursively, or files.", show_default=False),
    ],
    glob: Annotated[str, typer.Option(metavar="PATTERN", help="Names of the files of a folder.")] = "*.txt",
    file: Annotated[bool, typer.Option("--file", help="QUERY is a file (UTF-8); '-' is stdin.")] = False,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="How many files.")] = 10,
    size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Least words of a passage. Default: those of QUERY, at least 32."),
    ] = None,
    rows: Rows = 20,
    format: Annotated[o.ReportFormat, typer.Option(help="A list, or a JSON line for each file.")] = o.ReportFormat.text,
    model: o.Model = None,
    layer: o.Layer = None,
    device: o.Device = None,
    null_price: o.NullPrice = None,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Rank the files of a folder by their passage nearest to a text, and explain the first.

    Files that are not UTF-8 are left out, with a warning.

    Example: sinkformer search "a cat on a mat" notes --glob "*.md"
    """
    with session(quiet=quiet, debug=debug):
        text = read_text(query) if file else query
        paths = sorted({path for place in folder for path in _files(place, glob)})
        if not paths:
            raise FileNotFoundError(2, f"no file is called {glob}; name others with --glob", str(folder[0]))
        aligner = measuring_aligner(model=model, layer=layer, device=device, null_price=null_price)
        console = Console(stderr=True)
        shown = track(paths, "searching", console=console, transient=True, disable=quiet or not console.is_terminal)
        found = nearest(aligner, text, _documents(shown, quiet=quiet), top=top, size=size)
        if format is o.ReportFormat.jsonl:
            for hit in found.hits:
                print(dumps(hit.to_dict(), ensure_ascii=False, allow_nan=False))
        else:
            print_hits(found, rows)
        if not quiet:
            say(f"{found.documents} files, {found.passages} passages, {found.matched} of them matched word by word")


def _files(place: Path, glob: str) -> Iterator[Path]:
    if place.is_dir():
        yield from (path for path in place.rglob(glob) if path.is_file())
    elif place.exists():
        yield place
    else:
        raise FileNotFoundError(2, "No such file or directory", str(place))


def _documents(paths, *, quiet: bool) -> Iterator[tuple[str, Iterator[str]]]:
    """Name and lines of every file that can be read, one open at a time."""
    for path in paths:
        reason = _unreadable(path)
        if reason is None:
            with path.open(encoding="utf-8-sig") as file:
                yield str(path), _lines(file)
        elif not quiet:
            say(f"warning: {path}: {reason}; left out")


def _lines(file) -> Iterator[str]:
    return iter(partial(file.readline, _PIECE), "")


def _unreadable(path: Path) -> str | None:
    """Why a file has no text; it is read to its end, so that nothing fails half-way through."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for _ in _lines(file):
                pass
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte 0x{error.object[error.start]:02x})"
    except OSError as error:
        return error.strerror or str(error)
    return None
