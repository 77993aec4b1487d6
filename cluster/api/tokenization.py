"""Tokenization in the ingress: prompts to token ids, and single tokens to text and bytes.

All functions are safe to call from any thread. Loading a tokenizer and rendering a chat template live in
`specray.models.tokenizer`, incremental detokenization in `specray.engine.detokenizer`.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast

from cluster.api.prompts import PromptSet
from cluster.api.protocol import Message
from specray.errors import InvalidRequestError
from specray.models.tokenizer import render_chat


class TokenText(NamedTuple):
    """One token as shown in logprobs. Bytes that do not form a whole character are U+FFFD in `text`."""

    text: str
    data: bytes


class Tokenization:
    """The tokenizer operations that the HTTP API needs."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = tokenizer.backend_tokenizer.token_to_id("Ġ") is not None
        self._texts: dict[int, TokenText] = {}

    def chat(self, messages: Sequence[Message]) -> list[int]:
        _check_unicode("messages", *(message.content for message in messages))
        return render_chat(self._tokenizer, [message.for_template for message in messages])

    def prompts(self, prompts: PromptSet) -> list[list[int]]:
        return [self._encode(item) if isinstance(item, str) else item for item in prompts.items]

    def token(self, token_id: int) -> TokenText:
        known = self._texts.get(token_id)
        if known is None:
            piece = self._tokenizer.backend_tokenizer.id_to_token(token_id) or ""
            data = _piece_bytes(piece, self._is_byte_level)
            known = self._texts[token_id] = TokenText(data.decode("utf-8", "replace"), data)
        return known

    def _encode(self, text: str) -> list[int]:
        _check_unicode("prompt", text)
        token_ids: list[int] = self._tokenizer.encode(text)
        return token_ids


def _check_unicode(name: str, *texts: str) -> None:
    """Reject unpaired surrogates, which JSON can express and tokenizers cannot encode."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"{name} has an unpaired surrogate at character {error.start}; send valid Unicode text", name
            ) from None


def _piece_bytes(piece: str, is_byte_level: bool) -> bytes:
    """The bytes of a vocabulary entry in byte-level (GPT-2) or SentencePiece notation."""
    if is_byte_level and all(char in _BYTE_OF_CHAR for char in piece):
        return bytes(_BYTE_OF_CHAR[char] for char in piece)
    if match := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
        return bytes([int(match[1], 16)])
    return piece.replace("▁", " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_level_alphabet()
