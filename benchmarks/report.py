"""Tables from measurements, as text and as Markdown between markers."""

from __future__ import annotations

import re

from benchmarks.harness import Case, Row, median_range

MARKER = re.compile(r"<!-- begin:(?P<name>[a-z]+) -->\n.*?<!-- end:(?P=name) -->", re.DOTALL)


def replace_marked(page: str, blocks: dict[str, str]) -> str:
    """The page with the text between ``<!-- begin:name -->`` and ``<!-- end:name -->`` replaced for every given name.

    Raises:
        ValueError: a name has no markers, or twice.
    """
    for name, text in blocks.items():
        found = [m for m in MARKER.finditer(page) if m["name"] == name]
        if len(found) != 1:
            raise ValueError(f"expected one pair of markers begin:{name} and end:{name}, found {len(found)}")
        at = found[0]
        page = page[: at.start()] + f"<!-- begin:{name} -->\n{text.strip()}\n<!-- end:{name} -->" + page[at.end() :]
    return page


def figure(x: float) -> str:
    """Three significant digits, no exponent."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def ratio_words(row: Row) -> str:
    """Median [least, largest] of the ratios of rounds."""
    if not row.ratios:
        return ""
    middle, low, high = (figure(x) for x in median_range(row.ratios))
    return middle if len(row.ratios) == 1 else f"{middle} [{low}, {high}]"


def _cells(row: Row) -> list[str]:
    time = figure(row.milliseconds) if row.reached else ""
    error = "" if row.error is None or not row.reached else f"{row.error:.1e}"
    sweeps = "" if row.iterations is None else str(row.iterations)
    return [row.solver, time, ratio_words(row), error, sweeps, "; ".join(x for x in (row.settings, row.note) if x)]


def _grid(header: list[str], rows: list[list[str]]) -> str:
    align = ["---"] + [
        "---:" if name in ("ms", "error", "sweeps", "least", "measured") else "---" for name in header[1:]
    ]
    lines = [header, align, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "&#124;") for cell in line) + " |" for line in lines)


def case_table(case: Case) -> str:
    """One case as a Markdown table with its heading and notes."""
    title = f"**{case.name}**, {case.threads} thread{'s' * (case.threads > 1)}"
    if not case.measure:
        body = _grid(["solver", "peak"], [[row.solver, row.note] for row in case.rows])
    else:
        title += f" (error: {case.measure})"
        header = ["solver", "ms", "x sinkformer (numba)", "error", "sweeps", "settings, remarks"]
        body = _grid(header, [_cells(row) for row in sorted(case.rows, key=_speed)])
    notes = "".join(f"\n\n{note}" for note in case.notes)
    return f"{title}\n\n{body}{notes}"


def _speed(row: Row) -> float:
    return row.milliseconds if row.reached else float("inf")


def growth_table(cases: list[Case]) -> str:
    """The cases of the growth suite in one table: a row a size, a column a solver."""
    solvers = [row.solver for row in cases[0].rows]

    def cell(row: Row | None) -> str:
        if row is None or not row.reached:
            return "" if row is None else row.note.split(":")[0]
        sweeps = "" if row.iterations is None else f" ({row.iterations} sweeps)"
        return f"{figure(row.milliseconds)} ms{sweeps}"

    lines = [[case.name, str(case.threads), *(cell(case.row(name)) for name in solvers)] for case in cases]
    return _grid(["problems", "threads", *solvers], lines)


def demands_table(cases: list[Case]) -> str:
    """Every promised ratio beside the measured one."""
    header = ["case", "threads", "sinkformer", "against", "least", "measured", "verdict"]
    rows = []
    for case in cases:
        for x in case.demands:
            against = x.group if x.against in ("", x.group) else f"{x.group}: {x.against}"
            measured = "" if x.measured is None else figure(x.measured)
            engine = x.base.removeprefix("sinkformer (").rstrip(")")
            rows.append([case.name, str(case.threads), engine, against, figure(x.least), measured, x.verdict])
    return _grid(header, rows) if rows else "No ratios in this run."


def blocks(runs: list[dict], cases: dict[str, list[Case]], quick: bool) -> dict[str, str]:
    """Text of every marked block a run can fill."""
    first = runs[0]["surroundings"]
    about = ", ".join(
        f"{name} {version}" for name, version in first.items() if name not in ("processor", "cores", "system")
    )
    warning = "\n\n**From a `--quick` run: tiny problems, no finding.**" if quick else ""
    filled = {"surroundings": f"{first['processor']}, {first['cores']} cores, {first['system']}. {about}.{warning}"}
    for name, found in cases.items():
        filled[name] = growth_table(found) if name == "growth" else "\n\n".join(case_table(case) for case in found)
    return filled
