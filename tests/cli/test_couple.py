import json

import pytest

from sinkformer.couplings import Coupling

A, B = "the cat sat on the mat", "a feline rested on the rug"


def test_a_table(run):
    done = run("couple", A, B)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[1].split() == ["1", "cat", "--", "feline", "1", lines[1].split()[-1]]
    assert lines[-1].startswith("distance ")
    assert done.stderr == ""


def test_pharaoh_and_jsonl(run):
    assert run("couple", A, B, "--format", "pharaoh").stdout == "0-0 1-1 2-2 3-3 4-4 5-5\n"
    record = json.loads(run("couple", A, B, "--format", "jsonl").stdout)
    assert record["source"] == A.split()
    assert record["status"] == "converged"


def test_a_table_in_a_terminal(run, monkeypatch, capsys):
    from sinkformer.cli import tables
    from sinkformer.text import Aligner

    result = Aligner(lambda texts: [[[1.0, k] for k, _ in enumerate(w)] for w in texts])(
        "[red]x :smile:", "[red]x $ more"
    )
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    tables.print_alignment(result)
    out = capsys.readouterr().out
    assert "[" in out
    assert "smile" in out
    assert "(alone)" in out
    assert "█" in out


def test_pictures_and_pages(run, tmp_path):
    done = run("couple", A, B, "--plot", tmp_path / "a.png", "--html", tmp_path / "a.html", "--format", "pharaoh")
    assert done.exit_code == 0
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert "<bdi" in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_files(run, tmp_path):
    (tmp_path / "a").write_text("\ufeff" + A + "\n", encoding="utf-8")
    assert (
        run("couple", "--files", tmp_path / "a", "-", "--format", "pharaoh", input=B).stdout
        == "0-0 1-1 2-2 3-3 4-4 5-5\n"
    )
    (tmp_path / "bad").write_bytes(b"fine\ncaf\xe9\n")
    done = run("couple", "--files", tmp_path / "a", tmp_path / "bad")
    assert done.exit_code == 1
    assert done.stderr == f"error: {tmp_path / 'bad'}, line 2: not UTF-8 (byte 0xe9); convert the file to UTF-8\n"
    done = run("couple", "--files", tmp_path / "a", tmp_path / "absent")
    assert (done.exit_code, done.stderr) == (1, f"error: {tmp_path / 'absent'}: No such file or directory\n")
    assert run("couple", "--files", "-", "-").exit_code == 2


@pytest.mark.parametrize("option", ["--html", "--plot"])
def test_an_input_is_never_overwritten(run, tmp_path, option):
    for name in ("a.svg", "b.svg"):
        (tmp_path / name).write_text(A)
    for name in ("a.svg", "b.svg"):
        done = run("couple", "--files", tmp_path / "a.svg", tmp_path / "b.svg", option, tmp_path / name)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.startswith(f"error: {tmp_path / name}: is an input")
        assert (tmp_path / name).read_text() == A


