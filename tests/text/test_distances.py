import dataclasses
import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from sinkformer.errors import ConfigError, DTypeError, TextError
from sinkformer.text import Aligner, Words, split_words
from sinkformer.text.distances import Baseline, blocks, explain, packaged_baseline, passages, search, searching


def angles(texts):
    """Words are angles in degrees in one plane, so that 1 - cos is known; other words, such as full stops, have no vector."""

    def vector(word):
        return (
            [math.cos(math.radians(float(word))), math.sin(math.radians(float(word)))] if word.isdigit() else [0.0, 0.0]
        )

    return [torch.tensor([vector(w) for w in words], dtype=torch.float64).reshape(-1, 2) for words in texts]


@pytest.fixture(scope="module")
def plane():
    return Aligner(angles, centre=None, distortion=0.0)


def parts(e):
    return [(c.source, c.target, pytest.approx(c.cost, abs=1e-12)) for c in e.contributions]


# A distance and its parts
# --------------------------------------------------------------------------------------------------


def test_the_parts_of_a_distance(plane):
    e = explain(plane, "0 90", "60")
    assert parts(e) == [(0, None, 0.4), (1, 0, 1 - math.sqrt(3) / 2)]
    assert e.distance == pytest.approx(0.4 + 1 - math.sqrt(3) / 2, abs=1e-12)
    assert e.normalized_distance == pytest.approx(e.distance / (0.4 * 3))


def test_words_are_left_alone_where_that_is_cheaper(plane):
    assert parts(explain(plane, "0", "78")) == [(0, 0, 1 - math.cos(math.radians(78)))]
    assert parts(explain(plane, "0", "79")) == [(0, None, 0.4), (None, 0, 0.4)]
    dear = Aligner(angles, centre=None, distortion=0.0, null_price=0.5)
    assert parts(explain(dear, "0", "79")) == [(0, 0, 1 - math.cos(math.radians(79)))]


def test_the_change_of_place_is_part_of_the_cost():
    e = explain(Aligner(angles, centre=None, distortion=0.4), "0 90", "90 0")
    assert parts(e) == [(0, 1, 0.1), (1, 0, 0.1)]


def test_identical_texts(plane):
    e = explain(plane, "0 0 30 . 0", "0 0 30 . 0")
    assert (e.distance, e.normalized_distance) == (0.0, 0.0)
    assert [(c.source, c.target, c.cost) for c in e.contributions] == [(k, k, 0.0) for k in range(5)]


@pytest.mark.parametrize(("a", "b", "distance"), [("", "", 0.0), ("", "0 1", 0.8), ("0", " ", 0.4)])
def test_empty_sides(plane, a, b, distance):
    e = explain(plane, a, b)
    assert e.distance == pytest.approx(distance)
    assert sum(c.cost for c in e.contributions) == pytest.approx(distance)


words = st.lists(st.sampled_from("0 10 45 60 90 180 . zyx".split()), max_size=7)


@given(words, words, st.sampled_from([0.0, 0.2]))
def test_the_parts_sum_to_the_distance_of_the_alignment(a, b, distortion):
    aligner = Aligner(angles, centre=None, distortion=distortion)
    e, r = explain(aligner, a, b), aligner(a, b)
    assert e.distance == r.distance
    assert e.normalized_distance == r.normalized_distance
    assert math.fsum(c.cost for c in e.contributions) == pytest.approx(e.distance, abs=1e-12)
    assert sorted(c.source for c in e.contributions if c.source is not None) == list(range(len(a)))
    assert sorted(c.target for c in e.contributions if c.target is not None) == list(range(len(b)))
    costs = [c.cost for c in e.contributions]
    assert costs == sorted(costs, reverse=True)
    assert explain(aligner, b, a).distance == pytest.approx(e.distance, abs=1e-12)


def test_words_of_an_alignment_can_be_explained(plane):
    r = plane("0 90", "60")
    assert explain(plane, r.source, r.target).distance == r.distance


def test_a_method_without_null_atoms_has_no_such_explanation():
    with pytest.raises(ConfigError, match="expected an aligner whose words may stay alone, received method 'balanced'"):
        explain(Aligner(angles, method="balanced"), "0", "1")


def test_an_explanation_as_json(plane):
    record = explain(plane, "0 90", "60").to_dict()
    assert record["contributions"] == [[0, None, 0.4], [1, 0, 0.133975]]
    assert record["similarity"] is None
    assert record["no_similarity"].startswith("the baseline was measured with model 'en' (here 'angles'), ")
    assert record["settings"] == plane.settings


