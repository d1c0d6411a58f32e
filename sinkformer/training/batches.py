"""Where the pairs of a step come from: a system and a sampler, a sequence of examples, or an iterable of batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import TypeIs

from sinkformer.couplings import Coupling
from sinkformer.errors import ConfigError, DTypeError, NonFiniteError, ShapeError, WeightError
from sinkformer.measures import Measure
from sinkformer.systems import PairSampler, System, every_pair
from sinkformer.training.processes import Crew
from sinkformer.training.recipes import Recipe

Example: TypeAlias = tuple[Measure, Measure, Coupling | Tensor]
Data: TypeAlias = tuple[System, PairSampler] | Sequence[Example] | Iterable[Example]

# Streams of random numbers of one seed.
_TRAINING, _VALIDATION, _ORDER = range(3)
# L1 marginal error of the targets of a system. The Fenchel-Young loss couples the marginals that a target has, so this is no
# floor for it; losses of the user's see targets that are off by as much.
_DRAFT = 1e-7
# How far the total of a target may be from one: half precision, or a solver that stopped early.
_TOTAL = 1e-3


class Batch(NamedTuple):
    """Measures ``(G, s)`` and ``(G, t)``, and targets ``(G, s, t, n, m)``: every source of a group with every target."""

    mu: Measure
    nu: Measure
    target: Tensor

    def pairs(self) -> tuple[Measure, Measure, Tensor]:
        """The same one by one, ``(G s t)``, all in the dtype of the measures."""
        mu, nu = (side.map(lambda t: t.flatten(0, 2)) for side in every_pair(self.mu, self.nu))
        return mu, nu, self.target.flatten(0, 2).to(self.mu.dtype)


class Share(NamedTuple):
    """What one process has of the batch of a step: None for nothing, and the share of the pairs that it is."""

    batch: Batch | None
    weight: float


def batches(model: nn.Module, data: Data, recipe: Recipe, seed: int, step: int, crew: Crew) -> Iterator[Share]:
    """The shares of this process in the batches of a run, from a step on: the batches do not depend on the processes."""
    if is_system(data):
        return _drawn(model, data, recipe, seed, step, crew)
    if _is_sequence(data):
        return _shuffled(model, data, recipe.batch, seed, step, crew)
    return _iterated(model, data, step, crew)


def held_out(model: nn.Module, data: Data, wanted: int | Sequence[Example] | None, seed: int) -> Batch | None:
    """The pairs of the validation, as groups of one source and one target."""
    if wanted is None:
        wanted = 64 if is_system(data) else 0
    if isinstance(wanted, bool) or not (_is_sequence(wanted) or (isinstance(wanted, int) and wanted >= 0)):
        raise ConfigError(
            f"expected validation as a whole number >= 0 or a sequence of examples, received {_name(wanted)}"
        )
    if not isinstance(wanted, int):
        if not len(wanted):
            raise ShapeError("expected at least one example in validation, received none; pass 0 for no validation")
        return _stacked([_triple(wanted[k], f"validation example {k}") for k in range(len(wanted))], model)
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
    return (
        isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], System) and isinstance(data[1], PairSampler)
    )


def check_data(data: Any) -> None:
    """Raise unless data are of one of the three kinds; the examples themselves are checked as they are used."""
    parts = tuple(data) if isinstance(data, (tuple, list)) else (data,)
    if not is_system(data) and any(isinstance(part, (System, PairSampler)) for part in parts):
        raise DTypeError(
            f"expected a system and its sampler as a tuple (system, PairSampler(dims=system.dims)), received {_name(data)}"
        )
    if any(isinstance(part, Measure) for part in parts):
        raise DTypeError(
            f"expected a sequence of triples (mu, nu, target), received {_name(data)}; put one into a list"
        )
    if isinstance(data, (str, bytes, Mapping)) or not (_is_sequence(data) or isinstance(data, Iterable)):
        raise DTypeError(
            f"expected data as (system, sampler), a sequence of examples or an iterable of batches, received {_name(data)}"
        )


def _is_sequence(data: Any) -> TypeIs[Sequence]:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (str, bytes, Mapping))


def _name(value: Any) -> str:
    """A value for a message."""
    if isinstance(value, (tuple, list)):
        inside = ", ".join(type(part).__name__ for part in value[:4])
        return f"a {type(value).__name__} of {inside or 'nothing'}"
    return repr(value) if value is None or isinstance(value, (int, float, str)) else type(value).__name__


def _drawn(model: nn.Module, data: tuple[System, PairSampler], recipe: Recipe, seed: int, step: int, crew: Crew):
    """Fresh blocks; each process takes some of the groups, or where there are too few some of the sources of one."""
    system, sampler = data
    first = crew.index % recipe.groups
    here = len(range(first, crew.count, recipe.groups))
    groups, sources = slice(first, None, crew.count), slice(crew.index // recipe.groups, None, here)
    mine = len(range(recipe.groups)[groups]) * len(range(recipe.sources)[sources])
    while True:
        # The place of the first process: what is drawn is the same for all of them.
        generator = _generator(seed, _TRAINING, step, 0)
        mu, nu = sampler.block(recipe.groups, recipe.sources, recipe.targets, generator=generator)
        part = mu.map(lambda t: t[groups, sources]), nu.map(lambda t: t[groups])
        yield Share(_labelled(system, *part, model) if mine else None, mine / (recipe.groups * recipe.sources))
        step += 1


def _shuffled(model: nn.Module, data: Sequence[Example], size: int, seed: int, step: int, crew: Crew):
    """Epochs in an order of their own; each process takes every count-th example of a batch."""
    if not len(data):
        raise ShapeError("expected at least one example, received none")
    while True:
        epoch, place = divmod(step, math.ceil(len(data) / size))
        order = torch.randperm(len(data), generator=_generator(seed, _ORDER, epoch)).tolist()
        chosen = order[place * size : (place + 1) * size]
        mine = chosen[crew.index :: crew.count]
        batch = _stacked([_triple(data[k], f"example {k}") for k in mine], model) if mine else None
        yield Share(batch, len(mine) / len(chosen))
        step += 1


def _iterated(model: nn.Module, data: Iterable[Example], step: int, crew: Crew):
    """Batches as they come, over and over; those before ``step`` are passed over."""
    mine = slice(crew.index, None, crew.count)
    while True:
        empty = True
        for number, batch in enumerate(data):
            empty, step = False, step - 1
            if step < 0:
                mu, nu, target, place = _triple(batch, f"batch {number}", axes=1)
                _check_masses(target, mu, nu, [f"{place}, index {k}" for k in range(len(target))])
                crew.check_alike("batches", mu.weights, nu.weights, target)
                mu, nu, part = mu[mine], nu[mine], target[mine]
                batch = _moved(mu[:, None], nu[:, None], part[:, None, None], model) if len(part) else None
                yield Share(batch, len(part) / len(target))
        if empty:
            raise ShapeError("expected batches, received an iterable without any (a generator can be used once only)")


def _generator(seed: int, *path: int) -> torch.Generator:
    """The random numbers of one place of a run."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence((seed, *path)).generate_state(1)[0]))


