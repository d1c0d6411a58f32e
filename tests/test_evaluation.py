"""W1 of predictors to systems: closed forms, laws of the sampling and of the search, baselines, files of couplings."""

import contextlib
import json
import math
import warnings
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sinkformer as sf
from sinkformer.errors import (
    ConfigError,
    ConvergenceError,
    DTypeError,
    FormatError,
    ModelError,
    NonFiniteError,
    ShapeError,
    WeightError,
)
from sinkformer.evaluation import (
    CrossSoftmax,
    FixedCost,
    adversarial,
    best_fixed_cost,
    distances,
    evaluate,
    load_couplings,
    load_predictor,
    report,
    reports,
    save_couplings,
)
from sinkformer.evaluation.sampled import LOWER_BOUND, draw
from sinkformer.metrics import w1
from sinkformer.systems import EntropicTransport, ExactTransport, Monotone, PairSampler, Product, named
from sinkformer.testing import check_coupling_model

EOT = EntropicTransport(sf.SqEuclidean(), epsilon=0.5, dims=(2, 2))
SAMPLER = PairSampler(dims=(2, 2), sizes=(2, 6))
SIZES = ((2, 6),)


def small(head="softmax", cls=sf.SinkhornTransformer, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return cls(sf.SinkhornTransformerConfig(dim=2, width=8, heads=2, depth=1, epsilon=0.2, head=head, **options))


def line(*points, weights=None):
    x = torch.tensor(points, dtype=torch.float64).unsqueeze(-1)
    return sf.Measure.uniform(x) if weights is None else sf.Measure(x, torch.tensor(weights, dtype=torch.float64))


class Fixed(PairSampler):
    """One pair, as often as it is asked for."""

    def pairs(self, count, *, generator):
        mu, nu = line(0.0, 1.0), line(0.0, 1.0)
        return tuple(side.map(lambda t: t.expand(count, *t.shape)) for side in (mu, nu))


# The numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eot", "monotone", "switch"])
def test_a_system_is_at_distance_zero_of_itself(name):
    system, sampler = named(name)
    found = evaluate(system, system, sampler, pairs=20)
    assert float(found.lower.max()) == 0.0
    assert float(found.upper.max()) < 1e-11


def test_product_against_monotone_on_a_known_pair():
    # Half the mass is on (0, 1) and (1, 0) and has to change one coordinate by 1.
    found = evaluate(Product((1, 1)), Monotone(), Fixed(dims=(1, 1)), pairs=3, sizes=((2, 2),))
    torch.testing.assert_close(found.upper, torch.full((3,), 0.5, dtype=torch.float64), atol=1e-12, rtol=0)
    s = found.summary()
    assert (s.pairs, s.unconverged) == (3, None)
    assert [s.mean, s.p95, s.sup, s.sup_lower] == pytest.approx([0.5] * 4, abs=1e-12)


def test_distances_are_those_of_w1_on_the_drawn_pairs():
    found = evaluate(Product((2, 2)), EOT, SAMPLER, pairs=7, sizes=SIZES, seed=3)
    mu, nu = draw(SAMPLER, (2, 6), 7, 3)
    expected = w1(Product((2, 2))(mu, nu), EOT(mu, nu).rounded())
    torch.testing.assert_close(found.upper, expected.upper, atol=1e-12, rtol=0)
    live = torch.stack([(side.weights > 0).sum(-1) for side in (mu, nu)], -1)
    assert torch.equal(found.atoms, live)


@pytest.mark.parametrize("predictor", [Product((2, 2)), small("sinkhorn"), small("softmax", CrossSoftmax)])
def test_the_batch_does_not_matter(predictor):
    one, other = (evaluate(predictor, EOT, SAMPLER, pairs=9, sizes=SIZES, batch=size) for size in (1, 4))
    torch.testing.assert_close(one.upper, other.upper, atol=1e-8, rtol=0)
    torch.testing.assert_close(one.column_error, other.column_error, atol=1e-8, rtol=0)
    assert [pair.upper for pair in one.worst] == pytest.approx([pair.upper for pair in other.worst], abs=1e-8)


def test_the_seed_decides_and_the_other_ranges_do_not():
    def numbers(seed, sizes):
        return evaluate(Product((2, 2)), EOT, SAMPLER, pairs=5, sizes=sizes, seed=seed)

    alone, both = numbers(1, ((2, 4),)), numbers(1, ((5, 6), (2, 4)))
    assert torch.equal(alone.upper, both.upper[both.group == 1])
    assert not torch.equal(alone.upper, numbers(2, ((2, 4),)).upper)


def test_strata():
    found = evaluate(Product((2, 2)), EOT, SAMPLER, pairs=[3, 2, 4], sizes=((1, 1), (3, 4), (17, 17)))
    assert [(s.label, s.pairs) for s in found.by_range()] == [("1", 3), ("3-4", 2), ("17", 4)]
    assert [(s.label, s.pairs) for s in found.by_size()] == [("1", 3), ("3-4", 2), ("17-32", 4)]
    # One atom on each side has one coupling.
    assert found.by_size()[0].sup < 1e-12
    assert found.summary().sup == max(s.sup for s in found.by_size())
    total = sum(s.pairs * s.mean for s in found.by_range()) / 9
    assert found.summary().mean == pytest.approx(total)


def test_the_worst_pairs_are_kept():
    found = evaluate(Product((2, 2)), EOT, SAMPLER, pairs=30, sizes=SIZES, batch=7, keep=3)
    assert [pair.upper for pair in found.worst] == sorted(found.upper.tolist(), reverse=True)[:3]
    for pair in found.worst:
        assert float(w1(pair.prediction, pair.target).upper) == pytest.approx(pair.upper, abs=1e-12)
        assert bool((pair.mu.weights > 0).all())
    mu, nu = found.starts()
    assert mu.batch_shape == nu.batch_shape == (3,)


def test_large_pairs_have_brackets_and_the_result_says_so():
    found = evaluate(Product((2, 2)), EOT, SAMPLER, pairs=1, sizes=((4, 6), (70, 70)), tol=0.2)
    s = found.by_range()[1]
    assert s.sup_lower < s.sup
    assert "brackets" in repr(found)
    with pytest.raises(ShapeError, match="at most 64 atoms a side"):
        evaluate(Product((2, 2)), EOT, SAMPLER, pairs=1, sizes=((70, 70),), tol=0.2).starts()


def test_unconverged_couplings_are_counted():
    system, sampler = named("eot")
    hasty = lambda mu, nu: sf.Coupling.solve(  # noqa: E731
        mu, nu, epsilon=1e-3, max_iterations=2, on_failure="ignore"
    )
    found = evaluate(hasty, system, sampler, pairs=10)
    assert found.converged is not None
    assert found.summary().unconverged == float((~found.converged).double().mean()) > 0


# Marginals ---------------------------------------------------------------------------------------------------------------


def test_a_softmax_is_never_compared_in_silence():
    model = small("softmax")
    raw = evaluate(model, EOT, SAMPLER, pairs=10, sizes=SIZES, rounded=False)
    rounded = evaluate(model, EOT, SAMPLER, pairs=10, sizes=SIZES)
    assert float(raw.column_error.max()) > 0.01
    assert torch.equal(raw.column_error, rounded.column_error)
    assert "they are no couplings" in repr(raw)
    assert "rounded to exact marginals" in repr(rounded)
    pair = raw.worst[0]
    torch.testing.assert_close(pair.prediction.marginals()[0], pair.mu.weights)
    assert float((pair.prediction.marginals()[1] - pair.nu.weights).abs().sum()) > 1e-3
    torch.testing.assert_close(rounded.worst[0].prediction.marginals()[1], rounded.worst[0].nu.weights)


@pytest.mark.parametrize(
    ("predictor", "error", "message"),
    [
        (lambda mu, nu: 1, DTypeError, "returns a Coupling, received int"),
        (lambda mu, nu: Product((2, 2))(nu, mu).mT[:1], ShapeError, "expected a prediction of shape"),
        (lambda mu, nu: Product((2, 2))(mu.map(lambda t: t.flip(-1)), nu), WeightError, "another source"),
        (lambda mu, nu: sf.Coupling.from_dense(mu, nu, EOT(mu, nu).to_dense() / 2), WeightError, "off by 0.5; divide"),
        (lambda mu, nu: EOT(mu.map(lambda t: t), moved(nu)), WeightError, "other points of the target"),
        (lambda mu, nu: EOT(moved(mu), nu), WeightError, "other points of the source"),
        (3, DTypeError, "a model or a function"),
    ],
)
def test_predictors_that_are_none(predictor, error, message):
    with pytest.raises(error, match=message):
        evaluate(predictor, EOT, SAMPLER, pairs=4, sizes=SIZES)


def moved(mu):
    return sf.Measure(mu.points + 1e-6, mu.weights)


def test_a_permutation_is_another_coupling():
    uniform = PairSampler(dims=(2, 2), sizes=(4, 4), weights="uniform")
    for side in (0, 1):

        def permuted(*pair, side=side):
            pair = [sf.Measure(m.points.flip(-2), m.weights) if k == side else m for k, m in enumerate(pair)]
            return EOT(*pair)

        with pytest.raises(
            WeightError, match=f"other points of the {('source', 'target')[side]}; keep points and their"
        ):
            evaluate(permuted, EOT, uniform, pairs=3, sizes=((4, 4),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_points_may_be_rounded_and_padding_may_be_anything(dtype):
    def low(mu, nu):
        mu, nu = (sf.Measure(m.points.to(dtype), m.weights.to(dtype)) for m in (mu, nu))
        return sf.Coupling.solve(mu, nu, epsilon=0.5, on_failure="ignore")

    def padded(mu, nu):
        mu = sf.Measure(mu.points.masked_fill((mu.weights == 0).unsqueeze(-1), 0.7), mu.weights)
        return EOT(mu, nu)

    uniform = PairSampler(dims=(2, 2), sizes=(4, 4), weights="uniform")  # 1/4 is exact in every dtype
    assert evaluate(low, EOT, uniform, pairs=3, sizes=((4, 4),)).summary().sup < 0.01
    assert evaluate(padded, EOT, SAMPLER, pairs=4, sizes=SIZES).summary().sup < 1e-11


def test_mass_on_padding_is_no_raw_prediction():
    def everywhere(mu, nu):
        shape = (*mu.batch_shape, mu.n, nu.n)
        return sf.Coupling.from_dense(mu, nu, torch.full(shape, 1 / (mu.n * nu.n), dtype=torch.float64))

    with pytest.raises(WeightError, match="expected no mass on atoms of weight zero, received 0"):
        evaluate(everywhere, EOT, SAMPLER, pairs=4, sizes=SIZES, rounded=False)
    pair = evaluate(everywhere, EOT, SAMPLER, pairs=4, sizes=SIZES).worst[0]
    assert float(pair.prediction.mass) == pytest.approx(1, abs=1e-12)
    full = evaluate(everywhere, EOT, PairSampler(dims=(2, 2), sizes=(4, 4)), pairs=2, sizes=((4, 4),), rounded=False)
    assert float(full.worst[0].prediction.mass) == pytest.approx(1, abs=1e-12)


def test_a_nan_is_named():
    def broken(mu, nu):
        cost = sf.SqEuclidean()(mu.points, nu.points)
        cost[1] = torch.nan
        return sf.Coupling.solve(mu, nu, cost=cost, epsilon=0.1, on_failure="ignore")

    with pytest.raises(NonFiniteError, match="for pair 1 of the batch"):
        evaluate(broken, EOT, SAMPLER, pairs=4, sizes=SIZES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": 0}, "expected pairs as a whole number >= 1, received 0"),
        ({"pairs": [1, 2]}, "one for each of 1 ranges of sizes, received 2"),
        ({"sizes": ()}, "at least one range of sizes"),
        ({"sizes": ((3, 2),)}, "expected sizes as whole numbers low <= high"),
        ({"seed": -1}, "expected seed"),
        ({"batch": 0}, "expected batch"),
        ({"keep": True}, "expected keep"),
        ({"sizes": (2, 16)}, r"expected sizes as ranges \(low, high\), such as \(\(2, 16\),\), received \(2, 16\)"),
        ({"sizes": None}, "expected sizes as ranges"),
        ({"sizes": ["2:16"]}, "expected sizes as ranges"),
        ({"sizes": [(2, 4), (2.0, 3.0)]}, "expected sizes as whole numbers"),
        ({"pairs": None}, "expected pairs as whole numbers >= 1, received None"),
        ({"pairs": 1.5}, "expected pairs as whole numbers >= 1, received 1.5"),
        ({"pairs": "3"}, "expected pairs"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        evaluate(EOT, EOT, SAMPLER, **({"pairs": 1, "sizes": SIZES} | options))


def test_a_system_and_a_sampler_in_this_order():
    for call in (
        lambda *law: evaluate(EOT, *law, pairs=1),
        lambda *law: report(EOT, *law, pairs=1),
        lambda *law: best_fixed_cost(*law, pairs=1),
    ):
        with pytest.raises(DTypeError, match="expected a System, received PairSampler; the order is"):
            call(SAMPLER, EOT)
        with pytest.raises(DTypeError, match="expected a PairSampler, received NoneType"):
            call(EOT, None)
    with pytest.raises(DTypeError, match="expected a System, received NoneType"):
        adversarial(EOT, None, *start())


def test_a_model_is_evaluated_in_float64_and_left_alone():
    model = small("sinkhorn", max_iterations=3)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    found = evaluate(model, EOT, SAMPLER, pairs=5, sizes=SIZES)
    assert found.summary().unconverged == 0.0
    assert found.summary().column_error < 1e-8
    assert model.config.max_iterations == 3
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.dtype == torch.float32 and p.requires_grad for p in model.parameters())


def test_every_printed_form_says_lower_bound():
    found = report(Product((2, 2)), EOT, SAMPLER, pairs=3, sizes=SIZES, search=1, untrained=False)
    texts = [str(found), repr(found.evaluations[0]), repr(found.attack), json.dumps(found.to_dict())]
    texts += [json.dumps(found.evaluations[0].to_dict()), json.dumps(found.attack.to_dict())]
    assert all(LOWER_BOUND in text for text in texts)


def test_a_discontinuous_system_is_said_to_be_one():
    found = evaluate(Product((2, 2)), ExactTransport(), SAMPLER, pairs=2, sizes=SIZES)
    assert "'exact' is not continuous" in repr(found)
    options = {"pairs": 2, "sizes": SIZES, "untrained": False}
    assert "not continuous" in str(report(Product((2, 2)), ExactTransport(), SAMPLER, **options))


def test_json(tmp_path):
    found = evaluate(Product((2, 2)), EOT, SAMPLER, pairs=4, sizes=SIZES)
    found.to_json(tmp_path / "a.json")
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["pairs"]["upper"] == found.upper.tolist()
    assert record["all"]["sup"] == record["worst"][0]["upper"] == found.summary().sup


# The search --------------------------------------------------------------------------------------------------------------


def start(count=4, seed=0, sampler=SAMPLER):
    return draw(sampler, (3, 6), count, seed)


@pytest.mark.parametrize(
    ("predictor", "system", "method"),
    [
        (Product((2, 2)), EOT, "gradient"),
        (small("sinkhorn"), EOT, "gradient"),
        (small("softmax", CrossSoftmax), EOT, "gradient"),
        (Product((2, 2)), ExactTransport(), "random search"),
        (lambda mu, nu: Product((2, 2))(mu.detach(), nu.detach()), EOT, "random search"),
    ],
)
def test_a_search_finds_worse_pairs(predictor, system, method):
    mu, nu = start()
    found = adversarial(predictor, system, mu, nu, steps=12)
    assert (found.method, found.steps, found.stopped) == (method, 12, None)
    assert method in found.notes[0] or "at random" in found.notes[0]
    assert bool((found.upper >= found.start).all())
    assert bool((found.upper > found.start * 1.02).any())
    expected = evaluate(predictor, system, SAMPLER, pairs=4, sizes=((3, 6),))
    torch.testing.assert_close(found.start, expected.upper, atol=1e-8, rtol=0)
    pair = found.worst
    assert pair.upper == found.sup
    assert float(pair.mu.points.abs().max()) <= 1
    # The pair that is kept has the distance that is reported.
    again = w1(pair.prediction, system(pair.mu, pair.nu).rounded())
    assert float(again.upper) == pytest.approx(found.sup, abs=1e-8)


@given(seed=st.integers(0, 50), steps=st.integers(0, 4))
def test_a_search_never_ends_below_its_start(seed, steps):
    mu, nu = start(2, seed)
    for system in (EOT, ExactTransport()):
        found = adversarial(Product((2, 2)), system, mu, nu, steps=steps, seed=seed, rate=5.0)
        assert bool((found.upper >= found.start).all())
        assert bool((found.lower <= found.upper).all())


def test_more_steps_find_no_less():
    mu, nu = start()
    for system in (EOT, ExactTransport()):
        few, many = (adversarial(Product((2, 2)), system, mu, nu, steps=k).upper for k in (3, 9))
        assert bool((many >= few).all())


def test_padding_stays_padding():
    mu, nu = start(3)
    before = [(side.weights > 0).sum(-1) for side in (mu, nu)]
    found = adversarial(Product((2, 2)), EOT, mu, nu, steps=5)
    sizes = {(int(a), int(b)) for a, b in zip(*before, strict=True)}
    assert (found.worst.mu.n, found.worst.nu.n) in sizes


def test_pairs_that_did_not_converge_are_counted():
    def hasty(mu, nu):
        return sf.Coupling.solve(mu, nu, epsilon=1e-3, max_iterations=2, on_failure="ignore")

    found = adversarial(hasty, EOT, *start(), steps=2)
    assert found.converged is not None
    count = int((~found.converged).sum())
    assert count > 0
    assert f"{count} of the pairs that were found did not converge" in found.notes
    assert found.worst.converged in (True, False)
    calm = adversarial(small("sinkhorn"), EOT, *start(), steps=2)
    assert bool(calm.converged.all())
    assert calm.worst.converged is True
    assert adversarial(Product((2, 2)), EOT, *start(), steps=1).worst.converged is None


def test_a_perfect_predictor_has_no_bad_pairs():
    assert adversarial(EOT, EOT, *start(), steps=3).sup < 1e-11


def test_a_solver_that_fails_on_the_way_ends_the_search():
    class Brittle(EntropicTransport):
        calls = 0

        def couple(self, mu, nu):
            type(self).calls += 1
            if self.calls > 3:
                raise ConvergenceError("too hard")
            return super().couple(mu, nu)

    found = adversarial(Product((2, 2)), Brittle(), *start(), steps=10)
    assert (found.steps, found.stopped) == (3, "too hard")
    assert "the search ended early: too hard" in found.notes
    with pytest.raises(ConvergenceError):
        adversarial(Product((2, 2)), Brittle(), *start(), steps=10)


@pytest.mark.parametrize("options", [{"steps": -1}, {"rate": 0.0}, {"half_width": math.inf}, {"seed": 0.5}])
def test_bad_options_of_a_search(options):
    with pytest.raises(ConfigError, match=f"expected {next(iter(options))}"):
        adversarial(Product((2, 2)), EOT, *start(), **options)
    with pytest.raises(ConfigError, match="a batch"):
        adversarial(Product((2, 2)), EOT, *(side[0] for side in start()))


def test_bad_starts_of_a_search():
    mu, nu = start()
    with pytest.raises(ConfigError, match=r"batch shapes \(4,\) and \(1,\)"):
        adversarial(EOT, EOT, mu, nu[:1])
    with pytest.raises(DTypeError, match=r"expected mu as a Measure of torch.float64, such as .* received NoneType"):
        adversarial(EOT, EOT, None, None)
    with pytest.raises(
        DTypeError, match=r"expected nu as a Measure of torch.float64, .* received a Measure of torch.float16"
    ):
        adversarial(EOT, EOT, mu, sf.Measure(nu.points.half(), torch.full_like(nu.weights, 1 / nu.n).half()))
    far = sf.Measure(nu.points * 0 + 3, nu.weights)
    with pytest.raises(ConfigError, match=r"expected points of nu within half_width = 1 of zero, received .* size 3;"):
        adversarial(Product((2, 2)), EOT, mu, far, steps=1)
    assert adversarial(Product((2, 2)), EOT, mu, far, steps=1, half_width=3.0).steps == 1
    # Padding has no place.
    wide = sf.Measure(nu.points.masked_fill((nu.weights == 0).unsqueeze(-1), 3.0), nu.weights)
    assert bool((nu.weights == 0).any())
    assert adversarial(Product((2, 2)), EOT, mu, wide, steps=1).steps == 1


# Baselines ---------------------------------------------------------------------------------------------------------------


def test_the_best_fixed_cost_is_the_cost_of_the_system():
    found = best_fixed_cost(EOT, SAMPLER, pairs=8, epsilons=(0.05, 0.5, 5.0))
    assert found == FixedCost(sf.SqEuclidean(), 0.5)
    reflected = lambda mu, nu: EOT(mu, sf.Measure(-nu.points, nu.weights))  # noqa: E731
    plan = reflected(*start()).to_dense()
    torch.testing.assert_close(FixedCost(sf.SqEuclidean(), 0.5, True)(*start()).to_dense(), plan, atol=1e-7, rtol=0)


def test_a_refinement_is_tried():
    system = EntropicTransport(sf.SqEuclidean(), epsilon=10**0.25, dims=(2, 2))
    found = best_fixed_cost(system, SAMPLER, pairs=8, epsilons=(0.1, 1.0))
    assert found.epsilon == pytest.approx(10**0.25)


def test_no_fixed_cost_between_spaces_of_two_dimensions():
    system, sampler = Product((1, 2)), PairSampler(dims=(1, 2))
    with pytest.raises(ConfigError, match="equal dims"):
        best_fixed_cost(system, sampler)
    found = report(system, system, sampler, pairs=2, sizes=SIZES)
    assert any(reason.startswith("fixed cost: expected") for reason in found.skipped)
    for epsilons in ((), 0.1, "ab", [-1.0], [True], None):
        with pytest.raises(ConfigError, match="expected a sequence of positive, finite epsilons"):
            best_fixed_cost(EOT, SAMPLER, epsilons=epsilons)


def test_the_choice_is_made_on_other_pairs():
    assert not torch.equal(draw(SAMPLER, (2, 6), 4, 0)[0].points, draw(SAMPLER, (2, 6), 4, 0, 1)[0].points)


def test_a_report_has_everything_side_by_side(monkeypatch):
    told = []
    monkeypatch.setattr(reports, "best_fixed_cost", lambda *law, seed: FixedCost(sf.SqEuclidean(), 0.5))
    found = report(
        small("sinkhorn"),
        EOT,
        SAMPLER,
        pairs=4,
        sizes=SIZES,
        trained={"soft": small("softmax"), "cross": small("softmax", CrossSoftmax)},
        search=2,
        name="model",
        progress=lambda done, total: told.append((done, total)),
    )
    names = [evaluation.predictor for evaluation in found.evaluations]
    assert names[:6] == ["model", "soft, rounded", "soft, raw", "cross, rounded", "cross, raw", "product"]
    assert names[6].startswith("fixed cost SqEuclidean(x, y)")
    assert found.skipped == ()
    assert told[-1] == (7 * 4 + 2, 7 * 4 + 2)
    assert told == sorted(told)
    table = str(found).splitlines()
    assert table[1].split()[:4] == ["predictor", "atoms", "pairs", "mean"]
    assert found.worst.upper == found.attack.sup
    untrained = report(small("sinkhorn"), EOT, SAMPLER, pairs=2, sizes=SIZES)
    assert any("trained first" in reason for reason in untrained.skipped)


def test_no_row_of_a_report_is_replaced(monkeypatch):
    cost = FixedCost(sf.SqEuclidean(), 0.5)
    monkeypatch.setattr(reports, "best_fixed_cost", lambda *law, seed: cost)
    law = {"pairs": 4, "sizes": SIZES}
    for name in ("product", cost.name):
        found = report(EOT, EOT, SAMPLER, name=name, **law)
        names = [evaluation.predictor for evaluation in found.evaluations]
        assert names[0] == name
        assert f"{name} (baseline)" in names[1:]
        assert len(set(names)) == 3
        assert found.evaluations[0].summary().sup < 1e-11
        others = {e.predictor: e.summary().sup for e in found.evaluations[1:]}
        assert others["product (baseline)" if name == "product" else "product"] > 0.01
    beside = report(EOT, EOT, SAMPLER, name="x", trained={"product": EOT}, **law)
    assert [e.predictor for e in beside.evaluations][:3] == ["x", "product", "product (baseline)"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"name": "x", "trained": {"x": EOT}}, ConfigError, "a name of its own, received 'x' twice"),
        ({"name": "a, raw", "trained": {"a": small()}}, ConfigError, "a name of its own, received 'a, raw' twice"),
        ({"trained": {"a": None}}, DTypeError, "a model or a function"),
        ({"trained": [EOT]}, ConfigError, "expected trained as a mapping"),
        ({"trained": {"": EOT}}, ConfigError, "to have a name, received ''"),
        ({"name": 3}, ConfigError, "to have a name, received 3"),
        ({"search": -1}, ConfigError, "expected search as a whole number >= 0, received -1"),
        ({"search": 1.5}, ConfigError, "expected search"),
        ({"sizes": (2, 16)}, ConfigError, "expected sizes as ranges"),
    ],
)
def test_a_report_checks_before_it_evaluates(monkeypatch, options, error, message):
    def never(*_, **__):
        raise AssertionError

    monkeypatch.setattr(reports, "evaluate", never)
    monkeypatch.setattr(reports, "best_fixed_cost", never)
    with pytest.raises(error, match=message):
        report(EOT, EOT, SAMPLER, **options)


def test_a_search_that_cannot_start_is_skipped():
    class Far(Fixed):
        def pairs(self, count, *, generator):
            return tuple(side.map(lambda t: t) if k else sf.Measure(3 * side.points, side.weights)
                         for k, side in enumerate(super().pairs(count, generator=generator)))  # fmt: skip

    found = report(Product((1, 1)), Monotone(), Far(dims=(1, 1)), pairs=2, sizes=((2, 2),), search=2, untrained=False)
    assert found.attack is None
    assert any("adversarial: expected points of mu within half_width" in reason for reason in found.skipped)


def test_cross_softmax_starts_as_the_softmax_head_and_learns_what_that_cannot_see():
    model = small("softmax", CrossSoftmax)
    plain = small("softmax")
    plain.load_state_dict({name: t for name, t in model.state_dict().items() if not name.startswith("cross.")})
    mu, nu = (side.to(torch.float32) for side in start())
    torch.testing.assert_close(model(mu, nu).to_dense(), plain(mu, nu).to_dense())
    nn.init.normal_(model.cross.leave.weight)
    moved = sf.Measure(mu.points.flip(0), mu.weights.flip(0))
    keys = [model.target_encoder(nu) + model.cross(model.target_encoder(nu), model.source_encoder(m), m.weights)
            for m in (mu, moved)]  # fmt: skip
    assert not torch.allclose(*keys)


def test_cross_softmax_obeys_the_laws():
    model = small("softmax", CrossSoftmax).double()
    nn.init.normal_(model.cross.leave.weight, std=0.3)
    check_coupling_model(model, 2)


def test_predictors_are_loaded_as_what_they_were(tmp_path):
    for name, model in (("plain", small("softmax")), ("cross", small("softmax", CrossSoftmax))):
        model.save_pretrained(tmp_path / name)
        loaded = load_predictor(tmp_path / name)
        assert type(loaded) is type(model)
        assert all(torch.equal(t, loaded.state_dict()[key]) for key, t in model.state_dict().items())
    with pytest.raises(ModelError):
        sf.SinkhornTransformer.from_pretrained(tmp_path / "cross")
    (tmp_path / "cross" / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ModelError, match="damaged"):
        load_predictor(tmp_path / "cross")
    with pytest.raises(ModelError):
        load_predictor(tmp_path)
    with pytest.raises(ConfigError, match="head='softmax'"):
        small("sinkhorn", CrossSoftmax)


# Couplings that are given ------------------------------------------------------------------------------------------------


def test_distances_of_given_couplings():
    mu, nu = line(0.0, 1.0), line(0.0, 1.0)
    diagonal, product = Monotone()(mu, nu), Product((1, 1))(mu, nu)
    found = distances([diagonal, product], [product, product])
    assert [pair.value for pair in found.pairs] == pytest.approx([0.5, 0.0], abs=1e-12)
    assert found.summary().sup == pytest.approx(0.5, abs=1e-12)
    assert len(found.notes) == 1
    with pytest.raises(ShapeError, match="received 1 and 2"):
        distances([diagonal], [product, product])
    with pytest.raises(ShapeError, match="pair 0: expected points of one dimension"):
        distances([diagonal], [Product((2, 2))(*(side[0] for side in start()))])


def test_one_coupling_a_batch_or_several():
    mu, nu = start(3)
    batch = EOT(mu, nu)
    assert len(distances(batch, batch).pairs) == 3
    assert len(distances([batch], [batch[0], batch[1], batch[2]]).pairs) == 3
    assert distances(batch[0], Product((2, 2))(mu[0], nu[0])).pairs[0].value > 0
    for other in (None, 3, "a", ["a"], [None], mu):
        with pytest.raises(DTypeError, match="expected"):
            distances(other, batch)
        with pytest.raises(DTypeError, match="expected"):
            distances(batch, other)


@pytest.mark.parametrize("rounded", [False, True])
def test_a_plan_without_mass_has_no_distance(rounded):
    mu, nu = line(0.0, 1.0), line(0.0, 1.0)
    zero = sf.Coupling.from_dense(mu, nu, torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(WeightError, match="pair 1: expected plans of positive mass"):
        distances([Monotone()(mu, nu)] * 2, [Monotone()(mu, nu), zero], rounded=rounded)


def test_unequal_marginals_are_said():
    here = Product((1, 1))(line(0.0, 1.0), line(0.0))
    there = Product((1, 1))(line(0.0, 3.0), line(0.5))
    found = distances([here], [there])
    assert found.pairs[0].marginals == pytest.approx(1.5, abs=1e-12)
    assert found.pairs[0].value == pytest.approx(1.5, abs=1e-12)
    assert "1 of 1 pairs have unequal marginals, up to 1.5 apart" in str(found)


def test_plans_that_miss_their_weights():
    mu, nu = line(0.0, 1.0), line(0.0, 1.0)
    off = sf.Coupling.from_dense(mu, nu, torch.tensor([[0.5, 0.25], [0.0, 0.25]], dtype=torch.float64))
    raw, rounded = (distances([off], [Monotone()(mu, nu)], rounded=value) for value in (False, True))
    assert raw.pairs[0].marginal_error == rounded.pairs[0].marginal_error == pytest.approx(0.5)
    assert raw.pairs[0].marginals == pytest.approx(0.25)
    assert rounded.pairs[0].marginals == pytest.approx(0.0, abs=1e-12)
    assert "compared as they are" in str(raw)
    assert "rounded to them" in str(rounded)
    half = sf.Coupling.from_dense(mu, nu, torch.eye(2, dtype=torch.float64) / 4)
    with pytest.raises(WeightError):
        distances([half], [off])


# Files -------------------------------------------------------------------------------------------------------------------


def ragged(dtype=torch.float64):
    pairs = [(line(0.0, 1.0), line(0.5)), (line(0.0, weights=[1.0]), line(0.0, 2.0, 3.0, weights=[0.5, 0.25, 0.25]))]
    return [Product((1, 1))(mu, nu) for mu, nu in pairs] if dtype == torch.float64 else [
        sf.Coupling.from_dense(mu.to(dtype), nu.to(dtype), Product((1, 1))(mu, nu).to_dense().to(dtype)) for mu, nu in pairs
    ]  # fmt: skip


@pytest.mark.parametrize("ending", [".npz", ".jsonl"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_couplings_come_back(tmp_path, ending, dtype):
    given_ = ragged(dtype)
    save_couplings(tmp_path / f"a{ending}", given_)
    loaded = load_couplings(tmp_path / f"a{ending}")
    assert len(loaded) == 2
    for pi, rho in zip(given_, loaded, strict=True):
        assert rho.dtype == dtype
        assert float(w1(pi, rho).upper) < 1e-12
        n, m = pi.shape
        assert torch.equal(rho.to_dense()[:n, :m], pi.to_dense())
        assert torch.equal(rho.source.points[:n], pi.source.points)
        assert torch.equal(rho.target.weights[:m], pi.target.weights)
        assert not rho.to_dense()[n:].any()


@pytest.mark.parametrize("ending", [".npz", ".jsonl"])
def test_a_batch_is_written_one_by_one_and_a_float32_solution_survives(tmp_path, ending):
    mu, nu = (side.to(torch.float32) for side in start(3))
    pi = sf.Coupling.solve(sf.Measure.normalized(mu.points, mu.weights), nu, epsilon=0.1)
    save_couplings(tmp_path / f"a{ending}", pi)
    loaded = load_couplings(tmp_path / f"a{ending}")
    assert [tuple(rho.shape) for rho in loaded] == [(6, 6)] * 3
    torch.testing.assert_close(torch.stack([rho.to_dense() for rho in loaded]), pi.to_dense())


@pytest.mark.parametrize("ending", [".npz", ".jsonl"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_can_be_read_back(tmp_path, ending, dtype):
    generator = torch.Generator().manual_seed(0)
    mu, nu = (sf.Measure.uniform(torch.rand(n, 2, generator=generator).to(dtype)) for n in (37, 41))
    pi = sf.Coupling.solve(mu, nu, epsilon=0.1)
    assert abs(float(mu.weights.double().sum()) - 1) > 1e-5
    save_couplings(tmp_path / f"a{ending}", pi)
    (rho,) = load_couplings(tmp_path / f"a{ending}")
    assert rho.dtype == torch.float32
    assert torch.equal(rho.to_dense(), pi.to_dense().float())
    assert torch.equal(rho.source.points, mu.points.float())
    torch.testing.assert_close(rho.source.weights, torch.full((37,), 1 / 37))


@pytest.mark.parametrize("name", ["X.NPZ", "X.Jsonl"])
def test_the_ending_may_be_in_capitals(tmp_path, name):
    save_couplings(tmp_path / name, ragged())
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert len(load_couplings(tmp_path / name)) == 2


def test_weights_default_to_the_sums(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"source": [[0], [1]], "target": [[0.5]], "plan": [[0.25], [0.75]]}\n')
    (pi,) = load_couplings(tmp_path / "a.jsonl")
    assert pi.source.weights.tolist() == [0.25, 0.75]
    np.savez(tmp_path / "a.npz", source=[[0], [1]], target=[[0.5]], plan=[[0.25], [0.75]])
    (pi,) = load_couplings(tmp_path / "a.npz")
    assert (pi.dtype, float(pi.marginal_error())) == (torch.float64, 0.0)


GOOD = {"source": [[0.0], [1.0]], "target": [[0.5]], "plan": [[0.25], [0.75]]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": None}, "key 'plan': expected numbers, received object values"),
        ({"plan": [[0.25], [0.75, 0]]}, "key 'plan': expected rows of one length"),
        (
            {"plan": [[0.25]]},
            r"key 'plan': expected shape \(2, 1\) for 2 source and 1 target points, received \(1, 1\)",
        ),
        ({"plan": [[0.25], [-0.75]]}, "key 'plan': expected masses >= 0, received -0.75"),
        ({"plan": [[0.25], [0.5]]}, "key 'plan': expected weights summing to 1, received a sum of 0.75"),
        ({"plan": [["a"], ["b"]]}, "key 'plan': expected numbers, received str"),
        ({"plan": [[True], [False]]}, "key 'plan': expected numbers, received bool values"),
        ({"source": [0.0, 1.0]}, r"key 'source': expected points of shape \(atoms, d\), received \(2,\)"),
        ({"target": []}, r"key 'target': expected points of shape"),
        ({"source_weights": [0.5]}, r"key 'source_weights': expected shape \(2,\)"),
        ({"source_weights": [0.5, 0.4]}, "key 'source_weights': expected weights summing to 1"),
        ({"weights": [1.0]}, "key 'weights': expected the keys source, target, plan"),
        ({"dtype": "float16"}, "key 'dtype': expected one of float32, float64, received 'float16'"),
        ({"source": [[0.0], [10**400]]}, "key 'source': expected numbers"),
        ({"source": [[0.0], [True]]}, "key 'source': expected numbers, received bool values among them"),
        ({"source_weights": [1, False]}, "key 'source_weights': expected numbers, received bool values among them"),
        ({"dtype": "float32", "source": [[0.0], [1e39]]}, "key 'source': expected finite numbers"),
    ],
)
def test_bad_lines_are_named(tmp_path, change, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | change) + "\n")
    with pytest.raises(FormatError, match=f"a.jsonl, line 2, {message}"):
        load_couplings(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected at least one coupling, received an empty file"),
        ("\n", "line 1: expected a JSON object, received something else"),
        ("[1]\n", "line 1: expected a JSON object, received a JSON list"),
        ('{"source": [[0]], "target": [[NaN]], "plan": [[1]]}', "line 1: expected finite numbers, received NaN"),
        ('{"source": [[0]], "source": [[0]]}', "line 1, key 'source': expected every key once"),
        ('{"source": [[0]], "target": [[0]]}', "line 1, key 'plan': expected it, but it is missing"),
        ('{"source": [[1e999]], "target": [[0]], "plan": [[1]]}', "line 1, key 'source': expected finite numbers"),
        ("[" * 100_000, "line 1: expected a JSON object"),
        ('{"source": [[' + "1" * 5000 + "]]}", "line 1: expected a JSON object, received something else"),
    ],
)
def test_lines_that_are_no_objects(tmp_path, text, message):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(FormatError, match=message):
        load_couplings(tmp_path / "a.jsonl")


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(FormatError, match="line 1: expected a JSON object"):
        load_couplings(tmp_path / "a.jsonl")


def test_bad_archives(tmp_path):
    path = tmp_path / "a.npz"

    def refused(message, **arrays):
        np.savez(path, **arrays)
        with pytest.raises(FormatError, match=message):
            load_couplings(path)

    refused("key 'plan': expected it, but it is missing", source=[[0.0]], target=[[0.0]])
    refused("key 'plan': expected numbers, received dtype bool", source=[[0.0]], target=[[0.0]], plan=[[True]])
    refused("plain numbers", source=np.array([None]), target=[[0.0]], plan=[[1.0]])
    refused("key 'target': expected 2 couplings", source=np.zeros((2, 1, 1)), target=[[0.0]], plan=np.ones((2, 1, 1)))
    refused(
        "coupling 1, key 'plan': expected finite",
        source=np.zeros((2, 1, 1)), target=np.zeros((2, 1, 1)), plan=[[[1.0]], [[np.nan]]],
    )  # fmt: skip
    path.write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(FormatError, match=r"readable \.npz"):
        load_couplings(path)
    np.save(tmp_path / "b.npy", np.ones(3))
    (tmp_path / "b.npy").rename(path)
    with pytest.raises(FormatError, match=r"readable \.npz"):
        load_couplings(path)


def test_damaged_archives(tmp_path):
    np.savez(tmp_path / "good.npz", **GOOD)
    good = (tmp_path / "good.npz").read_bytes()
    with zipfile.ZipFile(tmp_path / "good.npz") as archive:
        member = archive.read("plan.npy")
    path = tmp_path / "a.npz"

    def refused(message=r"readable \.npz"):
        with pytest.raises(FormatError, match=message):
            load_couplings(path)

    def members(change):
        with zipfile.ZipFile(path, "w") as archive:
            for key in GOOD:
                archive.writestr(f"{key}.npy", change)

    # An unknown compression, an encrypted member, an array larger than any memory, an end that is missing.
    at = good.index(b"PK\x01\x02")
    for offset, byte in ((10, 97), (8, 1)):
        path.write_bytes(good[: at + offset] + bytes([byte]) + good[at + offset + 1 :])
        refused()
    members(member.replace(b"(2, 1), }          ", b"(99999999999999, 1), }")[: len(member)])
    refused()
    members(member[:-3])
    refused()
    with zipfile.ZipFile(path, "w") as archive:
        for key in GOOD:
            archive.writestr(key, b"text")
    refused("key 'source': expected an array, received another kind of file")


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3), st.floats(0, 1))
def test_noise_in_an_archive_is_a_clear_error_or_none(tmp_path_factory, changes, kept):
    path = tmp_path_factory.getbasetemp() / "noise.npz"
    np.savez(path, **GOOD)
    raw = bytearray(path.read_bytes())
    for place, byte in changes:
        raw[place % len(raw)] = byte
    path.write_bytes(raw if kept > 0.2 else raw[: int(5 * kept * len(raw))])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # numpy, about old headers
        with contextlib.suppress(FormatError):
            load_couplings(path)


def test_no_path_and_no_couplings(tmp_path):
    for action in (load_couplings, lambda path: save_couplings(path, ragged()), load_predictor):
        with pytest.raises(DTypeError, match="received NoneType"):
            action(None)
    for couplings in (None, [None], "ab", line(0.0)):
        with pytest.raises(DTypeError, match="expected"):
            save_couplings(tmp_path / "a.npz", couplings)
    assert not list(tmp_path.iterdir())


def test_a_number_too_large_for_float32_is_no_warning(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, source=[[1e39]], target=[[0.0]], plan=np.ones((1, 1), np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FormatError, match="key 'source': expected finite numbers"):
            load_couplings(path)


def test_endings_and_nothing_to_write(tmp_path):
    for action in (load_couplings, lambda path: save_couplings(path, ragged())):
        with pytest.raises(ConfigError, match=r"ending in \.npz or \.jsonl"):
            action(tmp_path / "a.txt")
    with pytest.raises(ShapeError, match="at least one coupling"):
        save_couplings(tmp_path / "a.npz", [])
    with pytest.raises(ShapeError, match=r"one \(d, d', dtype\)"):
        save_couplings(tmp_path / "a.npz", [*ragged(), *ragged(torch.float32)])
    with pytest.raises(FileNotFoundError):
        load_couplings(tmp_path / "absent.npz")


# Pictures ----------------------------------------------------------------------------------------------------------------


def test_pictures(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    from sinkformer import plots

    found = evaluate(Product((2, 2)), EOT, SAMPLER, pairs=[5, 2], sizes=((2, 4), (7, 8)), name="a$b")
    _, ax = plt.subplots()
    assert plots.evaluation(found, ax) is ax
    mean, p95, sup = (np.asarray(drawn.get_ydata()) for drawn in ax.lines)
    summaries = found.by_size()
    np.testing.assert_allclose(sup, [s.sup for s in summaries])
    assert bool((mean <= p95).all())
    assert bool((p95 <= sup).all())
    assert ax.lines[0].get_xdata().tolist() == [float(s.label.split("-")[-1]) for s in summaries]
    assert "lower bound" in ax.get_title()
    ax = plots.distribution([found, evaluate(EOT, EOT, SAMPLER, pairs=3)], plt.subplots()[1])
    x, y = ax.lines[0].get_data()
    assert x[-1] == found.summary().sup
    assert (y[0], y[-1]) == (1.0, pytest.approx(1 / 7))
    plots.save(plots.evaluation_figure([found]), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000
    plt.close("all")
