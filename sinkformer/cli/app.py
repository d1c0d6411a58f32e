"""The application: one file per verb."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from sinkformer.cli.align import align
from sinkformer.cli.couple import couple
from sinkformer.cli.distance import distance
from sinkformer.cli.evaluate import evaluate
from sinkformer.cli.info import info
from sinkformer.cli.interpolate import interpolate
from sinkformer.cli.search import search
from sinkformer.cli.train import train
from sinkformer.cli.w1 import w1

app = typer.Typer(
    name="sinkformer",
    help="Couplings of texts, scores of word links, how far couplings are apart, and transformers that interpolate. "
    "Results on stdout, messages on stderr. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not converged (with --strict).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(version("sinkformer"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Options of the whole program."""


for verb in (couple, align, distance, search, train, evaluate, w1, interpolate, info):
    app.command()(verb)
