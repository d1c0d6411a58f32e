"""The Sinkhorn Transformer: heads, independence of the encoders, autocast, training, strict storage."""

import copy
import dataclasses
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import sinkformer as sf
from sinkformer import losses, testing
from sinkformer.couplings import Coupling, EntropicCoupling
from sinkformer.errors import (
    ConfigError,
    ConvergenceWarning,
    DTypeError,
    InfeasibleError,
    ModelError,
    NonFiniteError,
    ShapeError,
)
from sinkformer.models import SinkhornTransformer, SinkhornTransformerConfig
from sinkformer.testing import random_measure

OPTIONS: dict[str, Any] = dict(rank=12, moments=True, contextual_skip=True, tensor=(2, 3))
HEADS: dict[str, dict[str, Any]] = {
    "sinkhorn": dict(head="sinkhorn"),
    "softmax": dict(head="softmax"),
    "truncated": dict(head="truncated", iterations=3),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> SinkhornTransformer:
    torch.manual_seed(seed)
    defaults: dict[str, Any] = dict(dim=2, target_dim=3, width=8, heads=2, depth=1, rank=4, epsilon=0.2)
    if dtype == torch.float64 and options.get("head", "sinkhorn") == "sinkhorn":
        defaults["tolerance"] = 1e-13
    model = SinkhornTransformer(SinkhornTransformerConfig(**defaults | options), dtype=dtype)
    with torch.no_grad():  # a cost of several epsilon, so that the heads differ
        for encoder in (model.source_encoder, model.target_encoder):
            encoder.leave.weight.mul_(2)
            encoder.skip.weight.mul_(2)
    return model


def pair(n: int = 5, m: int = 4, seed: int = 1, dtype: torch.dtype = torch.float64) -> tuple[sf.Measure, sf.Measure]:
    g = generator(seed)
    return random_measure(n, 2, generator=g, dtype=dtype), random_measure(m, 3, generator=g, dtype=dtype)


def ragged(dtype: torch.dtype = torch.float64) -> tuple[sf.Measure, sf.Measure]:
    pairs = [pair(n, m, seed=10 + n, dtype=dtype) for n, m in ((5, 3), (2, 6), (1, 1))]
    return sf.Measure.stack([mu for mu, _ in pairs]), sf.Measure.stack([nu for _, nu in pairs])


@pytest.fixture(params=HEADS.values(), ids=HEADS.keys())
def head(request) -> dict[str, Any]:
    return request.param


# Laws ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, dict(causal=True), OPTIONS], ids=["ordinary", "causal", "full"])
def test_laws(head, options):
    testing.check_coupling_model(make(**head | options), 2, target_dim=3)
    # and with the roles exchanged
    model = make(**head | options)
    testing.check_coupling_model(lambda mu, nu: model(nu, mu).mT, 3, target_dim=2)


def test_source_features_do_not_see_the_target():
    model = make()
    mu, nu = pair()
    _, other = pair(seed=2)
    assert torch.equal(model(mu, nu).source_features, model(mu, other).source_features)
    assert not torch.equal(model(mu, nu).target_features, model(mu, other).target_features)


def test_target_features_do_not_see_the_source():
    model = make()
    mu, nu = pair()
    other, _ = pair(seed=2)
    assert torch.equal(model(mu, nu).target_features, model(other, nu).target_features)
    points = mu.points.clone().requires_grad_()
    pi = model(sf.Measure(points, mu.weights), nu)
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(pi.target_features.sum(), points)


def test_the_cost_is_minus_the_inner_product():
    model, (mu, nu) = make(), pair()
    pi = model(mu, nu)
    assert isinstance(pi, EntropicCoupling)
    q, k = model.source_encoder(mu), model.target_encoder(nu)
    torch.testing.assert_close(pi.cost_rows(0, mu.n), -(q @ k.T))
    assert pi.source is mu
    assert pi.target is nu


def test_batch_equals_loop(head):
    model, (mu, nu) = make(**head), ragged()
    together = model(mu, nu)
    for k, (one, other) in enumerate(zip(mu.unstack(), nu.unstack(), strict=True)):
        alone = model(one, other)
        inside = together[k].to_dense()
        torch.testing.assert_close(inside[: one.n, : other.n], alone.to_dense(), rtol=0, atol=1e-12)
        assert bool((inside[one.n :] == 0).all())
        assert bool((inside[:, other.n :] == 0).all())


def test_empty_batch(head):
    mu, nu = sf.Measure(torch.empty(0, 3, 2), torch.empty(0, 3)), sf.Measure(torch.empty(0, 4, 3), torch.empty(0, 4))
    assert make(dtype=torch.float32, **head)(mu, nu).to_dense().shape == (0, 3, 4)


def test_density_off_the_atoms():
    """Evaluation at a probe is evaluation at an atom of weight zero."""
    model, (mu, nu) = make(), pair()
    x = torch.randn(3, 2, generator=generator(5), dtype=torch.float64)
    larger = sf.Measure(torch.cat([mu.points, x]), torch.cat([mu.weights, mu.weights.new_zeros(3)]))
    expected = model(larger, nu).density()[mu.n :]
    torch.testing.assert_close(model(mu, nu).density(x), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model(mu, nu).mT.density(y=x), expected.T, rtol=1e-9, atol=1e-9)


def test_density_of_a_batch():
    model, (mu, nu) = make(), ragged()
    x = torch.randn(3, 2, 2, generator=generator(5), dtype=torch.float64)
    together = model(mu, nu).density(x)
    for k, (one, other) in enumerate(zip(mu.unstack(), nu.unstack(), strict=True)):
        torch.testing.assert_close(together[k][:, : other.n], model(one, other).density(x[k]), rtol=1e-9, atol=1e-9)


def test_density_of_one_of_a_batch():
    model, (mu, nu) = make(), ragged()
    x = torch.randn(3, 2, 2, generator=generator(5), dtype=torch.float64)
    pi = model(mu, nu)
    torch.testing.assert_close(pi[1].density(x[1]), pi.density(x)[1], rtol=1e-9, atol=1e-9)


def test_a_detached_density_has_no_graph():
    model, (mu, nu) = make(), pair()
    assert not model(mu, nu).detach().density(mu.points[:2]).requires_grad


# Heads --------------------------------------------------------------------------------------------------------------


def test_sinkhorn_head_has_both_marginals():
    mu, nu = pair()
    pi = make()(mu, nu)
    p, q = pi.marginals()
    torch.testing.assert_close(p, mu.weights, rtol=0, atol=1e-12)
    torch.testing.assert_close(q, nu.weights, rtol=0, atol=1e-12)


def test_softmax_head_by_hand():
    """mu (x) softmax over the target of (<Q, K> / epsilon + log nu); the source marginal is exact, the other is not."""
    model, (mu, nu) = make(head="softmax"), pair()
    pi = model(mu, nu)
    logits = pi.source_features @ pi.target_features.T / 0.2
    expected = mu.weights.unsqueeze(-1) * torch.softmax(logits + nu.weights.log(), -1)
    # 0.2 is handed to the solver as it is rounded there
    torch.testing.assert_close(pi.to_dense(), expected, rtol=1e-6, atol=1e-8)
    assert float((pi.marginals()[0] - mu.weights).detach().abs().max()) <= 1e-15
    assert float((pi.marginals()[1] - nu.weights).detach().abs().sum()) > 1e-3
    assert bool(pi.solution.converged)
    assert pi.solution.taus == (1.0, 0.0)


def sweeps(cost: Tensor, a: Tensor, b: Tensor, epsilon: float, k: int) -> Tensor:
    """k sweeps from g = 0, each an update of f after (from the second on) one of g."""
    f, g = torch.zeros_like(a), torch.zeros_like(b)
    for sweep in range(k):
        if sweep:
            g = -epsilon * torch.logsumexp((f.unsqueeze(-1) - cost) / epsilon + a.log().unsqueeze(-1), -2)
        f = -epsilon * torch.logsumexp((g - cost) / epsilon + b.log(), -1)
    return a.unsqueeze(-1) * b * ((f.unsqueeze(-1) + g - cost) / epsilon).exp()


@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_truncated_head_by_hand(iterations):
    """Value and gradient of a fixed number of sweeps, compared with a loop differentiated by autograd."""
    epsilon = 0.25  # a number that float32 holds
    model, (mu, nu) = make(head="truncated", iterations=iterations, epsilon=epsilon), pair()
    pi = model(mu, nu)
    assert int(pi.solution.iterations) == iterations
    cost = -(model.source_encoder(mu) @ model.target_encoder(nu).T)
    by_hand = sweeps(cost, mu.weights, nu.weights, epsilon, iterations)
    torch.testing.assert_close(pi.to_dense(), by_hand, rtol=1e-10, atol=1e-12)
    weights = torch.rand(mu.n, nu.n, generator=generator(3), dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad((plan * weights).sum(), list(model.parameters())) for plan in (pi.to_dense(), by_hand)
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_truncated_gradient_by_differences():
    mu, nu = pair(3, 6)
    cost = torch.rand(mu.n, nu.n, generator=generator(4), dtype=torch.float64, requires_grad=True)

    def plan(cost):
        return Coupling.solve(
            mu, nu, cost=cost, epsilon=0.25, gradient="unrolled", max_iterations=2, tolerance=0.0, on_failure="ignore"
        ).to_dense()

    assert torch.autograd.gradcheck(plan, (cost,))


def test_truncated_head_is_one_function():
    """The number of sweeps is the model: the same with and without gradients."""
    model, (mu, nu) = make(head="truncated", iterations=100, epsilon=0.02), pair()
    with torch.no_grad():
        model.source_encoder.skip.weight.mul_(20)
        evaluated = model(mu, nu)
    trained = model(mu, nu)
    assert float(trained.marginal_error().detach()) > 1e-6
    assert evaluated.solution.iterations.item() == trained.solution.iterations.item() == 100
    torch.testing.assert_close(evaluated.to_dense(), trained.to_dense(), rtol=1e-12, atol=1e-14)


def test_truncated_head_tends_to_the_sinkhorn_head():
    mu, nu = pair()
    exact = make()(mu, nu).to_dense()
    deviations = [
        float((make(head="truncated", iterations=k)(mu, nu).to_dense() - exact).detach().abs().sum())
        for k in (1, 5, 200)
    ]
    assert deviations[0] > deviations[1] > deviations[2]
    assert deviations[2] < 1e-9


def test_heads_share_their_weights():
    """The head holds no parameters, so one can be exchanged for another after training."""
    model = make()
    other = make(seed=1, head="softmax")
    other.load_state_dict(model.state_dict())
    mu, nu = pair()
    torch.testing.assert_close(other(mu, nu).source_features, model(mu, nu).source_features)


def test_gradients_reach_every_parameter(head):
    model, (mu, nu) = make(**head), ragged()
    pi = model(mu, nu)
    values = torch.randn(nu.n, 2, generator=generator(7), dtype=torch.float64)
    (pi.barycentric_projection(values).square().sum() + pi.mutual_information().sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
        # A bias of K shifts the cost by a function of the source alone: no coupling with that marginal changes.
        if name != "target_encoder.leave.bias":
            assert bool((parameter.grad != 0).any()), name


def test_gradient_by_differences():
    """Through encoders and solver, in points and weights."""
    model, (mu, nu) = make(width=4, rank=2), pair(3, 4)

    def projection(x, y, logits):
        pi = model(sf.Measure(x, logits.softmax(-1)), sf.Measure(y, nu.weights))
        return pi.barycentric_projection(y)

    leaves = [t.clone().requires_grad_() for t in (mu.points, nu.points, mu.weights.log())]
    assert torch.autograd.gradcheck(projection, leaves, atol=1e-6)


def test_mask_and_warm_start():
    model, (mu, nu) = make(), pair()
    mask = torch.zeros(mu.n, nu.n, dtype=torch.float64)
    mask[0, 1] = math.inf
    pi = model(mu, nu, mask=mask)
    assert pi.to_dense()[0, 1].item() == 0
    again = model(mu, nu, mask=mask, init=pi.solution.potentials)
    torch.testing.assert_close(again.to_dense(), pi.to_dense(), rtol=1e-9, atol=1e-12)
    assert int(again.solution.iterations) < int(pi.solution.iterations)


def test_failure_is_reported():
    model, (mu, nu) = make(max_iterations=1, epsilon=0.01), pair()
    with torch.no_grad():
        model.source_encoder.skip.weight.mul_(20)
    with pytest.warns(ConvergenceWarning, match="MAX_ITERATIONS, marginal error"):
        model(mu, nu)
    with pytest.raises(sf.errors.ConvergenceError, match="raise max_iterations or epsilon"):
        model(mu, nu, on_failure="raise")
    assert not bool(model(mu, nu, on_failure="ignore").solution.converged)


def test_broken_weights_are_reported():
    model, (mu, nu) = make(), pair()
    with torch.no_grad():
        model.source_encoder.skip.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match="NaN"):
        model(mu, nu)


def test_wrong_measures():
    model, (_, nu) = make(), pair()
    with pytest.raises(ShapeError, match="expected points with 2 coordinates, received 3"):
        model(nu, nu)
    with pytest.raises(ShapeError, match=r"expected measures of one batch shape, received \(3,\) and \(\)"):
        model(ragged()[0], nu)
    with pytest.raises(DTypeError, match=r"the model's dtype, torch\.float64, received torch\.float32; .* mu\.to"):
        model(pair()[0].to(torch.float32), nu.to(torch.float32))
    with pytest.raises(DTypeError, match="expected a Measure, received Tensor"):
        model(nu.points, nu)


def test_truncated_head_reports_what_no_sweep_can_mend():
    model, (mu, nu) = make(head="truncated", iterations=3), pair()
    walls = torch.full((mu.n, nu.n), torch.inf, dtype=torch.float64)
    with pytest.raises(InfeasibleError):
        model(mu, nu, mask=walls)
    with pytest.raises(NonFiniteError):
        model(mu, nu, mask=torch.nan * walls)
    with pytest.raises(ConfigError, match="on_failure"):
        model(mu, nu, on_failure="zzz")


# Precision ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # torch's own, of RMSNorm
def test_autocast(head):
    """Encoders may run in bfloat16; potentials may not, and the marginals do not suffer."""
    model, (mu, nu) = make(dtype=torch.float32, **head), pair(dtype=torch.float32)
    exact = model(mu, nu)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pi = model(mu, nu)
        inside = pi.to_dense()
        projected = pi.barycentric_projection()
        loss = (
            losses.fenchel_young(pi, exact.detach()) if head["head"] != "truncated" else losses.kl(pi, exact.detach())
        )
    assert pi.source_features.dtype == inside.dtype == projected.dtype == loss.dtype == torch.float32
    assert pi.solution.f.dtype == pi.solution.g.dtype == torch.float64
    assert not torch.equal(pi.source_features, exact.source_features)
    assert torch.equal(inside, pi.to_dense())
    if head["head"] == "sinkhorn":
        assert bool(pi.solution.converged)
        assert pi.marginal_error().item() <= 1e-4
    # The same features solved outside: the solver did not notice.
    outside = Coupling.solve(
        mu,
        nu,
        cost=sf.NegativeDot(),
        features=(pi.source_features.detach(), pi.target_features.detach()),
        epsilon=0.2,
        tau_b=0.0 if head["head"] == "softmax" else 1.0,
        **(
            dict(gradient="unrolled", max_iterations=3, tolerance=0.0, on_failure="ignore")
            if head["head"] == "truncated"
            else {}
        ),
    )
    assert torch.equal(inside, outside.to_dense())
    assert torch.equal(projected, outside.barycentric_projection())


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
def test_gradients_under_autocast():
    model, (mu, nu) = make(dtype=torch.float32), pair(dtype=torch.float32)

    def gradient() -> Tensor:
        model.zero_grad()
        model(mu, nu).barycentric_projection().square().sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    exact = gradient()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = gradient()
    assert float(torch.cosine_similarity(exact, rough, dim=0)) > 0.98


def test_float32_agrees_with_float64():
    mu, nu = pair()
    exact = make()(mu, nu).to_dense()
    single = make(tolerance=1e-6)
    single.load_state_dict(make().state_dict())
    rough = single.float()(mu.to(torch.float32), nu.to(torch.float32)).to_dense()
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough.double(), exact, rtol=0, atol=1e-5)


# Training -----------------------------------------------------------------------------------------------------------


def test_training_decreases_the_loss(head):
    """A few steps of Adam towards the coupling of another model."""
    g = generator(8)
    mu = sf.Measure.uniform(torch.randn(8, 6, 2, generator=g))
    nu = sf.Measure.uniform(torch.randn(8, 5, 3, generator=g))
    target = make(seed=3, dtype=torch.float32)(mu, nu).detach()
    model = make(seed=4, dtype=torch.float32, **head)
    loss_of = losses.kl if head["head"] == "truncated" else losses.fenchel_young
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    history = []
    for _ in range(25):
        loss = loss_of(model(mu, nu), target).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(float(loss.detach()))
    assert history[-1] < 0.5 * history[0]


# Habits of modules --------------------------------------------------------------------------------------------------


def test_copies_agree():
    model, (mu, nu) = make(), pair()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.config == model.config
        assert torch.equal(other(mu, nu).to_dense(), model(mu, nu).to_dense())


def test_repr():
    assert "head='sinkhorn', epsilon=0.2" in repr(make())


ENCODER_KEYS = [
    "blocks.0.attention.key.weight",
    "blocks.0.attention.out.weight",
    "blocks.0.attention.query.weight",
    "blocks.0.attention.value.weight",
    "blocks.0.attention_norm.weight",
    "blocks.0.mlp.down.bias",
    "blocks.0.mlp.down.weight",
    "blocks.0.mlp.from_context.weight",
    "blocks.0.mlp.pool.weight",
    "blocks.0.mlp.up.bias",
    "blocks.0.mlp.up.weight",
    "blocks.0.mlp_norm.weight",
    "enter.0.bias",
    "enter.0.weight",
    "enter.2.bias",
    "enter.2.weight",
    "leave.bias",
    "leave.weight",
    "norm.weight",
    "skip.weight",
]


def test_state_dict_keys_are_frozen():
    """Stored models depend on them. A renamed parameter needs a load hook for the old name, and a line here."""
    expected = [f"{side}_encoder.{key}" for side in ("source", "target") for key in ENCODER_KEYS]
    assert sorted(make().state_dict()) == sorted(expected)
    without = sorted(make(context=False).state_dict())
    assert without == sorted(k for k in expected if "pool" not in k and "from_context" not in k)
    more = {"summary.bias", "summary.weight", "coefficients.bias", "coefficients.weight"}
    full = more | {"skip_shift.bias", "skip_shift.weight"}
    for options, names in ((OPTIONS, full), (dict(moments=True), set()), (dict(rank=12, tensor=(2, 3)), more)):
        added = {key.split("_encoder.")[1] for key in make(**options).state_dict()} - set(ENCODER_KEYS)
        assert added == names
    assert len(make(depth=3).state_dict()) == len(expected) + 2 * 2 * sum(k.startswith("blocks") for k in ENCODER_KEYS)


def test_config_is_frozen():
    fields = {f.name: f.default for f in dataclasses.fields(SinkhornTransformerConfig)}
    assert fields == {
        "dim": dataclasses.MISSING,
        "target_dim": None,
        "width": 64,
        "heads": 4,
        "depth": 2,
        "rank": None,
        "epsilon": 0.05,
        "head": "sinkhorn",
        "iterations": None,
        "causal": False,
        "context": True,
        "moments": False,
        "contextual_skip": False,
        "tensor": None,
        "log_scale": 0.0,
        "tolerance": None,
        "max_iterations": 2000,
        "format_version": 1,
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        SinkhornTransformerConfig(dim=2).dim = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(head="hardmax"), "expected head 'sinkhorn', 'softmax' or 'truncated', received 'hardmax'"),
        (
            dict(head="truncated"),
            "head='truncated', and None otherwise, received iterations=None",
        ),
        (dict(head="truncated", iterations=0), "expected iterations >= 1, received 0"),
        (dict(rank=0), "expected rank >= 1, received 0"),
        (dict(iterations=3), "received iterations=3 with head='sinkhorn'"),
        (dict(epsilon=0.0), "expected epsilon positive and finite, received 0.0"),
        (dict(epsilon=math.inf), "expected epsilon positive and finite, received inf"),
        (dict(log_scale=math.inf), "expected log_scale up to 50, received inf"),
        (dict(log_scale="7"), "expected log_scale as a number, received '7'"),
        (dict(moments=1), "expected moments as True or False, received 1"),
        (dict(tensor=(2, 3, 4)), r"expected tensor as two whole numbers \(heads, coefficients\), or None, received"),
        (dict(tensor=(2, 0)), "expected tensor as two whole numbers"),
        (dict(tensor="23"), "expected tensor as two whole numbers"),
        (dict(max_iterations=0), "expected max_iterations >= 1, received 0"),
        (dict(format_version=2), "expected format_version 1, received 2; load the model with the release"),
    ],
    ids=str,
)
def test_wrong_configurations(values, message):
    with pytest.raises(ConfigError, match=message):
        SinkhornTransformerConfig(dim=2, **values)


