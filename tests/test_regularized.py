"""Training with a Tikhonov penalty: a problem in closed form, torch's weight decay, verdicts, the teacher."""

import copy
import math

import pytest
import torch
from oracles import random_measure, tensor
from torch import Tensor

from sinkformer import Measure
from sinkformer.errors import ConfigError, DTypeError, NonFiniteError, ShapeError
from sinkformer.interpolation.layers import Attention, Block, FeedForward, TokenTransformer
from sinkformer.interpolation.regularized import Run, Tikhonov, tikhonov
from sinkformer.interpolation.teachers import teacher
from sinkformer.metrics import hausdorff


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def line(eta: float, rho: float, beta: float) -> TokenTransformer:
    """x -> (rho + beta) eta x for sequences of one token on the line."""
    none = torch.zeros(0).double()
    return TokenTransformer(
        [
            Block(
                FeedForward(eta, none.reshape(1, 0), none.reshape(0, 1), none),
                Attention(rho, beta, 0.0, kind="softmax"),
            )
        ]
    )


ONE = Measure.uniform(torch.ones(1, 1, 1, dtype=torch.float64))  # one sequence, whose one token is 1


def parameters(model: TokenTransformer) -> Tensor:
    return torch.cat([t.detach().flatten() for t in model.parameters()])


def run(model=None, sources=ONE, targets=ONE, interpolant=None, **options) -> Tikhonov:
    defaults = dict(interpolant=line(1.0, 0.5, 0.5) if interpolant is None else interpolant, steps=5)
    if "weight_decays" not in options:
        defaults["epsilons"] = [0.1]
    return tikhonov(line(0.9, 0.5, 0.3) if model is None else model, sources, targets, **defaults | options)


# A closed form ----------------------------------------------------------------------------------------------------------


def test_one_token_on_the_line():
    """J = (c - 1)^2 + eps (eta^2 + rho^2 + beta^2) with c = (rho + beta) eta.

    The least norm for a given c is sqrt(2) c, so the minimiser has c = 1 - eps / sqrt(2), loss eps^2 / 2 and
    J = sqrt(2) eps - eps^2 / 2: slope two for the loss, and one for J as eps tends to zero.
    """
    epsilons = [0.2, 0.05, 0.02]
    found = run(epsilons=epsilons, steps=300, rate=0.1)
    for epsilon, one in zip(epsilons, found.runs, strict=True):
        assert one.epsilon == epsilon
        assert math.isclose(one.objective, math.sqrt(2) * epsilon - epsilon**2 / 2, rel_tol=1e-9)
        assert math.isclose(one.loss, epsilon**2 / 2, rel_tol=1e-4)
        assert math.isclose(one.squared_norm, math.sqrt(2) - epsilon, rel_tol=1e-5)
        assert not one.excluded
    assert math.isclose(found.loss_fit.slope, 2, rel_tol=1e-5)
    assert math.isclose(found.objective_fit.slope, 1, abs_tol=0.05)
    # The bound of the theory, with a theta* that is not the smallest.
    assert found.interpolant_squared_norm == 1.5
    assert all(one.loss <= one.epsilon * (1.5 - one.squared_norm) for one in found.runs)


def test_who_is_stuck_is_told():
    """Too few steps: the loss stays where it was, whatever eps."""
    found = run(line(0.1, 0.1, 0.1), epsilons=[1e-1, 1e-2, 1e-3], steps=1)
    assert [one.verdict for one in found.runs] == ["not a global minimum (by its loss)"] * 3
    assert found.loss_fit.slope < 0.01


# Adam -------------------------------------------------------------------------------------------------------------------


def test_weight_decay_is_twice_the_penalty():
    """The penalty in the loss and Adam's own weight decay make the same steps."""
    data, steps, decay = teacher(3, 5, 2, generator=generator()), 20, 0.3
    start = TokenTransformer.random(2, 1, 4, generator=generator(1))
    model = copy.deepcopy(start)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        hausdorff(model(data.sources), data.targets).square().mean().backward()
        optimizer.step()
        schedule.step()
    found = run(start, data.sources, data.targets, data.model, weight_decays=[decay], steps=steps)
    assert found.runs[0].epsilon == decay / 2
    torch.testing.assert_close(parameters(found.runs[0].model), parameters(model), rtol=1e-9, atol=1e-12)
    assert float((parameters(model) - parameters(start)).abs().max()) > 5e-3


def test_it_is_deterministic_and_changes_nothing():
    data = teacher(3, 5, 2, generator=generator())
    start = TokenTransformer.random(2, 1, 4, generator=generator(1))
    before, state = parameters(start), torch.get_rng_state()
    first, second = (run(start, data.sources, data.targets, data.model, epsilons=[0.1, 0.01]) for _ in range(2))
    assert [(one.loss, one.squared_norm) for one in first.runs] == [(one.loss, one.squared_norm) for one in second.runs]
    assert torch.equal(parameters(first.runs[1].model), parameters(second.runs[1].model))
    assert torch.equal(parameters(start), before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["softmax", "hardmax"])
