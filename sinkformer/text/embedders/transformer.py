"""Hidden states of an encoder, one vector for each word and layer."""

from __future__ import annotations

import hashlib
import threading
import unicodedata
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sinkformer.errors import ConfigError, ModelError, TextWarning
from sinkformer.text.embedders.centres import packaged_centre
from sinkformer.text.embedders.checks import checked_device
from sinkformer.text.embedders.loaded import Loaded
from sinkformer.text.embedders.loading import UNUSED, load_encoder
from sinkformer.text.embedders.multilingual import MULTILINGUAL_MODEL, load_multilingual, multilingual_file
from sinkformer.text.embedders.packaged import PACKAGED_MODEL

# Fast tokenizers keep truncation and padding as state, and refuse to change it while another thread uses them.
_TOKENIZER_LOCK = threading.Lock()

# Pieces that stand for a blank and nothing else: of SentencePiece, of byte-level vocabularies.
_BLANKS = ("\u2581", "\u0120")


class TransformerEmbedder:
    """Hidden states of a Hugging Face encoder, one vector for each word: the mean over its pieces.

    Each text is encoded alone. Texts longer than the position table are read in overlapping windows and the
    states of a piece seen twice are averaged, so nothing is cut off. Unknown pieces, and pieces that stand for
    a blank only, are no part of a word.

    Args:
        model: ``"en"`` (the packaged all-MiniLM-L6-v2) or ``"multi"`` (multilingual-e5-small, extra ``multi``), both
            without a network; a folder, or a name on the Hugging Face hub.
        layer: index into ``hidden_states`` (0 = embedding table, -1 = last). Default: 3 for ``"en"``, 7 for
            ``"multi"``, else 0.6 of the depth: middle layers align words better than the last one.
        layers: further layers that :meth:`states` will be asked for. Blocks above all layers named here are
            not kept where the architecture allows it.
        device: torch device.
        batch_size: windows encoded together; the vectors do not depend on it beyond rounding.

    Attributes:
        model: the encoder, in evaluation mode.
        tokenizer: its fast tokenizer.
        layer: the layer of :meth:`embed`, non-negative.
        depth: number of layers of the published model, whether kept or not.

    Raises:
        MissingExtraError: transformers, or the package of ``"en"`` or ``"multi"``, is not installed.
        ModelError: files or weights missing, damaged (sha256 of the packaged ones), or no fast tokenizer.
        ConfigError: no such layer.
        DeviceError: no such device.
    """

    def __init__(
        self,
        model: str = PACKAGED_MODEL,
        *,
        layer: int | None = None,
        layers: Sequence[int] | None = None,
        device: str | torch.device = "cpu",
        batch_size: int = 32,
    ):
        """Load tokenizer and weights."""
        if batch_size < 1:
            raise ConfigError(f"expected batch_size >= 1, received {batch_size}")
        self.name, self.device, self.batch_size = str(model), checked_device(device), batch_size
        loaded = _loaded(self.name, layer, layers)
        self.tokenizer, self.model, self._characters = loaded.tokenizer, loaded.model, loaded.characters
        self._layers, self.layer, self.depth = loaded.layers, loaded.layers.layer, loaded.layers.depth
        # Before the weights move: a hash of numbers on the CPU is the same everywhere.
        self._fingerprint = loaded.sha256 or _fingerprint(self.model, self.tokenizer)
        self.model.to(self.device).eval()
        self.max_pieces = _position_limit(self.model, self.tokenizer)
        self._unread = _blank_pieces(self.tokenizer) | {self.tokenizer.unk_token_id}
        self._lowercases = self.tokenizer.tokenize("A") == self.tokenizer.tokenize("a")

    @property
    def settings(self) -> dict[str, Any]:
        """Model name, layer, whether letter case is lost, and a sha256.

        The hash of ``"en"`` and ``"multi"`` is that of their file of weights; that of any other model is taken over weights
        and vocabulary as they were loaded, so that it does not depend on how they are stored.
        """
        return {
            "model": self.name,
            "layer": self.layer,
            "lowercases": self._lowercases,
            "sha256": self._fingerprint,
        }

    def weights_changed(self) -> None:
        """Take the hash anew, after weights of ``model`` were replaced."""
        self._fingerprint = _fingerprint(self.model, self.tokenizer)

    @property
    def centre(self) -> Tensor | None:
        """The shipped mean word vector ``(d,)`` of :attr:`layer`, float32 on the CPU; None for weights that are not packaged."""
        return packaged_centre(self._fingerprint, self.layer)

    def embed(self, texts: list[Sequence[str]]) -> list[Tensor]:
        """Vectors of shape ``(n_words, d)`` in float32 on the device; zeros where no known piece represents a word.

        Warns:
            TextWarning: more than 5 % of the words of this call are unknown to the tokenizer.
        """
        return [x[:, 0] for x in self._word_states(texts, (self.layer,), differentiable=False)]

    def states(
        self, texts: list[Sequence[str]], layers: Sequence[int], *, differentiable: bool = False
    ) -> list[Tensor]:
        """Vectors of several layers from one pass: ``(n_words, len(layers), d)``, float32, on the device.

        Args:
            texts: each a sequence of words.
            layers: indices into ``hidden_states``, in the order wanted; negative ones count from the end. Layers
                above those the embedder was built for are not there.
            differentiable: let gradients reach the parameters of ``model``, which is run in the mode it is in.

        Raises:
            ConfigError: no layer, no such layer, or one that was not kept.

        Warns:
            TextWarning: see :meth:`embed`.
        """
        return self._word_states(texts, self._layers.checked(layers), differentiable=differentiable)

    def _word_states(
        self, texts: list[Sequence[str]], layers: tuple[int, ...], *, differentiable: bool
    ) -> list[Tensor]:
        composed = [[self._spelled(word) for word in words] for words in texts]
        width = self.model.config.hidden_size
        sums = [torch.zeros(len(words), len(layers), width, device=self.device) for words in composed]
        counts = [torch.zeros(len(words), device=self.device) for words in composed]
        windows = self._windows(composed)
        # Long windows first: neighbours in a batch have like lengths, and memory is exhausted at once or
        # never.
        windows.sort(key=lambda w: -len(w[1]))
        with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
            for start in range(0, len(windows), self.batch_size):
                chosen = windows[start : start + self.batch_size]
                found = self._piece_states([w[1] for w in chosen], layers)
                for (k, _, word_of, real), states in zip(chosen, found, strict=True):
                    index = torch.tensor(word_of, device=self.device)
                    sums[k].index_add_(0, index, states[torch.tensor(real, device=self.device)])
                    counts[k].index_add_(0, index, torch.ones(len(real), device=self.device))
            vectors = [s / c.clamp(min=1)[:, None, None] for s, c in zip(sums, counts, strict=True)]
        self._warn_of_unknown(texts, counts)
        return vectors

    def _spelled(self, word: str) -> str:
        return unicodedata.normalize("NFC", word).translate(self._characters)

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
            real = [p for p, word in enumerate(word_ids) if word is not None and ids[p] not in self._unread]
            if real:
                out.append((filled[origin], ids, [word_ids[p] for p in real], real))
        return out

    def _piece_states(self, windows: list[list[int]], layers: tuple[int, ...]) -> list[Tensor]:
        """Hidden states ``(length, len(layers), d)`` of each window, from one forward pass."""
        longest = max(len(ids) for ids in windows)
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in windows], device=self.device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in windows], device=self.device)
        output = self.model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        states = torch.stack([output.hidden_states[layer] for layer in layers], dim=2)
        return [states[k, : len(row)].float() for k, row in enumerate(windows)]

    def _warn_of_unknown(self, texts: list[Sequence[str]], counts: list[Tensor]) -> None:
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
                "model='multi' (pip install 'sinkformer[multi]') or a folder",
                TextWarning,
                stacklevel=4,
            )


def _loaded(name: str, layer: int | None, layers: Sequence[int] | None) -> Loaded:
    if name == MULTILINGUAL_MODEL:
        return load_multilingual(multilingual_file(), layer, layers)
    return load_encoder(name, layer, layers)


def _blank_pieces(tokenizer: Any) -> frozenset[int]:
    """Ids of the pieces that are read as a blank; the same letters are text to other tokenizers."""
    vocabulary, decoder = tokenizer.get_vocab(), tokenizer.backend_tokenizer.decoder
    return frozenset(
        vocabulary[piece]
        for piece in _BLANKS
        if piece in vocabulary and decoder is not None and decoder.decode(["x", piece, "x"]) == "x x"
    )


def _fingerprint(model: Any, tokenizer: Any) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if not name.startswith(UNUSED):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    digest.update(repr(sorted(tokenizer.get_vocab().items())).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


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
