"""Compiles the grammars of requests with llguidance, for one tokenizer.

Where compilation runs, and its time limit, are up to the caller: `matchers` in the worker, `compile_check` in front of
a server.
"""

import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version

import torch
from llguidance import LLMatcher, LLParserLimits
from llguidance.hf import from_tokenizer
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from specray.errors import InvalidRequestError
from specray.grammar import GRAMMAR_LIMIT_EXCEEDED, GrammarSpec, as_format
from specray.ops.sampling_state import num_mask_words
from specray.structured_output.ebnf import lark_rules
from specray.structured_output.regular_expressions import literal, rust_regex
from specray.structured_output.schema import parts_by_place
from specray.structured_output.structural_tags import TagRules, json_part

# A step's work on one node of a tree is bounded by these (some 20 ms at most) and its memory by the number of states.
LIMITS = LLParserLimits(step_lexer_fuel=200_000, step_max_items=50_000, max_lexer_states=30_000, verbose_errors=False)
_MAX_PARTS_TRIED = 100
# llguidance would replace a mask by one token where it determines the next text; the target decides how that is split.
_MAX_RENEWAL_S = 0.05  # CPU time of a step in which a grammar is compiled again
_LEXER_IS_FULL = "lexer error: too many states"
_DEAD_END = "NoExtensionBias"  # llguidance's error where no token is allowed
# Earlier releases take some of what a grammar forbids.
_NEEDED, _INSTALLED = Version("1.9"), Version(version("llguidance"))
_OLDER = (
    f"structured output needs llguidance {_NEEDED} or later, and this server has {_INSTALLED}; vLLM, which "
    "attention_backend: fa uses, requires it: choose another attention backend, in an environment without vLLM"
    if _INSTALLED < _NEEDED
    else ""
)
_HEADER = '%llguidance {"no_forcing": true}\n'


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size` is the width of the model's logits, which may exceed the tokenizer's vocabulary."""
        self.num_words = num_mask_words(vocab_size)  # of a row of bits
        self._end_tokens = frozenset(eos_token_ids)
        self._width = max(vocab_size, len(tokenizer))
        self._tokenizer = from_tokenizer(tokenizer, n_vocab=self._width, eos_token=list(eos_token_ids))
        added = tokenizer.added_tokens_decoder.items()
        self._special_tokens = {entry.content: token for token, entry in added if entry.special}

    def compile(self, spec: GrammarSpec) -> "CompiledGrammar":
        """InvalidRequestError if the grammar is malformed, cannot be enforced, has no output, or is too large."""
        if _OLDER:
            raise InvalidRequestError(_OLDER, "grammar")
        rules = self._rules(spec)
        compiled = CompiledGrammar(lambda: self._start(rules), self._end_tokens, num_mask_words(self._width))
        if (matcher := compiled.start()).is_error():
            place = self._place_of_error(spec) if spec.kind == "json_schema" else ""
            raise InvalidRequestError(f"the {spec.kind} cannot be compiled{place}: {_reason(matcher)}", "grammar")
        first = compiled.matcher()
        first.fill(bits := torch.zeros(self.num_words, dtype=torch.int32))
        if first.error is not None:
            raise InvalidRequestError(f"the {spec.kind} cannot be compiled: {first.error}", "grammar")
        if not bits.any():
            raise InvalidRequestError(f"no output matches the {spec.kind}: it allows no first token", "grammar")
        return compiled

    def _start(self, rules: Sequence[str]) -> LLMatcher:
        return LLMatcher(self._tokenizer, _HEADER + "\n".join(rules), log_level=0, limits=LIMITS)

    def _place_of_error(self, spec: GrammarSpec) -> str:
        """The innermost part of a JSON schema that cannot be compiled by itself, as words of a message."""
        parts = parts_by_place(json.loads(spec.text))
        for place, part in sorted(parts.items(), key=lambda entry: len(entry[0]), reverse=True)[:_MAX_PARTS_TRIED]:
            if '"$ref"' not in (text := json.dumps(part)):
                with suppress(InvalidRequestError):
                    if self._start([f"start: {json_part(json.loads(text))}"]).is_error():
                        return f" at {place[:200]}"
        return ""

    def token_texts(self) -> list[bytes]:
        """The text of each token that outputs may have."""
        return [self._tokenizer.decode_bytes([token]) for token in range(self._tokenizer.vocab_size)]

    def _rules(self, spec: GrammarSpec) -> list[str]:
        try:
            match spec.kind:
                case "json_object":
                    return [f"start: {json_part({'type': 'object'})}"]
                case "json_schema":
                    return [f"start: {json_part(json.loads(spec.text))}"]
                case "regex":
                    return ["start: TEXT", f"TEXT: /{rust_regex(spec.text)}/"]
                case "choice":
                    choices = [f"/{literal(choice)}/" for choice in json.loads(spec.text)]
                    return ["start: TEXT", f"TEXT: {' | '.join(choices)}"]
                case "ebnf":
                    rules = lark_rules(spec.text, "r")
                    return [f"start: {rules.start}", *rules.lines]
                case "structural_tag":
                    return TagRules(self._special_tokens).rules(as_format(spec))
        except ValueError as error:
            if isinstance(error, InvalidRequestError):
                raise
            raise InvalidRequestError(f"the {spec.kind} cannot be compiled: {error}", "grammar") from None
        except RecursionError:
            raise InvalidRequestError(f"the {spec.kind} is nested too deeply; flatten it", "grammar") from None


class CompiledGrammar:
    """A grammar from which matchers are made.

    They share the states of its lexer, whose number is limited and grows with every output. It is then compiled again:
    a grammar that has served many requests serves the next one, too.
    """

    def __init__(self, make: Callable[[], LLMatcher], end_tokens: frozenset[int], num_tokenizer_words: int) -> None:
        self._make = make
        start = time.thread_time()
        self._compiled = make()
        self._is_cheap = time.thread_time() - start < _MAX_RENEWAL_S
        self.generation = 0
        self.is_full = False
        self.end_tokens = end_tokens
        self.num_tokenizer_words = num_tokenizer_words  # of a row of bits for the tokenizer's vocabulary

    def matcher(self) -> "GrammarMatcher":
        """A matcher at the beginning of an output."""
        return GrammarMatcher(self)

    def start(self) -> LLMatcher:
        return self._compiled.deep_copy()

    def renew(self, generation: int) -> bool:
        """Replace the lexer of this generation, which is full; False if a step cannot wait for that."""
        if generation == self.generation:
            if not self._is_cheap:
                self.is_full = True
                return False
            self._compiled = self._make()
            self.generation += 1
        return True


class GrammarMatcher:
    """The position of an output, or of a draft of it, in its grammar. It belongs to one thread.

    What exceeds the limits of a step becomes the `error`, until it is rolled back.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._tokens: list[int] = []
        self._restart()
        self.error: str | None = None

    @property
    def end_tokens(self) -> frozenset[int]:
        return self._grammar.end_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens that it has accepted."""
        return len(self._tokens)

    @property
    def has_ended(self) -> bool:
        """Whether the last token is one that ends the output; nothing comes after it."""
        return bool(self._tokens) and self._tokens[-1] in self._grammar.end_tokens

    def accept(self, token: int) -> bool:
        """Advance by a token; False if the grammar does not allow it, or a limit is exceeded."""
        self._leave_full_lexer()
        if self._matcher.is_error() or self.error is not None or self.has_ended:
            return False
        if token in self._grammar.end_tokens:
            is_allowed = self._matcher.is_accepting()
        else:
            is_allowed = self._matcher.try_consume_tokens([token]) == 1
            if self._renew():
                is_allowed = self._matcher.try_consume_tokens([token]) == 1
        self._notice_error()
        if is_allowed and self.error is None:
            self._tokens.append(token)
            return True
        return False

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens, and an error."""
        if count == 0 and self.error is None:
            return
        num_consumed = count - (count > 0 and self.has_ended)
        del self._tokens[len(self._tokens) - count :]
        is_usable = self.error is None and not self._matcher.is_error()
        if is_usable and (num_consumed == 0 or self._matcher.rollback(num_consumed)):
            return
        self.error = None  # llguidance's matcher does not leave its error
        self._restart()
        self._renew()
        self._notice_error()

    def fill(self, bits: Tensor) -> None:
        """Set int32 [num_words] to the tokens that are allowed next: none after an error, or where the text that must
        follow cannot be spelled."""
        bits.zero_()
        self._leave_full_lexer()
        if self._matcher.is_error() or self.error is not None:
            return
        is_same_width = self._grammar.num_tokenizer_words == len(bits)
        row = bits if is_same_width else bits.new_zeros(self._grammar.num_tokenizer_words)
        self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())
        if self._renew():
            self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())
        if self._matcher.is_error():
            self._notice_error()
            bits.zero_()
        elif not is_same_width:
            bits.copy_(row[: len(bits)])

    def _restart(self) -> None:
        self._generation = self._grammar.generation
        self._matcher = self._grammar.start()
        self._matcher.consume_tokens(self._tokens)

    def _leave_full_lexer(self) -> None:
        """Another output may have filled the lexer: from then on it forbids, without an error, what needs more."""
        if self._grammar.is_full:
            self.error = GRAMMAR_LIMIT_EXCEEDED
        elif self._generation != self._grammar.generation and self.error is None and not self.has_ended:
            self._restart()

    def _renew(self) -> bool:
        """Continue with another lexer if this one is full."""
        is_full = self._matcher.is_error() and _LEXER_IS_FULL in self._matcher.get_error()
        if not is_full or not self._grammar.renew(self._generation):
            return False
        self._restart()
        return True

    def _notice_error(self) -> None:
        if self._matcher.is_error() and not self._matcher.get_error().startswith(_DEAD_END):
            self.error = GRAMMAR_LIMIT_EXCEEDED


def _reason(matcher: LLMatcher) -> str:
    """llguidance's message without the grammar's text, which is ours and not the client's."""
    message = matcher.get_error()
    if "limits." in message or "too many expressions" in message or "too big" in message:
        return "it needs too much work; simplify it (fewer alternatives that begin alike, fewer repetitions)"
    message = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?|\n<[^>]*/>$", "", message)
    return re.split(r"\n +\d+ \| ", message)[0].strip()
