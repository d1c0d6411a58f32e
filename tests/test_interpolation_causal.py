"""Causal interpolation: what can be interpolated, and that the networks do, by an evaluator that shares no code with them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from sinkformer.errors import ConfigError, DatasetError, ModelError, ShapeError
from sinkformer.interpolation.blocks import Block, ExactBlocks, feed_forward
from sinkformer.interpolation.causal import Trie, assign, check_tokens, construct_causal
from sinkformer.interpolation.construction import construct
from sinkformer.interpolation.datasets import SequencePairs
from sinkformer.interpolation.following import Box, Following, Form
from sinkformer.interpolation.interpolants import Interpolant, load
from sinkformer.interpolation.layers import TokenTransformer
from sinkformer.interpolation.rationals import fraction, library, rational
from sinkformer.interpolation.vectors import Space
from tests.interpolation_oracle import attention, points
from tests.interpolation_oracle import feed_forward as fed

A, B, C, D = [0, 1], [1, 0], [3, 1], [5, -2]


def transform(blocks: Any, sequence: list[Any], tilt: int = 0) -> list[Any]:
    """Where the tokens end: the last token of a prefix sees all of the prefix."""
    tokens = points(sequence)
    for block in blocks:
        tokens = [fed(block, x) for x in tokens]
        tokens = [attention(block, tokens[: i + 1], tilt)[-1] for i in range(len(tokens))]
    return tokens


def constants(built: Interpolant, phase: str) -> dict[str, Any]:
    return dict(next(entry for entry in built.ledger if entry.phase == phase).constants)


def expect(built: Interpolant, X: Any, Y: Any, assignment: Any = None) -> None:
    """Proved by the library, and by the other evaluator, token by token; of the promised size."""
    numbers = assign(built.pairs) if assignment is None else assignment
    verdict = built.certificate.check()
    assert verdict.status == "proved", verdict
    assert verdict.precision is None
    assert check_tokens(built, numbers).status == "proved"
    blocks = list(built.exact_blocks)
    for x, y, chosen in zip(X, Y, numbers, strict=True):
        targets = points(y)
        assert transform(blocks, x) == [targets[k] for k in chosen]
        assert set(chosen) == set(range(len(targets)))
    assert all(block.causal and block.width <= 4 for block in built.blocks)
    assert built.tau_star is None
    assert built.ledger.holds
    assert built.ledger.blocks == built.L
    rounds, R = constants(built, "separation"), constants(built, "groups")["groups"]
    V, tokens = len(Trie(built.pairs)), {tuple(x) for sequence in X for x in points(sequence)}
    assert built.L == max(1, rounds["S"] + rounds["gathering"]) + math.ceil(R / 2)
    assert built.L <= max(1, rounds["S"]) + math.ceil(V / 2)
    assert rounds["S"] <= rounds["bound"] == V - len(tokens)
    assert R >= len({tuple(t) for y in Y for t in points(y)})


# -- closed forms


def test_one_token_one_target_is_one_round_for_nothing_and_one_ramp():
    built = construct_causal([[A]], [[B]])
    expect(built, [[A]], [[B]])
    assert built.L == 2


def test_two_orders_of_the_same_tokens_take_two_rounds():
    # (a, b, c) and (b, a, c): the same set, the same last token; the first round gives the second one something to see.
    X, Y = [[A, B, C], [B, A, C, D]], [[[1, 1], [2, 0]], [[1, 1], [3, 3]]]
    numbers = [[0, 0, 1], [0, 0, 1, 1]]
    built = construct_causal(X, Y, assignment=numbers)
    expect(built, X, Y, numbers)
    assert constants(built, "separation")["S"] == 2
    assert constants(built, "separation")["moves"] == 0


def test_prefixes_of_equal_mean_take_a_bend():
    X, Y = [[[0], [3], [7]], [[1], [2], [7]]], [[[1]], [[2]]]
    built = construct_causal(X, Y)
    expect(built, X, Y)
    assert constants(built, "separation")["S"] == constants(built, "separation")["moves"] == 1


def test_a_source_may_begin_another():
    X = [[A], [A, B], [A, B, C]]
    Y = [[[7, 7]], [[7, 7], [8, 8]], [[7, 7], [8, 8]]]
    expect(construct_causal(X, Y), X, Y)


def test_one_target_for_all_needs_no_separation():
    X = [[A, B], [A, C], [B, A, D]]
    Y = [[[Fraction(1, 3), -2]]] * 3
    built = construct_causal(X, Y)
    expect(built, X, Y)
    assert built.L == 2


def test_every_prefix_has_its_mean():
    pairs = SequencePairs([[A, B, C], [A, B, D], [A, C]], [[A]] * 3)
    trie = Trie(pairs)
    assert trie.parents == [-1, 0, 1, 1, 0]
    assert trie.depths == [1, 2, 3, 3, 2]
    assert trie.members == [[0, 1, 2], [0, 1], [0], [1], [2]]
    assert trie.paths == [[0, 1, 2], [0, 1, 3], [0, 4]]
    assert list(map(fraction, trie.means(list(map(rational, [2, 4, 9, 0, 0]))))) == [2, 3, 5, 2, 1]


@pytest.mark.parametrize("seed", range(3))
def test_sequences_with_first_tokens_of_their_own_gather_around_them(seed):
    draw = np.random.default_rng(seed)
    X, Y = draw.normal(size=(4, 40, 3)), draw.normal(size=(4, 1, 3))
    built = construct_causal(X, Y)
    assert check_tokens(built, [[0] * 40] * 4)
    assert constants(built, "groups")["groups"] <= 6  # of 160 prefixes, for 4 targets
    assert built.L <= 20
    X, Y = draw.integers(-9, 10, (3, 7, 2)).tolist(), draw.integers(-9, 10, (3, 2, 2)).tolist()
    X = [[[*token, 10 * i + j] for i, token in enumerate(x)] for j, x in enumerate(X)]
    Y = [[[*token, k] for k, token in enumerate(y)] for y in Y]
    expect(construct_causal(X, Y), X, Y)


def test_the_targets_of_the_next_token_are_learned():
    # Every prefix predicts its next token: Y_j are the tokens that follow, and a last one.
    words = ["abcd", "acbd", "adbc", "bacd"]
    word = {name: [i, i * i % 5] for i, name in enumerate("abcde")}
    after = {text[: i + 1]: "ebdcae"[(i + len(text[: i + 1]) * ord(text[i])) % 6] for text in words for i in range(4)}
    follow = [[after[text[: i + 1]] for i in range(4)] for text in words]
    X = [[[*word[c]] for c in text[: 4 - k]] for k, text in enumerate(words)]
    X = [[*sequence, [9 + k, 0]] for k, sequence in enumerate(X)]
    follow = [[*names[: 4 - k], "a"] for k, names in enumerate(follow)]
    different = [list(dict.fromkeys(names)) for names in follow]
    Y = [[word[c] for c in names] for names in different]
    numbers = [[known.index(c) for c in names] for known, names in zip(different, follow, strict=True)]
    expect(construct_causal(X, Y, assignment=numbers), X, Y, numbers)


# -- what can be interpolated


def trie_data(draw: np.random.Generator, N: int, n: int, words: int, targets: int) -> tuple[list[Any], list[Any]]:
    """Sequences over a small alphabet, distinct as sets, so that many prefixes are shared; targets out of few."""
    X: dict[frozenset[int], list[int]] = {}
    while len(X) < N:
        x = draw.permutation(words)[: draw.integers(1, n + 1)].tolist()
        X.setdefault(frozenset(x), x)
    Y = [draw.permutation(targets)[: draw.integers(1, min(len(x), targets) + 1)].tolist() for x in X.values()]
    return [[[c] for c in x] for x in X.values()], [[[100 + c] for c in y] for y in Y]


def solvable(X: list[Any], Y: list[Any]) -> bool:
    """Whether the prefixes can have targets, as integer linear programming sees it."""
    prefixes = sorted({str(x[: i + 1]) for x in X for i in range(len(x))})
    column: dict[tuple[str, int], int] = {}
    for v in prefixes:
        for y in range(100, 110):
            if all([y] in Y[j] for j, x in enumerate(X) if v in {str(x[: i + 1]) for i in range(len(x))}):
                column[v, y] = len(column)
    rows, low = [], []
    for v in prefixes:  # one target each
        rows.append([float(key[0] == v) for key in column])
        low.append((1, 1))
    for x, y in zip(X, Y, strict=True):
        path = {str(x[: i + 1]) for i in range(len(x))}
        for [target] in y:
            rows.append([float(key[0] in path and key[1] == target) for key in column])
            low.append((1, np.inf))
    if not column:
        return False
    found = milp(
        np.zeros(len(column)),
        integrality=np.ones(len(column)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(np.array(rows), *np.array(low).T),
    )
    return bool(found.success)


def test_the_condition_is_that_of_integer_programming():
    draw = np.random.default_rng(0)
    outcomes = []
    for _ in range(150):
        X, Y = trie_data(draw, *draw.integers([2, 2, 3, 2], [5, 6, 6, 5]))
        outcomes.append(solvable(X, Y))
        try:
            assign(SequencePairs(X, Y))
        except DatasetError:
            assert not outcomes[-1], (X, Y)
        else:
            assert outcomes[-1], (X, Y)
    assert 30 < sum(outcomes) < 120


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_whatever_can_be_assigned_is_interpolated(seed):
    draw = np.random.default_rng(seed)
    X, Y = trie_data(draw, *draw.integers([1, 2, 5, 2], [4, 5, 7, 5]))
    try:
        numbers = assign(SequencePairs(X, Y))
    except DatasetError:
        with pytest.raises(DatasetError):
            construct_causal(X, Y)
        return
    chosen: dict[str, Any] = {}
    for x, y, path in zip(X, Y, numbers, strict=True):
        for i, k in enumerate(path):  # one target for one prefix
            assert chosen.setdefault(str(x[: i + 1]), y[k]) == y[k]
    expect(construct_causal(X, Y, assignment=numbers), X, Y, numbers)


def test_no_target_in_common_is_refused_by_name():
    with pytest.raises(DatasetError, match=r"X\[1\], X\[2\] with 1 token in common and no target"):
        construct_causal([[D], [A, B], [A, B, C]], [[B], [[0, 0]], [[1, 1]]])


def test_too_few_tokens_left_are_refused_by_name():
    X = [[A, B, C], [A, B, D]]
    Y = [[[0, 0], [1, 1], [2, 2]], [[0, 0], [1, 2], [3, 3]]]
    with pytest.raises(DatasetError, match=r"1 of their targets in common.* reach at most 2 of its 3 targets"):
        construct_causal(X, Y)
    assert construct(X, Y).certificate.check()  # where every token sees all, it can be done


@pytest.mark.parametrize(
    ("assignment", "error", "match"),
    [
        ([[0, 1]], ConfigError, "an assignment for 2 sequences, received 1"),
        ([[0, 1], [0]], ConfigError, r"2 numbers in assignment\[1\], received 1"),
        ([[0, 2], [0, 1]], ConfigError, r"from 0 to 1 in assignment\[0\], received 2"),
        ([[0, -1], [0, 1]], ConfigError, "received -1"),
        ([[0, True], [0, 1]], ConfigError, "received True"),
        ([[0, 1.0], [0, 1]], ConfigError, r"received 1\.0"),
        ([[0, 0], [0, 1]], ConfigError, r"all targets of Y\[0\].*none of number 1"),
        ([[0, 1], [1, 0]], DatasetError, r"two for the first 1 token of X\[0\] and X\[1\]"),
        (5, ConfigError, "lists of numbers"),
        ([0, 1], ConfigError, "lists of numbers"),
    ],
)
def test_a_wrong_assignment_is_refused(assignment, error, match):
    with pytest.raises(error, match=match):
        construct_causal([[A, B], [A, C]], [[[0, 0], [1, 1]], [[0, 0], [1, 1]]], assignment=assignment)


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        (([[A]], [[B]]), {"attention": "linear"}, ConfigError),
        (([[A]], [[B]]), {"seed": -1}, ConfigError),
        (([[A]], [[B]]), {"seed": True}, ConfigError),
        (([[A]],), {}, ConfigError),
        ((SequencePairs([[A]], [[B]]), [[B]]), {}, ConfigError),
        (([], []), {}, ShapeError),
        (([[A, B], [B, A]], [[A], [B]]), {}, DatasetError),  # of SequencePairs: sources are sets
    ],
)
def test_wrong_arguments_are_refused(arguments, options, error):
    with pytest.raises(error):
        construct_causal(*arguments, **options)


def test_pairs_and_arrays_are_taken_too():
    X, Y = np.array([[A, B], [B, C]], dtype=float), torch.tensor([[C], [D]], dtype=torch.float64)
    assert construct_causal(SequencePairs(X, Y)).certificate.check()
    assert construct_causal(X, Y, assignment=np.zeros((2, 2), dtype=int)).certificate.check()


# -- the networks


@pytest.fixture(scope="module")
def shared() -> tuple[list[Any], list[Any]]:
    """Sequences of one first token, of several orders and lengths."""
    draw = np.random.default_rng(3)
    words, common = draw.normal(size=(9, 3)), draw.normal(size=(1, 3))
    orders = [[0, *(1 + draw.permutation(8)[:n]).tolist()] for n in (2, 3, 4, 5, 5, 6)]
    Y = [np.concatenate([common, draw.normal(size=(min(2, len(x) - 1), 3))]) for x in orders]
    return [words[x].tolist() for x in orders], [y.tolist() for y in Y]


@pytest.mark.parametrize("kind", ["hardmax", "softmax"])
def test_shared_prefixes(shared, kind):
    X, Y = shared
    expect(construct_causal(X, Y, attention=kind, seed=1), X, Y)


def test_the_module_is_causal_and_precise(shared):
    X, Y = shared
    export = construct_causal(X, Y).export()
    assert export.measured <= export.predicted <= 1e-10
    assert all(block.attention.causal for block in export.model.blocks)
    x = torch.tensor(X[-1], dtype=torch.float64)
    whole = export.model(x)
    for i in range(1, len(x)):
        torch.testing.assert_close(export.model(x[:i]), whole[:i], rtol=0, atol=1e-10)
    changed = x.clone()
    changed[-1] += 1
    torch.testing.assert_close(export.model(changed)[:-1], whole[:-1], rtol=0, atol=1e-10)


def test_hardmax_and_every_softmax_are_one_network(shared):
    hard, soft = (construct_causal(*shared, attention=kind) for kind in ("hardmax", "softmax"))
    x = torch.tensor(shared[0][0], dtype=torch.float64)
    wanted = hard.model(x)
    for tau in (Fraction(1, 1000), Fraction(1), Fraction(1000)):
        warm = replace(soft, tau=tau)
        assert warm.certificate.check()
        torch.testing.assert_close(warm.model(x), wanted, rtol=0, atol=1e-10)


def test_an_uncausal_mask_is_refuted(shared):
    X, Y = shared
    built = construct_causal(X, Y)
    open_ = replace(built, blocks=tuple(replace(block, causal=False) for block in built.blocks))
    assert open_.certificate.check().status == "refuted"
    assert check_tokens(open_, assign(built.pairs)).status == "refuted"


def test_the_order_of_tokens_counts():
    X, Y = [[A, B, C], [B, D]], [[[1, 1], [2, 2]], [[3, 3]]]
    built = construct_causal(X, Y)
    swapped = replace(built, pairs=SequencePairs([[C, B, A], [B, D]], Y))
    assert swapped.certificate.check().status == "refuted"


def test_tokens_at_the_right_targets_of_other_tokens_are_refuted():
    X, Y = [[A, B]], [[[1, 1], [2, 2]]]
    built = construct_causal(X, Y, assignment=[[0, 1]])
    assert built.certificate.check()  # as sets
    verdict = check_tokens(built, [[1, 0]])
    assert verdict.status == "refuted"
    assert "token 0 of X[0] does not end at Y[0][1]" in verdict.reason


def test_tokens_are_checked_in_any_softmax_too():
    X, Y = [[A, B, C], [B, D]], [[[1, 1], [2, 2]], [[3, 3]]]
    built = construct(X, Y, attention="softmax", method="paper")
    verdict = check_tokens(built, ends(built))
    assert verdict.status == "proved"
    assert verdict.precision == 128
    assert check_tokens(replace(built, tau=Fraction(1000)), ends(built)).status == "refuted"


def test_tokens_close_to_an_edge_take_more_bits():
    built = construct([[A, B, C], [B, D]], [[[1, 1], [2, 2]], [[3, 3]]], attention="softmax", method="paper")
    low, high = 16 * built.tau, 64 * built.tau
    for _ in range(150):
        middle = (low + high) / 2
        proved = replace(built, tau=middle).certificate.check()
        low, high = (middle, high) if proved else (low, middle)
    inside, outside = replace(built, tau=low), replace(built, tau=high)
    verdict = check_tokens(inside, ends(inside))
    assert (verdict.status, verdict.precision) == ("proved", 512)
    verdict = check_tokens(outside, ends(inside))
    assert (verdict.status, verdict.precision) == ("refuted", 512)


def ends(built: Interpolant) -> list[list[int]]:
    """For every token the target of its sequence that is nearest to where it ends, in float64."""
    return [
        torch.cdist(built.trace(x.floats)[-1].points, torch.from_numpy(y.floats)).argmin(1).tolist()
        for x, y in zip(built.pairs.X, built.pairs.Y, strict=True)
    ]


def test_saved_and_loaded(shared, tmp_path):
    built = construct_causal(*shared)
    built.save(tmp_path)
    again = load(tmp_path)
    assert again.method == "causal"
    assert all(block.causal for block in again.blocks)
    assert again.certificate.check()
    x = torch.tensor(shared[0][0], dtype=torch.float64)
    assert torch.equal(TokenTransformer.load(tmp_path)(x), built.model(x))
    contents = json.loads((tmp_path / "certificate.json").read_text())
    contents["blocks"][0]["causal"] = 1
    (tmp_path / "certificate.json").write_text(json.dumps(contents))
    with pytest.raises(ModelError):
        load(tmp_path)


def test_close_tokens_are_refused_by_floats_only():
    tiny = Fraction(1, 10**18)
    X, Y = [[[0, 0], [tiny, 0], [1, 0]], [[2 * tiny, 0], [3, 0]]], [[A], [B, C]]
    built = construct_causal(X, Y)
    expect(built, X, Y)


# -- causal attention of other kinds, in the exact evaluation


def attending(kind: str, draw: np.random.Generator, pools: bool) -> Block:
    small: Callable[[], Any] = lambda: rational(int(draw.integers(-3, 4)), 2)  # noqa: E731
    block = feed_forward("test", 1, {0: rational(1)}, [(rational(1), {0: rational(1, 2), 1: rational(1)})])
    zero = rational(0)
    alpha, p, q = (zero, {}, {}) if pools else (rational(1), {0: rational(1)}, {1: rational(1, 3)})
    return replace(block.attending(small(), rational(1, 2), alpha, p, q), causal=True)


@pytest.mark.parametrize("pools", [False, True])
@pytest.mark.parametrize("kind", ["hardmax", "softmax"])
@pytest.mark.parametrize("seed", range(4))
def test_causal_attention_is_followed_exactly(kind, seed, pools):
    draw = np.random.default_rng(seed)
    X = [draw.permutation(25)[:n, None] // [1, 5] % [25, 5] - [7, 2] for n in (1, 4, 6)]
    pairs = SequencePairs(X, [[[0, 0]]] * 3)
    block = attending(kind, draw, pools)
    run = Following(pairs, kind, rational(1), bits=128)  # type: ignore[arg-type]
    with library().ctx.workprec(128):
        run.step(block)
    blocks = ExactBlocks([block], Space(pairs), kind, rational(1))  # type: ignore[arg-type]
    for j, x in enumerate(X):
        for number, wanted in zip(run.sequences[j], transform(blocks, x), strict=True):
            token = run.tokens[number]
            if isinstance(token, Form):
                assert run.space.dense(token.point) == wanted
            else:
                assert isinstance(token, Box)
                assert kind == "softmax"
                for i in range(2):
                    low, high = map(fraction, token.sides.get(i, (rational(0), rational(0))))
                    assert low - Fraction(1, 10**30) <= wanted[i] <= high + Fraction(1, 10**30)
                    assert high - low < Fraction(1, 10**20)


@pytest.mark.parametrize("kind", ["hardmax", "softmax"])
def test_the_collapse_under_a_mask_needs_the_leader_first(kind):
    # One target: the network of the paper moves the most isolated token away, and the others follow it, if they see it.
    x = [[0, 0], [1, 2], [2, 1], [9, 9]]
    outcomes = []
    for first in x:
        built = construct([[first, *(token for token in x if token != first)]], [[A]], attention=kind, method="paper")
        masked = replace(built, blocks=tuple(replace(block, causal=True) for block in built.blocks))
        outcomes.append(masked.certificate.check().status)
        if outcomes[-1] == "proved":
            export = masked.export()
            assert export.measured <= max(export.predicted, 1e-15)
            assert export.predicted <= 1e-12
    assert sorted(outcomes) == ["proved", "refuted", "refuted", "refuted"]


@pytest.mark.parametrize("m", range(1, 6))
def test_means_of_prefixes_have_the_eigenvectors_of_the_docstring(m):
    path = Trie(SequencePairs([[[i] for i in range(8)]], [[[0]]]))
    values = [math.comb(i, m - 1) for i in range(8)]
    assert list(map(fraction, path.means(list(map(rational, values))))) == [Fraction(v, m) for v in values]


def test_common_targets_of_a_prefix_are_those_of_all_sequences_that_begin_with_it():
    pairs = SequencePairs([[A, B], [A, C, D]], [[A, B], [B, C, A]])
    assert [len(common) for common in Trie(pairs).common] == [2, 2, 3, 3]
