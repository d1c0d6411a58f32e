"""A constructed network in floating point: the torch module, its predicted and its measured error."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sinkformer.errors import ConfigError, PrecisionError, PrecisionWarning
from sinkformer.interpolation.blocks import Block, Kind
from sinkformer.interpolation.datasets import SequencePairs, Tokens
from sinkformer.interpolation.layers import Attention, FeedForward, TokenTransformer
from sinkformer.interpolation.layers import Block as Layers
from sinkformer.interpolation.precision import predicted_error
from sinkformer.interpolation.rationals import nearest, rational
from sinkformer.interpolation.vectors import Functional, Row, Vector
from sinkformer.measures import Measure

if TYPE_CHECKING:
    from sinkformer.interpolation.rationals import Rational

_WIDTH = 4  # of every block, so that a network has (10 d + 8) L parameters


@dataclass(frozen=True, eq=False)
class Export:
    """A network in floating point.

    Attributes:
        model: the torch module.
        dtype: of its parameters.
        predicted: estimate of the largest error of a coordinate, in units of max |Y| (of one if Y = 0).
        measured: the largest error of a coordinate when the module runs on the data, in the same units.
    """

    model: TokenTransformer
    dtype: torch.dtype
    predicted: float
    measured: float

    def to_dict(self) -> dict[str, Any]:
        """Names and numbers, for JSON; a prediction that is not finite is None."""
        predicted = self.predicted if isfinite(self.predicted) else None
        return {"dtype": str(self.dtype).removeprefix("torch."), "predicted": predicted, "measured": self.measured}

    def __str__(self) -> str:
        """One line."""
        return f"{self.dtype}: error {self.measured:.1e} of max |Y| measured, {self.predicted:.1e} predicted"


def export(pairs: SequencePairs, blocks: Sequence[Block], kind: Kind, tau: Fraction, dtype: torch.dtype) -> Export:
    """The network as a torch module, checked against the data.

    Warns:
        PrecisionWarning: it interpolates here, but by the prediction rounding might have had it otherwise.

    Raises:
        PrecisionError: the measured error is more than half the digits of the format, or a number is beyond its range.
        ConfigError: neither float64 nor float32.
    """
    unit = unit_roundoff(dtype)
    predicted = prediction(pairs, blocks, kind, tau, dtype)
    model = TokenTransformer(_modules(pairs, blocks, kind, _temperature(tau, dtype), dtype))
    measured = measured_error(pairs, model)
    if not measured <= unit**0.5:
        raise PrecisionError(_too_close(blocks, dtype, predicted, measured))
    if not predicted <= unit**0.5:
        warnings.warn(_doubtful(dtype, predicted, measured), PrecisionWarning, stacklevel=3)
    return Export(model, dtype, predicted, measured)


def prediction(pairs: SequencePairs, blocks: Sequence[Block], kind: Kind, tau: Fraction, dtype: torch.dtype) -> float:
    """Estimate of the largest error of a coordinate after rounding to a format, in units of max |Y|.

    Raises:
        ConfigError: neither float64 nor float32.
    """
    return predicted_error(pairs, blocks, kind, nearest(rational(tau)), unit_roundoff(dtype))


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance of 1 to the next larger number.

    Raises:
        ConfigError: neither float64 nor float32.
    """
    if dtype not in (torch.float64, torch.float32):
        raise ConfigError(
            f"expected torch.float64 or torch.float32, received {dtype}; fewer digits cannot tell tokens apart"
        )
    return torch.finfo(dtype).eps / 2


def measured_error(pairs: SequencePairs, model: TokenTransformer) -> float:
    """Largest error of a coordinate on the data, in units of max |Y|: of every token to its nearest target, and back."""
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        mu = Measure.stack([Measure.uniform(_tensor(x.floats, dtype)) for x in pairs.X])
        moved = model(mu).points.double()
    worst = 0.0
    for j, (x, y) in enumerate(zip(pairs.X, pairs.Y, strict=True)):
        distances = (moved[j, : len(x), None] - torch.from_numpy(y.floats)).abs().amax(-1)
        worst = max(worst, float(distances.amin(0).max()), float(distances.amin(1).max()))
    largest = max(float(np.abs(y.floats).max()) for y in pairs.Y)
    return worst / (largest or 1.0)


