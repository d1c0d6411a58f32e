"""Checkpoints of a run: everything that decides how it goes on."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sinkformer.errors import ConfigError, ModelError
from sinkformer.training.recipes import History

_DAMAGE = (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError)


# A module with ``save_pretrained(folder)``, which writes ``model.safetensors``.
M = TypeVar("M", bound=nn.Module)


@dataclass
class State(Generic[M]):
    """What a run consists of between two steps.

    Attributes:
        model: in training.
        averaged: with the averaged weights.
        optimizers: of the model.
        history: so far.
        pending: losses of the steps since the last record.
        stale: validations since the best one.
        best: weights of the best validation, or None.
    """

    model: M
    averaged: M
    optimizers: list[torch.optim.Optimizer]
    history: History
    pending: list[float]
    stale: int
    best: dict[str, Tensor] | None


class Store:
    """A folder of checkpoints ``step-...`` and the records in ``history.jsonl``.

    A checkpoint is a model that ``from_pretrained`` loads (the averaged weights), and ``training.safetensors`` (the weights
    in training), ``best.safetensors``, ``optimizers.pt`` (tensors and numbers, read with ``weights_only=True``) and
    ``state.json``. It is written under another name, renamed, and only then are older ones removed.

    Args:
        folder: made if missing.
        settings: what a run must have in common with the checkpoint it goes on from; as JSON has it.
        writes: whether this process writes.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], writes: bool):
        """Make the folder."""
        self.folder, self.settings, self.writes = folder, json.loads(json.dumps(settings)), writes
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"expected a folder for checkpoints, received {folder}: {error.strerror}") from error

    def newest(self) -> Path | None:
        """The newest checkpoint."""
        return max(self.folder.glob("step-" + "[0-9]" * 9), default=None)

    def open(self, state: State, resume: bool) -> None:
        """Put the newest checkpoint, if there is one, into ``state``; ConfigError unless it may be."""
        newest = self.newest()
        if newest is not None and not resume:
            raise ConfigError(
                f"expected a folder without checkpoints, received {newest}; pass resume=True or another one"
            )
        if newest is not None:
            self._read(newest, state)
        if self.writes:
            lines = [json.dumps(record) + "\n" for record in state.history.records]
            (self.folder / "history.jsonl").write_text("".join(lines))

    def append(self, record: dict[str, float]) -> None:
        """One line of ``history.jsonl``."""
        if self.writes:
            with (self.folder / "history.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")

    def write(self, state: State) -> Path:
        """Write a checkpoint, and give its folder."""
        target = self.folder / f"step-{state.history.steps:09d}"
        if not self.writes or target.exists():
            return target
        draft = self.folder / "unfinished"
        shutil.rmtree(draft, ignore_errors=True)
        averaged: Any = state.averaged
        averaged.save_pretrained(draft)
        save_file(_plain(state.model.state_dict()), draft / "training.safetensors")
        if state.best is not None:
            save_file(_plain(state.best), draft / "best.safetensors")
        torch.save([optimizer.state_dict() for optimizer in state.optimizers], draft / "optimizers.pt")
        numbers = {"history": asdict(state.history), "pending": state.pending, "stale": state.stale}
        (draft / "state.json").write_text(json.dumps({"settings": self.settings} | numbers))
        older = list(self.folder.glob("step-*"))
        os.replace(draft, target)
        for folder in older:
            shutil.rmtree(folder)
        return target

    def _read(self, folder: Path, state: State) -> None:
        try:
            numbers = json.loads((folder / "state.json").read_text())
            theirs, history = numbers["settings"], History(**numbers["history"])
            weights, average = load_file(folder / "training.safetensors"), load_file(folder / "model.safetensors")
            best = load_file(folder / "best.safetensors") if (folder / "best.safetensors").exists() else None
            optimizers = torch.load(folder / "optimizers.pt", weights_only=True, map_location="cpu")
        except _DAMAGE as error:
            raise ModelError(
                f"expected a readable checkpoint in {folder}; a file is missing or damaged: {error}"
            ) from error
        keys = [key for key in {**theirs, **self.settings} if theirs.get(key) != self.settings.get(key)]
        if keys:
            changes = ", ".join(f"{key} {self.settings.get(key)!r} instead of {theirs.get(key)!r}" for key in keys)
            raise ConfigError(f"expected the arguments of the run that wrote {folder}, received {changes}")
        state.model.load_state_dict(weights)
        state.averaged.load_state_dict(average)
        for optimizer, values in zip(state.optimizers, optimizers, strict=True):
            optimizer.load_state_dict(values)
        state.history, state.pending, state.stale, state.best = history, numbers["pending"], numbers["stale"], best


def _plain(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().contiguous().cpu() for name, t in weights.items()}
