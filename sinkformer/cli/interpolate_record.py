"""What ``interpolate`` says in JSON, and where it may write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sinkformer.cli.interpolate_options import Dtype
from sinkformer.cli.session import check_writable, usage
from sinkformer.interpolation import Export, Interpolant, Verdict, theorem_blocks, theorem_parameters
from sinkformer.interpolation.rationals import spelled
from sinkformer.plots import check_format

_WRITTEN = ("model.safetensors", "config.json", "certificate.json")


def record(built: Interpolant, verdict: Verdict | None, folder: Path | None, export: Export | None) -> dict[str, Any]:
    """Everything; fractions as ``"p/q"``, None for what was not asked for, and for a predicted error without bound."""
    data, kind = built.pairs, built.kind
    theorem = theorem_blocks(N=data.N, K=data.K, kind=kind), theorem_parameters(d=data.d, N=data.N, K=data.K, kind=kind)
    found: dict[str, Any] = {
        "pairs": {name: getattr(data, name) for name in ("N", "n", "m", "d", "K", "M")},
        "method": built.method,
        "attention": kind,
        "tau": spelled(built.tau),
        "tau_star": None if built.tau_star is None else spelled(built.tau_star),
        "blocks": built.L,
        "width": built.width,
        "parameters": built.parameters,
        "theorem": dict(zip(("blocks", "parameters"), theorem, strict=True)),
        "ledger": built.ledger.to_dict(),
        "verdict": None,
        "export": None,
    }
    if verdict is not None:
        found["verdict"] = verdict.to_dict()
    if export is not None:
        found["export"] = {"folder": str(folder), **export.to_dict()}
    return found


def check_outputs(data: str, save: Path | None, dtype: Dtype | None, plot: Path | None) -> None:
    """Raise unless all that is to be written can be written later.

    Raises:
        BadParameter: a format of weights that nobody asked to save.
        OSError: a folder or a file that cannot be written, or is the input.
        ConfigError: a picture of no known format.
    """
    if dtype is not None and save is None:
        raise usage("--dtype belongs to --save")
    check_writable(plot, inputs=[data])
    if plot is not None and plot.suffix.lower() != ".gif":
        check_format(plot)
    if save is None or not save.exists():
        return
    if not save.is_dir():
        raise NotADirectoryError(20, "is a file; name a folder to write", str(save))
    for name in _WRITTEN:
        check_writable(save / name, inputs=[data])
