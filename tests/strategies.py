"""Small random inputs for hypothesis, written so that a failing example reads well."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from sinkformer import Measure


class Problem(NamedTuple):
    a: Tensor
    b: Tensor
    cost: Tensor
    epsilon: float


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.integers(round(100 * low), round(100 * high)).map(lambda k: k / 100)


@st.composite
def weights(draw, n: int, smallest: int = 0) -> Tensor:
    """Weights k_i / sum k with integers k_i; zeros occur unless ``smallest`` is 1."""
    counts = draw(st.lists(st.integers(smallest, 5), min_size=n, max_size=n).filter(any))
    w = torch.tensor(counts, dtype=torch.float64)
    return w / w.sum()


@st.composite
def measures(draw, max_atoms: int = 5, d: int = 2, smallest: int = 0) -> Measure:
    n = draw(st.integers(1, max_atoms))
    coordinates = draw(st.lists(numbers(-2, 2), min_size=n * d, max_size=n * d))
    points = torch.tensor(coordinates, dtype=torch.float64).reshape(n, d)
    return Measure(points, draw(weights(n, smallest)))


@st.composite
def problems(draw, max_atoms: int = 5) -> Problem:
    """A transport problem whose cost range is at most a few epsilon, so that it converges in a few sweeps."""
    n, m = draw(st.integers(1, max_atoms)), draw(st.integers(1, max_atoms))
    entries = draw(st.lists(numbers(-1, 1), min_size=n * m, max_size=n * m))
    cost = torch.tensor(entries, dtype=torch.float64).reshape(n, m)
    return Problem(draw(weights(n)), draw(weights(m)), cost, draw(numbers(0.5, 3)))
