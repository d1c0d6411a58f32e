"""Words that can be shown anywhere: nothing invisible, nothing that turns its neighbours around."""

from __future__ import annotations

import unicodedata

_HIDDEN = frozenset({"Cc", "Cs", "Co", "Cn", "Zl", "Zp"})
# Formatting characters that shape letters and stay; direction controls must not leak.
_JOINERS = frozenset({"\u200c", "\u200d"})


def visible(word: str) -> str:
    """The word with characters that show nothing, or turn the text around, spelled out."""
    if not word:
        return "(empty)"
    if all(c.isspace() or unicodedata.category(c) in {"Cf", "Zs", *_HIDDEN} for c in word):
        return "".join(map(_code, word))
    return "".join(_code(c) if _disturbs(c) else c for c in word)


def between(text: str) -> str:
    """What separates words, without direction controls; every kind of line end is a line feed."""
    kept = (c for c in text if unicodedata.category(c) not in ("Cf", "Cc") or c in "\n\t")
    return "".join("\n" if unicodedata.category(c) in ("Zl", "Zp") else c for c in kept)


def direction(text: str) -> str:
    """``ltr`` or ``rtl``, that of the first strong letter; ``auto`` if there is none.

    ``dir="auto"`` on a paragraph would not look into its ``<bdi>`` elements.
    """
    for c in text:
        kind = unicodedata.bidirectional(c)
        if kind in ("L", "R", "AL"):
            return "ltr" if kind == "L" else "rtl"
    return "auto"


def _disturbs(c: str) -> bool:
    category = unicodedata.category(c)
    return category in _HIDDEN or (category == "Cf" and c not in _JOINERS)


def _code(c: str) -> str:
    return f"<U+{ord(c):04X}>"