def _labelled(system: System, mu: Measure, nu: Measure, model: nn.Module) -> Batch:
    """A block with the couplings of a system."""
    sources, targets = every_pair(mu, nu)
    plans = system.draft(sources, targets, _DRAFT).detach()
    places = [f"pair {k} of {system.name}" for k in range(plans[..., 0, 0].numel())]
    sources, targets = (side.map(lambda t: t.flatten(0, 2)) for side in (sources, targets))
    _check_masses(plans.flatten(0, 2), sources, targets, places)
    return _moved(mu, nu, plans, model)


class _Checked(NamedTuple):
    """An example or a batch, the target as a matrix, and what to call it in a message."""

    mu: Measure
    nu: Measure
    target: Tensor
    place: str


def _triple(example: Any, place: str, axes: int = 0) -> _Checked:
    """An example, or a batch of them if ``axes`` is 1, whose types and shapes fit together."""
    if not isinstance(example, (tuple, list)) or len(example) != 3:
        raise ShapeError(f"expected {place} as a triple (mu, nu, target), received {_name(example)}")
    mu, nu, target = example
    for side in (mu, nu):
        if not isinstance(side, Measure):
            raise DTypeError(f"expected measures in {place}, received {_name(side)}")
        if len(side.batch_shape) != axes:
            wanted = "a batch (B,) of measures" if axes else "single measures"
            raise ShapeError(f"expected {wanted} in {place}, received the batch shape {tuple(side.batch_shape)}")
    if isinstance(target, Coupling):
        target = target.to_dense()
    if not isinstance(target, Tensor) or not target.is_floating_point():
        received = target.dtype if isinstance(target, Tensor) else _name(target)
        raise DTypeError(
            f"expected the target of {place} as a coupling or a floating-point tensor, received {received}"
        )
    if mu.batch_shape != nu.batch_shape or target.shape != (*mu.batch_shape, mu.n, nu.n):
        wanted = (*mu.batch_shape, mu.n, nu.n)
        raise ShapeError(f"expected a target of shape {wanted} in {place}, received {tuple(target.shape)}")
    return _Checked(mu, nu, target.detach(), place)


