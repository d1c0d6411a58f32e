"""Losses against their definitions, finite differences and exact transport."""

import math
from typing import Any

import numpy as np
import ot
import pytest
import torch
from torch import Tensor

import sinkformer as sf
from sinkformer import losses
from sinkformer.couplings import Coupling, EntropicCoupling
from sinkformer.errors import ConfigError, ConvergenceWarning, DTypeError, NonFiniteError, ShapeError, WeightError
from sinkformer.testing import random_measure

EPSILON = 0.25


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pair(batched: bool = False) -> tuple[sf.Measure, sf.Measure]:
    g = generator(1)
    if not batched:
        return random_measure(4, 2, generator=g), random_measure(5, 2, generator=g, zeros=1)
    sizes = ((4, 5), (2, 1), (1, 3))
    pairs = [(random_measure(n, 2, generator=g), random_measure(m, 2, generator=g)) for n, m in sizes]
    return sf.Measure.stack([mu for mu, _ in pairs]), sf.Measure.stack([nu for _, nu in pairs])


def costs(mu: sf.Measure, nu: sf.Measure, seed: int = 2) -> Tensor:
    return torch.rand(*mu.batch_shape, mu.n, nu.n, generator=generator(seed), dtype=torch.float64)


def solve(mu: sf.Measure, nu: sf.Measure, cost: Tensor, **options: Any) -> EntropicCoupling:
    return Coupling.solve(mu, nu, cost=cost, **{"epsilon": EPSILON, "tolerance": 1e-12} | options)


def target(mu: sf.Measure, nu: sf.Measure, seed: int = 3) -> Tensor:
    """A coupling of the two measures, that of another cost."""
    return solve(mu, nu, costs(mu, nu, seed)).to_dense()


def divergence(t: Tensor, p: Tensor) -> Tensor:
    """Generalised KL(T | P), by definition."""
    ratio = torch.where(t > 0, t / torch.where(p > 0, p, 1.0), 1.0)
    return (t * ratio.log() - t + p).sum((-1, -2))


@pytest.fixture(params=[False, True], ids=["single", "ragged"])
def measures(request) -> tuple[sf.Measure, sf.Measure]:
    return pair(request.param)


# Fenchel-Young ------------------------------------------------------------------------------------------------------


def test_fenchel_young_is_kl(measures):
    mu, nu = measures
    pi, t = solve(mu, nu, costs(mu, nu)), target(mu, nu)
    loss = losses.fenchel_young(pi, t)
    assert loss.shape == mu.batch_shape
    torch.testing.assert_close(loss, divergence(t, pi.to_dense()), rtol=1e-9, atol=1e-11)
    assert bool((loss >= -1e-12).all())
    torch.testing.assert_close(losses.fenchel_young(pi, Coupling.from_dense(mu, nu, t)), loss)


def test_fenchel_young_vanishes_at_the_target(measures):
    mu, nu = measures
    cost = costs(mu, nu).requires_grad_()
    pi = solve(mu, nu, cost)
    loss = losses.fenchel_young(pi, pi)
    assert float(loss.detach().abs().max()) <= 1e-12
    (gradient,) = torch.autograd.grad(loss.sum(), cost)
    assert float(gradient.abs().max()) <= 1e-11


@pytest.mark.parametrize(
    "taus", [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)], ids=["sinkhorn", "softmax", "softmax of columns"]
)
def test_fenchel_young_gradient(measures, taus):
    """(T - P) / epsilon, for targets with other marginals too."""
    mu, nu = measures
    cost = costs(mu, nu).requires_grad_()
    pi = solve(mu, nu, cost, tau_a=taus[0], tau_b=taus[1])
    other = torch.rand(pi.shape, generator=generator(4), dtype=torch.float64)
    other = other * mu.weights.unsqueeze(-1) * nu.weights.unsqueeze(-2)
    for t in (target(mu, nu), other):
        (gradient,) = torch.autograd.grad(losses.fenchel_young(pi, t).sum(), cost, retain_graph=True)
        expected = (t - pi.to_dense().detach()) / pi.epsilon[..., None, None]
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-11)


def test_fenchel_young_is_kl_for_the_softmax_head():
    """There it is KL(T | P) whenever T has the source marginal, whatever its other one."""
    mu, nu = pair()
    pi = solve(mu, nu, costs(mu, nu), tau_b=0.0)
    rows = torch.rand(4, 5, generator=generator(5), dtype=torch.float64) * nu.weights
    t = mu.weights.unsqueeze(-1) * rows / rows.sum(-1, keepdim=True)
    torch.testing.assert_close(losses.fenchel_young(pi, t), divergence(t, pi.to_dense()), rtol=1e-9, atol=1e-11)


