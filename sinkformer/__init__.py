"""sinkformer: couplings between two measures, learned, differentiable, with exact marginals.

``import sinkformer as sf``. Texts live in ``sinkformer.text``, the command line in ``sinkformer.cli``.
"""

import importlib
from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from sinkformer import costs as costs
from sinkformer import errors as errors
from sinkformer.costs import Cost as Cost
from sinkformer.costs import Euclidean as Euclidean
from sinkformer.costs import Matrix as Matrix
from sinkformer.costs import NegativeDot as NegativeDot
from sinkformer.costs import SqEuclidean as SqEuclidean
from sinkformer.couplings import Coupling as Coupling
from sinkformer.encoders import Encoder as Encoder
from sinkformer.measures import Measure as Measure
from sinkformer.ops.cpu import warm_up as warm_up
from sinkformer.ops.dispatch import explain as explain
from sinkformer.ops.dispatch import use_backend as use_backend
from sinkformer.solutions import Solution as Solution
from sinkformer.solutions import Status as Status
from sinkformer.solvers import sinkhorn as sinkhorn
from sinkformer.streamed.ranks import Shard as Shard

if TYPE_CHECKING:
    from sinkformer import approximation as approximation
    from sinkformer import attention as attention
    from sinkformer import evaluation as evaluation
    from sinkformer import interpolation as interpolation
    from sinkformer import losses as losses
    from sinkformer import metrics as metrics
    from sinkformer import plots as plots
    from sinkformer import systems as systems
    from sinkformer import testing as testing
    from sinkformer import text as text
    from sinkformer import training as training
    from sinkformer.attention import SinkhornAttention as SinkhornAttention
    from sinkformer.metrics import W1Result as W1Result
    from sinkformer.metrics import w1 as w1
    from sinkformer.models import SinkhornTransformer as SinkhornTransformer
    from sinkformer.models import SinkhornTransformerConfig as SinkhornTransformerConfig

__version__ = _version("sinkformer")

# Loaded when first asked for: they bring heavier imports.
_ROOMS = (
    "approximation",
    "attention",
    "evaluation",
    "interpolation",
    "losses",
    "metrics",
    "plots",
    "systems",
    "testing",
    "text",
    "training",
)
_NAMES = {
    "SinkhornAttention": "attention",
    "SinkhornTransformer": "models",
    "SinkhornTransformerConfig": "models",
    "W1Result": "metrics",
    "w1": "metrics",
}


def __getattr__(name: str):
    if name in _ROOMS:
        return importlib.import_module(f"sinkformer.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(f"sinkformer.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'sinkformer' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_ROOMS, *_NAMES])
