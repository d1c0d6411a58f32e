"""Pairs of sequences out of a file, for ``interpolate``."""

from __future__ import annotations

import json
from typing import Any

from sinkformer.cli.streams import read_text
from sinkformer.errors import DatasetError, DTypeError, FormatError, NonFiniteError, ShapeError
from sinkformer.interpolation import SequencePairs

_FORM = 'the file is {"X": [...], "Y": [...]}, or has a line {"x": [...], "y": [...]} for each pair'


def read_data(path: str) -> SequencePairs:
    """The pairs of a JSON file; ``-`` is stdin.

    Either one object, ``{"X": sequences, "Y": sequences}``, or a line for each pair, ``{"x": sequence, "y": sequence}``. A
    sequence is a list of tokens, a token a list of numbers, or of texts such as ``"1/3"``.

    Raises:
        OSError, TextError: a file that cannot be read, or is not UTF-8.
        FormatError: not this form; says where.
        ShapeError, NonFiniteError, DTypeError, DatasetError: of ``SequencePairs``, with the name of the file.
    """
    text = read_text(path).rstrip()
    path = "standard input" if path == "-" else path
    rows = [(k, row) for k, row in enumerate(text.split("\n"), 1) if row.strip()]
    if not rows:
        raise FormatError(f"{path}: expected JSON, received an empty file; {_FORM}")
    by_line = len(rows) > 1 and _is_object(rows[0][1])
    if by_line:
        found = [_parsed(row, ("x", "y"), f"{path}, line {k}") for k, row in rows]
        X, Y = [x for x, _ in found], [y for _, y in found]
    elif '"x"' in text and '"X"' not in text:  # one line, one pair
        x, y = _parsed(text, ("x", "y"), path)
        X, Y = [x], [y]
    else:
        X, Y = _parsed(text, ("X", "Y"), path)
    try:
        return SequencePairs(X, Y)
    except (ShapeError, NonFiniteError, DTypeError, DatasetError) as error:
        note = " (X[j] and Y[j] are the pair of line j + 1, blank lines not counted)" if by_line else ""
        raise type(error)(f"{path}: {error}{note}") from None


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _parsed(text: str, keys: tuple[str, str], place: str) -> tuple[list[Any], list[Any]]:
    """The lists under the two keys of an object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        at = f", line {error.lineno}, column {error.colno}" if "\n" in text else f", column {error.colno}"
        raise FormatError(f"{place}{at}: expected JSON, received something else: {error.msg}; {_FORM}") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{place}: expected JSON that can be read, received: {error}; {_FORM}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{place}: expected a JSON object, received {type(value).__name__}; {_FORM}")
    if set(value) != set(keys):
        raise FormatError(f"{place}: expected the keys {keys[0]!r} and {keys[1]!r}, received {sorted(value)}; {_FORM}")
    for key in keys:
        if not isinstance(value[key], list):
            raise FormatError(f"{place}, key {key!r}: expected a list, received {type(value[key]).__name__}; {_FORM}")
    return value[keys[0]], value[keys[1]]
