"""Who may attend to whom, and how much everyone weighs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sinkformer.attention import stored
from sinkformer.errors import DTypeError, ShapeError, WeightError

# An additive mask of this or less forbids the pair: the finite numbers that stand in for -inf (-1e4, -1e9, the least of a
# dtype) would lose all meaning where a whole column has them, since columns are normalised.
FORBIDDING = -1e4


@dataclass(frozen=True, eq=False)
class Sides:
    """Weights and mask of a flat batch, such that no sum over pairs is empty.

    Attributes:
        log_a: log-weights of the queries, ``(B, n)``; ``-inf`` for padding.
        log_b: log-weights of the keys, ``(B, m)``; ``-inf`` for padding.
        bias: added to the scores, ``(B or 1, n, m)``; ``-inf`` forbids a pair. Zero in rows and columns of padding. None
            if there is none.
        key_bias: the same for a mask that is equal for all queries, ``(B, m)``, finite.
        blind: queries that get zeros, since they may attend to nothing, ``(B, n)``; None if there are none for certain.
        dead: keys of weight zero, ``(B, m)``; None if there are none for certain.
        idle: queries of weight zero, ``(B, n)``; None if there are none for certain.
    """

    log_a: Tensor
    log_b: Tensor
    bias: Tensor | None = None
    key_bias: Tensor | None = None
    blind: Tensor | None = None
    dead: Tensor | None = None
    idle: Tensor | None = None


def sides(
    mask: Tensor | None,
    query_weights: Tensor | None,
    key_weights: Tensor | None,
    like: Tensor,
    shape: tuple[int, ...],
) -> Sides:
    """Read a mask and weights.

    A key is padding if its weight is zero or if no query of positive weight may attend to it, a query if its weight is
    zero or if it may attend to no key of positive weight. The others keep their proportions.

    Args:
        mask: bool (True = may attend) or additive, broadcasts to ``shape``; all pairs if None.
        query_weights: broadcast to ``(*batch, n)``; all equal if None.
        key_weights: broadcast to ``(*batch, m)``; all equal if None.
        like: a tensor of the dtype and on the device of the results.
        shape: ``(*batch, n, m)``.
    """
    *batch, n, m = shape
    a = _weights("query_weights", query_weights, (*batch, n), like)
    b = _weights("key_weights", key_weights, (*batch, m), like)
    if mask is None and a is None and b is None:
        log_a, log_b = (like.new_zeros(1, k).log_softmax(-1).expand(like.shape[0], k) for k in (n, m))
        return Sides(log_a, log_b)
    present_a = like.new_ones(like.shape[0], n, dtype=torch.bool) if a is None else a != 0
    present_b = like.new_ones(like.shape[0], m, dtype=torch.bool) if b is None else b != 0
    bias, key_bias = (None, None) if mask is None else _read(mask, like, shape)
    if bias is not None:
        allowed = ~(bias <= FORBIDDING)  # NaN is no prohibition, and goes on
        live_a = (allowed & present_b.unsqueeze(-2)).any(-1) & present_a
        live_b = (allowed & live_a.unsqueeze(-1)).any(-2) & present_b
        blind = ~(allowed & live_b.unsqueeze(-2)).any(-1)
        padding = blind.unsqueeze(-1) | ~live_b.unsqueeze(-2)
        bias = bias.masked_fill(~allowed, -torch.inf).masked_fill(padding, 0.0)
    else:
        live_a, live_b = present_a, present_b
        if key_bias is not None:
            live_b = live_b & ~(key_bias <= FORBIDDING)
        anybody = (live_a.any(-1) & live_b.any(-1)).unsqueeze(-1)
        live_a, live_b, blind = live_a & anybody, live_b & anybody, ~anybody.expand(-1, n)
    key_bias = None if key_bias is None else key_bias.masked_fill(~live_b, 0.0)
    return Sides(_log_shares(a, live_a, like), _log_shares(b, live_b, like), bias, key_bias, blind, ~live_b, ~live_a)


def flat(tensor: Tensor, axes: int) -> Tensor:
    """All axes but the last ``axes`` in one."""
    return tensor.reshape(math.prod(tensor.shape[:-axes]), *tensor.shape[-axes:])


def _weights(name: str, weights: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
    if weights is None:
        return None
    check(name, weights, shape)
    weights = weights.to(like.dtype)
    usable = (weights >= 0) & (weights < torch.inf)
    visible = weights.device.type == "cpu" and not (torch.compiler.is_compiling() or stored.transformed())
    if visible and not bool(usable.all()):
        raise WeightError(
            f"expected {name} finite and non-negative, received {float(weights[~usable][0]):g}; zero is padding"
        )
    return flat(weights.masked_fill(~usable, torch.nan).expand(shape), 1)


def _read(mask: Tensor, like: Tensor, shape: tuple[int, ...]) -> tuple[Tensor | None, Tensor | None]:
    """The additive mask ``(B or 1, n, m)``, or that of the keys ``(B, m)`` if it is equal for all queries."""
    check("attn_mask", mask, shape)
    *batch, n, m = shape
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, -torch.inf)
    mask = mask.to(like.dtype)
    if mask.dim() < 2 or mask.shape[-2] == 1:
        return None, flat(mask.expand(*batch, 1, m), 2).squeeze(1)
    if mask.shape[:-2].numel() == 1:
        return mask.reshape(mask.shape[-2:]).expand(1, n, m), None
    return flat(mask.expand(shape), 2), None


def check(name: str, given: Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless a mask or weights are of a kind and shape that can be used."""
    boolean = name == "attn_mask" and given.dtype == torch.bool
    if not (given.is_floating_point() or boolean):
        kinds = "bool (True = may attend) or floating point" if name == "attn_mask" else "floating point"
        raise DTypeError(f"expected {name} as {kinds}, received {given.dtype}")
    fits = given.dim() <= len(shape) and all(
        have in (1, want) for have, want in zip(given.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ShapeError(f"expected {name} to broadcast to {tuple(shape)}, received {tuple(given.shape)}")


def _log_shares(weights: Tensor | None, live: Tensor, like: Tensor) -> Tensor:
    """Logarithm of the share everyone has of the whole, ``-inf`` for the dead; zeros if all are dead."""
    kept = live.to(like.dtype) if weights is None else weights.masked_fill(~live, 0.0)
    if not kept.shape[-1]:
        return kept
    # Their sum may be beyond the dtype, their quotients are not. NaN goes on.
    top = kept.detach().amax(-1, keepdim=True)
    empty = top <= 0
    kept = kept / top.masked_fill(empty, 1.0)
    shares = kept / kept.sum(-1, keepdim=True).masked_fill(empty, 1.0)
    dead = shares == 0
    return shares.masked_fill(dead, 1.0).log().masked_fill(dead, -torch.inf).masked_fill(empty, 0.0)
