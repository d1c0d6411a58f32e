"""Transport attention: attention whose weights are a coupling, so that every key receives its share.

Softmax normalises the rows of exp(scores): every query gives mass one, and keys receive what they may. Transport attention
normalises columns too. With S_ij = scale <q_i, k_j> (+ mask) and weights a of the queries and b of the keys, its weights are

    A = diag(1/a) P,    P = argmin over couplings of a and b of  <-S, P> + KL(P | a (x) b),    A_ij = exp(f_i + S_ij + h_j),

the entropic coupling for the cost -S at epsilon = 1 (``sinkformer.sinkhorn``): rows of A sum to one, and key j receives
sum_i a_i A_ij = b_j. It is softmax attention with a bias h for every key, solved for. One normalisation of rows, one of
columns, and so on: Sinkhorn's iteration (Cuturi 2013), in attention first used by Sander, Ablin, Blondel, Peyre 2022.
"""

from sinkformer.attention.functional import attention_plan as attention_plan
from sinkformer.attention.functional import sinkhorn_attention as sinkhorn_attention
from sinkformer.attention.modules import SinkhornAttention as SinkhornAttention
from sinkformer.attention.plans import AttentionPlan as AttentionPlan
from sinkformer.attention.replacing import replace_attention as replace_attention
