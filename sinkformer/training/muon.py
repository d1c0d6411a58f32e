"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) with matrices of one shape taken together.

The steps of ``torch.optim.Muon``, except that the Newton-Schulz iteration runs in the dtype of the weights and on all
matrices of a shape at once: torch's runs in bfloat16, one by one, which on a CPU without bfloat16 units takes more time than
the model itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from sinkformer.errors import ConfigError, ShapeError

# Jordan's quintic: five steps bring singular values from [1e-3, 1] into [0.7, 1.2].
_QUINTIC, _STEPS, _SMALLEST = (3.4445, -4.7750, 2.0315), 5, 1e-7


class Muon(torch.optim.Optimizer):
    """Steps along the orthogonalised Nesterov momentum, with decoupled weight decay; for matrices.

    Args:
        params: matrices.
        lr: learning rate; a tall matrix, of shape (p, q) with p > q, takes steps longer by sqrt(p / q).
        momentum: decay of the mean of gradients.
        weight_decay: decay of the weights, times the learning rate.

    Raises:
        ConfigError: ``lr`` or ``weight_decay`` negative, or ``momentum`` outside [0, 1).
        ShapeError: a parameter that is no matrix.
    """

    def __init__(
        self, params: Iterable[Tensor], *, lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.1
    ):
        """Check the parameters."""
        if lr < 0 or weight_decay < 0 or not 0 <= momentum < 1:
            raise ConfigError(
                f"expected lr and weight_decay >= 0 and 0 <= momentum < 1, received {lr}, {weight_decay} and {momentum}"
            )
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() != 2:
                    raise ShapeError(f"expected matrices, received a parameter of shape {tuple(p.shape)}")

    @torch.no_grad()
    def step(self, closure=None):
        """One step; ``closure`` as for every torch optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    alike[tuple(p.shape)].append(p)
            for shape, matrices in alike.items():
                updates = _orthogonalised(torch.stack([self._direction(p, group["momentum"]) for p in matrices]))
                length = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(matrices, updates, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=length)
        return loss

    def _direction(self, p: Tensor, momentum: float) -> Tensor:
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        assert p.grad is not None
        mean = state["momentum"].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(mean, momentum)


def _orthogonalised(matrices: Tensor) -> Tensor:
    """U V^T for matrices U S V^T ``(k, p, q)``, with singular values about one instead."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(_SMALLEST)
    first, second, third = _QUINTIC
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = first * x + (second * gram + third * gram @ gram) @ x
    return x.mT if tall else x
