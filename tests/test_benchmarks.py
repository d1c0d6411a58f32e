"""The benchmark harness: a wrong measure would make every figure of docs/performance.md wrong."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the benchmarks are not part of the package that is installed

from benchmarks import harness, peers, problems, report, sinkhorn, suites  # noqa: E402
from benchmarks.gpu import cards, predictions  # noqa: E402
from benchmarks.gpu import problems as gpu_problems  # noqa: E402
from benchmarks.gpu import solvers as gpu_solvers  # noqa: E402
from benchmarks.problems import Answer  # noqa: E402

BUDGET = harness.Budget(rounds=2, once=0.0, call=5.0, tuning=5.0)


def silent(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def given() -> problems.Problems:
    return problems.ragged(3, 0.05, torch.float64, low=3, high=9)


def exact(given: problems.Problems) -> Answer:
    u, v = zip(*given.references, strict=True)
    return Answer(list(u), list(v))


def plans(given: problems.Problems) -> list[np.ndarray]:
    return [problems.gibbs(given.live(i)[0], given.live(i)[3], *given.references[i]) for i in range(len(given))]


def solver(name: str, call, **options) -> peers.Solver:
    """A solver that returns ``call(problems, settings)``, an ``Answer``."""
    defaults = {
        "ladder": lambda given, target: [{}],
        "prepare": lambda given, settings: lambda: call(given, settings),
        "error": problems.measured_error,
    }
    return peers.Solver(name, "torch", **(defaults | options))


# The measure -------------------------------------------------------------------------------------------------------------


def test_problems_are_what_the_page_says(given):
    for i, (n, m) in enumerate(given.sizes):
        cost, a, b, epsilon = given.live(i)
        assert cost.shape == (n, m)
        assert {n, m} <= set(range(3, 10))
        np.testing.assert_allclose(given.q[i, :n].norm(dim=-1), 1)
        np.testing.assert_allclose(cost, -(given.q[i, :n] @ given.k[i, :m].mT), atol=1e-15)
        assert epsilon == pytest.approx(0.05 * np.ptp(cost), rel=1e-12)
        assert min(a.min(), b.min()) > 0
        assert not given.a[i, n:].any()
        assert not given.b[i, m:].any()
        scaled = given.scaled[i, :n, :m]
        assert float(scaled.min()) == pytest.approx(0, abs=1e-14)
        assert float(scaled.max()) == pytest.approx(1, rel=1e-12)


def test_the_error_of_a_known_plan():
    two = replace(
        problems.make([(2, 2)], 0.5, torch.float64),
        a=torch.tensor([[0.5, 0.5]], dtype=torch.float64),
        b=torch.tensor([[0.3, 0.7]], dtype=torch.float64),
    )
    assert problems.marginal_error(np.diag([0.5, 0.5]), *two.live(0)[1:3]) == pytest.approx(0.4)
    assert problems.measured_error(two, Answer(plans=[np.diag([0.5, 0.5])])) == pytest.approx(0.4)
    right = plans(two)[0]
    assert problems.measured_error(two, Answer(plans=[right])) < 1e-10
    assert problems.measured_error(two, Answer(plans=[np.full((2, 2), np.nan)])) == float("inf")


def test_the_reference_is_the_solution(given):
    assert problems.measured_error(given, exact(given)) < 1e-10
    sinkformer = peers.forward_solvers(peers=False)[1]
    result = sinkformer.prepare(given, {"tolerance": 1e-9})()
    assert sinkformer.error(given, result) <= 1e-9


def test_a_coupling_that_is_no_solution_is_refused(given):
    products = [np.outer(*given.live(i)[1:3]) for i in range(len(given))]
    assert max(problems.marginal_error(p, *given.live(i)[1:3]) for i, p in enumerate(products)) < 1e-12
    assert problems.measured_error(given, Answer(plans=products)) > 0.1
    assert problems.measured_error(given, Answer(plans=plans(given))) < 1e-9


def test_nothing_is_no_answer(given):
    with pytest.raises(ValueError, match="received neither"):
        problems.measured_error(given, Answer())


def test_the_reference_gradient_is_the_derivative(given):
    """Central differences of <plan, W>, epsilon held fixed."""
    n, m = given.sizes[0]
    _, a, b, epsilon = given.live(0)
    w = given.pairing_weights[0, :n, :m].numpy()

    def value(q: np.ndarray, k: np.ndarray) -> float:
        cost = -(q @ k.T)
        u, v = problems.solve_exactly(cost, a, b, epsilon, tolerance=1e-13)
        return float((problems.gibbs(cost, epsilon, u, v) * w).sum())

    q, k = given.q[0, :n].numpy(), given.k[0, :m].numpy()
    rng = np.random.default_rng(0)
    dq, dk = rng.normal(size=q.shape), rng.normal(size=k.shape)
    h = 1e-5
    slope = (value(q + h * dq, k + h * dk) - value(q - h * dq, k - h * dk)) / (2 * h)
    grad_q, grad_k = problems.plan_gradient(given, 0)
    assert (grad_q * dq).sum() + (grad_k * dk).sum() == pytest.approx(slope, rel=1e-5)


def test_gradient_errors_are_those_of_the_worst_problem(given):
    right = [problems.plan_gradient(given, i) for i in range(len(given))]
    wrong = [(q, k) if i != 1 else (1.5 * q, 1.5 * k) for i, (q, k) in enumerate(right)]
    for gradients, error in ((right, 0.0), (wrong, 0.5)):
        q, k = zip(*gradients, strict=True)
        assert problems.gradient_error(given, list(q), list(k)) == pytest.approx(error, abs=1e-12)


def test_gradients_of_sinkformer_pass(given):
    ours = peers.gradient_solvers(peers=False)[1]
    assert ours.error(given, ours.prepare(given, ours.ladder(given, 1e-3)[0])()) < 1e-3


def test_plain_sweeps_are_counted(given):
    """On the loop written out: one sweep fewer does not reach the target, from 50 on ten fewer."""
    sweeps = problems.plain_sweeps(given, 1e-2)

    def error(count: int) -> float:
        worst = 0.0
        for i in range(len(given)):
            cost, a, b, epsilon = given.live(i)
            u, v = np.zeros(len(a)), np.zeros(len(b))
            for _ in range(count):
                u = np.log(a) - np.log(np.exp(v - cost / epsilon).sum(1))
                v = np.log(b) - np.log(np.exp(u[:, None] - cost / epsilon).sum(0))
            worst = max(worst, problems.marginal_error(problems.gibbs(cost, epsilon, u, v), a, b))
        return worst

    assert error(sweeps) <= 1e-2 < error(sweeps - (1 if sweeps < 50 else 10))


def test_pot_is_given_the_loosest_threshold_that_works(given):
    pot = next(x for x in peers.forward_solvers() if x.name == "POT sinkhorn_log")
    loosest = pot.ladder(given, 1e-3)[0]
    looser = loosest | {"stopThr": 1.01 * loosest["stopThr"]}
    errors = [pot.error(given, pot.prepare(given, settings)()) for settings in (loosest, looser)]
    assert errors[0] <= 1e-3 < errors[1]


def test_copies_of_atoms_are_merged_again(given):
    a, b, cost = peers._split_atoms(given)
    assert min(float(a.min()), float(b.min())) > 0
    merged = Answer([], [])
    for i, (n, m) in enumerate(given.sizes):
        u, v = problems.solve_exactly(cost[i].numpy(), a[i].numpy(), b[i].numpy(), given.ratio)
        merged.u.append(peers._merged(u, n) + peers._shift(given)[i])
        merged.v.append(peers._merged(v, m))
    assert problems.measured_error(given, merged) < 1e-10


# The gate and the rounds -------------------------------------------------------------------------------------------------


def compared(given, *solvers: peers.Solver, target: float = 1e-6, budget: harness.Budget = BUDGET) -> harness.Case:
    return harness.compare("case", given, list(solvers), target, budget, base=peers.OURS, say=silent)


def test_who_misses_the_target_gets_no_ratio(given):
    def off(given, settings):
        good = exact(given)
        return Answer([u + 0.01 for u in good.u or ()], good.v)

    case = compared(given, solver(peers.OURS, lambda given, settings: exact(given)), solver("a wrong peer", off))
    ours, wrong = case.rows
    assert ours.reached
    assert ours.ratios == [1.0, 1.0]
    assert not wrong.reached
    assert not wrong.ratios
    assert wrong.note.startswith("not reached: error 2.0e-02")
    assert not harness.failures([case])
    harness.demand(case, peers.OURS, "a wrong peer", lambda row: row.solver == "a wrong peer", 2)
    assert case.demands[0].verdict == "not measured"


def test_an_engine_that_misses_its_target_is_a_failure(given):
    case = compared(given, solver(peers.OURS, lambda given, settings: Answer(plans=[np.zeros((9, 9))] * 3)))
    assert len(harness.failures([case])) == 1


def test_failing_and_missing_solvers_are_named(given):
    def fails(given, settings):
        raise RuntimeError("no such kernel\nand more")

    def never_ends(given, settings):
        while True:
            pass

    missing = replace(solver("missing", fails), package="no_such_package_anywhere")
    slow = solver("slow", never_ends, patience=0.2)
    case = compared(given, solver("broken", fails), missing, slow)
    assert [row.note for row in case.rows[:2]] == [
        "failed: RuntimeError: no such kernel",
        "skipped: no_such_package_anywhere is not installed",
    ]
    assert case.rows[2].note == "failed: a call took more than 0 s"


def test_the_fastest_setting_that_reaches_the_target_is_taken(given):
    def of_quality(given, settings):
        time.sleep(settings["seconds"])
        good = exact(given)
        return Answer([u + settings["shift"] for u in good.u or ()], good.v)

    ladder = [{"shift": 1e-2, "seconds": 0.0}, {"shift": 1e-8, "seconds": 0.05}, {"shift": 1e-12, "seconds": 0.001}]
    for monotone, settings in ((True, "shift=1e-08, seconds=0.05"), (False, "shift=1e-12, seconds=0.001")):
        case = compared(given, solver("tuned", of_quality, ladder=lambda given, target: ladder, monotone=monotone))
        assert case.rows[0].settings == settings
        assert case.rows[0].error is not None
        assert case.rows[0].error <= 1e-6


def test_slow_solvers_by_sweeps_are_extrapolated_and_said_so(given):
    def runs(given, settings):
        for _ in range(settings["sweeps"]):
            torch.zeros(2000).exp()
        return exact(given)

    case = compared(
        given,
        solver("by sweeps", runs, ladder=lambda given, target: [{"sweeps": 20_000}], by_sweeps=True),
        budget=replace(BUDGET, extrapolate=1e-6),
    )
    row = case.rows[0]
    assert row.note == "extrapolated: 20 sweeps timed, 20000 needed"
    assert len(row.seconds) == 2
    assert row.error is None


def test_ratios_are_medians_within_rounds():
    ours = harness.Row(peers.OURS, seconds=[1.0, 2.0, 4.0])
    peer = harness.Row("peer", seconds=[10.0, 10.0, 60.0])
    slower = harness.Row("slower", seconds=[100.0])
    case = harness.Case("case", 1e-3, "error", 1, [ours, peer, slower])
    harness.demand(case, peers.OURS, "any", lambda row: True, 11)
    harness.demand(case, peers.OURS, "slower", lambda row: row.solver == "slower", 50)
    assert (case.demands[0].measured, case.demands[0].against, case.demands[0].verdict) == (10.0, "peer", "NOT MET")
    assert (case.demands[1].measured, case.demands[1].verdict) == (100.0, "met")
    assert harness.median_range([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert report.ratio_words(replace(peer, ratios=[10.0, 5.0, 15.0])) == "10.0 [5.00, 15.0]"
    assert harness.Case.from_dict(json.loads(json.dumps(case.as_dict()))) == case


def test_peak_memory_sees_an_allocation():
    peak = harness.peak_memory(lambda: np.ones(2**22))
    if peak is None:
        pytest.skip("this system does not tell the peak memory of a process")
    assert 2**25 <= peak + 2**20 <= 2**26


def test_the_bound_grows_with_the_sweeps():
    bound, read, exponential = harness.bandwidth_bound(50, 40, torch.float32, 7)
    assert bound == pytest.approx(7 * read + exponential)


# The page ----------------------------------------------------------------------------------------------------------------


def test_marked_text_is_replaced_and_the_rest_kept():
    page = "a\n<!-- begin:x -->\nold\n<!-- end:x -->\nb\n<!-- begin:y -->\n<!-- end:y -->\n"
    new = report.replace_marked(page, {"x": "new", "y": "table"})
    assert new == "a\n<!-- begin:x -->\nnew\n<!-- end:x -->\nb\n<!-- begin:y -->\ntable\n<!-- end:y -->\n"
    assert report.replace_marked(new, {"x": "new", "y": "table"}) == new
    with pytest.raises(ValueError, match="begin:z"):
        report.replace_marked(page, {"z": ""})


def test_the_page_has_a_place_for_every_suite():
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    names = [match["name"] for match in report.MARKER.finditer(page)]
    assert sorted(names) == sorted([*suites.SUITES, "surroundings", "demands"])


def test_quick_run_from_the_command_line(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- begin:{x} -->\n<!-- end:{x} -->\n" for x in ("surroundings", "batch")))
    monkeypatch.chdir(ROOT)
    files = ["--json", str(tmp_path / "run.json"), "--markdown", str(page)]
    assert sinkhorn.main(["--quick", "--alone", "--rounds", "1", "--suite", "batch", *files]) == 0
    rows = json.loads((tmp_path / "run.json").read_text())[0]["suites"]["batch"][0]["rows"]
    assert [row["solver"] for row in rows] == [peers.OURS, peers.PLAIN_TORCH]
    text = page.read_text()
    assert "batch of 6" in text
    assert "--quick" in text


# The GPU benchmark -----------------------------------------------------------------------------------------------------


def test_the_bound_is_that_of_the_busiest_unit():
    card = cards.Card("X", bandwidth=100.0, float32=10.0, tf32=20.0, bf16=40.0, exponentials=5.0, cache=1.0)
    work = cards.Work(flops=40.0, exponentials=10.0, bytes=100.0, products="tf32")
    assert work.bound(card) == (2.0, "tf32 products")
    assert (work * 3).bound(card) == (6.0, "tf32 products")
    assert cards.Work(bytes=100.0).bound(card) == (1.0, "memory")
    assert cards.stored_sweep(10, 20, 2) == cards.Work(800.0, 0.0, 400.0)


def test_the_page_has_the_predictions_of_the_script():
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert predictions.table() in page


def test_the_gpu_problems_are_what_they_say():
    data = gpu_problems.clouds([(5, 7), (6, 3)], 4, 0.1, torch.device("cpu"))
    assert (data.a > 0).sum(-1).tolist() == [5, 6]
    assert data.a.sum(-1).tolist() == pytest.approx([1, 1])
    one = data.at(1)
    assert one.costs().shape == (1, 6, 3)
    assert float(one.epsilon[0]) == pytest.approx(0.1 * float(one.costs().max() - one.costs().min()), rel=1e-5)
    f, g = gpu_solvers.plain_torch(400).run(data)
    assert data.error(f, g) < 1e-4
    assert data.error(f + 1, g) > 0.1
    assert data.error(f * float("nan"), g) == float("inf")


@pytest.mark.slow
def test_the_gpu_script_rehearses(tmp_path):
    out = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--json", out],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())
    ours = [row for row in rows if row["name"].startswith(("sinkformer", "triton"))]
    assert len(ours) >= 12
    assert not [row for row in ours if row["note"]]
