import json
import threading
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkformer.couplings import Coupling
from sinkformer.errors import (
    ConfigError,
    ConvergenceWarning,
    DTypeError,
    NonFiniteError,
    ShapeError,
    TextError,
    TextWarning,
)
from sinkformer.solutions import Status
from sinkformer.text import Aligner, BadLine, Pair, Words, aligners, choice, couple
from sinkformer.text.embedders import CallableEmbedder

METHODS = ["partial", "balanced", "unbalanced", "argmax", "itermax"]
WORDS = ["the", "a", "cat", "feline", "dog", "sat", "rested", "on", "mat", "rug", ".", "king", "queen"]


def diagonal(r):
    return [(i, i) for i in range(len(r.source))]


# What a result says ---------------------------------------------------------------------------------------------------


def test_a_pair(static):
    r = static("the cat sat on the mat", "a feline rested on the rug !")
    assert str(r) == "0-0 1-1 2-2 3-3 4-4 5-5"
    assert r.unaligned == ([], [6])
    assert len(r.confidence) == 6
    assert all(0.3 <= c <= 1 for c in r.confidence)
    assert r.source.spans[1] == (4, 7)
    assert r.converged
    assert r.status is Status.CONVERGED


@given(
    st.lists(st.sampled_from(WORDS), max_size=9), st.lists(st.sampled_from(WORDS), max_size=9), st.sampled_from(METHODS)
)
@settings(max_examples=100, deadline=None)
def test_laws_of_every_result(static, a, b, method):
    r = Aligner(static.embedder, method=method)(a, b)
    n, m = len(a), len(b)
    null = method != "balanced"
    completed = null or not n or not m
    assert r.plan.shape == (n, m)
    assert r.coupling.shape == (n + completed, m + completed)
    assert r.converged
    assert 0 <= r.mass <= 1 + 1e-9
    assert all(0 <= c <= 1 for c in r.confidence)
    if method != "unbalanced":
        # An exact coupling: every word has its mass, on words and on the null atom.
        full = r.coupling.to_dense()
        torch.testing.assert_close(full.sum(1), r.coupling.source.weights, atol=1e-7, rtol=0)
        torch.testing.assert_close(full.sum(0), r.coupling.target.weights, atol=1e-7, rtol=0)
    if n and m and method != "unbalanced":
        share = 1 / (n + m) if null else 1 / n
        torch.testing.assert_close(r.plan.sum(1) + r.null_source, torch.full((n,), share).double(), atol=1e-7, rtol=0)
    assert len(r.links) == len(r.confidence) == len(set(r.links))
    assert sorted(r.links) == r.links
    for side, size in ((0, n), (1, m)):
        linked = {link[side] for link in r.links}
        assert sorted(linked | set(r.unaligned[side])) == list(range(size))
        assert not linked & set(r.unaligned[side])
    assert 0 <= r.normalized_distance <= 1
    assert r.distance >= 0
    assert json.loads(json.dumps(r.to_dict()))["distance"] == pytest.approx(r.distance, abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
@given(st.lists(st.sampled_from(WORDS), max_size=9), st.lists(st.sampled_from(WORDS), max_size=9))
@settings(max_examples=30, deadline=None)
def test_exchanging_the_texts_transposes_the_result(static, method, a, b):
    aligner = Aligner(static.embedder, method=method)
    r, s = aligner(a, b), aligner(b, a)
    assert r.distance == pytest.approx(s.distance, abs=1e-9)
    torch.testing.assert_close(r.plan, s.plan.mT, atol=1e-7, rtol=0)
    assert r.unaligned[0] == s.unaligned[1] or len(set(a)) < len(a) or len(set(b)) < len(b)


def test_confidence_is_absolute(static):
    # Unrelated words: min-max scaling would make the best of them 1.
    r = static("king", "mat")
    assert r.links == []
    assert float(r.plan.sum()) < 0.2
    assert static("king", "king").confidence[0] > 0.9


# Identical texts ------------------------------------------------------------------------------------------------------

REPEATS = [
    "a a a a a a a a",
    "the cat and the dog and the cat and the dog",
    "buffalo buffalo Buffalo buffalo buffalo buffalo Buffalo buffalo",
    "x",
    "🙂 🙃 🙂 日本 日本",
]


@pytest.mark.parametrize("distortion", [0.0, 0.2])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("text", REPEATS)
def test_a_text_with_itself_static(static, text, method, distortion):
    r = Aligner(static.embedder, method=method, distortion=distortion)(text, text)
    assert r.links == diagonal(r)
    assert r.distance == 0.0
    assert r.normalized_distance == 0.0


@pytest.mark.filterwarnings("ignore::sinkformer.errors.TextWarning")
@pytest.mark.parametrize("text", [*REPEATS, "the cat sat on the mat and the dog sat on the rug . " * 25], ids=range(6))
def test_a_text_with_itself_english(english, text):
    r = english(text, text)
    assert r.links == diagonal(r)
    assert r.distance == 0.0
    assert r.unaligned == ([], [])


@given(st.lists(st.sampled_from(WORDS), max_size=40), st.sampled_from(METHODS))
@settings(max_examples=60, deadline=None)
def test_any_text_with_itself(static, words, method):
    for distortion in (0.0, 0.2):
        r = Aligner(static.embedder, method=method, distortion=distortion)(words, words)
        assert r.links == diagonal(r)
        assert r.distance == 0.0


def test_three_hundred_words_with_many_repeats(static):
    words = [WORDS[k] for k in np.random.default_rng(0).integers(0, 4, 300)]
    r = static(words, words)
    assert r.links == diagonal(r)
    assert r.distance == 0.0


# Empty sides ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("empty", ["", " \t\n", "\u200b"])
def test_an_empty_side(static, empty, method):
    aligner = Aligner(static.embedder, method=method, null_price=0.3)
    r = aligner(empty, "the cat sat")
    assert str(r) == ""
    assert r.plan.shape == (0, 3)
    assert r.unaligned == ([], [0, 1, 2])
    assert r.distance == pytest.approx(3 * 0.3)
    torch.testing.assert_close(r.null_target, torch.full((3,), 1 / 3).double())
    assert r.normalized_distance == 1.0
    assert r.converged
    assert aligner("the cat", empty).plan.shape == (2, 0)
    both = aligner(empty, empty)
    assert both.distance == both.normalized_distance == 0.0
    assert both.plan.shape == (0, 0)


def test_an_empty_side_in_a_batch_and_a_callable_without_width(static):
    aligner = Aligner(lambda texts: [[[1.0, 0.5]] * len(w) if w else [] for w in texts])
    got = list(aligner.align([("", ""), ("a", ""), ("a b", "a b"), ("", "b")]))
    assert [str(r) for r in got] == ["", "", "0-0 1-1", ""]


@pytest.mark.parametrize(("a", "b"), [("cat", "cat"), ("cat", "the feline sat"), ("the feline sat", "cat")])
def test_one_word(static, a, b):
    r = static(a, b)
    k = 1 if " " in b else 0
    assert r.links == [(1, 0) if " " in a else (0, k)]


# Nulls ----------------------------------------------------------------------------------------------------------------


def test_a_second_sentence_without_a_counterpart_stays_alone(english):
    r = english("I will meet you there . It is cool today .", "I will meet you there .")
    assert r.links[:5] == [(k, k) for k in range(5)]
    assert {6, 7, 8, 9} <= set(r.unaligned[0])
    assert r.unaligned[1] == []
    # Most of the mass of these words is on the null atom; without it all of it goes to words it does not belong to.
    assert (r.plan.sum(1) * 17)[6:10].max() < 0.4
    forced = Aligner(english.embedder, method="balanced")(r.source, r.target)
    assert (forced.plan.sum(1) * 11)[6:10].min() > 0.99


def test_unrelated_texts_are_far_and_paraphrases_near(english):
    near = english("The cat sat on the mat.", "A cat was sitting on the mat.").normalized_distance
    far = english("The cat sat on the mat.", "Interest rates rose sharply in July!").normalized_distance
    assert near < 0.45 < 0.7 < far


def test_texts_without_nulls_use_all_their_mass(static):
    r = Aligner(static.embedder, method="balanced")("the cat", "the cat sat")
    assert r.mass == pytest.approx(1.0)
    assert not r.null_source.any()
    assert r.coupling.shape == (2, 3)


# Unknown words --------------------------------------------------------------------------------------------------------


def test_unknown_words_link_by_spelling_only(static):
    r = static("the zyx cat qqq", "a feline zyx www")
    assert (1, 2) in r.links
    assert 3 in r.unaligned[0]
    assert 3 in r.unaligned[1]


def test_composed_and_decomposed_spelling_link(static, english):
    assert str(static(["caf\u00e9x"], ["cafe\u0301x"])) == "0-0"
    r = english("a café here", "a cafe\u0301 here")
    assert r.links == [(0, 0), (1, 1), (2, 2)]
    assert r.target.words[1] == "cafe\u0301"


def test_emoji_do_not_align_with_each_other(english):
    with pytest.warns(TextWarning, match="pass a multilingual model"):
        r = english("🙂 🙃 cat", "🙃 🙁 cat")
    assert r.links == [(1, 0), (2, 2)]


# Inputs ---------------------------------------------------------------------------------------------------------------


def test_given_tokens_are_never_split(static):
    r = static(["the cat", "don't", ""], ["the cat", "-", ""])
    assert len(r.source) == len(r.target) == 3
    assert (0, 0) in r.links
    assert (2, 2) in r.links


def test_a_tokenizer_is_used_for_texts_only(static):
    aligner = Aligner(static.embedder, tokenizer=lambda text: text.split("_"))
    r = aligner("the_cat", "a_feline")
    assert r.source.words == ("the", "cat")
    assert r.settings["tokenizer"].endswith("<lambda>")
    assert aligner(["the_cat"], ["x"]).source.words == ("the_cat",)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ("a b", ["a", "b"], "expected two texts or two lists of tokens, received one of each"),
        (["a"], "a", "expected two texts or two lists of tokens, received one of each"),
        (3, 4, "expected the source as a str or a list of tokens, received int"),
        (b"a", b"b", "expected the source as a str or a list of tokens, received bytes"),
        (["a"], [["b"]], "expected every token to be a str, received list at position 0"),
        (["a", "b"], {"a"}, "expected the target as a str or a list of tokens, received set"),
    ],
)
def test_wrong_kinds_of_text(static, a, b, message):
    with pytest.raises(DTypeError, match=message) as caught:
        static(a, b)
    assert isinstance(caught.value, TypeError)


