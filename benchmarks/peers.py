"""Every solver behind one interface, each in the best configuration that was found for it.

A ``Solver`` turns problems into a call without arguments, so that conversions are not timed, and reads its result. Solvers
without a tolerance that means the L1 error get help: a ladder of settings from loose to tight, of which the harness takes the
fastest that reaches the target, or the exact number of sweeps that plain Sinkhorn needs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sinkformer
from benchmarks.problems import Answer, Problems, gradient_error, loosest_l2_threshold, measured_error, plain_sweeps

Settings = dict[str, Any]
OURS, PLAIN_TORCH = "sinkformer (numba)", "sinkformer (plain torch)"


@dataclass(frozen=True)
class Solver:
    """A way to solve problems.

    Attributes:
        name: as it stands in the tables.
        package: module to import; a solver whose package is missing is skipped.
        ladder: (problems, target) -> settings to try, loosest first.
        prepare: (problems, settings) -> the call that is timed.
        error: (problems, result of the call) -> what is compared with the target.
        iterations: result of the call -> sweeps of the problem that took most, or None.
        safe: does not underflow at small epsilon.
        by_sweeps: runs a given number of sweeps, the key "sweeps" of its settings; may be extrapolated.
        monotone: looser settings are faster, so that the first which reaches the target is the fastest.
        patience: seconds for one call while settings are tried.
    """

    name: str
    package: str
    ladder: Callable[[Problems, float], list[Settings]]
    prepare: Callable[[Problems, Settings], Callable[[], Any]]
    error: Callable[[Problems, Any], float]
    iterations: Callable[[Any], int | None] = lambda result: None
    safe: bool = True
    by_sweeps: bool = False
    monotone: bool = True
    patience: float = math.inf

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


def _reads(read: Callable[[Problems, Any], Answer]) -> Callable[[Problems, Any], float]:
    return lambda problems, result: measured_error(problems, read(problems, result))


def _log(x: Tensor) -> Tensor:
    return x.double().log()


def _shift(problems: Problems) -> np.ndarray:
    """min C / epsilon, which a log-scaling of the cost scaled to [0, 1] lacks."""
    lows = [problems.cost[i, :n, :m].double().min().item() for i, (n, m) in enumerate(problems.sizes)]
    return np.array(lows) / problems.epsilon.numpy()


def _sweeps_needed(problems: Problems, target: float) -> list[Settings]:
    # A few more, because in float32 the last ones are slower than counted.
    exact = plain_sweeps(problems, target)
    return [{"sweeps": 10 * math.ceil(factor * exact / 10)} for factor in (1, 1.1, 1.3)]


# sinkformer ------------------------------------------------------------------------------------------------------------


def _engine(name: str) -> contextlib.AbstractContextManager:
    use_backend = getattr(sinkformer, "use_backend", None)
    return contextlib.nullcontext() if use_backend is None else use_backend(name)


def engine_chosen() -> bool:
    """Whether the engine can be selected; otherwise all rows of sinkformer are the same engine."""
    return hasattr(sinkformer, "use_backend")


def warm_up() -> float:
    """Seconds for compiling sinkformer's kernels, or for loading them from their cache; 0 without numba."""
    start = time.perf_counter()
    if importlib.util.find_spec("numba") is not None:
        getattr(sinkformer, "warm_up", lambda: None)()
    return time.perf_counter() - start


def _sinkformer(name: str, engine: str) -> Solver:
    def prepare(problems: Problems, settings: Settings) -> Callable[[], Any]:
        def call() -> Any:
            with torch.no_grad(), _engine(engine):
                return sinkformer.sinkhorn(
                    problems.a,
                    problems.b,
                    cost=problems.cost,
                    epsilon=problems.epsilon,
                    tolerance=settings["tolerance"],
                    on_failure="ignore",
                )

        return call

    def read(problems: Problems, solution: Any) -> Answer:
        scale = problems.epsilon.unsqueeze(-1)
        return Answer(solution.f / scale + _log(problems.a), solution.g / scale + _log(problems.b))

    return Solver(
        name,
        "numba" if engine == "cpu" else "sinkformer",
        lambda problems, target: [{"tolerance": target}],
        prepare,
        _reads(read),
        lambda solution: int(solution.iterations.max()),
    )


