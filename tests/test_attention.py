"""Transport attention: softmax as its one-sided case, the library's solver and POT as oracles, torch's module as a model."""

import copy
import math
import pickle
from typing import Any

import ot
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import sinkformer as sf
from sinkformer.attention import SinkhornAttention, attention_plan, replace_attention, sinkhorn_attention, stored
from sinkformer.costs import forbid
from sinkformer.errors import (
    ConfigError,
    ConvergenceWarning,
    DTypeError,
    InfeasibleError,
    NonFiniteError,
    ShapeError,
    SinkformerWarning,
    WeightError,
)

CLOSE: dict[str, Any] = dict(rtol=1e-10, atol=1e-12)
# Both ways to a solution, to rounding.
CONVERGED: dict[str, dict[str, Any]] = {"sweeps": dict(iterations=100), "solver": dict(tolerance=1e-11)}


@pytest.fixture(params=CONVERGED.values(), ids=CONVERGED.keys())
def converged(request) -> dict[str, Any]:
    return request.param


@pytest.fixture(params=["stored", "in blocks"])
def memory(request, monkeypatch) -> str:
    """On the CPU few scores are stored; elsewhere, or if they are many, they are made when needed."""
    if request.param == "in blocks":
        monkeypatch.setattr(stored, "MOST_STORED", -1)
    return request.param


def draw(*shape: int, seed: int = 0, dtype=torch.float64, grad: bool = False) -> Tensor:
    t = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return t.requires_grad_(grad)


def triple(n: int = 5, m: int = 7, d: int = 4, batch: tuple[int, ...] = (2, 3), **options: Any) -> tuple[Tensor, ...]:
    return tuple(draw(*batch, k, d, seed=s, **options) for s, k in enumerate((n, m, m)))


def some_mask(*shape: int, seed: int = 3, rate: float = 0.3) -> Tensor:
    """Bool, True = may attend; everyone may attend to someone, and be attended to."""
    allowed = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > rate
    n, m = shape[-2:]
    rows, columns = torch.arange(max(n, m)) % n, torch.arange(max(n, m)) % m
    allowed[..., rows, columns] = True
    return allowed


