"""Timing in interleaved rounds, the gate, statistics of ratios, requirements, peak memory."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import Settings, Solver, quiet
from benchmarks.problems import Problems

PACKAGES = ("sinkformer", "torch", "numpy", "numba", "POT", "geomloss", "ott-jax", "jax", "mdot-tnt")


@dataclass(frozen=True)
class Budget:
    """How much a measurement may cost.

    Attributes:
        rounds: rounds in which every solver is timed once.
        once: seconds that a solver is repeated for within a round, at most 100 times; its time is the median of these.
        call: seconds after which a call is given up, and beyond half of which a solver is timed in one round only.
        tuning: seconds for finding the settings of one solver.
        extrapolate: seconds beyond which solvers that run a given number of sweeps are timed for 20 and scaled.
    """

    rounds: int = 5
    once: float = 0.3
    call: float = 60.0
    tuning: float = 120.0
    extrapolate: float = 15.0


@dataclass
class Row:
    """What one solver did in one case.

    Attributes:
        solver: its name.
        error: measured, to be compared with the target of the case; None if it did not run.
        seconds: per call, one number a round; empty if the solver gets no time.
        ratios: seconds over those of the base in the same round.
        iterations: sweeps of the problem that took most, where told.
        settings: what was tuned.
        note: why there is no time, or how it came about.
        first_call: seconds of the first call with a set of settings, compilation included.
    """

    solver: str
    error: float | None = None
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    iterations: int | None = None
    settings: str = ""
    note: str = ""
    first_call: float | None = None
    safe: bool = True

    @property
    def reached(self) -> bool:
        return bool(self.seconds)

    @property
    def milliseconds(self) -> float:
        return 1e3 * statistics.median(self.seconds)


@dataclass
class Demand:
    """A ratio that must be reached: time of the fastest peer of a group over that of ``base``."""

    base: str
    group: str
    peers: list[str]
    least: float
    measured: float | None = None
    against: str = ""

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        return "met" if self.measured >= self.least else "NOT MET"


@dataclass
class Case:
    """One table: the same problems for several solvers; without a measure there is no gate, and remarks are the finding."""

    name: str
    target: float
    measure: str
    threads: int
    rows: list[Row]
    demands: list[Demand] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def row(self, solver: str) -> Row | None:
        return next((row for row in self.rows if row.solver == solver), None)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Case:
        rows, demands = [Row(**row) for row in data["rows"]], [Demand(**demand) for demand in data["demands"]]
        return cls(**(data | {"rows": rows, "demands": demands}))


class OutOfTime(Exception):
    """A call took longer than it may."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``OutOfTime`` after so many seconds, between two Python operations; no limit off the main thread or POSIX."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise OutOfTime

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result)."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


@dataclass
class _Candidate:
    """A solver with the settings that reached the target, ready to be timed."""

    row: Row
    call: Callable[[], Any]
    factor: float = 1.0
    last: float = 0.0


def _tuned(solver: Solver, problems: Problems, target: float, budget: Budget, row: Row) -> _Candidate | None:
    """The fastest of the settings that reach the target, or None with the reason in the row."""
    start, best, smallest, failure = time.perf_counter(), None, math.inf, ""
    for settings in solver.ladder(problems, target):
        left = budget.tuning - (time.perf_counter() - start)
        if left <= 0:
            failure = failure or f"tuning took more than {budget.tuning:.0f} s"
            break
        if solver.by_sweeps and (long := _extrapolated(solver, problems, settings, budget, row)):
            return long
        limit = min(left, budget.call, solver.patience if best is None else 2 * best.last + 0.1)
        call = solver.prepare(problems, settings)
        try:
            with time_limit(limit):
                first, result = timed(call)
                # JIT compilation and first touches are in the first call; slow calls are not repeated for them.
                seconds, result = timed(call) if first < 1 else (first, result)
        except OutOfTime:
            failure = failure or f"a call took more than {limit:.0f} s"
            continue
        # A solver that fails is a row of the table, whatever it raises.
        except Exception as exception:  # noqa: BLE001
            first_line = (str(exception).splitlines() or [""])[0]
            failure = f"{type(exception).__name__}: {first_line}"[:120]
            continue
        row.first_call = row.first_call or first
        error = solver.error(problems, result)
        smallest = min(smallest, error)
        if error <= target and (best is None or seconds < best.last):
            row.error, row.iterations, row.settings = error, solver.iterations(result), _words(settings)
            best = _Candidate(row, call, last=seconds)
            if solver.monotone:
                break
    if best is None:
        row.error = smallest
        reached = "not finite" if smallest == math.inf else f"error {smallest:.1e}"
        row.note = f"failed: {failure}" if smallest == math.inf and failure else f"not reached: {reached}"
        if failure and not row.note.startswith("failed"):
            row.note += f" ({failure})"
    return best


def _extrapolated(
    solver: Solver, problems: Problems, settings: Settings, budget: Budget, row: Row
) -> _Candidate | None:
    """A candidate that runs 20 sweeps in the place of all, if all would take too long."""
    sweeps, few = settings["sweeps"], 20
    if sweeps <= 10 * few:
        return None
    call = solver.prepare(problems, settings | {"sweeps": few})
    call()
    seconds, result = timed(call)
    if solver.error(problems, result) == math.inf or seconds * sweeps / few <= budget.extrapolate:
        return None
    row.note, row.settings = f"extrapolated: {few} sweeps timed, {sweeps} needed", _words(settings)
    return _Candidate(row, call, factor=sweeps / few, last=seconds * sweeps / few)


