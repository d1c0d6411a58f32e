"""Learn a coupling system from samples: pairs of clouds and their couplings, the rule behind them hidden.

The hidden rule: both clouds are centred, the source is rotated and stretched, and the two are coupled by entropic
transport for the squared distance. It depends on whole clouds (their means), so a function of two points cannot
imitate it. The model sees fresh clouds of 2 to 16 points at every step, and is judged on pairs it has never seen, by the
exact distance W1 on the product space and by total variation.

    python learn_a_coupling_system.py        (about a minute on one core)
"""

import argparse
from pathlib import Path

import matplotlib
import ot
import torch

import sinkformer as sf

EPSILON = 0.5
HIDDEN = torch.tensor([[0.3, -1.1], [0.9, 0.4]])  # a rotation by about 70 degrees, with a stretch


def clouds(count: int, generator: torch.Generator) -> sf.Measure:
    """Batch of random clouds: 2 to 16 points of random weights around a random centre."""
    sizes = torch.randint(2, 17, (count,), generator=generator).tolist()
    parts = []
    for n in sizes:
        points = torch.randn(n, 2, generator=generator) + 2 * torch.randn(2, generator=generator)
        parts.append(sf.Measure.normalized(points, 0.2 + torch.rand(n, generator=generator)))
    return sf.Measure.stack(parts)


def centred(mu: sf.Measure) -> torch.Tensor:
    """The points of every cloud, less its mean."""
    return mu.points - (mu.weights.unsqueeze(-1) * mu.points).sum(-2, keepdim=True)


def hidden_rule(mu: sf.Measure, nu: sf.Measure) -> sf.Coupling:
    """The coupling system to be learned; only its answers are shown to the model."""
    features = centred(mu) @ HIDDEN.T, centred(nu)
    return sf.Coupling.solve(mu, nu, cost=sf.SqEuclidean(), features=features, epsilon=EPSILON)


def exact_w1(p: sf.Coupling, q: sf.Coupling) -> float:
    """Mean exact W1 over a batch, ground metric |x - x'| + |y - y'| on the pairs of points."""
    total = 0.0
    for one, other in zip(p, q, strict=True):
        joint, other_joint = (c.rounded().as_measure().to(torch.float64) for c in (one, other))
        x, y = joint.points.split(2, -1)
        ground = torch.cdist(x, x) + torch.cdist(y, y)
        weights = [(m.weights / m.weights.sum()).numpy() for m in (joint, other_joint)]
        total += float(ot.emd2(*weights, ground.numpy()))
    return total / len(p)


def main() -> None:
    """Train, measure, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--output", type=Path, default=Path("learn_a_coupling_system.png"), help="where the picture goes"
    )
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that everything works")
    args = parser.parse_args()
    steps, pairs = (5, 4) if args.smoke else (args.steps, 50)

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = sf.SinkhornTransformer(sf.SinkhornTransformerConfig(dim=2, width=32, heads=2, depth=1, epsilon=EPSILON))
    mu, nu = clouds(pairs, generator), clouds(pairs, generator)  # held out
    truth = hidden_rule(mu, nu)

    def report(name: str, pi: sf.Coupling) -> None:
        variation = float(sf.losses.total_variation(pi, truth).mean())
        print(f"{name:18} W1 {exact_w1(pi, truth):.3f}   total variation {variation:.3f}")

    product = sf.Coupling.from_dense(mu, nu, mu.weights.unsqueeze(-1) * nu.weights.unsqueeze(-2))
    report("product coupling", product)
    with torch.no_grad():
        report("before training", model(mu, nu))

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
    history = []
    for step in range(steps):
        source, target = clouds(32, generator), clouds(32, generator)
        # KL to the target, differentiated by the envelope theorem: no gradient has to pass the solver.
        loss = sf.losses.fenchel_young(model(source, target), hidden_rule(source, target)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        history.append(float(loss.detach()))
        if step % 50 == 0:
            print(f"step {step:4}: KL {history[-1]:.4f}")

    with torch.no_grad():
        learned = model(mu, nu)
    report("after training", learned)
    draw(history, learned, truth, args.output)
    print(f"picture: {args.output}")


def draw(history: list[float], learned: sf.Coupling, truth: sf.Coupling, output: Path) -> None:
    """Loss curve, and the coupling of one held-out pair beside the truth."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curve, left, right) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    curve.semilogy(history, color="tab:blue")
    curve.set(xlabel="step", ylabel="KL(target | prediction), nats", title="training, fresh clouds at every step")
    alive = [(int((p.source.weights > 0).sum()), int((p.target.weights > 0).sum())) for p in truth]
    k = max(range(len(alive)), key=lambda i: min(alive[i]))
    n, m = alive[k]
    plans = [pi[k].to_dense()[:n, :m] for pi in (learned, truth)]
    limits = (0.0, float(torch.stack(plans).max()))
    names = [[str(i) for i in range(size)] for size in (n, m)]
    for axes, plan, title in zip((left, right), plans, ("learned", "hidden rule"), strict=True):
        sf.plots.coupling(plan, axes, rows=names[0], columns=names[1], limits=limits)
        axes.set(title=f"a held-out pair: {title}", xlabel="target point", ylabel="source point")
    figure.savefig(output, dpi=120)


if __name__ == "__main__":
    main()
