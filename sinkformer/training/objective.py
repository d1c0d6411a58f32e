"""The loss of a batch and its gradient, without a derivative through the solver."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sinkformer import ops
from sinkformer._numerics import potential_dtype, relative_entropy, safe_divide, safe_log
from sinkformer.errors import ConfigError, DTypeError
from sinkformer.measures import Measure
from sinkformer.models import SinkhornTransformer
from sinkformer.solvers import sinkhorn
from sinkformer.training.batches import Batch
from sinkformer.training.recipes import Loss, Recipe

_RIDGE = 1e-9


def fenchel_young(
    logits: Tensor, target: Tensor, *, tolerance: float = 1e-6, max_iterations: int = 1000
) -> tuple[Tensor, Tensor]:
    """KL from P(S) to T and its gradient in S, where P(S) couples the marginals that T has.

    ``losses.fenchel_young`` couples the marginals of the measures instead. Solving for those of T makes the gradient vanish
    at P = T exactly, however accurately T was computed. The solver starts from the potentials that are right if S is,

        minimise over f, g   sum_ij T_ij (log T_ij / (a_i b_j) - S_ij - f_i - g_j)^2,

    unless the dual value says that zero is the better start.

    Args:
        logits: S = -c / epsilon, ``(B, n, m)``; no gradient flows into it.
        target: T, ``(B, n, m)``, non-negative; its mass is normalised.
        tolerance: L1 marginal error to reach.
        max_iterations: most sweeps and Newton steps.

    Returns:
        The loss ``(B)`` in nats and the gradient P(S) - T ``(B, n, m)``, in float64 where the device has it; NaN where the
        logits are.
    """
    wide = potential_dtype(logits.device)
    s, t = logits.detach().to(wide), target.detach().to(wide)
    t = t / t.sum((-1, -2), keepdim=True)
    a, b, one = t.sum(-1), t.sum(-2), t.new_ones(len(t))
    starts = torch.zeros_like(b), _fitted(s, t, a, b)
    potentials = [ops.softmin(-s, g, safe_log(b), one) for g in starts]
    cold, warm = ((a * f).sum(-1) + (b * g).sum(-1) for f, g in zip(potentials, starts, strict=True))
    better = (warm > cold).unsqueeze(-1)
    f, g = (torch.where(better, warm, cold).nan_to_num(0.0) for cold, warm in (potentials, starts))
    solution = sinkhorn(
        a,
        b,
        cost=-s,
        epsilon=1.0,
        init=(f, g),
        tolerance=tolerance,
        max_iterations=max_iterations,
        on_failure="ignore",
    )
    f, g = solution.potentials
    plan = ops.plan(-s, f, g, a, b, one)
    value = (a * f).sum(-1) + (b * g).sum(-1) - (plan.sum((-1, -2)) - 1)
    entropy = relative_entropy(t, a.unsqueeze(-1) * b.unsqueeze(-2), (-1, -2))
    return entropy - (t * s).sum((-1, -2)) - value, plan - t


def _fitted(s: Tensor, t: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The g of the least-squares problem in :func:`fenchel_young`, from its normal equations without f."""
    density = safe_log(t) - safe_log(a).unsqueeze(-1) - safe_log(b).unsqueeze(-2)
    residual = torch.where(t > 0, t * (torch.where(t > 0, density, 0.0) - s), 0.0)
    conditional = safe_divide(t, a.unsqueeze(-1))
    # Constants are in the kernel, which b b^T removes; the ridge is for blocks of T that do not touch.
    normal = b.unsqueeze(-1) * b.unsqueeze(-2) - t.mT @ conditional
    normal = normal + torch.diag_embed(b * (1 + _RIDGE) + (b == 0))
    right = residual.sum(-2) - ops.apply(conditional.mT, residual.sum(-1))
    return torch.linalg.solve_ex(normal, right)[0]


