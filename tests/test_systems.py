"""Coupling systems: closed forms, other libraries, the laws of functions of measures, and their moduli of continuity."""

import math
from dataclasses import replace

import numpy as np
import oracles
import ot
import pytest
import scipy.linalg
import strategies
import torch
from hypothesis import given
from torch import Tensor

import sinkformer as sf
from sinkformer.errors import BackendError, ConfigError, ConvergenceError, DTypeError, NonFiniteError, ShapeError
from sinkformer.systems import (
    ContextSwitch,
    EntropicTransport,
    ExactTransport,
    HardSwitch,
    Mixture,
    Monotone,
    PairSampler,
    Product,
    RandomTeacher,
    System,
    Whitened,
    every_pair,
    named,
)
from sinkformer.systems.entropic import EntropicSystem, _InverseRoot
from sinkformer.testing import check_coupling_model

NAMES = ("eot", "monotone", "whitened", "teacher", "switch", "product")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sources_mean(mu: sf.Measure, nu: sf.Measure) -> Tensor:
    """A weight of a mixture: 1/8-Lipschitz in mu, in [1/4, 3/4] on [-1, 1]^d."""
    return 0.5 + (mu.weights * mu.points[..., 0]).sum(-1) / 4


SYSTEMS: dict[str, System] = {
    **{name: named(name)[0] for name in NAMES},
    "mixture": Mixture(Product((1, 1)), Monotone(), sources_mean, lipschitz=0.25),
    "hard switch": HardSwitch(),
    "exact": ExactTransport(),
    "distances": EntropicTransport(sf.Euclidean(), epsilon=0.5, dims=(3, 3)),
    "rectangular": RandomTeacher(seed=3, dims=(1, 3)),
    "rectangular product": Product((3, 1)),
}
every_system = pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS.keys())


def pair(system: System, seed: int = 0, count: int = 6, **law) -> tuple[sf.Measure, sf.Measure]:
    return PairSampler(dims=system.dims, **law).pairs(count, generator=generator(seed))


def distance(mu: sf.Measure, other: sf.Measure) -> float:
    """W1 of two measures, Euclidean, by POT."""
    ground = torch.cdist(mu.points, other.points).numpy()
    return float(ot.emd2(mu.weights.numpy(), other.weights.numpy(), ground))


def product_distance(pi: sf.Coupling, other: sf.Coupling) -> float:
    """W1 of two couplings for |x - x'| + |y - y'|, the full problem on all pairs of atoms, by POT."""
    x = torch.cdist(pi.source.points, other.source.points)
    y = torch.cdist(pi.target.points, other.target.points)
    ground = (x[:, None, :, None] + y[None, :, None, :]).reshape(pi.shape.numel(), -1).numpy()
    masses = [p.to_dense().detach().flatten().numpy() for p in (pi, other)]
    return float(ot.emd2(*(m / m.sum() for m in masses), ground))


# What every system owes ---------------------------------------------------------------------------------------------


@every_system
def test_marginals_and_laws(system):
    mu, nu = pair(system, rare=0.5, count=30)
    pi = system(mu, nu)
    assert pi.dtype == torch.float64
    assert pi.source is mu
    assert pi.target is nu
    plan = pi.to_dense()
    assert float((plan.sum(-1) - mu.weights).abs().max()) <= 1e-9
    assert float((plan.sum(-2) - nu.weights).abs().max()) <= 1e-9
    assert float(plan.min()) >= 0
    check_coupling_model(system, system.dims[0], target_dim=system.dims[1])


@every_system
def test_a_batch_is_a_loop(system):
    """Any batch axes, ragged, one pair after the other without its padding."""
    mu, nu = pair(system, sizes=(1, 7))
    together = system(mu, nu).to_dense()
    for k, (one, other) in enumerate(zip(mu.unstack(), nu.unstack(), strict=True)):
        alone = system(one, other).to_dense()
        assert together[k][: one.n, : other.n] == pytest.approx(alone.numpy(), abs=1e-10)
    nested = system(mu.map(lambda t: t.unflatten(0, (2, 3))), nu.map(lambda t: t.unflatten(0, (2, 3))))
    assert nested.shape == (2, 3, 7, 7)
    assert torch.equal(nested.to_dense().flatten(0, 1), together)
    assert system(mu[:0], nu[:0]).shape == (0, 7, 7)


@every_system
def test_views_of_a_block(system):
    """Repeated measures, whose features are computed once, and copies of them give one answer."""
    views = every_pair(*PairSampler(dims=system.dims, sizes=(2, 5)).block(2, 3, 4, generator=generator()))
    copies = [m.map(lambda t: t.clone()) for m in views]
    assert system(*views).to_dense() == pytest.approx(system(*copies).to_dense().numpy(), abs=1e-12)


@every_system
def test_one_atom_leaves_no_choice(system):
    mu, nu = pair(system, count=4)
    dirac = sf.Measure.uniform(mu.points[:, :1])
    assert system(dirac, nu).to_dense()[:, 0] == pytest.approx(nu.weights.numpy(), abs=1e-12)


@every_system
def test_equal_atoms_share_their_row(system):
    """Law of splitting on many copies at once: all atoms twice, on both sides, in shares of their own."""
    mu, nu = pair(system, count=3, sizes=(4, 4))
    share = torch.rand(4, generator=generator(5), dtype=torch.float64)

    def doubled(m: sf.Measure) -> sf.Measure:
        return sf.Measure(m.points.repeat(1, 2, 1), torch.cat([m.weights * share, m.weights * (1 - share)], -1))

    plan = system(doubled(mu), doubled(nu)).to_dense()
    shares = torch.cat([share, 1 - share])
    expected = system(mu, nu).to_dense().repeat(1, 2, 2) * shares.unsqueeze(-1) * shares
    assert plan == pytest.approx(expected.numpy(), abs=1e-9)


@every_system
def test_deterministic(system):
    mu, nu = pair(system)
    state = torch.get_rng_state()
    assert torch.equal(system(mu, nu).to_dense(), system(mu, nu).to_dense())
    assert torch.equal(torch.get_rng_state(), state)


