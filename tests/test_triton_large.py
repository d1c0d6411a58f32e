"""One large problem by the GPU kernels, against blocks of torch: in triton's interpreter where there is no GPU."""

import math

import pytest
import torch
from oracles import random_weights
from torch.autograd import grad

from sinkformer import ops, streamed
from sinkformer.costs import Euclidean, Matrix, NegativeDot, SqEuclidean
from sinkformer.errors import BackendError
from sinkformer.relaxation import Relaxation
from sinkformer.streamed import PairCosts, kernels
from sinkformer.streamed.pairs import Pairs

pytest.importorskip("triton", reason="the kernels need triton, extra [gpu]")
stored = pytest.importorskip("sinkformer.ops.triton.stored")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if ops.triton.unavailable(DEVICE) is not None:
    pytest.skip("no GPU, and triton was imported without its interpreter", allow_module_level=True)

NAN, INF = float("nan"), float("inf")
BALANCED = (1.0, 1.0)
ENGINES = ["streamed", "stored"]
each_engine = pytest.mark.parametrize("engine", ENGINES)
each_cost = pytest.mark.parametrize("cost", [NegativeDot(), SqEuclidean()], ids=["dot", "squared"])


@pytest.fixture
def small_blocks(monkeypatch):
    """Several programs along each side of 40 atoms, and several tiles for each."""
    monkeypatch.setattr(stored, "_BUILD", (16, 32, 16, 4))
    monkeypatch.setattr(stored, "_TILE", 256)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Memory that was not written to is NaN."""

    def filled(allocate):
        def full(*arguments, **options):
            made = allocate(*arguments, **options)
            return made.fill_(NAN) if made.is_floating_point() else made

        return full

    monkeypatch.setattr(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty))
    monkeypatch.setattr(torch, "empty", filled(torch.empty))


class Case:
    """One problem of 30 x 25 atoms in R^5, with padding full of NaN on demand."""

    def __init__(
        self,
        cost=NegativeDot(),  # noqa: B008
        ratio=0.1,
        n=30,
        m=25,
        dtype=torch.float32,
        zeros=False,
        spoiled=False,
        shift=0.0,
    ):
        generator = torch.Generator().manual_seed(n * m)
        self.x, self.y = ((torch.randn(1, k, 5, generator=generator) + shift).to(dtype) for k in (n, m))
        self.cost, self.a, self.b = cost, *(random_weights(1, k, generator=generator) for k in (n, m))
        dense = cost(self.x.double(), self.y.double())
        self.epsilon = ratio * (dense.amax((-1, -2)) - dense.amin((-1, -2)))
        if zeros:
            self.a[0, :3], self.b[0, -2:] = 0, 0
        if spoiled:
            self.x[0, 0], self.y[0, -1] = NAN, 1e30 if isinstance(cost, SqEuclidean) else NAN
        self.a, self.b = ((w / w.sum(-1, keepdim=True)) for w in (self.a, self.b))
        for name in ("x", "y", "a", "b", "epsilon"):
            setattr(self, name, getattr(self, name).to(DEVICE))

    def costs(self, engine):
        return PairCosts(self.cost, self.x, self.y, engine=engine)

    def solve(self, engine, taus=BALANCED, tolerance=1e-4, most=600, init=None):
        arguments = (self.a, self.b, self.epsilon, taus)
        return streamed.solve(
            self.costs(engine),
            *arguments,
            work=self.x.dtype,
            tolerance=tolerance,
            max_iterations=most,
            init=init,
        )

    def quality(self, f, g, taus=BALANCED):
        return streamed.quality(self.costs("torch"), f, g, self.a, self.b, self.epsilon, taus)

    def scores(self):
        found = kernels.Scores.of(self.costs("streamed"), 0, self.a[0], self.b[0])
        assert found is not None
        return found


# The stored kernel ---------------------------------------------------------------------------------------------------


class Dense:
    """The sweeps of a stored kernel in float64."""

    def __init__(self, q, k, f, g, a, b):
        self.kernel = torch.exp2(f.unsqueeze(-1) + q.double() @ k.double().mT + g)
        self.a, self.b, self.u, self.v = a.double(), b.double(), torch.ones_like(f), torch.ones_like(g)

    def sweep(self, t):
        """The error of the new u and the old v, and the quotient of squared errors."""
        sums = self.kernel @ self.v
        before = (self.a * (self.u * sums - 1).square()).sum()
        current = self.u * sums
        self.u = ((1 + t) + (1 - t) * current) / ((1 - t) + (1 + t) * current) / sums
        columns = self.v * (self.kernel.mT @ (self.a * self.u))
        error = (self.a * (self.u * sums - 1).abs()).sum() + (columns - self.b).abs().sum()
        live = self.b > 0
        after = ((columns - self.b).square() / self.b)[live].sum()
        x = (self.b / columns)[live]
        self.v[live] = self.v[live] * x * ((1 + t) * x + 1 - t) / ((1 - t) * x + 1 + t)
        return float(error), float(after / before)


@pytest.mark.parametrize(
    ("n", "m", "r", "cached"),
    [(37, 75, 17, 96 * 1024), (37, 75, 17, 100), (50, 45, 3, 1500), (1, 33, 2, 96 * 1024), (33, 1, 2, 1)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sweeps_are_those_of_the_dense_kernel(small_blocks, monkeypatch, generator, n, m, r, cached, dtype):
    monkeypatch.setattr(stored, "_CACHED", cached)
    q, k = torch.randn(n, r, generator=generator), torch.randn(m, r, generator=generator)
    a, b = (random_weights(1, size, generator=generator)[0].float() for size in (n, m))
    a[5:7] = 0
    b[3:4] = 0
    a, b = a / a.sum(), b / b.sum()
    f, g = torch.randn(n, dtype=torch.float64, generator=generator), b.double().log2()
    q, k, f, g, a, b = (h.to(DEVICE) for h in (q, k, f, g, a, b))
    dense, kernel = Dense(q, k, f, g, a, b), stored.Kernel(a, b, dtype)
    rows, columns = kernel.build(q, k, f, g)
    # Exact whatever the dtype of the entries.
    torch.testing.assert_close(rows.double(), dense.kernel.sum(-1), rtol=3e-6, atol=0)
    torch.testing.assert_close(columns.double(), dense.kernel.mT @ a.double(), rtol=3e-6, atol=1e-12)
    rounding = 2e-5 if dtype == torch.float32 else 2.0**-7
    for place, t in enumerate((0.0, 0.4, 0.0)):
        error, quotient = dense.sweep(t)
        kernel.sweep(t)
        seen = kernel.look()
        # The first rows are exact in either, since they are corrected.
        torch.testing.assert_close(kernel.u.double(), dense.u, rtol=rounding if place else 5e-6, atol=0)
        torch.testing.assert_close(kernel.v.double()[b > 0], dense.v[b > 0], rtol=2 * rounding, atol=0)
        assert math.isclose(seen.error, error, rel_tol=2e-4, abs_tol=2 * rounding)
        if dtype == torch.float32 and error > 1e-4:
            assert math.isclose(seen.quotient, quotient, rel_tol=1e-3)
        live = torch.cat((dense.u[a > 0], dense.v[b > 0]))
        assert math.isclose(seen.smallest, float(live.min()), rel_tol=2 * rounding)
        assert math.isclose(seen.largest, float(live.max()), rel_tol=2 * rounding)
    assert bool((kernel.v[b == 0] == 1).all())


@pytest.mark.parametrize("size", [(1, 1), (130, 77), (5000, 5000), (50_000, 50_000), (100_000, 3), (100_000, 100_000)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_layouts_cover_the_problem(size, itemsize):
    (n, m), multiprocessors = size, 132
    layout = stored._Layout.of(n, m, itemsize, multiprocessors)
    assert m <= layout.width < m + 16
    assert layout.width % 16 == 0
    assert (layout.parts - 1) * layout.split < m <= layout.parts * layout.split
    assert layout.fused == (4 * m * itemsize <= 96 * 1024)
    assert layout.rows & (layout.rows - 1) == 0
    assert layout.columns & (layout.columns - 1) == 0
    if not layout.fused:
        assert (layout.shares - 1) * layout.share_split < n <= layout.shares * layout.share_split
    # The buffers are small beside the kernel, once it is large.
    assert min(n, m) < 5000 or 4 * layout.shares * m < 0.3 * itemsize * n * m


def test_entries_neither_overflow_nor_vanish_for_all(generator):
    a, b = (torch.full((n,), 1 / n, device=DEVICE) for n in (20, 30))
    q, k = torch.zeros(20, 2, device=DEVICE), torch.zeros(30, 2, device=DEVICE)
    f, g = torch.zeros(20, dtype=torch.float64, device=DEVICE), torch.zeros(30, dtype=torch.float64, device=DEVICE)
    f[0], f[1] = 1e4, -1e4
    kernel = stored.Kernel(a, b)
    rows, _ = kernel.build(q, k, f, g)
    assert bool(rows.isfinite().all())
    assert float(rows[0]) > 1e20
    assert float(rows[1]) == 0
    kernel.sweep(0.0)
    assert bool(kernel.u.isfinite().all() & kernel.v.isfinite().all())


def test_the_corrections_agree_on_the_mass(generator):
    """Rows and columns are corrected each by itself: what they disagree on would be magnified by the relaxation."""
    q, k = (torch.randn(size, 3, generator=generator).to(DEVICE) for size in (16, 12))
    a, b = (torch.full((size,), 1 / size, device=DEVICE) for size in (16, 12))
    g = b.double().log2()
    f = -torch.logsumexp((q.double() @ k.double().mT + g) * math.log(2), -1) / math.log(2)
    kernel = stored.Kernel(a, b)
    kernel.build(q, k, f, g)
    found = []
    for t in (0.0, 0.0, 0.9, 0.9, 0.9, 0.9):
        for _ in range(10):
            kernel.sweep(t)
        found.append(kernel.look().error)
    assert found[-1] < 5e-6


# Solutions -----------------------------------------------------------------------------------------------------------


def assert_same_solution(case, engine, taus=BALANCED, tolerance=1e-4, **options):
    f, g, iterations = case.solve(engine, taus, tolerance, **options)
    want = case.solve("torch", taus, 1e-3 * tolerance, most=3000)
    error, gap, value = case.quality(f, g, taus)
    assert float(error) <= tolerance
    assert iterations.dtype == torch.int64
    limit = float(gap) if taus == BALANCED else 5 * tolerance
    torch.testing.assert_close(value, case.quality(*want[:2], taus)[2], rtol=1e-9, atol=limit + 1e-9)
    assert bool(torch.isfinite(f).all() & torch.isfinite(g).all())
    return iterations


@each_engine
@each_cost
@pytest.mark.parametrize(("ratio", "shift"), [(1.0, 0.0), (0.1, 20.0), (0.02, 0.0)])
def test_couplings_are_those_of_blocks(engine, cost, ratio, shift):
    assert_same_solution(Case(cost, ratio, shift=shift), engine)


@each_engine
@each_cost
def test_padding_may_be_anything(engine, cost):
    case = Case(cost, zeros=True, spoiled=True)
    f, g, _ = case.solve(engine, tolerance=1e-9)
    want_f, want_g, _ = case.solve("torch", tolerance=1e-9)
    assert float(case.quality(f, g)[0]) <= 1e-9
    # Also the potentials of padding, where it has a cost.
    shift = (f - want_f)[0, -1]
    torch.testing.assert_close((f - shift)[0, 1:], want_f[0, 1:], rtol=0, atol=1e-7)
    torch.testing.assert_close((g + shift)[0, :-1], want_g[0, :-1], rtol=0, atol=1e-7)


@each_engine
@pytest.mark.parametrize(("n", "m"), [(70, 11), (9, 100), (1, 7), (7, 1), (1, 1)])
def test_any_shape(engine, n, m):
    case = Case(SqEuclidean(), n=n, m=m)
    case.epsilon = case.epsilon.clamp_min(0.1)
    assert_same_solution(case, engine)


@pytest.mark.parametrize("taus", [(0.8, 0.6), (1.0, 0.5), (0.7, 1.0), (1.0, 0.0), (0.0, 0.0)])
@pytest.mark.parametrize("zeros", [False, True])
def test_penalised_problems_are_those_of_blocks(taus, zeros):
    assert_same_solution(Case(SqEuclidean(), zeros=zeros), "streamed", taus)


@each_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_more_than_float32_is_reached(engine, dtype):
    """Kernels begin, blocks in float64 go on."""
    assert_same_solution(Case(SqEuclidean(), 0.05, dtype=dtype), engine, tolerance=1e-9)


def test_the_rounding_of_the_entries_is_no_limit():
    """Seven bits of mantissa, and an error of the order of float32, measured in float64."""
    case = Case(SqEuclidean(), 0.03)
    scores, epsilon = case.scores(), float(case.epsilon)
    start = torch.zeros_like(case.a[0]), torch.zeros_like(case.b[0])
    f, g, spent, _ = scores.descend(*start, epsilon, 8 * epsilon, 5e-6, 300)
    assert spent < 300
    assert float(case.quality(f.unsqueeze(0), g.unsqueeze(0))[0]) <= 6e-6


@pytest.mark.slow
def test_a_kernel_in_float32_needs_fewer_of_them(monkeypatch):
    case = Case(SqEuclidean(), 0.01)
    scores, epsilon = case.scores(), float(case.epsilon)
    built = []
    build = stored.Kernel.build
    monkeypatch.setattr(stored.Kernel, "build", lambda self, *x: built.append(self.dtype) or build(self, *x))
    for dtype in (torch.float32, torch.bfloat16):
        start = torch.zeros_like(case.a[0]), torch.zeros_like(case.b[0])
        f, g, _, _ = scores.descend(*start, epsilon, epsilon, 1e-5, 500, dtype)
        assert float(case.quality(f.unsqueeze(0), g.unsqueeze(0))[0]) <= 2e-5
    assert 2 <= built.count(torch.float32) < built.count(torch.bfloat16) <= 8


def test_stored_sweeps_are_relaxed(monkeypatch):
    case = Case(SqEuclidean(), 0.02, n=16, m=12)
    scores, epsilon = case.scores(), float(case.epsilon)
    start = torch.zeros_like(case.a[0]), torch.zeros_like(case.b[0])
    _, _, spent, memory = scores.descend(*start, epsilon, epsilon, 1e-5, 2000)
    assert float(memory.t[0]) > 0.1
    monkeypatch.setattr(Relaxation, "update", lambda self, *x: self.t)
    _, _, plain, _ = scores.descend(*start, epsilon, epsilon, 1e-5, 2000)
    assert 1.5 * spent < plain < 2000


@each_engine
def test_potentials_far_away_are_found_again(engine):
    """Kernels of which whole rows and columns are out of the range of float32."""
    case = Case(SqEuclidean(), 0.05)
    init = torch.zeros_like(case.a), torch.zeros_like(case.b)
    init[1][0, 3], init[1][0, 5] = -300.0, 200.0
    init[0][0, 4] = 1e4
    assert_same_solution(case, engine, init=init)


@pytest.mark.slow
def test_weights_from_huge_to_tiny(generator):
    case = Case(SqEuclidean(), 0.02)
    for name, size in (("a", 6), ("b", 12)):
        w = torch.exp(size * torch.randn(1, getattr(case, name).shape[1], generator=generator, dtype=torch.float64))
        setattr(case, name, (w / w.sum()).to(DEVICE))
    for engine in ENGINES:
        f, g, _ = case.solve(engine)
        assert float(case.quality(f, g)[0]) <= 1e-4


@each_engine
def test_a_start_close_by_is_used(engine):
    case = Case(SqEuclidean(), 0.1)
    f, g, cold = case.solve(engine, tolerance=1e-5)
    again = case.solve(engine, tolerance=1e-5, init=(f, g))
    assert int(again[2]) <= 2 < int(cold)


@each_engine
@pytest.mark.parametrize("most", [1, 2, 15])
def test_all_iterations_are_spent_on_a_negative_tolerance(engine, most):
    f, g, iterations = Case(ratio=0.02).solve(engine, tolerance=-1.0, most=most)
    assert int(iterations) == most
    assert bool(torch.isfinite(f).all() & torch.isfinite(g).all())


@each_engine
def test_what_did_not_converge_says_so(engine):
    case = Case(SqEuclidean(), 0.003)
    f, g, iterations = case.solve(engine, most=7)
    assert int(iterations) == 7
    error, gap, _ = case.quality(f, g)
    plan = ops.plan(case.cost(case.x.double(), case.y.double()), f, g, case.a, case.b, case.epsilon)
    torch.testing.assert_close(error, (plan.sum(-2) - case.b).abs().sum(-1))  # the rows are exact
    torch.testing.assert_close(plan.sum(-1), case.a, rtol=1e-12, atol=0)
    assert float(error) > 1e-3
    assert float(gap) > 0


@each_engine
@pytest.mark.parametrize("wrong", [NAN, INF, 2e15])
def test_points_that_are_none_are_reported(engine, wrong):
    case = Case(SqEuclidean())
    case.x[0, 4, 2] = wrong
    f, g, iterations = case.solve(engine)
    assert not f.any()
    assert int(iterations) == 0
    assert bool(case.quality(f, g)[2].isnan())


def test_a_batch_is_its_problems():
    one, other = Case(SqEuclidean(), 0.2), Case(SqEuclidean(), 1.0)
    other.x = other.x.flip(1)
    both = Case(SqEuclidean())
    for name in ("x", "y", "a", "b", "epsilon"):
        setattr(both, name, torch.cat((getattr(one, name), getattr(other, name))))
    for engine in ENGINES:
        f, g, iterations = both.solve(engine)
        for k, case in enumerate((one, other)):
            want = case.solve(engine)
            torch.testing.assert_close((f[k], g[k], iterations[k]), tuple(h[0] for h in want), rtol=0, atol=0)


@each_engine
def test_sweeps_of_kernels_make_no_blocks(engine, monkeypatch):
    """But for the last one, in float64."""
    asked = []
    blocks = Pairs.blocks
    monkeypatch.setattr(Pairs, "blocks", lambda self: asked.append(self.dtype) or blocks(self))
    Case(SqEuclidean(), 0.1).solve(engine)
    assert asked == [torch.float64]


# Derivatives ---------------------------------------------------------------------------------------------------------


def derivatives(case, engine, taus):
    """Gradients of the value, and of a function of both potentials, in all that a problem is made of."""
    generator = torch.Generator().manual_seed(1)
    f, g, _ = case.solve("torch", taus, tolerance=1e-9)
    value = case.quality(f, g, taus)[2]
    leaves = [case.x, case.y, case.a, case.b, case.epsilon]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    x, y, a, b, epsilon = leaves
    costs = PairCosts(case.cost, x, y, engine=engine)
    f, g, value = streamed.implicit(costs, a, b, epsilon, f, g, value, taus, work=case.x.dtype)
    probes = [torch.randn(h.shape, generator=generator, dtype=torch.float64).to(DEVICE) for h in (f, g)]
    if taus == BALANCED:  # their common constant has no derivative
        probes[0] = probes[0] - (probes[0].sum() - probes[1].sum()) * case.a
    potentials = (f * probes[0]).sum() + (g * probes[1]).sum()
    return [h for output in (value.sum(), potentials) for h in grad(output, leaves, retain_graph=True)]


@each_cost
@pytest.mark.parametrize("taus", [BALANCED, (0.8, 0.6), (0.5, 1.0)])
@pytest.mark.parametrize("zeros", [False, True])
def test_derivatives_are_those_of_blocks(cost, taus, zeros):
    case = Case(cost, 0.1, zeros=zeros, shift=1.0)
    have, blocks = (derivatives(case, engine, taus) for engine in ("streamed", "torch"))
    case.x, case.y = case.x.double(), case.y.double()
    exact = derivatives(case, "torch", taus)
    for place, (h, block, w) in enumerate(zip(have, blocks, exact, strict=True)):
        size = float(w.abs().max())
        if place < 5:  # of the value, which needs no linear solve
            torch.testing.assert_close(h.double(), w, rtol=0, atol=1e-6 * size)
        # Conjugate gradients stop at the same residual, which is what is left of an error.
        torch.testing.assert_close(h, block, rtol=0, atol=1e-5 * size)


def test_derivatives_by_kernels_make_no_blocks(monkeypatch):
    def refuse(self):
        raise AssertionError("a block")

    case = Case(SqEuclidean(), zeros=True)
    f, g, _ = case.solve("torch")
    value = case.quality(f, g)[2]
    x = case.x.clone().requires_grad_()
    costs = PairCosts(case.cost, x, case.y, engine="stored")
    f, g, value = streamed.implicit(costs, case.a, case.b, case.epsilon, f, g, value, BALANCED, work=torch.float32)
    monkeypatch.setattr(Pairs, "blocks", refuse)
    (found,) = grad(value.sum() + g[0, :5].square().sum(), x)
    assert bool(found.isfinite().all())


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "cost", "mask", "taus", "reason"),
    [
        ("streamed", Euclidean(), None, BALANCED, r"expected NegativeDot or SqEuclidean .* received Euclidean"),
        ("stored", Matrix(torch.zeros(1, 30, 25)), None, BALANCED, "inner products"),
        ("streamed", NegativeDot(), torch.zeros(1, 30, 25), BALANCED, "with a mask"),
        ("stored", NegativeDot(), None, (1.0, 0.5), "couplings"),
    ],
)
def test_what_the_kernels_cannot_solve_is_refused(engine, cost, mask, taus, reason):
    case = Case()
    costs = PairCosts(cost, case.x, case.y, mask, engine=engine)
    arguments = (costs, case.a, case.b, case.epsilon)
    with pytest.raises(BackendError, match=reason):
        streamed.solve(*arguments, taus, work=torch.float32, tolerance=1e-4, max_iterations=10)
    with pytest.raises(BackendError, match=reason):
        streamed.implicit(*arguments, case.a, case.b, case.epsilon, taus, work=torch.float32)


def test_a_device_without_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(ops.triton, "unavailable", lambda device: "no GPU here")
    with pytest.raises(BackendError, match="no GPU here"):
        Case().solve("streamed")
