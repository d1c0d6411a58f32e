"""Hausdorff distance of two finite sets of points, Euclidean.

    dist_H(X, Y) = max( max_x min_y |x - y|, max_y min_x |x - y| )

The maximum and the minimum pick one pair of points; the value is the distance of that pair, and so is the derivative. Sets
do not count: weights matter only in that an atom of weight zero is not there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sinkformer._numerics import working_dtype
from sinkformer._typing import PerProblem, Points
from sinkformer.errors import ShapeError
from sinkformer.measures import Measure, check_compatible

# Distances held in memory at one time.
_BLOCK = 2**22


def directed_hausdorff(x: Measure | Points, y: Measure | Points) -> PerProblem:
    """Largest distance from a point of ``x`` to the nearest point of ``y``: max_x min_y |x - y|.

    Args:
        x: a measure ``(*batch, n)``, that is its atoms of positive weight; or points ``(*batch, n, d)``.
        y: another one, of the same batch shape and d; m points.

    Returns:
        ``(*batch)``, in the dtype of the points. Zero exactly where every point of ``x`` is one of ``y``, as long as
        coordinates that differ do so by 1e-150 of the largest one (1e-20 in float32). Differentiable where a single pair of
        points attains the value and it is not zero; elsewhere the derivative is that of one such pair, zero at zero.

    Raises:
        DTypeError: neither measure nor floating-point tensor, or two dtypes.
        DeviceError: two devices.
        ShapeError: batch shapes or dimensions that do not fit, or no point.
        NonFiniteError: NaN or infinity in a point.

    Example:
        >>> directed_hausdorff(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [3.0]]))
        tensor(1.)
    """
    mu, nu = _pair(x, y)
    return _directed(mu, nu)


def hausdorff(x: Measure | Points, y: Measure | Points) -> PerProblem:
    """Hausdorff distance of two sets of points, the larger of the two directed distances; a metric on finite sets.

    Arguments, result and errors are those of :func:`directed_hausdorff`.

    Example:
        >>> hausdorff(torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0], [3.0]]))
        tensor(2.)
    """
    mu, nu = _pair(x, y)
    there, back = _directed(mu, nu), _directed(nu, mu)
    return torch.where(there >= back, there, back)


def _pair(x: Measure | Points, y: Measure | Points) -> tuple[Measure, Measure]:
    mu, nu = (t if isinstance(t, Measure) else Measure.uniform(t) for t in (x, y))
    check_compatible(mu, nu)
    if mu.d != nu.d:
        raise ShapeError(f"expected points of one dimension, received d={mu.d} and d={nu.d}; map both into one space")
    return mu, nu


def _directed(mu: Measure, nu: Measure) -> PerProblem:
    x, y = (m.points.to(working_dtype(m.dtype)) for m in (mu, nu))
    i, j = _farthest(x.detach(), mu.weights > 0, y.detach(), nu.weights > 0)
    difference = _row(x, i) - _row(y, j)
    # By the largest coordinate, so that no square overflows or vanishes.
    scale = difference.detach().abs().amax(-1)
    scale = torch.where(scale > 0, scale, 1.0).clamp_max(torch.finfo(x.dtype).max)
    return (scale * torch.linalg.vector_norm(difference / scale.unsqueeze(-1), dim=-1)).to(mu.dtype)


def _farthest(x: Tensor, live_x: Tensor, y: Tensor, live_y: Tensor) -> tuple[Tensor, Tensor]:
    """Of each problem the point of ``x`` farthest from ``y``, and the nearest to it of ``y``; indices ``(*batch)``."""
    x, y = (t.masked_fill(~live.unsqueeze(-1), 0.0) for t, live in ((x, live_x), (y, live_y)))
    # Coordinates below two, so that no square overflows; a power of two changes no digit.
    largest = torch.maximum(*(t.abs().amax((-1, -2), keepdim=True) for t in (x, y)))
    power = torch.where(largest > 0, largest / (2 * torch.frexp(largest)[0]), 1.0)
    x, y = x / power, y / power
    rows = max(1, _BLOCK // max(1, y.shape[:-1].numel()))
    found = [_nearest(part, y, live_y) for part in x.split(rows, -2)]
    distances, nearest = (torch.cat(parts, -1) for parts in zip(*found, strict=True))
    i = distances.masked_fill(~live_x, -torch.inf).argmax(-1)
    return i, nearest.gather(-1, i.unsqueeze(-1)).squeeze(-1)


def _nearest(x: Tensor, y: Tensor, live_y: Tensor) -> tuple[Tensor, Tensor]:
    distances = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
    distances, nearest = distances.masked_fill(~live_y.unsqueeze(-2), torch.inf).min(-1)
    return distances, nearest


def _row(points: Tensor, index: Tensor) -> Tensor:
    """Point ``index`` ``(*batch)`` of each problem, ``(*batch, d)``."""
    index = index[..., None, None].expand(*index.shape, 1, points.shape[-1])
    return points.gather(-2, index).squeeze(-2)
