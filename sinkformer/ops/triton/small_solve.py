"""The kernel that solves small problems, one to a program: the whole of K in registers from the first sweep to the last.

The method is that of ``sinkformer.ops.cpu.kernels``, where its rules are explained: K = exp((h + k - C) / epsilon) with the
weights inside, plain or over-relaxed sweeps on the scalings u and v, a path of epsilon, averaged updates of symmetric problems.
What differs is what a GPU makes dear. A sum over threads costs as much as a sweep, so that errors and scalings are looked at
once in ``_BLOCK`` sweeps. Registers are few: potentials stay in memory, in the arrays of the results, and weights are read
again where they are needed.
"""

# Tensors inside a kernel are not what its annotations, nor those of triton's functions, say to a type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from sinkformer.ops.triton.small_tiles import (
    column_sums,
    costs,
    density,
    exponentials,
    keep,
    log_weights,
    row_sums,
    vector,
    weights,
)

_LARGEST_COST = tl.constexpr(1e29)
# Codes of the report.
_CONVERGED, _UNSOLVED, _NONFINITE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(3)
# Sweeps between two looks at the error, and looks between two at the rate.
_BLOCK, _FIRST_LOOK, _LOOK = tl.constexpr(4), tl.constexpr(4), tl.constexpr(8)
_MOST_T = tl.constexpr(0.97)
# Scalings beyond e^18 are absorbed into the potentials.
_LARGEST = tl.constexpr(65659969.0)
_ATTEMPTS, _AVERAGES = tl.constexpr(3), tl.constexpr(4)
_SLACK = tl.constexpr(40.0)
_STRETCH = tl.constexpr(16)
_FIRST_EPSILON, _STRIDE, _ON_THE_WAY = tl.constexpr(0.1), tl.constexpr(4.0), tl.constexpr(3e-3)
# What ends a run of sweeps.
_ABSORB, _MEASURE, _NEXT_EPSILON, _LOST = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)


@triton.jit
def _first_rate():
    """``(t, gap, cap, best, last, fall, stalled, hold)`` before anything is known of the rate."""
    one = tl.full([], 1.0, tl.float32)
    infinite = one * float("inf")
    return one * 0, one, one * _MOST_T, infinite, infinite, one * 0, tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)


@triton.jit
def _adjust(t, gap, cap, best, last, fall, stalled, hold, error, sweeps, contraction):
    """The over-relaxation t of the next sweeps, from the error now and at the last look; rules of ``ops.cpu.kernels``."""
    stalled = tl.where(error < 0.9 * best, 0, stalled + 1)
    diverging = (error > 10 * best) & (error > 3 * last)
    best = tl.minimum(best, error)
    circling = (stalled >= 8) & (diverging == 0)
    far = circling & (error > 0.05)
    paused = diverging | far
    stalled = tl.where(circling, 0, stalled)
    gap = tl.where(diverging, tl.minimum(1.0, 2 * gap), tl.where(circling, tl.minimum(1.0, 4 * gap), gap))
    gap = tl.where(far, 1.0, gap)
    cap = tl.where(far, 0.75 * cap, cap)
    active = (paused == 0) & (hold == 0)
    hold = tl.where(diverging, 1, tl.where(far, 4, tl.maximum(hold - 1, 0)))
    # The rate of plain sweeps.
    seen = tl.minimum(contraction, tl.where(error >= 0.1, 0.9, 1 - 1e-4))
    found = active & (t == 0) & (gap == 1) & (seen > 0.3) & (error < 0.5)
    gap = tl.where(found, 1 - seen, gap)
    # That of over-relaxed ones.
    relaxed = active & (t != 0) & (last < float("inf"))
    fall_now = tl.exp2(tl.log2(error / last) / sweeps)
    slow = tl.minimum(fall_now, fall)  # one window may be noise
    young = 1 - (slow + t) * (slow + t) / ((1 + t) * (1 + t) * slow)
    smaller = tl.minimum(tl.maximum(young, gap / 4), gap)
    larger = tl.where(fall_now < t, tl.minimum(1.0, 1.1 * gap), gap)
    gap = tl.where(relaxed, tl.where((t + 0.02 < slow) & (slow < 1), smaller, larger), gap)
    fall = tl.where(relaxed, fall_now, fall)
    cap = tl.where(active & (error < 0.05), _MOST_T, cap)
    chosen = tl.minimum(2 / (1 + tl.sqrt(gap)) - 1, cap)
    t = tl.where(paused, 0.0, tl.where(active, chosen, t))
    return t, gap, cap, best, error, fall, stalled, hold


