"""Options of ``interpolate`` alone."""

from __future__ import annotations

from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer

from sinkformer.errors import ConfigError, DTypeError
from sinkformer.interpolation.datasets import number

_NETWORK, _OUTPUT = "Network", "Output"


class Dtype(str, Enum):
    """Format of the weights that are saved."""

    float64 = "float64"
    float32 = "float32"


Data = Annotated[
    str, typer.Argument(metavar="DATA", help='{"X": ..., "Y": ...}, or lines {"x": ..., "y": ...}; - is stdin.')
]
Attention = Annotated[str, typer.Option(help="hardmax or softmax.", rich_help_panel=_NETWORK)]
Method = Annotated[str, typer.Option(help="auto, paper, direct, two-pass or knots.", rich_help_panel=_NETWORK)]
Request = Annotated[
    str, typer.Option(help="What auto is for: for_float, for_float32 or for_exact.", rich_help_panel=_NETWORK)
]
Statistic = Annotated[
    str, typer.Option(help="Separates the sequences: mean, or max (paper, hardmax).", rich_help_panel=_NETWORK)
]
Tau = Annotated[
    str | None,
    typer.Option(
        metavar="T",
        help="Temperature of the softmax, such as 0.5 or 1/3. Default: tau*, or 1 where any will do.",
        rich_help_panel=_NETWORK,
    ),
]
Seed = Annotated[
    int, typer.Option(min=0, help="Of the functional that tells the tokens apart.", rich_help_panel=_NETWORK)
]
Check = Annotated[bool, typer.Option("--check", help="Prove it in exact arithmetic, or exit with code 1.")]
Save = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Write model and certificate.", rich_help_panel=_OUTPUT)
]
SavedDtype = Annotated[
    Dtype | None, typer.Option("--dtype", help="Of the saved weights. Default: float64.", rich_help_panel=_OUTPUT)
]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the phases (.png, .svg, .pdf, .gif).", rich_help_panel=_OUTPUT),
]
Json = Annotated[bool, typer.Option("--json", help="Everything as one JSON line.", rich_help_panel=_OUTPUT)]


def temperature(text: str | None) -> Fraction | None:
    """The number that ``--tau`` spells.

    Raises:
        ConfigError: it spells none.
    """
    try:
        return None if text is None else number(text)
    except DTypeError:
        raise ConfigError(f"expected --tau as a number, such as 0.5 or 1/3, received {text!r}") from None