def logits_of(model: SinkhornTransformer, batch: Batch, bfloat16: bool) -> Tensor:
    """S = -c / epsilon without the factor e^tau of ``log_scale``, ``(G, s, t, n, m)``; every measure is encoded once."""
    mu, nu, _ = batch
    if model.config.tensor is not None and not model.config.causal:
        return _logits_by_heads(model, mu, nu, bfloat16)
    with _autocast(mu, bfloat16):
        q, k = model.source_encoder(mu), model.target_encoder(nu)
    logits = q.to(mu.dtype).flatten(1, 2) @ k.to(nu.dtype).flatten(1, 2).mT / model.config.epsilon
    return logits.unflatten(-1, (-1, nu.n)).unflatten(1, (-1, mu.n)).transpose(2, 3)


def _logits_by_heads(model: SinkhornTransformer, mu: Measure, nu: Measure, bfloat16: bool) -> Tensor:
    """The same for encoders with ``tensor``: heads of a pair are weighted, and the features never multiplied out."""
    with _autocast(mu, bfloat16):
        (q, b), (k, c) = model.source_encoder.factors(mu), model.target_encoder.factors(nu)
    assert b is not None
    assert c is not None
    heads = torch.einsum("gsahc,gtahc->gsth", b.to(mu.dtype), c.to(nu.dtype)) / model.config.epsilon
    weighted = k.to(nu.dtype).unflatten(-1, (heads.shape[-1], -1)).unsqueeze(1) * heads.unsqueeze(-2).unsqueeze(-1)
    return q.to(mu.dtype).unsqueeze(2) @ weighted.flatten(-2).mT


def backward(model: SinkhornTransformer, batch: Batch | None, recipe: Recipe, log_scale: float) -> float:
    """Mean loss of a batch, 0 without one; its gradient is left in the parameters."""
    model.zero_grad()
    if batch is None:
        return 0.0
    if callable(recipe.loss):
        loss = _own_loss(model, batch, recipe.loss, log_scale, recipe.bfloat16).mean()
        if not loss.requires_grad:
            raise ConfigError(
                "expected a loss that depends on the model's parameters, received one without a gradient; "
                "compute it from the coupling with torch, without .detach() or .item()"
            )
        loss.backward()
        return loss.item()
    scale, (mu, nu, target) = math.exp(log_scale), batch
    logits = logits_of(model, batch, recipe.bfloat16)
    options = {"tolerance": recipe.tolerance, "max_iterations": recipe.max_iterations}
    loss, gradient = fenchel_young((scale * logits).flatten(0, 2), target.flatten(0, 2), **options)
    gradient = (gradient * (scale / len(gradient))).to(logits.dtype).view_as(logits)
    # Functions of one side change no coupling; kept small, they do not drift.
    rows = (logits * nu.weights[:, None, :, None]).sum(-1).square() * mu.weights[:, :, None]
    columns = (logits * mu.weights[:, :, None, :, None]).sum(-2).square() * nu.weights[:, None]
    penalty = recipe.gauge * (rows.sum(-1) + columns.sum(-1)).mean()
    torch.autograd.backward([logits, penalty], [gradient, None])
    return float(loss.mean())


@torch.no_grad()
def loss_of(model: SinkhornTransformer, batch: Batch, recipe: Recipe, log_scale: float) -> float:
    """Mean loss of a batch."""
    if callable(recipe.loss):
        return float(_own_loss(model, batch, recipe.loss, log_scale, recipe.bfloat16).mean())
    logits = math.exp(log_scale) * logits_of(model, batch, recipe.bfloat16)
    loss, _ = fenchel_young(
        logits.flatten(0, 2),
        batch.target.flatten(0, 2),
        tolerance=recipe.tolerance,
        max_iterations=recipe.max_iterations,
    )
    return float(loss.mean())


def _own_loss(model: SinkhornTransformer, batch: Batch, loss: Loss, log_scale: float, bfloat16: bool) -> Tensor:
    """A loss of the user's on every pair of a batch, ``(G s t)``."""
    mu, nu, target = batch.pairs()
    with _autocast(mu, bfloat16):
        pi = model.sharpened(math.exp(log_scale - model.config.log_scale))(mu, nu, on_failure="ignore")
    value: Any = loss(pi, target)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        received = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise DTypeError(f"expected a loss that returns a floating-point tensor (B), received {received}")
    return value


def _autocast(mu: Measure, bfloat16: bool) -> torch.autocast:
    return torch.autocast(mu.device.type, dtype=torch.bfloat16, enabled=bfloat16)
