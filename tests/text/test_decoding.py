import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkformer.text import decoding, documents


def decode(matching, confidence, source, target, threshold):
    return decoding.decode(matching, confidence, source, target, threshold, np.zeros(confidence.shape, bool))


def shift(n, m):
    return documents.squared_shift(n, m, torch.device("cpu")).numpy()


def brute_force(cost, null_price):
    n, m = cost.shape
    best = null_price * (n + m)
    for k in range(1, min(n, m) + 1):
        for rows in itertools.combinations(range(n), k):
            for columns in itertools.permutations(range(m), k):
                best = min(best, cost[rows, columns].sum() + null_price * (n + m - 2 * k))
    return best


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1), st.sampled_from([0.1, 0.4, 1.0]))
@settings(max_examples=60, deadline=None)
def test_distance_is_the_cheapest_matching(n, m, seed, null_price):
    cost = np.random.default_rng(seed).uniform(0, 2, (n, m))
    found = decoding.match(cost, shift(n, m), null_price)
    assert found.distance == pytest.approx(brute_force(cost, null_price), abs=1e-5)
    assert 0 <= found.normalized_distance <= 1


@pytest.mark.parametrize("n", [1, 8, 300])
def test_ties_are_broken_by_position(n):
    # All words alike: every permutation costs nothing.
    found = decoding.match(np.zeros((n, n)), shift(n, n), 0.4)
    assert found.links == [(i, i) for i in range(n)]
    assert found.distance == 0.0
    balanced = decoding.match_balanced(np.zeros((n, n)), shift(n, n), 2.0)
    assert balanced.links == [(i, i) for i in range(n)]


def test_many_repeats_with_ties_give_the_diagonal():
    words = np.random.default_rng(0).integers(0, 5, 300)
    cost = (words[:, None] != words).astype(float)
    assert decoding.match(cost, shift(300, 300), 0.4).links == [(i, i) for i in range(300)]


@pytest.mark.parametrize(("n", "m"), [(0, 0), (0, 3), (2, 0)])
def test_empty_sides(n, m):
    found = decoding.match(np.zeros((n, m)), np.zeros((n, m)), 0.4)
    assert found.links == []
    assert found.distance == pytest.approx(0.4 * (n + m))
    assert found.normalized_distance == (1.0 if n + m else 0.0)
    assert decode([], np.zeros((n, m)), ["x"] * n, ["x"] * m, 0.3) == []


def test_balanced_distance_is_exact_transport():
    cost = np.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]])
    found = decoding.match_balanced(cost, shift(2, 3), 2.0)
    # Half of the middle word from each side: 1/3 of the mass at cost 1, times (2 + 3)/2.
    assert found.distance == pytest.approx(1 / 3 * 2.5)
    assert found.normalized_distance == pytest.approx(1 / 6)
    assert found.links == [(0, 0), (1, 2)]


def test_copies_share_their_mass():
    # Three copies on each side with a third of the mass each: the matching decides, the threshold does not cut.
    confidence = np.full((3, 3), 0.33)
    assert decode([(0, 0), (1, 1), (2, 2)], confidence, ["a"] * 3, ["a"] * 3, 0.5) == [
        (0, 0),
        (1, 1),
        (2, 2),
    ]
    # The same numbers between different words are below the threshold.
    assert decode([(0, 0), (1, 1), (2, 2)], confidence, list("abc"), list("def"), 0.5) == []


def test_a_phrase_may_share_a_word():
    confidence = np.array([[0.45, 0.45]])
    assert decode([(0, 0)], confidence, ["don't"], ["do", "not"], 0.3) == [(0, 0), (0, 1)]


def test_an_equal_partner_excludes_others():
    confidence = np.array([[0.6, 0.4]])
    assert decode([(0, 0)], confidence, ["the"], ["the", "a"], 0.3) == [(0, 0)]


def test_a_matched_pair_that_costs_nothing_is_a_link():
    free = np.array([[True, True]])
    assert decoding.decode([(0, 0)], np.array([[0.1, 0.1]]), ["a"], ["a", "a"], 0.9, free) == [(0, 0)]
