"""Where the pairs of a step come from: a system and a sampler, a sequence of examples, or an iterable of batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import TypeIs

from sinkformer.couplings import Coupling
from sinkformer.errors import ConfigError, ShapeError
from sinkformer.measures import Measure
from sinkformer.systems import PairSampler, System, every_pair
from sinkformer.training.recipes import Recipe

Example: TypeAlias = tuple[Measure, Measure, Coupling | Tensor]
Data: TypeAlias = tuple[System, PairSampler] | Sequence[Example] | Iterable[Example]

# Streams of random numbers of one seed.
_TRAINING, _VALIDATION, _ORDER = range(3)


class Batch(NamedTuple):
    """Measures ``(G, s)`` and ``(G, t)``, and targets ``(G, s, t, n, m)``: every source of a group with every target."""

    mu: Measure
    nu: Measure
    target: Tensor

    def pairs(self) -> tuple[Measure, Measure, Tensor]:
        """The same one by one, ``(G s t)``, all in the dtype of the measures."""
        mu, nu = (side.map(lambda t: t.flatten(0, 2)) for side in every_pair(self.mu, self.nu))
        return mu, nu, self.target.flatten(0, 2).to(self.mu.dtype)


def batches(
    model: nn.Module, data: Data, recipe: Recipe, seed: int, step: int, crew: tuple[int, int]
) -> Iterator[Batch]:
    """The batches of one process, ``(index, count)``, from a step on."""
    if is_system(data):
        return _drawn(model, data, recipe, seed, step, crew[0])
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return _shuffled(model, data, recipe.batch, seed, step, crew)  # pyright: ignore[reportArgumentType]
    return _iterated(model, data, step)


def held_out(model: nn.Module, data: Data, wanted: int | Sequence[Example] | None, seed: int) -> Batch | None:
    """The pairs of the validation, as groups of one source and one target."""
    if wanted is None:
        wanted = 64 if is_system(data) else 0
    if not isinstance(wanted, int):
        return _stacked(wanted, model)
    if wanted == 0:
        return None
    if not is_system(data):
        raise ConfigError(
            f"expected validation as a sequence of examples for data that are not drawn, received {wanted}"
        )
    system, sampler = data
    mu, nu = sampler.pairs(wanted, generator=_generator(seed, _VALIDATION))
    return _labelled(system, mu[:, None], nu[:, None], model)


def is_system(data: Any) -> TypeIs[tuple[System, PairSampler]]:
    """Whether data are a system and its sampler."""
    return isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], System)


def _drawn(model: nn.Module, data: tuple[System, PairSampler], recipe: Recipe, seed: int, step: int, index: int):
    """Fresh blocks."""
    system, sampler = data
    while True:
        generator = _generator(seed, _TRAINING, step, index)
        block = sampler.block(recipe.groups, recipe.sources, recipe.targets, generator=generator)
        yield _labelled(system, *block, model)
        step += 1


def _shuffled(model: nn.Module, data: Sequence[Example], size: int, seed: int, step: int, crew: tuple[int, int]):
    """Epochs in an order of their own; each process takes every count-th example of a batch."""
    if not len(data):
        raise ShapeError("expected at least one example, received none")
    index, count = crew
    size = size * count
    while True:
        epoch, place = divmod(step, math.ceil(len(data) / size))
        order = torch.randperm(len(data), generator=_generator(seed, _ORDER, epoch)).tolist()
        chosen = order[place * size : (place + 1) * size]
        # In a last batch of fewer examples than processes, the later ones repeat the first.
        yield _stacked([data[k] for k in chosen[index::count] or chosen[:1]], model)
        step += 1


def _iterated(model: nn.Module, data: Iterable[Example], step: int):
    """Batches as they come, over and over; those before ``step`` are passed over."""
    while True:
        empty = True
        for mu, nu, target in data:
            empty, step = False, step - 1
            if step < 0:
                yield _moved(mu[:, None], nu[:, None], _dense(target)[:, None, None], model)
        if empty:
            raise ShapeError("expected batches, received an iterable without any (a generator can be used once only)")


def _generator(seed: int, *path: int) -> torch.Generator:
    """The random numbers of one place of a run."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence((seed, *path)).generate_state(1)[0]))


def _labelled(system: System, mu: Measure, nu: Measure, model: nn.Module) -> Batch:
    """A block with the couplings of a system."""
    return _moved(mu, nu, system(*every_pair(mu, nu)).to_dense().detach(), model)


def _stacked(examples: Sequence[Example], model: nn.Module) -> Batch:
    """Single pairs, padded to one batch."""
    mu, nu = Measure.stack([pair[0] for pair in examples]), Measure.stack([pair[1] for pair in examples])
    target = torch.zeros(len(examples), mu.n, nu.n, dtype=torch.float64)
    for k, (one, other, plan) in enumerate(examples):
        if _dense(plan).shape != (one.n, other.n):
            received = tuple(_dense(plan).shape)
            raise ShapeError(f"expected a target of shape {(one.n, other.n)} in example {k}, received {received}")
        target[k, : one.n, : other.n] = _dense(plan)
    return _moved(mu[:, None], nu[:, None], target[:, None, None], model)


def _dense(target: Coupling | Tensor) -> Tensor:
    return target.to_dense().detach() if isinstance(target, Coupling) else target.detach()


def _moved(mu: Measure, nu: Measure, target: Tensor, model: nn.Module) -> Batch:
    """Measures in the model's dtype, targets in float64, all on its device."""
    like = next(model.parameters())
    wide = torch.float32 if like.device.type == "mps" else torch.float64
    return Batch(mu.to(like), nu.to(like), target.to(like.device, wide))
