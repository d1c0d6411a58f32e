"""A model against a system, with what it has to beat beside it, in one table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinkformer.errors import ConfigError, ShapeError
from sinkformer.evaluation.adversarial import Attack, adversarial
from sinkformer.evaluation.baselines import best_fixed_cost
from sinkformer.evaluation.comparing import Predictor, Progress, check_predictor, name_of
from sinkformer.evaluation.sampled import (
    LOWER_BOUND,
    Evaluation,
    Pair,
    Summary,
    check_law,
    check_whole,
    counts_of,
    evaluate,
)
from sinkformer.models import SinkhornTransformer
from sinkformer.systems import PairSampler, Product, System

_HEADER = ("predictor", "atoms", "pairs", "mean", "p95", "sup", "widest", "columns", "unconverged")


@dataclass(frozen=True, eq=False, repr=False)
class Report:
    """Several predictors on the same pairs.

    Attributes:
        evaluations: the predictor in question first, then the baselines.
        attack: the search for worse pairs of the first predictor, or None.
        skipped: what was not compared, and why.
    """

    evaluations: tuple[Evaluation, ...]
    attack: Attack | None
    skipped: tuple[str, ...]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The table: a header; for every predictor and range of sizes a row; the first predictor by size."""
        first = self.evaluations[0]
        rows = [_HEADER]
        for evaluation in self.evaluations:
            rows += [_row(evaluation.predictor, summary) for summary in evaluation.by_range()]
        return rows + [_row(f"{first.predictor}, by size", summary) for summary in first.by_size()]

    @property
    def worst(self) -> Pair:
        """The worst pair of the first predictor, sampled or searched for."""
        pairs = [self.evaluations[0].worst[0], *([] if self.attack is None else [self.attack.worst])]
        return max(pairs, key=lambda pair: pair.upper)

    @property
    def unconverged(self) -> bool:
        """Whether a sampled coupling of the first predictor is not what its solver was to find."""
        return bool(self.evaluations[0].summary().unconverged)

    @property
    def notes(self) -> tuple[str, ...]:
        """What has to be known to read the numbers."""
        first, raw = self.evaluations[0], [e for e in self.evaluations if not e.rounded]
        notes = [
            LOWER_BOUND,
            "mean, p95, sup: of upper ends of certified brackets; widest: the widest bracket; columns: largest L1 error of the "
            "target marginal before rounding",
            "predictions are rounded to exact marginals before they are compared" + " unless they are raw" * bool(raw),
        ]
        notes += [f"{e.predictor}: {e.marginals_note}" for e in raw]
        notes += [] if first.continuous else [first.continuity_note]
        if self.attack is not None:
            found = f"sup {self.attack.sup:.3g} found, {float(self.attack.start.max()):.3g} at the start"
            notes += [f"adversarial: {found}", *(note for note in self.attack.notes if note != LOWER_BOUND)]
        return (*notes, *(f"not compared: {reason}" for reason in self.skipped))

    def __str__(self) -> str:
        """The table in plain columns, and the notes."""
        rows = self.rows
        widths = [max(len(row[k]) for row in rows) for k in range(len(_HEADER))]
        lines = []
        for row in rows:
            cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
            lines.append("  ".join(cells).rstrip())
        return "\n".join([f"W1 to the system {self.evaluations[0].system!r}", *lines, *self.notes])

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain numbers and lists."""
        return {
            "notes": list(self.notes),
            "evaluations": [evaluation.to_dict() for evaluation in self.evaluations],
            "adversarial": None if self.attack is None else self.attack.to_dict(),
            "skipped": list(self.skipped),
        }

    def to_json(self, path: str | Path) -> None:
        """Write ``to_dict()`` to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), allow_nan=False) + "\n", encoding="utf-8")


