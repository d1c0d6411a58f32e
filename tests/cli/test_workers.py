"""Blocks of lines, and several processes that share them."""

import importlib.util
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkformer.cli.inputs import Inputs
from sinkformer.errors import ConfigError, MissingExtraError
from sinkformer.text.formats import line_offsets
from sinkformer.text.parallel import mapped

LINES = st.lists(
    st.sampled_from([b"a b ||| c", b"\xef\xbb\xbfa\tb", b"", b"bad", b"caf\xe9\tx", "a\u2028b\tc\r".encode()])
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("blocks")


@given(lines=LINES, end=st.sampled_from([b"", b"\n"]), size=st.integers(1, 5), tokenized=st.booleans())
@settings(max_examples=60, deadline=None)
def test_blocks_are_the_file(folder, lines, end, size, tokenized):
    path = folder / "pairs"
    path.write_bytes(b"\n".join(lines) + end)
    for names in ((str(path),), (str(path), str(path))):
        inputs = Inputs(names, tokenized)
        with inputs.opened() as (items, total):
            want = list(items)
        assert len(want) == total
        blocks = inputs.blocks(size, 0)
        assert [item for block in blocks for item in inputs.read(block)] == want
        assert len(blocks) == -(-len(want) // size)
        assert [x for block in inputs.blocks(size, size) for x in inputs.read(block)] == want[size:]


@pytest.mark.parametrize(
    ("raw", "every", "offsets"),
    [(b"", 2, [0]), (b"a\nbb\nc", 2, [0, 5, 6]), (b"a\nbb\n", 2, [0, 5]), (b"\n\n\n", 1, [0, 1, 2, 3])],
)
def test_line_offsets(tmp_path, raw, every, offsets):
    (tmp_path / "f").write_bytes(raw)
    assert line_offsets(tmp_path / "f", every) == offsets


def test_workers_need_files_and_ray(run, tmp_path, monkeypatch):
    done = run("align", "-", "--workers", "2", input=b"a ||| b\n")
    assert done.exit_code == 2
    assert "--workers needs files that can be read again" in done.stderr
    assert run("align", tmp_path / "x", "--workers", "0").exit_code == 2
    with pytest.raises(ConfigError, match="expected workers >= 1, received 0"):
        next(mapped([1], dict, 0))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"sinkformer\[ray\]"):
        next(mapped([1], dict, 2))
    (tmp_path / "pairs").write_bytes(b"a ||| a\n")
    done = run("align", tmp_path / "pairs", "--workers", "2")
    assert done.exit_code == 1
    assert "pip install 'sinkformer[ray]'" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_two_workers_write_what_one_process_writes(tiny_folder, tmp_path):
    pairs = tmp_path / "pairs"
    lines = [
        b"the cat sat ||| a cat rested",
        b"no bars",
        b" ||| x",
        b"dog\tthe dog",
        b"caf\xe9 ||| x",
        "\U0001f642 ||| a".encode(),
    ]
    pairs.write_bytes(b"".join(lines[k % 6] + b" %d\n" % k for k in range(1200)))
    command = [sys.executable, "-m", "sinkformer.cli", "align", str(pairs), "--model", f"./{tiny_folder.name}"]
    for options in (["--format", "jsonl"], ["--ids"]):
        done = [
            subprocess.run([*command, *options, *more], capture_output=True, timeout=300, cwd=tiny_folder.parent)
            for more in ([], ["--workers", "2"])
        ]
        assert [d.returncode for d in done] == [0, 0], done[1].stderr
        assert done[0].stdout == done[1].stdout
        assert done[0].stdout.count(b"\n") == 1200
        warned = [[line for line in d.stderr.splitlines() if line.startswith(b"warning: ")] for d in done]
        assert warned[0] == warned[1]
