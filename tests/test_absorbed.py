"""The loop on an absorbed kernel against the loop in the log domain: the same solutions, in fewer sweeps."""

import pytest
import torch
from oracles import random_weights, tensor
from torch import Tensor

from sinkformer import absorbed, semidual
from sinkformer.relaxation import Relaxation
from sinkformer.sweeps import Engine, Loop

DOUBLE, SINGLE = torch.float64, torch.float32
INF = float("inf")


def solve(
    cost: Tensor,
    a: Tensor,
    b: Tensor,
    epsilon,
    tolerance: float,
    taus=(1.0, 1.0),
    engine: Engine = "absorbed",
    work=DOUBLE,
    most: int = 5000,
    init=None,
):
    """``(f, g, iterations)`` of a flat batch."""
    scale = torch.as_tensor(epsilon, dtype=DOUBLE).expand(len(cost))
    loop = Loop.prepare(cost, a, b, scale, taus, work, 0.7, False, engine)
    return loop.run(tolerance, most, init)


def plan(cost: Tensor, a: Tensor, b: Tensor, epsilon, f: Tensor, g: Tensor) -> Tensor:
    scale = torch.as_tensor(epsilon, dtype=DOUBLE).expand(len(cost)).view(-1, 1, 1)
    exponents = (f.unsqueeze(-1) + g.unsqueeze(-2) - cost) / scale
    return a.unsqueeze(-1) * b.unsqueeze(-2) * exponents.exp()


