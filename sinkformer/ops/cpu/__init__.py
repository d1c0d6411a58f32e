"""The CPU kernels behind torch tensors: which problems run on which thread, compiled once and said when it happens.

numba is imported here and in ``kernels`` only, and only when a kernel is first asked for.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sinkformer.errors import BackendError

_log = logging.getLogger("sinkformer")
_lock = threading.Lock()
_unavailable: str | None = None
_kernels: Any = None

# Passes over a problem that its work is guessed from.
_PASSES = 20
# Below this many multiplications (about a millisecond) a second thread costs more than it saves.
_WORK_PER_THREAD = 2**22
# Parts of the batch for every thread: their lengths are not known in advance, so that each takes the next when done.
_PARTS = 4
# About a tenth of a second.
_WORK_PER_PART = 2**28
# A float32 sum of the sweeps differs from the float64 measurement by about so much.
_MARGIN = 3e-6


class Solved(NamedTuple):
    """What the kernel found: potentials ``(B, n)`` and ``(B, m)``, and per problem float64 numbers and integer codes."""

    f: Tensor
    g: Tensor
    error: Tensor
    gap: Tensor
    value: Tensor
    sweeps: Tensor
    codes: Tensor


def unavailable() -> str | None:
    """Why the kernels cannot run in this process, or None if they can."""
    _load()
    return _unavailable


def _load() -> Any:
    """The module of kernels, imported once; None if numba cannot be."""
    global _kernels, _unavailable
    with _lock:
        if _kernels is None and _unavailable is None:
            try:
                importlib.import_module("numba")
            except ImportError as error:  # absent, or refusing the numpy it finds
                _unavailable = f"numba cannot be imported ({error}); pip install 'sinkformer[fast]'"
                return None
            _announce_compilation()
            _kernels = importlib.import_module("sinkformer.ops.cpu.kernels")
        return _kernels


def _announce_compilation() -> None:
    """One line in the log when numba compiles a kernel instead of finding it in its cache."""
    event = importlib.import_module("numba.core.event")

    class Announcer(event.Listener):
        def on_start(self, event: Any) -> None:
            function = event.data["dispatcher"].py_func
            if function.__module__ == "sinkformer.ops.cpu.kernels" and not function.__name__.startswith("_"):
                _log.warning(
                    "compiling the CPU kernel %r (about 20 s, once per machine and precision; "
                    "sinkformer.warm_up() does it at a time of your choosing)",
                    function.__name__,
                )

        def on_end(self, event: Any) -> None:
            pass

    event.register("numba:compile", Announcer())


def warm_up() -> float:
    """Compile the CPU kernels, or load them from the cache; returns the seconds it took.

    Without this the first call of :func:`sinkformer.sinkhorn` does it, and says so in the log of ``sinkformer``.

    Raises:
        BackendError: numba is not installed.
    """
    if (reason := unavailable()) is not None:
        raise BackendError(f"there are no kernels to warm up: {reason}")
    started = time.perf_counter()
    half = torch.full((1, 2), 0.5, dtype=torch.float64, device="cpu")
    one = torch.ones(1, dtype=torch.float64, device="cpu")
    for dtype in (torch.float32, torch.float64):
        cost = torch.zeros((1, 2, 2), dtype=dtype, device="cpu")
        solved = solve(cost, half, half, one, tolerance=1e-3, budget=10)
    pull_back(cost, half, half, one, solved.f, solved.g, half, -half, rtol=1e-3)
    return time.perf_counter() - started


def solve(
    cost: Tensor,
    a: Tensor,
    b: Tensor,
    epsilon: Tensor,
    *,
    tolerance: float,
    budget: int,
    patience: int | None = None,
    masked_budget: int | None = None,
    start: Tensor | None = None,
) -> Solved:
    """Solve a flat batch of balanced problems, each by itself.

    Args:
        cost: ``(B, n, m)``, float32 or float64, which is also the precision of the sweeps; errors and potentials are
            float64. +inf forbids a pair.
        a: weights ``(B, n)``, float64; zero is padding, next to which costs may be anything.
        b: weights ``(B, m)``, float64.
        epsilon: ``(B,)``, float64.
        tolerance: L1 marginal error to reach.
        budget: most sweeps of a problem.
        masked_budget: most sweeps of a problem with forbidden pairs, which may have no solution.
        patience: most sweeps are also ``patience`` (min(n, m) - 1)^2; for whoever has something better for small problems.
        start: potentials g ``(B, m)`` to start from, float64.
    """
    (B, n), m = a.shape, b.shape[-1]
    problem = [_numpy(t) for t in (cost, a, b, epsilon)]
    f, g, report = np.zeros((B, n)), np.zeros((B, m)) if start is None else _numpy(start).copy(), np.empty((B, 5))
    goal = 0.99 * tolerance - (_MARGIN if problem[0].dtype == np.float32 else 0.0)
    budgets = [int(budget if most is None else most) for most in (budget, patience, masked_budget)]
    arguments = (*problem, f, g, start is not None, float(tolerance), goal, *budgets, report)
    _in_parts(_load().solve, a, b, arguments)
    numbers = (report[:, 0], report[:, 1], report[:, 2], report[:, 3].astype(np.int64), report[:, 4].astype(np.int8))
    return Solved(*map(torch.from_numpy, (f, g, *numbers)))


def pull_back(
    cost: Tensor,
    a: Tensor,
    b: Tensor,
    epsilon: Tensor,
    f: Tensor,
    g: Tensor,
    on_f: Tensor,
    on_g: Tensor,
    *,
    rtol: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(derivative, residual, conditioning)``: of <on_f, f> + <on_g, g> in the costs, ``(B, n, m)``, in their dtype.

    Arguments as for ``solve``; cotangents float64, zero at atoms of weight zero. The relative residual of the conjugate
    gradients and the smallest Ritz value, which estimates 1 - lambda, are float64, ``(B,)``.
    """
    # In float64 alone: a second precision would be a second compilation, for a few products with the plan.
    wide = cost.detach().to(torch.float64)
    pull = torch.zeros_like(wide, memory_format=torch.contiguous_format)
    report = epsilon.new_empty((len(a), 2))
    arguments = [_numpy(t) for t in (wide, a, b, epsilon, f, g, on_f, on_g)]
    _in_parts(_load().pull_back, a, b, (*arguments, float(rtol), _numpy(pull), _numpy(report)))
    return pull.to(cost.dtype), report[:, 0], report[:, 1]


