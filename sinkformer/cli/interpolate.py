"""``sinkformer interpolate``: a transformer that maps sequences to their targets exactly, written down and checked."""

from __future__ import annotations

from json import dumps
from typing import Any

import torch
import typer

from sinkformer.cli import interpolate_options as i
from sinkformer.cli import options as o
from sinkformer.cli.interpolate_data import read_data
from sinkformer.cli.interpolate_record import check_outputs, record
from sinkformer.cli.interpolate_tables import print_network
from sinkformer.cli.session import FAILED, session
from sinkformer.interpolation import construct
from sinkformer.plots import animation, phases
from sinkformer.plots import save as save_picture


def interpolate(
    data: i.Data,
    attention: i.Attention = "hardmax",
    method: i.Method = "auto",
    request: i.Request = "for_float",
    statistic: i.Statistic = "mean",
    tau: i.Tau = None,
    seed: i.Seed = 0,
    check: i.Check = False,
    save: i.Save = None,
    dtype: i.SavedDtype = None,
    plot: i.Plot = None,
    json: i.Json = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """A transformer that maps every sequence of a file to its target exactly, as sets: no training, a construction.

    Examples: sinkformer interpolate pairs.json --check; sinkformer interpolate pairs.json --attention softmax --save net
    """
    given: dict[str, Any] = {"attention": attention, "method": method, "request": request, "statistic": statistic}
    with session(quiet=quiet, debug=debug):
        check_outputs(data, save, dtype, plot)
        built = construct(read_data(data), tau=i.temperature(tau), seed=seed, **given)
        verdict = built.certificate.check() if check or save is not None else None
        if not json:
            print_network(built)
            print("not checked; --check proves it" if verdict is None else verdict)
        export = None if save is None else built.save(save, getattr(torch, (dtype or i.Dtype.float64).value))
        if json:
            print(dumps(record(built, verdict, save, export), allow_nan=False))
        elif export is not None:
            print(f"saved in {save}, {export}")
        if plot is not None and plot.suffix.lower() == ".gif":
            animation(built, plot)
        elif plot is not None:
            save_picture(phases(built), plot)
    if check and not verdict:
        raise typer.Exit(FAILED)
