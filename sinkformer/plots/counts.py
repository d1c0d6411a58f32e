"""Parameters of exact interpolation, against the length of the sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sinkformer.errors import ShapeError
from sinkformer.plots.figures import current

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sinkformer.interpolation import Comparison

_STYLES = ("--", ":", "-.")


def parameter_counts(comparisons: Sequence[Comparison], ax: Axes | None = None) -> Axes:
    """Parameters of the transformers and of a ResNet on flattened sequences against n / m, on logarithmic scales.

    The transformers do not depend on n: level lines. A dot, and a number in the legend, mark the shortest sequences for which
    the ResNet needs more than they do.

    Args:
        comparisons: what ``sinkformer.interpolation.compare`` returned for several lengths n of the sequences, and the same
            N, m, d and separations.
        ax: where to draw; default: pyplot's current axes.

    Returns:
        The axes.

    Raises:
        ShapeError: fewer than two lengths, or comparisons that differ in anything else.
        MissingExtraError: matplotlib is not installed.
    """
    ordered = sorted(comparisons, key=lambda one: one.n)
    if len({one.n for one in ordered}) < 2 or len({(one.N, one.m, one.d, one.rows[:-1]) for one in ordered}) > 1:
        raise ShapeError(
            "expected comparisons for at least two lengths n, with the same N, m, d and separations, received "
            f"{', '.join(f'(N={one.N}, n={one.n}, m={one.m}, d={one.d})' for one in ordered) or 'none'}"
        )
    axes = current(ax)
    first = ordered[0]
    ratios = [one.n / one.m for one in ordered]
    resnets = [one.rows[-1].parameters for one in ordered]
    axes.plot(ratios, resnets, color="C3", label=first.rows[-1].name)
    for k, row in enumerate(first.rows[:-1]):
        even = float(row.ratio or 0)
        label = f"{row.name}: fewer from n = {even:.3g} m"
        axes.plot([ratios[0], ratios[-1]], [row.parameters] * 2, _STYLES[k], color=f"C{k}", label=label)
        if ratios[0] <= even <= ratios[-1]:
            axes.plot(even, row.parameters, "o", color=f"C{k}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("n / m, tokens for each target")
    axes.set_ylabel("parameters")
    title = rf"N = {first.N} sequences, m = {first.m} targets each, in $\mathbb{{R}}^{{{first.d}}}$"
    axes.set_title(title, fontsize="medium")
    axes.legend(fontsize="small")
    return axes
