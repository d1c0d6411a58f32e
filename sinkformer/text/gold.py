"""Word links read from the formats that gold alignments and aligners use.

======== =====================================================================================================
pharaoh  a line of links for each pair: ``0-0 1-2``. ``1p2`` and ``1?2`` are possible links, ``1-2:0.7`` has a
         confidence, which is checked and not kept. Files called ``.talp`` and ``.gold`` are this format.
jsonl    ``{"source": [...], "target": [...], "sure": [[0, 0]], "possible": [[1, 2]]}``, ``"possible"`` with or
         without the sure ones; or what ``sinkformer align --format jsonl`` writes, with ``"links"`` and, asked for with
         ``--couplings``, ``"coupling"``.
tsv      three columns: source, target, links (XL-WA); empty columns after them do not count. Two columns:
         ``source ||| target`` and links, or an identifier and links (``sinkformer align --ids``).
multimwa MultiMWA: column 2 source, 4 target, 8 sure links, 9 possible links.
blinker  a line for each link, not for each pair: ``pair source target`` (Blinker, samp.S), or ``pair source target S``
         with ``P`` for possible ones, and a confidence (NAACL gold). Pairs and words are counted from one, word 0 is null.
======== =====================================================================================================

Words are those between blanks, or the items of the lists. Every link is checked against its sentences where
these are known. Every error names file and line.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sinkformer.errors import ConfigError, FormatError, SinkformerError, TextError
from sinkformer.metrics import AlignmentScores, coupling_tv, coupling_w1, score_alignments, target_coupling
from sinkformer.text.formats import BadLine, _decoded, _lines
from sinkformer.text.tokens import reject_surrogates

Link = tuple[int, int]

_LINK = re.compile(r"(\d{1,9})([-p?])(\d{1,9})(?::(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+))?", re.ASCII)
_SIGNS = ("p", "?")
_BLINKER = re.compile(r"\s*(\d{1,9})\s+(\d{1,9})\s+(\d{1,9})(?:\s+([SP]))?(?:\s+[\d.eE+-]+)?\s*", re.ASCII)
# Shares are of a word's mass; without null atoms those of the shorter side add up to the longer one.
_MOST_SHARE = 1e6
# Pairs without a link in a row, beyond which a pair number is no number of a pair.
_LARGEST_GAP = 100_000


class GoldFormat(str, Enum):
    """How a file of links is written; see the module."""

    pharaoh = "pharaoh"
    jsonl = "jsonl"
    tsv = "tsv"
    multimwa = "multimwa"
    blinker = "blinker"


@dataclass(frozen=True)
class LinkedPair:
    """The links of one pair.

    Attributes:
        line: line number, from 1; of ``blinker`` that of its first link, 0 without.
        sure: links (i, j) of word indices from zero, sorted, without repetition.
        possible: possible links that are not sure.
        source: source words; None if the file does not hold them.
        target: target words, likewise.
        id: identifier in the file, None without.
        error: why the aligner gave no links for this line; None if it did.
        coupling: shares of mass ``(n + 1, m + 1)``, null last, float64; None if the file does not hold them.
    """

    line: int
    sure: tuple[Link, ...]
    possible: tuple[Link, ...] = ()
    source: tuple[str, ...] | None = None
    target: tuple[str, ...] | None = None
    id: str | int | None = None
    error: str | None = None
    coupling: Tensor | None = field(default=None, compare=False)

    @property
    def links(self) -> tuple[Link, ...]:
        """Sure and possible links."""
        return tuple(sorted({*self.sure, *self.possible}))

    @property
    def sizes(self) -> tuple[int, int] | None:
        """Numbers of source and target words; None if unknown."""
        return None if self.source is None or self.target is None else (len(self.source), len(self.target))


@dataclass(frozen=True)
class LinkFile:
    """What was read from a file.

    Attributes:
        name: what messages call the file.
        format: the format, given or guessed.
        pairs: one for each line.
        repeated: how many links stood more than once in their line, or both as sure and as possible (they count as sure).
    """

    name: str
    format: GoldFormat
    pairs: tuple[LinkedPair, ...]
    repeated: int

    def where(self, k: int) -> str:
        """File and line of pair k, for messages."""
        line = self.pairs[k].line
        return f"{self.name}:{line}" if line else f"{self.name}: pair {k + 1}"


def read_links(
    file: str | Path | BinaryIO,
    format: GoldFormat | str | None = None,
    *,
    one_based: bool = False,
    possible: str | None = None,
    name: str | None = None,
) -> LinkFile:
    """Read a file of links, gold or predicted.

    Args:
        file: path, or a file opened in binary mode.
        format: see the module; None: guessed from the first line that is not blank.
        one_based: words are counted from 1 in the file; the result counts from 0.
        possible: the sign of possible links in ``pharaoh``, ``tsv`` and ``multimwa`` links, ``"p"`` or ``"?"``; None: both.
        name: what messages call the file; default: its path.

    Raises:
        ConfigError: an unknown format or sign.
        FormatError: a line that does not follow the format, a link that points outside its sentence, or a file
            without a line: names file and line.
        OSError: the file cannot be read.
    """
    if possible not in (None, *_SIGNS):
        raise ConfigError(f"expected the sign of possible links to be 'p' or '?', received {possible!r}")
    if isinstance(file, (str, Path)):
        with Path(file).open("rb") as opened:
            return read_links(
                io.BytesIO(opened.read()), format, one_based=one_based, possible=possible, name=name or str(file)
            )
    name = name or str(getattr(file, "name", "links"))
    lines = []
    for number, raw in enumerate(_lines(file), 1):
        line = _decoded(raw, number)
        if isinstance(line, BadLine):
            raise FormatError(f"{name}:{number}: {line.reason}")
        lines.append(line)
    if not lines:
        raise FormatError(f"{name}: expected a line of links for each pair, received an empty file")
    kind = _guess(lines) if format is None else _format(format)
    if kind is GoldFormat.blinker:
        return _blinker(lines, name)
    reader = _Reader(one_based, _SIGNS if possible is None else (possible,))
    pairs = []
    for number, line in enumerate(lines, 1):
        try:
            pairs.append(reader.read(kind, line, number))
        except (FormatError, TextError) as error:
            raise FormatError(f"{name}:{number}: {error}") from None
    return LinkFile(name, kind, tuple(pairs), reader.repeated)


def _of_one_length(gold: LinkFile, predicted: LinkFile) -> tuple[LinkFile, LinkFile]:
    """Both files, pairs without a line at the end of a ``blinker`` file filled in."""
    most = max(len(gold.pairs), len(predicted.pairs))
    files = [_filled(file, most) if file.format is GoldFormat.blinker else file for file in (gold, predicted)]
    if len(files[0].pairs) != len(files[1].pairs):
        kind = "pairs" if GoldFormat.blinker in (gold.format, predicted.format) else "lines"
        raise FormatError(
            f"expected two files with the same number of {kind}, but {gold.name} has {len(gold.pairs)} and "
            f"{predicted.name} has {len(predicted.pairs)}; check that they belong together"
        )
    return files[0], files[1]


def _filled(file: LinkFile, count: int) -> LinkFile:
    rest = (LinkedPair(0, (), id=k) for k in range(len(file.pairs) + 1, count + 1))
    return replace(file, pairs=(*file.pairs, *rest))


def _blinker(lines: Sequence[str], name: str) -> LinkFile:
    """Links grouped by pair; a pair without a line of its own has no links. Word 0 is null, which carries none."""
    sure, possible, first, last, count = {}, {}, {}, 0, 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        match = _BLINKER.fullmatch(line)
        pair = int(match[1]) if match else 0
        if match is None or not pair:
            raise FormatError(
                f"{name}:{number}: expected 'pair source target', counted from one, and perhaps S or P, received "
                f"{_short(line)!r}"
            )
        if not last <= pair <= last + _LARGEST_GAP:
            raise FormatError(f"{name}:{number}: expected pairs in order, received pair {pair} after {last}")
        last = pair
        first.setdefault(pair, number)
        i, j = int(match[2]) - 1, int(match[3]) - 1
        if min(i, j) >= 0:
            count += 1
            (possible if match[4] == "P" else sure).setdefault(pair, set()).add((i, j))
    pairs, distinct = [], 0
    for pair in range(1, last + 1):
        certain = sure.get(pair, set())
        extra = possible.get(pair, set()) - certain
        distinct += len(certain) + len(extra)
        pairs.append(LinkedPair(first.get(pair, 0), tuple(sorted(certain)), tuple(sorted(extra)), id=pair))
    return LinkFile(name, GoldFormat.blinker, tuple(pairs), count - distinct)


def score_files(gold: LinkFile, predicted: LinkFile, *, ignore_possible: bool = False) -> AlignmentScores:
    """Score line k of one file against line k of the other.

    Numbers of words are known where either file holds the words; total scores and breakdowns need them in every pair.
    A predicted link counts whether it is marked as sure or as possible; a line for which the aligner reports an error has
    no links.

    Args:
        gold: gold links.
        predicted: links of a system.
        ignore_possible: possible gold links are no gold: a predicted link that is only possible is then wrong.

    Raises:
        FormatError: different numbers of lines; both files hold the words and they differ, upper and lower case aside;
            a link outside the words of the other file; a gold line that holds an error. Names files and lines.
    """
    gold, predicted = _of_one_length(gold, predicted)
    sizes = []
    for k, (wanted, found) in enumerate(zip(gold.pairs, predicted.pairs, strict=True)):
        if wanted.error is not None:
            raise FormatError(f"{gold.where(k)}: expected gold links, received the error {_short(wanted.error)!r}")
        for side in ("source", "target"):
            _check_words(getattr(wanted, side), getattr(found, side), f"{side} of {predicted.where(k)}", gold.where(k))
        size = wanted.sizes or found.sizes
        sizes.append(size)
        if size is not None:
            _check_range(wanted, size, gold.where(k), 0)
            _check_range(found, size, predicted.where(k), 0)
    return score_alignments(
        [pair.links for pair in predicted.pairs],
        [pair.sure for pair in gold.pairs],
        None if ignore_possible else [pair.possible for pair in gold.pairs],
        sizes=None if None in sizes else sizes,
    )


@dataclass(frozen=True)
class CouplingDistances:
    """Distances of predicted couplings from those that gold links stand for, pair by pair; null words included.

    Attributes:
        tv: total variation, in [0, 1].
        w1: W1 when every word is at distance 1 from every other, on both sides: between ``tv`` and twice it.
    """

    tv: tuple[float, ...]
    w1: tuple[float, ...]

    def __str__(self) -> str:
        """Means over pairs."""
        tv, w1 = (sum(values) / len(values) for values in (self.tv, self.w1))
        return f"couplings: TV {tv:.3f}  W1 {w1:.3f}  pairs {len(self.tv)}"


def coupling_distances(
    gold: LinkFile, predicted: LinkFile, *, ignore_possible: bool = False
) -> CouplingDistances | None:
    """How far the couplings of a file are from gold, where every predicted pair has one; None if none has.

    A line that holds an error instead of a result is left out.

    Args:
        gold: gold links; the files belong together, see :func:`score_files`.
        predicted: lines of ``sinkformer align --format jsonl --couplings``.
        ignore_possible: possible gold links carry no mass.

    Raises:
        FormatError: some lines have a coupling and others have none; a coupling without mass. Names file and line.
    """
    gold, predicted = _of_one_length(gold, predicted)
    if all(pair.coupling is None for pair in predicted.pairs):
        return None
    tv, w1 = [], []
    for k, (wanted, found) in enumerate(zip(gold.pairs, predicted.pairs, strict=True)):
        if found.error is not None:
            continue
        if found.coupling is None:
            raise FormatError(
                f"{predicted.where(k)}: expected a coupling in every line, received a line without; align all of them "
                f"with --couplings"
            )
        n, m = (size - 1 for size in found.coupling.shape)
        target = target_coupling(wanted.sure if ignore_possible else wanted.links, n, m)
        try:
            tv.append(coupling_tv(found.coupling, target))
            w1.append(coupling_w1(found.coupling, target, *(1 - torch.eye(size + 1) for size in (n, m))))
        except SinkformerError as error:
            raise FormatError(f"{predicted.where(k)}: {error}") from None
    return CouplingDistances(tuple(tv), tuple(w1))


def _check_words(a: tuple[str, ...] | None, b: tuple[str, ...] | None, where: str, other: str) -> None:
    if a is None or b is None:
        return
    if len(a) != len(b):
        raise FormatError(f"expected the {where} to have the {len(a)} words of {other}, received {len(b)}")
    for k, (x, y) in enumerate(zip(a, b, strict=True)):
        if x.casefold() != y.casefold():
            raise FormatError(
                f"expected the {where} to have the words of {other}, but word {k} is {y!r}, not {x!r}; check that the files "
                "belong together"
            )


def _format(name: GoldFormat | str) -> GoldFormat:
    try:
        return GoldFormat(name)
    except ValueError:
        names = ", ".join(x.value for x in GoldFormat)
        raise ConfigError(f"expected one of the formats {names}, received {name!r}") from None


def _guess(lines: Sequence[str]) -> GoldFormat:
    first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("{"):
        return GoldFormat.jsonl
    if _BLINKER.fullmatch(first):
        return GoldFormat.blinker
    columns = first.split("\t")
    if len(columns) == 1:
        return GoldFormat.pharaoh
    return GoldFormat.multimwa if len(columns) >= 8 and any(map(str.strip, columns[3:])) else GoldFormat.tsv


class _Reader:
    """Reads single lines; counts repeated links. Its errors do not name the line."""

    def __init__(self, one_based: bool, signs: Sequence[str]):
        self.base, self.signs, self.repeated = int(one_based), signs, 0

    def read(self, kind: GoldFormat, line: str, number: int) -> LinkedPair:
        if kind is GoldFormat.jsonl:
            return self._json(line, number)
        if kind is GoldFormat.pharaoh:
            return self._pair(number, *self._parsed(line))
        return self._multimwa(line, number) if kind is GoldFormat.multimwa else self._tsv(line, number)

    def _tsv(self, line: str, number: int) -> LinkedPair:
        columns = line.split("\t")
        if len(columns) == 2:
            first, links = columns
            if "|||" not in first:
                return replace(self._pair(number, *self._parsed(links)), id=first)
            texts = first.split("|||")
            if len(texts) != 2:
                raise FormatError(f"expected one '|||' between the two texts, found {len(texts) - 1}")
            return self._pair(number, *self._parsed(links), *texts)
        if len(columns) < 3 or any(map(str.strip, columns[3:])):
            raise FormatError(
                f"expected the columns source, target, links, or text and links, received {len(columns)} columns"
            )
        return self._pair(number, *self._parsed(columns[2]), *columns[:2])

    def _multimwa(self, line: str, number: int) -> LinkedPair:
        columns = line.split("\t")
        if len(columns) < 8:
            raise FormatError(
                f"expected at least 8 columns, source in 2, target in 4, links in 8, received {len(columns)}"
            )
        sure, possible = self._parsed(columns[7])
        if len(columns) > 8:
            both = self._parsed(columns[8])
            possible = [*possible, *both[0], *both[1]]
        return replace(self._pair(number, sure, possible, columns[1], columns[3]), id=columns[0])

    def _json(self, line: str, number: int) -> LinkedPair:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"expected a JSON object, received {_short(line)}: {error}") from None
        if not isinstance(record, dict):
            raise FormatError(f"expected a JSON object, received {_short(line)}")
        if isinstance(record.get("error"), str):
            return LinkedPair(number, (), id=record.get("id"), error=record["error"])
        if ("sure" in record) == ("links" in record):
            raise FormatError("expected a list of links under 'sure' (gold), or under 'links' (an aligner's)")
        words = [_words(record, side) for side in ("source", "target")]
        # The aligner's links carry a confidence as third item.
        sure = _links(record, "links", 3) if "links" in record else _links(record, "sure", 2)
        possible = _links(record, "possible", 2) if "possible" in record else []
        pair = self._pair(number, sure, possible, *words)
        return replace(pair, id=record.get("id"), coupling=_coupling(record, pair.sizes))

    def _parsed(self, text: str) -> tuple[list[Link], list[Link]]:
        """Sure and possible links, as they are counted in the file."""
        sure, possible = [], []
        for item in text.split():
            match = _LINK.fullmatch(item)
            if match is None:
                signs = " or ".join(f"0{sign}0" for sign in self.signs)
                raise FormatError(f"expected links such as 0-0, possible ones such as {signs}, received {item!r}")
            if match[2] == "-":
                sure.append((int(match[1]), int(match[3])))
            elif match[2] in self.signs:
                possible.append((int(match[1]), int(match[3])))
            else:
                raise FormatError(f"expected possible links such as 0{self.signs[0]}0, received {item!r}")
            if match[4] is not None and float(match[4]) > 1:
                raise FormatError(f"expected a confidence in [0, 1], received {item!r}")
        return sure, possible

    def _pair(
        self,
        number: int,
        sure: Sequence[Link],
        possible: Sequence[Link],
        source: str | tuple[str, ...] | None = None,
        target: str | tuple[str, ...] | None = None,
    ) -> LinkedPair:
        if self.base:
            for i, j in (*sure, *possible):
                if not i or not j:
                    raise FormatError(f"expected words counted from one, received link {i}-{j}; drop the option if not")
            sure, possible = ([(i - 1, j - 1) for i, j in links] for links in (sure, possible))
        certain, extra = set(sure), set(possible) - set(sure)
        self.repeated += len(sure) + len(possible) - len(certain) - len(extra)
        source, target = (tuple(x.split()) if isinstance(x, str) else x for x in (source, target))
        pair = LinkedPair(number, tuple(sorted(certain)), tuple(sorted(extra)), source, target)
        if pair.sizes is not None:
            _check_range(pair, pair.sizes, "", self.base)
        return pair


def _check_range(pair: LinkedPair, sizes: tuple[int, int], where: str, base: int) -> None:
    for i, j in pair.links:
        if i >= sizes[0] or j >= sizes[1]:
            hint = "; are they counted from one?" if not base and i <= sizes[0] and j <= sizes[1] else ""
            raise FormatError(
                f"{where}{': ' if where else ''}link {i + base}-{j + base} points outside the pair of {sizes[0]} and "
                f"{sizes[1]} words, counted from {'one' if base else 'zero'}; check that links and texts use the same "
                f"tokens{hint}"
            )


def _words(record: dict[str, Any], side: str) -> tuple[str, ...] | None:
    words = record.get(side)
    if words is None:
        return None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise FormatError(f"expected a list of words under {side!r}, received {_short(json.dumps(words))}")
    for word in words:
        reject_surrogates(word)
    return tuple(words)


def _links(record: dict[str, Any], key: str, most: int) -> list[Link]:
    links = record[key]
    if not isinstance(links, list):
        raise FormatError(f"expected a list of links under {key!r}, received {_short(json.dumps(links))}")
    for link in links:
        good = isinstance(link, list) and 2 <= len(link) <= most
        good = good and all(type(index) is int and index >= 0 for index in link[:2])
        if not good or not all(type(confidence) in (int, float) and 0 <= confidence <= 1 for confidence in link[2:]):
            raise FormatError(f"expected links such as [0, 0] under {key!r}, received {_short(json.dumps(link))}")
    return [(link[0], link[1]) for link in links]


def _coupling(record: dict[str, Any], sizes: tuple[int, int] | None) -> Tensor | None:
    if "coupling" not in record:
        return None
    rows = record["coupling"]
    if isinstance(rows, list) and any(isinstance(x, bool) for row in rows if isinstance(row, list) for x in row):
        raise FormatError("expected numbers under 'coupling', received true or false")
    try:
        found = torch.tensor(rows, dtype=torch.float64)
    except (TypeError, ValueError, OverflowError):
        found = torch.zeros(0)
    if found.dim() != 2 or (sizes is not None and found.shape != (sizes[0] + 1, sizes[1] + 1)):
        wanted = "n + 1 rows of m + 1" if sizes is None else f"{sizes[0] + 1} rows of {sizes[1] + 1}"
        raise FormatError(f"expected {wanted} numbers under 'coupling', null last, received {_short(json.dumps(rows))}")
    if not bool(((found >= 0) & (found <= _MOST_SHARE)).all()):
        raise FormatError(
            f"expected shares of a word's mass under 'coupling', from 0 to {_MOST_SHARE:g}, received others or no numbers"
        )
    # A word adds its own mass, or a little more where masses are only penalised; the corner says nothing about words.
    words = sum(found.shape) - 2
    total = float(found.sum() - found[-1, -1])
    if total > 2 * words:
        raise FormatError(
            f"expected shares of a word's mass under 'coupling', in all about {words} for {words} words, received the sum "
            f"{total:g}; write them with --couplings"
        )
    return found


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
