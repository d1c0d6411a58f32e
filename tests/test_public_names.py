"""Public names are frozen: adding, renaming or removing one is a decision, made here too, and told in CHANGELOG.md."""

import inspect
import types

import pytest

import sinkformer as sf
from sinkformer import (
    costs,
    couplings,
    encoders,
    errors,
    losses,
    measures,
    models,
    plans,
    solutions,
    solvers,
    testing,
)
from sinkformer.ops import cpu, dispatch

PACKAGE = {
    "Cost",
    "Coupling",
    "Encoder",
    "Euclidean",
    "Matrix",
    "Measure",
    "NegativeDot",
    "Shard",
    "SinkhornAttention",
    "SinkhornTransformer",
    "SinkhornTransformerConfig",
    "Solution",
    "SqEuclidean",
    "Status",
    "W1Result",
    "approximation",
    "attention",
    "costs",
    "errors",
    "evaluation",
    "explain",
    "interpolation",
    "losses",
    "metrics",
    "plots",
    "sinkhorn",
    "systems",
    "testing",
    "text",
    "training",
    "use_backend",
    "w1",
    "warm_up",
}

ROOMS = {
    costs: {"Cost", "Euclidean", "Matrix", "NegativeDot", "SqEuclidean", "as_cost", "forbid"},
    couplings: {
        "Certificate",
        "Coupling",
        "DenseCoupling",
        "EntropicCoupling",
        "RoundedCoupling",
        "diameter",
    },
    plans: {"Conditional", "Plan", "TopK"},
    encoders: {"Block", "Encoder", "GatedMLP", "MeasureAttention", "Moments"},
    errors: {
        "BackendError",
        "ConfigError",
        "ConvergenceError",
        "ConvergenceWarning",
        "DTypeError",
        "DatasetError",
        "DeviceError",
        "DistributedError",
        "FormatError",
        "GradientWarning",
        "InfeasibleError",
        "MissingExtraError",
        "ModelError",
        "NonFiniteError",
        "PrecisionError",
        "PrecisionWarning",
        "ShapeError",
        "SinkformerError",
        "SinkformerWarning",
        "TextError",
        "TextWarning",
        "WeightError",
    },
    dispatch: {"Asked", "Choice", "choose", "explain", "kernels", "sharded", "use_backend"},
    cpu: {"Solved", "pull_back", "solve", "unavailable", "warm_up"},
    losses: {"entropic_w1", "fenchel_young", "kl", "total_variation"},
    measures: {"Measure", "check_compatible", "select"},
    models: {"SinkhornTransformer", "SinkhornTransformerConfig"},
    solutions: {"Solution", "Status", "report"},
    testing: {"check_coupling_model", "check_encoder", "random_measure"},
}

MEMBERS = {
    sf.Measure: {
        "batch_shape",
        "collate",
        "d",
        "detach",
        "device",
        "dtype",
        "from_numpy",
        "from_packed",
        "map",
        "merged",
        "n",
        "normalized",
        "numpy",
        "pin_memory",
        "product",
        "pushforward",
        "requires_grad",
        "split",
        "stack",
        "to",
        "to_packed",
        "uniform",
        "unstack",
        "with_null",
    },
    sf.Coupling: {
        "argmax",
        "as_measure",
        "barycentric_projection",
        "batch_shape",
        "conditional",
        "cost",
        "detach",
        "device",
        "dtype",
        "entropy",
        "from_dense",
        "mT",
        "marginal_error",
        "marginals",
        "mass",
        "mutual_information",
        "rounded",
        "sample",
        "shape",
        "solve",
        "to_dense",
        "topk",
    },
    sf.Solution: {"converged", "map", "potentials", "status", "transposed", "worst"},
}


# Rooms that are folders: what they export.
FOLDERS = {
    "attention": {
        "AttentionPlan",
        "SinkhornAttention",
        "attention_plan",
        "replace_attention",
        "sinkhorn_attention",
    },
    "approximation": {"Approximation", "Factors", "Ledger", "Partition", "Step", "Table", "build"},
    "evaluation": {
        "Attack",
        "CrossSoftmax",
        "Distance",
        "Distances",
        "Evaluation",
        "FixedCost",
        "Pair",
        "Report",
        "Summary",
        "adversarial",
        "best_fixed_cost",
        "distances",
        "evaluate",
        "load_couplings",
        "load_predictor",
        "report",
        "save_couplings",
    },
    "interpolation": {
        "Attention",
        "Block",
        "Certificate",
        "Comparison",
        "Entry",
        "ExactBlock",
        "Export",
        "FeedForward",
        "Interpolant",
        "Ledger",
        "SequencePairs",
        "Stage",
        "Tikhonov",
        "TokenTransformer",
        "Verdict",
        "assign",
        "block_parameters",
        "check_tokens",
        "compare",
        "construct",
        "construct_causal",
        "direct_blocks",
        "load",
        "resnet_parameters",
        "teacher",
        "theorem_blocks",
        "theorem_parameters",
        "tikhonov",
    },
    "metrics": {
        "AlignmentScores",
        "LinkCounts",
        "W1Result",
        "count_links",
        "coupling_tv",
        "coupling_w1",
        "directed_hausdorff",
        "hausdorff",
        "score_alignments",
        "target_coupling",
        "w1",
    },
    "plots": {
        "animation",
        "check_format",
        "coupling",
        "distribution",
        "evaluation",
        "evaluation_figure",
        "new_axes",
        "parameter_counts",
        "phases",
        "reliability",
        "save",
        "token_paths",
    },
    "systems": {
        "ContextSwitch",
        "EntropicSystem",
        "EntropicTransport",
        "ExactTransport",
        "HardSwitch",
        "Mixture",
        "Monotone",
        "PairSampler",
        "Product",
        "RandomTeacher",
        "System",
        "Whitened",
        "every_pair",
        "named",
    },
    "training": {"History", "Muon", "Recipe", "fenchel_young", "fit"},
}


