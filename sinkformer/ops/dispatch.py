"""Which engine solves a problem, and why.

===================  ================================================================================================
``cpu``              compiled kernels (extra ``[fast]``), for couplings on the CPU: many small problems, or a large one
``absorbed``         plain torch on any device: the kernel exp((f + g - C) / epsilon) absorbed, sweeps are matrix products
``streamed``         plain torch in blocks of rows: nothing of size n x m is ever stored
``reference``        plain torch, log-domain, every sweep with its exponentials: the truth the others are compared with
``triton_small``     GPU kernels (extra ``[gpu]``), for couplings of up to 128 atoms a side: one launch for a batch
``triton_stored``    GPU kernels, for large couplings of points under inner products or squared distances: the kernel is
                     absorbed into 2 bytes a pair, and read once a sweep
``triton_streamed``  GPU kernels for the same costs and any penalty: scores are made where they are summed, none is stored
===================  ================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

from sinkformer.errors import BackendError, ConfigError, DTypeError
from sinkformer.ops import cpu, triton
from sinkformer.ops.triton import small

Backend = Literal["cpu", "absorbed", "streamed", "reference", "triton_small", "triton_stored", "triton_streamed"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

# Pairs of a problem beyond which no matrix is stored: 1 GiB in float64.
MOST_STORED = 2**27
# Pairs of a problem below which the passes of plain torch fill a GPU as badly as kernels would.
LEAST_FOR_KERNELS = 2**20
# Smaller marginal errors are beyond sums in float32, the only ones of the kernels for large problems.
LEAST_IN_FLOAT32 = 2e-5

# What sweeps, of the engines without a cost matrix: see ``streamed.PairCosts``.
SWEPT_BY: dict[Backend, Literal["torch", "streamed", "stored"]] = {
    "streamed": "torch",
    "triton_streamed": "streamed",
    "triton_stored": "stored",
}

_UNROLLED = "gradient='unrolled' differentiates the log-domain sweeps"

_forced: ContextVar[Backend | None] = ContextVar("sinkformer_backend", default=None)


class Choice(NamedTuple):
    """The engine of a solution and the reason it was chosen."""

    backend: Backend
    reason: str

    def __str__(self) -> str:
        """One sentence."""
        return f"{self.backend}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the choice looks at of a batch of problems.

    Attributes:
        device: of the measures.
        n, m: atoms a side.
        taus: hardness of the marginals; (1, 1) for couplings.
        unrolled: whether the sweeps themselves are differentiated.
        from_points: whether the cost is a function of points without a mask, so that its rows can be made when needed.
        inner_products: whether such a cost is made of inner products, which GPU kernels multiply themselves.
        narrow: whether sums in float32 are enough, by the dtype of the measures.
        tolerance: marginal error to reach.
    """

    device: torch.device
    n: int
    m: int
    taus: tuple[float, float] = (1.0, 1.0)
    unrolled: bool = False
    from_points: bool = False
    inner_products: bool = False
    narrow: bool = False
    tolerance: float = 1e-4

    @property
    def pairs(self) -> int:
        """Of one problem."""
        return self.n * self.m


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


def choose(asked: Asked) -> Choice:
    """The engine for a batch of problems.

    Raises:
        BackendError: the engine asked for by ``use_backend`` cannot solve them.
    """
    forced = _forced.get()
    if forced is not None:
        refusal = _REFUSALS[forced](asked)
        if refusal is not None:
            raise BackendError(f"the backend {forced!r} was asked for and cannot solve this problem: {refusal}")
        return Choice(forced, "asked for by use_backend")
    if asked.unrolled:
        return Choice("reference", _UNROLLED)
    found = _on_gpu(asked) if asked.device.type == "cuda" else None
    if found is not None:
        return found
    if asked.from_points and asked.pairs > MOST_STORED:
        return Choice("streamed", f"{asked.pairs} pairs in one problem are more than the {MOST_STORED} that are stored")
    # Asked last: it imports numba.
    refusal = _refused_by_cpu(asked)
    if refusal is None:
        return Choice("cpu", "couplings on the CPU, and numba is there")
    if asked.device.type == "cuda":
        return Choice("absorbed", f"not triton: {_without_kernels(asked)}")
    return Choice("absorbed", f"not cpu: {refusal}")


