"""Thousands of random problems that users would not be proud of: nothing is claimed that is not so.

Every error is measured here, in float64 and with numpy, from the potentials that were handed out and the costs as they
were given. ``pytest -s -m slow tests/test_stress.py`` prints where problems did not converge.
"""

import math
import sys
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from sinkformer import Status, sinkhorn, use_backend

TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}
# An error this side of the tolerance may be measured on the other: two sums of thousands of numbers, and exponents of
# (f + g - C) / epsilon, differ by their rounding.
SLACK = 1e-3
MOST, BATCH = 64, 64


class Batch(NamedTuple):
    """Padded problems, ``(B, n, m)``; what is known of their feasibility: 1 there is a coupling, -1 there is none, 0."""

    cost: Tensor
    a: Tensor
    b: Tensor
    epsilon: Tensor
    share: np.ndarray
    feasible: np.ndarray


def weights(n: int, rng: np.random.Generator) -> np.ndarray:
    """Log-normal, sigma up to 3, some of them zero."""
    w = np.exp(rng.uniform(0, 3) * rng.standard_normal(n))
    if n > 1 and rng.random() < 0.3:
        w[rng.random(n) < 0.3] = 0.0
        w[rng.integers(n)] = 1.0
    return w / w.sum()


def costs(n: int, m: int, rng: np.random.Generator) -> np.ndarray:
    """One of three families: dot products of clustered unit clouds, squared distances, a Gaussian matrix."""
    family = rng.integers(3)
    if family == 2:
        return rng.standard_normal((n, m))
    d = int(rng.integers(1, 17))
    centres = rng.standard_normal((3, d))
    x, y = (centres[rng.integers(3, size=k)] + 0.3 * rng.standard_normal((k, d)) for k in (n, m))
    if family == 1:
        return ((x[:, None] - y[None]) ** 2).sum(-1)
    x, y = (z / np.linalg.norm(z, axis=-1, keepdims=True) for z in (x, y))
    return -x @ y.T


