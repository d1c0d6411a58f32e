"""Results of methods that find links and no coupling."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sinkformer.couplings import DenseCoupling
from sinkformer.metrics import target_coupling
from sinkformer.text import documents
from sinkformer.text.methods.protocol import EncodedPair, Found

# Prefers equal positions between pairs of equal cost, as the matching does.
_TIE_BREAK = 1e-6


def similarities(pair: EncodedPair) -> np.ndarray:
    """1 - cost/2, ``(n, m)`` float64: (1 + cos)/2 less the price of places, ties broken by position.

    ``-inf`` for a word without a vector with a word of another spelling: nothing links them.
    """
    similarity = 1 - pair.costs / documents.FARTHEST - _TIE_BREAK * pair.shift
    unlike = documents.unlike(pair.source.words, pair.target.words, *pair.vectors)
    return similarity if unlike is None else np.where(unlike.cpu().numpy(), -np.inf, similarity)


def mutual(similarity: np.ndarray) -> np.ndarray:
    """Pairs that are each other's best, bool ``(n, m)``; the first of equals is the best."""
    n, m = similarity.shape
    best = np.zeros((n, m), bool)
    forward, backward = similarity.argmax(1), similarity.argmax(0)
    rows = np.arange(n)
    best[rows, forward] = backward[forward] == rows
    return best & (similarity > -np.inf)


def linked(pair: EncodedPair, links: np.ndarray) -> Found:
    """The result for a bool matrix of links ``(n, m)``.

    A word has mass 1/(n + m); a link carries 1/max(degree of its words) of it, the rest goes to null. Confidence is
    1 - cost, at least 0.
    """
    pairs = [(int(i), int(j)) for i, j in zip(*np.nonzero(links), strict=True)]
    coupling = coupled(pair, pairs)
    full = coupling.plan
    n, m = pair.cost.shape
    confidence = (1 - pair.cost).clamp(min=0.0)
    return Found(coupling, full[:n, :m], full[:n, m], full[n, :m], confidence, pairs)


def coupled(pair: EncodedPair, links: list[tuple[int, int]]) -> DenseCoupling:
    """The coupling of the completed texts that links stand for, ``(n + 1, m + 1)``; n or m may be zero."""
    n, m = pair.cost.shape
    source, target = documents.with_null(pair.vectors[0], m), documents.with_null(pair.vectors[1], n)
    if not n or not m:  # the null atom of the empty side is all it has, and takes everything
        return DenseCoupling(source, target, source.weights.unsqueeze(-1) * target.weights)
    plan = target_coupling(links, n, m).to(pair.cost.device) / (n + m)
    plan[n, m] = plan[:n, :m].sum()
    return DenseCoupling(source, target, plan)


def empty(pair: EncodedPair) -> Found:
    """The result if a side has no words: no links, all mass with null."""
    n, m = pair.cost.shape
    coupling = coupled(pair, [])
    nothing: Tensor = torch.zeros_like(pair.cost)
    return Found(coupling, nothing, coupling.plan[:n, 0], coupling.plan[0, :m], nothing, [])
