"""What a user may pass as ``model``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from sinkformer.errors import ConfigError, DTypeError
from sinkformer.text.embedders.callables import CallableEmbedder
from sinkformer.text.embedders.protocol import Embedder
from sinkformer.text.embedders.transformer import TransformerEmbedder


def as_embedder(
    model: str | Path | Callable | Embedder,
    *,
    layer: int | None = None,
    layers: Sequence[int] | None = None,
    device: str | torch.device = "cpu",
    batch_size: int = 32,
) -> Embedder:
    """Turn what a user may pass as ``model`` into an embedder.

    Args:
        model: a name, a folder, a callable or an embedder.
        layer: of ``embed``; None: the default of the model.
        layers: those that ``states`` will be asked for, if any.
        device: of a model given by name or folder.
        batch_size: the same.

    Raises:
        ConfigError: a layer is asked of something that has none.
        DTypeError: neither a name, a folder, a callable nor an embedder.
    """
    if isinstance(model, (str, Path)):
        return TransformerEmbedder(str(model), layer=layer, layers=layers, device=device, batch_size=batch_size)
    if layer is not None:
        raise ConfigError(f"layer={layer} has no meaning for the embedder {type(model).__name__}; leave it out")
    if layers and not hasattr(model, "states"):
        raise ConfigError(
            f"expected a model with hidden layers {tuple(layers)}, received the embedder {type(model).__name__}, which has "
            "no method states(texts, layers); pass a name or a folder"
        )
    if isinstance(model, Embedder):
        return model
    if callable(model):
        return CallableEmbedder(model)
    raise DTypeError(
        f"expected model to be a name, a folder, a callable or an Embedder, received {type(model).__name__}"
    )
