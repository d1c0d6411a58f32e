"""Newton's method along the path of epsilon: few steps, honest ends, the same answers as the iteration and exact transport."""

import math

import numpy as np
import ot
import pytest
import torch
from oracles import random_weights, two_by_two
from torch import Tensor

from sinkformer import ops, semidual
from sinkformer._numerics import safe_log

F64 = torch.float64
FORBIDDEN = 1e30
ENOUGH = 10_000  # steps: more than any problem here takes


def error(cost: Tensor, a: Tensor, b: Tensor, epsilon: Tensor, g: Tensor) -> Tensor:
    """L1 violation of the target marginal after an exact update of f, written out."""
    weight = torch.where(b > 0, b, 0.0).unsqueeze(-2)
    exponent = ((g.unsqueeze(-2) - cost) / epsilon.view(-1, 1, 1)).masked_fill(weight == 0, -math.inf)
    kernel = weight * (exponent - exponent.amax(-1, keepdim=True)).exp()
    plan = a.unsqueeze(-1) * kernel / kernel.sum(-1, keepdim=True)
    return (plan.sum(-2) - b).abs().sum(-1)


def dual(cost: Tensor, a: Tensor, b: Tensor, epsilon: Tensor, g: Tensor) -> Tensor:
    f = torch.where(a > 0, ops.softmin(cost, g, safe_log(b), epsilon), 0.0)
    return (a * f).sum(-1) + (b * g).sum(-1)


def plan_of(cost: Tensor, a: Tensor, b: Tensor, epsilon: Tensor, g: Tensor) -> Tensor:
    return ops.plan(cost, ops.softmin(cost, g, safe_log(b), epsilon), g, a, b, epsilon)


def sweep(cost: Tensor, a: Tensor, b: Tensor, epsilon: Tensor, g: Tensor, sweeps: int) -> Tensor:
    """The log-domain loop, sweeps at epsilon itself."""
    for _ in range(sweeps):
        f = ops.softmin(cost, g, safe_log(b), epsilon)
        g = ops.softmin(cost.mT, f, safe_log(a), epsilon)
    return g


def batch(size: int, n: int, m: int, ratio: float, seed: int = 0, family: str = "gaussian"):
    """cost, a, b, epsilon of random problems, epsilon a fraction of the range of the cost."""
    generator = torch.Generator().manual_seed(seed)
    if family == "gaussian":
        cost = torch.randn(size, n, m, generator=generator, dtype=F64)
    else:
        x, y = (torch.rand(size, k, 3, generator=generator, dtype=F64) for k in (n, m))
        cost = torch.cdist(x, y) ** 2
    a, b = random_weights(size, n, generator=generator), random_weights(size, m, generator=generator)
    return cost, a, b, ratio * (cost.amax((-1, -2)) - cost.amin((-1, -2)))


def start(b: Tensor) -> Tensor:
    return torch.zeros_like(b)


# How many steps


def two_by_two_batch(ratio: float, seed: int):
    """Every pairing of ordinary, extreme and nearly degenerate weights with ordinary, tied and negative costs."""
    generator = torch.Generator().manual_seed(seed)
    u = float(torch.rand((), generator=generator, dtype=F64))
    weights = [(0.5, 0.5), (0.5, 0.5 + 1e-9), (u, u), (u, 1 - u), (u, u + 1e-9 * (1 - u)), (1e-6, u), (1e-6, 1 - 1e-6)]
    weights += [(1 - 1e-6, 0.5), (1e-12, u), (u, 0.3)]
    costs = [[[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 1.0]], [[-5.0, -7.0], [-6.0, -5.5]]]
    costs += torch.randn(4, 2, 2, generator=generator, dtype=F64).tolist()
    pairs = [(p, c) for p in weights for c in costs]
    a, b = (torch.tensor([[p[k], 1 - p[k]] for p, _ in pairs], dtype=F64) for k in (0, 1))
    cost = torch.tensor([c for _, c in pairs], dtype=F64)
    return cost, a, b, ratio * (cost.amax((-1, -2)) - cost.amin((-1, -2)))


