"""Ranges of the options of methods and aligner."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from sinkformer.errors import ConfigError

# Costs of word pairs are of order one. Prices far beyond them leave no digits of a cost; an entropy far below them
# leaves none of a plan.
DEAREST = 1e6
LEAST_EPSILON = 1e-6


def checked_number(
    name: str, value: Any, *, above: float | None = None, least: float | None = None, most: float
) -> float:
    """The value as a float; a ConfigError unless it is a number of this range."""
    number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    # No comparison holds for NaN.
    good = number <= most and (above is None or number > above) and (least is None or number >= least)
    if not good:
        low = f"> {above:g}" if above is not None else f">= {least:g}"
        raise ConfigError(f"expected {name} as a finite number {low} and <= {most:g}, received {value!r}")
    return float(number)


def checked_epsilon(value: Any) -> float:
    """Strength of the entropy."""
    return checked_number("epsilon", value, least=LEAST_EPSILON, most=DEAREST)


def checked_price(name: str, value: Any) -> float:
    """A price in the units of the cost, > 0."""
    return checked_number(name, value, above=0.0, most=DEAREST)


def checked_threshold(value: Any) -> float:
    """Least share of a word's mass for a link."""
    return checked_number("threshold", value, above=0.0, most=1.0)
