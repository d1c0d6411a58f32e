"""What a model has to beat: fixed costs, and softmax heads with and without a view of the other measure.

The product coupling is ``systems.Product``. The softmax head is a ``SinkhornTransformer`` with ``head="softmax"``; its target
marginal is wrong, so compare it raw (``evaluate(..., rounded=False)``) and rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from sinkformer._typing import CostMatrix, Potential, Weights
from sinkformer.costs import Cost, Euclidean, NegativeDot, SqEuclidean
from sinkformer.couplings import Coupling, EntropicCoupling
from sinkformer.encoders import GatedMLP, MeasureAttention
from sinkformer.errors import ConfigError, DTypeError, ModelError
from sinkformer.evaluation.comparing import compare
from sinkformer.evaluation.sampled import check_law, check_whole, draw
from sinkformer.measures import Measure, check_compatible
from sinkformer.models import SinkhornTransformer, SinkhornTransformerConfig
from sinkformer.solutions import OnFailure
from sinkformer.systems import PairSampler, System

# Half decades; then, for every cost not this much worse than the best one, these powers of ten around its best epsilon.
_EPSILONS = tuple(10 ** (k / 2) for k in range(-8, 3))
_REFINEMENTS, _PROMISING = (0.25, 0.125), 2.0
_TOLERANCE, _MOST_ITERATIONS = 1e-9, 5000
# Random numbers of the choice, apart from those of an evaluation.
_CHOICE = 1
_WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True)
class FixedCost:
    """Entropic transport of a cost that is not learned; a predictor.

    Args:
        cost: of two points.
        epsilon: entropy, > 0.
        reflected: of (x, -y) instead.
    """

    cost: Cost
    epsilon: float
    reflected: bool = False

    @property
    def name(self) -> str:
        """Cost and epsilon."""
        return f"fixed cost {type(self.cost).__name__}(x, {'-' * self.reflected}y), epsilon {self.epsilon:.3g}"

    def __call__(self, mu: Measure, nu: Measure) -> EntropicCoupling:
        """The coupling, to a marginal error of 1e-9 where 5000 iterations reach it."""
        return Coupling.solve(
            mu,
            nu,
            cost=self.cost,
            features=(mu.points, -nu.points if self.reflected else nu.points),
            epsilon=self.epsilon,
            tolerance=_TOLERANCE,
            max_iterations=_MOST_ITERATIONS,
            on_failure="ignore",
        )


def best_fixed_cost(
    system: System,
    sampler: PairSampler,
    *,
    pairs: int = 40,
    seed: int = 0,
    epsilons: Iterable[float] = _EPSILONS,
) -> FixedCost:
    """The fixed cost of the least mean W1, chosen on pairs that no evaluation draws.

    Costs: |x - y|^2, |x - y| and |x + y|^2. The plans of -<x, y> are those of |x - y|^2 at twice its epsilon, the plans of <x, y>
    those of |x + y|^2, so that these are in it. The best epsilons are refined twice.

    Args:
        system: the targets.
        sampler: the law of the pairs, sizes included.
        pairs: to choose on, >= 1.
        seed: of the pairs, >= 0.
        epsilons: to try with every cost.

    Raises:
        DTypeError: no system or no sampler.
        ConfigError: a system between spaces of two dimensions, where no such cost is defined; an argument outside its range.
    """
    check_law(system, sampler)
    if system.dims[0] != system.dims[1]:
        raise ConfigError(f"expected a system of equal dims for a fixed cost, received {tuple(system.dims)}")
    tried = tuple(epsilons) if isinstance(epsilons, Iterable) else ()
    if not tried or not all(map(_is_epsilon, tried)):
        raise ConfigError(f"expected a sequence of positive, finite epsilons, at least one, received {epsilons!r}")
    check_whole(1, pairs=pairs)
    check_whole(0, seed=seed)
    mu, nu = draw(sampler, sampler.sizes, pairs, seed, _CHOICE)
    target = system(mu, nu)

    @torch.no_grad()
    def error(candidate: FixedCost) -> float:
        compared = compare(candidate(mu, nu), target, mu, nu, rounded=True, tol=0.01)
        return float(compared.distance.upper.mean())

    costs = ((SqEuclidean(), False), (Euclidean(), False), (SqEuclidean(), True))
    candidates = [FixedCost(cost, epsilon, reflected) for cost, reflected in costs for epsilon in tried]
    errors = {candidate: error(candidate) for candidate in candidates}
    for power in _REFINEMENTS:
        least = min(errors.values())
        for cost, reflected in costs:
            own = [c for c in errors if (c.cost, c.reflected) == (cost, reflected)]
            best = min(own, key=errors.__getitem__)
            if errors[best] <= _PROMISING * least:
                near = [replace(best, epsilon=best.epsilon * 10**sign) for sign in (-power, power)]
                errors |= {candidate: error(candidate) for candidate in near}
    return min(errors, key=errors.__getitem__)


def _is_epsilon(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < math.inf


class CrossSoftmax(SinkhornTransformer):
    """Softmax attention whose keys see the source measure: mu (x) softmax_y(<Q(mu, x), K(mu, nu, y)> / epsilon + log nu).

    A baseline, and no Sinkhorn Transformer: its target marginal is approximate, and what Sinkhorn's iteration computes, the
    potential g(mu, nu, y), it has to learn. K is the target encoder followed by blocks of attention from y to the atoms of mu,
    whose output is zero at initialisation. It is configured, trained, saved and loaded as a model with ``head="softmax"`` is.

    Args:
        config: the architecture, with ``head="softmax"``; ``width``, ``heads`` and ``depth`` are also those of the cross blocks.
        device, dtype: as for every torch module.

    Raises:
        ConfigError: another head.
    """

    def __init__(self, config: SinkhornTransformerConfig, *, device=None, dtype=None):
        """Create the encoders and the cross blocks."""
        super().__init__(config, device=device, dtype=dtype)
        if config.head != "softmax":
            raise ConfigError(f"expected head='softmax' for CrossSoftmax, received {config.head!r}")
        self.cross = _Cross(config.rank or config.width, config, device=device, dtype=dtype)

    def forward(
        self,
        mu: Measure,
        nu: Measure,
        *,
        mask: CostMatrix | None = None,
        init: tuple[Potential, Potential] | None = None,
        on_failure: OnFailure = "warn",
    ) -> EntropicCoupling:
        """A coupling whose source marginal is exact; see ``SinkhornTransformer.forward``."""
        check_compatible(mu, nu)
        q, k = self.source_encoder(mu).to(mu.dtype), self.target_encoder(nu)
        k = (k + self.cross(k, q, mu.weights)).to(nu.dtype)
        options: Any = {"mask": mask, "init": init, "on_failure": on_failure, "tau_b": 0.0}
        return Coupling.solve(mu, nu, cost=NegativeDot(), epsilon=self.epsilon, features=(q, k), **options)


class _Cross(nn.Module):
    """Blocks of attention from target features to source features, between two linear maps."""

    def __init__(self, rank: int, config: SinkhornTransformerConfig, *, device=None, dtype=None):
        super().__init__()
        options: Any = {"device": device, "dtype": dtype}
        width, depth = config.width, max(config.depth, 1)
        self.enter_source, self.enter_target = (
            nn.Sequential(nn.RMSNorm(rank, eps=1e-6, **options), nn.Linear(rank, width, **options)) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-3, **options) for _ in range(depth))
        self.attentions = nn.ModuleList(MeasureAttention(width, config.heads, **options) for _ in range(depth))
        self.mlps = nn.ModuleList(GatedMLP(width, **options) for _ in range(depth))
        self.leave = nn.Linear(width, rank, **options)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def forward(self, k: Tensor, q: Tensor, weights: Weights) -> Tensor:
        """What is added to features ``(*batch, m, r)`` in sight of ``(*batch, n, r)`` with weights ``(*batch, n)``."""
        atoms, tokens = self.enter_source(q), self.enter_target(k)
        atoms = atoms.masked_fill((weights == 0).unsqueeze(-1), 0.0)
        for norm, attention, mlp in zip(self.norms, self.attentions, self.mlps, strict=True):
            tokens = tokens + attention(norm(tokens), atoms, weights)
            tokens = tokens + mlp(norm(tokens), atoms, weights.unsqueeze(-2))
        return self.leave(tokens)


def load_predictor(folder: str | Path) -> SinkhornTransformer:
    """A ``SinkhornTransformer`` or a ``CrossSoftmax``, whichever was saved in a folder.

    Raises:
        DTypeError: no path.
        ModelError: nothing there, or a damaged file.
        ConfigError: a configuration that this release cannot read.
    """
    if not isinstance(folder, (str, Path)):
        raise DTypeError(f"expected the folder of a model, received {type(folder).__name__}")
    path = Path(folder) / _WEIGHTS_FILE
    crossed = False
    if path.is_file():
        try:
            with safe_open(path, framework="pt") as tensors:
                crossed = any(name.startswith("cross.") for name in tensors.keys())
        except SafetensorError as error:
            raise ModelError(f"expected a readable model in {folder}; a file is damaged: {error}") from error
    return (CrossSoftmax if crossed else SinkhornTransformer).from_pretrained(folder)