def test_fenchel_young_by_differences():
    mu, nu = pair()
    t = target(mu, nu)
    x, y = (m.points.clone().requires_grad_() for m in (mu, nu))
    epsilon = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)

    def loss(x, y, epsilon):
        pi = Coupling.solve(
            sf.Measure(x, mu.weights),
            sf.Measure(y, nu.weights),
            epsilon=epsilon,
            tolerance=1e-14,
            max_iterations=20_000,
        )
        return losses.fenchel_young(pi, t)

    assert torch.autograd.gradcheck(loss, (x, y, epsilon), atol=1e-6)


def test_fenchel_young_needs_no_solve(monkeypatch):
    """The envelope theorem: no linear system in the backward pass."""
    mu, nu = pair()
    cost = costs(mu, nu).requires_grad_()
    loss = losses.fenchel_young(solve(mu, nu, cost), target(mu, nu))

    def forbidden(*_args, **_options):
        raise AssertionError("a linear system is being solved")

    monkeypatch.setattr("sinkformer.ops.adjoint_solve", forbidden)
    (gradient,) = torch.autograd.grad(loss, cost)
    assert bool((gradient != 0).any())


def test_fenchel_young_is_convex_in_the_cost():
    mu, nu = pair()
    t = target(mu, nu)
    first, last = costs(mu, nu, 6), 4 * costs(mu, nu, 7)
    steps = torch.linspace(0, 1, 11, dtype=torch.float64)
    values = torch.stack([losses.fenchel_young(solve(mu, nu, torch.lerp(first, last, s)), t) for s in steps])
    chord = torch.lerp(values[0], values[-1], steps)
    assert bool((values <= chord + 1e-12).all())
    second = values[2:] - 2 * values[1:-1] + values[:-2]
    assert bool((second >= -1e-12).all())
    assert float(second.max()) > 1e-4


def test_fenchel_young_does_not_see_the_gauge():
    """c + u(x) + v(y) gives the same loss for a target with the marginals of the measures."""
    mu, nu = pair()
    t, cost = target(mu, nu), costs(mu, nu)
    moved = cost + torch.arange(4).double().unsqueeze(-1) - 3 * torch.arange(5).double()
    one, other = (losses.fenchel_young(solve(mu, nu, c), t) for c in (cost, moved))
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_fenchel_young_with_forbidden_pairs():
    mu, nu = pair()
    mask = torch.zeros(4, 5, dtype=torch.float64)
    mask[0, 3] = math.inf
    cost = costs(mu, nu).requires_grad_()
    pi = solve(mu, nu, cost, mask=mask)
    allowed = solve(mu, nu, costs(mu, nu, 3), mask=mask).to_dense()
    loss = losses.fenchel_young(pi, allowed)
    torch.testing.assert_close(loss, divergence(allowed, pi.to_dense()), rtol=1e-9, atol=1e-11)
    (gradient,) = torch.autograd.grad(loss, cost)
    assert bool(torch.isfinite(gradient).all())
    assert float(gradient[0, 3]) == 0
    # A target that uses the pair is infinitely far.
    assert float(losses.fenchel_young(pi, target(mu, nu)).detach()) == math.inf


def test_no_gradient_into_the_target():
    mu, nu = pair()
    t = target(mu, nu).requires_grad_()
    pi = solve(mu, nu, costs(mu, nu).requires_grad_())
    for loss in (losses.fenchel_young, losses.kl, losses.total_variation):
        assert torch.autograd.grad(loss(pi, t), t, allow_unused=True) == (None,)


# KL and TV ----------------------------------------------------------------------------------------------------------


def test_kl_by_definition(measures):
    mu, nu = measures
    t = target(mu, nu)
    pi = solve(mu, nu, costs(mu, nu))
    penalised = solve(mu, nu, costs(mu, nu), tau_a=0.7, tau_b=0.8)
    for p in (pi, penalised, Coupling.from_dense(mu, nu, pi.to_dense()), pi.rounded()):
        torch.testing.assert_close(losses.kl(p, t), divergence(t, p.to_dense()), rtol=1e-9, atol=1e-11)
        assert float(losses.kl(p, p).abs().max()) <= 1e-12
    half = 0.5 * t
    torch.testing.assert_close(losses.kl(pi, half), divergence(half, pi.to_dense()), rtol=1e-9, atol=1e-11)


