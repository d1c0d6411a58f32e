"""Couplings: every lazy operation against the dense plan, for every kind of coupling; then what each kind adds."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import ot
import pytest
import torch
from torch import Tensor

import sinkformer as sf
from sinkformer import ops, use_backend
from sinkformer.couplings import Coupling, DenseCoupling, EntropicCoupling, RoundedCoupling
from sinkformer.errors import (
    ConfigError,
    DTypeError,
    NonFiniteError,
    ShapeError,
    WeightError,
)
from sinkformer.ops import reference
from sinkformer.testing import random_measure

EPSILON = 0.3
# Sums are taken in float64 whatever the dtype; float32 answers and the dense plan are rounded once each.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def measures(batched: bool, dtype: torch.dtype) -> tuple[sf.Measure, sf.Measure]:
    """A pair with atoms of weight zero: one of its own in the single pair, padding in the ragged batch."""
    g = generator(1)
    if not batched:
        return (
            random_measure(5, 2, generator=g, dtype=dtype, zeros=1),
            random_measure(4, 3, generator=g, dtype=dtype, zeros=1),
        )
    mu = sf.Measure.stack([random_measure(n, 2, generator=g, dtype=dtype) for n in (5, 3, 1)])
    nu = sf.Measure.stack([random_measure(m, 3, generator=g, dtype=dtype) for m in (4, 1, 2)])
    return mu, nu


def features(mu: sf.Measure, nu: sf.Measure) -> tuple[Tensor, Tensor]:
    g = generator(2)
    draw = [torch.randn(*w.shape, 6, generator=g, dtype=w.dtype) for w in (mu.weights, nu.weights)]
    return draw[0], draw[1]


def matrix_and_mask(mu: sf.Measure, nu: sf.Measure) -> tuple[Tensor, Tensor]:
    g = generator(3)
    cost = torch.rand(*mu.batch_shape, mu.n, nu.n, generator=g, dtype=mu.dtype)
    mask = 0.1 * torch.rand(mu.n, nu.n, generator=g, dtype=mu.dtype)
    mask[2, 2] = math.inf
    return cost, mask


def by_features(mu, nu):
    return Coupling.solve(mu, nu, cost=sf.NegativeDot(), features=features(mu, nu), epsilon=EPSILON)


def by_matrix(mu, nu):
    cost, mask = matrix_and_mask(mu, nu)
    return Coupling.solve(mu, nu, cost=cost, mask=mask, epsilon=EPSILON)


def unbalanced(mu, nu):
    return Coupling.solve(mu, nu, cost=matrix_and_mask(mu, nu)[0], epsilon=EPSILON, tau_a=0.8, tau_b=0.6)


def one_sided(mu, nu):
    return Coupling.solve(mu, nu, cost=sf.NegativeDot(), features=features(mu, nu), epsilon=EPSILON, tau_b=0.0)


def dense(mu, nu):
    plan = torch.rand(*mu.batch_shape, mu.n, nu.n, generator=generator(4), dtype=mu.dtype)
    plan = plan * mu.weights.unsqueeze(-1) * nu.weights.unsqueeze(-2)
    return Coupling.from_dense(mu, nu, plan / plan.sum((-1, -2), keepdim=True))


def rounded(mu, nu):
    return Coupling.solve(
        mu, nu, cost=matrix_and_mask(mu, nu)[0], epsilon=EPSILON / 5, max_iterations=2, on_failure="ignore"
    ).rounded()


KINDS: list[Callable[[sf.Measure, sf.Measure], Coupling]] = [
    by_features,
    by_matrix,
    unbalanced,
    one_sided,
    dense,
    rounded,
]


@dataclass
class Case:
    pi: Coupling
    mu: sf.Measure
    nu: sf.Measure
    plan: Tensor  # float64, from to_dense()

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.pi.dtype]

    def same(self, answer: Tensor, expected: Tensor) -> None:
        """Equal up to the rounding of the dtype of the answer, which is the coupling's."""
        assert answer.dtype == self.pi.dtype
        assert answer.shape == expected.shape
        torch.testing.assert_close(answer.double(), expected.double(), rtol=self.tolerance, atol=self.tolerance)


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def dtype(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["single", "ragged"])
def batched(request):
    return request.param


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def case(request, batched, dtype) -> Case:
    mu, nu = measures(batched, dtype)
    pi = request.param(mu, nu)
    return Case(pi, mu, nu, pi.to_dense().double())


