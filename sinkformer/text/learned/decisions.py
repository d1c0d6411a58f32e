"""From logits to links: calibrated confidence, and the threshold that goes with a data set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sinkformer.errors import ConfigError

# Log-odds beyond this are certainties.
_SURE = 15.0
_THRESHOLDS = np.arange(0.05, 0.951, 0.01)
_BINS = 10


@dataclass(frozen=True)
class Decision:
    """Confidence and links from log-odds.

    Attributes:
        scale, shift: the confidence is sigmoid(scale * log-odds + shift) (Platt 1999), fitted on held-out pairs.
        threshold: a pair whose confidence is at least that is a link.
    """

    scale: float = 1.0
    shift: float = 0.0
    threshold: float = 0.5

    def __post_init__(self):
        """Check the values."""
        for name in ("scale", "shift", "threshold"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ConfigError(f"expected {name} as a finite number, received {value!r}")
        if self.scale <= 0 or not 0 < self.threshold <= 1:
            raise ConfigError(f"expected scale > 0 and a threshold in (0, 1], received {self}")

    def confidence(self, odds: Tensor) -> Tensor:
        """Probabilities of links, of the shape of the log-odds, float64."""
        return torch.sigmoid(self.scale * odds.double() + self.shift)

    def links(self, confidence: np.ndarray, exact: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Pairs of at least the threshold, in order.

        Args:
            confidence: ``(n, m)``.
            exact: pairs of a one-to-one matching that are links whatever their confidence, and the only ones of their words.
        """
        wanted = confidence >= self.threshold
        for i, j in exact:
            wanted[i, :] = wanted[:, j] = False
        for i, j in exact:
            wanted[i, j] = True
        return [(int(i), int(j)) for i, j in zip(*np.nonzero(wanted), strict=True)]

    @classmethod
    def fitted(cls, odds: Tensor, gold: Tensor) -> Decision:
        """The decision that suits held-out pairs best: least cross-entropy, then highest F1.

        Args:
            odds: log-odds of many word pairs, one axis.
            gold: one for links and zero for others.
        """
        scale, shift = _platt(odds.double(), gold.double())
        return cls(scale, shift, best_threshold(torch.sigmoid(scale * odds.double() + shift), gold)[0])


def log_odds_of_shares(shares: Tensor) -> Tensor:
    """Log-odds of fractions given as logarithms, within +-15."""
    return (shares - torch.log1p(-shares.exp().clamp(max=1 - 1e-7))).clamp(-_SURE, _SURE)


def best_threshold(confidence: Tensor, gold: Tensor) -> tuple[float, float]:
    """Threshold with the highest F1, between 0.05 and 0.95, and that F1.

    In the middle of its equals: the curve is flat near its top.
    """
    order = confidence.argsort(descending=True)
    ranked, hits = confidence[order].numpy(), gold[order].double().cumsum(0).numpy()
    found = np.array([np.searchsorted(-ranked, -t, side="right") for t in _THRESHOLDS])
    right = np.where(found > 0, hits[np.maximum(found - 1, 0)], 0.0)
    f1 = 2 * right / np.maximum(found + float(gold.sum()), 1.0)
    top = np.flatnonzero(f1 >= f1.max() - 1e-4)
    return round(float(_THRESHOLDS[top[len(top) // 2]]), 2), float(f1.max())


class ReliabilityBin(NamedTuple):
    """Word pairs whose confidence lies in one tenth.

    Attributes:
        low, high: the range, [low, high).
        count: number of word pairs.
        confidence: their mean confidence.
        right: the share of them that are gold links.
    """

    low: float
    high: float
    count: int
    confidence: float
    right: float


def reliability(confidence: Tensor, gold: Tensor) -> tuple[list[ReliabilityBin], float]:
    """Reliability diagram in tenths, without empty ones, and the expected calibration error (Guo et al. 2017).

    Args:
        confidence: of many word pairs, in [0, 1], one axis.
        gold: one for links and zero for others.
    """
    index = (confidence * _BINS).long().clamp(max=_BINS - 1)
    bins, error = [], 0.0
    for k in range(_BINS):
        here = index == k
        count = int(here.sum())
        if count:
            mean, right = float(confidence[here].mean()), float(gold[here].double().mean())
            bins.append(ReliabilityBin(k / _BINS, (k + 1) / _BINS, count, mean, right))
            error += count / len(confidence) * abs(mean - right)
    return bins, error


def _platt(odds: Tensor, gold: Tensor) -> tuple[float, float]:
    # Targets off zero and one, as Platt (1999) has them: finite where a threshold separates all links from all others.
    links = gold.sum()
    target = torch.where(gold > 0, (links + 1) / (links + 2), 1 / (len(gold) - links + 2))
    values = torch.zeros(2, dtype=torch.float64, requires_grad=True)  # logarithm of the scale, shift
    optimizer = torch.optim.LBFGS([values], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(values[0].exp() * odds + values[1], target)
        loss.backward()
        return loss

    optimizer.step(closure)
    scale, shift = values.detach().tolist()
    return math.exp(scale), shift
