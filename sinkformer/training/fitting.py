"""The loop."""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import nn

from sinkformer.errors import ConfigError, NonFiniteError
from sinkformer.models import SinkhornTransformer
from sinkformer.training.batches import Batch, Data, Example, batches, check_data, held_out, is_system
from sinkformer.training.checkpoints import State, Store
from sinkformer.training.muon import Muon
from sinkformer.training.objective import backward, loss_of
from sinkformer.training.processes import Crew, deferred_interrupt
from sinkformer.training.progress import bar
from sinkformer.training.recipes import History, Recipe, is_number

# Matrices whose names contain one of these take Muon's steps: those between the first and the last layer.
_INNER = (".blocks.", ".summary.")
_DEFAULT = Recipe()


def fit(
    model: SinkhornTransformer,
    data: Data,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    recipe: Recipe = _DEFAULT,
    seed: int = 0,
    validation: int | Sequence[Example] | None = None,
    validate_every: int = 100,
    patience: int | None = None,
    record_every: int = 10,
    folder: str | Path | None = None,
    checkpoint_every: int = 500,
    resume: bool = False,
    progress: bool = False,
    accelerate: bool = False,
) -> History:
    """Train a model in place; its weights become averaged ones, of the best validation if there was one, or the last.

    Args:
        model: what to train, in float32 or float64, with the head "sinkhorn" unless ``recipe.loss`` is a function.
        data: ``(system, sampler)`` as ``systems.named`` gives them, for fresh pairs in every step; or a sequence of
            ``(mu, nu, target)``, each one pair, shuffled in every epoch; or an iterable of batches ``(B,)`` of them, such as
            a ``DataLoader``, iterated over again and again (give it a generator of its own, if it shuffles).
        steps: budget in steps.
        seconds: budget in processor seconds of this process, all its threads together; the mean over several processes. Of
            two budgets the first to end.
        recipe: how to train.
        seed: of the data and their order. The initial weights are the model's own.
        validation: number of fresh pairs, never trained on, 64 by default if there is a system; or a sequence of examples. 0
            for none.
        validate_every: steps between validations.
        patience: validations without improvement after which training stops; None goes on.
        record_every: steps between records.
        folder: where checkpoints, and the records as ``history.jsonl``, are written; None writes nothing. The newest
            checkpoint, ``folder/step-...``, is a model that ``SinkhornTransformer.from_pretrained`` loads.
        checkpoint_every: steps between checkpoints; there is also one at the end, at Ctrl-C, and at an error.
        resume: go on from the newest checkpoint in ``folder``, if there is one, with the same arguments.
        progress: a progress bar.
        accelerate: train in the processes that ``torchrun`` or ``accelerate launch`` started (extra ``[train]``): each
            takes its share of every batch, and gradients are added up, so that the run is that of one process up to
            rounding. All are given the same arguments; the model must be on the device of its process.

    Returns:
        The ``History``.

    Raises:
        ConfigError: arguments outside their range; a folder with checkpoints of another run, or without ``resume``;
            arguments, or batches of an iterable, that differ between processes.
        DistributedError: another process was lost.
        NonFiniteError: a target, a loss or a gradient is not a number. Names the step and where the weights before it are.
        MissingExtraError: ``accelerate`` is asked for and not installed.
        ModelError: a damaged checkpoint.
        DTypeError: data of none of the three kinds; a target that is no coupling and no floating-point tensor; a loss that
            is no tensor.
        ShapeError: no example, one that is no triple, or a target of another shape than its measures.
        WeightError: a target that is negative, whose total is not one within 1e-3, or that has mass on atoms of weight zero.
            Names the example, or the batch and the index.
        KeyboardInterrupt: interrupted, after the step was finished and a checkpoint written.
    """
    _check(model, recipe, steps, seconds, folder, resume)
    check_data(data)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"expected a seed >= 0, received {seed!r}")
    counts = {"validate_every": validate_every, "record_every": record_every, "checkpoint_every": checkpoint_every}
    _check_counts(counts | {"steps": steps, "patience": patience})
    crew = Crew(accelerate, next(model.parameters()).device)
    unseen = held_out(model, data, validation, seed)
    if patience is not None and unseen is None:
        raise ConfigError(
            f"expected a validation with patience={patience}, received none; pass validation=64 or examples"
        )
    store = None
    settings = asdict(model.config) | {f"recipe.{name}": value for name, value in recipe.described().items()}
    settings |= {"steps": steps, "seconds": seconds, "seed": seed}
    settings |= {"system": data[0].name if is_system(data) else None}
    settings |= {"validation": 0 if unseen is None else len(unseen.mu), "processes": crew.count}
    told = settings | counts | {"patience": patience, "folder": str(folder), "resume": resume}
    crew.check_alike("arguments", torch.tensor(list(json.dumps(told).encode())))
    run = _Run(model, recipe, crew, steps, seconds)
    if folder is not None:
        store = Store(Path(folder), settings, writes=crew.index == 0)
        store.open(run, resume)
    history, source = run.history, batches(model, data, recipe, seed, run.history.steps, crew)
    with deferred_interrupt() as interrupted, bar(progress and crew.index == 0) as show:
        clock = time.process_time()
        while not run.finished(patience):
            try:
                batch, weight = next(source)
                loss = backward(model, batch, recipe, run.log_scale())
                spent, clock = time.process_time() - clock, time.process_time()
                loss, (spent, stop) = crew.share(model, weight, loss, [spent / crew.count, float(interrupted())])
            except BaseException:  # no weight has changed since the last step
                if store is not None:
                    store.write(run)
                raise
            norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            if not math.isfinite(loss) or not bool(torch.isfinite(norm)):
                where = "the model" if store is None else str(store.write(run))
                raise NonFiniteError(
                    f"expected a finite loss and gradient, received a loss of {loss} and a gradient of norm {float(norm)} in "
                    f"step {history.steps + 1}; the weights before it are in {where}; lower the learning rates"
                )
            run.update()
            history.steps += 1
            history.seconds += spent
            run.pending.append(loss)
            record = {
                "step": history.steps,
                "seconds": history.seconds,
                "rate": run.optimizers[0].param_groups[0]["lr"],
            }
            last = run.share() >= 1
            if unseen is not None and (history.steps % validate_every == 0 or last):
                record["validation"] = run.validate(unseen)
            if history.steps % record_every == 0 or "validation" in record or last:
                record["loss"] = float(np.mean(run.pending))
                run.pending.clear()
                history.records.append(record)
                show(run.share(), record)
                if store is not None:
                    store.append(record)
            if store is not None and (history.steps % checkpoint_every == 0 or stop > 0):
                store.write(run)
            if stop > 0:
                raise KeyboardInterrupt(f"interrupted after step {history.steps}")
        if store is not None:
            store.write(run)
        model.load_state_dict(run.best or run.averaged.state_dict())
    return history


