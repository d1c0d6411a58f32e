"""Whether two measures have any coupling on the pairs that are allowed."""

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow
from torch import Tensor


def infeasible(cost: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Which problems of a flat batch have no coupling that avoids their forbidden pairs.

    One exists exactly if a maximal flow through the allowed pairs carries all the mass (Hall, Strassen), to the accuracy
    of 30-bit capacities.

    Args:
        cost: ``(B, n, m)``; ``+inf`` forbids a pair.
        a: weights ``(B, n)``, summing to one.
        b: weights ``(B, m)``, summing to one.

    Returns:
        Bool ``(B,)``.
    """
    live = (a > 0).unsqueeze(-1) & (b > 0).unsqueeze(-2)
    allowed = live & (cost < torch.inf)
    found = torch.zeros(len(cost), dtype=torch.bool, device=cost.device)
    for k in (live & ~allowed).flatten(1).any(-1).nonzero().flatten().tolist():
        found[k] = not _carries_everything(*(t[k].cpu().numpy() for t in (allowed, a, b)))
    return found


def _carries_everything(allowed: np.ndarray, a: np.ndarray, b: np.ndarray) -> bool:
    n, m = allowed.shape
    unit = 2**30  # capacities are 32-bit; every one is rounded by half a unit at most
    rows, columns = allowed.nonzero()
    tails = np.concatenate([np.zeros(n, int), 1 + rows, 1 + n + np.arange(m)])
    heads = np.concatenate([1 + np.arange(n), 1 + n + columns, np.full(m, n + m + 1)])
    capacities = np.concatenate([a * unit, np.full(len(rows), unit), b * unit]).round().astype(np.int32)
    graph = csr_array((capacities, (tails, heads)), shape=(n + m + 2, n + m + 2))
    return unit - maximum_flow(graph, 0, n + m + 1).flow_value <= n + m
