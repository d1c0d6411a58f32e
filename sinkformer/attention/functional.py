"""Transport attention with the conventions of ``torch.nn.functional.scaled_dot_product_attention``."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from sinkformer._numerics import FLOAT_DTYPES, under_autocast, working_dtype
from sinkformer.attention.masks import check, flat, sides
from sinkformer.attention.options import Marginals, Options
from sinkformer.attention.plans import AttentionPlan, Problem, exactly, kept, silenced, solve
from sinkformer.errors import ConfigError, DeviceError, DTypeError, ShapeError
from sinkformer.solvers import Gradient

CAUSAL = (
    "expected no causal mask with hard marginals of both sides: queries and keys of equal weight under a lower triangular "
    "mask have one coupling, the identity, whatever the scores are. Use marginals='queries', which is causal softmax "
    "attention; or tau < 1, for which later queries still influence earlier outputs, through the shares of the keys"
)


def sinkhorn_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    marginals: Marginals = "both",
    tau: float | None = None,
    query_weights: Tensor | None = None,
    key_weights: Tensor | None = None,
    iterations: int | None = None,
    tolerance: float | None = None,
    gradient: Gradient | None = None,
) -> Tensor:
    """Attention whose weights are a transport plan: rows sum to one, and every key receives its share of the mass.

    The arguments up to ``enable_gqa`` are those of ``scaled_dot_product_attention``, with their meaning. The result is
    A V with A_ij = exp(f_i + S_ij + h_j) and S = scale Q K^T + mask; see ``sinkformer.attention`` for the problem that f
    and h solve. The last half step is on the side of the queries, so rows are exact; how far the keys are from their
    shares is what :func:`attention_plan` tells.

    Exact means to the rounding of the weights where they are stored, and to the rounding of the scores, 6e-8 times their
    size in float32, where they are made again for every pass.

    By default a fixed number of sweeps is made, with nothing read by the host, so ``torch.compile(fullgraph=True)`` works;
    with ``tolerance`` the library's solver is called, which looks at the numbers and warns if it stops before.

    Nothing of size n x m is stored, except for a mask that differs between queries, with dropout, and on the CPU where all
    problems together have at most 2^26 pairs: there it is several times faster.

    A query that may attend to nothing gets zeros; a key to which nobody may attend is padding. Where a mask admits no
    coupling at all, sweeps do not converge: rows stay exact and numbers finite, and ``attention_plan(...).marginal_error``
    shows it. A NaN in a query or key of positive weight gives NaN, as in torch.

    Args:
        query: ``(*batch, n, d)``, floating point.
        key: ``(*batch, m, d)``; batch axes broadcast.
        value: ``(*batch, m, e)``.
        attn_mask: broadcasts to ``(*batch, n, m)``: bool, True where a query may attend to a key; or added to the
            scores, -1e4 and less forbidding the pair. A mask of one row, ``(*batch, 1, m)``, is padding of keys.
        dropout_p: probability of dropping a weight; always applied, as in torch. Stores the weights.
        is_causal: lower triangular mask. Only with ``marginals="queries"`` or ``tau < 1``: under hard marginals it leaves
            one coupling, the identity.
        scale: of the scores; 1 / sqrt(d) if None. One over the temperature.
        enable_gqa: grouped heads: axis -3 of query has a multiple of the heads of key and value.
        marginals: ``"both"``, or ``"queries"`` for rows only, which is softmax attention.
        tau: a penalty rho KL in place of the hard marginal of the keys, as tau = rho / (rho + 1): 1 is hard, 0 is softmax.
        query_weights: ``(*batch, n)``, broadcast, non-negative; only their proportions count. Zero is padding: a query
            of weight zero attends, and pushes no mass onto keys. Equal for all if None.
        key_weights: the same for keys, ``(*batch, m)``: the shares they receive.
        iterations: sweeps to make, 5 if None; with ``tolerance`` the most of them, 2000 if None.
        tolerance: marginal error (L1) to reach.
        gradient: ``"unrolled"``, the derivative of the sweeps made, which is exact for what is computed; or, with
            ``tolerance`` and then the default, ``"implicit"``, that of the solution.

    Returns:
        ``(*batch, n, e)``, in the dtype of the inputs; under autocast in its dtype. Sums are taken in float32 or float64.

    Raises:
        ConfigError: options outside their range or contradicting each other, or a causal mask with hard marginals.
        DTypeError, DeviceError, ShapeError: arguments that do not fit together.
        InfeasibleError: with ``tolerance``: no coupling avoids the forbidden pairs.
        NonFiniteError: with ``tolerance``: scores that are NaN or infinite.
        WeightError: negative or infinite weights; on the CPU. Elsewhere, where nothing is read, they give NaN.
    """
    options = Options.of(marginals, tau, iterations, tolerance, gradient)
    if not 0 <= dropout_p <= 1:
        raise ConfigError(f"expected dropout_p between 0 and 1, received {dropout_p}")
    query, key, value = _castable(query, key, value)
    if options.tau == 0 and query_weights is None and key_weights is None and attn_mask is None:
        _flat_shapes(query, key, enable_gqa)
        return functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    plan = _plan(query, key, attn_mask, is_causal, scale, enable_gqa, query_weights, key_weights, options)
    return attend(plan, value, dropout_p)[0]


def attention_plan(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    marginals: Marginals = "both",
    tau: float | None = None,
    query_weights: Tensor | None = None,
    key_weights: Tensor | None = None,
    iterations: int | None = None,
    tolerance: float | None = None,
    gradient: Gradient | None = None,
) -> AttentionPlan:
    """The weights of :func:`sinkhorn_attention` as a lazy matrix, with potentials, marginal error and coverage of keys.

    ``attention_plan(q, k) @ v`` is ``sinkhorn_attention(q, k, v)``. Arguments and errors are those of that function.
    """
    options = Options.of(marginals, tau, iterations, tolerance, gradient)
    query, key = _castable(query, key)
    return _plan(query, key, attn_mask, is_causal, scale, enable_gqa, query_weights, key_weights, options)


def attend(
    plan: AttentionPlan, value: Tensor, dropout_p: float = 0.0, need_weights: bool = False
) -> tuple[Tensor, Tensor | None]:
    """``(A V, A)`` with A after dropout, as torch returns it; None in its place if not needed."""
    if not (dropout_p or need_weights):
        return plan @ value, None
    weights = functional.dropout(plan.weights(), dropout_p)
    values = plan.problem.wide(plan.flat_values(value))
    with exactly(value.device):
        out = flat(weights, 2) @ values.to(weights.dtype)
    return out.reshape(*weights.shape[:-1], value.shape[-1]).to(value.dtype), weights.to(value.dtype)


def _plan(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    query_weights: Tensor | None,
    key_weights: Tensor | None,
    options: Options,
) -> AttentionPlan:
    if is_causal and options.tau == 1:
        raise ConfigError(CAUSAL)
    batch, key_batch = _flat_shapes(query, key, enable_gqa)
    n, m, d = query.shape[-2], key.shape[-2], query.shape[-1]
    if scale is not None and not math.isfinite(scale):
        raise ConfigError(f"expected a finite scale, received {scale}")
    if is_causal:
        attn_mask = _causal(attn_mask, (*batch, n, m), query.device)
    q = flat(query.expand(*batch, n, d), 2)
    k = flat(key.expand(*key_batch, m, d), 2)
    with exactly(query.device):
        like = q.new_empty((len(q), 0), dtype=working_dtype(q.dtype))
        weights = sides(attn_mask, query_weights, key_weights, like, (*batch, n, m))
        if weights.idle is not None:
            # As in a Measure: padding that is not finite is no query.
            q = q.masked_fill((weights.idle & ~q.isfinite().all(-1)).unsqueeze(-1), 0.0)
        factor = 1 / math.sqrt(max(d, 1)) if scale is None else float(scale)
        problem = kept(Problem(q, silenced(k, weights.dead), factor, weights))
        return AttentionPlan(problem, solve(problem, options), batch, key_batch)


def _flat_shapes(query: Tensor, key: Tensor, enable_gqa: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Batch shapes of queries and of keys, the latter with fewer heads if they are shared."""
    if min(query.dim(), key.dim()) < 2 + enable_gqa or query.shape[-1] != key.shape[-1]:
        axes = "(*batch, heads, n, d)" if enable_gqa else "(*batch, n, d)"
        raise ShapeError(
            f"expected query and key of shape {axes} with equal d, received {tuple(query.shape)} and {tuple(key.shape)}"
        )
    heads: tuple[list[int], list[int]] = ([], [])
    if enable_gqa:
        many, few = query.shape[-3], key.shape[-3]
        if not few or many % few:
            raise ShapeError(f"expected heads of query a multiple of those of key, received {many} and {few}")
        heads = ([many], [few])
    lead = query.shape[: -2 - enable_gqa], key.shape[: -2 - enable_gqa]
    try:
        batch = torch.broadcast_shapes(*lead)
    except RuntimeError:
        raise ShapeError(
            f"expected batch shapes that broadcast, received {tuple(lead[0])} of query and {tuple(lead[1])} of key"
            + ("" if enable_gqa else "; enable_gqa=True lets heads share keys")
        ) from None
    return (*batch, *heads[0]), (*batch, *heads[1])