# The baseline
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def baseline():
    return Baseline({"model": "m", "null_price": 0.4}, (4, 16, 64), (0.9, 0.8, 0.5))


def test_the_baseline_of_texts_of_equal_length(baseline):
    assert [baseline(n, n) for n in (4, 16, 64)] == pytest.approx([0.9, 0.8, 0.5])
    assert [baseline(n, n) for n in (1, 8, 32)] == pytest.approx([0.9, 0.85, 0.65])


def test_the_baseline_of_texts_of_different_length(baseline):
    # 24 of 32 words could have partners, and a fifth of their price is saved.
    assert baseline(12, 20) == baseline(20, 12) == pytest.approx(1 - 24 / 32 * 0.2)
    assert baseline(0, 7) == baseline(7, 0) == baseline(0, 0) == 1.0


def test_similarity_is_one_minus_the_share_of_the_baseline(baseline):
    settings = {**baseline.settings, "epsilon": 3}
    assert baseline.similarity(0.0, 16, 16, settings) == 1.0
    assert baseline.similarity(0.8, 16, 16, settings) == pytest.approx(0.0)
    assert baseline.similarity(0.2, 16, 16, settings) == pytest.approx(0.75)
    assert baseline.similarity(1.0, 16, 16, settings) == pytest.approx(-0.25)


def test_no_similarity_in_silence(baseline):
    with pytest.raises(
        ConfigError, match=r"no rescaled similarity: the baseline was measured with null_price 0\.4 \(here 0\.5\)"
    ):
        baseline.similarity(0.5, 4, 4, {"model": "m", "null_price": 0.5})
    with pytest.raises(
        ConfigError, match=r"measured with model 'm' \(here None\), null_price 0\.4 \(here None\); use the norm"
    ):
        baseline.similarity(0.5, 4, 4, {})
    with pytest.raises(ConfigError, match=r"for texts of up to 64 words \(here 64 and 66\)"):
        baseline.similarity(0.5, 64, 66, baseline.settings)
    assert baseline.objection(baseline.settings, 64, 64) is None


def test_the_packaged_baseline_is_that_of_the_default_settings(english):
    packaged = packaged_baseline()
    assert packaged.objection(english.settings, 5, 5) is None
    assert len(packaged.sizes) == len(packaged.distances)
    assert list(packaged.sizes) == sorted(set(packaged.sizes))
    assert all(0.4 < x < 1 for x in packaged.distances)
    other = Aligner(english.embedder, null_price=0.5)
    e = explain(other, "the cat", "a feline")
    assert e.similarity is None
    assert e.objection == "the baseline was measured with null_price 0.4 (here 0.5)"


UNRELATED = [
    (
        "The committee will meet again on Thursday to discuss the budget .",
        "She planted three apple trees behind the old barn .",
    ),
    ("Heavy rain is expected in the north tomorrow .", "My brother plays the violin in a small orchestra ."),
    (
        "He forgot his keys and had to climb through the window .",
        "Stocks fell sharply after the bank raised interest rates .",
    ),
]
RELATED = [
    (
        "The committee will meet again on Thursday to discuss the budget .",
        "On Thursday the panel meets again to talk about the budget .",
    ),
    ("Heavy rain is expected in the north tomorrow .", "Tomorrow strong rain is forecast for the north ."),
    (
        "He forgot his keys and had to climb through the window .",
        "Having left his keys behind , he climbed in through a window .",
    ),
]


def test_unrelated_texts_are_near_zero_and_identical_ones_one(english):
    unrelated = [explain(english, a, b).similarity for a, b in UNRELATED]
    assert max(map(abs, unrelated)) < 0.15
    assert abs(np.mean(unrelated)) < 0.08
    assert min(explain(english, a, b).similarity for a, b in RELATED) > 0.35
    assert [explain(english, a, a).similarity for a, _ in RELATED] == [1.0] * 3


# Passages
# --------------------------------------------------------------------------------------------------


def test_blocks_are_paragraphs():
    text = "\n\none two\nthree\n\n  \nfour five six\n\nseven\n"
    assert list(blocks(io.StringIO(text), 3)) == [(3, "one two\nthree\n"), (7, "four five six\n"), (9, "seven\n")]
    assert list(blocks(io.StringIO(text), 4)) == [(3, "one two\nthree\n\n  \nfour five six\n"), (9, "seven\n")]
    assert list(blocks([], 1)) == list(blocks(["\n", " "], 1)) == []


