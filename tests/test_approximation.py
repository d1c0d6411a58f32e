"""The proof as a pipeline: partitions, bounds of every step against what is measured, ranks, tables, and the laws."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sinkformer as sf
from sinkformer.approximation import Approximation, Ledger, Partition, Step, build
from sinkformer.approximation.pairs import Pairs
from sinkformer.approximation.pipeline import _cost_step, _gauge_distance, _solved
from sinkformer.approximation.separation import _Problem, full_rank
from sinkformer.approximation.smoothing import CELL, Cells, divergence_of
from sinkformer.errors import (
    ConfigError,
    ConvergenceError,
    ConvergenceWarning,
    DTypeError,
    NonFiniteError,
    ShapeError,
    WeightError,
)
from sinkformer.metrics import w1
from sinkformer.systems import ExactTransport, Monotone, PairSampler, Product, RandomTeacher, every_pair, named
from sinkformer.testing import random_measure

NAMES = ("eot", "monotone", "whitened", "teacher", "switch", "product")
KINDS = ("geometric", "arithmetic")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def targets(name: str, count: int = 6, seed: int = 0, **law) -> sf.Coupling:
    system, sampler = named(name)
    return system(*replace(sampler, **law).pairs(count, generator=generator(seed)))


def block(name: str, sides: tuple[int, int] = (4, 4), n: int = 16, seed: int = 0) -> sf.Coupling:
    system, sampler = named(name)
    return system(*every_pair(*replace(sampler, sizes=(n, n)).block(1, *sides, generator=generator(seed))))


def random_plan(n: int, m: int, seed: int, spread: float = 4.0) -> sf.Coupling:
    """A coupling of no structure: random costs."""
    rng = generator(seed)
    mu, nu = random_measure(n, 2, generator=rng), random_measure(m, 3, generator=rng)
    cost = spread * torch.randn(n, m, generator=rng, dtype=torch.float64)
    return sf.Coupling.solve(mu, nu, cost=cost, epsilon=1.0, tolerance=1e-11).rounded()


def assert_bounded(ledger: Ledger) -> None:
    for step in ledger.steps:
        assert bool((step.distances <= step.bounds).all()), f"{step.name}: {step.measured} > {step.bound}"
        assert bool(torch.isfinite(step.bounds).all())
    assert bool((ledger.distances <= ledger.bounds).all())
    assert ledger.measured <= ledger.bound


# Partitions of unity ------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.integers(1, 4), st.floats(1e-3, 3.0), st.integers(0, 10**6))
def test_a_partition_of_unity_by_hats(d, mesh, seed):
    points = 2 * torch.rand(20, d, generator=generator(seed), dtype=torch.float64) - 1
    nodes, values = Partition(mesh).nodes(points)
    side = mesh / (2 * d**0.5)
    assert float(values.min()) >= 0
    torch.testing.assert_close(values.sum(-1), torch.ones(20, dtype=torch.float64), atol=1e-12, rtol=0)
    # Barycentric coordinates reproduce affine functions, the coordinates among them.
    torch.testing.assert_close((values.unsqueeze(-1) * nodes * side).sum(-2), points, atol=1e-12, rtol=0)
    t = points.unsqueeze(-2) / side - nodes
    hats = (1 - t.clamp_min(0).amax(-1) - (-t).clamp_min(0).amax(-1)).clamp_min(0)
    torch.testing.assert_close(values, hats, atol=1e-9, rtol=0)


def test_hats_on_a_line_interpolate():
    points = torch.linspace(-1, 1, 101, dtype=torch.float64).unsqueeze(-1)
    nodes, values = Partition(0.5).nodes(points)
    grid = np.arange(-5, 6) * 0.25
    wanted = np.interp(points.squeeze(-1).numpy(), grid, np.cos(grid))
    found = (values * (0.25 * nodes.squeeze(-1)).cos()).sum(-1)
    np.testing.assert_allclose(found, wanted, atol=1e-12)


@settings(max_examples=25)
@given(st.integers(1, 3), st.floats(0.05, 2.0), st.integers(0, 10**6))
def test_points_of_one_support_are_within_the_mesh(d, mesh, seed):
    points = 2 * torch.rand(12, d, generator=generator(seed), dtype=torch.float64) - 1
    phi = Partition(mesh).at_atoms(sf.Measure.stack([sf.Measure.uniform(points)]))[0]
    together = ((phi > 0).unsqueeze(0) & (phi > 0).unsqueeze(1)).any(-1)
    assert float(torch.cdist(points, points)[together].max()) <= mesh


def test_a_mesh_too_fine_for_the_points_is_refused():
    with pytest.raises(ConfigError, match="mesh above"):
        Partition(1e-18).nodes(torch.ones(1, 2, dtype=torch.float64))


# Bounds -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interpolation", KINDS)
@pytest.mark.parametrize(
    ("mesh", "delta", "epsilon"), [(2.0, 1e-1, 1.0), (0.5, 1e-3, 0.05), (0.1, 1e-8, 3.0), (1e-3, 1e-14, 1.0)]
)
@pytest.mark.parametrize("name", ["switch", "monotone"])
def test_every_step_is_within_its_bound(name, mesh, delta, epsilon, interpolation):
    found = build(
        targets(name, 3, rare=0.3),
        1e-3,
        epsilon=epsilon,
        rank=4,
        mesh=mesh,
        delta=delta,
        interpolation=interpolation,
        iterations=5,
        on_failure="ignore",
    )
    assert_bounded(found.ledger)
    assert found.ledger.steps[0].bound == pytest.approx(2 * mesh)
    assert [step.name for step in found.ledger.steps] == ["smoothing", f"{interpolation} density", "separation"]


@settings(max_examples=12)
@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.floats(1e-2, 4.0),
    st.sampled_from([1e-12, 1e-6, 1e-2, 1.0]),
    st.sampled_from(KINDS),
    st.integers(0, 10**6),
)
def test_steps_of_random_plans_are_within_their_bounds(n, m, mesh, delta, interpolation, seed):
    found = build(
        random_plan(n, m, seed),
        0.1,
        rank=2,
        mesh=mesh,
        delta=delta,
        interpolation=interpolation,
        iterations=5,
        on_failure="ignore",
    )
    assert_bounded(found.ledger)


@given(st.floats(1e-2, 3.0), st.sampled_from([1e-12, 1e-6, 1e-2, 1.0]), st.integers(0, 10**6))
@settings(max_examples=12)
def test_relative_entropies_are_bounded_as_proved(mesh, delta, seed):
    pairs = Pairs.of([random_plan(7, 5, seed)])
    cells = Cells.of(pairs, mesh)
    smoothed = cells.smoothed()
    pi = pairs.coupling(smoothed)
    assert float(pi.marginal_error().max()) <= 1e-13
    for kind in KINDS:
        logits = cells.logits(delta, kind)
        entropy = divergence_of(smoothed, _solved(pairs, logits)[0])
        jensen = cells.divergence_from(smoothed, logits)
        assert float(entropy) <= float(jensen) + 1e-12
        assert float(jensen) <= float(cells.divergence(delta, kind)) + 1e-12
    assert float(cells.divergence(delta, "arithmetic")) <= delta + CELL * cells.count * delta**0.5
    assert float(((1 - 1e-12) * delta - cells.logits(delta, "arithmetic").exp()).max()) <= 0
    assert float(cells.logits(delta, "arithmetic").exp().max()) <= delta + 0.5 * delta**-0.5 + 1e-9


def test_within_a_fibre_nothing_needs_more_than_h():
    """Couplings of the same measures: W1 <= H TV, which the diameter of the product would make twice as much."""
    a, b = torch.tensor([[0.0], [1.0]]).double(), torch.tensor([[0.0], [3.0]]).double()
    mu, nu = sf.Measure.uniform(a), sf.Measure.uniform(b)
    along, against = (sf.Coupling.from_dense(mu, nu, t.double() / 2) for t in (torch.eye(2), 1 - torch.eye(2)))
    assert float(w1(along, against).value) == pytest.approx(1.0)
    assert float(Pairs.of([along]).fibre) == 1.0


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 10**6))
@settings(max_examples=15)
def test_distance_modulo_functions_of_one_point_is_the_linear_program(n, m, seed):
    pairs = Pairs.of([random_plan(n, m, seed)])
    difference = torch.randn(1, n, m, generator=generator(seed), dtype=torch.float64)
    rows, columns = np.repeat(np.eye(n), m, 0), np.tile(np.eye(m), (n, 1))
    design = np.concatenate([rows, columns], 1)
    flat, ones = difference.flatten().numpy(), np.ones((n * m, 1))
    best = scipy.optimize.linprog(
        np.r_[np.zeros(n + m), 1.0],
        np.block([[design, -ones], [-design, -ones]]),
        np.r_[flat, -flat],
        bounds=(None, None),
    )
    assert best.fun - 1e-9 <= float(_gauge_distance(pairs, difference)) <= best.fun + 1e-6


def test_the_bound_by_costs_is_sharp():
    """Two by two atoms, logits t on the diagonal and -t off it: the plans are tanh(t) apart in L1, and the costs t."""
    corners = sf.Measure.uniform(torch.tensor([[0.0], [2.0]]).double())
    pairs = Pairs.of([Product((1, 1))(corners, corners)])
    signs = torch.tensor([[[1.0, -1.0], [-1.0, 1.0]]]).double()
    for t in (0.01, 0.1, 1.0):
        start = torch.zeros_like(signs)
        step, plan = _cost_step("step", {}, pairs, _solved(pairs, start)[0], start, t * signs)
        assert float(plan.sub(0.25).abs().sum()) == pytest.approx(np.tanh(t))
        assert step.measured == pytest.approx(np.tanh(t))
        assert step.parameters["|c - c'|_g / epsilon"] == pytest.approx(t)
        assert step.measured <= step.bound <= t + 1e-6


@given(st.integers(1, 6), st.integers(1, 6), st.floats(0.01, 10.0), st.integers(0, 10**6))
@settings(max_examples=25)
def test_plans_are_no_further_apart_than_costs(n, m, scale, seed):
    pairs = Pairs.of([random_plan(n, m, seed)])
    one, other = scale * torch.randn(2, 1, n, m, generator=generator(seed + 1), dtype=torch.float64)
    apart = (_solved(pairs, one)[0] - _solved(pairs, other)[0]).abs().sum()
    assert float(apart) <= float(_gauge_distance(pairs, one - other)) + 1e-9


@pytest.mark.parametrize("interpolation", KINDS)
@pytest.mark.parametrize("name", ["switch", "monotone"])
def test_steps_converge_with_mesh_and_delta(name, interpolation):
    pi, totals, densities = targets(name, count=3, seed=3), [], []
    for mesh, delta in ((1.0, 1e-2), (0.1, 1e-4), (0.01, 1e-6), (1e-5, 1e-10)):
        ledger = build(
            pi, 1e-3, mesh=mesh, delta=delta, rank=16, interpolation=interpolation, iterations=1, on_failure="ignore"
        ).ledger
        totals.append(ledger.measured)
        densities.append(ledger.steps[1].measured)
    assert totals[0] > 1e-3
    assert all(later < earlier / 3 for earlier, later in pairwise(totals))
    assert totals[-1] < 1e-5
    assert densities[-1] < 1e-5


# Ranks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "rank"), [("product", 1), ("eot", 2), ("whitened", 2)])
def test_finds_the_rank_that_a_system_has(name, rank):
    """Squared distances, whitened or not, are inner products of two coordinates, whatever is added for one point alone."""
    found = build(block(name, (2, 3)), 1e-3)
    assert found.reached
    assert found.factors.rank == rank
    assert_bounded(found.ledger)


def test_the_gradient_of_the_loss():
    """Central differences, on pairs that share a measure."""
    pi = block("switch", (2, 1), n=3)[0]
    pairs = Pairs.of([pi[0, 0], pi[1, 0]])
    problem = _Problem(pairs, pairs.plans, rank=2, goal=0.0)
    rng = np.random.default_rng(0)
    x, direction = rng.standard_normal((2, 2 * (2 * 3 + 3)))
    value, gradient = problem(x)
    step = 1e-4
    slope = (problem(x + step * direction)[0] - problem(x - step * direction)[0]) / (2 * step)
    assert gradient @ direction == pytest.approx(slope, rel=1e-5)
    g, h = problem.factors(x)
    plans = _solved(pairs, g[pairs.source_index] @ h[pairs.target_index].mT)[0]
    assert value == pytest.approx(float(divergence_of(pairs.plans, plans).sum()), rel=1e-6)


def test_a_rank_too_small_is_said_with_numbers():
    pi = block("eot", (2, 3))
    with pytest.warns(
        ConvergenceWarning, match=r"sup W1 is 0\.\d+ over 6 pairs, above the tolerance 0.001.*'separation'"
    ):
        found = build(pi, 1e-3, rank=1)
    assert not found.reached
    assert found.ledger.measured > 0.05
    assert "not reached" in str(found.ledger)
    with pytest.raises(ConvergenceError, match="above the tolerance"):
        build(pi, 1e-3, rank=1, on_failure="raise")


def test_the_full_rank_separates_everything():
    plans = [random_plan(5, 7, seed) for seed in range(3)]
    assert full_rank(Pairs.of(plans)) == 5
    found = build(plans, 1e-4, rank=5)
    assert found.ledger.steps[-1].measured < 1e-9
    # Blocks share their measures, and need more.
    assert full_rank(Pairs.of([pi for pi in block("switch", (2, 3), n=4).detach()._flat()])) == 8


def test_factors_are_shared_by_the_pairs_of_a_measure():
    pi = block("switch", (3, 2), n=4)
    found = build(pi, 1e-3, rank=8)
    assert found.reached
    assert found.factors.source.values.shape[:2] == (3, 4)
    assert found.factors.target.values.shape[:2] == (2, 4)
    again = found(pi.source, pi.target)
    assert again.shape == pi.shape
    assert float(w1(again.rounded(), pi.rounded()).value.max()) <= 1e-3
    # Pairs that are left out are filled in by the factors of the others.
    most = build([pi[0, 0, 0], pi[0, 0, 1], pi[0, 1], pi[0, 2, 0]], 1e-3, rank=8)
    assert most.factors.source.values.shape[:2] == (3, 4)
    assert most(pi.source, pi.target).shape == pi.shape
    assert_bounded(most.ledger)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["unrelated", "shared"])
@pytest.mark.parametrize("name", NAMES)
def test_sixteen_pairs_of_sixteen_atoms(name, shared):
    pi = block(name, seed=1) if shared else targets(name, 16, seed=1, sizes=(16, 16))
    found = build(pi, 1e-3, rank=32)
    assert found.reached
    assert_bounded(found.ledger)
    assert float(w1(found(pi.source, pi.target).rounded(), pi.rounded()).upper.max()) <= 1e-3


# Choices ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interpolation", KINDS)
def test_mesh_and_delta_follow_the_tolerance(interpolation):
    pi = targets("switch", 2, sizes=(2, 6))
    loose, tight = (build(pi, tolerance, rank=6, interpolation=interpolation).ledger for tolerance in (1e-1, 1e-4))
    for ledger, tolerance in ((loose, 1e-1), (tight, 1e-4)):
        assert ledger.reached
        assert all(step.bound <= 0.26 * tolerance for step in ledger.steps[:2])
    assert tight.steps[0].parameters["h_X"] < loose.steps[0].parameters["h_X"]
    assert tight.steps[1].parameters["delta"] < loose.steps[1].parameters["delta"]


def test_the_mesh_separates_atoms_that_lie_close():
    """Near atoms with other partners: a coarse mesh mixes them, and the bound of the geometric density says so."""
    mu = sf.Measure.uniform(torch.tensor([[0.0], [1e-5], [0.7]]).double())
    nu = sf.Measure.uniform(torch.tensor([[-0.9], [0.2], [0.4]]).double())
    pi = Monotone()(mu, nu)
    coarse = build(pi, 1e-3, mesh=1e-4, delta=1e-12, on_failure="ignore")
    fine = build(pi, 1e-3)
    assert coarse.ledger.steps[1].bound > 0.1
    assert fine.ledger.steps[1].bound <= 1e-3
    assert fine.ledger.steps[0].parameters["h_X"] < 2e-5
    assert fine.reached


def test_epsilon_scales_the_features_and_changes_no_coupling():
    pi = targets("eot", 3)
    one, other = (build(pi, 1e-3, rank=2, epsilon=epsilon) for epsilon in (1.0, 0.01))
    torch.testing.assert_close(other.factors.source.values, 0.1 * one.factors.source.values)
    plans = [found(pi.source, pi.target).to_dense() for found in (one, other)]
    torch.testing.assert_close(*plans, atol=1e-12, rtol=0)


def test_a_system_is_sampled_through_the_generator():
    system, sampler = named("product")
    one, other = (build(system, 0.1, sampler=sampler, count=3, generator=generator(5)) for _ in range(2))
    assert one.factors.source.measures.points.equal(other.factors.source.measures.points)
    assert len(one.ledger.distances) == 3
    assert len(build(system, 0.1, generator=generator()).ledger.distances) == 16


def test_dimensions_may_differ_and_one_atom_is_enough():
    sampler = PairSampler(dims=(1, 3), sizes=(1, 3))
    found = build(RandomTeacher(seed=3, dims=(1, 3)), 1e-3, sampler=sampler, count=3, generator=generator())
    assert found.reached
    assert_bounded(found.ledger)
    single = build(Product((1, 1)), 1e-3, sampler=PairSampler(dims=(1, 1), sizes=(1, 1)), generator=generator())
    assert single.factors.rank == 1
    assert_bounded(single.ledger)


def test_plans_of_a_system_without_a_limit_can_be_reached_one_by_one():
    """On finitely many pairs no continuity is needed; that is why a finite sup is a lower bound only."""
    found = build(ExactTransport(), 1e-2, sampler=PairSampler(sizes=(2, 3)), count=2, generator=generator())
    assert found.reached
    assert_bounded(found.ledger)


# Laws ---------------------------------------------------------------------------------------------------------------


def moved(pi: sf.Coupling) -> tuple[sf.Coupling, Tensor, Tensor]:
    """The same coupling with its atoms in another order, an atom of no weight, and an atom written as two."""
    plan, mu, nu = pi.to_dense(), pi.source, pi.target
    rows, columns = torch.randperm(mu.n, generator=generator(1)), torch.randperm(nu.n, generator=generator(2))
    share = torch.ones(mu.n + 2).double()
    share[0], share[-2], share[-1] = 0.25, 0.75, 0.0
    at = torch.cat([rows, rows[:1], rows[:1]])
    points = mu.points[at].clone()
    points[-1] = 1e3
    source = sf.Measure(points, mu.weights[at] * share)
    target = sf.Measure(nu.points[columns], nu.weights[columns])
    return sf.Coupling.from_dense(source, target, plan[at][:, columns] * share.unsqueeze(-1)), at, columns


def test_order_padding_and_splitting_change_nothing():
    plans = [random_plan(5, 4, seed) for seed in range(2)]
    others = [moved(pi)[0] for pi in plans]
    one, other = (build(given, 1e-3) for given in (plans, others))
    torch.testing.assert_close(other.ledger.distances, one.ledger.distances, atol=1e-9, rtol=0)
    for pi in plans:
        again, at, columns = moved(pi)
        wanted = one(pi.source, pi.target).to_dense()[at][:, columns]
        share = again.source.weights / pi.source.weights[at]
        for found in (one, other):
            plan = found(again.source, again.target).to_dense()
            torch.testing.assert_close(plan, wanted * share.unsqueeze(-1), atol=1e-7, rtol=0)
            assert bool((plan[-1] == 0).all())


def test_a_pair_does_not_depend_on_unrelated_ones():
    one, other = random_plan(4, 6, 0), random_plan(6, 3, 1)
    together, alone = build([one, other], 1e-3, rank=6), build(one, 1e-3, rank=6, mesh=1.25e-4)
    assert together.ledger.measured < 1e-5
    torch.testing.assert_close(
        together(one.source, one.target).to_dense(), alone(one.source, one.target).to_dense(), atol=1e-5, rtol=0
    )


# Tables -------------------------------------------------------------------------------------------------------------


def test_tables_say_where_they_are_defined():
    pi = targets("eot", 2)
    factors = build(pi, 1e-2).factors
    mu, nu = pi.source, pi.target
    features = factors.source(mu)
    assert features.shape == (2, mu.n, factors.rank)
    torch.testing.assert_close(factors.source(mu, mu.points[:, :2]), features[:, :2])
    moving = sf.Measure(mu.points.clone().requires_grad_(), mu.weights)
    assert factors.source(moving).equal(features)
    assert factors.source(mu[:0]).shape == (0, mu.n, factors.rank)
    with pytest.raises(ConfigError, match="one of the 2 measures that the table was made for"):
        factors.source(sf.Measure.uniform(torch.rand(3, 2, generator=generator()).double()))
    with pytest.raises(ConfigError, match="values at atoms only"):
        factors.source(mu, mu.points[:, :1] + 1e-3)
    with pytest.raises(ShapeError, match="points of shape"):
        factors.source(sf.Measure.uniform(torch.zeros(1, 3).double()))
    with pytest.raises(DTypeError, match="float64"):
        factors.target(nu.to(torch.float32))
    # The coupling extends to the atoms it is asked for, and no further.
    coupling = factors(mu, nu)
    torch.testing.assert_close(coupling.density(mu.points[:, :1]), coupling.density()[:, :1], atol=1e-8, rtol=1e-8)
    with pytest.raises(ConfigError, match="values at atoms only"):
        coupling.density(mu.points[:, :1] + 1e-3)


# Encoders -----------------------------------------------------------------------------------------------------------


def test_encoders_are_a_model_and_a_step_of_the_ledger():
    pi = targets("eot", 3, sizes=(2, 4))
    found = build(pi, 0.05, encoders=True, width=8, steps=20, on_failure="ignore")
    assert isinstance(found.model, sf.SinkhornTransformer)
    assert found.ledger.steps[-1].name == "encoders"
    assert found.ledger.steps[-1].parameters["steps"] == 20
    assert_bounded(found.ledger)
    again = w1(found(pi.source, pi.target).rounded(), pi.rounded())
    torch.testing.assert_close(again.upper, found.ledger.distances, atol=1e-8, rtol=1e-6)
    # Encoders are defined for every measure, tables for theirs.
    stranger = sf.Measure.uniform(torch.zeros(2, 2).double())
    assert found(stranger, stranger).shape == (2, 2)


# The ledger ---------------------------------------------------------------------------------------------------------


def test_the_ledger_adds_up_prints_and_is_json():
    bounds, distances = torch.tensor([0.3, 0.1], dtype=torch.float64), torch.tensor([0.01, 0.02], dtype=torch.float64)
    steps = (
        Step("one", "nothing", {"rank": 3, "KL": 0.25}, bounds, distances),
        Step("two", "", {}, bounds.flip(0), distances),
    )
    ledger = Ledger(steps, distances, 0.5)
    assert ledger.bound == pytest.approx(0.6)
    torch.testing.assert_close(ledger.bounds, torch.tensor([0.4, 0.4], dtype=torch.float64))
    assert ledger.measured == pytest.approx(0.02)
    assert ledger.reached
    assert not ledger.guaranteed
    lines = str(ledger).splitlines()
    assert lines[0].split() == ["step", "bound", "measured", "parameters"]
    assert lines[1].split() == ["one", "3.00e-01", "2.00e-02", "rank", "3,", "KL", "0.25"]
    assert lines[-1].endswith("tolerance 0.5: reached, not by the bounds")
    read = json.loads(ledger.to_json())
    assert read["steps"][0]["parameters"] == {"rank": 3, "KL": 0.25}
    assert read["pairs"] == 2
    assert read["bound"] == pytest.approx(0.6)
    assert isinstance(json.loads(build(targets("product", 2), 0.1).ledger.to_json())["reached"], bool)


def test_representation():
    found = build(targets("product", 2), 0.1)
    assert isinstance(found, Approximation)
    assert repr(found).startswith("Approximation(factors, rank=1, W1 <= ")


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tolerance": 0.0}, "tolerance positive"),
        ({"tolerance": -1e-3}, "tolerance positive"),
        ({"tolerance": float("nan")}, "tolerance positive"),
        ({"epsilon": 0.0}, "epsilon positive"),
        ({"mesh": 0.0}, "mesh positive"),
        ({"delta": -1.0}, "delta positive"),
        ({"rank": 0}, "rank as a whole number"),
        ({"rank": 2.0}, "rank as a whole number"),
        ({"count": 0}, "count as a whole number"),
        ({"iterations": 0}, "iterations as a whole number"),
        ({"interpolation": "linear"}, "interpolation 'geometric' or"),
        ({"on_failure": "panic"}, "on_failure 'warn'"),
        ({"sampler": PairSampler()}, "with a system only"),
        ({"encoders": 3}, "encoders as True or False, received 3"),
        ({"recipe": 3}, "recipe as a Recipe or None, received 3"),
        ({"generator": torch.Generator()}, "with a system only"),
    ],
)
def test_bad_options(options, match):
    with pytest.raises(ConfigError, match=match):
        build(targets("product", 2), **({"tolerance": 1e-3} | options))


def test_bad_targets():
    good = targets("product", 2)
    with pytest.raises(ConfigError, match="generator to draw"):
        build(named("product")[0], 1e-3)
    with pytest.raises(DTypeError, match="expected sampler as a PairSampler or None, received Product"):
        build(Product(), 1e-3, sampler=Product(), generator=generator())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShapeError, match="at least one pair"):
        build([], 1e-3)
    with pytest.raises(ShapeError, match="at least one pair"):
        build(good[:0], 1e-3)
    with pytest.raises(DTypeError, match="sequence of couplings"):
        build(good.to_dense(), 1e-3)
    with pytest.raises(DTypeError, match="float64"):
        build(sf.Coupling.from_dense(*(t.to(torch.float32) for t in (good.source, good.target, good.to_dense()))), 1e-3)
    with pytest.raises(WeightError, match="marginals of their measures"):
        build(sf.Coupling.from_dense(good.source, good.target, 0.9 * good.to_dense()), 1e-3)
    with pytest.raises(ShapeError, match="one dimension"):
        build([good, targets("monotone", 2)], 1e-3)
    mu = sf.Measure.uniform(torch.tensor([[0.0], [1.0]]).double())
    plans = [sf.Coupling.from_dense(mu, mu, t.double() / 2) for t in (torch.eye(2), 1 - torch.eye(2))]
    with pytest.raises(ConfigError, match="one plan for every pair"):
        build(plans, 1e-3)


def test_the_first_example_of_the_documentation(capsys):
    page = (Path(__file__).parents[1] / "docs" / "approximation.md").read_text()
    scope: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], scope)
    assert "total" in capsys.readouterr().out
    assert scope["found"].reached
    system, _ = named("switch")
    pi, exact = (f(scope["mu"], scope["nu"]) for f in (scope["found"], system))
    assert float(w1(pi.rounded(), exact.rounded()).lower.max()) <= 1e-3


def test_a_target_that_is_not_a_number():
    mu = sf.Measure.uniform(torch.tensor([[0.0], [1.0]]).double())
    with pytest.raises(NonFiniteError, match="NaN"):
        build(
            sf.Coupling.solve(
                mu, mu, cost=torch.full((2, 2), 1e29).double() * torch.nan, epsilon=1.0, on_failure="ignore"
            ),
            1e-3,
        )
