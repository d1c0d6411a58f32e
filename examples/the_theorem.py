"""The theorem as a figure: sup W1 between a model and a coupling system, against width, rank, epsilon and training budget.

Sinkhorn Transformers are dense among the continuous coupling systems, uniformly in W1 (Fraiman 2026, arXiv 2603.25860). So
for a continuous system the distance must go to zero with the size of the model and the training, and for every epsilon > 0.
Each point of the figure is a model trained from nothing on fresh pairs and judged on pairs that no training saw. The sup over
finitely many pairs is a lower bound of the theorem's.

    python the_theorem.py                    (about 12 minutes on one core)
    python the_theorem.py --system teacher --seconds 60
"""

import argparse
import json
from pathlib import Path

import matplotlib
import torch

import sinkformer as sf
from sinkformer.systems import named
from sinkformer.training import Recipe, fit

AXES = {
    "width": [4, 8, 16, 32, 64],
    "rank": [1, 2, 4, 16, 64],
    "epsilon": [0.03, 0.1, 0.3, 1.0],
    "budget": [0.1, 0.3, 1.0, 3.0],
}
TITLES = {
    "width": "width of the encoders",
    "rank": "rank r of <Q, K>",
    "epsilon": "epsilon of the model",
    "budget": "training, processor seconds",
}
BASE = {"width": 32, "rank": 16, "epsilon": 0.1, "budget": 1.0}


def distance(name: str, choice: dict[str, float], seconds: float, pairs: int) -> dict[str, float]:
    """Train one model, and measure it on pairs of its own."""
    system, sampler = named(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = sf.SinkhornTransformerConfig(
            dim=system.dims[0],
            target_dim=system.dims[1],
            width=int(choice["width"]),
            rank=int(choice["rank"]),
            epsilon=choice["epsilon"],
            moments=True,
            contextual_skip=True,
            max_iterations=20_000,
        )
        model = sf.SinkhornTransformer(config)
    fit(model, (system, sampler), seconds=seconds * choice["budget"], recipe=Recipe(groups=2), validation=0)
    model = model.double()
    mu, nu = sampler.pairs(pairs, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = sf.w1(model(mu, nu).rounded(), system(mu, nu).rounded())
    return {"mean": float(found.upper.mean()), "sup": float(found.upper.max())}


def measured(name: str, seconds: float, pairs: int, axes: dict[str, list]) -> dict[str, list[dict[str, float]]]:
    """All points; the base model, which is on every axis, once."""
    known: dict[str, dict[str, float]] = {}
    results = {}
    for axis, values in axes.items():
        results[axis] = []
        for value in values:
            choice = BASE | {axis: value}
            key = json.dumps(choice)
            if key not in known:
                known[key] = distance(name, choice, seconds, pairs)
            at = value * seconds if axis == "budget" else value
            results[axis].append({"at": at} | known[key])
            print(f"{axis:8s} {at:8.3g}   mean {known[key]['mean']:.5f}   sup {known[key]['sup']:.5f}", flush=True)
    return results


def draw(name: str, results: dict[str, list[dict[str, float]]], path: Path) -> None:
    """One panel for each axis, all with the same vertical one."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(results), figsize=(3.1 * len(results), 3.1), sharey=True, layout="constrained")
    for panel, (axis, points) in zip(panels, results.items(), strict=True):
        x = [p["at"] for p in points]
        for kind, style in (("sup", "o-"), ("mean", "s--")):
            panel.plot(x, [p[kind] for p in points], style, label=kind)
        panel.set(xscale="log", yscale="log", xlabel=TITLES[axis])
        panel.set_xticks(x, [f"{value:g}" for value in x])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("W1 to the target, new pairs")
    panels[0].legend()
    figure.suptitle(f"Sinkhorn Transformers and the system {name!r} (a sampled sup is a lower bound)")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train, measure, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", default="whitened")
    parser.add_argument("--seconds", type=float, default=30.0, help="processor seconds of the base model's training")
    parser.add_argument("--pairs", type=int, default=600)
    parser.add_argument("--output", type=Path, default=Path("the_theorem.png"))
    parser.add_argument("--smoke", action="store_true", help="a few seconds: does it run?")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    axes, seconds, pairs = AXES, arguments.seconds, arguments.pairs
    if arguments.smoke:
        axes, seconds, pairs = {"width": [4, 32], "budget": [0.1, 1.0]}, 2.0, 20
    results = measured(arguments.system, seconds, pairs, axes)
    arguments.output.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    draw(arguments.system, results, arguments.output)
    print(f"written: {arguments.output}, {arguments.output.with_suffix('.json')}")
    if arguments.smoke:
        sups = [p["sup"] for p in results["budget"]]
        assert sups[-1] < sups[0], "training must help"


if __name__ == "__main__":
    main()
