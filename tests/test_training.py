"""Training: the loss and its gradient, Muon, one reproducible loop, checkpoints that lose nothing."""

import copy
import json
import math
import os
import signal
import subprocess
import sys
import threading
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

import sinkformer as sf
from sinkformer import losses
from sinkformer.errors import (
    ConfigError,
    DTypeError,
    MissingExtraError,
    ModelError,
    NonFiniteError,
    ShapeError,
    WeightError,
)
from sinkformer.models import SinkhornTransformer, SinkhornTransformerConfig
from sinkformer.systems import EntropicTransport, PairSampler, Product, named
from sinkformer.testing import random_measure
from sinkformer.training import History, Muon, Recipe, fenchel_young, fit
from sinkformer.training.batches import Batch, batches
from sinkformer.training.objective import logits_of
from sinkformer.training.processes import Crew

SYSTEM = EntropicTransport(sf.SqEuclidean(), epsilon=0.5)
SAMPLER = PairSampler(dims=(2, 2), sizes=(2, 5))
RECIPE = Recipe(groups=2, sources=2, targets=3)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> SinkhornTransformer:
    torch.manual_seed(seed)
    defaults: dict[str, Any] = dict(dim=2, width=8, heads=2, depth=1, rank=4, epsilon=0.5)
    return SinkhornTransformer(SinkhornTransformerConfig(**defaults | options), dtype=dtype)


def train(model: SinkhornTransformer, data: Any = (SYSTEM, SAMPLER), **options: Any) -> History:
    return fit(model, data, **{"recipe": RECIPE, "validation": 4, "validate_every": 5, "record_every": 2} | options)


def same(one: SinkhornTransformer, other: SinkhornTransformer) -> bool:
    return all(torch.equal(t, other.state_dict()[name]) for name, t in one.state_dict().items())


def timeless(history: History) -> tuple:
    records = [{k: v for k, v in record.items() if k != "seconds"} for record in history.records]
    return records, history.steps, history.best, history.stopped


class Crash(Exception):
    """Stands for everything that ends a process."""


@dataclass(frozen=True)
class Hooked(PairSampler):
    """Does something when the block of a step is drawn; ``calls`` counts them."""

    hook: Any = None
    calls: Any = None

    def block(self, *sizes: int, generator: torch.Generator):
        self.calls.append(len(self.calls))
        self.hook(len(self.calls) - 1)
        return super().block(*sizes, generator=generator)


def hooked(hook) -> tuple[EntropicTransport, Hooked]:
    return SYSTEM, Hooked(dims=(2, 2), sizes=(2, 5), hook=hook, calls=[])


# The loss -----------------------------------------------------------------------------------------------------------


