"""The compiled kernels: right in every corner the references are right in, on any thread, in any process."""

import importlib.util
import logging
import math
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import plan

from sinkformer import ops, sinkhorn, use_backend, warm_up
from sinkformer.costs import forbid
from sinkformer.errors import InfeasibleError, NonFiniteError
from sinkformer.ops import cpu

kernels = pytest.importorskip("sinkformer.ops.cpu.kernels", reason="the extra [fast] is not installed")
vectors = pytest.importorskip("sinkformer.ops.cpu.vectors")
INF = math.inf


def ragged(B=12, most=20, seed=0, dtype=torch.float64):
    """Costs with garbage in the padding, weights, the range of the live costs."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, most + 1, (B, 2), generator=generator)
    cost = torch.randn(B, most, most, generator=generator, dtype=dtype)
    a, b = (torch.rand(B, most, generator=generator, dtype=torch.float64) + 0.1 for _ in range(2))
    for k, (n, m) in enumerate(sizes.tolist()):
        a[k, n:], b[k, m:] = 0, 0
        cost[k, n:, :], cost[k, :, m:] = math.nan, INF
    return cost, a / a.sum(-1, keepdim=True), b / b.sum(-1, keepdim=True)


def l1_error(cost, a, b, f, g, epsilon):
    live = (a > 0).unsqueeze(-1) & (b > 0).unsqueeze(-2)
    exponents = (f.unsqueeze(-1) + g.unsqueeze(-2) - cost.double()) / epsilon.view(-1, 1, 1)
    p = torch.where(live, a.unsqueeze(-1) * b.unsqueeze(-2) * exponents.exp(), 0.0)
    return (p.sum(-1) - a).abs().sum(-1) + (p.sum(-2) - b).abs().sum(-1)


# Pieces ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pieces():
    """The kernels as plain Python: what debuggers and coverage see, and the only door to their parts."""
    spec = importlib.util.spec_from_file_location("plain_kernels", kernels.__file__)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("numba.njit", lambda **_: lambda function: function)
        spec.loader.exec_module(module)
    with np.errstate(all="ignore"):
        yield module


@pytest.mark.parametrize(("dtype", "error", "lowest"), [(np.float32, 3e-7, -87.0), (np.float64, 1e-15, -708.0)])
def test_exponentials(pieces, dtype, error, lowest):
    z = np.concatenate([np.linspace(lowest + 1, 80, 1001), [0.0, -1e-9, lowest - 1, -1e30, -INF]])
    out = np.empty(len(z), dtype)
    pieces._exponentials(z, out, np.empty_like(out))
    np.testing.assert_allclose(out[:-3], np.exp(z[:-3]), rtol=error)
    assert (out[-3:] == 0).all(), "exactly zero, not only small"


def padded(x):
    """With zeros at the end of the last axis, up to whole vectors."""
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % vectors.LANES)])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (3, 5), (4, 8), (9, 33)])
def test_a_plain_sweep(pieces, n, m, dtype):
    generator = np.random.default_rng(0)
    K, u, v = padded(generator.random((n, m)).astype(dtype)), np.ones(n, dtype), padded(np.ones(m, dtype))
    a, b = np.full(n, 1 / n, dtype), np.full(m, 1 / m, dtype)
    x = np.empty(n, dtype)
    errors = pieces._sweep(K, u, v, a, b, np.empty_like(v), x, 0.0)
    wide, v = K[:, :m].astype(float), v[:m]
    expected_u = a / wide.sum(1)
    expected_v = b / (wide.T @ expected_u)
    np.testing.assert_allclose(u, expected_u, rtol=1e-5)
    np.testing.assert_allclose(v, expected_v, rtol=1e-5)
    np.testing.assert_allclose(x, expected_u, rtol=1e-5)
    assert errors[0] == pytest.approx(np.abs(wide.sum(1) - a).sum(), rel=1e-5)
    assert errors[1] == pytest.approx(np.abs(wide.T @ expected_u - b).sum(), rel=1e-4, abs=1e-7)
    scalings = np.concatenate([expected_u, expected_v, [1.0]])
    assert errors[2:] == pytest.approx((scalings.min(), scalings.max()), rel=1e-5)


@pytest.mark.parametrize("t", [0.0, 0.3, 0.9])
def test_the_relaxed_update_is_monotone_symmetric_and_close_to_the_power(pieces, t):
    x = np.exp(np.linspace(-6, 6, 101))
    relaxed = np.array([pieces._relaxed(1.0, 1.0, y, 1 + t, 1 - t)[0] for y in x])
    assert (relaxed > 0).all()
    assert (np.diff(relaxed) > 0).all()
    np.testing.assert_allclose(relaxed * relaxed[::-1], 1, rtol=1e-12)
    near = np.abs(np.log(x)) < 0.2
    np.testing.assert_allclose(relaxed[near], x[near] ** (1 + t), rtol=2e-3)


def test_the_smallest_ritz_value_is_an_eigenvalue(pieces):
    generator = np.random.default_rng(0)
    alpha, beta = generator.random(9) + 0.6, generator.random(9)
    diagonal = 1 / alpha + np.concatenate([[0], beta[:-1] / alpha[:-1]])
    off = np.sqrt(beta[:-1]) / alpha[:-1]
    matrix = np.diag(diagonal) + np.diag(off, 1) + np.diag(off, -1)
    assert pieces._smallest_ritz(alpha, beta, 9) == pytest.approx(np.linalg.eigvalsh(matrix)[0], rel=1e-9)


def test_the_rate_grows_where_sweeps_are_slow_and_pauses_where_the_error_grows(pieces):
    rate = np.empty(8)
    pieces._first_rate(rate)
    pieces._adjust(rate, 0.4, 4, 0.99)
    assert rate[pieces._T] == pytest.approx(2 / (1 + math.sqrt(0.1)) - 1), (
        "far away the estimate is not believed beyond 0.9"
    )
    first = rate[pieces._T]
    for error in (0.3, 0.29, 0.28):
        pieces._adjust(rate, error, 10, 0.0)
    assert rate[pieces._T] > first
    pieces._adjust(rate, 5.0, 10, 0.0)
    assert rate[pieces._T] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_compiled_or_not_is_the_same(pieces, dtype):
    cost, a, b = ragged(B=3, most=6, dtype=dtype)
    cost[2] = cost[2].nan_to_num() + cost[2].nan_to_num().mT
    b[2] = a[2]
    arrays = [t.numpy() for t in (cost, a, b, torch.full((3,), 0.01, dtype=torch.float64))]
    store, found = np.empty(kernels.storage(6, 6), cost.numpy().dtype), []
    for module in (kernels, pieces):
        f, g, report = np.zeros((3, 6)), np.zeros((3, 6)), np.empty((3, 5))
        module.solve(np.arange(3), store, *arrays, f, g, False, 1e-4, 9e-5, 500, 500, 500, report)
        pull, numbers = np.zeros(cost.shape), np.empty((3, 2))
        on_f, on_g = np.where(arrays[1] > 0, 1.0, 0.0), np.where(arrays[2] > 0, -0.5, 0.0)
        wide = store.astype(float), arrays[0].astype(float)
        module.pull_back(np.arange(3), *wide, *arrays[1:], f, g, on_f, on_g, 1e-3, pull, numbers)
        found.append((f, g, report, pull, numbers))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4 if dtype == torch.float32 else 1e-9)


# Problems -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [1.0, 0.1, 0.01])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_ragged_batches_with_garbage_in_the_padding(epsilon, dtype, tolerance):
    cost, a, b = ragged(dtype=dtype)
    scale = torch.full((len(a),), epsilon, dtype=torch.float64)
    solved = cpu.solve(cost, a, b, scale, tolerance=tolerance, budget=20_000)
    assert (solved.codes == kernels.CONVERGED).all()
    measured = l1_error(cost, a, b, solved.f, solved.g, scale)
    assert (measured <= tolerance).all()
    torch.testing.assert_close(measured, solved.error, rtol=0, atol=2e-7 if dtype == torch.float32 else 1e-12)
    assert torch.isfinite(solved.f).all()
    assert torch.isfinite(solved.g).all()
    for k in range(len(a)):
        rows, columns = a[k] > 0, b[k] > 0
        part = cost[k][rows][:, columns]
        alone = cpu.solve(
            part[None].contiguous(),
            a[k, rows][None],
            b[k, columns][None],
            scale[:1],
            tolerance=tolerance,
            budget=20_000,
        )
        assert torch.equal(alone.f[0], solved.f[k, rows]), "what stands next to a problem changes no bit of it"


def test_float32_costs_are_solved_in_float64_beyond_the_reach_of_float32():
    cost, a, b = ragged(dtype=torch.float32)
    cost, a, b = torch.where(torch.isfinite(cost), cost, 0.0), a.float(), b.float()
    with use_backend("cpu"):
        solution = sinkhorn(a, b, cost=cost, epsilon=0.05, tolerance=1e-6)
    scale = torch.full((len(a),), 0.05, dtype=torch.float64)
    wide = [w.double() / w.double().sum(-1, keepdim=True) for w in (a, b)]
    assert (l1_error(cost, *wide, solution.f, solution.g, scale) <= 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_potentials_at_weight_zero_are_soft_transforms(dtype):
    cost, a, b = ragged(B=4, dtype=dtype)
    cost = torch.where(torch.isfinite(cost), cost, 0.5)
    scale = torch.full((4,), 0.3, dtype=torch.float64)
    solved = cpu.solve(cost, a, b, scale, tolerance=1e-4, budget=1000)
    f = ops.softmin(cost.double(), solved.g, b.log(), scale)
    g = ops.softmin(cost.double().mT, solved.f, a.log(), scale)
    torch.testing.assert_close(solved.f[a == 0], f[a == 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(solved.g[b == 0], g[b == 0], rtol=0, atol=1e-6)


def test_weights_over_thirty_orders_of_magnitude():
    a = torch.logspace(-30, 0, 12, dtype=torch.float64)
    b = torch.flip(a, [0])
    a, b = a / a.sum(), b / b.sum()
    cost = torch.rand(12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-10)):
        solved = cpu.solve(
            cost[None].to(dtype), a[None], b[None], torch.ones(1).double() / 10, tolerance=tolerance, budget=2000
        )
        assert solved.codes[0] == kernels.CONVERGED
        assert l1_error(cost[None].to(dtype), a[None], b[None], solved.f, solved.g, torch.ones(1) / 10) <= tolerance


def test_rows_without_partners_are_left_to_others_and_impossible_masks_are_said():
    mask = torch.zeros(3, 3, dtype=torch.bool)
    mask[0] = True
    a = torch.full((3,), 1 / 3, dtype=torch.float64)
    with use_backend("cpu"), pytest.raises(InfeasibleError, match="INFEASIBLE"):
        sinkhorn(a, a, cost=torch.zeros(3, 3).double(), mask=forbid(mask), epsilon=0.1)
    with use_backend("cpu"), pytest.raises(NonFiniteError, match="NONFINITE"):
        sinkhorn(a, a, cost=torch.full((3, 3), math.nan).double(), epsilon=0.1)


def test_small_epsilon_is_reached_by_a_path():
    generator = torch.Generator().manual_seed(0)
    cost = torch.randn(16, 24, 24, generator=generator, dtype=torch.float64)
    weights = torch.full((16, 24), 1 / 24, dtype=torch.float64)
    scale = torch.full((16,), 1e-3, dtype=torch.float64)
    solved = cpu.solve(cost, weights, weights, scale, tolerance=1e-3, budget=2000)
    assert (solved.codes == kernels.CONVERGED).float().mean() >= 0.9
    started = cpu.solve(cost, weights, weights, scale, tolerance=1e-3, budget=2000, start=torch.zeros(16, 24).double())
    assert solved.sweeps.double().median() < 0.5 * started.sweeps.double().median(), (
        "from epsilon itself it takes far longer"
    )


def test_a_budget_is_kept_and_the_error_of_what_is_left_is_true():
    cost, a, b = ragged(B=6)
    scale = torch.full((6,), 0.02, dtype=torch.float64)
    for budget in (1, 7, 30):
        solved = cpu.solve(cost, a, b, scale, tolerance=1e-12, budget=budget)
        assert (solved.sweeps <= budget).all()
        torch.testing.assert_close(l1_error(cost, a, b, solved.f, solved.g, scale), solved.error, rtol=1e-9, atol=1e-12)
        assert ((solved.codes == kernels.CONVERGED) == (solved.error <= 1e-12)).all()


def test_the_gap_bounds_the_gap_of_the_rounded_plan():
    cost, a, b = ragged(B=6)
    cost = torch.where(torch.isfinite(cost), cost, 0.0)
    scale = torch.full((6,), 0.2, dtype=torch.float64)
    for budget in (2, 5, 200):
        solved = cpu.solve(cost, a, b, scale, tolerance=1e-12, budget=budget)
        p = ops.plan(cost, solved.f, solved.g, a, b, scale)
        r, c, left, right = ops.rounding(lambda v: ops.apply(p, v), lambda u: ops.apply(p.mT, u), a, b)  # noqa: B023
        q = p * r.unsqueeze(-1) * c.unsqueeze(-2) + left.unsqueeze(-1) * right.unsqueeze(-2)
        product = a.unsqueeze(-1) * b.unsqueeze(-2)
        entropy = torch.where(q > 0, q * (q / torch.where(product > 0, product, 1.0)).log(), 0.0).sum((-1, -2))
        exact = (q * cost).sum((-1, -2)) + scale * entropy - solved.value
        assert (solved.gap >= exact - 1e-13).all()
        assert (solved.gap <= 12 * exact + 1e-12).all(), "and is not far from it"


def test_a_warm_start_is_used():
    cost, a, b = ragged(B=4)
    scale = torch.full((4,), 0.05, dtype=torch.float64)
    cold = cpu.solve(cost, a, b, scale, tolerance=1e-9, budget=5000)
    warm = cpu.solve(cost, a, b, scale, tolerance=1e-9, budget=5000, start=cold.g)
    assert (warm.sweeps <= 2).all()
    wild = cpu.solve(cost, a, b, scale, tolerance=1e-9, budget=5000, start=1e4 * torch.randn(4, 20).double())
    assert (wild.codes == kernels.CONVERGED).all()


# The derivative -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "rtol", "error"), [(torch.float32, 1e-4, 2e-3), (torch.float64, 1e-11, 1e-8)])
def test_the_pull_back_is_that_of_the_reference(dtype, rtol, error):
    cost, a, b = ragged(B=8, dtype=dtype)
    cost = torch.where(torch.isfinite(cost), cost, 0.0)
    wide = cost.double().requires_grad_()
    weight = torch.randn(8, 20, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scale = torch.full((8,), 0.2, dtype=torch.float64)

    def loss(solution, c):
        return (ops.plan(c, solution.f, solution.g, a, b, scale) * weight).sum()

    with use_backend("reference"):
        exact = sinkhorn(a, b, cost=wide, epsilon=scale, tolerance=1e-13, max_iterations=10_000)
        (wanted,) = torch.autograd.grad(loss(exact, wide), wide)
    leaf = cost.clone().requires_grad_()
    with use_backend("cpu"):
        solution = sinkhorn(a.to(dtype), b.to(dtype), cost=leaf, epsilon=scale, gradient_tolerance=rtol)
        assert torch.isnan(solution.conditioning).all()
        (found,) = torch.autograd.grad(loss(solution, leaf), leaf)
    assert found.dtype == dtype
    norms = (found.double() - wanted).flatten(1).norm(dim=1), wanted.flatten(1).norm(dim=1)
    assert (norms[0] <= error * norms[1] + 1e-12).all()
    assert ((solution.conditioning > 0) | torch.isnan(solution.conditioning)).all()


def test_the_conditioning_is_the_gap_of_the_plan():
    a = torch.full((6,), 1 / 6, dtype=torch.float64)
    cost = torch.rand(6, 6, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    for backend in ("cpu", "absorbed", "reference"):
        with use_backend(backend):
            solution = sinkhorn(a, a, cost=cost, epsilon=0.1, tolerance=1e-13)
        torch.autograd.grad((solution.f * torch.arange(6.0)).sum(), cost)
        p = plan(solution.map(torch.Tensor.detach), cost.detach(), a, a, 0.1)
        second = torch.linalg.svdvals(6 * p)[1]
        assert float(solution.conditioning) == pytest.approx(float(1 - second**2), rel=1e-6)


def test_cotangents_at_weight_zero_go_the_long_way_round():
    cost, a, b = ragged(B=2)
    cost = torch.where(torch.isfinite(cost), cost, 0.0).requires_grad_()
    found = {}
    for backend in ("cpu", "reference"):
        with use_backend(backend):
            solution = sinkhorn(a, b, cost=cost, epsilon=0.3, tolerance=1e-12)
            (found[backend],) = torch.autograd.grad(solution.f.sum() + solution.g.square().sum(), cost)
    torch.testing.assert_close(found["cpu"], found["reference"], rtol=0, atol=1e-8)


# Threads, processes, caches -------------------------------------------------------------------------------------------


def test_two_threads_give_the_bits_of_one():
    cost, a, b = ragged(B=64, most=40)
    scale = torch.full((64,), 0.02, dtype=torch.float64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = cpu.solve(cost, a, b, scale, tolerance=1e-9, budget=3000)
        torch.set_num_threads(2)
        together = cpu.solve(cost, a, b, scale, tolerance=1e-9, budget=3000)
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


def test_concurrent_callers():
    cost, a, b = ragged(B=8)
    scale = torch.full((8,), 0.05, dtype=torch.float64)
    expected = cpu.solve(cost, a, b, scale, tolerance=1e-9, budget=2000)
    wrong = []

    def work():
        for _ in range(50):
            if not torch.equal(cpu.solve(cost, a, b, scale, tolerance=1e-9, budget=2000).f, expected.f):
                wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


class Couplings(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, k):
        a = torch.full((5,), 0.2, dtype=torch.float64)
        cost = torch.rand(5, 5, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        with use_backend("cpu"):
            return sinkhorn(a, a, cost=cost, epsilon=0.1).f


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_forked_data_loaders():
    expected = torch.stack([Couplings()[k] for k in range(8)])
    loader = torch.utils.data.DataLoader(Couplings(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    assert torch.equal(torch.cat(list(loader)), expected)


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


SOLVE = """
import torch, sinkformer as sf
a = torch.full((3,), 1 / 3)
with sf.use_backend("cpu"):
    solution = sf.sinkhorn(a, a, cost=torch.eye(3), epsilon=0.1)
