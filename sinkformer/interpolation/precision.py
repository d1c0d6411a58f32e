"""What rounding does to a network: an estimate of the error of its export to a floating-point format.

A running error analysis: the network is followed in float64 in the two coordinates that the construction uses, and with every
token goes an estimate of the error of its coordinates. A block multiplies the errors by its Jacobian on the affine piece
of the token, whose entries are sums of exact slopes: on a flat piece they vanish, and the error with them. It adds the
rounding of its own sums; next to a kink, within the error, a neuron counts as if it could be on or off.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from sinkformer.interpolation.blocks import Block, Kind
from sinkformer.interpolation.datasets import SequencePairs
from sinkformer.interpolation.rationals import nearest, rational
from sinkformer.interpolation.vectors import Row, Vector, combination, integers

_ROUNDINGS = (
    2  # of a product in a sum, in halves of the last digit; that of a long sum mostly cancels, and counts as one
)


def predicted_error(pairs: SequencePairs, blocks: Sequence[Block], kind: Kind, tau: float, unit: float) -> float:
    """Estimated largest error ``|T(x) - y|`` of a coordinate, in units of max |Y| (of one if Y = 0).

    Args:
        pairs: the data.
        blocks: the exact network.
        kind: of its attention.
        tau: temperature of the softmax.
        unit: half the distance of 1 to the next larger number of the format, 2**-53 in float64.
    """
    run = _Errors(pairs, kind, tau, unit)
    with np.errstate(over="ignore", invalid="ignore"):
        for block in blocks:
            run.feed_forward(block)
            if block.attends:
                run.attend(block)
    worst = float(run.errors.max())
    return worst / run.largest if np.isfinite(worst) else float("inf")


class _Errors:
    """Positions in the plane of the first two coordinates, ``(M, 2)``, and errors ``(M, 3)``: of them, and of all others."""

    def __init__(self, pairs: SequencePairs, kind: Kind, tau: float, unit: float):
        self.pairs, self.kind, self.tau, self.unit = pairs, kind, max(tau, np.finfo(np.float64).tiny), unit
        self.starts = np.cumsum([0, *map(len, pairs.X)])
        self.positions = np.zeros((pairs.M, 2))
        self.errors = np.zeros((pairs.M, 3))
        self.row_sizes = [nearest(y.largest) for y in pairs.Y]
        self.largest = max(self.row_sizes) or 1.0
        self.fresh = True  # no block yet

    # -- feed-forward layers

    def feed_forward(self, block: Block) -> None:
        if not block.width:
            return
        order = sorted(range(block.width), key=lambda k: -block.biases[k])
        biases = np.array([nearest(block.biases[k]) for k in order])
        columns = np.array([self._sizes(block.columns[k]) for k in order])  # (width, 3)
        pieces = self._slopes(block, order)
        s, error, (u0, u1) = self._values(block)
        pre = s[:, None] + biases
        slack = error[:, None] + self.unit * (np.abs(pre) + np.abs(biases))
        touched = np.flatnonzero((pre > -slack).any(1)) if block.eta == 1 else np.arange(len(s))
        pre, slack, error = pre[touched], slack[touched], error[touched]
        on = np.maximum(pre, 0.0)
        signed = np.array([self._signed(block.columns[k]) for k in order])  # (width, 2)
        eta = nearest(block.eta)
        here, old = self.positions[touched], self.errors[touched]
        moved = eta * here + on @ signed
        slope = pieces[(pre > 0).sum(1)]  # (touched, 3): of coordinate 0, 1 and the others, along s
        new = np.empty_like(old)
        if self.fresh:
            new[:] = np.abs(slope) * error[:, None]
        else:
            new[:, 0] = np.abs(eta + slope[:, 0] * u0) * old[:, 0] + np.abs(slope[:, 0] * u1) * old[:, 1]
            new[:, 1] = np.abs(slope[:, 1] * u0) * old[:, 0] + np.abs(eta + slope[:, 1] * u1) * old[:, 1]
            new[:, 2] = abs(eta) * old[:, 2] + slope[:, 2] * (abs(u0) * old[:, 0] + abs(u1) * old[:, 1])
        new += self.unit * _ROUNDINGS * (on @ columns)
        uncertain = np.where(np.abs(pre) <= slack, slack, 0.0)
        rounded = np.where(pre > 0, self.unit * np.abs(biases) * self._inexact(biases), 0.0)
        new += (uncertain + rounded) @ columns
        new[:, :2] += self.unit * (abs(eta) * np.abs(here) + np.abs(moved))
        self.positions[touched], self.errors[touched] = moved, new
        self.fresh = False

    def _inexact(self, biases: np.ndarray) -> np.ndarray:
        """Whether a bias is rounded in the format."""
        bits = -int(np.log2(self.unit))
        mantissas, _ = np.frexp(biases)
        scaled = np.ldexp(mantissas, bits)
        return (scaled != np.rint(scaled)).astype(np.float64) if bits < 53 else np.zeros(len(biases))

    def _values(self, block: Block) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
        """``<U, x>``, its error without that of the bias, and the first two entries of U."""
        u0, u1 = (nearest(block.functional[i]) if i in block.functional else 0.0 for i in (0, 1))
        if not self.fresh:
            s = self.positions @ np.array([u0, u1])
            error = np.abs(u0) * self.errors[:, 0] + np.abs(u1) * self.errors[:, 1]
            return s, error + (self.unit * np.abs(s) if u0 and u1 else 0.0), (u0, u1)
        scale, weights = integers(block.functional, self.pairs.d)
        exact = [scale * value for x in self.pairs.X for value in x.dot(weights)]
        rounded = np.abs([nearest(scale * weight) for weight in weights])
        sizes = np.concatenate([np.abs(x.floats) @ rounded for x in self.pairs.X])
        error = self.unit * np.where(np.isnan(sizes), np.inf, sizes)
        return np.array(list(map(nearest, exact))), error, (u0, u1)

    def _slopes(self, block: Block, order: list[int]) -> np.ndarray:
        """Slopes ``(width + 1, 3)`` with the first k neurons on."""
        one, total = rational(1), {}
        rows = [(0.0, 0.0, 0.0)]
        for k in order:
            total = combination([(one, total), (one, block.columns[k])])
            first, second = self._signed(total)
            rows.append((first, second, self._sizes(total)[2]))
        return np.array(rows)

    def _signed(self, vector: Vector) -> tuple[float, float]:
        """Coordinates 0 and 1."""
        return self._coordinate(vector, 0), self._coordinate(vector, 1)

    def _coordinate(self, vector: Vector, i: int) -> float:
        if i >= self.pairs.d:
            return 0.0
        total = rational(0)
        for basis, coefficient in vector.items():
            if isinstance(basis, Row):
                total += coefficient * self.pairs.Y[basis.sequence].coordinate(basis.token, i)
            elif basis == i:
                total += coefficient
        return nearest(total)

    def _sizes(self, vector: Vector) -> tuple[float, float, float]:
        """|coordinate 0|, |coordinate 1|, and a bound of all others."""
        others = sum(
            abs(nearest(coefficient)) * self.row_sizes[basis.sequence]
            for basis, coefficient in vector.items()
            if isinstance(basis, Row)
        )
        first, second = self._signed(vector)
        return abs(first), abs(second), float(others)

    # -- attention layers

    def attend(self, block: Block) -> None:
        rho, beta = nearest(block.rho), nearest(block.beta)
        first = self.starts[:-1]
        counts = np.diff(self.starts)
        if block.causal and block.pools:
            attended, errors = self._prefix_means()
        elif block.pools:
            means = np.add.reduceat(self.positions, first) / counts[:, None]
            sizes = np.maximum.reduceat(np.abs(self.positions), first)
            worst = np.maximum.reduceat(self.errors, first)
            worst[:, :2] += self.unit * sizes
            attended, errors = np.repeat(means, counts, 0), np.repeat(worst, counts, 0)
        else:
            attended, errors = self._attended(block)
        moved = rho * self.positions + beta * attended
        self.errors = abs(rho) * self.errors + abs(beta) * errors
        self.errors[:, :2] += self.unit * (np.abs(rho * self.positions) + np.abs(beta * attended) + np.abs(moved))
        self.positions = moved

    def _prefix_means(self) -> tuple[np.ndarray, np.ndarray]:
        attended, errors = np.empty_like(self.positions), np.empty_like(self.errors)
        for start, stop in itertools.pairwise(self.starts):
            x, counts = self.positions[start:stop], np.arange(1, stop - start + 1)[:, None]
            attended[start:stop] = x.cumsum(0) / counts
            errors[start:stop] = np.maximum.accumulate(self.errors[start:stop])
            errors[start:stop, :2] += self.unit * np.maximum.accumulate(np.abs(x))
        return attended, errors

    def _attended(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """What every token receives, and its error; infinite where rounding may change the winner."""
        attended, errors = np.empty_like(self.positions), np.empty_like(self.errors)
        alpha = nearest(block.alpha)
        p, q = (np.array([nearest(v[i]) if i in v else 0.0 for i in (0, 1)]) for v in (block.p, block.q))
        for start, stop in zip(self.starts[:-1], self.starts[1:], strict=True):
            x, e = self.positions[start:stop], self.errors[start:stop]
            size = np.abs(x)
            scores = alpha * x @ x.T + np.outer(x @ q, x @ p)
            bound = np.abs(alpha) * size @ size.T + np.outer(size @ np.abs(q), size @ np.abs(p))
            spread = np.abs(alpha) * (e[:, :2] @ size.T + size @ e[:, :2].T)
            spread += np.outer(e[:, :2] @ np.abs(q), size @ np.abs(p)) + np.outer(
                size @ np.abs(q), e[:, :2] @ np.abs(p)
            )
            spread += 4 * self.unit * bound
            if block.causal:
                scores[np.triu_indices(len(x), 1)] = -np.inf
            winner = scores.argmax(1)
            rows = np.arange(len(x))
            lead = scores[rows, winner][:, None] - scores
            doubt = spread + spread[rows, winner][:, None]
            if self.kind == "softmax":
                weights = np.exp(-lead / self.tau)
                weights /= weights.sum(1, keepdims=True)
                attended[start:stop] = weights @ x
                lost = (weights * np.minimum(doubt / self.tau, 1.0)).sum(1, where=~np.eye(len(x), dtype=bool)[winner])
                errors[start:stop] = e[winner]
                errors[start:stop, :2] += lost[:, None] * np.ptp(x, axis=0) + self.unit * size.max(0)
                continue
            rival = (lead <= doubt) & (np.arange(len(x)) != winner[:, None])
            attended[start:stop], errors[start:stop] = x[winner], e[winner]
            errors[start:stop][rival.any(1)] = np.inf
        return attended, errors
