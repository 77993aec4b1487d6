"""Objects inside request bodies: their base, texts, unions by `type`, and bounds of nested JSON."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, GetCoreSchemaHandler, Tag
from pydantic_core import CoreSchema, core_schema

from specray.errors import InvalidRequestError
from specray.server.errors import UNSUPPORTED_TYPE, short_repr

MAX_DEPTH = 32  # of a schema or of a call's arguments
MAX_PARTS = 8192  # of the contents of all messages together


class BodyPart(BaseModel):
    """An object inside a body: strict JSON types; fields that are not declared are kept."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, protected_namespaces=())


class HostedTool(BodyPart):
    """A tool that the API's own company would run, or that only its models know. The model does not see it."""

    type: Annotated[str, Field(max_length=64)]


@dataclass(frozen=True)
class ByType:
    """Chooses a member of the union that it annotates by the field `type`: the one whose Literal has it.

    The member without that field is for objects of type `default`, the member that is no object for text. HostedTool is
    for types that begin with one of `hosted`.
    """

    expected: str  # which types there are, for errors
    default: str | None = None
    hosted: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schemas = {member: handler.generate_schema(member) for member in get_args(union)}
        return core_schema.tagged_union_schema(
            {tag: schema for member, schema in schemas.items() for tag in self._tags(member)},
            self._tag,
            custom_error_type=UNSUPPORTED_TYPE,
            custom_error_message=self.expected,
        )

    def _tags(self, member: Any) -> list[str]:
        if not hasattr(member, "model_fields"):
            return [_TEXT]
        if member is HostedTool:
            return [_HOSTED]
        if "type" not in member.model_fields:
            return [_tag_of(self.default)]
        annotation = member.model_fields["type"].annotation  # a Literal, or one that may be null
        kinds = [kind for part in (annotation, *get_args(annotation)) for kind in get_args(part)]
        return [_tag_of(kind) for kind in kinds if isinstance(kind, str)]

    def _tag(self, value: object) -> str:
        if isinstance(value, str):
            return _TEXT
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if self.hosted and isinstance(kind, str) and kind.startswith(self.hosted):
            return _HOSTED
        return _tag_of(self.default if kind is None else kind)


def _tag_of(kind: object) -> str:
    """Its first bracket keeps a tag out of the locations of errors."""
    return f"[{kind}]"


_TEXT, _HOSTED = "[text", "[hosted"  # no value of `type` has these tags, which do not end in a bracket


# Chooses between text and a list.
BY_SHAPE = Discriminator(lambda value: "[list]" if isinstance(value, list) else "[text]")
Text = Annotated[str, Tag("[text]")]


class TextPart(BodyPart):
    """One part of a message's content. Only text is supported."""

    type: Literal["text"]
    text: str


def _joined(value: object) -> object:
    """Join text parts to one string. Any other part is rejected by its index."""
    if not isinstance(value, list):
        return value
    texts = []
    for index, part in enumerate(value):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else part
            raise InvalidRequestError(
                f"content part {index} is {short_repr(kind)}; only parts of type 'text' with a string are supported",
                "messages",
            )
        texts.append(part["text"])
    return "".join(texts)


JoinedText = Annotated[str, BeforeValidator(_joined, json_schema_input_type=str | list[TextPart])]


def depth(value: object) -> int:
    """Levels of nesting of a JSON value, up to one more than MAX_DEPTH: 0 for a scalar."""
    level, values = 0, [value]
    while containers := [item for item in values if isinstance(item, dict | list)]:
        level += 1
        if level > MAX_DEPTH:
            break
        values = [inner for item in containers for inner in (item.values() if isinstance(item, dict) else item)]
    return level


def is_larger(value: object, limit: int) -> bool:
    """Whether a JSON value has more than `limit` values inside, each of which takes a character at least.

    Looks at no more than about that many, down to MAX_DEPTH levels.
    """
    count, values = 0, [value]
    for _ in range(MAX_DEPTH):
        containers = [item for item in values if isinstance(item, dict | list)]
        count += sum(map(len, containers))
        if count > limit:
            return True
        values = [inner for item in containers for inner in (item.values() if isinstance(item, dict) else item)]
    return False


def check_number_of_parts(messages: object, field: str) -> None:
    """InvalidRequestError if the contents of these messages have too many parts, those of tool results included."""
    if not isinstance(messages, list) or len(messages) > MAX_PARTS:
        return  # for the schema to refuse
    contents = [item.get(name) for item in messages if isinstance(item, dict) for name in ("content", "output")]
    parts = [part for content in contents if isinstance(content, list) for part in content[: MAX_PARTS + 1]]
    count = len(parts)
    if count <= MAX_PARTS:
        inner = [part.get("content") for part in parts if isinstance(part, dict)]
        count += sum(len(content) for content in inner if isinstance(content, list))
    if count > MAX_PARTS:
        raise InvalidRequestError(
            f"the contents of {field} have more than {MAX_PARTS} parts; join texts, or send fewer messages", field
        )
