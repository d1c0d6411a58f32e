"""The softmax baselines of ``sinkformer w1``, trained on a target system: one folder for each run.

    python -m benchmarks.baselines --system whitened --kind softmax --out runs     # ten processor minutes
    python -m benchmarks.baselines --system whitened --kind cross --out runs
    sinkformer w1 --model runs/whitened-0/step-... --system whitened --baselines \\
        --baseline runs/whitened-softmax-0 --baseline runs/whitened-cross-0

``softmax`` is the network of ``benchmarks.training`` with a softmax in the place of Sinkhorn's iteration; ``cross`` lets its
keys attend to the source measure as well (``evaluation.CrossSoftmax``). Both are trained by KL to the target, on the data and
for the processor time of a Sinkhorn Transformer. A run that was interrupted goes on when it is started again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.training import SETTINGS
from sinkformer import losses
from sinkformer.evaluation import CrossSoftmax
from sinkformer.models import SinkhornTransformer, SinkhornTransformerConfig
from sinkformer.systems import named
from sinkformer.training import Recipe, fit

KINDS = {"softmax": SinkhornTransformer, "cross": CrossSoftmax}


def train(name: str, kind: str, seed: int, minutes: float, out: Path, progress: bool) -> Path:
    """Train, and save the model; returns its folder."""
    system, sampler = named(name)
    network, recipe = SETTINGS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        dims = {"dim": system.dims[0], "target_dim": system.dims[1]}
        model = KINDS[kind](SinkhornTransformerConfig(**dims, head="softmax", **network))
    folder = out / f"{name}-{kind}-{seed}"
    fit(
        model,
        (system, sampler),
        recipe=Recipe(loss=losses.fenchel_young, **recipe),
        seconds=60 * minutes,
        seed=seed,
        folder=folder / "training",
        resume=True,
        progress=progress,
    )
    model.save_pretrained(folder)
    return folder


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", required=True, choices=list(SETTINGS))
    parser.add_argument("--kind", required=True, choices=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0, help="processor minutes of training")
    parser.add_argument("--out", type=Path, required=True, help="folder for the models")
    parser.add_argument("--progress", action="store_true", help="a progress bar")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(train(given.system, given.kind, given.seed, given.minutes, given.out, given.progress))


if __name__ == "__main__":
    main()
