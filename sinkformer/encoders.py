"""Measure-valued transformer encoders: in-context maps (mu, x) -> R^r.

Furuya, de Hoop, Peyre (arXiv 2408.01367): attention integrates over the measure instead of summing over tokens,

    Gamma(mu, x) = x + sum_h W^h  int V^h y exp(<Q^h x, K^h y> / sqrt k) dmu(y) / int exp(<Q^h x, K^h z> / sqrt k) dmu(z),

which for a weighted cloud is ordinary attention with log w_j added to the logits. Layers compose by pushing the measure
forward and keeping its weights, so every layer is defined at every x: a point off the support is a token of weight zero,
a *probe*. Everything else acts on one token, or on a weighted mean over the measure. No part counts tokens or depends on
their order; positions, if they matter, are coordinates of x.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from sinkformer._numerics import safe_divide, safe_log
from sinkformer._typing import Features, Points
from sinkformer.errors import ConfigError, ShapeError
from sinkformer.measures import Measure

# Token-wise norms divide by sqrt(mean square + this), which keeps them continuous at zero (law I5).
_NORM_EPSILON = 1e-3


class MeasureAttention(nn.Module):
    """Multi-head attention of tokens ``(*batch, q, width)`` to the atoms of a measure, log-weights on the logits.

    Args:
        width: size of a token; divisible by ``heads``.
        heads: number of heads.
        device, dtype: as for every torch module.

    Raises:
        ConfigError: ``width`` not divisible by ``heads``.
    """

    def __init__(self, width: int, heads: int, *, device=None, dtype=None):
        """Create the four projections."""
        super().__init__()
        if heads < 1 or width % heads:
            raise ConfigError(f"expected width divisible by heads, received width={width} and heads={heads}")
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False, device=device, dtype=dtype)
        self.key = nn.Linear(width, width, bias=False, device=device, dtype=dtype)
        self.value = nn.Linear(width, width, bias=False, device=device, dtype=dtype)
        self.out = nn.Linear(width, width, bias=False, device=device, dtype=dtype)

    def forward(self, tokens: Tensor, atoms: Tensor, weights: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            tokens: where to evaluate, ``(*batch, q, width)``.
            atoms: the atoms, ``(*batch, n, width)``.
            weights: their weights, ``(*batch, n)``.
            allowed: which atoms a token may see, bool ``(*batch, q, n)``; all if None. A token that may see no mass
                receives zero.

        Returns:
            ``(*batch, q, width)``.
        """

        def split(t: Tensor) -> Tensor:
            return t.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

        # Atoms of weight zero are silenced before the product: zero times infinity would reach everyone.
        dead = (weights == 0).unsqueeze(-1)
        keys, values = self.key(atoms).masked_fill(dead, 0.0), self.value(atoms).masked_fill(dead, 0.0)
        queries = self.query(tokens)
        bias = safe_log(weights).unsqueeze(-2).expand(*weights.shape[:-1], tokens.shape[-2], -1)
        blind = None
        if allowed is not None:
            bias = bias.masked_fill(~allowed, -torch.inf)
            blind = torch.isinf(bias).all(-1, keepdim=True)
            bias = bias.masked_fill(blind, 0.0)
        bias = bias.unsqueeze(-3).to(queries.dtype)
        mixed = functional.scaled_dot_product_attention(split(queries), split(keys), split(values), attn_mask=bias)
        mixed = self.out(mixed.transpose(-3, -2).flatten(-2))
        return mixed if blind is None else mixed.masked_fill(blind, 0.0)

    def extra_repr(self) -> str:
        """Number of heads."""
        return f"heads={self.heads}"


