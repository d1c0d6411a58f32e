"""Kernels that make inner-product scores tile by tile and sum over them; ``streamed`` launches them.

A program holds a block of rows and walks over the columns of its part. Exponents are to base 2, where the hardware has its
exponential. Features of atoms of weight zero, and of those beyond the edge, are never read: their tile holds zeros, and
their log-weight is ``-inf``. No sum depends on the order in which programs run.

Operands may be shared by several problems: problem b reads entry ``b // group``. Widths in capitals are padded to powers
of two, at least 16, which the tensor cores ask for; wider features are multiplied in ``CHUNKS``.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

import triton
import triton.language as tl

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _features(pointer, rows, taken, first, width, W: tl.constexpr):
    """Columns ``first`` to ``first + W`` of rows of a matrix; zero beyond its width and where not ``taken``."""
    columns = first + tl.arange(0, W)
    inside = taken[:, None] & (columns < width)[None, :]
    return tl.load(pointer + rows[:, None] * width + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _dot(a, b, sums, PRECISION: tl.constexpr):
    """Sums + a b, both of one dtype."""
    if PRECISION == "widened":  # the interpreter does not multiply bfloat16
        return tl.dot(a.to(sums.dtype), b.to(sums.dtype), sums, input_precision="ieee", out_dtype=sums.dtype)
    return tl.dot(a, b, sums, input_precision=PRECISION, out_dtype=sums.dtype)


@triton.jit
def _product(a, b, sums, PRECISION: tl.constexpr):
    """Sums + a b; ``a``, computed, takes the dtype of ``b``, read, but for the narrow range of float16."""
    if b.dtype == tl.float16:
        return tl.dot(a, b.to(tl.float32), sums, input_precision="tf32", out_dtype=sums.dtype)
    return _dot(a.to(b.dtype), b, sums, PRECISION)


@triton.jit
def _inner(
    a_tile,
    a,
    a_rows,
    a_taken,
    b_tile,
    b,
    b_rows,
    b_taken,
    width,
    like,
    BN: tl.constexpr,
    BM: tl.constexpr,
    W: tl.constexpr,
    CHUNKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Inner products of all rows of two blocks; of the first chunk the tiles are given."""
    sums = _dot(a_tile, tl.trans(b_tile), tl.zeros((BN, BM), like), PRECISION)
    for chunk in tl.range(1, CHUNKS, num_stages=1):  # loads ahead of two nested loops would fill the registers
        one = _features(a, a_rows, a_taken, chunk * W, width, W)
        other = _features(b, b_rows, b_taken, chunk * W, width, W)
        sums = _dot(one, tl.trans(other), sums, PRECISION)
    return sums


