"""Entropic couplings of pairs of different lengths, and their links."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sinkformer.couplings import Coupling, EntropicCoupling
from sinkformer.measures import Measure
from sinkformer.text import decoding, documents
from sinkformer.text.methods.protocol import EncodedPair, Found


def solve_ragged(
    sources: Sequence[Measure], targets: Sequence[Measure], costs: Sequence[Tensor], epsilon: float, *, tau: float = 1.0
) -> list[EntropicCoupling]:
    """Couplings of problems of different sizes, solved as one padded batch.

    Args:
        sources: one for each problem, with n atoms.
        targets: one for each problem, with m atoms.
        costs: ``(n, m)`` float64 for each problem.
        epsilon: strength of the entropy.
        tau: hardness of both marginals, see ``sinkformer.sinkhorn``.
    """
    mu, nu = Measure.stack(sources), Measure.stack(targets)
    cost = costs[0].new_zeros(len(costs), mu.n, nu.n)
    for k, c in enumerate(costs):
        cost[k, : c.shape[0], : c.shape[1]] = c
    with torch.no_grad():
        batch = Coupling.solve(mu, nu, cost=cost, epsilon=epsilon, tau_a=tau, tau_b=tau, on_failure="ignore")
    return batch.unstack([(c.shape[0], c.shape[1]) for c in costs])


def completed(pair: EncodedPair) -> tuple[Measure, Measure]:
    """Both texts with their null atoms: n + 1 and m + 1 atoms."""
    n, m = pair.cost.shape
    return documents.with_null(pair.vectors[0], m), documents.with_null(pair.vectors[1], n)


def decoded(
    pair: EncodedPair, matching: list[tuple[int, int]], confidence: Tensor, threshold: float
) -> list[tuple[int, int]]:
    """Links from a coupling and the one-to-one matching it goes with, see ``decoding.decode``."""
    return decoding.decode(matching, confidence.cpu().numpy(), *pair.spellings, threshold, free=pair.costs == 0)


def found(
    pair: EncodedPair,
    coupling: EntropicCoupling,
    plan: Tensor,
    nulls: tuple[Tensor, Tensor],
    *,
    scale: int,
    matching: list[tuple[int, int]],
    threshold: float,
) -> Found:
    """The result when the confidence is the share of a word's mass, ``plan * scale``."""
    confidence = (plan * scale).clamp(max=1.0)
    return Found(coupling, plan, *nulls, confidence, decoded(pair, matching, confidence, threshold))