def _words(settings: Settings) -> str:
    values = {
        name: f"{x:.3g}" if isinstance(x, float) else str(x).removeprefix("torch.") for name, x in settings.items()
    }
    return ", ".join(f"{name}={x}" for name, x in values.items())


def _one_round(candidate: _Candidate, budget: Budget) -> float:
    seconds = [timed(candidate.call)[0]]
    while sum(seconds) < budget.once and len(seconds) < 100:
        seconds.append(timed(candidate.call)[0])
    return candidate.factor * statistics.median(seconds)


def compare(
    name: str,
    problems: Problems,
    solvers: list[Solver],
    target: float,
    budget: Budget,
    *,
    base: str,
    measure: str = "L1 marginal error",
    say: Callable[[str], None] = print,
) -> Case:
    """Tune every solver, then time those that reach the target in interleaved rounds."""
    case = Case(name, target, measure, torch.get_num_threads(), [])
    candidates: list[_Candidate] = []
    say(f"\n{name}, target {target:g} ({measure})")
    with quiet():
        for solver in solvers:
            row = Row(solver.name, safe=solver.safe)
            case.rows.append(row)
            if not solver.installed:
                row.note = f"skipped: {solver.package} is not installed"
            elif (candidate := _tuned(solver, problems, target, budget, row)) is not None:
                candidates.append(candidate)
                say(f"  {solver.name:<28} about {1e3 * candidate.last:9.1f} ms  {row.settings}  {row.note}")
                continue
            say(f"  {solver.name:<28} {row.note}")
        for index in range(budget.rounds):
            # Another order in every round, so that nobody always runs after the same neighbour.
            for candidate in (
                candidates[index % max(len(candidates), 1) :] + candidates[: index % max(len(candidates), 1)]
            ):
                slow = candidate.last / candidate.factor > budget.call / 2
                if slow and index:
                    continue
                if slow:
                    candidate.row.note += f"{'; ' if candidate.row.note else ''}one round only"
                candidate.last = _one_round(candidate, budget)
                candidate.row.seconds.append(candidate.last)
    reference = case.row(base)
    if reference is not None and reference.reached:
        for row in case.rows:
            row.ratios = [x / y for x, y in zip(row.seconds, reference.seconds, strict=False)]
    return case


def median_range(numbers: list[float]) -> tuple[float, float, float]:
    """(median, least, largest)."""
    return statistics.median(numbers), min(numbers), max(numbers)


def demand(case: Case, base: str, group: str, peers: Callable[[Row], bool], least: float) -> None:
    """Note in a case what ``base`` must be faster than, by how much, and what was measured.

    The ratio is the median over rounds of (time of the peer / time of the base); of several peers the fastest counts.
    """
    reference = case.row(base)
    members = [row for row in case.rows if peers(row) and not row.solver.startswith("sinkformer")]
    wanted = Demand(base, group, [row.solver for row in members], least)
    if reference is not None and reference.reached:
        ratios = {
            row.solver: statistics.median([x / y for x, y in zip(row.seconds, reference.seconds, strict=False)])
            for row in members
            if row.reached
        }
        if ratios:
            wanted.against = min(ratios, key=ratios.__getitem__)
            wanted.measured = ratios[wanted.against]
            fastest = case.row(wanted.against)
            if fastest is not None and fastest.note.startswith("extrapolated"):
                wanted.against += " (extrapolated)"
    case.demands.append(wanted)


def failures(cases: list[Case]) -> list[str]:
    """Rows of sinkformer that miss their target: a benchmark of wrong answers is none."""
    return [
        f"{case.name} ({case.threads} thread(s)): {row.solver} {row.note}"
        for case in cases
        for row in case.rows
        if case.measure
        and row.solver.startswith("sinkformer")
        and not row.reached
        and not row.note.startswith("skipped")
    ]


# Bounds ------------------------------------------------------------------------------------------------------------------


def bandwidth_bound(n: int, m: int, dtype: torch.dtype, sweeps: int) -> tuple[float, float, float]:
    """(bound, read, exponential) in seconds: ``sweeps`` reads of an n x m matrix and one pass of exponentials over it.

    A read is a plain matrix-vector product, best of several; that both products of a sweep need no second read is assumed.
    """
    matrix, vector = torch.rand(n, m, dtype=dtype), torch.rand(m, dtype=dtype)
    out, result = torch.empty_like(matrix), torch.empty(n, dtype=dtype)
    read = min(timed(lambda: torch.mv(matrix, vector, out=result))[0] for _ in range(10))
    exponential = min(timed(lambda: torch.exp(matrix, out=out))[0] for _ in range(5))
    return sweeps * read + exponential, read, exponential


# Memory ------------------------------------------------------------------------------------------------------------------


def _status(field: str) -> int:
    """A figure of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"no {field}")


def peak_memory(call: Callable[[], Any]) -> int | None:
    """Peak resident bytes during a call minus those before it; None where the system does not tell."""
    try:
        # Resets the peak to the present, so that imports and compilation do not hide the call.
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        call()
        return max(_status("VmHWM") - before, 0)
    except OSError:
        return None


# Surroundings ------------------------------------------------------------------------------------------------------------


def surroundings() -> dict[str, str]:
    """Processor, cores, Python and the versions of everything that is compared."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    found = {
        "processor": model,
        "cores": str(os.cpu_count()),
        "system": platform.system(),
        "Python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