def problem(batch: int = 3, n: int = 4, m: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits and a target whose marginals it was not computed to."""
    g = generator(seed)
    logits = 3 * torch.randn(batch, n, m, generator=g, dtype=torch.float64)
    target = torch.rand(batch, n, m, generator=g, dtype=torch.float64) ** 3
    return logits, target / target.sum((-1, -2), keepdim=True)


def test_loss_is_kl_to_the_plan_of_the_targets_marginals():
    logits, target = problem()
    loss, gradient = fenchel_young(logits, target, tolerance=1e-12)
    for k in range(len(logits)):
        a, b = target[k].sum(-1), target[k].sum(-2)
        solution = sf.sinkhorn(a, b, cost=-logits[k], epsilon=1.0, tolerance=1e-12)
        plan = a[:, None] * b * (solution.f[:, None] + solution.g + logits[k]).exp()
        torch.testing.assert_close(gradient[k], plan - target[k], rtol=0, atol=1e-11)
        torch.testing.assert_close(loss[k], (target[k] * (target[k] / plan).log()).sum(), rtol=1e-9, atol=1e-11)


def test_loss_agrees_with_the_loss_of_couplings():
    logits, target = problem()
    mu, nu = (sf.Measure(torch.zeros(*w.shape, 1).double(), w) for w in (target.sum(-1), target.sum(-2)))
    pi = sf.Coupling.solve(mu, nu, cost=-logits, epsilon=1.0, tolerance=1e-12)
    torch.testing.assert_close(fenchel_young(logits, target, tolerance=1e-12)[0], losses.fenchel_young(pi, target))


def test_gradient_by_differences():
    logits, target = problem()
    _, gradient = fenchel_young(logits, target, tolerance=1e-13)
    for index in ((0, 1, 2), (2, 3, 0)):
        step = torch.zeros_like(logits)
        step[index] = 1e-4
        up, down = (fenchel_young(logits + s * step, target, tolerance=1e-13)[0] for s in (1, -1))
        assert float((up - down)[index[0]] / 2e-4) == pytest.approx(float(gradient[index]), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("gauge", [0.0, 50.0])
def test_the_right_logits_need_no_iteration(gauge):
    """The start is exact, up to functions of one side, and the loss zero."""
    logits, target = problem()
    right = target.log() + gauge * (logits[:, :, :1] + logits[:, :1])
    loss, gradient = fenchel_young(right, target, max_iterations=1)
    # The ridge is 1e-9, relative to potentials of the size of the gauge.
    assert float(loss.abs().max()) < 1e-9
    assert float(gradient.abs().max()) < 1e-9 * (1 + gauge)


def test_targets_with_zeros_and_padding():
    """A permutation, a padded block; and where nothing is transported logits do not matter to the start."""
    logits, target = problem(2, 4, 4)
    target[0] = torch.eye(4).double() / 4
    target[1, 2:] = target[1, :, 3:] = 0
    loss, gradient = fenchel_young(logits, target, tolerance=1e-12)
    assert bool(torch.isfinite(loss).all())
    assert bool((loss > 0).all())
    assert bool((gradient[1, 2:] == 0).all())
    alone, inside = fenchel_young(logits[1:, :2, :3], target[1:, :2, :3], tolerance=1e-12)
    torch.testing.assert_close(loss[1:], alone)
    torch.testing.assert_close(gradient[1, :2, :3], inside[0], rtol=0, atol=1e-11)


def test_a_bad_start_is_not_taken():
    """Logits far off where the target has mass: zero is the better start, and the answer does not depend on it."""
    logits, target = problem()
    wrong = -20 * logits
    loss, gradient = fenchel_young(wrong, target, tolerance=1e-9, max_iterations=20_000)
    assert float(gradient.sum(-1).abs().sum(-1).max()) < 1e-8
    assert float(gradient.sum(-2).abs().sum(-1).max()) < 1e-8
    assert bool((loss > 1).all())


def test_logits_that_are_not_numbers_give_a_loss_that_is_none():
    logits, target = problem()
    logits[1, 0, 0] = torch.nan
    loss, _ = fenchel_young(logits, target)
    assert torch.isnan(loss).tolist() == [False, True, False]


# Muon ---------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon since 2.9")
def test_muon_agrees_with_torch():
    """Up to the bfloat16 of torch's."""
    g = generator()
    ours = [torch.randn(*shape, generator=g) for shape in ((8, 8), (8, 8), (24, 6), (5, 20))]
    theirs = [p.clone() for p in ours]
    one = Muon(ours, lr=0.02, momentum=0.95, weight_decay=0.1)
    other = torch.optim.Muon(theirs, lr=0.02, momentum=0.95, weight_decay=0.1)
    for _ in range(6):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(*p.shape, generator=g)
            q.grad = p.grad.clone()
        before = [p.clone() for p in ours]
        one.step()
        other.step()
        for p, q, old in zip(ours, theirs, before, strict=True):
            assert float((p - q).abs().max()) < 0.2 * float((p - old).abs().max())


@pytest.mark.parametrize("shape", [(6, 6), (12, 4), (4, 12)])
def test_muon_steps_are_nearly_orthogonal(shape):
    """The first step: singular values about one, singular vectors of the gradient."""
    p = torch.zeros(shape, dtype=torch.float64)
    p.grad = torch.randn(shape, generator=generator(), dtype=torch.float64)
    Muon([p], lr=1.0, weight_decay=0.0).step()
    u, _, vh = torch.linalg.svd(p.grad, full_matrices=False)
    step = -p / max(1, shape[0] / shape[1]) ** 0.5
    inside = u.T @ step @ vh.T
    assert float((inside - torch.diag(torch.diagonal(inside))).abs().max()) < 1e-9
    assert bool(((torch.diagonal(inside) > 0.6) & (torch.diagonal(inside) < 1.3)).all())


def test_muon_decays_weights_and_skips_what_has_no_gradient():
    p, q = torch.ones(3, 3), torch.ones(3, 3)
    p.grad = torch.zeros(3, 3)
    optimizer = Muon([p, q], lr=0.5, weight_decay=0.2)
    assert optimizer.step(lambda: torch.tensor(7.0)).item() == 7
    torch.testing.assert_close(p, torch.full((3, 3), 0.9))
    assert torch.equal(q, torch.ones(3, 3))


def test_wrong_muon():
    with pytest.raises(ShapeError, match=r"expected matrices, received a parameter of shape \(3,\)"):
        Muon([torch.ones(3)])
    for wrong in (dict(lr=-1.0), dict(momentum=1.0), dict(weight_decay=-0.1)):
        with pytest.raises(ConfigError, match="expected lr and weight_decay >= 0 and 0 <= momentum < 1, received"):
            Muon([torch.ones(2, 2)], **wrong)


# The loop -----------------------------------------------------------------------------------------------------------


def test_it_learns():
    model = make(width=16, rank=8)
    history = train(model, steps=80)
    assert history.records[-1]["loss"] < 0.1 * history.records[0]["loss"]
    assert history.records[-1]["validation"] < 0.02
    mu, nu = SAMPLER.pairs(20, generator=generator(99))
    pi = model.double()(mu, nu)
    assert float(losses.total_variation(pi, SYSTEM(mu, nu)).detach().mean()) < 0.1


def test_records():
    history = train(make(), steps=7)
    assert [record["step"] for record in history.records] == [2, 4, 5, 6, 7]
    assert ["validation" in record for record in history.records] == [False, False, True, False, True]
    assert history.steps == 7
    assert history.stopped == "budget"
    assert history.best == min(record["validation"] for record in history.records if "validation" in record)
    assert 0 < history.records[0]["seconds"] < history.seconds


def test_a_run_is_a_function_of_its_arguments():
    models = [make() for _ in range(3)]
    before = torch.get_rng_state()
    histories = [train(model, steps=6, seed=seed) for model, seed in zip(models, (5, 5, 6), strict=True)]
    assert torch.equal(torch.get_rng_state(), before)
    assert same(models[0], models[1])
    assert timeless(histories[0]) == timeless(histories[1])
    assert not same(models[0], models[2])


def test_every_parameter_is_trained():
    for options in ({}, dict(rank=12, tensor=(2, 3), moments=True, contextual_skip=True)):
        model = make(**options)
        before = copy.deepcopy(model.state_dict())
        train(model, steps=3)
        for name, t in model.state_dict().items():
            # A bias of K shifts the cost by a function of the source alone.
            if name != "target_encoder.leave.bias":
                assert not torch.equal(t, before[name]), name
        assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_frozen_parameters_stay(optimizer):
    model = make()
    model.source_encoder.requires_grad_(False)
    before = copy.deepcopy(model.source_encoder.state_dict())
    train(model, steps=3, recipe=Recipe(groups=1, sources=2, targets=2, optimizer=optimizer))
    assert all(torch.equal(t, before[name]) for name, t in model.source_encoder.state_dict().items())


def test_the_average(tmp_path):
    """sum_k (1 - d) d^(n - k) w_k / (1 - d^n) over the weights after every step."""
    states: list[dict[str, Tensor]] = []
    model = make()
    data = hooked(lambda step: states.append(copy.deepcopy(model.state_dict())))
    train(model, data, steps=4, validation=0, folder=tmp_path, recipe=Recipe(average=0.7))
    states.append(load_file(tmp_path / "step-000000004" / "training.safetensors"))
    for name, t in model.state_dict().items():
        weights = [0.3 * 0.7 ** (4 - k) / (1 - 0.7**4) for k in range(1, 5)]
        expected = sum(w * state[name] for w, state in zip(weights, states[1:], strict=True))
        torch.testing.assert_close(t, expected, rtol=1e-5, atol=1e-7)


def test_the_best_weights_come_out():
    """A rate that wrecks the model late: what comes out has the smallest validation loss, not the last."""
    unseen = [
        (mu, nu, SYSTEM(mu, nu))
        for mu, nu in zip(*map(sf.Measure.unstack, SAMPLER.pairs(5, generator=generator(3))), strict=True)
    ]
    model = make(dtype=torch.float64)
    history = train(model, steps=12, validate_every=1, validation=unseen, recipe=Recipe(rate=0.3, optimizer="adamw"))
    assert history.best is not None
    assert history.best < history.records[-1]["validation"]
    values = [losses.fenchel_young(model(mu, nu), plan).item() for mu, nu, plan in unseen]
    assert sum(values) / 5 == pytest.approx(history.best, rel=1e-5)


def test_patience():
    still = Recipe(groups=1, sources=2, targets=2, rate=0.0, matrix_rate=0.0)
    history = train(make(), steps=50, patience=2, validate_every=3, recipe=still)
    assert history.stopped == "patience"
    assert history.steps == 9


def test_a_budget_in_seconds():
    history = train(make(), seconds=0.3, validation=0)
    assert history.seconds >= 0.3
    assert history.records[-1]["rate"] < 0.1 * Recipe().rate
    assert train(make(), seconds=1e6, steps=3).steps == 3


def test_rates_rise_and_fall():
    recipe = Recipe(groups=1, sources=1, targets=1, warmup=0.4, rate=1e-3)
    rates = [record["rate"] for record in train(make(), steps=10, record_every=1, recipe=recipe).records]
    for k, rate in enumerate(rates):
        share = (k + 0.5) / 10
        assert rate == pytest.approx(1e-3 * min(1, share / 0.4) * (1 + math.cos(math.pi * share)) / 2)


def test_log_scale_goes_to_its_end():
    seen: list[float] = []

    def loss(pi, target):
        seen.append(float(pi.epsilon[0]))
        return losses.kl(pi, target)

    recipe = Recipe(groups=1, sources=1, targets=1, loss=loss, log_scale=0.0, annealed=0.5)
    train(make(epsilon=1.0, log_scale=2.0), steps=8, recipe=recipe, validation=0)
    assert seen == pytest.approx([math.exp(-tau) for tau in (0, 0.5, 1, 1.5, 2, 2, 2, 2)])


def test_log_scale_of_the_default_loss():
    """Logits times e^tau: the same steps as a model with epsilon e^-tau, up to the gauge penalty and rounding."""
    recipe = Recipe(groups=1, sources=2, targets=2, gauge=0.0)
    one, other = make(dtype=torch.float64, epsilon=0.5, log_scale=1.0), make(dtype=torch.float64, epsilon=0.5 / math.e)
    other.load_state_dict(one.state_dict())
    train(one, steps=3, recipe=recipe)
    train(other, steps=3, recipe=recipe)
    for name, t in one.state_dict().items():
        torch.testing.assert_close(t, other.state_dict()[name], rtol=1e-6, atol=1e-9)


def test_before_log_scale_has_arrived_nothing_is_best():
    recipe = Recipe(groups=1, sources=1, targets=1, log_scale=-2.0, annealed=0.7)
    history = train(make(), steps=10, validate_every=2, recipe=recipe)
    best = min(record["validation"] for record in history.records if record.get("validation") and record["step"] >= 8)
    assert history.best == best


def test_heads_and_losses_of_ones_own():
    for options, loss in (
        (dict(head="softmax"), losses.fenchel_young),
        (dict(head="truncated", iterations=3), losses.kl),
        ({}, losses.total_variation),
    ):
        model = make(**options)
        recipe = Recipe(groups=1, sources=3, targets=3, loss=loss, rate=1e-2)
        history = train(model, steps=30, recipe=recipe, validate_every=1)
        assert history.records[-1]["validation"] < 0.7 * history.records[0]["validation"]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # torch's own, of RMSNorm
def test_bfloat16_encoders():
    exact, rough = make(), make()
    train(exact, steps=4)
    train(rough, steps=4, recipe=Recipe(groups=2, sources=2, targets=3, bfloat16=True))
    for name, t in exact.state_dict().items():
        assert t.dtype == rough.state_dict()[name].dtype == torch.float32
    assert not same(exact, rough)
    mu, nu = (m.to(torch.float32) for m in SAMPLER.pairs(8, generator=generator(4)))
    assert float(losses.total_variation(rough(mu, nu), exact(mu, nu).detach()).detach().mean()) < 0.05


# Finite data ----------------------------------------------------------------------------------------------------------


def examples(count: int = 7, seed: int = 0) -> list:
    g = generator(seed)
    pairs = [
        (random_measure(2 + k % 3, 2, generator=g), random_measure(2 + k % 4, 2, generator=g)) for k in range(count)
    ]
    return [(mu, nu, SYSTEM(mu, nu)) for mu, nu in pairs]


def test_a_sequence_of_examples():
    """Ragged, couplings or matrices, more or fewer than a batch; every example once in an epoch."""
    seen = []

    class Watched(list):
        def __getitem__(self, index):
            seen.append(index)
            return super().__getitem__(index)

    data = Watched((mu, nu, plan.to_dense() if k % 2 else plan) for k, (mu, nu, plan) in enumerate(examples()))
    model = make()
    history = train(model, data, steps=6, recipe=Recipe(batch=3), validation=None)
    assert sorted(seen[:7]) == sorted(seen[7:]) == list(range(7))
    assert seen[:7] != seen[7:]
    assert not any("validation" in record for record in history.records)
    again = make()
    train(again, data, steps=6, recipe=Recipe(batch=3), validation=None)
    assert same(model, again)


class Loader:
    """An iterable that is no sequence; ends with a crash after some batches of its life, if asked to."""

    def __init__(self, *batches: tuple, crash: int | None = None):
        self.batches, self.left = batches, crash

    def __iter__(self):
        for batch in self.batches:
            if self.left == 0:
                raise Crash
            self.left = None if self.left is None else self.left - 1
            yield batch


def collate(items: list) -> tuple:
    mu, nu = (sf.Measure.stack([item[side] for item in items]) for side in (0, 1))
    target = torch.zeros(len(items), mu.n, nu.n, dtype=torch.float64)
    for k, (one, other, plan) in enumerate(items):
        target[k, : one.n, : other.n] = plan.to_dense()
    return mu, nu, target


def crew(index: int, count: int) -> Crew:
    member = Crew(False)
    member.index, member.count = index, count
    return member


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_processes_share_out_a_sequence(size, count):
    """Every example of a batch goes to one of them; who has none has no weight."""
    data = examples(5)
    sources = [
        batches(make(dtype=torch.float64), data, Recipe(batch=size), 0, 0, crew(index, count)) for index in range(count)
    ]
    seen = []
    for place in range(math.ceil(5 / size)):
        shares = [next(source) for source in sources]
        assert sum(share.weight for share in shares) == pytest.approx(1)
        found = [batch for batch, _ in shares if batch is not None]
        assert sum(len(batch.mu) for batch in found) == min(size, 5 - place * size)
        assert all((share.batch is None) == (share.weight == 0) for share in shares)
        seen += [float(w.max()) for batch in found for w in batch.mu.weights]
    assert sorted(seen) == sorted(float(mu.weights.max()) for mu, _, _ in data)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_processes_share_out_a_block(count):
    """Two groups of two sources and three targets: what they have together is what one process has, each pair once."""
    whole = next(batches(make(dtype=torch.float64), (SYSTEM, SAMPLER), RECIPE, 0, 0, crew(0, 1)))
    assert whole.weight == 1
    seen = []
    for index in range(count):
        batch, weight = next(batches(make(dtype=torch.float64), (SYSTEM, SAMPLER), RECIPE, 0, 0, crew(index, count)))
        pairs = [] if batch is None else batch.target.flatten(0, 2).unbind()
        assert weight == len(pairs) / 12
        seen += pairs
    left = list(whole.batch.target.flatten(0, 2).unbind())
    for plan in seen:
        place = next(k for k, other in enumerate(left) if torch.equal(plan, other))
        del left[place]
    assert not left


def test_a_data_loader():
    loader = DataLoader(examples(), batch_size=3, collate_fn=collate, shuffle=True, generator=generator(2))
    history = train(make(), loader, steps=7, validation=None)
    assert history.steps == 7


def test_a_whole_batch_of_examples_equals_an_iterable_of_it():
    data = examples()
    one, other = make(dtype=torch.float64), make(dtype=torch.float64)
    a = train(one, data, steps=3, recipe=Recipe(batch=7), validation=data)
    b = train(other, Loader(collate(data)), steps=3, validation=data)
    for name, t in one.state_dict().items():
        torch.testing.assert_close(t, other.state_dict()[name], rtol=1e-5, atol=1e-8)
    assert a.best == pytest.approx(b.best, rel=1e-5)


def test_an_iterable_goes_on_where_it_was(tmp_path):
    batches = [collate(examples(2, seed)) for seed in range(3)]
    whole, part, resumed = make(), make(), make(seed=1)
    train(whole, Loader(*batches), steps=8, validation=0)
    with pytest.raises(Crash):
        train(part, Loader(*batches, crash=5), steps=8, validation=0, folder=tmp_path, checkpoint_every=4)
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-000000005"]
    train(resumed, Loader(*batches), steps=8, validation=0, folder=tmp_path, checkpoint_every=4, resume=True)
    assert same(whole, resumed)


def test_wrong_data():
    mu, nu, plan = examples(1)[0]
    one = mu.map(lambda t: t.unsqueeze(0)), nu.map(lambda t: t.unsqueeze(0)), plan.to_dense().unsqueeze(0)
    with pytest.raises(ShapeError, match="expected at least one example, received none"):
        train(make(), [], steps=1, validation=0)
    with pytest.raises(ShapeError, match=r"received an iterable without any \(a generator can be used once only\)"):
        train(make(), (batch for batch in [one]), steps=2, validation=0)
    with pytest.raises(ConfigError, match="expected validation as a sequence of examples for data that are not drawn"):
        train(make(), [(mu, nu, plan)], steps=1, validation=5)


MU, NU = (sf.Measure.uniform(torch.tensor([[0.0, 0.0], [1.0, x]])) for x in (0.0, 1.0))
PADDED = sf.Measure(torch.zeros(2, 2), torch.tensor([1.0, 0.0]))
GOOD = torch.full((2, 2), 0.25)
BAD_TARGETS: dict[str, tuple[Any, type[Exception], str]] = {
    "negative": (torch.tensor([[0.6, -0.1], [0.0, 0.5]]), WeightError, r"expected a target >= 0 in {}, received -0\.1"),
    "scaled": (100 * GOOD, WeightError, r"expected a target of total one in {}, received 100; divide it by its sum"),
    "a little scaled": (1.002 * GOOD, WeightError, r"expected a target of total one in {}, received 1\.002"),
    "zero": (0 * GOOD, WeightError, r"expected a target of total one in {}, received 0"),
    "NaN": (GOOD * torch.tensor([1.0, math.nan]), NonFiniteError, "expected a finite target in {}, received a NaN"),
    "infinite": (
        GOOD + torch.tensor([0.0, math.inf]),
        NonFiniteError,
        "expected a finite target in {}, received a NaN",
    ),
    "integer": (
        torch.eye(2).long(),
        DTypeError,
        r"the target of {} as .* floating-point tensor, received torch\.int64",
    ),
    "numpy": (GOOD.numpy(), DTypeError, "the target of {} as a coupling or a floating-point tensor, received ndarray"),
    "list": (GOOD.tolist(), DTypeError, "the target of {} as a coupling .*, received a list of list, list"),
    "none": (None, DTypeError, "the target of {} as a coupling or a floating-point tensor, received None"),
    "shape": (torch.ones(2, 3) / 6, ShapeError, r"expected a target of shape \(2, 2\) in {}, received \(2, 3\)"),
}


@pytest.mark.parametrize(("target", "error", "message"), BAD_TARGETS.values(), ids=BAD_TARGETS)
def test_targets_that_are_no_couplings(target, error, message):
    """Of examples, named by their index in the data whatever the order; and of a validation."""
    data = [(MU, NU, GOOD), (MU, NU, target), (MU, NU, GOOD)]
    with pytest.raises(error, match=message.format("example 1")):
        train(make(), data, steps=3, validation=0, recipe=Recipe(batch=1))
    with pytest.raises(error, match=message.format("validation example 1")):
        train(make(), data[:1], steps=1, validation=data)


def test_targets_on_padding():
    good, bad = torch.tensor([[0.5, 0.5], [0.0, 0.0]]), torch.tensor([[0.5, 0.25], [0.0, 0.25]])
    assert train(make(), [(PADDED, NU, good)], steps=1, validation=0).steps == 1
    assert train(make(), [(PADDED, NU, good.bfloat16())], steps=1, validation=0).steps == 1
    for data in ([(PADDED, NU, bad)], [(NU, PADDED, bad.T)]):
        message = r"no mass on atoms of weight zero in example 0, received a target with 0\.25 there"
        with pytest.raises(WeightError, match=message):
            train(make(), data, steps=1, validation=0)


@pytest.mark.parametrize(("target", "error", "message"), list(BAD_TARGETS.values())[:6], ids=list(BAD_TARGETS)[:6])
def test_batches_of_targets_that_are_no_couplings(target, error, message):
    mu, nu = sf.Measure.stack([MU, MU]), sf.Measure.stack([NU, NU])
    loader = Loader((mu, nu, GOOD.expand(2, 2, 2)), (mu, nu, torch.stack([GOOD, target])))
    with pytest.raises(error, match=message.format("batch 1, index 1")):
        train(make(), loader, steps=2, validation=0)


def test_a_system_whose_targets_are_no_couplings():
    class Wrong(Product):
        def couple(self, mu, nu):
            pi = super().couple(mu, nu)
            return sf.Coupling.from_dense(mu, nu, 2 * pi.to_dense())

    for validation in (0, 4):
        with pytest.raises(WeightError, match="expected a target of total one in pair 0 of product, received 2"):
            train(make(), (Wrong(), SAMPLER), steps=1, validation=validation)


STACKED = sf.Measure.stack([MU, MU])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((SAMPLER, SYSTEM), r"\(system, PairSampler\(dims=system\.dims\)\), received a tuple of PairSampler, Entropic"),
        ([SYSTEM, SAMPLER], "expected a system and its sampler as a tuple .*, received a list of EntropicTransport, Pair"),
        (SYSTEM, "expected a system and its sampler as a tuple .*, received EntropicTransport"),
        ((SYSTEM, 3), "expected a system and its sampler as a tuple .*, received a tuple of EntropicTransport, int"),
        (None, "expected data as .*, a sequence of examples or an iterable of batches, received None"),
        (3, "expected data as .*, received 3"),
        ("eot", "expected data as .*, received 'eot'"),
        ((MU, NU, GOOD), "sequence of triples .*, received a tuple of Measure, Measure, Tensor; put one into a list"),
        ([(MU, NU)], r"expected example 0 as a triple \(mu, nu, target\), received a tuple of Measure, Measure"),
        ([(MU, GOOD, GOOD)], "expected measures in example 0, received Tensor"),
        ([(STACKED, NU, GOOD)], r"expected single measures in example 0, received the batch shape \(2,\)"),
        (Loader((STACKED, STACKED)), r"expected batch 0 as a triple \(mu, nu, target\), received a tuple of Measure, Meas"),
        (Loader((MU, NU, GOOD)), r"expected a batch \(B,\) of measures in batch 0, received the batch shape \(\)"),
    ],
    ids=range(13),
)  # fmt: skip
def test_data_of_no_kind(data, message):
    with pytest.raises((DTypeError, ShapeError), match=message):
        train(make(), data, steps=1, validation=0)