@triton.jit
def _contraction(y, y_before, a):
    """The rate of plain sweeps: Rayleigh quotient of two successive increments 1 / y - 1 of log u, less their a-mean."""
    d, d_before = tl.where(a > 0, 1 / y - 1, 0.0), tl.where(a > 0, 1 / y_before - 1, 0.0)
    d, d_before = d - tl.sum(a * d, 0), d_before - tl.sum(a * d_before, 0)
    size = tl.sum(a * d_before * d_before, 0)
    return tl.where(size > 0, tl.sum(a * d * d_before, 0) / size, 0.0).to(tl.float32)


@triton.jit
def _update(w, sums, inverse, plus, minus):
    """``(w y^-(1 + t), y)`` with y = w sums / weights, in the Padé form; plus = 1 + t, minus = 1 - t. Dead ones stay."""
    y = tl.where(inverse > 0, w * sums * inverse, 1.0)
    if y.dtype == tl.float64:
        step = (plus + minus * y) / ((minus + plus * y) * y)  # a division is dear
    else:
        step = (plus + minus * y) / (minus + plus * y) / y  # y may be beyond the root of the largest number
    return w * step, y


@triton.jit
def _sweep(K, u, v, inverse_a, inverse_b, plus, minus, symmetric):
    """One update of u and of v; with the quotients of the sums before it and the weights."""
    moved, y = _update(u, tl.sum(K * v[None, :], 1), inverse_a, plus, minus)
    if symmetric == 0:
        u = moved
    other, z = _update(v, tl.sum(K * u[:, None], 0), inverse_b, plus, minus)
    if symmetric:
        u, v = tl.sqrt(u * moved), tl.sqrt(v * other)
    else:
        v = other
    return u, v, y, z


@triton.jit
def _centre(cost, rows, columns, stride, live_a, live_b, live, slack, times, h, k, N: tl.constexpr, M: tl.constexpr):
    """Potentials of which no row or column of K vanishes; more than once, and then averaged, for a symmetric problem."""
    for _ in range(times):
        # In the precision of the costs: any potentials near these will do.
        C = costs(cost, rows, columns, stride, live)
        rest = C - k.to(C.dtype)[None, :]
        smallest = tl.where(live_a, tl.min(rest, 1), 0.0)
        least = tl.min(rest - smallest[:, None], 0).to(tl.float64)
        h = smallest.to(tl.float64)
        k = tl.where(live_b, k + tl.maximum(least - slack, 0.0), 0.0)
        if N == M:
            if times > 1:
                h = (h + k) / 2
                k = h
    return h, k


@triton.jit
def _symmetric(cost, weights_a, weights_b, columns, n, m, stride, size, N: tl.constexpr, M: tl.constexpr):
    """Whether the problem is unchanged by exchanging source and target, up to the rounding of costs of at most ``size``."""
    same = tl.full([], 0, tl.int32)
    if N == M:
        if n == m:
            w = vector(weights_a, columns, n)
            same = 1 - tl.max((w != vector(weights_b, columns, n)).to(tl.int32), 0)
            first = tl.full([], 0, tl.int32)
            # A few rows at a time: a tile of the other order goes through shared memory.
            while (same == 1) & (first < n):
                rows = first + tl.arange(0, _STRETCH)
                live = (vector(weights_a, rows, n) > 0)[:, None] & (w > 0)[None, :]
                C = costs(cost, rows, columns, stride, live)
                mirrored = tl.load(cost + columns[None, :] * stride + rows[:, None], mask=live, other=float("inf"))
                near = tl.abs(C - mirrored).to(tl.float64) <= 64 * 2.220446049250313e-16 * size
                same = tl.min(tl.min(((C == mirrored) | near).to(tl.int32), 1), 0)
                first += _STRETCH
    return same