# POT -------------------------------------------------------------------------------------------------------------------


def _pot_loop(name: str, function: str, keys: tuple[str, str], safe: bool, period: int = 10) -> Solver:
    """One problem after the other, unpadded, stopped by POT's own tolerance: L2 of one marginal, every ``period`` sweeps."""

    def prepare(problems: Problems, settings: Settings) -> Callable[[], Any]:
        from ot import bregman

        solve = getattr(bregman, function)
        arguments = []
        for i, (n, m) in enumerate(problems.sizes):
            a, b, cost = problems.a[i, :n], problems.b[i, :m], problems.cost[i, :n, :m].contiguous()
            a, b = a / a.sum(), b / b.sum()
            arguments.append((a.numpy(), b.numpy(), cost.numpy(), float(problems.epsilon[i])))

        def call() -> Any:
            return [
                solve(*x, stopThr=settings["stopThr"], numItermax=settings["numItermax"], log=True, warn=False)
                for x in arguments
            ]

        return call

    def read(problems: Problems, results: Any) -> Answer:
        u, v = ([np.asarray(log[key], dtype=np.float64).reshape(-1) for _, log in results] for key in keys)
        if keys[0] == "u":
            with np.errstate(divide="ignore", invalid="ignore"):
                u, v = [np.log(x) for x in u], [np.log(x) for x in v]
        return Answer(u, v)

    def ladder(problems: Problems, target: float) -> list[Settings]:
        # POT's default of 1000 sweeps is too few for some problems.
        most = 20 * math.ceil(plain_sweeps(problems, target) * 2 / 20)
        loosest = loosest_l2_threshold(problems, target, period)
        return [{"stopThr": loosest * x, "numItermax": most} for x in (1, 0.9, 0.7, 0.5)]

    return Solver(name, "ot", ladder, prepare, _reads(read), safe=safe)


def _pot_batch(name: str, method: str, safe: bool) -> Solver:
    def prepare(problems: Problems, settings: Settings) -> Callable[[], Any]:
        import ot

        cost = problems.scaled

        def call() -> Any:
            with torch.no_grad():
                return ot.solve_batch(
                    cost,
                    reg=problems.ratio,
                    a=problems.a,
                    b=problems.b,
                    max_iter=settings["sweeps"],
                    tol=0.0,
                    method=method,
                    grad="detach",
                )

        return call

    def read(problems: Problems, result: Any) -> Answer:
        u, v = (x.double().reshape(len(problems), -1) for x in result.potentials)
        if method == "sinkhorn":
            u, v = u.log(), v.log()
        return Answer(u + torch.from_numpy(_shift(problems)).unsqueeze(-1), v)

    return Solver(name, "ot", _sweeps_needed, prepare, _reads(read), safe=safe, by_sweeps=True)


# GeomLoss --------------------------------------------------------------------------------------------------------------


def _geomloss() -> Solver:
    def prepare(problems: Problems, settings: Settings) -> Callable[[], Any]:
        from geomloss import ot

        cost = problems.scaled

        def call() -> Any:
            with torch.no_grad():
                result: Any = ot.solve_batch(
                    cost, reg=problems.ratio, a=problems.a, b=problems.b, max_iter=settings["max_iter"]
                )
                return result.potential_a, result.potential_b

        return call

    def read(problems: Problems, result: Any) -> Answer:
        f, g = (x.double() / problems.ratio for x in result)
        shift = torch.from_numpy(_shift(problems)).unsqueeze(-1)
        return Answer(f + _log(problems.a) + shift, g + _log(problems.b))

    return Solver(
        "GeomLoss solve_batch",
        "geomloss",
        lambda problems, target: [{"max_iter": k} for k in (10, 100, 1000, 10_000)],
        prepare,
        _reads(read),
        # Its error falls like one over the iterations.
        patience=20.0,
    )


