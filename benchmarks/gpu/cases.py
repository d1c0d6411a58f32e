"""What is measured, each with the answer that must be right before its time counts and the least time it could take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

import sinkformer as sf
from benchmarks.gpu import cards, solvers
from benchmarks.gpu.cards import Work
from benchmarks.gpu.problems import Clouds, clouds, ragged
from benchmarks.gpu.solvers import Solver
from sinkformer.attention import sinkhorn_attention
from sinkformer.ops import scores

DIMENSION = 64


@dataclass(frozen=True)
class Sizes:
    """How large the problems are: ``FULL`` on a card, ``REHEARSAL`` where the kernels run in their interpreter."""

    one: int
    huge: int
    batch: int
    most: int
    iterations: int
    gradient: int


FULL = Sizes(one=10_000, huge=50_000, batch=4096, most=64, iterations=100, gradient=4096)
REHEARSAL = Sizes(one=70, huge=90, batch=3, most=12, iterations=6, gradient=40)


@dataclass(frozen=True)
class Run:
    """One line of a table.

    Attributes:
        name: who ran.
        call: what is timed.
        check: the error of its result.
        work: what bounds its time; None where nobody claims anything.
        share: of the work that ``call`` does.
    """

    name: str
    call: Callable[[], object]
    check: Callable[[object], float]
    work: Work | None = None
    share: float = 1.0


@dataclass(frozen=True)
class Case:
    """A table: runs of the same task.

    Attributes:
        name: heading.
        target: error that a run must reach to get a time.
        runs: the first is the one that the others are compared with.
    """

    name: str
    target: float
    runs: list[Run] = field(default_factory=list)


def all_cases(sizes: Sizes, device: torch.device) -> Iterator[Callable[[], Case]]:
    """Makers of the cases, most wanted first; each makes its data when called."""
    yield lambda: log_sum_exp(sizes, device)
    yield lambda: one_problem(sizes.one, sizes.iterations, device)
    yield lambda: small_problems(sizes, device)
    yield lambda: gradients(sizes, device)
    yield lambda: attention(sizes, device)
    yield lambda: one_problem(sizes.huge, max(2, sizes.iterations // 10), device, dense=False)


def log_sum_exp(sizes: Sizes, device: torch.device) -> Case:
    """One pass of the streamed kernel in three precisions, and plain torch; error relative to float64."""
    n, d = sizes.one, DIMENSION
    data = clouds([(n, n)], d, 0.05, device)
    scale, h = 1 / data.epsilon, data.b.log()
    exact = _exact_log_sum_exp(data, h, scale)

    def check(found: object) -> float:
        assert isinstance(found, Tensor)
        return float((found.double() - exact).abs().max())

    def ours(products: str) -> Run:
        dtype = torch.bfloat16 if products == "bf16" else torch.float32
        x, y = data.x.to(dtype), data.y.to(dtype)
        precision = "ieee" if products == "float32" else "tf32"

        def call() -> Tensor:
            with scores.use_kernels(True):
                return scores.log_sum_exp(x, y, h, scale=scale, precision=precision)

        return Run(f"sinkformer, {products}", call, check, cards.log_sum_exp(n, n, d, products))

    def dense() -> Tensor:
        return torch.logsumexp((data.x @ data.y.mT) * scale.view(-1, 1, 1) + h.unsqueeze(-2), -1)

    runs = [ours("tf32"), ours("float32"), ours("bf16"), Run("plain torch", dense, check)]
    # Exponents of size 1 / epsilon times the rounding of a TF32 or bfloat16 product.
    return Case(f"streamed log-sum-exp, n = m = {n}, d = {d}", float(scale.max()) * 2**-8, runs)


def _exact_log_sum_exp(data: Clouds, h: Tensor, scale: Tensor) -> Tensor:
    parts = [
        torch.logsumexp((x.double() @ data.y[0].double().mT) * scale[0].double() + h[0].double(), -1)
        for x in data.x[0].split(1000)
    ]
    return torch.cat(parts).unsqueeze(0)


def one_problem(n: int, iterations: int, device: torch.device, *, dense: bool = True) -> Case:
    """So many iterations on one large problem; the error says what they were worth."""
    data = clouds([(n, n)], DIMENSION, 0.05, device)
    streamed = cards.log_sum_exp(n, n, DIMENSION, "float32") * (2 * iterations)
    stored = cards.stored_sweep(n, n, 2) * iterations
    found: list[tuple[Solver, Work | None]] = [
        (solvers.sinkformer("triton_stored", iterations=iterations), stored),
        (solvers.sinkformer("triton_streamed", iterations=iterations), streamed),
        (solvers.sinkformer("streamed", iterations=iterations), streamed),
    ]
    if solvers.installed("flash_sinkhorn") and device.type == "cuda":
        for kind in ("alternating", "symmetric"):
            found += [(solvers.flash_sinkhorn(kind, iterations, tf32=tf32), None) for tf32 in (True, False)]
    if dense:
        found += [(solvers.plain_torch(iterations), None)]
        if device.type == "cuda":
            found += [(solvers.plain_torch(iterations, compiled=True), None)]
        found += [(solvers.pot(method, iterations), None) for method in ("sinkhorn", "sinkhorn_log")]
    # What plain sweeps from nothing leave after few iterations, and a share more: the path of epsilon takes its own.
    target = 3 * data.error(*solvers.sinkformer("streamed", iterations=iterations).run(data)) + 1e-3
    return Case(f"n = m = {n}, d = {DIMENSION}, {iterations} iterations", target, _solved(found, data))


def small_problems(sizes: Sizes, device: torch.device) -> Case:
    """A ragged batch to an L1 error of 1e-3; solvers with a fixed number of sweeps get the power of two that reaches it."""
    target, data = 1e-3, clouds(ragged(sizes.batch, sizes.most), DIMENSION, 0.05, device)
    sweeps = _sweeps_needed(data, target)
    pairs = float(((data.a > 0).sum(-1) * (data.b > 0).sum(-1)).sum())
    found: list[tuple[Solver, Work | None]] = [
        (solvers.sinkformer("triton_small", tolerance=target, matrix=True), cards.on_chip(pairs, sweeps, 4.0)),
        (solvers.sinkformer("absorbed", tolerance=target), None),
        (solvers.plain_torch(sweeps), None),
        (solvers.pot_batch(sweeps), None),
    ]
    if device.type == "cuda":
        found += [(solvers.plain_torch(sweeps, compiled=True), None)]
        if solvers.installed("flash_sinkhorn"):
            found += [(solvers.sampled(solvers.flash_sinkhorn("alternating", sweeps, tf32=False), 1 / 256), None)]
    name = f"{sizes.batch} ragged problems of up to {sizes.most} atoms a side, to {target:g} ({sweeps} plain sweeps)"
    return Case(name, target, _solved(found, data))


def _sweeps_needed(data: Clouds, target: float) -> int:
    sweeps = 16
    while sweeps < 2**14 and data.error(*solvers.plain_torch(sweeps).run(data)) > target:
        sweeps *= 2
    return sweeps


def _solved(found: list[tuple[Solver, Work | None]], data: Clouds) -> list[Run]:
    def check(result: object) -> float:
        assert isinstance(result, tuple)
        f, g = result
        part = slice(0, len(f))
        head = Clouds(data.x[part], data.y[part], data.a[part], data.b[part], data.epsilon[part])
        widths = data.a.shape[-1] - f.shape[-1], data.b.shape[-1] - g.shape[-1]
        f, g = (torch.nn.functional.pad(h, (0, width)) for h, width in zip((f, g), widths, strict=True))
        return head.error(f, g)

    return [Run(s.name, lambda s=s: s.run(data), check, work, s.share) for s, work in found]


def gradients(sizes: Sizes, device: torch.device) -> Case:
    """Forward alone, and forward and backward of <plan v, w> in the points, one large problem and a batch."""
    runs = []
    for backend, shapes in (
        ("triton_stored", [(sizes.gradient, sizes.gradient)]),
        ("triton_small", ragged(sizes.batch // 4 + 1, sizes.most)),
    ):
        data = clouds(shapes, DIMENSION, 0.1, device)
        exactly = "reference" if len(shapes) > 1 else "streamed"
        exact = _gradient(data, exactly, wide=True)

        def check(result: object, exact: Tensor = exact) -> float:
            assert isinstance(result, Tensor)
            return float((result.double() - exact).norm() / exact.norm())

        def forward(data: Clouds = data, backend: str = backend) -> Tensor:
            return _objective(data.x, data, backend)

        value = _objective(data.x.double(), data, exactly).item()

        def valued(result: object, value: float = value) -> float:
            assert isinstance(result, Tensor)
            return abs(float(result) - value) / value

        def both(data: Clouds = data, backend: str = backend) -> Tensor:
            return _gradient(data, backend, wide=False)

        runs += [Run(f"{backend}, forward", forward, valued), Run(f"{backend}, forward and backward", both, check)]
    return Case(
        f"forward and backward, n = m = {sizes.gradient}, and {sizes.batch // 4 + 1} small problems", 1e-2, runs
    )


def attention(sizes: Sizes, device: torch.device) -> Case:
    """Transport attention beside torch's, forward, and forward and backward; the error is relative to float64 on the CPU."""
    shape = (2, 8, min(sizes.one, 1024), DIMENSION)
    generator = torch.Generator().manual_seed(4)
    given = [torch.randn(shape, generator=generator) for _ in range(3)]
    softmax = torch.nn.functional.scaled_dot_product_attention
    head = [x[:1, :1].double() for x in given]
    exact, usual = sinkhorn_attention(*head), softmax(*head)
    q, k, v = (x.to(device).requires_grad_() for x in given)

    def near(wanted: Tensor) -> Callable[[object], float]:
        def check(result: object) -> float:
            assert isinstance(result, Tensor)
            return float((result[:1, :1].double().cpu() - wanted).abs().max() / wanted.abs().max())

        return check

    def forward(run: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return run(q, k, v)

    def both(run: Callable[..., Tensor]) -> Tensor:
        out = run(q, k, v)
        torch.autograd.grad(out.square().sum(), (q, k, v))
        return out.detach()

    name = f"transport attention, 2 x 8 heads, n = m = {shape[2]}, d = {DIMENSION}, 5 sweeps"
    runs = [
        Run("sinkformer, forward", lambda: forward(sinkhorn_attention), near(exact)),
        Run("sinkformer, forward and backward", lambda: both(sinkhorn_attention), near(exact)),
        Run("torch, forward", lambda: forward(softmax), near(usual)),
        Run("torch, forward and backward", lambda: both(softmax), near(usual)),
    ]
    return Case(name, 1e-4, runs)


def _objective(x: Tensor, data: Clouds, backend: str) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(data.y.shape, generator=generator).to(data.y)
    with sf.use_backend(backend):
        pi = sf.Coupling.solve(
            sf.Measure.normalized(x, data.a.to(x.dtype)),
            sf.Measure.normalized(data.y.to(x.dtype), data.b.to(x.dtype)),
            epsilon=data.epsilon.to(x.dtype),
            tolerance=1e-4,
            on_failure="ignore",
        )
        return (pi @ values.to(x.dtype)).square().sum() + pi.solution.f.square().mean()


def _gradient(data: Clouds, backend: str, *, wide: bool) -> Tensor:
    x = (data.x.double() if wide else data.x).clone().requires_grad_()
    return torch.autograd.grad(_objective(x, data, backend), x)[0]
