"""JSON schemas: what is compiled allows only valid outputs, and the rest is refused with its place."""

import json
from random import Random
from typing import Any

import jsonschema
import pytest

from benchmarks.schemas import schemas
from specray.errors import InvalidRequestError
from specray.grammar import GrammarSpec, make_grammar
from specray.structured_output.compiler import GrammarCompiler
from specray.structured_output.schema import enforceable
from tests.support.json_toy import BYTES_END, byte_tokenizer, require_valid
from tests.support.random_schemas import OutputSampler, check

TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, BYTES_END + 1, [BYTES_END])


@pytest.fixture(scope="module")
def sampler() -> OutputSampler:
    return OutputSampler()


def accepts(compiler: GrammarCompiler, spec: GrammarSpec, text: str) -> bool:
    matcher = compiler.compile(spec).matcher()
    return all(map(matcher.accept, [*TOKENIZER.encode(text), BYTES_END]))


def test_every_output_of_a_compiled_schema_is_valid(sampler: OutputSampler) -> None:
    random = Random(0)
    for schema in schemas():
        if (text := sampler.sample(schema, random)) is not None:
            require_valid(text, schema)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_schemas_have_only_valid_outputs_or_are_refused(seed: int, sampler: OutputSampler) -> None:
    outcomes = check(sampler, seed, 200)
    assert outcomes["valid"] > 80


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "number", "multipleOf": 0.5}, ["1.5", "-2"], ["1.3"]),
        ({"type": "integer", "multipleOf": 4096}, ["8192", "0"], ["4095", str(4096 * 10**6)]),
        ({"type": "string", "format": "email", "maxLength": 6}, ['"a@b.cc"'], ['"aa@b.cc"']),
        ({"type": "string", "pattern": "^[a-z]+$", "minLength": 3}, ['"abc"'], ['"ab"', '"ABC"']),
        ({"type": "string", "pattern": '^"[a-z]{3}"$'}, [r'"\"abc\""'], ['""abc""', '"abc"']),
        ({"type": "string", "pattern": r"^C:\\[a-z]{3}$"}, [r'"C:\\abc"'], [r'"C:\abc"']),
        ({"type": "string", "pattern": r"^a\nb$"}, [r'"a\nb"'], ['"a\nb"', r'"a\tb"']),
        ({"type": "string", "pattern": r'^[^"\\]*$'}, ['"ab"', r'"a\nb"'], [r'"a\"b"', r'"a\\b"']),
        ({"type": "string", "pattern": r'^[^"]$'}, [r'"\\"'], [r'"\""']),
        ({"type": "string", "pattern": r"^[\x00-!#-~]+$"}, ['"ab"'], [r'"a\"b"']),
        ({"type": "string", "pattern": r"\Aab\Z"}, ['"ab"'], ['"AabZ"', '"abc"']),
        ({"type": "string", "minLength": 1}, [r'"He said \"no\"\n"'], ['""']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2024-04-31"', '"0000-01-01"']),
        ({"type": "string", "format": "date-time"}, ['"2024-02-29T10:00:00Z"'], ['"2024-02-29T10:00:60Z"']),
        (
            {"type": "object", "patternProperties": {r"^a\\$": {"type": "null"}}, "additionalProperties": False},
            [r'{"a\\": null}'],
            [r'{"a\": null}'],
        ),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-6}, ["0.0000005"], ["0", "0.000001", ""]),
        ({"type": "number", "exclusiveMaximum": 1}, ["0.5"], ["1", "0.99999999999999999999"]),
        ({"type": "integer", "minimum": -5.5, "exclusiveMaximum": 2.5}, ["-5", "2"], ["-6", "3"]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["0", str(2**62)], ["-1", str(2**64)]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [str(-(2**62))], [str(2**63)]),
        ({"enum": [1, "a", None]}, ["1", '"a"', "null"], ["2", '"b"']),
        ({"const": "\0"}, [r'"\u0000"'], ['"\0"', '"0"', '""']),
        ({"enum": ["a\x1f\x7f\n", "b"]}, [r'"a\u001f\u007f\n"', '"b"'], [r'"a\u001f\n"', r'"\u0062"']),
        ({"const": {"\x01": ["\x02"]}}, [r'{"\u0001": ["\u0002"]}'], [r'{"\u0001": ["\u0003"]}']),
        (
            {"properties": {"a": {"const": "\x01"}, "b": {"type": "null"}}, "required": ["a"]},
            [r'{"a": "\u0001"}'],
            [r'{"a": "\u0001", "\u0062": 1}', r'{"\u0061": "\u0001"}'],
        ),
        (
            {"properties": {"a": {"const": "\u00e9\\u0000"}, "b": {"type": "null"}}, "additionalProperties": True},
            ['{"a": "\u00e9\\\\u0000", "c": 1}'],
            [r'{"\u0061": 1}'],
        ),
        ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, ["3", "5"], ["2", "6"]),
        ({"type": "integer", "anyOf": [{"minimum": 3}, {"maximum": -3}]}, ["3", "-4"], ["0", '"a"']),
        ({"type": "object", "minProperties": 1, "additionalProperties": {"type": "integer"}}, ['{"a": 1}'], ["{}"]),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, [], ['{"a": 1}']),
        ({"additionalProperties": True, "properties": {"a": {"type": "null"}}}, ["{}"], [r'{"\u0061": 1}']),
        (
            {"$defs": {"a/b c": {"type": "integer"}}, "$ref": "#/$defs/a~1b%20c"},
            ["1"],
            ['"a"'],
        ),
        ({"$defs": {"A": {"$anchor": "foo", "type": "integer"}}, "$ref": "#foo"}, ["1"], ['"a"']),
        (
            {"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#/prefixItems/0"}},
            ["[null, null]"],
            ["[null, 1]"],
        ),
        ({"propertyNames": {"enum": ["a", "b"]}, "type": "object"}, ['{"b": 1}'], ['{"c": 1}']),
        ({"minimum": 3}, ["3", '"a"', "{}"], ["2"]),
        ({"type": "array", "items": [{"type": "null"}], "additionalItems": False}, ["[null]"], ["[1]", "[null, 1]"]),
        ({"type": "integer", "format": "int64"}, ["1"], ["1.5"]),
        ({"properties": {"a": {"$ref": "#"}}, "type": "object"}, ['{"a": {"a": {}}}', "{}"], ['{"a": 1}', '{"b": 1}']),
    ],
)
def test_a_schema_is_enforced_in_full(
    schema: Any, valid: list[str], invalid: list[str], compiler: GrammarCompiler
) -> None:
    """Each was once ignored, misread, or refused although it can be enforced."""
    spec = make_grammar("json_schema", schema)
    assert [text for text in valid if not accepts(compiler, spec, text)] == []
    assert [text for text in invalid if accepts(compiler, spec, text)] == []


