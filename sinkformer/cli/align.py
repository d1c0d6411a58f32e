"""``sinkformer align``: a file of pairs in, a line of links out for each."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from sinkformer.cli import options as o
from sinkformer.cli.session import NOT_CONVERGED, check_writable, say, session, usage
from sinkformer.cli.streams import opened_pairs, output_stream, progress
from sinkformer.text import Aligner, BadLine
from sinkformer.text.formats import format_jsonl


class Format(str, Enum):
    """What an output line holds."""

    pharaoh = "pharaoh"
    jsonl = "jsonl"


def align(
    pairs: Annotated[
        str | None,
        typer.Argument(
            metavar="[PAIRS]", help="'source ||| target' or TAB lines; '-' is stdin.", show_default=False
        ),
    ] = None,
    src: Annotated[
        Path | None, typer.Option(help="File of source texts, instead of PAIRS.", metavar="FILE")
    ] = None,
    tgt: Annotated[
        Path | None, typer.Option(help="File of target texts, line by line with --src.", metavar="FILE")
    ] = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Lines are plain text, to be split into words (default: words are "
            "separated by blanks, and links count those).",
        ),
    ] = False,
    format: Annotated[
        Format, typer.Option("--format", help="Links (0-0 1-2), or a JSON line.")
    ] = Format.pharaoh,
    ids: Annotated[
        bool, typer.Option("--ids", help="Put the line number and a tab before the links.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write here, not to stdout.", metavar="FILE")
    ] = None,
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
    """Align a file of pairs. One output line for every input line, whatever it holds.

    Example: sinkformer align pairs.txt > links.pharaoh
    """
    if (pairs is None) == (src is None and tgt is None) or (src is None) != (tgt is None):
        raise usage("give either PAIRS, or both --src and --tgt")
    if ids and format is Format.jsonl:
        raise usage("--ids belongs to --format pharaoh; JSON lines carry their id anyway")
    counts: Counter[str] = Counter()
    with session(quiet=quiet, debug=debug):
        check_writable(output)
        with opened_pairs(pairs, src, tgt, tokenized=not raw) as (items, total):
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
            with output_stream(output) as out, progress(total, quiet) as advance:
                for number, result in enumerate(aligner.align(items), 1):
                    bad = isinstance(result, BadLine)
                    if bad and not quiet and counts["bad"] < 5:
                        say(f"warning: {result}")
                    counts["bad"] += bad
                    counts["empty"] += not bad and not (len(result.source) and len(result.target))
                    counts["not converged"] += not bad and not result.converged
                    if format is Format.jsonl:
                        line = format_jsonl(result, number)
                    else:
                        line = f"{number}\t" * ids + ("" if bad else str(result))
                    out.write(line + "\n")
                    advance()
        if counts["bad"] and not quiet:
            say(
                f"warning: {counts['bad']} lines could not be used; each has an empty line, or an error, in the output"
            )
        if counts["empty"] and not quiet:
            say(f"warning: {counts['empty']} pairs have an empty side; their lines are empty")
    if strict and counts["not converged"]:
        raise typer.Exit(NOT_CONVERGED)
