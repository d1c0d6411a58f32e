"""Many small problems on a GPU in one launch: each is solved by one program, in registers, for as long as it needs itself.

The twin of ``sinkformer.ops.cpu``: the same arguments, the same results. triton is imported when a kernel is first asked for.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkformer.ops.cpu import Solved
from sinkformer.ops.triton import current, interpreted

# Atoms of a side. A tile of twice as many would fill all registers of a processor, 256 KiB.
MOST_ATOMS = 128
_FEWEST = 16
# A float32 sum of the sweeps differs from the float64 measurement by about so much.
_MARGIN = 3e-6
_MOST_SWEEPS = 2**31 - 1
# Registers of a thread: with so many the sweeps keep theirs, and four programs of 64 x 64 atoms share a processor. What is
# done once in a problem may go to memory.
_REGISTERS = 128
# Of conjugate gradients, for the largest problem.
_MOST_STEPS = 532


def supports(n: int, m: int, dtype: torch.dtype) -> str | None:
    """Why problems of n x m atoms with costs of a dtype are not for these kernels, or None if they are."""
    if dtype not in (torch.float32, torch.float64):
        return f"the kernels of small problems take costs in float32 or float64, received {dtype}"
    if not (0 < n <= MOST_ATOMS and 0 < m <= MOST_ATOMS):
        return f"the kernels of small problems take 1 to {MOST_ATOMS} atoms a side, received {n} and {m}"
    return None


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
    """Solve a flat batch of balanced problems of up to ``MOST_ATOMS`` atoms, each by itself, in one launch.

    Args:
        cost: ``(B, n, m)``, float32 or float64, which is also the precision of the sweeps; errors and potentials are
            float64. +inf forbids a pair.
        a: weights ``(B, n)``, float64; zero is padding, next to which costs may be anything.
        b: weights ``(B, m)``, float64.
        epsilon: ``(B,)``, float64.
        tolerance: L1 marginal error to reach.
        budget: most sweeps of a problem.
        patience: most sweeps are also ``patience`` (min(n, m) - 1)^2, of the atoms of positive weight.
        masked_budget: most sweeps of a problem with forbidden pairs, which may have no solution.
        start: potentials g ``(B, m)`` to start from, float64.
    """
    (B, n), m = a.shape, b.shape[-1]
    f, g, report = a.new_empty((B, n)), b.new_empty((B, m)), epsilon.new_empty((B, 5))
    goal = 0.99 * tolerance - (_MARGIN if cost.dtype == torch.float32 else 0.0)
    budgets = [min(int(budget if most is None else most), _MOST_SWEEPS) for most in (budget, patience, masked_budget)]
    problem = [_aligned(cost), *(t.contiguous() for t in (a, b, epsilon, g if start is None else start))]
    # Scalars are float32 in a kernel: a tolerance must not grow by it.
    arguments = (*problem, f, g, report, n, m, problem[0].stride(1), tolerance * (1 - 1e-6), goal, *budgets)
    constants = {"WARM": start is not None, "N": _tile(n), "M": _tile(m)}
    _launch(_kernels("solve").solve, B, arguments, constants, cost.dtype)
    error, gap, value = report[:, 0], report[:, 1], report[:, 2]
    codes = report[:, 4].masked_fill(error <= tolerance, 0.0).to(torch.int8)
    return Solved(f, g, error, gap, value, report[:, 3].to(torch.int64), codes)


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
    (B, n), m = a.shape, b.shape[-1]
    most = min(_MOST_STEPS, 4 * m + 20)
    problem = [_aligned(cost), *(t.contiguous() for t in (a, b, epsilon, f, g, on_f, on_g))]
    pull, report = torch.empty_like(problem[0]), epsilon.new_empty((B, 2))
    scratch = epsilon.new_empty((B, 2, most))
    arguments = (*problem, scratch, pull, report, n, m, problem[0].stride(1), most, float(rtol))
    constants = {"N": _tile(n), "M": _tile(m)}
    _launch(_kernels("derivative").pull_back, B, arguments, constants, torch.float64)
    return pull[..., :m], report[:, 0], report[:, 1]


def _kernels(name: str) -> Any:
    return importlib.import_module(f"sinkformer.ops.triton.small_{name}")


def _aligned(cost: Tensor) -> Tensor:
    """Costs in rows that start at multiples of 16 entries, as the layout of the tiles needs them: one kernel for all sizes."""
    cost = cost.detach()
    return torch.nn.functional.pad(cost, (0, -cost.shape[-1] % 16)).contiguous()


def _tile(size: int) -> int:
    return max(_FEWEST, 1 << (size - 1).bit_length())


def _options(N: int, M: int, dtype: torch.dtype) -> dict[str, int]:
    """Of a launch: 32 entries of float32, or 8 of float64, for each thread."""
    warps = min(16, max(1, N * M // (1024 if dtype == torch.float32 else 256)))
    return {"num_warps": warps, "maxnreg": _REGISTERS, "enable_fp_fusion": True}


def _launch(kernel: Any, count: int, arguments: tuple, constants: dict[str, Any], dtype: torch.dtype) -> None:
    """One program for each problem, on the device of the arguments."""
    if not count:
        return
    # The interpreter's numbers are numpy's, which warns where a row has lost its mass.
    silent = np.errstate(all="ignore") if interpreted() else contextlib.nullcontext()
    with current(arguments[0].device), silent:
        kernel[(count,)](*arguments, **constants, **_options(constants["N"], constants["M"], dtype))
