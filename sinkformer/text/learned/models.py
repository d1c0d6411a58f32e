"""The trained model of word pairs: heads, coupling layer, refinement, link head; saved as JSON and safetensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from sinkformer.couplings import EntropicCoupling
from sinkformer.errors import ConfigError
from sinkformer.text.learned import features
from sinkformer.text.learned.heads import WordHeads, couple_with_nulls, log_shares
from sinkformer.text.learned.refinement import LinkHead, Refinement, coupling_maps

_FORMAT_VERSION = 1
CONFIG_FILE, WEIGHTS_FILE = "aligner.json", "model.safetensors"
# Marginal error of the couplings the refinement and the losses see; float32 reaches it.
_TOLERANCE = 1e-4
# Of any number in a configuration: what is beyond is a damaged file.
_LARGEST = 65_536


@dataclass(frozen=True)
class PairModelConfig:
    """The architecture; stored beside the weights.

    Attributes:
        layers: hidden layers of the language model that make up the state of a word, ascending; None, until a language model is
            known: those at a third, two thirds and all of its depth.
        size: coordinates of a hidden state; None, until a language model is known.
        width: rank of queries and keys.
        heads: cosines they are made of; divides ``width``.
        places: relative places enter scores and refinement; off for languages of free word order.
        spelling: what the spelling of two words has in common enters scores and refinement.
        channels: of the refinement and of the link head.
        blocks: of the refinement; 0 for none. With 0, and without places, spelling and links, this is a Sinkhorn Transformer:
            the cost of a pair is -<Q, K>.
        links: whether there is a link head; without, the confidence of a link is its share of mass.
        dropout: on hidden states, in training.
        format_version: version of this format.

    Raises:
        ConfigError: a value outside its range.
    """

    layers: tuple[int, ...] | None = None
    size: int | None = None
    width: int = 128
    heads: int = 4
    places: bool = True
    spelling: bool = True
    channels: int = 32
    blocks: int = 3
    links: bool = True
    dropout: float = 0.2
    format_version: int = _FORMAT_VERSION

    def __post_init__(self):
        """Check every value."""
        if self.format_version != _FORMAT_VERSION:
            raise ConfigError(
                f"expected format_version {_FORMAT_VERSION}, received {self.format_version}; load the model with the release of "
                "sinkformer that wrote it"
            )
        whole = {"width": 1, "heads": 1, "channels": 1, "blocks": 0} | ({} if self.size is None else {"size": 1})
        given = {name: (getattr(self, name), least) for name, least in whole.items()}
        if self.layers is not None:
            if not isinstance(self.layers, (tuple, list)) or not self.layers:
                raise ConfigError(f"expected layers as a list of hidden layers, received {self.layers!r}")
            object.__setattr__(self, "layers", tuple(self.layers))
            given |= {f"layers[{k}]": (layer, 0) for k, layer in enumerate(self.layers)}
        for name, (value, least) in given.items():
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
                raise ConfigError(
                    f"expected {name} as a whole number between {least} and {_LARGEST}, received {value!r}"
                )
        if self.layers is not None and list(self.layers) != sorted(set(self.layers)):
            raise ConfigError(f"expected ascending layers, received {self.layers}")
        if self.width % self.heads:
            raise ConfigError(f"expected heads that divide width={self.width}, received {self.heads}")
        for name in ("places", "spelling", "links"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"expected {name} as True or False, received {getattr(self, name)!r}")
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise ConfigError(f"expected dropout in [0, 1), received {self.dropout!r}")

    def resolved(self, depth: int, size: int) -> PairModelConfig:
        """With layers and size of a language model of that depth and size, where they are None.

        Raises:
            ConfigError: a size of another language model.
        """
        if self.size not in (None, size):
            raise ConfigError(
                f"expected size={size}, which the hidden states of the language model have, received {self.size}"
            )
        layers = tuple(sorted({round(depth * k / 3) for k in (1, 2, 3)})) if self.layers is None else self.layers
        return replace(self, layers=layers, size=size)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PairModelConfig:
        """From what JSON holds; unknown keys are errors."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise ConfigError(
                f"unknown keys {unknown} in the configuration of an aligner; it was written by another release"
            )
        return cls(**values)