class GatedMLP(nn.Module):
    """Token-wise gated MLP, W_o (u * silu(g)), whose gate and input see a pooled context of the measure.

    u = W_u z + C_u c and g = W_g z + C_g c with c = silu(int P y dmu(y)); ``context=False`` leaves c out.
    """

    def __init__(self, width: int, *, context: bool = True, device=None, dtype=None):
        """Create the projections; the hidden size is twice the width."""
        super().__init__()
        self.up = nn.Linear(width, 4 * width, device=device, dtype=dtype)
        self.down = nn.Linear(2 * width, width, device=device, dtype=dtype)
        self.pool = nn.Linear(width, width, bias=False, device=device, dtype=dtype) if context else None
        self.from_context = nn.Linear(width, 4 * width, bias=False, device=device, dtype=dtype) if context else None

    def forward(self, tokens: Tensor, atoms: Tensor, averaging: Tensor) -> Tensor:
        """Apply to every token; ``averaging`` ``(*batch, q or 1, n)`` holds the weights each token averages the atoms with."""
        hidden = self.up(tokens)
        if self.pool is not None and self.from_context is not None:
            pooled = averaging.to(atoms.dtype) @ self.pool(atoms).to(atoms.dtype)
            hidden = hidden + self.from_context(functional.silu(pooled))
        value, gate = hidden.chunk(2, -1)
        return self.down(value * functional.silu(gate))


class Block(nn.Module):
    """Pre-norm transformer block on a measure: attention, then a gated MLP, each added to its input."""

    def __init__(self, width: int, heads: int, *, context: bool = True, device=None, dtype=None):
        """Create norms, attention and MLP."""
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=_NORM_EPSILON, device=device, dtype=dtype)
        self.attention = MeasureAttention(width, heads, device=device, dtype=dtype)
        self.mlp_norm = nn.RMSNorm(width, eps=_NORM_EPSILON, device=device, dtype=dtype)
        self.mlp = GatedMLP(width, context=context, device=device, dtype=dtype)

    def forward(self, tokens: Tensor, weights: Tensor, averaging: Tensor, allowed: Tensor | None) -> Tensor:
        """Tokens ``(*batch, n + probes, width)``, of which the first n are the atoms with ``weights`` ``(*batch, n)``."""
        n = weights.shape[-1]
        normed = self.attention_norm(tokens)
        tokens = tokens + self.attention(normed, normed[..., :n, :], weights, allowed)
        normed = self.mlp_norm(tokens)
        atoms = normed[..., :n, :].masked_fill((weights == 0).unsqueeze(-1), 0.0)
        return tokens + self.mlp(normed, atoms, averaging)


class Moments(NamedTuple):
    """First two moments of a measure, as each token sees it: ``(*batch, q or 1, ...)``.

    Attributes:
        mean: m = int x dmu, of size d.
        summary: m and the upper triangle of int (x - m)(x - m)^T dmu, of size d + d (d + 1) / 2.
    """

    mean: Tensor
    summary: Tensor

    @classmethod
    def of(cls, points: Points, averaging: Tensor) -> Moments:
        """Moments of atoms ``(*batch, n, d)`` under the weights ``averaging`` ``(*batch, q or 1, n)``."""
        mean = averaging @ points
        centred = points.unsqueeze(-3) - mean.unsqueeze(-2)
        rows, columns = torch.triu_indices(points.shape[-1], points.shape[-1], device=points.device)
        products = centred[..., rows] * centred[..., columns]
        return cls(mean, torch.cat([mean, (averaging.unsqueeze(-1) * products).sum(-2)], -1))

    @staticmethod
    def size(dim: int) -> int:
        """Length of a summary."""
        return dim + dim * (dim + 1) // 2


