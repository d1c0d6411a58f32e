import json
import shutil

import numpy as np
import pytest
import torch

import sinkformer as sf
from sinkformer.evaluation import CrossSoftmax, load_couplings, save_couplings
from sinkformer.evaluation.sampled import LOWER_BOUND
from sinkformer.systems import Monotone, Product


@pytest.fixture
def files(tmp_path):
    """Two pairs of couplings, 0.5 and 0 apart."""
    mu = sf.Measure.uniform(torch.tensor([[0.0], [1.0]], dtype=torch.float64))
    diagonal, product = Monotone()(mu, mu), Product((1, 1))(mu, mu)
    save_couplings(tmp_path / "a.jsonl", [diagonal, product])
    save_couplings(tmp_path / "b.npz", [product, product])
    return tmp_path / "a.jsonl", tmp_path / "b.npz"


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, cls, head in (
            ("own", sf.SinkhornTransformer, "sinkhorn"),
            ("soft", sf.SinkhornTransformer, "softmax"),
            ("cross", CrossSoftmax, "softmax"),
        ):
            config = sf.SinkhornTransformerConfig(dim=2, width=8, heads=2, depth=1, epsilon=0.2, head=head)
            cls(config).save_pretrained(folder / name)
    return folder


def small(models, *arguments):
    return ["w1", "--model", models / "own", "--system", "product", "--sizes", "2:4", "--pairs", "5", *arguments]


# Two files ---------------------------------------------------------------------------------------------------------------


def test_two_files(run, files):
    done = run("w1", *files)
    assert (done.exit_code, done.stderr) == (0, "")
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert lines[0] == ["pair", "W1", "lower", "upper", "marginals", "how"]
    assert [line[:2] for line in lines[1:3]] == [["0", "0.5"], ["1", "0"]]
    assert lines[3][0].startswith("2 pairs: mean 0.25,")
    assert "sup 0.5" in lines[3][0]
    assert len(lines) == 4


def test_one_pair_is_one_sentence(run, files, tmp_path):
    for k, path in enumerate(files):
        save_couplings(tmp_path / f"{k}.npz", load_couplings(path)[0])
    done = run("w1", tmp_path / "0.npz", tmp_path / "1.npz")
    assert done.stdout.startswith("W1 0.5 (exact; ")
    assert done.stdout.count("\n") == 1


def test_two_files_as_json(run, files):
    done = run("w1", *files, "--json")
    record = json.loads(done.stdout)
    assert [pair["value"] for pair in record["pairs"]] == pytest.approx([0.5, 0.0], abs=1e-12)
    assert record["all"]["sup"] == pytest.approx(0.5)
    assert done.stdout.count("\n") == 1


