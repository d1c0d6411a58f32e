"""The trained model as a method of the aligner."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkformer.couplings import EntropicCoupling
from sinkformer.errors import ConvergenceWarning
from sinkformer.text import decoding, documents
from sinkformer.text.learned.decisions import Decision
from sinkformer.text.learned.features import pair_features
from sinkformer.text.learned.heads import costs_with_nulls
from sinkformer.text.learned.learners import log_odds
from sinkformer.text.learned.models import PairBatch, PairModel, PairOutput
from sinkformer.text.methods.checks import checked_threshold
from sinkformer.text.methods.protocol import EncodedPair, Found
from sinkformer.text.methods.solving import completed, solve_ragged


class Trained:
    """A pair model with the decision that was fitted with it.

    The coupling has null atoms, cost minus score, and entropy of strength one. Confidence is the calibrated probability of a
    link; every pair of at least the threshold is a link, one to one or not. Words of a text and its copy are linked in order.

    Args:
        model: in evaluation mode.
        decision: calibration and threshold.
        fingerprint: what identifies the weights in the settings.
    """

    name = "trained"
    null = True
    # The layers over the matrix of pairs keep some hundred bytes for each.
    most_cells = 4_000_000

    def __init__(self, model: PairModel, decision: Decision, fingerprint: str):
        """Keep the parts."""
        self.model, self.decision, self.fingerprint = model, decision, fingerprint

    def at(self, threshold: float) -> Trained:
        """The same with another threshold, in (0, 1]."""
        decision = replace(self.decision, threshold=checked_threshold(threshold))
        return Trained(self.model, decision, self.fingerprint)

    @property
    def layers(self) -> tuple[int, ...]:
        """Hidden layers that make up the state of a word."""
        return self.model.layers

    @property
    def settings(self) -> dict[str, Any]:
        """Threshold and weights."""
        return {"threshold": self.decision.threshold, "weights": self.fingerprint}

    def solve(self, pairs: list[EncodedPair]) -> list[Found]:
        """One result for each pair."""
        states = [pair.states for pair in pairs]
        sources, targets = zip(*(s for s in states if s is not None), strict=True)
        features = [pair_features(pair.source.words, pair.target.words) for pair in pairs]
        batch = PairBatch.collate(sources, targets, features).to(pairs[0].cost.device)
        with torch.no_grad():
            output = self.model(batch)
            confidence = self.decision.confidence(log_odds(output, batch))
        # Once more without padding, in float64: what the coupling of a result is measured by.
        measures = [completed(pair) for pair in pairs]
        costs = [self._costs(output, k, *pair.cost.shape) for k, pair in enumerate(pairs)]
        couplings = solve_ragged([mu for mu, _ in measures], [nu for _, nu in measures], costs, epsilon=1.0)
        # A coupling that fails itself is the aligner's to report.
        early = output.coupling.solution.converged.tolist()
        failed = sum(bool(one.solution.converged) and not first for one, first in zip(couplings, early, strict=True))
        if failed:
            warnings.warn(
                f"the confidences of {failed} of {len(pairs)} pairs rest on a coupling that did not converge",
                ConvergenceWarning,
                stacklevel=2,
            )
        return [
            self._found(pair, coupling, confidence[k, : pair.cost.shape[0], : pair.cost.shape[1]])
            for k, (pair, coupling) in enumerate(zip(pairs, couplings, strict=True))
        ]

    def _costs(self, output: PairOutput, k: int, n: int, m: int) -> Tensor:
        scores, alone = (
            output.scores[k : k + 1, :n, :m],
            (output.alone[0][k : k + 1, :n], output.alone[1][k : k + 1, :m]),
        )
        sizes = scores.new_tensor([n]), scores.new_tensor([m])
        return costs_with_nulls(scores.double(), (alone[0].double(), alone[1].double()), sizes)[0]

    def _found(self, pair: EncodedPair, coupling: EntropicCoupling, confidence: Tensor) -> Found:
        n, m = pair.cost.shape
        full = coupling.to_dense()
        # Words of a text and its copy belong together for certain, in their order.
        certain = pair.costs == 0
        unlike = documents.unlike(pair.source.words, pair.target.words, *pair.vectors)
        if unlike is not None:
            # What the model does not see, its spelling links, and nothing else does.
            unknown = documents.unknown(*pair.vectors)
            confidence = confidence.masked_fill(unlike, 0.0)
            certain |= (unknown & ~unlike).cpu().numpy()
        exact = _matched(pair, certain) if certain.any() else []
        for i, j in exact:
            confidence[i, j] = 1.0
        links = self.decision.links(confidence.cpu().numpy(), exact)
        return Found(coupling, full[:n, :m], full[:n, m], full[n, :m], confidence, links)


def _matched(pair: EncodedPair, certain: np.ndarray) -> list[tuple[int, int]]:
    """The cheapest one-to-one links among the pairs that are certain."""
    costs = np.where(certain, pair.costs, 2 * documents.FARTHEST)
    return decoding.match(costs, pair.shift, documents.FARTHEST).links