# OTT-JAX ---------------------------------------------------------------------------------------------------------------


def _ott(name: str, lse: bool) -> Solver:
    def prepare(problems: Problems, settings: Settings) -> Callable[[], Any]:
        jax = _jax(problems)
        from ott.geometry import geometry
        from ott.problems.linear import linear_problem
        from ott.solvers.linear import sinkhorn

        sweeps = settings["sweeps"]
        solver = sinkhorn.Sinkhorn(lse_mode=lse, min_iterations=sweeps, max_iterations=sweeps, inner_iterations=10)
        a, b, cost = (jax.numpy.asarray(x.numpy()) for x in (problems.a, problems.b, problems.cost))
        epsilon = jax.numpy.asarray(problems.epsilon.to(problems.dtype).numpy())

        def solve(cost: Any, a: Any, b: Any, epsilon: Any) -> Any:
            out = solver(linear_problem.LinearProblem(geometry.Geometry(cost, epsilon=epsilon), a, b))
            return out.f, out.g

        compiled = jax.jit(jax.vmap(solve))
        return lambda: jax.block_until_ready(compiled(cost, a, b, epsilon))

    def read(problems: Problems, result: Any) -> Answer:
        f, g = (np.asarray(x, dtype=np.float64) / problems.epsilon.numpy()[:, None] for x in result)
        return Answer(f, g)

    return Solver(name, "ott", _sweeps_needed, prepare, _reads(read), safe=lse, by_sweeps=True)


def _jax(problems: Problems) -> Any:
    import jax

    jax.config.update("jax_enable_x64", problems.dtype == torch.float64)
    return jax


# mdot-tnt --------------------------------------------------------------------------------------------------------------


def _mdot() -> Solver:
    """The function behind ``solve_OT_batched``, whose exponent ``p`` sets the tolerance H / gamma^p; unbatched for one problem.

    It gives mass to atoms of weight zero; padding with copies of atoms that share their weight is often better.
    """

    def prepare(problems: Problems, settings: Settings) -> Callable[[], Any]:
        from mdot_tnt.batched import _batched_mdot
        from mdot_tnt.mdot import mdot

        tensors = (
            _split_atoms(problems) if settings["padding"] == "copies" else (problems.a, problems.b, problems.scaled)
        )
        a, b, cost = (x.to(settings["dtype"]) for x in tensors)
        gamma, p = 1 / problems.ratio, settings["p"]

        def call() -> Any:
            with torch.no_grad():
                if len(problems) > 1:
                    return *_batched_mdot(a, b, cost, gamma, p=p)[:2], settings
                u, v, reached, _, _ = mdot(a[0], b[0], cost[0], gamma, p=p)
                if reached != gamma:
                    raise ArithmeticError(f"stopped at 1/epsilon = {reached:.3g} instead of {gamma:.3g}")
                return u.unsqueeze(0), v.unsqueeze(0), settings

        return call

    def read(problems: Problems, result: Any) -> Answer:
        u, v, settings = result
        u, v = ([x.double().numpy() for x in side] for side in (u, v))
        if settings["padding"] == "copies":
            u = [_merged(x, n) for x, (n, _) in zip(u, problems.sizes, strict=True)]
            v = [_merged(x, m) for x, (_, m) in zip(v, problems.sizes, strict=True)]
        return Answer([x + shift for x, shift in zip(u, _shift(problems), strict=True)], v)

    def ladder(problems: Problems, target: float) -> list[Settings]:
        # H is at most log n. Which p and dtype work, without turning to NaN, is erratic: several are tried.
        entropy = math.log(max(min(problems.cost.shape[-2:]), 2))
        start = math.log(target / entropy) / math.log(problems.ratio)
        dtypes = [problems.dtype, torch.float64] if problems.dtype == torch.float32 else [torch.float64]
        return [
            {"dtype": dtype, "p": round(round(start - 0.1, 1) + step, 1), "padding": padding}
            for dtype in dtypes
            for step in (-0.1, 0.0, 0.1, 0.2, 0.5)
            for padding in (("zero", "copies") if len(problems) > 1 else ("none",))
        ]

    return Solver("mdot-tnt", "mdot_tnt", ladder, prepare, _reads(read), monotone=False, patience=6.0)