class TestContract:
    """What every coupling can do, compared with the dense plan."""

    def test_dense_plan(self, case):
        plan = case.pi.to_dense()
        assert plan.dtype == case.mu.dtype
        assert plan.shape == case.pi.shape == (*case.mu.batch_shape, case.mu.n, case.nu.n)
        assert bool((plan >= 0).all())
        assert bool((plan[case.mu.weights == 0] == 0).all())
        assert bool((plan.mT[case.nu.weights == 0] == 0).all())

    def test_description(self, case):
        pi = case.pi
        assert pi.source is case.mu or isinstance(pi, RoundedCoupling)
        assert pi.dtype == case.mu.dtype
        assert pi.device == case.mu.device
        assert pi.batch_shape == case.mu.batch_shape
        assert f"shape={tuple(pi.shape)}" in repr(pi)
        assert type(pi).__name__.endswith(repr(pi).split("(")[0])

    def test_matmul(self, case):
        g = generator(5)
        v = torch.randn(*case.mu.batch_shape, case.nu.n, 3, generator=g, dtype=case.mu.dtype)
        case.same(case.pi @ v, case.plan @ v.double())
        shared = v.reshape(-1, case.nu.n, 3)[0]
        case.same(case.pi @ shared, case.plan @ shared.double())
        case.same(case.pi @ shared[:, 0], case.plan @ shared[:, 0].double())

    def test_transpose(self, case):
        back = case.pi.mT
        assert back.shape == case.plan.mT.shape
        case.same(back.to_dense(), case.plan.mT)
        case.same(back.mT.to_dense(), case.plan)
        u = torch.randn(case.mu.n, 2, generator=generator(6), dtype=case.mu.dtype)
        case.same(back @ u, case.plan.mT @ u.double())
        case.same(back.barycentric_projection(), conditional(case.plan.mT, back) @ case.mu.points.double())

    def test_marginals(self, case):
        p, q = case.pi.marginals()
        case.same(p, case.plan.sum(-1))
        case.same(q, case.plan.sum(-2))
        case.same(case.pi.mass, case.plan.sum((-1, -2)))
        error = (case.plan.sum(-1) - case.mu.weights).abs().sum(-1) + (case.plan.sum(-2) - case.nu.weights).abs().sum(
            -1
        )
        case.same(case.pi.marginal_error(), error)

    def test_conditional(self, case):
        expected = conditional(case.plan, case.pi)
        lazy = case.pi.conditional()
        assert lazy.shape == case.pi.shape
        live = case.mu.weights > 0
        case.same(lazy.to_dense()[live], expected[live])
        v = torch.randn(*case.mu.batch_shape, case.nu.n, 2, generator=generator(7), dtype=case.mu.dtype)
        case.same(lazy @ v, expected @ v.double())
        case.same(case.pi.barycentric_projection(v), expected @ v.double())
        case.same(case.pi.barycentric_projection(), expected @ case.nu.points.double())
        sums = lazy.to_dense().sum(-1)[live]
        case.same(sums, torch.ones_like(sums))

    def test_argmax_and_topk(self, case):
        live = case.mu.weights > 0
        best = case.pi.argmax()
        assert best.dtype == torch.int64
        torch.testing.assert_close(best[live], case.plan.argmax(-1)[live])
        for k in (1, case.nu.n):
            values, indices = case.pi.topk(k)
            assert indices.dtype == torch.int64
            case.same(values, case.plan.sort(-1, descending=True).values[..., :k])
            case.same(values, case.plan.gather(-1, indices))

    def test_cost(self, case):
        x, y = case.mu.points.double(), case.nu.points.double()
        ground = torch.rand(*case.pi.shape, generator=generator(8), dtype=case.mu.dtype)
        case.same(case.pi.cost(ground), (case.plan * ground).sum((-1, -2)))
        ground[case.plan == 0] = math.inf  # what carries no mass costs nothing
        case.same(case.pi.cost(ground), torch.where(case.plan > 0, case.plan * ground, 0.0).sum((-1, -2)))
        flat = (
            sf.Measure(case.mu.points[..., :1], case.mu.weights),
            sf.Measure(case.nu.points[..., :1], case.nu.weights),
        )
        line = Coupling.from_dense(*flat, case.pi.to_dense())
        distances = (x[..., :1] - y[..., :1].mT).abs()
        case.same(line.cost(sf.Euclidean()), (case.plan * distances).sum((-1, -2)))
        case.same(line.cost(sf.SqEuclidean()), (case.plan * distances.square()).sum((-1, -2)))

    def test_entropy(self, case):
        logs = torch.where(case.plan > 0, case.plan, 1.0).log()
        case.same(case.pi.entropy(), -(case.plan * logs).sum((-1, -2)))

    def test_mutual_information(self, case):
        a, b = case.mu.weights.double(), case.nu.weights.double()
        product = (a / a.sum(-1, keepdim=True)).unsqueeze(-1) * (b / b.sum(-1, keepdim=True)).unsqueeze(-2)
        ratio = torch.where(case.plan > 0, case.plan / torch.where(product > 0, product, 1.0), 1.0)
        expected = (case.plan * ratio.log() - case.plan + product).sum((-1, -2))
        case.same(case.pi.mutual_information(), expected)

    def test_as_measure(self, case):
        if not bool(((case.plan.sum((-1, -2)) - 1).abs() < 1e-6).all()):
            with pytest.raises(WeightError, match=r"total mass 1, received 0\.\d+; use \.rounded\(\)"):
                case.pi.as_measure()
            return
        joint = case.pi.as_measure()
        assert (joint.n, joint.d) == (case.mu.n * case.nu.n, 5)
        assert joint.batch_shape == case.mu.batch_shape
        case.same(joint.weights, case.plan.flatten(-2))
        atom = joint.points.unflatten(-2, (case.mu.n, case.nu.n))[..., 2, 1, :]
        case.same(atom, torch.cat([case.mu.points[..., 2, :], case.nu.points[..., 1, :]], -1))

    def test_rounded(self, case):
        near = case.pi.rounded()
        p, q = near.marginals()
        case.same(p, case.mu.weights.double())
        case.same(q, case.nu.weights.double())
        assert bool((near.to_dense() >= 0).all())
        moved = (near.to_dense().double() - case.plan).abs().sum((-1, -2))
        assert bool((moved <= 2 * case.pi.marginal_error() + 10 * case.tolerance).all())

    def test_sample_frequencies(self, case):
        k = 20_000
        i, j = case.pi.sample(k, generator=generator(9))
        assert i.dtype == j.dtype == torch.int64
        assert i.shape == j.shape == (*case.mu.batch_shape, k)
        probabilities = (case.plan / case.plan.sum((-1, -2), keepdim=True)).reshape(-1, case.mu.n, case.nu.n)
        for rows, columns, p in zip(i.reshape(-1, k), j.reshape(-1, k), probabilities, strict=True):
            counts = torch.bincount(rows * case.nu.n + columns, minlength=p.numel()).double()
            assert bool((counts[p.flatten() == 0] == 0).all())
            # Every count within five standard deviations of its mean.
            spread = (k * p * (1 - p)).sqrt().flatten()
            assert bool(((counts - k * p.flatten()).abs() <= 5 * spread + 1).all())

    def test_sample_is_reproducible(self, case):
        first, again = (case.pi.sample(50, generator=generator(10)) for _ in range(2))
        other = case.pi.sample(50, generator=generator(11))
        assert torch.equal(torch.stack(first), torch.stack(again))
        assert not torch.equal(torch.stack(first), torch.stack(other))
        assert case.pi.sample(0)[0].shape == (*case.mu.batch_shape, 0)

    def test_indexing_and_iteration(self, case):
        pi = case.pi
        if not pi.batch_shape:
            with pytest.raises(DTypeError, match="a single coupling has no batch axis"):
                pi[0]
            with pytest.raises(DTypeError, match="a single measure has no length"):
                len(pi)
            return
        assert len(pi) == 3
        for k, one in enumerate(pi):
            assert type(one) is type(pi)
            assert one.shape == pi.shape[1:]
            case.same(one.to_dense(), case.plan[k])
            case.same(one.barycentric_projection(), (conditional(case.plan, pi) @ case.nu.points.double())[k])
        case.same(pi[1:].to_dense(), case.plan[1:])
        case.same(pi[torch.tensor([2, 0])].to_dense(), case.plan[[2, 0]])
        case.same(pi[-1].mT.to_dense(), case.plan[-1].mT)
        with pytest.raises(IndexError):
            pi[3]
        with pytest.raises(IndexError, match="too many indices"):
            pi[0, 0]

    def test_detach(self, case):
        mu = sf.Measure(case.mu.points.clone().requires_grad_(), case.mu.weights)
        pi = Coupling.from_dense(mu, case.nu, case.pi.to_dense().clone().requires_grad_())
        assert pi.to_dense().requires_grad
        assert pi.source.points.requires_grad
        assert not pi.detach().to_dense().requires_grad
        assert not pi.detach().source.points.requires_grad
        case.same(case.pi.detach().to_dense(), case.plan)

    def test_blocks(self, case, monkeypatch):
        """Cut into many blocks of rows, every answer is the same."""
        v = torch.randn(case.nu.n, 2, generator=generator(12), dtype=case.mu.dtype)
        answers = everything(case.pi, v)
        starts = split_rows(monkeypatch)
        again = everything(case.pi, v)
        assert len(set(starts)) == case.mu.n
        for name, value in answers.items():
            torch.testing.assert_close(
                again[name], value, rtol=case.tolerance, atol=case.tolerance, msg=lambda m, name=name: f"{name}: {m}"
            )


