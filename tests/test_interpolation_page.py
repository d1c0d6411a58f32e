"""docs/interpolation.md: its code runs, and prints what the page says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

pytest.importorskip("flint")
PAGE = (Path(__file__).parents[1] / "docs" / "interpolation.md").read_text("utf-8")


def test_the_page_runs_and_says_what_it_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
            exec(compile(code, "docs/interpolation.md", "exec"), names)
    for line in str(names["built"].ledger).splitlines():
        assert f"    {line}\n" in PAGE
    verdict = str(names["verdict"])
    shown = re.findall(r"# (proved .*?), \.\.\.\n", PAGE)
    assert shown == [verdict[: len(shown[0])]]
    measured, predicted = map(
        float, re.search(r"# torch.float64: error (\S+) .* measured, (\S+) predicted\n", PAGE).groups()
    )
    assert names["export"].predicted == pytest.approx(predicted, rel=0.1)
    assert max(names["export"].measured, measured) < predicted  # the measured one depends on the machine
    assert "not a global minimum" in printed.getvalue()


def test_the_table_of_counts():
    from sinkformer.interpolation import compare, theorem_blocks

    rows = dict(re.findall(r"^\| ([a-z-]+) \| (\d+ \| \d+) \|", PAGE, flags=re.MULTILINE))
    assert set(rows) == {"paper", "direct", "two-pass", "knots"}
    N, n, m, d = 20, 300, 3, 16
    _, theorem, direct, resnet = compare(N=N, n=n, m=m, d=d, separations=1).rows
    assert theorem.blocks == theorem_blocks(N=N, K=N * m, kind="softmax")
    for name, row in (("paper", theorem), ("direct", direct)):
        assert rows[name] == f"{row.blocks} | {row.parameters}"
    assert f"take a ResNet {resnet.parameters} parameters" in PAGE
    assert all(int(row.split(" | ")[1]) == (10 * d + 8) * int(row.split(" | ")[0]) for row in rows.values())