def solved(scores: Tensor, a: Tensor, b: Tensor, tau: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Weights of attention by the library's solver, on a stored cost in float64."""
    added = None if mask is None else forbid(~mask, dtype=torch.float64)
    s = sf.sinkhorn(a, b, cost=-scores, epsilon=1.0, tau_b=tau, mask=added, tolerance=1e-12, on_failure="raise")
    masked = scores if added is None else scores - added
    return (s.f.unsqueeze(-1) + masked + s.g.unsqueeze(-2)).exp() * b.unsqueeze(-2)


# Closed forms ---------------------------------------------------------------------------------------------------------


def test_equal_scores_give_every_key_its_share():
    b = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    plan = attention_plan(torch.zeros(4, 2, dtype=torch.float64), draw(3, 2), key_weights=b, iterations=1)
    torch.testing.assert_close(plan.weights(), b.expand(4, 3), **CLOSE)


def test_one_query_attends_by_the_shares():
    b = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    plan = attention_plan(draw(1, 2), draw(3, 2), key_weights=b, iterations=1)
    torch.testing.assert_close(plan.weights(), b.unsqueeze(0), **CLOSE)


def test_two_by_two(converged):
    """The odds ratio p^2 / (1 - p)^2 is that of exp(S)."""
    q, k = draw(2, 3), draw(2, 3, seed=1)
    s = q @ k.T
    odds = ((s[0, 0] + s[1, 1] - s[0, 1] - s[1, 0]) / 2).exp()
    p = odds / (1 + odds)
    expected = torch.stack([torch.stack([p, 1 - p]), torch.stack([1 - p, p])])
    torch.testing.assert_close(attention_plan(q, k, scale=1.0, **converged).weights(), expected, **CLOSE)


def test_permutation_of_orthogonal_tokens_at_low_temperature():
    q = torch.eye(4, dtype=torch.float64)
    weights = attention_plan(q, q[[2, 0, 3, 1]], scale=50.0, iterations=1).weights()
    torch.testing.assert_close(weights, q[[2, 0, 3, 1]].T, rtol=0, atol=1e-12)


# Oracles --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [1.0, 0.9, 0.3, 0.0])
@pytest.mark.parametrize("masked", [False, True])
def test_the_solver_of_the_library(tau, masked, converged, memory):
    q, k, v = triple()
    mask = some_mask(2, 3, 5, 7) if masked else None
    plan = attention_plan(q, k, mask, tau=tau, **converged)
    a, b = torch.full((2, 3, 5), 1 / 5, dtype=q.dtype), torch.full((2, 3, 7), 1 / 7, dtype=q.dtype)
    expected = solved(q @ k.mT / 2, a, b, tau, mask)
    torch.testing.assert_close(plan.weights(), expected, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(
        sinkhorn_attention(q, k, v, mask, tau=tau, **converged), expected @ v, rtol=1e-8, atol=1e-8
    )
    torch.testing.assert_close(plan @ v, expected @ v, rtol=1e-8, atol=1e-8)


def test_pot():
    q, k, _ = triple(batch=())
    a, b = torch.tensor([1.0, 2, 3, 4, 5]).double() / 15, torch.tensor([3.0, 1, 1, 2, 2, 0.5, 0.5]).double() / 10
    reference = ot.sinkhorn(a.numpy(), b.numpy(), -(q @ k.T / 2).numpy(), 1.0, stopThr=1e-13, numItermax=10_000)
    plan = attention_plan(q, k, query_weights=a, key_weights=3 * b, iterations=200)
    torch.testing.assert_close(a.unsqueeze(-1) * plan.weights(), torch.as_tensor(reference), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(plan.key_mass, b, **CLOSE)
    torch.testing.assert_close(plan.key_weights, b, **CLOSE)
    torch.testing.assert_close(plan.query_weights, a, **CLOSE)


@pytest.mark.parametrize(
    "mask",
    [None, "bool", "additive", "one for all heads", "keys", "additive on keys", "causal"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_sided_is_softmax(mask, dtype):
    q, k, v = triple(dtype=dtype)
    keys = torch.tensor([1, 1, 0, 1, 1, 0, 1], dtype=torch.bool)
    masks = {
        "bool": some_mask(2, 3, 5, 7),
        "additive": draw(2, 3, 5, 7, seed=9, dtype=dtype).masked_fill(~some_mask(2, 3, 5, 7), -torch.inf),
        "one for all heads": some_mask(5, 7),
        "keys": keys.expand(2, 1, 1, 7),
        "additive on keys": draw(2, 1, 1, 7, seed=9, dtype=dtype).masked_fill(~keys, -torch.inf),
    }
    options = dict(attn_mask=masks.get(mask), is_causal=mask == "causal")
    ours = sinkhorn_attention(q, k, v, marginals="queries", **options)
    theirs = functional.scaled_dot_product_attention(q, k, v, **options)
    tight = CLOSE if dtype == torch.float64 else dict(rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours, theirs, **tight)
    torch.testing.assert_close(sinkhorn_attention(q, k, v, tau=0, **options), theirs, **tight)
    torch.testing.assert_close(attention_plan(q, k, marginals="queries", **options) @ v, theirs, **tight)


def test_scale_is_one_over_the_temperature():
    q, k, v = triple()
    torch.testing.assert_close(
        sinkhorn_attention(q, k, v, scale=3.0), sinkhorn_attention(3 * q, k, v, scale=1.0), **CLOSE
    )
    torch.testing.assert_close(sinkhorn_attention(q, k, v), sinkhorn_attention(q, k, v, scale=0.5), **CLOSE)


def test_grouped_heads_equal_repeated_ones(converged, memory):
    q, k, v = draw(2, 6, 5, 4), draw(2, 2, 7, 4, seed=1), draw(2, 2, 7, 3, seed=2)
    mask, weights = some_mask(2, 6, 5, 7), torch.rand(7, generator=torch.Generator().manual_seed(0)).double()
    options = dict(key_weights=weights, **converged)
    wide = (t.repeat_interleave(3, 1) for t in (k, v))
    for m in (None, mask):
        torch.testing.assert_close(
            sinkhorn_attention(q, k, v, m, enable_gqa=True, tau=0.9, **options),
            sinkhorn_attention(q, *(t.repeat_interleave(3, 1) for t in (k, v)), m, tau=0.9, **options),
            **CLOSE,
        )
    torch.testing.assert_close(
        sinkhorn_attention(q, k, v, enable_gqa=True, marginals="queries"),
        functional.scaled_dot_product_attention(q, *wide),
        **CLOSE,
    )


def test_batch_axes_broadcast(memory):
    q, k, v = draw(2, 3, 5, 4), draw(3, 7, 4, seed=1), draw(1, 3, 7, 2, seed=2)
    together = sinkhorn_attention(q, k, v)
    assert together.shape == (2, 3, 5, 2)
    torch.testing.assert_close(together[1, 2], sinkhorn_attention(q[1, 2], k[2], v[0, 2]), **CLOSE)


# Laws -----------------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from([1.0, 0.7, 0.2]),
    st.integers(0, 5),
    st.booleans(),
)
def test_rows_are_exact_and_the_error_is_what_is_stated(n, m, d, tau, seed, masked):
    q, k = draw(2, n, d, seed=seed), draw(2, m, d, seed=seed + 10)
    mask = torch.rand(2, n, m, generator=torch.Generator().manual_seed(seed)) > 0.4 if masked else None
    for options in (dict(iterations=1), dict(iterations=4)):
        plan = attention_plan(q, k, mask, tau=tau, **options)
        weights = plan.weights()
        assert bool((weights >= 0).all())
        live = plan.query_weights > 0
        torch.testing.assert_close(weights.sum(-1)[live], torch.ones(int(live.sum())).double(), **CLOSE)
        mass = (plan.query_weights.unsqueeze(-1) * weights).sum(-2)
        torch.testing.assert_close(plan.key_mass[live.any(-1)], mass[live.any(-1)], **CLOSE)
        error = (mass - plan.key_weights).abs().sum(-1)
        torch.testing.assert_close(plan.marginal_error[live.any(-1)], error[live.any(-1)], **CLOSE)
        if mask is not None:
            assert float(weights[~mask].abs().sum()) == 0
        else:
            torch.testing.assert_close(plan.coverage, mass / plan.key_weights, **CLOSE)


def test_doubly_stochastic():
    q, k, _ = triple(6, 6)
    weights = attention_plan(q, k, iterations=60).weights()
    for axis in (-1, -2):
        torch.testing.assert_close(weights.sum(axis), torch.ones(2, 3, 6).double(), **CLOSE)


def test_errors_shrink_with_sweeps_and_five_are_enough_for_a_fresh_layer():
    torch.manual_seed(0)
    x = draw(8, 32, 64)
    errors = []
    for iterations in (1, 2, 3, 4, 5, None):
        torch.manual_seed(0)
        layer = SinkhornAttention(64, 4, batch_first=True, iterations=iterations, dtype=torch.float64)
        errors.append(float(layer.plan(x, x).marginal_error.detach().max()))
    assert errors[:-1] == sorted(errors[:-1], reverse=True)
    assert errors[-1] == errors[-2] < 1e-6


def test_penalty_lies_between_softmax_and_coupling():
    q, k, _ = triple(6, 6)
    errors = [float(attention_plan(q, k, tau=t, iterations=100).marginal_error.mean()) for t in (0, 0.3, 0.6, 0.9, 1)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-12


def test_permutation(converged):
    q, k, v = triple()
    rows, columns = torch.tensor([3, 1, 0, 4, 2]), torch.tensor([6, 2, 0, 1, 5, 3, 4])
    mask = some_mask(2, 3, 5, 7)
    moved = sinkhorn_attention(
        q[..., rows, :], k[..., columns, :], v[..., columns, :], mask[..., rows, :][..., columns], **converged
    )
    torch.testing.assert_close(
        moved, sinkhorn_attention(q, k, v, mask, **converged)[..., rows, :], rtol=1e-8, atol=1e-9
    )


@pytest.mark.parametrize("junk", [1e30, math.nan])
@pytest.mark.parametrize("how", ["weights", "bool mask", "key mask", "additive mask"])
def test_padding_changes_nothing(junk, how, converged):
    q, k, v = triple()
    padded_q = torch.cat([q, torch.full((2, 3, 2, 4), junk).double()], -2)
    padded_k, padded_v = (torch.cat([t, torch.full((2, 3, 3, 4), junk).double()], -2) for t in (k, v))
    real_q, real_k = torch.arange(7) < 5, torch.arange(10) < 7
    pairs = real_q.unsqueeze(-1) & real_k
    options: dict[str, Any] = {
        "weights": dict(query_weights=real_q.double(), key_weights=real_k.double()),
        "bool mask": dict(attn_mask=pairs),
        "key mask": dict(attn_mask=real_k.expand(2, 1, 1, 10), query_weights=real_q.double()),
        "additive mask": dict(attn_mask=torch.zeros(7, 10).masked_fill(~pairs, torch.finfo(torch.float32).min)),
    }[how]
    for tau in (1.0, 0.8):
        plan = attention_plan(padded_q, padded_k, tau=tau, **options, **converged)
        out = plan @ padded_v
        torch.testing.assert_close(
            out[..., :5, :], sinkhorn_attention(q, k, v, tau=tau, **converged), rtol=1e-8, atol=1e-9
        )
        assert bool(out.isfinite().all())
        assert float(plan.key_mass[..., 7:].abs().max()) == 0
        assert float(plan.query_weights[..., 5:].abs().max()) == 0


def test_padding_has_no_gradient():
    q, k, v = (t.detach().requires_grad_() for t in triple())
    real = torch.tensor([1, 1, 1, 1, 1, 0, 0], dtype=torch.bool)
    with torch.no_grad():
        k[..., 5:, :] = math.nan
        v[..., 5:, :] = math.nan
    for options in (dict(), dict(tolerance=1e-9)):
        out = sinkhorn_attention(q, k, v, real.expand(1, 7), **options)
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        assert all(bool(g.isfinite().all()) for g in grads)
        assert float(grads[1][..., 5:, :].abs().max()) == 0
        assert float(grads[2][..., 5:, :].abs().max()) == 0


def test_splitting_a_key_splits_its_weight(converged):
    q, k, v = triple(batch=())
    b = torch.tensor([0.1, 0.2, 0.1, 0.1, 0.2, 0.2, 0.1]).double()
    twice = torch.cat([k, k[:1]]), torch.cat([v, v[:1]]), torch.cat([b[:1] * 0.3, b[1:], b[:1] * 0.7])
    torch.testing.assert_close(
        sinkhorn_attention(q, *twice[:2], key_weights=twice[2], **converged),
        sinkhorn_attention(q, k, v, key_weights=b, **converged),
        rtol=1e-8,
        atol=1e-9,
    )


def test_a_bias_of_keys_alone_means_nothing_to_a_coupling(converged):
    q, k, v = triple()
    bias = draw(2, 3, 1, 7, seed=8)
    plain = sinkhorn_attention(q, k, v, **converged)
    torch.testing.assert_close(sinkhorn_attention(q, k, v, bias, **converged), plain, rtol=1e-8, atol=1e-9)
    wide = bias.expand(2, 3, 5, 7)
    for tau in (0.7, 0.0):
        by_key, by_pair = (sinkhorn_attention(q, k, v, b, tau=tau, **converged) for b in (bias, wide))
        torch.testing.assert_close(by_key, by_pair, rtol=1e-8, atol=1e-9)
        assert float((by_key - sinkhorn_attention(q, k, v, tau=tau, **converged)).abs().max()) > 1e-3


def test_batch_equals_loop(memory):
    q, k, v = triple()
    mask = some_mask(2, 3, 5, 7)
    together = sinkhorn_attention(q, k, v, mask)
    for i in range(2):
        for j in range(3):
            alone = sinkhorn_attention(q[i, j], k[i, j], v[i, j], mask[i, j])
            torch.testing.assert_close(together[i, j], alone, **CLOSE)


# Derivatives ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "masked"),
    [
        (dict(iterations=1), False),
        (dict(iterations=2), True),
        (dict(iterations=2, tau=0.6), False),
        (dict(iterations=3, tau=0.6), True),
        (dict(tolerance=1e-12), False),
        (dict(tolerance=1e-12), True),
        (dict(tolerance=1e-12, tau=0.6), True),
        (dict(tolerance=1e-4, gradient="unrolled"), False),
        (dict(marginals="queries"), True),
    ],
    ids=str,
)
def test_gradients(options, masked, memory):
    q, k, v = triple(3, 4, 2, (), grad=True)
    bias = draw(3, 4, seed=7).masked_fill(~some_mask(3, 4), -torch.inf) if masked else None
    assert torch.autograd.gradcheck(lambda *t: sinkhorn_attention(*t, bias, **options), (q, k, v), atol=1e-6, rtol=1e-5)


def test_gradients_of_weights_and_bias(memory):
    q, k, v = triple(3, 4, 2, ())
    logits, bias = draw(4, seed=5, grad=True), draw(3, 4, seed=6, grad=True)
    keys = draw(1, 4, seed=7, grad=True)

    def value(logits, bias):
        return sinkhorn_attention(q, k, v, bias, key_weights=logits.softmax(-1), iterations=3)

    def value_of_keys(keys):
        return sinkhorn_attention(q, k, v, keys, tau=0.5, iterations=3)

    assert torch.autograd.gradcheck(value, (logits, bias))
    assert torch.autograd.gradcheck(value_of_keys, (keys,))


@pytest.mark.parametrize("tau", [1.0, 0.8])
@pytest.mark.parametrize("masked", [False, True])
def test_implicit_equals_unrolled(tau, masked, memory):
    q, k, v = triple(grad=True)
    mask = some_mask(2, 3, 5, 7) if masked else None
    gradients = []
    for options in CONVERGED.values():
        out = sinkhorn_attention(q, k, v, mask, tau=tau, **options)
        gradients.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for implicit, unrolled in zip(*gradients, strict=True):
        torch.testing.assert_close(implicit, unrolled, rtol=1e-7, atol=1e-8)


# Masks that are hostile -----------------------------------------------------------------------------------------------


def test_causal_with_hard_marginals_is_refused_and_why():
    q, k, v = triple(5, 5)
    with pytest.raises(ConfigError, match=r"identity.*marginals='queries'.*tau < 1"):
        sinkhorn_attention(q, k, v, is_causal=True)
    with pytest.raises(ConfigError, match="identity"):
        attention_plan(q, k, is_causal=True, tau=1.0)
    triangle = torch.ones(5, 5, dtype=torch.bool).tril()
    identity = attention_plan(q, k, triangle, tolerance=1e-9).weights()
    torch.testing.assert_close(identity, torch.eye(5).double().expand_as(identity), rtol=0, atol=1e-8)


def test_only_rows_alone_are_causal():
    """A penalty admits the mask, but shares of keys tell earlier outputs of later queries."""
    q, k, v = triple(5, 5)
    later = q.clone()
    later[..., -1, :] += 1
    for options, leaks in ((dict(marginals="queries"), False), (dict(tau=0.8), True)):
        before, after = (sinkhorn_attention(t, k, v, is_causal=True, **options) for t in (q, later))
        assert (float((before - after)[..., :-1, :].abs().max()) > 1e-4) == leaks
        weights = attention_plan(q, k, is_causal=True, **options).weights()
        assert float(weights.triu(1).abs().max()) == 0
    both = sinkhorn_attention(q, k, v, some_mask(5, 5), is_causal=True, tau=0.5)
    torch.testing.assert_close(both, sinkhorn_attention(q, k, v, some_mask(5, 5).tril(), tau=0.5), **CLOSE)


def test_a_mask_without_coupling_stays_finite_and_says_so(memory):
    """Two of three queries may see the first key only."""
    q, k, v = triple(3, 3, grad=True)
    mask = torch.tensor([[1, 0, 0], [1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    for iterations in (1, 5, 100):
        plan = attention_plan(q, k, mask, iterations=iterations)
        out = plan @ v
        torch.testing.assert_close(plan.weights().sum(-1), torch.ones(2, 3, 3).double(), **CLOSE)
        assert float(plan.marginal_error.detach().min()) >= 2 / 3 - 1e-9
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
        assert all(bool(g.isfinite().all()) for g in grads)
    with pytest.raises(InfeasibleError):
        sinkhorn_attention(q, k, v, mask, tolerance=1e-6)


@pytest.mark.parametrize("kind", ["bool", "-inf", "-1e9", "lowest"])
@pytest.mark.parametrize("options", [dict(), dict(tolerance=1e-9), dict(tau=0.5), dict(marginals="queries")], ids=str)
def test_a_query_that_sees_nothing_gets_zeros_and_a_key_nobody_sees_nothing(kind, options, memory):
    q, k, v = triple(grad=True)
    mask = torch.ones(2, 3, 5, 7, dtype=torch.bool)
    mask[0, 0, 2] = False
    mask[1, :, :, 3] = False
    mask[1, 2] = False
    value = {"-inf": -math.inf, "-1e9": -1e9, "lowest": torch.finfo(torch.float64).min}.get(kind)
    given_mask = mask if value is None else torch.zeros(2, 3, 5, 7).double().masked_fill(~mask, value)
    with torch.no_grad():
        plan = attention_plan(q, k, given_mask, **options)
    out = sinkhorn_attention(q, k, v, given_mask, **options)
    torch.testing.assert_close(out, plan @ v, **CLOSE)
    assert int(out[0, 0, 2].count_nonzero()) == int(out[1, 2].count_nonzero()) == 0
    assert float(plan.key_mass[1, :2, 3].abs().max()) == 0
    without = [0, 1, 2, 4, 5, 6]
    alone = sinkhorn_attention(q[1, 0], k[1, 0][without], v[1, 0][without], **options)
    torch.testing.assert_close(out[1, 0], alone, rtol=1e-7, atol=1e-8)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(bool(g.isfinite().all()) for g in grads)


def test_keys_that_only_padded_queries_see_are_padding():
    q, k, v = triple(3, 3, batch=())
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.bool)
    a = torch.tensor([1.0, 1.0, 0.0]).double()
    plan = attention_plan(q, k, mask, query_weights=a, iterations=50)
    torch.testing.assert_close(plan.key_mass, torch.tensor([0.5, 0.5, 0.0]).double(), **CLOSE)
    torch.testing.assert_close((plan @ v)[2], torch.zeros(4).double())


def test_everything_padded(memory):
    q, k, v = triple(grad=True)
    keys = torch.tensor([True, False]).reshape(2, 1, 1, 1).expand(2, 1, 1, 7)
    for options in (dict(), dict(tolerance=1e-8), dict(marginals="queries")):
        out = sinkhorn_attention(q, k, v, keys, **options)
        assert int(out[1].count_nonzero()) == 0
        assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(out.sum(), (q, k, v)))
        nobody = sinkhorn_attention(q, k, v, query_weights=torch.zeros(5).double(), **options)
        assert bool(nobody.isfinite().all())


@pytest.mark.parametrize("size", [1.0, 30.0, 1e3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_scores(size, dtype, monkeypatch):
    """Where the range of the dtype does not suffice for stored kernels, the log domain steps in."""
    q, k, v = (t.detach().requires_grad_() for t in triple(dtype=dtype))
    found = []
    for most in (stored.MOST_STORED, -1):
        monkeypatch.setattr(stored, "MOST_STORED", most)
        out = sinkhorn_attention(size * q, k, v, iterations=20)
        found.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    assert all(bool(t.isfinite().all()) for t in found[0])
    if size <= 30:
        tight = dict(rtol=1e-9, atol=1e-10) if dtype == torch.float64 else dict(rtol=1e-3, atol=2e-4 * size)
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, **tight)


@pytest.mark.parametrize("size", [1.0, 40.0, 1e5])
def test_a_stored_kernel_is_right_or_none(size):
    s = size * draw(4, 6, 5, dtype=torch.float32)
    a, b = (torch.full((4, k), -math.log(k)) for k in (6, 5))
    found = stored.sweeps(s, a, b, b, 1.0, 10)
    assert found is not None
    h = b.double()
    for _ in range(10):
        f = -torch.logsumexp(s.double() + h.unsqueeze(-2), -1)
        h = b.double() - torch.logsumexp(s.double() + (f + a.double()).unsqueeze(-1), -2)
    torch.testing.assert_close(found[1].double(), h, rtol=1e-5, atol=1e-6 * size + 1e-5)
    # Without a coupling the factors of these double at every sweep.
    refused = torch.tensor([[0, 1, 1], [0, 1, 1], [0, 0, 0]]).bool()
    s = torch.zeros(1, 3, 3).masked_fill(refused, -torch.inf)
    third = torch.full((1, 3), -math.log(3))
    assert stored.sweeps(s, third, third, third, 1.0, 5) is not None
    assert stored.sweeps(s, third, third, third, 1.0, 100) is None


@pytest.mark.parametrize("options", [{}, {"tau": 0.5}, {"iterations": 1}])
def test_second_derivatives_of_stored_sweeps(options):
    q, k, v = triple(grad=True)
    assert torch.autograd.gradgradcheck(lambda *t: sinkhorn_attention(*t, **options), (q, k, v))


def test_transforms_of_functions():
    q, k, v = triple()
    q2 = q.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(sinkhorn_attention(q2, k, v).square().sum(), q2)
    found = torch.func.grad(lambda q: sinkhorn_attention(q, k, v).square().sum())(q)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-12)
    mapped = torch.func.vmap(sinkhorn_attention)(*(torch.stack((x, 2 * x)) for x in (q, k, v)))
    assert torch.allclose(mapped[1], sinkhorn_attention(2 * q, 2 * k, 2 * v), rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [1e3, 1e5, 1e6])
def test_rows_are_exact_for_sharp_scores(scale, generator):
    q, k = torch.randn(7, 8, generator=generator), torch.randn(9, 8, generator=generator)
    assert (attention_plan(q, k, scale=scale).weights().sum(-1) - 1).abs().max() < 1e-6
    few = attention_plan(q, k, scale=scale, marginals="queries").weights()
    assert torch.allclose(few, (scale * q @ k.T).softmax(-1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("wrong", [-3.0, float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["query_weights", "key_weights"])
def test_weights_that_are_none(side, wrong):
    q, k, v = triple()
    weights = torch.ones((q if side == "query_weights" else k).shape[-2], dtype=q.dtype)
    weights[1] = wrong
    with pytest.raises(WeightError, match=f"expected {side} finite and non-negative, received {wrong:g}"):
        sinkhorn_attention(q, k, v, **{side: weights})


def test_only_proportions_of_weights_count(generator):
    q, k, v = (t.float() for t in triple())
    weights = torch.rand(k.shape[-2], generator=generator)
    found = sinkhorn_attention(q, k, v, key_weights=weights * 1e38)
    assert torch.allclose(found, sinkhorn_attention(q, k, v, key_weights=weights), rtol=0, atol=1e-6)


def test_a_mask_of_nan_is_no_prohibition():
    q, k, v = triple()
    bias = torch.zeros(q.shape[-2], k.shape[-2], dtype=q.dtype)
    bias[0, 0] = float("nan")
    assert sinkhorn_attention(q, k, v, bias).isnan().any()


def test_a_causal_call_checks_its_mask_first():
    q, k, v = triple()
    with pytest.raises(DTypeError, match="expected attn_mask as bool"):
        sinkhorn_attention(q, k, v, torch.ones(q.shape[-2], k.shape[-2], dtype=torch.long), is_causal=True, tau=0.5)
    with pytest.raises(ShapeError, match="expected attn_mask to broadcast"):
        sinkhorn_attention(q, k, v, torch.ones(99, k.shape[-2], dtype=torch.bool), is_causal=True, tau=0.5)


def test_options_that_are_none():
    q, k, v = triple()
    with pytest.raises(ConfigError, match="expected a finite scale, received nan"):
        sinkhorn_attention(q, k, v, scale=float("nan"))
    with pytest.raises(ConfigError, match=r"expected options of marginals, .*, received foo"):
        replace_attention(nn.TransformerEncoderLayer(8, 2), foo=1)


def test_the_module_checks_sizes_and_dtypes():
    layer, x = SinkhornAttention(16, 4, batch_first=True), torch.randn(3, 7, 16)
    for wrong in (
        (x[..., :8], x, x),
        (x, x[..., :8], x),
        (x, x, x[..., :8]),
        (x, x[:1], x[:1]),
        (x, x, x[:1]),
        (x, x, x[0]),
    ):
        with pytest.raises(ShapeError, match="expected"):
            layer(*wrong)
    with pytest.raises(DTypeError, match=r"expected a query of dtype torch\.float32 as the parameters"):
        layer(x.double(), x.double(), x.double())
    shapes = SinkhornAttention(16, 4, batch_first=True, device="meta")
    assert shapes(*3 * (x.to("meta"),))[0].shape == (3, 7, 16)


def test_the_solver_complains_as_ever():
    q, k, v = triple()
    with pytest.warns(ConvergenceWarning, match="MAX_ITERATIONS"):
        sinkhorn_attention(50 * q, k, v, tolerance=1e-9, iterations=2)
    k[0, 0, 0] = math.nan
    with pytest.raises(NonFiniteError):
        sinkhorn_attention(q, k, v, tolerance=1e-6)
    assert bool(sinkhorn_attention(q, k, v)[0, 0].isnan().all())
    assert bool(sinkhorn_attention(q, k, v)[1:].isfinite().all())


@pytest.mark.parametrize("options", [dict(), dict(tolerance=1e-6), dict(marginals="queries")], ids=str)
def test_nothing_at_all(options, memory):
    for batch, n, m in (((0, 3), 5, 7), ((2, 3), 0, 7), ((2, 3), 5, 0)):
        q, k, v = triple(n, m, batch=batch, grad=True)
        mask = torch.ones(n, m, dtype=torch.bool)
        for given_mask in (None, mask):
            out = sinkhorn_attention(q, k, v, given_mask, **options)
            assert out.shape == (*batch, n, 4)
            assert int(out.count_nonzero()) == 0
            out.sum().backward()


# Dtypes, dropout, compilation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [dict(), dict(tolerance=1e-4), dict(tau=0.5)], ids=str)
def test_half_precision_is_read_and_never_summed_in(dtype, options, memory):
    q, k, v = triple(dtype=dtype)
    mask = some_mask(2, 3, 5, 7)
    out = sinkhorn_attention(q, k, v, mask, **options)
    assert out.dtype == dtype
    exact = sinkhorn_attention(q.float(), k.float(), v.float(), mask, **options)
    torch.testing.assert_close(out, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-3)
    assert attention_plan(q, k, mask, **options).h.dtype == torch.float32


def test_autocast_lowers_inputs_and_outputs_only(memory):
    q, k, v = triple(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = sinkhorn_attention(q, k, v)
        plan = attention_plan(q, k)
        error = plan.marginal_error
    assert out.dtype == torch.bfloat16
    low = [t.bfloat16() for t in (q, k, v)]
    torch.testing.assert_close(out, sinkhorn_attention(*low), rtol=0, atol=0)
    torch.testing.assert_close(error, attention_plan(*low[:2]).marginal_error, rtol=0, atol=0)


def test_dropout_drops_weights_and_keeps_the_mean():
    torch.manual_seed(0)
    q, k, _ = triple(3, 4, batch=())
    q, k = q.expand(4000, 3, 4), k.expand(4000, 4, 4)
    eye = torch.eye(4).double().expand(4000, 4, 4)
    for options in (dict(), dict(marginals="queries")):
        dropped = sinkhorn_attention(q, k, eye, dropout_p=0.25, **options)
        weights = attention_plan(q, k, **options).weights()
        assert abs(float((dropped == 0).double().mean()) - 0.25) < 0.01
        torch.testing.assert_close(dropped.mean(0), weights[0], rtol=0.06, atol=0.005)
        kept = dropped != 0
        torch.testing.assert_close(dropped[kept], (weights / 0.75)[kept], **CLOSE)
    assert float(sinkhorn_attention(q[0], k[0], eye[0], dropout_p=1.0).abs().max()) == 0


@pytest.mark.parametrize(
    ("options", "masked"),
    [(dict(iterations=2), False), (dict(iterations=1, tau=0.5), True), (dict(marginals="queries"), True)],
    ids=str,
)
def test_compiles_without_a_break(options, masked):
    torch._dynamo.reset()
    q, k, v = triple(grad=True)
    mask = some_mask(5, 7) if masked else None
    compiled = torch.compile(lambda *t: sinkhorn_attention(*t, mask, **options), fullgraph=True, backend="aot_eager")
    ours, plain = compiled(q, k, v), sinkhorn_attention(q, k, v, mask, **options)
    torch.testing.assert_close(ours, plain, **CLOSE)
    for a, b in zip(*(torch.autograd.grad(t.square().sum(), (q, k, v)) for t in (ours, plain)), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


# The module -----------------------------------------------------------------------------------------------------------


def twins(embed_dim: int = 8, num_heads: int = 2, *, sharp: float = 3.0, **options: Any):
    """torch's module and ours with the same weights; scores sharper than those of a fresh layer, biases not zero."""
    torch.manual_seed(0)
    own = {k: options.pop(k) for k in ("marginals", "tau", "iterations", "tolerance", "gradient") if k in options}
    theirs = nn.MultiheadAttention(embed_dim, num_heads, **options)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.copy_(torch.randn_like(p) if name.endswith("bias") else sharp * p)
    ours = SinkhornAttention(embed_dim, num_heads, **options, **own)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("options", [{}, dict(bias=False), dict(kdim=5, vdim=6), dict(kdim=5, bias=False)], ids=str)
def test_parameters_are_those_of_torch(options):
    torch.manual_seed(1)
    theirs = nn.MultiheadAttention(8, 2, **options)
    torch.manual_seed(1)
    ours = SinkhornAttention(8, 2, **options)
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=0, atol=0)
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("padding", [None, "bool", "additive"])
@pytest.mark.parametrize("mask", [None, "bool", "additive", "for each head", "causal"])
def test_one_sided_module_is_torchs(batch_first, batched, padding, mask):
    theirs, ours = twins(marginals="queries", batch_first=batch_first, dtype=torch.float64)
    x, y = draw(3, 5, 8), draw(3, 7, 8, seed=1)
    pads = torch.zeros(3, 7, dtype=torch.bool)
    pads[0, 5:] = pads[2, 3:] = True
    refused = ~some_mask(6, 5, 7)
    refused[..., 0] = False
    masks = {
        "bool": refused[0],
        "additive": draw(5, 7, seed=4).masked_fill(refused[0], -torch.inf),
        "for each head": refused if batched else refused[:2],
        "causal": torch.ones(5, 7, dtype=torch.bool).triu(1),
    }
    options: dict[str, Any] = dict(attn_mask=masks.get(mask), is_causal=mask == "causal")
    if padding == "additive":
        additive = draw(3, 7, seed=5).masked_fill(pads, -torch.inf)
        options["attn_mask"] = None if mask in (None, "bool", "for each head", "causal") else options["attn_mask"]
        options["is_causal"] = False
    if padding:
        pads = additive if padding == "additive" else pads
        if mask == "additive" and padding == "bool":
            pads = torch.zeros(3, 7).double().masked_fill(pads, -torch.inf)  # torch warns of masks of two types
        options["key_padding_mask"] = pads if batched else pads[0]
    if not batched:
        x, y = x[0], y[0]
    elif not batch_first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    for need_weights in (False, True):
        for average in (True, False):
            how = dict(need_weights=need_weights, average_attn_weights=average, **options)
            expected, found = theirs(x, y, y, **how), ours(x, y, y, **how)
            torch.testing.assert_close(found[0], expected[0], **CLOSE)
            assert (found[1] is None) == (not need_weights)
            if need_weights:
                torch.testing.assert_close(found[1], expected[1], **CLOSE)


def test_masks_of_two_types_go_together():
    theirs, ours = twins(dtype=torch.float64, batch_first=True, tau=0.7)
    del theirs
    x = draw(3, 5, 8)
    pads = torch.arange(5).expand(3, 5) >= 4
    refused = ~some_mask(5, 5)
    additive = torch.zeros(5, 5).double().masked_fill(refused, -torch.inf)
    both = [ours(x, x, x, pads, attn_mask=m)[0] for m in (refused, additive)]
    torch.testing.assert_close(*both, **CLOSE)
    other = ours(x, x, x, torch.zeros(3, 5).double().masked_fill(pads, -1e9), attn_mask=refused)[0]
    torch.testing.assert_close(other, both[0], **CLOSE)


@pytest.mark.parametrize("options", [dict(kdim=5, vdim=6), dict(bias=False), dict(kdim=8, vdim=3)], ids=str)
def test_other_projections(options):
    theirs, ours = twins(marginals="queries", **options)
    q = draw(4, 3, 8, dtype=torch.float32)
    k, v = (draw(6, 3, options.get(n, 8), seed=s, dtype=torch.float32) for s, n in ((1, "kdim"), (2, "vdim")))
    torch.testing.assert_close(ours(q, k, v), theirs(q, k, v), rtol=1e-5, atol=1e-6)


def test_module_is_the_function_on_projected_tokens(converged):
    _, ours = twins(dtype=torch.float64, batch_first=True, sharp=2.0, **converged)
    x, y = draw(2, 5, 8), draw(2, 6, 8, seed=1)
    weights, biases = ours.in_proj_weight.chunk(3), ours.in_proj_bias.chunk(3)
    q, k, v = (
        functional.linear(t, w, b).unflatten(-1, (2, 4)).transpose(1, 2)
        for t, w, b in zip((x, y, y), weights, biases, strict=True)
    )
    expected = ours.out_proj(sinkhorn_attention(q, k, v, **converged).transpose(1, 2).flatten(-2))
    out, weights = ours(x, y, y, average_attn_weights=False)
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(weights, ours.plan(x, y).weights(), **CLOSE)
    torch.testing.assert_close(weights.sum(-2) * 6 / 5, torch.ones(2, 2, 6).double(), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(ours(x, y, y, need_weights=False)[0], expected, **CLOSE)


@pytest.mark.parametrize("tau", [None, 0.8])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_padded_batch_equals_each_alone(tau, kind):
    """In self-attention the padding of the keys is that of the queries."""
    _, ours = twins(dtype=torch.float64, batch_first=True, iterations=20, tau=tau)
    x, lengths = draw(3, 6, 8), (6, 4, 1)
    pads = torch.arange(6) >= torch.tensor(lengths).unsqueeze(-1)
    given_pads = pads if kind == "bool" else torch.zeros(3, 6).double().masked_fill(pads, -torch.inf)
    together, weights = ours(x, x, x, given_pads)
    explicit = ours(x, x.clone(), x, given_pads, query_padding_mask=given_pads)[0]
    torch.testing.assert_close(explicit, together, **CLOSE)
    for i, n in enumerate(lengths):
        alone, own = ours(x[i, :n], *[x[i, :n]] * 2) if n % 2 else ours(x[i : i + 1, :n], *[x[i : i + 1, :n]] * 2)
        torch.testing.assert_close(together[i, :n], alone.reshape(n, 8), **CLOSE)
        torch.testing.assert_close(weights[i, :n, :n], own.reshape(n, n), **CLOSE)
    forgotten = ours(x, x.clone(), x, given_pads)[0]
    assert float((forgotten - together)[1, :4].detach().abs().max()) > 1e-4


def test_grouped_heads_of_the_module():
    torch.manual_seed(0)
    grouped = SinkhornAttention(12, 6, num_key_value_heads=2, batch_first=True, dtype=torch.float64)
    assert grouped.k_proj_weight.shape == grouped.v_proj_weight.shape == (4, 12)
    assert grouped.in_proj_bias.shape == (20,)
    full = SinkhornAttention(12, 6, batch_first=True, dtype=torch.float64)

    def repeated(t: Tensor) -> Tensor:
        return t.unflatten(0, (2, 2)).repeat_interleave(3, 0).flatten(0, 1)

    with torch.no_grad():
        grouped.in_proj_bias.normal_()
        wide = [grouped.q_proj_weight, repeated(grouped.k_proj_weight), repeated(grouped.v_proj_weight)]
        full.in_proj_weight.copy_(torch.cat(wide))
        bq, bk, bv = grouped.in_proj_bias.split([12, 4, 4])
        full.in_proj_bias.copy_(torch.cat([bq, repeated(bk), repeated(bv)]))
    full.out_proj = grouped.out_proj
    x = draw(2, 5, 12)
    torch.testing.assert_close(grouped(x, x, x), full(x, x, x), **CLOSE)
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        SinkhornAttention(12, 6, num_key_value_heads=4)


def test_blind_queries_give_the_output_bias():
    _, ours = twins()
    x = draw(5, 2, 8, dtype=torch.float32)
    refused = torch.zeros(5, 5, dtype=torch.bool)
    refused[1] = True
    out, weights = ours(x, x, x, attn_mask=refused)
    torch.testing.assert_close(out[1], ours.out_proj.bias.expand(2, 8), rtol=0, atol=0)
    assert int(weights[:, 1].count_nonzero()) == 0


def test_dropout_of_the_module():
    _, ours = twins(dropout=0.5, batch_first=True)
    x = draw(2, 6, 8, dtype=torch.float32)
    torch.manual_seed(0)
    weights = ours(x, x, x, average_attn_weights=False)[1]
    assert 0.3 < float((weights == 0).float().mean()) < 0.7
    ours.eval()
    assert bool((ours(x, x, x)[1] > 0).all())
    torch.testing.assert_close(ours(x, x, x, need_weights=False)[0], ours(x, x, x)[0], rtol=1e-5, atol=1e-6)


def test_module_copies_pickles_compiles_and_prints():
    _, ours = twins(batch_first=True, tau=0.9, iterations=1, dtype=torch.float64)
    x = draw(2, 6, 8)
    expected = ours(x, x, x)[0]
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.testing.assert_close(other(x, x, x)[0], expected, rtol=0, atol=0)
    torch._dynamo.reset()
    pads = torch.arange(6).expand(2, 6) >= 4
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for options in (dict(key_padding_mask=pads), dict(need_weights=False)):
        torch.testing.assert_close(compiled(x, x, x, **options)[0], ours(x, x, x, **options)[0], **CLOSE)
    assert "num_heads=2, marginals='both', tau=0.9, iterations=1" in repr(ours)


def test_module_under_autocast():
    _, ours = twins(batch_first=True)
    x = draw(2, 6, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(x, x, x)[0]
        out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), ours(x, x, x)[0], rtol=0.05, atol=0.2)
    assert bool(ours.in_proj_weight.grad.isfinite().all())


def test_bad_modules_and_calls():
    for options in (dict(add_bias_kv=True), dict(add_zero_attn=True)):
        with pytest.raises(ConfigError, match="tau < 1"):
            SinkhornAttention(8, 2, **options)
    with pytest.raises(ConfigError, match="divisible"):
        SinkhornAttention(8, 3)
    with pytest.raises(ConfigError, match="dropout"):
        SinkhornAttention(8, 2, dropout=-0.1)
    ours = SinkhornAttention(8, 2, batch_first=True)
    x = draw(3, 5, 8, dtype=torch.float32)
    with pytest.raises(ShapeError, match="key_padding_mask"):
        ours(x, x, x, torch.zeros(5, 3, dtype=torch.bool))
    with pytest.raises(ShapeError, match="attn_mask"):
        ours(x, x, x, attn_mask=torch.zeros(3, 5, 5, dtype=torch.bool))
    with pytest.raises(DTypeError, match="True forbids"):
        ours(x, x, x, attn_mask=torch.zeros(5, 5, dtype=torch.int64))
    with pytest.raises(ShapeError, match="batch axis"):
        ours(x, x[0], x[0])
    with pytest.raises(ConfigError, match="hint"):
        ours(x, x, x, is_causal=True)
    with pytest.raises(ConfigError, match="identity"):
        ours(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(1), is_causal=True)


# In the place of torch's ----------------------------------------------------------------------------------------------


def encoder(depth: int = 2, **options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, **{"dropout": 0.0, "batch_first": True} | options)
    made = nn.TransformerEncoder(layer, depth, enable_nested_tensor=not options.get("norm_first", False))
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return made


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_calls_it_in_every_mode(norm_first, padded):
    """torch has a path of its own in eval mode without gradients, and one by nested tensors: both compute softmax."""
    model = encoder(norm_first=norm_first)
    x = draw(3, 5, 8, dtype=torch.float32)
    pads = torch.arange(5) >= torch.tensor([5, 3, 1]).unsqueeze(-1)
    options = dict(src_key_padding_mask=pads) if padded else {}
    present = ~pads if padded else torch.ones_like(pads)
    softmax = model(x, **options)
    assert replace_attention(model) == ["layers.0.self_attn", "layers.1.self_attn"]
    expected = model(x, **options)
    model.eval()
    with torch.no_grad():
        found = model(x, **options)
    with torch.inference_mode():
        layer = model.layers[0](x)
    torch.testing.assert_close(found[present], expected[present], rtol=1e-5, atol=1e-5)
    assert float((found - softmax.detach())[present].abs().max()) > 1e-3
    torch.testing.assert_close(layer, model.layers[0].train()(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", [True, False])
def test_one_sided_replacement_changes_nothing(mode):
    model = encoder()
    x, causal = draw(3, 5, 8, dtype=torch.float32), nn.Transformer.generate_square_subsequent_mask(5)
    pads = torch.arange(5) >= torch.tensor([5, 3, 2]).unsqueeze(-1)
    calls = [dict(), dict(src_key_padding_mask=pads), dict(mask=causal), dict(mask=causal, is_causal=True)]
    expected = [model.train(mode)(x, **call) for call in calls]
    replace_attention(model, marginals="queries")
    for call, before in zip(calls, expected, strict=True):
        after = model(x, **call)
        present = ~call.get("src_key_padding_mask", torch.zeros(3, 5, dtype=torch.bool))
        torch.testing.assert_close(after[present], before[present], rtol=1e-5, atol=1e-5)


def test_replacing_keeps_parameters_modes_and_devices():
    model = encoder(dtype=torch.float64).eval()
    model.layers[0].train()
    model.layers[1].self_attn.in_proj_weight.requires_grad_(False)
    before, state = dict(model.named_parameters()), model.state_dict()
    names = replace_attention(model, tau=0.5, iterations=3)
    after = dict(model.named_parameters())
    assert [*before] == [*after]
    assert all(before[name] is after[name] for name in before)
    model.load_state_dict(state)
    modules = [model.get_submodule(name) for name in names]
    assert all(isinstance(m, SinkhornAttention) and (m.tau, m.iterations) == (0.5, 3) for m in modules)
    assert [m.training for m in modules] == [True, False]
    assert not modules[1].in_proj_weight.requires_grad


def test_causal_encoder_is_refused_when_called():
    model = encoder()
    replace_attention(model)
    x = draw(3, 5, 8, dtype=torch.float32)
    with pytest.raises(ConfigError, match="identity"):
        model(x, mask=nn.Transformer.generate_square_subsequent_mask(5))


def test_decoders_are_left_unless_chosen():
    def model() -> nn.Transformer:
        torch.manual_seed(0)
        return nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

    encoding, own, cross = (
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
    )
    assert replace_attention(model()) == [encoding]
    assert replace_attention(model(), marginals="queries") == [encoding, own, cross]
    chosen = model()
    assert replace_attention(chosen, select=lambda name, _: name.endswith("multihead_attn")) == [cross]
    assert type(chosen.encoder.layers[0].self_attn) is nn.MultiheadAttention
    x, y = draw(2, 5, 8, dtype=torch.float32), draw(2, 4, 8, seed=1, dtype=torch.float32)
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    for mode in (True, False):
        assert chosen.train(mode)(x, y, tgt_mask=causal).shape == (2, 4, 8)
    with pytest.raises(ConfigError, match=r"layers.0.self_attn.*select="):
        replace_attention(model().decoder)
    with pytest.raises(ConfigError, match="chose none"):
        replace_attention(model(), select=lambda *_: False)


class Sparse(nn.MultiheadAttention):
    pass


def test_what_cannot_be_replaced_is_named():
    with pytest.raises(ConfigError, match=r"found none.*sinkhorn_attention"):
        replace_attention(nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="from_torch"):
        replace_attention(nn.MultiheadAttention(8, 2))
    with pytest.raises(ConfigError, match=r"own \(Sparse\)"):
        replace_attention(nn.ModuleDict({"own": Sparse(8, 2)}))
    mixed = nn.ModuleDict({"own": Sparse(8, 2), "plain": nn.MultiheadAttention(8, 2)})
    with pytest.warns(SinkformerWarning, match=r"replaced plain; left.*own \(Sparse\)"):
        assert replace_attention(mixed) == ["plain"]
    half = nn.ModuleDict({"good": nn.MultiheadAttention(8, 2), "bad": nn.MultiheadAttention(8, 2, add_bias_kv=True)})
    with pytest.raises(ConfigError, match=r"^bad cannot be replaced.*add_bias_kv"):
        replace_attention(half)
    assert type(half["good"]) is nn.MultiheadAttention
    with pytest.raises(ConfigError, match="tau"):
        replace_attention(encoder(), tau=2.0)


def test_a_shared_module_stays_shared():
    attention = nn.MultiheadAttention(8, 2)
    model = nn.ModuleDict({"a": attention, "b": nn.ModuleList([attention])})
    assert replace_attention(model) == ["a", "b.0"]
    assert model["a"] is model["b"][0]


# Bad arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(marginals="keys"), "'both' or 'queries'"),
        (dict(tau=1.5), "between 0"),
        (dict(tau=True), "between 0"),
        (dict(tau=math.nan), "between 0"),
        (dict(marginals="queries", tau=0.5), "no tau"),
        (dict(iterations=0), "integer >= 1"),
        (dict(iterations=2.5), "integer >= 1"),
        (dict(iterations=True), "integer >= 1"),
        (dict(tolerance=0.0), "tolerance > 0"),
        (dict(tolerance=math.nan), "tolerance > 0"),
        (dict(gradient="envelope"), "'implicit' or 'unrolled'"),
        (dict(gradient="implicit"), "pass tolerance"),
        (dict(gradient="implicit", iterations=3), "pass tolerance"),
        (dict(dropout_p=1.5), "between 0 and 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        sinkhorn_attention(*triple(), **options)
    if "dropout_p" not in options:
        with pytest.raises(ConfigError, match=message):
            SinkhornAttention(8, 2, **options)


def test_bad_tensors():
    q, k, v = triple()
    with pytest.raises(ShapeError, match="equal d"):
        sinkhorn_attention(q[..., :2], k, v)
    with pytest.raises(ShapeError, match="broadcast"):
        sinkhorn_attention(q, k[:, :2], v[:, :2])
    with pytest.raises(ShapeError, match="multiple"):
        sinkhorn_attention(q, k[:, :2], v[:, :2], enable_gqa=True)
    with pytest.raises(ShapeError, match="heads, n, d"):
        sinkhorn_attention(q[0, 0], k[0, 0], v[0, 0], enable_gqa=True)
    with pytest.raises(ShapeError, match="values"):
        sinkhorn_attention(q, k, v[..., :6, :])
    with pytest.raises(ShapeError, match="attn_mask"):
        sinkhorn_attention(q, k, v, torch.ones(7, 5, dtype=torch.bool))
    with pytest.raises(ShapeError, match="key_weights"):
        sinkhorn_attention(q, k, v, key_weights=torch.ones(5))
    with pytest.raises(DTypeError, match="True = may attend"):
        sinkhorn_attention(q, k, v, torch.ones(5, 7, dtype=torch.int64))
    with pytest.raises(DTypeError, match="query_weights"):
        sinkhorn_attention(q, k, v, query_weights=torch.ones(5, dtype=torch.int64))
    with pytest.raises(DTypeError, match="one dtype"):
        sinkhorn_attention(q, k, v.float())
    with pytest.raises(DTypeError, match="floating"):
        sinkhorn_attention(*(t.long() for t in (q, k, v)))
    with pytest.raises(DTypeError, match="use_nested_tensor"):
        sinkhorn_attention(torch.nested.nested_tensor([q[0, 0], q[0, 1, :2]], layout=torch.jagged), k, v)


def test_a_plan_prints_its_shape():
    assert repr(attention_plan(*triple()[:2])) == "AttentionPlan((2, 3, 5, 7))"
