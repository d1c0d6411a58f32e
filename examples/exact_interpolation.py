"""Transformers that are written down, not trained, and map every sequence of a data set to its target exactly.

Two data sets. *Masked words*: a token is (number of the word, place in the sentence), number 0 is the mask; the target of a
sentence is the set of its masked words, with their places. *Summaries*: long random sequences, each with a few target tokens, as
in summarisation, where the number of parameters pays: it depends on the targets, not on the length.

Alcalde, Fantuzzi and Zuazua, arXiv 2502.02270. Each network is checked in exact arithmetic: proved, not measured.

    python exact_interpolation.py            (about 20 seconds on one core)
"""

import argparse
import time
import warnings
from pathlib import Path

import torch

import sinkformer as sf
from sinkformer.errors import PrecisionError, PrecisionWarning
from sinkformer.interpolation import Interpolant, compare, construct

SENTENCES = [
    "the [cat] sat on the [mat]",
    "the [dog] slept on the sofa all day",
    "she reads an old [book] in the [garden]",
    "he reads the news in the [morning]",
    "the [train] to the coast leaves at [noon]",
]
MASK = 0
METHODS = ("paper", "direct", "two-pass", "knots")
Token = tuple[int, int]


def masked(sentences: list[str]) -> tuple[list[list[Token]], list[list[Token]], list[str]]:
    """Sources, targets, and the vocabulary; words in brackets are masked."""
    split = [sentence.split() for sentence in sentences]
    words = ["[MASK]", *dict.fromkeys(word.strip("[]") for sentence in split for word in sentence)]
    numbers = {word: number for number, word in enumerate(words)}
    sources, targets = [], []
    for sentence in split:
        sources.append([(MASK if w[0] == "[" else numbers[w], place) for place, w in enumerate(sentence)])
        targets.append([(numbers[w.strip("[]")], place) for place, w in enumerate(sentence) if w[0] == "["])
    return sources, targets, words


def summaries(N: int, n: int, m: int, d: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """N random sequences of n tokens, and m random targets for each."""
    generator = torch.Generator().manual_seed(0)
    X, Y = (torch.randn(N, size, d, generator=generator, dtype=torch.float64) for size in (n, m))
    return list(X), list(Y)


def networks(X: list, Y: list) -> dict[str, Interpolant]:
    """A softmax network of every construction, each proved and its errors in floating point measured, as a table."""
    built = {}
    print(
        "method    blocks  parameters  tau*      float64: predicted, measured  float32: predicted, measured  construct s  check s"
    )
    for method in METHODS:
        started = time.process_time()
        built[method] = construct(X, Y, attention="softmax", method=method)
        constructed = time.process_time()
        verdict = built[method].certificate.check()
        checked = time.process_time()
        assert verdict, verdict
        proof = "rational" if verdict.precision is None else f"{verdict.precision} bits"
        star = built[method].tau_star
        print(
            f"{method:8}  {built[method].L:>6}  {built[method].parameters:>10}  "
            f"{'any' if star is None else format(float(star), '.2g'):8}  "
            f"{errors(built[method], torch.float64):28}  {errors(built[method], torch.float32):28}  "
            f"{constructed - started:11.1f}  {checked - constructed:7.1f}  {proof}"
        )
    return built


def errors(built: Interpolant, dtype: torch.dtype) -> str:
    """Predicted and measured, in units of the largest target."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)  # both numbers are in the table
        try:
            export = built.export(dtype)
        except PrecisionError:
            return "refused"
    return f"{export.predicted:.1e}, {export.measured:.1e}"


def fill_in(built: Interpolant, sources: list[list[Token]], words: list[str]) -> list[str]:
    """The sentences with the masked words as the network has them, out of its float64 module."""
    filled = []
    for source in sources:
        moved = built.model(torch.tensor(source, dtype=torch.float64))
        found = {place: words[number] for number, place in moved.round().int().tolist()}
        filled.append(" ".join(found[place].upper() if number == MASK else words[number] for number, place in source))
    return filled


def main() -> None:
    """Construct, prove, fill in, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("exact_interpolation.png"), help="where the phases go")
    parser.add_argument("--gif", action="store_true", help="the phases as a moving picture too")
    parser.add_argument("--smoke", action="store_true", help="small, to see that everything works")
    args = parser.parse_args()
    N, n, m, d = (4, 30, 2, 8) if args.smoke else (20, 300, 3, 16)

    X, Y, words = masked(SENTENCES)
    print(f"masked words: {len(X)} sentences")
    sentences = networks(X, Y)
    print("\n".join(f"    {sentence}" for sentence in fill_in(sentences["direct"], X, words)))

    X, Y = summaries(N, n, m, d)
    print(f"\nsummaries: N = {N} sequences of n = {n} tokens, m = {m} targets each, in R^{d}")
    ledger = networks(X, Y)["direct"].ledger
    separations = next(entry.blocks for entry in ledger if entry.phase == "separation")
    comparisons = [compare(N=N, n=length, m=m, d=d, separations=separations) for length in range(m, n + 1)]
    print(f"\n{comparisons[-1]}")

    sf.plots.save(sf.plots.phases(sentences["paper"]), args.output)
    counts = args.output.with_stem(f"{args.output.stem}_counts")
    sf.plots.save(sf.plots.parameter_counts(comparisons, sf.plots.new_axes((4, 12))), counts)
    print(f"\npictures: {args.output}, {counts}")
    if args.gif:
        moving = args.output.with_suffix(".gif")
        sf.plots.animation(sentences["paper"], moving)
        print(f"moving: {moving}")


if __name__ == "__main__":
    main()
