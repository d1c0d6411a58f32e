"""``sinkformer evaluate``: the links of a system scored against gold."""

from __future__ import annotations

import io
from enum import Enum
from hashlib import sha256
from importlib.metadata import version
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from sinkformer.cli import options as o
from sinkformer.cli.evaluate_page import worst_pairs
from sinkformer.cli.evaluate_tables import print_breakdown, print_intervals
from sinkformer.cli.session import check_writable, open_input, say, session, usage
from sinkformer.text.gold import GoldFormat, LinkFile, coupling_distances, read_links, score_files

_SEED = 0


class PossibleSign(str, Enum):
    """What stands between the words of a possible link."""

    p = "p"
    question = "?"


def evaluate(
    gold: Annotated[str, typer.Argument(metavar="GOLD", help="Gold links; '-' is stdin.", show_default=False)],
    predicted: Annotated[
        str,
        typer.Argument(metavar="PREDICTED", help="Links of a system, such as align writes them.", show_default=False),
    ],
    gold_format: Annotated[
        GoldFormat | None, typer.Option(help="How GOLD is written. Default: seen from its first line.")
    ] = None,
    one_index_gold: Annotated[
        bool, typer.Option("--one-index-gold", help="Words of GOLD are counted from one.")
    ] = False,
    possible: Annotated[
        PossibleSign | None, typer.Option(help="Sign of possible links, as in 0p0 or 0?0. Default: both.")
    ] = None,
    ignore_possible: Annotated[
        bool, typer.Option("--ignore-possible", help="Possible links of GOLD are no gold.")
    ] = False,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Scores by length and share of null words; recall by block degree.")
    ] = False,
    bootstrap: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="95 % intervals from N samples of the pairs (seed 0).")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Page with the worst pairs.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Everything as one JSON line.")] = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Score links against gold, line by line: AER, precision, recall, F1, in percent.

    Example: sinkformer evaluate gold.jsonl links.pharaoh --breakdown
    """
    if gold == predicted == "-":
        raise usage("only one of GOLD and PREDICTED can be stdin")
    sign = None if possible is None else possible.value
    with session(quiet=quiet, debug=debug):
        check_writable(html, inputs=[gold, predicted])
        wanted, gold_sum = _read(gold, gold_format, one_based=one_index_gold, possible=sign)
        found, predicted_sum = _read(predicted)
        scores = score_files(wanted, found, ignore_possible=ignore_possible)
        distances = coupling_distances(wanted, found, ignore_possible=ignore_possible)
        if not quiet:
            _warn(wanted, found)
        options = {"gold_format": wanted.format.value, "predicted_format": found.format.value}
        options |= {"one_index_gold": one_index_gold, "possible": sign, "ignore_possible": ignore_possible}
        settings: dict[str, Any] = {"version": version("sinkformer"), "options": options}
        settings["sha256"] = {"gold": gold_sum, "predicted": predicted_sum}
        digest = sha256(dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
        intervals = {}
        if bootstrap is not None:
            intervals = scores.bootstrap(bootstrap, generator=torch.Generator().manual_seed(_SEED))
        if json:
            record = {**scores.to_dict(), "settings": digest, **settings}
            if breakdown and scores.sizes is not None:
                record["by_length"] = {name: group.to_dict() for name, group in scores.by_length().items()}
                record["by_nulls"] = {name: group.to_dict() for name, group in scores.by_nulls().items()}
            if distances is not None:
                record["couplings"] = {"tv": list(distances.tv), "w1": list(distances.w1)}
            if bootstrap is not None:
                record["bootstrap"] = {"samples": bootstrap, "seed": _SEED, "level": 0.95, **intervals}
            print(dumps(record, allow_nan=False))
        else:
            print(f"{scores}  settings {digest}")
            if distances is not None:
                print(distances)
            if bootstrap is not None:
                print_intervals(intervals, bootstrap, _SEED)
            if breakdown:
                print_breakdown(scores)
        if html is not None:
            page = worst_pairs(wanted, found, scores, f"{scores}  settings {digest}", ignore_possible=ignore_possible)
            html.write_text(page, encoding="utf-8")


def _read(path: str, format: GoldFormat | None = None, **options: Any) -> tuple[LinkFile, str]:
    """The links, and the SHA-256 of the bytes."""
    with open_input(path) as file:
        raw = file.read()
    name = "stdin" if path == "-" else path
    return read_links(io.BytesIO(raw), format, name=name, **options), sha256(raw).hexdigest()


def _warn(gold: LinkFile, predicted: LinkFile) -> None:
    for file in (gold, predicted):
        if file.repeated:
            say(f"warning: {file.name}: {file.repeated} repeated links; each counts once, as sure if it is both")
    failed = sum(pair.error is not None for pair in predicted.pairs)
    if failed:
        say(
            f"warning: {predicted.name}: {failed} lines hold an error instead of links; they count as pairs without links"
        )
