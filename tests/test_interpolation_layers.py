"""Layers of exact interpolation: the lemmas in closed form, torch's attention, the laws of measures, storage."""

import copy
import json
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import random_measure, tensor
from safetensors.torch import load_file, save_file
from strategies import measures
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import scaled_dot_product_attention

from sinkformer import Measure
from sinkformer.errors import ConfigError, DeviceError, DTypeError, ModelError, NonFiniteError, ShapeError
from sinkformer.interpolation.layers import Attention, Block, FeedForward, TokenTransformer

KINDS = ("hardmax", "softmax")
kinds = pytest.mark.parametrize("kind", KINDS)
storages = pytest.mark.parametrize("dense", [False, True], ids=["low-rank", "dense"])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


def cold(kind: str) -> dict:
    """Options under which a margin of 0.1 is as good as infinite: exp(-1000) is zero in floating point."""
    return {"kind": kind, "tau": 1e-4}


def attention(kind: str, dense: bool = False, d: int = 3, tau: float = 0.7, seed: int = 0, **options) -> Attention:
    if dense:
        return Attention(0.3, normal(d, d, seed=seed), normal(d, d, seed=seed + 1), kind=kind, tau=tau, **options)
    A = (0.4, normal(d, seed=seed), normal(d, seed=seed + 1))
    return Attention(0.3, -0.8, A, kind=kind, tau=tau, **options)


def by_the_formula(layer: Attention, mu: Measure) -> Tensor:
    """The definition, token by token."""
    x, w, A, V, out = mu.points, mu.weights, layer.A.detach(), layer.V.detach(), []
    for i in range(mu.n):
        seen = [j for j in range(mu.n) if w[j] > 0 and (j <= i or not layer.causal)]
        scores = {j: float(A @ x[i] @ x[j]) for j in seen}
        top = max(scores.values())
        if layer.kind == "hardmax":
            shares = {j: float(w[j]) for j in seen if scores[j] == top}
        else:
            shares = {j: float(w[j]) * math.exp((scores[j] - top) / layer.tau) for j in seen}
        mixed = sum(share * x[j] for j, share in shares.items()) / sum(shares.values())
        out.append(layer.rho.detach() * x[i] + V @ mixed)
    return torch.stack(out)


def close(a: Tensor, b: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-12, atol=atol)


# The lemmas: rho = 0, V = I -----------------------------------------------------------------------------------------------


@kinds
def test_lemma_rank_one(kind):
    """A = v v^T sends a token to the largest <v, x>, to the smallest, or to the mean, by the sign of its own."""
    v = tensor(1.0, 2.0)
    x = tensor([1.0, 0.0], [0.0, 3.0], [2.0, 2.0], [-1.0, 0.0], [-4.0, 0.0], [2.0, -1.0])  # <v, x> = 1, 6, 6, -1, -4, 0
    layer = Attention(0.0, 1.0, (0.0, v, v), **cold(kind))
    top, bottom, mean = tensor(1.0, 2.5), tensor(-4.0, 0.0), x.mean(0)
    close(layer(x), torch.stack([top, top, top, bottom, bottom, mean]))
    close(Attention(0.0, 1.0, torch.outer(v, v), **cold(kind))(x), layer(x))


@kinds
def test_lemma_corner(kind):
    """A = I sends all tokens of a box (0, R)^d to the token (R, ..., R)."""
    x = torch.cat(
        [torch.rand(20, 3, generator=generator(), dtype=torch.float64) * 0.9 + 0.01, torch.ones(1, 3).double()]
    )
    layer = Attention(0.0, 1.0, 1.0, **cold(kind))
    assert torch.equal(layer(x), torch.ones_like(x))


@kinds
def test_lemma_sphere(kind):
    """A = I fixes tokens on a sphere about the origin; here points with rational coordinates, exactly on it."""
    x = tensor([3.0, 4.0, 0.0], [4.0, 3.0, 0.0], [-5.0, 0.0, 0.0], [0.0, -3.0, 4.0], [0.0, 0.0, 5.0], [0.0, 5.0, 0.0])
    assert torch.equal(Attention(0.0, 1.0, 1.0, **cold(kind))(x), x)


