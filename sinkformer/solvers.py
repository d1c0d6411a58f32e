"""The entropic transport problem: its arguments, its solution, the quality of the solution.

    minimise  <C, P> + epsilon KL(P | a (x) b) + rho_a KL(P 1 | a) + rho_b KL(P^T 1 | b)

over non-negative P, with KL(p | q) = sum p log(p/q) - p + q. A penalty is given as tau = rho / (rho + epsilon):
tau = 1 is the hard constraint (a coupling), tau = 0 no constraint at all. The solution is

    P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon),     f = -tau_a epsilon LSE_j((g_j - C_ij) / epsilon + log b_j),

and the same for g (Cuturi 2013; Chizat, Peyre, Schmitzer, Vialard 2018 for the penalties; arXiv 2603.25860 for the
layer). The weights stand outside the exponential, so potentials are functions on the space: defined at atoms of weight
zero, and unchanged when an atom is split. Gauge for couplings: <a, f> = <b, g>.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from sinkformer._numerics import marginal_tolerance, potential_dtype, under_autocast, working_dtype
from sinkformer._typing import CostMatrix, PerProblem, Potential
from sinkformer.costs import Cost, Matrix, NegativeDot, SqEuclidean, as_cost
from sinkformer.errors import ConfigError, DeviceError, DTypeError, NonFiniteError, ShapeError, WeightError
from sinkformer.measures import Measure, check_compatible
from sinkformer.ops import dispatch
from sinkformer.problems import Stored, Streamed
from sinkformer.solutions import OnFailure, Solution, report
from sinkformer.streamed import PairCosts
from sinkformer.streamed.ranks import Ranks, Shard, fingerprint
from sinkformer.sweeps import LARGEST_COST

Gradient = Literal["implicit", "unrolled"]


class SinkhornOptions(TypedDict, total=False):
    """Keyword arguments of :func:`sinkhorn` that do not describe the measures."""

    mask: CostMatrix | None
    tau_a: float
    tau_b: float
    tolerance: float | None
    max_iterations: int
    init: tuple[Potential, Potential] | None
    annealing: float | None
    gradient: Gradient
    gradient_tolerance: float | None
    on_failure: OnFailure


def sinkhorn(
    mu: Measure | Tensor | Shard,
    nu: Measure | Tensor,
    *,
    cost: Cost | Tensor = SqEuclidean(),  # noqa: B008 - stateless
    epsilon: float | PerProblem,
    mask: CostMatrix | None = None,
    tau_a: float = 1.0,
    tau_b: float = 1.0,
    tolerance: float | None = None,
    max_iterations: int = 2000,
    init: tuple[Potential, Potential] | None = None,
    annealing: float | None = 0.7,
    gradient: Gradient = "implicit",
    gradient_tolerance: float | None = None,
    on_failure: OnFailure = "warn",
    process_group: dist.ProcessGroup | None = None,
) -> Solution:
    """Solve one entropic transport problem, or a batch of them, with the engine that suits it (``sinkformer.explain``).

    Every problem of a batch has its own stopping test and does not depend on its neighbours. Sums are taken in float32
    or float64 for float32 and half inputs, in float64 for float64. A problem with mu = nu and a symmetric cost is recognised and
    solved by averaged updates, so that f = g exactly (not with ``gradient="unrolled"``).

    Args:
        mu: source, ``(*batch, n)`` atoms; or its weights alone, ``(*batch, n)``, if the cost is a matrix.
        nu: target, ``(*batch, m)`` atoms, or its weights alone; dtype, device and batch shape of ``mu``.
        cost: a ``Cost``, or a cost matrix of shape ``(*batch, n, m)``. Any sign, up to 1e29; ``+inf`` forbids a pair.
        epsilon: strength of the entropy, > 0, in the units of the cost; a number or shape ``(*batch)``.
        mask: added to the cost, broadcast to ``(*batch, n, m)``; ``+inf`` forbids a pair. See ``costs.forbid``.
        tau_a: rho_a / (rho_a + epsilon) in [0, 1] for the source marginal; 1 is the hard constraint.
        tau_b: the same for the target marginal.
        tolerance: marginal error (L1, both marginals) to reach; default 1e-4 in float32, 1e-9 in float64. 0 runs all
            iterations, and ending there is no failure.
        max_iterations: most sweeps and Newton steps spent on a problem.
        init: potentials ``(f, g)`` to start from, for example those of a solution nearby; switches annealing off.
        annealing: of the engine "reference": epsilon starts at the range of the cost and shrinks by this factor at every
            sweep; None starts at epsilon itself. Without effect on the solution; off with ``gradient="unrolled"``.
        gradient: ``"implicit"`` differentiates the solution (memory independent of the iterations), ``"unrolled"`` the
            iterations themselves, for which the graph keeps all of them, and for which an atom of weight zero is padding.
        gradient_tolerance: relative error asked of implicit derivatives of plan and potentials: the residual of their
            linear solve, and ten times the most that ``tolerance`` may be. By default that residual is ``tolerance``.
        on_failure: what a problem without convergence does: one warning naming the worst problem, an error, or nothing.
        process_group: of ``torch.distributed``. Its processes solve one problem together: each passes its own rows of the
            source as a ``Shard``, and all of them the same target, options and a cost of points without a mask. The memory
            of each is O((n + m) d) for its own n. In the ``Solution`` f belongs to its rows; all else is that of the whole
            problem, the same everywhere. Derivatives in the ``Shard`` belong to its rows, those in target and epsilon are
            summed over the rows of all, so that every process has the whole of them; all must call ``backward`` on the
            same function of value and g. First derivatives only.

    Returns:
        The ``Solution``.

    Raises:
        ConfigError: an option outside its range.
        DTypeError, DeviceError, ShapeError: arguments that do not fit together.
        InfeasibleError: no coupling avoids the forbidden pairs, unless ``on_failure="ignore"``.
        NonFiniteError: the cost of a pair of atoms of positive weight is NaN, -inf or beyond 1e29, unless
            ``on_failure="ignore"``.
        ConvergenceError: not converged, with ``on_failure="raise"``.
        DistributedError: a process of the group was lost, had an error of its own, or was asked for something else.
    """
    options: SinkhornOptions = {
        "mask": mask,
        "tau_a": tau_a,
        "tau_b": tau_b,
        "tolerance": tolerance,
        "max_iterations": max_iterations,
        "init": init,
        "annealing": annealing,
        "gradient": gradient,
        "gradient_tolerance": gradient_tolerance,
        "on_failure": on_failure,
    }
    if process_group is not None or isinstance(mu, Shard):
        return _sharded(mu, nu, cost, epsilon, process_group, options)
    return sinkhorn_and_costs(mu, nu, cost=cost, epsilon=epsilon, **options)[0]


_DEFAULTS = {
    name: value for name, value in (sinkhorn.__kwdefaults__ or {}).items() if name not in ("cost", "process_group")
}


@dataclass(frozen=True)
class _Options:
    """The options of :func:`sinkhorn`, complete and within their ranges."""

    mask: CostMatrix | None
    tau_a: float
    tau_b: float
    tolerance: float | None
    max_iterations: int
    init: tuple[Potential, Potential] | None
    annealing: float | None
    gradient: Gradient
    gradient_tolerance: float | None
    on_failure: OnFailure

    def __post_init__(self):
        """Check them."""
        optional = ("tolerance", "annealing", "gradient_tolerance")
        for name in ("tau_a", "tau_b", "max_iterations", *optional):
            x = getattr(self, name)
            if isinstance(x, bool) or not (isinstance(x, Real) or (x is None and name in optional)):
                raise ConfigError(f"expected {name} as a number, received {x!r}")
        for name, tau in (("tau_a", self.tau_a), ("tau_b", self.tau_b)):
            if not 0 <= tau <= 1:
                raise ConfigError(f"expected {name} = rho / (rho + epsilon) between 0 and 1, received {tau}")
        if self.tolerance is not None and not 0 <= self.tolerance < torch.inf:
            raise ConfigError(f"expected a tolerance >= 0 (L1 marginal error), received {self.tolerance}")
        if self.max_iterations != int(self.max_iterations) or self.max_iterations < 1:
            raise ConfigError(f"expected max_iterations >= 1, received {self.max_iterations}")
        if self.annealing is not None and not 0 < self.annealing < 1:
            raise ConfigError(f"expected an annealing factor between 0 and 1, or None, received {self.annealing}")
        if self.gradient not in ("implicit", "unrolled"):
            raise ConfigError(f"expected gradient 'implicit' or 'unrolled', received {self.gradient!r}")
        if self.gradient_tolerance is not None and not 0 < self.gradient_tolerance < 1:
            raise ConfigError(f"expected a gradient tolerance between 0 and 1, received {self.gradient_tolerance}")
        if self.on_failure not in ("warn", "raise", "ignore"):
            raise ConfigError(f"expected on_failure 'warn', 'raise' or 'ignore', received {self.on_failure!r}")

    def accuracy(self, work: torch.dtype) -> tuple[float, float]:
        """Marginal error to reach, and the residual asked of the linear solves of derivatives."""
        tolerance = marginal_tolerance(work) if self.tolerance is None else self.tolerance
        if self.gradient_tolerance is None:
            return tolerance, tolerance
        return min(tolerance, self.gradient_tolerance / 10), self.gradient_tolerance


def sinkhorn_and_costs(
    mu: Measure | Tensor,
    nu: Measure | Tensor,
    *,
    cost: Cost | Tensor,
    epsilon: float | PerProblem,
    **options: Unpack[SinkhornOptions],
) -> tuple[Solution, CostMatrix | None]:
    """What :func:`sinkhorn` returns, and the matrix of costs ``(*batch, n, m)`` where the graph keeps it anyway."""
    cost = as_cost(cost)
    check_weights_have_costs(mu, nu, cost)
    mu, nu = as_measure(mu), as_measure(nu)
    check_compatible(mu, nu)
    asked = _Options(**{**_DEFAULTS, **options})
    scale, work = check_epsilon(epsilon, mu), working_dtype(mu.dtype)
    tolerance, rtol = asked.accuracy(work)

    mask, taus, unrolled = asked.mask, (float(asked.tau_a), float(asked.tau_b)), asked.gradient == "unrolled"
    from_points = mask is None and not isinstance(cost, Matrix)
    engine = dispatch.choose(
        dispatch.Asked(
            device=mu.device,
            n=mu.n,
            m=nu.n,
            taus=taus,
            unrolled=unrolled,
            from_points=from_points,
            inner_products=from_points and type(cost) in (NegativeDot, SqEuclidean),
            narrow=work == torch.float32,
            tolerance=tolerance,
        )
    )
    init = None if asked.init is None else _check_init(asked.init, mu, nu, scale.dtype)
    problem = _problem(mu, nu, scale, asked)
    matrix = None
    with _full_precision(mu):
        if engine.backend in dispatch.SWEPT_BY:
            costs = replace(_pair_costs(mu, nu, cost, mask), engine=dispatch.SWEPT_BY[engine.backend])
            solution = Streamed(costs=costs, **problem).solve(init, engine, rtol)
        else:
            matrix = _cost_matrix(mu, nu, cost, mask)
            annealing = None if init is not None or unrolled else asked.annealing
            solution = Stored(cost=_flat(matrix, 2), **problem).solve(
                init, engine, rtol, annealing=annealing, unrolled=unrolled
            )
    solution = _batched(solution, mu)
    report(solution, asked.on_failure)
    kept = matrix if matrix is not None and matrix.requires_grad and not isinstance(cost, Matrix) else None
    return solution, kept


def _problem(mu: Measure, nu: Measure, epsilon: Tensor, asked: _Options) -> dict[str, Any]:
    """What engines of all kinds are told of a flat batch."""
    work = working_dtype(mu.dtype)
    return {
        "a": _flat(mu.weights, 1),
        "b": _flat(nu.weights, 1),
        "epsilon": _flat(epsilon, 0),
        "taus": (float(asked.tau_a), float(asked.tau_b)),
        "tolerance": asked.accuracy(work)[0],
        "max_iterations": asked.max_iterations,
        "work": work,
    }


def _full_precision(mu: Measure) -> AbstractContextManager:
    """Autocast switched off, if it is on."""
    return torch.autocast(mu.device.type, enabled=False) if under_autocast(mu.device) else nullcontext()


def _batched(solution: Solution, mu: Measure) -> Solution:
    """With the batch axes of the measures."""
    batch = mu.batch_shape
    return solution if solution.codes.shape == batch else solution.map(lambda t: t.reshape((*batch, *t.shape[1:])))


def _sharded(
    mu: Any, nu: Any, cost: Cost | Tensor, epsilon: float | PerProblem, group: Any, options: SinkhornOptions
) -> Solution:
    """:func:`sinkhorn` over the ranks of a group."""
    ranks = Ranks.of(group)
    with ranks.agreed() as terms:
        cost, asked, engine = as_cost(cost), _Options(**options), dispatch.sharded(ranks.count)
        _check_sharded(mu, nu, cost, asked)
        rows = Measure._part(mu.points, mu.weights)
        check_compatible(rows, nu)
        scale = check_epsilon(epsilon, rows)
        init = None if asked.init is None else _check_init(asked.init, rows, nu, scale.dtype)
        with torch.no_grad(), _full_precision(rows):
            cost(rows.points[..., :1, :], nu.points)
        terms.update(_terms(rows, nu, cost, scale, asked))
        if rows.n:
            terms["choice of weights of the source"] = "none (uniform)" if mu.uniform else "weights"
    (mass,) = ranks.total(rows.weights.detach().sum(-1, dtype=scale.dtype).flatten())
    if not bool(((mass > 0) & mass.isfinite()).all()):
        raise WeightError(
            f"expected weights of which the sum over all ranks is positive and finite, received {mass.tolist()}; "
            f"give at least one atom a positive weight"
        )
    with _full_precision(rows):
        costs = replace(_pair_costs(rows, nu, cost, None), ranks=ranks)
        rtol = asked.accuracy(working_dtype(rows.dtype))[1]
        solution = Streamed(costs=costs, **_problem(rows, nu, scale, asked)).solve(init, engine, rtol)
    solution = _batched(solution, rows)
    report(solution, asked.on_failure)
    return solution


def _check_sharded(mu: Any, nu: Any, cost: Cost, asked: _Options) -> None:
    """Raise for what cannot be solved over several processes."""
    if not isinstance(mu, Shard):
        raise DTypeError(
            f"expected the source as a Shard with process_group, received {type(mu).__name__}; pass the rows of this "
            f"process as Shard(points, weights), or Shard.of(mu, process_group) if every process has the whole measure"
        )
    if not isinstance(nu, Measure):
        raise DTypeError(f"expected the whole target as a Measure on every rank, received {type(nu).__name__}")
    if asked.mask is not None or isinstance(cost, Matrix):
        raise ConfigError(
            "expected a cost of points without a mask with process_group, received a matrix or a mask; nothing of size "
            "n x m is stored there: write a Cost, which may return inf where a pair is not allowed"
        )
    if asked.gradient == "unrolled":
        raise ConfigError(
            "expected gradient 'implicit' with process_group, received 'unrolled', which stores every sweep"
        )


def _terms(rows: Measure, nu: Measure, cost: Cost, epsilon: Tensor, asked: _Options) -> dict[str, Any]:
    """What all ranks must have been given alike."""
    kind = f"{type(cost).__module__}.{type(cost).__qualname__}"
    inputs = (rows.points, rows.weights, nu.points, nu.weights, epsilon)
    options = {name: getattr(asked, name) for name in SinkhornOptions.__annotations__ if name not in ("mask", "init")}
    return {
        "dtype": rows.dtype,
        "device type": rows.device.type,
        "batch shape": tuple(rows.batch_shape),
        "dimension of the source": rows.d,
        "shape of the target": tuple(nu.points.shape),
        "cost": kind if type(cost).__repr__ is object.__repr__ else f"{kind}: {cost!r}",
        "epsilon": epsilon.tolist(),
        **options,
        "target (a fingerprint)": fingerprint(nu.points, nu.weights),
        "init (a fingerprint of g)": None if asked.init is None else fingerprint(asked.init[1]),
        "choice of what requires a gradient": torch.is_grad_enabled() and [t.requires_grad for t in inputs],
    }


def as_measure(mu: Measure | Tensor) -> Measure:
    """A measure as it is; bare weights ``(*batch, n)`` become one whose points carry no information."""
    return Measure._without_points(mu) if isinstance(mu, Tensor) else mu


def check_weights_have_costs(mu: Measure | Tensor, nu: Measure | Tensor, cost: Cost) -> None:
    """Raise if bare weights come without a cost matrix: there are no points to evaluate a cost on."""
    if (isinstance(mu, Tensor) or isinstance(nu, Tensor)) and not isinstance(cost, Matrix):
        raise ShapeError(
            f"expected measures, or weights together with a cost matrix, received weights and the cost {cost!r}; "
            f"pass cost=<tensor of shape (*batch, n, m)>, or measures with points"
        )


def _cost_matrix(mu: Measure, nu: Measure, cost: Cost, mask: CostMatrix | None) -> CostMatrix:
    """Cost of every pair with the mask added, ``(*batch, n, m)``: in the dtype of potentials, a float32 matrix as it is.

    Coordinates of any precision are read as exact numbers: evaluated more coarsely, C and its transpose would differ by
    rounding, which epsilon divides.
    """
    shape, wide = (*mu.batch_shape, mu.n, nu.n), potential_dtype(mu.device)
    cost.check_shape(shape)
    matrix = cost.values if isinstance(cost, Matrix) else cost(mu.points.to(wide), nu.points.to(wide))
    matrix = matrix if matrix.dtype == torch.float32 else matrix.to(wide)
    if matrix.device != mu.device:
        raise DeviceError(f"expected the cost on {mu.device} as the measures, received it on {matrix.device}")
    return matrix if mask is None else matrix.to(wide) + check_mask(mask, shape, mu.device).to(wide)


def _pair_costs(mu: Measure, nu: Measure, cost: Cost, mask: CostMatrix | None) -> PairCosts:
    """The same for a flat batch, evaluated in blocks when asked for."""
    shape = (*mu.batch_shape, mu.n, nu.n)
    cost.check_shape(shape)
    if isinstance(cost, Matrix):
        cost = Matrix(_flat(cost.values, 2))
    if mask is not None:
        mask = _flat(check_mask(mask, shape, mu.device), 2)
    return PairCosts(cost, _flat(mu.points, 2), _flat(nu.points, 2), mask)


def check_mask(mask: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Raise unless ``mask`` is an additive mask for problems of this shape; returns it expanded."""
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        received = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise DTypeError(
            f"expected an additive floating-point mask (+inf forbids a pair), received {received}; "
            f"convert a boolean tensor of forbidden pairs with costs.forbid(pairs)"
        )
    if mask.device != device:
        raise DeviceError(f"expected the mask on {device} as the measures, received it on {mask.device}; use mask.to()")
    if mask.dim() > len(shape) or any(
        have not in (1, want) for have, want in zip(mask.shape[::-1], shape[::-1], strict=False)
    ):
        raise ShapeError(f"expected a mask that broadcasts to {shape}, received {tuple(mask.shape)}")
    return mask.expand(shape)


