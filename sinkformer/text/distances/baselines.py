"""From a normalized distance to a similarity: what unrelated texts have is 0, what identical ones have is 1.

Word vectors of a language model are never far from one another, so that unrelated texts have a distance well below the
largest possible one, and the longer they are the smaller it is. As in BERTScore (Zhang, Kishore, Wu, Weinberger, Artzi
2020, arXiv 1904.09675, section "Rescaling"), the mean over random pairs is measured once and becomes the zero of the scale.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np

from sinkformer.errors import ConfigError


@dataclass(frozen=True)
class Baseline:
    """Normalized distance of unrelated texts by their length, measured with certain settings.

    Attributes:
        settings: those of an ``Aligner`` that the distance depends on.
        sizes: numbers of words, increasing; both texts of a pair had that many.
        distances: mean normalized distance of random pairs of each size.
    """

    settings: dict[str, Any]
    sizes: tuple[int, ...]
    distances: tuple[float, ...]

    def __call__(self, n: int, m: int) -> float:
        """Normalized distance expected of unrelated texts of n and m words.

        For texts of equal length it is interpolated in the logarithm of the length, and constant below the smallest size.
        Only the words of the shorter text can have a partner, so that the part by which the distance falls short of 1
        is multiplied by 2 min(n, m)/(n + m), where that of the mean length is taken.
        """
        if not n or not m:
            return 1.0
        size = (n + m) / 2
        at = float(np.interp(np.log(size), np.log(self.sizes), self.distances))
        return 1.0 - min(n, m) / size * (1.0 - at)

    def objection(self, settings: dict[str, Any], n: int, m: int) -> str | None:
        """Why these settings or texts have no rescaled similarity; None if they have one."""
        other = [
            f"{name} {wanted!r} (here {settings.get(name)!r})"
            for name, wanted in self.settings.items()
            if settings.get(name) != wanted
        ]
        if other:
            return f"the baseline was measured with {', '.join(other)}"
        if (n + m) / 2 > self.sizes[-1]:
            return f"the baseline was measured for texts of up to {self.sizes[-1]} words (here {n} and {m})"
        return None

    def similarity(self, normalized_distance: float, n: int, m: int, settings: dict[str, Any]) -> float:
        """1 - distance/baseline: 1 for identical texts, about 0 for unrelated ones, below 0 for still more distant ones.

        Args:
            normalized_distance: in [0, 1].
            n: words of the first text.
            m: words of the second text.
            settings: of the aligner that measured the distance.

        Raises:
            ConfigError: the baseline does not hold for these settings or lengths.
        """
        objection = self.objection(settings, n, m)
        if objection is not None:
            raise ConfigError(f"no rescaled similarity: {objection}; use the normalized distance")
        return 1.0 - normalized_distance / self(n, m)


@lru_cache(maxsize=1)
def packaged_baseline() -> Baseline:
    """That of the packaged English model with the default settings.

    Random pairs of the Edinburgh++ corpus, training part (Apache-2.0); benchmarks/distance_baseline.py makes the file.
    """
    record = json.loads(files("sinkformer.text.distances").joinpath("baseline_en.json").read_text(encoding="utf-8"))
    return Baseline(record["settings"], tuple(record["sizes"]), tuple(record["distances"]))