def test_texts_beyond_the_cap(static):
    short = Aligner(static.embedder, max_words=3)
    assert len(short("the cat sat", "a b c").source) == 3
    message = r"the target text has 5 words, more than max_words=3; the first word beyond the limit is 'on' \(word 3"
    with pytest.raises(TextError, match=message):
        short("the cat", "the cat sat on mat")
    with pytest.raises(TextError, match="pair 1: the source text has 4 words"):
        list(short.align([("a", "b"), ("a a a a", "b")]))


def test_six_hundred_words(english):
    english = Aligner(english.embedder)  # by cost alone: every word has 44 copies
    words = "the quick brown fox jumps over the lazy dog near the old river bank".split() * 45
    r = english(words, words[14:])
    assert len(r.source) == 630
    assert len(r.unaligned[0]) == 14
    assert max(i for i, _ in r.links) >= 615


# Options --------------------------------------------------------------------------------------------------------------

BASE = "the cat sat on the mat", "on the rug a dog rested"


@pytest.mark.parametrize(
    "options",
    [
        {"method": "balanced"},
        {"method": "unbalanced"},
        {"method": "argmax"},
        {"null_price": 0.1},
        {"epsilon": 0.5},
        {"distortion": 3.0},
        {"centre": np.full(32, 0.5)},
        {"centre": torch.full((32,), 0.5)},
    ],
    ids=lambda o: f"{next(iter(o))}={type(next(iter(o.values()))).__name__}",
)
def test_every_option_changes_the_coupling_and_the_hash(static, options):
    r, s = static(*BASE), Aligner(static.embedder, **options)(*BASE)
    assert r.plan.shape != s.plan.shape or not torch.allclose(r.plan, s.plan, atol=1e-4)
    assert r.settings_hash != s.settings_hash