class Encoder(nn.Module):
    """In-context map (mu, x) -> R^rank: input MLP, blocks, final norm, linear output plus a linear skip from x.

    Obeys the laws of ``sinkformer.testing``: permutation, padding, splitting, evaluation off the support, continuity.

    The three options after ``context`` read a summary c of the measure, an MLP of the mean token (and of the moments):

    * ``moments``: with m the mean and p = (m, covariance) of mu, tokens enter as (x, x - m, p).
    * ``contextual_skip``: the skip is (A + A(c)) (x - m) instead of A x, a matrix that depends on the measure.
    * ``tensor=(H, r_c)``: the output is b_1 (x) a_1 + ... + b_H (x) a_H (a direct sum of tensor products), with
      coefficients b_h(mu) in R^{r_c} read off c, and features a_h(mu, x) in R^{rank / (H r_c)} read off the token. The inner
      product of two such outputs is sum_h <b_h, b'_h> <a_h, a'_h>: it has rank ``rank``, at the cost of computing
      ``rank / r_c`` features for each point.

    Args:
        dim: coordinates of a point.
        rank: size of the output; divisible by H r_c.
        width: size of a token.
        heads: attention heads; divide ``width``.
        depth: number of blocks.
        causal: space-time variant (arXiv 2408.01367, Theorem 2): the last coordinate of a point is its time, and a token
            at time t sees the atoms at times s <= t only; equal times see each other.
        context: give the MLPs a pooled context.
        moments: give the tokens mean and covariance of the measure. They are d + d (d + 1) / 2 numbers: for small ``dim``.
        contextual_skip: let the matrix of the skip depend on the measure.
        tensor: ``(H, r_c)`` for tensor-product features; None for plain ones.
        scale: order of magnitude of an output coordinate at initialisation.
        device, dtype: as for every torch module.

    Raises:
        ConfigError: sizes that are not positive, or do not divide each other.
    """

    def __init__(
        self,
        dim: int,
        rank: int,
        *,
        width: int = 64,
        heads: int = 4,
        depth: int = 2,
        causal: bool = False,
        context: bool = True,
        moments: bool = False,
        contextual_skip: bool = False,
        tensor: tuple[int, int] | None = None,
        scale: float = 1.0,
        device=None,
        dtype=None,
    ):
        """Create the layers."""
        super().__init__()
        if min(dim, rank, width) < 1 or depth < 0:
            raise ConfigError(
                f"expected dim, rank, width >= 1 and depth >= 0, received dim={dim}, rank={rank}, width={width}, depth={depth}"
            )
        if tensor is not None and (min(tensor) < 1 or rank % (tensor[0] * tensor[1])):
            raise ConfigError(
                f"expected tensor=(heads, coefficients) whose product divides the rank, received {tensor} and rank={rank}"
            )
        self.dim, self.rank, self.causal, self.tensor = dim, rank, causal, tensor
        own = rank if tensor is None else rank // tensor[1]
        summary = Moments.size(dim) if moments else 0
        self.enter = nn.Sequential(
            nn.Linear(2 * dim + summary if moments else dim, width, device=device, dtype=dtype),
            nn.GELU(),
            nn.Linear(width, width, device=device, dtype=dtype),
        )
        self.blocks = nn.ModuleList(
            Block(width, heads, context=context, device=device, dtype=dtype) for _ in range(depth)
        )
        self.norm = nn.RMSNorm(width, eps=_NORM_EPSILON, device=device, dtype=dtype)
        self.leave = nn.Linear(width, own, device=device, dtype=dtype)
        self.skip = nn.Linear(dim, own, bias=False, device=device, dtype=dtype)
        nn.init.normal_(self.leave.weight, std=scale / width**0.5)
        nn.init.zeros_(self.leave.bias)
        nn.init.normal_(self.skip.weight, std=scale / dim**0.5)
        self.moments = moments
        self.summary = self.skip_shift = self.coefficients = None
        if contextual_skip or tensor is not None:
            self.summary = nn.Linear(width + summary, width, device=device, dtype=dtype)
        if contextual_skip:
            self.skip_shift = nn.Linear(width, dim * own, device=device, dtype=dtype)
            nn.init.normal_(self.skip_shift.weight, std=scale / (dim * width) ** 0.5)
            nn.init.zeros_(self.skip_shift.bias)
        if tensor is not None:
            self.coefficients = nn.Linear(width, tensor[0] * tensor[1], device=device, dtype=dtype)
            nn.init.normal_(self.coefficients.weight, std=(width * tensor[1]) ** -0.5)
            # Every other head starts with the constant coefficients (1, 0, ...): a plain feature.
            with torch.no_grad():
                self.coefficients.bias.zero_()[:: 2 * tensor[1]] = 1.0

    def forward(self, mu: Measure, at: Points | None = None) -> Features:
        """Evaluate the in-context map.

        Args:
            mu: the measure, ``(*batch, n)`` atoms in ``dim`` coordinates.
            at: points to evaluate at, ``(*batch, k, dim)``; the atoms of ``mu`` by default.

        Returns:
            ``(*batch, n, rank)``, or ``(*batch, k, rank)``.

        Raises:
            ShapeError: points of another dimension or batch shape.
        """
        features, coefficients = self.factors(mu, at)
        if coefficients is None:
            return features
        heads = coefficients.shape[-2]
        return (coefficients.unsqueeze(-1) * features.unflatten(-1, (heads, 1, -1))).flatten(-3)

    def factors(self, mu: Measure, at: Points | None = None) -> tuple[Features, Tensor | None]:
        """The features before they are multiplied with the coefficients of the measure, for ``tensor=(H, r_c)``.

        The inner product of two features of rank r is a sum over heads: the inner product of the factors, of rank r / r_c in
        all, times that of the coefficients. It takes r_c times less work.

        Args:
            mu: as for a call.
            at: as for a call.

        Returns:
            ``(features, coefficients)``, of shapes ``(*batch, n, rank / r_c)`` and ``(*batch, 1, H, r_c)``, the latter
            ``(*batch, n, H, r_c)`` if causal; without ``tensor`` the features themselves, and None.

        Raises:
            ShapeError: points of another dimension or batch shape.
        """
        if mu.d != self.dim:
            raise ShapeError(f"expected points with {self.dim} coordinates, received {mu.d}; see the encoder's dim")
        if at is not None and (at.shape[-1] != self.dim or at.shape[:-2] != mu.batch_shape):
            raise ShapeError(f"expected probes of shape {(*mu.batch_shape, 'k', self.dim)}, received {tuple(at.shape)}")
        points = mu.points if at is None else torch.cat([mu.points, at], -2)
        allowed, averaging = None, mu.weights.unsqueeze(-2)
        if self.causal:
            allowed = mu.points[..., -1].unsqueeze(-2) <= points[..., -1].unsqueeze(-1)
            seen = averaging * allowed
            averaging = safe_divide(seen, seen.sum(-1, keepdim=True))
        moments = Moments.of(mu.points, averaging) if self.moments or self.skip_shift is not None else None
        inputs = points
        if self.moments and moments is not None:
            everyone = moments.summary.expand(*points.shape[:-1], -1)
            inputs = torch.cat([points, points - moments.mean, everyone], -1)
        # The sum of residuals keeps the precision of the points under autocast.
        tokens = self.enter(inputs).to(points.dtype)
        for block in self.blocks:
            tokens = block(tokens, mu.weights, averaging, allowed)
        features, coefficients = self._features(self.norm(tokens), points, mu.weights, averaging, moments)
        if at is None:
            return features, coefficients
        if coefficients is not None and self.causal:
            coefficients = coefficients[..., mu.n :, :, :]
        return features[..., mu.n :, :], coefficients

    def _features(
        self, tokens: Tensor, points: Points, weights: Tensor, averaging: Tensor, moments: Moments | None
    ) -> tuple[Features, Tensor | None]:
        """What is read off the final tokens ``(*batch, q, width)`` of ``points``, the first n of which are the atoms."""
        if self.summary is None:
            return self.leave(tokens) + self.skip(points), None
        atoms = tokens[..., : weights.shape[-1], :].masked_fill((weights == 0).unsqueeze(-1), 0.0)
        pooled = averaging.to(atoms.dtype) @ atoms
        if self.moments and moments is not None:
            pooled = torch.cat([pooled, moments.summary.to(pooled.dtype)], -1)
        summary = functional.gelu(self.summary(pooled))
        if self.skip_shift is None or moments is None:
            features = self.leave(tokens) + self.skip(points)
        else:
            centred = points - moments.mean
            shift = self.skip_shift(summary).unflatten(-1, (self.dim, -1))
            shifted = (
                (centred.unsqueeze(-2).to(shift.dtype) @ shift).squeeze(-2)
                if self.causal
                else centred.to(shift.dtype) @ shift.squeeze(-3)
            )
            features = self.leave(tokens) + self.skip(centred) + shifted
        if self.tensor is None or self.coefficients is None:
            return features, None
        return features, self.coefficients(summary).unflatten(-1, (self.tensor[0], -1))

    def extra_repr(self) -> str:
        """Sizes."""
        tensor = "" if self.tensor is None else f", tensor={self.tensor}"
        return f"dim={self.dim}, rank={self.rank}, causal={self.causal}{tensor}"
