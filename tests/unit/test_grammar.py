"""Grammars as requests name them: their form is checked before anything is compiled."""

import pytest

from specray.errors import InvalidRequestError
from specray.grammar import MAX_GRAMMAR_LENGTH, GrammarKind, GrammarSpec, as_format, make_grammar
from specray.sampling_params import SamplingParams, make_sampling_params


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("json_object", True, ""),
        ("json_schema", {"type": "object"}, '{"type": "object"}'),
        ("json_schema", '{"type":"object"}', '{"type": "object"}'),
        ("json_schema", {}, "{}"),
        ("regex", "[0-9]+", "[0-9]+"),
        ("choice", ["yes", "no"], '["yes", "no"]'),
        ("ebnf", 'root ::= "a"', 'root ::= "a"'),
        ("structural_tag", {"format": {"type": "any_text"}}, '{"format": {"type": "any_text"}}'),
    ],
)
def test_a_grammar_is_text_of_its_kind(kind: GrammarKind, value: object, text: str) -> None:
    assert make_grammar(kind, value) == GrammarSpec(kind, text)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", "{"),
        ("json_schema", "[" * 100_000),
        ("json_schema", [1]),
        ("json_schema", {"const": object()}),
        ("regex", ""),
        ("regex", 5),
        ("regex", "\ud800"),
        ("json_schema", {"const": "\ud800"}),
        ("json_schema", '{"title": "\\ud800"}'),
        ("choice", ["\udfff"]),
        ("ebnf", 'root ::= "\ud800"'),
        ("structural_tag", {"format": {"type": "const_string", "value": "\ud800"}}),
        ("choice", []),
        ("choice", ["a", ""]),
        ("choice", '"abc"'),
        ("ebnf", "a" * (MAX_GRAMMAR_LENGTH + 1)),
        ("structural_tag", "[]"),
    ],
)
def test_a_value_of_another_form_is_refused_with_the_name_of_its_field(kind: GrammarKind, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"^guided ") as caught:
        make_grammar(kind, value, "guided")
    assert caught.value.param == "guided"


def test_sampling_params_carry_a_grammar() -> None:
    grammar = make_grammar("choice", ["a"])
    assert make_sampling_params(grammar=grammar) == SamplingParams(grammar=grammar)
    with pytest.raises(InvalidRequestError):
        make_sampling_params(grammar=("prolog", "a."))


@pytest.mark.parametrize(
    ("kind", "value", "format_"),
    [
        ("json_object", "", {"type": "json_schema", "json_schema": {"type": "object"}}),
        ("json_schema", {"type": "null"}, {"type": "json_schema", "json_schema": {"type": "null"}}),
        ("regex", "a+", {"type": "regex", "pattern": "a+"}),
        ("choice", ["a", "b"], {"type": "or", "elements": [{"type": "const_string", "value": text} for text in "ab"]}),
        ("ebnf", 'root ::= "a"', {"type": "grammar", "grammar": 'root ::= "a"'}),
        ("structural_tag", {"type": "structural_tag", "format": {"type": "any_text"}}, {"type": "any_text"}),
        (
            "structural_tag",
            {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]},
            {
                "type": "triggered_tags",
                "triggers": ["<a"],
                "tags": [
                    {
                        "type": "tag",
                        "begin": "<a>",
                        "content": {"type": "json_schema", "json_schema": {}},
                        "end": "</a>",
                    }
                ],
            },
        ),
    ],
)
def test_every_grammar_is_a_format_that_can_follow_another(
    kind: GrammarKind, value: object, format_: dict[str, object]
) -> None:
    assert as_format(make_grammar(kind, value)) == format_