def public(names) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def defined_in(module: types.ModuleType) -> set[str]:
    """Public classes and functions that a module makes itself."""
    return public(
        name
        for name, value in vars(module).items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module.__name__
    )


def test_package():
    # Modules that were imported are attributes of the package as well; they are no promise.
    loaded = {name for name in dir(sf) if isinstance(getattr(sf, name), types.ModuleType)}
    promised = public(dir(sf)) - (loaded - PACKAGE) - {"TYPE_CHECKING", "importlib"}
    assert promised == PACKAGE
    assert all(hasattr(sf, name) for name in PACKAGE)
    assert isinstance(sf.__version__, str)


@pytest.mark.parametrize("module", ROOMS, ids=lambda module: module.__name__)
def test_rooms(module):
    assert defined_in(module) == ROOMS[module]


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders(folder):
    module = getattr(sf, folder)
    exported = {name for name, value in vars(module).items() if not isinstance(value, types.ModuleType)}
    assert public(exported) - {"annotations"} == FOLDERS[folder]


@pytest.mark.parametrize("kind", MEMBERS, ids=lambda kind: kind.__name__)
def test_members(kind):
    own = [base for base in kind.__mro__ if base.__module__.startswith("sinkformer.")]
    assert set().union(*(public(vars(base)) for base in own)) == MEMBERS[kind]


def test_parameters_of_the_main_functions():
    def parameters(function):
        return list(inspect.signature(function).parameters)

    options = ["mask", "tau_a", "tau_b", "tolerance", "max_iterations", "init", "annealing", "gradient"]
    options += ["gradient_tolerance", "on_failure"]
    assert parameters(sf.sinkhorn) == ["mu", "nu", "cost", "epsilon", *options, "process_group"]
    assert list(solvers.SinkhornOptions.__annotations__) == options
    assert parameters(sf.Coupling.solve) == ["mu", "nu", "cost", "epsilon", "features", "maps", "options"]
    assert parameters(sf.Coupling.sample) == ["self", "k", "generator"]
    assert parameters(sf.SinkhornTransformer.forward) == ["self", "mu", "nu", "mask", "init", "on_failure"]
    assert parameters(losses.fenchel_young) == ["pi", "target"]
    assert parameters(losses.entropic_w1) == [
        "pi",
        "target",
        "eta",
        "ground",
        "debiased",
        "max_iterations",
        "tolerance",
    ]
    # Only the data go by position.
    for function in (sf.sinkhorn, sf.Coupling.solve, losses.entropic_w1):
        kinds = [p.kind for p in inspect.signature(function).parameters.values()]
        assert kinds[:2] == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 2
        assert inspect.Parameter.POSITIONAL_OR_KEYWORD not in kinds[2:]


def test_errors_are_what_a_caller_would_catch():
    for name in ROOMS[errors]:
        kind = getattr(errors, name)
        base = errors.SinkformerWarning if name.endswith("Warning") else errors.SinkformerError
        assert issubclass(kind, base)
    for kind in (errors.ShapeError, errors.WeightError, errors.NonFiniteError, errors.ConfigError, errors.TextError):
        assert issubclass(kind, ValueError)
    assert issubclass(errors.DTypeError, TypeError)
    assert issubclass(errors.ConvergenceError, RuntimeError)
    assert issubclass(errors.SinkformerWarning, UserWarning)
    message = str(errors.MissingExtraError("plot", "matplotlib"))
    assert "pip install 'sinkformer[plot]'" in message
    assert issubclass(errors.MissingExtraError, ImportError)


def test_statuses():
    assert [(s.name, int(s)) for s in sf.Status] == [
        ("CONVERGED", 0),
        ("MAX_ITERATIONS", 1),
        ("INFEASIBLE", 2),
        ("NONFINITE", 3),
    ]
    assert all(s.explanation for s in sf.Status)
    assert str(sf.Status.CONVERGED) == "CONVERGED"


def test_unknown_names():
    with pytest.raises(AttributeError, match="module 'sinkformer' has no attribute 'nothing'"):
        sf.nothing  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
