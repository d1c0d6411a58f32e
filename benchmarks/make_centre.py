"""Make sinkformer/text/centre_en.safetensors: the mean word vector of every layer of the packaged English model.

Source: Edinburgh++ (Thadani et al. 2012 edition, repository xuchen/jacana, Apache-2.0), training part only,
as JSON lines under $SINKFORMER_ALIGNMENT_DATA/edinburgh/train.jsonl. Every occurrence of a word counts once.

    SINKFORMER_ALIGNMENT_DATA=... python benchmarks/make_centre.py [output]
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from sinkformer.text.embedders import PACKAGED_SHA256, TransformerEmbedder

LAYERS = 7


def main() -> None:
    folder = os.environ.get("SINKFORMER_ALIGNMENT_DATA")
    if not folder:
        sys.exit("set SINKFORMER_ALIGNMENT_DATA to the folder that holds edinburgh/train.jsonl")
    with (Path(folder) / "edinburgh" / "train.jsonl").open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    texts = [record[side] for record in records for side in ("source", "target")]
    means = []
    for layer in range(LAYERS):
        vectors = torch.cat(TransformerEmbedder("en", layer=layer).embed(texts)).double()
        means.append(vectors[(vectors != 0).any(-1)].mean(0))
        print(f"layer {layer}: {len(vectors)} words, norm of the mean {means[-1].norm():.4f}")
    default = Path(__file__).parents[1] / "sinkformer" / "text" / "centre_en.safetensors"
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    note = {
        "source": "Edinburgh++ train (xuchen/jacana 5e9464acebc7, alignment-data/edinburgh), Apache-2.0",
        "model_sha256": PACKAGED_SHA256,
        "made_by": "benchmarks/make_centre.py",
    }
    save_file({"centre": torch.stack(means).float().contiguous()}, out, metadata=note)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
