"""The engines against each other, and the choice among them."""

import sys
import threading

import pytest
import torch
from oracles import plan, random_measure, random_weights, tensor
from torch import Tensor
from torch.autograd import grad

import sinkformer as sf
from sinkformer import Coupling, Measure, ops, sinkhorn, streamed, sweeps, use_backend
from sinkformer.costs import NegativeDot, SqEuclidean, forbid
from sinkformer.errors import BackendError, ConfigError, DTypeError
from sinkformer.ops import cpu, dispatch
from sinkformer.ops.dispatch import BACKENDS, MOST_STORED, Asked, choose

CPU, PENALISED = torch.device("cpu"), (0.9, 0.7)
CUDA = torch.device("cuda")
NO_NUMBA = "numba cannot be imported"

needs_numba = pytest.mark.skipif(cpu.unavailable() is not None, reason="the compiled kernels need numba, extra [fast]")
needs_interpreter = pytest.mark.skipif(
    dispatch.triton.unavailable(CPU) is not None, reason="the GPU kernels run here in triton's interpreter, extra [gpu]"
)
CPU_ENGINE = pytest.param("cpu", marks=needs_numba)
ON_ANY = [backend for backend in BACKENDS[1:] if not backend.startswith("triton")]
# The compiled kernels solve couplings only; the reference is what the others are compared with.
of_couplings = pytest.mark.parametrize("backend", [CPU_ENGINE, "absorbed", "streamed"])
of_all = pytest.mark.parametrize("backend", [CPU_ENGINE, *ON_ANY])
of_penalised = pytest.mark.parametrize("backend", ["absorbed", "streamed"])


def ragged(seed: int, dtype: torch.dtype = torch.float64):
    """Four problems of at most 9 x 7 atoms: costs of range one, weights with padding."""
    generator = torch.Generator().manual_seed(seed)
    cost = torch.rand(4, 9, 7, generator=generator, dtype=torch.float64)
    a, b = random_weights(4, 9, generator=generator), random_weights(4, 7, generator=generator)
    a[1, 5:], b[1, 3:], a[2, 1:], b[3, 0] = 0, 0, 0, 0
    a, b = ((w / w.sum(-1, keepdim=True)).to(dtype) for w in (a, b))
    return cost.to(dtype), a, b, torch.randn(cost.shape, generator=generator, dtype=torch.float64)


def solved(backend: str, cost, a, b, epsilon, upstream, **options):
    """The solution, its plan, and the gradients of <plan, upstream> and of a weighted value in the costs."""
    leaf = cost.clone().requires_grad_()
    with use_backend(backend):
        pi = Coupling.solve(a, b, cost=leaf, epsilon=epsilon, **options)
    dense = pi.to_dense()
    of_plan = grad((dense * upstream.to(dense.dtype)).sum(), leaf, retain_graph=True)[0]
    of_value = grad((pi.value * torch.arange(1, 5, dtype=dense.dtype)).sum(), leaf)[0]
    return pi.solution.map(Tensor.detach), dense.detach(), of_plan, of_value


def relative(found: Tensor, wanted: Tensor) -> float:
    """Relative L2 error of the worst problem; absolute for one that has a single coupling, whose gradient is zero."""
    difference = (found.double() - wanted.double()).flatten(1).norm(dim=-1)
    return float((difference / wanted.double().flatten(1).norm(dim=-1).clamp_min(1e-3)).max())


# Agreement -----------------------------------------------------------------------------------------------------------


def assert_same(backend, seed, epsilon, **taus):
    cost, a, b, upstream = ragged(seed)
    options = {"tolerance": 1e-12, "max_iterations": 20_000, **taus}
    one = solved(backend, cost, a, b, epsilon, upstream, **options)
    other = solved("reference", cost, a, b, epsilon, upstream, **options)
    assert (one[0].engine.backend, other[0].engine.backend) == (backend, "reference")
    assert one[0].converged.all()
    for weights, h, k in ((a, one[0].f, other[0].f), (b, one[0].g, other[0].g)):
        # Gauge: the difference of two solutions is a constant, taken at the atoms of weight.
        difference = (h - k).masked_fill(weights == 0, 0.0)
        constant = (weights * difference).sum(-1, keepdim=True)
        assert ((h - k - constant).masked_fill(weights == 0, 0.0).abs() < 1e-9).all()
        assert not taus or (constant.abs() < 1e-9).all(), "penalised potentials have no gauge"
    assert torch.allclose(one[0].value, other[0].value, rtol=0, atol=1e-11)
    assert torch.allclose(one[1], other[1], rtol=0, atol=1e-11)
    assert relative(one[2], other[2]) < 1e-7
    assert relative(one[3], other[3]) < 1e-9


