"""The process that measures; started by ``benchmarks.sinkhorn`` in an environment that fixes the threads of every library.

python -m benchmarks.worker suites FILE THREADS ROUNDS QUICK PEERS SUITE...
python -m benchmarks.worker memory KIND SOLVER N RATIO
"""

import json
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks import harness, peers, suites


def keep_to_cores(threads: int) -> None:
    """As many cores as threads, so that nobody has a second one for free."""
    torch.set_num_threads(threads)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def run_suites(file: Path, options: suites.Options, names: list[str]) -> None:
    """Run suites and leave the result, JSON, in a file."""
    found, seconds = {}, {"compilation or its cache": peers.warm_up()}
    for name in names:
        start = time.perf_counter()
        found[name] = [case.as_dict() for case in suites.RUN[name](options)]
        seconds[name] = time.perf_counter() - start
    result = {"surroundings": harness.surroundings(), "threads": options.threads, "seconds": seconds, "suites": found}
    file.write_text(json.dumps(result))


def main(arguments: list[str]) -> None:
    if arguments[0] == "memory":
        kind, solver, n, ratio = arguments[1:]
        keep_to_cores(torch.get_num_threads())
        print(json.dumps(suites.measure_memory(kind, solver, int(n), float(ratio))))
        return
    file, threads, rounds, quick, with_peers, *names = arguments[1:]
    options = suites.Options(
        threads=int(threads), quick=quick == "1", peers=with_peers == "1", say=partial(print, flush=True)
    )
    budget = replace(options.budget, rounds=int(rounds))
    if options.quick:
        budget = replace(budget, once=0.02, call=5.0, tuning=3.0, extrapolate=0.2)
    keep_to_cores(options.threads)
    run_suites(Path(file), replace(options, budget=budget), names)


if __name__ == "__main__":
    main(sys.argv[1:])
