"""The README's configuration reference, made from the configuration itself: `python -m cluster.cli.reference`.

Not here: what an option does; its description says that where it is defined.
"""

from collections.abc import Iterator
from typing import Any

from annotated_types import BaseMetadata, GroupedMetadata
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cluster.config import AppConfig

BOUNDS = {"Ge": "≥", "Gt": ">", "Le": "≤", "Lt": "<"}


def reference() -> str:
    """A Markdown table of every option, groups by their dotted names."""
    lines = ["| option | default | bounds | meaning |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {default} | {bounds} | {meaning} |" for name, default, bounds, meaning in _rows(AppConfig)]
    return "\n".join(lines)


def _rows(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    groups: list[tuple[str, type[BaseModel]]] = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            groups.append((name, field.annotation))
        else:
            yield prefix + name, _default(field), _bounds(field), field.description or ""
    for name, group in groups:
        yield from _rows(group, f"{prefix}{name}.")


def _default(field: FieldInfo) -> str:
    return "null" if field.default is None else f"`{str(field.default).lower()}`"


def _bounds(field: FieldInfo) -> str:
    metadata = [*field.metadata, *_nested_metadata(field.annotation)]
    limits = [(BOUNDS.get(type(part).__name__), part) for part in metadata]
    return ", ".join(f"{sign} {_value(part)}" for sign, part in limits if sign) or _choices(field.annotation)


def _nested_metadata(annotation: Any) -> Iterator[Any]:
    """Bounds inside `Annotated[...] | None`."""
    for part in getattr(annotation, "__args__", ()):
        for item in getattr(part, "__metadata__", ()):
            yield from item.metadata if isinstance(item, FieldInfo) else [item]


def _value(part: BaseMetadata | GroupedMetadata) -> str:
    value = next(getattr(part, slot) for slot in ("ge", "gt", "le", "lt") if hasattr(part, slot))
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _choices(annotation: Any) -> str:
    values = getattr(annotation, "__args__", ())
    return ", ".join(f"`{value}`" for value in values if isinstance(value, str))


if __name__ == "__main__":
    print(reference())