def check_epsilon(epsilon: float | Tensor, mu: Measure) -> Tensor:
    """Epsilon as a positive, finite tensor of the batch shape, in the dtype of potentials."""
    if isinstance(epsilon, bool) or not isinstance(epsilon, (Real, Tensor)):
        raise DTypeError(f"expected epsilon as a number or a tensor, received {type(epsilon).__name__}")
    # In one step: a Python number would pass through float32.
    scale = torch.as_tensor(
        epsilon if isinstance(epsilon, Tensor) else float(epsilon), dtype=potential_dtype(mu.device), device=mu.device
    )
    # NaN compares as wrong. Subnormal numbers have few digits, and their reciprocals overflow.
    least = torch.finfo(scale.dtype).tiny
    if scale.numel() and not (scale.min().item() >= least and scale.max().item() < torch.inf):
        raise ConfigError(f"expected epsilon positive and finite, received {epsilon}; the least is {least:.3g}")
    if scale.dim() and scale.shape != mu.batch_shape:
        raise ShapeError(
            f"expected epsilon as a number or of shape {tuple(mu.batch_shape)}, received {tuple(scale.shape)}"
        )
    return scale if scale.dim() else scale.expand(mu.batch_shape)


def _check_init(init: Any, mu: Measure, nu: Measure, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if not isinstance(init, (tuple, list)) or len(init) != 2 or not all(isinstance(h, Tensor) for h in init):
        raise DTypeError(
            f"expected init as two tensors (f, g), received {type(init).__name__}; see Solution.potentials"
        )
    f, g = init
    if f.shape != mu.weights.shape or g.shape != nu.weights.shape:
        raise ShapeError(
            f"expected init potentials of shapes {tuple(mu.weights.shape)} and {tuple(nu.weights.shape)}, "
            f"received {tuple(f.shape)} and {tuple(g.shape)}"
        )
    if not all(bool((h.abs() <= LARGEST_COST).all()) for h in (f, g)):
        raise NonFiniteError(
            f"expected init potentials up to {LARGEST_COST:.0e}, received a NaN, an infinity or more; "
            f"start cold with init=None"
        )
    return _flat(f.detach().to(dtype), 1), _flat(g.detach().to(dtype), 1)


def _flat(t: Tensor, axes: int) -> Tensor:
    """With one batch axis before the last ``axes``."""
    if t.dim() == axes:
        return t.unsqueeze(0)
    return t if t.dim() == axes + 1 else t.flatten(0, t.dim() - axes - 1)
