"""Text to words with character offsets.

A word is the unit of a link. Given tokens are never split again: ``Words.from_tokens`` keeps every index.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sinkformer.errors import DTypeError, MissingExtraError, TextError

Tokenizer = Callable[[str], Sequence[str]]

# Oniguruma syntax. Python's own `re` has no \p{...}, and its \w stops at combining marks, which cuts Hindi
# words.
_LETTER = r"[[\p{L}\p{M}\p{N}_]&&[^\p{Han}]]"
# Inside a word: apostrophes, hyphens, the soft hyphen, the (non-)joiners of Persian and Indic scripts;
# between digits also the signs of decimals, thousands and times.
_INSIDE = r"(?:['’\-‐‑\x{00AD}\x{200C}\x{200D}]|(?<=\p{N})[.,:](?=\p{N}))"
# Zero-width space, marks of direction, invisible operators, byte order mark: they separate, as blanks do.
_INVISIBLE = r"\x{200B}\x{200E}\x{200F}\x{202A}-\x{202E}\x{2060}-\x{206F}\x{FEFF}"
_WORD_PATTERN = "|".join(
    (
        r"(?<![\p{L}\p{N}])(?:\p{L}\.){2,}",  # U.S., e.g.
        r"\p{Han}\p{M}*",  # one ideograph is one word: there are no blanks to go by
        rf"{_LETTER}+(?:{_INSIDE}{_LETTER}+)*",
        r"([.!?\-–—…*_=~])\1+",  # ... and --- are one sign
        r"[\x{1F1E6}-\x{1F1FF}]{2}",  # a flag is two code points
        # any other sign with its marks, emoji modifiers and emoji joined to it
        r"[^\s\p{Cc}" + _INVISIBLE + r"](?:[\p{M}\x{FE0F}\x{1F3FB}-\x{1F3FF}]|\x{200D}[^\s\p{L}\p{N}])*",
    )
)


@dataclass(frozen=True)
class Words:
    """The words of one text.

    Attributes:
        text: The text the spans refer to. For given tokens: the tokens joined by single blanks.
        words: The words, in logical order (also for right-to-left scripts).
        spans: Half-open character ranges, ``text[start:end] == word``.
    """

    text: str
    words: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        """The number of words."""
        return len(self.words)

    @classmethod
    def from_tokens(cls, tokens: Sequence[str]) -> Words:
        """Keep the given tokens as they are, whatever characters they hold.

        Raises:
            DTypeError: ``tokens`` is a bare string, or one of its items is not a string.
            TextError: a lone surrogate in a token.
        """
        if isinstance(tokens, (str, bytes)):
            raise DTypeError(
                f"expected a list of tokens, received the {type(tokens).__name__} {tokens!r}; "
                "pass text to split_words, or put the tokens in a list"
            )
        for k, token in enumerate(tokens):
            if not isinstance(token, str):
                raise DTypeError(f"expected every token to be a str, received {type(token).__name__} at position {k}")
            reject_surrogates(token)
        spans, start = [], 0
        for token in tokens:
            spans.append((start, start + len(token)))
            start += len(token) + 1
        return cls(" ".join(tokens), tuple(tokens), tuple(spans))

    @classmethod
    def located(cls, text: str, tokens: Sequence[str]) -> Words:
        """Find each token in the text, left to right.

        Tokenizers that rewrite (join with an underscore, lower-case) give tokens the text does not hold; the
        spans then refer to the joined tokens, so that ``text[start:end] == word`` holds in every case.
        """
        given = cls.from_tokens(tokens)
        spans, start = [], 0
        for token in given.words:
            start = text.find(token, start)
            if start < 0:
                return given
            spans.append((start, start + len(token)))
            start += len(token)
        return cls(text, given.words, tuple(spans))


@lru_cache(maxsize=1)
def _splitter() -> Any:
    try:
        from tokenizers import Regex, pre_tokenizers
    except ImportError as error:
        if error.name != "tokenizers":
            raise
        raise MissingExtraError("text", "tokenizers") from error
    return pre_tokenizers.Split(Regex(_WORD_PATTERN), behavior="removed", invert=True)


def split_words(text: str, tokenizer: Tokenizer | None = None) -> Words:
    """Split a text into words.

    Letters keep their combining marks; punctuation stands alone; apostrophes, hyphens and decimal signs
    inside a word keep it together; Han ideographs are words of one character. Scripts without blanks (Thai,
    Khmer, Kana) come out as runs: pass a ``tokenizer`` or lists of tokens for those.

    Args:
        text: Any text. Blanks, control characters, zero-width spaces and marks of direction separate words and
            belong to none.
        tokenizer: A callable from text to a list of words that replaces the rule above.

    Raises:
        DTypeError: not a str.
        TextError: the str holds a lone surrogate (text decoded with ``surrogateescape``).
        MissingExtraError: no tokenizer given and the text extra is not installed.
    """
    if not isinstance(text, str):
        raise DTypeError(f"expected a text (str), received {type(text).__name__}")
    if tokenizer is not None:
        tokens = tokenizer(text)
        if isinstance(tokens, (str, bytes)) or not isinstance(tokens, Iterable):
            raise DTypeError(f"expected tokenizer(text) to return a list of words, received {type(tokens).__name__}")
        return Words.located(text, list(tokens))
    reject_surrogates(text)
    pieces = _splitter().pre_tokenize_str(text)
    return Words(text, tuple(word for word, _ in pieces), tuple(span for _, span in pieces))


def reject_surrogates(text: str) -> None:
    """Raise TextError for text that is not valid Unicode; the tokenizers' own failure names no position."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextError(
            f"expected valid Unicode, received a lone surrogate (U+{ord(text[error.start]):04X}) at character "
            f"{error.start}; read the text as UTF-8, without errors='surrogateescape'"
        ) from error


def surface(word: str) -> str:
    """The form by which words without a vector are compared: NFC, so that composed and decomposed spelling agree."""
    return unicodedata.normalize("NFC", word)
