"""The text that a grammar determines, read off the tokens that it allows.

Where all allowed tokens are the beginnings of one text, or continue it, that text must come next.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from specray.structured_output.compiler import GrammarMatcher

Encode = Callable[[str], list[int]]

_MAX_ALLOWED = 1000  # tokens: where more are allowed, they share a character at most


class ForcedText:
    """Finds the tokens that a grammar forces, for one tokenizer."""

    def __init__(self, token_texts: Sequence[bytes], encode: Encode) -> None:
        """`token_texts` [V]; `encode` is that of `encoder_of`."""
        self._texts = token_texts
        self.encode = encode
        order = sorted(range(len(token_texts)), key=token_texts.__getitem__)
        self._ranks = np.empty(len(order), dtype=np.int64)
        self._ranks[order] = np.arange(len(order))

    def tokens(self, matcher: GrammarMatcher, bits: torch.Tensor, limit: int) -> list[int]:
        """Up to `limit` tokens of the text that is forced after the matcher's position.

        `bits` are those of the position. The search accepts up to `limit` tokens, and the matcher is back where it was
        after it.
        """
        text, num_accepted = b"", 0
        while num_accepted < limit and (next_ := self._next(matcher, bits)) is not None:
            if next_.token is None or not matcher.accept(next_.token):
                text += next_.text
                break
            text += self._texts[next_.token]
            num_accepted += 1
            if num_accepted < limit:
                matcher.fill(bits := torch.empty_like(bits))
        matcher.rollback(num_accepted)
        try:
            return self.encode(_whole_characters(text))[:limit]
        except UnicodeDecodeError:
            return []  # the position is within a character, so what follows is not text

    def _next(self, matcher: GrammarMatcher, bits: torch.Tensor) -> "_Next | None":
        words = bits.numpy().view(np.uint32)
        if not 0 < int(np.bitwise_count(words).sum()) <= _MAX_ALLOWED:
            return None
        allowed = ids_of(words)
        if any(token in matcher.end_tokens for token in allowed.tolist()):
            return None
        ordered = allowed[np.argsort(self._ranks[allowed])].tolist()
        last, token = self._texts[ordered[-1]], None
        for candidate in ordered:
            text = self._texts[candidate]
            if not last.startswith(text):
                num_shared = next(n for n in range(len(text)) if text[n] != last[n])
                return _Next(text[:num_shared], token) if num_shared else None
            if text:
                token = candidate
        return _Next(last, token)


class _Next(NamedTuple):
    text: bytes
    token: int | None  # the longest allowed one that this text begins with


def ids_of(words: NDArray[np.uint32]) -> NDArray[np.int64]:
    """The tokens of a row of bits."""
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def encoder_of(tokenizer: Tokenizer) -> Encode:
    """Encodes text that continues other text: without special tokens, and without a space that SentencePiece adds."""
    mark = "\n" if tokenizer.encode("a", add_special_tokens=False).tokens[:1] == ["▁a"] else ""
    num_marked = len(tokenizer.encode(mark, add_special_tokens=False).ids)

    @lru_cache(maxsize=4096)
    def encode(text: str) -> list[int]:
        token_ids: list[int] = tokenizer.encode(mark + text, add_special_tokens=False).ids
        return token_ids[num_marked:]

    return encode


def _whole_characters(text: bytes) -> str:
    """The text without an incomplete character at its end."""
    for end in range(len(text), max(len(text) - 4, -1), -1):
        try:
            return text[:end].decode()
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                raise
    return ""
