"""The step that is relaxed, and the rules that choose how much."""

import math

import numpy as np
import pytest
import torch

from sinkformer.relaxation import Relaxation, relaxed

DOUBLE = torch.float64


def factor(x, t: float) -> torch.Tensor:
    """What the scaling is multiplied with where the plain update would multiply it with x."""
    x = torch.as_tensor(x, dtype=DOUBLE)
    one = torch.ones_like(x)
    return relaxed(one, one / x, one, torch.tensor(t, dtype=DOUBLE))


@pytest.mark.parametrize("t", [0.0, 0.3, 0.9, 0.97])
def test_the_step_is_positive_increasing_and_the_same_in_both_directions(t):
    x = torch.logspace(-200, 200, 4001, dtype=DOUBLE)
    step = factor(x, t)
    assert bool((step > 0).all() and torch.isfinite(step).all())
    assert bool((step.diff() > 0).all())
    torch.testing.assert_close(step * step.flip(0), torch.ones_like(step), rtol=1e-12, atol=0)


@pytest.mark.parametrize("t", [0.2, 0.7, 0.97])
def test_the_step_is_the_power_to_third_order(t):
    errors = [abs(float(factor(math.exp(h), t)) - math.exp((1 + t) * h)) for h in (0.02, 0.01)]
    assert errors[0] / errors[1] == pytest.approx(8, rel=0.05)


def test_without_relaxation_the_step_is_plain():
    u, r, a = (torch.rand(5, dtype=DOUBLE) for _ in range(3))
    torch.testing.assert_close(relaxed(u, r, a, 0.0), a / r, rtol=1e-14, atol=0)


def optimum(lam: float) -> float:
    root = math.sqrt(1 - lam)
    return (1 - root) / (1 + root)


def linear_error(lam: float, memory: Relaxation, checks: int, every: int = 10, error: float = 1.0) -> list[float]:
    """Error at every check of a linear two-block problem with one slow mode, relaxed as ``memory`` says."""
    x, y, errors = error, error, [error]
    memory.update(np.array([error]), 0, np.array([lam]))
    for _ in range(checks):
        t = float(memory.t[0])
        for _ in range(every):
            x = -t * x + (1 + t) * math.sqrt(lam) * y
            y = -t * y + (1 + t) * math.sqrt(lam) * x
        errors.append(abs(x) + abs(y))
        memory.update(np.array([errors[-1]]), every, np.array([lam]))
    return errors


@pytest.mark.parametrize("lam", [0.5, 0.9, 0.99, 0.999])
def test_the_best_relaxation_is_found_and_pays(lam):
    memory = Relaxation.start(1)
    errors = linear_error(lam, memory, 40, error=0.04)
    plain = 0.04 * lam**400
    assert errors[-1] < max(1e-2 * plain, 1e-14)
    if lam > 0.9:
        # Fewer sweeps by about the square root.
        sweeps = 10 * next(k for k, e in enumerate(errors) if e < 4e-6)
        assert sweeps < 0.35 * math.log(1e-4) / math.log(lam)


def test_an_estimate_that_is_too_low_is_corrected_by_the_rate():
    memory = Relaxation.start(1)
    memory.t, memory.gap = np.array([optimum(0.8)]), np.array([0.2])
    linear_error(0.999, memory, 30, error=0.04)
    assert memory.t[0] > optimum(0.99)


def test_no_relaxation_far_from_the_solution_nor_where_it_is_not_worth_it():
    memory = Relaxation.start(3)
    memory.update(np.array([0.9, 0.2, 0.2]), 10, np.array([0.99, 0.2, 0.99]))
    assert memory.t.tolist()[:2] == [0.0, 0.0]
    assert memory.t[2] == pytest.approx(optimum(0.9)), "a first estimate is cautious while the error is large"


def test_divergence_falls_back_to_plain_sweeps_and_to_a_larger_gap():
    memory = Relaxation.start(1)
    memory.update(np.array([0.04]), 10, np.array([0.99]))
    assert memory.t[0] > 0
    gap = memory.gap.copy()
    memory.update(np.array([0.1]), 10, np.array([0.99]))
    assert memory.t[0] > 0, "a hump after switching on is no divergence"
    memory.update(np.array([1.0]), 10, np.array([0.99]))
    assert memory.t[0] == 0
    memory.update(np.array([0.04]), 10, np.array([0.999]))
    assert memory.gap[0] >= 2 * gap[0]


def test_a_circle_far_from_the_solution_is_left():
    memory = Relaxation.start(1)
    taken = [float(memory.update(np.array([0.3 + 0.01 * (k % 2)]), 10, np.array([0.99]))[0]) for k in range(60)]
    assert max(taken) > 0
    assert taken.count(0.0) > 10
    assert memory.cap[0] < 0.9, "every time a little less"
    memory.update(np.array([0.01]), 10, np.array([0.5]))
    assert memory.cap[0] == pytest.approx(0.97)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_errors_relaxation_stays_in_its_bounds(seed):
    random = np.random.default_rng(seed)
    memory = Relaxation.start(50)
    for _ in range(200):
        error = 10 ** random.uniform(-17, 1, 50)
        error[random.random(50) < 0.1] = 0.0
        error[random.random(50) < 0.05] = np.nan
        error[random.random(50) < 0.05] = np.inf
        t = memory.update(error, int(random.integers(0, 20)), random.uniform(-0.1, 1.5, 50))
        assert ((t >= 0) & (t <= 0.97)).all()
        assert ((memory.gap >= 0) & (memory.gap <= 1)).all()


def test_problems_do_not_see_each_other():
    random = np.random.default_rng(0)
    errors, quotients = 10 ** random.uniform(-4, 0, (30, 6)), random.uniform(0, 1, (30, 6))
    together, alone = Relaxation.start(6), Relaxation.start(6)
    some = np.array([1, 4])
    apart = alone.at(some)
    for error, quotient in zip(errors, quotients, strict=True):
        together.update(error, 10, quotient)
        apart.update(error[some], 10, quotient[some])
    joined = alone.put(some, apart)
    assert np.array_equal(joined.t[some], together.t[some])
    assert (joined.t[[0, 2, 3, 5]] == 0).all()
