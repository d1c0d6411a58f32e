"""What is measured: the cases, and the ratios that sinkformer promises in them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from benchmarks import harness, peers, problems
from benchmarks.harness import Budget, Case, Row, compare, demand
from benchmarks.peers import OURS, PLAIN_TORCH

SUITES = ("batch", "single", "gradient", "growth", "memory")


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        threads: threads of every library.
        quick: small problems and few rounds: tests the harness, measures nothing.
        peers: whether to run other solvers.
        budget: how long.
        say: prints a line of progress.
    """

    threads: int = 1
    quick: bool = False
    peers: bool = True
    budget: Budget = field(default_factory=Budget)
    say: Callable[[str], None] = print

    @property
    def judged(self) -> bool:
        """Whether ratios are compared with the promised ones, which hold for the full sizes."""
        return self.peers and not self.quick


def _named(*names: str) -> Callable[[Row], bool]:
    return lambda row: row.solver in names


def _log_domain_pot(row: Row) -> bool:
    return row.solver in ("POT sinkhorn_log", "POT solve_batch, log")


def _ott(row: Row) -> bool:
    return row.solver.startswith("OTT-JAX")


def batch(options: Options) -> list[Case]:
    """Ragged batches of small problems."""
    count, high = (6, 16) if options.quick else (64, 64)
    cases = []
    for ratio, target, dtype in ((0.01, 1e-3, torch.float32), (0.01, 1e-6, torch.float64), (0.1, 1e-3, torch.float32)):
        name = f"batch of {count}, n and m in 8..{high}, epsilon {ratio:g}, to {target:g}, {_short(dtype)}"
        given = problems.ragged(count, ratio, dtype, high=high)
        case = compare(
            name, given, peers.forward_solvers(options.peers), target, options.budget, base=OURS, say=options.say
        )
        if options.judged and (ratio, target) == (0.01, 1e-3):
            demand(case, OURS, "mdot-tnt", _named("mdot-tnt"), 50)
            demand(case, OURS, "the fastest log-domain loop of POT", _log_domain_pot, 150)
            demand(case, OURS, "OTT-JAX", _ott, 300)
            demand(case, PLAIN_TORCH, "mdot-tnt", _named("mdot-tnt"), 3)
        elif options.judged and target == 1e-6:
            demand(case, OURS, "mdot-tnt", _named("mdot-tnt"), 40)
        elif options.judged:
            demand(case, OURS, "the fastest safe peer", lambda row: row.safe, 15)
        cases.append(case)
    return cases


def single(options: Options) -> list[Case]:
    """One large problem."""
    small, large = (60, 120) if options.quick else (1000, 4000)
    cases = []
    for n, ratio in ((small, 0.01), (large, 0.1)):
        name = f"n = m = {n}, epsilon {ratio:g}, to 0.001, float32"
        given = problems.single(n, ratio, torch.float32)
        case = compare(
            name, given, peers.forward_solvers(options.peers), 1e-3, options.budget, base=OURS, say=options.say
        )
        if options.judged and n == small:
            demand(case, OURS, "mdot-tnt", _named("mdot-tnt"), 12)
            demand(case, OURS, "POT sinkhorn_log", _named("POT sinkhorn_log"), 100)
            demand(case, OURS, "OTT-JAX", _ott, 60)
        elif options.judged:
            demand(case, OURS, "every peer", lambda row: True, 4)
        for row in case.rows:
            if row.solver.startswith("sinkformer") and row.reached and row.iterations:
                bound, read, exponential = harness.bandwidth_bound(n, n, torch.float32, row.iterations)
                case.notes.append(
                    f"{row.solver}: {row.milliseconds:.1f} ms = {row.milliseconds / 1e3 / bound:.2f} x the bound of "
                    f"{1e3 * bound:.1f} ms ({row.iterations} sweeps x {1e3 * read:.2f} ms for one read of K, "
                    f"{1e3 * exponential:.1f} ms for one pass of exponentials)"
                )
        cases.append(case)
    return cases


def gradient(options: Options) -> list[Case]:
    """Forward and backward of <plan, W> with respect to the features."""
    count, high, n = (6, 16, 60) if options.quick else (64, 64, 1000)
    cases = []
    for name, given, least in (
        (f"batch of {count}, n and m in 8..{high}", problems.ragged(count, 0.1, torch.float32, high=high), 15),
        (f"n = m = {n}", problems.single(n, 0.1, torch.float32), 8),
    ):
        case = compare(
            f"forward and backward, {name}, epsilon 0.1, float32",
            given,
            peers.gradient_solvers(options.peers),
            1e-3,
            options.budget,
            base=OURS,
            measure="relative gradient error of the worst problem",
            say=options.say,
        )
        if options.judged:
            demand(case, OURS, "POT autodiff", _named("POT solve_batch, autodiff"), least)
        cases.append(case)
    return cases


