"""Ground metrics: distances on one axis, checked, and the product of two of them on a grid.

The additive product separates, d((x, y), (x', y')) = dX(x, x') + dY(y, y'). So does everything one asks of it: the least
of ``d + psi`` over a grid is two small min-plus products, and a pair of small slack has a small slack in each of its two
legs, (x, y) to (x', y) and on to (x', y'). No object of the size of all pairs of places is ever made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from sinkformer.costs import Cost, Euclidean
from sinkformer.errors import ConfigError, NonFiniteError, ShapeError

# Two lists of indices into a grid.
Places: TypeAlias = tuple[np.ndarray, ...]
Distance: TypeAlias = Cost | Callable[[Tensor, Tensor], Tensor]
AxisMetric: TypeAlias = Distance | Tensor

# Relative violation of the axioms that passes for rounding, by the precision the distances came in: the square root of
# machine precision, which is what distances from inner products (torch.cdist of many points) are wrong by.
_ROUNDING = {torch.float64: 1e-7}
_COARSE = 1e-3
# Entries of a temporary block, and of one that should stay in the cache.
_BLOCK, _SMALL_BLOCK = 1 << 22, 1 << 16
# Arrivals of one departure that are kept where the distance does not separate.
_NEAREST = 30


# One axis ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """The distinct atoms of two clouds on one axis.

    Attributes:
        first: place of every atom of the first cloud, ``(n,)``; -1 where it has no mass.
        second: the same for the second cloud, ``(n',)``.
        matrix: distances between the N places, ``(N, N)``, float64, symmetric, zero on the diagonal; None on a line.
        defect: largest violation of the triangle inequality, at the size of rounding.
        line: coordinates ``(N,)`` if the places lie on a line and the metric is the usual one, else None.
    """

    first: np.ndarray
    second: np.ndarray
    matrix: np.ndarray | None
    defect: float
    line: np.ndarray | None = None

    @cached_property
    def distances(self) -> np.ndarray:
        """Between the N places, ``(N, N)``; on a line they are made only where somebody asks."""
        if self.matrix is not None:
            return self.matrix
        assert self.line is not None
        return np.abs(self.line[:, None] - self.line)

    @property
    def size(self) -> int:
        """N, the number of places."""
        places = self.matrix if self.line is None else self.line
        assert places is not None
        return len(places)

    @cached_property
    def diameter(self) -> float:
        """Largest distance."""
        return float(self.distances.max() if self.line is None else np.ptp(self.line))

    def scaled(self, exponent: int) -> Axis:
        """The axis with all distances times ``2 ** exponent``, which rounds nothing."""
        matrix, line = (None if part is None else np.ldexp(part, exponent) for part in (self.matrix, self.line))
        return replace(self, matrix=matrix, line=line, defect=float(np.ldexp(self.defect, exponent)))


def point() -> Axis:
    """An axis with one place: what a measure has for a second axis."""
    return Axis(np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros((1, 1)), 0.0)


def axis_of_points(metric: Distance, clouds: list[np.ndarray], live: list[np.ndarray], name: str) -> Axis:
    """Axis of two clouds of points ``(n, d)`` and ``(n', d)``, of which the ``live`` ones have mass."""
    points = np.concatenate([cloud[mask] for cloud, mask in zip(clouds, live, strict=True)]).astype(np.float64) + 0.0
    distinct, index = np.unique(points, axis=0, return_inverse=True)
    places = _scattered(index.reshape(-1), live)
    if isinstance(metric, Euclidean):
        return _euclidean(metric, distinct, places, name)
    atoms = torch.from_numpy(distinct)
    found = metric(atoms, atoms)
    if not isinstance(found, Tensor) or found.shape != (len(distinct), len(distinct)):
        received = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ShapeError(
            f"expected the metric on {name} to give a tensor ({len(distinct)}, {len(distinct)}) for {len(distinct)} points, "
            f"received {received}"
        )
    distances = found.detach().to(torch.float64).numpy()
    trusted = isinstance(metric, Cost) and metric.is_metric
    distances, defect = _checked(distances, found.dtype, name, lambda k: str(distinct[k].tolist()), trusted)
    return Axis(*places, distances, defect)


def _euclidean(metric: Euclidean, distinct: np.ndarray, places: tuple[np.ndarray, np.ndarray], name: str) -> Axis:
    """Axis of distinct points ``(N, d)``, whatever their scale: distances are taken near the origin and of size one."""
    with np.errstate(over="ignore"):
        centred = distinct - distinct[0]
    largest = float(np.abs(centred).max(initial=0.0))
    if not np.isfinite(largest):
        raise NonFiniteError(
            f"expected points on {name} whose distances are float64 numbers, received coordinates from {distinct.min():.3g} "
            f"to {distinct.max():.3g}; scale them down"
        )
    defect = 8 * np.finfo(np.float64).eps
    if distinct.shape[1] == 1:
        return Axis(*places, None, defect * float(np.ptp(centred)), centred[:, 0])
    exponent = power(largest)
    atoms = torch.from_numpy(np.ldexp(centred, -exponent))
    distances = np.ldexp(metric(atoms, atoms).numpy(), exponent)
    return Axis(*places, distances, defect * float(distances.max()), None)


def power(size: float) -> int:
    """The exponent e of the power of two just above ``size``: ``size / 2**e`` is in [1/2, 1), or zero."""
    return math.frexp(size)[1]


def axis_of_matrix(values: np.ndarray, dtype: torch.dtype, shared: bool, live: list[np.ndarray], name: str) -> Axis:
    """Axis whose distances are given.

    Args:
        values: ``(n + n', n + n')``, the atoms of the first cloud before those of the second; or ``(n, n)``.
        dtype: the precision they came in.
        shared: whether both clouds are the same atoms, so that ``(n, n)`` serves.
        live: which atoms of either cloud have mass.
        name: of the axis, for messages.
    """
    sizes = [len(mask) for mask in live]
    both = len(values) == sum(sizes)
    if values.shape != (len(values), len(values)) or not (both or (shared and len(values) == sizes[0])):
        alone = f" or ({sizes[0]}, {sizes[0]})" if shared else " (the atoms of the two differ)"
        raise ShapeError(
            f"expected a distance matrix on {name} of shape ({sum(sizes)}, {sum(sizes)}), the atoms of the first argument "
            f"before those of the second,{alone}, received {values.shape}"
        )
    rows = [np.flatnonzero(live[0]), np.flatnonzero(live[1]) + (sizes[0] if both else 0)]
    used = np.unique(np.concatenate(rows))
    distances, defect = _checked(values[np.ix_(used, used)], dtype, name, lambda k: f"atom {used[k]}", False)
    representative = (distances == 0).argmax(1)  # the first atom at distance zero
    kept, place = np.unique(representative, return_inverse=True)
    index = np.concatenate([place.reshape(-1)[np.searchsorted(used, r)] for r in rows])
    return Axis(*_scattered(index, live), distances[np.ix_(kept, kept)], defect)


def _scattered(index: np.ndarray, live: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    places = [np.full(len(mask), -1) for mask in live]
    cut = int(live[0].sum())
    places[0][live[0]], places[1][live[1]] = index[:cut], index[cut:]
    return places[0], places[1]


def _checked(
    d: np.ndarray, dtype: torch.dtype, name: str, label: Callable[[int], str], trusted: bool
) -> tuple[np.ndarray, float]:
    """Distances made symmetric with a zero diagonal, and their defect; raises unless they are a metric up to rounding."""
    if not np.isfinite(d).all():
        raise NonFiniteError(f"expected finite distances on {name}, received a NaN or an infinity")
    scale = float(np.abs(d).max())
    if trusted:
        return d, 8 * np.finfo(np.float64).eps * scale
    allowed = _ROUNDING.get(dtype, _COARSE) * scale
    i, j = np.unravel_index(d.argmin(), d.shape)
    if d[i, j] < 0:
        raise ConfigError(
            f"expected a metric on {name}, received d(a, b) = {d[i, j]:.6g} < 0 for a = {label(int(i))}, b = {label(int(j))}"
        )
    k = int(np.diag(d).argmax())
    if d[k, k] > allowed:
        raise ConfigError(f"expected a metric on {name}, received d(a, a) = {d[k, k]:.6g} for a = {label(k)}")
    i, j = np.unravel_index(np.abs(d - d.T).argmax(), d.shape)
    if abs(d[i, j] - d[j, i]) > allowed:
        raise ConfigError(
            f"expected a metric on {name}, received d(a, b) = {d[i, j]:.6g} and d(b, a) = {d[j, i]:.6g} "
            f"for a = {label(int(i))}, b = {label(int(j))}"
        )
    d = (d + d.T) / 2
    np.fill_diagonal(d, 0.0)
    detours = min_plus(d, d)
    i, j = np.unravel_index((d - detours).argmax(), d.shape)
    if d[i, j] - detours[i, j] > allowed:
        k = int((d[i] + d[:, j]).argmin())
        raise ConfigError(
            f"expected a metric on {name}, received a triangle that is not one: d(a, c) = {d[i, j]:.6g} > d(a, b) + d(b, c) = "
            f"{d[i, k]:.6g} + {d[k, j]:.6g} for a = {label(int(i))}, b = {label(k)}, c = {label(int(j))}"
        )
    # Detours within rounding are taken: the largest metric below the distances.
    while (detours < d).any():
        d = detours
        detours = min_plus(d, d)
    return d, 8 * np.finfo(np.float64).eps * scale


# The product of two axes -------------------------------------------------------------------------------------------------


def min_plus(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """min_k a_ik + b_kj for ``(n, k)`` and ``(k, m)``: ``(n, m)``."""
    out = np.empty((len(a), b.shape[1]))
    step = max(1, _SMALL_BLOCK // max(1, b.size))
    for start in range(0, len(a), step):
        (a[start : start + step, :, None] + b).min(1, out=out[start : start + step])
    return out


@dataclass(frozen=True)
class Ground:
    """Distances from the grid of departures, ``(n, m)``, to the grid of arrivals, ``(n', m')``.

    Attributes:
        dx: ``(n, n')``.
        dy: ``(m, m')``.
        euclidean: whether the product is sqrt(dx^2 + dy^2) instead of dx + dy.
    """

    dx: np.ndarray
    dy: np.ndarray
    euclidean: bool = False

    @property
    def diameter(self) -> float:
        """Largest distance, or a bound of it."""
        return float(self.dx.max() + self.dy.max())

    def costs(self, start: Places, stop: Places) -> np.ndarray:
        """Distance from places ``start`` (their two indices) to places ``stop``; the indices broadcast."""
        x, y = self.dx[start[0], stop[0]], self.dy[start[1], stop[1]]
        return np.hypot(x, y) if self.euclidean else x + y

    def transform(self, psi: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Least of d + psi over the arrivals.

        Args:
            psi: ``(n', m')``, ``+inf`` where there is no arrival.

        Returns:
            ``(middle, phi)``: after the second axis, ``(n', m)``, and after both, ``(n, m)``. For the Euclidean product
            only ``phi`` means anything.
        """
        if not self.euclidean:
            middle = min_plus(psi, self.dy.T)
            return middle, min_plus(self.dx, middle)
        arrivals = np.nonzero(np.isfinite(psi))
        departures = np.indices((len(self.dx), len(self.dy))).reshape(2, -1)
        phi = [(d + psi[arrivals]).min(1) for _, d in self._rows((departures[0], departures[1]), arrivals)]
        return psi, np.concatenate(phi).reshape(len(self.dx), len(self.dy))

    def _rows(self, start: Places, stop: Places) -> Iterator[tuple[int, np.ndarray]]:
        """Distances between two lists of places, in blocks of rows."""
        step = max(1, _BLOCK // max(1, len(stop[0])))
        for at in range(0, len(start[0]), step):
            rows = start[0][at : at + step, None], start[1][at : at + step, None]
            yield at, self.costs(rows, (stop[0][None], stop[1][None]))

    def near(
        self, psi: np.ndarray, starts: np.ndarray, stops: np.ndarray, slack: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pairs of places whose slack d - phi + psi is at most ``slack``, with phi the transform of psi.

        For the Euclidean product: the pairs of smallest slack of every departure, whatever ``slack``.

        Args:
            psi: ``(n', m')``, ``+inf`` where there is no arrival.
            starts: departures, boolean ``(n, m)``.
            stops: arrivals, boolean ``(n', m')``.
            slack: largest slack.

        Returns:
            ``(i, j, slacks)``: ranks among the departures and among the arrivals, in row-major order.
        """
        if self.euclidean:
            return self._nearest(psi, starts, stops)
        middle, phi = self.transform(psi)
        rank = np.cumsum(starts).reshape(starts.shape) - 1, np.cumsum(stops).reshape(stops.shape) - 1
        counts = int(starts.sum()), int(stops.sum())
        legs = [
            self._first_legs(phi, middle, starts, rank[0], slack),
            self._second_legs(psi, middle, stops, rank[1], slack),
        ]
        shapes = (counts[0], middle.size), (middle.size, counts[1])
        # Every pair of places passes through one place of the middle grid, so no entry of the product is a sum.
        first, second = (
            sparse.csr_array((np.ones(len(row), np.int8), (row, column)), shape=shape)
            for (row, column), shape in zip(legs, shapes, strict=True)
        )
        pairs = sparse.coo_array(first @ second)
        i, j = pairs.coords
        start, stop = np.nonzero(starts), np.nonzero(stops)
        slacks = self.costs((start[0][i], start[1][i]), (stop[0][j], stop[1][j])) - phi[starts][i] + psi[stops][j]
        kept = slacks <= slack
        return i[kept], j[kept], slacks[kept]

    def _first_legs(
        self, phi: np.ndarray, middle: np.ndarray, starts: np.ndarray, rank: np.ndarray, slack: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """From (i, j) to (i', j), column by column: rank of the departure, index in the middle grid."""
        found = []
        for j in range(starts.shape[1]):
            i = np.flatnonzero(starts[:, j])
            row, to = np.nonzero(self.dx[i] - phi[i, j][:, None] + middle[None, :, j] <= slack)
            found.append((rank[i[row], j], to * middle.shape[1] + j))
        return np.concatenate([f[0] for f in found]), np.concatenate([f[1] for f in found])

    def _second_legs(
        self, psi: np.ndarray, middle: np.ndarray, stops: np.ndarray, rank: np.ndarray, slack: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """From (i', j) to (i', j'), row by row: index in the middle grid, rank of the arrival."""
        found = []
        for i in range(stops.shape[0]):
            j = np.flatnonzero(stops[i])
            row, to = np.nonzero(self.dy[:, j] - middle[i, :, None] + psi[i, j][None] <= slack)
            found.append((i * middle.shape[1] + row, rank[i, j[to]]))
        return np.concatenate([f[0] for f in found]), np.concatenate([f[1] for f in found])

    def _nearest(
        self, psi: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The nearest arrivals of every departure, in blocks of rows: an inseparable distance has no legs."""
        found, values = [], psi[stops]
        count = min(_NEAREST, len(values))
        for at, d in self._rows(np.nonzero(starts), np.nonzero(stops)):
            slacks = d + values
            nearest = np.argpartition(slacks, count - 1, 1)[:, :count]
            i = np.repeat(np.arange(len(slacks)), count)
            slacks = np.take_along_axis(slacks, nearest, 1)
            found.append((i + at, nearest.ravel(), (slacks - slacks.min(1, keepdims=True)).ravel()))
        i, j, slacks = (np.concatenate(part) for part in zip(*found, strict=True))
        return i, j, slacks
