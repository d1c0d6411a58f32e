"""The kernels of small problems, in triton's interpreter where there is no GPU: right in every corner their twin is right in."""

import math

import pytest
import torch
from hypothesis import Phase, given, settings
from oracles import plan, two_by_two
from strategies import Problem, problems

from sinkformer import ops, sinkhorn, use_backend
from sinkformer.ops import cpu

pytest.importorskip("triton", reason="the extra [gpu] is not installed")
small = pytest.importorskip("sinkformer.ops.triton.small")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INF, NAN = math.inf, math.nan
CONVERGED, UNSOLVED, NONFINITE = 0, 1, 3


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Arrays that nothing has been written to are full of NaN."""

    def filled(allocate):
        return lambda *arguments, **options: allocate(*arguments, **options).fill_(NAN)

    monkeypatch.setattr(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty_like", filled(torch.empty_like))


def on_device(found):
    return type(found)(*(t.cpu() for t in found)) if hasattr(found, "_fields") else tuple(t.cpu() for t in found)


def solve(cost, a, b, epsilon, **options):
    epsilon = torch.as_tensor(epsilon, dtype=torch.float64).expand(len(a))
    start = options.pop("start", None)
    options = {"tolerance": 1e-9, "budget": 400} | options
    moved = [t.to(DEVICE) for t in (cost, a, b, epsilon)]
    return on_device(small.solve(*moved, start=None if start is None else start.to(DEVICE), **options))


def random_problem(B, n, m, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    cost = torch.randn(B, n, m, generator=generator, dtype=dtype)
    a, b = (torch.rand(B, size, generator=generator, dtype=torch.float64) + 0.1 for size in (n, m))
    return cost, a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)


def ragged(dtype=torch.float64):
    """Garbage in the padding, which stands at the end, in the middle and at the start."""
    cost, a, b = random_problem(4, 11, 18, dtype)
    a[0, 7:], b[0, 3:] = 0, 0
    a[1, 2:5], b[1, 6] = 0, 0
    a[2, :9], b[2, 1:] = 0, 0
    cost = torch.where((a > 0).unsqueeze(-1) & (b > 0).unsqueeze(-2), cost, NAN)
    cost[0, 8], cost[1, :, 6] = INF, -INF
    return cost, a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)


def l1_error(cost, a, b, f, g, epsilon):
    live = (a > 0).unsqueeze(-1) & (b > 0).unsqueeze(-2)
    scale = torch.as_tensor(epsilon, dtype=torch.float64).view(-1, 1, 1)
    exponents = (f.unsqueeze(-1) + g.unsqueeze(-2) - cost.double()) / scale
    p = torch.where(live, a.unsqueeze(-1) * b.unsqueeze(-2) * exponents.exp(), 0.0)
    return (p.sum(-1) - a).abs().sum(-1) + (p.sum(-2) - b).abs().sum(-1)


def reference(cost, a, b, epsilon, tolerance=1e-11):
    with use_backend("reference"):
        return sinkhorn(a, b, cost=cost.double(), epsilon=epsilon, tolerance=tolerance, max_iterations=10_000)


# Solutions ------------------------------------------------------------------------------------------------------------


def test_what_is_supported():
    assert small.supports(1, 128, torch.float32) is None
    assert small.supports(64, 64, torch.float64) is None
    assert "128" in small.supports(129, 3, torch.float32)
    assert "received 3 and 0" in small.supports(3, 0, torch.float32)
    assert "float16" in small.supports(3, 3, torch.float16)


def test_no_problems_at_all():
    cost, a, b = random_problem(0, 3, 4)
    assert solve(cost, a, b, 0.1).f.shape == (0, 3)


def test_two_by_two_in_closed_form():
    cost = torch.tensor([[[0.0, 1.0], [0.3, 0.2]]], dtype=torch.float64)
    a, b = torch.tensor([[0.3, 0.7]], dtype=torch.float64), torch.tensor([[0.6, 0.4]], dtype=torch.float64)
    solved = solve(cost, a, b, 0.2, tolerance=1e-12)
    exact = two_by_two(a[0], b[0], cost[0], 0.2)
    torch.testing.assert_close(plan(solved, cost, a, b, 0.2)[0], exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [1, 5])
def test_a_constant_cost_needs_nothing(n):
    solved = solve(torch.full((1, n, 3), 7.0).double(), *random_problem(1, n, 3)[1:], 0.1)
    torch.testing.assert_close(solved.f.unsqueeze(-1) + solved.g.unsqueeze(-2), torch.full((1, n, 3), 7.0).double())
    assert solved.sweeps[0] <= 4
    assert float(solved.value[0]) == pytest.approx(7)


@pytest.mark.parametrize(("n", "m", "epsilon"), [(1, 1, 0.1), (1, 9, 0.1), (3, 5, 0.1), (17, 30, 0.3), (64, 64, 1.0)])
def test_the_solution_is_that_of_the_reference(n, m, epsilon):
    cost, a, b = random_problem(1, n, m)
    solved, exact = solve(cost, a, b, epsilon, tolerance=1e-11), reference(cost, a, b, epsilon)
    assert solved.codes[0] == CONVERGED
    for found, wanted in ((solved.f, exact.f), (solved.g, exact.g)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
    assert float(solved.value[0]) == pytest.approx(float(exact.value[0]), abs=1e-11)
    assert float(l1_error(cost, a, b, solved.f, solved.g, epsilon)) <= 1e-11


@pytest.mark.parametrize(("n", "m"), [(64, 64), (100, 128)])
def test_large_tiles_in_float32(n, m):
    cost, a, b = random_problem(2, n, m, torch.float32)
    solved = solve(cost, a, b, 0.3, tolerance=1e-3)
    error = l1_error(cost, a, b, solved.f, solved.g, 0.3)
    assert (error <= 1e-3).all()
    torch.testing.assert_close(solved.error, error, rtol=0, atol=2e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "m", "dtype"), [(128, 128, torch.float64), (128, 17, torch.float32), (5, 100, torch.float64)]
)
def test_more_tiles(n, m, dtype):
    cost, a, b = random_problem(1, n, m, dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    solved = solve(cost, a, b, 0.1, tolerance=tolerance)
    assert solved.codes[0] == CONVERGED
    assert float(l1_error(cost, a, b, solved.f, solved.g, 0.1)) <= tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_ragged_batches_with_garbage_in_the_padding(dtype, tolerance):
    cost, a, b = ragged(dtype)
    solved = solve(cost, a, b, 0.2, tolerance=tolerance)
    assert (solved.codes == CONVERGED).all()
    error = l1_error(cost, a, b, solved.f, solved.g, 0.2)
    assert (error <= tolerance).all()
    torch.testing.assert_close(error, solved.error, rtol=0, atol=2e-7 if dtype == torch.float32 else 1e-13)
    clean = torch.where((a > 0).unsqueeze(-1) & (b > 0).unsqueeze(-2), cost, 0.0)
    exact = reference(clean, a, b, 0.2)
    torch.testing.assert_close(solved.value, exact.value, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-10)
    assert torch.isfinite(torch.cat([solved.f, solved.g], -1)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_potentials_at_weight_zero_are_soft_transforms(dtype):
    cost, a, b = ragged(dtype)
    cost = cost.nan_to_num(0.5, 0.5, 0.5)
    cost[1, 3, 2:5] = INF
    scale = torch.full((4,), 0.3, dtype=torch.float64)
    solved = solve(cost, a, b, scale, tolerance=1e-4)
    f = ops.softmin(cost.double(), solved.g, b.log(), scale)
    g = ops.softmin(cost.double().mT, solved.f, a.log(), scale)
    torch.testing.assert_close(solved.f[a == 0], f[a == 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(solved.g[b == 0], g[b == 0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("filling", [NAN, -INF, 1e35])
def test_at_weight_zero_a_cost_that_is_none_counts_as_zero_and_no_partner_as_potential_zero(filling):
    cost, a, b = random_problem(1, 3, 4)
    a[0, 1], a[0, 0] = 0, 0.5
    a, cost[0, 1] = a / a.sum(-1, keepdim=True), filling
    solved = solve(cost, a, b, 0.3)
    wanted = ops.softmin(torch.zeros(1, 1, 4).double(), solved.g, b.log(), torch.full((1,), 0.3).double())
    torch.testing.assert_close(solved.f[:, 1:2], wanted)
    cost[0, 1] = INF
    assert solve(cost, a, b, 0.3).f[0, 1] == 0


def test_every_problem_stops_by_itself_and_is_the_same_alone():
    cost, a, b = random_problem(3, 5, 6)
    scale = torch.tensor([3.0, 0.1, 0.5], dtype=torch.float64)
    together = solve(cost, a, b, scale, tolerance=1e-5)
    again = solve(cost, a, b, scale, tolerance=1e-5)
    assert len(set(together.sweeps.tolist())) == 3
    for k in range(3):
        alone = solve(cost[k : k + 1], a[k : k + 1], b[k : k + 1], scale[k : k + 1], tolerance=1e-5)
        for one, part, repeated in zip(alone, together, again, strict=True):
            assert torch.equal(one[0], part[k])
            assert torch.equal(one[0], repeated[k])


def test_what_strides_the_arguments_have_is_of_no_importance():
    cost, a, b = random_problem(2, 4, 3)
    expected = solve(cost, a, b, 0.3)
    strided = torch.stack([cost, cost], -1)[..., 0]
    found = solve(strided, a.mT.contiguous().mT, b, 0.3)
    assert torch.equal(found.f, expected.f)


def test_masks():
    cost, a, b = random_problem(3, 4, 4)
    cost[0][torch.eye(4, dtype=torch.bool)] = INF
    cost[1, :3, :3] = INF  # a solution only if the weights allow it, which they do not
    a[1], b[1] = 0.25, 0.25
    cost[2, 2] = INF  # a row without a partner
    solved = solve(cost, a, b, 0.5, budget=400, masked_budget=60)
    assert solved.codes.tolist() == [CONVERGED, UNSOLVED, UNSOLVED]
    exact = reference(cost[:1], a[:1], b[:1], 0.5)
    torch.testing.assert_close(solved.f[0] - solved.f[0, 0], exact.f[0] - exact.f[0, 0], rtol=0, atol=1e-7)
    assert solved.sweeps[1] <= 60
    assert 0.1 < solved.error[1] < INF
    assert solved.error[2] == INF
    assert torch.isfinite(solved.f).all()
    assert torch.isfinite(solved.g).all()


@pytest.mark.parametrize("value", [NAN, -INF, 1e30])
def test_a_cost_that_is_none_is_said_and_harms_nobody_else(value):
    cost, a, b = random_problem(2, 3, 4)
    expected = solve(cost, a, b, 0.5)
    cost[0, 1, 2] = value
    solved = solve(cost, a, b, 0.5)
    assert solved.codes.tolist() == [NONFINITE, CONVERGED]
    assert torch.equal(solved.f[1], expected.f[1])
    assert torch.isfinite(solved.f).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_huge_epsilon_and_costs_with_an_offset(dtype, tolerance, offset):
    cost, a, b = random_problem(2, 6, 5, dtype)
    scale = torch.tensor([1e6, 0.5], dtype=torch.float64)
    solved = solve(cost + offset, a, b, scale, tolerance=tolerance)
    assert (solved.codes == CONVERGED).all()
    assert (l1_error(cost + offset, a, b, solved.f, solved.g, scale) <= tolerance).all()


def test_small_epsilon_is_reached_by_a_path():
    cost, a, b = random_problem(1, 6, 6)
    solved = solve(cost, a, b, 3e-3, tolerance=1e-3)
    assert solved.codes[0] == CONVERGED
    assert float(l1_error(cost, a, b, solved.f, solved.g, 3e-3)) <= 1e-3
    direct = solve(cost, a, b, 3e-3, tolerance=1e-3, budget=2 * int(solved.sweeps), start=torch.zeros_like(b))
    assert direct.codes[0] == UNSOLVED, "from epsilon itself it takes far longer"


def test_an_epsilon_out_of_reach_is_left_to_others_with_the_error_of_what_is_handed_out():
    cost, a, b = random_problem(2, 6, 6)
    solved = solve(cost, a, b, 1e-9, budget=40)
    assert (solved.codes == UNSOLVED).all()
    error = l1_error(cost, a, b, solved.f, solved.g, 1e-9)
    torch.testing.assert_close(solved.error, error, rtol=1e-4, atol=1e-6)


def test_weights_over_thirty_orders_of_magnitude():
    a = torch.logspace(-30, 0, 12, dtype=torch.float64)[None]
    a, b = a / a.sum(), a.flip(-1) / a.sum()
    cost = torch.rand(1, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-10)):
        solved = solve(cost.to(dtype), a, b, 0.1, tolerance=tolerance)
        assert solved.codes[0] == CONVERGED
        assert l1_error(cost.to(dtype), a, b, solved.f, solved.g, 0.1) <= tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_symmetric_problems_have_equal_potentials(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 2, generator=generator, dtype=dtype)
    cost = (x.unsqueeze(-2) - x.unsqueeze(-3)).square().sum(-1)
    a = random_problem(2, 9, 9)[1]
    a[1, 4:6] = 0
    a = a / a.sum(-1, keepdim=True)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    solved = solve(cost, a, a, 0.2, tolerance=tolerance)
    assert torch.equal(solved.f, solved.g)
    assert (solved.codes == CONVERGED).all()
    assert (l1_error(cost, a, a, solved.f, solved.g, 0.2) <= tolerance).all()
    exact = reference(cost, a, a, 0.2)
    torch.testing.assert_close(solved.f, exact.f, rtol=0, atol=20 * tolerance)
    b = a.clone()
    b[:, :2] = b[:, :2].flip(-1)
    alternating = solve(cost, a, b, 0.2, tolerance=tolerance, budget=int(solved.sweeps.max()))
    assert (alternating.codes == UNSOLVED).all(), "averaging is what makes them fast"


def test_a_warm_start_is_used():
    cost, a, b = random_problem(1, 6, 7)
    cold = solve(cost, a, b, 0.3)
    warm = solve(cost, a, b, 0.3, start=cold.g)
    assert warm.sweeps[0] <= 4
    wild = solve(cost, a, b, 0.3, start=1e4 * torch.randn(1, 7, generator=torch.Generator().manual_seed(0)).double())
    assert (wild.codes == CONVERGED).all()
    torch.testing.assert_close(wild.f, cold.f, rtol=0, atol=1e-7)


def test_a_lost_problem_hands_back_its_start():
    cost, a, b = random_problem(1, 3, 4)
    cost[0, 1] = INF
    start = torch.arange(4.0).double()[None]
    assert torch.equal(solve(cost, a, b, 0.1, start=start).g, start)


@pytest.mark.parametrize("budget", [0, 1, 6])
def test_a_budget_is_kept_and_the_error_of_what_is_left_is_true(budget):
    cost, a, b = random_problem(2, 6, 5)
    scale = torch.tensor([0.02, 1.0], dtype=torch.float64)
    solved = solve(cost, a, b, scale, tolerance=1e-12, budget=budget)
    assert (solved.sweeps == budget).all()
    torch.testing.assert_close(l1_error(cost, a, b, solved.f, solved.g, scale), solved.error, rtol=1e-9, atol=1e-12)
    assert (solved.codes == UNSOLVED).all()


def test_all_iterations_are_done_where_asked():
    cost, a, b = random_problem(1, 3, 4)
    solved = solve(cost, a, b, 1.0, tolerance=-1.0, budget=33)
    assert solved.sweeps[0] == 33
    assert solved.codes[0] == UNSOLVED
    assert solved.error[0] < 1e-12


def test_patience_grows_with_the_live_atoms():
    cost, a, b = random_problem(2, 4, 5)
    a[0, :2], a[1] = 0, 0.25
    solved = solve(cost, a / a.sum(-1, keepdim=True), b, 0.01, tolerance=1e-13, patience=5)
    assert solved.sweeps.tolist() == [5, 45]


def test_the_gap_bounds_the_gap_of_the_rounded_plan():
    cost, a, b = random_problem(2, 6, 9)
    scale = torch.full((2,), 0.2, dtype=torch.float64)
    for budget in (2, 20):
        solved = solve(cost, a, b, scale, tolerance=1e-12, budget=budget)
        p = ops.plan(cost, solved.f, solved.g, a, b, scale)
        r, c, left, right = ops.rounding(lambda v: ops.apply(p, v), lambda u: ops.apply(p.mT, u), a, b)  # noqa: B023
        q = p * r.unsqueeze(-1) * c.unsqueeze(-2) + left.unsqueeze(-1) * right.unsqueeze(-2)
        entropy = torch.where(q > 0, q * (q / (a.unsqueeze(-1) * b.unsqueeze(-2))).log(), 0.0).sum((-1, -2))
        exact = (q * cost).sum((-1, -2)) + scale * entropy - solved.value
        assert (solved.gap >= exact - 1e-13).all()
        assert (solved.gap <= 12 * exact + 1e-12).all(), "and is not far from it"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_twin_says_the_same(dtype):
    if cpu.unavailable():
        pytest.skip("the extra [fast] is not installed")
    cost, a, b = ragged(dtype)
    scale = torch.full((4,), 0.2, dtype=torch.float64)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-9
    solved = solve(cost, a, b, scale, tolerance=tolerance)
    twin = cpu.solve(cost, a, b, scale, tolerance=tolerance, budget=3000)
    assert [t.dtype for t in solved] == [t.dtype for t in twin]
    assert torch.equal(solved.codes, twin.codes)
    assert (solved.sweeps <= 2 * twin.sweeps + 8).all()
    torch.testing.assert_close(solved.value, twin.value, rtol=0, atol=2e-7 if dtype == torch.float32 else 1e-12)


@settings(max_examples=6, phases=[Phase.explicit, Phase.generate])
@given(problems(max_atoms=4))
def test_any_small_problem(problem: Problem):
    a, b, cost, epsilon = problem
    solved = solve(cost[None], a[None], b[None], epsilon)
    assert solved.codes[0] == CONVERGED
    assert float(l1_error(cost[None], a[None], b[None], solved.f, solved.g, epsilon)) <= 1e-9
    exact = reference(cost, a, b, epsilon)
    assert float(solved.value[0]) == pytest.approx(float(exact.value), abs=1e-10)


# The derivative -------------------------------------------------------------------------------------------------------


def pull_back(cost, a, b, epsilon, f, g, on_f, on_g, rtol=1e-12):
    epsilon = torch.as_tensor(epsilon, dtype=torch.float64).expand(len(a))
    moved = [t.to(DEVICE) for t in (cost, a, b, epsilon, f, g, on_f, on_g)]
    return on_device(small.pull_back(*moved, rtol=rtol))


def cotangents(a, b, seed=0):
    """Of equal sums: potentials are known up to a constant."""
    generator = torch.Generator().manual_seed(seed)
    on_f, on_g = (torch.randn(w.shape, generator=generator, dtype=torch.float64) * (w > 0) for w in (a, b))
    return on_f + a * (on_g.sum(-1) - on_f.sum(-1)).unsqueeze(-1), on_g


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 5), (3, 5), (17, 30)])
def test_the_pull_back_is_that_of_the_reference(n, m):
    cost, a, b = random_problem(1, n, m)
    on_f, on_g = cotangents(a, b)
    leaf = cost.clone().requires_grad_()
    exact = reference(leaf, a, b, 0.5, tolerance=1e-13)
    (wanted,) = torch.autograd.grad((on_f * exact.f).sum() + (on_g * exact.g).sum(), leaf)
    found, residual, _ = pull_back(cost, a, b, 0.5, exact.f.detach(), exact.g.detach(), on_f, on_g)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
    assert residual[0] <= 1e-11


def test_the_pull_back_of_a_quotient_of_differences():
    cost, a, b = random_problem(1, 3, 4)
    on_f, on_g = cotangents(a, b)
    solved = solve(cost, a, b, 0.4, tolerance=1e-13)
    found, _, _ = pull_back(cost, a, b, 0.4, solved.f, solved.g, on_f, on_g)
    step = torch.zeros_like(cost)
    step[0, 1, 2] = 1e-5
    there, back = (solve(cost + sign * step, a, b, 0.4, tolerance=1e-13) for sign in (1, -1))
    slope = ((on_f * (there.f - back.f)).sum() + (on_g * (there.g - back.g)).sum()) / 2e-5
    assert float(found[0, 1, 2]) == pytest.approx(float(slope), rel=1e-6)


@pytest.mark.parametrize(("dtype", "rtol", "error"), [(torch.float32, 1e-4, 2e-3), (torch.float64, 1e-11, 1e-8)])
def test_the_pull_back_of_ragged_batches(dtype, rtol, error):
    cost, a, b = ragged(dtype)
    on_f, on_g = cotangents(a, b)
    live = (a > 0).unsqueeze(-1) & (b > 0).unsqueeze(-2)
    leaf = torch.where(live, cost, 0.0).double().requires_grad_()
    exact = reference(leaf, a, b, 0.2, tolerance=1e-13)
    (wanted,) = torch.autograd.grad((on_f * exact.f).sum() + (on_g * exact.g).sum(), leaf)
    found, _, _ = pull_back(cost, a, b, 0.2, exact.f.detach(), exact.g.detach(), on_f, on_g, rtol=rtol)
    assert found.dtype == dtype
    assert (found[~live] == 0).all()
    norms = (found.double() - wanted).flatten(1).norm(dim=1), wanted.flatten(1).norm(dim=1)
    assert (norms[0] <= error * norms[1] + 1e-12).all()


def test_the_conditioning_is_the_gap_of_the_plan():
    a = torch.full((1, 6), 1 / 6, dtype=torch.float64)
    cost = torch.rand(1, 6, 6, generator=torch.Generator().manual_seed(0)).double()
    solved = solve(cost, a, a, 0.1, tolerance=1e-13)
    on_f = torch.arange(6.0).double()[None] - 2.5
    _, _, conditioning = pull_back(cost, a, a, 0.1, solved.f, solved.g, on_f, 0 * on_f)
    second = torch.linalg.svdvals(6 * plan(solved, cost, a, a, 0.1)[0])[1]
    assert float(conditioning) == pytest.approx(float(1 - second**2), rel=1e-6)


def test_without_a_plan_there_is_no_derivative():
    cost, a, b = random_problem(2, 3, 4)
    f, g = solve(cost, a, b, 0.5)[:2]
    cost[0, 1] = INF
    on_f, on_g = cotangents(a, b)
    found, residual, conditioning = pull_back(cost, a, b, 0.5, f, g, on_f, on_g)
    assert (found[0] == 0).all()
    assert residual[0] == 0
    assert torch.isnan(conditioning[0])
    assert (found[1] != 0).all()


def test_nothing_to_pull_back_is_nothing():
    cost, a, b = random_problem(1, 3, 4)
    f, g = solve(cost, a, b, 0.5)[:2]
    found, residual, conditioning = pull_back(cost, a, b, 0.5, f, g, 0 * a, 0 * b)
    assert (found == 0).all()
    assert residual[0] == 0
    assert torch.isnan(conditioning[0])
