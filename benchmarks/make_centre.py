"""Make sinkformer/text/centre_{en,multi}.safetensors: the mean word vector of every layer of a packaged model.

Source: Edinburgh++ (Thadani et al. 2012 edition, repository xuchen/jacana, Apache-2.0), training part only,
as JSON lines under $SINKFORMER_ALIGNMENT_DATA/edinburgh/train.jsonl. Every occurrence of a word counts once.

    SINKFORMER_ALIGNMENT_DATA=... python benchmarks/make_centre.py en [output]
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from sinkformer.text import TransformerEmbedder

MODELS = ("en", "multi")


def main() -> None:
    folder = os.environ.get("SINKFORMER_ALIGNMENT_DATA")
    if not folder or len(sys.argv) < 2 or sys.argv[1] not in MODELS:
        sys.exit(
            f"set SINKFORMER_ALIGNMENT_DATA to the folder that holds edinburgh/train.jsonl, and name one of {MODELS}"
        )
    name = sys.argv[1]
    with (Path(folder) / "edinburgh" / "train.jsonl").open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    texts = [record[side] for record in records for side in ("source", "target")]
    embedder = TransformerEmbedder(name, layers=(-1,))
    states = torch.cat(embedder.states(texts, range(embedder.depth + 1))).double()
    means = states[(states != 0).any(-1).any(-1)].mean(0)
    for layer, mean in enumerate(means):
        print(f"layer {layer}: {len(states)} words, norm of the mean {mean.norm():.4f}")
    default = Path(__file__).parents[1] / "sinkformer" / "text" / f"centre_{name}.safetensors"
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else default
    note = {
        "source": "Edinburgh++ train (xuchen/jacana 5e9464acebc7, alignment-data/edinburgh), Apache-2.0",
        "model_sha256": embedder.settings["sha256"],
        "made_by": "benchmarks/make_centre.py",
    }
    save_file({"centre": means.float().contiguous()}, out, metadata=note)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
