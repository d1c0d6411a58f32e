import json
import re
import sys
from html.parser import HTMLParser

import pytest

GOLD = (
    b'{"id": "p1", "source": ["the", "cat", "sat"], "target": ["a", "feline", "rested"],'
    b' "sure": [[0, 0], [1, 1]], "possible": [[2, 2], [1, 2]]}\n'
    b'{"id": "p2", "source": ["x", "y"], "target": ["x"], "sure": [[0, 0]], "possible": []}\n'
)


@pytest.fixture
def files(tmp_path):
    """Gold, and links of which one is wrong (1-0) and two possible ones are missing."""
    gold, links = tmp_path / "gold.jsonl", tmp_path / "links"
    gold.write_bytes(GOLD)
    links.write_bytes(b"0-0 1-1\n0-0 1-0\n")
    return gold, links


def figures(line):
    return dict(re.findall(r"(\S+(?: F1)?) ([\d.]+)(?:  |$)", line.rsplit("  settings", 1)[0]))


def test_the_line(run, files):
    done = run("evaluate", *files)
    assert (done.exit_code, done.stderr) == (0, "")
    line, digest = done.stdout.rstrip("\n").rsplit("  settings ", 1)
    # By hand: A = 4, S = 3, P = 5, A & S = 3, A & P = 3; with nulls 2 of 4 and 4, and 1 of 2 and 2.
    assert figures(line) == {
        "AER": "14.3", "P": "75.0", "R(S)": "100.0", "R(S+P)": "60.0", "F1(S+P)": "66.7", "F1(S)": "85.7",
        "macro F1": "75.0", "total F1": "50.0", "pairs": "2",
    }  # fmt: skip
    assert re.fullmatch(r"[0-9a-f]{12}", digest)
    assert run("evaluate", *files).stdout == done.stdout


def test_the_hash_is_of_everything_the_scores_depend_on(run, files):
    gold, links = files

    def digest(*options):
        return json.loads(run("evaluate", *files, "--json", *options).stdout)["settings"]

    seen = [digest(), digest("--ignore-possible")]
    links.write_bytes(b"0-0 1-1\n0-0\n")
    seen.append(digest())
    gold.write_bytes(GOLD.replace(b"p2", b"p3"))
    seen.append(digest())
    assert len(set(seen)) == 4
    assert digest("--breakdown", "--bootstrap", 2, "--quiet") == seen[-1]


def test_json(run, files):
    done = run("evaluate", *files, "--json", "--breakdown", "--bootstrap", 20)
    record = json.loads(done.stdout)
    assert record["links"] == {"predicted": 4, "sure": 3, "gold": 5, "sure_hits": 3, "gold_hits": 3}
    assert record["f1"] == pytest.approx(2 / 3)
    assert list(record["by_length"]) == ["0-10"]
    assert {name: group["pairs"] for name, group in record["by_nulls"].items()} == {"none": 1, "up to 50%": 1}
    assert record["options"]["gold_format"] == "jsonl"
    assert len(record["sha256"]["gold"]) == 64
    low, high = record["bootstrap"]["f1"]
    assert 0 <= low <= 2 / 3 <= high <= 1


def test_breakdown_and_bootstrap(run, files):
    out = run("evaluate", *files, "--breakdown", "--bootstrap", 50).stdout.splitlines()
    assert re.fullmatch(r"95 % over pairs: AER \S+ to \S+, F1\(S\+P\) \S+ to \S+ \(50 samples, seed 0\)", out[1])
    assert out[3].split() == "words of the longer side pairs AER P R(S+P) F1(S+P) total F1".split()
    assert out[4].split() == "0-10 2 14.3 75.0 60.0 66.7 50.0".split()
    assert [line.split() for line in out[-4:]] == [["1", "2", "100.0"], ["2", "3", "33.3"], ["3", "0"], ["4+", "0"]]


def test_breakdown_in_a_terminal(run, files, monkeypatch, capsys):
    from sinkformer.cli import evaluate_tables
    from sinkformer.text.gold import read_links, score_files

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    evaluate_tables.print_breakdown(score_files(*map(read_links, files)))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["up", "to", "50%", "1", "33.3", "50.0", "100.0", "66.7", "50.0"] in rows
    assert ["2", "3", "33.3"] in rows


def test_without_words(run, files, tmp_path):
    (tmp_path / "gold").write_bytes(b"1-1 2-2 3p3 2p3\n1-1\n")
    done = run("evaluate", tmp_path / "gold", files[1], "--one-index-gold", "--breakdown", "--possible", "p")
    assert "total F1" not in done.stdout.splitlines()[0]
    assert figures(done.stdout.splitlines()[0])["F1(S+P)"] == "66.7"
    assert "no breakdown by length or nulls: neither file holds the words of every pair" in done.stdout
    assert "block degree" in done.stdout


def test_what_align_writes(run, files, tmp_path):
    texts = b"the cat sat ||| a feline rested\nx y ||| x\n"
    plain = run("align", "-", input=texts).stdout
    lines = run("align", "-", "--format", "jsonl", input=texts).stdout
    ids = run("align", "-", "--ids", input=texts).stdout
    scores = [
        run("evaluate", files[0], "-", input=x.encode()).stdout.split("  settings")[0] for x in (plain, lines, ids)
    ]
    assert scores[0] == scores[1] == scores[2]


def test_warnings(run, files):
    files[1].write_bytes(b'{"id": 1, "links": [[0, 0], [0, 0]]}\n{"id": 2, "error": "blank"}\n')
    done = run("evaluate", *files)
    assert done.stderr.splitlines() == [
        f"warning: {files[1]}: 1 repeated links; each counts once, as sure if it is both",
        f"warning: {files[1]}: 1 lines hold an error instead of links; they count as pairs without links",
    ]
    assert run("evaluate", *files, "--quiet").stderr == ""


