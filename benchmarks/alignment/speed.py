"""How many pairs a second, where the time goes, and how memory behaves.

Pairs are sentences of the gold alignments in $SINKFORMER_ALIGNMENT_DATA, cut to --words words. Shares are of processor time,
which other programs on the machine change less than wall time.

    SINKFORMER_ALIGNMENT_DATA=... python -m benchmarks.alignment.speed --threads 2
    SINKFORMER_ALIGNMENT_DATA=... python -m benchmarks.alignment.speed --lines 50000

The second streams a file of that many lines, made of a few sentences, through the same steps as ``sinkformer align``, and prints
the peak of resident memory on the way.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from sinkformer.cli.inputs import Inputs
from sinkformer.cli.lines import Layout
from sinkformer.cli.options import LineFormat
from sinkformer.cli.working import WINDOW, Work
from sinkformer.couplings import Coupling
from sinkformer.text import Aligner, decoding, documents
from sinkformer.text.embedders import TransformerEmbedder
from sinkformer.text.gold import read_links

SETS = ("mtref/train", "edinburgh/train")
DISTINCT = 200


class Shares:
    """Processor seconds by stage; what a stage calls counts for that alone."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._running = ["the rest"]
        self._since = time.process_time()

    def watch(self, holder: Any, name: str, stage: str) -> None:
        raw = vars(holder)[name]
        function = raw.__func__ if isinstance(raw, staticmethod) else raw

        def timed(*arguments: Any, **options: Any) -> Any:
            self._switch()
            self._running.append(stage)
            try:
                return function(*arguments, **options)
            finally:
                self._switch()
                self._running.pop()

        setattr(holder, name, staticmethod(timed) if isinstance(raw, staticmethod) else timed)

    def _switch(self) -> None:
        now = time.process_time()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now

    def restart(self) -> None:
        self._switch()
        self.seconds.clear()

    def table(self) -> list[tuple[str, float]]:
        self._switch()
        total = sum(self.seconds.values())
        return [(stage, seconds / total) for stage, seconds in self.seconds.most_common()]


def sentences(words: int) -> list[tuple[list[str], list[str]]]:
    folder = os.environ.get("SINKFORMER_ALIGNMENT_DATA")
    if not folder or not Path(folder).is_dir():
        sys.exit("skipped: set SINKFORMER_ALIGNMENT_DATA to the folder with the gold alignments")
    found = []
    for name in SETS:
        for pair in read_links(Path(folder) / f"{name}.jsonl").pairs:
            if pair.source and pair.target and min(len(pair.source), len(pair.target)) >= words:
                found.append((list(pair.source[:words]), list(pair.target[:words])))
    return found


def work(path: Path) -> Work:
    return Work(Inputs((str(path),), True), Layout(LineFormat.jsonl, False), {})


def write(path: Path, pairs: list[tuple[list[str], list[str]]], lines: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for k in range(lines):
            # Sources and targets run through the sentences at different paces, so that pairs do not repeat soon.
            source, target = pairs[k % len(pairs)][0], pairs[(k + k // len(pairs)) % len(pairs)][1]
            file.write(f"{' '.join(source)} ||| {' '.join(target)}\n")


def speed(aligner: Aligner, pairs: list[tuple[list[str], list[str]]], folder: Path) -> None:
    shares = Shares()
    for holder, name, stage in (
        (TransformerEmbedder, "_windows", "tokenising"),
        (TransformerEmbedder, "_piece_states", "encoder"),
        (TransformerEmbedder, "embed", "states to words"),
        (documents, "unit_vectors", "costs"),
        (documents, "word_costs", "costs"),
        (Coupling, "solve", "solver"),
        (decoding, "match", "matching"),
        (decoding, "decode", "links"),
        (Layout, "line", "output"),
    ):
        shares.watch(holder, name, stage)
    path = folder / "pairs"
    write(path, pairs, len(pairs))
    job = work(path)
    with job.inputs.opened() as (items, _):
        warm = [next(items) for _ in range(64)]
    list(aligner.align(warm))
    shares.restart()
    wall, processor = time.perf_counter(), time.process_time()
    with job.inputs.opened() as (items, _), (folder / "out").open("w", encoding="utf-8") as out:
        for line in job.lines(items, aligner, 0):
            out.write(line.text + "\n")
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    print(
        f"{len(pairs)} pairs: {len(pairs) / wall:.1f} pairs/s, {len(pairs) / processor:.1f} pairs per processor second"
    )
    for stage, share in shares.table():
        print(f"{100 * share:5.1f} %  {stage}")


def memory(aligner: Aligner, pairs: list[tuple[list[str], list[str]]], lines: int, folder: Path) -> None:
    path = folder / "pairs"
    write(path, pairs[:DISTINCT], lines)
    job, start = work(path), time.perf_counter()
    step = max(lines // 10 // WINDOW * WINDOW, WINDOW)
    print(f"{lines} lines of {DISTINCT} distinct sentences a side, {path.stat().st_size / 1e6:.0f} MB")
    print(f"{'lines':>9}{'seconds':>9}{'RSS, MiB':>10}{'peak':>7}")
    with job.inputs.opened() as (items, _), (folder / "out").open("w", encoding="utf-8") as out:
        for line in job.lines(items, aligner, 0):
            out.write(line.text + "\n")
            if line.number % step == 0 or line.number == lines:
                seconds, peak = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                print(f"{line.number:>9}{seconds:>9.0f}{resident():>10.0f}{peak:>7.0f}", flush=True)


def resident() -> float:
    """Memory in use now, in MiB (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=1024)
    parser.add_argument("--words", type=int, default=20, help="of each side")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--method", default="partial")
    parser.add_argument("--lines", type=int, help="stream a file of so many lines and watch memory instead")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    aligner, pairs = Aligner(method=arguments.method), sentences(arguments.words)
    print(f"{aligner!r}\n{arguments.words} words a side, {arguments.threads} threads of {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.lines:
            memory(aligner, pairs, arguments.lines, Path(folder))
        else:
            speed(aligner, pairs[: arguments.pairs], Path(folder))


if __name__ == "__main__":
    main()
