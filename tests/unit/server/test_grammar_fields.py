"""The fields of OpenAI, vLLM and SGLang that name a grammar."""

from typing import Any

import pytest

from specray.errors import InvalidRequestError
from specray.grammar import GrammarSpec
from specray.server.chat.protocol import ChatRequest
from specray.server.completions.protocol import CompletionRequest
from specray.server.generate.protocol import GenerateRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
AS_SCHEMA = GrammarSpec("json_schema", TEXT)
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
AS_TAG = GrammarSpec("structural_tag", '{"type": "structural_tag", "format": {"type": "any_text"}}')

SGLANG: list[tuple[dict[str, Any], GrammarSpec | None]] = [
    ({"json_schema": TEXT}, AS_SCHEMA),
    ({"json_schema": SCHEMA}, AS_SCHEMA),
    ({"regex": "a+"}, GrammarSpec("regex", "a+")),
    ({"ebnf": 'root ::= "a"'}, GrammarSpec("ebnf", 'root ::= "a"')),
    ({"structural_tag": TAG}, AS_TAG),
    ({"regex": None}, None),
]
OPENAI_AND_VLLM: list[tuple[dict[str, Any], GrammarSpec | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object")),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, AS_SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, AS_SCHEMA),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "strict": True, "description": "b", "schema": SCHEMA},
            }
        },
        AS_SCHEMA,
    ),
    ({"response_format": TAG}, AS_TAG),
    ({"structured_outputs": {"json": SCHEMA}}, AS_SCHEMA),
    ({"structured_outputs": {"json": TEXT, "regex": None, "disable_any_whitespace": True}}, AS_SCHEMA),
    ({"structured_outputs": {"regex": "a+"}}, GrammarSpec("regex", "a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarSpec("choice", '["a", "b"]')),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, GrammarSpec("ebnf", 'root ::= "a"')),
    ({"structured_outputs": {"structural_tag": TAG}}, AS_TAG),
    ({"structured_outputs": {"json_object": True}}, GrammarSpec("json_object")),
    ({"guided_json": SCHEMA}, AS_SCHEMA),
    ({"guided_regex": "a+"}, GrammarSpec("regex", "a+")),
    ({"guided_choice": ["a", "b"]}, GrammarSpec("choice", '["a", "b"]')),
    ({"guided_grammar": 'root ::= "a"'}, GrammarSpec("ebnf", 'root ::= "a"')),
]
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": "json"}, "response_format", "expected an object"),
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.schema", "has no member 'schema'"),
    ({"response_format": {"type": "json_object", "strict": True}}, "response_format.strict", "has no member"),
    ({"response_format": {"type": ["text"]}}, "response_format", "expected an object of type"),
    *(
        ({"structured_outputs": {"json": SCHEMA, name: value}}, f"structured_outputs.{name}", "is not supported")
        for name, value in (("disable_additional_properties", True), ("whitespace_pattern", " "))
    ),
    ({"response_format": {"type": "xml"}}, "response_format", "expected an object of type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "expected an object with a schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
        "response_format.json_schema.schema",
        "must be a JSON object",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "shema": 1}}},
        "response_format.json_schema",
        "has no member 'shema'",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "has no grammar"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", "send exactly one"),
    ({"structured_outputs": {"prose": "a"}}, "structured_outputs", "has 'prose'"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "one or more strings"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_regex": "a", "regex": "b"}, "guided_regex", "regex and guided_regex both name a grammar"),
    ({"response_format": {"type": "json_object"}, "ebnf": "x"}, "response_format", "both name a grammar"),
]


@pytest.mark.parametrize(("fields", "grammar"), SGLANG + OPENAI_AND_VLLM)
def test_chat_and_text_completions_take_all_fields(fields: dict[str, Any], grammar: GrammarSpec | None) -> None:
    chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}]} | fields)
    completion = CompletionRequest.model_validate({"prompt": "hi"} | fields)
    assert chat.sampling(None).grammar == completion.sampling().grammar == grammar
    assert not chat.ignored_fields


@pytest.mark.parametrize(("fields", "grammar"), SGLANG)
def test_generate_takes_sglangs_fields(fields: dict[str, Any], grammar: GrammarSpec | None) -> None:
    body = GenerateRequest.model_validate({"text": "hi", "sampling_params": fields})
    assert [params.grammar for params in body.sampling()] == [grammar]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_malformed_and_conflicting_fields_are_refused(fields: dict[str, Any], param: str, message: str) -> None:
    body = CompletionRequest.model_validate({"prompt": "hi"} | fields)
    with pytest.raises(InvalidRequestError, match=message) as caught:
        body.sampling()
    assert caught.value.param == param