def _check_masses(target: Tensor, mu: Measure, nu: Measure, places: Sequence[str]) -> None:
    """Raise unless targets ``(B, n, m)`` are probabilities on the pairs of atoms that have weight."""
    total = target.double().sum((-1, -2))
    live = ((mu.weights > 0).unsqueeze(-1) & (nu.weights > 0).unsqueeze(-2)).to(target.device)
    inside = torch.where(live, target, 0.0)
    bad = ~(((total - 1).abs() <= _TOTAL) & (target >= 0).all(-1).all(-1) & (inside == target).all(-1).all(-1))
    if not bool(bad.any()):
        return
    k = int(bad.nonzero()[0])
    plan, place = target[k], places[k]
    if not bool(torch.isfinite(plan).all()):
        raise NonFiniteError(f"expected a finite target in {place}, received a NaN or an infinity")
    if not bool((plan >= 0).all()):
        raise WeightError(f"expected a target >= 0 in {place}, received {float(plan.min()):.6g}")
    if not bool((inside[k] == plan).all()):
        surplus = float((plan - inside[k]).sum())
        raise WeightError(
            f"expected no mass on atoms of weight zero in {place}, received a target with {surplus:.3g} there"
        )
    raise WeightError(
        f"expected a target of total one in {place}, received {float(total[k]):.6g}; divide it by its sum"
    )


def _stacked(examples: Sequence[_Checked], model: nn.Module) -> Batch:
    """Single pairs, padded to one batch."""
    mu, nu = Measure.stack([pair.mu for pair in examples]), Measure.stack([pair.nu for pair in examples])
    target = torch.zeros(len(examples), mu.n, nu.n, dtype=torch.float64)
    for k, (one, other, plan, _) in enumerate(examples):
        target[k, : one.n, : other.n] = plan
    _check_masses(target, mu, nu, [pair.place for pair in examples])
    return _moved(mu[:, None], nu[:, None], target[:, None, None], model)


def _moved(mu: Measure, nu: Measure, target: Tensor, model: nn.Module) -> Batch:
    """Measures in the model's dtype, targets in float64, all on its device."""
    like = next(model.parameters())
    wide = torch.float32 if like.device.type == "mps" else torch.float64
    return Batch(mu.to(like), nu.to(like), target.to(like.device, wide))