@triton.jit
def _gap(cost, rows, columns, stride, live, K, u, r, p, a, b, f, g, epsilon):
    """Bound on the duality gap of the rounded plan, diag(u) K with row sums p; ``certificates.gap_bound`` has the formula.

    r is min(1, a / p).
    """
    u = u * r
    q = column_sums(K, u)
    live_a, live_b = a > 0, b > 0
    c = tl.where(live_b, tl.minimum(1.0, b / tl.where(live_b, q, 1.0)), 1.0)
    total = tl.sum(p, 0) - 1 + tl.sum(b * tl.log(c), 0) + tl.sum(a * tl.log(r), 0)
    left = tl.maximum(a - u * row_sums(K, c), 0.0)
    right = tl.maximum(b - c * q, 0.0)
    other = tl.sum(right, 0)
    if (tl.sum(left, 0) > 0) & (other > 0):
        right = right / other
        added_to = right > 0
        ratio = tl.where(added_to, right / tl.where(live_b, b * c, 1.0), 1.0)
        spread = tl.sum(right * tl.log(ratio), 0) - tl.sum(right * g, 0) / epsilon
        used = live & added_to[None, :]
        C = costs(cost, rows, columns, stride, used).to(tl.float64)
        average = tl.sum(tl.where(used, C * right[None, :], 0.0), 1)
        squares = right * right / c
        curvature = tl.sum(tl.where(used, squares[None, :] * (1 / K).to(tl.float64), 0.0), 1)
        share = tl.where(live_a, left / tl.where(live_a, a, 1.0), 0.0)
        first = left * ((average - f) / epsilon + spread - tl.log(r))
        first -= (a - left) * tl.log(tl.where(share < 1, 1 - share, 1.0))
        tangent = left + 0.5 * left * left / tl.where(live_a, u, 1.0) * curvature
        total += tl.sum(tl.where(left > 0, tl.where(tangent < first, tangent, first), 0.0), 0)
    return epsilon * total


@triton.jit
def _extend(cost, wanted, offsets, potential, scale, axis: tl.constexpr, dtype: tl.constexpr):
    """Soft c-transform at atoms of weight zero along ``axis``, 0 without a pair; costs there may be anything."""
    C = tl.load(cost + offsets, mask=wanted, other=float("inf"))
    C = tl.where((tl.abs(C) <= _LARGEST_COST) | (C == float("inf")), C, 0.0)
    rest = C.to(tl.float64) - potential
    height = tl.min(rest.to(dtype), axis).to(tl.float64)
    height = tl.where(height < float("inf"), height, 0.0)
    total = tl.sum(exponentials(tl.expand_dims(height, axis) - rest, scale, dtype).to(tl.float64), axis)
    return tl.where(total > 0, height - tl.log(tl.where(total > 0, total, 1.0)) / scale, 0.0)