def test_texts_are_not_taken_for_files(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cat").write_text("old")
    assert run("couple", "cat", "cat", "--html", "cat").exit_code == 0


def test_a_picture_and_a_page_need_two_files(run, tmp_path):
    done = run("couple", A, B, "--html", tmp_path / "a.svg", "--plot", tmp_path / "." / "a.svg")
    assert done.exit_code == 2
    assert "same file" in done.stderr
    assert not (tmp_path / "a.svg").exists()


def test_tokenized_words_are_not_split(run):
    assert json.loads(run("couple", "don't , x", "don't , x", "--tokenized", "--format", "jsonl").stdout)["source"] == [
        "don't",
        ",",
        "x",
    ]
    assert json.loads(run("couple", "well,x", "a b", "--tokenized", "--format", "jsonl").stdout)["source"] == ["well,x"]
    assert json.loads(run("couple", "well,x", "a b", "--format", "jsonl").stdout)["source"] == ["well", ",", "x"]


def test_empty_texts(run):
    done = run("couple", "", "a b", "--format", "pharaoh")
    assert (done.exit_code, done.stdout) == (0, "\n")
    assert "only in the target: a (0), b (1)" in run("couple", " ", "a b").stdout


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (
            ["--method", "partial", "--epsilon", "0"],
            2,
            "error: expected epsilon as a finite number >= 1e-06 and <= 1e+06, received 0.0",
        ),
        (["--null-price", "1e308"], 2, "error: expected null_price as a finite number > 0 and <= 1e+06, received"),
        (["--threshold", "2"], 2, "error: expected threshold as a finite number > 0 and <= 1, received 2.0"),
        (
            ["--method", "best"],
            2,
            "error: expected a known method, received 'best'; the methods are 'partial', 'balanced', ",
        ),
        (
            ["--method", "argmax", "--epsilon", "1"],
            2,
            "error: epsilon=1.0 has no meaning for the method 'argmax'; leave it",
        ),
        (["--layer", "9"], 2, "error: expected layer between 0 and 6"),
        (["--device", "gpu"], 2, "error: expected a torch device such as 'cpu' or 'cuda', received 'gpu'"),
        (["--device", "meta"], 2, "error: expected one of the devices 'cpu', 'cuda' and 'mps', received 'meta'"),
        (["--plot", "/no/such/folder/a.png"], 1, "error: /no/such/folder/a.png: cannot be written: the folder"),
        (["--plot", "a.docx"], 2, "error: expected a picture file ending in one of"),
        (["--html", "/"], 1, "error: /: is a folder; name a file to write"),
    ],
)
def test_errors_are_one_sentence(run, options, code, message):
    done = run("couple", A, B, *options)
    assert done.exit_code == code
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_debug_shows_the_traceback(run):
    done = run("couple", A, B, "--epsilon", "0", "--debug")
    assert type(done.exception).__name__ == "ConfigError"


def test_usage(run):
    assert run("couple", A).exit_code == 2
    assert run("couple", A, B, "--colour").exit_code == 2
    assert run("couple", A, B, "--format", "xml").exit_code == 2


def test_every_option_reaches_the_aligner(run):
    base = json.loads(run("couple", A, B, "--format", "jsonl").stdout)["settings"]
    seen = {base}
    for option in (
        ["--layer", "4"], ["--method", "partial", "--epsilon", "0.2"],
        ["--null-price", "0.2"], ["--threshold", "0.9"], ["--distortion", "0"],
        ["--method", "balanced"], ["--method", "unbalanced"], ["--method", "argmax"], ["--method", "itermax"],
    ):  # fmt: skip
        seen.add(json.loads(run("couple", A, B, "--format", "jsonl", *option).stdout)["settings"])
    assert len(seen) == 10


def test_strict_and_warnings(run, monkeypatch):
    solve = Coupling.solve
    monkeypatch.setattr(Coupling, "solve", staticmethod(lambda *a, **k: solve(*a, **k, max_iterations=1)))
    done = run("couple", A, B, "--strict", "--format", "pharaoh")
    assert done.exit_code == 3
    assert done.stdout.startswith("0-0")
    assert done.stderr.startswith("warning: 1 of 1 couplings did not converge")
    done = run("couple", A, B, "--quiet", "--format", "pharaoh")
    assert (done.exit_code, done.stderr) == (0, "")


def test_unknown_words_are_reported(run):
    done = run("couple", "🙂 🙃", "🙂 x", "--format", "pharaoh")
    assert done.stdout == "0-0\n"
    assert done.stderr.startswith("warning: 3 of 4 words")
    assert run("couple", "🙂 🙃", "🙂 x", "--quiet").stderr == ""


def test_a_missing_model(run, tmp_path):
    done = run("couple", A, B, "--model", tmp_path)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"error: cannot load the model '{tmp_path}'")
    assert "Pass 'en'" in done.stderr