def forbid(cost: np.ndarray, a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> int:
    """Forbid pairs at random; returns what is known of the feasibility then."""
    n, m = cost.shape
    pairs = rng.random((n, m)) < rng.uniform(0, 0.9)
    kind = rng.integers(3)
    if kind == 0:  # the north-west corner coupling of a random order stays allowed
        rows, columns, i, j = rng.permutation(n), rng.permutation(m), 0, 0
        left, right = a[rows].copy(), b[columns].copy()
        while i < n and j < m:
            pairs[rows[i], columns[j]] = False
            moved = min(left[i], right[j])
            left[i], right[j] = left[i] - moved, right[j] - moved
            if left[i] <= right[j]:
                i += 1
            else:
                j += 1
        pairs[rows[i:], columns[-1]] = False  # what is left by rounding
        pairs[rows[-1], columns[j:]] = False
    elif kind == 1 and m > 1:  # the heaviest source atom may only send to the lightest target
        i, j = a.argmax(), np.where(b > 0, b, np.inf).argmin()
        pairs[i] = np.arange(m) != j
        if a[i] <= 1.01 * b[j]:
            kind = 2
    else:
        kind = 2
    cost[pairs] = np.inf
    return (1, -1, 0)[kind]


def draw(dtype: torch.dtype, rng: np.random.Generator, count: int = BATCH) -> Batch:
    """A ragged batch, some problems with mu = nu; padding stands at the end or in between, with costs that are no numbers."""
    cost = np.full((count, MOST, MOST), np.nan)
    a, b = np.zeros((count, MOST)), np.zeros((count, MOST))
    share, scale, feasible = 10 ** rng.uniform(-4, math.log10(3), count), np.ones(count), np.ones(count, int)
    together = rng.random() < 0.5
    for k in range(count):
        n, m = rng.integers(1, MOST + 1, 2)
        symmetric = rng.random() < 0.15
        m = n if symmetric else m
        p, q, c = weights(n, rng), weights(m, rng), costs(n, m, rng)
        if symmetric:  # the solver recognises them; the kernel exp(-C / epsilon) may have any signature
            q, c = p, c + c.T
        p, q = (w.astype(np.float32).astype(np.float64) if dtype == torch.float32 else w for w in (p, q))
        rows = np.arange(n) if together else np.sort(rng.permutation(MOST)[:n])
        columns = rows if symmetric else np.arange(m) if together else np.sort(rng.permutation(MOST)[:m])
        live = c[np.ix_(p > 0, q > 0)]
        scale[k] = np.ptp(live) or 1.0
        if rng.random() < 0.3:
            feasible[k] = forbid(c, p, q, rng)
        a[k, rows], b[k, columns] = p, q
        cost[k][np.ix_(rows, columns)] = c
    given = (torch.from_numpy(x).to(dtype) for x in (cost, a, b))
    return Batch(*given, torch.from_numpy(share * scale), share, feasible)


def marginal_errors(batch: Batch, f: Tensor, g: Tensor) -> np.ndarray:
    """L1 of both marginals together, from the formula of the plan."""
    tensors = (batch.cost, batch.a, batch.b, batch.epsilon, f, g)
    cost, a, b, epsilon, u, v = (np.asarray(t.detach(), np.float64) for t in tensors)
    a, b = a / a.sum(-1, keepdims=True), b / b.sum(-1, keepdims=True)
    live = (a > 0)[:, :, None] & (b > 0)[:, None, :]
    cost = np.where(live, cost, np.inf)
    # Problems that did not converge may have plans beyond any number.
    with np.errstate(over="ignore"):
        plan = a[:, :, None] * b[:, None, :] * np.exp((u[:, :, None] + v[:, None, :] - cost) / epsilon[:, None, None])
    return np.abs(plan.sum(2) - a).sum(1) + np.abs(plan.sum(1) - b).sum(1)


def faults(engine: str, dtype: torch.dtype, count: int, seed: int, table: Counter | None = None) -> list[str]:
    """Solve ``count`` problems in batches; says which of them were not as claimed."""
    found, tolerance = [], TOLERANCES[dtype]
    rng = np.random.default_rng([seed, torch.finfo(dtype).bits])
    for number in range(math.ceil(count / BATCH)):
        batch = draw(dtype, rng, min(BATCH, count - number * BATCH))
        with use_backend(engine):
            solution = sinkhorn(
                batch.a,
                batch.b,
                cost=batch.cost,
                epsilon=batch.epsilon,
                tolerance=tolerance,
                on_failure="ignore",
            )
        errors = marginal_errors(batch, solution.f, solution.g)
        numbers = torch.cat([solution.f, solution.g, solution.value.unsqueeze(-1)], -1)
        finite = torch.isfinite(numbers).all(-1).tolist()
        for k, code in enumerate(solution.codes.tolist()):
            status, claimed = Status(code), float(solution.marginal_error[k])
            decade = math.floor(math.log10(batch.share[k]))
            if table is not None:
                table[engine, str(dtype).removeprefix("torch."), decade, status.name] += 1
            where = f"{engine} {dtype} seed {seed} problem {number}:{k} epsilon {batch.share[k]:.1e} of the range"
            if not finite[k]:
                found.append(f"{where}: a potential or the value is not finite, {status}")
            if status is Status.NONFINITE:
                found.append(f"{where}: NONFINITE")
            if status is Status.CONVERGED and not errors[k] <= tolerance * (1 + SLACK):
                found.append(f"{where}: CONVERGED at {claimed:.3e}, measured {errors[k]:.3e}")
            if status is Status.CONVERGED and batch.feasible[k] < 0:
                found.append(f"{where}: CONVERGED without a coupling")
            if status is Status.INFEASIBLE and batch.feasible[k] > 0:
                found.append(f"{where}: INFEASIBLE with a coupling")
    return found


def shown(table: Counter) -> str:
    """Counts by engine, dtype and decade of epsilon in units of the range of the cost."""
    lines = [f"{'engine':9}{'dtype':9}{'epsilon':>9}{'count':>7}{'converged':>11}{'unconverged':>13}{'infeasible':>12}"]
    for engine, dtype, decade in sorted({key[:3] for key in table}):
        of = [
            table[engine, dtype, decade, s.name] for s in (Status.CONVERGED, Status.MAX_ITERATIONS, Status.INFEASIBLE)
        ]
        lines.append(f"{engine:9}{dtype:9}{f'1e{decade}':>9}{sum(of):7}{of[0]:11}{of[1]:13}{of[2]:12}")
    return "\n".join(lines)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("engine", ["cpu", "absorbed"])
def test_nothing_is_claimed_that_is_not_so(engine, dtype):
    if engine == "cpu":
        pytest.importorskip("numba")
    table = Counter()
    assert faults(engine, dtype, 2 * BATCH + 22, 1, table) == []
    converged = sum(count for key, count in table.items() if key[-1] == Status.CONVERGED.name)
    assert converged >= 0.75 * table.total(), shown(table)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "count"), [("cpu", 10_000), ("absorbed", 1_000)])
def test_many_problems(engine, count, capsys):
    if engine == "cpu":
        pytest.importorskip("numba")
    table, found = Counter(), []
    for dtype in TOLERANCES:
        found += faults(engine, dtype, count // 2, 0, table)
    with capsys.disabled():
        sys.stdout.write(f"\n{shown(table)}\n")
    assert found == []
