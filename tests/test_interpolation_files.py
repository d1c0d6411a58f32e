"""Folders of constructed networks: what is written, what is read back, and what is refused."""

import copy
import json
from fractions import Fraction

import pytest
import torch

from sinkformer.errors import ModelError, PrecisionError
from sinkformer.interpolation import TokenTransformer, construct, load
from sinkformer.interpolation.files import CERTIFICATE

X = [[["1/3", 0], [1, 0.1], [2, 5]], [[0, 0], [1, 1]]]
Y = [[[5, "2/7"], [7, 7]], [[0.3, -1]]]


@pytest.fixture
def folder(tmp_path):
    construct(X, Y, method="paper", attention="softmax").save(tmp_path)
    return tmp_path


@pytest.mark.parametrize("method", ["paper", "direct", "two-pass", "knots"])
@pytest.mark.parametrize("attention", ["hardmax", "softmax"])
def test_what_is_read_is_what_was_written(method, attention, tmp_path):
    built = construct(X, Y, method=method, attention=attention)
    export = built.save(tmp_path)
    again = load(tmp_path)
    assert list(again.exact_blocks) == list(built.exact_blocks)
    assert (again.kind, again.tau, again.tau_star, again.method) == (
        built.kind,
        built.tau,
        built.tau_star,
        built.method,
    )
    assert again.ledger == built.ledger
    assert [tuple(map(x.row, range(len(x)))) for x in again.pairs.X] == [
        tuple(map(x.row, range(len(x)))) for x in built.pairs.X
    ]
    assert again.certificate.check()
    stored = json.loads((tmp_path / CERTIFICATE).read_text())
    assert stored["verdict"]["status"] == "proved"
    assert stored["export"] == export.to_dict()
    assert stored["export"]["dtype"] == "float64"
    model = TokenTransformer.load(tmp_path)
    for mine, theirs in zip(model.parameters(), built.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def changed(contents, path, value):
    """A copy with one value replaced; a function is applied to the old one."""
    contents = copy.deepcopy(contents)
    place = contents
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value(place[path[-1]]) if callable(value) else value
    return contents


def renamed(old, new):
    return lambda columns: [{(new if name == old else name): value for name, value in c.items()} for c in columns]


DAMAGED = {
    "version": (["format_version"], 2),
    "version true": (["format_version"], True),
    "kind": (["kind"], "softmin"),
    "method": (["method"], None),
    "tau zero": (["tau"], "0"),
    "tau negative": (["tau"], "-1"),
    "tau a number": (["tau"], 0.5),
    "tau infinite": (["tau"], float("inf")),
    "tau over zero": (["tau"], "1/0"),
    "tau star negative": (["tau_star"], "-3"),
    "no blocks": (["blocks"], []),
    "blocks null": (["blocks"], None),
    "block a number": (["blocks", 0], 3),
    "phase null": (["blocks", 0, "phase"], None),
    "biases a text": (["blocks", 0, "biases"], "12"),
    "too many biases": (["blocks", 0, "biases"], lambda biases: [*biases, "1"]),
    "a bias not a number": (["blocks", 0, "biases", 0], "one"),
    "a bias NaN": (["blocks", 0, "biases", 0], float("nan")),
    "columns null": (["blocks", 0, "columns"], None),
    "functional a list": (["blocks", 0, "functional"], []),
    "functional of a token": (["blocks", 0, "functional"], {"Y:0:0": "1"}),
    "zero coefficient": (["blocks", 0, "functional"], {"0": "0"}),
    "causal a number": (["blocks", 0, "causal"], 1),
    "another key": (["blocks", 0], lambda block: block | {"gamma": "1"}),
    "coordinate beyond d": (["blocks", 0, "columns"], renamed("0", "2")),
    "coordinate far beyond d": (["blocks", 0, "columns"], renamed("0", "9" * 30)),
    "coordinate negative": (["blocks", 0, "columns"], renamed("0", "-1")),
    "coordinate with a zero": (["blocks", 0, "columns"], renamed("0", "00")),
    "ledger null": (["ledger"], None),
    "ledger blocks a text": (["ledger", "entries", 0, "blocks"], "x"),
    "ledger side infinite": (["ledger", "entries", 0, "larger"], float("inf")),
    "ledger constants a list": (["ledger", "entries", 0, "constants"], []),
    "data null": (["data"], None),
    "a token null": (["data", "X", 0, 0], None),
    "a token not a number": (["data", "X", 0, 0], ["1/0", 1]),
    "a token twice": (["data", "X", 0], lambda rows: [*rows, rows[0]]),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_certificate_is_refused(name, folder):
    path = folder / CERTIFICATE
    path.write_text(json.dumps(changed(json.loads(path.read_text()), *DAMAGED[name])))
    with pytest.raises(ModelError, match=r"expected .* received .*; (save it|construct the network) again"):
        load(folder)


@pytest.mark.parametrize("name", ["Y:0:-1", "Y:0:9", "Y:9:0", "X:0:0", "Z:0:0", "Y:0:00", "Y:0", "Y:0:0:0"])
def test_a_row_that_is_no_target_is_refused(name, folder):
    """Else a network could hide from the verification what it writes."""
    path = folder / CERTIFICATE
    text = path.read_text()
    assert "Y:0:0" in text
    path.write_text(text.replace('"Y:0:0"', f'"{name}"'))
    with pytest.raises(ModelError):
        load(folder)


def test_a_wrong_network_is_refuted(folder):
    path = folder / CERTIFICATE
    path.write_text(path.read_text().replace('"Y:0:0"', '"Y:0:1"'))
    assert load(folder).certificate.check().status == "refuted"


@pytest.mark.parametrize("text", ["", "[", "[1]", "null", "{}", "[" * 100_000, "\x00", '{"format_version": 1}'])
def test_a_file_of_something_else_is_refused(text, folder):
    (folder / CERTIFICATE).write_text(text)
    with pytest.raises(ModelError, match="save it again"):
        load(folder)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"certificate\.json"):
        load(tmp_path)


def test_numbers_of_any_length(tmp_path):
    third = Fraction(1, 3**10_000)
    built = construct([[[0], [1]]], [[[1 + third]]])
    assert built.certificate.check()
    assert "inf" not in str(built.ledger)
    built.save(tmp_path)
    assert load(tmp_path).pairs.Y[0].row(0) == (1 + third,)


def test_a_folder_never_holds_the_certificate_of_another_network(folder):
    close = construct([[[0], [1e-9], [1]]], [[[1], [2], [3]]], method="direct")
    with pytest.raises(PrecisionError):
        close.save(folder, torch.float32)
    assert load(folder).pairs.N == 2  # what was there is whole
    construct(close.pairs, method="two-pass").save(folder)
    assert load(folder).pairs.N == 1
    assert TokenTransformer.load(folder).dim == 1
