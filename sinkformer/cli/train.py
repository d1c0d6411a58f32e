"""``sinkformer train``: an aligner from gold links."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from sinkformer.cli import options as o
from sinkformer.cli.session import session, usage
from sinkformer.errors import ConfigError
from sinkformer.text.gold import GoldFormat, read_links
from sinkformer.text.learned import AlignerRecipe, PairModelConfig, is_aligner, train_aligner

_DEFAULT = AlignerRecipe()
_RECIPE = "Training"
_GOLD = "Gold"
_PARTS = "Architecture"


def train(
    train: Annotated[
        list[Path], typer.Option("--train", metavar="FILE", help="Gold links with their words; may be given again.")
    ],
    save: Annotated[Path, typer.Option("--save", metavar="FOLDER", help="Where the aligner is written.")],
    dev: Annotated[
        list[Path] | None,
        typer.Option(
            "--dev", metavar="FILE", help="Held-out gold. Default: a tenth of the training pairs, at most 200."
        ),
    ] = None,
    gold_format: Annotated[
        GoldFormat | None,
        typer.Option(help="Their format. Default: seen from their first lines.", rich_help_panel=_GOLD),
    ] = None,
    one_index_gold: Annotated[
        bool, typer.Option("--one-index-gold", help="Words are counted from one.", rich_help_panel=_GOLD)
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            help="Language model: 'en', 'multi', a folder, a Hugging Face name; or the folder of an aligner to train further."
        ),
    ] = "en",
    epochs: Annotated[
        int, typer.Option(help="Passes over the training pairs.", rich_help_panel=_RECIPE)
    ] = _DEFAULT.epochs,
    rate: Annotated[float, typer.Option(help="Learning rate.", rich_help_panel=_RECIPE)] = _DEFAULT.rate,
    batch: Annotated[int, typer.Option(help="Pairs of a step.", rich_help_panel=_RECIPE)] = _DEFAULT.batch,
    fine_tune: Annotated[
        int, typer.Option(help="Upper blocks of the language model that are trained too.", rich_help_panel=_RECIPE)
    ] = _DEFAULT.fine_tune,
    patience: Annotated[
        int | None, typer.Option(help="Epochs without improvement after which to stop.", rich_help_panel=_RECIPE)
    ] = None,
    longest: Annotated[
        int, typer.Option(help="Leave out training pairs with a side of more words.", rich_help_panel=_RECIPE)
    ] = _DEFAULT.longest,
    seed: Annotated[int, typer.Option(help="Of weights, order and dropout.", rich_help_panel=_RECIPE)] = 0,
    blocks: Annotated[
        int | None,
        typer.Option(help="Layers over the matrix of word pairs; 0 for none. Default: 3.", rich_help_panel=_PARTS),
    ] = None,
    channels: Annotated[int | None, typer.Option(help="Their channels. Default: 32.", rich_help_panel=_PARTS)] = None,
    pure: Annotated[
        bool,
        typer.Option(
            "--pure",
            help="Queries and keys alone: no spelling, places, layers over pairs, link head.",
            rich_help_panel=_PARTS,
        ),
    ] = False,
    one_way: Annotated[
        bool,
        typer.Option("--one-way", help="Train from source to target only, not both ways.", rich_help_panel=_RECIPE),
    ] = False,
    free_order: Annotated[
        bool, typer.Option("--free-order", help="No price for a change of place.", rich_help_panel=_PARTS)
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint of an interrupted run, with the same arguments.")
    ] = False,
    device: o.Device = None,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Train an aligner on gold links, in any format that evaluate reads. Use it with --model FOLDER.

    Example: sinkformer train --train gold.jsonl --dev dev.jsonl --save my-aligner
    """
    parts: dict[str, Any] = {}
    if pure:
        if blocks or channels is not None:
            raise usage("--pure has no layers over pairs; leave out --blocks and --channels")
        parts = {"blocks": 0, "places": False, "spelling": False, "links": False}
    parts |= {name: value for name, value in (("blocks", blocks), ("channels", channels)) if value is not None}
    if free_order:
        parts["places"] = False
    with session(quiet=quiet, debug=debug):
        recipe = AlignerRecipe(
            epochs=epochs, rate=rate, batch=batch, fine_tune=fine_tune, longest=longest, both_ways=not one_way
        )
        if save.exists() and not save.is_dir():
            raise ConfigError(f"expected a folder to save to, received the file {save}")
        if is_aligner(save):
            raise ConfigError(f"{save} holds an aligner already; remove it, or name another folder")
        gold, held_out = (
            [read_links(path, gold_format, one_based=one_index_gold) for path in paths or ()] for paths in (train, dev)
        )
        result = train_aligner(
            gold,
            held_out if dev else None,
            model=model,
            config=PairModelConfig(**parts) if parts else None,
            recipe=recipe,
            seed=seed,
            folder=save / "checkpoints",
            resume=resume,
            patience=patience,
            device=device or "cpu",
            progress=not quiet,
        )
        result.save(save)
        shutil.rmtree(save / "checkpoints")
        facts = result.training
        print(
            f"{save}: {facts['pairs']} pairs, {facts['steps']} steps; F1 on {facts['dev_pairs']} held-out pairs "
            f"{100 * facts['dev_f1']:.1f}, threshold {result.decision.threshold}"
        )
