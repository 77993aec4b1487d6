"""Loads a model's tokenizer, its end tokens and sampling defaults, and renders chat messages as token ids.

Only the chat template may write special tokens; in a message they are plain text. Incremental decoding is in
`specray.engine.detokenizer`.
"""

import inspect
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from jinja2 import TemplateError
from tokenizers import Encoding, Tokenizer

from specray.errors import ConfigError, InvalidRequestError, is_fault
from specray.models.chat_disguise import (
    EVERYTHING,
    HIDDEN,
    Message,
    TemplateInput,
    TemplateWords,
    disguised_chat,
    visible_pieces,
)
from specray.models.template_limits import MAX_COMPILATION_S, MAX_CPU_S, TemplateLimitError, check_length, cpu_limit
from specray.sampling_params import make_sampling_params

if TYPE_CHECKING:  # its import takes half a second, also in commands that load no tokenizer
    from transformers import PreTrainedTokenizerFast

NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerFast":
    """The folder's tokenizer. Neither fetches anything nor runs code from the folder."""
    from transformers import PreTrainedTokenizerFast

    try:
        loaded = _load(folder)
    except BaseException as error:
        if not is_fault(error):  # the tokenizers library raises bare Exception for a file it cannot parse, or panics
            raise
        needed = "a model folder needs tokenizer.json (or tokenizer.model and the package sentencepiece)"
        if (folder / "tokenizer.json").is_file():
            needed = "fetch tokenizer.json and tokenizer_config.json again"
        raise ConfigError(f"no usable tokenizer in {folder}: {error}; {needed}") from error
    if not isinstance(loaded, PreTrainedTokenizerFast):
        raise ConfigError(f"the tokenizer in {folder} is a {type(loaded).__name__}, not a fast one; add tokenizer.json")
    loaded.backend_tokenizer.no_truncation()  # some files enable these; a prompt must not be cut silently
    loaded.backend_tokenizer.no_padding()
    return loaded


def eos_token_ids(folder: Path, tokenizer: "PreTrainedTokenizerFast") -> list[int]:
    """End-of-sequence tokens from generation_config.json, config.json and the tokenizer together.

    gpt-oss ends a turn by `<|call|>`, too, which its first generation_config.json left out.
    """
    claimed: list[Any] = [tokenizer.eos_token_id, tokenizer.get_added_vocab().get(_END_OF_CALL)]
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        claimed += value if isinstance(value, list) else [value]
    ids = [token for token in claimed if token is not None]
    wrong = [token for token in ids if type(token) is not int or not 0 <= token < len(tokenizer)]
    if wrong:
        raise ConfigError(
            f"eos_token_id {wrong} of {folder} is not in its vocabulary of {len(tokenizer)}; correct "
            "generation_config.json, config.json or tokenizer_config.json"
        )
    return sorted(set(ids))


_END_OF_CALL = "<|call|>"
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(folder: Path) -> dict[str, float | int]:
    """The sampling options that the checkpoint's authors want: those of vLLM and SGLang in generation_config.json.

    ConfigError for one that no request could have.
    """
    path = folder / "generation_config.json"
    content = _read_json(path)
    defaults = {name: content[name] for name in _SAMPLING_DEFAULTS if content.get(name) is not None}
    try:
        make_sampling_params(**defaults)
    except InvalidRequestError as error:
        raise ConfigError(f"{path}: {error}; correct it, or set server.generation_config: none") from error
    return defaults


def chat_template(tokenizer: "PreTrainedTokenizerFast") -> str:
    """The source of the template that renders chats with tools; empty if there is none."""
    try:
        return str(tokenizer.get_chat_template(tools=[]))
    except ValueError:
        return ""


def render_chat(
    tokenizer: "PreTrainedTokenizerFast",
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    tools: Sequence[Message] = (),
    variables: Mapping[str, Any] = NO_VARIABLES,
    continue_final_message: bool = False,
) -> list[int]:
    """Render `messages` and `tools` with the chat template and return token ids.

    `variables` are further variables of the template, such as enable_thinking. With `continue_final_message` the prompt
    ends with the last message's text, and not with the template's opening of an answer. Equal to
    `tokenizer.apply_chat_template`, except that a special token ("<|im_end|>") which is not written by the template
    alone is encoded as plain text, so that a message cannot start or end a role. Thread-safe.
    """
    encoder = _ENCODERS.setdefault(tokenizer, _ChatEncoder(tokenizer.backend_tokenizer))
    _check_variables(tokenizer, variables)
    chat = TemplateInput(
        messages, tools, variables, add_generation_prompt and not continue_final_message, continue_final_message
    )
    text = _render(tokenizer, chat)
    return encoder.encode_marked(text, _template_marks(encoder, tokenizer, chat, text))


