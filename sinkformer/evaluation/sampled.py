"""W1 between predictions and targets over sampled pairs, by number of atoms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkformer._typing import PerProblem
from sinkformer.couplings import Coupling
from sinkformer.errors import ConfigError, DTypeError, ShapeError
from sinkformer.evaluation.comparing import Compared, Predictor, Progress, compare, name_of, prepared, width
from sinkformer.measures import Measure
from sinkformer.systems import PairSampler, System

LOWER_BOUND = "a sup over finitely many pairs is a lower bound of the sup in the theorem"
# Atoms a side up to which a pair is a start for a search: each step measures W1 anew.
_MOST_SEARCHED = 64
# Before every seed, to be apart from the streams of a training with the same one.
_EVALUATION = 0x5731


@dataclass(frozen=True)
class Summary:
    """Numbers of some of the pairs. Distances are upper ends of brackets, except ``sup_lower``.

    Attributes:
        label: which pairs.
        pairs: how many.
        mean, p95, sup: mean, 95 % quantile and largest value of W1.
        sup_lower: the largest lower end; the largest W1 of these pairs is between it and ``sup``.
        widest: the widest bracket.
        column_error: largest L1 violation of the target marginal, before any rounding.
        unconverged: share of couplings whose solver stopped early; None if no solver is known.
    """

    label: str
    pairs: int
    mean: float
    p95: float
    sup: float
    sup_lower: float
    widest: float
    column_error: float
    unconverged: float | None

    @classmethod
    def of(
        cls, label: str, lower: PerProblem, upper: PerProblem, column_error: PerProblem, converged: Tensor | None
    ) -> Summary:
        """Numbers of some pairs, ``(P,)`` each, P >= 1."""
        if not len(upper):
            raise ShapeError("expected at least one pair to sum up, received none")
        return cls(
            label,
            len(upper),
            float(upper.mean()),
            float(np.quantile(upper.numpy(), 0.95)),
            float(upper.max()),
            float(lower.max()),
            float((upper - lower).max()),
            float(column_error.max()),
            None if converged is None else float((~converged).double().mean()),
        )


@dataclass(frozen=True, eq=False)
class Pair:
    """One pair of measures with its couplings, without padding.

    Attributes:
        mu, nu: the measures.
        prediction: the coupling of the predictor as it was compared, ``(n, m)``.
        target: the coupling of the system.
        lower, upper: bracket of W1 between the two.
        converged: whether the predictor's solver did; None if no solver is known.
    """

    mu: Measure
    nu: Measure
    prediction: Coupling
    target: Coupling
    lower: float
    upper: float
    converged: bool | None

    @classmethod
    def of(cls, mu: Measure, nu: Measure, compared: Compared, k: int) -> Pair:
        """Pair ``k`` of a batch."""
        rows, columns = mu.weights[k] > 0, nu.weights[k] > 0
        source, target = mu[k : k + 1].unstack()[0].detach(), nu[k : k + 1].unstack()[0].detach()

        def kept(pi: Coupling) -> Coupling:
            return Coupling.from_dense(source, target, pi[k].to_dense()[rows][:, columns])

        ends = float(compared.distance.lower[k]), float(compared.distance.upper[k])
        converged = None if compared.converged is None else bool(compared.converged[k])
        return cls(source, target, kept(compared.prediction), kept(compared.target), *ends, converged)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return {
            "lower": self.lower,
            "upper": self.upper,
            "converged": self.converged,
            "source": self.mu.points.tolist(),
            "source_weights": self.mu.weights.tolist(),
            "target": self.nu.points.tolist(),
            "target_weights": self.nu.weights.tolist(),
            "prediction": self.prediction.to_dense().tolist(),
            "system": self.target.to_dense().tolist(),
        }


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """W1 between a predictor and a system over sampled pairs.

    Attributes:
        predictor, system: their names.
        continuous: whether the system is; otherwise nothing continuous comes uniformly near it.
        rounded: whether predictions were rounded to exact marginals first. If not, they are distributions on the product
            space, and couplings only up to ``column_error``.
        seed: of the pairs.
        sizes: ranges of the number of atoms that were sampled.
        lower, upper: brackets of W1, ``(P,)``, float64.
        group: index into ``sizes``, ``(P,)``.
        atoms: of source and target, weight zero left out, ``(P, 2)``.
        column_error: L1 violation of the target marginal before rounding, ``(P,)``.
        converged: bool ``(P,)``, or None if no solver said so.
        worst: the pairs of the largest W1, largest first.
    """

    predictor: str
    system: str
    continuous: bool
    rounded: bool
    seed: int
    sizes: tuple[tuple[int, int], ...]
    lower: PerProblem
    upper: PerProblem
    group: Tensor
    atoms: Tensor
    column_error: PerProblem
    converged: Tensor | None
    worst: tuple[Pair, ...]

    def summary(self, chosen: Tensor | None = None, label: str = "all") -> Summary:
        """Numbers of all pairs, or of those that a bool tensor ``(P,)`` chooses (at least one)."""
        chosen = torch.ones_like(self.group, dtype=torch.bool) if chosen is None else chosen
        converged = None if self.converged is None else self.converged[chosen]
        return Summary.of(label, self.lower[chosen], self.upper[chosen], self.column_error[chosen], converged)

    def by_range(self) -> list[Summary]:
        """One summary for each range of ``sizes``."""
        return [self.summary(self.group == k, _label(*ends)) for k, ends in enumerate(self.sizes)]

    def by_size(self) -> list[Summary]:
        """By the larger number of atoms of the two sides, in classes 1, 2, 3-4, 5-8, 9-16 and so on; none is empty."""
        classes = self.atoms.amax(-1).double().log2().ceil().long()
        labelled = [(k, _label(2 ** (k - 1) + 1, 2**k) if k else "1") for k in classes.unique().tolist()]
        return [self.summary(classes == k, label) for k, label in labelled]

    @property
    def notes(self) -> tuple[str, ...]:
        """What has to be known to read the numbers."""
        widest = float((self.upper - self.lower).max())
        notes = [LOWER_BOUND, self.marginals_note]
        if widest > 1e-9:
            notes.append(f"mean, p95 and sup are those of upper ends of brackets, {widest:.2g} wide at most")
        return tuple(notes if self.continuous else [*notes, self.continuity_note])

    @property
    def marginals_note(self) -> str:
        """What was done about marginals that are not exact."""
        if self.rounded:
            return "predictions are rounded to exact marginals before they are compared"
        error = float(self.column_error.max())
        return (
            f"predictions are compared with the marginals they have, up to {error:.3g} (L1) from those of the target: they are "
            f"no couplings"
        )

    @property
    def continuity_note(self) -> str:
        """What is known about predictors near the system."""
        if self.continuous:
            return f"the system {self.system!r} is continuous"
        return f"the system {self.system!r} is not continuous: no continuous predictor is uniformly near it"

    def starts(self) -> tuple[Measure, Measure]:
        """The pairs of ``worst`` with at most 64 atoms a side as two batches, to search from.

        Raises:
            ShapeError: there is none.
        """
        pairs = [pair for pair in self.worst if max(pair.mu.n, pair.nu.n) <= _MOST_SEARCHED]
        if not pairs:
            raise ShapeError(f"expected a pair of at most {_MOST_SEARCHED} atoms a side to search from, received none")
        return Measure.stack([pair.mu for pair in pairs]), Measure.stack([pair.nu for pair in pairs])

    def __repr__(self) -> str:
        """Names, numbers of all pairs, and the notes."""
        s = self.summary()
        return (
            f"Evaluation({self.predictor} on {self.system}: {s.pairs} pairs, W1 mean {s.mean:.3g}, p95 {s.p95:.3g}, "
            f"sup {s.sup:.3g}; {'; '.join(self.notes)})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain numbers and lists."""
        return {
            "predictor": self.predictor,
            "system": self.system,
            "continuous": self.continuous,
            "rounded": self.rounded,
            "seed": self.seed,
            "notes": list(self.notes),
            "all": asdict(self.summary()),
            "by_range": [asdict(s) for s in self.by_range()],
            "by_size": [asdict(s) for s in self.by_size()],
            "pairs": {
                "group": self.group.tolist(),
                "atoms": self.atoms.tolist(),
                "lower": self.lower.tolist(),
                "upper": self.upper.tolist(),
                "column_error": self.column_error.tolist(),
                "converged": None if self.converged is None else self.converged.tolist(),
            },
            "worst": [pair.to_dict() for pair in self.worst],
        }

    def to_json(self, path: str | Path) -> None:
        """Write ``to_dict()`` to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), allow_nan=False) + "\n", encoding="utf-8")


def evaluate(
    predictor: Predictor,
    system: System,
    sampler: PairSampler,
    *,
    pairs: int | Sequence[int] = 1000,
    sizes: Sequence[tuple[int, int]] = ((2, 16),),
    seed: int = 0,
    rounded: bool = True,
    tol: float | None = None,
    keep: int = 8,
    batch: int = 64,
    name: str | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure W1 between the couplings of a predictor and of a system over random pairs, for |x - x'| + |y - y'|.

    Pairs are a function of the sampler, ``seed`` and the range, so that predictors meet the same ones; the distances do not
    depend on ``batch``, up to the rounding of a predictor that evaluates batches. A model is evaluated as a float64 copy, and
    its Sinkhorn head to a marginal error of 1e-9.

    Args:
        predictor: a ``SinkhornTransformer``, or any function of two batches of float64 measures ``(B, N)`` that returns a
            ``Coupling`` of them.
        system: the exact targets.
        sampler: the law of the pairs; its ``sizes`` are replaced.
        pairs: number of pairs for each range of sizes, >= 1; one for all or one for each.
        sizes: ranges (smallest, largest) of the number of atoms.
        seed: of the pairs, >= 0.
        rounded: round predictions to exact marginals before they are compared. False compares them with the marginals they
            have, as for a raw softmax, and the result says so.
        tol: relative width of brackets, see ``w1``; by default exact for ranges up to 64 atoms, 1 % above.
        keep: how many of the worst pairs to keep, >= 1.
        batch: pairs that are predicted at once, >= 1.
        name: of the predictor.
        progress: called after every batch with the number of pairs that are done, and of all.

    Raises:
        ConfigError: an argument outside its range.
        DTypeError: no system or no sampler.
        DTypeError, ShapeError, WeightError: a predictor that does not return couplings of the measures: other weights or
            points; with ``rounded=False`` also mass on atoms of weight zero.
        NonFiniteError: a NaN in a prediction.
        ConvergenceError: the system's own solver failed.
    """
    check_law(system, sampler)
    counts = counts_of(pairs, sizes)
    check_whole(1, keep=keep, batch=batch)
    check_whole(0, seed=seed)
    ready, title = prepared(predictor), name_of(predictor) if name is None else name
    rows: list[tuple[Tensor, ...]] = []
    worst: list[Pair] = []
    done = 0
    for group, (ends, count) in enumerate(zip(sizes, counts, strict=True)):
        mu, nu = draw(sampler, ends, count, seed)
        for start in range(0, count, batch):
            part = mu[start : start + batch], nu[start : start + batch]
            with torch.no_grad():
                compared = compare(ready(*part), system(*part), *part, rounded=rounded, tol=width(tol, ends[1]))
            distance, size = compared.distance, len(part[0])
            atoms = torch.stack([(side.weights > 0).sum(-1) for side in part], -1)
            known = torch.ones(size, dtype=torch.bool) if compared.converged is None else compared.converged
            silent = torch.full((size,), compared.converged is None)
            place = torch.full((size,), group)
            rows.append((distance.lower, distance.upper, place, atoms, compared.column_error, known, silent))
            for k in distance.upper.argsort(descending=True, stable=True)[:keep].tolist():
                if len(worst) < keep or float(distance.upper[k]) > worst[-1].upper:
                    worst = sorted([*worst, Pair.of(*part, compared, k)], key=lambda pair: -pair.upper)[:keep]
            done += size
            if progress is not None:
                progress(done, sum(counts))
    lower, upper, place, atoms, column_error, known, silent = (torch.cat(column) for column in zip(*rows, strict=True))
    converged = None if bool(silent.any()) else known
    names = (title, system.name, system.continuous, rounded, seed, tuple((int(a), int(b)) for a, b in sizes))
    return Evaluation(*names, lower, upper, place, atoms, column_error, converged, tuple(worst))


