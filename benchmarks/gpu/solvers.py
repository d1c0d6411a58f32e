"""Who is timed: the engines of sinkformer, the same sums in plain and in compiled torch, and peers that are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import sinkformer as sf
from benchmarks.gpu.problems import Clouds

Potentials = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Solver:
    """One way to solve a batch.

    Attributes:
        name: in the table.
        run: ``(clouds) -> (f, g)``, the plan being a b exp((f + g - C) / epsilon).
        share: of the batch that is run; its time is scaled up by the inverse, and the table says so.
    """

    name: str
    run: Callable[[Clouds], Potentials]
    share: float = 1.0


def sinkformer(
    backend: str, *, iterations: int | None = None, tolerance: float | None = None, matrix: bool = False
) -> Solver:
    """One of our engines: so many iterations, or to a tolerance; from points, or from a matrix of costs in float32."""

    def run(clouds: Clouds) -> Potentials:
        with sf.use_backend(backend), torch.no_grad():
            solution = sf.sinkhorn(
                clouds.a if matrix else sf.Measure(clouds.x, clouds.a),
                clouds.b if matrix else sf.Measure(clouds.y, clouds.b),
                cost=clouds.costs() if matrix else sf.SqEuclidean(),
                epsilon=clouds.epsilon,
                tolerance=0.0 if iterations is not None else tolerance,
                max_iterations=iterations or 5000,
                on_failure="ignore",
            )
        return solution.potentials

    return Solver(f"sinkformer, {backend}", run)


def plain_torch(iterations: int, *, compiled: bool = False) -> Solver:
    """Log-domain sweeps over a stored cost matrix."""

    def sweep(costs: Tensor, g: Tensor, log_a: Tensor, log_b: Tensor) -> Potentials:
        f = -torch.logsumexp((g + log_b).unsqueeze(-2) - costs, -1)
        return f, -torch.logsumexp((f + log_a).unsqueeze(-1) - costs, -2)

    step = torch.compile(sweep) if compiled else sweep

    def run(clouds: Clouds) -> Potentials:
        scale = clouds.epsilon.unsqueeze(-1)
        costs, f, g = clouds.costs() / scale.unsqueeze(-1), torch.zeros_like(clouds.a), torch.zeros_like(clouds.b)
        log_a, log_b = (w.clamp_min(1e-30).log() for w in (clouds.a, clouds.b))
        for _ in range(iterations):
            f, g = step(costs, g, log_a, log_b)
        return f * scale, g * scale

    return Solver("compiled torch, log domain" if compiled else "plain torch, log domain", run)


def pot(method: str, iterations: int) -> Solver:
    """POT on torch tensors: ``sinkhorn`` multiplies by the kernel, ``sinkhorn_log`` stays in the log domain."""

    def run(clouds: Clouds) -> Potentials:
        import ot

        a, b, epsilon = clouds.a[0], clouds.b[0], float(clouds.epsilon[0])
        a, b = a / a.sum(), b / b.sum()
        *_, log = ot.sinkhorn(
            a, b, clouds.costs()[0], epsilon, method=method, numItermax=iterations, stopThr=0.0, log=True, warn=False
        )
        u, v = (log["log_u"], log["log_v"]) if "log_u" in log else (log["u"].log(), log["v"].log())
        return (epsilon * (u - a.log())).unsqueeze(0), (epsilon * (v - b.log())).unsqueeze(0)

    return Solver(f"POT {method}", run)


def pot_batch(iterations: int) -> Solver:
    """POT's batched log-domain loop. It has one epsilon for all problems, so costs are scaled instead."""

    def run(clouds: Clouds) -> Potentials:
        import ot

        scale = clouds.epsilon.unsqueeze(-1)
        result = ot.solve_batch(
            clouds.costs() / scale.unsqueeze(-1),
            reg=1.0,
            a=clouds.a,
            b=clouds.b,
            max_iter=iterations,
            tol=0.0,
            method="log_sinkhorn",
            grad="detach",
        )
        u, v = result.potentials
        f, g = (h - w.clamp_min(1e-30).log() for h, w in ((u, clouds.a), (v, clouds.b)))
        return f * scale, g * scale

    return Solver("POT solve_batch, log", run)


def flash_sinkhorn(kind: str, iterations: int, *, tf32: bool) -> Solver:
    """flash-sinkhorn, problem by problem: it loops over a batch itself."""

    def run(clouds: Clouds) -> Potentials:
        from flash_sinkhorn import sinkhorn_solvers

        found = []
        for i in range(len(clouds)):
            one, epsilon = clouds.at(i), float(clouds.epsilon[i])
            points = (one.x[0].contiguous(), one.y[0].contiguous(), one.a[0].contiguous(), one.b[0].contiguous())
            if kind == "alternating":
                f, g = sinkhorn_solvers.sinkhorn_flashstyle_alternating(
                    *points, eps=epsilon, n_iters=iterations, allow_tf32=tf32
                )[:2]
            else:
                f, g = sinkhorn_solvers.sinkhorn_flashstyle_symmetric(
                    *points, eps=epsilon, n_iters=iterations, use_epsilon_scaling=False, allow_tf32=tf32
                )[:2]
            found.append((f, g))
        f, g = (torch.nn.utils.rnn.pad_sequence([pair[side] for pair in found], batch_first=True) for side in (0, 1))
        return f, g

    return Solver(f"flash-sinkhorn, {kind}, {'TF32' if tf32 else 'IEEE'}", run)


def installed(package: str) -> bool:
    """Whether a peer can be imported."""
    return importlib.util.find_spec(package) is not None


def sampled(solver: Solver, share: float) -> Solver:
    """The same on the first problems of a batch only."""

    def run(clouds: Clouds) -> Potentials:
        part = slice(0, max(1, round(share * len(clouds))))
        return solver.run(Clouds(clouds.x[part], clouds.y[part], clouds.a[part], clouds.b[part], clouds.epsilon[part]))

    return Solver(f"{solver.name}, {share:.3g} of the batch", run, share)
