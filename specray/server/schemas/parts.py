"""Objects inside request bodies: their base, texts, unions by `type`, and bounds of nested JSON."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Tag

from specray.errors import InvalidRequestError
from specray.server.errors import UNSUPPORTED_TYPE, short_repr

MAX_DEPTH = 32  # of a schema or of a call's arguments
MAX_PARTS = 8192  # of the contents of all messages together


class BodyPart(BaseModel):
    """An object inside a body: strict JSON types; fields that are not declared are kept."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, protected_namespaces=())


def by_type(expected: str, default: str | None = None) -> Discriminator:
    """Chooses a member of a union by the field `type`, whose tag is that type in brackets; see `Tag`.

    Brackets keep tags out of the locations of errors. `expected` says which types there are.
    """

    def tag(value: object) -> str:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
        return f"[{kind}]"

    return Discriminator(tag, custom_error_type=UNSUPPORTED_TYPE, custom_error_message=expected)


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
