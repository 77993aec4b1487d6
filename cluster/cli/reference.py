"""The configuration reference as a Markdown table: `python -m cluster.cli.reference`."""

from collections.abc import Iterator
from typing import Any

from annotated_types import BaseMetadata, GroupedMetadata
from pydantic.fields import FieldInfo

from cluster.cli.flags import Flag, flags
from cluster.config import AppConfig

BOUNDS = {"Ge": "≥", "Gt": ">", "Le": "≤", "Lt": "<"}


def reference() -> str:
    """A row per option; options in groups have dotted names."""
    lines = ["| option | default | values | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{flag.dotted}` | `{flag.default}` | {_values(flag)} | {flag.field.description} |" for flag in _rows()
    ]
    return "\n".join(lines)


def _rows() -> list[Flag]:
    """Engine options first."""
    return sorted(flags(AppConfig), key=lambda flag: len(flag.path) > 1)


def _values(flag: Flag) -> str:
    choices = [f"`{kind}`" for kind in flag.types if isinstance(kind, str)]
    limits = [(BOUNDS.get(type(part).__name__), part) for part in _metadata(flag.field)]
    return ", ".join(choices + [f"{sign} {_limit(part)}" for sign, part in limits if sign])


def _metadata(field: FieldInfo) -> Iterator[Any]:
    """The field's metadata and, inside `Annotated[...] | None`, that of its type."""
    yield from field.metadata
    for part in getattr(field.annotation, "__args__", ()):
        for item in getattr(part, "__metadata__", ()):
            yield from item.metadata if isinstance(item, FieldInfo) else [item]


def _limit(part: BaseMetadata | GroupedMetadata) -> str:
    value = next(getattr(part, slot) for slot in ("ge", "gt", "le", "lt") if hasattr(part, slot))
    return f"{value:,.12g}"


if __name__ == "__main__":
    print(reference())
