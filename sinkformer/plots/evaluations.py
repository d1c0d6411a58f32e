"""Distances to a system of targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from sinkformer.plots.figures import current, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sinkformer.evaluation import Evaluation

# Distances below this are drawn as this: zero has no logarithm.
_LEAST_DISTANCE = 1e-14
# Distances that are smaller than the largest by more than this are out of the picture.
_SHOWN = 1e-6


def evaluation(evaluations: Evaluation | Sequence[Evaluation], ax: Axes | None = None) -> Axes:
    """W1 against the number of atoms: mean, 95 % quantile and supremum of every evaluation, on logarithmic scales.

    Args:
        evaluations: what ``sinkformer.evaluation.evaluate`` returned, one or several.
        ax: where to draw; default: pyplot's current axes.

    Returns:
        The axes.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    axes = current(ax)
    styles = {"mean": ("-", "o"), "p95": ("--", None), "sup": (":", "^")}
    for k, one in enumerate(_several(evaluations)):
        summaries = one.by_size()
        atoms = [float(label.split("-")[-1]) for label in (s.label for s in summaries)]
        for name, (line, marker) in styles.items():
            values = [max(getattr(s, name), _LEAST_DISTANCE) for s in summaries]
            label = f"{one.predictor}: {name}"
            axes.plot(atoms, values, line, marker=marker, color=f"C{k}", label=label.replace("$", r"\$"))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_yscale("log")
    axes.set_ylim(bottom=_cut(axes.get_ylim()))
    axes.set_xlabel("atoms a side, up to")
    _describe(axes, "W1")
    axes.legend(fontsize="small")
    return axes


def distribution(evaluations: Evaluation | Sequence[Evaluation], ax: Axes | None = None) -> Axes:
    """Share of the pairs whose W1 is larger than a number, for every evaluation, on logarithmic scales.

    Args:
        evaluations: what ``sinkformer.evaluation.evaluate`` returned, one or several.
        ax: where to draw; default: pyplot's current axes.

    Returns:
        The axes.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    axes = current(ax)
    for k, one in enumerate(_several(evaluations)):
        values = np.maximum(np.sort(one.upper.numpy()), _LEAST_DISTANCE)
        shares = 1 - np.arange(len(values)) / len(values)
        axes.step(values, shares, where="pre", color=f"C{k}", label=one.predictor.replace("$", r"\$"))
    axes.set_xscale("log")
    axes.set_xlim(left=_cut(axes.get_xlim()))
    axes.set_yscale("log")
    axes.set_xlabel("W1")
    _describe(axes, "share of pairs with at least this W1")
    axes.legend(fontsize="small")
    return axes


def evaluation_figure(evaluations: Evaluation | Sequence[Evaluation]) -> Axes:
    """``evaluation`` and ``distribution`` side by side in a new figure outside pyplot; returns the axes on the left."""
    axes = new_figure(9, 6).subplots(1, 2)
    evaluation(evaluations, axes[0])
    distribution(evaluations, axes[1])
    return axes[0]


def _several(evaluations: Evaluation | Sequence[Evaluation]) -> Sequence[Evaluation]:
    return evaluations if isinstance(evaluations, (list, tuple)) else [cast("Evaluation", evaluations)]


def _cut(limits: tuple[float, float]) -> float:
    """Where a logarithmic axis of distances starts: rounding errors below would squeeze all others."""
    return max(limits[0], limits[1] * _SHOWN)


def _describe(axes: Axes, quantity: str) -> None:
    axes.set_ylabel(quantity)
    axes.set_title("sampled pairs: a sup is a lower bound of the theorem's", fontsize="small")