@triton.jit
def log_sum_exp_kernel(
    q,
    k,
    h,
    scale,
    bias,
    out,
    n,
    m,
    r,
    count,
    span,
    q_group,
    k_group,
    bias_b,
    bias_n,
    bias_m,
    HAS_BIAS: tl.constexpr,
    R: tl.constexpr,
    R_CHUNKS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Log-sum-exp of h_j + S_ij over the columns of a part, with a running maximum."""
    like = out.dtype.element_ty
    blocks = tl.cdiv(n, BN)
    problem = (tl.program_id(0) // blocks).to(tl.int64)
    part = tl.program_id(1)
    rows = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    inside = rows < n
    q_rows = problem // q_group * n + rows
    k_first = problem // k_group * m
    q_tile = _features(q, q_rows, inside, 0, r, R)
    factor = tl.load(scale + problem) * _LOG2E

    highest = tl.full((BN,), float("-inf"), like)
    total = tl.zeros((BN,), like)
    for start in range(part * span, tl.minimum(part * span + span, m), BM):
        columns = start + tl.arange(0, BM)
        weight = tl.load(h + problem * m + columns, mask=columns < m, other=float("-inf"))
        taken = weight != float("-inf")
        k_rows = k_first + columns
        k_tile = _features(k, k_rows, taken, 0, r, R)
        x = _inner(q_tile, q, q_rows, inside, k_tile, k, k_rows, taken, r, like, BN, BM, R, R_CHUNKS, PRECISION)
        x = x * factor + (weight * _LOG2E)[None, :]
        if HAS_BIAS:
            place = (
                bias + problem * bias_b + rows.to(tl.int64)[:, None] * bias_n + columns.to(tl.int64)[None, :] * bias_m
            )
            x += tl.load(place, mask=inside[:, None] & taken[None, :], other=0.0).to(like) * _LOG2E
        higher = tl.maximum(highest, tl.max(x, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # not -inf - (-inf)
        total = total * tl.exp2(highest - base) + tl.sum(tl.exp2(x - base[:, None]), 1)
        highest = higher
    some = highest != float("-inf")
    found = tl.where(some, highest + tl.log2(tl.where(some, total, 1.0)), float("-inf")) * _LN2
    # A NaN is no maximum, but it is in the sum.
    found = tl.where(total != total, total, found)
    tl.store(out + (part * count + problem) * n + rows, found, mask=inside)


@triton.jit
def hardmax_kernel(
    q,
    k,
    h,
    scale,
    bias,
    out,
    index,
    n,
    m,
    r,
    count,
    span,
    q_group,
    k_group,
    bias_b,
    bias_n,
    bias_m,
    HAS_BIAS: tl.constexpr,
    R: tl.constexpr,
    R_CHUNKS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The largest h_j + S_ij over the columns of a part, and the first j that has it."""
    like = out.dtype.element_ty
    blocks = tl.cdiv(n, BN)
    problem = (tl.program_id(0) // blocks).to(tl.int64)
    part = tl.program_id(1)
    rows = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    inside = rows < n
    q_rows = problem // q_group * n + rows
    k_first = problem // k_group * m
    q_tile = _features(q, q_rows, inside, 0, r, R)
    factor = tl.load(scale + problem)

    highest = tl.full((BN,), float("-inf"), like)
    where = tl.zeros((BN,), tl.int32)
    spoiled = tl.zeros((BN,), tl.int32)
    for start in range(part * span, tl.minimum(part * span + span, m), BM):
        columns = start + tl.arange(0, BM)
        weight = tl.load(h + problem * m + columns, mask=columns < m, other=float("-inf"))
        taken = weight != float("-inf")
        k_rows = k_first + columns
        k_tile = _features(k, k_rows, taken, 0, r, R)
        x = _inner(q_tile, q, q_rows, inside, k_tile, k, k_rows, taken, r, like, BN, BM, R, R_CHUNKS, PRECISION)
        x = x * factor + weight[None, :]
        if HAS_BIAS:
            place = (
                bias + problem * bias_b + rows.to(tl.int64)[:, None] * bias_n + columns.to(tl.int64)[None, :] * bias_m
            )
            x += tl.load(place, mask=inside[:, None] & taken[None, :], other=0.0).to(like)
        spoiled = tl.maximum(spoiled, tl.max((x != x).to(tl.int32), 1))
        here = tl.max(x, 1)
        first = tl.min(tl.where(x == here[:, None], columns[None, :], m), 1)
        better = here > highest
        where = tl.where(better, first, where)
        highest = tl.where(better, here, highest)
    highest = tl.where(spoiled > 0, float("nan"), highest)
    place = (part * count + problem) * n + rows
    tl.store(out + place, highest, mask=inside)
    tl.store(index + place, where.to(tl.int64), mask=inside)


@triton.jit
def _plan_tile(
    dots,
    factor,
    f_here,
    g_here,
    rows,
    columns,
    taken,
    bias,
    bias_n,
    bias_m,
    HAS_BIAS: tl.constexpr,
):
    """``(P, S)`` of a tile from its inner products; ``bias`` points to the problem's own."""
    scores = dots * factor
    if HAS_BIAS:
        place = bias + rows.to(tl.int64)[:, None] * bias_n + columns.to(tl.int64)[None, :] * bias_m
        scores += tl.load(place, mask=taken, other=0.0).to(dots.dtype)
    return tl.exp2((scores + (f_here[:, None] + g_here[None, :])) * _LOG2E), scores


@triton.jit
def sums_kernel(
    q,
    k,
    f,
    g,
    scale,
    bias,
    left,
    right,
    values,
    out,
    mass,
    n,
    m,
    r,
    e,
    v,
    count,
    span,
    q_group,
    k_group,
    left_group,
    right_group,
    bias_b,
    bias_n,
    bias_m,
    HAS_BIAS: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    OF_KEYS: tl.constexpr,
    MOMENT: tl.constexpr,
    R: tl.constexpr,
    R_CHUNKS: tl.constexpr,
    E: tl.constexpr,
    E_CHUNKS: tl.constexpr,
    V: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    PRECISION: tl.constexpr,
    FACTOR_PRECISION: tl.constexpr,
):
    """Sums of W_ij v_j and of w_ij over the columns of a part, as in ``blocks.sums``.

    ``E`` is 1 for a factor left_i right_j without products. ``OF_KEYS``: the values are the keys, and their tile is there.
    """
    like = mass.dtype.element_ty
    blocks = tl.cdiv(n, BN)
    problem = (tl.program_id(0) // blocks).to(tl.int64)
    part = tl.program_id(1)
    first_value = tl.program_id(2) * V
    rows = (tl.program_id(0) % blocks) * BN + tl.arange(0, BN)
    f_here = tl.load(f + problem * n + rows, mask=rows < n, other=float("-inf"))
    inside = f_here != float("-inf")
    q_rows = problem // q_group * n + rows
    k_first = problem // k_group * m
    q_tile = _features(q, q_rows, inside, 0, r, R)
    factor = tl.load(scale + problem)
    left_rows = problem // left_group * n + rows
    if HAS_LEFT:
        if E == 1:
            left_here = tl.load(left + left_rows, mask=inside, other=0.0).to(like)
        else:
            left_tile = _features(left, left_rows, inside, 0, e, E)

    total = tl.zeros((BN,), like)
    if HAS_VALUES:
        summed = tl.zeros((BN, V), like)
    for start in range(part * span, tl.minimum(part * span + span, m), BM):
        columns = start + tl.arange(0, BM)
        g_here = tl.load(g + problem * m + columns, mask=columns < m, other=float("-inf"))
        taken = g_here != float("-inf")
        k_rows = k_first + columns
        k_tile = _features(k, k_rows, taken, 0, r, R)
        dots = _inner(q_tile, q, q_rows, inside, k_tile, k, k_rows, taken, r, like, BN, BM, R, R_CHUNKS, PRECISION)
        here = inside[:, None] & taken[None, :]
        plan, scores = _plan_tile(
            dots, factor, f_here, g_here, rows, columns, here, bias + problem * bias_b, bias_n, bias_m, HAS_BIAS
        )
        weights = plan
        if E == 1:
            if HAS_LEFT:
                weights *= left_here[:, None]
            if HAS_RIGHT:
                right_rows = problem // right_group * m + columns
                weights *= tl.load(right + right_rows, mask=taken, other=0.0).to(like)[None, :]
        else:
            right_rows = problem // right_group * m + columns
            right_tile = _features(right, right_rows, taken, 0, e, E)
            weights *= _inner(
                left_tile,
                left,
                left_rows,
                inside,
                right_tile,
                right,
                right_rows,
                taken,
                e,
                like,
                BN,
                BM,
                E,
                E_CHUNKS,
                FACTOR_PRECISION,
            )
        if MOMENT:
            masses = weights * tl.where(plan != 0.0, scores, 0.0)  # not zero times infinity
            total += tl.sum(masses, 1)
            weights += masses
        else:
            total += tl.sum(weights, 1)
        if HAS_VALUES:
            if OF_KEYS:
                summed = _product(weights, k_tile, summed, PRECISION)
            else:
                tile = _features(values, k_rows, taken, first_value, v, V)
                summed = _product(weights, tile, summed, PRECISION)
    row = (part * count + problem) * n + rows
    if first_value == 0:
        tl.store(mass + row, total, mask=rows < n)
    if HAS_VALUES:
        place = first_value + tl.arange(0, V)
        tl.store(out + row[:, None] * v + place[None, :], summed, mask=(rows < n)[:, None] & (place < v)[None, :])


@triton.jit
def pair_weights_kernel(
    q,
    k,
    f,
    g,
    scale,
    bias,
    left,
    right,
    out,
    n,
    m,
    r,
    e,
    repeats,
    q_group,
    k_group,
    left_group,
    right_group,
    bias_b,
    bias_n,
    bias_m,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    MOMENT: tl.constexpr,
    R: tl.constexpr,
    R_CHUNKS: tl.constexpr,
    E: tl.constexpr,
    E_CHUNKS: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    PRECISION: tl.constexpr,
    FACTOR_PRECISION: tl.constexpr,
):
    """A tile of W of ``blocks.pair_weights``, summed over the ``repeats`` problems that share a bias."""
    like = out.dtype.element_ty
    down, across = tl.cdiv(n, BN), tl.cdiv(m, BM)
    tile, entry = tl.program_id(0) % (down * across), (tl.program_id(0) // (down * across)).to(tl.int64)
    rows = (tile // across) * BN + tl.arange(0, BN)
    columns = (tile % across) * BM + tl.arange(0, BM)
    summed = tl.zeros((BN, BM), like)
    for repeat in range(repeats):
        problem = entry * repeats + repeat
        f_here = tl.load(f + problem * n + rows, mask=rows < n, other=float("-inf"))
        g_here = tl.load(g + problem * m + columns, mask=columns < m, other=float("-inf"))
        inside, taken = f_here != float("-inf"), g_here != float("-inf")
        q_rows, k_rows = problem // q_group * n + rows, problem // k_group * m + columns
        q_tile, k_tile = _features(q, q_rows, inside, 0, r, R), _features(k, k_rows, taken, 0, r, R)
        dots = _inner(q_tile, q, q_rows, inside, k_tile, k, k_rows, taken, r, like, BN, BM, R, R_CHUNKS, PRECISION)
        factor = tl.load(scale + problem)
        here = inside[:, None] & taken[None, :]
        plan, scores = _plan_tile(
            dots, factor, f_here, g_here, rows, columns, here, bias + problem * bias_b, bias_n, bias_m, True
        )
        weights = plan
        left_rows, right_rows = problem // left_group * n + rows, problem // right_group * m + columns
        if E == 1:
            if HAS_LEFT:
                weights *= tl.load(left + left_rows, mask=inside, other=0.0).to(like)[:, None]
            if HAS_RIGHT:
                weights *= tl.load(right + right_rows, mask=taken, other=0.0).to(like)[None, :]
        else:
            left_tile = _features(left, left_rows, inside, 0, e, E)
            right_tile = _features(right, right_rows, taken, 0, e, E)
            weights *= _inner(
                left_tile,
                left,
                left_rows,
                inside,
                right_tile,
                right,
                right_rows,
                taken,
                e,
                like,
                BN,
                BM,
                E,
                E_CHUNKS,
                FACTOR_PRECISION,
            )
        if MOMENT:
            weights += weights * tl.where(plan != 0.0, scores, 0.0)
        summed += weights
    place = out + entry * n * m + rows.to(tl.int64)[:, None] * m + columns[None, :]
    tl.store(place, summed, mask=(rows < n)[:, None] & (columns < m)[None, :])
