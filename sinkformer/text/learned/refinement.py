"""What a separable score cannot say: layers over the matrix of pairs, which see neighbours and competitors.

They are no part of the Sinkhorn Transformer. The refinement adds a bias to the scores of the coupling layer, computed from the
scores themselves, a draft of the coupling, and the spelling and places of the words; the link head turns the final coupling into
the probability of a link, which need not be one to one: words of a phrase share their mass, and each of their links can be
certain.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Logarithms of shares enter the layers within this range, and times this factor.
_RANGE, _UNIT = 15.0, 0.2
# Of a link, before training: about the share of cells that are links.
_LOGIT = -3.0


class PairBlock(nn.Module):
    """Residual block over a matrix of word pairs: a 3 x 3 window, and the strongest pair of the row and of the column.

    Args:
        channels: of input and output.
    """

    def __init__(self, channels: int):
        """The identity, before training."""
        super().__init__()
        self.window = nn.Conv2d(channels, channels, 3, padding=1)
        self.lines = nn.Conv2d(2 * channels, channels, 1)
        self.out = nn.Conv2d(channels, channels, 3, padding=1)
        for p in self.out.parameters():
            nn.init.zeros_(p)

    def forward(self, x: Tensor, cells: Tensor) -> Tensor:
        """``(B, channels, n, m)`` to the same; ``cells`` ``(B, 1, n, m)`` is one for word pairs and zero for padding."""
        h = F.gelu(x)
        seen = h.masked_fill(cells == 0, -torch.inf)
        row, column = seen.amax(-1, keepdim=True), seen.amax(-2, keepdim=True)
        lines = torch.cat([row.expand_as(h), column.expand_as(h)], 1).masked_fill(cells == 0, 0.0)
        mixed = F.gelu(self.window(h) + self.lines(lines)) * cells
        return (x + self.out(mixed)) * cells


class Refinement(nn.Module):
    """Channels of word pairs to a state of every pair, and a bias of its score.

    Args:
        inputs: channels that come in.
        channels: of the state.
        blocks: number of ``PairBlock``.
    """

    def __init__(self, inputs: int, channels: int, blocks: int):
        """No bias, before training."""
        super().__init__()
        self.inward = nn.Conv2d(inputs, channels, 1)
        self.blocks = nn.ModuleList(PairBlock(channels) for _ in range(blocks))
        self.bias = nn.Conv2d(channels, 1, 1)
        for p in self.bias.parameters():
            nn.init.zeros_(p)

    def forward(self, x: Tensor, cells: Tensor) -> tuple[Tensor, Tensor]:
        """States ``(B, channels, n, m)`` and biases ``(B, n, m)``."""
        state = self.inward(x) * cells
        for block in self.blocks:
            state = block(state, cells)
        state = F.gelu(state)
        return state, self.bias(state).squeeze(1)


class LinkHead(nn.Module):
    """Logit of a link for every word pair, from the coupling and the states of the refinement.

    Args:
        states: channels of the refinement; 0 if there is none.
        channels: of its hidden layer.
    """

    MAPS = 6

    def __init__(self, states: int, channels: int):
        """Links are rare, before training."""
        super().__init__()
        self.point = nn.Conv2d(self.MAPS + states, channels, 1)
        self.window = nn.Conv2d(self.MAPS + states, channels, 3, padding=1)
        self.out = nn.Conv2d(channels, 1, 1)
        self.out.bias = nn.Parameter(torch.full((1,), _LOGIT))

    def forward(self, coupling: Tensor, states: Tensor | None, cells: Tensor) -> Tensor:
        """Logits ``(B, n, m)``.

        Args:
            coupling: see ``coupling_maps``.
            states: ``(B, channels, n, m)`` of the refinement, or None.
            cells: one for word pairs and zero for padding, ``(B, 1, n, m)``.
        """
        x = coupling if states is None else torch.cat([coupling, states], 1)
        return self.out(F.gelu(self.point(x)) + F.gelu(self.window(x))).squeeze(1)


def coupling_maps(scores: Tensor, shares: tuple[Tensor, Tensor, Tensor], cells: Tensor) -> Tensor:
    """A coupling as six channels, ``(B, 6, n, m)``: shares, also relative to row and column, lonely shares, scores.

    Args:
        scores: of the coupling, ``(B, n, m)``.
        shares: logarithms, see ``heads.log_shares``.
        cells: one for word pairs and zero for padding, ``(B, 1, n, m)``.
    """
    pairs, source, target = [t.clamp(-_RANGE, _RANGE) for t in shares]
    pairs = pairs.masked_fill(cells[:, 0] == 0, -_RANGE)
    maps = [
        pairs,
        pairs - pairs.amax(-1, keepdim=True),
        pairs - pairs.amax(-2, keepdim=True),
        source.unsqueeze(-1).expand_as(pairs),
        target.unsqueeze(-2).expand_as(pairs),
        scores.clamp(-_RANGE, _RANGE),
    ]
    return _UNIT * torch.stack(maps, 1) * cells
