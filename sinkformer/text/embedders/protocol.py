"""What the aligner needs from a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Embedder(Protocol):
    """What the aligner needs from a model."""

    @property
    def settings(self) -> dict[str, Any]:
        """What identifies the vectors (name, layer, ...), JSON-able; it enters the hash of the results."""
        ...

    def embed(self, texts: list[Sequence[str]]) -> list[Tensor]:
        """One floating-point tensor of shape ``(n_words, d)`` for each text; a row of zeros for an unknown word."""
        ...
