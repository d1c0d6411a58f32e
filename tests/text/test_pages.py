import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from sinkformer.errors import TextWarning
from sinkformer.text import pages


class Checker(HTMLParser):
    """Collects text and tags, and checks that every tag is closed in order."""

    VOID = frozenset({"meta", "br", "!doctype"})

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
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert not [a for _, attrs in page.tags for a in attrs if a.startswith("on")]
    assert EVIL in page.text


def test_the_page_stands_alone(static):
    page = static("the cat sat", "a feline !").to_html()
    assert not re.search(r"https?:|//|src=|href=|@import|<script|url\(", page)
    assert page.startswith("<!DOCTYPE html>")
    assert 'charset="utf-8"' in page


def test_right_to_left_texts(static):
    page = parsed(static("جلس القط على السجادة", "the cat שלום").to_html())
    directions = [attrs["dir"] for tag, attrs in page.tags if tag == "p" and "dir" in attrs]
    assert directions == ["rtl", "ltr"]
    assert sum(tag == "bdi" for tag, _ in page.tags) >= 7
    assert "القط" in page.text


def test_direction_controls_do_not_leak(static):
    page = static(["\u202eevil", "\u2066"], ["a\u0000b"]).to_html()
    assert "\u202e" not in page
    assert "\u2066" not in page
    assert "\0" not in page
    assert "&lt;U+202E&gt;evil" in page


def test_the_heat_map_has_a_row_and_a_column_for_the_null_atom(static):
    r = static("the cat sat", "a feline !")
    page = parsed(r.to_html())
    cells = [attrs for tag, attrs in page.tags if tag == "td" and "style" in attrs]
    assert len(cells) == 4 * 4 - 1
    assert sum("link" in attrs.get("class", "") for attrs in cells) == len(r.links)
    assert r.settings_hash in r.to_html()


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
    assert {pages._width(line) for line in lines} == {pages._width(lines[0])}


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
