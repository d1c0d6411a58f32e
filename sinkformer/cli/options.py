"""Options shared by the verbs. A value of None means: the default of ``sinkformer.text.Aligner``."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import typer

from sinkformer.text.methods import METHODS

_MODEL = "Model"
_HOW = "Coupling"

Model = Annotated[
    str | None,
    typer.Option(
        help="'en' (packaged English model and aligner), 'multi', a folder of a model or of an aligner, or a Hugging Face name. "
        "Default: en.",
        rich_help_panel=_MODEL,
    ),
]
Layer = Annotated[
    int | None,
    typer.Option(
        help="Hidden layer of the model. Default: 3 for 'en', 7 for 'multi', 0.6 of the depth for others.",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[
    str | None, typer.Option(help="Torch device: cpu, cuda or mps. Default: cpu.", rich_help_panel=_MODEL)
]
Epsilon = Annotated[
    float | None,
    typer.Option(
        help="Strength of the entropy, in [1e-6, 1e6]; of partial, balanced and unbalanced. Default: 0.05.",
        rich_help_panel=_HOW,
    ),
]
NullPrice = Annotated[
    float | None,
    typer.Option(help="Cost of leaving one word alone, in (0, 1e6]. Default: 0.4.", rich_help_panel=_HOW),
]
Threshold = Annotated[
    float | None,
    typer.Option(
        help="Least confidence of a link, in (0, 1]; not of argmax and itermax. Of partial, balanced and unbalanced all copies "
        "of a word count together in the one-to-one matching. Default: 0.3. Of an aligner: its own.",
        rich_help_panel=_HOW,
    ),
]
Distortion = Annotated[
    float | None,
    typer.Option(
        help="Cost of a change of place, in [0, 1e6]; 0 for free word order. Default: 0.2.", rich_help_panel=_HOW
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        help=f"How links are found: trained, {', '.join(METHODS)}. Default: trained for 'en' and for aligners, else partial.",
        rich_help_panel=_HOW,
        metavar="NAME",
    ),
]
Workers = Annotated[
    int,
    typer.Option(min=1, help="Processes that share the work; more than one needs the extra [ray].", metavar="N"),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on where an earlier run with --resume was stopped; needs --output."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with code 3 if a coupling has not converged.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No warnings and no progress bar; errors are still shown.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


class TextFormat(str, Enum):
    """What ``couple`` writes to stdout."""

    text = "text"
    pharaoh = "pharaoh"
    jsonl = "jsonl"


class LineFormat(str, Enum):
    """What a line written by ``align`` holds."""

    pharaoh = "pharaoh"
    jsonl = "jsonl"


class ReportFormat(str, Enum):
    """How ``info`` writes its report."""

    text = "text"
    jsonl = "jsonl"


def given_options(
    model: str | None,
    layer: int | None,
    device: str | None,
    epsilon: float | None,
    null_price: float | None,
    threshold: float | None,
    distortion: float | None,
    method: str | None,
) -> dict[str, Any]:
    """The options of ``Aligner`` that were given."""
    given: dict[str, Any] = {
        "model": model,
        "layer": layer,
        "device": device,
        "epsilon": epsilon,
        "null_price": null_price,
        "threshold": threshold,
        "distortion": distortion,
        "method": method,
    }
    return {name: value for name, value in given.items() if value is not None}
