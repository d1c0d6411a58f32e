"""An alignment as lines of characters."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

from sinkformer.text.pages.words import visible

if TYPE_CHECKING:
    from sinkformer.text.alignments import Alignment


def width(text: str) -> int:
    """Columns of a terminal: wide characters two, combining ones none."""
    return sum(
        0
        if unicodedata.combining(c) or unicodedata.category(c) in ("Cf", "Mn", "Me")
        else 2
        if unicodedata.east_asian_width(c) in "WF"
        else 1
        for c in text
    )


def table(alignment: Alignment) -> str:
    """Lines ``index word -- word index  confidence``, then the words left alone and the distance."""
    source, target = [[visible(w) for w in side.words] for side in (alignment.source, alignment.target)]
    left = max((width(source[i]) for i, _ in alignment.links), default=0)
    right = max((width(target[j]) for _, j in alignment.links), default=0)
    lines = [
        f"{i:>4}  {_padded(source[i], left)}  --  {_padded(target[j], right)}  {j:>4}   {c:.2f}"
        for (i, j), c in zip(alignment.links, alignment.confidence, strict=True)
    ]
    if not lines:
        lines = ["(no links)"]
    for name, words, alone in zip(("source", "target"), (source, target), alignment.unaligned, strict=True):
        if alone:
            lines.append(f"only in the {name}: " + ", ".join(f"{words[k]} ({k})" for k in alone))
    lines.append(f"distance {alignment.distance:.4f} (normalized {alignment.normalized_distance:.3f})")
    return "\n".join(lines)


def _padded(text: str, columns: int) -> str:
    return text + " " * (columns - width(text))
