"""Measures: weighted point clouds of any length, alone or in ragged batches.

A text, or any other cloud, is a probability measure mu = sum_i w_i delta_{x_i} (Fraiman 2026, arXiv 2603.25860, and
Furuya, de Hoop, Peyre, arXiv 2408.01367). This is the only room that pads: an atom of *weight zero* is padding, and no
mask exists anywhere else. Everything built on a measure obeys the laws of ``sinkformer.testing``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

from sinkformer._numerics import FLOAT_DTYPES, mass_tolerance
from sinkformer._typing import PerProblem, Points, Weights
from sinkformer.errors import DeviceError, DTypeError, NonFiniteError, ShapeError, WeightError


@dataclass(frozen=True, eq=False, repr=False)
class Measure:
    """A probability measure with finitely many atoms, or a batch of them.

    Args:
        points: coordinates, shape ``(*batch, n, d)``, floating point, n >= 1. Must be finite where the weight is
            positive. At weight zero a coordinate that is not finite, or so large that its square could overflow,
            marks padding and is replaced by zero.
        weights: shape ``(*batch, n)``, same dtype and device; non-negative, summing to one over the last axis.
            Nothing is renormalised in silence: see :meth:`normalized`.

    Raises:
        DTypeError: not a tensor, not floating point, or two dtypes.
        DeviceError: two devices.
        ShapeError: shapes that do not fit, or no atom.
        WeightError: a negative weight, or a sum that is not one.
        NonFiniteError: NaN or infinity in a weight or in the coordinates of an atom of positive weight.

    Example:
        >>> mu = Measure.uniform(torch.tensor([[0.0], [1.0], [3.0]]))
        >>> mu.n, mu.d
        (3, 1)
    """

    points: Points
    weights: Weights

    def __post_init__(self):
        """Check the arguments and clear the coordinates of padding."""
        _check_pair(self.points, self.weights)
        if _values_are_visible(self.weights):
            _check_weights(self.weights)
        object.__setattr__(self, "points", _usable_points(self.points, self.weights))

    # Construction -----------------------------------------------------------------------------------------------------

    @classmethod
    def uniform(cls, points: Points) -> Measure:
        """Measure giving every point the same weight 1/n; ``points`` has shape ``(*batch, n, d)``."""
        _check_points(points)
        n = points.shape[-2]
        return cls(points, points.detach().new_full(points.shape[:-1], 1.0 / n))

    @classmethod
    def normalized(cls, points: Points, weights: Weights) -> Measure:
        """Measure with ``weights`` divided by their sum; they must be non-negative with a positive, finite sum."""
        _check_pair(points, weights)
        if _values_are_visible(weights):
            _check_nonnegative(weights)
        # Largest first: the sum of large weights may overflow.
        largest = weights.detach().amax(-1, keepdim=True)
        if _values_are_visible(weights) and bool((largest <= 0).any()):
            raise WeightError(
                f"expected weights with a positive sum, received a sum of zero at batch element "
                f"{_first(largest.squeeze(-1) <= 0)}; give at least one atom a positive weight"
            )
        shares = weights / largest
        return cls(points, shares / shares.sum(-1, keepdim=True))

    @classmethod
    def stack(cls, measures: Sequence[Measure]) -> Measure:
        """Batch of measures of any lengths: shape ``(len(measures), *batch, N, d)``, padded with weight zero.

        All measures share d, dtype, device and batch shape; N is the largest number of atoms.
        """
        measures = list(measures)
        if not measures:
            raise ShapeError(
                "expected at least one measure, received none, so that d and the dtype are unknown; "
                "build the empty batch with Measure(torch.empty(0, n, d), torch.empty(0, n))"
            )
        _check_alike(measures)
        longest = max(mu.n for mu in measures)
        padded = [mu._padded(longest) for mu in measures]
        return cls._trusted(torch.stack([mu.points for mu in padded]), torch.stack([mu.weights for mu in padded]))

    @classmethod
    def from_packed(cls, points: Points, offsets: Tensor, weights: Weights | None = None) -> Measure:
        """Batch of B measures from one array of atoms.

        Args:
            points: all atoms one after the other, shape ``(total, d)``.
            offsets: int64, shape ``(B + 1,)``: measure k owns the atoms ``offsets[k]`` to ``offsets[k + 1]``.
            weights: shape ``(total,)``, each measure's summing to one; uniform if omitted.
        """
        _check_float("points", points)
        if not isinstance(offsets, Tensor):
            raise DTypeError(f"expected offsets as an integer tensor, received {type(offsets).__name__}")
        if weights is not None and weights.shape != points.shape[:1]:
            raise ShapeError(
                f"expected one weight for each of the {len(points)} atoms, received weights of shape {tuple(weights.shape)}"
            )
        if points.dim() != 2 or offsets.dim() != 1 or offsets.is_floating_point() or offsets.numel() < 1:
            raise ShapeError(
                f"expected points of shape (total, d) and integer offsets of shape (B + 1,), received "
                f"{tuple(points.shape)} and {offsets.dtype} {tuple(offsets.shape)}"
            )
        bounds = offsets.tolist()
        if bounds[0] != 0 or bounds[-1] != len(points) or any(lo >= hi for lo, hi in pairwise(bounds)):
            raise ShapeError(
                f"expected strictly increasing offsets from 0 to {len(points)} (no measure is empty), received {bounds}"
            )
        if len(bounds) == 1:
            return cls(points.reshape(0, 1, points.shape[-1]), points.new_empty(0, 1))
        parts = []
        for lo, hi in pairwise(bounds):
            parts.append(cls.uniform(points[lo:hi]) if weights is None else cls(points[lo:hi], weights[lo:hi]))
        return cls.stack(parts)

    @classmethod
    def from_numpy(
        cls,
        points: np.ndarray,
        weights: np.ndarray | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Measure:
        """Measure from NumPy arrays (copied), uniform if ``weights`` is omitted; dtype and device of the arrays if not given."""
        x = torch.as_tensor(np.array(points), dtype=dtype, device=device)
        if weights is None:
            return cls.uniform(x)
        return cls(x, torch.as_tensor(np.array(weights), dtype=dtype, device=device))

    @classmethod
    def collate(cls, pairs: Iterable[tuple[Measure, ...]]) -> tuple[Measure, ...]:
        """``collate_fn`` for a DataLoader over tuples of measures: one stacked, padded measure for each position.

        Example:
            >>> DataLoader(dataset_of_pairs, batch_size=8, collate_fn=Measure.collate)
        """
        rows = list(pairs)
        if not rows or not all(isinstance(row, (tuple, list)) and len(row) == len(rows[0]) for row in rows):
            raise DTypeError("expected a non-empty list of equally long tuples of measures, such as [(mu, nu), ...]")
        return tuple(cls.stack(column) for column in zip(*rows, strict=True))

    @classmethod
    def _trusted(cls, points: Tensor, weights: Tensor) -> Measure:
        """Measure from parts known to be valid: derived from one that was checked."""
        mu = object.__new__(cls)
        object.__setattr__(mu, "points", points)
        object.__setattr__(mu, "weights", weights)
        return mu

    @classmethod
    def _part(cls, points: Tensor, weights: Tensor) -> Measure:
        """Some atoms of a measure, perhaps none: their weights may have any sum."""
        _check_pair(points, weights, least=0)
        _check_nonnegative(weights)
        return cls._trusted(_usable_points(points, weights), weights)

    @classmethod
    def _without_points(cls, weights: Tensor) -> Measure:
        """Measure of given weights on points that carry no information."""
        _check_float("weights", weights)
        if not weights.dim() or not weights.shape[-1]:
            raise ShapeError(f"expected weights of shape (*batch, n), n >= 1, received {tuple(weights.shape)}")
        if _values_are_visible(weights):
            _check_weights(weights)
        return cls._trusted(weights.new_zeros(()).expand(*weights.shape, 1), weights)

    # Description ------------------------------------------------------------------------------------------------------

    @property
    def n(self) -> int:
        """Number of atoms, those of weight zero included."""
        return self.points.shape[-2]

    @property
    def d(self) -> int:
        """Number of coordinates of a point."""
        return self.points.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """Leading axes; empty for a single measure."""
        return self.weights.shape[:-1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of points and weights."""
        return self.points.dtype

    @property
    def device(self) -> torch.device:
        """Device of points and weights."""
        return self.points.device

    @property
    def requires_grad(self) -> bool:
        """Whether points or weights carry a gradient."""
        return self.points.requires_grad or self.weights.requires_grad

    def __repr__(self) -> str:
        """Shape, dtype and device."""
        batch = f"batch={tuple(self.batch_shape)}, " if self.batch_shape else ""
        return f"Measure({batch}n={self.n}, d={self.d}, {self.dtype}, {self.device})"

    def __len__(self) -> int:
        """Size of the first batch axis."""
        if not self.batch_shape:
            raise DTypeError("a single measure has no length; use .n for its number of atoms")
        return self.batch_shape[0]

    def __getitem__(self, index: Any) -> Measure:
        """Select along the batch axes, as indexing a tensor of shape ``batch_shape`` would; padding stays."""
        if not self.batch_shape:
            raise DTypeError("a single measure has no batch axis to index; index .points and .weights for its atoms")
        return self.map(lambda t: select(t, self.batch_shape, index))

    def __iter__(self):
        """Iterate over the first batch axis."""
        return (self[k] for k in range(len(self)))

    def map(self, function: Callable[[Tensor], Tensor]) -> Measure:
        """Apply a function that acts on the batch axes, dtype or device to both tensors, such as a detach."""
        return self._trusted(function(self.points), function(self.weights))

    def to(self, *args: Any, **kwargs: Any) -> Measure:
        """As ``Tensor.to``. A lower precision keeps weights as they round."""
        return self.map(lambda t: t.to(*args, **kwargs))

    def detach(self) -> Measure:
        """Same measure outside the autograd graph."""
        return self.map(Tensor.detach)

    def pin_memory(self) -> Measure:
        """Copy in page-locked memory, as DataLoader asks of batch objects."""
        return self.map(Tensor.pin_memory)

    def numpy(self) -> tuple[np.ndarray, np.ndarray]:
        """``(points, weights)`` as NumPy arrays on the CPU, detached."""
        return self.points.detach().cpu().numpy(), self.weights.detach().cpu().numpy()

    # Ragged batches ---------------------------------------------------------------------------------------------------

    def unstack(self) -> list[Measure]:
        """List over the first batch axis; a measure without further batch axes loses its atoms of weight zero."""
        parts = list(self)
        return [mu if mu.batch_shape else mu._live() for mu in parts]

    def to_packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """``(points, offsets, weights)`` of a batch with one axis, without atoms of weight zero; see :meth:`from_packed`."""
        if len(self.batch_shape) != 1:
            raise ShapeError(f"expected one batch axis, received batch shape {tuple(self.batch_shape)}")
        live = self.weights > 0
        offsets = torch.cat([live.new_zeros(1, dtype=torch.int64), live.sum(-1).cumsum(0)])
        return self.points[live], offsets, self.weights[live]

    def _live(self) -> Measure:
        live = self.weights > 0
        return self._trusted(self.points[live], self.weights[live])

    def _padded(self, n: int) -> Measure:
        missing = n - self.n
        if missing == 0:
            return self
        points = torch.cat([self.points, self.points.new_zeros(*self.batch_shape, missing, self.d)], -2)
        return self._trusted(points, torch.cat([self.weights, self.weights.new_zeros(*self.batch_shape, missing)], -1))

    # Operations of measures -------------------------------------------------------------------------------------------

    def pushforward(self, map: Callable[[Tensor], Tensor] | Tensor) -> Measure:
        """Image measure: the weights stay, every point x moves to ``map(x)``.

        Args:
            map: a function from points ``(*batch, n, d)`` to ``(*batch, n, d')``, or the new points themselves.
        """
        points = map if isinstance(map, Tensor) else map(self.points)
        _check_pair(points, self.weights)  # the weights themselves were accepted before
        return self._trusted(_usable_points(points, self.weights), self.weights)

    def merged(self) -> Measure:
        """Same measure with equal atoms merged and atoms of weight zero dropped; differentiable in the weights.

        The order of the atoms is lexicographic. A batch comes back padded to the largest number of distinct atoms.
        """
        if self.batch_shape:
            if not len(self):
                return self
            return Measure.stack([mu.merged() for mu in self])
        live = self._live()
        points, index = torch.unique(live.points.detach(), dim=0, return_inverse=True)
        weights = live.weights.new_zeros(len(points)).index_add(0, index, live.weights)
        return self._trusted(points, weights)

    def split(self, index: int, fraction: float | Tensor) -> Measure:
        """Atom ``index`` (x, w) becomes (x, fraction w), in its place, and (x, (1 - fraction) w), the new last atom.

        The measure is the same; whatever is built on it must not notice (law I3).
        """
        if not -self.n <= index < self.n:
            raise ShapeError(f"expected an atom index between {-self.n} and {self.n - 1}, received {index}")
        share = torch.as_tensor(fraction)
        if _values_are_visible(share) and not bool(((share >= 0) & (share <= 1)).all()):
            raise WeightError(f"expected a fraction between 0 and 1, received {fraction}")
        index %= self.n
        part = self.weights[..., index : index + 1]
        kept = torch.cat([self.weights[..., :index], part * fraction, self.weights[..., index + 1 :]], -1)
        points = torch.cat([self.points, self.points[..., index : index + 1, :]], -2)
        return self._trusted(points, torch.cat([kept, part * (1 - fraction)], -1))

    def product(self, other: Measure) -> Measure:
        """Product measure mu (x) nu on pairs: ``n * m`` atoms (x_i, y_j) of weight a_i b_j, row-major, in dimension d + d'."""
        _check_alike([self, other], same_dimension=False)
        x = self.points.unsqueeze(-2).expand(*self.batch_shape, self.n, other.n, self.d)
        y = other.points.unsqueeze(-3).expand(*self.batch_shape, self.n, other.n, other.d)
        weights = self.weights.unsqueeze(-1) * other.weights.unsqueeze(-2)
        return self._trusted(torch.cat([x, y], -1).flatten(-3, -2), weights.flatten(-2))

    def with_null(self, mass: float | PerProblem) -> Measure:
        """Same measure scaled by 1 - mass, with a null atom of weight ``mass`` appended as the last atom.

        The null atom gives unmatched mass a place to go, so that two texts with words of their own still have an exact
        coupling. It sits at the origin; what it costs to reach is up to the cost (see ``sinkformer.text``).

        Args:
            mass: weight of the null atom, between 0 and 1, a number or shape ``(*batch)``.
        """
        share = torch.as_tensor(mass, dtype=self.dtype, device=self.device)
        if share.dim() and share.shape != self.batch_shape:
            raise ShapeError(
                f"expected the null mass as a number or of shape {tuple(self.batch_shape)}, received {tuple(share.shape)}"
            )
        share = share.expand(self.batch_shape).unsqueeze(-1)
        if _values_are_visible(share) and not bool(((share >= 0) & (share <= 1)).all()):
            raise WeightError(f"expected a null mass between 0 and 1, received {mass}")
        points = torch.cat([self.points, self.points.new_zeros(*self.batch_shape, 1, self.d)], -2)
        return self._trusted(points, torch.cat([self.weights * (1 - share), share], -1))


