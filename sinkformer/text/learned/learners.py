"""What is trained: the model of word pairs, and on request the upper blocks of the language model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from sinkformer.errors import ConfigError
from sinkformer.losses import fenchel_young
from sinkformer.text.batching import like_sizes
from sinkformer.text.embedders import TransformerEmbedder
from sinkformer.text.learned.decisions import log_odds_of_shares
from sinkformer.text.learned.examples import EncodedExamples
from sinkformer.text.learned.heads import log_shares
from sinkformer.text.learned.models import WEIGHTS_FILE, PairBatch, PairModel, PairOutput

# Word pairs, padding included, whose layers are in memory together outside of training.
_CELLS = 100_000


class Learner(nn.Module):
    """A pair model with the blocks of the language model that are trained with it.

    Args:
        pairs: the model of word pairs.
        blocks: the blocks, in their order; None if the language model is frozen.
    """

    def __init__(self, pairs: PairModel, blocks: nn.ModuleList | None):
        """Blocks, if any, take gradients from now on."""
        super().__init__()
        self.pairs = pairs
        if blocks is not None:
            self.blocks = blocks.requires_grad_(True)

    @property
    def fine_tunes(self) -> bool:
        """Whether blocks of the language model are trained."""
        return hasattr(self, "blocks")

    def losses(self, data: EncodedExamples, chosen: list[int]) -> tuple[Tensor, Tensor]:
        """Mean loss of the couplings and of the links of some examples, both per word.

        The first is the Fenchel-Young loss of the coupling layer: nats of the plan, without a derivative through the solver. The
        second is the cross-entropy of every word pair, summed, and divided by the number of words.
        """
        batch = data.batch(chosen, self.pairs.layers, differentiable=self.fine_tunes)
        couplings, links = data.targets(chosen)
        output = self.pairs(batch)
        first = fenchel_young(output.coupling, couplings).mean()
        if output.links is None:
            return first, first.new_zeros(())
        cells = batch.present[0].unsqueeze(-1) * batch.present[1].unsqueeze(-2)
        entropy = F.binary_cross_entropy_with_logits(output.links, links, reduction="none") * cells
        return first, (entropy.sum((1, 2)) / (batch.present[0].sum(-1) + batch.present[1].sum(-1))).mean()

    def save_pretrained(self, folder: Path) -> None:
        """Write all weights, for a checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: t.detach().contiguous().cpu() for name, t in self.state_dict().items()}, folder / WEIGHTS_FILE)


def log_odds(output: PairOutput, batch: PairBatch) -> Tensor:
    """Log-odds of every link, ``(B, n, m)``: of the link head, or of shares of mass if there is none."""
    if output.links is not None:
        return output.links
    words = batch.present[0].sum(-1) + batch.present[1].sum(-1)
    return log_odds_of_shares(log_shares(output.coupling, words)[0])


@torch.no_grad()
def log_odds_of(learner: Learner, data: EncodedExamples, size: int) -> list[Tensor]:
    """Log-odds ``(n, m)`` of every example, in evaluation mode; at most ``size`` examples together."""
    modes = {module: module.training for module in learner.modules()}
    learner.eval()
    found: list[Tensor] = [torch.empty(0)] * len(data)
    for chosen in like_sizes([(len(e.source), len(e.target)) for e in data.data], size, _CELLS):
        batch = data.batch(chosen, learner.pairs.layers)
        for k, odds in zip(chosen, log_odds(learner.pairs(batch), batch), strict=True):
            found[k] = odds[: len(data.data[k].source), : len(data.data[k].target)].cpu()
    for module, mode in modes.items():
        module.training = mode
    return found


def upper_blocks(embedder: TransformerEmbedder, count: int, top: int) -> nn.ModuleList:
    """The last ``count`` blocks of the language model below the hidden layer ``top``: those above it change no state.

    Raises:
        ConfigError: it has fewer, or keeps its blocks in no list that could be found.
    """
    lists = [module for module in embedder.model.modules() if isinstance(module, nn.ModuleList)]
    blocks = max(lists, key=len, default=nn.ModuleList())
    if not 1 <= count <= top <= len(blocks):
        raise ConfigError(
            f"expected the number of blocks to fine-tune between 1 and {min(top, len(blocks))}, which lie below hidden layer "
            f"{top} of the model {embedder.name!r}, received {count}"
        )
    return nn.ModuleList(list(blocks)[top - count : top])