def conditional(plan: Tensor, pi: Coupling) -> Tensor:
    """Rows divided by their sums; rows of weight zero have a conditional from the potentials, if there are any."""
    sums = plan.sum(-1, keepdim=True)
    rows = torch.where(sums > 0, plan / torch.where(sums > 0, sums, 1.0), 0.0)
    if not isinstance(pi, EntropicCoupling):
        return rows
    b, scale = pi.target.weights.double(), pi.epsilon[..., None, None]
    cost = pi.cost_rows(0, pi.shape[-2])
    exponents = (pi.solution.g.unsqueeze(-2) - cost) / scale + b.log().unsqueeze(-2)
    return torch.softmax(exponents, -1)


def split_rows(monkeypatch) -> list[int]:
    """Make every row a block of its own; the list returned fills with the first rows of the blocks that were used."""
    starts: list[int] = []

    def row_blocks(shape):
        for start, stop in reference.row_blocks(shape):
            starts.append(start)
            yield start, stop

    monkeypatch.setattr(reference, "_BLOCK_ENTRIES", 1)
    monkeypatch.setattr(ops, "row_blocks", row_blocks)
    return starts


def everything(pi: Coupling, v: Tensor) -> dict[str, Tensor]:
    x, y = pi.marginals()
    i, j = pi.sample(30, generator=generator(13))
    values, indices = pi.topk(2)
    near = pi.rounded()
    answers = {
        "to_dense": pi.to_dense(),
        "matmul": pi @ v,
        "vector": pi @ v[:, 0],
        "mT": pi.mT.to_dense(),
        "rows": x,
        "columns": y,
        "mass": pi.mass,
        "marginal_error": pi.marginal_error(),
        "conditional": pi.conditional().to_dense(),
        "projection": pi.barycentric_projection(),
        "argmax": pi.argmax(),
        "topk values": values,
        "topk indices": indices,
        "sources": i,
        "targets": j,
        "cost": pi.cost(torch.ones(pi.shape, dtype=pi.dtype).cumsum(-1)),
        "entropy": pi.entropy(),
        "mutual_information": pi.mutual_information(),
        "rounded": near.to_dense(),
        "rounded projection": near.barycentric_projection(),
    }
    if isinstance(pi, EntropicCoupling):
        answers |= {"density": pi.density(), "transport_cost": pi.transport_cost()}
    return answers


# Entropic couplings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [by_features, by_matrix, unbalanced, one_sided], ids=lambda kind: kind.__name__)
def test_plan_by_the_formula(kind, batched, dtype):
    """P = a b exp((f + g - C) / epsilon), from potentials and a cost written out by hand."""
    mu, nu = measures(batched, dtype)
    pi = kind(mu, nu)
    assert bool(pi.solution.converged.all())
    if kind in (by_features, one_sided):
        x, y = features(mu, nu)
        cost = -(x.double() @ y.double().mT)
    else:
        matrix, mask = matrix_and_mask(mu, nu)
        cost = matrix.double() + (mask.double() if kind is by_matrix else 0.0)
    f, g = pi.solution.potentials
    assert f.dtype == torch.float64
    density = ((f.unsqueeze(-1) + g.unsqueeze(-2) - cost) / pi.epsilon[..., None, None]).exp()
    plan = mu.weights.unsqueeze(-1) * nu.weights.unsqueeze(-2) * density
    plan = plan.masked_fill((mu.weights == 0).unsqueeze(-1) | (nu.weights == 0).unsqueeze(-2), 0.0)
    # float32: weights are normalised once more, in float64
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}[dtype]
    torch.testing.assert_close(pi.to_dense().double(), plan.double(), rtol=tolerance, atol=tolerance)
    if kind is by_matrix:
        assert bool((pi.to_dense()[..., 2, 2] == 0).all())
    torch.testing.assert_close(
        pi.transport_cost().double(),
        torch.where(plan > 0, plan * cost, 0.0).sum((-1, -2)).double(),
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    "kind",
    KINDS,
    ids=lambda kind: kind.__name__,
)
def test_batch_equals_loop(kind):
    mu, nu = measures(True, torch.float64)
    together = kind(mu, nu)
    for k in range(3):
        one = kind_of_one(kind, mu, nu, k)
        torch.testing.assert_close(together[k].to_dense(), one, rtol=0, atol=1e-12)


