"""Sums over inner-product scores in plain torch, a block of rows at a time: any device, nothing of size n x m kept.

The twin of ``ops.triton.streamed``: the same functions with the same arguments. Shapes as in ``ops.scores``, where problem b
reads row ``b // (B / len(x))`` of any x with fewer than B of them. ``scale`` is ``(B,)``, ``bias`` ``(1 or B, 1 or n, 1 or m)``.
Exponents and sums are of the dtype of the vectors. Atoms of log-weight ``-inf`` are never looked at. Not for use under
autocast, nor for autograd: ``ops.scores`` puts both right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Entries of a block. On a CPU it should stay in the cache between the passes over it, but hold enough rows to be worth the
# reading of all columns; elsewhere it should fill the device.
_CACHED_ENTRIES, _CACHED_ROWS, _MOST_ENTRIES = 2**19, 128, 2**24


class Terms(NamedTuple):
    """What the plan P_ij = exp(f_i + S_ij + g_j), its factor C_ij = <left_i, right_j> and its values are made of.

    Without f, rows have no weights.
    """

    q: Tensor
    k: Tensor
    f: Tensor | None
    g: Tensor
    scale: Tensor
    bias: Tensor | None = None
    left: Tensor | None = None
    right: Tensor | None = None
    values: Tensor | None = None


def log_sum_exp(q: Tensor, k: Tensor, h: Tensor, scale: Tensor, bias: Tensor | None, precision: str = "ieee") -> Tensor:
    """Log sum_j exp(S_ij + h_j), ``(B, n)``."""
    found = h.new_full((len(h), q.shape[1]), -torch.inf)
    for block, part in _blocks(Terms(q, k, None, h, scale, bias)):
        found[block] = (_scores(part) + part.g.unsqueeze(-2)).logsumexp(-1)
    return found


def hardmax(
    q: Tensor, k: Tensor, h: Tensor, scale: Tensor, bias: Tensor | None, precision: str = "ieee"
) -> tuple[Tensor, Tensor]:
    """``(max_j S_ij + h_j, its j)``, ``(B, n)`` each; the first of equals."""
    found = h.new_full((len(h), q.shape[1]), -torch.inf)
    index = torch.zeros(found.shape, dtype=torch.int64, device=h.device)
    for block, part in _blocks(Terms(q, k, None, h, scale, bias)):
        found[block], index[block] = (_scores(part) + part.g.unsqueeze(-2)).max(-1)
    return found, index


def sums(
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
    precision: str = "ieee",
) -> tuple[Tensor, Tensor]:
    """``(sum_j W_ij v_j, sum_j w_j)`` with W = w = P C, or W = P C (1 + S) and w = P C S for a ``moment``.

    C_ij is <left_i, right_j>; one of them alone has width one, none is C = 1.
    """
    width = 0 if values is None else values.shape[-1]
    summed, mass = f.new_zeros((*f.shape, width)), torch.zeros_like(f)
    for block, part in _blocks(Terms(q, k, f, g, scale, bias, left, right, values)):
        weights, masses = _weights(part, moment)
        mass[block] = masses.sum(-1)
        if part.values is not None:
            summed[block] = weights @ part.values
    return summed, mass


def pair_weights(
    q: Tensor,
    k: Tensor,
    f: Tensor,
    g: Tensor,
    scale: Tensor,
    bias: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    moment: bool,
    precision: str = "ieee",
) -> Tensor:
    """W of ``sums``, summed to the shape of ``bias``: its gradient."""
    found = torch.zeros(bias.shape, dtype=f.dtype, device=f.device)
    terms = Terms(q, k, f, g, scale, bias, left, right)
    for block, part in _blocks(terms):
        place = _places(terms, *block)[Terms._fields.index("bias")]
        found[place] += _weights(part, moment)[0].sum_to_size(found[place].shape)
    return found


def differentiate_sums(
    terms: Terms, moment: bool, on_sums: Tensor, on_mass: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of <sums, on_sums> + <mass, on_mass> in the terms ``needed``: the second derivatives of the operations.

    Every block is evaluated again and differentiated by autograd, so that only one is in memory with its intermediates.
    """
    wide = terms.g.dtype
    asked = [x is not None and need for x, need in zip(terms, needed, strict=True)]
    grads = [
        torch.zeros(x.shape, dtype=wide, device=x.device) if ask and x is not None else None
        for x, ask in zip(terms, asked, strict=True)
    ]
    if not any(asked):
        return grads
    for problems, rows in _ranges(terms):
        places = _places(terms, problems, rows)
        leaves = [
            None if x is None else x[place].detach().requires_grad_(ask)
            for x, place, ask in zip(terms, places, asked, strict=True)
        ]
        with torch.enable_grad():
            part = _spread(leaves, _groups(terms), problems)
            weights, masses = _weights(part, moment)
            total = (masses.sum(-1) * on_mass[problems, rows]).sum()
            if part.values is not None:
                total = total + ((weights @ part.values) * on_sums[problems, rows]).sum()
            given = [x for x in leaves if x is not None and x.requires_grad]
            found = iter(torch.autograd.grad(total, given, allow_unused=True))
        for grad, place in zip(grads, places, strict=True):
            step = None if grad is None else next(found)
            if grad is not None and step is not None:
                grad[place] += step
    return grads


