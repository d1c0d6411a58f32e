"""The law checks must catch every kind of function that is none of a measure."""

import pytest
import torch
from torch import Tensor

import sinkformer as sf
from sinkformer import testing
from sinkformer.couplings import Coupling
from sinkformer.measures import Measure

DIM = 2


def probed(mu: Measure, at: Tensor | None) -> Tensor:
    return mu.points if at is None else at


def mean(mu: Measure) -> Tensor:
    return (mu.weights.unsqueeze(-1) * mu.points).sum(-2, keepdim=True)


def lawful(mu: Measure, at: Tensor | None = None) -> Tensor:
    return torch.sin(probed(mu, at)) + mean(mu)


def sum_pooling(mu, at=None):
    return probed(mu, at) + mu.points.tanh().sum(-2, keepdim=True)


def root_of_the_count(mu, at=None):
    return probed(mu, at) + mean(mu) / mu.n**0.5


def root_of_the_live_count(mu, at=None):
    return probed(mu, at) + mean(mu) / (mu.weights > 0).sum() ** 0.5


def attention_without_weights(mu, at=None):
    x = probed(mu, at)
    return torch.softmax(x @ mu.points.mT, -1) @ mu.points


def attention_with_a_padding_mask(mu, at=None):
    """What a text model does: padding is masked, the weights are not used."""
    x = probed(mu, at)
    return torch.softmax((x @ mu.points.mT).masked_fill(mu.weights == 0, -torch.inf), -1) @ mu.points


def index_positions(mu, at=None):
    positions = torch.arange(mu.n, dtype=mu.dtype).unsqueeze(-1) / 10
    keys = mu.points + positions
    x = keys if at is None else at
    weights = torch.softmax(x @ keys.mT + torch.where(mu.weights > 0, mu.weights, 1e-300).log(), -1)
    return weights @ mu.points


def batch_norm(mu, at=None):
    centre, spread = mu.points.mean(-2, keepdim=True), mu.points.std(-2, keepdim=True)
    return (probed(mu, at) - centre) / (spread + 0.1)


def hard_argmax(mu, at=None):
    scores = (probed(mu, at) @ mu.points.mT).masked_fill(mu.weights == 0, -torch.inf)
    return mu.points[scores.argmax(-1)]


def logarithm_of_padding(mu, at=None):
    """0 log 0."""
    return lawful(mu, at) - (mu.weights * mu.weights.log()).sum()


def gradient_to_padding(mu, at=None):
    return lawful(mu, at) + (mu.points.sum() - mu.points.sum().detach())


def infinite_gradient(mu, at=None):
    """The distance to the nearest atom is zero at an atom, and its root has no slope there."""
    return lawful(mu, at) + (mu.weights == 0).sum() * (mu.points.sum(-2, keepdim=True) * 0).abs().sqrt()


def probes_are_different(mu, at=None):
    return lawful(mu, at) + (0.0 if at is None else 1.0)


def probes_see_themselves(mu, at=None):
    points = mu.points if at is None else torch.cat([mu.points, at], -2)
    weights = mu.weights if at is None else torch.cat([mu.weights, mu.weights.new_full((at.shape[-2],), 0.1)], -1)
    shift = (weights.unsqueeze(-1) * points).sum(-2, keepdim=True)
    return probed(mu, at) + shift


def not_finite(mu, at=None):
    return lawful(mu, at) * float("nan")


BROKEN = [
    (sum_pooling, "I2 padding"),
    (root_of_the_count, "I2 padding"),
    (root_of_the_live_count, "I3 splitting"),
    (attention_without_weights, "I2 padding"),
    (attention_with_a_padding_mask, "I3 splitting"),
    (index_positions, "I1 permutation"),
    (batch_norm, "I2 padding"),
    (hard_argmax, "I5 weak continuity"),
    (logarithm_of_padding, "I2 padding"),
    (gradient_to_padding, "I2 padding is broken: an atom of weight zero receives a gradient"),
    (infinite_gradient, "I2 padding is broken: an atom of weight zero receives a gradient"),
    (probes_are_different, "I4 off the support"),
    (probes_see_themselves, "I4 off the support"),
    (not_finite, "I1 permutation is broken: the answer is not finite"),
]


