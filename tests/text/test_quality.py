"""Links against gold alignments, where the folder with them is known."""

import json
import os
from pathlib import Path

import pytest

FOLDER = os.environ.get("SINKFORMER_ALIGNMENT_DATA")


@pytest.mark.skipif(not FOLDER, reason="SINKFORMER_ALIGNMENT_DATA does not name the folder with the gold alignments")
@pytest.mark.parametrize(("name", "least"), [("edinburgh/dev", 83.5), ("mtref/dev", 80.5)])
def test_untrained_f1(english, name, least):
    with (Path(str(FOLDER)) / f"{name}.jsonl").open(encoding="utf-8") as file:
        records = [json.loads(line) for line, _ in zip(file, range(150), strict=False)]
    hits = found = gold = 0
    for record, result in zip(records, english.align([(r["source"], r["target"]) for r in records]), strict=True):
        wanted = {tuple(link) for link in record["sure"] + record["possible"]}
        hits, found, gold = hits + len(wanted & set(result.links)), found + len(result.links), gold + len(wanted)
    assert 200 * hits / (found + gold) >= least
