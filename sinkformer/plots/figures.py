"""Figures outside pyplot, files, and what to say where matplotlib is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sinkformer.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_axes(shape: Sequence[int]) -> Axes:
    """Axes of a new figure of a size that fits a picture of ``(rows, columns)``; of ``new_figure``."""
    n, m = shape
    width, height = (min(max(3.0 + 0.3 * k, 4.0), 30.0) for k in (m, n))
    return new_figure(width, height).add_subplot()


def new_figure(width: float, height: float) -> Figure:
    """A figure of that many inches, outside pyplot, so that nothing stays open after saving."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing(error) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def current(ax: Axes | None) -> Axes:
    """``ax``, or pyplot's current axes if it is None."""
    return pyplot().gca() if ax is None else ax


def save(ax: Axes, path: str | Path) -> None:
    """Write the figure of ``ax``; the ending of the path decides the format."""
    check_format(path)
    cast("Figure", ax.figure).savefig(path, dpi=150, bbox_inches="tight")


def check_format(path: str | Path) -> None:
    """Raise ConfigError if the ending of ``path`` is no picture format that can be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise missing(error) from error
    known = FigureCanvasAgg.get_supported_filetypes()
    ending = Path(path).suffix.removeprefix(".").lower()
    if ending not in known:
        raise ConfigError(
            f"expected a picture file ending in one of {', '.join(sorted(known))}; received {str(path)!r}"
        )


def pyplot() -> Any:
    """The module, or the error that names the extra."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise missing(error) from error
    return plt


def missing(error: ImportError) -> ImportError:
    """What to raise instead of ``error``: the extra if matplotlib is absent, the error itself if it is broken."""
    return MissingExtraError("plot", "matplotlib") if error.name == "matplotlib" else error
