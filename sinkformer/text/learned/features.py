"""What the spelling and the places of two words say about a link: numbers for every word pair, without parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from os.path import commonprefix

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from sinkformer.text.tokens import surface

# In the order of the channels. Words are compared as NFC, and in lower case but for the first.
SPELLING = (
    "same_spelling",
    "same_word",
    "trigrams",  # Dice coefficient of the sets of character trigrams, with a sign for start and end of the word
    "prefix",  # common prefix over the longer word, from three characters on
    "both_signs",  # without letter or digit
    "one_sign",
    "both_numbers",  # with a digit
    "same_copy",  # the k-th copy of the word on both sides, counted from the start
    "same_copy_from_end",
    "same_count",  # as many copies on both sides
    "only_copy",
)
PLACES = (
    "shift",  # relative place in the source minus that in the target, in [-1, 1]
    "distance",
    "nearness",
)
NAMES = SPELLING + PLACES

_SHORTEST_PREFIX = 3
_SHARPNESS = 8.0


def pair_features(source: Sequence[str], target: Sequence[str]) -> Tensor:
    """Features of all word pairs.

    Args:
        source: n words.
        target: m words.

    Returns:
        ``(len(NAMES), n, m)``, float32, in [-1, 1].
    """
    source, target = [[surface(word) for word in words] for words in (source, target)]
    left, right = [[word.lower() for word in words] for words in (source, target)]
    same = _equal(left, right)
    copies, copies_left = (
        [_copies(words) for words in (left, right)],
        [_copies(words[::-1])[::-1] for words in (left, right)],
    )
    counts = [np.array([Counter(words)[word] for word in words], int) for words in (left, right)]
    signs = [np.array([not any(c.isalnum() for c in word) for word in words], bool) for words in (left, right)]
    digits = [np.array([any(c.isdigit() for c in word) for word in words], bool) for words in (left, right)]
    shift = _places(len(left))[:, None] - _places(len(right))
    channels = {
        "same_spelling": _equal(source, target),
        "same_word": same,
        "trigrams": _trigrams(left, right),
        "prefix": _prefixes(left, right),
        "both_signs": signs[0][:, None] & signs[1],
        "one_sign": signs[0][:, None] ^ signs[1],
        "both_numbers": digits[0][:, None] & digits[1],
        "same_copy": same & np.equal.outer(*copies),
        "same_copy_from_end": same & np.equal.outer(*copies_left),
        "same_count": same & np.equal.outer(*counts),
        "only_copy": same & (counts[0] == 1)[:, None] & (counts[1] == 1),
        "shift": shift,
        "distance": np.abs(shift),
        "nearness": np.exp(-_SHARPNESS * np.abs(shift)),
    }
    return torch.from_numpy(np.stack([channels[name] for name in NAMES]).astype(np.float32))


def _equal(left: Sequence[str], right: Sequence[str]) -> np.ndarray:
    return np.equal.outer(np.array(left, object), np.array(right, object)).astype(bool)


def _copies(words: Sequence[str]) -> np.ndarray:
    """How many earlier words are the same."""
    seen: Counter[str] = Counter()
    out = []
    for word in words:
        out.append(seen[word])
        seen[word] += 1
    return np.array(out, int)


def _places(n: int) -> np.ndarray:
    return np.arange(n) / max(n - 1, 1)


def _trigrams(left: Sequence[str], right: Sequence[str]) -> np.ndarray:
    sets = {word: _pieces(word) for word in {*left, *right}}
    columns = {piece: k for k, piece in enumerate(sorted(set().union(*sets.values())))}

    def incidence(words: Sequence[str]) -> csr_array:
        found = [(i, columns[piece]) for i, word in enumerate(words) for piece in sets[word]]
        rows, places = np.array(found, int).reshape(-1, 2).T
        return csr_array((np.ones(len(found)), (rows, places)), shape=(len(words), max(len(columns), 1)))

    a, b = incidence(left), incidence(right)
    sizes = np.add.outer([len(sets[word]) for word in left], [len(sets[word]) for word in right])
    return 2 * (a @ b.T).toarray() / np.maximum(sizes, 1).reshape(len(left), len(right))


def _pieces(word: str) -> set[str]:
    marked = f"^{word}$"
    return {marked[k : k + 3] for k in range(len(marked) - 2)}


def _prefixes(left: Sequence[str], right: Sequence[str]) -> np.ndarray:
    out = np.zeros((len(left), len(right)))
    rows, columns = _where(left), _where(right)
    starts: dict[str, list[str]] = {}
    for word in columns:
        starts.setdefault(word[:_SHORTEST_PREFIX], []).append(word)
    for a in rows:
        if len(a) >= _SHORTEST_PREFIX:
            for b in starts.get(a[:_SHORTEST_PREFIX], ()):
                out[np.ix_(rows[a], columns[b])] = len(commonprefix([a, b])) / max(len(a), len(b))  # noqa: RUF071 - letters
    return out


def _where(words: Sequence[str]) -> dict[str, list[int]]:
    """Places of every distinct word."""
    out: dict[str, list[int]] = {}
    for k, word in enumerate(words):
        out.setdefault(word, []).append(k)
    return out
