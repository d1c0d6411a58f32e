"""Mean word vectors of the packaged models."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from sinkformer.text.embedders.multilingual import MULTILINGUAL_MODEL, MULTILINGUAL_SHA256
from sinkformer.text.embedders.packaged import PACKAGED_MODEL, PACKAGED_SHA256

_MODELS = {PACKAGED_SHA256: PACKAGED_MODEL, MULTILINGUAL_SHA256: MULTILINGUAL_MODEL}


def packaged_centre(sha256: str, layer: int) -> Tensor | None:
    """The shipped mean word vector ``(d,)``, float32, of a layer of ``"en"`` or ``"multi"``; None for other weights.

    Means over the English words of the Edinburgh++ corpus, training part (Apache-2.0); benchmarks/make_centre.py
    makes the files. For ``"multi"`` the English mean serves the other languages as well as their own does: measured in
    docs/multilingual.md.
    """
    name = _MODELS.get(sha256)
    if name is None:
        return None
    return load_file(Path(__file__).parents[1] / f"centre_{name}.safetensors")["centre"][layer].clone()