def kind_of_one(kind, mu, nu, k) -> Tensor:
    """The plan of problem k solved alone, on its own atoms only, padded with zeros to the size of the batch."""
    alive = mu[k].weights > 0, nu[k].weights > 0
    alone = [sf.Measure(m[k].points[live], m[k].weights[live]) for m, live in zip((mu, nu), alive, strict=True)]
    x, y = features(mu, nu)
    cost, mask = matrix_and_mask(mu, nu)
    parts = x[k][alive[0]], y[k][alive[1]]
    cost, mask = cost[k][alive[0]][:, alive[1]], mask[alive[0]][:, alive[1]]
    if kind is by_features:
        pi = Coupling.solve(*alone, cost=sf.NegativeDot(), features=parts, epsilon=EPSILON)
    elif kind is by_matrix:
        pi = Coupling.solve(*alone, cost=cost, mask=mask, epsilon=EPSILON)
    elif kind is unbalanced:
        pi = Coupling.solve(*alone, cost=cost, epsilon=EPSILON, tau_a=0.8, tau_b=0.6)
    elif kind is one_sided:
        pi = Coupling.solve(*alone, cost=sf.NegativeDot(), features=parts, epsilon=EPSILON, tau_b=0.0)
    elif kind is dense:
        pi = Coupling.from_dense(*alone, dense(mu, nu).plan[k][alive[0]][:, alive[1]])
    else:
        stopped = Coupling.solve(*alone, cost=cost, epsilon=EPSILON / 5, max_iterations=2, on_failure="ignore")
        pi = stopped.rounded()
    plan = torch.zeros(mu.n, nu.n, dtype=torch.float64)
    plan[: pi.shape[0], : pi.shape[1]] = pi.to_dense()
    return plan


def test_epsilon_is_taken_as_given():
    pi = by_features(*measures(False, torch.float64))
    assert float(pi.epsilon) == EPSILON


def test_two_batch_axes():
    mu, nu = measures(True, torch.float64)
    grid = sf.Measure.stack([mu, mu]), sf.Measure.stack([nu, nu])
    pi = by_features(*grid)
    assert pi.shape == (2, 3, 5, 4)
    plan = pi.to_dense()
    torch.testing.assert_close(pi[1, 2].to_dense(), plan[1, 2])
    torch.testing.assert_close(pi[:, 1].to_dense(), plan[:, 1])
    torch.testing.assert_close(torch.stack([q.to_dense() for row in pi for q in row]), plan.flatten(0, 1))
    i, j = pi.sample(4, generator=generator())
    assert i.shape == j.shape == (2, 3, 4)


def test_an_ellipsis_stops_at_the_batch_axes():
    mu, nu = measures(True, torch.float64)
    pi = by_features(sf.Measure.stack([mu, mu]), sf.Measure.stack([nu, nu]))
    assert torch.equal(pi[..., 0].to_dense(), pi.to_dense()[:, 0])
    with pytest.raises(IndexError):
        pi[0, 0, 0]


def test_empty_batch():
    mu = sf.Measure(torch.empty(0, 3, 2), torch.empty(0, 3))
    nu = sf.Measure(torch.empty(0, 4, 2), torch.empty(0, 4))
    pi = Coupling.solve(mu, nu, epsilon=0.1)
    assert pi.shape == (0, 3, 4)
    assert pi.to_dense().shape == (0, 3, 4)
    assert pi.barycentric_projection().shape == (0, 3, 2)
    assert pi.rounded().to_dense().shape == (0, 3, 4)
    assert pi.sample(5)[0].shape == (0, 5)
    assert pi.cost(sf.SqEuclidean()).shape == pi.entropy().shape == pi.mass.shape == (0,)
    assert pi.certificate().w1_bound.shape == (0,)
    assert list(pi) == []
    assert "epsilon=?" in repr(pi)


def test_repr_of_an_entropic_coupling():
    mu, nu = measures(False, torch.float64)
    pi = by_features(mu, nu)
    assert repr(pi).startswith("Coupling(shape=(5, 4), epsilon=0.3, Solution(CONVERGED, iterations=")
    batch = by_features(*measures(True, torch.float64))
    assert repr(batch).startswith("Coupling(shape=(3, 5, 4), epsilon=0.3, Solution(batch=(3,), converged=3 of 3")
    mu, nu = measures(True, torch.float64)
    several = Coupling.solve(
        mu, nu, cost=matrix_and_mask(mu, nu)[0], epsilon=torch.tensor([0.2, 0.5, 0.4], dtype=torch.float64)
    )
    assert "epsilon=0.2..0.5" in repr(several)


def test_conditional_at_a_weightless_atom():
    """A probe has a conditional distribution although it has no mass: the soft c-transform gives it."""
    mu, nu = measures(False, torch.float64)
    assert float(mu.weights[0]) == 0
    pi = by_features(mu, nu)
    x, y = features(mu, nu)
    expected = torch.softmax((pi.solution.g + x[0] @ y.T) / pi.epsilon + nu.weights.log(), -1)
    torch.testing.assert_close(pi.conditional().to_dense()[0], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pi.barycentric_projection()[0], expected @ nu.points, rtol=1e-12, atol=1e-12)
    assert int(pi.argmax()[0]) == int(expected.argmax())
    # What has no potentials has nothing to say there.
    assert bool((pi.rounded().conditional().to_dense()[0] == 0).all())


def test_values_at_padding_are_ignored():
    mu, nu = measures(False, torch.float64)
    pi = by_features(mu, nu)
    v = torch.randn(nu.n, 2, generator=generator(), dtype=torch.float64)
    wild = v.clone()
    wild[nu.weights == 0] = math.nan
    torch.testing.assert_close(pi.barycentric_projection(wild), pi.barycentric_projection(v))


def test_matmul_ignores_values_at_padding():
    mu, nu = measures(False, torch.float64)
    pi = by_features(mu, nu)
    v = torch.randn(nu.n, 2, generator=generator(), dtype=torch.float64)
    wild = v.clone()
    wild[nu.weights == 0] = math.nan
    torch.testing.assert_close(pi @ wild, pi @ v)


