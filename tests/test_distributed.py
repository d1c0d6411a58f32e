"""Beyond one process: rows sharded over ranks, and training, both equal to one process; lost and disagreeing ranks.

Ranks are processes that meet in a file (gloo), and run functions of this module.
"""

import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sinkformer as sf
from sinkformer import Shard, sinkhorn, streamed
from sinkformer.costs import Cost, Euclidean, NegativeDot, SqEuclidean, forbid
from sinkformer.errors import (
    BackendError,
    ConfigError,
    ConvergenceError,
    DistributedError,
    DTypeError,
    NonFiniteError,
    ShapeError,
    WeightError,
)

INF, NAN = float("inf"), float("nan")
BALANCED = (1.0, 1.0)
TAUS = [BALANCED, (0.8, 0.6), (1.0, 0.5), (0.7, 1.0), (1.0, 0.0), (0.0, 0.0)]
# Who has which rows, in how many processes, in which precision.
LAYOUTS = [
    (2, "uneven", "64"),
    (3, "uneven", "64"),
    (3, "empty", "64"),
    (3, "void", "64"),
    (3, "uneven", "32"),
    (2, "empty", "32"),
]
EXAMPLE = Path(__file__).parents[1] / "examples" / "sharded_sinkhorn.py"


# Processes -------------------------------------------------------------------------------------------------------------


class Crew:
    """Processes that wait for work; ``Crew(3)(function, **arguments)`` gives the answer of every one, or its error."""

    def __init__(self, count: int, folder: Path):
        context = multiprocessing.get_context("spawn")
        self.pipes, ends = zip(*(context.Pipe() for _ in range(count)), strict=True)
        self.processes = [
            context.Process(target=serve, args=(rank, count, str(folder / "store"), end), daemon=True)
            for rank, end in enumerate(ends)
        ]
        for process in self.processes:
            process.start()
        for end in ends:
            end.close()

    def __call__(self, function: Any, *, count: int | None = None, **arguments: Any) -> list[Any]:
        """By the first ``count`` of them, whose group the function is given."""
        pipes = self.pipes[:count]
        for pipe in pipes:
            pipe.send_bytes(pickle.dumps((function, len(pipes), arguments)))
        return [self._answer(pipe) for pipe in pipes]

    def _answer(self, pipe: Any) -> Any:
        assert pipe.poll(180), "no answer within three minutes"
        try:
            return pickle.loads(pipe.recv_bytes())
        except EOFError:
            return None  # the process is gone

    def dismiss(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            process.kill()


def serve(rank: int, count: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ.update({name: str(number) for name, number in places.items()})  # where accelerate looks
    meeting = dist.FileStore(store, count)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=count, timeout=timedelta(seconds=120))
    groups = {count: dist.group.WORLD} | {k: dist.new_group(list(range(k))) for k in range(2, count)}
    while True:
        try:
            function, size, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)  # without waiting for others that may be lost
        try:
            answer = function(groups[size], **arguments)
        except Exception as error:  # noqa: BLE001 - it is the answer
            answer = error
        pipe.send_bytes(pickle.dumps(answer))


@pytest.fixture(scope="module")
def _crews():
    crews: list[Crew] = []
    yield crews
    for members in crews:
        members.dismiss()


@pytest.fixture
def crew(_crews, tmp_path_factory):
    """Three processes for all tests, others after one was lost."""
    if not _crews or not all(process.is_alive() for process in _crews[-1].processes):
        _crews.append(Crew(3, tmp_path_factory.mktemp("crew")))
    return _crews[-1]


# Problems --------------------------------------------------------------------------------------------------------------


COSTS: dict[str, Cost] = {"dot": NegativeDot(), "squared": SqEuclidean(), "euclidean": Euclidean()}