@kinds
@storages
@given(mu=measures(5, d=3))
def test_lemma_zero(kind, dense, mu):
    """A = 0 takes the mean by the weights, the same in both kinds at every temperature."""
    A = torch.zeros(3, 3).double() if dense else (0.0, torch.zeros(3).double(), normal(3))
    mean = (mu.weights.unsqueeze(-1) * mu.points).sum(0).expand(mu.n, -1)
    found = [Attention(0.0, 1.0, A, kind=kind, tau=tau)(mu).points for tau in (1e-3, 7.0)]
    close(found[0], mean, atol=1e-15)
    assert torch.equal(*found)
    assert torch.equal(found[0], Attention(0.0, 1.0, A, kind=KINDS[1 - KINDS.index(kind)])(mu).points)


@kinds
def test_the_mean_of_dyadic_tokens_is_exact(kind):
    x = tensor([1.0], [2.0], [4.0], [9.0])
    assert torch.equal(Attention(0.0, 1.0, 0.0, kind=kind)(x), torch.full((4, 1), 4.0).double())


def test_two_tokens_in_closed_form():
    """Softmax of two tokens is a logistic function of the difference of their scores."""
    x, tau = tensor([1.0], [3.0]), 1.5
    share = torch.sigmoid(x[:, 0] * 2.0 / tau)  # of the second token: scores x_i and 3 x_i
    close(Attention(0.0, 1.0, 1.0, kind="softmax", tau=tau)(x)[:, 0], 1 + 2 * share)


def test_hardmax_takes_the_mean_over_ties_by_weight():
    mu = Measure(tensor([1.0, 0.0], [1.0, 2.0], [0.0, 1.0]), tensor(0.25, 0.5, 0.25))
    e = tensor(1.0, 0.0)
    moved = Attention(0.0, 1.0, (0.0, e, e))(mu).points
    close(moved[:2], tensor([1.0, 4 / 3], [1.0, 4 / 3]))
    close(moved[2], tensor(0.75, 1.25))


def test_a_difference_of_one_unit_in_the_last_place_is_no_tie():
    x = tensor([1.0], [1.0 + 2**-52])
    assert torch.equal(Attention(0.0, 1.0, 1.0)(x), x[1:].expand(2, 1))


def test_softmax_tends_to_hardmax():
    x = normal(6, 3)
    hard = attention("hardmax")(x)
    gaps = [float((attention("softmax", tau=tau)(x) - hard).detach().abs().max()) for tau in (1.0, 0.1, 0.01)]
    assert gaps[0] > gaps[1] > gaps[2]


# Other libraries, and the definition ------------------------------------------------------------------------------------


@kinds
@storages
@pytest.mark.parametrize("causal", [False, True])
@given(mu=measures(6, d=3))
def test_the_formula(kind, dense, causal, mu):
    layer = attention(kind, dense, causal=causal)
    moved = layer(mu)
    lonely = (mu.weights.cumsum(0) == 0) if causal else torch.zeros(mu.n, dtype=torch.bool)  # they see no mass
    close(moved.points[lonely], 0.3 * mu.points[lonely])
    part = Measure(mu.points[~lonely], mu.weights[~lonely])
    close(moved.points[~lonely], by_the_formula(layer, part))
    assert torch.equal(moved.weights, mu.weights)


@pytest.mark.parametrize("causal", [False, True])
def test_torch_attention(causal):
    x, A, tau = normal(2, 7, 4), normal(4, 4, seed=1), 0.6
    layer = Attention(0.0, torch.eye(4).double(), A, kind="softmax", tau=tau, causal=causal)
    expected = scaled_dot_product_attention(x @ A.T, x, x, is_causal=causal, scale=1 / tau)
    close(layer(x), expected)


def test_torch_attention_with_weights():
    mu, A = random_measure(3, 6, d=4, generator=generator()), normal(4, 4, seed=1)
    layer = Attention(0.0, torch.eye(4).double(), A, kind="softmax")
    x, mask = mu.points, mu.weights.log().unsqueeze(-2)
    close(layer(mu).points, scaled_dot_product_attention(x @ A.T, x, x, attn_mask=mask, scale=1.0))


