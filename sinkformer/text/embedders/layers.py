"""Which hidden layers of an encoder are asked for, and how many of its blocks they need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sinkformer.errors import ConfigError, ModelError


@dataclass(frozen=True)
class Layers:
    """The layers of a loaded encoder: 0 is the embedding table, ``k`` the output of block ``k``.

    Attributes:
        depth: blocks of the model as it was published.
        layer: the layer of ``embed``.
        kept: blocks that were loaded; ``layer <= kept <= depth``.
        name: of the model, for messages.
    """

    depth: int
    layer: int
    kept: int
    name: str

    @classmethod
    def chosen(
        cls, depth: int, layer: int | None, extra: Iterable[int] | None, name: str, *, default: int, plain: bool
    ) -> Layers:
        """From what the user asked for.

        Args:
            depth: blocks of the model.
            layer: of ``embed``; None: the default.
            extra: further layers that have to be there.
            name: of the model.
            default: layer if None is asked for.
            plain: the model may be built without the blocks above the last one needed.

        Raises:
            ConfigError: no such layer.
        """
        first = default if layer is None else checked_layer(layer, depth, name)
        needed = max(1, first, *checked_layers(() if extra is None else extra, depth, name))
        return cls(depth, first, needed if plain else depth, name)

    def checked(self, layers: Any) -> tuple[int, ...]:
        """Non-negative, and loaded.

        Raises:
            ConfigError: none, no whole numbers, no such layer, or one above the loaded blocks.
        """
        found = checked_layers(layers, self.depth, self.name)
        if not found:
            raise ConfigError(f"expected at least one layer of {self.name!r}, received none")
        if max(found) > self.kept:
            raise ConfigError(
                f"expected layers up to {self.kept}, for which {self.name!r} was loaded, received {max(found)}; build "
                f"the embedder with layers=({', '.join(map(str, found))},)"
            )
        return found


def checked_layers(layers: Any, depth: int, name: str) -> tuple[int, ...]:
    """A sequence of layers, non-negative, in the order given.

    Raises:
        ConfigError: no sequence of whole numbers, or no such layer.
    """
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Iterable):
        raise ConfigError(f"expected layers as a sequence of whole numbers, received {layers!r}; for example (2, 4, 6)")
    return tuple(checked_layer(layer, depth, name) for layer in layers)


def checked_layer(layer: Any, depth: int, name: str) -> int:
    """A layer as a number between 0 and ``depth``.

    Raises:
        ConfigError: no whole number, or no such layer.
    """
    if isinstance(layer, bool) or not isinstance(layer, int) or not -depth - 1 <= layer <= depth:
        raise ConfigError(
            f"expected layer between 0 and {depth} (or negative, counted from the end) for {name!r}, received {layer!r}"
        )
    return layer % (depth + 1)


def depth_of(config: Any) -> int:
    """Number of blocks, from the configuration of transformers.

    Raises:
        ModelError: it does not say.
    """
    for name in ("num_hidden_layers", "num_layers", "n_layers", "n_layer"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    raise ModelError(
        f"the configuration of model type {config.model_type!r} does not say how many layers it has; "
        "pass a callable as the model"
    )
