"""Training an aligner on gold links: the loop."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sinkformer.errors import ConfigError, NonFiniteError
from sinkformer.text.embedders import TransformerEmbedder
from sinkformer.text.learned.decisions import Decision, best_threshold
from sinkformer.text.learned.examples import EncodedExamples, Example, batches
from sinkformer.text.learned.learners import Learner, log_odds_of, upper_blocks
from sinkformer.text.learned.models import PairModel, PairModelConfig, weights_digest
from sinkformer.training.checkpoints import State, Store
from sinkformer.training.processes import deferred_interrupt
from sinkformer.training.recipes import History

# Larger steps leave the range of any weight that trains.
_LARGEST_RATE = 100.0

Show = Callable[[float, dict[str, float]], None]


@dataclass(frozen=True)
class AlignerRecipe:
    """How to train an aligner.

    Attributes:
        epochs: passes over the training pairs.
        batch: pairs of a step.
        rate: learning rate (AdamW) of matrices and windows; scales, biases and null prices take three times that.
        decay: weight decay.
        warmup: share of the steps in which learning rates rise from zero; then they fall to zero linearly.
        clip: largest norm of the gradient.
        average: decay of the exponential moving average of the weights (bias-corrected), which is what comes out.
        both_ways: every pair is seen in both directions in an epoch, which helps where both texts are of one language.
        link_weight: of the loss of the link head beside that of the coupling.
        fine_tune: upper blocks of the language model that are trained too; 0 keeps it frozen.
        encoder_rate: learning rate of those.
        longest: training pairs with a longer side, in words, are left out.

    Raises:
        ConfigError: a value outside its range.
    """

    epochs: int = 4
    batch: int = 32
    rate: float = 2e-3
    decay: float = 0.01
    warmup: float = 0.05
    clip: float = 1.0
    average: float = 0.995
    both_ways: bool = True
    link_weight: float = 1.0
    fine_tune: int = 0
    encoder_rate: float = 1e-4
    longest: int = 60

    def __post_init__(self):
        """Check every value."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise ConfigError(f"expected {field.name} as True or False, received {value!r}")
                continue
            whole = isinstance(field.default, int)
            least = 1 if whole and field.name != "fine_tune" else 0
            right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not right or not math.isfinite(value) or value < least:
                kind = "whole number" if whole else "finite number"
                raise ConfigError(f"expected {field.name} as a {kind} >= {least}, received {value!r}")
        if max(self.rate, self.encoder_rate) > _LARGEST_RATE:
            raise ConfigError(
                f"expected learning rates of at most {_LARGEST_RATE:g}, received {self.rate} and {self.encoder_rate}"
            )
        if self.warmup > 1 or self.clip == 0 or self.average >= 1:
            raise ConfigError(
                f"expected warmup <= 1, clip > 0 and average < 1, received {self.warmup}, {self.clip} and {self.average}"
            )


def fit_pairs(
    train: Sequence[Example],
    dev: Sequence[Example],
    embedder: TransformerEmbedder,
    config: PairModelConfig,
    recipe: AlignerRecipe,
    *,
    seed: int,
    init: PairModel | None,
    folder: Path | None,
    resume: bool,
    patience: int | None,
    show: Show,
) -> tuple[Learner, Decision, History]:
    """Train a pair model, keep the epoch with the highest F1 on ``dev``, and fit the decision there.

    The same arguments give the same weights on the same machine, also if the run was interrupted and resumed in between.

    Raises:
        ConfigError: see ``training.checkpoints.Store``.
        NonFiniteError: a loss or gradient that is no number.
        KeyboardInterrupt: after a checkpoint was written, if there is a folder.
    """
    with _seeded(seed, 0):
        model = PairModel(config)
    if init is not None:
        model.load_state_dict(init.state_dict())
    blocks = upper_blocks(embedder, recipe.fine_tune, model.layers[-1]) if recipe.fine_tune else None
    # Of the language model the blocks alone learn; nothing below them keeps a gradient.
    embedder.model.requires_grad_(False)
    learner = Learner(model, blocks).to(embedder.device)
    ways = [*train, *(e.transposed for e in train)] if recipe.both_ways else train
    run = _Run(learner, recipe, math.ceil(len(ways) / recipe.batch), seed)
    store = None
    if folder is not None:
        settings: dict[str, Any] = {f"model.{k}": v for k, v in asdict(config).items()}
        settings |= {f"recipe.{k}": v for k, v in asdict(recipe).items()}
        settings |= {"seed": seed, "encoder": embedder.settings["sha256"], "train": _digest(train), "dev": _digest(dev)}
        settings |= {"start": None if init is None else weights_digest(init.state_dict())[:16]}
        store = Store(folder, settings, writes=True)
        store.open(run, resume)
    # After the store, which may refuse the run: encoding takes long.
    layers = () if recipe.fine_tune else model.layers
    data, held_out = [EncodedExamples(part, embedder, layers) for part in (ways, dev)]
    learner.train()
    embedder.model.eval()
    with deferred_interrupt() as interrupted:
        while not run.finished(patience):
            try:
                record = run.epoch(data, held_out, interrupted, show)
            except KeyboardInterrupt:
                if store is not None:
                    store.write(run)
                raise
            if store is not None:
                store.append(record)
                store.write(run)
            if interrupted():
                raise KeyboardInterrupt(f"interrupted after step {run.history.steps}")
    if run.best is not None:
        learner.load_state_dict(run.best)
    # As they are stored: the decision is fitted to what will be used.
    with torch.no_grad():
        for p in learner.parameters():
            p.copy_(p.half())
    learner.eval()
    odds = log_odds_of(learner, held_out, recipe.batch)
    decision = Decision.fitted(torch.cat([x.flatten() for x in odds]), _gold(held_out))
    return learner, decision, run.history


