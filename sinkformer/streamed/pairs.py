"""Costs of the pairs of a problem, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sinkformer._numerics import potential_dtype
from sinkformer._typing import CostMatrix, Features, Weights
from sinkformer.costs import Cost, Matrix, NegativeDot, SqEuclidean
from sinkformer.streamed.ranks import ALONE, Ranks

# How scores are made: blocks of torch, or the GPU kernels, which make them anew every sweep or store the absorbed kernel.
Engine = Literal["torch", "streamed", "stored"]

# Costs beyond are errors of their computation, not costs.
LARGEST_COST = 1e29

# Entries of a block in float32, half as many in float64. On a CPU it should stay in the cache between the passes over
# it, but hold enough rows to be worth the reading of all target points; elsewhere it should fill the device.
_CACHED_ENTRIES, _CACHED_ROWS, _MOST_ENTRIES = 2**19, 128, 2**24


@dataclass(frozen=True, eq=False)
class PairCosts:
    """Costs of all pairs of a flat batch of B problems, evaluated when asked for.

    Attributes:
        cost: a ``Cost`` of points, or a ``Matrix`` of shape ``(B, n, m)``.
        x: source features ``(B, n, r)``; of a matrix problem, anything of ``n`` rows.
        y: target features ``(B, m, r)``.
        mask: added to the cost, ``(B, n, m)``; ``+inf`` forbids a pair. None for none.
        ranks: whose rows these are: the n rows of this process, and those of others.
        engine: what sweeps; see ``kernels.refusal`` for what the GPU kernels can do.
    """

    cost: Cost
    x: Features
    y: Features
    mask: CostMatrix | None = None
    ranks: Ranks = ALONE
    engine: Engine = "torch"

    def matrix(self, k: int | Tensor) -> CostMatrix:
        """The costs of problem k with its mask, ``(1, n, m)``, outside the graph."""
        cost = Matrix(self.cost.values[k]) if isinstance(self.cost, Matrix) else self.cost
        with torch.no_grad():
            rows = cost(self.x[k], self.y[k])
            return (rows if self.mask is None else rows + self.mask[k]).unsqueeze(0)

    def problem(self, k: int, a: Weights, b: Weights, dtype: torch.dtype) -> Pairs:
        """Problem k, with its weights ``(n,)`` and ``(m,)``, in blocks of ``dtype``, outside the graph."""
        cost, x, y = self.cost, self.x[k].detach(), self.y[k].detach()
        mask = None if self.mask is None else self.mask[k].detach()
        void = ((a == 0).detach(), (b == 0).detach())
        if not bool(void[0].any() | void[1].any()):
            void = None
        if isinstance(cost, Matrix):
            return Pairs(Matrix(cost.values[k].detach()), x, y, mask, void, dtype, self.ranks)
        if type(cost) is SqEuclidean:
            # -<(2 x, -1, -|x|^2), (y, |y|^2, 1)>, so that translation and squares are taken once and not for every block.
            x, y = x.to(potential_dtype(x.device)), y.to(potential_dtype(y.device))
            centre = y.median(-2, keepdim=True).values
            x, y = x - centre, y - centre
            one, other = torch.ones_like(x[:, :1]), torch.ones_like(y[:, :1])
            x = torch.cat([2 * x, -one, -x.square().sum(-1, keepdim=True)], -1)
            y = torch.cat([y, y.square().sum(-1, keepdim=True), other], -1)
            cost = NegativeDot()
        return Pairs(cost, x.to(dtype), y.to(dtype), mask, void, dtype, self.ranks)


@dataclass(frozen=True, eq=False)
class Pairs:
    """Costs of one problem in blocks of ``dtype``; ``void`` marks the atoms of weight zero, None if there are none."""

    cost: Cost
    x: Tensor
    y: Tensor
    mask: Tensor | None
    void: tuple[Tensor, Tensor] | None
    dtype: torch.dtype
    ranks: Ranks = ALONE

    @property
    def wide(self) -> torch.dtype:
        """Dtype of potentials and of sums over blocks."""
        return potential_dtype(self.y.device)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Ranges of rows.

        Whoever loops over them keeps no new tensor of a block, but writes into one made before: what outlives a block
        breaks up the memory it leaves, the next one does not fit, and the heap grows to the size of the matrix.
        """
        n, m, entries = len(self.x), max(1, len(self.y)), _MOST_ENTRIES
        if self.y.device.type == "cpu":
            entries = min(entries, max(_CACHED_ENTRIES, _CACHED_ROWS * m))
        step = max(1, entries * 4 // (m * self.dtype.itemsize))
        for start in range(0, n, step):
            yield start, min(n, start + step)

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows of the cost with the mask added; not to be written into."""
        with torch.autocast(self.y.device.type, enabled=False):
            rows = _rows(self.cost, self.x, self.y, start, stop).to(self.dtype)
        if self.mask is not None:
            rows = rows + self.mask[start:stop].to(self.dtype)
        if self.void is not None:
            # What padding costs is never used with weight, but 0 times NaN would spread.
            padded = self.void[0][start:stop].unsqueeze(-1) | self.void[1]
            rows = rows.masked_fill(padded & ~((rows.abs() <= LARGEST_COST) | (rows == torch.inf)), 0.0)
        return rows

    def exponents(self, start: int, stop: int, h: Tensor, epsilon: float) -> Tensor:
        """h_j - C_ij / epsilon for a block of rows, ``h`` in ``dtype``; may be written into."""
        if type(self.cost) is NegativeDot and self.mask is None and self.void is None:
            with torch.autocast(self.y.device.type, enabled=False):
                return torch.addmm(h, self.x[start:stop], self.y.mT, alpha=1 / epsilon)
        return torch.add(h, self.rows(start, stop), alpha=-1 / epsilon)

    def density(self, start: int, stop: int, f: Tensor, g: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """``(log k, k)`` with k = exp((f + g - C) / epsilon), bounded if f or g is an update of the other."""
        log_k = self.exponents(start, stop, (g / epsilon).to(self.dtype), epsilon)
        log_k.add_((f[start:stop] / epsilon).to(self.dtype).unsqueeze(-1))
        density = log_k.exp()
        if self.void is not None:  # nothing bounds the exponent between two paddings
            density.masked_fill_(self.void[0][start:stop].unsqueeze(-1) & self.void[1], 0.0)
        return log_k, density


def _rows(cost: Cost, x: Tensor, y: Tensor, start: int, stop: int) -> Tensor:
    # The default is a slice; taken here, its derivative has the size of the slice.
    return cost(x[start:stop], y) if type(cost).rows is Cost.rows else cost.rows(x, y, start, stop)