def test_configuration_from_a_dictionary():
    config = SinkhornTransformerConfig(dim=2, head="truncated", iterations=4)
    assert SinkhornTransformerConfig.from_dict(dataclasses.asdict(config)) == config
    with pytest.raises(ConfigError, match=r"expected the keys .*received also \['layers'\]"):
        SinkhornTransformerConfig.from_dict(dict(dim=2, layers=3))
    with pytest.raises(
        ConfigError, match="expected the key 'dim', the number of coordinates of a point; it is missing"
    ):
        SinkhornTransformerConfig.from_dict(dict(width=8))


def test_a_model_needs_a_configuration():
    with pytest.raises(ConfigError, match="expected a SinkhornTransformerConfig, received dict"):
        SinkhornTransformer(dict(dim=2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="expected width divisible by heads, received width=10 and heads=4"):
        SinkhornTransformer(SinkhornTransformerConfig(dim=2, width=10))


def test_options_reach_the_encoders():
    for encoder in (make(**OPTIONS).source_encoder, make(**OPTIONS).target_encoder):
        assert encoder.moments
        assert encoder.skip_shift is not None
        assert encoder.tensor == (2, 3)


@pytest.mark.parametrize(
    "options", [{}, dict(rank=512, tensor=(16, 8), moments=True, contextual_skip=True)], ids=["plain", "full"]
)
def test_a_fresh_model_has_costs_of_order_epsilon(options):
    torch.manual_seed(0)
    model = SinkhornTransformer(SinkhornTransformerConfig(dim=2, width=48, epsilon=0.1, **options))
    g = generator()
    mu, nu = (sf.Measure.uniform(torch.randn(40, 2, generator=g)) for _ in range(2))
    deviation = float((model.source_encoder(mu) @ model.target_encoder(nu).T).detach().std())
    assert 0.03 < deviation < 1.0


# The scale of the logits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [-1.0, 0.5, 2.0])
def test_log_scale_divides_epsilon(head, tau):
    """The coupling of e^tau c at epsilon is that of c at epsilon e^-tau, with the same features."""
    mu, nu = pair()
    model = make(**head, log_scale=tau)
    other = make(**head, epsilon=0.2 * math.exp(-tau))
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(mu, nu).to_dense(), other(mu, nu).to_dense(), rtol=1e-9, atol=1e-12)
    assert model.epsilon == pytest.approx(0.2 * math.exp(-tau))


