"""A run that was killed anywhere, and went on, has written what an uninterrupted one writes."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from sinkformer.cli import align, outputs, working

TEXTS = [
    "the cat sat ||| a feline rested", "no bars here", " ||| text", "the dog\tthe dog", "caf\xe9 \u2028 x ||| x\x85y", "",
    "it is cool today ||| today it is cool", "the red house ||| a large crimson home !", "a b ||| a b",
]  # fmt: skip


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_text("".join(TEXTS[k % len(TEXTS)] + f" {k}\n" for k in range(60)), encoding="utf-8")
    return path


@pytest.fixture
def small_windows(monkeypatch):
    for module in (align, working):
        monkeypatch.setattr(module, "WINDOW", 8)


def interrupted(run, monkeypatch, arguments, line):
    """A run that ends with an error before it writes a line."""
    write = outputs.Output.write

    def failing(self, item):
        if item.number == line:
            raise OSError(5, "the disk is gone")
        write(self, item)

    with monkeypatch.context() as patch:
        patch.setattr(outputs.Output, "write", failing)
        done = run(*arguments)
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (1, "error: the disk is gone")


@pytest.mark.parametrize("options", [["--format", "jsonl"], ["--ids"]], ids=["jsonl", "pharaoh"])
def test_any_prefix_is_completed_to_the_same_bytes(run, pairs, tmp_path, small_windows, monkeypatch, options):
    whole, out = tmp_path / "whole", tmp_path / "out"
    once = run("align", pairs, "-o", whole, *options)
    want = whole.read_bytes()
    side = outputs.resume_file(out)
    arguments = ["align", pairs, "-o", out, "--resume", *options]
    interrupted(run, monkeypatch, arguments, line=60)
    begun, notes = out.read_bytes(), side.read_bytes()
    assert want.startswith(begun)
    assert begun.count(b"\n") == 59
    cuts = [0, 1, len(begun)] + [random.Random(0).randrange(len(begun)) for _ in range(5)]
    for cut in cuts:
        out.write_bytes(begun[:cut])
        side.write_bytes(notes + b'[60, "ba' * (cut % 2))
        done = run(*arguments)
        assert done.exit_code == 0, done.stderr
        assert out.read_bytes() == want
        assert not side.exists()
        # The sums at the end are those of all lines.
        assert done.stderr.splitlines()[-2:] == once.stderr.splitlines()[-2:]


def test_only_whole_windows_are_kept(run, pairs, tmp_path, small_windows, monkeypatch):
    out = tmp_path / "out"
    arguments = ["align", pairs, "-o", out, "--resume", "--ids"]
    interrupted(run, monkeypatch, arguments, line=22)
    assert out.read_bytes().count(b"\n") == 21
    seen = []
    lines = working.Work.lines
    monkeypatch.setattr(
        working.Work, "lines", lambda self, items, aligner, done: seen.append(done) or lines(self, items, aligner, done)
    )
    assert run(*arguments).exit_code == 0
    assert seen == [16]


def test_what_did_not_converge_before_counts_after(run, tmp_path, small_windows, monkeypatch):
    from sinkformer.couplings import Coupling

    pairs, out = tmp_path / "pairs", tmp_path / "out"
    pairs.write_bytes(b"the cat ||| a dog ran\n" * 8 + b"a ||| a\n" * 8)
    solve = Coupling.solve
    with monkeypatch.context() as patch:
        patch.setattr(Coupling, "solve", staticmethod(lambda *a, **k: solve(*a, **k, max_iterations=1)))
        interrupted(run, monkeypatch, ["align", pairs, "-o", out, "--resume"], line=9)
    assert run("align", pairs, "-o", out, "--resume", "--strict").exit_code == 3


def test_other_settings_and_inputs_are_refused(run, pairs, tmp_path, small_windows, monkeypatch):
    out = tmp_path / "out"
    arguments = ["align", pairs, "-o", out, "--resume", "--method", "partial"]
    interrupted(run, monkeypatch, arguments, line=20)
    before = out.read_bytes()
    for options, difference in (
        (["--epsilon", "0.1"], "epsilon 0.05, now 0.1;"),
        (["--method", "argmax"], "epsilon 0.05, now None, threshold 0.3, now None, method 'partial', now 'argmax';"),
        (["--format", "jsonl"], "format 'pharaoh', now 'jsonl';"),
        (["--raw"], "raw False, now True;"),
    ):
        done = run(*arguments, *options)
        assert done.exit_code == 2
        assert done.stderr.startswith(f"error: expected what {out} was begun with, received a difference: {difference}")
        assert out.read_bytes() == before
    pairs.write_bytes(pairs.read_bytes() + b"one ||| more\n")
    done = run(*arguments)
    assert done.exit_code == 2
    assert "inputs [" in done.stderr


def test_what_cannot_be_resumed(run, pairs, tmp_path):
    out = tmp_path / "out"
    done = run("align", "-", "--resume", "-o", out, input=b"a ||| b\n")
    assert done.exit_code == 2
    assert "--resume needs files that can be read again" in done.stderr
    os.mkfifo(tmp_path / "pipe")
    assert run("align", tmp_path / "pipe", "--resume", "-o", out).exit_code == 2
    assert run("align", pairs, "--resume").exit_code == 2
    out.write_text("old\n")
    done = run("align", pairs, "--resume", "-o", out)
    assert done.exit_code == 1
    assert f"{out} exists and {out}.resume does not" in done.stderr
    assert out.read_text() == "old\n"
    (tmp_path / "out.resume").write_text("something else\n")
    done = run("align", pairs, "--resume", "-o", out)
    assert done.exit_code == 1
    assert "is not what a run with --resume leaves" in done.stderr
    done = run("align", tmp_path / "out.resume", "--resume", "-o", out)
    assert "is an input" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("format", ["jsonl", "pharaoh"])
def test_killed_several_times(tiny_folder, tmp_path, format):
    """kill -9 at random moments, start-up and end included."""
    random_words = random.Random(1)
    pairs, out = tmp_path / "pairs", tmp_path / "out"
    words = [random_words.choice("the cat dog sat on mat red house".split()) for _ in range(100_000)]
    pairs.write_text(
        "".join(f"{' '.join(words[k : k + 8])} ||| {' '.join(words[k + 2 : k + 9])}\n" for k in range(3000))
    )
    command = [
        sys.executable,
        "-m",
        "sinkformer.cli",
        "align",
        str(pairs),
        "--model",
        str(tiny_folder),
        "--format",
        format,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "-o", str(tmp_path / "whole")], check=True, env=environment, timeout=300)
    want = (tmp_path / "whole").read_bytes()
    kills = 0
    for share in (0.0, 0.3, 0.35, 0.8, 2.0):
        process = subprocess.Popen([*command, "-o", str(out), "--resume"], env=environment)
        while process.poll() is None and not (out.exists() and out.stat().st_size >= share * len(want)):
            time.sleep(0.01)
        time.sleep(random_words.random() * 0.2)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.wait()
        if outputs.resume_file(out).exists():
            assert want.startswith(out.read_bytes())
    assert kills >= 3
    assert process.returncode == 0
    assert out.read_bytes() == want
    assert not outputs.resume_file(out).exists()
    assert format == "pharaoh" or [json.loads(line)["id"] for line in want.splitlines()] == list(range(1, 3001))