def violation(p: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (p.sum(-1) - a).abs().sum(-1) + (p.sum(-2) - b).abs().sum(-1)


def problems(count: int = 8, n: int = 13, m: int = 17, padded: bool = False, seed: int = 0):
    """Squared distances in the plane, weights over an order of magnitude; padding anywhere."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.rand(count, k, 2, generator=generator, dtype=DOUBLE) for k in (n, m))
    a, b = (random_weights(count, k, generator=generator) for k in (n, m))
    if padded:
        for w in (a, b):
            w[torch.rand(w.shape, generator=generator) < 0.3] = 0.0
            w[:, 0] += 0.1
            w /= w.sum(-1, keepdim=True)
    return torch.cdist(x, y).square(), a, b


@pytest.mark.parametrize("epsilon", [0.3, 0.03, 0.003])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("work", "tolerance", "close"), [(SINGLE, 5e-7, 1e-6), (DOUBLE, 1e-11, 1e-9)])
def test_it_finds_the_couplings_of_the_log_domain(epsilon, padded, work, tolerance, close):
    cost, a, b = problems(padded=padded)
    if work == SINGLE:
        tolerance, close = max(tolerance, 2e-7 / epsilon), max(close, 2e-5 / epsilon)
    one = plan(cost, a, b, epsilon, *solve(cost, a, b, epsilon, tolerance, work=work)[:2])
    two = plan(cost, a, b, epsilon, *solve(cost, a, b, epsilon, 1e-12, engine="reference")[:2])
    assert float((one - two).abs().sum((-1, -2)).max()) < close


TAUS = [(0.5, 0.5), (0.9, 0.2), (1.0, 0.7), (0.7, 1.0), (0.999, 0.999)]


@pytest.mark.parametrize("taus", TAUS)
@pytest.mark.parametrize("padded", [False, True])
def test_it_finds_the_penalised_plans_of_the_log_domain(taus, padded):
    cost, a, b = problems(padded=padded)
    for epsilon in (0.3, 0.02):
        one = solve(cost, a, b, epsilon, 1e-11, taus)
        two = solve(cost, a, b, epsilon, 1e-12, taus, "reference")
        torch.testing.assert_close(one[0], two[0], rtol=0, atol=1e-9)
        torch.testing.assert_close(one[1], two[1], rtol=0, atol=1e-9)


def count_absorptions(monkeypatch) -> list[int]:
    counts, absorb = [], absorbed._Stage._absorb
    monkeypatch.setattr(
        absorbed._Stage, "_absorb", lambda self, which: (counts.append(len(which)), absorb(self, which))
    )
    return counts


@pytest.mark.parametrize("work", [SINGLE, DOUBLE])
def test_kernels_are_absorbed_as_often_as_needed(work, monkeypatch):
    # POT's disagreement of solvers: epsilon .01, rho 100.
    counts = count_absorptions(monkeypatch)
    monkeypatch.setattr(absorbed, "_SPREAD", {SINGLE: (2.0, 2.0), DOUBLE: (2.0, 2.0)})
    a, b, cost = tensor([0.3, 0.7]), tensor([0.7, 0.3]), tensor([[0.0, 1.0], [1.0, 0.0]])
    tau = 100 / (100 + 0.01)
    one = solve(cost, a, b, 0.01, 1e-10 if work == DOUBLE else 1e-5, (tau, tau), work=work)
    two = solve(cost, a, b, 0.01, 1e-12, (tau, tau), "reference")
    assert len(counts) > 2
    p, q = (plan(cost, a, b, 0.01, *x[:2]) for x in (one, two))
    torch.testing.assert_close(p, q, rtol=0, atol=1e-9 if work == DOUBLE else 1e-5)


def test_absorption_in_a_batch_changes_nothing_but_rounding(monkeypatch):
    cost, a, b = problems(padded=True)
    epsilon = torch.logspace(-3, 0, len(cost), dtype=DOUBLE)
    usual = solve(cost, a, b, epsilon, 1e-11)
    counts = count_absorptions(monkeypatch)
    monkeypatch.setattr(absorbed, "_SPREAD", {DOUBLE: (0.5, 0.5)})
    often = solve(cost, a, b, epsilon, 1e-11)
    assert len(counts) > 3
    torch.testing.assert_close(
        plan(cost, a, b, epsilon, *often[:2]), plan(cost, a, b, epsilon, *usual[:2]), rtol=0, atol=1e-9
    )


def test_sums_out_of_range_go_on_in_the_log_domain():
    cost, a, b = problems(4)
    # From this start every entry of every kernel underflows.
    f, g = torch.zeros_like(a), torch.linspace(0, -4, 17, dtype=DOUBLE).expand(4, -1) * 100
    given = absorbed.Problems(cost, a, b, torch.full((4,), 1e-3, dtype=DOUBLE), (1.0, 1.0), False, None, SINGLE)
    swept = absorbed.sweep(given, f, g, Relaxation.start(4), 1e-4, torch.full((4,), 100))
    assert bool(swept.lost.any())
    assert not bool((swept.lost & swept.done).any())
    assert bool(torch.isfinite(swept.f).all() and torch.isfinite(swept.g).all())
    f, g, _ = solve(cost, a, b, 1e-3, 1e-4, work=SINGLE, init=(f, g))
    assert float(violation(plan(cost, a, b, 1e-3, f, g), a, b).max()) < 1e-4


def test_relaxation_saves_sweeps(monkeypatch):
    cost, a, b = problems()
    monkeypatch.setattr(semidual, "sweeps_first", lambda n, m: 5000)
    fast = solve(cost, a, b, 0.005, 1e-6)[2]
    slow = solve(cost, a, b, 0.005, 1e-6, engine="reference")[2]
    assert float(fast.double().mean()) < 0.3 * float(slow.double().mean())


@pytest.mark.parametrize("work", [SINGLE, DOUBLE])
def test_a_batch_is_solved_like_its_problems(work):
    cost, a, b = problems(padded=True)
    epsilon = torch.logspace(-2.5, 0, len(cost), dtype=DOUBLE)
    tolerance = 1e-4 if work == SINGLE else 1e-9
    f, g, iterations = solve(cost, a, b, epsilon, tolerance, work=work)
    for k in range(len(cost)):
        here = slice(k, k + 1)
        one = solve(cost[here], a[here], b[here], epsilon[here], tolerance, work=work)
        live = a[k] > 0, b[k] > 0
        if work == DOUBLE:
            assert one[2] == iterations[here]
            short = solve(
                cost[here][:, live[0]][:, :, live[1]],
                a[here][:, live[0]],
                b[here][:, live[1]],
                epsilon[here],
                tolerance,
            )
            assert short[2] == iterations[here]
        p, q = (plan(cost[here], a[here], b[here], epsilon[here], *x) for x in ((f[here], g[here]), one[:2]))
        torch.testing.assert_close(p, q, rtol=0, atol=1e-10 if work == DOUBLE else 2e-4)


def test_potentials_at_padding_are_updates_of_the_others():
    cost, a, b = problems(padded=True)
    f, g, _ = solve(cost, a, b, 0.1, 1e-11)
    p = torch.exp((f.unsqueeze(-1) + g.unsqueeze(-2) - cost) / 0.1)
    torch.testing.assert_close((p * b.unsqueeze(-2)).sum(-1), torch.ones_like(a), rtol=0, atol=1e-9)
    assert bool((((p * a.unsqueeze(-1)).sum(-2) - 1).abs()[b == 0] < 1e-9).all())


@pytest.mark.parametrize("taus", [(1.0, 1.0), (0.8, 0.8)])
@pytest.mark.parametrize("epsilon", [1.0, 0.05, 1e-3])
def test_a_symmetric_problem_has_one_potential(taus, epsilon):
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(3, 12, 2, generator=generator, dtype=DOUBLE)
    a, cost = random_weights(3, 12, generator=generator), torch.cdist(x, x).square()
    f, g, iterations = solve(cost, a, a, epsilon, 1e-10, taus)
    assert torch.equal(f, g)
    assert int(iterations.max()) < 60
    two = solve(cost, a, a, epsilon, 1e-10, taus, "reference")
    torch.testing.assert_close(f, two[0], rtol=0, atol=1e-8)


def test_symmetric_and_other_problems_share_a_batch():
    cost, a, b = problems(2, 9, 9)
    cost[0], b[0] = cost[0] + cost[0].T, a[0]
    f, g, _ = solve(cost, a, b, 0.05, 1e-10)
    assert torch.equal(f[0], g[0])
    assert float(violation(plan(cost, a, b, 0.05, f, g), a, b).max()) < 1e-9


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
@pytest.mark.parametrize(("work", "tolerance"), [(SINGLE, 1e-4), (DOUBLE, 1e-10)])
def test_the_accuracy_of_each_dtype(work, tolerance, shift):
    cost, a, b = problems()
    moved = cost + shift
    f, g, _ = solve(moved, a, b, 0.02, tolerance, work=work)
    assert float(violation(plan(moved, a, b, 0.02, f, g), a, b).max()) <= 1.1 * tolerance + abs(shift) * 1e-14


@pytest.mark.parametrize("epsilon", [1.0, 1e-2, 1e-4, 1e-6, 1e-9])
@pytest.mark.parametrize("work", [SINGLE, DOUBLE])
def test_two_by_two_takes_few_steps(epsilon, work):
    a, b, cost = tensor([0.5, 0.5]), tensor([0.3, 0.7]), tensor([[0.0, 1.0], [1.0, 0.0]])
    tolerance = max(1e-4 if work == SINGLE else 1e-9, 1e-15 / epsilon)
    f, g, iterations = solve(cost, a, b, epsilon, tolerance, work=work)
    assert int(iterations) < 50
    assert float(violation(plan(cost, a, b, epsilon, f, g), a, b)) < 2 * tolerance + 1e-15 / epsilon


@pytest.mark.parametrize("engine", ["absorbed", "reference"])
@pytest.mark.parametrize("rho", [(1e3, 1e3), (INF, 1e3), (1e3, INF), (1e5, 1.0)])
def test_strong_penalties_are_no_slower_than_constraints(engine, rho):
    cost, a, b = problems()
    taus = tuple(1.0 if r == INF else r / (r + 0.1) for r in rho)
    f, g, iterations = solve(cost, a, b, 0.1, 1e-8, (taus[0], taus[1]), engine)
    assert int(iterations.max()) < 300
    p = plan(cost, a, b, 0.1, f, g)
    for have, want, h, r in ((p.sum(-1), a, f, rho[0]), (p.sum(-2), b, g, rho[1])):
        torch.testing.assert_close(have, want * torch.exp(-h / r), rtol=0, atol=1e-7)


def test_forbidden_pairs_and_atoms_without_any():
    cost, a, b = problems(3)
    cost[0, 2, :5], cost[1, 4], cost[2, :, 3] = INF, INF, INF
    for engine in ("absorbed", "reference"):
        f, g, _ = solve(cost, a, b, 0.1, 1e-10, (0.8, 0.8), engine)
        assert bool(torch.isfinite(f).all() and torch.isfinite(g).all())
        p = plan(cost, a, b, 0.1, f, g).nan_to_num(0.0)
        assert float(p[1, 4].sum()) == 0
        for have, want, h in ((p.sum(-1), a, f), (p.sum(-2), b, g)):
            torch.testing.assert_close(have, want * torch.exp(-h / 0.4), rtol=0, atol=1e-9)
    # As couplings the second and the third do not exist: no claim, no NaN, no endless loop.
    f, g, iterations = solve(cost, a, b, 0.1, 1e-10)
    assert bool(torch.isfinite(f).all() and torch.isfinite(g).all())
    assert int(iterations[1:].max()) <= 60
    assert float(violation(plan(cost, a, b, 0.1, f, g), a, b)[0]) < 1e-9


@pytest.mark.parametrize("limit", [1, 2, 7, 23])
def test_the_limit_is_kept_exactly(limit):
    cost, a, b = problems()
    assert solve(cost, a, b, 1e-3, -1.0, most=limit)[2].tolist() == [limit] * 8


def test_a_start_from_the_solution_is_the_solution():
    cost, a, b = problems()
    f, g, _ = solve(cost, a, b, 0.02, 1e-11)
    again = solve(cost, a, b, 0.02, 1e-9, init=(f, g))
    assert again[2].tolist() == [1] * 8
    torch.testing.assert_close(again[0], f, rtol=0, atol=1e-9)


def test_an_empty_batch_is_swept():
    cost, a, b = problems()
    none = torch.zeros(0, dtype=torch.int64)
    f, g, iterations = solve(cost[none], a[none], b[none], 0.1, 1e-9)
    assert (len(f), len(g), len(iterations)) == (0, 0, 0)
