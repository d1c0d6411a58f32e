"""Formats of links: what each line means, what is refused and how it is told."""

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sinkformer.errors import ConfigError, FormatError
from sinkformer.metrics import score_alignments
from sinkformer.text import documents
from sinkformer.text.gold import GoldFormat, coupling_distances, read_links, score_files

FOLDER = os.environ.get("SINKFORMER_ALIGNMENT_DATA")
needs_data = pytest.mark.skipif(
    not FOLDER, reason="SINKFORMER_ALIGNMENT_DATA does not name the folder with the gold alignments"
)


def read(text, format=None, **options):
    raw = text if isinstance(text, bytes) else text.encode()
    return read_links(io.BytesIO(raw), format, name="f", **options)


MULTIMWA = "7\ta b\tN/A\tc d\tN/A\t1\t1\t0-0 1-1\t0-1\t\t\n8\tx\tN/A\ty\tN/A\t1\t1\t\t"

# Format, text, and of each pair: sure, possible, source, target, id.
EXAMPLES = [
    ("pharaoh", "0-0 2-1\n\n1p1 0?2\n", [([(0, 0), (2, 1)], []), ([], []), ([], [(0, 2), (1, 1)])]),
    ("pharaoh", "0-0:0.75 1-2:1e-3 1-1:1", [([(0, 0), (1, 1), (1, 2)], [])]),
    ("jsonl", '{"id": "k", "source": ["a"], "target": ["b", "c"], "sure": [[0, 1]], "possible": [[0, 0], [0, 1]]}',
     [([(0, 1)], [(0, 0)], ("a",), ("b", "c"), "k")]),
    ("jsonl", '{"id": 1, "source": ["a"], "target": ["b"], "links": [[0, 0, 0.9]], "status": "converged"}\n{"sure": []}',
     [([(0, 0)], [], ("a",), ("b",), 1), ([], [])]),
    ("tsv", "a b .\tc .\t0-0 2-1\t\t\t\t\t\t\t\n\tc\t\n",
     [([(0, 0), (2, 1)], [], ("a", "b", "."), ("c", ".")), ([], [], (), ("c",))]),
    ("tsv", "a b ||| c\t0-0 1p0\n17\t3-4\n", [([(0, 0)], [(1, 0)], ("a", "b"), ("c",)), ([(3, 4)], [], None, None, "17")]),
    ("multimwa", MULTIMWA, [([(0, 0), (1, 1)], [(0, 1)], ("a", "b"), ("c", "d"), "7"), ([], [], ("x",), ("y",), "8")]),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "expected"), EXAMPLES)
@pytest.mark.parametrize("given_format", [True, False])
def test_formats(format, text, expected, given_format):
    found = read(text, format if given_format else None)
    assert found.format is GoldFormat(format)
    got = [(list(p.sure), list(p.possible), p.source, p.target, p.id) for p in found.pairs]
    assert got == [(*pair, *[None] * (5 - len(pair))) for pair in expected]
    assert [p.line for p in found.pairs] == list(range(1, len(expected) + 1))


@pytest.mark.parametrize(("format", "text", "expected"), EXAMPLES)
def test_windows_files_read_the_same(format, text, expected):
    raw = b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()
    assert read(raw).pairs == read(text, format).pairs


def test_one_based():
    assert read("1-1 9p6\n", one_based=True).pairs == read("0-0 8p5\n").pairs
    record = {"source": ["a"], "target": ["b"], "sure": [[1, 1]]}
    assert read(json.dumps(record), one_based=True).pairs[0].sure == ((0, 0),)
    with pytest.raises(FormatError, match=r"^f:2: expected words counted from one, received link 0-3"):
        read("1-1\n0-3\n", one_based=True)
    with pytest.raises(FormatError, match=r"^f:1: link 2-1 points outside the pair of 1 and 1 words, counted from one"):
        read("a\tb\t2-1", one_based=True)


