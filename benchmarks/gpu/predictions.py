"""What the cards' limits allow for the cases of this benchmark, without a card."""

from __future__ import annotations

from benchmarks.gpu import cards
from benchmarks.gpu.cards import Work

# Of the bound that kernels of this kind are known to reach: a pass over memory, a pass of products and exponentials.
_OF_MEMORY, _OF_UNITS = 0.75, 0.5


def rows(card: cards.Card) -> list[tuple[str, Work]]:
    """Every promised case with its work."""
    n, d = 10_000, 64
    return [
        (f"streamed log-sum-exp, n = m = {n}, float32", cards.log_sum_exp(n, n, d, "float32")),
        (f"streamed log-sum-exp, n = m = {n}, TF32", cards.log_sum_exp(n, n, d, "tf32")),
        (f"streamed log-sum-exp, n = m = {n}, bf16", cards.log_sum_exp(n, n, d, "bf16")),
        (f"streamed, n = m = {n}, 100 iterations, float32", cards.log_sum_exp(n, n, d, "float32") * 200),
        (f"stored in bf16, n = m = {n}, 100 iterations", cards.stored_sweep(n, n, 2) * 100),
        ("streamed, n = m = 50000, 10 iterations, float32", cards.log_sum_exp(50_000, 50_000, d, "float32") * 20),
        ("stored in bf16, n = m = 50000, 10 iterations", cards.stored_sweep(50_000, 50_000, 2) * 10),
        ("4096 ragged problems of up to 64 atoms, 60 sweeps", cards.on_chip(4096 * 36 * 36, 60, 4.0)),
    ]


def table() -> str:
    """Least milliseconds, card by card, and what is expected of kernels that reach the usual share of a limit."""
    head = "| case | " + " | ".join(f"{card.name}: bound, ms | expected" for card in cards.CARDS) + " |"
    lines = [head, "|---|" + "---:|---:|" * len(cards.CARDS)]
    for index, (name, _) in enumerate(rows(cards.CARDS[0])):
        cells = []
        for card in cards.CARDS:
            seconds, binds = rows(card)[index][1].bound(card)
            share = _OF_MEMORY if binds == "memory" else _OF_UNITS
            cells.append(f"{1e3 * seconds:.3g} ({binds}) | {1e3 * seconds / share:.3g}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