# Blocks --------------------------------------------------------------------------------------------------------------

_Place = tuple[slice, ...]


def _blocks(terms: Terms) -> Iterator[tuple[_Place, Terms]]:
    """Ranges of problems and rows, and the terms of the block, one of each for every problem."""
    groups = _groups(terms)
    for problems, rows in _ranges(terms):
        places = _places(terms, problems, rows)
        cut = [None if x is None else x[place] for x, place in zip(terms, places, strict=True)]
        yield (problems, rows), _spread(cut, groups, problems)


def _ranges(terms: Terms) -> Iterator[_Place]:
    """Ranges of whole problems, or of rows of one problem."""
    (count, m), n, entries = terms.g.shape, terms.q.shape[1], _MOST_ENTRIES
    if m == 0:  # nothing to sum
        return
    if terms.g.device.type == "cpu":
        entries = max(_CACHED_ENTRIES, _CACHED_ROWS * m)
    if n * m > entries:
        step = max(1, entries // m)
        for problem in range(count):
            for start in range(0, n, step):
                yield slice(problem, problem + 1), slice(start, min(n, start + step))
    elif n:
        step = entries // (n * m)
        for start in range(0, count, step):
            yield slice(start, min(count, start + step)), slice(0, n)


def _groups(terms: Terms) -> list[int]:
    """How many problems share an entry of a term; zero if it is the same for all."""
    count = len(terms.g)
    found = [1 if x is None else count // max(1, len(x)) for x in terms]
    if terms.bias is not None and len(terms.bias) < count:
        found[Terms._fields.index("bias")] = 0
    return found


def _places(terms: Terms, problems: slice, rows: slice) -> list[_Place]:
    """Where the entries of a block stand in every term."""
    found = []
    for name, x, group in zip(Terms._fields, terms, _groups(terms), strict=True):
        place = [slice(problems.start // group, (problems.stop - 1) // group + 1) if group else slice(None)]
        if x is not None and name in ("q", "f", "left", "bias"):
            place.append(rows if name != "bias" or x.shape[1] > 1 else slice(None))
        found.append(tuple(place))
    return found


def _spread(cut: list[Tensor | None], groups: list[int], problems: slice) -> Terms:
    """The terms of a block in the dtype of sums, one of each for every problem, zero at atoms of weight zero."""
    g = cut[Terms._fields.index("g")]
    assert g is not None
    found: list[Tensor | None] = []
    for x, group in zip(cut, groups, strict=True):
        x = None if x is None else x.to(g.dtype)
        if x is not None and group > 1:
            own = torch.arange(problems.start, problems.stop, device=x.device) // group
            x = x.index_select(0, own - problems.start // group)
        found.append(x)
    part = Terms(*found)  # pyright: ignore[reportArgumentType]
    dead = part.g == -torch.inf
    part = part._replace(k=_without(part.k, dead), right=_without(part.right, dead), values=_without(part.values, dead))
    if part.f is None:
        return part
    dead = part.f == -torch.inf
    return part._replace(q=_without(part.q, dead), left=_without(part.left, dead))


def _without(x: Tensor | None, dead: Tensor) -> Tensor | None:
    return None if x is None else x.masked_fill(dead.unsqueeze(-1), 0.0)


def _scores(part: Terms) -> Tensor:
    """S of a block."""
    scores = (part.q * part.scale.unsqueeze(-1).unsqueeze(-1)) @ part.k.mT
    if part.bias is None:
        return scores
    dead = (part.g == -torch.inf).unsqueeze(-2)
    if part.f is not None:
        dead = dead | (part.f == -torch.inf).unsqueeze(-1)
    return (scores + part.bias).masked_fill(dead, 0.0)


def _weights(part: Terms, moment: bool) -> tuple[Tensor, Tensor]:
    """``(W, w)`` of a block."""
    assert part.f is not None
    scores = _scores(part)
    plan = (part.f.unsqueeze(-1) + scores + part.g.unsqueeze(-2)).exp()
    factor = plan
    if part.left is not None and part.right is not None:
        factor = plan * (part.left @ part.right.mT)
    elif part.left is not None:
        factor = plan * part.left
    elif part.right is not None:
        factor = plan * part.right.mT
    if not moment:
        return factor, factor
    masses = factor * scores.masked_fill(plan == 0, 0.0)  # not zero times infinity
    return factor + masses, masses