def test_errors(run, files, tmp_path):
    gold, links = files
    links.write_bytes(b"0-0\n")
    done = run("evaluate", gold, links)
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"but {gold} has 2 and {links} has 1" in done.stderr
    links.write_bytes(b"0-0\n0-1\n")
    done = run("evaluate", gold, links)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"error: {links}:2: link 0-1 points outside the pair of 2 and 1 words")
    done = run("evaluate", gold, tmp_path / "absent")
    assert (done.exit_code, done.stderr) == (1, f"error: {tmp_path / 'absent'}: No such file or directory\n")
    done = run("evaluate", gold, links, "--html", gold)
    assert done.exit_code == 1
    assert "writing it would destroy it" in done.stderr
    assert gold.read_bytes() == GOLD


@pytest.mark.parametrize(
    "arguments",
    [["a"], ["-", "-"], ["a", "b", "--bootstrap", 0], ["a", "b", "--possible", "x"], ["a", "b", "--gold-format", "x"]],
)
def test_usage(run, arguments):
    done = run("evaluate", *arguments)
    assert done.exit_code == 2
    assert "Usage: sinkformer evaluate" in done.stderr


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def test_html(run, files, tmp_path):
    out = tmp_path / "page.html"
    line = run("evaluate", *files, "--html", out).stdout.strip()
    raw = out.read_text(encoding="utf-8")
    page = Page(raw)
    assert line in page.text
    assert not re.search(r"https?:|//|src=|href=|@import|<script|url\(", raw.replace("<!DOCTYPE html>", ""))
    headings = [text for text in page.text if text.startswith("Line ")]
    assert headings == ["Line 2 (p2): 1 right, 1 wrong, 0 missed"]  # possible links that are missing are no errors
    marks = [(attrs["title"], attrs["class"]) for tag, attrs in page.tags if tag == "td" and attrs]
    assert marks == [("0-0 right", "right"), ("1-0 wrong", "wrong")]
    assert {"●", "✕"} <= set(page.text)


def test_html_shows_missed_links_the_worst_first(run, files, tmp_path):
    out = tmp_path / "page.html"
    files[1].write_bytes(b"0-2\n\n")
    run("evaluate", *files, "--html", out)
    page = Page(out.read_text(encoding="utf-8"))
    headings = [text for text in page.text if text.startswith("Line ")]
    assert headings == ["Line 1 (p1): 0 right, 1 wrong, 2 missed", "Line 2 (p2): 0 right, 0 wrong, 1 missed"]
    marks = {attrs["title"]: attrs["class"] for tag, attrs in page.tags if tag == "td" and attrs}
    assert marks == {
        "0-2 wrong": "wrong", "0-0 missed": "missed", "1-1 missed": "missed", "1-2 open": "open", "2-2 open": "open"
    }  # fmt: skip
    run("evaluate", *files, "--html", out, "--ignore-possible")
    assert "2-2" not in out.read_text(encoding="utf-8")


def test_html_of_hostile_text(run, tmp_path):
    evil = "</td><script>alert(1)</script>\u202e<img src=x onerror=alert(2)>"
    gold, links, out = tmp_path / "<b>gold", tmp_path / "links", tmp_path / "page.html"
    record = {"id": evil, "source": [evil, "جلس"], "target": [evil], "sure": [[0, 0]], "possible": []}
    gold.write_text(json.dumps(record))
    links.write_text("1-0\n")
    assert run("evaluate", gold, links, "--html", out).exit_code == 0
    page = Page(out.read_text(encoding="utf-8"))
    assert not {"script", "img", "b"} & {tag for tag, _ in page.tags}
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert "\u202e" not in "".join(page.text)
    assert any("alert(1)" in text for text in page.text)


def test_html_without_words_shows_their_numbers(run, tmp_path):
    (tmp_path / "gold").write_text("0-0 2-1\n")
    (tmp_path / "links").write_text("0-0\n")
    run("evaluate", tmp_path / "gold", tmp_path / "links", "--html", tmp_path / "page")
    page = Page((tmp_path / "page").read_text(encoding="utf-8"))
    assert [text for text in page.text if text.isdigit()] == ["0", "1", "0", "1", "2"]


def test_couplings_of_align_are_measured_against_gold(run, tmp_path):
    pairs, found, gold = tmp_path / "pairs.txt", tmp_path / "found.jsonl", tmp_path / "gold.jsonl"
    pairs.write_bytes(b"the cat sat ||| the cat sat\na dog ||| a dog barked\n")
    gold.write_text(
        '{"source": ["the", "cat", "sat"], "target": ["the", "cat", "sat"], "sure": [[0, 0], [1, 1], [2, 2]]}\n'
        '{"source": ["a", "dog"], "target": ["a", "dog", "barked"], "sure": [[0, 0], [1, 1]]}\n'
    )
    assert run("align", pairs, "--format", "jsonl", "--couplings", "-o", found).exit_code == 0
    done = run("evaluate", gold, found)
    assert done.exit_code == 0
    line = done.stdout.splitlines()[1]
    tv, w1 = (float(x) for x in re.fullmatch(r"couplings: TV (\S+)  W1 (\S+)  pairs 2", line).groups())
    assert 0 < tv < 0.2
    assert tv <= w1 <= 2 * tv
    record = json.loads(run("evaluate", gold, found, "--json").stdout)
    assert sum(record["couplings"]["tv"]) / 2 == pytest.approx(tv, abs=5e-4)
    assert "couplings" not in json.loads(run("evaluate", gold, gold, "--json").stdout)
    refused = run("align", pairs, "--couplings")
    assert refused.exit_code == 2
    assert "--couplings needs --format jsonl" in refused.stderr
