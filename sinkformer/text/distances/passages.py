"""Long texts in pieces: blocks that are encoded, and passages that are compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sinkformer.text.tokens import Words

# Characters of the longest block, whatever the passages.
_LONGEST = 4_000
# Characters of a block for each word of a passage.
_ROOM = 8
_ENDS = frozenset(".!?…。！？؟।")


def blocks(lines: Iterable[str], size: int) -> Iterator[tuple[int, str]]:
    """Paragraphs, short ones joined until they have ``size`` words, long ones cut at a blank.

    Args:
        lines: lines with their line ends, such as an open file yields them. No more than a block and a line are held.
        size: words between blanks.

    Yields:
        The number of its first line, from one, and the text of each block. Together they hold every word.
    """
    limit = max(_LONGEST, _ROOM * size)
    held, first, number = "", 1, 1
    for line in lines:
        blank = not line.strip()
        if blank and len(held.split()) >= size:
            yield first, held
            held = ""
        elif held or not blank:
            first = first if held else number
            held += line
        number += line.count("\n")
        while len(held) > limit:
            cut = max(held.rfind(" ", 1, limit), held.rfind("\n", 1, limit)) + 1 or limit
            yield first, held[:cut]
            first, held = first + held.count("\n", 0, cut), held[cut:]
    if held.strip():
        yield first, held


def passages(words: Words, size: int) -> list[tuple[int, int]]:
    """Runs of whole sentences of at least ``size`` words and less than three times as many, one from each sentence on.

    A shorter text is one passage. A sentence of more than twice ``size`` words is cut.

    Args:
        words: the words of a block.
        size: words, >= 1.

    Returns:
        Half-open ranges of words, by their start.
    """
    n = len(words)
    bounds = [0] if n else []
    for k in range(1, n):
        if words.words[k - 1][-1:] in _ENDS or k - bounds[-1] >= 2 * size:
            bounds.append(k)
    found = []
    for k, start in enumerate(bounds):
        end = next((b for b in bounds[k + 1 :] if b - start >= size), n)
        found.append((start, end))
        if end == n:
            break
    return found
