"""What a user may pass as ``model`` and ``method``: a language model, a trained aligner, a way to find links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from sinkformer.errors import ConfigError
from sinkformer.text.embedders import MULTILINGUAL_MODEL, PACKAGED_MODEL, Embedder, as_embedder
from sinkformer.text.learned import Trained, is_aligner, load_aligner
from sinkformer.text.methods import Method, as_method

Model: TypeAlias = str | Path | Callable | Embedder

_RESERVED = (PACKAGED_MODEL, MULTILINGUAL_MODEL)
_PACKAGED = Path(__file__).with_name("aligner_en")


@dataclass(frozen=True)
class Choice:
    """A model and a method that go together; nothing is loaded yet.

    Attributes:
        model: the language model, unless there is a folder.
        folder: of the trained aligner, or None.
        method: None for the trained one.
        threshold: of the trained method, or None for its own.
        layers: hidden layers that an untrained method needs.
    """

    model: Model
    folder: Path | None
    method: Method | None
    threshold: float | None = None
    layers: tuple[int, ...] = ()

    def load(
        self, *, layer: int | None, device: str | torch.device, batch_size: int = 32
    ) -> tuple[Embedder, Trained | None]:
        """The language model, and the trained method if there is a folder; errors as of ``load_aligner`` and ``as_embedder``."""
        if self.folder is not None:
            embedder, trained, _ = load_aligner(self.folder, layer=layer, device=device, batch_size=batch_size)
            return embedder, trained
        layers = self.layers or None
        return as_embedder(self.model, layer=layer, layers=layers, device=device, batch_size=batch_size), None

    def method_with(self, trained: Trained | None) -> Method:
        """The method, given what was loaded."""
        if self.method is not None:
            return self.method
        assert trained is not None
        return trained if self.threshold is None else trained.at(self.threshold)


def choose(
    model: Model,
    method: str | Method | None = None,
    *,
    null_price: float | None = None,
    epsilon: float | None = None,
    threshold: float | None = None,
) -> Choice:
    """Which model and which method are meant: the trained one where there is one and no other is named.

    Args:
        model: ``"en"``, for which there is a packaged aligner; the folder of a trained aligner; or any language model.
        method: a name, ``"trained"`` among them; a ``Method``; None for the default of the model.
        null_price: option of the method; None: its default.
        epsilon: the same.
        threshold: the same.

    Raises:
        ConfigError: the trained method of a model without one; see ``methods.as_method``.
    """
    named = isinstance(model, (str, Path))
    # The names of packaged models come first, whatever folders there are.
    own = Path(model) if named and str(model) not in _RESERVED and is_aligner(model) else None
    wanted = method is None or (isinstance(method, str) and method == Trained.name)
    packaged = _PACKAGED if named and str(model) == PACKAGED_MODEL else None
    folder = own or (packaged if wanted else None)
    if not wanted or (folder is None and method is None):
        found = as_method(method, null_price=null_price, epsilon=epsilon, threshold=threshold)
        return Choice(model, folder, found, layers=found.layers)
    if folder is None:
        raise ConfigError(
            f"expected a trained aligner for method='trained', received model={model!r}; pass 'en' or a folder written by "
            "'sinkformer train', or another method"
        )
    if epsilon is not None:
        raise ConfigError(
            f"epsilon={epsilon!r} has no meaning for the trained method; leave it out, or choose another, such as "
            "method='partial'"
        )
    return Choice(model, folder, None, threshold)
