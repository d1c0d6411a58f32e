"""``sinkformer distance``: how far apart two texts are, and why."""

from __future__ import annotations

from json import dumps
from typing import Annotated

import typer

from sinkformer.cli import options as o
from sinkformer.cli.distance_tables import print_explanation
from sinkformer.cli.session import session, usage
from sinkformer.cli.streams import read_text
from sinkformer.text import Aligner
from sinkformer.text.distances import explain

Rows = Annotated[
    int, typer.Option(min=0, metavar="N", help="Rows of the explanation, those with the largest parts; 0: all.")
]


def distance(
    text_a: Annotated[str, typer.Argument(metavar="TEXT_A", help="First text.", show_default=False)],
    text_b: Annotated[str, typer.Argument(metavar="TEXT_B", help="Second text.", show_default=False)],
    files: Annotated[bool, typer.Option("--files", help="TEXT_A and TEXT_B are files (UTF-8); '-' is stdin.")] = False,
    tokenized: Annotated[bool, typer.Option("--tokenized", help="The words are separated by blanks already.")] = False,
    rows: Rows = 20,
    format: Annotated[o.ReportFormat, typer.Option(help="A table, or a JSON line with everything.")] = (
        o.ReportFormat.text
    ),
    model: o.Model = None,
    layer: o.Layer = None,
    device: o.Device = None,
    null_price: o.NullPrice = None,
    distortion: o.Distortion = None,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Measure how far apart two texts are, and say which words carry the distance.

    0 for identical texts. The similarity is 1 for identical texts and about 0 for unrelated ones.

    Example: sinkformer distance "the cat sat on the mat" "a feline rested on the rug"
    """
    if files and text_a == text_b == "-":
        raise usage("only one of the two files can be stdin ('-')")
    with session(quiet=quiet, debug=debug):
        a, b = (read_text(text) if files else text for text in (text_a, text_b))
        aligner = measuring_aligner(
            model=model, layer=layer, device=device, null_price=null_price, distortion=distortion
        )
        found = explain(aligner, a.split(), b.split()) if tokenized else explain(aligner, a, b)
        if format is o.ReportFormat.jsonl:
            print(dumps(found.to_dict(), ensure_ascii=False, allow_nan=False))
        else:
            print_explanation(found, rows)


def measuring_aligner(**options: object) -> Aligner:
    """An aligner for distances, which need no links: the options that are given, and the defaults of all others."""
    given: dict = {name: value for name, value in options.items() if value is not None}
    return Aligner(method="partial", **given)
