"""A Coupling inside an ordinary torch training loop: register clouds of points without known correspondences.

Every item of the data set is a pair of clouds drawn independently from one shape, the second one moved by an unknown
affine map. Clouds have different numbers of points, and no point of one belongs to a point of the other. An ``nn.Linear``
learns the map: move the source, couple it with the target, descend the cost of the coupling. ``DataLoader`` with
``Measure.collate`` makes the ragged batches.

    python coupling_in_a_training_loop.py        (about half a minute on one core)
"""

import argparse
from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import sinkformer as sf

EPSILON = 0.05
MAP = torch.tensor([[0.5, -0.9], [0.8, 0.7]])  # rotates by about 50 degrees, and shears
SHIFT = torch.tensor([1.0, -0.5])


def spiral(n: int, generator: torch.Generator) -> Tensor:
    """Noisy points on a spiral, ``(n, 2)``."""
    t = 0.5 + 5 * torch.rand(n, generator=generator)
    points = torch.stack([t * t.cos(), t * t.sin()], -1) / 4
    return points + 0.03 * torch.randn(n, 2, generator=generator)


def pairs(count: int, generator: torch.Generator) -> list[tuple[sf.Measure, sf.Measure]]:
    """Pairs of clouds of 30 to 60 points: one on the shape, another one moved by the unknown map."""
    data = []
    for n, m in torch.randint(30, 61, (count, 2), generator=generator).tolist():
        source, target = spiral(n, generator), spiral(m, generator) @ MAP.T + SHIFT
        data.append((sf.Measure.uniform(source), sf.Measure.uniform(target)))
    return data


def divergence(mu: sf.Measure, nu: sf.Measure) -> Tensor:
    """Entropic transport cost less half the cost of mu to itself, so that moving mu onto nu is best; one per pair."""
    across = sf.Coupling.solve(mu, nu, cost=sf.Euclidean(), epsilon=EPSILON)
    within = sf.Coupling.solve(mu, mu, cost=sf.Euclidean(), epsilon=EPSILON)
    return across.value - within.value / 2


def main() -> None:
    """Train, compare with the true map, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument(
        "--output", type=Path, default=Path("coupling_in_a_training_loop.png"), help="where the picture goes"
    )
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that everything works")
    args = parser.parse_args()
    epochs, count = (1, 8) if args.smoke else (args.epochs, 64)

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(pairs(count, generator), batch_size=8, shuffle=True, collate_fn=sf.Measure.collate)
    mu, nu = pairs(1, generator)[0]  # held out, for the picture

    warp = nn.Linear(2, 2)
    nn.init.eye_(warp.weight)
    nn.init.zeros_(warp.bias)
    pictures = [coupled(warp, mu, nu)]
    optimizer = torch.optim.Adam(warp.parameters(), lr=0.03)
    for epoch in range(epochs):
        losses = []
        for source, target in loader:
            loss = divergence(source.pushforward(warp), target).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        error = float((warp.weight - MAP).detach().norm()), float((warp.bias - SHIFT).detach().norm())
        mean = sum(losses) / len(losses)
        print(f"epoch {epoch}: loss {mean:.4f}, error of the matrix {error[0]:.3f}, of the shift {error[1]:.3f}")
    pictures.append(coupled(warp, mu, nu))
    draw(pictures, args.output)
    print(f"picture: {args.output}")


def coupled(warp: nn.Module, mu: sf.Measure, nu: sf.Measure) -> sf.Coupling:
    """Coupling of a moved cloud with its target."""
    return sf.Coupling.solve(mu.pushforward(warp), nu, cost=sf.Euclidean(), epsilon=EPSILON).detach()


def draw(pictures: list[sf.Coupling], output: Path) -> None:
    """Moved source and target, with a line from every source point to the mean of where its mass goes."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained", sharex=True, sharey=True)
    for ax, pi, title in zip(axes, pictures, ("before", "after"), strict=True):
        x, y, end = pi.source.points, pi.target.points, pi.barycentric_projection()
        for start, stop in zip(x.tolist(), end.tolist(), strict=True):
            ax.plot(*zip(start, stop, strict=True), color="0.7", linewidth=0.8, zorder=1)
        ax.scatter(*y.T, s=28, facecolors="none", edgecolors="tab:blue", label="target")
        ax.scatter(*x.T, s=14, color="tab:orange", label="source, moved by the learned map", zorder=2)
        ax.set_title(f"{title} training, a held-out pair: mean distance {float(pi.transport_cost()):.2f}")
        ax.set_aspect("equal")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(output, dpi=120)


if __name__ == "__main__":
    main()
