"""From encoded pairs to couplings and links: one module for each method.

A method sees pairs of texts with at least one word on each side, as their words, vectors and costs, and says which words
belong together. Reading, encoding, costs, the distance and the result object are the aligner's.
"""

from sinkformer.text.methods.argmax import Argmax
from sinkformer.text.methods.balanced import Balanced
from sinkformer.text.methods.choice import METHODS, as_method
from sinkformer.text.methods.itermax import IterMax
from sinkformer.text.methods.partial import Partial
from sinkformer.text.methods.protocol import EncodedPair, Found, Method
from sinkformer.text.methods.unbalanced import Unbalanced

__all__ = [
    "METHODS",
    "Argmax",
    "Balanced",
    "EncodedPair",
    "Found",
    "IterMax",
    "Method",
    "Partial",
    "Unbalanced",
    "as_method",
]