@pytest.mark.parametrize(
    ("validation", "message"),
    [
        (1.5, "expected validation as a whole number >= 0 or a sequence of examples, received 1.5"),
        (-1, "expected validation as a whole number >= 0 or a sequence of examples, received -1"),
        (True, "expected validation as a whole number >= 0 or a sequence of examples, received True"),
        ([], "expected at least one example in validation, received none; pass 0 for no validation"),
        ([(MU, NU)], "expected validation example 0 as a triple"),
    ],
    ids=str,
)
def test_wrong_validations(validation, message):
    with pytest.raises((ConfigError, ShapeError), match=message):
        train(make(), steps=1, validation=validation)


def test_a_folder_that_is_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    for folder in (path, str(path / "inner")):
        with pytest.raises(ConfigError, match=r"expected a folder for checkpoints, received .*file"):
            train(make(), steps=1, folder=folder)


def test_losses_that_cannot_train():
    def wrong(loss: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            train(make(), steps=1, validation=0, recipe=Recipe(groups=1, sources=1, targets=1, loss=loss))

    wrong(lambda pi, target: None, DTypeError, r"returns a floating-point tensor \(B\), received NoneType")
    wrong(lambda pi, target: 0.5, DTypeError, r"returns a floating-point tensor \(B\), received float")
    wrong(lambda pi, target: target.long(), DTypeError, r"received torch\.int64")
    wrong(
        lambda pi, target: losses.kl(pi, target).detach(), ConfigError, r"received one without a gradient; .* \.detach"
    )


# Checkpoints ----------------------------------------------------------------------------------------------------------


def crash_at(step: int):
    def hook(now: int) -> None:
        if now == step:
            raise Crash

    return hook


@pytest.mark.parametrize("step", [1, 5, 8])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, step):
    """Bit for bit: weights, averages, optimizers, records, the best validation."""
    options: dict[str, Any] = dict(steps=11, checkpoint_every=3, validate_every=2, record_every=2)
    whole, part = make(), make()
    expected = train(whole, **options, folder=tmp_path / "whole")
    with pytest.raises(Crash):
        train(part, hooked(crash_at(step)), **options, folder=tmp_path / "part")
    # A new process has a new model.
    resumed = make(seed=1)
    history = train(resumed, **options, folder=tmp_path / "part", resume=True)
    assert same(whole, resumed)
    assert timeless(history) == timeless(expected)
    one, other = (tmp_path / name / "step-000000011" for name in ("whole", "part"))
    for name in ("training.safetensors", "model.safetensors", "best.safetensors"):
        a, b = load_file(one / name), load_file(other / name)
        assert all(torch.equal(t, b[key]) for key, t in a.items())
    a, b = (torch.load(folder / "optimizers.pt", weights_only=True) for folder in (one, other))
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.fixture
def ctrl_c():
    """Python's own handler: a program that was started in the background has none."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_finishes_the_step_and_writes(tmp_path):
    whole, part = make(), make()
    expected = train(whole, steps=9)

    def interrupt(step: int) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="interrupted after step 5"):
        train(part, hooked(interrupt), steps=9, folder=tmp_path)
    assert (tmp_path / "step-000000005").is_dir()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = make(seed=1)
    assert timeless(train(resumed, steps=9, folder=tmp_path, resume=True)) == timeless(expected)
    assert same(whole, resumed)


@pytest.mark.usefixtures("ctrl_c")
def test_a_second_ctrl_c_acts_at_once(tmp_path):
    def interrupt(step: int) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("not reached")

    with pytest.raises(KeyboardInterrupt):
        train(make(), hooked(interrupt), steps=9, folder=tmp_path)
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-000000004"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_another_thread_is_left_alone():
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(train(make(), steps=2).steps))
    thread.start()
    thread.join()
    assert ended == [2]


def test_a_run_that_had_ended_is_not_run_again(tmp_path):
    one, other = make(), make(seed=1)
    first = train(one, steps=4, folder=tmp_path)
    again = train(other, hooked(crash_at(0)), steps=4, folder=tmp_path, resume=True)
    assert same(one, other)
    assert timeless(again) == timeless(first)


def test_what_is_written(tmp_path):
    model = make()
    history = train(model, steps=7, checkpoint_every=2, folder=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["history.jsonl", "step-000000007"]
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == history.records
    stored = SinkhornTransformer.from_pretrained(tmp_path / "step-000000007")
    assert stored.config == model.config
    best = load_file(tmp_path / "step-000000007" / "best.safetensors")
    assert all(torch.equal(best[name], t) for name, t in model.state_dict().items())


def test_records_after_a_crash_are_written_once(tmp_path):
    with pytest.raises(Crash):
        train(make(), hooked(crash_at(7)), steps=10, folder=tmp_path)
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"step": 8, "written by": "a process that was killed before its checkpoint"}\n')
    history = train(make(), steps=10, folder=tmp_path, resume=True)
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [record["step"] for record in history.records]


def test_a_half_written_checkpoint_is_not_read(tmp_path, monkeypatch):
    """Killed while writing: the older one is still there, and is what counts."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(Crash()))
        with pytest.raises(Crash):
            train(make(), steps=9, checkpoint_every=4, folder=tmp_path)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["unfinished"]
    model, whole = make(), make()
    train(model, steps=9, checkpoint_every=4, folder=tmp_path, resume=True)
    train(whole, steps=9)
    assert same(model, whole)