@given(mu=measures(5, d=2), seed=st.integers(0, 3), width=st.integers(0, 4))
def test_feed_forward(mu, seed, width):
    W, U, b = normal(2, width, seed=seed), normal(width, 2, seed=seed + 1), normal(width, seed=seed + 2)
    layer = FeedForward(-0.5, W, U, b)
    expected = torch.stack(
        [-0.5 * x + sum((W[:, k] * max(0.0, float(U[k] @ x + b[k])) for k in range(width)), 0 * x) for x in mu.points]
    )
    close(layer(mu).points, expected)
    close(layer(mu.points), expected)


def test_a_block_is_feed_forward_then_attention():
    theta = TokenTransformer.random(3, 2, 4, generator=generator())
    x = normal(5, 3)
    step = theta.blocks[0]
    close(step(x), step.attention(step.feedforward(x)))
    assert not torch.allclose(step(x), step.feedforward(step.attention(x)))
    first, last = theta.trace(x)
    assert torch.equal(first, step(x))
    assert torch.equal(last, theta(x))


@kinds
def test_dense_views(kind):
    layer, x = attention(kind), normal(6, 3)
    close(layer.A, 0.4 * torch.eye(3).double() + torch.outer(layer.p, layer.q))
    close(layer.V, -0.8 * torch.eye(3).double())
    close(Attention(0.3, layer.V, layer.A, kind=kind, tau=0.7)(x), layer(x))
    dense = attention(kind, True)
    assert dense.A is dense.matrix
    assert dense.V is dense.value


@kinds
def test_no_square_matrix_is_made(kind):
    """One of 200 000 x 200 000 would fill 320 GB."""
    d = 200_000
    layer = attention(kind, d=d, tau=1e6)
    assert layer(normal(3, d)).shape == (3, d)


# Laws -------------------------------------------------------------------------------------------------------------------


def layers(kind: str) -> dict[str, torch.nn.Module]:
    return {
        "low-rank": attention(kind),
        "dense": attention(kind, True),
        "transformer": TokenTransformer.random(3, 3, 4, kind, 0.5, generator()),
        "dense transformer": TokenTransformer.random(3, 3, 4, kind, 0.5, generator(), dense=True),
    }


every_layer = pytest.mark.parametrize("layer", [layer for kind in KINDS for layer in layers(kind).values()])


@every_layer
def test_permutation(layer):
    mu, order = random_measure(7, d=3, generator=generator()), torch.randperm(7, generator=generator())
    moved = layer(Measure(mu.points[order], mu.weights[order]))
    close(moved.points, layer(mu).points[order])


@every_layer
@pytest.mark.parametrize("junk", [0.0, 3.0, 1e70, math.nan, math.inf])
def test_padding(layer, junk):
    mu = random_measure(5, d=3, generator=generator())
    padded = Measure(
        torch.cat([mu.points, torch.full((3, 3), junk, dtype=torch.float64)]),
        torch.cat([mu.weights, torch.zeros(3).double()]),
    )
    moved = layer(padded)
    close(moved.points[:5], layer(mu).points)
    assert bool(torch.isfinite(moved.points).all())
    assert torch.equal(moved.weights, padded.weights)


@every_layer
def test_padding_that_a_change_of_dtype_made_infinite(layer):
    mu = random_measure(5, d=3, generator=generator())
    padded = Measure(
        torch.cat([mu.points, torch.full((1, 3), 1e60, dtype=torch.float64)]),
        torch.cat([mu.weights, torch.zeros(1).double()]),
    )
    single = copy.deepcopy(layer).to(torch.float32)
    moved = single(padded.to(torch.float32)).points
    torch.testing.assert_close(moved[:5].double(), layer(mu).points, rtol=1e-4, atol=1e-4)
    assert bool(torch.isfinite(moved).all())


@every_layer
def test_a_probe_is_moved_like_an_atom_there(layer):
    """A token of weight zero sees what others see."""
    mu = random_measure(5, d=3, generator=generator())
    probed = Measure(torch.cat([mu.points, mu.points[1:2]]), torch.cat([mu.weights, torch.zeros(1).double()]))
    moved = layer(probed).points
    close(moved[5], moved[1])