def select(t: Tensor, batch_shape: torch.Size, index: Any) -> Tensor:
    """``t`` indexed along its leading axes ``batch_shape`` alone: an ellipsis or a mask never reaches the axes behind."""
    positions = torch.arange(batch_shape.numel(), device=t.device).reshape(batch_shape)[index]
    return t.reshape((batch_shape.numel(), *t.shape[len(batch_shape) :]))[positions]


def check_compatible(mu: Measure, nu: Measure) -> None:
    """Raise unless two measures can be coupled: same batch shape, dtype and device (d may differ)."""
    _check_alike([mu, nu], same_dimension=False)


def _check_alike(measures: Sequence[Measure], same_dimension: bool = True) -> None:
    for k, mu in enumerate(measures):
        if not isinstance(mu, Measure):
            raise DTypeError(
                f"expected a Measure, received {type(mu).__name__} at position {k}; wrap points with Measure.uniform(points)"
            )
    first = measures[0]
    for k, mu in enumerate(measures[1:], 1):
        if mu.dtype != first.dtype:
            raise DTypeError(
                f"expected measures of one dtype, received {first.dtype} and {mu.dtype} (position {k}); use .to()"
            )
        if mu.device != first.device:
            raise DeviceError(
                f"expected measures on one device, received {first.device} and {mu.device} (position {k}); use .to()"
            )
        if mu.batch_shape != first.batch_shape:
            raise ShapeError(
                f"expected measures of one batch shape, received {tuple(first.batch_shape)} and "
                f"{tuple(mu.batch_shape)} (position {k})"
            )
        if same_dimension and mu.d != first.d:
            raise ShapeError(f"expected points of one dimension, received d={first.d} and d={mu.d} (position {k})")


