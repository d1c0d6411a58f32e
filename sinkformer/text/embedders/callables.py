"""Vectors from any function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from sinkformer.errors import DTypeError
from sinkformer.text.embedders.checks import checked_vectors


class CallableEmbedder:
    """Adapter for ``function(texts) -> vectors``, so that fastText tables, spaCy or a web service can be used.

    Args:
        function: takes a list of texts, each a list of words; returns one array or tensor ``(n_words, d)``
            for each.
        name: how the results name it; default: the function's own name. It is all that ``settings_hash`` knows of
            the function, so give another name to another table or version.
    """

    def __init__(self, function: Callable[[list[list[str]]], Sequence[Any]], name: str | None = None):
        """Keep the function."""
        if not callable(function):
            raise DTypeError(f"expected a callable, received {type(function).__name__}")
        self.function = function
        self.name = name or getattr(function, "__name__", type(function).__name__)

    @property
    def settings(self) -> dict[str, Any]:
        """The name."""
        return {"model": self.name, "layer": None}

    def embed(self, texts: list[Sequence[str]]) -> list[Tensor]:
        """Call the function and check what it returns.

        Raises:
            DTypeError, ShapeError, NonFiniteError: see ``checked_vectors``.
        """
        if not texts:
            return []
        return checked_vectors(self.function([list(words) for words in texts]), texts, self.name)