class _Run(State[SinkhornTransformer]):
    """A state, and how it changes."""

    def __init__(
        self, model: SinkhornTransformer, recipe: Recipe, crew: Crew, steps: int | None, seconds: float | None
    ):
        crew.agree(model)
        inner = [
            p
            for name, p in model.named_parameters()
            if recipe.optimizer == "muon" and p.dim() == 2 and any(part in name for part in _INNER)
        ]
        chosen = {id(p) for p in inner}
        others = [p for p in model.parameters() if id(p) not in chosen]
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.0)
        ]
        if inner:
            optimizers.append(Muon(inner, lr=recipe.matrix_rate, weight_decay=recipe.matrix_decay))
        super().__init__(model, copy.deepcopy(model).requires_grad_(False), optimizers, History(), [], 0, None)
        self.recipe, self.crew, self.steps, self.seconds = recipe, crew, steps, seconds

    def share(self, ahead: float = 0.0) -> float:
        """Share of the budget that is spent, some steps ahead."""
        in_steps = (self.history.steps + ahead) / self.steps if self.steps else 0.0
        return max(in_steps, self.history.seconds / self.seconds if self.seconds else 0.0)

    def finished(self, patience: int | None) -> bool:
        """Whether patience or the budget has run out."""
        if patience is not None and self.stale >= patience:
            self.history.stopped = "patience"
            return True
        return self.share() >= 1

    def log_scale(self) -> float:
        """Logarithm of what the logits are multiplied by."""
        end, start = self.model.config.log_scale, self.recipe.log_scale
        if start is None or self.share() >= self.recipe.annealed:
            return end
        return start + (end - start) * self.share() / self.recipe.annealed

    def update(self) -> None:
        """One step of the optimizers and of the average."""
        recipe, share = self.recipe, self.share(ahead=0.5)
        rise = min(1.0, share / recipe.warmup) if recipe.warmup else 1.0
        factor = rise * (1 + math.cos(math.pi * min(share, 1.0))) / 2
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = factor * (recipe.matrix_rate if isinstance(optimizer, Muon) else recipe.rate)
            optimizer.step()
        # Weights 1, d, d^2, ... from the newest to the oldest.
        newest = (1 - recipe.average) / (1 - recipe.average ** (self.history.steps + 1))
        with torch.no_grad():
            for mean, p in zip(self.averaged.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(p, newest)

    def validate(self, unseen: Batch) -> float:
        """Mean loss of the averaged weights, which are kept if they are the best since log_scale has arrived."""
        log_scale = self.log_scale()
        value = self.crew.leading(loss_of(self.averaged, unseen, self.recipe, log_scale))
        if log_scale == self.model.config.log_scale:
            self.stale += 1
            if self.history.best is None or value < self.history.best:
                self.history.best, self.stale = value, 0
                self.best = {name: t.clone() for name, t in self.averaged.state_dict().items()}
        return value


def _check(model, recipe: Recipe, steps: int | None, seconds: float | None, folder, resume: bool) -> None:
    if not isinstance(model, SinkhornTransformer):
        raise ConfigError(f"expected a SinkhornTransformer, received {type(model).__name__}")
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"expected a Recipe, received {recipe!r}")
    if recipe.loss == "fenchel_young" and model.config.head != "sinkhorn":
        raise ConfigError(
            f"expected the head 'sinkhorn' for the loss 'fenchel_young', received {model.config.head!r}; "
            f"use Recipe(loss=losses.fenchel_young) for the softmax head, Recipe(loss=losses.kl) for the truncated one"
        )
    if steps is None and seconds is None:
        raise ConfigError("expected a budget in steps or seconds, received neither")
    if seconds is not None and not (is_number(seconds) and 0 < seconds < math.inf):
        raise ConfigError(f"expected a positive, finite number of seconds, received {seconds!r}")
    if folder is not None and not isinstance(folder, (str, os.PathLike)):
        raise ConfigError(f"expected a folder as a path, received {folder!r}")
    if resume and folder is None:
        raise ConfigError("expected a folder to resume from, received None")


def _check_counts(counts: dict[str, int | None]) -> None:
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"expected {name} as a whole number >= 1, received {value!r}")
