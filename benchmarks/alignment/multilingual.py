"""Word alignment across languages with the multilingual model and the default method: AER on gold of XL-WA.

Reads gold alignments (JSON lines, one folder a set) from the folder in $SINKFORMER_ALIGNMENT_DATA. The first half of each
set chooses the distortion, by AER; the second half is scored. The mean word vector that is subtracted: the shipped one,
that of the texts of the first half, or none.

    SINKFORMER_ALIGNMENT_DATA=... python -m benchmarks.alignment.multilingual
    SINKFORMER_ALIGNMENT_DATA=... python -m benchmarks.alignment.multilingual --centre none --layer 6 --sets xlwa_enit/dev
"""

import argparse

from benchmarks.alignment import data
from sinkformer.text import Aligner, TransformerEmbedder

SETS = tuple(f"xlwa_en{code}/dev" for code in ("it", "ru", "hu", "bg", "da", "es", "et", "nl", "pt", "sl"))
DISTORTIONS = (0.0, 0.1, 0.2, 0.4, 0.8)


class Remembering:
    """An embedder that keeps its vectors: the same texts are aligned many times here."""

    def __init__(self, embedder):
        self.embedder, self.vectors = embedder, {}
        self.settings = embedder.settings

    def embed(self, texts):
        new = [text for text in dict.fromkeys(map(tuple, texts)) if text not in self.vectors]
        self.vectors.update(zip(new, self.embedder.embed(new), strict=True))
        return [self.vectors[tuple(text)] for text in texts]


def scores_of(aligner, gold):
    return data.scored(list(aligner.align(data.texts(gold))), gold).micro


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", nargs="*", default=SETS)
    parser.add_argument("--layer", type=int)
    parser.add_argument("--centre", choices=("shipped", "fitted", "none"), default="shipped")
    parser.add_argument("--distortions", nargs="*", type=float, default=DISTORTIONS, help="candidates")
    arguments = parser.parse_args()
    data.require()
    model = TransformerEmbedder("multi", layer=arguments.layer)
    embedder, centre = Remembering(model), model.centre if arguments.centre == "shipped" else None
    print(f"{embedder.settings}, centre: {arguments.centre}")
    print(f"{'set':<16}{'pairs':>6}{'distortion':>12}{'AER':>7}{'P':>7}{'R':>7}{'F1':>7}")
    for name in arguments.sets:
        tuned, held = data.read(f"{name}[:1/2]"), data.read(f"{name}[1/2:]")
        aligners = [Aligner(embedder, distortion=d, centre=centre) for d in arguments.distortions]
        if arguments.centre == "fitted":
            aligners = [a.fit_centre([text for p in tuned.pairs for text in (p.source, p.target)]) for a in aligners]
        best = min(aligners, key=lambda aligner: scores_of(aligner, tuned).aer)
        found = scores_of(best, held)
        shown = "".join(f"{100 * x:>7.1f}" for x in (found.aer, found.precision, found.recall_gold, found.f1))
        print(f"{name:<16}{len(held.pairs):>6}{best.distortion:>12}{shown}", flush=True)


if __name__ == "__main__":
    main()
