"""Training of Sinkhorn Transformers: ``fit``, one loop.

The loss is KL from the model's coupling to the target. With S = -c / epsilon the logits, T the target and P(S) the coupling
of T's own marginals, it is convex in S and its gradient is P(S) - T (Fenchel-Young, by the envelope theorem), so nothing is
differentiated through the solver. Data are drawn fresh: a block of G groups of s sources and t targets gives G s t pairs for
G (s + t) evaluations of an encoder.

Determinism: step k draws from a generator seeded by (seed, k) and nothing else, so a run is a function of its arguments, and
a resumed run is the uninterrupted one, bit for bit, on one machine. Torch's global generator is neither seeded nor read: a
layer of your own that reads it, such as dropout, makes runs differ. A budget in seconds ties the learning rate to the clock,
and no two such runs are equal.
"""

from sinkformer.training.fitting import fit as fit
from sinkformer.training.muon import Muon as Muon
from sinkformer.training.objective import fenchel_young as fenchel_young
from sinkformer.training.recipes import History as History
from sinkformer.training.recipes import Recipe as Recipe
