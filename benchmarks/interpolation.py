"""Exact interpolation by size: seconds to construct and to prove, counts beside the theorem, errors of the exports.

    python -m benchmarks.interpolation                                      # a few minutes on one core
    python -m benchmarks.interpolation --quick                              # small sizes: does it work?
    python -m benchmarks.interpolation --markdown docs/interpolation.md     # also rewrites the table of that page

Data are standard normal but for two adversarial families: all sequences have the same mean, or two and two. A row counts only
if the certificate proves it and its counts are those of the formulas. Exits with 1 if one does not, or a target of time or
error is missed. Seconds are of one core.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import replace_marked
from sinkformer.errors import PrecisionError, PrecisionWarning
from sinkformer.interpolation import Interpolant, block_parameters, construct, theorem_blocks

Data = tuple[list, list]


@dataclass(frozen=True)
class Size:
    """One data set and what is asked of it.

    Attributes:
        name: in the table.
        data: makes it.
        seconds: the most that construction and proof may take, by method; None asks for the proof alone.
        float64: the largest error of the float64 export, relative to max |Y|.
        float32: the same for float32.
    """

    name: str
    data: Callable[[], Data]
    seconds: dict[str, float | None]
    float64: float | None = None
    float32: float | None = None


def normal(N: int, n: int, m: int, d: int, seed: int = 0) -> Data:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal((n, d)) for _ in range(N)], [generator.standard_normal((m, d)) for _ in range(N)]


def equal_means(N: int) -> Data:
    """{-a, a} around one point, for N different a, and a third token that is the mean itself in every other one."""
    X = [[[-(j + 1.0), 0.0], [j + 1.0, 0.0]] + [[0.0, 0.0]] * (j % 2) for j in range(N)]
    return X, [[[float(j), 1.0]] for j in range(N)]


def swapped(N: int) -> Data:
    """Pairs {0, 3} and {1, 2} at disjoint places: the two of a pair have one mean, and the pairs lie far apart."""
    X = [[[100.0 * (j // 2) + t, 0.0] for t in ((0, 3) if j % 2 else (1, 2))] for j in range(N)]
    return X, [[[float(j), 1.0]] for j in range(N)]


SIZES = [
    Size(
        "N=200, n=10, m=5, d=16",
        lambda: normal(200, 10, 5, 16),
        {"paper": 10, "direct": 2, "two-pass": None, "knots": None},
        1e-13,
    ),
    Size("N=1000, n=8, m=5, d=768", lambda: normal(1000, 8, 5, 768), {"direct": 60}),
    Size("equal means, N=24", lambda: equal_means(24), {"paper": None, "direct": None}),
    Size("swapped, N=24", lambda: swapped(24), {"paper": None, "direct": None}),
    Size("N=30, n=10, m=5, d=8", lambda: normal(30, 10, 5, 8), {"two-pass": None}, 1e-13, 1e-6),
    Size("N=150, n=6, m=1, d=16", lambda: normal(150, 6, 1, 16), {"two-pass": None}, 1e-13, 1e-6),
    Size("N=10, n=1000, m=3, d=16", lambda: normal(10, 1000, 3, 16), {"paper": None, "direct": None}),
]
QUICK = [
    Size(
        "N=6, n=5, m=2, d=3",
        lambda: normal(6, 5, 2, 3),
        {"paper": 10, "direct": 2, "two-pass": None, "knots": None},
        1e-13,
    )
]
HEADER = ["data", "method", "attention", "K", "L", "formula", "P", "construct, s", "prove, s", "float64", "float32"]


def formula(built: Interpolant) -> tuple[str, bool]:
    """The number of blocks by the formula, and whether it is that."""
    pairs = built.pairs
    S = max(1, next(e.constants["S"] for e in built.ledger if e.phase == "separation"))
    K = pairs.K
    if built.method == "paper":
        words = "2K + 2N + 1" if built.kind == "hardmax" else "2K + 3N"
        expected = theorem_blocks(N=pairs.N, K=K, kind=built.kind)
        return f"{words} = {expected}", built.L == expected
    if S > -(-pairs.N // 4):
        return f"S = {S}", False
    if built.method == "knots":
        return f"{S} + packing", S + -(-K // 4) <= built.L <= S + -(-K // 2)
    more = K if built.method == "two-pass" else 0
    expected = S + more + -(-K // 2)
    return f"{S} + {'K + ' if more else ''}ceil(K / 2) = {expected}", built.L == expected


def exported(built: Interpolant, dtype: torch.dtype, wanted: float | None) -> tuple[str, bool]:
    """The measured error in words, and whether it is small enough."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecisionWarning)
            error = built.export(dtype).measured
    except PrecisionError:
        return "refused", wanted is None
    return f"{error:.1e}", wanted is None or error <= wanted


def measure(size: Size, method: str, attention: str) -> tuple[list[str], list[str]]:
    """A row of the table, and what is wrong with it."""
    X, Y = size.data()
    start = time.process_time()
    built = construct(X, Y, method=method, attention=attention)
    middle = time.process_time()
    verdict = built.certificate.check()
    stop = time.process_time()
    words, right = formula(built)
    wrong = [] if verdict else [str(verdict)]
    wrong += [] if right and built.parameters == block_parameters(built.pairs.d) * built.L else [f"counts: {words}"]
    limit = size.seconds[method]
    if limit is not None and stop - start > limit:
        wrong.append(f"{stop - start:.1f} s, asked: {limit:g} s")
    errors = []
    heavy = built.parameters > 10**7
    asked = method in ("paper", "two-pass")
    for dtype, wanted in ((torch.float64, size.float64), (torch.float32, size.float32)):
        said, fine = ("", True) if heavy else exported(built, dtype, wanted if asked else None)
        errors.append(said)
        wrong += [] if fine else [f"{dtype}: error {said}, asked: {wanted:g}"]
    figures = [f"{middle - start:.1f}", f"{stop - middle:.1f}", *errors]
    counts = [str(built.pairs.K), str(built.L), words, str(built.parameters)]
    return [size.name, method, attention, *counts, *figures], [
        f"{size.name}, {method}, {attention}: {w}" for w in wrong
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--markdown", type=Path, help="page whose marked table is replaced")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows, wrong = [], []
    for size in QUICK if arguments.quick else SIZES:
        for method in size.seconds:
            for attention in ("hardmax", "softmax") if method == "paper" else ("hardmax",):
                row, complaints = measure(size, method, attention)
                print("  ".join(row), flush=True)
                rows.append(row)
                wrong += complaints
    if arguments.markdown is not None:
        grid = [HEADER, ["---"] * 3 + ["---:"] * 2 + ["---"] + ["---:"] * 5, *rows]
        table = "\n".join("| " + " | ".join(line) + " |" for line in grid)
        page = arguments.markdown.read_text(encoding="utf-8")
        arguments.markdown.write_text(replace_marked(page, {"interpolation": table}), encoding="utf-8")
    print("\n".join(wrong) or "all proved, all targets met")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
