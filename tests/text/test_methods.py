import json
from dataclasses import dataclass, field

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkformer import errors
from sinkformer.errors import TextError
from sinkformer.metrics import coupling_tv, target_coupling
from sinkformer.text import Aligner, couple
from sinkformer.text.embedders import CallableEmbedder
from sinkformer.text.methods import METHODS, Argmax, Balanced, IterMax, Method, Partial, Unbalanced, as_method
from sinkformer.text.methods.linking import mutual

BASE = "the cat sat on the mat", "on the rug a dog rested"
WORDS = ["the", "a", "cat", "feline", "dog", "sat", "rested", "on", "mat", "rug", "king", "zyx", "qqq"]


# Choosing one ---------------------------------------------------------------------------------------------------------


def test_every_name_gives_a_method():
    for name, kind in ((n, METHODS[n]) for n in ("partial", "balanced", "unbalanced", "argmax", "itermax")):
        method = as_method(name)
        assert isinstance(method, Method)
        assert method == kind()
        assert method.name == name
        json.dumps(method.settings)
    assert as_method(None) == Partial()
    assert as_method("partial", epsilon=0.1, null_price=0.2) == Partial(epsilon=0.1, null_price=0.2)
    assert as_method("balanced", null_price=0.2, threshold=0.5) == Balanced(threshold=0.5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"method": "ot"},
            errors.ConfigError,
            "expected a known method, received 'ot'; the methods are 'partial', 'bal",
        ),
        ({"method": 3}, errors.DTypeError, "expected method as a name or a Method, received int; the methods are"),
        ({"method": Partial}, errors.DTypeError, "expected method as a name or a Method, received type"),
        (
            {"method": "argmax", "epsilon": 0.1},
            errors.ConfigError,
            "epsilon=0.1 has no meaning for the method 'argmax'",
        ),
        (
            {"method": "itermax", "threshold": 0.1},
            errors.ConfigError,
            "threshold=0.1 has no meaning for the method 'iter",
        ),
        (
            {"method": Balanced(), "epsilon": 0.1},
            errors.ConfigError,
            r"epsilon=0.1 was given beside the method Balanced",
        ),
        (
            {"method": Partial(), "null_price": 0.1},
            errors.ConfigError,
            r"null_price=0.1 was given beside the method Part",
        ),
        ({"method": "unbalanced", "epsilon": 0}, errors.ConfigError, "expected epsilon as a finite number"),
    ],
)
def test_what_does_not_go_together(table, options, error, message):
    with pytest.raises(error, match=message):
        Aligner(table, **options)
    with pytest.raises(error, match=message):
        couple("a", "b", model=table, **options)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Unbalanced(reach=0), "expected reach as a finite number > 0"),
        (lambda: Partial(null_price=float("inf")), "expected null_price as a finite number > 0"),
        (lambda: Balanced(threshold=2), "expected threshold as a finite number > 0 and <= 1, received 2"),
        (lambda: IterMax(rounds=0), "expected rounds as a whole number >= 1, received 0"),
        (lambda: IterMax(rounds=True), "expected rounds as a whole number >= 1, received True"),
        (lambda: IterMax(discount=1.1), "expected discount as a finite number >= 0 and <= 1, received 1.1"),
    ],
)
def test_options_outside_their_range(build, message):
    with pytest.raises(errors.ConfigError, match=message):
        build()


def test_the_null_price_of_a_method_is_that_of_the_distance(static):
    assert Aligner(static.embedder, method=Partial(null_price=0.1)).null_price == 0.1
    r = Aligner(static.embedder, method=Partial(null_price=0.1))(*BASE)
    s = Aligner(static.embedder, null_price=0.1)(*BASE)
    assert (r.links, r.distance, r.settings) == (s.links, s.distance, s.settings)
    # The other methods leave it to the distance.
    assert Aligner(static.embedder, method=Argmax(), null_price=0.1)(*BASE).distance == r.distance


@pytest.mark.parametrize("method", ["unbalanced", "argmax", "itermax"])
def test_the_distance_does_not_depend_on_the_method(static, method):
    for pair in (BASE, ("the cat", ""), ("a king", "the dog sat")):
        r, s = static(*pair), Aligner(static.embedder, method=method)(*pair)
        assert (r.distance, r.normalized_distance) == (s.distance, s.normalized_distance)
        assert r.settings_hash != s.settings_hash


