import json
import re

import pytest


@pytest.fixture
def notes(tmp_path):
    folder = tmp_path / "notes"
    (folder / "deep").mkdir(parents=True)
    (folder / "pets.txt").write_text(
        "The train to the coast was late again, and the coffee was cold.\n\n"
        "In the evening a small feline rested on the old rug in front of the fire, and nobody wanted to move it away from "
        "there, because it had been a long and rainy day for all of us and for the animal too.\n",
        encoding="utf-8",
    )
    (folder / "deep" / "stocks.txt").write_text(
        "Shares fell sharply after the bank raised its rates.\n", encoding="utf-8"
    )
    (folder / "readme.md").write_text("the cat sat on the mat\n", encoding="utf-8")
    (folder / "bad.txt").write_bytes(b"caf\xe9\n")
    return folder


def test_files_are_ranked_and_the_first_explained(run, notes):
    done = run("search", "a cat sat on a mat", notes, "--size", 10)
    assert done.exit_code == 0
    first, second, blank, best, empty, head, *rows = done.stdout.splitlines()
    assert re.match(rf"0\.\d{{3}}  {re.escape(str(notes / 'pets.txt'))}:3  In the evening a small feline rested", first)
    assert re.match(rf"0\.\d{{3}}  {re.escape(str(notes / 'deep' / 'stocks.txt'))}:1  Shares fell", second)
    assert float(first[:5]) < float(second[:5])
    assert (blank, empty) == ("", "")
    (distance,) = re.findall(r"pets\.txt:3  distance (\d\.\d{4})  \(0 = every word of the query is there\)$", best)
    assert head.split() == ["cost", "share", "source", "target"]
    assert len(rows) == 6
    assert sum(float(row.split()[0]) for row in rows) == pytest.approx(float(distance), abs=5e-4)
    assert any(re.search(r"cat \(1\) +feline \(\d\)$", row) for row in rows)
    warning, summary = done.stderr.splitlines()
    assert warning == f"warning: {notes / 'bad.txt'}: not UTF-8 (byte 0xe9); left out"
    assert re.fullmatch(r"2 files, 5 passages, [1-5] of them matched word by word", summary)


def test_json_lines(run, notes):
    done = run("search", "a cat sat on a mat", notes, "--format", "jsonl", "--glob", "*.*", "--top", 2, "--quiet")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["name"] for record in records] == [str(notes / "readme.md"), str(notes / "pets.txt")]
    assert done.stderr == ""
    for record in records:
        assert sum(cost for *_, cost in record["contributions"]) == pytest.approx(record["distance"], abs=1e-5)


def test_a_query_from_a_file_and_files_by_name(run, notes):
    done = run("search", "--file", notes / "readme.md", notes / "readme.md", notes / "pets.txt", "-q")
    assert done.stdout.startswith(f"0.000  {notes / 'readme.md'}:1  the cat sat on the mat\n")


def test_what_is_not_there(run, notes):
    done = run("search", "a cat", notes, "--glob", "*.rst")
    assert (done.exit_code, done.stderr) == (1, f"error: {notes}: no file is called *.rst; name others with --glob\n")
    assert run("search", "a cat", notes / "absent").exit_code == 1
    done = run("search", " ", notes, "-q")
    assert (done.exit_code, done.stderr) == (1, "error: expected a query with at least one word, received ' '\n")
    (notes / "empty.rst").write_text("", encoding="utf-8")
    assert run("search", "a cat", notes, "--glob", "*.rst", "-q").stdout == "(no file has words)\n"
