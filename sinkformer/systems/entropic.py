"""Systems made by entropic transport: of a cost of two points, or of one that sees the measures.

They share one bound. Let c and c' be the costs at (mu, nu) and (mu', nu'), L-Lipschitz for the additive metric on the
product of the cubes, and E = |c - c'| in the uniform norm; both up to functions of x alone and of y alone, which change no
plan. With H = min(diam X, diam Y) and Delta = W1(mu, mu') + W1(nu, nu'),

    W1(F(mu, nu), F(mu', nu')) <= Delta + H sqrt(L Delta / (2 epsilon)) + H E / (2 epsilon).

Proof. Two couplings r, s of the same measures have W1(r, s) <= H TV(r, s), by moving mass within the fibres of X or of Y, and
TV <= sqrt(KL / 2) (Pinsker).

(1) One cost. Let pi, pi' be the two plans, J and J' the two objectives <c, .> + epsilon KL(. | product). Move pi along optimal
couplings of mu with mu' and of nu with nu', independently for x and y. The result, the *shadow* s' of pi (Eckstein, Nutz
2022, arXiv 2110.06798), couples mu' and nu', W1(pi, s') <= Delta, and KL(s' | mu' (x) nu') <= KL(pi | mu (x) nu), because one
kernel moves both arguments. Hence J'(s') <= J(pi) + L Delta, and J(s) <= J'(pi') + L Delta for the shadow s of pi'. Now
epsilon KL(s' | pi') = J'(s') - J'(pi') and epsilon KL(s | pi) = J(s) - J(pi), since potentials integrate to the same. Their
sum is at most 2 L Delta, so the smaller is at most L Delta, and the triangle inequality over that shadow gives the first two
terms.

(2) Two costs, the same measures. The two relative entropies of the plans sum to <pi - pi', c' - c> / epsilon, at most
2 TV E / epsilon, and to 4 TV^2 at least by Pinsker, so TV <= E / (2 epsilon).

The bound is loose, and where L or M are large it is below the cut-off H for tiny Delta only. But (1) has nothing exponential in
the range of the cost over epsilon in it, as the Lipschitz constants have that are known for the marginals (Deligiannidis, De
Bortoli, Doucet 2024; Carlier, Chizat, Laborde 2024).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from sinkformer._typing import Features, PlanMatrix, Points
from sinkformer.costs import Cost, Euclidean, Matrix, NegativeDot, SqEuclidean
from sinkformer.couplings import Coupling, FeatureMap
from sinkformer.errors import BackendError, ConfigError
from sinkformer.measures import Measure
from sinkformer.systems.base import (
    System,
    bound,
    check_dims,
    check_modulus_arguments,
    check_positive,
    fibre,
    mean,
    radii,
)

# L1 marginal error of the targets. Their distance to the limit is larger by the conditioning of the problem only.
_TOLERANCE = 1e-11
_MOST_ITERATIONS = 20_000
# Costs whose Lipschitz constants are known.
_KNOWN = (SqEuclidean, NegativeDot, Euclidean)


class EntropicSystem(System):
    """Entropic transport with a cost of features, which may see the measure they come from.

    Attributes:
        cost: the cost of two features.
        epsilon: entropy, in the units of the cost.
    """

    cost: Cost
    epsilon: float

    @abstractmethod
    def source_features(self, mu: Measure, at: Points) -> Features:
        """Features of points ``(*batch, k, d)`` in the context ``mu``, ``(*batch, k, r)``."""

    @abstractmethod
    def target_features(self, nu: Measure, at: Points) -> Features:
        """The same on the side of the targets."""

    @abstractmethod
    def constants(self, half_width: float) -> tuple[float, float]:
        """``(L, M)`` on the domain: L of the cost in the two points, and M with |c - c'| <= M Delta for two pairs of measures.

        Both up to functions of one of the two points.
        """

    def couple(self, mu: Measure, nu: Measure) -> Coupling:
        """Solve to an L1 marginal error of 1e-11; differentiable in points and weights."""
        return self._solved(mu, nu, _TOLERANCE)

    def _draft(self, mu: Measure, nu: Measure, tolerance: float) -> PlanMatrix:
        """Solve to an L1 marginal error of ``tolerance``."""
        return self._solved(mu, nu, tolerance).to_dense()

    def _solved(self, mu: Measure, nu: Measure, tolerance: float) -> Coupling:
        return Coupling.solve(
            mu,
            nu,
            cost=self.cost,
            features=(_at_atoms(self.source_features, mu), _at_atoms(self.target_features, nu)),
            maps=(self.source_features, self.target_features),
            epsilon=self.epsilon,
            tolerance=tolerance,
            max_iterations=_MOST_ITERATIONS,
            on_failure="raise",
        )

    def modulus(self, delta: float, *, half_width: float = 1.0) -> float:
        """The bound of this module, delta + H sqrt(L delta / (2 epsilon)) + H M delta / (2 epsilon)."""
        check_modulus_arguments(delta, half_width)
        lipschitz, drift = self.constants(half_width)
        strength = delta / (2 * self.epsilon)
        excess = fibre(self.dims, half_width) * (math.sqrt(lipschitz * strength) + drift * strength)
        return bound(delta, excess, self.dims, half_width)


@dataclass(frozen=True)
class EntropicTransport(EntropicSystem):
    """F(mu, nu) = argmin <c, pi> + epsilon KL(pi | mu (x) nu) for a continuous cost c of two points.

    Modulus: that of this module with M = 0. Up to functions of one point, ``SqEuclidean`` is -2 <x, y>, so that L is twice
    the radius h sqrt(d) of the domain; ``NegativeDot`` has half of that, ``Euclidean`` has L = 1.

    Args:
        cost: a function of two points.
        epsilon: entropy, > 0, in the units of the cost.
        dims: coordinates of source and target points.
        lipschitz: L of a cost that is none of these three, on the domain [-1, 1]^d; taken on trust. The modulus is then that
            of this domain and of smaller ones.

    Raises:
        ConfigError: an argument outside its range, a given matrix, or an unknown cost without ``lipschitz``.
    """

    cost: Cost = SqEuclidean()  # noqa: RUF009 - stateless
    epsilon: float = 0.1
    dims: tuple[int, int] = (2, 2)
    lipschitz: float | None = None

    name = "eot"

    def __post_init__(self):
        """Check the arguments."""
        check_dims(self.dims)
        check_positive(epsilon=self.epsilon)
        if not isinstance(self.cost, Cost) or isinstance(self.cost, Matrix):
            raise ConfigError(f"expected a cost that is a function of two points, received {self.cost!r}")
        if isinstance(self.cost, _KNOWN):
            if self.lipschitz is not None:
                raise ConfigError(f"expected no lipschitz with {self.cost!r}, whose constant is known, received one")
            if self.dims[0] != self.dims[1]:
                raise ConfigError(f"expected equal dims for {self.cost!r}, received {self.dims}")
        elif self.lipschitz is None:
            raise ConfigError(f"expected lipschitz with the cost {self.cost!r}, whose constant is not known; state it")
        else:
            check_positive(lipschitz=self.lipschitz)

    def source_features(self, mu: Measure, at: Points) -> Features:
        """The points themselves."""
        return at

    def target_features(self, nu: Measure, at: Points) -> Features:
        """The points themselves."""
        return at

    def constants(self, half_width: float) -> tuple[float, float]:
        """``(L, 0)``."""
        if self.lipschitz is not None:
            if half_width > 1:
                raise ConfigError(f"expected half_width <= 1, where lipschitz was stated, received {half_width}")
            return self.lipschitz, 0.0
        if isinstance(self.cost, Euclidean):
            return 1.0, 0.0
        radius = radii(self.dims, half_width)[0]
        return (radius if isinstance(self.cost, NegativeDot) else 2 * radius), 0.0


@dataclass(frozen=True)
class Whitened(EntropicSystem):
    """Entropic transport for the squared distance of whitened points, each measure by its own mean and covariance.

    Features A(mu) (x - E mu) with A(mu) = (Cov mu + ridge)^(-1/2): what a point is, depends on the whole cloud. The ridge
    makes the whitening continuous where the covariance degenerates; without one it is not.

    Modulus: that of this module. Up to functions of one point the cost is -2 <A(mu) x, A(nu) y>, and with R = h sqrt(d)

    - |A| <= ridge^(-1/2), so L = 2 R / ridge;
    - |A(mu) - A(mu')| <= |Cov mu - Cov mu'| / (2 ridge^(3/2)), by A = (1 / pi) int t^(-1/2) (Cov + ridge + t)^(-1) dt;
    - |Cov mu - Cov mu'| <= 4 R W1(mu, mu'): a variance is the least of E (u.x - s)^2 over s, whose Lipschitz constant in x
      is 4 R, since |u.x| and the best s are at most R;

    so |c - c'| <= 2 R^2 ridge^(-1/2) (|A(mu) - A(mu')| + |A(nu) - A(nu')|) and M = 4 R^3 / ridge^2.

    Args:
        epsilon: entropy, > 0, in units of the squared whitened distance.
        ridge: added to the covariances, > 0.
        dims: coordinates of source and target points, equal.

    Raises:
        ConfigError: an argument outside its range.
    """

    epsilon: float = 0.1
    ridge: float = 0.05
    dims: tuple[int, int] = (2, 2)

    name = "whitened"
    cost = SqEuclidean()

    def __post_init__(self):
        """Check the arguments."""
        check_dims(self.dims)
        check_positive(epsilon=self.epsilon, ridge=self.ridge)
        if self.dims[0] != self.dims[1]:
            raise ConfigError(f"expected equal dims, in which whitened points can be compared, received {self.dims}")

    def source_features(self, mu: Measure, at: Points) -> Features:
        """A(mu) (x - E mu)."""
        weights = (mu.weights / mu.weights.sum(-1, keepdim=True)).unsqueeze(-1)
        middle = mean(mu).unsqueeze(-2)
        centred = mu.points - middle
        ridge = self.ridge * torch.eye(mu.d, dtype=mu.dtype, device=mu.device)
        whitening = _InverseRoot.apply((weights * centred).mT @ centred + ridge)
        assert isinstance(whitening, Tensor)
        return (at - middle) @ whitening

    def target_features(self, nu: Measure, at: Points) -> Features:
        """A(nu) (y - E nu)."""
        return self.source_features(nu, at)

    def constants(self, half_width: float) -> tuple[float, float]:
        """``(2 R / ridge, 4 R^3 / ridge^2)`` with R = h sqrt(d)."""
        radius = radii(self.dims, half_width)[0]
        return 2 * radius / self.ridge, 4 * (radius / self.ridge) * (radius / self.ridge) * radius


def _at_atoms(feature_map: FeatureMap, mu: Measure) -> Features:
    """Features of the atoms, computed once along batch axes on which a measure is only repeated, as by ``every_pair``."""
    repeated = [
        points == weights == 0
        for points, weights in zip(mu.points.stride()[:-2], mu.weights.stride()[:-1], strict=True)
    ]
    few = mu.map(lambda t: t[tuple(slice(0, 1) if same else slice(None) for same in repeated)])
    return feature_map(few, few.points).expand(*mu.batch_shape, mu.n, -1)


class _InverseRoot(torch.autograd.Function):
    """S^(-1/2) of positive definite matrices. The derivative of ``eigh`` would be NaN at equal eigenvalues; this is not."""

    @staticmethod
    def forward(ctx, s: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(s)
        ctx.save_for_backward(values, vectors)
        return (vectors * values.rsqrt().unsqueeze(-2)) @ vectors.mT

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        if torch.is_grad_enabled():  # a second derivative without this part would be wrong in silence
            raise BackendError(
                "expected first derivatives of a whitened system only, received create_graph=True; whiten the points "
                "yourself, by a Cholesky factor, if you need second ones"
            )
        values, vectors = ctx.saved_tensors
        roots = values.sqrt()
        # Divided differences of t^(-1/2) (Daleckii, Krein), in a form that has no 0 / 0.
        slopes = -1 / (roots.unsqueeze(-1) * roots.unsqueeze(-2) * (roots.unsqueeze(-1) + roots.unsqueeze(-2)))
        return vectors @ (slopes * (vectors.mT @ grad @ vectors)) @ vectors.mT
