"""Words to vectors: the packaged models, any Hugging Face encoder, any callable.

Every embedder takes a list of texts, each a sequence of words, and returns one matrix of shape ``(n_words,
d)`` for each. **A row of zeros means that the word has no vector**: it keeps its index, and only its spelling
can link it. Special tokens ([CLS], [SEP], padding) never reach a word.
"""

from sinkformer.text.embedders.callables import CallableEmbedder
from sinkformer.text.embedders.centres import packaged_centre
from sinkformer.text.embedders.checks import checked_device, checked_vectors
from sinkformer.text.embedders.choice import as_embedder
from sinkformer.text.embedders.multilingual import (
    MULTILINGUAL_LAYER,
    MULTILINGUAL_MODEL,
    MULTILINGUAL_SHA256,
    multilingual_file,
)
from sinkformer.text.embedders.packaged import PACKAGED_LAYER, PACKAGED_MODEL, PACKAGED_SHA256, packaged_folder
from sinkformer.text.embedders.protocol import Embedder
from sinkformer.text.embedders.transformer import TransformerEmbedder

__all__ = [
    "MULTILINGUAL_LAYER",
    "MULTILINGUAL_MODEL",
    "MULTILINGUAL_SHA256",
    "PACKAGED_LAYER",
    "PACKAGED_MODEL",
    "PACKAGED_SHA256",
    "CallableEmbedder",
    "Embedder",
    "TransformerEmbedder",
    "as_embedder",
    "checked_device",
    "checked_vectors",
    "multilingual_file",
    "packaged_centre",
    "packaged_folder",
]
