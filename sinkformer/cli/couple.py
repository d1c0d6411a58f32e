"""``sinkformer couple``: the coupling of two texts."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from sinkformer.cli import options as o
from sinkformer.cli.session import NOT_CONVERGED, check_writable, open_input, session, usage
from sinkformer.cli.tables import print_alignment
from sinkformer.errors import TextError
from sinkformer.plots import check_format
from sinkformer.text import Aligner
from sinkformer.text.formats import format_jsonl


class Format(str, Enum):
    """What goes to stdout."""

    text = "text"
    pharaoh = "pharaoh"
    jsonl = "jsonl"


def couple(
    text_a: Annotated[str, typer.Argument(metavar="TEXT_A", help="First text.", show_default=False)],
    text_b: Annotated[str, typer.Argument(metavar="TEXT_B", help="Second text.", show_default=False)],
    files: Annotated[
        bool, typer.Option("--files", help="TEXT_A and TEXT_B are files (UTF-8); '-' is stdin.")
    ] = False,
    tokenized: Annotated[
        bool, typer.Option("--tokenized", help="The words are separated by blanks already.")
    ] = False,
    format: Annotated[Format, typer.Option("--format", help="A table, links, or a JSON line.")] = Format.text,
    plot: Annotated[
        Path | None, typer.Option(help="Write a picture (.png, .svg, .pdf).", metavar="FILE")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with the heat map.", metavar="FILE")] = None,
    model: o.Model = None,
    layer: o.Layer = None,
    device: o.Device = None,
    epsilon: o.Epsilon = None,
    null_price: o.NullPrice = None,
    threshold: o.Threshold = None,
    distortion: o.Distortion = None,
    no_null: o.NoNull = False,
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
        check_writable(html)
        check_writable(plot)
        if plot is not None:
            check_format(plot)
        a, b = (_read(text) if files else text for text in (text_a, text_b))
        aligner = Aligner(
            **o.aligner_options(
                model=model,
                layer=layer,
                device=device,
                epsilon=epsilon,
                null_price=null_price,
                threshold=threshold,
                distortion=distortion,
                no_null=no_null,
            )
        )
        result = aligner(a.split(), b.split()) if tokenized else aligner(a, b)
        if format is Format.text:
            print_alignment(result)
        else:
            print(result if format is Format.pharaoh else format_jsonl(result))
        if html is not None:
            result.to_html(html)
        if plot is not None:
            result.plot(plot)
    if strict and not result.converged:
        raise typer.Exit(NOT_CONVERGED)


def _read(path: str) -> str:
    with open_input(path) as file:
        raw = file.read()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise TextError(
            f"{path}, line {line}: not UTF-8 (byte 0x{raw[error.start]:02x}); convert the file to UTF-8"
        ) from None
