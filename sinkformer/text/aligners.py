"""Two texts -> words -> vectors -> coupling -> links."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkformer.errors import (
    ConfigError,
    ConvergenceWarning,
    DTypeError,
    NonFiniteError,
    ShapeError,
    TextError,
)
from sinkformer.text import decoding, documents
from sinkformer.text.alignments import Alignment
from sinkformer.text.batching import like_sizes
from sinkformer.text.choice import Choice, choose
from sinkformer.text.embedders import (
    PACKAGED_MODEL,
    Embedder,
    TransformerEmbedder,
    checked_device,
    checked_vectors,
)
from sinkformer.text.formats import BadLine, Pair
from sinkformer.text.learned import Trained
from sinkformer.text.methods import EncodedPair, Found, Method
from sinkformer.text.methods.checks import DEAREST, checked_number, checked_price
from sinkformer.text.methods.linking import empty
from sinkformer.text.tokens import Tokenizer, Words, split_words

TextLike = str | Sequence[str] | Words

# Cells of the cost matrices solved together: bounds the memory of a batch whatever the lengths.
_CELLS = 400_000

_NULL_PRICE = 0.4


class Aligner:
    """Couples pairs of texts. Build it once; call it with two texts, or stream pairs through :meth:`align`.

    The cost of a word pair is 1 - cos of their centred vectors, plus ``distortion`` times the squared
    difference of their relative positions. ``method`` finds coupling and links. The distance is that of the cheapest
    matching, whatever the method.

    Args:
        model: ``"en"`` (packaged English model and aligner), the folder of an aligner that ``sinkformer train`` wrote,
            ``"multi"``, the folder of a language model, a Hugging Face name, a callable from a list of token lists to a list of
            ``(n_words, d)`` arrays, or an ``Embedder``. Of a callable the settings know only the name.
        layer: hidden layer of the vectors that costs and distances are made of; default: 3 for ``"en"``, 7 for ``"multi"``, 0.6
            of the depth for others. An aligner reads layers of its own.
        method: how links are found: ``"trained"``, the default of ``"en"`` and of an aligner; ``"partial"``, the default of
            others (entropic coupling with null atoms); ``"balanced"``, ``"unbalanced"``, ``"argmax"``, ``"itermax"``; or a
            ``Method`` such as ``methods.Unbalanced(reach=0.3)``, which holds its own options. Options without meaning for a
            method are an error; None is its default.
        null_price: what leaving one word alone costs, in (0, 1e6]; default 0.4. The distance has it, and the coupling of
            ``"partial"``: there two words are matched only if their cost is below twice that.
        epsilon: strength of the entropy, in units of the cost, in [1e-6, 1e6]; default 0.05. Larger values spread the
            coupling. Of ``"partial"``, ``"balanced"`` and ``"unbalanced"``.
        distortion: price of a change of place, in [0, 1e6]; 0 for languages of free word order.
        threshold: in (0, 1]. Of ``"trained"``: least probability of a link; default: that of the aligner. Of the methods that
            have an ``epsilon``: least share of a word's mass, default 0.3; for a pair of the one-to-one matching all copies of
            a word count together, since they share its mass (see ``decoding``), so that the own confidence of such a link can
            be below it.
        tokenizer: a callable from text to a list of words, instead of the built-in rule. Token lists are
            never split.
        centre: vector subtracted from all word vectors; ``"auto"``: the shipped mean for ``"en"`` and
            ``"multi"``, none for others (see :meth:`fit_centre`); None: no centring.
        max_words: longest text accepted. Longer ones are an error: nothing is cut off in silence.
        device: torch device of model and coupling: cpu, cuda or mps.
        batch_size: texts encoded, and pairs solved, together. The results do not depend on it beyond rounding.

    Raises:
        ConfigError: an option outside its range, or without meaning for this model.
        DeviceError, DTypeError, MissingExtraError, ModelError: see ``embedders``.
    """

    def __init__(
        self,
        model: str | Path | Callable | Embedder = PACKAGED_MODEL,
        *,
        layer: int | None = None,
        method: str | Method | None = None,
        null_price: float | None = None,
        epsilon: float | None = None,
        distortion: float = 0.2,
        threshold: float | None = None,
        tokenizer: Tokenizer | None = None,
        centre: Any = "auto",
        max_words: int = 4096,
        device: str | torch.device = "cpu",
        batch_size: int = 32,
    ):
        """Check the options, then load the model."""
        price = _NULL_PRICE if null_price is None else checked_price("null_price", null_price)
        choice = choose(model, method, null_price=null_price, epsilon=epsilon, threshold=threshold)
        self.distortion = checked_number("distortion", distortion, least=0.0, most=DEAREST)
        for name, value in (("max_words", max_words), ("batch_size", batch_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"expected {name} as a whole number >= 1, received {value!r}")
        if tokenizer is not None and not callable(tokenizer):
            raise DTypeError(
                f"expected tokenizer to be a callable from str to a list of words, received {type(tokenizer).__name__}"
            )
        self.tokenizer, self.max_words, self.batch_size = tokenizer, max_words, batch_size
        self.device = checked_device(device)
        self.embedder, trained = choice.load(layer=layer, device=self.device, batch_size=batch_size)
        self.method = choice.method_with(trained)
        self.null_price: float = self.method.settings.get("null_price", price)
        self.centre, self._centre_name = _resolve_centre(centre, self.embedder)

    @property
    def settings(self) -> dict[str, Any]:
        """Everything a result depends on besides the texts; it is stored in every ``Alignment``."""
        out = {**self.embedder.settings, **self.method.settings}
        out.update(
            centre=self._centre_name,
            method=self.method.name,
            null=self.method.null,
            null_price=self.null_price,
            distortion=self.distortion,
            tokenizer="default" if self.tokenizer is None else _name_of(self.tokenizer),
            version=version("sinkformer"),
        )
        return out

    def __repr__(self) -> str:
        """The settings."""
        return f"Aligner({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"

    def __call__(self, a: TextLike, b: TextLike) -> Alignment:
        """Couple two texts.

        Args:
            a: source: a text, or its tokens.
            b: target, of the same kind.

        Raises:
            DTypeError: neither text nor tokens, or one of each.
            TextError: more than ``max_words`` words.

        Warns:
            ConvergenceWarning: the solver stopped early.
            TextWarning: many words are unknown to the model.
        """
        return self._window([self._checked(a, b)])[0]

    def align(self, pairs: Iterable[Any], *, window: int | None = None) -> Iterator[Alignment | BadLine]:
        """Couple many pairs, lazily and in order, one result for each.

        Pairs are taken ``window`` at a time and sorted by length inside the window, so memory does not grow
        with their number. A ``Pair`` read from a file that cannot be coupled becomes a ``BadLine``, and a
        ``BadLine`` passes through, so that results keep their place; a plain tuple that cannot be coupled
        raises.

        Args:
            pairs: ``(source, target)`` tuples, or what ``formats.read_pairs`` yields.
            window: pairs held at a time; default ``16 * batch_size``.

        Raises:
            DTypeError: an item that is not a pair; names its position.
            TextError: see :meth:`__call__`.
        """
        if isinstance(pairs, (str, bytes, Words)) or not isinstance(pairs, Iterable):
            raise DTypeError(
                f"expected an iterable of pairs of texts, received one {type(pairs).__name__}; for two "
                "texts call the aligner itself: aligner(a, b)"
            )
        size = 16 * self.batch_size if window is None else window
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"expected window as a whole number >= 1, received {window!r}")
        return self._stream(pairs, size)

    def _stream(self, pairs: Iterable[Any], size: int) -> Iterator[Alignment | BadLine]:
        numbered = enumerate(pairs)
        while block := list(islice(numbered, size)):
            ready = [self._prepared(k, item) for k, item in block]
            results = iter(self._window([item for item in ready if not isinstance(item, BadLine)]))
            for item in ready:
                yield item if isinstance(item, BadLine) else next(results)

    def _prepared(self, position: int, item: Any) -> tuple[Words, Words] | BadLine:
        if isinstance(item, BadLine):
            return item
        if isinstance(item, Pair):
            try:
                return self._checked(item.source, item.target)
            except TextError as error:
                return BadLine(item.line, str(error))
        if isinstance(item, (str, bytes, Words)) or not isinstance(item, Sequence) or len(item) != 2:
            raise DTypeError(
                f"expected a pair (source, target) at position {position}, received "
                f"{type(item).__name__} {str(item)[:40]!r}"
            )
        try:
            return self._checked(item[0], item[1])
        except (TextError, DTypeError) as error:
            raise type(error)(f"pair {position}: {error}") from error

    def fit_centre(self, texts: Iterable[TextLike]) -> Aligner:
        """A copy of this aligner that subtracts the mean word vector of ``texts``.

        Vectors of most models share a common part that makes all words look alike. A few hundred texts like
        the ones to be aligned are enough; the answers then no longer depend on which texts come together.

        Raises:
            DTypeError: a bare string where texts are meant.
            TextError: no text has a word with a vector.
        """
        if isinstance(texts, (str, bytes, Words)):
            raise DTypeError(f"expected an iterable of texts, received one {type(texts).__name__}; put it in a list")
        total, count = None, 0
        words = (self._one(text, "centring") for text in texts)
        while block := list(islice(words, 16 * self.batch_size)):
            for x in self._vectors([w.words for w in block]):
                known = x.double()[(x != 0).any(-1)]
                if len(known):
                    total = known.sum(0) if total is None else total + known.sum(0)
                    count += len(known)
        if total is None:
            raise TextError("expected texts with at least one word the model knows, received none")
        other = copy.copy(self)
        other.centre, other._centre_name = _resolve_centre(total / count, self.embedder)
        return other

    # From texts to words
    # ----------------------------------------------------------------------------------------------

    def _words(self, a: TextLike, b: TextLike) -> tuple[Words, Words]:
        kinds = [isinstance(x, str) for x in (a, b) if not isinstance(x, Words)]
        if len(set(kinds)) > 1:
            raise DTypeError(
                "expected two texts or two lists of tokens, received one of each; pass both as str, or split "
                "both into tokens"
            )
        return self._one(a, "source"), self._one(b, "target")

    def _checked(self, a: TextLike, b: TextLike) -> tuple[Words, Words]:
        """Words that the method has room for."""
        source, target = self._words(a, b)
        most = self.method.most_cells
        if most is not None and len(source) * len(target) > most:
            raise TextError(
                f"the texts have {len(source)} x {len(target)} words, more than the {most} pairs the method "
                f"{self.method.name!r} has room for; split the texts, or use method='partial'"
            )
        return source, target

    def _one(self, text: TextLike, side: str) -> Words:
        if isinstance(text, Words):
            words = text
        elif isinstance(text, str):
            words = split_words(text, self.tokenizer)
        elif isinstance(text, Sequence) and not isinstance(text, (bytes, bytearray)):
            words = Words.from_tokens(text)
        else:
            raise DTypeError(f"expected the {side} as a str or a list of tokens, received {type(text).__name__}")
        if len(words) > self.max_words:
            raise TextError(
                f"the {side} text has {len(words)} words, more than max_words={self.max_words}; the first word beyond the "
                f"limit is {words.words[self.max_words]!r} (word {self.max_words}, counted from zero). Split the text, "
                "or raise max_words"
            )
        return words

    # From words to couplings
    # ------------------------------------------------------------------------------------------

    def _window(self, pairs: list[tuple[Words, Words]]) -> list[Alignment]:
        """Results for pairs that fit in memory together, in order."""
        # Each distinct text is encoded once: less work, and equal texts have equal vectors to the last bit.
        texts = list(dict.fromkeys(side.words for pair in pairs for side in pair))
        encoded = dict(zip(texts, self._encoded(texts), strict=True))
        results: list[Alignment | None] = [None] * len(pairs)
        for batch in self._batches(pairs):
            solved = self._solve([self._pair(*pairs[k], encoded) for k in batch])
            for k, result in zip(batch, solved, strict=True):
                results[k] = result
        done = [r for r in results if r is not None]
        failed = [k for k, r in enumerate(done) if not r.converged]
        if failed:
            first = done[failed[0]]
            warnings.warn(
                f"{len(failed)} of {len(done)} couplings did not converge; the first is {str(first.source.text)[:40]!r}: "
                f"{first.status.explanation}",
                ConvergenceWarning,
                stacklevel=3,
            )
        return done

    def _vectors(self, texts: Sequence[Sequence[str]]) -> list[Tensor]:
        name = str(self.embedder.settings.get("model", type(self.embedder).__name__))
        return checked_vectors(self.embedder.embed(list(texts)), texts, name)

    def _encoded(self, texts: Sequence[Sequence[str]]) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Unit vectors and, if the method asks for them, hidden states of each text."""
        layers, device = self.method.layers, self._coupling_device
        if layers:
            # One pass of the model for both; ``as_embedder`` has seen that it has layers.
            embedder: Any = self.embedder
            found = embedder.states(list(texts), (embedder.layer, *layers))
            together = [(x[:, 0], x[:, 1:].to(device)) for x in found]
        else:
            together = [(x, None) for x in self._vectors(texts)]
        for x, states in together:
            yield documents.unit_vectors(x.to(device), self.centre), states

    def _pair(self, a: Words, b: Words, encoded: dict[tuple[str, ...], tuple[Tensor, Tensor | None]]) -> EncodedPair:
        (x, left), (y, right) = encoded[a.words], encoded[b.words]
        cost = documents.word_costs(a.words, b.words, x, y, self.distortion)
        return EncodedPair(a, b, cost, (x, y), None if left is None or right is None else (left, right))

    @property
    def _coupling_device(self) -> torch.device:
        # Couplings are solved in float64, which Apple's GPUs lack.
        return torch.device("cpu") if self.device.type == "mps" else self.device

    def _batches(self, pairs: list[tuple[Words, Words]]) -> Iterator[list[int]]:
        """Positions of pairs to solve together, of like sizes, few enough cells each."""
        # One more on each side for the null atoms.
        sizes = [(len(a) + 1, len(b) + 1) for a, b in pairs]
        return like_sizes(sizes, self.batch_size, _CELLS)

    def _solve(self, pairs: list[EncodedPair]) -> list[Alignment]:
        solved = iter(self.method.solve(full) if (full := [pair for pair in pairs if pair.cost.numel()]) else [])
        settings = self.settings
        return [self._result(pair, next(solved) if pair.cost.numel() else empty(pair), settings) for pair in pairs]

    def _result(self, pair: EncodedPair, found: Found, settings: dict) -> Alignment:
        if self.method.null or not pair.cost.numel():
            matching = pair.matching(self.null_price)
        else:
            matching = decoding.match_balanced(pair.costs, pair.shift, documents.FARTHEST + self.distortion)
        linked = [{i for i, _ in found.links}, {j for _, j in found.links}]
        confidence = found.confidence.cpu().numpy()
        return Alignment(
            source=pair.source,
            target=pair.target,
            links=found.links,
            confidence=[float(confidence[i, j]) for i, j in found.links],
            confidences=found.confidence,
            unaligned=(
                [i for i in range(len(pair.source)) if i not in linked[0]],
                [j for j in range(len(pair.target)) if j not in linked[1]],
            ),
            coupling=found.coupling,
            plan=found.plan,
            null_source=found.null_source,
            null_target=found.null_target,
            distance=matching.distance,
            normalized_distance=matching.normalized_distance,
            settings=settings,
        )


