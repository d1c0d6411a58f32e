"""Rational numbers and balls: python-flint inside, ``fractions.Fraction`` at the doors."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from sinkformer.errors import MissingExtraError

if TYPE_CHECKING:
    from flint import arb, fmpq

    Rational: TypeAlias = fmpq
    Ball: TypeAlias = arb


_FINEST = 100_000
_SPELLED = re.compile(r"-?\d+(/[1-9]\d*)?", re.ASCII)


@cache
def library() -> Any:
    """The module ``flint``.

    Raises:
        MissingExtraError: python-flint is not installed.
    """
    try:
        import flint
    except ImportError as error:
        raise MissingExtraError("exact", "python-flint") from error
    return flint


def rational(value: int | float | Fraction | Rational, denominator: int = 1) -> Rational:
    """``value / denominator``, exactly: a float is the binary fraction it stores."""
    if isinstance(value, float | Fraction):
        numerator, below = value.as_integer_ratio()
        return library().fmpq(numerator, below * denominator)
    return library().fmpq(value, denominator) if isinstance(value, int) else library().fmpq(value) / denominator


def fraction(value: Rational) -> Fraction:
    """The same number as the standard library has it."""
    return Fraction(int(value.p), int(value.q))


def spelled(value: Rational | Fraction) -> str:
    """``"p/q"``, or ``"p"``, of any length."""
    return str(rational(value) if isinstance(value, Fraction) else value)


def parsed(text: Any) -> Rational:
    """What ``spelled`` spelled.

    Raises:
        ValueError: anything else.
    """
    if not isinstance(text, str) or not _SPELLED.fullmatch(text):
        raise ValueError(f"{str(text)[:40]!r} is no fraction")
    above, _, below = text.partition("/")
    integer = library().fmpz
    return library().fmpq(integer(above), integer(below or "1"))


def nearest(value: Rational) -> float:
    """The nearest float; infinite beyond the largest."""
    try:
        return int(value.p) / int(value.q)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def power_of_two(exponent: int) -> Rational:
    """``2 ** exponent``."""
    return library().fmpq(1 << exponent) if exponent >= 0 else library().fmpq(1, 1 << -exponent)


def floor_log2(value: Rational) -> int:
    """The largest k with ``2 ** k <= value``, for a positive value."""
    above, below = int(value.p), int(value.q)
    k = above.bit_length() - below.bit_length()
    return k if (above >= below << k if k >= 0 else above << -k >= below) else k - 1


def floor_power(value: Rational) -> Rational:
    """The largest power of two that is at most a positive value."""
    return power_of_two(floor_log2(value))


def floor_to(value: Rational, unit: Rational) -> Rational:
    """The largest multiple of ``unit`` that is at most ``value``."""
    return (value / unit).floor() * unit


def enclosure(ball: Ball) -> tuple[Rational, Rational]:
    """Rational ends of a ball: ``(lower, upper)``; rounded outwards where they are nearer to zero than 2**-100000."""
    return _dyadic(ball.lower(), below=True), _dyadic(ball.upper(), below=False)


def _dyadic(exact: Ball, below: bool) -> Rational:
    mantissa, exponent = exact.man_exp()
    size = int(exponent)
    if mantissa != 0 and size < -_FINEST:  # exp(-10**12) would fill the memory with zeros
        mantissa, size = (-1 if mantissa < 0 else 0) if below else (1 if mantissa > 0 else 0), -_FINEST
    return library().fmpq(mantissa) * power_of_two(size)