@every_system
def test_wrong_measures(system):
    mu, nu = pair(system)
    d, e = system.dims
    with pytest.raises(
        DTypeError, match=r"expected float64 measures, received torch\.float32; .*\.to\(torch\.float64\)"
    ):
        system(mu.to(torch.float32), nu.to(torch.float32))
    with pytest.raises(
        ShapeError, match=rf"expected points of dimensions \({d}, {e}\) for {system.name}, received \({d + 1}, {e}\)"
    ):
        system(PairSampler(dims=(d + 1, e)).pairs(6, generator=generator())[0], nu)
    with pytest.raises(ShapeError, match=r"expected measures of one batch shape, received \(6,\) and \(5,\)"):
        system(mu, nu[:5])
    with pytest.raises(DTypeError, match="expected a Measure, received Tensor"):
        system(mu.points, nu)


# Each by itself -----------------------------------------------------------------------------------------------------


def test_product():
    mu, nu = pair(Product())
    assert torch.equal(Product()(mu, nu).to_dense(), torch.einsum("bi,bj->bij", mu.weights, nu.weights))


def test_monotone_by_hand():
    mu = sf.Measure(oracles.tensor(3, 1, 2).unsqueeze(-1), oracles.tensor(0.5, 0.3, 0.2))
    nu = sf.Measure(oracles.tensor(-1, -2).unsqueeze(-1), oracles.tensor(0.6, 0.4))
    expected = oracles.tensor([0.5, 0.0], [0.0, 0.3], [0.1, 0.1])
    assert Monotone()(mu, nu).to_dense().numpy() == pytest.approx(expected.numpy(), abs=1e-15)


def test_monotone_ties_by_hand():
    """Two atoms at 0 share what goes to -1 and to 1 in proportion; the padding at 0 has no part."""
    mu = sf.Measure(oracles.tensor(0, 0, 0).unsqueeze(-1), oracles.tensor(0.25, 0.0, 0.75))
    nu = sf.Measure(oracles.tensor(1, -1).unsqueeze(-1), oracles.tensor(0.4, 0.6))
    expected = oracles.tensor([0.1, 0.15], [0.0, 0.0], [0.3, 0.45])
    assert Monotone()(mu, nu).to_dense().numpy() == pytest.approx(expected.numpy(), abs=1e-15)


def test_monotone_is_the_plan_of_pot():
    mu, nu = PairSampler(dims=(1, 1), sizes=(1, 40), half_width=100).pairs(20, generator=generator())
    plan = Monotone()(mu, nu).to_dense()
    for k in range(20):
        x, y = (m.points[k, :, 0].numpy() for m in (mu, nu))
        expected = ot.emd_1d(x, y, mu.weights[k].numpy(), nu.weights[k].numpy())
        cost = (x[:, None] - y[None]) ** 2
        assert float((plan[k].numpy() * cost).sum()) == pytest.approx(
            float((expected * cost).sum()), rel=1e-9, abs=1e-9
        )
        if len(np.unique(x)) == len(x) and len(np.unique(y)) == len(y):
            assert plan[k].numpy() == pytest.approx(expected, abs=1e-12)


@given(strategies.measures(d=1, max_atoms=6), strategies.measures(d=1, max_atoms=6))
def test_monotone_quantiles(mu, nu):
    """P(X <= x, Y <= y) = min(F(x), G(y)): the definition, with ties, zero weights and atoms in any order."""
    plan = Monotone()(mu, nu).to_dense()
    x, y = mu.points[:, 0], nu.points[:, 0]
    for s in x:
        for t in y:
            below = float(plan[x <= s][:, y <= t].sum())
            levels = float(mu.weights[x <= s].sum()), float(nu.weights[y <= t].sum())
            assert below == pytest.approx(min(levels), abs=1e-12)


def test_eot_two_by_two():
    mu = sf.Measure(oracles.tensor([0.0, 0.1], [0.4, -0.3]), oracles.tensor(0.3, 0.7))
    nu = sf.Measure(oracles.tensor([0.2, 0.1], [-0.5, 0.3]), oracles.tensor(0.6, 0.4))
    cost = (mu.points[:, None] - nu.points[None]).square().sum(-1)
    expected = oracles.two_by_two(mu.weights, nu.weights, cost, 0.1)
    plan = EntropicTransport(sf.SqEuclidean(), 0.1, (2, 2))(mu, nu).to_dense()
    assert plan.numpy() == pytest.approx(expected.numpy(), abs=1e-11)


def pot_plan(mu: sf.Measure, nu: sf.Measure, cost: np.ndarray, epsilon: float) -> np.ndarray:
    """The entropic plan by POT, for measures without atoms of weight zero."""
    masses = mu.weights.numpy(), nu.weights.numpy()
    return np.asarray(ot.sinkhorn(*masses, cost, epsilon, "sinkhorn_log", stopThr=1e-12, numItermax=20_000))


@pytest.mark.parametrize("cost", [sf.SqEuclidean(), sf.Euclidean(), sf.NegativeDot()])
def test_eot_is_the_plan_of_pot(cost):
    mu, nu = (m[0] for m in pair(Product(), sizes=(6, 6)))
    plan = EntropicTransport(cost, 0.2, (2, 2))(mu, nu).to_dense()
    assert plan.numpy() == pytest.approx(pot_plan(mu, nu, cost(mu.points, nu.points).numpy(), 0.2), abs=1e-9)


def test_whitened_is_what_it_says():
    """Covariance, its inverse root and the plan, by NumPy, SciPy and POT."""

    def whitened(m: sf.Measure) -> np.ndarray:
        x, w = m.points.numpy(), m.weights.numpy()
        centred = x - w @ x
        covariance = np.cov(x.T, aweights=w, ddof=0)
        return centred @ scipy.linalg.inv(scipy.linalg.sqrtm(covariance + 0.05 * np.eye(2)))

    mu, nu = (m[0] for m in pair(Product(), sizes=(5, 5)))
    x, y = whitened(mu), whitened(nu)
    cost = ((x[:, None] - y[None]) ** 2).sum(-1)
    plan = Whitened(0.3, 0.05)(mu, nu).to_dense()
    assert plan.numpy() == pytest.approx(pot_plan(mu, nu, cost, 0.3), abs=1e-9)


