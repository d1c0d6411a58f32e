"""What the kernels of small problems share: a problem is one tile ``[N, M]`` in the registers of one program.

Atoms of weight zero and entries beyond the arrays are dead: their costs are never read. Vectors are float64; so are exponents,
which are rounded once, to the precision of the tile.
"""

# Tensors inside a kernel are not what its annotations, nor those of triton's functions, say to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def weights(pointer, index, size):
    """Weights of sum one, float64; zero beyond the end."""
    w = tl.load(pointer + index, mask=index < size, other=0.0)
    return w / tl.sum(w, 0)


@triton.jit
def vector(pointer, index, size):
    """Float64 numbers, zero beyond the end."""
    return tl.load(pointer + index, mask=index < size, other=0.0)


@triton.jit
def keep(pointer, x, index, size):
    """Store what all threads of the program may read afterwards, and may have read before."""
    tl.debug_barrier()
    tl.store(pointer + index, x, mask=index < size)
    tl.debug_barrier()


@triton.jit
def log_weights(w):
    """Logarithms, zero at weight zero."""
    return tl.log(tl.where(w > 0, w, 1.0))


@triton.jit
def costs(pointer, rows, columns, stride, wanted):
    """Costs, +inf where they are not wanted, and not read there."""
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=wanted, other=float("inf"))


@triton.jit
def exponentials(x, scale, dtype: tl.constexpr):
    """exp(scale x) in ``dtype``, x float64: zero far below, huge and finite far above."""
    z = x * (scale * _LOG2E)
    if dtype == tl.float64:
        return tl.exp2(tl.minimum(tl.maximum(z, -2000.0), 1000.0))
    else:
        near = tl.minimum(tl.maximum(z.to(tl.float32), -1000.0), 120.0)
        # What the rounding of the exponent lost: 2^(near + rest) = 2^near (1 + rest log 2).
        rest = (z - near.to(tl.float64)).to(tl.float32)
        power = tl.exp2(near)
        return power + power * tl.where(tl.abs(rest) < 1, rest * _LN2, 0.0)


@triton.jit
def density(C, h, k, scale, dtype: tl.constexpr):
    """exp(scale (h + k - C)) in ``dtype``."""
    exponents = (h[:, None] - C.to(tl.float64)) + k[None, :]  # in this order: h and C may be large and alike
    return exponentials(exponents, scale, dtype)


@triton.jit
def row_sums(P, v):
    """P v in float64."""
    return tl.sum(P.to(tl.float64) * v[None, :], 1)


@triton.jit
def column_sums(P, u):
    """P^T u in float64."""
    return tl.sum(P.to(tl.float64) * u[:, None], 0)
