"""How far confidence can be believed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sinkformer.errors import ShapeError
from sinkformer.plots.figures import current

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def reliability(bins: Sequence[tuple[float, float, int, float, float]], ax: Axes | None = None) -> Axes:
    """Reliability diagram: share of right pairs against mean confidence, with the number of pairs beside each point.

    Args:
        bins: low end, high end, count, mean confidence and share of right ones, as ``text.learned.reliability`` gives them.
        ax: where to draw; default: pyplot's current axes.

    Returns:
        The axes.

    Raises:
        ShapeError: no bin.
        MissingExtraError: matplotlib is not installed.
    """
    if not bins:
        raise ShapeError("expected at least one bin of confidences, received none")
    ax = current(ax)
    x, y = [b[3] for b in bins], [b[4] for b in bins]
    ax.plot([0, 1], [0, 1], color="0.7", linewidth=1, label="calibrated")
    ax.plot(x, y, "o-", color="#1f5a96", label="measured")
    for b in bins:
        ax.annotate(str(b[2]), (b[3], b[4]), textcoords="offset points", xytext=(6, -10), fontsize=8, color="0.35")
    ax.set(xlim=(-0.02, 1.08), ylim=(-0.02, 1.05), xlabel="confidence", ylabel="share of gold links", aspect="equal")
    ax.legend(frameon=False)
    return ax