@triton.jit(do_not_specialize=["n", "m", "budget", "patience", "masked_budget"])
def solve(
    cost,
    weights_a,
    weights_b,
    epsilons,
    start,
    f,
    g,
    report,
    n,
    m,
    stride,
    tolerance,
    goal,
    budget,
    patience,
    masked_budget,
    WARM: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
):
    """Solve one problem of n <= N and m <= M atoms; arguments as of ``sinkformer.ops.cpu.kernels.solve``.

    ``start`` is read where WARM; rows of costs are ``stride`` apart. Scalars are float32.
    """
    problem = tl.program_id(0).to(tl.int64)
    rows, columns = tl.arange(0, N), tl.arange(0, M)
    cost += problem * n * stride
    weights_a += problem * n
    weights_b += problem * m
    start += problem * m
    f += problem * n
    g += problem * m
    report += problem * 5
    dtype: tl.constexpr = cost.dtype.element_ty
    infinity = tl.full([], float("inf"), tl.float64)
    final = tl.load(epsilons + problem)

    # What kind of problem it is -------------------------------------------------------------------------------------
    a, b = weights(weights_a, rows, n), weights(weights_b, columns, m)
    live_a, live_b = a > 0, b > 0
    live = live_a[:, None] & live_b[None, :]
    C = costs(cost, rows, columns, stride, live)
    usable = tl.abs(C) <= _LARGEST_COST
    kind = tl.where(usable | (live == 0), 0, tl.where(C == float("inf"), 1, 2))
    worst = tl.max(tl.max(kind, 1), 0)
    least_a, least_b = tl.min(tl.where(usable, C, float("inf")), 1), tl.min(tl.where(usable, C, float("inf")), 0)
    high, low = tl.max(tl.max(tl.where(usable, C, -float("inf")), 1), 0), tl.min(least_a, 0)
    spread = high.to(tl.float64) - low.to(tl.float64)
    alone_a, alone_b = live_a & (least_a == float("inf")), live_b & (least_b == float("inf"))
    alone = tl.maximum(tl.max(alone_a.to(tl.int32), 0), tl.max(alone_b.to(tl.int32), 0))
    fewer = tl.minimum(tl.sum(live_a.to(tl.int32), 0), tl.sum(live_b.to(tl.int32), 0)) - 1
    most = tl.minimum(budget.to(tl.int64), patience.to(tl.int64) * tl.maximum(fewer * fewer, 1))
    most = tl.where(worst > 0, tl.minimum(most, masked_budget.to(tl.int64)), most).to(tl.int32)
    symmetric = tl.full([], 0, tl.int32)
    if not WARM:
        size = tl.maximum(tl.abs(high), tl.abs(low)).to(tl.float64)
        symmetric = _symmetric(cost, weights_a, weights_b, columns, n, m, stride, size, N, M)
    inverse_a = tl.where(live_a, 1 / tl.where(live_a, a, 1.0), 0.0).to(dtype)
    inverse_b = tl.where(live_b, 1 / tl.where(live_b, b, 1.0), 0.0).to(dtype)

    # Where it starts ------------------------------------------------------------------------------------------------
    epsilon, slack, lift = final, final * 0, final * 0
    if WARM:
        slack = _SLACK * final
        k = tl.where(live_b, vector(start, columns, m) + final * log_weights(b), 0.0)
    else:
        k = tl.zeros([M], tl.float64)
        if symmetric:
            slack = infinity
        else:
            if most > 0:
                while epsilon * _STRIDE <= _FIRST_EPSILON * spread:
                    epsilon *= _STRIDE
            lift = epsilon  # from g = 0 and not from k = 0: where costs are constant that is the solution
    keep(g, k, columns, m)
    times = tl.where(symmetric > 0, _AVERAGES, 1)

    # The solution ---------------------------------------------------------------------------------------------------
    t, gap, cap, best, last, fall, stalled, hold = _first_rate()
    one = tl.full([], 1.0, dtype)
    error = infinity
    sweeps, since, wait = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32), tl.full([], _FIRST_LOOK, tl.int32)
    lost, missed, trial = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    measuring = (most <= 0).to(tl.int32)
    handed_out = tl.full([], 0, tl.int32)
    K = tl.zeros([N, M], dtype)
    running = (worst < 2) & (alone == 0)
    while running:
        h, k = vector(f, rows, n), vector(g, columns, m)
        if times > 0:
            h, k = _centre(cost, rows, columns, stride, live_a, live_b, live, slack, times, h, k, N, M)
            k += lift * log_weights(weights(weights_b, columns, m))
            keep(f, h, rows, n)
            keep(g, k, columns, m)
        K = density(costs(cost, rows, columns, stride, live), h, k, 1 / epsilon, dtype)
        u, v = tl.full([N], 1.0, dtype), tl.full([M], 1.0, dtype)
        if measuring:
            a, b = weights(weights_a, rows, n), weights(weights_b, columns, m)
            p = row_sums(K, tl.full([M], 1.0, tl.float64))
            exact = tl.full([N], 1.0, tl.float64)
            if (symmetric == 0) & (handed_out == 0):
                exact = tl.where(live_a, a / tl.where(live_a, p, 1.0), 1.0)
                p = a
            error = tl.sum(tl.abs(p - a), 0) + tl.sum(tl.abs(column_sums(K, exact) - b), 0)
            missed += 1
            enough = (error <= tolerance) | (sweeps >= most) | (missed > _ATTEMPTS)
            if enough | (handed_out > 0):
                if handed_out > 0:
                    running = running & (handed_out == 0)
                else:
                    h, log_a, log_b = h + epsilon * tl.log(exact), log_weights(a), log_weights(b)
                    outside_a = tl.where(live_a, h - epsilon * log_a, 0.0)
                    outside_b = tl.where(live_b, k - epsilon * log_b, 0.0)
                    shift = (tl.sum(a * outside_a, 0) - tl.sum(b * outside_b, 0)) / 2
                    shift = tl.where(symmetric > 0, 0.0, shift)  # not even by rounding
                    keep(f, (outside_a - shift) + epsilon * log_a, rows, n)
                    keep(g, (outside_b + shift) + epsilon * log_b, columns, m)
                    size = tl.maximum(tl.max(tl.abs(outside_a), 0), tl.max(tl.abs(outside_b), 0)) + tl.abs(shift)
                    # Potentials so large that their rounding is seen in the plan: once more, with what is handed out.
                    handed_out = (size * 1e-15 > 0.01 * tolerance * epsilon).to(tl.int32)
                    running = running & (handed_out > 0)
                times = times * 0
            else:
                u = exact.to(dtype)
                measuring = measuring * 0
        if running & (measuring == 0):
            event = tl.full([], 0, tl.int32)
            y = tl.full([N], 1.0, dtype)
            while event == 0:
                count = tl.minimum(tl.where((trial > 0) | (lost > 0), 1, _BLOCK), most - sweeps)
                now = tl.where((trial > 0) | (symmetric > 0), 0.0, t)
                plus, minus = one + now.to(dtype), one - now.to(dtype)
                for _ in range(count - 1):
                    u, v, y, z = _sweep(K, u, v, inverse_a, inverse_b, plus, minus, symmetric)
                y_before = y
                u, v, y, z = _sweep(K, u, v, inverse_a, inverse_b, plus, minus, symmetric)
                sweeps += count
                row_error = tl.sum(tl.where(live_a, tl.abs(y - 1) / inverse_a, 0.0), 0)
                column_error = tl.sum(tl.where(live_b, tl.abs(z - 1) / inverse_b, 0.0), 0)
                total = tl.where(symmetric > 0, 2 * row_error, row_error + column_error).to(tl.float32)
                largest = tl.maximum(tl.max(tl.maximum(u, 1 / u), 0), tl.max(tl.maximum(v, 1 / v), 0))
                sound = (total < float("inf")) & (largest < float("inf"))
                spent = sweeps >= most
                onwards = (epsilon > final) & ((total <= tl.maximum(goal, _ON_THE_WAY)) | spent)
                exact_rows = (now == 0) & (epsilon == final) & (column_error <= goal)
                measure = spent | tl.where(symmetric > 0, total <= goal, exact_rows)
                event = tl.where(largest >= _LARGEST, _ABSORB, 0)
                event = tl.where(measure, _MEASURE, event)
                event = tl.where(onwards, _NEXT_EPSILON, event)
                event = tl.where(sound, event, _LOST)
                trial = ((trial == 0) & (t > 0) & (total <= 1.5 * goal)).to(tl.int32)
                since += count
                if sound & (onwards == 0) & (symmetric == 0) & (since >= wait):
                    seen = tl.full([], 0.0, tl.float32)
                    if t == 0:
                        seen = _contraction(y, y_before, tl.where(live_a, 1 / inverse_a, 0.0))
                    t, gap, cap, best, last, fall, stalled, hold = _adjust(
                        t, gap, cap, best, last, fall, stalled, hold, total, since, seen
                    )
                    since, wait = since * 0, wait * 0 + _LOOK

            h, k = vector(f, rows, n), vector(g, columns, m)
            measuring = ((event == _MEASURE) | ((event == _NEXT_EPSILON) & (sweeps >= most))).to(tl.int32)
            times, lift = times * 0, lift * 0
            if event == _LOST:
                # Back to the last absorbed pair, and from there as from a start.
                lost += 1
                gone = (symmetric > 0) | (lost > _ATTEMPTS)
                running = running & (gone == 0)
                error = infinity
            else:
                k += epsilon * tl.log(v.to(tl.float64))
            if event >= _NEXT_EPSILON:
                if event == _NEXT_EPSILON:
                    # The same potential g at the next epsilon, the weights inside.
                    following = tl.where(sweeps >= most, final, tl.maximum(final, epsilon / _STRIDE))
                    k += (following - epsilon) * log_weights(weights(weights_b, columns, m))
                    epsilon = following
                t, gap, cap, best, last, fall, stalled, hold = _first_rate()
                since, wait, trial, times = since * 0, wait * 0 + _FIRST_LOOK, trial * 0, times * 0 + 1
                slack = _SLACK * epsilon
            else:
                h += epsilon * tl.log(u.to(tl.float64))
                if N == M:
                    if symmetric:
                        h = (h + k) / 2
                        k = h
            keep(f, h, rows, n)
            keep(g, k, columns, m)

    # What is said of it ---------------------------------------------------------------------------------------------
    value, bound = error * 0, infinity
    code = tl.where(worst == 2, _NONFINITE, _UNSOLVED)
    a, b = weights(weights_a, rows, n), weights(weights_b, columns, m)
    if error < float("inf"):
        h, k = vector(f, rows, n), vector(g, columns, m)
        # The plan diag(exact) K; what is exact is absorbed in h, but not in K.
        p = row_sums(K, tl.full([M], 1.0, tl.float64))
        exact, r = tl.full([N], 1.0, tl.float64), tl.full([N], 1.0, tl.float64)
        if (symmetric > 0) | (handed_out > 0):
            r = tl.where(live_a, tl.minimum(1.0, a / tl.where(live_a, p, 1.0)), 1.0)
        else:
            exact = tl.where(live_a, a / tl.where(live_a, p, 1.0), 1.0)
            p = a
        outside_a = tl.where(live_a, h - final * log_weights(a), 0.0)
        outside_b = tl.where(live_b, k - final * log_weights(b), 0.0)
        value = final * (1 - tl.sum(p, 0)) + tl.sum(a * outside_a, 0) + tl.sum(b * outside_b, 0)
        bound = _gap(cost, rows, columns, stride, live, K, exact, r, p, a, b, outside_a, outside_b, final)
        code = tl.where(error <= tolerance, _CONVERGED, code)
        dead_a, dead_b = (rows < n) & (live_a == 0), (columns < m) & (live_b == 0)
        offsets = rows[:, None] * stride + columns[None, :]
        if tl.max(dead_a.to(tl.int32), 0) > 0:
            beyond = _extend(cost, dead_a[:, None] & live_b[None, :], offsets, k[None, :], 1 / final, 1, dtype)
            outside_a = tl.where(dead_a, beyond, outside_a)
        if tl.max(dead_b.to(tl.int32), 0) > 0:
            beyond = _extend(cost, live_a[:, None] & dead_b[None, :], offsets, h[:, None], 1 / final, 0, dtype)
            outside_b = tl.where(dead_b, beyond, outside_b)
        keep(f, outside_a, rows, n)
        keep(g, outside_b, columns, m)
    else:
        keep(f, a * 0, rows, n)
        if WARM:
            keep(g, vector(start, columns, m), columns, m)
        else:
            keep(g, b * 0, columns, m)
    tl.store(report, error)
    tl.store(report + 1, bound)
    tl.store(report + 2, value)
    tl.store(report + 3, sweeps.to(tl.float64))
    tl.store(report + 4, code.to(tl.float64))