@pytest.mark.parametrize("ratio", [10.0, 1.0, 0.1, 0.03, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8, 1e-10, 1e-12])
def test_two_by_two_takes_fewer_than_fifty_steps(ratio):
    cost, a, b, epsilon = (torch.cat(pair) for pair in zip(*(two_by_two_batch(ratio, k) for k in (0, 1)), strict=True))
    first, tolerance = semidual.sweeps_first(2, 2), 1e-9
    for begin, spent in ((start(b), 0), (sweep(cost, a, b, epsilon, start(b), first), first)):
        g, steps, solved = semidual.rescue(cost, a, b, epsilon, begin, tolerance, ENOUGH)
        assert spent + int(steps.max()) < 50
        reached = error(cost, a, b, epsilon, g)
        # Potentials are float64: of a cost of 1 at epsilon 1e-12, only so many digits are left in the exponent.
        rounding = 4 * torch.finfo(F64).eps * torch.maximum(cost.abs().amax((-1, -2)), g.abs().amax(-1)) / epsilon
        assert bool((reached <= tolerance + rounding).all())
        assert bool(solved[rounding < 0.1 * tolerance].all())


def test_two_by_two_is_the_closed_form():
    for ratio in (3.0, 1e-2):
        cost, a, b, epsilon = two_by_two_batch(ratio, 7)
        g, _, solved = semidual.rescue(cost, a, b, epsilon, start(b), 1e-12, ENOUGH)
        assert bool(solved.all())
        plan = plan_of(cost, a, b, epsilon, g)
        for k in range(len(a)):
            expected = two_by_two(a[k], b[k], cost[k], float(epsilon[k]))
            torch.testing.assert_close(plan[k], expected, atol=1e-10, rtol=0)


def test_sweeps_first_grows_with_the_smaller_side():
    assert semidual.sweeps_first(2, 2) == semidual.sweeps_first(500, 2) == semidual.sweeps_first(1, 1) == 16
    assert 1000 <= semidual.sweeps_first(64, 64) <= 1500
    assert semidual.sweeps_first(4000, 4000) == 1500


@pytest.mark.parametrize("family", ["gaussian", "squared"])
@pytest.mark.parametrize(("ratio", "most"), [(1e-2, 20), (1e-3, 30), (1e-4, 40), (1e-6, 60)])
def test_small_epsilon_takes_few_steps(family, ratio, most):
    cost, a, b, epsilon = batch(16, 24, 20, ratio, family=family)
    g, steps, solved = semidual.rescue(cost, a, b, epsilon, start(b), 1e-8, ENOUGH)
    assert bool(solved.all())
    assert int(steps.max()) <= most
    assert float(error(cost, a, b, epsilon, g).max()) <= 1e-8


def test_most_is_a_limit_for_each_problem():
    cost, a, b, epsilon = batch(5, 20, 20, 1e-4)
    most = torch.tensor([0, 1, 2, 7, ENOUGH])
    g, steps, solved = semidual.rescue(cost, a, b, epsilon, start(b), 1e-8, most)
    assert bool((steps <= most).all())
    assert solved.tolist() == [False, False, False, False, True]
    assert torch.equal(g[0], start(b)[0])
    again, fewer, _ = semidual.rescue(cost, a, b, epsilon, start(b), 1e-8, 7)
    assert int(fewer.max()) == 7
    torch.testing.assert_close(again[3], g[3])


def test_a_solved_start_costs_nothing():
    cost, a, b, epsilon = batch(4, 9, 7, 1e-3)
    g, _, _ = semidual.rescue(cost, a, b, epsilon, start(b), 1e-10, ENOUGH)
    same, steps, solved = semidual.rescue(cost, a, b, epsilon, g, 1e-8, ENOUGH)
    assert bool(solved.all())
    assert not bool(steps.any())
    torch.testing.assert_close(same, g, rtol=1e-12, atol=1e-12)


def test_a_near_start_is_used():
    cost, a, b, epsilon = batch(8, 12, 12, 1e-2)
    g, _, _ = semidual.rescue(cost, a, b, epsilon, start(b), 1e-10, ENOUGH)
    near = g + 0.3 * epsilon.unsqueeze(-1) * torch.rand(g.shape, generator=torch.Generator().manual_seed(0), dtype=F64)
    _, warm, _ = semidual.rescue(cost, a, b, epsilon, near, 1e-10, ENOUGH)
    _, cold, _ = semidual.rescue(cost, a, b, epsilon, start(b), 1e-10, ENOUGH)
    assert int(warm.max()) <= 5 < int(cold.min())


