"""Pictures, with matplotlib's manners: a function takes ``ax`` and returns it, and never calls ``show``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from torch import Tensor

from sinkformer.errors import ConfigError, MissingExtraError, ShapeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sinkformer.couplings import Coupling
    from sinkformer.evaluation import Evaluation

# Beyond this many labels on an axis they overlap and say nothing.
_MOST_LABELS = 80
# A name longer than this is cut in the picture; it would take the room of the picture itself.
_LONGEST_LABEL = 24
# Distances below this are drawn as this: zero has no logarithm.
_LEAST_DISTANCE = 1e-14
# Distances that are smaller than the largest by more than this are out of the picture.
_SHOWN = 1e-6


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
    axes: Axes = _pyplot().gca() if ax is None else ax
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
    axes: Axes = _pyplot().gca() if ax is None else ax
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
    axes: Axes = _pyplot().gca() if ax is None else ax
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
    left = new_axes((10, 20))
    figure = cast("Figure", left.figure)
    figure.clear()
    axes = figure.subplots(1, 2)
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


def new_axes(shape: Sequence[int]) -> Axes:
    """Axes of a new figure of a fitting size, outside pyplot, so that nothing stays open after saving."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise _missing(error) from error
    n, m = shape
    width, height = (min(max(3.0 + 0.3 * k, 4.0), 30.0) for k in (m, n))
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure.add_subplot()


def save(ax: Axes, path: str | Path) -> None:
    """Write the figure of ``ax``; the ending of the path decides the format."""
    check_format(path)
    cast("Figure", ax.figure).savefig(path, dpi=150, bbox_inches="tight")


def check_format(path: str | Path) -> None:
    """Raise ConfigError if the ending of ``path`` is no picture format that can be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise _missing(error) from error
    known = FigureCanvasAgg.get_supported_filetypes()
    ending = Path(path).suffix.removeprefix(".").lower()
    if ending not in known:
        raise ConfigError(
            f"expected a picture file ending in one of {', '.join(sorted(known))}; received {str(path)!r}"
        )


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


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise _missing(error) from error
    return plt


def _missing(error: ImportError) -> ImportError:
    """What to raise instead of ``error``: the extra if matplotlib is absent, the error itself if it is broken."""
    return MissingExtraError("plot", "matplotlib") if error.name == "matplotlib" else error
