"""The benchmark of W1: its reference, its gates, and that it runs."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the benchmarks are not part of the package that is installed

from benchmarks import report, w1  # noqa: E402
from sinkformer.metrics import w1 as distance  # noqa: E402


@pytest.mark.parametrize("kind", w1.KINDS)
def test_the_reference_is_the_same_number(kind):
    pi, rho = w1.couplings(9, kind)
    assert w1.pot(pi, rho) == pytest.approx(float(distance(pi, rho).value), abs=1e-12)


def test_what_was_promised_and_not_kept_is_a_failure():
    tasks = (w1.Task(64, 0.0, True), w1.Task(256, 0.01, seconds=5.0))
    good = [
        w1.Row(64, "near", 0.0, 1.0, 1e-12, "", 1.0, None, 2.0, [2.0, 2.1], 1e-12),
        w1.Row(256, "near", 0.01, 1.0, 0.009, "", 4.0, 100.0),
    ]
    assert not w1.failures(tasks, good, timed=True)
    bad = [
        w1.Row(64, "near", 0.0, 1.0, 1e-3, "", 1.0, None, 0.5, [0.5, 0.5], 1e-3),
        w1.Row(256, "near", 0.01, 1.0, 0.02, "", 6.0, 100.0),
    ]
    assert len(w1.failures(tasks, bad, timed=True)) == 5
    assert len(w1.failures(tasks, bad, timed=False)) == 3


def test_the_page_has_a_place_for_the_table():
    page = (ROOT / "docs" / "w1.md").read_text(encoding="utf-8")
    assert [match["name"] for match in report.MARKER.finditer(page)] == ["wone"]


def test_quick_run_from_the_command_line(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("<!-- begin:wone -->\n<!-- end:wone -->\n")
    monkeypatch.setattr(w1, "QUICK", (w1.Task(8, 0.0, True),))
    assert w1.main(["--quick", "--json", str(tmp_path / "run.json"), "--markdown", str(page)]) == 0
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert [row["kind"] for row in rows] == list(w1.KINDS)
    assert "--quick" in page.read_text()
