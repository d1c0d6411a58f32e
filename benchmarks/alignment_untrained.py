"""Word alignment with the packaged English model and the default settings: F1, AER, pairs per second.

Reads gold alignments (JSON lines, one folder a set) from the folder in $SINKFORMER_ALIGNMENT_DATA. Scores are
micro-averaged; recall and F1 count sure and possible links as gold, AER is that of Och and Ney (2003). The
defaults of ``Aligner`` were chosen on edinburgh/train with this script and its options.

    SINKFORMER_ALIGNMENT_DATA=... python benchmarks/alignment_untrained.py
    SINKFORMER_ALIGNMENT_DATA=... python benchmarks/alignment_untrained.py --sets edinburgh/train --limit 600 --layer 4
"""

import argparse
import json
import os
import sys
import time
from itertools import islice
from pathlib import Path

from sinkformer.text import Aligner

SETS = ("edinburgh/dev", "mtref/dev", "msr_rte/dev")


def read(path: Path, limit: int) -> list[dict]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in islice(file, limit)]


def score(records: list[dict], predictions: list[set]) -> tuple[float, float, float, float]:
    """(F1, precision, recall, AER), each in percent."""
    found = sure_size = gold_size = found_sure = found_gold = 0
    for record, links in zip(records, predictions, strict=True):
        sure = set(map(tuple, record["sure"]))
        gold = sure | set(map(tuple, record["possible"]))
        found, sure_size, gold_size = found + len(links), sure_size + len(sure), gold_size + len(gold)
        found_sure, found_gold = found_sure + len(links & sure), found_gold + len(links & gold)
    precision, recall = found_gold / max(found, 1), found_gold / max(gold_size, 1)
    f1 = 2 * precision * recall / max(precision + recall, 1e-12)
    aer = 1 - (found_sure + found_gold) / max(found + sure_size, 1)
    return 100 * f1, 100 * precision, 100 * recall, 100 * aer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=300, help="first pairs of each set")
    parser.add_argument("--sets", nargs="*", default=SETS)
    parser.add_argument("--layer", type=int)
    for name in ("epsilon", "null-price", "distortion", "threshold"):
        parser.add_argument(f"--{name}", type=float)
    arguments = parser.parse_args()
    options = {name: getattr(arguments, name) for name in ("layer", "epsilon", "null_price", "distortion", "threshold")}
    folder = os.environ.get("SINKFORMER_ALIGNMENT_DATA")
    if not folder or not Path(folder).is_dir():
        sys.exit("skipped: set SINKFORMER_ALIGNMENT_DATA to the folder with the gold alignments")
    aligner = Aligner(**{name: value for name, value in options.items() if value is not None})
    aligner("warm", "up")
    print(f"settings {aligner('a', 'b').settings_hash}: {aligner!r}")
    print(f"{'set':<16}{'pairs':>6}{'F1':>7}{'P':>7}{'R':>7}{'AER':>7}{'pairs/s':>9}")
    for name in arguments.sets:
        records = read(Path(folder) / f"{name}.jsonl", arguments.limit)
        start = time.perf_counter()
        results = list(aligner.align([(r["source"], r["target"]) for r in records]))
        speed = len(records) / (time.perf_counter() - start)
        f1, p, r, aer = score(records, [set(result.links) for result in results])
        print(f"{name:<16}{len(records):>6}{f1:>7.1f}{p:>7.1f}{r:>7.1f}{aer:>7.1f}{speed:>9.1f}")


if __name__ == "__main__":
    main()
