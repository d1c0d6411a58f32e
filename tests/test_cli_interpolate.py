import json
from fractions import Fraction

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("flint")
pytest.importorskip("matplotlib")

X = [[[0, 0], ["1/3", 1], [2, "0.1"]], [[0, 0], [1, 1]]]
Y = [[[5, 5]], [[1, 0], ["-1/7", 2]]]


@pytest.fixture
def run():
    """Call the verb in this process: ``run(path, "--check")``."""
    from sinkformer.cli.app import app

    runner = CliRunner()

    def call(*arguments, **options):
        return runner.invoke(app, ["interpolate", *map(str, arguments)], prog_name="sinkformer", **options)

    return call


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps({"X": X, "Y": Y}))
    return path


def lines(tmp_path, text=None):
    path = tmp_path / "pairs.jsonl"
    rows = [json.dumps({"x": x, "y": y}) for x, y in zip(X, Y, strict=True)]
    path.write_text("\n".join(rows) + "\n" if text is None else text)
    return path


# Results -----------------------------------------------------------------------------------------------------------------


def test_a_report(run, data):
    done = run(data, "--method", "paper", "--check")
    assert (done.exit_code, done.stderr) == (0, "")
    out = done.stdout.splitlines()
    assert out[0] == "2 pairs in R^2: up to 3 tokens each, up to 2 targets, K = 3 targets in all"
    assert out[1] == "paper, hardmax"
    assert out[3].split() == ["phase", "blocks", "margin", "constants", "must", "hold"]
    counts = [line.split()[:4] for line in out if "L = " in line or "(10 d + 8) L" in line]
    assert counts == [["this", "network", "11", "308"], ["theorem,", "hardmax", "11", "308"]]
    assert "2 K + 2 N + 1" in done.stdout
    assert out[-1].startswith("proved (rational arithmetic): all 2 sequences equal their targets")
    assert run(data).stdout.endswith("not checked; --check proves it\n")


