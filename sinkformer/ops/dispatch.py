"""Which engine solves a problem, and why.

=============  =====================================================================================================
``cpu``        compiled kernels (extra ``[fast]``), for couplings on the CPU: many small problems, or a large one
``absorbed``   plain torch on any device: the kernel exp((f + g - C) / epsilon) absorbed, sweeps are matrix products
``streamed``   plain torch in blocks of rows: nothing of size n x m is ever stored
``reference``  plain torch, log-domain, every sweep with its exponentials: the truth the others are compared with
=============  =====================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, get_args

import torch

from sinkformer.errors import BackendError, ConfigError, DTypeError
from sinkformer.ops import cpu

Backend = Literal["cpu", "absorbed", "streamed", "reference"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

# Pairs of a problem beyond which no matrix is stored: 1 GiB in float64.
MOST_STORED = 2**27

_UNROLLED = "gradient='unrolled' differentiates the log-domain sweeps"

_forced: ContextVar[Backend | None] = ContextVar("sinkformer_backend", default=None)


class Choice(NamedTuple):
    """The engine of a solution and the reason it was chosen."""

    backend: Backend
    reason: str

    def __str__(self) -> str:
        """One sentence."""
        return f"{self.backend}: {self.reason}"


@contextmanager
def use_backend(backend: Backend | None) -> Iterator[None]:
    """Solve everything inside with one engine; ``None`` chooses by the problem, as outside. Per thread and task.

    Raises:
        ConfigError: no engine of that name.
        BackendError: when a problem is solved that the engine cannot solve; it says why.
    """
    if backend is not None and backend not in BACKENDS:
        raise ConfigError(f"expected a backend of {', '.join(BACKENDS)} or None, received {backend!r}")
    token = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(token)


def choose(device: torch.device, taus: tuple[float, float], pairs: int, *, unrolled: bool, from_points: bool) -> Choice:
    """The engine for a batch of problems.

    Args:
        device: of the measures.
        taus: hardness of the marginals; the compiled kernels solve couplings, taus (1, 1).
        pairs: n m of one problem.
        unrolled: whether the sweeps themselves are differentiated.
        from_points: whether the cost is a function of points without a mask, so that its rows can be made when needed.

    Raises:
        BackendError: the engine asked for by ``use_backend`` cannot solve them.
    """
    forced = _forced.get()
    if forced is not None:
        refusal = None
        if forced == "cpu":
            refusal = _refusal_of_the_kernels(device, taus, unrolled)
        elif unrolled and forced == "absorbed":
            refusal = _UNROLLED
        elif unrolled and forced == "streamed":
            refusal = "gradient='unrolled' stores every sweep"
        if refusal is not None:
            raise BackendError(f"the backend {forced!r} was asked for and cannot solve this problem: {refusal}")
        return Choice(forced, "asked for by use_backend")
    if unrolled:
        return Choice("reference", _UNROLLED)
    if from_points and pairs > MOST_STORED:
        return Choice("streamed", f"{pairs} pairs in one problem are more than the {MOST_STORED} that are stored")
    # Asked last: it imports numba.
    refusal = _refusal_of_the_kernels(device, taus, unrolled)
    if refusal is None:
        return Choice("cpu", "couplings on the CPU, and numba is there")
    return Choice("absorbed", f"not cpu: {refusal}")


def explain(solved: Any) -> str:
    """Which engine found a solution, and why it was chosen: one sentence.

    Args:
        solved: a ``Solution``, or a coupling that has one or was rounded from one that has.

    Raises:
        DTypeError: neither of them.
    """
    solved = getattr(solved, "base", solved)  # what a rounded coupling was made from
    choice = getattr(getattr(solved, "solution", solved), "engine", None)
    if not isinstance(choice, Choice):
        raise DTypeError(
            f"expected a Solution, or a coupling that was solved, received {type(solved).__name__}; "
            f"a coupling made from a given plan has no engine"
        )
    return str(choice)


def _refusal_of_the_kernels(device: torch.device, taus: tuple[float, float], unrolled: bool) -> str | None:
    if device.type != "cpu":
        return f"the compiled kernels run on the CPU, the measures are on {device}"
    if taus != (1.0, 1.0):
        return f"the compiled kernels solve couplings (tau_a = tau_b = 1), received taus {taus}"
    if unrolled:
        return _UNROLLED
    return cpu.unavailable()