def test_whitened_does_not_see_translations_nor_rotations_of_both():
    system = Whitened()
    mu, nu = pair(system)
    plan = system(mu, nu).to_dense()
    moved = mu.pushforward(mu.points + oracles.tensor(0.3, -2.0))
    assert system(moved, nu).to_dense() == pytest.approx(plan.numpy(), abs=1e-9)
    turn = torch.linalg.qr(torch.randn(2, 2, generator=generator(), dtype=torch.float64)).Q
    turned = system(mu.pushforward(mu.points @ turn), nu.pushforward(nu.points @ turn))
    assert turned.to_dense() == pytest.approx(plan.numpy(), abs=1e-9)


def test_derivative_of_the_inverse_root():
    """Also at equal eigenvalues, where the derivative of eigenvectors does not exist."""
    for eigenvalues in ((0.3, 0.7, 2.0), (0.5, 0.5, 0.5), (0.05, 0.05, 1.0)):
        turn = torch.linalg.qr(torch.randn(3, 3, generator=generator(), dtype=torch.float64)).Q
        s = (turn * oracles.tensor(*eigenvalues)) @ turn.T

        def root(t: Tensor) -> Tensor:
            answer = _InverseRoot.apply((t + t.mT) / 2)
            assert isinstance(answer, Tensor)
            return answer

        assert root(s) @ s @ root(s) == pytest.approx(np.eye(3), abs=1e-12)
        assert torch.autograd.gradcheck(root, (s.requires_grad_(),))


@pytest.mark.parametrize("system", [EntropicTransport(), Whitened(0.5), RandomTeacher(), ContextSwitch()])
def test_targets_are_differentiable_in_points(system):
    """Also for a Dirac, whose covariance is zero."""
    mu, nu = (m[0] for m in pair(system, sizes=(3, 3)))
    values = torch.randn(3, 3, generator=generator(4), dtype=torch.float64)

    def answer(points: Tensor) -> Tensor:
        return (system(sf.Measure(points, mu.weights), nu).to_dense() * values).sum()

    points = mu.points.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(answer(points), points)
    direction = torch.randn(3, 2, generator=generator(6), dtype=torch.float64)
    with torch.no_grad():
        slope = (answer(mu.points + 1e-5 * direction) - answer(mu.points - 1e-5 * direction)) / 2e-5
    assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=1e-5, abs=1e-8)
    same = mu.points[:1].repeat(3, 1).requires_grad_()
    (gradient,) = torch.autograd.grad(answer(same), same)
    assert bool(torch.isfinite(gradient).all())


def test_teacher_is_what_it_says():
    """The formulas of the module, one point and one head at a time."""
    teacher = RandomTeacher(seed=4, dims=(2, 2))
    encoder = teacher._encoders[0]
    mu = oracles.random_measure(4, generator=generator())
    probe = oracles.tensor([0.3, -0.8])

    def bounded(v: Tensor) -> Tensor:
        return v / math.sqrt(float(v @ v) + 0.25)

    def attended(z: Tensor, atoms: list[Tensor], layer) -> Tensor:
        total = torch.zeros(16, dtype=torch.float64)
        for query, key, value, out in zip(*layer, strict=True):
            kernel = [math.exp(4.0 * float(bounded(query @ z) @ bounded(key @ y))) for y in atoms]
            masses = [float(w) * k for w, k in zip(mu.weights, kernel, strict=True)]
            mean = sum(m * (value @ y) for m, y in zip(masses, atoms, strict=True)) / sum(masses)
            total += out @ mean
        return total

    z = torch.tanh(encoder.enter @ probe[0] + encoder.bias)
    atoms = [torch.tanh(encoder.enter @ x + encoder.bias) for x in mu.points]
    for layer in encoder.layers:
        z, atoms = (
            torch.tanh(z + attended(z, atoms, layer)),
            [torch.tanh(y + attended(y, atoms, layer)) for y in atoms],
        )
    assert teacher.source_features(mu, probe)[0].numpy() == pytest.approx((encoder.leave @ z).numpy(), abs=1e-13)
    at_atoms = teacher.source_features(mu, mu.points)
    assert at_atoms.numpy() == pytest.approx(teacher.source_features(mu, mu.points.clone()).numpy(), abs=1e-13)


@pytest.mark.parametrize("logit_scale", [0.5, 4.0])
def test_constants_of_the_teacher(logit_scale):
    """The composition of the module, from the norms of NumPy."""
    teacher = RandomTeacher(seed=2, dims=(2, 3), logit_scale=logit_scale)
    sides = []
    for encoder in teacher._encoders:
        s, t = np.linalg.norm(encoder.enter.numpy(), 2), 0.0
        for layer in encoder.layers:
            query, key, value, out = (np.array([np.linalg.norm(w.numpy(), 2) for w in matrices]) for matrices in layer)
            p = 1 + (out * value * 4 * 2 * logit_scale * query).sum()
            q = (out * value * math.exp(2 * logit_scale) * (1 + 4 * 4 * logit_scale * key)).sum()
            s, t = p * s, p * t + q * (s + t)
        size = np.linalg.norm(encoder.leave.numpy(), 2)
        sides.append((size * s, size * t, size * 4))
    (s, t, bound), (s_target, t_target, bound_target) = sides
    expected = max(s * bound_target, s_target * bound), max(t * bound_target, t_target * bound)
    assert teacher.constants(1.0) == pytest.approx(expected, rel=1e-12)


def test_teachers_by_seed():
    mu, nu = pair(RandomTeacher())
    torch.manual_seed(1)
    plan = RandomTeacher(seed=0)(mu, nu).to_dense()
    torch.manual_seed(2)
    assert torch.equal(RandomTeacher(seed=0)(mu, nu).to_dense(), plan)
    assert not torch.allclose(RandomTeacher(seed=1)(mu, nu).to_dense(), plan, atol=1e-3)


