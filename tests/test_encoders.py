"""Encoders: the laws of functions of a measure, ordinary attention as a special case, causality, compilation."""

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sinkformer as sf
from sinkformer import testing
from sinkformer.encoders import Block, Encoder, GatedMLP, MeasureAttention, Moments
from sinkformer.errors import ConfigError, ShapeError
from sinkformer.testing import random_measure

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "causal": dict(causal=True),
    "without context": dict(context=False),
    "causal without context": dict(causal=True, context=False),
    "depth 0": dict(depth=0),
    "depth 4": dict(depth=4),
    "one head": dict(heads=1),
    "eight heads": dict(heads=8),
    "large features": dict(scale=10.0),
    "moments": dict(moments=True),
    "contextual skip": dict(contextual_skip=True),
    "tensor": dict(tensor=(5, 1)),
    "everything": dict(moments=True, contextual_skip=True, tensor=(1, 5)),
    "everything causal": dict(moments=True, contextual_skip=True, tensor=(5, 1), causal=True),
    "everything, depth 0": dict(moments=True, contextual_skip=True, tensor=(1, 5), depth=0),
}
FULL: dict[str, Any] = dict(rank=12, moments=True, contextual_skip=True, tensor=(2, 3))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(seed: int = 0, dim: int = 3, rank: int = 5, **options: Any) -> Encoder:
    """Encoder with attention sharper than a fresh one's."""
    torch.manual_seed(seed)
    encoder = Encoder(dim, rank, **{"width": 16, "heads": 2, "depth": 2, "dtype": torch.float64} | options)
    with torch.no_grad():
        for name, parameter in encoder.blocks.named_parameters():
            if name.endswith(("query.weight", "key.weight")):
                parameter.mul_(1.5)
    return encoder


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def encoder(request) -> Encoder:
    return make(**request.param)


def test_laws(encoder):
    found = testing.check_encoder(encoder, 3)
    assert [law[:2] for law in found] == ["I1", "I2", "I3", "I4", "I5"]
    assert all(deviation <= 1e-12 for law, deviation in found.items() if not law.startswith("I5"))
    assert 0 < found["I5 weak continuity"] < 1e3


def test_laws_in_float32():
    testing.check_encoder(make(dtype=torch.float32), 3, dtype=torch.float32)
    testing.check_encoder(make(dtype=torch.float32, causal=True), 3, dtype=torch.float32)
    testing.check_encoder(make(dtype=torch.float32, **FULL), 3, dtype=torch.float32)


def test_laws_of_other_measures():
    for n in (2, 3, 20):
        testing.check_encoder(make(n), 3, n=n, seed=n)


