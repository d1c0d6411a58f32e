"""Files of text pairs in, alignments out.

A file of pairs has one pair on each line: ``source ||| target``, blanks around the bars or not, or ``source
TAB target``; or there are two files, line by line. A line that cannot be read becomes a ``BadLine`` and the
lines after it are read as if nothing had happened, so that output and input keep the same line numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from sinkformer.errors import FormatError

if TYPE_CHECKING:
    from sinkformer.text.alignments import Alignment

Text = str | list[str]

_BARS = "|||"
_LINK = re.compile(r"(\d{1,9})-(\d{1,9})", re.ASCII)


@dataclass(frozen=True)
class Pair:
    """Two texts read from a line.

    Attributes:
        line: line number, from 1.
        source: the first text; a list of tokens if the file was read as tokenised.
        target: the second text, of the same type.
    """

    line: int
    source: Text
    target: Text


@dataclass(frozen=True)
class BadLine:
    """A line without a pair.

    Attributes:
        line: line number, from 1.
        reason: one sentence.
    """

    line: int
    reason: str

    def __str__(self) -> str:
        """Line number and reason."""
        return f"line {self.line}: {self.reason}"


def read_pairs(file: BinaryIO, *, tokenized: bool = False, first: int = 1) -> Iterator[Pair | BadLine]:
    """Read ``source ||| target`` or ``source TAB target`` lines lazily, one item for each line.

    A line with bars is split at the bars, whatever tabs it holds; a side may be empty.

    Args:
        file: opened in binary mode, so that bytes that are not UTF-8 spoil their own line only.
        tokenized: split both sides at blanks and keep the tokens.
        first: number of the first line of ``file``, if it is a part of a longer one.
    """
    for number, raw in enumerate(_lines(file, first), first):
        line = _decoded(raw, number)
        yield line if isinstance(line, BadLine) else _pair(line, number, tokenized)


def read_two_files(
    source: BinaryIO,
    target: BinaryIO,
    *,
    tokenized: bool = False,
    names: tuple[str, str] = ("source", "target"),
    first: int = 1,
) -> Iterator[Pair | BadLine]:
    """Read line k of both files as pair k.

    Args:
        source: opened in binary mode.
        target: opened in binary mode.
        tokenized: split both sides at blanks and keep the tokens.
        names: of the files, for messages.
        first: number of the first line of both, if they are parts of longer files.

    Raises:
        FormatError: one file has more lines than the other; raised when the shorter one ends.
    """
    for number, (a, b) in enumerate(zip_longest(_lines(source, first), _lines(target, first)), first):
        if a is None or b is None:
            shorter, longer = names if a is None else names[::-1]
            raise FormatError(
                f"expected two files with the same number of lines, but {shorter} ends after line "
                f"{number - 1} and {longer} goes on; check that they belong together"
            )
        left, right = _decoded(a, number), _decoded(b, number)
        bad = next((x for x in (left, right) if isinstance(x, BadLine)), None)
        if bad is not None:
            side = names[0] if bad is left else names[1]
            yield BadLine(number, f"{bad.reason} ({side})")
        else:
            yield Pair(number, _side(str(left), tokenized), _side(str(right), tokenized))


def count_lines(path: str | Path) -> int:
    """Number of lines of a file, the last one with or without a line end."""
    count, last = 0, b"\n"
    with Path(path).open("rb") as file:
        while block := file.read(1 << 20):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")


def line_offsets(path: str | Path, every: int) -> list[int]:
    """Where the lines 0, ``every``, 2 ``every``, ... of a file begin, in bytes, and where the file ends."""
    offsets, position = [0], 0
    with Path(path).open("rb") as file:
        for k, raw in enumerate(file, 1):
            position += len(raw)
            if k % every == 0:
                offsets.append(position)
    return offsets if offsets[-1] == position else [*offsets, position]


def _lines(file: BinaryIO, first: int = 1) -> Iterator[bytes]:
    """Lines without their end; only the line feed ends a line (str.splitlines would also cut at U+2028 and others)."""
    for k, raw in enumerate(file, first):
        raw = raw.removesuffix(b"\n").removesuffix(b"\r")
        yield raw.removeprefix(b"\xef\xbb\xbf") if k == 1 else raw


def _decoded(raw: bytes, number: int) -> str | BadLine:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return BadLine(number, f"not UTF-8: byte 0x{raw[error.start]:02x} at position {error.start}")


def _pair(line: str, number: int, tokenized: bool) -> Pair | BadLine:
    separator = _BARS if _BARS in line else "\t"
    parts = line.split(separator)
    if len(parts) != 2:
        if not line.strip():
            return BadLine(number, "blank; expected 'source ||| target' or source TAB target")
        name = "'|||'" if separator == _BARS else "tab"
        found = f"{len(parts) - 1} times {name}" if len(parts) > 2 else "neither '|||' nor a tab"
        return BadLine(number, f"expected one '|||' or one tab between the two texts, found {found}")
    return Pair(number, _side(parts[0], tokenized), _side(parts[1], tokenized))


def _side(text: str, tokenized: bool) -> Text:
    return text.split() if tokenized else text.strip()


def format_pharaoh(links: Iterable[tuple[int, int]]) -> str:
    """Links as ``0-0 1-2``."""
    return " ".join(f"{i}-{j}" for i, j in links)


def parse_pharaoh(line: str, *, number: int = 1, sizes: tuple[int, int] | None = None) -> list[tuple[int, int]]:
    """Links of a line ``0-0 1-2``, zero-based, in the order given.

    Args:
        line: the line; blank means no links.
        number: its number in the file, for messages.
        sizes: numbers of source and target words; links beyond them are an error.

    Raises:
        FormatError: something that is no link, or a link outside the sentence: names line and link.
    """
    links = []
    for item in line.split():
        match = _LINK.fullmatch(item)
        if match is None:
            raise FormatError(f"line {number}: expected links such as 0-0, received {item!r}")
        i, j = int(match[1]), int(match[2])
        if sizes is not None and (i >= sizes[0] or j >= sizes[1]):
            raise FormatError(
                f"line {number}: link {item} points outside the pair of {sizes[0]} and {sizes[1]} words; "
                "check that links and texts use the same tokens, counted from zero"
            )
        links.append((i, j))
    return links


def read_pharaoh(file: BinaryIO, sizes: Sequence[tuple[int, int]] | None = None) -> Iterator[list[tuple[int, int]]]:
    """Links of each line of a file.

    Args:
        file: opened in binary mode.
        sizes: numbers of source and target words of each line, if known.

    Raises:
        FormatError: see ``parse_pharaoh``; also a line that is not UTF-8, or more or fewer lines than
            ``sizes``.
    """
    number = 0
    for number, raw in enumerate(_lines(file), 1):
        line = _decoded(raw, number)
        if isinstance(line, BadLine):
            raise FormatError(str(line))
        if sizes is not None and number > len(sizes):
            raise FormatError(f"line {number}: expected {len(sizes)} lines of links, one for each pair, received more")
        yield parse_pharaoh(line, number=number, sizes=None if sizes is None else sizes[number - 1])
    if sizes is not None and number < len(sizes):
        raise FormatError(f"expected {len(sizes)} lines of links, one for each pair, received {number}")


def format_jsonl(result: Alignment | BadLine, id: str | int | None = None, *, coupling: bool = False) -> str:
    """One JSON line: the fields of ``Alignment.to_dict``, or ``{"id", "error"}`` for a line without a pair."""
    if isinstance(result, BadLine):
        record = {"id": id if id is not None else result.line, "error": result.reason}
    else:
        record = result.to_dict(id, coupling=coupling)
    return json.dumps(record, ensure_ascii=False)