def test_the_teacher_sees_the_context():
    """The couplings made with features from the clouds of other pairs are as far away as the product coupling."""
    teacher = RandomTeacher()
    mu, nu = pair(teacher, count=40, sizes=(4, 8))
    truth = teacher(mu, nu)
    others = [m.map(lambda t: t.roll(1, 0)) for m in (mu, nu)]
    features = teacher.source_features(others[0], mu.points), teacher.target_features(others[1], nu.points)
    elsewhere = sf.Coupling.solve(mu, nu, cost=sf.NegativeDot(), features=features, epsilon=0.1)
    product = Product()(mu, nu)
    mean = [float(sf.losses.total_variation(pi, truth).mean()) for pi in (elsewhere, product)]
    assert mean[0] > 0.5 * mean[1] > 0.05


def test_the_switch_is_a_mixture_of_two_transports():
    system = ContextSwitch(0.1, 10.0)
    mu, nu = pair(system, count=30)
    means = [(m.weights.unsqueeze(-1) * m.points).sum(-2) for m in (mu, nu)]
    t = torch.sigmoid(10 * (means[0] * means[1]).sum(-1))
    assert torch.allclose(system.weight(mu, nu), t, atol=1e-14)
    along = sf.Coupling.solve(mu, nu, cost=sf.NegativeDot(), epsilon=0.05)
    against = sf.Coupling.solve(mu, nu, cost=sf.NegativeDot(), epsilon=0.05, features=(-mu.points, nu.points))
    expected = t[:, None, None] * along.to_dense() + (1 - t[:, None, None]) * against.to_dense()
    assert system(mu, nu).to_dense() == pytest.approx(expected.numpy(), abs=1e-8)
    assert 0.1 < float(((t - 0.5).abs() < 0.2).double().mean()) < 0.9  # neither always undecided nor never

    hard = torch.where((t >= 0.5)[:, None, None], along.to_dense(), against.to_dense())
    assert HardSwitch(0.1)(mu, nu).to_dense() == pytest.approx(hard.numpy(), abs=1e-8)


def test_the_switch_depends_on_both_measures_jointly():
    """Reflecting one of the two exchanges the transports and their shares: mu -> -mu turns the plan into itself."""
    system = ContextSwitch()
    mu, nu = pair(system)
    assert torch.allclose(system.weight(mu.pushforward(-mu.points), nu), 1 - system.weight(mu, nu), atol=1e-14)
    flipped = system(mu.pushforward(-mu.points), nu).to_dense()
    assert flipped == pytest.approx(system(mu, nu).to_dense().numpy(), abs=1e-9)


def test_mixture():
    system = SYSTEMS["mixture"]
    mu, nu = pair(system)
    t = sources_mean(mu, nu)[:, None, None]
    expected = t * Product((1, 1))(mu, nu).to_dense() + (1 - t) * Monotone()(mu, nu).to_dense()
    assert torch.equal(system(mu, nu).to_dense(), expected)


def test_exact_transport_is_optimal():
    for cost in (sf.SqEuclidean(), sf.Euclidean()):
        mu, nu = pair(ExactTransport())
        pi = ExactTransport(cost)(mu, nu)
        for k in range(len(mu)):
            ground = cost(mu.points[k], nu.points[k]).numpy()
            value = ot.emd2(mu.weights[k].numpy(), nu.weights[k].numpy(), ground)
            assert float(pi[k].cost(cost)) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("scale", [1e-12, 1e-5, 1e6])
@pytest.mark.parametrize("cost", [sf.SqEuclidean(), sf.Euclidean(), sf.NegativeDot()], ids=repr)
def test_exact_transport_is_optimal_at_every_scale(cost, scale):
    """The plan of the scaled points is optimal for the points; so it is far from the origin."""
    system = ExactTransport(cost)
    mu, nu = (m.pushforward(m.points + 3.0) for m in pair(system))
    small = [m.pushforward(scale * m.points) for m in (mu, nu)]
    value, expected = (
        system(*small).cost(cost) / scale ** (1 if cost == sf.Euclidean() else 2),
        system(mu, nu).cost(cost),
    )
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)


def test_exact_transport_of_points_whose_cost_overflows():
    far = sf.Measure.uniform(torch.tensor([[1e200, 0.0], [-1e200, 0.0]], dtype=torch.float64))
    with pytest.raises(NonFiniteError, match="expected finite costs, received a NaN or an infinity"):
        ExactTransport()(far, far)


def test_exact_transport_that_was_not_finished(monkeypatch):
    monkeypatch.setattr("sinkformer.systems.discontinuous._MOST_PIVOTS", 1)
    with (
        pytest.warns(UserWarning, match="numItermax"),
        pytest.raises(
            ConvergenceError, match="expected an optimal plan, received from the network simplex: numItermax"
        ),
    ):
        ExactTransport()(*pair(ExactTransport(), sizes=(16, 16)))


def test_exact_transport_on_a_line_is_monotone():
    mu, nu = PairSampler(dims=(1, 1), spread=(0.1, 0.1), clusters=(1, 1)).pairs(5, generator=generator())
    flat = [m.pushforward(torch.cat([m.points, 0 * m.points], -1)) for m in (mu, nu)]
    assert ExactTransport()(*flat).to_dense() == pytest.approx(Monotone()(mu, nu).to_dense().numpy(), abs=1e-12)


@pytest.mark.parametrize("system", [ExactTransport(), HardSwitch(0.1)])
def test_discontinuous_systems_jump(system):
    """Pairs that are 0.002 apart, with couplings that are far apart: the example in the docstring, turned by hand."""
    assert not system.continuous
    assert system.modulus(1e-9) == math.inf
    mu = sf.Measure.uniform(oracles.tensor([-1.0, 0.0], [1.0, 0.0]))
    nu = sf.Measure.uniform(oracles.tensor([0.0, -1.0], [0.0, 1.0]))
    step = oracles.tensor([1e-3, 0.0])
    if isinstance(system, ExactTransport):
        sides = [nu.pushforward(nu.points + s * oracles.tensor([1e-3, 0.0], [-1e-3, 0.0])) for s in (1, -1)]
        here, there = (system(mu, side) for side in sides)
        far = 2.0
    else:
        target = sf.Measure.uniform(oracles.tensor([-0.9, 0.2], [1.0, 0.2]))
        here, there = (system(mu.pushforward(mu.points + s * step), target) for s in (1, -1))
        far = 1.9
    assert product_distance(here, there) >= far - 0.01


