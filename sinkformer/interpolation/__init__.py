"""Exact sequence interpolation: ``construct``, and the proof of what it says (arXiv 2502.02270).

    X = [[[0.0, 1.0], [2.0, 0.5], [1.0, 1.0]], [[0.0, 1.0], [3.0, 0.0]]]      # N sequences of n_j tokens
    Y = [[[1.0, 0.0]], [[0.0, 1.0], [5.0, 5.0]]]                              # m_j <= n_j tokens each
    built = construct(X, Y, attention="softmax")
    print(built.ledger)                 # what every phase assumed, chose and had to satisfy
    print(built.certificate.check())    # proved (rational arithmetic): ...
    model = built.model                 # an ordinary torch module

Alcalde, Fantuzzi and Zuazua prove that transformers of 2 sum m_j + O(N) blocks of width 4 map any N sequences to any targets.
``construct`` writes the weights down as rational numbers, by the phases of their proof or by shorter ones of ours; ``check``
follows every token in exact arithmetic. ``construct_causal`` does it where a token sees only those before it; ``assign`` chooses
the targets of its tokens, ``check_tokens`` proves that they are reached. Needs python-flint (extra ``exact``); modules and
diagnostics do without it.
"""

from sinkformer.interpolation.blocks import ExactBlock as ExactBlock
from sinkformer.interpolation.causal import assign as assign
from sinkformer.interpolation.causal import check_tokens as check_tokens
from sinkformer.interpolation.causal import construct_causal as construct_causal
from sinkformer.interpolation.comparison import Comparison as Comparison
from sinkformer.interpolation.comparison import block_parameters as block_parameters
from sinkformer.interpolation.comparison import compare as compare
from sinkformer.interpolation.comparison import direct_blocks as direct_blocks
from sinkformer.interpolation.comparison import resnet_parameters as resnet_parameters
from sinkformer.interpolation.comparison import theorem_blocks as theorem_blocks
from sinkformer.interpolation.comparison import theorem_parameters as theorem_parameters
from sinkformer.interpolation.construction import construct as construct
from sinkformer.interpolation.datasets import SequencePairs as SequencePairs
from sinkformer.interpolation.exporting import Export as Export
from sinkformer.interpolation.interpolants import Interpolant as Interpolant
from sinkformer.interpolation.interpolants import Stage as Stage
from sinkformer.interpolation.interpolants import load as load
from sinkformer.interpolation.layers import Attention as Attention
from sinkformer.interpolation.layers import Block as Block
from sinkformer.interpolation.layers import FeedForward as FeedForward
from sinkformer.interpolation.layers import TokenTransformer as TokenTransformer
from sinkformer.interpolation.ledger import Entry as Entry
from sinkformer.interpolation.ledger import Ledger as Ledger
from sinkformer.interpolation.regularized import Tikhonov as Tikhonov
from sinkformer.interpolation.regularized import tikhonov as tikhonov
from sinkformer.interpolation.teachers import teacher as teacher
from sinkformer.interpolation.verification import Certificate as Certificate
from sinkformer.interpolation.verification import Verdict as Verdict