def test_the_record_is_the_network(run, data):
    from sinkformer.interpolation import construct

    done = run(data, "--attention", "softmax", "--method", "paper", "--tau", "1/3", "--check", "--json")
    assert (done.exit_code, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    record = json.loads(done.stdout)
    built = construct(X, Y, attention="softmax", method="paper", tau=Fraction(1, 3))
    assert record["pairs"] == {"N": 2, "n": 3, "m": 2, "d": 2, "K": 3, "M": 5}
    assert (record["blocks"], record["parameters"]) == (2 * 3 + 3 * 2, 28 * 12) == (built.L, built.parameters)
    assert record["theorem"] == {"blocks": 12, "parameters": 336}
    assert record["tau"] == "1/3"
    assert built.tau_star is not None
    assert Fraction(record["tau_star"]) == built.tau_star >= Fraction(1, 3)
    assert record["ledger"] == built.ledger.to_dict()
    assert record["verdict"]["status"] == "proved"
    assert record["export"] is None


def test_temperature_in_words(run, data):
    assert (
        " softmax at temperature 1, or any other\n" in run(data, "--attention", "softmax", "--method", "direct").stdout
    )
    warm = run(data, "--attention", "softmax", "--method", "paper", "--tau", "0.5").stdout
    assert " softmax at temperature 1/2, or any up to tau* = " in warm


def test_options_reach_the_construction(run, data):
    found = [
        json.loads(run(data, "--json", *options).stdout)
        for options in ([], ["--request", "for_exact"], ["--method", "paper", "--statistic", "max"])
    ]
    assert [record["method"] for record in found] == ["direct", "knots", "paper"]
    assert [record["blocks"] for record in found] == [3, 2, 11]
    assert found[2]["ledger"] != json.loads(run(data, "--json", "--method", "paper").stdout)["ledger"]


def test_forms_of_a_file(run, data, tmp_path):
    whole = run(data, "--json").stdout
    assert run(lines(tmp_path), "--json").stdout == whole
    assert run("-", "--json", input=data.read_text()).stdout == whole
    one = lines(tmp_path, json.dumps({"x": X[0], "y": Y[0]}))
    assert json.loads(run(one, "--json").stdout)["pairs"]["N"] == 1


def test_texts_are_exact(run, tmp_path):
    """The decimal 0.1 and the float 0.1 are two tokens."""
    path = lines(tmp_path, '{"x": [[0.1], ["0.1"]], "y": [[1], [2]]}\n')
    done = run(path, "--request", "for_exact", "--check")
    assert done.exit_code == 0
    assert "proved" in done.stdout
    done = run(lines(tmp_path, '{"x": [[0.5], ["0.5"]], "y": [[1], [2]]}\n'))
    assert done.exit_code == 1
    assert "expected distinct tokens in X[0]" in done.stderr


def test_what_is_not_proved_is_a_failure(run, data, monkeypatch):
    from sinkformer.interpolation.verification import Certificate, Verdict

    for status in ("refuted", "undecided"):
        monkeypatch.setattr(Certificate, "check", lambda self, status=status: Verdict(status, "no", 128))
        done = run(data, "--check")
        assert done.exit_code == 1
        assert done.stdout.endswith(f"{status} (enclosures of 128 bits): no\n")
        done = run(data, "--check", "--json")
        assert done.exit_code == 1
        assert json.loads(done.stdout)["verdict"] == {"status": status, "reason": "no", "precision": 128}
    assert run(data).exit_code == 0


# Files -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_saving(run, data, tmp_path, dtype):
    from sinkformer.interpolation import TokenTransformer, load

    folder = tmp_path / "net"
    options = () if dtype == "float64" else ("--dtype", dtype)
    record = json.loads(run(data, "--method", "two-pass", "--save", folder, *options, "--json").stdout)
    model = TokenTransformer.load(folder)
    kind = getattr(torch, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {kind}
    moved = model(torch.tensor([[0, 0], [1, 1]], dtype=kind)).detach().double()
    error = torch.cdist(moved, torch.tensor([[1, 0], [-1 / 7, 2]], dtype=torch.float64)).amin(0).max()
    assert float(error) <= 10 * record["export"]["measured"] + 1e-300 <= 10 * torch.finfo(kind).eps * 8
    assert (record["export"]["dtype"], record["export"]["folder"]) == (dtype, str(folder))
    assert record["export"]["measured"] <= record["export"]["predicted"]
    assert load(folder).certificate.check()


def test_saving_says_the_errors(run, data, tmp_path):
    done = run(data, "--save", tmp_path / "net")
    assert done.exit_code == 0
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"saved in {tmp_path / 'net'}, torch.float64: error ")
    assert "predicted" in last


def test_doubts_are_said(run, data, tmp_path, monkeypatch):
    from sinkformer.interpolation import exporting

    monkeypatch.setattr(exporting, "predicted_error", lambda *arguments: float("inf"))
    done = run(data, "--save", tmp_path / "net", "--json")
    assert done.exit_code == 0
    assert done.stderr.startswith("warning: the network interpolates in torch.float64 here")
    export = json.loads(done.stdout)["export"]
    assert export["predicted"] is None
    assert 0 <= export["measured"] < 1e-14
    assert run(data, "--save", tmp_path / "net", "--json", "--quiet").stderr == ""


def test_what_no_float_can_hold_is_refused(run, tmp_path):
    path = lines(tmp_path, '{"x": [[0.1], ["0.1"]], "y": [[1], [2]]}\n')
    done = run(path, "--save", tmp_path / "net")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: expected data that survive rounding to torch.float64")
    assert not (tmp_path / "net").exists()


def test_pictures(run, data, tmp_path, monkeypatch):
    from sinkformer.plots import animations

    monkeypatch.setattr(animations, "_MOST_FRAMES", 45)
    for name, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.GIF", b"GIF8")):
        done = run(data, "--method", "direct", "--plot", tmp_path / name)
        assert (done.exit_code, done.stderr) == (0, "")
        assert (tmp_path / name).read_bytes().startswith(start)


def test_a_table_in_a_terminal(run, data, monkeypatch, capsys):
    from sinkformer.cli.interpolate_tables import print_network
    from sinkformer.interpolation import construct

    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    built = construct(X, Y, attention="softmax", method="paper")
    print_network(built)
    out = capsys.readouterr().out
    for entry in built.ledger:
        assert entry.phase in out
        assert entry.inequality in out
    assert f"tau* {float(built.tau_star):.4g}" in out
    assert "2 K + 3 N" in out


# What is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "{path}: expected JSON, received an empty file"),
        ("[]", "{path}: expected a JSON object, received list"),
        ('{"X": []}', "{path}: expected the keys 'X' and 'Y', received ['X']"),
        ('{"x": [], "Y": []}', "{path}: expected the keys 'x' and 'y', received ['Y', 'x']"),
        ('{"X": {}, "Y": []}', "{path}, key 'X': expected a list, received dict"),
        ('{"X": [],\n "Y": oh}', "{path}, line 2, column 7: expected JSON, received something else"),
        ('{"X": [], "Y": []}', "{path}: expected at least one pair of sequences, received none"),
        ('{"x": [[1]], "y": [[1]]}\n{"x": 5, "y": []}', "{path}, line 2, key 'x': expected a list, received int"),
        ('{"x": [[1]], "y": [[1]]}\n\n{"x": [[2]], "y"}', "{path}, line 3, column 17: expected JSON"),
        ('{"x": [[1]], "y": [[1]]}\n{"x": [[2]]}', "{path}, line 2: expected the keys 'x' and 'y', received ['x']"),
        ('{"x": [[NaN]], "y": [[1]]}', "{path}: expected finite tokens, received nan in X[0][0]"),
        ('{"x": [["one"]], "y": [[1]]}', "{path}: expected real numbers in X[0][0], received 'one'"),
        ('{"x": [[1]], "y": [[null]]}', "{path}: expected real numbers in Y[0][0], received"),
        ("[" * 100_000, "{path}: expected JSON that can be read"),
        ('{"X": [[[' + "1" * 5000 + ']]], "Y": [[[1]]]}', "{path}: expected JSON that can be read"),
    ],
)
def test_files_that_are_refused(run, tmp_path, text, message):
    path = lines(tmp_path, text)
    done = run(path)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: " + message.format(path=path))
    assert done.stderr.count("\n") == 1