def test_folders_of_other_runs(tmp_path):
    train(make(), steps=3, folder=tmp_path)
    with pytest.raises(ConfigError, match=r"expected a folder without checkpoints, received .*; pass resume=True"):
        train(make(), steps=3, folder=tmp_path)
    for options, message in (
        (dict(steps=4), "steps 4 instead of 3"),
        (dict(steps=3, seed=1), "seed 1 instead of 0"),
        (dict(steps=3, recipe=Recipe(rate=0.5)), r"recipe\.rate 0\.5 instead of 0\.003"),
        (dict(steps=3, validation=0), "validation 0 instead of 4"),
    ):
        with pytest.raises(ConfigError, match=message):
            train(make(), **options, folder=tmp_path, resume=True)
    with pytest.raises(ConfigError, match="width 16 instead of 8"):
        train(make(width=16), steps=3, folder=tmp_path, resume=True)
    with pytest.raises(ConfigError, match="system 'product' instead of 'eot'"):
        train(make(), (Product(), SAMPLER), steps=3, folder=tmp_path, resume=True)


@pytest.mark.parametrize("name", ["state.json", "training.safetensors", "model.safetensors", "optimizers.pt"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"no tensor file"])
def test_damaged_checkpoints(tmp_path, name, content):
    train(make(), steps=2, folder=tmp_path)
    file = tmp_path / "step-000000002" / name
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(ModelError, match=r"expected a readable checkpoint in .*; a file is missing or damaged"):
        train(make(), steps=2, folder=tmp_path, resume=True)