def test_threshold_layer_and_tokenizer_enter_the_hash_and_the_links(static, english):
    r, s = english(*BASE), Aligner("en", threshold=0.999)(*BASE)
    assert len(s.links) < len(r.links)
    assert r.settings_hash != s.settings_hash
    three, six = [Aligner(layer=layer, method="partial")(*BASE) for layer in (3, 6)]
    assert three.settings_hash != six.settings_hash
    assert not torch.allclose(three.plan, six.plan, atol=1e-3)
    # What is learned reads layers of its own; the distance is measured in this one.
    other = Aligner(layer=6)(*BASE)
    assert other.settings_hash != r.settings_hash
    assert other.links == r.links
    assert other.distance == six.distance


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"epsilon": 0}, ConfigError, r"expected epsilon as a finite number >= 1e-06 and <= 1e\+06, received 0"),
        ({"epsilon": 1e-7}, ConfigError, "expected epsilon"),
        ({"epsilon": float("nan")}, ConfigError, "expected epsilon"),
        ({"epsilon": float("inf")}, ConfigError, "expected epsilon"),
        ({"epsilon": 10**400}, ConfigError, "expected epsilon"),
        ({"epsilon": True}, ConfigError, "expected epsilon"),
        ({"null_price": -1}, ConfigError, r"expected null_price as a finite number > 0 and <= 1e\+06, received -1"),
        ({"null_price": 1e308}, ConfigError, "expected null_price"),
        (
            {"distortion": "0.1"},
            ConfigError,
            r"expected distortion as a finite number >= 0 and <= 1e\+06, received '0.1'",
        ),
        ({"distortion": 1e308}, ConfigError, "expected distortion"),
        ({"threshold": 0}, ConfigError, "expected threshold as a finite number > 0 and <= 1, received 0"),
        ({"threshold": 1.5}, ConfigError, "expected threshold"),
        ({"max_words": 0}, ConfigError, "expected max_words as a whole number >= 1, received 0"),
        ({"batch_size": 2.0}, ConfigError, r"expected batch_size as a whole number >= 1, received 2\.0"),
        ({"tokenizer": "nltk"}, DTypeError, "expected tokenizer to be a callable"),
        ({"centre": "mean"}, ConfigError, "expected centre to be 'auto', None or a vector, received 'mean'"),
        ({"centre": [[1.0]]}, ShapeError, r"expected centre as one vector of shape \(d,\), received shape \(1, 1\)"),
        ({"centre": [float("inf")]}, NonFiniteError, "expected a finite centre"),
    ],
)
def test_options_outside_their_range(table, options, error, message):
    with pytest.raises(error, match=message):
        Aligner(table, **options)