def test_sharpened_shares_the_encoders():
    mu, nu = pair()
    model = make()
    sharp = model.sharpened(3.0)
    assert sharp.source_encoder is model.source_encoder
    assert model.config.log_scale == 0
    assert sharp.epsilon == pytest.approx(0.2 / 3)
    torch.testing.assert_close(sharp(mu, nu).to_dense(), make(log_scale=math.log(3.0))(mu, nu).to_dense())
    assert sharp.sharpened(1 / 3).config.log_scale == pytest.approx(0.0, abs=1e-15)
    for factor in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="expected a positive, finite factor, received"):
            model.sharpened(factor)


# Storage ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path) -> Path:
    make(head="truncated", iterations=4).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_round_trip(tmp_path, dtype):
    model = make(tolerance=None).to(dtype)
    model.save_pretrained(tmp_path)
    assert {"config.json", "model.safetensors", "README.md"} <= {p.name for p in tmp_path.iterdir()}
    for where in (tmp_path, str(tmp_path)):
        back = SinkhornTransformer.from_pretrained(where)
        assert back.config == model.config
        assert not back.training
        assert {p.dtype for p in back.parameters()} == {dtype}
        for name, t in model.state_dict().items():
            assert torch.equal(back.state_dict()[name], t), name
    if dtype != torch.bfloat16:
        mu, nu = pair(dtype=dtype)
        assert torch.equal(SinkhornTransformer.from_pretrained(tmp_path)(mu, nu).to_dense(), model(mu, nu).to_dense())


