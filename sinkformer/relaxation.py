"""Over-relaxation: how far beyond the plain update every problem of a batch goes, chosen from the errors seen.

A sweep multiplies the error by lambda, the squared second singular value of the normalised plan. Going the fraction t
further at each half step, u <- u x^(1+t) with x = a / (u K v), makes that t itself at the best choice

    t = (1 - sqrt(1 - lambda)) / (1 + sqrt(1 - lambda))

(Young 1971 for linear systems; Thibault, Chizat, Dossal, Papadakis 2021 for transport): about the square root of the
number of sweeps. lambda is not known. It is first estimated from plain sweeps, then corrected by the rate observed.

The memory of a batch are a few numbers of each problem, looked at once in about ten sweeps: they are kept by the host.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from torch import Tensor

# No relaxation before the error is this small, nor while lambda is less than this: plain sweeps are fast enough.
_NEAR, _WORTHWHILE = 0.5, 0.3
# Largest first estimate of lambda while the error is at least _EARLY: the slow mode has not separated yet.
_CAUTIOUS, _EARLY = 0.9, 0.1
# Above this error the iteration may run in a circle.
_FAR = 0.05
_LARGEST = 0.97
# A rate this much above t says that t is too small.
_SLACK = 0.02
# Checks without gain that make a circle, and plain ones after it.
_PATIENCE, _REST = 8, 4


def relaxed(scaling: Tensor, product: Tensor, weights: Tensor, t: Tensor | float) -> Tensor:
    """The scaling u after u <- u x h(x), x = weights / (u product), h(x) = ((1+t) x + 1-t) / ((1-t) x + 1+t).

    h is the Pade form of x^t: positive, increasing, h(1/x) = 1/h(x), equal to the power to third order at x = 1, and
    without a power or a logarithm. t = 0 is the plain update. Every argument is positive and broadcasts.
    """
    current = scaling * product
    return weights / product * ((1 + t) * weights + (1 - t) * current) / ((1 - t) * weights + (1 + t) * current)


@dataclass
class Relaxation:
    """What is remembered of every problem of a flat batch; all fields are arrays ``(B,)``.

    Attributes:
        t: relaxation in use; 0 is plain.
        gap: 1 - lambda as estimated; while t is 0, the least that the next estimate may be.
        cap: largest t allowed.
        best: smallest error so far.
        previous: error at the last check.
        rate: factor per sweep by which the error shrank in the last window between checks.
        stalled: checks, far from the solution, since the error last fell by a tenth.
        resting: checks for which t stays 0.
    """

    t: np.ndarray
    gap: np.ndarray
    cap: np.ndarray
    best: np.ndarray
    previous: np.ndarray
    rate: np.ndarray
    stalled: np.ndarray
    resting: np.ndarray

    @classmethod
    def start(cls, size: int) -> Relaxation:
        """Nothing is known yet: plain sweeps."""
        zero, none, unknown = np.zeros(size), np.zeros(size, int), np.full(size, np.inf)
        return cls(zero, zero, np.full(size, _LARGEST), unknown, unknown, zero, none, none)

    def at(self, index: Tensor | np.ndarray) -> Relaxation:
        """The memory of some of the problems."""
        index = _array(index)
        return Relaxation(*(getattr(self, x.name)[index] for x in fields(self)))

    def put(self, index: Tensor | np.ndarray, other: Relaxation) -> Relaxation:
        """This memory with that of some problems replaced."""
        merged = Relaxation(*(getattr(self, x.name).copy() for x in fields(self)))
        merged.take(index, other)
        return merged

    def take(self, index: Tensor | np.ndarray, other: Relaxation) -> None:
        """Replace that of some problems in place."""
        index = _array(index)
        for x in fields(self):
            getattr(self, x.name)[index] = getattr(other, x.name)

    def update(self, error: Tensor | np.ndarray, sweeps: int, quotient: Tensor | np.ndarray) -> np.ndarray:
        """Choose t for the next sweeps.

        Args:
            error: L1 marginal error of every problem, now.
            sweeps: how many were made since the last call; 0 only records the error.
            quotient: estimate of lambda, a Rayleigh quotient of one plain sweep at the present violation; used where t
                is 0.

        Returns:
            ``t``.
        """
        error, quotient = _array(error), _array(quotient)
        if sweeps:
            with np.errstate(all="ignore"):
                self._choose(error, sweeps, quotient)
        self.previous, self.best = error, np.fmin(self.best, error)
        return self.t

    def _choose(self, error: np.ndarray, sweeps: int, quotient: np.ndarray) -> None:
        t, gap, far, running = self.t, self.gap, error > _FAR, self.t > 0
        rate = (error / self.previous) ** (1 / sweeps)

        # Too little: by the rate of two windows, since one may be noise. Young's formula, trusted to a quarter of the gap.
        observed = np.fmin(rate, self.rate)
        young = 1 - (observed + t) ** 2 / ((1 + t) ** 2 * observed)
        little = running & (observed > t + _SLACK) & (observed < 1)
        gap = np.where(little, np.fmin(np.fmax(young, gap / 4), gap), gap)
        # Too much: beyond the best choice the rate is t, whatever lambda is.
        gap = gap * (1 + 0.1 * (running & (rate < t)))

        # Switching on makes a hump in the error, which is no divergence.
        diverged = running & ~((error <= 10 * self.best) | (error <= 3 * self.previous))
        gap = gap * (1 + diverged)
        # The iteration may run in a circle: far from the solution it starts again, near it the circle is a small one.
        stalled = (self.stalled + 1) * ~(error < 0.9 * self.best)
        tired = running & (stalled >= _PATIENCE)
        circle = tired & far
        gap = gap * (1 + 3 * tired) * ~circle

        resting = np.where(circle, _REST, np.maximum(self.resting - 1, 0))
        begin = ~running & (resting == 0) & (error < _NEAR) & (quotient > _WORTHWHILE)
        first = np.where(error >= _EARLY, np.fmin(quotient, _CAUTIOUS), quotient)
        self.gap = np.fmin(np.where(begin, np.fmax(np.fmax(1 - first, 1e-8), gap), gap), 1.0)
        self.cap = np.where(circle, 0.75 * self.cap, np.where(far, self.cap, _LARGEST))
        root = np.sqrt(self.gap)
        on = begin | (running & ~diverged & ~circle)
        self.t = np.fmin((1 - root) / (1 + root), self.cap) * on
        self.rate, self.stalled, self.resting = rate, stalled * ~tired, resting


def _array(x: Tensor | np.ndarray) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.detach().cpu().numpy()