def test_kl_by_differences(measures):
    mu, nu = measures
    t = target(mu, nu)
    for taus in ((1.0, 1.0), (0.7, 0.8)):

        def loss(cost, taus=taus):
            return losses.kl(solve(mu, nu, cost, tau_a=taus[0], tau_b=taus[1]), t)

        assert torch.autograd.gradcheck(loss, (costs(mu, nu).requires_grad_(),), atol=1e-6, fast_mode=True)


def test_kl_and_fenchel_young_have_one_gradient():
    """Implicit differentiation of the plan and the envelope theorem are two ways to the same number."""
    mu, nu = pair()
    cost, t = costs(mu, nu).requires_grad_(), target(mu, nu)
    one, other = (torch.autograd.grad(f(solve(mu, nu, cost), t), cost)[0] for f in (losses.kl, losses.fenchel_young))
    torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_kl_is_infinite_off_the_support():
    mu, nu = pair()
    mask = torch.zeros(4, 5, dtype=torch.float64)
    mask[0, 3] = math.inf
    pi, t = solve(mu, nu, costs(mu, nu), mask=mask), target(mu, nu)
    assert float(losses.kl(pi, t)) == math.inf
    assert float(losses.kl(Coupling.from_dense(mu, nu, pi.to_dense()), t)) == math.inf
    # The other way round the missing pair costs nothing extra.
    assert math.isfinite(float(losses.kl(Coupling.from_dense(mu, nu, t), pi)))


def test_kl_sees_entries_below_the_smallest_float():
    """exp(-4000) is zero in every format; its logarithm is not."""
    mu = sf.Measure.uniform(torch.zeros(2, 1, dtype=torch.float64))
    cost = torch.tensor([[0.0, 1000.0], [1000.0, 0.0]], dtype=torch.float64)
    pi = solve(mu, mu, cost)
    assert pi.to_dense()[0, 1].item() == 0
    t = torch.full((2, 2), 0.25, dtype=torch.float64)
    loss = losses.kl(pi, t)
    assert float(loss) == pytest.approx(1000 / (2 * EPSILON) + math.log(0.25 / 0.5), rel=1e-6)


def test_total_variation(measures):
    mu, nu = measures
    pi, t = solve(mu, nu, costs(mu, nu)), target(mu, nu)
    expected = np.abs(pi.to_dense().numpy() - t.numpy()).sum((-1, -2)) / 2
    for p in (pi, pi.rounded(), Coupling.from_dense(mu, nu, pi.to_dense())):
        np.testing.assert_allclose(losses.total_variation(p, t).numpy(), expected, rtol=1e-9, atol=1e-12)
    assert float(losses.total_variation(pi, pi).max()) == 0


def test_total_variation_of_what_does_not_meet():
    mu = sf.Measure.uniform(torch.zeros(2, 1, dtype=torch.float64))
    straight = torch.eye(2, dtype=torch.float64) / 2
    loss = losses.total_variation(Coupling.from_dense(mu, mu, straight), straight.flip(0))
    assert float(loss) == 1.0


def test_total_variation_gradient():
    mu, nu = pair()
    t = target(mu, nu)
    assert torch.autograd.gradcheck(
        lambda cost: losses.total_variation(solve(mu, nu, cost), t), (costs(mu, nu).requires_grad_(),), atol=1e-6
    )
    # At the target it is not differentiable; the subgradient is zero.
    cost = costs(mu, nu).requires_grad_()
    pi = solve(mu, nu, cost)
    (gradient,) = torch.autograd.grad(losses.total_variation(pi, pi), cost)
    assert bool((gradient == 0).all())


def test_losses_of_float32():
    mu, nu = (m.to(torch.float32) for m in pair())
    pi = Coupling.solve(mu, nu, cost=costs(mu, nu).float(), epsilon=EPSILON)
    t = target(*pair()).float()
    exact = solve(*pair(), costs(mu, nu))
    for loss in (losses.fenchel_young, losses.kl, losses.total_variation):
        value = loss(pi, t)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), loss(exact, t.double()), rtol=1e-3, atol=1e-4)


# Entropic W1 --------------------------------------------------------------------------------------------------------


