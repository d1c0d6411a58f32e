"""``sinkformer w1``: the distance between couplings of two files, or between a model and a system."""

from __future__ import annotations

from json import dumps

import typer

from sinkformer.cli import options as o
from sinkformer.cli import w1_options as w
from sinkformer.cli.session import NOT_CONVERGED, session
from sinkformer.cli.w1_tables import bar, print_distances, print_report
from sinkformer.evaluation import distances, load_couplings, report, save_couplings
from sinkformer.plots import evaluation_figure, save
from sinkformer.systems import named


def w1(
    a: w.A = None,
    b: w.B = None,
    rounded: w.Rounded = False,
    model: w.Model = None,
    system: w.System = None,
    pairs: w.Pairs = None,
    sizes: w.Sizes = None,
    seed: w.Seed = None,
    sharpened: w.Sharpened = None,
    adversarial: w.Adversarial = False,
    steps: w.Steps = None,
    baselines: w.Baselines = False,
    baseline: w.Baseline = None,
    plot: w.Plot = None,
    worst: w.Worst = None,
    tol: w.Tol = None,
    json: w.Json = False,
    strict: o.Strict = False,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """W1 between the couplings of two files, or between a model and a system of targets, for |x - x'| + |y - y'|.

    Examples: sinkformer w1 a.npz b.npz; sinkformer w1 --model runs/eot --system eot --adversarial --baselines
    """
    others = {"pairs": pairs, "sizes": sizes, "seed": seed, "sharpened": sharpened, "adversarial": adversarial}
    others |= {"baselines": baselines, "baseline": baseline, "plot": plot, "worst": worst, "strict": strict}
    others |= {"steps": steps}
    files, found = w.are_files(a, b, model, system, rounded=rounded, **others), None
    asked = w.search(adversarial, steps)
    with session(quiet=quiet, debug=debug):
        if files:
            first, second = load_couplings(str(a)), load_couplings(str(b))
            with bar(quiet) as progress:
                between = distances(first, second, rounded=rounded, tol=tol, progress=progress)
            print(dumps(between.to_dict(), allow_nan=False)) if json else print_distances(between)
            return
        w.check_outputs(plot, worst)
        target, sampler = named(str(system))
        (title, predictor), *trained = w.load_predictors(model, baseline).items()
        with bar(quiet) as progress:
            found = report(
                predictor if sharpened is None else predictor.sharpened(sharpened),
                target,
                sampler,
                pairs=pairs or 1000,
                sizes=w.ranges(sizes),
                seed=seed or 0,
                tol=tol,
                search=asked,
                untrained=baselines,
                trained=dict(trained),
                name=title,
                progress=progress,
            )
        print(dumps(found.to_dict(), allow_nan=False)) if json else print_report(found)
        if worst is not None:
            save_couplings(worst, [found.worst.prediction, found.worst.target])
        if plot is not None:
            save(evaluation_figure(found.evaluations), plot)
    if strict and found is not None and found.unconverged:
        raise typer.Exit(NOT_CONVERGED)