@pytest.mark.parametrize("method", ["partial", "balanced", "unbalanced"])
@pytest.mark.parametrize(
    "options", [{"null_price": 1e6}, {"null_price": 1e-300}, {"distortion": 1e6}, {"epsilon": 1e-6}, {"epsilon": 1e6}]
)
def test_the_ends_of_the_ranges_give_finite_results(static, options, method):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        r = Aligner(static.embedder, method=method, **options)(*BASE)
    assert torch.isfinite(r.plan).all()
    assert 0 <= r.normalized_distance <= 1


def test_options_may_be_numbers_of_numpy(static):
    options = {
        "epsilon": np.float32(0.1),
        "null_price": np.float64(0.4),
        "threshold": np.float32(0.5),
        "distortion": np.int64(1),
    }
    r = Aligner(static.embedder, **options)(*BASE)
    assert r.settings["epsilon"] == float(np.float32(0.1))
    json.dumps(r.settings)


@pytest.mark.parametrize("factor", [1e-20, 1e-300, 1e300, 1e306])
def test_the_scale_of_the_vectors_changes_nothing(static, factor):
    scaled = Aligner(lambda texts: [x * factor for x in static.embedder.embed(texts)])
    for a, b in (BASE, ("the king zyx", "a queen zyx")):
        r, s = static(a, b), scaled(a, b)
        assert r.links == s.links
        assert r.distance == pytest.approx(s.distance, abs=1e-9)
        torch.testing.assert_close(r.plan, s.plan, atol=1e-9, rtol=0)


