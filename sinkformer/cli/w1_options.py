"""Options of ``w1`` alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sinkformer.cli.session import check_writable, usage
from sinkformer.errors import ConfigError
from sinkformer.evaluation import load_predictor
from sinkformer.evaluation.files import check_ending
from sinkformer.models import SinkhornTransformer
from sinkformer.plots import check_format

_FILES, _MODEL = "Two files", "A model and a system"
_STEPS = 50

A = Annotated[Path | None, typer.Argument(metavar="[A", help="Couplings (.npz, .jsonl).", show_default=False)]
B = Annotated[Path | None, typer.Argument(metavar="B]", help="As many of them.", show_default=False)]
Rounded = Annotated[
    bool, typer.Option("--rounded", help="Round plans to the weights in their file first.", rich_help_panel=_FILES)
]
Model = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="A model, as save_pretrained writes it.", rich_help_panel=_MODEL)
]
System = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Targets: eot, monotone, whitened, teacher, switch, product.", rich_help_panel=_MODEL
    ),
]
Pairs = Annotated[
    list[int] | None,
    typer.Option(
        metavar="N",
        help="Random pairs; repeat it to give every --sizes its own. Default: 1000.",
        rich_help_panel=_MODEL,
    ),
]
Sizes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LOW:HIGH",
        help="Smallest and largest number of atoms a side; may be repeated. Default: 2:16.",
        rich_help_panel=_MODEL,
    ),
]
Seed = Annotated[int | None, typer.Option(help="Of the random pairs. Default: 0.", rich_help_panel=_MODEL)]
Sharpened = Annotated[
    float | None, typer.Option(help="Multiply the logits of the model by this.", rich_help_panel=_MODEL)
]
Adversarial = Annotated[
    bool,
    typer.Option("--adversarial", help="Search for worse pairs, from the worst ones on.", rich_help_panel=_MODEL),
]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps of that search. Default: 50.", rich_help_panel=_MODEL)]
Baselines = Annotated[
    bool,
    typer.Option("--baselines", help="Compare with the product and the best fixed cost.", rich_help_panel=_MODEL),
]
Baseline = Annotated[
    list[Path] | None,
    typer.Option(metavar="FOLDER", help="A trained baseline to compare with; may be repeated.", rich_help_panel=_MODEL),
]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a picture (.png, .svg, .pdf).", rich_help_panel=_MODEL),
]
Worst = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write prediction and target of the worst pair (.npz, .jsonl).",
        rich_help_panel=_MODEL,
    ),
]
Tol = Annotated[
    float | None,
    typer.Option(help="Relative width of brackets to stop at. Default: exact where that is quick, 0.01 beyond."),
]
Json = Annotated[bool, typer.Option("--json", help="Everything as one JSON line, instead of a table.")]


def ranges(texts: list[str] | None) -> list[tuple[int, int]]:
    """Ranges of ``LOW:HIGH``; one number is both."""
    found = []
    for text in texts or ["2:16"]:
        ends = text.split(":")
        if not 1 <= len(ends) <= 2 or not all(end.isascii() and end.isdigit() for end in ends):
            raise ConfigError(f"expected --sizes as LOW:HIGH, such as 2:16, received {text!r}")
        found.append((int(ends[0]), int(ends[-1])))
    return found


def load_predictors(model: Path | None, baselines: list[Path] | None) -> dict[str, SinkhornTransformer]:
    """The model and its baselines by the names of their folders, or by their paths where two names are equal."""
    folders = [folder for folder in (model, *(baselines or [])) if folder is not None]
    names = [folder.resolve().name for folder in folders]
    titles = [name if names.count(name) == 1 else str(path) for name, path in zip(names, folders, strict=True)]
    if len(set(titles)) < len(titles):
        raise usage("the same folder was given twice")
    return {title: load_predictor(folder) for title, folder in zip(titles, folders, strict=True)}


def search(adversarial: bool, steps: int | None) -> int:
    """Steps of the search, 0 for none.

    Raises:
        BadParameter: a number of steps without a search.
    """
    if steps is not None and not adversarial:
        raise usage("--steps belongs to --adversarial")
    return 0 if not adversarial else _STEPS if steps is None else steps


def check_outputs(plot: Path | None, worst: Path | None) -> None:
    """Raise unless both files, where given, can be written later."""
    check_writable(plot)
    check_writable(worst)
    if plot is not None:
        check_format(plot)
    if worst is not None:
        check_ending(worst)


def are_files(a: Path | None, b: Path | None, model: Path | None, system: str | None, **others: Any) -> bool:
    """Whether ``w1`` is asked about two files, and not about a model and a system.

    Args:
        a: first file.
        b: second file.
        model: folder of a model.
        system: name of a system.
        **others: those of one way alone, by the name of their option; None, False or empty if not given.

    Raises:
        BadParameter: neither, both or half of one way, or an option of the other (exit code 2).
    """
    files, models = [a is not None, b is not None], [model is not None, system is not None]
    if not ((all(files) and not any(models)) or (all(models) and not any(files))):
        raise usage("give either two files, A and B, or both --model and --system")
    for name, value in others.items():
        given = not (value is None or value is False or value == [])
        if given and (name == "rounded") != all(files):
            raise usage(f"--{name} belongs to {'two files' if name == 'rounded' else 'a model and a system'}")
    return all(files)
