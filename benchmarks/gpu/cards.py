"""What a card can do, by its data sheet, and the least time that a piece of work can take on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """Peak rates.

    Attributes:
        name: as ``torch.cuda.get_device_name`` contains it.
        bandwidth: of its memory, bytes a second.
        float32: multiplications and additions a second outside tensor cores.
        tf32: the same on tensor cores with 10-bit mantissas.
        bf16: the same with bfloat16 factors.
        exponentials: a second, 16 each clock and multiprocessor.
        cache: bytes of L2.
    """

    name: str
    bandwidth: float
    float32: float
    tf32: float
    bf16: float
    exponentials: float
    cache: float


# Data sheets of the SXM versions, dense rates.
CARDS = (
    Card("A100", 2.0e12, 19.5e12, 156e12, 312e12, 108 * 16 * 1.41e9, 40e6),
    Card("H100", 3.35e12, 67e12, 495e12, 989e12, 132 * 16 * 1.98e9, 50e6),
    Card("H200", 4.8e12, 67e12, 495e12, 989e12, 132 * 16 * 1.98e9, 60e6),
)


def named(name: str) -> Card | None:
    """The card whose name is contained in this one."""
    return next((card for card in CARDS if card.name in name), None)


@dataclass(frozen=True)
class Work:
    """What some piece of work cannot do without.

    Attributes:
        flops: multiplications and additions.
        exponentials: exp2 or log2.
        bytes: read from and written to the card's memory.
        products: which unit multiplies, ``float32``, ``tf32`` or ``bf16``.
    """

    flops: float = 0.0
    exponentials: float = 0.0
    bytes: float = 0.0
    products: str = "float32"

    def bound(self, card: Card) -> tuple[float, str]:
        """``(seconds, what binds)``: each unit at its peak, all of them side by side."""
        return max(
            (self.flops / getattr(card, self.products), f"{self.products} products"),
            (self.exponentials / card.exponentials, "exponentials"),
            (self.bytes / card.bandwidth, "memory"),
        )

    def __mul__(self, times: float) -> Work:
        """The same so many times, one after the other."""
        return Work(self.flops * times, self.exponentials * times, self.bytes * times, self.products)


def log_sum_exp(n: int, m: int, d: int, products: str) -> Work:
    """One streamed pass: every score once, nothing of size n x m in memory."""
    width = 2 if products == "bf16" else 4
    return Work(2.0 * n * m * d, 1.0 * n * m, width * (n + m) * d + 4.0 * (n + 2 * m), products)


def stored_sweep(n: int, m: int, bytes_a_pair: int) -> Work:
    """One sweep over a stored kernel: read once, two products of a row or column with each entry."""
    return Work(4.0 * n * m, 0.0, 1.0 * n * m * bytes_a_pair)


def on_chip(pairs: float, sweeps: float, matrices: float) -> Work:
    """Sweeps of many small problems: costs are read ``matrices`` times, everything else happens on the chip."""
    return Work(4.0 * pairs * sweeps, pairs * matrices, 4.0 * pairs * matrices)
