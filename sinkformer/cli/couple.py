"""``sinkformer couple``: the coupling of two texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sinkformer.cli import options as o
from sinkformer.cli.session import NOT_CONVERGED, check_writable, same_place, session, usage
from sinkformer.cli.streams import read_text
from sinkformer.cli.tables import print_alignment
from sinkformer.plots import check_format
from sinkformer.text import Aligner
from sinkformer.text.formats import format_jsonl


def couple(
    text_a: Annotated[str, typer.Argument(metavar="TEXT_A", help="First text.", show_default=False)],
    text_b: Annotated[str, typer.Argument(metavar="TEXT_B", help="Second text.", show_default=False)],
    files: Annotated[bool, typer.Option("--files", help="TEXT_A and TEXT_B are files (UTF-8); '-' is stdin.")] = False,
    tokenized: Annotated[bool, typer.Option("--tokenized", help="The words are separated by blanks already.")] = False,
    format: Annotated[o.TextFormat, typer.Option(help="A table, links, or a JSON line.")] = o.TextFormat.text,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (.png, .svg, .pdf).", metavar="FILE")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with the heat map.", metavar="FILE")] = None,
    model: o.Model = None,
    layer: o.Layer = None,
    device: o.Device = None,
    epsilon: o.Epsilon = None,
    null_price: o.NullPrice = None,
    threshold: o.Threshold = None,
    distortion: o.Distortion = None,
    method: o.Method = None,
    strict: o.Strict = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Couple two texts: which words belong together, how surely, and which stay alone.

    Example: sinkformer couple "the cat sat on the mat" "a feline rested on the rug"
    """
    if files and text_a == text_b == "-":
        raise usage("only one of the two files can be stdin ('-')")
    with session(quiet=quiet, debug=debug):
        inputs = [text_a, text_b] if files else []
        check_writable(html, inputs=inputs)
        check_writable(plot, inputs=inputs)
        if html is not None and plot is not None and same_place(html, plot):
            raise usage("--html and --plot name the same file; give each its own")
        if plot is not None:
            check_format(plot)
        a, b = (read_text(text) if files else text for text in (text_a, text_b))
        given = o.given_options(model, layer, device, epsilon, null_price, threshold, distortion, method)
        aligner = Aligner(**given)
        result = aligner(a.split(), b.split()) if tokenized else aligner(a, b)
        if format is o.TextFormat.text:
            print_alignment(result)
        else:
            print(result if format is o.TextFormat.pharaoh else format_jsonl(result))
        if html is not None:
            result.to_html(html)
        if plot is not None:
            result.plot(plot)
    if strict and not result.converged:
        raise typer.Exit(NOT_CONVERGED)
