"""The error budget: what every step of the proof may cost, and what it cost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sinkformer._typing import PerProblem


@dataclass(frozen=True, eq=False)
class Step:
    """One step of the proof: from one plan to the next, for every pair.

    Attributes:
        name: of the step.
        hypotheses: what the bound rests on.
        parameters: the numbers of the step, for JSON.
        bounds: what the step may cost at most in W1, ``(pairs)``, float64.
        distances: upper ends of the measured W1 between the plans before and after the step, ``(pairs)``, float64.
    """

    name: str
    hypotheses: str
    parameters: Mapping[str, Any]
    bounds: PerProblem
    distances: PerProblem

    @property
    def bound(self) -> float:
        """Largest bound."""
        return float(self.bounds.max())

    @property
    def measured(self) -> float:
        """Largest measured distance."""
        return float(self.distances.max())


@dataclass(frozen=True, eq=False)
class Ledger:
    """The steps in their order, and their sum.

    Attributes:
        steps: the steps.
        distances: upper ends of the measured W1 between the last plan and the target, ``(pairs)``, float64.
        tolerance: what was asked for.
    """

    steps: tuple[Step, ...]
    distances: PerProblem
    tolerance: float

    @property
    def bounds(self) -> Tensor:
        """Sum of the bounds of all steps, ``(pairs)``, by the triangle inequality."""
        return sum((step.bounds for step in self.steps), self.distances.new_zeros(self.distances.shape))

    @property
    def bound(self) -> float:
        """Sum of the bounds of the steps, each the largest over the pairs."""
        return sum(step.bound for step in self.steps)

    @property
    def measured(self) -> float:
        """Largest measured W1 to the target: a supremum over the given pairs, and no other."""
        return float(self.distances.max())

    @property
    def reached(self) -> bool:
        """Whether the measured supremum is within the tolerance."""
        return self.measured <= self.tolerance

    @property
    def guaranteed(self) -> bool:
        """Whether the sum of the bounds is, too."""
        return self.bound <= self.tolerance

    def __str__(self) -> str:
        """A table."""
        rows = [("step", "bound", "measured", "parameters")]
        for step in self.steps:
            values = ", ".join(f"{name} {_short(value)}" for name, value in step.parameters.items())
            rows.append((step.name, f"{step.bound:.2e}", f"{step.measured:.2e}", values))
        rows.append(("total", f"{self.bound:.2e}", f"{self.measured:.2e}", self._verdict()))
        widths = [max(len(row[k]) for row in rows) for k in range(3)]
        lines = [
            f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows
        ]
        return "\n".join(lines)

    def _verdict(self) -> str:
        if not self.reached:
            return f"tolerance {self.tolerance:g}: not reached"
        return f"tolerance {self.tolerance:g}: reached, {'and' if self.guaranteed else 'not'} by the bounds"

    def to_dict(self) -> dict[str, Any]:
        """Numbers, texts, lists and dictionaries, for JSON."""
        steps = [
            {
                "name": step.name,
                "hypotheses": step.hypotheses,
                "parameters": dict(step.parameters),
                "bound": step.bound,
                "measured": step.measured,
            }
            for step in self.steps
        ]
        return {
            "steps": steps,
            "bound": self.bound,
            "measured": self.measured,
            "pairs": len(self.distances),
            "tolerance": self.tolerance,
            "reached": self.reached,
            "guaranteed": self.guaranteed,
        }

    def to_json(self) -> str:
        """The same as a text."""
        return json.dumps(self.to_dict(), indent=2)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