def test_the_sign_of_possible_links():
    assert read("0p0", possible="p").pairs[0].possible == ((0, 0),)
    with pytest.raises(FormatError, match=r"^f:1: expected possible links such as 0p0, received '0\?0'"):
        read("0?0", possible="p")
    with pytest.raises(ConfigError, match="'p' or '\\?', received '-'"):
        read("0-0", possible="-")


def test_repeated_links_count_once():
    found = read("0-0 0-0 1-1 1p1 2p2 2?2\n0-0\n")
    assert (found.pairs[0].sure, found.pairs[0].possible, found.repeated) == (((0, 0), (1, 1)), ((2, 2),), 3)
    assert read("0-0 0p1\n").repeated == 0


LINE = '{"source": ["a"], "target": ["b"], "sure": %s}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-0\n0-x\n", "f:2: expected links such as 0-0, possible ones such as 0p0 or 0?0, received '0-x'"),
        ("0--1\n", "f:1: expected links such as 0-0"),
        ("0-0-0.5\n", "f:1: expected links such as 0-0"),
        ("0-0:1.5\n", "f:1: expected a confidence in [0, 1], received '0-0:1.5'"),
        ("a b ||| c d\n", "f:1: expected links such as 0-0"),
        ("a\tb\n", "f:1: expected links such as 0-0"),
        ("a ||| b ||| c\t0-0\n", "f:1: expected one '|||' between the two texts, found 2"),
        ("a\tb\t0-0\tc\n", "f:1: expected the columns source, target, links, or text and links, received 4 columns"),
        ("a b\tc\t0-0\n\na\tb\t0-0", "f:2: expected the columns source, target, links, or text and links, received 1 columns"),
        ("a b\tc\t0-0\na\tb\t0-1\n", "f:2: link 0-1 points outside the pair of 1 and 1 words, counted from zero; check that "
         "links and texts use the same tokens; are they counted from one?"),
        ("a b\tc\t0-5\n", "f:1: link 0-5 points outside the pair of 2 and 1 words, counted from zero; check that links and "
         "texts use the same tokens"),
        (MULTIMWA + "\n9\ta", "f:3: expected at least 8 columns, source in 2, target in 4, links in 8, received 2"),
        ("{}\n", "f:1: expected a list of links under 'sure' (gold), or under 'links' (an aligner's)"),
        ("{\n", "f:1: expected a JSON object, received {: "),
        (LINE % "[]" + "\n\n", "f:2: expected a JSON object, received : "),
        (LINE % "[]" + "\n[1]\n", "f:2: expected a JSON object, received [1]"),
        (LINE % "3", "f:1: expected a list of links under 'sure', received 3"),
        (LINE % "[[0, 0, 1]]", "f:1: expected links such as [0, 0] under 'sure', received [0, 0, 1]"),
        (LINE % "[[0, -1]]", "f:1: expected links such as [0, 0] under 'sure', received [0, -1]"),
        (LINE % "[[0, true]]", "f:1: expected links such as [0, 0] under 'sure', received [0, true]"),
        (LINE % "[[0, 1]]", "f:1: link 0-1 points outside the pair of 1 and 1 words"),
        ('{"links": [[0, 0, NaN]]}', "f:1: expected links such as [0, 0] under 'links', received [0, 0, NaN]"),
        ('{"source": "a", "target": ["b"], "sure": []}', "f:1: expected a list of words under 'source', received \"a\""),
        ('{"source": ["\\ud800"], "target": [], "sure": []}', "f:1: expected valid Unicode, received a lone surrogate"),
        ("{" + '"a":[' * 100_000, "f:1: expected a JSON object"),
        (b"0-0\n\xff\n", "f:2: not UTF-8: byte 0xff at position 0"),
        ("", "f: expected a line of links for each pair, received an empty file"),
    ],
)  # fmt: skip
def test_what_is_refused(text, message):
    with pytest.raises(FormatError) as caught:
        read(text)
    assert str(caught.value).startswith(message)


