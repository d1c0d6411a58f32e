"""Couplings as files: ``.jsonl`` with one coupling on each line, or ``.npz`` with all of them in five arrays.

=====================  ===========  ======================================================================
key                    shape        meaning
=====================  ===========  ======================================================================
``source``             ``(n, d)``   source points
``target``             ``(m, d')``  target points
``plan``               ``(n, m)``   masses; non-negative
``source_weights``     ``(n,)``     optional: what the rows should sum to. Default: what they sum to
``target_weights``     ``(m,)``     optional: what the columns should sum to. Default: what they sum to
``dtype``              string       ``.jsonl`` only, optional: ``"float32"``, or ``"float64"``, the default
=====================  ===========  ======================================================================

In ``.jsonl`` the arrays are nested lists, rows first. In ``.npz`` they may have one leading axis more, for many couplings;
shorter ones are padded with atoms of weight zero, and the dtype is that of ``plan``. Nothing is unpickled or renormalised.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from struct import error as StructError
from typing import Any, NoReturn
from zipfile import BadZipFile
from zlib import error as ZlibError

import numpy as np
import torch

from sinkformer.couplings import Coupling, DenseCoupling
from sinkformer.errors import ConfigError, DTypeError, FormatError, ShapeError, SinkformerError
from sinkformer.evaluation.comparing import singles
from sinkformer.measures import Measure

_NEEDED, _OPTIONAL = ("source", "target", "plan"), ("source_weights", "target_weights")
# Kinds of numpy's dtypes.
_NUMBERS = "fiu"
# What zipfile, zlib and numpy raise where an archive is damaged.
_DAMAGES = (
    ValueError,
    BadZipFile,
    ZlibError,
    EOFError,
    AttributeError,
    LookupError,
    TypeError,
    ArithmeticError,
    SyntaxError,
    StructError,
    NotImplementedError,
    MemoryError,
    RuntimeError,
    OSError,
)
_DTYPES = {"float32": np.float32, "float64": np.float64}


def save_couplings(path: str | Path, couplings: Coupling | Iterable[Coupling]) -> None:
    """Write couplings to a file; see the module for its format.

    Args:
        path: ends in ``.npz`` or ``.jsonl``.
        couplings: a coupling or a batch of them, or several of these. Half precision is written as float32, its weights
            divided by their sum.

    Raises:
        ConfigError: another ending.
        DTypeError: no path, or no couplings.
        ShapeError: no coupling; in ``.npz`` also points of several dimensions, or two dtypes.
    """
    ending = check_ending(path)
    records = [_record(single.detach()) for single in singles(couplings)]
    if not records:
        raise ShapeError("expected at least one coupling to write, received none")
    if ending == ".npz":
        # Opened here: numpy would add its own ending to another spelling of it.
        with Path(path).open("wb") as archive:
            np.savez(archive, **_stacked(records))  # pyright: ignore[reportArgumentType]
        return
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        for record in records:
            line = {key: value.tolist() for key, value in record.items()}
            file.write(json.dumps({"dtype": str(record["plan"].dtype), **line}) + "\n")


def load_couplings(path: str | Path) -> list[DenseCoupling]:
    """Read couplings from a file; see the module for its format.

    Args:
        path: ends in ``.npz`` or ``.jsonl``.

    Returns:
        Single couplings, in the order of the file. Their marginals are their own: ``marginal_error()`` says how far they are
        from the weights in the file.

    Raises:
        ConfigError: another ending.
        DTypeError: no path.
        FormatError: a file that does not follow the format; names the line or the coupling, and the key.
        OSError: a file that cannot be read.
    """
    read = _read_npz if check_ending(path) == ".npz" else _read_jsonl
    couplings = list(read(Path(path)))
    if not couplings:
        raise FormatError(f"{path}: expected at least one coupling, received an empty file")
    return couplings


def check_ending(path: str | Path) -> str:
    """The ending of a file of couplings; raises ConfigError if it is another one, DTypeError if this is no path."""
    if not isinstance(path, (str, Path)):
        raise DTypeError(f"expected the path of a file of couplings, received {type(path).__name__}")
    ending = Path(path).suffix.lower()
    if ending not in (".npz", ".jsonl"):
        raise ConfigError(f"expected a file of couplings ending in .npz or .jsonl, received {str(path)!r}")
    return ending


# Writing -----------------------------------------------------------------------------------------------------------------


def _record(pi: Coupling) -> dict[str, np.ndarray]:
    dtype = torch.float64 if pi.dtype == torch.float64 else torch.float32
    values = {
        "source": pi.source.points,
        "target": pi.target.points,
        "plan": pi.to_dense(),
        "source_weights": pi.source.weights,
        "target_weights": pi.target.weights,
    }
    record = {key: value.to("cpu", dtype).numpy() for key, value in values.items()}
    if pi.dtype not in (torch.float32, torch.float64):
        for key in _OPTIONAL:
            # Summed in float64: what sums to one in half precision may not in float32.
            wide = record[key].astype(np.float64)
            record[key] = (wide / wide.sum()).astype(np.float32)
    return record


def _stacked(records: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """One array for each key, padded with zeros along the atoms."""
    kinds = {(r["source"].shape[1], r["target"].shape[1], str(r["plan"].dtype)) for r in records}
    if len(kinds) > 1:
        raise ShapeError(
            f"expected couplings of one (d, d', dtype) for .npz, received {sorted(kinds)}; write a .jsonl file instead"
        )
    n, m = (max(r["plan"].shape[axis] for r in records) for axis in (0, 1))
    lengths = {"source": (n, None), "target": (m, None), "plan": (n, m), "source_weights": (n,), "target_weights": (m,)}

    def padded(value: np.ndarray, key: str) -> np.ndarray:
        wanted = zip(lengths[key], value.shape, strict=True)
        return np.pad(value, [(0, (size or own) - own) for size, own in wanted])

    return {key: np.stack([padded(r[key], key) for r in records]) for key in lengths}


# Reading -----------------------------------------------------------------------------------------------------------------


def _read_jsonl(path: Path) -> Iterator[DenseCoupling]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            where = f"{path}, line {number}"
            values = _object(raw, where)
            dtype = values.pop("dtype", "float64")
            if not isinstance(dtype, str) or dtype not in _DTYPES:
                raise FormatError(f"{where}, key 'dtype': expected one of {', '.join(_DTYPES)}, received {dtype!r}")
            _check_keys(values, where)
            yield _coupling(
                {key: _array(value, f"{where}, key {key!r}") for key, value in values.items()}, dtype, where
            )


def _object(raw: bytes, where: str) -> dict[str, Any]:
    def constant(name: str) -> NoReturn:
        raise FormatError(f"{where}: expected finite numbers, received {name}")

    def unique(items: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(items)
        if len(values) < len(items):
            twice = next(key for k, (key, _) in enumerate(items) if key in dict(items[:k]))
            raise FormatError(f"{where}, key {twice!r}: expected every key once, received it twice")
        return values

    try:
        value = json.loads(raw.decode("utf-8-sig"), parse_constant=constant, object_pairs_hook=unique)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or more digits than Python reads
        raise FormatError(f"{where}: expected a JSON object, received something else: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{where}: expected a JSON object, received a JSON {type(value).__name__}")
    return value


def _array(value: Any, where: str) -> np.ndarray:
    try:
        array, parts = np.array(value), np.array(value, dtype=object)
    except ValueError:
        raise FormatError(f"{where}: expected rows of one length, received lists of several lengths") from None
    if array.dtype.kind not in _NUMBERS and array.size:
        raise FormatError(f"{where}: expected numbers, received {array.dtype.name} values")
    if any(isinstance(part, bool) for part in parts.flat):
        raise FormatError(f"{where}: expected numbers, received bool values among them")
    return array


def _read_npz(path: Path) -> Iterator[DenseCoupling]:
    with path.open("rb") as file:
        try:
            archive = np.load(file, allow_pickle=False)
            arrays = {key: archive[key] for key in archive.files}
        except _DAMAGES as error:
            raise FormatError(f"{path}: expected a readable .npz file of plain numbers: {error}") from None
    _check_keys(arrays, str(path))
    for key, array in arrays.items():
        # A member that is no .npy file comes as bytes.
        if not isinstance(array, np.ndarray):
            raise FormatError(f"{path}, key {key!r}: expected an array, received another kind of file")
        if array.dtype.kind not in _NUMBERS:
            raise FormatError(f"{path}, key {key!r}: expected numbers, received dtype {array.dtype}")
    dtype = "float32" if arrays["plan"].dtype in (np.float32, np.float16) else "float64"
    if arrays["plan"].ndim != 3:
        yield _coupling(arrays, dtype, str(path))
        return
    count = len(arrays["plan"])
    for key, array in arrays.items():
        if not array.ndim or len(array) != count:
            raise FormatError(f"{path}, key {key!r}: expected {count} couplings as in 'plan', received {array.shape}")
    for k in range(count):
        yield _coupling({key: array[k] for key, array in arrays.items()}, dtype, f"{path}, coupling {k}")


def _check_keys(values: dict[str, Any], where: str) -> None:
    for key in _NEEDED:
        if key not in values:
            raise FormatError(f"{where}, key {key!r}: expected it, but it is missing")
    for key in values:
        if key not in _NEEDED + _OPTIONAL:
            raise FormatError(f"{where}, key {key!r}: expected the keys {', '.join(_NEEDED + _OPTIONAL)} only")


def _coupling(values: dict[str, np.ndarray], dtype: str, where: str) -> DenseCoupling:
    """A coupling from arrays; every error names the key."""
    for key in ("source", "target"):
        if values[key].ndim != 2 or 0 in values[key].shape:
            raise FormatError(
                f"{where}, key {key!r}: expected points of shape (atoms, d), received {values[key].shape}"
            )
    n, m = len(values["source"]), len(values["target"])
    for key, shape in (("plan", (n, m)), ("source_weights", (n,)), ("target_weights", (m,))):
        if key in values and values[key].shape != shape:
            raise FormatError(
                f"{where}, key {key!r}: expected shape {shape} for {n} source and {m} target points, "
                f"received {values[key].shape}"
            )
    with np.errstate(over="ignore"):  # an infinity is an error below
        cast = {key: torch.from_numpy(value.astype(_DTYPES[dtype])) for key, value in values.items()}
    plan = cast["plan"]
    for key, value in cast.items():
        if not bool(torch.isfinite(value).all()):
            raise FormatError(f"{where}, key {key!r}: expected finite numbers, received a NaN or an infinity")
        if key not in ("source", "target") and bool((value < 0).any()):
            raise FormatError(f"{where}, key {key!r}: expected masses >= 0, received {value.min().item():.6g}")
    sides = []
    for key, weights, axis in (("source", "source_weights", -1), ("target", "target_weights", -2)):
        named = weights if weights in cast else "plan"
        try:
            sides.append(Measure(cast[key], cast.get(weights, plan.sum(axis))))
        except SinkformerError as error:
            raise FormatError(f"{where}, key {named!r}: {error}") from None
    return Coupling.from_dense(sides[0], sides[1], plan)
