"""Sequences on their way through an interpolating network: all of it in one picture, and phase by phase."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from sinkformer.plots.figures import current, new_figure
from sinkformer.plots.paths import Paths, draw, label, paths_of, paths_through

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sinkformer.interpolation import Interpolant, Stage

_MARKERS = "os^Dv<>pP"
_COLUMNS = 3
# An axis that is longer than the input by this factor is logarithmic.
_LONG = 100
# Ticks of such an axis, at most.
_TICKS = 7


def token_paths(stages: Sequence[Sequence[Stage]], ax: Axes | None = None) -> Axes:
    """The tokens of several sequences through the blocks: a colour for each sequence, a marker for the end of each phase.

    An axis on which some phase is more than a hundred times larger than the input is logarithmic beyond the input. Of more than
    two coordinates the first two are drawn; of one, a line for each sequence.

    Args:
        stages: for each of at most ten sequences what ``Interpolant.trace`` returned.
        ax: where to draw; default: pyplot's current axes.

    Returns:
        The axes.

    Raises:
        ShapeError: no sequence, too many, or sequences that went through different blocks.
        MissingExtraError: matplotlib is not installed.
    """
    paths = paths_of(stages)
    axes = current(ax)
    phases = paths.phases
    for j, path in enumerate(paths.points):
        axes.plot(path[..., 0], path[..., 1], color=f"C{j}", alpha=0.3, linewidth=0.8)
        axes.plot([], [], color=f"C{j}", label=f"sequence {j}")
        for k, phase in enumerate(phases):
            filled = "full" if k == len(phases) - 1 else "none"
            axes.plot(*path[phase.last].T, _MARKERS[k % len(_MARKERS)], color=f"C{j}", fillstyle=filled, markersize=5)
    for k, phase in enumerate(phases):
        axes.plot([], [], _MARKERS[k % len(_MARKERS)], color="0.3", fillstyle="none", label=phase.title)
    for axis, (input_size, size) in zip((axes.xaxis, axes.yaxis), _sizes(paths), strict=True):
        if size > _LONG * input_size:
            set_scale = axes.set_xscale if axis is axes.xaxis else axes.set_yscale
            set_scale("symlog", linthresh=input_size, linscale=2.5)
            cast("Any", axis.get_major_locator()).set_params(numticks=_TICKS)
    label(axes, paths.dim)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return axes


def _sizes(paths: Paths) -> list[tuple[float, float]]:
    """For both axes the largest coordinate of the input (one if it is zero), and of all stages."""
    largest = np.max([np.abs(path).max(1) for path in paths.points], axis=0)
    return [(float(column[0]) or 1.0, float(column.max())) for column in largest.T]


def phases(built: Interpolant, *, sequences: int = 6) -> Axes:
    """The tokens after every phase, side by side in a new figure outside pyplot; in the last panel with their targets.

    Every panel has limits of its own. Tokens that all lie on one line are drawn as ticks. Of more than two coordinates the
    first two are drawn; of one, a line for each sequence.

    Args:
        built: the network.
        sequences: how many sequences to draw, the first ones; at most ten.

    Returns:
        The axes on the left above.

    Raises:
        ConfigError: ``sequences`` is not between 1 and 10.
        PrecisionError: float64 cannot hold the network.
        MissingExtraError: matplotlib is not installed.
    """
    paths, targets = paths_through(built, sequences)
    count = len(paths.phases)
    columns = count if count < 5 else _COLUMNS
    rows = ceil(count / columns)
    figure = new_figure(3.4 * columns, 3.0 * rows + 0.4)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for k, phase in enumerate(paths.phases):
        draw(panels[k], paths.at(phase.last), paths.dim, targets=targets if k == count - 1 else ())
        panels[k].set_title(phase.title, fontsize="medium")
    for panel in panels[count:]:
        panel.set_axis_off()
    figure.suptitle(
        f"{built.method}, {built.kind}: {len(targets)} of {built.pairs.N} sequences, a colour for each; targets as circles"
    )
    return panels[0]
