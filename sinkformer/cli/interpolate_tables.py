"""What ``interpolate`` shows."""

from __future__ import annotations

import sys
from decimal import Decimal
from fractions import Fraction

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sinkformer.interpolation import Interpolant, Ledger, theorem_blocks, theorem_parameters

_FORMULAS = {"hardmax": "2 K + 2 N + 1", "softmax": "2 K + 3 N"}


def print_network(built: Interpolant) -> None:
    """Sizes, temperature, ledger, and the counts beside those of the theorem."""
    data, kind = built.pairs, built.kind
    print(
        f"{data.N} pairs in R^{data.d}: up to {data.n} tokens each, up to {data.m} targets, K = {data.K} targets in all"
    )
    print(f"{built.method}, {kind}{_temperature(built)}\n")
    _print_ledger(built.ledger)
    theorem = theorem_blocks(N=data.N, K=data.K, kind=kind), theorem_parameters(d=data.d, N=data.N, K=data.K, kind=kind)
    rows = [
        ("", "blocks", "parameters", ""),
        ("this network", built.L, built.parameters, f"(10 d + 8) L, width {built.width}"),
        (f"theorem, {kind}", *theorem, f"L = {_FORMULAS[kind]}, width 4"),
    ]
    print()
    for name, blocks, parameters, note in rows:
        print(f"{name:<16}  {blocks:>8}  {parameters:>12}  {note}".rstrip())
    print()


def _temperature(built: Interpolant) -> str:
    if built.kind == "hardmax":
        return ""
    upper = "any other" if built.tau_star is None else f"any up to tau* = {_short(built.tau_star)}"
    return f" at temperature {_short(built.tau)}, or {upper}"


def _print_ledger(ledger: Ledger) -> None:
    """A table in a terminal, plain columns elsewhere."""
    if not sys.stdout.isatty():
        print(ledger)
        return
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("phase", "blocks", "margin", "constants", "must hold"):
        table.add_column(name, justify="right" if name in ("blocks", "margin") else "left")
    for found in ledger:
        constants = ", ".join(f"{name} {_short(value)}" for name, value in found.constants.items())
        margin = "" if found.smaller is None else f"{found.margin:.3f}"
        row = (found.phase, str(found.blocks), margin, constants, found.inequality)
        table.add_row(*map(Text, row), style="" if found.holds else "bold red")
    table.add_row("total", str(ledger.blocks))
    Console(highlight=False).print(table)


def _short(value: Fraction | int | str) -> str:
    text = str(value)
    if len(text) <= 9 or not isinstance(value, Fraction):
        return text
    return f"{Decimal(value.numerator) / value.denominator:.4g}"