# Moduli of continuity -----------------------------------------------------------------------------------------------


def perturbed(mu: sf.Measure, seed: int) -> sf.Measure:
    """A measure nearby or far: atoms moved, mass moved to one atom, or both, by a random amount; within [-1, 1]^d."""
    g = generator(seed)
    size = 10 ** float(-4 + 4.3 * torch.rand((), generator=g))
    points = mu.points + size * (seed % 3 != 0) * torch.randn(mu.points.shape, generator=g, dtype=torch.float64)
    share = min(size, 1.0) * (seed % 3 != 1)
    dirac = torch.eye(mu.n, dtype=torch.float64)[int(torch.randint(mu.n, (), generator=g))]
    return sf.Measure(points.clamp(-1, 1), (1 - share) * mu.weights + share * dirac)


def observed(system: System, seed: int) -> tuple[float, float]:
    """How far apart two small pairs are, and their couplings."""
    mu, nu = (m[0] for m in pair(system, seed, count=1, sizes=(2, 4), rare=0.3))
    other = perturbed(mu, seed), perturbed(nu, seed + 1)
    delta = distance(mu, other[0]) + distance(nu, other[1])
    return delta, product_distance(system(mu, nu), system(*other))


CONTINUOUS = {
    **{name: system for name, system in SYSTEMS.items() if system.continuous},
    # Large epsilon, where the bounds are nearest to what happens.
    "soft": EntropicTransport(sf.Euclidean(), epsilon=5.0, dims=(2, 2)),
    "soft whitened": Whitened(epsilon=500.0, ridge=3.0),
    "soft switch": ContextSwitch(epsilon=20.0, sharpness=1.0),
}
every_continuous_system = pytest.mark.parametrize("system", CONTINUOUS.values(), ids=CONTINUOUS.keys())


@every_continuous_system
def test_modulus_is_never_exceeded(system):
    for seed in range(20):
        delta, moved = observed(system, seed)
        assert delta - 1e-9 <= moved <= system.modulus(delta) + 1e-9


@pytest.mark.parametrize("system", [Product(), Monotone(), Product((3, 1))])
def test_isometric_systems(system):
    """W1 of the couplings is the distance of the pairs: modulus(delta) = delta is met by every pair."""
    for seed in range(30):
        delta, moved = observed(system, seed)
        assert system.modulus(delta) == delta == pytest.approx(moved, abs=1e-9)


@pytest.mark.parametrize("name", ["eot", "whitened", "switch", "teacher", "distances"])
def test_other_systems_are_not(name):
    """The further terms are needed: some pairs move further than their marginals."""
    assert max(moved / delta for delta, moved in (observed(SYSTEMS[name], seed) for seed in range(25))) > 1.05


def test_modulus_of_a_mixture_is_needed():
    """A change of the weight moves mass between two couplings that are 1 apart: far beyond delta, within the bound."""

    def weight(mu, nu):
        return (0.5 + 4 * (mu.weights * mu.points[..., 0]).sum(-1)).clamp(0, 1)

    system = Mixture(Product((1, 1)), Monotone(), weight, lipschitz=4.0)
    mu, other = (sf.Measure.uniform(oracles.tensor([s - 0.99], [s + 0.99])) for s in (0.0, 0.01))
    moved = product_distance(system(mu, mu), system(other, mu))
    assert 4 * 0.01 < moved <= system.modulus(0.01) == pytest.approx(0.01 + 4 * 0.01 * 2)


def test_moduli_of_the_documentation():
    """docs/systems.md, on the squares [-1, 1]^2."""
    delta = 1e-12
    for name, root, linear in (("eot", 10.6, 1), ("whitened", 47.6, 6.4e4), ("switch", 10.6, 11)):
        expected = root * math.sqrt(delta) + linear * delta
        assert named(name)[0].modulus(delta) == pytest.approx(expected, rel=5e-3)
    assert named("teacher")[0].modulus(2e-10) < 2 * math.sqrt(2) < named("teacher")[0].modulus(4e-10)


@every_system
def test_shape_of_a_modulus(system):
    deltas = [0.0, 1e-12, 1e-6, 1e-3, 0.1, 1.0, 100.0]
    values = [system.modulus(delta) for delta in deltas]
    assert values == sorted(values)
    assert system.continuous == all(math.isfinite(v) for v in values)
    if system.continuous:
        assert values[0] == 0.0
        assert values[-1] == pytest.approx(2 * (math.sqrt(system.dims[0]) + math.sqrt(system.dims[1])))
        assert system.modulus(1e-3, half_width=0.5) <= values[3]
        assert system.modulus(100.0, half_width=0.5) == pytest.approx(values[-1] / 2)
    for delta in (-1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=f"expected a distance delta >= 0, received {delta}"):
            system.modulus(delta)
    with pytest.raises(ConfigError, match=r"expected a positive half_width of the domain, received 0\.0"):
        system.modulus(0.1, half_width=0.0)


ENTROPIC = {name: s for name, s in CONTINUOUS.items() if isinstance(s, EntropicSystem)}


def costs(system: EntropicSystem, mu: sf.Measure, nu: sf.Measure, x: Tensor, y: Tensor) -> Tensor:
    return system.cost(system.source_features(mu, x), system.target_features(nu, y))


def crossed(change: Tensor, axis: int) -> Tensor:
    """Differences of neighbours along one axis, after which functions of the other variable alone are gone."""
    return (change - change.roll(1, axis)).abs()


