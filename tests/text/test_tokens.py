import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkformer.errors import DTypeError, TextError
from sinkformer.text import Words, split_words

pytest.importorskip("tokenizers")

INVISIBLE = {chr(c) for c in (0x200B, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2060, 0x2070), 0xFEFF)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "The cat's well-known 3.14, 1,000 at 10:30!",
            ["The", "cat's", "well-known", "3.14", ",", "1,000", "at", "10:30", "!"],
        ),
        ("'quoted' (a) -b- $5 50%", ["'", "quoted", "'", "(", "a", ")", "-", "b", "-", "$", "5", "50", "%"]),
        ("U.S. e.g. dog... --- no!!", ["U.S.", "e.g.", "dog", "...", "---", "no", "!!"]),
        ("नमस्ते दुनिया, किताबें", ["नमस्ते", "दुनिया", ",", "किताबें"]),
        ("اَلسَّلَامُ عَلَيْكُمْ، يا", ["اَلسَّلَامُ", "عَلَيْكُمْ", "،", "يا"]),
        ("می\u200cخواهم co\u00adop", ["می\u200cخواهم", "co\u00adop"]),
        ("我爱北京abc", ["我", "爱", "北", "京", "abc"]),
        (
            "e\u0301te\u0301 👩\u200d👩\u200d👧 👍🏽 🇫🇷x",
            ["e\u0301te\u0301", "👩\u200d👩\u200d👧", "👍🏽", "🇫🇷", "x"],
        ),
        ("a\u200bb\x00c\ufeffd \u202ee\u202c", ["a", "b", "c", "d", "e"]),
        ("", []),
        (" \t\n\u00a0\u3000", []),
    ],
)
def test_words(text, words):
    assert list(split_words(text).words) == words


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_spans_refer_to_the_text_and_cover_all_that_is_visible(text):
    found = split_words(text)
    last = 0
    for word, (start, end) in zip(found.words, found.spans, strict=True):
        assert text[start:end] == word != ""
        gap = text[last:start]
        assert all(c.isspace() or unicodedata.category(c) == "Cc" or c in INVISIBLE for c in gap)
        assert start >= last
        last = end


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_given_tokens_are_kept(tokens):
    words = Words.from_tokens(tokens)
    assert list(words.words) == tokens
    assert [words.text[a:b] for a, b in words.spans] == tokens


def test_a_tokenizer_replaces_the_rule():
    words = split_words("sinh vien di hoc", lambda text: ["sinh vien", "di", "hoc"])
    assert words.words == ("sinh vien", "di", "hoc")
    assert words.spans == ((0, 9), (10, 12), (13, 16))


def test_a_tokenizer_that_rewrites_gets_spans_of_its_own_tokens():
    words = split_words("sinh vien di", lambda text: ["sinh_vien", "di"])
    assert words.text == "sinh_vien di"
    assert [words.text[a:b] for a, b in words.spans] == ["sinh_vien", "di"]


def test_bad_input_is_named():
    with pytest.raises(DTypeError, match=r"expected a text \(str\), received int"):
        split_words(3)
    with pytest.raises(DTypeError, match="expected a list of tokens, received the str 'abc'"):
        Words.from_tokens("abc")
    with pytest.raises(DTypeError, match="every token to be a str, received int at position 1"):
        Words.from_tokens(["a", 2])
    with pytest.raises(DTypeError, match=r"tokenizer\(text\) to return a list of words, received str"):
        split_words("a b", lambda text: "a b")
    with pytest.raises(DTypeError, match=r"tokenizer\(text\) to return a list of words, received NoneType"):
        split_words("a b", lambda text: None)
    with pytest.raises(TextError, match=r"lone surrogate \(U\+DCE9\) at character 3"):
        split_words("caf\udce9")
    with pytest.raises(TextError, match="lone surrogate"):
        Words.from_tokens(["ok", "caf\udce9"])
