"""``SequencePairs``: the data, and the theorem's hypotheses, checked exactly."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sinkformer.errors import DatasetError, DTypeError, NonFiniteError, ShapeError
from sinkformer.interpolation.rationals import floor_power, rational

if TYPE_CHECKING:
    from sinkformer.interpolation.rationals import Rational

_LARGEST_EXPONENT = 10_000
_POWER = re.compile(r"[eE]([+-]?[0-9_]+)\s*$")

Key = bytes | tuple[Fraction, ...]


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of one sequence, as exact rational vectors.

    Attributes:
        floats: ``(n, d)``, float64: the tokens, rounded where they are no floats.
        fractions: ``n`` rows of ``d`` fractions, or None where ``floats`` is exact.
    """

    floats: np.ndarray
    fractions: tuple[tuple[Fraction, ...], ...] | None = None

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.floats)

    @property
    def dim(self) -> int:
        """Dimension of a token."""
        return self.floats.shape[1]

    def row(self, i: int) -> tuple[Fraction, ...]:
        """Token ``i``."""
        return self.fractions[i] if self.fractions else tuple(map(Fraction, self.floats[i].tolist()))

    def coordinate(self, i: int, c: int) -> Rational:
        """Coordinate ``c`` of token ``i``."""
        return rational(self.fractions[i][c] if self.fractions else float(self.floats[i, c]))

    @cached_property
    def keys(self) -> tuple[Key, ...]:
        """One hashable key for each token: equal exactly where the tokens are equal as rational vectors."""
        return tuple(map(_key, self.floats, self.fractions or [None] * len(self)))

    def dot(self, weights: Sequence[int]) -> list[Rational]:
        """``<weights, x>`` for every token x, for integer weights."""
        return [rational(*self._dot_row(i, weights)) for i in range(len(self))]

    def _dot_row(self, i: int, weights: Sequence[int]) -> tuple[int, int] | tuple[Fraction, int]:
        if self.fractions:
            return sum(map(operator.mul, weights, self.fractions[i]), Fraction(0)), 1
        row = self.floats[i]
        lowest = _lowest_exponent(row)
        with np.errstate(over="ignore"):
            scaled = np.ldexp(row, -lowest)
        if not np.isfinite(scaled).all():  # the exponents of one token span more than float64 has
            return sum(map(operator.mul, weights, map(Fraction, row.tolist())), Fraction(0)), 1
        total = sum(map(operator.mul, weights, map(int, scaled.tolist())))
        return (total << lowest, 1) if lowest >= 0 else (total, 1 << -lowest)

    @cached_property
    def largest(self) -> Rational:
        """Largest absolute value of a coordinate."""
        if self.fractions:
            return rational(max(abs(value) for row in self.fractions for value in row))
        return rational(float(np.abs(self.floats).max()))

    @cached_property
    def largest_first(self) -> Rational:
        """Largest first coordinate."""
        if self.fractions:
            return rational(max(row[0] for row in self.fractions))
        return rational(float(self.floats[:, 0].max()))


