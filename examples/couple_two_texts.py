"""Couple two texts: links with confidence, words that stay alone, a picture.

    python couple_two_texts.py
    python couple_two_texts.py --a "The cat sat on the mat." --b "A feline rested on the rug, purring."

Needs the extras text and plot; the model is packaged, nothing is downloaded.
"""

import argparse
from pathlib import Path

from sinkformer.text import couple

A = (
    "The old lighthouse keeper climbed the stairs every evening to light the lamp. "
    "One night a storm broke the window, and he sailed to the village for new glass."
)
B = (
    "Each night the aged keeper of the lighthouse went up the steps and lit the lamp. "
    "When the wind shattered a pane, he took his boat to town to buy another."
)


def main() -> None:
    """Couple, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--a", default=A, help="first text")
    parser.add_argument("--b", default=B, help="second text")
    parser.add_argument("--output", type=Path, default=Path("couple_two_texts.png"), help="where the picture goes")
    parser.add_argument("--smoke", action="store_true", help="two short sentences, to see that everything works")
    args = parser.parse_args()
    a, b = ("The cat sat on the mat.", "A cat rested on the rug.") if args.smoke else (args.a, args.b)

    result = couple(a, b)
    print(result.ascii())
    print()
    print(f"Pharaoh links: {result}")
    source, target = result.source.words, result.target.words
    alone = [source[i] for i in result.unaligned[0]], [target[j] for j in result.unaligned[1]]
    print(f"words left alone: {alone[0]} in the first text, {alone[1]} in the second")
    print(
        f"distance: {result.normalized_distance:.3f} of the largest possible; with itself: {couple(a, a).distance:.3f}"
    )

    # Behind the links is an exact coupling of two measures: the words of each text, and a null atom for the unmatched.
    pi = result.coupling
    print(f"coupling: {pi}")
    share = result.with_nulls()[:-1, :-1].max(dim=-1).values
    print(f"the surest word: {source[int(share.argmax())]!r}, {float(share.max()):.0%} of its mass on one word")

    result.plot(args.output)
    print(f"picture: {args.output}")


if __name__ == "__main__":
    main()