def weights_digest(state: Mapping[str, Tensor], start: bytes = b"") -> str:
    """Hash of names and numbers of weights, and of what ``start`` says about them; hexadecimal."""
    digest = hashlib.sha256(start)
    for name, t in sorted(state.items()):
        digest.update(name.encode() + t.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class PairBatch(NamedTuple):
    """Pairs of texts, padded.

    Attributes:
        states: hidden states ``(B, n, layers, size)`` of the source words and ``(B, m, layers, size)`` of the target words.
        features: ``(B, len(features.NAMES), n, m)``, see ``features``.
        present: one for words and zero for padding, ``(B, n)`` and ``(B, m)``.
    """

    states: tuple[Tensor, Tensor]
    features: Tensor
    present: tuple[Tensor, Tensor]

    @classmethod
    def collate(cls, sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Sequence[Tensor]) -> PairBatch:
        """From the states ``(n, layers, size)`` and the features ``(channels, n, m)`` of every pair."""
        states, present = [], []
        for side in (sources, targets):
            states.append(pad_sequence([x.float() for x in side], batch_first=True))
            present.append(pad_sequence([x.new_ones(len(x), dtype=torch.float32) for x in side], batch_first=True))
        n, m = [p.shape[1] for p in present]
        padded = pairs[0].new_zeros(len(pairs), len(features.NAMES), n, m)
        for k, x in enumerate(pairs):
            padded[k, :, : x.shape[1], : x.shape[2]] = x
        return cls((states[0], states[1]), padded, (present[0], present[1]))

    def to(self, device: torch.device) -> PairBatch:
        """The batch on a device."""
        (x, y), (a, b) = self.states, self.present
        return PairBatch((x.to(device), y.to(device)), self.features.to(device), (a.to(device), b.to(device)))


class PairOutput(NamedTuple):
    """What the model says about a batch.

    Attributes:
        coupling: with null atoms, ``(B, n + 1, m + 1)``; its cost is ``heads.costs_with_nulls`` of the scores.
        scores: of word pairs, ``(B, n, m)``.
        alone: of words that stay alone, ``(B, n)`` and ``(B, m)``.
        links: logits of links ``(B, n, m)``, or None without a link head.
    """

    coupling: EntropicCoupling
    scores: Tensor
    alone: tuple[Tensor, Tensor]
    links: Tensor | None


class PairModel(nn.Module):
    """Hidden states of two texts to the coupling of their words, and the probability of every link.

    Queries and keys give the scores of pairs (``heads``); a first coupling, the scores and the spelling go through the
    refinement (``refinement``), which adds a bias to the scores; the second coupling is the result. The link head reads it.

    Args:
        config: the architecture, with its layers and size.

    Attributes:
        layers: hidden layers that make up the state of a word.
        names: features of pairs it reads.
    """

    def __init__(self, config: PairModelConfig):
        """Weights that, before training, couple words of like direction."""
        super().__init__()
        if config.layers is None or config.size is None:
            raise ConfigError(
                "expected a configuration with layers and size; config.resolved(depth, size) fills them in"
            )
        self.config, self.layers = config, config.layers
        self.words = WordHeads(len(config.layers), config.size, config.width, config.heads, config.dropout)
        if config.places:
            self.place = nn.Parameter(torch.tensor(1.0))
        self.names = config.spelling * features.SPELLING + config.places * features.PLACES
        if config.spelling:
            self.spelling = nn.Parameter(torch.zeros(len(self.names)))
        if config.blocks:
            inputs = config.heads + 1 + len(self.names) + LinkHead.MAPS
            self.refinement = Refinement(inputs, config.channels, config.blocks)
        if config.links:
            self.link = LinkHead(config.channels if config.blocks else 0, config.channels)

    def forward(self, batch: PairBatch, tolerance: float = _TOLERANCE) -> PairOutput:
        """Couplings and logits.

        Args:
            batch: the pairs; both texts of a pair have words.
            tolerance: L1 marginal error of the couplings.
        """
        config, present = self.config, batch.present
        cells = (present[0].unsqueeze(-1) * present[1].unsqueeze(-2)).unsqueeze(1)
        pairs = batch.features[:, [features.NAMES.index(name) for name in self.names]]
        q, k, left, right = self.words(*batch.states)
        alone = left, right
        by_heads = self.words.by_heads(q, k)
        scores, states = self._scores(by_heads, pairs), None
        if config.blocks:
            draft = self._shares(scores, alone, present, tolerance)[1]
            seen = torch.cat([by_heads, 0.1 * scores.unsqueeze(1), pairs], 1) * cells
            states, bias = self.refinement(torch.cat([seen, coupling_maps(scores, draft, cells)], 1), cells)
            scores = scores + bias
        coupling, shares = self._shares(scores, alone, present, tolerance)
        links = self.link(coupling_maps(scores, shares, cells), states, cells) if config.links else None
        return PairOutput(coupling, scores, alone, links)

    def _scores(self, by_heads: Tensor, pairs: Tensor) -> Tensor:
        scores = by_heads.sum(1)
        if self.config.places:
            scores = scores - self.place.abs() * pairs[:, self.names.index("shift")].square()
        if self.config.spelling:
            scores = scores + torch.einsum("c,bcnm->bnm", self.spelling, pairs)
        return scores

    def _shares(
        self, scores: Tensor, alone: tuple[Tensor, Tensor], present: tuple[Tensor, Tensor], tolerance: float
    ) -> tuple[EntropicCoupling, tuple[Tensor, Tensor, Tensor]]:
        coupling = couple_with_nulls(scores, alone, present, tolerance)
        return coupling, log_shares(coupling, present[0].sum(-1) + present[1].sum(-1))