def test_batch_equals_loop(encoder):
    g = generator(1)
    parts = [random_measure(n, 3, generator=g) for n in (6, 1, 3)]
    probes = torch.randn(3, 4, 3, generator=g, dtype=torch.float64)
    batch = sf.Measure.stack(parts)
    together, off = encoder(batch), encoder(batch, probes)
    assert together.shape == (3, 6, 5)
    assert off.shape == (3, 4, 5)
    for k, part in enumerate(parts):
        torch.testing.assert_close(together[k, : part.n], encoder(part), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(off[k], encoder(part, probes[k]), rtol=1e-12, atol=1e-12)
    grid = sf.Measure.stack([batch, batch])
    torch.testing.assert_close(encoder(grid), torch.stack([together, together]), rtol=1e-12, atol=1e-12)


def test_an_empty_batch_gives_an_empty_answer(encoder):
    mu = sf.Measure(torch.empty(0, 4, 3, dtype=torch.float64), torch.empty(0, 4, dtype=torch.float64))
    assert encoder(mu).shape == (0, 4, 5)


@pytest.mark.parametrize("weight", [1e-30, 1e-300])
def test_tiny_weights(weight):
    """log w is far below every logit, and finite."""
    encoder = make()
    points = torch.randn(4, 3, generator=generator(), dtype=torch.float64)
    weights = torch.tensor([weight, 0.5, 0.3, 0.2 - weight], dtype=torch.float64)
    tiny = encoder(sf.Measure(points, weights))
    assert bool(torch.isfinite(tiny).all())
    without = encoder(sf.Measure(points, torch.tensor([0.0, 0.5, 0.3, 0.2], dtype=torch.float64)))
    torch.testing.assert_close(tiny, without, rtol=1e-12, atol=1e-12)


def test_huge_logits():
    """Attention that is one-hot to rounding overflows nowhere, and has finite gradients."""
    encoder = make(dtype=torch.float32)
    with torch.no_grad():
        for block in encoder.blocks:
            block.attention.query.weight.mul_(1e4)
    points = torch.randn(5, 3, generator=generator(), requires_grad=True)
    value = encoder(sf.Measure.uniform(points))
    assert bool(torch.isfinite(value).all())
    (gradient,) = torch.autograd.grad(value.sum(), points)
    assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("options", [{}, FULL, FULL | {"causal": True}], ids=["plain", "full", "full causal"])
def test_gradients(options):
    """By finite differences in points, weights and probes, with padding."""
    encoder = make(width=4, depth=1, **options)
    g = generator(2)
    points = torch.randn(4, 3, generator=g, dtype=torch.float64, requires_grad=True)
    logits = torch.randn(3, generator=g, dtype=torch.float64, requires_grad=True)
    probes = torch.randn(2, 3, generator=g, dtype=torch.float64, requires_grad=True)

    def value(points, logits, probes):
        weights = torch.cat([logits.softmax(-1), logits.new_zeros(1)])
        return encoder(sf.Measure(points, weights), probes)

    assert torch.autograd.gradcheck(value, (points, logits, probes))


# Attention ----------------------------------------------------------------------------------------------------------


def attention(width: int = 12, heads: int = 3, seed: int = 0) -> MeasureAttention:
    torch.manual_seed(seed)
    layer = MeasureAttention(width, heads, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(3)
    return layer


def tokens(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


@pytest.mark.parametrize("heads", [1, 3, 12])
def test_uniform_weights_are_ordinary_attention(heads):
    layer, z = attention(heads=heads), tokens(2, 7, 12)
    weights = torch.full((2, 7), 1 / 7, dtype=torch.float64)
    peer = nn.MultiheadAttention(12, heads, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        peer.in_proj_weight.copy_(torch.cat([layer.query.weight, layer.key.weight, layer.value.weight]))
        peer.out_proj.weight.copy_(layer.out.weight)
    expected, _ = peer(z, z, z)
    torch.testing.assert_close(layer(z, z, weights), expected, rtol=1e-12, atol=1e-12)


def test_attention_by_the_formula():
    """sum_h W^h (integral of V^h y exp(<Q^h x, K^h y> / sqrt k) dmu) / (integral of exp dmu), written out with loops."""
    layer, x, y = attention(), tokens(4, 12), tokens(6, 12, seed=4)
    weights = torch.tensor([0.1, 0.0, 0.3, 0.2, 0.05, 0.35], dtype=torch.float64)
    answer = torch.zeros(4, 12, dtype=torch.float64)
    for h in range(3):
        rows = slice(4 * h, 4 * h + 4)
        q, k, v = (m.weight[rows] for m in (layer.query, layer.key, layer.value))
        for i in range(4):
            mass = [weights[j].item() * math.exp(((q @ x[i]) @ (k @ y[j])).item() / 2) for j in range(6)]  # sqrt k = 2
            mean = sum(mass[j] * (v @ y[j]) for j in range(6)) / sum(mass)
            answer[i] += layer.out.weight[:, rows] @ mean
    torch.testing.assert_close(layer(x, y, weights), answer, rtol=1e-12, atol=1e-12)


def test_weightless_atoms_are_silent():
    layer, x, y = attention(), tokens(4, 12), tokens(6, 12, seed=4)
    weights = torch.tensor([0.5, 0.0, 0.5, 0.0, 0.0, 0.0], dtype=torch.float64)
    expected = layer(x, y[[0, 2]], weights[[0, 2]])
    y = y.clone()
    y[3:] = torch.tensor([math.inf, math.nan, 1e300]).double().unsqueeze(-1)
    torch.testing.assert_close(layer(x, y, weights), expected, rtol=1e-12, atol=1e-12)


def test_a_blind_token_receives_zero():
    layer, x, y = attention(), tokens(3, 12), tokens(4, 12, seed=4)
    weights = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    allowed = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    answer = layer(x, y, weights, allowed)
    torch.testing.assert_close(answer[0], layer.out(layer.value(y[0])), rtol=1e-12, atol=1e-12)
    assert bool((answer[1:] == 0).all())


def test_context_is_the_weighted_mean():
    torch.manual_seed(0)
    mlp = GatedMLP(6, dtype=torch.float64)
    z, weights = tokens(4, 6), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    assert mlp.pool is not None
    assert mlp.from_context is not None
    context = functional.silu(weights @ mlp.pool(z))
    u, gate = (mlp.up(z) + mlp.from_context(context)).chunk(2, -1)
    torch.testing.assert_close(mlp(z, z, weights.unsqueeze(0)), mlp.down(u * functional.silu(gate)))


def test_without_context_an_mlp_sees_one_token():
    torch.manual_seed(0)
    mlp = GatedMLP(6, context=False, dtype=torch.float64)
    z = tokens(4, 6)
    averaging = torch.full((1, 4), 0.25, dtype=torch.float64)
    torch.testing.assert_close(mlp(z, z, averaging)[:2], mlp(z[:2], z[:2], averaging[:, :2]))


# Moments, contextual skip, tensor products -------------------------------------------------------------------------


def test_moments_are_mean_and_covariance():
    """By NumPy, weighted, with an atom of weight zero."""
    x = tokens(5, 3)
    weights = torch.tensor([0.1, 0.2, 0.0, 0.3, 0.4], dtype=torch.float64)
    mean, summary = Moments.of(x, weights.unsqueeze(0))
    torch.testing.assert_close(mean[0], torch.from_numpy(np.average(x.numpy(), axis=0, weights=weights.numpy())))
    covariance = np.cov(x.numpy(), rowvar=False, aweights=weights.numpy(), bias=True)
    torch.testing.assert_close(summary[0, :3], mean[0])
    torch.testing.assert_close(summary[0, 3:], torch.from_numpy(covariance[np.triu_indices(3)]))
    assert summary.shape == (1, Moments.size(3))


def test_moments_of_a_far_cloud_keep_their_digits():
    x = tokens(5, 3)
    weights = torch.full((1, 5), 0.2, dtype=torch.float64)
    near, far = Moments.of(x, weights).summary, Moments.of(x + 1e6, weights).summary
    torch.testing.assert_close(far[..., 3:], near[..., 3:], rtol=1e-8, atol=1e-8)


def test_moments_of_the_past():
    """Under causal weights every row has the moments of what it sees."""
    x = tokens(4, 2)
    averaging = torch.tensor([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.2, 0.3, 0.5, 0]], dtype=torch.float64)
    mean, summary = Moments.of(x, averaging)
    for row in range(3):
        alone = Moments.of(x[: row + 1], averaging[row : row + 1, : row + 1])
        torch.testing.assert_close(mean[row : row + 1], alone.mean)
        torch.testing.assert_close(summary[row : row + 1], alone.summary)


def test_tensor_features_are_heads_of_products():
    """<Q, K> = sum_h <b_h, b'_h> <a_h, a'_h>, and the coefficients do not depend on the point."""
    one, other = make(0, **FULL), make(1, **FULL)
    mu, nu = random_measure(5, 3, generator=generator()), random_measure(4, 3, generator=generator(1))
    q, k = one(mu).unflatten(-1, (2, 3, 2)), other(nu).unflatten(-1, (2, 3, 2))
    factors = []
    for features in (q, k):
        for head in range(2):
            # All points of a measure together: coefficients times everything is a matrix of rank one.
            matrix = features[:, head].transpose(0, 1).flatten(1)
            assert float(torch.linalg.svdvals(matrix)[1].detach()) < 1e-12 * float(
                torch.linalg.svdvals(matrix)[0].detach()
            )
        b = features[0, :, :, 0].detach()
        factors.append((b, features[:, :, 0] / b[:, 0, None]))
    (b, a), (b_other, a_other) = factors
    gram = torch.einsum("ihr,jhr->ijh", a, a_other)
    torch.testing.assert_close((one(mu) @ other(nu).T), (gram * (b * b_other).sum(-1)).sum(-1), rtol=1e-9, atol=1e-12)


def test_half_the_heads_start_plain():
    torch.manual_seed(0)
    encoder = Encoder(2, 24, width=8, tensor=(4, 3))
    assert encoder.coefficients is not None
    assert encoder.coefficients.bias.unflatten(-1, (4, 3)).tolist() == [[1, 0, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]]


def test_contextual_skip_is_a_matrix_of_the_measure():
    """Without the part of the token the output is linear in x - m, and the matrix changes with the measure."""
    encoder = make(contextual_skip=True)
    with torch.no_grad():
        encoder.leave.weight.zero_()
    mu, nu = random_measure(5, 3, generator=generator()), random_measure(5, 3, generator=generator(1))
    matrices = []
    for measure in (mu, nu):
        mean = (measure.weights.unsqueeze(-1) * measure.points).sum(0)
        probes = mean + torch.cat([torch.zeros(1, 3), torch.eye(3), 2 * torch.eye(3)]).double()
        value = encoder(measure, probes)
        torch.testing.assert_close(value[0], torch.zeros(5).double(), rtol=0, atol=1e-12)
        torch.testing.assert_close(value[4:], 2 * value[1:4], rtol=1e-12, atol=1e-12)
        matrices.append(value[1:4])
    assert float((matrices[0] - matrices[1]).detach().abs().max()) > 1e-3


def test_moments_alone_separate_measures_of_one_mean():
    """What the summary sees: a wider cloud around the same mean has another skip, without attention or context."""
    encoder = make(moments=True, contextual_skip=True, depth=0)
    with torch.no_grad():
        encoder.leave.weight.zero_()
    points = torch.tensor([[-1.0, 0, 0], [1.0, 0, 0]], dtype=torch.float64)
    probe = torch.tensor([[0.3, 0.1, 0.2]], dtype=torch.float64)
    narrow, wide = (encoder(sf.Measure.uniform(s * points), probe) for s in (1, 2))
    assert float((narrow - wide).detach().abs().max()) > 1e-4


# Causality ----------------------------------------------------------------------------------------------------------


def timed(*times: float) -> sf.Measure:
    """Measure whose last coordinate is the given times."""
    g = generator(5)
    mu = random_measure(len(times), 3, generator=g)
    points = mu.points.clone()
    points[:, -1] = torch.tensor(times)
    return sf.Measure(points, mu.weights)


@pytest.mark.parametrize("options", [{}, dict(context=False), FULL], ids=["context", "no context", "full"])
def test_the_future_changes_nothing(options):
    encoder = make(causal=True, **options)
    mu = timed(0.1, 0.4, 0.2, 0.9, 0.8)
    before = encoder(mu)
    points = mu.points.clone()
    points[3, :2] = 100.0
    after = encoder(sf.Measure(points, mu.weights))
    torch.testing.assert_close(after[[0, 1, 2, 4]], before[[0, 1, 2, 4]], rtol=1e-12, atol=1e-12)
    assert bool((after[3] != before[3]).any())
    # Neither its place nor its mass: what comes is a conditional on the past.
    past = [0, 1, 2]
    alone = encoder(sf.Measure.normalized(mu.points[past], mu.weights[past]))
    torch.testing.assert_close(alone, before[past], rtol=1e-12, atol=1e-12)


def test_equal_times_see_each_other():
    encoder = make(causal=True)
    mu = timed(0.5, 0.5, 0.7)
    points = mu.points.clone()
    points[1, 0] += 1
    assert bool((encoder(sf.Measure(points, mu.weights))[0] != encoder(mu)[0]).any())


@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "full"])
def test_at_one_time_causal_is_ordinary(options):
    causal, ordinary = make(causal=True, **options), make(**options)
    ordinary.load_state_dict(causal.state_dict())
    mu = timed(0.3, 0.3, 0.3, 0.3)
    torch.testing.assert_close(causal(mu), ordinary(mu), rtol=1e-12, atol=1e-12)


def test_a_probe_before_all_atoms():
    """It sees nothing, so nothing in the measure changes its value."""
    encoder = make(causal=True)
    probe = torch.tensor([[0.2, -0.4, -5.0]], dtype=torch.float64)
    value = encoder(timed(0.1, 0.4), probe)
    assert bool(torch.isfinite(value).all())
    torch.testing.assert_close(encoder(timed(0.3, 0.2, 0.9), probe), value, rtol=1e-12, atol=1e-12)


# Module habits ------------------------------------------------------------------------------------------------------


def test_a_fresh_encoder_has_outputs_of_the_scale():
    torch.manual_seed(0)
    encoder = Encoder(8, 64, width=64, scale=0.1)
    value = encoder(sf.Measure.uniform(torch.randn(50, 8, generator=generator())))
    assert 0.05 < float(value.detach().std()) < 0.3


def test_forward_is_pure_and_has_no_modes():
    encoder, mu = make(), random_measure(5, 3, generator=generator())
    state = copy.deepcopy(encoder.state_dict())
    first = encoder.train()(mu)
    assert torch.equal(encoder.eval()(mu), first)
    assert all(torch.equal(t, state[name]) for name, t in encoder.state_dict().items())
    assert not list(encoder.buffers())


def test_copies_agree():
    encoder, mu = make(), random_measure(5, 3, generator=generator())
    for other in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
        assert torch.equal(other(mu), encoder(mu))


def test_repr():
    text = repr(make(causal=True))
    assert "dim=3, rank=5, causal=True" in text
    assert "heads=2" in text


@pytest.mark.parametrize("options", [{}, dict(causal=True), FULL], ids=["ordinary", "causal", "full"])
def test_compiles_without_a_break(options):
    encoder = make(depth=1, **options)
    torch.compiler.reset()
    compiled = torch.compile(encoder, backend="eager", fullgraph=True)
    g = generator(6)
    mu = random_measure(5, 3, generator=g, zeros=1)
    torch.testing.assert_close(compiled(mu), encoder(mu), rtol=1e-12, atol=1e-12)
    probes = torch.randn(4, 3, generator=g, dtype=torch.float64)
    torch.testing.assert_close(compiled(mu, probes), encoder(mu, probes), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # torch's own, of RMSNorm
@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "full"])
def test_autocast(options):
    encoder = make(dtype=torch.float32, **options)
    mu = random_measure(6, 3, generator=generator(), dtype=torch.float32, zeros=1)
    exact = encoder(mu)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = encoder(mu)
    assert bool(torch.isfinite(rough).all())
    assert float((rough - exact).detach().abs().max()) < 0.1 * float(exact.detach().abs().max())