@of_couplings
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("epsilon", [1.0, 0.1, 0.03])
def test_couplings_and_their_derivatives_are_those_of_the_reference(backend, seed, epsilon):
    assert_same(backend, seed, epsilon)


@needs_interpreter
def test_the_kernels_on_the_chip_solve_and_differentiate_as_the_reference():
    assert_same("triton_small", 0, 0.1)


@needs_interpreter
@pytest.mark.parametrize("backend", ["triton_small", "triton_streamed", "triton_stored"])
def test_a_model_runs_on_the_gpu_kernels(backend, generator):
    model = sf.SinkhornTransformer(
        sf.SinkhornTransformerConfig(2, 2, width=16, depth=1, heads=2, rank=8, tolerance=1e-4)
    )
    mu, nu = (random_measure(size, generator=generator).to(torch.float32) for size in (6, 5))
    found = []
    for engine in (backend, "reference"):
        model.zero_grad()
        with use_backend(engine):
            pi = model(mu, nu)
            (pi @ nu.points).square().sum().backward()
        assert pi.solution.engine.backend == engine
        assert pi.solution.converged
        found.append(
            (pi.to_dense().detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        )
    (plan_a, grad_a), (plan_b, grad_b) = found
    assert torch.allclose(plan_a, plan_b, rtol=0, atol=1e-4)
    assert float((grad_a - grad_b).norm() / grad_b.norm()) < 1e-2


@of_penalised
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("taus", [PENALISED, (1.0, 0.5), (0.0, 1.0)])
def test_penalised_plans_and_their_derivatives_are_those_of_the_reference(backend, seed, taus):
    assert_same(backend, seed, 0.1, tau_a=taus[0], tau_b=taus[1])


@of_all
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-4])
@pytest.mark.parametrize("epsilon", [1.0, 0.1, 0.003])
def test_the_error_that_is_reported_is_that_of_the_plan(backend, dtype, tolerance, epsilon):
    cost, a, b, _ = ragged(5, dtype)
    for most in (8, 2000):
        with use_backend(backend):
            solution = sinkhorn(
                a, b, cost=cost, epsilon=epsilon, tolerance=tolerance, max_iterations=most, on_failure="ignore"
            )
        left, right = ((w.double() / w.double().sum(-1, keepdim=True)) for w in (a, b))
        p = plan(solution, cost.double(), left, right, epsilon)
        error = (p.sum(-1) - left).abs().sum(-1) + (p.sum(-2) - right).abs().sum(-1)
        # The kernels take the exponentials of float32 problems in float32, and stop that much earlier.
        close = 1e-7 if backend == "cpu" and dtype == torch.float32 else 1e-11
        assert torch.allclose(solution.marginal_error, error, rtol=0, atol=close)
        assert torch.equal(solution.converged, solution.marginal_error <= tolerance)
        assert (error[solution.converged] <= tolerance).all()
        assert (solution.iterations <= most).all()
    assert solution.converged.all()


@of_all
@pytest.mark.parametrize("cost", [SqEuclidean(), NegativeDot()])
def test_gradients_in_the_points_agree(backend, cost, generator):
    mu, nu = random_measure(2, 6, generator=generator), random_measure(2, 5, generator=generator)
    found = {}
    for name in (backend, "reference"):
        x, w = mu.points.clone().requires_grad_(), mu.weights.clone().requires_grad_()
        with use_backend(name):
            pi = Coupling.solve(Measure(x, w), nu, cost=cost, epsilon=0.1, tolerance=1e-12, max_iterations=10_000)
        of_x, of_w = grad(pi.to_dense().square().sum() + pi.value.sum(), (x, w))
        found[name] = of_x, of_w - of_w.mean(-1, keepdim=True)  # weights move with their total only
    for one, other in zip(found[backend], found["reference"], strict=True):
        assert relative(one, other) < 1e-7