@every_layer
def test_splitting(layer):
    mu = random_measure(6, d=3, generator=generator())
    moved, split = layer(mu).points, layer(mu.split(2, 0.25)).points
    close(split[:6], moved)
    close(split[6], moved[2])


@every_layer
def test_a_repeated_token_is_one_of_double_weight(layer):
    x = normal(4, 3)
    twice = Measure(x, tensor(0.4, 0.2, 0.2, 0.2))
    close(layer(torch.cat([x, x[:1]]))[:4], layer(twice).points)


@every_layer
def test_batch_equals_loop(layer):
    parts = [random_measure(n, d=3, generator=generator(n)) for n in (4, 1, 6)]
    together = layer(Measure.stack(parts)).unstack()
    for one, alone in zip(together, parts, strict=True):
        close(one.points, layer(alone).points)
    x = normal(2, 3, 5, 3)
    close(layer(x)[1, 2], layer(x[1, 2]))


@every_layer
def test_empty_batch(layer):
    assert layer(torch.empty(0, 4, 3, dtype=torch.float64)).shape == (0, 4, 3)


@kinds
def test_a_causal_layer_sees_no_later_token(kind):
    layer, x = attention(kind, causal=True), normal(6, 3)
    other = torch.cat([x[:4], normal(2, 3, seed=5)])
    close(layer(x)[:4], layer(other)[:4])
    close(layer(x)[-1], attention(kind)(x)[-1])


@kinds
def test_attention_weights(kind):
    mu = Measure.stack([random_measure(n, d=3, generator=generator(n)) for n in (4, 2)])
    pi = attention(kind).weights(mu)
    close(pi.sum(-1), torch.ones(2, 4).double())
    assert bool((pi[1, :, 2:] == 0).all())


# Derivatives ------------------------------------------------------------------------------------------------------------


@storages
@pytest.mark.parametrize("causal", [False, True])
def test_gradient_of_softmax_by_differences(dense, causal):
    """In the points, the weights and every parameter."""
    layer = Block(
        FeedForward(0.5, normal(3, 2), normal(2, 3, seed=1), normal(2, seed=2)),
        attention("softmax", dense, causal=causal),
    )
    names = [name for name, _ in layer.named_parameters()]

    def moved(points, logits, *values):
        mu = Measure(points, logits.softmax(-1))
        return functional_call(layer, dict(zip(names, values, strict=True)), (mu,)).points

    leaves = [
        t.detach().clone().requires_grad_() for t in (normal(4, 3, seed=7), normal(4, seed=8), *layer.parameters())
    ]
    assert torch.autograd.gradcheck(moved, leaves)


@kinds
@storages
def test_gradients_of_a_padded_batch_are_finite(kind, dense):
    theta = TokenTransformer.random(3, 2, 4, kind, 0.5, generator(), dense=dense)
    mu = Measure.stack([random_measure(n, d=3, generator=generator(n)) for n in (4, 2)])
    theta(mu).points.square().sum().backward()
    for name, parameter in theta.named_parameters():
        if kind == "hardmax" and name.split(".")[-1] in ("alpha", "p", "q", "matrix"):
            assert parameter.grad is None, "hardmax does not depend on its scores but by jumps"
        else:
            assert bool(torch.isfinite(parameter.grad).all()), name
            assert bool((parameter.grad != 0).any()), name


def test_scores_that_differ_by_more_than_the_range_of_exp():
    """Neither the values nor the gradients are NaN."""
    x = tensor([1e150], [-1e150], [1e140]).requires_grad_()
    moved = Attention(0.0, 1.0, 1.0, kind="softmax", tau=1e-3)(x)
    assert torch.equal(moved.detach(), tensor([1e150], [-1e150], [1e150]))
    moved.sum().backward()
    assert bool(torch.isfinite(x.grad).all())


# The identity -----------------------------------------------------------------------------------------------------------