def test_errors_of_the_data_name_file_and_line(run, tmp_path):
    path = lines(tmp_path, '{"x": [[1]], "y": [[1]]}\n{"x": [[2]], "y": [[1], [2]]}\n')
    done = run(path)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"error: {path}: expected at most as many targets as tokens")
    assert "Y[1]" in done.stderr
    assert done.stderr.endswith("(X[j] and Y[j] are the pair of line j + 1, blank lines not counted)\n")
    (tmp_path / "latin.json").write_bytes(b'{"X": "\xe9"}')
    assert "not UTF-8" in run(tmp_path / "latin.json").stderr
    assert run(tmp_path / "none.json").stderr == f"error: {tmp_path / 'none.json'}: No such file or directory\n"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--tau", "warm"], 2, "error: expected --tau as a number, such as 0.5 or 1/3, received 'warm'"),
        (["--tau", "1/0"], 2, "error: expected --tau as a number"),
        (["--tau", "1"], 2, "error: expected no temperature for hardmax"),
        (["--tau", "-1", "--attention", "softmax"], 2, "error: expected a positive, finite temperature"),
        (["--method", "best"], 2, "error: expected method to be one of 'auto', 'paper'"),
        (["--attention", "sparsemax"], 2, "error: expected attention to be one of"),
        (["--request", "for_fun"], 2, "error: expected request to be one of"),
        (["--statistic", "max"], 2, "error: the maximum as the separating statistic belongs to method='paper'"),
        (["--plot", "/no/such/folder/a.png"], 1, "error: /no/such/folder/a.png: cannot be written"),
        (["--plot", "a.docx"], 2, "error: expected a picture file ending in one of"),
        (["--save", "/dev/null"], 1, "error: /dev/null: is a file; name a folder to write"),
    ],
)
def test_errors_are_one_sentence(run, data, options, code, message):
    done = run(data, *options)
    assert (done.exit_code, done.stdout) == (code, "")
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_usage(run, data):
    done = run(data, "--dtype", "float32")
    assert done.exit_code == 2
    assert "--dtype belongs to --save" in done.stderr
    assert run(data, "--save", "net", "--dtype", "float16").exit_code == 2
    assert run().exit_code == 2


def test_an_input_is_never_written(run, data, tmp_path):
    before = data.read_bytes()
    picture = data.rename(tmp_path / "pairs.png")
    folder = tmp_path / "net"
    folder.mkdir()
    (folder / "config.json").hardlink_to(picture)
    for options in (["--plot", picture], ["--save", folder]):
        done = run(picture, *options)
        assert done.exit_code == 1
        assert "is an input, and writing it would destroy it" in done.stderr
    assert picture.read_bytes() == before


def test_tracebacks_on_demand(run, data):
    from sinkformer.errors import ConfigError

    assert isinstance(run(data, "--method", "best", "--debug").exception, ConfigError)
