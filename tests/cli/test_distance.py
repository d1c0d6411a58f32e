import json
import re

import pytest

A, B = "the cat sat on the mat", "a feline rested on the old rug"


def test_a_distance_with_its_parts(run):
    done = run("distance", A, B)
    assert done.exit_code == 0
    assert done.stderr == ""
    first, second, blank, head, *rows = done.stdout.splitlines()
    distance, normalized = re.fullmatch(
        r"distance (\d\.\d{4})  normalized (0\.\d{3}) \(0 = identical\)", first
    ).groups()
    assert re.fullmatch(r"similarity 0\.\d{3} \(1 = identical, 0 = unrelated\)", second)
    assert blank == ""
    assert head.split() == ["cost", "share", "source", "target"]
    costs = [float(row.split()[0]) for row in rows]
    assert sum(costs) == pytest.approx(float(distance), abs=5e-4)
    assert costs == sorted(costs, reverse=True)
    assert float(distance) / 0.4 / 13 == pytest.approx(float(normalized), abs=6e-4)
    assert any(row.split()[3:] == ["(alone)", "old", "(5)"] for row in rows)
    assert any(row.split()[3:] == ["cat", "(1)", "feline", "(1)"] for row in rows)


def test_few_rows(run):
    shown = run("distance", A, B, "--rows", 2).stdout.splitlines()
    every = run("distance", A, B, "--rows", 0).stdout.splitlines()
    assert shown[:6] == every[:6]
    rest = sum(float(row.split()[0]) for row in every[6:])
    (count, cost) = re.fullmatch(r"and (\d+) more, (\d\.\d{4}) together; --rows 0 shows all", shown[6]).groups()
    assert int(count) == len(every) - 6
    assert float(cost) == pytest.approx(rest, abs=5e-4)


def test_identical_texts(run):
    assert run("distance", A, A).stdout.splitlines()[:2] == [
        "distance 0.0000  normalized 0.000 (0 = identical)",
        "similarity 1.000 (1 = identical, 0 = unrelated)",
    ]


def test_json(run):
    record = json.loads(run("distance", A, B, "--format", "jsonl").stdout)
    assert sum(cost for *_, cost in record["contributions"]) == pytest.approx(record["distance"], abs=1e-5)
    assert 0 < record["similarity"] < 1
    assert record["settings"]["null_price"] == 0.4


def test_other_settings_have_no_similarity_and_say_why(run):
    lines = run("distance", A, B, "--null-price", "0.5").stdout.splitlines()
    assert lines[1] == "no rescaled similarity: the baseline was measured with null_price 0.4 (here 0.5)"
    record = json.loads(run("distance", A, B, "--distortion", "0", "--format", "jsonl").stdout)
    assert record["similarity"] is None
    assert record["no_similarity"] == "the baseline was measured with distortion 0.2 (here 0.0)"


def test_files_and_tokens(run, tmp_path):
    (tmp_path / "a").write_text(A, encoding="utf-8")
    assert run("distance", "--files", tmp_path / "a", "-", input=B).stdout == run("distance", A, B).stdout
    assert run("distance", "--files", "-", "-").exit_code == 2
    assert run("distance", "--files", tmp_path / "a", tmp_path / "absent").exit_code == 1
    record = json.loads(run("distance", "--tokenized", "don't stop-it", "U.S. ,,", "--format", "jsonl").stdout)
    assert (record["source"], record["target"]) == (["don't", "stop-it"], ["U.S.", ",,"])


def test_a_table_in_a_terminal(monkeypatch, capsys):
    from sinkformer.cli.distance_tables import print_explanation
    from sinkformer.text import Aligner
    from sinkformer.text.distances import explain

    found = explain(Aligner(lambda texts: [[[1.0, k] for k, _ in enumerate(w)] for w in texts]), "[red]x y", "[red]x")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_explanation(found, 20)
    out = capsys.readouterr().out
    assert "(alone)" in out
    assert "red (1)" in out


def test_no_words(run):
    assert run("distance", "", " ").stdout.splitlines() == [
        "distance 0.0000  normalized 0.000 (0 = identical)",
        "similarity 1.000 (1 = identical, 0 = unrelated)",
    ]
