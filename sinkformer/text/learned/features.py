"""What the spelling and the places of two words say about a link: numbers for every word pair, without parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# In the order of the channels. Words are compared in lower case but for the first.
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
    rows = {}
    for word, pieces in sets.items():
        rows[word] = np.zeros(len(columns), np.float32)
        rows[word][[columns[piece] for piece in pieces]] = 1.0
    empty = np.zeros((0, len(columns)), np.float32)
    a, b = [np.stack([rows[word] for word in words]) if words else empty for words in (left, right)]
    return 2 * (a @ b.T) / np.maximum(a.sum(1)[:, None] + b.sum(1), 1.0)


def _pieces(word: str) -> set[str]:
    marked = f"^{word}$"
    return {marked[k : k + 3] for k in range(len(marked) - 2)}


def _prefixes(left: Sequence[str], right: Sequence[str]) -> np.ndarray:
    """Letter by letter, so that a long word costs time and no memory."""
    common = np.zeros((len(left), len(right)), int)
    alike = np.ones(common.shape, bool)
    for k in range(min((max(map(len, words), default=0) for words in (left, right)), default=0)):
        # Behind its end a word has nothing in common with any other.
        a, b = [
            np.array([word[k] if k < len(word) else end for word in words], object)
            for words, end in ((left, 0), (right, 1))
        ]
        alike &= np.equal.outer(a, b).astype(bool)
        if not alike.any():
            break
        common += alike
    lengths = np.maximum.outer([len(word) for word in left], [len(word) for word in right]).reshape(common.shape)
    return np.where(common >= _SHORTEST_PREFIX, common / np.maximum(lengths, 1), 0.0)