def test_a_centre_of_another_width(static):
    with pytest.raises(ShapeError, match="expected a centre of 32 coordinates, as the word vectors, received 3"):
        Aligner(static.embedder, centre=[1.0, 2.0, 3.0])(*BASE)


@pytest.mark.parametrize("epsilon", [1e-3, 1e-2, 1.0, 10.0])
def test_any_epsilon_gives_finite_plans(static, epsilon):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        r = Aligner(static.embedder, epsilon=epsilon)(*BASE)
    assert torch.isfinite(r.plan).all()
    assert r.converged in (True, False)


def test_centring_on_own_texts(static):
    shifted = CallableEmbedder(lambda texts: [x + 5.0 * (x != 0) for x in static.embedder.function(texts)], "shifted")
    plain = Aligner(shifted)
    fitted = plain.fit_centre(["the cat sat on the mat .", "a king and a queen", ["no", "home"]])
    assert plain("king", "mat").links == [(0, 0)]  # all words look alike
    assert fitted("king", "mat").links == []
    assert plain.centre is None
    assert fitted.settings["centre"] != plain.settings["centre"]
    with pytest.raises(DTypeError, match="expected an iterable of texts, received one str; put it in a list"):
        plain.fit_centre("a text")
    with pytest.raises(TextError, match="expected texts with at least one word the model knows"):
        plain.fit_centre(["zyx"])


def test_couple_takes_the_options_and_keeps_the_model(table, english, monkeypatch):
    assert str(couple("the cat", "a feline", model=table)) == "0-0 1-1"
    assert couple("king", "mat", model=table, method="balanced").links == [(0, 0)]
    with pytest.raises(TypeError, match="temperature"):
        couple("a", "b", model=table, temperature=1)
    loads = []
    monkeypatch.setattr(choice, "as_embedder", lambda model, **k: loads.append(model) or english.embedder)
    aligners._loaded.cache_clear()
    for options in ({}, {"threshold": 0.5}, {"null_price": 0.3}):
        couple("a", "b", method="partial", **options)
    couple("a", "b", method="argmax")
    aligners._loaded.cache_clear()
    assert [model for model in loads if isinstance(model, str)] == ["en"]


# Many pairs -----------------------------------------------------------------------------------------------------------


