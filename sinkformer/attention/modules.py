"""``nn.MultiheadAttention`` with transport attention inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sinkformer._numerics import under_autocast
from sinkformer.attention.functional import CAUSAL, attend, attention_plan, check_padded, sinkhorn_attention
from sinkformer.attention.masks import FORBIDDING
from sinkformer.attention.options import Marginals, Options
from sinkformer.attention.plans import AttentionPlan
from sinkformer.errors import ConfigError, DTypeError, ShapeError
from sinkformer.solvers import Gradient


class SinkhornAttention(nn.Module):
    """Multi-head transport attention, in the place of ``nn.MultiheadAttention``.

    Constructor, ``forward``, parameters with their names and initial values, shapes and the meaning of masks are those of
    ``nn.MultiheadAttention``, so weights load either way. The options after ``dtype`` are those of
    :func:`sinkformer.attention.sinkhorn_attention`. With ``marginals="queries"`` the two modules compute the same, except
    that a query which may attend to nothing gets zeros (before the output projection), not NaN.

    Queries and keys have equal weights, padding has none. ``key_padding_mask`` is also the padding of the queries where
    ``query is key``; otherwise say which queries are padding with ``query_padding_mask``, or they push mass onto keys.

    Args:
        embed_dim: size of a token; divisible by ``num_heads``.
        num_heads: number of heads.
        dropout: probability of dropping a weight in training. Stores the weights, n x m numbers a head.
        bias: biases in the projections.
        add_bias_kv, add_zero_attn: not supported; ``tau < 1`` lets keys be left out.
        kdim, vdim: sizes of key and value, if not ``embed_dim``.
        batch_first: ``(batch, n, embed_dim)`` instead of ``(n, batch, embed_dim)``.
        device, dtype: as for every torch module.
        num_key_value_heads: grouped heads: fewer heads of keys and values, each shared by as many of the queries. The
            projections are then ``q_proj_weight``, ``k_proj_weight`` and ``v_proj_weight``, the latter two smaller, and
            no weights of ``nn.MultiheadAttention`` fit.
        marginals, tau, iterations, tolerance, gradient: as for the function.

    Raises:
        ConfigError: sizes that do not divide each other, an option outside its range or not supported.
    """

    # nn.TransformerEncoderLayer and nn.TransformerEncoder ask for this, and then compute softmax attention on their own
    # from the parameters, without a call of this module.
    _qkv_same_embed_dim = False

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device=None,
        dtype=None,
        *,
        num_key_value_heads: int | None = None,
        marginals: Marginals = "both",
        tau: float | None = None,
        iterations: int | None = None,
        tolerance: float | None = None,
        gradient: Gradient | None = None,
    ):
        """Create the projections, drawing what ``nn.MultiheadAttention`` draws."""
        super().__init__()
        if min(embed_dim, num_heads) < 1 or embed_dim % num_heads:
            raise ConfigError(
                f"expected embed_dim divisible by num_heads, received embed_dim={embed_dim} and num_heads={num_heads}"
            )
        shared = num_heads if num_key_value_heads is None else num_key_value_heads
        if shared < 1 or num_heads % shared:
            raise ConfigError(
                f"expected num_heads divisible by num_key_value_heads, received num_heads={num_heads} and "
                f"num_key_value_heads={num_key_value_heads}"
            )
        if add_bias_kv or add_zero_attn:
            raise ConfigError(
                "expected add_bias_kv=False and add_zero_attn=False: an extra key would take a share of the mass as "
                "every key does; use tau < 1 where keys may be left out"
            )
        if not 0 <= dropout <= 1:
            raise ConfigError(f"expected dropout between 0 and 1, received {dropout}")
        Options.of(marginals, tau, iterations, tolerance, gradient)
        self.embed_dim, self.num_heads, self.num_key_value_heads = embed_dim, num_heads, shared
        self.kdim, self.vdim = embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim
        self.head_dim, self.dropout, self.batch_first = embed_dim // num_heads, dropout, batch_first
        self.marginals: Marginals = marginals
        self.gradient: Gradient | None = gradient
        self.tau, self.iterations, self.tolerance = tau, iterations, tolerance

        rows = shared * self.head_dim
        packed = self.kdim == self.vdim == embed_dim == rows
        shapes = {
            "in_proj_weight": (3 * embed_dim, embed_dim) if packed else None,
            "q_proj_weight": None if packed else (embed_dim, embed_dim),
            "k_proj_weight": None if packed else (rows, self.kdim),
            "v_proj_weight": None if packed else (rows, self.vdim),
            "in_proj_bias": (embed_dim + 2 * rows,) if bias else None,
        }
        for name, shape in shapes.items():
            empty = None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, empty)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        query_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend. Shapes are for ``batch_first=True``; without a batch axis they lack N.

        Args:
            query: ``(N, n, embed_dim)``.
            key: ``(N, m, kdim)``.
            value: ``(N, m, vdim)``.
            key_padding_mask: ``(N, m)``, bool, True for padding; or added to the scores. Where ``query is key``, also the
                padding of the queries.
            need_weights: return the weights too, which stores them. False is faster.
            attn_mask: ``(n, m)`` or ``(N * num_heads, n, m)``, bool, True where attending is **not** allowed; or added to
                the scores.
            average_attn_weights: weights averaged over heads.
            is_causal: a hint that ``attn_mask`` is causal, as ``nn.TransformerEncoder`` gives it.
            query_padding_mask: ``(N, n)``, bool, True for queries that are padding. They attend, without pushing mass.

        Returns:
            ``(N, n, embed_dim)`` and the weights, ``(N, n, m)`` or ``(N, num_heads, n, m)``, or None. As in torch, weights
            are those after dropout.

        Raises:
            ConfigError: a causal mask with hard marginals of both sides.
            DTypeError, ShapeError: arguments that do not fit together.
        """
        if value.shape[:-1] != key.shape[:-1] or value.shape[-1] != self.vdim:
            raise ShapeError(
                f"expected one value with {self.vdim} features for every key, received {tuple(value.shape)} and keys "
                f"{tuple(key.shape)}"
            )
        call = self._read(query, key, key_padding_mask, attn_mask, is_causal, query_padding_mask)
        q, k, v = (self._heads(t) for t in self._projected(query, key, value))
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            out, weights = attend(attention_plan(q, k, **call), v, dropout, need_weights=True)
        else:
            out, weights = sinkhorn_attention(q, k, v, dropout_p=dropout, **call), None
        out = self.out_proj(out.transpose(-3, -2).flatten(-2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if query.dim() == 2:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def plan(
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        query_padding_mask: Tensor | None = None,
    ) -> AttentionPlan:
        """The weights as a lazy matrix ``(N, num_heads, n, m)``, with marginal error and coverage of the keys.

        Arguments and errors are those of a call. Nothing is kept between calls.
        """
        call = self._read(query, key, key_padding_mask, attn_mask, is_causal, query_padding_mask)
        q, k, _ = self._projected(query, key, None)
        return attention_plan(self._heads(q), self._heads(k), **call)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all heads; keys for values if there are none."""
        sizes = [self.embed_dim] + [self.num_key_value_heads * self.head_dim] * 2
        if self.in_proj_weight is not None and query is key and key is value:
            q, k, v = functional.linear(query, self.in_proj_weight, self.in_proj_bias).split(sizes, -1)
            return q, k, v
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        wq, wk, wv = weights if self.in_proj_weight is None else self.in_proj_weight.split(sizes)
        bq, bk, bv = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
        assert wq is not None
        assert wk is not None
        assert wv is not None
        q, k = functional.linear(query, wq, bq), functional.linear(key, wk, bk)
        return q, k, k if value is None else functional.linear(value, wv, bv)

    def _heads(self, tokens: Tensor) -> Tensor:
        """Tokens ``(N, n, heads * head_dim)``, as they were given, to ``(N, heads, n, head_dim)``."""
        if tokens.dim() == 2:
            tokens = tokens.unsqueeze(0)
        elif not self.batch_first:
            tokens = tokens.transpose(0, 1)
        return tokens.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)

    def _read(
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        query_padding_mask: Tensor | None,
    ) -> dict[str, Any]:
        """The options of the function: masks in its meaning, padding of queries as weights."""
        check_padded("query", query)
        if query.dim() not in (2, 3) or key.dim() != query.dim():
            raise ShapeError(
                f"expected query and key both with or both without a batch axis, received {tuple(query.shape)} and "
                f"{tuple(key.shape)}"
            )
        widths = {"query": (query, self.embed_dim), "key": (key, self.kdim)}
        for name, (tokens, width) in widths.items():
            if tokens.shape[-1] != width:
                raise ShapeError(f"expected {name} with {width} features, received shape {tuple(tokens.shape)}")
        batch = 0 if self.batch_first else 1
        if query.dim() == 3 and query.shape[batch] != key.shape[batch]:
            raise ShapeError(
                f"expected query and key of one batch size, received {tuple(query.shape)} and {tuple(key.shape)}"
            )
        weight = self.out_proj.weight
        if query.dtype != weight.dtype and not under_autocast(query.device):
            raise DTypeError(
                f"expected a query of dtype {weight.dtype} as the parameters, received {query.dtype}; use .to()"
            )
        along = -2 if self.batch_first or query.dim() == 2 else 0
        n, m = query.shape[along], key.shape[along]
        count = 1 if query.dim() == 2 else query.shape[0 if self.batch_first else 1]
        if is_causal and attn_mask is None:
            raise ConfigError("expected attn_mask with is_causal=True, which is a hint about it, received None")
        if query_padding_mask is None and query is key:
            query_padding_mask = key_padding_mask
        options = Options.of(self.marginals, self.tau, self.iterations, self.tolerance, self.gradient)
        if is_causal and options.tau == 1:
            raise ConfigError(CAUSAL)
        mask = weights = None
        if key_padding_mask is not None:
            mask = _allowed("key_padding_mask", key_padding_mask, ((count, m), (m,))).reshape(count, 1, 1, m)
        if query_padding_mask is not None and options.tau > 0:
            present = _allowed("query_padding_mask", query_padding_mask, ((count, n), (n,)))
            present = present if present.dtype == torch.bool else present > FORBIDDING
            weights = present.to(query.dtype).reshape(count, 1, n)
        if attn_mask is not None:
            pairs = _allowed("attn_mask", attn_mask, ((n, m), (count * self.num_heads, n, m)))
            pairs = pairs.expand(1, 1, n, m) if pairs.dim() == 2 else pairs.unflatten(0, (count, self.num_heads))
            mask = pairs if mask is None else _both(pairs, mask, query.dtype)
        return {
            "attn_mask": mask,
            "enable_gqa": self.num_key_value_heads < self.num_heads,
            "query_weights": weights,
            "marginals": self.marginals,
            "tau": self.tau,
            "iterations": self.iterations,
            "tolerance": self.tolerance,
            "gradient": self.gradient,
        }

    @classmethod
    def from_torch(
        cls,
        attention: nn.MultiheadAttention,
        *,
        marginals: Marginals = "both",
        tau: float | None = None,
        iterations: int | None = None,
        tolerance: float | None = None,
        gradient: Gradient | None = None,
    ) -> SinkhornAttention:
        """A module with the very parameters of ``attention``, so that an optimiser that has them keeps them.

        Raises:
            ConfigError: ``attention`` has extra keys (``add_bias_kv``, ``add_zero_attn``), or an option is out of range.
        """
        module = cls(
            attention.embed_dim,
            attention.num_heads,
            attention.dropout,
            attention.in_proj_bias is not None,
            attention.bias_k is not None,
            attention.add_zero_attn,
            attention.kdim,
            attention.vdim,
            attention.batch_first,
            "meta",
            marginals=marginals,
            tau=tau,
            iterations=iterations,
            tolerance=tolerance,
            gradient=gradient,
        )
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "out_proj"):
            setattr(module, name, getattr(attention, name))
        return module.train(attention.training)

    def extra_repr(self) -> str:
        """Sizes, and the options that differ from the defaults."""
        options = {name: getattr(self, name) for name in ("tau", "iterations", "tolerance", "gradient")}
        chosen = "".join(f", {name}={x!r}" for name, x in options.items() if x is not None)
        grouped = (
            "" if self.num_key_value_heads == self.num_heads else f", num_key_value_heads={self.num_key_value_heads}"
        )
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}{grouped}, marginals={self.marginals!r}{chosen}"


def _allowed(name: str, mask: Tensor, shapes: tuple[tuple[int, ...], ...]) -> Tensor:
    """A mask in the meaning of the function, where True allows; torch's modules mean the opposite."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise DTypeError(f"expected {name} as bool (True forbids) or floating point, received {mask.dtype}")
    if tuple(mask.shape) not in shapes:
        raise ShapeError(f"expected {name} of shape {' or '.join(map(str, shapes))}, received {tuple(mask.shape)}")
    return ~mask if mask.dtype == torch.bool else mask


def _both(pairs: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """What two masks allow together."""
    if pairs.dtype == keys.dtype == torch.bool:
        return pairs & keys
    added = (
        t if t.is_floating_point() else t.new_zeros(t.shape, dtype=dtype).masked_fill(~t, -torch.inf)
        for t in (pairs, keys)
    )
    return next(added) + next(added)
