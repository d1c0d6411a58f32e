import json
import subprocess
import sys

import pytest

from sinkformer.couplings import Coupling


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_bytes(
        b"the cat sat ||| the cat sat\nno bars here\n ||| text\na b||| a b\ncaf\xe9 ||| x\n\nthe dog\tthe dog\n"
    )
    return path


LINKS = ["0-0 1-1 2-2", "", "", "0-0 1-1", "", "", "0-0 1-1"]


def test_one_line_for_each_line(run, pairs):
    done = run("align", pairs)
    assert done.exit_code == 0
    assert done.stdout.split("\n") == [*LINKS, ""]
    assert done.stderr.splitlines() == [
        "warning: line 2: expected one '|||' or one tab between the two texts, found neither '|||' nor a tab",
        "warning: line 5: not UTF-8: byte 0xe9 at position 3",
        "warning: line 6: blank; expected 'source ||| target' or source TAB target",
        "warning: 3 lines could not be used; each has an empty line, or an error, in the output",
        "warning: 1 pairs have an empty side; their lines are empty",
    ]
    quiet = run("align", pairs, "--quiet")
    assert (quiet.stdout, quiet.stderr) == (done.stdout, "")


def test_stdin_ids_and_output(run, pairs, tmp_path):
    done = run("align", "-", "--ids", input=pairs.read_bytes())
    assert done.stdout.splitlines() == [f"{k}\t{line}" for k, line in enumerate(LINKS, 1)]
    out = tmp_path / "out"
    done = run("align", pairs, "--output", out)
    assert done.stdout == ""
    assert out.read_text() == "\n".join(LINKS) + "\n"


def test_jsonl(run, pairs):
    records = [json.loads(line) for line in run("align", pairs, "--format", "jsonl").stdout.splitlines()]
    assert [r["id"] for r in records] == list(range(1, 8))
    assert records[0]["source"] == ["the", "cat", "sat"]
    assert records[1] == {
        "id": 2,
        "error": "expected one '|||' or one tab between the two texts, found neither '|||' nor a tab",
    }
    assert records[2]["unaligned"] == [[], [0]]


def test_words_are_those_between_blanks_unless_raw(run):
    line = b"don't , stop.here ||| don't , stop.here\n"
    assert run("align", "-", input=line).stdout == "0-0 1-1 2-2\n"
    assert run("align", "-", "--raw", input=line).stdout == "0-0 1-1 2-2 3-3 4-4\n"


def test_two_files(run, tmp_path):
    (tmp_path / "s").write_bytes(b"the cat sat\nx\n")
    (tmp_path / "t").write_bytes(b"the cat sat\nx")
    assert run("align", "--src", tmp_path / "s", "--tgt", tmp_path / "t").stdout == "0-0 1-1 2-2\n0-0\n"
    (tmp_path / "t").write_bytes(b"a feline\n")
    done = run("align", "--src", tmp_path / "s", "--tgt", tmp_path / "t")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert f"{tmp_path / 's'} has 2 and {tmp_path / 't'} has 1; check that they belong together" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [[], ["a", "--src", "b"], ["--src", "b"], ["a", "--src", "b", "--tgt", "c"], ["a", "--ids", "--format", "jsonl"]],
)
def test_usage(run, arguments):
    done = run("align", *arguments)
    assert done.exit_code == 2
    assert "Usage: sinkformer align" in done.stderr


def test_unreadable_and_unwritable(run, pairs, tmp_path):
    done = run("align", tmp_path / "absent")
    assert (done.exit_code, done.stderr) == (1, f"error: {tmp_path / 'absent'}: No such file or directory\n")
    done = run("align", pairs, "--output", tmp_path / "no" / "out")
    assert done.exit_code == 1
    assert "cannot be written: the folder" in done.stderr
    done = run("align", tmp_path)
    assert (done.exit_code, done.stderr) == (1, f"error: {tmp_path}: Is a directory\n")


def same(path):
    return path


def through_a_hard_link(path):
    path.with_name("hard").hardlink_to(path)
    return path.with_name("hard")


def through_a_symbolic_link(path):
    path.with_name("soft").symlink_to(path)
    return path.with_name("soft")


@pytest.mark.parametrize("other_name", [same, through_a_hard_link, through_a_symbolic_link])
@pytest.mark.parametrize("option", ["PAIRS", "--src", "--tgt"])
def test_an_input_is_never_overwritten(run, tmp_path, option, other_name):
    files = {name: tmp_path / name for name in ("PAIRS", "--src", "--tgt")}
    for path in files.values():
        path.write_bytes(b"the cat ||| a feline\n")
    arguments = [files["PAIRS"]] if option == "PAIRS" else ["--src", files["--src"], "--tgt", files["--tgt"]]
    output = other_name(files[option])
    done = run("align", *arguments, "-o", output)
    assert done.exit_code == 1
    assert done.stderr == (
        f"error: {output}: is an input, and writing it would destroy it; name another file to write\n"
    )
    assert files[option].read_bytes() == b"the cat ||| a feline\n"


def test_a_file_that_is_stdin_is_never_overwritten(tmp_path):
    path = tmp_path / "pairs"
    path.write_bytes(b"the cat ||| a feline\n")
    command = f"{sys.executable} -m sinkformer.cli align - -o {path} < {path}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "is an input" in done.stderr
    assert path.read_bytes() == b"the cat ||| a feline\n"


def test_an_old_output_is_replaced(run, pairs, tmp_path):
    (tmp_path / "out").write_text("old\n" * 50)
    assert run("align", pairs, "-o", tmp_path / "out", "--quiet").exit_code == 0
    assert (tmp_path / "out").read_text() == "\n".join(LINKS) + "\n"


def test_empty_input(run):
    done = run("align", "-", input=b"")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")


def test_strict(run, monkeypatch):
    solve = Coupling.solve
    monkeypatch.setattr(Coupling, "solve", staticmethod(lambda *a, **k: solve(*a, **k, max_iterations=1)))
    assert run("align", "-", "--strict", input=b"the cat ||| a dog ran\n").exit_code == 3
    assert run("align", "-", input=b"the cat ||| a dog ran\n").exit_code == 0


def test_a_reader_that_leaves(tmp_path):
    """`sinkformer align ... | head -1` ends without a traceback."""
    path = tmp_path / "many"
    path.write_bytes(b"the cat ||| the cat\n" * 20000)
    command = f"{sys.executable} -m sinkformer.cli align {path} --quiet | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300)
    assert done.stdout == "0-0 1-1\n"
    assert done.stderr == ""


def test_out_of_memory_is_one_sentence(run, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr("sinkformer.cli.working.Work.lines", fail)
    pairs = tmp_path / "pairs.txt"
    pairs.write_bytes(b"a ||| a\n")
    done = run("align", pairs)
    assert (done.exit_code, done.stderr) == (
        1,
        "error: out of memory; give shorter texts, or a smaller batch or problem\n",
    )
