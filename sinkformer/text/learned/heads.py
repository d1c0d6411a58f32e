"""The pure model: queries and keys of words, a price for staying alone, and the coupling they give.

A word is a point in the space of its hidden states; what makes it depend on the rest of its text is the language model that
computed them. Queries of one text and keys of the other give the score of a pair, the cost of the coupling is minus the score:
c = -<Q(mu, x), K(nu, y)> (Fraiman 2026, arXiv 2603.25860).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sinkformer.couplings import Coupling, EntropicCoupling

# Score of equal directions, summed over heads, and score of staying alone, before training.
_SCALE = 10.0
_PRICE = 4.0


class WordHeads(nn.Module):
    """Queries and keys of words, and the score of a word that stays alone.

    Every hidden state is normalised by itself, the layers are put side by side and mapped linearly. A head contributes its
    scale times the cosine of query and key, so the features of rank ``width`` are sqrt(scale_h) q_h / |q_h|.

    Args:
        layers: number of hidden states of a word.
        size: coordinates of a hidden state.
        width: rank of the features; a multiple of ``heads``.
        heads: number of cosines.
        dropout: on the normalised states, in training.
    """

    def __init__(self, layers: int, size: int, width: int, heads: int, dropout: float):
        """Keys start as queries, so that before training like words belong together."""
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(dropout)
        self.query = nn.Linear(layers * size, width, bias=False)
        self.key = nn.Linear(layers * size, width, bias=False)
        self.log_scale = nn.Parameter(torch.full((heads,), math.log(_SCALE / heads)))
        self.alone = nn.ModuleList([_price(layers * size), _price(layers * size)])
        nn.init.orthogonal_(self.query.weight)
        self.key.load_state_dict(self.query.state_dict())

    def forward(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Features, ``(B, n, width)`` and ``(B, m, width)``, and scores of staying alone, ``(B, n)`` and ``(B, m)``.

        Args:
            source: hidden states ``(B, n, layers, size)``.
            target: ``(B, m, layers, size)``.
        """
        x, y = [self.dropout(F.layer_norm(t, t.shape[-1:]).flatten(-2)) for t in (source, target)]
        alone = [line(t).squeeze(-1) for line, t in zip(self.alone, (x, y), strict=True)]
        return self._features(self.query(x)), self._features(self.key(y)), alone[0], alone[1]

    def _features(self, x: Tensor) -> Tensor:
        directions = F.normalize(x.unflatten(-1, (self.heads, -1)), dim=-1)
        return ((0.5 * self.log_scale).exp().unsqueeze(-1) * directions).flatten(-2)

    def by_heads(self, q: Tensor, k: Tensor) -> Tensor:
        """<Q, K> head by head, ``(B, heads, n, m)``; their sum is the score."""
        q, k = [t.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for t in (q, k)]
        return q @ k.mT


def _price(size: int) -> nn.Linear:
    line = nn.Linear(size, 1)
    nn.init.zeros_(line.weight)
    nn.init.constant_(line.bias, _PRICE)
    return line


def costs_with_nulls(scores: Tensor, alone: tuple[Tensor, Tensor], sizes: tuple[Tensor, Tensor]) -> Tensor:
    """Costs of words and null atoms, ``(B, n + 1, m + 1)``: minus the scores.

    Null to null costs -log min(n, m). The mass between the null atoms is that between the words; with this cost the odds of a
    word to stay alone do not depend on the lengths of the texts, and the coupling can be learned by its exact Fenchel-Young loss.

    Args:
        scores: ``(B, n, m)``.
        alone: scores of words that stay alone, ``(B, n)`` and ``(B, m)``.
        sizes: numbers of words, ``(B)`` each.
    """
    corner = torch.minimum(*sizes).clamp(min=1).to(scores).log().unsqueeze(-1)
    below = torch.cat([alone[1], corner], -1).unsqueeze(-2)
    return -torch.cat([torch.cat([scores, alone[0].unsqueeze(-1)], -1), below], -2)


def couple_with_nulls(
    scores: Tensor, alone: tuple[Tensor, Tensor], present: tuple[Tensor, Tensor], tolerance: float
) -> EntropicCoupling:
    """Coupling of texts with null atoms, for entropy of strength one.

    With n source and m target words a word weighs 1/(n + m), the null atom of the source m/(n + m), that of the target
    n/(n + m). The costs are those of ``costs_with_nulls``.

    Args:
        scores: ``(B, n, m)``.
        alone: scores of words that stay alone, ``(B, n)`` and ``(B, m)``.
        present: one for words and zero for padding, ``(B, n)`` and ``(B, m)``.
        tolerance: L1 marginal error, of a total mass of one.

    Returns:
        The coupling ``(B, n + 1, m + 1)``, differentiable in all scores (implicitly).
    """
    a, b = present
    n, m = a.sum(-1), b.sum(-1)
    total = (n + m).unsqueeze(-1)
    mu = torch.cat([a, m.unsqueeze(-1)], -1) / total
    nu = torch.cat([b, n.unsqueeze(-1)], -1) / total
    # Padding has weight zero; its scores are those of whatever the layers make of zeros.
    costs = costs_with_nulls(scores, alone, (n, m))
    return Coupling.solve(mu, nu, cost=costs, epsilon=1.0, tolerance=tolerance, on_failure="ignore")


def log_shares(coupling: EntropicCoupling, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logarithms of the fractions of a word's mass: ``(B, n, m)`` between words, ``(B, n)`` and ``(B, m)`` alone.

    Args:
        coupling: see ``couple_with_nulls``.
        words: n + m of every pair, ``(B)``.

    Returns:
        The logarithms; of padding -inf.
    """
    a, b, solution = coupling.source.weights, coupling.target.weights, coupling.solution
    density = solution.f.unsqueeze(-1) + solution.g.unsqueeze(-2) - coupling.cost_rows(0, a.shape[-1])
    # Potentials of float32 problems can be float64.
    out = density.to(a.dtype) + a.log().unsqueeze(-1) + b.log().unsqueeze(-2) + words.log()[:, None, None]
    return out[:, :-1, :-1], out[:, :-1, -1], out[:, -1, :-1]
