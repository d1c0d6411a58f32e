"""Sixteen pairs of sixteen atoms of every system, one rank for all: how close the factors come, and what the bounds say.

    python -m benchmarks.approximation                       # a table for all systems
    python -m benchmarks.approximation --system switch --rank 16 --json

"unrelated" are sixteen pairs of measures of their own; "shared" are all pairs of four sources and four targets, whose factors
serve four pairs each. The rank is the first of 1, 2, 4, ... with which the measured sup W1 is within the tolerance, unless it
is given. W1 is the upper end of a bracket, for the ground metric |x - x'| + |y - y'|.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import Any

import torch

from sinkformer.approximation import build
from sinkformer.systems import every_pair, named

SYSTEMS = ("product", "eot", "whitened", "teacher", "monotone", "switch")
KINDS = ("unrelated", "shared")
ATOMS, SIDE = 16, 4


def run(name: str, kind: str, tolerance: float, rank: int | None, seed: int) -> dict[str, Any]:
    system, sampler = named(name)
    sampler = dataclasses.replace(sampler, sizes=(ATOMS, ATOMS))
    generator = torch.Generator().manual_seed(seed)
    if kind == "shared":
        pairs = every_pair(*sampler.block(1, SIDE, SIDE, generator=generator))
    else:
        pairs = sampler.pairs(SIDE**2, generator=generator)
    targets, started = system(*pairs), time.process_time()
    found = build(targets, tolerance, rank=rank, on_failure="ignore")
    seconds = round(time.process_time() - started, 1)
    return {"system": name, "pairs": kind, "rank": found.factors.rank, "seconds": seconds} | found.ledger.to_dict()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=SYSTEMS, help="all by default")
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one line of JSON for each run, with the whole ledger")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if not arguments.json:
        print(
            "| system | pairs | rank | smoothing | density | separation | sup W1 | bound | CPU s |\n" + "|---" * 9 + "|"
        )
    for name in SYSTEMS if arguments.system is None else (arguments.system,):
        for kind in KINDS:
            row = run(name, kind, arguments.tolerance, arguments.rank, arguments.seed)
            if arguments.json:
                print(json.dumps(row), flush=True)
                continue
            steps = " | ".join(f"{step['measured']:.1e}" for step in row["steps"])
            sup = f"{row['measured']:.1e} | {row['bound']:.1e}"
            print(f"| {name} | {kind} | {row['rank']} | {steps} | {sup} | {row['seconds']} |", flush=True)


if __name__ == "__main__":
    main()
