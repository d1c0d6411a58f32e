"""Train an aligner on one of the sets below and score it, beside untrained methods on the same language model.

Reads gold alignments (JSON lines, one folder a set) from the folder in $SINKFORMER_ALIGNMENT_DATA. Prints a line for each
seed and each method; --output adds them to a file of JSON lines. The threshold, the calibration and the epoch are chosen on
the pairs named "dev" below, never on those that are scored.

    SINKFORMER_ALIGNMENT_DATA=... python -m benchmarks.alignment.trained edinburgh --seeds 0 1 2
    SINKFORMER_ALIGNMENT_DATA=... python -m benchmarks.alignment.trained edinburgh --seeds 0 --save sinkformer/text/aligner_en

The second writes the packaged aligner.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.alignment import data
from benchmarks.alignment.data import read
from sinkformer import plots
from sinkformer.metrics import coupling_tv, target_coupling
from sinkformer.text import Aligner
from sinkformer.text.gold import LinkFile
from sinkformer.text.learned import AlignerRecipe, PairModelConfig, reliability, train_aligner

UNTRAINED = ("argmax", "itermax", "balanced", "partial", "unbalanced")


@dataclass(frozen=True)
class Task:
    """What is trained and what is scored: parts as ``data.read`` takes them. ``dev`` None: held out of the training pairs."""

    train: tuple[str, ...]
    dev: str | None
    test: str
    start: str | None = None
    model: str = "en"
    recipe: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


LANGUAGES = ("it", "ru", "es", "pt", "bg", "sl", "nl", "da", "et", "hu")


def silver(*languages: str) -> tuple[str, ...]:
    """Automatic links of XL-WA, English to these languages."""
    return tuple(f"xlwa_en{language}/train_silver" for language in languages)


GOLD = ("mtref/train", "edinburgh/train", "msr_rte/train")
# For thousands of pairs; the short sides of MTRef are always the targets.
LONG = {"epochs": 4, "both_ways": False}
LARGE = {"width": 256, "channels": 48, "blocks": 4, "dropout": 0.1}
TASKS = {
    "edinburgh": Task(("edinburgh/train",), None, "edinburgh/dev", recipe={"epochs": 6}),
    "mtref": Task(GOLD, "mtref/dev[:1/2]", "mtref/dev[1/2:]", recipe=LONG, config=LARGE),
    "mtref-pure": Task(
        GOLD,
        "mtref/dev[:1/2]",
        "mtref/dev[1/2:]",
        recipe=LONG,
        config={"width": 256, "dropout": 0.1, "blocks": 0, "places": False, "spelling": False, "links": False},
    ),
    "mtref-tuned": Task(
        GOLD[:2],
        "mtref/dev[:1/2]",
        "mtref/dev[1/2:]",
        start="mtref",
        recipe={"epochs": 1, "rate": 5e-4, "fine_tune": 4, "batch": 20, "both_ways": False, "longest": 50},
    ),
    "msr_rte": Task(("msr_rte/train",), "msr_rte/dev[:1/2]", "msr_rte/dev[1/2:]", recipe={"epochs": 6}),
    "enit": Task(("xlwa_enit/train_silver",), None, "xlwa_enit/dev", model="multi"),
    "enru": Task(("xlwa_enru/train_silver",), None, "xlwa_enru/dev", model="multi"),
    "enit-romance": Task(silver("it", "es", "pt"), None, "xlwa_enit/dev", model="multi"),
    "enru-ten": Task(silver(*LANGUAGES), None, "xlwa_enru/dev", model="multi", recipe={"epochs": 3}),
}


def train(task: Task, seed: int, start: Path | None):
    return train_aligner(
        [read(part) for part in task.train],
        None if task.dev is None else [read(task.dev)],
        model=task.model if start is None else start,
        config=PairModelConfig(**task.config) if task.config else None,
        recipe=AlignerRecipe(**task.recipe),
        seed=seed,
        progress=sys.stderr.isatty(),
    )


def score(aligner: Aligner, test: LinkFile) -> dict[str, Any]:
    """Scores in percent; TV is that of the couplings with null words, in [0, 1]."""
    pairs = data.texts(test)
    results = list(aligner.align(pairs))
    found = data.scored(results, test)
    micro, interval = found.micro, found.bootstrap(1000, generator=torch.Generator().manual_seed(0))
    out = {
        name: round(100 * getattr(micro, name), 2)
        for name in ("f1", "precision", "recall_gold", "f1_sure", "aer", "total_f1")
    }
    out |= {f"{name}_interval": [round(100 * x, 1) for x in interval[name]] for name in ("f1", "aer")}
    out["degree_recall"] = [None if x is None else round(100 * x, 1) for x in micro.degree_recall]
    if aligner.method.null:
        gold = [target_coupling(p.links, len(a), len(b)) for p, (a, b) in zip(test.pairs, pairs, strict=True)]
        tv = [coupling_tv(r.coupling, g) for r, g in zip(results, gold, strict=True)]
        out["tv"] = round(sum(tv) / len(tv), 4)
    return out


def draw_reliability(aligner: Aligner, test: LinkFile, path: Path) -> float:
    """Write the reliability diagram of all pairs of words; returns the expected calibration error."""
    confidences, gold = [], []
    for result, p in zip(aligner.align(data.texts(test)), test.pairs, strict=True):
        links = torch.zeros_like(result.confidences)
        for i, j in p.links:
            links[i, j] = 1.0
        confidences.append(result.confidences.flatten())
        gold.append(links.flatten())
    bins, error = reliability(torch.cat(confidences), torch.cat(gold))
    plots.save(plots.reliability(bins, plots.new_axes((8, 8))), path)
    return error


def report(record: dict[str, Any], output: Path | None) -> None:
    degrees = "/".join("-" if x is None else f"{x:.0f}" for x in record["degree_recall"])
    print(
        f"{record['task']:<12} {record['what']:<11} F1 {record['f1']:5.2f} {record['f1_interval']}  "
        f"P {record['precision']:5.2f}  R {record['recall_gold']:5.2f}  F1(S) {record['f1_sure']:5.2f}  "
        f"AER {record['aer']:5.2f} {record['aer_interval']}  total {record['total_f1']:5.2f}  degrees {degrees}  "
        f"TV {record.get('tv', '-')}  {record['seconds']:.0f} s",
        flush=True,
    )
    if output is not None:
        with output.open("a") as file:
            file.write(json.dumps(record) + "\n")


def run(name: str, seed: int, arguments: argparse.Namespace) -> None:
    task, clock = TASKS[name], time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        start = arguments.start
        if task.start is not None and start is None:
            start = Path(scratch) / "start"
            train(TASKS[task.start], seed, None).save(start)
        aligner = train(task, seed, start)
        seconds = time.process_time() - clock
        folder = arguments.save or Path(scratch) / "aligner"
        aligner.save(folder)
        ready, test = Aligner(folder), read(task.test)
        record = {"task": name, "what": f"seed {seed}", "seconds": seconds, "threshold": aligner.decision.threshold}
        if arguments.reliability:
            record["calibration_error"] = draw_reliability(ready, test, arguments.reliability)
        report(record | score(ready, test), arguments.output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="+", choices=TASKS)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--untrained", action="store_true", help="score the untrained methods too")
    parser.add_argument("--save", type=Path, help="write the aligner here; for one task and one seed")
    parser.add_argument("--reliability", type=Path, help="draw confidence against the share of gold links")
    parser.add_argument(
        "--start", type=Path, help="folder of the aligner that a fine-tuning starts from; default: train it first"
    )
    parser.add_argument("--output", type=Path, help="add the records to this file")
    arguments = parser.parse_args()
    data.require()
    if arguments.save and (len(arguments.tasks), len(arguments.seeds)) != (1, 1):
        parser.error("--save is for one task and one seed")
    if arguments.start and any(TASKS[name].start is None for name in arguments.tasks):
        parser.error("--start is for tasks that start from another one")
    for name in arguments.tasks:
        for method in UNTRAINED if arguments.untrained else ():
            record = {"task": name, "what": method, "seconds": 0.0}
            report(record | score(Aligner(TASKS[name].model, method=method), read(TASKS[name].test)), arguments.output)
        for seed in arguments.seeds:
            run(name, seed, arguments)


if __name__ == "__main__":
    main()
