"""How far, and how exactly, the columns of attention are normalised."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from numbers import Integral, Real
from typing import Literal

from sinkformer.errors import ConfigError
from sinkformer.solvers import Gradient

Marginals = Literal["both", "queries"]

# Sweeps if no number is given. Where scores have standard deviation 0.5, as in a fresh layer, the shares of the keys are then
# right to rounding of float32 (L1), for 1 to 1e-4, for 2 to 2e-3, for 3 to 2e-2: see docs/attention.md.
SWEEPS = 5
# Sweeps at most, if a tolerance is given and no number.
MOST_SWEEPS = 2000


@dataclass(frozen=True)
class Options:
    """The options of transport attention, complete and within their ranges.

    Attributes:
        tau: hardness of the keys' marginal: 1 for a coupling, 0 for softmax.
        iterations: sweeps, or the most of them if there is a tolerance.
        tolerance: marginal error to reach; None makes all iterations.
        gradient: of the solution, or of the sweeps made.
    """

    tau: float
    iterations: int
    tolerance: float | None
    gradient: Gradient

    @classmethod
    def of(
        cls,
        marginals: Marginals = "both",
        tau: float | None = None,
        iterations: int | None = None,
        tolerance: float | None = None,
        gradient: Gradient | None = None,
    ) -> Options:
        """Check what a user said, and fill in the rest.

        Raises:
            ConfigError: an option outside its range, or two that contradict each other.
        """
        if marginals not in ("both", "queries"):
            raise ConfigError(f"expected marginals 'both' or 'queries', received {marginals!r}")
        if tau is not None and (isinstance(tau, bool) or not isinstance(tau, Real) or not 0 <= tau <= 1):
            raise ConfigError(
                f"expected tau = rho / (rho + 1) between 0 (softmax) and 1 (a coupling), received {tau!r}"
            )
        if marginals == "queries" and tau:
            raise ConfigError(
                f"expected no tau with marginals='queries', which leaves the keys free, received tau={tau}"
            )
        count = iterations is None or (isinstance(iterations, Integral) and not isinstance(iterations, bool))
        if not count or (iterations is not None and iterations < 1):
            raise ConfigError(
                f"expected iterations as an integer >= 1, received {iterations!r}; marginals='queries' makes none"
            )
        if tolerance is not None and (
            isinstance(tolerance, bool) or not isinstance(tolerance, Real) or not 0 < tolerance < inf
        ):
            raise ConfigError(f"expected a tolerance > 0 (L1 marginal error), received {tolerance!r}")
        if gradient not in ("implicit", "unrolled", None):
            raise ConfigError(f"expected gradient 'implicit' or 'unrolled', received {gradient!r}")
        if gradient == "implicit" and tolerance is None:
            raise ConfigError(
                "expected gradient 'unrolled' with a fixed number of iterations: implicit derivatives are those of the "
                "solution, which few sweeps do not reach; pass tolerance="
            )
        hardness = 0.0 if marginals == "queries" else 1.0 if tau is None else float(tau)
        fixed = tolerance is None
        return cls(
            tau=hardness,
            iterations=int(iterations) if iterations is not None else SWEEPS if fixed else MOST_SWEEPS,
            tolerance=None if tolerance is None else float(tolerance),
            gradient=gradient or ("unrolled" if fixed else "implicit"),
        )