def test_checkpoints_are_not_unpickled(tmp_path):
    train(make(), steps=2, folder=tmp_path)
    torch.save([{"state": Crash}], tmp_path / "step-000000002" / "optimizers.pt")
    with pytest.raises(ModelError, match="a file is missing or damaged"):
        train(make(), steps=2, folder=tmp_path, resume=True)


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from test_training import *
torch.set_num_threads(1)
def kill(step):
    if step == 6:
        os.kill(os.getpid(), signal.SIGKILL)
train(make(), hooked(kill), steps=9, checkpoint_every=4, folder={folder!r})
"""


@pytest.mark.slow
def test_a_killed_process_loses_nothing_but_the_steps_since_the_last_checkpoint(tmp_path):
    code = KILLED.format(tests=os.path.dirname(__file__), folder=str(tmp_path))
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    whole, resumed = make(), make(seed=1)
    expected = train(whole, steps=9, checkpoint_every=4)
    history = train(resumed, steps=9, checkpoint_every=4, folder=tmp_path, resume=True)
    assert same(whole, resumed)
    assert timeless(history) == timeless(expected)


# What goes wrong --------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_stops_and_loses_nothing(tmp_path):
    data, calls = examples(3), []

    def loss(pi, target):
        calls.append(1)
        return losses.kl(pi, target) * (math.nan if len(calls) == 4 else 1.0)

    model = make()
    recipe = Recipe(batch=3, loss=loss)
    with pytest.raises(
        NonFiniteError, match=r"received a loss of nan .* in step 4; the weights before it are in .*step-000000003"
    ):
        train(model, data, steps=9, validation=0, recipe=recipe, folder=tmp_path)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    stored = load_file(tmp_path / "step-000000003" / "training.safetensors")
    assert all(torch.equal(stored[name], t) for name, t in model.state_dict().items())
    history = train(model, data, steps=9, validation=0, recipe=recipe, folder=tmp_path, resume=True)
    assert history.steps == 9


def test_a_gradient_that_is_no_number_stops():
    def loss(pi, target):
        value = losses.kl(pi, target)
        return value + 0 * (pi.source_features.sum((-1, -2)) * 0).sqrt()

    with pytest.raises(
        NonFiniteError, match=r"a gradient of norm nan in step 1; the weights before it are in the model"
    ):
        train(make(), steps=3, validation=0, recipe=Recipe(groups=1, sources=1, targets=1, loss=loss))


def test_weights_that_are_no_numbers_stop():
    model = make()
    with torch.no_grad():
        model.source_encoder.skip.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"received a loss of nan .* in step 1"):
        train(model, steps=3, validation=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(), "expected a budget in steps or seconds, received neither"),
        (dict(steps=0), "expected steps as a whole number >= 1, received 0"),
        (dict(steps=2.5), "expected steps as a whole number >= 1, received 2.5"),
        (dict(steps=True), "expected steps as a whole number >= 1, received True"),
        (dict(seconds=0.0), "expected a positive, finite number of seconds, received 0.0"),
        (dict(seconds=math.inf), "expected a positive, finite number of seconds, received inf"),
        (dict(steps=1, seed=-1), "expected a seed >= 0, received -1"),
        (dict(steps=1, seed=0.5), "expected a seed >= 0, received 0.5"),
        (dict(steps=1, patience=0), "expected patience as a whole number >= 1, received 0"),
        (dict(steps=1, record_every=0), "expected record_every as a whole number >= 1, received 0"),
        (dict(steps=1, checkpoint_every=-1), "expected checkpoint_every as a whole number >= 1, received -1"),
        (dict(steps=1, resume=True), "expected a folder to resume from, received None"),
        (dict(steps=1, recipe=None), "expected a Recipe, received None"),
        (dict(seconds="a"), "expected a positive, finite number of seconds, received 'a'"),
        (dict(steps=1, folder=3), "expected a folder as a path, received 3"),
        (dict(steps=1, patience=2, validation=0), "expected a validation with patience=2, received none"),
    ],
    ids=str,
)
def test_wrong_arguments(options, message):
    with pytest.raises(ConfigError, match=message):
        train(make(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(loss="kl"), "expected loss 'fenchel_young' or a function, received 'kl'"),
        (dict(optimizer="sgd"), "expected optimizer 'muon' or 'adamw', received 'sgd'"),
        (dict(groups=0), "expected groups as a whole number >= 1, received 0"),
        (dict(batch=0), "expected batch as a whole number >= 1, received 0"),
        (dict(rate=-1.0), "expected rate >= 0 and finite, received -1.0"),
        (dict(matrix_rate=math.nan), "expected matrix_rate >= 0 and finite, received nan"),
        (dict(average=1.0), "expected average from 0 to below 1, received 1.0"),
        (dict(warmup=-0.1), "expected warmup from 0 to below 1, received -0.1"),
        (dict(clip=0.0), "expected clip > 0, received 0.0"),
        (dict(clip="a"), "expected clip > 0, received 'a'"),
        (dict(groups="a"), "expected groups as a whole number >= 1, received 'a'"),
        (dict(batch=1.5), "expected batch as a whole number >= 1, received 1.5"),
        (dict(rate="a"), "expected rate >= 0 and finite, received 'a'"),
        (dict(rate=1e300), r"expected rate up to 100, received 1e\+300"),
        (dict(matrix_rate=101.0), "expected matrix_rate up to 100, received 101.0"),
        (dict(warmup="a"), "expected warmup from 0 to below 1, received 'a'"),
        (dict(log_scale=1e4), "expected log_scale from -50 to 50, or None, received 10000.0"),
        (dict(log_scale=math.nan), "expected log_scale from -50 to 50, or None, received nan"),
        (dict(bfloat16=1), "expected bfloat16 as True or False, received 1"),
    ],
    ids=str,
)
def test_wrong_recipes(options, message):
    with pytest.raises(ConfigError, match=message):
        Recipe(**options)


def test_wrong_models():
    with pytest.raises(ConfigError, match="expected a SinkhornTransformer, received Linear"):
        train(torch.nn.Linear(2, 2), steps=1)
    with pytest.raises(ConfigError, match=r"received 'softmax'; use Recipe\(loss=losses.fenchel_young\)"):
        train(make(head="softmax"), steps=1)


# Several processes, progress --------------------------------------------------------------------------------------------


def test_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingExtraError, match=r"'accelerate', which is not installed.*sinkformer\[train\]"):
        train(make(), steps=1, accelerate=True)


def test_progress(capsys):
    train(make(), steps=4, progress=True)
    shown = capsys.readouterr().err
    assert "step=4" in shown
    assert "validation=" in shown
    assert "100%" in shown
    train(make(), steps=1)
    assert not capsys.readouterr().err


class Accelerator:
    """Stands in for accelerate's: processes are two threads, which meet at every reduction."""

    barrier = threading.Barrier(2, timeout=60)
    tensors: tuple[list, list] = ([], [])
    num_processes, device = 2, torch.device("cpu")

    def __init__(self, cpu: bool):
        assert cpu  # where the model is

    @property
    def process_index(self) -> int:
        return int(threading.current_thread().name)

    def gather(self, tensor: Tensor) -> Tensor:
        mine = self.tensors[self.process_index]
        mine.append(tensor.clone())
        self.barrier.wait()
        return torch.cat([part[len(mine) - 1] for part in self.tensors])

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        assert reduction == "sum"
        return self.gather(tensor[None]).sum(0)