def test_long_blocks_are_cut_at_blanks():
    text = "\n" + "word " * 2000 + "\nend"
    found = list(blocks(io.StringIO(text), 5))
    assert len(found) == 3
    assert {line for line, _ in found} == {2}
    assert max(len(part) for _, part in found) <= 4000
    assert "".join(part for _, part in found) == text[1:]
    assert [len(part) for _, part in blocks(["x" * 9000], 1)] == [4000, 4000, 1000]


@given(st.lists(st.sampled_from(["a", "bb", "c.", "\n", "\n\n", " \t\n", "x" * 900]), max_size=40), st.integers(1, 9))
def test_blocks_hold_every_word_once_and_know_their_lines(pieces, size):
    text = " ".join(pieces)
    found = list(blocks(io.StringIO(text), size))
    assert [w for _, part in found for w in split_words(part).words] == list(split_words(text).words)
    lines = text.split("\n")
    for line, part in found:
        first = part.lstrip().split()[0]
        assert first in " ".join(lines[line - 1 : line - 1 + part.count("\n") + 1])


def test_passages_are_whole_sentences():
    text = split_words("a b . c d e . f . g h i j k l . m")
    # The sentence of seven words is cut; the first passage that reaches the end is the last.
    assert passages(text, 3) == [(0, 3), (3, 7), (7, 15), (9, 15), (15, 17)]
    assert passages(text, 8) == [(0, 9), (3, 16), (7, 16), (9, 17)]
    assert passages(Words.from_tokens([]), 3) == []
    assert passages(Words.from_tokens(["a"]), 3) == [(0, 1)]


@given(st.lists(st.sampled_from(["a", "b", ".", "!"]), max_size=40), st.integers(1, 9))
def test_passages_cover_a_text(tokens, size):
    found = passages(Words.from_tokens(tokens), size)
    assert {k for start, end in found for k in range(start, end)} == set(range(len(tokens)))
    assert all(end - start < 3 * size for start, end in found)
    assert all(end - start >= size for start, end in found if end < len(tokens))
    assert [start for start, _ in found] == sorted({start for start, _ in found})


# Search
# --------------------------------------------------------------------------------------------------


def test_a_search_in_closed_form(plane):
    found = search(
        plane, "0 90", [("far", "200 210"), ("half", "300 0 200"), ("near", "180 180 80 10"), ("all", "270 90 0")]
    )
    assert [(hit.name, pytest.approx(hit.distance)) for hit in found.hits] == [
        ("all", 0.0),
        ("near", 2 * (1 - math.cos(math.radians(10)))),
        ("half", 0.8),
        ("far", 1.6),
    ]
    assert [hit.normalized_distance for hit in found.hits] == pytest.approx([hit.distance / 1.6 for hit in found.hits])
    assert parts(found.hits[2]) == [(1, None, 0.8), (0, 1, 0.0)]
    assert (found.documents, found.passages, found.query.words) == (4, 4, ("0", "90"))


def test_the_best_passage_is_named(plane):
    text = "200 210 220 .\n\n\n230 240 250 .\n1 2 3 ! 90 0 80 . 4 5 6 .\n\n200 200 200 .\n"
    (hit,) = search(plane, "90 0", [("file", text)], size=3).hits
    assert (hit.line, hit.text, hit.words) == (5, "90 0 80 .", ("90", "0", "80", "."))
    assert hit.to_dict()["contributions"] == [[0, 0, 0.0], [1, 1, 0.0]]


def brute(aligner, query, texts, size):
    """Distance of the best passage of every text, each matched, without nulls as a trick: one dear column a query word."""
    best = []
    for text in texts:
        found = [math.inf]
        for _, part in blocks(text.splitlines(keepends=True), size):
            w = split_words(part)
            for start, end in passages(w, size):
                x, y = (np.asarray(v) for v in angles([query, w.words[start:end]]))
                cost = np.where((x == 0).all(1)[:, None] | (y == 0).all(1), 2.0, 1 - x @ y.T)
                same = np.array([[a == b for b in w.words[start:end]] for a in query])
                cost = np.where(same, 0.0, cost)
                full = np.concatenate([cost, np.full((len(query),) * 2, 2 * aligner.null_price)], axis=1)
                found.append(full[linear_sum_assignment(full)].sum())
        best.append(min(found))
    return best


pieces = st.lists(st.sampled_from(["0", "20", "45", "90", "130", "200", ".", "zyx", "\n\n"]), max_size=25).map(" ".join)


