"""Tokenizer and weights of a Hugging Face encoder, from a folder or the hub, in silence and complete."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sinkformer.errors import MissingExtraError, ModelError, SinkformerError
from sinkformer.text.embedders.checks import first_line
from sinkformer.text.embedders.layers import Layers, depth_of
from sinkformer.text.embedders.loaded import Loaded
from sinkformer.text.embedders.packaged import PACKAGED_LAYER, PACKAGED_MODEL, PACKAGED_SHA256, packaged_folder

# What keeps transformers silent while it loads is global to the process.
_LOADING_LOCK = threading.Lock()

# In these architectures hidden_states[k] is the plain output of block k, so the blocks above it need not be
# built. (Elsewhere the last hidden state has passed one more normalisation, and a shorter model would move
# it.)
_PLAIN_STACKS = frozenset({"bert", "roberta", "xlm-roberta", "camembert", "electra"})
# Weights above the hidden states; many files lack them, and transformers then draws them at random.
UNUSED = "pooler."
_REMEDY = (
    "Pass 'en' for the packaged English model, 'multi' for the multilingual one, an existing folder with config.json, "
    "tokenizer and weights, or the name of an encoder on the Hugging Face hub (which needs a network, or a copy in its "
    "cache)"
)


def load_encoder(name: str, layer: int | None, extra: Iterable[int] | None) -> Loaded:
    """The encoder ``"en"``, or that of a folder, or of a name on the hub.

    Raises:
        MissingExtraError: transformers or the packaged model is not installed.
        ModelError: files or weights missing or damaged, or no fast tokenizer.
        ConfigError: no such layer.
    """
    transformers = import_transformers()
    local = name == PACKAGED_MODEL
    source = str(packaged_folder()) if local else name
    if (source.startswith((".", "/", "~")) or source.count("/") > 1) and not Path(source).is_dir():
        raise ModelError(f"cannot load the model {source!r}: no such folder. {_REMEDY}")
    try:
        with silence(transformers):
            config = transformers.AutoConfig.from_pretrained(source, local_files_only=local)
            depth, plain = depth_of(config), config.model_type in _PLAIN_STACKS
            default = PACKAGED_LAYER if local else round(0.6 * depth)
            layers = Layers.chosen(depth, layer, extra, name, default=default, plain=plain)
            if plain:
                config.num_hidden_layers = layers.kept
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, local_files_only=local)
            if getattr(tokenizer, "add_prefix_space", None) is False:
                # Byte-level tokenizers refuse words given one by one unless told to put the blank back.
                tokenizer = transformers.AutoTokenizer.from_pretrained(
                    source, local_files_only=local, add_prefix_space=True
                )
            # Sizes that do not match are let through here, to be named below with what is missing.
            model, report = transformers.AutoModel.from_pretrained(
                source, config=config, local_files_only=local, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except SinkformerError:
        raise
    except Exception as error:  # files of any kind of damage, read by three libraries: no list of types is complete
        raise ModelError(f"cannot load the model {source!r}: {first_line(error)}. {_REMEDY}") from error
    _check_loaded(source, config, tokenizer, report)
    if getattr(config, "is_encoder_decoder", False):
        model = model.get_encoder()
    return Loaded(tokenizer, model, layers, sha256=PACKAGED_SHA256 if local else None)


def import_transformers() -> Any:
    """The package.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        if error.name != "transformers":
            raise
        raise MissingExtraError("text", "transformers") from error
    return transformers


@contextmanager
def silence(transformers: Any) -> Iterator[None]:
    """No loading bar and no report of unused heads: they spoil the stderr of the command line."""
    logging = transformers.utils.logging
    with _LOADING_LOCK:
        progress, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if progress:
                logging.enable_progress_bar()


def _check_loaded(source: str, config: Any, tokenizer: Any, report: dict[str, Any]) -> None:
    """Refuse what transformers fills in on its own: numbers drawn at random, a vocabulary of special tokens."""
    unused = (UNUSED, "decoder.") if getattr(config, "is_encoder_decoder", False) else (UNUSED,)
    missing = sorted(name for name in report["missing_keys"] if not name.startswith(unused))
    other = sorted(item[0] for item in report["mismatched_keys"] if not item[0].startswith(unused))
    for names, problem in ((missing, "are missing from"), (other, "have other sizes than config.json says in")):
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise ModelError(
                f"expected a weight for every parameter of the model {source!r}, but {shown} {problem} its files; "
                "copy or download the model again"
            )
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(
            f"the tokenizer of {source!r} is a slow one ({type(tokenizer).__name__}) and cannot say which "
            "word a piece belongs to; use a model with a tokenizer.json, or pass a callable as the model"
        )
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise ModelError(
            f"the tokenizer of {source!r} knows special tokens only, so every word would be unknown; expected a "
            "tokenizer.json (or a vocabulary) beside the weights: copy or download the tokenizer files too"
        )