def _split_atoms(problems: Problems) -> tuple[Tensor, Tensor, Tensor]:
    """``(a, b, scaled cost)`` with the places of the padding taken by copies of atoms, which share the weight of the atom."""
    a, b, cost = problems.a.clone(), problems.b.clone(), problems.scaled.clone()
    for i, (n, m) in enumerate(problems.sizes):
        rows, columns = torch.arange(a.shape[1]) % n, torch.arange(b.shape[1]) % m
        a[i] = problems.a[i, rows] / torch.bincount(rows)[rows]
        b[i] = problems.b[i, columns] / torch.bincount(columns)[columns]
        cost[i] = problems.scaled[i][rows][:, columns]
    return a, b, cost


def _merged(scalings: np.ndarray, size: int) -> np.ndarray:
    """Log-scalings of atoms from those of their copies: the masses of copies add."""
    top = scalings.max()
    return top + np.log(np.bincount(np.arange(len(scalings)) % size, weights=np.exp(scalings - top), minlength=size))


def forward_solvers(peers: bool = True) -> list[Solver]:
    """Ours first, then every peer, all of them for any number of problems."""
    ours = [_sinkformer(OURS, "cpu"), _sinkformer(PLAIN_TORCH, "absorbed")]
    if not peers:
        return ours
    return [
        *ours,
        _mdot(),
        _pot_loop("POT sinkhorn_log", "sinkhorn_log", ("log_u", "log_v"), safe=True),
        _pot_loop("POT sinkhorn_stabilized", "sinkhorn_stabilized", ("logu", "logv"), safe=True, period=20),
        _pot_loop("POT sinkhorn (kernel)", "sinkhorn_knopp", ("u", "v"), safe=False),
        _pot_batch("POT solve_batch, log", "log_sinkhorn", safe=True),
        _pot_batch("POT solve_batch, kernel", "sinkhorn", safe=False),
        _ott("OTT-JAX, log-sum-exp", lse=True),
        _ott("OTT-JAX, kernel", lse=False),
        _geomloss(),
    ]


# Forward and backward of <plan, W> -----------------------------------------------------------------------------------------


def _sinkformer_gradient(name: str, engine: str) -> Solver:
    has_option = "gradient_tolerance" in inspect.signature(sinkformer.sinkhorn).parameters

    def prepare(problems: Problems, settings: Settings) -> Callable[[], Any]:
        q, k, w = (x.clone() for x in (problems.q, problems.k, problems.pairing_weights))
        for x in (q, k):
            x.requires_grad_()

        def call() -> tuple[Tensor, Tensor]:
            with _engine(engine):
                coupling = sinkformer.Coupling.solve(
                    sinkformer.Measure(q, problems.a),
                    sinkformer.Measure(k, problems.b),
                    cost=sinkformer.NegativeDot(),
                    epsilon=problems.epsilon,
                    on_failure="ignore",
                    **settings,
                )
                objective = (coupling.to_dense() * w).sum()
                grad_q, grad_k = torch.autograd.grad(objective, (q, k))
            return grad_q, grad_k

        return call

    def ladder(problems: Problems, target: float) -> list[Settings]:
        return (
            [{"gradient_tolerance": target}] if has_option else [{"tolerance": x * target} for x in (0.1, 0.03, 0.01)]
        )

    return Solver(name, "numba" if engine == "cpu" else "sinkformer", ladder, prepare, _gradient_error)