def test_wrong_sizes():
    with pytest.raises(ConfigError, match="expected width divisible by heads, received width=10 and heads=4"):
        Encoder(3, 5, width=10, heads=4)
    with pytest.raises(ConfigError, match="received width=8 and heads=0"):
        MeasureAttention(8, 0)
    for wrong in (
        dict(dim=0, rank=1),
        dict(dim=1, rank=0),
        dict(dim=1, rank=1, width=0),
        dict(dim=1, rank=1, depth=-1),
    ):
        with pytest.raises(ConfigError, match="expected dim, rank, width >= 1 and depth >= 0, received"):
            Encoder(**wrong)


@pytest.mark.parametrize("tensor", [(2, 5), (0, 3), (3, -4)])
def test_wrong_tensor(tensor):
    with pytest.raises(
        ConfigError, match=r"expected tensor=\(heads, coefficients\) whose product divides the rank, received"
    ):
        Encoder(3, 12, tensor=tensor)


def test_wrong_points():
    encoder, mu = make(), random_measure(5, 3, generator=generator())
    with pytest.raises(ShapeError, match="expected points with 3 coordinates, received 2; see the encoder's dim"):
        encoder(random_measure(5, 2, generator=generator()))
    for probes in (torch.zeros(4, 2), torch.zeros(1, 4, 3)):
        with pytest.raises(ShapeError, match=r"expected probes of shape \('k', 3\), received"):
            encoder(mu, probes.double())