print(sf.explain(solution), bool(solution.converged))
"""


def test_import_does_not_import_numba():
    found = run_python("import sys, sinkformer; print('numba' in sys.modules)")
    assert found.stdout.strip() == "False", found.stderr


def test_without_numba_the_absorbed_engine_runs_and_says_why():
    found = run_python("import sys; sys.modules['numba'] = None" + SOLVE.replace('"cpu"', "None"))
    assert found.stdout.startswith("absorbed: not cpu: numba cannot be imported"), found.stderr
    assert "sinkformer[fast]" in found.stdout
    refused = run_python("import sys; sys.modules['numba'] = None" + SOLVE)
    assert "BackendError" in refused.stderr
    assert "sinkformer[fast]" in refused.stderr


@pytest.mark.slow
def test_compilation_is_said_once_and_the_cache_is_used(tmp_path):
    first = run_python(SOLVE, NUMBA_CACHE_DIR=str(tmp_path))
    assert "compiling the CPU kernel 'solve'" in first.stderr
    assert first.stdout.startswith("cpu: ")
    second = run_python(SOLVE, NUMBA_CACHE_DIR=str(tmp_path))
    assert second.stdout == first.stdout
    assert "compiling" not in second.stderr


@pytest.mark.slow
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_cache(tmp_path):
    assert run_python(SOLVE, NUMBA_CACHE_DIR=str(tmp_path)).returncode == 0
    for path in [tmp_path, *tmp_path.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    found = run_python(SOLVE, NUMBA_CACHE_DIR=str(tmp_path))
    assert found.stdout.startswith("cpu: "), found.stderr


def test_no_place_for_a_cache_is_no_error(tmp_path, monkeypatch):
    calls = []

    def refusing(**options):
        calls.append(options["cache"])
        if options["cache"]:
            return lambda function: (_ for _ in ()).throw(RuntimeError("cannot cache function: no locator available"))
        return lambda function: function

    monkeypatch.setattr(kernels, "njit", refusing)
    assert kernels._compiled(set())(len) is len
    assert calls == [True, False]


def test_warm_up_needs_no_compilation_twice(caplog):
    warm_up()
    with caplog.at_level(logging.WARNING, logger="sinkformer"):
        assert warm_up() < 1
    assert not caplog.records


def test_subnormal_numbers_survive():
    cpu.unavailable()
    warm_up()
    tiny = 2.0**-1060
    assert float(torch.tensor([tiny], dtype=torch.float64) / 2) == tiny / 2 > 0
    assert float((np.array([tiny]) / 2)[0]) == tiny / 2


def test_the_kernels_run_uncompiled():
    """What coverage and debuggers see: the same source as plain Python."""
    found = run_python(SOLVE, NUMBA_DISABLE_JIT="1")
    assert found.stdout.startswith("cpu: "), found.stderr
    assert found.stdout.strip().endswith("True")


def test_one_file_holds_all_kernels():
    """The compiler's cache looks at the file of a function only: a callee elsewhere could be stale."""
    folder = Path(kernels.__file__).parent
    compiled = [path.name for path in folder.glob("*.py") if "njit" in path.read_text(encoding="utf-8")]
    assert compiled == ["kernels.py"]


def test_tensor_layouts():
    cost, a, b = ragged(B=2, most=6)
    cost = torch.where(torch.isfinite(cost), cost, 0.0)
    with use_backend("cpu"):
        expected = sinkhorn(a, b, cost=cost, epsilon=0.1)
        transposed = sinkhorn(a, b, cost=cost.mT.contiguous().mT, epsilon=0.1)
        assert torch.equal(expected.f, transposed.f)
        expanded = sinkhorn(a[:1].expand(3, 6), b[:1].expand(3, 6), cost=cost[:1].expand(3, 6, 6), epsilon=0.1)
        assert torch.equal(expanded.f[2], expected.f[0])
        half = sinkhorn(a.half(), b.half(), cost=cost.half(), epsilon=0.1)
        assert half.converged.all()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(sinkhorn(a, b, cost=cost, epsilon=0.1).f, expected.f)
