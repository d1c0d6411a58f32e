"""Costs of moving one point to another.

A cost is a function of two points, evaluated on all pairs. Only the cost modulo functions of one variable matters for
a balanced coupling: ``SqEuclidean`` at epsilon gives the plan of ``NegativeDot`` at epsilon / 2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from sinkformer._numerics import working_dtype
from sinkformer._typing import CostMatrix, Features
from sinkformer.errors import DTypeError, ShapeError


class Cost(ABC):
    """A function c(x, y) of two points.

    Attributes:
        is_metric: whether c is a metric, so that it may serve as the ground distance of a Wasserstein distance.
    """

    is_metric: bool = False

    @abstractmethod
    def __call__(self, x: Features, y: Features) -> CostMatrix:
        """Cost of every pair: ``(*batch, n, r)`` and ``(*batch, m, r)`` give ``(*batch, n, m)``."""

    def transposed(self) -> Cost:
        """The cost c'(y, x) = c(x, y); itself for a symmetric cost."""
        return self

    def rows(self, x: Features, y: Features, start: int, stop: int) -> CostMatrix:
        """Rows ``start`` to ``stop`` of the matrix, for work in blocks."""
        return self(x[..., start:stop, :], y)

    def check_shape(self, shape: tuple[int, ...]) -> None:  # noqa: B027 - a cost of points serves every shape
        """Raise ``ShapeError`` if the cost cannot serve problems of this shape ``(*batch, n, m)``."""


def _prepared(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Check the dimensions and leave half precision, in which no sum is taken."""
    if x.shape[-1] != y.shape[-1]:
        raise ShapeError(
            f"expected source and target points of one dimension, received {x.shape[-1]} and {y.shape[-1]}; "
            f"encode them into one space, or give the cost as a matrix"
        )
    dtype = working_dtype(x.dtype)
    return x.to(dtype), y.to(dtype)


@dataclass(frozen=True)
class NegativeDot(Cost):
    """c(x, y) = -<x, y>: the cost of the Sinkhorn Transformer (arXiv 2603.25860), with x = Q(mu, .) and y = K(nu, .)."""

    def __call__(self, x: Features, y: Features) -> CostMatrix:
        """Shape ``(*batch, n, m)``."""
        x, y = _prepared(x, y)
        return -(x @ y.mT)


@dataclass(frozen=True)
class SqEuclidean(Cost):
    """c(x, y) = |x - y|^2 (no factor one half).

    Computed from inner products of translated points, so the absolute error is about machine precision times the
    squared diameter of the clouds, wherever they lie.
    """

    def __call__(self, x: Features, y: Features) -> CostMatrix:
        """Shape ``(*batch, n, m)``, non-negative."""
        x, y = _prepared(x, y)
        # A translation changes nothing in exact arithmetic, so it needs no gradient of its own. The median is deaf to
        # the coordinates of a few padded atoms.
        centre = y.detach().median(-2, keepdim=True).values
        x, y = x - centre, y - centre
        squares = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2)
        return (squares - 2 * (x @ y.mT)).clamp_min(0.0)


class _Distances(torch.autograd.Function):
    """Pairwise Euclidean distances with a derivative that can be differentiated again; zero at coinciding points."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor) -> Tensor:
        distances = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
        ctx.save_for_backward(x, y, distances)
        return distances

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, y, distances = ctx.saved_tensors
        apart = distances > 0
        w = torch.where(apart, grad / torch.where(apart, distances, 1.0), 0.0)
        grad_x = w.sum(-1).unsqueeze(-1) * x - w @ y
        grad_y = w.sum(-2).unsqueeze(-1) * y - w.mT @ x
        return grad_x, grad_y


@dataclass(frozen=True)
class Euclidean(Cost):
    """c(x, y) = |x - y|, from differences, exactly zero for equal points; subgradient zero there."""

    is_metric = True

    def __call__(self, x: Features, y: Features) -> CostMatrix:
        """Shape ``(*batch, n, m)``, non-negative."""
        x, y = _prepared(x, y)
        distances = _Distances.apply(x, y)
        assert isinstance(distances, Tensor)
        return distances


@dataclass(frozen=True, eq=False, repr=False)
class Matrix(Cost):
    """A given cost matrix, shape ``(*batch, n, m)``; the points of the measures are not looked at.

    Raises:
        DTypeError: not a floating-point tensor.
        ShapeError: fewer than two axes.
    """

    values: CostMatrix

    def __post_init__(self):
        """Check the matrix."""
        if not isinstance(self.values, Tensor) or not self.values.is_floating_point():
            received = self.values.dtype if isinstance(self.values, Tensor) else type(self.values).__name__
            raise DTypeError(f"expected the cost matrix as a floating-point tensor, received {received}")
        if self.values.dim() < 2:
            raise ShapeError(f"expected a cost matrix of shape (*batch, n, m), received {tuple(self.values.shape)}")

    def __call__(self, x: Features, y: Features) -> CostMatrix:
        """The matrix itself."""
        return self.values

    def __repr__(self) -> str:
        """Shape only."""
        return f"Matrix({tuple(self.values.shape)})"

    def transposed(self) -> Cost:
        """The transposed matrix."""
        return Matrix(self.values.mT)

    def rows(self, x: Features, y: Features, start: int, stop: int) -> CostMatrix:
        """Rows ``start`` to ``stop``."""
        return self.values[..., start:stop, :]

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Raise ``ShapeError`` unless the matrix has exactly this shape."""
        if tuple(self.values.shape) != tuple(shape):
            raise ShapeError(
                f"expected a cost matrix of shape {tuple(shape)} for these measures, received {tuple(self.values.shape)}"
            )


def as_cost(cost: Cost | Tensor) -> Cost:
    """A tensor is read as a given matrix; a cost is returned as it is."""
    if isinstance(cost, Tensor):
        return Matrix(cost)
    if isinstance(cost, Cost):
        return cost
    raise DTypeError(
        f"expected a Cost or a cost matrix, received {type(cost).__name__}; "
        f"use NegativeDot(), SqEuclidean(), Euclidean() or a tensor of shape (*batch, n, m)"
    )


def forbid(pairs: Tensor, *, dtype: torch.dtype = torch.float32) -> CostMatrix:
    """Additive mask: ``+inf`` where ``pairs`` (bool, ``(*batch, n, m)``) is True, zero elsewhere.

    A mask of any floating dtype serves problems of any.

    Raises:
        DTypeError: ``pairs`` is not boolean.
    """
    if pairs.dtype != torch.bool:
        raise DTypeError(f"expected a boolean tensor of forbidden pairs, received {pairs.dtype}")
    zeros = torch.zeros(pairs.shape, dtype=dtype, device=pairs.device)
    return zeros.masked_fill(pairs, torch.inf)
