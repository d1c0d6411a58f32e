"""Coupling systems: continuous rules (mu, nu) -> coupling of mu and nu, which models approximate.

    system, sampler = named("whitened")
    mu, nu = sampler.pairs(64, generator=torch.Generator().manual_seed(0))
    target = system(mu, nu)                  # exact, float64, marginals to 1e-9
    system.modulus(0.01)                     # W1 of two targets whose measures are 0.01 apart is at most this

Continuous coupling systems are what Sinkhorn Transformers are dense among (Fraiman 2026, arXiv 2603.25860). Every system here
states its modulus of continuity, with a proof; ``ExactTransport`` and ``HardSwitch`` have none, and say so.
"""

from sinkformer.systems.base import System, every_pair
from sinkformer.systems.benchmark import named
from sinkformer.systems.discontinuous import ExactTransport, HardSwitch
from sinkformer.systems.entropic import EntropicSystem, EntropicTransport, Whitened
from sinkformer.systems.isometric import Monotone, Product
from sinkformer.systems.mixtures import ContextSwitch, Mixture
from sinkformer.systems.sampling import PairSampler
from sinkformer.systems.teacher import RandomTeacher

__all__ = [
    "ContextSwitch",
    "EntropicSystem",
    "EntropicTransport",
    "ExactTransport",
    "HardSwitch",
    "Mixture",
    "Monotone",
    "PairSampler",
    "Product",
    "RandomTeacher",
    "System",
    "Whitened",
    "every_pair",
    "named",
]
