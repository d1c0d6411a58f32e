"""How far apart texts are, and why; which of many texts is nearest.

    from sinkformer.text import Aligner
    from sinkformer.text.distances import explain, search
    explain(Aligner(), "the cat sat", "a feline rested").contributions

Distances come from the cheapest matching of the words (``decoding.match``): a matched pair costs 1 - cos, a word left
alone the null price. No coupling is solved for them.
"""

from sinkformer.text.distances.baselines import Baseline, packaged_baseline
from sinkformer.text.distances.explanations import Contribution, Explanation, explain
from sinkformer.text.distances.passages import blocks, passages
from sinkformer.text.distances.searching import Hit, SearchResult, search

__all__ = [
    "Baseline",
    "Contribution",
    "Explanation",
    "Hit",
    "SearchResult",
    "blocks",
    "explain",
    "packaged_baseline",
    "passages",
    "search",
]
