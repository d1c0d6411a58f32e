"""An alignment as a table of characters and as a page of HTML."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sinkformer.text.alignments import Alignment
    from sinkformer.text.tokens import Words

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222; background: #fff; }
.text { padding: .4em .8em; margin: .4em 0; background: #f6f6f4; border-radius: .3em; }
.alone { color: #a03020; border-bottom: 2px dotted #a03020; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 1em 0; }
th { font-weight: normal; padding: .1em .5em; white-space: nowrap; }
thead th { vertical-align: bottom; }
thead th bdi { writing-mode: vertical-rl; }
tbody th { text-align: end; }
.map td { width: 2.2em; min-width: 2.2em; height: 1.9em; text-align: center; font-size: .75em; border: 1px solid #eee; }
.map td.link { outline: 2px solid #a03020; outline-offset: -2px; }
.map td.null, .map th.null { border: 1px dashed #ccc; font-style: italic; color: #555; }
.list td, .list th { padding: .1em .8em; text-align: start; border-bottom: 1px solid #eee; }
.note { color: #666; font-size: .85em; }
h2 { font-size: 1.1em; margin-top: 2.5em; border-top: 1px solid #ccc; padding-top: 1em; }
"""


def visible(word: str) -> str:
    """The word with characters that show nothing, or turn the text around, spelled out."""
    if not word:
        return "(empty)"
    hidden = {"Cc", "Cs", "Co", "Cn", "Zl", "Zp"}
    if word.isspace() or all(unicodedata.category(c) in {"Cf", "Zs", *hidden} for c in word):
        return "".join(f"<U+{ord(c):04X}>" for c in word)
    # Formatting characters inside a word: joiners shape letters and stay, direction controls must not leak.
    keep = {"\u200c", "\u200d"}
    return "".join(
        f"<U+{ord(c):04X}>"
        if unicodedata.category(c) in hidden or (unicodedata.category(c) == "Cf" and c not in keep)
        else c
        for c in word
    )


def _width(text: str) -> int:
    """Columns of a terminal: wide characters two, combining ones none."""
    return sum(
        0
        if unicodedata.combining(c) or unicodedata.category(c) in ("Cf", "Mn", "Me")
        else 2
        if unicodedata.east_asian_width(c) in "WF"
        else 1
        for c in text
    )


def _padded(text: str, width: int) -> str:
    return text + " " * (width - _width(text))


def table(alignment: Alignment) -> str:
    """Lines ``index word -- word index  confidence``, then the words left alone and the distance."""
    source, target = [[visible(w) for w in side.words] for side in (alignment.source, alignment.target)]
    left = max((_width(source[i]) for i, _ in alignment.links), default=0)
    right = max((_width(target[j]) for _, j in alignment.links), default=0)
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


def page(alignments: Sequence[Alignment], title: str = "Coupling of two texts") -> str:
    """One HTML page for any number of pairs; no script, no network."""
    body = "\n".join(_section(a, f"Pair {k}" if len(alignments) > 1 else "") for k, a in enumerate(alignments, 1))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _section(alignment: Alignment, heading: str) -> str:
    parts = [f"<h2>{html.escape(heading)}</h2>"] if heading else []
    for words, alone in zip((alignment.source, alignment.target), alignment.unaligned, strict=True):
        parts.append(f'<p class="text" dir="{_direction(words.text)}">{_sentence(words, set(alone))}</p>')
    parts.append(
        f"<p>Distance {alignment.distance:.4f}, normalized {alignment.normalized_distance:.3f} (0 = identical). "
        f'{len(alignment.links)} links. Words <span class="alone">marked like this</span> stay alone.</p>'
    )
    parts.append(_heat_map(alignment))
    parts.append(_list(alignment))
    settings = ", ".join(f"{name} {value}" for name, value in alignment.settings.items())
    parts.append(
        f'<p class="note">Settings {alignment.settings_hash}: {html.escape(settings)}. '
        f"Status: {html.escape(alignment.status.name.lower())}.</p>"
    )
    return "\n".join(parts)


def _direction(text: str) -> str:
    """Direction of the first strong letter. ``dir="auto"`` on the paragraph would not look into its <bdi>s."""
    for c in text:
        kind = unicodedata.bidirectional(c)
        if kind in ("L", "R", "AL"):
            return "ltr" if kind == "L" else "rtl"
    return "auto"


def _sentence(words: Words, alone: set[int]) -> str:
    """The text as it was written, every word in its own direction; what lies between words is kept."""
    out, last = [], 0
    for k, (word, (start, end)) in enumerate(zip(words.words, words.spans, strict=True)):
        out.append(html.escape(_between(words.text[last:start])))
        mark = ' class="alone"' if k in alone else ""
        out.append(f'<bdi{mark} title="{k}">{html.escape(visible(word))}</bdi>')
        last = end
    out.append(html.escape(_between(words.text[last:])))
    return "".join(out) or "<i>(no words)</i>"


def _between(text: str) -> str:
    """What separates words, without direction controls."""
    return "".join(c for c in text if unicodedata.category(c) not in ("Cf", "Cc") or c in "\n\t")


def _heat_map(alignment: Alignment) -> str:
    values = alignment.with_nulls().tolist()
    null = bool(alignment.settings["null"])
    links = set(alignment.links)
    n, m = alignment.plan.shape
    columns = [f"<th><bdi>{html.escape(visible(w))}</bdi></th>" for w in alignment.target.words]
    if null:
        columns.append('<th class="null"><bdi>none</bdi></th>')
    rows = []
    for i in range(n + null):
        name = html.escape(visible(alignment.source.words[i])) if i < n else "none"
        cells = [f"<th{'' if i < n else ' class=' + chr(34) + 'null' + chr(34)}><bdi>{name}</bdi></th>"]
        for j in range(m + null):
            cells.append(_cell(values[i][j], (i, j) in links, i == n or j == m, corner=i == n and j == m))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return (
        '<div class="scroll"><table class="map">\n<thead><tr><th></th>'
        + "".join(columns)
        + "</tr></thead>\n<tbody>\n"
        + "\n".join(rows)
        + "\n</tbody></table></div>"
    )


def _cell(value: float, link: bool, null: bool, *, corner: bool) -> str:
    if corner:
        return '<td class="null"></td>'
    kind = ["link"] * link + ["null"] * null
    attribute = f' class="{" ".join(kind)}"' if kind else ""
    share = min(max(value, 0.0), 1.0)
    ink = "#fff" if share > 0.6 else "#222"
    text = f"{share:.2f}" if share >= 0.005 else ""
    return f'<td{attribute} style="background:rgba(31,90,150,{share:.2f});color:{ink}">{text}</td>'


def _list(alignment: Alignment) -> str:
    rows = "\n".join(
        f"<tr><td>{i}</td><td><bdi>{html.escape(visible(alignment.source.words[i]))}</bdi></td>"
        f"<td><bdi>{html.escape(visible(alignment.target.words[j]))}</bdi></td><td>{j}</td><td>{c:.2f}</td></tr>"
        for (i, j), c in zip(alignment.links, alignment.confidence, strict=True)
    )
    if not rows:
        return "<p>No links.</p>"
    head = "<tr><th></th><th>source</th><th>target</th><th></th><th>confidence</th></tr>"
    return f'<table class="list">\n<thead>{head}</thead>\n<tbody>\n{rows}\n</tbody></table>'
