"""Problems whose n x m pairs do not fit into memory: costs evaluated a block of rows at a time, nothing of size n x m kept.

Memory is O((n + m) d). Blocks are evaluated in the dtype of the iteration, potentials and sums over blocks in the dtype of
potentials. The last sweep of every problem is made in the latter throughout, and its error is the one compared with the
tolerance. ``pairs`` evaluates costs, ``iteration`` solves and measures, ``derivatives`` differentiates; ``kernels`` does the
sweeps and the products of inner-product costs on a GPU.
"""

from sinkformer.streamed.derivatives import implicit as implicit
from sinkformer.streamed.iteration import quality as quality
from sinkformer.streamed.iteration import solve as solve
from sinkformer.streamed.pairs import PairCosts as PairCosts
