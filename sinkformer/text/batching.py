"""Which pairs of texts go together: like sizes, and few enough cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def like_sizes(sizes: Sequence[tuple[int, int]], most: int, cells: int) -> Iterator[list[int]]:
    """Positions of pairs to be padded to one size, in order of that size.

    Args:
        sizes: rows and columns of every pair.
        most: pairs of a batch.
        cells: of a batch, padding included; a pair that has more stands alone.
    """
    batch: list[int] = []
    n = m = 0
    for k in sorted(range(len(sizes)), key=lambda k: sizes[k]):
        n, m = max(n, sizes[k][0]), max(m, sizes[k][1])
        if batch and (len(batch) == most or n * m * (len(batch) + 1) > cells):
            yield batch
            batch, (n, m) = [], sizes[k]
        batch.append(k)
    if batch:
        yield batch