def test_unknown_format():
    with pytest.raises(ConfigError, match="pharaoh, jsonl, tsv, multimwa, blinker, received 'talp'"):
        read("0-0", "talp")


def test_a_path(tmp_path):
    path = tmp_path / "gold.talp"
    path.write_text("0-0\n1-\n")
    with pytest.raises(FormatError) as caught:
        read_links(path)
    assert str(caught.value).startswith(f"{path}:2: expected links")


@given(st.lists(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.booleans())), min_size=1))
def test_written_links_are_read_back(pairs):
    text = "".join(" ".join(f"{i}{'-' if sure else 'p'}{j}" for i, j, sure in pair) + "\n" for pair in pairs)
    found = read(text).pairs
    for pair, wanted in zip(found, pairs, strict=True):
        sure = {(i, j) for i, j, is_sure in wanted if is_sure}
        assert set(pair.sure) == sure
        assert set(pair.possible) == {(i, j) for i, j, is_sure in wanted if not is_sure} - sure


# Two files ---------------------------------------------------------------------------------------------------------------


def test_score_files():
    gold = read("a b\tc d\t0-0 1p1\nx\ty\t\n")
    scores = score_files(gold, read("0-0 1-1\n\n"))
    assert (scores.micro.f1, scores.micro.aer, scores.total_f1) == (1, 0, 1)
    assert scores.sizes == ((2, 2), (1, 1))
    scores = score_files(gold, read("0-0 1-1\n\n"), ignore_possible=True)
    assert scores.micro.precision == 0.5
    # A possible link of a system is a link.
    assert score_files(gold, read("0p0\n\n")).micro.gold_hits == 1


def test_words_of_either_file_count():
    predicted = read('{"id": 1, "source": ["a"], "target": ["b", "c"], "links": []}')
    assert score_files(read("0-1"), predicted).sizes == ((1, 2),)
    assert score_files(read("0-1"), read("0-0")).sizes is None
    with pytest.raises(FormatError, match=r"^f:1: link 1-0 points outside the pair of 1 and 2 words"):
        score_files(read("1-0"), predicted)
    # The aligner could not read the line: no links, and no words.
    failed = read('{"id": 1, "error": "blank"}')
    assert score_files(read("a\tb\t0-0"), failed).micro.predicted == 0
    assert score_files(read("0-0"), failed).sizes is None
    with pytest.raises(FormatError, match="f:1: expected gold links, received the error 'blank'"):
        score_files(failed, read("0-0"))


def test_files_that_do_not_belong_together():
    with pytest.raises(FormatError, match=r"but f has 2 and f has 1; check that they belong together"):
        score_files(read("0-0\n\n"), read("0-0\n"))
    with pytest.raises(FormatError, match=r"source of f:1 to have the 2 words of f:1, received 1"):
        score_files(read("a b\tc\t"), read("a\tc\t"))
    with pytest.raises(FormatError, match=r"target of f:1 .* but word 0 is 'd', not 'c'"):
        score_files(read("a\tc\t"), read("a\td\t"))
    assert score_files(read("A\tc\t"), read("a\tC\t")).micro.f1 == 1


# Gold of others ----------------------------------------------------------------------------------------------------------

# Sure links, possible links, percent of words without a link, counted when the data were converted.
COUNTS = {
    "edinburgh/dev": (3119, 0, 13.2),
    "mtref/dev": (13693, 2072, 13.9),
    "msr_rte/dev": (1329, 93, 66.4),
    "alibi_fren/dev": (3382, 5503, 8.8),
}


@needs_data
@pytest.mark.parametrize("name", COUNTS)
def test_counts(name):
    gold = read_links(Path(str(FOLDER)) / f"{name}.jsonl")
    micro = score_files(gold, gold).micro
    share = 100 * micro.nulls.gold / micro.nulls.words
    assert (micro.sure, micro.gold - micro.sure, round(share, 1)) == COUNTS[name]
    assert (micro.aer, micro.f1) == (0, 1)