def test_json_has_one_space_after_commas_and_colons_and_no_other(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}, "b": {}}, "required": ["a", "b"]}
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<call>", "content": content, "end": "</call>"}
    for spec, begin, end in (
        (make_grammar("json_schema", schema), "", ""),
        (make_grammar("structural_tag", {"format": tag}), "<call>", "</call>"),
    ):
        assert accepts(compiler, spec, begin + '{"a": [1, "x"], "b": {"c": null}}' + end)
        for text in ('{"a":[1],"b":2}', '{"a": [1],\n"b": 2}', '{ "a": [1], "b": 2}', '{"a": [1], "b": {"c":  null}}'):
            assert not accepts(compiler, spec, begin + text + end), text


ENDLESS = [
    ({"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}, "#/properties/x"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#/items"),
    (
        {
            "$defs": {
                "A": {"type": "object", "properties": {"b": {"$ref": "#/$defs/B"}}, "required": ["b"]},
                "B": {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"]},
            },
            "$ref": "#/$defs/A",
        },
        "#/$defs/",
    ),
    (
        {"type": "object", "allOf": [{"required": ["x"]}, {"properties": {"x": {"$ref": "#"}}}]},
        "#/allOf/1/",
    ),
    ({"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1}, "#/minProperties"),
    ({"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 2}, "#/prefixItems/1"),
    ({"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}]}}, "required": ["a"]}, "#/properties/a"),
]


@pytest.mark.parametrize(("schema", "place"), ENDLESS)
def test_a_schema_without_finite_values_is_refused(schema: Any, place: str, compiler: GrammarCompiler) -> None:
    """The search for forced text had no end, and ended one engine after the other."""
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}
    for spec in (make_grammar("json_schema", schema), make_grammar("structural_tag", {"format": tag})):
        with pytest.raises(InvalidRequestError, match=f"no finite value matches.*: {place.replace('$', '.')}"):
            compiler.compile(spec)


def test_a_part_without_finite_values_is_left_out(compiler: GrammarCompiler) -> None:
    endless = {"type": "object", "properties": {"x": {"$ref": "#/$defs/E"}}, "required": ["x"]}
    for part in ({"$ref": "#/$defs/E"}, endless):
        schema = {
            "$defs": {"E": endless},
            "type": "object",
            "properties": {"a": part, "b": {"anyOf": [part, {"type": "null"}]}, "c": {"type": "array", "items": part}},
        }
        spec = make_grammar("json_schema", schema)
        assert accepts(compiler, spec, '{"b": null, "c": []}')
        assert not accepts(compiler, spec, '{"a": ')
        matcher = compiler.compile(spec).matcher()
        assert all(map(matcher.accept, TOKENIZER.encode('{"')))
        assert not matcher.accept(TOKENIZER.encode("a")[0])


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "#: 'uniqueItems'"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "#/properties/a: 'not'"),
        ({"if": {}, "then": {}}, "#: 'if'"),
        ({"type": "array", "contains": {"const": 1}}, "#: 'contains'"),
        ({"type": "string", "pattern": "^(?!foo)[a-z]+$"}, "#: 'pattern' is '.*look-ahead"),
        ({"patternProperties": {"(?=a)": {}}}, "#: 'patternProperties' is '.*look-ahead"),
        ({"$defs": {"a b": {"type": "number", "multipleOf": 0.01}}}, "#/.defs/a%20b: 'multipleOf' 0.01 is not exact"),
        ({"type": "integer", "multipleOf": -3}, "#: 'multipleOf' is -3, not a number above 0"),
        ({"type": "integer", "multipleOf": 65536}, "#: 'multipleOf' 65536 is above 10000"),
        ({"enum": [12345678901234567890]}, "#: the integer 12345678901234567890 has more than 53 bits"),
        ({"const": {"a": [2**60 + 1]}}, "#: the integer"),
        ({"type": "string", "format": "iri"}, "#: 'format' 'iri' is not supported"),
        ({"$ref": "https://example.com/schema"}, "#: '.ref' to 'https://example.com/schema'"),
        ({"$ref": "#nowhere"}, "#: '.ref' to '#nowhere' names an anchor"),
        ({"$ref": "#/$defs/nowhere"}, "#/.defs/nowhere: '.ref' names this place"),
        ({"$ref": "#"}, "#: it applies itself"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "#: it applies itself"),
        ({"$defs": {"a": {"$id": "a"}}}, "#/.defs/a: '.id' of a part"),
        ({"minProperties": 2}, "#: 'minProperties' of 2"),
        ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, "#: no integer lies between"),
        ({"type": "number", "exclusiveMinimum": -7, "exclusiveMaximum": -7}, "#: no number lies between"),
        ({"type": "integer", "minimum": 10**20}, "#: its bounds allow only integers of more than 64 bits"),
        ({"type": "object", "propertyNames": {"minLength": 3}}, "#: 'propertyNames'"),
        ({"type": {"a": 1}}, "#: 'type' is"),
        ({"required": "a"}, "#: 'required' is a, not a list"),
        ({"properties": {"a": 3}}, "#: 'properties' is .*, not an object of schemas"),
        ({"allOf": []}, r"#: 'allOf' is \[\], not a list"),
        ({"minimum": "3"}, "#: 'minimum' is 3, not a number"),
        ({"maxItems": 1.5}, "#: 'maxItems' is 1.5, not an integer"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(schema: Any, place: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"cannot be enforced at {place}"):
        enforceable(json.loads(json.dumps(schema)))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "a$b"}}}, "at #/properties/a: .*lookarounds"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "const": 3}, "Unsatisfiable"),
        ({"properties": {"a": {"const": "\x01"}}, "additionalProperties": {}}, "at #: it allows other properties"),
        ({"type": "string", "pattern": "^\\u0001$"}, "allows no first token"),
    ],
)
def test_what_the_compiler_refuses_is_explained(schema: Any, message: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        compiler.compile(make_grammar("json_schema", schema))
    assert "x-guidance" not in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
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
        {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "http://a/b", "type": "object"},
    ],
)
def test_annotations_change_nothing(schema: Any, compiler: GrammarCompiler) -> None:
    compiler.compile(make_grammar("json_schema", schema))


def test_other_properties_are_allowed_only_where_schemas_are_combined_or_say_so(compiler: GrammarCompiler) -> None:
    part = {"properties": {"a": {"type": "null"}}, "type": "object"}
    other = {"properties": {"b": {"type": "null"}}, "type": "object", "required": ["b"]}
    closed = make_grammar("json_schema", part)
    assert not accepts(compiler, closed, '{"b": null}')
    assert accepts(compiler, make_grammar("json_schema", {"allOf": [part, other]}), '{"a": null, "b": null}')
    assert accepts(compiler, make_grammar("json_schema", {**part, "anyOf": [other]}), '{"a": null, "b": null}')
    assert not accepts(compiler, make_grammar("json_schema", {"anyOf": [part, {"type": "null"}]}), '{"b": null}')


def test_a_deep_schema_is_refused_without_recursion() -> None:
    schema: Any = {"type": "null"}
    for _ in range(20_000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequestError, match="nested more than 100 times"):
        enforceable(schema)


def test_the_schemas_are_the_same_each_time_and_all_are_schemas() -> None:
    made = schemas()
    assert made == schemas()
    assert len({json.dumps(schema) for schema in made}) == 200
    for schema in made:
        jsonschema.Draft202012Validator.check_schema(schema)
