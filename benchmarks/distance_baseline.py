"""Make sinkformer/text/distances/baseline_en.json: how far apart unrelated texts are, by their length.

Source: Edinburgh++ (Thadani et al. 2012 edition, repository xuchen/jacana, Apache-2.0), training part only, as JSON lines
under $SINKFORMER_ALIGNMENT_DATA/edinburgh/train.jsonl. A pair of n and m words is made of sentences in random order, the
first text of first sentences, the second of second sentences of other pairs, both cut off at their length.
Prints mean and standard deviation; then, as a check, the rescaled similarity of unrelated texts of different lengths and of
the corpus's own pairs.

    SINKFORMER_ALIGNMENT_DATA=... python benchmarks/distance_baseline.py [output]
"""

import json
import os
import random
import sys
from pathlib import Path
from statistics import mean, stdev

from sinkformer.text import Aligner
from sinkformer.text.distances import Baseline, explain

SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
UNEQUAL = ((4, 16), (16, 64), (16, 256), (64, 256), (128, 512))
# Of the settings of an Aligner, those the distance depends on.
NAMES = ("model", "sha256", "layer", "lowercases", "centre", "null_price", "distortion", "tokenizer")


def draws(n: int) -> int:
    """Random pairs: spreads shrink with the length, and times grow with its cube."""
    return max(12, min(400, 8000 // n))


class Pairs:
    """Random pairs of unrelated texts; the same ones on every run."""

    def __init__(self, records: list[dict]):
        self.records = records
        self.random = random.Random(0)

    def draw(self, n: int, m: int) -> tuple[list[str], list[str]]:
        order = list(range(len(self.records)))
        self.random.shuffle(order)
        return self._text("source", order, n), self._text("target", order, m)

    def _text(self, side: str, order: list[int], n: int) -> list[str]:
        words: list[str] = []
        while len(words) < n:
            words += self.records[order.pop()][side]
        return words[:n]


def main() -> None:
    folder = os.environ.get("SINKFORMER_ALIGNMENT_DATA")
    if not folder:
        sys.exit("set SINKFORMER_ALIGNMENT_DATA to the folder that holds edinburgh/train.jsonl")
    with (Path(folder) / "edinburgh" / "train.jsonl").open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    aligner, pairs = Aligner(method="partial"), Pairs(records)
    means = []
    print("words  pairs  normalized distance (standard deviation)")
    for n in SIZES:
        found = [explain(aligner, *pairs.draw(n, n)).normalized_distance for _ in range(draws(n))]
        means.append(round(mean(found), 4))
        print(f"{n:>5}{len(found):>7}  {means[-1]:.4f} ({stdev(found):.4f})", flush=True)
    settings = {name: aligner.settings[name] for name in NAMES}
    baseline = Baseline(settings, SIZES, tuple(means))
    print("\nrescaled similarity (standard deviation)")
    for n, m in (*((n, n) for n in SIZES[2:7]), *UNEQUAL):
        print(
            f"unrelated, {n} and {m} words: {_similarities(aligner, baseline, [pairs.draw(n, m) for _ in range(40)])}"
        )
    own = [(record["source"], record["target"]) for record in records]
    print(f"the {len(own)} pairs of the corpus: {_similarities(aligner, baseline, own)}")

    default = Path(__file__).parents[1] / "sinkformer" / "text" / "distances" / "baseline_en.json"
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    record = {
        "source": "Edinburgh++ train (xuchen/jacana 5e9464acebc7, alignment-data/edinburgh), Apache-2.0",
        "made_by": "benchmarks/distance_baseline.py",
        "settings": settings,
        "sizes": SIZES,
        "distances": means,
    }
    out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {out}")


def _similarities(aligner: Aligner, baseline: Baseline, pairs: list[tuple[list[str], list[str]]]) -> str:
    found = []
    for a, b in pairs:
        e = explain(aligner, a, b)
        found.append(baseline.similarity(e.normalized_distance, len(a), len(b), aligner.settings))
    return f"{mean(found):.3f} ({stdev(found):.3f})"


if __name__ == "__main__":
    main()
