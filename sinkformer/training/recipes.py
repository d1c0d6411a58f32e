"""How to train, and what happened."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import Any, Literal, TypeAlias

from torch import Tensor

from sinkformer.couplings import EntropicCoupling
from sinkformer.errors import ConfigError

Loss: TypeAlias = Callable[[EntropicCoupling, Tensor], Tensor]

# Larger steps leave the range of any weight that trains.
_LARGEST_RATE = 100.0
# That of a model's own.
_LARGEST_LOG_SCALE = 50.0


@dataclass(frozen=True)
class Recipe:
    """How to train: what decides on the result besides model, data, budget and seed.

    Attributes:
        loss: ``"fenchel_young"``, or a function ``(coupling, target (B, n, m)) -> (B)`` such as those of ``losses``. The
            targets of a system that needs a solver have a marginal error of 1e-7.
        groups, sources, targets: a block of fresh data has ``groups`` times ``sources`` by ``targets`` pairs.
        batch: pairs of a step, for a sequence of examples.
        optimizer: ``"muon"`` for the matrices of blocks and summaries with AdamW for the rest; ``"adamw"`` for all.
        rate: learning rate of AdamW, which does not decay weights; up to 100.
        matrix_rate, matrix_decay: learning rate, up to 100, and decoupled weight decay of Muon.
        warmup: share of the budget in which learning rates rise from zero; then they fall to zero by a cosine.
        clip: largest norm of the gradient.
        average: decay of the exponential moving average of the weights (bias-corrected), which is what comes out. Its memory,
            1 / (1 - average) steps, must be short beside the budget: older weights are worse.
        gauge: penalty on the means of rows and columns of the logits, which change no coupling.
        log_scale: the model's ``log_scale`` at the start, from which training goes linearly to the configured one in the
            share ``annealed`` of the budget; between -50 and 50. None keeps it where it is.
        annealed: see ``log_scale``.
        tolerance: L1 marginal error at which the solver within the loss "fenchel_young" stops.
        max_iterations: most sweeps and Newton steps it makes.
        bfloat16: autocast of the encoders; logits and solver keep their precision.

    Raises:
        ConfigError: a value outside its range.
    """

    loss: Literal["fenchel_young"] | Loss = "fenchel_young"
    groups: int = 4
    sources: int = 8
    targets: int = 8
    batch: int = 64
    optimizer: Literal["muon", "adamw"] = "muon"
    rate: float = 3e-3
    matrix_rate: float = 2e-2
    matrix_decay: float = 0.1
    warmup: float = 0.03
    clip: float = 1.0
    average: float = 0.98
    gauge: float = 1e-4
    log_scale: float | None = None
    annealed: float = 0.7
    tolerance: float = 1e-6
    max_iterations: int = 1000
    bfloat16: bool = False

    def __post_init__(self):
        """Check the ranges."""
        if not (self.loss == "fenchel_young" or callable(self.loss)):
            raise ConfigError(f"expected loss 'fenchel_young' or a function, received {self.loss!r}")
        if self.optimizer not in ("muon", "adamw"):
            raise ConfigError(f"expected optimizer 'muon' or 'adamw', received {self.optimizer!r}")
        for name in ("groups", "sources", "targets", "batch", "max_iterations"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"expected {name} as a whole number >= 1, received {value!r}")
        for name in ("rate", "matrix_rate", "matrix_decay", "gauge", "tolerance"):
            if not (is_number(value := getattr(self, name)) and 0 <= value < math.inf):
                raise ConfigError(f"expected {name} >= 0 and finite, received {value!r}")
        for name in ("rate", "matrix_rate"):
            if getattr(self, name) > _LARGEST_RATE:
                raise ConfigError(f"expected {name} up to {_LARGEST_RATE:g}, received {getattr(self, name)}")
        for name in ("warmup", "average", "annealed"):
            if not (is_number(value := getattr(self, name)) and 0 <= value < 1):
                raise ConfigError(f"expected {name} from 0 to below 1, received {value!r}")
        if not (is_number(self.clip) and self.clip > 0):
            raise ConfigError(f"expected clip > 0, received {self.clip!r}")
        if self.log_scale is not None and not (is_number(self.log_scale) and abs(self.log_scale) <= _LARGEST_LOG_SCALE):
            raise ConfigError(
                f"expected log_scale from -{_LARGEST_LOG_SCALE:g} to {_LARGEST_LOG_SCALE:g}, or None, "
                f"received {self.log_scale!r}"
            )
        if not isinstance(self.bfloat16, bool):
            raise ConfigError(f"expected bfloat16 as True or False, received {self.bfloat16!r}")

    def described(self) -> dict[str, Any]:
        """The attributes as JSON has them; a loss by its name."""
        named = "fenchel_young" if self.loss == "fenchel_young" else getattr(self.loss, "__qualname__", repr(self.loss))
        return asdict(replace(self, loss="fenchel_young")) | {"loss": named}


def is_number(value: Any) -> bool:
    """Whether a value is a real number and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass
class History:
    """What happened.

    Attributes:
        records: one dictionary for every recorded step: ``step`` (steps done), ``seconds`` (of the processor), ``rate`` (of
            AdamW), ``loss`` (mean over the steps since the last record); ``validation`` where it was measured.
        steps: steps done.
        seconds: processor time that this process spent in training, validations and checkpoints included.
        best: smallest validation loss, or None.
        stopped: ``"budget"`` or ``"patience"``.
    """

    records: list[dict[str, float]] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    best: float | None = None
    stopped: Literal["budget", "patience"] = "budget"
