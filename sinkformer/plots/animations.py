"""The phases of an interpolating network as a moving picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sinkformer.errors import ConfigError
from sinkformer.plots.figures import missing, new_figure
from sinkformer.plots.paths import Paths, draw, paths_through

if TYPE_CHECKING:
    from sinkformer.interpolation import Interpolant

_MOST_FRAMES = 120
_FRAMES_A_SECOND = 12
# Frames between two blocks, at most; for a change of view; and to look at the end of a phase.
_STEPS, _TURN, _PAUSE = 10, 3, 4
_MARGIN = 0.08


@dataclass(frozen=True, eq=False)
class _Frame:
    """One picture.

    Attributes:
        place: number of a stage, or a number between two.
        name: of the phase.
        limits: ``((left, right), (bottom, top))``.
        final: whether it belongs to the last phase.
    """

    place: float
    name: str
    limits: np.ndarray
    final: bool


def animation(built: Interpolant, path: str | Path, *, sequences: int = 6) -> None:
    """Write a GIF, of at most 120 frames, in which the tokens go from block to block. The title says the phase.

    Positions between blocks are interpolated linearly. Every phase is seen at limits of its own; targets are circles, in the
    last phase. Of more than two coordinates the first two are drawn; of one, a line for each sequence.

    Args:
        built: the network.
        path: the file to write; ends in ``.gif``.
        sequences: how many sequences to draw, the first ones; at most ten.

    Raises:
        ConfigError: another ending, or ``sequences`` is not between 1 and 10.
        PrecisionError: float64 cannot hold the network.
        MissingExtraError: matplotlib is not installed.
    """
    if Path(path).suffix.lower() != ".gif":
        raise ConfigError(
            f"expected an animation ending in .gif, received {str(path)!r}; for pictures use phases and save"
        )
    try:
        from matplotlib.animation import PillowWriter
    except ImportError as error:
        raise missing(error) from error
    paths, targets = paths_through(built, sequences)
    figure = new_figure(6, 4.8)
    axes = figure.add_subplot()
    figure.set_layout_engine(None)  # the axes shall stay where they are, whatever their labels
    figure.subplots_adjust(left=0.14, bottom=0.14)
    writer = PillowWriter(fps=_FRAMES_A_SECOND)
    with writer.saving(figure, str(path), dpi=80):
        for frame in _frames(paths, targets):
            for artist in list(axes.lines):  # the axes and their ticks stay
                artist.remove()
            draw(axes, paths.at(frame.place), paths.dim, targets=targets if frame.final else ())
            axes.set_xlim(*frame.limits[0])
            axes.set_ylim(*frame.limits[1])
            axes.set_title(frame.name)
            writer.grab_frame()


def _frames(paths: Paths, targets: Sequence[np.ndarray]) -> Iterator[_Frame]:
    """Through the stages; at the end of a phase closer to the tokens, and on to the view of the next phase."""
    phases = paths.phases
    views = [
        _around([*map(paths.at, range(max(p.first - 1, 0), p.last + 1)), *([targets] if p is phases[-1] else [])])
        for p in phases
    ]
    left = _MOST_FRAMES - len(phases) * (2 * _TURN + _PAUSE + 1)
    stops = set(np.linspace(0, len(paths.names) - 1, min(len(paths.names), left), dtype=int)) | {p.last for p in phases}
    steps = max(1, min(_STEPS, left // len(stops)))
    place = 0.0
    for k, phase in enumerate(phases):
        final = k == len(phases) - 1
        for stop in sorted(s for s in stops if phase.first <= s <= phase.last and s > 0):
            for i in range(1, steps + 1):
                yield _Frame(place + (stop - place) * i / steps, phase.name, views[k], final)
            place = float(stop)
        close = _around([paths.at(place)])
        for share in np.linspace(0, 1, _TURN + 1)[1:]:
            yield _Frame(place, phase.name, (1 - share) * views[k] + share * close, final)
        for _ in range(_PAUSE):
            yield _Frame(place, phase.name, close, final)
        for share in np.linspace(0, 1, _TURN + 1)[1:] if not final else ():
            yield _Frame(place, phase.name, (1 - share) * close + share * views[k + 1], final)


def _around(positions: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Limits ``((left, right), (bottom, top))`` with room around all positions; a side of no length gets one."""
    everything = np.concatenate([p for points in positions for p in points])
    low, high = everything.min(0), everything.max(0)
    room = np.where(high > low, _MARGIN * (high - low), 1.0)
    return np.stack([low - room, high + room], axis=1)
