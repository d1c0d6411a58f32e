"""How many blocks separate the sequences: with one mean, with several pooled features, with heads for mean, maximum and minimum.

    python -m benchmarks.interpolation_heads
    python -m benchmarks.interpolation_heads --size 64 --seed 1 --json

After the reduction a sequence is a finite set of numbers, and attention with A = 0 knows the mean of whatever the feed-forward
layers before it make of them: of piecewise linear functions, with as many kinks as there were neurons. Means are linear: the
features ``t, relu(t - b_1), ..., relu(t - b_k)``, pooled in k + 1 coordinates, tell two sequences apart if and only if the mean
of ``g(t) = t + sum_i s_i relu(t - b_i)`` does, for all slopes outside a few hyperplanes. So coordinates do not count, nor do
heads that all take means; kinks do, and heads that take something else: here the maximum (``A = e_1 e_1^T``, t > 0) and the
minimum (``A = -e_1 e_1^T``). Columns:

    means    different means, without a kink
    r        kinks, chosen greedily, after which all N means differ; at most N - 1
    c=2..4   blocks if each pools t and c - 1 kinks in c coordinates: max(1, ceil(r / (c - 1)))
    S        blocks of ``construct``, with all kinks on one line, three in the first block: max(1, ceil((r + 1) / 4))
    proved   whether its certificate holds
    r', S'   the same with two more heads, for the maximum and the minimum; counted, not built

All arithmetic is rational.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np

from sinkformer.interpolation.construction import construct
from sinkformer.interpolation.datasets import SequencePairs
from sinkformer.interpolation.phases.projection import ceiling
from sinkformer.interpolation.phases.reduction import reduce_to_line
from sinkformer.interpolation.phases.separation import kinks
from sinkformer.interpolation.rationals import rational

WIDTH = 4
COLUMNS = ("family", "N", "means", "r", "c=2", "c=3", "c=4", "S", "proved", "r'", "S'")


def families(N: int, seed: int) -> Iterator[tuple[str, list[Any]]]:
    yield "random", np.random.default_rng(seed).normal(size=(N, 8, 2)).tolist()
    yield "leave one out", [[[i] for i in range(N) if i != j] for j in range(N)]
    yield "opposite numbers", [[[-j], [j]] for j in range(1, N + 1)]
    sums = [x for x in combinations(range(16), 4) if sum(x) == 30]
    yield "equal sums", [[[t] for t in x] for x in random.Random(seed).sample(sums, min(N, len(sums)))]
    pairs = [((c, c + 3), (c + 1, c + 2)) for c in range(0, 5 * N, 10)]
    yield "pairs of equal means", [[[t] for t in x] for pair in pairs for x in pair][:N]
    # Sequence j differs from the others at place j alone, which moves no mean, maximum or minimum.
    ends = [[-10], [10 * N]]
    inner = [[*ends, *([10 * i + t] for i in range(N) for t in ((0, 3) if i == j else (1, 2)))] for j in range(N)]
    yield "one place each", inner


def measure(name: str, X: list[Any], seed: int) -> dict[str, Any]:
    N = len(X)
    pairs = SequencePairs(X, [[[j % 7 - 3] * len(X[0][0])] for j in range(N)])
    built = construct(pairs, method="direct", seed=seed)
    separation = next(e for e in built.ledger if e.phase == "separation").constants
    line, _ = reduce_to_line(pairs, ceiling(pairs), pairs.scale, rational(1, 16), seed)
    means = [sum(t, rational(0)) / len(t) for t in line.tokens]
    r = int(separation["kinks"])
    more = kinks(line.tokens, [(mean, min(t), max(t)) for mean, t in zip(means, line.tokens, strict=True)])
    assert separation["S"] == line_blocks(r)
    values = [name, N, len(set(means)), r, *(max(1, math.ceil(r / (c - 1))) for c in (2, 3, 4)), separation["S"]]
    values += [built.certificate.check().status == "proved", len(more), line_blocks(len(more))]
    return dict(zip(COLUMNS, values, strict=True))


def line_blocks(kinks: int) -> int:
    return max(1, math.ceil((kinks + 1) / WIDTH))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, help="N; 16 and 64 by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one line of JSON for each family, with CPU seconds")
    arguments = parser.parse_args(argv)
    if not arguments.json:
        print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for N in (16, 64) if arguments.size is None else (arguments.size,):
        for name, X in families(N, arguments.seed):
            started = time.process_time()
            row = measure(name, X, arguments.seed)
            if arguments.json:
                print(json.dumps(row | {"seconds": round(time.process_time() - started, 1)}), flush=True)
            else:
                print("| " + " | ".join(map(str, row.values())) + " |", flush=True)


if __name__ == "__main__":
    main()
