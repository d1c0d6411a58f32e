import json

import pytest

from sinkformer.text.learned import is_aligner

PAIRS = [
    ("the cat sat on the mat", "a cat sat on a mat"),
    ("a dog rested", "the dog"),
    ("the red house", "a house red"),
] * 4


@pytest.fixture(scope="module")
def gold(tmp_path_factory):
    file = tmp_path_factory.mktemp("gold") / "gold.jsonl"
    with file.open("w") as out:
        for a, b in PAIRS:
            a, b = a.split(), b.split()
            links = [[i, j] for i, x in enumerate(a) for j, y in enumerate(b) if x == y]
            out.write(json.dumps({"source": a, "target": b, "sure": links}) + "\n")
    return file


def train(run, gold, tiny_folder, save, *more):
    return run(
        *(
            "train",
            "--train",
            gold,
            "--dev",
            gold,
            "--save",
            save,
            "--model",
            tiny_folder,
            "--channels",
            4,
            "--blocks",
            1,
        ),
        *("--epochs", 2, "--batch", 4, *more),
    )


def test_train_align_evaluate(run, gold, tiny_folder, tmp_path):
    save = tmp_path / "aligner"
    result = train(run, gold, tiny_folder, save)
    assert result.exit_code == 0, result.output
    assert "12 pairs" in result.stdout
    assert is_aligner(save)
    assert "sinkformer" in (save / "README.md").read_text()
    pairs = tmp_path / "pairs.txt"
    pairs.write_text("".join(f"{a} ||| {b}\n" for a, b in PAIRS))
    links = tmp_path / "links.pharaoh"
    assert run("align", pairs, "--model", save, "--output", links).exit_code == 0
    scores = json.loads(run("evaluate", gold, links, "--json").stdout)
    assert scores["pairs"] == 12
    # Trained further from the folder, into another one.
    again = run(
        "train", "--train", gold, "--dev", gold, "--save", tmp_path / "more", "--model", save, "--epochs", 1, "-q"
    )
    assert again.exit_code == 0, again.output
    assert again.stderr == ""


def test_pure_and_free_order(run, gold, tiny_folder, tmp_path):
    save = tmp_path / "pure"
    result = run(
        *(
            "train",
            "--train",
            gold,
            "--dev",
            gold,
            "--save",
            save,
            "--model",
            tiny_folder,
            "--pure",
            "--free-order",
            "--epochs",
            1,
        ),
        *("--one-way", "--quiet"),
    )
    assert result.exit_code == 0, result.output
    model = json.loads((save / "aligner.json").read_text())["model"]
    assert (model["blocks"], model["spelling"], model["links"], model["places"]) == (0, False, False, False)


def test_refusals(run, gold, tiny_folder, tmp_path):
    save = tmp_path / "aligner"
    assert train(run, gold, tiny_folder, save).exit_code == 0
    taken = train(run, gold, tiny_folder, save)
    assert taken.exit_code == 2
    assert "holds an aligner already" in taken.stderr
    file = tmp_path / "file"
    file.write_text("")
    assert "file" in train(run, gold, tiny_folder, file).stderr
    links = tmp_path / "links.pharaoh"
    links.write_text("0-0\n")
    bare = train(run, links, tiny_folder, tmp_path / "other")
    assert bare.exit_code == 1
    assert "links.pharaoh:1: expected words" in bare.stderr
    assert train(run, gold, tiny_folder, tmp_path / "other", "--pure").exit_code == 2
    wild = train(run, gold, tiny_folder, tmp_path / "other", "--rate", "-1")
    assert wild.exit_code == 2
    assert "rate" in wild.stderr
    assert "blocks to fine-tune" in train(run, gold, tiny_folder, tmp_path / "other", "--fine-tune", 9).stderr
    missing = train(run, tmp_path / "none.jsonl", tiny_folder, tmp_path / "other")
    assert missing.exit_code == 1
    assert "none.jsonl" in missing.stderr
    assert not (tmp_path / "other").exists() or not is_aligner(tmp_path / "other")
