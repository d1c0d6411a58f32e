"""Self-contained pages: one file, no network, readable without scripts.

A policy in the page (Content-Security-Policy) names the style and the script by their hashes and allows nothing
else: whatever a text holds, it neither runs nor loads anything.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from sinkformer.text.pages.levels import Levels, levels
from sinkformer.text.pages.words import between, direction, visible

if TYPE_CHECKING:
    from sinkformer.text.alignments import Alignment
    from sinkformer.text.tokens import Words

# Texts of more words stand side by side and scroll; tables of more cells, and those of more pairs, are closed at first;
# tables of many more are left out.
_FEW = 3
_LONG = 80
_OPEN_CELLS = 1_200
_MOST_CELLS = 40_000
_OPEN_LINKS = 40
_NAMES = ("source", "target")


def page(alignments: Sequence[Alignment], title: str = "Coupling of two texts") -> str:
    """One page for any number of pairs.

    Each pair has both texts as running text, a slider for the threshold, the links as a list and the coupling as a heat
    map (left out above 40,000 cells). Without scripts everything but the slider and the highlighting is there.
    """
    several, many = len(alignments) > 1, len(alignments) > _FEW
    sections = [_section(a, f"Pair {k}" if several else "", closed=many) for k, a in enumerate(alignments, 1)]
    return document(title, [_HINT, *sections], script=_resource("page.js"))


_HINT = (
    '<p class="hint" hidden>Point at a word, tap it, or go from word to word with the arrow keys: its partners light up, '
    "with the confidence of each link. Enter or a click keeps them lit, Escape lets go.</p>"
)


def document(title: str, body: Iterable[str], *, style: str = "", script: str = "") -> str:
    """A page with the style of this package.

    Args:
        title: plain text, the title and the heading.
        body: pieces of HTML.
        style: further CSS.
        script: JavaScript; empty: the page may run none.
    """
    css = _resource("page.css") + style
    policy = f"default-src 'none'; style-src '{_digest(css)}'; base-uri 'none'; form-action 'none'"
    if script:
        policy += f"; script-src '{_digest(script)}'"
    heading = escape(between(title))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{heading}</title>\n<style>{css}</style>\n</head>\n<body>\n<main>\n<h1>{heading}</h1>\n"
        + "\n".join(body)
        + "\n</main>\n"
        + (f"<script>{script}</script>\n" if script else "")
        + "</body>\n</html>\n"
    )


def sentence(words: Words, alone: Iterable[int], *, name: str, label: str) -> str:
    """The text as it was written, every word in its own direction; what lies between words is kept.

    Args:
        words: the words.
        alone: indices of the words to be marked.
        name: class of the element, for scripts and styles.
        label: what a screen reader calls the text.
    """
    marked = set(alone)
    out, last = [], 0
    for k, (word, (start, end)) in enumerate(zip(words.words, words.spans, strict=True)):
        out.append(escape(between(words.text[last:start])))
        out.append(f'<bdi class="word{" alone" * (k in marked)}">{escape(visible(word))}</bdi>')
        last = end
    out.append(escape(between(words.text[last:])))
    # The language is unknown, and not that of the page.
    head = f'<div class="text {name}" role="group" aria-label="{escape(label)}" dir="{direction(words.text)}" lang="">'
    return f"{head}{''.join(out) if words.words else '<i>(no words)</i>'}</div>"


def grid(rows: Sequence[str], columns: Sequence[str], cell: Callable[[int, int], str]) -> str:
    """A table of words against words.

    Args:
        rows: words, plain text.
        columns: words, plain text.
        cell: HTML of the cell of a row and a column, a ``<td>``.
    """
    lines = [
        f"<tr>{_head(word, 'row')}{''.join(cell(i, j) for j in range(len(columns)))}</tr>"
        for i, word in enumerate(rows)
    ]
    head = "".join(_head(word, "col") for word in columns)
    return (
        f'<div class="scroll"><table class="map">\n<thead><tr><td></td>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody></table></div>"
    )


def _head(word: str, scope: str) -> str:
    return f'<th scope="{scope}"><bdi>{escape(visible(word))}</bdi></th>'


@lru_cache
def _resource(name: str) -> str:
    return files("sinkformer.text.pages").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _section(alignment: Alignment, heading: str, *, closed: bool) -> str:
    numbers = levels(alignment)
    size = max(len(alignment.source), len(alignment.target))
    texts = [
        sentence(words, alone, name=name, label=f"{name} text")
        for name, words, alone in zip(_NAMES, (alignment.source, alignment.target), alignment.unaligned, strict=True)
    ]
    settings = ", ".join(f"{name} {value}" for name, value in alignment.settings.items())
    parts = [
        f'<section class="pair{" long" * (size > _LONG)}">',
        f"<h2>{escape(heading)}</h2>" if heading else "",
        _counts(alignment),
        _slider(numbers),
        f'<div class="texts">{texts[0]}\n{texts[1]}</div>',
        '<p class="status" role="status"></p>',
        _list(alignment, closed=closed),
        _heat_map(alignment, closed=closed),
        f'<p class="note">Settings {alignment.settings_hash}: {escape(visible(settings))}. '
        f"Status: {escape(alignment.status.name.lower())}.</p>",
        f'<script type="application/json">{numbers.to_json()}</script>',
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _counts(alignment: Alignment) -> str:
    alone = [f'<b data-count="{name}">{len(side)}</b> of {len(words)} in the {name}' for name, side, words in zip(
        _NAMES, alignment.unaligned, (alignment.source, alignment.target), strict=True)]  # fmt: skip
    return (
        f'<p><b data-count="links">{len(alignment.links)}</b> links. Words that <span class="alone">stay alone</span>: '
        f"{alone[0]}, {alone[1]}. Distance {alignment.distance:.4f}, normalized "
        f"{alignment.normalized_distance:.3f} (0 = identical).</p>"
    )


def _slider(numbers: Levels) -> str:
    """Hidden where no script runs, as it would do nothing there."""
    return (
        '<p class="controls" hidden><label>Least confidence of a link '
        f'<input class="threshold" type="range" min="{numbers.floor:g}" max="1" step="any" value="{numbers.threshold:g}" '
        f'autocomplete="off"></label> <output>{numbers.threshold:.2f}</output> '
        '<button type="button" disabled>as found</button></p>'
    )


def _heat_map(alignment: Alignment, *, closed: bool) -> str:
    n, m = alignment.plan.shape
    if not n or not m:
        return ""
    if n * m > _MOST_CELLS:
        return f'<p class="note">No heat map: {n} x {m} words are more than a page can show.</p>'
    values = alignment.with_nulls().cpu()
    null = bool((values[:n, m] > 0).any() or (values[n, :m] > 0).any())
    shares, links = values.tolist(), set(alignment.links)

    def cell(i: int, j: int) -> str:
        kind = ["link"] * ((i, j) in links) + ["null"] * (i == n or j == m)
        return _cell(shares[i][j], kind)

    table = grid([*alignment.source.words, *["(none)"] * null], [*alignment.target.words, *["(none)"] * null], cell)
    opened = " open" * (n * m <= _OPEN_CELLS and not closed)
    title = "Heat map: share of each word (rows: source) that goes to each word"
    return f'<details class="heat"{opened}><summary>{title}</summary>\n{table}\n</details>'


def _cell(value: float, kinds: list[str]) -> str:
    share = min(max(value, 0.0), 1.0)
    step = round(10 * share)
    names = " ".join([*kinds, *[f"s{step}"] * (step > 0)])
    attribute = f' class="{names}"' if names else ""
    return f"<td{attribute}>{f'{share:.2f}' if share >= 0.005 else ''}</td>"


def _list(alignment: Alignment, *, closed: bool) -> str:
    rows = "\n".join(
        f"<tr><td>{i}</td><td><bdi>{escape(visible(alignment.source.words[i]))}</bdi></td>"
        f"<td><bdi>{escape(visible(alignment.target.words[j]))}</bdi></td><td>{j}</td><td>{c:.2f}</td></tr>"
        for (i, j), c in zip(alignment.links, alignment.confidence, strict=True)
    )
    names = "".join(f'<th scope="col">{name}</th>' for name in ("", "source", "target", "", "confidence"))
    opened = " open" * (0 < len(alignment.links) <= _OPEN_LINKS and not closed)
    return (
        f'<details class="list"{opened}><summary>Links</summary>\n'
        f"<table>\n<thead><tr>{names}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>\n</details>"
    )
