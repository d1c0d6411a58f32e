"""A constructed network as JSON: the data, the exact blocks, the ledger. What is read is believed in nothing but its form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from sinkformer.errors import ModelError
from sinkformer.interpolation.blocks import Block, Kind
from sinkformer.interpolation.datasets import SequencePairs, Tokens
from sinkformer.interpolation.ledger import Entry, Ledger
from sinkformer.interpolation.rationals import fraction, parsed, rational, spelled
from sinkformer.interpolation.vectors import Row

if TYPE_CHECKING:
    from sinkformer.interpolation.interpolants import Interpolant
    from sinkformer.interpolation.rationals import Rational

CERTIFICATE = "certificate.json"
_VERSION = 1
_KEYS = {"format_version", "data", "kind", "tau", "tau_star", "method", "blocks", "ledger", "verdict", "export"}
_NUMBERS = ("eta", "rho", "beta", "alpha")
_BLOCK_KEYS = {"phase", "functional", "biases", "columns", "p", "q", "causal", *_NUMBERS}
_ENTRY_KEYS = {"phase", "blocks", "hypotheses", "constants", "inequality", "smaller", "larger", "holds"}
_ROW = re.compile(r"Y:(0|[1-9]\d{0,17}):(0|[1-9]\d{0,17})")
_COORDINATE = re.compile(r"0|[1-9]\d{0,17}")


def text_of(network: Interpolant, verdict: Mapping[str, Any], export: Mapping[str, Any]) -> str:
    """The contents of ``certificate.json``."""
    contents = {
        "format_version": _VERSION,
        "data": {name: list(map(_rows, side)) for name, side in (("X", network.pairs.X), ("Y", network.pairs.Y))},
        "kind": network.kind,
        "tau": spelled(network.tau),
        "tau_star": None if network.tau_star is None else spelled(network.tau_star),
        "method": network.method,
        "blocks": list(map(_block_to_json, network.blocks)),
        "ledger": network.ledger.to_dict(),
        "verdict": verdict,
        "export": export,
    }
    return json.dumps(contents, indent=1, allow_nan=False) + "\n"


def read(folder: Path) -> dict[str, Any]:
    """The attributes of the ``Interpolant`` that a folder holds.

    Raises:
        ModelError: no file, a damaged one, or one of another version.
    """
    path = folder / CERTIFICATE
    if not path.is_file():
        raise ModelError(f"expected the file {CERTIFICATE} in {folder}; write the folder with save")
    try:
        contents = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refused)
        return _network(contents)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ModelError(
            f"expected a certificate of format_version {_VERSION} in {folder}, received a damaged one: {error}; save it again"
        ) from error


def _network(contents: Any) -> dict[str, Any]:
    _check_keys("the certificate", contents, _KEYS)
    if contents["format_version"] is True or contents["format_version"] != _VERSION:
        raise ValueError(f"format_version is {contents['format_version']!r}")
    _check_keys("the data", contents["data"], {"X", "Y"})
    kind, method = contents["kind"], contents["method"]
    if kind not in get_args(Kind) or not isinstance(method, str):
        raise ValueError(f"the kind is {kind!r}, the method {method!r}")
    if contents["blocks"] == []:
        raise ValueError("there is no block")
    star = None if contents["tau_star"] is None else _positive("tau_star", contents["tau_star"])
    return {
        "pairs": SequencePairs(*(list(map(_sequence, contents["data"][name])) for name in ("X", "Y"))),
        "kind": kind,
        "tau": _positive("tau", contents["tau"]),
        "tau_star": star,
        "method": method,
        "blocks": tuple(map(_block, _list("the blocks", contents["blocks"]))),
        "ledger": _ledger(contents["ledger"]),
    }


def _block_to_json(block: Block) -> dict[str, Any]:
    """A block in its compact form: coefficients by coordinate, and by target token as ``"Y:sequence:token"``."""
    return {
        "phase": block.phase,
        **{name: spelled(getattr(block, name)) for name in _NUMBERS},
        "functional": _coefficients(block.functional),
        "biases": list(map(spelled, block.biases)),
        "columns": list(map(_coefficients, block.columns)),
        "p": _coefficients(block.p),
        "q": _coefficients(block.q),
        "causal": block.causal,
    }


def _block(contents: Any) -> Block:
    _check_keys("a block", contents, _BLOCK_KEYS)
    phase, causal = contents["phase"], contents["causal"]
    if not isinstance(phase, str) or not isinstance(causal, bool):
        raise TypeError(f"the phase of a block is {phase!r}, causal is {causal!r}")
    return Block(
        phase,
        functional=_functional(contents["functional"]),
        biases=tuple(map(parsed, _list("the biases", contents["biases"]))),
        columns=tuple(map(_vector, _list("the columns", contents["columns"]))),
        p=_functional(contents["p"]),
        q=_functional(contents["q"]),
        causal=causal,
        **{name: parsed(contents[name]) for name in _NUMBERS},
    )


def _rows(tokens: Tokens) -> list[list[Any]]:
    """Floats as numbers, which JSON keeps to the last bit, other fractions as ``"p/q"``."""
    if tokens.fractions is None:
        return tokens.floats.tolist()
    return [[spelled(rational(value)) for value in row] for row in tokens.fractions]


def _sequence(rows: Any) -> list[list[Any]]:
    return [
        [fraction(parsed(entry)) if isinstance(entry, str) else entry for entry in _list("a token", row)]
        for row in _list("a sequence", rows)
    ]


def _coefficients(vector: Mapping[Any, Rational]) -> dict[str, str]:
    return {_name(basis): spelled(value) for basis, value in vector.items()}


def _name(basis: int | Row) -> str:
    return f"{basis.side}:{basis.sequence}:{basis.token}" if isinstance(basis, Row) else str(basis)


def _vector(contents: Any) -> dict[int | Row, Rational]:
    return {_basis(name): _coefficient(value) for name, value in contents.items()}


def _functional(contents: Any) -> dict[int, Rational]:
    found = {_basis(name): _coefficient(value) for name, value in contents.items()}
    return {_coordinate(basis): value for basis, value in found.items()}


def _coordinate(basis: int | Row) -> int:
    if isinstance(basis, Row):
        raise ValueError(f"a functional has the coefficient {_name(basis)}")
    return basis


def _coefficient(text: Any) -> Rational:
    value = parsed(text)
    if value == 0:
        raise ValueError("a coefficient is zero")
    return value


def _basis(name: str) -> int | Row:
    row = _ROW.fullmatch(name)
    if row:
        return Row("Y", int(row[1]), int(row[2]))
    if not _COORDINATE.fullmatch(name):
        raise ValueError(f"a coefficient is called {name!r}")
    return int(name)


def _ledger(contents: Any) -> Ledger:
    _check_keys("the ledger", contents, {"blocks", "holds", "entries"})
    return Ledger(tuple(map(_entry, _list("the entries", contents["entries"]))))


def _entry(contents: Any) -> Entry:
    _check_keys("an entry", contents, _ENTRY_KEYS)
    phase, blocks, hypotheses, inequality = (contents[name] for name in ("phase", "blocks", "hypotheses", "inequality"))
    if type(blocks) is not int or not all(isinstance(text, str) for text in (phase, hypotheses, inequality)):
        raise TypeError(f"the entry of phase {phase!r} has {blocks!r} blocks")
    sides = (None if contents[name] is None else fraction(parsed(contents[name])) for name in ("smaller", "larger"))
    constants = {name: _constant(value) for name, value in contents["constants"].items()}
    return Entry(phase, blocks, hypotheses, constants, inequality, *sides)


def _constant(value: Any) -> Fraction | int | str:
    if type(value) is int:
        return value
    try:
        return fraction(parsed(value))
    except ValueError:
        return value


def _positive(name: str, text: Any) -> Fraction:
    value = fraction(parsed(text))
    if value <= 0:
        raise ValueError(f"{name} is {text}")
    return value


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{name} are no list but {type(value).__name__}")
    return value


def _check_keys(name: str, value: Any, keys: set[str]) -> None:
    if not isinstance(value, dict) or set(value) != keys:
        received = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"{name} should have the keys {sorted(keys)}, and has {received}")


def _refused(name: str) -> Any:
    raise ValueError(f"a number is {name}")
