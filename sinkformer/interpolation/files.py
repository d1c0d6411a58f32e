"""A constructed network as JSON: the data, the exact blocks, the ledger."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkformer.errors import ModelError
from sinkformer.interpolation.blocks import Block
from sinkformer.interpolation.datasets import SequencePairs, Tokens
from sinkformer.interpolation.ledger import Entry, Ledger
from sinkformer.interpolation.rationals import fraction, rational
from sinkformer.interpolation.vectors import Row

if TYPE_CHECKING:
    from sinkformer.interpolation.rationals import Rational

CERTIFICATE = "certificate.json"
_VERSION = 1
_KEYS = {"format_version", "data", "kind", "tau", "tau_star", "method", "blocks", "ledger", "verdict", "export"}
_NUMBERS = ("eta", "rho", "beta", "alpha")


def write(folder: Path, contents: Mapping[str, Any]) -> None:
    """Write the certificate into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format_version": _VERSION, **contents}, indent=1)
    (folder / CERTIFICATE).write_text(text + "\n", encoding="utf-8")


def read(folder: Path) -> dict[str, Any]:
    """Read it.

    Raises:
        ModelError: no file, a damaged one, or one of another version.
    """
    path = folder / CERTIFICATE
    if not path.is_file():
        raise ModelError(f"expected the file {CERTIFICATE} in {folder}; write the folder with save")
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"expected a readable certificate in {folder}; the file is damaged: {error}") from error
    if not isinstance(contents, dict) or contents.get("format_version") != _VERSION or set(contents) != _KEYS:
        raise ModelError(
            f"expected a certificate of format_version {_VERSION} with the keys {', '.join(sorted(_KEYS))} in {folder}; "
            "write it again with this release"
        )
    return contents


def data_to_json(pairs: SequencePairs) -> dict[str, Any]:
    """Floats as numbers, which JSON keeps to the last bit, other fractions as ``"p/q"``."""
    return {name: list(map(_rows, side)) for name, side in (("X", pairs.X), ("Y", pairs.Y))}


def block_to_json(block: Block) -> dict[str, Any]:
    """A block in its compact form: coefficients by coordinate, and by target token as ``"Y:sequence:token"``."""
    return {
        "phase": block.phase,
        **{name: str(fraction(getattr(block, name))) for name in _NUMBERS},
        "functional": _coefficients(block.functional),
        "biases": [str(fraction(bias)) for bias in block.biases],
        "columns": list(map(_coefficients, block.columns)),
        "p": _coefficients(block.p),
        "q": _coefficients(block.q),
        "causal": block.causal,
    }


def block_from_json(contents: Mapping[str, Any]) -> Block:
    """What ``block_to_json`` wrote.

    Raises:
        ModelError: anything else.
    """
    try:
        return Block(
            contents["phase"],
            functional=_vector(contents["functional"]),  # type: ignore[arg-type]
            biases=tuple(map(_number, contents["biases"])),
            columns=tuple(map(_vector, contents["columns"])),
            p=_vector(contents["p"]),  # type: ignore[arg-type]
            q=_vector(contents["q"]),  # type: ignore[arg-type]
            causal=_flag(contents["causal"]),
            **{name: _number(contents[name]) for name in _NUMBERS},
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(
            f"expected a block of a certificate, received a damaged one: {error!r}; save it again"
        ) from error


def ledger_from_json(contents: Mapping[str, Any]) -> Ledger:
    """What ``Ledger.to_dict`` says.

    Raises:
        ModelError: anything else.
    """
    try:
        return Ledger(tuple(map(_entry, contents["entries"])))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"expected a ledger of a certificate, received a damaged one: {error!r}; save it again"
        ) from error


def _rows(tokens: Tokens) -> list[list[Any]]:
    if tokens.fractions is None:
        return tokens.floats.tolist()
    return [list(map(str, row)) for row in tokens.fractions]


def _coefficients(vector: Mapping[Any, Rational]) -> dict[str, str]:
    return {_name(basis): str(fraction(value)) for basis, value in vector.items()}


def _name(basis: int | Row) -> str:
    return f"{basis.side}:{basis.sequence}:{basis.token}" if isinstance(basis, Row) else str(basis)


def _number(text: str) -> Rational:
    return rational(Fraction(text))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _vector(contents: Mapping[str, str]) -> dict[int | Row, Rational]:
    return {_basis(name): _number(value) for name, value in contents.items()}


def _basis(name: str) -> int | Row:
    side, _, place = name.partition(":")
    if not place:
        return int(side)
    sequence, _, token = place.partition(":")
    return Row(side, int(sequence), int(token))


def _entry(contents: Mapping[str, Any]) -> Entry:
    sides = (None if contents[name] is None else Fraction(contents[name]) for name in ("smaller", "larger"))
    return Entry(
        contents["phase"],
        contents["blocks"],
        contents["hypotheses"],
        {name: _constant(value) for name, value in contents["constants"].items()},
        contents["inequality"],
        *sides,
    )


def _constant(value: int | str) -> Fraction | int | str:
    if isinstance(value, int):
        return value
    try:
        return Fraction(value)
    except ValueError:
        return value
