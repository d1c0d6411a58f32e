"""Operations on inner-product scores S_ij = s <q_i, k_j> + B_ij, of which no matrix is stored.

The score of attention, and minus the cost of the Sinkhorn Transformer over epsilon (arXiv 2603.25860). Log-weights and
potentials are vectors beside it: a row or a column of weight zero has ``-inf``, and what its features hold is never looked
at. A pair with bias ``-inf`` is forbidden.

Shapes: q ``(B, n, r)``, k ``(B / group, m, r)``: problem i reads the keys i // group, so that several heads share them.
Vectors ``(B, n)`` and ``(B, m)``, scale ``(B,)`` or a number, bias anything that broadcasts to ``(B, n, m)``, read where it
lies: an expanded one takes no memory.

Dtypes: exponents, sums and results are float64 if q is, else float32, under autocast too; vectors are taken in that dtype.

Memory is O(B (n + m) r) forward and backward, but for the gradient of a bias, which has its size. GPU kernels run on CUDA
(``ops.triton.streamed``), blocks of rows in plain torch elsewhere (``ops.blocks``); the gradients are the same formulas of
the same sums. Second derivatives are blocks of plain torch; third ones raise.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor

from sinkformer._numerics import FLOAT_DTYPES, working_dtype
from sinkformer.errors import BackendError, ConfigError, DeviceError, DTypeError, ShapeError
from sinkformer.ops import blocks, triton

Precision = Literal["ieee", "tf32"]

_asked: ContextVar[bool | None] = ContextVar("sinkformer_score_kernels", default=None)


@contextmanager
def use_kernels(asked: bool | None) -> Iterator[None]:
    """Run the GPU kernels inside (True), or plain torch (False); None chooses by the device, as outside.

    Per thread and task. True on a CPU is for tests, with triton's interpreter.

    Raises:
        BackendError: when an operation is called whose tensors the kernels asked for cannot read; it says why.
    """
    token = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(token)


def log_sum_exp(
    q: Tensor,
    k: Tensor,
    h: Tensor,
    *,
    scale: Tensor | float = 1.0,
    bias: Tensor | None = None,
    precision: Precision = "ieee",
) -> Tensor:
    """Log sum_j exp(S_ij + h_j), ``(B, n)``; ``-inf`` for a row without a pair. Softmin is minus epsilon times it.

    Args:
        q: ``(B, n, r)``, float64, float32, bfloat16 or float16.
        k: ``(B / group, m, r)``, of the dtype of q.
        h: ``(B, m)``, ``-inf`` for weight zero.
        scale: ``(B,)`` or a number.
        bias: broadcasts to ``(B, n, m)``; ``-inf`` forbids a pair.
        precision: of products of float32 on tensor cores; features of two bytes are multiplied exactly. Kernels only.

    Raises:
        ShapeError, DTypeError, DeviceError, ConfigError: arguments that do not fit together.
        BackendError: ``use_kernels(True)`` where they cannot run.
    """
    scale, bias, (h,) = _checked(q, k, (h,), scale, bias, precision)
    return _log_sum_exp(q, k, h, scale, bias, precision, _choice())


def transport(
    q: Tensor,
    k: Tensor,
    f: Tensor,
    g: Tensor,
    values: Tensor,
    *,
    scale: Tensor | float = 1.0,
    bias: Tensor | None = None,
    precision: Precision = "ieee",
) -> Tensor:
    """Plan times values, sum_j exp(f_i + S_ij + g_j) v_j: ``values`` ``(B / group, m, e)`` give ``(B, n, e)``.

    Products with values of two bytes round the plan: to bfloat16 for such values, to ten bits for float16.
    Arguments and errors as in :func:`log_sum_exp`.
    """
    scale, bias, (f, g) = _checked(q, k, (f, g), scale, bias, precision)
    if values.ndim != 3 or values.shape[:2] != k.shape[:2]:
        raise ShapeError(
            f"expected values of shape ({len(k)}, {k.shape[1]}, e), one row for each key, received {tuple(values.shape)}"
        )
    _check_like("values", values, q)
    if f.dtype == torch.float64 or values.dtype == torch.float64:
        values = values.to(f.dtype)
    return _transport(q, k, f, g, values, scale, bias, precision, _choice())


def moment(
    q: Tensor,
    k: Tensor,
    f: Tensor,
    g: Tensor,
    *,
    scale: Tensor | float = 1.0,
    bias: Tensor | None = None,
    precision: Precision = "ieee",
) -> Tensor:
    """Sum_j exp(f_i + S_ij + g_j) S_ij, ``(B, n)``: minus the transport cost of every row, over epsilon.

    Arguments and errors as in :func:`log_sum_exp`.
    """
    scale, bias, (f, g) = _checked(q, k, (f, g), scale, bias, precision)
    return _moment(q, k, f, g, scale, bias, precision, _choice())


def hardmax(
    q: Tensor,
    k: Tensor,
    h: Tensor,
    *,
    scale: Tensor | float = 1.0,
    bias: Tensor | None = None,
    precision: Precision = "ieee",
) -> tuple[Tensor, Tensor]:
    """``(max_j S_ij + h_j, its j)``, both ``(B, n)``: the limit of ``log_sum_exp`` for epsilon to zero; the first of equals.

    ``(-inf, 0)`` for a row without a pair. Arguments and errors as in :func:`log_sum_exp`.
    """
    scale, bias, (h,) = _checked(q, k, (h,), scale, bias, precision)
    given = [None if x is None else x.detach() for x in (q, k, h, scale, bias)]
    value, index = _hardmax(*given, precision, _choice())
    differentiated = any(x is not None and x.requires_grad for x in (q, k, h, scale, bias))
    if torch.is_grad_enabled() and differentiated and k.shape[1]:
        value = _at_index(q, k, h, scale, bias, index, value == -torch.inf)
    return value, index


def _at_index(
    q: Tensor, k: Tensor, h: Tensor, scale: Tensor, bias: Tensor | None, index: Tensor, alone: Tensor
) -> Tensor:
    """S_ij + h_j at one j for every row, ``-inf`` for rows without a pair."""
    keys = _spread(k, len(q)).gather(1, index.unsqueeze(-1).expand(*index.shape, k.shape[-1]))
    rows, keys = (x.to(h.dtype).masked_fill(alone.unsqueeze(-1), 0.0) for x in (q, keys))
    found = scale.unsqueeze(-1) * (rows * keys).sum(-1) + h.gather(1, index)
    if bias is not None:
        one = bias.expand(*index.shape, h.shape[1]).gather(2, index.unsqueeze(-1))
        found = found + one.squeeze(-1)
    return found.masked_fill(alone, -torch.inf)


# Arguments -----------------------------------------------------------------------------------------------------------


def _checked(
    q: Tensor,
    k: Tensor,
    vectors: tuple[Tensor, ...],
    scale: Tensor | float,
    bias: Tensor | None,
    precision: str,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """The scale of every problem, the bias with three axes, and the vectors in the dtype of sums.

    The last of ``vectors`` belongs to the keys, one before it to the rows.
    """
    if precision not in ("ieee", "tf32"):
        raise ConfigError(f"expected precision 'ieee' or 'tf32', received {precision!r}")
    if q.ndim != 3 or k.ndim != 3 or q.shape[-1] != k.shape[-1] or _groups(q, k) is None:
        raise ShapeError(
            f"expected queries (B, n, r) and keys (B / group, m, r), received {tuple(q.shape)} and {tuple(k.shape)}; "
            f"flatten batch axes, heads last"
        )
    _check_like("queries", q, q)
    _check_like("keys", k, q)
    if k.dtype != q.dtype:
        raise DTypeError(f"expected keys of dtype {q.dtype}, as the queries, received {k.dtype}; convert one of them")
    wanted = ((len(q), q.shape[1]), (len(q), k.shape[1]))[-len(vectors) :]
    wide = working_dtype(q.dtype)
    for x, shape in zip(vectors, wanted, strict=True):
        if tuple(x.shape) != shape:
            raise ShapeError(f"expected one number for each atom, shape {shape}, received {tuple(x.shape)}")
        _check_like("vectors", x, q)
    if isinstance(scale, Tensor):
        if tuple(scale.shape) not in ((), (len(q),)):
            raise ShapeError(f"expected a scale of shape ({len(q)},), or a number, received {tuple(scale.shape)}")
        _check_like("the scale", scale, q)
        scale = scale.to(wide).expand(len(q))
    else:
        scale = torch.full((len(q),), float(scale), dtype=wide, device=q.device)
    if bias is not None:
        whole = (len(q), q.shape[1], k.shape[1])
        if bias.ndim > 3 or any(x not in (1, y) for x, y in zip(bias.shape[::-1], whole[::-1], strict=False)):
            raise ShapeError(f"expected a bias that broadcasts to {whole}, received {tuple(bias.shape)}")
        _check_like("the bias", bias, q)
        bias = bias.reshape((1,) * (3 - bias.ndim) + tuple(bias.shape))
    return scale, bias, tuple(x.to(wide) for x in vectors)


def _check_like(name: str, x: Tensor, q: Tensor) -> None:
    if x.dtype not in FLOAT_DTYPES:
        remedy = "; a mask as a bias is 0 where pairs are allowed and -inf elsewhere" if x.dtype == torch.bool else ""
        raise DTypeError(f"expected {name} of a floating dtype, received {x.dtype}{remedy}")
    if x.device != q.device:
        raise DeviceError(
            f"expected {name} on {q.device}, where the queries are, received {x.device}; move one of them"
        )


def _groups(one: Tensor, other: Tensor) -> int | None:
    """How many problems share an entry of the other; None if that is no whole number."""
    if len(one) == len(other):
        return 1
    return len(one) // len(other) if len(other) and len(one) % len(other) == 0 and len(one) else None


def _choice() -> bool | None:
    # A compiler cannot read the variable; the operation itself does when it runs.
    return None if torch.compiler.is_compiling() else _asked.get()


def _engine(x: Tensor, kernels: bool | None) -> Any:
    """The module whose functions run: ``ops.triton.streamed`` or ``ops.blocks``."""
    asked = _asked.get() if kernels is None else kernels
    if asked is None:
        asked = x.device.type == "cuda" and not triton.interpreted() and triton.unavailable(x.device) is None
    if not asked:
        return blocks
    reason = triton.unavailable(x.device)
    if reason is not None:
        raise BackendError(f"the kernels were asked for by use_kernels and cannot run: {reason}")
    return importlib.import_module("sinkformer.ops.triton.streamed")


# Operations for torch.library: what torch.compile sees --------------------------------------------------------------


@torch.library.custom_op("sinkformer::log_sum_exp", mutates_args=())
def _log_sum_exp(
    q: Tensor, k: Tensor, h: Tensor, scale: Tensor, bias: Tensor | None, precision: str, kernels: bool | None
) -> Tensor:
    with torch.autocast(q.device.type, enabled=False):
        return _engine(q, kernels).log_sum_exp(q, k, h, scale, bias, precision)


@torch.library.custom_op("sinkformer::hardmax", mutates_args=())
def _hardmax(
    q: Tensor, k: Tensor, h: Tensor, scale: Tensor, bias: Tensor | None, precision: str, kernels: bool | None
) -> tuple[Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        return _engine(q, kernels).hardmax(q, k, h, scale, bias, precision)


@torch.library.custom_op("sinkformer::transport", mutates_args=())
def _transport(
    q: Tensor,
    k: Tensor,
    f: Tensor,
    g: Tensor,
    values: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    precision: str,
    kernels: bool | None,
) -> Tensor:
    with torch.autocast(q.device.type, enabled=False):
        return _engine(q, kernels).sums(q, k, f, g, scale, bias, None, None, values, False, precision)[0]


@torch.library.custom_op("sinkformer::moment", mutates_args=())
def _moment(
    q: Tensor,
    k: Tensor,
    f: Tensor,
    g: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    precision: str,
    kernels: bool | None,
) -> Tensor:
    with torch.autocast(q.device.type, enabled=False):
        return _engine(q, kernels).sums(q, k, f, g, scale, bias, None, None, None, True, precision)[1]


@torch.library.custom_op("sinkformer::sums", mutates_args=())
def _sums(
    q: Tensor,
    k: Tensor,
    f: Tensor,
    g: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    left: Tensor | None,
    right: Tensor | None,
    values: Tensor | None,
    moment: bool,
    precision: str,
    kernels: bool | None,
) -> tuple[Tensor, Tensor]:
    """What first derivatives are made of: ``blocks.sums``."""
    with torch.autocast(q.device.type, enabled=False):
        return _engine(q, kernels).sums(q, k, f, g, scale, bias, left, right, values, moment, precision)


@torch.library.custom_op("sinkformer::pair_weights", mutates_args=())
def _pair_weights(
    q: Tensor,
    k: Tensor,
    f: Tensor,
    g: Tensor,
    scale: Tensor,
    bias: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    moment: bool,
    precision: str,
    kernels: bool | None,
) -> Tensor:
    """The gradient of a bias: ``blocks.pair_weights``."""
    with torch.autocast(q.device.type, enabled=False):
        return _engine(q, kernels).pair_weights(q, k, f, g, scale, bias, left, right, moment, precision)


@_log_sum_exp.register_fake
def _(q, k, h, scale, bias, precision, kernels):
    return h.new_empty((len(h), q.shape[1]))


@_hardmax.register_fake
def _(q, k, h, scale, bias, precision, kernels):
    shape = (len(h), q.shape[1])
    return h.new_empty(shape), h.new_empty(shape, dtype=torch.int64)


@_transport.register_fake
def _(q, k, f, g, values, scale, bias, precision, kernels):
    return f.new_empty((*f.shape, values.shape[-1]))


@_moment.register_fake
def _(q, k, f, g, scale, bias, precision, kernels):
    return f.new_empty(f.shape)


@_sums.register_fake
def _(q, k, f, g, scale, bias, left, right, values, moment, precision, kernels):
    return f.new_empty((*f.shape, 0 if values is None else values.shape[-1])), f.new_empty(f.shape)


@_pair_weights.register_fake
def _(q, k, f, g, scale, bias, left, right, moment, precision, kernels):
    return f.new_empty(bias.shape)


# First derivatives ---------------------------------------------------------------------------------------------------
#
# A loss whose derivative in S_ij is P_ij C_ij has the gradients sum_j P_ij C_ij k_j in q_i, over s, and the same with the
# sides exchanged in k_j: for all three operations the sums of one more operation.


def _remember_log_sum_exp(ctx: Any, inputs: tuple, output: Tensor) -> None:
    q, k, h, scale, bias, ctx.precision, ctx.kernels = inputs
    ctx.save_for_backward(q, k, h, scale, bias, output)


def _log_sum_exp_backward(ctx: Any, upstream: Tensor) -> tuple:
    q, k, h, scale, bias, output = ctx.saved_tensors
    # Rows without a pair, and those that are NaN and of no use to the loss, take no part.
    void = (output == -torch.inf) | ((upstream == 0) & ~output.isfinite())
    f = (-output).masked_fill(void, -torch.inf)
    on_q, on_k, _, on_h, on_scale, on_bias = _through_scores(
        ctx, blocks.Terms(q, k, f, h, scale, bias, left=upstream.unsqueeze(-1)), needed=(0, 1, None, 2, 3, 4)
    )
    return on_q, on_k, on_h, on_scale, on_bias, None, None


def _remember_transport(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *tensors, ctx.precision, ctx.kernels = inputs
    ctx.save_for_backward(*tensors, output)


def _transport_backward(ctx: Any, upstream: Tensor) -> tuple:
    q, k, f, g, values, scale, bias, output = ctx.saved_tensors
    on_f = (upstream * output).sum(-1) if ctx.needs_input_grad[2] else None
    on_values = None
    if ctx.needs_input_grad[4]:
        exchanged, moved, precision = None if bias is None else bias.mT, upstream, ctx.precision
        # As coarse as the gradient will be, so that tensor cores multiply it; float16 is too narrow for gradients.
        if values.dtype == torch.bfloat16:
            moved = upstream.to(values.dtype)
        elif values.dtype == torch.float16:
            precision = "tf32"
        by_problem = _transport(k, q, g, f, moved, scale, exchanged, precision, ctx.kernels)
        on_values = _gathered(by_problem, values).to(values.dtype)
    terms = blocks.Terms(q, k, f, g, scale, bias, left=upstream, right=values)
    on_q, on_k, _, on_g, on_scale, on_bias = _through_scores(ctx, terms, needed=(0, 1, None, 3, 5, 6))
    return on_q, on_k, on_f, on_g, on_values, on_scale, on_bias, None, None


def _moment_backward(ctx: Any, upstream: Tensor) -> tuple:
    q, k, f, g, scale, bias, output = ctx.saved_tensors
    on_f = upstream * output if ctx.needs_input_grad[2] else None
    terms = blocks.Terms(q, k, f, g, scale, bias, left=upstream.unsqueeze(-1))
    on_q, on_k, _, on_g, on_scale, on_bias = _through_scores(ctx, terms, needed=(0, 1, None, 3, 4, 5), moment=True)
    return on_q, on_k, on_f, on_g, on_scale, on_bias, None, None


def _through_scores(
    ctx: Any, terms: blocks.Terms, needed: tuple[int | None, ...], moment: bool = False
) -> tuple[Tensor | None, ...]:
    """Gradients in q, k, f, g, scale and bias of a loss whose derivative in S_ij is W_ij of ``blocks.sums``.

    ``needed`` is the place of each of them among the inputs; None for one that is not asked for.
    """
    q, k, f, g, scale, bias, left, right, _ = terms
    assert f is not None
    asked = [place is not None and ctx.needs_input_grad[place] for place in needed]
    how = (moment, ctx.precision, ctx.kernels)
    on_q = on_k = on_g = on_scale = on_bias = None
    if asked[0] or asked[4]:
        moved, _ = _sums(q, k, f, g, scale, bias, left, right, k, *how)
        if asked[0]:
            on_q = _gathered(scale.unsqueeze(-1).unsqueeze(-1) * moved, q).to(q.dtype)
        if asked[4]:
            rows = _spread(q, len(f)).to(f.dtype).masked_fill((f == -torch.inf).unsqueeze(-1), 0.0)
            on_scale = (rows * moved).sum((-1, -2))
    if asked[1] or asked[3]:
        exchanged = None if bias is None else bias.mT
        moved, on_g = _sums(k, q, g, f, scale, exchanged, right, left, q if asked[1] else None, *how)
        if asked[1]:
            on_k = _gathered(scale.unsqueeze(-1).unsqueeze(-1) * moved, k).to(k.dtype)
    if bias is not None and asked[5]:
        on_bias = _pair_weights(q, k, f, g, scale, bias, left, right, *how).to(bias.dtype)
    return on_q, on_k, None, on_g if asked[3] else None, on_scale, on_bias


def _spread(x: Tensor, count: int) -> Tensor:
    """One entry for every problem."""
    return x if len(x) == count else x.repeat_interleave(count // len(x), 0)


def _gathered(by_problem: Tensor, like: Tensor) -> Tensor:
    """Sum over the problems that share an entry of ``like``."""
    if len(by_problem) == len(like):
        return by_problem
    return by_problem.unflatten(0, (len(like), len(by_problem) // len(like))).sum(1)


# Second derivatives --------------------------------------------------------------------------------------------------


def _remember_sums(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.moment, ctx.precision, ctx.kernels = inputs
    ctx.save_for_backward(*tensors)


def _sums_backward(ctx: Any, on_sums: Tensor, on_mass: Tensor) -> tuple:
    terms = blocks.Terms(*ctx.saved_tensors)
    with torch.no_grad(), torch.autocast(terms.q.device.type, enabled=False):
        found = blocks.differentiate_sums(terms, ctx.moment, on_sums, on_mass, ctx.needs_input_grad[: len(terms)])
    found = [None if x is None or given is None else x.to(given.dtype) for x, given in zip(found, terms, strict=True)]
    # Marked where they may be differentiated again: a constant would pass for a derivative of zero.
    if torch.is_grad_enabled():
        found = _SecondOrder.apply(len(found), *found, *terms, on_sums, on_mass)
    return *found, None, None, None


class _SecondOrder(torch.autograd.Function):
    """The identity on second derivatives, a function of what they depend on, which cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None):
        return tuple(None if x is None else x.clone() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None):
        raise BackendError(
            "expected derivatives of first and second order, received a request for the third: operations on scores have "
            "none; differentiate a dense formula, or an engine that holds the cost matrix"
        )


def _refuse_second_order(ctx: Any, *upstream: Tensor) -> tuple:
    raise BackendError(
        "expected first derivatives only in what follows from the gradient of a bias, received a request for a second "
        "one; write the scores with their bias as a matrix, and use an engine that holds it"
    )


_log_sum_exp.register_autograd(_log_sum_exp_backward, setup_context=_remember_log_sum_exp)
_transport.register_autograd(_transport_backward, setup_context=_remember_transport)
_moment.register_autograd(_moment_backward, setup_context=_remember_transport)
_sums.register_autograd(_sums_backward, setup_context=_remember_sums)
_pair_weights.register_autograd(_refuse_second_order)