def couple(a: TextLike, b: TextLike, **options: Any) -> Alignment:
    """Couple two texts; ``options`` are those of :class:`Aligner`. Models given by name are kept between calls.

    Example:
        >>> r = couple("the cat sat on the mat", "a feline rested on the rug")
        >>> print(r)
        0-0 1-1 2-2 3-3 4-4 5-5
    """
    model = options.get("model", PACKAGED_MODEL)
    if isinstance(model, (str, Path)):
        device = checked_device(options.get("device", "cpu"))
        own = {name: options.pop(name, None) for name in ("epsilon", "threshold")}
        choice = choose(model, options.get("method"), null_price=options.get("null_price"), **own)
        kept = replace(choice, model=str(model), method=None, threshold=None)
        options["model"], trained = _loaded(kept, options.pop("layer", None), str(device), _files_of(str(model)))
        options["method"] = method = choice.method_with(trained)
        if "null_price" in method.settings:
            options.pop("null_price", None)
    return Aligner(**options)(a, b)


def _files_of(model: str) -> tuple[tuple[str, int, int], ...]:
    """Path, size and time of every file of a folder, so that a folder that changes is loaded again."""
    if model == PACKAGED_MODEL or not Path(model).is_dir():
        return ()
    files = sorted(path for path in Path(model).resolve().iterdir() if path.is_file())
    return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files)