@given(
    st.lists(st.sampled_from(["0", "45", "95", "210", "zyx"]), min_size=1, max_size=4),
    st.lists(pieces, max_size=6),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_a_search_finds_what_matching_everything_finds(plane, query, texts, top, size):
    found = search(plane, query, [(str(k), text) for k, text in enumerate(texts)], top=top, size=size)
    wanted = [(round(d, 6), k) for k, d in enumerate(brute(plane, query, texts, size)) if d < math.inf]
    assert [(round(hit.distance, 6), int(hit.name)) for hit in found.hits] == sorted(wanted)[:top]
    assert found.matched <= found.passages
    for hit in found.hits:
        assert math.fsum(c.cost for c in hit.contributions) == pytest.approx(hit.distance, abs=1e-12)
        assert sorted(c.source for c in hit.contributions) == list(range(len(query)))


def test_passages_out_of_reach_are_not_matched(plane):
    near, far = "0 90 45 . ", "200 210 220 . "
    found = search(plane, "0 90 45", [("a", near), *[(str(k), far * 50) for k in range(20)]], top=1, size=3)
    assert found.passages == 1001
    assert found.matched == 1


def test_each_block_is_encoded_once_and_documents_are_read_in_turn(monkeypatch):
    seen, opened = [], []

    def embed(texts):
        seen.extend(tuple(words) for words in texts)
        return angles(texts)

    def documents():
        for k in range(200):
            opened.append(k)
            # What is held has no more than the blocks of a chunk.
            assert k - len(seen) <= 64
            yield str(k), f"{k} {k + 1} ."

    found = search(Aligner(embed, centre=None), "7 8", documents(), top=2)
    assert [hit.name for hit in found.hits] == ["7", "6"]
    assert sorted(seen) == sorted([("7", "8"), *[(str(k), str(k + 1), ".") for k in range(200)]])
    assert opened == list(range(200))


def test_results_do_not_depend_on_what_is_encoded_together(plane, monkeypatch):
    texts = [(str(k), f"{3 * k} {5 * k} . {k} {k} ! {7 * k} ?\n\n{k} {2 * k}") for k in range(30)]
    together = search(plane, "17 50 .", texts, top=5, size=2)
    monkeypatch.setattr(searching, "_BLOCKS", 1)
    monkeypatch.setattr(searching, "_CELLS", 1)
    alone = search(plane, "17 50 .", texts, top=5, size=2)
    assert alone.hits == together.hits
    backwards = search(plane, "17 50 .", reversed(texts), top=5, size=2)
    assert [hit.distance for hit in backwards.hits] == [hit.distance for hit in together.hits]


def test_slightly_better_documents_are_not_missed(plane, monkeypatch):
    monkeypatch.setattr(searching, "_BLOCKS", 1)
    found = search(plane, "0", [(str(k), str(k)) for k in range(20, 0, -1)], top=3)
    assert [hit.name for hit in found.hits] == ["1", "2", "3"]
    found = search(plane, "0", [("a", " .\n\n".join(map(str, range(20, 0, -1))))], size=1)
    assert found.hits[0].text == "1"
    assert found.matched == 20


def test_equal_documents_keep_their_order_and_empty_ones_are_left_out(plane):
    found = search(plane, "0", [("b", "5"), ("e", " \n"), ("a", "5"), ("c", "5 ! 5")], top=2)
    assert [hit.name for hit in found.hits] == ["b", "a"]
    assert found.documents == 4
    assert search(plane, "0", []).hits == []


def test_a_document_may_come_as_lines(plane):
    lines = iter(["0 1\n", "\n", "90\n"])
    (hit,) = search(plane, "90", [("x", lines)], size=1).hits
    assert (hit.line, hit.distance) == (3, 0.0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"query": " "}, TextError, "expected a query with at least one word, received ' '"),
        ({"documents": "0 1"}, DTypeError, r"expected pairs \(name, text\), received one str"),
        ({"documents": ["0 1"]}, DTypeError, r"expected pairs \(name, text\), received str at position 0"),
        ({"top": 0}, ConfigError, "expected top as a whole number >= 1, received 0"),
        ({"size": 1.5}, ConfigError, "expected size as a whole number >= 1, received 1.5"),
    ],
)
def test_wrong_calls(plane, options, error, message):
    given = {"query": "0", "documents": [("a", "0")], **options}
    with pytest.raises(error, match=message):
        search(plane, given.pop("query"), given.pop("documents"), **given)


def test_results_cannot_be_changed(plane):
    with pytest.raises(dataclasses.FrozenInstanceError):
        explain(plane, "0", "0").distance = 3
