"""Word alignment with the packaged English model and an untrained method: F1, AER, pairs per second.

Reads gold alignments (JSON lines, one folder a set) from the folder in $SINKFORMER_ALIGNMENT_DATA. Scores are
micro-averaged; recall and F1 count sure and possible links as gold, AER is that of Och and Ney (2003). The
defaults of ``Aligner`` were chosen on edinburgh/train with this script and its options.

    SINKFORMER_ALIGNMENT_DATA=... python -m benchmarks.alignment.untrained
    SINKFORMER_ALIGNMENT_DATA=... python -m benchmarks.alignment.untrained --sets edinburgh/train --limit 600 --layer 4
"""

import argparse
import time
from dataclasses import replace

from benchmarks.alignment import data
from sinkformer.text import Aligner

OPTIONS = ("layer", "method", "epsilon", "null_price", "distortion", "threshold")
SETS = ("edinburgh/dev", "mtref/dev", "msr_rte/dev")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=300, help="first pairs of each set")
    parser.add_argument("--sets", nargs="*", default=SETS)
    parser.add_argument("--layer", type=int)
    parser.add_argument("--method", default="partial")
    for name in ("epsilon", "null-price", "distortion", "threshold"):
        parser.add_argument(f"--{name}", type=float)
    arguments = parser.parse_args()
    options = {name: getattr(arguments, name) for name in OPTIONS}
    data.require()
    aligner = Aligner(**{name: value for name, value in options.items() if value is not None})
    aligner("warm", "up")
    print(f"settings {aligner('a', 'b').settings_hash}: {aligner!r}")
    print(f"{'set':<16}{'pairs':>6}{'F1':>7}{'P':>7}{'R':>7}{'AER':>7}{'pairs/s':>9}")
    for name in arguments.sets:
        gold = data.read(name)
        gold = replace(gold, pairs=gold.pairs[: arguments.limit])
        start = time.perf_counter()
        results = list(aligner.align(data.texts(gold)))
        speed = len(gold.pairs) / (time.perf_counter() - start)
        found = data.scored(results, gold).micro
        scores = (found.f1, found.precision, found.recall_gold, found.aer)
        print(f"{name:<16}{len(gold.pairs):>6}{''.join(f'{100 * x:>7.1f}' for x in scores)}{speed:>9.1f}")


if __name__ == "__main__":
    main()
