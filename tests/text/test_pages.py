import base64
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sinkformer.errors import TextWarning
from sinkformer.text import Aligner, pages
from sinkformer.text.pages.levels import levels


class Checker(HTMLParser):
    """Collects text and tags, and checks that every tag is closed in order."""

    VOID = frozenset({"meta", "br", "input", "!doctype"})

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.stack, self.tags, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(page):
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.stack == []
    return checker


EVIL = "<script>alert('x')</script> & \"quoted\" </td></table> <img src=x onerror=alert(1)>"


def test_every_text_is_escaped(static):
    page = parsed(static(EVIL.split(), [EVIL, "cat"]).to_html())
    tags = [tag for tag, _ in page.tags]
    assert "img" not in tags
    assert [attrs.get("type") for tag, attrs in page.tags if tag == "script"] == ["application/json", None]
    assert not [a for _, attrs in page.tags for a in attrs if a.startswith("on") or a in ("style", "src", "href")]
    assert EVIL in page.text


def test_the_data_hold_no_text(static):
    page = static(["</script>", "cat", "\u2028"], ["feline", "]]>"]).to_html()
    data = re.findall(r'<script type="application/json">(.*?)</script>', page, flags=re.DOTALL)
    assert len(data) == 1
    assert not re.search(r"[^][0-9.,:{}a-z\"-]", data[0])
    assert set(json.loads(data[0])) == {"threshold", "pairs", "alone"}


def test_the_page_stands_alone(static):
    page = static("the cat sat", "a feline !").to_html()
    assert not re.search(r"https?:|src=|href=|@import|url\(", page)
    assert page.startswith("<!DOCTYPE html>")
    assert 'charset="utf-8"' in page


