"""Sinkhorn Transformers trained on the target systems, and how far from them they end: one JSON line for each run.

    python -m benchmarks.training --system eot --out runs                       # ten processor minutes
    python -m benchmarks.training --system switch --seed 1 --minutes 2 --pairs 600 --out runs

W1 between the model's coupling and the target, for the ground metric |x - x'| + |y - y'|, both rounded to exact marginals:
upper ends of certified brackets, the widest of which is reported. The pairs are drawn anew, from streams that neither training
nor validation has seen; 64 and 256 atoms are sizes never trained on. A sup over finitely many pairs is a lower bound of the
theorem's. A run that was interrupted goes on when it is started again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sinkformer as sf
from sinkformer.metrics import w1
from sinkformer.models import SinkhornTransformer, SinkhornTransformerConfig
from sinkformer.systems import System, named
from sinkformer.training import Recipe, fit

FULL = dict(width=48, rank=512, tensor=(16, 8), moments=True, contextual_skip=True, epsilon=0.1)
# The network and the recipe of every system; what is not named is the default.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eot": (FULL, {}),
    "whitened": (FULL, {}),
    "teacher": (FULL, {}),
    "switch": (FULL | dict(width=64, rank=2048, tensor=(32, 16)), {}),
    # The sharper the better: blunt logits at first, and sharper ones than trained for in the evaluation.
    "monotone": (
        dict(width=32, rank=32, epsilon=1.0, log_scale=7.0),
        dict(optimizer="adamw", rate=2e-3, groups=2, log_scale=1.0),
    ),
}
SHARPENED = {"monotone": 3.0}
# Training sees more of the corners of the law of pairs; evaluation does not.
RARE = {"whitened": 0.1}
BATCH = 100


def model_of(system: str, seed: int) -> SinkhornTransformer:
    dims = named(system)[0].dims
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = SinkhornTransformerConfig(dim=dims[0], target_dim=dims[1], **SETTINGS[system][0])
        return SinkhornTransformer(config)


def evaluate(
    model: SinkhornTransformer, system: System, mu: sf.Measure, nu: sf.Measure, tolerance: float | None
) -> dict[str, float]:
    """Upper ends of the W1 brackets of all pairs, and how many couplings of the model did not converge to 1e-9."""
    distances, failed, width = [], 0, 0.0
    for start in range(0, len(mu), BATCH):
        part = mu[start : start + BATCH], nu[start : start + BATCH]
        with torch.no_grad():
            pi, target = model(*part, on_failure="ignore"), system(*part)
        failed += int((~pi.solution.converged).sum())
        found = w1(pi.rounded(), target.rounded(), tol=tolerance)
        distances.append(found.upper)
        width = max(width, float(found.width.max()))
    values = torch.cat(distances).numpy()
    numbers = {"mean": values.mean(), "p95": np.quantile(values, 0.95), "sup": values.max(), "widest": width}
    return {"pairs": len(values), "unconverged": failed} | {name: float(f"{x:.4g}") for name, x in numbers.items()}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    name, seed = arguments.system, arguments.seed
    system, sampler = named(name)
    model, recipe = model_of(name, seed), Recipe(**SETTINGS[name][1])
    folder = arguments.out / f"{name}-{seed}"
    options = {"seconds": 60 * arguments.minutes, "seed": seed, "folder": folder, "resume": True}
    trained_on = dataclasses.replace(sampler, rare=RARE.get(name, 0.0))
    history = fit(model, (system, trained_on), recipe=recipe, progress=arguments.progress, **options)
    factor = SHARPENED.get(name, 1.0)
    exact = dataclasses.replace(
        model.config, tolerance=1e-9, max_iterations=20_000, log_scale=model.config.log_scale + math.log(factor)
    )
    exact_model = SinkhornTransformer(exact, dtype=torch.float64)
    exact_model.load_state_dict(model.double().state_dict())

    started, results = time.process_time(), {}
    sets = ((2, 16), arguments.pairs, None), ((64, 64), arguments.large, None), ((256, 256), arguments.huge, 0.05)
    for sizes, count, tolerance in sets:
        # Far from the seeds of training: those are hashed, these are not.
        generator = torch.Generator().manual_seed(10_000 + sizes[1])
        if count:
            pairs = dataclasses.replace(sampler, sizes=sizes).pairs(count, generator=generator)
            results[f"n {sizes[0]}-{sizes[1]}"] = evaluate(exact_model, system, *pairs, tolerance=tolerance)
    return {
        "system": name,
        "seed": seed,
        "minutes": arguments.minutes,
        "steps": history.steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "validation": history.best,
        "sharpened": factor,
        "w1": results,
        "evaluation_seconds": round(time.process_time() - started, 1),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", required=True, choices=list(SETTINGS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0, help="processor minutes of training")
    parser.add_argument("--pairs", type=int, default=10_000, help="pairs with 2 to 16 atoms a side")
    parser.add_argument("--large", type=int, default=20, help="pairs with 64 atoms a side, a size never trained on")
    parser.add_argument("--huge", type=int, default=3, help="pairs with 256 atoms a side")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and results.jsonl")
    parser.add_argument("--progress", action="store_true", help="a progress bar")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    line = json.dumps(run(arguments))
    with (arguments.out / "results.jsonl").open("a") as file:
        file.write(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
