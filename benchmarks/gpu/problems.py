"""The problems of the GPU benchmark, made on its device, and the error that decides whether a solver gets a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CENTRES, NOISE = 8, 0.7
_ROWS = 2**22


@dataclass(frozen=True, eq=False)
class Clouds:
    """B problems with squared distances as costs; weights are zero at padding, which stands last.

    Attributes:
        x, y: points ``(B, n, d)`` and ``(B, m, d)``, float32.
        a, b: weights ``(B, n)`` and ``(B, m)``, float32, of sum one.
        epsilon: ``(B,)`` float32: the same share of the range of the costs of every problem.
    """

    x: Tensor
    y: Tensor
    a: Tensor
    b: Tensor
    epsilon: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def at(self, index: int) -> Clouds:
        """One problem without its padding, as a batch of one."""
        n, m = int((self.a[index] > 0).sum()), int((self.b[index] > 0).sum())
        part = slice(index, index + 1)
        return Clouds(self.x[part, :n], self.y[part, :m], self.a[part, :n], self.b[part, :m], self.epsilon[part])

    def costs(self) -> Tensor:
        """Of every pair, ``(B, n, m)``, float32."""
        squares = self.x.square().sum(-1).unsqueeze(-1) + self.y.square().sum(-1).unsqueeze(-2)
        return (squares - 2 * (self.x @ self.y.mT)).clamp_min_(0.0)

    def error(self, f: Tensor, g: Tensor) -> float:
        """L1 error of both marginals of a b exp((f + g - C) / epsilon), in float64, of the worst problem."""
        worst = 0.0
        for i in range(len(self)):
            x, y, a, b, epsilon = (t[i].double() for t in (self.x, self.y, self.a, self.b, self.epsilon))
            u, v = f[i].double() / epsilon, g[i].double() / epsilon
            rows, columns = torch.zeros_like(a), torch.zeros_like(b)
            for start in range(0, len(x), max(1, _ROWS // len(y))):
                part = slice(start, start + max(1, _ROWS // len(y)))
                exponents = u[part].unsqueeze(-1) + v - torch.cdist(x[part], y).square() / epsilon
                plan = exponents.clamp_max(600.0).exp_().mul_(a[part].unsqueeze(-1)).mul_(b)
                rows[part] = plan.sum(-1)
                columns += plan.sum(0)
            found = float((rows - a / a.sum()).abs().sum() + (columns - b / b.sum()).abs().sum())
            worst = max(worst, found) if found == found else float("inf")
        return worst


def clouds(sizes: list[tuple[int, int]], d: int, ratio: float, device: torch.device, seed: int = 0) -> Clouds:
    """Unit vectors around shared centres, random positive weights, epsilon = ratio x range of the costs."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.nn.functional.normalize(torch.randn(CENTRES, d, generator=generator), dim=-1)

    def side(counts: list[int]) -> tuple[Tensor, Tensor]:
        most = max(counts)
        which = torch.randint(CENTRES, (len(counts), most), generator=generator)
        noise = torch.randn(len(counts), most, d, generator=generator) * (NOISE / d**0.5)
        weights = 0.5 + torch.rand(len(counts), most, generator=generator)
        live = torch.arange(most) < torch.tensor(counts).unsqueeze(-1)
        weights = weights * live
        points = torch.nn.functional.normalize(centres[which] + noise, dim=-1)
        return points.to(device), (weights / weights.sum(-1, keepdim=True)).to(device)

    (x, a), (y, b) = side([n for n, _ in sizes]), side([m for _, m in sizes])
    ones = torch.ones(len(sizes), device=device)
    epsilon = torch.tensor([ratio * _range(x[i], y[i], a[i] > 0, b[i] > 0) for i in range(len(sizes))])
    return Clouds(x, y, a, b, epsilon.to(ones))


def _range(x: Tensor, y: Tensor, live_x: Tensor, live_y: Tensor) -> float:
    x, y = x[live_x][:2000], y[live_y][:2000]
    costs = torch.cdist(x, y).square()
    return float(costs.max() - costs.min())


def ragged(count: int, most: int, seed: int = 0) -> list[tuple[int, int]]:
    """Sizes between an eighth of ``most`` and ``most``."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(max(1, most // 8), most + 1, (count, 2), generator=generator)
    return [(int(n), int(m)) for n, m in found]