def _values_are_visible(t: Tensor) -> bool:
    """Whether values may be looked at: not while a graph is captured or a function is vectorised."""
    batched = torch._C._functorch.is_batchedtensor(t)  # pyright: ignore[reportAttributeAccessIssue]
    return not (torch.compiler.is_compiling() or batched or t.is_meta)


def _first(bad: Tensor) -> list[int]:
    return bad.nonzero()[0].tolist()


def _check_float(name: str, t: Any) -> None:
    if not isinstance(t, Tensor):
        hint = "; use Measure.from_numpy for NumPy arrays" if isinstance(t, np.ndarray) else ""
        raise DTypeError(f"expected {name} as a torch tensor, received {type(t).__name__}{hint}")
    if t.dtype not in FLOAT_DTYPES:
        raise DTypeError(f"expected floating-point {name}, received {t.dtype}; convert with .float() or .double()")


def _check_points(points: Any, least: int = 1) -> None:
    _check_float("points", points)
    if points.dim() < 2:
        raise ShapeError(
            f"expected points of shape (*batch, n, d), received {tuple(points.shape)}; "
            f"for points on a line use x.unsqueeze(-1)"
        )
    if points.shape[-2] < least or points.shape[-1] < 1:
        raise ShapeError(
            f"expected at least one atom and one coordinate, received points of shape {tuple(points.shape)}; "
            f"an empty cloud is no probability measure"
        )


