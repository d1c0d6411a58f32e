"""Training an aligner on gold links: from links with words to what a folder holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from sinkformer.errors import ConfigError, FormatError
from sinkformer.text.embedders import PACKAGED_MODEL, TransformerEmbedder
from sinkformer.text.gold import LinkFile
from sinkformer.text.learned.examples import Example, examples
from sinkformer.text.learned.fitting import AlignerRecipe, fit_pairs
from sinkformer.text.learned.learners import upper_blocks
from sinkformer.text.learned.models import PairModel, PairModelConfig
from sinkformer.text.learned.storage import TrainedAligner, is_aligner, load_aligner
from sinkformer.training.progress import bar

# Without a dev set, a tenth of the pairs is held out, no more than this.
_MOST_HELD_OUT = 200
_DEFAULT = AlignerRecipe()


def train_aligner(
    train: Iterable[LinkFile | Example],
    dev: Iterable[LinkFile | Example] | None = None,
    *,
    model: str | Path = PACKAGED_MODEL,
    config: PairModelConfig | None = None,
    recipe: AlignerRecipe = _DEFAULT,
    seed: int = 0,
    folder: str | Path | None = None,
    resume: bool = False,
    patience: int | None = None,
    device: str | torch.device = "cpu",
    progress: bool = False,
) -> TrainedAligner:
    """Train an aligner on gold links; sure and possible links are gold alike.

    Hidden states of the language model are computed once and kept in memory, 2 bytes for each of their coordinates, unless the
    language model is fine-tuned.

    Args:
        train: gold files with words, as ``read_links`` gives them, and examples. Pairs without words are left out.
        dev: held-out gold: the epoch with the highest F1 there is kept, calibration and threshold are fitted there. None holds
            about a tenth of ``train`` out, some 200 pairs at most, chosen by the seed, with no text that is trained on.
        model: language model as ``TransformerEmbedder`` takes it; or the folder of a trained aligner to start from.
        config: the architecture; None: the default. An aligner to start from has its own.
        recipe: how to train.
        seed: of initial weights, order, dropout and held-out pairs.
        folder: where a checkpoint is kept after every epoch and at Ctrl-C; None: nowhere.
        resume: go on from the checkpoint in ``folder``, with the same arguments: the result is that of a run without a break.
        patience: epochs without improvement on ``dev`` after which training stops; None: all epochs.
        device: torch device of language model and aligner.
        progress: a progress bar.

    Returns:
        The ``TrainedAligner``; ``save`` writes it, ``Aligner(folder)`` uses it.

    Raises:
        ConfigError: an option outside its range; a folder with checkpoints of another run, or without ``resume``.
        FormatError: gold without words, or none of usable length.
        ModelError, MissingExtraError: see ``TransformerEmbedder``.
        NonFiniteError: a loss that is no number.
        KeyboardInterrupt: interrupted, after a checkpoint was written.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"expected a seed >= 0, received {seed!r}")
    if patience is not None and (isinstance(patience, bool) or not isinstance(patience, int) or patience < 1):
        raise ConfigError(f"expected patience as a whole number >= 1, received {patience!r}")
    if resume and folder is None:
        raise ConfigError("expected a folder to resume from, received None")
    read = examples(train)
    gold = [e for e in read if max(len(e.source), len(e.target)) <= recipe.longest]
    if not gold:
        raise FormatError(f"expected pairs of at most {recipe.longest} words a side, received none among {len(read)}")
    dropped = len(read) - len(gold)
    if dev is None:
        gold, held_out = _held_out(gold, seed)
    else:
        held_out = examples(dev)
    if not held_out:
        raise FormatError("expected held-out pairs with words on both sides, received none")
    for name, part in (("training", gold), ("held-out", held_out)):
        if not any(e.links for e in part):
            raise FormatError(f"expected {name} pairs with gold links, received {len(part)} pairs without any link")
    start = _start(model, config, device)
    with bar(progress) as show:
        learner, decision, history = fit_pairs(
            gold,
            held_out,
            start.embedder,
            start.config,
            recipe,
            seed=seed,
            init=start.model,
            folder=None if folder is None else Path(folder),
            resume=resume,
            patience=patience,
            show=show,
        )
    assert history.best is not None  # there is at least one epoch
    facts: dict[str, Any] = {"pairs": len(gold), "dev_pairs": len(held_out), "left_out": dropped, "seed": seed}
    facts |= {"dev_from_train": dev is None, "steps": history.steps, "dev_f1": round(1 - history.best, 4)}
    facts |= {"recipe": asdict(recipe)}
    tuned = max(start.encoder["blocks"], recipe.fine_tune)
    blocks = upper_blocks(start.embedder, tuned, learner.pairs.layers[-1]) if tuned else None
    return TrainedAligner(learner.pairs, decision, start.encoder["name"], start.encoder["sha256"], blocks, facts)


class _Start(NamedTuple):
    embedder: TransformerEmbedder
    config: PairModelConfig
    model: PairModel | None
    encoder: dict[str, Any]


def _start(model: str | Path, config: PairModelConfig | None, device: str | torch.device) -> _Start:
    if is_aligner(model):
        loaded = load_aligner(model, device=device)
        if config is not None:
            raise ConfigError(f"expected no config beside the trained aligner {str(model)!r}, which has its own")
        return _Start(loaded.embedder, loaded.method.model.config, loaded.method.model, loaded.encoder)
    wanted = PairModelConfig() if config is None else config
    # As ``load_aligner`` does: the hash of the weights is taken over the blocks that are kept.
    layer = -1 if wanted.layers is None else None
    embedder = TransformerEmbedder(str(model), layer=layer, layers=wanted.layers, device=device)
    wanted = wanted.resolved(embedder.depth, int(embedder.model.config.hidden_size))
    return _Start(embedder, wanted, None, {"name": str(model), "sha256": embedder.settings["sha256"], "blocks": 0})


def _held_out(gold: list[Example], seed: int) -> tuple[list[Example], list[Example]]:
    """Training and held-out pairs; pairs that share a text are on one side, so that no held-out text was trained on."""
    wanted = min(max(len(gold) // 10, 1), _MOST_HELD_OUT)
    group = _groups(gold)
    chosen: set[int] = set()
    for one in np.random.default_rng((seed, len(gold))).permutation(sorted(set(group))):
        members = {k for k, other in enumerate(group) if other == one}
        # A group that would be most of the data stays in training.
        if len(chosen) < wanted and len(chosen) + len(members) <= max(2 * wanted, 1):
            chosen |= members
    if not chosen or len(chosen) == len(gold):
        raise FormatError(
            f"expected pairs to train on and others, with other texts, to hold out, received {len(gold)} pairs; give a dev set"
        )
    return [e for k, e in enumerate(gold) if k not in chosen], [gold[k] for k in sorted(chosen)]


def _groups(gold: list[Example]) -> list[int]:
    """For every pair the number of its group: pairs are together that share a text, directly or through others."""
    texts = {text: k for k, text in enumerate(dict.fromkeys(text for e in gold for text in (e.source, e.target)))}
    ends = np.array([(texts[e.source], texts[e.target]) for e in gold])
    graph = coo_array((np.ones(len(gold)), (ends[:, 0], ends[:, 1])), shape=(len(texts), len(texts)))
    labels = connected_components(graph, directed=False)[1]
    return labels[ends[:, 0]].tolist()
