"""Operations on inner-product scores: kernels (in triton's interpreter) and blocks of torch against the dense formulas."""

import importlib
from contextlib import nullcontext

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from sinkformer.errors import BackendError, ConfigError, DeviceError, DTypeError, ShapeError
from sinkformer.ops import blocks, scores, triton

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WITHOUT_KERNELS = triton.unavailable(DEVICE)
needs_kernels = pytest.mark.skipif(WITHOUT_KERNELS is not None, reason=str(WITHOUT_KERNELS))
KERNELS = pytest.param("kernels", marks=needs_kernels)
PASSES = ("log_sum_exp", "hardmax", "sums", "pair_weights")
# The interpreter is numpy, which says so when it takes the maximum of NaNs.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")


def poisoned(make):
    """Uninitialised memory, as bad as it can be."""

    def full(*args, **kwargs):
        made = make(*args, **kwargs)
        return made.fill_(torch.nan if made.is_floating_point() else 2**30)

    return full


@pytest.fixture(autouse=True)
def _on_device():
    """Tensors made without a device lie on the GPU, if there is one."""
    with DEVICE:
        yield


@pytest.fixture(params=["torch", KERNELS])
def engine(request, monkeypatch):
    """Runs one of the two, fails if a pass of the other is made, and counts the passes."""
    streamed = None if WITHOUT_KERNELS else importlib.import_module("sinkformer.ops.triton.streamed")
    wanted, other = (blocks, streamed) if request.param == "torch" else (streamed, blocks)
    calls = []

    def counted(name, run):
        def call(*args, **kwargs):
            calls.append(name)
            return run(*args, **kwargs)

        return call

    def refused(*args, **kwargs):
        raise AssertionError("the other engine ran")

    for name in PASSES:
        monkeypatch.setattr(wanted, name, counted(name, getattr(wanted, name)))
        if other is not None:
            monkeypatch.setattr(other, name, refused)
    if request.param == "kernels":
        monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
        monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    with scores.use_kernels(request.param == "kernels"):
        yield request.param
    assert calls, "no pass was made"


# The formulas --------------------------------------------------------------------------------------------------------


