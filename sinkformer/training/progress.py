"""A progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def bar(wanted: bool) -> Iterator[Callable[[float, dict[str, float]], None]]:
    """A function to be told the share of the budget that is spent, and a record."""
    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
    with tqdm(total=1.0, desc="training", disable=not wanted, bar_format=form) as progress:

        def show(share: float, record: dict[str, float]) -> None:
            progress.set_postfix({key: record[key] for key in ("step", "loss", "validation") if key in record}, False)
            progress.update(min(share, 1.0) - progress.n)

        yield show