@pytest.mark.parametrize(("encoder", "law"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_encoder_is_caught(encoder, law):
    with pytest.raises(AssertionError, match=f"^law {law}"):
        testing.check_encoder(encoder, DIM)


def test_a_lawful_function_passes():
    found = testing.check_encoder(lawful, DIM)
    assert [law[:2] for law in found] == ["I1", "I2", "I3", "I4", "I5"]
    testing.check_encoder(lawful, DIM, dtype=torch.float32)


def test_continuity_has_a_measure():
    """The threshold of I5 is the caller's: a steep function passes under a larger one."""

    def steep(mu, at=None):
        return 1e5 * lawful(mu, at)

    with pytest.raises(AssertionError, match=r"law I5 weak continuity is broken: .* times as much"):
        testing.check_encoder(steep, DIM)
    assert testing.check_encoder(steep, DIM, lipschitz=1e7)["I5 weak continuity"] > 1e4


def test_random_measure():
    g = torch.Generator().manual_seed(0)
    mu = testing.random_measure(6, 3, generator=g, zeros=2)
    assert (mu.n, mu.d, mu.dtype) == (6, 3, torch.float64)
    assert (mu.weights == 0).tolist() == [True, True, False, False, False, False]
    again = testing.random_measure(6, 3, generator=torch.Generator().manual_seed(0), zeros=2)
    assert torch.equal(mu.points, again.points)


# Coupling models ----------------------------------------------------------------------------------------------------


def entropic(mu, nu):
    return Coupling.solve(mu, nu, epsilon=0.5, tolerance=1e-13)


def of_positions(mu, nu):
    cost = (torch.arange(mu.n).unsqueeze(-1) / mu.n - torch.arange(nu.n) / nu.n).abs().to(mu.dtype)
    return Coupling.solve(mu, nu, cost=cost, epsilon=0.5, tolerance=1e-13)


def of_uniform_weights(mu, nu):
    return Coupling.from_dense(mu, nu, torch.full((mu.n, nu.n), 1 / (mu.n * nu.n), dtype=mu.dtype))


def of_the_live_count(mu, nu):
    return Coupling.solve(mu, nu, epsilon=2.0 / int((mu.weights > 0).sum()), tolerance=1e-13)


def of_the_count(mu, nu):
    return Coupling.solve(mu, nu, epsilon=2.0 / mu.n, tolerance=1e-13)


def with_mass_on_padding(mu, nu):
    """Everything right but a little mass, taken from the last row, on an atom of weight zero."""
    plan = entropic(mu, nu).to_dense()
    return Coupling.from_dense(mu, nu, plan + 1e-3 * (mu.weights == 0).unsqueeze(-1))


@pytest.mark.parametrize(
    ("model", "law"),
    [
        (of_positions, "I1 permutation"),
        (of_uniform_weights, "I2 padding"),
        (of_the_count, "I2 padding"),
        (with_mass_on_padding, "I2 padding is broken: an atom of weight zero receives mass"),
        (of_the_live_count, "I3 splitting"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_model_is_caught(model, law):
    with pytest.raises(AssertionError, match=f"law {law}"):
        testing.check_coupling_model(model, DIM)


@pytest.mark.parametrize("model", [of_the_live_count, of_the_count], ids=lambda model: model.__name__)
def test_a_model_broken_on_the_target_side_is_caught(model):
    with pytest.raises(AssertionError, match="law"):
        testing.check_coupling_model(lambda mu, nu: model(nu, mu).mT, DIM)


def test_a_lawful_model_passes():
    found = testing.check_coupling_model(entropic, DIM)
    assert [law[:2] for law in found] == ["I1", "I2", "I3"]
    torch.manual_seed(0)
    config = sf.SinkhornTransformerConfig(dim=3, target_dim=2, width=8, heads=2, depth=1, tolerance=1e-13)
    testing.check_coupling_model(sf.SinkhornTransformer(config, dtype=torch.float64), 3, target_dim=2)
