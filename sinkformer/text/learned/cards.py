"""The model card: what a trained aligner is, in words, from what its folder holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT = """# Word aligner

A trained aligner of [sinkformer](https://pypi.org/project/sinkformer): the coupling of the words of two texts, with null
words, and a calibrated probability for every link.

    from sinkformer.text import Aligner
    aligner = Aligner("this folder")

* **Language model**: `{name}`, hidden layers {layers}, {tuning} (sha256 of its weights {sha256}...).
* **Architecture**: queries and keys of rank {width} ({heads} heads), null price for every word, {blocks} blocks of {channels}
  channels over the matrix of word pairs, {links}.
* **Training**: {pairs} pairs ({left_out} left out for their length), {steps} steps, seed {seed}; loss: exact Fenchel-Young
  loss of the coupling with null atoms, and cross-entropy of links with weight {link_weight}.
* **Held-out pairs**: {dev_pairs}, {dev_source}; highest F1 there {dev_f1:.1%}. They chose the epoch, the calibration
  (confidence = sigmoid({scale:.3f} x + {shift:.3f})) and the threshold {threshold}.

The confidence of a link is absolute. A threshold fitted on one kind of text does not suit another: annotators differ in what
they call a link. Fit it again, or train further, on some gold of the kind that is to be aligned.
"""


def card(values: Mapping[str, Any]) -> str:
    """The card for the contents of ``aligner.json``."""
    model, decision, encoder, facts = (values[key] for key in ("model", "decision", "encoder", "training"))
    return _TEXT.format(
        name=encoder["name"],
        sha256=encoder["sha256"][:12],
        layers=", ".join(map(str, model["layers"])),
        tuning=f"its last {encoder['blocks']} blocks fine-tuned" if encoder["blocks"] else "frozen",
        links="a link head" if model["links"] else "no link head",
        dev_source="held out of the training file" if facts["dev_from_train"] else "a file of their own",
        link_weight=facts["recipe"]["link_weight"],
        **{key: model[key] for key in ("width", "heads", "blocks", "channels")},
        **{key: facts[key] for key in ("pairs", "left_out", "steps", "seed", "dev_pairs", "dev_f1")},
        **decision,
    )
