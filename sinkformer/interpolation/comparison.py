"""How many parameters exact interpolation takes: the theorem, the direct construction, a ResNet. Whole numbers only.

N sequences in R^d; K = m_1 + ... + m_N target tokens in all; n the length of the longest sequence.

==================  ================================  ==============================================================
construction        blocks                            parameters
==================  ================================  ==============================================================
theorem, hardmax    2 K + 2 N + 1                     (10 d + 8) each: eta, rho, beta, alpha, p, q and four neurons
theorem, softmax    2 K + 3 N                         the same
direct              max(1, S) + ceil(K / 2)           the same; S <= ceil(N / 4), S = 1 for data in general position
ResNet              N                                 2 d n w + w + 1 each: width w in R^(d n), on flattened sequences
lower bound                                           d K
==================  ================================  ==============================================================

The blocks of the theorem are those of arXiv 2502.02270, theorems 1.6 and 1.8, its orders O(d K) and O(d N n) for the ResNet;
the constants belong to the blocks of this package and to a ResNet of N blocks of width w, and to no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, get_args

from sinkformer.errors import ConfigError
from sinkformer.interpolation.blocks import Kind

_WIDTH = 4


def theorem_blocks(*, N: int, K: int, kind: Kind) -> int:
    """Blocks of the theorem for N sequences and K target tokens: 2 K + 2 N + 1 (hardmax) or 2 K + 3 N (softmax).

    Raises:
        ConfigError: numbers that are not whole, N < 1, K < N (every target has a token), or an unknown kind.
    """
    _check_counts(N=N, K=K)
    if K < N:
        raise ConfigError(
            f"expected K >= N, a target token for every sequence, received K={K} and N={N}; "
            f"K is the number of targets of all sequences together"
        )
    if kind not in get_args(Kind):
        raise ConfigError(f"expected kind 'hardmax' or 'softmax', received {kind!r}; name one of the two")
    return 2 * K + 2 * N + 1 if kind == "hardmax" else 2 * K + 3 * N


def block_parameters(d: int, *, dense: bool = False) -> int:
    """Parameters of a block of width four in R^d: 10 d + 8, or 2 d^2 + 8 d + 6 with dense matrices V and A."""
    _check_counts(d=d)
    neurons = _WIDTH * (2 * d + 1)
    return neurons + (2 * d * d + 2 if dense else 2 * d + 4)


def theorem_parameters(*, d: int, N: int, K: int, kind: Kind) -> int:
    """Parameters of all blocks of the theorem, structured: (10 d + 8) (2 K + 2 N + 1) for hardmax. O(d K)."""
    return block_parameters(d) * theorem_blocks(N=N, K=K, kind=kind)


def direct_blocks(*, separations: int, K: int) -> int:
    """Blocks of the direct construction with two targets for each: max(1, S) + ceil(K / 2).

    Args:
        separations: S >= 0, blocks that separate the sequences; at most ceil(N / 4).
        K: number of target tokens.
    """
    _check_counts(K=K)
    _check_counts(0, separations=separations)
    return max(1, separations) + (K + 1) // 2


def resnet_parameters(*, N: int, d: int, n: int, w: int = 1) -> int:
    """Parameters of a ResNet on flattened sequences: N blocks of width w in R^(d n), N (2 d n w + w + 1). O(d N n)."""
    _check_counts(N=N, d=d, n=n, w=w)
    return N * (2 * d * n * w + w + 1)


def lower_bound(*, d: int, K: int) -> int:
    """The number d K: fewer parameters cannot reach all targets, since these fill R^(d K) (dimension count)."""
    _check_counts(d=d, K=K)
    return d * K


def break_even(parameters: int, *, N: int, d: int, w: int = 1) -> int:
    """Smallest length n at which a ResNet of N blocks of width w has more than ``parameters`` parameters."""
    _check_counts(parameters=parameters, N=N, d=d, w=w)
    return max(1, (parameters - N * (w + 1)) // (2 * d * w * N) + 1)


@dataclass(frozen=True)
class Count:
    """One row of a comparison.

    Attributes:
        name: of the construction.
        blocks: how many.
        parameters: of all blocks.
        length: the shortest sequences for which a ResNet needs more; None for the ResNet itself.
        ratio: that length for each target token of a sequence, length / m.
    """

    name: str
    blocks: int
    parameters: int
    length: int | None
    ratio: Fraction | None


@dataclass(frozen=True)
class Comparison:
    """Counts for N sequences of length n with m targets each, in R^d.

    Attributes:
        N, n, m, d: the sizes.
        rows: theorem (hardmax, softmax), direct construction, ResNet of width one.
        bound: d K, K = N m.
    """

    N: int
    n: int
    m: int
    d: int
    rows: tuple[Count, ...]
    bound: int

    def __str__(self) -> str:
        """A table."""
        table: list[tuple[str, ...]] = [("", "blocks", "parameters", "ResNet needs more from", "n / m")]
        for row in self.rows:
            last = ("", "") if row.ratio is None else (f"n = {row.length}", f"{float(row.ratio):.2f}")
            table.append((row.name, str(row.blocks), str(row.parameters), *last))
        table.append(("lower bound d K", "", str(self.bound), "", ""))
        widths = [max(len(row[k]) for row in table) for k in range(5)]
        lines = [f"N = {self.N} sequences of n = {self.n} tokens, m = {self.m} targets each, in R^{self.d}"]
        for row in table:
            cells = (f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
            lines.append("  ".join((f"{row[0]:<{widths[0]}}", *cells)).rstrip())
        return "\n".join(lines)


def compare(*, N: int, n: int, m: int, d: int, separations: int | None = None) -> Comparison:
    """Compare the constructions on N sequences of length n with m targets each, in R^d; K = N m.

    Args:
        N: number of sequences, >= 1.
        n: their length.
        m: targets of each, 1 <= m <= n.
        d: coordinates of a token.
        separations: blocks that the direct construction separates the sequences with, the worst case ceil(N / 4) by
            default; data in general position need one.

    Raises:
        ConfigError: sizes outside their range; m > n; more separations than ceil(N / 4).

    Example:
        >>> [row.parameters for row in compare(N=10, n=100, m=1, d=16, separations=1).rows]
        [6888, 8400, 1008, 32020]
    """
    _check_counts(N=N, n=n, m=m, d=d)
    if m > n:
        raise ConfigError(f"expected m <= n, no more targets than tokens, received m={m} and n={n}; lower m or raise n")
    worst = -(-N // 4)
    separations = worst if separations is None else separations
    _check_counts(0, separations=separations)
    if separations > worst:
        raise ConfigError(
            f"expected separations <= {worst} for N={N} sequences, received {separations}; "
            f"the number is S in the ledger of a network, or None for the worst case"
        )
    K, each = N * m, block_parameters(d)
    blocks = {
        "theorem, hardmax": theorem_blocks(N=N, K=K, kind="hardmax"),
        "theorem, softmax": theorem_blocks(N=N, K=K, kind="softmax"),
        f"direct, S = {separations}": direct_blocks(separations=separations, K=K),
    }
    lengths = {name: break_even(each * count, N=N, d=d) for name, count in blocks.items()}
    rows = [
        Count(name, count, each * count, lengths[name], Fraction(lengths[name], m)) for name, count in blocks.items()
    ]
    resnet = Count("ResNet, w = 1", N, resnet_parameters(N=N, d=d, n=n), None, None)
    return Comparison(N, n, m, d, (*rows, resnet), lower_bound(d=d, K=K))


def _check_counts(least: int = 1, /, **values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"expected {name} as a whole number >= {least}, received {value!r}; give an int")