def test_two_processes_train_one_model(monkeypatch, tmp_path):
    """Shares of one batch, gradients that add up, equal weights, those of one process; the first one writes."""
    monkeypatch.setitem(sys.modules, "accelerate", types.SimpleNamespace(Accelerator=Accelerator))
    models, histories = [make(dtype=torch.float64), make(seed=1, dtype=torch.float64)], [None, None]

    def work() -> None:
        k = int(threading.current_thread().name)
        histories[k] = train(models[k], steps=3, accelerate=True, folder=tmp_path)

    threads = [threading.Thread(target=work, name=str(k)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(history, History) for history in histories)
    assert same(*models)
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-000000003"]
    gradients = [max(part, key=Tensor.numel) for part in Accelerator.tensors]
    assert not torch.equal(*gradients)
    alone = make(dtype=torch.float64)
    train(alone, steps=3)
    for name, t in alone.state_dict().items():
        torch.testing.assert_close(t, models[0].state_dict()[name], rtol=0, atol=1e-9)


def test_logits_head_by_head_are_those_of_the_features():
    _, sampler = named("eot")
    config = SinkhornTransformerConfig(dim=2, width=16, rank=48, tensor=(6, 4), moments=True, epsilon=0.1)
    model = SinkhornTransformer(config, dtype=torch.float64)
    mu, nu = sampler.block(2, 3, 4, generator=torch.Generator().manual_seed(0))
    batch = Batch(mu, nu, torch.zeros(2, 3, 4, mu.n, nu.n, dtype=torch.float64))
    found = logits_of(model, batch, bfloat16=False)
    expected = torch.einsum("gsir,gtjr->gstij", model.source_encoder(mu), model.target_encoder(nu)) / 0.1
    assert torch.allclose(found, expected, rtol=0, atol=1e-11)


def test_a_system_of_other_dimensions_is_refused():
    model = SinkhornTransformer(SinkhornTransformerConfig(dim=3, width=8))
    with pytest.raises(ShapeError, match="dimensions"):
        fit(model, (EntropicTransport(dims=(2, 2)), PairSampler(dims=(3, 3))), steps=1)
