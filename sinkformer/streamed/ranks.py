"""The processes that solve one problem together: each has rows of the source, and the whole target.

Everything of the size of the source stays where it is. What is summed over rows (the columns of a sweep, errors, values) is
summed over the ranks of a ``torch.distributed`` group: messages of m numbers. Whatever decides how an iteration goes on is
added in the order of the ranks, or taken from the first, so that all have it with the same bits and decide alike.

Derivatives. What belongs to all (value, g, epsilon, the target) is one variable of which every rank has a copy: upstream
derivatives are the same everywhere, and so is what comes out, summed over the rows of all. What belongs to rows is local.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sinkformer._typing import Points, Weights
from sinkformer.errors import ConfigError, DistributedError
from sinkformer.measures import Measure

# Bytes in which a rank tells the others what it was asked for, and characters kept of one value and of an error: of up to
# twelve bytes each.
_TERMS, _LONGEST, _LONGEST_ERROR = 16384, 120, 1000
# Relative difference of two copies of one upstream derivative: rounding.
_ROUNDING = 1e-5


@dataclass(frozen=True, eq=False)
class Shard:
    """The rows of a measure that one process holds, for ``sinkhorn(..., process_group=...)``.

    Nothing is checked before ``sinkhorn``, where all processes of the group learn of an error of one.

    Args:
        points: coordinates of these atoms, ``(*batch, n, d)``, floating point; n may be 0, and differ between processes.
        weights: their weights ``(*batch, n)``, dtype and device of ``points``, non-negative, in one unit for all processes:
            the sum over all of them is what counts as one. None gives every atom of the whole measure the same weight; on all
            processes or on none.

    Example:
        >>> import torch
        >>> Shard(torch.rand(1000, 2)).weights.sum()
        tensor(1000.)
    """

    points: Points
    weights: Weights = None  # type: ignore[assignment]
    uniform: bool = field(default=False, init=False, repr=False)

    def __post_init__(self):
        """Fill in the weights."""
        if self.weights is None:
            object.__setattr__(self, "uniform", True)
        if self.weights is None and isinstance(self.points, Tensor) and self.points.dim() > 1:
            object.__setattr__(self, "weights", self.points.detach().new_ones(self.points.shape[:-1]))

    @classmethod
    def of(cls, mu: Measure, process_group: dist.ProcessGroup) -> Shard:
        """Rows of a measure that every process of the group has: as many for each as for the next, up to one.

        Args:
            mu: the whole measure, ``(*batch, n)`` atoms.
            process_group: of ``torch.distributed``; ``torch.distributed.group.WORLD`` for all processes.

        Raises:
            ConfigError: no group, or none of this process.
        """
        ranks = Ranks.of(process_group)
        rows = slice(mu.n * ranks.index // ranks.count, mu.n * (ranks.index + 1) // ranks.count)
        return cls(mu.points[..., rows, :], mu.weights[..., rows])


@dataclass(frozen=True, eq=False)
class Ranks:
    """One process, or the ranks of a group.

    Attributes:
        group: None for one process.
        index: number of this one.
        count: how many there are.
    """

    group: Any = None
    index: int = 0
    count: int = 1

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """The ranks of a group; ConfigError if there is none."""
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigError(
                "expected a process group of torch.distributed, which is not initialised in this process; start the "
                "script by torchrun and call torch.distributed.init_process_group() before"
            )
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"expected a process group that this process belongs to, received {group!r}; "
                f"all processes are torch.distributed.group.WORLD"
            )
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    @property
    def alone(self) -> bool:
        """Whether there is nobody to talk to."""
        return self.group is None

    @property
    def first(self) -> bool:
        """Whether this one adds what belongs to the target, which all have."""
        return self.index == 0

    # Sums -------------------------------------------------------------------------------------------------------------

    def sum(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Sums over the ranks, outside the graph; tensors of one dtype, in one message."""
        return self._reduced(dist.ReduceOp.SUM, parts) if self.group is not None else parts

    def least(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Minima over the ranks."""
        return self._reduced(dist.ReduceOp.MIN, parts) if self.group is not None else parts

    def log_sum_exp(self, t: Tensor) -> Tensor:
        """Log of the sum of exponentials over the ranks."""
        if self.group is None:
            return t
        (top,) = self.least(-t)
        top = torch.where(top.isfinite(), -top, 0.0)
        return top + self.sum((t - top).exp())[0].log()

    def total(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        """Sums over the ranks of a few numbers, with the same bits everywhere whatever the machines are."""
        if self.group is None:
            return numbers
        gathered = self._gathered(torch.stack(numbers))
        return tuple(reduce(torch.add, gathered).unbind())

    def leading(self, number: Tensor) -> Tensor:
        """The number of the first rank."""
        return number if self.group is None else self._gathered(number)[0]

    def _reduced(self, how: Any, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        message = torch.cat([part.detach().flatten() for part in parts])
        self._talk(lambda: dist.all_reduce(message, how, self.group))
        pieces = message.split([part.numel() for part in parts])
        return tuple(piece.view_as(part) for piece, part in zip(pieces, parts, strict=True))

    def _gathered(self, t: Tensor) -> list[Tensor]:
        t = t.detach().contiguous()
        found = [torch.empty_like(t) for _ in range(self.count)]
        self._talk(lambda: dist.all_gather(found, t, self.group))
        return found

    def _talk(self, how: Callable[[], Any]) -> None:
        try:
            how()
        except RuntimeError as error:
            raise DistributedError(
                f"rank {self.index} of {self.count} lost the others: a process ended, or did not come within the timeout of "
                f"the group; look for the first error in the logs of the other ranks, end this process and start all again "
                f"({str(error).strip().splitlines()[0]})"
            ) from error

    # Derivatives ------------------------------------------------------------------------------------------------------

    def collect(self, t: Tensor) -> Tensor:
        """The sum over the ranks of what is local: a variable of all."""
        return t if self.group is None else _applied(_Collect, t, self)

    def spread(self, t: Tensor) -> Tensor:
        """A variable of all, for use in what is local."""
        return t if self.group is None else _applied(_Spread, t, self)

    def check_copies(self, t: Tensor, name: str) -> None:
        """Raise unless all ranks have the same upstream derivative of a variable of all."""
        if self.group is None:
            return
        low, high = self.least(t, -t)
        if bool((-high - low > _ROUNDING * torch.maximum(low.abs(), high.abs()).amax()).any()):
            raise DistributedError(
                f"expected one loss on every rank, received derivatives in {name} that differ between them; {name} is a "
                f"variable that all ranks have: compute the same function of it everywhere, and use f for what is local"
            )

    # Agreement --------------------------------------------------------------------------------------------------------

    @contextmanager
    def agreed(self) -> Iterator[dict[str, Any]]:
        """What several ranks put into the dictionary must be the same, and an error inside is one of all.

        Raises:
            DistributedError: two ranks differ, or another one had an error.
        """
        terms: dict[str, Any] = {}
        try:
            yield terms
        except Exception as error:
            self._exchanged({"": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]})
            raise
        told = self._exchanged({name: _short(str(value)) for name, value in terms.items()})
        failures = [f"rank {k} had a {theirs['']}" for k, theirs in enumerate(told) if "" in theirs]
        if failures:
            raise DistributedError(f"expected arguments without an error on every rank; {'; '.join(failures)}")
        for name in dict.fromkeys(name for theirs in told for name in theirs):
            (first, wanted), *others = [(k, theirs[name]) for k, theirs in enumerate(told) if name in theirs]
            for k, value in others:
                if value != wanted:
                    raise DistributedError(
                        f"expected the same {name} on every rank, received {wanted} on rank {first} and {value} on rank {k}"
                    )

    def _exchanged(self, terms: dict[str, str]) -> list[dict[str, str]]:
        told = json.dumps(terms).encode().ljust(_TERMS)
        device = "cpu" if "gloo" in dist.get_backend_config(self.group) else f"cuda:{torch.cuda.current_device()}"
        gathered = self._gathered(torch.frombuffer(bytearray(told), dtype=torch.uint8).to(device))
        return [json.loads(bytes(message.tolist())) for message in gathered]


ALONE = Ranks()


def fingerprint(*tensors: Tensor) -> str:
    """A number that two sets of tensors share only if they are equal."""
    digest = hashlib.blake2b(digest_size=8)
    for t in tensors:
        digest.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _short(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}... ({hashlib.blake2b(text.encode(), digest_size=8).hexdigest()})"


def _applied(function: Any, t: Tensor, ranks: Ranks) -> Tensor:
    return function.apply(t, ranks)


class _Collect(torch.autograd.Function):
    """The sum over the ranks; every rank has the whole upstream derivative."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, ranks: Ranks):
        return ranks.sum(t)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        return grad, None


class _Spread(torch.autograd.Function):
    """The identity; every rank has a part of the upstream derivative."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, ranks: Ranks):
        ctx.ranks = ranks
        return t.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        return ctx.ranks.sum(grad)[0], None
