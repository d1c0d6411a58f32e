"""A loaded encoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sinkformer.text.embedders.layers import Layers


@dataclass(frozen=True)
class Loaded:
    """An encoder with what belongs to it.

    Attributes:
        tokenizer: a fast tokenizer of transformers.
        model: a module of transformers that returns hidden states.
        layers: which there are.
        characters: what characters become before the tokenizer sees them, for ``str.translate``.
        sha256: of the file of weights, if it is a known one.
    """

    tokenizer: Any
    model: Any
    layers: Layers
    characters: dict[int, str] = field(default_factory=dict)
    sha256: str | None = None
