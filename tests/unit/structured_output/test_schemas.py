"""JSON schemas: what is compiled allows only valid outputs, and the rest is refused."""

import json
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import xgrammar

from benchmarks.schemas import schemas
from specray.errors import InvalidRequestError
from specray.grammar import GrammarSpec, make_grammar
from specray.structured_output.compiler import GrammarCompiler
from specray.structured_output.schema_check import check_schema
from tests.support.json_toy import require_valid

END = 256


@pytest.fixture(scope="module")
def compiler() -> Any:
    """Of a vocabulary of bytes, so that every text can be spelt."""
    tokenizer = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(END)] + [b"</s>"], stop_token_ids=[END])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xgrammar.TokenizerInfo, "from_huggingface", lambda *_, **__: tokenizer)
        return GrammarCompiler(None, END + 1, [END])  # type: ignore[arg-type]


def random_text(compiler: GrammarCompiler, spec: GrammarSpec, random: Random) -> str:
    """An output of the grammar: a random walk that prefers to close what is open."""
    matcher = xgrammar.GrammarMatcher(compiler.compile(spec))
    bits, text = torch.zeros(1, 9, dtype=torch.int32), bytearray()
    while True:
        matcher.fill_next_token_bitmask(bits)
        bits &= compiler.vocabulary(spec)
        allowed = np.flatnonzero(np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")[: END + 1]).tolist()
        closing = [token for token in allowed if token == END or chr(token) in '"]},']
        token = random.choice(closing if closing and random.random() < 0.4 else allowed)
        matcher.accept_token(token)
        if token == END:
            return text.decode("utf-8", "replace")
        text.append(token)


@pytest.mark.parametrize("part", range(4))
def test_every_output_of_a_compiled_schema_is_valid(part: int, compiler: GrammarCompiler) -> None:
    random = Random(part)
    for schema in schemas()[part::4]:
        for _ in range(5):
            require_valid(random_text(compiler, make_grammar("json_schema", schema), random), schema)


def in_a_tag(content: dict[str, Any]) -> GrammarSpec:
    tag = {"type": "tag", "begin": "<call>", "content": content, "end": "</call>"}
    return make_grammar("structural_tag", {"type": "structural_tag", "format": {"type": "sequence", "elements": [tag]}})


def accepts(compiler: GrammarCompiler, spec: GrammarSpec, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(compiler.compile(spec))
    return matcher.accept_string(text) and matcher.accept_token(END)


def test_json_in_a_structural_tag_has_the_same_form(compiler: GrammarCompiler) -> None:
    """xgrammar by itself allows any white space there."""
    schema = {"type": "object", "properties": {"a": {"type": "array"}, "b": {}}, "required": ["a", "b"]}
    spec = in_a_tag({"type": "json_schema", "json_schema": schema})
    assert accepts(compiler, spec, '<call>{"a": [1, "x"], "b": {"c": null}}</call>')
    for text in ('{"a":[1],"b":2}', '{"a": [1],\n"b": 2}', '{ "a": [1], "b": 2}', '{"a": [1], "b": {"c":  null}}'):
        assert not accepts(compiler, spec, f"<call>{text}</call>"), text


def test_random_json_in_a_structural_tag_is_valid(compiler: GrammarCompiler) -> None:
    """Also strings with a bound of their length, in which xgrammar by itself allows control characters."""
    random = Random(0)
    for schema in [{"type": "string", "minLength": 20, "maxLength": 30}, *schemas()[::10]]:
        text = random_text(compiler, in_a_tag({"type": "json_schema", "json_schema": schema}), random)
        require_valid(text.removeprefix("<call>").removesuffix("</call>"), schema)


def test_another_style_in_a_structural_tag_stays(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    spec = in_a_tag({"type": "json_schema", "json_schema": schema, "style": "qwen_xml"})
    assert accepts(compiler, spec, "<call><parameter=a>1</parameter></call>")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "#: 'uniqueItems'"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "#/properties/a: 'not'"),
        ({"if": {}, "then": {}}, "#: 'if'"),
        ({"type": "array", "contains": {"const": 1}}, "#: 'contains'"),
        ({"minimum": 3}, "#: 'minimum' has no effect without"),
        ({"$defs": {"a": {"maxLength": 3}}}, "#/\\$defs/a: 'maxLength' has no effect"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "#: 'pattern' excludes"),
        ({"type": "integer", "anyOf": [{"minimum": 3}]}, "#: "),
        ({"$ref": "#/$defs/a", "minimum": 1, "type": "integer"}, "#: '\\$ref' and 'minimum'"),
        ({"type": "string", "enum": ["a", 1]}, "#: 'enum' and 'type'"),
        ({"allOf": [{"type": "integer"}, {"type": "integer"}]}, "#: 'allOf' of several"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#: the schemas of 'oneOf' may overlap"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "#: 'required' names 'a'"),
        ({"$ref": "https://example.com/schema"}, "#: '\\$ref' to 'https://example.com/schema'"),
    ],
)
def test_what_would_not_be_enforced_is_refused_with_its_place(schema: Any, place: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"cannot be enforced at {place}"):
        check_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"properties": {"a": {"type": "integer", "title": "A", "default": 3, "examples": [1]}}, "required": ["a"]},
        {"type": "string", "enum": ["a", "b"]},
        {"anyOf": [{"type": "integer"}, {"type": "null"}], "title": "A", "default": None},
        {
            "$defs": {
                "Cat": {"properties": {"kind": {"const": "cat"}}, "required": ["kind"], "type": "object"},
                "Dog": {"properties": {"kind": {"const": "dog"}}, "required": ["kind"], "type": "object"},
            },
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            "discriminator": {"propertyName": "kind"},
        },
        {"type": 5, "required": "a", "properties": [], "oneOf": []},
    ],
)
def test_annotations_and_what_the_compiler_checks_itself_pass(schema: Any) -> None:
    if isinstance(schema, dict) and schema.get("type") == 5:
        with pytest.raises(InvalidRequestError):
            check_schema(schema)  # but not with another error
        return
    check_schema(schema)


def test_a_deep_schema_is_checked_without_recursion() -> None:
    schema: Any = {"type": "null"}
    for _ in range(100_000):
        schema = {"type": "array", "items": schema}
    check_schema(schema)


def test_the_schemas_are_the_same_each_time_and_all_are_schemas() -> None:
    made = schemas()
    assert made == schemas()
    assert len({json.dumps(schema) for schema in made}) == 200
    for schema in made:
        jsonschema.Draft202012Validator.check_schema(schema)


def test_repetitions_that_the_cache_fails_on_are_compiled_without_it(compiler: GrammarCompiler) -> None:
    for count in (20, 128, 130, 200):
        spec = make_grammar("json_schema", {"type": "string", "pattern": f"^[a-z0-9 ]{{3,{count}}}$"})
        assert compiler.compile(spec).memory_size_bytes