@needs_data
def test_mutual_argmax_on_edinburgh(english):
    """F1, P, R, AER, macro F1 and total F1 that other code measured for the same links, in percent."""
    records = read_links(Path(str(FOLDER)) / "edinburgh" / "dev.jsonl").pairs[71:]
    texts = [list(side) for record in records for side in (record.source, record.target)]
    vectors = [documents.unit_vectors(torch.as_tensor(v), english.centre) for v in english.embedder.embed(texts)]
    predicted = []
    for record, x, y in zip(records, vectors[::2], vectors[1::2], strict=True):
        cost = documents.word_costs(record.source, record.target, x, y, 0.2).numpy()
        forward, back = cost.argmin(1), cost.argmin(0)
        predicted.append([(i, int(j)) for i, j in enumerate(forward) if back[j] == i])
    found = score_alignments(
        predicted, [r.sure for r in records], [r.possible for r in records], sizes=[r.sizes for r in records]
    )
    micro = found.micro
    shares = [micro.f1, micro.precision, micro.recall_gold, micro.aer, found.macro_f1, found.total_f1]
    np.testing.assert_allclose(100 * np.array(shares), [84.8, 94.9, 76.6, 15.2, 86.5, 80.8], atol=0.25)


# Blinker ---------------------------------------------------------------------------------------------------------------


def test_blinker_groups_its_lines_by_pair():
    found = read("1 1 1\n1 2 3\n3 1 2\n")
    assert found.format is GoldFormat.blinker
    assert [pair.sure for pair in found.pairs] == [((0, 0), (1, 2)), (), ((0, 1),)]
    assert [pair.id for pair in found.pairs] == [1, 2, 3]
    assert (found.where(1), found.where(2)) == ("f: pair 2", "f:3")


def test_blinker_marks_possible_links_and_null():
    found = read("0001 1 1 S\n0001 2 2 P 0.5\n0001 1 1 P\n0001 0 4\n", "blinker")
    assert (found.pairs[0].sure, found.pairs[0].possible, found.repeated) == (((0, 0),), ((1, 1),), 1)
    same = read("0-0 1p1\n")
    assert score_files(found, same).micro.f1 == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 1 1\n1 1\n", "f:2: expected 'pair source target', counted from one, and perhaps S or P, received '1 1'"),
        ("0 1 1\n", "f:1: expected 'pair source target'"),
        ("1 1 1\n1 x 1\n", "f:2: expected 'pair source target'"),
        ("2 1 1\n1 1 1\n", "f:2: expected pairs in order, received pair 1 after 2"),
        ("1 1 1\n999999999 1 1\n", "f:2: expected pairs in order, received pair 999999999 after 1"),
    ],
)
def test_what_is_no_blinker(text, message):
    with pytest.raises(FormatError) as caught:
        read(text, "blinker")
    assert str(caught.value).startswith(message)


# Couplings -------------------------------------------------------------------------------------------------------------

PAIR = '{"source": ["a", "b"], "target": ["c"], "links": [[0, 0]], "coupling": %s}\n'


def test_the_distance_of_couplings():
    gold = read('{"source": ["a", "b"], "target": ["c"], "sure": [[0, 0]]}\n' * 2)
    # The gold coupling has masses 1/2 on (a, c) and (b, null): the first is right, the second takes half of a and c apart.
    found = read(PAIR % "[[1, 0], [0, 1], [0, 0]]" + PAIR % "[[0.5, 0.5], [0, 1], [0.5, 0]]")
    distances = coupling_distances(gold, found)
    assert distances.tv == pytest.approx((0, 0.4))
    # (a, c) 0.2, (a, null) 0.2, (b, null) 0.4, (null, c) 0.2: what moves changes one word only.
    assert distances.w1 == pytest.approx((0, 0.4))
    assert str(distances) == "couplings: TV 0.200  W1 0.200  pairs 2"
    assert coupling_distances(gold, read("0-0\n0-0\n")) is None