def _check_pair(points: Any, weights: Any, least: int = 1) -> None:
    _check_points(points, least)
    _check_float("weights", weights)
    if weights.dtype != points.dtype:
        raise DTypeError(f"expected points and weights of one dtype, received {points.dtype} and {weights.dtype}")
    if weights.device != points.device:
        raise DeviceError(f"expected points and weights on one device, received {points.device} and {weights.device}")
    if weights.shape != points.shape[:-1]:
        raise ShapeError(
            f"expected weights of shape {tuple(points.shape[:-1])} for points of shape {tuple(points.shape)}, "
            f"received {tuple(weights.shape)}"
        )


def _check_nonnegative(weights: Tensor) -> None:
    if not bool(torch.isfinite(weights).all()):
        raise NonFiniteError(
            f"expected finite weights, received a NaN or infinity at index {_first(~torch.isfinite(weights))}"
        )
    if bool((weights < 0).any()):
        raise WeightError(
            f"expected non-negative weights, received {weights[weights < 0][0].item():.6g} at index {_first(weights < 0)}"
        )


def _check_weights(weights: Tensor) -> None:
    # Sum in double, so that the check sees the weights and not its own rounding.
    weights = weights.detach()
    total = weights.sum(-1, dtype=torch.float32 if weights.device.type == "mps" else torch.float64)
    if not weights.numel():
        return
    tolerance = mass_tolerance(weights.dtype)
    # Numbers, because every operation on tensors costs as much as the check itself; NaN compares as wrong.
    if max(total.max().item() - 1, 1 - total.min().item()) <= tolerance and weights.min().item() >= 0:
        return
    _check_nonnegative(weights)
    off = ~((total - 1).abs() <= tolerance)
    raise WeightError(
        f"expected weights summing to 1, received a sum of {total[off][0].item():.9g} at batch element {_first(off)}; "
        f"use Measure.normalized(points, weights)"
    )


def _usable_points(points: Tensor, weights: Tensor) -> Tensor:
    """The points, with what marks padding replaced by zero; raises if a live atom has no finite coordinates."""
    largest = torch.finfo(points.dtype).max
    # Fourth root: a squared norm, and its product with another, stay finite. Half precision has no room for that.
    limit = largest**0.25 if largest > 1e30 else largest
    if _values_are_visible(points) and points.numel() and bool(points.detach().abs().amax() <= limit):
        return points
    if _values_are_visible(points) and _values_are_visible(weights):
        bad = ~torch.isfinite(points).all(-1) & (weights > 0)
        if bool(bad.any()):
            raise NonFiniteError(
                f"expected finite points, received a NaN or infinity in the atom at index {_first(bad)}, whose weight is "
                f"positive; give it weight zero to ignore it"
            )
    unusable = (weights == 0).unsqueeze(-1) & ~(points.abs() <= limit)
    return points.masked_fill(unusable, 0.0)


# Measures pass through torch.compile and torch.vmap as pairs of tensors.
_pytree.register_pytree_node(
    Measure,
    lambda mu: ([mu.points, mu.weights], None),
    lambda parts, _: Measure._trusted(*parts),
    serialized_type_name="sinkformer.Measure",
)