def exact_w1(mu: sf.Measure, nu: sf.Measure, p: Tensor, t: Tensor) -> float:
    """W1 on the product grid for |x - x'| + |y - y'|, by POT's network simplex."""
    x, y = mu.points.numpy(), nu.points.numpy()
    d_x, d_y = ot.dist(x, x, "euclidean"), ot.dist(y, y, "euclidean")
    ground = (d_x[:, None, :, None] + d_y[None, :, None, :]).reshape(mu.n * nu.n, mu.n * nu.n)
    p, t = p / p.sum(), t / t.sum()
    return float(ot.emd2(p.flatten().numpy(), t.flatten().numpy(), np.ascontiguousarray(ground)))


def small_pair() -> tuple[sf.Measure, sf.Measure]:
    """On a unit square, so that a hundred sweeps are enough at eta = 0.5."""
    g = generator(11)
    points = [torch.rand(n, 2, generator=g, dtype=torch.float64) for n in (3, 4)]
    mu, nu = (sf.Measure.normalized(x, 0.5 + x[:, 0]) for x in points)
    return mu, nu


@pytest.mark.parametrize("debiased", [True, False])
def test_entropic_w1_tends_to_w1(debiased):
    mu, nu = small_pair()
    pi, t = solve(mu, nu, costs(mu, nu), epsilon=0.1), target(mu, nu)
    exact = exact_w1(mu, nu, pi.to_dense(), t)
    options: dict[str, Any] = dict(debiased=debiased, tolerance=1e-4, max_iterations=5000)
    errors = [abs(float(losses.entropic_w1(pi, t, eta=eta, **options)) - exact) for eta in (0.5, 0.1, 0.01)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < (0.05 if debiased else 0.2) * exact


def test_entropic_w1_of_a_batch():
    mu, nu = pair(True)
    pi, t = solve(mu, nu, costs(mu, nu)), target(mu, nu)
    options: dict[str, Any] = dict(eta=2.0, tolerance=1e-10)
    together = losses.entropic_w1(pi, t, **options)
    assert together.shape == (3,)
    for k in range(3):
        alone = losses.entropic_w1(pi[k], t[k], **options)
        torch.testing.assert_close(together[k], alone, rtol=1e-8, atol=1e-9)
        n, m = int((mu.weights[k] > 0).sum()), int((nu.weights[k] > 0).sum())
        cut = mu.unstack()[k], nu.unstack()[k]
        unpadded = losses.entropic_w1(Coupling.from_dense(*cut, pi[k].to_dense()[:n, :m]), t[k][:n, :m], **options)
        torch.testing.assert_close(together[k], unpadded, rtol=1e-8, atol=1e-9)


def test_entropic_w1_between_diracs():
    """Two couplings that put all mass on one pair each: the distance of the pairs, whatever eta."""
    mu = sf.Measure.uniform(torch.tensor([[0.0], [3.0]], dtype=torch.float64))
    nu = sf.Measure.uniform(torch.tensor([[0.0, 0.0], [0.0, 4.0]], dtype=torch.float64))
    one, other = torch.zeros(2, 2, 2, dtype=torch.float64)
    one[0, 0] = other[1, 1] = 1.0
    loss = losses.entropic_w1(Coupling.from_dense(mu, nu, one), other, eta=0.7, tolerance=1e-12)
    assert float(loss) == pytest.approx(7.0, abs=1e-9)


def test_entropic_w1_vanishes_at_the_target(measures):
    mu, nu = measures
    cost = costs(mu, nu).requires_grad_()
    pi = solve(mu, nu, cost)
    loss = losses.entropic_w1(pi, pi, eta=2.0, tolerance=1e-9)
    assert float(loss.detach().abs().max()) <= 1e-8
    (gradient,) = torch.autograd.grad(loss.sum(), cost)
    assert float(gradient.abs().max()) <= 1e-7
    biased = losses.entropic_w1(pi, pi, eta=2.0, debiased=False)
    assert float(biased.detach().max()) > 1e-2


@pytest.mark.parametrize("debiased", [True, False])
@pytest.mark.parametrize("eta", [0.2, 1.0])
def test_entropic_w1_by_differences(debiased, eta):
    """Along a random direction of the cost of ``pi``, and along one of a given plan."""
    mu, nu = small_pair()
    t = target(mu, nu)
    options: dict[str, Any] = dict(eta=eta, debiased=debiased, tolerance=1e-9, max_iterations=10_000)

    def of_cost(cost):
        return losses.entropic_w1(solve(mu, nu, cost), t, **options)

    def of_plan(plan):
        return losses.entropic_w1(Coupling.from_dense(mu, nu, plan), t, **options)

    for function, at in ((of_cost, costs(mu, nu)), (of_plan, target(mu, nu, 9))):
        at = at.requires_grad_()
        (gradient,) = torch.autograd.grad(function(at), at)
        direction = torch.randn(at.shape, generator=generator(8), dtype=torch.float64) * at.detach()
        step = 1e-4
        with torch.no_grad():
            slope = (function(at + step * direction) - function(at - step * direction)) / (2 * step)
        assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=1e-4, abs=1e-7)


