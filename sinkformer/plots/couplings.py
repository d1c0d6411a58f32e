"""Couplings as heat maps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from sinkformer.errors import ShapeError
from sinkformer.plots.figures import current

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from sinkformer.couplings import Coupling

# Beyond this many labels on an axis they overlap and say nothing.
_MOST_LABELS = 80
# A name longer than this is cut in the picture; it would take the room of the picture itself.
_LONGEST_LABEL = 24


def coupling(
    pi: Coupling | Tensor | np.ndarray,
    ax: Axes | None = None,
    *,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    marked: Iterable[tuple[int, int]] = (),
    label: str = "mass",
    limits: tuple[float, float] | None = None,
) -> Axes:
    """Heat map of a plan: source atoms downwards, target atoms to the right.

    Args:
        pi: a ``Coupling`` without batch axes, or an array ``(n, m)``.
        ax: where to draw; default: pyplot's current axes.
        rows: names of the n source atoms.
        columns: names of the m target atoms.
        marked: pairs (i, j) to put a frame around.
        label: what the colour means.
        limits: values of the lightest and the darkest colour; default: 0 and the largest entry.

    Returns:
        The axes.

    Raises:
        ShapeError: not a matrix, or names that do not match its sides.
        MissingExtraError: matplotlib is not installed.
    """
    values = _matrix(pi)
    n, m = values.shape
    for name, labels, size in (("rows", rows, n), ("columns", columns, m)):
        if labels is not None and len(labels) != size:
            raise ShapeError(
                f"expected {size} names for the {name} of a plan of shape {(n, m)}, received {len(labels)}"
            )
    axes = current(ax)
    from matplotlib.patches import Rectangle

    low, high = (
        limits if limits is not None else (0.0, float(values.max()) if values.size and values.max() > 0 else 1.0)
    )
    image = axes.imshow(
        values,
        cmap="Blues",
        vmin=low,
        vmax=high,
        aspect="auto" if max(n, m) > 4 * min(n, m) else "equal",
        interpolation="nearest",
    )
    for i, j in marked:
        axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, edgecolor="tab:red", linewidth=1.4))
    _name(axes.yaxis, rows, n, {})
    _name(axes.xaxis, columns, m, {"rotation": 90})
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.tick_params(length=0)
    axes.set_ylabel("source")
    axes.set_xlabel("target")
    axes.figure.colorbar(image, ax=axes, label=label, fraction=0.04, pad=0.03)
    return axes


def _matrix(pi: Any) -> np.ndarray:
    dense = pi.to_dense() if hasattr(pi, "to_dense") and not isinstance(pi, Tensor) else pi
    values = dense.detach().cpu().double().numpy() if isinstance(dense, Tensor) else np.asarray(dense, dtype=float)
    if values.ndim != 2:
        raise ShapeError(
            f"expected one plan of shape (n, m), received {values.shape}; choose one of a batch with pi[k]"
        )
    return values


def _name(axis: Any, names: Sequence[str] | None, size: int, style: dict[str, Any]) -> None:
    if names is None or size > _MOST_LABELS:
        axis.get_major_locator().set_params(integer=True)  # the ticks are indices
        return
    # A dollar sign starts a formula in matplotlib; in a word it is a dollar sign.
    shown = [(w if len(w) <= _LONGEST_LABEL else w[: _LONGEST_LABEL - 1] + "…").replace("$", r"\$") for w in names]
    axis.set_ticks(range(size), shown, **style)