@pytest.mark.parametrize("system", ENTROPIC.values(), ids=ENTROPIC.keys())
def test_constants_of_the_cost(system):
    """L and M bound the differences that functions of one point do not enter, in one point and in the measures."""
    lipschitz, drift = system.constants(1.0)
    g = generator(9)
    for seed in range(30):
        mu, nu = (m[0] for m in pair(system, seed, count=1, rare=0.3))
        x, y = (2 * torch.rand(50, d, generator=g, dtype=torch.float64) - 1 for d in system.dims)
        far = 10 ** float(-4 * torch.rand((), generator=g))
        near = [(p + far * torch.randn(p.shape, generator=g, dtype=torch.float64)).clamp(-1, 1) for p in (x, y)]
        here = costs(system, mu, nu, x, y)
        in_x = crossed(costs(system, mu, nu, near[0], y) - here, 1)
        assert bool((in_x <= 2 * lipschitz * (near[0] - x).norm(dim=-1).unsqueeze(-1) + 1e-9).all())
        in_y = crossed(costs(system, mu, nu, x, near[1]) - here, 0)
        assert bool((in_y <= 2 * lipschitz * (near[1] - y).norm(dim=-1) + 1e-9).all())
        other = perturbed(mu, seed), perturbed(nu, seed + 1)
        delta = distance(mu, other[0]) + distance(nu, other[1])
        change = costs(system, *other, x, y) - here
        twice = (change - change.roll(1, 0) - change.roll(1, 1) + change.roll((1, 1), (0, 1))).abs()
        assert float(twice.max()) <= 4 * drift * delta + 1e-9


@pytest.mark.parametrize("cost", [sf.SqEuclidean(), sf.Euclidean(), sf.NegativeDot()])
def test_constants_are_met(cost):
    """Between opposite corners of the domain, L is what the cost needs."""
    for half_width in (1.0, 0.25):
        system = EntropicTransport(cost, dims=(3, 3))
        corner = half_width * torch.ones(1, 3, dtype=torch.float64)
        x, near, y = 0 * corner, 1e-3 * corner, torch.cat([corner, -corner])
        change = crossed(cost(near, y) - cost(x, y), 1).max()
        assert float(change) == pytest.approx(2 * system.constants(half_width)[0] * float(near.norm()), rel=1e-9)


def test_a_cost_of_ones_own():
    class Cosine(sf.Cost):
        def __call__(self, x, y):
            return (x.unsqueeze(-2) - y.unsqueeze(-3)).cos().sum(-1)

    system = EntropicTransport(Cosine(), 0.2, (2, 2), lipschitz=math.sqrt(2))
    mu, nu = (m[0] for m in pair(system, sizes=(5, 5)))
    plan = system(mu, nu).to_dense()
    assert plan.numpy() == pytest.approx(pot_plan(mu, nu, Cosine()(mu.points, nu.points).numpy(), 0.2), abs=1e-9)
    assert system.modulus(0.1, half_width=0.5) <= system.modulus(0.1)
    with pytest.raises(ConfigError, match=r"expected half_width <= 1, where lipschitz was stated, received 2\.0"):
        system.modulus(0.1, half_width=2.0)
    with pytest.raises(
        ConfigError, match=r"expected lipschitz with the cost .*, whose constant is not known; state it"
    ):
        EntropicTransport(Cosine(), 0.2, (2, 2))


# Sampling -----------------------------------------------------------------------------------------------------------


def live_sizes(mu: sf.Measure) -> Tensor:
    return (mu.weights > 0).sum(-1)


def test_pairs():
    sampler = PairSampler(dims=(2, 3), sizes=(2, 5))
    mu, nu = sampler.pairs(500, generator=generator())
    assert (mu.points.shape, nu.points.shape) == ((500, 5, 2), (500, 5, 3))
    assert mu.dtype == nu.dtype == torch.float64
    for m in (mu, nu):
        assert float(m.points.abs().max()) <= 1
        counts = live_sizes(m).bincount(minlength=6)
        assert counts[:2].sum() == 0
        assert int(counts[2:].min()) > 90  # 125 of each size are expected
        assert float((m.weights.sum(-1) - 1).abs().max()) <= 1e-12


def test_block():
    sampler = PairSampler(dims=(2, 1))
    mu, nu = sampler.block(4, 8, 3, generator=generator())
    assert (mu.points.shape, nu.points.shape) == ((4, 8, 16, 2), (4, 3, 16, 1))
    left, right = every_pair(mu, nu)
    assert left.batch_shape == right.batch_shape == (4, 8, 3)
    for s in range(8):
        for t in range(3):
            assert torch.equal(left.points[:, s, t], mu.points[:, s])
            assert torch.equal(right.weights[:, s, t], nu.weights[:, t])
    assert left.points.data_ptr() == mu.points.data_ptr()
    one, other = every_pair(mu[0], nu[0])
    assert one.batch_shape == other.batch_shape == (8, 3)


