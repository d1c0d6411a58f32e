"""Sweeps of one large coupling with its kernel stored: K = b exp((f + g - C) / epsilon), in two or four bytes a pair.

The plan is diag(a u) K diag(v). K is built from the features in one pass, which also sums its rows and columns before and
after they are rounded: quotients of the two sums correct the rounded kernel, exactly so at u = v = 1. A sweep reads K once
where a block of rows stays in the cache between the two products, and twice where rows are longer than that:

    u <- 1 / (K v) or beyond, v <- b / (K^T a u) or beyond.

Shares of the columns go to a buffer, one row of it for each program, and are added up in a fixed order: no atomics, the
same result every time. Exponents are in units of log 2. Rows of K, and all that belongs to columns, are padded with zeros
to a ``width`` that is a multiple of 16: only then are they read 16 bytes at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sinkformer.ops.triton import current

# Larger exponents are potentials out of proportion; the sums then say so.
_LARGEST_EXPONENT = tl.constexpr(96.0)
# Larger violations are not squared: float32 has no room for it, and nobody compares them.
_LARGEST_VIOLATION = tl.constexpr(1e10)
# Smaller sums have lost their mass to underflow: nothing is scaled by one over them.
_LEAST_SUM = tl.constexpr(1e-35)
# Bytes of a block of rows that is read again out of the first-level cache, of which two programs share one, and the
# fewest and most rows of a block: fewer make too many shares of the columns.
_CACHED, _FEWEST_ROWS, _MOST_ROWS = 96 * 1024, 4, 16
# Tiles of the building pass: rows, columns, features at a time, warps. Entries of a tile of the products: more would not
# leave registers for two programs of so many warps. Rows of a tile of the shares, whose columns are what the threads of
# all warps read in 16 bytes each, so that rows are added up within a thread. Shares and columns of the reduction.
_BUILD, _TILE, _WARPS, _SHARE_ROWS, _REDUCE = (64, 128, 16, 8), 8192, 8, 8, (32, 64)
_REDUCE_WARPS, _BUILD_STAGES = 4, 1
# Programs for each multiprocessor: of those that stay, and of those that come and go.
_RESIDENT, _OVERSUBSCRIBED = 2, 8


@triton.jit
def _build(
    q,
    k,
    f,
    rest_f,
    g,
    rest_g,
    a,
    kernel,
    row_sums,
    column_sums,
    n,
    m,
    r,
    width,
    split,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """A block of rows of K for one range of columns, and its sums: [0] exact, [1] of the rounded entries."""
    block, part = tl.program_id(0), tl.program_id(1)
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row = rows < n
    row_at = rows.to(tl.int64)
    along = tl.arange(0, BLOCK_R)
    of_row = tl.load(f + rows, mask=has_row, other=float("-inf"))
    small_of_row = tl.load(rest_f + rows, mask=has_row, other=0.0)
    weight = tl.load(a + rows, mask=has_row, other=0.0)
    exact = tl.full((BLOCK_N,), 0.0, tl.float32)
    rounded = tl.full((BLOCK_N,), 0.0, tl.float32)
    for start in range(part * split, tl.minimum((part + 1) * split, width), BLOCK_M):
        columns = start + tl.arange(0, BLOCK_M)
        has_column = columns < width
        has_point = columns < m
        column_at = columns.to(tl.int64)
        exponent = tl.full((BLOCK_N, BLOCK_M), 0.0, tl.float32)
        for first in range(0, r, BLOCK_R):
            here = first + along
            left = tl.load(
                q + row_at[:, None] * r + here[None, :], mask=has_row[:, None] & (here < r)[None, :], other=0.0
            )
            right = tl.load(
                k + column_at[None, :] * r + here[:, None], mask=has_point[None, :] & (here < r)[:, None], other=0.0
            )
            exponent = tl.dot(left, right, exponent, input_precision="ieee")
        of_column = tl.load(g + columns, mask=has_column, other=float("-inf"))
        small_of_column = tl.load(rest_g + columns, mask=has_column, other=0.0)
        # The large terms cancel first; what rounding took from the potentials is then small beside what is left.
        exponent = ((exponent + of_row[:, None]) + of_column[None, :]) + (
            small_of_row[:, None] + small_of_column[None, :]
        )
        entry = tl.exp2(tl.minimum(exponent, _LARGEST_EXPONENT))
        narrow = entry.to(kernel.dtype.element_ty)
        tl.store(
            kernel + row_at[:, None] * width + columns[None, :], narrow, mask=has_row[:, None] & has_column[None, :]
        )
        wide = narrow.to(tl.float32)
        exact += tl.sum(entry, 1)
        rounded += tl.sum(wide, 1)
        place = column_sums + block.to(tl.int64) * 2 * width + columns
        tl.store(place, tl.sum(entry * weight[:, None], 0), mask=has_column)
        tl.store(place + width, tl.sum(wide * weight[:, None], 0), mask=has_column)
    place = row_sums + part.to(tl.int64) * 2 * n + rows
    tl.store(place, exact, mask=has_row)
    tl.store(place + n, rounded, mask=has_row)


@triton.jit
def _sweep_rows(
    kernel,
    a,
    correction,
    v,
    u,
    shares,
    sums,
    n,
    width,
    t,
    SHARING: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Update u for blocks of rows; ``SHARING`` adds up their share of K^T a u from the rows just read.

    Sums, for every lane of a program: violation by the new u, squared violation by the old one, smallest and largest new u,
    mass with the new u.
    """
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_M)
    violation = tl.full((BLOCK_N,), 0.0, tl.float32)
    before = tl.full((BLOCK_N,), 0.0, tl.float32)
    mass = tl.full((BLOCK_N,), 0.0, tl.float32)
    smallest = tl.full((BLOCK_N,), float("inf"), tl.float32)
    largest = tl.full((BLOCK_N,), 0.0, tl.float32)
    for block in range(program, (n + BLOCK_N - 1) // BLOCK_N, tl.num_programs(0)):
        rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
        has_row = rows < n
        row_at = rows.to(tl.int64) * width
        products = tl.full((BLOCK_N, BLOCK_M), 0.0, tl.float32)
        for start in range(0, width, BLOCK_M):
            columns = start + lanes
            has_column = columns < width
            entry = tl.load(
                kernel + row_at[:, None] + columns[None, :], mask=has_row[:, None] & has_column[None, :], other=0.0
            )
            products += entry.to(tl.float32) * tl.load(v + columns, mask=has_column, other=0.0)[None, :]
        total = tl.sum(products, 1) * tl.load(correction + rows, mask=has_row, other=1.0)
        old = tl.load(u + rows, mask=has_row, other=1.0)
        weight = tl.load(a + rows, mask=has_row, other=0.0)
        total = tl.where(total > _LEAST_SUM, total, 1 / old)
        current = old * total
        new = ((1 + t) + (1 - t) * current) / ((1 - t) + (1 + t) * current) / total
        tl.debug_barrier()  # other threads of this program may still read the old u
        tl.store(u + rows, new, mask=has_row)
        violation += weight * tl.abs(new * total - 1)
        mass += weight * (new * total)
        excess = tl.minimum(tl.abs(current - 1), _LARGEST_VIOLATION)
        before += weight * excess * excess
        smallest = tl.minimum(smallest, tl.where(weight > 0, new, float("inf")))
        largest = tl.maximum(largest, tl.where(weight > 0, new, 0.0))
        if SHARING:
            scaled = weight * new
            again = tl.full((BLOCK_M,), block, tl.int32) != program
            for start in range(0, width, BLOCK_M):
                columns = start + lanes
                has_column = columns < width
                entry = tl.load(
                    kernel + row_at[:, None] + columns[None, :], mask=has_row[:, None] & has_column[None, :], other=0.0
                )
                place = shares + program.to(tl.int64) * width + columns
                so_far = tl.load(place, mask=has_column & again, other=0.0)
                tl.store(place, so_far + tl.sum(entry.to(tl.float32) * scaled[:, None], 0), mask=has_column)
            # Another thread may read what this one wrote.
            tl.debug_barrier()
    place = sums + program * BLOCK_N + tl.arange(0, BLOCK_N)
    others = tl.num_programs(0) * BLOCK_N
    tl.store(place, violation)
    tl.store(place + others, before)
    tl.store(place + 2 * others, smallest)
    tl.store(place + 3 * others, largest)
    tl.store(place + 4 * others, mass)


@triton.jit
def _share_columns(kernel, a, u, shares, n, width, split, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """The share of one range of rows in K^T a u, for a block of columns."""
    part = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    has_column = columns < width
    total = tl.full((BLOCK_M,), 0.0, tl.float32)
    for start in range(part * split, tl.minimum((part + 1) * split, n), BLOCK_N):
        rows = start + tl.arange(0, BLOCK_N)
        has_row = rows < n
        scaled = tl.load(a + rows, mask=has_row, other=0.0) * tl.load(u + rows, mask=has_row, other=0.0)
        entry = tl.load(
            kernel + rows.to(tl.int64)[:, None] * width + columns[None, :],
            mask=has_row[:, None] & has_column[None, :],
            other=0.0,
        )
        total += tl.sum(entry.to(tl.float32) * scaled[:, None], 0)
    tl.store(shares + part.to(tl.int64) * width + columns, total, mask=has_column)


@triton.jit
def _sweep_columns(shares, b, correction, v, sums, count, width, t, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr):
    """Update v for a block of columns from the shares of K^T a u; sums as those of the rows, of the old v."""
    block = tl.program_id(0)
    columns = block * BLOCK_M + tl.arange(0, BLOCK_M)
    has_column = columns < width
    total = tl.full((BLOCK_M,), 0.0, tl.float32)
    for start in range(0, count, BLOCK_P):
        parts = start + tl.arange(0, BLOCK_P)
        share = tl.load(
            shares + parts.to(tl.int64)[:, None] * width + columns[None, :],
            mask=(parts < count)[:, None] & has_column[None, :],
            other=0.0,
        )
        total += tl.sum(share, 0)
    total *= tl.load(correction + columns, mask=has_column, other=1.0)
    old = tl.load(v + columns, mask=has_column, other=1.0)
    weight = tl.load(b + columns, mask=has_column, other=0.0)
    live = (weight > 0) & (total > _LEAST_SUM)
    safe = tl.where(live, total, 1.0)
    wanted = tl.where(live, weight, 1.0)
    current = old * safe
    new = wanted / safe * ((1 + t) * wanted + (1 - t) * current) / ((1 - t) * wanted + (1 + t) * current)
    new = tl.where(live, new, old)
    tl.store(v + columns, new, mask=has_column)
    excess = tl.abs(tl.where(live, current - wanted, weight))
    tl.store(sums + columns, excess, mask=has_column)
    excess = tl.minimum(excess, _LARGEST_VIOLATION)
    tl.store(sums + width + columns, tl.where(live, excess * excess / wanted, weight), mask=has_column)
    tl.store(sums + 2 * width + columns, tl.where(live, new, float("inf")), mask=has_column)
    tl.store(sums + 3 * width + columns, tl.where(live, new, 0.0), mask=has_column)
    tl.store(sums + 4 * width + columns, tl.where(live, current, 0.0), mask=has_column)


class Look(NamedTuple):
    """What the last sweep saw.

    Attributes:
        error: L1 violation of both marginals by the new u and the old v, in the corrected kernel.
        quotient: squared violation of the columns by the new u over that of the rows by the old one, both relative to
            the weights; after a plain sweep an estimate of the rate, see ``relaxation``.
        smallest, largest: of u and v.
    """

    error: float
    quotient: float
    smallest: float
    largest: float


@dataclass(eq=False)
class Kernel:
    """The stored kernel of a problem of n x m atoms, and the factors u and v of the plan diag(a u) K diag(v).

    Attributes:
        a, b: weights ``(n,)`` and ``(m,)``, float32, contiguous; zero is padding.
        dtype: of the entries, bfloat16 or float32.
    """

    a: Tensor
    b: Tensor
    dtype: torch.dtype = torch.bfloat16
    _layout: _Layout = field(init=False)

    def __post_init__(self):
        """Reserve all memory, for every kernel of the problem."""
        n, m, device = len(self.a), len(self.b), self.a.device
        self._layout = layout = _Layout.of(n, m, self.dtype.itemsize, _multiprocessors(device))
        self._entries = torch.empty(n, layout.width, dtype=self.dtype, device=device)
        self._shares = self.a.new_empty(layout.shares, layout.width)
        self._row_sums = self.a.new_empty(5, layout.programs * layout.rows)
        self._column_sums = self.a.new_empty(5, layout.width)
        self._padded_b = self._padded(self.b, 0.0)
        self._begin(torch.ones_like(self.a), torch.ones_like(self._padded_b))

    @property
    def v(self) -> Tensor:
        """The factors of the columns, ``(m,)``."""
        return self._v[: len(self.b)]

    def _begin(self, correct_rows: Tensor, correct_columns: Tensor) -> None:
        self._correct_rows, self._correct_columns = correct_rows, correct_columns
        self.u, self._v = torch.ones_like(correct_rows), torch.ones_like(correct_columns)

    def _padded(self, t: Tensor, value: float) -> Tensor:
        return torch.nn.functional.pad(t, (0, self._layout.width - len(t)), value=value)

    def build(self, q: Tensor, k: Tensor, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """K_ij = 2^(f_i + <q_i, k_j> + g_j), and u = v = 1.

        Args:
            q: features ``(n, r)``, float32, in units that make scores exponents of two.
            k: features ``(m, r)``, float32.
            f: ``(n,)``, float64, finite.
            g: ``(m,)``, float64, with the logarithms of b; ``-inf`` where b is zero.

        Returns:
            K 1 ``(n,)`` and K^T a ``(m,)``, float32, of the kernel before its entries are rounded.
        """
        (n, r), m, layout = q.shape, len(k), self._layout
        rows, columns, features, warps = _BUILD
        row_sums = self.a.new_empty(layout.parts, 2, n)
        column_sums = self.a.new_empty(triton.cdiv(n, rows), 2, layout.width)
        (f, rest_f), (g, rest_g) = _in_two(f), _in_two(self._padded(g, -torch.inf))
        _launch(
            _build,
            (triton.cdiv(n, rows), layout.parts),
            q.contiguous(),
            k.contiguous(),
            f,
            rest_f,
            g,
            rest_g,
            self.a,
            self._entries,
            row_sums,
            column_sums,
            n,
            m,
            r,
            layout.width,
            layout.split,
            BLOCK_N=rows,
            BLOCK_M=columns,
            BLOCK_R=features,
            num_warps=warps,
            num_stages=_BUILD_STAGES,
        )
        by_row, rounded_by_row = row_sums.sum(0)
        by_column, rounded_by_column = column_sums.sum(0)
        self._begin(_quotient(by_row, rounded_by_row), _quotient(by_column, rounded_by_column))
        return by_row, by_column[:m]

    def sweep(self, t: float) -> None:
        """One sweep, going the fraction t beyond the plain updates. Nothing waits for it."""
        n, layout = len(self.a), self._layout
        _launch(
            _sweep_rows,
            (layout.programs,),
            self._entries,
            self.a,
            self._correct_rows,
            self._v,
            self.u,
            self._shares,
            self._row_sums,
            n,
            layout.width,
            t,
            SHARING=layout.fused,
            BLOCK_N=layout.rows,
            BLOCK_M=layout.columns,
            num_warps=_WARPS,
        )
        if not layout.fused:
            _launch(
                _share_columns,
                (triton.cdiv(layout.width, layout.share_columns), layout.shares),
                self._entries,
                self.a,
                self.u,
                self._shares,
                n,
                layout.width,
                layout.share_split,
                BLOCK_N=_SHARE_ROWS,
                BLOCK_M=layout.share_columns,
                num_warps=_WARPS,
            )
        parts, columns = _REDUCE
        _launch(
            _sweep_columns,
            (triton.cdiv(layout.width, columns),),
            self._shares,
            self._padded_b,
            self._correct_columns,
            self._v,
            self._column_sums,
            layout.shares,
            layout.width,
            t,
            BLOCK_P=parts,
            BLOCK_M=columns,
            num_warps=_REDUCE_WARPS,
        )

    def look(self) -> Look:
        """At the last sweep; waits for it.

        The mass that it saw in the rows, and that in the columns, are made equal for the next ones. They are the same in one
        kernel, but the corrections are those of two; their quotient is a constant that u and v never agree on, and the
        relaxation would magnify it.
        """
        both = self._row_sums, self._column_sums
        by_row, by_column = (h[4].sum(dtype=torch.float64) for h in both)
        ratio = (by_row / by_column).nan_to_num(1.0, 1.0, 1.0)
        self._correct_columns = (self._correct_columns * ratio).to(torch.float32)
        found = (
            *(h[:2].sum(-1) for h in both),
            *(h[2].amin(-1, True) for h in both),
            *(h[3].amax(-1, True) for h in both),
        )
        on_rows, before, on_columns, after, *ends = torch.cat(found).tolist()
        quotient = after / before if before > 0 else 0.0
        return Look(on_rows + on_columns, quotient, min(ends[:2]), max(ends[2:]))


@dataclass(frozen=True)
class _Layout:
    """How the work of one problem is cut up.

    Attributes:
        width: columns with their padding.
        parts, split: ranges of columns of the building pass, and columns in each.
        fused: whether both products are made of a block of rows while it is in the cache.
        rows, columns: of a tile of the products.
        programs: of the row products.
        shares: rows of the buffer of column sums.
        share_split, share_columns: unless fused, rows of the kernel behind each, and columns of a tile.
    """

    width: int
    parts: int
    split: int
    fused: bool
    rows: int
    columns: int
    programs: int
    shares: int
    share_split: int
    share_columns: int

    @classmethod
    def of(cls, n: int, m: int, itemsize: int, multiprocessors: int) -> _Layout:
        """By the size of the problem and of an entry."""
        many, m = _OVERSUBSCRIBED * multiprocessors, triton.cdiv(m, 16) * 16
        split = _cut(m, triton.cdiv(many, triton.cdiv(n, _BUILD[0])), _BUILD[1])
        cached = _CACHED // (m * itemsize)
        fused = cached >= _FEWEST_ROWS
        rows = min(_MOST_ROWS, 2 ** (cached.bit_length() - 1)) if fused else _FEWEST_ROWS
        programs = min(triton.cdiv(n, rows), _RESIDENT * multiprocessors if fused else many)
        share_columns = 16 // itemsize * 32 * _WARPS
        share_split = 0 if fused else _cut(n, triton.cdiv(many, triton.cdiv(m, share_columns)), _SHARE_ROWS)
        return cls(
            width=m,
            parts=triton.cdiv(m, split),
            split=split,
            fused=fused,
            rows=rows,
            columns=_TILE // rows,
            programs=programs,
            shares=programs if fused else triton.cdiv(n, share_split),
            share_split=share_split,
            share_columns=share_columns,
        )


def _cut(size: int, parts: int, unit: int) -> int:
    """Length of about so many equal ranges, a multiple of the unit."""
    return triton.cdiv(triton.cdiv(size, parts), unit) * unit


def _launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *rest: Any, **constants: Any) -> None:
    with current(first.device):
        kernel[grid](first, *rest, enable_fp_fusion=True, **constants)


def _multiprocessors(device: torch.device) -> int:
    # The interpreter has none: as many as make several programs run.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def _in_two(exponent: Tensor) -> tuple[Tensor, Tensor]:
    """A float64 number as the sum of two in float32."""
    large = exponent.to(torch.float32)
    return large, torch.where(large.isinf(), 0.0, exponent - large.to(exponent.dtype)).to(torch.float32)


def _quotient(exact: Tensor, rounded: Tensor) -> Tensor:
    return torch.where(rounded > 0, exact / torch.where(rounded > 0, rounded, 1.0), 1.0)