class SequencePairs:
    """N pairs of token sequences ``(X_j, Y_j)`` that some function of sets maps one to the other (arXiv 2502.02270).

    Every number is taken exactly: a float is the binary fraction it stores, a string such as ``"1/3"`` or ``"0.1"`` the
    fraction it spells. Nothing is compared with a tolerance; ``-0.0`` equals ``0.0``.

    Args:
        X: N sequences, each ``(n_j, d)``: tensors, arrays, or nested lists of int, float, ``Fraction``, ``Decimal`` or str.
        Y: N sequences, each ``(m_j, d)``, with ``m_j <= n_j``.

    Attributes:
        X: the sources, a tuple of ``Tokens``.
        Y: the targets.

    Raises:
        ShapeError: no sequence, unequal numbers of sequences, an empty sequence, ragged dimensions.
        NonFiniteError: a NaN or an infinity.
        DTypeError: something that is no real number.
        DatasetError: a token repeated within a sequence, more targets than tokens, two equal sources: no network, or no
            network of the theorem, interpolates these.
    """

    def __init__(self, X: Iterable[Any], Y: Iterable[Any]):
        X, Y = _sequences(X, "X"), _sequences(Y, "Y")
        if not X:
            raise ShapeError("expected at least one pair of sequences, received none; give X and Y at least one each")
        if len(X) != len(Y):
            raise ShapeError(
                f"expected as many targets as sources, received {len(X)} sources and {len(Y)} targets; "
                "sequence j of Y is the target of sequence j of X"
            )
        self.X = tuple(read_tokens(x, f"X[{j}]") for j, x in enumerate(X))
        self.Y = tuple(read_tokens(y, f"Y[{j}]") for j, y in enumerate(Y))
        self._check_dimensions()
        for name, side in (("X", self.X), ("Y", self.Y)):
            for j, tokens in enumerate(side):
                _check_distinct(f"{name}[{j}]", tokens)
        self._check_lengths()
        self._check_sources()

    def __len__(self) -> int:
        """N, the number of pairs."""
        return len(self.X)

    def __repr__(self) -> str:
        """Sizes."""
        return f"SequencePairs(N={self.N}, n<={self.n}, m<={self.m}, d={self.d}, K={self.K})"

    @property
    def N(self) -> int:
        """Number of pairs."""
        return len(self.X)

    @property
    def d(self) -> int:
        """Dimension of the tokens."""
        return self.X[0].dim

    @property
    def n(self) -> int:
        """Length of the longest source."""
        return max(map(len, self.X))

    @property
    def m(self) -> int:
        """Length of the longest target."""
        return max(map(len, self.Y))

    @property
    def K(self) -> int:
        """Number of target tokens, over all pairs."""
        return sum(map(len, self.Y))

    @property
    def M(self) -> int:
        """Number of source tokens, over all pairs."""
        return sum(map(len, self.X))

    @cached_property
    def scale(self) -> Rational:
        """The smallest power of two above every ``|y|``; one if all are zero."""
        largest = max(y.largest for y in self.Y)
        return 2 * floor_power(largest) if largest > 0 else rational(1)

    def _check_dimensions(self) -> None:
        for name, side in (("X", self.X), ("Y", self.Y)):
            for j, tokens in enumerate(side):
                if tokens.dim != self.d:
                    raise ShapeError(
                        f"expected tokens of one dimension, received {self.d} in X[0] and {tokens.dim} in {name}[{j}]; "
                        "map all tokens into one space first"
                    )

    def _check_lengths(self) -> None:
        for j, (x, y) in enumerate(zip(self.X, self.Y, strict=True)):
            if len(y) > len(x):
                raise DatasetError(
                    f"expected at most as many targets as tokens, received {len(y)} tokens in Y[{j}] and {len(x)} in "
                    f"X[{j}]; a transformer moves tokens and makes none: add tokens to X[{j}], or drop targets"
                )

    def _check_sources(self) -> None:
        seen: dict[frozenset[Key], int] = {}
        for j, tokens in enumerate(self.X):
            i = seen.setdefault(frozenset(tokens.keys), j)
            if i != j:
                same = set(self.Y[i].keys) == set(self.Y[j].keys)
                remedy = (
                    "their targets are equal too: drop one of the two pairs" if same else "no function has both targets"
                )
                raise DatasetError(
                    f"expected sources that are distinct sets, received X[{i}] and X[{j}] with the same tokens; {remedy}"
                )


def read_tokens(value: Any, name: str) -> Tokens:
    """One sequence ``(n, d)``, of whatever it is made.

    Raises:
        ShapeError, NonFiniteError, DTypeError: as for ``SequencePairs``; ``name`` is what the message calls it.
    """
    if isinstance(value, torch.Tensor):
        value = _array(value, name)
    value = np.asarray(value) if isinstance(value, np.matrix) else value
    if isinstance(value, np.ma.MaskedArray):
        raise DTypeError(f"expected plain numbers, received {name} as a masked array; give the tokens that are there")
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OUS":
        _check_shape(name, value.shape)
        return _from_array(value, name)
    rows = _rows(value, name)
    _check_shape(name, (len(rows), len(rows[0]) if rows else 0))
    for i, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise ShapeError(
                f"expected tokens of one dimension, received {len(rows[0])} numbers in {name}[0] and {len(row)} in "
                f"{name}[{i}]; map all tokens into one space first"
            )
    if all(type(entry) is float for row in rows for entry in row):
        return _from_array(np.array(rows, dtype=np.float64), name)
    return _from_fractions([[_fraction(entry, f"{name}[{i}]") for entry in row] for i, row in enumerate(rows)])


def _sequences(value: Any, name: str) -> list[Any]:
    if not _iterable(value):
        raise ShapeError(
            f"expected {name} as a list of sequences, received {type(value).__name__}; give [x_1, ..., x_N]"
        )
    return list(value)


def _iterable(value: Any) -> bool:
    """Whether a value is a list of something, in an order."""
    listed = isinstance(value, Iterable) and not isinstance(value, str | bytes | dict | set | frozenset)
    return listed and getattr(value, "ndim", 1) != 0


def _array(value: torch.Tensor, name: str) -> np.ndarray:
    plain = (
        value.layout == torch.strided and value.device.type != "meta" and not (value.is_nested or value.is_quantized)
    )
    if value.dtype.is_complex or not plain:
        raise DTypeError(
            f"expected a dense tensor of real numbers, received {name} of dtype {value.dtype}, layout {value.layout}, on "
            f"{value.device}; convert it first"
        )
    value = value.detach().cpu()
    return (value.double() if value.dtype.is_floating_point else value).numpy()


def _rows(value: Any, name: str) -> list[list[Any]]:
    remedy = "a sequence is a list of tokens, a token a list of d numbers"
    if not _iterable(value):
        raise ShapeError(f"expected {name} of shape (tokens, d), received {type(value).__name__}; {remedy}")
    rows = list(value)
    for i, row in enumerate(rows):
        if not _iterable(row):
            raise ShapeError(f"expected {name}[{i}] to be a list of d numbers, received {type(row).__name__}; {remedy}")
    return [list(row) for row in rows]