def test_round_trip_of_all_options(tmp_path):
    """JSON knows no tuples."""
    model = make(**OPTIONS, log_scale=1.5)
    model.save_pretrained(tmp_path)
    back = SinkhornTransformer.from_pretrained(tmp_path)
    assert back.config == model.config
    assert back.config.tensor == (2, 3)
    mu, nu = pair()
    assert torch.equal(back(mu, nu).to_dense(), model(mu, nu).to_dense())


def test_configurations_of_the_first_release_load(folder):
    """Files written before the options existed."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    for name in ("moments", "contextual_skip", "tensor", "log_scale"):
        del values[name]
    path.write_text(json.dumps(values))
    assert SinkhornTransformer.from_pretrained(folder).config == make(head="truncated", iterations=4).config


def test_what_is_written(folder):
    values = json.loads((folder / "config.json").read_text())
    assert values == dataclasses.asdict(make(head="truncated", iterations=4).config)
    assert values["format_version"] == 1
    assert sorted(load_file(folder / "model.safetensors")) == sorted(make().state_dict())
    card = (folder / "README.md").read_text()
    assert "library_name: sinkformer" in card
    assert "license: apache-2.0" in card


def test_a_model_that_requires_no_gradient_is_saved_too(tmp_path):
    make().requires_grad_(False).save_pretrained(tmp_path)
    assert SinkhornTransformer.from_pretrained(tmp_path).config == make().config


def test_missing_tensor(folder):
    edit_weights(folder, lambda state: state.pop("source_encoder.norm.weight"))
    with pytest.raises(ModelError, match=r"missing: \['source_encoder\.norm\.weight'\]; surplus: none"):
        SinkhornTransformer.from_pretrained(folder)


def test_surplus_tensor(folder):
    edit_weights(folder, lambda state: state.update(extra=torch.zeros(1)))
    with pytest.raises(ModelError, match=r"missing: none; surplus: \['extra'\]; of another shape: none"):
        SinkhornTransformer.from_pretrained(folder)


def test_tensor_of_another_shape(folder):
    edit_weights(folder, lambda state: state.update({"source_encoder.norm.weight": torch.ones(9).double()}))
    with pytest.raises(
        ModelError, match=r"of another shape: \['source_encoder\.norm\.weight \(9,\) instead of \(8,\)'\]"
    ):
        SinkhornTransformer.from_pretrained(folder)


def test_configuration_of_another_architecture(folder):
    edit_config(folder, depth=2)
    with pytest.raises(ModelError, match=r"missing: \['source_encoder\.blocks\.1\.attention\.key\.weight', "):
        SinkhornTransformer.from_pretrained(folder)


def test_unknown_key(folder):
    edit_config(folder, layers=3)
    with pytest.raises(ConfigError, match=r"expected the keys .*received also \['layers'\]"):
        SinkhornTransformer.from_pretrained(folder)


def test_other_format_version(folder):
    edit_config(folder, format_version=99)
    with pytest.raises(ConfigError, match="expected format_version 1, received 99; load the model with the release"):
        SinkhornTransformer.from_pretrained(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file(folder, name):
    (folder / name).unlink()
    with pytest.raises(ModelError, match=rf"expected the file {name} in .*; write the folder with save_pretrained"):
        SinkhornTransformer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"\xff\xfe\xfa"),
        ("model.safetensors", b"not a tensor file"),
        ("model.safetensors", b""),
    ],
    ids=["half a config", "no text", "no safetensors", "no bytes"],
)
def test_damaged_file(folder, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=r"expected a readable model in .*; a file is damaged: "):
        SinkhornTransformer.from_pretrained(folder)


def test_cut_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="a file is damaged"):
        SinkhornTransformer.from_pretrained(folder)


def test_configuration_that_is_no_object(folder):
    (folder / "config.json").write_text("[1, 2]")
    with pytest.raises(ModelError, match=r"expected a JSON object in .*config\.json, received list"):
        SinkhornTransformer.from_pretrained(folder)


@pytest.mark.parametrize("value", ["8", None, 2.5], ids=repr)
def test_configuration_of_other_types(folder, value):
    """JSON holds what someone wrote; the error is the package's, not a TypeError from inside torch."""
    edit_config(folder, width=value)
    with pytest.raises((ConfigError, ModelError)):
        SinkhornTransformer.from_pretrained(folder)


@pytest.mark.parametrize("name", ["no/such/folder", "nobody/nothing", "../outside", "C:\\model"], ids=repr)
def test_nothing_there(name, monkeypatch, tmp_path):
    """Offline, a name that is no folder is one clear error, and nothing is asked of a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ModelError, match="expected a folder written by save_pretrained or the name of a model on the hub"
    ):
        SinkhornTransformer.from_pretrained(name, cache_dir=tmp_path)
    with pytest.raises(ModelError, match="which is neither within reach"):
        SinkhornTransformer.from_pretrained(name, cache_dir=tmp_path, local_files_only=True)


def test_a_file_is_no_folder(folder):
    with pytest.raises(ModelError, match="expected a folder written by save_pretrained"):
        SinkhornTransformer.from_pretrained(folder / "config.json", local_files_only=True)