def growth(options: Options) -> list[Case]:
    """Time against n, against B and against 1 / epsilon; ours and the fastest batched peer."""
    solvers = [
        solver for solver in peers.forward_solvers(options.peers) if solver.name in (OURS, PLAIN_TORCH, "mdot-tnt")
    ]
    budget = replace(options.budget, rounds=min(options.budget.rounds, 3), tuning=30.0)
    short = options.quick
    given = [
        *(
            (f"growth with n: n = m = {n}, epsilon 0.03", problems.single(n, 0.03, torch.float32))
            for n in _powers(short, 64, 2048)
        ),
        *(
            (f"growth with B: batch of {b}, n and m in 8..64, epsilon 0.03", problems.ragged(b, 0.03, torch.float32))
            for b in _powers(short, 1, 1024)
        ),
        *(
            (
                f"growth with 1/epsilon: batch of {6 if short else 64}, n and m in 8..64, epsilon {ratio:g}",
                problems.ragged(6 if short else 64, ratio, torch.float32),
            )
            for ratio in ((0.3, 0.1) if short else (0.3, 0.1, 0.03, 0.01, 0.003, 0.001))
        ),
    ]
    return [compare(name, x, solvers, 1e-3, budget, base=OURS, say=options.say) for name, x in given]


def _powers(quick: bool, low: int, high: int) -> list[int]:
    every = [low * 4**k for k in range(round(math.log(high / low, 4)) + 1)]
    every = every if every[-1] <= high else [*every[:-1], high]
    return [16] if quick else every


def memory(options: Options) -> list[Case]:
    """Peak memory of one call in a fresh process, in units of the cost matrix."""
    n = 500 if options.quick else 2000
    ours = [OURS, PLAIN_TORCH]
    forward = [x.name for x in peers.forward_solvers(options.peers) if x.safe]
    backward = [x.name for x in peers.gradient_solvers(options.peers)]
    plan = [
        ("forward", 0.1, ours if options.quick else forward),
        ("gradient", 0.1, ours if options.quick else backward),
    ]
    if not options.quick:
        plan += [("forward", 0.01, ours), ("gradient", 0.01, ours)]
    cases = []
    for kind, ratio, names in plan:
        name = f"{kind}, n = m = {n}, epsilon {ratio:g}, float32"
        case = Case(name, 1e-3, "", options.threads, [])
        options.say(f"\npeak memory, {case.name}, in units of n m 4 bytes")
        for solver in names:
            units, note = _memory_of(kind, solver, n, ratio, options)
            case.rows.append(Row(solver, note=note if units is None else f"{units:.2f}"))
            options.say(f"  {solver:<28} {case.rows[-1].note}")
        cases.append(case)
    return cases


def _memory_of(kind: str, name: str, n: int, ratio: float, options: Options) -> tuple[float | None, str]:
    command = [sys.executable, "-m", "benchmarks.worker", "memory", kind, name, str(n), str(ratio)]
    environment = peers.environment_for(options.threads)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return None, "took more than 300 s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [str(done.returncode)])[-1]
        return None, f"failed: {last[:100]}"
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return found["units"], found["note"]


def measure_memory(kind: str, name: str, n: int, ratio: float) -> dict[str, float | str | None]:
    """In this process: peak of one call minus before, after a warm-up on a small problem of another size."""
    solvers = peers.forward_solvers() if kind == "forward" else peers.gradient_solvers()
    solver = next(solver for solver in solvers if solver.name == name)
    if not solver.installed:
        return {"units": None, "note": f"skipped: {solver.package} is not installed"}
    with harness.quiet():
        few, many = problems.single(50, 0.1, torch.float32), problems.single(n, ratio, torch.float32)
        # Sweeps do not change the peak of a solver that does not keep them; those that do are given what they need.
        settings = _memory_settings(solver, many if kind == "gradient" else few)
        solver.prepare(few, settings)()
        call = solver.prepare(many, settings)
        if name.startswith("OTT"):
            call()  # XLA allocates for compilation; its buffers are freed again
        peak = harness.peak_memory(call)
    unit = n * n * 4
    return {
        "units": None if peak is None else peak / unit,
        "note": "not measured: /proc is missing" if peak is None else "",
    }


def _memory_settings(solver: peers.Solver, given: problems.Problems) -> peers.Settings:
    if solver.by_sweeps:
        return {"sweeps": 30}
    if solver.name.startswith("POT solve_batch"):
        return {"sweeps": 30}
    if solver.name == "GeomLoss solve_batch":
        return {"max_iter": 30}
    if solver.name == "mdot-tnt":
        return {"dtype": torch.float32, "p": 3.5, "padding": "none"}
    if solver.name.startswith("OTT"):
        return {"threshold": 1e-3}
    return solver.ladder(given, 1e-3)[0]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


RUN = {"batch": batch, "single": single, "gradient": gradient, "growth": growth, "memory": memory}
