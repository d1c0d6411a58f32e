"""From tables to encoders: training on the pairs."""

from __future__ import annotations

from dataclasses import replace

import torch

from sinkformer.approximation.factors import MOST_ITERATIONS, TOLERANCE
from sinkformer.approximation.pairs import Pairs
from sinkformer.models import SinkhornTransformer, SinkhornTransformerConfig
from sinkformer.training import Recipe, fit


def encoded(pairs: Pairs, rank: int, epsilon: float, width: int, steps: int, recipe: Recipe) -> SinkhornTransformer:
    """A Sinkhorn Transformer trained on the plans of the pairs, in float64.

    The encoders are fitted through the coupling and not to the tables: the same couplings belong to many tables (multiply G by
    an invertible matrix and H by its inverse, add functions of x or of y), of which encoders find one that suits them.
    """
    heads = next(k for k in (4, 2, 1) if width % k == 0)
    config = SinkhornTransformerConfig(
        dim=pairs.sources.d,
        target_dim=pairs.targets.d,
        width=width,
        heads=heads,
        rank=rank,
        epsilon=epsilon,
        moments=True,
        contextual_skip=True,
        tolerance=TOLERANCE,
        max_iterations=MOST_ITERATIONS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SinkhornTransformer(config)
    examples = [(mu, nu, plan) for mu, nu, plan in zip(pairs.mu, pairs.nu, pairs.plans, strict=True)]
    fit(model, examples, steps=steps, recipe=replace(recipe, batch=min(recipe.batch, len(examples))))
    return model.double().eval()
