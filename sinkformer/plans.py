"""Joint distributions as lazy matrices: everything that can be read off a plan from blocks of its rows.

A ``Plan`` behaves like the matrix P of masses on pairs of atoms without being one: ``pi @ v``, ``pi.mT``, ``pi.shape``,
marginals, samples and numbers. A subclass owes the rows, the transpose, and a map over its tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import Self

from sinkformer import ops
from sinkformer._numerics import mass_tolerance, pairing, potential_dtype, relative_entropy, safe_divide
from sinkformer._typing import PerProblem, PlanMatrix
from sinkformer.costs import Cost, as_cost
from sinkformer.errors import DTypeError, NonFiniteError, ShapeError, WeightError
from sinkformer.measures import Measure, select


class TopK(NamedTuple):
    """Largest entries of every row: masses and target indices, ``(*batch, n, k)``."""

    values: Tensor
    indices: Tensor


class Plan(ABC):
    """A lazy matrix of masses on the pairs of atoms of ``source`` and ``target``, shape ``(*batch, n, m)``, non-negative."""

    source: Measure
    target: Measure

    # What a subclass owes ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _block(self, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of the plan, in the dtype of potentials."""

    @property
    @abstractmethod
    def mT(self) -> Plan:
        """The plan with source and target exchanged."""

    @abstractmethod
    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to every tensor (indexing of batch axes, detach, moves)."""

    def _conditional_block(self, start: int, stop: int) -> Tensor:
        block = self._block(start, stop)
        return safe_divide(block, block.sum(-1, keepdim=True))

    # Description ------------------------------------------------------------------------------------------------------

    @property
    def batch_shape(self) -> torch.Size:
        """Leading axes."""
        return self.source.batch_shape

    @property
    def shape(self) -> torch.Size:
        """``(*batch, n, m)``."""
        return torch.Size((*self.batch_shape, self.source.n, self.target.n))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the measures, and of every answer; sums are taken in float64."""
        return self.source.dtype

    @property
    def device(self) -> torch.device:
        """Device of the measures."""
        return self.source.device

    def __repr__(self) -> str:
        """Type and shape."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, {self.dtype})"

    def __len__(self) -> int:
        """Size of the first batch axis."""
        return len(self.source)

    def __getitem__(self, index: Any) -> Self:
        """Select along the batch axes."""
        if not self.batch_shape:
            raise DTypeError("a single coupling has no batch axis to index; use .to_dense() for its entries")
        return self._map(lambda t: select(t, self.batch_shape, index))

    def __iter__(self) -> Iterator[Self]:
        """Iterate over the first batch axis."""
        return (self[k] for k in range(len(self)))

    def detach(self) -> Self:
        """Same coupling outside the autograd graph."""
        return self._map(Tensor.detach)

    # Linear algebra ---------------------------------------------------------------------------------------------------

    def _over_blocks(self, function: Callable[[Tensor, int, int], Any], conditional: bool = False) -> list[Any]:
        """``function(block, start, stop)`` for every block of rows; blocks are recomputed in the backward pass."""
        block = self._conditional_block if conditional else self._block
        ranges = list(ops.row_blocks(tuple(self.shape)))

        def run(start: int, stop: int) -> Any:
            with torch.autocast(self.device.type, enabled=False):
                return function(block(start, stop), start, stop)

        if len(ranges) == 1 or not torch.is_grad_enabled():
            return [run(start, stop) for start, stop in ranges]
        return [checkpoint(run, start, stop, use_reentrant=False) for start, stop in ranges]

    def _wide(self, t: Tensor) -> Tensor:
        return t.to(potential_dtype(self.device))

    def __matmul__(self, v: Tensor) -> Tensor:
        """P v for ``v`` of shape ``(*batch, m, k)``, or ``(m,)``: ``(*batch, n, k)`` or ``(*batch, n)``."""
        if not isinstance(v, Tensor):
            raise DTypeError(f"expected a tensor to the right of @, received {type(v).__name__}")
        if v.dim() == 0 or v.shape[max(-2, -v.dim())] != self.shape[-1]:
            raise ShapeError(
                f"expected a tensor of shape (*batch, {self.shape[-1]}, k) or ({self.shape[-1]},), received {tuple(v.shape)}"
            )
        if v.dim() > 2 and v.shape[:-2] != self.batch_shape:
            raise ShapeError(
                f"expected batch shape {tuple(self.batch_shape)}, received a tensor of shape {tuple(v.shape)}"
            )
        columns = self._without_padding(v.unsqueeze(-1) if v.dim() == 1 else v)
        product = torch.cat(self._over_blocks(lambda p, *_: p @ columns), -2).to(self.dtype)
        return product.squeeze(-1) if v.dim() == 1 else product

    def _without_padding(self, v: Tensor) -> Tensor:
        """Values at the target atoms, wide. Padding may hold any number; 0 times it must be 0."""
        wide = self._wide(v)
        return torch.where((self.target.weights == 0).unsqueeze(-1) & ~torch.isfinite(wide), 0.0, wide)

    def marginals(self) -> tuple[Tensor, Tensor]:
        """Row and column sums, ``(*batch, n)`` and ``(*batch, m)``: what the plan has, not what it should have."""
        p, q = self._marginals()
        return p.to(self.dtype), q.to(self.dtype)

    def _marginals(self) -> tuple[Tensor, Tensor]:
        parts = self._over_blocks(lambda p, *_: ops.marginals(p))
        return torch.cat([row for row, _ in parts], -1), torch.stack([column for _, column in parts]).sum(0)

    @property
    def mass(self) -> PerProblem:
        """Sum of all entries, ``(*batch)``: one for a coupling, less for an unbalanced plan."""
        return self._marginals()[0].sum(-1).to(self.dtype)

    def marginal_error(self) -> PerProblem:
        """L1 violation of both marginals, sum_i |P1 - a|_i + sum_j |P^T 1 - b|_j, measured now, ``(*batch)``."""
        p, q = self._marginals()
        a, b = self._weights()
        return ((p - a).abs().sum(-1) + (q - b).abs().sum(-1)).to(self.dtype)

    def _weights(self) -> tuple[Tensor, Tensor]:
        """Weights as the solver used them: with equal totals."""
        a, b = self._wide(self.source.weights), self._wide(self.target.weights)
        return a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)

    def to_dense(self) -> PlanMatrix:
        """The plan as a matrix, ``(*batch, n, m)``."""
        return torch.cat(self._over_blocks(lambda p, *_: p), -2).to(self.dtype)

    def as_measure(self) -> Measure:
        """The joint distribution as a measure on the product space: n m atoms (x_i, y_j), row-major, in dimension d + d'.

        Raises:
            WeightError: the total mass is not one.
        """
        plan = self.to_dense().flatten(-2)
        total = plan.detach().sum(-1, dtype=torch.float64)
        if bool(((total - 1).abs() > mass_tolerance(self.dtype)).any()):
            worst = total.flatten()[(total - 1).abs().argmax()].item()
            raise WeightError(
                f"expected a plan of total mass 1, received {worst:.6g}; use .rounded() for a balanced plan"
            )
        return Measure(self.source.product(self.target).points, plan)

    # Reading ----------------------------------------------------------------------------------------------------------

    def conditional(self) -> Conditional:
        """The conditional distributions pi(. | x_i) as a lazy row-stochastic matrix."""
        return Conditional(self)

    def barycentric_projection(self, values: Tensor | None = None) -> Tensor:
        """Conditional mean E[v(Y) | X = x_i]: ``(*batch, n, k)``.

        Args:
            values: v at the target atoms, ``(*batch, m, k)``; the target points by default. Defined at source atoms of
                weight zero too, for an entropic coupling.
        """
        return self.conditional() @ (self.target.points if values is None else values)

    def argmax(self) -> Tensor:
        """Target index of the largest entry of every row, ``(*batch, n)``, int64; the first of equal ones."""
        return torch.cat(self._over_blocks(lambda p, *_: p.argmax(-1), conditional=True), -1)

    def topk(self, k: int) -> TopK:
        """The k largest entries of every row, in decreasing order."""
        if not 1 <= k <= self.shape[-1]:
            raise ShapeError(f"expected k between 1 and {self.shape[-1]}, received {k}")
        parts = self._over_blocks(lambda p, *_: tuple(p.topk(k, -1)))
        return TopK(torch.cat([v for v, _ in parts], -2).to(self.dtype), torch.cat([i for _, i in parts], -2))

    @torch.no_grad()
    def sample(self, k: int, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw k pairs of atoms from every coupling: source and target indices, ``(*batch, k)`` each, int64.

        A plan of mass other than one is sampled in proportion.
        """
        if k < 0:
            raise ShapeError(f"expected a number of samples k >= 0, received {k}")
        flat = self._flat()
        p = flat._marginals()[0]
        if not bool((torch.isfinite(p).all(-1) & (p.sum(-1) > 0)).all()):
            raise NonFiniteError(
                "expected plans of positive, finite mass, received one without; look at solution.status"
            )
        if k == 0 or not len(p):
            empty = torch.empty((*self.batch_shape, k), dtype=torch.int64, device=self.device)
            return empty, empty.clone()
        i = torch.multinomial(p, k, replacement=True, generator=generator)
        u = torch.rand(i.shape, dtype=p.dtype, device=p.device, generator=generator)
        j = torch.zeros_like(i)

        def draw(rows: Tensor, start: int, stop: int) -> None:
            problem, slot = ((i >= start) & (i < stop)).nonzero(as_tuple=True)
            cumulative = rows.cumsum(-1)[problem, i[problem, slot] - start]
            target = torch.searchsorted(
                cumulative, (u[problem, slot] * cumulative[:, -1]).unsqueeze(-1), right=True
            ).squeeze(-1)
            j[problem, slot] = target.clamp_max(rows.shape[-1] - 1)

        flat._over_blocks(draw, conditional=True)
        return i.reshape((*self.batch_shape, k)), j.reshape((*self.batch_shape, k))

    def _flat(self) -> Self:
        depth = len(self.batch_shape)
        return self._map(lambda t: t.reshape((-1, *t.shape[depth:])))

    # Numbers ----------------------------------------------------------------------------------------------------------

    def cost(self, ground: Cost | Tensor) -> PerProblem:
        """<P, ground>, ``(*batch)``: mean cost of moving along the coupling; ``ground`` acts on the points of the measures."""
        ground = as_cost(ground)
        ground.check_shape(tuple(self.shape))
        x, y = self._wide(self.source.points), self._wide(self.target.points)

        def part(p: Tensor, start: int, stop: int) -> Tensor:
            c = self._wide(ground.rows(x, y, start, stop))
            return pairing(p, c)

        return torch.stack(self._over_blocks(part)).sum(0).to(self.dtype)

    def entropy(self) -> PerProblem:
        """Shannon entropy -sum P log P, in nats, ``(*batch)``."""
        parts = self._over_blocks(
            lambda p, *_: -torch.where(p > 0, p * torch.where(p > 0, p, 1.0).log(), 0.0).sum((-1, -2))
        )
        return torch.stack(parts).sum(0).to(self.dtype)

    def mutual_information(self) -> PerProblem:
        """KL(P | a (x) b), in nats, ``(*batch)``: zero exactly for the product; generalised KL if the mass is not one."""
        a, b = self._weights()
        parts = self._over_blocks(lambda p, s, e: relative_entropy(p, a[..., s:e, None] * b.unsqueeze(-2), (-1, -2)))
        return torch.stack(parts).sum(0).to(self.dtype)


@dataclass(frozen=True, eq=False)
class Conditional:
    """Row-stochastic matrix of the conditional distributions pi(. | x_i); rows without mass and without density are zero."""

    coupling: Plan

    @property
    def shape(self) -> torch.Size:
        """``(*batch, n, m)``."""
        return self.coupling.shape

    def __matmul__(self, v: Tensor) -> Tensor:
        """Conditional mean of ``v``, shape ``(*batch, m, k)`` to ``(*batch, n, k)``."""
        pi = self.coupling
        if not isinstance(v, Tensor) or v.dim() < 2 or v.shape[-2] != pi.shape[-1]:
            received = tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__
            raise ShapeError(f"expected values of shape (*batch, {pi.shape[-1]}, k), received {received}")
        wide = pi._without_padding(v)
        return torch.cat(pi._over_blocks(lambda p, *_: p @ wide, conditional=True), -2).to(pi.dtype)

    def to_dense(self) -> Tensor:
        """All conditional distributions, ``(*batch, n, m)``."""
        return torch.cat(self.coupling._over_blocks(lambda p, *_: p, conditional=True), -2).to(self.coupling.dtype)