# Unbalanced -----------------------------------------------------------------------------------------------------------


def parts(r):
    """Costs between the words of a result and the weight of a word."""
    n, m = r.plan.shape
    return r.coupling.cost_function.values[:n, :m], 1 / (n + m)


@pytest.mark.parametrize(("epsilon", "reach"), [(0.05, 0.6), (0.5, 0.1), (0.1, 3.0)])
def test_unbalanced_plans_are_those_of_pot(static, epsilon, reach):
    for pair in (BASE, ("the king sat", "a dog zyx on the mat"), ("cat", "feline")):
        r = Aligner(static.embedder, method=Unbalanced(epsilon=epsilon, reach=reach))(*pair)
        cost, weight = parts(r)
        a, b = (np.full(k, weight) for k in r.plan.shape)
        want = ot.unbalanced.sinkhorn_unbalanced(a, b, cost.numpy(), epsilon, reach, stopThr=1e-12, numItermax=100_000)
        np.testing.assert_allclose(r.plan.numpy(), want, atol=1e-8)


@given(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=9), st.lists(st.sampled_from(WORDS), min_size=1, max_size=9)
)
@settings(max_examples=30, deadline=None)
def test_unbalanced_marginals_meet_their_optimality_condition(static, a, b):
    r = Aligner(static.embedder, method=Unbalanced(reach=0.3))(a, b)
    n, m = r.plan.shape
    f, g = r.coupling.solution.potentials
    torch.testing.assert_close(r.plan.sum(1), torch.exp(-f[:n] / 0.3) / (n + m), atol=1e-7, rtol=0)
    torch.testing.assert_close(r.plan.sum(0), torch.exp(-g[:m] / 0.3) / (n + m), atol=1e-7, rtol=0)
    torch.testing.assert_close(r.null_source, (1 / (n + m) - r.plan.sum(1)).clamp(min=0))
    assert not r.coupling.to_dense()[:n, m].any()


def test_a_longer_reach_leaves_less_alone(static):
    alone = [
        float(Aligner(static.embedder, method=Unbalanced(reach=x))(*BASE).null_source.sum()) for x in (0.1, 0.5, 1, 4)
    ]
    assert alone == sorted(alone, reverse=True)
    assert alone[0] > 0.25
    assert alone[-1] < 0.05


# Links without a solver -----------------------------------------------------------------------------------------------


def argmax_by_definition(s):
    n, m = s.shape
    return {(i, j) for i in range(n) for j in range(m) if s[i, j] == max(s[i]) == max(s[:, j]) > -np.inf}


def itermax_by_definition(s, rounds, discount):
    """Jalili Sabet et al. 2020, in words and loops."""
    n, m = s.shape
    links = argmax_by_definition(s)
    for _ in range(1, rounds if min(n, m) > 2 else 1):
        left, right = {i for i, _ in links}, {j for _, j in links}
        if len(left) == n or len(right) == m:
            break
        weighted = s.copy()
        for i in range(n):
            for j in range(m):
                if i in left and j in right:
                    weighted[i, j] = -np.inf
                elif i in left or j in right:
                    weighted[i, j] = s[i, j] * discount
        links |= argmax_by_definition(weighted)
    return links


def as_set(links):
    return {(int(i), int(j)) for i, j in zip(*np.nonzero(links), strict=True)}


@given(
    st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**32 - 1), st.integers(1, 4), st.sampled_from([0.5, 0.9, 1.0])
)
@settings(max_examples=100, deadline=None)
def test_argmax_and_itermax_by_their_definition(n, m, seed, rounds, discount):
    similarity = np.random.default_rng(seed).uniform(0, 1, (n, m))
    assert as_set(mutual(similarity)) == argmax_by_definition(similarity)
    links = as_set(IterMax(rounds, discount)._links(similarity))
    assert links == itermax_by_definition(similarity, rounds, discount)
    assert links >= argmax_by_definition(similarity)