def user_texts(value: Any) -> Iterator[str]:
    """All texts in messages, tools and variables, without keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from user_texts(inner)


def _keys(value: Any) -> Iterator[str]:
    """All keys in messages, tools and variables that are texts."""
    if isinstance(value, Mapping):
        yield from (key for key in value if isinstance(key, str))
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _keys(inner)


def _load(folder: Path) -> object:
    if (folder / "tokenizer.json").is_file():
        # The generic class reads the same file as AutoTokenizer, whose imports take seconds.
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    from transformers import AutoTokenizer

    loaded: object = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return loaded


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} contains a {type(content).__name__} instead of an object; fetch it again")
    return content


# ---- encoding ------------------------------------------------------------------------------------------------------


class _Mark(NamedTuple):
    """A special token in a text, without the surrounding spaces that some of them absorb."""

    token: int
    start: int
    end: int


_IN_NO_VOCABULARY = "\U0010ffff"  # a code point that is never assigned


class _ChatEncoder:
    """A tokenizer in two modes: special tokens are recognized, or encoded as plain characters.

    Texts are encoded as batches of one: unlike `encode`, `encode_batch` releases the interpreter lock, so an event loop
    continues while another thread encodes a long text.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._words: dict[str, TemplateWords] = {}  # by the template's source

    @cached_property
    def _specials(self) -> dict[int, str]:
        added = self._backend.get_added_tokens_decoder()
        return {token: entry.content for token, entry in added.items() if entry.special}

    @cached_property
    def _unknown(self) -> frozenset[int]:
        """The token that stands for characters outside of the vocabulary, if it is a special one."""
        return frozenset(self.encode(_IN_NO_VOCABULARY).ids) & self._specials.keys()

    @cached_property
    def _forbidden(self) -> frozenset[int]:
        """The special tokens that no text may become.

        White space and unknown characters are in any text, and some models pad with an ordinary character ("!").
        """
        return frozenset(token for token, content in self._specials.items() if len(content.strip()) > 1) - self._unknown

    @cached_property
    def _plain(self) -> Tokenizer:
        # A copy, because the switch is state of the tokenizer, which other threads use.
        copy = Tokenizer.from_str(self._backend.to_str())
        copy.encode_special_tokens = True
        return copy

    def encode(self, text: str) -> Encoding:
        try:
            return self._backend.encode_batch([text], add_special_tokens=False)[0]
        except TypeError as error:
            raise InvalidRequestError("a message is not valid Unicode (a lone surrogate)", "messages") from error

    def words(self, template: str) -> TemplateWords:
        """What a template with this source may compare texts with."""
        if template not in self._words:
            specials = [content for content in self._specials.values() if len(content.strip()) > 1]
            self._words[template] = TemplateWords.of(template, specials, lambda text: bool(self.marks(text)))
        return self._words[template]

    def marks(self, text: str, encoding: Encoding | None = None) -> list[_Mark]:
        """Special tokens that `text` spells.

        Characters outside the vocabulary are encoded as the unknown token, which is special in some models; they are
        no marks.
        """
        encoding = encoding or self.encode(text)
        found = []
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            content, covered = self._specials.get(token), text[start:end]
            if content is not None and (token not in self._unknown or covered.strip() == content.strip()):
                left, right = len(covered) - len(covered.lstrip()), len(covered) - len(covered.rstrip())
                found.append(_Mark(token, start + left, end - right))
        return found

    def encode_marked(self, text: str, marks: list[_Mark]) -> list[int]:
        """Token ids with special tokens only at `marks`."""
        whole = self.encode(text)
        if self.marks(text, whole) == marks:
            return whole.ids
        ids, position = [], 0
        for mark in marks:
            ids += [*self._encode_plain(text[position : mark.start]), mark.token]
            position = mark.end
        return ids + self._encode_plain(text[position:])

    def _encode_plain(self, text: str) -> list[int]:
        """InvalidRequestError if the model's own vocabulary has a special token that the text spells."""
        ids = self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not self._forbidden.isdisjoint(ids):
            spelt = next(self._specials[token] for token in ids if token in self._forbidden)
            raise InvalidRequestError(
                f"a message contains {spelt!r}, which this model's tokenizer encodes as a special token only",
                "messages",
            )
        return ids


_ENCODERS: "WeakKeyDictionary[PreTrainedTokenizerFast, _ChatEncoder]" = WeakKeyDictionary()


