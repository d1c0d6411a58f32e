"""How far a predictor is from a coupling system.

    system, sampler = named("eot")
    model = SinkhornTransformer.from_pretrained("runs/eot/step-000000700")
    evaluation = evaluate(model, system, sampler, pairs=1000)
    print(evaluation)                                  # mean, 95 % quantile, supremum, by number of atoms
    attack = adversarial(model, system, *evaluation.starts())

A supremum over finitely many pairs, sampled or searched for, is a lower bound of the supremum in the theorem.
"""

from sinkformer.evaluation.adversarial import Attack as Attack
from sinkformer.evaluation.adversarial import adversarial as adversarial
from sinkformer.evaluation.baselines import CrossSoftmax as CrossSoftmax
from sinkformer.evaluation.baselines import FixedCost as FixedCost
from sinkformer.evaluation.baselines import best_fixed_cost as best_fixed_cost
from sinkformer.evaluation.baselines import load_predictor as load_predictor
from sinkformer.evaluation.distances import Distance as Distance
from sinkformer.evaluation.distances import Distances as Distances
from sinkformer.evaluation.distances import distances as distances
from sinkformer.evaluation.files import load_couplings as load_couplings
from sinkformer.evaluation.files import save_couplings as save_couplings
from sinkformer.evaluation.reports import Report as Report
from sinkformer.evaluation.reports import report as report
from sinkformer.evaluation.sampled import Evaluation as Evaluation
from sinkformer.evaluation.sampled import Pair as Pair
from sinkformer.evaluation.sampled import Summary as Summary
from sinkformer.evaluation.sampled import evaluate as evaluate