@kinds
def test_identity_attention_is_skipped_where_nobody_needs_its_gradient(kind, monkeypatch):
    layer, mu = (
        Attention(1.0, 0.0, (1.0, normal(3), normal(3)), kind=kind),
        random_measure(5, d=3, generator=generator()),
    )
    expected = layer(mu).points.detach()
    assert torch.equal(expected, mu.points)
    monkeypatch.setattr(Attention, "_scores", lambda *_: pytest.fail("scores were computed"))
    with torch.no_grad():
        assert torch.equal(layer(mu).points, expected)


def test_identity_block():
    block = Block(FeedForward(1.0, torch.zeros(2, 0), torch.zeros(0, 2), torch.zeros(0)), Attention(1.0, 0.0, 0.0))
    x = torch.randn(4, 2, generator=generator())
    assert torch.equal(block(x), x)


# Parameters -------------------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("d", [1, 2, 5])
def test_a_structured_block_of_width_four_has_10_d_plus_8_parameters(kind, d):
    def block(A) -> Block:
        return Block(FeedForward(1.0, normal(d, 4), normal(4, d), normal(4)), Attention(0.0, 1.0, A, kind=kind))

    for A in (1.0, torch.tensor(1.0), (1.0, normal(d), normal(d))):
        theta = TokenTransformer([block(A), block(A), block(A)])
        assert sum(t.numel() for t in theta.parameters()) == 3 * (10 * d + 8)
        assert all(isinstance(t, torch.nn.Parameter) for t in theta.state_dict(keep_vars=True).values())


def test_parameters_are_copies():
    W = torch.zeros(2, 1)
    layer = FeedForward(1.0, W, torch.zeros(1, 2), torch.zeros(1))
    W += 1
    assert bool((layer.W == 0).all())


def test_numbers_alone():
    """They serve every dimension, in float64; a block gives them its own dimension and dtype."""
    layer = Attention(0.5, 2.0, 1.0)
    assert (layer.dim, layer.rho.dtype) == (None, torch.float64)
    assert layer(normal(3, 2)).shape == (3, 2)
    assert layer(normal(3, 5)).shape == (3, 5)
    with pytest.raises(ShapeError, match="expected a layer that knows its dimension"):
        layer.A  # noqa: B018
    block = Block(FeedForward(1.0, torch.zeros(2, 0), torch.zeros(0, 2), torch.zeros(0)), layer)
    assert (block.attention.dim, block.attention.rho.dtype) == (2, torch.float32)
    assert torch.equal(block.attention.A, torch.eye(2))


def test_random():
    first, second = (TokenTransformer.random(3, 2, 4, "hardmax", 0.5, generator()) for _ in range(2))
    state = torch.get_rng_state()
    other = TokenTransformer.random(3, 2, 4, "hardmax", 0.5, generator(1))
    assert torch.equal(torch.get_rng_state(), state)
    x = normal(5, 3)
    assert torch.equal(first(x), second(x))
    assert not torch.equal(first(x), other(x))
    assert len(first) == 2
    assert TokenTransformer.random(3, 1, 0, dtype=torch.float32)(x.float()).dtype == torch.float32


@storages
def test_random_keeps_the_size_of_tokens(dense):
    theta = TokenTransformer.random(16, 6, 4, generator=generator(), dense=dense)
    sizes = [float(x.detach().square().mean().sqrt()) for x in theta.trace(normal(200, 16))]
    assert all(0.05 < size < 5 for size in sizes)


def test_habits_of_modules():
    theta = TokenTransformer.random(3, 2, 4, generator=generator())
    seen = []
    for module in theta.modules():
        module.register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    with torch.no_grad():
        theta(normal(4, 3))
    assert seen == ["FeedForward", "Attention", "Block"] * 2 + ["TokenTransformer"]
    other = pickle.loads(pickle.dumps(TokenTransformer.random(3, 2, 4, generator=generator())))
    assert torch.equal(other(normal(4, 3)), theta(normal(4, 3)))
    assert "kind='softmax', tau=1, causal=False" in repr(theta)
    assert "dim=3, width=4" in repr(theta)