def report(
    predictor: Predictor,
    system: System,
    sampler: PairSampler,
    *,
    pairs: int | Sequence[int] = 1000,
    sizes: Sequence[tuple[int, int]] = ((2, 16),),
    seed: int = 0,
    tol: float | None = None,
    search: int = 0,
    untrained: bool = True,
    trained: Mapping[str, Predictor] | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Evaluate a predictor and baselines on the same pairs; see ``evaluate``, whose errors are also raised here.

    A softmax head is evaluated twice, raw and rounded: its couplings have another target marginal than they should.

    Args:
        predictor: in question.
        system: see ``evaluate``, as for the next five.
        sampler: the law of the pairs.
        pairs: number for each range of sizes.
        sizes: ranges of the number of atoms.
        seed: of the pairs.
        tol: relative width of brackets.
        search: steps of ``adversarial`` from the worst pairs of the predictor; 0 for none.
        untrained: compare with the product coupling and the best fixed cost.
        trained: other predictors to compare with, by name, such as trained softmax heads.
        name: of the predictor.
        progress: called with the numbers of pairs and steps that are done and that there are.

    Raises:
        ConfigError: a trained baseline of the name of another row, or an argument outside its range.
        DTypeError: a baseline that is no predictor.
    """
    check_law(system, sampler)
    each = sum(counts_of(pairs, sizes))
    check_whole(0, search=search, seed=seed)
    entries = _given(predictor, trained, name)
    skipped = []
    if untrained:
        baselines: list[tuple[str, Predictor]] = [("product", Product(system.dims))]
        try:
            cost = best_fixed_cost(system, sampler, seed=seed)
            baselines.append((cost.name, cost))
        except ConfigError as error:
            skipped.append(f"fixed cost: {error}")
        taken = {title for title, _ in entries}
        entries += [(f"{title} (baseline)" if title in taken else title, other) for title, other in baselines]
        if not any(_is_softmax(other) for _, other in entries):
            skipped.append("softmax head, softmax with cross attention: they have to be trained first")
    runs = [(title, other, kept) for title, other in entries for kept in _roundings(other)]
    total, evaluations, attack = len(runs) * each + search, [], None

    def part(before: int) -> Progress | None:
        """Progress of one part, which begins when ``before`` is done."""
        if progress is None:
            return None
        tell = progress
        return lambda done, _: tell(before + done, total)

    for k, (title, other, kept) in enumerate(runs):
        options: dict[str, Any] = {"pairs": pairs, "sizes": sizes, "rounded": kept, "name": _label(title, other, kept)}
        options |= {"seed": seed, "tol": tol, "progress": part(k * each)}
        evaluations.append(evaluate(other, system, sampler, **options))
    if search:
        options = {"steps": search, "half_width": sampler.half_width, "name": runs[0][0]}
        options |= {"seed": seed, "tol": tol, "progress": part(len(runs) * each)}
        try:
            attack = adversarial(predictor, system, *evaluations[0].starts(), **options)
        except (ShapeError, ConfigError) as error:
            skipped.append(f"adversarial: {error}")
    return Report(tuple(evaluations), attack, tuple(skipped))


def _given(
    predictor: Predictor, trained: Mapping[str, Predictor] | None, name: str | None
) -> list[tuple[str, Predictor]]:
    """The predictor in question and those beside it, with names that make different rows."""
    if not isinstance(trained, Mapping | None):
        raise ConfigError(f"expected trained as a mapping from names to predictors, received {type(trained).__name__}")
    entries = [(name_of(predictor) if name is None else name, predictor), *(trained or {}).items()]
    for title, other in entries:
        check_predictor(other)
        if not isinstance(title, str) or not title:
            raise ConfigError(f"expected every predictor to have a name, received {title!r}")
    labels = [_label(title, other, kept) for title, other in entries for kept in _roundings(other)]
    twice = [label for k, label in enumerate(labels) if label in labels[:k]]
    if twice:
        raise ConfigError(
            f"expected every predictor to have a name of its own, received {twice[0]!r} twice; rename one"
        )
    return entries


def _label(title: str, predictor: Predictor, kept: bool) -> str:
    """The name of a row."""
    return f"{title}, {'rounded' if kept else 'raw'}" if _is_softmax(predictor) else title


def _row(name: str, s: Summary) -> tuple[str, ...]:
    unconverged = "-" if s.unconverged is None else f"{s.unconverged:.2%}"
    numbers = (f"{x:.3g}" for x in (s.mean, s.p95, s.sup, s.widest, s.column_error))
    return name, s.label, str(s.pairs), *numbers, unconverged


def _is_softmax(predictor: Predictor) -> bool:
    return isinstance(predictor, SinkhornTransformer) and predictor.config.head == "softmax"


def _roundings(predictor: Predictor) -> tuple[bool, ...]:
    """Ways to compare a predictor: rounded, and raw too where rounding changes a lot."""
    return (True, False) if _is_softmax(predictor) else (True,)
