"""The compiled kernels: one problem at a time, every pass over n x m a loop that the compiler makes vectors of.

Nothing here knows of torch. Arrays are contiguous; potentials, weights and results are float64; K has the precision of the
sweeps (float32 or float64), C its own. Rows of K are padded with zeros to whole vectors, and so is what they are multiplied
with; products with K are in ``vectors``. All kernels stand in this one file because the compiler's cache looks at the file of
a function only, not at those of its callees: after a change of ``vectors``, change this one.

*Scalings*. P = diag(u) K diag(v), K = exp((h + k - C) / epsilon), with the weights inside: h = f + epsilon log a at the
moment of absorption, and likewise k. A sweep reads K once: four rows at a time, r = K v, the update of u, and the sums
c += u K from the same four rows, which are still in the first cache. Exponentials are taken when a
scaling leaves (e^-18, e^18).

*Over-relaxation*. An update u <- u x^(1+t), x = a / (u K v), through the Pade form of x^t, which is positive, monotone and
symmetric under x -> 1/x: t = 0 is the plain update. With lambda the contraction of a plain sweep the best 1 + t is
2 / (1 + sqrt(1 - lambda)), at which the error falls by t a sweep (Young 1971, for the linear problem that the iteration
becomes near its solution; Thibault, Chizat, Dossal, Papadakis 2021). ``_adjust`` says how lambda is found.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from sinkformer.ops.cpu.vectors import LANES, add_row, add_rows, extremes, product, products

# Sums may be reordered, which makes vectors of them; NaN and infinity keep their meaning. The exponentials may not: a
# reordered (t + magic) - magic is t.
_SUMS = {"reassoc", "contract", "nsz"}
_EXACT = {"contract"}


def _compiled(fastmath: Any, from_python: bool = False) -> Any:
    """``njit`` with the cache on disk where there is a place for one; without a door from Python where none is needed."""
    options = {"nogil": True, "fastmath": fastmath, "error_model": "numpy"}
    options |= {"no_cpython_wrapper": not from_python, "no_cfunc_wrapper": True}

    def decorate(function: Any) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # numba found no writable folder: compile in every process
            return njit(cache=False, **options)(function)

    return decorate


def storage(n: int, m: int) -> int:
    """How many numbers a matrix of n rows and m columns takes with its padding."""
    return n * ((m + LANES - 1) // LANES * LANES)


# Exponentials ---------------------------------------------------------------------------------------------------------

_LOG2E, _LN2_HIGH, _LN2_LOW = 1.4426950408889634, 6.93147180369123816490e-01, 1.90821492927058770002e-10
_MAGIC = 6755399441055744.0  # 1.5 * 2^52: adding it leaves the nearest integer in the last bits
_LOWEST = -708.0

_F = np.float32
_LOG2E_F, _LN2_HIGH_F, _LN2_LOW_F = _F(_LOG2E), _F(0.693359375), _F(-2.12194440e-4)
_MAGIC_F, _LOWEST_F, _HIGHEST_F = _F(12582912.0), _F(-87.0), _F(85.0)
_ZERO_F, _ONE_F, _C2, _C3, _C4, _C5, _C6, _C7 = (
    _F(x) for x in (0, 1, 1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720, 1 / 5040)
)
_SHIFT, _SHIFT_F = np.int64(52), np.int32(23)


@_compiled(_EXACT)
def _exponentials(z, out, rounded):
    """out_j = exp(z_j): z float64, out of the precision of K, ``rounded`` scratch like it; zero far below, huge far above."""
    if out.itemsize == 4:
        for j in range(z.shape[0]):
            exact = z[j]
            near = _F(exact)
            out[j] = near
            rounded[j] = _F(exact - near)  # what the rounding of the exponent lost: exp(x + rest) = exp(x) (1 + rest)
        for j in range(z.shape[0]):
            x = _F(out[j])
            alive = x > _LOWEST_F
            rest = _F(rounded[j]) if alive else _ZERO_F
            x = x if x < _HIGHEST_F else _HIGHEST_F
            s = x * _LOG2E_F + _MAGIC_F if alive else _MAGIC_F
            k = s - _MAGIC_F
            r = (x - k * _LN2_HIGH_F) - k * _LN2_LOW_F
            p = _C7
            p = p * r + _C6
            p = p * r + _C5
            p = p * r + _C4
            p = p * r + _C3
            p = p * r + _C2
            p = p * r + _ONE_F
            p = p * r + _ONE_F
            rounded[j] = s
            out[j] = p + p * rest if alive else _ZERO_F
        # Times 2^k: k is added to the bits of the exponent.
        bits, powers = out.view(np.int32), rounded.view(np.int32)
        for j in range(z.shape[0]):
            bits[j] += powers[j] << _SHIFT_F
    else:
        for j in range(z.shape[0]):
            y = z[j]
            y = y if y < 700.0 else 700.0
            above = y > _LOWEST
            t = y * _LOG2E + _MAGIC if above else _MAGIC
            n = t - _MAGIC
            r64 = (y - n * _LN2_HIGH) - n * _LN2_LOW
            w = 1 / 479001600.0
            w = w * r64 + 1 / 39916800.0
            w = w * r64 + 1 / 3628800.0
            w = w * r64 + 1 / 362880.0
            w = w * r64 + 1 / 40320.0
            w = w * r64 + 1 / 5040.0
            w = w * r64 + 1 / 720.0
            w = w * r64 + 1 / 120.0
            w = w * r64 + 1 / 24.0
            w = w * r64 + 1 / 6.0
            w = w * r64 + 0.5
            w = w * r64 + 1.0
            w = w * r64 + 1.0
            rounded[j] = t
            out[j] = w if above else 0.0
        wide_bits, wide_powers = out.view(np.int64), rounded.view(np.int64)
        for j in range(z.shape[0]):
            wide_bits[j] += wide_powers[j] << _SHIFT


@_compiled(_EXACT)
def _padded(length):
    """The smallest multiple of ``LANES`` that is no less."""
    return (length + LANES - 1) // LANES * LANES


@_compiled(_EXACT)
def _matrix(store, n, m):
    """A matrix of n rows, padded, in the numbers of ``store``."""
    return store[: n * _padded(m)].reshape(n, _padded(m))


@_compiled(_EXACT)
def _copy(values, out):
    for i in range(out.shape[0]):
        out[i] = values[i]


@_compiled(_EXACT)
def _fill(out, value):
    for i in range(out.shape[0]):
        out[i] = value


# Passes over the costs ------------------------------------------------------------------------------------------------

_LARGEST_COST = 1e29


@_compiled(_EXACT)
def _read(C, i, columns, together, row):
    """The live entries of row i of the costs, as float64."""
    if together:  # no gather, which is slow, where padding stands at the end
        for j in range(row.shape[0]):
            row[j] = C[i, j]
    else:
        for j in range(row.shape[0]):
            row[j] = C[i, columns[j]]


@_compiled(_EXACT)
def _split(weights):
    """Indices of the positive weights and of the others."""
    live, dead = np.empty(weights.shape[0], np.int64), np.empty(weights.shape[0], np.int64)
    count = 0
    for i in range(weights.shape[0]):
        live[count], dead[i - count] = i, i
        count += weights[i] > 0
    return live[:count], dead[: weights.shape[0] - count]


@_compiled(_EXACT)
def _normalise(weights, live, out):
    """The positive weights, divided by their sum."""
    total = 0.0
    for i in range(live.shape[0]):
        out[i] = weights[live[i]]
        total += out[i]
    for i in range(live.shape[0]):
        out[i] /= total


@_compiled(_EXACT)
def _extent(x):
    """The smallest and the largest of some numbers, NaN left out, and 0, or NaN where one is NaN or infinite."""
    if x.shape[0] >= LANES:
        return extremes(x)
    low, high, zero = x[0], x[0], x[0] * 0
    for j in range(1, x.shape[0]):
        low, high = x[j] if x[j] < low else low, x[j] if x[j] > high else high
        zero += x[j] * 0
    return low, high, zero


@_compiled(_EXACT)
def _centre(C, rows, columns, together, slack, h, k, row, least):
    """Potentials for which no row or column of K vanishes; and what kind of costs these are.

    h_i = min_j (C_ij - k_j), so that every row has an entry 1 and none above; k_j is raised where min_i (C_ij - k_j - h_i) is
    more than ``slack``. Scratch: row, least, of the number of columns.

    Returns:
        ``(range, forbidden, lost)``: largest minus smallest cost of an allowed pair, -1 if one is neither a number up to the
        largest nor +inf; whether a pair is forbidden; whether a row or a column is forbidden altogether.
    """
    low, high, wrong, forbidden, lost, flat = np.inf, -np.inf, False, False, False, True
    for j in range(row.shape[0]):
        least[j] = np.inf
        flat &= k[j] == 0
    for i in range(rows.shape[0]):
        _read(C, rows[i], columns, together, row)
        smallest, largest, finite = _extent(row)
        if finite == 0 and -_LARGEST_COST <= smallest and largest <= _LARGEST_COST:
            low, high = min(low, smallest), max(high, largest)
        else:
            for j in range(row.shape[0]):
                x = row[j]
                if x == np.inf:
                    forbidden = True
                elif abs(x) <= _LARGEST_COST:
                    low, high = min(low, x), max(high, x)
                else:
                    wrong = True
        if not flat:
            for j in range(row.shape[0]):
                row[j] -= k[j]
            smallest, _, _ = _extent(row)
        if smallest < np.inf:
            h[i] = smallest
            for j in range(row.shape[0]):
                x, y = row[j] - smallest, least[j]
                least[j] = x if x < y else y
        else:
            lost = True
    for j in range(row.shape[0]):
        if least[j] == np.inf:
            lost = True
        else:
            k[j] += max(0.0, least[j] - slack)
    return -1.0 if wrong else max(high - low, 0.0), forbidden, lost


# Exponentials are taken of as many rows at a time as have about so many entries: short rows alone are too slow.
_STRETCH = 512


@_compiled(_EXACT)
def _scratch(m, like):
    """What ``_absorb`` writes exponents of a stretch of rows to, very low in the padding; and the same for K."""
    size = max(1, _STRETCH // _padded(m)) * _padded(m)
    z = np.empty(size)
    for j in range(size):
        z[j] = -1e9
    return z, np.empty(size, like.dtype)


@_compiled(_EXACT)
def _absorb(C, rows, columns, together, epsilon, h, k, K, z, rounded):
    """K = exp((h + k - C) / epsilon), zero in the padding; exponents are summed in float64."""
    n, m, width = K.shape[0], columns.shape[0], K.shape[1]
    flat, scale, step = K.reshape(n * width), 1 / epsilon, z.shape[0] // width
    exponents = z.reshape(step, width)
    for start in range(0, n, step):
        stop = min(n, start + step)
        for i in range(start, stop):
            at, row, height = i - start, rows[i], h[i]
            if together:
                for j in range(m):
                    exponents[at, j] = (
                        (height - C[row, j]) + k[j]
                    ) * scale  # in this order: h and C may be large and alike
            else:
                for j in range(m):
                    exponents[at, j] = ((height - C[row, columns[j]]) + k[j]) * scale
        size = (stop - start) * width
        _exponentials(z[:size], flat[start * width : start * width + size], rounded[:size])


# Sweeps ---------------------------------------------------------------------------------------------------------------


@_compiled(_SUMS)
def _relaxed(u, r, a, plus, minus):
    """``(u x^(1+t), x, |u r - a|)`` for x = a / (u r), with plus = 1 + t and minus = 1 - t."""
    mass = u * r
    x = a / mass
    return u * (x * ((plus * x + minus) / (minus * x + plus))), x, abs(mass - a)


@_compiled(_SUMS)
def _sweep(K, u, v, a, b, c, x, t):
    """One update of u and of v, relaxed by t; x receives the plain multipliers of u.

    Returns the L1 errors of rows and columns before their updates, and the smallest and largest scaling afterwards.
    """
    n, m = K.shape[0], b.shape[0]
    zero, one = K.dtype.type(0), K.dtype.type(1)
    plus, minus = one + K.dtype.type(t), one - K.dtype.type(t)
    row_error, column_error = zero, zero
    _fill(c, zero)
    fours = n - n % 4
    for i in range(0, fours, 4):
        r0, r1, r2, r3 = products(K, i, v)
        u0, x[i], e0 = _relaxed(u[i], r0, a[i], plus, minus)
        u1, x[i + 1], e1 = _relaxed(u[i + 1], r1, a[i + 1], plus, minus)
        u2, x[i + 2], e2 = _relaxed(u[i + 2], r2, a[i + 2], plus, minus)
        u3, x[i + 3], e3 = _relaxed(u[i + 3], r3, a[i + 3], plus, minus)
        u[i], u[i + 1], u[i + 2], u[i + 3] = u0, u1, u2, u3
        row_error += e0 + e1 + e2 + e3
        add_rows(K, i, u0, u1, u2, u3, c)
    for i in range(fours, n):
        u0, x[i], e0 = _relaxed(u[i], product(K, i, v), a[i], plus, minus)
        u[i] = u0
        row_error += e0
        add_row(K, i, u0, c)
    for j in range(m):
        w, _, e = _relaxed(v[j], c[j], b[j], plus, minus)
        v[j] = w
        column_error += e + w * zero  # NaN where w is no number, which _extent leaves out
    low, high, _ = _extent(u)
    smallest, largest, _ = _extent(v[:m])
    return row_error, column_error, min(low, smallest), max(high, largest)


@_compiled(_SUMS)
def _sums(K, exact, a, u, v, p, q):
    """Row sums p and column sums q of diag(u) K diag(v), in float64; with ``exact`` u = a / (K v) first, so that p = a."""
    n = K.shape[0]
    _fill(q, 0.0)
    fours = n - n % 4
    for i in range(0, fours, 4):
        p[i], p[i + 1], p[i + 2], p[i + 3] = products(K, i, v)
        if exact:
            for k in range(i, i + 4):
                u[k] = a[k] / p[k]
        add_rows(K, i, u[i], u[i + 1], u[i + 2], u[i + 3], q)
    for i in range(fours, n):
        p[i] = product(K, i, v)
        if exact:
            u[i] = a[i] / p[i]
        add_row(K, i, u[i], q)
    for i in range(n):
        p[i] *= u[i]
    for j in range(q.shape[0]):
        q[j] *= v[j]


@_compiled(_SUMS)
def _distance(x, y):
    """The L1 distance of x and y, of the length of y."""
    total = 0.0
    for j in range(y.shape[0]):
        total += abs(x[j] - y[j])
    return total


# The rate of over-relaxation ------------------------------------------------------------------------------------------

# Sweeps before the first look at the rate, and between two.
_FIRST_LOOK, _LOOK = 4, 10
# What is remembered of the rate of a problem, in a float64 array.
_T, _GAP, _CAP, _BEST, _LAST, _FALL, _STALLED, _HOLD = range(8)
_MOST_T = 0.97


@_compiled(_EXACT)
def _first_rate(rate):
    rate[_T], rate[_GAP], rate[_CAP] = 0.0, 1.0, _MOST_T
    rate[_BEST], rate[_LAST], rate[_FALL], rate[_STALLED], rate[_HOLD] = np.inf, np.inf, 0.0, 0.0, 0.0


@_compiled(_EXACT)
def _contraction(x, x_before, a):
    """The rate lambda of plain sweeps: Rayleigh quotient of two successive increments x - 1 of log u, less their a-mean."""
    mean, mean_before = 0.0, 0.0
    for i in range(a.shape[0]):
        mean += a[i] * (x[i] - 1.0)
        mean_before += a[i] * (x_before[i] - 1.0)
    across, size = 0.0, 0.0
    for i in range(a.shape[0]):
        d, d_before = x[i] - 1.0 - mean, x_before[i] - 1.0 - mean_before
        across += a[i] * d * d_before
        size += a[i] * d_before * d_before
    return across / size if size > 0 else 0.0


@_compiled(_EXACT)
def _adjust(rate, error, sweeps, contraction):
    """Choose t for the next sweeps from the error now and at the last look, so many sweeps ago.

    The gap 1 - lambda starts from the contraction of plain sweeps. It shrinks where the error falls more slowly than t
    twice in a row (Young's formula), grows where it falls faster; over-relaxation pauses where the error grows or circles.
    Every rule was needed on some problem; the order is from the rare to the usual.
    """
    t, last = rate[_T], rate[_LAST]
    rate[_LAST] = error
    rate[_STALLED] = 0.0 if error < 0.9 * rate[_BEST] else rate[_STALLED] + 1
    diverging = error > 10 * rate[_BEST] and error > 3 * last  # switching on makes a hump every time
    rate[_BEST] = min(rate[_BEST], error)
    if diverging:
        rate[_GAP], rate[_T], rate[_HOLD] = min(1.0, 2 * rate[_GAP]), 0.0, 1.0
        return
    if rate[_STALLED] >= 8:
        # In a circle: far from the solution it starts again, near it the circle is a small one.
        rate[_STALLED] = 0.0
        if error > 0.05:
            rate[_GAP], rate[_T], rate[_HOLD] = 1.0, 0.0, 4.0
            rate[_CAP] *= 0.75
            return
        rate[_GAP] = min(1.0, 4 * rate[_GAP])
    if rate[_HOLD] > 0:
        rate[_HOLD] -= 1
        return
    if t == 0:
        contraction = min(contraction, 0.9 if error >= 0.1 else 1 - 1e-4)
        if rate[_GAP] == 1.0 and contraction > 0.3 and error < 0.5:
            rate[_GAP] = 1 - contraction
    elif last < np.inf:
        fall = (error / last) ** (1 / sweeps)
        slow = min(fall, rate[_FALL])  # one window may be noise
        if t + 0.02 < slow < 1:
            rate[_GAP] = min(max(1 - (slow + t) ** 2 / ((1 + t) ** 2 * slow), rate[_GAP] / 4), rate[_GAP])
        elif fall < t:
            rate[_GAP] = min(1.0, 1.1 * rate[_GAP])
        rate[_FALL] = fall
    if error < 0.05:
        rate[_CAP] = _MOST_T
    rate[_T] = min(2 / (1 + math.sqrt(rate[_GAP])) - 1, rate[_CAP])


# One problem ----------------------------------------------------------------------------------------------------------

CONVERGED, UNSOLVED, NONFINITE = 0, 1, 3
# Scalings beyond are absorbed into the potentials: what K lost below its smallest number would be seen at about e^40.
_LARGEST = math.exp(18)
_ATTEMPTS = 3
# Averaged hard transforms that make the start of a symmetric problem.
_AVERAGES = 4
# How far below 1 all entries of a column of K may lie, in the exponent.
_SLACK = 40.0
# The path of epsilon: from at most this fraction of the range, divided by the stride each time the error is so small. A
# rougher solution on the way costs more sweeps later than it saves: below 1e-3 of the range many times more.
_FIRST_EPSILON, _STRIDE, _ON_THE_WAY = 0.1, 4.0, 3e-3


@_compiled(_EXACT)
def _iterate(
    C, rows, columns, together, symmetric, epsilon, spread, cold, a, b, h, k, K, u, v, q, tolerance, goal, budget
):
    """Sweeps until the error, measured in float64, is below the tolerance. At the end P = diag(u) K diag(v), in float64.

    Where epsilon is small against the range ``spread`` of the costs, problems of larger epsilon are solved roughly on the
    way. ``goal`` is the error of the sweeps at which a measurement is worth its time. A ``symmetric`` problem, whose h = k,
    has one scaling u = v, the geometric mean of itself and its update: where K is positive definite, as for squared
    distances and inner products, that divides the error by two or more in every sweep (Feydy et al. 2019, section 3).

    Returns ``(error, sweeps)``; error = inf where a row or a column keeps losing all its mass.
    """
    n, m = rows.shape[0], columns.shape[0]
    z, rounded = _scratch(m, K)
    c, vs, bt, least = np.empty(q.shape[0], K.dtype), np.zeros(q.shape[0], K.dtype), np.empty(m, K.dtype), np.empty(m)
    us, x, x_before, at = np.empty(n, K.dtype), np.empty(n, K.dtype), np.empty(n, K.dtype), np.empty(n, K.dtype)
    rate, p = np.empty(8), np.empty(n)
    for i in range(n):
        at[i], us[i], x[i] = a[i], 1, 1
    for j in range(m):
        bt[j], vs[j] = b[j], 1
    _first_rate(rate)
    sweeps, since, wait, lost, missed, trial = 0, 0, _FIRST_LOOK, 0, 0, False
    absorb, measure, final = True, budget == 0, epsilon
    if cold and not symmetric:
        while epsilon * _STRIDE <= _FIRST_EPSILON * spread:
            epsilon *= _STRIDE
        for j in range(m):  # from g = 0 and not from k = 0: where costs are constant that is the solution
            k[j] += epsilon * math.log(b[j])
    while True:
        if measure and epsilon > final:  # out of sweeps on the way
            for j in range(m):
                k[j] += (final - epsilon) * math.log(b[j]) + epsilon * math.log(vs[j])
                vs[j] = 1
            epsilon, absorb = final, True
            _centre(C, rows, columns, together, _SLACK * epsilon, h, k, z[:m], least)
            _fill(us, 1)
        if absorb:
            for i in range(n):
                if us[i] != 1:
                    h[i] += epsilon * math.log(us[i])
                us[i] = 1
            for j in range(m):
                if vs[j] != 1:
                    k[j] += epsilon * math.log(vs[j])
                vs[j] = 1
            _absorb(C, rows, columns, together, epsilon, h, k, K, z, rounded)
            absorb = False
        if measure:
            for j in range(m):
                v[j] = vs[j]
            _sums(K, True, a, u, v, p, q)
            error = _distance(q, b)
            if symmetric:
                error = 0.0
                for i in range(n):
                    # Row sums of the plan of v alone are a v / u.
                    error += 2 * abs(a[i] * v[i] / u[i] - a[i])
                for i in range(n):
                    u[i] = v[i]
            missed += 1
            if error <= tolerance or sweeps >= budget or missed > _ATTEMPTS:
                return (error if error < np.inf else np.inf), sweeps
            for i in range(n):
                us[i] = u[i]
            measure = False
        x, x_before = x_before, x
        if symmetric:
            for i in range(n):
                us[i], x_before[i] = vs[i], vs[i]
        t = 0.0 if trial or symmetric else rate[_T]
        row_error, column_error, smallest, largest = _sweep(K, us, vs, at, bt, c, x, t)
        sweeps += 1
        error = float(row_error) + float(column_error)
        if symmetric:
            error = 2 * float(row_error)
            for i in range(n):
                vs[i] = np.sqrt(x_before[i] * us[i])
                us[i] = vs[i]
        if not (error < np.inf and smallest > 0 and largest < np.inf):
            # Back to the last absorbed pair, and from there as from a start.
            lost += 1
            if symmetric or lost > _ATTEMPTS:
                return np.inf, sweeps
            if _centre(C, rows, columns, together, _SLACK * epsilon, h, k, z[:m], least)[2]:
                return np.inf, sweeps
            _fill(us, 1)
            _fill(vs[:m], 1)
            _first_rate(rate)
            since, wait, trial, absorb = 0, _FIRST_LOOK, False, True
            continue
        if epsilon > final and error <= max(_ON_THE_WAY, goal) and sweeps < budget:
            # The same potential g at the next epsilon, the weights inside; and from there as from a start.
            for j in range(m):
                k[j] += epsilon * math.log(vs[j]) + (epsilon / _STRIDE - epsilon) * math.log(b[j])
                vs[j] = 1
            epsilon = max(final, epsilon / _STRIDE)
            _centre(C, rows, columns, together, _SLACK * epsilon, h, k, z[:m], least)
            _fill(us, 1)
            _first_rate(rate)
            since, wait, trial, absorb = 0, _FIRST_LOOK, False, True
            continue
        if symmetric:
            measure = error <= goal or sweeps >= budget
        else:
            # After a plain update of u the rows are exact, and the columns bound the error of what follows.
            measure = (t == 0 and epsilon == final and column_error <= goal) or sweeps >= budget
            trial = not trial and t > 0 and error <= 1.5 * goal
            since += 1
            if since >= wait:
                _adjust(rate, error, since, _contraction(x, x_before, a))
                since, wait = 0, _LOOK
        absorb = not (smallest > 1 / _LARGEST and largest < _LARGEST)


@_compiled(_EXACT)
def _symmetric(C, a, b):
    """Whether the problem is unchanged by exchanging source and target, up to the rounding of its costs."""
    n, m = C.shape
    if n != m:
        return False
    for i in range(n):
        if a[i] != b[i]:
            return False
    size = 0.0
    for i in range(n):
        for j in range(n):
            if a[i] > 0 and a[j] > 0 and C[i, j] != np.inf:
                size = max(size, abs(C[i, j]))
    slack = 64 * 2.220446049250313e-16 * size
    for i in range(n):
        for j in range(i):
            if a[i] > 0 and a[j] > 0 and C[i, j] != C[j, i] and not abs(C[i, j] - C[j, i]) <= slack:
                return False
    return True


@_compiled(_SUMS)
def _rounding_row(cost, K, i, right, squares):
    """``(sum_j right_j C_ij, sum_j squares_j / K_ij)``; where nothing is added no infinity comes through."""
    first, second = 0.0, 0.0
    for j in range(right.shape[0]):
        term = right[j] * cost[j]
        first += term if right[j] > 0 else 0.0
        second += squares[j] / K[i, j]
    return first, second


@_compiled(_EXACT)
def _gap(C, rows, columns, together, epsilon, a, b, f, g, K, u, v, p, q):
    """Bound on the duality gap of the rounded plan; ``certificates.gap_bound`` has the formula and its reason.

    The plan is diag(u) K diag(v) with row sums p and column sums q.
    """
    n, m = rows.shape[0], columns.shape[0]
    left, right, r, c, row = np.empty(n), np.empty(q.shape[0]), np.empty(n), np.empty(m), np.empty(m)
    gap, theta, other, exact = -1.0, 0.0, 0.0, True
    for i in range(n):
        gap += p[i]
        r[i] = min(1.0, a[i] / p[i])
        exact = exact and r[i] == 1
        u[i] *= r[i]
    if not exact:
        _sums(K, False, a, u, v, left, q)
    for j in range(m):
        c[j] = min(1.0, b[j] / q[j])
        v[j] *= c[j]
        gap += b[j] * math.log(c[j])
    _sums(K, False, a, u, v, left, right)
    for i in range(n):
        gap += 0.0 if exact else a[i] * math.log(r[i])
        left[i] = max(0.0, a[i] - left[i])
        theta += left[i]
    right = right[:m]
    for j in range(m):
        right[j] = max(0.0, b[j] - right[j])
        other += right[j]
    if theta == 0 or other == 0:
        return epsilon * gap
    spread, target = 0.0, 0.0
    for j in range(m):
        right[j] /= other
        target += right[j] * g[j]
        if right[j] > 0:
            spread += right[j] * math.log(right[j] / (b[j] * c[j]))
        q[j] = right[j] * right[j] / v[j]
    for i in range(n):
        if left[i] > 0:
            _read(C, rows[i], columns, together, row)
            average, curvature = _rounding_row(row, K, i, right, q)
            share = left[i] / a[i]
            added = left[i] * ((average - target - f[i]) / epsilon + spread - (0.0 if exact else math.log(r[i])))
            if share < 1:
                added -= (a[i] - left[i]) * math.log1p(-share)
            tangent = left[i] + 0.5 * left[i] * left[i] / u[i] * curvature
            gap += tangent if tangent < added else added
    return epsilon * gap


@_compiled(_EXACT)
def _alike(C, transposed, dead, live):
    """Whether all atoms of weight zero have the same costs, as padding has."""
    tail = dead[0] == live.shape[0]
    if not transposed:
        first = C[dead[0]]
        for i in range(1, dead.shape[0]):
            row, different = C[dead[i]], 0
            if live[live.shape[0] - 1] == live.shape[0] - 1:
                for j in range(live.shape[0]):
                    different += row[j] != first[j]
            else:
                for j in range(live.shape[0]):
                    different += row[live[j]] != first[live[j]]
            if different:
                return False
    else:
        for j in range(live.shape[0]):
            row, different = C[live[j]], 0
            if tail:
                rest = row[dead[0] :]
                for i in range(rest.shape[0]):
                    different += rest[i] != rest[0]
            else:
                for i in range(dead.shape[0]):
                    different += row[dead[i]] != row[dead[0]]
            if different:
                return False
    return True


@_compiled(_EXACT)
def _extend(C, transposed, dead, live, epsilon, potential, like, out):
    """Soft c-transform at atoms of weight zero: -epsilon log sum_j exp((potential_j - C_ij) / epsilon), 0 without a pair."""
    m = live.shape[0]
    if dead.shape[0] == 0:
        return
    z, values, rounded, scale = np.empty(m), np.empty(m, like.dtype), np.empty(m, like.dtype), 1 / epsilon
    alike = _alike(C, transposed, dead, live)
    for i in range(1 if alike else dead.shape[0]):
        for j in range(m):
            cost = float(C[live[j], dead[i]] if transposed else C[dead[i], live[j]])
            z[j] = (cost if abs(cost) <= _LARGEST_COST or cost == np.inf else 0.0) - potential[j]
        smallest = _extent(z)[0]
        height = smallest if smallest < np.inf else 0.0
        for j in range(m):
            z[j] = (height - z[j]) * scale
        _exponentials(z, values, rounded)
        total = 0.0
        for j in range(m):
            total += values[j]
        out[dead[i]] = height - epsilon * math.log(total) if total > 0 else 0.0
    if alike:
        for i in range(1, dead.shape[0]):
            out[dead[i]] = out[dead[0]]


@_compiled(_EXACT, from_python=True)
def solve(
    which,
    store,
    costs,
    weights_a,
    weights_b,
    epsilons,
    f,
    g,
    warm,
    tolerance,
    goal,
    budget,
    patience,
    masked_budget,
    report,
):
    """Solve the problems ``which`` of a flat batch.

    Args:
        which: their indices, int64.
        store: scratch in the precision of the sweeps, ``storage(n, m)`` numbers, not initialised. A large one comes from
            outside because numpy asks the system for large pages, which takes a tenth of the time.
        costs: ``(B, n, m)``, float32 or float64, contiguous; +inf forbids a pair.
        weights_a: ``(B, n)``, float64; zero is padding, where costs may be anything.
        weights_b: ``(B, m)``, float64.
        epsilons: ``(B,)``, float64.
        f: filled in, ``(B, n)`` float64; finite everywhere.
        g: the same for the target, ``(B, m)``; where ``warm``, read as the potentials to start from.
        warm: whether to start from g.
        tolerance: L1 marginal error to reach.
        goal: error of the sweeps at which the error is measured.
        budget: most sweeps.
        patience: most sweeps are also ``patience`` (min(n, m) - 1)^2, of the atoms of positive weight.
        masked_budget: most sweeps of a problem with forbidden pairs, which may have no solution.
        report: filled in, ``(B, 5)`` float64: error, duality gap, value, sweeps, code.
    """
    for position in range(which.shape[0]):
        index = which[position]
        C, epsilon, numbers = costs[index], epsilons[index], report[index]
        rows, dead_rows = _split(weights_a[index])
        columns, dead_columns = _split(weights_b[index])
        n, m = rows.shape[0], columns.shape[0]
        together = columns[m - 1] == m - 1
        numbers[0], numbers[1], numbers[2], numbers[3], numbers[4] = np.inf, np.inf, 0.0, 0.0, UNSOLVED
        a, b, h, k, row, least = np.empty(n), np.empty(m), np.zeros(n), np.empty(m), np.empty(m), np.empty(m)
        _normalise(weights_a[index], rows, a)
        _normalise(weights_b[index], columns, b)
        for j in range(m):
            k[j] = g[index, columns[j]] + epsilon * math.log(b[j]) if warm else 0.0
        symmetric = n == m and not warm and _symmetric(C, weights_a[index], weights_b[index])
        spread, masked, lost = 0.0, False, False
        for _ in range(_AVERAGES if symmetric else 1):
            slack = np.inf if symmetric else _SLACK * epsilon if warm else 0.0
            spread, masked, lost = _centre(C, rows, columns, together, slack, h, k, row, least)
            if spread < 0 or lost:
                break
            if symmetric:
                for i in range(n):
                    h[i] = (h[i] + k[i]) / 2
                    k[i] = h[i]
        if spread < 0 or lost:
            numbers[4] = NONFINITE if spread < 0 else UNSOLVED
            continue
        width = _padded(m)
        K, u, v, p, q = _matrix(store, n, m), np.empty(n), np.zeros(width), np.empty(n), np.empty(width)
        most = min(budget, patience * max(1, (min(n, m) - 1) * (min(n, m) - 1)))
        if masked:
            most = min(most, masked_budget)
        error, sweeps = _iterate(
            C,
            rows,
            columns,
            together,
            symmetric,
            epsilon,
            spread,
            not warm,
            a,
            b,
            h,
            k,
            K,
            u,
            v,
            q,
            tolerance,
            goal,
            most,
        )
        numbers[0], numbers[3] = error, sweeps
        if error == np.inf:
            continue
        if symmetric:
            _sums(K, False, a, u, v, p, q)
            numbers[0] = _distance(p, a) + _distance(q, b)
        else:
            _copy(a, p)
        # From here on with the weights outside the exponential.
        shift, value, size = 0.0, epsilon, 0.0
        for i in range(n):
            h[i] += epsilon * math.log(u[i] / a[i])
            shift += a[i] * h[i] / 2
            size = max(size, abs(h[i]))
        for j in range(m):
            k[j] += epsilon * math.log(v[j] / b[j])
            shift -= b[j] * k[j] / 2
            size = max(size, abs(k[j]))
        shift = 0.0 if symmetric else shift  # not even by rounding
        for i in range(n):
            h[i] -= shift
            f[index, rows[i]] = h[i]
            value += a[i] * h[i] - epsilon * p[i]
        for j in range(m):
            k[j] += shift
            g[index, columns[j]] = k[j]
            value += b[j] * k[j]
        numbers[2] = value
        numbers[1] = _gap(C, rows, columns, together, epsilon, a, b, h, k, K, u, v, p, q)
        if size * 1e-15 > 0.01 * tolerance * epsilon:
            # Potentials so large that their rounding is seen in the plan: its error is that of the numbers handed out.
            z, rounded = _scratch(m, K)
            _absorb(C, rows, columns, together, epsilon, h, k, K, z, rounded)
            _copy(b, v[:m])
            _sums(K, False, a, a, v, p, q)
            numbers[0] = _distance(p, a) + _distance(q, b)
        if numbers[0] <= tolerance:
            numbers[4] = CONVERGED
        for j in range(m):
            b[j] = k[j] + epsilon * math.log(b[j])
        for i in range(n):
            a[i] = h[i] + epsilon * math.log(a[i])
        for side in range(2):  # in a loop: a constant True or False would be compiled for each
            ends = (rows, dead_columns, a, g[index]) if side else (columns, dead_rows, b, f[index])
            _extend(C, side == 1, ends[1], ends[0], epsilon, ends[2], store, ends[3])


# The linear system of the derivative ----------------------------------------------------------------------------------

_MOST_STEPS = 1000


@_compiled(_SUMS)
def _normal(P, scale, x, y):
    """Fill in y = P^T diag(scale) P x, reading P once."""
    n = P.shape[0]
    _fill(y, 0.0)
    fours = n - n % 4
    for i in range(0, fours, 4):
        r0, r1, r2, r3 = products(P, i, x)
        add_rows(P, i, r0 * scale[i], r1 * scale[i + 1], r2 * scale[i + 2], r3 * scale[i + 3], y)
    for i in range(fours, n):
        add_row(P, i, product(P, i, x) * scale[i], y)


@_compiled(_SUMS)
def _inner(weights, x, y):
    total = 0.0
    for j in range(weights.shape[0]):
        total += weights[j] * x[j] * y[j]
    return total


@_compiled(_SUMS)
def _centred(weights, x):
    """Subtract the weighted mean: the kernel of the operator are the constants."""
    total, mass = 0.0, 0.0
    for j in range(weights.shape[0]):
        total += weights[j] * x[j]
        mass += weights[j]
    for j in range(weights.shape[0]):
        x[j] -= total / mass


@_compiled(_EXACT)
def _smallest_ritz(alpha, beta, steps):
    """Smallest eigenvalue of the tridiagonal matrix of ``steps`` conjugate gradient steps, by bisection (Sturm's count)."""
    low, high = 0.0, 2.0
    for _ in range(60):
        middle = (low + high) / 2
        pivot, negative = 1.0, False
        for i in range(steps):
            diagonal = 1 / alpha[i] + (beta[i - 1] / alpha[i - 1] if i > 0 else 0.0)
            off = beta[i - 1] / alpha[i - 1] ** 2 if i > 0 else 0.0
            pivot = diagonal - middle - off / pivot
            if pivot <= 0:
                negative = True
                break
        if negative:
            high = middle
        else:
            low = middle
    return (low + high) / 2


@_compiled(_EXACT, from_python=True)
def pull_back(which, store, costs, weights_a, weights_b, epsilons, f, g, on_f, on_g, rtol, pull, report):
    """Derivative in the costs of <on_f, f> + <on_g, g> at solved potentials, for the problems ``which`` of a flat batch.

    Zero where the plan has lost a row or a column: a problem without a solution has no derivative.

    With P the plan and p, q its own marginals, (diag(q) - P^T diag(1/p) P) x = on_g - P^T (on_f / p), then
    l = on_f - P x and the derivative P_ij (l_i / p_i + x_j).

    Args:
        which: indices of the problems, int64.
        store: scratch as for ``solve``, float64.
        costs: ``(B, n, m)``, float64.
        weights_a: ``(B, n)``, float64.
        weights_b: ``(B, m)``, float64.
        epsilons: ``(B,)``, float64.
        f: solved potentials ``(B, n)``, float64.
        g: solved potentials ``(B, m)``, float64.
        on_f: cotangents ``(B, n)``, float64; zero where a = 0.
        on_g: cotangents ``(B, m)``, float64; zero where b = 0.
        rtol: relative residual asked of the conjugate gradients.
        pull: the derivative ``(B, n, m)``, filled in at live pairs.
        report: ``(B, 2)``, filled in: relative residual, smallest Ritz value of diag(q)^-1 (diag(q) - P^T diag(1/p) P).
    """
    for position in range(which.shape[0]):
        index = which[position]
        C, epsilon, numbers = costs[index], epsilons[index], report[index]
        rows, _ = _split(weights_a[index])
        columns, _ = _split(weights_b[index])
        n, m = rows.shape[0], columns.shape[0]
        together = columns[m - 1] == m - 1
        a, b, h, k = np.empty(n), np.empty(m), np.empty(n), np.empty(m)
        _normalise(weights_a[index], rows, a)
        _normalise(weights_b[index], columns, b)
        for i in range(n):
            h[i] = f[index, rows[i]] + epsilon * math.log(a[i])
        for j in range(m):
            k[j] = g[index, columns[j]] + epsilon * math.log(b[j])
        P, width = _matrix(store, n, m), _padded(m)
        z, rounded = _scratch(m, P)
        _absorb(C, rows, columns, together, epsilon, h, k, P, z, rounded)
        p, q, ones = np.empty(n), np.empty(width), np.zeros(width)
        _fill(ones[:m], 1)
        _fill(h, 1)
        _sums(P, False, a, h, ones, p, q)
        q = q[:m]
        (least_p, _, sound_p), (least_q, _, sound_q) = _extent(p), _extent(q)
        if not (least_p > 0 and least_q > 0 and sound_p + sound_q == 0):
            numbers[0], numbers[1] = 0.0, np.nan
            continue

        # On the right: h = on_f / p; the size of what enters, before any cancellation, is what the residual is relative to.
        right, wanted, size, x, direction = np.empty(m), np.empty(m), 0.0, np.zeros(width), np.zeros(width)
        for i in range(n):
            h[i] = on_f[index, rows[i]] / p[i]
        for j in range(m):
            right[j], k[j] = on_g[index, columns[j]], abs(on_g[index, columns[j]])
        for i in range(n):
            row, scale = P[i], h[i]
            for j in range(m):
                right[j] -= scale * row[j]
                k[j] += abs(scale) * row[j]
        for j in range(m):
            right[j] /= q[j]
            size += k[j] * k[j] / q[j]
        _centred(q, right)
        _copy(right, wanted)
        size = math.sqrt(size)

        inverse, image = np.empty(n), np.empty(width)
        for i in range(n):
            inverse[i] = 1 / p[i]
        alpha, beta = np.empty(_MOST_STEPS), np.empty(_MOST_STEPS)
        _copy(right, direction[:m])
        rho, steps, asked = _inner(q, right, right), 0, rtol
        while steps < min(_MOST_STEPS, 4 * m + 20):
            if math.sqrt(rho) <= asked * size:
                # The error is the residual divided by the smallest eigenvalue, which is seen only now.
                ritz = _smallest_ritz(alpha, beta, steps) if steps > 0 else 1.0
                asked = max(rtol * min(ritz, 1.0), 1e-14)
                if math.sqrt(rho) <= asked * size:
                    break
            _normal(P, inverse, direction, image)
            for j in range(m):
                k[j] = direction[j] - image[j] / q[j]
            curvature = _inner(q, direction, k)
            if curvature <= 0:
                break
            step = rho / curvature
            for j in range(m):
                x[j] += step * direction[j]
                right[j] -= step * k[j]
            _centred(q, right)
            before, rho = rho, _inner(q, right, right)
            alpha[steps], beta[steps] = step, rho / before
            for j in range(m):
                direction[j] = right[j] + beta[steps] * direction[j]
            steps += 1
        numbers[1] = _smallest_ritz(alpha, beta, steps) if steps > 0 else np.nan
        # The residual itself, which may have parted from its recurrence.
        _normal(P, inverse, x, image)
        for j in range(m):
            right[j] = wanted[j] - (x[j] - image[j] / q[j])
        _centred(q, right)
        numbers[0] = math.sqrt(_inner(q, right, right)) / size if size > 0 else 0.0
        for i in range(n):
            row, out = P[i], pull[index, rows[i]]
            height = (on_f[index, rows[i]] - product(P, i, x)) / p[i]
            if together:
                for j in range(m):
                    out[j] = row[j] * (height + x[j])
            else:
                for j in range(m):
                    out[columns[j]] = row[j] * (height + x[j])
