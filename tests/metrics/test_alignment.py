"""Scores of links: by hand from the definitions, by matrices, and by laws."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

import sinkformer as sf
from sinkformer.errors import ConfigError, DTypeError, NonFiniteError, ShapeError, WeightError
from sinkformer.metrics import count_links, coupling_tv, coupling_w1, score_alignments, target_coupling

FOLDER = os.environ.get("SINKFORMER_ALIGNMENT_DATA")
N, M = 4, 5

links = st.lists(st.tuples(st.integers(0, N - 1), st.integers(0, M - 1)), max_size=12)
pairs = st.lists(st.tuples(links, links, links), min_size=1, max_size=4)


def test_by_hand():
    found = count_links([(0, 0), (1, 1), (2, 2)], [(0, 0), (1, 2)], [(1, 1)], sizes=(4, 3))
    assert (found.precision, found.recall, found.recall_gold) == (2 / 3, 1 / 2, 2 / 3)
    assert found.aer == pytest.approx(1 - (1 + 2) / (3 + 2))
    assert (found.f1, found.f1_sure) == (2 / 3, 2 / 5)
    # Words 2 and 3 of the source have no gold link, word 3 no predicted one; all target words have both.
    assert vars(found.nulls) == {"words": 7, "gold": 2, "predicted": 1, "hits": 1}
    assert (found.total_precision, found.total_recall, found.total_f1) == (3 / 4, 3 / 5, 2 / 3)
    # Word 1 of the source has two gold links.
    assert (found.degree_hits, found.degree_gold) == ((1, 1, 0, 0), (1, 2, 0, 0))
    assert found.degree_recall == (1.0, 0.5, None, None)


@given(links, links, links)
def test_against_matrices(predicted, sure, possible):
    """Nulls as a row and a column of the matrix, degrees as its sums."""
    a, s, p = (np.zeros((N + 1, M + 1), bool) for _ in range(3))
    for matrix, found in ((a, predicted), (s, sure), (p, sure + possible)):
        for i, j in found:
            matrix[i, j] = True
    got = count_links(predicted, sure, possible, sizes=(N, M))
    assert (got.predicted, got.sure, got.gold) == (a.sum(), s.sum(), p.sum())
    assert (got.sure_hits, got.gold_hits) == ((a & s).sum(), (a & p).sum())
    degree = np.maximum(p.sum(1, keepdims=True), p.sum(0)).clip(max=4)
    assert got.degree_gold == tuple((p & (degree == d)).sum() for d in (1, 2, 3, 4))
    assert got.degree_hits == tuple((a & p & (degree == d)).sum() for d in (1, 2, 3, 4))
    if a.sum() + s.sum():
        assert got.aer == pytest.approx(1 - ((a & s).sum() + (a & p).sum()) / (a.sum() + s.sum()))
    for matrix in (a, p):
        matrix[:N, M], matrix[N, :M] = ~matrix[:N, :M].any(1), ~matrix[:N, :M].any(0)
    assert got.total_f1 == pytest.approx(2 * (a & p).sum() / (a.sum() + p.sum()))
    assert got.total_precision == pytest.approx((a & p).sum() / a.sum())
    assert got.total_recall == pytest.approx((a & p).sum() / p.sum())


@given(links, links, links)
def test_laws_of_one_pair(predicted, sure, possible):
    found = count_links(predicted, sure, possible, sizes=(N, M))
    turned = count_links(*([(j, i) for i, j in x] for x in (predicted, sure, possible)), sizes=(M, N))
    assert found == turned
    assert found == count_links(predicted * 2, sure[::-1], possible + sure, sizes=(N, M))
    shares = (
        found.precision,
        found.recall,
        found.recall_gold,
        found.aer,
        found.f1,
        found.f1_sure,
        found.total_f1 or 0.0,
    )
    assert all(0 <= x <= 1 for x in shares)
    plain = count_links(predicted, sure)
    assert plain.aer == pytest.approx(1 - plain.f1)
    assert plain.f1 == plain.f1_sure
    right = count_links(sure, sure, possible, sizes=(N, M))
    assert right.aer == 0
    if sure:
        assert (right.precision, right.recall) == (1, 1)


@given(pairs)
def test_a_corpus_is_one_block_diagonal_pair(corpus):
    predicted, sure, possible = map(list, zip(*corpus, strict=True))
    sizes = [(N, M)] * len(corpus)
    scores = score_alignments(predicted, sure, possible, sizes=sizes)
    shifted = [
        [(i + k * N, j + k * M) for k, x in enumerate(side) for i, j in x] for side in (predicted, sure, possible)
    ]
    assert scores.micro == count_links(*shifted, sizes=(N * len(corpus), M * len(corpus)))


# Arguments: predicted, sure, possible. Results: precision, recall, recall_gold, aer, f1, f1_sure.
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (([], [], []), (1, 1, 1, 0, 1, 1)),
        (([], [(0, 0)], []), (0, 0, 0, 1, 0, 0)),
        (([(0, 0)], [], []), (0, 0, 0, 1, 0, 0)),
        (([(0, 0)], [], [(0, 0)]), (1, 1, 1, 0, 1, 0)),
        (([], [], [(0, 0)]), (0, 1, 0, 0, 0, 1)),
        (([(0, 1)], [], [(0, 0)]), (0, 0, 0, 1, 0, 0)),
    ],
)
def test_nothing_is_defined(arguments, expected):
    found = count_links(*arguments, sizes=(2, 2))
    assert (found.precision, found.recall, found.recall_gold, found.aer, found.f1, found.f1_sure) == expected
    empty = count_links([], [], sizes=(0, 0))
    assert (empty.total_f1, empty.total_precision, empty.total_recall) == (1, 1, 1)


def test_macro_by_hand():
    scores = score_alignments(
        [[(0, 0)], [(0, 0), (1, 1)], []],
        [[(0, 0), (1, 1)], [(0, 0)], []],
        sizes=[(2, 2), (2, 2), (1, 1)],
    )
    assert (scores.macro_precision, scores.macro_recall) == (pytest.approx(2.5 / 3), pytest.approx(2.5 / 3))
    assert scores.macro_f1 == pytest.approx(2.5 / 3)
    # Right, predicted, gold with nulls: 1, 3, 2; then 1, 2, 3; then 2, 2, 2.
    p, r = (1 / 3 + 1 / 2 + 1) / 3, (1 / 2 + 1 / 3 + 1) / 3
    assert scores.total_f1 == pytest.approx(2 * p * r / (p + r))
    assert scores.micro.total_f1 == pytest.approx(2 * 4 / (7 + 7))
    assert str(scores) == (
        "AER 33.3  P 66.7  R(S) 66.7  R(S+P) 66.7  F1(S+P) 66.7  F1(S) 66.7  macro F1 83.3  total F1 61.1  pairs 3"
    )
    assert repr(scores) == f"AlignmentScores({scores})"
    record = json.loads(json.dumps(scores.to_dict(), allow_nan=False))
    assert record["links"] == {"predicted": 3, "sure": 3, "gold": 3, "sure_hits": 2, "gold_hits": 2}
    assert record["nulls"] == {"words": 10, "gold": 4, "predicted": 4, "hits": 2}
    assert record["degree_recall"] == {"1": 2 / 3, "2": None, "3": None, "4+": None}


def test_nothing_right_is_zero():
    assert score_alignments([[(0, 0)]], [[(1, 1)]]).macro_f1 == 0


def test_without_sizes_totals_are_unknown():
    scores = score_alignments([[(0, 0)]], [[(0, 0)]])
    assert scores.total_f1 is None
    assert scores.micro.total_f1 is None
    assert "total" not in str(scores)
    assert scores.to_dict()["nulls"] is None
    for group in (scores.by_length, scores.by_nulls):
        with pytest.raises(ConfigError, match="numbers of words"):
            group()


def test_breakdown():
    lengths = [(1, 10), (11, 3), (20, 20), (21, 1), (40, 2), (7, 41), (0, 0)]
    scores = score_alignments([[]] * 7, [[]] * 7, sizes=lengths)
    assert {name: group.sizes for name, group in scores.by_length().items()} == {
        "0-10": ((1, 10), (0, 0)), "11-20": ((11, 3), (20, 20)), "21-30": ((21, 1),), "31-40": ((40, 2),), "41+": ((7, 41),)
    }  # fmt: skip
    # Diagonal gold of 10, 9, 7, 5, 4 links among 10 and 10 words: nulls 0, 10, 30, 50, 60 %.
    gold = [[(i, i) for i in range(n)] for n in (10, 9, 7, 5, 4)]
    scores = score_alignments(gold, gold, sizes=[(10, 10)] * 5)
    found = {name: [c.gold for c in group.counts] for name, group in scores.by_nulls().items()}
    assert found == {"none": [10], "up to 10%": [9], "up to 50%": [7, 5], "over 50%": [4]}


def test_bootstrap(generator):
    n = 400
    scores = score_alignments([[(0, 0)], [(0, 1)]] * (n // 2), [[(0, 0)]] * n)
    found = scores.bootstrap(2000, generator=generator)
    # F1 is the share of right pairs: a binomial.
    half = 1.96 * (0.25 / n) ** 0.5
    for low, high in (found["f1"], found["aer"]):
        assert low == pytest.approx(0.5 - half, abs=0.006)
        assert high == pytest.approx(0.5 + half, abs=0.006)
    assert scores.bootstrap(50, generator=torch.Generator().manual_seed(3)) == scores.bootstrap(
        50, generator=torch.Generator().manual_seed(3)
    )
    alike = score_alignments([[(0, 0), (0, 1)]] * 5, [[(0, 0)]] * 5).bootstrap(20, generator=generator)
    assert alike["f1"] == (pytest.approx(2 / 3), pytest.approx(2 / 3))
    for options in ({"samples": 0}, {"level": 1.0}):
        with pytest.raises(ConfigError, match="samples >= 1"):
            scores.bootstrap(**options, generator=generator)


def test_links_may_be_lists_or_numpy_indices():
    assert count_links([[0, 1]], np.array([[0, 1]])) == count_links([(0, 1)], [(0, 1)])
    for link in ((0.5, 0), (0,), "ab", 3):
        with pytest.raises(DTypeError, match="whole numbers, received"):
            count_links([link], [])


def test_errors():
    with pytest.raises(ShapeError, match="1 of predicted, 2 of sure"):
        score_alignments([[]], [[], []])
    with pytest.raises(ShapeError, match="at least one pair"):
        score_alignments([], [])
    with pytest.raises(ShapeError, match=r"pair 1: expected gold links .* of 1 and 2 words, received 1-0"):
        score_alignments([[], []], [[], [(1, 0)]], sizes=[(1, 1), (1, 2)])
    with pytest.raises(ShapeError, match="received -1-0"):
        count_links([(-1, 0)], [])


# Couplings ---------------------------------------------------------------------------------------------------------------


def test_target_coupling_by_hand():
    # A 2 x 2 block without one corner, a word linked twice, and one word of either side alone.
    found = target_coupling([(0, 0), (0, 1), (1, 0), (2, 2)], 4, 4)
    expected = torch.tensor(
        [[0.5, 0.5, 0, 0, 0], [0.5, 0, 0, 0, 0.5], [0, 0, 1, 0, 0], [0, 0, 0, 0, 1], [0, 0.5, 0, 1, 0]]
    )
    torch.testing.assert_close(found, expected.double(), rtol=0, atol=0)
    assert target_coupling([], 0, 2).tolist() == [[1, 1, 0]]
    with pytest.raises(ShapeError, match="3-0"):
        target_coupling([(3, 0)], 3, 1)


@given(links)
def test_every_word_of_the_target_coupling_has_mass_one(found):
    plan = target_coupling(found, N, M)
    assert (plan >= 0).all()
    torch.testing.assert_close(plan[:N].sum(1), torch.ones(N).double(), rtol=0, atol=1e-15)
    torch.testing.assert_close(plan[:, :M].sum(0), torch.ones(M).double(), rtol=0, atol=1e-15)
    assert set(map(tuple, plan[:N, :M].nonzero().tolist())) == set(found)


def test_tv_by_hand():
    one, none = target_coupling([(0, 0)], 1, 1), target_coupling([], 1, 1)
    assert coupling_tv(one, one) == 0
    assert coupling_tv(one, none) == 1
    half = torch.tensor([[0.5, 0.5], [0.5, 9.0]])  # masses 1/3 each
    assert coupling_tv(half, one) == pytest.approx(2 / 3)
    assert coupling_tv(7 * half, one) == pytest.approx(2 / 3)
    assert coupling_tv(torch.zeros(1, 1), torch.ones(1, 1)) == 0


def test_tv_takes_couplings():
    plan = torch.tensor([[0.3, 0.1], [0.2, 0.4]], dtype=torch.float64)
    mu, nu = (sf.Measure(torch.zeros(2, 1).double(), weights) for weights in (plan.sum(1), plan.sum(0)))
    coupling = sf.Coupling.from_dense(mu, nu, plan)
    target = target_coupling([(0, 0)], 1, 1)
    assert coupling_tv(coupling, target) == pytest.approx(0.5)  # without the corner: 0.5, 1/6 and 1/3 against 1
    assert coupling_tv(coupling, target) == coupling_tv(plan, target)


def metric(points: np.ndarray) -> torch.Tensor:
    return torch.as_tensor(np.abs(points[:, None] - points).sum(-1))


def test_w1_against_a_linear_program():
    rng = np.random.default_rng(0)
    p, t = torch.as_tensor(rng.random((3, 4))), target_coupling([(0, 0), (1, 1), (1, 2)], 2, 3)
    x, y = metric(rng.normal(size=(3, 2))), metric(rng.normal(size=(4, 2)))
    a, b = (q.clone() for q in (p, t))
    a[-1, -1] = 0
    a, b = (q.numpy().ravel() / float(q.sum()) for q in (a, b))
    costs = (x[:, None, :, None] + y[None, :, None, :]).numpy().reshape(12, 12)
    rows = np.vstack([np.kron(np.eye(12), np.ones(12)), np.kron(np.ones(12), np.eye(12))])
    exact = linprog(costs.ravel(), A_eq=rows, b_eq=np.concatenate([a, b])).fun
    assert coupling_w1(p, t, x, y) == pytest.approx(exact, rel=1e-9)
    assert coupling_w1(p, t, x, y) == pytest.approx(coupling_w1(t.mT, p.mT, y, x), rel=1e-9)


@given(links, links)
def test_w1_of_equal_or_not_is_tv_up_to_two(a, b):
    p, t = target_coupling(a, N, M), target_coupling(b, N, M)
    unequal = [1 - torch.eye(k + 1).double() for k in (N, M)]
    tv = coupling_tv(p, t)
    assert tv - 1e-12 <= coupling_w1(p, t, *unequal) <= 2 * tv + 1e-12


def test_w1_of_one_moved_link_is_the_way():
    x, y = metric(np.array([[0.0], [2.0], [9.0]])), metric(np.array([[0.0], [5.0], [9.0]]))
    a, b = torch.zeros(3, 3), torch.zeros(3, 3)
    a[0, 0] = b[1, 1] = 0.2
    assert coupling_w1(a, b, x, y) == pytest.approx(7)
    assert coupling_w1(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1)) == 0


def test_errors_of_couplings():
    good = target_coupling([(0, 0)], 1, 2)
    with pytest.raises(ShapeError, match="one shape"):
        coupling_tv(good, good.mT)
    with pytest.raises(ShapeError, match="one matrix"):
        coupling_tv(good[None], good)
    with pytest.raises(NonFiniteError, match="predicted finite"):
        coupling_tv(good * torch.nan, good)
    with pytest.raises(WeightError, match="negative"):
        coupling_tv(good, -good)
    with pytest.raises(WeightError, match="received 0 and 2"):
        coupling_tv(torch.zeros(2, 3), good)
    with pytest.raises(ShapeError, match=r"ground distances \(3, 3\)"):
        coupling_w1(good, good, torch.zeros(2, 2), torch.zeros(2, 2))


@pytest.mark.skipif(not FOLDER, reason="SINKFORMER_ALIGNMENT_DATA does not name the folder with the gold alignments")
def test_tv_of_the_uniform_coupling_on_mtref():
    """0.943 was measured on the last 160 pairs with other code."""
    with (Path(str(FOLDER)) / "mtref" / "dev.jsonl").open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file][640:]
    found = []
    for record in records:
        n, m = len(record["source"]), len(record["target"])
        uniform = torch.zeros(n + 1, m + 1)
        uniform[:n, :m] = 1 / (n * m)
        found.append(coupling_tv(uniform, target_coupling(map(tuple, record["sure"] + record["possible"]), n, m)))
    assert np.mean(found) == pytest.approx(0.943, abs=6e-4)
