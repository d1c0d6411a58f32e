"""``sinkformer align``: a file of pairs in, a line of links out for each."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from sinkformer.cli import options as o
from sinkformer.cli.inputs import Inputs
from sinkformer.cli.lines import UNSOLVED, Layout
from sinkformer.cli.outputs import Output, continued, fresh, resume_file
from sinkformer.cli.session import NOT_CONVERGED, check_writable, session, usage
from sinkformer.cli.streams import Report, progress
from sinkformer.cli.working import WINDOW, Work
from sinkformer.text import Aligner

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
    couplings: Annotated[
        bool, typer.Option("--couplings", help="Put the coupling into JSON lines; evaluate then measures its distance.")
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
    method: o.Method = None,
    resume: o.Resume = False,
    workers: o.Workers = 1,
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
    if couplings and format is not o.LineFormat.jsonl:
        raise usage("--couplings needs --format jsonl: links have no place for them")
    inputs = Inputs(tuple(str(path) for path in (pairs, src, tgt) if path is not None), tokenized=not raw)
    if workers > 1:
        inputs.require_files("--workers")
    if resume:
        inputs.require_files("--resume")
        if output is None:
            raise usage("--resume needs --output FILE")
    report = Report(quiet, Counter())
    with session(quiet=quiet, debug=debug, stdout=output is None):
        check_writable(output, inputs=inputs.names)
        with inputs.opened() as (items, total):
            given = o.given_options(model, layer, device, epsilon, null_price, threshold, distortion, method)
            aligner, work = Aligner(**given), Work(inputs, Layout(format, ids, couplings), given)
            with _opened(output, work, aligner, resume) as out, progress(total, quiet, out.done) as advance:
                report.add(out.notes)
                if workers > 1:
                    lines = work.lines_from_workers(workers, out.done)
                else:
                    lines = work.lines(islice(items, out.done, None), aligner, out.done)
                for line in lines:
                    report.note(line)
                    out.write(line)
                    advance()
        report.sum_up()
    if strict and report.counts[UNSOLVED]:
        raise typer.Exit(NOT_CONVERGED)


def _opened(output: Path | None, work: Work, aligner: Aligner, resume: bool) -> AbstractContextManager[Output]:
    if not resume or output is None:
        return fresh(output)
    check_writable(resume_file(output), inputs=work.inputs.names)
    return continued(output, work.made_from(aligner), WINDOW)