def random_pairs(k, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda: [WORDS[w] for w in rng.integers(0, len(WORDS), rng.integers(0, 12))]  # noqa: E731
    return [(draw(), draw()) for _ in range(k)]


def close(r, s):
    assert r.source == s.source
    assert r.target == s.target
    assert r.links == s.links
    assert r.confidence == pytest.approx(s.confidence, abs=1e-5)
    assert r.distance == pytest.approx(s.distance, abs=1e-5)
    torch.testing.assert_close(r.plan, s.plan, atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("batch_size", "window"), [(1, 1), (3, 7), (64, 1000)])
def test_results_do_not_depend_on_batching(static, batch_size, window, method):
    pairs = random_pairs(40)
    single = Aligner(static.embedder, method=method)
    want = [single(a, b) for a, b in pairs]
    got = list(Aligner(static.embedder, method=method, batch_size=batch_size).align(pairs, window=window))
    assert len(got) == 40
    for r, s in zip(got, want, strict=True):
        close(r, s)


def test_results_of_the_english_model_do_not_depend_on_batching_order_or_threads(english):
    texts = ["The cat sat on the mat.", "A feline rested!", "It is cool today, isn't it?", "", "dogs run " * 30, "Yes."]
    pairs = [(a, b) for a in texts for b in texts[::-1]]
    want = list(english.align(pairs))
    alone = Aligner(batch_size=1)
    for k in (0, 3, 9, 25, 28):
        close(alone(*pairs[k]), want[k])
    order = np.random.default_rng(1).permutation(len(pairs))
    for k, r in zip(order, english.align([pairs[k] for k in order], window=5), strict=True):
        close(r, want[k])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        close(english(*pairs[9]), want[9])
    finally:
        torch.set_num_threads(threads)


def test_align_is_lazy_and_bounded(static):
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield "the cat", "a feline"

    results = static.align(endless(), window=8)
    assert not taken
    for _ in range(20):
        next(results)
    assert len(taken) == 24


def test_align_keeps_the_place_of_what_cannot_be_aligned(static):
    short = Aligner(static.embedder, max_words=2)
    items = [
        Pair(1, "the cat", "a feline"),
        BadLine(2, "blank"),
        Pair(3, "a a a", "b"),
        Pair(4, "caf\udce9", "b"),
        Pair(5, "", "x"),
    ]
    got = list(short.align(items))
    assert str(got[0]) == "0-0 1-1"
    assert got[1] is items[1]
    assert str(got[2]).startswith("line 3: the source text has 3 words")
    assert str(got[3]).startswith("line 4: expected valid Unicode")
    assert str(got[4]) == ""


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ("two words", "expected an iterable of pairs of texts, received one str; for two texts call the aligner"),
        (Words.from_tokens(["a"]), "received one Words"),
        (5, "expected an iterable of pairs of texts, received one int"),
        (None, "expected an iterable of pairs of texts, received one NoneType"),
        (["ab", "cd"], r"expected a pair \(source, target\) at position 0, received str 'ab'"),
        ([("a", "b"), ("a", "b", "c")], "at position 1, received tuple"),
        ([("a", ["b"])], "pair 0: expected two texts or two lists of tokens"),
    ],
)
def test_what_is_no_list_of_pairs(static, pairs, message):
    with pytest.raises(DTypeError, match=message):
        list(static.align(pairs))


def test_what_is_no_iterable_is_refused_at_the_call(static):
    with pytest.raises(DTypeError, match="expected an iterable of pairs"):
        static.align(5)


def test_no_pairs_at_all(static):
    assert list(static.align([])) == []
    with pytest.raises(ConfigError, match="expected window as a whole number >= 1, received 0"):
        static.align([], window=0)


def test_a_coupling_that_does_not_converge_is_reported(static, monkeypatch):
    solve = Coupling.solve
    monkeypatch.setattr(Coupling, "solve", staticmethod(lambda *a, **k: solve(*a, **k, max_iterations=2)))
    with pytest.warns(
        ConvergenceWarning, match="1 of 1 couplings did not converge; the first is 'the cat sat on the mat'"
    ):
        r = static(*BASE)
    assert not r.converged
    assert r.to_dict()["status"] == "max_iterations"


@pytest.mark.parametrize("name", ["static", "english"])
def test_threads_may_share_an_aligner(request, name):
    aligner = request.getfixturevalue(name)
    results = {}
    pairs = random_pairs(6, seed=3)
    jobs = [threading.Thread(target=lambda k=k: results.update({k: aligner(*pairs[k])})) for k in range(6)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    for k in range(6):
        close(results[k], aligner(*pairs[k]))
