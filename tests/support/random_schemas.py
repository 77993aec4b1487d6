"""Random JSON schemas, of which every complete output must be valid, or which must be refused.

`python -m tests.support.random_schemas 1000 3` checks 1,000 schemas of each of three seeds with the demo model's
tokenizer and prints what became of them.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import jsonschema
import numpy as np
import torch

from specray.errors import InvalidRequestError
from specray.grammar import make_grammar
from specray.models.files import resolve_model
from specray.models.tokenizer import load_tokenizer
from specray.structured_output.compiler import GrammarCompiler
from specray.structured_output.forced_text import ids_of

Schema = Any

WORDS = ["a", "b", "name", "x y", "é", 'q"t', "back\\slash", "tab\t", "line\nbreak", "~/%", "$ref", ""]
PATTERNS = [
    "^[a-z]{2,5}$",
    "b",
    '^"[a-z]+"$',
    r"^C:\\[a-z]{1,3}$",
    "^a\nb$",
    r"^\d{3}-\d{4}$",
    r"\S+@\S+",
    "^.{1,4}$",
    "^[^a-z]+$",
    r"^\W\D$",
    "^(?!foo)[a-z]+$",
    "a$b",
    r"^[\w.-]+$",
    "^(foo|ba[rz])?$",
    r"\Aab\Z",
    "^é+$",
    r"\t",
    '^[^"\\\\]*$',
    "^$",
]
FORMATS = ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "regex", "foo"]
NUMBERS = [0, 1, -1, 3, 10, 100, -7, 0.5, 1.5, -0.25, 1e-6, 1e-3, 99.99, 1e6, 2**31, 2**53 + 1, -(2**63), 2**64, 10**20]
MULTIPLES = [1, 2, 3, 7, 10, 0.5, 0.25, 2.5, 0.1, 0.01, 1000, 1025, 4096, 65536]


class SchemaGenerator:
    """Schemas of all keywords, biased to those that can be combined."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._names: list[str] = []

    def schema(self) -> Schema:
        self._names = self._random.sample(["A", "B/c", "D e", "F~"], self._random.choice((0, 0, 0, 1, 2)))
        schema = self._part(3)
        while not isinstance(schema, dict):
            schema = self._part(3)
        if self._names:
            schema["$defs"] = {name: self._part(2) for name in self._names}
        return schema

    def _part(self, depth: int) -> Schema:
        kinds = [self._string, self._number, self._constant, self._simple]
        weights = [3, 3, 1, 1]
        if depth > 0:
            kinds += [self._object, self._array, self._combination]
            weights += [6, 3, 3]
        if self._names:
            kinds.append(self._reference)
            weights.append(2)
        [make] = self._random.choices(kinds, weights)
        part = make(depth)
        if self._maybe(0.05):
            beside = self._random.choice(kinds)(depth - 1)
            if isinstance(part, dict) and isinstance(beside, dict):
                part |= beside
        return part

    def _maybe(self, probability: float) -> bool:
        return self._random.random() < probability

    def _with(self, schema: dict[str, Any], name: str, probability: float, make: Callable[[], Any]) -> None:
        if self._maybe(probability):
            schema[name] = make()

    def _string(self, _: int) -> Schema:
        pick = self._random.choice
        schema: dict[str, Any] = {"type": "string"}
        self._with(schema, "minLength", 0.3, lambda: pick((0, 1, 2, 5)))
        self._with(schema, "maxLength", 0.3, lambda: pick((1, 3, 8, 20, 2000)))
        self._with(schema, "pattern", 0.3, lambda: pick(PATTERNS))
        self._with(schema, "format", 0.2, lambda: pick(FORMATS))
        return schema

    def _number(self, _: int) -> Schema:
        pick = self._random.choice
        schema: dict[str, Any] = {"type": pick(("integer", "number"))}
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            self._with(schema, name, 0.25, lambda: pick(NUMBERS))
        self._with(schema, "multipleOf", 0.2, lambda: pick(MULTIPLES))
        if self._maybe(0.1):
            del schema["type"]
        return schema

    def _constant(self, _: int) -> Schema:
        values: list[Any] = [*WORDS, *NUMBERS, None, True, False, 1.0, [1, "a"], {"b": 1, "a": [None]}]
        if self._maybe(0.4):
            return {"const": self._random.choice(values)}
        return {"enum": self._random.sample(values, self._random.randint(1, 4))}

    def _simple(self, _: int) -> Schema:
        kinds = ["null", "boolean", "integer", "number", "string", "array", "object"]
        return self._random.choice(
            (True, {}, {"type": self._random.choice(kinds)}, {"type": self._random.sample(kinds, 2)})
        )

    def _object(self, depth: int) -> Schema:
        random = self._random
        names = random.sample(WORDS, random.randint(0, 4))
        schema: dict[str, Any] = {"type": "object", "properties": {name: self._part(depth - 1) for name in names}}
        self._with(schema, "required", 0.7, lambda: random.sample(names, random.randint(0, len(names))))
        self._with(schema, "required", 0.05, lambda: [random.choice(WORDS)])
        self._with(schema, "additionalProperties", 0.3, lambda: random.choice((False, True, self._part(depth - 1))))
        self._with(schema, "patternProperties", 0.1, lambda: {random.choice(PATTERNS): self._part(depth - 1)})
        self._with(schema, "minProperties", 0.1, lambda: random.randint(0, 3))
        self._with(schema, "maxProperties", 0.1, lambda: random.randint(0, 3))
        self._with(schema, "propertyNames", 0.05, lambda: {"pattern": random.choice(PATTERNS)})
        self._with(schema, "dependentRequired", 0.03, lambda: {"a": ["b"]})
        self._with(schema, "unevaluatedProperties", 0.03, lambda: False)
        if self._maybe(0.2):
            del schema["properties"]
        return schema

    def _array(self, depth: int) -> Schema:
        random = self._random
        schema: dict[str, Any] = {"type": "array"}
        self._with(schema, "items", 0.8, lambda: self._part(depth - 1))
        self._with(schema, "prefixItems", 0.2, lambda: [self._part(depth - 1) for _ in range(random.randint(1, 2))])
        self._with(schema, "minItems", 0.3, lambda: random.randint(0, 3))
        self._with(schema, "maxItems", 0.4, lambda: random.randint(0, 4))
        self._with(schema, "uniqueItems", 0.1, lambda: random.choice((True, False)))
        self._with(schema, "contains", 0.03, lambda: {"const": 1})
        return schema

    def _combination(self, depth: int) -> Schema:
        random = self._random
        name = random.choice(("anyOf", "anyOf", "allOf", "oneOf"))
        schema = {name: [self._part(depth - 1) for _ in range(random.randint(1, 3))]}
        if self._maybe(0.3):
            beside = self._part(depth - 1)
            schema |= beside if isinstance(beside, dict) else {}
        self._with(schema, "not", 0.03, lambda: {"type": "null"})
        return schema

    def _reference(self, _: int) -> Schema:
        name = self._random.choice(self._names)
        reference = "#/$defs/" + name.replace("~", "~0").replace("/", "~1").replace(" ", "%20")
        schema: dict[str, Any] = {"$ref": reference}
        self._with(schema, "description", 0.2, lambda: "beside")
        self._with(schema, "minimum", 0.05, lambda: 3)
        return schema