def test_unequal_marginals_and_plans_that_miss_them(run, tmp_path):
    line = {"source": [[0], [1]], "target": [[0], [1]]}
    weights = {"source_weights": [0.5, 0.5], "target_weights": [0.5, 0.5]}
    (tmp_path / "a.jsonl").write_text(json.dumps(line | weights | {"plan": [[0.5, 0.25], [0, 0.25]]}))
    (tmp_path / "b.jsonl").write_text(json.dumps(line | weights | {"plan": [[0.5, 0], [0, 0.5]]}))
    arguments = ["w1", tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    raw = run(*arguments).stdout
    assert "1 of 1 pairs have unequal marginals, up to 0.25 apart" in raw
    assert "plans miss the weights they came with by up to 0.5 (L1); they are compared as they are" in raw
    rounded = run(*arguments, "--rounded").stdout
    assert "unequal" not in rounded
    assert "they are rounded to them" in rounded


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "{path}, line 1, key 'source': expected it, but it is missing"),
        ("no", "{path}, line 1: expected a JSON object, received something else"),
        ("", "{path}: expected at least one coupling, received an empty file"),
    ],
)
def test_malformed_files(run, files, tmp_path, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    done = run("w1", files[0], path)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: " + message.format(path=path))
    assert done.stderr.count("\n") == 1


def test_files_that_do_not_belong_together(run, files, tmp_path):
    save_couplings(tmp_path / "one.npz", load_couplings(files[0])[:1])
    done = run("w1", files[0], tmp_path / "one.npz")
    assert done.exit_code == 1
    assert done.stderr == "error: expected as many couplings on both sides, at least one, received 2 and 1\n"
    np.savez(
        tmp_path / "half.npz", source=[[0.0]], target=[[0.0]], plan=[[0.5]], source_weights=[1.0], target_weights=[1.0]
    )
    done = run("w1", tmp_path / "half.npz", tmp_path / "one.npz")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: expected")
    assert done.stderr.count("\n") == 1
    done = run("w1", files[0], tmp_path / "absent.npz")
    assert (done.exit_code, done.stderr) == (1, f"error: {tmp_path / 'absent.npz'}: No such file or directory\n")
    assert run("w1", files[0], tmp_path / "a.txt").exit_code == 2


# A model and a system ----------------------------------------------------------------------------------------------------


def test_a_table(run, models):
    done = run(*small(models))
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "W1 to the system 'product'"
    assert lines[1].split() == ["predictor", "atoms", "pairs", "mean", "p95", "sup", "widest", "columns", "unconverged"]
    assert lines[2].split()[:3] == ["own", "2-4", "5"]
    assert LOWER_BOUND in lines
    assert run(*small(models)).stdout == done.stdout
    assert run(*small(models, "--seed", "1")).stdout != done.stdout


def test_everything_at_once(run, models, tmp_path, monkeypatch):
    from sinkformer.evaluation import FixedCost, reports

    monkeypatch.setattr(reports, "best_fixed_cost", lambda *law, seed: FixedCost(sf.SqEuclidean(), 0.5))
    options = ["--baselines", "--baseline", models / "soft", "--baseline", models / "cross", "--adversarial"]
    options += ["--steps", "2", "--plot", tmp_path / "a.png", "--worst", tmp_path / "worst.npz", "--json"]
    done = run(*small(models, *options))
    assert (done.exit_code, done.stderr) == (0, "")
    record = json.loads(done.stdout)
    names = [evaluation["predictor"] for evaluation in record["evaluations"]]
    assert names[:6] == ["own", "soft, rounded", "soft, raw", "cross, rounded", "cross, raw", "product"]
    assert names[6].startswith("fixed cost")
    assert record["adversarial"]["sup"] >= record["evaluations"][0]["all"]["sup"]
    assert record["skipped"] == []
    assert LOWER_BOUND in record["notes"]
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    prediction, target = load_couplings(tmp_path / "worst.npz")
    again = sf.w1(prediction, target)
    assert float(again.upper) == pytest.approx(record["adversarial"]["sup"], abs=1e-9)


def test_a_model_called_as_a_baseline_keeps_its_row(run, models, tmp_path, monkeypatch):
    from sinkformer.evaluation import FixedCost, reports

    monkeypatch.setattr(reports, "best_fixed_cost", lambda *law, seed: FixedCost(sf.SqEuclidean(), 0.5))
    folder = tmp_path / "product"
    shutil.copytree(models / "own", folder)
    done = run(
        "w1", "--model", folder, "--system", "product", "--sizes", "2:4", "--pairs", "5", "--baselines", "--json"
    )
    rows = {e["predictor"]: e["all"]["sup"] for e in json.loads(done.stdout)["evaluations"]}
    alone = json.loads(run(*small(models, "--json")).stdout)["evaluations"][0]["all"]["sup"]
    assert rows["product"] == pytest.approx(alone)
    assert rows["product (baseline)"] < 1e-11 < alone


def test_a_plan_without_mass(run, tmp_path):
    line = {"source": [[0.0]], "target": [[0.5]], "plan": [[0.0]], "source_weights": [1.0], "target_weights": [1.0]}
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    for more in ([], ["--rounded"]):
        done = run("w1", tmp_path / "a.jsonl", tmp_path / "a.jsonl", *more)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr == "error: pair 0: expected plans of positive mass, received one that is zero\n"


def test_several_ranges_of_sizes(run, models):
    done = run(*small(models, "--sizes", "7", "--pairs", "2", "--json"))
    assert [s["label"] for s in json.loads(done.stdout)["evaluations"][0]["by_range"]] == ["2-4", "7"]
    assert [s["pairs"] for s in json.loads(done.stdout)["evaluations"][0]["by_range"]] == [5, 2]


def test_sharper_logits_are_another_model(run, models):
    plain, sharp = (json.loads(run(*small(models, "--json", *more)).stdout) for more in ([], ["--sharpened", "5"]))
    assert sharp["evaluations"][0]["all"]["sup"] > plain["evaluations"][0]["all"]["sup"]


def test_strict(run, models, tmp_path, monkeypatch):
    from sinkformer.evaluation import comparing

    monkeypatch.setattr(comparing, "_MOST_ITERATIONS", 1)
    config = json.loads((models / "own" / "config.json").read_text()) | {"max_iterations": 1, "epsilon": 1e-4}
    (tmp_path / "hasty").mkdir()
    (tmp_path / "hasty" / "config.json").write_text(json.dumps(config))
    (tmp_path / "hasty" / "model.safetensors").write_bytes((models / "own" / "model.safetensors").read_bytes())
    arguments = ["w1", "--model", tmp_path / "hasty", "--system", "product", "--sizes", "4:6", "--pairs", "5"]
    done = run(*arguments, "--strict")
    assert done.exit_code == 3
    assert "hasty" in done.stdout
    assert run(*arguments).exit_code == 0


def test_a_table_in_a_terminal(monkeypatch, capsys):
    from sinkformer.cli import w1_tables
    from sinkformer.evaluation import distances, report
    from sinkformer.systems import PairSampler

    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    product = Product((2, 2))
    w1_tables.print_report(report(product, product, PairSampler(), pairs=2, untrained=False, name="[red]"))
    out = capsys.readouterr().out
    assert "[red]" in out
    assert LOWER_BOUND in out
    mu = sf.Measure.uniform(torch.rand(2, 2, dtype=torch.float64))
    w1_tables.print_distances(distances([product(mu, mu)] * 2, [product(mu, mu)] * 2))
    assert "2 pairs: mean" in capsys.readouterr().out


# Usage -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either two files, A and B, or both --model and --system"),
        (["a.npz"], "give either two files"),
        (["--model", "m"], "give either two files"),
        (["a.npz", "b.npz", "--system", "eot"], "give either two files"),
        (["a.npz", "b.npz", "--pairs", "3"], "--pairs belongs to a model and a system"),
        (["a.npz", "b.npz", "--steps", "3"], "--steps belongs to a model and a system"),
        (["a.npz", "b.npz", "--sharpened", "0"], "--sharpened belongs to a model and a system"),
        (["a.npz", "b.npz", "--seed", "0"], "--seed belongs to a model and a system"),
        (["--model", "m", "--system", "eot", "--steps", "7"], "--steps belongs to --adversarial"),
        (["--model", "m", "--system", "eot", "--adversarial", "--steps", "0"], "Invalid value for '--steps'"),
        (["a.npz", "b.npz", "--strict"], "--strict belongs to a model and a system"),
        (["--model", "m", "--system", "eot", "--rounded"], "--rounded belongs to two files"),
    ],
)
def test_usage(run, arguments, message):
    done = run("w1", *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--system", "eto"], 2, "error: expected a system of eot, monotone"),
        (["--model", "/no/such/folder"], 1, "error: expected a folder written by save_pretrained"),
        (["--sizes", "2-16"], 2, "error: expected --sizes as LOW:HIGH, such as 2:16, received '2-16'"),
        (["--sizes", "5:2"], 2, "error: expected sizes as whole numbers low <= high"),
        (["--pairs", "0"], 2, "error: expected pairs as a whole number >= 1, received 0"),
        (["--seed", "-1"], 2, "error: expected seed as a whole number >= 0, received -1"),
        (["--tol", "2"], 2, "error: expected tol between 0 and 1"),
        (["--sharpened", "0"], 2, "error: expected a positive, finite factor"),
        (["--plot", "/no/such/folder/a.png"], 1, "error: /no/such/folder/a.png: cannot be written"),
        (["--plot", "a.docx"], 2, "error: expected a picture file ending in one of"),
        (["--worst", "a.txt"], 2, "error: expected a file of couplings ending in .npz or .jsonl"),
        (["--system", "monotone"], 1, "error: expected points with 2 coordinates, received 1"),
    ],
)
def test_errors_are_one_sentence(run, models, options, code, message):
    arguments = {"--model": models / "own", "--system": "product", "--sizes": "2:3", "--pairs": "2"}
    arguments |= dict(zip(options[::2], options[1::2], strict=True))
    done = run("w1", *(part for option in arguments.items() for part in option))
    assert (done.exit_code, done.stdout) == (code, "")
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_equal_names_of_folders(run, models, tmp_path):
    (tmp_path / "own").symlink_to(models / "soft")
    done = run(*small(models, "--baseline", tmp_path / "own", "--json"))
    names = [evaluation["predictor"] for evaluation in json.loads(done.stdout)["evaluations"]]
    assert names[0] == "own"
    assert len(set(names)) == 3
    done = run(*small(models, "--baseline", models / "own"))
    assert done.exit_code == 2
    assert "the same folder was given twice" in done.stderr
