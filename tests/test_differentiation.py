import warnings

import pytest
import torch
from oracles import plan, random_measure, random_weights, tensor
from torch.autograd import grad, gradcheck, gradgradcheck

from sinkformer import Coupling, Measure, ops, sinkhorn
from sinkformer.costs import Euclidean, NegativeDot, SqEuclidean
from sinkformer.errors import GradientWarning

INF = float("inf")
SHARP = {"tolerance": 1e-14, "max_iterations": 150, "on_failure": "ignore"}
# The derivative of a fixed number of iterations is exact for any number of them.
UNROLLED = {"gradient": "unrolled", "tolerance": 0.0, "max_iterations": 6, "on_failure": "ignore"}
TAUS = [(1.0, 1.0), (0.8, 0.6), (1.0, 0.0)]


def case(output: str, taus=(1.0, 1.0), masked=False, zeros=False, **options):
    """A function of (cost, logits of a, logits of b, epsilon) for gradcheck, and its arguments: a ragged batch of two.

    Weights come from a softmax, so that they stay on the simplex: the derivative in the weights is only defined there.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    cost, left, right = random(2, 3, 4), random(2, 3), random(2, 4)
    epsilon = tensor(0.9, 1.4).requires_grad_()
    live_a, live_b = torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 4, dtype=torch.bool)
    if zeros:
        live_a[0, 1] = live_b[1, 2] = live_b[1, 3] = False
    mask = torch.zeros(3, 4, dtype=torch.float64)
    if masked:
        mask[0, 1] = mask[2, 2] = INF
    upstream = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)

    def function(cost, left, right, epsilon):
        a = torch.softmax((0.3 * left).masked_fill(~live_a, -INF), -1)
        b = torch.softmax((0.3 * right).masked_fill(~live_b, -INF), -1)
        solution = sinkhorn(a, b, cost=cost, epsilon=epsilon, mask=mask, tau_a=taus[0], tau_b=taus[1], **options)
        if output == "value":
            return solution.value
        if output == "potentials":
            return solution.f, solution.g
        p = a[..., :, None] * b[..., None, :] * ops.density(cost + mask, solution.f, solution.g, a, b, epsilon)
        return (p * upstream).sum((-1, -2)), p.square().sum((-1, -2))

    return function, (cost, left, right, epsilon)


outputs = pytest.mark.parametrize("output", ["value", "plan", "potentials"])
INPUTS = [(False, False), (True, False), (False, True), (True, True)]
each_input = pytest.mark.parametrize(("masked", "zeros"), INPUTS)
each_path = pytest.mark.parametrize(
    ("taus", "options"),
    [(taus, SHARP) for taus in TAUS] + [(taus, UNROLLED) for taus in TAUS],
    ids=lambda x: {id(SHARP): "implicit", id(UNROLLED): "unrolled"}.get(id(x), str(x)),
)


@outputs
@each_path
@each_input
def test_gradcheck(output, taus, masked, zeros, options):
    function, arguments = case(output, taus, masked, zeros, **options)
    assert gradcheck(function, arguments, atol=1e-7, rtol=1e-5, fast_mode=True)


@outputs
@each_path
@pytest.mark.parametrize(("masked", "zeros"), [(False, False), (True, True)])
def test_gradgradcheck(output, taus, masked, zeros, options):
    function, arguments = case(output, taus, masked, zeros, **options)
    assert gradgradcheck(function, arguments, atol=1e-6, rtol=1e-4, fast_mode=True)


@outputs
@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_gradients_of_a_few_unrolled_sweeps(output, check):
    for masked, zeros in INPUTS:
        function, arguments = case(output, (1.0, 1.0), masked, zeros, **UNROLLED)
        assert check(function, arguments, atol=1e-7, rtol=1e-5, fast_mode=True)


@outputs
@pytest.mark.slow
def test_gradcheck_entry_by_entry(output):
    function, arguments = case(output, (1.0, 1.0), True, True, **SHARP)
    assert gradcheck(function, arguments, atol=1e-7, rtol=1e-5)
    assert gradgradcheck(function, arguments, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("cost", [NegativeDot(), SqEuclidean(), Euclidean()], ids=repr)
def test_gradcheck_through_points_and_coupling(cost, generator):
    x = torch.rand(3, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    y = torch.rand(4, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    target = torch.rand(4, 2, generator=generator, dtype=torch.float64)

    def function(x, y):
        pi = Coupling.solve(Measure.uniform(x), Measure.uniform(y), cost=cost, epsilon=0.5, **SHARP)
        return pi.to_dense().square().sum(), pi @ target, pi.value, pi.barycentric_projection(target)

    assert gradcheck(function, (x, y), fast_mode=True)
    assert gradgradcheck(function, (x, y), atol=1e-6, rtol=1e-4, fast_mode=True)


def test_implicit_is_unrolled_for_ever(generator):
    a, b = random_weights(4, generator=generator), random_weights(5, generator=generator)
    cost = torch.rand(4, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    epsilon = tensor(0.2)[0].requires_grad_()
    upstream = torch.randn(4, 5, generator=generator, dtype=torch.float64)

    def gradients(**options):
        solution = sinkhorn(a, b, cost=cost, epsilon=epsilon, on_failure="ignore", **options)
        return grad((plan(solution, cost, a, b, epsilon) * upstream).sum(), (cost, epsilon))

    implicit = gradients(tolerance=1e-14)
    unrolled = gradients(gradient="unrolled", tolerance=0.0, max_iterations=400)
    few = gradients(gradient="unrolled", tolerance=0.0, max_iterations=3)
    for one, other in zip(implicit, unrolled, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-11)
    assert not torch.allclose(few[0], implicit[0], atol=1e-4)


def solved(generator, taus=(1.0, 1.0), upstream=None, **options):
    """Random problem, differentiable, and its plan."""
    a, b = random_weights(4, generator=generator), random_weights(5, generator=generator)
    cost = torch.rand(4, 5, generator=generator, dtype=torch.float64)
    epsilon = torch.tensor(0.3, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (cost, a, b, epsilon)]
    options = {"tolerance": 1e-14, "max_iterations": 500, "on_failure": "ignore", **options}
    solution = sinkhorn(a, b, cost=cost, epsilon=epsilon, tau_a=taus[0], tau_b=taus[1], **options)
    return leaves, solution, plan(solution, cost, a, b, epsilon)


def test_the_gradient_of_the_value_is_the_plan_the_potentials_and_the_entropy(generator):
    leaves, solution, p = solved(generator)
    cost, a, b, epsilon = leaves
    of_cost, of_a, of_b, of_epsilon = grad(solution.value, leaves)
    assert torch.allclose(of_cost, p, atol=1e-13)
    # Defined up to constants: a and b only move with equal total mass.
    assert torch.allclose(of_a - of_a[0], solution.f - solution.f[0], atol=1e-12)
    assert torch.allclose(of_b - of_b[0], solution.g - solution.g[0], atol=1e-12)
    divergence = (p * (p / torch.outer(a, b)).log()).sum()
    assert torch.allclose(of_epsilon, divergence, atol=1e-12)
    assert torch.allclose((solution.value - (p * cost).sum()) / epsilon, divergence, atol=1e-12)


@pytest.mark.parametrize("taus", [*TAUS, (0.5, 0.5)])
def test_identities_of_the_gradient_of_a_plan(taus, generator):
    (cost, *_, epsilon), _, p = solved(generator, taus)
    loss = (p * torch.randn(4, 5, generator=generator, dtype=torch.float64)).sum()
    of_cost, of_epsilon = grad(loss, (cost, epsilon))
    # The plan depends on C / epsilon alone (at fixed tau).
    assert torch.allclose(epsilon * of_epsilon, -(cost * of_cost).sum(), atol=1e-12)
    if taus[0] == 1:
        assert torch.allclose((epsilon * of_cost).sum(1), torch.zeros(4, dtype=torch.float64), atol=1e-12)
    if taus[1] == 1:
        assert torch.allclose((epsilon * of_cost).sum(0), torch.zeros(5, dtype=torch.float64), atol=1e-12)


def test_the_marginals_of_a_plan_have_no_gradient_in_the_cost(generator):
    (cost, *_, epsilon), _, p = solved(generator)
    u = torch.randn(4, generator=generator, dtype=torch.float64)
    of_cost, of_epsilon = grad((p.sum(1) * u).sum(), (cost, epsilon))
    assert of_cost.abs().max() < 1e-12
    assert of_epsilon.abs() < 1e-12


@pytest.mark.parametrize(
    ("n", "gradient"),
    [
        (1, "implicit"),
        (4, "implicit"),
        (1, "unrolled"),
        (4, "unrolled"),
    ],
)
def test_one_atom_on_a_side_gives_a_gradient_of_exactly_zero(n, gradient, generator):
    b = random_weights(n, generator=generator)
    cost = torch.randn(1, n, generator=generator, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(1, n, generator=generator, dtype=torch.float64)
    for c, p, q, w in ((cost, tensor(1.0), b, upstream), (cost.mT, b, tensor(1.0), upstream.mT)):
        solution = sinkhorn(p, q, cost=c, epsilon=0.1, gradient=gradient)
        (found,) = grad((plan(solution, c, p, q, 0.1) * w).sum(), cost)
        assert found.abs().max() < 1e-14
    value = sinkhorn(tensor(1.0), b, cost=cost, epsilon=0.1, gradient=gradient).value
    assert torch.allclose(grad(value, cost)[0], b.unsqueeze(0))


@pytest.mark.parametrize(
    ("output", "gradient"),
    [
        ("value", "implicit"),
        ("value", "unrolled"),
        ("plan", "implicit"),
    ],
)
@pytest.mark.parametrize("taus", [(1.0, 1.0), (0.8, 0.6)])
def test_the_gradient_at_a_weight_of_zero_is_the_one_sided_derivative(output, taus, gradient, generator):
    b = random_weights(4, generator=generator)
    cost = torch.rand(3, 4, generator=generator, dtype=torch.float64)
    upstream = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    # A softmax cannot reach zero; move mass from the second atom to the first instead.
    direction = tensor(1.0, -1.0, 0.0)

    def loss(a):
        options = {"tolerance": 1e-14, "max_iterations": 300, "on_failure": "ignore", "annealing": None}
        solution = sinkhorn(a, b, cost=cost, epsilon=0.4, tau_a=taus[0], tau_b=taus[1], gradient=gradient, **options)
        return solution.value if output == "value" else (plan(solution, cost, a, b, 0.4) * upstream).sum()

    a = tensor(0.0, 0.6, 0.4).requires_grad_()
    (found,) = grad(loss(a), a)
    assert torch.isfinite(found).all()
    with torch.no_grad():
        h = 1e-4  # one-sided differences of second order
        here, near, far = (loss(a + k * h * direction) for k in (0, 1, 2))
        expected = (4 * near - far - 3 * here) / (2 * h)
    assert float(found @ direction) == pytest.approx(float(expected), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("gradient", ["implicit", "unrolled"])
def test_padding_and_forbidden_pairs_receive_no_gradient(gradient, generator):
    mu = Measure(torch.rand(4, 2, generator=generator, dtype=torch.float64), tensor(0.3, 0.0, 0.3, 0.4))
    nu = random_measure(3, generator=generator)
    points = mu.points.clone().requires_grad_()
    cost = SqEuclidean()(points, nu.points)
    cost = cost.masked_fill(torch.eye(4, 3, dtype=torch.bool), INF)
    cost.retain_grad()
    solution = sinkhorn(mu.weights, nu.weights, cost=cost, epsilon=0.5, gradient=gradient)
    p = (
        mu.weights[:, None]
        * nu.weights
        * ops.density(cost, *solution.potentials, mu.weights, nu.weights, tensor(0.5)[0])
    )
    (p.square().sum() + solution.value).backward()
    assert torch.isfinite(points.grad).all()
    assert (points.grad[1] == 0).all()
    assert (cost.grad[:3, :3].diagonal() == 0).all()
    assert (cost.grad[1] == 0).all()
    assert points.grad[0].abs().max() > 0


@pytest.mark.parametrize("output", ["value", "plan"])
def test_batch_equals_loop(output, generator):
    sizes = [(3, 5), (1, 4), (6, 2)]
    parts = [(random_measure(n, generator=generator), random_measure(m, generator=generator)) for n, m in sizes]

    def gradient(mu, nu):
        x = mu.points.requires_grad_()
        pi = Coupling.solve(mu, nu, epsilon=0.2, **{**SHARP, "max_iterations": 2000})
        return grad((pi.value if output == "value" else pi.to_dense().square()).sum(), x)[0]

    together = gradient(*Measure.collate(parts))
    for k, (mu, nu) in enumerate(parts):
        assert torch.allclose(together[k, : mu.n], gradient(mu, nu), rtol=0, atol=1e-11)
        assert (together[k, mu.n :] == 0).all()


def test_split_atoms_share_the_gradient(generator):
    mu, nu = random_measure(3, generator=generator), random_measure(4, generator=generator)
    upstream = torch.rand(4, 2, generator=generator, dtype=torch.float64)

    def gradient(mu):
        points = mu.points.detach().requires_grad_()
        pi = Coupling.solve(Measure(points, mu.weights), nu, epsilon=0.3, **SHARP)
        return grad((pi @ upstream).square().sum(-1).div(mu.weights).sum(), points)[0]

    whole, split = gradient(mu), gradient(mu.split(1, 0.25))
    assert torch.allclose(split[[0, 2]], whole[[0, 2]], atol=1e-12)
    assert torch.allclose(split[1], 0.25 * whole[1], atol=1e-12)
    assert torch.allclose(split[3], 0.75 * whole[1], atol=1e-12)


def test_symmetric_problems_have_the_gradient_of_their_neighbours(generator):
    # The averaged iteration of a symmetric problem must not restrict the derivative to symmetric perturbations.
    a = random_weights(3, generator=generator)
    base = torch.rand(3, 3, generator=generator, dtype=torch.float64)
    base = base + base.mT
    upstream = torch.randn(3, 3, generator=generator, dtype=torch.float64)

    def loss(cost, **options):
        solution = sinkhorn(a, a, cost=cost, epsilon=0.7, on_failure="ignore", **options)
        return (plan(solution, cost, a, a, 0.7) * upstream).sum()

    cost = base.clone().requires_grad_()
    (found,) = grad(loss(cost, tolerance=1e-14, max_iterations=300), cost)
    direction = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        ahead, behind = (loss(base + s * 1e-5 * direction, tolerance=1e-14, max_iterations=300) for s in (1, -1))
    assert float((found * direction).sum()) == pytest.approx(float(ahead - behind) / 2e-5, rel=1e-6)


def test_a_third_derivative_is_refused_or_right(generator):
    a, b = random_weights(3, generator=generator), random_weights(4, generator=generator)
    start = torch.rand(3, 4, generator=generator, dtype=torch.float64)
    direction = torch.randn(3, 4, generator=generator, dtype=torch.float64)

    def second(cost):
        p = Coupling.solve(a, b, cost=cost, epsilon=0.4, **{**SHARP, "max_iterations": 300}).to_dense()
        (first,) = grad(p.square().sum(), cost, create_graph=True)
        return (grad(first.square().sum(), cost, create_graph=True)[0] * direction).sum()

    cost = start.clone().requires_grad_()
    try:
        (third,) = grad(second(cost), cost)
    except RuntimeError:
        return
    ahead, behind = (second((start + s * 1e-5 * direction).requires_grad_()) for s in (1, -1))
    assert float((third * direction).sum()) == pytest.approx(float((ahead - behind).detach()) / 2e-5, rel=1e-4)


def test_the_second_derivative_of_the_value_is_the_first_of_the_plan(generator):
    leaves, solution, p = solved(generator)
    upstream = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    (of_cost,) = grad(solution.value, leaves[0], create_graph=True)
    twice = grad((of_cost * upstream).sum(), leaves, retain_graph=True)
    once = grad((p * upstream).sum(), leaves)
    assert torch.allclose(twice[0], once[0], atol=1e-12)
    assert torch.allclose(twice[3], once[3], atol=1e-12)


def test_no_graph_where_none_is_asked_for(generator):
    mu, nu = random_measure(3, generator=generator), random_measure(4, generator=generator)
    assert not sinkhorn(mu, nu, epsilon=0.3).value.requires_grad
    with torch.no_grad():
        x = mu.points.clone().requires_grad_()
        for gradient in ("implicit", "unrolled"):
            assert not sinkhorn(Measure.uniform(x), nu, epsilon=0.3, gradient=gradient).value.requires_grad


def test_the_memory_of_the_implicit_gradient_does_not_grow_with_the_iterations(generator):
    a, b = random_weights(4, generator=generator), random_weights(5, generator=generator)
    cost = torch.rand(4, 5, generator=generator, dtype=torch.float64, requires_grad=True)

    def nodes(iterations, gradient):
        solution = sinkhorn(
            a,
            b,
            cost=cost,
            epsilon=0.1,
            tolerance=0.0,
            max_iterations=iterations,
            gradient=gradient,
            on_failure="ignore",
        )
        found, queue = set(), [solution.f.grad_fn]
        while queue:
            node = queue.pop()
            if node is not None and node not in found:
                found.add(node)
                queue.extend(parent for parent, _ in node.next_functions)
        return len(found)

    assert nodes(5, "implicit") == nodes(50, "implicit")
    assert nodes(5, "unrolled") < nodes(50, "unrolled")


def test_the_dtype_of_a_gradient_is_that_of_its_input(generator):
    x = torch.rand(3, 2, generator=generator, requires_grad=True)
    y = torch.rand(4, 2, generator=generator)
    pi = Coupling.solve(Measure.uniform(x), Measure.uniform(y), epsilon=0.3)
    found = grad(pi.to_dense().square().sum(), x)[0]
    assert found.dtype == torch.float32
    exact = x.detach().double().requires_grad_()
    pi = Coupling.solve(Measure.uniform(exact), Measure.uniform(y.double()), epsilon=0.3)
    assert torch.allclose(found.double(), grad(pi.to_dense().square().sum(), exact)[0], atol=1e-4)


def test_an_ill_conditioned_derivative_warns(generator):
    # Two blocks that barely communicate: the derivative system is as good as singular in a second direction.
    cost = tensor([0.0, 0.1, 40.0, 41.0], [0.2, 0.0, 40.0, 40.0], [40.0, 40.0, 0.0, 0.3], [41.0, 40.0, 0.1, 0.0])
    cost.requires_grad_()
    a = torch.full((4,), 0.25, dtype=torch.float64)
    solution = sinkhorn(a, a, cost=cost, epsilon=1.0, on_failure="ignore")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (found,) = grad(solution.f[0] - solution.f[2], cost)
    assert torch.isfinite(found).all()
    exact = found.sum(1)
    accurate = torch.allclose(exact, exact.round(), atol=1e-4)
    assert accurate or any(issubclass(w.category, GradientWarning) for w in caught)


@pytest.mark.parametrize("epsilon", [1e-2, 1e-3])
def test_gradients_of_nearly_deterministic_plans_are_finite_and_small(epsilon, generator):
    mu, nu = random_measure(5, generator=generator), random_measure(5, generator=generator)
    x = mu.points.requires_grad_()
    pi = Coupling.solve(mu, nu, epsilon=epsilon, on_failure="ignore")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradientWarning)
        (found,) = grad((pi @ nu.points).square().sum(), x)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("gradient", ["implicit", "unrolled"])
def test_an_empty_batch_has_an_empty_gradient(gradient):
    x = torch.zeros(0, 3, 2, dtype=torch.float64, requires_grad=True)
    mu = Measure(x, torch.zeros(0, 3, dtype=torch.float64))
    solution = sinkhorn(mu, mu, epsilon=0.1, gradient=gradient)
    assert grad(solution.value.sum() + solution.f.sum(), x)[0].shape == (0, 3, 2)


def test_a_lost_problem_does_not_spoil_the_gradient_of_its_neighbours(generator):
    cost = torch.rand(2, 3, 3, generator=generator, dtype=torch.float64)
    cost[1, 0, 0] = float("nan")
    cost.requires_grad_()
    a = torch.full((2, 3), 1 / 3, dtype=torch.float64)
    solution = sinkhorn(a, a, cost=cost, epsilon=0.5, on_failure="ignore")
    (found,) = grad(solution.value[0] + solution.f[0, 0], cost)
    assert torch.isfinite(found[0]).all()
    assert found[0].abs().sum() > 0