@lru_cache(maxsize=2)
def _loaded(
    choice: Choice, layer: int | None, device: str, files: tuple[tuple[str, int, int], ...]
) -> tuple[Embedder, Trained | None]:
    # ``files`` belongs to the key of the cache only: it says which state of the folder was loaded.
    return choice.load(layer=layer, device=device)


def _resolve_centre(centre: Any, embedder: Embedder) -> tuple[Tensor | None, str | None]:
    """The vector to subtract and how the settings name it."""
    if centre is None:
        return None, None
    if isinstance(centre, str):
        if centre != "auto":
            raise ConfigError(f"expected centre to be 'auto', None or a vector, received {centre!r}")
        if isinstance(embedder, TransformerEmbedder) and embedder.centre is not None:
            return embedder.centre.double(), "packaged"
        return None, None
    vector = centre.detach() if isinstance(centre, Tensor) else torch.as_tensor(np.asarray(centre))
    if vector.dim() != 1:
        raise ShapeError(f"expected centre as one vector of shape (d,), received shape {tuple(vector.shape)}")
    vector = vector.double().cpu()
    if not bool(torch.isfinite(vector).all()):
        raise NonFiniteError("expected a finite centre, received NaN or infinity")
    return vector, hashlib.sha256(vector.numpy().tobytes()).hexdigest()[:12]


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