@pytest.mark.parametrize(
    ("coupling", "message"),
    [
        (
            "[[1, 0], [0, 1]]",
            "f:1: expected 3 rows of 2 numbers under 'coupling', null last, received [[1, 0], [0, 1]]",
        ),
        ("[[1, 0], [0]]", "f:1: expected 3 rows of 2 numbers"),
        ('"x"', "f:1: expected 3 rows of 2 numbers"),
        ("[[1, 0], [0, -1], [0, 0]]", "f:1: expected shares of a word's mass under 'coupling', from 0 to 1e+06"),
        ("[[1, 0], [0, NaN], [0, 0]]", "f:1: expected shares"),
        ("[[1, 0], [0, 1e308], [0, 0]]", "f:1: expected shares"),
    ],
)
def test_what_is_no_coupling(coupling, message):
    with pytest.raises(FormatError) as caught:
        read(PAIR % coupling)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("coupling", "message"),
    [
        ("[[true, 0], [0, 1], [0, 0]]", "f:1: expected numbers under 'coupling', received true or false"),
        ("[[1e308, 0], [0, 1], [0, 0]]", "f:1: expected shares of a word's mass"),
        ("[[7, 0], [0, 7], [0, 0]]", "f:1: expected shares of a word's mass under 'coupling', in all about 3"),
    ],
)
def test_shares_beyond_the_mass_of_words(coupling, message):
    with pytest.raises(FormatError) as caught:
        read(PAIR % coupling)
    assert str(caught.value).startswith(message)


def test_errors_and_pairs_without_words_have_distances():
    gold = read('{"source": ["a", "b"], "target": ["c"], "sure": [[0, 0]]}\n{"sure": []}\n{"sure": []}\n')
    empty = '{"source": [], "target": [], "links": [], "coupling": [[0.0]]}\n'
    found = read(PAIR % "[[1, 0], [0, 1], [0, 0]]" + '{"id": 2, "error": "blank"}\n' + empty)
    assert coupling_distances(gold, found).tv == pytest.approx((0, 0))


def test_the_last_pairs_of_blinker_may_have_no_lines():
    gold, found = read("1 1 1\n", "blinker"), read(PAIR % "[[1, 0], [0, 1], [0, 0]]" * 2)
    assert score_files(gold, found).micro.precision == 0.5
    assert len(coupling_distances(gold, found).tv) == 2
    with pytest.raises(FormatError, match="same number of pairs"):
        score_files(read("3 1 1\n", "blinker"), found)


def test_a_coupling_in_every_line_or_in_none():
    gold = read('{"source": ["a", "b"], "target": ["c"], "sure": [[0, 0]]}\n' * 2)
    with pytest.raises(
        FormatError, match=r"^f:2: expected a coupling in every line.*; align all of them with --couplings"
    ):
        coupling_distances(gold, read(PAIR % "[[1, 0], [0, 1], [0, 0]]" + '{"links": []}\n'))
    empty = read(PAIR % "[[0, 0], [0, 0], [0, 0]]" * 2)
    with pytest.raises(FormatError, match=r"^f:1: expected mass on words"):
        coupling_distances(gold, empty)


def test_lines_with_an_error_are_left_out_of_the_distance():
    gold = read('{"source": ["a", "b"], "target": ["c"], "sure": [[0, 0]]}\n' * 2)
    found = read('{"id": 1, "error": "no pair"}\n' + PAIR % "[[1, 0], [0, 1], [0, 0]]")
    assert coupling_distances(gold, found).tv == (0.0,)


def test_the_last_pairs_of_a_blinker_file_may_have_no_links():
    gold, found = read("1 1 1\n1 2 2\n2 1 1\n", "blinker"), read("0-0 1-1\n0-0\n\n")
    assert score_files(gold, found).micro.f1 == 1
    assert score_files(found, gold).micro.f1 == 1
    with pytest.raises(FormatError, match="same number of pairs, but f has 2 and f has 1"):
        score_files(gold, read("0-0\n"))
