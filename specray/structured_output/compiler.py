"""Compiles the grammars of requests with xgrammar, for one tokenizer.

Where compilation runs, and its time limit, are up to the caller: `matchers` in the worker, `compile_check` in front of
a server.
"""

import json
import re
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import xgrammar
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from specray.errors import InvalidRequestError
from specray.grammar import GrammarSpec
from specray.ops.token_mask import num_words
from specray.structured_output.schema_check import check_schema

MAX_GRAMMAR_BYTES = 64 << 20  # of a compiled grammar
CACHE_BYTES = 128 << 20  # of compiled rules, which grammars share
# What a character of a string with a bound of its length may be, in xgrammar's EBNF, and the same in JSON.
_BOUNDED_CHARACTER = r"([^\"\\\r\n])"
_BOUNDED_JSON_CHARACTER = r"([^\0-\x1f\"\\\r\n])"


class GrammarCompiler:
    """Thread-safe. Compiled rules are cached, so that a grammar compiles only rules that no earlier one had."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int, eos_token_ids: list[int]) -> None:
        """`vocab_size` is the width of the model's logits, which may exceed the tokenizer's vocabulary."""
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=eos_token_ids)
        self._all_tokens = torch.full((num_words(vocab_size),), -1, dtype=torch.int32)
        self._json_tokens = _tokens_of_json(info.decoded_vocab, eos_token_ids, len(self._all_tokens))
        self._cached = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)
        self._uncached = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        """InvalidRequestError if the grammar is malformed, has no output, or is larger than MAX_GRAMMAR_BYTES."""
        for schema in _schemas(spec):
            check_schema(schema)
        try:
            compiled = _compile(self._cached, spec)
        except RuntimeError:
            # xgrammar 0.2.8 fails on some repetitions of more than 128 once its cache has their rule. The error of the
            # second attempt is the grammar's own.
            compiled = self._compile_uncached(spec)
        size = compiled.memory_size_bytes
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(too_large(spec, f"{size / 2**20:.0f} MiB compiled"), "grammar")
        bits = torch.zeros(1, len(self._all_tokens), dtype=torch.int32)
        xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(bits)
        if not bits.any():
            raise InvalidRequestError(f"no output matches the {spec.kind}: it allows no first token", "grammar")
        return compiled

    def vocabulary(self, spec: GrammarSpec) -> Tensor:
        """The tokens that outputs of the grammar may have, bits int32 [words] as in TokenMask.

        JSON has no control characters, but xgrammar 0.2.8 allows them in strings with a bound of their length.
        """
        return self._json_tokens if spec.kind in ("json_object", "json_schema") else self._all_tokens

    def _compile_uncached(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        try:
            return _compile(self._uncached, spec)
        except RuntimeError as error:
            if "bad_alloc" in str(error):
                raise InvalidRequestError(too_large(spec, "more memory to compile than is left"), "grammar") from None
            raise InvalidRequestError(f"the {spec.kind} cannot be compiled: {_reason(error)}", "grammar") from None


def too_large(spec: GrammarSpec, cost: str) -> str:
    """The message for a grammar that costs more than is allowed."""
    return (
        f"the {spec.kind} of {len(spec.text)} characters takes {cost}, more than one request may use; simplify it "
        "(fewer alternatives, smaller bounds of lengths and repetitions)"
    )


def _compile(compiler: xgrammar.GrammarCompiler, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
    """JSON has one space after commas and colons and no other white space, so much of an output is forced."""
    match spec.kind:
        case "json_object":
            return compiler.compile_json_schema('{"type": "object"}', any_whitespace=False)
        case "json_schema":
            return compiler.compile_json_schema(spec.text, any_whitespace=False)
        case "regex":
            return compiler.compile_regex(spec.text)
        case "choice":
            return compiler.compile_grammar(_alternatives(json.loads(spec.text)))
        case "ebnf":
            return compiler.compile_grammar(spec.text)
        case "structural_tag":
            return compiler.compile_structural_tag(_with_compact_json(spec.text))


def _with_compact_json(structural_tag: str) -> str:
    """The structural tag with the grammars of its JSON schemas in their place.

    xgrammar 0.2.8 compiles schemas in tags with any white space, and allows control characters in strings with a bound
    of their length. Parts that ask for another form than plain JSON stay as they are.
    """
    root: object = json.loads(structural_tag)
    waiting = [root]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict) and part.get("type") == "json_schema":
            _compact(part)
        elif isinstance(part, dict | list):
            waiting += part.values() if isinstance(part, dict) else part
    return json.dumps(root)


def _compact(content: dict[str, object]) -> None:
    if content.get("style", "json") != "json" or content.keys() - {"type", "style", "json_schema"}:
        return
    schema = json.dumps(content.pop("json_schema", None))
    grammar = str(xgrammar.Grammar.from_json_schema(schema, any_whitespace=False))
    content.clear()
    content |= {"type": "grammar", "grammar": grammar.replace(_BOUNDED_CHARACTER, _BOUNDED_JSON_CHARACTER)}


def _schemas(spec: GrammarSpec) -> Iterator[object]:
    """The JSON schemas of a grammar: its own, or those of structural tags."""
    if spec.kind == "json_schema":
        yield json.loads(spec.text)
    elif spec.kind == "structural_tag":
        waiting: list[object] = [json.loads(spec.text)]
        while waiting:
            part = waiting.pop()
            if isinstance(part, dict):
                yield from (part[name] for name in ("json_schema", "schema") if name in part)
            if isinstance(part, dict | list):
                waiting += part.values() if isinstance(part, dict) else part


def _alternatives(choices: list[str]) -> str:
    """EBNF of one of several strings. Its escapes in strings are those of JSON."""
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _reason(error: RuntimeError) -> str:
    """xgrammar's message without its time and source line."""
    return re.sub(r"^\[[\d:]+\] \S+: ", "", str(error)).strip()


def _tokens_of_json(vocabulary: Sequence[bytes], eos_token_ids: list[int], num_words: int) -> Tensor:
    """Bits int32 [num_words] of the tokens without control characters, and of end tokens."""
    is_allowed = np.ones(32 * num_words, dtype=bool)
    is_allowed[[token for token, text in enumerate(vocabulary) if min(text, default=32) < 32]] = False
    is_allowed[eos_token_ids] = True
    return torch.from_numpy(np.packbits(is_allowed, bitorder="little").view(np.int32))