def dense_scores(t: dict) -> Tensor:
    """S in float64, from keys repeated for every problem."""
    count = len(t["q"])
    keys = t["k"].repeat_interleave(count // max(1, len(t["k"])), 0)
    found = (t["q"].double() @ keys.double().mT) * t["scale"].double().view(-1, 1, 1)
    return found if t["bias"] is None else found + t["bias"].double()


def dense_plan(t: dict) -> Tensor:
    return (t["f"].double().unsqueeze(-1) + dense_scores(t) + t["g"].double().unsqueeze(-2)).exp()


def dense_moment(t: dict) -> Tensor:
    plan, s = dense_plan(t), dense_scores(t)
    return (plan * s.masked_fill(s == -torch.inf, 0.0)).sum(-1)


def dense_log_sum_exp(t: dict) -> Tensor:
    """Rows without a pair are constants: the derivative of torch.logsumexp is NaN there."""
    x = dense_scores(t) + t["g"].double().unsqueeze(-2)
    alone = (x == -torch.inf).all(-1)
    return x.masked_fill(alone.unsqueeze(-1), 0.0).logsumexp(-1).masked_fill(alone, -torch.inf)


def dense_hardmax(t: dict) -> Tensor:
    x = dense_scores(t) + t["g"].double().unsqueeze(-2)
    return x.gather(-1, x.argmax(-1, keepdim=True)).squeeze(-1)


DENSE = {
    "log_sum_exp": dense_log_sum_exp,
    "transport": lambda t: (
        dense_plan(t) @ t["values"].double().repeat_interleave(len(t["q"]) // max(1, len(t["k"])), 0)
    ),
    "moment": dense_moment,
    "hardmax": dense_hardmax,
}


def called(name: str, t: dict, **options) -> Tensor:
    more = {"scale": t["scale"], "bias": t["bias"], **options}
    if name == "log_sum_exp":
        return scores.log_sum_exp(t["q"], t["k"], t["g"], **more)
    if name == "hardmax":
        return scores.hardmax(t["q"], t["k"], t["g"], **more)[0]
    if name == "moment":
        return scores.moment(t["q"], t["k"], t["f"], t["g"], **more)
    return scores.transport(t["q"], t["k"], t["f"], t["g"], t["values"], **more)


of_all = pytest.mark.parametrize("name", list(DENSE))


def problem(B=2, n=4, m=5, r=3, e=2, group=1, bias=None, dtype=torch.float64, seed=0) -> dict:
    """Scores of size one, weights of a plan of mass about one; what has a dtype is rounded to it first."""
    generator = torch.Generator("cpu").manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device=CPU).to(DEVICE, dtype)

    shapes = {"full": (B, n, m), "shared": (n, m), "columns": (m,), "rows": (B, n, 1), "problems": (B, 1, 1)}
    t = {
        "q": (normal(B, n, r) / max(1, r) ** 0.5).to(dtype),
        "k": normal(B // group, m, r),
        "f": normal(B, n, dtype=wide) - 0.5,
        "g": normal(B, m, dtype=wide) - 1,
        "values": normal(B // group, m, e),
        "scale": normal(B, dtype=wide),
        "bias": None if bias is None else normal(*shapes.get(bias, (B, n, m))),
    }
    if bias == "forbidden":
        t["bias"] = t["bias"].masked_fill(t["bias"] < 0.3, -torch.inf)
        t["bias"][0, 0] = -torch.inf
    return t


def leaves(t: dict) -> dict:
    return {key: x if x is None else x.clone().requires_grad_() for key, x in t.items()}


def error(found: Tensor, wanted: Tensor) -> float:
    """Relative to the largest, or to one; infinities must be the same."""
    if not found.numel():
        return 0.0
    found, wanted = found.detach().double(), wanted.detach().double()
    assert torch.equal(found == -torch.inf, wanted == -torch.inf)
    found, wanted = found.masked_fill(found == -torch.inf, 0.0), wanted.masked_fill(wanted == -torch.inf, 0.0)
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1.0))


def assert_right(name: str, t: dict, value: float, derivative: float) -> None:
    mine, theirs = leaves(t), leaves(t)
    found, wanted = called(name, mine), DENSE[name](theirs)
    assert found.dtype == t["f"].dtype
    assert found.shape == wanted.shape
    assert error(found, wanted) < value
    upstream = torch.randn(
        wanted.shape, generator=torch.Generator("cpu").manual_seed(1), dtype=torch.float64, device=CPU
    )
    upstream = upstream.to(DEVICE, found.dtype).masked_fill(found == -torch.inf, 0.0)
    used = [key for key, x in mine.items() if x is not None]
    gradients = [
        grad(y, [z[key] for key in used], u.to(y.dtype), allow_unused=True)
        for y, z, u in (
            (found, mine, upstream),
            (wanted.masked_fill(wanted == -torch.inf, 0.0), theirs, upstream.double()),
        )
    ]
    for key, one, other in zip(used, *gradients, strict=True):
        assert (one is None) == (other is None), key
        if one is not None:
            assert one.dtype == t[key].dtype
            assert error(one, other) < derivative, key


CASES = {
    "one": {"B": 1, "n": 1, "m": 1, "r": 1, "e": 1},
    "several tiles": {"B": 1, "n": 70, "m": 70, "r": 5, "e": 3, "bias": "shared"},
    "columns in parts": {"B": 1, "n": 5, "m": 140, "r": 4, "e": 3},
    "groups": {"B": 4, "n": 5, "m": 33, "r": 20, "e": 17, "group": 2, "bias": "full"},
    "wide": {"B": 1, "n": 3, "m": 2, "r": 70, "e": 40, "bias": "columns"},
    "rows": {"B": 3, "n": 17, "m": 9, "r": 8, "group": 3, "bias": "rows"},
    "forbidden": {"B": 2, "n": 6, "m": 7, "r": 2, "bias": "forbidden"},
    "problems": {"B": 2, "n": 3, "m": 3, "r": 1, "e": 1, "bias": "problems"},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@of_all
def test_values_and_gradients_are_those_of_the_dense_formula(engine, name, case):
    assert_right(name, problem(**case), 1e-12, 1e-11)


@pytest.mark.parametrize("case", [CASES["several tiles"], CASES["groups"]])
@of_all
def test_float32(engine, name, case):
    assert_right(name, problem(**case, dtype=torch.float32), 3e-6, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@of_all
def test_features_of_two_bytes_are_multiplied_exactly(engine, name, dtype):
    # Sums are float32; plans are rounded where they multiply such values, and gradients to the dtype of the features.
    precise = 3e-6 if name != "transport" else 4e-3
    assert_right(name, problem(B=2, n=37, m=33, r=20, e=17, group=2, bias="shared", dtype=dtype), precise, 2e-2)


@of_all
def test_a_scale_that_is_a_number_and_one_for_all_problems(engine, name):
    t = problem()
    t["scale"] = torch.full_like(t["scale"], -0.7)
    assert error(called(name, t, scale=-0.7), DENSE[name](t)) < 1e-12
    assert error(called(name, t, scale=torch.tensor(-0.7)), DENSE[name](t)) < 1e-7


def test_wide_log_weights_are_taken_in_the_dtype_of_sums(engine):
    t = problem(dtype=torch.float32)
    found = scores.log_sum_exp(t["q"], t["k"], t["g"].double())
    assert found.dtype == torch.float32
    assert torch.equal(found, scores.log_sum_exp(t["q"], t["k"], t["g"]))


@settings(max_examples=5)
@given(
    st.integers(0, 3), st.integers(0, 9), st.integers(0, 9), st.integers(0, 18), st.integers(0, 18), st.integers(1, 3)
)
@example(0, 2, 2, 2, 2, 1)
@example(2, 0, 2, 2, 2, 1)
@example(2, 2, 0, 2, 2, 2)
@example(2, 2, 2, 0, 2, 1)
@example(2, 2, 2, 2, 0, 1)
@pytest.mark.parametrize("asked", [False, pytest.param(True, marks=needs_kernels)])
@of_all
def test_any_shape(name, asked, B, n, m, r, e, group):
    t = leaves(problem(B * group, n, m, r, e, group))
    with scores.use_kernels(asked):
        found = called(name, t)
        used = [x for x in t.values() if x is not None] if found.requires_grad else []  # no pair at all
        gradients = grad(found.masked_fill(found == -torch.inf, 0.0).sum(), used, allow_unused=True) if used else ()
    if m:
        assert error(found, DENSE[name](t)) < 1e-12
    else:
        assert (found == (-torch.inf if name in ("log_sum_exp", "hardmax") else 0.0)).all()
    assert all(x is None or bool(x.isfinite().all()) for x in gradients)


def test_hardmax_finds_the_first_of_equals(engine):
    t = problem(B=2, n=40, m=140, r=2)
    found, index = scores.hardmax(t["q"], t["k"], t["g"])
    wanted = DENSE["hardmax"]({**t, "scale": torch.ones(2)})
    assert error(found, wanted) < 1e-12
    assert index.dtype == torch.int64
    q, k = torch.zeros(1, 3, 2), torch.zeros(1, 140, 2)
    h = torch.zeros(1, 140).index_fill(1, torch.tensor([0, 3, 4]), -1.0)
    found, index = scores.hardmax(q, k, h)
    assert (found.tolist(), index.tolist()) == ([[0.0] * 3], [[1] * 3])
    assert scores.hardmax(q, k, torch.full_like(h, -torch.inf))[1].tolist() == [[0] * 3]


# Weight zero ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", [torch.nan, torch.inf])
@of_all
def test_atoms_of_weight_zero_are_never_looked_at(engine, name, junk):
    """As if they were not there: values, and gradients, which are zero for them."""
    t = problem(B=2, n=6, m=40, r=3, e=20, bias="full")
    live_rows, live = torch.tensor([0, 1, 3, 4]), torch.tensor([1, 2, *range(4, 40)])
    short = {
        **{key: t[key][:, live_rows] for key in ("q", "f")},
        **{key: t[key][:, live] for key in ("k", "g", "values")},
        "scale": t["scale"],
        "bias": t["bias"][:, live_rows][..., live],
    }
    dead_rows, dead = torch.tensor([2, 5]), torch.tensor([0, 3])
    for key in ("k", "values"):
        t[key][:, dead] = junk
    t["g"][:, dead] = -torch.inf
    t["bias"][..., dead] = junk
    if name in ("transport", "moment"):  # the others have no weights for rows
        t["f"][:, dead_rows], t["q"][:, dead_rows], t["bias"][:, dead_rows] = -torch.inf, junk, junk
    mine, theirs = leaves(t), leaves(short)
    found, wanted = called(name, mine), DENSE[name](theirs)
    assert error(found[:, live_rows], wanted) < 1e-12
    used = ["q", "k", "g", "scale", "bias"]
    kept = found[:, live_rows]
    for key, one, other in zip(
        used,
        grad(kept.sum(), [mine[key] for key in used]),
        grad(wanted.sum(), [theirs[key] for key in used]),
        strict=True,
    ):
        assert bool(one.isfinite().all()), key
        if key == "scale":
            assert error(one, other) < 1e-11
            continue
        if key != "q":
            if key == "bias":
                assert not one[..., dead].any()
                one = one[..., live]
            else:
                assert not one[:, dead].any()
                one = one[:, live]
        if key in ("q", "bias"):
            one = one[:, live_rows]
        assert error(one, other) < 1e-11, key
    if name in ("transport", "moment"):
        assert not found[:, dead_rows].any()


@of_all
def test_rows_without_a_pair_are_empty_and_have_no_gradient(engine, name):
    t = problem(B=2, n=3, m=4, bias="full")
    t["g"][0] = -torch.inf
    t["bias"][1, 2] = -torch.inf
    t = leaves(t)
    found = called(name, t)
    empty = found[0], found[1, 2]
    assert all(bool((x == (-torch.inf if name in ("log_sum_exp", "hardmax") else 0.0)).all()) for x in empty)
    used = [t[key] for key in ("q", "k", "g", "scale", "bias")]
    # Minus infinity is its own value: whatever depends on it is nobody's derivative.
    gradients = grad(found, used, torch.ones_like(found))
    assert all(bool(x.isfinite().all()) for x in gradients)
    assert not gradients[0][0].any()
    assert not gradients[0][1, 2].any()
    assert not gradients[4][1, 2].any()


def test_a_row_of_nan_that_nobody_uses_does_not_spread(engine):
    t = problem()
    t["q"][0, 1] = torch.nan
    t = leaves(t)
    found = called("log_sum_exp", t)
    assert found[0, 1].isnan()
    used = [t[key] for key in ("q", "k", "g", "scale")]
    gradients = grad(found.masked_fill(found.isnan(), 0.0).sum(), used)
    assert all(bool(x.isfinite().all()) for x in gradients)
    # What it is used for is not silently a number.
    assert grad(called("log_sum_exp", t).sum(), t["k"])[0].isnan().any()


# Range and rounding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_large_scores_do_not_overflow(engine, size):
    t = problem(n=20, m=35, dtype=torch.float32)
    t["scale"] = torch.full_like(t["scale"], size)
    found = called("log_sum_exp", t)
    assert float((found.double() - DENSE["log_sum_exp"](t)).abs().max()) < 2e-7 * 5 * abs(size)
    ones = torch.ones(2, 35, 1)
    rows = scores.transport(t["q"], t["k"], -found, t["g"], ones, scale=t["scale"])
    # The rounding of an exponent of size 5e4.
    assert error(rows, torch.ones(2, 20, 1)) < 2e-2


@of_all
def test_autocast_changes_nothing(engine, name):
    t = leaves(problem(n=20, m=15, r=7, e=5, dtype=torch.float32))

    def run(context):
        with context:
            found = called(name, t)
        return found, *grad(found.square().sum(), [t["q"], t["k"], t["scale"]])

    for one, other in zip(run(nullcontext()), run(torch.autocast("cpu", torch.bfloat16)), strict=True):
        assert torch.equal(one, other)


class _Largest(TorchDispatchMode):
    """Remembers the most entries that a new tensor has had."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        made = [x for x in (found if isinstance(found, (tuple, list)) else (found,)) if isinstance(x, Tensor)]
        self.entries = max([self.entries, *(x.untyped_storage().nbytes() // x.element_size() for x in made)])
        return found


@pytest.mark.parametrize("asked", ["torch", KERNELS])
def test_nothing_of_the_size_of_the_scores_is_made(asked, monkeypatch):
    monkeypatch.setattr(blocks, "_CACHED_ENTRIES", 300)
    monkeypatch.setattr(blocks, "_CACHED_ROWS", 2)
    module = blocks if asked == "torch" else importlib.import_module("sinkformer.ops.triton.streamed")
    t = problem(B=2, n=100, m=90, r=3, e=2, dtype=torch.float32)
    bias = torch.zeros(1, 1, 90).expand(2, 100, 90)
    scored = (t["q"], t["k"], t["f"], t["g"], t["scale"], bias)
    needed = [True] * 5 + [False] * 4
    with _Largest() as largest:
        module.log_sum_exp(t["q"], t["k"], t["g"], t["scale"], bias)
        module.hardmax(t["q"], t["k"], t["g"], t["scale"], bias)
        module.sums(*scored, torch.ones(2, 100, 2), t["values"], t["k"], True)
        module.pair_weights(*scored[:5], bias[:1, :1], None, None, True)
        blocks.differentiate_sums(blocks.Terms(*scored), False, torch.ones(2, 100, 0), torch.ones(2, 100), needed)
    assert largest.entries < 2 * 100 * 90


# Derivatives of any order --------------------------------------------------------------------------------------------


ASKED = {"log_sum_exp": "qkg", "transport": "qkfg", "moment": "qkfg", "hardmax": "qkg"}


def as_function(name: str, t: dict):
    """The operation as a function of everything that it has a derivative in."""
    keys = [*ASKED[name], "scale", *(["values"] if name == "transport" else [])]
    return lambda *given: called(name, {**t, **dict(zip(keys, given, strict=True))}), [t[key] for key in keys]


@of_all
def test_second_derivatives_are_those_of_the_dense_formula(engine, name):
    """Of a loss in which every derivative is used; a bias that is constant stays in."""
    t = problem(B=2, n=3, m=4, r=2, e=3, group=2, bias="forbidden")
    t["bias"][0, 0, 0] = 0.5
    keys = [*ASKED[name], "scale", *(["values"] if name == "transport" else [])]
    found = []
    for run in (lambda t: called(name, t), DENSE[name]):
        own = {**leaves(t), "bias": t["bias"]}
        used = [own[key] for key in keys]
        value = run(own)
        first = grad(value.masked_fill(value == -torch.inf, 0.0).square().sum(), used, create_graph=True)
        found.append(grad(sum(x.cos().sum() for x in first), used, allow_unused=True))
    for key, one, other in zip(keys, *found, strict=True):
        assert (one is None) == (other is None), key
        assert one is None or error(one, other) < 1e-10, key


@of_all
def test_gradcheck_and_gradgradcheck(name):
    t = leaves(problem(B=2, n=2, m=3, r=2, e=2, group=2))
    function, arguments = as_function(name, t)
    assert gradcheck(function, arguments)
    assert gradgradcheck(function, arguments)


def test_an_upstream_of_zero_has_derivatives_too(engine):
    """Two backward passes give a product with the Jacobian: linear in the upstream, which is zero."""
    t = leaves(problem())
    upstream = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    tangent = torch.ones_like(t["q"])
    products = []
    for found in (called("log_sum_exp", t), DENSE["log_sum_exp"](t)):
        (back,) = grad(found, t["q"], upstream, create_graph=True)
        products.append(grad((back * tangent).sum(), upstream)[0])
    assert products[1].abs().min() > 0
    assert error(*products) < 1e-12


@pytest.mark.parametrize("name", ["log_sum_exp", "transport", "moment"])
def test_third_derivatives_and_those_behind_the_gradient_of_a_bias_are_refused(engine, name):
    t = leaves(problem(bias="full"))
    (on_bias,) = grad(called(name, t).square().sum(), t["bias"], create_graph=True)
    with pytest.raises(BackendError, match="received a request for a second"):
        grad(on_bias.square().sum(), t["q"])
    t["bias"] = None
    first = grad(called(name, t).square().sum(), t["q"], create_graph=True)[0]
    second = grad(first.square().sum(), t["q"], create_graph=True)[0]
    with pytest.raises(BackendError, match="received a request for the third"):
        grad(second.square().sum(), t["q"])


# torch.library and torch.compile --------------------------------------------------------------------------------------


OPERATIONS = ("log_sum_exp", "hardmax", "transport", "moment", "sums", "pair_weights")


@pytest.mark.parametrize(
    ("name", "asked"),
    [*((name, False) for name in OPERATIONS), pytest.param("log_sum_exp", True, marks=needs_kernels)],
)
def test_opcheck(name, asked):
    t = problem(B=2, group=2, bias="shared")
    t["bias"] = t["bias"].unsqueeze(0)
    if name in ("log_sum_exp", "transport", "moment", "sums"):
        t = leaves(t)
    bias = t["bias"]
    left = torch.ones(2, 4, 2, dtype=torch.float64)
    more = {
        "log_sum_exp": (t["g"], t["scale"], bias),
        "hardmax": (t["g"], t["scale"], bias),
        "transport": (t["f"], t["g"], t["values"], t["scale"], bias),
        "moment": (t["f"], t["g"], t["scale"], bias),
        "sums": (t["f"], t["g"], t["scale"], None, left, t["values"], t["k"], True),
        "pair_weights": (t["f"], t["g"], t["scale"], bias, left, t["values"], False),
    }[name]
    torch.library.opcheck(getattr(torch.ops.sinkformer, name).default, (t["q"], t["k"], *more, "ieee", asked))


def sweeps(q, k, log_a, log_b):
    """Three sweeps of Sinkhorn, and what they carry to the rows."""
    g = torch.zeros_like(log_b)
    for _ in range(3):
        f = -scores.log_sum_exp(q, k, g + log_b, scale=0.5)
        g = -scores.log_sum_exp(k, q, f + log_a, scale=0.5)
    return scores.transport(q, k, f + log_a, g + log_b, k, scale=0.5).square().sum()


@pytest.mark.parametrize(
    ("backend", "asked"),
    [("eager", False), ("aot_eager", False), pytest.param("aot_eager", True, marks=needs_kernels)],
)
def test_compiled_without_a_break(backend, asked):
    t = leaves(problem())
    given = (t["q"], t["k"], *(t[key].detach().log_softmax(-1) for key in ("f", "g")))
    torch.compiler.reset()
    compiled = torch.compile(sweeps, fullgraph=True, backend=backend)
    with scores.use_kernels(asked):
        wanted, found = sweeps(*given), compiled(*given)
        for one, other in zip(
            (found, *grad(found, given[:2], retain_graph=True)), (wanted, *grad(wanted, given[:2])), strict=True
        ):
            assert error(one, other) < 1e-12


# Which engine --------------------------------------------------------------------------------------------------------


def test_a_cpu_runs_torch_unless_asked():
    t = problem()
    assert scores._engine(t["q"], None) is blocks
    with scores.use_kernels(False):
        assert scores._engine(t["q"], None) is blocks


@needs_kernels
def test_kernels_that_are_asked_for_run_or_say_why_not(monkeypatch):
    t = problem()
    with scores.use_kernels(True):
        assert scores._engine(t["q"], None).__name__ == "sinkformer.ops.triton.streamed"
        with scores.use_kernels(None):
            assert scores._engine(t["q"], None) is blocks
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        with pytest.raises(BackendError, match="cannot run: the Triton kernels run on CUDA devices"):
            called("log_sum_exp", t)


@needs_kernels
def test_columns_are_cut_into_parts_where_rows_are_too_few():
    streamed = importlib.import_module("sinkformer.ops.triton.streamed")
    tiles = streamed.Tiles(32, 32, 32, 4, 2)
    assert streamed._grid(1, 5, 140, tiles, CPU) == ((1, 3, 1), 3, 64)
    assert streamed._grid(5, 5, 140, tiles, CPU) == ((5, 1, 1), 1, 160)


def test_backward_runs_what_forward_ran(engine):
    t = leaves(problem())
    found = called("moment", t)
    with scores.use_kernels(engine == "torch"):
        grad(found.sum(), t["q"])


# Arguments -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"k": torch.zeros(2, 5, 4)},
            ShapeError,
            r"queries \(B, n, r\) and keys .* received \(2, 4, 3\) and \(2, 5, 4\)",
        ),
        ({"k": torch.zeros(3, 5, 3)}, ShapeError, "flatten batch axes"),
        ({"q": torch.zeros(4, 3)}, ShapeError, "flatten batch axes"),
        ({"k": torch.zeros(2, 5, 3).double()}, DTypeError, "keys of dtype torch.float32.*convert one"),
        ({"q": torch.zeros(2, 4, 3).int()}, DTypeError, "a floating dtype, received torch.int32"),
        ({"k": torch.zeros(2, 5, 3, device="meta")}, DeviceError, f"keys on {DEVICE}.*received meta"),
        ({"g": torch.zeros(2, 4)}, ShapeError, r"one number for each atom, shape \(2, 5\), received \(2, 4\)"),
        ({"scale": torch.zeros(3)}, ShapeError, r"a scale of shape \(2,\), or a number"),
        ({"bias": torch.zeros(2, 4, 4)}, ShapeError, r"broadcasts to \(2, 4, 5\), received \(2, 4, 4\)"),
        ({"bias": torch.zeros(1, 1, 1, 1)}, ShapeError, "broadcasts to"),
        (
            {"bias": torch.ones(4, 5) > 0},
            DTypeError,
            "a mask as a bias is 0 where pairs are allowed and -inf elsewhere",
        ),
        ({"precision": "bf16"}, ConfigError, "'ieee' or 'tf32', received 'bf16'"),
    ],
)
@of_all
def test_arguments_that_do_not_fit_are_refused(name, changes, kind, message):
    t = problem(dtype=torch.float32)
    options = {key: x for key, x in changes.items() if key == "precision"}
    with pytest.raises(kind, match=message):
        called(name, {**t, **changes}, **options)


def test_values_must_match_the_keys():
    t = problem(dtype=torch.float32)
    for values in (torch.zeros(2, 4, 2), torch.zeros(1, 5, 2), torch.zeros(5, 2)):
        with pytest.raises(ShapeError, match="one row for each key"):
            called("transport", {**t, "values": values})


@needs_kernels
def test_values_that_are_the_keys_read_in_another_order():
    t = problem(B=1, n=3, m=4, r=4, e=4, dtype=torch.float32)
    for values in (t["k"].mT, t["k"]):
        given = {**t, "values": values}
        with scores.use_kernels(True):
            found = called("transport", given)
        assert error(found, DENSE["transport"](given)) < 1e-5
