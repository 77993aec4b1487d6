"""Tokenization in the ingress: prompts to token ids, and single tokens to text and bytes.

All functions are safe to call from any thread. Loading a tokenizer and rendering a chat template live in
`specray.models.tokenizer`, incremental detokenization in `specray.engine.detokenizer`.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from specray.engine.detokenizer import TextStream
from specray.errors import ContextLengthError, InvalidRequestError, Overflow
from specray.models.tokenizer import chat_template, render_chat, user_texts
from specray.sampling_params import MAX_BANNED_LENGTH, SamplingParams
from specray.server.chat.prompt import ChatPrompt
from specray.server.choices import WHOLE, Truncation
from specray.server.schemas.prompts import PromptSet, checked_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NO_LIMIT = 2**31  # tokens
NUM_END_TOKENS = 16  # of a prompt, to see whether it ends inside reasoning
NUM_THREADS = 4
THREADS_PER_TENANT = NUM_THREADS // 2

P = ParamSpec("P")
T = TypeVar("T")


class TokenText(NamedTuple):
    """One token as shown in logprobs. Bytes that do not form a whole character are U+FFFD in `text`."""

    text: str
    data: bytes


TokenTexts = Callable[[int], TokenText]  # by token id


def with_token_ids(tokens: TokenTexts) -> TokenTexts:
    """`tokens` with vLLM's `token_id:ID` for the text, which tells tokens of equal text apart."""
    return lambda token_id: TokenText(f"token_id:{token_id}", tokens(token_id).data)


class Tokenization:
    """The tokenizer operations that the HTTP API needs. Prompts that cannot fit `context_length` are refused unread."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", context_length: int) -> None:
        self._tokenizer = tokenizer
        self.context_length = context_length
        self._max_characters = context_length * max(map(len, tokenizer.get_vocab()))
        self._is_byte_level = tokenizer.backend_tokenizer.token_to_id("Ġ") is not None
        self._texts: dict[int, TokenText] = {}

    @cached_property
    def template(self) -> str:
        """The source of the chat template; empty if there is none."""
        return chat_template(self._tokenizer)

    @property
    def folder(self) -> str:
        """Where the tokenizer was loaded from."""
        return str(self._tokenizer.name_or_path)

    def chat(self, prompt: ChatPrompt) -> list[int]:
        """The token ids of a chat. InvalidRequestError if the template does not accept it."""
        self.check_text("messages", list(user_texts(tuple(prompt))))
        return render_chat(self._tokenizer, *prompt)

    def end_of(self, token_ids: Sequence[int]) -> str:
        """The text of the last tokens, with special tokens."""
        return self.decode(token_ids[-NUM_END_TOKENS:])

    def prompts(
        self, prompts: PromptSet, add_special_tokens: bool = True, truncation: Truncation = WHOLE
    ) -> list[list[int]]:
        """The token ids of each prompt. InvalidRequestError if one has none, or too many."""
        return [
            truncation.of(self.encode(item, add_special_tokens=add_special_tokens))
            if isinstance(item, str)
            else self._token_ids(truncation.of(item), prompts.field)
            for item in prompts.items
        ]

    def check_text(self, name: str, texts: Sequence[str]) -> None:
        """Refuse a prompt made of `texts` that is not Unicode, or too long for any tokenization of it to fit.

        Tokenizing takes seconds for a megabyte, so this comes first. `name` is the field that errors name.
        """
        if (length := sum(map(len, texts))) > self._max_characters:
            num_tokens = -(-length * self.context_length // self._max_characters)
            raise ContextLengthError(
                f"This model's maximum context length is {self.context_length} tokens, which hold at most "
                f"{self._max_characters} characters. However, {name} has {length} characters; shorten it",
                name,
                Overflow(num_tokens, 0, self.context_length),
            )
        _check_unicode(name, *texts)

    def encode(self, text: str, name: str = "prompt", *, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids. `name` is the field that errors name."""
        self.check_text(name, [text])
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return token_ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids. Those outside the vocabulary have none."""
        return self._tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def banned_sequences(self, words: Sequence[str]) -> list[list[int]]:
        """The tokens of each of a request's `bad_words`, at the start of a text and after a space.

        InvalidRequestError for a word of too many tokens.
        """
        texts = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
        sequences = [self.encode(text, "bad_words", add_special_tokens=False) for text in texts if text.strip()]
        if (longest := max(map(len, sequences), default=0)) > MAX_BANNED_LENGTH:
            raise InvalidRequestError(
                f"bad_words has a word of {longest} tokens, but at most {MAX_BANNED_LENGTH} are allowed; shorten it",
                "bad_words",
            )
        return [list(sequence) for sequence in dict.fromkeys(map(tuple, sequences)) if sequence]

    def text_stream(self, params: SamplingParams, prompt: Sequence[int]) -> TextStream:
        """The text of tokens that follow `prompt`, with the number of characters that each adds to it."""
        options = SamplingParams(skip_special_tokens=params.skip_special_tokens, ignore_eos=True)
        tokenizer = self._tokenizer.backend_tokenizer
        return TextStream(tokenizer, options, (), NO_LIMIT, records_lengths=True, prompt_token_ids=prompt)

    def piece(self, token_id: int) -> str:
        """The token's entry in the vocabulary; empty outside it."""
        return self._tokenizer.backend_tokenizer.id_to_token(token_id) or ""

    def token(self, token_id: int) -> TokenText:
        known = self._texts.get(token_id)
        if known is None:
            data = _piece_bytes(self.piece(token_id), self._is_byte_level)
            known = self._texts[token_id] = TokenText(data.decode("utf-8", "replace"), data)
        return known

    def _token_ids(self, values: list[int], field: str) -> list[int]:
        if len(values) > self.context_length:
            raise ContextLengthError(
                f"This model's maximum context length is {self.context_length} tokens. However, {field} has "
                f"{len(values)} tokens; shorten it",
                field,
                Overflow(len(values), 0, self.context_length),
            )
        return checked_token_ids(values, field)


class TextPool:
    """Threads that render and tokenize prompts beside the event loop, shared fairly by tenants.

    Tokenizing a long text takes seconds and releases the interpreter lock. At most THREADS_PER_TENANT work for one
    tenant, so other tenants' requests do not wait for its long texts.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "specray-text")
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # kept by those who wait

    async def run(self, tenant: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`function(*args, **kwargs)`, once it is the tenant's turn."""
        turn = self._turns.setdefault(tenant, asyncio.Semaphore(THREADS_PER_TENANT))
        async with turn:
            work = self._threads.submit(function, *args, **kwargs)
            return await asyncio.wrap_future(work)


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