def test_a_block_keeps_the_number_of_tokens():
    torch.manual_seed(0)
    block = Block(8, 2, dtype=torch.float64)
    z, weights = tokens(2, 5, 8), torch.full((2, 3), 1 / 3, dtype=torch.float64)
    assert block(z, weights, weights.unsqueeze(-2), None).shape == (2, 5, 8)


@pytest.mark.parametrize("causal", [False, True])
def test_factors_multiply_to_the_features(causal):
    encoder = Encoder(2, width=16, rank=48, tensor=(6, 4), moments=True, contextual_skip=True, causal=causal).double()
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(3, 5, 2, generator=generator, dtype=torch.float64)
    mu = sf.Measure.normalized(points, torch.rand(3, 5, generator=generator, dtype=torch.float64))
    probes = torch.rand(3, 4, 2, generator=generator, dtype=torch.float64)
    for at in (None, probes):
        features, coefficients = encoder.factors(mu, at)
        k = 5 if at is None else 4
        assert features.shape == (3, k, 12)
        assert coefficients is not None
        assert coefficients.shape == (3, k if causal else 1, 6, 4)
        heads = features.unflatten(-1, (6, 2))
        expected = torch.einsum("bnhc,bnha->bnhca", coefficients.expand(3, k, 6, 4), heads).flatten(-3)
        assert torch.allclose(encoder(mu, at), expected, rtol=0, atol=1e-14)
    plain, none = Encoder(2, width=16, rank=16).double().factors(mu)
    assert none is None
    assert plain.shape == (3, 5, 16)
