"""The Sinkhorn Transformer: two encoders, a cost, a coupling layer (Fraiman 2026, arXiv 2603.25860).

    T(mu, nu) = argmin over couplings pi of  <c, pi> + epsilon KL(pi | mu (x) nu),     c = -<Q(mu, x), K(nu, y)>.

Q never sees nu and K never sees mu. Such models are dense, uniformly in W1, among the continuous coupling systems.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import PyTorchModelHubMixin, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sinkformer._typing import CostMatrix, Potential
from sinkformer.costs import NegativeDot
from sinkformer.couplings import Coupling, EntropicCoupling
from sinkformer.encoders import Encoder
from sinkformer.errors import ConfigError, DTypeError, ModelError
from sinkformer.measures import Measure, check_compatible
from sinkformer.solutions import OnFailure
from sinkformer.solvers import SinkhornOptions

Head = Literal["sinkhorn", "softmax", "truncated"]

_FORMAT_VERSION = 1
_LARGEST_LOG_SCALE = 50.0
_CONFIG_FILE, _WEIGHTS_FILE = "config.json", "model.safetensors"


@dataclass(frozen=True)
class SinkhornTransformerConfig:
    """Everything that determines the architecture of a ``SinkhornTransformer``; stored as JSON beside the weights.

    Attributes:
        dim: coordinates of a source point.
        target_dim: coordinates of a target point; ``dim`` if None.
        width: size of a token inside the encoders.
        heads: attention heads; divide ``width``.
        depth: blocks of each encoder.
        rank: size r of the features, so of the inner product; ``width`` if None.
        epsilon: entropy of the coupling, in the units of the cost. Only cost / epsilon matters, and the encoders learn
            the scale of the cost, so epsilon is fixed.
        head: ``"sinkhorn"``, the coupling; ``"softmax"``, row-stochastic: source marginal only (tau_b = 0);
            ``"truncated"``, a fixed number of Sinkhorn sweeps, differentiated as such.
        iterations: sweeps of the truncated head; None for the others.
        causal: space-time encoders, see ``Encoder``.
        context: pooled context in the MLPs, see ``GatedMLP``.
        moments, contextual_skip, tensor: what else the encoders read off a measure, see ``Encoder``.
        log_scale: tau; the coupling is that of e^tau c, so of epsilon e^-tau. Features at initialisation do not depend on
            it: a model that must be sharp in the end can be trained from a blunt one, see ``training.Recipe.log_scale``.
        tolerance: marginal error the sinkhorn head stops at; by dtype if None.
        max_iterations: most sweeps of the sinkhorn head.
        format_version: version of this format.

    Raises:
        ConfigError: a value outside its range.
    """

    dim: int
    target_dim: int | None = None
    width: int = 64
    heads: int = 4
    depth: int = 2
    rank: int | None = None
    epsilon: float = 0.05
    head: Head = "sinkhorn"
    iterations: int | None = None
    causal: bool = False
    context: bool = True
    moments: bool = False
    contextual_skip: bool = False
    tensor: tuple[int, int] | None = None
    log_scale: float = 0.0
    tolerance: float | None = None
    max_iterations: int = 2000
    format_version: int = _FORMAT_VERSION

    def __post_init__(self):
        """Check the values that no layer checks."""
        if self.format_version != _FORMAT_VERSION:
            raise ConfigError(
                f"expected format_version {_FORMAT_VERSION}, received {self.format_version}; "
                f"load the model with the release of sinkformer that wrote it"
            )
        if self.head not in ("sinkhorn", "softmax", "truncated"):
            raise ConfigError(f"expected head 'sinkhorn', 'softmax' or 'truncated', received {self.head!r}")
        if (self.head == "truncated") != (self.iterations is not None):
            raise ConfigError(
                f"expected a number of iterations with head='truncated', and None otherwise, received "
                f"iterations={self.iterations} with head={self.head!r}"
            )
        for name in ("dim", "target_dim", "width", "heads", "depth", "rank", "iterations", "max_iterations"):
            value = getattr(self, name)
            optional = name in ("target_dim", "rank", "iterations")
            if not (optional and value is None) and (isinstance(value, bool) or not isinstance(value, int)):
                raise ConfigError(f"expected {name} as a whole number, received {value!r}")
            if value is not None and value < (0 if name == "depth" else 1):
                raise ConfigError(f"expected {name} >= {0 if name == 'depth' else 1}, received {value}")
        for name in ("causal", "context", "moments", "contextual_skip"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"expected {name} as True or False, received {getattr(self, name)!r}")
        if self.tensor is not None:
            self._check_tensor(self.tensor)
        numbers = {"epsilon": self.epsilon, "log_scale": self.log_scale} | (
            {} if self.tolerance is None else {"tolerance": self.tolerance}
        )
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"expected {name} as a number, received {value!r}")
        if self.tolerance is not None and not 0 <= self.tolerance < float("inf"):
            raise ConfigError(f"expected a tolerance >= 0, received {self.tolerance}")
        if not 0 < self.epsilon < float("inf"):
            raise ConfigError(f"expected epsilon positive and finite, received {self.epsilon}")
        if not abs(self.log_scale) <= _LARGEST_LOG_SCALE:
            raise ConfigError(f"expected log_scale up to {_LARGEST_LOG_SCALE:.0f}, received {self.log_scale}")

    def _check_tensor(self, tensor: Any) -> None:
        sizes = tuple(tensor) if isinstance(tensor, (tuple, list)) else ()
        if len(sizes) != 2 or any(isinstance(x, bool) or not isinstance(x, int) or x < 1 for x in sizes):
            raise ConfigError(
                f"expected tensor as two whole numbers (heads, coefficients), or None, received {tensor!r}"
            )
        object.__setattr__(self, "tensor", sizes)  # JSON has lists

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SinkhornTransformerConfig:
        """Configuration from a dictionary; an unknown or a missing key is an error."""
        known = {x.name for x in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"expected the keys {sorted(known)}, received also {unknown}")
        if "dim" not in values:
            raise ConfigError("expected the key 'dim', the number of coordinates of a point; it is missing")
        return cls(**values)


class SinkhornTransformer(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="sinkformer",
    tags=["optimal-transport", "sinkhorn", "coupling"],
    license="apache-2.0",
):
    """Coupling of two measures from a learned cost.

    Args:
        config: the architecture.
        device, dtype: as for every torch module.

    Example:
        >>> model = SinkhornTransformer(SinkhornTransformerConfig(dim=2, epsilon=0.1))
        >>> mu, nu = Measure.uniform(torch.rand(5, 2)), Measure.uniform(torch.rand(7, 2))
        >>> model(mu, nu).shape
        torch.Size([5, 7])
    """

    def __init__(self, config: SinkhornTransformerConfig, *, device=None, dtype=None):
        """Create both encoders."""
        super().__init__()
        if not isinstance(config, SinkhornTransformerConfig):
            raise ConfigError(f"expected a SinkhornTransformerConfig, received {type(config).__name__}")
        self.config = config
        rank = config.rank or config.width
        target_dim = config.dim if config.target_dim is None else config.target_dim
        # Features of this size make c / epsilon of order one at the start: <Q, K> is of order scale^2 sqrt(rank).
        # Of tensor-product features, half the heads start as plain ones, and the coefficients of the others are small.
        plain = rank if config.tensor is None else max(rank // config.tensor[1] / 2, 1.0)
        scale = (config.epsilon / plain**0.5) ** 0.5
        options: dict[str, Any] = dict(
            width=config.width,
            heads=config.heads,
            depth=config.depth,
            causal=config.causal,
            context=config.context,
            moments=config.moments,
            contextual_skip=config.contextual_skip,
            tensor=config.tensor,
            scale=scale,
            device=device,
            dtype=dtype,
        )
        self.source_encoder = Encoder(config.dim, rank, **options)
        self.target_encoder = Encoder(target_dim, rank, **options)

    def forward(
        self,
        mu: Measure,
        nu: Measure,
        *,
        mask: CostMatrix | None = None,
        init: tuple[Potential, Potential] | None = None,
        on_failure: OnFailure = "warn",
    ) -> EntropicCoupling:
        """Couple two measures, or two batches of them.

        Args:
            mu: source, ``(*batch, n)`` atoms in ``config.dim`` coordinates.
            nu: target, ``(*batch, m)`` atoms in ``config.target_dim`` coordinates.
            mask: additive mask of the cost, broadcast to ``(*batch, n, m)``; ``+inf`` forbids a pair.
            init: potentials to start from; they change the answer of the truncated head, and the work of the sinkhorn head.
            on_failure: see :func:`sinkformer.sinkhorn`.

        Returns:
            The coupling, differentiable in the parameters, points and weights; its ``source`` and ``target`` are ``mu``
            and ``nu``, its features Q(mu, x_i) and K(nu, y_j).

        Raises:
            ShapeError: measures of another dimension than the model's, or of two batch shapes.
            DTypeError: no measures, or measures of another dtype than the parameters.
            InfeasibleError, NonFiniteError, ConvergenceError: see :func:`sinkformer.sinkhorn`.
        """
        check_compatible(mu, nu)
        parameters = self.source_encoder.leave.weight.dtype
        if mu.dtype != parameters:
            raise DTypeError(
                f"expected measures of the model's dtype, {parameters}, received {mu.dtype}; "
                f"convert them with mu.to({parameters}), or the model with model.to({mu.dtype})"
            )
        config = self.config
        features = self.source_encoder(mu).to(mu.dtype), self.target_encoder(nu).to(nu.dtype)
        options: SinkhornOptions = {"mask": mask, "on_failure": on_failure, "init": init}
        if config.head == "truncated":
            assert config.iterations is not None
            options |= {
                "max_iterations": config.iterations,
                "tolerance": 0.0,
                "gradient": "unrolled",
            }
        else:
            options |= {"max_iterations": config.max_iterations, "tolerance": config.tolerance}
        if config.head == "softmax":
            options |= {"tau_b": 0.0}
        return Coupling.solve(
            mu,
            nu,
            cost=NegativeDot(),
            epsilon=self.epsilon,
            features=features,
            maps=(self.source_encoder, self.target_encoder),
            **options,
        )

    @property
    def epsilon(self) -> float:
        """Entropy of the couplings, epsilon e^-tau in the terms of the configuration."""
        return self.config.epsilon * math.exp(-self.config.log_scale)

    def sharpened(self, factor: float) -> SinkhornTransformer:
        """A model with the same encoders, not copies, and all logits c / epsilon multiplied by ``factor`` > 0."""
        if not 0 < factor < float("inf"):
            raise ConfigError(f"expected a positive, finite factor, received {factor}")
        other = copy.copy(self)
        other.config = replace(self.config, log_scale=self.config.log_scale + math.log(factor))
        return other

    def extra_repr(self) -> str:
        """Head and epsilon."""
        return f"head={self.config.head!r}, epsilon={self.epsilon}"

    # Storage ----------------------------------------------------------------------------------------------------------

    def _save_pretrained(self, save_directory: Path) -> None:
        """Write ``config.json`` and ``model.safetensors``."""
        (save_directory / _CONFIG_FILE).write_text(json.dumps(asdict(self.config), indent=2, sort_keys=True) + "\n")
        state = {name: t.detach().contiguous().cpu() for name, t in self.state_dict().items()}
        save_file(state, save_directory / _WEIGHTS_FILE)

    @classmethod
    def from_pretrained(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        token: str | bool | None = None,
    ) -> SinkhornTransformer:
        """Load what ``save_pretrained`` wrote, from a folder or the Hugging Face hub; in ``eval()`` mode, on the CPU.

        Strict: a missing or surplus tensor, a tensor of another shape, and an unknown key of the configuration are errors.

        Args:
            pretrained_model_name_or_path: a folder, or the name of a repository on the hub.
            revision: branch, tag or commit on the hub.
            cache_dir: where files of the hub are kept.
            local_files_only: never ask the hub.
            token: access token for the hub.

        Raises:
            ModelError: nothing there, a damaged file, or weights that do not fit the configuration.
            ConfigError: a configuration that this release cannot read.
        """
        folder = Path(pretrained_model_name_or_path)
        if not folder.is_dir():
            try:
                folder = Path(
                    snapshot_download(
                        str(pretrained_model_name_or_path),
                        revision=revision,
                        cache_dir=cache_dir,
                        local_files_only=local_files_only,
                        token=token,
                        allow_patterns=[_CONFIG_FILE, _WEIGHTS_FILE],
                    )
                )
            except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
                raise ModelError(
                    f"expected a folder written by save_pretrained or the name of a model on the hub, received "
                    f"{str(pretrained_model_name_or_path)!r}, which is neither within reach: {error}"
                ) from error
        return cls._from_folder(folder)

    @classmethod
    def _from_folder(cls, folder: Path) -> SinkhornTransformer:
        for name in (_CONFIG_FILE, _WEIGHTS_FILE):
            if not (folder / name).is_file():
                raise ModelError(f"expected the file {name} in {folder}; write the folder with save_pretrained")
        try:
            values = json.loads((folder / _CONFIG_FILE).read_text())
            state = load_file(folder / _WEIGHTS_FILE)
        except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as error:
            raise ModelError(f"expected a readable model in {folder}; a file is damaged: {error}") from error
        if not isinstance(values, dict):
            raise ModelError(f"expected a JSON object in {folder / _CONFIG_FILE}, received {type(values).__name__}")
        model = cls(SinkhornTransformerConfig.from_dict(values))
        dtypes = {t.dtype for t in state.values()}
        if len(dtypes) == 1:
            model = model.to(dtypes.pop())
        _load_strictly(model, state, folder)
        return model.eval()


def _load_strictly(model: nn.Module, state: dict[str, Tensor], folder: Path) -> None:
    wanted = model.state_dict()
    missing, surplus = sorted(set(wanted) - set(state)), sorted(set(state) - set(wanted))
    misfits = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(t.shape)}"
        for name, t in wanted.items()
        if name in state and state[name].shape != t.shape
    ]
    if missing or surplus or misfits:
        raise ModelError(
            f"expected the weights in {folder} to fit their configuration; missing: {missing or 'none'}; "
            f"surplus: {surplus or 'none'}; of another shape: {misfits or 'none'}"
        )
    model.load_state_dict(state)