# Right answers


def test_agrees_with_the_loop():
    cost, a, b, epsilon = batch(6, 8, 11, 0.1)
    g, _, solved = semidual.rescue(cost, a, b, epsilon, start(b), 1e-12, ENOUGH)
    looped = sweep(cost, a, b, epsilon, start(b), 1500)
    assert bool(solved.all())
    assert float(error(cost, a, b, epsilon, looped).max()) < 1e-11
    torch.testing.assert_close(g - g[:, :1], looped - looped[:, :1], atol=1e-9, rtol=0)


@pytest.mark.parametrize("ratio", [1e-4, 1e-6])
def test_small_epsilon_is_exact_transport(ratio):
    cost, a, b, epsilon = batch(12, 17, 13, ratio, seed=3, family="squared")
    g, _, solved = semidual.rescue(cost, a, b, epsilon, start(b), 1e-9, ENOUGH)
    value = dual(cost, a, b, epsilon, g)
    assert bool(solved.all())
    for k in range(len(a)):
        exact = float(np.sum(ot.emd(a[k].numpy(), b[k].numpy(), cost[k].numpy()) * cost[k].numpy()))
        # The entropy relative to a (x) b is between 0 and log(n m).
        assert exact - 1e-9 <= float(value[k]) <= exact + float(epsilon[k]) * math.log(17 * 13) + 1e-9


@pytest.mark.parametrize("n", [2, 5, 30])
def test_assignment(n):
    """Uniform weights: at small epsilon the plan is a permutation, its parts connected by nothing that rounding leaves."""
    cost, _, _, epsilon = batch(8, n, n, 1e-5, seed=n)
    a = b = torch.full((8, n), 1 / n, dtype=F64)
    g, steps, solved = semidual.rescue(cost, a, b, epsilon, start(b), 1e-9, ENOUGH)
    assert bool(solved.all())
    assert int(steps.max()) <= 50
    for k in range(8):
        exact = ot.emd(a[k].numpy(), b[k].numpy(), cost[k].numpy())
        np.testing.assert_allclose(plan_of(cost, a, b, epsilon, g)[k].numpy(), exact, atol=1e-8)


def test_weights_of_twelve_orders_of_magnitude():
    cost, a, b, epsilon = batch(16, 20, 15, 1e-4, seed=5)
    generator = torch.Generator().manual_seed(5)
    a, b = (10 ** (-12 * torch.rand(w.shape, generator=generator, dtype=F64)) for w in (a, b))
    a, b = a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)
    g, _, solved = semidual.rescue(cost, a, b, epsilon, start(b), 1e-9, ENOUGH)
    assert bool(solved.all())
    assert float(error(cost, a, b, epsilon, g).max()) <= 1e-9


@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (6, 1)])
def test_one_atom(shape):
    cost, a, b, epsilon = batch(3, *shape, 1e-3)
    epsilon = epsilon.clamp_min(1e-3)
    g, _, solved = semidual.rescue(cost, a, b, epsilon, start(b), 1e-10, ENOUGH)
    assert bool(solved.all())
    torch.testing.assert_close(plan_of(cost, a, b, epsilon, g), a.unsqueeze(-1) * b.unsqueeze(-2), atol=1e-9, rtol=0)


# Laws


def test_wide_is_tall_transposed():
    cost, a, b, epsilon = batch(6, 6, 25, 1e-3, seed=1)
    g, steps, solved = semidual.rescue(cost, a, b, epsilon, start(b), 1e-9, ENOUGH)
    turned, other, both = semidual.rescue(cost.mT, b, a, epsilon, start(a), 1e-9, ENOUGH)
    assert bool((solved & both).all())
    assert float(error(cost, a, b, epsilon, g).max()) <= 1e-9
    assert int(steps.max()) <= 40
    assert int(other.max()) <= 40
    there = plan_of(cost.mT, b, a, epsilon, turned)
    torch.testing.assert_close(plan_of(cost, a, b, epsilon, g), there.mT, atol=1e-8, rtol=0)