def check_padded(name: str, tensor: Tensor) -> None:
    """Raise if a tensor is nested."""
    if tensor.is_nested:
        raise DTypeError(
            f"expected {name} as a padded tensor, received a nested one; set use_nested_tensor = False on the "
            f"nn.TransformerEncoder that makes it, as replace_attention does"
        )


def _castable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All in one dtype on one device; under autocast in its dtype, as torch does for attention."""
    names = ("query", "key", "value")
    for name, t in zip(names, tensors, strict=False):
        check_padded(name, t)
        if t.dtype not in FLOAT_DTYPES:
            raise DTypeError(f"expected {name} in a floating dtype, received {t.dtype}")
        if t.device != tensors[0].device:
            raise DeviceError(f"expected {name} on {tensors[0].device} as the query, received it on {t.device}")
    kind = tensors[0].device.type
    if under_autocast(tensors[0].device) and all(t.dtype != torch.float64 for t in tensors):
        return tuple(t.to(torch.get_autocast_dtype(kind)) for t in tensors)
    dtypes = [t.dtype for t in tensors]
    if len(set(dtypes)) > 1:
        raise DTypeError(f"expected query, key and value of one dtype, received {', '.join(map(str, dtypes))}")
    return tensors


def _causal(mask: Tensor | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The mask, and only pairs j <= i of it."""
    before = torch.ones(shape[-2:], dtype=torch.bool, device=device).tril()
    if mask is None:
        return before
    check("attn_mask", mask, shape)
    if mask.dtype == torch.bool:
        return mask & before
    return torch.where(before, mask, torch.full((), -torch.inf, dtype=mask.dtype, device=device))