def test_entropic_w1_of_float32():
    mu, nu = (m.to(torch.float32) for m in pair())
    pi = Coupling.solve(mu, nu, cost=costs(mu, nu).float(), epsilon=EPSILON)
    assert losses.entropic_w1(pi, target(*pair()).float(), eta=2.0).dtype == torch.float32


def test_entropic_w1_says_when_it_stops_early():
    mu, nu = pair()
    pi, t = solve(mu, nu, costs(mu, nu)), target(mu, nu)
    message = (
        r"entropic_w1 stopped at a marginal error of .* > 1\.0e-09 after 2 iterations; raise eta or max_iterations"
    )
    with pytest.warns(ConvergenceWarning, match=message):
        losses.entropic_w1(pi, t, eta=0.05, max_iterations=2, tolerance=1e-9, debiased=False)


# Refusals -----------------------------------------------------------------------------------------------------------


def test_wrong_eta_and_ground():
    mu, nu = pair()
    pi, t = solve(mu, nu, costs(mu, nu)), target(mu, nu)
    for eta in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match=f"expected eta positive and finite, received {eta}"):
            losses.entropic_w1(pi, t, eta=eta)
    with pytest.raises(ConfigError, match=r"expected two metrics as ground costs, received .*; use Euclidean\(\)"):
        losses.entropic_w1(pi, t, eta=0.1, ground=(sf.Euclidean(), sf.SqEuclidean()))


def test_fenchel_young_needs_hard_or_free_marginals():
    mu, nu = pair()
    pi = solve(mu, nu, costs(mu, nu), tau_b=0.5)
    with pytest.raises(ConfigError, match=r"expected taus 0 or 1, received \(1\.0, 0\.5\); use losses\.kl"):
        losses.fenchel_young(pi, target(mu, nu))


def test_fenchel_young_needs_potentials():
    mu, nu = pair()
    pi = solve(mu, nu, costs(mu, nu))
    for other in (pi.rounded(), Coupling.from_dense(mu, nu, target(mu, nu))):
        message = f"expected a coupling made by a solver, received {type(other).__name__}; use losses.kl"
        with pytest.raises(DTypeError, match=message):
            losses.fenchel_young(other, pi)


@pytest.mark.parametrize(
    "loss",
    [losses.fenchel_young, losses.kl, losses.total_variation, lambda pi, t: losses.entropic_w1(pi, t, eta=1.0)],
    ids=["fenchel_young", "kl", "total_variation", "entropic_w1"],
)
def test_wrong_targets(loss):
    mu, nu = pair()
    pi, t = solve(mu, nu, costs(mu, nu)), target(mu, nu)
    with pytest.raises(ShapeError, match=r"expected a plan of shape \(4, 5\), received \(5, 4\)"):
        loss(pi, t.T)
    with pytest.raises(ShapeError, match=r"expected a target of shape \(4, 5\), received \(5, 4\)"):
        loss(pi, pi.mT)
    with pytest.raises(DTypeError, match=r"dtype of the measures, torch\.float64, received torch\.float32"):
        loss(pi, t.float())
    with pytest.raises(DTypeError, match="expected a coupling or a matrix as target, received ndarray"):
        loss(pi, t.numpy())
    with pytest.raises(WeightError, match="expected non-negative masses"):
        loss(pi, t - 1)
    with pytest.raises(NonFiniteError, match="expected a finite plan, received a NaN or an infinity"):
        loss(pi, t * math.nan)
    lost = solve(mu, nu, costs(mu, nu) * math.nan, on_failure="ignore")
    with pytest.raises(NonFiniteError, match="expected a finite target plan; look at the status of the solution"):
        loss(pi, lost)