def test_the_run_reports_its_model(kind):
    data = teacher(3, 6, 2, kind=kind, generator=generator())
    start = TokenTransformer.random(2, 1, 4, kind, generator=generator(1))
    (one,) = run(start, data.sources, data.targets, data.model, epsilons=[0.05], steps=30, rate=0.05).runs
    with torch.no_grad():
        loss = hausdorff(one.model(data.sources), data.targets).square().mean()
        begin = hausdorff(start(data.sources), data.targets).square().mean() + 0.05 * parameters(start).square().sum()
    assert math.isclose(one.loss, float(loss), rel_tol=1e-12)
    assert math.isclose(one.squared_norm, float(parameters(one.model).square().sum()), rel_tol=1e-12)
    assert one.objective < 0.9 * float(begin)


def test_the_best_parameters_are_kept():
    """From the minimiser a large rate leads away; J cannot grow."""
    epsilon = 0.1
    c = 1 - epsilon / math.sqrt(2)
    eta = math.sqrt(c / math.sqrt(2))
    best = line(eta, eta / math.sqrt(2), eta / math.sqrt(2))
    (one,) = run(best, epsilons=[epsilon], steps=3, rate=1.0).runs
    assert math.isclose(one.objective, math.sqrt(2) * epsilon - epsilon**2 / 2, rel_tol=1e-12)


def test_ragged_sequences():
    """Padding of sequences and of targets changes nothing."""
    theta = TokenTransformer.random(2, 1, 4, generator=generator())
    parts = [random_measure(n, generator=generator(n)) for n in (4, 2, 5)]
    images = [theta(mu).detach() for mu in parts]
    start = TokenTransformer.random(2, 1, 4, generator=generator(1))
    found = run(start, Measure.stack(parts), Measure.stack(images), theta, steps=1, rate=1e-9)
    losses = [float(hausdorff(start(mu), nu).detach()) ** 2 for mu, nu in zip(parts, images, strict=True)]
    assert math.isclose(found.runs[0].loss, sum(losses) / 3, rel_tol=1e-6)
    assert found.interpolant_loss < 1e-25


def test_float32():
    data = teacher(3, 5, 2, generator=generator())
    start = TokenTransformer.random(2, 1, 4, generator=generator(1)).float()
    found = run(
        start, data.sources.to(torch.float32), data.targets.to(torch.float32), copy.deepcopy(data.model).float()
    )
    assert parameters(found.runs[0].model).dtype == torch.float32


def test_progress(capsys):
    run(progress=True, epsilons=[0.1, 0.2], steps=4)
    assert "8/8" in capsys.readouterr().err
    run()
    assert not capsys.readouterr().err


# Results ----------------------------------------------------------------------------------------------------------------


def made(*rows: tuple[float, float, float]) -> Tikhonov:
    """Runs of (eps, loss, |theta|^2) with |theta*|^2 = 2."""
    runs = tuple(Run(epsilon, loss, norm, 2 * epsilon, line(1.0, 0.5, 0.5)) for epsilon, loss, norm in rows)
    return Tikhonov(runs, 0.0, 2.0)


def test_verdicts():
    by_loss, by_both, fine, equal = made((0.1, 0.3, 1.0), (0.1, 0.15, 1.0), (0.1, 0.01, 1.0), (0.1, 0.0, 2.0)).runs
    assert (by_loss.loss_above_threshold, by_loss.excluded) == (True, True)
    assert (by_both.loss_above_threshold, by_both.excluded) == (False, True)
    assert (fine.loss_above_threshold, fine.excluded) == (False, False)
    assert not equal.excluded
    assert by_loss.verdict == "not a global minimum (by its loss)"
    assert by_both.verdict == "not a global minimum (by J)"
    assert fine.verdict == "not excluded"


def test_slopes_of_power_laws():
    found = made(*((epsilon, 3 * epsilon**2, 5 - 3 * epsilon) for epsilon in (0.1, 0.01, 1e-5)))
    assert math.isclose(found.loss_fit.slope, 2)
    assert math.isclose(found.loss_fit.intercept, math.log(3))
    assert found.loss_fit.residual < 1e-12
    assert math.isclose(found.objective_fit.slope, 1)
    assert math.isclose(found.objective_fit.intercept, math.log(5))


def test_slope_by_least_squares():
    """Of the points (0, 0), (1, 0), (2, 3): slope 3 / 2, intercept -1 / 2, residuals 1/2, -1, 1/2."""
    fit = made((1.0, 1.0, 1.0), (math.e, 1.0, 1.0), (math.e**2, math.e**3, 1.0)).loss_fit
    assert math.isclose(fit.slope, 1.5)
    assert math.isclose(fit.intercept, -0.5)
    assert math.isclose(fit.residual, math.sqrt(0.5))


def test_no_slope_where_there_is_none():
    assert made((0.1, 0.3, 1.0)).loss_fit is None
    assert made((0.1, 0.3, 1.0), (0.1, 0.2, 1.0)).loss_fit is None
    assert made((0.1, 0.0, 1.0), (0.2, 0.3, 1.0)).loss_fit is None
    assert made((0.1, 0.0, 1.0), (0.2, 0.3, 1.0)).objective_fit is not None