def _check_shape(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 2:
        raise ShapeError(
            f"expected {name} of shape (tokens, d), received shape {tuple(shape)}; a sequence is a list of tokens, "
            "a token a list of d numbers"
        )
    if 0 in shape:
        raise ShapeError(
            f"expected {name} to hold at least one token of at least one coordinate, received shape {tuple(shape)}; "
            "leave the pair out, or give the sequence a token"
        )


def _from_array(array: np.ndarray, name: str) -> Tokens:
    if array.dtype.kind not in "fiu":
        raise DTypeError(f"expected real tokens, received {name} of dtype {array.dtype}; convert it to numbers first")
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        raise DTypeError(
            f"expected float64 or narrower, received {name} of dtype {array.dtype}; round it to float64, or give fractions"
        )
    if array.dtype.kind in "iu" and (np.abs(array.astype(object)) > 2**53).any():
        return _from_fractions([list(map(Fraction, row)) for row in array.tolist()])
    floats = array.astype(np.float64)
    bad = np.argwhere(~np.isfinite(floats))
    if len(bad):
        i, c = bad[0]
        raise NonFiniteError(
            f"expected finite tokens, received {floats[i, c]} in {name}[{i}], coordinate {c}; remove or replace the token"
        )
    return Tokens(floats + 0.0)  # -0.0 + 0.0 is 0.0


def scalar(entry: Any) -> Any:
    """A number out of an array or a tensor of one entry; anything else as it is."""
    if isinstance(entry, torch.Tensor):
        return (
            entry.item()
            if entry.numel() == 1 and entry.layout == torch.strided and entry.device.type != "meta"
            else entry
        )
    return entry.item() if isinstance(entry, np.generic | np.ndarray) and entry.size == 1 else entry


def number(value: Any) -> Fraction:
    """A real number, exactly: an int, a float, a Fraction, a Decimal, a text such as ``"1/3"`` or ``"1e-3"``, or an array of one.

    Raises:
        NonFiniteError: a NaN or an infinity.
        DTypeError: anything else, or an exponent beyond 10000, which would not fit into the memory for long.
    """
    value = scalar(value)
    if isinstance(value, float | Decimal) and not (
        math.isfinite(value) if isinstance(value, float) else value.is_finite()
    ):
        raise NonFiniteError(f"expected a finite number, received {value}")
    if isinstance(value, int | float | Fraction | Decimal | str) and not isinstance(value, bool):
        try:
            if _exponent(value) <= _LARGEST_EXPONENT:
                return Fraction(value)
        except (ValueError, ZeroDivisionError):
            pass
    raise DTypeError(
        f"expected a real number with an exponent up to {_LARGEST_EXPONENT}, received {str(value)[:60]!r}; give int, float, "
        "Fraction, or text like '1/3'"
    )


def _exponent(value: Any) -> int:
    """The size of the power of ten of a Decimal or a text."""
    if isinstance(value, Decimal):
        return abs(value.adjusted())
    power = _POWER.search(value) if isinstance(value, str) else None
    return abs(int(power[1])) if power else 0


def _fraction(entry: Any, name: str) -> Fraction:
    try:
        return number(entry)
    except NonFiniteError:
        raise NonFiniteError(
            f"expected finite tokens, received {entry} in {name}; remove or replace the token"
        ) from None
    except DTypeError:
        raise DTypeError(
            f"expected real numbers in {name}, received {str(entry)[:60]!r}; give int, float, Fraction, or text like "
            f"'1/3', with an exponent up to {_LARGEST_EXPONENT}"
        ) from None


def _from_fractions(rows: list[list[Fraction]]) -> Tokens:
    floats = np.array([[_nearest(entry) for entry in row] for row in rows])
    if np.isfinite(floats).all() and all(
        Fraction(value) == entry
        for row, given in zip(floats.tolist(), rows, strict=True)
        for value, entry in zip(row, given, strict=True)
    ):
        return Tokens(floats)
    return Tokens(floats, tuple(map(tuple, rows)))


def _nearest(entry: Fraction) -> float:
    try:
        return float(entry)
    except OverflowError:
        return math.inf if entry > 0 else -math.inf


def _key(floats: np.ndarray, fractions: tuple[Fraction, ...] | None) -> Key:
    if fractions is None or all(
        math.isfinite(v) and Fraction(v) == f for v, f in zip(floats.tolist(), fractions, strict=True)
    ):
        return floats.tobytes()
    return fractions


def _check_distinct(name: str, tokens: Tokens) -> None:
    seen: dict[Key, int] = {}
    for i, key in enumerate(tokens.keys):
        first = seen.setdefault(key, i)
        if first != i:
            raise DatasetError(
                f"expected distinct tokens in {name}, received the same token at {first} and {i}; sequences are sets: "
                "drop the repetition, or mark the position in a coordinate"
            )


def _lowest_exponent(row: np.ndarray) -> int:
    """An exponent e such that every entry of the row is an integer times 2**e."""
    exponents = np.frexp(row[row != 0])[1]
    return int(exponents.min()) - 53 if len(exponents) else 0