class OutputSampler:
    """Random outputs of grammars under the masks of a real tokenizer."""

    def __init__(self, model: str = "smollm2-135m-instruct") -> None:
        folder = resolve_model(model, None, "auto", progress=False)
        self.tokenizer = load_tokenizer(folder)
        self.end = self.tokenizer.eos_token_id
        vocab_size = len(self.tokenizer)
        self.compiler = GrammarCompiler(self.tokenizer, vocab_size, [self.end])
        texts = self.compiler.token_texts()
        self._closes = np.array([text[:1] in (b'"', b"]", b"}") for text in texts])
        self._lengths = np.array([len(text) for text in texts])

    def sample(self, schema: Schema, random: Random, max_tokens: int = 400) -> str | None:
        """A complete output, or None if it was not complete in time. It closes what is open more and more readily."""
        matcher = self.compiler.compile(make_grammar("json_schema", schema)).matcher()
        bits, tokens = torch.zeros(self.compiler.num_words, dtype=torch.int32), list[int]()
        for step in range(max_tokens):
            matcher.fill(bits)
            allowed = ids_of(bits.numpy().view(np.uint32))
            assert len(allowed), (schema, self.tokenizer.decode(tokens))
            if self.end in allowed and random.random() < 0.5:
                break
            allowed = allowed[allowed != self.end]
            if not len(allowed):
                break
            closing = allowed[self._closes[allowed]]
            if len(closing) and random.random() < 0.2 + step / 50:
                allowed = closing
            elif random.random() < 0.5:
                allowed = allowed[self._lengths[allowed] <= 2] if (self._lengths[allowed] <= 2).any() else allowed
            token = int(allowed[random.randrange(len(allowed))])
            assert matcher.accept(token)
            tokens.append(token)
        else:
            return None
        assert matcher.accept(self.end)
        return b"".join(self.compiler._tokenizer.decode_bytes([token]) for token in tokens).decode()


def is_valid(text: str, schema: Schema) -> bool:
    """Whether the text is JSON that a validator accepts, with its formats."""
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    return validator.is_valid(json.loads(text))


def check(sampler: OutputSampler, seed: int, num_schemas: int) -> Counter[str]:
    """What became of the schemas. AssertionError shows an output that is not valid."""
    outcomes: Counter[str] = Counter()
    random = Random(seed)
    generator = SchemaGenerator(random)
    for _ in range(num_schemas):
        schema = generator.schema()
        jsonschema.Draft202012Validator.check_schema(schema)
        try:
            text = sampler.sample(schema, random)
        except InvalidRequestError as error:
            outcomes["refused"] += 1
            outcomes["refused: " + str(error).partition(": ")[2][:40]] += 1
            continue
        if text is None:
            outcomes["incomplete"] += 1
            continue
        assert is_valid(text, schema), (text, json.dumps(schema))
        outcomes["valid"] += 1
    return outcomes


if __name__ == "__main__":
    sampler = OutputSampler()
    for seed in range(int(sys.argv[2])):
        print(seed, check(sampler, seed, int(sys.argv[1])).most_common(40))