def test_the_generator_is_all():
    sampler = PairSampler(rare=0.5)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = sampler.pairs(7, generator=generator(1))
    again = sampler.pairs(7, generator=generator(1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        torch.equal(a.points, b.points) and torch.equal(a.weights, b.weights) for a, b in zip(first, again, strict=True)
    )
    g = generator(1)
    sampler.pairs(7, generator=g)
    following = sampler.pairs(7, generator=g)
    assert not torch.equal(following[0].points, first[0].points)
    assert not torch.equal(first[0].points, first[1].points)
    assert sampler.pairs(0, generator=g)[0].batch_shape == (0,)


def test_laws_of_the_weights():
    def spread_of(law: str, **options) -> Tensor:
        mu, _ = PairSampler(sizes=(8, 8), weights=law, **options).pairs(600, generator=generator())
        return mu.weights.log().std(-1)

    assert float(spread_of("uniform").max()) <= 1e-12
    assert float(spread_of("lognormal").mean()) == pytest.approx(0.965, abs=0.05)  # sigma 1, 8 samples
    assert float(spread_of("dirichlet").mean()) == pytest.approx(1.2, abs=0.15)  # log of an exponential: pi / sqrt 6
    mixed = spread_of("mixed")
    assert float((mixed < 1e-12).double().mean()) == pytest.approx(1 / 3, abs=0.08)
    assert float(spread_of("uniform", rare=1.0).mean()) == pytest.approx(2.5 * 0.965, abs=0.12)


def test_clusters_and_spread():
    tight = PairSampler(sizes=(16, 16), clusters=(1, 3), spread=(1e-12, 1e-12)).pairs(300, generator=generator())[0]
    places = torch.tensor([len(x.round(decimals=6).unique(dim=0)) for x in tight.points])
    assert sorted(set(places.tolist())) == [1, 2, 3]
    assert float(tight.points.abs().max()) <= 0.75 + 1e-6
    wide = PairSampler(sizes=(16, 16), clusters=(1, 1), spread=(0.05, 0.2)).pairs(300, generator=generator())[0]
    deviations = wide.points.std(-2).mean(-1)
    assert 0.02 < float(deviations.min()) < 0.07
    assert 0.13 < float(deviations.max()) < 0.3


def test_half_width_scales_the_points():
    one, other = (PairSampler(half_width=h).pairs(5, generator=generator())[0] for h in (1.0, 3.0))
    assert torch.allclose(other.points, 3 * one.points, atol=1e-14)
    assert torch.equal(one.weights, other.weights)


def test_rare_clouds():
    """Some are nearly a point, some lie on the boundary, for the most part; without them neither occurs."""

    def corners(rare: float) -> tuple[float, float]:
        mu, _ = PairSampler(sizes=(8, 8), clusters=(1, 1), rare=rare).pairs(500, generator=generator())
        points = (mu.points.std(-2).amax(-1) < 0.02).double().mean()
        boundary = ((mu.points.abs().amax(-1) == 1).double().mean(-1) > 0.9).double().mean()
        return float(points), float(boundary)

    usual, all_rare, some = corners(0.0), corners(1.0), corners(0.3)
    assert usual == (0.0, 0.0)
    assert all_rare[0] > 0.15
    assert all_rare[1] > 0.02
    assert 0.0 < some[0] < all_rare[0]


# Names and refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_named(name):
    system, sampler = named(name)
    assert system.name == name
    assert system.continuous
    assert sampler.dims == system.dims == ((1, 1) if name == "monotone" else (2, 2))
    assert (sampler.sizes, sampler.rare, sampler.half_width) == ((2, 16), 0.0, 1.0)
    assert getattr(system, "epsilon", 0.1) == 0.1
    assert replace(sampler, rare=0.1).rare == 0.1


def test_unknown_name():
    message = "expected a system of eot, monotone, whitened, teacher, switch, product, received 'emd'"
    with pytest.raises(ConfigError, match=message):
        named("emd")
    with pytest.raises(ConfigError, match=r"expected a system of .*, received \['eot'\]"):
        named(["eot"])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Product((2,)), r"expected dims as two whole numbers, received \(2,\)"),
        (lambda: Product((0, 1)), r"expected dims as two whole numbers >= 1, received \(0, 1\)"),
        (lambda: Product((1.0, 1)), r"expected dims as two whole numbers >= 1, received \(1\.0, 1\)"),
        (lambda: EntropicTransport(epsilon=0.0), r"expected epsilon positive and finite, received 0\.0"),
        (lambda: EntropicTransport(epsilon=math.nan), "expected epsilon positive and finite, received nan"),
        (lambda: EntropicTransport(epsilon=True), "expected epsilon positive and finite, received True"),
        (lambda: EntropicTransport(dims=(2, 3)), r"expected equal dims for SqEuclidean\(\), received \(2, 3\)"),
        (lambda: EntropicTransport(lipschitz=1.0), "expected no lipschitz with .*, whose constant is known"),
        (lambda: EntropicTransport(sf.Matrix(torch.zeros(2, 2))), "expected a cost that is a function of two points"),
        (lambda: EntropicTransport("dot"), "expected a cost that is a function of two points, received 'dot'"),
        (lambda: Whitened(ridge=0.0), r"expected ridge positive and finite, received 0\.0"),
        (lambda: Whitened(dims=(2, 3)), r"expected equal dims, .*, received \(2, 3\)"),
        (lambda: ContextSwitch(sharpness=-1.0), r"expected sharpness positive and finite, received -1\.0"),
        (lambda: ContextSwitch(dims=(1, 2)), "expected equal dims"),
        (lambda: RandomTeacher(seed=-1), "expected a seed >= 0, received -1"),
        (lambda: RandomTeacher(seed=0.5), r"expected a seed >= 0, received 0\.5"),
        (lambda: RandomTeacher(logit_scale=math.inf), "expected logit_scale positive and finite, received inf"),
        (lambda: ExactTransport(dims=(1, 1)), r"expected dims as two whole numbers >= 2, received \(1, 1\)"),
        (lambda: ExactTransport(sf.Matrix(torch.zeros(2, 2))), "expected a cost that is a function of two points"),
        (lambda: HardSwitch(epsilon=-1), "expected epsilon positive and finite, received -1"),
        (lambda: Mixture(Product(), Monotone(), sources_mean, 1.0), r"two systems of equal dims, received \(2, 2\) and \(1, 1\)"),
        (lambda: Mixture(Product(), Product(), sources_mean, 0.0), r"expected lipschitz positive and finite, received 0\.0"),
        (lambda: PairSampler(dims=2), "expected dims as two whole numbers, received 2"),
        (lambda: PairSampler(sizes=(0, 4)), "expected sizes positive and finite, received 0"),
        (lambda: PairSampler(sizes=(5, 4)), r"expected sizes as whole numbers low <= high, received \(5, 4\)"),
        (lambda: PairSampler(sizes=16), r"expected sizes as two numbers \(low, high\), received 16"),
        (lambda: PairSampler(clusters=(1.0, 2)), r"expected clusters as whole numbers low <= high, received \(1\.0, 2\)"),
        (lambda: PairSampler(spread=(0.0, 1.0)), r"expected spread positive and finite, received 0\.0"),
        (lambda: PairSampler(spread=(0.2, 0.1)), r"expected spread as numbers low <= high, received \(0\.2, 0\.1\)"),
        (lambda: PairSampler(weights="heavy"), "expected weights of uniform, lognormal, dirichlet, mixed, received 'heavy'"),
        (lambda: PairSampler(rare=1.5), r"expected rare as a share between 0 and 1, received 1\.5"),
        (lambda: PairSampler(rare="a"), "expected rare as a share between 0 and 1, received 'a'"),
        (lambda: PairSampler(weights=["mixed"]), r"expected weights of uniform, .*, received \['mixed'\]"),
        (lambda: PairSampler(half_width=0), "expected half_width positive and finite, received 0"),
    ],
)  # fmt: skip
def test_wrong_settings(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mixture(None, Product(), sources_mean, 1.0), "expected two systems to mix, received NoneType"),
        (lambda: Mixture(Product(), "product", sources_mean, 1.0), "expected two systems to mix, received str"),
        (lambda: Mixture(Product(), Product(), None, 1.0), "weight of a mixture as a function of two measures, received None"),
        (lambda: every_pair(None, None), "expected two measures to pair, received NoneType"),
    ],
)  # fmt: skip
def test_wrong_types(make, message):
    with pytest.raises(DTypeError, match=message):
        make()


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_moduli_at_the_ends_of_the_numbers(system):
    """Never NaN, never below the distance nor above the diameter; no overflow, no cancellation."""
    for wrong in ("a", None, True, -1.0, math.nan):
        with pytest.raises(ConfigError, match="expected a distance delta >= 0, received"):
            system.modulus(wrong)
        with pytest.raises(ConfigError, match="expected a positive half_width of the domain, received"):
            system.modulus(0.1, half_width=wrong)
    for half_width in (1e-320, 1e-200, 1.0, 1e200, 1e308):
        if half_width > 1 and isinstance(system, Mixture):
            continue
        if not system.continuous:
            assert system.modulus(0.0, half_width=half_width) == math.inf
            continue
        diameter = 2 * half_width * sum(math.sqrt(d) for d in system.dims)
        assert system.modulus(0.0, half_width=half_width) == 0.0
        for delta in (1e-320, 0.1, 1e200):
            value = system.modulus(delta, half_width=half_width)
            assert min(delta, 0.999 * diameter) <= value <= 1.001 * diameter


