"""Tables for terminals."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sinkformer.text.pages import visible

if TYPE_CHECKING:
    from sinkformer.text import Alignment

_BAR = 12


def print_alignment(alignment: Alignment) -> None:
    """The links as a table with bars in a terminal, as plain lines elsewhere."""
    if not sys.stdout.isatty():
        print(alignment.ascii())
        return
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name, justify in (
        ("", "right"),
        ("source", "left"),
        ("target", "left"),
        ("", "right"),
        ("confidence", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    source, target = alignment.source.words, alignment.target.words
    rows = [(i, j, c) for (i, j), c in zip(alignment.links, alignment.confidence, strict=True)]
    rows += [(i, None, None) for i in alignment.unaligned[0]]
    for i, j, c in sorted(rows, key=lambda row: (row[0], -1 if row[1] is None else row[1])):
        # Text, not str: brackets and colons in a word are letters here, not markup.
        right = Text("(alone)", style="dim italic") if j is None else Text(visible(target[j]))
        bar = Text("") if c is None else Text(f"{c:.2f} ") + Text("█" * round(_BAR * c), style="cyan")
        table.add_row(
            Text(str(i), style="dim"),
            Text(visible(source[i])),
            right,
            Text("" if j is None else str(j), style="dim"),
            bar,
        )
    for j in alignment.unaligned[1]:
        table.add_row("", Text("(alone)", style="dim italic"), Text(visible(target[j])), Text(str(j), style="dim"), "")
    console = Console(highlight=False)
    console.print(table)
    console.print(
        Text(f"distance {alignment.distance:.4f} (normalized {alignment.normalized_distance:.3f}, 0 = identical)")
    )
