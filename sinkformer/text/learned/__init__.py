"""The trained aligner: hidden states of words to a coupling and to probabilities of links, learned from gold.

The pure model is a Sinkhorn Transformer on the states of a language model: queries and keys of words, a learned price for
staying alone, the coupling layer of the library (``heads``). Two parts beyond it are kept apart and can be switched off: layers
over the matrix of word pairs that add a bias to the scores, and a head that turns the coupling into probabilities of links
(``refinement``).
"""

from sinkformer.text.learned.decisions import Decision, ReliabilityBin, reliability
from sinkformer.text.learned.examples import Example
from sinkformer.text.learned.fitting import AlignerRecipe
from sinkformer.text.learned.method import Trained
from sinkformer.text.learned.models import PairModel, PairModelConfig
from sinkformer.text.learned.storage import TrainedAligner, is_aligner, load_aligner
from sinkformer.text.learned.training import train_aligner

__all__ = [
    "AlignerRecipe",
    "Decision",
    "Example",
    "PairModel",
    "PairModelConfig",
    "ReliabilityBin",
    "Trained",
    "TrainedAligner",
    "is_aligner",
    "load_aligner",
    "reliability",
    "train_aligner",
]