def test_table():
    assert str(made((0.1, 0.3, 1.0), (0.01, 0.003, 1.0))).splitlines() == [
        "      eps       loss  |theta|^2          J  threshold  verdict",
        "1.000e-01  3.000e-01  1.000e+00  4.000e-01  2.000e-01  not a global minimum (by its loss)",
        "1.000e-02  3.000e-03  1.000e+00  1.300e-02  2.000e-02  not excluded",
        "interpolating model: loss 0.0e+00, |theta*|^2 2",
        "slope of log loss against log eps: 2.00 (residual 0.00)",
        "slope of log J against log eps: 1.49 (residual 0.00)",
    ]
    assert "slope" not in str(made((0.1, 0.3, 1.0)))


# The teacher ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["softmax", "hardmax"])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("pooled", [False, True])
def test_the_teacher_interpolates(kind, dense, pooled):
    data = teacher(4, 7, 3, pooled=pooled, kind=kind, dense=dense, generator=generator())
    assert data.sources.points.shape == (4, 7, 3)
    assert data.targets.points.shape == (4, 1 if pooled else 7, 3)
    with torch.no_grad():
        assert float(hausdorff(data.model(data.sources), data.targets).max()) < 1e-14
    spread = data.targets.points[:, 0].std(0)
    assert float(spread.min()) > 1e-3, "the targets differ"


def test_the_pooled_teacher_is_a_mean():
    data = teacher(4, 7, 3, generator=generator())
    block = data.model.blocks[0]
    with torch.no_grad():
        mean = block.feedforward(data.sources).points.mean(-2)
    torch.testing.assert_close(data.targets.points[:, 0], 0.5 * mean, rtol=1e-12, atol=1e-14)


def test_the_teacher_of_the_paper():
    data = teacher(generator=generator())
    assert (data.sources.points.shape, data.targets.points.shape) == ((10, 100, 16), (10, 1, 16))
    again, state = teacher(generator=generator()), torch.get_rng_state()
    assert torch.equal(again.targets.points, data.targets.points)
    assert torch.equal(torch.get_rng_state(), state)


# Errors -----------------------------------------------------------------------------------------------------------------

BAD = {
    "both": (dict(weight_decays=[0.1], epsilons=[0.1]), ConfigError, "either epsilons or weight_decays"),
    "neither": (dict(epsilons=None), ConfigError, "either epsilons or weight_decays"),
    "none": (dict(epsilons=[]), ConfigError, r"at least one penalty, .* received eps=\[\]"),
    "zero": (dict(epsilons=[0.1, 0.0]), ConfigError, "all positive and finite"),
    "negative": (dict(weight_decays=[-0.2]), ConfigError, r"received eps=\[-0\.1\]"),
    "NaN": (dict(epsilons=[math.nan]), ConfigError, "all positive and finite"),
    "steps": (dict(steps=0), ConfigError, "expected steps as a whole number >= 1, received 0"),
    "rate": (dict(rate=-1.0), ConfigError, "expected a learning rate, positive and finite"),
    "architecture": (
        dict(interpolant=TokenTransformer.random(1, 2, 0)), ConfigError, "interpolant of the model's architecture",
    ),
    "not interpolating": (
        dict(interpolant=line(1.0, 0.5, 0.4)), ConfigError, r"loss zero up to rounding .* received loss 1\.000e-02",
    ),
    "model": (dict(model=torch.nn.Identity()), DTypeError, "expected model as a TokenTransformer, received Identity"),
    "one pair": (dict(sources=ONE[0], targets=ONE[0]), ShapeError, r"a batch \(N,\) of sequences"),
    "nothing": (dict(sources=ONE[:0], targets=ONE[:0]), ShapeError, "N >= 1"),
    "tensors": (dict(sources=ONE.points), DTypeError, "expected a Measure, received Tensor"),
    "batches": (dict(targets=Measure.uniform(tensor([[1.0]], [[1.0]]))), ShapeError, "one batch shape"),
    "half": (dict(sources=ONE.to(torch.float16), targets=ONE.to(torch.float16)), DTypeError, "float32 or float64"),
    "dtype": (dict(sources=ONE.to(torch.float32), targets=ONE.to(torch.float32)), DTypeError, "the layer's dtype"),
    "diverging": (dict(rate=1e200), NonFiniteError, r"step 1 of the training at eps=0\.1"),
    "overflow": (dict(epsilons=[1e308], rate=1e100), NonFiniteError, r"step 1 of the training at eps=1e\+308"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        run(**options)


@pytest.mark.parametrize("options", [dict(count=0), dict(n=0), dict(dim=0), dict(width=-1), dict(kind="max")])
def test_bad_teachers(options):
    with pytest.raises(ConfigError):
        teacher(**options)


def test_it_trains_where_gradients_are_off():
    """A frozen model, or a caller under no_grad: training is the purpose."""
    expected = parameters(run().runs[0].model)
    frozen = line(0.9, 0.5, 0.3).requires_grad_(False)
    with torch.no_grad():
        found = run(frozen)
    assert torch.equal(parameters(found.runs[0].model), expected)
    assert not any(t.requires_grad for t in frozen.parameters())
