"""The plan of one call of attention, in factors: potentials of queries and keys, and the scores they belong to."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sinkformer._numerics import safe_divide, under_autocast
from sinkformer.attention import stored
from sinkformer.attention.masks import Sides, flat
from sinkformer.attention.options import Options
from sinkformer.costs import NegativeDot
from sinkformer.errors import ShapeError
from sinkformer.measures import Measure
from sinkformer.ops import scores
from sinkformer.solvers import sinkhorn


@dataclass(frozen=True, eq=False)
class Problem:
    """A flat batch: queries ``(B, n, d)``, keys ``(B / group, m, d)``, and who may attend to whom.

    ``stored`` are its scores with their bias, ``(B, n, m)``, where they are few; None if they are made when needed.
    """

    query: Tensor
    key: Tensor
    scale: float
    sides: Sides
    stored: Tensor | None = None

    @property
    def group(self) -> int:
        """Queries' problems that share the keys of one."""
        return len(self.query) // max(len(self.key), 1)

    def wide(self, shared: Tensor) -> Tensor:
        """Keys or values for every problem, ``(B, m, d)``."""
        return shared if self.group == 1 else shared.repeat_interleave(self.group, 0)

    def over_keys(self, h: Tensor) -> Tensor:
        """Log sum_j exp(S_ij + h_j), ``(B, n)``."""
        if self.stored is not None:
            return torch.logsumexp(self.stored + h.unsqueeze(-2), -1)
        return scores.log_sum_exp(self.query, self.key, h, scale=self.scale, bias=self.sides.bias)

    def over_queries(self, f: Tensor) -> Tensor:
        """Log sum_i exp(S_ij + f_i), ``(B, m)``."""
        if self.stored is not None:
            return torch.logsumexp(self.stored + f.unsqueeze(-1), -2)
        bias = self.sides.bias
        bias = None if bias is None else bias.mT
        return scores.log_sum_exp(self.wide(self.key), self.query, f, scale=self.scale, bias=bias)

    def transported(self, f: Tensor, h: Tensor, values: Tensor) -> Tensor:
        """Sum_j exp(f_i + S_ij + h_j) v_j, ``(B, n, e)``, for values ``(B / group, m, e)``."""
        if self.stored is not None:
            return self.weights(f, h) @ self.wide(values).to(h.dtype)
        return scores.transport(self.query, self.key, f, h, values, scale=self.scale, bias=self.sides.bias)

    def weights(self, f: Tensor, h: Tensor) -> Tensor:
        """The matrix exp(f_i + S_ij + h_j), ``(B, n, m)``; f is minus the log-sums of h, so this is a softmax."""
        s = self.scores(h.dtype) if self.stored is None else self.stored
        return _present((s + h.unsqueeze(-2)).softmax(-1), self._alone(f))

    def _alone(self, f: Tensor) -> Tensor | None:
        """Rows of zeros, as a column."""
        return None if self.sides.blind is None else (f == -torch.inf).unsqueeze(-1)

    def scores(self, dtype: torch.dtype) -> Tensor:
        """S, ``(B, n, m)``."""
        s = (self.scale * self.query.to(dtype)) @ self.wide(self.key).to(dtype).mT
        return s if self.sides.bias is None else s + self.sides.bias


def solve(problem: Problem, options: Options) -> tuple[Tensor, Tensor]:
    """Potentials ``(f, h)`` of A_ij = exp(f_i + S_ij + h_j), the last step on the side of the queries."""
    if options.tau == 0 or 0 in (*problem.query.shape[:2], problem.key.shape[1]):
        f, h = _closed(problem, _start(problem.sides))
    elif options.tolerance is None:
        f, h = _sweeps(problem, options)
    else:
        f, h = _closed(problem, _solved(problem, options))
    blind = problem.sides.blind
    return (f if blind is None else f.masked_fill(blind, -torch.inf)), h


def _closed(problem: Problem, h: Tensor) -> tuple[Tensor, Tensor]:
    """The last half step."""
    return -problem.over_keys(h), h


def _start(sides: Sides) -> Tensor:
    """The bias of every key that makes softmax attention."""
    return sides.log_b if sides.key_bias is None else sides.log_b + sides.key_bias


def _sweeps(problem: Problem, options: Options) -> tuple[Tensor, Tensor]:
    """A fixed number of sweeps; a mask of keys is part of h, not of the scores."""
    sides, tau = problem.sides, options.tau
    base = sides.log_b if sides.key_bias is None else sides.log_b + (1 - tau) * sides.key_bias
    h = _start(sides)
    if problem.stored is not None:
        found = stored.sweeps(problem.stored, sides.log_a, base, h, tau, options.iterations)
        if found is not None:
            return found
    for _ in range(options.iterations):
        f = -problem.over_keys(h)
        h = base - tau * problem.over_queries(f + sides.log_a)
    return _closed(problem, h)


def _solved(problem: Problem, options: Options) -> Tensor:
    """The library's solver, until the tolerance is reached."""
    sides, dtype = problem.sides, problem.sides.log_b.dtype
    query, key = problem.scale * problem.query.to(dtype), problem.wide(problem.key).to(dtype)
    penalised = options.tau < 1
    if sides.key_bias is not None and penalised:  # one more coordinate; couplings do not see it
        query = torch.cat([query, torch.ones_like(query[..., :1])], -1)
        key = torch.cat([key, sides.key_bias.unsqueeze(-1)], -1)
    solution = sinkhorn(
        Measure(query, sides.log_a.softmax(-1)),  # all dead: uniform instead of nothing
        Measure(key, sides.log_b.softmax(-1)),
        cost=NegativeDot(),
        epsilon=1.0,
        mask=None if sides.bias is None else -sides.bias,
        tau_b=options.tau,
        tolerance=options.tolerance,
        max_iterations=options.iterations,
        gradient=options.gradient,
    )
    return solution.g.to(dtype) + (_start(sides) if penalised else sides.log_b)


