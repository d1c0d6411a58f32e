"""From a plan to a continuous density: the first two steps of the proof.

Partitions of unity (phi_k), (psi_l) of X and Y, of supports of diameter at most h_X, h_Y; m_kl = int phi_k psi_l dF,
a_k = int phi_k dmu, b_l = int psi_l dnu.

Smoothing.  pi_h = sum_kl m_kl / (a_k b_l) (phi_k mu) (x) (psi_l nu) has the marginals mu and nu, and W1(pi_h, F) <= h_X + h_Y:
the mass m_kl that phi_k psi_l has of F, and as much of pi_h, is moved within the support of phi_k psi_l.

Regularised density.  rho = delta + sum_kl phi_k psi_l m_kl / (a_k b_l + delta), continuous on all of P(X) x P(Y) x X x Y,
and S the coupling of the cost -epsilon log rho. For couplings p of mu and nu, and R = rho mu (x) nu of mass Z,

    KL(p | S) <= log Z + <p, log p / R>,                                                                               (1)

since S differs from R by functions of x and of y, so that KL(p | S) = <p, log p / R> - <S, log S / R>, and
<S, log S / R> >= -log Z (Jensen). For p = pi_h the log-sum inequality and Z <= 1 + delta make it

    KL(pi_h | S) <= delta + sum_kl m_kl log(1 + delta / (a_k b_l)) <= delta + 0.81 cells sqrt(delta),                  (2)

where a_k b_l >= m_kl^2, m log(1 + delta / m^2) <= 0.81 sqrt(delta), and ``cells`` is the number of those with mass.

Geometric density.  log rho = sum_kl phi_k psi_l log(m_kl / (a_k b_l + delta) + delta) separates in x and y for every pair, with
rank at most the number of k; Z <= 1 + delta again (Jensen), and (1) is the bound.

In all cases W1 <= H min(1, sqrt(KL / 2)) by Pinsker, H = min(diam X, diam Y): both plans have exactly the marginals mu and nu,
so the surplus of one over the other can be moved within the fibres of X, row by row, or within those of Y.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from sinkformer._numerics import relative_entropy, safe_divide, safe_log
from sinkformer._typing import PerProblem, PlanMatrix, Points
from sinkformer.approximation.pairs import Pairs
from sinkformer.errors import ConfigError
from sinkformer.measures import Measure

Interpolation: TypeAlias = Literal["geometric", "arithmetic"]

# Largest |x| / mesh: beyond, neighbouring nodes of the grid are not told apart.
_FINEST = 2.0**45
# Rounding of a sum that defines a relative entropy, in nats.
_ROUNDING = 4e-15
# Above the sup of t log(1 + 1 / t^2) over t > 0.
CELL = 0.81


@dataclass(frozen=True)
class Partition:
    """A continuous partition of unity of R^d: hat functions on Kuhn's triangulation of a cubic grid.

    phi_k(x) = max(0, 1 - max_i (t_i)^+ - max_i (-t_i)^+), t = (x - node_k) / s. At every point at most d + 1 of them are
    positive. The support of one has diameter 2 s sqrt(d) = ``mesh``.

    Attributes:
        mesh: diameter of a support, > 0, in the units of the points.
    """

    mesh: float

    def nodes(self, points: Points) -> tuple[Tensor, Tensor]:
        """Nodes of the cells that points are in, and the values of their hats there.

        Args:
            points: ``(n, d)``.

        Returns:
            Grid coordinates ``(n, d + 1, d)``, whole numbers, and values ``(n, d + 1)``, non-negative, of sum one.

        Raises:
            ConfigError: points that are too far out for the mesh.
        """
        d = points.shape[-1]
        scaled = points * (2 * math.sqrt(d) / self.mesh)
        if bool((scaled.abs() > _FINEST).any()):
            raise ConfigError(
                f"expected a mesh above {float(points.abs().max()) * 2 * math.sqrt(d) / _FINEST:.3g} for points of this size, "
                f"received {self.mesh:.3g}"
            )
        corner = scaled.floor()
        share, order = (scaled - corner).sort(-1, descending=True)
        walk = torch.nn.functional.one_hot(order, d).cumsum(-2)
        nodes = torch.cat([torch.zeros_like(walk[..., :1, :]), walk], -2) + corner.unsqueeze(-2)
        ends = share.new_ones(len(points), 1), share.new_zeros(len(points), 1)
        return nodes, -torch.cat([ends[0], share, ends[1]], -1).diff(dim=-1)

    def at_atoms(self, measures: Measure) -> Tensor:
        """phi_k(x_i), ``(I, N, K)``, for the k that are positive at some atom of a measure; zero rows for padding."""
        values = []
        for mu in measures:
            live = mu.weights > 0
            nodes, hats = self.nodes(mu.points[live])
            index = torch.unique(nodes.flatten(0, 1), dim=0, return_inverse=True)[1]
            phi = hats.new_zeros(mu.n, int(index.max()) + 1)
            phi[live] = phi[live].scatter_add(-1, index.view_as(hats), hats)
            values.append(phi)
        most = max(phi.shape[-1] for phi in values)
        return torch.stack([torch.nn.functional.pad(phi, (0, most - phi.shape[-1])) for phi in values])


@dataclass(frozen=True, eq=False)
class Cells:
    """The masses of all cells, and the functions that made them.

    Attributes:
        pairs: the pairs.
        mesh: h_X = h_Y, of both partitions.
        phi, psi: values at the atoms, ``(B, N, K)`` and ``(B, M, L)``.
        masses: m_kl, ``(B, K, L)``.
        products: a_k b_l, ``(B, K, L)``.
    """

    pairs: Pairs
    mesh: float
    phi: Tensor
    psi: Tensor
    masses: Tensor
    products: Tensor

    @classmethod
    def of(cls, pairs: Pairs, mesh: float) -> Cells:
        """Cells of a mesh."""
        partition = Partition(mesh)
        phi = partition.at_atoms(pairs.sources)[pairs.source_index]
        psi = partition.at_atoms(pairs.targets)[pairs.target_index]
        a, b = (side.weights.unsqueeze(-2) for side in (pairs.mu, pairs.nu))
        return cls(pairs, mesh, phi, psi, phi.mT @ pairs.plans @ psi, (a @ phi).mT * (b @ psi))

    @property
    def count(self) -> int:
        """Largest number of cells with mass of a pair."""
        return int((self.masses > 0).sum((-1, -2)).max())

    def smoothed(self) -> PlanMatrix:
        """pi_h, ``(B, N, M)``."""
        density = self.phi @ safe_divide(self.masses, self.products) @ self.psi.mT
        return density * self.pairs.product

    def logits(self, delta: float, interpolation: Interpolation) -> Tensor:
        """The values log rho at the atoms, ``(B, N, M)``: -c / epsilon of the regularised cost."""
        values = self.masses / (self.products + delta)
        if interpolation == "geometric":
            return self.phi @ (values + delta).log() @ self.psi.mT
        return (self.phi @ values @ self.psi.mT + delta).log()

    def divergence(self, delta: float, interpolation: Interpolation) -> PerProblem:
        """A bound of KL(pi_h | S), ``(B)``, in nats: the first of (2), or (1) for the geometric density."""
        if interpolation == "geometric":
            return self.divergence_from(self.smoothed(), self.logits(delta, interpolation))
        ratio = torch.where(self.products > 0, delta / self.products, 0.0)
        return delta + (self.masses * ratio.log1p()).sum((-1, -2))

    def divergence_from(self, plan: PlanMatrix, logits: Tensor) -> PerProblem:
        """The bound (1) of KL(plan | S) for any coupling and any log rho at the atoms, ``(B)``, in nats."""
        weights = self.pairs.product
        shifted = torch.where(weights > 0, logits, -torch.inf)
        top = shifted.amax((-1, -2), keepdim=True)
        mass = (weights * (shifted - top).exp()).sum((-1, -2), keepdim=True)
        log_ratio = safe_log(plan) - safe_log(weights) - (logits - top) + mass.log()
        term = torch.where(plan > 0, plan * torch.where(plan > 0, log_ratio, 0.0), 0.0)
        return term.sum((-1, -2)).clamp_min(0.0) + _ROUNDING


def pinsker(divergence: PerProblem, fibre: PerProblem) -> PerProblem:
    """H min(1, sqrt(KL / 2)), a bound of W1 for two couplings of the same measures, ``(B)``."""
    return fibre * (divergence / 2).sqrt().clamp_max(1.0)


def divergence_of(plan: PlanMatrix, other: PlanMatrix) -> PerProblem:
    """KL(plan | other) with a margin for rounding, ``(B)``, in nats."""
    return relative_entropy(plan, other, (-1, -2)) + _ROUNDING
