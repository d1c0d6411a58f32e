import io
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkformer.errors import FormatError
from sinkformer.text import BadLine, Pair, parse_pharaoh, read_pairs, read_pharaoh, read_two_files
from sinkformer.text.formats import count_lines, format_jsonl, format_pharaoh


def pairs(raw, **options):
    return list(read_pairs(io.BytesIO(raw), **options))


@pytest.mark.parametrize(
    "raw",
    [b"a b ||| c\n", b"a b||| c\n", b"a b |||c", b"a b|||c\r\n", b"a b\tc\n", b"\xef\xbb\xbfa b ||| c\n"],
)
def test_separators(raw):
    assert pairs(raw) == [Pair(1, "a b", "c")]
    assert pairs(raw, tokenized=True) == [Pair(1, ["a", "b"], ["c"])]


def test_bars_win_over_tabs_and_sides_may_be_empty():
    assert pairs(b"a\tb ||| c\n") == [Pair(1, "a\tb", "c")]
    assert pairs(b" ||| text\n|||\n\ttext\n") == [Pair(1, "", "text"), Pair(2, "", ""), Pair(3, "", "text")]


def test_other_line_separators_do_not_end_a_line():
    assert pairs("a\u2028b\x0bc\x85 ||| d\n".encode()) == [Pair(1, "a\u2028b\x0bc", "d")]


def test_a_bad_line_spoils_only_itself():
    got = pairs(b"a ||| b\nno separator\n\na ||| b ||| c\ncaf\xe9 ||| b\nc ||| d\n")
    assert got[0] == Pair(1, "a", "b")
    assert got[5] == Pair(6, "c", "d")
    assert [str(x) for x in got[1:5]] == [
        "line 2: expected one '|||' or one tab between the two texts, found neither '|||' nor a tab",
        "line 3: blank; expected 'source ||| target' or source TAB target",
        "line 4: expected one '|||' or one tab between the two texts, found 2 times '|||'",
        "line 5: not UTF-8: byte 0xe9 at position 3",
    ]


def test_two_files():
    got = list(read_two_files(io.BytesIO(b"a b\nc\n\xff\n"), io.BytesIO(b"x\n\ny"), names=("s.txt", "t.txt")))
    assert got == [
        Pair(1, "a b", "x"),
        Pair(2, "c", ""),
        BadLine(3, "not UTF-8: byte 0xff at position 0 (s.txt)"),
    ]


def test_two_files_of_different_length():
    lines = read_two_files(io.BytesIO(b"a\nb\nc\n"), io.BytesIO(b"x\n"), names=("s.txt", "t.txt"))
    assert next(lines) == Pair(1, "a", "x")
    with pytest.raises(FormatError, match=r"t\.txt ends after line 1 and s\.txt goes on"):
        list(lines)


def test_reading_is_lazy():
    def endless():
        while True:
            yield b"a ||| b\n"

    class File:
        def __iter__(self):
            return endless()

    assert next(read_pairs(File())) == Pair(1, "a", "b")


@pytest.mark.parametrize(("raw", "count"), [(b"", 0), (b"a", 1), (b"a\n", 1), (b"a\nb", 2), (b"\n\n", 2)])
def test_count_lines(tmp_path, raw, count):
    path = tmp_path / "f"
    path.write_bytes(raw)
    assert count_lines(path) == count == len(pairs(raw))


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500))))
def test_pharaoh_round_trip(links):
    assert parse_pharaoh(format_pharaoh(links)) == links


@given(st.text())
def test_pharaoh_reads_or_names_the_line(text):
    if all(re.fullmatch(r"[0-9]{1,9}-[0-9]{1,9}", item) for item in text.split()):
        assert parse_pharaoh(format_pharaoh(parse_pharaoh(text))) == parse_pharaoh(text)
    else:
        with pytest.raises(FormatError, match="line 7: expected links such as 0-0"):
            parse_pharaoh(text, number=7)


@given(st.binary())
def test_any_bytes_give_one_item_for_each_line(raw):
    got = pairs(raw)
    assert len(got) == raw.count(b"\n") + (not raw.endswith(b"\n") and bool(raw))
    assert [x.line for x in got] == list(range(1, len(got) + 1))


def test_links_are_checked_against_their_sentence():
    with pytest.raises(FormatError, match="line 3: link 1-4 points outside the pair of 2 and 4 words"):
        parse_pharaoh("0-0 1-4", number=3, sizes=(2, 4))
    with pytest.raises(FormatError, match="line 2: expected links such as 0-0, received '0:0'"):
        list(read_pharaoh(io.BytesIO(b"0-0\n0:0\n")))
    with pytest.raises(FormatError, match="line 2: expected 1 lines of links, one for each pair, received more"):
        list(read_pharaoh(io.BytesIO(b"0-0\n0-0\n"), sizes=[(1, 1)]))
    with pytest.raises(FormatError, match="expected 2 lines of links, one for each pair, received 1"):
        list(read_pharaoh(io.BytesIO(b"0-0\n"), sizes=[(1, 1), (1, 1)]))
    with pytest.raises(FormatError, match="line 1: not UTF-8"):
        list(read_pharaoh(io.BytesIO(b"\xff\n")))


def test_blank_lines_are_no_links():
    assert list(read_pharaoh(io.BytesIO(b"\n0-1 1-0\n\n"))) == [[], [(0, 1), (1, 0)], []]


def test_jsonl(static):
    record = json.loads(format_jsonl(static("the cat", "a feline !"), 5))
    assert next(iter(record)) == "id"
    assert record["id"] == 5
    assert record["source"] == ["the", "cat"]
    assert [link[:2] for link in record["links"]] == [[0, 0], [1, 1]]
    assert record["unaligned"] == [[], [2]]
    assert record["status"] == "converged"
    assert set(record) == {
        "id",
        "source",
        "target",
        "links",
        "unaligned",
        "distance",
        "normalized_distance",
        "status",
        "settings",
    }
    assert json.loads(format_jsonl(BadLine(4, "blank"))) == {"id": 4, "error": "blank"}