@of_all
def test_the_engine_that_is_named_is_the_one_that_ran(backend, monkeypatch):
    ran = []

    def spy(room, name, note):
        exact = getattr(room, name)
        monkeypatch.setattr(room, name, lambda *x, **y: ran.append(note(x)) or exact(*x, **y))

    spy(cpu, "solve", lambda _: "cpu")
    spy(streamed, "solve", lambda _: "streamed")
    spy(sweeps.Loop, "prepare", lambda x: x[-1])
    cost, a, b, _ = ragged(0)
    with use_backend(backend):
        solution = sinkhorn(a, b, cost=cost, epsilon=0.5)
    assert ran == [backend]
    assert sf.explain(solution) == f"{backend}: asked for by use_backend"


# Gradients to a tolerance --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [CPU_ENGINE, "absorbed"])
@pytest.mark.parametrize(
    ("dtype", "asked"), [(torch.float32, 1e-3), (torch.float32, 1e-4), (torch.float64, 1e-3), (torch.float64, 1e-7)]
)
@pytest.mark.parametrize("epsilon", [0.3, 0.05])
def test_the_gradient_tolerance_is_met_by_the_worst_problem(backend, dtype, asked, epsilon):
    cost, a, b, upstream = ragged(7, dtype)
    options = {"tolerance": 1e-13, "max_iterations": 50_000, "on_failure": "ignore"}
    left, right = ((w.double() / w.double().sum(-1, keepdim=True)) for w in (a, b))
    exact = solved("reference", cost.double(), left, right, epsilon, upstream, **options)
    solution, _, of_plan, _ = solved(
        backend, cost, a, b, epsilon, upstream, gradient_tolerance=asked, max_iterations=5000
    )
    default = 1e-4 if dtype == torch.float32 else 1e-9
    assert solution.tolerance == min(default, asked / 10)
    assert solution.converged.all()
    assert relative(of_plan, exact[2]) < asked


