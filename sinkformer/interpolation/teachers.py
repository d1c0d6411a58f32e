"""Data that one block interpolates: the experiment with a Tikhonov penalty (arXiv 2502.02270)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sinkformer.errors import ConfigError
from sinkformer.interpolation.blocks import Kind
from sinkformer.interpolation.layers import Attention, Block, TokenTransformer
from sinkformer.measures import Measure


@dataclass(frozen=True)
class Teacher:
    """Data that one block interpolates, and that block.

    Attributes:
        sources: X_j, ``(N,)`` sequences of n tokens.
        targets: Y_j, ``(N,)``.
        model: theta*, the block that made the targets.
    """

    sources: Measure
    targets: Measure
    model: TokenTransformer


def teacher(
    count: int = 10,
    n: int = 100,
    dim: int = 16,
    *,
    pooled: bool = True,
    width: int = 4,
    kind: Kind = "softmax",
    tau: float = 1.0,
    dense: bool = False,
    generator: torch.Generator | None = None,
) -> Teacher:
    """Standard normal sequences, and the images of a random block as targets; the default sizes are those of the paper.

    One target for each sequence (m = 1) needs a block that sends all tokens to one point: its attention has A = 0 and rho = 0,
    so that y_j = V mean(FF(x)) over the sequence. How the authors drew their block is not known to us.

    Args:
        count: number N of sequences.
        n: tokens of each.
        dim: coordinates of a token.
        pooled: m = 1, as described; otherwise m = n, and every parameter of the block is random.
        width: neurons of the block.
        kind: of its attention.
        tau: temperature of the softmax.
        dense: matrices V and A, instead of beta I and alpha I + p q^T.
        generator: of the random numbers, on the CPU; the global one if None.

    Raises:
        ConfigError: sizes that are not positive, or an option outside its range.
    """
    model = TokenTransformer.random(dim, 1, width, kind, tau, generator, dense=dense)
    for name, value in (("count", count), ("n", n)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"expected {name} as a whole number >= 1, received {value!r}; give an int")
    sources = Measure.uniform(torch.randn(count, n, dim, generator=generator, dtype=torch.float64))
    if pooled:
        _pool(model)
    with torch.no_grad():
        images = model(sources)
    targets = Measure.uniform(images.points[:, :1]) if pooled else images
    return Teacher(sources, targets, model)


def _pool(model: TokenTransformer) -> None:
    """Let the attention of every block take the mean: rho = 0 and A = 0."""
    for block in model.blocks:
        assert isinstance(block, Block)
        attention: Attention = block.attention
        with torch.no_grad():
            for t in (attention.rho, attention.alpha, attention.p, attention.q, attention.matrix):
                if t is not None:
                    t.zero_()