def _gradient_error(problems: Problems, result: tuple[Any, Any]) -> float:
    return gradient_error(problems, *result)


def _pot_gradient(grad: str) -> Solver:
    def prepare(problems: Problems, settings: Settings) -> Callable[[], Any]:
        import ot

        q, k, w = (x.clone() for x in (problems.q, problems.k, problems.pairing_weights))
        for x in (q, k):
            x.requires_grad_()
        scale = (problems.ratio / problems.epsilon).to(problems.dtype).view(-1, 1, 1)

        def call() -> tuple[Tensor, Tensor]:
            # Only C / epsilon matters; one number for the batch is what POT takes.
            cost = -(q @ k.mT) * scale
            plan: Any = ot.solve_batch(
                cost,
                reg=problems.ratio,
                a=problems.a,
                b=problems.b,
                max_iter=settings["sweeps"],
                tol=0.0,
                method="log_sinkhorn",
                grad=grad,
            ).plan
            grad_q, grad_k = torch.autograd.grad((plan * w).sum(), (q, k))
            return grad_q, grad_k

        return call

    def ladder(problems: Problems, target: float) -> list[Settings]:
        # The gradient converges more slowly than the marginals.
        exact = plain_sweeps(problems, 1e-3)
        return [{"sweeps": 10 * math.ceil(factor * exact / 10)} for factor in (0.5, 0.75, 1, 1.5, 2, 3)]

    return Solver(f"POT solve_batch, {grad}", "ot", ladder, prepare, _gradient_error)


def _ott_gradient() -> Solver:
    def prepare(problems: Problems, settings: Settings) -> Callable[[], Any]:
        jax = _jax(problems)
        from ott.geometry import geometry
        from ott.problems.linear import linear_problem
        from ott.solvers.linear import sinkhorn

        solver = sinkhorn.Sinkhorn(threshold=settings["threshold"], max_iterations=20_000)
        names = (problems.q, problems.k, problems.a, problems.b, problems.pairing_weights)
        q, k, a, b, w = (jax.numpy.asarray(x.numpy()) for x in names)
        epsilon = jax.numpy.asarray(problems.epsilon.to(problems.dtype).numpy())

        def solve(q: Any, k: Any, a: Any, b: Any, epsilon: Any) -> Any:
            geom = geometry.Geometry(-(q @ k.T), epsilon=epsilon)
            return solver(linear_problem.LinearProblem(geom, a, b)).matrix

        def objective(features: Any) -> Any:
            return (jax.vmap(solve)(features[0], features[1], a, b, epsilon) * w).sum()

        compiled = jax.jit(jax.grad(objective))
        return lambda: jax.block_until_ready(compiled((q, k)))

    def error(problems: Problems, result: Any) -> float:
        return gradient_error(problems, np.asarray(result[0]), np.asarray(result[1]))

    def ladder(problems: Problems, target: float) -> list[Settings]:
        return [{"threshold": x * target} for x in (1, 0.3, 0.1, 0.03)]

    return Solver("OTT-JAX, implicit", "ott", ladder, prepare, error)


def gradient_solvers(peers: bool = True) -> list[Solver]:
    """Forward and backward through the plan."""
    ours = [_sinkformer_gradient(OURS, "cpu"), _sinkformer_gradient(PLAIN_TORCH, "absorbed")]
    return [*ours, _pot_gradient("autodiff"), _pot_gradient("last_step"), _ott_gradient()] if peers else ours


# Surroundings ----------------------------------------------------------------------------------------------------------


def environment_for(threads: int) -> dict[str, str]:
    """Environment variables a process needs before its first import to keep every library at ``threads`` threads."""
    numbers = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    multi = "true" if threads > 1 else "false"
    flags = f"--xla_cpu_multi_thread_eigen={multi} intra_op_parallelism_threads={threads}"
    return os.environ | numbers | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


@contextlib.contextmanager
def quiet() -> Any:
    """Peers warn about what the harness measures anyway."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield
