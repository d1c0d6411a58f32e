"""The page of ``evaluate``: the worst pairs, gold and predicted links in one table each. No script, no network."""

from __future__ import annotations

from html import escape

from sinkformer.metrics import AlignmentScores
from sinkformer.text.gold import LinkedPair, LinkFile
from sinkformer.text.pages import document, grid, sentence, visible
from sinkformer.text.tokens import Words

_SHOWN = 20

# Kind of link -> sign and meaning; the signs differ in form, so that colours only help.
_MARKS = {
    "right": ("●", "right"),
    "wrong": ("✕", "wrong: predicted, not gold"),
    "missed": ("○", "missed: sure, not predicted"),
    "open": ("◌", "possible, not predicted (no error for AER)"),
}
_COLOURS = """
.map tbody td { font-size: 1em; }
.map td:is(.right, .wrong, .missed) { color: #1a1a1a; }
.map td.right { background: #d9ead9; }
.map td.wrong { background: #f3d3cd; font-weight: bold; }
.map td.missed { background: #fdf0c8; font-weight: bold; }
"""


def worst_pairs(
    gold: LinkFile, predicted: LinkFile, scores: AlignmentScores, line: str, *, ignore_possible: bool = False
) -> str:
    """The page.

    Pairs are ordered by the number of errors, wrong links and missed sure ones: those that AER counts. Pairs without any
    are left out, and no more than twenty are shown.

    Args:
        gold: gold links.
        predicted: links of a system for the same pairs.
        scores: of the two files.
        line: sentence below the title.
        ignore_possible: possible gold links are no gold.
    """
    errors = [c.predicted - c.gold_hits + c.sure - c.sure_hits for c in scores.counts]
    worst = sorted((k for k in range(len(errors)) if errors[k]), key=lambda k: (-errors[k], k))[:_SHOWN]
    sections = [_section(gold.pairs[k], predicted.pairs[k], ignore_possible) for k in worst]
    legend = ", ".join(f"{sign} {escape(meaning)}" for sign, meaning in _MARKS.values())
    count = f"{sum(map(bool, errors))} of {len(errors)} pairs have errors; {len(worst)} with the most are below."
    introduction = (
        f"<p>{escape(line)}</p>\n<p>{count} Signs: {legend}. "
        'Words <span class="alone">marked like this</span> have no gold link.</p>'
    )
    title = f"Links of {visible(predicted.name)} against {visible(gold.name)}"
    return document(title, [introduction, *sections], style=_COLOURS)


def _section(gold: LinkedPair, predicted: LinkedPair, ignore_possible: bool) -> str:
    kinds = _kinds(gold, predicted, ignore_possible)
    held = [getattr(gold, side) or getattr(predicted, side) for side in ("source", "target")]
    # Without the words, their numbers.
    numbers = [range(max((link[side] for link in kinds), default=-1) + 1) for side in (0, 1)]
    words = [
        tuple(map(str, range_)) if tokens is None else tokens for tokens, range_ in zip(held, numbers, strict=True)
    ]
    counts = [sum(kind == name for kind in kinds.values()) for name in ("right", "wrong", "missed")]
    name = "" if gold.id is None else f" ({visible(str(gold.id))})"
    out = [
        f"<section><h2>Line {gold.line}{escape(name)}: {counts[0]} right, {counts[1]} wrong, {counts[2]} missed</h2>"
    ]
    linked = gold.sure if ignore_possible else gold.links
    for side, tokens in enumerate(held):
        if tokens is not None:
            alone, name = set(range(len(tokens))) - {link[side] for link in linked}, ("source", "target")[side]
            out.append(sentence(Words.from_tokens(tokens), alone, name=name, label=f"{name} text"))
    return "\n".join([*out, _table(words[0], words[1], kinds), "</section>"])


def _kinds(gold: LinkedPair, predicted: LinkedPair, ignore_possible: bool) -> dict[tuple[int, int], str]:
    found, possible = set(predicted.links), set() if ignore_possible else set(gold.possible)
    wanted = set(gold.sure) | possible
    kinds = dict.fromkeys(found & wanted, "right") | dict.fromkeys(found - wanted, "wrong")
    return kinds | dict.fromkeys(possible - found, "open") | dict.fromkeys(set(gold.sure) - found, "missed")


def _table(source: tuple[str, ...], target: tuple[str, ...], kinds: dict[tuple[int, int], str]) -> str:
    def cell(i: int, j: int) -> str:
        kind = kinds.get((i, j))
        return "<td></td>" if kind is None else f'<td class="{kind}" title="{i}-{j} {kind}">{_MARKS[kind][0]}</td>'

    return grid(source, target, cell)
