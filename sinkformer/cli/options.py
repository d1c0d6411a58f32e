"""Options shared by the verbs. A value of None means: the default of ``sinkformer.text.Aligner``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_MODEL = "Model"
_HOW = "Coupling"

Model = Annotated[
    str | None,
    typer.Option(
        help="'en' (packaged English model), a folder, or a Hugging Face name. Default: en.",
        rich_help_panel=_MODEL,
    ),
]
Layer = Annotated[
    int | None,
    typer.Option(
        help="Hidden layer of the model. Default: 3 for 'en', 0.6 of the depth for others.",
        rich_help_panel=_MODEL,
    ),
]
Device = Annotated[
    str | None, typer.Option(help="Torch device, such as cpu or cuda. Default: cpu.", rich_help_panel=_MODEL)
]
Epsilon = Annotated[
    float | None, typer.Option(help="Strength of the entropy, > 0. Default: 0.1.", rich_help_panel=_HOW)
]
NullPrice = Annotated[
    float | None,
    typer.Option(help="Cost of leaving one word alone, > 0. Default: 0.5.", rich_help_panel=_HOW),
]
Threshold = Annotated[
    float | None,
    typer.Option(help="Least confidence of a link, in (0, 1]. Default: 0.25.", rich_help_panel=_HOW),
]
Distortion = Annotated[
    float | None,
    typer.Option(
        help="Cost of a change of place; 0 for free word order. Default: 0.2.", rich_help_panel=_HOW
    ),
]
NoNull = Annotated[
    bool,
    typer.Option(
        "--no-null", help="Every word has to go somewhere; none may stay alone.", rich_help_panel=_HOW
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with code 3 if a coupling has not converged.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No warnings and no progress bar; errors are still shown.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
OutputFile = Path | None


def aligner_options(**given: Any) -> dict[str, Any]:
    """Arguments for ``Aligner``: the options that were given, and ``null`` from ``no_null``."""
    if given.pop("no_null"):
        given["null"] = False
    return {name: value for name, value in given.items() if value is not None}