def test_wrong_draws():
    sampler = PairSampler()
    with pytest.raises(ConfigError, match="expected count as a whole number >= 0, received -1"):
        sampler.pairs(-1, generator=generator())
    with pytest.raises(ConfigError, match=r"expected targets as a whole number >= 0, received 2\.0"):
        sampler.block(1, 1, 2.0, generator=generator())
    with pytest.raises(ConfigError, match=r"expected a torch\.Generator of the CPU, received 0"):
        sampler.pairs(1, generator=0)
    mu, nu = sampler.pairs(3, generator=generator())
    with pytest.raises(
        ShapeError, match=r"expected batch shapes \(\*batch, s\) and \(\*batch, t\), received \(\) and \(\)"
    ):
        every_pair(mu[0], nu[0])
    blocks = sampler.block(2, 3, 3, generator=generator())
    with pytest.raises(ShapeError, match=r"received \(2, 3\) and \(3,\)"):
        every_pair(blocks[0], nu)


def test_wrong_weights_of_a_mixture():
    mu, nu = pair(Product())

    def mixture(weight) -> sf.Coupling:
        return Mixture(Product(), Product(), weight, 1.0)(mu, nu)

    with pytest.raises(ShapeError, match=r"expected the weight of a mixture of shape \(6,\), received \(\)"):
        mixture(lambda mu, nu: torch.tensor(0.5, dtype=torch.float64))
    with pytest.raises(DTypeError, match=r"expected the weight of a mixture as a tensor of dtype .*, received float"):
        mixture(lambda mu, nu: 0.5)
    for wrong in (1.5, -0.1, math.nan):
        with pytest.raises(ConfigError, match=f"expected the weight of a mixture between 0 and 1, received {wrong}"):
            mixture(lambda mu, nu, wrong=wrong: torch.full((6,), wrong, dtype=torch.float64))
    with pytest.raises(ConfigError, match=r"expected half_width <= 1, where lipschitz was stated, received 2\.0"):
        Mixture(Product(), Product(), sources_mean, 1.0).modulus(0.1, half_width=2.0)
    assert Mixture(Product(), ExactTransport(), sources_mean, 1.0).continuous is False
    assert Mixture(Product(), ExactTransport(), sources_mean, 1.0).modulus(0.1) == math.inf


@pytest.mark.parametrize("name", ["eot", "whitened", "teacher", "switch", "monotone", "product"])
def test_a_draft_is_the_plan_up_to_its_tolerance(name):
    system, sampler = named(name)
    mu, nu = sampler.pairs(20, generator=torch.Generator().manual_seed(3))
    exact = system(mu, nu).to_dense()
    for tolerance in (1e-3, 1e-9):
        draft = system.draft(mu, nu, tolerance)
        assert float((draft.sum(-1) - mu.weights).abs().sum(-1).max()) <= 2 * tolerance
        assert float((draft.sum(-2) - nu.weights).abs().sum(-1).max()) <= 2 * tolerance
    assert float((system.draft(mu, nu, 1e-9) - exact).abs().sum((-1, -2)).max()) < 1e-6


def test_drafts_check_their_measures():
    system, sampler = named("eot")
    mu, nu = sampler.pairs(2, generator=torch.Generator().manual_seed(0))
    with pytest.raises(DTypeError, match="float64"):
        system.draft(mu.to(torch.float32), nu.to(torch.float32), 1e-7)
    solid = sf.Measure.uniform(torch.zeros(2, 3, 3, dtype=torch.float64))
    with pytest.raises(ShapeError, match="dimensions"):
        system.draft(solid, solid, 1e-7)


def test_a_second_derivative_through_whitening_is_refused():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    y = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    pi = Whitened(epsilon=1.0)(sf.Measure.uniform(x), sf.Measure.uniform(y))
    loss = (pi @ y).square().sum()
    assert torch.autograd.grad(loss, x, retain_graph=True)[0].isfinite().all()
    with pytest.raises(BackendError, match="expected first derivatives of a whitened system"):
        torch.autograd.grad(loss, x, create_graph=True)