def test_float32_agrees_with_float64():
    theta, x = TokenTransformer.random(3, 3, 4, generator=generator()), normal(5, 3)
    torch.testing.assert_close(copy.deepcopy(theta).float()(x.float()).double(), theta(x), rtol=1e-5, atol=1e-5)


# Storage ----------------------------------------------------------------------------------------------------------------


def mixed(dtype: torch.dtype = torch.float64) -> TokenTransformer:
    """A block of every kind."""
    return TokenTransformer(
        [
            Block(FeedForward(0.1, normal(3, 2), normal(2, 3), normal(2)), attention("softmax", tau=1 / 3)),
            Block(FeedForward(-1.5, normal(3, 0), normal(0, 3), normal(0)), attention("hardmax", True, causal=True)),
            Block(FeedForward(1.0, normal(3, 4), normal(4, 3), normal(4)), Attention(0.0, normal(3, 3), 2.0)),
        ]
    ).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_save_and_load(tmp_path, dtype):
    theta = mixed(dtype)
    theta.save(tmp_path / "new" / "folder")
    loaded = TokenTransformer.load(tmp_path / "new" / "folder")
    assert loaded.config == theta.config
    states = theta.state_dict(), loaded.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], t) and t.dtype == dtype for name, t in states[1].items())
    x = normal(5, 3).to(dtype)
    assert torch.equal(theta(x), loaded(x))


def test_shared_layers_are_saved(tmp_path):
    block = mixed().blocks[0]
    theta = TokenTransformer([block, block])
    theta.save(tmp_path)
    assert torch.equal(TokenTransformer.load(tmp_path)(normal(5, 3)), theta(normal(5, 3)))


def change_config(**changes):
    def change(folder):
        values = json.loads((folder / "config.json").read_text())
        values.update(changes)
        (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))

    return change


def change_block(**changes):
    def change(folder):
        values = json.loads((folder / "config.json").read_text())
        values["blocks"][0].update(changes)
        values["blocks"][0] = {k: v for k, v in values["blocks"][0].items() if v != "drop"}
        (folder / "config.json").write_text(json.dumps(values))

    return change


def change_state(function):
    def change(folder):
        state = load_file(folder / "model.safetensors")
        function(state)
        save_file(state, folder / "model.safetensors")

    return change


DAMAGES = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ModelError, r"expected the file config\.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ModelError, r"the file model\.safetensors"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), ModelError, "a file is damaged"),
    "no text": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"), ModelError, "a file is damaged"),
    "no safetensors": (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), ModelError, "a file is damaged"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), ConfigError, "as a JSON object, received list"),
    "version": (change_config(format_version=2), ConfigError, "expected format_version 1, received 2"),
    "unknown key": (change_config(heads=3), ConfigError, r"unknown: \['heads'\]"),
    "no blocks": (change_config(blocks=[]), ConfigError, "expected at least one block"),
    "no list": (change_config(blocks={}), ConfigError, "expected blocks as a list, received dict"),
    "no block": (change_config(blocks=[3]), ConfigError, "expected block 0 as a JSON object, received int"),
    "dim": (change_config(dim=0), ConfigError, "expected dim as a whole number >= 1, received 0"),
    "missing key": (change_block(tau="drop"), ConfigError, r"in block 0; missing: \['tau'\]"),
    "surplus key": (change_block(heads=1), ConfigError, r"in block 0; missing: none; unknown: \['heads'\]"),
    "width": (change_block(width=-1), ConfigError, "expected width as a whole number >= 0, received -1"),
    "kind": (change_block(kind="max"), ConfigError, "expected kind 'hardmax' or 'softmax', received 'max'"),
    "tau": (change_block(tau=0), ConfigError, "expected a temperature tau, positive and finite, received 0"),
    "causal": (change_block(causal=1), ConfigError, "expected causal as True or False, received 1"),
    "storage": (change_block(A="sparse"), ConfigError, r"expected A out of \('low-rank', 'dense'\) in block 0"),
    "other width": (change_block(width=3), ModelError, "size mismatch for blocks.0.feedforward.W"),
    "other storage": (change_block(A="dense"), ModelError, r"Missing key.*blocks\.0\.attention\.matrix"),
    "missing tensor": (change_state(lambda state: state.pop("blocks.0.attention.p")), ModelError, r"Missing key.*attention\.p"),
    "surplus tensor": (change_state(lambda state: state.update(x=torch.zeros(1).double())), ModelError, r"Unexpected key.*\"x\""),
    "two dtypes": (change_state(lambda state: state.update(x=torch.zeros(1))), ModelError, "weights of one floating-point dtype"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), DAMAGES.values(), ids=DAMAGES)
