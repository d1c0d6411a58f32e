"""sinkformer's Sinkhorn against other solvers on the CPU: equal problems, equal measured accuracy, interleaved rounds.

    python -m benchmarks.sinkhorn                                   # everything, one thread; an hour or so
    python -m benchmarks.sinkhorn --quick                           # small problems: does the harness work?
    python -m benchmarks.sinkhorn --suite batch --rounds 9 --threads 1 2
    python -m benchmarks.sinkhorn --markdown docs/performance.md    # also rewrites the tables of that page

Exits with 1 if an engine of sinkformer misses a target. Peers that are not installed are skipped, and named.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import harness, peers, report, suites


def measure(names: list[str], threads: int, arguments: argparse.Namespace) -> dict:
    """Run suites in a process of their own: the threads of most libraries are fixed at import."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        flags = [
            str(file),
            str(threads),
            str(arguments.rounds),
            str(int(arguments.quick)),
            str(int(not arguments.alone)),
        ]
        command = [sys.executable, "-m", "benchmarks.worker", "suites", *flags, *names]
        subprocess.run(command, env=peers.environment_for(threads), check=True)
        return json.loads(file.read_text())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="+", default=["all"], choices=[*suites.SUITES, "all"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1], help="one run for each number")
    parser.add_argument("--rounds", type=int, help="rounds in which every solver is timed; default 5, quick 2")
    parser.add_argument("--quick", action="store_true", help="small problems, short budgets")
    parser.add_argument("--alone", action="store_true", help="sinkformer only")
    parser.add_argument("--json", type=Path, help="file for the measurements")
    parser.add_argument("--markdown", type=Path, help="page whose marked tables are replaced")
    arguments = parser.parse_args(argv)
    arguments.rounds = arguments.rounds or (2 if arguments.quick else 5)
    names: list[str] = list(suites.SUITES) if "all" in arguments.suite else arguments.suite

    if not peers.engine_chosen():
        print("note: this sinkformer has no use_backend; both of its rows are the same engine")
    runs = [measure(names, threads, arguments) for threads in arguments.threads]
    cases = {name: [harness.Case.from_dict(x) for run in runs for x in run["suites"][name]] for name in names}
    every = [case for found in cases.values() for case in found]

    blocks = report.blocks(runs, cases, arguments.quick)
    for text in blocks.values():
        print(f"\n{text}")
    print(f"\n{report.demands_table(every)}")
    for run in runs:
        print(f"{run['threads']} thread(s): " + ", ".join(f"{name} {s:.1f} s" for name, s in run["seconds"].items()))

    if arguments.json:
        arguments.json.write_text(json.dumps(runs, indent=1))
    if arguments.markdown:
        if any(case.demands for case in every):
            blocks["demands"] = report.demands_table(every)
        arguments.markdown.write_text(report.replace_marked(arguments.markdown.read_text(), blocks))
        print(f"rewrote the tables of {arguments.markdown}")

    failed = harness.failures(every)
    for line in failed:
        print(f"GATE: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
