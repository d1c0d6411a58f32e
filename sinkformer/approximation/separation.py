"""From logits to an inner product of finite rank: one G_i for every source, one H_j for every target.

    minimise over G, H   sum over pairs p of  KL(T_p | P(S_p)),     S_p = G_{i(p)} H_{j(p)}^T,

the Fenchel-Young loss: convex in S, with gradient P(S) - T, and blind to functions of x and of y alone. Near its minimum it is
the plan-weighted squared error of the logits modulo such functions, so entries without mass may be anything that gives
them none; far from it they count as soon as they take mass. L-BFGS, from a singular value decomposition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.optimize
import scipy.sparse
import scipy.sparse.csgraph
import torch
from torch import Tensor

from sinkformer._numerics import safe_divide
from sinkformer._typing import Features
from sinkformer.approximation.pairs import Pairs
from sinkformer.approximation.smoothing import pinsker
from sinkformer.training import fenchel_young

# L1 marginal error of the solver within the loss, and its most sweeps.
_TOLERANCE, _MOST_SWEEPS = 1e-8, 2000
# Share of the product in the plan's weights by which logits are centred, and the sweeps that it takes.
_FLOOR, _SWEEPS = 1e-3, 50
# Rounds in which blocks of pairs that are not given are filled in.
_ROUNDS = 20
# Gradients that L-BFGS remembers.
_MEMORY = 30
# The fit ends when this many iterations improve it by less than this share.
_WINDOW, _PROGRESS = 50, 0.02


@dataclass(frozen=True, eq=False)
class Separation:
    """A fitted factorisation.

    Attributes:
        left: G, ``(I, N, r)``.
        right: H, ``(J, M, r)``.
        iterations: of L-BFGS.
    """

    left: Features
    right: Features
    iterations: int

    def logits(self, pairs: Pairs) -> Tensor:
        """S, ``(B, N, M)``."""
        return self.left[pairs.source_index] @ self.right[pairs.target_index].mT


def full_rank(pairs: Pairs) -> int:
    """A rank at which every cost is an inner product: the smaller number of all atoms, in the largest component."""
    most = 0
    for sources, targets in _components(pairs):
        sizes = [(side.weights > 0).sum() for side in (pairs.sources[sources], pairs.targets[targets])]
        most = max(most, int(min(sizes)))
    return most


def separated(
    pairs: Pairs, plans: Tensor, logits: Sequence[Tensor], rank: int, goal: float, iterations: int
) -> Separation:
    """Factors of rank r whose couplings are next to given plans.

    Args:
        pairs: the pairs.
        plans: T, ``(B, N, M)``, of the pairs' marginals.
        logits: log-densities near those of T, up to functions of x and of y, one or several, to start from the best.
        rank: r.
        goal: H sqrt(KL / 2) of every pair at which the fit may stop.
        iterations: most of L-BFGS.
    """
    problem = _Problem(pairs, plans, rank, goal)
    product = pairs.product
    starts = [problem.start(_centred(s, w)) for s in logits for w in (product, plans + _FLOOR * product)]
    start = min(starts, key=lambda x: problem(x)[0])
    value, _ = problem(start)
    if problem.near_enough():
        return Separation(*problem.factors(start), 0)
    found = scipy.optimize.minimize(
        problem,
        start,
        jac=True,
        method="L-BFGS-B",
        callback=problem.stop,
        options={"maxiter": iterations, "maxfun": 20 * iterations, "maxcor": _MEMORY, "ftol": 0.0, "gtol": 0.0},
    )
    best = found.x if found.fun < value else start
    return Separation(*problem.factors(best), len(problem.history))


class _Problem:
    """The loss as a function of one vector: factors times the roots of the weights, which makes atoms count alike."""

    def __init__(self, pairs: Pairs, plans: Tensor, rank: int, goal: float):
        self.pairs, self.plans, self.rank, self.goal = pairs, plans, rank, goal
        self.fibre = pairs.fibre
        self.roots = [side.weights.sqrt().unsqueeze(-1) for side in (pairs.sources, pairs.targets)]
        self.history: list[float] = []
        self.divergences = torch.full((len(plans),), torch.inf, dtype=plans.dtype)

    def __call__(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """Sum over the pairs of KL(T | P(S)), and its gradient."""
        g, h = self.factors(x)
        i, j = self.pairs.source_index, self.pairs.target_index
        self.divergences, slope = fenchel_young(
            g[i] @ h[j].mT, self.plans, tolerance=_TOLERANCE, max_iterations=_MOST_SWEEPS
        )
        slopes = (
            torch.zeros_like(g).index_add_(0, i, slope @ h[j]),
            torch.zeros_like(h).index_add_(0, j, slope.mT @ g[i]),
        )
        scaled = [safe_divide(part, root) for part, root in zip(slopes, self.roots, strict=True)]
        return float(self.divergences.sum()), torch.cat([part.flatten() for part in scaled]).numpy()

    def factors(self, x: np.ndarray) -> tuple[Features, Features]:
        """G ``(I, N, r)`` and H ``(J, M, r)``."""
        shapes = [(*root.shape[:-1], self.rank) for root in self.roots]
        parts = torch.from_numpy(x).split([math.prod(shape) for shape in shapes])
        g, h = (
            safe_divide(part.view(shape), root) for part, shape, root in zip(parts, shapes, self.roots, strict=True)
        )
        return g, h

    def near_enough(self) -> bool:
        """Whether the last value was within the goal, for every pair."""
        return float(pinsker(self.divergences.clamp_min(0.0), self.fibre).max()) <= self.goal

    def stop(self, intermediate_result: scipy.optimize.OptimizeResult) -> None:
        """End the search at the goal, or where it stands still."""
        self.history.append(float(intermediate_result.fun))
        stalled = len(self.history) > _WINDOW and self.history[-1] > (1 - _PROGRESS) * self.history[-1 - _WINDOW]
        if stalled or self.near_enough():
            raise StopIteration

    def start(self, centred: Tensor) -> np.ndarray:
        """Truncated singular value decompositions of centred logits, product-weighted; of each component its own."""
        pairs = self.pairs
        left, right = (torch.zeros(*root.shape[:-1], self.rank, dtype=torch.float64) for root in self.roots)
        scaled = self.roots[0][pairs.source_index] * centred * self.roots[1][pairs.target_index].mT
        for sources, targets in _components(pairs):
            known = torch.isin(pairs.source_index, sources).nonzero().squeeze(-1)
            rows = torch.searchsorted(sources, pairs.source_index[known])
            columns = torch.searchsorted(targets, pairs.target_index[known])
            blocks = scaled.new_zeros(len(sources), len(targets), *scaled.shape[1:])
            blocks[rows, columns] = scaled[known]
            given = torch.zeros(len(sources), len(targets), dtype=torch.bool)
            given[rows, columns] = True
            left[sources], right[targets] = _completed(blocks, given, self.rank)
        return torch.cat([left.flatten(), right.flatten()]).numpy()


def _completed(blocks: Tensor, given: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors ``(s, N, r)``, ``(t, M, r)`` of blocks ``(s, t, N, M)``; those not given are filled in by the factors."""
    s, t, n, m = blocks.shape
    for _ in range(1 if bool(given.all()) else _ROUNDS):
        u, values, v = torch.linalg.svd(blocks.transpose(1, 2).reshape(s * n, t * m), full_matrices=False)
        roots = torch.nn.functional.pad(values[:rank].sqrt(), (0, max(0, rank - len(values))))
        g = torch.nn.functional.pad(u[:, :rank], (0, max(0, rank - u.shape[1]))) * roots
        h = torch.nn.functional.pad(v[:rank].mT, (0, max(0, rank - len(v)))) * roots
        guess = (g @ h.mT).view(s, n, t, m).transpose(1, 2)
        blocks = torch.where(given[..., None, None], blocks, guess)
    return g.view(s, n, rank), h.view(t, m, rank)  # pyright: ignore[reportPossiblyUnbound]


def _centred(logits: Tensor, weights: Tensor) -> Tensor:
    """Logits without the functions of x and of y that are nearest to them in the weighted squares."""
    for _ in range(_SWEEPS):
        for axis in (-1, -2):
            mean = safe_divide((weights * logits).sum(axis, keepdim=True), weights.sum(axis, keepdim=True))
            logits = logits - mean
    return logits


def _components(pairs: Pairs) -> list[tuple[Tensor, Tensor]]:
    """Sources and targets that are connected by pairs; of different components nothing is shared but the rank."""
    i, j = pairs.source_index.numpy(), pairs.target_index.numpy()
    sources, targets = len(pairs.sources), len(pairs.targets)
    graph = scipy.sparse.coo_array((np.ones(len(i)), (i, sources + j)), shape=(sources + targets,) * 2)
    count, label = scipy.sparse.csgraph.connected_components(graph, directed=False)
    return [
        (
            torch.from_numpy(np.flatnonzero(label[:sources] == k)),
            torch.from_numpy(np.flatnonzero(label[sources:] == k)),
        )
        for k in range(count)
    ]
