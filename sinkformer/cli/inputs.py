"""The files that ``align`` reads: lazily from the start, or in blocks of lines."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from sinkformer.cli.session import open_input, usage
from sinkformer.errors import FormatError
from sinkformer.text import BadLine, Pair
from sinkformer.text.formats import count_lines, line_offsets, read_pairs, read_two_files


@dataclass(frozen=True)
class Inputs:
    """One file of pairs, or two files line by line.

    Attributes:
        names: one or two paths; ``-`` is stdin.
        tokenized: words are separated by blanks.
    """

    names: tuple[str, ...]
    tokenized: bool

    @contextmanager
    def opened(self) -> Iterator[tuple[Iterator[Pair | BadLine], int | None]]:
        """Yield the lazy items and, for ordinary files, how many there are. Two files of different length are refused."""
        with ExitStack() as stack:
            files = [stack.enter_context(open_input(name)) for name in self.names]
            yield self._read(files), self._count()

    def read(self, block: dict[str, Any]) -> Iterator[Pair | BadLine]:
        """The items of a block, see :meth:`blocks`."""
        parts = []
        for name, (start, stop) in zip(self.names, block["bytes"], strict=True):
            with Path(name).open("rb") as file:
                file.seek(start)
                parts.append(io.BytesIO(file.read(stop - start)))
        return self._read(parts, block["first"])

    def blocks(self, size: int, skipped: int) -> list[dict[str, Any]]:
        """``{"first": number of its first line, "bytes": a range for each file}`` for every ``size`` lines.

        Args:
            size: lines of a block; the last may have fewer.
            skipped: lines at the start to leave out, a multiple of ``size``.
        """
        ranges = zip(*(pairwise(line_offsets(name, size)) for name in self.names), strict=True)
        return [{"first": k * size + 1, "bytes": found} for k, found in enumerate(ranges)][skipped // size :]

    def require_files(self, option: str) -> None:
        """Raise unless all inputs are files that can be read again."""
        if not all(name != "-" and Path(name).is_file() for name in self.names if name == "-" or Path(name).exists()):
            raise usage(f"{option} needs files that can be read again; write stdin or the pipe to a file first")

    def hashes(self) -> list[str]:
        """The first digits of the sha256 of every file."""
        return [_sha256(name)[:16] for name in self.names]

    def _read(self, files: list[BinaryIO] | list[io.BytesIO], first: int = 1) -> Iterator[Pair | BadLine]:
        if len(files) == 1:
            return read_pairs(files[0], tokenized=self.tokenized, first=first)
        names = (self.names[0], self.names[1])
        return read_two_files(files[0], files[1], tokenized=self.tokenized, names=names, first=first)

    def _count(self) -> int | None:
        if not all(Path(name).is_file() for name in self.names):
            return None
        counts = [count_lines(name) for name in self.names]
        if len(set(counts)) > 1:
            src, tgt = self.names
            raise FormatError(
                f"expected two files with the same number of lines, but {src} has {counts[0]} and {tgt} has "
                f"{counts[1]}; check that they belong together"
            )
        return counts[0]


def _sha256(name: str) -> str:
    digest = hashlib.sha256()
    with Path(name).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
