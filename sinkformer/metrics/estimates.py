"""Numbers that are near W1 and prove nothing: a debiased entropic value and a sliced distance."""

from __future__ import annotations

import numpy as np
import ot
import torch
from geomloss import SamplesLoss
from torch import Tensor

# Blur of GeomLoss relative to the diameter of the two clouds.
_BLUR = 0.01
_PROJECTIONS, _SEED = 500, 0


def sinkhorn_divergence(
    first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray], split: int, euclidean: bool
) -> float:
    """GeomLoss's debiased Sinkhorn divergence, p = 1, blur 0.01 of the diameter; it blurs what moves less than that.

    Args:
        first: points ``(n, d + d')`` and masses ``(n,)`` of sum one.
        second: the same.
        split: d, the number of coordinates of the first axis.
        euclidean: the Euclidean product instead of the additive one.
    """

    def cost(x: Tensor, y: Tensor) -> Tensor:
        if euclidean:
            return torch.cdist(x, y)
        return torch.cdist(x[..., :split], y[..., :split]) + torch.cdist(x[..., split:], y[..., split:])

    points = np.concatenate([first[0], second[0]])
    diameter = float(np.linalg.norm(np.ptp(points, axis=0)))
    if diameter == 0:
        return 0.0
    loss = SamplesLoss("sinkhorn", p=1, blur=_BLUR * diameter, scaling=0.9, cost=cost, backend="tensorized")
    (x, a), (y, b) = ([torch.from_numpy(part)[None] for part in cloud] for cloud in (first, second))
    return max(0.0, float(loss(a, x, b, y)))


def sliced(first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]) -> float:
    """Mean W1 of 500 random projections to the line (POT, seed 0); at most the Euclidean W1, often half of it."""
    (x, a), (y, b) = first, second
    return float(np.asarray(ot.sliced_wasserstein_distance(x, y, a, b, n_projections=_PROJECTIONS, p=1, seed=_SEED)))
