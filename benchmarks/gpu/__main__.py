"""Run the tests on CUDA, check every engine against float64, time it beside peers: one table, within five minutes.

python -m benchmarks.gpu              # on a machine with a GPU
python -m benchmarks.gpu --predict    # anywhere: what the card's limits allow
python -m benchmarks.gpu --rehearse   # anywhere: the same script on tiny problems, kernels in triton's interpreter
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import replace_marked

# They take the GPU where there is one.
TESTS = ("tests/test_scores.py", "tests/test_triton_small.py", "tests/test_triton_large.py")


def main() -> None:
    """Parse the arguments, then measure or predict."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--predict", action="store_true", help="print the least times on known cards, and stop")
    parser.add_argument("--rehearse", action="store_true", help="tiny problems on the CPU; times mean nothing")
    parser.add_argument("--minutes", type=float, default=5.0, help="stop starting cases after so long")
    parser.add_argument("--no-tests", action="store_true", help="skip the test-suite")
    parser.add_argument("--json", type=Path, help="write the measurements here")
    parser.add_argument("--markdown", type=Path, metavar="PAGE", help="put the tables between the markers of this page")
    arguments = parser.parse_args()
    if arguments.predict:
        from benchmarks.gpu import predictions

        _publish(arguments.markdown, "predictions", predictions.table())
        return
    if arguments.rehearse:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    sys.exit(measure(arguments))


def _publish(page: Path | None, name: str, text: str) -> None:
    if page is None:
        print(text)
    else:
        page.write_text(replace_marked(page.read_text(), {name: text}))


@dataclass
class Row:
    """One line: seconds are medians over rounds, ratios medians of the ratios within a round."""

    case: str
    name: str
    error: float
    seconds: float | None
    ratio: float | None
    bound: float | None
    binds: str
    note: str


def measure(arguments: argparse.Namespace) -> int:
    """Everything on this machine; the number of lines of ours that failed."""
    import torch

    from benchmarks.gpu import cards, cases

    if not arguments.rehearse and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: --predict prints what is expected of one, --rehearse checks this script")
    device, sizes = torch.device("cuda"), cases.FULL
    card = None
    if arguments.rehearse:
        device, sizes = torch.device("cpu"), cases.REHEARSAL
        print("a rehearsal on the CPU: answers are checked, times mean nothing")
    else:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, sinkformer of this checkout")
        card = cards.named(torch.cuda.get_device_name())
    started, failed, rows, tables = time.monotonic(), 0, [], []
    if not arguments.no_tests and not arguments.rehearse:
        failed += _run_tests()
    for make in cases.all_cases(sizes, device):
        if time.monotonic() - started > 60 * arguments.minutes:
            print("out of time: the remaining cases were not started")
            break
        found = _measured(make(), device, card, rounds=1 if arguments.rehearse else 5)
        rows += found
        tables.append(markdown(found))
        print("\n" + tables[-1], flush=True)
        failed += sum(row.note.startswith("WRONG") for row in found if row.name.startswith(("sinkformer", "triton")))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if not arguments.rehearse:
        title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {failed} failures"
        _publish(arguments.markdown, "measurements", "\n\n".join([title, *tables]))
    print(f"\n{failed} failures, {time.monotonic() - started:.0f} s")
    return int(failed > 0)


def _run_tests() -> int:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-n", "0", *TESTS], env=environment, check=False)
    print(f"tests on CUDA: {'passed' if done.returncode == 0 else 'FAILED'}", flush=True)
    return int(done.returncode != 0)


def _measured(case, device, card, *, rounds: int) -> list[Row]:
    """All runs of a case, in interleaved rounds; a run whose answer is wrong gets no time."""
    errors, notes, seconds = {}, {}, {run.name: [] for run in case.runs}
    for run in case.runs:
        try:
            errors[run.name] = run.check(run.call())
            wrong = not errors[run.name] <= case.target
            notes[run.name] = f"WRONG: error above {case.target:.1e}" if wrong else ""
        except Exception as error:  # noqa: BLE001 - a peer that fails is a line of the table, and ours a failure
            errors[run.name], notes[run.name] = float("nan"), f"WRONG: {type(error).__name__}: {str(error)[:120]}"
    sound = [run for run in case.runs if not notes[run.name]]
    for _ in range(rounds):
        for run in sound:
            seconds[run.name].append(_seconds(run.call, device) / run.share)
    base = sound[0].name if sound else None
    rows = []
    for run in case.runs:
        own = seconds[run.name]
        ratio = statistics.median(s / t for s, t in zip(own, seconds[base], strict=True)) if own and base else None
        bound, binds = run.work.bound(card) if run.work and card else (None, "")
        if run.share < 1 and not notes[run.name]:
            notes[run.name] = f"measured on {run.share:.3g} of the batch, scaled"
        median = statistics.median(own) if own else None
        rows.append(Row(case.name, run.name, errors[run.name], median, ratio, bound, binds, notes[run.name]))
    return rows


def _seconds(call: Callable[[], object], device) -> float:
    """Of one call, by the device's own clock."""
    import torch

    if device.type != "cuda":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def markdown(rows: list[Row]) -> str:
    """The table of a case."""
    lines = [
        f"**{rows[0].case}**",
        "",
        "| solver | error | ms | x the first | card's bound, ms | share of it | note |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        ms = "" if row.seconds is None else f"{1e3 * row.seconds:.3g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        bound = "" if row.bound is None else f"{1e3 * row.bound:.3g} ({row.binds})"
        share = "" if row.bound is None or row.seconds is None else f"{100 * row.bound / row.seconds:.0f} %"
        lines.append(f"| {row.name} | {row.error:.1e} | {ms} | {ratio} | {bound} | {share} | {row.note} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
