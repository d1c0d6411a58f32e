"""Gold links as training examples: states, features, and the coupling that the links stand for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sinkformer.errors import DTypeError, FormatError, ShapeError
from sinkformer.metrics import target_coupling
from sinkformer.text.embedders import TransformerEmbedder
from sinkformer.text.gold import LinkFile
from sinkformer.text.learned.features import pair_features
from sinkformer.text.learned.models import PairBatch

# Texts encoded together, and half precision for what is kept: 2 bytes times layers times size for every word.
_TEXTS = 512
# Batches are of like lengths, not sorted: lengths are compared after noise of that many words.
_NOISE = 4.0


@dataclass(frozen=True)
class Example:
    """One pair of texts with its links.

    Attributes:
        source: source words.
        target: target words.
        links: gold links, (i, j) from zero.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    links: tuple[tuple[int, int], ...]

    def __post_init__(self):
        """ShapeError for a link outside the words."""
        for i, j in self.links:
            if not (0 <= i < len(self.source) and 0 <= j < len(self.target)):
                raise ShapeError(
                    f"expected links within {len(self.source)} x {len(self.target)} words, counted from zero, received ({i}, {j})"
                )

    @property
    def transposed(self) -> Example:
        """The same with source and target exchanged."""
        return Example(self.target, self.source, tuple(sorted((j, i) for i, j in self.links)))

    @property
    def matrix(self) -> Tensor:
        """One where there is a link, ``(n, m)``."""
        out = torch.zeros(len(self.source), len(self.target))
        for i, j in self.links:
            out[i, j] = 1.0
        return out


def examples(gold: Iterable[LinkFile | Example]) -> list[Example]:
    """All examples: those given, and those of files in their order, sure and possible links alike. Without pairs that lack words.

    Raises:
        FormatError: a line with links alone or an error in place of links; names the file.
        DTypeError: an item that is neither.
    """
    found = []
    for item in gold:
        if isinstance(item, LinkFile):
            found += [_example(item, k) for k in range(len(item.pairs))]
        elif isinstance(item, Example):
            found.append(item)
        else:
            raise DTypeError(f"expected files read by read_links, or examples, received {type(item).__name__}")
    return [e for e in found if e.source and e.target]


def _example(file: LinkFile, k: int) -> Example:
    pair = file.pairs[k]
    if pair.error is not None:
        raise FormatError(f"{file.where(k)}: expected links, received the error {pair.error!r}; align this line again")
    if pair.source is None or pair.target is None:
        raise FormatError(
            f"{file.where(k)}: expected words beside the links, received links alone; give JSON lines with source and "
            "target, or a table with both texts"
        )
    return Example(pair.source, pair.target, pair.links)


class EncodedExamples:
    """Examples with everything the model reads, computed once.

    Args:
        data: the examples.
        embedder: the language model. States are kept in half precision, on the CPU.
        layers: hidden layers kept; empty if the states are computed anew in every step, as in fine-tuning.
    """

    def __init__(self, data: Sequence[Example], embedder: TransformerEmbedder, layers: Sequence[int]):
        """Encode every distinct text once."""
        self.data, self.embedder = list(data), embedder
        self.features = [pair_features(e.source, e.target).half() for e in self.data]
        self._states: dict[tuple[str, ...], Tensor] = {}
        texts = sorted(
            {side for e in self.data for side in (e.source, e.target)}, key=lambda words: (len(words), words)
        )
        for start in range(0, len(texts) if layers else 0, _TEXTS):
            block = texts[start : start + _TEXTS]
            for words, x in zip(block, embedder.states(list(block), layers), strict=True):
                self._states[words] = x.half().cpu()

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.data)

    def batch(self, chosen: Sequence[int], layers: Sequence[int], *, differentiable: bool = False) -> PairBatch:
        """Some examples as a batch; with gradients to the language model if ``differentiable``."""
        pairs = [self.data[k] for k in chosen]
        if self._states:
            states = [[self._states[e.source] for e in pairs], [self._states[e.target] for e in pairs]]
        else:
            texts = [e.source for e in pairs] + [e.target for e in pairs]
            both = self.embedder.states(list(texts), layers, differentiable=differentiable)
            states = [both[: len(pairs)], both[len(pairs) :]]
        # Features are made on the CPU, states where the language model is.
        batch = PairBatch.collate(states[0], states[1], [self.features[k].float() for k in chosen])
        return batch.to(self.embedder.device)

    def targets(self, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Gold couplings with null atoms ``(B, n + 1, m + 1)``, of mass one, and gold links ``(B, n, m)``."""
        pairs = [self.data[k] for k in chosen]
        n, m = max(len(e.source) for e in pairs), max(len(e.target) for e in pairs)
        couplings, links = torch.zeros(len(pairs), n + 1, m + 1), torch.zeros(len(pairs), n, m)
        for k, e in enumerate(pairs):
            a, b = len(e.source), len(e.target)
            gold = target_coupling(e.links, a, b, dtype=torch.float32) / (a + b)
            couplings[k, :a, :b], links[k, :a, :b] = gold[:a, :b], e.matrix
            couplings[k, :a, m], couplings[k, n, :b] = gold[:a, b], gold[a, :b]
            couplings[k, n, m] = gold[:a, :b].sum()
        return couplings.to(self.embedder.device), links.to(self.embedder.device)


def batches(lengths: Sequence[int], size: int, seed: int, epoch: int) -> Iterator[list[int]]:
    """Positions of examples in an order that depends on seed and epoch alone; batches of like lengths."""
    generator = np.random.default_rng((seed, epoch))
    order = np.argsort(np.asarray(lengths) + _NOISE * generator.random(len(lengths)), kind="stable")
    found = [order[k : k + size].tolist() for k in range(0, len(order), size)]
    for k in generator.permutation(len(found)):
        yield found[k]
