"""The approximation theorem as a pipeline with an error budget: ``build``.

    system, sampler = named("switch")
    found = build(system, 1e-3, sampler=sampler, count=16, generator=torch.Generator().manual_seed(0))
    print(found.ledger)                      # one line for every step of the proof: its bound, and what was measured
    mu, nu = sampler.pairs(16, generator=torch.Generator().manual_seed(0))  # the same pairs
    pi = found(mu, nu)                       # a Sinkhorn Transformer's coupling for each

The steps are those of the proof that Sinkhorn Transformers are dense among the continuous coupling systems (Fraiman 2026,
arXiv 2603.25860), with constants of our own: smoothing, a density bounded from below, a cost that separates into an inner
product of finite rank, encoders.
"""

from sinkformer.approximation.factors import Factors as Factors
from sinkformer.approximation.factors import Table as Table
from sinkformer.approximation.ledger import Ledger as Ledger
from sinkformer.approximation.ledger import Step as Step
from sinkformer.approximation.pipeline import Approximation as Approximation
from sinkformer.approximation.pipeline import build as build
from sinkformer.approximation.smoothing import Partition as Partition