def test_a_second_round_by_hand():
    # Round one: (0, 0) and (2, 2). In round two the second row prefers the first column, linked before, at 0.8 x 0.9 > 0.7.
    similarity = np.array([[0.9, 0.1, 0.0], [0.8, 0.7, 0.3], [0.0, 0.2, 0.6]])
    assert as_set(mutual(similarity)) == {(0, 0), (2, 2)}
    assert as_set(IterMax(discount=0.9)._links(similarity)) == {(0, 0), (1, 0), (2, 2)}
    assert as_set(IterMax(discount=0.5)._links(similarity)) == {(0, 0), (1, 1), (2, 2)}


@pytest.mark.parametrize("method", ["argmax", "itermax"])
def test_the_coupling_of_links_is_that_of_gold(static, method):
    pair = "the cat sat on the big red mat zyx", "a small feline on a large crimson rug today"
    r = Aligner(static.embedder, method=method)(*pair)
    n, m = r.plan.shape
    want = target_coupling(r.links, n, m)
    torch.testing.assert_close(r.with_nulls(), want)
    assert coupling_tv(r.coupling, want) == pytest.approx(0.0, abs=1e-12)
    assert r.converged
    cost = Aligner(static.embedder)(*pair).coupling.cost_function.values
    assert r.confidence == pytest.approx([max(1 - float(cost[i, j]), 0) for i, j in r.links])


@pytest.mark.parametrize("method", ["partial", "unbalanced", "argmax", "itermax"])
def test_words_without_vectors_link_by_spelling_only(static, method):
    aligner = Aligner(static.embedder, method=method)
    assert aligner("qqq", "zyx").links == []
    assert aligner("the qqq zyx", "a zyx www").links == [(0, 0), (2, 1)]
    # However dear the places are.
    assert (3, 0) in Aligner(static.embedder, method=method, distortion=0.1)("qqq www uuu zyx", "zyx vvv").links


# States ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watching:
    """Argmax that remembers what it was given."""

    layers: tuple[int, ...] = (1, 2)
    name: str = "watching"
    null: bool = True
    most_cells: int | None = None
    seen: list = field(default_factory=list)

    @property
    def settings(self):
        return {"layers": list(self.layers)}

    def solve(self, pairs):
        self.seen.extend(pairs)
        return Argmax().solve(pairs)


def test_a_method_is_given_the_states_of_its_layers(tiny_models):
    method = Watching()
    aligner = Aligner(tiny_models / "bert", layer=3, method=method)
    r = aligner("the cat sat", "a dog")
    pair = method.seen[0]
    assert [tuple(x.shape) for x in pair.states] == [(3, 2, 16), (2, 2, 16)]
    assert {x.dtype for x in pair.states} == {torch.float32}
    want = Aligner(tiny_models / "bert", layer=2).embedder.embed([r.source.words])[0]
    torch.testing.assert_close(pair.states[0][:, 1], want)
    # The vectors are those of an aligner that asks for no states.
    plain = Aligner(tiny_models / "bert", layer=3, method="argmax")(r.source, r.target)
    assert r.links == plain.links
    assert r.distance == pytest.approx(plain.distance, abs=1e-6)
    assert r.settings["method"] == "watching"
    assert couple("the cat", "a dog", model=tiny_models / "bert", method=method).settings["layers"] == [1, 2]


def test_a_method_sees_no_empty_side_and_may_name_no_layer(static):
    method = Watching(layers=())
    list(Aligner(static.embedder, method=method).align([("", "a"), ("the cat", "a"), ("", ""), ("a", "")]))
    assert [pair.cost.shape for pair in method.seen] == [(2, 1)]
    assert method.seen[0].states is None
    torch.testing.assert_close(method.seen[0].vectors[0].norm(dim=-1), torch.ones(2).double())


def test_states_need_a_model_with_layers(table):
    for model in (table, CallableEmbedder(table)):
        with pytest.raises(errors.ConfigError, match="hidden layers"):
            Aligner(model, method=Watching())


def test_a_method_says_how_large_a_pair_may_be(tiny_models):
    aligner = Aligner(tiny_models / "bert", method=Watching(most_cells=4))
    assert aligner("the cat", "a dog").converged
    with pytest.raises(TextError, match="3 x 2 words, more than the 4 pairs the method 'watching' has room for"):
        aligner("the cat sat", "a dog")
