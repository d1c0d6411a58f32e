"""W1 between two couplings of n x n atoms: exact values and brackets, their time and memory, against POT on the same problem.

    python -m benchmarks.w1                              # everything; some minutes
    python -m benchmarks.w1 --quick                      # small sizes: does it run?
    python -m benchmarks.w1 --json run.json --markdown docs/w1.md

One thread. Times are CPU seconds of the process, so that other work on the machine changes them little. Exits with 1 if a
bracket misses its width or its time, an exact value is slower than POT, or differs from POT's by more than 1e-9.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ot
import torch
from scipy.spatial.distance import cdist

import sinkformer as sf
from benchmarks import harness, report
from sinkformer.metrics import w1

KINDS = ("unrelated", "near", "product")


@dataclass(frozen=True)
class Task:
    """What is asked at one size.

    Attributes:
        n: atoms on each side of either coupling.
        tol: relative width, 0 for the exact value.
        against_pot: whether POT solves it too, in the same rounds.
        seconds: most CPU seconds, as promised; None for a report without a promise.
    """

    n: int
    tol: float
    against_pot: bool = False
    seconds: float | None = None


FULL = (Task(32, 0.0, True), Task(64, 0.0, True), Task(128, 0.0), Task(128, 0.001), Task(256, 0.01, seconds=5.0))
QUICK = (Task(16, 0.0, True), Task(32, 0.01))


@dataclass
class Row:
    """One measurement."""

    n: int
    kind: str
    tol: float
    value: float
    width: float
    method: str
    seconds: float
    megabytes: float | None
    pot: float | None = None
    ratios: list[float] = field(default_factory=list)
    difference: float | None = None


def couplings(n: int, kind: str, seed: int = 0) -> tuple[Any, Any]:
    """Two couplings of one pair of clouds in the square: an entropic one for |x - y|^2, and another.

    "unrelated": for the squared distance after a random linear map; "near": for costs with noise of 0.02; "product".
    """
    g = torch.Generator().manual_seed(seed)
    double = {"dtype": torch.float64, "generator": g}
    x, y = (2 * torch.rand(n, 2, **double) - 1 for _ in "xy")
    a, b = (torch.rand(n, **double).log().neg() + 0.1 for _ in "ab")
    mu, nu = sf.Measure.normalized(x, a), sf.Measure.normalized(y, b)
    cost = sf.SqEuclidean()(x, y)
    pi = sf.Coupling.solve(mu, nu, cost=cost, epsilon=0.1).rounded()
    if kind == "product":
        return pi, sf.Coupling.from_dense(mu, nu, mu.weights[:, None] * nu.weights)
    other = sf.SqEuclidean()(x @ torch.randn(2, 2, **double), y) if kind == "unrelated" else None
    noisy = cost + 0.02 * torch.randn(n, n, **double) if other is None else other
    return pi, sf.Coupling.solve(mu, nu, cost=noisy, epsilon=0.1).rounded()


def pot(pi: Any, rho: Any) -> float:
    """The same number as a user of POT would get it: common mass cancelled, all pairs that are left."""
    difference = (pi.to_dense() - rho.to_dense()).numpy()
    i, j = np.nonzero(difference > 0)
    k, l = np.nonzero(difference < 0)  # noqa: E741
    dx, dy = (cdist(p, p) for p in (pi.source.points.numpy(), pi.target.points.numpy()))
    supply, demand = difference[i, j], -difference[k, l]
    moved = supply.sum()
    costs = dx[np.ix_(i, k)] + dy[np.ix_(j, l)]
    return float(moved * ot.emd2(supply / moved, demand / demand.sum(), costs, numItermax=100_000_000))


def cpu_seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def peak_megabytes(task: Task, kind: str) -> float | None:
    """Peak of one call in a process of its own: here, memory freed by earlier calls would hide it."""
    command = [sys.executable, "-m", "benchmarks.w1", "--one", str(task.n), kind, str(task.tol)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def one(n: int, kind: str, tol: float) -> None:
    """Print the peak of one call, in MB."""
    w1(*couplings(8, kind))
    pi, rho = couplings(n, kind)
    peak = harness.peak_memory(lambda: w1(pi, rho, tol=tol))
    print(json.dumps(None if peak is None else peak / 2**20))


def measure(task: Task, kind: str, rounds: int) -> Row:
    pi, rho = couplings(task.n, kind)
    found = w1(pi, rho, tol=task.tol)
    seconds, peers, expected = [], [], None
    for _ in range(rounds):
        elapsed, found = cpu_seconds(lambda: w1(pi, rho, tol=task.tol))
        seconds.append(elapsed)
        if task.against_pot:
            elapsed, expected = cpu_seconds(lambda: pot(pi, rho))
            peers.append(elapsed)
    return Row(
        n=task.n,
        kind=kind,
        tol=task.tol,
        value=float(found.value),
        width=float(found.width / found.upper),
        method=str(found.method),
        seconds=statistics.median(seconds),
        megabytes=peak_megabytes(task, kind) if task.n >= 64 else None,
        pot=statistics.median(peers) if peers else None,
        ratios=[peer / own for own, peer in zip(seconds, peers, strict=False)],
        difference=None if expected is None else abs(expected - float(found.value)),
    )


def table(rows: list[Row]) -> str:
    header = [
        "n = m",
        "couplings",
        "asked",
        "W1",
        "relative width",
        "s",
        "peak MB",
        "POT s",
        "POT / ours",
        "difference",
    ]
    lines = [header, ["---:", "---", "---", *["---:"] * 7]]
    for row in rows:
        asked = "exact" if row.tol == 0 else f"{100 * row.tol:g} %"
        peak = "" if row.megabytes is None else f"{row.megabytes:.0f}"
        peer = ["", "", ""]
        if row.pot is not None and row.difference is not None:
            middle, low, high = harness.median_range(row.ratios)
            peer = [f"{row.pot:.2f}", f"{middle:.1f} [{low:.1f}, {high:.1f}]", f"{row.difference:.0e}"]
        lines.append(
            [str(row.n), row.kind, asked, f"{row.value:.5f}", f"{row.width:.0e}", f"{row.seconds:.2f}", peak, *peer]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def failures(tasks: tuple[Task, ...], rows: list[Row], timed: bool) -> list[str]:
    """What was promised and not kept."""
    limits = {(task.n, task.tol): task.seconds for task in tasks}
    found = []
    for row in rows:
        name = f"{row.n} x {row.n}, {row.kind}"
        if row.width > max(row.tol, 1e-9):
            found.append(f"{name}: relative width {row.width:.1e}, asked {row.tol:g}")
        if row.difference is not None and row.difference > 1e-9:
            found.append(f"{name}: differs from POT by {row.difference:.1e}")
        limit = limits[row.n, row.tol]
        if timed and limit is not None and row.seconds > limit:
            found.append(f"{name}: {row.seconds:.1f} s, promised {limit:g} s")
        if timed and row.ratios and row.n >= 64 and statistics.median(row.ratios) < 1:
            found.append(f"{name}: slower than POT, {statistics.median(row.ratios):.2f}")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds in which both solvers are timed")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round")
    parser.add_argument("--json", type=Path, help="file for the measurements")
    parser.add_argument("--markdown", type=Path, help="page whose marked table is replaced")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.one:
        one(int(arguments.one[0]), arguments.one[1], float(arguments.one[2]))
        return 0
    tasks, rounds = (QUICK, 1) if arguments.quick else (FULL, arguments.rounds)

    rows = []
    for task in tasks:
        for kind in KINDS:
            rows.append(measure(task, kind, rounds))
            print(table(rows[-1:]).splitlines()[-1], rows[-1].method, flush=True)
    text = table(rows)
    if arguments.quick:
        text += "\n\n**From a `--quick` run: small sizes, no finding.**"
    about = ", ".join(harness.surroundings().values())
    print(f"\n{text}\n\n{about}")
    if arguments.json:
        found = {"surroundings": harness.surroundings(), "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(found, indent=1))
    if arguments.markdown:
        arguments.markdown.write_text(report.replace_marked(arguments.markdown.read_text(), {"wone": text}))
    failed = failures(tasks, rows, timed=not arguments.quick)
    for line in failed:
        print(f"GATE: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