def _numpy(t: Tensor) -> np.ndarray:
    return t.contiguous().numpy(force=True)


def _in_parts(kernel: Callable[..., None], a: Tensor, b: Tensor, arguments: Sequence) -> None:
    """Call the kernel on all problems, on as many threads as torch may use and the work is worth.

    The threads are started for this call, so that a forked process has none to miss; the kernel holds no lock of Python.
    """
    count = len(a)
    work = _PASSES * count * a.shape[-1] * b.shape[-1]
    threads = min(torch.get_num_threads(), count, 1 + work // _WORK_PER_THREAD)
    # In parts even for one thread, so that an interrupt is heard between two of them.
    parts = min(count, threads * _PARTS if threads > 1 else 1 + work // _WORK_PER_PART)
    storage, dtype = _kernels.storage(a.shape[-1], b.shape[-1]), arguments[0].dtype
    if parts <= 1:
        kernel(np.arange(count), np.empty(storage, dtype), *arguments)
        return
    kernel(np.arange(0), np.empty(0, dtype), *arguments)  # compiled before any thread starts
    sizes = ((a > 0).sum(-1) * (b > 0).sum(-1)).numpy()
    order = np.argsort(-sizes, kind="stable")
    waiting, failures = [np.ascontiguousarray(order[k::parts]) for k in reversed(range(parts))], []

    def work_on() -> None:
        try:
            store = np.empty(storage, dtype)
            while waiting:
                try:
                    which = waiting.pop()
                except IndexError:  # another thread was faster
                    return
                kernel(which, store, *arguments)
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            failures.append(error)
            waiting.clear()

    workers = [threading.Thread(target=work_on, daemon=True) for _ in range(threads - 1)]
    try:
        for worker in workers:
            worker.start()
        work_on()
        for worker in workers:
            worker.join()
    finally:
        waiting.clear()
    if failures:
        raise failures[0]