@of_all
@pytest.mark.parametrize("epsilon", [0.5, 0.05])
def test_the_conditioning_is_filled_in_by_the_backward_pass(backend, epsilon, generator):
    cost = torch.rand(2, 6, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    a, b = random_weights(2, 6, generator=generator), random_weights(2, 5, generator=generator)
    with use_backend(backend):
        solution = sinkhorn(a, b, cost=cost, epsilon=epsilon, tolerance=1e-11, gradient_tolerance=1e-9)
    assert solution.conditioning.isnan().all()
    grad(solution.value.sum(), cost, retain_graph=True)
    assert solution.conditioning.isnan().all(), "the value needs no solve"
    grad((ops.plan(cost, *solution.potentials, a, b, tensor(epsilon, epsilon)) ** 2).sum(), cost)
    p = plan(solution, cost, a, b, epsilon).detach()
    correlations = torch.linalg.svdvals(p / (p.sum(-1, keepdim=True) * p.sum(-2, keepdim=True)).sqrt())
    assert torch.allclose(solution.conditioning, 1 - correlations[:, 1].square(), rtol=1e-3)


# The choice ----------------------------------------------------------------------------------------------------------


def asked(device=CPU, n=3, m=4, **changes) -> Asked:
    return Asked(device=device, n=n, m=m, **{"from_points": True, **changes})


MANY = {"n": 1, "m": MOST_STORED + 1}


@pytest.mark.parametrize(
    ("problem", "backend", "reason"),
    [
        pytest.param(asked(), "cpu", "couplings on the CPU, and numba is there", marks=needs_numba),
        (asked(taus=PENALISED), "absorbed", "not cpu: the compiled kernels solve couplings"),
        (asked(**MANY), "streamed", f"{MOST_STORED + 1} pairs in one problem are more than"),
        (asked(CUDA, taus=PENALISED, **MANY), "streamed", "more than"),
        pytest.param(asked(n=1, m=MOST_STORED), "cpu", "", marks=needs_numba),
        pytest.param(asked(from_points=False, **MANY), "cpu", "", marks=needs_numba),
        (asked(unrolled=True), "reference", "differentiates the log-domain sweeps"),
        (asked(unrolled=True, **MANY), "reference", "differentiates the log-domain sweeps"),
    ],
)
def test_the_problem_chooses_its_engine(problem, backend, reason):
    choice = choose(problem)
    assert choice.backend == backend
    with pytest.raises(AssertionError, match=f"^{backend}: .*{reason}"):
        raise AssertionError(str(choice))


LARGE = {"n": 10_000, "m": 10_000, "inner_products": True, "narrow": True}


@pytest.mark.parametrize(
    ("problem", "backend", "reason"),
    [
        (asked(CUDA), "triton_small", "3 x 4 atoms fit on the chip"),
        (asked(CUDA, from_points=False, narrow=True), "triton_small", "fit on the chip"),
        (asked(CUDA, taus=PENALISED), "absorbed", "not triton: the kernels on the chip solve couplings"),
        (asked(CUDA, unrolled=True), "reference", ""),
        (asked(CUDA, **LARGE), "triton_stored", "takes 191 MiB in bfloat16"),
        (asked(CUDA, **{**LARGE, "m": 30_000}), "triton_streamed", "a stored kernel would take 572 MiB"),
        (asked(CUDA, taus=PENALISED, **LARGE), "triton_streamed", "penalised"),
        (asked(CUDA, unrolled=True, **LARGE), "reference", ""),
        (asked(CUDA, **{**LARGE, "tolerance": 1e-6}), "absorbed", "beyond sums in float32"),
        (asked(CUDA, **{**LARGE, "tolerance": 0.0}), "triton_stored", ""),
        (asked(CUDA, **{**LARGE, "narrow": False}), "absorbed", "float64 throughout"),
        (asked(CUDA, **{**LARGE, "m": 100_000, "narrow": False}), "streamed", "more than"),
        (asked(CUDA, **{**LARGE, "inner_products": False}), "absorbed", "must be NegativeDot or SqEuclidean"),
        (asked(CUDA, **{**LARGE, "n": 500, "m": 500}), "absorbed", "250000 pairs are fewer than"),
    ],
)
def test_a_gpu_has_engines_of_its_own(problem, backend, reason, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(dispatch.triton, "_import_triton", lambda: None)
    monkeypatch.setattr(dispatch, "_free_bytes", lambda device: 2**29)
    choice = choose(problem)
    assert choice.backend == backend
    assert reason in choice.reason


def test_on_a_gpu_without_triton_plain_torch_runs_and_says_why(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(dispatch.triton, "_found", False)
    monkeypatch.setattr(dispatch.triton, "_missing", None)
    for problem in (asked(CUDA), asked(CUDA, **LARGE)):
        choice = choose(problem)
        assert choice.backend == "absorbed"
        assert "not triton: triton cannot be imported" in choice.reason
        assert "pip install 'sinkformer[gpu]'" in choice.reason
    with use_backend("triton_small"), pytest.raises(BackendError, match="triton cannot be imported"):
        choose(asked(CUDA))


def test_kernels_for_a_gpu_are_not_chosen_for_the_cpu_nor_in_their_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose(asked(**LARGE)).backend in ("cpu", "absorbed")
    assert "for tests" in choose(asked(CUDA)).reason
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with use_backend("triton_small"), pytest.raises(BackendError, match="run on CUDA devices, the measures are on cpu"):
        choose(asked())


def test_large_problems_of_points_are_streamed_and_masked_ones_are_not(monkeypatch, generator):
    monkeypatch.setattr(dispatch, "MOST_STORED", 11)
    mu, nu = random_measure(4, generator=generator), random_measure(3, generator=generator)
    mask = forbid(torch.eye(4, 3, dtype=torch.bool), dtype=torch.float64)
    assert sf.explain(Coupling.solve(mu, nu, epsilon=0.5)).startswith("streamed: 12 pairs in one problem")
    matrix = SqEuclidean()(mu.points, nu.points)
    for options in ({"mask": mask}, {"cost": matrix}):
        assert sinkhorn(mu, nu, epsilon=0.5, **options).engine.backend in ("cpu", "absorbed")
    assert sinkhorn(mu, nu, epsilon=0.5, gradient="unrolled").engine.backend == "reference"


@pytest.mark.parametrize(
    ("backend", "options", "reason"),
    [
        pytest.param("cpu", {"tau_a": 0.5}, r"solve couplings .*received taus \(0\.5, 1\.0\)"),
        ("cpu", {"gradient": "unrolled"}, "differentiates the log-domain sweeps"),
        ("absorbed", {"gradient": "unrolled"}, "differentiates the log-domain sweeps"),
        ("streamed", {"gradient": "unrolled"}, "stores every sweep"),
    ],
)
def test_an_engine_that_cannot_solve_the_problem_says_why_and_is_not_replaced(backend, options, reason):
    half = tensor(0.5, 0.5)
    message = f"the backend '{backend}' was asked for and cannot solve this problem: .*{reason}"
    with use_backend(backend), pytest.raises(BackendError, match=message):
        sinkhorn(half, half, cost=torch.eye(2).double(), epsilon=0.5, **options)


def test_the_kernels_refuse_other_devices():
    with use_backend("cpu"), pytest.raises(BackendError, match="run on the CPU, the measures are on cuda:1"):
        choose(asked(torch.device("cuda", 1)))


@pytest.fixture
def no_numba(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(cpu, "_kernels", None)
    monkeypatch.setattr(cpu, "_unavailable", None)


@pytest.mark.usefixtures("no_numba")
def test_without_numba():
    half = tensor(0.5, 0.5)
    solution = sinkhorn(half, half, cost=torch.eye(2).double(), epsilon=0.5)
    assert solution.converged
    assert sf.explain(solution).startswith(f"absorbed: not cpu: {NO_NUMBA}")
    assert "pip install 'sinkformer[fast]'" in solution.engine.reason
    with use_backend("cpu"), pytest.raises(BackendError, match=NO_NUMBA):
        sinkhorn(half, half, cost=torch.eye(2).double(), epsilon=0.5)
    with pytest.raises(BackendError, match=NO_NUMBA):
        sf.warm_up()


@needs_numba
def test_warm_up_returns_seconds():
    assert 0 < sf.warm_up() < 300
    assert sf.warm_up() < 5


def forced() -> str:
    return choose(asked(taus=PENALISED)).reason


def chosen() -> str:
    return choose(asked(taus=PENALISED)).backend


def test_blocks_are_nested_and_end():
    free = choose(asked(taus=PENALISED))
    with use_backend("reference"):
        assert chosen() == "reference"
        with use_backend("streamed"):
            assert chosen() == "streamed"
            with use_backend(None):
                assert choose(asked(taus=PENALISED)) == free
            assert chosen() == "streamed"
        assert (chosen(), forced()) == ("reference", "asked for by use_backend")
    assert choose(asked(taus=PENALISED)) == free


def test_a_block_ends_with_an_exception():
    with pytest.raises(KeyError), use_backend("streamed"):
        raise KeyError
    with pytest.raises(BackendError), use_backend("cpu"):
        chosen()
    assert chosen() == "absorbed"


def test_a_block_is_of_its_thread():
    seen, inside, done = [], threading.Event(), threading.Event()

    def other():
        inside.wait(10)
        seen.append(chosen())
        with use_backend("streamed"):
            seen.append(chosen())
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with use_backend("reference"):
        inside.set()
        assert done.wait(10)
        assert chosen() == "reference"
    thread.join()
    assert seen == ["absorbed", "streamed"]


@pytest.mark.parametrize("name", ["numba", "CPU", "", 3])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(ConfigError, match=r"a backend of cpu, absorbed, streamed, reference, triton_small, .* or None"):
        with use_backend(name):
            raise AssertionError
    assert chosen() == "absorbed"


def test_explain_takes_a_solution_or_what_has_one():
    half = tensor(0.5, 0.5)
    with use_backend("absorbed"):
        pi = Coupling.solve(half, half, cost=torch.eye(2).double(), epsilon=0.5)
    assert sf.explain(pi) == sf.explain(pi.solution) == str(pi.solution.engine) == "absorbed: asked for by use_backend"
    assert sf.explain(pi.solution.transposed()) == sf.explain(pi)
    for wrong in (half, None, Coupling.from_dense(*(Measure.uniform(half[:, None]),) * 2, torch.eye(2).double() / 2)):
        with pytest.raises(DTypeError, match="a Solution, or a coupling that was solved, received"):
            sf.explain(wrong)


# Large epsilon ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [CPU_ENGINE, pytest.param("triton_small", marks=needs_interpreter), *ON_ANY])
@pytest.mark.parametrize("epsilon", [1e2, 1e4, 1e6, 1e8])
def test_the_value_of_a_large_epsilon_keeps_its_digits_in_float32(backend, epsilon):
    a, b = tensor(0.5, 0.5).float(), tensor(0.3, 0.7).float()
    with use_backend(backend):
        solution = sinkhorn(a, b, cost=torch.eye(2).flip(0), epsilon=epsilon)
    assert solution.converged
    # The product measure costs one half, and the entropy of what differs from it is 1 / epsilon.
    assert abs(float(solution.value) - 0.5) < 1e-4 + 0.1 / epsilon