# Density off the atoms ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taus", [(1.0, 1.0), (0.7, 0.9), (1.0, 0.0)], ids=str)
def test_density_off_the_atoms(batched, taus):
    """Points x, y are atoms of weight zero of a larger problem; its density there is the same."""
    g = generator(20)
    sizes = ((4, 3, 1), (2, 5, 3)) if batched else ((4,), (5,))
    mus, nus = ([random_measure(n, 2, generator=g) for n in side] for side in sizes)
    mu, nu = (sf.Measure.stack(mus), sf.Measure.stack(nus)) if batched else (mus[0], nus[0])
    options = dict(cost=sf.SqEuclidean(), epsilon=0.5, tau_a=taus[0], tau_b=taus[1], tolerance=1e-12)
    pi = Coupling.solve(mu, nu, **options)
    x, y = (torch.randn(*mu.batch_shape, k, 2, generator=g, dtype=torch.float64) for k in (3, 2))

    def with_probes(measure, points):
        weights = torch.cat([measure.weights, measure.weights.new_zeros(points.shape[:-1])], -1)
        return sf.Measure(torch.cat([measure.points, points], -2), weights)

    larger = Coupling.solve(with_probes(mu, x), with_probes(nu, y), **options).density()
    close = dict(rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(pi.density(x), larger[..., mu.n :, : nu.n].where(live(nu), pi.density(x)), **close)
    torch.testing.assert_close(
        pi.density(y=y).mT, larger[..., : mu.n, nu.n :].mT.where(live(mu), pi.density(y=y).mT), **close
    )
    # Between two probes the larger problem has no opinion; the formula has.
    f = -taus[0] * 0.5 * torch.logsumexp(exponents(pi.solution.g, x, nu), -1)
    h = -taus[1] * 0.5 * torch.logsumexp(exponents(pi.solution.f, y, mu), -1)
    cost = torch.cdist(x, y).square()
    both = ((f.unsqueeze(-1) + h.unsqueeze(-2) - cost) / 0.5).exp()
    torch.testing.assert_close(pi.density(x, y), both, **close)
    # At the atoms themselves it is the density of the plan.
    at_atoms = pi.density(mu.points, nu.points)
    product = mu.weights.unsqueeze(-1) * nu.weights.unsqueeze(-2)
    torch.testing.assert_close(at_atoms * product, pi.to_dense(), **close)


def live(measure: sf.Measure) -> Tensor:
    return (measure.weights > 0).unsqueeze(-2)


def exponents(potential: Tensor, points: Tensor, measure: sf.Measure) -> Tensor:
    cost = torch.cdist(points, measure.points).square()
    return (potential.unsqueeze(-2) - cost) / 0.5 + measure.weights.log().unsqueeze(-2)


def test_density_integrates_to_one():
    mu, nu = (random_measure(n, 2, generator=generator(n)) for n in (4, 6))
    pi = Coupling.solve(mu, nu, epsilon=0.4)
    x = torch.randn(5, 2, generator=generator(), dtype=torch.float64)
    torch.testing.assert_close(pi.density(x) @ nu.weights, torch.ones(5, dtype=torch.float64), rtol=1e-12, atol=0)


def test_density_needs_a_cost_off_the_atoms():
    mu, nu = (random_measure(n, 2, generator=generator(n)) for n in (4, 6))
    x = mu.points[:2]
    message = r"expected a cost that is defined off the atoms, received a matrix, a mask or features without maps"
    for pi in (
        Coupling.solve(mu, nu, cost=torch.rand(4, 6).double(), epsilon=0.4),
        Coupling.solve(mu, nu, mask=torch.zeros(4, 6), epsilon=0.4),
        Coupling.solve(mu, nu, features=(2 * mu.points, nu.points), epsilon=0.4),
    ):
        with pytest.raises(ConfigError, match=message):
            pi.density(x)
        assert pi.density().shape == (4, 6)


def test_density_with_maps():
    mu, nu = (random_measure(n, 2, generator=generator(n)) for n in (4, 6))
    maps = (lambda _, x: torch.tanh(x)), (lambda _, y: torch.cat([y, y], -1)[..., :2])
    pi = Coupling.solve(
        mu, nu, cost=sf.NegativeDot(), features=(torch.tanh(mu.points), nu.points), maps=maps, epsilon=0.4
    )
    torch.testing.assert_close(pi.density(mu.points), pi.density(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(pi.mT.density(y=mu.points), pi.density().mT, rtol=1e-9, atol=1e-9)


# Rounding and certificate -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.5, 0.02])
@pytest.mark.parametrize("sweeps", [1, 3])
def test_rounded_marginals_are_exact(sweeps, epsilon, batched):
    g = generator(30)
    shape = (4,) if batched else ()
    mu, nu = (
        sf.Measure.normalized(
            torch.randn(*shape, n, 2, generator=g).double(), torch.rand(*shape, n, generator=g).double()
        )
        for n in (7, 5)
    )
    pi = Coupling.solve(mu, nu, epsilon=epsilon, max_iterations=sweeps, annealing=None, on_failure="ignore")
    near = pi.rounded()
    plan = near.to_dense()
    assert isinstance(near, RoundedCoupling)
    assert float((plan.sum(-1) - mu.weights).abs().max()) <= 1e-15
    assert float((plan.sum(-2) - nu.weights).abs().max()) <= 1e-15
    assert bool((plan >= 0).all())
    assert bool(((plan - pi.to_dense()).abs().sum((-1, -2)) <= 2 * pi.marginal_error() + 1e-15).all())
    assert not plan.requires_grad


def test_rounding_an_exact_coupling_does_nothing():
    mu, nu = (random_measure(n, 2, generator=generator(n)) for n in (4, 6))
    product = mu.weights.unsqueeze(-1) * nu.weights
    near = Coupling.from_dense(mu, nu, product).rounded()
    torch.testing.assert_close(near.to_dense(), product, rtol=0, atol=1e-16)
    torch.testing.assert_close(near.mT.to_dense(), product.T, rtol=0, atol=1e-16)


def grid_w1(pi: Coupling, other: Coupling) -> float:
    """Exact W1 on the product grid for |x - x'| + |y - y'|, by POT's network simplex."""
    x, y = pi.source.points.numpy(), pi.target.points.numpy()
    d_x, d_y = ot.dist(x, x, "euclidean"), ot.dist(y, y, "euclidean")
    n, m = pi.shape
    ground = (d_x[:, None, :, None] + d_y[None, :, None, :]).reshape(n * m, n * m)
    p, q = (c.to_dense().flatten().numpy() for c in (pi, other))
    return float(ot.emd2(p / p.sum(), q / q.sum(), np.ascontiguousarray(ground)))


@pytest.mark.parametrize("epsilon", [2.0, 0.5])
def test_certificate_bounds_exact_w1(epsilon):
    mu, nu = (random_measure(n, 2, generator=generator(n)) for n in (6, 5))
    exact = Coupling.solve(mu, nu, epsilon=epsilon, tolerance=1e-13)
    truth = exact.rounded()
    bounds = []
    for sweeps in (1, 2, 10, 100):
        with use_backend("reference"):  # plain sweeps close the gap, over-relaxed ones need not
            pi = Coupling.solve(mu, nu, epsilon=epsilon, max_iterations=sweeps, annealing=None, on_failure="ignore")
        certificate, near = pi.certificate(), pi.rounded()
        distance = grid_w1(near, truth)
        variation = float((near.to_dense() - truth.to_dense()).abs().sum() / 2)
        assert distance <= float(certificate.w1_bound)
        assert variation <= float(certificate.tv_bound)
        bounds.append(float(certificate.w1_bound))
        assert certificate.duality_gap <= pi.solution.duality_gap + 1e-12, (
            "the solver bounds what the certificate measures"
        )
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] < 0.5 * float(certificate.diameter)
    # At the solution what is left of the bound is the square root of rounding.
    assert float(exact.certificate().w1_bound) < 1e-4


def test_certificate_diameter():
    points = torch.tensor([[0.0, 0.0], [3.0, 4.0], [100.0, 0.0]], dtype=torch.float64)
    mu = sf.Measure(points, torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))  # the far atom has no weight
    nu = sf.Measure.uniform(torch.tensor([[0.0], [2.0]], dtype=torch.float64))
    pi = Coupling.solve(mu, nu, cost=torch.rand(3, 2, generator=generator()).double(), epsilon=0.5)
    certificate = pi.certificate()
    assert float(certificate.diameter) == pytest.approx(2.0, abs=1e-12), "of the smaller side: 5 and 2"
    expected = 2 * math.sqrt(float(certificate.duality_gap) / (2 * 0.5))
    assert float(certificate.w1_bound) == pytest.approx(expected, rel=1e-7)


def test_certificate_of_a_batch():
    mu, nu = measures(True, torch.float64)
    cost = matrix_and_mask(mu, nu)[0]
    pi = Coupling.solve(mu, nu, cost=cost, epsilon=EPSILON, max_iterations=2, annealing=None, on_failure="ignore")
    together = pi.certificate()
    assert together.w1_bound.shape == (3,)
    for k, one in enumerate(pi):
        alone = one.certificate()
        assert float(alone.w1_bound) == float(together.w1_bound[k])
        assert float(alone.diameter) == float(together.diameter[k])


def test_certificate_needs_hard_marginals():
    mu, nu = measures(False, torch.float64)
    with pytest.raises(
        ConfigError, match=r"expected hard marginals \(tau_a = tau_b = 1\), received taus \(0\.8, 0\.6\)"
    ):
        unbalanced(mu, nu).certificate()


# Closed forms -------------------------------------------------------------------------------------------------------


def test_product_coupling_has_no_information():
    mu, nu = (random_measure(n, 2, generator=generator(n)) for n in (4, 6))
    constant = Coupling.solve(mu, nu, cost=torch.full((4, 6), 3.0).double(), epsilon=0.1)
    product = Coupling.from_dense(mu, nu, mu.weights.unsqueeze(-1) * nu.weights)
    for pi in (constant, product):
        assert abs(float(pi.mutual_information())) <= 1e-14
        entropies = -(mu.weights * mu.weights.log()).sum() - (nu.weights * nu.weights.log()).sum()
        torch.testing.assert_close(pi.entropy(), entropies, rtol=1e-12, atol=0)
        mean = nu.weights @ nu.points
        torch.testing.assert_close(pi.barycentric_projection(), mean.expand(4, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [3, 8, 20, 33])
def test_a_measure_with_itself(n):
    """One potential for both sides, a symmetric plan, and no more than a few dozen sweeps however small epsilon."""
    mu = random_measure(n, 2, generator=generator(n))
    pi = Coupling.solve(mu, mu, epsilon=0.05)
    assert torch.equal(pi.solution.f, pi.solution.g)
    torch.testing.assert_close(pi.to_dense(), pi.to_dense().T, rtol=0, atol=1e-15)
    assert int(pi.solution.iterations) < 60


def test_deterministic_coupling():
    """A permutation: conditionals are Diracs, the information is the entropy of a marginal."""
    mu = sf.Measure.uniform(torch.arange(4.0).double().unsqueeze(-1))
    order = torch.tensor([2, 0, 3, 1])
    plan = torch.zeros(4, 4).double()
    plan[torch.arange(4), order] = 0.25
    pi = Coupling.from_dense(mu, mu, plan)
    assert pi.argmax().tolist() == order.tolist()
    assert float(pi.mutual_information()) == pytest.approx(math.log(4), abs=1e-14)
    assert float(pi.entropy()) == pytest.approx(math.log(4), abs=1e-14)
    assert pi.barycentric_projection().flatten().tolist() == order.tolist()
    assert float(pi.marginal_error()) == 0
    assert float(pi.cost(sf.SqEuclidean())) == pytest.approx((4 + 1 + 1 + 4) / 4)


def test_ties_go_to_the_first():
    mu = sf.Measure.uniform(torch.zeros(2, 1).double())
    pi = Coupling.from_dense(mu, mu, torch.full((2, 2), 0.25).double())
    assert pi.argmax().tolist() == [0, 0]


# Gradients ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taus", [(1.0, 1.0), (0.8, 0.6), (1.0, 0.0)], ids=str)
def test_gradients_of_the_projection(taus):
    """Barycentric projection by finite differences: in points, weights and epsilon, one weight being zero."""
    g = generator(40)
    x, y = (torch.randn(n, 2, generator=g).double().requires_grad_() for n in (4, 3))
    logits = [torch.randn(n, generator=g).double().requires_grad_() for n in (3, 3)]
    epsilon = torch.tensor(0.7).double().requires_grad_()

    def projection(x, y, p, q, epsilon):
        a = torch.cat([p.softmax(-1), p.new_zeros(1)])
        pi = Coupling.solve(
            sf.Measure(x, a),
            sf.Measure(y, q.softmax(-1)),
            epsilon=epsilon,
            tau_a=taus[0],
            tau_b=taus[1],
            tolerance=1e-14,
        )
        return pi.barycentric_projection()

    assert torch.autograd.gradcheck(projection, (x, y, *logits, epsilon), atol=1e-6)


def test_gradients_of_every_number():
    g = generator(41)
    x, y = (torch.randn(2, n, 2, generator=g).double().requires_grad_() for n in (3, 4))
    weights = torch.tensor([[0.3, 0.3, 0.4], [0.6, 0.4, 0.0]], dtype=torch.float64)

    def numbers(x, y):
        pi = Coupling.solve(sf.Measure(x, weights), sf.Measure.uniform(y), epsilon=0.8, tolerance=1e-14)
        answers = (pi.cost(sf.SqEuclidean()), pi.entropy(), pi.mutual_information(), pi.transport_cost(), pi.value)
        return (*answers, pi @ y, pi.topk(2).values, pi.density(x[:, :2] + 1.0))

    assert torch.autograd.gradcheck(numbers, (x, y), atol=1e-6)


@pytest.mark.parametrize("kind", [by_features, by_matrix, unbalanced, one_sided, dense], ids=lambda kind: kind.__name__)
def test_gradients_in_blocks(kind, batched, monkeypatch):
    """Blocks are recomputed in the backward pass; the gradient is that of one block."""

    def gradients():
        base = measures(batched, torch.float64)
        leaves = [m.points.clone().requires_grad_() for m in base]
        mu, nu = (sf.Measure(p, m.weights) for p, m in zip(leaves, base, strict=True))
        x, y = features(mu, nu)
        x, y = x + mu.points.sum(-1, keepdim=True), y + nu.points.prod(-1, keepdim=True)
        matrix, mask = matrix_and_mask(mu, nu)
        matrix = matrix + torch.sin(mu.points[..., :1]) * nu.points[..., :1].mT
        if kind is dense:
            pi = Coupling.from_dense(mu, nu, (matrix + 3.0).square())
        elif kind is by_features:
            pi = Coupling.solve(mu, nu, cost=sf.NegativeDot(), features=(x, y), epsilon=EPSILON)
        elif kind is by_matrix:
            pi = Coupling.solve(mu, nu, cost=matrix, mask=mask, epsilon=EPSILON)
        elif kind is unbalanced:
            pi = Coupling.solve(mu, nu, cost=matrix, epsilon=EPSILON, tau_a=0.8, tau_b=0.6)
        else:
            pi = Coupling.solve(mu, nu, cost=sf.NegativeDot(), features=(x, y), epsilon=EPSILON, tau_b=0.0)
        loss = pi.barycentric_projection().square().sum() + pi.entropy().sum() + pi.mutual_information().sum()
        loss = loss + (pi @ nu.points).sin().sum() + pi.topk(1).values.sum()
        loss = loss + sf.losses.total_variation(pi, torch.zeros_like(matrix)).sum()
        return torch.autograd.grad(loss, leaves)

    whole = gradients()
    starts = split_rows(monkeypatch)
    parts = gradients()
    assert len(set(starts)) == 5
    for one, other in zip(whole, parts, strict=True):
        assert bool((one != 0).any())
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_padding_receives_no_gradient():
    mu, nu = measures(True, torch.float64)
    points = mu.points.clone().requires_grad_()
    pi = Coupling.solve(sf.Measure(points, mu.weights), nu.pushforward(lambda y: y[..., :2]), epsilon=EPSILON)
    (pi.entropy().sum() + (pi @ nu.points).sum()).backward()
    assert points.grad is not None
    assert bool(torch.isfinite(points.grad).all())
    assert bool((points.grad[mu.weights == 0] == 0).all())


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_plan_must_be_finite(bad):
    mu, nu = measures(False, torch.float64)
    plan = torch.rand(5, 4).double()
    plan[1, 2] = bad
    with pytest.raises(NonFiniteError, match="expected a finite plan, received a NaN or an infinity"):
        Coupling.from_dense(mu, nu, plan)


def test_a_plan_must_be_non_negative():
    mu, nu = measures(False, torch.float64)
    plan = torch.zeros(5, 4).double()
    plan[1, 2] = -0.25
    with pytest.raises(WeightError, match=r"expected non-negative masses, received -0\.25"):
        Coupling.from_dense(mu, nu, plan)


def test_a_plan_must_fit_its_measures():
    mu, nu = measures(False, torch.float64)
    with pytest.raises(ShapeError, match=r"expected a plan of shape \(5, 4\), received \(4, 5\)"):
        Coupling.from_dense(mu, nu, torch.rand(4, 5).double())
    message = r"expected the plan as a tensor of the dtype of the measures, torch\.float64, received torch\.float32"
    with pytest.raises(DTypeError, match=message):
        Coupling.from_dense(mu, nu, torch.rand(5, 4))
    with pytest.raises(DTypeError, match="received ndarray"):
        Coupling.from_dense(mu, nu, np.ones((5, 4)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShapeError, match="one batch shape"):
        Coupling.from_dense(measures(True, torch.float64)[0], nu, torch.rand(5, 4).double())


def test_measures_must_fit_each_other():
    mu, nu = measures(False, torch.float64)
    with pytest.raises(ShapeError, match="expected source and target points of one dimension, received 2 and 3"):
        Coupling.solve(mu, nu, epsilon=0.1)
    with pytest.raises(DTypeError, match="expected measures of one dtype"):
        Coupling.solve(mu, nu.to(torch.float32), cost=torch.rand(5, 4), epsilon=0.1)
    with pytest.raises(DTypeError, match="expected a Cost or a cost matrix, received str; use NegativeDot"):
        Coupling.solve(mu, nu, cost="sqeuclidean", epsilon=0.1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ShapeError, match=r"expected a cost matrix of shape \(5, 4\) for these measures, received \(4, 5\)"
    ):
        Coupling.solve(mu, nu, cost=torch.rand(4, 5).double(), epsilon=0.1)


def test_wrong_operands():
    mu, nu = measures(False, torch.float64)
    pi = by_features(mu, nu)
    with pytest.raises(DTypeError, match="expected a tensor to the right of @, received list"):
        pi @ [1.0]  # pyright: ignore[reportOperatorIssue]
    for wrong in (torch.rand(5, 2), torch.rand(5)):
        with pytest.raises(ShapeError, match=r"expected a tensor of shape \(\*batch, 4, k\) or \(4,\), received \(5"):
            pi @ wrong
    for wrong in (torch.rand(5, 2), torch.rand(4)):
        with pytest.raises(ShapeError, match=r"expected values of shape \(\*batch, 4, k\), received"):
            pi.conditional() @ wrong
    with pytest.raises(ShapeError, match=r"expected values of shape \(\*batch, 4, k\), received int"):
        pi.barycentric_projection(3)  # pyright: ignore[reportArgumentType]
    for k in (0, 5):
        with pytest.raises(ShapeError, match=f"expected k between 1 and 4, received {k}"):
            pi.topk(k)
    with pytest.raises(ShapeError, match="expected a number of samples k >= 0, received -1"):
        pi.sample(-1)
    with pytest.raises(ShapeError, match=r"expected a cost matrix of shape \(5, 4\)"):
        pi.cost(torch.rand(4, 5))


def test_a_number_is_no_operand():
    pi = by_features(*measures(False, torch.float64))
    with pytest.raises(ShapeError, match=r"expected a tensor of shape \(\*batch, 4, k\) or \(4,\), received \(\)"):
        pi @ torch.tensor(2.0)


def test_a_lost_problem_cannot_be_sampled():
    mu, nu = measures(False, torch.float64)
    cost = torch.full((5, 4), math.nan).double()
    pi = Coupling.solve(mu, nu, cost=cost, epsilon=0.1, on_failure="ignore")
    with pytest.raises(NonFiniteError, match=r"expected plans of positive, finite mass.*look at solution\.status"):
        pi.sample(3)
    nothing = Coupling.from_dense(mu, nu, torch.zeros(5, 4).double())
    with pytest.raises(NonFiniteError, match="expected plans of positive, finite mass"):
        nothing.sample(3)


def test_kinds():
    mu, nu = measures(False, torch.float64)
    assert isinstance(by_features(mu, nu), EntropicCoupling)
    assert isinstance(dense(mu, nu), DenseCoupling)
    with pytest.raises(TypeError, match="abstract"):
        Coupling()  # pyright: ignore[reportAbstractUsage]


def test_bare_weights():
    """With a cost matrix the points do not matter; weights alone will do."""
    a, b = torch.tensor([0.4, 0.6], dtype=torch.float64), torch.tensor([0.3, 0.7], dtype=torch.float64)
    cost = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    pi = Coupling.solve(a, b, cost=cost, epsilon=0.2)
    same = Coupling.solve(
        sf.Measure(torch.rand(2, 1).double(), a), sf.Measure(torch.rand(2, 1).double(), b), cost=cost, epsilon=0.2
    )
    torch.testing.assert_close(pi.to_dense(), same.to_dense())


# Padding --------------------------------------------------------------------------------------------------------------


def test_unstacked_problems_of_a_ragged_batch_are_the_single_ones():
    torch.manual_seed(0)
    sizes = [(3, 5), (6, 2), (4, 4)]
    mus, nus = ([sf.Measure.uniform(torch.randn(s[k], 2, dtype=torch.float64)) for s in sizes] for k in (0, 1))
    matrices = [torch.rand(n, m, dtype=torch.float64) for n, m in sizes]
    matrix = torch.zeros(3, 6, 5, dtype=torch.float64)
    for k, c in enumerate(matrices):
        matrix[k, : c.shape[0], : c.shape[1]] = c
    mu, nu = sf.Measure.stack(mus), sf.Measure.stack(nus)
    for cost, mask in ((matrix, None), (sf.SqEuclidean(), matrix)):
        batch = sf.Coupling.solve(mu, nu, cost=cost, epsilon=0.2, mask=mask)
        for k, (n, m) in enumerate(sizes):
            one = batch.unstack(sizes)[k]
            alone = sf.Coupling.solve(
                mus[k], nus[k], cost=matrices[k] if mask is None else cost, epsilon=0.2,
                mask=None if mask is None else matrices[k],
            )  # fmt: skip
            assert one.shape == (n, m)
            torch.testing.assert_close(one.to_dense(), batch.to_dense()[k, :n, :m], atol=1e-15, rtol=0)
            torch.testing.assert_close(one.to_dense(), alone.to_dense(), atol=1e-8, rtol=0)
            torch.testing.assert_close(one.solution.f, alone.solution.f, atol=1e-7, rtol=0)
            torch.testing.assert_close(one.transport_cost(), alone.transport_cost())
            assert one.solution.converged


def test_what_cannot_be_unstacked():
    mu = sf.Measure.uniform(torch.zeros(2, 3, 1, dtype=torch.float64))
    batch = sf.Coupling.solve(mu, mu, epsilon=1.0)
    with pytest.raises(WeightError, match="expected weight zero beyond the first 2 and 3 atoms of problem 1"):
        batch.unstack([(3, 3), (2, 3)])
    for wrong in (batch, batch[0]):
        with pytest.raises(ShapeError, match="expected one batch axis and a size for each"):
            wrong.unstack([(3, 3)])
