"""A trained aligner as a folder.

=================== ======================================================================================================
aligner.json        architecture, decision, the language model with the hash of its weights, facts about the training
model.safetensors   weights of the pair model, in half precision
blocks.safetensors  fine-tuned blocks of the language model, in half precision, if there are any
README.md           the model card
=================== ======================================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from sinkformer.errors import ConfigError, ModelError
from sinkformer.text.embedders import TransformerEmbedder
from sinkformer.text.learned.cards import card
from sinkformer.text.learned.decisions import Decision
from sinkformer.text.learned.learners import upper_blocks
from sinkformer.text.learned.method import Trained
from sinkformer.text.learned.models import CONFIG_FILE, WEIGHTS_FILE, PairModel, PairModelConfig, weights_digest

_BLOCKS_FILE, _CARD_FILE = "blocks.safetensors", "README.md"
_KEYS = {"model", "decision", "encoder", "training"}
_ENCODER_KEYS = {"name", "sha256", "blocks"}


@dataclass(frozen=True)
class TrainedAligner:
    """What training gives and a folder holds. Weights have the values of half precision already.

    Attributes:
        model: the pair model.
        decision: calibration and threshold.
        encoder: name of the language model, as ``TransformerEmbedder`` takes it.
        encoder_sha256: hash of its weights.
        blocks: fine-tuned upper blocks of the language model, or None.
        training: facts about the training, for the model card; JSON-able.
    """

    model: PairModel
    decision: Decision
    encoder: str
    encoder_sha256: str
    blocks: nn.ModuleList | None
    training: Mapping[str, Any]

    def save(self, folder: str | Path) -> None:
        """Write the folder; it is made if missing, and files of an earlier aligner in it are replaced."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        values = {
            "model": asdict(self.model.config),
            "decision": asdict(self.decision),
            "encoder": {
                "name": self.encoder,
                "sha256": self.encoder_sha256,
                "blocks": 0 if self.blocks is None else len(self.blocks),
            },
            "training": dict(self.training),
        }
        # First out and last in: a folder that has it is whole.
        (folder / CONFIG_FILE).unlink(missing_ok=True)
        (folder / WEIGHTS_FILE).write_bytes(save(_plain(self.model.state_dict())))
        (folder / _BLOCKS_FILE).unlink(missing_ok=True)
        if self.blocks is not None:
            (folder / _BLOCKS_FILE).write_bytes(save(_plain(self.blocks.state_dict())))
        (folder / _CARD_FILE).write_text(card(values), encoding="utf-8")
        text = json.dumps(values, indent=2, sort_keys=True, allow_nan=False)
        (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


class Loaded(NamedTuple):
    """What a folder holds, ready for use.

    Attributes:
        embedder: the language model.
        method: the method of the aligner.
        encoder: name and hash of the language model as it was before any fine-tuning, and the number of fine-tuned blocks.
    """

    embedder: TransformerEmbedder
    method: Trained
    encoder: dict[str, Any]


def is_aligner(folder: str | Path) -> bool:
    """Whether a folder holds a trained aligner."""
    return (Path(folder) / CONFIG_FILE).is_file()


def load_aligner(
    folder: str | Path, *, layer: int | None = None, device: str | torch.device = "cpu", batch_size: int = 32
) -> Loaded:
    """The language model and the method of a trained aligner.

    Args:
        folder: written by ``TrainedAligner.save``.
        layer: hidden layer of the vectors that distances are measured by; None: the default of the language model.
        device: torch device of both.
        batch_size: texts encoded together.

    Raises:
        ModelError: a file is missing or damaged, weights do not fit, or the language model has other weights than in training.
        ConfigError: a configuration of another release; no such layer.
    """
    folder = Path(folder)
    values = _read_values(folder)
    encoder = values["encoder"]
    model = PairModel(_built(PairModelConfig.from_dict, values["model"], folder))
    decision = _built(lambda v: Decision(**v), values["decision"], folder)
    state = {name: t.float() for name, t in _tensors(folder / WEIGHTS_FILE).items()}
    _load_strictly(model, state, folder / WEIGHTS_FILE)
    shape = {name: value for name, value in values["decision"].items() if name != "threshold"}
    facts = json.dumps([values["model"], shape], sort_keys=True).encode()
    fingerprint = weights_digest(state, facts)[:12]
    if layer is not None and not 0 <= layer <= model.layers[-1]:
        # Further blocks would be loaded, and the hash of the weights is taken over those that are.
        raise ConfigError(
            f"expected layer between 0 and {model.layers[-1]} for the aligner in {folder}, received {layer!r}"
        )
    embedder = TransformerEmbedder(
        encoder["name"], layer=layer, layers=model.layers, device=device, batch_size=batch_size
    )
    if embedder.settings["sha256"] != encoder["sha256"]:
        raise ModelError(
            f"the aligner in {folder} was trained on other weights of the language model {encoder['name']!r}: sha256 "
            f"{encoder['sha256'][:12]}..., found {embedder.settings['sha256'][:12]}...; use those, or train again"
        )
    if encoder["blocks"]:
        tuned = {name: t.float() for name, t in _tensors(folder / _BLOCKS_FILE).items()}
        _load_strictly(upper_blocks(embedder, encoder["blocks"], model.layers[-1]), tuned, folder / _BLOCKS_FILE)
        embedder.weights_changed()
    # Couplings are solved, and confidences computed, in float64, which Apple's GPUs lack.
    model.to("cpu" if embedder.device.type == "mps" else embedder.device).eval().requires_grad_(False)
    return Loaded(embedder, Trained(model, decision, fingerprint), encoder)


def _read_values(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ModelError(
            f"expected a trained aligner in {folder}, but {CONFIG_FILE} is missing; write one with 'sinkformer train'"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"expected JSON in {path}; the file is damaged: {error}") from error
    keys = set(values) if isinstance(values, dict) else None
    if (
        keys != _KEYS
        or any(not isinstance(values[key], dict) for key in _KEYS)
        or set(values["encoder"]) != _ENCODER_KEYS
    ):
        raise ModelError(f"expected the keys {sorted(_KEYS)} in {path}; the file is damaged or of another release")
    encoder = values["encoder"]
    if (
        not isinstance(encoder["name"], str)
        or not isinstance(encoder["sha256"], str)
        or type(encoder["blocks"]) is not int
    ):
        raise ModelError(
            f"expected name, sha256 and number of blocks of the language model in {path}, received {encoder}"
        )
    return values


def _built(make, values: dict[str, Any], folder: Path):
    try:
        return make(values)
    except TypeError as error:
        raise ConfigError(
            f"expected the configuration of an aligner in {folder}, received {values}: {error}"
        ) from error


def _tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ModelError(f"expected the file {path.name} in {path.parent}; copy the whole folder of the aligner")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ModelError(f"expected weights in {path}; the file is damaged: {error}") from error


def _load_strictly(module: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    wanted = {name: t.shape for name, t in module.state_dict().items()}
    found = {name: t.shape for name, t in state.items()}
    if wanted != found:
        names = sorted(set(wanted.items()) ^ set(found.items()))[0]
        raise ModelError(f"expected the weights of this architecture in {path}; they differ in {names[0]!r}")
    bad = [name for name, t in state.items() if not bool(torch.isfinite(t).all())]
    if bad:
        raise ModelError(f"expected finite weights in {path}, received NaN or infinity in {bad[0]!r}")
    module.load_state_dict(state)


def _plain(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().half().contiguous().cpu() for name, t in state.items()}