def exactly(device: torch.device) -> AbstractContextManager:
    """Autocast off: it would lower the precision of scores."""
    return torch.autocast(device.type, enabled=False) if under_autocast(device) else nullcontext()


@dataclass(frozen=True, eq=False, repr=False)
class AttentionPlan:
    """Weights of attention as a lazy matrix ``(*batch, n, m)``: A_ij = exp(f_i + S_ij + h_j), and ``plan @ values``.

    Made by :func:`sinkformer.attention.attention_plan`. With weights a of the queries and b of the keys, the coupling is
    P_ij = a_i A_ij. Rows of A sum to one to rounding, except those of queries that may attend to nothing, which are zero.

    Attributes:
        problem: the flat batch it solves.
        potentials: ``(f, h)``, flat.
        batch_shape: ``*batch``.
        value_batch_shape: the same for values: fewer heads if they are shared.
    """

    problem: Problem
    potentials: tuple[Tensor, Tensor]
    batch_shape: tuple[int, ...]
    value_batch_shape: tuple[int, ...]

    @property
    def f(self) -> Tensor:
        """Minus the log-sum of every row, ``(*batch, n)``; float32 or float64. ``-inf`` for a row of zeros."""
        return self._shaped(self.potentials[0])

    @property
    def h(self) -> Tensor:
        """The bias of every key that makes softmax attention this one, ``(*batch, m)``; ``-inf`` for padding.

        h_j = g_j + log b_j, with g the potential of the keys; a mask that is equal for all queries is part of it.
        """
        return self._shaped(self.potentials[1])

    @property
    def query_weights(self) -> Tensor:
        """a, ``(*batch, n)``, summing to one; zero for padding, and for all where nobody may attend to anything."""
        return self._shaped(_present(self.problem.sides.log_a.softmax(-1), self.problem.sides.idle))

    @property
    def key_weights(self) -> Tensor:
        """b, ``(*batch, m)``, summing to one; zero for padding, and for all where nobody may attend to anything."""
        return self._shaped(_present(self.problem.sides.log_b.softmax(-1), self.problem.sides.dead))

    @property
    def key_mass(self) -> Tensor:
        """What every key receives, sum_i a_i A_ij, ``(*batch, m)``; one pass over all pairs."""
        (f, h), sides = self.potentials, self.problem.sides
        with exactly(f.device):
            mass = (h + self.problem.over_queries(_present(f, sides.blind) + sides.log_a)).exp()
        return self._shaped(_present(mass, sides.dead))

    @property
    def coverage(self) -> Tensor:
        """What every key receives over its share b_j, ``(*batch, m)``: 1 is fair; 0 for padding."""
        return safe_divide(self.key_mass, self.key_weights)

    @property
    def marginal_error(self) -> Tensor:
        """L1 distance of what the keys receive from their shares, ``(*batch)``. Rows have no error."""
        return (self.key_mass - self.key_weights).abs().sum(-1)

    def weights(self) -> Tensor:
        """The matrix A, ``(*batch, n, m)``, in the dtype of the potentials."""
        with exactly(self.potentials[0].device):
            return self._shaped(self.problem.weights(*self.potentials))

    def __matmul__(self, values: Tensor) -> Tensor:
        """A V for values ``(*value_batch, m, e)``: ``(*batch, n, e)`` in the dtype of the values."""
        flat_values = self.flat_values(values)
        with exactly(values.device):
            return self._shaped(self.problem.transported(*self.potentials, flat_values).to(values.dtype))

    def flat_values(self, values: Tensor) -> Tensor:
        """Values ``(B / group, m, e)``, those of padding zero, so that NaN there reaches nobody."""
        m = self.problem.key.shape[1]
        expected = (*self.value_batch_shape, m)
        fits = values.dim() >= 2 and values.dim() <= len(expected) + 1
        if (
            not fits
            or any(h not in (1, w) for h, w in zip(values.shape[-2::-1], expected[::-1], strict=False))
            or values.shape[-2] != m
        ):
            raise ShapeError(
                f"expected values of shape ({', '.join(map(str, expected))}, e), received {tuple(values.shape)}"
            )
        return silenced(flat(values.expand(*expected, values.shape[-1]), 2), self.problem.sides.dead)

    def _shaped(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(*self.batch_shape, *tensor.shape[1:])

    def __repr__(self) -> str:
        """Shape only: more would take a pass over all pairs."""
        n, m = self.problem.query.shape[1], self.problem.key.shape[1]
        return f"AttentionPlan({(*self.batch_shape, n, m)})"


def _present(numbers: Tensor, absent: Tensor | None) -> Tensor:
    """Zero where an atom is absent."""
    return numbers if absent is None else numbers.masked_fill(absent, 0.0)


def kept(problem: Problem) -> Problem:
    """The problem with its scores, if they are few enough to be stored."""
    pairs = len(problem.query) * problem.query.shape[1] * problem.key.shape[1]
    if not stored.storable(problem.query.device, pairs):
        return problem
    return replace(problem, stored=problem.scores(problem.sides.log_a.dtype))


def silenced(shared: Tensor, dead: Tensor | None) -> Tensor:
    """Keys or values ``(B / group, m, d)``, zero where they are dead for all problems that share them."""
    if dead is None or not len(shared):
        return shared
    everywhere = dead.unflatten(0, (len(shared), -1)).all(1)
    return shared.masked_fill(everywhere.unsqueeze(-1), 0.0)