class _Run(State[Learner]):
    """The state of a run; its unit is the epoch, but it can stop after any step."""

    def __init__(self, learner: Learner, recipe: AlignerRecipe, per_epoch: int, seed: int):
        tuned = list(learner.blocks.parameters()) if learner.fine_tunes else []
        others = list(learner.pairs.parameters())
        prices = {id(p) for p in learner.pairs.words.alone.parameters()}
        matrices = [p for p in others if p.dim() > 1 and id(p) not in prices]
        scalars = [p for p in others if p.dim() <= 1 or id(p) in prices]
        self.rates = [recipe.rate, 3 * recipe.rate, recipe.encoder_rate]
        groups = [{"params": part, "lr": 0.0} for part in (matrices, scalars, tuned) if part]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=recipe.decay)
        super().__init__(learner, copy.deepcopy(learner).requires_grad_(False), [optimizer], History(), [], 0, None)
        self.recipe, self.per_epoch, self.seed = recipe, per_epoch, seed

    def finished(self, patience: int | None) -> bool:
        """Whether patience or epochs have run out."""
        if patience is not None and self.stale >= patience:
            self.history.stopped = "patience"
            return True
        return self.history.steps >= self.recipe.epochs * self.per_epoch

    def epoch(self, data: EncodedExamples, held_out: EncodedExamples, interrupted, show: Show) -> dict[str, float]:
        """The rest of an epoch and its validation."""
        epoch, done = divmod(self.history.steps, self.per_epoch)
        lengths = [len(e.source) for e in data.data]
        for chosen in list(batches(lengths, self.recipe.batch, self.seed, epoch))[done:]:
            with _seeded(self.seed, self.history.steps + 1):
                loss = self.step(data, chosen)
            self.pending.append(loss)
            self.history.steps += 1
            show(self.share(), {"step": self.history.steps, "loss": loss})
            # After the last step of an epoch its validation comes first; the question is asked again then.
            if self.history.steps % self.per_epoch and interrupted():
                raise KeyboardInterrupt(f"interrupted after step {self.history.steps}")
        with self.averaging():
            odds = log_odds_of(self.model, held_out, self.recipe.batch)
        f1 = best_threshold(torch.cat([torch.sigmoid(x).flatten() for x in odds]), _gold(held_out))[1]
        self.stale += 1
        if self.history.best is None or 1 - f1 < self.history.best:
            self.history.best, self.stale = 1 - f1, 0
            self.best = {name: t.detach().clone() for name, t in self.averaged.state_dict().items()}
        record = {"step": self.history.steps, "epoch": epoch + 1, "validation": f1}
        record["loss"] = sum(self.pending) / len(self.pending)
        self.pending.clear()
        self.history.records.append(record)
        show(self.share(), record)
        return record

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """The averaged weights in the place of the model's: blocks of the language model work where they are."""
        own = {name: t.clone() for name, t in self.model.state_dict().items()}
        self.model.load_state_dict(self.averaged.state_dict())
        try:
            yield
        finally:
            self.model.load_state_dict(own)

    def share(self) -> float:
        """Share of the steps that are done."""
        return self.history.steps / (self.recipe.epochs * self.per_epoch)

    def step(self, data: EncodedExamples, chosen: list[int]) -> float:
        """One step of the optimizer."""
        recipe, share = self.recipe, (self.history.steps + 0.5) / (self.recipe.epochs * self.per_epoch)
        first, second = self.model.losses(data, chosen)
        loss = first + recipe.link_weight * second
        self.model.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        if not math.isfinite(float(loss.detach())) or not bool(torch.isfinite(norm)):
            raise NonFiniteError(
                f"expected a finite loss and gradient, received a loss of {float(loss.detach())} and a gradient of norm "
                f"{float(norm)} in step {self.history.steps + 1}; lower the learning rates"
            )
        rise = min(1.0, share / recipe.warmup) if recipe.warmup else 1.0
        for group, rate in zip(self.optimizers[0].param_groups, self.rates, strict=False):
            group["lr"] = rate * rise * (1 - share)
        self.optimizers[0].step()
        # Weights 1, d, d^2, ... from the newest to the oldest.
        newest = (1 - recipe.average) / (1 - recipe.average ** (self.history.steps + 1))
        with torch.no_grad():
            for mean, p in zip(self.averaged.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(p, newest)
        return float(loss.detach())


def _gold(data: EncodedExamples) -> Tensor:
    return torch.cat([e.matrix.flatten() for e in data.data])


@contextmanager
def _seeded(seed: int, step: int) -> Iterator[None]:
    """Dropout and initial weights that depend on seed and step alone; the caller's random state is left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {step}".encode()).digest()[:7], "big"))
        yield


def _digest(data: Sequence[Example]) -> str:
    return hashlib.sha256(repr(list(data)).encode("utf-8", "surrogatepass")).hexdigest()[:16]
