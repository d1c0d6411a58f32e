"""The inner loops of a sweep, written in vectors of eight: products of rows with a vector, sums of scaled rows, extremes.

The only generated code of the kernels. A compiler makes vectors of plain loops too, but works through the end of a short row
one number at a time, which for rows of 36 takes as long as the rest; and it makes none of a search for the smallest number,
as numba cannot tell it that there is no NaN. Here rows are padded to whole vectors, so there is no end; the instruction set
is the compiler's affair. Sums may be taken in any order (``reassoc``, ``contract``), NaN and infinity keep their meaning.

    r0, r1, r2, r3 = products(K, i, v)      r_k = sum_j K[i + k, j] v[j]
    add_rows(K, i, u0, u1, u2, u3, c)       c[j] += sum_k u_k K[i + k, j]
    product(K, i, v), add_row(K, i, u, c)   the same for one row
    low, high, zero = extremes(x)           of at least eight numbers; zero is NaN where one of them is NaN or infinite

K is a contiguous matrix ``(n, w)``, w a multiple of ``LANES``, v and c vectors of length w; the padding must be finite in K and
zero in v. Sums have the type of v and c, which may be wider than that of K. No bounds are checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

LANES = 8
_FLAGS = ("reassoc", "contract", "nsz")


class _Rows:
    """Emits code that walks along ``count`` neighbouring rows of K, eight columns at a time."""

    def __init__(self, context: Any, builder: Any, K: Any, K_type: Any, first: Any, count: int, element: Any):
        self.builder, self.element = builder, element
        array = context.make_array(K_type)(context, builder, K)
        length = builder.extract_value(array.shape, 1)
        self.own = context.get_data_type(K_type.dtype)
        self.starts = [builder.mul(builder.add(first, first.type(k)), length) for k in range(count)]
        self.data, self.length = array.data, length

    def walk(self):
        """A loop over the first columns of all vectors."""
        return cgutils.for_range_slice(
            self.builder, self.length.type(0), self.length, self.length.type(LANES), inc=True
        )

    def vector(self, data: Any, index: Any, element: Any) -> tuple[Any, Any]:
        """Pointer to the eight numbers that begin at ``index``, and their value in the type of the sums."""
        kind = ir.VectorType(element, LANES)
        pointer = self.builder.bitcast(self.builder.gep(data, [index]), kind.as_pointer())
        value = self.builder.load(pointer, align=4)
        if element != self.element:
            value = self.builder.fpext(value, ir.VectorType(self.element, LANES))
        return pointer, value

    def row(self, k: int, column: Any) -> Any:
        return self.vector(self.data, self.builder.add(self.starts[k], column), self.own)[1]


def _check(K: Any, *vectors: Any) -> bool:
    """Whether the types are those of a contiguous matrix and vectors of one type of number at least as wide."""
    if not (isinstance(K, types.Array) and K.ndim == 2 and K.layout == "C" and isinstance(K.dtype, types.Float)):
        return False
    return all(
        isinstance(v, types.Array) and v.ndim == 1 and v.layout == "C" and v.dtype in (K.dtype, types.float64)
        for v in vectors
    )


def _products(count: int, K: Any, v: Any) -> Any:
    if not _check(K, v):
        return None
    result = v.dtype if count == 1 else types.UniTuple(v.dtype, count)

    def generate(context, builder, signature, arguments):
        element = context.get_data_type(v.dtype)
        wide = ir.VectorType(element, LANES)
        rows = _Rows(context, builder, arguments[0], K, arguments[1], count, element)
        data = context.make_array(v)(context, builder, arguments[2]).data
        zero = ir.Constant(wide, [0.0] * LANES)
        sums = [cgutils.alloca_once(builder, wide) for _ in range(count)]
        for s in sums:
            builder.store(zero, s)
        with rows.walk() as (column, _):
            _, factor = rows.vector(data, column, element)
            for k, s in enumerate(sums):
                product = builder.fmul(rows.row(k, column), factor, flags=_FLAGS)
                builder.store(builder.fadd(builder.load(s), product, flags=_FLAGS), s)
        name = f"llvm.vector.reduce.fadd.v{LANES}f{v.dtype.bitwidth}"
        reduce = cgutils.get_or_insert_function(builder.module, ir.FunctionType(element, [element, wide]), name)
        totals = [builder.call(reduce, [ir.Constant(element, -0.0), builder.load(s)], fastmath=_FLAGS) for s in sums]
        return totals[0] if count == 1 else context.make_tuple(builder, signature.return_type, totals)

    return result(K, types.intp, v), generate


def _add_rows(count: int, K: Any, c: Any) -> Any:
    if not _check(K, c):
        return None

    def generate(context, builder, _, arguments):
        element = context.get_data_type(c.dtype)
        wide = ir.VectorType(element, LANES)
        rows = _Rows(context, builder, arguments[0], K, arguments[1], count, element)
        data = context.make_array(c)(context, builder, arguments[-1]).data
        spread = []
        for scale in arguments[2:-1]:
            one = builder.insert_element(ir.Constant(wide, ir.Undefined), scale, ir.IntType(32)(0))
            spread.append(
                builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))
            )
        with rows.walk() as (column, _):
            pointer, total = rows.vector(data, column, element)
            for k, scale in enumerate(spread):
                total = builder.fadd(total, builder.fmul(rows.row(k, column), scale, flags=_FLAGS), flags=_FLAGS)
            builder.store(total, pointer, align=4)
        return context.get_dummy_value()

    return types.none(K, types.intp, *([c.dtype] * count), c), generate


def _extremes(x: Any) -> Any:
    if not (isinstance(x, types.Array) and x.ndim == 1 and x.layout == "C" and isinstance(x.dtype, types.Float)):
        return None

    def generate(context, builder, signature, arguments):
        element = context.get_data_type(x.dtype)
        wide = ir.VectorType(element, LANES)
        array = context.make_array(x)(context, builder, arguments[0])
        last = builder.sub(builder.extract_value(array.shape, 0), ir.IntType(64)(LANES))
        zero = ir.Constant(wide, [0.0] * LANES)

        def vector(index):
            return builder.load(builder.bitcast(builder.gep(array.data, [index]), wide.as_pointer()), align=4)

        first = vector(last)
        low, high, spoiled = (cgutils.alloca_once(builder, wide) for _ in range(3))
        for place, value in ((low, first), (high, first), (spoiled, builder.fmul(first, zero))):
            builder.store(value, place)
        # The last vector overlaps the one before, which does not matter to an extreme.
        with cgutils.for_range_slice(builder, last.type(0), last, last.type(LANES), inc=True) as (index, _):
            here = vector(index)
            for place, comparison in ((low, "<"), (high, ">")):
                before = builder.load(place)
                builder.store(builder.select(builder.fcmp_ordered(comparison, here, before), here, before), place)
            builder.store(builder.fadd(builder.load(spoiled), builder.fmul(here, zero)), spoiled)
        results = []
        for place, comparison in ((low, "<"), (high, ">"), (spoiled, None)):
            value = builder.load(place)
            lanes = [builder.extract_element(value, ir.IntType(32)(k)) for k in range(LANES)]
            while len(lanes) > 1:
                pairs = zip(lanes[::2], lanes[1::2], strict=True)
                if comparison is None:
                    lanes = [builder.fadd(one, other) for one, other in pairs]
                else:
                    lanes = [
                        builder.select(builder.fcmp_ordered(comparison, one, other), one, other) for one, other in pairs
                    ]
            results.append(lanes[0])
        return context.make_tuple(builder, signature.return_type, results)

    return types.UniTuple(x.dtype, 3)(x), generate


# What the kernels call. The plain definitions are what each means, and what runs where nothing is compiled.


def products(K, i, v):
    """``(K[i] . v, K[i + 1] . v, K[i + 2] . v, K[i + 3] . v)``."""
    return tuple(K[i : i + 4] @ v)


def product(K, i, v):
    """``K[i] . v``."""
    return K[i] @ v


def add_rows(K, i, u0, u1, u2, u3, c):
    """``c += u0 K[i] + u1 K[i + 1] + u2 K[i + 2] + u3 K[i + 3]``."""
    c += np.array([u0, u1, u2, u3]) @ K[i : i + 4]


def add_row(K, i, u, c):
    """``c += u K[i]``."""
    c += u * K[i]


def extremes(x):
    """``(smallest, largest, 0)`` of at least ``LANES`` numbers, NaN left out; NaN instead of 0 if one is NaN or infinite."""
    return np.fmin.reduce(x), np.fmax.reduce(x), (0 * x).sum()


@intrinsic
def _four_products(_, K, i, v):
    return _products(4, K, v)


@intrinsic
def _one_product(_, K, i, v):
    return _products(1, K, v)


@intrinsic
def _add_four(_, K, i, u0, u1, u2, u3, c):
    return _add_rows(4, K, c)


@intrinsic
def _add_one(_, K, i, u, c):
    return _add_rows(1, K, c)


@intrinsic
def _both_extremes(_, x):
    return _extremes(x)


@overload(products)
def _(K, i, v):
    return lambda K, i, v: _four_products(K, i, v)  # pyright: ignore[reportCallIssue] - the typing context is not passed


@overload(product)
def _(K, i, v):
    return lambda K, i, v: _one_product(K, i, v)  # pyright: ignore[reportCallIssue]


@overload(add_rows)
def _(K, i, u0, u1, u2, u3, c):
    return lambda K, i, u0, u1, u2, u3, c: _add_four(K, i, u0, u1, u2, u3, c)  # pyright: ignore[reportCallIssue]


@overload(add_row)
def _(K, i, u, c):
    return lambda K, i, u, c: _add_one(K, i, u, c)  # pyright: ignore[reportCallIssue]


@overload(extremes)
def _(x):
    return lambda x: _both_extremes(x)  # pyright: ignore[reportCallIssue]