def draw(
    sampler: PairSampler, ends: tuple[int, int], count: int, seed: int, stream: int = 0
) -> tuple[Measure, Measure]:
    """Pairs of one range of sizes; streams of one seed have nothing in common."""
    law = replace(sampler, sizes=tuple(ends))
    # Not a path that training draws from, whatever its seed.
    number = np.random.SeedSequence((_EVALUATION, seed, stream, *ends)).generate_state(1)[0]
    return law.pairs(count, generator=torch.Generator().manual_seed(int(number)))


def check_law(system: Any, sampler: Any) -> None:
    """Raise DTypeError unless these are a system and a sampler, in this order."""
    for value, kind in ((system, System), (sampler, PairSampler)):
        if not isinstance(value, kind):
            raise DTypeError(
                f"expected a {kind.__name__}, received {type(value).__name__}; the order is system, sampler, as in "
                f"system, sampler = named('eot')"
            )


def check_whole(least: int, **values: Any) -> None:
    """Raise ConfigError unless all values are whole numbers from ``least`` on; the keyword is the name in the message."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"expected {name} as a whole number >= {least}, received {value!r}")


def counts_of(pairs: int | Sequence[int], sizes: Sequence[tuple[int, int]]) -> list[int]:
    """Pairs of every range of sizes."""
    if not isinstance(sizes, Sequence) or not all(isinstance(ends, Sequence) and len(ends) == 2 for ends in sizes):
        raise ConfigError(f"expected sizes as ranges (low, high), such as ((2, 16),), received {sizes!r}")
    if not len(sizes):
        raise ConfigError("expected at least one range of sizes, received none")
    for ends in sizes:
        PairSampler(sizes=(ends[0], ends[1]))
    if not isinstance(pairs, (int, Sequence)):
        raise ConfigError(f"expected pairs as whole numbers >= 1, received {pairs!r}")
    counts = [pairs] if isinstance(pairs, int) else list(pairs)
    counts = counts * len(sizes) if len(counts) == 1 else counts
    if len(counts) != len(sizes):
        raise ConfigError(
            f"expected one number of pairs, or one for each of {len(sizes)} ranges of sizes, received {len(counts)}"
        )
    for count in counts:
        check_whole(1, pairs=count)
    return counts


def _label(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"