def test_loading_is_strict(tmp_path, change, error, message):
    mixed().save(tmp_path)
    change(tmp_path)
    with pytest.raises(error, match=message):
        TokenTransformer.load(tmp_path)


# Errors -----------------------------------------------------------------------------------------------------------------

W, U, B = torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(3)
P = torch.zeros(2)
BAD_LAYERS = {
    "W": (lambda: FeedForward(1.0, P, U, B), ShapeError, r"expected W as a tensor of shape \(d, width\), .* \(2,\)"),
    "list": (lambda: FeedForward(1.0, [[0.0]], U, B), ShapeError, "expected W as a tensor .* received list"),
    "U": (lambda: FeedForward(1.0, W, W, B), ShapeError, r"expected U of shape \(3, 2\), received shape \(2, 3\)"),
    "b": (lambda: FeedForward(1.0, W, U, P), ShapeError, r"expected b of shape \(3,\), received shape \(2,\)"),
    "eta": (lambda: FeedForward(P, W, U, B), ShapeError, r"expected eta as a number, received shape \(2,\)"),
    "eta text": (lambda: FeedForward("1", W, U, B), DTypeError, "expected eta as a number, received str"),
    "eta bool": (lambda: FeedForward(True, W, U, B), DTypeError, "expected eta as a number, received bool"),
    "infinite": (lambda: FeedForward(math.inf, W, U, B), NonFiniteError, "expected a finite eta"),
    "NaN": (lambda: FeedForward(1.0, W, U + math.nan, B), NonFiniteError, "expected a finite U"),
    "dtypes": (lambda: FeedForward(1.0, W, U.double(), B), DTypeError, "one floating-point dtype, received .*float32.*float64"),
    "integers": (lambda: FeedForward(1.0, W.long(), U.long(), B.long()), DTypeError, "floating-point dtype, received .*int64"),
    "devices": (lambda: FeedForward(1.0, W, U.to("meta"), B), DeviceError, "on one device, received .*cpu.*meta"),
    "pair": (lambda: Attention(0.0, 1.0, (1.0, P)), ShapeError, r"a triple \(alpha, p, q\) or a matrix, received a tuple of 2"),
    "q": (lambda: Attention(0.0, 1.0, (1.0, P, B)), ShapeError, r"expected q of shape \(2,\), received shape \(3,\)"),
    "V": (lambda: Attention(0.0, W, 1.0), ShapeError, r"expected V of shape \(2, 2\), received shape \(2, 3\)"),
    "A": (lambda: Attention(0.0, torch.eye(2), torch.eye(3)), ShapeError, r"expected A of shape \(2, 2\), .* \(3, 3\)"),
    "A list": (lambda: Attention(0.0, 1.0, [1.0, P, P]), DTypeError, "expected A as a number, received list"),
    "kind": (lambda: Attention(0.0, 1.0, 1.0, kind="max"), ConfigError, "expected kind 'hardmax' or 'softmax'"),
    "tau": (lambda: Attention(0.0, 1.0, 1.0, tau=0.0), ConfigError, "temperature tau, .* its limit 0 is kind='hardmax'"),
    "tau NaN": (lambda: Attention(0.0, 1.0, 1.0, tau=math.nan), ConfigError, "received nan"),
    "causal": (lambda: Attention(0.0, 1.0, 1.0, causal="no"), ConfigError, "expected causal as True or False"),
    "layers": (lambda: Block(Attention(0.0, 1.0, 1.0), FeedForward(1.0, W, U, B)), DTypeError, "expected a FeedForward and"),
    "dimensions": (
        lambda: Block(FeedForward(1.0, W, U, B), Attention(0.0, 1.0, torch.eye(3))), ShapeError, "dimension, received 2 and 3",
    ),
    "layers' dtypes": (
        lambda: Block(FeedForward(1.0, W, U, B), Attention(0.0, 1.0, torch.eye(2).double())), DTypeError, "layers of one dtype",
    ),
    "no block": (lambda: TokenTransformer([]), ConfigError, "expected at least one block"),
    "no blocks": (lambda: TokenTransformer([torch.nn.Identity()]), DTypeError, "expected blocks, received Identity at"),
    "blocks' dimensions": (
        lambda: TokenTransformer([mixed().blocks[0], TokenTransformer.random(2, 1, 1).blocks[0]]),
        ShapeError, "blocks of one dimension, received 3 and 2 at position 1",
    ),
    "blocks' dtypes": (
        lambda: TokenTransformer([mixed().blocks[0], mixed(torch.float32).blocks[0]]), DTypeError,
        "received torch.float64 and torch.float32 at position 1",
    ),
    "dim": (lambda: TokenTransformer.random(0, 1, 1), ConfigError, "expected dim as a whole number >= 1, received 0"),
    "length": (lambda: TokenTransformer.random(1, 0, 1), ConfigError, "expected length as a whole number >= 1"),
    "width": (lambda: TokenTransformer.random(1, 1, -1), ConfigError, "expected width as a whole number >= 0"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "error", "message"), BAD_LAYERS.values(), ids=BAD_LAYERS)
