"""``sinkformer align``: a file of pairs in, a line of links out for each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from sinkformer.cli import options as o
from sinkformer.cli.session import NOT_CONVERGED, check_writable, session, usage
from sinkformer.cli.streams import Report, opened_pairs, output_stream, progress
from sinkformer.text.formats import format_jsonl

_PAIRS = "'source ||| target' or TAB lines; '-' is stdin."
_RAW = "Lines are plain text, to be split into words (default: words are separated by blanks, and links count those)."


def align(
    pairs: Annotated[str | None, typer.Argument(metavar="PAIRS", help=_PAIRS, show_default=False)] = None,
    src: Annotated[Path | None, typer.Option(help="File of source texts, instead of PAIRS.", metavar="FILE")] = None,
    tgt: Annotated[
        Path | None, typer.Option(help="File of target texts, line by line with --src.", metavar="FILE")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help=_RAW)] = False,
    format: Annotated[o.LineFormat, typer.Option(help="Links (0-0 1-2), or a JSON line.")] = o.LineFormat.pharaoh,
    ids: Annotated[bool, typer.Option("--ids", help="Put the line number and a tab before the links.")] = False,
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
    if ids and format is o.LineFormat.jsonl:
        raise usage("--ids belongs to --format pharaoh; JSON lines carry their id anyway")
    report = Report(quiet, Counter())
    with session(quiet=quiet, debug=debug, stdout=output is None):
        check_writable(output, inputs=[path for path in (pairs, src, tgt) if path is not None])
        with opened_pairs(pairs, src, tgt, tokenized=not raw) as (items, total):
            aligner = o.build_aligner(model, layer, device, epsilon, null_price, threshold, distortion, no_null)
            with output_stream(output) as out, progress(total, quiet) as advance:
                for number, result in enumerate(aligner.align(items), 1):
                    usable = report.note(result)
                    if format is o.LineFormat.jsonl:
                        line = format_jsonl(result, number)
                    else:
                        line = f"{number}\t" * ids + str(result) * usable
                    out.write(line + "\n")
                    advance()
        report.sum_up()
    if strict and report.counts["not converged"]:
        raise typer.Exit(NOT_CONVERGED)