def ragged():
    """Problems of 2 to 40 atoms, wide and tall, at different epsilons, padded in front, behind and in between."""
    shapes = [(3, 3), (40, 5), (5, 40), (20, 33), (33, 20), (2, 2), (40, 40)]
    singles, generator = [], torch.Generator().manual_seed(11)
    cost, a, b = torch.zeros(7, 44, 44, dtype=F64), torch.zeros(7, 44, dtype=F64), torch.zeros(7, 44, dtype=F64)
    epsilon = torch.zeros(7, dtype=F64)
    for k, (n, m) in enumerate(shapes):
        single = batch(1, n, m, 10.0 ** -(k % 5), seed=k)
        i, j = (torch.randperm(44, generator=generator)[:size].sort().values for size in (n, m))
        cost[k] = torch.randn(44, 44, generator=generator, dtype=F64)
        cost[k][i.unsqueeze(-1), j] = single[0][0]
        a[k, i], b[k, j], epsilon[k] = single[1][0], single[2][0], single[3][0]
        singles.append((single, j))
    return cost, a, b, epsilon, singles


def test_batch_is_a_loop_and_padding_is_nothing():
    cost, a, b, epsilon, singles = ragged()
    begin = torch.full_like(b, 0.25)
    g, steps, solved = semidual.rescue(cost, a, b, epsilon, begin, 1e-9, ENOUGH)
    assert bool(solved.all())
    assert torch.equal(g[b == 0], begin[b == 0])
    for k, (single, j) in enumerate(singles):
        alone, count, done = semidual.rescue(*single, torch.full_like(single[2], 0.25), 1e-9, ENOUGH)
        assert bool(done.all())
        assert abs(int(count) - int(steps[k])) <= 1  # sums of another length round otherwise
        difference = g[k, j] - alone[0]
        assert float(difference.amax() - difference.amin()) <= 1e-7 * float(epsilon[k])


def test_memory_is_bounded(monkeypatch):
    cost, a, b, epsilon, _ = ragged()
    whole = semidual.rescue(cost, a, b, epsilon, start(b), 1e-9, ENOUGH)
    monkeypatch.setattr(semidual, "_ENTRIES", 1)
    held = []
    directions = semidual._directions
    monkeypatch.setattr(semidual, "_directions", lambda p, x: held.append(len(p.b)) or directions(p, x))
    parts = semidual.rescue(cost, a, b, epsilon, start(b), 1e-9, ENOUGH)
    assert set(held) == {1}
    torch.testing.assert_close(parts[0], whole[0], atol=1e-9, rtol=0)
    assert torch.equal(parts[2], whole[2])


@pytest.mark.parametrize("ratio", [1e-1, 1e-3, 1e-5])
@pytest.mark.parametrize("most", [1, 3, 6, 12])
def test_never_below_the_start(ratio, most):
    cost, a, b, epsilon = batch(24, 12, 15, ratio, seed=2)
    begin = sweep(cost, a, b, epsilon, start(b), 5)
    g, _, solved = semidual.rescue(cost, a, b, epsilon, begin, 1e-12, most)
    gain = dual(cost, a, b, epsilon, g) - dual(cost, a, b, epsilon, begin)
    assert float(gain.min()) >= -1e-13
    assert bool((gain > 0).any())
    assert bool(solved.all()) is (ratio == 0.1 and most > 1)


def test_cost_shifts_change_nothing():
    cost, a, b, epsilon = batch(6, 9, 9, 1e-2)
    shift = torch.randn(6, 9, 1, generator=torch.Generator().manual_seed(0), dtype=F64)
    g, _, _ = semidual.rescue(cost, a, b, epsilon, start(b), 1e-11, ENOUGH)
    other, _, solved = semidual.rescue(cost + 100 * shift, a, b, epsilon, start(b), 1e-11, ENOUGH)
    assert bool(solved.all())
    torch.testing.assert_close(other - other[:, :1], g - g[:, :1], atol=1e-8, rtol=0)


# Masks, and ends without a solution


