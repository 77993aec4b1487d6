"""The fields of request bodies that name a grammar: OpenAI's, vLLM's and SGLang's."""

from collections.abc import Callable, Mapping
from typing import Any

from specray.errors import InvalidRequestError
from specray.grammar import GrammarKind, GrammarSpec, make_grammar
from specray.server.errors import short_repr

# Fields with one grammar each, and its kind.
SGLANG_FIELDS: dict[str, GrammarKind] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "structural_tag": "structural_tag",
}
VLLM_FIELDS: dict[str, GrammarKind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
}
# Members of vLLM's `structured_outputs`.
_MEMBERS: dict[str, GrammarKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}
# Members without effect: JSON always has one form, without further white space.
_HARMLESS_MEMBERS = ("disable_fallback", "disable_any_whitespace")
# Members that would change the grammar -> what to do instead.
_REFUSED_MEMBERS = {
    "disable_additional_properties": "put additionalProperties: false into the schema",
    "whitespace_pattern": "leave it out; JSON always has one form here",
}
_SCHEMA = "response_format.schema"
_FORMAT_MEMBERS: dict[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema",),
}
_JSON_SCHEMA_MEMBERS = ("name", "description", "schema", "strict")


def grammar_of(fields: Mapping[str, Any]) -> GrammarSpec | None:
    """The grammar that a body's fields name, or None. InvalidRequestError if it is malformed or one of several."""
    found: dict[str, GrammarSpec] = {}
    for name, kind in (SGLANG_FIELDS | VLLM_FIELDS).items():
        if fields.get(name) is not None:
            found[name] = make_grammar(kind, fields[name], name)
    for name, read in _READERS.items():
        if fields.get(name) is not None and (grammar := read(fields[name])) is not None:
            found[name] = grammar
    if len(found) > 1:
        first, second, *_ = found
        raise InvalidRequestError(f"{first} and {second} both name a grammar; send one of them", second)
    return next(iter(found.values()), None)


def _response_format(value: object) -> GrammarSpec | None:
    """OpenAI's object, and vLLM's and SGLang's type `structural_tag` of it."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if isinstance(value, Mapping) and isinstance(kind, str):
        _refuse_unknown_members(value, kind)
    if kind == "text":
        return None
    if kind == "json_object":
        assert isinstance(value, Mapping)
        schema = value.get("schema")  # of llama.cpp and other servers
        return make_grammar("json_object") if schema is None else make_grammar("json_schema", schema, _SCHEMA)
    if kind == "json_schema":
        assert isinstance(value, Mapping)
        return _named_schema(value.get("json_schema"))
    if kind == "structural_tag":
        return make_grammar("structural_tag", value, "response_format")
    raise InvalidRequestError(
        f"response_format={short_repr(value)}: expected an object of type text, json_object, json_schema or "
        "structural_tag",
        "response_format",
    )


def _refuse_unknown_members(value: Mapping[str, object], kind: str) -> None:
    """A member that is not read may be a schema in the wrong place."""
    for name in value if kind in _FORMAT_MEMBERS else ():
        if name not in ("type", *_FORMAT_MEMBERS[kind]) and value[name] is not None:
            raise InvalidRequestError(
                f"response_format of type {kind} has no member {short_repr(name)}; leave it out",
                f"response_format.{str(name)[:64]}",
            )


def _named_schema(value: object) -> GrammarSpec:
    """`strict` makes no difference: the schema is always enforced."""
    param = "response_format.json_schema"
    if not isinstance(value, Mapping) or "schema" not in value:
        raise InvalidRequestError(f"{param}={short_repr(value)}: expected an object with a schema", param)
    if unknown := [name for name in value if name not in _JSON_SCHEMA_MEMBERS]:
        raise InvalidRequestError(f"{param} has no member {short_repr(unknown[0])}", param)
    return make_grammar("json_schema", value["schema"], f"{param}.schema")


def _structured_outputs(value: object) -> GrammarSpec | None:
    """vLLM's object with exactly one grammar."""
    param = "structured_outputs"
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{param}={short_repr(value)}: expected an object", param)
    members = {name: member for name, member in value.items() if member not in (None, False)}
    for name, advice in _REFUSED_MEMBERS.items():
        if name in members:
            raise InvalidRequestError(f"{param}.{name} is not supported; {advice}", f"{param}.{name}")
    wanted = [name for name in members if name not in _HARMLESS_MEMBERS]
    if len(wanted) != 1 or wanted[0] not in (*_MEMBERS, "json_object"):
        raise InvalidRequestError(
            f"{param} has {', '.join(map(short_repr, wanted)) or 'no grammar'}; send exactly one of "
            f"{', '.join(_MEMBERS)} and json_object",
            param,
        )
    [name] = wanted
    return make_grammar(_MEMBERS.get(name, "json_object"), members[name], f"{param}.{name}")


_READERS: dict[str, Callable[[object], GrammarSpec | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
}
