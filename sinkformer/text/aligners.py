"""Two texts -> words -> vectors -> coupling -> links."""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from sinkformer.costs import Matrix
from sinkformer.couplings import Coupling, EntropicCoupling
from sinkformer.errors import (
    ConfigError,
    ConvergenceWarning,
    DTypeError,
    NonFiniteError,
    ShapeError,
    TextError,
)
from sinkformer.measures import Measure
from sinkformer.text import decoding, documents
from sinkformer.text.alignments import Alignment
from sinkformer.text.embedders import (
    PACKAGED_MODEL,
    Embedder,
    TransformerEmbedder,
    as_embedder,
    checked_device,
    checked_vectors,
)
from sinkformer.text.formats import BadLine, Pair
from sinkformer.text.tokens import Tokenizer, Words, split_words, surface

TextLike = str | Sequence[str] | Words

# Cells of the cost matrices solved together: bounds the memory of a batch whatever the lengths.
_CELLS = 400_000

# Costs of word pairs are of order one. Prices far beyond them leave no digits of a cost; an entropy far below them
# leaves none of a plan.
_DEAREST = 1e6
_LEAST_EPSILON = 1e-6


class Aligner:
    """Couples pairs of texts. Build it once; call it with two texts, or stream pairs through :meth:`align`.

    The cost of a word pair is 1 - cos of their centred vectors, plus ``distortion`` times the squared
    difference of their relative positions. The coupling is the entropic one of the two texts, each completed
    by a null atom.

    Args:
        model: ``"en"`` (packaged English model), a folder, a Hugging Face name, a callable from a list of
            token lists to a list of ``(n_words, d)`` arrays, or an ``Embedder``. Of a callable the settings know
            only the name.
        layer: hidden layer of a Hugging Face model; default: 3 for ``"en"``, 0.6 of the depth for others.
        null: let words stay alone. Without, every word has to go somewhere; texts without words use the null
            atom anyway.
        null_price: what leaving one word alone costs, in (0, 1e6]; two words are matched only if their cost is
            below twice that.
        epsilon: strength of the entropy, in units of the cost, in [1e-6, 1e6]: larger values spread the coupling.
        distortion: price of a change of place, in [0, 1e6]; 0 for languages of free word order.
        threshold: least share of a word's mass for a link, in (0, 1]; for a pair of the one-to-one matching all copies
            of a word count together, since they share its mass (see ``decoding``), so that the own confidence of such a
            link can be below the threshold.
        tokenizer: a callable from text to a list of words, instead of the built-in rule. Token lists are
            never split.
        centre: vector subtracted from all word vectors; ``"auto"``: the shipped mean for ``"en"``, none for
            others (see :meth:`fit_centre`); None: no centring.
        max_words: longest text accepted. Longer ones are an error: nothing is cut off in silence.
        device: torch device of model and coupling: cpu, cuda or mps.
        batch_size: texts encoded, and pairs solved, together. The results do not depend on it.

    Raises:
        ConfigError: an option outside its range, or without meaning for this model.
        DeviceError, DTypeError, MissingExtraError, ModelError: see ``embedders``.
    """

    def __init__(
        self,
        model: str | Path | Callable | Embedder = PACKAGED_MODEL,
        *,
        layer: int | None = None,
        null: bool = True,
        null_price: float = 0.4,
        epsilon: float = 0.05,
        distortion: float = 0.2,
        threshold: float = 0.3,
        tokenizer: Tokenizer | None = None,
        centre: Any = "auto",
        max_words: int = 4096,
        device: str | torch.device = "cpu",
        batch_size: int = 32,
    ):
        """Check the options, then load the model."""
        _check_number("null_price", null_price, above=0.0, most=_DEAREST)
        _check_number("epsilon", epsilon, least=_LEAST_EPSILON, most=_DEAREST)
        _check_number("distortion", distortion, least=0.0, most=_DEAREST)
        _check_number("threshold", threshold, above=0.0, most=1.0)
        for name, value in (("max_words", max_words), ("batch_size", batch_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"expected {name} as a whole number >= 1, received {value!r}")
        if tokenizer is not None and not callable(tokenizer):
            raise DTypeError(
                f"expected tokenizer to be a callable from str to a list of words, received {type(tokenizer).__name__}"
            )
        self.null, self.null_price, self.epsilon = bool(null), float(null_price), float(epsilon)
        self.distortion, self.threshold, self.tokenizer = float(distortion), float(threshold), tokenizer
        self.max_words, self.batch_size, self.device = max_words, batch_size, checked_device(device)
        self.embedder = as_embedder(model, layer=layer, device=self.device, batch_size=batch_size)
        self.centre, self._centre_name = _resolve_centre(centre, self.embedder)

    @property
    def settings(self) -> dict[str, Any]:
        """Everything a result depends on besides the texts; it is stored in every ``Alignment``."""
        out = dict(self.embedder.settings)
        out.update(
            centre=self._centre_name,
            null=self.null,
            null_price=self.null_price,
            epsilon=self.epsilon,
            distortion=self.distortion,
            threshold=self.threshold,
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
        return self._window([self._words(a, b)])[0]

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
                return self._words(item.source, item.target)
            except TextError as error:
                return BadLine(item.line, str(error))
        if isinstance(item, (str, bytes, Words)) or not isinstance(item, Sequence) or len(item) != 2:
            raise DTypeError(
                f"expected a pair (source, target) at position {position}, received "
                f"{type(item).__name__} {str(item)[:40]!r}"
            )
        try:
            return self._words(item[0], item[1])
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
        vectors = {
            words: documents.unit_vectors(x.to(self._coupling_device), self.centre)
            for words, x in zip(texts, self._vectors(texts), strict=True)
        }
        results: list[Alignment | None] = [None] * len(pairs)
        for batch in self._batches(pairs):
            solved = self._solve([pairs[k] for k in batch], vectors)
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

    @property
    def _coupling_device(self) -> torch.device:
        # Couplings are solved in float64, which Apple's GPUs lack.
        return torch.device("cpu") if self.device.type == "mps" else self.device

    def _batches(self, pairs: list[tuple[Words, Words]]) -> Iterator[list[int]]:
        """Positions of pairs to solve together, of like sizes, few enough cells each."""
        order = sorted(range(len(pairs)), key=lambda k: (len(pairs[k][0]), len(pairs[k][1])))
        batch: list[int] = []
        n = m = 0
        for k in order:
            n, m = max(n, len(pairs[k][0]) + 1), max(m, len(pairs[k][1]) + 1)
            if batch and (len(batch) == self.batch_size or n * m * (len(batch) + 1) > _CELLS):
                yield batch
                batch, n, m = [], len(pairs[k][0]) + 1, len(pairs[k][1]) + 1
            batch.append(k)
        if batch:
            yield batch

    def _solve(self, pairs: list[tuple[Words, Words]], vectors: dict[tuple[str, ...], Tensor]) -> list[Alignment]:
        costs, sources, targets, word_costs, nulls = [], [], [], [], []
        for a, b in pairs:
            x, y = vectors[a.words], vectors[b.words]
            cost = documents.word_costs(a.words, b.words, x, y, self.distortion)
            null = self.null or not len(a) or not len(b)
            nulls.append(null)
            word_costs.append(cost)
            costs.append(documents.null_costs(cost, self.null_price) if null else cost)
            sources.append(documents.with_null(x, len(b)) if null else Measure.uniform(x))
            targets.append(documents.with_null(y, len(a)) if null else Measure.uniform(y))
        couplings = _solve_ragged(sources, targets, costs, self.epsilon)
        settings = self.settings
        return [
            self._result(a, b, cost, coupling, null, settings)
            for (a, b), cost, coupling, null in zip(pairs, word_costs, couplings, nulls, strict=True)
        ]

    def _result(
        self, a: Words, b: Words, cost: Tensor, coupling: EntropicCoupling, null: bool, settings: dict
    ) -> Alignment:
        n, m = len(a), len(b)
        full = coupling.to_dense()
        plan = full[:n, :m]
        if null:
            null_source, null_target = full[:n, m], full[n, :m]
            scale = max(n + m, 1)
        else:
            null_source, null_target = full.new_zeros(n), full.new_zeros(m)
            scale = max(n, m)
        ground = cost.cpu().numpy()
        shift = documents.squared_shift(max(n, 1), max(m, 1), torch.device("cpu")).numpy()[:n, :m]
        if null:
            matching = decoding.match(ground, shift, self.null_price)
        else:
            matching = decoding.match_balanced(ground, shift, documents.FARTHEST + self.distortion)
        confidence = (plan * scale).clamp(max=1.0).cpu().numpy()
        links = decoding.decode(
            matching.links, confidence, _spellings(a), _spellings(b), self.threshold, free=ground == 0
        )
        linked = [{i for i, _ in links}, {j for _, j in links}]
        return Alignment(
            source=a,
            target=b,
            links=links,
            confidence=[float(confidence[i, j]) for i, j in links],
            unaligned=(
                [i for i in range(n) if i not in linked[0]],
                [j for j in range(m) if j not in linked[1]],
            ),
            coupling=coupling,
            plan=plan,
            null_source=null_source,
            null_target=null_target,
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
        files = _files_of(str(model))
        options["model"] = _kept_embedder(str(model), options.pop("layer", None), str(device), files)
    return Aligner(**options)(a, b)


def _files_of(model: str) -> tuple[tuple[str, int, int], ...]:
    """Path, size and time of every file of a folder, so that a folder that changes is loaded again."""
    if model == PACKAGED_MODEL or not Path(model).is_dir():
        return ()
    files = sorted(path for path in Path(model).resolve().iterdir() if path.is_file())
    return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files)


@lru_cache(maxsize=2)
def _kept_embedder(model: str, layer: int | None, device: str, files: tuple = ()) -> Embedder:
    # ``files`` belongs to the key of the cache only: it says which state of the folder was loaded.
    return TransformerEmbedder(model, layer=layer, device=device)


def _solve_ragged(
    sources: list[Measure], targets: list[Measure], costs: list[Tensor], epsilon: float
) -> list[EntropicCoupling]:
    """Couplings of problems of different sizes, solved as one padded batch."""
    sources, targets = _one_width(sources), _one_width(targets)
    mu, nu = Measure.stack(sources), Measure.stack(targets)
    cost = costs[0].new_zeros(len(costs), mu.n, nu.n)
    for k, c in enumerate(costs):
        cost[k, : c.shape[0], : c.shape[1]] = c
    with torch.no_grad():
        batch = Coupling.solve(mu, nu, cost=cost, epsilon=epsilon, on_failure="ignore")
    return [_unpadded(batch, k, sources[k], targets[k], c) for k, c in enumerate(costs)]


def _one_width(measures: list[Measure]) -> list[Measure]:
    """A callable may return no vector at all for an empty text; its null atom then lives in the others' space."""
    d = max(mu.d for mu in measures)
    return [mu if mu.d == d else mu.pushforward(mu.points.new_zeros(mu.n, d)) for mu in measures]


def _unpadded(batch: EntropicCoupling, k: int, mu: Measure, nu: Measure, cost: Tensor) -> EntropicCoupling:
    """Coupling k of a padded batch, with its own measures and cost in place of the padded ones."""
    solution = batch.solution.map(lambda t: t[k])
    return replace(
        batch,
        source=mu,
        target=nu,
        source_features=mu.points,
        target_features=nu.points,
        cost_function=Matrix(cost),
        epsilon=batch.epsilon[k],
        solution=replace(solution, f=solution.f[: mu.n], g=solution.g[: nu.n]),
    )


def _spellings(words: Words) -> list[str]:
    """What counts as the same word when copies share their mass."""
    return [surface(word).casefold() for word in words.words]


def _resolve_centre(centre: Any, embedder: Embedder) -> tuple[Tensor | None, str | None]:
    """The vector to subtract and how the settings name it."""
    if centre is None:
        return None, None
    if isinstance(centre, str):
        if centre != "auto":
            raise ConfigError(f"expected centre to be 'auto', None or a vector, received {centre!r}")
        if isinstance(embedder, TransformerEmbedder) and embedder.name == PACKAGED_MODEL:
            return packaged_centres()[embedder.layer].double(), "packaged"
        return None, None
    vector = centre.detach() if isinstance(centre, Tensor) else torch.as_tensor(np.asarray(centre))
    if vector.dim() != 1:
        raise ShapeError(f"expected centre as one vector of shape (d,), received shape {tuple(vector.shape)}")
    vector = vector.double().cpu()
    if not bool(torch.isfinite(vector).all()):
        raise NonFiniteError("expected a finite centre, received NaN or infinity")
    return vector, hashlib.sha256(vector.numpy().tobytes()).hexdigest()[:12]


def packaged_centres() -> Tensor:
    """Mean word vector of every layer of the packaged model, ``(7, 384)`` float32.

    Means over the words of the Edinburgh++ corpus, training part (Apache-2.0); benchmarks/make_centre.py
    makes the file.
    """
    return load_file(Path(__file__).with_name("centre_en.safetensors"))["centre"]


def _check_number(
    name: str, value: Any, *, above: float | None = None, least: float | None = None, most: float
) -> None:
    number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    # No comparison holds for NaN.
    good = number <= most and (above is None or number > above) and (least is None or number >= least)
    if not good:
        low = f"> {above:g}" if above is not None else f">= {least:g}"
        raise ConfigError(f"expected {name} as a finite number {low} and <= {most:g}, received {value!r}")


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