def test_bad_layers(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_bad_points():
    theta = mixed()
    with pytest.raises(ShapeError, match="expected points with 3 coordinates, received 2"):
        theta(normal(4, 2))
    with pytest.raises(DTypeError, match=r"the layer's dtype, torch\.float64, received torch\.float32; convert them"):
        theta(normal(4, 3).float())
    with pytest.raises(DTypeError, match="expected points as a torch tensor, received list"):
        theta([[0.0, 0.0, 0.0]])
    with pytest.raises(NonFiniteError, match="expected finite points"):
        theta(normal(4, 3) + math.nan)
    with pytest.raises(ShapeError, match="at least one atom"):
        theta(torch.empty(0, 3, dtype=torch.float64))


@kinds
@pytest.mark.parametrize("A", [1.0, (0.0, tensor(1e200).expand(1), tensor(1.0).expand(1)), torch.eye(1).double()])
def test_scores_beyond_the_range_are_an_error(kind, A):
    with pytest.raises(
        NonFiniteError, match=r"expected finite attention scores .* at index \[0, \d\], .* scale the points or A down"
    ):
        Attention(0.0, 1.0, A, kind=kind)(tensor([1e100], [1e300]))


@kinds
def test_scores_of_1e300_are_fine(kind):
    x = tensor([1e150], [2e150], [-1e150])
    assert torch.equal(Attention(0.0, 1.0, 1.0, kind=kind)(x), tensor([2e150], [2e150], [-1e150]))
    assert torch.equal(
        Attention(0.0, 1.0, 0.0, kind=kind)(2.0**500 * tensor([1.0], [3.0])), 2.0**501 * tensor([1.0], [1.0])
    )


def test_broken_parameters_are_an_error_that_names_the_block():
    theta = mixed()
    with torch.no_grad():
        theta.blocks[1].feedforward.eta.fill_(1e308)
    with pytest.raises(NonFiniteError, match=r"block 1: expected finite (points|attention scores)"):
        theta(100 * normal(4, 3))
    with torch.no_grad():
        theta.blocks[1].feedforward.eta.fill_(math.nan)
    with pytest.raises(NonFiniteError, match="block 1: expected finite points, received a NaN"):
        theta(normal(4, 3))


def test_a_temperature_below_the_range_of_the_dtype():
    layer = Attention(0.0, 1.0, torch.eye(1), kind="softmax", tau=1e-50)
    with pytest.raises(ConfigError, match=r"a temperature in the range of torch\.float32, received tau=1e-50"):
        layer(torch.zeros(2, 1))
    x = tensor([1.0], [2.0])
    assert torch.equal(layer.double()(x), x[1:].expand(2, 1))
