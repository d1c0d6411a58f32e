"""What a solver returns: potentials, and how well they solve the problem."""

from __future__ import annotations

import enum
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sinkformer._typing import PerProblem, Potential
from sinkformer.errors import ConvergenceError, ConvergenceWarning, InfeasibleError, NonFiniteError
from sinkformer.ops.dispatch import Choice

OnFailure = Literal["warn", "raise", "ignore"]


class Status(enum.IntEnum):
    """How the solution of one problem ended. ``explanation`` names cause and remedy."""

    CONVERGED = 0
    MAX_ITERATIONS = 1
    INFEASIBLE = 2
    NONFINITE = 3

    def __str__(self) -> str:
        """The name, for messages and tables."""
        return self.name

    @property
    def explanation(self) -> str:
        """One sentence for the user."""
        return _EXPLANATIONS[self]


_EXPLANATIONS = {
    Status.CONVERGED: "the marginal error is below the tolerance",
    Status.MAX_ITERATIONS: (
        "the iterations ended, or stalled at the rounding of the dtype, before the marginal error reached the tolerance; "
        "raise max_iterations or epsilon, "
        "or loosen tolerance; Coupling.rounded() has exact marginals all the same"
    ),
    Status.INFEASIBLE: (
        "no coupling avoids the forbidden pairs: some atoms together weigh more than all atoms they may be paired with; "
        "allow more pairs, or give up a marginal with tau_a < 1 or tau_b < 1"
    ),
    Status.NONFINITE: "the cost of a pair of atoms of positive weight is NaN, -inf or beyond 1e29; "
    "look for overflow where it was computed",
}


@dataclass(frozen=True, eq=False, repr=False)
class Solution:
    """Potentials of one problem or a batch, and how well they solve it. All fields are per batch element.

    Attributes:
        f, g: potentials, ``(*batch, n)`` and ``(*batch, m)``, float64, in the units of the cost; differentiable in cost,
            weights and epsilon. NaN for a problem whose status is NONFINITE.
        value: optimal value of the problem, from the dual, ``(*batch)``, in the units of the cost; differentiable by
            the envelope theorem (derivative in the cost: the plan).
        marginal_error: L1 violation of both marginals together, sum_i |P1 - a|_i + sum_j |P^T 1 - b|_j, measured on the
            plan itself; with tau < 1, the violation of that side's optimality condition P1 = a exp(-f / rho_a).
        duality_gap: bound on the primal cost of the rounded plan minus the dual value, >= 0 up to rounding (of float32 where
            the sweeps ran in it); ``+inf`` where rounding has to use a forbidden pair. ``Coupling.certificate`` measures the
            gap itself.
        iterations: sweeps over both sides and Newton steps, int64.
        codes: ``Status`` of every problem, int8.
        tolerance: the marginal error that was asked for.
        taus: ``(tau_a, tau_b)``.
        conditioning: of the derivative of the plan: smallest eigenvalue seen of I - S^T R, with R and S the conditionals of
            the plan given source and target; one minus the squared correlation that a sweep multiplies errors by. Filled
            in by the backward pass, NaN before, and where the derivative needed no linear solve.
        engine: which engine found them, and why; see ``sinkformer.use_backend``.
    """

    f: Potential
    g: Potential
    value: PerProblem
    marginal_error: PerProblem
    duality_gap: PerProblem
    iterations: PerProblem
    codes: PerProblem
    tolerance: float
    taus: tuple[float, float]
    conditioning: PerProblem
    engine: Choice

    @property
    def potentials(self) -> tuple[Potential, Potential]:
        """``(f, g)``."""
        return self.f, self.g

    @property
    def converged(self) -> Tensor:
        """Bool, ``(*batch)``."""
        return self.codes == Status.CONVERGED

    @property
    def status(self) -> Status | list:
        """``Status`` of a single problem; a (nested) list of them for a batch."""

        def name(code: Any) -> Any:
            return [name(c) for c in code] if isinstance(code, list) else Status(code)

        return name(self.codes.tolist())

    @property
    def worst(self) -> tuple[int, ...] | None:
        """Index of the problem to worry about: the gravest status, then the largest marginal error; None if all converged."""
        if not self.codes.count_nonzero().item():  # CONVERGED is zero
            return None
        gravest = self.codes == self.codes.max()
        error = torch.where(gravest, self.marginal_error.nan_to_num(torch.inf), -1.0)
        return tuple(int(i) for i in np.unravel_index(int(error.argmax()), tuple(self.codes.shape)))

    def map(self, function: Callable[[Tensor], Tensor]) -> Solution:
        """Apply a function to every tensor."""
        tensors = {
            x.name: function(getattr(self, x.name)) for x in fields(self) if isinstance(getattr(self, x.name), Tensor)
        }
        return replace(self, **tensors)

    def transposed(self) -> Solution:
        """The same solution with source and target exchanged."""
        return replace(self, f=self.g, g=self.f, taus=self.taus[::-1])

    def __repr__(self) -> str:
        """Status, iterations and marginal error; counts and the worst for a batch."""
        if not self.codes.dim():
            return (
                f"Solution({Status(int(self.codes)).name}, iterations={int(self.iterations)}, "
                f"marginal_error={float(self.marginal_error):.2e})"
            )
        if not self.codes.numel():
            return f"Solution(batch={tuple(self.codes.shape)}, empty)"
        worst = float(self.marginal_error.nan_to_num(torch.inf).max())
        return (
            f"Solution(batch={tuple(self.codes.shape)}, converged={int(self.converged.sum())} of {self.codes.numel()}, "
            f"worst marginal_error={worst:.2e})"
        )


def report(solution: Solution, on_failure: OnFailure) -> None:
    """Warn or raise, once, about the problems that did not converge, naming the worst."""
    worst = None if on_failure == "ignore" else solution.worst
    if worst is None:
        return
    status = Status(int(solution.codes[worst]))
    if status is Status.MAX_ITERATIONS and solution.tolerance == 0:
        return  # all iterations is what was asked for
    failed = int((~solution.converged).sum())
    where = (
        f"problem {list(worst)}, the worst of {failed} that failed in a batch of {solution.codes.numel()}: "
        if worst
        else ""
    )
    numbers = (
        f"marginal error {float(solution.marginal_error[worst]):.2e} after {int(solution.iterations[worst])} iterations"
    )
    message = f"{where}{status.name}, {numbers}, tolerance {solution.tolerance:.1e}: {status.explanation}"
    if status is Status.INFEASIBLE:
        raise InfeasibleError(message)
    if status is Status.NONFINITE:
        raise NonFiniteError(message)
    if on_failure == "raise":
        raise ConvergenceError(message)
    warnings.warn(message, ConvergenceWarning, stacklevel=_caller())


def _caller() -> int:
    """The stack level of the first frame outside this package, as seen by the function that calls this one."""
    package, level, frame = str(Path(__file__).parent), 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    return level