def test_masks_that_leave_it_feasible():
    cost, a, b, epsilon = batch(8, 14, 10, 1e-3)
    coupling = a.unsqueeze(-1) * b.unsqueeze(-2)
    forbidden = torch.rand(coupling.shape, generator=torch.Generator().manual_seed(4)) < 0.6
    forbidden[:, 0] = forbidden[..., 0] = False
    coupling = coupling.masked_fill(forbidden, 0.0)
    a, b = coupling.sum(-1), coupling.sum(-2)
    total = a.sum(-1, keepdim=True)
    a, b = a / total, b / total
    cost = cost.masked_fill(forbidden, FORBIDDEN)
    g, steps, solved = semidual.rescue(cost, a, b, epsilon, start(b), 1e-9, ENOUGH)
    assert bool(solved.all())
    assert int(steps.max()) <= 50
    assert not bool(plan_of(cost, a, b, epsilon, g)[forbidden].any())


def test_a_triangular_mask_leaves_one_coupling():
    """Feasible at the identity only, where the potentials are infinite; the violation still falls below any tolerance."""
    cost, _, _, epsilon = batch(3, 12, 12, 0.1)
    a = b = torch.full((3, 12), 1 / 12, dtype=F64)
    cost = cost.masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), FORBIDDEN)
    g, _, solved = semidual.rescue(cost, a, b, epsilon, start(b), 1e-6, ENOUGH)
    assert bool(solved.all())
    torch.testing.assert_close(plan_of(cost, a, b, epsilon, g), torch.diag_embed(a), atol=2e-6, rtol=0)


@pytest.mark.parametrize("ratio", [1.0, 1e-2, 1e-5])
def test_infeasible_masks_end_unsolved_and_finite(ratio):
    cost, a, b, epsilon = batch(5, 6, 8, ratio)
    cost[0, 0] = FORBIDDEN  # an atom without partner
    cost[1, :, 3] = FORBIDDEN
    cost[2, :3, 4:] = cost[2, 3:, :4] = FORBIDDEN  # two parts of different mass
    cost[3] = FORBIDDEN
    g, steps, solved = semidual.rescue(cost, a, b, epsilon, start(b), 1e-9, ENOUGH)
    assert bool(torch.isfinite(g).all())
    assert solved.tolist() == [False, False, False, False, True]
    assert int(steps.max()) <= 200
    assert float(g.abs().max()) < 1e29


@pytest.mark.parametrize("ratio", [1e-14, 1e-18, 1e-30])
def test_below_the_rounding_of_the_cost_it_ends(ratio):
    cost, a, b, epsilon = batch(10, 15, 12, ratio)
    g, steps, solved = semidual.rescue(cost, a, b, epsilon, start(b), 1e-9, ENOUGH)
    assert bool(torch.isfinite(g).all())
    assert int(steps.max()) <= 200
    assert bool((solved == (error(cost, a, b, epsilon, g) <= 1e-9)).all())


def test_zero_tolerance_ends():
    cost, a, b, epsilon = batch(4, 10, 10, 1e-2)
    g, steps, _ = semidual.rescue(cost, a, b, epsilon, start(b), 0.0, ENOUGH)
    assert int(steps.max()) <= 60
    assert float(error(cost, a, b, epsilon, g).max()) <= 1e-13


def test_too_many_atoms_are_left_alone(monkeypatch):
    monkeypatch.setattr(semidual, "MOST_ATOMS", 5)
    for n, m, expected in ((6, 6, False), (6, 5, True), (5, 6, True)):
        cost, a, b, epsilon = batch(2, n, m, 1e-2)
        g, steps, solved = semidual.rescue(cost, a, b, epsilon, start(b) + 1, 1e-9, ENOUGH)
        assert bool(solved.all()) is bool(solved.any()) is expected
        assert bool((g == 1).all()) is not expected
        assert bool(steps.any()) is expected


def test_empty_batch():
    g, steps, solved = semidual.rescue(*batch(0, 3, 4, 1.0), torch.zeros(0, 4, dtype=F64), 1e-9, 5)
    assert g.shape == (0, 4)
    assert steps.shape == solved.shape == (0,)
