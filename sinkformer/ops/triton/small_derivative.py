"""The kernel behind the derivative of small problems: conjugate gradients with the plan in registers, one problem a program.

In float64 alone, as in ``sinkformer.ops.cpu.kernels``, where the linear system is written down: the plan is made once, and its
conversion from float32 would cost more in every step than the wider product.
"""

# Tensors inside a kernel are not what its annotations, nor those of triton's functions, say to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from sinkformer.ops.triton.small_tiles import column_sums, costs, density, log_weights, row_sums, vector, weights

# Shifts tried at a time in the search for the smallest Ritz value, and how often: [0, 2] is divided by 129^5.
_SHIFTS, _ROUNDS = tl.constexpr(128), tl.constexpr(5)


@triton.jit
def _smallest_ritz(lengths, ratios, steps):
    """Smallest eigenvalue of the tridiagonal matrix of ``steps`` conjugate gradient steps: Sturm's count at many shifts."""
    tl.debug_barrier()  # what one thread has stored all of them read
    low, high = tl.full([], 0.0, tl.float64), tl.full([], 2.0, tl.float64)
    parts = (tl.arange(0, _SHIFTS) + 1).to(tl.float64) / (_SHIFTS + 1)
    for _ in range(_ROUNDS):
        shift = low + (high - low) * parts
        pivot, above = tl.full([_SHIFTS], 1.0, tl.float64), tl.full([_SHIFTS], 0, tl.int32)
        length, ratio = tl.full([], 1.0, tl.float64), tl.full([], 0.0, tl.float64)
        for i in range(steps):
            off = ratio / length
            squared = off / length
            length, ratio = tl.load(lengths + i), tl.load(ratios + i)
            pivot = 1 / length + off - shift - squared / pivot
            above = tl.where(pivot <= 0, 1, above)
        low, high = (
            tl.maximum(low, tl.max(tl.where(above == 0, shift, low), 0)),
            tl.minimum(high, tl.min(tl.where(above > 0, shift, high), 0)),
        )
    return (low + high) / 2


@triton.jit
def _centred(q, x):
    """Less the weighted mean: the kernel of the operator are the constants."""
    return tl.where(q > 0, x - tl.sum(q * x, 0) / tl.sum(q, 0), 0.0)


@triton.jit
def _image(P, inverse_p, inverse_q, x):
    """(1 - diag(1/q) P^T diag(1/p) P) x."""
    return x - inverse_q * column_sums(P, inverse_p * row_sums(P, x))


@triton.jit(do_not_specialize=["n", "m", "most"])
def pull_back(
    cost,
    weights_a,
    weights_b,
    epsilons,
    f,
    g,
    on_f,
    on_g,
    scratch,
    pull,
    report,
    n,
    m,
    stride,
    most,
    rtol,
    N: tl.constexpr,
    M: tl.constexpr,
):
    """Derivative of one problem; arguments as of ``sinkformer.ops.cpu.kernels.pull_back``, scratch ``(B, 2, most)``.

    Rows of costs and of ``pull`` are ``stride`` apart. Every pair is written: zero where a weight is, and everywhere where
    the plan has lost a row or a column.
    """
    problem = tl.program_id(0).to(tl.int64)
    rows, columns = tl.arange(0, N), tl.arange(0, M)
    cost += problem * n * stride
    pull += problem * n * stride
    lengths = scratch + problem * 2 * most
    ratios = lengths + most
    weights_a, f, on_f = weights_a + problem * n, f + problem * n, on_f + problem * n
    weights_b, g, on_g = weights_b + problem * m, g + problem * m, on_g + problem * m
    epsilon = tl.load(epsilons + problem)

    a, b = weights(weights_a, rows, n), weights(weights_b, columns, m)
    live_a, live_b = a > 0, b > 0
    live = live_a[:, None] & live_b[None, :]
    h, k = vector(f, rows, n) + epsilon * log_weights(a), vector(g, columns, m) + epsilon * log_weights(b)
    P = density(costs(cost, rows, columns, stride, live), h, k, 1 / epsilon, tl.float64)
    p, q = tl.sum(P, 1), tl.sum(P, 0)
    sound_a, sound_b = (live_a == 0) | ((p > 0) & (p < float("inf"))), (live_b == 0) | ((q > 0) & (q < float("inf")))
    sound = tl.min(sound_a.to(tl.int32), 0) + tl.min(sound_b.to(tl.int32), 0) == 2
    inverse_p = tl.where(live_a & sound, 1 / tl.where(live_a & sound, p, 1.0), 0.0)
    inverse_q = tl.where(live_b & sound, 1 / tl.where(live_b & sound, q, 1.0), 0.0)
    q = tl.where(live_b & sound, q, 0.0)

    # The size of what enters, before any cancellation, is what the residual is relative to.
    height = vector(on_f, rows, n) * inverse_p
    right = vector(on_g, columns, m)
    size = inverse_q * (tl.abs(right) + column_sums(P, tl.abs(height)))
    right = _centred(q, inverse_q * (right - column_sums(P, height)))
    size = tl.sqrt(tl.sum(q * size * size, 0))
    x = tl.zeros([M], tl.float64)
    residual, direction = right, right
    rho, ritz = tl.sum(q * right * right, 0), size * float("nan")
    asked = rtol + 0 * size
    steps = tl.full([], 0, tl.int32)
    fewest = tl.minimum(most, 4 * tl.sum(live_b.to(tl.int32), 0) + 20)
    going = sound
    while going:
        if tl.sqrt(rho) <= asked * size:
            # The error is the residual divided by the smallest eigenvalue, which is seen only now.
            if steps > 0:
                ritz = _smallest_ritz(lengths, ratios, steps)
            asked = tl.maximum(rtol * tl.where(steps > 0, tl.minimum(ritz, 1.0), 1.0), 1e-14)
            going = tl.sqrt(rho) > asked * size
        if going:
            image = _image(P, inverse_p, inverse_q, direction)
            curvature = tl.sum(q * direction * image, 0)
            going = curvature > 0
            if going:
                length = rho / curvature
                x += length * direction
                residual = _centred(q, residual - length * image)
                following = tl.sum(q * residual * residual, 0)
                ratio = following / rho
                rho = following
                tl.store(lengths + steps, length)
                tl.store(ratios + steps, ratio)
                direction = residual + ratio * direction
                steps += 1
                going = steps < fewest
    if steps > 0:
        ritz = _smallest_ritz(lengths, ratios, steps)
    # The residual itself, which may have parted from its recurrence.
    residual = _centred(q, right - _image(P, inverse_p, inverse_q, x))
    relative = tl.where(size > 0, tl.sqrt(tl.sum(q * residual * residual, 0)) / tl.where(size > 0, size, 1.0), 0.0)
    height = (vector(on_f, rows, n) - row_sums(P, x)) * inverse_p
    found = tl.where(live & sound, P * (height[:, None] + x[None, :]), 0.0)
    inside = (rows < n)[:, None] & (columns < m)[None, :]
    tl.store(pull + rows[:, None] * stride + columns[None, :], found.to(pull.dtype.element_ty), mask=inside)
    tl.store(report + problem * 2, tl.where(sound, relative, 0.0))
    tl.store(report + problem * 2 + 1, ritz)
