"""The systems of the benchmark, with the law of their pairs and all constants."""

from __future__ import annotations

from sinkformer.costs import SqEuclidean
from sinkformer.errors import ConfigError
from sinkformer.systems.base import System
from sinkformer.systems.entropic import EntropicTransport, Whitened
from sinkformer.systems.isometric import Monotone, Product
from sinkformer.systems.mixtures import ContextSwitch
from sinkformer.systems.sampling import PairSampler
from sinkformer.systems.teacher import RandomTeacher

_SYSTEMS = {
    "eot": EntropicTransport(SqEuclidean(), epsilon=0.1, dims=(2, 2)),
    "monotone": Monotone(),
    "whitened": Whitened(epsilon=0.1, ridge=0.05, dims=(2, 2)),
    "teacher": RandomTeacher(seed=0, dims=(2, 2), epsilon=0.1, logit_scale=4.0, layers=1),
    "switch": ContextSwitch(epsilon=0.1, sharpness=10.0, dims=(2, 2)),
    "product": Product(dims=(2, 2)),
}


def named(name: str) -> tuple[System, PairSampler]:
    r"""A system of the benchmark and the law of its pairs.

    ===========  ============================================================================  ====
    name         system                                                                        d
    ===========  ============================================================================  ====
    eot          entropic transport, \|x - y\|^2, epsilon 0.1                                    2
    monotone     increasing rearrangement                                                      1
    whitened     entropic transport of whitened points, ridge 0.05, epsilon 0.1                2
    teacher      random Sinkhorn Transformer, seed 0, one layer, logit scale 4, epsilon 0.1    2
    switch       along or against the diagonal, epsilon 0.1, sharpness 10                      2
    product      mu (x) nu                                                                     2
    ===========  ============================================================================  ====

    The law is the default of ``PairSampler``: clouds of 2 to 16 atoms in [-1, 1]^d around 1 to 3 centres, spread 0.1 to 0.6,
    mixed weights, no rare clouds. Training may see a heavier-tailed one: ``dataclasses.replace(sampler, rare=0.1)``.

    Raises:
        ConfigError: an unknown name.
    """
    if not isinstance(name, str) or name not in _SYSTEMS:
        raise ConfigError(f"expected a system of {', '.join(_SYSTEMS)}, received {name!r}")
    system = _SYSTEMS[name]
    return system, PairSampler(dims=system.dims)