def sharded(count: int) -> Choice:
    """The engine for a problem whose rows are sharded over so many processes.

    Raises:
        BackendError: another one is asked for by ``use_backend``.
    """
    forced = _forced.get()
    if forced not in (None, "streamed"):
        raise BackendError(f"the backend {forced!r} was asked for and cannot solve this problem: its rows are sharded")
    return Choice("streamed", f"the rows of the source are sharded over {count} processes")


def _on_gpu(asked: Asked) -> Choice | None:
    """The kernels that suit a problem on a GPU; None if there are none."""
    if triton.interpreted():
        return None
    if _refused_by_small(asked) is None:
        return Choice("triton_small", f"{asked.n} x {asked.m} atoms fit on the chip, one program a problem")
    if asked.pairs < LEAST_FOR_KERNELS or _refused_by_streamed(asked) is not None or _too_fine(asked):
        return None
    needed, room = 2 * asked.pairs, _free_bytes(asked.device) // 2
    if _refused_by_stored(asked) is None and needed <= room:
        return Choice("triton_stored", f"the kernel takes {needed / 2**20:.0f} MiB in bfloat16, read once a sweep")
    reason = (
        "penalised marginals" if asked.taus != (1.0, 1.0) else f"a stored kernel would take {needed / 2**20:.0f} MiB"
    )
    return Choice("triton_streamed", f"{reason}; scores are made where they are summed")


def _without_kernels(asked: Asked) -> str:
    """Why none of the GPU kernels was chosen for a problem on a GPU."""
    if triton.interpreted():
        return "TRITON_INTERPRET is set, which is for tests"
    if max(asked.n, asked.m) <= small.MOST_ATOMS:
        return str(_refused_by_small(asked))
    fewer = f"{asked.pairs} pairs are fewer than the {LEAST_FOR_KERNELS} worth kernels of their own"
    return _refused_by_streamed(asked) or _too_fine(asked) or fewer


def _too_fine(asked: Asked) -> str | None:
    if asked.narrow and (asked.tolerance == 0 or asked.tolerance >= LEAST_IN_FLOAT32):  # zero: all iterations
        return None
    return f"marginal errors below {LEAST_IN_FLOAT32:.0e}, or float64 throughout, are beyond sums in float32"


def _free_bytes(device: torch.device) -> int:
    """Of the card, with what torch keeps for later: it does not depend on what ran before."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def kernels(backend: Backend) -> Any:
    """The module that solves a batch in one call, and differentiates it; None for engines that do not."""
    if backend == "triton_small":
        return small
    return cpu if backend == "cpu" else None


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


# Refusals: why an engine cannot solve a problem, None if it can -------------------------------------------------------


def _refused_by_cpu(asked: Asked) -> str | None:
    if asked.device.type != "cpu":
        return f"the compiled kernels run on the CPU, the measures are on {asked.device}"
    return _only_couplings("the compiled kernels solve", asked) or cpu.unavailable()


def _refused_by_small(asked: Asked) -> str | None:
    if max(asked.n, asked.m) > small.MOST_ATOMS:
        return f"one program has room for {small.MOST_ATOMS} atoms a side, received {asked.n} x {asked.m}"
    return _only_couplings("the kernels on the chip solve", asked) or triton.unavailable(asked.device)


def _refused_by_stored(asked: Asked) -> str | None:
    return _only_couplings("a stored kernel solves", asked) or _refused_by_streamed(asked)


def _refused_by_streamed(asked: Asked) -> str | None:
    if asked.unrolled:
        return "gradient='unrolled' stores every sweep"
    if not asked.inner_products:
        return (
            "the kernels make scores from inner products: the cost must be NegativeDot or SqEuclidean, without a mask"
        )
    return triton.unavailable(asked.device)


def _only_couplings(who: str, asked: Asked) -> str | None:
    if asked.taus != (1.0, 1.0):
        return f"{who} couplings (tau_a = tau_b = 1), received taus {asked.taus}"
    return _UNROLLED if asked.unrolled else None


_REFUSALS: dict[Backend, Callable[[Asked], str | None]] = {
    "cpu": _refused_by_cpu,
    "absorbed": lambda asked: _UNROLLED if asked.unrolled else None,
    "streamed": lambda asked: "gradient='unrolled' stores every sweep" if asked.unrolled else None,
    "reference": lambda asked: None,
    "triton_small": _refused_by_small,
    "triton_stored": _refused_by_stored,
    "triton_streamed": _refused_by_streamed,
}