class Case:
    """A problem of 37 x 21 atoms, or a batch of two, with weights of zero on demand; ``cut`` says who has which rows."""

    def __init__(self, cost="squared", dtype=torch.float64, cut="uneven", zeros=False, batch=(), n=37, m=21):
        generator = torch.Generator().manual_seed(n + m)
        x, y, a, b = (
            draw(*batch, *shape, generator=generator, dtype=torch.float64).to(dtype)
            for draw, shape in ((torch.randn, (n, 3)), (torch.randn, (m, 3)), (torch.rand, (n,)), (torch.rand, (m,)))
        )
        self.cost, self.cut, self.n = COSTS[cost], cut, n
        if zeros:
            a[..., 3:6] = b[..., 2] = b[..., -3:] = 0
        if cut == "void":  # the rows of the first rank weigh nothing
            a[..., : n // 3] = 0
        self.x, self.a, self.y, self.b = x, a, y, b

    def rows(self, rank: int, count: int) -> slice:
        places = {
            "uneven": [0, *(math.ceil(self.n * (k / count) ** 2) for k in range(1, count)), self.n],
            "empty": [0, *(k * self.n // 2 for k in range(count))] if count == 3 else [0, 0, self.n],
            "void": [0, *(self.n // 3 * k for k in range(1, count)), self.n],
        }[self.cut]
        return slice(places[rank], places[rank + 1])

    def solve(self, group: Any = None, taus=BALANCED, epsilon=0.5, gradients=False, **options) -> dict[str, Tensor]:
        """The solution, and the gradients of one loss in everything; on a rank those that are its own."""
        rows = slice(None) if group is None else self.rows(dist.get_rank(group), dist.get_world_size(group))
        x, a, y, b = (
            t.clone().requires_grad_(gradients) for t in (self.x[..., rows, :], self.a[..., rows], self.y, self.b)
        )
        scale = torch.tensor(epsilon, dtype=torch.float64, requires_grad=gradients).expand(a.shape[:-1])
        nu = sf.Measure.normalized(y, b)
        options |= dict(cost=self.cost, epsilon=scale, tau_a=taus[0], tau_b=taus[1])
        if group is None:
            with sf.use_backend("streamed"):
                solution = sinkhorn(sf.Measure.normalized(x, a), nu, **options)
        else:
            solution = sinkhorn(Shard(x, 7 * a), nu, process_group=group, **options)  # in any unit
        names = ("f", "g", "value", "marginal_error", "duality_gap", "iterations", "codes")
        found = {name: getattr(solution, name).detach() for name in names}
        if gradients:
            u = torch.arange(self.n).double().sin()[rows]
            v = torch.arange(solution.g.shape[-1]).double().cos()
            loss = (solution.f * u).sum() + (solution.g * v).sum() + solution.value.sum()
            leaves = {"x": x, "a": a, "y": y, "b": b, "epsilon": scale}
            found |= dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
            found["conditioning"] = solution.conditioning
        return found


LOCAL = {"f": -1, "a": -1, "x": -2}


def assert_as_alone(case: Case, parts: list[dict[str, Tensor]], alone: dict[str, Tensor], tolerance=1e-6, loose=1.0):
    """What is local is a piece, what is not is the same on every rank; all are those of one process."""
    for part in parts:
        assert isinstance(part, dict), part
    for name, want in alone.items():
        if name in LOCAL:
            have = torch.cat([part[name] for part in parts], LOCAL[name])
        else:
            have = parts[0][name]
            for part in parts[1:]:
                torch.testing.assert_close(part[name], have, rtol=0, atol=0, equal_nan=True)
        atol = tolerance if name not in ("x", "a", "y", "b", "epsilon", "conditioning") else loose * tolerance
        if name == "iterations" and case.x.dtype == torch.float32:  # its rounding may cost a sweep or two
            atol = 3
        torch.testing.assert_close(have, want, rtol=0, atol=atol, equal_nan=True)


def solve(group: Any, case: Case, **options: Any) -> dict[str, Tensor]:
    return case.solve(group, **options)


# One problem over several processes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "cut", "bits", "taus"),
    [
        *((*layout, taus) for layout in LAYOUTS for taus in TAUS[:1]),
        *((3, "empty", "64", taus) for taus in TAUS[1:]),
        *(
            pytest.param(*layout, taus, marks=pytest.mark.slow)
            for layout in LAYOUTS
            for taus in TAUS[1:]
            if layout != (3, "empty", "64")
        ),
    ],
)
def test_the_solution_is_that_of_one_process(crew, count, cut, bits, taus):
    dtype = torch.float64 if bits == "64" else torch.float32
    case = Case(dtype=dtype, cut=cut, zeros=True)
    options = dict(taus=taus, tolerance=1e-9 if dtype == torch.float64 else 1e-7)
    assert_as_alone(case, crew(solve, count=count, case=case, **options), case.solve(**options))


@pytest.mark.parametrize(("cost", "batch"), [("dot", ()), ("euclidean", (2,))])
def test_costs_and_batches(crew, cost, batch):
    case = Case(cost, batch=batch)
    assert_as_alone(case, crew(solve, case=case), case.solve())


def test_a_small_epsilon(crew):
    """Annealed, over-relaxed, and where whole columns of a shard vanish in the precision of the blocks."""
    case = Case(dtype=torch.float32)
    order = case.x[:, 0].argsort()
    case.x, case.a = case.x[order], case.a[order]
    options = dict(epsilon=0.02, tolerance=1e-6)
    alone = case.solve(**options)
    assert int(alone["codes"]) == 0
    assert_as_alone(case, crew(solve, case=case, **options), alone)


def test_what_did_not_converge_says_so_everywhere(crew):
    case = Case()
    options = dict(epsilon=0.05, max_iterations=5, on_failure="ignore")
    alone = case.solve(**options)
    assert int(alone["codes"]) == 1
    assert_as_alone(case, crew(solve, case=case, **options), alone)
    for error in crew(solve, case=case, **options | {"on_failure": "raise"}):
        assert isinstance(error, ConvergenceError)


def started(group: Any, case: Case) -> tuple[int, int]:
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    nu, rows = sf.Measure.normalized(case.y, case.b), case.rows(rank, count)
    options = dict(cost=case.cost, epsilon=0.3, process_group=group)
    first = sinkhorn(Shard(case.x[rows], case.a[rows]), nu, **options)
    again = sinkhorn(Shard(case.x[rows], case.a[rows]), nu, init=first.potentials, **options)
    assert "sharded over" in sf.explain(again)
    return int(first.iterations), int(again.iterations)


def test_a_start_close_by_is_used(crew):
    for cold, warm in crew(started, case=Case()):
        assert warm <= 2 < cold


def uniform(group: Any, case: Case) -> list[Tensor]:
    """Shards of a measure that all have, and of bare points."""
    mu, nu = sf.Measure.uniform(case.x), sf.Measure.normalized(case.y, case.b)
    shard = Shard.of(mu, group)
    options = dict(cost=case.cost, epsilon=0.3, process_group=group)
    return [sinkhorn(part, nu, **options).f for part in (shard, Shard(shard.points))]


def test_shards_of_a_measure(crew):
    case = Case()
    mu, nu = sf.Measure.uniform(case.x), sf.Measure.normalized(case.y, case.b)
    want = sinkhorn(mu, nu, cost=case.cost, epsilon=0.3).f
    parts = crew(uniform, case=case)
    assert [len(part[0]) for part in parts] == [12, 12, 13]
    for found in zip(*parts, strict=True):
        torch.testing.assert_close(torch.cat(found), want, rtol=0, atol=1e-6)


def projected(group: Any, case: Case) -> Tensor:
    """Conditional means of the rows of a rank: a coupling of these rows alone, from the potentials of all."""
    rows, nu = case.rows(dist.get_rank(group), dist.get_world_size(group)), sf.Measure.normalized(case.y, case.b)
    shard = Shard(case.x[rows], case.a[rows])
    solution = sinkhorn(shard, nu, cost=case.cost, epsilon=0.3, process_group=group)
    k = ((solution.f[:, None] + solution.g - case.cost(shard.points, nu.points)) / 0.3).exp() * nu.weights
    return k @ nu.points


def test_conditionals_of_the_rows_of_a_rank(crew):
    case = Case()
    mu, nu = sf.Measure.normalized(case.x, case.a), sf.Measure.normalized(case.y, case.b)
    want = sf.Coupling.solve(mu, nu, cost=case.cost, epsilon=0.3).barycentric_projection()
    torch.testing.assert_close(torch.cat(crew(projected, case=case)), want, rtol=0, atol=1e-6)


# Derivatives -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "cut", "taus"),
    [
        (2, "uneven", BALANCED),
        (3, "empty", BALANCED),
        (3, "uneven", (0.8, 0.6)),
        pytest.param(3, "empty", (0.8, 0.6), marks=pytest.mark.slow),
        pytest.param(3, "uneven", (1.0, 0.5), marks=pytest.mark.slow),
        pytest.param(2, "empty", (1.0, 0.0), marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_one_process(crew, count, cut, taus):
    case = Case(cut=cut, zeros=True)
    options = dict(taus=taus, gradients=True)
    assert_as_alone(case, crew(solve, count=count, case=case, **options), case.solve(**options))


def test_gradients_of_a_batch_in_float32(crew):
    case = Case("euclidean", torch.float32, batch=(2,))
    options = dict(gradients=True, tolerance=1e-6)
    assert_as_alone(case, crew(solve, case=case, **options), case.solve(**options), loose=100)


def twice(group: Any, case: Case, over: str) -> None:
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    rows = case.rows(rank, count)
    x, a = case.x[rows].requires_grad_(), case.a[rows].requires_grad_()
    nu = sf.Measure.normalized(case.y, case.b)
    solution = sinkhorn(Shard(x, a), nu, epsilon=0.3, process_group=group)
    if over == "derivatives":
        (first,) = torch.autograd.grad(solution.value, a, create_graph=True)
        first.square().sum().backward()
    elif over == "losses":
        solution.g[rank].backward()
    else:
        (solution.value * (1 + rank)).backward()


def test_second_derivatives_are_refused(crew):
    for error in crew(twice, case=Case(), over="derivatives"):
        assert isinstance(error, (BackendError, RuntimeError))
        assert "once_differentiable" in str(error) or "without process_group" in str(error)
        assert "unrolled" not in str(error)


@pytest.mark.parametrize(("over", "name"), [("losses", "g"), ("values", "value")])
def test_losses_that_differ_are_refused(crew, over, name):
    for error in crew(twice, case=Case(), over=over):
        assert isinstance(error, DistributedError)
        assert f"received derivatives in {name} that differ" in str(error)


# Memory ----------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation returned."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor) and t.dtype != torch.uint8:  # not what ranks tell each other before they start
                self.bytes = max(self.bytes, t.numel() * t.element_size())
        return out


def largest(group: Any, n: int, m: int) -> int:
    count = dist.get_world_size(group)
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    x = torch.rand(n // count, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    y = torch.rand(m, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64, requires_grad=True)
    seen = Largest() if dist.get_rank(group) == 0 else nullcontext()
    pairs, kept = streamed.pairs, (streamed.pairs._CACHED_ENTRIES, streamed.pairs._CACHED_ROWS)
    pairs._CACHED_ENTRIES, pairs._CACHED_ROWS = 1, 8
    try:
        with seen:
            options = dict(epsilon=1.0, tolerance=0.0, max_iterations=3, gradient_tolerance=0.1)
            solution = sinkhorn(Shard(x), sf.Measure.uniform(y), process_group=group, **options)
            (solution.value + solution.f.square().sum()).backward()
    finally:
        pairs._CACHED_ENTRIES, pairs._CACHED_ROWS = kept
    return seen.bytes if isinstance(seen, Largest) else 0


def test_no_rank_holds_more_than_its_rows_and_the_target(crew):
    """Points and their squares have four coordinates, a block has eight rows; the source alone is twice as large."""
    seen, *_ = crew(largest, n=900, m=150)
    assert 0 < seen <= 8 * 4 * max(900 // 3, 150)
    assert seen < 8 * 2 * 900


# What goes wrong -------------------------------------------------------------------------------------------------------


class Wrong(Cost):
    """A cost that is none for some rows."""

    def __call__(self, x, y):
        costs = SqEuclidean()(x, y)
        return torch.where(x[..., :1] > 2, NAN, costs)


class Weighted(Cost):
    def __init__(self):
        self.scale = torch.ones((), requires_grad=True)

    def __call__(self, x, y):
        return self.scale * SqEuclidean()(x, y)


def spoiled(group: Any, case: Case, what: str) -> None:
    """The last rank is given something else."""
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    rows, last = case.rows(rank, count), rank == count - 1
    shard = Shard(case.x[rows].clone(), case.a[rows].clone())
    nu = sf.Measure.normalized(case.y, case.b)
    options: dict[str, Any] = dict(epsilon=0.3, process_group=group)
    if what == "cost" and last:
        shard.points[0, 0] = 3.0
    if what == "cost":
        options["cost"] = Wrong()
    if what == "nothing":
        shard.weights[:] = 0
    if last:
        if what == "m":
            nu = sf.Measure.uniform(case.y[:-1])
        elif what == "target":
            nu = sf.Measure.normalized(case.y + 1e-9, case.b)
        elif what == "point":
            shard.points[0, 0] = NAN
        elif what == "weight":
            shard.weights[0] = -1.0
        elif what == "shape":
            shard = Shard(shard.points, shard.weights[:-1])
        elif what == "dimension":
            shard = Shard(shard.points[:, :2], shard.weights)
        elif what == "dtype":
            shard, nu = Shard(shard.points.float()), sf.Measure.uniform(case.y.float())
        elif what == "measure":
            shard = sf.Measure.normalized(shard.points, shard.weights)
        elif what == "epsilon":
            options["epsilon"] = 0.2
        elif what == "option":
            options["max_iterations"] = 7
        elif what == "range":
            options["tau_a"] = 2.0
        elif what == "metric":
            options["cost"] = Euclidean()
        elif what == "gradient":
            shard.points.requires_grad_()
        elif what == "uniform":
            shard = Shard(shard.points)
    if what == "shards of targets":
        nu = Shard(case.y)
    if what == "matrix":
        options["cost"] = torch.zeros(len(shard.points), 21)
    if what == "mask":
        options["mask"] = forbid(torch.zeros(len(shard.points), 21, dtype=torch.bool))
    if what == "unrolled":
        options["gradient"] = "unrolled"
    if what == "parameter":
        options["cost"] = Weighted()
    with sf.use_backend("absorbed" if what == "backend" else None):
        sinkhorn(shard, nu, **options)


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("cost", NonFiniteError, "the cost of a pair of atoms of positive weight is NaN"),
        ("nothing", WeightError, "expected weights of which the sum over all ranks is positive and finite, received"),
        (
            "matrix",
            ConfigError,
            "expected a cost of points without a mask with process_group, received a matrix or a mask",
        ),
        (
            "mask",
            ConfigError,
            "expected a cost of points without a mask with process_group, received a matrix or a mask",
        ),
        ("unrolled", ConfigError, "expected gradient 'implicit' with process_group, received 'unrolled'"),
        (
            "backend",
            BackendError,
            "the backend 'absorbed' was asked for and cannot solve this problem: its rows are sharded",
        ),
        ("parameter", BackendError, "expected a cost without parameters that require a gradient"),
        ("shards of targets", DTypeError, "expected the whole target as a Measure on every rank, received Shard"),
    ],
)
def test_what_is_wrong_everywhere_is_told_everywhere(crew, what, error, message):
    for found in crew(spoiled, case=Case(), what=what):
        assert type(found) is error, found
        assert message in str(found)


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("point", NonFiniteError, "expected finite points, received a NaN or infinity in the atom at index [0]"),
        ("weight", WeightError, "expected non-negative weights, received -1 at index [0]"),
        ("shape", ShapeError, "expected weights of shape"),
        ("dimension", ShapeError, "expected source and target points of one dimension"),
        ("measure", DTypeError, "expected the source as a Shard with process_group, received Measure; pass the rows"),
        ("range", ConfigError, "expected tau_a = rho / (rho + epsilon) between 0 and 1, received 2.0"),
    ],
)
def test_an_error_of_one_rank_is_told_to_all(crew, what, error, message):
    *others, last = crew(spoiled, case=Case(), what=what)
    assert type(last) is error, last
    assert message in str(last)
    for found in others:
        assert type(found) is DistributedError
        assert f"without an error on every rank; rank 2 had a {error.__name__}: {last}" in str(found)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("m", "the same shape of the target on every rank, received (21, 3) on rank 0 and (20, 3) on rank 2"),
        ("target", "the same target (a fingerprint) on every rank"),
        ("dtype", "the same dtype on every rank, received torch.float64 on rank 0 and torch.float32 on rank 2"),
        ("epsilon", "the same epsilon on every rank, received 0.3 on rank 0 and 0.2 on rank 2"),
        ("option", "the same max_iterations on every rank, received 2000 on rank 0 and 7 on rank 2"),
        ("metric", "the same cost on every rank, received sinkformer.costs.SqEuclidean: SqEuclidean() on rank 0 and"),
        ("gradient", "the same choice of what requires a gradient on every rank, received"),
        ("uniform", "the same choice of weights of the source on every rank, received weights on rank 0 and none"),
    ],
)
def test_ranks_that_differ_are_told_what_differs(crew, what, message):
    for found in crew(spoiled, case=Case(), what=what):
        assert type(found) is DistributedError, found
        assert f"expected {message}" in str(found)


def test_a_process_without_a_group():
    x, nu = torch.rand(4, 2), sf.Measure.uniform(torch.rand(3, 2))
    for group in (None, object()):
        with pytest.raises(ConfigError, match=r"not initialised in this process; start the script by torchrun"):
            sinkhorn(Shard(x), nu, epsilon=0.1, process_group=group)
    with pytest.raises(ConfigError, match="which is not initialised"):
        Shard.of(nu, None)
    with pytest.raises(ConfigError, match="which is not initialised"):
        sinkhorn(nu, nu, epsilon=0.1, process_group=object())


def strange(group: Any) -> None:
    sinkhorn(Shard(torch.rand(4, 2)), sf.Measure.uniform(torch.rand(3, 2)), epsilon=0.1, process_group=-100)


def test_a_group_of_others(crew):
    for error in crew(strange):
        assert type(error) is ConfigError
        assert "expected a process group that this process belongs to, received -100" in str(error)


# Training --------------------------------------------------------------------------------------------------------------


# Imported where they are used: most processes do without.


def labelled(count: int, seed: int) -> Any:
    """Pairs of measures, and their couplings as matrices."""
    from sinkformer.systems import EntropicTransport, PairSampler

    mu, nu = PairSampler(dims=(2, 2), sizes=(2, 5)).pairs(count, generator=torch.Generator().manual_seed(seed))
    return mu, nu, EntropicTransport(SqEuclidean(), epsilon=0.5)(mu, nu).to_dense()


def examples(count: int) -> list[Any]:
    return list(zip(*labelled(count, 3), strict=True))


class Crash(Exception):
    """Stands for everything that ends a process."""


def data_of(kind: str, rank: int) -> Any:
    from sinkformer.systems import EntropicTransport, PairSampler

    if kind == "system":
        return EntropicTransport(SqEuclidean(), epsilon=0.5), PairSampler(dims=(2, 2), sizes=(2, 5))
    if kind == "sequence":
        return examples(7)
    return Batches(labelled(5, rank if kind == "other batches" else 0), 3 if kind == "crash" else -1)


class Batches:
    """An iterable that is no sequence: one batch, again and again; ends with a crash after some, if asked to."""

    def __init__(self, batch: Any, left: int):
        self.batch, self.left = batch, left

    def __iter__(self):
        if self.left == 0:
            raise Crash
        self.left -= 1
        yield self.batch


def train(group: Any, kind: str, **options: Any) -> Any:
    """The weights and the records of a run, from weights of which those of the first process count."""
    from sinkformer.models import SinkhornTransformer, SinkhornTransformerConfig
    from sinkformer.training import Recipe, fit

    rank = 0 if group is None else dist.get_rank(group)
    if kind == "other seeds":
        kind, options["seed"] = "system", rank
    torch.manual_seed(rank)
    config = SinkhornTransformerConfig(dim=2, width=8, heads=2, depth=1, rank=4, epsilon=0.5)
    model = SinkhornTransformer(config, dtype=torch.float64)
    recipe = Recipe(groups=2, sources=2, targets=3, batch=3)
    history = fit(
        model,
        data_of(kind, rank),
        **{"steps": 6, "recipe": recipe, "validation": examples(3), "validate_every": 3, "record_every": 1} | options,
        accelerate=group is not None,
    )
    records = [{name: number for name, number in record.items() if name != "seconds"} for record in history.records]
    return {name: t.clone() for name, t in model.state_dict().items()}, records


@pytest.mark.parametrize("kind", ["system", "sequence", "batches"])
def test_training_is_that_of_one_process(crew, kind):
    """Three processes share two groups of sources, batches of three and one, and batches of five."""
    pytest.importorskip("accelerate")
    weights, records = train(None, kind)
    for found in crew(train, kind=kind):
        assert isinstance(found, tuple), found
        for name, t in weights.items():
            torch.testing.assert_close(found[0][name], t, rtol=0, atol=1e-6)
        for have, want in zip(found[1], records, strict=True):
            assert have == pytest.approx(want, rel=1e-6)


def test_a_resumed_run_of_several_processes_is_the_uninterrupted_one(crew, tmp_path):
    pytest.importorskip("accelerate")
    whole = crew(train, kind="batches")
    for error in crew(train, kind="crash", folder=tmp_path):
        assert isinstance(error, Crash)
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-000000003"]
    for (weights, records), (want, all_records) in zip(
        crew(train, kind="batches", folder=tmp_path, resume=True), whole, strict=True
    ):
        assert records == all_records
        assert all(torch.equal(t, want[name]) for name, t in weights.items())


@pytest.mark.parametrize(("kind", "what"), [("other seeds", "arguments"), ("other batches", "batches")])
def test_processes_that_train_different_things_are_refused(crew, kind, what):
    pytest.importorskip("accelerate")
    for error in crew(train, kind=kind):
        assert type(error) is ConfigError, error
        assert f"expected the same {what} in every process, received different ones" in str(error)


# Processes that are lost: the last test, because others need a new crew afterwards ----------------------------------------


class Fatal(Cost):
    """Ends rank 1, or raises there, at its fortieth evaluation."""

    def __init__(self, rank: int, kills: bool):
        self.left, self.kills = 40 if rank == 1 else -1, kills

    def __call__(self, x, y):
        self.left -= 1
        if self.left == 0 and self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.left == 0:
            raise MemoryError("no room")
        return SqEuclidean()(x, y)


def cut_short(group: Any, case: Case, kills: bool) -> tuple[str, float]:
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    if not kills:
        group = dist.new_group(timeout=timedelta(seconds=2))
    rows, nu = case.rows(rank, count), sf.Measure.normalized(case.y, case.b)
    start = time.monotonic()
    try:
        options = dict(cost=Fatal(rank, kills), epsilon=0.02, tolerance=0.0, max_iterations=200)
        sinkhorn(Shard(case.x[rows], case.a[rows]), nu, process_group=group, **options)
    except (DistributedError, MemoryError) as error:
        cause = "" if error.__cause__ is None else f" <- {type(error.__cause__).__name__}"
        return f"{type(error).__name__}: {error}{cause}", time.monotonic() - start
    raise AssertionError("nothing happened")


def test_a_lost_rank_ends_the_others(crew):
    """One that stays away without a word, within the timeout of the group; one that is killed, at once."""
    first, second, third = crew(cut_short, case=Case(), kills=False)
    assert second[0] == "MemoryError: no room"
    for message, seconds in (first, third):
        assert message.startswith("DistributedError: rank")
        assert "of 3 lost the others: a process ended, or did not come within the timeout of the group" in message
        assert seconds < 15
    first, second, third = crew(cut_short, case=Case(), kills=True)
    assert second is None
    for message, seconds in (first, third):
        assert message.startswith("DistributedError: rank")
        assert message.endswith("<- RuntimeError")
        assert seconds < 15


@pytest.mark.slow
def test_the_example_under_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    run = subprocess.run([*command, "--smoke"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "2 processes, 500 x 200 atoms" in run.stdout
    assert run.stdout.count("f differs from that of one process by") == 2