# ---- templates -----------------------------------------------------------------------------------------------------

# What a template can raise for messages that it was not written for.
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


def _check_variables(tokenizer: "PreTrainedTokenizerFast", variables: Mapping[str, Any]) -> None:
    """Refuse variables that would replace those of transformers or special tokens."""
    reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
    if taken := sorted(reserved & variables.keys()):
        raise InvalidRequestError(
            f"the chat template's variable {taken[0]!r} is set by the server; leave it out", "chat_template_kwargs"
        )


def _render(tokenizer: "PreTrainedTokenizerFast", chat: TemplateInput) -> str:
    if not chat.messages:
        raise InvalidRequestError("messages is empty; a chat needs at least one", "messages")
    if tokenizer.chat_template is None:
        raise InvalidRequestError("this model has no chat template; use plain completions instead", "messages")
    conversation: list[Any] = [dict(message) for message in chat.messages]
    tools: list[Any] = [dict(tool) for tool in chat.tools]
    try:
        with cpu_limit(MAX_COMPILATION_S):
            _compile(tokenizer.get_chat_template(tools=tools or None))
        with cpu_limit(MAX_CPU_S):
            text = tokenizer.apply_chat_template(
                conversation,
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                **chat.variables,
            )
        return check_length(str(text))
    except TemplateLimitError as error:
        raise InvalidRequestError(
            f"the model's chat template was stopped on these messages: {error}; send fewer or shorter ones", "messages"
        ) from None
    except _TEMPLATE_ERRORS as error:
        raise InvalidRequestError(
            f"the model's chat template does not accept these messages: {error}", "messages"
        ) from error


def _compile(template: str) -> None:
    """Compile a template for transformers, which keeps what it has compiled."""
    from transformers.utils.chat_template_utils import render_jinja_template

    render_jinja_template(conversations=[], chat_template=template)


def _template_marks(
    encoder: _ChatEncoder,
    tokenizer: "PreTrainedTokenizerFast",
    chat: TemplateInput,
    text: str,
) -> list[_Mark]:
    """The special tokens in `text` that the template wrote. InvalidRequestError if users may have written others.

    The chat is rendered again with users' characters disguised: all of them or, for a template that looks for words in
    messages, two of each special token, which leaves an ordinary chat as it is. If both renderings are equal but for
    the disguise, what is visible in the second is the template's. Where not even two can be disguised, one is: the
    template may make it of other characters, so it must not write more special tokens than before.
    """
    words = encoder.words(tokenizer.get_chat_template(tools=[dict(tool) for tool in chat.tools] or None))
    trusted: Counter[int] = Counter()  # the template's own special tokens, as far as renderings showed them
    for disguise in (EVERYTHING, words.two_of_each_special, words.one_of_each_special):
        try:
            rendered = _render(tokenizer, disguised_chat(chat, disguise, words))
        except InvalidRequestError:  # the template inspects contents and rejects these
            continue
        written = _visible_marks(encoder, rendered)
        counts = Counter(mark.token for mark in written)
        is_proof = disguise is EVERYTHING or (disguise is words.two_of_each_special and not words.decodes)
        is_same = disguise.are_equal(rendered, text) and all(
            rendered[mark.start : mark.end] == text[mark.start : mark.end] for mark in written
        )
        if is_same and (is_proof or counts <= trusted):
            return written
        if is_proof:
            trusted |= counts
    marks = encoder.marks(text)
    values, keys = (list(texts((chat.messages, chat.tools, chat.variables))) for texts in (user_texts, _keys))
    spelt = ("".join(values), "".join(each.strip() for each in values), "\n".join(keys))
    if not Counter(mark.token for mark in marks) <= trusted or any(map(encoder.marks, spelt)):
        raise InvalidRequestError(
            "a message contains a special token of the model as text, and this model's chat template rewrites messages "
            "so that it cannot be distinguished from the template's own; remove it from the message",
            "messages",
        )
    return marks


def _visible_marks(encoder: _ChatEncoder, rendered: str) -> list[_Mark]:
    """The special tokens in a rendering whose characters are all visible.

    It is encoded at once, with one character for each disguised text.
    """
    pieces = list(visible_pieces(rendered))
    places = [0, *accumulate(len(text) + 1 for _, text in pieces)]  # of the pieces in what is encoded
    moved = []
    for mark in encoder.marks(chr(HIDDEN).join(text for _, text in pieces)):
        index = bisect_right(places, mark.start) - 1
        shift = pieces[index][0] - places[index]
        moved.append(_Mark(mark.token, mark.start + shift, mark.end + shift))
    return moved
