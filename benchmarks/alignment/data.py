"""The gold alignments in $SINKFORMER_ALIGNMENT_DATA, JSON lines, one folder a set, and the scores of links against them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sinkformer.metrics import AlignmentScores, score_alignments
from sinkformer.text import Alignment
from sinkformer.text.gold import LinkFile, read_links


def require() -> Path:
    """The folder, or the end of the program."""
    folder = os.environ.get("SINKFORMER_ALIGNMENT_DATA")
    if not folder or not Path(folder).is_dir():
        sys.exit("skipped: set SINKFORMER_ALIGNMENT_DATA to the folder with the gold alignments")
    return Path(folder)


def read(part: str) -> LinkFile:
    """A set such as ``mtref/dev``, or ``set[:1/2]`` or ``set[1/2:]`` for its first or second half."""
    name, _, half = part.partition("[")
    file = read_links(require() / f"{name}.jsonl")
    middle = len(file.pairs) // 2
    return replace(file, pairs={"": file.pairs, ":1/2]": file.pairs[:middle], "1/2:]": file.pairs[middle:]}[half])


def texts(gold: LinkFile) -> list[tuple[list[str], list[str]]]:
    """The words of every pair."""
    return [(list(pair.source or ()), list(pair.target or ())) for pair in gold.pairs]


def scored(results: Sequence[Alignment], gold: LinkFile) -> AlignmentScores:
    """Links against gold, with nulls."""
    return score_alignments(
        [result.links for result in results],
        [pair.sure for pair in gold.pairs],
        [pair.possible for pair in gold.pairs],
        sizes=[(len(a), len(b)) for a, b in texts(gold)],
    )