def test_the_policy_names_style_and_script_by_their_hashes(static):
    def digest(text):
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    page = static("the cat sat", "a feline !").to_html()
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', page)
    (style,) = re.findall(r"<style>(.*?)</style>", page, flags=re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules == {
        "default-src": "'none'", "base-uri": "'none'", "form-action": "'none'",
        "style-src": digest(style), "script-src": digest(script),
    }  # fmt: skip
    assert "script-src" not in pages.document("title", ["<p>no script</p>"])


def test_right_to_left_texts(static):
    page = parsed(static("جلس القط على السجادة", "the cat שלום").to_html())
    directions = [attrs["dir"] for tag, attrs in page.tags if tag == "div" and "dir" in attrs]
    assert directions == ["rtl", "ltr"]
    assert sum(tag == "bdi" for tag, _ in page.tags) >= 7
    assert "القط" in page.text


def test_direction_controls_do_not_leak(static):
    page = static(["\u202eevil", "\u2066"], ["a\u0000b"]).to_html()
    assert "\u202e" not in page
    assert "\u2066" not in page
    assert "\0" not in page
    assert "&lt;U+202E&gt;evil" in page


def test_line_ends_and_blanks_between_words_are_kept(static):
    page = parsed(static("the cat\n\n  sat\u2028on\u202e mat", "cat").to_html())
    at = page.text.index("cat")
    assert page.text[at + 1] == "\n\n  "
    assert page.text[page.text.index("sat") + 1] == "\n"
    assert page.text[page.text.index("on") + 1] == " "


def test_the_heat_map_has_a_row_and_a_column_for_the_null_atom(static):
    r = static("the cat sat", "a feline !")
    page = parsed(r.to_html())
    cells = [attrs.get("class", "") for tag, attrs in page.tags if tag == "td"]
    assert sum("null" in kind for kind in cells) == 4 + 4 - 1
    assert sum("link" in kind for kind in cells) == len(r.links)
    assert [attrs["scope"] for tag, attrs in page.tags if tag == "th"].count("row") == 4
    assert r.settings_hash in r.to_html()


def test_tables_of_long_texts_are_closed_and_those_of_very_long_ones_left_out(static):
    def heat_map(a, b):
        page = parsed(static(["cat"] * a, ["cat"] * b).to_html())
        return [attrs for tag, attrs in page.tags if tag == "details" and attrs["class"] == "heat"], page

    assert ["open" in attrs for attrs in heat_map(10, 10)[0]] == [True]
    assert ["open" in attrs for attrs in heat_map(60, 60)[0]] == [False]
    found, page = heat_map(201, 200)
    assert not found
    assert "No heat map: 201 x 200 words are more than a page can show." in page.text


def test_many_pairs(static):
    page = parsed(pages.page([static("the cat", "a feline")] * 5, title="<five> pairs"))
    assert [text for text in page.text if text.startswith("Pair ")] == [f"Pair {k}" for k in range(1, 6)]
    assert page.text.count("<five> pairs") == 2
    assert not [attrs for tag, attrs in page.tags if tag == "details" and "open" in attrs]


@given(
    st.lists(st.sampled_from(["the", "a", "cat", "feline", "dog", "xyz", ","]), max_size=8),
    st.lists(st.sampled_from(["the", "a", "cat", "feline", "dog", "uvw", ","]), max_size=8),
    st.sampled_from([0.02, 0.1, 0.3, 1 / 3, 0.5, 0.9, 1.0]),
)
def test_at_its_own_threshold_a_page_has_the_links_of_the_alignment(table, a, b, threshold):
    r = Aligner(table, threshold=threshold)(a, b)
    numbers = levels(r)
    assert [(i, j) for i, j, _, level in numbers.pairs if level >= numbers.threshold] == r.links
    shown = {(i, j): share for i, j, share, _ in numbers.pairs}
    assert [shown[link] for link in r.links] == pytest.approx(r.confidence, abs=6e-4)


def test_rounding_makes_no_link(static):
    r = dataclasses.replace(static(["xyz"], ["uvw"]), confidences=torch.tensor([[0.29999]], dtype=torch.float64))
    ((i, j, share, level),) = levels(r).pairs
    assert (i, j, share) == (0, 0, 0.3)
    assert level < r.settings["threshold"] == 0.3


@pytest.mark.parametrize("method", ["balanced", "unbalanced", "argmax", "itermax"])
def test_pages_of_every_method(table, method):
    r = Aligner(table, method=method)("the cat sat , the end", "a feline , the dog")
    numbers = levels(r)
    assert r.links
    assert [(i, j) for i, j, _, level in numbers.pairs if level >= numbers.threshold] == r.links
    assert [share for *_, share, level in numbers.pairs if level >= numbers.threshold] == pytest.approx(
        r.confidence, abs=6e-4
    )
    assert ("(none)" in parsed(r.to_html()).text) == (method != "balanced")


def test_another_threshold_gives_the_links_an_aligner_with_it_gives(table):
    # Without repeated words; copies share their mass, and only the aligner knows the matching that settles them.
    a, b = "the cat sat on a mat , small dog", "the feline rested upon rug , large canine"
    numbers = levels(Aligner(table, epsilon=0.3)(a, b))
    counts = set()
    for threshold in (0.06, 0.1, 0.2, 0.31, 0.44, 0.46, 0.6, 0.8, 0.95):
        wanted = Aligner(table, epsilon=0.3, threshold=threshold)(a, b).links
        assert [(i, j) for i, j, _, level in numbers.pairs if level >= threshold] == wanted
        counts.add(len(wanted))
    assert len(counts) > 3


def test_the_page_in_the_documentation_is_up_to_date():
    """Made with the command in docs/text.md."""
    page = (Path(__file__).parents[2] / "docs" / "assets" / "couple.html").read_text(encoding="utf-8")
    for name in ("page.css", "page.js"):
        assert files(pages).joinpath(name).read_text(encoding="utf-8") in page


def test_it_is_written_as_utf8(static, tmp_path):
    r = static("日本", "日本")
    page = r.to_html(tmp_path / "a.html")
    assert (tmp_path / "a.html").read_bytes().decode() == page


@pytest.mark.parametrize(("a", "b"), [("", ""), ("", "the cat"), ("the", "")])
def test_empty_sides(static, a, b, tmp_path):
    r = static(a, b)
    assert "<i>(no words)</i>" in r.to_html()
    parsed(r.to_html())
    assert r.ascii().startswith("(no links)")
    r.plot(tmp_path / "a.png")


def test_the_table(static):
    r = static("the cat zyx", "a feline !")
    assert r.ascii().splitlines() == [
        f"   0  the  --  a          0   {r.confidence[0]:.2f}",
        f"   1  cat  --  feline     1   {r.confidence[1]:.2f}",
        "only in the source: zyx (2)",
        "only in the target: ! (2)",
        f"distance {r.distance:.4f} (normalized {r.normalized_distance:.3f})",
    ]


def test_the_table_is_aligned_for_wide_and_combining_characters(static):
    lines = static(["日本", "e\u0301e", "abc"], ["日本", "e\u0301e", "abc"]).ascii().splitlines()[:3]
    assert {pages.width(line) for line in lines} == {pages.width(lines[0])}


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("", "(empty)"),
        (" ", "<U+0020>"),
        ("\u200b", "<U+200B>"),
        ("a\x00b", "a<U+0000>b"),
        ("می\u200cخ", "می\u200cخ"),
        ("x", "x"),
    ],
)
def test_invisible_words_are_spelled_out(word, shown):
    assert pages.visible(word) == shown


def test_a_picture(static, tmp_path):
    r = static("the $cat$ sat", "a feline !")
    axes = r.plot(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert axes.images[0].get_array().shape == (len(r.source) + 1, len(r.target) + 1)
    assert len(axes.patches) == len(r.links)


def test_a_picture_is_valid_xml_whatever_the_words_hold(static, tmp_path):
    static(["a\x00b", "\x1b[0m", "\ufffe", "<&>"], ["a\x00b", "\u202e"]).plot(tmp_path / "a.svg")
    ElementTree.parse(tmp_path / "a.svg")


def test_a_font_without_the_letters_is_reported_once(static, tmp_path):
    with pytest.warns(
        TextWarning, match=r"the font of the picture lacks some letters of these texts; to_html\(\)"
    ) as caught:
        static("日本 語", "日本").plot(tmp_path / "a.png")
    assert len(caught) == 1
