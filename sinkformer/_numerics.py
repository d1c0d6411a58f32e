"""Small numerical rules shared by every room, and the one table of tolerances."""

import torch
from torch import Tensor

# dtype: (mass: |sum of weights - 1| accepted, marginal: default L1 violation a solver stops at).
# Mass follows the rounding of a sum of up to a million terms; marginal is what a log-domain iteration in that dtype
# reaches when the cost range is a few hundred epsilon (rounding of a logit of size L is L * machine epsilon).
_TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-9, 1e-9),
    torch.float32: (1e-5, 1e-4),
    torch.bfloat16: (2e-2, 1e-4),
    torch.float16: (5e-3, 1e-4),
}

FLOAT_DTYPES = tuple(_TOLERANCES)


def mass_tolerance(dtype: torch.dtype) -> float:
    """Largest accepted deviation of a sum of weights from one."""
    return _TOLERANCES[dtype][0]


def marginal_tolerance(dtype: torch.dtype) -> float:
    """Default L1 marginal violation at which a solver working in ``dtype`` stops."""
    return _TOLERANCES[dtype][1]


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which sums and exponentials are taken: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def potential_dtype(device: torch.device) -> torch.dtype:
    """Dtype of potentials: float64 wherever the device has it.

    The plan is exp((f + g - C) / epsilon): where f and g are large compared with epsilon (a cost shifted by 1e4, say)
    their float32 rounding alone would be seen in the marginals. They are n + m numbers, so the width costs nothing.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def under_autocast(device: torch.device) -> bool:
    """Whether autocast is on for a device; not for one that has none, such as meta."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def safe_log(weights: Tensor) -> Tensor:
    """Logarithm of non-negative weights, ``-inf`` at zero, with gradient zero there instead of NaN."""
    positive = weights > 0
    return torch.where(positive, weights, 1.0).log().masked_fill(~positive, -torch.inf)


def safe_divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Quotient, zero where the denominator is zero, with gradient zero there instead of NaN."""
    nonzero = denominator != 0
    return torch.where(nonzero, numerator / torch.where(nonzero, denominator, 1.0), 0.0)


def relative_entropy(p: Tensor, q: Tensor, dim: tuple[int, ...]) -> Tensor:
    """Generalised KL(p | q) = sum p log(p / q) - p + q over ``dim``; ``+inf`` where p > 0 = q."""
    ratio = torch.where((p > 0) & (q > 0), p / torch.where(q > 0, q, 1.0), 1.0)
    terms = torch.where((p > 0) & (q <= 0), torch.inf, p * ratio.log() - p + q)
    return terms.sum(dim)


def penalty(tau: float, epsilon: Tensor) -> Tensor | None:
    """Strength rho of the KL penalty on a marginal, from tau = rho / (rho + epsilon); None for the hard constraint tau = 1."""
    return None if tau == 1.0 else epsilon * tau / (1 - tau)


def pairing(plan: Tensor, cost: Tensor) -> Tensor:
    """<P, C> over the last two axes; a pair without mass costs nothing, whatever its cost, and has derivative zero."""
    used = plan > 0
    return torch.where(used, plan * torch.where(used, cost, 0.0), 0.0).sum((-1, -2))