def points(x: Tokens) -> Tensor:
    """Tokens as a tensor ``(n, d)``, float64."""
    return _tensor(x.floats, torch.float64)


def _tensor(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Rounded to the dtype.

    Raises:
        PrecisionError: a number beyond its range.
    """
    found = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
    lost = values.any() and float(found.abs().max()) < torch.finfo(dtype).tiny
    if lost or not bool(torch.isfinite(found).all()):
        raise PrecisionError(
            f"expected numbers within the range of {dtype}, received values from {np.abs(values[values != 0]).min():.1e} to "
            f"{np.abs(values).max():.1e} in the data or the weights; divide X and Y by powers of two, or use float64"
        )
    return found


def _temperature(tau: Fraction, dtype: torch.dtype) -> float:
    found = nearest(rational(tau))
    if not torch.finfo(dtype).tiny <= found <= torch.finfo(dtype).max:
        raise PrecisionError(
            f"expected a temperature within the range of {dtype}, received {found:g}; construct with another tau"
        )
    return found


def _modules(
    pairs: SequencePairs, blocks: Sequence[Block], kind: Kind, tau: float, dtype: torch.dtype
) -> Iterator[Layers]:
    """One module a block, four neurons wide."""
    d = pairs.d
    width = max(_WIDTH, *(block.width for block in blocks))
    for block in blocks:
        U, W, b = np.zeros((width, d)), np.zeros((d, width)), np.zeros(width)
        for k, (bias, column) in enumerate(zip(block.biases, block.columns, strict=True)):
            U[k], W[:, k], b[k] = _entries(block.functional, d), _column(pairs, column), nearest(bias)
        p, q = (_tensor(_entries(part, d), dtype) for part in (block.p, block.q))
        numbers = np.array([nearest(number) for number in (block.eta, block.rho, block.beta, block.alpha)])
        eta, rho, beta, alpha = _tensor(numbers, dtype)
        feedforward = FeedForward(eta, *(_tensor(part, dtype) for part in (W, U, b)))
        yield Layers(feedforward, Attention(rho, beta, (alpha, p, q), kind=kind, tau=tau, causal=block.causal))


def _entries(functional: Functional, d: int) -> np.ndarray:
    found = np.zeros(d)
    for i, value in functional.items():
        found[i] = nearest(value)
    return found


def _column(pairs: SequencePairs, column: Vector) -> np.ndarray:
    """A column of W. The coordinates in which large numbers cancel are summed exactly, and rounded once."""
    found = np.zeros(pairs.d)
    exact: dict[int, Rational] = {}
    for basis, coefficient in column.items():
        if isinstance(basis, Row):
            with np.errstate(over="ignore", invalid="ignore"):  # what is beyond the format is refused later
                found += nearest(coefficient) * pairs.Y[basis.sequence].floats[basis.token]
        else:
            exact[basis] = coefficient
    for i, value in exact.items():
        for basis, coefficient in column.items():
            if isinstance(basis, Row):
                value += coefficient * pairs.Y[basis.sequence].coordinate(basis.token, i)
        found[i] = nearest(value)
    return found


def _too_close(blocks: Sequence[Block], dtype: torch.dtype, predicted: float, measured: float) -> str:
    return (
        f"expected data that survive rounding to {dtype}, received an error of {measured:.1e} of max |Y|, {predicted:.1e} "
        f"predicted: the narrowest step of the network is {_narrowest(blocks):.1e} of the numbers it is taken at, and the format "
        f"has {torch.finfo(dtype).eps:.1e}; use float64, method='two-pass', data on one scale, or the exact blocks"
    )


def _doubtful(dtype: torch.dtype, predicted: float, measured: float) -> str:
    return (
        f"the network interpolates in {dtype} here, with an error of {measured:.1e} of max |Y|, but {predicted:.1e} was "
        "predicted: on other hardware it may not; use float64, or method='two-pass'"
    )


def _narrowest(blocks: Sequence[Block]) -> float:
    """The smallest distance of two kinks of a block, in units of the larger one."""
    found = rational(1)
    for block in blocks:
        kinks = sorted(block.biases)
        for a, b in itertools.pairwise(kinks):
            if b > a:
                found = min(found, (b - a) / max(abs(a), abs(b)))
    return nearest(found)
