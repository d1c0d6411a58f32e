"""What is drawn of the tokens of several sequences on their way through a network: two coordinates, named phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sinkformer.errors import ConfigError, ShapeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sinkformer.interpolation import Interpolant, Stage

# Sequences beyond this many would share colours.
_MOST_SEQUENCES = 10
# What the block of a phase does to the tokens, where its name says less. The last leader block ends with the collapse.
_NAMES = {"reduction": "separation", "leader": "leaders and collapse"}


@dataclass(frozen=True, eq=False)
class Phase:
    """Stages one after the other that have one name.

    Attributes:
        name: ``"input"``, ``"separation"``, ...
        first: number of the first stage.
        last: number of the last.
    """

    name: str
    first: int
    last: int

    @property
    def title(self) -> str:
        """Where the tokens are at the end of it."""
        return self.name if self.name == "input" else f"after {self.name}"


@dataclass(frozen=True, eq=False)
class Paths:
    """Positions in the plane.

    Attributes:
        names: of the phases, one for each stage.
        points: one array ``(stages, n_j, 2)`` for each sequence.
        dim: number of coordinates the tokens have.
    """

    names: list[str]
    points: list[np.ndarray]
    dim: int

    @property
    def phases(self) -> list[Phase]:
        """The phases, in order."""
        found, start = [], 0
        for name, run in groupby(self.names):
            stop = start + len(list(run))
            found.append(Phase(name, start, stop - 1))
            start = stop
        return found

    def at(self, place: float) -> list[np.ndarray]:
        """Positions at a stage, or between two of them: ``(n_j, 2)`` for each sequence."""
        k = min(int(place), len(self.names) - 2) if len(self.names) > 1 else 0
        share = place - k
        return [path[k] if share == 0 else (1 - share) * path[k] + share * path[k + 1] for path in self.points]


def paths_of(stages: Sequence[Sequence[Stage]]) -> Paths:
    """What is drawn of traces, without the blocks that do nothing.

    Raises:
        ShapeError: no sequence, too many, or sequences that went through different blocks.
    """
    if not 1 <= len(stages) <= _MOST_SEQUENCES or not all(len(one) for one in stages):
        raise ShapeError(
            f"expected the stages of 1 to {_MOST_SEQUENCES} sequences, none of them empty, received {len(stages)} sequences; "
            "there are no more colours than that"
        )
    phases = [stage.phase for stage in stages[0]]
    for j, one in enumerate(stages):
        _check_same(phases, [stage.phase for stage in one], j)
    kept = [k for k, phase in enumerate(phases) if phase != "identity"]
    points = [
        np.stack([plane(one[k].points.detach().cpu().double().numpy(), j) for k in kept])
        for j, one in enumerate(stages)
    ]
    return Paths([_NAMES.get(phases[k], phases[k]) for k in kept], points, stages[0][0].points.shape[-1])


def _check_same(phases: list[str], others: list[str], j: int) -> None:
    for k, (phase, other) in enumerate(zip_longest(phases, others, fillvalue="nothing")):
        if phase != other:
            raise ShapeError(
                f"expected sequences that went through one network, received {phase} and {other} as stage {k} of sequences 0 "
                f"and {j}; give traces of one Interpolant"
            )


def paths_through(built: Interpolant, sequences: int) -> tuple[Paths, list[np.ndarray]]:
    """The first sequences of a network's data on their way, the collapse by itself; and their targets ``(m_j, 2)``.

    Raises:
        ConfigError: ``sequences`` is not between 1 and 10.
        PrecisionError: float64 cannot hold the network.
    """
    if isinstance(sequences, bool) or not isinstance(sequences, int) or not 1 <= sequences <= _MOST_SEQUENCES:
        raise ConfigError(
            f"expected sequences as a whole number from 1 to {_MOST_SEQUENCES}, a colour for each, received {sequences!r}"
        )
    stages = [_with_collapse(built, built.trace(torch.from_numpy(x.floats))) for x in built.pairs.X[:sequences]]
    return paths_of(stages), [plane(y.floats, j) for j, y in enumerate(built.pairs.Y[:sequences])]


def _with_collapse(built: Interpolant, stages: list[Stage]) -> list[Stage]:
    """The last leader block as two stages: its feed-forward layer, and the attention that collapses."""
    found = [stages[0]]
    for before, stage in pairwise(stages):
        if stage.phase != "leader":
            found.append(stage)
            continue
        block: Any = built.model.blocks[stage.block]
        with torch.no_grad():
            found.append(replace(stage, phase="leaders", points=block.feedforward(before.points)))
        if built.blocks[stage.block].attends:
            found.append(replace(stage, phase="collapse"))
    return found


def plane(points: np.ndarray, sequence: int) -> np.ndarray:
    """The first two coordinates; the number of the sequence as the second where there is only one."""
    if points.shape[1] == 1:
        return np.column_stack([points, np.full(len(points), sequence)])
    return points[:, :2]


def draw(axes: Axes, points: Sequence[np.ndarray], dim: int, *, targets: Sequence[np.ndarray] = ()) -> None:
    """Tokens as dots, or as ticks where all are on one line; targets as circles around them.

    Args:
        axes: where.
        points: ``(n_j, 2)`` for each sequence.
        dim: number of coordinates the tokens have.
        targets: ``(m_j, 2)`` for each sequence.
    """
    flat = dim > 1 and all((p[:, 1] == 0).all() for p in (*points, *targets))
    for j, p in enumerate(points):
        style = {"marker": "|", "markersize": 14} if flat else {"marker": "o", "markersize": 4, "alpha": 0.8}
        axes.plot(*p.T, color=f"C{j}", linestyle="none", **style)
    for j, p in enumerate(targets):
        axes.plot(*p.T, "o", color=f"C{j}", fillstyle="none", markersize=11)
    if flat:
        axes.set_ylim(-1, 1)
    label(axes, dim)


def label(axes: Axes, dim: int) -> None:
    """What the axes are."""
    of = f" of {dim}" if dim > 2 else ""
    axes.set_xlabel(f"coordinate 1{of}")
    axes.set_ylabel("sequence" if dim == 1 else f"coordinate 2{of}")
    if dim == 1:
        axes.locator_params(axis="y", integer=True)
